"""Tests EMA over DTensors on 1 to 4 ranks: the bits of one process, whatever the mesh."""

import copy
import math
import os
import types

import pytest
import torch
from conftest import bits, named, outcome, randn, told
from test_dtensors import Net, cut, mesh_of, net_loss, rows, sharded_net, train, whole_bits
from torch import nn

import halfstep
from halfstep._tensors.sharding import local

pytest.importorskip("torch.distributed.tensor", reason="DTensors are public from torch 2.5 on")


def full(module):
    """Returns the bits of everything that a module saves, gathered."""
    return {key: whole_bits(value) for key, value in module.state_dict().items()}


def pair(kind, weights, averages, **options):
    """Returns a sharded model, or a whole one for None, with its optimizer and averages."""
    model = sharded_net(kind, torch.bfloat16) if kind else Net(torch.bfloat16)
    opt = halfstep.AdamW(model.named_parameters(), lr=0.02, seed=0, weights=weights)
    return model, opt, halfstep.EMA(model, 0.9, averages, seed=1, **options)


def advance(model, opt, ema, first, last):
    for step in range(first, last):
        train(opt, named(model), step, step + 1)
        ema.update_parameters(model, opt)
    opt.zero_grad()


CASES = [("bf16-kahan", "bf16-kahan"), ("bf16-ecc8", "bf16-sr"), ("bf16-sr", "f32")]


def averaged(rank, size, kind, cases):
    """Returns what averages save, and what a forward pass gives with them in the model."""
    found = []
    for weights, averages in cases:
        model, opt, ema = pair(kind, weights, averages)
        advance(model, opt, ema, 0, 4)
        own = full(model)
        with torch.no_grad(), ema.swapped(model):
            swapped, loss = full(model), net_loss(model, 0).item()
        with torch.no_grad():
            net_loss(model, 0)  # FSDP2's root keeps its whole parameters
        assert full(model) == own
        advance(model, opt, ema, 4, 5)
        assert math.isfinite(loss)
        found.append((full(ema), swapped, full_values(ema.full_state_dict())))
    return found


def full_values(state):
    return {key: whole_bits(value) for key, value in state.items()}


@pytest.mark.parametrize(
    "kind, size",
    [("fsdp2", 2)]
    + [
        pytest.param(kind, size, marks=pytest.mark.all)
        for kind, size in (
            ("fsdp2", 1), ("fsdp2", 3), ("fsdp2", 4), ("columns", 2), ("hsdp", 4), ("tp", 2),
            ("offload", 2),
        )
    ],
)  # fmt: skip
def test_averages_of_shards(pool, kind, size):
    wanted = averaged(0, 1, None, CASES)
    for found in pool.run(size, averaged, kind, CASES):
        assert found == wanted


def beside(rank, size, cases):
    """Trains by backward passes of FSDP2 and tensor parallelism together, and a whole model beside
    it with the same gradients."""
    found = []
    for weights, averages in cases:
        model, opt, ema = pair("fsdp2+tp", weights, averages)
        whole, other, twin = pair(None, weights, averages)
        for step in range(3):
            net_loss(model, step).backward()
            for p, q in zip(model.parameters(), whole.parameters()):
                q.grad = p.grad.full_tensor().clone()
            opt.step()
            other.step()
            opt.zero_grad()
            ema.update_parameters(model, opt)
            twin.update_parameters(whole, other)
        found.append((full(ema), full(twin)))
    return found


@pytest.mark.all
def test_averages_under_fsdp2_and_tensor_parallelism(pool):
    for found in pool.run(4, beside, [CASES[0], ("bf16-sr", "bf16-sr")]):
        assert all(ours == theirs for ours, theirs in found)


