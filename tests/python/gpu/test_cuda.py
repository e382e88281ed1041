"""Tests parameters on a GPU: the bits of the processor, without waits. A machine without a GPU runs
the fake of fake_gpu.py. Where torch has a GPU, the tests that do not look into the driver run on
it."""

import copy
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import RECIPES, class_of, parameters, plain, recipes, rules, told, warnings_are
from fake_gpu import Fake, Real, needs_fake
from torch import nn
from torch.nn import Parameter

import halfstep
from halfstep._library import abi
from halfstep._tensors import devices, torch_public

SHAPES = {
    **{"body.weight": (24, 96), "head.weight": (17, 50), "body.bias": (33,), "scale": ()},
    "experts": (3, 12, 40),
}
_made = []


@pytest.fixture
def gpu(monkeypatch):
    if not _made:
        _made.append(Real() if torch.cuda.is_available() else Fake())
    _made[0].install(monkeypatch)
    yield _made[0]
    _made[0].close()


@pytest.fixture
def fake(gpu):
    if gpu.real:
        pytest.skip("looks into the fake driver")
    return gpu


def start(dtype, shapes=None):
    return {name: p.detach() for name, p in parameters(dtype, shapes or SHAPES).items()}


def gradients(values, step):
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(v.shape, generator=generator).to(v.dtype) for name, v in values.items()
    }


def pair(gpu, cls, dtype=torch.float32, shapes=None, device=0, **options):
    """Makes the same optimizer on the processor and on the GPU. Returns (parameters, optimizer) of
    each."""
    values, out = start(dtype, shapes), []
    for put in (torch.clone, lambda v: gpu.tensor(v, device)):
        params = {name: Parameter(put(v)) for name, v in values.items()}
        out.append((params, cls(params.items(), seed=5, **options)))
    return out


def give(gpu, params, given, asynchronous=True):
    for name, g in given.items():
        p = params[name]
        if devices.of(p).type == "cpu":
            p.grad = g.clone()
        elif p.grad is None:
            p.grad = gpu.tensor(torch.zeros_like(g) if asynchronous else g, devices.of(p).index)
    for name, g in given.items():
        if devices.of(params[name]).type == "cuda" and asynchronous:
            gpu.later(params[name].grad, g)


def run(gpu, both, first, last, scale=1.0, release=False):
    for step in range(first, last):
        for params, opt in both:
            give(gpu, params, {n: g * scale for n, g in gradients(params, step).items()})
            if not release:
                opt.step()
                continue
            for p in params.values():
                opt.step_param(p)
            opt._parts.steps.end_round()


def held(gpu, params, opt):
    """Returns all bits, but no hashes of weights."""
    state = opt.state_dict()
    tensors = [
        {key: gpu.read(v) for key, v in held.items() if key != "weight.hashes"}
        for _, held in sorted(state["state"].items())
    ]
    groups = [
        {key: v for key, v in group.items() if not isinstance(v, torch.Tensor)}
        for group in state["param_groups"]
    ]
    return plain([{name: gpu.read(p) for name, p in params.items()}, tensors, groups])


def same(gpu, both):
    (a, b), (c, d) = both
    assert held(gpu, c, d) == held(gpu, a, b)


def same_steps(gpu, both, first, last):
    run(gpu, both, first, last)
    same(gpu, both)


@recipes
@pytest.mark.parametrize("cut", [{"split": [12, 5, 7]}, {"heads": 4}], ids=("split", "heads"))
@pytest.mark.parametrize("rule", [rule.name for rule in abi.rules.values() if rule.matrix])
def test_blocks_of_rows_on_a_gpu(gpu, rule, cut, recipe):
    dtype, options = RECIPES[recipe]
    if "exact" in abi.rules[rule].hypers:
        options = {**options, "exact": True}
    shapes = {"qkv": (24, 96), "narrow": (24, 7), "experts": (3, 24, 40)}
    same_steps(gpu, pair(gpu, class_of(rule), dtype, shapes, **cut, **options), 1, 4)


@rules
@recipes
def test_the_bits_of_the_processor(gpu, rule, recipe):
    dtype, options = RECIPES[recipe]
    if "exact" in abi.rules[rule].hypers:
        options = {**options, "exact": True}
    both = pair(gpu, class_of(rule), dtype, **options)
    same_steps(gpu, both, 1, 5)
    same_steps(gpu, both, 5, 7)
    params, opt = both[1]
    for p in params.values():
        for key, tensor in opt.state[p].items():
            number = tensor.dim() == 0 and tensor.dtype in (torch.int64, torch.float64)
            place = "cpu" if key == "step" or number else "cuda"
            assert devices.of(tensor).type == place, key


