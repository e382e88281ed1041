#!/usr/bin/env python3
"""Checks and measures everything on a GPU: the bits first, then the faults, then the speed.

    python bench/gpu_session.py                     every step, each with a limit and a log; status
                                                    1 if any fails
    python bench/gpu_session.py --minutes 12        as many steps as fit, the most important first
    python bench/gpu_session.py --only golden,one   steps by name
    python bench/gpu_session.py --list              the steps with their commands
    python bench/gpu_session.py --dry               without a GPU: whether every command is there
                                                    and takes its options, what is lacking, and
                                                    what has to be carried to a GPU that is lent;
                                                    trains small models on the processor, without
                                                    a network where the system can take it away

It needs a build with device code (`bash scripts/build.sh build 8 -DHALFSTEP_CUDA=ON`, which takes
clang), and a Python with torch for CUDA, numpy and pytest. It compares with the peers of
tests/python/requirements.txt that are installed. A machine without clang takes the build from
elsewhere, and what `python lab/gpu_arithmetic.py --compile --ptx build/arithmetic.ptx` writes.
Neighbours that check bits and faults run side by side. What is timed runs alone. --logs gets the
logs and results.md, whose tables are ready for docs/results.md. A step writes its part when it
ends, so that a session that is cut loses one step.

Over 500 lines, because it holds the table of steps."""

import argparse
import concurrent.futures
import functools
import glob
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import gpu
import gpu_report

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))


@dataclass(frozen=True)
class Step:
    """Words of a command may name what is decided elsewhere: {build}, {logs}, {recipes}, and the
    {slowest} of them. A script of Python is run by this Python."""

    name: str
    timed: bool
    limit: int  # seconds
    question: str
    command: str
    modules: str = ""  # that Python must have
    small: str = ""  # options with which --dry runs the command


