"""What was shown of each package, for the tables of docs/packaging.md.

    results.py set FOLDER NAME KEY=VALUE...   notes something of a package in FOLDER/NAME.json
    results.py table FOLDER [--write]         holds the tables to the notes, or writes them

Keys of a package: `package`, its name for readers; `built`, by what; `ran`, what was run there, to
which several scripts add; `result`; `bytes`. A script clears what it is about to show again
(`ran=`), so that nothing old is left where it fails. Names `torch-...` are of the second table.
"""

import csv
import difflib
import json
import pathlib
import re
import sys

PLATFORMS = pathlib.Path(__file__).parent / "platforms.csv"
PAGE = pathlib.Path(__file__).parent.parent / "docs" / "packaging.md"
HEAD = ("package", "built by", "run there", "result", "MB")


def note(folder, name, **values):
    """Notes values of a package. A value of `ran` is added to those before it. An empty value
    removes the key."""
    file = pathlib.Path(folder) / f"{name}.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for key, value in values.items():
        if not value:
            found.pop(key, None)
        elif key == "ran":
            found[key] = [*(old for old in found.get(key, []) if old != value), value]
        else:
            found[key] = value
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def numbers(name):
    """Returns a key that sorts names with numbers in them by the numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def platforms(file=PLATFORMS):
    """Returns the rows of platforms.csv, or of another such list, by tag."""
    with open(file, newline="") as lines:
        return {row["tag"]: row for row in csv.DictReader(lines)}


def rows(folder, matrix):
    """Returns the lines of one table. Wheels are in the order of platforms.csv, others by name."""
    order = list(platforms())
    files = [
        f for f in pathlib.Path(folder).glob("*.json") if f.name.startswith("torch-") == matrix
    ]
    lines = [f"| {' | '.join(HEAD)} |", "|---|---|---|---|---:|"]
    for file in sorted(files, key=lambda f: ((*order, f.stem).index(f.stem), numbers(f.stem))):
        found = json.loads(file.read_text())
        cells = (
            found["package"],
            found.get("built", ""),
            "; ".join(found.get("ran", [])) or "nothing",
            found.get("result", "not shown"),
            f"{int(found['bytes']) / 1e6:.1f}" if "bytes" in found else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def table(folder, write):
    """Returns whether the tables of the page are those of the notes, after writing them where
    asked. A table without notes stays."""
    text = new = PAGE.read_text()
    for name in ("packages", "matrix"):
        lines = rows(folder, name == "matrix")
        if len(lines) > 2:
            marks = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
            block = "\n".join(lines) + "\n"
            new = re.sub(marks, lambda m, block=block: m[1] + block + m[2], new, flags=re.S)
    if new == text:
        return True
    if write:
        PAGE.write_text(new)
        return True
    print(*difflib.unified_diff(text.splitlines(), new.splitlines(), lineterm="", n=0), sep="\n")
    print("FAIL docs/packaging.md has other tables; `make test-packages WRITE=--write` writes them")
    return False


if __name__ == "__main__":
    command, folder, *words = sys.argv[1:]
    if command == "set":
        note(folder, words[0], **dict(word.split("=", 1) for word in words[1:]))
    elif command == "table":
        sys.exit(0 if table(folder, words == ["--write"]) else 1)
