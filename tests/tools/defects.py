#!/usr/bin/env python3
"""Puts defects into the Python package, one at a time, and shows that the test for each fails.

    defects.py [WORD...]    those whose line has all words; in the build folder of `make test`

These tests once judged something beside the package, such as what torch's products keep on some
processors. A bound that is made wider must still see the defect that it is for.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("HALFSTEP_BUILD", ROOT / "build"))
ONE_LAYER = "nn/test_nn.py::test_forward_and_backward_decode_one_layer_at_a_time"

#: test, file, text of today, text with the defect, what the defect does
DEFECTS = (
    [
        (
            f"{ONE_LAYER}[{how}]",
            "_weights8/views.py",
            "    dtype = dtype or weight.dtype\n",
            "    dtype = dtype or weight.dtype\n"
            "    kept = globals().setdefault('_kept', {})\n"
            "    if len(kept) < 100:\n"
            "        kept[len(kept)] = torch.empty(weight.shape, dtype=dtype)\n",
            "each decoded weight is kept",
        )
        for how in ("frozen", "released", "autocast", "attention")
    ]
    + [
        (
            f"{ONE_LAYER}[{how}]",
            "_weights8/views.py",
            "    dtype = dtype or weight.dtype\n",
            "    dtype = dtype or weight.dtype\n"
            "    wide = torch.empty(weight.shape, dtype=torch.float64)  # noqa: F841\n",
            "a weight is decoded beside a copy of 8 bytes an element",
        )
        for how in ("frozen", "released", "attention")
    ]
    + [
        (
            "nn/test_int8_weight.py::test_memory_is_that_of_the_bytes",
            "_weights8/functions.py",
            "    func(weight._stored)\n    return weight\n",
            "    return weight\n",
            "share_memory() does not reach the bytes of a weight",
        )
    ]
)


def outcome(defect):
    """Returns what is wrong with a row, or None."""
    test, name, today, wrong, _ = defect
    with tempfile.TemporaryDirectory() as folder:
        package = pathlib.Path(folder) / "halfstep"
        shutil.copytree(ROOT / "python" / "halfstep", package)
        text = (package / name).read_text(encoding="utf-8")
        if text.count(today) != 1:
            return f"{name} has this text {text.count(today)} times: {today!r}"
        (package / name).write_text(text.replace(today, wrong), encoding="utf-8")
        done = subprocess.run(
            [BUILD / "venv/bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider",
             f"tests/python/{test}"],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": folder,
                "HALFSTEP_LIBRARY": str(BUILD / "libhalfstep.so"),
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
        )  # fmt: skip
    if done.returncode == 1 and "1 failed" in done.stdout:
        return None
    return f"the test does not fail (status {done.returncode}):\n{done.stdout[-2000:]}{done.stderr}"


def main():
    wrong = 0
    for defect in DEFECTS:
        line = f"{defect[0]}: {defect[-1]}"
        if all(word in line for word in sys.argv[1:]):
            problem = outcome(defect)
            wrong += problem is not None
            print(f"ok   {line}" if problem is None else f"FAIL {line}\n{problem}", flush=True)
    sys.exit(wrong > 0)


main()
