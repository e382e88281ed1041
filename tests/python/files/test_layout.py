"""Tests what a state holds and how it travels: flattened, merged, in place, over ranks. States of
another layout are refused."""

import copy
import pickle

import pytest
import torch
from conftest import (
    RECIPES,
    another,
    assert_close,
    class_of,
    ids,
    make,
    make_network,
    named,
    network,
    parameters,
    recipes,
    rules,
    run,
    same,
    same_steps,
    saved,
    set_gradients,
    states,
    streams,
    told,
    twins,
    warnings_are,
    weights_of,
)
from torch.nn import Parameter

import halfstep
from halfstep._library import abi
from halfstep._settings.groups import TOLD
from halfstep._states import layout

dcp = pytest.importorskip("torch.distributed.checkpoint.state_dict")

#: options under which the groups and the states count something of every kind
SCHEDULED = {"lr": 0.02, "weight_decay": 0.1, "clip_norm": 0.5}


def flattened():
    if "flatten_optimizer_state_dict" not in dcp.StateDictOptions.__dataclass_fields__:
        pytest.skip("this torch flattens no optimizers")
    return dcp.StateDictOptions(flatten_optimizer_state_dict=True)


def counts(opt):
    return [{key: group[key] for key in TOLD} for group in opt.param_groups]


# ---- Keys ----------------------------------------------------------------------------------------


@rules
@recipes
def test_a_state_holds_tensors_under_fixed_keys(rule, recipe):
    """The keys stay the same after any number of steps, as flattened checkpoints need. Beside the
    streams each is of one number at most."""
    params, opt = make(rule, recipe, lr=0.02)
    run(opt, params, 0, 1)
    first = [{k: (v.dtype, v.shape) for k, v in opt.state[p].items()} for p in params.values()]
    run(opt, params, 1, 4)
    opt.state_dict()
    assert [
        {k: (v.dtype, v.shape) for k, v in opt.state[p].items()} for p in params.values()
    ] == first
    for p in params.values():
        state = opt.state[p]
        assert all(isinstance(v, torch.Tensor) for v in state.values())
        small = set(state) - set(streams(opt, p))
        grids = {
            s.name + ".grid"
            for s in abi.rules[rule].states
            if s.role == abi.ROLE_NONNEG and s.name + ".codes" in state
        }
        assert small == {
            "step",
            "id",
            "recipe",
            "state_steps",
            "full_steps",
            "writes",
            *abi.rules[rule].scalars,
            *grids,
        }
        assert all(state[key].dim() == 0 for key in small)
        assert layout.unpack_recipe(int(state["recipe"])) == opt.recipe(p)
        for key, value in streams(opt, p).items():
            assert value.is_floating_point() or key.endswith((".codes", ".extra")), key
    assert ids(opt) == [abi.name_id(n) for n in params]
    for group in opt.param_groups:
        assert not {"ids", "recipes"} & set(group)
        assert all(
            not isinstance(value, list)
            for key, value in group.items()
            if key not in ("params", "param_names")
        )


@rules
def test_recipes_as_numbers(rule):
    formats = list(abi.formats)
    found = set()
    for weights in formats:
        for asked in formats:
            try:
                full = abi.recipe_full(f"{rule}/{weights}/{asked}")
            except ValueError:
                continue
            number = layout.pack_recipe(full)
            assert 0 <= number < 2**63 and layout.unpack_recipe(number) == full
            found.add((full, number))
    assert len({f for f, _ in found}) == len({n for _, n in found}) > 4
    for wrong in (-1, 0, 99, 2**62, number ^ 0xFF, number | 0xFF << 8):
        assert layout.unpack_recipe(wrong) is None


