#!/usr/bin/env python3
"""Measures what the packages behind halfstep.compat claim for themselves, by their own snippets.

Over 500 lines because every claim is a small experiment.

    python bench/claims.py                     every row of docs/claims.md
    python bench/claims.py --only release      rows whose name contains the word, or matches as a
                                               regular expression
    python bench/claims.py --list

Memory. Each case has a process of its own. It trains a model of 37.9 M parameters (12 transformer
layers of width 512) for some steps. It takes 8 positions, so that activations are small. One layer
warms everything up first. Two figures tell the peak between the built model and the end of the last
step:

    peak    the most that torch's allocator had handed out, by the events of torch.profiler. It is
            exact: it has every tensor and temporary
    RSS     how much the process grew, by the kernel's high-water mark. It also has what torch does
            not see: this library's memory, oneDNN's and the interpreter's

Speed. Two optimizers step the model's tensors in turn, in one process. The figure is the median of
the ratios of the pairs, with quartiles. One thread is the default. Its time is processor time,
which other programs disturb less. With --threads it is wall time, which needs an idle machine."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from statistics import quantiles

# Freed memory goes back at once, and threads have no pools of their own, so that RSS tells what is
# in use.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
os.environ.setdefault("MALLOC_ARENA_MAX", "1")
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402
from torch import nn  # noqa: E402

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from peers_common import forget_peak, resident  # noqa: E402

BF16 = torch.bfloat16
MICRO = 4  # micro-batches of a step, where a snippet accumulates
STEPS = 3
PATIENCE = 900  # seconds for one case


class Model(nn.Module):
    """Layers as torch has them. Its value is a loss, which is what the sources' snippets call
    backward() of."""

    width, depth = 512, 12

    def __init__(self, depth=None):
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    self.width, 8, 4 * self.width, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(depth or self.depth)
            )
        )
        self.head = nn.Linear(self.width, 64)

    def forward(self, x):
        return self.head(self.layers(x)).float().square().mean()

    loss = forward


def batch(dtype=torch.float32, tokens=8, sequences=1):
    return torch.randn(sequences, tokens, Model.width).to(dtype)


# ---- Memory: usage snippets ----------------------------------------------------------------------
# Each is a generator that yields the model when it is built and the optimizer when it has been
# trained. `source` imports a package by its name: ours in its place, or the source itself.


def torch_adamw(source, depth=None, dtype=torch.float32, **options):
    model = Model(depth).to(dtype)
    yield model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    for _ in range(STEPS):
        model(batch(dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield optimizer


def torch_autocast(source, depth=None):
    """Trains fp32 weights in mixed precision. autocast makes BF16 copies of them, which live until
    backward() is done."""
    model = Model(depth)
    yield model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(STEPS):
        with torch.autocast("cpu", BF16):
            loss = model(batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield optimizer


def torch_buffers(source, depth=None, autocast=False):
    """Trains with fp32 AdamW and sums micro-gradients in tensors of their own, as frameworks do
    that reduce them elsewhere."""
    model = Model(depth)
    yield model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(STEPS):
        for _ in range(MICRO):
            model.zero_grad()
            with torch.autocast("cpu", BF16, enabled=autocast):
                loss = model(batch())
            loss.backward()
            for p, total in zip(model.parameters(), sums):
                total += p.grad
        for p, total in zip(model.parameters(), sums):
            p.grad.copy_(total)
            total.zero_()
        optimizer.step()
        optimizer.zero_grad()
    yield optimizer


def torchastic(source, depth=None, name="AdamW", **options):
    package = source("torchastic")
    Optimizer, StochasticAccumulator = getattr(package, name), package.StochasticAccumulator
    model = Model(depth).to(BF16)
    yield model
    optimizer = Optimizer(model.parameters(), lr=0.01, weight_decay=1e-2, **options)
    # Apply stochastic grad accumulator hooks
    StochasticAccumulator.assign_hooks(model)
    for _ in range(STEPS):
        for _ in range(MICRO):
            with torch.autocast(device_type="cpu", dtype=BF16):
                loss = model.loss(batch(BF16))
            loss.backward()
        # Apply grad buffer back
        StochasticAccumulator.reassign_grad_buffer(model)
        optimizer.step()
        optimizer.zero_grad()
    yield optimizer


def torchao(source, depth=None, name="AdamW8bit", dtype=BF16, **options):
    Optimizer = getattr(source("torchao.optim"), name)
    model = Model(depth).to(dtype)
    yield model
    optim = Optimizer(model.parameters(), **options)
    for _ in range(STEPS):
        model(batch(dtype)).backward()
        optim.step()
        optim.zero_grad()
    yield optim


def adamw_bfloat16(source, depth=None):
    package = source("adamw_bfloat16")
    LR, AdamW_BF16 = package.LR, package.AdamW_BF16
    model = Model(depth).to(BF16)
    yield model
    optimizer = AdamW_BF16(
        model.parameters(), lr_function=LR(lr=1e-4, preheat_steps=5000, decay_power=-0.25)
    )
    for _ in range(STEPS):
        loss = model(batch(BF16))
        loss.backward()
        optimizer.step(zero_grad=True)
    yield optimizer


def lamb16(source, depth=None, name="Lamb16", **options):
    Optimizer = getattr(source("pytorch_lamb"), name)
    model = Model(depth)
    yield model
    optimizer = Optimizer(
        model.parameters(), lr=0.02, weight_decay=0.01, betas=(0.9, 0.999), **options
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch()).backward()
        optimizer.step()
    yield optimizer


def optimi(source, depth=None, dtype=BF16, **options):
    AdamW = source("optimi").AdamW
    model = Model(depth).to(dtype)
    yield model
    opt = AdamW(model.parameters(), lr=1e-3, **options)
    for _ in range(STEPS):
        # forward and backward, casting input to bfloat16 if needed
        loss = model(batch(dtype))
        loss.backward()
        # optimizer step automatically uses Kahan summation for low precision layers
        opt.step()
        opt.zero_grad()
    yield opt


def optimi_release(source, depth=None, dtype=BF16, accumulation_steps=1):
    package = source("optimi")
    model = Model(depth).to(dtype)
    yield model
    opt = package.AdamW(model.parameters(), lr=1e-3, gradient_release=True)
    package.prepare_for_gradient_release(model, opt)
    for idx in range(STEPS * accumulation_steps):
        opt.optimizer_accumulation = (idx + 1) % accumulation_steps != 0
        # calling backward on the model will perform the optimizer step
        loss = model(batch(dtype))
        loss.backward()
    package.remove_gradient_release(model)
    yield opt


def optimi_buffers(source, depth=None):
    """Trains with Kahan summation. This library's accumulator sums micro-gradients in BF16, rounded
    stochastically."""
    import halfstep

    model = Model(depth).to(BF16)
    yield model
    opt = source("optimi").AdamW(model.parameters(), lr=1e-3)
    accumulator = halfstep.GradientAccumulator(model.named_parameters()).attach()
    for _ in range(STEPS):
        for _ in range(MICRO):
            model(batch(BF16)).backward()
        accumulator.reassign()
        opt.step()
        opt.zero_grad()
    yield opt


def flashoptim(source, depth=None, release=False, **options):
    package = source("flashoptim")
    model = Model(depth)
    # cast parameters to bf16
    package.cast_model(model, dtype=BF16)
    yield model
    optimizer = package.FlashAdamW(model.parameters(), lr=1e-3, **options)
    handle = package.enable_gradient_release(model, optimizer) if release else None
    for _ in range(STEPS):
        loss = model(batch(BF16)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if handle:
        handle.remove()
    yield optimizer


def int4(source, depth=None, release=False):
    """Trains with the least memory that this library has. It is no source's snippet."""
    import halfstep

    model = Model(depth).to(BF16)
    yield model
    optimizer = halfstep.optimizer(
        "adamw/bf16-sr/int4", model.named_parameters(), lr=1e-3, gradient_release=release
    )
    for _ in range(STEPS):
        model(batch(BF16)).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield optimizer


