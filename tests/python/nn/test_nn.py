"""Tests halfstep.nn: packed weights in the layers of a model. test_nn_ranks.py has those on several
ranks."""

import contextlib
import copy
import functools
import io
import itertools
import json
import os
import pickle

import pytest
import torch
from conftest import CAN_SHARE, peak, randn, warnings_are
from torch import nn

import halfstep
from halfstep._tensors.torch_public import VERSION
from halfstep.nn import (
    Int8Weight,
    pack,
    packed_state_dict,
    quantize_,
    unpacked_state_dict,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(shape, seed=0, dtype=torch.float32):
    return randn(shape, seed, dtype)


def network(dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(100, 64), nn.GELU(), nn.Linear(64, 40)).to(dtype)


def twins(model, *args, **kwargs):
    """Returns a quantized model, and an ordinary copy that has its decoded weights."""
    plain = copy.deepcopy(model)
    quantize_(model, *args, **kwargs)
    plain.load_state_dict(model.state_dict())
    assert not any(isinstance(p, Int8Weight) for p in plain.parameters())
    return model, plain


def gradients(model, *inputs, run=None):
    """Returns the outputs of a training step, and all gradients."""
    model.zero_grad()
    inputs = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    y = (run or model)(*inputs)
    y.float().square().sum().backward()
    return [y.detach(), *(x.grad for x in inputs if x.grad is not None)] + [
        p.grad for p in model.parameters()
    ]


def same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert type(a) is torch.Tensor and a.dtype == b.dtype and torch.equal(a, b)


def packed_of(model):
    return {n: p.packed.clone() for n, p in model.named_parameters() if isinstance(p, Int8Weight)}


# ---- Layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_give_the_bits_of_decoded_weights(dtype):
    model, plain = twins(network(dtype))
    for shape in ((100,), (5, 100), (2, 3, 100)):
        x = normal(shape, dtype=dtype)
        same(gradients(model, x), gradients(plain, x))


def test_embeddings_and_tied_layers():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 96, padding_idx=3)
            self.head = nn.Linear(96, 50, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    with pytest.raises(ValueError, match=r"'head.weight' .* tied with 'embed.weight'; choose both"):
        quantize_(Tied())
    model, plain = twins(Tied().bfloat16(), where=lambda module, name: True)
    assert model.head.weight is model.embed.weight and isinstance(model.embed.weight, Int8Weight)
    x = torch.tensor([[1, 3, 49], [0, 1, 1]])
    same(gradients(model, x), gradients(plain, x))


@pytest.mark.parametrize("training", [True, False])
def test_attention(training):
    """F.multi_head_attention_forward() is one operator to a tensor subclass."""
    model, plain = twins(nn.MultiheadAttention(64, 4).bfloat16().train(training))
    assert isinstance(model.out_proj.weight, Int8Weight)
    x = normal((3, 2, 64), dtype=torch.bfloat16)
    same(*(gradients(m, x, run=lambda x, m=m: m(x, x, x)[0]) for m in (model, plain)))
    with torch.no_grad():
        assert torch.equal(*(m(x, x, x)[0] for m in (model, plain)))


@pytest.mark.parametrize("how", ["no_grad", "inference_mode"])
def test_inference(how):
    model, plain = twins(network())
    x = normal((5, 100), dtype=torch.bfloat16)
    with getattr(torch, how)():
        assert torch.equal(model(x), plain(x))


def test_gradients_accumulate_and_are_released():
    model, plain = twins(network())
    found = []

    def release(p):
        found.append(p.grad)
        p.grad = None

    for m in (model, plain):
        m[0].weight.register_post_accumulate_grad_hook(release)
        m[2].weight.register_hook(lambda grad: 2 * grad)
        for step in range(2):
            m(normal((5, 100), step, torch.bfloat16)).float().square().sum().backward()
        assert m[0].weight.grad is None
        found.append(m[2].weight.grad)
    same(found[:3], found[3:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast(dtype):
    model, plain = twins(network(dtype))
    found = []
    for m in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(gradients(m, normal((5, 100))))
    same(*found)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints(reentrant):
    model, plain = twins(network())
    run = functools.partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=reentrant)
    x = normal((5, 100), dtype=torch.bfloat16)
    same(gradients(model, x, run=run), gradients(plain, x))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.all)])
