#!/usr/bin/env python3
"""Counts the instructions of the fused kernels for each element, by recipe and architecture, and
what they leave of memory's speed. Needs no GPU.

    gpu_instructions.py [--archs 80,90,120] [--rows adamw/bf16-sr/int8,...]    as Markdown
    gpu_instructions.py --write docs/results.md  puts the table between its marks there
    gpu_instructions.py --fused CUBIN           prints the fused multiply-adds in machine code;
                                                exits with 1 if there are any

clang makes PTX of src/device/cuda/code/kernels.cu, with one format of weights and one of gradients
at a time. ptxas 12.9 (scripts/ptxas.sh) makes machine code of it, and nvdisasm of the Python index
reads that. The count is of the loop over tiles, in which a lane has eight elements. It takes the
longest way through the loop, without the slow paths of division and root, and without a new segment
of random words.

The bound is an estimate, not a measurement. Memory moves the bytes of a step at 92 % of its data
sheet. Multiprocessors issue four times 32 lanes a cycle. The slower of the two is the time."""

import argparse
import concurrent.futures
import functools
import os
import re
import subprocess
import sys
import tempfile

from gpu_arithmetic import CLANG

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
NVDISASM = "scripts/pins/nvdisasm.txt"
PLACES = 8  # elements of a lane (src/device/cuda/code/lane.h)
COPY = 0.92  # of the data sheet's bandwidth
#: architecture: (a GPU of it, multiprocessors, GHz, TB/s of its data sheet)
GPUS = {
    80: ("A100 80 GB", 108, 1.41, 2.039),
    86: ("RTX 3090", 82, 1.70, 0.936),
    89: ("RTX 4090", 128, 2.52, 1.008),
    90: ("H200", 132, 1.755, 4.8),
    100: ("B200", 148, 1.85, 7.7),
    120: ("RTX 5090", 170, 2.41, 1.792),
}
ROWS = [
    "adamw/f32/f32",
    "adamw/bf16-sr/bf16-sr",
    "adamw/bf16-kahan/bf16-sr",
    "adamw/bf16-sr/int8",
    "adamw/bf16-ecc8/int8",
    "adamw/bf16-sr/int4",
    "lion/bf16-sr/bf16-sr",
    "lion/bf16-sr/int8",
    "lamb16/bf16-sr/bf16-sr",
    "adan/bf16-sr/int8",
]
#: bits an element of what is stored: weights with what is beside them; a signed state and a second
#: moment
WEIGHT_BITS = {"f32": 32, "bf16-sr": 16, "bf16-kahan": 32, "bf16-ecc8": 24}
STATE_BITS = {"f32": 32, "bf16-sr": 16, "int8": 8.5, "int4": 4.5}


def show(table, page):
    """Prints a table, or puts it between the marks of this program in a page."""
    if not page:
        print(table)
        return
    program = os.path.basename(sys.argv[0])
    begin, end = f"<!-- lab/{program} -->", "<!-- end -->"
    head, found, rest = open(page).read().partition(begin)
    if not found or end not in rest or begin in rest:
        sys.exit(f"{program}: {page} has no place for the table ({begin} ... {end})")
    with open(page, "w") as file:
        file.write(f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}")


def run(*command):
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"gpu_instructions.py: {command[0]}: {found.stderr.strip()[-500:]}")
    return found.stdout


def tools(folder):
    scripts, place = os.path.join(ROOT, "scripts"), os.path.join(folder, "nvdisasm")
    ptxas = run("bash", f"{scripts}/ptxas.sh", os.path.join(folder, "ptxas")).strip()
    run("bash", f"{scripts}/venv.sh", place, NVDISASM)
    for base, _, names in os.walk(place):
        if "nvdisasm" in names:
            return ptxas, os.path.join(base, "nvdisasm")
    sys.exit(f"gpu_instructions.py: {NVDISASM} names a package without nvdisasm")


