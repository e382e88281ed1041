"""Tests tensors whose memory does not hold their values. torch negates them when it reads them,
knows that they are zero, or has freed them. The library reads memory, so each is resolved first, or
refused by name."""

import pytest
import torch
from conftest import (
    RECIPES,
    RULES,
    bits,
    class_of,
    everything,
    parameters,
    run,
    saved,
    set_gradients,
    states,
    weights_of,
)
from torch.nn import Parameter

import halfstep
from halfstep._library import abi
from halfstep._tensors import devices
from halfstep.compat import flashoptim, optimi


def negated(tensor):
    """Returns the same numbers, as a view that negates what its memory holds."""
    return torch._neg_view(tensor.detach().neg())


def imaginary(tensor):
    """Returns the same numbers as the imaginary part of a conjugate: every other element of its
    memory, negated."""
    found = torch.complex(torch.zeros_like(tensor), -tensor.detach()).conj().imag
    assert found.is_neg() and not found.is_contiguous() or tensor.numel() < 2
    return found


SHAPES = {"matrix": (24, 96), "vector": (33,), "scalar": (), "one": (1, 1)}


@pytest.mark.parametrize(
    "rule, recipe", [(rule, list(RECIPES)[i % len(RECIPES)]) for i, rule in enumerate(RULES)]
)
def test_steps(rule, recipe):
    """A gradient or weight that is such a view is stepped to the bits of the plain one. Every rule
    runs, with the recipes in turn, released or not."""
    dtype, formats = RECIPES[recipe]
    release = not abi.rules[rule].totals
    plain, seen, kept = (parameters(dtype, SHAPES) for _ in range(3))
    for p in kept.values():
        p.data = negated(p)
        assert p.is_neg()
    opts = [
        class_of(rule)(ps.items(), lr=0.01, seed=0, clip_norm=1.0, clip="per-tensor", **formats)
        for ps in (plain, seen, kept)
    ]
    for step in range(3):
        for params, opt in zip((plain, seen, kept), opts):
            set_gradients(params, step)
            if params is not plain:
                for p in params.values():
                    p.grad = negated(p.grad)
            if step == 2 and release:  # as in gradient release
                for p in params.values():
                    opt.step_param(p)
            else:
                opt.step()
    assert [bits(p.resolve_neg()) for p in kept.values()] == weights_of(plain) == weights_of(seen)
    assert states(opts[0]) == states(opts[1]) == states(opts[2])


@pytest.mark.parametrize("given", [0.0, 1e-3])
def test_a_gradient_that_autograd_made(given):
    """The gradient comes through an imaginary part. Descent stays descent, from the first step on
    and after plain ones."""
    p = Parameter(torch.zeros(4, 4))
    opt = halfstep.SGD([p], lr=0.1, clip_norm=given and 1e9)
    for step in range(4):
        p.grad = imaginary(torch.ones(4, 4)) if step else torch.ones(4, 4)
        opt.step()
    assert torch.allclose(p.detach(), torch.full((4, 4), -0.4))
    q = Parameter(torch.zeros(8, 8))
    opt = halfstep.AdamW([q], lr=0.1, weight_decay=0.0, gradient_release=True)
    for _ in range(3):
        apart = (torch.complex(torch.ones(8, 8), q).conj() * 1j).real - 1.0  # q - 1
        apart.square().sum().backward()
    assert q.detach().mean() > 0.25


def test_the_fast_path_looks_at_the_bit():
    """Gradients have been plain for long. In another case a weight's memory stays and only its sign
    changes."""
    p, q = (Parameter(torch.zeros(16, 16)) for _ in range(2))
    opt = halfstep.SGD([("p", p), ("q", q)], lr=1.0)
    for step in range(8):
        for one in (p, q):
            one.grad = negated(torch.ones(16, 16)) if step in (5, 7) else torch.ones(16, 16)
        opt.step()
    assert torch.equal(p.detach(), torch.full((16, 16), -8.0)) and torch.equal(p, q)
    p.data = torch._neg_view(p.data)
    assert p.mean() == 8.0
    opt.step()
    assert p.mean() == 7.0 and q.mean() == -9.0