def test_group_counts_are_always_current():
    """param_groups shows them after each step, and what is set there counts."""
    params, opt = make("adamw", "sr-int4", clip_norm=0.5)
    assert counts(opt) == [{"group_steps": 0, "skipped_steps": 0, "last_norm": 0.0}]
    run(opt, params, 0, 2)
    (group,) = opt.param_groups
    assert group["group_steps"] == 2 and group["last_norm"] == opt.grad_norm > 0
    set_gradients(params, 2)
    params["scale"].grad.fill_(float("nan"))
    with pytest.warns(RuntimeWarning):
        opt.step()
    assert (group["skipped_steps"], opt.skipped_steps, group["group_steps"]) == (1, 1, 2)
    group.update(group_steps=40, skipped_steps=7)
    run(opt, params, 3, 4)
    assert (group["group_steps"], opt.skipped_steps) == (41, 7)
    for wrong in (-1, 1.5, None, 2**63, True):
        group["group_steps"] = wrong
        with pytest.raises(ValueError, match="group_steps"):
            run(opt, params, 4, 5)
    group["group_steps"] = 41
    run(opt, params, 4, 5)
    model, released = make_network(gradient_release=True)
    for _ in range(3):
        model(torch.randn(2, 48)).sum().backward()
        released.step()
    assert released.param_groups[0]["group_steps"] == 3


# ---- In place ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", ["step", "step_param", "saved first"])
def test_a_step_count_written_in_place_counts(recipe, way):
    """The written count acts as if the state had been loaded with it, in the next step's bias
    corrections."""
    params, opt = make("adamw", recipe, lr=0.02)
    others, other = make("adamw", recipe, lr=0.02)
    for ps, o in ((params, opt), (others, other)):
        run(o, ps, 0, 4)
    file = saved(other.state_dict())
    for state in file["state"].values():
        state["step"].fill_(1.0)
        state["state_steps"].fill_(1)
        state["full_steps"].fill_(1)
    other.load_state_dict(file)
    for p in params.values():
        opt.state[p]["step"].fill_(1.0)
    if way == "saved first":
        assert all(s["state_steps"] == s["step"] == 1 for s in opt.state_dict()["state"].values())
    set_gradients(params, 4)
    run(other, others, 4, 5)
    if way == "step_param":
        for p in params.values():
            opt.step_param(p)
        opt._parts.steps.end_round()
    else:
        opt.step()
    assert all(opt.state[p]["step"] == 2 for p in params.values())
    same(opt, other, params, others)


@pytest.mark.parametrize("value", [-1.0, float("nan"), 2.5, 1e30])
def test_a_step_count_written_in_place_that_counts_nothing(value):
    params, opt = make("adamw", "ecc8-int8", lr=0.02)
    run(opt, params, 0, 2)
    opt.state[params["body.weight"]]["step"].fill_(value)
    before = weights_of(params)
    set_gradients(params, 2)
    with pytest.raises(ValueError, match="body.weight"):
        opt.step()
    assert weights_of(params) == before
    opt.state[params["body.weight"]]["step"].fill_(2)
    opt.step()


@rules
@recipes
def test_dcp_load_in_place_resumes(rule, recipe, tmp_path):
    """torch.distributed.checkpoint.load(optimizer.state_dict()) alone resumes, into an optimizer in
    mid-run."""
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    params, opt = make(rule, recipe, lr=0.02)
    run(opt, params, 0, 3)
    opt.state_dict()
    run(opt, params, 3, 5)
    whole = {n: p for n, p in params.items() if p.numel()}  # which have no bytes to load
    everything = {"model": {n: p.detach() for n, p in whole.items()}, "optimizer": opt.state_dict()}
    with warnings_are("ignore"):  # of torch, about a single process
        checkpoint.save(everything, checkpoint_id=tmp_path / "c", no_dist=True)
        fresh, other = make(rule, recipe, lr=0.02)
        run(other, fresh, 10, 13)
        other.state_dict()
        run(other, fresh, 13, 17)
        target = {
            "model": {n: p.detach() for n, p in fresh.items() if n in whole},
            "optimizer": other.state_dict(),
        }
        checkpoint.load(target, checkpoint_id=tmp_path / "c", no_dist=True)
    for _ in range(2):
        run(opt, params, 5, 7)
        run(other, fresh, 5, 7)
        assert weights_of(params) == weights_of(fresh)
        a, b = states(opt), states(other)
        assert [a[i] for i, n in enumerate(params) if n in whole] == [
            b[i] for i, n in enumerate(params) if n in whole
        ]


