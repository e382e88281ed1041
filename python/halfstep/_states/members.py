"""The parameters of an engine: what a handle is told of each, and what this package knows of
each."""

import contextlib
import weakref
from typing import NamedTuple

import torch

from .._library import abi, calls
from .._library.calls import GRID
from .._tensors import devices, matrices, sharding
from .._tensors.parameters import check_parameter
from .._tensors.sharding import local, stored
from . import layout
from .handles import add_group, add_tensor
from .planes import bind_planes, lay_out
from .watch import version

NOTHING = contextlib.nullcontext()


class Wanted(NamedTuple):
    """A parameter that a handle is to have. `group` is the index of its group. `gradient` is the
    format of its gradient. `home` is the device that it is stepped on. `how` is what its group says
    of matrices, as lay() takes it."""

    p: torch.Tensor
    group: int
    gradient: str
    name: str
    id: int
    recipe: str
    home: torch.device
    how: tuple

    @property
    def rule(self):
        """The name of its rule."""
        return self.recipe.partition("/")[0]


def declare(handle, settings, wanted, meant, stage=None):
    """Adds parameters and the groups that they need to an empty handle. Returns the members, the
    library's groups by (group index, recipe), and the names of tensors too small for blocks.

    `wanted` is a list of Wanted. `meant` holds Options.values() of each group, by its index.
    `stage` knows the owners of gathered parameters; without it they are declared as a whole.
    """
    members, c_groups, fallen = [], {}, []
    for one in wanted:
        part = sharding.part_of(one.p, one.name, settings.flat, one.rule, one.how, settings.owners)
        if stage is not None and part is not None and part.gathered:
            part.owned = stage.owns(one.p)
        m = Member(one, part, handle)
        key = (one.group, m.recipe)
        if key not in c_groups:
            c_groups[key] = add_group(handle, m.recipe, meant[one.group])
        m.index = add_tensor(handle, c_groups[key], m.name, m.id, m.whole, m.gradient, m.part)
        m.planes, fell_back = lay_out(
            handle, m.index, m.recipe, meant[one.group], m.part, m.whole, m.name
        )
        if fell_back:
            fallen.append(m.name)
        members.append(m)
    return members, c_groups, fallen


