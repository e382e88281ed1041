#!/usr/bin/env python3
"""Keeps files up to date that follow from the library's table of rules: the hash that `python -m
halfstep verify` expects, the package's classes (class_text.py), and the lists of rules in
docs/choosing.md, of hyper-parameters in docs/c.md and of classes in docs/python.md and
docs/reference/python-api.md. Also the list of the ABI, from the headers.

    generate.py            names the files that would change, and exits with 1 if there are any. If
                           the classes would, the others wait for them
    generate.py --write    writes them

Both take the package in this tree and the library that HALFSTEP_LIBRARY names. `make generate`
builds that library first.
"""

import importlib.util
import os
import re
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")


def between(path, mark, text):
    """Returns the file with another text between its marks."""
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        before, rest = file.read().split(f"<!-- {mark} -->")
    return before + f"<!-- {mark} -->" + text + "<!-- end -->" + rest.split("<!-- end -->", 1)[1]


def hypers(rules):
    """Returns a table of the rules with the names and defaults of their own hyper-parameters."""
    lines = ["", "| rule | `lr` | `weight_decay` | decay | its own |", "|---|---|---|---|---|"]
    common = set.intersection(*(set(rule.hypers) for rule in rules.values()))
    for name, rule in rules.items():
        own = [
            f"`{key}` {hyper.words[int(hyper.initial)] if hyper.words else f'{hyper.initial:g}'}"
            for key, hyper in rule.hypers.items()
            if key not in common
        ]
        lr, decay = (f"{rule.hypers[key].initial:g}" for key in ("lr", "weight_decay"))
        lines.append(f"| `{name}` | {lr} | {decay} | `{rule.decay}` | {', '.join(own)} |")
    return "\n".join(lines) + "\n"


def sections(classes):
    """Returns a section of the reference for each class. A class with modes has the methods that
    switch them from a base class."""
    modes = "\n    options:\n      inherited_members: [eval, train]"
    return "\n\n" + "".join(
        f"::: halfstep.{name}{modes if hasattr(cls, 'train') else ''}\n\n"
        for name, cls in classes.items()
    )


def classes():
    """The text of the package's classes, by path. It needs no package that has been run."""
    sys.path.append(os.path.join(ROOT, "scripts"))
    import class_text

    return {class_text.PATH: class_text.text()}


def files():
    """The text of each other file, by path."""
    sys.path.append(os.path.join(ROOT, "tests", "house"))
    import abi as declared

    from halfstep import __main__, rules
    from halfstep._library import abi

    main = os.path.join("python", "halfstep", "__main__.py")
    with open(os.path.join(ROOT, main), encoding="utf-8") as file:
        verify = re.sub(
            r'^EXPECTED = ".*"$', f'EXPECTED = "{__main__.run()}"', file.read(), flags=re.M
        )
    return {
        main: verify,
        os.path.join("tests", "golden", "abi.txt"): declared.text(),
        os.path.join("docs", "choosing.md"): between(
            os.path.join("docs", "choosing.md"),
            "rules",
            " ".join(f"`{name}`" for name in abi.rules),
        ),
        os.path.join("docs", "c.md"): between(
            os.path.join("docs", "c.md"), "hypers", hypers(abi.rules)
        ),
        os.path.join("docs", "python.md"): between(
            os.path.join("docs", "python.md"),
            "classes",
            " ".join(f"`{name}`" for name in rules.classes),
        ),
        os.path.join("docs", "reference", "python-api.md"): between(
            os.path.join("docs", "reference", "python-api.md"), "classes", sections(rules.classes)
        ),
    }


def update(texts):
    """Prints which files have other texts, and writes them with --write. Returns how many there
    are that were not written."""
    left = 0
    for path, text in texts.items():
        with open(os.path.join(ROOT, path), encoding="utf-8") as file:
            if file.read() == text:
                continue
        print(path)
        if "--write" in sys.argv[1:]:
            with open(os.path.join(ROOT, path), "w", encoding="utf-8") as file:
                file.write(text)
        else:
            left += 1
    return left


def main():
    sys.path.insert(0, os.path.join(ROOT, "python"))
    # The package refuses a library whose table its classes were not written from.
    spec = importlib.util.find_spec("halfstep")
    package = sys.modules["halfstep"] = importlib.util.module_from_spec(spec)
    left = update(classes())
    if not left:
        spec.loader.exec_module(package)
        left = update(files())
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
