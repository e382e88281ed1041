"""Residuals and error codes belong to the very weight whose rounding left them. A weight that
somebody else has written has none. A weight that only seems to be written keeps its own."""

import copy
import ctypes
import itertools
import os
import sys
import warnings

import pytest
import torch
from conftest import (
    COPIES,
    bits,
    class_of,
    everything,
    make,
    named,
    plain,
    randn,
    run,
    same,
    same_steps,
    saved,
    set_gradients,
    share,
    states,
    told,
    warnings_are,
    weights_of,
)
from torch import nn

import halfstep
import halfstep.nn
from halfstep import EMA
from halfstep._states.bits import row_hashes
from halfstep._tensors.sharding import is_packed, stored

FORMATS = {
    "bf16-kahan": torch.bfloat16,
    "bf16-ecc8": torch.bfloat16,
    "bf16-ecc16": torch.bfloat16,
    "f16-kahan": torch.float16,
    "f16-ecc8": torch.float16,
    "f16-ecc16": torch.float16,
}
formats = pytest.mark.parametrize("weights", FORMATS)
SHAPES = {"matrix": (24, 96), "scalar": (), "vector": (33,)}


class Model(nn.Module):
    def __init__(self, dtype, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.tree = nn.ParameterDict(
            {
                name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
                for name, shape in SHAPES.items()
            }
        )


def optimizer_of(params, weights, rule="adamw", **options):
    """Asks for the format of BF16, which stands for its namesake of FP16, too."""
    asked = "bf16-" + weights.split("-")[1]
    return class_of(rule)(params, lr=2.0**-9, weights=asked, seed=0, **options)


def made(weights, steps=0, rule="adamw", seed=0, **options):
    """Makes a model and its optimizer, which have made some steps."""
    model = Model(FORMATS[weights], seed)
    opt = optimizer_of(model.named_parameters(), weights, rule, **options)
    run(opt, model, 0, steps)
    return model, opt


def something_in(opt, model):
    return all(opt.state[p]["weight.extra"].any() for p in model.parameters() if p.dim())


@pytest.fixture
def silent():
    with warnings_are("error"):
        yield


OTHER_WAYS = {
    "load_state_dict": lambda model, other: model.load_state_dict(other.state_dict()),
    "copy_": lambda model, other: [
        p.copy_(q) for p, q in zip(model.parameters(), other.parameters())
    ],
    "data": lambda model, other: [
        setattr(p, "data", q.detach().clone())
        for p, q in zip(model.parameters(), other.parameters())
    ],
    "through a view": lambda model, other: [
        p.view(-1).copy_(q.view(-1)) for p, q in zip(model.parameters(), other.parameters())
    ],
    "vector_to_parameters": lambda model, other: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(other.parameters()), model.parameters()
    ),
    "foreach": lambda model, other: torch._foreach_copy_(
        list(model.parameters()), list(other.parameters())
    ),
}


#: of what a state dictionary is asked: the original, or a copy
VERSIONS = {"state_dict": lambda whole: whole, **COPIES}


@formats
@pytest.mark.parametrize("way", OTHER_WAYS)
@pytest.mark.told("was written, but not by this optimizer")
def test_a_weight_that_others_wrote_has_no_residual(weights, way):
    """The next step uses residuals of zero, and one warning says so."""
    model, opt = made(weights, 3)
    assert something_in(opt, model)
    with torch.no_grad():
        OTHER_WAYS[way](model, Model(FORMATS[weights], 7))
    with pytest.warns(UserWarning, match="tree.matrix.*write_weight"):
        run(opt, model, 3, 4)
    others, other = made(weights, 3)
    file = saved(other.state_dict())
    for state in file["state"].values():
        state["weight.extra"].zero_()
    judge, reference = made(weights, seed=7)
    reference.load_state_dict(file)
    run(reference, judge, 3, 4)
    same(opt, reference, model, judge)
    with warnings_are("error"):  # said once
        with torch.no_grad():
            OTHER_WAYS[way](model, Model(FORMATS[weights], 8))
        run(opt, model, 4, 5)


@formats
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_a_checkpoint_in_either_order_resumes_bit_for_bit(weights, order, used, silent):
    """Also in a process that has made steps before, and with looks at the optimizer between the
    two."""
    model, opt = made(weights, 3)
    checkpoint = saved({"model": model.state_dict(), "optimizer": opt.state_dict()})
    fresh, other = made(weights, seed=5)
    if used:
        run(other, fresh, 50, 52)
    if order == "model first":
        fresh.load_state_dict(checkpoint["model"])
        other.load_state_dict(checkpoint["optimizer"])
    else:
        other.load_state_dict(checkpoint["optimizer"])
        assert repr(other) and other.memory() and other.state_dict()
        fresh.load_state_dict(checkpoint["model"])
    same_steps(opt, other, model, fresh, 3, 6)


