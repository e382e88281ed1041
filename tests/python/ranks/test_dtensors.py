"""Tests DTensor parameters on 2, 3 and 4 ranks: the bits of one process, whatever the mesh."""

import copy

import pytest
import torch
from conftest import (
    COARSE_TEXT,
    RECIPES,
    RULES,
    bits,
    class_of,
    named,
    outcome,
    parameters,
    randn,
    set_gradients,
    told,
)
from torch import nn
from torch.nn import Parameter

import halfstep
from halfstep._states.bits import row_hashes

pytest.importorskip("torch.distributed.tensor", reason="DTensors are public from torch 2.5 on")

#: whole blocks, short ones, rows that leave ranks with nothing, a kernel, a stack of matrices, a
#: vector, a scalar
SHAPES = {
    "body.weight": (24, 256),
    "head.weight": (17, 50),
    "thin.weight": (2, 64),
    "conv.weight": (8, 4, 3, 3),
    "experts": (5, 6, 40),
    "body.bias": (33,),
    "one": (1,),
}


def values_of(shapes, dtype):
    return {name: p.detach() for name, p in parameters(dtype, shapes).items()}


def mesh_of(shape, names=None):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def cut(values, mesh, placements):
    """Makes DTensors of parameters. Placements are by name, or one for all."""
    from torch.distributed.tensor import distribute_tensor

    return {
        name: Parameter(distribute_tensor(value, mesh, placements(name, value)))
        for name, value in values.items()
    }


