#!/usr/bin/env python3
"""Steps with states in a file against fio, which reads and writes as many bytes, half and half.

    store.py [--params 256] [--states int8] [--rounds 7] [--directory DIR]

Both go past the page cache, and both end with one sync. A step also computes, and writes its
record with a sync of its own. They take turns, and the ratio of a round is that of two
neighbours. fio is taken as it is fastest of a few ways of use, which are tried first."""

import argparse
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time

import torch

import halfstep

WIDTH = 4096
WAYS = (("libaio", 8), ("libaio", 32), ("psync", 1))


def fio(path, size, engine, depth):
    """Returns bytes per second of reading and writing `size` bytes in all."""
    command = [
        *("fio", "--name=store", f"--filename={path}", f"--size={size}", f"--io_size={size}"),
        *("--rw=rw", "--rwmixread=50", "--bs=4M", "--direct=1", "--end_fsync=1"),
        *(f"--ioengine={engine}", f"--iodepth={depth}", "--output-format=json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"fio fails: {(done.stderr or done.stdout).strip()[-300:]}")
    job = json.loads(done.stdout)["jobs"][0]
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    return moved / (job["job_runtime"] / 1e3)


def half_bytes(path):
    """Returns the bytes of all pieces, from the header (docs/checkpoints.md)."""
    with open(path, "rb") as file:
        return struct.unpack_from("<Q", file.read(72), 48)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--params", type=float, default=256, help="millions of parameters")
    parser.add_argument("--states", default="int8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", help="where the file is (default: TMPDIR)")
    arguments = parser.parse_args()
    if not shutil.which("fio"):
        sys.exit(
            "store.py: fio is missing; install it (it is a package of most systems) to compare"
        )
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        measure(arguments, folder)


def measure(arguments, folder):
    path, other = os.path.join(folder, "run.states"), os.path.join(folder, "fio")
    rows = max(1, int(arguments.params * 1e6) // WIDTH // 16)
    weights = [
        torch.nn.Parameter(torch.zeros(rows, WIDTH, dtype=torch.bfloat16)) for _ in range(16)
    ]
    for weight in weights:
        weight.grad = torch.randn(weight.shape).bfloat16()
    # Weights in the file would be written only; without them both halves are equal.
    optimizer = halfstep.AdamW(
        weights, states=arguments.states, store=halfstep.Store(path, weights=False)
    )
    optimizer.step()
    half = half_bytes(path)
    size = 2 * half // (4 << 20) * (4 << 20)
    fio(other, size, *WAYS[0])  # lays the file out
    speeds = {way: statistics.median(fio(other, size, *way) for _ in range(3)) for way in WAYS}
    way = max(speeds, key=speeds.get)
    print(
        f"{2 * half / 1e9:.2f} GB a step, half read and half written; fio: {way[0]}, {way[1]} deep"
    )
    ratios = []
    for number in range(arguments.rounds):
        begin = time.perf_counter()
        optimizer.step()
        ours = 2 * half / (time.perf_counter() - begin)
        theirs = fio(other, size, *way)
        ratios.append(ours / theirs)
        print(
            f"round {number}: {ours / 1e9:.2f} GB/s, fio {theirs / 1e9:.2f}, ratio {ratios[-1]:.2f}"
        )
    print(f"median ratio {statistics.median(ratios):.2f}; at least 0.80 is the aim")


if __name__ == "__main__":
    main()
