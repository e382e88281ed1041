"""docs/reference/errors.md has a row for each error message and for each error code."""

import ast
import os
import re
from pathlib import Path

import error_texts
import pytest

from halfstep import _abi

SOURCE = Path(os.environ.get("HALFSTEP_SOURCE", Path(__file__).resolve().parents[2]))
PAGE = SOURCE / "docs" / "reference" / "errors.md"
_ROW = re.compile(r"^\| (?:`` (?P<double>.*?) ``|`(?P<single>[^`]*)`) \|(?P<rest>.*)\|$", re.M)


def _section(heading):
    """Returns the text below a heading of the second level, up to the next one."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, f"{PAGE.name} has no heading '## {heading}'"
    return found[1]


def _rows(heading):
    """Returns (first cell, the other cells) of the rows in a section whose first cell is code."""
    return [
        ((row["double"] or row["single"]).replace("\\|", "|"), row["rest"].strip())
        for row in _ROW.finditer(_section(heading))
    ]


def _compare(found, rows):
    """Fails with the messages that have no row, and with the rows that have no message."""
    wanted = {error_texts.normal(text): (text, places) for text, places in found.items()}
    there = {error_texts.normal(text) for text, _ in rows}
    lost = [f"{places[0]}: {text}" for key, (text, places) in wanted.items() if key not in there]
    stale = [text for text, _ in rows if error_texts.normal(text) not in wanted]
    names = [error_texts.normal(text) for text, _ in rows]
    twice = sorted({name for name in names if names.count(name) > 1})
    empty = [text for text, rest in rows if not rest]
    told = {
        "messages without a row": lost,
        "rows without a message": stale,
        "rows that stand twice": twice,
        "rows without a cause": empty,
    }
    assert not any(told.values()), "\n".join(
        line for what, texts in told.items() if texts for line in (f"{what}:", *texts)
    )


def test_messages_of_the_package_have_rows():
    _compare(error_texts.of_package(SOURCE / "python" / "halfstep"), _rows("The Python package"))


@pytest.mark.parametrize("heading, folder", [("The C library", "src"), ("The program", "tools")])
def test_messages_in_c_have_rows(heading, folder):
    _compare(error_texts.of_c(SOURCE, [folder]), _rows(heading))


def test_every_raise_with_a_text_is_seen():
    """Raises that make an exception are calls whose text the collector finds."""
    found = error_texts.of_package(SOURCE / "python" / "halfstep")
    seen = {place for places in found.values() for place in places}
    folder, lost = SOURCE / "python" / "halfstep", []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            call = node.exc
            place = f"{path.relative_to(folder)}:{call.lineno}"
            if call.args and place not in seen:
                lost.append(f"{place} {ast.unparse(call)}")
    # These pass on a text that a function makes, or a name without a text.
    known = ("_error_classes.get", "unusable(", "_refused(", "_damaged(", "AttributeError(name)")
    known += ("_sharding.advice(",)
    assert not [text for text in lost if not any(word in text for word in known)]


def _package(tmp_path, text):
    (tmp_path / "module.py").write_text(text, encoding="utf-8")
    return sorted(error_texts.of_package(tmp_path))


@pytest.mark.parametrize(
    "text, messages",
    [
        ('raise ValueError(f"size {n!r} of {x} is odd here")', ["size … of … is odd here"]),
        (
            'raise ValueError("a plain text" if n else "another text")',
            ["a plain text", "another text"],
        ),
        (
            "def refuse(what):\n    raise TypeError(f'halfstep: {what}; do so')\n"
            "refuse('it is a list')\nrefuse('it is a tuple')",
            ["halfstep: it is a list; do so", "halfstep: it is a tuple; do so"],
        ),
        (
            "def f():\n    text = 'one long text'\n    if n:\n        text = 'other long text'\n"
            "    raise RuntimeError(text)",
            ["one long text", "other long text"],
        ),
    ],
)
def test_texts_are_collected_from_python(tmp_path, text, messages):
    assert _package(tmp_path, text) == messages


@pytest.mark.parametrize(
    "text, messages",
    [
        ('return hstep_fail(o, CODE, "%s has %d (\\"x\\")", a, n);', ['… has … ("x")']),
        ('hstep_fail(o, f(",)"), n ? "one text" : "two texts");', ["one text", "two texts"]),
        ('hstep_fail(o, CODE, "%" PRId64 " of 5%% "\n "are wrong");', ["… of 5% are wrong"]),
        ('{1, HALFSTEP_ERROR_DEVICE, 0,\n "a text of a table"},', ["a text of a table"]),
        ('snprintf(error, n, "%s ends" END, a); snprintf(line, n, "not one");', ["… ends…"]),
        ('/* hstep_fail(o, "a comment"); */ int hstep_fail(int o, "of a definition")', []),
    ],
)
def test_texts_are_collected_from_c(tmp_path, text, messages):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "file.c").write_text(text, encoding="utf-8")
    assert sorted(error_texts.of_c(tmp_path, ["part"])) == messages


def test_a_lost_row_and_a_stale_row_are_named():
    with pytest.raises(AssertionError) as error:
        _compare({"halfstep: new text of …": ["a.py:1"]}, [("old text of …", "gone")])
    assert [line.strip() for line in str(error.value).splitlines()[:4]] == [
        "messages without a row:",
        "a.py:1: halfstep: new text of …",
        "rows without a message:",
        "old text of …",
    ]


def test_codes_have_rows():
    header = (SOURCE / "include/halfstep.h").read_text(encoding="utf-8")
    codes = re.findall(r"^#define (HALFSTEP_(?:OK|NONFINITE|ERROR_[A-Z]+)) +(-?\d+)", header, re.M)
    cells = [(name, [c.strip() for c in rest.split("|")]) for name, rest in _rows("Error codes")]
    assert [(name, rest[0]) for name, rest in cells] == codes
    for name, (number, when, *_) in cells:
        text = _abi.lib.halfstep_strerror(int(number)).decode()
        assert when.startswith(f"`{text}`: "), name
    for name, rest in cells[1:-1]:
        expected = _abi._error_classes.get(int(rest[0]), _abi.HalfstepError)
        assert rest[3] == f"`{expected.__name__}`", name
