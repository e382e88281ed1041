"""Names decide which state belongs to whom, where both sides have them. If none matches, positions
count, and a warning says so."""

import copy

import pytest
import torch
from conftest import (
    RECIPES,
    bits,
    class_of,
    plain,
    recipes,
    run,
    saved,
    set_gradients,
    states,
    stepped,
    twins,
    weights_of,
)
from torch import nn
from torch.nn import Parameter

import halfstep
from halfstep.compat import optimi

SHAPES = {"a": (24, 96), "b": (24, 96), "c": (33,)}
#: names as wrappers leave them, that mean the same
WRAPPED = {
    "DDP": "module.{}",
    "compiled": "_orig_mod.{}",
    "DDP of a compiled model": "module._orig_mod.{}",
    "checkpointed": "_checkpoint_wrapped_module.{}",
    "FSDP1": "_fsdp_wrapped_module.{}",
    "compiled DDP": "_orig_mod.module.{}",
}


def tensors(dtype=torch.float32):
    return {name: Parameter(torch.full(shape, 0.5).to(dtype)) for name, shape in SHAPES.items()}


def trained(recipe="f32", rule="adamw", rename="{}", steps=3, **options):
    """Makes parameters, and an optimizer that has made steps with them under other names."""
    dtype, formats = RECIPES[recipe]
    params = tensors(dtype)
    opt = class_of(rule)(
        [(rename.format(n), p) for n, p in params.items()], lr=0.01, seed=0, **formats, **options
    )
    for step in range(steps):
        set_gradients(params, step)
        opt.step()
    return params, opt


def another(params, order, recipe="f32", rule="adamw", rename="{}"):
    """Copies parameters in another order, and makes an optimizer for them."""
    _, formats = RECIPES[recipe]
    copies = {name: Parameter(params[name].detach().clone()) for name in order}
    return copies, class_of(rule)(
        [(rename.format(n), p) for n, p in copies.items()], lr=0.5, seed=9, **formats
    )


def go_on(params, opt, others, other, steps=3):
    for step in range(steps, steps + 2):
        for ps, o in ((params, opt), (others, other)):
            set_gradients(ps, step)
            o.step()
    assert all(bits(params[n]) == bits(others[n]) for n in params)


@recipes
@pytest.mark.parametrize("rule", ["adamw", "muon", "lamb", "sgd"])
def test_another_order(rule, recipe):
    options = {"momentum": 0.9} if rule == "sgd" else {}
    params, opt = trained(recipe, rule, **options)
    others, other = another(params, "cba", recipe, rule)
    other.load_state_dict(saved(opt.state_dict()))
    for name in params:
        mine, theirs = opt.state[params[name]], other.state[others[name]]
        assert plain(mine) == plain(theirs)
    assert other.param_groups[0]["param_names"] == ["c", "b", "a"]
    go_on(params, opt, others, other)


@pytest.mark.parametrize("kind", WRAPPED)
def test_wrappers_add_to_names(kind):
    for here, there in ((WRAPPED[kind], "{}"), ("{}", WRAPPED[kind])):
        params, opt = trained("ecc8-int8", rename=there)
        others, other = another(params, "bca", "ecc8-int8", rename=here)
        other.load_state_dict(opt.state_dict())
        assert other.param_groups[0]["param_names"] == [here.format(n) for n in "bca"]
        go_on(params, opt, others, other)


def test_a_wrapped_part_and_a_module_of_that_name():
    from halfstep._settings import naming

    assert naming.match(["layers.0.module.w", "layers.1.w"], ["layers.1.w", "layers.0.w"]) == [1, 0]
    # "module" is a name of the model's own where both are there.
    assert naming.match(["module.w", "w"], ["w", "module.w"]) == [1, 0]
    assert naming.match(["x._checkpoint_wrapped_module.w", "x.b"], ["x.b", "x.w"]) == [1, 0]
    assert naming.match(["x", "y"], ["p", "q"]) is None


