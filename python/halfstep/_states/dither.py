"""The error codes that 8-bit weights begin with.

Layers compute with codes alone. If all error codes began at 0, each weight would stand in the
middle of its code, and layers would see no step until a weight has moved by half a code. So error
codes begin spread over their range. Then the mean code of many weights follows their mean change
from the first step on. The library says which they are.
"""

import ctypes
from functools import lru_cache

import torch

from .._library import abi
from .._library.abi import invoke, lib
from .._tensors import devices, sharding
from .._tensors.sharding import local
from .handles import Handle, add_group, add_tensor, slot_info

#: rows after which error codes repeat (docs/formats.md)
_PERIOD = 256


@lru_cache(16)
def _pattern(format, columns):
    """Returns the error codes that a matrix of _PERIOD rows begins with, uint8 [_PERIOD, bytes]."""
    handle = Handle(1, 0)
    index = add_tensor(
        handle, add_group(handle, f"sgd/{format}"), "w", 0, (_PERIOD, columns), "f32"
    )
    invoke(lib.halfstep_allocate_states, handle)
    info = slot_info(handle, index, abi.SLOT_WEIGHT)
    codes = bytearray(ctypes.string_at(info.extra, info.extra_bytes))
    handle.close()
    return torch.frombuffer(codes, dtype=torch.uint8).view(_PERIOD, -1)


def error_codes(p, name, device):
    """Returns the first error codes of what this process has of a parameter, on a device."""
    here, part = local(p), sharding.part_of(p, name)
    first = 0 if part is None else part.first_row
    rows = (torch.arange(here.shape[0], dtype=torch.int64, device="cpu") + first) % _PERIOD
    return devices.place(_pattern(here.format, here.row_length)[rows], device)
