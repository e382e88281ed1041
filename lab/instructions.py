#!/usr/bin/env python3
"""Counts the instructions that steps execute, by recipe and instruction set. The numbers are the
same on every run and every machine.

    instructions.py BUILD                 counts of one build, as Markdown; --by-rule: in short
    instructions.py OLD NEW               of two, with new / old
    instructions.py BUILD --write FILE    records them as budgets (`make budgets`:
                                          bench/instructions.csv)
    instructions.py BUILD --check FILE    the alarm: fails where a row needs more than its budget

BUILD is a build folder of any version, a libhalfstep.so of this one's header, or a file of --write.
--rows takes parts of names, or whole rows that are in no list ("muon/f32/f32 rows=4 ns_steps=1").
Its default is every rule in four formats and every recipe of bench/results.csv. --isa takes names.
Its default is all that this machine has but scalar, whose speed nobody counts. qemu counts a
library for the other processor, with a cross compiler: instructions.py build/aarch64.
lab/instructions.c does the counting and says how. $CC, or cc, compiles it.

A budget belongs to the compiler that made the library. More than 3 % above it for each element, or
10 % for a small tensor, is an alarm. Other compilers and options (--loose) may exceed the largest
budget by 30 %.
"""

import argparse
import concurrent.futures
import csv
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
COLUMNS = ["compiler", "isa", "row", "per_element", "small_tensor", "step"]
ELEMENT, TENSOR, STEP = range(3)
WHAT = ["instructions for each element", "instructions for a small tensor"]
TOLERANCE, LOOSE = [1.03, 1.10], [1.30, 1.30]
CANNOT = 77
MACHINES = {62: "x86_64", 183: "aarch64"}


def library_of(path):
    library = os.path.join(path, "libhalfstep.so") if os.path.isdir(path) else path
    if not os.path.exists(library):
        sys.exit(f"instructions.py: {library} is not there")
    return os.path.abspath(library)


def machine_of(library):
    with open(library, "rb") as file:
        return MACHINES.get(struct.unpack_from("<H", file.read(20), 18)[0], "unknown")


def compiler_of(library):
    """Returns name and major version of the compiler, as it left them in the library."""
    text = subprocess.run(
        ["readelf", "-p", ".comment", library], capture_output=True, text=True
    ).stdout
    clang, gcc = re.search(r"clang version (\d+)", text), re.search(r"GCC: \(.*\) (\d+)", text)
    return f"clang {clang[1]}" if clang else f"gcc {gcc[1]}" if gcc else "unknown"


def header_of(library):
    """Returns the folder of the header that the library was built with, if its build folder tells,
    else this tree's."""
    cache = os.path.join(os.path.dirname(library), "CMakeCache.txt")
    if os.path.exists(cache):
        with open(cache, encoding="utf-8") as file:
            source = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", file.read(), re.MULTILINE)
        if source and os.path.exists(os.path.join(source[1], "include", "halfstep.h")):
            return os.path.join(source[1], "include")
    return os.path.join(ROOT, "include")


class Recorded:
    """Counts of a file that --write wrote."""

    def __init__(self, path):
        self.budgets = read_budgets(path)
        compilers = {key[0] for key in self.budgets}
        if len(compilers) != 1:
            sys.exit(
                f"instructions.py: {path} has counts of {len(compilers)} compilers; leave one in it"
            )
        self.compiler = compilers.pop()

    def isas(self):
        return sorted({isa for _, isa, _ in self.budgets})

    def rows(self, patterns):
        rows = sorted({row for _, _, row in self.budgets})
        return [row for row in rows if not patterns or any(p in row for p in patterns)]

    def count(self, isas, rows):
        return {
            key[1:]: counts
            for key, counts in self.budgets.items()
            if key[1] in isas and key[2] in rows
        }


