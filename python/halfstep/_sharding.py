"""Parameters of which this process holds a part: DTensors, as FSDP2, HSDP and tensor parallelism
make them, and flat buffers.

The library takes a rectangle of a tensor's rows and columns, so a shard is no special case there.
What is here finds the rectangle, makes states that are sharded like their parameter, brings
gradients to its placements, and adds the statistics of the ranks between the halves of a step:
integers, so that any number of ranks in any order gives the sums of one process.

Nothing is communicated for plain tensors, unless the optimizer was given a `norm_group`.

Over 500 lines because where a shard lies, what its states are and what ranks tell each other follow
from one description of it.
"""

import ctypes
import hashlib
import math
import sys
import weakref

import torch

from . import _abi
from ._abi import check, lib

#: the fewest elements that the library takes as one row
_FLAT_ELEMENTS = 4096
#: numbers of the statistics before the flags of the tensors: the limbs of the sum of all squares
HEAD = int(lib.halfstep_round_statistics_count())
#: whether this process has met a DTensor among parameters: others are spared the question
seen = False
#: stands for the address of what has no elements, where a NULL would mean that there is none
_NOWHERE = ctypes.c_double()


def is_dtensor(tensor):
    """Without importing torch.distributed.tensor, which nobody who has a DTensor has to wait
    for."""
    module = sys.modules.get("torch.distributed.tensor")
    cls = getattr(module, "DTensor", None)
    return cls is not None and isinstance(tensor, cls)


def local(tensor):
    """What of a tensor lies in this process."""
    if not is_dtensor(tensor):
        return tensor
    held = tensor._local_tensor
    return held.wait() if hasattr(held, "wait") else held


def address(tensor):
    """Of its elements here; that of some other memory where it has none."""
    return local(tensor).data_ptr() or ctypes.addressof(_NOWHERE)


def _is_flat_parameter(p):
    module = sys.modules.get("torch.distributed.fsdp._flat_param")
    return module is not None and isinstance(p, module.FlatParameter)


def _is_part(p):
    """Whether a FlatParameter of FSDP1 holds less than the buffer of all its parameters."""
    whole = getattr(p, "_unpadded_unsharded_size", None)
    return whole is not None and whole.numel() != p.numel()


def _flat_identity(p, name):
    """The name of a shard of an FSDP1 buffer: that of the first parameter in it, and where in the
    buffer it begins. The same on every replica of the shard, and no other shard's."""
    offset = 0
    for fqn, info, numel in zip(p._fqns, getattr(p, "_shard_param_infos", ()), p._numels):
        if info.in_shard:
            return f"{fqn} of {name} from {offset + (info.intra_param_start_idx or 0)}"
        offset += numel
    return f"{name} from {offset}"  # nothing but padding