def packed(rank, size):
    """Averages 8-bit weights with error codes. Returns the averages, and the bytes in the model."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 33), nn.GELU(), nn.Linear(33, 40)).bfloat16()
    halfstep.nn.quantize_(model, "int8-ecc4")
    if size:
        fully_shard(model, mesh=mesh_of((size,)))
    opt = halfstep.AdamW(model.named_parameters(), lr=0.02, seed=0, weights="int8-ecc4")
    ema = halfstep.EMA(model, 0.9, "bf16-kahan", seed=1)
    for step in range(3):
        for i, p in enumerate(model.parameters()):
            grad = randn(p.shape, 10 * step + i).bfloat16()
            p.grad = distribute(grad, p) if size else grad
        opt.step()
        ema.update_parameters(model, opt)

    def stored():
        found = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
        return [bits(getattr(p, "packed", p)) for p in found]

    own = stored()
    with torch.no_grad(), ema.swapped(model):
        there = stored()
        model(torch.ones(2, 100).bfloat16())
    assert stored() == own
    return full(ema), own, there


def distribute(grad, p):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(grad, p.device_mesh, p.placements)


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.all) for size in (2, 3)])
def test_averages_of_packed_shards(pool, size):
    wanted = packed(0, 0)
    assert pool.run(size, packed) == size * [wanted]


def full_of(found, begin):
    return {k[len(begin) :]: v for k, v in found.items() if k.startswith(begin)}


class Mixed(nn.Module):
    """A DTensor, a plain parameter, a shared one, and buffers of both kinds; `rank` makes the
    running statistics those of this rank."""

    def __init__(self, size, rank):
        super().__init__()
        torch.manual_seed(0)
        values = {"a": torch.randn(5, 8).bfloat16(), "b": torch.randn(9).bfloat16()}
        self.inner = nn.Module()
        for name, p in cut(values, mesh_of((size,)), rows).items() if size else values.items():
            self.inner.register_parameter(name, nn.Parameter(p))
        self.shared = self.inner.a
        self.plain = nn.Parameter(torch.randn(3, 4).bfloat16())
        self.register_buffer("mean", torch.full((4,), float(rank)))
        self.register_buffer("hidden", torch.ones(2), persistent=False)


def mixed(rank, size, how):
    model = Mixed(size, rank)
    ema = halfstep.EMA(model, 0.5, "bf16-kahan", use_buffers=how == "buffers", seed=1)
    for step in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.25)
            model.mean.add_(1)
        ema.update_parameters(model)
    names = [list(dict(m.named_parameters())) + list(m.state_dict()) for m in (model, ema.module)]
    assert names[0] == names[1] and ema.module.shared is ema.module.inner.a
    found = full(ema), bits(model.mean)
    with torch.no_grad(), told("is not finite"):
        if rank == size - 1 or not size:
            model.plain[0, 0] = math.nan
        ema.update_parameters(model)
    assert ema.skipped_updates == 1 and full(ema.module) == full_of(found[0], "module.")
    return found


@pytest.mark.parametrize("how", ["copied", pytest.param("buffers", marks=pytest.mark.all)])
def test_parameters_that_are_whole_beside_shards(pool, how):
    """Buffers that differ between ranks, as running statistics do, keep the rank's own average."""
    for rank, (found, mean) in enumerate(pool.run(2, mixed, how)):
        wanted, whole = mixed(rank, 0, how)
        assert found == wanted and mean == whole


# ---- What is refused -----------------------------------------------------------------------------


def refused(rank, size, updates):
    """Tries what only the last rank has wrong: a NaN, an infinite residual, a residual of another
    dtype. Returns what was said and if anything changed."""
    found = []
    for what in ("weight", "residual", "dtype", "none"):
        model, opt, ema = pair("fsdp2", "bf16-kahan", "bf16-kahan")
        train(opt, named(model), 0, 1)
        advance(model, opt, ema, 0, updates)
        before = full(ema)
        p = model.up.weight
        if rank == size - 1 and what != "none":
            held = opt.state[p]["weight.extra"]
            if what == "weight":
                local(p).data[-1, -1] = math.nan
            elif what == "residual":
                local(held)[-1, -1] = math.inf
            else:
                opt.state[p]["weight.extra"] = held.to(torch.float32)
        words = {"dtype": "put beside it by hand"}.get(what, "is not finite")
        if what == "none" or what == "dtype" and rank < size - 1:
            words = None
        with torch.no_grad(), told(words, words is not None):
            said = outcome(lambda: ema.update_parameters(model, opt))
        after = full(ema)
        counters = after.pop("counters"), before.pop("counters")
        found.append((said, ema.skipped_updates, after == before, counters[0] == counters[1]))
    return found


@pytest.mark.parametrize("updates", [1, pytest.param(0, marks=pytest.mark.all)])
def test_a_refusal_on_one_rank_is_one_on_all(pool, updates):
    for rank, (*bad, dtype, good) in enumerate(pool.run(2, refused, updates)):
        assert bad == 2 * [("stepped", 1, True, False)]
        assert ("'up.weight'" if rank else "another rank cannot") in dtype[0]
        assert dtype[1:] == (0, True, True) and good[1:3] == (0, False)


