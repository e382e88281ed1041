"""The parameters of an engine: what a handle is told of each, and what this package knows of
each."""

import contextlib
from typing import NamedTuple

import torch

from .._library import abi
from .._library.calls import GRID
from .._tensors import devices, matrices, sharding
from .._tensors.parameters import stored_dtype
from .._tensors.sharding import local, stored
from . import layout
from .handles import add_group, add_tensor
from .planes import lay_out
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
        #: brings states to where it is stepped and back (streaming.py, ownership.py), or None
        self.stage = None

    @property
    def shown(self):
        """The keys of the numbers that the library writes into its state."""
        return (*layout.COUNTERS, *self.rule.scalars)

    def note_places(self):
        """Notes where the library writes the numbers of its state."""
        numbers = [self.step, *self.numbers.values()]
        self.places = [(tensor, tensor.data_ptr()) for tensor in numbers]
        self.memory = [tensor.untyped_storage() for tensor in numbers]

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
        """Returns the context of DevicePart.states() for this member alone."""
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


class Plain:
    """The values that gathering of the pointers compares with, as lists over all members."""

    def __init__(self, engine, states):
        members = engine.members
        self.params = engine.params
        self.dtypes = [stored_dtype(m.gradient) for m in members]
        self.weight_dtypes = [m.dtype for m in members]
        self.shapes = [m.p.shape for m in members]
        self.numels = [m.p.numel() for m in members]
        self.weights = [m.address for m in members]
        #: the numbers of members with 8-bit weights, and the formats of these
        self.packed = [(i, m.format) for i, m in enumerate(members) if m.format]
        self.states = [states[m.p] for m in members]
        self.steps = [m.step for m in members]
        # The address of a number is compared only if its member has no other state, because
        # whatever moves states moves all of them.
        numbers = [
            [m.step, *(tensor() for key, tensor, _ in m.bound if key.endswith(GRID))]
            for m in members
        ]
        planes = [
            [tensor() for key, tensor, _ in m.bound if not key.endswith(GRID)] for m in members
        ]
        self.tensors = [tensor for pair in zip(planes, numbers) for tensor in pair[0] or pair[1]]
        self.addresses = list(map(torch.Tensor.data_ptr, self.tensors))
        # The library writes these and counts no version, so a new version means another writer.
        self.counts = [m.numbers[key] for m in members for key in m.shown]
        self.step_versions = [m.versions["step"] for m in members]
        self.count_versions = [m.versions[key] for m in members for key in m.shown]
        # All states of the optimizer in order, because this is cheaper to compare than to look up
        # parameters.
        self.keys, self.values = list(states), list(states.values())
        # For each key of a state: the states that have it, and the tensors that they had there.
        planes = {"step": (self.states, self.steps)}
        for m, state in zip(members, self.states):
            for key, tensor, _ in m.bound:
                held = planes.setdefault(key, ([], []))
                held[0].append(state)
                held[1].append(tensor())
        self.planes = [(key, *held) for key, held in planes.items()]
        #: guards: one for all weights and one for all gradients, made when a step has found nothing
        #: changed, or None; guarded: how often they were made
        self.guards, self.guarded = None, 0
