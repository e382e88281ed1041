#!/usr/bin/env python3
"""How much the check on first use (docs/gpu.md) notices: changes single instructions of the
kernels' PTX, by a seed, and lets the library check the emulated GPU.

    device_faults.py BUILD --number 300 --seed 1 --jobs 2

BUILD needs the fake driver with all kernels:

    cmake --build BUILD --target fake_cuda_emulated halfstep

A change is another instruction of the same types, a jump that is inverted, or an address that is
off by one element. What the check does not refuse is tried with golden cases. If they do not notice
it either, it does not count. Prints the share that the check refuses, and each change that only
golden cases notice, with its line of BUILD/tests/cuda/every.ptx.
"""

import argparse
import concurrent.futures
import os
import pathlib
import random
import re
import struct
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROW = struct.Struct("<HH5Iii")
#: general kernels are tried with one golden case of so many, fused ones with all of their rule
STRIDE = 12


def instructions():
    """Returns (name, types, meaning) of each row of instructions.def, by their numbers."""
    text = (ROOT / "tests/cuda/instructions.def").read_text()
    found = re.findall(r"^(HAND|ONE|TWO|THREE)\((.*)\)$", text, re.M)
    count = {"HAND": 0, "ONE": 2, "TWO": 3, "THREE": 4}
    rows = [(kind, [p.strip() for p in parts.split(",")]) for kind, parts in found]
    return [(p[0], tuple(p[1 : 1 + count[k]]), ",".join(p[1 + count[k] :])) for k, p in rows]


def functions(build):
    """Returns (name, first row) of each function of the translated PTX, by row."""
    text = (build / "tests/cuda/every.c").read_text()
    table = text.split("ptx_functions[] = {")[1].split("\n};")[0]
    return sorted(
        (int(first), name) for name, first in re.findall(r'\{"([^"]+)", \d, (\d+)', table)
    )


def place_of_rows(library):
    """Returns where the rows begin in the file, and how many there are."""
    symbols = subprocess.check_output(["readelf", "-sW", library], text=True)
    sections = subprocess.check_output(["readelf", "-SW", library], text=True)
    address, size, section = re.search(
        r"(\w+) +(\w+) OBJECT .* (\d+) ptx_rows$", symbols, re.M
    ).groups()
    start, offset = re.search(rf"\[ *{section}\] \S+ +\S+ +(\w+) +(\w+)", sections).groups()
    return int(address, 16) - int(start, 16) + int(offset, 16), int(size, 0) // ROW.size


def change(row, table, choose):
    """Returns a row with one change, and its description; None where nothing can be changed."""
    op, how, *x, offset, line = row
    name, types, meaning = table[op]
    if name == "bra" and how:
        return (op, 3 - how, *x, offset, line), "an inverted jump"
    if name in ("ld", "st"):
        step = 1 << (how >> 3 & 3)
        return (op, how, *x, offset + step, line), f"{name} at {step} bytes more"
    others = [i for i, (_, t, m) in enumerate(table) if types and t == types and m != meaning]
    if not others:
        return None
    other = choose.choice(others)
    return (other, how, *x, offset, line), f"{table[other][0]} for {name}"


def choose_changes(library, build, number, seed):
    """Yields (row, new row, description, function) of so many changes."""
    choose, table, found = random.Random(seed), instructions(), functions(build)
    start, count = place_of_rows(library)
    data = pathlib.Path(library).read_bytes()
    while number:
        i = choose.randrange(count)
        row = ROW.unpack_from(data, start + ROW.size * i)
        changed = change(row, table, choose)
        if changed:
            number -= 1
            function = [name for first, name in found if first <= i][-1]
            yield i, changed[0], changed[1], function, row[-1]


class Bench:
    """Runs device_faults with changed libraries."""

    def __init__(self, build, folder):
        self.build, self.folder = build, pathlib.Path(folder)
        self.library = build / "tests/fake_cuda/emulated/libcuda.so.1"
        self.start, _ = place_of_rows(self.library)
        self.program = self.folder / "device_faults"
        command = [
            "cc",
            "-O1",
            "-I.",
            "-Iinclude",
            "-Isrc",
            "-Itools",
            "-Itests",
            "lab/device_faults.c",
            "-o",
        ]
        command += [self.program, f"-L{build}", "-lhalfstep", f"-Wl,-rpath,{build}"]
        subprocess.run(command, cwd=ROOT, check=True)
        self.trusted = self.folder / "trusted"
        self.run(self.library.parent, "check", "-", cache=self.trusted, check=True)

    def run(self, driver, *words, cache, check=False, timeout=600):
        """Returns what the program returned; -1 if it was ended."""
        own = {
            "FAKE_CUDA_OPEN": "1",
            "HALFSTEP_SOURCE": str(ROOT),
            "HALFSTEP_CUDA_IMAGE": str(self.build / "tests/fake_cuda/image"),
            "LD_LIBRARY_PATH": str(driver),
            "XDG_CACHE_HOME": str(cache),
            "HALFSTEP_DEVICE_CHECK": "never" if words[0] == "golden" else "once",
        }
        try:
            done = subprocess.run(
                [self.program, *words],
                env={**os.environ, **own},
                timeout=timeout,
                text=True,
                capture_output=True,
            )
        except subprocess.TimeoutExpired:
            return -1
        if check and done.returncode:
            raise SystemExit(f"{' '.join(words)}: {done.stdout}{done.stderr}")
        return done.returncode

    def judge(self, changed):
        """Returns "check", "golden" or "nothing": what notices the change first."""
        i, row, _, function, _ = changed
        fused = re.match(r"halfstep_cuda_fused_(\w+?)_(f32|bf16_sr|int8|int4)_", function)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            data = bytearray(self.library.read_bytes())
            ROW.pack_into(data, self.start + ROW.size * i, *row)
            (pathlib.Path(folder) / "libcuda.so.1").write_bytes(data)
            if fused:
                header = (ROOT / f"src/rules/{fused[1]}.h").read_text()
                rule = re.search(r'RULE\("([^"]+)"', header)[1]
                states = fused[2].replace("_", "-")
                # The general code is the one that is trusted already.
                words, cache = ["check", f"{rule}/bf16-sr/{states}"], self.folder / f"cache{i}"
                (cache / "halfstep").mkdir(parents=True)
                for file in (self.trusted / "halfstep").iterdir():
                    (cache / "halfstep" / file.name).write_text("general\n")
                golden = ["golden", f"{rule}/", "1"]
            else:
                words, cache = ["check", "-"], pathlib.Path(folder) / "cache"
                golden = ["golden", "/", str(STRIDE)]
            if self.run(folder, *words, cache=cache):
                return "check"
            return "golden" if self.run(folder, *golden, cache=cache, timeout=1800) else "nothing"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    build = given.build.resolve()
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(given.jobs) as pool,
    ):
        bench = Bench(build, folder)
        changes = list(choose_changes(bench.library, build, given.number, given.seed))
        counts = dict.fromkeys(["check", "golden", "nothing"], 0)
        for changed, notices in zip(changes, pool.map(bench.judge, changes)):
            counts[notices] += 1
            if notices == "golden":
                print(f"{changed[3]}, line {changed[4]}: {changed[2]}", flush=True)
    noticed = counts["check"] + counts["golden"]
    share = 100 * counts["check"] / max(noticed, 1)
    print(f"{given.number} changes, of which golden cases or the check notice {noticed}.")
    print(f"The check refuses {counts['check']} of these, {share:.1f} %.")


if __name__ == "__main__":
    main()
