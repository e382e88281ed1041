"""Tests copies and files: deepcopy, pickle, state_dict, safetensors, torch's own states. Not one
bit is lost."""

import copy
import io
import pickle
import re
import sys
import weakref

import pytest
import torch
from conftest import (
    COPIES,
    RECIPES,
    TORCH,
    TORCH_OPTIONS,
    another,
    assert_close,
    class_of,
    everything,
    ids,
    make,
    parameters,
    plain,
    recipes,
    rules,
    run,
    same,
    same_steps,
    saved,
    set_gradients,
    stored,
    twins,
    warnings_are,
)
from torch.nn import Parameter

import halfstep
from halfstep._library import abi

# ---- Copies --------------------------------------------------------------------------------------


@rules
@recipes
def test_deepcopy_and_pickle_go_on_with_the_same_bits(rule, recipe):
    """In mid-run; the copies own their states."""
    params, opt = make(rule, recipe, lr=0.02, seed=3)
    run(opt, params, 0, 3)
    copies = [copied((params, opt)) for copied in COPIES.values()]
    before = everything(opt, params)
    for ps, o in copies:
        assert everything(o, ps) == before
        assert type(o) is type(opt) and o.defaults == opt.defaults
        run(o, ps, 3, 5)
    assert everything(opt, params) == before  # nothing is shared
    run(opt, params, 3, 5)
    for ps, o in copies:
        same(opt, o, params, ps)


@recipes
def test_tensors_outlive_their_pickle(recipe):
    """A process that is being spawned opens their memory after the pickle was written."""
    params, opt = make("adamw", recipe)
    run(opt, params, 0, 2)
    seen = []

    class Pickler(pickle.Pickler):
        def reducer_override(self, value):
            if not isinstance(value, torch.Tensor):
                return NotImplemented
            seen.append(weakref.ref(value))
            return torch.Tensor, ()

    Pickler(io.BytesIO()).dump(opt)
    assert len(seen) > 4 * len(params) and all(tensor() is not None for tensor in seen)


@rules
@pytest.mark.told("muon: momentum_buffer in int4", rule="muon")
def test_copies_before_the_first_step(rule):
    params, opt = make(rule, "sr-int4")
    for copied in COPIES.values():
        ps, o = copied((params, opt))
        run(o, ps, 0, 2)
        reference, again = make(rule, "sr-int4")
        run(again, reference, 0, 2)
        same(o, again, ps, reference)


def test_copies_keep_options_of_the_optimizer():
    params, opt = make("adamw", clip_norm=0.5, seed=11, clip="per-tensor", scan="per-tensor")
    for copied in COPIES.values():
        ps, o = copied((params, opt))
        set_gradients(params, 0)
        set_gradients(ps, 0)
        assert o.clip_norm == 0.5
        o.step()
        assert o.grad_norm > 0
        others, other = make("adamw", clip_norm=0.5, seed=11, clip="per-tensor", scan="per-tensor")
        run(other, others, 0, 1)
        same(o, other, ps, others)
        assert (o.seed, o.clip, o.scan) == (11, "per-tensor", "per-tensor")


@rules
@pytest.mark.told("muon: momentum_buffer in int4", rule="muon")
def test_repr(rule):
    params, opt = make(rule, "sr-int4")
    for text in (repr(opt), (run(opt, params, 0, 1), repr(opt))[1]):
        assert text.startswith(abi.rules[rule].label)
        assert "Parameter Group 0" in text and "lr:" in text
        assert f"{rule}/bf16-sr" in text
        assert re.search(r"\d\.\d+ (B/param|bytes per parameter)", text)
        assert len(text) < 4000  # ids and the like are for machines
    if rule != "sgd":  # the vector, and the image kernel's states, are kept in an element format
        assert "body.bias" in text
        assert "body.bias" in opt.fell_back() and "body.weight" not in opt.fell_back()


# ---- Files ---------------------------------------------------------------------------------------


