"""Runs the code of docs/tutorials and docs/start as a reader would: files are written, commands are
run, and their output is compared with the page.

On a page, a block of code with title="NAME" is a file of this name. In a block of type `console`,
each line after "$ " is a command for bash; one that ends in a backslash goes on in the next line.
The lines below a command are its output: numbers and hashes stand for any, and "..." stands for
anything in a line, or for any lines if it is a line.
<!-- not run: REASON --> above a block leaves it out. Other blocks are for reading only."""

import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(os.environ.get("HALFSTEP_SOURCE") or pathlib.Path(__file__).parents[3])
PAGES = [
    f"{folder}/{path.name}"
    for folder in ("start", "tutorials")
    for path in sorted((ROOT / "docs" / folder).glob("*.md"))
]
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


def commands_of(body):
    """Returns the (command, lines of output) of a console block."""
    found = []
    lines = iter(body.splitlines())
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


def blocks_of(text):
    """Returns what a page asks for, in order: ("file", name, content), ("command", command, lines)
    or ("left out", reason)."""
    found, reason, fence, where = [], None, None, 0
    body = info = None
    for number, line in enumerate(text.splitlines(), 1):
        if fence:
            if line.strip() != fence:
                body.append(line)
                continue
            fence = None
            content = textwrap.dedent("\n".join(body)) + "\n"
            title = re.search(r'\btitle="([^"]*)"', info)
            if reason is not None:
                found.append(("left out", reason))
            elif title:
                found.append(("file", title[1], content))
            elif info.split()[:1] == ["console"]:
                found += [("command", *command) for command in commands_of(content)]
            reason = None
        elif begin := re.match(r"\s*(```+)(.*)", line):
            fence, info, body, where = begin[1], begin[2].strip(), [], number
        elif reason is not None:
            raise Wrong(f"line {number}: a block must follow <!-- not run: {reason} -->")
        elif "<!-- not run" in line:
            comment = re.fullmatch(r"\s*<!-- not run: *(\S.*?) *-->\s*", line)
            if not comment:
                raise Wrong(f"line {number}: write <!-- not run: REASON -->, not {line!r}")
            reason = comment[1]
    if fence or reason is not None:
        raise Wrong(f"line {where}: a block does not end, or is missing at the end of the page")
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


