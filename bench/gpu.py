#!/usr/bin/env python3
"""Optimizer steps on a GPU as a fraction of a copy in the same run, of this library and of its peers.

    python bench/gpu.py                                    every contestant on one matrix of 2^30 parameters, and on a model's tensors
    python bench/gpu.py --only torch,adamw/bf16-sr/int8 --shapes one --elements 2^28
    python bench/gpu.py --small 300                        what a step of so many small tensors costs the process, in microseconds

Every round is a copy within the GPU's memory, a step, and a copy; times are of events on the stream. "Of a copy" is the median over the
rounds of the bytes that a step has to move over its time, against the same of the copies beside it: weights and all that the optimizer
holds read and written once, gradients read once, or twice where ours looks for gradients that are not finite (the default; ":finite" has
been told that there are none). Contestants are made one after the other, each alone on the GPU. One that is missing, or fails, says why.

--device cpu times the same on the processor, to see that everything runs; its figures mean nothing.
"""
import argparse
import gc
import json
import os
import platform
import sys
import time
from statistics import median

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import peers  # noqa: E402
import peers_common as common  # noqa: E402

#: of this library: fp32 and what is stored in 16, 8 and 4 bits, and rules with one state, none, and norms
RECIPES = ("adamw/f32/f32", "adamw/bf16-sr/bf16-sr", "adamw/bf16-kahan/bf16-sr", "adamw/bf16-ecc8/int8", "adamw/bf16-sr/int8", "adamw/bf16-sr/int4",
           "lion/bf16-sr/bf16-sr", "lion/bf16-sr/int8", "sgd/bf16-sr", "lamb16/bf16-sr/bf16-sr")
PEERS = ("torch", "torch-bf16", "optimi", "optimi-kahan", "torchao-8bit", "torchao-4bit", "flashoptim", "bitsandbytes")
#: the hyper-parameters that every rule has
LR = {"lr": 1e-3}


def ours(recipe, finite):
    def make(params, hyper):
        import halfstep
        return halfstep.optimizer(recipe, params, scan="known-finite" if finite else "scan", **LR)
    return common.Contestant(recipe + (":finite" if finite else ""), recipe, "halfstep", recipe.split("/")[1].split("-")[0], make, recipe=recipe,
                             passes=1 if finite else 2)


def contestants():
    known = {c.key: c for c in common.peers()}
    return [ours(recipe, finite) for recipe in RECIPES for finite in (True, False)] + [known[key] for key in PEERS]


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
        p = torch.nn.Parameter(torch.empty(shape, dtype=contestant.dtype(), device=device).normal_(0, 0.02, generator=generator))
        p.grad = torch.empty_like(p).normal_(0, 1e-3, generator=generator)
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
    stored = sum(p.numel() * p.element_size() for p in params) + common.state_bytes(optimizer)
    moved = 2 * stored + contestant.passes * sum(g.numel() * g.element_size() for g in gradients)
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
    return {"ms": 1e3 * median(times), "of_copy": median(fractions), "ns_per_param": 1e9 * median(times) / n, "bytes_per_param": moved / n,
            "copy_gb_per_s": 1e-9 * median(rates), "params": n}


def submission(contestant, given):
    """Microseconds of the process for a step of small tensors, which the GPU does later."""
    import torch
    params, optimizer = subject_of(contestant, [(64, 64)] * given.small, given.device)
    gradients, times = [p.grad for p in params], []
    for i in range(given.rounds + 3):
        for p, gradient in zip(params, gradients):
            p.grad = gradient
        begun = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begun)
        if given.device == "cuda":
            torch.cuda.synchronize()
    return {"us": 1e6 * median(times[3:]), "tensors": given.small}


def number(text):
    base, power, exponent = text.partition("^")
    return int(base) ** int(exponent) if power else int(float(text))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="words that keys contain, with commas between")
    parser.add_argument("--shapes", default="one,model", help="one matrix, the tensors of a model of 1.1 B parameters (default: both)")
    parser.add_argument("--elements", type=number, default=1 << 30, help="of the matrix (default: 2^30)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the model")
    parser.add_argument("--copy", type=number, default=1 << 32, help="the most bytes of a copy (default: 2^32)")
    parser.add_argument("--small", type=int, default=0, help="so many tensors of 64 by 64: only what a step costs the process")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for the first steps, in which some compile")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", help="write the results to a file as well")
    given = parser.parse_args(arguments)
    import torch
    if given.device == "cuda" and not torch.cuda.is_available():
        print("gpu.py: torch finds no GPU here; --device cpu runs everything on the processor", file=sys.stderr)
        return 1
    chosen = common.select(contestants(), given.only)
    if not chosen:
        print(f"gpu.py: no contestant matches {given.only!r}", file=sys.stderr)
        return 2
    where = torch.cuda.get_device_name() if given.device == "cuda" else f"the processor ({platform.machine()}): figures mean nothing"
    print(f"{where}, torch {torch.__version__}, " + ", ".join(f"{k} {v}" for k, v in common.versions(chosen).items() if v))
    kinds = ["small"] if given.small else given.shapes.split(",")
    print("\n| contestant | " + ("us a step of the process |" if given.small else "shapes | ms a step | of a copy | ns a parameter | bytes a parameter | copy, GB/s |"))
    print("|---|" + "---:|" * (1 if given.small else 6))
    found = []
    for kind in kinds:
        shapes = peers.one_shape(given.elements) if kind == "one" else peers.model_shapes(given.scale)
        for contestant in chosen:
            try:
                row = submission(contestant, given) if given.small else measure(contestant, shapes, given)
            except Exception as error:
                print(f"| {contestant.title} | {common.reason(error)} |", flush=True)
                continue
            finally:
                gc.collect()
                if given.device == "cuda":
                    torch.cuda.empty_cache()
            found.append({"contestant": contestant.key, "shapes": kind, **row})
            print(f"| {contestant.key} | {row['us']:.1f} |" if given.small else
                  f"| {contestant.key} | {kind} | {row['ms']:.3f} | {row['of_copy']:.2f} | {row['ns_per_param']:.4f} | {row['bytes_per_param']:.2f} | "
                  f"{row['copy_gb_per_s']:.0f} |", flush=True)
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({"machine": where, "results": found}, file, indent=1)
            file.write("\n")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
