"""Tests Int8Weight: its bytes are those of the library, what reads it gets decoded values, what
writes it rounds to nearest, and what asks for its memory is refused."""

import copy
import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import CAN_SHARE, randn, warnings_are
from torch import nn

import halfstep
from halfstep._library import abi
from halfstep._states import handles
from halfstep._weights8 import blocks, operators
from halfstep.nn import Int8Weight, pack, unpack

FORMATS = blocks.FORMATS
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(shape, seed=0, dtype=torch.float32):
    return randn(shape, seed, dtype)


def weight(rows=40, columns=100, dtype=torch.bfloat16, format="int8-ecc4", seed=0):
    return Int8Weight(pack(normal((rows, columns), seed)), format, columns, dtype)


# ---- Bytes ---------------------------------------------------------------------------------------


def by_library(values, format):
    """Returns what halfstep_write_slot() stores, and what halfstep_read_slot() reads."""
    handle, shape = handles.Handle(1, 0), tuple(values.shape)
    group = handles.add_group(handle, f"adamw/{format}/f32")
    index = handles.add_tensor(handle, group, "w", 1, shape, "f32")
    abi.invoke(abi.lib.halfstep_allocate_states, handle)
    packed = torch.full((shape[0], blocks.width(shape[1])), 9, dtype=torch.uint8)
    assert handles.slot_info(handle, index, 0).code_bytes == packed.numel()
    handles.write_rows(handle, index, 0, packed.data_ptr(), values, shape)
    read = abi.lib.halfstep_read_slot
    return packed, handles.read_rows(read, handle, index, shape, 0, packed.data_ptr())


@pytest.mark.parametrize("columns", [32, 77, 100])
def test_packed_bytes_are_those_of_the_library(columns):
    sizes = torch.exp2((torch.arange(300) - 149).clamp(max=126).float())
    values = normal((300, columns)) * sizes[:, None]
    values[60:90] = torch.randint(-400, 400, (30, columns)) / 8  # halves of codes
    values[0], values[1, 3], values[2, 30], values[3] = 0, torch.nan, -torch.inf, 3.4e38
    values[4], values[5] = 2.0**-99, 2.0**-99 - 2.0**-123
    packed, read = by_library(values, "int8-sr")
    assert torch.equal(pack(values), packed)
    decoded = unpack(packed, columns, torch.float32)
    torch.testing.assert_close(decoded, read, rtol=0, atol=0, equal_nan=True)
    off, largest = (decoded - values)[60:250].abs(), values[60:250].abs().amax(1, True)
    assert (off <= largest / 236).all()
    # Codes that were rounded by way of error codes are no nearer.
    other = unpack(by_library(values, "int8-ecc4")[0], columns, torch.float32)
    assert (off <= (other - values)[60:250].abs()).all()


def test_codes_of_a_conversion_err_in_no_direction():
    """A common error would add up in long sums of inputs of one sign."""
    values = normal((512, 1024))
    w = Int8Weight(pack(values), "int8-ecc4", 1024, torch.float32)
    error = (w.dequantize() - values).view(512, 32, 32) / w.scales.unsqueeze(-1).float()
    assert error.mean().abs() < 0.003 and 0.27 < error.std() < 0.31


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoded_values_are_products_rounded_once(dtype):
    """Every code, on scales of every size."""
    patterns = torch.arange(0, 0x7F80, 37, dtype=torch.int16).view(torch.bfloat16)
    made = torch.zeros(len(patterns), 8, 34, dtype=torch.uint8)
    made[:, :, :2] = patterns.view(torch.uint8).view(-1, 1, 2)
    codes = torch.arange(-128, 128).clamp(min=-127).to(torch.int8)
    made[:, :, 2:] = codes.view(torch.uint8).view(8, 32)
    exact = patterns.double()[:, None] * codes.double()
    w = Int8Weight(made.view(len(patterns), 272), "int8-sr", 256, dtype)
    assert torch.equal(w.codes.flatten(1), codes.expand(len(patterns), -1))
    assert torch.equal(w.scales[:, 0], patterns)
    decoded = w.dequantize()
    assert torch.equal(decoded, exact.float().to(dtype)) and decoded.is_contiguous()
    assert torch.equal(w.codes * w.scales.to(dtype).unsqueeze(-1), decoded.view(-1, 8, 32)) or (
        dtype == torch.float16
    )
    assert torch.equal(w.dequantize(torch.float32).double(), exact.float().double())


# ---- The tensor ----------------------------------------------------------------------------------

