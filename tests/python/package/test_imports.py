"""Tests the rooms of the package: no import points up, and every module is of one room. Reads their
texts."""

import ast
from pathlib import Path

import pytest

import halfstep

PACKAGE = Path(halfstep.__file__).parent
#: from the top to the bottom, as docs/architecture.md has them
ROOMS = ["public", "_forecast", "_placement", "_step", "_states", "_ranks", "_settings",
         "_weights8", "_tensors", "_library"]  # fmt: skip
FILES = {p.relative_to(PACKAGE): p.read_text("utf-8") for p in sorted(PACKAGE.rglob("*.py"))}
#: methods of the largest class
MOST_METHODS = 45


def room_of(parts):
    return parts[0] if parts and parts[0] in ROOMS else "public"


def wrong(name, text):
    """Returns the imports of a module that point up, and those inside functions."""
    folder, tree, found = name.parts[:-1], ast.parse(text), []
    late = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*folder[: len(folder) + 1 - node.level], *filter(None, [node.module])]
            for alias in node.names:
                whole = ".".join([*base, alias.name]).split(".")
                up = ROOMS.index(room_of(whole)) < ROOMS.index(room_of(folder))
                if up or node in late and whole[-1] != "compiled":
                    found.append(f"{name}:{node.lineno}: {'.'.join(whole)}")
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and room_of(folder) != "public":
            assert "halfstep" not in ast.unparse(node)  # by its path
    return found


def test_no_import_points_up():
    assert {room_of(name.parts[:-1]) for name in FILES} == set(ROOMS)
    found = [line for name, text in FILES.items() for line in wrong(name, text)]
    assert not found, "\n".join(found)
    up = "from .._step import cache\ndef f():\n    from . import checks"
    assert len(wrong(Path("_states/files.py"), up)) == 2


@pytest.mark.parametrize("name", list(map(str, FILES)))
def test_no_class_is_too_large(name):
    for node in ast.walk(ast.parse(FILES[Path(name)])):
        if isinstance(node, ast.ClassDef):
            methods = [f for f in node.body if isinstance(f, ast.FunctionDef)]
            assert len(methods) <= MOST_METHODS, f"{node.name} has {len(methods)} methods"
