"""Makes docs/reference/program.md from the --help of each command of the built program, which is
HALFSTEP_PROGRAM."""

import os
import re
import subprocess

HEAD = """# Commands and options

For those who look up an option of the program `halfstep`. This page is what
`halfstep COMMAND --help` prints. [The program](../program.md) shows what each command is for.
"""
#: a line of a list: an option, or a word, and its meaning after two blanks
_ENTRY = re.compile(r"  (\S+(?: [A-Z<][^ ]*)?(?: \[options\])?)  +(?=\S)")
_COMMAND = re.compile(r"^  ([a-z]+) +(?=[a-z])", re.M)


def help_of(*command):
    """Returns the help of a command, or that of the program."""
    program = os.environ["HALFSTEP_PROGRAM"]
    run = subprocess.run([program, *command, "--help"], check=True, stdout=subprocess.PIPE)
    return run.stdout.decode()


def commands():
    """Returns all commands as lists of words, those inside another one after it."""
    for name in _COMMAND.findall(help_of().split("\n\n")[2]):
        yield [name]
        for inner in re.findall(rf"see halfstep {name} (\w+) --help", help_of(name)):
            yield [name, inner]


def plain(text):
    """Returns a text as Markdown that shows it as it is. Options and what is in backticks are
    code."""
    text = re.sub(r"(?<![`\w-])--[a-z][a-z0-9-]*", r"`\g<0>`", " ".join(text.split()))
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"[*_<|\\[]", r"\\\g<0>", part) for part in parts[::2]]
    return "".join(parts)


def block_of(lines):
    """Returns the Markdown of lines that belong together: text, a list of options, or a command."""
    title = []
    if lines[0].endswith(":") and len(lines) > 1 and lines[1].startswith("  "):
        title = [f"**{plain(lines[0][:-1])}**", ""]
        lines = lines[1:]
    if not lines[0].startswith("  "):
        return [*title, plain(" ".join(lines)), ""]
    rows = []
    for line in lines:
        found = _ENTRY.match(line)
        if found and "halfstep " not in line[: found.end()]:
            rows.append([found[1], line[found.end() :]])
        elif rows and line.startswith("    "):
            rows[-1][1] += " " + line
        else:
            return [*title, "```", *(line[2:] for line in lines), "```", ""]
    head = f"| {'option' if rows[0][0].startswith('--') else 'name'} | meaning |"
    rows = [f"| `{name}` | {plain(text)} |" for name, text in rows]
    return [*title, head, "|---|---|", *rows, ""]


def section(command):
    """Returns the section of a command."""
    usage, *blocks = help_of(*command).rstrip("\n").split("\n\n")
    usage = [line[len("Usage: ") :].strip() for line in usage.splitlines()]
    out = ["## " + " ".join(["halfstep", *command]), "", "```", *usage, "```", ""]
    for block in blocks:
        out += block_of(block.split("\n"))
    return out


def pages(root):
    """Returns the page by its path under docs."""
    out = [HEAD]
    for command in commands():
        out += section(command)
    return {"reference/program.md": "\n".join(out)}