class Counter:
    """lab/instructions.c, compiled for the processor of a library and with its header, whose
    structures may differ from ours."""

    def __init__(self, library, folder):
        self.compiler = compiler_of(library)
        self.library, self.machine = library, machine_of(library)
        self.program = os.path.join(tempfile.mkdtemp(dir=folder), "instructions")
        here = self.machine == platform.machine()
        compiler = os.environ.get("CC", "cc") if here else f"{self.machine}-linux-gnu-gcc"
        self.before = (
            [] if here else [f"qemu-{self.machine}", "-L", f"/usr/{self.machine}-linux-gnu"]
        )
        for tool in [compiler.split()[0], *self.before[:1]]:
            if not shutil.which(tool):
                sys.exit(
                    f"instructions.py: {library} is for {self.machine}, and {tool} is not installed"
                )
        subprocess.run(
            [
                *compiler.split(),
                "-std=c11",
                "-O1",
                "-I",
                header_of(library),
                "-o",
                self.program,
                os.path.join(ROOT, "lab", "instructions.c"),
                "-ldl",
            ],
            check=True,
        )

    def run(self, *arguments):
        run = subprocess.run(
            [*self.before, self.program, self.library, *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        if run.returncode:
            sys.exit(
                CANNOT
                if run.returncode == CANNOT
                else f"instructions.py: {self.library} could not be counted"
            )
        return run.stdout.splitlines()

    def isas(self):
        return self.run("--isas")

    def rows(self, patterns):
        listed = self.run("--list")
        with open(os.path.join(ROOT, "bench", "results.csv"), encoding="utf-8") as file:
            listed += [row["recipe"] for row in csv.DictReader(file)]
        listed = sorted(set(listed))
        if not patterns:
            return listed
        return sorted({row for p in patterns for row in [row for row in listed if p in row] or [p]})

    def count(self, isas, rows):
        """Returns {(isa, row): (for each element, for each small tensor, for a step)}. Leaves out
        rows that the library does not know."""
        found = {}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for lines in pool.map(lambda isa: self.run("--isa", isa, *rows), isas):
                for line in lines:
                    row, isa, *counts = line.rsplit(",", 4)
                    found[isa, row] = tuple(float(c) for c in counts)
        return found


# ---- Tables --------------------------------------------------------------------------------------


def print_table(head, left, rows):
    print("| " + " | ".join(head) + " |\n|" + "---|" * left + "---:|" * (len(head) - left))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def cell(found, isa, row, what, digits=2):
    """Returns a count as text, or nothing if the library does not know the row."""
    counts = found.get((isa, row))
    return f"{counts[what]:.{digits if what == ELEMENT else 0}f}" if counts else ""


def print_counts(isas, rows, found):
    columns = [(what, isa) for what in (ELEMENT, TENSOR, STEP) for isa in isas]
    head = [f"{isa}, {('element', 'small tensor', 'step')[what]}" for what, isa in columns]
    lines = [[f"`{row}`", *(cell(found, isa, row, what) for what, isa in columns)] for row in rows]
    print_table(["row", *head], 1, lines)


def print_by_rule(isas, rows, found):
    """Prints tables that are short enough for a page: rules by formats, the instruction sets in one
    cell, then the other rows."""
    formats = ["f32/f32", "bf16-sr/bf16-sr", "bf16-sr/int8", "bf16-ecc8/int8"]

    def cells(row, what):
        return "; ".join(cell(found, isa, row, what, 1) for isa in isas)

    left, lines = set(rows), []
    for rule in dict.fromkeys(row.split("/")[0] for row in rows):
        line = [f"`{rule}`"]
        for weight, state in (f.split("/") for f in formats):
            # States that the format does not serve take their defaults; ema has none.
            pattern = rf"{rule}/{weight}(/{state}(\+{state})*(\+bf16-sr)?)?"
            fits = [row for row in sorted(left) if re.fullmatch(pattern, row)]
            line.append(cells(fits[0], ELEMENT) if fits else "")
            left.difference_update(fits[:1])
        plain = f"{rule}/f32/f32"
        lines.append([*line, cells(plain if plain in rows else f"{rule}/f32", TENSOR)])
    print(f"{'; '.join(isas)}:\n")
    print_table(["rule", *[f"`{f}`" for f in formats], "small tensor, `f32/f32`"], 1, lines)
    lines = [[f"`{row}`", cells(row, ELEMENT), cells(row, TENSOR)] for row in sorted(left)]
    print_table(["row", "element", "small tensor"], 1, lines)


def print_comparison(isas, rows, old, new):
    head = [f"{isa}{column}" for isa in isas for column in (", old", ", new", ", new / old")]
    for what, title in (
        (ELEMENT, "Instructions for each element"),
        (TENSOR, "Instructions for each small tensor"),
        (STEP, "Instructions for a step of one tensor, whatever its size"),
    ):
        lines = []
        for row in rows:
            line = [f"`{row}`"]
            for isa in isas:
                a, b = (found[isa, row][what] if (isa, row) in found else 0 for found in (old, new))
                line += [cell(old, isa, row, what), cell(new, isa, row, what)]
                line.append(f"{b / a:.3f}" if a and b else "")
            lines.append(line)
        print(f"{title}:\n")
        print_table(["row", *head], 1, lines)


# ---- Budgets -------------------------------------------------------------------------------------


def read_budgets(path):
    """Returns {(compiler, isa, row): counts}."""
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return {
            (r["compiler"], r["isa"], r["row"]): tuple(float(r[c]) for c in COLUMNS[3:])
            for r in csv.DictReader(file)
        }


def write_budgets(path, compiler, isas, found):
    """Replaces what this compiler has for these instruction sets. All else stays."""
    budgets = {
        key: counts
        for key, counts in read_budgets(path).items()
        if key[0] != compiler or key[1] not in isas
    }
    budgets.update({(compiler, isa, row): counts for (isa, row), counts in found.items()})
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for key in sorted(budgets):
            writer.writerow(
                [*key, f"{budgets[key][ELEMENT]:.3f}", *[f"{c:.0f}" for c in budgets[key][TENSOR:]]]
            )


def check_budgets(path, compiler, isas, rows, found, loose, listed):
    budgets = read_budgets(path)
    failures, checked, below, exact = [], 0, 0, 0
    for isa in isas:
        recorded = any(key[:2] == (compiler, isa) for key in budgets)
        if not any(key[1] == isa for key in budgets):
            print(f"{isa}: no budgets are recorded for it")
            continue
        if recorded:
            failures += [
                f"{row}, {isa}: has a budget, and is no row any more"
                for c, i, row in sorted(budgets)
                if (c, i) == (compiler, isa) and row not in listed
            ]
        tolerance = TOLERANCE if recorded and not loose else LOOSE
        for row in rows:
            counts = found.get((isa, row))
            if counts is None:
                failures.append(f"{row}, {isa}: could not be counted")
                continue
            known = [
                b
                for (c, i, r), b in budgets.items()
                if i == isa and r == row and (c == compiler or not recorded)
            ]
            if not known:
                failures.append(f"{row}, {isa}: has no budget")
                continue
            checked += 1
            exact += tolerance is TOLERANCE
            for what in (ELEMENT, TENSOR):
                budget = max(b[what] for b in known)
                digits = 3 if what == ELEMENT else 0
                if counts[what] > budget * tolerance[what]:
                    failures.append(
                        f"{row}, {isa}: {counts[what]:.{digits}f} {WHAT[what]}; its budget is"
                        f" {budget:.{digits}f}, and {budget * tolerance[what]:.{digits}f} the most"
                        f" that passes ({compiler})"
                    )
                below += (
                    what == ELEMENT
                    and tolerance is TOLERANCE
                    and counts[what] * TOLERANCE[what] < budget
                )
    for failure in failures:
        print(f"FAIL {failure}")
    if failures:
        print(
            "What is meant to be so is recorded by `make budgets`, and reviewed as a diff of"
            " bench/instructions.csv."
        )
        return 1
    if not checked:
        print("skipped: nothing has a budget here")
        return CANNOT
    print(f"ok   {checked} rows within their budgets, {exact} of them those of {compiler}")
    if below:
        print(f"     {below} rows need 3 % less than recorded: `make budgets`")
    return 0


def main():
    parser = argparse.ArgumentParser(usage=__doc__.replace("%", "%%"))
    parser.add_argument("build", nargs="+")
    parser.add_argument("--rows", nargs="+")
    parser.add_argument("--isa", nargs="+")
    parser.add_argument("--write")
    parser.add_argument("--check")
    parser.add_argument("--by-rule", action="store_true")
    parser.add_argument("--loose", action="store_true")
    a = parser.parse_args()
    if len(a.build) > 2 or (len(a.build) == 2 and (a.write or a.check)):
        parser.error("one build, or two to compare")
    if a.write and a.rows:
        parser.error("--write records every row")
    with tempfile.TemporaryDirectory() as folder:
        counters = [
            Recorded(path) if path.endswith(".csv") else Counter(library_of(path), folder)
            for path in a.build
        ]
        last = counters[-1]
        available = last.isas()
        isas = (
            [isa for isa in available if isa in a.isa]
            if a.isa
            else [isa for isa in available if isa != "scalar"]
        )
        if not isas:
            print(
                f"skipped: none of {' '.join(a.isa or ['the vector instruction sets'])} runs here"
            )
            return CANNOT
        listed, rows = last.rows(None), last.rows(a.rows)
        found = [counter.count(isas, rows) for counter in counters]
    if a.write:
        write_budgets(a.write, last.compiler, isas, found[-1])
    elif a.check:
        return check_budgets(a.check, last.compiler, isas, rows, found[-1], a.loose, listed)
    elif len(found) == 2:
        print_comparison(isas, rows, *found)
    elif a.by_rule:
        print_by_rule(isas, rows, found[-1])
    else:
        print_counts(isas, rows, found[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
