"""Collects the table of trainers in docs/frameworks.md from the tests that show its cells.

A test with the mark `cell(trainer, column)` shows one cell, and may carry several marks. A cell is
good if all of its tests pass. Where the trainer or halfstep refuses, the table has the sentence
that the fixture `cell` was told.
"""

import json
import os

import pytest

COLUMNS = ("plain", "resume", "accumulate", "clip", "release", "EMA")
#: (trainer, column) -> sentences in the order told, "failed" among them if a test failed
_cells = {}


class Cell:
    def __init__(self, keys):
        self.keys = keys

    def says(self, sentence):
        """Puts a sentence into the table in place of the good mark."""
        for key in self.keys:
            if sentence not in _cells.setdefault(key, []):
                _cells[key].append(sentence)

    def refuses(self, error, match):
        """Is pytest.raises, and puts the first line of the error into the table."""
        return _Refusal(self, pytest.raises(error, match=match))


class _Refusal:
    def __init__(self, told, raises):
        self.told = told
        self.raises = raises

    def __enter__(self):
        self.info = self.raises.__enter__()
        return self.info

    def __exit__(self, *error):
        suppressed = self.raises.__exit__(*error)
        if suppressed:
            self.told.says(str(self.info.value).splitlines()[0])
        return suppressed


def _keys(item):
    return [tuple(mark.args) for mark in item.iter_markers("cell")]


@pytest.fixture
def cell(request):
    return Cell(_keys(request.node))


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "cell(trainer, column): shows a cell of the table of trainers"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    for key in _keys(item):
        if key[1] not in COLUMNS:
            raise pytest.UsageError(f"unknown column '{key[1]}'; known: {', '.join(COLUMNS)}")
        told = _cells.setdefault(key, [])
        if not report.passed and "failed" not in told:
            told.append("failed")
    return report


def pytest_sessionfinish(session):
    """Writes the cells to the file that HALFSTEP_CELLS names."""
    if path := os.environ.get("HALFSTEP_CELLS"):
        table = {}
        for (trainer, column), told in _cells.items():
            table.setdefault(trainer, {})[column] = " ".join(told)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=1)