def ptx_of(folder, rules, weight, gradient, states):
    """Device code with one format of each, and only with the rules and states of its rows."""
    chosen = " || ".join(f"HSTEP_RULE_##rule == HSTEP_RULE_{states_of(rule)[0]}" for rule in rules)
    recipes = " ".join(f"X({one}, {one}, __VA_ARGS__)" for one in states)
    out = os.path.join(folder, f"{weight}.ptx")
    run(
        *CLANG,
        f"-DHSTEP_CUDA_IS_CHOSEN(rule)=({chosen})",
        f"-DHSTEP_CUDA_FUSED_WEIGHTS(X)=X({weight.replace('-', '_')})",
        f"-DHSTEP_CUDA_FUSED_GRADIENTS(X)=X({gradient})",
        f"-DHSTEP_CUDA_FUSED_RECIPES(X,...)={recipes}",
        "-S",
        "-o",
        out,
        f"{ROOT}/src/device/cuda/code/kernels.cu",
    )
    return out


class Code:
    """The basic blocks of a kernel: instructions, and where each goes on."""

    def __init__(self, text):
        labels, codes = {}, []
        for line in text.splitlines():
            label = re.match(r"\s*(\.L_x_\d+):", line)
            found = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
            if label:
                labels[label[1]] = len(codes)
            elif found:
                codes.append(found[1])
        jumps, meets = {}, {}
        for at, code in enumerate(codes):
            jump = re.search(r"\bBRA\b[^`]*`\((\.L_x_\d+)\)", code)
            meet, met = (
                re.search(r"\bBSSY\S* (B\d+), `\((\.L_x_\d+)\)", code),
                re.search(r"\bBSYNC\S* (B\d+)", code),
            )
            if jump:
                jumps[at] = labels.get(jump[1])
            elif meet:
                meets[meet[1]] = labels.get(meet[2])
            elif met:  # lanes go on where they said that they would meet
                jumps[at] = meets.get(met[1])
        starts = sorted({0, *labels.values(), *(at + 1 for at in jumps)} & set(range(len(codes))))
        self.of = {start: codes[start:end] for start, end in zip(starts, [*starts[1:], len(codes)])}
        self.next = {}
        for start, block in self.of.items():
            last = start + len(block) - 1
            ends = re.match(
                r"(EXIT|RET|BRA|BSYNC)\b(?!\.(DIV|CONV))", block[-1]
            )  # without a predicate
            self.next[start] = [
                to for to in ([] if ends else [last + 1]) + [jumps.get(last)] if to in self.of
            ]
        self.before = {start: [] for start in self.of}
        for start, following in self.next.items():
            for to in following:
                self.before[to].append(start)

    def loop(self, head, last):
        """The blocks of the loop that goes back from `last` to `head`; None if that is no loop's
        head."""
        found, waiting = {head}, [last]
        while waiting:
            block = waiting.pop()
            if block not in found:
                found.add(block)
                waiting += self.before[block]
        return None if 0 in found and head else found

    def exact(self, start):
        """The block that takes roots, quotients or codes again, exactly, after a block that asked
        for it. It asks in three cases (src/vec/cuda.h): an estimate of a code is near its end (less
        than 6 << 16 away), some of four are not at least 2^-50 or 2^-100, or a scale is above
        2^125."""
        last = start + len(self.of[start]) - 1
        jump = re.match(r"@(!?)(P\d) BRA\b", self.of[start][-1])
        if not jump:
            return []
        # What asked may stand some blocks before, with other jumps in between.
        starts = sorted(self.of)
        at = starts.index(start)
        for one in reversed(
            [code for block in starts[max(0, at - 6) : at + 1] for code in self.of[block][:-1]]
        ):
            near = re.search(r"ISETP\.(G|L)\w\.U32\.AND (P\d), PT, \w+, 0x(?:5ffff|60000),", one)
            least = re.search(
                r"FSETP\.GE\.AND (P\d), PT, [\w.]+,"
                r" (?:8\.8817841970012\d*e-16|7\.88860905221011\d*e-31),",
                one,
            )
            over = re.search(r"FSETP\.GTU\.AND (P\d), PT, [\w.]+, 4\.2535295865117\d*e\+37,", one)
            if over and over[1] == jump[2]:
                return [to for to in self.next[start] if (to == last + 1) == bool(jump[1])]
            set_here = re.match(r"(?:@!?P\d )?\w+[\w.]* (P\d),", one)
            if (near and near[2] == jump[2]) or (least and least[1] == jump[2]):
                goes_on = (not near or near[1] == "G") == (not jump[1])
                return [to for to in self.next[start] if (to == last + 1) == goes_on]
            if set_here and set_here[1] == jump[2]:
                return []
        return []

    def longest(self, head, last, inside):
        """The blocks on the longest way through a loop, but for those that are seldom run: they
        call (a quotient or root out of the ordinary), store to shared memory (the key of a new
        segment of random words), know BF16's largest number (rounding near it), or take the root of
        a code again."""
        seldom = {
            b
            for b in inside
            if any(
                re.match(r"(CALL|STS|WARPSYNC\.COLLECTIVE)\b|LOP3.*0x7f7f0000", code)
                for code in self.of[b]
            )
        }
        seldom |= {to for b in inside for to in self.exact(b)}
        known = {last: (len(self.of[last]), (last,))}

        def way(block, path):
            if block not in known:
                after = [
                    way(to, path | {block})
                    for to in self.next[block]
                    if to in inside and to != head and to not in seldom and to not in path
                ]
                most = max((found for found in after if found), default=None)
                known[block] = most and (most[0] + len(self.of[block]), (block, *most[1]))
            return known[block]

        found = way(head, frozenset())
        return found and found[1]


