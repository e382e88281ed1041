#!/usr/bin/env python3
"""Clocks that llvm-mca predicts for what steps execute, on processors that are not at hand.

    mca.py BUILD [--rows PATTERN...] [--isa NAME...] [--cpu NAME...]
    mca.py BUILD --mix [...]      the most frequent instructions instead, for 32 elements (without
                                  llvm-mca)

BUILD, --rows and --isa are those of instructions.py. Hot traces are found by counting. A trace
begins at the instruction that ran most and follows the way that was taken most. It ends when it
comes back, which is a loop, or when two thirds of the turns went elsewhere. Then the next one is
looked for in what is left. Each trace is analysed as if it were repeated, and counts as often as it
ran.

Each row has the instructions for each element, the share of them in loops, and two numbers of
clocks for each element and processor. The first is the reciprocal throughput: what ports and
dispatch allow. The second is a simulation of many turns, which knows dependencies within the
processor's window, but neither caches nor mispredicted branches. Needs llvm-mca (apt-get install
llvm-19; $LLVM_MCA names another).
"""

import argparse
import bisect
import collections
import os
import re
import subprocess
import sys
import tempfile

import instructions

CPUS = {"x86_64": ["icelake-server", "sapphirerapids"], "aarch64": ["neoverse-v1", "apple-m1"]}
COMMENT = {"x86_64": "#", "aarch64": "//"}
MORE = 2048  # elements that --blocks speaks of
TURNS = 100
MIX = 24
NOTHING = re.compile(r"(nop|data16|cs nop|xchg +%ax,%ax)")


def disassembly(counter):
    """Addresses in order, and the text at each."""
    tool = "objdump" if not counter.before else f"{counter.machine}-linux-gnu-objdump"
    text = {}
    run = subprocess.run(
        [tool, "-d", "--no-show-raw-insn", counter.library],
        capture_output=True,
        text=True,
        check=True,
    )
    for line in run.stdout.splitlines():
        match = re.match(r"^\s*([0-9a-f]+):\t(.*)", line)
        if match:
            text[int(match[1], 16)] = re.sub(
                rf"\s*({COMMENT[counter.machine]}|<).*", "", match[2]
            ).strip()
    return sorted(text), text


def is_jump(text):
    """A branch within a function."""
    return re.match(r"(j[a-z]+ |b(\.[a-z]+)?\s|cbn?z\s|tbn?z\s)", text) is not None


def is_branch(text):
    return (
        is_jump(text)
        or re.match(r"(bnd |notrack |repz? )*(call|ret|jmp|bl\s|blr\s|br\s)", text) is not None
    )


def traces_of(edges, addresses, text):
    """[(turns, [instructions in the order they ran], closed)] and how often each instruction ran. A
    trace goes on along the most frequent way, through calls too, for as long as a third of the
    turns take it; closed: it comes back to itself.
    """
    index = {address: i for i, address in enumerate(addresses)}
    edges = [(source, target, count) for source, target, count in edges if target in index]
    branches = sorted({source for source, _, _ in edges if source})
    ran = collections.Counter()
    for _, target, count in edges:
        at = bisect.bisect_left(branches, target)
        if at < len(branches):
            for address in addresses[index[target] : index[branches[at]] + 1]:
                ran[address] += count
    # Blocks begin at targets and end at branches; one that runs into the next has that as its only
    # way.
    starts, blocks, ways = (
        sorted({target for _, target, _ in edges if ran[target] > 0}),
        {},
        collections.defaultdict(list),
    )
    for k, start in enumerate(starts):
        end = branches[bisect.bisect_left(branches, start)]
        if k + 1 < len(starts) and starts[k + 1] <= end:
            end = addresses[index[starts[k + 1]] - 1]
            ways[start] = [(ran[end], starts[k + 1])]
        blocks[start] = addresses[index[start] : index[end] + 1]
    last = {block[-1]: start for start, block in blocks.items() if not ways[start]}
    for source, target, count in edges:
        if source in last and target in blocks and count > 0:
            ways[last[source]].append((count, target))
    traces, taken = [], set()
    for start in sorted(blocks, key=lambda start: (-ran[start], start)):
        if start in taken:
            continue
        trace, own, block, closed = [], set(), start, False
        while block is not None and block not in taken:
            taken.add(block)
            own.add(block)
            trace += blocks[block]
            count, following = max(ways[block], default=(0, None))
            closed = following in own
            block = following if 3 * count >= ran[start] else None
        traces.append((sum(ran[address] for address in trace) / len(trace), trace, closed))
    return traces, ran