READS = {
    "t": lambda w: w.t() @ w,
    "row": lambda w: w[3],
    "columns": lambda w: w[:, 30:35],
    "steps": lambda w: w[1::3, ::2],
    "flat": lambda w: w.view(-1)[90:210],
    "shape": lambda w: w.reshape(20, 2, 100).permute(2, 0, 1),
    "chunks": lambda w: torch.cat(w.chunk(3)[::-1]),
    "unbind": lambda w: w.unbind()[7],
    "rows by number": lambda w: w[torch.tensor([5, 1, 5])],
    "diagonal": lambda w: w.diagonal(),
    "expanded": lambda w: w[:1].expand(4, 100),
    "sum": lambda w: w.sum() + w.norm(),
    "product": lambda w: 2 * w * w,
    "bits": lambda w: w.detach().view(torch.int16),
    "as another": lambda w: torch.zeros(40, 100).to(w),
    "contiguous": lambda w: w.t().contiguous(),
    "cat": lambda w: torch.cat([w, w]),
    "foreach": lambda w: torch._foreach_norm([w.detach(), w.detach()])[1],
    "einsum": lambda w: torch.einsum("ij,kj->ik", w, w),
    "where": lambda w: torch.where(w > 0, w, 0),
    "filled": lambda w: torch.full_like(w.detach(), 2) + w.new_ones(100),
    "list": lambda w: torch.tensor(w[:2].tolist()),
    "text": lambda w: torch.tensor(float(f"{w.detach()[3, 4]:.4f}")),
    "the same": lambda w: torch.tensor([w[:3].is_set_to(v) for v in (w[:3], w[1:4])]),
}


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("name", READS)
def test_what_reads_a_weight_gets_decoded_values(name, older, monkeypatch):
    if older:  # torch 2.2 has no such function
        monkeypatch.delattr(torch, "_functionalize_unsafe_set", raising=False)
    w = nn.Parameter(weight())
    twin = nn.Parameter(w.dequantize().detach())
    found, expected = READS[name](w), READS[name](twin)
    assert found.dtype == expected.dtype and torch.equal(found, expected)
    if expected.requires_grad:
        found.float().square().sum().backward()
        expected.float().square().sum().backward()
        assert type(w.grad) is torch.Tensor and torch.equal(w.grad, twin.grad)


WRITES = {
    "row": lambda w: w[3].fill_(2),
    "item": lambda w: w.__setitem__((slice(None), 40), 0.5),
    "row of data": lambda w: w.data[5].zero_(),
    "rows": lambda w: w[4:6].copy_(normal((2, 100))),
    "columns": lambda w: w[:, 30:35].copy_(normal((40, 5), dtype=torch.bfloat16)),
    "transposed": lambda w: w.t().copy_(normal((100, 40))),
    "masked": lambda w: w.masked_fill_(torch.arange(100) % 2 == 0, 0),
    "by number": lambda w: w.__setitem__(torch.tensor([1, 7]), normal((2, 100)).to(w.dtype)),
    "zeros": lambda w: w.__setitem__((torch.tensor([1, 7]), 3), 0),
    "random": lambda w: (torch.manual_seed(5), nn.init.normal_(w)),
    "one number": lambda w: w.copy_(torch.tensor(0.25)),
    "integers": lambda w: w.copy_(torch.arange(100)),
    "another weight": lambda w: w.copy_(weight(seed=2)),
    "rows of another": lambda w: w[8:12].copy_(weight(seed=2)[:4]),
    **{
        f"p {way.__name__} x": lambda w, way=way, x=x: way(w, x)
        for way, x in (
            (operator.iadd, 0.3), (operator.isub, torch.ones(100)), (operator.imul, 0.5),
            (operator.itruediv, 4), (operator.ifloordiv, 0.01), (operator.imod, 0.7),
            (operator.ipow, 2),
        )
    },
    "p[3:5] *= x": lambda w: operator.imul(w[3:5], 0.5),
    "data *= x": lambda w: setattr(w, "data", operator.imul(w.data, 0.5)),
    "itself": lambda w: w.sub_(w.t().contiguous().t() * 0.5),
    "product": lambda w: w.addmm_(normal((40, 5)), normal((5, 100))),
    "out=": lambda w: torch.add(w, 1, out=w),
    "eye_": lambda w: nn.init.eye_(w),
    "orthogonal_": lambda w: (torch.manual_seed(3), nn.init.orthogonal_(w)),
    "sparse_": lambda w: (torch.manual_seed(3), nn.init.sparse_(w[:, :1], 0.2)),
    "apply_": lambda w: w.apply_(lambda x: x * x),
    "map_": lambda w: w.map_(w.detach().clone(), lambda x, y: x + y),
}  # fmt: skip


