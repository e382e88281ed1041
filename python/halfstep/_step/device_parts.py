"""The handles of an engine, and the groups in them."""

import ctypes
from operator import is_

import torch

from .._library import abi
from .._library.abi import invoke, lib
from .._settings.groups import TOLD
from .._states.handles import Handle, set_option
from .._states.members import NOTHING
from .._tensors import devices
from .._tensors.matrices import how_of

#: keys of a group that are not hyper-parameters
_NO_HYPERS = ("params", "param_names", *TOLD)


def formats_of(settings, groups):
    """Returns the rule of each group, the formats that it asks for, and what it takes for matrices.
    A handle is made for these."""
    return [
        (rule, group.get("weights"), group.get("states"), how_of(group))
        for rule, group in zip(settings.rules, groups)
    ]


class Group:
    """A group of a handle. `place` is the place of the optimizer's group, `index` the index in the
    handle, and `count` the number of the optimizer's groups."""

    def __init__(self, place, handle, index, groups):
        self.place, self.index, self.of, self.count = place, index, groups[place], len(groups)
        self.handle = handle
        # values: the optimizer's group when hyper-parameters were last set, or None to set them
        # again
        # seen: the group as differs() found it
        # given: the hyper-parameters and choices that were set
        # steps: the steps that were last told
        self.values, self.seen, self.given, self.steps = None, None, {}, None
        #: the tensor from which a GPU reads lr, or None
        self.lr = None
        #: made once, because it is read at every step
        self.record = abi.Record.new(kind=abi.RECORD_GROUP, index=index)

    def count_steps(self):
        """Returns the number of steps that the library has counted."""
        invoke(lib.halfstep_get_record, self.handle, ctypes.byref(self.record))
        return self.record.steps

    def take_lr(self, lr):
        """Has the GPU read an lr that is a tensor there: at each step without a wait, and anew at
        every replay of a graph. Returns False for any other lr, which is not taken."""
        if (
            not isinstance(lr, torch.Tensor)
            or not devices.is_asynchronous(devices.of(lr))
            or not self.handle.asynchronous
        ):
            if self.lr is not None:
                self._bind_lr(None)
                self.lr = None
            return False
        if self.lr is None:
            self.lr = devices.zeros((), torch.float64, self.handle.device)
            self._bind_lr(self.lr.data_ptr())
            self.given.pop("lr", None)
        self.lr.copy_(lr.reshape(()))
        return True

    def _bind_lr(self, address):
        invoke(lib.halfstep_bind_hyper, self.handle, self.index, b"lr", address)

    def differs(self, group, totals):
        """Returns True if the optimizer's group holds other values than were last set. `totals`:
        the rule computes `d`, so `d` is not an option.

        Numbers are replaced, never changed, so the same object means the same number. A group that
        holds tensors, lists or dictionaries is always read again.
        """
        values = [
            v for key, v in group.items() if key not in _NO_HYPERS and not (key == "d" and totals)
        ]
        if (
            self.values is not None
            and len(self.values) == len(values)
            and all(map(is_, values, self.values))
        ):
            return False
        again = any(isinstance(v, (torch.Tensor, list, dict)) for v in values)
        self.values, self.seen = None, None if again else values
        return True

    def take(self, options):
        """Sets hyper-parameters and choices of the group. Returns False if one of them cannot
        change once states exist, so that a new handle is needed."""
        for name, value in options.items():
            if self.given.get(name) != value:
                try:
                    set_option(self.handle, self.index, name, value)
                except abi.HalfstepError as error:
                    if error.code == abi.ERROR_ORDER:
                        return False
                    raise
        self.given, self.values = options, self.seen
        return True

    def among(self, groups):
        """Returns the optimizer's group at its current place. If it was replaced and the number of
        groups is the same, returns the group at its old place. Otherwise returns None."""
        if self.place < len(groups) and groups[self.place] is self.of:
            return self.of
        return next(
            (group for group in groups if group is self.of),
            groups[self.place] if len(groups) == self.count else None,
        )


class DevicePart(Handle):
    """A handle for the `n` members from number `first` on, all on one device. Its arrays of
    pointers are slices of the engine's.

    stage      brings states to the device for a step if they are kept elsewhere (streaming.py), or
               None
    scale      the tensor from which a GPU reads the scale of gradients, or None
    counted    the skipped steps of this handle that Engine.tell() has counted
    """

    first = n = counted = 0
    stage = scale = None

    def slice(self, pointers):
        """Returns the part of this handle in an array for all members, or None if there is no
        array."""
        if pointers is None:
            return None
        kind = type(pointers)._type_
        return (kind * self.n).from_buffer(pointers, self.first * ctypes.sizeof(kind))

    def results(self, ahead):
        """Returns slice() of the results of steps in advance, which only the processor makes."""
        return None if self.asynchronous else self.slice(ahead)

    def states(self, needed=True, written=True):
        """Returns a context in which the states are where the handle expects them. `written`: the
        handle writes them, so they are kept afterwards. `needed`: False if the call does not use
        states."""
        return self.stage.states(written=written) if self.stage is not None and needed else NOTHING
