"""Runs examples/offload.py: states that exceed a hard limit of memory train from a file."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.all
HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLE = os.path.join(HERE, os.pardir, os.pardir, os.pardir, "examples", "offload.py")


def start(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, EXAMPLE, "--steps", "2", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_states_beyond_the_limit(tmp_path):
    stored, held = start(tmp_path), start(tmp_path, "--in-memory")
    out, err = stored.communicate(timeout=240)
    assert stored.returncode == 0, err
    assert re.findall(r"step (\d+): \d", out) == ["1", "2"]
    # 10 bytes a parameter are in the file, which are more than the limit of 230 MiB.
    assert float(re.search(r"(\S+) M parameters", out)[1]) * 10e6 > 230 << 20
    _, err = held.communicate(timeout=240)
    assert held.returncode and re.search("out of memory|allocate memory|primitive", err), err
