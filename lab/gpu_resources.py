#!/usr/bin/env python3
"""Shows what the GPU kernels need for each thread, and how many warps a multiprocessor then holds.
Needs no GPU.

    gpu_resources.py [--archs 80,90,120]        as Markdown
    gpu_resources.py --write docs/results.md    puts the table between its marks there
    gpu_resources.py --logs 80=LOG,90=LOG       the same from what `ptxas -v` has printed
    gpu_resources.py --check LOG                fails if a kernel has more stack than 512 bytes, or
                                                a fused kernel more than 8 bytes of it or one
                                                block alone

clang makes PTX of src/device/cuda/code/kernels.cu, and ptxas 12.9 (scripts/ptxas.sh) assembles it.
Stack is that of a kernel and of all functions that it calls. A driver reserves it for every thread
that the GPU can hold."""

import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile

from gpu_arithmetic import CLANG
from gpu_instructions import ROOT, run, show, tools

STACK = 512  # bytes a thread
FUSED_STACK = 8  # of a fused kernel: two values that are read once a tile
WARPS = 8  # of a block
#: architecture: (warps that a multiprocessor can hold, KiB of its shared memory)
LIMITS = {
    80: (64, 164),
    86: (48, 100),
    89: (48, 100),
    90: (64, 228),
    100: (64, 228),
    120: (48, 100),
}
GENERAL = ("update sum cross decide decide_sums end_round scan transform accumulate write").split()
FUSED = (
    "adamw_bf16_sr_bf16_sr adamw_int8_int8 adamw_int4_int4 adan_int8_int8 ranger_int8_int8"
    " schedulefree_int8_int8 prodigy_int8_int8"
).split()


def read(text):
    """Reads the output of `ptxas -v`. Returns kernel -> (bytes of stack, bytes spilled, registers,
    bytes of shared memory)."""
    found = {}
    for part in re.split(r"Compiling entry function '", text)[1:]:
        name = re.match(r"\w+", part)[0]
        own = re.search(
            rf"properties for {name}\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores", part
        )
        used = re.search(r"Used (\d+) registers.*", part)
        deep = re.search(r"(\d+) bytes cumulative stack size", used[0])
        shared = re.search(r"(\d+) bytes smem", used[0])
        found[name.removeprefix("halfstep_cuda_")] = (
            int((deep or own)[1]),
            int(own[2]),
            int(used[1]),
            int(shared[1]) if shared else 0,
        )
    return found


def warps(arch, registers, shared):
    """Warps that a multiprocessor holds at once. A warp's registers are allocated by 256, within
    one of four parts; a block's shared memory has 1 KiB more."""
    most, kilobytes = LIMITS[arch]
    each = -(-registers * 32 // 256) * 256
    blocks = min(16384 // each * 4, most) // WARPS
    return WARPS * min(blocks, kilobytes * 1024 // (shared + 1024))


def check(kernels):
    """Returns what ptxas has made and may not be, as sentences."""
    said = [
        f"{name} has {stack} bytes of stack; at most {STACK} are allowed"
        for name, (stack, _, _, _) in kernels.items()
        if stack > STACK
    ]
    for name, (stack, spilled, registers, shared) in kernels.items():
        if name.startswith("fused_") and max(stack, spilled) > FUSED_STACK:
            said.append(f"{name} has values in local memory: {stack} bytes")
        if name.startswith("fused_") and warps(90, registers, shared) < 2 * WARPS:
            said.append(f"{name} has {registers} registers, which leave no room for a second block")
    return said


def logs_of(archs, folder, jobs):
    ptxas, _ = tools(folder)
    with tempfile.TemporaryDirectory() as scratch:
        ptx = os.path.join(scratch, "kernels.ptx")
        run(*CLANG, "-S", "-o", ptx, f"{ROOT}/src/device/cuda/code/kernels.cu")

        def log(arch):
            return subprocess.run(
                [ptxas, "-v", f"-arch=sm_{arch}", "--fmad=false"]
                + ["-o", os.path.join(scratch, str(arch)), ptx],
                capture_output=True,
                text=True,
                check=True,
            ).stderr

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            return dict(zip(archs, pool.map(log, archs)))


def table(found):
    lines = [
        "| kernel |" + "".join(f" sm_{arch}: stack | registers | warps |" for arch in found),
        "|---|" + "---:|---:|---:|" * len(found),
    ]
    fused = [name for name in next(iter(found.values())) if name.startswith("fused_")]
    rows = [(f"`{name}`", [name]) for name in GENERAL]
    rows += [(f"`fused_{name}`", ["fused_" + name]) for name in FUSED]
    for title, names in [*rows, (f"most of {len(fused)} fused kernels, fewest warps", fused)]:
        cells = []
        for arch, kernels in found.items():
            of = [kernels[name] for name in names]
            cells += [
                max(one[0] for one in of),
                max(one[2] for one in of),
                min(warps(arch, one[2], one[3]) for one in of),
            ]
        lines.append(f"| {title} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--archs",
        default="80,90,120",
        help="of " + ", ".join(map(str, LIMITS)),
    )
    parser.add_argument("--logs", help="ARCH=FILE,...: outputs of ptxas -v, in place of --archs")
    parser.add_argument("--check", metavar="LOG", help="only look for kernels that need too much")
    parser.add_argument("--write", metavar="FILE", help="replaces the table there")
    parser.add_argument(
        "--tools", default=os.path.join(ROOT, "build"), help="folder in which ptxas is put"
    )
    parser.add_argument("--jobs", type=int, default=2, help="assemblers at a time")
    given = parser.parse_args()
    if given.check:
        kernels = read(open(given.check).read())
        said = check(kernels) if kernels else ["no kernels in " + given.check]
        print("\n".join(said) or f"{len(kernels)} kernels")
        sys.exit(1 if said else 0)
    if given.logs:
        texts = {int(a): open(f).read() for a, f in (x.split("=") for x in given.logs.split(","))}
    else:
        texts = logs_of([int(a) for a in given.archs.split(",")], given.tools, given.jobs)
    unknown = [arch for arch in texts if arch not in LIMITS]
    if unknown:
        sys.exit(f"gpu_resources.py: {unknown[0]}: there are {', '.join(map(str, LIMITS))}")
    show(table({arch: read(text) for arch, text in texts.items()}), given.write)


if __name__ == "__main__":
    main()