def as_plain(of_plain, of_others, accumulates=False):
    """Steps two optimizers, whose gradients two functions make of a parameter that has one and of
    the step. They must end with the same bits."""
    found = []
    for make in (of_plain, of_others):
        params = parameters(torch.bfloat16, SHAPES)
        opt = halfstep.AdamW(params.items(), lr=0.01, seed=0)
        for step in range(4):
            opt.optimizer_accumulation = accumulates and step % 2 == 0
            set_gradients(params, step)
            for p in params.values():
                p.grad = make(p, step)
            opt.step()
        found.append(everything(opt))
    assert found[0] == found[1]


def test_micro_batches_and_sums():
    as_plain(lambda p, step: p.grad, lambda p, step: negated(p.grad), accumulates=True)
    for fmt in ("f32", "bf16", "bf16-sr"):
        p = Parameter(torch.zeros(16, 16).bfloat16())
        accumulator = halfstep.GradientAccumulator([("p", p)], fmt, seed=0)
        for _ in range(3):
            p.grad = negated(torch.ones(16, 16).bfloat16())
            accumulator._take(0, p)
        accumulator.reassign()
        assert torch.equal(p.grad, torch.full_like(p, 3.0)), fmt


def test_averages():
    for weights, dtype in (
        ("bf16-sr", torch.bfloat16),
        ("bf16-kahan", torch.bfloat16),
        ("f32", torch.float32),
    ):
        model = torch.nn.Linear(16, 16, bias=False).to(dtype)
        ema = halfstep.EMA(model, 0.5, weights=weights, seed=0)
        want = halfstep.EMA(model, 0.5, weights=weights, seed=0)
        view = torch.nn.Linear(16, 16, bias=False).to(dtype)
        for step in range(3):
            with torch.no_grad():
                model.weight.copy_(torch.randn(16, 16))
            view.weight.data = negated(model.weight)
            if step == 1:  # the average itself may be such a view
                ema.module.weight.data = negated(ema.module.weight)
            ema.update_parameters(view)
            want.update_parameters(model)
        assert bits(ema.module.weight.resolve_neg()) == bits(want.module.weight)


def test_reading_and_writing():
    for recipe in ("adamw/bf16-kahan/bf16-sr", "adamw/bf16-ecc8/int8", "adamw/bf16-sr/f32"):
        p = Parameter(torch.randn(16, 32).bfloat16())
        opt = halfstep.optimizer(recipe, [("p", p)], seed=0)
        p.grad = torch.ones_like(p)
        opt.step()
        values = torch.randn(16, 32)
        opt.write_weight(p, negated(values))
        assert torch.allclose(opt.read_weight(p), values, rtol=1e-2, atol=1e-3)
        opt.write_state(p, "exp_avg", negated(values))
        assert torch.allclose(opt.read_state(p, "exp_avg"), values, rtol=2e-2, atol=5e-2)
        before = opt.read_weight(p)
        p.data = negated(p)
        assert torch.equal(opt.read_weight(p), before) and torch.equal(opt.read_average(p), before)


def test_states_that_are_views():
    params, others = parameters(torch.float32, SHAPES), parameters(torch.float32, SHAPES)
    opt, other = halfstep.AdamW(params.items(), seed=0), halfstep.AdamW(others.items(), seed=0)
    for step in range(3):
        if step == 2:
            for p in others.values():
                other.state[p]["exp_avg"] = negated(other.state[p]["exp_avg"])
        run(opt, params, step, step + 1)
        run(other, others, step, step + 1)
    assert everything(opt) == everything(other)
    file = saved(opt.state_dict())
    for state in file["state"].values():
        state["exp_avg"] = negated(state["exp_avg"])
    other.load_state_dict(file)
    assert everything(opt)[1] == everything(other)[1]


