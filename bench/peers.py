#!/usr/bin/env python3
"""Optimizer steps of this library and of its peers, side by side in one process.

    python bench/peers.py           every contestant on one large tensor, a model's tensors and 1000
                                    small ones
    python bench/peers.py --only torch,adamw/bf16-sr/int8 --shapes one --elements 4194304 --rounds 5

A round has three parts: a stream of as many bytes as the contestant has to move, its step, and a
step of the reference. The reference is torch's fused fp32 AdamW on tensors of its own. A pause
before each timing lets the threads of the others go to sleep. The columns are medians over the
rounds:

    of stream    the rate of the step over the rate of the streams before and after it
    to torch     the time of the step over the reference's time

The stream is made of in-place operations of torch on its own buffers, on as many threads. Bytes of
gradients are only read; all others are read and written. Three forms are tried for each contestant,
and the fastest serves. The third is numpy's, in threads of Python.

A step moves the weights and all that the optimizer holds for them, read once and written once, and
the gradients, read once. Ours reads gradients twice where it looks for some that are not finite,
which is the default.

The file is longer than 500 lines because its contestants, measures and tables serve one another
only.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import gc
import json
import math
import os
import platform
import subprocess
import sys
import time
from statistics import median
from typing import Dict, List

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import peers_common as common  # noqa: E402

REFERENCE = "torch"
MiB = common.MiB

# ---- Shapes --------------------------------------------------------------------------------------


def one_shape(elements: int):
    """Returns one matrix of about that many elements."""
    length = 4096 if elements >= 1 << 20 else 512
    return [(max(1, elements // length), length)]


def model_shapes(scale: float):
    """Returns the 201 tensors of a decoder of 1.1 B parameters (22 layers of width 2048). Widths
    are multiplied by the root of `scale`."""
    root = math.sqrt(scale)

    def width(full: int) -> int:
        return max(64, round(full * root / 64) * 64)

    hidden, middle, heads, words = width(2048), width(5632), width(256), width(32000)
    layer = [
        (hidden, hidden),
        (heads, hidden),
        (heads, hidden),
        (hidden, hidden),
        (middle, hidden),
        (middle, hidden),
        (hidden, middle),
        (hidden,),
        (hidden,),
    ]
    return [(words, hidden)] + layer * 22 + [(hidden,), (words, hidden)]


def shapes_of(kind: str, options):
    if kind == "one":
        return one_shape(options.elements)
    if kind == "model":
        return model_shapes(options.scale)
    if kind == "small":
        return [(options.small, 64)] * options.tensors
    return [
        (options.tensors * options.small, 64)
    ]  # flat: as many elements as the small ones together


def elements(shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


# ---- Timing --------------------------------------------------------------------------------------


def timed_step(subject: common.Subject, clock=time.perf_counter) -> float:
    start = clock()
    subject.optimizer.step()
    seconds = clock() - start
    subject.hand_back()
    return seconds


def quiet(options) -> None:
    """Threads of the library that ran last spin for a while before they sleep."""
    time.sleep(options.settle * 1e-3)


def measure(contestant, reference, stream, shapes, options) -> Dict:
    many = len(shapes) > 64
    subject = common.Subject(contestant, shapes, many=many)
    with common.patience(options.patience):
        began = time.perf_counter()
        timed_step(subject)
        first = time.perf_counter() - began
        held = common.state_bytes(subject.optimizer)
        timed_step(subject)
    n = subject.count
    weights = sum(p.numel() * p.element_size() for p in subject.params)
    gradients = sum(g.numel() * g.element_size() for g in subject.gradients) * contestant.passes
    moved = 2 * (weights + held) + gradients
    stream.set(weights + held, gradients)
    times, fractions, ratios, rates = [], [], [], []
    before, spent = stream.run(), 0.0
    while len(times) < options.rounds and (len(times) < 3 or spent < options.seconds):
        quiet(options)
        seconds = timed_step(subject)
        quiet(options)
        other = timed_step(reference)
        quiet(options)
        after = stream.run()
        times.append(seconds)
        ratios.append(seconds / other)
        rates.append(moved / (0.5 * (before + after)))
        fractions.append(moved / seconds / rates[-1])
        before = after
        spent += seconds + other
    return {
        "ms": median(times) * 1e3,
        "ns_per_param": median(times) * 1e9 / n,
        "of_stream": median(fractions),
        "to_torch": median(ratios),
        "bytes_of_states_per_param": held / n,
        "bytes_moved_per_param": moved / n,
        "stream_gb_per_s": median(rates) * 1e-9,
        "stream": stream.forms[stream.form],
        "rounds": len(times),
        "first_step_s": first,
        "params": n,
        "note": contestant.many_note if many and contestant.many else "",
    }


# ---- Memory --------------------------------------------------------------------------------------


def hand_freed_memory_back() -> None:
    """Makes freed blocks of 64 KiB and more go back to the system, so that they do not serve later
    ones unseen. glibc otherwise raises this threshold to the size of what is freed."""
    trim_threshold, mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(mmap_threshold, 65536)
        libc.mallopt(trim_threshold, 65536)


def measure_memory(contestant, shapes) -> Dict:
    """Measures, in a process of its own, the peak of the first two steps above weights and
    gradients. A first optimizer on the same tensors has taken whatever compilers and libraries
    want."""
    hand_freed_memory_back()
    subject = common.Subject(contestant, shapes)
    timed_step(subject)
    subject.optimizer = None
    gc.collect()
    before = common.resident("VmRSS")
    common.forget_peak()
    subject.optimizer = contestant.build(subject.params, {})
    subject.hand_back()
    timed_step(subject)
    timed_step(subject)
    return {
        "peak_per_param": (common.resident("VmHWM") - before) / subject.count,
        "states_per_param": common.state_bytes(subject.optimizer) / subject.count,
    }


def memory_in_child(contestant, options) -> Dict:
    command = [
        sys.executable,
        os.path.abspath(__file__),
        "--memory-of",
        contestant.key,
        "--elements",
        str(options.memory_elements),
        "--threads",
        str(options.threads),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=options.patience + 60, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"gave up after {options.patience:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return {
            "error": (
                last[0][:200] if done.returncode >= 0 else f"killed by signal {-done.returncode}"
            )
        }
    return json.loads(lines[-1])


# ---- What a call from Python costs ---------------------------------------------------------------


class Bare:
    """The same tensors as a subject's, stepped by ctypes alone with arrays of addresses that are
    already there."""

    def __init__(self, recipe: str, subject, threads: int, device: str = "cpu"):
        import ctypes

        from halfstep._library import abi

        self.abi, lib = abi, abi.lib
        handle, index = ctypes.c_void_p(), ctypes.c_int32()
        abi.check(
            lib.halfstep_create(
                ctypes.byref(abi.Options.new(threads=threads, device=device.encode())),
                ctypes.byref(handle),
            )
        )
        self.handle = handle
        abi.check(lib.halfstep_add_group(handle, recipe.encode(), ctypes.byref(index)), handle)
        gradient = {"f32": b"f32", "bf1": b"bf16", "f16": b"f16"}[recipe.split("/")[1][:3]]
        for i, parameter in enumerate(subject.params):
            rows = parameter.shape[0]
            tensor = abi.Tensor.new(
                name=b"tensor.%d" % i,
                ndim=parameter.ndim,
                rows=rows,
                row_length=parameter.numel() // rows,
                gradient=gradient,
            )
            abi.check(
                lib.halfstep_add_tensor(handle, ctypes.byref(tensor), ctypes.byref(index)), handle
            )
        abi.check(lib.halfstep_allocate_states(handle), handle)
        pointers = ctypes.c_void_p * len(subject.params)
        self.weights = pointers(*(parameter.data_ptr() for parameter in subject.params))
        self.gradients = pointers(*(gradient.data_ptr() for gradient in subject.gradients))

    def step(self, clock=time.thread_time) -> float:
        start = clock()
        code = self.abi.lib.halfstep_step(self.handle, self.weights, self.gradients)
        seconds = clock() - start
        self.abi.check(code, self.handle)
        return seconds

    def close(self) -> None:
        self.abi.lib.halfstep_destroy(self.handle)


def overhead(recipe: str, options) -> Dict:
    """Returns the microseconds per tensor and step that step() takes beyond the bare call, on
    tensors of one element. Gradients are those of the step before, or new ones, as after
    backward(). All runs on this thread, by its own processor time."""
    import torch

    shapes = [(1,)] * options.tensors
    subject = common.Subject(common.ours(recipe, threads=1), shapes)
    peer = common.Subject(common.peers()[0], shapes)
    bare = Bare(recipe, subject, 1)
    same, fresh, alone, torch_s = [], [], [], []
    clock, threads = time.thread_time, torch.get_num_threads()
    torch.set_num_threads(1)

    def with_new_gradients() -> float:
        for parameter in subject.params:
            parameter.grad = torch.full_like(parameter, 1e-3)
        return timed_step(subject, clock)

    jobs = [
        (same, lambda: timed_step(subject, clock)),
        (alone, bare.step),
        (fresh, with_new_gradients),
        (torch_s, lambda: timed_step(peer, clock)),
    ]
    for turn in range(-4, max(24, options.rounds)):
        for i in range(len(jobs)):
            # In turn, for what ran before has filled the caches.
            into, job = (
                jobs[(i + turn) % len(jobs)] if turn % 8 < 4 else jobs[(turn - i) % len(jobs)]
            )
            seconds = job()
            if turn >= 0:
                into.append(seconds)
    bare.close()
    torch.set_num_threads(threads)
    n = len(shapes)
    return {
        "recipe": recipe,
        "tensors": n,
        "bare_us": median(alone) * 1e6 / n,
        "same_gradients_us": median(a - b for a, b in zip(same, alone)) * 1e6 / n,
        "new_gradients_us": median(a - b for a, b in zip(fresh, alone)) * 1e6 / n,
        "torch_fused_us": median(torch_s) * 1e6 / n,
    }


# ---- Aims ----------------------------------------------------------------------------------------


def aims(results: Dict, sizes: Dict, cost: Dict) -> List[Dict]:
    """Compares what came out with the wall-time aims of the design. Leaves out an aim if a
    contestant did not run."""
    found: List[Dict] = []
    one = results.get("one", {})

    def judge(*arguments):
        found.append(common.judged(*arguments))

    def ratio(text, wanted, faster, slower):
        if faster in one and slower in one:
            judge(text, wanted, one[slower]["to_torch"] / one[faster]["to_torch"])

    for recipe in common.RECIPES:
        if not recipe.startswith("adamw/f32"):
            ratio(f"`{recipe}` against torch fused fp32", 1.0, recipe, REFERENCE)
    ratio(
        "`adamw/f32/f32` against torch fused fp32 (parity)", 0.95, "adamw/f32/f32:finite", REFERENCE
    )
    ratio(
        "all BF16, SR, against DeepSpeed's all BF16, nearest",
        1.3,
        "adamw/bf16-sr/bf16-sr",
        "deepspeed-bf16",
    )
    ratio("Kahan against optimi's", 4.0, "adamw/bf16-kahan/bf16-sr", "optimi-kahan")
    for peer in ("torchao-8bit", "bitsandbytes"):
        ratio(f"`int8` against {peer}, BF16 weights", 30.0, "adamw/bf16-sr/int8", peer)
    ratio("`int4` against torchao-4bit", 60.0, "adamw/bf16-sr/int4", "torchao-4bit")
    ratio(
        "stochastic rounding against nearest (at most 15 % more: 0.87)",
        0.87,
        "adamw/bf16-sr/bf16-sr",
        "adamw/bf16/bf16",
    )
    for recipe, aim in (
        ("adamw/f32/f32", 0.95),
        ("adamw/bf16-sr/bf16-sr", 0.80),
        ("adamw/bf16-kahan/bf16-sr", 0.80),
        ("adamw/bf16-sr/int8", 0.50),
        ("adamw/bf16-sr/int4", 0.45),
    ):
        if recipe + ":finite" in one:
            fraction = one[recipe + ":finite"]["of_stream"]
            judge(f"`{recipe}`, known finite, of this stream", aim, fraction)
    small, flat = results.get("small", {}), results.get("flat", {})
    small_count = f"{sizes['small']['tensors']}" if small else ""
    for recipe in common.RECIPES:
        if recipe in small and recipe in flat:
            # By their fractions of the streams around them, which the machine's moods leave alone.
            text = (
                f"`{recipe}`: one flat tensor's time over {small_count} small ones' (at most 1.2"
                " times it, in C)"
            )
            judge(text, 0.83, small[recipe]["of_stream"] / flat[recipe]["of_stream"])
    if cost:
        text = "2 µs per tensor and step above the C call: 2 over what it is"
        judge(text, 1.0, 2.0 / max(1e-9, cost["new_gradients_us"]))
    return found


# ---- Output --------------------------------------------------------------------------------------

TITLES = {
    "one": "One tensor",
    "model": "Tensors of a model",
    "small": "Small tensors",
    "flat": "One flat tensor of their size",
}
RATIO = "See the ratio to torch's fused fp32 AdamW; below 1 is faster:"
#: what to see in the table of each
SENTENCES = {
    "one": "Times are for all elements in one tensor. " + RATIO,
    "model": "The tensors have the shapes of a model. " + RATIO,
    "small": "Small tensors cost what a call costs. " + RATIO,
    "flat": "The same elements in one tensor show what the small tensors cost:",
}


def print_report(report: Dict) -> None:
    machine = report["machine"]
    print(
        f"{machine['processor']}, {machine['threads']} threads, load {machine['load_before']}"
        f" before and {machine['load_after']} after; "
        + ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    )
    for kind, rows in report["results"].items():
        shapes = report["shapes"][kind]
        print(
            f"\n## {TITLES[kind]}: {shapes['tensors']}, {shapes['elements'] / 1e6:.1f} M"
            " parameters\n\n" + SENTENCES[kind] + "\n"
        )
        table = []
        for key, r in rows.items():
            memory = report["memory"].get(key.split(":")[0], {}) if kind == "one" else {}
            peak = f"{memory['peak_per_param']:.2f}" if "peak_per_param" in memory else "-"
            table.append(
                [
                    r["title"] + (" (*)" if r["note"] else ""),
                    f"{r['ms']:.3g}",
                    f"{r['ns_per_param']:.3g}",
                    f"{r['of_stream']:.3f}",
                    f"{r['to_torch']:.2f}",
                    f"{r['bytes_of_states_per_param']:.3f}",
                ]
                + ([peak] if kind == "one" else [])
            )
        columns = [
            "optimizer",
            "ms/step",
            "ns/param",
            "of stream",
            "time to torch fused fp32",
            "B/param of states",
        ]
        print(common.markdown(columns + (["peak B/param"] if kind == "one" else []), table))
        for note in dict.fromkeys(r["note"] for r in rows.values() if r["note"]):
            print(f"\n(*) {note}")
    if report["memory"]:
        print(
            "\nPeak: memory of a process of its own during the first two steps on "
            f"{report['memory_elements'] / 1e6:.0f} M parameters, above weights and gradients."
        )
    if report["failures"]:
        print("\n## Did not run\n\nThe script names what it could not run, and why:\n")
        print(
            common.markdown(
                ["optimizer", "where", "why"],
                [
                    [f["title"], f["where"], f["reason"].replace("|", "/")]
                    for f in report["failures"]
                ],
                left=3,
            )
        )
    cost = report["overhead"]
    if cost:
        print(
            f"\nA tensor costs {cost['new_gradients_us']:.2f} µs a step above the C call with new"
            f" gradients, and {cost['same_gradients_us']:.2f} with the same ones. The call itself"
            f" costs {cost['bare_us']:.2f}, and torch's fused step {cost['torch_fused_us']:.2f}."
            f" ({cost['tensors']} tensors of one element, one thread's time.)"
        )
    if report["aims"]:
        print("\n## Aims\n\nWhat we ask of our own steps. A figure below the wanted one misses:\n")
        print(
            common.markdown(
                ["aim", "wanted", "measured", ""],
                [
                    [
                        a["aim"],
                        f"{a['wanted']:g}",
                        f"{a['measured']:.2f}",
                        "" if a["reached"] else "missed",
                    ]
                    for a in report["aims"]
                ],
            )
        )
    print("\nRun alone on the machine for figures to keep:\n\n    " + report["command"])


def write_csv(report: Dict, path: str) -> None:
    fields = [
        "shapes",
        "key",
        "title",
        "ms",
        "ns_per_param",
        "of_stream",
        "to_torch",
        "bytes_of_states_per_param",
        "bytes_moved_per_param",
        "peak_per_param",
        "stream_gb_per_s",
        "rounds",
        "params",
        "first_step_s",
        "stream",
        "note",
    ]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for kind, rows in report["results"].items():
            for key, row in rows.items():
                memory = report["memory"].get(key.split(":")[0], {}) if kind == "one" else {}
                line = {
                    k: f"{v:.6g}" if isinstance(v, float) else v
                    for k, v in {**row, **memory}.items()
                }
                writer.writerow({**line, "shapes": kind, "key": key})
        for failure in report["failures"]:
            writer.writerow(
                {
                    "shapes": failure["where"],
                    "key": failure["key"],
                    "title": failure["title"],
                    "note": failure["reason"],
                }
            )


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--only",
        help="contestants whose key contains or matches one of these words, separated by commas",
    )
    add("--shapes", default="one,model,small", help="of one, model, small (which flat goes with)")
    add(
        "--elements",
        type=int,
        help="of the one tensor; default: 64 Mi, fewer where memory is short",
    )
    add(
        "--scale",
        type=float,
        help="of the model's 1.1 B parameters; default: 1/8, less where memory is short",
    )
    add("--tensors", type=int, default=1000, help="how many small ones")
    add("--small", type=int, default=64, help="rows of 64 elements in a small one")
    add("--threads", type=int, help="default: the processors that this process may use")
    add("--rounds", type=int, default=15)
    add("--seconds", type=float, default=40, help="per contestant, after at least 3 rounds")
    add(
        "--patience",
        type=float,
        default=300,
        help="seconds for the first two steps, compilers included",
    )
    add("--settle", type=float, default=5, help="milliseconds of quiet before each timing")
    add(
        "--memory-elements",
        type=int,
        default=32 * MiB,
        help="for peak memory; 0: do not measure it",
    )
    add("--json", metavar="FILE", help="write everything; - prints it instead of the table")
    add("--csv", metavar="FILE")
    add("--list", action="store_true", help="print the keys")
    add("--memory-of", metavar="KEY", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def contestants() -> List[common.Contestant]:
    ours = [
        common.ours(recipe, scan) for recipe in common.RECIPES for scan in ("scan", "known-finite")
    ]
    return ours + common.peers()


def main(arguments=None) -> int:
    options = parse(arguments)
    everyone = contestants()
    if options.list:
        print("\n".join(f"{c.key:36} {c.title}" for c in everyone))
        return 0
    chosen = common.select(everyone, options.only)
    if not chosen:
        print(
            f"peers.py: no contestant matches '{options.only}'; --list names them", file=sys.stderr
        )
        return 2
    options.threads = common.threads_before_torch(options.threads)
    try:
        import torch
    except ImportError as error:
        print(f"peers.py: needs torch: {error}", file=sys.stderr)
        return 1
    torch.set_num_threads(options.threads)
    if options.memory_of:
        contestant = next(c for c in everyone if c.key == options.memory_of)
        try:
            print(json.dumps(measure_memory(contestant, one_shape(options.elements))))
        except Exception as error:
            print(json.dumps({"error": common.reason(error)}))
        return 0
    # The reference, the contestant with its temporaries, and the stream, at the most, per
    # parameter.
    fits = 0.6 * common.available_bytes() / (16 + 16 + 28 + 32)
    options.elements = options.elements or int(min(64 * MiB, fits)) // 4096 * 4096
    options.scale = options.scale or min(0.125, fits / elements(model_shapes(1.0)))
    options.memory_elements = min(options.memory_elements, options.elements)
    load = os.getloadavg()[0]
    failures, memory = [], {}

    def failed(contestant, where, why):
        failures.append(
            {"key": contestant.key, "title": contestant.title, "where": where, "reason": why}
        )
        print(f"{contestant.title} ({where}): {why}", file=sys.stderr)

    dead = set()
    for contestant in chosen if options.memory_elements else ():
        if contestant.key.endswith(":finite"):
            continue  # holds the same
        print(f"memory: {contestant.key}", file=sys.stderr)
        result = memory_in_child(contestant, options)
        if "error" in result:
            failed(contestant, "memory", result["error"])
            if result["error"].startswith("killed"):
                dead.add(contestant.key)  # it would end this process too
        else:
            memory[contestant.key] = result
    kinds = [kind for kind in options.shapes.split(",") if kind]
    if "small" in kinds and "flat" not in kinds:
        kinds.append("flat")
    stream, results, sizes = common.Stream(options.threads), {}, {}
    for kind in kinds:
        shapes = shapes_of(kind, options)
        sizes[kind] = {"tensors": len(shapes), "elements": elements(shapes)}
        reference = common.Subject(next(c for c in everyone if c.key == REFERENCE), shapes)
        timed_step(reference)
        results[kind] = {}
        for contestant in chosen:
            if contestant.key in dead or (kind == "flat" and not contestant.ours):
                continue
            print(f"{kind}: {contestant.key}", file=sys.stderr)
            try:
                row = measure(contestant, reference, stream, shapes, options)
                results[kind][contestant.key] = {"title": contestant.title, **row}
            except Exception as error:
                failed(contestant, kind, common.reason(error))
            gc.collect()
    cost = {}
    if any(c.ours for c in chosen):
        try:
            cost = overhead("adamw/f32/f32", options)
        except Exception as error:
            print(f"overhead: {common.reason(error)}", file=sys.stderr)
            cost = {}
    report = {
        "machine": {
            "processor": common.processor(),
            "system": platform.platform(),
            "threads": options.threads,
            "load_before": round(load, 2),
            "load_after": round(os.getloadavg()[0], 2),
        },
        "versions": common.versions(chosen),
        "shapes": sizes,
        "memory_elements": options.memory_elements,
        "memory": memory,
        "results": results,
        "failures": failures,
        "overhead": cost,
        "aims": aims(results, sizes, cost),
        "command": (
            "python bench/peers.py " + " ".join(sys.argv[1:] if arguments is None else arguments)
        ),
    }
    common.deliver(report, options, write_csv, print_report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
