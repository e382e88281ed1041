"""Fuzzes load_state_dict() with mutated state_dicts. Either it raises and the optimizer is
unchanged, or it loads, and then steps and a save work. It never crashes.

    fuzz_state_dict.py [--rounds N] [--seconds N] [--seed N] [--round N]

Types, shapes, dtypes, counters, scales (any bytes) and hyper-parameters change. Each round depends
on seed and number only. Rounds run in one child process at a time, so that a crash is reported with
its round. Needs torch and halfstep.
"""

import argparse
import copy
import io
import mmap
import os
import random
import signal
import sys
import time
import traceback
import warnings

import torch

import halfstep

CASES = [
    ("AdamW", {"weights": "bf16-kahan", "states": "int8"}, torch.bfloat16),
    ("AdamW", {"states": "dyn8"}, torch.float32),
    ("Lion", {"weights": "bf16-sr", "states": "int4"}, torch.bfloat16),
    ("SGD", {"momentum": 0.9}, torch.float32),
    ("Lamb", {"weights": "f16-ecc8", "states": "fp8"}, torch.float16),
    ("Muon", {"weights": "bf16-ecc16"}, torch.bfloat16),
    ("ScheduleFree", {"weights": "bf16-ecc8", "states": "dyn4"}, torch.bfloat16),
    ("Adan", {"states": "bf16-sr"}, torch.float32),
    ("Lamb16", {}, torch.float32),
    ("AdamWDelayed", {"weights": "bf16-kahan"}, torch.bfloat16),
]
SHAPES = [(16, 256), (5, 96), (40,), ()]
EXCEPTIONS = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RuntimeError,
    OverflowError,
    IndexError,
)
ODD = [
    None,
    -1,
    0,
    3.5,
    float("nan"),
    float("inf"),
    2**63,
    2**64,
    -(2**70),
    "",
    "adamw/bf99",
    b"\xff",
    [],
    {},
    (1, 2),
    True,
    torch.tensor(-3.0),
    torch.tensor(float("nan")),
    torch.zeros(0),
    torch.zeros(3, 3, dtype=torch.int8),
]
DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def classes():
    return [case for case in CASES if hasattr(halfstep, case[0])]


def made(case):
    name, options, dtype = case
    generator = torch.Generator().manual_seed(1)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]
    return params, getattr(halfstep, name)(
        [(f"p{i}", p) for i, p in enumerate(params)], lr=1e-3, **options
    )


def run(params, opt, steps):
    for step in range(steps):
        for p in params:
            p.grad = torch.full_like(p, 0.01 * (step + 1))
        opt.step()