@formats
def test_a_checkpoint_in_place_resumes_bit_for_bit(weights, silent):
    """Loads as torch.distributed.checkpoint does: into the tensors of both, in any order, in
    mid-run."""
    for first in (0, 1):
        model, opt = made(weights, 3)
        kept, held = saved(model.state_dict()), saved(opt.state_dict()["state"])
        run(opt, model, 3, 6)
        after = weights_of(model)
        fresh, other = made(weights, 3, seed=5)

        def weights_in():
            with torch.no_grad():
                for name, p in fresh.state_dict().items():
                    p.copy_(kept[name])

        def states_in():
            for i, p in enumerate(fresh.parameters()):
                for key, value in other.state[p].items():
                    if isinstance(value, torch.Tensor) and key != "step":
                        value.copy_(held[i][key])

        for act in (weights_in, states_in)[:: -1 if first else 1]:
            act()
        run(other, fresh, 3, 6)
        assert weights_of(fresh) == after


@formats
def test_safetensors_in_either_order(weights, tmp_path, silent):
    pytest.importorskip("safetensors")
    model, opt = made(weights, 3)
    kept = saved(model.state_dict())
    opt.save_safetensors(tmp_path / "o")
    run(opt, model, 3, 5)
    for first, used in itertools.product((0, 1), (0, 2)):
        fresh, other = made(weights, used, seed=5)
        for act in (
            lambda: fresh.load_state_dict(kept),
            lambda: other.load_safetensors(tmp_path / "o"),
        )[:: -1 if first else 1]:
            act()
        run(other, fresh, 3, 5)
        assert weights_of(fresh) == weights_of(model)


@pytest.mark.parametrize(
    "look",
    ["read_weight", "read_average", *VERSIONS, "safetensors", "average"]
    + ["accumulate", "conversion", "release", "torch_state_dict"],
)
def test_every_use_notices(look, tmp_path):
    """Every function that reads the pair may be the first to notice."""
    model, opt = made("bf16-ecc8", 3)
    opt.zero_grad()
    ema = EMA(model, 0.5, "f32", seed=0)
    p = model.tree["matrix"]
    ema.update_parameters(model, opt)
    if look == "release":
        opt.prepare_gradient_release()
    with torch.no_grad():
        p.copy_(Model(torch.bfloat16, 7).tree["matrix"])
    with pytest.warns(UserWarning, match="tree.matrix"):
        if look in ("read_weight", "read_average"):
            assert torch.equal(getattr(opt, look)(p), p.float())
        elif look in VERSIONS:
            _, copied = VERSIONS[look]((model, opt))
            assert not copied.state_dict()["state"][0]["weight.extra"].any()
        elif look == "safetensors":
            pytest.importorskip("safetensors")
            opt.save_safetensors(tmp_path / "o")
            assert not opt.state[p]["weight.extra"].any()
        elif look == "average":
            before = ema.module.tree["matrix"].detach().clone()
            ema.update_parameters(model, opt)
            assert torch.equal(ema.module.tree["matrix"], before + 0.5 * (p.float() - before))
        elif look == "accumulate":
            opt.optimizer_accumulation = True
            run(opt, model, 3, 4)
            assert not opt.state[p]["weight.extra"].any()
        elif look == "conversion":
            opt.param_groups[0]["weights"] = "bf16-ecc16"
            p.grad = torch.zeros_like(p)
            opt.param_groups[0]["lr"] = 0.0
            opt.step()
            assert not opt.state[p]["weight.extra"].any()
        elif look == "release":
            opt.param_groups[0]["lr"] = 0.0
            p.sum().backward()
            opt.step()
            assert not opt.state[p]["weight.extra"].any()
        elif look == "torch_state_dict":
            opt.torch_state_dict()
            opt.step()
    # The others kept theirs.
    other = model.tree["vector"]
    assert opt.state[other]["weight.extra"].any()


@formats
@pytest.mark.parametrize(
    "way", ["step", "release", "write_weight", "strided", "some gradients", "accumulation", "flat"]
)
def test_our_own_writes_are_no_strangers(weights, way, silent):
    """Makes steps of all kinds, with looks between. No residual is lost."""
    results = []
    for looked in (False, True):
        model, opt = made(weights)
        params = named(model)
        if way == "strided":
            p = params["tree.matrix"]
            p.data = p.data.t().contiguous().t()
        if way == "flat":  # one storage, one version counter
            flat = torch.cat([p.detach().reshape(-1) for p in params.values()])
            places = torch.tensor([0] + [p.numel() for p in params.values()]).cumsum(0).tolist()
            params = {
                n: nn.Parameter(flat[a:b].view(p.shape))
                for (n, p), a, b in zip(params.items(), places, places[1:])
            }
            assert len({p._version for p in params.values()}) == 1
            opt = optimizer_of(params.items(), weights)
        if way == "release":
            opt.prepare_gradient_release()
        for step in range(4):
            set_gradients(params, step)
            if way in ("release", "flat") and step:
                for p in params.values():
                    opt.step_param(p)
                opt.step() if way == "release" else opt._parts.steps.end_round()
            elif way == "some gradients":
                for i, p in enumerate(params.values()):
                    if (i + step) % 2:
                        p.grad = None
                opt.step()
            elif way == "accumulation":
                opt.optimizer_accumulation = True
                opt.step()
                opt.optimizer_accumulation = False
                opt.step()
            else:
                opt.step()
            if way == "write_weight":
                for p in params.values():
                    opt.write_weight(p, opt.read_weight(p) * 1.001)
            if looked:
                assert opt.state_dict()
                for p in params.values():
                    opt.read_weight(p)
        results.append((weights_of(params), states(opt)))
    assert results[0] == results[1]
    assert any(s["weight.extra"].any() for s in opt.state.values())