def test_functions_of_other_packages():
    p, q = (torch.zeros(16, 16) for _ in range(2))
    p = torch._neg_view(p)
    for one, grad in ((p, negated(torch.ones(16, 16))), (q, torch.ones(16, 16))):
        optimi.sgd(
            [one],
            [grad],
            [torch.zeros(16, 16)],
            None,
            lr=0.5,
            momentum=0.9,
            weight_decay=0.0,
            dampening=False,
            decouple_wd=True,
            decouple_lr=False,
            max_lr=0.5,
            kahan_sum=False,
        )
    assert torch.equal(p, q) and q.mean() == -0.5
    value = torch.randn(8, 32)
    narrow = value.bfloat16()
    codes = flashoptim.compute_ecc_bits(negated(value), negated(narrow))
    assert torch.equal(codes, flashoptim.compute_ecc_bits(value, narrow))
    assert torch.equal(
        flashoptim.reconstruct_fp32_param(negated(narrow), codes),
        flashoptim.reconstruct_fp32_param(narrow, codes),
    )


def zeros(shape, dtype=torch.float32):
    return torch._efficientzerotensor(shape, dtype=dtype)


def test_gradients_of_zeros_without_memory():
    """They are gradients: counted, and the momentum goes on."""
    as_plain(
        lambda p, step: torch.zeros_like(p) if step == 1 else p.grad,
        lambda p, step: zeros(p.shape, p.dtype) if step == 1 else p.grad,
    )


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "without",
    [lambda: freed(torch.ones(16, 16)), lambda: torch._to_functional_tensor(torch.ones(16, 16))],
)
@pytest.mark.parametrize("release", [False, True])
def test_what_has_no_memory_is_refused_by_name(without, release):
    params = parameters(torch.float32, {"good": (16, 16), "bad": (16, 16)})
    opt = halfstep.AdamW(params.items(), seed=0)
    words = "the gradient of 'bad' has 256 elements and no memory"
    for step in range(2):
        set_gradients(params, step)
        before = everything(opt, params)
        params["bad"].grad = without()
        with pytest.raises(ValueError, match=words):
            opt.step_param(params["bad"]) if release else opt.step()
        assert everything(opt, params) == before
        set_gradients(params, step)
        opt.step()
    accumulator = halfstep.GradientAccumulator(params.items())
    params["bad"].grad = without()
    with pytest.raises(ValueError, match=words):
        if accumulator._buffers[1] is not None:
            accumulator.reassign(missing="skip")
        else:
            accumulator._take(1, params["bad"])


def test_weights_without_memory_are_refused_by_name():
    p = Parameter(torch.ones(16, 16))
    opt = halfstep.AdamW([("w", p)])
    p.grad = torch.ones(16, 16)
    opt.step()
    model = torch.nn.Linear(16, 16)
    ema = halfstep.EMA(model)
    held = p.data
    p.data = freed(torch.ones(16, 16))
    with pytest.raises(ValueError, match="parameter 'w' has 256 elements and no memory"):
        opt.step()
    p.data = held
    opt.step()
    freed(model.weight.data)
    with pytest.raises(ValueError, match="the weight 'weight' has 256 elements and no memory"):
        ema.update_parameters(model)
    with pytest.raises(ValueError, match="'z' is a tensor of zeros without memory"):
        halfstep.AdamW([("z", Parameter(zeros((4, 4))))])


def test_every_address_is_taken_of_tensors_in_order():
    """All of the package asks two functions. The tensors they resolve have the values that torch
    reads."""
    value = torch.randn(6, 5)
    for view in (
        value,
        negated(value),
        imaginary(value),
        value.T.contiguous().T,
        value[:, :3],
        zeros((6, 5)),
    ):
        for found in (devices.contiguous(view), devices.to_cpu(view), devices.clone(view)):
            assert devices.is_plain(found) and torch.equal(found, view.clone())
