"""Tests packed weights on several ranks: fully_shard, DistributedDataParallel, checkpoints and
collectives."""

import copy
import inspect
import tempfile

import pytest
import torch
import torch.distributed as dist
from conftest import bits
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.nn import Int8Weight, quantize_

pytest.importorskip("torch.distributed.fsdp", reason="fully_shard is public from torch 2.6 on")


def network(seed=0, dtype=torch.bfloat16, rows=33):
    """33 rows over two ranks are uneven. Rows of 100 end in a short block."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(100, rows), nn.GELU(), nn.Linear(rows, 40)).to(dtype)


def batch(rank=0, dtype=torch.bfloat16):
    return torch.randn(4, 100, generator=torch.Generator().manual_seed(rank)).to(dtype)


def stored(model):
    """Returns the bits of all weights, as they are stored."""
    return [bits(getattr(p, "packed", p)) for p in model.parameters()]


def whole(tensor):
    full = tensor.full_tensor()
    return full.packed if isinstance(full, Int8Weight) else full


def shard(model, **options):
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


class Gathered(TorchDispatchMode):
    """Counts the bytes that ranks gather."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and "allgather" in str(func):
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def sharded(rank, size, rows):
    model = quantize_(network(rows=rows))
    single = copy.deepcopy(model)
    shard(model)
    weight = model[0].weight
    held = weight.to_local()
    assert isinstance(held, Int8Weight) and held.packed.shape == (held.shape[0], 4 * 34)
    assert torch.equal(whole(weight), single[0].weight.packed)
    address = held.packed.data_ptr()
    for _ in range(2):
        y = model(batch())
        y.float().square().sum().backward()
        expected = single(batch())
        expected.float().square().sum().backward()
        assert torch.equal(y, expected)
    for p, q in zip(model.parameters(), single.parameters()):
        assert type(p.grad.to_local()) is torch.Tensor
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=2**-7, atol=2**-7)
    # What a step writes is what the next forward pass uses.
    with torch.no_grad():
        weight.to_local().packed.view(torch.int8)[:, 2] = 3
        single[0].weight.packed.view(torch.int8)[:, 2] = 3
    assert weight.to_local().packed.data_ptr() == address or weight.to_local() is not held
    assert torch.equal(model(batch()), single(batch()))
    return weight.to_local().shape[0]


def mixed(rank, size):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = quantize_(network(dtype=torch.float32))
    single = copy.deepcopy(model).bfloat16()
    shard(model, mp_policy=policy)
    y = model(batch(dtype=torch.float32))
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and torch.equal(y, single(batch()))
    assert model[0].weight.grad.dtype == torch.float32 == model[0].weight.dtype