#: packages that are compared, one at a time
PEERS = ("flashoptim", "torchao", "bitsandbytes", "optimi")
#: In the order in which they would be missed: a session that is cut short loses the last ones. A
#: sanitizer rewrites every kernel of the library, and then slows each launch, so that it gets a
#: share of the golden cases.
STEPS = (
    Step(
        "check",
        False,
        60,
        "the library's own check on first use, of the general kernels and two fused ones",
        "env HALFSTEP_DEVICE_CHECK=always {build}/halfstep bench --device cuda --params 65536"
        " --tensors 4 --rounds 2 --recipes adamw/bf16-sr/int8,lion/bf16-sr/bf16-sr",
    ),
    Step(
        "golden",
        False,
        250,
        "golden hashes of every rule and format: the processor's",
        "{build}/halfstep verify --device cuda",
    ),
    Step(
        "info",
        False,
        20,
        "the driver, the GPU, and the device code of this build",
        "{build}/halfstep info",
    ),
    Step(
        "one",
        True,
        90,
        "fraction of a copy, and torch's fused AdamW, 2^30 parameters in one matrix",
        "bench/gpu.py --shapes one --only /,^torch$,^torch-bf16$ --patience 40 --rounds 7"
        " --json {logs}/one.json",
        "torch",
    ),
    Step(
        "shapes",
        True,
        90,
        "the same, the 201 tensors of a model of 1.1 B parameters",
        "bench/gpu.py --shapes model --only /,^torch$,^torch-bf16$ --patience 40 --rounds 7"
        " --json {logs}/shapes.json",
        "torch",
    ),
    Step(
        "memcheck",
        False,
        250,
        "no access out of bounds",
        "compute-sanitizer --tool memcheck --error-exitcode 9 {build}/halfstep verify --device"
        " cuda --every 61",
    ),
    Step(
        "racecheck",
        False,
        250,
        "no race in shared memory",
        "compute-sanitizer --tool racecheck --error-exitcode 9 {build}/halfstep verify"
        " --device cuda --every 211",
    ),
    Step(
        "small",
        True,
        60,
        "what 300 small tensors cost the process",
        "bench/gpu.py --small 300 --only /,^torch$,^torch-bf16$ --patience 20"
        " --json {logs}/small.json",
        "torch",
    ),
    *(
        Step(
            name,
            True,
            60,
            f"{name} on one matrix and on a model's tensors",
            f"bench/gpu.py --only {name} --patience 40 --rounds 7 --json {{logs}}/{name}.json",
            f"torch {name}",
        )
        for name in PEERS
    ),
    Step(
        "profile",
        True,
        90,
        "what bounds the two slowest of the table's recipes",
        "ncu --csv --clock-control none --launch-skip 4 --launch-count 8"
        " --section SpeedOfLight --section Occupancy --section WarpStateStats {build}/halfstep"
        " bench --device cuda --params 268435456 --tensors 1 --rounds 1 --recipes {slowest}",
    ),
    Step(
        "model",
        False,
        250,
        "300 steps of a transformer, bit for bit",
        "lab/gpu_model.py --steps 300",
        "torch",
    ),
    Step(
        "torch",
        False,
        250,
        "through PyTorch: every rule, streams, graphs, scalers, offload and streaming",
        "-m pytest -q -p no:cacheprovider tests/python/gpu/test_cuda.py"
        " tests/python/gpu/test_offload.py tests/python/gpu/test_streaming.py",
        "torch pytest",
    ),
    Step(
        "arithmetic",
        False,
        250,
        "2^32 roots and 2^33 quotients, double precision and estimated roots: as the processor"
        " takes them",
        "lab/gpu_arithmetic.py{ptx}",
        "numpy",
    ),
    Step(
        "limit",
        True,
        150,
        "full fine-tuning of 6.7 billion parameters in 24 GB, and of 14 billion in int8-ecc4",
        "bench/gpu_train.py limit --json {logs}/limit.json",
        "torch",
        "--device cpu --width 64 --depth 2 --heads 4 --context 32 --vocab 256 --steps 3",
    ),
    Step(
        "bench",
        True,
        30,
        "fraction of a copy from C, 2^30 parameters",
        "{build}/halfstep bench --device cuda --params 1073741824 --tensors 1 --rounds 7 --csv"
        " {logs}/bench.csv --recipes {recipes}",
    ),
    Step(
        "offload",
        True,
        300,
        "offload and streaming beside a plain step and torchao",
        "bench/offload.py",
        "torch",
    ),
    Step(
        "ladder",
        True,
        150,
        "losses of int8 and int4 states beside fp32's, 10 to 127 million parameters",
        "bench/gpu_train.py ladder --minutes 1.5 --json {logs}/ladder.json",
        "torch",
        "--device cpu --minutes 0 --only 10 --context 16 --batch 1 --evaluation 1",
    ),
)
#: whose output is shown whole
TABLES = ("one", "shapes", "small", *PEERS, "limit", "bench", "ladder")
DRY_LIMIT = 900  # seconds of a small model on the processor


#: files of a build that a GPU elsewhere needs beside the working tree
CARRIED = ("halfstep", "libhalfstep.so*", "libhalfstep_io.so*", "arithmetic.ptx")


def slowest(options):
    """Returns the two recipes of the step `one` that are furthest from the speed of a copy, or two
    that were slow before."""
    try:
        with open(os.path.join(options.logs, "one.json"), encoding="utf-8") as file:
            rows = json.load(file)["results"]
    except (OSError, ValueError):
        rows = []
    ours = {row["contestant"].split(":")[0]: row["of_copy"] for row in rows}
    found = sorted((recipe for recipe in ours if recipe in gpu.RECIPES), key=ours.get)[:2]
    return found if len(found) == 2 else ["lamb16/bf16-sr/bf16-sr", "adamw/bf16-sr/int4"]