class Member:
    """One parameter: tensor `index` of the handle of `device`, which steps it.

    lies        the device of its weight
    rule        the row of its rule
    numbers     the small tensors of its state
    written     the values of these tensors; they are behind the library's counts until somebody
                asks
    versions    the versions of these tensors and of `step`, as this package left them
    bound       (key, weak reference, address) of each plane and grid that the handle knows
    places      (tensor, address) of the same, where the library writes them
    memory      what keeps that memory alive until the library knows another
    """

    def __init__(self, wanted, part, handle):
        p, self.group, self.gradient, self.name, self.id, self.recipe, self.device, how = wanted
        self.rule = abi.rules[wanted.rule]
        self.p, self.part, self.handle = p, part, handle
        here = local(p)
        #: the shape here, as the library takes it
        self.shape = tuple(here.shape)
        if not self.gathered:
            self.shape = matrices.lay_part(self.rule.name, p.shape, here.shape, how)
        held = stored(p)
        #: the format of 8-bit weights, or None
        self.format = None if held is here else here.format
        self.dtype, self.strides = p.dtype, held.stride()
        self.dense = devices.is_plain(held)
        self.address, self.lies = held.data_ptr(), devices.of(held)
        self.bound = self.places = ()
        #: brings states to where it is stepped and back (streams.py, ownership.py), or None
        self.stage = None

    @property
    def shown(self):
        """The keys of the numbers that the library writes into its state."""
        return (*layout.COUNTERS, *self.rule.scalars)

    def are_numbers_moved(self):
        """Returns True if a number has got other memory, as by `.data`."""
        return any(tensor.data_ptr() != address for tensor, address in self.places)

    def state_versions(self):
        """Returns the versions of the planes and grids that the handle knows."""
        held = [tensor() for _, tensor, _ in self.bound]
        return [None if tensor is None else version(tensor) for tensor in held]

    @property
    def gathered(self):
        """True if one rank steps the whole parameter for all that share it."""
        return self.part is not None and self.part.gathered

    @property
    def offloaded(self):
        """True if it is stepped on another device than its weight's."""
        return self.lies != self.device

    @property
    def kept(self):
        """The device of its states between steps."""
        return self.device if self.stage is None else self.stage.kept_of(self)

    def states(self, written=True):
        """Returns the context of DeviceHandle.states() for this member alone."""
        return NOTHING if self.stage is None else self.stage.states(self, written)

    @property
    def whole(self):
        """The shape that the library knows it by."""
        return self.part.laid if self.gathered else self.shape

    @property
    def rows(self):
        """The `rows` of planes_of() for it."""
        return None if self.part is None else self.part.rows

    def wrap(self, plane, tensor):
        """Returns a local tensor of its state as the optimizer keeps it."""
        return tensor if self.part is None else self.part.wrap(plane, tensor)

    # ---- Its weight and state --------------------------------------------------------------------

    def bind(self, state, in_file):
        """Gives the handle the addresses of a state, unless its planes are in a file."""
        planes = ()
        if not in_file:
            planes = self.planes
            where = state if self.stage is None else self.stage.addresses(self)
            bind_planes(self.handle, self.index, planes, where)
        self.step = state["step"]
        grids = (s.name + GRID for s in self.planes if s.grid)
        self.bound = tuple(
            (key, weakref.ref(state[key]), local(state[key]).data_ptr())
            for key in (*(s.key for s in planes), *grids)
        )
        self.numbers = {key: state[key] for key in layout.numbers_of(self.rule, self.planes)}
        self.versions = {
            "step": version(self.step),
            **{key: version(tensor) for key, tensor in self.numbers.items()},
        }

    def _bind_numbers(self):
        """Has the library write the numbers of the state, and notes where."""
        calls.bind(self.handle, self.index, self.rule, self.planes, self.step, self.numbers)
        numbers = [self.step, *self.numbers.values()]
        self.places = [(tensor, tensor.data_ptr()) for tensor in numbers]
        self.memory = [tensor.untyped_storage() for tensor in numbers]

    def restore_counters(self, state):
        """Gives the handle the counters of a state."""
        steps = layout.step_count(state, self.name)
        self.written = {key: layout.take_number(state, key, self.name) for key in self.numbers}
        counts = layout.agreed({key: self.written[key] for key in layout.COUNTERS}, steps)
        record = abi.Record.new(kind=abi.RECORD_TENSOR, index=self.index, **counts)
        for scalar in layout.scalars_of(self.rule, self.planes):
            calls.set_number(record, self.rule, scalar, self.written[scalar])
        calls.restore(self.handle, record)
        # The library keeps all tensors of a state current, because somebody may keep the state
        # dictionary. This includes the grids: codes mean nothing without their grid.
        self._bind_numbers()

    def save_counters(self, state):
        """Writes what only the handle knows into a state. Keeps what somebody else has written
        there since. Returns False if there was such."""
        # Tensors that were replaced live until the library no longer writes to them.
        replaced, ours, alone = [], True, True
        record = calls.read(self.handle, abi.RECORD_TENSOR, self.index)
        now = {key: getattr(record, key) for key in layout.COUNTERS}
        step = state.get("step")
        if step is not self.step or version(step) != self.versions["step"]:
            steps = layout.whole(step)
            if abi.is_count(steps) and not layout.same_count(now["state_steps"], steps):
                alone = ours = False  # somebody set the count, and maybe other numbers
                now["state_steps"] = now["full_steps"] = steps
        for scalar in layout.scalars_of(self.rule, self.planes):
            now[scalar] = calls.number(record, self.rule, scalar)
        for key, tensor in self.numbers.items():
            held = state.get(key)
            if (
                held is not tensor
                and ours
                and layout.is_number(held, key)
                and held.item() in (self.written[key], now.get(key))
            ):
                replaced.append(tensor)
                self.numbers[key], self.versions[key] = held, version(held)
            elif held is not tensor or version(held) != self.versions[key]:
                alone = False
                continue
            if key in now:
                layout.write(held, now[key])
                self.written[key] = now[key]
        if self.are_numbers_moved():
            if ours and step is self.step:
                step.detach().fill_(now["state_steps"])
            alone = False
        elif replaced:
            self._bind_numbers()
        return alone

    def recheck_weight(self):
        """Takes the new address of the weight. Returns False if the weight is on another device or
        in another format of 8 bits, which needs another handle. Fails if its shape or dtype has
        changed."""
        check_parameter(self.p, self.name)
        p, held = local(self.p), stored(self.p)
        if devices.of(held) != self.lies or (held is not p and p.format != self.format):
            return False
        if not self.offloaded:
            devices.check_memory(held, f"parameter {self.name!r}")
        if tuple(p.shape) != self.shape or p.dtype != self.dtype:
            raise ValueError(
                f"halfstep: parameter {self.name!r} was {self.dtype} of shape {self.shape} when its"
                f" states were made and is {p.dtype} of shape {tuple(p.shape)} now;"
                " convert the model before the optimizer is made"
            )
        self.strides, self.dense = held.stride(), devices.is_plain(held)
        self.address = held.data_ptr()
        return True
