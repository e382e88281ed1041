"""Tests steps as users of torch.optim make them: learning rates, closures, gradients of all kinds,
scaling, clipping."""

import copy
import math

import pytest
import torch
from conftest import (
    FIRST_MOVEMENT,
    SHAPES,
    TORCH,
    TORCH_OPTIONS,
    another,
    assert_close,
    bits,
    class_of,
    everything,
    make,
    parameters,
    plain,
    randn,
    recipes,
    rules,
    run,
    same,
    same_steps,
    saved,
    set_gradients,
    states,
    stored,
    told,
    twins,
    warnings_are,
    weights_of,
)
from torch import nn
from torch.nn import Parameter
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

import halfstep
from halfstep._library import abi

# ---- Learning rates ------------------------------------------------------------------------------


def test_tensor_betas_and_decay():
    params, opt = make(
        "adamw", betas=(torch.tensor(0.8), torch.tensor(0.99)), weight_decay=torch.tensor(0.25)
    )
    betas = tuple(float(torch.tensor(beta)) for beta in (0.8, 0.99))
    others, other = make("adamw", betas=betas, weight_decay=0.25)
    same_steps(opt, other, params, others, 0, 3)


SCHEDULERS = {
    "lambda": lambda o: LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=10, eta_min=1e-4),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=1, factor=0.1),
    "onecycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=20),
}


def schedule(opt, params, scheduler, steps=12):
    for step in range(steps):
        set_gradients(params, step)
        opt.step()
        scheduler.step(1.0) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("rule,options", TORCH_OPTIONS)
def test_schedulers_as_with_torch(rule, options, name, caught):
    params = parameters()
    others = twins(params)
    opt = class_of(rule)(params.values(), **options)
    other = TORCH[rule](others.values(), **options)
    for o, ps in ((opt, params), (other, others)):
        schedule(o, ps, SCHEDULERS[name](o))
    assert opt.param_groups[0]["lr"] == other.param_groups[0]["lr"] != options.get("lr", 1e-3)
    if name == "onecycle":
        for key in ("betas", "momentum"):
            assert opt.param_groups[0].get(key) == other.param_groups[0].get(key)
    assert_close(params, others, 1e-4, 2e-5)
    assert not caught, [str(w.message) for w in caught]


@rules
@pytest.mark.told("muon: momentum_buffer in int4", rule="muon")
def test_schedulers_work_with_every_rule(rule):
    for name, scheduler in SCHEDULERS.items():
        params, opt = make(rule, "sr-int4", lr=0.01, **({"d0": 1.0} if rule == "prodigy" else {}))
        if name == "onecycle" and not {"betas", "momentum"} & set(opt.defaults):
            continue
        start = weights_of(params)
        schedule(opt, params, scheduler(opt))
        assert opt.param_groups[0]["lr"] != 0.01
        assert all(torch.isfinite(p).all() for p in params.values())
        assert all(a != bits(p) for a, p in zip(start, params.values()) if p.numel() > 1)


def test_schedule_of_the_library_and_scheduler_agree():
    """schedule="cosine" of the library and torch's scheduler give one trajectory."""
    params = parameters()
    opt = halfstep.AdamW(
        [{"params": list(params.items()), "schedule": "cosine", "total_steps": 20}], lr=0.05
    )
    others, other = make("adamw", lr=0.05)
    schedule(other, others, CosineAnnealingLR(other, T_max=20))
    run(opt, params, 0, 12)
    assert_close(params, others, 1e-5, 1e-6)


# ---- Closures ------------------------------------------------------------------------------------


@rules
@pytest.mark.parametrize("release", [False, True])
def test_closure(rule, release):
    release &= not abi.rules[rule].totals
    model = nn.Linear(5, 3)
    opt = class_of(rule)(model.named_parameters(), lr=0.01, gradient_release=release)
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        opt.zero_grad()
        loss = model(torch.ones(2, 5)).pow(2).sum()
        loss.backward()
        calls.append(loss)
        return loss

    before = weights_of(model)
    for step in range(FIRST_MOVEMENT):
        with torch.no_grad():
            assert opt.step(closure) is calls[step]
        assert len(calls) == step + 1
    assert all(a != bits(p) for a, p in zip(before, model.parameters()))
    assert opt.step() is None
    assert not any(p.requires_grad is False for p in model.parameters())


