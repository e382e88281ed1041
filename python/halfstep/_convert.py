"""States made, decoded and encoded: one tensor at a time, in a handle of its own."""

import math
from functools import lru_cache

import torch

from . import _abi, _calls, _devices, _handles, _layout
from ._abi import check, lib
from ._parameters import rows_of
from ._sharding import local
from ._streams import bind_streams, lay_out

#: values that are decoded at once where all of a tensor is looked at
_PIECE = 1 << 20


class Codec:
    """One tensor in a handle of its own, to decode or encode its slots."""

    def __init__(self, recipe, hypers, shape, name, identity=0, part=None):
        self.recipe, self.hypers, self.name = recipe, tuple(hypers.items()), name
        self.rule = _abi.rules[recipe.partition("/")[0]]
        self.handle = _handles.create_handle(1, 0)
        try:
            known = {k: v for k, v in hypers.items() if k in self.rule.hypers}
            group = _handles.add_group(self.handle, recipe, known, {})
            self.index = _handles.add_tensor(self.handle, group, name, identity, shape, "f32", part)
            self.streams, _ = lay_out(self.handle, group, self.index, self.rule, part, shape, name)
        except BaseException:
            self.close()
            raise
        self.gathered = part is not None and part.gathered
        self.shape, self.rows = shape, None if part is None else part.rows

    def close(self):
        lib.halfstep_destroy(self.handle)

    def bind(self, tensors):
        bind_streams(self.handle, self.index, self.streams, tensors)

    def take_scalars(self, state):
        """The numbers that a state has; ValueError where no update leaves such."""
        record = _calls.read(self.handle, _abi.RECORD_TENSOR, self.index)
        for key in _layout.scalars_of(self.rule, self.streams):
            value = _layout.take_number(state, key, self.name)
            if value is not None:
                _calls.set_number(record, self.rule, key, value)
        _calls.restore(self.handle, record)

    def read(self, slot, data=None):
        return _handles.read_rows(
            lib.halfstep_read_slot, self.handle, self.index, self.shape, slot, data, rows=self.rows
        )

    def pieces(self, slot):
        """The values of a state, a few rows at a time."""
        rows, length = rows_of(self.shape)
        if self.rows == 1 and length == 1:  # a flat buffer
            rows, length = 1, rows
        some = max(1, _PIECE // max(length, 1))
        for first in range(0, rows, some):
            n = min(some, rows - first)
            out = torch.empty(n, length, dtype=torch.float32, device="cpu")
            check(
                lib.halfstep_read_slot(
                    self.handle, self.index, slot, None, first, n, out.data_ptr()
                ),
                self.handle,
            )
            yield out

    def all_codes_are_good(self, stream, scale):
        """Whether every code there is, with this scale, is a finite number of the right sign: then
        no tensor of smaller scales needs to be looked at."""
        probe = _probe(self.recipe, self.hypers)
        if not any(s.key == stream.key for s in probe.streams):
            return False
        tensors = {s.key: torch.zeros(s.shape, dtype=s.dtype, device="cpu") for s in probe.streams}
        codes = tensors[stream.key].view(torch.uint8).view(-1)
        codes[:256] = torch.arange(256, dtype=torch.int16, device="cpu").to(torch.uint8)
        tensors[stream.name + ".scale"].fill_(scale)
        probe.bind(tensors)
        least, most = torch.aminmax(probe.read(stream.slot))
        return bool(
            abs(least) < math.inf
            and abs(most) < math.inf
            and (stream.role != _abi.ROLE_NONNEG or least >= 0)
        )

    def write(self, slot, values, data=None):
        _handles.write_rows(
            self.handle, self.index, slot, data, _devices.contiguous(values), self.shape, self.rows
        )


@lru_cache(64)
def _probe(recipe, hypers):
    """A tensor that is large enough for blocks of any format."""
    return Codec(recipe, dict(hypers), (64, 256), "probe")


def adopt(tensor, stream, name, take=True):
    """What lies here of a state tensor, of another device or layout, as the stream wants it;
    ValueError where it is something else."""
    tensor = local(tensor)
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.dtype != stream.dtype
        or tuple(tensor.shape) != stream.shape
        or tensor.device.type == "meta"
        or tensor.layout != torch.strided
    ):
        found = type(tensor).__name__
        if isinstance(tensor, torch.Tensor):
            found = (
                f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}, {tensor.layout}"
            )
        raise ValueError(
            f"halfstep: state {stream.key!r} of parameter {name!r} is {found}, not {stream.dtype}"
            f" of shape {stream.shape}"
        )
    return _devices.to_cpu(tensor) if take else tensor


