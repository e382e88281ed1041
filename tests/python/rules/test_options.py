"""Tests options that change what a rule keeps, or what a step depends on. They are one estimate of
the learning rate, states that blocks cannot hold, and the reference of fully decoupled decay. The
last is what a refused gradient is reported as. Also options that are text."""

import copy
import functools
import inspect
import warnings

import pytest
import torch
from conftest import weights_of
from torch.nn import Parameter

import halfstep
import halfstep.compat.torchao
from halfstep._placement.beside import Placement
from halfstep.rules import classes


def _pull(parameters, goals, optimizer, idle=()):
    for i, (p, goal) in enumerate(zip(parameters, goals)):
        p.grad = None if i in idle else p.detach() - goal
    optimizer.step()


def _left(p, goal):
    return (p.detach() - goal).square().mean().sqrt().item()


def test_prodigy_has_one_estimate_for_groups_that_come_late_and_shows_it():
    torch.manual_seed(0)
    goals = [torch.randn(16, 64), -torch.randn(16, 64)]
    x, y = (Parameter(torch.zeros(16, 64)) for _ in range(2))
    o = halfstep.Prodigy([("x", x)])
    for _ in range(40):
        _pull([x], goals, o)
    o.add_param_group({"params": [("y", y)]})
    assert o.param_groups[1]["d"] == o.param_groups[0]["d"] == o.scalar(x, "d") > 0.01
    for i in range(120):
        _pull([x, y], goals, o, idle={1} if i % 2 else ())
        assert o.param_groups[1]["d"] == o.param_groups[0]["d"] == o.scalar(y, "d")
    assert _left(x, goals[0]) < 0.05 and _left(y, goals[1]) < 0.05
    # Those of a state that differ become their largest, also where groups have no d.
    saved = o.state_dict()
    saved["state"][1].update(
        d=torch.tensor(1e-4, dtype=torch.float64), d_max=torch.tensor(1e-4, dtype=torch.float64)
    )
    for group in saved["param_groups"]:
        del group["d"], group["d_group"]
    again = halfstep.Prodigy([{"params": [("x", x)]}, {"params": [("y", y)]}])
    again.load_state_dict(saved)
    assert [group["d"] for group in again.param_groups] == [o.scalar(x, "d")] * 2
    assert again.scalar(y, "d") == o.scalar(x, "d") and again.scalar(y, "d_max") == o.scalar(
        x, "d_max"
    )


def test_prodigy_with_two_rates_wants_two_estimates():
    torch.manual_seed(0)
    goals = [torch.randn(16, 64), -torch.randn(16, 64)]

    def make(**options):
        ps = [Parameter(torch.zeros(16, 64)) for _ in range(2)]
        return ps, halfstep.Prodigy(
            [{"params": [("x", ps[0])]}, {"params": [("y", ps[1])], "lr": 0.5, **options}]
        )

    ps, o = make()
    with pytest.raises(ValueError, match="d_group"):
        _pull(ps, goals, o)
    assert not ps[0].any()
    ps, o = make(d_group=1)
    alone, single = make()[0], None
    single = halfstep.Prodigy([("y", alone[1])], lr=0.5)
    for _ in range(150):
        _pull(ps, goals, o)
        _pull(alone[1:], goals[1:], single)
    assert torch.equal(ps[1], alone[1]) and _left(ps[0], goals[0]) < 0.05
    assert o.param_groups[1]["d"] == single.param_groups[0]["d"] != o.param_groups[0]["d"]
    o.param_groups[1]["d_group"] = 0
    o.param_groups[1]["lr"] = 1.0
    _pull(ps, goals, o)
    assert o.param_groups[0]["d"] == o.param_groups[1]["d"]


class _Apart(Placement):
    """Puts each parameter into a handle of its own, as for several devices."""

    def divide(self, wanted):
        return [(one.home, None, [one]) for one in wanted]


class _TwoHandles(halfstep.Prodigy):
    _placement = _Apart


def test_prodigy_has_one_estimate_for_several_handles():
    torch.manual_seed(0)
    goals, found = [torch.randn(16, 64), -torch.randn(16, 64)], []
    for cls in (halfstep.Prodigy, _TwoHandles):
        ps = [Parameter(torch.zeros(16, 64)) for _ in range(2)]
        o = cls([("x", ps[0]), ("y", ps[1])])
        for i in range(60):
            _pull(ps, goals, o, idle={1} if i < 20 or i % 3 == 0 else ())
        found.append((o.param_groups[0]["d"], *ps))
    assert found[0][0] == found[1][0]
    assert weights_of(found[0][1:]) == weights_of(found[1][1:])