def everything(value):
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return (
            str(value.dtype),
            tuple(value.shape),
            flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"",
        )
    if isinstance(value, dict):
        return {k: everything(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [everything(v) for v in value]
    return repr(value)


def odd_tensor(rng, tensor):
    kind = rng.randrange(7)
    if kind == 0:  # any bytes: codes, scales, residuals
        flat = tensor.detach().clone().contiguous()
        if flat.numel():
            raw = flat.view(-1).view(torch.uint8)
            raw.copy_(
                torch.tensor(
                    [rng.randrange(256) for _ in range(min(64, raw.numel()))], dtype=torch.uint8
                ).repeat(raw.numel() // min(64, raw.numel()) + 1)[: raw.numel()]
            )
        return flat
    if kind == 1 and tensor.is_floating_point():
        value = rng.choice([float("nan"), float("inf"), -1.0, -1e30, 1e-40, 0.0, 3e38])
        out = tensor.detach().clone()
        if out.numel():
            out.view(-1)[rng.randrange(out.numel()) :: rng.randrange(1, 9)] = value
        return out
    if kind == 2:
        return tensor.to(rng.choice(DTYPES))
    if kind == 3:
        return tensor.detach().clone().reshape(-1)[: rng.randrange(tensor.numel() + 1)]
    if kind == 4:
        return torch.cat(
            [tensor.detach().reshape(-1), tensor.detach().reshape(-1)[: rng.randrange(3)]]
        )
    if kind == 5:  # another layout of the same elements
        return (
            tensor.detach().clone().t().contiguous().t()
            if tensor.dim() == 2
            else tensor.detach().clone().expand(tensor.shape)
        )
    return tensor.detach().clone().reshape(1, *tensor.shape)


def mutate(rng, file):
    for _ in range(rng.randrange(1, 4)):
        states = (
            [s for s in file.get("state", {}).values() if isinstance(s, dict) and s]
            if isinstance(file.get("state"), dict)
            else []
        )
        groups = (
            [g for g in file["param_groups"] if isinstance(g, dict)]
            if isinstance(file.get("param_groups"), list)
            else []
        )
        kind = rng.randrange(8)
        if kind < 4 and states:
            state = rng.choice(states)
            key = rng.choice(sorted(state))
            value = state[key]
            state[key] = (
                odd_tensor(rng, value)
                if isinstance(value, torch.Tensor) and rng.randrange(4)
                else rng.choice(ODD)
            )
        elif kind == 4 and states:
            state = rng.choice(states)
            state.pop(rng.choice(sorted(state)))
        elif kind == 5 and groups:
            group = rng.choice(groups)
            group[rng.choice(sorted(group))] = copy.deepcopy(rng.choice(ODD))
        elif kind == 6 and groups:
            group = rng.choice(groups)
            key = rng.choice(sorted(group))
            if isinstance(group[key], (list, tuple)) and group[key]:
                group[key] = [rng.choice([v, rng.choice(ODD)]) for v in group[key]][
                    : rng.randrange(len(group[key]) + 2)
                ]
            else:
                group.pop(key)
        elif kind == 7 and isinstance(file.get("state"), dict):
            keys = list(file["state"])
            if keys:
                file["state"][rng.choice(keys + [99, "x"])] = file["state"].pop(rng.choice(keys))
    return file


def one(seed, number, counts):
    rng = random.Random(seed * 1000003 + number)
    case = rng.choice(classes())
    params, writer = made(case)
    run(params, writer, rng.randrange(1, 3))
    file = mutate(rng, copy.deepcopy(writer.state_dict()))
    fresh, opt = made(case)
    run(fresh, opt, rng.randrange(2))
    before = everything(opt.state_dict()), everything(fresh)
    try:
        opt.load_state_dict(file)
    except EXCEPTIONS as error:
        counts[1] += 1
        if not str(error):
            raise AssertionError(f"{error!r} says nothing")
        if (everything(opt.state_dict()), everything(fresh)) != before:
            raise AssertionError(f"a refused load ({error}) changes the optimizer")
    else:
        counts[0] += 1
    # Steps and saves must not crash, whatever was loaded.
    try:
        run(fresh, opt, 2)
        torch.save(opt.state_dict(), io.BytesIO())
        repr(opt)
    except EXCEPTIONS as error:
        if not str(error):
            raise AssertionError(f"{error!r} says nothing")


def work(seed, first, last, deadline, place):
    """Runs rounds first .. last - 1. Keeps the current round in place[0] and adds the accepted and
    refused loads to place[1:3]."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts = [0, 0]
    for number in range(first, last):
        place[0] = number
        if deadline and time.time() > deadline:
            break
        signal.alarm(60)
        try:
            one(seed, number, counts)
        except BaseException:
            traceback.print_exc(limit=-4)
            sys.stderr.flush()
            os._exit(3)
        place[1] += counts[0]
        place[2] += counts[1]
        place[3] += 1
        counts[:] = 0, 0
    os._exit(0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--round", type=int)
    options = parser.parse_args()
    if options.round is not None:
        one(options.seed, options.round, [0, 0])
        return 0
    start = time.time()
    deadline = start + options.seconds if options.seconds else 0
    last = 10**9 if options.seconds else options.rounds
    place = memoryview(mmap.mmap(-1, 4 * 8)).cast("q")  # shared with the children
    number = found = 0
    # Run once before any fork, so that every child has the modules that are imported late.
    one(options.seed, 0, [0, 0])
    while number < last and not (deadline and time.time() > deadline):
        child = os.fork()
        if not child:
            work(options.seed, number, last, deadline, place)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            break
        found += 1
        how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "an exception"
        print(
            f"     {how}\n     reproduce: python {sys.argv[0]} --seed {options.seed} --round"
            f" {place[0]}",
            flush=True,
        )
        number = place[0] + 1
    print(
        f"| fuzz_state_dict | {time.time() - start:.0f} | {place[3]} ({place[1]} loads taken,"
        f" {place[2]} refused) | {f'{found} findings' if found else 'nothing'} |"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
