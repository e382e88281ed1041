"""Tests DDP, ZeroRedundancyOptimizer, FSDP1 and flat buffers. Their ranks hold whole parameters,
different ones, or unknown parts of them; also beside shards that they share."""

import contextlib
import gc
import io
import os

import pytest
import torch
from conftest import (
    bits,
    class_of,
    network,
    outcome,
    randn,
    run,
    set_gradients,
    told,
    twins,
    warnings_are,
    weights_of,
)
from torch import nn
from torch.nn import Parameter

import halfstep
from halfstep._step import release as checks
from halfstep._tensors import torch_public

RECIPE = {"weights": "bf16-ecc8", "states": "int8"}


# ---- DistributedDataParallel ---------------------------------------------------------------------


class Odd(nn.Module):
    """A frozen parameter, one that no batch uses, and one that only even steps use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.a, self.b, self.sometimes, self.unused = (nn.Linear(40, 40) for _ in range(4))
        self.frozen = Parameter(torch.ones(40), requires_grad=False)

    def forward(self, x, step):
        x = self.b(torch.tanh(self.a(x) * self.frozen))
        return self.sometimes(x) if step % 2 else x


def ddp(rank, size, named):
    model = Odd().to(torch.bfloat16)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    torch.manual_seed(rank)  # ranks need not agree
    params = model.named_parameters() if named else model.parameters()
    opt = halfstep.AdamW(params, lr=0.02, clip_norm=0.5, **RECIPE)
    after = []
    for step in range(4):
        x = randn((4, 40), 10 * step + rank).bfloat16()
        wrapped(x, step).float().pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
        after.append(weights_of(model))
    if rank == 0:  # an optimizer that only one rank has
        alone = halfstep.AdamW([Parameter(torch.ones(3))], clip_norm=1.0)
        alone.param_groups[0]["params"][0].grad = torch.ones(3)
        alone.step()
    return after


@pytest.mark.parametrize("named", [True, False])
def test_ddp_ranks_hold_the_same_bits(pool, named):
    found = pool.run(3, ddp, named)
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1]


# ---- ZeroRedundancyOptimizer ---------------------------------------------------------------------


def zero(rank, size, base, options, nan):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = network(torch.bfloat16)
    halfstep.name_parameters(model)
    opt = ZeroRedundancyOptimizer(
        model.parameters(), class_of(base), lr=0.02, norm_group=True, **RECIPE, **options
    )
    params = dict(model.named_parameters())
    moved = []
    for step in range(4):
        set_gradients(params, step)
        if nan and step == 2:
            params["0.bias"].grad[0] = float("nan")
        before = weights_of(params)
        with told("is not finite", nan and step == 2):
            opt.step()
        moved.append(sum(a != b for a, b in zip(before, weights_of(params))))
    return weights_of(params), moved, opt.optim.skipped_steps, opt.optim.grad_norm


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize(
    "base, options", [("adamw", {}), ("adamw", {"clip_norm": 0.25}), ("prodigy", {"d0": 1.0})]
)
def test_zero_redundancy_optimizer_with_a_norm_group(pool, base, options, nan):
    """The norm of all ranks, one verdict, and sums over all tensors: the bits of one process."""
    model = network(torch.bfloat16)
    alone = class_of(base)(model.named_parameters(), lr=0.02, seed=0, **RECIPE, **options)
    for step in range(4):
        set_gradients(model, step)
        if not (nan and step == 2):
            alone.step()
    for weights, moved, skipped, norm in pool.run(3, zero, base, options, nan):
        assert weights == weights_of(model)
        assert norm == alone.grad_norm and skipped == int(nan)
        assert moved == [6, 6, 0 if nan else 6, 6]


# ---- FSDP1, and flat buffers by name -------------------------------------------------------------


def layers():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 64)).bfloat16()


def fsdp1(rank, size, group):
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings_are("ignore"):
        model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"))
    opt = halfstep.AdamW(model.parameters(), lr=0.02, clip_norm=1.0, norm_group=group, **RECIPE)
    p = opt.param_groups[0]["params"][0]
    norms = []
    for step in range(3):
        x = randn((4, 96), step).bfloat16()
        model(x).float().pow(2).mean().backward()
        squares = p.grad.double().pow(2).sum()
        said = outcome(opt.step)
        if said != "stepped":
            return said
        torch.distributed.all_reduce(squares)
        norms.append((opt.grad_norm, float(squares.sqrt())))
        opt.zero_grad()
    return norms, opt.memory()["states"] / p.numel(), opt.fell_back(), int(opt.state[p]["id"])


def test_fsdp1_keeps_its_formats(pool):
    found = pool.run(2, fsdp1, True)
    for norms, bytes_each, fallen, _ in found:
        assert all(abs(a - b) <= 1e-9 * b for a, b in norms)
        assert 2.0 <= bytes_each < 2.2 and not fallen
    assert found[0][3] != found[1][3]  # ranks round by bits of their own
    assert all("norm_group=" in said for said in pool.run(2, fsdp1, None))


def reshard_fsdp1(rank, size, path, states):
    """Trains and saves if there is no file, else loads. Returns the largest relative difference
    between loaded and saved states, and the warnings."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings_are("ignore"):
        model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"))
        opt = halfstep.AdamW(model.parameters(), lr=0.02, norm_group=True, states=states)

        def gathered():
            return FullyShardedDataParallel.optim_state_dict(
                model, opt, optim_state_dict=opt.torch_state_dict()
            )

        if not os.path.exists(path):
            for _ in range(2):
                model(torch.ones(4, 96).bfloat16()).float().pow(2).mean().backward()
                opt.step()
                opt.zero_grad()
            found = gathered()
            torch.distributed.barrier()  # or ranks that come late find the file
            if rank == 0:
                torch.save(found, path)
            return None
        there = torch.load(path)
        mine = FullyShardedDataParallel.optim_state_dict_to_load(model, opt, there)
        with warnings_are("always") as said:
            opt.load_state_dict(mine)
        found = gathered()
    off = (
        max(
            float((found["state"][name][key] - value).abs().max() / value.abs().max())
            for name, state in there["state"].items()
            for key, value in state.items()
            if key != "step"
        )
        if rank == 0
        else 0.0
    )
    return off, [str(w.message) for w in said if "halfstep" in str(w.message)]