def give_gradients(params, step):
    """Sets the gradients of set_gradients(), cut as the parameters are."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    whole = {name: Parameter(torch.empty(p.shape, dtype=p.dtype)) for name, p in params.items()}
    set_gradients(whole, step)
    for name, p in params.items():
        grad = whole[name].grad
        p.grad = (
            distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        )


def whole_bits(tensor):
    return bits(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)


def all_bits(opt, params):
    """Returns all bits of weights and states, gathered."""
    opt.state_dict()  # brings counters up to date
    return {
        name: [
            whole_bits(p),
            {key: whole_bits(value) for key, value in sorted(opt.state[p].items())},
        ]
        for name, p in params.items()
    }


def rows(name, value):
    from torch.distributed.tensor import Replicate, Shard

    return [Shard(0) if value.dim() else Replicate()]


def train(opt, params, first, last):
    for step in range(first, last):
        give_gradients(params, step)
        opt.step()


def both_ways(size):
    """Yields parameters that are cut into rows, then the same as plain tensors."""
    values = values_of(SHAPES, torch.bfloat16)
    yield cut(values, mesh_of((size,)), rows)
    yield {name: Parameter(value) for name, value in values.items()}


def trained(params, rule, recipe, options):
    with told(COARSE_TEXT, (rule, recipe) == ("muon", "sr-int4")):
        opt = class_of(rule)(params.items(), lr=0.02, seed=0, **{**RECIPES[recipe][1], **options})
    train(opt, params, 0, 3)
    return all_bits(opt, params), opt.grad_norm


def one_mesh(rank, size, cases):
    mesh = mesh_of((size,))
    return [
        trained(cut(values_of(SHAPES, RECIPES[recipe][0]), mesh, rows), rule, recipe, options)
        for rule, recipe, options in cases
    ]


def check(cases, found):
    """Compares what all ranks have found with what one process finds."""
    for i, (rule, recipe, options) in enumerate(cases):
        params = parameters(RECIPES[recipe][0], SHAPES)
        wanted, norm = trained(params, rule, recipe, options)
        for rank, answers in enumerate(found):
            got, got_norm = answers[i]
            assert got_norm == norm, (rule, recipe, rank)
            assert got == wanted, (rule, recipe, rank, [n for n in got if got[n] != wanted[n]])


@pytest.mark.parametrize(
    "size, part",
    [
        pytest.param(size, part, marks=[] if (size, part) == (3, 0) else pytest.mark.all)
        for size in (2, 3, 4)
        for part in range(5)
    ],
)
def test_rows_over_ranks(pool, size, part):
    """FSDP2's layout: Shard(0) with uneven and empty shards. Each part of the test has every rule,
    and the recipes in turn."""
    cases = [
        (rule, recipe, {"clip_norm": 0.5} if i % 2 else {})
        for i, (rule, recipe) in enumerate(
            (rule, recipe) for rule in RULES if rule != "muon" for recipe in RECIPES
        )
    ]
    cases += [
        (rule, recipe, {"cautious": True}) for rule in ("adamw", "adopt") for recipe in RECIPES
    ]
    cases += [("prodigy", recipe, {"slice_p": 7, "d0": 1e-3}) for recipe in RECIPES]
    cases = [case for i, case in enumerate(cases) if (i + i // len(RECIPES)) % 5 == part]
    check(cases, pool.run(size, one_mesh, cases))


MUON_CASES = [
    ("muon", "f32", {"clip_norm": 0.5}),
    ("muon", "bf16-sr", {"normalize_rows": "keep-norm"}),
    ("muon", "kahan", {}),
    ("muon", "ecc8-int8", {"clip_norm": 0.1}),
    ("muon", "sr-int4", {"normalize_rows": "full-norm"}),
]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.all)])
def test_matrices_are_gathered(pool, size):
    """A rule that steps matrices as a whole has the bits of one process, too."""
    check(MUON_CASES, pool.run(size, one_mesh, MUON_CASES))


#: parameters of several matrices, by name: shape, options of the group, and the numbers of ranks
#: for which Muon and the rules with vectors need not gather them
BLOCKS = {
    "qkv": ((24, 40), {"split": [12, 6, 6]}, (2,), ()),
    "ends": ((18, 40), {"split": (6, 6, 3, 3)}, (3,), ()),
    "heads": ((24, 40), {"heads": 6}, (2, 3), (2, 3)),
    "inside": ((20, 40), {"split": [8, 8, 4]}, (), ()),
    "experts": ((5, 10, 40), {"split": [6, 4]}, (2, 3, 4), (2, 3, 4)),
}


def in_groups(params):
    return [{"params": [(name, p)], **BLOCKS[name][1]} for name, p in params.items()]


def blocks(rank, size, cases, sharded=True):
    """Returns the bits of these parameters, and the names of those that are gathered. Ranks that
    have whole ones give their matrices to owners."""
    found = []
    for rule, recipe, options in cases:
        dtype, formats = RECIPES[recipe]
        params = parameters(dtype, {name: row[0] for name, row in BLOCKS.items()})
        if size and sharded:
            params = cut({n: p.detach() for n, p in params.items()}, mesh_of((size,)), rows)
        owners = None if sharded else True
        opt = class_of(rule)(
            in_groups(params), lr=0.02, seed=0, owners=owners, **formats, **options
        )
        train(opt, params, 0, 3)
        gathered = {m.name for m in opt._parts.cache.engine.members if m.gathered}
        found.append((all_bits(opt, params), gathered))
    return found


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.all)])
def test_blocks_of_rows_stay_on_their_ranks(pool, size):
    """Splits and heads have the bits of one process. They are gathered only if a rank would hold a
    part of a block, or of a vector's rows."""
    cases = [
        ("muon", "f32", {"clip_norm": 0.5}),
        ("muon", "ecc8-int8", {"normalize_rows": "keep-norm"}),
        ("adafactor", "ecc8-int8", {"beta1": 0.9}),
        ("came", "sr-int4", {}),
    ]
    wanted = blocks(0, 0, cases)
    for sharded in (True, False)[: 1 + (size == 2)]:
        for answers in pool.run(size, blocks, cases, sharded):
            for (rule, recipe, _), (got, gathered), (ours, _) in zip(cases, answers, wanted):
                assert got == ours, (rule, recipe, sharded)
                rest = {
                    n for n, row in BLOCKS.items() if size not in row[2 if rule == "muon" else 3]
                }
                assert gathered == (rest if sharded else BLOCKS.keys()), (rule, recipe, sharded)


