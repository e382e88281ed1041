"""Tensors of the library without torch: their bytes, their formats, and the range of numbers that a
format can store."""

from __future__ import annotations

import importlib.util
import math
import sys
from ctypes import byref, c_float, c_int32, c_void_p, create_string_buffer

LARGEST = 3.4028234663852886e38  # of fp32


def abi(root):
    """Returns python/halfstep/_library/abi.py: the module of the imported package, or else one made
    without torch."""
    name = "halfstep._library.abi"
    if name not in sys.modules:
        path = root / "python" / "halfstep" / "_library" / "abi.py"
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class Tensor:
    """A tensor of one recipe: which formats and bytes its slots have. Raises the package's error if
    the library refuses the recipe."""

    def __init__(self, abi, recipe, fields, options=None, gradient="f32"):
        self.abi, self.handle, index = abi, c_void_p(), c_int32()
        abi.check(abi.lib.halfstep_create(byref(abi.Options.new(threads=1)), byref(self.handle)))
        abi.invoke(abi.lib.halfstep_add_group, self.handle, recipe.encode(), byref(index))
        for name, value in (options or {}).items():
            name = name.encode()
            abi.invoke(abi.lib.halfstep_set_hyper, self.handle, index.value, name, value)
        tensor = abi.Tensor.new(
            group=index.value, name=b"w", id=1, gradient=gradient.encode(), **fields
        )
        abi.invoke(abi.lib.halfstep_add_tensor, self.handle, byref(tensor), byref(index))
        self.elements = fields["rows"] * fields["row_length"]

    def __del__(self):
        self.abi.lib.halfstep_destroy(self.handle)

    def slot(self, number):
        info = self.abi.SlotInfo.new()
        self.abi.invoke(self.abi.lib.halfstep_get_slot_info, self.handle, 0, number, byref(info))
        return info

    def format(self, number):
        """Returns the name of a slot's format, or None if nothing is stored."""
        row = self.slot(number).format
        return None if row < 0 else self.abi.format_rows[row].name

    def bytes(self, *numbers):
        """Returns the bytes of slots, a parameter."""
        infos = map(self.slot, numbers)
        return sum(one.code_bytes + one.extra_bytes for one in infos) / self.elements


class Probe:
    """A small tensor that numbers are written into and read back from, in one slot."""

    ROWS, LENGTH = 16, 1024

    def __init__(self, abi, recipe, slot):
        fields = {"ndim": 2, "rows": self.ROWS, "row_length": self.LENGTH}
        self.abi, self.slot = abi, slot
        self.tensor = Tensor(abi, recipe, fields)
        self.handle = self.tensor.handle
        abi.invoke(abi.lib.halfstep_allocate_states, self.handle)
        self.data = None
        if slot == abi.SLOT_WEIGHT:
            self.data = create_string_buffer(self.tensor.slot(slot).code_bytes)

    def stored(self, *values):
        """Returns what is read back of these numbers, which all other zeros follow."""
        whole = (c_float * (self.ROWS * self.LENGTH))(*values)
        for call in (self.abi.lib.halfstep_write_slot, self.abi.lib.halfstep_read_slot):
            self.abi.invoke(call, self.handle, 0, self.slot, self.data, 0, self.ROWS, whole)
        return whole[: len(values)]

    def largest(self):
        found = (self.stored(LARGEST * 2.0 ** (-i / 32))[0] for i in range(640))
        return max(value for value in found if math.isfinite(value))

    def smallest(self, *beside):
        """Returns the least positive number that is read back, beside others."""
        found = (self.stored(*beside, 2.0**power)[-1] for power in range(-149, 1))
        return min(value for value in found if value > 0)
