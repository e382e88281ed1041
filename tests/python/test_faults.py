"""Steps, saves and loads while calls into the C library fail: a short sweep of
tests/faults/python_sweep.py."""

import os
import subprocess
import sys

import pytest

SCRIPT = os.path.join(os.path.dirname(__file__), "..", "faults", "python_sweep.py")


def test_calls_that_fail(tmp_path):
    """A failed call raises and leaves the old file. The same call made again gives the same
    bits."""
    library = os.path.join(os.environ.get("HALFSTEP_BUILD", "build"), "tests", "libfaults.so")
    if not os.path.exists(library):
        pytest.skip(f"{library} is not built")
    # LD_PRELOAD is a list, which blanks divide.
    os.symlink(os.path.abspath(library), tmp_path / "faults.so")
    environment = {**os.environ, "LD_PRELOAD": str(tmp_path / "faults.so")}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--short"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 wrong;" in done.stdout, done.stdout
