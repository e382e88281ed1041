"""Runs the program's commands (train, resume, compare, generate, inspect) while calls into the C
library fail.

    sweep.py [--short] [--only SCENARIO] [--who MODULE] [--every N]
    sweep.py SCENARIO FAULT         one fault, and what came of it

A scenario is one command in a folder that is made anew for every run. It runs once with a log of
its calls. Then it runs once per fault, with the library tests/libfaults.so before the C library
(see inject.c for FAULT). The full sweep takes every call from a new place, with every error,
failing once or from there on. The short sweep takes one or two calls of each function and each
calling library.

In a build with AddressSanitizer the program is build/tests/halfstep_faulty, which has the injector
inside. Only our own calls fail there, and a leak or a sanitizer's report counts as a crash.

No fault may crash the program or make it hang. With status 0, the results and all written files
must be those of a run without a fault. With status 1, stderr has one sentence. Then a checkpoint is
left that goes on with the right bits, or none is left and the same command works. The rule for
checkpoints also holds if the program was killed (ERROR is KILL).

The file is longer than 500 lines because scenarios, faults and verdicts are one table."""

import argparse
import collections
import concurrent.futures
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

SOURCE = os.environ.get("HALFSTEP_SOURCE") or os.path.dirname(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
)
BUILD = os.environ.get("HALFSTEP_BUILD") or os.path.join(SOURCE, "build")
SANITIZED = os.path.join(BUILD, "tests", "halfstep_faulty")
WRAPPED = os.path.exists(SANITIZED)
PROGRAM = SANITIZED if WRAPPED else os.path.join(BUILD, "halfstep")
TIMEOUT = 240 if WRAPPED else 120

SMALL = (
    "--width 16 --depth 1 --heads 2 --context 8 --batch 2 --val-every 2 "
    "--eval-batches 1 --sample-bytes 4 --quiet"
)
TRAIN = f"train lm --data ../data.gz {SMALL} --recipe adamw/bf16-kahan/int8 --clip 1"
MNIST = "--train-images 12 --test-images 4 --epochs 1 --batch 4 --quiet"


class Wrong(Exception):
    pass