@rules
@recipes
@pytest.mark.parametrize("named", [True, False])
def test_resume_is_bit_exact(rule, recipe, named):
    """3 + 3 steps with a file between them equal 6 steps. Unnamed parameters find their random bits
    in the file. The base class casts states to the parameter's dtype while loading; ours does not,
    and warns not."""
    momentum = {"momentum": 0.9} if rule == "sgd" else {}
    params, opt = make(rule, recipe, named, lr=0.02, weight_decay=0.1, seed=77, **momentum)
    run(opt, params, 0, 3)
    file = saved(opt.state_dict())
    dtypes = {value.dtype for state in opt.state.values() for value in state.values()}
    if recipe.endswith("int8") and rule != "sgd":
        assert torch.int8 in dtypes and torch.bfloat16 in dtypes
    if recipe.endswith("int4") and rule not in ("sgd", "adafactor"):
        assert torch.uint8 in dtypes
    fresh = twins(params)
    other = class_of(rule)(fresh.items() if named else fresh.values(), **RECIPES[recipe][1])
    with warnings_are("error"):
        other.load_state_dict(file)
    assert everything(other, fresh) == everything(opt, params)
    for key in ("lr", "weight_decay", "seed"):
        assert other.param_groups[0][key] == opt.param_groups[0][key]
    run(opt, params, 3, 6)
    run(other, fresh, 3, 6)
    assert everything(other, fresh) == everything(opt, params)


@rules
def test_resume_into_an_optimizer_that_has_run(rule):
    params, opt = make(rule, "ecc8-int8", lr=0.02)
    run(opt, params, 0, 2)
    file, weights = saved(opt.state_dict()), {n: p.detach().clone() for n, p in params.items()}
    run(opt, params, 2, 4)
    result = everything(opt, params)
    run(opt, params, 4, 6)
    with torch.no_grad():
        for n, p in params.items():
            p.copy_(weights[n])
    opt.load_state_dict(file)
    run(opt, params, 2, 4)
    assert everything(opt, params) == result


def test_a_loaded_state_dict_is_a_copy():
    params, opt = make("adamw", "ecc8-int8")
    run(opt, params, 0, 2)
    live = opt.state_dict()
    fresh, other = another(params, weights="bf16-ecc8", states="int8")
    other.load_state_dict(live)
    before = plain(live)
    run(other, fresh, 2, 4)
    assert plain(live) == before
    assert plain(opt.state_dict()) == before


#: formats in the file -> formats of the constructor
CONVERSIONS = [
    ({"weights": "bf16-sr", "states": "f32"}, {"weights": "bf16-sr", "states": "int8"}),
    ({"weights": "bf16-sr", "states": "int8"}, {"weights": "bf16-sr", "states": "f32"}),
    ({"weights": "bf16-sr", "states": "int8"}, {"weights": "bf16-sr", "states": "int4"}),
    ({"weights": "bf16-sr"}, {"weights": "bf16-kahan"}),
    ({"weights": "bf16-ecc16"}, {"weights": "bf16-ecc8"}),
    ({"weights": "bf16-ecc8"}, {"weights": "bf16-sr"}),
    ({"weights": "bf16-kahan", "states": "int4"}, {"weights": "bf16-ecc16", "states": "f32"}),
]


