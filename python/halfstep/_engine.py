"""The C handle behind an optimizer: groups, tensors, memory, counters.

States are torch tensors and belong to `optimizer.state`; the handle only holds their addresses. It
is a cache that can be thrown away at any time between steps (`Engine.save_counters` first) and
built again from `state` and `param_groups`: that is how parameters that get their first gradient
late, loaded states, copies and changed formats all work.

This file is longer than 500 lines because building a handle, what has to be checked before, and
what is kept current after belong together.
"""

import contextlib
import ctypes
import math
import sys
from ctypes import byref, c_double, c_void_p
from operator import is_
from typing import Any, NamedTuple, Optional

import torch

from . import _abi, _convert, _devices, _layout, _sharding
from ._abi import check, lib
from ._handles import add_group, add_tensor, create_handle
from ._parameters import DTYPES, PLAIN, check_parameter, rows_of
from ._sharding import local
from ._watch import version

WEIGHT, STATE = _abi.SLOT_WEIGHT, _abi.SLOT_STATE

#: what of a group is no hyper-parameter
_NO_HYPERS = ("params", "param_names", *_layout.TOLD)
_HOST = torch.device("cpu")
_NOTHING = contextlib.nullcontext()


class Stream:
    """One stored tensor beside weight and gradient: the place it has in `state[p]` and in the
    handle. `name` is that of the state, or "weight"; `extra`: the second tensor of a slot, scales
    or residuals; `grid`: codes on a grid, which is a number of its own; `precise`: in a finer
    format than the recipe's. Of a DTensor `shape` is that of the part here, `whole` and
    `placements` those of the state.
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
        """In `state[p]`."""
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
        """What it begins with beside the weight p."""
        if self.role == _abi.ROLE_WEIGHT and not self.extra:
            here = local(p)
            return (
                _devices.clone(here)
                if _devices.of(here) == device
                else _devices.place(_devices.contiguous(here), device)
            )
        return _devices.zeros(self.shape, self.dtype, device)


def streams_of(handle, index, rule, shape, rows=None):
    """What the library stores for a tensor of this shape here, in the order of its slots. rows: of
    a flat buffer, 1."""
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
    """streams_of() a tensor that may be a part of one; `group` is its group in the handle."""
    streams, fell_back = streams_of(handle, index, rule, shape, None if part is None else part.rows)
    if part is not None and part.gathered:
        part.place(streams)
    elif part is not None and part.mesh is not None:
        # All that is sharded has the shape of the whole, which only a handle that holds the whole
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
    """Gives the library the addresses of a tensor's streams, by key."""
    places = {}
    for s in streams:
        places.setdefault(s.slot, [None, None])[s.extra] = _sharding.address(tensors[s.key])
    for slot, (main, extra) in places.items():
        check(lib.halfstep_bind_slot(handle, index, slot, main, extra), handle)


class Member:
    """One parameter, tensor `index` of the handle of its device, which is where it is stepped;
    `lies`: where its weight is. `numbers` are the small tensors of its state, `written` what they
    hold, which is behind the library's own counts until somebody asks, and `versions` theirs and
    the step's as this package left them.
    """

    __slots__ = (
        "p",
        "group",
        "name",
        "id",
        "handle",
        "index",
        "gradient",
        "recipe",
        "streams",
        "bound",
        "step",
        "numbers",
        "written",
        "versions",
        "shape",
        "dtype",
        "strides",
        "dense",
        "address",
        "part",
        "device",
        "lies",
        "full",
        "stage",
    )

    def __init__(self, wanted, part, handle):
        p, self.group, _, self.gradient, self.name, self.id, self.recipe, self.device = wanted
        self.p, self.part, self.handle = p, part, handle
        here = local(p)
        self.shape, self.dtype, self.strides, self.dense = (
            tuple(here.shape),
            p.dtype,
            here.stride(),
            _devices.is_plain(here),
        )
        self.address, self.lies = here.data_ptr(), _devices.of(here)
        self.bound, self.full = (), None
        #: what brings its states here from the process's memory and back (streaming.py), or None
        self.stage = None

    @property
    def gathered(self):
        """Whether the library has all of it, and this process keeps a part."""
        return self.part is not None and self.part.gathered

    @property
    def offloaded(self):
        """Whether it is stepped elsewhere than its weight lies."""
        return self.lies != self.device

    @property
    def kept(self):
        """The device that its states are kept on between steps."""
        return self.device if self.stage is None else _HOST

    def states(self, written=True):
        """As DevicePart.states(), of this one."""
        return _NOTHING if self.stage is None else self.stage.states(self, written)

    @property
    def whole(self):
        """The shape that the library has of it."""
        return self.part.global_shape if self.gathered else self.shape

    @property
    def rows(self):
        """As streams_of() takes it."""
        return None if self.part is None else self.part.rows

    def wrap(self, stream, tensor):
        """What is kept of a tensor of this process."""
        return tensor if self.part is None else self.part.wrap(stream, tensor)