def run(folder, command, fault=None, log=None, threads=1):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HALFSTEP_THREADS": str(threads),
        "LC_ALL": "C",
    }
    for name in "HSTEP_FAULT", "HSTEP_FAULT_LOG":
        environment.pop(name, None)
    if WRAPPED:
        environment["ASAN_OPTIONS"] = "exitcode=99:allocator_may_return_null=1"
        environment["UBSAN_OPTIONS"] = "halt_on_error=1:exitcode=99"
    elif fault or log:
        # LD_PRELOAD itself takes a blank for the end of a path.
        environment["LD_PRELOAD"] = "libfaults.so"
        environment["LD_LIBRARY_PATH"] = os.path.join(BUILD, "tests")
    if fault:
        environment["HSTEP_FAULT"] = fault
    if log:
        environment["HSTEP_FAULT_LOG"] = log
    try:
        done = subprocess.run(
            [PROGRAM, *command.split()],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise Wrong(f"hangs: {command}")
    return done.returncode, done.stdout, done.stderr.decode(errors="replace")


def sound(folder, command, what, threads=1):
    status, out, err = run(folder, command, threads=threads)
    if status:
        raise Wrong(f"{what}: exit {status}: {err.strip()[-300:]}")
    return out


# Keys of times, speeds and figures that depend on them.
VOLATILE = re.compile(r"second|per_s|_ms|date|time|processor|machine|peak_process|^notes$")


def without(value, word):
    """Returns a JSON value without the keys that contain `word`. A table loses columns of that
    name."""
    if isinstance(value, dict):
        return {k: without(v, word) for k, v in value.items() if word not in k}
    if (
        isinstance(value, list)
        and value
        and isinstance(value[0], list)
        and any(word in str(name) for name in value[0])
    ):
        keep = [i for i, name in enumerate(value[0]) if word not in str(name)]
        return [[row[i] for i in keep] for row in value]
    return [without(v, word) for v in value] if isinstance(value, list) else value


def difference(expected, found, where=""):
    """Describes the first difference between two JSON values."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in {**expected, **found}:
            if expected.get(key, KeyError) != found.get(key, KeyError):
                return difference(
                    expected.get(key, "(missing)"), found.get(key, "(missing)"), f"{where}.{key}"
                )
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for i, (a, b) in enumerate(zip(expected, found)):
            if a != b:
                return difference(a, b, f"{where}[{i}]")
    return f"{where} is {str(found)[:80]!r} instead of {str(expected)[:80]!r}"


def told(value):
    """Removes the notes from a result and returns them."""
    notes = []
    if isinstance(value, dict):
        notes = list(value.pop("notes", None) or [])
        for inner in value.values():
            notes += told(inner)
    elif isinstance(value, list):
        for inner in value:
            notes += told(inner)
    return notes


def steady(value):
    if isinstance(value, dict):
        return {k: steady(v) for k, v in value.items() if not VOLATILE.search(k)}
    return [steady(v) for v in value] if isinstance(value, list) else value


def steady_json(text, what):
    try:
        return steady(json.loads(text))
    except ValueError as error:
        raise Wrong(f"{what}: no JSON: {error}")


def steady_csv(path):
    """Returns a log's rows without the times, or None if there is no log."""
    if not os.path.exists(path):
        return None
    rows = [line.split(",") for line in open(path).read().splitlines()]
    keep = [i for i, name in enumerate(rows[0]) if not VOLATILE.search(name)] if rows else []
    if any(len(row) != len(rows[0]) for row in rows):
        raise Wrong(f"{os.path.basename(path)}: rows of different length")
    return [[row[i] for i in keep] for row in rows]


# ---- Scenarios -----------------------------------------------------------------------------------


class Scenario:
    """One command: name, the command, the commands that make its folder, which output is compared,
    threads."""

    def __init__(self, name, command, before=(), goes_on=False, files=(), threads=1, text=False):
        self.name, self.command, self.before = name, command, before
        self.goes_on, self.files, self.threads, self.text = goes_on, files, threads, text

    def prepare(self, base):
        self.fixture = os.path.join(base, self.name + ".fixture")
        os.mkdir(self.fixture)
        for command in self.before:
            sound(self.fixture, command, "preparing " + self.name)
        self.log = os.path.join(base, self.name + ".log")
        folder = self.fresh(base)
        status, out, err = run(folder, self.command, log=self.log, threads=self.threads)
        if status:
            raise SystemExit(f"{self.name} fails without a fault: {err}")
        self.expected = self.outcome(folder, out)
        if self.goes_on:
            self.end = self.go_on(folder)
        shutil.rmtree(folder)
        self.calls = read_log(self.log)

    def fresh(self, base):
        """Copies the fixture, links as links. Returns the copy's path."""
        folder = tempfile.mkdtemp(dir=base)
        subprocess.run(["cp", "-a", self.fixture + "/.", folder], check=True)
        return folder

    def outcome(self, folder, out):
        found = {"stdout": out if self.text else steady_json(out, "stdout")}
        for name in self.files:
            path = os.path.join(folder, name)
            if not os.path.exists(path):
                raise Wrong(f"status 0, but no {name}")
            found[name] = (
                steady_csv(path) if name.endswith(".csv") else steady_json(open(path).read(), name)
            )
        return found

    @staticmethod
    def names(folder):
        run = os.path.join(folder, "run")
        return os.listdir(run) if os.path.isdir(run) else []

    def go_on(self, folder):
        names = self.names(folder)
        # A first save may be cut off before the manifest names it. Its own name still opens it.
        which = (
            "run"
            if "manifest.json" in names
            else "run/" + max(n for n in names if n.startswith("checkpoint-"))
        )
        out = sound(
            folder,
            f"train lm --checkpoint {which} --resume --steps 6 --json --quiet",
            "going on",
        )
        left = [
            n
            for n in os.listdir(os.path.join(folder, "run"))
            if n.startswith(".") and "lock" not in n
        ]
        if left:
            raise Wrong(f"left behind after a further save: {left}")
        found = steady_json(out, "going on")
        # A fault may change which checkpoint the run goes on from, so only these are compared.
        return {
            k: found[k] for k in ("state_hash", "val_loss", "sample", "weights_changed_percent")
        }

    def judge(self, base, fault):
        folder = self.fresh(base)
        try:
            status, out, err = run(folder, self.command, fault, threads=self.threads)
            if status == 0:
                found, expected = self.outcome(folder, out), copy.deepcopy(self.expected)
                told(expected)
                for note in told(found):
                    if note not in err:
                        raise Wrong(f"status 0, and a note that is not told: {note[:200]!r}")
                # Only this figure may be missing, and a note or warning must then say so.
                if re.search("(note|warning): ", err + out.decode(errors="replace")):
                    found, expected = (
                        without(found, "weights_changed"),
                        without(expected, "weights_changed"),
                    )
                for name in found:
                    if found[name] != expected[name]:
                        raise Wrong(
                            f"status 0, but in {name}: {difference(expected[name], found[name])}"
                        )
            elif status == 1:
                lines = err.strip().splitlines()
                # Warnings may come first. A comparison also says which of its runs have failed.
                said = [
                    line for line in lines if not re.match(r"(halfstep: )?(note|warning): ", line)
                ]
                whose = (
                    r"halfstep: ." if not fault.endswith(":openmp") else "halfstep: .|libgomp: ."
                )
                if (
                    not said
                    or len(said) > (2 if "compare" in self.name else 1)
                    or not all(re.match(whose, line) for line in said)
                ):
                    raise Wrong(f"status 1 without one sentence: {err.strip()[:300]!r}")
            elif status in (-6, -11) and fault.endswith(":onednn"):
                # oneDNN crashes if its own allocations fail; its callers cannot prevent that
                pass
            elif not (status == -9 and ":KILL:" in fault):
                raise Wrong(f"status {status}: {err.strip()[-300:]!r}")
            if self.goes_on:
                if any(
                    n == "manifest.json" or n.startswith("checkpoint-") for n in self.names(folder)
                ):
                    if self.go_on(folder) != self.end:
                        raise Wrong(f"status {status}, and the run goes on with other bits")
                elif status == 0:
                    raise Wrong("status 0, but no checkpoint")
                elif (
                    self.outcome(
                        folder,
                        sound(
                            folder, self.command, "the same command without a fault", self.threads
                        ),
                    )
                    != self.expected
                ):
                    raise Wrong("the same command gives something else after the failure")
            return status
        finally:
            shutil.rmtree(folder, ignore_errors=True)


LOG = "--log log.csv"
RUN = "--checkpoint run"
TWO = (
    "--width 16 --depth 1 --heads 2 --context 8 --batch 2 --val-every 2 "
    "--eval-batches 1 --steps 2 --quiet"
)
SCENARIOS = [
    Scenario(
        "train",
        f"{TRAIN} {RUN} {LOG} --steps 3 --checkpoint-every 1 --keep 2 --json",
        goes_on=True,
        files=["log.csv"],
    ),
    Scenario(
        "resume",
        f"train lm {RUN} {LOG} --resume --steps 5 --json --quiet",
        [f"{TRAIN} {RUN} {LOG} --steps 3"],
        goes_on=True,
        files=["log.csv"],
    ),
    Scenario(
        "release",
        f"{TRAIN} {RUN} --steps 3 --release --micro-steps 2 --json",
        goes_on=True,
        threads=2,
    ),
    Scenario("init", f"{TRAIN} --init ../init --steps 1 --json"),
    Scenario("text", f"{TRAIN} --steps 1", text=None),
    Scenario(
        "compare",
        (f"compare lm --data ../data.gz --out out --recipes adamw/f32,lion/bf16-sr --json {TWO}"),
        files=["out/report.json", "out/runs.csv", "out/history.csv"],
    ),
    Scenario("mnist", f"train mnist --json {MNIST}"),
    Scenario("mnist-data", f"train mnist --data ../digits --json {MNIST}"),
    Scenario(
        "compare-mnist",
        f"compare mnist --out out --recipes adamw/f32,adamw/bf16-sr --json {MNIST}",
        files=["out/report.json", "out/runs.csv"],
    ),
    Scenario("generate", "generate --checkpoint ../init --bytes 6", text=True),
    Scenario("inspect", "inspect ../init --json"),
    Scenario("inspect-file", "inspect ../init/model.safetensors", text=True),
    Scenario("plan", "plan --params 7e9 --memory 24G --json"),
    Scenario("info", "info", text=True),
]


def make_data(base):
    """Makes a text as gzip, digits as IDX and gzip, and a checkpoint, beside scenarios'
    folders."""
    import gzip
    import struct

    text = open(os.path.join(SOURCE, "data", "demo.txt"), "rb").read()[:20000]
    with open(os.path.join(base, "data.gz"), "wb") as file:
        file.write(gzip.compress(text, mtime=0))
    os.mkdir(os.path.join(base, "digits"))
    for name, count, pack in (("train", 12, False), ("t10k", 4, True)):
        pixels = bytes((i * 7 + i // 28 * 13) % 256 for i in range(count * 784))
        for suffix, data in (
            (f"{name}-images-idx3-ubyte", struct.pack(">IIII", 0x803, count, 28, 28) + pixels),
            (
                f"{name}-labels-idx1-ubyte",
                struct.pack(">II", 0x801, count) + bytes(i % 10 for i in range(count)),
            ),
        ):
            with open(os.path.join(base, "digits", suffix + (".gz" if pack else "")), "wb") as file:
                file.write(gzip.compress(data, mtime=0) if pack else data)
    work = os.path.join(base, "work")
    os.mkdir(work)
    sound(work, f"{TRAIN} --checkpoint ../init --steps 2", "preparing init")


# ---- Faults --------------------------------------------------------------------------------------


def known_calls():
    """Returns name -> (kind, errors), read from calls.def."""
    text = open(os.path.join(SOURCE, "tests", "faults", "calls.def")).read().split("*/", 1)[1]
    calls = {}
    for row in re.split(r"^CALL", text, flags=re.M)[1:]:
        kind, name = re.match(r"(?:_BY_HAND)?\((\w+), (\w+)", row).groups()
        calls[name] = kind, re.findall(r'"([A-Z ]+)"', row)[-1].split()
    return calls


def read_log(path):
    """Returns (name, module) -> chain of callers -> numbers of these calls, counted per name and
    module."""
    calls, counts = collections.OrderedDict(), collections.Counter()
    for line in open(path):
        _, name, who, chain, *_ = line.split("\t")
        counts[name, who] += 1
        calls.setdefault((name, who), collections.OrderedDict()).setdefault(chain, []).append(
            counts[name, who]
        )
    return calls


def faults_of(scenario, short, only_who):
    """Yields faults as NAME:ERROR:K[+]:WHO for all places of each module's calls. oneDNN has about
    a thousand places; about every tenth is taken."""
    known, turn = known_calls(), 0
    for (name, who), places in scenario.calls.items():
        if only_who and who != only_who:
            continue
        kind, errors = known[name]
        numbers = sorted({n for chain in places.values() for n in (chain[0], chain[-1])})
        if short:
            # Errors are taken in turn. The "train" scenario gets two calls of each function, others
            # one. Other libraries' calls fail only in the scenarios that use them first.
            numbers = sorted({numbers[len(numbers) // 5], numbers[len(numbers) * 4 // 5]})[
                : 2 if scenario.name == "train" else 1
            ]
            if who != "ours" and scenario.name not in ("train", "mnist-data", "inspect"):
                continue
        elif who == "onednn":
            numbers = numbers[:: max(1, len(numbers) // 120)]
        for number in numbers:
            for error in [errors[turn % len(errors)]] if short else errors:
                for plus in [("", "+")[turn // 2 % 2]] if short else ("", "+"):
                    yield f"{name}:{error}:{number}{plus}:{who}"
            turn += 1
    if (scenario.goes_on or scenario.files) and not only_who:
        yield "POLISH"
    if scenario.goes_on and not only_who:
        files = sum(
            len(n)
            for (name, who), places in scenario.calls.items()
            if known[name][0] == "FILES" and who == "ours"
            for n in places.values()
        )
        for number in range(1, files + 1, max(1, files // 5) if short else 1):
            yield f"FILES:KILL:{number}:ours"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--who")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("one", nargs="*")
    options = parser.parse_args()
    start = time.time()
    wanted = options.one[0] if options.one else options.only
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="halfstep-sweep-", dir=memory) as base:
        make_data(base)
        scenarios = [s for s in SCENARIOS if not wanted or s.name == wanted]
        for scenario in scenarios:
            if scenario.text is None:
                scenario.text = True
                # The text contains speeds, so only its calls matter here. `train` judges results.
                scenario.outcome = lambda folder, out: {}
            scenario.prepare(base)
        if options.one:
            try:
                print("status", scenarios[0].judge(base, options.one[1]))
                return 0
            except Wrong as wrong:
                print(wrong)
                return 1
        total, wrongs = 0, []
        rows = collections.OrderedDict()
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for scenario in scenarios:
                faults = list(faults_of(scenario, options.short, options.who))[:: options.every]
                row = rows[scenario.name] = collections.Counter()

                def judged(fault, scenario=scenario):
                    try:
                        return fault, scenario.judge(base, fault), None
                    except Wrong as wrong:
                        return fault, None, str(wrong)

                for fault, status, wrong in pool.map(judged, faults):
                    row["faults"] += 1
                    if wrong is None:
                        row[status] += 1
                        continue
                    row["wrong"] += 1
                    wrongs.append((scenario.name, fault))
                    print(
                        f"     {scenario.name}: {fault}: {wrong}\n     reproduce:"
                        f" HALFSTEP_BUILD={BUILD} python3 {sys.argv[0]} {scenario.name} {fault}",
                        flush=True,
                    )
        for name, row in rows.items():
            print(
                f"| {name} | {row['faults']} | {row[0]} | {row[1]} | {row[-9]} | {row['wrong']} |"
            )
        total = sum(row["faults"] for row in rows.values())
        print(
            f"{total} faults: {sum(r[0] for r in rows.values())} without effect on the results,"
            f" {sum(r[1] for r in rows.values())} ended in a sentence,"
            f" {sum(r[-9] for r in rows.values())} kills, {len(wrongs)} wrong;"
            f" {time.time() - start:.0f} s"
        )
        if not total:
            print("no fault was injected")
        return 1 if wrongs or not total else 0


if __name__ == "__main__":
    sys.exit(main())