@formats
def test_a_weight_that_moves_keeps_its_residual(weights, silent):
    """The same bits elsewhere, by p.data, into shared memory, or in another layout."""
    model, opt = made(weights)
    others, other = made(weights)
    for step in range(5):
        for m, o in ((model, opt), (others, other)):
            set_gradients(m, step)
            o.step()
        p = model.tree["matrix"]
        p.grad = None
        if step == 0:
            p.data = p.data.clone()
        elif step == 1:
            share(model)
        elif step == 2:
            p.data = p.data.t().contiguous().t()
        elif step == 3:  # there and back, as a swap for an evaluation
            held = p.data
            p.data = torch.zeros_like(held)
            p.data = held
    same(opt, other, model, others)


def test_moved_and_written():
    """The weight is written, then moved. Its old memory proves nothing any more, nor does freed
    memory."""
    for order in ("written first", "written after", "freed"):
        model, opt = made("bf16-ecc16", 3)
        p = model.tree["matrix"]
        with torch.no_grad():
            if order == "written first":
                p.mul_(1.5)
            if order == "freed":
                held = p.data
                p.data = held.clone()
                held.untyped_storage().resize_(0)
            else:
                p.data = p.data.clone()
            if order == "written after":
                p.mul_(1.5)
        with pytest.warns(UserWarning, match="tree.matrix"):
            assert torch.equal(opt.read_weight(p), p.float())


@pytest.mark.told("weights='bf16-ecc16' has nothing to act on")
def test_masks_lose_residuals_and_write_weight_keeps_them():
    """The warning's remedy: a mask by read_weight() and write_weight() trains as fp32 with the mask
    does."""
    ends = {}
    for way in ("f32", "mul_", "write_weight"):
        p = nn.Parameter(
            torch.full((8, 64), 1.0, dtype=torch.float32 if way == "f32" else torch.bfloat16)
        )
        mask = torch.ones(8, 64)
        mask[:, ::2] = 0
        opt = halfstep.SGD([("p", p)], lr=2.0**-13, weights="bf16-ecc16")
        said = r"'p' was written.* a mask or a normalization, call optimizer.write_weight\("
        with told(said, way == "mul_"):
            for _ in range(64):
                p.grad = torch.ones_like(p)
                opt.step()
                with torch.no_grad():
                    if way == "write_weight":
                        opt.write_weight(p, opt.read_weight(p) * mask)
                    else:
                        p.mul_(mask.to(p.dtype))
        ends[way] = opt.read_weight(p)
    assert torch.equal(ends["write_weight"], ends["f32"])
    assert ends["f32"][0, 1] == 1 - 2.0**-7 and ends["mul_"][0, 1] == 1.0


@pytest.mark.parametrize("weights", ["bf16-ecc8", "bf16-sr", "int8-ecc4", "int8-sr"])
def test_two_optimizers_of_one_weight(weights):
    """The warning's remedy: weights without residuals move as far as they should."""
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    kind, _, how = weights.partition("-")
    if kind == "int8":
        halfstep.nn.quantize_(layer, weights)
        weights = None
    begin = layer.weight.detach().to(torch.float32)
    opts = [
        halfstep.SGD([("p", layer.weight)], lr=2.0**-13, weights=weights, seed=i) for i in range(2)
    ]
    remedy = r"quantize_\(model, 'int8-sr'\)" if kind == "int8" else "weights='bf16-sr'"
    with told(f"'p' was written.* another optimizer, take .*{remedy}", how != "sr"):
        for _ in range(64):
            for opt in opts:
                layer.weight.grad = torch.ones(64, 64, dtype=torch.bfloat16)
                opt.step()
    moved = (begin - layer.weight.detach().float()).mean().item() * 2.0**6
    assert abs(moved - 1) < 0.05 if how != "ecc8" else moved < 0.9


@pytest.mark.parametrize("rule", ["schedulefree", "ranger"])
def test_residuals_of_states_stay(rule):
    """Slow weights and schedule-free's z are states. They keep their residuals, whoever writes the
    weight."""
    model, opt = made("bf16-kahan", 7, rule)
    p = model.tree["matrix"]
    (key,) = (k for k in opt.state[p] if k.endswith(".extra") and k != "weight.extra")
    before = bits(opt.state[p][key])
    with torch.no_grad():
        p.mul_(0.5)
    with pytest.warns(UserWarning):
        opt.read_weight(p)
    assert bits(opt.state[p][key]) == before and not opt.state[p]["weight.extra"].any()


