"""Tests the interface of adamw_bfloat16, which no registry here offers, against its documented
signature, schedule and rule."""

import copy
import ctypes
import inspect
import math
import pickle

import pytest
import torch
from conftest import bits, everything, parameters, run, saved, set_gradients, streams, twins

from halfstep._library import abi, calls
from halfstep.compat import adamw_bfloat16
from halfstep.compat.adamw_bfloat16 import LR, AdamW_BF16


def bf16(n=64, value=None):
    p = torch.randn(n) if value is None else torch.full((n,), float(value))
    return torch.nn.Parameter(p.to(torch.bfloat16))


def constant(lr):
    return LR(preheat_steps=1, lr=lr, decay_power=0)


def schedule_of(opt, group=0):
    """Returns the numbers that a group keeps of an LR."""
    return tuple(opt.param_groups[group][key] for key in ("lr", "preheat_steps", "decay_power"))


# ---- The interface -------------------------------------------------------------------------------


def test_public_names():
    assert adamw_bfloat16.__all__ == ["LR", "AdamW_BF16"]


def test_signatures():
    found = inspect.signature(AdamW_BF16).parameters
    assert [(p.name, p.kind) for p in found.values()] == [
        ("params", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        ("lr_function", inspect.Parameter.KEYWORD_ONLY),
        ("betas", inspect.Parameter.KEYWORD_ONLY),
        ("eps", inspect.Parameter.KEYWORD_ONLY),
        ("weight_decay", inspect.Parameter.KEYWORD_ONLY),
        ("options", inspect.Parameter.VAR_KEYWORD),
    ]
    assert found["lr_function"].default == LR(preheat_steps=3000, lr=1e-3, decay_power=-0.5)
    assert [found[name].default for name in ("betas", "eps", "weight_decay")] == [
        (0.9, 0.999),
        1e-8,
        0,
    ]
    assert [(p.name, p.default) for p in inspect.signature(LR).parameters.values()] == [
        ("preheat_steps", 3000),
        ("lr", 1e-3),
        ("decay_power", -0.5),
    ]
    step = list(inspect.signature(AdamW_BF16.step).parameters.values())[1]
    assert (step.name, step.default) == ("zero_grad", False)
    assert AdamW_BF16.decay_threshold == 5e-3


def test_readme_snippet():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    inputs, targets = torch.randn(32, 8).bfloat16(), torch.randint(4, (32,))
    losses = []

    # ---- the package's README, but for its import line
    model = model.to(torch.bfloat16)

    # default preheat and decay
    optimizer = AdamW_BF16(model.parameters())
    no_arguments = optimizer

    # configure LR schedule. Use built-in scheduling opportunity
    optimizer = AdamW_BF16(
        model.parameters(), lr_function=LR(lr=1e-4, preheat_steps=5000, decay_power=-0.25)
    )
    configured = optimizer

    optimizer = AdamW_BF16(model.parameters(), lr_function=LR(lr=1e-2, preheat_steps=20))
    for i in range(60):
        loss = torch.nn.functional.cross_entropy(model(inputs).float(), targets)
        losses.append(loss.item())
        # in the loop:
        loss.backward()
        if i < 30:
            optimizer.step()
            optimizer.zero_grad()
        else:
            # Or you can even replace last two lines with one:
            optimizer.step(zero_grad=True)
    # ----
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert schedule_of(no_arguments) == (1e-3, 3000, -0.5)
    assert schedule_of(configured) == (1e-4, 5000, -0.25)
    assert optimizer.recipe(model[0].weight) == "adamw-delayed/bf16-kahan/bf16-sr"


# ---- The schedule --------------------------------------------------------------------------------


def test_lr_has_the_published_values():
    lr = LR()
    for step, value in (
        (1, 6.667e-7),
        (2998, 9.9967e-4),
        (2999, 1e-3),
        (3000, 9.9983e-4),
        (12000, 4.9998e-4),
    ):
        assert lr(step) == pytest.approx(value, rel=1e-4)
    assert max(range(1, 6000), key=lr) == 2999


@pytest.mark.parametrize(
    "lr",
    [
        LR(),
        LR(lr=1e-4, preheat_steps=5000, decay_power=-0.25),
        LR(preheat_steps=1, decay_power=0),
        LR(preheat_steps=7, lr=3.0, decay_power=-1.0),
    ],
    ids=str,
)
def test_the_library_follows_lr(lr):
    handle, group, value = ctypes.c_void_p(), ctypes.c_int32(), ctypes.c_double()
    abi.check(abi.lib.halfstep_create(None, ctypes.byref(handle)))
    try:
        abi.check(abi.lib.halfstep_add_group(handle, b"adamw-delayed", ctypes.byref(group)))
        abi.check(abi.lib.halfstep_set_choice(handle, group, b"schedule", b"inverse-power"))
        for name, number in (
            (b"lr", lr.lr),
            (b"warmup_steps", lr.preheat_steps),
            (b"power", lr.decay_power),
        ):
            abi.check(abi.lib.halfstep_set_hyper(handle, group, name, float(number)))
        for step in range(1, 12001):
            calls.change(handle, abi.RECORD_GROUP, group.value, steps=step - 1)
            abi.check(abi.lib.halfstep_current_lr(handle, group, ctypes.byref(value)))
            assert math.isclose(value.value, lr(step), rel_tol=1e-14), step
    finally:
        abi.lib.halfstep_destroy(handle)


def test_the_steps_of_an_optimizer_follow_lr():
    """eps is far above the gradients and the first moment has no memory. A step is then lr * sqrt(1
    - beta2^t) * g / eps."""
    lr = LR(preheat_steps=5, lr=0.5)
    p = torch.nn.Parameter(torch.zeros(3))
    opt = AdamW_BF16([p], lr_function=lr, betas=(0.0, 0.5), eps=1.0)
    for step in range(1, 13):
        before = p.detach().clone()
        p.grad = torch.full((3,), 1e-4)
        opt.step()
        wanted = lr(step) * math.sqrt(1 - 0.5**step) * 1e-4
        torch.testing.assert_close(before - p.detach(), torch.full((3,), wanted), rtol=1e-3, atol=0)


def test_a_group_keeps_three_numbers():
    p = bf16()
    opt = AdamW_BF16([p], lr_function=LR(lr=1e-2, preheat_steps=10))
    assert not any(isinstance(value, LR) for value in opt.param_groups[0].values())
    set_gradients({"p": p}, 0)
    opt.step()
    fresh = AdamW_BF16([bf16()])
    fresh.load_state_dict(saved(opt.state_dict()))
    assert schedule_of(fresh) == (1e-2, 10, -0.5)


def test_groups_may_have_an_lr_of_their_own():
    slow, fast, later = bf16(), bf16(), bf16()
    given = [{"params": [slow], "lr_function": LR(lr=0.0)}, {"params": [fast]}]
    opt = AdamW_BF16(given, lr_function=LR(lr=1e-2, preheat_steps=1))
    opt.add_param_group({"params": [later], "lr_function": LR(2, 1e-3, -1.0)})
    assert "lr_function" in given[0] and "lr_function" not in opt.param_groups[0]
    assert schedule_of(opt, 0) == (0.0, 3000, -0.5)
    assert schedule_of(opt, 1) == (1e-2, 1, -0.5)
    assert schedule_of(opt, 2) == (1e-3, 2, -1.0)
    before = [opt.read_weight(p) for p in (slow, fast, later)]
    set_gradients({"slow": slow, "fast": fast, "later": later}, 0)
    opt.step()
    moved = [not torch.equal(a, opt.read_weight(p)) for a, p in zip(before, (slow, fast, later))]
    assert moved == [False, True, True]


def test_a_scheduler_multiplies():
    p = torch.nn.Parameter(torch.zeros(1))
    opt = AdamW_BF16([p], lr_function=constant(0.5), betas=(0.0, 0.0), eps=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.1**step)
    moved = []
    for _ in range(3):
        before = p.item()
        p.grad = torch.full((1,), 1e-4)
        opt.step()
        scheduler.step()
        moved.append(before - p.item())
    assert moved == pytest.approx([5e-5, 5e-6, 5e-7], rel=1e-3)


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"lr_function": lambda step: 1e-3}, TypeError, "must be an LR"),
        ({"lr_function": LR(decay_power=0.5)}, ValueError, "decay_power"),
        ({"lr_function": LR(preheat_steps=0)}, ValueError, "preheat_steps"),
        ({"lr_function": LR(preheat_steps=2.5)}, ValueError, "preheat_steps"),
        ({"lr_function": LR(lr=-1.0)}, ValueError, "Invalid learning rate"),
        ({"lr_function": LR(lr=math.nan)}, ValueError, "Invalid learning rate"),
    ],
)
def test_errors(options, error, text):
    with pytest.raises(error, match=text):
        AdamW_BF16([bf16()], **options)