def micro_batches(rank, size, sharded=True):
    """Puts gradients of two micro-batches into the states one parameter at a time, then updates."""
    shapes = {"w": (24, 64), "b": (33,)}
    params = parameters(torch.bfloat16, shapes)
    if sharded:
        params = cut(values_of(shapes, torch.bfloat16), mesh_of((size,)), rows)
    opt = halfstep.Muon(params.items(), lr=0.02, seed=0, states="bf16-sr")
    for step in range(6):
        give_gradients(params, step)
        opt.optimizer_accumulation = step % 3 != 2
        for p in params.values():
            opt.step_param(p)
    opt.step()
    return all_bits(opt, params)


def test_matrices_are_gathered_for_micro_batches(pool):
    assert pool.run(2, micro_batches) == 2 * [micro_batches(0, 1, False)]


# ---- Meshes of two dimensions, mixed lists, columns ----------------------------------------------


def laid_out(values, layout, size):
    """Makes parameters in a layout by name."""
    from torch.distributed.tensor import Replicate, Shard

    if layout == "hsdp":
        mesh = mesh_of((2, 2), ("replicas", "shards"))
        return cut(values, mesh, lambda n, v: [Replicate(), Shard(0)])
    if layout == "columns":  # where whole blocks allow it
        return cut(values, mesh_of((size,)), lambda n, v: [Shard(int(n == "body.weight"))])
    mesh = mesh_of((2, 2), ("dp", "tp"))
    if layout == "grid":  # rows over one dimension, columns over the other
        return cut(
            values, mesh, lambda n, v: [Shard(0), Shard(1) if n == "body.weight" else Replicate()]
        )
    params = {}  # a 2-D mesh, its parts, plain tensors, and another mesh of all ranks in one list
    for i, (name, value) in enumerate(values.items()):
        if i % 4 == 2:
            params[name] = Parameter(value)
        elif i % 4 == 1:
            params.update(cut({name: value}, mesh["dp"], lambda n, v: [Shard(0)]))
        elif i % 4:
            params.update(cut({name: value}, mesh_of((size,)), rows))
        else:
            params.update(cut({name: value}, mesh, lambda n, v: [Shard(0), Replicate()]))
    return params


def many(rank, size, layout, cases):
    return [
        trained(
            laid_out(values_of(SHAPES, RECIPES[recipe][0]), layout, size), rule, recipe, options
        )
        for rule, recipe, options in cases
    ]


LAYOUT_CASES = [
    ("adamw", "ecc8-int8", {"clip_norm": 0.5}),
    ("lamb", "sr-int4", {}),
    ("stableadamw", "kahan", {"clip_norm": 0.1}),
    ("schedulefree", "ecc8-int8", {}),
    ("lion", "f32", {"clip_norm": 1.0}),
    ("muon", "ecc8-int8", {"clip_norm": 0.5, "normalize_rows": "keep-norm"}),
    ("adamw", "ecc8-int8", {"cautious": True, "clip_norm": 0.5}),
    ("lion", "sr-int4", {"cautious": True}),
    ("prodigy", "ecc8-int8", {"slice_p": 7, "d0": 1e-3}),
    ("adafactor", "bf16-sr", {"beta1": 0.9}),
    ("came", "ecc8-int8", {"clip_norm": 0.5}),
]


@pytest.mark.parametrize(
    "layout, size",
    [
        pytest.param("hsdp", 4, marks=pytest.mark.all),
        ("columns", 2),
        pytest.param("grid", 4, marks=pytest.mark.all),
        ("mixed", 4),
    ],
)
def test_layouts(pool, layout, size):
    check(LAYOUT_CASES, pool.run(size, many, layout, LAYOUT_CASES))


# ---- torch's own wrappers ------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(4)
        self.up = nn.Linear(48, 90)
        self.down = nn.Linear(90, 64)
        self.norm = nn.LayerNorm(64)
        self.out = nn.Linear(64, 3)
        self.to(dtype)

    def forward(self, x):
        return self.out(self.norm(self.down(torch.tanh(self.up(x)))))