def test_closure_runs_though_the_step_is_refused():
    params, opt = make("adamw")

    def closure():
        set_gradients(params, 0)
        params["head.weight"].grad[3, 3] = math.nan
        return 7.5

    with told("'head.weight' is not finite"):
        assert opt.step(closure) == 7.5
    assert opt.skipped_steps == 1


# ---- Gradients -----------------------------------------------------------------------------------


@rules
def test_zero_grad(rule):
    params, opt = make(rule)
    set_gradients(params, 0)
    held = [p.grad for p in params.values()]
    opt.zero_grad(set_to_none=False)
    assert all(p.grad is g for p, g in zip(params.values(), held))
    assert not any(g.any() for g in held if g.numel())
    opt.zero_grad()
    assert all(p.grad is None for p in params.values())


@rules
@recipes
def test_parameters_without_gradient_are_left_alone(rule, recipe):
    """Parameters are frozen, thawed and frozen again in mid-run. Their states wait, except for
    numbers that all tensors share. The others are unaffected, unless sums are over all of them."""
    params, opt = make(rule, recipe, lr=0.02)
    others, other = make(rule, recipe, lr=0.02)
    frozen = "head.weight"
    shared = abi.rules[rule].scalars if abi.rules[rule].totals else ()

    def kept():
        state = opt.state_dict()["state"].get(1, {})
        return bits(params[frozen]), plain(
            {key: value for key, value in state.items() if key not in shared}
        )

    for step in range(6):
        set_gradients(params, step)
        set_gradients(others, step)
        if step in (0, 1, 4):
            params[frozen].grad = None
            before = kept()
        opt.step()
        other.step()
        if step in (0, 1, 4):
            assert kept() == before
    assert opt.state[params[frozen]]["step"].item() == 3
    if abi.rules[rule].totals:
        return
    for name in params:
        if name != frozen:
            assert bits(params[name]) == bits(others[name])
    ours, theirs = states(opt), states(other)
    assert ours.pop(1) != theirs.pop(1) and ours == theirs
    assert bits(params[frozen]) != bits(others[frozen])


def test_first_gradient_arrives_late():
    """Bias corrections count a tensor's own steps, as torch's do."""
    params = parameters()
    others = twins(params)
    opt = halfstep.AdamW(params.values(), lr=0.05)
    other = torch.optim.AdamW(others.values(), lr=0.05)
    for step in range(5):
        for o, ps in ((opt, params), (other, others)):
            set_gradients(ps, step)
            if step < 3:
                ps["body.weight"].grad = None
            o.step()
    assert_close(params, others)


def test_gradients_of_frozen_parameters_count():
    """As in torch: a parameter with a gradient is stepped, whether or not it requires one."""
    params, opt = make("adamw", lr=0.05)
    others, other = make("adamw", lr=0.05)
    for ps, o in ((params, opt), (others, other)):
        set_gradients(ps, 0)
        if ps is params:
            ps["head.weight"].requires_grad_(False)
        o.step()
    same(opt, other, params, others)


@rules
def test_gradients_that_are_the_weights(rule):
    """A p.grad in the weight's memory has the values of the weight before the step."""
    shapes = {"w": (40, 96), "b": (33,)}
    params, opt = make(rule, shapes=shapes, lr=0.02, weight_decay=0.1)
    others, other = make(rule, shapes=shapes, lr=0.02, weight_decay=0.1)
    for _ in range(3):
        for p, q in zip(params.values(), others.values()):
            p.grad, q.grad = p.detach(), q.detach().clone()
        opt.step()
        other.step()
    same(opt, other, params, others)