SR = {"bf16_stochastic_round": True}
#: name of a case -> the snippet with its options
CASES = {
    "torch_fused": partial(torch_adamw, fused=True),
    "torch_bf16": partial(torch_adamw, dtype=BF16, fused=True),
    "torch_autocast": torch_autocast,
    "torch_buffers": torch_buffers,
    "torch_autocast_buffers": partial(torch_buffers, autocast=True),
    "torchastic": torchastic,
    "torchastic_compass": partial(torchastic, name="Compass", amp_fac=5),
    "torchastic_lpf": partial(torchastic, name="LPFAdamW"),
    "torchastic_rmsprop": partial(torchastic, name="RMSProp"),
    "torchao_8bit_f32": partial(torchao, dtype=torch.float32),
    "torchao_8bit": partial(torchao, **SR),
    "torchao_4bit": partial(torchao, name="AdamW4bit", **SR),
    "torchao_fp8": partial(torchao, name="AdamWFp8", **SR),
    "torchao_sr": partial(torchao, name="_AdamW", **SR),
    "torchao_nearest": partial(torchao, name="_AdamW", bf16_stochastic_round=False),
    "adamw_bfloat16": adamw_bfloat16,
    "lamb16": lamb16,
    "lamb16_published": partial(lamb16, states="fp8-lamb16"),
    "lamb": partial(lamb16, name="Lamb"),
    "optimi": optimi,
    "optimi_release": optimi_release,
    "optimi_release_f32": partial(optimi_release, dtype=torch.float32),
    "optimi_accumulation": partial(optimi_release, accumulation_steps=MICRO),
    "optimi_accumulation_f32": partial(
        optimi_release, dtype=torch.float32, accumulation_steps=MICRO
    ),
    "optimi_buffers": optimi_buffers,
    "flashoptim": flashoptim,
    "flashoptim_release": partial(flashoptim, release=True),
    "flashoptim_32": partial(flashoptim, master_weight_bits=32),
    "flashoptim_none": partial(flashoptim, master_weight_bits=None),
    "int4": int4,
    "int4_release": partial(int4, release=True),
}
OURS = {"torchao.optim": "torchao", "pytorch_lamb": "lamb16"}


