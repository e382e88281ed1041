#!/usr/bin/env python3
"""Traps of low precision, measured on every recipe of AdamW here and on every peer that is
installed.

    python bench/traps.py                    everything: some minutes of one processor
    python bench/traps.py --recipes short    of ours, only those that a page has room for
    python bench/traps.py --only RULE/ --recipes RULE/bf16-sr/int8,...    another rule of ours

Each figure is a quotient, and 1 is as it should be. Its dividend is what the optimizer does. Its
divisor is what torch's AdamW does with fp32 weights and states on the same gradients, rounded to
the optimizer's format. Rules and options of ours that are not torch's AdamW are divided by their
own fp32. Tensors are 16 x 512.

movement    weights of 1.0, gradients of 0.5, lr 1e-5, 2000 steps: the way that the weights went
decay       no gradients, lr and weight decay 2^-10, so a millionth a step, 10000 steps: what normal
            weights lost. (With 1e-3 for both, torch's factor 1 - 1e-6 would be off by 1.3 % in
            fp32)
fall        normal gradients, a hundredth of them after 1000 steps: mean size of the last 400 of
            12000 updates
noise       gradients of 0.5 and normal noise, new at each step, both a hundredth after 1000 steps:
            as fall
spikes      normal gradients times 0.1, and times 30 one time in 1000, for each element by itself:
            mean size of the last 1000 of 4000 updates
block       every 256th element has gradients 10000 times the others': largest update of 2500 steps
            but the first 50
sigma1      normal gradients times exp(normal), which each element keeps: as block
sigma2      times exp(2 normal)
tiny        gradients of 1e-10 (IEEE half has none), eps 1e-30: root mean square of the updates of
            800 steps but the first 50
NaN         one NaN in one gradient, lr 1: weights not finite after five more sound steps, and the
            share of weights that moved in that step. Both should be 0
resume      20 steps = 10, save, load in a new process, 10: the same bits; "+ rng": only if torch's
            generator is saved too

Rules that step matrices have other figures beside decay and resume. The direction that a step
should have is the orthogonal factor of the momentum that has the same gradients, computed in
double. A figure is the mean product of updates and that direction, over fp32's.

movement    normal weights as of a layer, the same normal gradient in each of 2000 steps, lr 1e-5
noise       normal gradients, with a mean of a tenth: 400 steps
large       likewise, and one gradient 10000 times as large: the last 100 of 400 steps after it
rank one    the same outer product of two normal vectors in each of 100 steps. Errors in all other
            directions are lifted to full length, which the next figure tells
length      root mean square of those updates
zero        weights that five gradients of zeros move, from the start. Should be 0
NaN         in one matrix of a stack of four. No weight of the stack may move

From fall to tiny, and from noise to length, the weights are set to zero before each step, and lr is
1. Rounding of a weight can then neither hide nor add anything, so that the updates are compared.
Weights are read with their residuals and error codes, those of 8 bits as the model sees them.

EMA: averages follow normal weights' halves at decay 0.9999 for 2000 updates. The figure is how far
they went over how far torch's AveragedModel in fp32 went.

Longer than 500 lines because every trap is a small experiment of its own."""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from typing import Callable, Dict, List, Optional

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import peers_common as common  # noqa: E402

SHAPE = (16, 512)
STACK = (4, 16, 128)  # as many elements
EMA_DECAY = 0.9999
POOL = 61  # normal gradients are used again after so many steps
PACKED = ("adamw/int8-ecc4/int8", "adamw/int8-sr/int8")  # beside common.RECIPES


class NotApplicable(Exception):
    """The question cannot be asked."""


REFERENCE = common.Contestant(
    "reference",
    "torch AdamW, fp32",
    "torch",
    "f32",
    common._class_of("torch.optim", "AdamW", foreach=False, fused=False),
)