def loop_of(text):
    """The instructions of the loop over tiles, the innermost one that writes to the tensors, or
    None."""
    code, found = Code(text), []
    for last, following in code.next.items():
        for head in following:
            inside = code.loop(head, last) if head <= last else None
            if inside and any(
                re.search(r"\bSTG?\.", one) for block in inside for one in code.of[block]
            ):
                found.append((len(inside), head, last, inside))
    blocks = code.longest(*min(found, key=lambda loop: loop[:2])[1:]) if found else None
    return blocks and [one for block in blocks for one in code.of[block]]


def loops(nvdisasm, cubin):
    """Kernel -> instructions of its loop."""
    text, found = run(nvdisasm, "-c", cubin), {}
    for piece in re.split(r"\n\s*\.section\s+\.text\.", "\n" + text)[1:]:
        name = re.match(r"(\w+)", piece)[1]
        if name.startswith("halfstep_cuda_fused_"):
            found[name[len("halfstep_cuda_fused_") :]] = len(loop_of(piece) or ())
    return found


def fused(nvdisasm, cubin):
    """Kernel -> its fused multiply-adds. Those of two halves are how ptxas loads constants, and
    then multiply nothing."""
    text, found = run(nvdisasm, "-c", cubin), {}
    for piece in re.split(r"\n\s*\.section\s+\.text\.", "\n" + text)[1:]:
        codes = re.findall(
            r"/\*[0-9a-f]{4,}\*/\s+((?:@!?U?P\w+ )?\s*(?:[FD]FMA|HFMA2)\b.*?);", piece
        )
        codes = [one for one in codes if not re.search(r"HFMA2\S* \w+, -RZ, RZ,", one)]
        if codes:
            found[piece.split(",")[0].strip()] = codes
    return found


@functools.lru_cache
def rows_of_rules():
    """The C name and the roles of the states of each rule, by its name. States that hang on a
    hyper-parameter are left out. The preprocessor knows, because rows are macros."""
    with tempfile.TemporaryDirectory() as scratch:
        asked = os.path.join(scratch, "rows.c")
        with open(asked, "w") as file:
            file.write(
                '#include "rules/rules.h"\n#define NAME(name, ...) name\n'
                "#define ROLE(role, ...) role\n"
                "#define RULE(id, rule) @@rule rule##_ROW(NAME, ROLE, HSTEP_NOTHING, HSTEP_NOTHING,"
                ' HSTEP_NOTHING)\n#include "rules/rules.def"\n'
            )
        text = run(CLANG[0], "-E", "-P", f"-I{ROOT}/src", f"-I{ROOT}/include", asked)
    rows = [row.split() for row in text.split("@@")[1:]]
    return {name.strip('"'): (rule, roles) for rule, name, *roles in rows}


def states_of(rule):
    """The C name of a rule, and the roles of the states that it has whatever its
    hyper-parameters."""
    if rule not in rows_of_rules():
        sys.exit(f"gpu_instructions.py: no rule {rule}")
    return rows_of_rules()[rule]


def bytes_of(rule, weight, states, gradient):
    """Bytes that a step moves for an element: everything is read and written but the gradient,
    which is read."""
    _, roles = states_of(rule)
    bits = WEIGHT_BITS[weight] * 2 + {"f32": 32, "bf16": 16}[gradient]
    for role in roles:
        kept = (
            WEIGHT_BITS[weight]
            if role == "WEIGHT"
            else 16
            if role == "GRADIENT" and states not in ("f32",)
            else STATE_BITS[states]
        )
        bits += 2 * kept
    return bits / 8