class Part:
    """How a parameter lies in the library: the whole as rows x length, and the rectangle of it that
    is here. `shape` and `rows` are those of the tensor here as streams_of() takes them, `groups`
    the process groups that it is divided over.
    """

    gathered = False
    __slots__ = (
        "ndim",
        "whole",
        "length",
        "first_row",
        "n_rows",
        "first_column",
        "n_columns",
        "shape",
        "rows",
        "mesh",
        "placements",
        "groups",
        "global_shape",
    )

    def __init__(self, p, name):
        self.mesh = None
        self.placements, self.groups, self.global_shape, self.shape = (
            (),
            (),
            tuple(p.shape),
            tuple(local(p).shape),
        )
        if not is_dtensor(p):  # one row
            self.ndim, self.whole, self.length, self.rows = 1, 1, p.numel(), 1
            self.first_row = self.n_rows = self.first_column = self.n_columns = 0
            return
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        self.mesh, self.placements = p.device_mesh, tuple(p.placements)
        for placement in self.placements:
            if placement.is_partial():
                raise ValueError(
                    f"halfstep: parameter {name!r} is a sum over ranks ({placement}); only Shard"
                    " and Replicate can be stepped"
                )
        self.groups = tuple(
            self.mesh.get_group(i)
            for i, placement in enumerate(self.placements)
            if not placement.is_replicate() and self.mesh.size(i) > 1
        )
        shape, offset = compute_local_shape_and_global_offset(p.shape, self.mesh, self.placements)
        if tuple(shape) != self.shape:
            raise ValueError(
                f"halfstep: parameter {name!r} of shape {self.global_shape} holds {self.shape} on"
                f" this rank, where its placements {self.placements} say {tuple(shape)}"
            )
        self._cut(tuple(shape), tuple(offset), name)

    def _cut(self, shape, offset, name):
        """The rectangle of a part, whose elements lie one after another."""
        whole = self.global_shape
        cut = [d for d in range(len(whole)) if shape[d] != whole[d]]
        if 0 not in shape and any(shape[d] != 1 for d in range(1, max(cut, default=0))):
            raise ValueError(
                f"halfstep: parameter {name!r} of shape {whole} is cut along dimension {max(cut)}"
                f" ({self.placements}), which is no run of columns; shard it along dimension 0 or 1"
            )
        self.ndim = len(whole)
        self.whole = whole[0] if whole else 1
        strides = [1] * len(whole)
        for d in range(len(whole) - 2, -1, -1):
            strides[d] = strides[d + 1] * whole[d + 1]
        self.length = strides[0] if whole else 1
        self.first_row, self.n_rows = (offset[0], shape[0]) if whole else (0, 1)
        self.first_column = sum(offset[d] * strides[d] for d in range(1, len(whole)))
        self.n_columns = 1
        for size in shape[1:]:
            self.n_columns *= size
        if 0 in shape:  # not all zero, which would mean the whole
            self.first_row, self.n_rows, self.first_column, self.n_columns = (
                self.whole,
                0,
                0,
                self.length,
            )
        self.rows = shape[0] if shape else 1

    @property
    def divided(self):
        return bool(self.groups)

    @property
    def fields(self):
        """Of the library's structure."""
        return {
            "ndim": self.ndim,
            "rows": self.whole,
            "row_length": self.length,
            "first_row": self.first_row,
            "n_rows": self.n_rows,
            "first_column": self.first_column,
            "n_columns": self.n_columns,
        }

    def whole_fields(self):
        return {"ndim": self.ndim, "rows": self.whole, "row_length": self.length}

    # ---- States ----------------------------------------------------------------------------------

    def place(self, streams, whole, name):
        """Gives the streams of this part their shapes: `whole` are those of the whole tensor."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        for s, all_of_it in zip(streams, whole):
            shape, held = all_of_it.shape, 1
            for size in s.shape:
                held *= size
            flat_total = 1
            for size in shape:
                flat_total *= size
            if shape == self.global_shape:
                placements = self.placements
            elif len(shape) == 2:
                placements = tuple(
                    _along(x, min(x.dim, 1)) if x.is_shard() or hasattr(x, "dim") else x
                    for x in self.placements
                )
            elif flat_total == 1:
                placements = (Replicate(),) * len(self.placements)
            else:
                placements = tuple(Shard(0) if hasattr(x, "dim") else x for x in self.placements)
            here = tuple(compute_local_shape_and_global_offset(shape, self.mesh, placements)[0])
            count = 1
            for size in here:
                count *= size
            if count != held and not (flat_total == 1 and held == 0):
                raise ValueError(
                    f"halfstep: {s.key} of parameter {name!r}, {shape} as a whole, is {held}"
                    " elements on this rank, which "
                    f'no placement gives ({here} with {placements}): choose states="int8" or'
                    ' "int4", whose blocks '
                    "follow the rows, or shard evenly"
                )
            s.whole, s.placements, s.shape = shape, placements, here

    def wrap(self, stream, tensor):
        """A tensor of this rank as the state that is kept."""
        if self.mesh is None or stream is None:
            return tensor
        return self._dtensor(tensor, stream.placements, stream.whole)

    def like_parameter(self, tensor):
        """The same of elements in the parameter's own shape."""
        return (
            tensor
            if self.mesh is None
            else self._dtensor(tensor, self.placements, self.global_shape)
        )

    def _dtensor(self, tensor, placements, shape):
        from torch.distributed.tensor import DTensor

        strides = [1] * len(shape)
        for d in range(len(shape) - 2, -1, -1):
            strides[d] = strides[d + 1] * max(shape[d + 1], 1)
        return DTensor.from_local(
            tensor,
            self.mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(strides),
        )

    def take(self, values):
        """This rank's part of values of the whole tensor, or of a DTensor of any placements."""
        if self.mesh is None:
            return values
        if is_dtensor(values):
            return local(values.redistribute(self.mesh, self.placements))
        if tuple(values.shape) != self.global_shape:
            return values
        if 0 in self.shape:
            return values.new_empty(self.shape)
        grid = values.reshape(self.whole, self.length)
        rows = slice(self.first_row, self.first_row + self.n_rows)
        return grid[rows, self.first_column : self.first_column + self.n_columns].reshape(
            self.shape
        )


