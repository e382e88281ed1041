"""Tests the layout of the package's modules: which imports which, and how large they are. Reads
their texts."""

import ast
import re
from pathlib import Path

import pytest

import halfstep

PACKAGE = Path(halfstep.__file__).parent
#: modules by name, "compat.optimi" for one of the folder
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
#: methods of the largest class
MOST_METHODS = 45
#: lines of a module that says nothing of its length
MOST_LINES = 500
#: what users and other packages see of the package, which may import Optimizer
ABOVE = {
    "__init__", "__main__", "_hosted", "ema", "full_precision", "offload", "plan", "rules",
    "streaming",
}  # fmt: skip


def module_of(name):
    """Returns the module of this package that a dotted name stands for, or None."""
    return name if name in FILES else f"{name}.__init__" if f"{name}.__init__" in FILES else None


def imported(name):
    """Returns the modules of this package that a module imports, also inside functions."""
    folder = name.split(".")[:-1]
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder[: len(folder) - node.level + 1] + (node.module or "").split(".")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "halfstep":
            base = node.module.split(".")[1:]
        else:
            if isinstance(node, ast.Import):
                assert not any(alias.name.split(".")[0] == "halfstep" for alias in node.names), name
            continue
        base = [part for part in base if part]
        for alias in node.names:
            found.add(module_of(".".join([*base, alias.name])) or module_of(".".join(base)))
        if not base:
            found.discard(None)
    return found - {None}


IMPORTS = {name: imported(name) for name in FILES}


def imported_by(name):
    """Returns the modules that a module imports, and those that they import."""
    below, queue = set(), [name]
    while queue:
        for other in IMPORTS[queue.pop()] - below:
            below.add(other)
            queue.append(other)
    return below


def circles(imports):
    """Returns a circle of imports as a list of names, or None."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return path[path.index(name) :] + [name]
        if name in done:
            return None
        done.add(name)
        path.append(name)
        for other in sorted(imports[name]):
            found = visit(other)
            if found:
                return found
        path.pop()
        return None

    return next(filter(None, map(visit, sorted(imports))), None)


def test_imports_go_one_way():
    assert len(IMPORTS) > 30 and sum(map(len, IMPORTS.values())) > 100
    assert "_engine" in IMPORTS["_cache"] and "_compile" in IMPORTS["optimizer"]
    assert "optimizer" in IMPORTS["compat.lamb16"] and "_abi" in IMPORTS["__init__"]
    assert circles(IMPORTS) is None


def test_a_circle_would_be_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]


def test_nothing_is_imported_late_but_what_needs_a_compiler():
    late = {
        (name, alias.name)
        for name, tree in TREES.items()
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    assert late == {("optimizer", "_compile")}


def test_only_what_stands_above_the_optimizer_imports_it():
    """Everything below takes plain data."""
    users = {name for name, others in IMPORTS.items() if "optimizer" in others}
    faces = ("compat.", "integrations.")
    assert {name for name in users if not name.startswith(faces)} <= ABOVE
    below = imported_by("optimizer")
    assert {"_parts", "_cache", "_engine", "_abi"} <= below
    assert not below & {*ABOVE, "optimizer"}
    assert not any(name.startswith(faces) for name in below)


def test_nothing_below_the_optimizer_is_given_one():
    """A concern knows only those above it in _parts.py. Only the operator of a compiled step calls
    the optimizer."""
    given = {
        name
        for name in imported_by("optimizer")
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.arg) and node.arg == "optimizer"
    }
    assert given == {"_compile"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_classes_and_modules_are_no_larger_than_they_say(name):
    tree, lines = TREES[name], FILES[name].read_text(encoding="utf-8").count("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = [
                f for f in node.body if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))
            ]
            assert len(methods) <= MOST_METHODS, f"{node.name} has {len(methods)} methods"
    says = re.search(
        rf"(over|longer than) {MOST_LINES} lines",
        (ast.get_docstring(tree) or "").replace("\n", " "),
        re.I,
    )
    assert bool(says) == (lines > MOST_LINES), f"{name} has {lines} lines"