def test_formats_without_residuals_are_not_looked_at(silent):
    model = Model(torch.bfloat16)
    opt = halfstep.AdamW(model.named_parameters(), weights="bf16-sr")
    run(opt, model, 0, 2)
    model.load_state_dict(Model(torch.bfloat16, 7).state_dict())
    run(opt, model, 2, 3)
    assert not opt._parts.residuals.watch and not opt._parts.cache.engine.guarded


def test_a_failed_load_forgets_nothing():
    model, opt = made("bf16-ecc8", 2)
    bad = copy.deepcopy(opt.state_dict())
    bad["state"][0]["step"] = torch.tensor(-1.0)
    with pytest.raises(ValueError):
        opt.load_state_dict(bad)
    with torch.no_grad():
        model.tree["matrix"].mul_(0.5)
    with pytest.warns(UserWarning, match="tree.matrix"):
        run(opt, model, 2, 3)


def test_weights_of_inference_mode(silent):
    """They count no versions, so writes cannot be noticed, and nothing breaks."""
    with torch.inference_mode():
        p = nn.Parameter(torch.ones(4, 64, dtype=torch.bfloat16), requires_grad=False)
        opt = halfstep.AdamW([("p", p)], weights="bf16-kahan", lr=2.0**-12)
        for _ in range(3):
            p.grad = torch.ones_like(p)
            opt.step()
    assert opt.state[p]["weight.extra"].any()


# ---- What nobody can see -------------------------------------------------------------------------


def ways_behind(p):
    """Returns ways to write a weight that torch does not count."""
    memory = stored(p)
    count = memory.numel() * memory.element_size()
    return {
        "data": lambda: stored(p.data).zero_() if is_packed(p) else p.data.zero_(),
        "pointer": lambda: ctypes.memset(memory.data_ptr(), 0, count),
    }


@pytest.mark.parametrize("weights", [*FORMATS, "int8-ecc4"])
@pytest.mark.parametrize("way", ["data", "pointer"])
@pytest.mark.parametrize("hashed", [False, True])
def test_weights_changed_is_for_writes_that_torch_does_not_count(weights, way, hashed, silent):
    """All or some are named. What is dropped is what a noticed write drops, and nothing is said."""
    if weights == "int8-ecc4":
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in "ab")).bfloat16()
        halfstep.nn.quantize_(model, weights)
        opt = halfstep.AdamW(model.named_parameters(), lr=2.0**-9, seed=0)
        run(opt, model, 0, 3)
    else:
        model, opt = made(weights, 3)
    params = {name: p for name, p in model.named_parameters() if p.dim()}
    (first, p), *_, (other, q) = params.items()
    if hashed:
        opt.state_dict()
    before = {n: bits(opt.state[r]["weight.extra"]) for n, r in params.items()}
    opt.weights_changed([first, other] if hashed else [first])
    assert hashed == (bits(opt.state[p]["weight.extra"]) == before[first])  # no bit has changed
    run(opt, model, 3, 5)
    before = bits(opt.state[q]["weight.extra"])
    with torch.no_grad():
        ways_behind(p)[way]()
    opt.weights_changed(first)
    value = p.dequantize(torch.float32) if is_packed(p) else p.float()
    assert torch.equal(opt.read_weight(p), value) or is_packed(p)
    assert is_packed(p) or not opt.state[p]["weight.extra"].any()
    assert bits(opt.state[q]["weight.extra"]) == before != bits(opt.state[p]["weight.extra"])
    with torch.no_grad():
        ways_behind(q)[way]()
    opt.weights_changed()
    assert bits(opt.state[q]["weight.extra"]) != before


def test_weights_changed_refuses_unknown_names():
    model, opt = made("bf16-kahan", 1)
    before = everything(opt, named(model))
    for names in ("tree.matrx", ["tree.vector", "tree.matrx"]):
        with pytest.raises(ValueError, match="no parameter 'tree.matrx'; it has 'tree.matrix'"):
            opt.weights_changed(names)
    assert everything(opt, named(model)) == before
    opt.weights_changed([])
    halfstep.AdamW(Model(torch.float32).named_parameters()).weights_changed()


def test_weights_changed_counts_in_eval():
    """The weight is then an average, from which training goes on."""
    model, opt = made("bf16-kahan", 3, "schedulefree")
    opt.eval()
    model.tree["matrix"].data.fill_(0.25)
    opt.weights_changed(["tree.matrix"])
    opt.train()
    assert (opt.read_average(model.tree["matrix"]) - 0.25).abs().max() < 1e-2


# ---- States that are moved by hand ---------------------------------------------------------------


