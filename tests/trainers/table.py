#!/usr/bin/env python3
"""table.py FOLDER [--write]: compares the table of trainers in docs/frameworks.md with the cells
that the tests left in FOLDER/*.json, or writes it."""

import glob
import json
import os
import sys

from cells import COLUMNS
from generate import ROOT, between

PAGE = os.path.join("docs", "frameworks.md")


def table(cells):
    """Returns the table, and the sentences that its numbers stand for."""
    lines = ["", "| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    sentences = []
    for trainer in sorted(cells, key=str.lower):
        row = []
        for column in COLUMNS:
            said = cells[trainer].get(column, "not tested")
            if said and said not in sentences:
                sentences.append(said)
            row.append(str(sentences.index(said) + 1) if said else "✓")
        lines.append(f"| {trainer} | " + " | ".join(row) + " |")
    lines += ["", *(f"{i}. {said}" for i, said in enumerate(sentences, 1)), ""]
    return "\n".join(lines)


def main(folder, write):
    cells = {}
    for path in glob.glob(os.path.join(folder, "*.json")):
        with open(path, encoding="utf-8") as file:
            for trainer, row in json.load(file).items():
                cells.setdefault(trainer, {}).update(row)
    text = between(PAGE, "trainers", table(cells))
    path = os.path.join(ROOT, PAGE)
    with open(path, encoding="utf-8") as file:
        if file.read() == text:
            return 0
    if not write:
        print(f"the table of {PAGE} is not what the tests showed; make test-trainers WRITE=--write")
        return 1
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--write" in sys.argv[2:]))