@pytest.mark.parametrize("old,new", CONVERSIONS)
@pytest.mark.parametrize(
    "rule", ["adamw", "lion", "adan", "ranger", "rmsprop", "muon", "schedulefree", "lamb"]
)
def test_formats_come_from_the_constructor_with_one_warning(rule, old, new, caught):
    """The states keep their values as nearly as the new format can."""
    params = parameters(torch.bfloat16)
    opt = class_of(rule)(params.items(), lr=0.01, **old)
    run(opt, params, 0, 3)
    fresh, other = another(params, rule, **new)
    del caught[:]
    other.load_state_dict(saved(opt.state_dict()))
    messages = [str(w.message) for w in caught]
    run(other, fresh, 3, 3)
    assert len(messages) == 1, messages
    assert old["weights"] in messages[0] and new["weights"] in messages[0]
    for name, p in params.items():
        q = fresh[name]
        for state in abi.rules[rule].states:
            if state.name not in stored(opt, p):
                continue
            a, b = opt.read_state(p, state.name), other.read_state(q, state.name)
            if a.numel():
                loose = "int4" in (old.get("states"), new.get("states"))
                error = (a - b).abs().max() / a.abs().max().clamp(min=1e-30)
                assert error < (0.3 if loose else 0.035), (name, state.name, float(error))
    for name, p in params.items():  # the residual goes with it, as far as there is room for one
        a, b = opt.read_weight(p), other.read_weight(fresh[name])
        assert torch.allclose(
            a, b, rtol=2.0**-8 if new["weights"] == "bf16-sr" else 2.0**-14, atol=1e-30
        ), name
    with warnings_are("error"):
        run(other, fresh, 3, 5)
    assert all(torch.isfinite(q).all() for q in fresh.values())
    for q in fresh.values():
        assert other.recipe(q).split("/")[1] == new["weights"]
    assert all(opt.state[p]["step"] == 3 for p in params.values())
    assert all(other.state[q]["step"] == 5 for q in fresh.values())


@pytest.mark.parametrize("rule", ["adamw", "ranger", "muon"])
def test_states_that_wait_for_conversion_can_be_saved(rule):
    """States are loaded into other formats and saved before any step. Nothing is lost, however they
    are copied."""
    params, opt = make(rule, "ecc8-int8", lr=0.02)
    run(opt, params, 0, 3)
    fresh, other = another(params, rule, weights="bf16-sr", states="f32")
    with pytest.warns(UserWarning):
        other.load_state_dict(saved(opt.state_dict()))
    ps, o = copy.deepcopy((fresh, other))
    for state_dict in (other.state_dict(), o.state_dict()):
        back, third = another(params, rule, "ecc8-int8", lr=1.0)
        with warnings_are("error"):
            third.load_state_dict(saved(state_dict))
        run(third, back, 3, 5)
        again, reference = copy.deepcopy((params, opt))
        run(reference, again, 3, 5)
        same(third, reference, back, again)
    same_steps(o, other, ps, fresh, 3, 5)


def test_f32_parameters_resume_as_bf16_and_back():
    """A model is cast after its file was written. States are converted; weights are the
    caller's."""
    params, opt = make("adamw", lr=0.01)
    run(opt, params, 0, 3)
    low = {n: Parameter(p.detach().bfloat16()) for n, p in params.items()}
    other = halfstep.AdamW(low.items(), weights="bf16-ecc16")
    with pytest.warns(UserWarning):
        other.load_state_dict(saved(opt.state_dict()))
    for n, p in params.items():
        torch.testing.assert_close(
            other.read_state(low[n], "exp_avg"), opt.read_state(p, "exp_avg"), rtol=2**-7, atol=0
        )
    run(other, low, 3, 4)
    back = {n: Parameter(p.detach().float()) for n, p in low.items()}
    third = halfstep.AdamW(back.items())
    with pytest.warns(UserWarning):
        third.load_state_dict(saved(other.state_dict()))
    assert third.recipe(back["body.weight"]) == "adamw/f32/f32"
    run(third, back, 4, 5)