def net_loss(model, step):
    dtype = next(model.parameters()).dtype
    x = randn((12, 48), step).to(dtype)
    return model(x).float().pow(2).mean()


class Blocks(nn.Module):
    """A stack of experts, one weight whose parts stay on their ranks, and one that is gathered."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(4)
        for name in ("experts", "heads", "inside"):
            setattr(self, name, Parameter(torch.randn(BLOCKS[name][0], dtype=dtype)))


def sharded_net(kind, dtype, make=Net):
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    size, model, options = torch.distributed.get_world_size(), make(dtype), {}
    if kind in ("tp", "fsdp2+tp"):
        mesh = mesh_of((size // 2, 2), ("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"]) if kind == "fsdp2+tp" else model
    if kind == "hsdp":
        return fully_shard(model, mesh=mesh_of((2, size // 2), ("replicas", "shards")))
    mesh = mesh_of((size,))
    if kind == "fsdp2" and make is Net:
        for part in (model.up, model.down):
            fully_shard(part, mesh=mesh)
    elif kind == "columns":
        options["shard_placement_fn"] = lambda p: Shard(int(p.shape == (3, 64)))
    elif kind == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    return fully_shard(model, mesh=mesh, **options)


def wrapped(rank, size, kind, rule, recipe, options):
    """Trains with backward passes. The same gradients, gathered, drive a whole copy beside it. The
    two must agree in every bit."""
    dtype, formats = RECIPES[recipe]
    model, twin = sharded_net(kind, dtype), Net(dtype)
    opt = class_of(rule)(model.named_parameters(), lr=0.02, seed=0, **{**formats, **options})
    whole = class_of(rule)(twin.named_parameters(), lr=0.02, seed=0, **{**formats, **options})
    for step in range(3):
        net_loss(model, step).backward()
        for p, q in zip(model.parameters(), twin.parameters()):
            grad = p.grad
            q.grad = grad.full_tensor().clone() if hasattr(grad, "full_tensor") else grad.clone()
        opt.step()
        whole.step()
        opt.zero_grad()
    kinds = [str(getattr(p, "placements", "plain")) for p in model.parameters()]
    same = all_bits(opt, named(model)) == all_bits(whole, dict(twin.named_parameters()))
    return same, opt.grad_norm == whole.grad_norm, kinds


@pytest.mark.parametrize(
    "kind, size",
    [("fsdp2", 3), ("offload", 2), ("fsdp2+tp", 4)]
    + [
        pytest.param(kind, size, marks=pytest.mark.all)
        for kind, size in (("fsdp2", 4), ("columns", 2), ("hsdp", 4), ("tp", 2))
    ],
)
def test_wrappers(pool, kind, size):
    by_columns = kind in ("tp", "fsdp2+tp", "columns")
    for rule, recipe, options in (
        ("adamw", "kahan" if by_columns else "sr-int4", {"clip_norm": 0.5}),
        ("lamb", "bf16-sr" if by_columns else "ecc8-int8", {}),
    ):
        found = pool.run(size, wrapped, kind, rule, recipe, options)
        assert all(same and norm for same, norm, _ in found), found


# ---- What is refused, and agreed on --------------------------------------------------------------


def refused(rank, size):
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh = mesh_of((size,))
    said = []
    for shape, placement, options in (
        ((8, 100), Shard(1), {"states": "int8"}),
        ((32, 200), Shard(0), {"states": "dyn8"}),
        ((4, 4, 4), Shard(2), {}),
        ((8, 64), Shard(1), {"states": "int8", "centralize": 1.0}),
    ):
        cut = distribute_tensor(torch.ones(shape), mesh, [placement])
        p = Parameter(cut)
        p.grad = cut.clone()
        said.append(outcome(lambda: halfstep.AdamW([("w", p)], **options).step()))
    partial = Parameter(DTensor.from_local(torch.ones(4), mesh, [Partial()]))
    said.append(outcome(lambda: halfstep.AdamW([("w", partial)])))
    return said


def test_cuts_that_cannot_be_served_are_refused_at_construction(pool):
    told = "shard it along dimension 0", "states=", "dimension 2", "whole rows", "sum over ranks"
    for said in pool.run(2, refused):
        assert all("'w'" in text and words in text for text, words in zip(said, told)), said


def not_finite(rank, size):
    """Tries one NaN in the last rank's shard, a whole step with empty shards, and a gradient on one
    rank alone."""

    mesh = mesh_of((size,))
    params = cut(values_of(SHAPES, torch.bfloat16), mesh, rows)
    opt = halfstep.AdamW(params.items(), lr=0.02, states="int8", clip_norm=1.0)
    train(opt, params, 0, 1)
    before = all_bits(opt, params)
    give_gradients(params, 1)
    held = params["body.weight"].grad._local_tensor
    if rank == size - 1:
        held[-1, -1] = float("nan")
    with told("is not finite"):
        opt.step()
    unchanged = before == all_bits(opt, params)
    train(opt, params, 1, 2)
    counts = {opt.state[p]["step"].item() for p in params.values()}
    give_gradients(params, 2)
    if rank == 0:
        params["head.weight"].grad = None
    said = outcome(opt.step)
    return unchanged, opt.skipped_steps, counts, said


def test_a_nan_on_one_rank_is_refused_on_all_of_them(pool):
    for unchanged, skipped, counts, said in pool.run(3, not_finite):
        assert unchanged and skipped == 1 and counts == {2}
        assert "'head.weight' has a gradient on 2 of the 3 ranks" in said


def mismatched(rank, size, what):
    mesh = mesh_of((size,))
    params = cut(values_of(SHAPES, torch.bfloat16), mesh, rows)
    options = {
        "states": "int4" if what == "recipe" and rank else "int8",
        "seed": rank if what == "seed" else 0,
    }
    named = [
        (f"{n}{rank}" if what == "id" and n == "conv.weight" and rank == 1 else n, p)
        for n, p in params.items()
    ]
    opt = halfstep.AdamW(named, lr=0.02, **options)
    give_gradients(params, 0)
    before = [whole_bits(p) for p in params.values()]
    return outcome(opt.step), before == [whole_bits(p) for p in params.values()]


@pytest.mark.parametrize(
    "what, words",
    [
        ("recipe", ["recipe of parameter", "int8", "int4"]),
        ("seed", ["the seed", "0 on rank 0", "1 on rank 1"]),
        ("id", ["id of parameter 3", "conv.weight1"]),
    ],
)
def test_ranks_that_disagree_are_told_so_at_the_first_step(pool, what, words):
    for said, unchanged in pool.run(2, mismatched, what):
        assert all(word in said for word in words) and unchanged, said


def summed(rank, size, fmt):
    """Collects micro-batches of DTensors in buffers of their own, and of whole tensors beside
    them."""

    found = []
    for params in both_ways(size):
        sums = halfstep.GradientAccumulator(params.items(), format=fmt, seed=3)
        for step in range(4):
            give_gradients(params, step)
            for i, p in enumerate(params.values()):
                sums._take(i, p)
        sums.reassign()
        found.append([whole_bits(p.grad) for p in params.values()])
    return found


@pytest.mark.parametrize("fmt", ["bf16-sr", "f32"])
def test_sums_of_micro_batches(pool, fmt):
    for sharded, whole in pool.run(3, summed, fmt):
        assert sharded == whole


def accumulated(rank, size, rule):
    """Puts micro-batches into the states."""
    found = []
    for params in both_ways(size):
        opt = class_of(rule)(params.items(), seed=3, states="bf16-sr")
        for step in range(6):
            opt.optimizer_accumulation = bool((step + 1) % 3)
            give_gradients(params, step)
            opt.step()
        found.append(all_bits(opt, params))
    return found


@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_micro_batches_in_the_states(pool, rule):
    for sharded, whole in pool.run(2, accumulated, rule):
        assert sharded == whole


def impossible(rank, size, folder):
    params = cut(values_of(SHAPES, torch.bfloat16), mesh_of((size,)), rows)
    opt = halfstep.AdamW(params.items())
    train(opt, params, 0, 1)
    return [
        outcome(attempt)
        for attempt in (
            lambda: opt.save_safetensors(f"{folder}/file"),
            lambda: opt.load_safetensors(f"{folder}/file"),
            lambda: halfstep.AdamW(params.items(), compile=True),
        )
    ]


def test_what_cannot_be_had_of_parts_is_refused(pool, tmp_path):
    for said in pool.run(2, impossible, str(tmp_path)):
        assert "torch.distributed.checkpoint" in said[0] and said[1] == said[0]
        assert "torch.compile the model" in said[2]


def read_and_written(rank, size):
    """Reads and writes a matrix that is gathered: both are of the whole."""
    found = []
    for params in both_ways(size):
        opt = halfstep.Muon(params.items(), weights="bf16-ecc8", seed=1)
        train(opt, params, 0, 2)
        p = params["head.weight"]
        opt.write_weight(p, opt.read_weight(p) * 0.5)
        opt.write_state(p, "momentum_buffer", opt.read_state(p, "momentum_buffer") * 0.25)
        found.append(
            (whole_bits(opt.read_weight(p)), whole_bits(opt.read_state(p, "momentum_buffer")))
        )
        train(opt, params, 2, 4)
        found.append(all_bits(opt, params))
    return found


def converted(rank, size):
    params = cut(values_of(SHAPES, torch.bfloat16), mesh_of((size,)), rows)
    opt = halfstep.Muon(params.items(), states="bf16-sr")
    train(opt, params, 0, 1)
    opt.param_groups[0]["states"] = "int8"
    give_gradients(params, 1)
    return outcome(opt.step)


def test_states_of_a_gathered_matrix_are_not_converted(pool):
    for said in pool.run(2, converted):
        assert "'body.weight'" in said and "once on one process" in said


def test_reading_and_writing_a_gathered_matrix(pool):
    for read, bits_then, read_whole, whole_then in pool.run(2, read_and_written):
        assert read == read_whole and bits_then == whole_then


# ---- torch.distributed.checkpoint ----------------------------------------------------------------


def resharded(
    rank, size, folder, rule, recipe, kind, flatten, last, loads, saves, make=Net, **more
):
    """Loads the checkpoint `loads` if there is one, trains to the step `last`, and saves as
    `saves`. Returns the bits."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )

    dtype, formats = RECIPES[recipe]
    model = sharded_net(kind, dtype, make) if kind else make(dtype)
    opt = class_of(rule)(
        in_groups(named(model)) if make is Blocks else model.named_parameters(),
        lr=0.02 if loads is None else 0.5,
        seed=0 if loads is None else 9,
        clip_norm=0.5,
        **formats,
        **more,
    )
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    first = 0
    if loads is not None:
        weights, states = get_state_dict(model, opt, options=options)
        both = {"model": weights, "optimizer": states, "steps": 0}
        checkpoint.load(both, checkpoint_id=f"{folder}/{loads}")
        given = {"model_state_dict": both["model"], "optim_state_dict": both["optimizer"]}
        set_state_dict(model, opt, **given, options=options)
        first = both["steps"]
    train(opt, named(model), first, last)
    opt.zero_grad()
    if saves is not None:
        weights, states = get_state_dict(model, opt, options=options)
        checkpoint.save(
            {"model": weights, "optimizer": states, "steps": last},
            checkpoint_id=f"{folder}/{saves}",
        )
    return all_bits(opt, named(model)), opt.param_groups[0]["lr"]


