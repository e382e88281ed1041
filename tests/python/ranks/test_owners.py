"""Tests matrices that one rank steps for all that share them: the bits of one process, by a share
of its work. test_dtensors.py has more layouts and every recipe."""

import copy

import pytest
import torch
from conftest import (
    RECIPES,
    bits,
    class_of,
    network,
    outcome,
    parameters,
    randn,
    set_gradients,
    told,
    weights_of,
)
from torch.nn import Parameter

import halfstep
from halfstep._library import abi, calls
from halfstep._ranks import ownership
from halfstep._states.handles import slot_info

pytest.importorskip("torch.distributed.tensor", reason="DTensors are public from torch 2.5 on")

from test_dtensors import all_bits, cut, give_gradients, laid_out, mesh_of, rows  # noqa: E402

#: embeddings and vectors of AdamW; matrices of Muon, one of them in one rank's part, and a stack
SHAPES = {
    "embed.weight": (40, 64),
    "body.up": (64, 96),
    "body.down": (33, 64),
    "body.thin": (1, 64),
    "body.q": (16, 24),
    "body.k": (24, 16),
    "body.v": (20, 20),
    "body.experts": (3, 16, 64),
    "body.bias": (33,),
}
ADAMW = {"lr": 3e-3, "weight_decay": 0.1}


def values_of(recipe, shapes=SHAPES):
    return {name: p.detach() for name, p in parameters(RECIPES[recipe][0], shapes).items()}


def optimizer(rule, recipe, params, **options):
    """Makes an optimizer. A rule "mixed" is Muon with AdamW beside it."""
    if rule == "mixed":
        rule, options = "muon", {"adamw": ADAMW, **options}
    more = {"lr": 0.02, "seed": 0, "clip_norm": 0.5, **RECIPES[recipe][1], **options}
    return class_of(rule)(params.items(), **more)


def made(rule, recipe, layout, size, shapes=SHAPES, **options):
    """Makes parameters in a layout, and an optimizer. None: one process; "ddp": the same tensors on
    every rank."""
    values = values_of(recipe, shapes)
    if layout == "rows":
        params = cut(values, mesh_of((size,)), rows)
    elif layout in (None, "ddp"):
        params = {name: Parameter(value) for name, value in values.items()}
    else:
        params = laid_out(values, layout, size)
    if layout == "ddp":
        options["owners"] = True
    return params, optimizer(rule, recipe, params, **options)


def train(opt, params, first, last, bad=None):
    """Makes steps. In the step `bad` the last element of a matrix has a NaN, which is in the part
    of one rank, and of its replicas."""
    from torch.distributed.tensor import distribute_tensor

    for step in range(first, last):
        give_gradients(params, step)
        p = params["body.down"]
        if step == bad:
            cut = hasattr(p.grad, "full_tensor")
            whole = p.grad.full_tensor() if cut else p.grad
            whole[-1, -1] = float("nan")
            p.grad = distribute_tensor(whole, p.device_mesh, p.placements) if cut else whole
        with told("'body.down' is not finite", step == bad):
            opt.step()


def trained(rank, size, case, layout):
    """Trains with a refused step, and goes on from a copy of the state. Every matrix is a batch."""
    ownership.BATCH_BYTES = 1
    rule, recipe, options = case
    params, opt = made(rule, recipe, layout, size, **options)
    train(opt, params, 0, 3, 1)
    batches = sum(isinstance(part.stage, ownership.Batch) for part in opt._parts.cache.engine.parts)
    state, skipped = copy.deepcopy(opt.state_dict()), opt.skipped_steps
    opt = optimizer(rule, recipe, params, **options, **{"owners": layout == "ddp" or None})
    opt.load_state_dict(state)
    train(opt, params, 3, 5)
    return all_bits(opt, params), opt.grad_norm, skipped, opt.skipped_steps, batches


CASES = [
    ("mixed", "f32", {}),
    ("mixed", "bf16-sr", {"normalize_rows": "keep-norm"}),
    ("mixed", "ecc8-int8", {"scan": "per-tensor"}),
    ("muon", "kahan", {"clip_norm": 0.0, "decay": "cautious"}),
    ("adafactor", "kahan", {}),
    ("came", "ecc8-int8", {}),
]


def several(rank, size, layout, cases):
    return [trained(rank, size, case, layout) for case in cases]