def check_rounded(w, twin, before, touched):
    """Checks that blocks are rounded to nearest, and others keep their bytes."""
    rows = F.pad(twin.float(), (0, 28)).view(40, 4, 32)
    off = (F.pad(w.dequantize(torch.float32), (0, 28)).view(40, 4, 32) - rows).abs()
    assert (off <= rows.abs().amax(-1, True) / 236).all()
    kept = (w.packed == before).view(40, 4, 34).all(-1)
    assert kept[~touched].all() and not kept[touched].any()


#: those whose other operands have a dtype of their own, or are exact in BF16
IN_BF16 = [name for name in WRITES if name[:2] in ("p ", "p[")] + ["columns", "zeros", "item"]


@pytest.mark.parametrize(
    "name, dtype",
    [(name, torch.float32) for name in WRITES] + [(name, torch.bfloat16) for name in IN_BF16],
)
def test_writes_round_what_they_change_to_nearest(name, dtype):
    format = FORMATS[len(name) % 2]  # the bytes of both mean the same
    w = weight(dtype=dtype, format=format)
    twin, before, version = w.dequantize(torch.float32), w.packed.clone(), w._version
    address = w.packed.data_ptr()
    with torch.no_grad():
        WRITES[name](w)
        WRITES[name](twin)
    assert w.packed.data_ptr() == address
    assert w._version > version or name in ("row of data", "data *= x")
    touched = (F.pad(unpack(before, 100, torch.float32) != twin, (0, 28)).view(40, 4, 32)).any(-1)
    assert touched.any()
    check_rounded(w, twin, before, touched)


#: arguments of operators that need others than a tensor of the same shape, or a number
ROWS = torch.tensor([1, 7])
ARGUMENTS = {
    "addbmm_": lambda w: (w, normal((3, 40, 5)), normal((3, 5, 100))),
    "addmm_": lambda w: (w, normal((40, 5)), normal((5, 100))),
    "addmv_": lambda w: (w[3], normal((100, 5)), normal((5,))),
    "addr_": lambda w: (w, normal((40,)), normal((100,))),
    "baddbmm_": lambda w: (w.view(2, 20, 100), normal((2, 20, 5)), normal((2, 5, 100))),
    "index_add_": lambda w: (w, 0, ROWS, normal((2, 100))),
    "index_copy_": lambda w: (w, 0, ROWS, normal((2, 100))),
    "index_fill_": lambda w: (w, 0, ROWS, torch.tensor(0.5)),
    "index_put_": lambda w: (w, [ROWS], normal((2, 100)), True),
    "index_reduce_": lambda w: (w, 0, ROWS, normal((2, 100)), "amax"),
    "masked_fill_": lambda w: (w, torch.arange(100) % 3 == 0, torch.tensor(0.5)),
    "masked_scatter_": lambda w: (w, torch.arange(100) % 3 == 0, normal((40, 100))),
    "put_": lambda w: (w, ROWS, normal((2,))),
    "renorm_": lambda w: (w, 2, 0, 1.5),
    "scatter_add_": lambda w: (w, 0, ROWS.expand(2, 2), normal((2, 2))),
    "scatter_reduce_": lambda w: (w, 0, ROWS.expand(2, 2), normal((2, 2)), "amax"),
}
NUMBERS = {"number": 0.55, "float": 0.5, "int": 1, "bool": False, "str": "floor"}


def arguments_of(func, w):
    """Returns arguments of an operator for a weight or its twin."""
    name = func.overloadpacket.__name__
    if name in ARGUMENTS:
        args = list(ARGUMENTS[name](w))
        if "Scalar" in func._overloadname:
            args[-1] = 0.5
        return args, {}
    if name == "scatter_":
        value = 0.5 if "value" in func._overloadname else normal((2, 2))
        how = ["add"] if "reduce" in func._overloadname else []
        return [w, 0, ROWS.expand(2, 2), value], dict(zip(["reduce"], how))
    args, named = [w], {}
    for a in func._schema.arguments[1:]:
        kind = str(a.type).replace("Optional[", "").rstrip("]")
        if a.name == "generator":
            named["generator"] = torch.Generator().manual_seed(5)
        elif not a.has_default_value() or a.name in ("min", "max"):
            value = normal((40, 100), 4).abs() if kind == "Tensor" else NUMBERS[kind]
            value = 9 if a.name in ("to", "max") and kind == "int" else value
            if a.kwarg_only:
                named[a.name] = value
            else:
                args.append(value)
    return args, named


