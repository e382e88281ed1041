"""Tests gradient release, with accumulation, clipping and schedulers, and the step protocols of
trainers."""

import copy
import math
import warnings

import pytest
import torch
from conftest import (
    RECIPES,
    bits,
    class_of,
    loss_of,
    network,
    recipes,
    rules,
    same,
    saved,
    set_gradients,
    states,
)
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import halfstep
from halfstep import _abi


@rules
@recipes
def test_gradient_release_gives_the_bits_of_a_plain_step(rule, recipe):
    dtype, formats = RECIPES[recipe]
    model, other = network(dtype), network(dtype)
    if _abi.rules[rule].totals:
        with pytest.raises(ValueError, match="sums over the gradients of all tensors"):
            class_of(rule)(model.named_parameters(), gradient_release=True, **formats)
        opt = class_of(rule)(model.named_parameters(), **formats)
        with pytest.raises(ValueError, match="sums over the gradients of all tensors"):
            opt.prepare_gradient_release()
        assert not opt.gradient_release
        return
    opt = class_of(rule)(
        model.named_parameters(), lr=0.01, gradient_release=True, **formats, seed=0
    )
    reference = class_of(rule)(other.named_parameters(), lr=0.01, **formats, seed=0)
    for step in range(4):
        loss_of(model, step).backward()
        assert all(p.grad is None for p in model.parameters())
        before = [bits(p) for p in model.parameters()]
        opt.step()
        opt.zero_grad()
        assert [bits(p) for p in model.parameters()] == before  # the steps were made in backward
        loss_of(other, step).backward()
        reference.step()
        reference.zero_grad()
    assert [bits(p) for p in model.parameters()] == [bits(p) for p in other.parameters()]
    assert states(opt) == states(reference)


def test_gradient_release_by_methods():
    """prepare_gradient_release(), then plain steps again after remove_gradient_release()."""
    model, other = network(), network()
    opt, reference = (
        halfstep.AdamW(model.named_parameters(), seed=0),
        halfstep.AdamW(other.named_parameters(), seed=0),
    )
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
            loss_of(other, step).backward()
            reference.step()
            reference.zero_grad()
    same(opt, reference, dict(model.named_parameters()), dict(other.named_parameters()))


def test_hooks_are_registered_once_and_die_with_the_optimizer():
    model, other = network(), network()
    opt = halfstep.AdamW(model.named_parameters(), gradient_release=True, seed=0)
    opt.prepare_gradient_release()
    opt.load_state_dict(opt.state_dict())
    opt.prepare_gradient_release()
    reference = halfstep.AdamW(other.named_parameters(), seed=0)
    for step in range(2):
        loss_of(model, step).backward()
        opt.step()
        loss_of(other, step).backward()
        reference.step()
        reference.zero_grad()
    same(opt, reference, dict(model.named_parameters()), dict(other.named_parameters()))
    assert opt.state[model[0].weight]["step"].item() == 2
    del opt
    import gc

    gc.collect()
    before = [bits(p) for p in model.parameters()]
    loss_of(model, 2).backward()
    assert [bits(p) for p in model.parameters()] == before
    assert all(p.grad is not None for p in model.parameters())