@pytest.mark.parametrize(
    "layout, size",
    [("rows", 3), ("ddp", 2)]
    + [
        pytest.param(layout, size, marks=pytest.mark.all)
        for layout, size in (("rows", 2), ("rows", 4), ("hsdp", 4), ("grid", 4), ("ddp", 4))
    ],
)
def test_owners_give_the_bits_of_one_process(pool, layout, size):
    cases = CASES[:3] if (layout, size) == ("rows", 3) else CASES  # test_dtensors.py has others
    found = pool.run(size, several, layout, cases)
    for i, case in enumerate(cases):
        wanted = trained(0, 1, case, None)
        for rank, answers in enumerate(found):
            got, norm, skipped, later, batches = answers[i]
            assert (norm, skipped, later) == wanted[1:4] and batches > 1, (case, rank)
            wrong = [name for name in got if got[name] != wanted[0][name]]
            assert not wrong, (case, rank, wrong)


# ---- Work ----------------------------------------------------------------------------------------

#: the matrices of a transformer of five layers, and one of another aspect
MODEL = {
    **{
        f"{layer}.{name}": shape
        for layer in range(5)
        for name, shape in {
            **dict.fromkeys(("q", "k", "v", "o"), (48, 48)),
            **dict.fromkeys(("gate", "up"), (96, 48)),
            "down": (48, 96),
        }.items()
    },
    "odd": (24, 200),
}


def products(rank, size, layout, shapes):
    """Returns how many multiplications of Newton-Schulz the library makes in a step, from the
    shapes that each of its handles steps."""
    made_here = [0]
    finish = calls.finish

    def counted(handle, call):
        for i in range(abi.lib.halfstep_tensor_count(handle)):
            info = slot_info(handle, i, abi.SLOT_WEIGHT)
            least, most = sorted((info.rows, info.columns))
            made_here[0] += 5 * 2 * least**2 * (2 * most + least)
        return finish(handle, call)

    calls.finish = counted
    params, opt = made("muon", "f32", layout, size, shapes)
    give_gradients(params, 0)
    opt.step()
    return made_here[0]


@pytest.mark.parametrize(
    "layout, size", [("rows", 3), ("ddp", 4), pytest.param("hsdp", 4, marks=pytest.mark.all)]
)
def test_each_rank_does_its_share(pool, layout, size):
    whole = sum(5 * 2 * min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in MODEL.values())
    found = pool.run(size, products, layout, MODEL)
    assert sum(found) == whole
    assert max(found) <= whole * (1 / size + 0.05), [work / whole for work in found]
    # One large matrix is the most that a rank can have.
    shapes = {"large": (96, 96), "small": (32, 48), "more": (32, 32)}
    found = pool.run(size, products, layout, shapes)
    assert max(found) == 5 * 2 * 96**2 * 3 * 96


def test_assignment():
    """Largest first, to the owner that has the least; equal works in their order."""
    owners, order = ownership.assign([1, 5, 3, 3, 4], 2)
    assert order == [1, 4, 2, 3, 0] and owners == [1, 0, 1, 0, 1]
    assert ownership.assign([], 3) == ([], [])


def room(rank, size, layout):
    """Returns the number of batches, the size of their room, and what happens in a step: "x" begins
    a message, "w" waits for it, "s" steps a batch."""
    ownership.BATCH_BYTES = 40_000
    log, finish = [], calls.finish

    def logged(method):
        def begins(*arguments):
            log.append("x")
            wait = method(*arguments)
            return lambda: log.append("w") or wait()

        return begins

    for name in ("exchange", "publish"):
        setattr(ownership.Team, name, logged(getattr(ownership.Team, name)))
    calls.finish = lambda *call: log.append("s") or finish(*call)
    params, opt = made("muon", "f32", layout, size, MODEL)
    give_gradients(params, 0)
    opt.step()
    stages = [part.stage for part in opt._parts.cache.engine.parts if part.stage]
    assert len({id(stage.room) for stage in stages}) == 1
    assert not any(stage.gradients or stage.given for stage in stages)
    return len(stages), stages[0].room._memory.numel(), "".join(log)


@pytest.mark.parametrize("layout", ["rows", "ddp"])
def test_memory_is_that_of_a_batch(pool, layout):
    """Also of messages. The next batch is on its way while one is stepped."""
    for batches, held, log in pool.run(2, room, layout):
        assert batches > 5 and held <= 48_000  # of 8 * 96 * 48 = 36,864 bytes for one matrix
        steps = [i for i, what in enumerate(log) if what == "s"]
        on_the_way = [log[:i].count("x") - log[:i].count("w") for i in range(len(log) + 1)]
        assert len(steps) == batches and on_the_way[-1] == 0 and max(on_the_way) <= 3, log
        assert all(on_the_way[i] > 0 for i in steps[1:-1]), log


def forecast(rank, size, cases):
    found = []
    for rule, recipe, options in cases:
        for layout in ("rows", None):
            params, opt = made(rule, recipe, layout, size, **options)
            give_gradients(params, 0)
            found.append(opt.memory())
    return found