@pytest.mark.parametrize(
    "rule, recipe, flatten",
    [("adamw", "ecc8-int8", False)]
    + [
        pytest.param(rule, recipe, flatten, marks=pytest.mark.all)
        for rule, recipe in (
            ("adamw", "ecc8-int8"),
            ("schedulefree", "sr-int4"),
            ("lamb", "kahan"),
            ("muon", "kahan"),
        )
        for flatten in (False, True)
        if (rule, flatten) != ("adamw", False)
    ],
)
def test_checkpoints_reshard(pool, tmp_path, rule, recipe, flatten):
    """Goes on with 4, 3, 1 and 2 ranks of FSDP2, then HSDP: the bits of a run that was not
    interrupted."""
    stages = [(4, "fsdp2"), (3, "fsdp2"), (1, "fsdp2"), (2, "fsdp2"), (4, "hsdp")]
    case = str(tmp_path), rule, recipe
    for i, (size, kind) in enumerate(stages):
        loads = i - 1 if i else None
        found = pool.run(size, resharded, *case, kind, flatten, 2 * (i + 1), loads, i)
    wanted = pool.run(1, resharded, *case, None, flatten, 2 * len(stages), None, None)
    for bits_found, lr in found:
        assert lr == 0.02
        assert bits_found == wanted[0][0]