def test_late_parameters_keep_their_random_bits():
    """A parameter without a state at saving draws the bits of the name that it was saved with."""
    runs = []
    for rename in ("{}", "module.{}"):
        params = tensors(torch.bfloat16)
        opt = halfstep.AdamW(params.items(), seed=0)
        set_gradients({"a": params["a"]}, 0)
        opt.step()
        others = twins(params)
        other = halfstep.AdamW([(rename.format(n), p) for n, p in others.items()], seed=0)
        other.load_state_dict(opt.state_dict())
        run(other, others, 1, 2)
        runs.append(weights_of(others))
    assert runs[0] == runs[1]


def test_no_name_matches(caught):
    params, opt = trained("sr-int4")
    others = {"x" + n: Parameter(p.detach().clone()) for n, p in params.items()}
    other = halfstep.AdamW(others.items(), seed=1, states="int4")
    other.load_state_dict(opt.state_dict())
    (warning,) = caught
    assert all(word in str(warning.message) for word in ("'a'", "'xa'", "positions"))
    assert states(other) == states(opt)
    assert other.param_groups[0]["param_names"] == ["a", "b", "c"]  # as torch has it
    other = halfstep.AdamW(others.items(), seed=1, states="int4")
    # The shapes have to agree.
    wrong = halfstep.AdamW(
        [("x", Parameter(torch.ones(8, 96))), *list(others.items())[1:]], states="int4"
    )
    with pytest.raises(ValueError, match="of shape.*none of the names.*'a'.*'x'"):
        wrong.load_state_dict(opt.state_dict())
    assert not wrong.state


def test_some_names_match():
    params, opt = trained()
    others = {"a": params["a"], "bb": params["b"], "c": params["c"]}
    other = halfstep.AdamW(others.items())
    with pytest.raises(ValueError, match="2 names.*only saved: 'b'; only here: 'bb'"):
        other.load_state_dict(opt.state_dict())
    fewer = halfstep.AdamW([("a", params["a"])])
    with pytest.raises(ValueError, match="only saved: 'b', 'c'"):
        fewer.load_state_dict(opt.state_dict())
    assert not other.state and not fewer.state
    twice = opt.state_dict()
    twice["param_groups"][0]["param_names"] = ["a", "a", "c"]
    with pytest.raises(ValueError, match="'a' more than once"):
        other.load_state_dict(twice)


def test_groups_go_with_their_parameters():
    params = tensors()

    def groups(*names):
        return [{"params": [(n, params[n]) for n in some]} for some in names]

    opt = halfstep.AdamW(groups("ab", "c"))
    opt.param_groups[0]["lr"], opt.param_groups[1]["lr"] = 0.1, 0.2
    run(opt, params, 0, 1)
    other = halfstep.AdamW(groups("c", "ba"))
    other.load_state_dict(opt.state_dict())
    assert [g["lr"] for g in other.param_groups] == [0.2, 0.1]
    assert [g["param_names"] for g in other.param_groups] == [["c"], ["b", "a"]]
    assert all(
        bits(other.state[p]["exp_avg"]) == bits(opt.state[p]["exp_avg"]) for p in params.values()
    )
    mixed = halfstep.AdamW(groups("ac", "b"))
    with pytest.raises(
        ValueError,
        match=(
            "parameter 'c' is in group 0 here, with 2 parameters, and was saved in group 1, with 1"
        ),
    ):
        mixed.load_state_dict(opt.state_dict())


def test_names_of_name_parameters_count_too():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    halfstep.name_parameters(model)
    opt = halfstep.AdamW(model.parameters(), seed=0)
    run(opt, model, 0, 1)
    assert "param_names" not in opt.param_groups[0]  # torch's are those that were given
    other = halfstep.AdamW(list(model.parameters())[::-1], seed=0)
    other.load_state_dict(saved(opt.state_dict()))
    assert all(
        bits(other.state[p]["exp_avg"]) == bits(opt.state[p]["exp_avg"]) for p in model.parameters()
    )


