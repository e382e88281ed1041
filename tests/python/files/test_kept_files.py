"""Tests scripts/compat.sh: one file of each kind is written, and read back by C, the program and
Python. Later versions have to read such files."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
BUILD = os.environ.get("HALFSTEP_BUILD", os.path.join(ROOT, "build"))
NEEDED = [os.path.join(BUILD, "halfstep"), os.path.join(BUILD, "tests", "test_compat")]

pytestmark = [
    pytest.mark.skipif(not os.path.exists(path), reason=f"{path} is not built") for path in NEEDED
]
pytest.importorskip("safetensors")


def compat(folder, *words, python=sys.executable):
    command = ["bash", os.path.join(ROOT, "scripts", "compat.sh"), BUILD, str(folder), *words]
    environment = {**os.environ, "PYTHON": python}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files") / "new"
    done = compat(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        "ok   files of every kind are read and gone on from, scalar",
        "ok   files of C, of the program and of Python are read by the program",
        "ok   9 files of Python are read and gone on from",
    ):
        assert said in done.stdout, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize(
    "name, said",
    [("c/expected.txt", "FAIL files of C"), ("program/expected.txt", "FAIL the checkpoint of 1 ")],
)
def test_other_bits_are_told(files, name, said, tmp_path):
    held = shutil.copytree(files, tmp_path / "held")
    text = (held / name).read_text()
    line = text.splitlines()[0]
    (held / name).write_text(text.replace(line, line[:-1] + ("0" if line[-1] != "0" else "1"), 1))
    done = compat(held, "read", python="false")
    assert done.returncode == 1 and said in done.stderr, done.stdout + done.stderr


def test_other_bits_of_python_are_told(files, tmp_path, capsys):
    path = os.path.join(ROOT, "scripts", "compat.py")
    spec = importlib.util.spec_from_file_location("compat_files", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    held = shutil.copytree(files / "python", tmp_path / "held")
    expected = json.loads((held / "expected.json").read_text())
    assert set(expected) == {kind.file for kind in script.KINDS}
    assert script.read(held) == 0
    expected["muon.pt"][0] = expected["packed.pt"][1] = "0" * 16
    (held / "expected.json").write_text(json.dumps(expected))
    (held / "sums.pt").write_bytes(b"")
    capsys.readouterr()
    assert script.read(held) == 3
    told = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == ["FAIL muon.pt", "FAIL packed.pt", "FAIL sums.pt"]


def test_files_of_a_release_are_not_replaced(files):
    before = (files / "c" / "expected.txt").read_text()
    done = compat(files)
    assert done.returncode == 1 and "is not empty" in done.stderr
    assert (files / "c" / "expected.txt").read_text() == before
