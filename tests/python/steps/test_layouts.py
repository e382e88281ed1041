"""Dense permuted tensors, strided slices and gradients of other strides give the bits of the
contiguous tensor."""

import copy

import pytest
import torch
from conftest import (
    RECIPES,
    RULES,
    bits,
    class_of,
    parameters,
    randn,
    recipes,
    rules,
    same,
    saved,
    states,
    weights_of,
)
from torch.nn import Parameter

import halfstep


def channels_last(t):
    return t.clone(memory_format=torch.channels_last)


def transposed(t):
    """Returns the same values, stored column by column."""
    return t.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)


def every_other(t):
    """Returns a slice of a tensor twice as wide."""
    base = torch.full((*t.shape[:-1], 2 * t.shape[-1]), 7.0, dtype=t.dtype)
    view = base[..., ::2]
    view.copy_(t)
    return view


def inner_slice(t):
    """Returns a rectangle cut out of a larger tensor: rows are dense, but not one after another."""
    base = torch.full([n + 3 for n in t.shape], 7.0, dtype=t.dtype)
    view = base[tuple(slice(1, n + 1) for n in t.shape)]
    view.copy_(t)
    return view


def last_of_stack(t):
    base = torch.full((*t.shape, 3), 7.0, dtype=t.dtype)
    base[..., 2].copy_(t)
    return base[..., 2]


def offset(t):
    """Returns a contiguous tensor that does not begin where an allocation begins."""
    base = torch.full((t.numel() + 5,), 7.0, dtype=t.dtype)
    view = base[5:].view(t.shape)
    view.copy_(t)
    return view


LAYOUTS = {
    "transposed": transposed,
    "every_other": every_other,
    "inner_slice": inner_slice,
    "last_of_stack": last_of_stack,
    "offset": offset,
    "channels_last": channels_last,
}
SHAPES = {"conv": (8, 6, 5, 7), "matrix": (24, 96), "odd": (17, 50), "vector": (33,)}


def gradients(params, step, kind):
    """Sets gradients of equal values with strides of several kinds."""
    for name, p in params.items():
        g = randn(p.shape, 100 * step + sum(name.encode()), p.dtype)
        p.grad = None
        layout = {
            "contiguous": lambda t: t,
            "same": lambda t: torch.empty_like(p).copy_(t),
            "transposed": transposed,
            "sliced": inner_slice,
        }[kind]
        p.grad = layout(g)
        assert torch.equal(p.grad, g)


def laid_out(params, name):
    out = {}
    for key, p in params.items():
        if name == "channels_last" and p.dim() != 4:
            layout = torch.clone
        else:
            layout = LAYOUTS[name]
        out[key] = Parameter(layout(p.detach()))
        assert torch.equal(out[key], p)
    if name not in ("offset", "channels_last"):
        assert not out["matrix"].is_contiguous()
    if name == "channels_last":
        assert (
            out["conv"].is_contiguous(memory_format=torch.channels_last)
            and not out["conv"].is_contiguous()
        )
    return out


def surroundings(p):
    """Returns the bytes of the whole memory of a view, with the view's own elements set to zero."""
    whole = torch.empty(0, dtype=p.dtype).set_(p.untyped_storage())
    copied = whole.clone()
    copied.as_strided(p.shape, p.stride(), p.storage_offset()).zero_()
    return bits(copied)


def optimizer_of(params, rule, recipe):
    return class_of(rule)(params.items(), lr=0.02, weight_decay=0.1, seed=0, **RECIPES[recipe][1])


def reference(rule, recipe, steps=4):
    params = parameters(RECIPES[recipe][0], SHAPES)
    opt = optimizer_of(params, rule, recipe)
    for step in range(steps):
        gradients(params, step, "contiguous")
        opt.step()
    return params, opt


@rules
@recipes
def test_weights_of_any_layout(rule, recipe):
    want, opt = reference(rule, recipe)
    for layout in LAYOUTS:
        params = laid_out(parameters(RECIPES[recipe][0], SHAPES), layout)
        strides = [p.stride() for p in params.values()]
        around = [surroundings(p) for p in params.values()]
        other = optimizer_of(params, rule, recipe)
        for step in range(4):
            gradients(params, step, ("contiguous", "same", "transposed", "sliced")[step])
            other.step()
        for name, p in params.items():
            assert bits(p) == bits(want[name]), (layout, name)
        assert states(other) == states(opt), layout
        assert [p.stride() for p in params.values()] == strides
        assert [surroundings(p) for p in params.values()] == around, (
            f"{layout}: wrote beside the view"
        )