# ---- The rule ------------------------------------------------------------------------------------


def exact(weights, gradients, lr, betas, eps, steps):
    """The published rule without decay, in fp64."""
    w, m, v = (
        weights.double(),
        torch.zeros_like(weights).double(),
        torch.zeros_like(weights).double(),
    )
    for t in range(1, steps + 1):
        g = gradients(t).double()
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        w = w - lr(t) * math.sqrt(1 - betas[1] ** t) * m / (v.sqrt() + eps)
    return w


def gradients_of(n):
    return lambda t: torch.randn(n, generator=torch.Generator().manual_seed(t)) * 0.1


def test_trajectory_in_fp32():
    p, gradients, lr = (
        torch.nn.Parameter(torch.randn(500)),
        gradients_of(500),
        LR(preheat_steps=50, lr=1e-2),
    )
    wanted = exact(p.detach().clone(), gradients, lr, (0.9, 0.99), 1e-6, 300)
    opt = AdamW_BF16([p], lr_function=lr, betas=(0.9, 0.99), eps=1e-6)
    for t in range(1, 301):
        p.grad = gradients(t)
        opt.step()
    assert (p.detach().double() - wanted).abs().max() < 6e-6


@pytest.mark.parametrize("weights", ["bf16-kahan", "bf16-ecc8", "bf16"])
def test_small_steps_arrive(weights):
    """lr is 1e-5 on weights of 1.0, whose last place is 8e-3. Rounding to nearest is the control
    that must fail."""
    p = bf16(2048, 1.0)
    opt = AdamW_BF16([p], lr_function=constant(1e-5), betas=(0.9, 0.95), weights=weights)
    for _ in range(500):
        p.grad = torch.ones_like(p)
        opt.step()
    wanted = exact(torch.ones(1), lambda t: torch.ones(1), constant(1e-5), (0.9, 0.95), 1e-8, 500)
    moved = (1 - opt.read_weight(p).double().mean()).item() / (1 - wanted.item())
    if weights == "bf16":
        assert moved == 0
    else:
        assert moved == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-3])
