"""Tables of the evidence can be read without a key: text stands above each, and its section names
the command that makes it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = ["docs/results.md", "docs/claims.md", "docs/scale.md"]
PAGES += [f"bench/{name}.md" for name in ("README", "traps", "peers", "trainer", "offload")]
#: a command in a block of code or between backticks
COMMAND = re.compile(r"\b(python|make|halfstep|bash|mpirun|torchrun|ctest|[\w/]+\.(py|sh)) ?\S*")


def tables(text):
    """Yields, for each table, its heading, the lines above it in its section, and the section."""
    for section in re.split(r"^(?=#)", text, flags=re.M):
        lines = section.split("\n")
        for i, line in enumerate(lines):
            if line.startswith("|") and (i == 0 or not lines[i - 1].startswith("|")):
                yield lines[0], lines[:i], section


def faults(text):
    """Returns what a reader of a page misses, a line for each table."""
    whole, found = "\n".join(re.findall(r"^# .*?(?=^## |\Z)", text, flags=re.M | re.S)), []
    for heading, above, section in tables(text):
        near = [line for line in above[1:] if line.strip() and not line.startswith("<!--")]
        if not near or near[-1].startswith(("|", "```", "#", "<")):
            found.append(f"{heading}: no sentence stands directly above a table")
        code = " ".join(re.findall(r"`[^`]+`|^```.*?^```", section + whole, flags=re.M | re.S))
        if not COMMAND.search(code):
            found.append(f"{heading}: no command makes the table")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_tables_have_a_sentence_and_a_command(page):
    found = faults((ROOT / page).read_text(encoding="utf-8"))
    assert not found, "\n".join([page, *found])


def test_what_a_reader_misses_is_found():
    good = (
        "# Page\n\n## Part\n\nSee the second column. `python bench/x.py`\n\n| a |\n|---|\n| 1 |\n"
    )
    assert not faults(good)
    assert "no sentence" in faults(good + "\n| b |\n|---|\n| 2 |\n")[0]
    assert "no command" in faults(good.replace("`python bench/x.py`", "So it is."))[0]
