"""Makes C handles with their groups and tensors, and reads and writes their slots.

A function here takes a handle of the library or a `Handle`.
"""

import math
import sys
from ctypes import byref, c_int32, c_void_p

import torch

from . import _abi, _calls, _devices, _sharding
from ._abi import check, lib
from ._parameters import rows_of

_NONE: dict = {}


def seed_of(seed):
    """Returns the number that the option `seed` stands for. None is drawn from torch's default
    generator, so that torch.manual_seed() governs it. Under torch.distributed None is 0, so that
    all ranks agree without communication."""
    if seed is not None:
        return int(seed)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return 0
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))


def create_handle(threads, seed, device=None):
    """Makes a handle for a torch.device; None is the CPU. A handle on a GPU works on the stream
    that is current there."""
    handle = c_void_p()
    options = _abi.Options.new(threads=threads, seed=seed & (2**64 - 1))
    if device is not None and _devices.is_asynchronous(device):
        options.device, options.stream = _devices.c_name(device), _devices.stream(device)
    code = lib.halfstep_create(byref(options), byref(handle))
    if code:
        check(code, None, (lib.halfstep_error_detail(None) or b"").decode())
    return handle


def add_group(handle, recipe, hypers=_NONE, choices=_NONE):
    """Adds a group and returns its index."""
    index = c_int32()
    check(lib.halfstep_add_group(handle, recipe.encode(), byref(index)), handle)
    for key, value in choices.items():
        check(lib.halfstep_set_choice(handle, index.value, key.encode(), value.encode()), handle)
    for key, value in hypers.items():
        check(lib.halfstep_set_hyper(handle, index.value, key.encode(), value), handle)
    return index.value


def add_tensor(handle, group, name, identity, shape, gradient, part=None, whole=False):
    """Adds a tensor, or this rank's `part` of it, and returns its index. `whole`: adds the whole
    tensor that `part` belongs to."""
    rows, length = rows_of(shape)
    fields = {"ndim": len(shape), "rows": rows, "row_length": length}
    if part is not None:
        fields = part.whole_fields() if whole else part.fields
    index = c_int32()
    tensor = _abi.Tensor.new(
        group=group, name=name.encode(), id=identity, gradient=gradient.encode(), **fields
    )
    try:
        check(lib.halfstep_add_tensor(handle, byref(tensor), byref(index)), handle)
    except _abi.HalfstepError as error:
        raise _sharding.advice(error, part) from None
    return index.value


def _vector(handle, index, slot, shape):
    """Returns the shape and the rows of a slot that stores a vector over rows or columns of a
    matrix of this shape. Returns None for any other slot."""
    if slot < _abi.SLOT_STATE or len(shape) < 2:
        return None
    info = _abi.SlotInfo.new()
    check(lib.halfstep_get_slot_info(handle, index, slot, byref(info)), handle)
    count = info.rows * info.columns
    return None if count == math.prod(shape) else ((count,), info.rows)


def read_rows(function, handle, index, shape, *arguments, rows=None):
    """Reads all of a tensor as fp32, by halfstep_read_slot() or halfstep_read_average(). `rows` is
    1 for a flat buffer, else None."""
    vector = (
        _vector(handle, index, arguments[0], shape) if function is lib.halfstep_read_slot else None
    )
    shape, rows = vector or (shape, rows)
    out = torch.empty(shape, dtype=torch.float32, device="cpu")
    if out.numel():
        check(
            function(
                handle,
                index,
                *arguments,
                0,
                rows_of(shape)[0] if rows is None else rows,
                out.data_ptr(),
            ),
            handle,
        )
    return out


def write_rows(handle, index, slot, data, values, shape, rows=None):
    """Stores fp32 values, in memory order, as all of a slot of a tensor of this shape."""
    if values.numel():
        rows = (_vector(handle, index, slot, shape) or (shape, rows))[1]
        rows = rows_of(shape)[0] if rows is None else rows
        check(
            lib.halfstep_write_slot(handle, index, slot, data, 0, rows, values.data_ptr()), handle
        )


class Handle:
    """A handle for anything but an Optimizer. Functions of the library take this object in place of
    a handle. The handle is destroyed with it."""

    _as_parameter_ = None  # what ctypes passes in its place

    def __init__(self, threads, seed, device=None):
        self._as_parameter_ = create_handle(threads, seed, device)
        self.threads, self.device = threads, device
        #: groups: the index of each recipe's group; options: the values that set() has set
        self.groups, self.options = {}, {}

    def __del__(self, exiting=sys.is_finalizing):
        # At exit modules may be gone already, even `sys`.
        if self._as_parameter_ and not exiting():
            lib.halfstep_destroy(self)

    def add(self, recipe, *tensor):
        """Adds a tensor, as add_tensor() takes it, to the group of a recipe. Returns its index."""
        if recipe not in self.groups:
            self.groups[recipe] = add_group(self, recipe)
        return add_tensor(self, self.groups[recipe], *tensor)

    def set(self, **options):
        """Sets choices, which are words, and hyper-parameters of all groups."""
        for key, value in options.items():
            if self.options.get(key) != value:
                word = isinstance(value, str)
                call = lib.halfstep_set_choice if word else lib.halfstep_set_hyper
                value_in_c = value.encode() if word else value
                check(call(self, _abi.ALL_GROUPS, key.encode(), value_in_c), self)
                self.options[key] = value

    def work(self, threads):
        """Takes this number of threads and, on a GPU, the stream that is current there."""
        if self.threads != threads:
            check(lib.halfstep_set_threads(self, threads), self)
            self.threads = threads
        if self.device is not None and _devices.is_asynchronous(self.device):
            check(lib.halfstep_set_stream(self, _devices.stream(self.device)), self)

    def counters(self, index):
        """Returns the record of a tensor, which has its counters."""
        return _calls.read(self, _abi.RECORD_TENSOR, index)

    def count(self, index, **counters):
        """Sets the counters of a tensor; those that are not given become 0."""
        _calls.restore(self, _abi.Record.new(kind=_abi.RECORD_TENSOR, index=index, **counters))
