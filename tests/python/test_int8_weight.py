"""Tests Int8Weight: its bytes are those of the library, what reads it gets decoded values, and what
writes it rounds to nearest."""

import pytest
import torch
import torch.nn.functional as F
from conftest import randn
from torch import nn

from halfstep import _abi, _handles, _packed
from halfstep.nn import Int8Weight, pack, unpack

FORMATS = _packed.FORMATS
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(shape, seed=0, dtype=torch.float32):
    return randn(shape, seed, dtype)


def weight(rows=40, columns=100, dtype=torch.bfloat16, format="int8-ecc4", seed=0):
    return Int8Weight(pack(normal((rows, columns), seed)), format, columns, dtype)


# ---- Bytes ---------------------------------------------------------------------------------------


def by_library(values, format):
    """Returns what halfstep_write_slot() stores, and what halfstep_read_slot() reads."""
    handle, shape = _handles.Handle(1, 0), tuple(values.shape)
    group = _handles.add_group(handle, f"adamw/{format}/f32")
    index = _handles.add_tensor(handle, group, "w", 1, shape, "f32")
    _abi.invoke(_abi.lib.halfstep_allocate_states, handle)
    packed = torch.full((shape[0], _packed.width(shape[1])), 9, dtype=torch.uint8)
    assert _handles.slot_info(handle, index, 0).code_bytes == packed.numel()
    _handles.write_rows(handle, index, 0, packed.data_ptr(), values, shape)
    read = _abi.lib.halfstep_read_slot
    return packed, _handles.read_rows(read, handle, index, shape, 0, packed.data_ptr())


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
    blocks = torch.zeros(len(patterns), 8, 34, dtype=torch.uint8)
    blocks[:, :, :2] = patterns.view(torch.uint8).view(-1, 1, 2)
    codes = torch.arange(-128, 128).clamp(min=-127).to(torch.int8)
    blocks[:, :, 2:] = codes.view(torch.uint8).view(8, 32)
    exact = patterns.double()[:, None] * codes.double()
    w = Int8Weight(blocks.view(len(patterns), 272), "int8-sr", 256, dtype)
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
    "zero": lambda w: w.zero_(),
    "row": lambda w: w[3].fill_(2),
    "item": lambda w: w.__setitem__((slice(None), 40), 0.5),
    "row of data": lambda w: w.data[5].zero_(),
    "rows": lambda w: w[4:6].copy_(normal((2, 100))),
    "columns": lambda w: w[:, 30:35].copy_(normal((40, 5), dtype=torch.bfloat16)),
    "transposed": lambda w: w.t().copy_(normal((100, 40))),
    "masked": lambda w: w.masked_fill_(torch.arange(100) % 2 == 0, 0),
    "by number": lambda w: w.__setitem__(torch.tensor([1, 7]), normal((2, 100)).to(w.dtype)),
    "random": lambda w: nn.init.normal_(w, generator=torch.Generator().manual_seed(5)),
    "one number": lambda w: w.copy_(torch.tensor(0.25)),
    "integers": lambda w: w.copy_(torch.arange(100)),
    "another weight": lambda w: w.copy_(weight(seed=2)),
    "rows of another": lambda w: w[8:12].copy_(weight(seed=2)[:4]),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("format", FORMATS)
def test_writes_round_what_they_change_to_nearest(name, format):
    w = weight(dtype=torch.float32, format=format)
    twin, before, version = w.dequantize(), w.packed.clone(), w._version
    address = w.packed.data_ptr()
    with torch.no_grad():
        WRITES[name](w)
        WRITES[name](twin)
    assert w.packed.data_ptr() == address and (w._version > version or name == "row of data")
    old = unpack(before, 100, torch.float32)
    touched = (F.pad(old != twin, (0, 28)).view(40, 4, 32)).any(-1)
    assert touched.any()
    blocks = F.pad(twin, (0, 28)).view(40, 4, 32)
    off = (F.pad(w.dequantize(), (0, 28)).view(40, 4, 32) - blocks).abs()
    assert (off <= blocks.abs().amax(-1, True) / 236).all()
    kept = (w.packed == before).view(40, 4, 34).all(-1)
    assert kept[~touched].all() and not kept[touched].any()


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.mul_(0.5),
        lambda w: w[3].add_(1),
        lambda w: torch._foreach_add_([w], 1),
        lambda w: torch.add(w, 1, out=w),
        lambda w: F.embedding(torch.tensor([1]), w, max_norm=1.0),
        lambda w: torch.optim.SGD([w], 0.1).step(),
        lambda w: torch.optim.AdamW([w], 0.1, foreach=True).step(),
        lambda w: torch.optim.AdamW([w], 0.1, fused=True).step(),
    ],
)
def test_arithmetic_in_place_is_refused(change):
    w = nn.Parameter(weight())
    w.grad = torch.ones(40, 100, dtype=torch.bfloat16)
    before = w.packed.clone()
    with torch.no_grad(), pytest.raises(TypeError, match=r"8-bit weights in place.*weight.copy_"):
        change(w)
    assert torch.equal(w.packed, before)


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
