"""Streams: the tensors that the library stores for a parameter. Each has a place in `state[p]` and
in a handle."""

import ctypes
import math
from ctypes import byref, c_double

import torch

from . import _abi, _devices, _sharding
from ._abi import check, lib
from ._handles import add_group, add_tensor, create_handle
from ._parameters import DTYPES, rows_of
from ._sharding import local

WEIGHT, STATE = _abi.SLOT_WEIGHT, _abi.SLOT_STATE


class Stream:
    """One stored tensor beside weight and gradient. It has a place in `state[p]` and in a handle.

    name          the name of the state, or "weight"
    extra         True for the second tensor of a slot: scales or residuals
    grid          True for codes on a grid; the grid is a number of its own
    precise       True if the format is finer than the recipe's
    shape         the shape of the tensor, or of the local part of a DTensor
    whole         the shape of the whole state of a DTensor
    placements    the placements of such a state
    """

    __slots__ = (
        "slot",
        "extra",
        "name",
        "part",
        "dtype",
        "shape",
        "role",
        "grid",
        "precise",
        "whole",
        "placements",
    )

    def __init__(self, slot, extra, name, part, dtype, shape, role, grid=False, precise=False):
        self.slot, self.extra, self.name, self.part, self.dtype, self.shape, self.role = (
            slot,
            extra,
            name,
            part,
            dtype,
            shape,
            role,
        )
        self.grid, self.precise = grid, precise

    @property
    def key(self):
        """The key in `state[p]`."""
        return self.name + self.part

    def fits(self, tensor, device):
        tensor = local(tensor)
        return (
            isinstance(tensor, torch.Tensor)
            and tensor.dtype == self.dtype
            and tuple(tensor.shape) == self.shape
            and _devices.of(tensor) == device
            and tensor.layout == torch.strided
            and _devices.is_plain(tensor)
        )

    def initial(self, p, device):
        """Returns what the stream begins with beside the weight p."""
        if self.role == _abi.ROLE_WEIGHT and not self.extra:
            here = local(p)
            return (
                _devices.clone(here)
                if _devices.of(here) == device
                else _devices.place(_devices.contiguous(here), device)
            )
        return _devices.zeros(self.shape, self.dtype, device)


def streams_of(handle, index, rule, shape, rows=None):
    """Returns the streams that the library stores for a tensor of this local shape, in the order of
    its slots. The second value is True if a state is too small for blocks. `rows` is 1 for a flat
    buffer."""
    found, fell_back = [], False
    count = math.prod(shape)
    rows = rows_of(shape)[0] if rows is None else rows
    for slot in (WEIGHT, *range(STATE, STATE + len(rule.states))):
        info = _abi.SlotInfo.new()
        check(lib.halfstep_get_slot_info(handle, index, slot, byref(info)), handle)
        if info.format < 0:
            continue
        fmt = _abi.format_rows[info.format]
        fell_back |= bool(info.fell_back)
        name = info.name.decode()
        role = 0 if slot == WEIGHT else rule.states[slot - STATE].role
        if slot != WEIGHT:
            code = DTYPES[fmt.code_dtype]
            code_bytes = int(info.code_bytes)
            if info.rows * info.columns != count:  # a vector over rows or columns
                code_shape = (code_bytes // code.itemsize,)
            elif code_bytes == count * code.itemsize:
                code_shape = tuple(shape)
            elif fmt.geometry == 0 and rows and code_bytes % rows == 0:
                code_shape = (rows, code_bytes // rows)
            else:
                code_shape = (code_bytes,)
            found.append(
                Stream(
                    slot,
                    False,
                    name,
                    "" if code.is_floating_point else ".codes",
                    code,
                    code_shape,
                    role,
                    bool(info.grid),
                    bool(info.precise),
                )
            )
        if fmt.extra_bits or fmt.scale_bytes:
            extra = DTYPES[fmt.extra_dtype]
            n = int(info.extra_bytes) // extra.itemsize
            if not fmt.block:
                extra_shape = tuple(shape)
            elif fmt.geometry == 0 and rows and info.blocks_per_row:
                extra_shape = (rows, n // rows)
            else:
                extra_shape = (n,)
            found.append(
                Stream(
                    slot,
                    True,
                    name,
                    ".scale" if fmt.block else ".extra",
                    extra,
                    extra_shape,
                    role,
                    precise=bool(info.precise),
                )
            )
    return found, fell_back


def lay_out(handle, group, index, rule, part, shape, name):
    """Returns streams_of() for a tensor that may be a part of one. `group` is its group in the
    handle."""
    streams, fell_back = streams_of(handle, index, rule, shape, None if part is None else part.rows)
    if part is not None and part.gathered:
        part.place(streams)
    elif part is not None and part.mesh is not None:
        # A sharded stream needs the shape of the whole, which only a handle that holds the whole
        # can tell.
        recipe, whole = ctypes.create_string_buffer(256), create_handle(1, 0)
        try:
            check(lib.halfstep_get_group_recipe(handle, group, recipe, 256), handle)
            hypers, value = {}, c_double()
            for key, hyper in rule.hypers.items():
                if not hyper.per_optimizer:
                    check(lib.halfstep_get_hyper(handle, group, key.encode(), byref(value)), handle)
                    hypers[key] = value.value
            place = add_tensor(
                whole,
                add_group(whole, recipe.value.decode(), hypers, {}),
                name,
                1,
                shape,
                "f32",
                part,
                whole=True,
            )
            part.place(streams, streams_of(whole, place, rule, part.global_shape)[0], name)
        finally:
            lib.halfstep_destroy(whole)
    return streams, fell_back


def bind_streams(handle, index, streams, tensors):
    """Gives the library the addresses of a tensor's streams. `tensors` holds the streams by key."""
    places = {}
    for s in streams:
        places.setdefault(s.slot, [None, None])[s.extra] = _sharding.address(tensors[s.key])
    for slot, (main, extra) in places.items():
        check(lib.halfstep_bind_slot(handle, index, slot, main, extra), handle)
