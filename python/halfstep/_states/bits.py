"""What the bits of a weight tell of the residual beside it: hashes, comparisons, and the unit of a
weight.

A matrix has a hash for each row, a vector one for each PIECE elements. Hashes take a pass over a
weight, so they are made for what is saved, and in steps only after the first write of somebody
else.
"""

from functools import lru_cache

import torch

from .._tensors import devices
from .._tensors.sharding import is_packed, local, stored

#: elements of a vector that share a hash
PIECE = 256
#: elements that are looked at at a time. A CPU takes as many as its cache holds. A GPU takes more,
#: because it waits for each call.
_AT_ONCE = {"cpu": 1 << 18, None: 1 << 24}
#: stands for a hash that is not known
UNKNOWN = 0
#: the bits of the exponent, and what a Kahan residual is divided by (docs/formats.md)
_KAHAN = {torch.bfloat16: (0x7F80, 1), torch.float16: (0x7C00, 2048)}


def _at_once(tensor):
    return _AT_ONCE.get(tensor.device.type, _AT_ONCE[None])


# ---- Hashes --------------------------------------------------------------------------------------


@lru_cache(64)
def _odd_numbers(n, device):
    """Returns n odd 32-bit numbers, one for each column. They are always the same."""
    x = torch.arange(n, dtype=torch.int64, device=device) * 0x9E3779B1
    x = (x ^ x >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    return ((x ^ x >> 12) | 1).to(torch.int32)


@torch.no_grad()
def row_hashes(tensor):
    """Returns the hashes of a weight of 16 or 8 bits, as int64 on its device. Returns None for
    other weights.

    A hash is the sum over the row of bits times a number of the column, modulo 2^32, and never
    UNKNOWN. One changed element always changes it.
    """
    t = devices.contiguous(stored(tensor).detach())
    if is_packed(tensor):
        t = t.view(torch.int16)
    if t.element_size() != 2:
        return None
    bits = (
        t.reshape(t.shape[0], t.shape[1:].numel())
        if t.dim() > 1
        else torch.nn.functional.pad(t.reshape(-1), (0, -t.numel() % PIECE)).view(-1, PIECE)
    )
    bits, columns = bits.view(torch.int16), bits.shape[1]  # which may be 0
    factors = _odd_numbers(columns, t.device)
    found = torch.empty(len(bits), dtype=torch.int64, device=t.device)
    rows = min(max(_at_once(t) // max(columns, 1), 1), len(bits))
    products = torch.empty(rows, columns, dtype=torch.int32, device=t.device)
    for some, out in zip(bits.split(max(rows, 1)), found.split(max(rows, 1))):
        torch.mul(some, factors, out=products[: len(some)])
        torch.sum(products[: len(some)], 1, dtype=torch.int64, out=out)
    return found.bitwise_and_(0xFFFFFFFF).bitwise_or_(1 << 32)


def changed_rows(tensor, hashes):
    """Returns which rows have other bits than their hashes say. Returns None if the hashes are
    unknown or of another shape."""
    if hashes is None or not hashes.numel() or bool((hashes == UNKNOWN).any()):
        return None
    now = row_hashes(tensor)
    return now != hashes.to(now.device) if now is not None and now.shape == hashes.shape else None


# ---- Comparisons ---------------------------------------------------------------------------------


def _bytes(tensor):
    return devices.contiguous(tensor).view(-1).view(torch.uint8)


def digest(extra):
    """Returns something that two residuals have in common if they hold the same bits."""
    here = local(extra)
    return here.shape, here.dtype, int(_bytes(here).sum(dtype=torch.int64))


def same_bits(a, b):
    """Returns True if two tensors hold the same bits, index by index. `a` may have lost its
    memory."""
    a, b = stored(a), stored(b)
    if a.shape != b.shape or a.dtype != b.dtype or not a.untyped_storage().nbytes():
        return False
    if devices.of(a) != devices.of(b):
        a, b = devices.to_cpu(a), devices.to_cpu(b)
    return torch.equal(_bytes(a), _bytes(b))


@torch.no_grad()
def fits(weight, extra):
    """Returns False if the weight's rounding cannot have left this residual: an element of a Kahan
    residual is larger than the unit in the last place of its weight. Error codes always fit."""
    weight, extra = stored(weight).detach(), local(extra).detach()
    if extra.dtype != weight.dtype or extra.shape != weight.shape or weight.dtype not in _KAHAN:
        return True
    exponent, divisor = _KAHAN[weight.dtype]
    info, flat = torch.finfo(weight.dtype), devices.contiguous(weight).view(-1)
    rest = devices.place(devices.contiguous(extra).view(-1), devices.of(flat))
    some = _at_once(flat) // 16  # several temporaries in fp32
    for w, r in zip(flat.split(some), rest.split(some)):
        power = (w.view(torch.int16) & exponent).view(w.dtype).float()
        if bool((r.float().abs() / divisor > power.clamp(min=info.tiny) * info.eps).any()):
            return False
    return True


# ---- Dropping ------------------------------------------------------------------------------------


def clear_rows(extra, rows, fresh=None):
    """Drops the residuals of these rows, as row_hashes() counts rows, or of all rows for None.
    `fresh` are the error codes that 8-bit weights begin with."""
    here = local(extra)
    if fresh is not None:
        here.copy_(
            fresh if rows is None else torch.where(rows.to(here.device)[:, None], fresh, here)
        )
    elif rows is None:
        here.zero_()
    elif here.dim() > 1:
        here[rows.to(here.device)] = 0
    else:
        here[rows.to(here.device).repeat_interleave(PIECE)[: here.numel()].view(here.shape)] = 0