@pytest.mark.told("rounded away")
def test_every_listed_operator_writes_what_torch_computes():
    """Where torch refuses a float, as for bits, nothing is written."""
    acted = set()
    base = 1.01 + torch.rand((40, 100), generator=torch.Generator().manual_seed(1)) / 4
    small = base / 2
    for packet in sorted(operators.WRITES, key=str):
        name = packet.__name__
        for overload in packet.overloads():
            func = getattr(packet, overload)
            if str(func._schema.arguments[0].type) != "Tensor":  # TorchScript's lists
                continue
            w = Int8Weight(pack(base if name == "acosh_" else small), "int8-sr", 100, torch.float32)
            twin, before = w.dequantize(), w.packed.clone()
            errors = []
            for one in (twin, w):
                args, named = arguments_of(func, one)
                try:
                    func(*args, **named)
                except (RuntimeError, NotImplementedError) as error:
                    errors.append(str(error))
            if errors:
                assert len(errors) == 2 and torch.equal(w.packed, before), (name, overload, errors)
                continue
            assert twin.isfinite().all(), (name, overload)
            touched = (w.packed != before).view(40, 4, 34).any(-1)
            check_rounded(w, twin, before, touched)
            acted.add(name)
    missing = {p.__name__ for p in operators.WRITES} - acted
    assert missing <= {
        "__ilshift__", "__irshift__", "bitwise_and_", "bitwise_left_shift_", "bitwise_not_",
        "bitwise_or_", "bitwise_right_shift_", "bitwise_xor_",
    }  # fmt: skip


def test_lists_of_weights_and_others_are_written():
    numbers = torch.tensor([0.5, 2.0, 3.0])
    for name, *rest in (
        ("mul_", 0.5), ("add_", [0.5, 2.0, 3.0]), ("neg_",), ("zero_",), ("maximum_", 0.25),
        ("lerp_", "others", 0.5), ("copy_", "others"), ("addcmul_", "others", "others", numbers),
    ):  # fmt: skip
        given = [weight(dtype=torch.float32), normal((100,)), weight(seed=1, dtype=torch.float32)]
        twins = [w.dequantize() if isinstance(w, Int8Weight) else w.clone() for w in given]
        for some in (given, twins):
            others = [normal(t.shape, 6) for t in some]
            call = getattr(torch, f"_foreach_{name}", None)
            if call is None or name == "addcmul_" and not hasattr(torch, "compile"):
                break
            call(some, *(others if value == "others" else value for value in rest))
        else:
            assert torch.equal(given[1], twins[1])
            for w, twin in zip(given[::2], twins[::2]):
                off = (w.dequantize() - twin).abs()
                assert (off <= twin.abs().amax() / 236).all(), name


