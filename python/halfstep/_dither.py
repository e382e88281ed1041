"""The error codes that 8-bit weights begin with.

Layers compute with codes alone. If all error codes began at 0, each weight would stand in the
middle of its code, and layers would see no step until a weight has moved by half a code. So error
codes begin spread over their range. Then the mean code of many weights follows their mean change
from the first step on.
"""

from functools import lru_cache

import torch

from . import _abi, _devices, _sharding
from ._sharding import local

#: rows after which error codes repeat
_PERIOD = 256


@lru_cache(16)
def _pattern(columns, width):
    """Returns the error codes of some rows, uint8 [_PERIOD, width]. Those behind the last column
    are 0."""
    places = torch.arange(_PERIOD * width, dtype=torch.int64, device="cpu") * 0x9E3779B1
    mixed = (places ^ places >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    codes = (mixed >> 24).to(torch.uint8).view(_PERIOD, width)
    codes[:, (columns + 1) // 2 :] = 0
    if columns % 2:
        codes[:, columns // 2] &= 15
    return codes


def error_codes(p, name, device):
    """Returns the first error codes of what this process has of a parameter, on a device."""
    here, part = local(p), _sharding.part_of(p, name)
    block, columns = _abi.formats[here.format].block, here.row_length
    first = 0 if part is None else part.first_row
    rows = (torch.arange(here.shape[0], dtype=torch.int64, device="cpu") + first) % _PERIOD
    return _devices.place(_pattern(columns, -(-columns // block) * block // 2)[rows], device)