def _along(placement, dim):
    """The same placement along another dimension."""
    factor = getattr(placement, "split_factor", None)
    return type(placement)(dim) if factor is None else type(placement)(dim, split_factor=factor)


class Gathered(Part):
    """A part of a matrix that a rule steps as a whole: the library holds all of it on every rank,
    which is gathered for each step and cut again after it. The states that are kept are sharded
    like the parameter."""

    __slots__ = ()
    gathered = True

    def __init__(self, p, name):
        super().__init__(p, name)
        self.groups = ()  # all ranks see all of the gradient: there is nothing to add
        self.rows = None  # which the shape of the whole says

    @property
    def fields(self):
        return self.whole_fields()

    def place(self, streams, whole=None, name=None):
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        for s in streams:
            s.whole = s.shape
            s.placements = (
                self.placements
                if s.shape == self.global_shape
                else tuple(
                    (
                        (_along(x, min(x.dim, len(s.whole) - 1)) if len(s.whole) == 2 else Shard(0))
                        if hasattr(x, "dim")
                        else x
                    )
                    for x in self.placements
                )
            )
            s.shape = tuple(
                compute_local_shape_and_global_offset(s.whole, self.mesh, s.placements)[0]
            )

    def gather(self, streams, state):
        """The whole of each state, by key."""
        return {s.key: state[s.key].full_tensor() for s in streams}

    def scatter(self, whole, kept):
        """Puts this rank's part of a tensor of all elements where it is kept."""
        from torch.distributed.tensor import DTensor, Replicate

        full = DTensor.from_local(
            whole, self.mesh, (Replicate(),) * len(kept.placements), run_check=False
        )
        local(kept).copy_(local(full.redistribute(placements=kept.placements)))


def like(p, tensor):
    """A tensor of this process as the part here of one that is cut like p."""
    if not is_dtensor(p):
        return tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def refuse(params, what, advice):
    """Raises ValueError for what cannot be done with DTensors."""
    if any(map(is_dtensor, params)):
        raise ValueError(
            f"halfstep: {what} cannot be had of DTensors, of which each rank holds a part: {advice}"
        )


def is_gathered(rule, p):
    """Whether a rule steps this parameter as a matrix of which a part is here."""
    return is_dtensor(p) and p.dim() > 1 and _abi.rules[rule].matrix


def part_of(p, name, flat=False, rule=None):
    """The Part of a parameter, or None for what simply lies there whole."""
    if is_dtensor(p):
        global seen
        seen = True
        return (Gathered if rule is not None and is_gathered(rule, p) else Part)(p, name)
    return Part(p, name) if is_flat(p, flat) else None


def is_flat(p, flat):
    """Whether a parameter is a flat buffer of many, by itself or by the option of its optimizer."""
    return p.dim() == 1 and p.numel() >= _FLAT_ELEMENTS and bool(flat or _is_flat_parameter(p))


def is_sharded_buffer(p):
    """Whether this is a shard of a buffer of FSDP1, which says itself which."""
    return _is_flat_parameter(p) and _is_part(p)