@rules
@pytest.mark.parametrize("kind", ["transposed", "sliced"])
def test_gradients_of_any_layout(rule, kind):
    """Contiguous weights with gradients of other strides; the gradients are not written."""
    want, opt = reference(rule, "ecc8-int8")
    params = parameters(torch.bfloat16, SHAPES)
    other = optimizer_of(params, rule, "ecc8-int8")
    for step in range(4):
        gradients(params, step, kind)
        held = [(id(p.grad), p.grad.stride(), bits(p.grad)) for p in params.values()]
        other.step()
        assert [(id(p.grad), p.grad.stride(), bits(p.grad)) for p in params.values()] == held
    same(other, opt, params, want)


@rules
@recipes
def test_expanded_gradients(rule, recipe):
    """sum().backward() leaves gradients whose elements are all one."""
    dtype, formats = RECIPES[recipe]
    found = []
    for expanded in (True, False):
        params = parameters(dtype, SHAPES)
        opt = class_of(rule)(params.items(), lr=0.02, **formats, seed=0)
        for step in range(3):
            for p in params.values():
                p.grad = None
                ones = torch.full((1,), 0.5 + step, dtype=dtype)
                p.grad = ones.expand(p.shape) if expanded else ones.repeat(p.numel()).view(p.shape)
            if expanded:
                assert params["matrix"].grad.stride() == (0, 0)
            opt.step()
        row = torch.arange(96.0).to(dtype)
        params["matrix"].grad = row.expand(24, 96) if expanded else row.repeat(24, 1)
        column = torch.arange(24.0).to(dtype)[:, None]
        for p in params.values():
            if p is not params["matrix"]:
                p.grad = None
        opt.step()
        params["matrix"].grad = column.expand(24, 96) if expanded else column.repeat(1, 96)
        opt.step()
        found.append((weights_of(params), states(opt)))
    assert found[0] == found[1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_files_between_layouts(recipe):
    """States are stored in the order of indices. A file written with one layout goes on in any
    other with the same bits."""
    dtype, formats = RECIPES[recipe]
    want, opt = reference("adamw", recipe, steps=6)
    params, half = reference("adamw", recipe, steps=3)
    for layout in LAYOUTS:
        fresh = laid_out(params, layout)
        other = halfstep.AdamW(fresh.items(), **formats, seed=0)
        other.load_state_dict(saved(half.state_dict()))
        for step in range(3, 6):
            gradients(fresh, step, "same")
            other.step()
        assert weights_of(fresh) == weights_of(want), layout
        assert states(other) == states(opt), layout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_that_changes_in_mid_run(layout):
    """model.to(memory_format=...) replaces p.data. Clipping, reading and writing still go by
    indices."""
    want, opt = reference("adamw", "ecc8-int8", steps=4)
    params, other = reference("adamw", "ecc8-int8", steps=2)
    moved = laid_out(params, layout)
    for name, p in params.items():
        p.grad = None
        p.data = moved[name].data
    for step in range(2, 4):
        gradients(params, step, "same")
        other.step()
    same(other, opt, params, want)
    for name, p in params.items():
        assert torch.equal(other.read_weight(p), opt.read_weight(want[name]))
        values = torch.randn(p.shape)
        other.write_weight(p, values)
        opt.write_weight(want[name], values)
        assert bits(p) == bits(want[name])
        assert torch.equal(other.read_weight(p), opt.read_weight(want[name]))
        transposed_values = transposed(values)
        other.write_weight(p, transposed_values)
        assert bits(p) == bits(want[name])


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("recipe", ["f32", "ecc8-int8"])
@pytest.mark.told("was written, but not by this optimizer", recipe="ecc8-int8")
def test_layout_that_changes_at_the_same_address(recipe, release):
    """p.data = p.data.t(): the memory is the same, the tensor is not."""
    dtype, formats = RECIPES[recipe]
    found = []
    for copied in (False, True):
        p = parameters(dtype, {"p": (32, 32)})["p"]
        opt = halfstep.AdamW([("p", p)], lr=0.05, gradient_release=release, **formats, seed=0)
        for step in range(4):
            g = randn((32, 32), step).to(dtype)
            if release:
                (p * g).float().sum().backward()
            else:
                p.grad = g
            opt.step()
            opt.zero_grad()
            if step in (0, 1, 3):
                turned = p.data.t()
                p.data = turned.contiguous() if copied else turned
        assert opt.state[p]["step"].item() == 4
        found.append((bits(p), states(opt)))
    assert found[0] == found[1]


def test_gradient_layout_that_changes_at_the_same_address():
    found = []
    for copied in (False, True):
        p = parameters(torch.float32, {"p": (32, 32)})["p"]
        opt = halfstep.AdamW([("p", p)], lr=0.05, seed=0)
        memory = randn((32, 32), 1)
        for step in range(4):
            g = memory.t() if step % 2 else memory
            p.grad = g.contiguous() if copied else g
            opt.step()
        found.append((bits(p), states(opt)))
    assert found[0] == found[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipping_and_release_of_any_layout(layout):
    found = []
    for kind in (layout, "contiguous"):
        params = parameters(torch.bfloat16, SHAPES)
        if kind != "contiguous":
            params = laid_out(params, kind)
        opt = halfstep.AdamW(
            params.items(), lr=0.02, clip_norm=0.5, clip="per-tensor", states="int8", seed=0
        )
        for step in range(2):
            gradients(params, step, "same")
            opt.step()
        opt.prepare_gradient_release()
        for step in range(2):
            sum((p * torch.full_like(p, 0.25)).float().sum() for p in params.values()).backward()
            opt.step()
        copies, copied = copy.deepcopy((params, opt))
        gradients(copies, 9, "same")
        copied.step()
        found.append((weights_of(params), states(opt), opt.grad_norm, weights_of(copies)))
    assert found[0] == found[1]


def test_a_step_makes_no_copy_of_dense_weights():
    """Contiguous weights are written where they lie."""
    p = Parameter(torch.ones(64, 64))
    address, version = p.data_ptr(), p._version
    opt = halfstep.AdamW([p])
    p.grad = torch.ones_like(p)
    opt.step()
    assert p.data_ptr() == address
    assert p._version > version  # autograd has to notice that the weight changed


@pytest.mark.parametrize("layout", ["contiguous", *LAYOUTS])
def test_autograd_notices_the_step(layout):
    """A graph that saved the weight cannot be run backward after the step has changed it."""
    p = torch.ones(6, 4, 5, 3)
    p = Parameter(p if layout == "contiguous" else LAYOUTS[layout](p))
    opt = halfstep.AdamW([("p", p)])
    x = torch.ones(6, 4, 5, 3, requires_grad=True)
    loss = (p * x).sum()
    p.grad = torch.ones_like(p)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- Gradients of another dtype ------------------------------------------------------------------

with_grad_dtype = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype"
)


@with_grad_dtype
@pytest.mark.parametrize("rule", [r for r in RULES if r not in ("muon",)])
def test_fp32_gradients_on_bf16_parameters(rule):
    """Exact weights (bf16-ecc16) and f32 states under fp32 gradients are fp32 training, bit for
    bit."""
    dense = parameters(torch.float32, SHAPES)
    with torch.no_grad():
        for p in dense.values():
            p.copy_(p.bfloat16().float())
    low = {n: Parameter(p.detach().bfloat16()) for n, p in dense.items()}
    for p in low.values():
        p.grad_dtype = torch.float32
    options = {"lr": 0.02, "weight_decay": 0.1}
    opt = class_of(rule)(dense.items(), states="f32", **options)
    other = class_of(rule)(low.items(), weights="bf16-ecc16", states="f32", **options)
    for step in range(4):
        gradients(dense, step, "contiguous")
        for name, p in low.items():
            p.grad = dense[name].grad.clone()
            assert p.grad.dtype == torch.float32
        opt.step()
        other.step()
    for name, p in dense.items():
        assert torch.equal(other.read_weight(low[name]), p.detach()), name


@with_grad_dtype
def test_gradient_dtype_that_changes_in_mid_run():
    """BF16, fp32 and IEEE half gradients of representable values give the same bits, in any
    order."""
    found = []
    for dtypes in (
        (torch.bfloat16,) * 4,
        (torch.float32, torch.bfloat16, torch.float32, torch.float16),
        (torch.float16, torch.float16, torch.float32, torch.bfloat16),
    ):
        p = Parameter(randn((24, 96), 0).bfloat16())
        opt = halfstep.AdamW([("p", p)], weights="bf16-ecc8", states="int8", lr=0.02, seed=0)
        p.grad_dtype = None
        for step, dtype in enumerate(dtypes):
            g = torch.randint(-8, 9, p.shape, generator=torch.Generator().manual_seed(step)) / 4
            p.grad = g.to(dtype)
            opt.step()
        found.append((bits(p), states(opt)))
    assert found[0] == found[1] == found[2]


@with_grad_dtype
def test_fp32_gradients_from_backward():
    p = Parameter(torch.randn(8, 64).bfloat16())
    p.grad_dtype = torch.float32
    opt = halfstep.AdamW([("p", p)], states="int8")
    before = bits(p)
    (p.float() * torch.randn(8, 64)).sum().backward()
    assert p.grad.dtype == torch.float32
    opt.step()
    assert bits(p) != before
