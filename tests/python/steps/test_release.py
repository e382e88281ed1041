"""Tests gradient release, with accumulation, clipping and schedulers, and the step protocols of
trainers."""

import copy
import gc
import math

import pytest
import torch
from conftest import (
    RECIPES,
    assert_close,
    bits,
    loss_of,
    make_network,
    network,
    randn,
    recipes,
    rules,
    same,
    same_steps,
    saved,
    states,
    told,
    train,
    warnings_are,
    weights_of,
)
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import halfstep
from halfstep._library import abi


def pair(rule="adamw", recipe="f32", **options):
    """Makes equal models with equal optimizers, of which the first releases gradients."""
    for release in (True, False):
        yield from make_network(rule, recipe, gradient_release=release, **options)


@rules
@recipes
def test_gradient_release_gives_the_bits_of_a_plain_step(rule, recipe):
    if abi.rules[rule].totals:
        with pytest.raises(ValueError, match="sums over the gradients of all tensors"):
            list(pair(rule, recipe))
        _, opt = make_network(rule, recipe)
        with pytest.raises(ValueError, match="sums over the gradients of all tensors"):
            opt.prepare_gradient_release()
        assert not opt.gradient_release
        return
    model, opt, other, reference = pair(rule, recipe, lr=0.01)
    for step in range(4):
        loss_of(model, step).backward()
        assert all(p.grad is None for p in model.parameters())
        before = weights_of(model)
        opt.step()
        opt.zero_grad()
        assert weights_of(model) == before  # the steps were made in backward
    train(other, reference, 0, 4)
    same(opt, reference, model, other)


def test_gradient_release_by_methods():
    """prepare_gradient_release(), then plain steps again after remove_gradient_release()."""
    model, opt, other, reference = pair()
    for phase in (True, False, True, False):
        if phase:
            opt.prepare_gradient_release()
        else:
            opt.remove_gradient_release()
        for step in range(2):
            loss_of(model, step).backward()
            assert all((p.grad is None) == phase for p in model.parameters())
            opt.step()
            opt.zero_grad()
        train(other, reference, 0, 2)
    same(opt, reference, model, other)


def test_hooks_are_registered_once_and_die_with_the_optimizer():
    model, opt, other, reference = pair()
    opt.prepare_gradient_release()
    opt.load_state_dict(opt.state_dict())
    opt.prepare_gradient_release()
    train(model, opt, 0, 2)
    train(other, reference, 0, 2)
    same(opt, reference, model, other)
    assert opt.state[model[0].weight]["step"].item() == 2
    del opt
    gc.collect()
    before = weights_of(model)
    loss_of(model, 2).backward()
    assert weights_of(model) == before
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("part", [False, True])
def test_an_optimizer_that_is_made_again_takes_over(part):
    """The first one lives on, as in a notebook whose cell is run again. It keeps what the second
    one does not have."""
    model, opt, other, reference = pair()
    train(model, opt, 0, 2)
    train(other, reference, 0, 2)
    left = [model[0], model[2]] if part else []
    here, there = (m[4] if part else m for m in (model, other))
    with told("another optimizer with gradient release takes the gradients of"):
        second = halfstep.AdamW(here.parameters(), seed=1, gradient_release=True)
    again = halfstep.AdamW(there.parameters(), seed=1)
    before = {p: bits(opt.state[p]["exp_avg"]) for p in model.parameters()}
    for step in (2, 3):
        for m, optimizers in ((model, (second, opt)), (other, (again, reference))):
            loss_of(m, step).backward()
            if m is other:  # the parameters that the second one has are stepped by it alone
                again.step()
                again.zero_grad()
            for o in optimizers[: 1 + part]:
                o.step()
                o.zero_grad()
    assert weights_of(model) == weights_of(other)
    for p, found in before.items():
        moved = any(p is q for m in left for q in m.parameters())
        assert (bits(opt.state[p]["exp_avg"]) != found) == moved
    with pytest.raises(RuntimeError, match="call remove_gradient_release"):
        for step in range(3):  # in a loop that has forgotten the second one
            loss_of(model, step).backward()
            opt.step()


@pytest.mark.parametrize("what", ["parameter", "group"])
def test_what_leaves_the_groups_is_left_alone(what):
    """Its gradient stays, as beside torch's optimizers, and it may come back."""
    models = network(), network()
    opts = []
    for model, release in zip(models, (True, False)):
        groups = [{"params": list(layer.parameters())} for layer in (model[0], model[2], model[4])]
        opt = halfstep.AdamW(groups, lr=0.01, seed=1, gradient_release=release)
        train(model, opt, 0, 2)
        left = opt.param_groups[0]["params"].pop() if what == "parameter" else model[0].weight
        if what == "group":
            opt.param_groups.pop(0)
        train(model, opt, 2, 4)
        opts.append((opt, left))
    assert weights_of(models[0]) == weights_of(models[1])
    assert bits(opts[0][1].grad) == bits(opts[1][1].grad)
    for model, (opt, left) in zip(models, opts):
        left.grad = None
        opt.param_groups[0]["params"].append(left)
        train(model, opt, 4, 6)
    same(*(opt for opt, _ in opts), *models)