def name_here(optimizer, p, name):
    """What keys the random bits of a parameter of this name: shards of flat buffers, whose elements
    count from 0 on every rank, have names of their own."""
    if is_sharded_buffer(p):
        return _flat_identity(p, name)
    if (
        optimizer.flat == "shards"
        and p.dim() == 1
        and p.numel() >= _FLAT_ELEMENTS
        and torch.distributed.is_initialized()
    ):
        # The group of the shards, where it is known, has replicas round alike.
        return f"{name} of rank {torch.distributed.get_rank(group_of(optimizer.norm_group))}"
    return name


def place_here(optimizer, p, text):
    """The same for a parameter without a name, which its place stands for: places are alike on the
    ranks of a norm group, which hold different parameters there."""
    group = group_of(optimizer.norm_group)
    if group is not None and not is_dtensor(p):
        return f"{text} of rank {torch.distributed.get_rank(group)}"
    return name_here(optimizer, p, text)


def advice(error, part):
    """What helps against a cut that the library refuses."""
    if part is None or not part.divided or not isinstance(error, _abi.HalfstepValueError):
        return error
    if error.code not in (_abi.ERROR_SHAPE, _abi.ERROR_UNSUPPORTED):
        return error
    text = (
        "; shard it along dimension 0 (fully_shard's shard_placement_fn), in sizes that are whole"
        ' blocks, or keep states in a format without blocks across the cut: states="bf16-sr"'
    )
    if error.code == _abi.ERROR_UNSUPPORTED:
        text = "; leave such parameters whole (Replicate), or give them to another rule"
    return _abi.HalfstepValueError(str(error) + text, error.code)


def gradient_of(p, grad, name):
    """The gradient of a DTensor in the parameter's placements. Tensor parallelism leaves others:
    Replicate beside a sharded embedding, Partial beside a norm of sequence-parallel regions."""
    if not is_dtensor(p) or grad is None:
        return grad
    if not is_dtensor(grad):
        if grad.shape == local(p).shape and not any(hasattr(x, "dim") for x in p.placements):
            return grad
        raise TypeError(
            f"halfstep: the gradient of {name!r} is a plain tensor, the parameter a DTensor"
        )
    if grad.device_mesh != p.device_mesh:
        raise ValueError(
            f"halfstep: the gradient of {name!r} lies on the mesh {grad.device_mesh}, the parameter"
            f" on {p.device_mesh}"
        )
    if tuple(grad.placements) != tuple(p.placements):
        grad = grad.redistribute(p.device_mesh, p.placements)
    return grad


# ---- What ranks tell one another -----------------------------------------------------------------


def _key(groups):
    return frozenset(tuple(torch.distributed.get_process_group_ranks(g)) for g in groups)


class Class:
    """The parameters of an optimizer that are divided over the same ranks, in the order of its
    groups."""

    __slots__ = ("groups", "params")

    def __init__(self, groups):
        self.groups, self.params = groups, []


def classes_of(optimizer, gathered=True):
    """The classes of all parameters, in an order that all ranks agree on; first those that nothing
    is divided of. gathered: those that are gathered for each step count as divided, too."""
    found, seen = {frozenset(): Class(())}, set()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) in seen:
                continue
            seen.add(id(p))
            groups = ()
            if is_dtensor(p) and (gathered or not is_gathered(optimizer.rule, p)):
                groups = tuple(
                    p.device_mesh.get_group(i)
                    for i, x in enumerate(p.placements)
                    if hasattr(x, "dim") and p.device_mesh.size(i) > 1
                )
            found.setdefault(_key(groups) if groups else frozenset(), Class(groups)).params.append(
                p
            )
    return list(found.values())


def _device(group):
    """Where tensors must lie for a group to add them."""
    devices = {d.type for d in group._device_types} if hasattr(group, "_device_types") else {"cpu"}
    return "cpu" if "cpu" in devices or not devices else sorted(devices)[0]


def add_up(numbers, groups, op=None):
    """The sum of int64 tensors over groups, one after another: over the product of their ranks."""
    dist = torch.distributed
    for group in groups:
        device = _device(group)
        there = numbers if device == "cpu" else numbers.to(device)
        dist.all_reduce(there, op=op or dist.ReduceOp.SUM, group=group)
        if there is not numbers:
            numbers.copy_(there)


