"""Makes C handles with their groups and tensors, and reads and writes their slots.

A function here takes a handle of the library or a `Handle`.
"""

import math
import sys
from ctypes import byref, c_int32, c_void_p

import torch

from .._library import abi, calls
from .._library.abi import check, invoke, lib
from .._tensors import devices, matrices, sharding
from .._tensors.matrices import rows_of


def set_option(handle, group, name, value):
    """Sets a choice, whose value is a word, or a hyper-parameter."""
    if isinstance(value, str):
        invoke(lib.halfstep_set_choice, handle, group, name.encode(), value.encode())
    else:
        invoke(lib.halfstep_set_hyper, handle, group, name.encode(), value)


def add_group(handle, recipe, *options):
    """Adds a group and returns its index. `options` are dictionaries of choices and
    hyper-parameters."""
    index = c_int32()
    invoke(lib.halfstep_add_group, handle, recipe.encode(), byref(index))
    for some in options:
        for name, value in some.items():
            set_option(handle, index.value, name, value)
    return index.value


def add_tensor(handle, group, name, identity, shape, gradient, part=None, whole=False):
    """Adds a tensor, or this rank's `part` of it, and returns its index. `whole`: adds the whole
    tensor that `part` belongs to."""
    fields = matrices.fields_of(shape)
    if part is not None:
        fields = part.whole_fields() if whole else part.fields
    index = c_int32()
    tensor = abi.Tensor.new(
        group=group, name=name.encode(), id=identity, gradient=gradient.encode(), **fields
    )
    try:
        invoke(lib.halfstep_add_tensor, handle, byref(tensor), byref(index))
    except abi.HalfstepError as error:
        raise sharding.advice(error, part) from None
    return index.value


def slot_info(handle, index, slot):
    """Returns what the library says of a slot of a tensor."""
    info = abi.SlotInfo.new()
    invoke(lib.halfstep_get_slot_info, handle, index, slot, byref(info))
    return info


def _vector(handle, index, slot, shape):
    """Returns the shape and the rows of a slot that stores a vector over rows or columns of a
    matrix of this shape. Returns None for any other slot."""
    if slot < abi.SLOT_STATE or len(shape) < 2:
        return None
    info = slot_info(handle, index, slot)
    count = info.rows * info.columns
    return None if count == math.prod(shape) else (matrices.vector_of(shape, info), info.rows)


def read_rows(function, handle, index, shape, *arguments, rows=None):
    """Reads all of a tensor as fp32, by halfstep_read_slot() or halfstep_read_average(). `rows` is
    1 for a flat buffer, else None."""
    vector = (
        _vector(handle, index, arguments[0], shape) if function is lib.halfstep_read_slot else None
    )
    shape, rows = vector or (shape, rows)
    out = torch.empty(tuple(shape), dtype=torch.float32, device="cpu")
    if out.numel():
        rows = rows_of(shape)[0] if rows is None else rows
        invoke(function, handle, index, *arguments, 0, rows, out.data_ptr())
    return out


def write_rows(handle, index, slot, data, values, shape, rows=None):
    """Stores fp32 values, in memory order, as all of a slot of a tensor of this shape."""
    if values.numel():
        rows = (_vector(handle, index, slot, shape) or (shape, rows))[1]
        rows = rows_of(shape)[0] if rows is None else rows
        invoke(lib.halfstep_write_slot, handle, index, slot, data, 0, rows, values.data_ptr())


class Handle:
    """A handle of the library, in place of which functions of the library take this object. It is
    destroyed with this object, or by close()."""

    _as_parameter_ = None  # what ctypes passes in its place

    def __init__(self, threads, seed, device=devices.HOST):
        """Makes a handle for a torch.device. On a GPU it works on the stream that is current
        there."""
        handle = c_void_p()
        self.threads, self.device, self.stream = threads, device, None
        options = abi.Options.new(threads=threads, seed=seed & (2**64 - 1))
        if self.asynchronous:
            self.stream = options.stream = devices.stream(device)
            options.device = devices.c_name(device)
        check(lib.halfstep_create(byref(options), byref(handle)))
        self._as_parameter_ = handle
        #: groups: the index of each recipe's group; options: the values that set() has set
        self.groups, self.options = {}, {}

    def close(self):
        """Destroys the handle."""
        if self._as_parameter_:
            lib.halfstep_destroy(self)
            self._as_parameter_ = None

    def __del__(self, exiting=sys.is_finalizing):
        # At exit modules may be gone already, even `sys`. The process then frees its memory itself.
        if not exiting():
            self.close()

    @property
    def asynchronous(self):
        """True if calls return before their work is done."""
        return devices.is_asynchronous(self.device)

    def add(self, recipe, *tensor):
        """Adds a tensor, as add_tensor() takes it, to the group of a recipe. Returns its index."""
        if recipe not in self.groups:
            self.groups[recipe] = add_group(self, recipe)
        return add_tensor(self, self.groups[recipe], *tensor)

    def set(self, **options):
        """Sets choices, which are words, and hyper-parameters of all groups."""
        for key, value in options.items():
            if self.options.get(key) != value:
                set_option(self, abi.ALL_GROUPS, key, value)
                self.options[key] = value

    def work(self, threads):
        """Takes this number of threads and, on a GPU, the stream that is current there."""
        if self.threads != threads:
            invoke(lib.halfstep_set_threads, self, threads)
            self.threads = threads
        self.use_stream()

    def use_stream(self):
        """Makes a handle on a GPU work on the stream that is current there."""
        if self.asynchronous:
            stream = devices.stream(self.device)
            if stream != self.stream:
                invoke(lib.halfstep_set_stream, self, stream)
                self.stream = stream

    def counters(self, index):
        """Returns the record of a tensor, which has its counters."""
        return calls.read(self, abi.RECORD_TENSOR, index)

    def count(self, index, **counters):
        """Sets the counters of a tensor; those that are not given become 0."""
        calls.restore(self, abi.Record.new(kind=abi.RECORD_TENSOR, index=index, **counters))
