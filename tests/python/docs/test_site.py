"""The site of the documents answers a newcomer's forty questions, and is built without a warning
(`make docs`)."""

import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pymdownx.slugs import slugify

import halfstep  # noqa: F401, whose library the pages are made from

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "site"))
import check  # noqa: E402
import hooks  # noqa: E402

DOCS = ROOT / "docs"
QUESTION = re.compile(r"^\d+\. \[([^\]]+)\]\(([^)#]+)#([^)]+)\)$", re.M)
#: what is read in a minute, in words
MINUTE = 260


def made():
    """Returns the pages that the site's modules make from the library, by path under docs."""
    os.environ.setdefault("HALFSTEP_PROGRAM", os.environ["HALFSTEP_BUILD"] + "/halfstep")
    return hooks.made_pages()


def sections(text):
    """Returns the text below each heading up to the next one, by the heading's anchor. The words
    of a heading's section end where the first heading inside it begins."""
    text = hooks.FENCE.sub("", text)
    parts = re.split(r"^#+ +(.+)$", text, flags=re.M)
    return {slugify(case="lower")(h, "-"): body for h, body in zip(parts[1::2], parts[2::2])}


def words(text):
    """Counts the words of running text. Tables are looked at, and not read through."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "<"))]
    return len(re.findall(r"\w+", re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))))


def test_forty_questions_have_answers_in_a_minute():
    """Home names the page of questions, and each question links to its answer: two clicks."""
    assert "](questions.md)" in (DOCS / "index.md").read_text(encoding="utf-8")
    readers = sections((DOCS / "questions.md").read_text(encoding="utf-8"))
    readers = [QUESTION.findall(body) for body in readers.values() if "](" in body]
    assert [len(questions) for questions in readers] == [10, 10, 10, 10]
    pages, wrong = made(), []
    for question, page, anchor in sum(readers, []):
        path = DOCS / page
        if page not in pages and not path.exists():
            wrong.append(f"{question}: there is no {page}")
            continue
        answers = sections(pages.get(page) or path.read_text(encoding="utf-8"))
        if anchor not in answers:
            wrong.append(f"{question}: {page} has no heading #{anchor}")
        elif words(answers[anchor]) > MINUTE:
            wrong.append(f"{question}: {page}#{anchor} has {words(answers[anchor])} words")
        elif not answers[anchor].strip() and anchor == list(answers)[-1]:
            wrong.append(f"{question}: {page}#{anchor} is empty")
    assert not wrong, "\n".join(wrong)


def test_every_page_says_for_whom_it_is():
    """Text stands between the title of a page and its first heading, so that a reader knows
    whether to go on."""
    silent = []
    for path in DOCS.rglob("*.md"):
        title, _, rest = path.read_text(encoding="utf-8").partition("\n")
        assert title.startswith("# "), path
        if words(re.split(r"^##", rest, flags=re.M)[0]) < 8:
            silent.append(posixpath.relpath(path, ROOT))
    assert not silent, silent


def test_links_say_where_they_lead():
    """The text of a link names the subject that it leads to, and not the file."""
    silent = []
    for path in DOCS.rglob("*.md"):
        texts = re.findall(
            r"\[([^\[\]]+)\]\([^)]+\)", hooks.FENCE.sub("", path.read_text(encoding="utf-8"))
        )
        silent += [
            (path.name, t) for t in texts if t.endswith(".md") or t in ("here", "this", "guide")
        ]
    assert not silent, silent


@pytest.mark.all
def test_the_site_is_built_without_a_warning(tmp_path):
    built = subprocess.run(
        ["bash", str(ROOT / "site/build.sh"), str(tmp_path / "site")],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stdout + built.stderr
    index = (tmp_path / "site/search/search_index.js").read_text(encoding="utf-8")
    assert "HALFSTEP_ERROR_ARGUMENT" in index and "bf16-ecc8" in index


@pytest.mark.all
def test_what_a_page_loads_is_found(tmp_path):
    """The check refuses each way in which a page can load from another host."""
    ways = {
        "a.html": '<script src="https://a.example/x.js"></script>',
        "b.html": '<link rel="stylesheet" href="//a.example/x.css">',
        "c.html": '<img src="http://a.example/x.png">',
        "d.css": '@font-face { src: url("https://a.example/x.woff2") }',
        "e.css": '@import "https://a.example/x.css";',
        "own.html": '<a href="https://a.example">a link loads nothing</a><img src="x.png">',
    }
    for name, text in ways.items():
        (tmp_path / name).write_text(text)
    assert {path.name for path, _ in check.outside(tmp_path)} == set(ways) - {"own.html"}
