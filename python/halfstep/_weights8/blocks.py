"""The bytes of 8-bit weights: blocks of 32 elements of a row, each a BF16 scale and 32 codes.

docs/formats.md describes them. Only operators of torch are used, so that every device has them and
torch.compile can fuse them.
"""

import torch
import torch.nn.functional as F

from .._library import abi
from .._tensors import devices
from .._tensors.parameters import PLAIN
from .._tensors.torch_public import warn

#: names of the formats that have these bytes
FORMATS = [f.name for f in abi.formats.values() if f.geometry == abi.GEOMETRY_PACKED]
#: elements of a block, its bytes, and those of its scale
BLOCK, _BYTES, _SCALE = 32, 34, 2
#: elements that are converted at once, so that temporary tensors stay small
_STRETCH = 1 << 18


def check_format(format):
    """Raises ValueError if there is no such format of packed weights."""
    if format not in FORMATS:
        raise ValueError(
            f"halfstep: unknown format of packed weights {format!r}; known: {', '.join(FORMATS)}"
        )


def width(row_length):
    """Returns the bytes of a packed row."""
    return -(-row_length // BLOCK) * _BYTES


def _by_block(packed):
    """Returns packed rows as [..., blocks, 34], or of as many bytes in another dtype."""
    each = _BYTES // packed.element_size()
    return packed.unflatten(-1, (packed.shape[-1] // each, each))


def codes(packed):
    """Returns the codes of packed rows, int8 [..., blocks, 32] in the same memory."""
    return _by_block(packed)[..., _SCALE:].view(torch.int8)


def scales(packed):
    """Returns the scales of packed rows, BF16 [..., blocks] in the same memory."""
    return _by_block(packed.view(torch.bfloat16))[..., 0]


def _blocks(rows):
    """Returns rows as [..., blocks, 32], with zeros behind the last column."""
    missing = -rows.shape[-1] % BLOCK
    rows = F.pad(rows, (0, missing)) if missing else rows
    return rows.unflatten(-1, (rows.shape[-1] // BLOCK, BLOCK))


def unpack(packed: torch.Tensor, row_length: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weights of packed rows, a contiguous tensor [..., row_length]."""
    # A product of a code and a scale is exact in fp32. In BF16 it is rounded once.
    work = torch.float32 if dtype == torch.float16 else dtype
    scale = scales(packed).unsqueeze(-1).to(work)
    if type(packed) is torch.Tensor and packed.device.type == "cpu":
        # torch is slow at bytes with strides, so that the codes are first copied in pairs.
        pairs = _by_block(packed.view(torch.int16))[..., _SCALE // 2 :]
        weights = pairs.contiguous().view(torch.int8).to(work).mul_(scale)
    else:
        weights = codes(packed) * scale
    return weights.flatten(-2)[..., :row_length].to(dtype).contiguous()


def _pack_rows(rows):
    """Returns the packed bytes of a few rows, those of halfstep_write_slot() in int8-sr. Error
    codes would be lost here, so codes are not rounded by way of them."""
    blocks = _blocks(rows.float())
    largest = blocks.abs().amax(-1, keepdim=True)
    finite, held = largest.isfinite(), largest >= 2.0**-99
    scale = largest.clamp(max=2.0**127) * (1.06 / 127)
    pattern = (scale.view(torch.int32) + 0xFFFF) >> 16  # the next BF16
    pattern = torch.where(finite, torch.where(held, pattern, 0), 0x7FC0)
    step = torch.where(held & finite, (pattern << 16).view(torch.float32), torch.inf)
    blocks = torch.where(finite, blocks.clamp(-(2.0**127), 2.0**127), 0.0)
    placed = (blocks * (2.0**16 / step)).round().to(torch.int32)
    codes = ((placed + 0x8000) >> 16).to(torch.int8)
    pieces = pattern.to(torch.int16).view(torch.uint8), codes.view(torch.uint8)
    return torch.cat(pieces, -1).flatten(-2)


def _stretches(rows):
    """Yields slices of rows, few enough to be converted at once."""
    step = max(1, _STRETCH // max(1, rows.shape[-1]))
    for first in range(0, rows.shape[0], step):
        yield slice(first, first + step)


@torch.no_grad()
def pack(weights: torch.Tensor) -> torch.Tensor:
    """Returns a matrix as packed bytes, each weight rounded to nearest. The result is one uint8
    tensor [rows, 34 * blocks]; docs/formats.md says what is in it."""
    shape = weights.shape[0], width(weights.shape[1])
    packed = torch.empty(shape, dtype=torch.uint8, device=weights.device)
    for part in () if weights.is_meta else _stretches(weights):
        packed[part] = _pack_rows(weights[part])
    return packed


def store(packed, row_length, weights):
    """Writes weights into packed rows. Blocks whose weights stay the same keep their bytes, because
    new scales would round them again. Warns once if nearly all changes are rounded away."""
    if weights.dtype not in PLAIN:
        weights = weights.float()
    judged = _judging and type(packed) is torch.Tensor and not packed.is_meta
    if judged and packed.is_cuda and devices.capturing(packed.device):
        judged = False  # a graph that is being captured cannot wait for counts
    changed = lost = 0
    for part in _stretches(weights):
        old, given = packed[part], weights[part].to(packed.device)
        before, new = _blocks(unpack(old, row_length, given.dtype)), _blocks(given)
        kept = before == new
        same = kept.all(-1, keepdim=True)
        fresh = _by_block(_pack_rows(given))
        old.copy_(torch.where(same, _by_block(old), fresh).flatten(-2))
        if judged:
            after = _blocks(unpack(old, row_length, torch.float32))
            away = (after - new).abs() >= (before.float() - new).abs()
            changed, lost = changed + (~kept).sum(), lost + (away & ~kept).sum()
    if judged and len(weights):
        _judge(int(changed), int(lost))


#: False once store() has warned
_judging = True


def _judge(changed, lost):
    """Warns if nearly all changes of a write were smaller than what rounding does to them."""
    global _judging
    if not changed or lost < 0.9 * changed:
        return
    _judging = False
    warn(
        f"{lost} of the {changed} changes that a write made to 8-bit weights were less than half a"
        " code, and rounded away. Averages and loops of small changes stand still so: keep averages"
        " by halfstep.EMA of a copy in 16 bits, and step weights with an optimizer of halfstep."
        " Values that such weights were made from also differ by so little. This warning is given"
        " once"
    )