def on_a_mesh(rank, size, options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy

    model = quantize_(network())
    single = copy.deepcopy(model)
    if "mesh" in options:
        options["mesh"] = init_device_mesh("cpu", options["mesh"], mesh_dim_names=("some", "all"))
    if "offload_policy" in options:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    shard(model, **options)
    for _ in range(2):
        y = model(batch())
        y.sum().backward()
    assert torch.equal(y, single(batch()))


def traffic(rank, size):
    found = []
    for quantized in (True, False):
        model = nn.Sequential(nn.Linear(128, 33, bias=False)).bfloat16()
        shard(quantize_(model) if quantized else model)
        with Gathered() as gathered:
            model(torch.ones(2, 128, dtype=torch.bfloat16))
        found.append(gathered.bytes)
    return found


def saved(rank, size, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    single = quantize_(network())
    model = shard(copy.deepcopy(single))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in single.state_dict().items():
        assert type(full[name]) is type(value) and torch.equal(full[name], value)
    # Written while the weights change: the checkpoint is of the moment of the call.
    future = dcp.async_save(get_model_state_dict(model), checkpoint_id=folder)
    getattr(future, "staging_completion", future).result()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    getattr(future, "upload_completion", future).result()


def loaded(rank, size, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    single, model = quantize_(network()), shard(quantize_(network(seed=1)))
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    for p, q in zip(model.parameters(), single.parameters()):
        assert torch.equal(whole(p), getattr(q, "packed", q))
    assert torch.equal(model(batch()), single(batch()))
    # Each rank converts its rows of ordinary weights.
    plain = network(seed=2)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, plain.state_dict(), options=options)
    assert torch.equal(whole(model[0].weight), quantize_(plain)[0].weight.packed)


def replicated(rank, size):
    from torch.nn.parallel import DistributedDataParallel

    model = quantize_(network(seed=rank))
    first = quantize_(network(seed=0))
    wrapped = DistributedDataParallel(model)
    for p, q in zip(model.parameters(), first.parameters()):
        assert torch.equal(getattr(p, "packed", p), getattr(q, "packed", q))
    wrapped(batch(rank)).float().square().sum().backward()
    for r in range(size):
        first(batch(r)).float().square().sum().backward()
    for p, q in zip(model.parameters(), first.parameters()):
        assert type(p.grad) is torch.Tensor
        torch.testing.assert_close(p.grad, q.grad / size, rtol=2**-6, atol=2**-5)
    # At its end, join() sends what the rank with the most batches has.
    opt = halfstep.AdamW(wrapped.named_parameters(), lr=1e-2, weights="int8-ecc4", seed=1)
    with wrapped.join():
        for step in range(1 + rank):
            wrapped(batch(step)).float().square().sum().backward()
            opt.step()
            opt.zero_grad()
            last = stored(model)
    end = stored(model)
    # What it is told not to send stays as it is.
    kept = quantize_(network(seed=rank))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(kept, ["0.weight"])
    wrapped = DistributedDataParallel(kept)
    assert torch.equal(kept[0].weight.packed, quantize_(network(seed=rank))[0].weight.packed)
    assert torch.equal(kept[2].weight.packed, quantize_(network(seed=0))[2].weight.packed)
    if "init_sync" in inspect.signature(DistributedDataParallel).parameters:
        kept = quantize_(network(seed=rank))
        DistributedDataParallel(kept, init_sync=False)
        assert torch.equal(kept[2].weight.packed, quantize_(network(seed=rank))[2].weight.packed)
    return last, end


def refused(call):
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def collectives(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    first, model = quantize_(network(seed=0)), quantize_(network(seed=rank))
    dist.broadcast(model[0].weight.data, 0)
    assert torch.equal(model[0].weight.packed, first[0].weight.packed)
    every = [torch.empty_like(model[2].weight.data) for _ in range(size)]
    dist.all_gather(every, model[2].weight.data)
    for r, w in enumerate(every):
        assert torch.equal(w.packed, quantize_(network(seed=r))[2].weight.packed)
    mesh = init_device_mesh("cpu", (size,))
    # Rows may be dealt out, columns may not.
    whole_rows = parallelize_module(
        quantize_(nn.Sequential(nn.Linear(64, 34))), mesh, {"0": ColwiseParallel()}
    )
    assert isinstance(whole_rows[0].weight.to_local(), Int8Weight)
    whole_rows(torch.ones(2, 64)).sum().backward()
    assert type(whole_rows[0].weight.grad.to_local()) is torch.Tensor
    by_columns = quantize_(nn.Sequential(nn.Linear(96, 34)))
    before = stored(model)
    older = [
        refused(lambda o=o: FullyShardedDataParallel(model, use_orig_params=o, device_id="cpu"))
        for o in (False, True)
    ]
    assert stored(model) == before
    return (
        older,
        refused(lambda: dist.all_reduce(model[0].weight.data)),
        refused(lambda: parallelize_module(by_columns, mesh, {"0": RowwiseParallel()})),
        refused(lambda: quantize_(shard(network()))),
    )


@pytest.mark.parametrize("rows, held", [(33, [17, 16]), (5, [2, 2, 1, 0])])
def test_shards(pool, rows, held):
    assert pool.run(len(held), sharded, rows) == held


def test_shards_in_mixed_precision(pool):
    pool.run(2, mixed)


@pytest.mark.parametrize(
    "options", [{"mesh": (2, 2)}, {"offload_policy": True}, {"reshard_after_forward": False}]
)
def test_other_ways_to_shard(pool, options):
    pool.run(4, on_a_mesh, options)


def test_ranks_gather_packed_bytes(pool):
    """Each rank sends 17 rows, also the one that has 16."""
    assert pool.run(2, traffic)[0] == [2 * 17 * 4 * 34, 2 * 17 * 128 * 2]


def test_distributed_checkpoints(pool):
    with tempfile.TemporaryDirectory() as folder:
        pool.run(2, saved, folder)
        pool.run(2, loaded, folder)
        pool.run(3, loaded, folder)


def test_replicas_begin_and_end_with_the_bytes_of_one_rank(pool):
    answers = pool.run(2, replicated)
    last = answers[-1][0]
    assert last != answers[0][0]
    assert [end for _, end in answers] == [last, last]


def test_what_ranks_may_do_with_a_weight(pool):
    for older, summed, columns, late in pool.run(2, collectives):
        assert all("shard the model by fully_shard() instead" in text for text in older)
        assert "allreduce_" in summed and "sharded by rows" in summed
        assert "(34, 96) cannot be split along dimension 1" in columns
        assert "'0.weight' cannot be quantized: it is a DTensor; quantize the model bef" in late
