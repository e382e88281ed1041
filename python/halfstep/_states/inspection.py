"""Shows what an optimizer stores: its memory, and its weights and states as fp32 numbers."""

import math

import torch

from .._library import calls
from .._library.abi import lib
from .._settings import naming
from .._tensors import devices, matrices, sharding
from .._tensors.parameters import PLAIN, stored_dtype
from .._tensors.sharding import decoded, local, stored
from .._tensors.torch_public import increment_versions
from . import layout
from .handles import Handle, read_rows, write_rows
from .members import declare
from .planes import STATE, WEIGHT


class Inspection:
    """Reports what is stored, and reads and writes it."""

    def __init__(self, parts):
        self.groups, self.names, self.placement = parts.groups, parts.names, parts.placement
        self.residuals, self.cache = parts.residuals, parts.cache

    # ---- Memory and recipes ----------------------------------------------------------------------

    def _declared(self, members):
        """Returns what declare() returns for some members, as Placement.describe() takes them.
        Allocates no states."""
        return declare(Handle(1, 0), self.groups.settings(), *self.placement.describe(members))

    def check_cuts(self, group_index):
        """Raises an error for a shard whose cut the formats of its parameter do not allow."""
        wanted = [
            (group_index, i, p, PLAIN[p.dtype])
            for i, p in enumerate(self.groups[group_index]["params"])
            if sharding.is_dtensor(p) and p.numel() and self.groups.takes_part(p)
        ]
        if wanted:
            self._declared(wanted)

    def survey(self):
        """Surveys all parameters, whether or not they have states yet. Returns the bytes by kind,
        the names of tensors too small for blocks, and lines about states in finer formats."""
        wanted, seen = [], set()
        for g, i, p in self.groups.members():
            if id(p) not in seen and p.numel() and self.groups.takes_part(p):
                seen.add(id(p))
                dtype = p.dtype if p.grad is None else p.grad.dtype
                wanted.append((g, i, p, PLAIN.get(dtype, PLAIN[p.dtype])))
        members, _, fallen = self._declared(wanted)
        memory = dict.fromkeys(("weights", "gradients", "extras", "states"), 0)
        for m in members:  # what this rank keeps of them
            memory["weights"] += stored(m.p).nbytes
            memory["gradients"] += local(m.p).numel() * stored_dtype(m.gradient).itemsize
            for s in m.planes:
                kind = "extras" if s.slot == WEIGHT else "states"
                memory[kind] += math.prod(s.shape) * s.dtype.itemsize
        precise = (m.recipe for m in members if any(s.precise for s in m.planes))
        return memory, fallen, layout.precise_states(precise)

    def recipe(self, p):
        """Returns the full recipe of a parameter."""
        return self.names.recipe(*self.groups.place_of(p))

    def scalar(self, p, name):
        """Returns a number that the rule keeps for a parameter."""
        m = self.cache.member(p)
        return calls.read_number(m.handle, m.index, m.rule, name)

    def text(self):
        """Returns the text of repr()."""
        taking_part = [(g, i, p) for g, i, p in self.groups.members() if self.groups.takes_part(p)]
        recipes = dict.fromkeys(self.names.recipe(g, i) for g, i, _ in taking_part)
        count = max(sum(local(p).numel() for _, _, p in taking_part), 1)
        memory, fallen, precise = self.survey()
        lines = [
            f"{self.groups.options.title} (",
            f"recipe: {', '.join(recipes)}",
            *self._by_rule(taking_part),
            (
                f"memory: {sum(memory.values()) / count:.3f} B/param (weights and their"
                f" extras {(memory['weights'] + memory['extras']) / count:.3f}, gradients"
                f" {memory['gradients'] / count:.3f}, states {memory['states'] / count:.3f})"
            ),
        ]
        shapes = {}
        for g, _, p in taking_part:
            rule, how = self.groups.row_of(self.groups[g]).name, matrices.how_of(self.groups[g])
            shapes.setdefault(rule, []).append(matrices.lay(rule, p.shape, how))
        taken = [text for rule, some in shapes.items() if (text := matrices.taken(rule, some))]
        if taken:
            lines.append(f"taken for matrices: {'; '.join(taken)}")
        if fallen:
            lines.append(f"too small for blocks, plain states: {naming.some(fallen, 8)}")
        lines += precise + layout.caveats(recipes)
        for i, group in enumerate(self.groups):
            lines.append(f"Parameter Group {i}")
            lines += [
                f"    {key}: {group[key]}"
                for key in sorted(group)
                if key not in ("params", "param_names")
            ]
        return "\n".join(lines + [")"])

    def _by_rule(self, members):
        """Returns a line for each rule with what it steps, if there are several. Names of matrices
        come first, because only they can be where nobody expects them."""
        found, members = {}, sorted(members, key=lambda member: member[2].dim() < 2)
        for g, i, p in members:
            found.setdefault(self.groups.row_of(self.groups[g]).label, []).append((g, i, p))
        return [
            f"{label}: {len(some)} tensors of {sum(p.numel() for _, _, p in some)} elements, "
            + naming.some([self.names.of(g, i) for g, i, _ in some], 8)
            for label, some in found.items()
            if len(found) > 1
        ]

    # ---- Reading ---------------------------------------------------------------------------------

    @staticmethod
    def _slot(rule, name):
        names = list(rule.roles)
        if name not in names:
            raise KeyError(
                f"halfstep: {rule.name} has no state {name!r}; it has {', '.join(names)}"
            )
        return STATE + names.index(name)

    def _read(self, m, function, *arguments):
        if m.gathered and arguments[-1] is not None:  # the address of a weight
            arguments = (*arguments[:-1], m.stage.weight(m))
        found = None
        with m.states(written=False):
            if not m.gathered or m.part.owned:
                found = read_rows(function, m.handle, m.index, m.whole, *arguments, rows=m.rows)
        if m.gathered:
            found = m.stage.tell(m, found)
        vector = found.shape != m.whole
        if m.gathered:
            found = found if vector else m.part.take(found).contiguous()
        found = devices.place(found, m.lies)
        return found if vector or m.part is None else m.part.like_parameter(found)

    def _read_by_weight(self, p, function, *arguments):
        self.residuals.notice(p)
        m = self.cache.member(p)
        weight = devices.place(devices.contiguous(stored(p)), m.device)
        return self._read(m, function, *arguments, weight.data_ptr())

    @torch.no_grad()
    def read_weight(self, p):
        """Returns the weight in fp32, with its residual or error code."""
        if p not in self.groups.state:
            return (decoded(p) if p.is_floating_point() else p.detach()).clone()
        return self._read_by_weight(p, lib.halfstep_read_slot, WEIGHT)

    @torch.no_grad()
    def read_average(self, p):
        """Returns the weight for evaluation in fp32."""
        if p not in self.groups.state:
            return self.read_weight(p)
        return self._read_by_weight(p, lib.halfstep_read_average)

    @torch.no_grad()
    def read_state(self, p, name):
        """Returns a state decoded to fp32."""
        return self._read_state(self.cache.member(p), name)

    def _read_state(self, m, name):
        return self._read(m, lib.halfstep_read_slot, self._slot(m.rule, name), None)

    def reader(self):
        """Returns read_state() for many calls, between which nothing changes."""
        engine = self.cache.current(decides=False)
        if any(map(self.cache.stale, engine.members)):
            engine = self.cache.build(decides=False)
        return lambda p, name: self._read_state(engine.member(p), name)

    # ---- Writing ---------------------------------------------------------------------------------

    def _write(self, m, slot, data, values):
        if m.gathered:
            values = values.full_tensor() if sharding.is_dtensor(values) else values
        elif m.part is not None:
            values = m.part.take(values)
        values = devices.to_cpu(values).to(torch.float32)
        if tuple(values.shape) != m.whole:
            raise ValueError(
                f"halfstep: parameter {m.name!r} has shape {m.whole}, not {tuple(values.shape)}"
            )
        if m.gathered and data is not None:  # the address of a weight
            data = m.stage.weight(m)
        with m.states():
            if not m.gathered or m.part.owned:
                write_rows(m.handle, m.index, slot, data, values, m.whole, m.rows)

    def _member_to_write(self, p):
        if p not in self.groups.state:
            self.cache.build({p: p.grad})
        return self.cache.member(p)

    @torch.no_grad()
    def write_weight(self, p, values):
        """Stores fp32 values as the weight, with its residual or error code."""
        m = self._member_to_write(p)
        here = stored(p)
        weight = devices.place(devices.contiguous(here), m.device)
        self._write(m, WEIGHT, weight.data_ptr(), values)
        if not m.gathered and weight.data_ptr() != here.data_ptr():
            here.copy_(weight)
        else:
            increment_versions([p])
        if p in self.cache.engine.guarded:
            self.residuals.wrote([p])

    @torch.no_grad()
    def write_state(self, p, name, values):
        """Stores fp32 values as a state, rounded to nearest."""
        m = self._member_to_write(p)
        self._write(m, self._slot(m.rule, name), None, values)