@rules
@recipes
def test_lr_of_zero_moves_no_weight(rule, recipe):
    """With real gradients and decay; the states go on."""
    params, opt = make(rule, recipe, lr=0.02, weight_decay=0.1)
    run(opt, params, 0, 3)
    weights, before = weights_of(params), states(opt)
    opt.param_groups[0]["lr"] = 0.0
    run(opt, params, 3, 10)
    assert weights_of(params) == weights
    assert states(opt) != before
    assert all(opt.state[p]["step"].item() == 10 for p in params.values())


@rules
def test_no_gradient_at_all(rule):
    params, opt = make(rule)
    before = everything(opt, params)
    opt.step()
    assert everything(opt, params)[0] == before[0]
    assert not any(len(s) for s in opt.state.values()) or all(
        s["step"] == 0 for s in opt.state.values()
    )


@rules
@recipes
def test_empty_and_scalar_tensors(rule, recipe):
    """Beside others and alone."""
    for shapes in (
        SHAPES,
        {"empty": (0,)},
        {"scalar": ()},
        {"empty": (3, 0), "scalar": ()},
        {"one": (1, 1, 1)},
    ):
        params, opt = make(rule, recipe, shapes=shapes)
        run(opt, params, 0, 2)
        for p in params.values():
            assert opt.state[p]["step"].item() == 2
            assert p.shape == next(s for n, s in shapes.items() if params[n] is p)
        again, other = make(rule, recipe, shapes=shapes)
        run(other, again, 0, 1)
        restored, third = another(again, rule, recipe)
        third.load_state_dict(saved(other.state_dict()))
        run(third, restored, 1, 2)
        same(third, opt, restored, params)


@rules
@recipes
def test_state_of_a_parameter(rule, recipe):
    """Only tensors; step is a float32 number on the CPU; each state under the table's name."""
    params, opt = make(rule, recipe)
    run(opt, params, 0, 1)
    for p in params.values():
        state = opt.state[p]
        assert len(state) > 0
        step = state["step"]
        assert (step.dtype, step.shape, step.device.type) == (torch.float32, (), "cpu")
        assert step.item() == 1
        for key, value in state.items():
            assert isinstance(value, torch.Tensor), (key, type(value))
    run(opt, params, 1, 4)
    assert step is opt.state[p]["step"] or opt.state[p]["step"].item() == 4
    # by the default options; such states come last
    needless = {"sgd": 1, "rmsprop": 2, "adam": 1, "adamw": 1, "adafactor": 1, "muon": 1}
    described = abi.rules[rule].states
    described = described[: len(described) - needless.get(rule, 0)]
    vectors = {s.name for s in described if s.vector}
    instead = set()  # of vectors
    if abi.rules[rule].matrix:
        instead = {s.name for s in described if s.role == abi.ROLE_NONNEG} - vectors
    for name, lacking in (("body.bias", vectors), ("body.weight", instead)):
        p = params[name]
        held = stored(opt, p)
        for key in held:
            value = opt.read_state(p, key)
            assert value.dtype == torch.float32 and value.any()
            by_row = p.shape[:1] if "row" in key else p.shape[1:]
            assert value.shape == (by_row if key in vectors else p.shape)
        assert lacking.isdisjoint(held)
        assert len(held) == len(described) - len(lacking)
    file = saved(opt.state_dict())
    assert plain(file) == plain(opt.state_dict())


# ---- Gradients that are not finite ---------------------------------------------------------------


@rules
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_non_finite_gradients_change_nothing(rule, wrong, caught):
    params, opt = make(rule, "ecc8-int8", lr=0.02)
    run(opt, params, 0, 2)
    before = weights_of(params), states(opt)
    set_gradients(params, 2)
    params["head.weight"].grad[16, 49] = wrong
    opt.step()
    assert (weights_of(params), states(opt)) == before
    assert opt.skipped_steps == 1
    assert len(caught) == 1, [str(w.message) for w in caught]
    assert "head.weight" in str(caught[0].message)
    assert "body.weight" not in str(caught[0].message)
    run(opt, params, 2, 4)
    others, other = make(rule, "ecc8-int8", lr=0.02)
    run(other, others, 0, 4)
    same(opt, other, params, others)  # it is as if the step had never been
    assert other.skipped_steps == 0 and opt.skipped_steps == 1


