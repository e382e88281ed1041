"""What was shown of each package, for the table of docs/packaging.md.

    results.py set FOLDER NAME KEY=VALUE...   notes something of a package in FOLDER/NAME.json
    results.py table FOLDER [--write]         holds the table to the notes, or writes it

Keys of a package: `package`, its name for readers; `built`, by what; `ran`, what was run there, where
several scripts add something; `result`; `bytes`. A script clears what it is about to show again
(`ran=`), so that nothing old is left where it fails.
"""

import json
import pathlib
import re
import sys

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


def rows(folder):
    """Returns the lines of the table, a package each, in the order of their file names."""
    lines = [f"| {' | '.join(HEAD)} |", "|---|---|---|---|---:|"]
    for file in sorted(pathlib.Path(folder).glob("*.json")):
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
    """Returns whether the table of the page is that of the notes, after writing it where asked."""
    marks = r"(<!-- packages -->\n).*?(<!-- /packages -->)"
    text = PAGE.read_text()
    new = re.sub(marks, lambda m: m[1] + "\n".join(rows(folder)) + "\n" + m[2], text, flags=re.S)
    if new != text and write:
        PAGE.write_text(new)
    elif new != text:
        print(*rows(folder), sep="\n")
        print(
            f"FAIL this is not the table of {PAGE.name}; `make test-packages WRITE=--write` writes it"
        )
        return False
    return True


if __name__ == "__main__":
    command, folder, *words = sys.argv[1:]
    if command == "set":
        note(folder, words[0], **dict(word.split("=", 1) for word in words[1:]))
    elif command == "table":
        sys.exit(0 if table(folder, words == ["--write"]) else 1)