def disagreeing(rank, size):
    model, opt, ema = pair("fsdp2", "bf16-sr", "bf16-sr")
    said = []
    for options in ({"seed": rank}, {"decay": 0.9 + rank / 100}, {"weights": "bf16-kahan"}):
        if not rank:
            options = {} if "weights" in options else options
        other = halfstep.EMA(model, **{"seed": 1, **options})
        said.append(outcome(lambda: other.update_parameters(model)))
    whole = halfstep.EMA(Net(torch.bfloat16))
    said.append(outcome(lambda: whole.update_parameters(model)))
    said.append(outcome(lambda: ema.update_parameters(Net(torch.bfloat16))))
    if rank:
        ema.n_averaged += 1
    said.append(outcome(lambda: ema.update_parameters(model)))
    said.append(outcome(lambda: ema(torch.ones(1, 48))))
    return said


def test_ranks_that_disagree_about_averages(pool):
    words = [
        "the seed",
        "id of parameter",
        "recipe of parameter",
        "is cut over ranks as (",
        "as None",
    ]
    words += ["the number of updates: 0 on rank 0, 1 on rank 1", "inside `with ema.swapped"]
    for said in pool.run(2, disagreeing):
        assert all(word in text for word, text in zip(words, said)), said


# ---- Saving --------------------------------------------------------------------------------------


def resumed(rank, size, folder, kind, how, last, loads, saves):
    """Goes on from what `loads` saved if there is one, updates to the step `last`, and saves as
    `saves`: by torch.distributed.checkpoint, or whole in one file."""
    import torch.distributed.checkpoint as checkpoint

    model, opt, ema = pair(kind, "bf16-ecc8", "bf16-kahan", use_buffers=True)
    for step in range(last):  # the weights are the same in each run
        train(opt, named(model), step, step + 1)
        if loads is not None and step < loads:
            continue
        if loads is not None and step == loads:
            path = f"{folder}/{loads}"
            if how == "file":
                saved = torch.load(path + ".pt", weights_only=True, mmap=True)
            else:
                saved = ema.state_dict()
                checkpoint.load({"ema": saved}, checkpoint_id=path)
            ema.load_state_dict(saved)
        ema.update_parameters(model, opt)
    saved, path = ema.state_dict(), f"{folder}/{saves}"
    if how == "file":
        saved = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in saved.items()}
        if not rank:
            torch.save(saved, path + ".pt")
    else:
        checkpoint.save({"ema": saved}, checkpoint_id=path)
    return full(ema)


@pytest.mark.parametrize(
    "how, stages",
    [("file", [(2, "fsdp2"), (1, None)])]
    + [
        pytest.param(how, stages, marks=pytest.mark.all)
        for how in ("file", "dcp")
        for stages in (
            [(1, None), (2, "fsdp2"), (3, "fsdp2"), (4, "hsdp"), (1, "fsdp2")],
            [(4, "fsdp2"), (2, "tp"), (2, "fsdp2"), (1, None)],
        )
    ],
)
def test_averages_go_on_with_another_number_of_ranks(pool, tmp_path, how, stages):
    for i, (size, kind) in enumerate(stages):
        case = str(tmp_path), kind, how, i + 2, i + 1 if i else None, i + 2
        found = pool.run(size, resumed, *case)
    wanted = pool.run(1, resumed, str(tmp_path), None, how, len(stages) + 1, None, "whole")
    assert all(bits_found == wanted[0] for bits_found in found)


def published(rank, size, folder):
    """Saves the averages alone, whole and as shards, for a model that knows nothing of ranks."""
    import torch.distributed.checkpoint as checkpoint
    from safetensors.torch import load_file, save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model, opt, ema = pair("fsdp2", "bf16-ecc8", "bf16-kahan")
    advance(model, opt, ema, 0, 2)
    checkpoint.save(ema.module.state_dict(), checkpoint_id=f"{folder}/shards")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = [get_model_state_dict(ema.module, options=options)]
    with ema.swapped(model):
        whole.append(get_model_state_dict(model, options=options))
    if rank:
        return None
    found = []
    for i, state in enumerate(whole):
        save_file(state, f"{folder}/{i}.safetensors")
        found.append(Net(torch.bfloat16))
        found[-1].load_state_dict(load_file(f"{folder}/{i}.safetensors"))
    found.append(Net(torch.bfloat16))
    state = found[-1].state_dict()
    checkpoint.load(state, checkpoint_id=f"{folder}/shards", no_dist=True)
    return [full(model) for model in found]