def test_non_finite_in_the_first_step(caught):
    params, opt = make("adamw", "ecc8-int8")
    weights = weights_of(params)
    set_gradients(params, 0)
    params["scale"].grad.fill_(math.nan)
    opt.step()
    assert weights_of(params) == weights
    assert opt.skipped_steps == 1 and len(caught) == 1
    run(opt, params, 0, 2)
    others, other = make("adamw", "ecc8-int8")
    run(other, others, 0, 2)
    same(opt, other, params, others)


def test_non_finite_per_tensor(caught):
    """scan="per-tensor": the others are stepped."""
    params, opt = make("adamw", scan="per-tensor")
    set_gradients(params, 0)
    params["head.weight"].grad[0, 0] = math.nan
    before = plain(params)
    opt.step()
    moved = {n for n, p in params.items() if bits(p) != before[n]}
    assert moved == set(SHAPES) - {"head.weight", "empty"}
    assert "head.weight" in str(caught[0].message)
    assert opt.state[params["head.weight"]]["step"].item() == 0
    assert opt.state[params["body.weight"]]["step"].item() == 1


def test_skipped_steps_are_saved():
    params, opt = make("adamw")
    with told("'scale' is not finite"):
        for step in range(3):
            set_gradients(params, step)
            params["scale"].grad.fill_(math.inf)
            opt.step()
    run(opt, params, 0, 1)
    assert opt.skipped_steps == 3
    _, other = another(params)
    other.load_state_dict(saved(opt.state_dict()))
    assert other.skipped_steps == 3
    assert copy.deepcopy(opt).skipped_steps == 3


# ---- Gradient scaling ----------------------------------------------------------------------------


def scaled_run(recipe, fused, poison=(), clip=None, steps=6, scale=2.0**6):
    params, opt = make("adamw", recipe, lr=0.02, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3, backoff_factor=0.5)
    for step in range(steps):
        opt.zero_grad()
        loss = 0
        for n, p in params.items():
            x = randn(p.shape, 1000 * step + sum(n.encode()), p.dtype)
            if step in poison and n == "head.weight":
                x[0, 0] = math.inf
            loss = loss + (p * x).float().sum()
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(params.values(), clip)
        scaler.step(opt)
        scaler.update()
    return params, opt, scaler


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("recipe", ["f32", "sr-int4"])
def test_grad_scaler(fused, recipe):
    """A power of two as scale changes no bit."""
    params, opt, scaler = scaled_run(recipe, fused)
    assert scaler.get_scale() == 2.0**8
    assert bool(getattr(opt, "_step_supports_amp_scaling", False)) == bool(fused)
    others, other = make("adamw", recipe, lr=0.02)
    run(other, others, 0, 6)
    same(opt, other, params, others)


@pytest.mark.parametrize("fused", [True, None])
def test_grad_scaler_after_unscale(fused):
    """The gradient is unscaled by hand, as for clipping, and not a second time."""
    params, opt, _ = scaled_run("f32", fused, clip=1.0)
    others, other = make("adamw", lr=0.02)
    for step in range(6):
        set_gradients(others, step)
        nn.utils.clip_grad_norm_(others.values(), 1.0)
        other.step()
    same(opt, other, params, others)


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("recipe", ["f32", "ecc8-int8"])
def test_grad_scaler_skips_overflows(fused, recipe):
    """After an infinity neither weights nor states nor steps change, and the scale falls."""
    with warnings_are("ignore"):
        params, opt, scaler = scaled_run(recipe, fused, poison=(1,), steps=2)
    assert scaler.get_scale() == 2.0**5
    others, other = make("adamw", recipe, lr=0.02)
    run(other, others, 0, 1)
    same(opt, other, params, others)
    assert opt.state[params["head.weight"]]["step"].item() == 1