def test_states_copied_between_two_saves():
    """The tensors themselves are copied, and their counters are behind. The step tells by how
    much."""
    params, opt = make("adamw", "sr-int4", lr=0.02)
    run(opt, params, 0, 2)
    opt.state_dict()
    run(opt, params, 2, 5)
    fresh, other = another(params, lr=0.02, states="int4", seed=0)
    for p, q in zip(params.values(), fresh.values()):
        other.state[q] = {key: value.clone() for key, value in opt.state[p].items()}
    same_steps(opt, other, params, fresh, 5, 7)


def test_steps_whose_memory_was_replaced():
    """state["step"].data = ..., as loops that move optimizers do. The library must not write to the
    old address."""
    params, opt = make("adamw", "f32", lr=0.02)
    others, other = make("adamw", "f32", lr=0.02)
    for step in range(4):
        run(opt, params, step, step + 1)
        run(other, others, step, step + 1)
        for state in opt.state.values():
            for value in state.values():
                value.data = value.data.clone()
    same(opt, other, params, others)


# ---- Flattened, merged, divided ------------------------------------------------------------------


def scheduled(rule, model, recipe, **options):
    opt = class_of(rule)(
        model.named_parameters(), **RECIPES[recipe][1], **{**SCHEDULED, "seed": 7, **options}
    )
    return opt


def nan_step(model, opt):
    set_gradients(model, 99)
    next(model.parameters()).grad.fill_(float("nan"))
    with told("is not finite"):
        opt.step()
    opt.zero_grad()


@rules
@recipes
@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "nested"])
def test_a_checkpoint_of_torch_keeps_everything(rule, recipe, flat):
    """weight_sum, lr_max, counters, ids, group_steps, skipped_steps, the seed: resuming is exact.
    The step that torch makes before it loads moves no weight."""
    options = flattened() if flat else dcp.StateDictOptions()
    dtype = RECIPES[recipe][0]
    model, other = network(dtype), network(dtype)
    opt = scheduled(rule, model, recipe)
    run(opt, model, 0, 3)
    nan_step(model, opt)
    file = saved(dcp.get_optimizer_state_dict(model, opt, options=options))
    fresh = scheduled(rule, other, recipe, lr=0.5, seed=1)
    other.load_state_dict(model.state_dict())
    dcp.set_optimizer_state_dict(other, fresh, file, options=options)
    assert weights_of(model) == weights_of(other)
    assert states(fresh) == states(opt) and counts(fresh) == counts(opt) and fresh.seed == 7
    assert fresh.skipped_steps == 1 and fresh.param_groups[0]["group_steps"] == 3
    assert fresh.param_groups[0]["lr"] == SCHEDULED["lr"]
    same_steps(fresh, opt, other, model, 3, 5)


def weight_of_a_flat_checkpoint(cls, named, **options):
    """Returns the bytes of all values that are no tensors, as a checkpoint writes each by
    itself."""
    model = torch.nn.ParameterDict(
        {f"layer{i:04}": Parameter(torch.zeros(2, 2)) for i in range(1000)}
    )
    opt = cls(model.named_parameters() if named else model.parameters(), **options)
    flat = dcp.get_optimizer_state_dict(model, opt, options=flattened())
    assert len([k for k in flat if k.startswith("state.")]) >= 3000
    return sum(
        len(key) + len(pickle.dumps(value))
        for key, value in flat.items()
        if not isinstance(value, torch.Tensor)
    )


@pytest.mark.parametrize("named", [True, False])
def test_a_flattened_checkpoint_grows_with_its_parameters(named):
    """It does not grow with the square of the number of parameters. Names in groups of named
    parameters are the exception, as in torch's own optimizers."""
    ours = weight_of_a_flat_checkpoint(halfstep.AdamW, named)
    theirs = weight_of_a_flat_checkpoint(torch.optim.AdamW, named)
    assert ours < 3 * theirs and (named or ours < 2_000_000)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "nested"])
