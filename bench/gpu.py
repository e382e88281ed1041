#!/usr/bin/env python3
"""Optimizer steps on a GPU as a fraction of a copy in the same run, of this library and of its
peers.

    python bench/gpu.py                                    every contestant on one matrix of 2^30
                                                           parameters, and on a model's tensors
    python bench/gpu.py --only torch,adamw/bf16-sr/int8 --shapes one --elements 2^28
    python bench/gpu.py --small 300                        what a step of so many small tensors
                                                           costs the process, in microseconds

Every round is a copy within the GPU's memory, a step, and a copy. Times are of events on the
stream. "Of a copy" is the rate of the step over the rate of the copies beside it, as the median
over the rounds. These bytes count for a step:

    weights and states    read once and written once
    gradients             read once. Ours reads them twice where it looks for gradients that are not
                          finite, which is the default; ":finite" leaves that out
    all of it once more   for rules that need sums over a tensor before its update (lamb16)

Contestants run one after the other, each alone on the GPU. One that is missing or fails says why.
The status is 1 if one of ours fails. The aims stand below the table, with the results.

--device cpu times the same on the processor, to see that everything runs; its figures mean nothing.
"""

import argparse
import gc
import json
import os
import platform
import sys
import time
import types
from statistics import median

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import peers  # noqa: E402
import peers_common as common  # noqa: E402

#: of this library: fp32 and what is stored in 16, 8 and 4 bits, and rules with one state, none, and
#: norms
RECIPES = (
    "adamw/f32/f32",
    "adamw/bf16-sr/bf16-sr",
    "adamw/bf16-kahan/bf16-sr",
    "adamw/bf16-ecc8/int8",
    "adamw/bf16-sr/int8",
    "adamw/bf16-sr/int4",
    "adamw/int8-ecc4/int8",
    "lion/bf16-sr/bf16-sr",
    "lion/bf16-sr/int8",
    "sgd/bf16-sr",
    "lamb16/bf16-sr/bf16-sr",
)
PEERS = (
    "torch",
    "torch-bf16",
    "optimi",
    "optimi-kahan",
    "torchao-8bit",
    "torchao-4bit",
    "flashoptim",
    "bitsandbytes",
)
#: of a copy, gradients known to be finite: at least so much
SHARES = {
    "adamw/f32/f32": 0.90,
    "adamw/bf16-sr/bf16-sr": 0.90,
    "adamw/bf16-kahan/bf16-sr": 0.90,
    "lion/bf16-sr/bf16-sr": 0.90,
    "sgd/bf16-sr": 0.90,
    "lamb16/bf16-sr/bf16-sr": 0.90,
    "adamw/bf16-sr/int8": 0.75,
    "adamw/bf16-ecc8/int8": 0.75,
    "adamw/int8-ecc4/int8": 0.75,
    "lion/bf16-sr/int8": 0.75,
}
#: who stores about as much as a recipe, which has to be ahead of them as users have it
RIVALS = {
    "adamw/f32/f32": ("torch", "optimi"),
    "adamw/bf16-sr/bf16-sr": ("torch-bf16",),
    "adamw/bf16-kahan/bf16-sr": ("optimi-kahan",),
    "adamw/bf16-ecc8/int8": ("flashoptim",),
    "adamw/bf16-sr/int8": ("torchao-8bit", "bitsandbytes"),
    "adamw/bf16-sr/int4": ("torchao-4bit",),
}
#: tensors of a list, and microseconds that it may cost the process
SMALL, SUBMITTED = 300, 30.0
SHAPES = {
    "one": lambda given: peers.one_shape(given.elements),
    "model": lambda given: peers.model_shapes(given.scale),
}
#: the hyper-parameters that every rule has
LR = {"lr": 1e-3}


def ours(recipe, finite):
    def make(params, hyper):
        import halfstep

        return halfstep.optimizer(recipe, params, scan="known-finite" if finite else "scan", **LR)

    return common.Contestant(
        recipe + (":finite" if finite else ""),
        recipe,
        "halfstep",
        common.stored_as(recipe),
        make,
        recipe=recipe,
        passes=1 if finite else 2,
    )


def contestants():
    known = {c.key: c for c in common.peers()}
    return [ours(recipe, finite) for recipe in RECIPES for finite in (True, False)] + [
        known[key] for key in PEERS
    ]


def reads_twice(contestant):
    """Returns True if a rule of ours needs sums first. Phases go over all tensors, so that no cache
    holds any in between."""
    if not contestant.ours:
        return False
    from halfstep._library import abi

    return bool(abi.rules[contestant.recipe.split("/")[0]].two_pass)


