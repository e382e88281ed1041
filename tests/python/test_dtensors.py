"""Tests DTensor parameters on 2, 3 and 4 ranks: the bits of one process, whatever the mesh."""

import warnings

import pytest
import torch
from conftest import RECIPES, RULES, bits, class_of, set_gradients

import halfstep

pytest.importorskip("torch.distributed.tensor", reason="DTensors are public from torch 2.5 on")
pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="no gloo",
)

#: whole blocks, short ones, rows that leave ranks with nothing, a kernel, a vector, a scalar
SHAPES = {
    "body.weight": (24, 256),
    "head.weight": (17, 50),
    "thin.weight": (2, 64),
    "conv.weight": (8, 4, 3, 3),
    "body.bias": (33,),
    "one": (1,),
}


def values_of(shapes, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def mesh_of(shape, names=None):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def cut(values, mesh, placements):
    """Makes DTensors of parameters. Placements are by name, or one for all."""
    from torch.distributed.tensor import distribute_tensor

    return {
        name: torch.nn.Parameter(distribute_tensor(value, mesh, placements(name, value)))
        for name, value in values.items()
    }


def give_gradients(params, step, scale=1.0):
    """Sets the gradients of set_gradients(), cut as the parameters are."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    whole = {
        name: torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for name, p in params.items()
    }
    set_gradients(whole, step)
    for name, p in params.items():
        grad = whole[name].grad * scale
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


def train(opt, params, first, last, scale=1.0):
    for step in range(first, last):
        give_gradients(params, step, scale)
        opt.step()


def alone(rule, recipe, options, shapes=None, steps=3):
    dtype, formats = RECIPES[recipe]
    params = {
        name: torch.nn.Parameter(value)
        for name, value in values_of(shapes or SHAPES, dtype).items()
    }
    opt = class_of(rule)(list(params.items()), lr=0.02, seed=0, **{**formats, **options})
    for step in range(steps):
        set_gradients(params, step)
        opt.step()
    return all_bits(opt, params), opt.grad_norm


def one_mesh(rank, size, cases, shapes):
    out = []
    mesh = mesh_of((size,))
    for rule, recipe, options in cases:
        dtype, formats = RECIPES[recipe]
        params = cut(values_of(shapes, dtype), mesh, rows)
        opt = class_of(rule)(list(params.items()), lr=0.02, seed=0, **{**formats, **options})
        train(opt, params, 0, 3)
        out.append((all_bits(opt, params), opt.grad_norm))
    return out


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
    found = pool.run(size, one_mesh, cases, SHAPES)
    for i, (rule, recipe, options) in enumerate(cases):
        wanted, norm = alone(rule, recipe, options)
        for rank in range(size):
            got, got_norm = found[rank][i]
            assert got_norm == norm, (rule, recipe, rank)
            for name in SHAPES:
                assert got[name] == wanted[name], (rule, recipe, name, rank)


MUON_CASES = [
    ("muon", recipe, options)
    for recipe, options in (
        ("f32", {"clip_norm": 0.5}),
        ("bf16-sr", {}),
        ("kahan", {}),
        ("ecc8-int8", {"clip_norm": 0.1}),
        ("sr-int4", {}),
    )
]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.all)])
def test_matrices_are_gathered(pool, size):
    """A rule that steps matrices as a whole has the bits of one process, too."""
    found = pool.run(size, one_mesh, MUON_CASES, SHAPES)
    for i, (rule, recipe, options) in enumerate(MUON_CASES):
        wanted, norm = alone(rule, recipe, options)
        for rank in range(size):
            got, got_norm = found[rank][i]
            assert got_norm == norm, (recipe, rank)
            assert got == wanted, (recipe, rank, [n for n in got if got[n] != wanted[n]])


def micro_batches(rank, size, sharded=True):
    """Puts gradients of two micro-batches into the states one parameter at a time, then updates."""
    values = values_of({"w": (24, 64), "b": (33,)}, torch.bfloat16)
    params = (
        cut(values, mesh_of((size,)), rows)
        if sharded
        else {n: torch.nn.Parameter(v) for n, v in values.items()}
    )
    opt = halfstep.Muon(list(params.items()), lr=0.02, seed=0, states="bf16-sr")
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


def wide(rule, recipe, options, layout, rank, size, steps=3):
    """Trains under a layout by name. Returns parameters and optimizer."""
    from torch.distributed.tensor import Replicate, Shard

    dtype, formats = RECIPES[recipe]
    values = values_of(SHAPES, dtype)
    if layout == "hsdp":
        params = cut(
            values, mesh_of((2, 2), ("replicas", "shards")), lambda n, v: [Replicate(), Shard(0)]
        )
    elif layout == "columns":  # where whole blocks allow it
        mesh = mesh_of((size,))
        params = cut(
            values,
            mesh,
            lambda n, v: [Shard(1) if v.dim() > 1 and n == "body.weight" else Shard(0)],
        )
    elif layout == "grid":  # rows over one dimension, columns over the other
        mesh = mesh_of((2, 2), ("dp", "tp"))
        params = cut(
            values, mesh, lambda n, v: [Shard(0), Shard(1) if n == "body.weight" else Replicate()]
        )
    elif layout == "mixed":  # a 2-D mesh, its parts and plain tensors in one list
        mesh = mesh_of((2, 2), ("dp", "tp"))
        params = {}
        for i, (name, value) in enumerate(values.items()):
            if i % 3 == 2:
                params[name] = torch.nn.Parameter(value)
            elif i % 3:
                params.update(cut({name: value}, mesh["dp"], lambda n, v: [Shard(0)]))
            else:
                params.update(cut({name: value}, mesh, lambda n, v: [Shard(0), Replicate()]))
    opt = class_of(rule)(list(params.items()), lr=0.02, seed=0, **{**formats, **options})
    train(opt, params, 0, steps)
    return params, opt


def many(rank, size, layout, cases):
    found = []
    for rule, recipe, options in cases:
        params, opt = wide(rule, recipe, options, layout, rank, size)
        found.append((all_bits(opt, params), opt.grad_norm))
    return found


LAYOUT_CASES = [
    ("adamw", "ecc8-int8", {"clip_norm": 0.5}),
    ("lamb", "sr-int4", {}),
    ("stableadamw", "kahan", {"clip_norm": 0.1}),
    ("schedulefree", "ecc8-int8", {}),
    ("lion", "f32", {"clip_norm": 1.0}),
    ("muon", "ecc8-int8", {"clip_norm": 0.5}),
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
    found = pool.run(size, many, layout, LAYOUT_CASES)
    for i, (rule, recipe, options) in enumerate(LAYOUT_CASES):
        wanted, norm = alone(rule, recipe, options)
        for rank in range(size):
            got, got_norm = found[rank][i]
            assert got_norm == norm, (rule, recipe, rank)
            assert got == wanted, (rule, recipe, rank, [n for n in got if got[n] != wanted[n]])


# ---- torch's own wrappers ------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(4)
        self.up = torch.nn.Linear(48, 90)
        self.down = torch.nn.Linear(90, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.out = torch.nn.Linear(64, 3)
        self.to(dtype)

    def forward(self, x):
        return self.out(self.norm(self.down(torch.tanh(self.up(x)))))


def net_loss(model, step, rank=0, size=1):
    dtype = next(model.parameters()).dtype
    x = torch.randn(12, 48, generator=torch.Generator().manual_seed(step)).to(dtype)
    return model(x).float().pow(2).mean()


def sharded_net(kind, dtype):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    size, model = torch.distributed.get_world_size(), Net(dtype)
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (size,))
        for part in (model.up, model.down):
            fully_shard(part, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if kind == "columns":
        mesh = init_device_mesh("cpu", (size,))
        return fully_shard(
            model,
            mesh=mesh,
            shard_placement_fn=lambda p: Shard(1) if p.shape == (3, 64) else Shard(0),
        )
    if kind == "offload":
        return fully_shard(
            model,
            mesh=init_device_mesh("cpu", (size,)),
            offload_policy=CPUOffloadPolicy(pin_memory=False),
        )
    if kind == "hsdp":
        return fully_shard(
            model,
            mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards")),
        )
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"]) if kind == "fsdp2+tp" else model


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
    same = all_bits(opt, dict(model.named_parameters())) == all_bits(
        whole, dict(twin.named_parameters())
    )
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
    for rule, recipe, options in [
        (
            "adamw",
            "sr-int4" if kind not in ("tp", "fsdp2+tp", "columns") else "kahan",
            {"clip_norm": 0.5},
        ),
        ("lamb", "ecc8-int8" if kind not in ("tp", "fsdp2+tp", "columns") else "bf16-sr", {}),
    ]:
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
        p = torch.nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [placement]))
        try:
            opt = halfstep.AdamW([("w", p)], **options)
            p.grad = distribute_tensor(torch.ones(shape), mesh, [placement])
            opt.step()
            said.append("stepped")
        except Exception as error:
            said.append(str(error))
    partial = torch.nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Partial()]))
    try:
        halfstep.AdamW([("w", partial)])
        said.append("stepped")
    except ValueError as error:
        said.append(str(error))
    return said


def test_cuts_that_cannot_be_served_are_refused_at_construction(pool):
    for said in pool.run(2, refused):
        assert "'w'" in said[0] and "shard it along dimension 0" in said[0]
        assert "'w'" in said[1] and "states=" in said[1]
        assert "'w'" in said[2] and "dimension 2" in said[2]
        assert "'w'" in said[3] and "whole rows" in said[3]
        assert "'w'" in said[4] and "sum over ranks" in said[4]


def not_finite(rank, size):
    """Tries one NaN in the last rank's shard, a whole step with empty shards, and a gradient on one
    rank alone."""

    mesh = mesh_of((size,))
    params = cut(values_of(SHAPES, torch.bfloat16), mesh, rows)
    opt = halfstep.AdamW(list(params.items()), lr=0.02, states="int8", clip_norm=1.0)
    train(opt, params, 0, 1)
    before = all_bits(opt, params)
    give_gradients(params, 1)
    held = params["body.weight"].grad._local_tensor
    if rank == size - 1:
        held[-1, -1] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt.step()
    unchanged = before == all_bits(opt, params)
    train(opt, params, 1, 2)
    counts = {p: opt.state[p]["step"].item() for p in params.values()}
    give_gradients(params, 2)
    if rank == 0:
        params["head.weight"].grad = None
    try:
        opt.step()
        said = "stepped"
    except RuntimeError as error:
        said = str(error)
    return unchanged, opt.skipped_steps, set(counts.values()), said


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
    try:
        opt.step()
        said = "stepped"
    except RuntimeError as error:
        said = str(error)
    return said, before == [whole_bits(p) for p in params.values()]


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

    values, found = values_of(SHAPES, torch.bfloat16), []
    for params in (
        cut(values, mesh_of((size,)), rows),
        {name: torch.nn.Parameter(v) for name, v in values.items()},
    ):
        sums = halfstep.GradientAccumulator(list(params.items()), format=fmt, seed=3)
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
    values, found = values_of(SHAPES, torch.bfloat16), []
    for params in (
        cut(values, mesh_of((size,)), rows),
        {name: torch.nn.Parameter(v) for name, v in values.items()},
    ):
        opt = class_of(rule)(list(params.items()), seed=3, states="bf16-sr")
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
    opt = halfstep.AdamW(list(params.items()))
    train(opt, params, 0, 1)
    module = torch.nn.Module()
    module.weight = params["body.weight"]
    said = []
    for attempt in (
        lambda: opt.save_safetensors(f"{folder}/file"),
        lambda: opt.load_safetensors(f"{folder}/file"),
        lambda: halfstep.EMA(module),
        lambda: halfstep.AdamW(list(params.items()), compile=True),
    ):
        try:
            attempt()
            said.append("done")
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_cannot_be_had_of_parts_is_refused(pool, tmp_path):
    for said in pool.run(2, impossible, str(tmp_path)):
        assert "torch.distributed.checkpoint" in said[0] and said[1] == said[0]
        assert "whole copy" in said[2] and "torch.compile the model" in said[3]


def read_and_written(rank, size):
    """Reads and writes a matrix that is gathered: both are of the whole."""
    values, found = values_of(SHAPES, torch.bfloat16), []
    for params in (
        cut(values, mesh_of((size,)), rows),
        {name: torch.nn.Parameter(v) for name, v in values.items()},
    ):
        opt = halfstep.Muon(list(params.items()), weights="bf16-ecc8", seed=1)
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
    opt = halfstep.Muon(list(params.items()), states="bf16-sr")
    train(opt, params, 0, 1)
    opt.param_groups[0]["states"] = "int8"
    give_gradients(params, 1)
    try:
        opt.step()
        return "stepped"
    except ValueError as error:
        return str(error)


def test_states_of_a_gathered_matrix_are_not_converted(pool):
    for said in pool.run(2, converted):
        assert "'body.weight'" in said and "once on one process" in said


def test_reading_and_writing_a_gathered_matrix(pool):
    for read, bits_then, read_whole, whole_then in pool.run(2, read_and_written):
        assert read == read_whole and bits_then == whole_then


# ---- torch.distributed.checkpoint ----------------------------------------------------------------


def resharded(rank, size, folder, rule, recipe, kind, flatten, last, loads, saves):
    """Loads the checkpoint `loads` if there is one, trains to the step `last`, and saves as
    `saves`. Returns the bits."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )

    dtype, formats = RECIPES[recipe]
    model = sharded_net(kind, dtype) if kind else Net(dtype)
    opt = class_of(rule)(
        model.named_parameters(),
        lr=0.02 if loads is None else 0.5,
        seed=0 if loads is None else 9,
        clip_norm=0.5,
        **formats,
    )
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    first = 0
    if loads is not None:
        weights, states = get_state_dict(model, opt, options=options)
        both = {"model": weights, "optimizer": states, "steps": 0}
        checkpoint.load(both, checkpoint_id=f"{folder}/{loads}")
        set_state_dict(
            model,
            opt,
            model_state_dict=both["model"],
            optim_state_dict=both["optimizer"],
            options=options,
        )
        first = both["steps"]
    generator = torch.Generator()
    for step in range(first, last):
        for i, (name, p) in enumerate(model.named_parameters()):
            generator.manual_seed(1000 * step + i)
            grad = torch.randn(p.shape, generator=generator).to(dtype)
            if hasattr(p, "placements"):
                from torch.distributed.tensor import distribute_tensor

                grad = distribute_tensor(grad, p.device_mesh, p.placements)
            p.grad = grad
        opt.step()
    opt.zero_grad()
    if saves is not None:
        weights, states = get_state_dict(model, opt, options=options)
        checkpoint.save(
            {"model": weights, "optimizer": states, "steps": last},
            checkpoint_id=f"{folder}/{saves}",
        )
    return all_bits(opt, dict(model.named_parameters())), opt.param_groups[0]["lr"]


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
    for i, (size, kind) in enumerate(stages):
        found = pool.run(
            size,
            resharded,
            str(tmp_path),
            rule,
            recipe,
            kind,
            flatten,
            2 * (i + 1),
            i - 1 if i else None,
            i,
        )
    wanted = pool.run(
        1, resharded, str(tmp_path), rule, recipe, None, flatten, 2 * len(stages), None, None
    )
    for bits_found, lr in found:
        assert lr == 0.02
        assert bits_found == wanted[0][0]
