"""Harmless things in any order between steps leave the bits alone."""

import copy
import math
import pickle

import pytest
import torch
from conftest import (
    COARSE_TEXT,
    RECIPES,
    RULES,
    make,
    run,
    saved,
    set_gradients,
    states,
    stored,
    told,
    twins,
    warnings_are,
    weights_of,
)

from halfstep._library import abi


def disturb(kind, opt, params, generator):
    """Does something that must not change a bit. Returns the optimizer and parameters to go on
    with."""
    if kind == "inspect":
        assert repr(opt) and opt.memory() and opt.fell_back() is not None
        for p in params.values():
            opt.read_weight(p)
            opt.recipe(p)
            for name in stored(opt, p):
                opt.read_state(p, name)
    elif kind == "save and load":
        opt.load_state_dict(saved(opt.state_dict()))
    elif kind == "deepcopy":
        return copy.deepcopy((opt, params))
    elif kind == "pickle":
        return pickle.loads(pickle.dumps((opt, params)))
    elif kind == "new optimizer":
        fresh = twins(params)
        other = type(opt)(
            list(fresh.items()), weights=opt.defaults["weights"], states=opt.defaults["states"]
        )
        other.load_state_dict(saved(opt.state_dict()))
        return other, fresh
    elif kind == "move weights":
        for p in params.values():
            p.data = p.data.clone()  # by chance where it lay before
    elif kind == "turn weights":
        for p in params.values():
            if p.dim() == 2 and p.numel():
                p.grad = None
                p.data = p.data.t().clone(memory_format=torch.contiguous_format).t()
    elif kind == "move states":
        for p in params.values():
            for key, value in list(opt.state.get(p, {}).items()):
                if isinstance(value, torch.Tensor):
                    opt.state[p][key] = value.clone()
    elif kind == "no gradients":
        opt.zero_grad()
        opt.step()
    elif kind == "not finite":
        set_gradients(params, 50)
        params["head.weight"].grad[1, 1] = math.nan
        with warnings_are("always") as said:
            opt.step()
        assert all("'head.weight' is not finite" in str(w.message) for w in said)
        opt.zero_grad()
    elif kind == "lr there and back":
        lr, opt.param_groups[0]["lr"] = opt.param_groups[0]["lr"], 123.0
        opt.state_dict()
        opt.param_groups[0]["lr"] = lr
    elif kind == "release there and back":
        opt.prepare_gradient_release()
        opt.remove_gradient_release()
    elif kind == "threads":
        opt.threads = 1 + int(torch.randint(3, (1,), generator=generator))
    elif kind == "refused options":
        opt.param_groups[0]["weight_decay"], kept = -1.0, opt.param_groups[0]["weight_decay"]
        set_gradients(params, 50)
        with pytest.raises(ValueError):
            opt.step()
        opt.param_groups[0]["weight_decay"] = kept
        opt.zero_grad()
    elif kind == "another group":
        p = torch.nn.Parameter(torch.ones(2, 64, dtype=next(iter(params.values())).dtype))
        opt.add_param_group({"params": [(f"extra {len(opt.param_groups)}", p)]})
        opt.param_groups.pop()
    return opt, params


DISTURBANCES = [
    "inspect",
    "save and load",
    "deepcopy",
    "pickle",
    "new optimizer",
    "move weights",
    "turn weights",
    "move states",
    "no gradients",
    "not finite",
    "lr there and back",
    "release there and back",
    "threads",
    "refused options",
    "another group",
]


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_harmless_things(seed):
    """Steps by step(), by step_param() and in backward, between things that users do, give the bits
    of plain steps."""
    generator = torch.Generator().manual_seed(seed)

    def one_of(values):
        values = list(values)
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    rule, recipe = one_of(r for r in RULES if r != "sgd"), one_of(RECIPES)
    with told(COARSE_TEXT, (rule, recipe) == ("muon", "sr-int4")):
        params, opt = make(rule, recipe, lr=0.02, weight_decay=0.1)
    others, reference = make(rule, recipe, lr=0.02, weight_decay=0.1)
    done = []
    alone = not abi.rules[rule].totals  # whether a tensor can be stepped by itself
    for step in range(8):
        for _ in range(3):
            done.append(one_of(name for name in DISTURBANCES if alone or "release" not in name))
            opt, params = disturb(done[-1], opt, params, generator)
        done.append(one_of(["step", "step_param", "release"] if alone else ["step"]))
        if done[-1] == "step":
            run(opt, params, step, step + 1)
        elif done[-1] == "step_param":
            set_gradients(params, step)
            for p in reversed(list(params.values())):
                opt.step_param(p)
                p.grad = None
            opt.step()
        else:
            opt.prepare_gradient_release()
            set_gradients(params, step)
            loss = 0
            for p in params.values():
                g, p.grad = p.grad, None
                loss = loss + (p * g).float().sum()
            loss.backward()
            opt.step()
            opt.remove_gradient_release()
        run(reference, others, step, step + 1)
        assert weights_of(params) == weights_of(others), (
            rule,
            recipe,
            done,
        )
        assert states(opt) == states(reference), (rule, recipe, done)