def test_schedulers_in_release_without_step():
    """The form of optimi's README: only backward() and scheduler.step(). Options are read all the
    same."""
    model, opt, other, reference = pair(lr=0.01)
    with warnings_are("ignore"):  # torch's, that step() was not called
        schedulers = [CosineAnnealingLR(o, T_max=6) for o in (opt, reference)]
        for step in range(5):
            loss_of(model, step).backward()
            loss_of(other, step).backward()
            reference.step()
            reference.zero_grad()
            for s in schedulers:
                s.step()
    assert weights_of(model) == weights_of(other)


@pytest.mark.parametrize("limit", [1e-2, 0.5])
def test_release_with_per_tensor_clipping(limit):
    model, opt = make_network(lr=0.01, gradient_release=True, clip_norm=limit, clip="per-tensor")
    other = network()
    reference = torch.optim.AdamW(other.parameters(), lr=0.01)
    for step in range(5):
        loss_of(model, step).backward()
        opt.step()
        loss_of(other, step).backward()
        for p in other.parameters():
            nn.utils.clip_grad_norm_([p], limit)
        reference.step()
        reference.zero_grad()
    assert_close(model, other, 1e-4, 1e-5)


def test_release_with_delayed_clipping():
    """Clips by the norm of the round before; in the first round by each tensor's own."""
    options = {"gradient_release": True, "clip_norm": 0.05, "clip": "delayed"}
    model, opt = make_network("sgd", lr=0.5, **options)
    other = network()
    reference = torch.optim.SGD(other.parameters(), lr=0.5)
    norm = None
    for step in range(6):
        loss_of(model, step).backward()
        opt.step()
        loss_of(other, step).backward()
        now = math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in other.parameters()))
        for p in other.parameters():
            p.grad.mul_(min(1.0, 0.05 / ((float(p.grad.norm()) if norm is None else norm) + 1e-6)))
        norm = now
        reference.step()
        reference.zero_grad()
        assert math.isclose(opt.grad_norm, now, rel_tol=1e-5)
        assert_close(model, other)


@pytest.mark.parametrize("clip", ["per-tensor", "delayed"])
@pytest.mark.parametrize("recipe", ["f32", "ecc8-int8"])
def test_release_with_clipping_resumes_bit_for_bit(clip, recipe):
    options = {"lr": 0.05, "gradient_release": True, "clip_norm": 0.02, "clip": clip}
    model, opt = make_network("adamw", recipe, **options)
    train(model, opt, 0, 3)
    other, resumed = make_network("adamw", recipe, **options)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved(opt.state_dict()))
    train(model, opt, 3, 6)
    train(other, resumed, 3, 6)
    same(opt, resumed, model, other)


def test_a_copied_model_keeps_its_own_release():
    """Hooks of the original do not step the copy, nor the copy's the original."""
    model, opt = make_network(gradient_release=True)
    train(model, opt, 0, 1)
    other, copied = copy.deepcopy((model, opt))
    before = weights_of(model)
    train(other, copied, 1, 2)
    assert weights_of(model) == before
    assert all(p.grad is None for p in model.parameters())
    train(model, opt, 1, 2)
    assert weights_of(model) == weights_of(other)


@pytest.mark.parametrize("recipe", ["f32", "sr-int4"])
@pytest.mark.parametrize("rule", ["adamw", "lion", "adan", "radam", "stableadamw"])
def test_accumulation_with_and_without_release(rule, recipe):
    """Micro-steps put gradients into states and leave weights alone. Release does not change the
    bits."""
    model, opt, other, reference = pair(rule, recipe, lr=0.01)
    for step in range(8):
        last = step % 4 == 3
        for m, o in ((model, opt), (other, reference)):
            before = weights_of(m)
            o.optimizer_accumulation = not last
            train(m, o, step, step + 1)
            changed = [a != b for a, b in zip(before, weights_of(m))]
            assert all(changed) if last else not any(changed)
    same(opt, reference, model, other)
    assert opt.state_dict()["param_groups"][0]["group_steps"] == 2
    assert all(
        s["step"].item() == 8 and s["full_steps"] == 2 for s in opt.state_dict()["state"].values()
    )