def coarse_states(streams, state):
    """The names of those of a parameter's states that `state` has in a block format where they are
    precise here, or the other way round: version 0.1.0 kept a maximum, or a mean that is
    subtracted, as coarsely as any other state, and options may change.
    """
    return {
        s.name
        for s in streams
        if not s.extra
        and s.key not in state
        and (s.precise and s.name + ".codes" in state or s.part == ".codes" and s.name in state)
    }


def read_coarse(name, slot_role, recipe, shape, label, state, part):
    """The values of such a state: of its codes in the format that `recipe` names for it, or in its
    precise format."""
    rule, weight, formats = recipe.split("/")
    formats = formats.split("+")
    named = [s.name for s in _abi.rules[rule].states if s.role != _abi.ROLE_WEIGHT and not s.vector]
    place = named.index(name)
    same = [i for i in range(min(place, len(formats))) if _role(rule, named[i]) == slot_role]
    fmt = (
        formats[place]
        if place < len(formats)
        else formats[0]
        if len(formats) == 1 or not same
        else formats[same[-1]]
    )
    if name in state:
        fmt = next(s.precise_format for s in _abi.rules[rule].states if s.name == name) or fmt
    # Any state of that role and format is read alike; Adam has one of each.
    codec = Codec(f"adamw/{weight}/{fmt}", {}, shape, label, part=part)
    try:
        other = "exp_avg_sq" if slot_role == _abi.ROLE_NONNEG else "exp_avg"
        tensors = {
            s.key: (
                adopt(state[name + s.part], s, label)
                if s.name == other and name + s.part in state
                else torch.zeros(s.shape, dtype=s.dtype, device="cpu")
            )
            for s in codec.streams
        }
        codec.bind(tensors)
        codec.take_scalars(
            {other + _layout.GRID: state[name + _layout.GRID]}
            if name + _layout.GRID in state
            else {}
        )
        return codec.read(next(s.slot for s in codec.streams if s.name == other))
    finally:
        codec.close()


def _role(rule, name):
    return next(s.role for s in _abi.rules[rule].states if s.name == name)