@pytest.mark.skipif(not hasattr(torch, "compile"), reason="this torch has no compiler")
def test_compiled_models_keep_no_decoded_weight(backend):
    torch._dynamo.reset()
    model, plain = twins(network())
    x = normal((5, 100), dtype=torch.bfloat16)
    kept = []
    with (
        warnings_are("ignore"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t),
    ):
        run = torch.compile(model, fullgraph=True, backend=backend)
        try:
            found = gradients(model, x, run=run)
        except RuntimeError as error:
            if "compiler" not in str(error).lower():
                raise
            pytest.skip(f"no C++ compiler that inductor can use: {str(error)[:200]}")
    expected = gradients(plain, x)
    if backend == "aot_eager":
        same(found, expected)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-8)
    assert [t.dtype for t in kept if len(t) == 64].count(torch.uint8) == 1
    assert not any(t.shape in ((64, 100), (40, 64)) and t.dtype == torch.bfloat16 for t in kept)


@pytest.mark.skipif(VERSION < (2, 8), reason="older torch has other ways to take weights apart")
def test_exported_models():
    """Those of weights that train say what to do first."""
    model, plain = twins(network())
    x = normal((5, 100), dtype=torch.bfloat16)
    with warnings_are("ignore"), torch.no_grad():
        with pytest.raises(RuntimeError, match=r"call model.requires_grad_\(False\) before torch"):
            torch.export.export(model, (x,)).run_decompositions()
        model.requires_grad_(False)
        exported = torch.export.export(model, (x,)).run_decompositions().module()
        assert torch.equal(exported(x), plain(x))


# ---- Memory --------------------------------------------------------------------------------------


LAYERS, WIDTH = 12, 512


def deep(dtype=torch.bfloat16, layers=LAYERS):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(layers)))


def peak_of_a_step(model, how):
    """Returns the peak of a forward and backward pass, in bytes a parameter of one layer."""
    x = normal((2, WIDTH), dtype=model[0].weight.dtype).requires_grad_()
    for p in model.parameters():
        p.requires_grad_(how != "frozen")
        if how != "frozen":
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def step():
        y = x
        if how == "attention":  # not through F.linear
            for layer in model:
                y = y @ layer.weight.t()
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                y = model(x)
        y.float().sum().backward()

    step()
    return peak(step) / WIDTH**2


