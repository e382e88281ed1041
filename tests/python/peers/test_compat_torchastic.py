"""Tests halfstep.compat.torchastic beside the installed torchastic, and
halfstep.GradientAccumulator under it.

The package draws its random bits from torch's global generator, halfstep from seed, name, step and
position. So no two of their BF16 runs can be equal. They are compared as draws of one distribution.
The distance of a run of ours to one of theirs must be that of two of theirs. The mean over many
elements must be the same within five standard errors.
"""

import copy
import gc
import inspect
import os
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from conftest import streams, told

import halfstep
from halfstep.accumulate import GradientAccumulator
from halfstep.compat import torchastic as ours

peers = pytest.importorskip("torchastic")
OPTIMIZERS = ["AdamW", "Compass", "LPFAdamW", "RMSProp"]


def shape_of(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


class Model(torch.nn.Module):
    """A small network with a loss of its own, as the README's snippets want one."""

    def __init__(self, width=64):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(32, width)
        self.norm = torch.nn.LayerNorm(width)
        self.last = torch.nn.Linear(width, 32)

    def forward(self, x):
        return self.last(torch.nn.functional.gelu(self.norm(self.first(x))))

    def loss(self, x):
        return (self(x).float() - x.float().flip(-1)).square().mean()


def batch(seed, dtype=torch.bfloat16):
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bf16(*shape):
    return torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))


def backward(model, first, last):
    """Makes backward passes over batches by number."""
    for i in range(first, last):
        model.loss(batch(i, model.first.weight.dtype)).backward()


def same_gradients(model, other):
    return all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters()))


def vector(params):
    return torch.cat([p.detach().float().flatten() for p in params])


# ---- Names and signatures ------------------------------------------------------------------------


def test_every_public_name_is_there():
    assert set(ours.__all__) == set(peers.__all__)


@pytest.mark.parametrize("name", peers.__all__)
def test_signatures_are_the_peers(name):
    assert shape_of(getattr(ours, name)) == shape_of(getattr(peers, name))
    if name == "StochasticAccumulator":
        for method in ("assign_hooks", "reassign_grad_buffer", "stochastic_grad_accum"):
            assert isinstance(inspect.getattr_static(getattr(ours, name), method), staticmethod)
            assert shape_of(getattr(ours.StochasticAccumulator, method)) == shape_of(
                getattr(peers.StochasticAccumulator, method)
            )


# ---- The README's snippets -----------------------------------------------------------------------


