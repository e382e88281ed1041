"""Random bits by names, and the formats of mixed models."""

import pytest
import torch
from conftest import (
    RECIPES,
    bits,
    class_of,
    ids,
    make,
    parameters,
    recipes,
    rules,
    run,
    same_steps,
    saved,
    set_gradients,
    states,
    twins,
)
from torch.nn import Parameter

import halfstep
from halfstep._library import abi

# ---- Random bits ---------------------------------------------------------------------------------


@rules
@pytest.mark.parametrize("recipe", ["bf16-sr", "ecc8-int8", "sr-int4"])
def test_one_optimizer_per_parameter_gives_the_bits_of_one_over_all(rule, recipe):
    if abi.rules[rule].totals:
        pytest.skip("sums over all parameters")
    params, opt = make(rule, recipe, lr=0.02)
    alone = twins(params)
    opts = {
        n: class_of(rule)([(n, p)], lr=0.02, **RECIPES[recipe][1], seed=0) for n, p in alone.items()
    }
    for step in range(4):
        set_gradients(params, step)
        set_gradients(alone, step)
        opt.step()
        for o in reversed(list(opts.values())):
            o.step()
    for n, p in params.items():
        assert bits(p) == bits(alone[n]), n
        assert states(opts[n])[0] == states(opt)[list(params).index(n)], n


def half_steps(names=None, seeds=(0, 0)):
    """Moves two weights of 1 down by half of BF16's spacing in two optimizers. Returns the elements
    that moved."""
    moved = []
    for i in range(2):
        p = Parameter(torch.ones(128, 512, dtype=torch.bfloat16))
        opt = halfstep.SGD([(names[i], p)] if names else [p], lr=2.0**-9, seed=seeds[i])
        p.grad = torch.ones_like(p)
        opt.step()
        moved.append((p < 1).flatten())
        assert 0.48 < moved[-1].float().mean() < 0.52
    return (moved[0] == moved[1]).float().mean().item()


def test_random_words_of_two_optimizers():
    """Equal names and equal positions share random words, under one explicit seed. Nothing else
    does."""
    assert half_steps() == 1.0
    assert 0.48 < half_steps(seeds=(None, None)) < 0.52
    assert 0.48 < half_steps(seeds=(1, 2)) < 0.52
    assert 0.48 < half_steps(["a", "b"]) < 0.52
    assert half_steps(["a", "a"]) == 1.0
    assert 0.48 < half_steps(["a", "a"], seeds=(1, 2)) < 0.52


def test_unnamed_tensors_of_one_optimizer_share_no_random_words():
    params = [Parameter(torch.ones(128, 512, dtype=torch.bfloat16)) for _ in range(3)]
    opt = halfstep.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=2.0**-9)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    moved = [(p < 1).flatten() for p in params]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert 0.48 < (moved[a] == moved[b]).float().mean() < 0.52
    assert len(set(ids(opt))) == 3


def test_ids_survive_a_file():
    """A resumed optimizer takes the ids of the file, whatever its own would be."""
    params, opt = make("adamw", "sr-int4")
    run(opt, params, 0, 1)
    kept = ids(opt)
    assert kept == [abi.name_id(n) for n in params]
    fresh = twins(params)
    other = halfstep.AdamW(fresh.values(), states="int4")
    other.load_state_dict(saved(opt.state_dict()))
    run(other, fresh, 1, 2)
    assert ids(other) == kept
    unnamed = halfstep.AdamW(fresh.values(), states="int4")
    run(unnamed, fresh, 0, 1)
    assert not set(ids(unnamed)) & set(kept)


# ---- Mixed models --------------------------------------------------------------------------------