def reference_of(contestant: common.Contestant) -> common.Contestant:
    formats, _, special = contestant.recipe.partition(":")
    rule = formats.split("/")[0]
    if not contestant.ours or (rule == "adamw" and not special):
        return REFERENCE
    return common.ours(f"{rule}/f32/f32" + (":" + special if special else ""))


def steps_matrices(contestant: common.Contestant) -> bool:
    """Returns True for rules of ours that orthogonalize matrices."""
    if not contestant.ours:
        return False
    from halfstep._library import abi

    return "ns_steps" in abi.rules[contestant.recipe.partition("/")[0]].hypers


def normals(seed: int, *shape: int):
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Run:
    """A contestant on one parameter. Gradients are written anew before each step, since some
    compute in their memory."""

    def __init__(self, contestant: common.Contestant, start, hyper: Dict):
        import torch

        self.contestant = contestant
        self.p = contestant.parameter(start)
        self.optimizer = contestant.build([self.p], hyper)
        self.gradient = torch.zeros_like(self.p.detach())

    def step(self, gradient) -> None:
        self.gradient.copy_(gradient)
        if self.p.grad is not self.gradient:
            self.p.grad = self.gradient
        self.optimizer.step()

    def weight(self):
        return self.contestant.weight(self.optimizer, self.p).double()

    def first_weight(self):
        """Returns the weight before the first step, which has no residual yet."""
        return self.p.detach().double()

    def update(self, gradient):
        """Returns what this step takes from weights of zero, at lr 1."""
        self.contestant.set_to_zero(self.optimizer, self.p)
        self.step(gradient)
        return self.p.detach().float().neg()


def as_given(values, half: bool):
    """Rounds values to what the optimizer will see: BF16 for BF16 and fp32 weights, IEEE half for
    its own."""
    return (values.half() if half else values.bfloat16()).float()


# ---- The traps. Each returns a number to divide by the reference's. `short` divides the steps.


def movement(contestant, short: float, half: bool) -> float:
    import torch

    run = Run(contestant, torch.ones(SHAPE), {"lr": 1e-5})
    before, gradient = run.first_weight(), torch.full(SHAPE, 0.5)
    for _ in range(max(2, round(2000 / short))):
        run.step(gradient)
    return (before - run.weight()).mean().item()


def decay(contestant, short: float, half: bool) -> float:
    import torch

    run = Run(
        contestant, as_given(normals(7, *SHAPE), half), {"lr": 2.0**-10, "weight_decay": 2.0**-10}
    )
    before, gradient = run.first_weight(), torch.zeros(SHAPE)
    for _ in range(max(2, round(10000 / short))):
        run.step(gradient)
    return ((before - run.weight()) * before).sum().item() / before.square().sum().item()


def _updates(contestant, gradients, half: bool, eps: float):
    """Yields (step, update) for these gradients, in order."""
    import torch

    run = Run(contestant, torch.zeros(SHAPE), {"lr": 1.0, "eps": eps})
    for step, gradient in enumerate(gradients):
        yield step, run.update(as_given(gradient, half))


def _open_loop(contestant, scales, half: bool, eps: float):
    """Yields the same for gradients that are normals times scales(step)."""
    pool = [normals(1000 + k, *SHAPE) for k in range(POOL)]
    return _updates(
        contestant, (pool[step % POOL] * scale for step, scale in enumerate(scales)), half, eps
    )


def _mean_size(updates, first: int) -> float:
    """Returns the mean size of the updates from step `first` on."""
    total = count = 0.0
    for step, update in updates:
        if step >= first:
            total += update.abs().double().sum().item()
            count += update.numel()
    return total / count


def _steps_of_fall(short: float):
    return max(2, round(1000 / short)), max(4, round(12000 / short)), max(2, round(400 / short))


def fall(contestant, short: float, half: bool) -> float:
    before, after, last = _steps_of_fall(short)
    return _mean_size(
        _open_loop(contestant, [1.0] * before + [0.01] * after, half, 1e-8), before + after - last
    )


