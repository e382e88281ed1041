"""The figures of the documents show what their data says, in both themes and with units."""

import os
import shutil
import sys
import xml.etree.ElementTree

import pytest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")
sys.path.insert(0, os.path.join(ROOT, "lab"))
import figures  # noqa: E402

SOURCES = {
    "docs/results.md": {"docs/loss_and_memory.svg", "docs/figures/wander.svg"},
    "bench/peers.csv": {"docs/figures/speed_and_memory.svg"},
    "bench/results.csv": {"docs/figures/speed_of_recipes.svg"},
    "bench/traps.md": {
        f"docs/figures/trap_{name}.svg"
        for name in ("movement", "decay", "fall", "spikes", "block", "tiny", "nan")
    },
}


@pytest.fixture(scope="module", autouse=True)
def one_walk():
    """Computes each weight of the figure once for all tests."""
    walked, walk = {}, figures.walk
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            figures,
            "walk",
            lambda name: walked[name] if name in walked else walked.setdefault(name, walk(name)),
        )
        yield


def test_committed_figures_are_those_of_their_data():
    """`python lab/figures.py` draws them again after a change of their data."""
    assert figures.stale(ROOT) == []


@pytest.mark.parametrize("source", SOURCES)
def test_a_figure_of_other_data_is_found(source, tmp_path):
    """Changes the numbers of a source, and expects the figures of this source alone."""
    for path in [*SOURCES, *figures.figures(ROOT)]:
        os.makedirs(os.path.dirname(tmp_path / path), exist_ok=True)
        shutil.copy(os.path.join(ROOT, path), tmp_path / path)
    text = (tmp_path / source).read_text(encoding="utf-8")
    for old, new in (("0.", "3."), ("1.", "2."), ("| 99 |", "| 98 |")):
        text = text.replace(old, new)
    (tmp_path / source).write_text(text, encoding="utf-8")
    assert set(figures.stale(tmp_path)) == SOURCES[source]


def test_figures_are_read_by_everybody():
    """Each has a title for screen readers, a dark theme, and no text outside of its frame."""
    for path in figures.figures(ROOT):
        with open(os.path.join(ROOT, path), encoding="utf-8") as file:
            svg = file.read()
        root = xml.etree.ElementTree.fromstring(svg)
        assert root.get("aria-label") and "prefers-color-scheme: dark" in svg, path
        _, _, width, height = map(float, root.get("viewBox").split())
        for text in root.iter("{http://www.w3.org/2000/svg}text"):
            x, y = float(text.get("x")), float(text.get("y"))
            wide = len(text.text) * float(text.get("font-size", 13)) * 0.5
            right = (
                x
                + {None: wide, "start": wide, "middle": wide / 2, "end": 0}[text.get("text-anchor")]
            )
            assert 0 <= y <= height and ("transform" in text.attrib or right <= width), (
                path,
                text.text,
            )
