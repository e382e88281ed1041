"""Tests optimizers on 8-bit weights: the bits of the library's own steps, on whatever way."""

import copy
import ctypes

import pytest
import torch
from conftest import (
    COPIES,
    FIRST_MOVEMENT,
    bits,
    class_of,
    loss_of,
    network,
    outcome,
    randn,
    rules,
    saved,
    states,
    train,
    warnings_are,
)
from test_cuda import fake, gpu  # noqa: F401
from torch.nn import Parameter

import halfstep
from halfstep._library import abi
from halfstep._library.abi import lib
from halfstep._states import dither
from halfstep._states.handles import Handle, read_rows, slot_info
from halfstep._tensors import devices, sharding

FORMATS = [name for name, f in abi.formats.items() if f.geometry == abi.GEOMETRY_PACKED]
formats = pytest.mark.parametrize("format", FORMATS)
#: matrices of whole and of short blocks
SHAPES = {"a": (24, 64), "b": (17, 50), "c": (40, 33)}


def make_network(format, cls=halfstep.AdamW, dtype=torch.bfloat16, **options):
    """Makes a quantized model and an optimizer for it. Two calls give the same bits."""
    model = halfstep.nn.quantize_(network(dtype), format)
    options = {"lr": 1e-2, "weights": format, "states": "int8", "seed": 3, **options}
    return model, cls(model.named_parameters(), **options)