def words_of(step, options):
    """Returns the words of a command as it is run."""
    ptx = os.path.join(options.build, "arithmetic.ptx")
    words = shlex.split(
        step.command.format(
            build=shlex.quote(options.build),
            logs=shlex.quote(options.logs),
            recipes=",".join(gpu.RECIPES),
            slowest=",".join(slowest(options)),
            ptx=" --ptx " + shlex.quote(ptx) if os.path.exists(os.path.join(ROOT, ptx)) else "",
        )
    )
    return [sys.executable, *words] if words[0].endswith(".py") or words[0] == "-m" else words


def shown(words):
    """Returns a command as a user types it."""
    return shlex.join(["python", *words[1:]] if words[0] == sys.executable else words)


def environment(options):
    """Returns an environment in which Python takes this library and this package, whatever is
    installed."""
    build = os.path.join(ROOT, options.build)
    paths = [os.path.join(ROOT, "python"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "HALFSTEP_BUILD": build,
        "HALFSTEP_LIBRARY": os.path.join(build, "libhalfstep.so"),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
    }


# ---- Without a GPU -------------------------------------------------------------------------------


def help_of(words, options):
    """Returns what the program at the beginning of a command prints of its options, or None."""
    command = itertools.takewhile(
        lambda word: not word.startswith("-"), words
    )  # a program, a script, and what they call a command
    done = subprocess.run(
        [*command, "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(options),
        timeout=60,
        check=False,
    )
    return done.stdout if done.returncode == 0 else None


def parts_of(words):
    """Splits a command that runs another one into both."""
    if os.path.basename(words[0]) not in ("compute-sanitizer", "ncu"):
        return [words]
    at = next(
        (i for i, word in enumerate(words) if i and os.path.basename(word) == "halfstep"),
        len(words),
    )
    return [words[:at], words[at:]]


def check(step, options):
    """Returns what is wrong with a command, and what is lacking here to run it."""
    wrong, lacking = (
        [],
        [f"Python's {name}" for name in step.modules.split() if not importlib.util.find_spec(name)],
    )
    for words in parts_of(words_of(step, options)):
        ours = words[0] == sys.executable or os.path.basename(words[0]) == "halfstep"
        if not shutil.which(words[0], path=os.environ.get("PATH")) and not os.access(
            os.path.join(ROOT, words[0]), os.X_OK
        ):
            lacking.append(words[0])
            continue
        wrong += [
            f"there is no {word}"
            for word in words[1:]
            if word.endswith(".py") and not os.path.exists(os.path.join(ROOT, word))
        ]
        if not ours or "-m" in words or wrong or lacking:
            continue
        text = help_of(words, options)
        if text is None:
            wrong.append(f"{' '.join(words[:2])} --help fails")
            continue
        wrong += [
            f"{' '.join(words[:2])} has no {word}"
            for word in words
            if word.startswith("--") and not re.search(rf"(?<![\w-]){word}\b", text)
        ]
    if (
        step.name == "arithmetic"
        and "--ptx" not in words_of(step, options)
        and not shutil.which("clang")
    ):
        lacking.append("clang, or arithmetic.ptx in the build's folder")
    if step.small and not wrong and not lacking:
        os.makedirs(options.logs, exist_ok=True)
        log = os.path.join(options.logs, f"dry-{step.name}.log")
        words = [*words_of(step, options), *step.small.split()]
        with open(log, "w", encoding="utf-8") as file:
            failed = ended([*without_network(), *words], DRY_LIMIT, options, file)
        wrong += [f"{shown(words)}: {failed}; {log}"] if failed else []
    return wrong, lacking


@functools.lru_cache(maxsize=None)
def without_network():
    """Returns the words before a command that take the network from it, if this system lets us."""
    words = ("unshare", "--map-root-user", "--net")
    try:
        done = subprocess.run([*words, "true"], capture_output=True, check=False)
    except OSError:
        return ()
    return words if done.returncode == 0 else ()


def carried(options):
    """Returns (bytes, what) of what a machine elsewhere is sent."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, check=False)
    tree = {name for name in os.fsdecode(done.stdout).split("\0") if name}
    built = [
        path
        for pattern in CARRIED
        for path in sorted(glob.glob(os.path.join(ROOT, options.build, pattern)))
        if not os.path.islink(path)
    ]
    sizes = [
        os.lstat(os.path.join(ROOT, name)).st_size
        for name in tree
        if os.path.lexists(os.path.join(ROOT, name))
    ]
    return [(sum(sizes), f"{len(sizes)} files of the working tree")] + [
        (os.path.getsize(path), os.path.relpath(path, ROOT)) for path in built
    ]


def dry(steps, options):
    bad = ready = 0
    for step in steps:
        wrong, lacking = check(step, options)
        bad += bool(wrong)
        ready += not wrong and not lacking
        print(
            f"{'WRONG' if wrong else 'lacks' if lacking else 'ready'} "
            f" {step.name:12}{'; '.join(wrong or lacking)}".rstrip(),
            flush=True,
        )
    print(
        f"{ready} of {len(steps)} steps could run here, but for a GPU"
        + (f"; {bad} wrong" if bad else "")
    )
    found = cuda(options)
    if isinstance(found, dict) and not found["code"]:
        print(no_code(options))
    parts = carried(options)
    for size, what in parts:
        print(f"carry {size / 2**20:8.2f} MiB  {what}")
    print(
        f"carry {sum(size for size, _ in parts) / 2**20:8.2f} MiB in all; "
        + (
            "small models were trained without a network"
            if without_network()
            else "the network could not be taken away here, so that a download would not be seen"
        )
    )
    print(f"{sum(step.limit for step in steps) / 60:.0f} minutes, if every step needs its limit")
    return 1 if bad else 0


def no_code(options):
    return (
        f"the library in {options.build} has no device code: bash scripts/build.sh {options.build}"
        " 8 -DHALFSTEP_CUDA=ON"
    )


def cuda(options):
    """Returns what the program finds of drivers, GPUs and device code, or a sentence if it finds
    nothing."""
    program = os.path.join(ROOT, options.build, "halfstep")
    if not os.access(program, os.X_OK):
        return (
            f"{options.build}/halfstep is not built: bash scripts/build.sh {options.build} 8"
            " -DHALFSTEP_CUDA=ON"
        )
    done = subprocess.run(
        [program, "info", "--json"], capture_output=True, text=True, timeout=60, check=False
    )
    return (
        json.loads(done.stdout)["cuda"]
        if done.returncode == 0
        else done.stderr.strip() or f"{program} info fails"
    )


def no_gpu(options):
    """Says in one sentence why nothing can run here, or returns None."""
    found = cuda(options)
    if isinstance(found, str):
        return found
    if not any(one["usable"] for one in found["gpus"]):
        return (
            "no GPU here: "
            + found.get("unusable", "none that is usable")
            + " (--list and --dry need none)"
        )
    return None if found["code"] else no_code(options)


# ---- On one --------------------------------------------------------------------------------------


def ended(words, limit, options, file):
    """Runs a command, with its output into a file. Returns None, or why it failed. Ends everything
    that the command started."""
    try:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment(options),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    try:
        status = process.wait(timeout=limit)
        return f"status {status}" if status > 0 else f"signal {-status}" if status else None
    except subprocess.TimeoutExpired:
        return f"ran past its limit of {limit:.0f} s"
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def run(step, options, until):
    """Runs a step, at the longest until a time of time.monotonic(), and prints what it came to.
    Returns why it failed, or None, and its output. Returns None, without a start, if less than a
    third of its limit is left."""
    left = until - time.monotonic()
    if left < step.limit / 3:
        return None
    log, words, begun = (
        os.path.join(options.logs, step.name + ".log"),
        words_of(step, options),
        time.monotonic(),
    )
    with open(log, "w", encoding="utf-8") as file:
        file.write("$ " + shlex.join(words) + "\n")
        file.flush()
        failed = ended(words, min(step.limit, left), options, file)
    with open(log, encoding="utf-8", errors="replace") as file:
        lines = [line.rstrip() for line in file if line.strip()][1:]
    head = (
        f"{'FAIL' if failed else 'ok  '} {step.name}:"
        f" {failed + '; ' if failed else ''}{time.monotonic() - begun:.0f} s; {log}"
    )
    print(
        "\n     ".join(
            [head, *(lines if step.name in TABLES else lines[-3:] if failed else lines[-1:])]
        ),
        flush=True,
    )
    return failed, lines


def run_all(steps, options):
    os.makedirs(options.logs, exist_ok=True)
    found, path, machine = {}, os.path.join(options.logs, "results.md"), cuda(options)
    until = time.monotonic() + 60 * options.minutes
    lock = threading.Lock()

    def one(step):
        ran = run(step, options, until)
        with lock:
            if ran:
                found[step] = ran
            rows = [
                (step.question, shown(words_of(step, options)), step.name in TABLES, *found[step])
                for step in steps
                if step in found
            ]
            with open(path, "w", encoding="utf-8") as file:
                file.write(gpu_report.report(machine, rows))

    for timed, neighbours in itertools.groupby(steps, key=lambda step: step.timed):
        with concurrent.futures.ThreadPoolExecutor(1 if timed else len(STEPS)) as pool:
            list(pool.map(one, list(neighbours)))
    left = [step.name for step in steps if step not in found]
    steps = [step for step in steps if step in found]
    failed = [step.name for step in steps if found[step][0]]
    with open(path, encoding="utf-8") as file:
        print(f"\n{file.read()}\n{path} has these tables for docs/results.md")
    print(
        f"{len(steps) - len(failed)} of {len(steps)} steps passed"
        + (f"; failed: {', '.join(failed)}" if failed else "")
        + (f"; no time for {', '.join(left)}" if left else "")
    )
    return 1 if failed else 0


def listing(steps, options):
    for step in steps:
        print(
            f"{step.name} ({'timed, ' * step.timed}at most {step.limit} s): {step.question}\n   "
            f" {shown(words_of(step, options))}"
        )
    print(
        f"One of them by itself: export HALFSTEP_BUILD={options.build}"
        f" HALFSTEP_LIBRARY={options.build}/libhalfstep.so PYTHONPATH=python"
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME,...", help="these steps")
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="starts no step that does not fit, and ends what runs then (default: no end)",
    )
    parser.add_argument("--list", action="store_true", help="print steps and commands")
    parser.add_argument("--dry", action="store_true", help="check every command without a GPU")
    parser.add_argument("--build", default="build", help="folder of the build (default: build)")
    parser.add_argument(
        "--logs",
        default=None,
        help="folder for logs and tables (default: gpu in the folder of the build)",
    )
    options = parser.parse_args(arguments)
    options.logs = (
        os.path.abspath(options.logs) if options.logs else os.path.join(options.build, "gpu")
    )
    by_name, steps = {step.name: step for step in STEPS}, STEPS
    if options.only:
        unknown = [name for name in options.only.split(",") if name not in by_name]
        if unknown:
            print(
                f"gpu_session.py: unknown step '{unknown[0]}'; known: {', '.join(by_name)}",
                file=sys.stderr,
            )
            return 2
        steps = [by_name[name] for name in options.only.split(",")]
    if options.list:
        return listing(steps, options)
    os.chdir(ROOT)
    if options.dry:
        return dry(steps, options)
    why = no_gpu(options)
    if why:
        print(f"gpu_session.py: {why}", file=sys.stderr)
        return 1
    return run_all(steps, options)


if __name__ == "__main__":
    sys.exit(main())