@rules
def test_group_keys_that_a_file_lacks(rule):
    """Group keys that a file lacks get the constructor's values. Unknown keys do no harm."""
    params, opt = make(rule, "ecc8-int8", lr=0.02)
    run(opt, params, 0, 2)
    file = opt.state_dict()
    groups = [
        {"params": g["params"], "lr": 0.25, "of_another_age": 3, "nested": {"a": [1]}}
        for g in file["param_groups"]
    ]
    fresh, other = another(params, rule, weight_decay=0.125, **RECIPES["ecc8-int8"][1])
    kept = dict(other.param_groups[0])
    with warnings_are("ignore"):
        other.load_state_dict({"state": file["state"], "param_groups": groups})
    group = other.param_groups[0]
    assert group["lr"] == 0.25 and group["weight_decay"] == 0.125
    for key in ("betas", "eps", "maximize", "weights", "states"):
        assert group.get(key) == kept.get(key), key
    run(other, fresh, 2, 4)
    assert ids(other) == [abi.name_id(n) for n in fresh]
    run(opt, params, 2, 4)
    assert all(torch.isfinite(p).all() for p in fresh.values())
    assert all(other.state[p]["step"] == 4 for p in fresh.values())


@rules
def test_setstate_fills_in_options_that_groups_lack(rule):
    """So a later version takes a pickle that was made before an option."""
    params, opt = make(rule)
    run(opt, params, 0, 1)
    state = opt.__getstate__()
    old = class_of(rule).__new__(class_of(rule))
    groups = [{"params": list(params.values()), "lr": 0.01}]
    old.__setstate__(
        {"defaults": dict(state["defaults"]), "state": state["state"], "param_groups": groups}
    )
    run(old, params, 1, 2)
    assert repr(old)


@pytest.mark.parametrize("rule,options", TORCH_OPTIONS)
def test_states_of_torch_load_and_go_on(rule, options):
    """torch's optimizer makes five steps, then ours goes on from its state_dict. Also the other
    way, from torch_state_dict()."""
    cls, theirs = class_of(rule), TORCH[rule]
    options = {**options, "weight_decay": 0.1}
    for first, second, export in (
        (theirs, cls, lambda o: o.state_dict()),
        (cls, theirs, lambda o: o.torch_state_dict()),
    ):
        params = parameters()
        reference = twins(params)
        a, through = first(params.values(), **options), theirs(reference.values(), **options)
        run(a, params, 0, 5)
        run(through, reference, 0, 5)
        fresh = twins(params)
        b = second(list(fresh.values()), lr=123.0)
        b.load_state_dict(saved(export(a)))
        assert b.param_groups[0]["lr"] == options.get("lr", 1e-3)
        for key, value in options.items():
            assert b.param_groups[0][key] == value, key
        run(b, fresh, 5, 10)
        run(through, reference, 5, 10)
        assert_close(fresh, reference, 1e-5, 2e-6)


@pytest.mark.parametrize("rule,options", TORCH_OPTIONS)
def test_torch_state_dict_is_torchs(rule, options):
    """Same keys, shapes and dtypes as torch's own, from any recipe."""
    theirs = TORCH[rule]
    for recipe in RECIPES:
        dtype, formats = RECIPES[recipe]
        params = parameters(dtype)
        opt = class_of(rule)(params.values(), **options, **formats)
        reference = {n: Parameter(p.detach().float()) for n, p in params.items()}
        other = theirs(list(reference.values()), **options)
        run(opt, params, 0, 3)
        run(other, reference, 0, 3)
        ours, want = opt.torch_state_dict(), other.state_dict()
        assert set(ours) == set(want)
        assert ours["param_groups"][0]["params"] == want["param_groups"][0]["params"]
        assert set(want["param_groups"][0]) <= set(ours["param_groups"][0]) | {"params"}
        assert sorted(ours["state"]) == sorted(want["state"])
        for i, state in want["state"].items():
            assert set(ours["state"][i]) == set(state), (recipe, set(ours["state"][i]) ^ set(state))
            for key, value in state.items():
                got = ours["state"][i][key]
                assert got.shape == value.shape and got.dtype == torch.float32, key
        p = params["body.weight"]
        name = next(iter(k for k in want["state"][0] if k != "step"))
        assert torch.equal(ours["state"][0][name], opt.read_state(p, name))
        saved(ours)
        back = theirs(list(reference.values()), **options)
        back.load_state_dict(ours)
        run(back, reference, 3, 4)


