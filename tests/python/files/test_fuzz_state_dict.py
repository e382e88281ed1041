"""Mutated state_dicts: the seeded rounds of fuzz/fuzz_state_dict.py."""

import os
import subprocess
import sys


def test_mutated_state_dicts():
    """A load is refused with the optimizer unchanged, or it is taken. Later steps and saves do not
    crash."""
    script = os.path.join(os.path.dirname(__file__), "..", "..", "..", "fuzz", "fuzz_state_dict.py")
    done = subprocess.run(
        [sys.executable, script, "--rounds", "200"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