def formats_of(groups):
    """The formats that the groups ask for, which a handle is made for."""
    return [(group.get("weights"), group.get("states")) for group in groups]


class Plain:
    """What gathering of the pointers compares with, as lists over all members."""

    def __init__(self, engine, states):
        members = engine.members
        formats = {name: dtype for dtype, name in PLAIN.items()}
        self.params = engine.params
        self.dtypes = [formats[m.gradient] for m in members]
        self.weight_dtypes = [m.dtype for m in members]
        self.shapes = [m.p.shape for m in members]
        self.numels = [m.p.numel() for m in members]
        self.weights = [m.address for m in members]
        self.states = [states[m.p] for m in members]
        self.steps = [m.step for m in members]
        # Where a number lies is asked only beside no other state: what moves states moves all of
        # them. Its memory stays.
        numbers = [
            [m.step, *(tensor for key, tensor, _ in m.bound if key.endswith(_layout.GRID))]
            for m in members
        ]
        streams = [
            [tensor for key, tensor, _ in m.bound if not key.endswith(_layout.GRID)]
            for m in members
        ]
        self.tensors = [tensor for pair in zip(streams, numbers) for tensor in pair[0] or pair[1]]
        self.addresses = list(map(torch.Tensor.data_ptr, self.tensors))
        self.memory = [tensor.untyped_storage() for held in numbers for tensor in held]
        # What the library writes, and counts no version for: those of others are noticed by one.
        self.counts = [m.numbers[key] for m in members for key in engine.shown]
        self.step_versions = [m.versions["step"] for m in members]
        self.count_versions = [m.versions[key] for m in members for key in engine.shown]
        # All states of the optimizer, in their order: cheaper to compare than to look parameters up.
        self.keys, self.values = list(states), list(states.values())
        # For each key of a state: the states that have it, and what they had there.
        streams = {"step": (self.states, self.steps)}
        for m, state in zip(members, self.states):
            for key, tensor, _ in m.bound:
                held = streams.setdefault(key, ([], []))
                held[0].append(state)
                held[1].append(tensor)
        self.streams = [(key, *held) for key, held in streams.items()]
        #: made when a step has found everything as it was: of all weights and of all gradients, or
        #: None; and how often
        self.guards, self.guarded = None, 0


class Settings(NamedTuple):
    """The options of an optimizer that its handles are made with and kept current by."""

    rule: str
    seed: int
    threads: int
    clip_norm: Optional[float]
    clip: Optional[str]
    scan: Optional[str]
    generator: Optional[str]
    flat: Any
    norm_group: Any


class Wanted(NamedTuple):
    """A parameter that a handle is to have. `group` is the index of its group and `position` its
    place there, `gradient` the format of its gradient, `home` the device that it is stepped on."""

    p: torch.Tensor
    group: int
    position: int
    gradient: str
    name: str
    id: int
    recipe: str
    home: torch.device