def test_release_accumulation_clipping_and_scheduler_together():
    """All of them together give the results of a reference made of plain steps."""
    options = {"gradient_release": True, "clip_norm": 0.02, "clip": "per-tensor"}
    model, opt = make_network(lr=0.02, **options)
    other, reference = make_network(lr=0.02)
    schedulers = [OneCycleLR(o, max_lr=0.05, total_steps=10) for o in (opt, reference)]
    for step in range(4):
        for micro in range(3):
            opt.optimizer_accumulation = reference.optimizer_accumulation = micro < 2
            train(model, opt, 10 * step + micro, 10 * step + micro + 1)
            loss_of(other, 10 * step + micro).backward()
            if micro == 2:
                for p in other.parameters():
                    nn.utils.clip_grad_norm_([p], 0.02)
            reference.step()
            reference.zero_grad()
        for s in schedulers:
            s.step()
    assert_close(model, other, 1e-4, 1e-5)


def test_release_with_non_finite_gradients(caught):
    """Per tensor: the bad tensor is left alone, the others are stepped."""
    model, opt = make_network(gradient_release=True)
    train(model, opt, 0, 1)
    handle = model[2].weight.register_hook(lambda g: g * math.nan)

    def now():
        return {
            n: (bits(p), s) for (n, p), s in zip(model.named_parameters(), states(opt).values())
        }

    before = now()
    train(model, opt, 1, 2)
    changed = {n for n, found in now().items() if found != before[n]}
    assert changed == {n for n, _ in model.named_parameters()} - {"2.weight"}
    assert opt.skipped_steps == 1
    assert any("2.weight" in str(w.message) for w in caught) and len(caught) == 1
    handle.remove()
    train(model, opt, 2, 3)
    assert bits(model[2].weight) != before["2.weight"][0]


@recipes
def test_step_param_and_step_parameter(recipe):
    """The protocols of the diffusion trainers: one tensor at a time, with its group, and with its
    position."""
    dtype, formats = RECIPES[recipe]
    models, opts = [network(dtype) for _ in range(4)], []
    for m in models:
        named = list(m.named_parameters())
        groups = [{"params": named[:3]}, {"params": named[3:], "lr": 0.05}]
        opts.append(halfstep.AdamW(groups, **formats, seed=0))
    assert opts[0].supports_fused_back_pass() is True
    for step in range(3):
        for m in models:
            loss_of(m, step).backward()
        opts[0].step()
        for g in opts[1].param_groups:
            for p in g["params"]:
                opts[1].step_param(p, g)
        for g in reversed(opts[2].param_groups):
            for i, p in reversed(list(enumerate(g["params"]))):
                opts[2].step_parameter(p, g, i)
        for p in models[3].parameters():
            opts[3].step_param(p)
        for m in models:
            m.zero_grad()
        for o in opts[1:]:
            o.step()
            o.zero_grad()
    for m, o in zip(models[1:], opts[1:]):
        same(o, opts[0], m, models[0])


def test_step_param_without_gradient_or_of_another():
    model, opt = make_network()
    before = weights_of(model)
    opt.step_param(model[0].weight)
    assert weights_of(model) == before
    stranger = nn.Parameter(torch.ones(3))
    stranger.grad = torch.ones(3)
    with pytest.raises((ValueError, KeyError)):
        opt.step_param(stranger)
    assert torch.equal(stranger, torch.ones(3))


def test_gradients_set_by_hand_in_release_mode():
    """step() steps tensors whose .grad is there."""
    model, opt, other, reference = pair()
    same_steps(opt, reference, model, other, 0, 3)


def test_shared_parameters_are_stepped_once_in_release():
    """A tensor used twice gets its whole gradient, then one step."""

    def tied():
        torch.manual_seed(1)
        first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        second.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), second)

    model, other = tied(), tied()
    opt = halfstep.AdamW(model.named_parameters(), gradient_release=True, seed=0)
    reference = halfstep.AdamW(other.named_parameters(), seed=0)
    for step in range(3):
        x = randn((4, 8), step)
        model(x).pow(2).sum().backward()
        opt.step()
        other(x).pow(2).sum().backward()
        reference.step()
        reference.zero_grad()
    assert opt.state[model[0].weight]["step"].item() == 3
    same(opt, reference, model, other)


def test_release_refuses_a_loop_that_accumulates():
    """Trainers make four backward passes and one step(). That raises an exception at the first
    step(), then at the second backward()."""
    model, opt = make_network(gradient_release=True)
    for step in range(4):
        loss_of(model, step).backward()
    with pytest.raises(RuntimeError, match="4 backward passes came before the first step"):
        opt.step()
    loss_of(model, 4).backward()
    with pytest.raises(RuntimeError, match="gradient_accumulation_steps"):
        loss_of(model, 5).backward()