class Clock:
    """Seconds of what is called, on the stream of a GPU or on the processor."""

    def __init__(self, device):
        import torch

        self.torch, self.gpu = torch, device == "cuda"

    def __call__(self, function):
        if not self.gpu:
            begun = time.perf_counter()
            function()
            return time.perf_counter() - begun
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3


def subject_of(contestant, shapes, device):
    """Parameters with gradients on the device, and the optimizer."""
    import torch

    generator = torch.Generator(device).manual_seed(1)
    params = []
    for shape in shapes:
        first = torch.empty(shape, dtype=contestant.dtype(), device=device)
        gradient = torch.empty_like(first)
        p = contestant.parameter(first.normal_(0, 0.02, generator=generator))
        p.grad = gradient.normal_(0, 1e-3, generator=generator)
        params.append(p)
    return params, contestant.build(params, {}, len(shapes) > 64)


def measure(contestant, shapes, given):
    import torch

    params, optimizer = subject_of(contestant, shapes, given.device)
    clock = Clock(given.device)
    gradients = [p.grad for p in params]

    def step():
        optimizer.step()
        for p, gradient in zip(params, gradients):
            p.grad = gradient

    with common.patience(given.patience):
        for _ in range(3):
            clock(step)
    n = sum(p.numel() for p in params)
    held = (t for p in params for t in common.tensors_in(p, set()))
    stored = sum(t.numel() * t.element_size() for t in held) + common.state_bytes(optimizer)
    given_bytes = sum(g.numel() * g.element_size() for g in gradients)
    moved = (
        2 * stored
        + contestant.passes * given_bytes
        + (stored + given_bytes if reads_twice(contestant) else 0)
    )
    size = min(moved // 2, given.copy)
    here, there = (torch.empty(size, dtype=torch.uint8, device=given.device) for _ in range(2))

    def copy():
        there.copy_(here)

    clock(copy)
    times, fractions, rates = [], [], []
    for _ in range(given.rounds):
        before, seconds, after = clock(copy), clock(step), clock(copy)
        rates.append(2 * size / (0.5 * (before + after)))
        times.append(seconds)
        fractions.append(moved / seconds / rates[-1])
    return {
        "ms": 1e3 * median(times),
        "of_copy": median(fractions),
        "ns_per_param": 1e9 * median(times) / n,
        "bytes_per_param": moved / n,
        "copy_gb_per_s": 1e-9 * median(rates),
        "params": n,
    }


def submission(contestant, given):
    """Measures the microseconds that a step of small tensors takes the process; the GPU works
    later. For ours also those of the call of C alone."""
    import torch

    params, optimizer = subject_of(contestant, [(64, 64)] * given.small, given.device)
    gradients = [p.grad for p in params]

    def step():
        for p, gradient in zip(params, gradients):
            p.grad = gradient
        begun = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - begun

    def microseconds(function):
        times = []
        for _ in range(given.rounds + 3):
            times.append(function())
            if given.device == "cuda":
                torch.cuda.synchronize()
        return 1e6 * median(times[3:])

    with common.patience(given.patience):
        found = {"us": microseconds(step), "tensors": given.small}
    if contestant.ours:
        bare = peers.Bare(
            contestant.recipe,
            types.SimpleNamespace(params=params, gradients=gradients),
            0,
            given.device,
        )
        found["bare_us"] = microseconds(lambda: bare.step(time.perf_counter))
        bare.close()
    return found


def aims(found):
    """Returns (aim, wanted, measured, True if it is reached) for everything that was measured."""
    rows = {(row["shapes"], row["contestant"]): row for row in found}
    judged = []

    def judge(*arguments, **options):
        judged.append(common.judged(*arguments, **options))

    for kind in SHAPES:
        for recipe, share in SHARES.items():
            if (kind, recipe + ":finite") in rows:
                judge(
                    f"{kind}: `{recipe}` of a copy",
                    share,
                    rows[kind, recipe + ":finite"]["of_copy"],
                )
        for recipe, others in RIVALS.items():
            for other in others:
                if (kind, recipe) in rows and (kind, other) in rows:
                    judge(
                        f"{kind}: time of {other} over `{recipe}`",
                        1.0,
                        rows[kind, other]["ms"] / rows[kind, recipe]["ms"],
                    )
        pair = [rows.get((kind, f"adamw/bf16-sr/{states}")) for states in ("bf16-sr", "int4")]
        if all(pair):
            judge(
                f"{kind}: time of `adamw/bf16-sr` over `adamw/bf16-sr/int4`",
                1.0,
                pair[0]["ms"] / pair[1]["ms"],
            )
    for (kind, key), row in rows.items():
        if kind == "small" and row["tensors"] == SMALL and "bare_us" in row:
            judge(f"`{key}`, {SMALL} small tensors, µs (at most)", SUBMITTED, row["us"], most=True)
            judge(f"`{key}`, the same, the call of C alone", SUBMITTED, row["bare_us"], most=True)
    return judged


def write(path, where, found):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(
            {"machine": where, "results": found, "aims": aims(found)},
            file,
            indent=1,
            ensure_ascii=False,
        )
        file.write("\n")


def no_gpu(torch):
    """Says in a few words why torch cannot use a GPU, or returns None."""
    if torch.version.hip:
        return f"torch {torch.__version__} is for ROCm, whose GPUs these kernels are not for"
    if not torch.version.cuda:
        return f"torch {torch.__version__} finds no GPU here: it is built without CUDA"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU here"


def number(text):
    base, power, exponent = text.partition("^")
    return int(base) ** int(exponent) if power else int(float(text))


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="words that keys contain, with commas between")
    parser.add_argument(
        "--shapes",
        default="one,model",
        help="one (matrix), model (the tensors of one of 1.1 B parameters), or both (default)",
    )
    parser.add_argument(
        "--elements", type=number, default=1 << 30, help="of the matrix (default: 2^30)"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the model")
    parser.add_argument(
        "--copy", type=number, default=1 << 32, help="the most bytes of a copy (default: 2^32)"
    )
    parser.add_argument(
        "--small",
        type=int,
        default=0,
        help="so many tensors of 64 by 64: only what a step costs the process",
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--patience",
        type=float,
        default=120.0,
        help="seconds for the first steps, in which some compile",
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", help="write the results to a file as well")
    given = parser.parse_args(arguments)
    kinds = ["small"] if given.small else given.shapes.split(",")
    unknown = [kind for kind in kinds if kind != "small" and kind not in SHAPES]
    if unknown:
        print(f"gpu.py: --shapes {unknown[0]}: there are {' and '.join(SHAPES)}", file=sys.stderr)
        return 2
    # Of small tensors what is asked is the process, which looks at no gradient.
    chosen = common.select(
        [c for c in contestants() if not given.small or not c.ours or c.passes > 1], given.only
    )
    if not chosen:
        print(f"gpu.py: no contestant matches {given.only!r}", file=sys.stderr)
        return 2
    try:
        import torch
    except ImportError as error:
        print(f"gpu.py: needs torch: {error}", file=sys.stderr)
        return 1
    why = no_gpu(torch) if given.device == "cuda" else None
    if why:
        print(f"gpu.py: {why}; --device cpu runs everything on the processor", file=sys.stderr)
        return 1
    where = (
        torch.cuda.get_device_name()
        if given.device == "cuda"
        else f"the processor ({platform.machine()}): figures mean nothing"
    )
    print(
        f"{where}, torch {torch.__version__}, "
        + ", ".join(f"{k} {v}" for k, v in common.versions(chosen).items() if v)
    )
    columns = (
        "us a step of the process | of C alone |"
        if given.small
        else ("shapes | ms a step | of a copy | ns a parameter | bytes a parameter | copy, GB/s |")
    )
    print("\n| contestant | " + columns)
    print("|---|" + "---:|" * (2 if given.small else 6))
    found, failed = [], False
    for kind in kinds:
        shapes = None if kind == "small" else SHAPES[kind](given)
        for contestant in chosen:
            try:
                row = (
                    submission(contestant, given)
                    if given.small
                    else measure(contestant, shapes, given)
                )
            except Exception as error:
                failed = failed or contestant.ours
                print(f"| {contestant.title} | {common.reason(error)} |", flush=True)
                continue
            finally:
                gc.collect()
                if given.device == "cuda":
                    torch.cuda.empty_cache()
            found.append({"contestant": contestant.key, "shapes": kind, **row})
            print(
                (
                    f"| {contestant.key} | {row['us']:.1f} |"
                    f" {row.get('bare_us', float('nan')):.1f} |"
                    if given.small
                    else (
                        f"| {contestant.key} | {kind} | {row['ms']:.3f} | {row['of_copy']:.2f} |"
                        f" {row['ns_per_param']:.4f} | {row['bytes_per_param']:.2f} |"
                        f" {row['copy_gb_per_s']:.0f} |"
                    )
                ),
                flush=True,
            )
            if given.json:  # now, for whoever is stopped later
                write(given.json, where, found)
    judged = aims(found)
    if judged:
        print("\n| aim | wanted | measured | |\n|---|---:|---:|---|")
    for line in judged:
        print(
            f"| {line['aim']} | {line['wanted']:g} | {line['measured']:.2f} |"
            f" {'' if line['reached'] else 'missed'} |"
        )
    return 0 if found and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