def pair_of_matrices(weights):
    params = {
        name: nn.Parameter((randn((24, 96), i) * 10.0 ** (-2 * i)).to(FORMATS[weights]))
        for i, name in enumerate("ab")
    }
    opt = optimizer_of(params.items(), weights)
    run(opt, params, 0, 3)
    return params, opt


@formats
@pytest.mark.parametrize("way", ["dictionary", "assigned", "another", "live"])
def test_a_state_beside_another_weight_has_no_residual(weights, way):
    """The hashes go with the state. A live state has none, and nothing tells whose it is."""
    params, opt = pair_of_matrices(weights)
    file = saved(opt.state_dict())
    a, b = params.values()
    kept = opt.read_weight(a)
    if way == "live":
        run(opt, params, 3, 4)
        held = {k: v.clone() for k, v in opt.state[a].items()}
        opt.state.clear()
        params, opt = pair_of_matrices(weights)
        a, b = params.values()
        b.data.mul_(0.5)
        opt.state[b] = {**held, "id": torch.tensor(3)}
    elif way == "dictionary":
        file["state"][0], file["state"][1] = file["state"][1], file["state"][0]
        for state, own in zip(file["state"].values(), opt.state_dict()["state"].values()):
            state["id"] = own["id"]
        opt.load_state_dict(file)
    else:
        if way == "another":
            opt = optimizer_of(params.items(), weights)
        opt.state[b] = file["state"][0]
        opt.state[a] = file["state"][1]
    with warnings_are("always") as said:
        assert torch.equal(opt.read_weight(b), b.float())
    assert len(said) == 1 and ("by hand" in str(said[0].message)) == (way == "live")
    if way != "live":
        opt.state[a] = saved(opt.state_dict()["state"][0])  # and the right one is kept
        params, opt = pair_of_matrices(weights)
        a, b = params.values()
        opt.state[a] = saved(opt.state_dict()["state"][0])
        with warnings_are("error"):
            assert torch.equal(opt.read_weight(a), kept)


@formats
def test_a_kahan_residual_larger_than_a_unit_needs_hashes(weights):
    """A state without hashes is believed, unless rounding cannot have left its residual."""
    params, opt = pair_of_matrices(weights)
    file = saved(opt.state_dict())
    for state in file["state"].values():
        del state["weight.hashes"]
    values = list(map(opt.read_weight, params.values()))
    with warnings_are("error"):
        opt.load_state_dict(file)
        assert all(map(torch.equal, map(opt.read_weight, params.values()), values))
    small = params["b"].detach().clone()
    opt.load_state_dict(file)
    with torch.no_grad():
        params["a"].copy_(small)
    kahan = weights.endswith("kahan")
    with told("loaded without hashes, and is larger than rounding", kahan):
        found = opt.read_weight(params["a"])
    assert torch.equal(found, small.float()) == kahan


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.told("was written, but not by this optimizer")
@pytest.mark.skipif(not hasattr(torch, "compile"), reason="this torch has no compiler")
def test_hashes_of_compiled_steps_are_of_the_new_weights(backend):
    """The operator may have copies, which the compiler puts into the weights afterwards."""
    torch._dynamo.reset()
    model, opt = made("bf16-kahan", compile=True)
    step = torch.compile(opt.step, fullgraph=True, backend=backend) if backend else opt.step
    with warnings_are("ignore"):
        for number in range(3):
            set_gradients(model, number)
            step()
            knows_hashes(model, opt)
        set_gradients(model, 3)
        step()
    state = saved(opt.state_dict())
    for kept, p in zip(state["state"].values(), model.parameters()):
        assert torch.equal(kept["weight.hashes"], row_hashes(p))
    torch._dynamo.reset()


# ---- Interrupts ----------------------------------------------------------------------------------


def interrupted(act, p, lines):
    """Makes a call, and Ctrl-C in it: so many lines of the package after those that write p.
    Returns True if the call had so many lines."""
    package, before = os.path.dirname(halfstep.__file__), p.detach().clone()
    passed = 0

    def in_function(frame, event, _):
        nonlocal passed
        if event == "line" and (passed or not torch.equal(p, before)):
            passed += 1
            if passed > lines:
                raise KeyboardInterrupt
        return in_function

    def begins(frame, event, _):
        return in_function if frame.f_code.co_filename.startswith(package) else None

    found = sys.gettrace()
    sys.settrace(begins)
    try:
        act()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(found)
    return passed > lines