def test_fully_decoupled_decay_wants_a_reference_that_can_be_meant():
    for first, options, refused in (
        (1e-3, {}, False),
        (1e-8, {}, True),
        (0.0, {}, True),
        (1e-5, {}, True),
        (0.0, {"reference_lr": 1e-3}, False),
        (0.0, {"weight_decay": 0.0}, False),
        (1e-3, {"weight_decay": 1.5}, True),
    ):
        for cls in (halfstep.AdamW, halfstep.Lion):
            p = Parameter(torch.ones(8, 8))
            o = cls([p], lr=first, decay="fully-decoupled", **{"weight_decay": 0.1, **options})
            o.param_groups[0]["lr"] = 1e-3
            p.grad = torch.zeros_like(p)
            if refused:
                with pytest.raises(ValueError, match="reference_lr"):
                    o.step()
                assert p.eq(1).all()
            else:
                o.step()
                assert p.detach().allclose(torch.tensor(1 - o.param_groups[0]["weight_decay"]))


def test_states_that_blocks_cannot_hold_are_told_and_not_read_from_blocks():
    torch.manual_seed(0)
    for recipe, option, names in (
        ("adam/f32/int8", "amsgrad", ("exp_avg_sq", "max_exp_avg_sq")),
        ("rmsprop/bf16-kahan/fp8", "centered", ("square_avg", "grad_avg")),
    ):
        dtype = torch.bfloat16 if "bf16" in recipe else torch.float32
        plain, p = (Parameter(torch.ones(32, 256, dtype=dtype)) for _ in range(2))
        o = halfstep.optimizer(recipe, [("p", p)], **{option: True})
        told = f"with {option} {names[0]} and {names[1]}"
        assert told in repr(o) and told in str(halfstep.plan({"p": (32, 256)}, recipe))
        assert told not in repr(halfstep.optimizer(recipe, [plain]))
        for _ in range(3):
            p.grad = torch.randn_like(p)
            o.step()
        assert all(
            o.state[p][name].is_floating_point() and name + ".codes" not in o.state[p]
            for name in names
        )
        # A state that is in blocks is refused by its name.
        saved, state = o.state_dict(), o.state[p]
        saved = copy.deepcopy(saved)
        coder = halfstep.optimizer("adamw/" + recipe.partition("/")[2], [plain])
        plain.grad = torch.ones_like(plain)
        coder.step()
        held = saved["state"][0]
        held.pop(names[0]), held.pop(names[0] + ".extra", None)
        for part in (".codes", ".scale", ".grid"):
            held[names[0] + part] = coder.state[plain]["exp_avg_sq" + part]
        again = halfstep.optimizer(recipe, [("p", p)], **{option: True})
        with pytest.raises(
            ValueError, match=f"'p' has no state '{names[0]}', which {recipe} needs"
        ):
            again.load_state_dict(saved)
        assert not again.state and o.state[p] is state


def test_options_that_change_formats_between_steps_keep_the_states():
    torch.manual_seed(0)
    for recipe, option, name in (
        ("adam/f32/int8", "amsgrad", "exp_avg_sq"),
        ("rmsprop/f32/int4", "centered", "square_avg"),
    ):
        p = Parameter(torch.ones(32, 256))
        o = halfstep.optimizer(recipe, [("p", p)])
        for on in (False, True, False, True):
            o.param_groups[0][option] = on
            before = o.read_state(p, name) if o.state else None
            p.grad = None
            o.step()
            if before is not None:
                assert (
                    torch.allclose(o.read_state(p, name), before, rtol=0.3, atol=1e-3)
                    and o.read_state(p, name).gt(0).all()
                )
            assert (name in o.state[p] if p in o.state else False) == on or not o.state
            p.grad = torch.randn_like(p)
            o.step()


def test_a_finite_gradient_is_not_called_otherwise():
    for cls in (halfstep.AdamW, halfstep.SGD, halfstep.Prodigy):
        p = Parameter(torch.ones(8))
        o = cls([("w", p)], lr=1.0)
        p.grad = torch.full((8,), 1e19)
        with pytest.warns(RuntimeWarning, match="'w' is finite, but too large") as told:
            o.step()
        assert "not finite" not in str(told[0].message) and p.eq(1).all() and o.skipped_steps == 1