def test_muon_exports_to_torch():
    if "muon" not in TORCH:
        pytest.skip("this torch has no Muon")
    shapes = {"a": (24, 16), "b": (8, 40)}
    params = parameters(shapes=shapes)
    reference = twins(params)
    opt, other = halfstep.Muon(params.values()), torch.optim.Muon(reference.values())
    run(opt, params, 0, 3)
    run(other, reference, 0, 3)
    want, ours = other.state_dict(), opt.torch_state_dict()
    assert {k: set(v) for k, v in ours["state"].items()} == {
        k: set(v) for k, v in want["state"].items()
    }
    got, expected = (d["state"][0]["momentum_buffer"] for d in (ours, want))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    other.load_state_dict(ours)
    run(other, reference, 3, 4)
    fresh = twins(params)
    again = halfstep.Muon(fresh.values())
    again.load_state_dict(want)
    run(again, fresh, 3, 4)


def test_step_as_a_number_loads():
    params, opt = make("adamw", "sr-int4")
    run(opt, params, 0, 3)
    file = opt.state_dict()
    for state in file["state"].values():
        state["step"] = float(state["step"])
    fresh, other = another(params, states="int4")
    other.load_state_dict(file)
    same_steps(opt, other, params, fresh, 3, 5)
    assert other.state[fresh["scale"]]["step"].dtype == torch.float32


@rules
@recipes
def test_safetensors_round_trip(rule, recipe, tmp_path):
    params, opt = make(rule, recipe, lr=0.02)
    run(opt, params, 0, 3)
    opt.save_safetensors(tmp_path / "optimizer.safetensors")
    fresh, other = another(params, rule, recipe)
    other.load_safetensors(tmp_path / "optimizer.safetensors")
    same_steps(opt, other, params, fresh, 3, 5)


@pytest.mark.parametrize(
    "rule, options",
    [
        (
            "muon",
            {
                "ns_coefficients": (3.0, -4.0, 2.0),
                "eps": 1e-5,
                "adam_eps": 1e-6,
                "adjust_lr_fn": "match_rms_adamw",
                "betas": (0.8, 0.9),
                "ns_form": "gram",
            },
        ),
        ("muon", {"ns_coefficients": "dion", "ns_form": "standard"}),
        ("adafactor", {"eps": (1e-5, 1e-2), "d": 2.0, "beta2_decay": -0.5, "published": True}),
    ],
)
def test_options_that_torch_calls_otherwise_go_through_a_file(rule, options, tmp_path):
    params, opt = make(rule, lr=0.02, **options)
    run(opt, params, 0, 1)
    opt.save_safetensors(tmp_path / "optimizer.safetensors")
    other = class_of(rule)(list(twins(params).items()))
    other.load_safetensors(tmp_path / "optimizer.safetensors")
    assert {key: other.param_groups[0][key] for key in options} == options


def test_formats_changed_in_a_group():
    """weights= and states= are read at each step, and states are converted in place."""
    params, opt = make("adamw", "bf16-sr", lr=0.01)
    run(opt, params, 0, 3)
    before = {n: opt.read_state(p, "exp_avg") for n, p in params.items()}
    opt.param_groups[0].update(weights="bf16-ecc8", states="int8")
    run(opt, params, 3, 3)
    for n, p in params.items():
        after = opt.read_state(p, "exp_avg")
        if p.numel():
            assert (after - before[n]).abs().max() <= 0.01 * before[n].abs().max(), n
            assert opt.state[p]["weight.extra"].dtype == torch.int8
    assert opt.state[params["body.weight"]]["exp_avg.codes"].dtype == torch.int8
    assert "exp_avg" not in opt.state[params["body.weight"]]
    run(opt, params, 3, 5)
    fresh, other = another(params, weights="bf16-ecc8", states="int8")
    with warnings_are("error"):
        other.load_state_dict(saved(opt.state_dict()))
    same_steps(opt, other, params, fresh, 5, 7)


