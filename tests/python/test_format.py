"""The C sources are laid out as .clang-format says; `make format` does it."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2]


def check(tree):
    return subprocess.run(
        ["bash", str(tree / "scripts/format.sh"), shutil.which("clang-format"), "--check"],
        capture_output=True,
        text=True,
    )


def test_sources_are_laid_out():
    result = check(SOURCE)
    assert result.returncode == 0, f"make format\n{result.stdout}{result.stderr}"


@pytest.mark.all
def test_a_bad_layout_is_found():
    """A copy with a crooked line, and one with a long line in a folder that is laid out by hand,
    are refused."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        for name in ("src", "include", "tools", "fuzz", "lab", "examples", "bench", "scripts"):
            shutil.copytree(SOURCE / name, tree / name)
        (tree / "tests").mkdir()
        shutil.copy(SOURCE / ".clang-format", tree)
        assert check(tree).returncode == 0
        for name, line in (
            ("src/base/lock.c", "int  x ;\n"),
            ("src/rules/lion.h", "/* " + "x" * 120 + " */\n"),
        ):
            path = tree / name
            before = path.read_text()
            path.write_text(before + line)
            result = check(tree)
            assert (
                result.returncode != 0 and os.path.basename(name) in result.stdout + result.stderr
            ), name
            path.write_text(before)
