"""Tests where rounds of gradients begin and end: in gradient release, with micro-batches, in sums,
after failed batches and under a GradScaler."""

import math

import pytest
import torch
from conftest import (
    RECIPES,
    bits,
    class_of,
    loss_of,
    make_network,
    network,
    randn,
    recipes,
    same,
    saved,
    told,
    train,
    twins,
    warnings_are,
    weights_of,
)
from torch import nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.compat import flashoptim, optimi


class Fails(torch.autograd.Function):
    """Identity whose backward pass raises once, if told to."""

    now = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Fails.now:
            Fails.now = False
            raise RuntimeError("out of memory")
        return grad


class Net(nn.Module):
    """Two layers. Only the second has its gradient when the backward pass fails."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(48, 64), nn.Linear(64, 32)
        self.to(dtype)

    def forward(self, x):
        return self.second(Fails.apply(torch.tanh(self.first(x))))


def fail(model, step):
    Fails.now = True
    with pytest.raises(RuntimeError, match="out of memory"):
        loss_of(model, step).backward()


# ---- A batch that failed -------------------------------------------------------------------------


@recipes
def test_zero_grad_ends_a_round_that_failed(recipe):
    """Parameters that hooks have stepped stay stepped. Later steps act as if that batch had only
    had these gradients."""
    dtype, formats = RECIPES[recipe]
    model, other = Net(dtype), Net(dtype)
    opt = halfstep.AdamW(
        model.named_parameters(), lr=0.01, gradient_release=True, seed=0, **formats
    )
    reference = halfstep.AdamW(other.named_parameters(), lr=0.01, seed=0, **formats)
    for step in range(6):
        if step in (0, 3):
            fail(model, step)
            opt.zero_grad()
            loss_of(other, step).backward()
            other.first.zero_grad()
            reference.step()
            reference.zero_grad()
        else:
            train(model, opt, step, step + 1)
            train(other, reference, step, step + 1)
    same(opt, reference, model, other)


def test_without_zero_grad_the_next_backward_is_refused():
    """It cannot be told from accumulation. The error says what helps."""
    model = Net()
    opt = halfstep.AdamW(model.named_parameters(), gradient_release=True)
    train(model, opt, 0, 1)
    fail(model, 1)
    with pytest.raises(
        RuntimeError, match="after a batch whose backward.. failed call optimizer.zero_grad"
    ):
        loss_of(model, 2).backward()
    opt.zero_grad()
    train(model, opt, 3, 4)


@pytest.mark.told("step.. has nothing to do")
@pytest.mark.told("zero_grad.. has nothing to do")
def test_release_of_other_packages_after_a_batch_that_failed():
    for make in (
        lambda m: (
            flashoptim.enable_gradient_release(
                m, flashoptim.FlashAdamW(m.parameters(), lr=0.01)
            )._optimizer
        ),
        lambda m: (
            opt := optimi.AdamW(m.parameters(), lr=0.01, gradient_release=True),
            optimi.prepare_for_gradient_release(m, opt),
        )[0],
    ):
        model = Net(torch.bfloat16)
        opt = make(model)
        for step in range(4):
            if step == 1:
                fail(model, step)
            else:
                loss_of(model, step).backward()
            with warnings_are("ignore"):
                opt.step()
                opt.zero_grad()
        layers = model.first, model.second
        assert [opt.state[layer.weight]["step"] for layer in layers] == [3, 4]


def test_the_norm_of_a_dropped_round_is_not_clipped_by():
    """Half of a round has half of its norm. The next round would be clipped too little by it."""
    for rounds in (0, 1):
        model = Net()
        opt = halfstep.SGD(
            model.named_parameters(), lr=0.1, gradient_release=True, clip_norm=0.01, clip="delayed"
        )
        train(model, opt, 0, rounds)
        norm = opt.grad_norm
        fail(model, 1)
        opt.zero_grad()
        assert opt.grad_norm == norm and (norm > 0) == bool(rounds)


@pytest.mark.parametrize("format", ["f32", "bf16-sr"])
def test_sums_are_dropped_by_zero_grad(format):
    model = Net(torch.bfloat16)
    accumulator = halfstep.GradientAccumulator(model, format, seed=0).attach()
    opt = halfstep.AdamW(model.named_parameters(), clip_norm=1.0, scan="known-finite")
    (loss_of(model, 0) * math.nan).backward()
    assert accumulator.memory() > 0
    opt.zero_grad()
    assert accumulator.memory() == 0
    loss_of(model, 1).backward()
    accumulator.reassign()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    # Other optimizers' zero_grad() is of their parameters.
    loss_of(model, 1).backward()
    halfstep.AdamW([Parameter(torch.ones(3))]).zero_grad()
    assert accumulator.memory() > 0
    accumulator.clear()
    assert accumulator.memory() == 0


# ---- Who scales ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["release", "fused", "flashoptim", "optimi", "several losses"])
@pytest.mark.told("zero_grad.. has nothing to do", kind="flashoptim")
@pytest.mark.told("step.. has nothing to do", kind="flashoptim")
def test_a_gradscaler_is_refused_before_the_step(kind):
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if kind == "flashoptim":
        opt = flashoptim.FlashAdamW(model.parameters(), master_weight_bits=None)
        flashoptim.enable_gradient_release(model, opt)
    elif kind == "optimi":
        opt = optimi.AdamW(model.parameters(), lr=0.1, gradient_release=True)
        optimi.prepare_for_gradient_release(model, opt)
    else:
        opt = halfstep.SGD(
            model.named_parameters(), lr=1e-3, gradient_release=True, fused=kind == "fused"
        )
    before = weights_of(model)
    loss = loss_of(model, 0)
    scaled = scaler.scale([loss, loss * 2])[1] if kind == "several losses" else scaler.scale(loss)
    with pytest.raises(RuntimeError, match="halfstep: the loss was scaled by a GradScaler"):
        scaled.backward()
    assert weights_of(model) == before
    opt.zero_grad()
    # The scaler of another model, and one that is switched off, are nobody's business.
    other = network()
    scaler.scale(loss_of(other, 0)).backward()
    loss_of(model, 0).backward()
    opt.step()
    opt.zero_grad()
    torch.amp.GradScaler("cpu", enabled=False).scale(loss_of(model, 1)).backward()
    assert weights_of(model) != before


# ---- Reentrant checkpointing ---------------------------------------------------------------------


def tied(reentrant):
    torch.manual_seed(1)
    shared, own = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(x):
        for layer in (shared, own, shared):
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=reentrant)
        return x.square().mean()

    return nn.ModuleList([shared, own]), forward


@pytest.mark.parametrize("ends", ["backward", "step", "zero_grad"])
def test_reentrant_checkpointing_of_a_shared_parameter_is_refused(ends):
    """In the backward pass, where step() has been called before; else as soon as the round is
    over."""
    model, forward = tied(True)
    opt = halfstep.AdamW(model.named_parameters(), gradient_release=True)
    x = torch.randn(4, 8, requires_grad=True)
    if ends == "backward":
        model[0](x).sum().backward()
        opt.step()
        with pytest.raises(RuntimeError, match="in parts.*use_reentrant"):
            forward(x).backward()
    else:
        forward(x).backward()
        with pytest.raises(RuntimeError, match="in parts.*use_reentrant"):
            getattr(opt, ends)()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_what_is_not_shared(reentrant):
    models, opts = [], []
    for release in (True, False):
        model, _ = tied(reentrant)
        models.append(model)
        opts.append(halfstep.AdamW(model.named_parameters(), gradient_release=release, seed=0))
    for step in range(3):
        x = randn((4, 8), step).requires_grad_()
        for model, opt in zip(models, opts):
            y = x
            for layer in model:
                y = checkpoint(
                    lambda z, layer=layer: torch.tanh(layer(z)), y, use_reentrant=reentrant
                )
            y.square().mean().backward()
            opt.step()
            opt.zero_grad()
    same(*opts, *models)


# ---- Micro-batches -------------------------------------------------------------------------------


def micro_batches(rule, recipe, release, idle, zeros=False, steps=2, save=False, **options):
    """Makes two equal parameters. b has no gradient, or one of zeros, in the micro-batches that
    `idle` names."""
    dtype, formats = RECIPES[recipe]
    params = {name: Parameter(torch.ones(16, 64).to(dtype)) for name in "ab"}

    def make(ps):
        return class_of(rule)(
            ps.items(),
            lr=0.01,
            seed=0,
            weight_decay=0.0,
            gradient_release=release,
            **formats,
            **options,
        )

    opt = make(params)
    for step in range(steps):
        for micro in range(4):
            opt.optimizer_accumulation = micro < 3
            loss = params["a"].float().sum()
            if micro not in idle or zeros:
                loss = loss + params["b"].float().sum() * (micro not in idle)
            loss.backward()
            opt.step()
            opt.zero_grad()
            if save and micro == 1:
                file = saved(opt.state_dict())
                params = twins(params)
                opt = make(params)
                opt.load_state_dict(file)
    return params, opt


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize(
    "rule, recipe",
    [
        ("adamw", "f32"),
        ("lion", "kahan"),
        ("adan", "bf16-sr"),
        ("stableadamw", "ecc8-int8"),
        ("ademamix", "sr-int4"),
        ("muon", "f32"),
    ],
)
def test_a_parameter_without_a_gradient_in_the_last_micro_batch_is_stepped(rule, recipe, release):
    """It is stepped as by a gradient of zeros. A parameter without any gradient is left alone."""
    want, opt = micro_batches(rule, recipe, False, (3,), zeros=True)
    got, other = micro_batches(rule, recipe, release, (3,))
    same(other, opt, got, want)
    assert all(
        s["full_steps"] == 2 and s["step"] == 8 for s in other.state_dict()["state"].values()
    )
    assert all(p.grad is None for p in got.values())
    assert not bits(got["b"]) == bits(torch.ones_like(got["b"]))
    alone, opt = micro_batches(rule, recipe, release, (0, 1, 2, 3))
    assert torch.equal(alone["b"], torch.ones_like(alone["b"])) and (
        not opt.state.get(alone["b"]) or opt.state[alone["b"]]["step"] == 0
    )


def test_micro_batches_are_remembered_by_what_is_saved():
    for release in (False, True):
        want, opt = micro_batches("adamw", "ecc8-int8", release, (2, 3))
        got, other = micro_batches("adamw", "ecc8-int8", release, (2, 3), save=True)
        same(other, opt, got, want)
    assert "pending" not in other.state_dict()


def test_a_refused_last_micro_batch_leaves_what_was_gathered():
    params, opt = micro_batches("adamw", "f32", False, (3,), steps=1)
    opt.optimizer_accumulation = True
    params["b"].grad = torch.ones_like(params["b"])
    opt.step()
    before = weights_of(params)
    opt.optimizer_accumulation, params["b"].grad = False, None
    params["a"].grad = torch.full_like(params["a"], math.nan)
    with told("'a' is not finite"):
        opt.step()
    assert weights_of(params) == before and params["b"].grad is None and opt.skipped_steps == 1
    params["a"].grad = torch.ones_like(params["a"])
    opt.step()
    assert bits(params["b"]) != before[1]


# ---- Schedulers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["step_param", "step_parameter", "release"])
def test_schedulers_see_single_steps(form, caught):
    model, opt = make_network(gradient_release=form == "release")
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 0.5**n)
    loss_of(model, 0).backward()
    if form != "release":
        for p in model.parameters():
            getattr(opt, form)(p, opt.param_groups[0])
    scheduler.step()
    assert not caught and opt.param_groups[0]["lr"] == 5e-4
