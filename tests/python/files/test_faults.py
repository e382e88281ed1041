"""Steps, saves and loads while calls into the C library fail: a short sweep of
tests/faults/python_sweep.py."""

import os
import subprocess
import sys

import pytest

SCRIPT = os.path.join(os.path.dirname(__file__), "..", "..", "faults", "python_sweep.py")


def test_calls_that_fail():
    """A failed call raises and leaves the old file. The same call made again gives the same
    bits."""
    folder = os.path.abspath(os.path.join(os.environ.get("HALFSTEP_BUILD", "build"), "tests"))
    if not os.path.exists(os.path.join(folder, "libfaults.so")):
        pytest.skip(f"libfaults.so is not built in {folder}")
    # LD_PRELOAD itself takes a blank for the end of a path.
    environment = {**os.environ, "LD_PRELOAD": "libfaults.so", "LD_LIBRARY_PATH": folder}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--short"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 wrong;" in done.stdout, done.stdout