@pytest.mark.parametrize("snippet", ["package", "repository"])
def test_snippets(snippet):
    AdamW, Compass, StochasticAccumulator = ours.AdamW, ours.Compass, ours.StochasticAccumulator
    grad_accum_length = 4
    model_args = (64,)

    # Init model
    model = Model(*model_args)
    if snippet == "package":
        model.to(torch.bfloat16)
        optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=1e-2)
    else:
        optimizer = Compass(model.parameters(), lr=0.01, weight_decay=1e-2, amp_fac=5)
    dtype = model.first.weight.dtype

    # Apply stochastic grad accumulator hooks
    StochasticAccumulator.assign_hooks(model)

    losses = []
    # Training
    for step in range(20):
        # Gradient accumulation
        for micro in range(grad_accum_length):
            model_input = (batch(step * grad_accum_length + micro, dtype),)
            with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
                loss = model.loss(*model_input)
            loss.backward()
            assert all(p.grad is None for p in model.parameters())
            losses.append(loss.item())

        # Apply grad buffer back
        StochasticAccumulator.reassign_grad_buffer(model)
        assert all(p.grad.dtype == p.dtype for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()

    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


# ---- Trajectories --------------------------------------------------------------------------------


def gradients(shape, seed):
    """Returns gradients. Each element has its own size and drift."""
    generator = torch.Generator().manual_seed(seed)
    drift, size = (
        torch.randn(shape, generator=generator),
        torch.exp(0.5 * torch.randn(shape, generator=generator)),
    )
    while True:
        yield (size * (drift + torch.randn(shape, generator=generator))).bfloat16()


def walk(make, dtype=torch.bfloat16, steps=60, shape=(96, 128), seed=0, begin=1.0, **options):
    """Steps one matrix and one vector by gradients that do not depend on the weights."""
    generator = torch.Generator().manual_seed(11)
    params = [
        torch.nn.Parameter((begin * torch.randn(s, generator=generator)).to(dtype))
        for s in (shape, (shape[0],))
    ]
    opt = make(params, **options)
    torch.manual_seed(seed)
    draws = [gradients(p.shape, 21 + i) for i, p in enumerate(params)]
    for _ in range(steps):
        for p, draw in zip(params, draws):
            p.grad = next(draw).to(dtype)
        opt.step()
    return vector(params), params


def published(name):
    """Makes a class with the package's own arithmetic, if there is the choice."""
    make = getattr(ours, name)
    if name != "Compass":
        return make
    return lambda params, **options: make([{"params": params, "published": True}], **options)


@pytest.mark.parametrize("decay", [0, 0.1], ids=["plain", "decay"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trajectory_in_bf16(name, decay):
    # At lr 1e-3 one unit of a BF16 weight of 1 is eight steps. Compass's first steps are a hundred
    # times as long.
    options = {"lr": 1e-4 if name == "Compass" else 1e-3, "weight_decay": decay}
    mine, _ = walk(published(name), **options)
    theirs, _ = walk(getattr(peers, name), seed=1, **options)
    again, _ = walk(getattr(peers, name), seed=2, **options)
    start, _ = walk(getattr(peers, name), steps=0, **options)
    if name == "AdamW":
        # The package's excess of decay: it divides by 1 - 0.9 ** t.
        mine = mine - start * options["lr"] * decay * sum(
            1 / (1 - 0.9**t) - 1 for t in range(1, 61)
        )
    noise = (theirs - again).norm()
    assert (mine - theirs).norm() < 1.1 * noise
    # No drift between them: elements are independent, each with its own gradients.
    for a, b in ((mine, theirs), (mine * start.sign(), theirs * start.sign())):
        difference = a - b
        assert (
            abs(float(difference.mean())) < 5 * float(difference.std()) / difference.numel() ** 0.5
        )
    assert float((mine - start).norm()) == pytest.approx(float((theirs - start).norm()), rel=0.03)
    # And it went somewhere, in the same direction.
    assert torch.nn.functional.cosine_similarity(mine - start, theirs - start, dim=0) > 0.5


def formula(name, params, steps, lr, betas, amp_fac, eps, weight_decay, centralization, correct):
    """Computes torchastic's arithmetic in fp64. With `correct` it is halfstep's: averages are
    debiased before they amplify, and lr and decay are not divided."""
    weights = [p.detach().double() for p in params]
    states = [[torch.zeros_like(w) for _ in range(3)] for w in weights]
    draws = [gradients(p.shape, 21 + i) for i, p in enumerate(params)]
    for t in range(1, steps + 1):
        for w, (low, m, v), draw in zip(weights, states, draws):
            g = next(draw).double()
            if w.ndim > 1 and centralization:
                g = g - centralization * g.mean(dim=tuple(range(1, w.ndim)), keepdim=True)
            first, second = betas[0], betas[-1]
            debias = 1 - betas[-2] ** t if name != "RMSProp" else 1.0
            step, decay = lr / debias, lr if correct or name == "RMSProp" else lr / debias
            if name in ("Compass", "LPFAdamW"):
                low.mul_(first).add_((1 - first) * g)
                g = g + amp_fac * low / ((1 - first**t) if correct else 1.0)
            v.mul_(second).add_((1 - second) * g * g)
            if name in ("AdamW", "LPFAdamW"):
                m.mul_(betas[-2]).add_((1 - betas[-2]) * g)
                g = m
            if name == "Compass" and correct:
                step = lr
            root = (v / (1 - second**t)).sqrt() + eps
            w.sub_(decay * weight_decay * w + step * g / root)
    return vector(weights)


@pytest.mark.parametrize("centralization", [0, 0.7])
@pytest.mark.parametrize(
    "name,correct",
    [
        ("AdamW", True),
        ("RMSProp", True),
        ("Compass", True),
        ("Compass", False),
        ("LPFAdamW", True),
        ("LPFAdamW", False),
    ],
)
def test_arithmetic_in_fp32(name, correct, centralization):
    """The package takes no float32, so its formulas in fp64 are the judge, beside ours with float32
    states. The run has 60 steps. Tolerances are those of conventions.md 2.4 (rtol 1e-5, atol 1e-6)
    for the distance gone."""
    betas = {
        "AdamW": (0.9, 0.999),
        "Compass": (0.99, 0.999),
        "LPFAdamW": (0.9, 0.9, 0.999),
        "RMSProp": (0.999,),
    }[name]
    amp_fac = {"Compass": 5, "LPFAdamW": 2}.get(name, 0)
    make = getattr(ours, name)
    group = {"states": "f32", "published": not correct} if amp_fac else {"states": "f32"}
    mine, params = walk(
        lambda params, **options: make([{"params": params, **group}], **options),
        torch.float32,
        begin=0.1,
        weight_decay=0.1,
        centralization=centralization,
    )
    start, begin = walk(make, torch.float32, steps=0, begin=0.1)
    exact = formula(name, begin, 60, 1e-3, betas, amp_fac, 1e-8, 0.1, centralization, correct)
    off = ~torch.isclose((mine - start).double(), exact - start.double(), rtol=1e-5, atol=1e-6)
    assert off.double().mean() < 5e-4
    if amp_fac:  # the other form is another trajectory
        other = formula(
            name, begin, 60, 1e-3, betas, amp_fac, 1e-8, 0.1, centralization, not correct
        )
        assert (other - exact).norm() > 1e-2 * (exact - start.double()).norm()


def test_first_steps_are_not_a_hundred_times_too_long():
    moved = {}
    for tag, module in (("ours", ours), ("peer", peers)):
        p = bf16(64, 64)
        opt = module.Compass([p], lr=1e-3)
        p.grad = torch.ones_like(p)
        opt.step()
        moved[tag] = float(p.detach().float().abs().mean())
    assert moved["ours"] == pytest.approx(1e-3, rel=0.01)
    assert moved["peer"] > 50e-3  # 1.05 amplified to 6: 35 to 100 times


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_small_steps_add_up(name):
    """Steps of 1e-5 on a weight of 1 are 1/390 of a unit. To nearest nothing would move."""
    end = {}
    for weights in ("bf16-sr", "bf16"):
        p = torch.nn.Parameter(torch.ones(256, 256, dtype=torch.bfloat16))
        # "published": LPFAdamW's amplification grows at first, which makes its steps 6 % longer
        # than lr
        opt = getattr(ours, name)(
            [{"params": [p], "weights": weights, "published": False}], lr=1e-5
        )
        for _ in range(100):
            p.grad = torch.ones_like(p)
            opt.step()
        end[weights] = 1.0 - p.detach().float()
    moved = end["bf16-sr"]
    assert 0.1 < (moved > 0).float().mean() < 0.5
    assert abs(float(moved.mean()) - 100e-5) < 5 * float(moved.std()) / 256 + 0.01 * 100e-5
    assert torch.equal(end["bf16"], torch.zeros(256, 256))


@pytest.mark.parametrize(
    "name,states", [("AdamW", 2), ("Compass", 2), ("LPFAdamW", 3), ("RMSProp", 1)]
)
def test_everything_is_bf16(name, states):
    model = Model().bfloat16()
    opt = getattr(ours, name)(model.parameters())
    model.loss(batch(0)).backward()
    opt.step()
    count = sum(p.numel() for p in model.parameters())
    assert opt.memory() == {
        "weights": 2 * count,
        "gradients": 2 * count,
        "extras": 0,
        "states": 2 * states * count,
    }
    for p in model.parameters():
        assert (
            opt.recipe(p).split("/")[1:] == ["bf16-sr", "bf16-sr"]
            or opt.recipe(p).count("bf16-sr") == 1 + states
        )
        held = list(streams(opt, p).values())
        assert len(held) == states and all(t.dtype == torch.bfloat16 for t in held)


def test_mixed_models_and_late_gradients():
    model = Model()
    model.first.bfloat16()
    opt = ours.AdamW(model.parameters(), lr=1e-3)
    frozen = model.last.bias.detach().clone()
    for p in model.parameters():
        if p is not model.last.bias:
            p.grad = torch.ones_like(p)
    opt.step()
    assert torch.equal(model.last.bias.detach(), frozen)
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}
    assert opt.recipe(model.first.weight).startswith("adamw/bf16-sr/")
    assert opt.recipe(model.norm.weight).startswith("adamw/f32/bf16-sr")


def test_centralization_is_a_factor():
    for factor in (0.0, 0.25, 1.0):
        p, b = torch.nn.Parameter(torch.zeros(4, 8)), torch.nn.Parameter(torch.zeros(8))
        opt = ours.AdamW([p, b], lr=1.0, betas=(0.0, 0.0), eps=1.0, centralization=factor)
        p.grad = torch.arange(32.0).reshape(4, 8)
        b.grad = torch.arange(8.0)
        opt.step()
        g = p.grad - factor * p.grad.mean(1, keepdim=True)
        assert torch.allclose(p.detach(), -g / (g.abs() + 1), atol=2e-2)  # BF16 states
        assert torch.allclose(b.detach(), -b.grad / (b.grad.abs() + 1), atol=2e-2)
    for bad in (-0.1, 1.5):
        with pytest.raises(ValueError):
            ours.AdamW([p], centralization=bad)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_torchastic_load(name):
    model = Model().bfloat16()
    options = {"betas": (0.9, 0.999)} if name == "Compass" else {}
    there = getattr(peers, name)(model.parameters(), lr=1e-3, **options)
    for step in range(5):
        model.loss(batch(step)).backward()
        there.step()
        there.zero_grad()
    here = getattr(ours, name)(model.parameters(), lr=5.0)
    here.load_state_dict(there.state_dict())
    assert here.param_groups[0]["lr"] == 1e-3
    model.loss(batch(5)).backward()
    renamed = {"ema": "exp_avg", "ema_squared": "exp_avg_sq", "smoothing": "smoothing"}
    if name == "RMSProp":
        renamed["ema_squared"] = "square_avg"
    before = {
        p: {renamed[k]: v.float().clone() for k, v in s.items() if k != "step"}
        for p, s in there.state.items()
    }
    here.param_groups[0]["lr"] = 0.0
    weights = vector(model.parameters())
    here.step()
    assert torch.equal(vector(model.parameters()), weights)
    for p, states in before.items():
        assert here.state[p]["step"] == 6
        assert set(states) == set(streams(here, p))
        for key, value in states.items():
            now, g = here.state[p][key].float(), p.grad.float()
            if key == "smoothing" or (key == "exp_avg" and name in ("AdamW", "Compass")):
                assert torch.allclose(now, 0.9 * value + 0.1 * g, rtol=2e-2, atol=1e-6)
            elif name in ("AdamW", "RMSProp"):
                assert torch.allclose(now, 0.999 * value + 0.001 * g * g, rtol=2e-2, atol=1e-12)


# ---- The accumulator -----------------------------------------------------------------------------


def sums(format, values, count=65536, **options):
    """Sums gradients, by value, over `count` elements of a BF16 parameter, by way of backward()."""
    p = bf16(count // 256, 256)
    with GradientAccumulator([("p", p)], format, **options):
        for value in values:
            (p * value).sum().backward()
    return p.grad


def test_sums_are_unbiased_where_nearest_stalls():
    """Adds 1, and 63 times 2^-10. Each is an eighth of a unit of the sum. Rounding to nearest needs
    half a unit."""
    values = [1.0] + [2.0**-10] * 63
    exact = 1 + 63 * 2.0**-10
    stochastic = sums("bf16-sr", values).float()
    assert abs(float(stochastic.mean()) - exact) < 5 * float(stochastic.std()) / 256
    assert float(stochastic.std()) < 0.03
    assert torch.equal(sums("bf16", values).float(), torch.ones(256, 256))
    assert torch.equal(
        sums("f32", values, dtype=torch.bfloat16).float(),
        torch.full((256, 256), exact).bfloat16().float(),
    )
    # torch's own sums in p.grad
    p = bf16(4)
    for value in values:
        (p * value).sum().backward()
    assert torch.equal(p.grad, torch.ones_like(p))


def test_sums_of_64_random_gradients_are_unbiased():
    """Each element's sum has an error. Their mean over 65536 elements must be small enough for
    chance."""
    generator = torch.Generator().manual_seed(2)
    micro = [(0.1 + torch.randn(256, 256, generator=generator)).bfloat16() for _ in range(64)]
    exact = sum(g.double() for g in micro)
    p = bf16(256, 256)
    accumulator = GradientAccumulator([("p", p)]).attach()
    for g in micro:
        (p * g).sum().backward()
    accumulator.reassign()
    error = p.grad.double() - exact
    assert abs(float(error.mean())) < 5 * float(error.std()) / 256
    # 64 roundings of sums that end around 6 +- 8. Units are 1/16 and sometimes 1/8, and each
    # rounding is off by half a unit at most in rms
    assert float(error.std()) < 64**0.5 / 32


def test_it_is_the_sum_and_never_the_mean():
    p = bf16(8)
    q = torch.nn.Parameter(torch.zeros(8))
    accumulator = GradientAccumulator([p, q]).attach()
    for _ in range(2):
        for _ in range(4):
            (3 * p.sum() + 5 * q.sum()).backward()
        accumulator.reassign()
        assert torch.equal(p.grad.float(), torch.full((8,), 12.0)) and torch.equal(
            q.grad, torch.full((8,), 20.0)
        )
        p.grad = q.grad = None
    assert accumulator.memory() == 0


def test_bits_depend_on_seed_and_names_alone():
    values = [1.0] + [2.0**-10] * 20
    first = sums("bf16-sr", values, seed=1)
    assert torch.equal(first, sums("bf16-sr", values, seed=1))
    assert not torch.equal(first, sums("bf16-sr", values, seed=2))
    torch.set_num_threads(3)
    assert torch.equal(first, sums("bf16-sr", values, seed=1))
    torch.set_num_threads(1)

    def unnamed(seed):
        a, b = (torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16)) for _ in range(2))
        with GradientAccumulator([a, b], seed=seed):
            for value in values:
                (a * value + b * value).sum().backward()
        return a.grad, b.grad

    a, b = unnamed(1)
    assert not torch.equal(a, b)
    assert all(map(torch.equal, (a, b), unnamed(1)))  # told apart by their positions
    c, d = unnamed(2)
    assert not torch.equal(a, c) and not torch.equal(b, d)


def test_no_float32_buffer():
    """Makes no tensor of float32 or of four bytes an element on the way. One gradient at a time
    exists."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        seen = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor):
                    self.seen.append((t.numel(), t.element_size()))
            return out

    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(4)]).bfloat16()
    ours.StochasticAccumulator.assign_hooks(model)
    x = torch.randn(2, 64).bfloat16()
    accumulator, _ = ours._accumulators[model[0].weight]
    with Watch() as watch:
        for _ in range(3):
            model(x).sum().backward()
            assert all(p.grad is None for p in model.parameters())
            assert accumulator.memory() == 2 * 4 * 4096
        ours.StochasticAccumulator.reassign_grad_buffer(model)
    assert accumulator.memory() == 0
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
    assert any(n >= 4096 for n, _ in watch.seen)  # gradients did pass by
    assert not [size for n, size in watch.seen if n >= 4096 and size > 2]


PEAK = """
import torch
from {module} import StochasticAccumulator as accumulator

def memory(line):
    with open("/proc/self/status") as file:
        return next(int(text.split()[1]) * 1024 for text in file if text.startswith(line))

torch.set_num_threads(1)
n = 1 << 24
model = torch.nn.Module()
model.p = torch.nn.Parameter(torch.ones(n // 1024, 1024, dtype=torch.bfloat16))
g = torch.ones(n // 1024, 1024, dtype=torch.bfloat16)
if {used}:
    accumulator.assign_hooks(model)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak from here on
before = memory("VmRSS")
for _ in range(3):
    model.p.grad = None
    model.p.backward(g)
if {used}:
    accumulator.reassign_grad_buffer(model)
print((memory("VmHWM") - before) / n)
"""


@pytest.mark.all
@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is read as Linux tells it"
)
def test_peak_memory():
    """Bytes per element beyond backward() alone: 2, the buffer. The package also makes the sum in
    float32 and its random numbers in int32."""
    peak = {}
    for tag, module, used in (
        ("none", "torchastic", False),
        ("ours", "halfstep.compat.torchastic", True),
        ("peer", "torchastic", True),
    ):
        script = PEAK.format(module=module, used=used)
        peak[tag] = float(
            subprocess.run(
                [sys.executable, "-c", script], check=True, text=True, capture_output=True
            ).stdout
        )
    print(peak)
    assert 1.5 < peak["ours"] - peak["none"] < 2.5
    assert peak["peer"] - peak["none"] > 8


def test_float32_parameters():
    """Gradients are rounded stochastically as well. They come back as float32, or stay BF16 for
    halfstep's step."""
    p = torch.nn.Parameter(torch.zeros(256, 256))
    value = 1 + 2.0**-10
    with GradientAccumulator([("p", p)]):
        (p * value).sum().backward()
    assert p.grad.dtype == torch.float32
    assert set(p.grad.unique().tolist()) == {1.0, 1 + 2.0**-7}
    assert abs(float(p.grad.mean()) - value) < 5 * float(p.grad.std()) / 256
    p.grad = None

    if not hasattr(p, "grad_dtype"):
        with pytest.raises(ValueError, match="this torch"):
            GradientAccumulator([p], dtype=torch.bfloat16)
        return
    opt = halfstep.AdamW([("p", p)], lr=1e-3, weight_decay=0.0)
    accumulator = GradientAccumulator([("p", p)], dtype=torch.bfloat16).attach()
    for _ in range(2):
        for _ in range(3):
            (p * value).sum().backward()
        accumulator.reassign()
        assert p.grad.dtype == torch.bfloat16
        opt.step()
        opt.zero_grad()
    assert torch.allclose(p.detach(), torch.full_like(p, -2e-3), rtol=1e-2)


def test_a_missing_gradient():
    model = Model().bfloat16()
    StochasticAccumulator = ours.StochasticAccumulator
    StochasticAccumulator.assign_hooks(model)
    with pytest.raises(RuntimeError, match="'first.weight'.*and 2 more"):
        StochasticAccumulator.reassign_grad_buffer(model)
    model.first(batch(0)).sum().backward()
    with pytest.raises(
        RuntimeError, match="'norm.weight', 'norm.bias', 'last.weight', 'last.bias';"
    ):
        StochasticAccumulator.reassign_grad_buffer(model)
    assert model.first.weight.grad is None  # nothing changed
    model.first(batch(0)).sum().backward()
    try:
        StochasticAccumulator.missing = "skip"
        StochasticAccumulator.reassign_grad_buffer(model)
    finally:
        StochasticAccumulator.missing = "error"
    assert model.last.weight.grad is None
    twice = model.first.weight.grad.clone()
    model.first.weight.grad = None
    model.first(batch(0)).sum().backward()
    model.last(batch(0, torch.bfloat16).repeat(1, 2)).sum().backward()
    model.norm(model.first(batch(0))).sum().backward()
    StochasticAccumulator.reassign_grad_buffer(model)
    assert (
        all(p.grad is not None for p in model.parameters())
        and twice.shape == model.first.weight.grad.shape
    )

    with pytest.raises(RuntimeError, match="assign_hooks"):
        StochasticAccumulator.reassign_grad_buffer(Model())
    for bad in ({"missing": "maybe"}, {"format": "int8"}, {"dtype": torch.float64}):
        with pytest.raises(ValueError, match="halfstep"):
            GradientAccumulator(model, **bad)
    with pytest.raises(TypeError):
        GradientAccumulator(model.first.weight)


def test_frozen_parameters_are_left_alone():
    model = Model().bfloat16()
    model.norm.requires_grad_(False)
    assert len(ours.StochasticAccumulator.assign_hooks(model)) == 4
    model.loss(batch(0)).backward()
    model.first.requires_grad_(False)
    ours.StochasticAccumulator.reassign_grad_buffer(model)
    assert model.norm.weight.grad is None and model.last.weight.grad is not None


def test_hooks_are_put_once_and_come_off():
    model = Model().bfloat16()
    hooks = ours.StochasticAccumulator.assign_hooks(model)
    again = ours.StochasticAccumulator.assign_hooks(model)
    assert len(hooks) == len(again) == 6
    model.loss(batch(0)).backward()
    ours.StochasticAccumulator.reassign_grad_buffer(model)
    once = model.first.weight.grad.clone()
    model.zero_grad()
    for hook in hooks:
        hook.remove()
    model.loss(batch(0)).backward()
    assert torch.equal(model.first.weight.grad, once)
    model.zero_grad()
    ours.StochasticAccumulator.assign_hooks(model)
    model.loss(batch(0)).backward()
    assert model.first.weight.grad is None
    ours.StochasticAccumulator.reassign_grad_buffer(model)
    assert torch.equal(model.first.weight.grad, once)


def test_a_gradient_left_by_other_means_is_added():
    p = bf16(8)
    accumulator = GradientAccumulator([p]).attach()
    (2 * p).sum().backward()
    accumulator.detach()
    assert not accumulator.attached
    (3 * p).sum().backward()
    accumulator.reassign()
    assert torch.equal(p.grad.float(), torch.full((8,), 5.0))
    accumulator.reassign()  # nothing more to give, and a gradient is there
    assert torch.equal(p.grad.float(), torch.full((8,), 5.0))


def test_an_accumulator_that_is_made_again_takes_over():
    p, q = bf16(8), bf16(8)
    first = GradientAccumulator([p, q]).attach()
    with told("another GradientAccumulator takes the gradients of 1 of these"):
        second = GradientAccumulator([q]).attach()
    (2 * p + 3 * q).sum().backward()
    second.reassign()
    assert torch.equal(q.grad.float(), torch.full((8,), 3.0)) and p.grad is None
    assert first.attached and second.attached


def test_the_context_forgets_after_an_exception():
    p = bf16(8)
    accumulator = GradientAccumulator([p])
    with pytest.raises(KeyError):
        with accumulator:
            p.sum().backward()
            raise KeyError
    assert p.grad is None and accumulator.memory() == 0 and not accumulator.attached
    with accumulator:
        p.sum().backward()
    assert torch.equal(p.grad, torch.ones_like(p)) and not accumulator.attached


def test_layouts_shapes_and_shared_parameters():
    torch.manual_seed(0)
    grads = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = torch.nn.Parameter(
            torch.zeros(4, 8, 3, 3, dtype=torch.bfloat16).to(memory_format=layout)
        )
        draws = torch.Generator().manual_seed(1)
        with GradientAccumulator([("p", p)], seed=0):
            for _ in range(8):
                g = torch.randn(4, 8, 3, 3, generator=draws).bfloat16().to(memory_format=layout)
                (p * g).sum().backward()
        grads.append(p.grad)
    assert torch.equal(*grads)

    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    ).bfloat16()
    model[1].weight = model[0].weight
    model.scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))
    model.empty = bf16(0, 3)
    accumulator = GradientAccumulator(model).attach()
    assert len(accumulator._names) == 3
    for _ in range(2):
        (model(torch.eye(8).bfloat16()).sum() * model.scale + model.empty.sum()).backward()
    accumulator.reassign()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    total = model(torch.eye(8).bfloat16()).sum()
    assert float(model.scale.grad) == pytest.approx(2 * float(total.detach()), rel=0.02)


def test_a_gradient_that_is_a_view_is_not_kept_as_the_buffer():
    flat = torch.zeros(16, dtype=torch.bfloat16)
    p = bf16(8)
    accumulator = GradientAccumulator([p]).attach()
    p.grad = flat[:8]
    p.sum().backward()
    flat.fill_(99.0)
    accumulator.reassign()
    assert torch.equal(p.grad, torch.ones_like(p))


def test_bad_gradients_and_parameters():
    p = torch.nn.Parameter(torch.zeros(4, 2))
    accumulator = GradientAccumulator([("table", p)]).attach()
    with pytest.raises(TypeError, match="'table' is sparse"):
        torch.nn.functional.embedding(torch.tensor([1]), p, sparse=True).sum().backward()
    p.grad = None
    p.data = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="table"):
        p.sum().backward()
    assert accumulator.memory() == 0
    with pytest.raises(ValueError, match="'far' is on meta"):
        GradientAccumulator([("far", torch.nn.Parameter(torch.zeros(3, device="meta")))])
    with pytest.raises(TypeError, match="'wave'"):
        GradientAccumulator([("wave", torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64)))])
    with pytest.raises(TypeError, match="str"):
        GradientAccumulator(["weight"])
    with pytest.raises(ValueError):
        GradientAccumulator([("same", p), ("same", torch.nn.Parameter(torch.zeros(3)))])


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_copies(copied):
    """A model with hooks can be copied; the copy has none. A model and its accumulator are copied
    together, in the middle of a sum."""
    model = Model().bfloat16()
    ours.StochasticAccumulator.assign_hooks(model)
    model.loss(batch(0)).backward()
    twin = copied(model)
    twin.loss(batch(0)).backward()
    assert twin.first.weight.grad is not None
    ours.StochasticAccumulator.reassign_grad_buffer(model)

    model = Model().bfloat16()
    accumulator = GradientAccumulator(model).attach()
    backward(model, 0, 3)
    twin, twins = copied((model, accumulator))
    for m, a in ((model, accumulator), (twin, twins)):
        backward(m, 3, 6)
        a.reassign()
    assert same_gradients(model, twin)


