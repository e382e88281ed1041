"""Tests, in one process, what distributed checkpoints and sharding wrappers do to an optimizer."""

import pytest
import torch
from conftest import (
    RECIPES,
    another,
    assert_close,
    bits,
    make,
    make_network,
    parameters,
    recipes,
    rules,
    run,
    same,
    same_steps,
    set_gradients,
    states,
    train,
    twins,
    weights_of,
)

import halfstep
from halfstep._ranks import spreads


@rules
@recipes
@pytest.mark.parametrize("decay", ["decoupled", "fully-decoupled", "l2"])
def test_a_step_with_zero_lr_and_zero_gradients_moves_no_weight(rule, recipe, decay):
    """torch.distributed.checkpoint primes an optimizer in this way before it loads."""
    for warm in (0, 2):
        params, opt = make(rule, recipe, lr=0.02, weight_decay=0.5, decay=decay)
        run(opt, params, 0, warm)
        held = {n: opt.read_weight(p) for n, p in params.items()} if warm else None
        before = weights_of(params)
        for group in opt.param_groups:
            group["lr"] = 0.0
        for p in params.values():
            p.grad = torch.zeros_like(p)
        opt.step()
        assert weights_of(params) == before
        if warm:
            assert all(torch.equal(held[n], opt.read_weight(p)) for n, p in params.items())


@recipes
def test_parameters_replaced_before_the_first_step(recipe):
    """Sharding wrappers do so after the optimizer was made."""
    params, opt = make("adamw", recipe, lr=0.02)
    others, other = make("adamw", recipe, lr=0.02)
    swapped = twins(params)
    opt.param_groups[0]["params"] = list(swapped.values())
    same_steps(opt, other, swapped, others, 0, 3)
    assert all(
        torch.equal(p, q) for p, q in zip(params.values(), parameters(RECIPES[recipe][0]).values())
    )


@pytest.mark.parametrize("in_place", [True, False])
def test_parameters_replaced_in_mid_run_start_anew(in_place):
    """As torch: state belongs to the tensor object."""
    params = parameters()
    others = twins(params)
    opt = halfstep.AdamW(params.values(), lr=0.05)
    other = torch.optim.AdamW(others.values(), lr=0.05)
    run(opt, params, 0, 3)
    run(other, others, 0, 3)
    for o, ps in ((opt, params), (other, others)):
        ps["head.weight"] = torch.nn.Parameter(ps["head.weight"].detach().clone())
        if in_place:
            o.param_groups[0]["params"][1] = ps["head.weight"]
        else:
            o.param_groups[0]["params"] = list(ps.values())
        run(o, ps, 3, 5)
    assert opt.state[params["head.weight"]]["step"].item() == 2
    assert opt.state[params["body.weight"]]["step"].item() == 5
    assert_close(params, others)


@rules
@recipes
def test_data_that_moves(rule, recipe):
    """p.data replaced by equal bytes elsewhere changes nothing."""
    params, opt = make(rule, recipe, lr=0.02)
    others, other = make(rule, recipe, lr=0.02)
    held = []
    for step in range(5):
        for ps, o in ((params, opt), (others, other)):
            set_gradients(ps, step)
            o.step()
        for p in params.values():
            held.append(p.data)
            p.data = p.data.clone()
    same(opt, other, params, others)


def test_states_that_move():
    """state[p]["exp_avg"] replaced by equal values elsewhere: the new tensor is read and
    written."""
    params, opt = make("adamw", "ecc8-int8", lr=0.02)
    others, other = make("adamw", "ecc8-int8", lr=0.02)
    held = []
    for step in range(5):
        run(opt, params, step, step + 1)
        run(other, others, step, step + 1)
        for p in params.values():
            for key, value in opt.state[p].items():
                if isinstance(value, torch.Tensor):
                    held.append((value, bits(value)))
                    opt.state[p][key] = value.clone()
    same(opt, other, params, others)
    assert all(bits(value) == before for value, before in held)


def test_states_thrown_away_start_anew():
    params, opt = make("adamw", "ecc8-int8", lr=0.02)
    run(opt, params, 0, 3)
    opt.state.clear()
    fresh, other = another(params, lr=0.02, weights="bf16-ecc8", states="int8")
    run(opt, params, 0, 2)
    run(other, fresh, 0, 2)
    assert opt.state[params["scale"]]["step"].item() == 2
    for n in params:  # the write counter may go on: random bits differ, values hardly
        torch.testing.assert_close(params[n], fresh[n], rtol=2**-7, atol=1e-2)


def test_model_cast_before_the_first_step():
    params, opt = make("adamw", lr=0.02)
    for p in params.values():
        p.data = p.data.bfloat16()
    others, other = make("adamw", "bf16-sr", lr=0.02)
    run(opt, params, 0, 2)
    run(other, others, 0, 2)
    assert opt.recipe(params["scale"]).startswith("adamw/bf16-sr/")
    same(opt, other, params, others)


@rules
@recipes
def test_a_priming_step_advances_nothing(rule, recipe):
    """get_optimizer_state_dict() before the first step changes nothing for the run, even if weights
    are loaded after it."""
    dcp = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    made = []
    for asked in (True, False):
        model, opt = make_network(rule, recipe, lr=0.02)
        if asked:
            dcp.get_optimizer_state_dict(model, opt)
            assert all(
                opt.state[p]["step"].item() == 0 and opt.state[p]["writes"].item() == 0
                for p in model.parameters()
            )
            assert opt.param_groups[0]["group_steps"] == 0 and opt.param_groups[0]["lr"] == 0.02
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        train(model, opt, 0, 3)
        made.append((weights_of(model), states(opt), opt.param_groups[0]["group_steps"]))
    assert made[0] == made[1]


def test_a_warmup_from_zero_is_no_priming_step():
    params, opt = make("adamw", lr=0.0)
    run(opt, params, 0, 1)
    assert all(opt.state[p]["step"].item() == 1 for p in params.values())


@pytest.mark.parametrize(
    "device", ["cpu", "cpu:0"]
)  # the tensor itself is added, or a copy where a group adds, as NCCL on its GPU
def test_sums_over_groups_come_back_from_where_they_are_made(monkeypatch, device):
    monkeypatch.setattr(spreads, "devices_of", lambda group: [device])
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda numbers, op, group: numbers.mul_(group)
    )
    numbers = torch.arange(5)
    spreads.add_up(numbers, (3, 4))
    assert numbers.tolist() == [0, 12, 24, 36, 48]