def blocks_resharded(rank, size, folder, cases, last, loads, *kinds):
    """Saves if nothing is loaded. Else returns the bits for each kind of model; None is a whole one
    that loads nothing."""
    return [
        resharded(
            *(rank, size, f"{folder}/{i}", rule, recipe, kind, flatten, last),
            *(loads if kind else None, None if loads else "saved", Blocks),
            **more,
        )
        for kind in kinds
        for i, (rule, recipe, flatten, more) in enumerate(cases)
    ]


def test_checkpoints_reshard_stacks_and_splits(pool, tmp_path):
    """What 2 ranks of FSDP2 save goes on with 1, 3 and 4 ranks."""
    cases = [
        (rule, recipe, recipe == "f32", more)
        for rule, more in (("muon", {"normalize_rows": "keep-norm"}), ("adafactor", {"beta1": 0.9}))
        for recipe in ("f32", "ecc8-int8")
    ]
    run = str(tmp_path), cases
    pool.run(2, blocks_resharded, *run, 2, None, "fsdp2")
    ((*answers,),) = pool.run(1, blocks_resharded, *run, 4, "saved", None, "fsdp2")
    wanted, found = answers[: len(cases)], {1: [answers[len(cases) :]]}
    for size in (3, 4):
        found[size] = pool.run(size, blocks_resharded, *run, 4, "saved", "fsdp2")
    for size, ranks in found.items():
        for answers in ranks:
            for case, (got, lr), (bits_wanted, _) in zip(cases, answers, wanted):
                assert lr == 0.02 and got == bits_wanted, (size, case)