def test_saved_counters_give_the_same_bits(tmp_path):
    model = Model().bfloat16()
    accumulator = GradientAccumulator(model, seed=5).attach()
    backward(model, 0, 3)
    torch.save(accumulator.state_dict(), tmp_path / "sums.pt")
    twin = Model().bfloat16()
    other = GradientAccumulator(twin).attach()
    other.load_state_dict(torch.load(tmp_path / "sums.pt", weights_only=True))
    fresh = Model().bfloat16()
    without = GradientAccumulator(fresh, seed=5).attach()
    without.load_state_dict({**accumulator.state_dict(), "writes": {}})
    for m, a in ((model, accumulator), (twin, other), (fresh, without)):
        backward(m, 3, 6)
        a.reassign()
    assert same_gradients(model, twin)
    assert not same_gradients(model, fresh)
    with pytest.raises(ValueError, match="bf16-sr"):
        GradientAccumulator(model, "bf16").load_state_dict(accumulator.state_dict())


def test_nothing_keeps_a_model_alive():
    for make in (
        lambda m: ours.StochasticAccumulator.assign_hooks(m),
        lambda m: GradientAccumulator(m).attach(),
    ):
        model = Model().bfloat16()
        kept = make(model)
        model.loss(batch(0)).backward()
        gone = weakref.ref(model.first.weight)
        del model
        gc.collect()
        assert gone() is None
        if isinstance(kept, GradientAccumulator):
            kept.reassign()
            assert kept.memory() == 0
    assert len(ours._accumulators) == 0 or all(p is not None for p in ours._accumulators.keys())


def test_it_composes_with_a_step():
    """Takes sums from the accumulator and steps from torch's and halfstep's optimizer. They act as
    on gradients summed in float32."""
    end = {}
    for tag in ("exact", "torch", "halfstep"):
        model = Model()
        opt = (halfstep.AdamW if tag == "halfstep" else torch.optim.AdamW)(
            model.parameters(), lr=1e-3
        )
        accumulator = GradientAccumulator(model) if tag != "exact" else None
        losses = []
        for step in range(40):
            if accumulator:
                accumulator.attach()
            for micro in range(8):
                loss = model.loss(batch(step * 8 + micro, torch.float32)) / 8
                loss.backward()
                losses.append(loss.item() * 8)
            if accumulator:
                accumulator.reassign()
            opt.step()
            opt.zero_grad()
        end[tag] = vector(model.parameters()), sum(losses[-8:]) / 8
    way = (end["exact"][0] - vector(Model().parameters())).norm()
    for tag in ("torch", "halfstep"):
        assert (end[tag][0] - end["exact"][0]).norm() < 0.1 * way
        assert end[tag][1] == pytest.approx(end["exact"][1], rel=0.01)