def ours(package):
    return importlib.import_module("halfstep.compat." + OURS.get(package, package))


def nbytes(thing):
    """Returns the bytes of the tensors of a state. Quantized ones of other libraries count by their
    parts."""
    if isinstance(thing, torch.Tensor):
        inner = getattr(thing, "__tensor_flatten__", None)
        if inner is not None:
            return sum(nbytes(getattr(thing, name)) for name in inner()[0])
        return thing.untyped_storage().nbytes()
    return sum(map(nbytes, thing.values())) if isinstance(thing, dict) else 0


def measure(name, source, checkpoint):
    """Measures one case, in a process of its own."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    case = CASES[name]
    for _ in case(source, 1):
        pass
    gc.collect()

    rss, linux = float("nan"), os.access("/proc/self/clear_refs", os.W_OK)
    before = resident("VmRSS") if linux else 0
    run = case(source)
    model = next(run)
    if linux:
        forget_peak()
    optimizer = next(run)
    if linux:
        rss = resident("VmHWM") - before
    del run, model, optimizer
    gc.collect()

    run = case(source)
    model = next(run)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        optimizer = next(run)
    events = [
        (e.start_ns(), e.nbytes())
        for e in profile.profiler.kineto_results.events()
        if e.name() == "[memory]"
    ]
    weights = sum(p.nbytes for p in model.parameters())
    now = peak = weights
    for _, change in sorted(events, key=lambda event: event[0]):
        now += change
        peak = max(peak, now)

    count = sum(p.numel() for p in model.parameters())
    found = {
        "parameters": count,
        "peak": peak / count,
        "rss": rss / count,
        "weights": weights / count,
        "states": sum(nbytes(state) for state in optimizer.state.values()) / count,
    }
    if checkpoint:
        with tempfile.NamedTemporaryFile() as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            found["checkpoint"] = os.path.getsize(file.name) / count
    return found


class Failed(Exception):
    pass


class Cases:
    """Measured cases, each once."""

    def __init__(self):
        self.known = {}

    def __call__(self, name, theirs=False, checkpoint=False):
        key = name, theirs, checkpoint
        if key not in self.known:
            command = [sys.executable, os.path.abspath(__file__), "--case", name]
            try:
                done = subprocess.run(
                    command + ["--theirs"] * theirs + ["--checkpoint"] * checkpoint,
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE,
                )
            except subprocess.TimeoutExpired:
                raise Failed(f"{name}: not done after {PATIENCE} s") from None
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if line.strip()]
                raise Failed(f"{name}: {lines[-1] if lines else done.returncode}")
            self.known[key] = json.loads(done.stdout.splitlines()[-1])
            print(
                f"  {name}{' (theirs)' if theirs else ''}: {self.known[key]}",
                file=sys.stderr,
                flush=True,
            )
        return self.known[key]


cases = Cases()


def peak(name, what, theirs=False):
    found = cases(name, theirs)
    return f"{what} {found['peak']:.2f} (RSS {found['rss']:.2f})"


def less(name, other, theirs=False):
    """Says by how much the first case's peak is below the other's."""
    return f"{100 * (1 - cases(name, theirs)['peak'] / cases(other)['peak']):.1f} %"


def theirs(name, what):
    """Measures the source itself, if it is installed and runs here."""
    try:
        return "; " + peak(name, what, True)
    except Failed as failure:
        return f"; {what}: does not run here ({str(failure).split(': ', 1)[-1][:80]})"


def lamb16_states(rounds):
    names = ("lamb16", "lamb16_published", "torch_fused")
    own, published, adam = (cases(name)["states"] for name in names)
    return (
        f"`Lamb16`: {own:.3f} B of state per parameter, Adam's {adam:.3f}: {own / adam:.3f} (with"
        f" its published scaling {published:.3f}, {published / adam:.3f}); "
        f"{peak('lamb16', 'whole:')}, {peak('lamb', '`Lamb`')}"
    )


def flashoptim_checkpoint(rounds):
    a, b = (cases(name, checkpoint=True)["checkpoint"] for name in ("flashoptim", "torch_fused"))
    return f"{a:.2f} B/param on disk, torch AdamW fp32 {b:.2f}: {100 * (1 - a / b):.1f} % smaller"


# ---- Speed ---------------------------------------------------------------------------------------


def tensors(dtype):
    torch.manual_seed(0)
    params = list(Model().to(dtype).parameters())
    for p in params:
        p.grad = torch.randn(p.shape).mul_(1e-3).to(dtype)
    return params


def stepper(make, dtype=torch.float32):
    """Returns the step of an optimizer over the model's tensors."""
    optimizer = make(tensors(dtype))
    optimizer.step()
    return optimizer.step


