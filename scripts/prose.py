#!/usr/bin/env python3
"""Measures the prose of the repository: how long sentences are, by folder, and how much code there
is without its comments.

    prose.py                  this tree
    prose.py REVISION         that revision, then this tree
    prose.py --longest 5      and the longest sentences of each folder

Prose is the text of Markdown files without code, tables and headings, the comments of C, and the
comments and docstrings of Python. A sentence ends at `.`, `?`, `!` or a colon before a capital, or
at an empty line. The columns are sentences, mean words, the share of sentences of more than 25
words, and thousands of characters of code. Spaces do not count, so that no layout matters.
"""

import argparse
import ast
import collections
import io
import pathlib
import re
import subprocess
import tokenize

ROOT = pathlib.Path(__file__).resolve().parent.parent
LONG = 25
C_FILES = {".c", ".h", ".cu", ".def", ".cpp"}
C_COMMENT = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.S)
END = re.compile(r"(?<=[.?!:])[\"'`)*]*\s+(?=[\"'`(*\[]*[A-Z])|\n\s*\n")


def sentences(text):
    """Returns the sentences of a text, each as a list of words."""
    found = (re.findall(r"[^\s]*[A-Za-z0-9][^\s]*", part) for part in END.split(text))
    return [words for words in found if len(words) > 2]


def of_markdown(text):
    """Returns the prose of a page, and no code."""
    text = re.sub(r"```.*?```|<!--.*?-->|^    .*$", "\n\n", text, flags=re.S | re.M)
    text = re.sub(r"^(#|\||<).*$", "\n", text, flags=re.M)
    return re.sub(r"^ *([*-]|\d+\.) ", "\n\n", text, flags=re.M), ""


def of_c(text):
    """Returns the comments of a C file, and its code."""
    comments = [c for c in C_COMMENT.findall(text) if c[0] == "/"]
    prose = [re.sub(r"^[ /*]+|\*/$", "", c, flags=re.M) for c in comments if "----" not in c]
    code = C_COMMENT.sub(lambda m: m[0] if m[0][0] == '"' else "", text)
    return "\n\n".join(prose), code


def of_python(text):
    """Returns the comments and docstrings of a Python file, and its code."""
    prose, told, last = [], set(), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and "----" not in token.string:
            row = token.start[0]
            prose.append(("" if row == last + 1 else "\n\n") + token.string.lstrip("#: "))
            last = row
            if token.line.strip().startswith("#"):
                told.add(row)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            string = ast.get_docstring(node)
            if string:
                prose.append("\n\n" + re.sub(r"^ {3,}.*$", "\n", string, flags=re.M))
                told.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = text.split("\n")
    return "\n".join(prose), "".join(x for i, x in enumerate(lines, 1) if i not in told)


def read(revision):
    """Yields the paths and texts of the tracked files, of a revision or of this tree."""
    names = ["git", "ls-tree", "-r", "--name-only", revision] if revision else ["git", "ls-files"]
    for name in subprocess.check_output(names, cwd=ROOT, text=True).split("\n"):
        path = pathlib.Path(name)
        if path.suffix not in {*C_FILES, ".py", ".md"} or path.name == "CHANGELOG.md":
            continue
        if revision:
            show = ["git", "show", f"{revision}:{name}"]
            yield path, subprocess.check_output(show, cwd=ROOT, text=True)
        elif (ROOT / path).exists():
            yield path, (ROOT / path).read_text(encoding="utf-8")


def measure(revision=None):
    """Returns the sentences of each folder, and the characters of its code."""
    folders = collections.defaultdict(lambda: ([], 0))
    for path, text in read(revision):
        of = of_markdown if path.suffix == ".md" else of_python if path.suffix == ".py" else of_c
        prose, code = of(text)
        kind = "documents" if path.suffix == ".md" else str(path.parent)
        found, characters = folders[kind]
        folders[kind] = (found + sentences(prose), characters + len("".join(code.split())))
    return folders


def row(name, found, code):
    """Returns a line of the table."""
    words = [len(s) for s in found] or [0]
    over = 100 * sum(n > LONG for n in words) / len(words)
    return (
        f"{name:28} {len(found):6} {sum(words) / len(words):6.1f} {over:5.1f} % {code / 1000:7.1f}"
    )


def main():
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("revision", nargs="?", help="measure this revision too")
    parser.add_argument("--longest", type=int, default=0, help="print so many of each folder")
    options = parser.parse_args()
    for revision in [options.revision, None] if options.revision else [None]:
        folders = measure(revision)
        print(f"{revision or 'this tree':28} {'sent.':>6} {'mean':>6} {'over 25':>7} {'kB':>7}")
        for name, (found, code) in sorted(folders.items()):
            print(row(name, found, code))
            for words in sorted(found, key=len, reverse=True)[: options.longest]:
                print(f"    {len(words):4}: {' '.join(words)}")
        comments = [s for name, (found, _) in folders.items() if name != "documents" for s in found]
        print(row("all comments", comments, sum(code for _, code in folders.values())), end="\n\n")


if __name__ == "__main__":
    main()