@pytest.mark.parametrize(
    "options",
    [{"states": "int8"}, {"weights": "bf16-kahan", "clip_norm": 1.0}],
    ids=["int8", "kahan"],
)
def test_a_model_for_long(gpu, options):
    """Steps both with the same gradients of a model in training: 1000 steps on a GPU, fewer on the
    fake."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(61, 96),
        nn.Linear(96, 128),
        nn.GELU(),
        nn.LayerNorm(128),
        nn.Linear(128, 61),
    ).bfloat16()
    here = dict(model.named_parameters())
    there = {name: Parameter(gpu.tensor(p)) for name, p in here.items()}
    both = [
        (params, halfstep.AdamW(params.items(), lr=3e-3, seed=5, weight_decay=0.1, **options))
        for params in (here, there)
    ]
    text = torch.arange(4096) * 7 % 61
    losses = []
    for step in range(1000 if gpu.real else 25):
        at = step * 37 % 4000
        both[0][1].zero_grad()
        loss = nn.functional.cross_entropy(
            model(text[at : at + 64]).float(), text[at + 1 : at + 65]
        )
        loss.backward()
        losses.append(loss.item())
        for (name, p), q in zip(here.items(), there.values()):
            q.grad = gpu.tensor(p.grad)
        for _, opt in both:
            opt.step()
    same(gpu, both)
    assert sum(losses[-8:]) < sum(losses[:8])


def test_a_plain_step_waits_for_nothing(fake):
    both = pair(
        fake, halfstep.AdamW, torch.bfloat16, weights="bf16-kahan", states="int8", clip_norm=1.0
    )
    run(fake, both, 1, 3)
    before = fake.waits
    run(fake, both, 3, 20)
    assert fake.waits == before
    same(fake, both)
    assert fake.waits > before


@pytest.mark.parametrize("release", [False, True])
def test_a_step_is_on_the_current_stream(fake, release):
    both = pair(fake, halfstep.AdamW)
    run(fake, both, 1, 3, release=release)
    assert not fake.recorded
    other = fake.stream()
    fake.wait_for(other, None)
    with fake.on(other):
        run(fake, both, 3, 6, release=release)
        assert not fake.recorded or all(device.index == 0 for _, device in fake.recorded)
        assert {p.grad.data_ptr() for p in both[1][0].values()} <= {
            address for address, _ in fake.recorded
        }
    fake.wait_for(None, other)
    run(fake, both, 6, 8, release=release)
    fake.wait_for(other, None)
    for params, opt in both if release else ():  # hooks of one backward pass are on streams in turn
        for i, (name, g) in enumerate(gradients(params, 8).items()):
            with fake.on(other if i % 2 else None):
                give(fake, params, {name: g})
                opt.step_param(params[name])
        opt._parts.steps.end_round()
    fake.wait_for(None, other)
    same(fake, both)


def give_a_nan(gpu, params, step=3, names=("head.weight",), value=math.nan):
    """Gives the gradients of a step. Some of them begin with a value that is not finite."""
    given = gradients(params, step)
    for name in names:
        given[name].view(-1)[0] = value
    give(gpu, params, given)


def later(gpu, params, opt):
    run(gpu, [(params, opt)], 4, 6)
    return opt.skipped_steps


def converted(gpu, params, opt):
    opt.param_groups[0].update(weights="bf16-ecc8", states="int8")
    give(gpu, params, gradients(params, 9))
    opt.step()
    return held(gpu, params, opt)


def averaged(gpu, params, opt):
    model = nn.Module()
    model.part = nn.ParameterDict({name.replace(".", "_"): p for name, p in params.items()})
    average = halfstep.EMA(model, decay=0.5, seed=7)
    if not gpu.real:  # deepcopy() asks torch
        for p, q in zip(average.module.parameters(), params.values()):
            p.data = gpu.like(q, p.data)
    average.update_parameters(model, opt)
    return opt.skipped_steps, plain([gpu.read(p) for p in average.module.parameters()])


#: what may be the first to ask after a refused step
QUESTIONS = {
    "checkpoint": held,
    "norm": lambda gpu, params, opt: opt.grad_norm,
    "skipped, later": later,
    "skipped": lambda gpu, params, opt: opt.skipped_steps,
    "weight": lambda gpu, params, opt: gpu.read(opt.read_weight(params["body.weight"])),
    "state": lambda gpu, params, opt: gpu.read(opt.read_state(params["body.weight"], "exp_avg_sq")),
    "conversion": converted,
    "average": averaged,
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_whoever_asks_first_is_told_of_a_refused_step(gpu, question):
    both = pair(gpu, halfstep.AdamW, torch.bfloat16, weights="bf16-kahan", clip_norm=1.0)
    answers, told = [], "'head.weight' is not finite; the step was skipped"
    run(gpu, both, 1, 3)
    for params, opt in both:
        give_a_nan(gpu, params)
        if opt is both[0][1]:
            with pytest.warns(RuntimeWarning, match=told):
                opt.step()
            answers.append(plain(QUESTIONS[question](gpu, params, opt)))
        else:
            with warnings_are("error"):
                opt.step()
            with pytest.warns(RuntimeWarning, match=told):
                answers.append(plain(QUESTIONS[question](gpu, params, opt)))
    assert answers[0] == answers[1]
    run(gpu, both, 6, 8)
    assert both[1][1].skipped_steps == 1
    same(gpu, both)


def test_scanning_per_tensor(gpu):
    both = pair(gpu, halfstep.Adam, scan="per-tensor")
    for params, opt in both:
        give_a_nan(gpu, params, 1, value=math.inf)
        with pytest.warns(RuntimeWarning, match="'head.weight' was left alone"):
            opt.step()
            assert opt.skipped_steps == 1
    same_steps(gpu, both, 2, 4)


def test_norms(gpu):
    both = pair(gpu, halfstep.AdamW, clip_norm=0.5)
    run(gpu, both, 1, 4)
    assert both[1][1].grad_norm == both[0][1].grad_norm > 0.5
    same(gpu, both)


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("scan", ["scan", "per-tensor", "known-finite"])
def test_what_a_grad_scaler_leaves_stays_on_the_device(gpu, found, scan):
    both = pair(gpu, halfstep.AdamW, fused=True, scan=scan)
    run(gpu, both, 1, 3)
    waits = None if gpu.real else gpu.waits
    for params, opt in both:
        give(gpu, params, {name: g * 1024 for name, g in gradients(params, 3).items()})
        put = torch.clone if opt is both[0][1] else gpu.tensor
        opt.grad_scale, opt.found_inf = put(torch.tensor(1024.0)), put(torch.tensor(found))
        opt.step()
        del opt.grad_scale, opt.found_inf
    assert gpu.real or gpu.waits == waits
    run(gpu, both, 4, 6)
    for params, opt in both:  # and again
        give(gpu, params, {name: g * 64 for name, g in gradients(params, 6).items()})
        opt.grad_scale = (torch.clone if opt is both[0][1] else gpu.tensor)(torch.tensor(64.0))
        opt.step()
        del opt.grad_scale
    run(gpu, both, 7, 9)
    with warnings_are("error"):  # who scales knows
        assert both[1][1].skipped_steps == found
    same(gpu, both)


def test_an_lr_on_the_device_is_read_there(gpu):
    both = pair(gpu, halfstep.AdamW)
    run(gpu, both, 1, 3)
    for (_, opt), put in zip(both, (torch.clone, gpu.tensor)):
        opt.param_groups[0]["lr"] = put(torch.tensor(1e-2))
    run(gpu, both, 3, 5)
    gpu.synchronize()
    before = None if gpu.real else gpu.waits
    for _, opt in both:
        opt.param_groups[0]["lr"].fill_(3e-2)
    run(gpu, both, 5, 8)
    assert gpu.real or gpu.waits == before
    for _, opt in both:
        opt.param_groups[0]["lr"] = 1e-4
    gpu.synchronize()
    same_steps(gpu, both, 8, 10)


@pytest.mark.parametrize("recipe", ["kahan", "ecc8-int8"])
def test_resume_and_change_of_device(gpu, recipe):
    dtype, options = RECIPES[recipe]
    both = pair(gpu, halfstep.AdamW, dtype, **options)
    run(gpu, both, 1, 4)
    # The processor's state goes on on the GPU, and the GPU's on the processor.
    saved = [
        {"model": {name: gpu.read(p) for name, p in params.items()}, "opt": opt.state_dict()}
        for params, opt in both
    ]
    for place, (params, opt) in enumerate(pair(gpu, halfstep.AdamW, dtype, **options)):
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(saved[1 - place]["model"][name])
        opt.load_state_dict(saved[1 - place]["opt"])
        both[place] = (params, opt)
    same_steps(gpu, both, 4, 7)


def test_a_change_of_format_on_the_device(gpu):
    both = pair(gpu, halfstep.AdamW, torch.bfloat16, weights="bf16-sr", states="bf16-sr")
    run(gpu, both, 1, 3)
    for _, opt in both:
        opt.param_groups[0].update(weights="bf16-kahan", states="int8")
    same_steps(gpu, both, 3, 6)


def test_reading_and_writing(gpu):
    both = pair(gpu, halfstep.AdamW, torch.bfloat16, weights="bf16-ecc8", states="int8")
    run(gpu, both, 1, 4)
    found = []
    for params, opt in both:
        p = params["body.weight"]
        opt.write_weight(p, opt.read_weight(p) * 0.5)
        opt.write_state(p, "exp_avg", opt.read_state(p, "exp_avg") * 0.25)
        assert devices.of(opt.read_weight(p)) == devices.of(p)
        values = [gpu.read(opt.read_weight(p)), gpu.read(opt.read_state(p, "exp_avg"))]
        found.append(plain([*values, opt.memory(), opt.fell_back(), str(opt).count("\n")]))
    assert found[0] == found[1]
    same_steps(gpu, both, 4, 6)


@pytest.mark.parametrize("clip", [None, "delayed", "per-tensor"])
@pytest.mark.told("'body.bias' is not finite")
def test_release(gpu, clip):
    both = pair(gpu, halfstep.AdamW, torch.bfloat16, clip=clip, clip_norm=1.0 if clip else 0.0)
    with warnings_are("ignore"):
        for step in range(1, 5):
            for params, opt in both:
                give_a_nan(gpu, params, step, ["body.bias"] if step == 3 else [])
                for p in params.values():
                    opt.step_param(p)
                opt._parts.steps.end_round()
        assert both[0][1].skipped_steps == both[1][1].skipped_steps == 1
    same(gpu, both)


def test_micro_batches_go_into_the_states(gpu):
    both = pair(gpu, halfstep.AdamW, states="bf16-sr")
    for step in range(1, 7):
        for params, opt in both:
            opt.optimizer_accumulation = bool(step % 3)
            give(gpu, params, gradients(params, step))
            opt.step()
    same(gpu, both)


def mixed(gpu, places, cls=halfstep.AdamW, **options):
    """Makes the same parameters on the processor and over several places ("cpu" or a GPU's
    number)."""
    out = []
    for where in (["cpu"] * len(places), places):
        values = start(
            torch.float32, {f"p{i}": (40, 64) if i % 2 else (96,) for i in range(len(places))}
        )
        params = {
            name: Parameter(v.clone() if w == "cpu" else gpu.tensor(v, w))
            for (name, v), w in zip(values.items(), where)
        }
        out.append((params, cls(params.items(), seed=5, **options)))
    return out


@pytest.mark.parametrize("places", [["cpu", 0, "cpu", 0], [0, 1, 0, 1], [1, "cpu", 0]], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"clip_norm": 0.5}, {"cls": halfstep.Lamb}, {"scan": "per-tensor"}], ids=str
)
def test_several_devices_are_one_optimizer(gpu, places, options):
    if gpu.real and torch.cuda.device_count() < 2 and 1 in places:
        pytest.skip("one GPU")
    both = mixed(gpu, places, **options)
    run(gpu, both, 1, 4)
    assert both[0][1].grad_norm == both[1][1].grad_norm
    for bad in range(len(places)):  # one verdict for all
        for params, opt in both:
            give_a_nan(gpu, params, 10 + bad, [f"p{bad}"])
            with told(f"'p{bad}' is not finite", bad == 0):  # it warns once
                opt.step()
                assert opt.skipped_steps == bad + 1
        run(gpu, both, 20 + bad, 22 + bad)
    same(gpu, both)


def test_all_devices_refuse_a_step_once(gpu):
    both = mixed(gpu, ["cpu", 0, "cpu", 0])
    for params, opt in both:
        give_a_nan(gpu, params, 1, params)
        with pytest.warns(RuntimeWarning, match="not finite"):
            opt.step()
        assert opt.skipped_steps == 1
    same_steps(gpu, both, 2, 4)


@pytest.mark.parametrize("places", [["cpu", 0], [0, 0]], ids=str)
def test_delayed_clipping_over_devices(gpu, places):
    both = mixed(gpu, places, clip="delayed", clip_norm=0.5)
    run(gpu, both, 1, 5, release=True)
    same(gpu, both)


def test_a_captured_step_goes_on_at_each_replay(fake):
    both = pair(fake, halfstep.AdamW, torch.bfloat16, states="int8")
    stream = fake.stream()
    for params, opt in both:
        give(fake, params, gradients(params, 0), asynchronous=False)
    with fake.on(stream):
        run(fake, both, 1, 3)
        fake.synchronize()
    with fake.capture(stream) as replays:
        both[1][1].step()
    (here, reference), (there, _) = both
    fixed = [(p.grad, name) for name, p in there.items()]
    for step in range(3, 8):
        given = gradients(here, step)
        give(fake, here, given)
        reference.step()
        with fake.on(stream):
            for tensor, name in fixed:
                fake.later(tensor, given[name])
            replays[0]()
    with fake.on(stream):
        fake.synchronize()
        same(fake, both)


def test_a_parameter_that_moves_takes_its_states_along(gpu):
    params, others = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    opt, ref = halfstep.AdamW(params.items(), seed=5), halfstep.AdamW(others.items(), seed=5)
    for step in range(1, 7):
        if step == 4:
            for p in params.values():
                p.data, p.grad = gpu.tensor(p.data), None
        give(gpu, params, gradients(others, step))
        give(gpu, others, gradients(others, step))
        opt.step()
        ref.step()
    assert held(gpu, params, opt) == held(gpu, others, ref)


def test_copies_and_pickles(gpu):
    both = pair(gpu, halfstep.AdamW, torch.bfloat16, weights="bf16-kahan")
    run(gpu, both, 1, 3)
    if gpu.real:
        both = [copy.deepcopy(b) for b in both]
    same_steps(gpu, both, 3, 5)


def test_a_vector_of_no_elements_counts(gpu):
    both = pair(gpu, halfstep.AdamW, shapes={"a": (5, 3), "none": (0, 4)})
    run(gpu, both, 1, 4)
    for params, opt in both:
        give_a_nan(gpu, params, 4, ["a"])
        with pytest.warns(RuntimeWarning):
            opt.step()
    assert both[1][1].state[both[1][0]["none"]]["step"] == 3
    same_steps(gpu, both, 5, 6)


# ---- Averages and sums ---------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["bf16-sr", "bf16-kahan", "f32"])
def test_averages(gpu, fmt):
    """The averages lie on the CPU, on the GPU, and on both."""
    found = []
    for on in ("", "01", "1"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 3)).to(torch.bfloat16)
        for name, p in model.named_parameters():
            if name[0] in on:
                p.data = gpu.tensor(p.data)
        opt = halfstep.AdamW(model.named_parameters(), weights="bf16-ecc8", seed=3)
        ema = halfstep.EMA(model, decay=0.9, weights=fmt, seed=7)
        if not gpu.real:  # deepcopy() asks torch
            for name, t in (*ema.module.named_parameters(), *ema.extra.named_buffers()):
                if name[0] in on:
                    t.data = gpu.tensor(t.data)
        named = dict(model.named_parameters())
        for step in range(1, 5):
            give(gpu, named, gradients(named, step))
            opt.step()
            gpu.synchronize() if on else None
            ema.update_parameters(model, opt)
        with torch.no_grad():
            model[0].bias[5] = float("nan")
        with pytest.warns(RuntimeWarning, match="'0.bias' is not finite"):
            ema.update_parameters(model)
        assert ema.skipped_updates == 1
        found.append(plain([gpu.read(p) for p in ema.module.parameters()]))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("fmt", ["bf16-sr", "f32"])
def test_sums_over_micro_batches(gpu, fmt):
    found = []
    for put in (torch.clone, gpu.tensor, lambda v: gpu.tensor(v, 0) if v.dim() == 2 else v.clone()):
        params = {name: Parameter(put(v)) for name, v in start(torch.bfloat16).items()}
        sums = halfstep.GradientAccumulator(params.items(), format=fmt, seed=3)
        for step in range(5):
            give(gpu, params, gradients(params, step), asynchronous=False)
            for i, p in enumerate(params.values()):
                sums._take(i, p)
        gpu.synchronize()
        saved = sums.state_dict()
        again = halfstep.GradientAccumulator(params.items(), format=fmt, seed=4)
        again.load_state_dict(saved)
        again.reassign()
        found.append(plain([gpu.read(p.grad) for p in params.values()] + [saved["writes"]]))
    assert found[0] == found[1] == found[2]


# ---- What cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["ROCm", "compute capability 7.5"])
@pytest.mark.parametrize("cls, release", [("AdamW", False), ("AdamW", True), ("Muon", False)])
def test_a_gpu_without_kernels(gpu, monkeypatch, which, cls, release):
    """AMD's GPUs are "cuda" in builds of torch for ROCm. Their parameters are stepped by the
    processor, also beside parameters that are there."""
    if which == "ROCm":
        monkeypatch.setattr(torch.version, "hip", "6.0")
    else:
        monkeypatch.setattr(devices, "capability", lambda device: (7, 5))
    torch_public.warn_once.cache_clear()
    options = {"gradient_release": release, "clip_norm": 0.5, "clip": "per-tensor"}
    with pytest.warns(UserWarning, match=f"cuda.*{which}.* copies 4 bytes a parameter"):
        both = pair(gpu, getattr(halfstep, cls), torch.bfloat16, **options)
    params, opt = both[1]
    params["scale"].data = torch.clone(both[0][0]["scale"].data)
    for step in range(1, 5):
        for some, one in both:
            give(gpu, some, gradients(some, step), asynchronous=False)
            for p in some.values() if release else ():
                for hook in list(p._post_accumulate_grad_hooks.values()):
                    hook(p)
            one.step()
            one.zero_grad()
    assert opt.grad_norm == both[0][1].grad_norm
    same(gpu, both)
    assert [part.device.type for part in opt._parts.cache.engine.parts] == ["cpu"]
    if not gpu.real:  # each gradient over and each weight back; at first weights came, too
        size = sum(2 * p.numel() for p in params.values() if p.dim())
        assert [sum(n for n, up in gpu.moved if up == way) for way in (False, True)] == [
            5 * size,
            4 * size,
        ]


def test_other_kinds_of_devices():
    p = Parameter(torch.empty(3, device="meta"))
    opt = halfstep.AdamW([p])
    p.grad = torch.empty(3, device="meta")
    with pytest.raises(
        ValueError, match="is on meta; halfstep steps tensors of CPUs and of NVIDIA GPUs, and"
    ):
        opt.step()


@pytest.mark.parametrize("where", ["cpu", "cuda:1"])
def test_a_gradient_on_another_device(gpu, where):
    if gpu.real:
        pytest.skip("torch does not let it be set")
    (_, _), (params, opt) = pair(gpu, halfstep.AdamW)
    for name, g in gradients(params, 1).items():
        params[name].grad = gpu.place(g, torch.device(where))
    before = plain([gpu.read(p) for p in params.values()])
    with pytest.raises(ValueError, match=f"is on {where}, the parameter on cuda:0"):
        opt.step()
    assert not opt.state and before == plain([gpu.read(p) for p in params.values()])


def test_no_memory_on_the_device(fake):
    both = pair(fake, halfstep.AdamW)
    for params, _ in both:
        give(fake, params, gradients(params, 1), asynchronous=False)
    for allocation in itertools.count(1):
        fake.control.fail_allocation = allocation
        try:
            both[1][1].step()
        except (MemoryError, torch.cuda.OutOfMemoryError) as error:  # the library's, or torch's
            assert "out of memory" in str(error)
        if fake.control.fail_allocation:
            break
    fake.control.fail_allocation = 0
    assert allocation > 3
    both[0][1].step()
    assert both[1][1].skipped_steps == 0
    same_steps(fake, both, 2, 4)


def in_a_process_of_its_own(function, *arguments, **environment):
    """Runs a function of this file, by name, and returns its output. It needs its own process. The
    library keeps what it found out about a driver, and a GPU that has failed stays failed."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error::RuntimeWarning",
            "-c",
            f"import conftest, test_cuda; test_cuda.{function}(*{arguments!r})",
        ],
        cwd=Path(__file__).parents[1],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{environment}: exit status {done.returncode}\n{done.stderr}"
    return done.stdout