@pytest.mark.parametrize("in_place", [False, True])
def test_counts_beyond_those_of_float32(in_place):
    """state["step"] is a float32 and stops at 2^24. The number beside it goes on."""
    params, opt = make("adamw", "sr-int4", shapes={"w": (6, 64), "b": (7,)}, lr=0.01)
    run(opt, params, 0, 1)
    file, counts = opt.state_dict(), ("state_steps", "full_steps", "writes")
    for state in file["state"].values():  # shared with opt.state, as torch's are
        for key, count in (("step", 2.0**24), *((key, 2**24) for key in counts)):
            state[key] = state[key].fill_(count) if in_place else torch.tensor(count)
    if not in_place:
        opt.load_state_dict(file)
    run(opt, params, 1, 4)
    file = saved(opt.state_dict())
    for state in file["state"].values():
        assert [int(state[key]) for key in counts] == [2**24 + 3] * 3
    fresh, other = another(params, states="int4")
    other.load_state_dict(file)
    same_steps(opt, other, params, fresh, 4, 6)
    assert opt.state_dict()["state"][0]["state_steps"] == 2**24 + 5


# ---- Many tensors --------------------------------------------------------------------------------


def instructions(act):
    """Returns how many instructions of Python a call carries out."""
    count, before = 0, sys.gettrace()

    def in_function(frame, event, _):
        nonlocal count
        count += event == "opcode"
        return in_function

    def begins(frame, event, _):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return in_function

    sys.settrace(begins)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def loads_names(params, opt, path):
    return lambda: opt.load_state_dict(opt.state_dict())


def loads_into_a_file(params, opt, path):
    fresh, other = another(params, recipe="ecc8-int8", store=str(path))
    return lambda: other.load_state_dict(opt.state_dict())


def decodes_states(params, opt, path):
    return opt.torch_state_dict


def takes_copies(params, opt, path):
    """Each parameter is made anew, with a copy of its state."""
    group = opt.param_groups[0]
    group["params"] = [Parameter(p.detach().clone()) for p in params.values()]
    for p, new in zip(params.values(), group["params"]):
        opt.state[new] = {key: value.clone() for key, value in opt.state.pop(p).items()}
    return opt.state_dict


def begins_release(params, opt, path):
    return releases(*another(params, recipe="ecc8-int8", gradient_release=True))


def releases_moved_weights(params, opt, path):
    opt.prepare_gradient_release()
    releases(params, opt)()
    for p in params.values():
        p.data = p.data.clone()
    return releases(params, opt)


def releases_groups(params, opt, path):
    """A group for each parameter."""
    params = twins(params)
    groups = [{"params": [one]} for one in params.items()]
    act = releases(params, halfstep.AdamW(groups, gradient_release=True))
    act()
    return act


def releases(params, opt):
    def act():
        torch.autograd.backward([p.sum() for p in params.values()])
        opt.step()

    return act


@pytest.mark.parametrize(
    "prepare",
    [
        loads_names,
        loads_into_a_file,
        decodes_states,
        takes_copies,
        begins_release,
        releases_moved_weights,
        releases_groups,
    ],
)
def test_work_grows_with_the_number_of_tensors(prepare, tmp_path):
    """Four times as many tensors take about four times as many instructions, not sixteen times."""
    taken = []
    for n in (1, 20, 80):
        shapes = {f"layers.{i}": (40,) for i in range(n)}
        params, opt = make("adamw", "ecc8-int8", shapes=shapes, lr=1e-2)
        run(opt, params, 0, 2)
        opt.zero_grad()
        act = prepare(params, opt, tmp_path / str(n))
        taken.append(act() if n == 1 else instructions(act))  # the first one imports modules
    assert taken[2] < 4.15 * taken[1]
