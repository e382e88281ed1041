"""PyTorch's hook conventions in the form of its test suite; names as in test_torch_suite.py."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

suite = pytest.importorskip(
    "test_torch_suite", reason="torch.testing._internal is not in this torch's wheel"
)
Problem, rules, run = suite.Problem, suite.rules, suite.run


def ready(cls):
    problem = Problem()
    opt = cls(problem.params, lr=0.01)
    run(opt, problem, 1)
    return problem, opt


@rules
@pytest.mark.parametrize("when", ["pre", "post"])
def test_step_pre_and_post_hook(cls, when):
    problem, opt = ready(cls)
    calls = []

    def hook(optimizer, args, kwargs):
        assert optimizer is opt
        calls.append(problem.weight.detach().clone())

    before = problem.weight.detach().clone()
    handle = getattr(opt, f"register_step_{when}_hook")(hook)
    opt.step()
    opt.step(None)
    assert len(calls) == 2 and torch.equal(calls[0], before) == (when == "pre")
    handle.remove()
    opt.step()
    assert len(calls) == 2


@rules
def test_step_pre_hook_changes_arguments(cls):
    problem, opt = ready(cls)
    opt.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: 5.0), {}))
    assert opt.step() == 5.0


@rules
def test_step_all_hooks(cls):
    """Global and local, in torch's order, once each."""
    problem, opt = ready(cls)
    order = []
    handles = [
        register_optimizer_step_pre_hook(lambda o, a, k: order.append(0)),
        opt.register_step_pre_hook(lambda o, a, k: order.append(1)),
        opt.register_step_post_hook(lambda o, a, k: order.append(2)),
        register_optimizer_step_post_hook(lambda o, a, k: order.append(3)),
    ]
    try:
        opt.step()
        assert order == [0, 1, 2, 3]
        opt.step(lambda: None)
        assert order == [0, 1, 2, 3] * 2
    finally:
        for h in handles:
            h.remove()
    opt.step()
    assert order == [0, 1, 2, 3] * 2


@rules
def test_state_dict_pre_hook(cls):
    _, opt = ready(cls)
    opt.register_state_dict_pre_hook(lambda o: o.param_groups[0].update(lr=0.75))
    assert opt.state_dict()["param_groups"][0]["lr"] == 0.75


@rules
def test_state_dict_post_hook(cls):
    """In place and by return value."""
    _, opt = ready(cls)

    def change(optimizer, state_dict):
        state_dict["mine"] = 1

    opt.register_state_dict_post_hook(change)
    assert opt.state_dict()["mine"] == 1
    opt.register_state_dict_post_hook(lambda o, d: {"replaced": d["mine"]})
    assert opt.state_dict() == {"replaced": 1}


@rules
def test_state_dict_pre_post_hook(cls):
    _, opt = ready(cls)
    order = []
    opt.register_state_dict_pre_hook(lambda o: order.append("pre"))
    opt.register_state_dict_pre_hook(lambda o: order.append("first"), prepend=True)
    opt.register_state_dict_post_hook(lambda o, d: order.append("post"))
    opt.register_state_dict_post_hook(lambda o, d: order.append("middle"), prepend=True)
    opt.state_dict()
    assert order == ["first", "pre", "middle", "post"]


@rules
def test_load_state_dict_pre_hook_and_prepend(cls):
    problem, opt = ready(cls)
    file = opt.state_dict()
    lr = file["param_groups"][0]["lr"]

    def in_place(optimizer, state_dict):
        state_dict["param_groups"][0]["lr"] = 0.002

    def returned(optimizer, state_dict):
        state_dict = copy.copy(state_dict)
        state_dict["param_groups"] = [dict(g, lr=0.125) for g in state_dict["param_groups"]]
        return state_dict

    handle = opt.register_load_state_dict_pre_hook(returned)
    opt.load_state_dict(file)
    assert opt.param_groups[0]["lr"] == 0.125
    assert file["param_groups"][0]["lr"] == lr
    opt.register_load_state_dict_pre_hook(in_place, prepend=True)
    opt.load_state_dict(copy.deepcopy(file))
    assert opt.param_groups[0]["lr"] == 0.125
    handle.remove()
    opt.load_state_dict(copy.deepcopy(file))
    assert opt.param_groups[0]["lr"] == 0.002
    run(opt, problem, 1)


@rules
def test_load_state_dict_pre_hook_sees_what_was_given(cls):
    """A hook that rewrites states finds tensors there, not somebody's wrapping."""
    problem, opt = ready(cls)
    run(opt, problem, 1)
    seen = []

    def hook(optimizer, state_dict):
        for state in state_dict["state"].values():
            assert isinstance(state, dict) and isinstance(state["step"], torch.Tensor)
            state["step"] = torch.tensor(9.0)
            seen.append(1)

    opt.register_load_state_dict_pre_hook(hook)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert len(seen) == 2
    assert all(s["step"].item() == 9 for s in opt.state.values())


@rules
def test_load_state_dict_post_hook(cls):
    problem, opt = ready(cls)
    handle = opt.register_load_state_dict_post_hook(lambda o: o.param_groups[0].update(lr=0.25))
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups[0]["lr"] == 0.25
    handle.remove()
    states = []
    opt.register_load_state_dict_post_hook(
        lambda o: states.append({k: type(v) for k, v in o.state.items()})
    )
    opt.load_state_dict(opt.state_dict())
    assert set(states[0].values()) == {dict}  # everything is in place when it runs
    run(opt, problem, 1)


@rules
def test_load_state_dict_pre_post_hook(cls):
    _, opt = ready(cls)
    order = []
    opt.register_load_state_dict_pre_hook(lambda o, d: order.append("pre"))
    opt.register_load_state_dict_post_hook(lambda o: order.append("post"))
    opt.register_load_state_dict_pre_hook(lambda o, d: order.append("first"), prepend=True)
    opt.register_load_state_dict_post_hook(lambda o: order.append("middle"), prepend=True)
    opt.load_state_dict(opt.state_dict())
    assert order == ["first", "pre", "middle", "post"]
    assert isinstance(opt._optimizer_load_state_dict_pre_hooks, OrderedDict)
    assert (
        len(opt._optimizer_load_state_dict_pre_hooks) == 2
    )  # nothing of the loader's own stays behind


@rules
def test_profile_hook_wraps_the_step_once(cls):
    """Classes, subclasses and copies: one wrapping, so one call of a hook."""

    class Sub(cls):
        def step(self, closure=None):
            return super().step(closure)

    problem = Problem()
    for kind in (cls, Sub):
        opt = kind(problem.params)
        opt = copy.deepcopy(opt)
        calls = []
        opt.register_step_post_hook(lambda o, a, k: calls.append(1))
        opt.step()
        # A subclass's step and the step it calls are two functions, as in torch.
        assert len(calls) == (1 if kind is cls else 2)