def declare(handle, settings, wanted, meant):
    """Adds some parameters and the groups that they need to an empty handle. Returns the members,
    the library's groups by (group index, recipe), and the names of those too small for blocks.

    wanted: a list of Wanted. meant: the hyper-parameters and the choices of each group, by its
    index.
    """
    rule = _abi.rules[settings.rule]
    members, c_groups, fallen = [], {}, []
    for one in wanted:
        m = Member(one, _sharding.part_of(one.p, one.name, settings.flat, settings.rule), handle)
        key = (one.group, m.recipe)
        if key not in c_groups:
            c_groups[key] = add_group(handle, m.recipe, *meant[one.group])
        m.index = add_tensor(handle, c_groups[key], m.name, m.id, m.whole, m.gradient, m.part)
        m.streams, fell_back = lay_out(
            handle, c_groups[key], m.index, rule, m.part, m.whole, m.name
        )
        if fell_back:
            fallen.append(m.name)
        members.append(m)
    return members, c_groups, fallen


class Group:
    """A group of a handle: the place of the optimizer's group that it is of, and its index in the
    handle."""

    __slots__ = (
        "place",
        "handle",
        "device",
        "index",
        "of",
        "count",
        "values",
        "seen",
        "given",
        "steps",
        "lr",
    )

    def __init__(self, place, handle, device, index, groups):
        self.place, self.index, self.of, self.count = place, index, groups[place], len(groups)
        self.handle, self.device = handle, device
        # What the group held when hyper-parameters were last set, what it was then found to hold,
        # what was set, and the steps that it was last told.
        self.values, self.seen, self.given, self.steps = None, None, {}, None
        #: where a GPU reads the lr, if that is a tensor on it
        self.lr = None

    def take_lr(self, lr):
        """Has an lr that is a tensor on the GPU read there at each step: without a wait, and anew
        at every replay of a graph. Says whether it is such."""
        if (
            not isinstance(lr, torch.Tensor)
            or not _devices.is_asynchronous(_devices.of(lr))
            or not _devices.is_asynchronous(self.device)
        ):
            if self.lr is not None:
                check(lib.halfstep_bind_hyper(self.handle, self.index, b"lr", None), self.handle)
                self.lr = None
            return False
        if self.lr is None:
            self.lr = _devices.zeros((), torch.float64, self.device)
            check(
                lib.halfstep_bind_hyper(self.handle, self.index, b"lr", self.lr.data_ptr()),
                self.handle,
            )
            self.given.pop("lr", None)
        self.lr.copy_(lr.reshape(()))
        return True

    def differs(self, group, totals):
        """Whether the optimizer's group holds other values than were last set. totals: of a rule
        whose `d` is no option. Numbers are replaced, never changed: the same objects mean the same
        numbers. Tensors and lists are read again."""
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

    def take(self, hypers, choices):
        """Sets hyper-parameters and choices of the group. False where they change what exists, so
        that the handle has to be built anew."""
        before = self.given
        for key, value in hypers.items():
            if before.get(key) != value:
                code = lib.halfstep_set_hyper(self.handle, self.index, key.encode(), value)
                if code == _abi.ERROR_ORDER:
                    return False
                check(code, self.handle)
        for key, value in choices.items():
            if before.get("choice " + key) != value:
                check(
                    lib.halfstep_set_choice(self.handle, self.index, key.encode(), value.encode()),
                    self.handle,
                )
        self.given = {**hypers, **{"choice " + k: v for k, v in choices.items()}}
        self.values = self.seen
        return True

    def among(self, groups):
        """The optimizer's group, wherever it is by now; None where it was removed."""
        if self.place < len(groups) and groups[self.place] is self.of:
            return self.of
        return next(
            (group for group in groups if group is self.of),
            groups[self.place] if len(groups) == self.count else None,
        )


