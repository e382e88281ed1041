#!/usr/bin/env python3
"""Prints the fused multiply-adds in machine code of a GPU, and exits with 1 if there are any.

    gpu_fused.py CUBIN [--tools FOLDER]

nvdisasm of the Python index reads the code. FOLDER keeps it (build by default)."""

import argparse
import os
import re
import subprocess
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
NVDISASM = "nvidia-cuda-nvdisasm==13.5.37"


def run(*command):
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"gpu_fused.py: {command[0]}: {found.stderr.strip()[-500:]}")
    return found.stdout


def nvdisasm(folder):
    """Returns the path of nvdisasm in this folder, installed if it is missing."""
    place = os.path.join(folder, "nvdisasm")
    if not os.path.isdir(place):
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")
        run(*pip, "--target", place, NVDISASM)
    for base, _, names in os.walk(place):
        if "nvdisasm" in names:
            return os.path.join(base, "nvdisasm")
    sys.exit(f"gpu_fused.py: {NVDISASM} holds no nvdisasm")


def fused(text):
    """Returns {kernel: its fused multiply-adds}. Those of two halves load constants if they
    multiply nothing."""
    found = {}
    for piece in re.split(r"\n\s*\.section\s+\.text\.", "\n" + text)[1:]:
        codes = re.findall(
            r"/\*[0-9a-f]{4,}\*/\s+((?:@!?U?P\w+ )?\s*(?:[FD]FMA|HFMA2)\b.*?);", piece
        )
        codes = [one for one in codes if not re.search(r"HFMA2\S* \w+, -RZ, RZ,", one)]
        if codes:
            found[piece.split(",")[0].strip()] = codes
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cubin")
    parser.add_argument("--tools", default=os.path.join(ROOT, "build"))
    given = parser.parse_args()
    kernels = fused(run(nvdisasm(given.tools), "-c", given.cubin))
    for name, codes in kernels.items():
        print(f"{name}: {len(codes)}, such as {codes[0]}")
    return 1 if kernels else 0


if __name__ == "__main__":
    sys.exit(main())