@pytest.mark.parametrize("way", ["step", "strided"])
def test_an_interrupt_at_any_line_costs_nothing(way):
    """It ends a step, or the step of one parameter, whose weights and states are new already."""

    def begin():
        params, opt = make("adamw", "ecc8-int8", shapes={"matrix": (4, 40)}, lr=1e-3, clip_norm=1)
        params["strided"] = nn.Parameter(torch.ones(8, 80, dtype=torch.bfloat16)[:, ::2])
        opt.add_param_group({"params": [("strided", params["strided"])]})
        run(opt, params, 0, 2)
        return params, opt

    def act():
        opt.step() if way == "step" else opt.step_param(params[way])

    pairs = begin(), begin()
    for lines in itertools.count():
        for params, opt in pairs:
            set_gradients(params, lines)
        params, opt = pairs[0]
        ended = not interrupted(act, params["matrix" if way == "step" else way], lines)
        params, opt = pairs[1]
        act()
        for params, opt in pairs if way != "step" else ():
            opt.zero_grad()
            opt.step()
        assert everything(opt, params) == everything(*reversed(pairs[0])), lines
        if ended:
            break
    assert lines > 20


# ---- Compiled steps ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("weights", ["bf16-kahan", "bf16-ecc8"])
@pytest.mark.skipif(not hasattr(torch, "compile"), reason="this torch has no compiler")
def test_compiled_steps(backend, weights):
    """Compilers increment versions around the operator, each in its way. These do not count as
    writes, and real writes are seen."""
    torch._dynamo.reset()
    model, opt = made(weights, compile=True)
    reference, other = made(weights)
    step = torch.compile(opt.step, fullgraph=True, backend=backend) if backend else opt.step

    def both(number, missing=None):
        for m, act in ((model, step), (reference, other.step)):
            set_gradients(m, number)
            if missing:
                m.tree[missing].grad = None
            act()
        assert weights_of(model) == weights_of(reference), number
        assert states(opt) == states(other), number

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        warnings.filterwarnings("error", message="halfstep")
        try:
            both(0)
        except Exception as error:
            if backend != "inductor" or "compiler" not in str(error).lower():
                raise
            pytest.skip(f"no C++ compiler that inductor can use: {str(error)[:200]}")
        both(1)
        both(2, missing="vector")
        both(3)
        for p in model.parameters():
            opt.read_weight(p)
        both(4)
    for m in (model, reference):
        m.load_state_dict(Model(torch.bfloat16, 7).state_dict())
    with pytest.warns(UserWarning, match="tree.matrix"):
        both(5)
    for m, o in ((model, opt), (reference, other)):  # seen between steps as well
        with torch.no_grad():
            m.tree["matrix"].mul_(0.5)
        assert torch.equal(o.read_weight(m.tree["matrix"]), m.tree["matrix"].float())
    both(6)
    both(7)
    torch._dynamo.reset()


# ---- Averages ------------------------------------------------------------------------------------


def averaged(weights):
    """An EMA whose averages have residuals, and the model that it follows."""
    model = Model(FORMATS[weights])
    ema = EMA(model, 0.99, weights, seed=0)
    for step in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.01)
        ema.update_parameters(model)
    assert any(extra.any() for extra in ema.extra.buffers())
    return model, ema


@formats
@pytest.mark.parametrize("use", ["update", "full_state_dict", "state_dict", "deepcopy", "pickle"])
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_averages_that_others_wrote_have_no_residual(weights, use, assign):
    model, ema = averaged(weights)
    ema.module.load_state_dict(Model(FORMATS[weights], 7).state_dict(), assign=assign)
    with pytest.warns(UserWarning, match="tree.matrix.*update_parameters"):
        if use == "update":
            judge = EMA(Model(FORMATS[weights], 7), 0.99, weights, seed=0)
            judge.n_averaged.fill_(4)
            judge.counters[0] = 4
            judge.update_parameters(model)
            ema.update_parameters(model)
            assert plain(ema.state_dict()) == plain(judge.state_dict())
        elif use == "full_state_dict":
            full = ema.full_state_dict()
            assert all(torch.equal(full[n], p.float()) for n, p in ema.module.named_parameters())
        else:
            found = VERSIONS[use](ema).state_dict()
            assert not any(v.any() for k, v in found.items() if k.startswith("extra."))
    with warnings_are("error"):
        ema.module.load_state_dict(Model(FORMATS[weights], 8).state_dict())
        ema.update_parameters(model)  # said once


@formats
def test_averages_load_and_move_with_their_residuals(weights, silent):
    model, ema = averaged(weights)
    kept = saved(ema.state_dict())
    for used in (False, True):
        other = EMA(Model(FORMATS[weights], 5), 0.99, weights, seed=3)
        if used:
            other.update_parameters(model)
            other.update_parameters(model)
        other.load_state_dict(kept)
        assert plain(other.full_state_dict()) == plain(ema.full_state_dict())
        other.load_state_dict(saved(kept), assign=True)
        assert plain(other.full_state_dict()) == plain(ema.full_state_dict())
        follows = copy.deepcopy(ema)
        for e in (other, follows):
            share(e.module)
            e.update_parameters(model)
            e.update_parameters(model)
        assert plain(other.state_dict()) == plain(follows.state_dict())