def test_pipeline_stages_merge_and_divide(recipe, flat):
    """Checkpoints of two stages, each with its own optimizer, load as one. One loads as two. Groups
    too."""
    options = flattened() if flat else dcp.StateDictOptions()
    dtype = RECIPES[recipe][0]

    def stages(model):
        """Two modules with the names of the whole, as pipelines cut them."""
        cut = [torch.nn.Sequential(), torch.nn.Sequential()]
        for i, layer in enumerate(model):
            cut[i >= 2].add_module(str(i), layer)
        return cut

    def made(modules, **more):
        """Returns modules with their optimizers. Clipping would be by the norm of a stage."""
        return [(m, scheduled("schedulefree", m, recipe, clip_norm=0.0, **more)) for m in modules]

    def train(pairs, first, last):
        for m, o in pairs:
            run(o, m, first, last)

    whole, parts, one, two = (network(dtype) for _ in range(4))
    all_in_one, cut = made([whole]), made(stages(parts))
    train(all_in_one + cut, 0, 3)
    assert weights_of(whole) == weights_of(parts)
    merged = {} if flat else {"state": {}, "param_groups": []}
    for stage, o in cut:
        found = saved(dcp.get_optimizer_state_dict(stage, o, options=options))
        if flat:
            merged.update(found)
        else:
            merged["state"].update(found["state"])
            merged["param_groups"] += found["param_groups"]
    opt = all_in_one[0][1]
    file = saved(dcp.get_optimizer_state_dict(whole, opt, options=options))
    for m in (one, two):
        m.load_state_dict(parts.state_dict())
    into_one, into_two = made([one], lr=1.0), made(stages(two), lr=1.0)
    for pairs, source in ((into_one, merged), (into_two, file)):
        for m, o in pairs:
            dcp.set_optimizer_state_dict(m, o, copy.deepcopy(source), options=options)
    train(all_in_one + into_one + into_two, 3, 5)
    assert weights_of(one) == weights_of(whole) == weights_of(two)
    assert states(into_one[0][1]) == states(opt)


def test_plain_states_of_torch_load_flattened():
    """torch's AdamW wrote it. It lacks our small tensors, and torch hands over its own in their
    place."""
    options = flattened()
    model, other = network(), network()
    theirs = torch.optim.AdamW(model.parameters(), lr=0.02)
    run(theirs, model, 0, 3)
    other.load_state_dict(model.state_dict())
    opt = halfstep.AdamW(other.named_parameters(), lr=0.5)
    file = dcp.get_optimizer_state_dict(model, theirs, options=options)
    for name in named(other):  # group keys that torch's has not are the loader's to bring
        for key, value in opt.param_groups[0].items():
            file.setdefault(f"param_groups.{name}.{key}", value)
    dcp.set_optimizer_state_dict(other, opt, file, options=options)
    run(theirs, model, 3, 6)
    run(opt, other, 3, 6)
    assert_close(model, other)


@pytest.mark.parametrize(
    "there,here", [("sr-int4", "f32"), ("ecc8-int8", "kahan"), ("f32", "ecc8-int8")]
)
def test_flattened_states_of_another_format_load_or_are_refused(there, here):
    """Where torch hands over everything, states are converted. Where it leaves something out, the
    error says so."""
    options = flattened()
    model, other = network(RECIPES[there][0]), network(RECIPES[here][0])
    opt, into = scheduled("adamw", model, there), scheduled("adamw", other, here)
    run(opt, model, 0, 3)
    file = saved(dcp.get_optimizer_state_dict(model, opt, options=options))
    run(into, other, 0, 1)
    before = states(into)
    try:
        with told("the loaded states are .* converted", there != "f32"):
            dcp.set_optimizer_state_dict(other, into, file, options=options)
    except ValueError as error:
        assert "0.weight" in str(error) and states(into) == before
        return
    for p, q in zip(model.parameters(), other.parameters()):
        a, b = opt.read_state(p, "exp_avg"), into.read_state(q, "exp_avg")
        assert (b - a).abs().max() <= 0.05 * a.abs().max()
    run(into, other, 3, 4)
    assert all(into.state[q]["step"] == 4 for q in other.parameters())