class DevicePart:
    """A handle: of `n` members from number `first` on, all of one device, whose pointers are parts
    of the engine's."""

    __slots__ = ("handle", "device", "first", "n", "stage", "stream", "scale", "counted")

    def __init__(self, handle, device):
        self.handle, self.device, self.first, self.n = handle, device, 0, 0
        self.scale = None
        self.stream = _devices.stream(device) if _devices.is_asynchronous(device) else None
        #: its own skipped steps that tell() has seen
        self.counted = 0
        #: where states are during a step that are kept elsewhere (streaming.py), or None
        self.stage = None

    @property
    def asynchronous(self):
        return _devices.is_asynchronous(self.device)

    def slice(self, pointers):
        """Of an array for all members."""
        return (
            None
            if pointers is None
            else (c_void_p * self.n).from_buffer(pointers, self.first * ctypes.sizeof(c_void_p))
        )

    def states(self, needed=True, written=True):
        """While this is entered, states are where the handle thinks they are; and are kept after it
        where it has written them."""
        return self.stage.states(written=written) if self.stage is not None and needed else _NOTHING


class Engine:
    """The handles for some of an optimizer's parameters, one for each device. `members` says which,
    in the order of the handles' tensors. Nearly always there is one, `handle`; `parts` are all."""

    handle = None
    parts = ()

    def __init__(self, settings, groups, state, divided, meant):
        """groups, state: of the optimizer. divided: for each handle its device, what brings states
        there (streaming.py) or None, and a list of Wanted. meant: as for declare()."""
        self.optimizer_state = state
        self.rule = _abi.rules[settings.rule]
        #: keys of the numbers that the library writes into a state
        self.shown = (*_layout.COUNTERS, *self.rule.scalars)
        self.threads = settings.threads
        self.formats = formats_of(groups)
        self.parts = []
        try:
            self.choices = {}
            self.clip_norm = self.gradient_scale = None
            self.members, self.groups = [], []
            for device, stage, some in divided or [(_HOST, None, [])]:
                part = DevicePart(create_handle(self.threads, settings.seed, device), device)
                self.parts.append(part)
                members, c_groups, _ = declare(part.handle, settings, some, meant)
                part.first, part.n, part.stage = len(self.members), len(members), stage
                if stage is not None:
                    stage.take(members, state)
                for m in members:
                    m.stage = stage
                self.members += members
                self.groups += [
                    Group(g, part.handle, device, c, groups) for (g, _), c in c_groups.items()
                ]
            self.handle = self.parts[0].handle
            self.asynchronous = any(part.asynchronous for part in self.parts)
            self.index_of = {m.p: i for i, m in enumerate(self.members)}
            # From here on nothing can go wrong but memory: states come into being all together.
            fresh = [(m, *self._create_state(m, state, meant[m.group][0])) for m in self.members]
            #: whose residual or error code is new here
            self.converted = [m.p for m, made, _, _ in fresh if "weight.extra" in made]
            for m, made, obsolete, weight in fresh:
                held = state[m.p]
                held.update(made)
                for key in obsolete & set(held):
                    del held[key]
                if weight is not None:
                    with torch.no_grad():
                        local(m.p).copy_(weight)
            for part in self.parts:
                if not any(m.streams for m in self.members[part.first : part.first + part.n]):
                    check(
                        lib.halfstep_allocate_states(part.handle), part.handle
                    )  # of no bytes: there is nothing to bind
            for m in self.members:
                self._bind(m, state[m.p])
                self._restore_counters(m, state[m.p])
            self.told = None
            self.take_told(groups)
        except BaseException:
            self.destroy()
            raise
        n = len(self.members)
        self.weights = (c_void_p * n)()
        self.gradients = (c_void_p * n)()
        self.weights_are_plain = False  # whether `weights` holds what `plain` says
        self.params = [m.p for m in self.members]
        #: those with a residual or error code, as keys
        self.guarded = {
            m.p: True for m in self.members if any(s.key == "weight.extra" for s in m.streams)
        }
        plain = n and all(
            m.dense and m.address and not m.offloaded and not _sharding.is_dtensor(m.p)
            for m in self.members
        )
        self.plain = Plain(self, state) if plain else None
        self.ranks = _sharding.Ranks(settings, groups, self)

    # ---- Building --------------------------------------------------------------------------------

    def _create_state(self, m, states, hypers):
        """_created(), sharded as the parameter is."""
        made, obsolete, weight = self._created(m, states.get(m.p) or {}, hypers)
        streams = {s.key: s for s in m.streams}
        with torch.no_grad():
            if m.stage is not None:
                for key in streams:
                    held = made[key] if key in made else local(states[m.p][key])
                    if not _devices.is_pinned(held):
                        made[key] = _devices.pinned(held.shape, held.dtype).copy_(held)
            return (
                {key: m.wrap(streams.get(key), value) for key, value in made.items()},
                obsolete,
                weight,
            )

    def _created(self, m, state, hypers):
        """The tensors of `state[p]` that are not there yet, or not as the recipe wants them; the
        keys that go; and the weight, if another format stores it otherwise."""
        made, obsolete, weight = {}, set(), None
        old = _layout.recipe_of(state, m.name)
        has = any(key in state for key in _layout.keys_of(self.rule))
        # torch's SGD and Muon save a momentum and no count; what counts is that it is not the first
        # step.
        steps = _layout.step_count(state, m.name, int(has))
        if not _layout.is_step(state.get("step")):
            made["step"] = torch.tensor(float(steps), dtype=torch.float32, device="cpu")
        if old != m.recipe:
            made["recipe"] = _layout.number(_layout.pack_recipe(m.recipe), "recipe")
        initial = {"id": _layout.signed(m.id), **dict.fromkeys(_layout.COUNTERS, steps)}
        for key in _layout.numbers_of(self.rule, m.streams):
            if key not in made and not _layout.is_number(state.get(key), key):
                value = _layout.take_number(state, key, m.name)
                made[key] = _layout.number(
                    initial.get(key, _layout.initial(key)) if value is None else value, key
                )
        begins = (
            has and not steps and old is not None
        )  # what starts as a copy of the weight follows it until the first step
        if (
            has
            and old in (m.recipe, None)
            and not (begins and any(s.role == _abi.ROLE_WEIGHT for s in m.streams))
            and all(s.key in state and s.fits(state[s.key], m.kept) for s in m.streams)
        ):
            return made, obsolete, weight
        if has and (old != m.recipe or _convert.coarse_states(m.streams, state)):
            streams, obsolete, weight = _convert.convert(self.rule, hypers, m, state, old)
            made.update(streams)
            return made, obsolete, weight
        for s in m.streams:
            if s.key in state and not (begins and s.role == _abi.ROLE_WEIGHT):
                if has and not s.fits(state[s.key], m.kept):
                    moved = _devices.place(_convert.adopt(state[s.key], s, m.name), m.kept)
                    if moved is not state[s.key]:
                        made[s.key] = moved
            else:
                made[s.key] = s.initial(m.p, m.kept)
        return made, obsolete, weight

    def _bind(self, m, state):
        where = (
            m.part.gather(m.streams, state)
            if m.gathered
            else state
            if m.stage is None
            else m.stage.addresses(m)
        )
        bind_streams(m.handle, m.index, m.streams, where)
        m.step = state["step"]
        grids = (s.name + _layout.GRID for s in m.streams if s.grid)
        m.bound = tuple(
            (key, state[key], local(state[key]).data_ptr())
            for key in (*(s.key for s in m.streams), *grids)
        )
        m.numbers = {key: state[key] for key in _layout.numbers_of(self.rule, m.streams)}
        m.versions = {
            "step": version(m.step),
            **{key: version(tensor) for key, tensor in m.numbers.items()},
        }

    def _restore_counters(self, m, state):
        steps = _layout.step_count(state, m.name)
        m.written = {key: _layout.take_number(state, key, m.name) for key in m.numbers}
        counts = _layout.agreed({key: m.written[key] for key in _layout.COUNTERS}, steps)
        check(
            lib.halfstep_set_counters(m.handle, m.index, byref(_abi.Counters.new(**counts))),
            m.handle,
        )
        check(lib.halfstep_bind_step(m.handle, m.index, m.step.data_ptr()), m.handle)
        for scalar in _layout.scalars_of(self.rule, m.streams):
            check(
                lib.halfstep_set_scalar(m.handle, m.index, scalar.encode(), m.written[scalar]),
                m.handle,
            )
        # A state dictionary that somebody keeps is current at any time, all of it: codes mean
        # nothing without their grid.
        self._bind_numbers(m)
        for s in m.streams:
            if s.grid:
                grid = state[s.name + _layout.GRID]
                check(lib.halfstep_bind_grid(m.handle, m.index, s.slot, grid.data_ptr()), m.handle)

    def _bind_numbers(self, m):
        """Has the library write its counters and numbers of a member where its state keeps them."""
        counters = (m.numbers[key].data_ptr() for key in _layout.COUNTERS)
        check(lib.halfstep_bind_counters(m.handle, m.index, *counters), m.handle)
        for scalar in self.rule.scalars:
            check(
                lib.halfstep_bind_scalar(
                    m.handle, m.index, scalar.encode(), m.numbers[scalar].data_ptr()
                ),
                m.handle,
            )

    # ---- Between steps ---------------------------------------------------------------------------

    def save_counters(self, states, groups):
        """Writes what the handle alone knows into the states and groups of the optimizer. What somebody else
        has written there since stays, and counts: False says that there was such, so that the
        handle has to be built anew."""
        if not self.handle:
            return True
        alone = True
        counters = _abi.Counters.new()
        value = c_double()
        for m in self.members:
            # Tensors that were replaced live until the library no longer writes to them.
            state, replaced, ours = states.get(m.p), [], True
            if not state:
                continue
            check(lib.halfstep_get_counters(m.handle, m.index, byref(counters)), m.handle)
            now = {key: getattr(counters, key) for key in _layout.COUNTERS}
            step = state.get("step")
            if step is not m.step or version(step) != m.versions["step"]:
                steps = _layout.whole(step)
                if (
                    steps is not None
                    and not _layout.same_count(now["state_steps"], steps)
                    and 0 <= steps < 2**63
                ):
                    alone = ours = False  # somebody's count; what else they wrote stands beside it
                    now["state_steps"] = now["full_steps"] = steps
            for scalar in _layout.scalars_of(self.rule, m.streams):
                check(
                    lib.halfstep_get_scalar(m.handle, m.index, scalar.encode(), byref(value)),
                    m.handle,
                )
                now[scalar] = value.value
            for key, tensor in m.numbers.items():
                held = state.get(key)
                if (
                    held is not tensor
                    and ours
                    and _layout.is_number(held, key)
                    and held.item() in (m.written[key], now.get(key))
                ):
                    replaced.append(tensor)
                    m.numbers[key], m.versions[key] = held, version(held)
                elif held is not tensor or version(held) != m.versions[key]:
                    alone = False
                    continue
                if key in now:
                    _layout.write(held, now[key])
                    m.written[key] = now[key]
            if replaced:
                self._bind_numbers(m)
        self.tell(groups)
        return alone

    def tell(self, groups):
        """Keeps the counts of the groups current, those of the optimizer in each of them."""
        self.take_told(groups)
        steps = ctypes.c_uint64()
        for group in self.groups:
            check(
                lib.halfstep_get_group_steps(group.handle, group.index, byref(steps)), group.handle
            )
            group.steps, of = int(steps.value), group.among(groups)
            if of is not None:
                of["group_steps"] = group.steps
        skipped = self.told[0]
        for part in self.parts:
            counted = int(lib.halfstep_skipped_steps(part.handle))
            skipped, part.counted = skipped + counted - part.counted, counted
        self.told = (skipped, float(lib.halfstep_gradient_norm(self.handle)))
        for group in groups:
            group["skipped_steps"], group["last_norm"] = self.told
        if self.rule.totals:
            self.ranks.tell_estimates(groups)

    def take_told(self, groups):
        """Counts of the groups that are other than tell() left them, as sharding wrappers and
        loaded groups bring them."""
        for group in self.groups:
            steps = (group.among(groups) or {}).get("group_steps", group.steps)
            if steps is not group.steps and steps != group.steps:
                _layout.check_told("group_steps", steps, group.place)
                check(lib.halfstep_set_group_steps(group.handle, group.index, steps), group.handle)
                group.steps = steps
        first = groups[0] if groups else {}
        told = tuple(
            first.get(key, value) for key, value in zip(_layout.TOLD[1:], self.told or (0, 0.0))
        )
        if told != self.told:
            for key, value in zip(_layout.TOLD[1:], told):
                _layout.check_told(key, value, 0)
            check(lib.halfstep_set_skipped_steps(self.handle, told[0]), self.handle)
            self.parts[0].counted = told[0]
            for part in self.parts:
                check(lib.halfstep_set_gradient_norm(part.handle, told[1]), part.handle)
            self.told = told

    def destroy(self):
        parts, self.parts, self.handle = self.parts, (), None
        for part in parts:
            lib.halfstep_destroy(part.handle)

    def __del__(self, exiting=sys.is_finalizing):
        # At exit modules, `sys` too, may be gone already; the process gives back its memory itself.
        if not exiting():
            self.destroy()

    def changed(self, groups):
        """The groups of the handles whose hyper-parameters have to be set again, each with the
        optimizer's."""
        for entry in self.groups:
            if entry.differs(groups[entry.place], self.rule.totals):
                yield entry, groups[entry.place]

    def take_settings(self, settings):
        """Options of the optimizer as they are now."""
        if self.clip_norm != settings.clip_norm:
            for part in self.parts:
                check(
                    lib.halfstep_set_hyper(
                        part.handle, _abi.ALL_GROUPS, b"clip_norm", float(settings.clip_norm or 0.0)
                    ),
                    part.handle,
                )
            self.clip_norm = settings.clip_norm
        for key in ("scan", "clip", "generator"):
            value = getattr(settings, key)
            if value is not None and value != self.choices.get(key):
                for part in self.parts:
                    check(
                        lib.halfstep_set_choice(
                            part.handle, _abi.ALL_GROUPS, key.encode(), value.encode()
                        ),
                        part.handle,
                    )
                self.choices[key] = value
        if settings.threads != self.threads:
            for part in self.parts:
                check(lib.halfstep_set_threads(part.handle, settings.threads), part.handle)
            self.threads = settings.threads

    def set_gradient_scale(self, scale):
        if self.gradient_scale != scale:
            for part in self.parts:
                if part.scale is not None:
                    check(
                        lib.halfstep_bind_hyper(
                            part.handle, _abi.ALL_GROUPS, b"gradient_scale", None
                        ),
                        part.handle,
                    )
                    part.scale = None
                check(
                    lib.halfstep_set_hyper(part.handle, _abi.ALL_GROUPS, b"gradient_scale", scale),
                    part.handle,
                )
            self.gradient_scale = scale

    def bind_gradient_scale(self, scale, found_inf):
        """What a GradScaler left on the GPU, read there: gradients are divided by `scale`, and the
        step changes nothing where `found_inf` is not 0. Either may be None."""
        for part in self.parts:
            if part.scale is None:
                part.scale = _devices.zeros((), torch.float64, part.device)
                check(
                    lib.halfstep_bind_hyper(
                        part.handle, _abi.ALL_GROUPS, b"gradient_scale", part.scale.data_ptr()
                    ),
                    part.handle,
                )
            value = (
                torch.ones((), dtype=torch.float64, device="cpu")
                if scale is None
                else scale.double().reciprocal()
            )
            if found_inf is not None:
                value = torch.where(found_inf.to(value.device) != 0, torch.inf, value)
            part.scale.copy_(value.reshape(()))
        self.gradient_scale = None

    # ---- Matrices of which parts are kept --------------------------------------------------------

    def gather(self, m, state):
        """Binds the whole of the states of a member that is gathered, until the next time."""
        m.full = m.part.gather(m.streams, state)
        bind_streams(m.handle, m.index, m.streams, m.full)

    def scatter(self, m, state, weight=None):
        """The way back, also of the weight."""
        for s in m.streams:
            m.part.scatter(m.full[s.key], state[s.key])
        if weight is not None:
            m.part.scatter(weight, m.p.detach())
        m.full = None

    # ---- Calls -----------------------------------------------------------------------------------

    def use_streams(self):
        """Works on the streams that are torch's current ones."""
        for part in self.parts:
            if part.asynchronous:
                stream = _devices.stream(part.device)
                if stream != part.stream:
                    check(lib.halfstep_set_stream(part.handle, stream), part.handle)
                    part.stream = stream

    def hear(self):
        """Waits for everything that was submitted: NONFINITE if some of it was refused, with the
        handle that knows which."""
        code, handle = _abi.OK, self.handle
        for part in self.parts:
            if part.asynchronous:
                found = lib.halfstep_synchronize(part.handle)
                if found == _abi.NONFINITE:
                    code, handle = found, part.handle
                else:
                    check(found, part.handle)
        return code, handle

    def keep_until_read(self, tensors):
        """Keeps memory that the caller lets go of until the streams that may differ from those it
        was made on have read it."""
        for part in self.parts:
            if (
                part.asynchronous
                and part.stream is not None
                and not _devices.capturing(part.device)
            ):
                _devices.record([t for t in tensors if _devices.of(t) == part.device], part.device)

    def step(self, micro=False):
        """One step of everything, or a micro-batch, by the pointers there: its code and, where it
        is NONFINITE, the handle that knows why. Several handles take a wait for each, so that there
        is one verdict and one norm for all of them.
        """
        if self.ranks.needed or len(self.parts) > 1:
            return self.ranks.step(
                None if micro else self.weights,
                self.gradients,
                micro,
                self.choices.get("scan", "scan") == "scan",
            )
        with self.parts[0].states():
            if micro:
                return lib.halfstep_accumulate_states(self.handle, self.gradients), self.handle
            return lib.halfstep_step(self.handle, self.weights, self.gradients), self.handle

    def step_one(self, m, weight, gradient, micro):
        """An update of one member, or a micro-batch: its code."""
        with m.states():
            if self.ranks.divided:
                return self.ranks.step_one(m.p, None if micro else weight, gradient, micro)
            if micro:
                return lib.halfstep_accumulate_states_tensor(m.handle, m.index, gradient)
            return lib.halfstep_step_tensor(m.handle, m.index, weight, gradient)

    def end_round(self, clipped):
        """The end of a round of gradient release: its code."""
        if clipped and (self.ranks.needed or len(self.parts) > 1):
            return self.ranks.end_round()
        for part in self.parts:
            check(lib.halfstep_end_round(part.handle), part.handle)
        return _abi.OK

    def recheck_weight(self, m):
        """The weight lies elsewhere than before. False where that is on another device, which takes
        another handle."""
        check_parameter(m.p, m.name)
        p = local(m.p)
        if not m.offloaded:
            _devices.check(p, m.name)
        if _devices.of(p) != m.lies:
            return False
        if tuple(p.shape) != m.shape or p.dtype != m.dtype:
            raise ValueError(
                f"halfstep: parameter {m.name!r} was {m.dtype} of shape {m.shape} when its states"
                f" were made and is {p.dtype} of shape {tuple(p.shape)} now"
            )
        m.strides, m.dense, m.address = p.stride(), _devices.is_plain(p), p.data_ptr()
        return True
