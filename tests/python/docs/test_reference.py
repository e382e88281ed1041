"""The pages of reference: the Python API made from docstrings, the C API from the headers, the
program from its --help, and the error codes. Nothing public is missing on them."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import griffe
import pytest

import halfstep

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = os.environ["HALFSTEP_BUILD"] + "/halfstep"
sys.path.append(str(ROOT / "site"))

import c_api  # noqa: E402
import program  # noqa: E402
import python_docs  # noqa: E402

PAGE = (ROOT / "docs/reference/python-api.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def package():
    """The package as the site shows it."""
    loader = griffe.GriffeLoader(
        search_paths=[str(ROOT / "python")],
        extensions=griffe.load_extensions(python_docs.Extension),
    )
    loader.load("halfstep")
    loader.resolve_aliases(implicit=False, external=False)
    return loader.modules_collection


def shown():
    """Returns the paths of what the page shows."""
    return re.findall(r"^::: (\S+)$", PAGE, re.M)


# ---- Python --------------------------------------------------------------------------------------


def test_every_public_name_is_on_the_page():
    missing = [x for x in halfstep.__all__ if not re.search(rf"\bhalfstep\.{x}\b", PAGE)]
    assert not missing
    for folder in ("compat", "integrations"):
        paths = [x for x in (ROOT / "python/halfstep" / folder).iterdir() if x.name[0] != "_"]
        assert paths
        assert {f"halfstep.{folder}.{x.stem}" for x in paths} <= set(shown()), folder


def test_what_the_page_shows_exists_and_has_a_docstring(package):
    """So has each function of a class. A member without one is not on the page."""
    silent = []
    for path in shown():
        items = [package[path]]
        if items[0].is_module:
            items += [items[0].members[name] for name in items[0].exports]
        if not path.startswith(("halfstep.compat.", "halfstep.integrations.")):
            functions = [x for y in items if y.is_class for x in y.members.values()]
            items += [x for x in functions if not x.is_attribute and x.name[0] != "_"]
        silent += [x.path for x in items if not x.docstring]
    assert silent == ["halfstep.ema.EMA.extra_repr"]  # which repr() calls


def described(item):
    """Returns the names that the tables of an item's docstring describe."""
    rows = re.findall(r"^\| (`[^|]*`) \|", item.docstring.value, re.M)
    return {name for row in rows for name in re.findall(r"\w+", row)}


def test_every_argument_is_described(package):
    """An argument is in a table of its class or function. Those of all classes are in Optimizer."""
    options = described(package["halfstep.optimizer.Optimizer"]) | {"defaults"}
    for name in (*halfstep.rules.classes, "Optimizer", "CPUOffload", "StateStreaming"):
        signature = inspect.signature(getattr(halfstep, name))
        path = next(x for x in shown() if x.endswith("." + name))
        unknown = {*signature.parameters} - options - described(package[path])
        assert not unknown, name
    for path in ("accumulate.GradientAccumulator", "plan.plan", "nn.quantize_", "ema.EMA"):
        item = package[f"halfstep.{path}"]
        parameters = item.parameters if item.is_function else item.members["__init__"].parameters
        unknown = {x.name for x in parameters} - {"self", "model"} - described(item)
        assert not unknown, path


def test_markdown_of_a_docstring():
    made = python_docs.markdown(
        "Makes x.\n\nlr       the rate, a | b\n         and more\nscan, x  of y\n\n>>> x\n\n"
        "lr: no table\nat all\n\n"
        "This file is longer than 500 lines because of x. See docs/gpu.md."
    )
    assert made.split("\n\n") == [
        "Makes x.",
        "\n| name | meaning |\n|---|---|\n"
        "| `lr` | the rate, a \\| b and more |\n| `scan`, `x` | of y |",
        "```python\nx\n```",
        "lr: no table\nat all",
        " See [gpu.md](../gpu.md).\n",
    ]


# ---- C -------------------------------------------------------------------------------------------


def test_the_page_of_c_has_everything_public():
    page = c_api.pages(ROOT)["reference/c-api.md"]
    places = set(re.findall(r'<a id="(\w+)">', page))
    places |= set(re.findall(r"^### (\w+)$", page, re.M))
    sections = dict(zip(*[iter(re.split(r"^### (.*)$", page, flags=re.M)[1:])] * 2))
    listed = [x.split() for x in (ROOT / "tests/golden/abi.txt").read_text().splitlines()]
    names = {x[1] for x in listed if x[0] in ("constant", "structure", "callback", "function")}
    assert len(names) > 150 and not names - places
    for _, name, *_ in (x for x in listed if x[0] == "member"):
        structure, member = name.split(".")[:2]
        (body,) = (text for heading, text in sections.items() if structure in heading.split(", "))
        assert re.search(rf"`[^`]*\b{member.partition('[')[0]}\b[^`]*`.* \|", body), name