def fused():
    return stepper(lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True))


def training(cast, make, autocast):
    """Returns a whole training step: forward and backward over 256 positions, optimizer."""
    model = Model().to(cast)
    optimizer = make(model)
    x = batch(cast, 64, 4)

    def step():
        with torch.autocast("cpu", BF16, enabled=autocast):
            loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def ratio(first, second, rounds):
    """Returns the time of the first over that of the second, in pairs: (median, lower and upper
    quartile)."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def timed(step):
        began = clock()
        step()
        return clock() - began

    found = []
    for i in range(rounds):
        # In turns, so that neither is always the one after the other.
        a, b = (timed(first), timed(second)) if i % 2 else reversed((timed(second), timed(first)))
        found.append(a / b)
    low, middle, high = quantiles(found, n=4)
    return middle, low, high


def pace(what, first, second):
    def measured(rounds):
        return f"{what} {{:.2f}} ({{:.2f}} to {{:.2f}})".format(*ratio(first(), second(), rounds))

    return measured


def against_torch(what, package, name, dtype, **options):
    """Compares a class with torch's fused fp32 AdamW: as it is, and if the caller vouches for
    gradients. torch never looks at them."""

    def measured(rounds):
        scanned, finite = (
            ratio(of(package, name, dtype, scan=scan, **options)(), fused(), rounds)
            for scan in (None, "known-finite")
        )
        return (
            f"{what} over torch's fused fp32 AdamW: {scanned[0]:.2f} ({scanned[1]:.2f} to"
            f" {scanned[2]:.2f}); with "
            f'`scan="known-finite"` {finite[0]:.2f}'
        )

    return measured


def optimi_training(name):
    return lambda: training(
        BF16, lambda model: getattr(ours("optimi"), name)(model.parameters(), lr=1e-4), False
    )


def mixed_training():
    return training(
        torch.float32,
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        True,
    )


def of(package, name, dtype, scan=None, **options):
    """Returns what makes a stepper of one of our classes."""

    def make(params):
        optimizer = getattr(ours(package), name)(params, **options)
        optimizer.scan = scan
        return optimizer

    return lambda: stepper(make, dtype)


def stochastic_over_nearest(name):
    """Compares a class of torchao's with itself."""
    what = f"`{name}`, stochastic over nearest:"
    return pace(what, of("torchao", name, BF16, **SR), of("torchao", name, BF16))


