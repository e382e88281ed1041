"""Tests train() and eval() of schedule-free training: averages go into the model and back, to the
bit."""

import copy

import pytest
import torch
from conftest import (
    RECIPES,
    everything,
    loss_of,
    make_network,
    network,
    parameters,
    plain,
    recipes,
    run,
    saved,
    set_gradients,
    states,
    train,
    weights_of,
)

import halfstep

SHAPES = {"w": (24, 96), "b": (33,), "s": ()}


def pair(recipe, **options):
    dtype, formats = RECIPES[recipe]
    params = parameters(dtype, SHAPES)
    return params, halfstep.ScheduleFree(params.items(), lr=0.05, seed=0, **formats, **options)


def weights(params):
    return weights_of(params)


@recipes
def test_averages_in_and_out(recipe):
    """The model holds x in eval() and y after train(). Steps go on as if nothing had been."""
    params, opt = pair(recipe)
    others, other = pair(recipe)
    run(opt, params, 0, 3)
    run(other, others, 0, 3)
    for step in range(3, 6):
        before, held = weights(params), states(opt)
        averages = {n: opt.read_average(p) for n, p in params.items()}
        opt.eval()
        opt.eval()  # which it is already
        for n, p in params.items():
            assert torch.equal(opt.read_average(p), opt.read_weight(p))
            torch.testing.assert_close(
                p.detach().float(),
                averages[n],
                rtol=2**-8 if p.dtype == torch.bfloat16 else 1e-6,
                atol=1e-6,
            )
        assert weights(params) != before and not opt.param_groups[0]["train_mode"]
        opt.train()
        opt.train()
        assert (
            weights(params) == before and states(opt) == held and opt.param_groups[0]["train_mode"]
        )
        for ps, o in ((params, opt), (others, other)):
            run(o, ps, step, step + 1)
    assert weights(params) == weights(others) and states(opt) == states(other)


def test_steps_in_eval_are_refused():
    model, opt = make_network("schedulefree", gradient_release=True)
    loss_of(model, 0).backward()
    opt.step()
    opt.train(False)
    before = everything(opt)
    for attempt in (
        lambda: loss_of(model, 1).backward(),
        opt.step,
        lambda: opt.step_param(model[0].weight),
    ):
        set_gradients({"w": model[0].weight}, 1)
        with pytest.raises(
            RuntimeError,
            match=r"ScheduleFree cannot step: its weights are the averages.*call train\(\)",
        ):
            attempt()
    opt.zero_grad()
    assert everything(opt) == before
    opt.train()
    loss_of(model, 1).backward()
    opt.step()
    with pytest.raises(RuntimeError, match="safetensors.*call train"):
        opt.eval()
        opt.save_safetensors("nowhere")


@pytest.mark.parametrize("way", ["file", "copy"])
@recipes
def test_what_is_saved_in_eval_goes_on(recipe, way):
    """The state knows that x is in the model and stores y. It goes on with the same bits, wherever
    it is loaded."""
    params, opt = pair(recipe)
    run(opt, params, 0, 3)
    opt.eval()
    if way == "copy":
        others, other = copy.deepcopy((params, opt))
    else:
        file = saved(opt.state_dict())
        others, other = pair(recipe)
        for p, q in zip(others.values(), params.values()):
            p.data.copy_(q)
        other.load_state_dict(file)
    assert not other.param_groups[0]["train_mode"]
    with pytest.raises(RuntimeError, match="call train"):
        run(other, others, 3, 4)
    for ps, o in ((params, opt), (others, other)):
        o.train()
        run(o, ps, 3, 5)
    assert weights(params) == weights(others) and states(opt) == states(other)


def test_the_mode_follows_what_is_loaded():
    params, opt = pair("kahan")
    run(opt, params, 0, 3)
    trains = saved(opt.state_dict())
    y = weights(params)
    opt.eval()
    x, evaluates = weights(params), saved(opt.state_dict())
    opt.load_state_dict(trains)  # y comes back with the mode
    assert weights(params) == y and opt.param_groups[0]["train_mode"]
    opt.load_state_dict(evaluates)  # and x with the other
    assert weights(params) == x and not opt.param_groups[0]["train_mode"]
    opt.train()
    assert weights(params) == y
    without = saved(opt.state_dict())
    del without["param_groups"][0]["train_mode"]  # the weights that train are then there
    opt.load_state_dict(without)
    run(opt, params, 3, 4)
    bad = saved(evaluates)
    bad["state"][0]["weight.train"] = torch.ones(3)
    with pytest.raises(ValueError, match="'weight.train' of parameter 'w'"):
        opt.load_state_dict(bad)


@pytest.mark.told("was written, but not by this optimizer")
def test_weights_written_in_eval_are_averages_that_go_on():
    """Those of another checkpoint are not undone by train()."""
    params, opt = pair("kahan")
    run(opt, params, 0, 3)
    opt.eval()
    with torch.no_grad():
        params["w"].fill_(0.25)
    opt.train()
    torch.testing.assert_close(
        opt.read_average(params["w"]), torch.full(SHAPES["w"], 0.25), rtol=1e-3, atol=1e-3
    )
    opt.eval()
    held = plain({n: p.detach() for n, p in params.items()})
    file = pair("kahan")[1]
    with torch.no_grad():
        params["w"].fill_(0.75)
    run(file, {n: p for n, p in zip(SHAPES, file.param_groups[0]["params"])}, 0, 1)
    opt.load_state_dict(file.state_dict())
    assert (
        torch.equal(params["w"], torch.full_like(params["w"], 0.75))
        and plain({n: p.detach() for n, p in params.items()}) != held
    )


def test_parameters_without_states_and_groups_added_in_eval():
    params, opt = pair("f32")
    opt.eval()
    opt.train()
    run(opt, {"w": params["w"]}, 0, 1)
    opt.eval()
    late = torch.nn.Parameter(torch.ones(3))
    opt.add_param_group({"params": [("late", late)]})
    late.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="call train"):
        opt.step()
    opt.train()
    opt.step()
    assert all(g["train_mode"] for g in opt.param_groups)


def test_averages_are_what_others_read_in_eval():
    model = network(torch.bfloat16)
    opt = halfstep.ScheduleFree(model.named_parameters(), weights="bf16-ecc8", lr=0.05)
    train(model, opt, 0, 3)
    want = {n: opt.read_average(p) for n, p in model.named_parameters()}
    opt.eval()
    got = halfstep.full_precision_state_dict(model, opt)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=2**-14, atol=1e-6)
    ema = halfstep.EMA(model, 0.0, weights="bf16-ecc8")
    ema.update_parameters(model, opt)
    opt.train()
    for name, value in ema.full_state_dict().items():
        torch.testing.assert_close(value, want[name], rtol=2**-13, atol=1e-6)