REFUSED = {
    r"resize_ is refused .* resize or transpose first": lambda w: w.resize_(10, 100),
    r"set_ is refused": lambda w: w.set_(torch.zeros(40, 100)),
    r"t_ is refused .*take a view": lambda w: w.t_(),
    r"squeeze_ is refused": lambda w: w.squeeze_(),
    r"embedding_renorm_ is refused": lambda w: F.embedding(torch.tensor([1]), w, max_norm=1.0),
    r"out= of eye.* shape \(5, 5\)": lambda w: torch.eye(5, out=w),
    r"_fused_adamw_ cannot step .*halfstep.AdamW": lambda w: torch._fused_adamw_(
        [w], [torch.ones(40, 100)], [torch.ones(40, 100)], [torch.ones(40, 100)], [],
        [torch.ones(())], lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.1, eps=1e-8,
        amsgrad=False, maximize=False,
    ),
    r"data_ptr is refused .*dequantize": lambda w: w.data_ptr(),
    r"numpy is refused": lambda w: w.numpy(),
    r"__array__ is refused": lambda w: memoryview(w.__array__()),
    r"__dlpack__ is refused": lambda w: torch.from_dlpack(w),
    r"_values is refused|sparse": lambda w: w._values(),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused_changes_nothing(message):
    w = weight(dtype=torch.float32)
    before = w.packed.clone()
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        REFUSED[message](w)
    assert torch.equal(w.packed, before) and w.shape == (40, 100)


def test_memory_is_that_of_the_bytes():
    """Sharing, pinning and pickling serve the stored bytes, and each view has the same storage."""
    w = nn.Parameter(weight())
    with warnings_are("ignore"):  # torch warns of storage() once in a process
        storages = w.storage(), w[3:].storage()
    assert w.untyped_storage().data_ptr() == w.packed.data_ptr() == storages[1].data_ptr()
    assert w.untyped_storage().nbytes() == w.packed.nbytes and storages[0].dtype == torch.uint8
    assert not w.is_shared() and not w.is_pinned() and not hasattr(w, "__cuda_array_interface__")
    before = w.packed.clone()
    layer = nn.Linear(100, 40)
    layer.weight = w
    if CAN_SHARE:
        assert layer.share_memory().weight is w and w.is_shared() and w.packed.is_shared()
    else:  # torch refuses to share the bytes
        with pytest.raises(RuntimeError, match="shared memory"):
            layer.share_memory()
        assert layer.weight is w and not w.is_shared()
    assert torch.equal(w.packed, before)
    twin = copy.copy(w.detach())
    twin[2].zero_()
    assert not torch.equal(w.packed, before) and torch.equal(
        pickle.loads(pickle.dumps(w)).packed, w.packed
    )
    with pytest.raises((RuntimeError, BufferError)):
        if not hasattr(torch._C, "_set_throw_on_mutable_data_ptr"):
            raise RuntimeError("this torch gives out an address of nothing")
        torch.utils.dlpack.to_dlpack(w.detach())


def test_writes_that_round_away_warn_once(caught, monkeypatch):
    """Those of averages do, also through lists and copy_(). Writes of new values do not."""
    monkeypatch.setattr(blocks, "_judging", True)
    model = halfstep.nn.quantize_(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 40)))
    w = model[0].weight
    with torch.no_grad():
        for write in (torch.zero_, nn.init.normal_, lambda w: w.mul_(0.5), lambda w: w.add_(0)):
            write(w)
        w[3:5] *= 1.5
        w.copy_(weight(96, 64))
        w.copy_(w.dequantize())
        w *= (torch.arange(64) % 2).to(w.dtype)
    assert not caught
    for options in ({}, {"avg_fn": lambda a, p, n: a + 0.001 * (p - a)}):
        monkeypatch.setattr(blocks, "_judging", True)
        average = torch.optim.swa_utils.AveragedModel(model, **options)
        average.n_averaged += 999
        with torch.no_grad():
            w.mul_(1.5)
            model[1].weight.neg_()
        for _ in range(3):
            average.update_parameters(model)
        (found,) = [x for x in caught if "rounded away" in str(x.message)]
        assert "halfstep.EMA" in str(found.message) and found.filename == __file__
        caught.clear()


def test_optimizers_of_torch_are_refused_before_they_step():
    w, other = nn.Parameter(weight()), nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="AdamW of torch cannot step 8-bit .*halfstep.AdamW"):
        torch.optim.AdamW([other, w], 0.1)
    opt = torch.optim.SGD([other], 0.1)
    with pytest.raises(ValueError, match="SGD of torch"):
        opt.add_param_group({"params": [w]})
    assert len(opt.param_groups) == 1
    torch.optim.AdamW([w.requires_grad_(False), other], 0.1)


def test_data_of_a_parameter():
    w = nn.Parameter(weight())
    w.data = weight(seed=1, dtype=torch.float16, format="int8-sr")
    assert w.dtype == torch.float16 and w.format == "int8-sr" and w.requires_grad
    assert torch.equal(w.packed, weight(seed=1, format="int8-sr").packed)
    before = w.packed.clone()
    for other in ((40, 100), (50, 99), (0,)):
        with pytest.raises(TypeError, match=r"be a Tensor of shape .* with copy_\(\)"):
            w.data = torch.zeros(other)
    # A resized embedding is a matrix with more or fewer rows.
    for rows in (50, 24, 40):
        values = normal((rows, 100), 2, torch.float16)
        values[:24] = w.dequantize()[:24]
        w.data = values
        assert type(w) is Int8Weight and w.shape == (rows, 100) and w.requires_grad
        assert torch.equal(w.packed[:24], before[:24])
        assert torch.equal(w.packed[24:], pack(values[24:]))
        assert torch.equal(w.dequantize()[:24], values[:24])
    assert repr(w) == (
        "Int8Weight(int8-sr, shape=(40, 100), dtype=torch.float16, device='cpu',"
        " requires_grad=True)"
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.zeros(4, 68, dtype=torch.uint8), "int8", 64), "unknown .* 'int8'; known: .*-ecc4"),
        ((torch.zeros(4, 68, dtype=torch.uint8), "int8-sr", 100), r"of shape \(rows, 136\), not"),
        ((torch.zeros(4, 68, dtype=torch.int8), "int8-sr", 64), "uint8 tensor .* not torch.int8"),
        ((torch.zeros(4, 68, dtype=torch.uint8), "int8-sr", 64, torch.int8), "compute in .*int8"),
    ],
)
def test_weights_that_cannot_be_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        Int8Weight(*arguments)
