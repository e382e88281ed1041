"""C sources are laid out as .clang-format says and Python as pyproject.toml says, by `make format`.
ruff finds nothing in Python."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[3]
FOLDERS = ("src", "include", "tools", "fuzz", "lab", "examples", "bench", "scripts", "python")


def check(tree):
    return subprocess.run(
        ["bash", str(tree / "scripts/format.sh"), "--check"], capture_output=True, text=True
    )


def test_sources_are_laid_out():
    result = check(SOURCE)
    assert result.returncode == 0, f"make format\n{result.stdout}{result.stderr}"


@pytest.mark.all
def test_a_bad_layout_is_found(tmp_path):
    """The check refuses a copy with a crooked line, and one with too long a line in a folder laid
    out by hand. It also refuses one with a finding of ruff in Python."""
    tree = tmp_path / "tree"
    for name in FOLDERS:
        shutil.copytree(SOURCE / name, tree / name)
    (tree / "tests").mkdir()
    for name in (".clang-format", "pyproject.toml"):
        shutil.copy(SOURCE / name, tree)
    assert check(tree).returncode == 0
    for name, line, reason in (
        ("src/base/lock.c", "int  x ;\n", "lock.c"),
        ("src/rules/lion.h", f"/* {'x' * 120} */\n", "lion.h"),
        ("python/halfstep/plan.py", "x = {  'a':1 }\n", "python/halfstep/plan.py:"),
        ("bench/claims.py", f"# {'x ' * 60}x\n", "bench/claims.py:"),
        ("lab/mutants.py", "import collections\n", "lab/mutants.py:"),
    ):
        path = tree / name
        before = path.read_text()
        path.write_text(before + line)
        result = check(tree)
        assert result.returncode != 0 and reason in result.stdout + result.stderr, name
        path.write_text(before)