@torch.no_grad()
def convert(rule, hypers, m, state, old):
    """The streams of member m in its recipe, from `state`, which is of the recipe `old`, or plain
    (None); the keys that are then obsolete; and the weight, if it is stored otherwise. Nothing is
    changed yet."""
    if m.gathered:
        raise ValueError(
            f"halfstep: the states of the matrix {m.name!r} are {old or 'plain'}, not {m.recipe},"
            f" and of a DTensor they cannot be converted, which {rule.name} steps as a whole:"
            " load and save them once on one process"
        )
    names = [s.name for s in rule.states]
    values, weight, held = {}, None, None
    now = _devices.to_cpu(local(m.p))  # all of it is worked out on the processor
    if old is None:
        for key in names:
            if isinstance(state.get(key), torch.Tensor):
                value = _devices.to_cpu(local(state[key])).to(torch.float32)
                values[key] = value.reshape(m.shape if value.numel() == now.numel() else (-1,))
    else:
        source = Codec(old, hypers, m.shape, m.name, part=m.part)
        try:
            missing = [s for s in source.streams if s.key not in state]
            tensors = {
                s.key: adopt(state[s.key], s, m.name) for s in source.streams if s.key in state
            }
            # States that this optimizer's hyper-parameters need and the file's did not start at
            # zero.
            tensors.update(
                (s.key, torch.zeros(s.shape, dtype=s.dtype, device="cpu")) for s in missing
            )
            source.bind(tensors)
            source.take_scalars(state)
            there = {s.name for s in source.streams} - {s.name for s in missing}
            for name in coarse_states(source.streams, state):
                values[name] = read_coarse(
                    name, _role(rule.name, name), old, m.shape, m.name, state, m.part
                )
            for i, name in enumerate(names):
                if name in there:
                    values[name] = source.read(2 + i)
            if "weight" in there:
                weight = source.read(0, now.data_ptr())
        finally:
            source.close()
    target = Codec(m.recipe, hypers, m.shape, m.name, part=m.part)
    try:
        # The same tensor, so the same streams, on the grid that a new handle has.
        made = {
            s.key: (
                torch.zeros(s.shape, dtype=s.dtype, device="cpu")
                if s.name in values
                else s.initial(now, now.device)
            )
            for s in m.streams
        }
        target.bind(made)
        for i, name in enumerate(names):
            if name in values and any(s.name == name for s in m.streams):
                target.write(2 + i, values[name])
        made.update(
            (s.name + _layout.GRID, _layout.number(1.0, s.name + _layout.GRID))
            for s in m.streams
            if s.grid
        )
        if weight is not None and "weight.extra" in made:
            held = now.clone()
            target.write(0, weight, held.data_ptr())
    finally:
        target.close()
    obsolete = _layout.keys_of(rule) - set(made)
    if old == m.recipe:  # what was not coarse is as it was
        coarse = coarse_states(m.streams, state)
        made = {
            key: value
            for key, value in made.items()
            if key.split(".")[0] in coarse or key not in state
        }
        obsolete = {
            name + part for name in coarse for part in ("", *_layout.PARTS, _layout.GRID)
        } - set(made)
        held = None
    for s in m.streams:
        if s.key in made:
            made[s.key] = _devices.place(made[s.key], m.kept)
    return made, obsolete, held


def create_state(rule, m, states, hypers):
    """The tensors of the state of a member that are not there yet, or not as the recipe wants them,
    as parts of a DTensor where the parameter is one; the keys that go; and the weight, if another
    format stores it otherwise."""
    made, obsolete, weight = _created(rule, m, states.get(m.p) or {}, hypers)
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


def _created(rule, m, state, hypers):
    """Returns the same of what lies here."""
    made, obsolete, weight = {}, set(), None
    old = _layout.recipe_of(state, m.name)
    has = any(key in state for key in _layout.keys_of(rule))
    # torch's SGD and Muon save a momentum and no count; what counts is that it is not the first
    # step.
    steps = _layout.step_count(state, m.name, int(has))
    if not _layout.is_step(state.get("step")):
        made["step"] = torch.tensor(float(steps), dtype=torch.float32, device="cpu")
    if old != m.recipe:
        made["recipe"] = _layout.number(_layout.pack_recipe(m.recipe), "recipe")
    initial = {"id": _layout.signed(m.id), **dict.fromkeys(_layout.COUNTERS, steps)}
    for key in _layout.numbers_of(rule, m.streams):
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
    if has and (old != m.recipe or coarse_states(m.streams, state)):
        streams, obsolete, weight = convert(rule, hypers, m, state, old)
        made.update(streams)
        return made, obsolete, weight
    for s in m.streams:
        if s.key in state and not (begins and s.role == _abi.ROLE_WEIGHT):
            if has and not s.fits(state[s.key], m.kept):
                moved = _devices.place(adopt(state[s.key], s, m.name), m.kept)
                if moved is not state[s.key]:
                    made[s.key] = moved
        else:
            made[s.key] = s.initial(m.p, m.kept)
    return made, obsolete, weight


def empty(recipe, hypers, p):
    """The states of a parameter without elements: those that any other would have, as empty."""
    codec = Codec(recipe, hypers, (1,), "empty")
    codec.close()
    return {
        s.key: torch.empty(p.shape, dtype=s.dtype, device="cpu")
        for s in codec.streams
        if s.key in (s.name, s.name + ".codes")
    }