def test_decay_arrives_in_lumps(rate):
    """The decay of n steps arrives, except for at most one lump that is still owed or came
    early."""
    p = bf16(64, 1.0)
    opt = AdamW_BF16([p], lr_function=constant(1e-2), weight_decay=rate / 1e-2)
    n = int(0.1 / rate) if rate > 1e-6 else 20000
    p.grad = torch.zeros_like(p)
    seen = set()
    for step in range(n):
        opt.step()
        if step % 50 == 0:
            seen.add(opt.read_weight(p)[0].item())
    assert (opt.read_weight(p).double().mean().log() + n * rate).abs() < 5e-3 + 2 * rate
    assert len(seen) <= n * rate / 5e-3 + 3


def test_decay_threshold_is_the_class_s():
    class Eager(AdamW_BF16):
        decay_threshold = 0.0

    p = bf16(64, 1.0)
    opt = Eager([p], lr_function=constant(1e-2), weight_decay=1e-2)
    p.grad = torch.zeros_like(p)
    for _ in range(50):
        opt.step()
        assert opt.scalar(p, "accumulated_decay") == 0.0
    assert opt.read_weight(p).double().mean().item() == pytest.approx((1 - 1e-4) ** 50, rel=1e-4)


# ---- step() --------------------------------------------------------------------------------------


def test_zero_grad_is_in_place():
    p, q = bf16(), bf16()
    opt = AdamW_BF16([p, q])
    set_gradients({"p": p}, 0)
    gradient = p.grad
    opt.step(zero_grad=True)
    assert p.grad is gradient and not gradient.any() and q.grad is None
    set_gradients({"p": p}, 1)
    gradient = p.grad.clone()
    opt.step()
    assert torch.equal(p.grad, gradient)


def test_a_refused_step_zeroes_and_moves_nothing():
    p = bf16()
    opt = AdamW_BF16([p], lr_function=constant(1e-2))
    run(opt, {"p": p}, 0, 3)
    before = everything(opt)
    p.grad[5] = math.nan
    with pytest.warns(RuntimeWarning, match="not finite"):
        opt.step(zero_grad=True)
    assert opt.skipped_steps == 1 and not p.grad.any() and bits(p) == before[0][0]
    set_gradients({"p": p}, 4)
    opt.step(True)
    assert bits(p) != before[0][0]


@pytest.mark.parametrize("how", ["positional", "named", "with zero_grad"])
def test_closure(how):
    p = bf16()
    opt = AdamW_BF16([p], lr_function=constant(1e-2))

    def closure():
        opt.zero_grad()
        loss = (p.float() ** 2).sum()
        loss.backward()
        return loss

    before = (p.detach().float() ** 2).sum()
    loss = {
        "positional": lambda: opt.step(closure),
        "named": lambda: opt.step(closure=closure),
        "with zero_grad": lambda: opt.step(True, closure),
    }[how]()
    assert torch.equal(loss.detach(), before)
    assert bool(p.grad.any()) == (how != "with zero_grad")


def test_hooks_run_once():
    p, calls = bf16(), []
    opt = AdamW_BF16([p])
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))
    p.grad = torch.ones_like(p)
    opt.step(zero_grad=True)
    assert calls == ["pre", "post"]


# ---- Saving, and the fake step of distributed checkpoints ----------------------------------------