def test_a_format_of_weights_that_acts_on_nothing_is_told_once():
    """No warning comes where the format has a weight, where nobody asked, for norms by themselves,
    and for copies and loaded states."""

    def texts(params, cls=halfstep.AdamW, **options):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            opt = cls(params, lr=1e-3, **options)
            copy.deepcopy(opt).load_state_dict(opt.state_dict())
        return [str(w.message) for w in told if "nothing to act on" in str(w.message)]

    def model(*dtypes, shape=(4, 3)):
        return [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for dtype in dtypes]

    full = model(*[torch.float32] * 7)
    (text,) = texts(full, weights="bf16-ecc8")
    assert text.startswith(
        "halfstep: weights='bf16-ecc8' has nothing to act on: all 7 parameters are float32, as"
        " trainers keep them with bf16=True; load the model in bfloat16"
    )
    assert not texts(full, weights="bf16-ecc8")
    (text,) = texts([{"params": full, "weights": "bf16-sr"}])
    assert "weights='bf16-sr'" in text and "all 7 " in text
    offload = functools.partial(halfstep.CPUOffload, recipe="adamw")
    assert len(texts(model(*[torch.float32] * 6), offload, weights="bf16-ecc8")) == 1
    assert not texts(full)
    assert not texts(full, weights="f32")
    assert not texts(model(*[torch.float32] * 5, torch.bfloat16), weights="bf16-ecc8")
    assert not texts(model(torch.float32, torch.float16), weights="bf16-ecc8")
    assert not texts(model(*[torch.float32] * 3, shape=4), weights="bf16-ecc8")
    assert not texts(full, halfstep.compat.torchao.AdamW8bit, bf16_stochastic_round=True)


def test_text_of_trainers_is_read_by_the_types_of_options():
    """Every default reads back from its text, and every boolean from its words."""
    from halfstep.integrations._text import read

    for target in (*classes.values(), halfstep.EMA):
        for name, p in inspect.signature(target).parameters.items():
            if p.default is p.empty:
                continue
            assert read(target, {name: str(p.default)}) == {name: p.default}, (target, name)
            assert read(target, {name: p.default}) == {name: p.default}
            if p.annotation in (bool, "bool"):
                for word, value in (("false", False), ("True", True), ("0", False), ("1", True)):
                    assert read(target, {name: word})[name] is value
                with pytest.raises(ValueError, match=f"{name}='no'.*write true or false"):
                    read(target, {name: "no"})
    told = {
        "betas": "0.9, 0.95", "seed": "1e3", "states": "'int8'", "clip_norm": "null",
        "lr": "5e-5", "flat": "true", "norm_group": "False", "store": "a?memory=8G", "other": "1",
        "adamw": "{'lr': '3e-4', 'amsgrad': 'false'}", "adamw_names": '["lm_head", "*embed*"]',
        "ns_coefficients": "polar-express", "split": ["64", 32],
    }  # fmt: skip
    assert read(halfstep.Muon, told) == {
        "betas": (0.9, 0.95), "seed": 1000, "states": "int8", "clip_norm": None,
        "lr": 5e-5, "flat": True, "norm_group": False, "store": "a?memory=8G", "other": "1",
        "adamw": {"lr": 3e-4, "amsgrad": False}, "adamw_names": ["lm_head", "*embed*"],
        "ns_coefficients": "polar-express", "split": [64, 32],
    }  # fmt: skip
    for name, text in (("lr", "1/10"), ("betas", "0.9"), ("seed", "1.5"), ("adamw", "lr=1")):
        with pytest.raises(ValueError, match=f"{name}='{text}' is not understood; write a "):
            read(halfstep.Muon, {name: text})


def test_text_in_place_of_a_boolean_is_refused():
    """Python takes "false" for true."""
    from halfstep.compat import dion, flashoptim, lamb16, muon, optimi, prodigyopt

    weights = [Parameter(torch.zeros(2, 2))]
    model = torch.nn.Linear(2, 2)
    flags = (
        *("gradient_release", "compile", "fused"),
        *("foreach", "capturable", "amsgrad", "cautious", "maximize", "norm_group", "owners"),
    )
    makes = [lambda name=name: halfstep.AdamW(weights, **{name: "false"}) for name in flags]
    group = {"params": weights}
    makes += [
        lambda: setattr(halfstep.AdamW(weights), "optimizer_accumulation", "false"),
        lambda: halfstep.Store("run.states", weights="false"),
        lambda: halfstep.CPUOffload(weights, offload_gradients="false"),
        lambda: halfstep.EMA(model, debias="false"),
        lambda: halfstep.EMA(model, use_buffers="false"),
        lambda: halfstep.plan(model, release="false"),
        lambda: halfstep.Muon([{**group, "use_muon": "0"}]),
        lambda: halfstep.Adam([{**group, "decoupled_weight_decay": "false"}]),
        lambda: muon.MuonWithAuxAdam([{**group, "use_muon": "false"}]),
        lambda: dion.Muon(weights, flatten="false"),
        lambda: dion.Muon(weights, cautious_wd="false"),
        lambda: flashoptim.FlashAdamW(weights, quantize="false"),
        lambda: lamb16.Lamb(weights, adam="false"),
        lambda: optimi.AdamW(weights, 1e-3, decouple_lr="false"),
        lambda: optimi.AdamW(weights, 1e-3, kahan_sum="no"),
        lambda: prodigyopt.Prodigy(weights, decouple="false"),
    ]
    for make in makes:
        with pytest.raises(TypeError, match="is text; write True or False"):
            make()