def matrices(format, move=lambda packed: packed):
    """Makes parameters of 8 bits by name. move() brings their bytes elsewhere."""
    return {
        name: Parameter(
            halfstep.nn.Int8Weight(move(halfstep.nn.pack(randn(shape, i))), format, shape[1])
        )
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def gradients(params, step):
    return {
        name: randn(p.shape, 100 * step + i, torch.bfloat16)
        for i, (name, p) in enumerate(params.items())
    }


def memory_of(params):
    """Returns the bits that parameters have in memory."""
    params = params.parameters() if isinstance(params, torch.nn.Module) else params.values()
    return [bits(sharding.stored(p)) for p in params]


def same(model, opt, other, others):
    assert memory_of(model) == memory_of(other)
    assert states(opt) == states(others)


# ---- Steps ---------------------------------------------------------------------------------------


@rules
@formats
def test_steps_of_the_library(rule, format):
    params = matrices(format)
    options = {"lr": 1.0, "d0": 0.01} if rule == "prodigy" else {"lr": 0.01}
    opt = class_of(rule)(params.items(), states="int8", seed=3, **options)
    handle, weights = Handle(1, 3), [p.packed.clone() for p in params.values()]
    for name, p in params.items():
        assert opt.recipe(p) == abi.recipe_full(f"{rule}/{format}/int8")
        handle.add(opt.recipe(p), name, abi.name_id(name), tuple(p.shape), "bf16")
    handle.set(**opt._parts.groups.options.values(opt.param_groups[0]))
    before = [bits(weight) for weight in weights]
    abi.check(lib.halfstep_allocate_states(handle), handle)
    for i, p in enumerate(params.values()):
        if extra := slot_info(handle, i, abi.SLOT_WEIGHT).extra:
            codes = dither.error_codes(p, "", devices.HOST)
            assert ctypes.string_at(extra, codes.numel()) == codes.numpy().tobytes()
    for step in range(FIRST_MOVEMENT + 2):
        given = gradients(params, step)
        for name, p in params.items():
            p.grad = given[name]
        opt.step()
        pointers = (
            (ctypes.c_void_p * len(SHAPES))(*[t.data_ptr() for t in some])
            for some in (weights, given.values())
        )
        abi.check(lib.halfstep_step(handle, *pointers), handle)
    assert memory_of(params) == [bits(weight) for weight in weights] != before
    for i, (p, weight) in enumerate(zip(params.values(), weights)):
        read = lib.halfstep_read_slot, handle, i, tuple(p.shape), abi.SLOT_WEIGHT
        assert bits(opt.read_weight(p)) == bits(read_rows(*read, weight.data_ptr()))


@formats
def test_ways_to_step(format):
    """Gradient release, a closure, a GradScaler and an accumulator of one micro-batch give the bits
    of plain steps. Gradients are ordinary tensors."""
    model, opt = make_network(format)
    train(model, opt, 0, 3)
    released, other = make_network(format, gradient_release=True)
    for step in range(3):
        loss_of(released, step).backward()
        assert all(p.grad is None for p in released.parameters())
        other.step()
    same(model, opt, released, other)
    ways = {}
    for way in ("closure", "scaler", "accumulator"):
        ways[way], other = make_network(format)
        accumulator = halfstep.GradientAccumulator(ways[way], "bf16-sr", seed=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            other.zero_grad()
            if way == "closure":

                def closure(model=ways[way], step=step):
                    loss = loss_of(model, step)
                    loss.backward()
                    return loss

                other.step(closure)
            elif way == "scaler":
                scaler.scale(loss_of(ways[way], step)).backward()
                scaler.step(other)
                scaler.update()
            else:
                with accumulator:
                    loss_of(ways[way], step).backward()
                assert {type(p.grad) for p in ways[way].parameters()} == {torch.Tensor}
                other.step()
        same(model, opt, ways[way], other)


@formats
def test_micro_batches_leave_weights_alone(format):
    model, opt = make_network(format)
    opt.optimizer_accumulation = True
    before = memory_of(model)
    train(model, opt, 0, 2)
    assert memory_of(model) == before and opt.state
    opt.optimizer_accumulation = False
    train(model, opt, 2, 3)
    assert memory_of(model) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_to_compute_in(dtype):
    model, opt = make_network("int8-ecc4", dtype=dtype, clip_norm=1.0)
    train(model, opt, 0, 2)
    weight, bias = model[0].weight, model[0].bias
    assert weight.grad is None and opt.grad_norm > 0
    assert opt.recipe(weight).split("/")[1] == "int8-ecc4"
    assert opt.recipe(bias).split("/")[1] == {4: "f32", 2: "f16-ecc8"}[bias.itemsize]


# ---- States --------------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("cls", [halfstep.AdamW, halfstep.Prodigy])
def test_resumed_runs(format, cls):
    """Copies and loaded state dictionaries go on with the same bits. Prodigy keeps the first
    weights in the format of the weights."""
    model, opt = make_network(format, cls)
    train(model, opt, 0, 2)
    others = [copy_((model, opt)) for copy_ in COPIES.values()]
    other = make_network(format, cls)
    for one, two in zip((model, opt), other):
        two.load_state_dict(saved(one.state_dict()))
    train(model, opt, 2, 4)
    for one in (*others, other):
        train(*one, 2, 4)
        same(model, opt, *one)


def test_error_codes_are_states():
    model, opt = make_network("int8-ecc4")
    weight = model[0].weight
    train(model, opt, 0, 1)
    extra = opt.state[weight]["weight.extra"]
    assert extra.dtype == torch.uint8 and extra.shape == (64, 32) and extra.any()
    left = opt.read_weight(weight) - weight.dequantize(torch.float32)
    largest = weight.scales.float().repeat_interleave(32, 1)[:, :48] / 2
    assert (left.abs() <= largest).all() and left.abs().max() > 0
    other, without = make_network("int8-sr")
    train(other, without, 0, 1)
    assert "weight.extra" not in without.state[other[0].weight]


def test_error_codes_begin_evenly():
    """Layers see the first steps: the mean of codes moves as the mean of weights does, although
    each weight moves by less than a tenth of a code. Error codes behind the last column are 0."""
    values = randn((512, 50), 1)
    weight = Parameter(halfstep.nn.Int8Weight(halfstep.nn.pack(values), "int8-ecc4", 50))
    opt = halfstep.SGD([("w", weight)], lr=1.0)
    steps = weight.scales.float().repeat_interleave(32, 1)[:, :50] / 16
    before = weight.dequantize(torch.float32)
    for _ in range(2):
        weight.grad = steps.bfloat16()
        opt.step()
    moved = (before - weight.dequantize(torch.float32)) / (2 * steps)
    assert set(moved.round().unique().tolist()) == {0.0, 8.0}
    assert moved.mean().item() == pytest.approx(1, abs=0.05)
    codes = opt.state[weight]["weight.extra"]
    assert not codes[:, 25:].any()
    odd = halfstep.nn.Int8Weight(halfstep.nn.pack(values[:, :33]), "int8-ecc4", 33)
    codes = dither.error_codes(odd, "", devices.HOST)
    assert codes.shape == (512, 32) and codes[:, 16].max() < 16 and not codes[:, 17:].any()


def test_writes_of_others_drop_error_codes(caught):
    """Those of the rows that were written, through any view of the bytes, begin anew."""
    model, opt = make_network("int8-ecc4")
    weight = model[0].weight
    train(model, opt, 0, 2)
    kept = saved(opt.state_dict())
    extra = opt.state[weight]["weight.extra"]
    wanted, fresh = extra.clone(), dither.error_codes(weight, "", devices.HOST)
    for row, write in (
        (3, lambda: weight.packed[3, 7].bitwise_xor_(1)),
        (5, lambda: weight[5].copy_(weight[5].dequantize() * 2)),
        (9, lambda: weight.scales[9, 0].mul_(2)),
    ):
        with torch.no_grad():
            write()
        opt.state_dict()
        assert not torch.equal(extra, wanted)
        wanted[row] = fresh[row]
        assert torch.equal(extra, wanted), row
    assert ["'0.weight' was written" in str(w.message) for w in caught] == [True]
    opt.load_state_dict(kept)
    opt.read_weight(weight)  # looks at the weight, which is not the one that was saved
    assert torch.equal(opt.state[weight]["weight.extra"], wanted)


MOVES = {
    "casts": lambda m: m.float().bfloat16(),
    "clones": lambda m: m._apply(lambda t: t.clone()),
    "data": lambda m: [setattr(p, "data", p.data.clone()) for p in m.parameters()],
}


@pytest.mark.parametrize("move", MOVES)
def test_the_same_bytes_elsewhere_keep_error_codes(move, caught):
    """A write before a move is still one of somebody else."""
    pairs = [make_network("int8-ecc4", lr=1e-4) for _ in range(2)]
    for step in range(3):
        for model, opt in pairs:
            train(model, opt, step, step + 1)
        address = model[0].weight.packed.data_ptr()
        MOVES[move](model)
        assert model[0].weight.packed.data_ptr() != address
    same(*pairs[0], model, opt)
    assert not caught
    with torch.no_grad():
        model[0].weight[3] *= 2
    MOVES[move](model)
    opt.read_weight(model[0].weight)
    assert ["was written" in str(w.message) for w in caught] == [True]


@formats
def test_average_and_trained_weights(format):
    model, opt = make_network(format, halfstep.ScheduleFree)
    train(model, opt, 0, 3)
    trained = memory_of(model)
    opt.eval()
    averaged, kept = memory_of(model), [saved(one.state_dict()) for one in (model, opt)]
    assert averaged != trained
    opt.train()
    assert memory_of(model) == trained
    other = make_network(format, halfstep.ScheduleFree)
    for one, state in zip(other, kept):
        one.load_state_dict(state)
    assert memory_of(other[0]) == averaged
    other[1].train()
    train(model, opt, 3, 4)
    train(*other, 3, 4)
    same(model, opt, *other)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.told("was written, but not by this optimizer")
@pytest.mark.told("the loaded states are .* converted")
def test_states_of_other_weights():
    """States of 16-bit weights load beside 8-bit ones and the other way round. Residuals stay
    with the weights that they are of."""
    plain = network(torch.bfloat16)
    opt = halfstep.AdamW(plain.named_parameters(), lr=1e-2, weights="bf16-ecc8", states="int8")
    train(plain, opt, 0, 2)
    model, other = make_network("int8-ecc4")
    momentum = opt.read_state(plain[0].weight, "exp_avg")
    other.load_state_dict(saved(opt.state_dict()))
    error = other.read_state(model[0].weight, "exp_avg") - momentum
    assert error.abs().max() < momentum.abs().max() / 100
    extra = other.state[model[0].weight]["weight.extra"]
    assert torch.equal(extra, dither.error_codes(model[0].weight, "", devices.HOST))
    train(model, other, 2, 3)
    opt.load_state_dict(saved(other.state_dict()))
    train(plain, opt, 3, 4)
    # The other 8-bit format decodes the same bytes.
    value = other.read_weight(model[2].weight)
    halfstep.nn.quantize_(model, "int8-sr")
    train(model, other, 3, 4)
    assert other.recipe(model[2].weight) == "adamw/int8-sr/int8"
    assert "weight.extra" not in other.state[model[2].weight]
    assert (other.read_weight(model[2].weight) - value).abs().max() < 0.1


def test_weights_in_full_precision(tmp_path):
    model, opt = make_network("int8-ecc4")
    train(model, opt, 0, 2)
    found = halfstep.full_precision_state_dict(model, opt)
    assert {type(value) for value in found.values()} == {torch.Tensor}
    weight = model[0].weight
    assert bits(found["0.weight"]) == bits(opt.read_weight(weight))
    network().load_state_dict(found)
    opt.write_weight(weight, found["0.weight"] * 2)
    assert (opt.read_weight(weight) / 2 - found["0.weight"]).abs().max() < 1e-3
    with pytest.importorskip("safetensors") and warnings_are("error"):
        opt.save_safetensors(tmp_path / "opt.safetensors")
        other = make_network("int8-ecc4")
        other[0].load_state_dict(model.state_dict())
        other[1].load_safetensors(tmp_path / "opt.safetensors")
    train(model, opt, 2, 3)
    train(*other, 2, 3)
    same(model, opt, *other)


# ---- Memory --------------------------------------------------------------------------------------


@formats
def test_plan_tells_the_bytes(format):
    """Before and after quantize_(), which takes the weights of nn.Linear."""
    model = torch.nn.Sequential(torch.nn.Embedding(50, 64), *network()).bfloat16()
    recipe = f"adamw/{format}/int8"
    before = str(halfstep.plan(model, recipe))
    halfstep.nn.quantize_(model, format)
    assert before == str(halfstep.plan(model, recipe))
    fallback = {"int8-ecc4": "bf16-ecc8", "int8-sr": "bf16-sr"}[format]
    names = "'0.weight', '1.bias', '3.bias', '5.bias'"
    assert f"Beside {format} 4 tensors of 3300 elements are {fallback}: {names}." in before
    opt = halfstep.optimizer(recipe, model.named_parameters())
    for p in model.parameters():
        p.grad = torch.zeros(p.shape, dtype=p.dtype)
    opt.step()
    row = halfstep.plan(model, recipe).rows[0]
    memory = opt.memory()
    assert {key: getattr(row, key) for key in memory} == memory

    def size(tensors):
        return sum(t.numel() * t.element_size() for t in tensors)

    assert memory["weights"] == size(map(sharding.stored, model.parameters()))
    kept = [(key, t) for state in opt.state.values() for key, t in state.items() if t.dim()]
    assert memory["extras"] == size(t for key, t in kept if key == "weight.extra")
    assert memory["states"] == size(t for key, t in kept if key != "weight.extra")
    for p in model.parameters():
        p.requires_grad_(False)
    assert halfstep.plan(model, recipe).rows[0].frozen == memory["weights"]
    (row,) = halfstep.plan({"w": (64, 64), "short": (9, 31)}, recipe).rows
    assert row.weights == 64 * 68 + 2 * 9 * 31


def test_what_is_refused():
    model, opt = make_network("int8-ecc4")
    weight = halfstep.nn.Int8Weight
    for act, text in (
        (
            lambda: halfstep.AdamW(network(torch.bfloat16).parameters(), weights="int8-sr"),
            "quantize_",
        ),
        (lambda: halfstep.AdamW(model.parameters(), compile=True), "compile=True"),
        (lambda: halfstep.EMA(network(), weights="int8-sr"), "unknown weights="),
        (
            lambda: halfstep.AdamW([Parameter(model[0].weight.detach().t())]),
            "no range of their rows",
        ),
        (
            lambda: halfstep.AdamW(
                [Parameter(weight(torch.zeros(4, 34, dtype=torch.uint8), "int8-sr", 31))]
            ),
            "rows of 31 elements",
        ),
    ):
        assert text in outcome(act)
    frozen = copy.deepcopy(model).requires_grad_(False)
    halfstep.EMA(torch.nn.Sequential(frozen, torch.nn.Linear(4, 4)))


@formats
@pytest.mark.parametrize("averages", ["bf16-kahan", "f32"])
def test_averages_of_packed_weights(format, averages):
    """They are those of decoded weights with their error codes."""
    model, opt = make_network(format)
    plain = network(torch.bfloat16).float()
    ema = halfstep.EMA(model, 0.9, averages, seed=1)
    twin = halfstep.EMA(network(torch.bfloat16), 0.9, averages, seed=1)
    for step in range(3):
        train(model, opt, step, step + 1)
        ema.update_parameters(model, opt)
        plain.load_state_dict(halfstep.full_precision_state_dict(model, opt))
        twin.update_parameters(plain)
    found, wanted = ema.state_dict(), twin.state_dict()
    assert {k: bits(v) for k, v in found.items()} == {k: bits(v) for k, v in wanted.items()}
    own = {k: bits(getattr(v, "packed", v)) for k, v in model.state_dict().items()}
    with torch.no_grad(), ema.swapped(model):
        for p, q in zip(model.parameters(), ema.module.parameters()):
            if hasattr(p, "packed"):
                assert torch.equal(p.packed, halfstep.nn.pack(q.detach()))
        assert not torch.equal(model[0].weight.dequantize(), plain[0].weight)
    assert own == {k: bits(getattr(v, "packed", v)) for k, v in model.state_dict().items()}
    train(model, opt, 3, 4)  # without a warning about a write


# ---- GPUs and ranks ------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("kind", ["CPUOffload", "StateStreaming"])
@pytest.mark.parametrize("release", [False, True])
def test_states_in_the_process(fake, kind, format, release):  # noqa: F811
    here, there = matrices(format), matrices(format, fake.tensor)
    options = {"lr": 0.01, "seed": 5, "clip_norm": 0.0 if release else 0.5, "states": "int8"}
    opts = (
        halfstep.AdamW(here.items(), **options),
        getattr(halfstep, kind)(
            there.items(), halfstep.AdamW, minimal_size=0, gradient_release=release, **options
        ),
    )
    for step in range(3):
        for params, opt in zip((here, there), opts):
            for name, g in gradients(params, step).items():
                if params is here:
                    params[name].grad = g
                else:
                    params[name].grad = fake.tensor(torch.full_like(g, 3.0))
                    fake.later(params[name].grad, g)
                    for hook in (params[name]._post_accumulate_grad_hooks or {}).values():
                        hook(params[name])
            opt.step()
    opts[1].state_dict()  # waits for the states
    for name, p in there.items():
        stored = opts[1].state[p].values()
        assert {devices.of(value).type for value in stored if value.dim()} == {"cpu"}
        assert bits(fake.read(p.packed)) == bits(here[name].packed), name
        for key, value in opts[0].state[here[name]].items():
            if value.dim():
                assert bits(value) == bits(opts[1].state[p][key]), (name, key)


def sharded(rank, size, format, owners):
    """Steps 8-bit weights that are cut by rows, or that all ranks have. Returns what one process
    should have, and what it has."""
    found = []
    for rule in ("adamw", "muon")[bool(owners) :]:
        given, wanted = matrices(format), matrices(format)
        options = {"lr": 0.01, "seed": 5, "clip_norm": 0.5, "states": "int8"}
        if not owners:
            given = cut_into_rows(given, rank, size)
        opts = (
            class_of(rule)(wanted.items(), **options),
            class_of(rule)(given.items(), owners=owners, **options),
        )
        for step in range(3):
            for params, opt in zip((wanted, given), opts):
                for name, g in gradients(wanted, step).items():
                    params[name].grad = g if params is wanted or owners else like(params[name], g)
                opt.step()
            if step == 1 and not owners:  # the same bytes elsewhere
                for p in given.values():
                    p.data = p.data.clone()
        for name, p in given.items():
            state, ours = (opt.state[q] for opt, q in zip(opts, (wanted[name], p)))
            pairs = [(sharding.stored(wanted[name]), sharding.stored(p))]
            pairs += [(value, sharding.local(ours[key])) for key, value in state.items()]
            rows = slice(*rows_of(SHAPES[name][0], rank, 1 if owners else size))
            found += [bits(one[rows] if one.dim() else one) == bits(two) for one, two in pairs]
    return found


def rows_of(n, rank, size):
    each = -(-n // size)
    return (min(each * rank, n), min(each * (rank + 1), n)) if size > 1 else (0, n)


def cut_into_rows(params, rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (size,))
    return {
        name: Parameter(
            DTensor.from_local(
                p.detach()[slice(*rows_of(len(p), rank, size))],
                mesh,
                [Shard(0)],
                run_check=False,
                shape=p.shape,
                stride=p.stride(),
            )
        )
        for name, p in params.items()
    }


def like(p, grad):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(grad, p.device_mesh, p.placements)


@formats
@pytest.mark.parametrize("owners", [None, True])
def test_ranks(pool, format, owners):
    """Shards of rows, and matrices that ranks step for each other, have the bits of one
    process."""
    for found in pool.run(2, sharded, format, owners):
        assert found and all(found)