def test_schedulers_in_release_without_step():
    """The form of optimi's README: only backward() and scheduler.step(). Options are read all the
    same."""
    model, other = network(), network()
    opt = halfstep.AdamW(model.named_parameters(), lr=0.01, gradient_release=True, seed=0)
    reference = halfstep.AdamW(other.named_parameters(), lr=0.01, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that step() was not called
        schedulers = [CosineAnnealingLR(o, T_max=6) for o in (opt, reference)]
        for step in range(5):
            loss_of(model, step).backward()
            loss_of(other, step).backward()
            reference.step()
            reference.zero_grad()
            for s in schedulers:
                s.step()
    assert [bits(p) for p in model.parameters()] == [bits(p) for p in other.parameters()]


@pytest.mark.parametrize("limit", [1e-2, 0.5])
def test_release_with_per_tensor_clipping(limit):
    model, other = network(), network()
    opt = halfstep.AdamW(
        model.named_parameters(), lr=0.01, gradient_release=True, clip_norm=limit, clip="per-tensor"
    )
    reference = torch.optim.AdamW(other.parameters(), lr=0.01)
    for step in range(5):
        loss_of(model, step).backward()
        opt.step()
        loss_of(other, step).backward()
        for p in other.parameters():
            torch.nn.utils.clip_grad_norm_([p], limit)
        reference.step()
        reference.zero_grad()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_release_with_delayed_clipping():
    """Clips by the norm of the round before; in the first round by each tensor's own."""
    model, other = network(), network()
    opt = halfstep.SGD(
        model.named_parameters(), lr=0.5, gradient_release=True, clip_norm=0.05, clip="delayed"
    )
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
        for p, q in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", ["per-tensor", "delayed"])
@pytest.mark.parametrize("recipe", ["f32", "ecc8-int8"])
def test_release_with_clipping_resumes_bit_for_bit(clip, recipe):
    dtype, formats = RECIPES[recipe]
    options = {"lr": 0.05, "gradient_release": True, "clip_norm": 0.02, "clip": clip, **formats}
    model = network(dtype)
    opt = halfstep.AdamW(model.named_parameters(), **options, seed=0)
    for step in range(3):
        loss_of(model, step).backward()
        opt.step()
    other = copy.deepcopy(model)
    resumed = halfstep.AdamW(other.named_parameters(), **options, seed=0)
    resumed.load_state_dict(saved(opt.state_dict()))
    for step in range(3, 6):
        for m, o in ((model, opt), (other, resumed)):
            loss_of(m, step).backward()
            o.step()
    assert [bits(p) for p in model.parameters()] == [bits(p) for p in other.parameters()]
    assert states(opt) == states(resumed)


def test_a_copied_model_keeps_its_own_release():
    """Hooks of the original do not step the copy, nor the copy's the original."""
    model = network()
    opt = halfstep.AdamW(model.named_parameters(), gradient_release=True)
    loss_of(model, 0).backward()
    opt.step()
    other, copied = copy.deepcopy((model, opt))
    before = [bits(p) for p in model.parameters()]
    loss_of(other, 1).backward()
    copied.step()
    copied.zero_grad()
    assert [bits(p) for p in model.parameters()] == before
    assert all(p.grad is None for p in model.parameters())
    loss_of(model, 1).backward()
    opt.step()
    opt.zero_grad()
    assert [bits(p) for p in model.parameters()] == [bits(p) for p in other.parameters()]


@pytest.mark.parametrize("recipe", ["f32", "sr-int4"])
@pytest.mark.parametrize("rule", ["adamw", "lion", "adan", "radam", "stableadamw"])
def test_accumulation_with_and_without_release(rule, recipe):
    """Micro-steps put gradients into states and leave weights alone. Release does not change the
    bits."""
    dtype, formats = RECIPES[recipe]
    models, opts = [], []
    for release in (True, False):
        models.append(network(dtype))
        opts.append(
            class_of(rule)(
                models[-1].named_parameters(),
                lr=0.01,
                gradient_release=release,
                optimizer_accumulation=True,
                **formats,
                seed=0,
            )
        )
    for step in range(8):
        last = step % 4 == 3
        for model, opt in zip(models, opts):
            before = [bits(p) for p in model.parameters()]
            opt.optimizer_accumulation = not last
            loss_of(model, step).backward()
            opt.step()
            opt.zero_grad()
            changed = [bits(p) != b for p, b in zip(model.parameters(), before)]
            assert all(changed) if last else not any(changed)
    assert [bits(p) for p in models[0].parameters()] == [bits(p) for p in models[1].parameters()]
    assert states(opts[0]) == states(opts[1])
    assert all(
        s["step"].item() == 8 and s["full_steps"] == 2
        for s in opts[0].state_dict()["state"].values()
    )


def test_release_accumulation_clipping_and_scheduler_together():
    """All of them together give the results of a reference made of plain steps."""
    model, other = network(), network()
    opt = halfstep.AdamW(
        model.named_parameters(),
        lr=0.02,
        gradient_release=True,
        clip_norm=0.02,
        clip="per-tensor",
        seed=0,
    )
    reference = halfstep.AdamW(other.named_parameters(), lr=0.02, seed=0)
    schedulers = [OneCycleLR(o, max_lr=0.05, total_steps=10) for o in (opt, reference)]
    for step in range(4):
        for micro in range(3):
            opt.optimizer_accumulation = reference.optimizer_accumulation = micro < 2
            loss_of(model, 10 * step + micro).backward()
            loss_of(other, 10 * step + micro).backward()
            if micro == 2:
                for p in other.parameters():
                    torch.nn.utils.clip_grad_norm_([p], 0.02)
            opt.step()
            reference.step()
            opt.zero_grad()
            reference.zero_grad()
        for s in schedulers:
            s.step()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_release_with_non_finite_gradients(caught):
    """Per tensor: the bad tensor is left alone, the others are stepped."""
    model = network()
    opt = halfstep.AdamW(model.named_parameters(), gradient_release=True)
    loss_of(model, 0).backward()
    opt.step()
    handle = model[2].weight.register_hook(lambda g: g * math.nan)

    def now():
        return {
            n: (bits(p), s) for (n, p), s in zip(model.named_parameters(), states(opt).values())
        }

    before = now()
    loss_of(model, 1).backward()
    opt.step()
    changed = {n for n, found in now().items() if found != before[n]}
    assert changed == {n for n, _ in model.named_parameters()} - {"2.weight"}
    assert opt.skipped_steps == 1
    assert any("2.weight" in str(w.message) for w in caught) and len(caught) == 1
    handle.remove()
    loss_of(model, 2).backward()
    opt.step()
    assert bits(model[2].weight) != before["2.weight"][0]


@recipes
def test_step_param_and_step_parameter(recipe):
    """The protocols of the diffusion trainers: one tensor at a time, with its group, and with its
    position."""
    dtype, formats = RECIPES[recipe]
    models = [network(dtype) for _ in range(4)]
    opts = []
    for m in models:
        named = list(m.named_parameters())
        opts.append(
            halfstep.AdamW(
                [{"params": named[:3]}, {"params": named[3:], "lr": 0.05}], **formats, seed=0
            )
        )
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
        assert [bits(p) for p in m.parameters()] == [bits(p) for p in models[0].parameters()]
        assert states(o) == states(opts[0])


def test_step_param_without_gradient_or_of_another():
    model = network()
    opt = halfstep.AdamW(model.named_parameters())
    before = [bits(p) for p in model.parameters()]
    opt.step_param(model[0].weight)
    assert [bits(p) for p in model.parameters()] == before
    stranger = torch.nn.Parameter(torch.ones(3))
    stranger.grad = torch.ones(3)
    with pytest.raises((ValueError, KeyError)):
        opt.step_param(stranger)
    assert torch.equal(stranger, torch.ones(3))


def test_gradients_set_by_hand_in_release_mode():
    """step() steps tensors whose .grad is there."""
    model, other = network(), network()
    opt = halfstep.AdamW(model.named_parameters(), gradient_release=True, seed=0)
    reference = halfstep.AdamW(other.named_parameters(), seed=0)
    for step in range(3):
        for m in (model, other):
            set_gradients(dict(m.named_parameters()), step)
        opt.step()
        reference.step()
        opt.zero_grad()
    same(opt, reference, dict(model.named_parameters()), dict(other.named_parameters()))


def test_shared_parameters_are_stepped_once_in_release():
    """A tensor used twice gets its whole gradient, then one step."""

    def tied():
        torch.manual_seed(1)
        first, second = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
        second.weight = first.weight
        return torch.nn.Sequential(first, torch.nn.Tanh(), second)

    model, other = tied(), tied()
    opt = halfstep.AdamW(model.named_parameters(), gradient_release=True, seed=0)
    reference = halfstep.AdamW(other.named_parameters(), seed=0)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(x).pow(2).sum().backward()
        opt.step()
        other(x).pow(2).sum().backward()
        reference.step()
        reference.zero_grad()
    assert opt.state[model[0].weight]["step"].item() == 3
    same(opt, reference, dict(model.named_parameters()), dict(other.named_parameters()))


def test_release_refuses_a_loop_that_accumulates():
    """Trainers make four backward passes and one step(). That raises an exception at the first
    step(), then at the second backward()."""
    model = network()
    opt = halfstep.AdamW(model.named_parameters(), gradient_release=True)
    for step in range(4):
        loss_of(model, step).backward()
    with pytest.raises(RuntimeError, match="4 backward passes came before the first step"):
        opt.step()
    loss_of(model, 4).backward()
    with pytest.raises(RuntimeError, match="gradient_accumulation_steps"):
        loss_of(model, 5).backward()


def test_release_with_micro_batches_into_the_states_is_no_such_loop():
    model = network()
    opt = halfstep.AdamW(model.named_parameters(), gradient_release=True)
    for step in range(8):
        opt.optimizer_accumulation = step % 4 < 3
        loss_of(model, step).backward()
        opt.step()
    assert all(opt.state[p]["step"].item() == 8 for p in model.parameters())
    assert opt.state_dict()["param_groups"][0]["group_steps"] == 2
