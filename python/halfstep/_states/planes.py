"""Planes: the tensors that the library stores for a parameter. Each has a place in `state[p]` and
in a handle."""

import math
from dataclasses import dataclass

import torch

from .._library import abi
from .._library.abi import invoke, lib
from .._tensors import devices, matrices, sharding
from .._tensors.matrices import rows_of
from .._tensors.parameters import DTYPES, holds
from .._tensors.sharding import local, stored
from . import dither
from .handles import Handle, add_group, add_tensor, slot_info

WEIGHT, STATE = abi.SLOT_WEIGHT, abi.SLOT_STATE
#: geometries of formats whose tensors have a row for each row of the weight
_BY_ROWS = (abi.GEOMETRY_ROWS, abi.GEOMETRY_PACKED)


@dataclass(eq=False)
class Plane:
    """One stored tensor beside weight and gradient, with its place in `state[p]` and in a
    handle."""

    slot: int
    #: True for the second tensor of a slot: scales or residuals
    extra: bool
    #: the name of the state, or "weight"
    name: str
    #: the end of the key in `state[p]`
    end: str
    dtype: torch.dtype
    #: the shape of the tensor, or of the local part of a DTensor
    shape: tuple
    role: int
    #: True for codes on a grid; the grid is a number of its own
    grid: bool = False
    #: True if the format is finer than the recipe's
    precise: bool = False
    #: the shape of the whole state of a DTensor, and its placements
    whole: tuple = ()
    placements: tuple = ()

    @property
    def key(self):
        """The key in `state[p]`."""
        return self.name + self.end

    def fits(self, tensor, device):
        tensor = local(tensor)
        held = holds(tensor, self.shape, self.dtype) and devices.of(tensor) == device
        return held and devices.is_plain(tensor)

    def initial(self, p, name, device):
        """Returns what the plane begins with beside the weight p."""
        if self.extra and self.role in (0, abi.ROLE_WEIGHT) and sharding.is_packed(p):
            return dither.error_codes(p, name, device)
        if self.role == abi.ROLE_WEIGHT and not self.extra:
            here = stored(p)
            return (
                devices.clone(here)
                if devices.of(here) == device
                else devices.place(devices.contiguous(here), device)
            )
        return devices.zeros(self.shape, self.dtype, device)


def planes_of(handle, index, rule, shape, rows=None):
    """Returns the planes that the library stores for a tensor of this local shape, in the order of
    its slots. The second value is True if a state is too small for blocks. `rows` is 1 for a flat
    buffer."""
    found, fell_back = [], False
    count = math.prod(shape)
    rows = rows_of(shape)[0] if rows is None else rows
    for slot in (WEIGHT, *range(STATE, STATE + len(rule.states))):
        info = slot_info(handle, index, slot)
        if info.format < 0:
            continue
        fmt = abi.format_rows[info.format]
        fell_back |= bool(info.fell_back)
        name = info.name.decode()
        by_rows, precise = fmt.geometry in _BY_ROWS and rows, bool(info.precise)
        role = 0 if slot == WEIGHT else rule.states[slot - STATE].role
        if slot != WEIGHT:
            code, size = DTYPES[fmt.code_dtype], int(info.code_bytes)
            if info.rows * info.columns != count:  # a vector over rows or columns
                code_shape = matrices.vector_of(shape, info)
            elif size == count * code.itemsize:
                code_shape = tuple(shape)
            elif by_rows and size % rows == 0:
                code_shape = (*matrices.lines_of(shape, rows), size // rows)
            else:
                code_shape = (size,)
            end, grid = "" if code.is_floating_point else ".codes", bool(info.grid)
            found.append(Plane(slot, False, name, end, code, code_shape, role, grid, precise))
        if fmt.extra_dtype:
            extra = DTYPES[fmt.extra_dtype]
            n = int(info.extra_bytes) // extra.itemsize
            scales = bool(fmt.block) and fmt.geometry != abi.GEOMETRY_PACKED
            if not fmt.block:
                extra_shape = tuple(shape)
            elif by_rows and (info.blocks_per_row or not scales):
                extra_shape = (*matrices.lines_of(shape, rows), n // rows)
            else:
                extra_shape = (n,)
            end = ".scale" if scales else ".extra"
            found.append(Plane(slot, True, name, end, extra, extra_shape, role, precise=precise))
    return found, fell_back


def lay_out(handle, index, recipe, options, part, shape, name):
    """Returns planes_of() for a tensor that may be a part of one. `recipe` and `options` are those
    of its group."""
    rule = abi.rules[recipe.partition("/")[0]]
    planes, fell_back = planes_of(handle, index, rule, shape, None if part is None else part.rows)
    if part is not None and (part.gathered or part.mesh is not None):
        # A sharded plane needs the shape of the whole, which only a handle that holds the whole
        # can tell.
        whole = Handle(1, 0)
        group = add_group(whole, recipe, options)
        place = add_tensor(whole, group, name, 1, shape, "f32", part, whole=True)
        part.place(planes, planes_of(whole, place, rule, part.laid)[0], name)
    return planes, fell_back


def bind_planes(handle, index, planes, tensors):
    """Gives the library the addresses of a tensor's planes. `tensors` holds the planes by key."""
    places = {}
    for s in planes:
        places.setdefault(s.slot, [None, None])[s.extra] = sharding.address(tensors[s.key])
    for slot, (main, extra) in places.items():
        invoke(lib.halfstep_bind_slot, handle, index, slot, main, extra)
