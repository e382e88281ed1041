"""A kept state_dict() is updated with its optimizer, all of it, so that it is a consistent state
whenever it is saved or loaded."""

import copy

import pytest
import torch
from conftest import (
    RECIPES,
    RULES,
    class_of,
    parameters,
    plain,
    run,
    same_steps,
    saved,
    set_gradients,
    states,
    stepped,
)

import halfstep
from halfstep._library import abi
from halfstep.compat import flashoptim

SHAPES = {"w": (24, 96), "b": (33,), "empty": (0, 4)}


def make(rule, recipe, **options):
    dtype, formats = RECIPES[recipe]
    params = parameters(dtype, SHAPES)
    return params, class_of(rule)(params.items(), lr=0.01, seed=0, **formats, **options)


@pytest.mark.parametrize(
    "rule, recipe",
    [(rule, list(RECIPES)[i % len(RECIPES)]) for i, rule in enumerate(RULES)]
    + [("adamw", "ecc8-int8")],
)
def test_all_of_it_follows(rule, recipe):
    """Tested after steps, single steps and micro-batches, without any call that asks for it."""
    params, opt = make(rule, recipe)
    run(opt, params, 0, 2)
    kept = opt.state_dict()["state"]
    run(opt, params, 2, 4)
    if not abi.rules[rule].totals:
        set_gradients(params, 4)
        for p in params.values():
            opt.step_param(p)
    assert stepped(kept) == states(opt)
    assert all(s["state_steps"] == s["step"] for s in kept.values())
    # Loaded with the present weights, it goes on with the same bits.
    others, other = make(rule, recipe)
    for p, q in zip(others.values(), params.values()):
        p.data.copy_(q)
    file = {"state": kept, "param_groups": opt.state_dict()["param_groups"]}
    other.load_state_dict(saved(file))
    same_steps(opt, other, params, others, 5, 7)


def test_a_deep_copy_stays():
    params, opt = make("prodigy", "kahan")
    run(opt, params, 0, 2)
    kept = copy.deepcopy(opt.state_dict())
    before = plain(kept)
    run(opt, params, 2, 4)
    assert plain(kept) == before and states(opt) != stepped(kept["state"])


def test_micro_batches_and_loading():
    params, opt = make("adamw", "sr-int4")
    run(opt, params, 0, 1)
    kept = opt.state_dict()["state"]
    opt.optimizer_accumulation = True
    run(opt, params, 1, 3)
    assert [int(kept[0][k]) for k in ("state_steps", "full_steps", "writes")] == [3, 1, 3] and kept[
        0
    ]["step"] == 3
    opt.optimizer_accumulation = False
    held = plain(kept)
    opt.load_state_dict(
        opt.state_dict()
    )  # which takes copies: what was kept before is the old optimizer's
    run(opt, params, 3, 4)
    assert plain(kept) == held


def test_what_somebody_writes_into_it_counts():
    """A tensor written in place or replaced between steps is not overwritten by the library's
    own."""
    for write in (lambda s: s["writes"].fill_(1000), lambda s: s.update(writes=torch.tensor(1000))):
        params, opt = make("adamw", "sr-int4")
        run(opt, params, 0, 2)
        state = opt.state[params["w"]]
        write(state)
        if state["writes"] is not opt._parts.cache.engine.members[0].numbers["writes"]:
            state["step"] = state["step"].clone()  # as who replaces states does
        run(opt, params, 2, 3)
        assert int(opt.state_dict()["state"][0]["writes"]) == 1001
    params, opt = make("adamw-delayed", "f32", weight_decay=0.01)
    run(opt, params, 0, 2)
    opt.state[params["w"]]["accumulated_decay"].fill_(0.004)
    run(opt, params, 2, 3)
    assert 0.004 < float(opt.state[params["w"]]["accumulated_decay"]) < 0.005


def test_decoded_states_and_sums_are_of_the_call():
    """A decoded state is a copy, so all tensors beside it are copies too."""
    model = torch.nn.Linear(64, 64).bfloat16()
    opt = flashoptim.FlashAdamW(model.parameters(), compress_state_dict=False)
    run(opt, model, 0, 1)
    kept = opt.state_dict()["state"]
    before = plain(kept)
    run(opt, model, 1, 2)
    assert plain(kept) == before
    accumulator = halfstep.GradientAccumulator(model.named_parameters(), seed=0).attach()
    model(torch.ones(2, 64).bfloat16()).float().sum().backward()
    kept = accumulator.state_dict()
    before = plain(kept)
    for _ in range(2):
        model(torch.ones(2, 64).bfloat16()).float().sum().backward()
    assert plain(kept) == before
    accumulator.detach()