@rules
def test_mixed_dtypes(rule):
    """weights= acts on BF16; float16 takes its namesake; float32 stays."""
    params = {
        "a": Parameter(torch.randn(8, 64)),
        "b": Parameter(torch.randn(8, 64).bfloat16()),
        "c": Parameter(torch.randn(8, 64).half()),
    }
    opt = class_of(rule)(params.items(), weights="bf16-kahan", states="int8", lr=0.01)
    run(opt, params, 0, 3)
    formats = {n: opt.recipe(p).split("/")[1] for n, p in params.items()}
    assert formats == {"a": "f32", "b": "bf16-kahan", "c": "f16-kahan"}
    default = class_of(rule)(list(twins(params).items()), lr=0.01)
    run(default, dict(zip(params, default.param_groups[0]["params"])), 0, 1)
    assert [default.recipe(p).split("/")[1] for p in default.param_groups[0]["params"]] == [
        "f32",
        "bf16-sr",
        "f16-sr",
    ]


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_weights(grad_dtype):
    if grad_dtype != torch.float16 and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch wants gradients of the parameter's dtype")
    p = Parameter(torch.randn(16, 64).half())
    start = p.detach().clone()
    opt = halfstep.AdamW([("p", p)], lr=0.01)
    if grad_dtype != torch.float16:
        p.grad_dtype = grad_dtype
    p.grad = torch.randn(16, 64).to(grad_dtype)
    opt.step()
    assert ((start - p).float().sign() == p.grad.float().sign()).float().mean() > 0.99


def test_group_formats_are_read_per_group():
    params = parameters(torch.bfloat16, {"a": (8, 64), "b": (8, 64)})
    opt = halfstep.AdamW(
        [
            {"params": [("a", params["a"])], "weights": "bf16-ecc16", "states": "f32"},
            {"params": [("b", params["b"])], "states": "int8+int4"},
        ],
        states="int8",
    )
    run(opt, params, 0, 1)
    assert opt.recipe(params["a"]).startswith("adamw/bf16-ecc16/f32")
    assert opt.recipe(params["b"]).startswith("adamw/bf16-sr/int8+int4")
    assert opt.state[params["a"]]["exp_avg"].dtype == torch.float32
    assert opt.state[params["b"]]["exp_avg.codes"].dtype == torch.int8
    assert opt.state[params["b"]]["exp_avg_sq.codes"].dtype == torch.uint8


def test_recipe_strings():
    params = parameters(torch.bfloat16)
    opt = halfstep.optimizer(
        "adamw/bf16-ecc8/int8", list(params.items()), lr=0.02, weight_decay=0.3, seed=0
    )
    assert isinstance(opt, halfstep.AdamW) and opt.param_groups[0]["weight_decay"] == 0.3
    others, other = make("adamw", "ecc8-int8", lr=0.02, weight_decay=0.3)
    same_steps(opt, other, params, others, 0, 3)


@rules
@recipes
def test_read_and_write(rule, recipe):
    """Weights with their residual, and states, as fp32."""
    params, opt = make(rule, recipe, lr=0.02)
    run(opt, params, 0, 2)
    for p in params.values():
        w = opt.read_weight(p)
        assert w.dtype == torch.float32 and w.shape == p.shape
        if p.numel():
            assert (w - p.detach().float()).abs().max() <= 0.01 * p.detach().float().abs().max()
        opt.write_weight(p, w)
        assert torch.equal(opt.read_weight(p), w)
        average = opt.read_average(p)
        assert average.shape == p.shape and average.dtype == torch.float32
        assert abi.rules[rule].average or torch.equal(average, w)
    p = params["body.weight"]
    with pytest.raises((KeyError, ValueError), match="no_such"):
        opt.read_state(p, "no_such")
    if rule == "adamw":
        opt.write_state(p, "exp_avg_sq", torch.full_like(p, 4.0, dtype=torch.float32))
        torch.testing.assert_close(
            opt.read_state(p, "exp_avg_sq"), torch.full(p.shape, 4.0), rtol=0.07, atol=0
        )
        with pytest.raises(ValueError):
            opt.write_state(p, "exp_avg_sq", torch.full(p.shape, -1.0))
        with pytest.raises(ValueError):
            opt.write_state(p, "exp_avg", torch.zeros(3))