def test_param_names_are_where_torch_has_them():
    """They are in the groups and in state_dict()'s groups, through all that makes groups. A hook
    that uses them finds them."""
    params, opt = trained()
    theirs = torch.optim.AdamW(params.items())
    if "param_names" in theirs.param_groups[0]:
        assert opt.param_groups[0]["param_names"] == theirs.param_groups[0]["param_names"]
        opt.load_state_dict(theirs.state_dict())
    for held in (opt, copy.deepcopy(opt)):
        assert (
            held.param_groups[0]["param_names"]
            == held.state_dict()["param_groups"][0]["param_names"]
            == list("abc")
        )
    late = Parameter(torch.ones(3))
    opt.add_param_group({"params": [("late", late)]})
    assert [g["param_names"] for g in opt.param_groups] == [list("abc"), ["late"]]
    if "param_names" in theirs.param_groups[0]:
        with pytest.raises(ValueError, match="names"):
            opt.add_param_group({"params": [Parameter(torch.ones(3))]})
        assert opt.torch_state_dict()["param_groups"][1]["param_names"] == ["late"]
    assert "abc" not in repr(opt) and "late" not in repr(opt)
    unnamed = halfstep.AdamW(tensors().values())
    for groups in (unnamed.param_groups, unnamed.state_dict()["param_groups"]):
        assert "param_names" not in groups[0]


def test_a_hook_that_renames():
    params, opt = trained(rename="old.{}")
    others, other = another(params, "cba", rename="new.{}")

    def rename(optimizer, state_dict):
        for group in state_dict["param_groups"]:
            group["param_names"] = [name.replace("old.", "new.") for name in group["param_names"]]

    other.register_load_state_dict_pre_hook(rename)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    go_on(params, opt, others, other)