@pytest.mark.parametrize("how", ["frozen", "released", "autocast", "attention"])
def test_forward_and_backward_decode_one_layer_at_a_time(how):
    """More layers take no more memory. The same model with plain weights takes less by at most one
    decoded layer, 2 bytes in BF16, and what decodes it, 1. It takes as much where the product of
    the gradient is the peak, because nothing is decoded then. Under autocast a plain model keeps
    copies of all layers. What a product needs for itself differs by processor, and stands on both
    sides."""
    dtype = torch.float32 if how == "autocast" else torch.bfloat16
    found = peak_of_a_step(quantize_(deep(dtype)), how)
    assert found - peak_of_a_step(quantize_(deep(dtype, LAYERS // 2)), how) < 0.2
    if how != "autocast":
        assert 2 <= found < peak_of_a_step(deep(dtype), how) + 3.2


def test_a_model_is_converted_one_weight_at_a_time():
    bytes_before = peak(deep)
    bytes_at_most = peak(lambda: quantize_(deep()))
    stretch = 1 << 18
    assert bytes_at_most < bytes_before + 34 / 32 * WIDTH**2 + 40 * stretch
    assert bytes_before == LAYERS * 2 * WIDTH**2


# ---- Copies and files ----------------------------------------------------------------------------


def saved(weight):
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("make", [copy.deepcopy, saved, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies(make):
    model = quantize_(network(), "int8-sr")
    model[0].weight.requires_grad_(False)
    model[2].weight.no_decay = True
    state = model.state_dict()
    for original in (
        model[0].weight,
        model[2].weight,
        state["2.weight"],
        state["0.weight"][3:7].t(),
    ):
        made = make(original)
        assert type(made) is Int8Weight and repr(made) == repr(original)
        assert torch.equal(made.packed, original.packed)
        assert made.packed.data_ptr() != original.packed.data_ptr()
        assert torch.equal(made, original) and made.stride() == original.stride()
        assert made.requires_grad == original.requires_grad
        assert isinstance(made, nn.Parameter) == isinstance(original, nn.Parameter)
        assert getattr(made, "no_decay", False) == getattr(original, "no_decay", False)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(torch.ones(100).bfloat16()), model(torch.ones(100).bfloat16()))


@pytest.mark.parametrize("stager", ["BlockingAsyncStager", "StateDictStager"])
def test_stagers_of_checkpoints_copy_the_bytes(stager, tmp_path, monkeypatch):
    """The copies are of the moment of the call, in nested dictionaries and in memory to share."""
    name = "staging" if stager == "BlockingAsyncStager" else "_state_dict_stager"
    module = pytest.importorskip(f"torch.distributed.checkpoint.{name}")
    options = {"cache_staged_state_dict": False} if name == "staging" else {"share_memory": True}
    if not CAN_SHARE:  # files outside /dev/shm are the memory to share
        numbers = itertools.count()

        def new_shared(size, *, device):
            return torch.UntypedStorage.from_file(str(tmp_path / str(next(numbers))), True, size)

        monkeypatch.setattr(torch.UntypedStorage, "_new_shared", new_shared)
    stager = getattr(module, stager)(**options)
    model = quantize_(network())
    before, exact = packed_of(model), {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(2):
        copied = stager.stage({"model": model.state_dict(), "more": [model[0].weight.detach(), 3]})
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert copied["more"][1] == 3 and torch.equal(copied["more"][0].packed, before["0.weight"])
        if name != "staging":
            assert copied["model"]["0.weight"].is_shared()
        model.load_state_dict(copied["model"])
        assert all(torch.equal(model.state_dict()[k], v) for k, v in exact.items())
        for k, bytes_ in before.items():
            assert torch.equal(model.get_parameter(k).packed, bytes_)


def test_state_dictionaries():
    model, plain = twins(network())
    other = quantize_(network(seed=1), "int8-sr")
    addresses = [other[i].weight.packed.data_ptr() for i in (0, 2)]
    other.load_state_dict(model.state_dict())
    assert addresses == [other[i].weight.packed.data_ptr() for i in (0, 2)]
    assert other[0].weight.format == "int8-sr"
    before = packed_of(model)
    # Decoded weights are no news, and others are rounded to nearest.
    model.load_state_dict(plain.state_dict())
    for name, bytes_ in before.items():
        assert torch.equal(bytes_, model.get_parameter(name).packed)
        assert torch.equal(bytes_, other.get_parameter(name).packed)
    fresh = network(seed=2)
    model.load_state_dict(fresh.state_dict())
    assert torch.equal(model[0].weight.packed, pack(fresh[0].weight))
    # An ordinary model takes decoded values, in its own dtype.
    exact = network(torch.float32)
    exact.load_state_dict(model.state_dict())
    assert torch.equal(exact[0].weight, model[0].weight.dequantize(torch.float32))
    exact.load_state_dict(model.state_dict(), assign=True)
    assert isinstance(exact[0].weight, Int8Weight) and isinstance(exact[0].weight, nn.Parameter)


def test_safetensors_files(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, plain = twins(network(torch.float16))
    path = tmp_path / "model.safetensors"
    tensors, metadata = packed_state_dict(model)
    safetensors.save_file(tensors, path, metadata)
    assert json.loads(metadata["halfstep.nn"]) == {
        "0.weight": {"format": "int8-ecc4", "columns": 100},
        "2.weight": {"format": "int8-ecc4", "columns": 64},
    }
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        assert file.get_tensor("0.weight").shape == (64, 4 * 34)
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        state = unpacked_state_dict(tensors, file.metadata())
    for other in (quantize_(network(torch.float16, seed=1)), network(torch.float16, seed=1)):
        other.load_state_dict(state)
        assert all(map(torch.equal, other.parameters(), plain.parameters()))
    other.load_state_dict(unpacked_state_dict(tensors, metadata, torch.float16), assign=True)
    assert other[2].weight.dtype == torch.float16 and other[2].weight.format == "int8-ecc4"
    from test_convert import reader_of_the_page

    read = dict(reader_of_the_page()(path))
    assert read.keys() == packed_of(model).keys()
    for name, values in read.items():
        exact = model.get_parameter(name).dequantize(torch.float32)
        assert torch.equal(torch.from_numpy(values), exact.detach())
    with pytest.raises(ValueError, match=r"rows of 200 elements .* tensor '0.weight'"):
        broken = {"0.weight": {"format": "int8-sr", "columns": 200}}
        unpacked_state_dict(tensors, {"halfstep.nn": json.dumps(broken)})
    with pytest.raises(ValueError, match="'0.weight', which is not among the tensors"):
        unpacked_state_dict({}, metadata)
    assert unpacked_state_dict(tensors, None).keys() == tensors.keys()


def test_savers_of_others_get_decoded_weights(tmp_path):
    """huggingface_hub's stands for those of test_integrations.py."""
    hub = pytest.importorskip("huggingface_hub")
    from safetensors.torch import load_file

    class Saved(nn.Module, hub.PyTorchModelHubMixin):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Embedding(40, 64), nn.Linear(64, 40, bias=False)
            self.b.weight = self.a.weight

    model = quantize_(Saved().bfloat16(), where=lambda module, name: True)
    model.save_pretrained(tmp_path)
    read = load_file(tmp_path / "model.safetensors")
    assert len(read) == 1 and torch.equal(*read.values(), model.a.weight)
    assert isinstance(model.state_dict()["b.weight"], Int8Weight)
    back = Saved.from_pretrained(tmp_path)
    assert back.a.weight is back.b.weight
    assert torch.equal(back.a.weight, model.a.weight.dequantize().float())


def test_files_of_halfstep_convert(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    from safetensors import safe_open
    from test_convert import PROGRAM, convert

    if not os.path.exists(PROGRAM):
        pytest.skip(f"{PROGRAM} is not built")
    plain, path = network(), tmp_path / "packed.safetensors"
    safetensors.save_file(plain.state_dict(), tmp_path / "plain.safetensors")
    convert(tmp_path / "plain.safetensors", path, "--to", "int8-ecc4")
    model = quantize_(network(seed=1))
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        model.load_state_dict(unpacked_state_dict(tensors, file.metadata()))
    assert torch.equal(model[0].weight.packed, pack(plain[0].weight))
    assert torch.equal(model[2].weight.packed, pack(plain[2].weight))


def test_devices_and_dtypes():
    model, plain = twins(network())
    before = packed_of(model)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        model.to(dtype), plain.to(dtype)
        for name, bytes_ in before.items():
            w = model.get_parameter(name)
            assert isinstance(w, Int8Weight) and isinstance(w, nn.Parameter) and w.dtype == dtype
            assert torch.equal(w.packed, bytes_)
    x = normal((5, 100), dtype=dtype)
    same(gradients(model, x), gradients(plain, x))
    w = model[0].weight.detach()
    assert torch.equal(w.double(), w.dequantize(torch.float32).double())
    assert type(w.to(torch.complex64)) is torch.Tensor
    copied = w.float()
    copied.zero_()
    assert w.count_nonzero()
    state = model.state_dict()
    model.to("meta")
    assert model[0].weight.packed.is_meta and isinstance(model[0].weight, Int8Weight)
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    assert torch.equal(model[0].weight.packed, before["0.weight"])
    with torch.device("meta"):
        bare = quantize_(network())
    assert bare[0].weight.packed.shape == (64, 4 * 34)
    # to_empty() keeps 8-bit weights and makes other parameters anew.
    opt = halfstep.AdamW(bare.named_parameters(), lr=1e-2)
    bare.to_empty(device="cpu")
    bare[0].weight.grad, before = torch.ones(64, 100, dtype=dtype), bare[0].weight.packed.clone()
    with pytest.raises(ValueError, match="'0.bias' is on meta and never has a gradient"):
        opt.step()
    assert torch.equal(bare[0].weight.packed, before)


# ---- Models --------------------------------------------------------------------------------------


def test_which_weights_are_quantized():
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(9, 64),
            "one": nn.Linear(64, 64),
            "short": nn.Linear(31, 64),
            "two": nn.Linear(64, 3),
            "norm": nn.LayerNorm(64),
        }
    )
    chosen = copy.deepcopy(model)
    chosen.lazy = nn.LazyLinear(64)
    chosen.sparse = nn.Linear(64, 64)
    chosen.sparse.weight = nn.Parameter(torch.eye(64).to_sparse())
    assert quantize_(model, "int8-sr") is model
    assert packed_of(model).keys() == {"one.weight", "two.weight"}
    asked = []

    def where(module, name):
        asked.append((type(module), name))
        return name in ("embed", "short", "two")

    quantize_(chosen, where=where)
    assert packed_of(chosen).keys() == {"embed.weight", "two.weight"}
    assert asked == [
        (nn.Embedding, "embed"),
        *((nn.Linear, name) for name in ("one", "short", "two")),
        (nn.LazyLinear, "lazy"),
        (nn.Linear, "sparse"),
    ]
    layer = quantize_(nn.Linear(64, 64))
    bytes_, w = layer.weight.packed.clone(), layer.weight
    quantize_(layer, "int8-sr")  # the codes of both formats mean the same
    assert layer.weight is w and w.format == "int8-sr" and torch.equal(w.packed, bytes_)


def shared():
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    model.b.weight = model.a.weight
    return model


def other_view():
    model = shared()
    model.c = nn.Linear(64, 64)
    model.b.weight = nn.Parameter(model.a.weight.detach())
    return model


def odd(**options):
    model = nn.Sequential(nn.Linear(64, 64))
    for name, value in options.items():
        setattr(model[0], name, value)
    return model.append(nn.Linear(64, 64))


@pytest.mark.parametrize(
    "make, where, message",
    [
        (shared, lambda m, n: n == "a", "'a.weight' .* tied with 'b.weight'; choose both"),
        (other_view, None, "'b.weight' .* tied with 'a.weight'"),
        (
            lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))),
            None,
            r"'0.weight' .* computed from other tensors .*; remove that first",
        ),
        (lambda: nn.Sequential(nn.LazyLinear(64)), None, "'0.weight' .* not initialized; pass"),
        (lambda: network(torch.float64), None, "'0.weight' .* torch.float64; convert"),
        (lambda: network(torch.complex64), None, "'0.weight' .* torch.complex64; convert"),
        (
            lambda: nn.Sequential(nn.Embedding(9, 64, max_norm=1.0)),
            lambda m, n: True,
            "'0.weight' .* max_norm",
        ),
        (
            lambda: odd(weight=nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), False)),
            None,
            "'0.weight' .* torch.int8; convert",
        ),
        (
            lambda: odd(weight=nn.Parameter(torch.zeros(64, 64).to_sparse())),
            None,
            "'0.weight' .*sparse_coo",
        ),
    ],
)
def test_weights_that_are_refused(make, where, message):
    with warnings_are("ignore"):
        model = make()
    with pytest.raises(ValueError, match=message):
        quantize_(model, where=where)
    assert not packed_of(model)


def test_shared_parameters_stay_shared():
    model, plain = twins(shared())
    assert model.a.weight is model.b.weight and isinstance(model.a.weight, Int8Weight)
    with pytest.raises(ValueError, match="unknown .* 'int7'; known"):
        quantize_(shared(), "int7")


def test_importing_the_package_is_enough():
    assert halfstep.nn.quantize_ is quantize_
    with contextlib.suppress(AttributeError):
        assert any(_.__name__ == "restore_weight" for _ in torch.serialization.get_safe_globals())