def test_markdown_of_a_header():
    header = """/* x.h - for a test */
/* ---- First --------------------------------------------------------------- */

#define HALFSTEP_ONE 1 /* a | b
                        * and c */

/* Does <x> by *y, see halfstep_b().
 *   lr   a rate
 *        of x
 * ERRORS. ARGUMENT, and "RANGE".
 *
 *   halfstep_a();
 */
HALFSTEP_API int halfstep_a(const halfstep_s *s,
                            int *y); /* NULL */
HALFSTEP_API int halfstep_b(int long_name_of_an_argument, int longer_name_of_an_argument,
                            int longest_name_of_an_argument);

typedef struct halfstep_s {
    int a; /* the first,
            * of two */
    /* both */
    int (*f)(void *x);
    int g;
    int h; /* own */
} halfstep_s;
"""
    parts = c_api.parse(header.replace("{}", ""))
    assert [x if isinstance(x, str) else x.names for x in parts] == [
        *([], "First", [], ["halfstep_a", "halfstep_b"], ["halfstep_s"])
    ]
    anchors = {"halfstep_b", "halfstep_s", "HALFSTEP_ERROR_ARGUMENT", "HALFSTEP_ERROR_RANGE"}
    one, functions, structure = (
        "\n".join(x for x in parts[i].page(anchors) if x) for i in (2, 3, 4)
    )
    assert "| `1` | a \\| b and c |" in one
    assert functions.split("\n") == [
        '<a id="halfstep_a"></a><a id="halfstep_b"></a>',
        "### halfstep_a, halfstep_b",
        "```c",
        "int halfstep_a(const halfstep_s *s, int *y); /* NULL */",
        "int halfstep_b(",
        "    int long_name_of_an_argument,",
        "    int longer_name_of_an_argument,",
        "    int longest_name_of_an_argument);",
        "```",
        "Does &lt;x> by `*y`, see [`halfstep_b()`](#halfstep_b).",
        "| name | meaning |",
        "|---|---|",
        "| `lr` | a rate of x |",
        '**Errors**. [ARGUMENT](#HALFSTEP_ERROR_ARGUMENT), and "RANGE".',
        "```c",
        "halfstep_a();",
        "```",
        "Types: [`halfstep_s`](#halfstep_s)",
    ]
    assert structure.split("\n")[-3:] == [
        "| `int a` | the first, of two |",
        "| `int (*f)(void *x)`<br>`int g` | both |",
        "| `int h` | own |",
    ]


# ---- The program ---------------------------------------------------------------------------------


def test_the_page_of_the_program_has_every_option(monkeypatch):
    monkeypatch.setenv("HALFSTEP_PROGRAM", PROGRAM)
    page = program.pages(ROOT)["reference/program.md"]
    sections = dict(zip(*[iter(re.split(r"^## halfstep (.*)$", page, flags=re.M)[1:])] * 2))
    top = subprocess.run([PROGRAM, "--help"], stdout=subprocess.PIPE)
    commands = re.findall(r"^  ([a-z]+) +[a-z]", top.stdout.decode(), re.M)
    assert len(commands) > 10 and {*commands, "train lm", "compare mnist"} <= sections.keys()
    options = 0
    for command, text in sections.items():
        words = [PROGRAM, *command.split(), "--help"]
        printed = subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout.decode()
        listed = re.findall(r"^  (--[a-z0-9-]+)", printed, re.M)
        missing = [x for x in listed if not re.search(rf"^\| `{x}[ `]", text, re.M)]
        assert not missing, command
        options += len(listed)
    assert options > 200


# ---- Errors --------------------------------------------------------------------------------------


def test_the_page_of_errors_has_every_code():
    """Each code has its number, its words and its Python exception, in the order of the header."""
    header = (ROOT / "include/halfstep.h").read_text(encoding="utf-8")
    codes = re.findall(r"^#define (HALFSTEP_(?:OK|NONFINITE|ERROR_[A-Z]+)) +(-?\d+)", header, re.M)
    page = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(HALFSTEP_\w+)` \| (-?\d+) \| `([^`]+)`: .* \| ([^|]+) \|$", page, re.M
    )
    assert [row[:2] for row in rows] == codes
    for name, number, words, exception in rows:
        assert words == halfstep._library.abi.lib.halfstep_strerror(int(number)).decode(), name
        if name not in ("HALFSTEP_OK", "HALFSTEP_NONFINITE"):  # step() raises for neither
            expected = halfstep._library.abi._error_classes.get(int(number), halfstep.HalfstepError)
            assert exception == f"`{expected.__name__}`", name