def test_a_step_of_lr_0_and_zero_gradients_moves_nothing():
    params = parameters(torch.bfloat16)
    opt = AdamW_BF16(params.values(), lr_function=constant(1e-2), weight_decay=0.1)
    run(opt, params, 0, 20)
    before = [(bits(p), bits(opt.read_weight(p))) for p in params.values()]
    for group in opt.param_groups:
        group["lr"] = 0.0
    for p in params.values():
        p.grad = torch.zeros_like(p)
    for _ in range(5):
        opt.step()
    assert [(bits(p), bits(opt.read_weight(p))) for p in params.values()] == before


def test_distributed_checkpoint_may_prime_a_fresh_optimizer():
    dcp = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    model = torch.nn.Sequential(torch.nn.Linear(40, 33), torch.nn.LayerNorm(33)).bfloat16()
    opt = AdamW_BF16(model.parameters(), lr_function=constant(0.1), weight_decay=0.5)
    before = [bits(p) for p in model.parameters()]
    primed = dcp.get_optimizer_state_dict(model, opt)
    assert [bits(p) for p in model.parameters()] == before
    assert opt.param_groups[0]["lr"] == 0.1
    assert "0.weight" in primed["state"]


@pytest.mark.parametrize(
    "options", [{}, {"weights": "bf16-ecc8", "states": "int8"}], ids=["default", "ecc8-int8"]
)
def test_resume_is_bit_exact(options):
    make = dict(lr_function=LR(preheat_steps=8, lr=1e-2), weight_decay=0.5, **options)
    params = parameters(torch.bfloat16)
    opt = AdamW_BF16(params.items(), **make)
    run(opt, params, 0, 10)
    others = twins(params)
    resumed = AdamW_BF16(others.items(), **options)
    resumed.load_state_dict(saved(opt.state_dict()))
    copied = copy.deepcopy(opt)
    pickled = pickle.loads(pickle.dumps(opt))
    run(opt, params, 10, 20)
    run(resumed, others, 10, 20)
    assert everything(resumed) == everything(opt)
    for other in (copied, pickled):
        run(other, dict(zip(params, other.param_groups[0]["params"])), 10, 20)
        assert everything(other) == everything(opt)


def test_states_of_the_package_load():
    """A file as its class writes it: BF16 states, `shift`, and an LR in the group."""
    p = bf16(96)
    n = len(p)
    state = {
        "step": 40.0,
        "exp_avg": torch.randn(n).bfloat16() * 0.01,
        "exp_avg_sq": torch.rand(n).bfloat16() * 1e-4,
        "shift": (torch.rand(n) - 0.5).bfloat16() * p.detach().abs() * 2**-8,
        "accumulated_decay": 0.00321,
    }
    group = {
        "lr_function": LR(100, 5e-3, -0.25),
        "betas": (0.8, 0.95),
        "eps": 1e-7,
        "weight_decay": 0.25,
        "params": [0],
    }
    opt = AdamW_BF16([p])
    opt.load_state_dict({"state": {0: state}, "param_groups": [group]})
    found = opt.param_groups[0]
    assert schedule_of(opt) == (5e-3, 100, -0.25)
    assert [found[key] for key in ("betas", "eps", "weight_decay")] == [(0.8, 0.95), 1e-7, 0.25]
    assert "lr_function" not in found
    assert bits(opt.state[p]["weight.extra"]) == bits(state["shift"])
    assert bits(opt.state[p]["exp_avg_sq"]) == bits(state["exp_avg_sq"])
    torch.testing.assert_close(
        opt.read_weight(p), p.detach().float() + state["shift"].float(), rtol=0, atol=0
    )
    g = torch.randn(n).bfloat16()
    start = opt.read_weight(p).double()
    m = 0.8 * state["exp_avg"].double() + 0.2 * g.double()
    v = 0.95 * state["exp_avg_sq"].double() + 0.05 * g.double() ** 2
    wanted = start - LR(100, 5e-3, -0.25)(41) * math.sqrt(1 - 0.95**41) * m / (v.sqrt() + 1e-7)
    p.grad = g
    opt.step()
    assert opt.scalar(p, "accumulated_decay") == pytest.approx(
        0.00321 + 0.25 * LR(100, 5e-3, -0.25)(41)
    )
    torch.testing.assert_close(opt.read_weight(p).double(), wanted, rtol=1e-4, atol=1e-5)


def test_bytes():
    """10 bytes per parameter: 37.5 % less than the 16 of AdamW in fp32."""
    p = bf16(4096)
    opt = AdamW_BF16([p])
    p.grad = torch.zeros_like(p)
    opt.step()
    assert sum(opt.memory().values()) == 10 * 4096
    held = streams(opt, p).values()
    assert sum(t.numel() * t.element_size() for t in held) == 6 * 4096
