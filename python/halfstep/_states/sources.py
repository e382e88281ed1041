"""Tensors of a checkpoint that are read when somebody asks for them, and only the part that this
rank needs. Tensors on the meta device stand for them until then."""

import contextlib
import math

import torch

from .._ranks import agreement
from .._tensors import matrices, sharding
from .._tensors.torch_private import box_of
from . import convert, layout

#: keys of a state that are cut as the parameter's memory is
_WEIGHTS = (layout.TRAINED, layout.TRAINED_EXTRA)


def slices(box):
    """Returns the slices of a box, which is (where it begins, its shape)."""
    return tuple(slice(first, first + n) for first, n in zip(*box))


def _common(box, other):
    """Returns the box that two boxes have in common, or None."""
    first = [max(pair) for pair in zip(box[0], other[0])]
    last = [min(a + n, b + m) for a, n, b, m in zip(*box, *other)]
    shape = [b - a for a, b in zip(first, last)]
    return None if any(n <= 0 for n in shape) else (first, shape)


class Sources:
    """Knows how to read what stand-ins stand for. Other tensors are what they are."""

    def __init__(self):
        self._readers = {}

    def stand_in(self, shape, dtype, read):
        """Returns a stand-in. read(box) returns what a box of the tensor holds."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._readers[id(tensor)] = tensor, read
        return tensor

    def box(self, value, box):
        """Returns what a box of a tensor holds, in memory of its own."""
        _, read = self._readers.get(id(value), (None, None))
        return value[slices(box)].clone() if read is None else read(box)

    def whole(self, value):
        """Returns the tensor that a stand-in stands for, or any other value itself."""
        if id(value) not in self._readers:
            return value
        return self.box(value, ([0] * value.dim(), tuple(value.shape)))

    def part(self, value, p, placements):
        """Returns this rank's part of a tensor that has these placements on the mesh of p."""
        shape, first = box_of(value.shape, p.device_mesh, placements)
        return sharding.like(p, self.box(value, (first, tuple(shape))), value.shape, placements)

    def joined(self, several, path):
        """Returns the state dictionary of several ranks, whose DTensors are put together when they
        are read. `several` has their state dictionaries by rank."""
        first, *others = (several[rank] for rank in sorted(several))
        if any(one["state"].keys() != first["state"].keys() for one in others):
            raise ValueError(
                f"halfstep: the files in {path} have states of other parameters on each rank, as a"
                " pipeline leaves them: give the path of one"
            )
        states = {}
        for key, state in first["state"].items():
            if isinstance(state, dict):
                flat = {rank: layout.flat(one["state"][key]) for rank, one in several.items()}
                states[key] = {
                    name: self._of_ranks(
                        {rank: held[name] for rank, held in flat.items() if name in held}, path
                    )
                    for name in layout.flat(state)
                }
        return {**first, "state": states}

    def _of_ranks(self, values, path):
        """Returns a value that each rank has saved its part of, or as it is."""
        value = next(iter(values.values()))
        if not sharding.is_divided(value):
            return sharding.local(value)
        parts = {}
        for rank, one in values.items():
            shape, first = box_of(one.shape, one.device_mesh, one.placements, rank)
            parts[tuple(first), tuple(shape)] = sharding.local(one)

        def read(box):
            found = torch.empty(box[1], dtype=value.dtype, device="cpu")
            missing = found.numel()
            for there, held in parts.items():
                both = _common(box, there)
                if both is not None:
                    at = [[a - b for a, b in zip(both[0], begin[0])] for begin in (box, there)]
                    found[slices((at[0], both[1]))] = held[slices((at[1], both[1]))]
                    missing -= math.prod(both[1])
            if missing:
                raise ValueError(
                    f"halfstep: the files in {path} lack parts of a state: copy those of all ranks"
                )
            return found

        return self.stand_in(value.shape, value.dtype, read)

    # ---- What this rank needs --------------------------------------------------------------------

    def state_of(self, groups, group, p, name, state):
        """Returns a saved state of a parameter: all of it, or this rank's part as DTensors."""
        rule, recipe = groups.row_of(group), layout.recipe_of(state, name)
        saved = (recipe or rule.name).partition("/")[0]
        if not sharding.is_divided(p) or not p.numel() or saved not in (rule.name, "adam", "adamw"):
            return {key: self.whole(value) for key, value in state.items()}
        how, here = matrices.how_of(group), sharding.local(p)
        part = sharding.part_of(p, name, groups.options.flat, rule.name, how)
        shape = matrices.lay_part(rule.name, p.shape, here.shape, how)
        shape = part.laid if part.gathered else shape
        codec = convert.Codec(
            recipe or rule.name, groups.options.hypers(group), shape, name, 1, part
        )
        planes = {s.key: (tuple(s.whole), s.placements) for s in codec.planes}
        own = tuple(p.shape), p.placements
        planes.update(dict.fromkeys(_WEIGHTS, (sharding.stored_whole(p), p.placements)))
        found = {}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                found[key] = self.whole(value)
            elif key == layout.HASHES:  # parts of rows and of vectors tell nothing of the whole
                if p.dim() > 1 and sharding.is_cut_by_rows(p):
                    found[key] = self.part(value, p, p.placements)
            else:
                whole, placements = planes.get(key, own)
                fits = tuple(value.shape) == whole
                found[key] = self.part(value, p, placements) if fits else self.whole(value)
        return found


@contextlib.contextmanager
def together(groups):
    """Makes ranks that share parameters load or refuse together. Yields a function that each of
    them calls when it has loaded. Raises there on all of them if one has failed."""
    settings, shared = groups.settings(), groups.param_groups
    divided, asked = any(map(sharding.is_divided, groups.params())), []

    def agree(*_):
        asked.append(True)
        if divided and not agreement.everywhere(settings, shared, True):
            raise ValueError(
                "halfstep: another rank cannot load its part of the states, and says why; nothing"
                " was loaded here either"
            )

    try:
        yield agree
    except BaseException:
        if divided and not asked:
            agreement.everywhere(settings, shared, False)
        raise