def test_ranks_say_what_each_of_them_keeps(pool):
    cases = [("mixed", "kahan", {}), ("adafactor", "ecc8-int8", {"beta1": 0.9})]
    found = pool.run(2, forecast, cases)
    for i in range(0, 4, 2):
        both = {key: found[0][i][key] + found[1][i][key] for key in found[0][i]}
        assert both == found[0][i + 1] and found[0][i] != found[1][i]


# ---- DistributedDataParallel ---------------------------------------------------------------------


def wrapped(rank, size):
    """Trains a wrapped model, and beside it one whose ranks each step all matrices."""
    found = []
    for owners in (True, None):
        model = network(torch.bfloat16)
        whole = torch.nn.parallel.DistributedDataParallel(model)
        opt = optimizer("mixed", "ecc8-int8", dict(model.named_parameters()), owners=owners)
        for step in range(3):
            batch = randn((4, 48), 10 * step + rank).bfloat16()
            whole(batch).float().pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
        found.append((weights_of(model), opt.grad_norm))
    return found


def test_owners_under_distributed_data_parallel(pool):
    found = pool.run(2, wrapped)
    assert found[0][0] == found[0][1] == found[1][0] == found[1][1]


def other_ranks(rank, size, path, first, last):
    """Goes on from a file that rank 0 has written, and writes the next one."""
    params, opt = made("mixed", "ecc8-int8", "ddp", size)
    if first:
        state = torch.load(path, weights_only=True)
        opt.load_state_dict(state["optimizer"])
        for name, p in params.items():
            p.data.copy_(state["weights"][name])
    train(opt, params, first, last)
    state = {"optimizer": opt.state_dict(), "weights": {n: p.data for n, p in params.items()}}
    torch.distributed.barrier()
    if rank == 0:
        torch.save(state, path)
    torch.distributed.barrier()
    return all_bits(opt, params)


def test_replicas_go_on_with_other_numbers_of_ranks(pool, tmp_path):
    """Every rank has all states, so one of them saves."""
    for size, first, last in ((2, 0, 2), (3, 2, 4)):
        found = pool.run(size, other_ranks, str(tmp_path / "saved"), first, last)
    params, opt = made("mixed", "ecc8-int8", None, 1)
    train(opt, params, 0, 4)
    assert found == 3 * [all_bits(opt, params)]


def replicas(rank, size):
    """Micro-batches, one parameter at a time, another format, values that are read and written."""
    found = []
    for layout in ("ddp", None):
        params, opt = made("muon", "bf16-sr", layout, size, clip_norm=0.0)
        for step in range(3):
            give_gradients(params, step)
            opt.optimizer_accumulation = step < 2
            for p in params.values():
                opt.step_param(p)
        opt.step()
        p = params["body.up"]
        opt.write_state(p, "momentum_buffer", opt.read_state(p, "momentum_buffer") * 0.5)
        opt.write_weight(p, opt.read_weight(p) * 0.5)
        opt.param_groups[0]["states"] = "int8"
        for p in params.values():  # states are converted, and nothing is stepped
            p.grad = None
        opt.step()
        found.append(all_bits(opt, params))
        train(opt, params, 3, 5)
        p = params["body.up"]
        read = opt.read_state(p, "momentum_buffer"), opt.read_average(p)
        found += [all_bits(opt, params), [bits(value) for value in read]]
    return found


def test_replicas_do_what_one_process_does(pool):
    for found in pool.run(2, replicas):
        assert found[:3] == found[3:]


# ---- What is refused -----------------------------------------------------------------------------


def missing(rank, size, layout):
    """Steps with a gradient that one rank alone lacks, also at the first step."""
    said = []
    for first in (0, 1):
        params, opt = made("muon", "f32", layout, size)
        train(opt, params, 0, first)
        before = all_bits(opt, params) if first else None
        give_gradients(params, first)
        if rank == 0:
            params["body.up"].grad = None
        said.append(outcome(opt.step))
        assert first == 0 or all_bits(opt, params) == before
    return said


@pytest.mark.parametrize("layout", ["rows", "ddp"])
def test_a_gradient_that_some_ranks_lack_is_named(pool, layout):
    for said in pool.run(3, missing, layout):
        assert all("'body.up' has a gradient on 2 of the 3 ranks" in text for text in said), said


def test_where_there_are_no_owners():
    p = Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match="AdamW steps no matrices as a whole"):
        halfstep.AdamW([p], owners=True)
    opt = halfstep.AdamW([p], owners=None)
    with pytest.raises(ValueError, match="leave owners out"):
        opt.owners = True
    with pytest.raises(ValueError, match="torch.compile the model"):
        halfstep.Muon([p], owners=True, compile=True)
    set_gradients({"p": p}, 0)
    opt.step()