def test_removing_a_group_leaves_the_rest_usable():
    """Also the first group. Its states stay with the optimizer, as in torch, but are not saved."""
    for gone in (0, 1, 2):
        params = parameters(torch.bfloat16)
        names = list(params)
        split = [names[:2], names[2:4], names[4:]]
        options = {"weights": "bf16-kahan", "states": "int8", "clip_norm": 1.0}
        opt = halfstep.AdamW(
            [
                {"params": [params[n] for n in part], "lr": 0.01 * (1 + i)}
                for i, part in enumerate(split)
            ],
            seed=3,
            **options,
        )
        run(opt, params, 0, 2)
        kept = {n: k for n, k in zip(names, ids(opt))}
        removed = opt.param_groups.pop(gone)
        del split[gone]
        rest = {n: params[n] for part in split for n in part}
        assert opt.seed == 3 and repr(opt) and opt.memory()
        assert opt.state_dict()["param_groups"][0]["group_steps"] == 2
        fresh = twins(rest)
        other = halfstep.AdamW([{"params": [fresh[n] for n in part]} for part in split], **options)
        other.load_state_dict(saved(opt.state_dict()))
        same_steps(opt, other, rest, fresh, 2, 4)
        assert {n: k for n, k in zip(rest, ids(opt))} == {n: kept[n] for n in rest}
        assert all(g["group_steps"] == 4 for g in opt.param_groups)
        late = Parameter(torch.ones(4, 64, dtype=torch.bfloat16))
        opt.add_param_group({"params": [late]})  # at a place that somebody's id was made of
        late.grad = torch.ones_like(late)
        opt.step()
        assert len(set(ids(opt))) == len(ids(opt))
        assert removed["params"][0] in opt.state


def zero(rank, size):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    options = {"lr": 0.02, "states": "int8", "weights": "bf16-ecc8"}

    def made():
        model = network(torch.bfloat16)
        halfstep.name_parameters(model)
        return model, ZeroRedundancyOptimizer(model.parameters(), halfstep.AdamW, **options)

    model, opt = made()
    run(opt, model, 0, 3)
    opt.consolidate_state_dict(0)
    files = [opt.state_dict() if rank == 0 else None]
    weights = copy.deepcopy(model.state_dict())
    torch.distributed.broadcast_object_list(files, 0)
    again, other = made()
    run(other, again, 7, 9)
    again.load_state_dict(weights)
    other.load_state_dict(copy.deepcopy(files[0]))
    run(opt, model, 3, 6)
    run(other, again, 3, 6)
    plain = network(torch.bfloat16)
    alone = halfstep.AdamW(plain.named_parameters(), seed=0, **options)
    run(alone, plain, 0, 6)
    return [weights_of(m) for m in (model, again, plain)], [
        o.param_groups[0]["group_steps"] for o in (opt, other, alone)
    ]


def test_zero_redundancy_optimizer(pool):
    """States are divided over two ranks, consolidated and loaded again: the bits of one optimizer.
    Lists in groups once prevented that."""
    found = pool.run(2, zero)
    for models, steps in found:
        assert models == [found[0][0][2]] * 3
        assert steps == [6, 6, 6]


# ---- torch's optimizers --------------------------------------------------------------------------


@pytest.mark.parametrize("states", ["int8", "int6", "int4", "fp8", "dyn8"])
def test_codes_never_stand_under_torchs_names(states):
    """torch.optim.AdamW takes any such file without a check. Its next step must not go on from
    codes."""
    params = parameters(shapes={"matrix": (32, 256), "vector": (33,)})
    opt = halfstep.AdamW(params.values(), states=states)
    run(opt, params, 0, 2)
    assert [
        ["exp_avg" in opt.state[p], "exp_avg.codes" in opt.state[p]] for p in params.values()
    ] == [[False, True], [True, False]]
    others = twins(params)
    theirs = torch.optim.AdamW(others.values())
    theirs.load_state_dict(copy.deepcopy(opt.state_dict()))
    set_gradients(others, 2)
    with pytest.raises(KeyError, match="exp_avg"):
        theirs.step()
    theirs.load_state_dict(opt.torch_state_dict())
    theirs.step()


