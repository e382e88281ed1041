"""coverage.py BUILD: reads gcc's counters with gcov and prints lines and branches covered per folder of src/ and tools/.

One source is compiled several times: the kernels once per instruction set, headers into many programs. A line or a branch is
covered if it is in any of them; branches are told apart by their place on the line, among compilations that have the same
number of them there."""
import collections
import concurrent.futures
import json
import os
import subprocess
import sys

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def read(path):
    done = subprocess.run(["gcov", "--json-format", "--stdout", "--branch-probabilities", path], capture_output=True,
                          cwd=os.path.dirname(path))
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]


def main():
    build = os.path.abspath(sys.argv[1])
    data = [os.path.join(at, name) for at, _, names in os.walk(build) for name in names if name.endswith(".gcda")]
    if not data:
        sys.exit(f"{build} holds no counters")
    lines = collections.defaultdict(lambda: collections.defaultdict(int))
    branches = collections.defaultdict(lambda: collections.defaultdict(int))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for reports in pool.map(read, data):
            for report in reports:
                for file in report["files"]:
                    name = os.path.normpath(os.path.join(report["current_working_directory"], file["file"]))
                    name = os.path.relpath(name, SOURCE)
                    if not name.startswith(("src/", "tools/")):
                        continue
                    for line in file["lines"]:
                        lines[name][line["line_number"]] += line["count"]
                        count = len(line["branches"])
                        for i, branch in enumerate(line["branches"]):
                            branches[name][line["line_number"], count, i] += branch["count"]
    folders = collections.defaultdict(lambda: [0, 0, 0, 0])
    for name in lines:
        parts = name.split("/")
        keys = {os.path.dirname(name), parts[0] + " in all"}
        for key in keys:
            total = folders[key]
            total[0] += len(lines[name])
            total[1] += sum(1 for n in lines[name].values() if n)
            total[2] += len(branches[name])
            total[3] += sum(1 for n in branches[name].values() if n)
    print("| folder | lines | covered | branches | covered |\n|---|---|---|---|---|")
    for key in sorted(folders):
        total, hit, ways, taken = folders[key]
        print(f"| {key} | {total} | {100 * hit / total:.1f} % | {ways} | {100 * taken / max(ways, 1):.1f} % |")
    with open(os.path.join(build, "uncovered.txt"), "w") as out:
        for name in sorted(lines):
            text = open(os.path.join(SOURCE, name)).read().splitlines()
            missed = {n for n, count in lines[name].items() if not count}
            half = {n for (n, _, _), count in branches[name].items() if not count} - missed
            for number in sorted(missed | half):
                out.write(f"{name}:{number}: {'line' if number in missed else 'branch'}: {text[number - 1].strip()[:100]}\n")
    print(f"not covered: {os.path.join(build, 'uncovered.txt')}")


if __name__ == "__main__":
    main()
