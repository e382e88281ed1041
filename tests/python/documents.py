"""Reads documents and runs their code as a reader would. The tests of all documents use it.

A block of code with title="NAME" is a file of this name. In a block of type `console`, each line
after "$ " is a command for bash; one that ends in a backslash goes on in the next line. The lines
below a command are its output: numbers and hashes stand for any, and "..." stands for anything in a
line, or for any lines if it is a line. Blocks of type `python` go on from those above them.
<!-- not run: REASON --> above a block leaves it out. Other blocks are for reading only."""

import dataclasses
import os
import re
import subprocess
import textwrap
from pathlib import Path

ROOT = Path(os.environ.get("HALFSTEP_SOURCE") or Path(__file__).parents[2])
#: a hash, or digits that do not belong to a word such as bf16
NUMBER = re.compile(
    r"\b[0-9a-f]{16}\b|(?<![\w.])[-+]?(?<![A-Za-z_]-)\d[\d,]*(\.\d+)?([eE][-+]?\d+)?"
)
#: longer than any command of a page
SECONDS = 300
#: now and then the threads of gloo, which torchrun's ranks use, end a finished process with this
CRASH_OF_GLOO = "terminate called without an active exception"


class Wrong(Exception):
    """A page breaks the rules above, or its code does not do what the page says."""


@dataclasses.dataclass
class Block:
    """A block of code: where it stands, what stands on its first line, and why it is left out."""

    page: str
    line: int
    section: str
    language: str
    title: str
    text: str
    reason: str

    def run(self, names=None):
        """Runs the Python of a block with these names, and returns them with those that it has
        made. A traceback has the page's lines."""
        names = {} if names is None else names
        exec(compile("\n" * self.line + self.text, self.page, "exec"), names)
        return names


def parse(text, page="page"):
    """Returns the blocks of a text."""
    found, section, reason, fence, block = [], "", "", None, None
    for number, line in enumerate(text.splitlines(), 1):
        if fence:
            if line.strip() != fence:
                block.text += line + "\n"
                continue
            fence, reason = None, ""
            block.text = textwrap.dedent(block.text)
        elif begin := re.match(r"\s*(```+)(.*)", line):
            fence, info = begin[1], begin[2].strip()
            title = re.search(r'\btitle="([^"]*)"', info)
            language = "".join(info.split()[:1])
            block = Block(page, number, section, language, title[1] if title else "", "", reason)
            found.append(block)
        elif reason:
            raise Wrong(f"line {number}: a block must follow <!-- not run: {reason} -->")
        elif "<!-- not run" in line:
            comment = re.fullmatch(r"\s*<!-- not run: *(\S.*?) *-->\s*", line)
            if not comment:
                raise Wrong(f"line {number}: write <!-- not run: REASON -->, not {line!r}")
            reason = comment[1]
        elif heading := re.match(r"##+ (.*)", line):
            section = heading[1]
    if fence or reason:
        raise Wrong(f"line {number}: a block does not end, or is missing at the end of the page")
    return found


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page, language=None, section=None):
    """Returns the blocks of a page of this checkout, without those that are left out."""
    return [
        block
        for block in parse(text_of(page), page)
        if not block.reason
        and language in (None, block.language)
        and section in (None, block.section)
    ]


# ---- Commands ------------------------------------------------------------------------------------


def commands_of(text):
    """Returns the (command, lines of output) of a console block."""
    found = []
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while command.endswith("\\"):
                command += "\n" + next(lines, "")
            found.append((command, []))
        elif not found:
            raise Wrong(f"a console block begins with {line!r} and not with '$ '")
        else:
            found[-1][1].append(line)
    return found


def plain(line):
    """Returns a line with # for its numbers and hashes, and single blanks."""
    return " ".join(NUMBER.sub("#", line).split())


def fits(wanted, given):
    """Tells whether a line is that of a page, where "..." stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, wanted.split("..."))), given) is not None


def agree(wanted, given):
    """Tells whether lines of output are those of a page."""
    wanted, given = ([w for w in map(plain, lines) if w] for lines in (wanted, given))
    places = {0}
    for line in wanted:
        if line == "...":
            places = set(range(min(places), len(given) + 1))
        else:
            places = {i + 1 for i in places if i < len(given) and fits(line, given[i])}
        if not places:
            return False
    return len(given) in places


def run_command(command, folder, environment):
    """Runs a command, and once more if gloo has crashed. Returns its status and all that it has
    printed."""
    for _ in range(2):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS,
        )
        if not (done.returncode and CRASH_OF_GLOO in done.stdout):
            break
    return done.returncode, done.stdout


def write_file(block, folder):
    """Writes the file that a block is."""
    path = folder / block.title
    if folder.resolve() not in path.resolve().parents:
        raise Wrong(f"title={block.title!r} is outside the page's folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text, encoding="utf-8")


def run_page(text, folder, environment):
    """Writes the files of a page and runs its commands in a folder. Returns what each command has
    printed: a list of (command, lines of the page, output)."""
    printed = []
    for block in parse(text):
        if block.reason:
            continue
        if block.title:
            write_file(block, folder)
        elif block.language == "console":
            for command, lines in commands_of(block.text):
                status, output = run_command(command, folder, environment)
                if status:
                    raise Wrong(f"$ {command}\nends with status {status}:\n{output}")
                if any(map(str.strip, lines)) and not agree(lines, output.splitlines()):
                    page = "\n".join(lines)
                    raise Wrong(f"$ {command}\nThe page says:\n{page}\nIt printed:\n{output}")
                printed.append((command, lines, output))
    return printed