def unusable(driver):
    """A step on an unusable GPU changes nothing, and the processor goes on. Run in its own
    process."""
    gpu, patch = Fake() if driver else None, pytest.MonkeyPatch()
    p = Parameter(gpu.tensor(torch.ones(3, 5)) if driver else torch.ones(3, 5))
    if driver:
        gpu.install(patch)
    else:
        patch.setattr(
            devices,
            "of",
            lambda tensor: torch.device("cuda", 0) if tensor.shape == p.shape else tensor.device,
        )
        patch.setattr(devices, "capability", lambda device: (9, 0))
        patch.setattr(devices, "stream", lambda device: None)
        patch.setattr(devices, "capturing", lambda device: False)
    p.grad = gpu.tensor(torch.ones(3, 5)) if driver else torch.ones(3, 5)
    opt = halfstep.AdamW([p])
    with pytest.raises(halfstep.HalfstepError) as raised:
        opt.step()
    assert raised.value.code == abi.ERROR_DEVICE and not opt.state and bool((p == 1).all())
    q = Parameter(torch.ones(4))
    q.grad = torch.ones(4)
    halfstep.AdamW([q]).step()
    assert not (q == 1).any()
    print(raised.value)


@needs_fake
@pytest.mark.parametrize(
    "environment, sentence",
    [
        ({"FAKE_CUDA_DEVICES": "0"}, "cuInit: CUDA_ERROR_NO_DEVICE"),
        pytest.param(
            {"FAKE_CUDA_DRIVER": "11080"},
            "the NVIDIA driver supports CUDA 11.8; it must support 12.0 or newer: install a newer"
            " driver",
            marks=pytest.mark.all,
        ),
        ({"HALFSTEP_CUDA_IMAGE": "/dev/null"}, "CUDA_ERROR_INVALID_IMAGE"),
    ],
    ids=["no GPU", "an old driver", "an image that is refused"],
)
def test_what_cannot_be_used_is_told_by_a_sentence(environment, sentence):
    assert sentence in in_a_process_of_its_own("unusable", True, **environment)