def noise(contestant, short: float, half: bool) -> float:
    import torch

    before, after, last = _steps_of_fall(short)
    source = torch.Generator().manual_seed(2000)
    gradients = (
        (0.5 + torch.randn(SHAPE, generator=source)) * (1.0 if step < before else 0.01)
        for step in range(before + after)
    )
    return _mean_size(_updates(contestant, gradients, half, 1e-8), before + after - last)


def spikes(contestant, short: float, half: bool) -> float:
    import torch

    steps = max(4, round(4000 / short))
    source = torch.Generator().manual_seed(3000)
    gradients = (
        torch.randn(SHAPE, generator=source)
        * torch.where(torch.rand(SHAPE, generator=source) < 1e-3, 30.0, 0.1)
        for _ in range(steps)
    )
    return _mean_size(_updates(contestant, gradients, half, 1e-8), steps - steps // 4)


def _largest(contestant, scale, short: float, half: bool) -> float:
    """Returns the largest update on normal gradients, of which each element has its own scale."""
    steps, skip = max(4, round(2500 / short)), min(50, max(1, round(500 / short)))
    # A maximum that is not finite must not vanish.
    largest = 0.0
    for step, update in _open_loop(contestant, [scale] * steps, half, 1e-8):
        if step >= skip:
            worst = update.abs().max().item()
            largest = worst if not worst <= largest else largest
            if not math.isfinite(largest):
                break
    return largest


def block(contestant, short: float, half: bool) -> float:
    import torch

    scale = torch.full(SHAPE, 1e-3)
    scale[:, 5::256] = 10.0
    return _largest(contestant, scale, short, half)


def sigma1(contestant, short: float, half: bool) -> float:
    return _largest(contestant, normals(4000, *SHAPE).exp() * 0.01, short, half)


def sigma2(contestant, short: float, half: bool) -> float:
    return _largest(contestant, (normals(4000, *SHAPE) * 2).exp() * 0.01, short, half)


def tiny(contestant, short: float, half: bool) -> float:
    if half:
        raise NotApplicable  # there is no 1e-10 in IEEE half
    total = count = 0.0
    scale = 1e-10
    skip = min(50, max(1, round(400 / short)))
    for step, update in _open_loop(contestant, [scale] * max(4, round(800 / short)), half, 1e-30):
        if step >= skip:
            total += update.double().square().sum().item()
            count += update.numel()
    return math.sqrt(total / count)


# ---- Matrices ------------------------------------------------------------------------------------

MOMENTUM = 0.95


def _along(contestant, gradients, half: bool):
    """Yields (product of the update with the direction it should have, root mean square of the
    update) for these gradients."""
    import torch

    run = Run(contestant, torch.zeros(SHAPE), {"lr": 1.0})
    momentum = torch.zeros(SHAPE, dtype=torch.float64)
    for gradient in gradients:
        gradient = as_given(gradient, half)
        update = run.update(gradient).double()
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient.double()
        ahead = MOMENTUM * momentum + (1 - MOMENTUM) * gradient.double()
        left, size, right = torch.linalg.svd(ahead, full_matrices=False)
        held = (size > 1e-6 * size[0]).double()
        yield (
            (update * (left * held @ right)).sum().item(),
            update.square().mean().sqrt().item(),
        )


def matrix_movement(contestant, short: float, half: bool) -> float:
    import torch

    start, gradient = as_given(normals(7, *SHAPE) / SHAPE[1] ** 0.5, half), normals(8, *SHAPE)
    run = Run(contestant, start, {"lr": 1e-5})
    before, gradient = run.first_weight(), as_given(gradient, half)
    left, _, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    for _ in range(max(2, round(2000 / short))):
        run.step(gradient)
    return ((before - run.weight()) * (left @ right)).sum().item()


def _last(found, n: int, which: int = 0) -> float:
    found = list(found)[-n:]
    return sum(one[which] for one in found) / len(found)


def matrix_noise(contestant, short: float, half: bool) -> float:
    steps, mean = max(4, round(400 / short)), 0.1 * normals(5000, *SHAPE)
    gradients = (mean + normals(5001 + k, *SHAPE) for k in range(steps))
    return _last(_along(contestant, gradients, half), steps // 2)


def large(contestant, short: float, half: bool) -> float:
    steps = max(8, round(400 / short))
    gradients = (normals(6000 + k, *SHAPE) * (1e4 if k == 0 else 1.0) for k in range(steps))
    return _last(_along(contestant, gradients, half), steps // 4)


def _rank_one(contestant, short: float, half: bool):
    steps = max(4, round(100 / short))
    gradient = normals(7000, SHAPE[0], 1) * normals(7001, SHAPE[1])
    return _along(contestant, [gradient] * steps, half)


def rank_one(contestant, short: float, half: bool) -> float:
    return _last(_rank_one(contestant, short, half), max(2, round(50 / short)))


def length(contestant, short: float, half: bool) -> float:
    return _last(_rank_one(contestant, short, half), max(2, round(50 / short)), 1)


MATRIX_FIGURES: Dict[str, Callable] = {
    "movement": matrix_movement,
    "decay": decay,
    "noise": matrix_noise,
    "large": large,
    "rank one": rank_one,
    "length": length,
}


# ---- All figures ---------------------------------------------------------------------------------

FIGURES: Dict[str, Callable] = {
    "movement": movement,
    "decay": decay,
    "fall": fall,
    "noise": noise,
    "spikes": spikes,
    "block": block,
    "sigma1": sigma1,
    "sigma2": sigma2,
    "tiny": tiny,
}
#: of all rules, in the order of columns
EVERY_FIGURE = list(dict.fromkeys((*FIGURES, *MATRIX_FIGURES)))


def figures_of(contestant: common.Contestant) -> Dict[str, Callable]:
    return MATRIX_FIGURES if steps_matrices(contestant) else FIGURES


def zero(contestant, half: bool) -> int:
    """Counts weights that gradients of zeros move, in a matrix without momentum."""
    import torch

    run = Run(contestant, as_given(normals(3, *SHAPE), half), {"lr": 1.0})
    before = run.p.detach().clone()
    for _ in range(5):
        run.step(torch.zeros(SHAPE))
    return int((run.p.detach() != before).sum())


def nan(contestant, half: bool) -> Dict[str, int]:
    """Counts weights that one NaN poisons for good, and weights that moved in its step."""
    import torch

    shape = STACK if steps_matrices(contestant) else SHAPE
    run = Run(contestant, as_given(normals(3, *shape), half), {"lr": 1.0})
    gradients = [as_given(normals(200 + k, *shape), half) for k in range(11)]
    for gradient in gradients[:5]:
        run.step(gradient)
    before = run.p.detach().clone()
    bad = gradients[5].clone()
    bad.view(-1)[3 * SHAPE[1] + 77] = math.nan
    run.step(bad)
    now = run.p.detach()
    moved = int((now != before).sum())
    for gradient in gradients[6:]:
        run.step(gradient)
    return {"poisoned": int((~torch.isfinite(run.weight())).sum()), "moved": moved}


# ---- Resume: in processes of their own -----------------------------------------------------------


def _resume_gradient(step: int):
    return normals(500 + step, *SHAPE).bfloat16().float() * 0.125


def resume_save(contestants: List[common.Contestant], folder: str) -> None:
    """Makes 10 steps, saves, and makes 10 more. Another file gets where both ended."""
    import torch

    for i, contestant in enumerate(contestants):
        torch.manual_seed(0)
        try:
            run = Run(contestant, normals(3, *SHAPE).bfloat16().float(), {"weight_decay": 1e-2})
            for step in range(10):
                run.step(_resume_gradient(step))
            saved = {
                "weight": run.p.detach().clone(),
                "optimizer": run.optimizer.state_dict(),
                "rng": torch.get_rng_state(),
            }
            torch.save(saved, os.path.join(folder, f"{i}.middle"))
            for step in range(10, 20):
                run.step(_resume_gradient(step))
            torch.save([run.p.detach().clone(), run.weight()], os.path.join(folder, f"{i}.end"))
        except Exception as error:
            with open(os.path.join(folder, f"{i}.error"), "w", encoding="utf-8") as file:
                file.write(common.reason(error))


def resume_load(contestants: List[common.Contestant], folder: str) -> Dict[str, str]:
    """Goes on from the file: 'yes' where the end is the same, '+ rng' where it is with torch's
    generator put back, 'no'."""
    import torch

    found = {}
    for i, contestant in enumerate(contestants):
        error_file = os.path.join(folder, f"{i}.error")
        if os.path.exists(error_file):
            with open(error_file, encoding="utf-8") as file:
                found[contestant.key] = "error: " + file.read()
            continue
        try:
            note = ""
            if contestant.packed:
                # From then on torch.load() knows their class.
                importlib.import_module("halfstep.nn")
            try:
                saved = torch.load(os.path.join(folder, f"{i}.middle"), weights_only=True)
            except Exception:
                saved = torch.load(os.path.join(folder, f"{i}.middle"), weights_only=False)
                note = ", pickle only"
            end = torch.load(os.path.join(folder, f"{i}.end"), weights_only=True)
            same = []
            for with_generator in (False, True):
                torch.manual_seed(0)
                run = Run(contestant, saved["weight"].float(), {"weight_decay": 1e-2})
                run.optimizer.load_state_dict(saved["optimizer"])
                with torch.no_grad():
                    run.p.copy_(saved["weight"])  # some make the weight anew when they load
                if with_generator:
                    torch.set_rng_state(saved["rng"])
                for step in range(10, 20):
                    run.step(_resume_gradient(step))
                same.append(
                    torch.equal(run.p.detach(), end[0]) and torch.equal(run.weight(), end[1])
                )
                saved = torch.load(
                    os.path.join(folder, f"{i}.middle"), weights_only=not note
                )  # loading may share memory
            found[contestant.key] = ("yes" if same[0] else "+ rng" if same[1] else "no") + note
        except Exception as error:
            found[contestant.key] = "error: " + common.reason(error)
    return found


def _resume_pair(group: List[common.Contestant], seconds: float):
    """Returns the answers by key from one process that saves and one that loads, or why there are
    none."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "keys"), "w", encoding="utf-8") as file:
            json.dump([c.key for c in group], file)
        for phase in ("save", "load"):
            command = [
                sys.executable,
                os.path.abspath(__file__),
                "--resume",
                phase,
                "--folder",
                folder,
            ]
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=seconds * len(group),
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return {}, "took too long"
            if done.returncode:
                return {}, f"its process ended with {done.returncode}"
    return json.loads(done.stdout.strip().splitlines()[-1]), ""


def resume(contestants: List[common.Contestant], seconds: float) -> Dict[str, str]:
    """Asks all in one pair of processes. If one of them dies, asks each package in a pair of its
    own."""
    found, why = _resume_pair(contestants, seconds)
    if not why:
        return found
    for package in dict.fromkeys(c.package for c in contestants):
        group = [c for c in contestants if c.package == package]
        answers, why = _resume_pair(group, seconds)
        found.update(answers if not why else {c.key: "error: " + why for c in group})
    return found


def resume_child(phase: str, folder: str) -> None:
    with open(os.path.join(folder, "keys"), encoding="utf-8") as file:
        keys = json.load(file)
    known = {c.key: c for c in common.peers()}
    group = [known.get(key) or common.ours(key) for key in keys]
    if phase == "save":
        resume_save(group, folder)
    else:
        print(json.dumps(resume_load(group, folder)))


# ---- Averages of weights -------------------------------------------------------------------------


def _first():
    return normals(3, *SHAPE).bfloat16().float()


def _way(average) -> float:
    """Returns how far an average went from the first weights to nothing."""
    first = _first().double()
    return ((first - average.detach().double()) * first).sum().item() / first.square().sum().item()


def _model(factor: float, dtype):
    import torch

    module = torch.nn.Module()
    module.weight = torch.nn.Parameter((_first() * factor).to(dtype))
    return module


def _averaged(dtype, make: Callable, updates: int) -> float:
    """Returns the way of the average of an AveragedModel, which make(model) makes."""
    average = make(_model(1.0, dtype))
    average.update_parameters(_model(1.0, dtype))  # the first one is taken as it is
    live = _model(0.5, dtype)
    for _ in range(updates):
        average.update_parameters(live)
    read = getattr(average, "full_state_dict", None)
    tensors = (
        [t for t in read().values() if tuple(t.shape) == SHAPE] if read else [average.module.weight]
    )
    return _way(tensors[0])


def _heavyball_average(dtype, updates: int) -> float:
    import heavyball
    import torch

    p = torch.nn.Parameter(_first().to(dtype))
    optimizer = heavyball.AdamW([p], lr=0.0)
    optimizer.ema_decay = 1 - EMA_DECAY
    for turn in range(updates + 1):
        if turn == 1:
            p.data.mul_(0.5)
        optimizer.ema_update()
    return _way(optimizer.state_(p)["param_ema"])


def averages(updates: int, only: Optional[str]) -> List[Dict]:
    """Measures every way to average that is installed, over torch's in fp32."""
    import torch
    from torch.optim import swa_utils

    def of_torch(multi: bool) -> Callable:
        def make(model):
            if multi:
                return swa_utils.AveragedModel(
                    model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(EMA_DECAY)
                )
            return swa_utils.AveragedModel(model, avg_fn=swa_utils.get_ema_avg_fn(EMA_DECAY))

        return make

    bf16 = torch.bfloat16
    jobs = [
        (
            "torch AveragedModel, multi_avg_fn, BF16",
            lambda: _averaged(bf16, of_torch(True), updates),
        ),
        ("torch AveragedModel, avg_fn, BF16", lambda: _averaged(bf16, of_torch(False), updates)),
        ("HeavyBall ema_update, fp32", lambda: _heavyball_average(torch.float32, updates)),
        ("HeavyBall ema_update, BF16", lambda: _heavyball_average(bf16, updates)),
    ]
    try:
        import halfstep
        from halfstep._library import abi

        for name, form in abi.formats.items():
            if form.roles & abi.ROLE_WEIGHT and not form.block:
                dtype = {"f32": torch.float32, "bf1": bf16, "f16": torch.float16}[name[:3]]
                jobs.append(
                    (
                        f"`ema/{name}`",
                        lambda name=name, dtype=dtype: _averaged(
                            dtype,
                            lambda model: halfstep.EMA(model, decay=EMA_DECAY, weights=name),
                            updates,
                        ),
                    )
                )
    except ImportError as error:
        jobs.append(("halfstep.EMA", lambda error=error: (_ for _ in ()).throw(error)))
    exact = _averaged(torch.float32, of_torch(True), updates)
    rows = [{"title": "torch AveragedModel, fp32", "movement": exact / exact}]
    for title, job in jobs:
        if only and not any(word in title for word in only.split(",")):
            continue
        try:
            rows.append({"title": title, "movement": job() / exact})
        except Exception as error:
            rows.append({"title": title, "reason": common.reason(error)})
    return rows


# ---- All of it -----------------------------------------------------------------------------------


def examine(contestant: common.Contestant, exact: Dict, short: float, patience: float) -> Dict:
    """Returns all figures of one contestant. If one fails, its reason is there."""
    half = contestant.weights == "f16"
    reference = reference_of(contestant)
    found: Dict = {"title": contestant.title, "package": contestant.package, "reasons": {}}
    for name, trap in figures_of(contestant).items():
        try:
            with common.patience(patience):
                if (name, half, reference.key) not in exact:
                    exact[name, half, reference.key] = trap(reference, short, half)
                if not exact[name, half, reference.key]:
                    # it stands still with fp32 too, as Prodigy does without gradients
                    raise NotApplicable
                found[name] = trap(contestant, short, half) / exact[name, half, reference.key]
        except NotApplicable:
            continue
        except Exception as error:
            found["reasons"][name] = common.reason(error)
            # What is missing for one is missing for all.
            if isinstance(error, ImportError) or name == "movement":
                return found
    try:
        with common.patience(patience):
            found.update(nan(contestant, half))
            if steps_matrices(contestant):
                found["zero"] = zero(contestant, half)
    except Exception as error:
        found["reasons"]["NaN"] = common.reason(error)
    return found


def number(value) -> str:
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    return (
        f"{value:.0f}"
        if abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.3f}"
    )


#: by format of states: how far from 1 a figure may be, and those of falls
AIMS = {
    **dict.fromkeys(("f32", "bf16-sr", "bf16-ecc8", "bf16-ecc16"), (0.02, 0.02)),
    "int8": (0.01, 0.02),
    "int6": (0.02, 0.02),
    "int4": (0.05, 0.10),
}
#: how large the largest update may be
LARGEST = {"block": 1.5, "sigma1": 1.4, "sigma2": 2.5}
#: what the products of a rule make of any error, however small
LIFTED = ("rank one", "length")


def outside(rows: Dict) -> List[str]:
    """Returns figures of ours that are not as near to 1 as they should be, and largest updates that
    are too large."""
    found = []
    for key, row in rows.items():
        if row["package"] != "halfstep":
            continue
        _, weights, states = key.partition(":")[0].split("/")
        aims = [AIMS.get(state) for state in states.split("+")]
        for name in EVERY_FIGURE:
            value = row.get(name)
            if value is None or name in LIFTED:
                continue
            if name in LARGEST:
                if not value <= LARGEST[name]:
                    found.append(f"`{key}`: largest update, {name}, {number(value)}")
            elif (
                weights not in ("bf16", "f16")
                and all(aims)
                and not abs(value - 1) <= max(aim[name in ("fall", "noise")] for aim in aims)
            ):
                found.append(f"`{key}`: {name} {number(value)}")
        found += [
            f"`{key}`: {name} {row[name]}"
            for name in ("poisoned", "moved", "zero")
            if row.get(name)
        ]
        if row.get("resume", "yes") != "yes":
            found.append(f"`{key}`: resume {row['resume']}")
    return found


def print_report(report: Dict) -> None:
    print(
        ", ".join(f"{k} {v}" for k, v in report["versions"].items())
        + (f"; steps divided by {report['short']:g}" if report["short"] != 1 else "")
        + "\n"
    )
    shown = [name for name in EVERY_FIGURE if any(name in r for r in report["traps"].values())]
    columns = ["optimizer", *shown, "NaN: poisoned", "moved, %", "resume"]
    table, reasons = [], []
    total = SHAPE[0] * SHAPE[1]
    for row in report["traps"].values():
        reasons += [(row["title"], name, why) for name, why in row["reasons"].items()]
        if len(row["reasons"]) and not {"fall", "large"} & set(row):
            continue  # nothing was measured
        moved = None if row.get("moved") is None else 100 * row["moved"] / total
        table.append(
            [row["title"]]
            + [number(row.get(name)) for name in shown]
            + [
                str(row.get("poisoned", "-")),
                "-" if moved is None else f"{moved:.0f}",
                row.get("resume", "-"),
            ]
        )
    print(common.markdown(columns, table))
    print(f"\nEMA at decay {EMA_DECAY}\n")
    print(
        common.markdown(
            ["average", "movement"],
            [
                [row["title"], number(row.get("movement"))]
                for row in report["averages"]
                if "reason" not in row
            ],
        )
    )
    reasons += [
        (row["title"], "EMA", row["reason"]) for row in report["averages"] if "reason" in row
    ]
    if reasons:
        print("\nNot measured\n")
        cells = [[cell.replace("|", "/") for cell in line] for line in reasons]
        print(common.markdown(["optimizer", "trap", "why"], cells, left=3))
    print(
        f"\nOurs outside of what the design holds them to: {len(report['outside'])}"
        + (":" if report["outside"] else ".")
    )
    for line in report["outside"]:
        print(f"* {line}")


def write_csv(report: Dict, path: str) -> None:
    fields = ["key", "title", *EVERY_FIGURE, "poisoned", "moved", "resume", "reasons"]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for key, row in report["traps"].items():
            line = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow(
                {
                    **line,
                    "key": key,
                    "reasons": "; ".join(f"{k}: {v}" for k, v in row["reasons"].items()),
                }
            )
        for row in report["averages"]:
            writer.writerow(
                {
                    "key": "ema",
                    "title": row["title"],
                    "movement": f"{row.get('movement', math.nan):.6g}",
                    "reasons": row.get("reason", ""),
                }
            )


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--only",
        help="contestants whose key contains or matches one of these words, separated by commas",
    )
    add("--recipes", default="all", help="of ours: all, short, or recipes separated by commas")
    add(
        "--short",
        type=float,
        default=1,
        help="divide numbers of steps by this; the figures are then not the page's",
    )
    add("--patience", type=float, default=300, help="seconds for each figure, compilers included")
    add(
        "--no-resume",
        action="store_true",
        help="leave out the column that needs processes of its own",
    )
    add("--threads", type=int, default=1)
    add("--json", metavar="FILE", help="write everything; - prints it instead of the tables")
    add("--csv", metavar="FILE")
    add("--resume", choices=("save", "load"), help=argparse.SUPPRESS)
    add("--folder", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def our_recipes(which: str) -> List[str]:
    if which == "short":
        return [*common.RECIPES, *PACKED]
    if which != "all":
        return [recipe for recipe in which.split(",") if recipe]
    try:
        return common.every_recipe()
    except ImportError:
        return list(common.RECIPES)  # each of them will say that the package is not there


def main(arguments=None) -> int:
    options = parse(arguments)
    threads = common.threads_before_torch(options.threads)
    try:
        import torch
    except ImportError as error:
        print(f"traps.py: needs torch: {error}", file=sys.stderr)
        return 1
    torch.set_num_threads(threads)
    if options.resume:
        resume_child(options.resume, options.folder)
        return 0
    everyone = common.peers() + [common.ours(recipe) for recipe in our_recipes(options.recipes)]
    chosen = common.select(everyone, options.only)
    if not chosen:
        print(f"traps.py: no contestant matches '{options.only}'", file=sys.stderr)
        return 2
    exact: Dict = {}
    traps = {}
    for contestant in chosen:
        began = time.perf_counter()
        torch.manual_seed(0)
        traps[contestant.key] = examine(contestant, exact, options.short, options.patience)
        print(f"{contestant.title}: {time.perf_counter() - began:.1f} s", file=sys.stderr)
    if not options.no_resume:
        able = [c for c in chosen if {"fall", "large"} & set(traps[c.key])]
        for key, answer in resume(able, options.patience).items():
            if answer.startswith("error: "):
                traps[key]["reasons"]["resume"] = answer[7:]
            else:
                traps[key]["resume"] = answer
    report = {
        "versions": common.versions(chosen),
        "short": options.short,
        "traps": traps,
        "averages": averages(max(2, round(2000 / options.short)), options.only and None),
    }
    report["outside"] = outside(traps)
    common.deliver(report, options, write_csv, print_report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