def run_page(text, folder, environment):
    """Does what a page says in a folder. Returns the output of all commands."""
    output = ""
    for kind, *block in blocks_of(text):
        if kind == "file":
            path = folder / block[0]
            if folder.resolve() not in path.resolve().parents:
                raise Wrong(f"title={block[0]!r} is outside the page's folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block[1], encoding="utf-8")
        elif kind == "command":
            command, lines = block
            status, printed = run_command(command, folder, environment)
            if status:
                raise Wrong(f"$ {command}\nends with status {status}:\n{printed}")
            if any(map(str.strip, lines)) and not agree(lines, printed.splitlines()):
                page = "\n".join(lines)
                raise Wrong(f"$ {command}\nThe page says:\n{page}\nIt printed:\n{printed}")
            output += printed
    return output


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Returns the variables of a shell in which package, program and C library are installed."""
    build = os.environ.get("HALFSTEP_BUILD")
    if not (build and os.path.exists(os.path.join(build, "halfstep"))):
        pytest.skip("the program is not built, or HALFSTEP_BUILD does not say where")
    if not shutil.which("cmake"):
        pytest.skip("cmake is not installed")
    prefix = tmp_path_factory.mktemp("installed")
    subprocess.run(
        ["cmake", "--install", build, "--prefix", str(prefix)], check=True, stdout=subprocess.PIPE
    )
    library = next(prefix.glob("**/libhalfstep.so")).parent
    python = os.path.dirname(os.path.abspath(sys.executable))
    path = os.pathsep.join([python, str(prefix / "bin"), os.environ["PATH"]])
    return {
        **os.environ,
        "PATH": path,
        "HALFSTEP_SOURCE": str(ROOT.resolve()),
        "PKG_CONFIG_PATH": str(library / "pkgconfig"),
        "LD_LIBRARY_PATH": str(library),
        "CMAKE_PREFIX_PATH": str(prefix),
        "TORCH_EXTENSIONS_DIR": os.path.join(build, "torch_extensions"),
    }


@pytest.fixture(scope="module")
def outcome(environment, tmp_path_factory):
    """Returns a function that runs a page once and returns what run_page() does."""

    @functools.cache
    def run(page):
        return run_page(text_of(page), tmp_path_factory.mktemp("page"), environment)

    return run


def text_of(page):
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


@pytest.mark.all
@pytest.mark.parametrize("page", PAGES)
def test_page(page, outcome):
    outcome(page)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_that_are_not_run(page):
    """Is "skipped" for a page with such blocks, so that the report of a run names them. Fails if a
    page breaks the rules."""
    reasons = [block[1] for block in blocks_of(text_of(page)) if block[0] == "left out"]
    if reasons:
        pytest.skip(f"{page}: {len(reasons)} blocks are not run: {'; '.join(reasons)}")


# ---- The rules themselves ------------------------------------------------------------------------

PAGE = """# A page

```text title="words/a.txt"
one 5 two
```

```console
$ cat words/a.txt
one 1,234.5e-6 two
$ printf 'first\\nx\\ny\\nlast bf16\\n'
first
...
last bf16
$ echo one \\
  two
one two
```

<!-- not run: it would end the test -->
```console
$ exit 1
```

```python
an example for reading only
```
"""


def test_a_sound_page(tmp_path):
    output = run_page(PAGE, tmp_path, os.environ)
    assert output == "one 5 two\nfirst\nx\ny\nlast bf16\none two\n"


@pytest.mark.parametrize(
    "right,wrong,words",
    [
        ("one 1,234.5e-6 two", "one 5 three", "The page says:\none 5 three"),
        ("last bf16\n$", "last bf32\n$", "last bf32"),
        ("first\n...\n", "first\n", "It printed:\nfirst\nx"),
        ("first\n...\n", "...\nfirst\n", "It printed:\nfirst\nx"),
        ("one two\n", "one two\nmore\n", "more"),
        ("$ cat words/a.txt", "$ cat words/b.txt", "ends with status 1"),
        ("<!-- not run: it would end the test -->\n", "", "ends with status 1"),
        ("run: it would end the test", "run:", "write <!-- not run: REASON -->"),
        ("run: it would end the test", "run", "write <!-- not run: REASON -->"),
        ("-->\n```", "-->\n\n```", "a block must follow"),
        ("$ cat", "cat", "and not with '$ '"),
        ("reading only\n```", "reading only", "does not end"),
        ("words/a.txt", "../a.txt", "outside the page's folder"),
    ],
)
def test_a_page_with_a_mistake(right, wrong, words, tmp_path):
    assert right in PAGE
    with pytest.raises(Wrong, match=re.escape(words)):
        run_page(PAGE.replace(right, wrong), tmp_path / "page", os.environ)


def test_a_crash_of_gloo_is_tried_once_more(tmp_path):
    crash = f"echo run >>runs; echo {CRASH_OF_GLOO}; [ $(wc -l <runs) -ge {{}} ]"
    output = run_page(f"```console\n$ {crash.format(2)}\n```\n", tmp_path, os.environ)
    assert output == CRASH_OF_GLOO + "\n"
    with pytest.raises(Wrong, match="ends with status 1"):
        run_page(f"```console\n$ {crash.format(5)}\n```\n", tmp_path, os.environ)
    assert (tmp_path / "runs").read_text() == 4 * "run\n"


@pytest.mark.parametrize(
    "wanted,given,same",
    [
        ("loss 5.25", "loss   -0.1e-3", True),
        ("loss 5.25", "loss nan", False),
        ("12,345 of 2 (7%)", "1 of 44,000 (0.2%)", True),
        ("hash 2b2c51eb6dcd964b", "hash 04062bd627d69ff1", True),
        ("hash 2b2c51eb6dcd964b", "hash none", False),
        ("ok: 5 (...)", "ok: 2939 (avx512 kernels, 2 threads)", True),
        ("ok: 5 (...)", "ok: 5", False),
        ("adamw/bf16-sr/int8 6.13", "adamw/bf16-sr/int4 5.13", False),
        ("a\nb", "a\n\nb\n", True),
        ("a\nb", "b\na", False),
        ("...\nb", "a\nb\nb", True),
        ("a\n...\nc", "a\nb\nc\nd", False),
        ("...", "", True),
    ],
)
def test_lines_agree(wanted, given, same):
    assert agree(wanted.splitlines(), given.splitlines()) is same


# ---- Single pages --------------------------------------------------------------------------------


def test_first_c_program_is_that_of_the_header():
    blocks = blocks_of(text_of("start/first-c-program.md"))
    (program,) = (block[2] for block in blocks if block[:2] == ("file", "first.c"))
    header = (ROOT / "include" / "halfstep.h").read_text(encoding="utf-8")
    comment = "".join(line[5:] + "\n" for line in header.splitlines()[:40])
    assert program in comment


@pytest.mark.all
def test_finetune_moves_weights_as_the_page_says(outcome):
    output = outcome("tutorials/finetune.md")
    gains = [float(a) - float(b) for a, b in re.findall(r"^loss (\S+) -> (\S+)$", output, re.M)]
    moved = [float(share) for share in re.findall(r"^(\S+) % of the weights", output, re.M)]
    fp32, bf16, ours = gains
    assert abs(ours - fp32) < 0.1 * fp32 and bf16 < 0.5 * fp32
    assert moved[0] > 99 and moved[1] < 25 and moved[2] > 60
    held = [float(b) for b in re.findall(r"^(\S+) bytes per parameter$", output, re.M)]
    assert held == pytest.approx([16, 8, 6.15], abs=0.03)
    assert re.search(r"^(\d+) of \1 tensors have the same bits$", output, re.M)