@pytest.mark.parametrize("states", ["f32", "int8"])
def test_fsdp1_reshards_by_plain_states(pool, states, tmp_path):
    path = str(tmp_path / "saved")
    pool.run(2, reshard_fsdp1, path, states)
    for off, said in pool.run(4, reshard_fsdp1, path, states):
        if states == "f32":
            assert off == 0.0 and not said
        else:
            assert off < 0.02 and len(said) == 1 and "quantized anew" in said[0]


def deepspeed(rank, size, folder):
    """Runs ZeRO 1 over an optimizer of ours. Returns if a run that was saved and loaded has the
    bits of the run that was not, and what it holds."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu"
    )
    with warnings_are("ignore"), contextlib.redirect_stdout(io.StringIO()):
        import deepspeed

        def made():
            model = layers()
            opt = halfstep.AdamW(
                model.parameters(),
                lr=1e-2,
                states="int8",
                flat="shards",
                norm_group=True,
                clip_norm=1.0,
            )
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "zero_optimization": {"stage": 1},
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": True},
            }
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=opt, config=config, dist_init_required=False
            )
            return engine, opt

        def train(engine, first, last):
            for step in range(first, last):
                x = randn((4, 96), 10 * step + rank).bfloat16()
                engine.backward(engine(x).float().pow(2).mean())
                engine.step()

        engine, opt = made()
        before = weights_of(engine.module)
        train(engine, 0, 3)
        engine.save_checkpoint(folder, tag="third")
        train(engine, 3, 6)
        again, other = made()
        again.load_checkpoint(folder, tag="third")
        train(again, 3, 6)
    ends = [weights_of(one.module) for one in (engine, again)]
    p = opt.param_groups[0]["params"][0]
    return (
        ends[0] == ends[1] != before,
        opt.recipe(p),
        opt.memory()["states"] / p.numel(),
        opt.grad_norm == other.grad_norm,
        opt.grad_norm,
    )


@pytest.mark.all
def test_deepspeed_resumes(pool, tmp_path):
    found = pool.run(2, deepspeed, str(tmp_path))
    for same, recipe, held, norms, _ in found:
        assert same and norms and recipe == "adamw/f32/int8" and held < 2.2
    assert found[0][-1] == found[1][-1]  # of all shards


def flat_buffers(rank, size, flat):
    params = {
        "flat": Parameter(randn(8192, rank).bfloat16()),
        "norm": Parameter(torch.ones(512)),
    }
    options = {"flat": flat, "norm_group": bool(flat) or None, **RECIPE}
    opt = halfstep.AdamW(params.items(), lr=0.02, **options)
    run(opt, params, 0, 2)
    state, fresh = opt.state_dict(), twins(params)
    other = halfstep.AdamW(fresh.items(), lr=0.5, **options)
    other.load_state_dict(state)
    for o, ps in ((opt, params), (other, fresh)):
        run(o, ps, 5, 6)
    buffer = params["flat"]
    held = sum(
        v.numel() * v.element_size()
        for k, v in opt.state[buffer].items()
        if k.startswith("exp_avg")
    )
    return (
        held / 8192,
        opt.fell_back(),
        int(opt.state[buffer]["id"]),
        bits(buffer) == bits(fresh["flat"]),
        opt.read_state(buffer, "exp_avg").shape,
    )


@pytest.mark.parametrize("flat", [False, True, "shards"])
def test_flat_buffers(pool, flat):
    found = pool.run(2, flat_buffers, flat)
    for held, fallen, _, same, shape in found:
        assert same and tuple(shape) == (8192,)
        assert (held < 2.2) == bool(flat) and ("flat" in fallen) == (not flat)
    assert (found[0][2] != found[1][2]) == (flat == "shards")


def replicated(rank, size):
    """Runs two replicas of two shards each. Returns their ids."""
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    buffer = Parameter(torch.ones(8192).bfloat16())
    opt = halfstep.AdamW([("flat", buffer)], flat="shards", norm_group=groups[rank // 2], **RECIPE)
    set_gradients({"flat": buffer}, 0)
    opt.step()
    return int(opt.state[buffer]["id"])


def test_replicas_of_flat_shards_round_alike(pool):
    found = pool.run(4, replicated)
    assert found[0] == found[2] != found[1] == found[3]


def test_flat_says_what_it_takes():
    with pytest.raises(ValueError, match="flat='yes'"):
        halfstep.AdamW([Parameter(torch.ones(3))], flat="yes")


# ---- Gradient release where gradients belong to somebody else ------------------------------------


def release_under_ddp(rank, size):
    model = network(torch.bfloat16)
    wrapped = nn.parallel.DistributedDataParallel(model)
    opt = halfstep.AdamW(model.named_parameters(), gradient_release=True, **RECIPE)
    before = weights_of(model)
    said = outcome(lambda: wrapped(torch.ones(2, 48).bfloat16()).float().sum().backward())
    return said, before == weights_of(model), opt.skipped_steps


def test_release_refuses_the_gradients_of_ddp(pool):
    for said, unchanged, _ in pool.run(2, release_under_ddp):
        assert "DistributedDataParallel" in said and unchanged


class Sees:
    """A hook of a wrapped model that gets keyword arguments of names that the package uses, too."""

    def __call__(self, module, args, kwargs):
        return args, {k: v for k, v in kwargs.items() if k not in ("wrapper", "found", "method")}


def release_and_wrappers(rank, size, when):
    """Makes two backward passes. Returns if they are refused, and if anything has moved."""
    model, other = network(torch.bfloat16), network(torch.bfloat16)
    for one in (model, other):
        one.register_forward_pre_hook(Sees(), with_kwargs=True)
    wrap, called, kept = nn.parallel.DistributedDataParallel, None, []
    if when in ("before", "older than the package", "inner called", "forward before", "gone"):
        called = wrap(model)
    if when == "older than the package":  # which has not seen it made
        checks._wrappers.clear()
        checks.noted = 0
    x = torch.ones(2, 48).bfloat16()
    if when == "forward before":
        loss = called(x).float().sum()
    if when == "gone":
        called = None
        gc.collect()
    opt = halfstep.AdamW(model.named_parameters(), lr=0.02, gradient_release=True, **RECIPE)
    if when == "after a step":
        model(x).float().sum().backward()
        opt.step()
    if when in ("after", "after a step"):
        called = wrap(model)
    if when == "a class of it":
        called = type("Theirs", (wrap,), {})(model)
    if when == "another model":
        wrap(other)(x, wrapper=1, found=2, method=3).float().sum().backward()
    if when in ("inner called", "another model", "gone"):
        kept.append(called)
        called = model
    before, said = weights_of(model), []
    for _ in range(2):
        try:
            if when != "forward before" or said:
                loss = called(x, wrapper=1, found=2, method=3).float().sum()
            loss.backward()
            opt.step()
            said.append("stepped")
        except RuntimeError as error:
            said.append(str(error))
            for p in model.parameters():
                p.grad = None
    return said, before == weights_of(model)


@pytest.mark.parametrize(
    "when",
    [
        "before",
        "after",
        "after a step",
        "older than the package",
        "inner called",
        "forward before",
        "a class of it",
    ],
)
def test_release_finds_wrappers_whenever_they_were_made(pool, when):
    for said, unchanged in pool.run(2, release_and_wrappers, when):
        for text in said:
            assert text.startswith(
                "halfstep: gradient release would take the gradient of '0.weight' before"
                " DistributedDataParallel has averaged it"
            )
        assert len(said) == 2 and unchanged


@pytest.mark.parametrize("when", ["another model", "gone"])
def test_release_leaves_other_wrappers_alone(pool, when):
    for said, unchanged in pool.run(2, release_and_wrappers, when):
        assert said == ["stepped", "stepped"] and not unchanged


def release_without_a_search(rank, size):
    """Wrappers are not looked for among all objects, and are looked at once."""
    gc.get_objects = None
    wrapped = nn.parallel.DistributedDataParallel(network(torch.bfloat16))
    looks, model = [], network(torch.bfloat16)
    named = wrapped.module.named_parameters
    wrapped.module.named_parameters = lambda *a, **k: looks.append(1) or named(*a, **k)
    opt = halfstep.AdamW(model.named_parameters(), gradient_release=True, **RECIPE)
    for _ in range(3):
        model(torch.ones(2, 48).bfloat16()).float().sum().backward()
        opt.step()
    return len(looks)


def test_release_looks_once_at_each_wrapper(pool):
    assert pool.run(2, release_without_a_search) == [1, 1]


def release_under_fsdp2(rank, size):
    from torch.distributed.fsdp import fully_shard

    made = []
    for release in (True, False):
        model = fully_shard(network(torch.bfloat16))
        opt = halfstep.AdamW(model.named_parameters(), lr=0.02, gradient_release=release, **RECIPE)
        for step in range(3):
            x = randn((4, 48), 10 * step + rank).bfloat16()
            model(x).float().pow(2).mean().backward()
            assert all((p.grad is None) == release for p in model.parameters())
            opt.step()
            opt.zero_grad()
        made.append([bits(p.full_tensor()) for p in model.parameters()])
    return made[0] == made[1]


def test_release_under_fsdp2_gives_the_bits_of_steps(pool):
    assert all(pool.run(2, release_under_fsdp2))


# ---- What ranks of a norm group compare ----------------------------------------------------------


def compared(rank, size, what):
    p = Parameter(torch.ones(40) * rank)
    options = {
        "seed": rank if what == "seed" else 0,
        "clip_norm": 1.0 + (rank if what == "clip_norm" else 0),
    }
    opt = halfstep.AdamW([(f"p{rank}", p)], norm_group=True, **options)
    said = []
    for step in range(2):
        p.grad = torch.ones(40)
        said.append(outcome(opt.step))
        if step == 0 and what == "later":
            opt.add_param_group({"params": [(f"q{rank}", Parameter(torch.ones(2)))]})
            opt.clip_norm = 1.0 + rank
        elif step == 0 and what == "loaded":
            state = opt.state_dict()
            state["param_groups"][0]["seed"] = rank
            opt.load_state_dict(state)
    return said


@pytest.mark.parametrize(
    "what, when", [("seed", 0), ("clip_norm", 0), ("later", 1), ("loaded", 1), ("nothing", 2)]
)
def test_ranks_of_a_norm_group_compare_what_they_have_in_common(pool, what, when):
    """At the first step, and at the first after groups were added or states loaded."""
    for said in pool.run(2, compared, what):
        assert said[:when] == ["stepped"] * min(when, 2)
        if when < 2:
            key = {"later": "clip_norm", "loaded": "seed"}.get(what, what)
            assert f"ranks that have one norm_group disagree about the {key}" in said[when]


def refused_for_another(rank, size):
    p = Parameter(torch.ones(40))
    opt = halfstep.AdamW([(f"p{rank}", p)], norm_group=True)
    said = []
    for step in range(11):
        p.grad = torch.full((40,), float("nan") if rank else 1.0)
        with warnings_are("always") as caught:
            opt.step()
        said.append([str(w.message) for w in caught])
    return said, opt.skipped_steps, bool((p == 1).all())


def test_a_rank_that_is_refused_for_another_warns_too(pool):
    """It warns at the first time and at the tenth."""
    for rank, (said, skipped, unchanged) in enumerate(pool.run(2, refused_for_another)):
        assert skipped == 11 and unchanged
        assert [i for i, texts in enumerate(said) if texts] == [0, 9]
        assert ("'p1' is not finite" if rank else "a gradient on another rank") in said[0][0]
        assert "10 by now" in said[9][0]


def warned(rank, size):
    if rank:
        torch_public.warn("a text")


def test_a_warning_that_a_rank_does_not_expect_fails_the_test(pool):
    with pytest.raises(AssertionError, match="{1: .*UserWarning: halfstep: a text"):
        pool.run(2, warned)


def estimates(params, goals, ranks):
    """Minimises the distance of tensors from the goals of their ranks. The last rank's tensor has
    no gradient at first. Returns d after each step."""
    opt = halfstep.Prodigy(
        [(f"p{i}", p) for i, p in zip(ranks, params)],
        norm_group=True if len(ranks) < len(goals) else None,
    )
    told = []
    for step in range(60):
        for i, p in zip(ranks, params):
            p.grad = None if i == len(goals) - 1 and step < 25 else p.detach() - goals[i]
        opt.step()
        told.append(opt.param_groups[0]["d"])
    return told


def late_rank(rank, size):
    """Each rank has a tensor of its own. Returns d and the tensor."""
    p = Parameter(torch.zeros(16, 64))
    with told("no parameter has had a gradient", rank == size - 1):
        return estimates([p], randn((size, 16, 64), 0), [rank]), p.detach()


def test_prodigy_has_one_estimate_in_a_norm_group_also_on_a_rank_that_comes_late(pool):
    size = 3
    params = [Parameter(torch.zeros(16, 64)) for _ in range(size)]
    told = estimates(params, randn((size, 16, 64), 0), range(size))
    found = pool.run(size, late_rank)
    assert found[0][0] == found[1][0] == told and found[2][0][25:] == told[25:]
    assert all(torch.equal(p, own) for p, (_, own) in zip(params, found)) and told[-1] > 0.01


# ---- Parameters beside shards --------------------------------------------------------------------

#: tensors that are cut over ranks by rows, or whole on all of them
SHARED = {"cut": (24, 64), "whole": (8, 40)}


def beside(rank, size, cls, options, own, spoil=None):
    """Trains shards, and beside them a tensor of each rank's own, or copies of one. One process
    has all of them. `spoil` changes rank 1's gradient of these in the last step. Returns bits,
    norm, d, skipped steps, and what the last step said."""
    from test_dtensors import cut, give_gradients, mesh_of, values_of, whole_bits
    from torch.distributed.tensor import Replicate, Shard

    values = values_of(SHARED, torch.bfloat16)
    params = {name: Parameter(value) for name, value in values.items()}
    if size > 1:
        placements = {"cut": [Shard(0)], "whole": [Replicate()]}
        params = cut(values, mesh_of((size,)), lambda name, _: placements[name])
    else:
        options = {**options, "norm_group": None}
    for i in ((0, 1) if size == 1 else (rank,)) if own else (0,):
        params[f"own{i}"] = Parameter(randn((16, 64), i).bfloat16())
    opt = getattr(halfstep, cls)(params.items(), seed=0, states="int8", **options)
    for step in range(3):
        give_gradients(params, 0)
        if spoil and step == 2 and rank == size - 1:
            *_, last = params.values()
            last.grad[0] = spoil(last.grad[0])
        with warnings_are("always"):  # skipped steps are counted below
            said = outcome(opt.step)
    bits_of = {name: whole_bits(p) for name, p in params.items()}
    return bits_of, opt.grad_norm, opt.param_groups[0].get("d"), opt.skipped_steps, said


def nan(row):
    return row * float("nan")


def noise(row):
    return row * 1.004


def larger(row):
    return row * 2


CLIP, SUMS, GROUP = {"lr": 0.02, "clip_norm": 0.5}, {"lr": 1.0, "d0": 1e-3}, {"norm_group": True}
BESIDE = {
    "own": ("AdamW", {**CLIP, **GROUP}, True),
    "own, sums": ("Prodigy", {**SUMS, **GROUP}, True),
    "own, a NaN": ("AdamW", {**CLIP, **GROUP}, True, nan),
    "own, one tensor refused": ("AdamW", {**CLIP, **GROUP, "scan": "per-tensor"}, True, nan),
    "copies": ("AdamW", CLIP, False),
    "copies, sums": ("Prodigy", SUMS, False),
    "copies, a NaN, nothing clipped": ("AdamW", {"lr": 0.02}, False, nan),
    "copies, noise": ("AdamW", CLIP, False, noise),
    "copies, another gradient": ("AdamW", CLIP, False, larger),
    "own, not said": ("AdamW", CLIP, True),
    "own, sums, not said": ("Prodigy", SUMS, True),
}


def all_beside(rank, size):
    return [beside(rank, size, *case) for case in BESIDE.values()]


def test_parameters_beside_shards_count_once(pool):
    """One norm, one verdict and one set of sums: those of one process that has all of them. What
    cannot be told apart is refused."""
    pytest.importorskip("torch.distributed.tensor", reason="DTensors are public from torch 2.5 on")
    found = pool.run(2, all_beside)
    for i, (name, case) in enumerate(BESIDE.items()):
        alone, norm, d, skipped, _ = beside(0, 1, *case)
        both = [answers[i] for answers in found]
        if "not said" in name or "another" in name:
            for rank, (*_, said) in enumerate(both):
                own = "own0" if "copies" in name else f"own{rank}"
                assert f"({own!r})" in said and "give norm_group=" in said, name
            continue
        if "sums" in name:
            assert d > 2 * SUMS["d0"]
        for rank, (got, *stepped, _) in enumerate(both):
            wrong = {key for key in got if got[key] != alone[key]}
            assert wrong <= ({"own0"} if "noise" in name else set()), (name, rank)
            assert stepped[:2] == [norm, d], (name, rank)
            assert stepped[2] == (0 if "one tensor" in name and rank == 0 else skipped), (
                name,
                rank,
            )
