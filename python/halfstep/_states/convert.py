"""Makes, decodes and encodes states, one tensor at a time, each in a handle of its own."""

import math
from functools import lru_cache

import torch

from .._library import abi, calls
from .._library.abi import invoke, lib
from .._library.calls import GRID
from .._tensors import devices
from .._tensors.matrices import rows_of
from .._tensors.parameters import described, extra_dtype, holds, stored_dtype
from .._tensors.sharding import local, stored
from . import layout
from .handles import Handle, add_group, add_tensor, read_rows, write_rows
from .planes import WEIGHT, bind_planes, lay_out

#: advice beside a state of another shape
ONE_MATRIX = (
    "; a state that was saved when the parameter was taken for one matrix goes on with"
    ' matrix="flatten" in its group, without heads= and split='
)
#: advice beside a state of which others were cut or extended
_CUT = (
    "; cut or extend all tensors of a parameter's state alike, or keep it without blocks and"
    " residuals: weights='bf16-sr', states='bf16-sr'"
)
#: the number of values that pieces() decodes at once
_PIECE = 1 << 20


class Codec(Handle):
    """One tensor in a handle of its own, to decode or encode its slots."""

    def __init__(self, recipe, hypers, shape, name, identity=0, part=None):
        super().__init__(1, 0)
        self.rule = abi.rules[recipe.partition("/")[0]]
        self.recipe, self.name = recipe, name
        self.hypers = {k: v for k, v in hypers.items() if k in self.rule.hypers}
        group = add_group(self, recipe, self.hypers)
        self.index = add_tensor(self, group, name, identity, shape, "f32", part)
        self.planes, _ = lay_out(self, self.index, recipe, self.hypers, part, shape, name)
        self.gathered = part is not None and part.gathered
        self.shape, self.rows = shape, None if part is None else part.rows

    def bind(self, tensors):
        """Gives the library the addresses of the planes. The caller keeps the tensors alive."""
        bind_planes(self, self.index, self.planes, tensors)

    def take(self, state):
        """Binds the planes of a state, and keeps them. What it lacks starts at zero. Returns the
        tensors by key."""
        self.held = {
            s.key: adopt(state[s.key], s, self.name)
            if s.key in state
            else devices.zeros(s.shape, s.dtype)
            for s in self.planes
        }
        self.bind(self.held)
        return self.held

    def take_scalars(self, state):
        """Takes the scalars and grids of a state. Raises ValueError for a value that no update
        leaves."""
        record = calls.read(self, abi.RECORD_TENSOR, self.index)
        for key in layout.scalars_of(self.rule, self.planes):
            value = layout.take_number(state, key, self.name)
            if value is not None:
                calls.set_number(record, self.rule, key, value)
        calls.restore(self, record)

    def read(self, slot, data=None):
        return read_rows(
            lib.halfstep_read_slot, self, self.index, self.shape, slot, data, rows=self.rows
        )

    def pieces(self, slot):
        """Yields the values of a state, a few rows at a time."""
        rows, length = rows_of(self.shape)
        if self.rows == 1 and length == 1:  # a flat buffer
            rows, length = 1, rows
        some = max(1, _PIECE // max(length, 1))
        for first in range(0, rows, some):
            n = min(some, rows - first)
            out = torch.empty(n, length, dtype=torch.float32, device="cpu")
            invoke(lib.halfstep_read_slot, self, self.index, slot, None, first, n, out.data_ptr())
            yield out

    def all_codes_are_good(self, plane, scale):
        """Returns True if every code decodes, with this scale, to a finite number of the right
        sign. The values of a tensor with smaller scales need no check then."""
        probe = _probe(self.recipe, tuple(self.hypers.items()))
        if not any(s.key == plane.key for s in probe.planes):
            return False
        tensors = probe.take({})
        codes = tensors[plane.key].view(torch.uint8).view(-1)
        codes[:256] = torch.arange(256, dtype=torch.int16, device="cpu").to(torch.uint8)
        tensors[plane.name + ".scale"].fill_(scale)
        least, most = torch.aminmax(probe.read(plane.slot))
        return bool(
            abs(least) < math.inf
            and abs(most) < math.inf
            and (plane.role != abi.ROLE_NONNEG or least >= 0)
        )

    def write(self, slot, values, data=None):
        values = devices.contiguous(values)
        write_rows(self, self.index, slot, data, values, self.shape, self.rows)


@lru_cache(64)
def _probe(recipe, hypers):
    """Returns a codec for a tensor that is large enough for blocks of any format."""
    return Codec(recipe, dict(hypers), (64, 256), "probe")


def adopt(tensor, plane, name):
    """Returns the local shard of a state tensor in CPU memory, contiguous. Raises ValueError if
    dtype, shape or layout are not those of the plane, or if it is on the meta device."""
    tensor = local(tensor)
    if not holds(tensor, plane.shape, plane.dtype):
        raise ValueError(
            f"halfstep: state {plane.key!r} of parameter {name!r} is {described(tensor)}, not"
            f" {plane.dtype} of shape {plane.shape}"
            + (ONE_MATRIX if getattr(tensor, "ndim", 9) < len(plane.shape) else "")
            + (_CUT if getattr(tensor, "shape", ())[1:] == plane.shape[1:] else "")
        )
    return devices.to_cpu(tensor)


def coarse_states(planes, state):
    """Returns the names of the states that `state` holds in a block format although they are
    precise here, or the other way round. An option has changed then."""
    return {
        s.name
        for s in planes
        if not s.extra
        and s.key not in state
        and (s.precise and s.name + ".codes" in state or s.end == ".codes" and s.name in state)
    }


def read_coarse(name, recipe, shape, label, state, part):
    """Returns the values of a state that coarse_states() has named. Its codes are in the format
    that `recipe` names for it; without codes it is in its precise format."""
    rule, weight, formats = recipe.split("/")
    formats, roles = formats.split("+"), abi.rules[rule].roles
    named = [s.name for s in abi.rules[rule].states if s.role != abi.ROLE_WEIGHT and not s.vector]
    place = named.index(name)
    alike = [i for i in range(min(place, len(formats))) if roles[named[i]] == roles[name]]
    fmt = formats[0]
    if place < len(formats):
        fmt = formats[place]
    elif len(formats) > 1 and alike:
        fmt = formats[alike[-1]]
    if name in state:
        fmt = next(s.precise_format for s in abi.rules[rule].states if s.name == name) or fmt
    # A state is decoded by its role and format alone. Adam has one state of each role.
    codec = Codec(f"adamw/{weight}/{fmt}", {}, shape, label, part=part)
    other = "exp_avg_sq" if roles[name] == abi.ROLE_NONNEG else "exp_avg"
    ends = [end for end in ("", *layout.ENDS, GRID) if name + end in state]
    held = {other + end: state[name + end] for end in ends}
    codec.take(held)
    codec.take_scalars(held)
    return codec.read(next(s.slot for s in codec.planes if s.name == other))


def recode(fmt, weight, extra, to):
    """Returns a weight, and its residual or error code or None, in another format: rounded to
    nearest, in CPU memory. `extra` is that of the format `fmt`."""
    out, dtype = devices.zeros(weight.shape, stored_dtype(to)), extra_dtype(to)
    fresh = None if dtype is None else devices.zeros(weight.shape, dtype)
    if weight.numel():
        shape, weight = tuple(weight.shape), devices.to_cpu(weight)
        extra = None if extra is None else devices.to_cpu(extra)
        # Every rule stores weights alike. "ema" has no states beside them.
        source, target = (Codec("ema/" + f, {}, shape, "weight") for f in (fmt, to))
        source.bind({"weight.extra": extra})
        target.bind({"weight.extra": fresh})
        target.write(WEIGHT, source.read(WEIGHT, weight.data_ptr()), out.data_ptr())
    return out, fresh


@torch.no_grad()
def convert(hypers, m, state, old):
    """Converts the states of member `m` to its recipe. Returns the tensors by key, the keys that
    become obsolete, and the weight, or None if it stays. Changes nothing yet.

    `old` is the recipe of `state`, or None if the states are plain. The residual of a weight that
    was converted to another dtype is not kept. Raises ValueError for a matrix that is cut over
    ranks.
    """
    if m.gathered and m.part.mesh is not None:
        raise ValueError(
            f"halfstep: the states of the matrix {m.name!r} are {old or 'plain'} and cannot be"
            f" converted to {m.recipe}, because it is a DTensor and {m.rule.name} steps matrices as"
            " a whole; load and save them once on one process"
        )
    names, part = list(m.rule.roles), None if m.gathered else m.part
    values, weight, held = {}, None, None
    now = devices.to_cpu(stored(m.p))  # everything is computed on the CPU
    if old is None:
        for key in names:
            if isinstance(state.get(key), torch.Tensor):
                value = devices.to_cpu(local(state[key])).to(torch.float32)
                values[key] = value.reshape(
                    m.whole if value.numel() == math.prod(m.whole) else (-1,)
                )
    else:
        source = Codec(old, hypers, m.whole, m.name, part=part)
        missing = {s.name for s in source.planes if s.key not in state}
        # A state that the saved optimizer's hyper-parameters did not need starts at zero.
        source.take(state)
        source.take_scalars(state)
        there = {s.name for s in source.planes} - missing
        for name in coarse_states(source.planes, state):
            values[name] = read_coarse(name, old, m.whole, m.name, state, part)
        for i, name in enumerate(names):
            if name in there:
                values[name] = source.read(2 + i)
        if "weight" in there and stored_dtype(old.split("/")[1]) == now.dtype:
            weight = source.read(0, now.data_ptr())
    target = Codec(m.recipe, hypers, m.whole, m.name, part=part)
    # The target has the planes of `m`. Its grids are those of a new handle.
    made = {
        s.key: (
            devices.zeros(s.shape, s.dtype)
            if s.name in values
            else s.initial(m.p, m.name, devices.HOST)
        )
        for s in m.planes
    }
    target.bind(made)
    for i, name in enumerate(names):
        if name in values and any(s.name == name for s in m.planes):
            target.write(2 + i, values[name])
    grids = [s.name + GRID for s in m.planes if s.grid]
    made.update((key, layout.number(1.0, key)) for key in grids)
    if weight is not None and "weight.extra" in made:
        held = now.clone()
        target.write(0, weight, held.data_ptr())
    obsolete = layout.keys_of(m.rule) - set(made)
    if old == m.recipe:  # only coarse states are converted
        coarse = coarse_states(m.planes, state)
        made = {
            key: value
            for key, value in made.items()
            if key.split(".")[0] in coarse or key not in state
        }
        obsolete = {name + end for name in coarse for end in ("", *layout.ENDS, GRID)} - set(made)
        held = None
    for s in m.planes:
        if s.key in made:
            made[s.key] = devices.place(made[s.key], m.kept)
    return made, obsolete, held


def create_state(m, states, hypers):
    """Makes what the state of a member lacks, or holds otherwise than its recipe. Returns the
    tensors by key, the keys to delete, and the weight, or None if it stays. Tensors are shards of a
    DTensor if the parameter is one."""
    made, obsolete, weight = _created(m, states.get(m.p) or {}, hypers)
    planes = {s.key: s for s in m.planes}
    with torch.no_grad():
        if m.kept != m.device:
            for key in planes:
                held = made[key] if key in made else local(states[m.p][key])
                if not devices.is_pinned(held):
                    made[key] = devices.pinned(held.shape, held.dtype).copy_(held)
        return (
            {key: m.wrap(planes.get(key), value) for key, value in made.items()},
            obsolete,
            weight,
        )


def _created(m, state, hypers):
    """Does the work of create_state() on local shards."""
    made, obsolete, weight = {}, set(), None
    old = layout.recipe_of(state, m.name)
    if old is not None and old.partition("/")[0] != m.rule.name:
        raise ValueError(
            f"halfstep: the states of parameter {m.name!r} are of the recipe {old!r}, and its group"
            f" is stepped by {m.rule.name} now: give it the rule that it had, or delete its state"
        )
    both = [s.name for s in m.planes if s.end == ".codes" and {s.name, s.key} <= state.keys()]
    if both:
        raise ValueError(
            f"halfstep: parameter {m.name!r} has both a state {both[0]!r} and its codes; delete one"
            f" of them, or write by optimizer.write_state(p, {both[0]!r}, values)"
        )
    has = any(key in state for key in layout.keys_of(m.rule))
    # torch's SGD and Muon save a momentum and no count. The count is then 1, because it matters
    # only that this is not the first step.
    steps = layout.step_count(state, m.name, int(has))
    if not layout.is_number(state.get("step"), "step"):
        made["step"] = layout.number(float(steps), "step")
    if old != m.recipe:
        made["recipe"] = layout.recipe_number(m.recipe)
    initial = {"id": layout.signed(m.id), **dict.fromkeys(layout.COUNTERS, steps)}
    for key, value in layout.repaired(state, layout.numbers_of(m.rule, m.planes), m.name):
        if key not in made:
            value = initial.get(key, layout.initial(key)) if value is None else value
            made[key] = layout.number(value, key)
    begins = (
        has and not steps and old is not None
    )  # until the first step, a copy of the weight is made anew
    if (
        has
        and old in (m.recipe, None)
        and not (begins and any(s.role == abi.ROLE_WEIGHT for s in m.planes))
        and all(s.key in state and s.fits(state[s.key], m.kept) for s in m.planes)
    ):
        return made, obsolete, weight
    if has and (old != m.recipe or coarse_states(m.planes, state)):
        planes, obsolete, weight = convert(hypers, m, state, old)
        made.update(planes)
        return made, obsolete, weight
    for s in m.planes:
        if s.key in state and not (begins and s.role == abi.ROLE_WEIGHT):
            if has and not s.fits(state[s.key], m.kept):
                moved = devices.place(adopt(state[s.key], s, m.name), m.kept)
                if moved is not state[s.key]:
                    made[s.key] = moved
        else:
            made[s.key] = s.initial(m.p, m.name, m.kept)
    return made, obsolete, weight