def hashes_of_shards(rank, size, dim):
    from torch.distributed.tensor import Shard

    values = values_of({"matrix": (24, 128), "vector": (600,)}, torch.bfloat16)
    params = cut(values, mesh_of((size,)), lambda name, v: [Shard(dim if v.dim() > 1 else 0)])
    opt = halfstep.AdamW(params.items(), weights="bf16-kahan", seed=0)
    for step in range(3):
        give_gradients(params, step)
        opt.step()
    matrix, vector = params.values()
    file = copy.deepcopy(opt.state_dict())
    hashes, unknown = (state["weight.hashes"] for state in file["state"].values())
    assert torch.equal(unknown, unknown.new_zeros(3))  # parts of pieces tell nothing
    if dim:  # nor do parts of rows
        assert torch.equal(hashes, hashes.new_zeros(24))
        return
    assert torch.equal(hashes.full_tensor(), row_hashes(matrix.full_tensor()))
    value = opt.read_weight(matrix).full_tensor()
    with torch.no_grad():
        matrix.to_local()[-2:] = 1.0
    value.view(size, 24 // size, 128)[:, -2:] = 1.0
    opt.load_state_dict(file)
    with told("beside 2 of its"):
        assert torch.equal(opt.read_weight(matrix).full_tensor(), value)


@pytest.mark.parametrize("dim", [0, 1])
def test_hashes_of_weights_are_cut_as_their_rows_are(pool, dim):
    pool.run(2, hashes_of_shards, dim)