def assembly(traces, text):
    """A region for each trace. Branches stay as what they cost, but lead nowhere."""
    lines = []
    for i, (_, trace, _) in enumerate(traces):
        lines += [f"# LLVM-MCA-BEGIN {i}", f"loop{i}:"]
        begin = len(lines)
        for address in trace:
            t = text[address]
            if NOTHING.match(t):
                continue
            if re.match(r"adrp?\s", t):
                t = re.sub(r",.*", f", loop{i}", t)
            elif is_jump(t):
                t = re.sub(r"[0-9a-f]+$", f"loop{i}", t)
            elif is_branch(t):
                continue
            lines.append("\t" + t)
        if len(lines) == begin:
            del lines[-2:]
        else:
            lines.append("# LLVM-MCA-END")
    return "\n".join(lines) + "\n"


def predict(machine, cpu, traces, text):
    """Clocks for all turns of all traces: by throughput, by simulation."""
    mca = os.environ.get("LLVM_MCA", "llvm-mca-19")
    source = assembly(traces, text)
    run = subprocess.run(
        [
            mca,
            f"-mtriple={machine}",
            f"-mcpu={cpu}",
            f"-iterations={TURNS}",
            "-instruction-info=0",
            "-resource-pressure=0",
        ],
        input=source,
        capture_output=True,
        text=True,
    )
    if run.returncode:
        sys.exit(f"mca.py: {mca}: {run.stderr[:2000]}")
    throughput, simulated, found = 0.0, 0.0, 0
    for report in re.split(r"\n\[\d+\] Code Region - ", "\n" + run.stdout)[1:]:
        turns = traces[int(report.split()[0])][0]
        found += 1
        throughput += turns * float(re.search(r"Block RThroughput: +([\d.]+)", report)[1])
        simulated += turns * float(re.search(r"Total Cycles: +(\d+)", report)[1]) / TURNS
    if found != source.count("# LLVM-MCA-END"):
        sys.exit(f"mca.py: {mca} reports {found} of {source.count('# LLVM-MCA-END')} pieces")
    return throughput, simulated


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("build")
    parser.add_argument("--rows", nargs="+")
    parser.add_argument("--isa", nargs="+")
    parser.add_argument("--cpu", nargs="+")
    parser.add_argument("--mix", action="store_true")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counter = instructions.Counter(instructions.library_of(a.build), folder)
        cpus = a.cpu or CPUS[counter.machine]
        addresses, text = disassembly(counter)
        rows, lines = counter.rows(a.rows), []
        isas = [isa for isa in counter.isas() if (isa in a.isa if a.isa else isa != "scalar")]
        for row in rows:
            for isa in isas:
                output = counter.run("--blocks", "--isa", isa, row)
                if not output:
                    continue
                edges = [
                    (int(s, 16), int(t, 16), int(n))
                    for s, t, n in (line.split() for line in output[1:])
                ]
                traces, ran = traces_of(edges, addresses, text)
                held = sum(turns * len(trace) for turns, trace, closed in traces if closed)
                if a.mix:
                    mix = collections.Counter()
                    for address, count in ran.items():
                        mix[text[address].split()[0]] += count * 32 / MORE
                    print(
                        f"{row}, {isa}:",
                        ", ".join(f"{name} {count:.1f}" for name, count in mix.most_common(MIX)),
                    )
                    continue
                cells = [
                    f"`{row}`",
                    isa,
                    f"{sum(ran.values()) / MORE:.2f}",
                    f"{100 * held / sum(ran.values()):.0f} %",
                ]
                for cpu in cpus:
                    cells.append(
                        "; ".join(
                            f"{clocks / MORE:.2f}"
                            for clocks in predict(counter.machine, cpu, traces, text)
                        )
                    )
                lines.append(cells)
    if not a.mix:
        instructions.print_table(
            [
                "row",
                "isa",
                "instructions",
                "in loops",
                *[f"{cpu}: throughput; simulated" for cpu in cpus],
            ],
            2,
            lines,
        )


if __name__ == "__main__":
    main()