def test_averages_alone_are_saved_for_inference(pool, tmp_path):
    found, _ = pool.run(2, published, str(tmp_path))
    model, opt, ema = pair(None, "bf16-ecc8", "bf16-kahan")
    advance(model, opt, ema, 0, 2)
    assert found == 3 * [full(ema.module)]


# ---- Callbacks of trainers -----------------------------------------------------------------------


def called_back(rank, size, folder, kind):
    """Calls transformers' callback as its Trainer does: trains, saves, evaluates, and goes on from
    the file with another model. Returns the averages, and those in a plain model."""
    from halfstep.integrations.transformers import EMACallback, load_averages

    model, opt, _ = pair(kind, "bf16-ecc8", "f32")
    args = types.SimpleNamespace(
        output_dir=folder, should_save=not rank, resume_from_checkpoint=f"{folder}/checkpoint-2",
        load_best_model_at_end=True,
    )  # fmt: skip
    state = types.SimpleNamespace(
        global_step=0, stateful_callbacks={}, best_model_checkpoint=f"{folder}/checkpoint-2"
    )
    if not rank:
        os.makedirs(f"{folder}/checkpoint-2", exist_ok=True)
    first, again = (EMACallback(0.9, weights="bf16-kahan", seed=1) for _ in range(2))
    first.on_train_begin(args, state, None, model=model, optimizer=opt)
    for step in range(4):
        if step == 2:
            first.on_save(args, state, None)
            if size:
                torch.distributed.barrier()
            again.on_train_begin(args, state, None, model=model, optimizer=opt)
        train(opt, named(model), step, step + 1)
        state.global_step += 1
        for callback in (first, again)[: 1 + (step > 1)]:
            callback.on_step_end(args, state, None)
    own = full(model)
    opt.eval()
    with torch.no_grad():
        net_loss(model, 0)
    inside = full(model)
    again.on_evaluate(args, state, None)
    assert full(model) == own
    found = full(first.ema), full(again.ema), inside
    plain = Net(torch.bfloat16)
    load_averages(plain, f"{folder}/checkpoint-2")
    first.on_train_end(args, state, None, model=model)
    return *found, full(plain), full(model)


@pytest.mark.all
def test_the_callback_of_transformers(pool, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "one").mkdir()
    wanted = called_back(0, 0, str(tmp_path / "one"), None)
    assert wanted[0] == wanted[1] and wanted[3] == wanted[4]
    assert pool.run(2, called_back, str(tmp_path), "fsdp2") == 2 * [wanted]


def lightning_saves(rank, size, kind):
    """Calls Lightning's callback as its Trainer does, and goes on from the checkpoint of the first
    rank."""
    from halfstep.integrations.lightning import EMACallback

    model, opt, _ = pair(kind, "bf16-sr", "f32")
    trainer = types.SimpleNamespace(
        optimizers=[opt], global_step=0, save_checkpoint=None,
        state=types.SimpleNamespace(fn="fit"),
        strategy=types.SimpleNamespace(lightning_module_state_dict=model.state_dict),
    )  # fmt: skip
    first, again = (EMACallback(0.9, weights="bf16-kahan", seed=1) for _ in range(2))
    first.on_train_start(trainer, model)
    for step in range(2):
        train(opt, named(model), step, step + 1)
        trainer.global_step += 1
        first.on_train_batch_end(trainer, model, None, None, step)
    own, held = full(model), {}
    first.on_save_checkpoint(trainer, model, held)
    told = [first.state_dict(), copy.deepcopy(held.pop("halfstep_trained_weights", None))]
    averages = {key: whole_bits(value) for key, value in held["state_dict"].items()}
    assert full(model) == own
    if size:
        torch.distributed.broadcast_object_list(told)
    again.load_state_dict(told[0])
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    again.on_load_checkpoint(trainer, model, {"halfstep_trained_weights": told[1]})
    assert full(model) == own
    again.on_train_start(trainer, model)
    return full(first.ema), full(again.ema), averages


@pytest.mark.all
def test_the_callback_of_lightning(pool):
    pytest.importorskip("lightning")
    wanted = lightning_saves(0, 0, None)
    assert wanted[0] == wanted[1] and wanted[2] != wanted[0]
    assert pool.run(2, lightning_saves, "fsdp2") == 2 * [wanted]
