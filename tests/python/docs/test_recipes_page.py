"""Tests that the site's page of recipes has every rule and format, and the bytes of plan().
docs/choosing.md has the bytes of plan(), too."""

import pathlib
import re
import sys

import pytest
from common import ROOT
from documents import text_of

import halfstep
from halfstep._library import abi

sys.path.append(str(pathlib.Path(ROOT) / "site"))
import recipes  # noqa: E402

SHAPE = (recipes.MATRIX["rows"], recipes.MATRIX["row_length"])
ELEMENTS = SHAPE[0] * SHAPE[1]
PAGE = recipes.pages(pathlib.Path(ROOT))[recipes.PAGE]
#: the text under each heading of second order, by the heading
SECTIONS = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])


def rows_of(section, first):
    """Returns the cells of a table whose first column has this title, a list for each row."""
    lines = section.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip(" `") for cell in line.strip("|").split(" | ")])
    return rows[0], rows[2:]


@pytest.mark.parametrize("rule", abi.rules)
def test_a_section_has_formulas_options_and_states(rule):
    section, own = SECTIONS[rule], abi.rules[rule]
    assert section.count("$$") >= 2 and r"\Delta" in section
    common = set.intersection(*(set(r.hypers) for r in abi.rules.values()))
    named = {row[0] for row in rows_of(section, "name")[1]}
    assert named == {*own.hypers} - common | {"lr", "weight_decay", "decay"}
    if own.states:
        assert [row[1] for row in rows_of(section, "")[1]] == [s.name for s in own.states]
    for name in own.scalars:
        assert f"is `{name}`" in section


@pytest.mark.parametrize("rule", [r for r, row in abi.rules.items() if not row.raw_gradient])
def test_bytes_are_those_of_plan(rule):
    columns, rows = rows_of(SECTIONS[rule], "weights / states")
    assert columns[:6] == [
        "weights / states",
        "weights",
        "gradients",
        "states",
        "all",
        "all, released",
    ]
    assert len(rows) == len(recipes.COMBINATIONS)
    for name, *shown in rows:
        (plan,) = halfstep.plan({"w": SHAPE}, [f"{rule}/{name.replace(' / ', '/')}"]).rows
        bytes_ = (plan.weights + plan.extras, plan.gradients, plan.states, plan.total)
        found = [f"{n / ELEMENTS:.3f}" for n in bytes_]
        assert [f"{float(cell):.3f}" for cell in shown[:4]] == found
        if abi.rules[rule].totals:
            assert shown[4] == "–"
        else:
            assert shown[4] == recipes.size((plan.total - plan.gradients) / ELEMENTS)


def test_every_format_has_its_row():
    section = SECTIONS["Formats"]
    weights, states = section.split("### Formats of states")
    named = [re.findall(r"^\| `([\w-]+)` \|", part, re.M) for part in (weights, states)]
    both = abi.ROLE_SIGNED | abi.ROLE_NONNEG
    for names, role in zip(named, (abi.ROLE_WEIGHT, both)):
        assert names == [f.name for f in abi.formats.values() if f.roles & role == role]
    assert set(named[0]) | set(named[1]) == {*abi.formats}
    _, rows = rows_of(SECTIONS["Bytes of states"], "rule")
    assert [row[0] for row in rows] == [f"[{rule}](#{rule})" for rule in abi.rules]


def test_ranges_are_those_of_the_formats():
    """Numbers that follow from the dtypes."""
    _, rows = rows_of(SECTIONS["Formats"], "format")
    ranges = {row[0]: (row[4], row[5]) for row in rows}
    assert ranges["f32"] == ("3.403e38", "2⁻¹⁴⁹")
    assert ranges["bf16"] == ("3.39e38", "2⁻¹³³")
    assert ranges["f16"] == ("65504", "2⁻²⁴")


# ---- docs/choosing.md ----------------------------------------------------------------------------


def recipe_rows(text):
    """Returns the recipe of each row of the table of recipes, with its bytes without and with
    release, by the row's anchor. Rows with several recipes or none are left out."""
    row = r'^\| <a id="([^"]+)"></a>`([^`…]+)` \| [^|]*\| ([\d.]+) \| ([\d.]+) \|'
    found = re.findall(row, text, re.M)
    return {
        anchor: (recipe if recipe.startswith("muon") else f"adamw/{recipe}", plain, released)
        for anchor, recipe, plain, released in found
    }


def test_the_table_of_recipes_has_the_bytes_of_plan():
    text = text_of("docs/choosing.md")
    rows = recipe_rows(text)
    assert len(rows) > 10
    for recipe, *bytes_said in rows.values():
        # Release leaves the gradient of one layer.
        shapes = {f"{i}": (64, 4096) for i in range(10000)}
        for release, said in zip((False, True), bytes_said):
            (row,) = halfstep.plan(shapes, recipes=[recipe], release=release).rows
            assert row.total / (10000 * 64 * 4096) == pytest.approx(float(said), abs=0.0051), recipe


def test_the_questions_end_at_the_recipe_that_they_name():
    """Each link of the tree leads to the row of the recipe that it names. The bytes beside it are
    the row's."""
    text = text_of("docs/choosing.md")
    tree = text.split("## Follow the questions")[1].split("## In one table")[0]
    ends = re.findall(r"\[`([^`]+)`\]\(#(row-[^)]+)\)([^|\n]*)\| *([\d.]+)? *", tree)
    assert len(ends) > 12
    for recipe, anchor, rest, total in ends:
        named, plain, released = recipe_rows(text)[anchor]
        assert named == recipe
        if total not in ("2", "4", ""):  # states elsewhere
            assert total == (released if "release" in rest else plain), recipe