def table(archs, rows, folder, jobs):
    ptxas, nvdisasm = tools(folder)
    needed = {}
    for rule, weight, states in (row.split("/") for row in rows):
        rules, formats = needed.setdefault(weight, (set(), set()))
        rules.add(rule)
        formats.add(states.replace("-", "_"))
    pairs = [
        (sorted(rules), weight, "f32" if weight == "f32" else "bf16", sorted(formats))
        for weight, (rules, formats) in sorted(needed.items())
    ]
    counts = {}
    with (
        tempfile.TemporaryDirectory() as scratch,
        concurrent.futures.ThreadPoolExecutor(jobs) as pool,
    ):
        for (rules, weight, _, formats), ptx in zip(
            pairs, pool.map(lambda pair: ptx_of(scratch, *pair), pairs)
        ):
            entries = [
                f"-e=halfstep_cuda_fused_{states_of(rule)[0]}_{x}_{x}"
                for rule in rules
                for x in formats
            ]
            for arch in archs:
                cubin = os.path.join(scratch, "cubin")
                run(ptxas, f"-arch=sm_{arch}", "--fmad=false", *entries, "-o", cubin, ptx)
                counts[weight, arch] = loops(nvdisasm, cubin)
    lines = [
        "| recipe | bytes moved |"
        + "".join(f" sm_{a}: instructions | {GPUS[a][0]}: of a copy |" for a in archs),
        "|---|---:|" + "---:|---:|" * len(archs),
    ]
    for row in rows:
        rule, weight, states = row.split("/")
        name, _ = states_of(rule)
        code = states.replace("-", "_")
        size = bytes_of(rule, weight, states, "f32" if weight == "f32" else "bf16")
        cells = [f"{size:.2f}"]
        for arch in archs:
            loop = counts[weight, arch].get(f"{name}_{code}_{code}")
            if not loop:
                sys.exit(f"gpu_instructions.py: no loop in the kernel of {row} for sm_{arch}")
            _, multiprocessors, ghz, terabytes = GPUS[arch]
            each = loop / PLACES
            memory, issue = (
                size / (terabytes * COPY * 1e12),
                each / (multiprocessors * 128 * ghz * 1e9),
            )
            cells += [
                f"{each:.0f}",
                "memory" if issue <= memory else f"{100 * memory / issue:.0f} %",
            ]
        lines.append(f"| `{row}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--archs", default="80,90,120", help="compute capabilities, of " + ", ".join(map(str, GPUS))
    )
    parser.add_argument(
        "--rows",
        default=",".join(ROWS),
        help="recipes RULE/WEIGHTS/STATES that have a fused kernel",
    )
    parser.add_argument(
        "--write", metavar="FILE", help="replaces the table between its marks there"
    )
    parser.add_argument(
        "--tools",
        default=os.path.join(ROOT, "build"),
        help="folder in which ptxas and nvdisasm are put",
    )
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time")
    parser.add_argument(
        "--fused", metavar="CUBIN", help="only look for fused multiply-adds in this"
    )
    given = parser.parse_args()
    if given.fused:
        kernels = fused(tools(given.tools)[1], given.fused)
        for name, codes in kernels.items():
            print(f"{name}: {len(codes)}, such as {codes[0]}")
        sys.exit(1 if kernels else 0)
    archs = [int(a) for a in given.archs.split(",")]
    unknown = [a for a in archs if a not in GPUS]
    if unknown:
        sys.exit(
            f"gpu_instructions.py: --archs {unknown[0]}: there are {', '.join(map(str, GPUS))}"
        )
    for row in given.rows.split(","):
        parts = row.split("/")
        if len(parts) != 3 or parts[1] not in WEIGHT_BITS or parts[2] not in STATE_BITS:
            sys.exit(
                f"gpu_instructions.py: --rows {row}: wanted RULE/WEIGHTS/STATES of"
                f" {', '.join(WEIGHT_BITS)} and {', '.join(STATE_BITS)}"
            )
    show(table(archs, given.rows.split(","), given.tools, given.jobs), given.write)


if __name__ == "__main__":
    main()