# ---- The rows: name -> (source, claim, what to measure) ------------------------------------------

ROWS = {
    "torchastic-adam": (
        "torchastic",
        "Adam in fp32 takes 16 B/param",
        lambda n: peak("torch_fused", "torch AdamW, fused:"),
    ),
    "torchastic-adam8bit": (
        "torchastic",
        "Adam8bit with fp32 weights takes 10 B/param",
        lambda n: (
            peak("torchao_8bit_f32", "`torchao.AdamW8bit`:")
            + theirs("torchao_8bit_f32", "torchao's")
        ),
    ),
    "torchastic-adamw": (
        "torchastic",
        (
            "all in BF16: 8 B/param, gradient accumulator included; 50 % less than Adam, "
            "20 % less than Adam8bit"
        ),
        lambda n: (
            peak("torchastic", "`AdamW` with `StochasticAccumulator`:")
            + f", {less('torchastic', 'torch_fused')}"
            + f" and {less('torchastic', 'torchao_8bit_f32')} less"
            + theirs("torchastic", "torchastic's")
        ),
    ),
    "torchastic-others": (
        "torchastic",
        "Compass 8, LPFAdamW 10, RMSProp 6 B/param (by its states)",
        lambda n: "; ".join(
            (
                peak("torchastic_compass", "Compass"),
                peak("torchastic_lpf", "LPFAdamW"),
                peak("torchastic_rmsprop", "RMSProp"),
            )
        ),
    ),
    "torchao-8bit": (
        "torchao",
        "8-bit states with BF16 weights: 51.6 to 39.1 GB (−24 %) in a BF16 fine-tune, 6.03 B/param",
        lambda n: (
            peak("torch_bf16", "torch AdamW BF16:")
            + "; "
            + peak("torchao_8bit", "`AdamW8bit`:")
            + f", {less('torchao_8bit', 'torch_bf16')} less"
            + theirs("torchao_8bit", "torchao's")
        ),
    ),
    "torchao-4bit": (
        "torchao",
        "4-bit states: 51.6 to 33.2 GB (−36 %), 5.06 B/param",
        lambda n: (
            peak("torchao_4bit", "`AdamW4bit`:")
            + f", {less('torchao_4bit', 'torch_bf16')} less"
            + theirs("torchao_4bit", "torchao's")
        ),
    ),
    "torchao-fp8": (
        "torchao",
        "fp8 states: as 8-bit, 6.03 B/param",
        lambda n: peak("torchao_fp8", "`AdamWFp8`:"),
    ),
    "torchao-sr-memory": (
        "torchao",
        "stochastic rounding takes no memory",
        lambda n: peak("torchao_sr", "`_AdamW` with") + "; " + peak("torchao_nearest", "without"),
    ),
    "torchao-sr-speed": (
        "torchao",
        "stochastic rounding at nearest's speed",
        stochastic_over_nearest("_AdamW"),
    ),
    "torchao-sr-speed-8bit": (
        "torchao",
        "the same with 8-bit states",
        stochastic_over_nearest("AdamW8bit"),
    ),
    "torchao-sr-speed-4bit": (
        "torchao",
        "the same with 4-bit states",
        stochastic_over_nearest("AdamW4bit"),
    ),
    "torchao-speed": (
        "torchao",
        (
            "8-bit AdamW at about the speed of torch's fused one (whole training on a GPU: 42.5 "
            "to 41.9 images/s)"
        ),
        against_torch("step of `AdamW8bit` (BF16, SR)", "torchao", "AdamW8bit", BF16, **SR),
    ),
    "torchao-speed-4bit": (
        "torchao",
        "4-bit AdamW likewise (42.4 to 41.9 images/s)",
        against_torch("step of `AdamW4bit` (BF16, SR)", "torchao", "AdamW4bit", BF16, **SR),
    ),
    "adamw-bf16-memory": (
        "adamw_bfloat16",
        "about 25 % less than the built-in AdamW",
        lambda n: (
            peak("adamw_bfloat16", "`AdamW_BF16` with `step(zero_grad=True)`:")
            + f", {less('adamw_bfloat16', 'torch_fused')} less than torch AdamW fp32, "
            f"{less('adamw_bfloat16', 'torch_autocast')} less than under autocast"
        ),
    ),
    "adamw-bf16-speed": (
        "adamw_bfloat16",
        "nothing is said of speed",
        against_torch("step of `AdamW_BF16`", "adamw_bfloat16", "AdamW_BF16", BF16),
    ),
    "lamb16-state": (
        "LAMB16",
        "16 bits of state per parameter, a quarter of Adam's",
        lamb16_states,
    ),
    "lamb16-speed": (
        "LAMB16",
        "should be much faster than LAMB",
        pace(
            "step of `Lamb16` over `Lamb`, both ours:",
            of("lamb16", "Lamb16", torch.float32),
            of("lamb16", "Lamb", torch.float32),
        ),
    ),
    "lamb16-speed-adam": (
        "LAMB16",
        "should be much faster than Adam",
        against_torch("step of `Lamb16`", "lamb16", "Lamb16", torch.float32),
    ),
    "optimi-kahan": (
        "optimi",
        "BF16 with Kahan summation: 37.5 % less than mixed precision with Adam (16 → 10 B/param)",
        lambda n: (
            peak("torch_fused", "torch AdamW fp32:")
            + ", "
            + peak("torch_autocast", "under autocast:")
            + "; "
            + peak("optimi", "`AdamW` BF16:")
            + f", {less('optimi', 'torch_fused')} and {less('optimi', 'torch_autocast')} less"
            + theirs("optimi", "optimi's")
        ),
    ),
    "optimi-kahan-accumulation": (
        "optimi",
        "up to 45.5 % less, with gradient accumulation in a buffer of its own (22 → 12 B/param)",
        lambda n: (
            peak("torch_autocast_buffers", "autocast, fp32 buffer:")
            + "; "
            + peak("optimi_buffers", "`AdamW` BF16, `GradientAccumulator`:")
            + f", {less('optimi_buffers', 'torch_autocast_buffers')} less"
        ),
    ),
    "optimi-release": (
        "optimi",
        "gradient release: about 25 % less for Adam",
        lambda n: (
            peak("optimi_release_f32", "fp32 with release:")
            + f", {less('optimi_release_f32', 'torch_fused')} less than torch AdamW; "
            + peak("optimi_release", "BF16 Kahan:")
            + f", {less('optimi_release', 'optimi')} less than without"
            + theirs("optimi_release_f32", "optimi's fp32")
            + theirs("optimi_release", "BF16")
        ),
    ),
    "optimi-accumulation": (
        "optimi",
        "optimizer accumulation: about 40 % less than Adam with gradient accumulation",
        lambda n: (
            peak("torch_buffers", "torch AdamW with a buffer:")
            + "; "
            + peak("optimi_accumulation_f32", "fp32 accumulated in states:")
            + f", {less('optimi_accumulation_f32', 'torch_buffers')} less "
            f"({less('optimi_accumulation_f32', 'torch_fused')} where they are summed in `.grad`); "
            + peak("optimi_accumulation", "BF16 Kahan:")
        ),
    ),
    "optimi-training-speed": (
        "optimi",
        "training in BF16 is about 10 % faster than mixed precision",
        pace(
            "training step of `AdamW` BF16 Kahan over torch autocast with fused fp32 AdamW:",
            optimi_training("AdamW"),
            mixed_training,
        ),
    ),
    "optimi-speed": (
        "optimi",
        "faster than torch's fused optimizers (Triton, on a GPU)",
        against_torch("step of `AdamW` fp32", "optimi", "AdamW", torch.float32, lr=1e-4),
    ),
    "optimi-speed-kahan": (
        "optimi",
        "the same with Kahan summation",
        against_torch("step of `AdamW` BF16 Kahan", "optimi", "AdamW", BF16, lr=1e-4),
    ),
    "flashoptim-memory": (
        "FlashOptim",
        "7.125 B/param (57 % less for Adam)",
        lambda n: (
            peak("flashoptim", "`FlashAdamW`:")
            + f", {less('flashoptim', 'torch_fused')} less; "
            + peak("flashoptim_32", "32 bits:")
            + ", "
            + peak("flashoptim_none", "none:")
        ),
    ),
    "flashoptim-release": (
        "FlashOptim",
        "5.125 B/param with gradient release",
        lambda n: peak("flashoptim_release", "`enable_gradient_release`:"),
    ),
    "flashoptim-checkpoint": (
        "FlashOptim",
        "checkpoints 57 % smaller (model and optimizer)",
        flashoptim_checkpoint,
    ),
    "flashoptim-speed": (
        "FlashOptim",
        "no practical overhead",
        against_torch("step of `FlashAdamW`", "flashoptim", "FlashAdamW", BF16),
    ),
    "int4": (
        "beyond them",
        "5.1 B/param with 4-bit states, 3.1 with gradient release (design)",
        lambda n: (
            peak("int4", "`adamw/bf16-sr/int4`:") + "; " + peak("int4_release", "with release:")
        ),
    ),
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        metavar="NAME",
        help="rows whose name contains this or matches it as a regular expression",
    )
    parser.add_argument("--list", action="store_true", help="names of the rows")
    parser.add_argument("--rounds", type=int, default=21, help="pairs of timed steps (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="for timed steps (%(default)s)")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    for hidden in ("--theirs", "--checkpoint"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        torch.set_num_threads(1)
        source = importlib.import_module if options.theirs else ours
        print(json.dumps(measure(options.case, source, options.checkpoint)))
        return 0
    names = [name for name in ROWS if not options.only or re.search(options.only, name)]
    if not names:
        parser.error(f"no row is called {options.only!r}; there are: {', '.join(ROWS)}")
    if options.list:
        print("\n".join(names))
        return 0
    if options.rounds < 2 or options.threads < 1:
        parser.error("--rounds: at least 2; --threads: at least 1")
    torch.set_num_threads(options.threads)
    print("| source | claim | measured | row |\n| --- | --- | --- | --- |")
    for name in names:
        who, claim, measured = ROWS[name]
        try:
            text = measured(options.rounds)
        except Failed as failure:
            text = str(failure)
        print(f"| {who} | {claim} | {text} | `{name}` |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