def test_a_flat_checkpoint_of_torch():
    """torch.distributed.checkpoint's dictionaries have names in place of numbers and come in the
    model's order."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    for flat in (False, True):
        models = [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)) for _ in range(2)]
        opts = [
            halfstep.AdamW(list(m.named_parameters())[::way], states="int8", seed=0)
            for m, way in zip(models, (1, -1))
        ]
        set_gradients(dict(models[0].named_parameters()), 0)
        opts[0].step()
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        found = get_optimizer_state_dict(models[0], opts[0], options=options)
        set_optimizer_state_dict(models[1], opts[1], copy.deepcopy(found), options=options)
        for (name, p), q in zip(models[0].named_parameters(), models[1].parameters()):
            assert plain(opts[0].state[p]) == plain(opts[1].state[q]), (flat, name)
        assert (
            opts[1].param_groups[0]["param_names"]
            == [n for n, _ in models[1].named_parameters()][::-1]
        )


def with_keys(file, key_of):
    """Returns a state dictionary with other keys of parameters, by their numbers."""
    groups = [
        {key: value for key, value in group.items() if key != "param_names"}
        | {"params": [key_of(number) for number in group["params"]]}
        for group in file["param_groups"]
    ]
    state = {key_of(number): value for number, value in file["state"].items()}
    return {"state": state, "param_groups": groups}


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_names_in_place_of_numbers_in_another_order(wrapper):
    """As get_optimizer_state_dict() gives them, without torch putting them in our order."""
    params, opt = trained("ecc8-int8")
    file = with_keys(saved(opt.state_dict()), lambda number: wrapper + list(params)[number])
    others, other = another(params, "cab", "ecc8-int8")
    other.load_state_dict(file)
    go_on(params, opt, others, other)
    # Without names here, or with others, the positions count.
    for pairs in (twins(params).values(), zip("xyz", twins(params).values())):
        by_place = halfstep.AdamW(pairs, lr=0.5, weights="bf16-ecc8", states="int8")
        by_place.load_state_dict(file)
        assert list(states(by_place).values()) == list(stepped(file["state"]).values())


def test_keys_of_numbers_as_text(tmp_path):
    """As JSON has them, in the states and in the groups."""
    params, opt = trained("ecc8-int8")
    file = with_keys(saved(opt.state_dict()), str)
    others, other = another(params, "abc", "ecc8-int8")
    other.load_state_dict(file)
    go_on(params, opt, others, other)
    names = opt.state_dict()["param_names"]
    torch.save({**file, "param_names": names}, tmp_path / "optimizer.pt")
    params, opt = trained("ecc8-int8")
    others, other = another(params, "cab", "ecc8-int8")
    other.load_states(tmp_path)
    assert plain(other.state[others["a"]]) == plain(opt.state[params["a"]])


@pytest.mark.told("the loaded states are .* converted")
def test_states_of_optimi_in_another_order():
    params = tensors(torch.bfloat16)
    steps = {
        n: {
            "step": torch.tensor(3.0),
            "exp_avg": torch.full(SHAPES[n], float(i)),
            "exp_avg_sq": torch.ones(SHAPES[n]),
            "kahan_comp": None,
        }
        for i, n in enumerate("cab")
    }
    other = optimi.AdamW(params.items(), lr=0.1)
    group = {
        k: v
        for k, v in other.state_dict()["param_groups"][0].items()
        if k not in ("params", "param_names")
    }
    other.load_state_dict(
        {
            "state": {i: steps[n] for i, n in enumerate("cab")},
            "param_groups": [{**group, "params": [0, 1, 2], "param_names": ["c", "a", "b"]}],
        }
    )
    means = {n: float(other.read_state(p, "exp_avg").mean()) for n, p in params.items()}
    assert means["c"] == 0.0 and abs(means["b"] / means["a"] - 2.0) < 1e-5


def test_sums_of_gradients_go_by_names():
    params = tensors(torch.bfloat16)
    accumulator = halfstep.GradientAccumulator(
        [("module." + n, p) for n, p in params.items()], seed=0
    ).attach()
    sum(p.float().sum() for p in params.values()).backward()
    file = accumulator.state_dict()
    accumulator.detach()
    others = tensors(torch.bfloat16)
    other = halfstep.GradientAccumulator(dict(reversed(others.items())).items(), seed=1)
    other.load_state_dict(file)
    other.reassign()
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in others.values())
    unlike = halfstep.GradientAccumulator([("a", others["a"]), ("x", others["b"])], seed=1)
    with pytest.raises(
        ValueError,
        match="saved sums of 'module.b', 'module.c' belong to no parameter here; here are 'a', 'x'",
    ):
        unlike.load_state_dict(file)


def test_safetensors_files_go_by_names(tmp_path):
    pytest.importorskip("safetensors")
    params, opt = trained("ecc8-int8", rename="module.{}")
    opt.save_safetensors(tmp_path / "file")
    others, other = another(params, "cba", "ecc8-int8")
    other.load_safetensors(tmp_path / "file")
    go_on(params, opt, others, other)
    for names, text in (
        (
            ("x", "y", "z"),
            (
                "holds states of 'module.a', 'module.b', 'module.c', and this optimizer has 'x',"
                " 'y', 'z'"
            ),
        ),
        (("a", "y", "c"), "only saved: 'module.b'; only here: 'y'"),
    ):
        wrong = halfstep.AdamW(zip(names, params.values()), weights="bf16-ecc8", states="int8")
        with pytest.raises(ValueError, match=text):
            wrong.load_safetensors(tmp_path / "file")
        assert not wrong.state


@pytest.mark.parametrize("place", [0, 1])
def test_a_named_group_may_be_empty(place):
    """Trainers make groups for weights that decay and for others, of which a model may have none
    that train. Steps, states and later groups are those of an optimizer without it."""
    params, others = tensors(), tensors()
    later = params.pop("c"), others.pop("c")
    full = {"params": list(params.values()), "param_names": list(params)}
    groups = [full, full]
    groups[place] = {"params": [], "param_names": []}
    opt, plain_opt = halfstep.AdamW(groups), halfstep.AdamW(others.items())
    for one, p in zip((opt, plain_opt), later):
        one.add_param_group({"params": [p], "param_names": ["c"]})
    params["c"], others["c"] = later
    for one, some in ((opt, params), (plain_opt, others)):
        run(one, some, 0, 2)
    assert weights_of(params) == weights_of(others) and states(opt) == states(plain_opt)
    fresh = twins(params)
    again = halfstep.AdamW(
        [
            {**group, "params": [fresh[name] for name in group["param_names"]]}
            for group in opt.state_dict()["param_groups"]
        ]
    )
    again.load_state_dict(saved(opt.state_dict()))
    run(again, fresh, 2, 3)
    run(opt, params, 2, 3)
    assert weights_of(fresh) == weights_of(params)