class Ranks:
    """What the handles of an optimizer, and other ranks, have to agree on in a step: one norm and
    one verdict. Made anew with the handles.

    Statistics of all handles are one vector here: sums of squares, a flag for each member, and the
    sums of the members' rules.
    """

    def __init__(self, optimizer, engine):
        self.classes = classes_of(optimizer, gathered=False)
        self.divided = [c for c in self.classes if c.groups]
        self.norm_group = group_of(optimizer.norm_group)
        self.engine = weakref.proxy(engine)
        self.index_of, self.members = engine.index_of, engine.members
        self.n = len(self.members)
        #: how many sums of the rule are over all tensors, of every handle and of the norm group
        self.totals = engine.rule.totals
        self.sums = HEAD + self.n
        #: of a rule with such sums: the numbers of groups that share them, each member's among
        #: these, and for each part and number the
        #: first member; what each number's scalars are here or elsewhere
        self.numbers = (
            sorted({number_of(group) for group in optimizer.param_groups}) if self.totals else []
        )
        self.rows = [
            self.numbers.index(number_of(optimizer.param_groups[m.group]))
            for m in self.members
            if self.totals
        ]
        self.firsts = {}
        for i in reversed(range(self.n if self.totals else 0)):
            self.firsts[self.members[i].handle.value, self.rows[i]] = i
        self.estimates = {}
        #: of each handle: where its flags and its sums are; of each member: where its sums are, and
        #: how many
        self.slices, self.places, at = [], [], self.sums
        for part in engine.parts:
            first, summed = (
                at,
                int(lib.halfstep_statistics_count(part.handle))
                > int(lib.halfstep_norms_offset(part.handle)),
            )
            for i in range(part.n):
                many = (
                    int(
                        lib.halfstep_tensor_statistics_count(part.handle, i)
                        - lib.halfstep_tensor_norms_offset()
                    )
                    if summed
                    else 0
                )
                self.places.append((at, many))
                at += many
            self.slices.append(
                (slice(HEAD + part.first, HEAD + part.first + part.n), slice(first, at))
            )
        self.count = at
        judged = optimizer.clip_norm or optimizer.scan in (None, "scan") or engine.rule.totals
        shards = next((m for m in engine.members if is_sharded_buffer(m.p)), None)
        if shards is not None and self.norm_group is None and judged:
            raise ValueError(
                f"halfstep: parameter {shards.name!r} is a shard of an FSDP1 buffer, and this rank"
                " cannot know the norm of the others nor whether they are finite: give"
                " norm_group=, the process group of the shards (True: all ranks)"
            )

    @property
    def needed(self):
        """Whether other ranks have a say."""
        return bool(self.divided) or self.norm_group is not None

    def _members(self, cls):
        return [(row, self.index_of[p]) for row, p in enumerate(cls.params) if p in self.index_of]

    def _share_flags(self, cls, statistics, gradients):
        """Adds limbs and flags over the ranks of a class; and looks whether they all gave the same
        gradients."""
        members = self._members(cls)
        size = len(cls.params)
        packed = torch.zeros(HEAD + 2 * size, dtype=torch.int64, device="cpu")
        packed[:HEAD] = statistics[:HEAD]
        for row, i in members:
            packed[HEAD + row] = statistics[HEAD + i]
            packed[HEAD + size + row] = int(bool(gradients[i]))
        add_up(packed, cls.groups)
        ranks = 1
        for group in cls.groups:
            ranks *= torch.distributed.get_world_size(group)
        names = {m.p: m.name for m in self.members}
        for row, p in enumerate(cls.params):
            if int(packed[HEAD + size + row]) not in (0, ranks):
                raise RuntimeError(
                    f"halfstep: parameter {names.get(p, row)!r} has a gradient on "
                    f"{int(packed[HEAD + size + row])} of the {ranks} ranks that it is divided over"
                )
        statistics[:HEAD] = packed[:HEAD]
        for row, i in members:
            statistics[HEAD + i] = packed[HEAD + row]

    def _share_sums(self, statistics):
        for cls in self.divided:
            found = [self.places[i] for _, i in self._members(cls) if self.places[i][1]]
            if found:
                packed = torch.cat([statistics[at : at + many] for at, many in found])
                add_up(packed, cls.groups)
                for (at, many), piece in zip(found, packed.split([many for _, many in found])):
                    statistics[at : at + many] = piece

    def _add_totals(self, statistics, gradients):
        """The sums over all tensors, of every handle and rank: one member of each handle has them,
        as halfstep_step_norms() says."""
        sums = torch.zeros(len(self.numbers), self.totals * HEAD, dtype=torch.int64, device="cpu")
        for i, row in enumerate(self.rows):
            own = statistics[self.places[i][0] :][: self.totals * HEAD]
            sums[row] += own
            own.zero_()
        if self.norm_group is not None:
            add_up(sums, (self.norm_group,))
        for (_, row), i in self.firsts.items():
            statistics[self.places[i][0] :][: self.totals * HEAD] = sums[row]

    def _scalars(self, i):
        return [read_scalar(self.members[i], name) for name in self.engine.rule.scalars]

    def _share_estimates(self):
        """Gives every handle, of every rank, the scalars of the one that has come furthest: a
        device or a rank may have had nothing to step until now."""
        found = torch.full(
            (len(self.numbers), len(self.engine.rule.scalars)),
            -torch.inf,
            dtype=torch.float64,
            device="cpu",
        )
        own = {key: self._scalars(i) for key, i in self.firsts.items()}
        for (_, row), scalars in own.items():
            if scalars[0] > max(found[row, 0], 0.0):
                found[row] = torch.tensor(scalars, dtype=torch.float64, device="cpu")
        if self.norm_group is not None:
            ordered = in_order(found.view(torch.int64))
            add_up(ordered, (self.norm_group,), torch.distributed.ReduceOp.MAX)
            found = in_order(ordered).view(torch.float64)
        for row, scalars in enumerate(found.tolist()):
            if scalars[0] == -math.inf:
                continue
            self.estimates[self.numbers[row]] = scalars[0]
            for key, i in self.firsts.items():
                m = self.members[i]
                for name, value in zip(self.engine.rule.scalars, scalars):
                    if key[1] == row and own[key] != scalars:
                        check(
                            lib.halfstep_set_scalar(m.handle, m.index, name.encode(), value),
                            m.handle,
                        )

    def tell_estimates(self, groups):
        """Keeps `d` of the groups current."""
        for (_, row), i in self.firsts.items():
            self.estimates[self.numbers[row]] = read_scalar(self.members[i], "d")
        for group in groups:
            group["d"] = self.estimates.get(number_of(group)) or group["d0"]

    def _begin(self, gradients, micro):
        """The statistics of some gradients, as they are here."""
        call = lib.halfstep_accumulate_states_begin if micro else lib.halfstep_step_begin
        found = torch.zeros(self.count, dtype=torch.int64, device="cpu")
        for part, (flags, sums) in zip(self.engine.parts, self.slices):
            own = torch.zeros(
                HEAD + part.n + sums.stop - sums.start, dtype=torch.int64, device="cpu"
            )
            check(call(part.handle, part.slice(gradients), own.data_ptr()), part.handle)
            found[:HEAD] += own[:HEAD]
            found[flags] = own[HEAD : HEAD + part.n]
        return found

    def step(self, weights, gradients, micro=False, whole=True):
        """The call of a whole step, or of a micro-batch: its code and the handle that knows why;
        None in place of the code where ranks of the norm group refuse it and this one would not.
        whole: a gradient that is not finite refuses all of it.
        """
        parts, total = self.engine.parts, torch.zeros(self.count, dtype=torch.int64, device="cpu")
        for stage in [part.stage for part in parts if part.stage is not None][
            :2
        ]:  # while gradients are looked at
            stage.begin()
        for cls in self.classes:
            if not cls.params:
                continue
            some = gradients
            if self.divided:
                some = (ctypes.c_void_p * self.n)()
                for _, i in self._members(cls):
                    some[i] = gradients[i]
            statistics = self._begin(some, micro)
            if cls.groups:
                self._share_flags(cls, statistics, gradients)
            total += statistics
        if self.norm_group is not None:
            packed = torch.cat([total[:HEAD], (total[HEAD : self.sums] != 0).sum().view(1)])
            own = int(packed[HEAD])
            add_up(packed, (self.norm_group,))
            total[:HEAD] = packed[:HEAD]
            if int(packed[HEAD]) and not own:
                return None, parts[0].handle
        refusing = [bool(total[flags].any()) for flags, _ in self.slices]
        if whole and any(refusing):  # which counts once, however many handles see why
            first = refusing.index(True)
            chosen = [(parts[first], *self.slices[first])]
        else:
            whole, chosen = False, [(part, *where) for part, where in zip(parts, self.slices)]

        def statistics_of(flags, sums):
            return torch.cat([total[:HEAD], total[flags], total[sums]])

        totals = self.totals and not whole and not micro
        if totals and (self.norm_group is not None or len(parts) > 1):
            self._share_estimates()
        if totals or (self.divided and self.count > self.sums and not micro):
            for part, flags, sums in chosen:
                own = statistics_of(flags, sums)
                with part.states(not whole, False):
                    check(
                        lib.halfstep_step_norms(
                            part.handle, part.slice(weights), part.slice(gradients), own.data_ptr()
                        ),
                        part.handle,
                    )
                total[sums] = own[HEAD + part.n :]
            self._share_sums(total)
            if totals:
                self._add_totals(total, gradients)
        code = _abi.OK, parts[0].handle
        for part, flags, sums in chosen:
            own = statistics_of(flags, sums)
            with part.states(not whole):
                given = (
                    lib.halfstep_accumulate_states_finish(
                        part.handle, part.slice(gradients), own.data_ptr()
                    )
                    if micro
                    else lib.halfstep_step_finish(
                        part.handle, part.slice(weights), part.slice(gradients), own.data_ptr()
                    )
                )
            if given == _abi.OK and part.asynchronous and own[HEAD : HEAD + part.n].any():
                given = lib.halfstep_synchronize(part.handle)
            if given == _abi.NONFINITE:
                code = given, part.handle
            else:
                check(given, part.handle)
        return code

    def step_one(self, p, weight, gradient, micro):
        """The same of one tensor, in release."""
        m = self.members[self.index_of[p]]
        handle, i = m.handle, m.index
        groups = next((c.groups for c in self.classes if any(q is p for q in c.params)), ())
        statistics = torch.zeros(
            int(lib.halfstep_tensor_statistics_count(handle, i)), dtype=torch.int64, device="cpu"
        )
        kind = "halfstep_accumulate_states_tensor" if micro else "halfstep_step_tensor"
        check(getattr(lib, kind + "_begin")(handle, i, gradient, statistics.data_ptr()), handle)
        add_up(statistics, groups)
        if micro:
            return lib.halfstep_accumulate_states_tensor_finish(
                handle, i, gradient, statistics.data_ptr()
            )
        offset = int(lib.halfstep_tensor_norms_offset())
        if len(statistics) > offset:
            check(
                lib.halfstep_step_tensor_norms(handle, i, weight, gradient, statistics.data_ptr()),
                handle,
            )
            sums = statistics[offset:].clone()
            add_up(sums, groups)
            statistics[offset:] = sums
        return lib.halfstep_step_tensor_finish(handle, i, weight, gradient, statistics.data_ptr())

    def end_round(self):
        if len([c for c in self.classes if c.params]) > 1:
            raise RuntimeError(
                "halfstep: in release the norm of a round cannot be taken over parameters of"
                ' several meshes; use clip="per-tensor", or one mesh for all'
            )
        total = torch.zeros(HEAD, dtype=torch.int64, device="cpu")
        for part in self.engine.parts:
            statistics = torch.zeros_like(total)
            check(lib.halfstep_end_round_begin(part.handle, statistics.data_ptr()), part.handle)
            total += statistics
        for cls in self.classes:
            if cls.params:
                add_up(total, cls.groups)
        if self.norm_group is not None:
            add_up(total, (self.norm_group,))
        code = _abi.OK
        for part in self.engine.parts:
            given = lib.halfstep_end_round_finish(part.handle, total.data_ptr())
            code = code or given
        return code