def test_float_states_are_torchs_own():
    """An f32 optimizer's file goes on in torch as it is. It comes back without torch's casts."""
    params = parameters()
    opt = halfstep.AdamW(params.values(), lr=0.01)
    run(opt, params, 0, 3)
    others = twins(params)
    theirs = torch.optim.AdamW(others.values(), lr=1.0)
    theirs.load_state_dict(copy.deepcopy(opt.state_dict()))
    run(opt, params, 3, 5)
    run(theirs, others, 3, 5)
    assert_close(params, others)
    for dtype in (torch.float32, torch.bfloat16):  # what torch casts the ids to
        cast = {n: Parameter(p.detach().to(dtype)) for n, p in others.items()}
        through = torch.optim.AdamW(cast.values())
        through.load_state_dict(copy.deepcopy(theirs.state_dict()))
        back = halfstep.AdamW(cast.values(), lr=0.5)
        back.load_state_dict(copy.deepcopy(through.state_dict()))
        run(back, cast, 5, 6)
        assert all(back.state[p]["step"] == 6 for p in cast.values())
        assert ids(back) == [abi.name_id(f"parameter {i}") for i in range(len(cast))]


# ---- States that are not of this layout ----------------------------------------------------------


def without(*keys):
    def change(file):
        for state in file["state"].values():
            for key in keys:
                state.pop(key, None)

    return change


def in_lists(file):
    """Ids and recipes in the group, one for each parameter."""
    (group,) = file["param_groups"]
    group["ids"] = [int(file["state"][k].pop("id")) % 2**64 for k in group["params"]]
    group["recipes"] = ["adamw/bf16-sr/int8"] * len(group["params"])
    for state in file["state"].values():
        del state["recipe"]


def codes_under_names(file):
    for state in file["state"].values():
        for key in [key for key in state if key.endswith(".codes")]:
            state[key[: -len(".codes")]] = state.pop(key)


@pytest.mark.parametrize(
    "change, said",
    [
        (in_lists, "has 'state_steps' and no 'recipe', so its formats are not known"),
        (without("recipe"), "has 'id' and no 'recipe', so its formats are not known"),
        (without("id"), "has no state 'id', which adamw/bf16-sr/int8 needs"),
        (without("writes"), "has no state 'writes'"),
        (without("exp_avg_sq.grid"), "has no state 'exp_avg_sq.grid'"),
        (codes_under_names, "has no state 'exp_avg.codes'"),
        (
            lambda file: file["param_groups"][0].pop("generator"),
            "group 0 of this state has a 'seed' and no 'generator'",
        ),
    ],
)
def test_a_state_of_another_layout_is_refused(change, said):
    """As a state dictionary nothing changes; as a pickle it is refused before a step."""
    params = parameters(torch.bfloat16, {"m": (4, 64), "v": (33,)})
    opt = halfstep.AdamW(params.items(), states="int8")
    run(opt, params, 0, 2)
    file = saved(opt.state_dict())
    change(file)
    fresh = twins(params)
    other = halfstep.AdamW(fresh.items(), states="int8")
    before = weights_of(fresh)
    with pytest.raises(ValueError, match=said):
        other.load_state_dict(file)
    assert weights_of(fresh) == before and not other.state
    # A pickle of it, as __setstate__ gets it.
    if "no 'recipe'" in said or "generator" in said:
        held = dict(zip(fresh.values(), file["state"].values()))
        groups = [{**file["param_groups"][0], "params": list(fresh.values())}]
        pickled = {**other.__getstate__(), "state": held, "param_groups": groups}
        again = halfstep.AdamW.__new__(halfstep.AdamW)
        with pytest.raises(ValueError, match=said):
            again.__setstate__(pickled)
            run(again, fresh, 2, 3)
        assert weights_of(fresh) == before