def test_no_driver(tmp_path):
    (tmp_path / "libcuda.so.1").write_text("no library")  # in front of one that may be there
    said = in_a_process_of_its_own("unusable", False, LD_LIBRARY_PATH=str(tmp_path))
    assert "there is no NVIDIA driver: libcuda.so.1 cannot be loaded" in said


def failing():
    """After a kernel has failed, calls on the GPU are refused and the processor goes on. Run in its
    own process."""
    gpu = Fake()
    gpu.install(pytest.MonkeyPatch())
    both, others = pair(gpu, halfstep.AdamW), pair(gpu, halfstep.Lion)
    run(gpu, both, 1, 3)
    run(gpu, others, 1, 3)
    (here, plain_opt), (params, opt) = both
    gpu.synchronize()
    gpu.control.fault = 2
    give(gpu, params, gradients(here, 3))
    opt.step()  # is submitted
    other = others[1][1]
    for ask in (
        lambda: opt.skipped_steps,
        opt.step,
        opt.state_dict,
        other.step,
        lambda: other.grad_norm,
    ):
        with pytest.raises(halfstep.HalfstepError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as raised:
            ask()
        assert raised.value.code == abi.ERROR_DEVICE
    before = plain([p.detach().clone() for p in here.values()])
    give(gpu, here, gradients(here, 3))
    plain_opt.step()
    assert before != plain([p.detach() for p in here.values()])
    print(raised.value)


@needs_fake
def test_a_fault_is_lasting_and_the_process_lives_on():
    said = in_a_process_of_its_own("failing")
    assert (
        "this process has lost its context on the GPU; save what is not there and start a new"
        " process" in said
    )


def test_the_fake_tells_of_misuse(fake):
    fake.driver.cuCtxPopCurrent_v2(None)
    told, fake.control.offence = fake.control.offence, None
    assert told == b"a context is popped that was not pushed"


def test_what_differs_is_asked_of_one_module():
    """A place that asks torch directly would not be tested here."""
    folder = os.path.dirname(halfstep.__file__)
    asked = [
        f"{name}: {word}"
        for name in Path(folder).rglob("*.py")
        if name.name != "devices.py"
        for word in ("torch.cuda.", ".record_stream(")
        if word in name.read_text()
    ]
    assert not asked