def number_of(group):
    """What groups have in common that share the sums of a rule over all tensors."""
    return float(group.get("d_group", 0))


def read_scalar(m, name):
    value = ctypes.c_double()
    check(lib.halfstep_get_scalar(m.handle, m.index, name.encode(), ctypes.byref(value)), m.handle)
    return value.value


def in_order(bits):
    """Bits of doubles as integers in the order of the doubles, and back."""
    return torch.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)


def group_of(norm_group):
    """A process group of the option; True is all ranks."""
    if norm_group is None or norm_group is False:
        return None
    return torch.distributed.group.WORLD if norm_group is True else norm_group


def everywhere(optimizer, value):
    """Whether a condition holds on all ranks that share the parameters of an optimizer. All of them
    must ask."""
    answer = torch.tensor([int(not value)], dtype=torch.int64, device="cpu")
    for cls in classes_of(optimizer):
        add_up(answer, cls.groups)
    group = group_of(optimizer.norm_group)
    if group is not None:
        add_up(answer, (group,))
    return not int(answer)


def _digest(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def agree(optimizer):
    """Raises on every rank, naming what differs, where ranks that share parameters do not agree on
    seed, generator, recipes or ids, or ranks of one norm_group on rule, seed, generator, scan or
    clip_norm. Where nothing differs it costs one number for each group of ranks.
    """
    identities = optimizer._identities(
        [p for group in optimizer.param_groups for p in group["params"]]
    )
    common = {
        "rule": optimizer.rule,
        "seed": str(optimizer.seed),
        "generator": str(optimizer.generator),
        "scan": str(optimizer.scan),
        "clip_norm": str(optimizer.clip_norm),
    }
    if _abi.rules[optimizer.rule].totals:
        common["d_group"] = str(sorted({number_of(group) for group in optimizer.param_groups}))
    group = group_of(optimizer.norm_group)
    if group is not None:  # whose ranks hold other parameters each
        _compare(common, (group,), "have one norm_group")
    for cls in classes_of(optimizer):
        if not cls.groups:
            continue
        known = {id(p) for p in cls.params}
        told, place = dict(common), 0
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if id(p) in known:
                    told[f"recipe of parameter {place}"] = optimizer._full_recipe(g, i) + (
                        ", cautious" if group.get("cautious") else ""
                    )
                    told[f"id of parameter {place}"] = (
                        f"{identities[p]:016x} ({optimizer._name_of(g, i)})"
                    )
                    place += 1
        _compare(told, cls.groups, "share parameters")


def _compare(told, groups, who):
    """Raises on every rank of the groups, naming what differs, where they do not say the same."""
    dist = torch.distributed
    number = _digest(repr(sorted(told.items())))
    both = torch.tensor([number, -number], dtype=torch.int64, device="cpu")
    add_up(both, groups, dist.ReduceOp.MAX)
    # All ranks look alike at the maximum of a number and of its negative, so all of them raise or
    # none does.
    if int(both[0]) == -int(both[1]):
        return
    everyone = [(dist.get_rank(), told)]
    for group in groups:
        lists = [None] * dist.get_world_size(group)
        dist.all_gather_object(lists, everyone, group=group)
        everyone = [pair for some in lists for pair in some]
    for key in sorted(set().union(*(other for _, other in everyone))):
        values = {
            rank: other.get(key, "nothing")
            for rank, other in sorted(everyone, key=lambda pair: pair[0])
        }
        if len(set(values.values())) > 1:
            raise RuntimeError(
                f"halfstep: ranks that {who} disagree about the {key}: "
                + ", ".join(f"{value} on rank {rank}" for rank, value in values.items())
            )