def test_an_average_that_starts_anew_says_nothing(silent):
    model, ema = averaged("bf16-kahan")
    ema.module.load_state_dict(Model(torch.bfloat16, 7).state_dict())
    ema.n_averaged.zero_()
    ema.update_parameters(model)
    assert all(torch.equal(p, q) for p, q in zip(ema.module.parameters(), model.parameters()))


# ---- The same bits put back ----------------------------------------------------------------------


def knows_hashes(model, opt):
    """Writes the weights as others do. From the first such write on they have hashes."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0)
    for p in model.parameters():
        opt.read_weight(p)


@formats
@pytest.mark.parametrize("way", ["step", "step_param", "release", "accumulation", "strided"])
def test_bits_that_come_back_cost_no_residual(weights, way):
    """Averages are swapped in and out, and SAM climbs and returns. After every step the bits are
    those of a run without that."""
    ends = []
    for swapped in (False, True):
        model, opt = made(weights)
        params = named(model)
        if way == "strided":
            params["tree.matrix"].data = params["tree.matrix"].data.t().contiguous().t()
        run(opt, params, 0, 2)
        with pytest.warns(UserWarning, match="residuals kept beside it were dropped"):
            knows_hashes(model, opt)
        if way == "release":
            opt.prepare_gradient_release()
        with warnings_are("error"):
            for step in range(2, 6):
                set_gradients(params, step)
                if way in ("step_param", "release"):
                    for p in params.values():
                        opt.step_param(p)
                elif way == "accumulation":
                    opt.optimizer_accumulation = True
                    opt.step()
                    opt.optimizer_accumulation = False
                opt.step()
                if swapped:
                    kept = [p.detach().clone() for p in params.values()]
                    with torch.no_grad():
                        for p, q in zip(params.values(), kept):
                            p.fill_(7.0)
                        for p, q in zip(params.values(), kept):
                            p.copy_(q)
        ends.append((weights_of(params), states(opt)))
    assert ends[0] == ends[1]


@formats
@pytest.mark.told("was written, but not by this optimizer")
def test_only_rows_that_changed_lose_theirs(weights):
    """Rows of a matrix, pieces of 256 of a vector."""
    matrix, vector = (
        nn.Parameter(randn(shape, 3).to(FORMATS[weights])) for shape in ((24, 96), (600,))
    )
    params = {"matrix": matrix, "vector": vector}
    opt = optimizer_of(params.items(), weights)
    run(opt, params, 0, 3)
    knows_hashes(nn.ParameterDict(params), opt)
    run(opt, params, 3, 6)
    before = {name: opt.state[p]["weight.extra"].clone() for name, p in params.items()}
    assert all(extra.any() for extra in before.values())
    with torch.no_grad():
        matrix[5, 7] += 1.0
        vector[300] += 1.0
    for p in params.values():
        opt.read_weight(p)
    after = {name: opt.state[p]["weight.extra"] for name, p in params.items()}
    for name, here in (("matrix", slice(5, 6)), ("vector", slice(256, 512))):
        assert not after[name][here].any()
        before[name][here] = 0
        assert torch.equal(before[name], after[name])


def made_anew(opt, place, weight, copied=False):
    """Puts a new parameter in the place of one, which takes over its state, or a copy of it."""
    params = opt.param_groups[0]["params"]
    state, p = opt.state.pop(params[place]), nn.Parameter(weight)
    opt.state[p] = copy.deepcopy(state) if copied else state
    params[place] = p
    return p


@formats
@pytest.mark.parametrize("copied", [False, True])
def test_a_parameter_made_anew_has_no_residual_of_the_old_one(weights, copied):
    """It has one if it has the same bits. Both read_weight() and step() look."""
    for read in (True, False):
        model, opt = made(weights, 3)
        old = model.tree["matrix"]
        value, kept = opt.read_weight(old), opt.state[old]["weight.extra"].clone()
        with warnings_are("error"):
            same_bits = made_anew(opt, 0, old.detach().clone(), copied)
            assert torch.equal(opt.read_weight(same_bits), value)
        assert torch.equal(opt.state[same_bits]["weight.extra"], kept) and kept.any()
        fresh = old.detach().clone()
        fresh[2:] = 1e-3
        p = made_anew(opt, 0, fresh, copied)
        with warnings_are("always") as said:
            if read:
                assert torch.equal(opt.read_weight(p)[2:], fresh[2:].float())
            else:
                p.grad = torch.zeros_like(p)
                opt.param_groups[0]["lr"] = 0.0
                opt.step()
        extra = opt.state[p]["weight.extra"]
        assert not extra[2:].any() and torch.equal(extra[:2], kept[:2])
        assert len(said) == 1 and "beside 22 of its 24 rows" in str(said[0].message)


@formats
def test_residuals_that_are_exchanged_go_with_their_weights(weights):
    for whole in (True, False):
        params = {
            name: nn.Parameter(randn((24, 96), i).to(FORMATS[weights]))
            for i, name in enumerate("ab")
        }
        opt = optimizer_of(params.items(), weights)
        run(opt, params, 0, 3)
        a, b = params.values()
        values = [opt.read_weight(p) for p in (b, a)]
        opt.state[a], opt.state[b] = opt.state[b], opt.state[a]
        if whole:
            a.data, b.data = b.data, a.data
        opt.zero_grad()
        with warnings_are("always") as said:
            opt.step()
            found = [opt.read_weight(p) for p in (a, b)]
        wanted = values if whole else [a.float(), b.float()]
        assert all(map(torch.equal, found, wanted)) and bool(said) != whole


@formats
@pytest.mark.parametrize("look", ["nothing", "state_dict", "read_state"])
def test_a_pair_that_was_loaded_is_judged_by_its_bits(weights, look):
    """Weights come after the optimizer's state. Those of the state keep their residuals, and other
    rows have none."""
    model, opt = made(weights, 3)
    kept = saved({"model": model.state_dict(), "optimizer": opt.state_dict()})
    for others in (False, True):
        fresh, other = made(weights, 1, seed=5)
        other.load_state_dict(kept["optimizer"])
        if look == "state_dict":
            kept["optimizer"] = saved(other.state_dict())
        elif look == "read_state":
            other.read_state(fresh.tree["matrix"], "exp_avg")
        fresh.load_state_dict(kept["model"])
        with torch.no_grad():
            if others:
                fresh.tree["matrix"][3:5] = 0
        with warnings_are("always") as said:
            values = other.read_weight(fresh.tree["matrix"])
        expected = opt.read_weight(model.tree["matrix"])
        if others:
            expected[3:5] = 0
        assert torch.equal(values, expected) and len(said) == others
        assert not others or "beside 2 of its 24 rows" in str(said[0].message)


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_knows_its_weights(way):
    """Weights of a copy that are set to zero have no residuals of other weights."""
    model, opt = made("bf16-kahan", 3)
    copied, other = COPIES[way]((model, opt))
    assert torch.equal(
        other.read_weight(copied.tree["matrix"]), opt.read_weight(model.tree["matrix"])
    )
    copied, other = COPIES[way]((model, opt))
    with torch.no_grad():
        copied.tree["matrix"].zero_()
    with pytest.warns(UserWarning, match="tree.matrix"):
        assert not other.read_weight(copied.tree["matrix"]).any()


def test_full_precision_beside_the_state():
    """Weights get other bits than they had. Their rows lose the residuals that belonged to the old
    ones."""
    model, opt = made("bf16-kahan", 40)
    whole, state = halfstep.full_precision_state_dict(model, opt), saved(opt.state_dict())
    fresh, other = made("bf16-kahan", seed=5)
    with told("was written, but not by this optimizer"):
        fresh.load_state_dict(whole)
        other.load_state_dict(state)
        for (name, p), q in zip(model.named_parameters(), fresh.parameters()):
            true, place = whole[name], torch.exp2(torch.floor(torch.log2(whole[name].abs())) - 7)
            assert bool(((other.read_weight(q) - true).abs() <= 0.51 * place).all())


def test_hashes_of_a_kept_state_end_with_the_next_step():
    """The residual in a kept state goes on, so the hash beside it no longer belongs to its
    weight."""
    model, opt = made("bf16-kahan", 2)
    live, copied = opt.state_dict(), copy.deepcopy(opt.state_dict())
    run(opt, model, 2, 3)
    assert all(not state["weight.hashes"].any() for state in live["state"].values())
    assert all(state["weight.hashes"].all() for state in copied["state"].values())
    fresh, other = made("bf16-kahan", seed=5)
    fresh.load_state_dict(model.state_dict())
    other.load_state_dict(live)
    assert torch.equal(
        other.read_weight(fresh.tree["matrix"]), opt.read_weight(model.tree["matrix"])
    )
    before = states(other)
    live = saved(live)
    live["state"][0]["weight.hashes"] = [1]
    live["state"][0]["exp_avg"].zero_()
    with pytest.raises(
        ValueError, match="state 'weight.hashes' of parameter 'tree.matrix' is list"
    ):
        other.load_state_dict(live)
    assert states(other) == before


def test_averages_that_come_back_keep_their_residuals():
    """EMA's own weights, swapped out and in."""
    ends = []
    for swapped in (False, True):
        model = Model(torch.bfloat16)
        ema = EMA(model, 0.9, "bf16-kahan", seed=0)
        with told("'tree.matrix' was written, but not by update_parameters"):
            for step in range(8):
                with torch.no_grad():
                    for i, p in enumerate(model.parameters()):
                        p.add_(randn(p.shape, 10 * step + i).bfloat16() * 0.1)
                ema.update_parameters(model)
                if step == 0 or swapped:  # the first write of somebody else costs what was there
                    with torch.no_grad():
                        for q in ema.module.parameters():
                            kept = q.clone()
                            q.zero_()
                            q.copy_(kept)
        ends.append([bits(v) for v in ema.full_state_dict().values()])
    assert ends[0] == ends[1]