def test_fused_with_found_inf_by_hand():
    """GradScaler hands over found_inf: such a step moves nothing even if the gradients are
    finite."""
    params, opt = make("adamw", "ecc8-int8", fused=True)
    run(opt, params, 0, 1)
    before = weights_of(params), states(opt)
    set_gradients(params, 1)
    opt.grad_scale, opt.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    opt.step()
    del opt.grad_scale, opt.found_inf
    assert (weights_of(params), states(opt)) == before


# ---- Clipping ------------------------------------------------------------------------------------


@rules
@pytest.mark.parametrize("limit", [0.5, 1e4])
def test_clip_norm(rule, limit):
    params, opt = make(rule, lr=0.02, clip_norm=limit)
    others, other = make(rule, lr=0.02)
    assert opt.grad_norm == 0.0
    for step in range(4):
        set_gradients(params, step)
        set_gradients(others, step)
        opt.step()
        norm = nn.utils.clip_grad_norm_(others.values(), limit)
        other.step()
        assert isinstance(opt.grad_norm, float)
        assert math.isclose(opt.grad_norm, float(norm), rel_tol=1e-6)
    assert_close(params, others, 1e-4 if rule != "lion" else 1e-3, 1e-5)
    set_gradients(params, 9)
    before = {n: p.grad.clone() for n, p in params.items()}
    opt.step()
    # Gradients are the caller's.
    assert all(torch.equal(before[n], p.grad) for n, p in params.items())


def test_clip_norm_can_be_changed():
    params, opt = make("sgd", lr=1.0, clip_norm=1.0)
    start = {n: p.detach().clone() for n, p in params.items()}
    for limit in (1.0, 0.25, 0.0):
        opt.clip_norm = limit
        with torch.no_grad():
            for n, p in params.items():
                p.copy_(start[n])
        run(opt, params, 0, 1)
        moved = math.sqrt(
            sum(float((p.detach() - start[n]).double().pow(2).sum()) for n, p in params.items())
        )
        assert math.isclose(moved, limit or opt_norm(params), rel_tol=1e-4), limit


def opt_norm(params):
    return math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in params.values()))


# ---- What is said of steps that are skipped, and of parameters that take no part -----------------


def test_skipped_steps_are_told_again_at_the_10th_and_100th_time():
    p = Parameter(torch.ones(4))
    opt = halfstep.AdamW([("p", p)])
    said = {}
    for step in range(1, 112):
        p.grad = torch.full((4,), float("nan"))
        with warnings_are("always") as caught:
            opt.step()
        if caught:
            said[step] = str(caught[0].message)
    assert list(said) == [1, 10, 100]
    assert all(
        "'p' is not finite" in text and f"{step} by now" in text for step, text in said.items()
    )


def test_gradients_that_are_all_nan_are_not_blamed_on_one():
    """nn.utils.clip_grad_norm_ leaves such gradients if one was not finite."""
    params = {name: Parameter(torch.ones(4)) for name in "abc"}
    for clipped, words in (
        (True, "the gradients of all parameters are not finite.*clip_grad_norm_"),
        (False, "the gradient of tensor 'c' is not finite"),
    ):
        opt = halfstep.AdamW(params.items())
        for p in params.values():
            p.grad = torch.ones(4)
        params["c"].grad[1] = math.nan
        if clipped:
            nn.utils.clip_grad_norm_(params.values(), 1.0)
        with pytest.warns(RuntimeWarning, match=words):
            opt.step()


def test_frozen_parameters_are_not_counted():
    trained, frozen = (Parameter(torch.ones(64, 256), requires_grad=on) for on in (True, False))
    alone = halfstep.AdamW([("w", trained)])
    beside = halfstep.AdamW([("w", trained), ("f", frozen)])
    assert beside.memory() == alone.memory()
    line = next(line for line in repr(alone).splitlines() if line.startswith("memory"))
    assert line in repr(beside)
    frozen.requires_grad_(True)
    assert beside.memory()["states"] == 2 * alone.memory()["states"]
