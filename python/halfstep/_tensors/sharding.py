"""Parameters that this process holds a part of: DTensors, as FSDP2, HSDP and tensor parallelism
make them, and flat buffers.

The library takes a rectangle of a tensor's rows and columns, so a shard is no special case there.
This file finds the rectangle, makes states that are sharded like their parameter, and brings
gradients to its placements. The communication between ranks is in _ranks/agreement.py.
"""

import ctypes
import math
import sys

import torch

from .._library import abi
from . import matrices, torch_private

#: the fewest elements that the library takes as one row
_FLAT_ELEMENTS = 4096
#: True once this process has met a DTensor or 8-bit weights among parameters; until then checks are
#: spared
seen = False
#: stands for the address of a tensor without elements, because NULL would mean no tensor
_NOWHERE = ctypes.c_double()


def is_dtensor(tensor):
    """Returns True for a DTensor. Does not import torch.distributed.tensor, because whoever has a
    DTensor has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    cls = getattr(module, "DTensor", None)
    return cls is not None and isinstance(tensor, cls)


def is_divided(tensor):
    """Returns True for a DTensor of several ranks."""
    return is_dtensor(tensor) and tensor.device_mesh.size() > 1


def local(tensor):
    """Returns the part of a tensor in this process."""
    if not is_dtensor(tensor):
        return tensor
    held = torch_private.local_part(tensor)
    return held.wait() if hasattr(held, "wait") else held


def is_packed(tensor):
    """Returns True for 8-bit weights, which are bytes behind a tensor without memory."""
    return hasattr(type(local(tensor)), "packed")


def stored(tensor):
    """Returns the tensor that has the memory of a tensor's part in this process: the bytes of 8-bit
    weights, and any other part itself."""
    held = local(tensor)
    return held.packed if hasattr(type(held), "packed") else held


def stored_whole(p):
    """Returns the shape that stored() has for the whole of a parameter."""
    return (p.shape[0], stored(p).shape[1]) if is_packed(p) else tuple(p.shape)


def copy_of(p):
    """Returns a copy of stored(), cut over ranks as the parameter is."""
    if not is_packed(p):
        return p.detach().clone()
    copy = stored(p).detach().clone()
    return _dtensor(copy, p.device_mesh, p.placements, stored_whole(p)) if is_dtensor(p) else copy


def decoded(p):
    """Returns a weight as an ordinary fp32 tensor, cut over ranks as the parameter is. A weight
    that is one already shares its memory."""
    if not is_packed(p):
        return p.detach().float()
    return like(p, local(p).detach().dequantize(torch.float32))


def address(tensor):
    """Returns the address of a tensor's elements here, or of other memory if it has none."""
    return stored(tensor).data_ptr() or ctypes.addressof(_NOWHERE)


def _is_flat_parameter(p):
    module = sys.modules.get("torch.distributed.fsdp")
    cls = getattr(module, "FlatParameter", None)
    return cls is not None and isinstance(p, cls)


def _strides(shape):
    """Returns the strides of a tensor of this shape in memory order."""
    return torch.empty(shape, dtype=torch.uint8, device="meta").stride()


def _flat_identity(p, name):
    """Returns the name of a shard of an FSDP1 buffer: the first parameter in it, and where in the
    buffer it begins. All replicas of the shard have this name, and no other shard has it."""
    offset = 0
    for fqn, numel, start in torch_private.parts_of(p):
        if start is not None:
            return f"{fqn} of {name} from {offset + start}"
        offset += numel
    return f"{name} from {offset}"  # nothing but padding


class Part:
    """How a parameter lies in the library: the whole as rows x length, and the rectangle of it that
    is here. `shape` and `rows` are those of the tensor here, as planes_of() takes them. `laid` is
    the global shape as the library takes it. `divided`: other ranks hold other parts."""

    gathered = divided = False

    def __init__(self, p, name, laid):
        self.mesh, self.laid = None, laid
        self.placements, self.global_shape = (), tuple(p.shape)
        self.shape = tuple(local(p).shape)
        if not is_dtensor(p):  # a flat buffer, one row
            self.ndim, self.whole, self.length, self.rows = 1, 1, p.numel(), 1
            self.first_row = self.n_rows = self.first_column = self.n_columns = 0
            return
        self.mesh, self.placements = p.device_mesh, tuple(p.placements)
        for placement in self.placements:
            if placement.is_partial():
                raise ValueError(
                    f"halfstep: parameter {name!r} is a sum over ranks ({placement}); only Shard"
                    " and Replicate can be stepped: call redistribute() first"
                )
        self.divided = any(
            not placement.is_replicate() and self.mesh.size(i) > 1
            for i, placement in enumerate(self.placements)
        )
        shape, offset = torch_private.box_of(p.shape, self.mesh, self.placements)
        if tuple(shape) != self.shape:
            raise ValueError(
                f"halfstep: parameter {name!r} of shape {self.global_shape} holds {self.shape} on"
                f" this rank, where its placements {self.placements} say {tuple(shape)}; give"
                " uneven shards their size by DTensor.from_local(shape=, stride=)"
            )
        self._cut(tuple(shape), tuple(offset), name)

    def _cut(self, shape, offset, name):
        """Finds the rectangle of a shard. Fails if its elements are not a run of columns."""
        whole = self.global_shape if self.gathered else self.laid
        cut = [d for d in range(len(whole)) if shape[d] != whole[d]]
        if 0 not in shape and any(shape[d] != 1 for d in range(1, max(cut, default=0))):
            raise ValueError(
                f"halfstep: parameter {name!r} of shape {whole} is cut along dimension {max(cut)}"
                f" ({self.placements}), not into ranges of columns; shard it along dimension 0 or 1"
            )
        self.whole, self.length = matrices.rows_of(whole)
        each = (
            self.whole // whole[0] if whole and whole[0] else 1
        )  # rows of an index of dimension 0
        self.ndim, self.rows = len(whole), each * shape[0] if shape else 1
        if 0 in shape:  # not all zero, because that would mean the whole
            self.first_row, self.n_rows = self.whole, 0
            self.first_column, self.n_columns = 0, self.length
            return
        self.first_row, self.n_rows = (each * offset[0], each * shape[0]) if whole else (0, 1)
        self.first_column = sum(at * step for at, step in zip(offset[1:], _strides(whole)[1:]))
        self.n_columns = math.prod(shape[1:]) // each

    @property
    def fields(self):
        """The fields of the library's tensor structure."""
        return {
            **self.whole_fields(),
            "first_row": self.first_row,
            "n_rows": self.n_rows,
            "first_column": self.first_column,
            "n_columns": self.n_columns,
        }

    def whole_fields(self):
        if self.mesh is not None:
            return matrices.fields_of(self.laid)
        return {"ndim": self.ndim, "rows": self.whole, "row_length": self.length}

    # ---- States ----------------------------------------------------------------------------------

    def _placed(self, shape):
        """Returns the placements of a state that has this shape as a whole, and its shape here."""
        from torch.distributed.tensor import Replicate, Shard

        if shape == self.global_shape:
            placements = self.placements
        elif math.prod(shape) == 1 and len(shape) != 2 and not self.gathered:
            placements = (Replicate(),) * len(self.placements)
        else:
            placements = tuple(
                x
                if not hasattr(x, "dim")
                else _along(x, min(x.dim, 1))
                if len(shape) == 2
                else Shard(0)
                for x in self.placements
            )
        here = torch_private.box_of(shape, self.mesh, placements)[0]
        return placements, tuple(here)

    def place(self, planes, whole, name):
        """Gives the planes of this part their shapes and placements. `whole` are the planes of
        the whole tensor. Fails if no placement gives what this rank holds."""
        for s, all_of_it in zip(planes, whole):
            shape, held = all_of_it.shape, math.prod(s.shape)
            placements, here = self._placed(shape)
            if math.prod(here) != held and not (math.prod(shape) == 1 and held == 0):
                raise ValueError(
                    f"halfstep: {s.key} of parameter {name!r}, {shape} as a whole, is {held}"
                    f" elements on this rank, which no placement gives ({here} with {placements}):"
                    ' choose states="int8" or "int4", whose blocks follow the rows, or shard evenly'
                )
            s.whole, s.placements, s.shape = shape, placements, here

    def wrap(self, plane, tensor):
        """Returns a tensor of this rank as the state that is kept."""
        if self.mesh is None or plane is None:
            return tensor
        return _dtensor(tensor, self.mesh, plane.placements, plane.whole)

    def like_parameter(self, tensor):
        """Returns a tensor of the parameter's own shape here, placed like the parameter."""
        if self.mesh is None:
            return tensor
        return _dtensor(tensor, self.mesh, self.placements, self.global_shape)

    def take(self, values):
        """Returns this rank's part of values of the whole tensor, or of a DTensor of any
        placements."""
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


def _dtensor(tensor, mesh, placements, shape):
    """Returns a DTensor of this shape with a tensor of this process as its local part, on any
    device. from_local() would bring it to the mesh's."""
    from torch.distributed.tensor import DTensor

    whole = {"shape": torch.Size(shape), "stride": _strides(shape)}
    there = mesh.device_type == tensor.device.type
    given = tensor if there else tensor.new_empty(0, device=mesh.device_type)
    made = DTensor.from_local(given, mesh, placements, run_check=False, **whole)
    if not there:
        torch_private.put_local_part(made, tensor)
    return made


def _along(placement, dim):
    """Returns the same placement along another dimension."""
    factor = getattr(placement, "split_factor", None)
    return type(placement)(dim) if factor is None else type(placement)(dim, split_factor=factor)


class Gathered(Part):
    """A matrix that one rank steps as a whole for all ranks that share it (ownership.py). The
    library has all of it there, and a part without elements on the other ranks. Weight and states
    that are kept are sharded like the parameter.

    owned    False: another rank steps it
    """

    gathered = owned = True

    def __init__(self, p, name, laid):
        super().__init__(p, name, laid)
        self.divided = False  # one rank sees the whole gradient
        self.rows = None  # the shape of the whole says it

    @property
    def fields(self):
        fields = self.whole_fields()
        if not self.owned:  # not all zero, because that would mean the whole
            fields.update(first_row=fields["rows"], n_columns=fields["row_length"])
        return fields

    def whole_fields(self):
        return matrices.fields_of(self.laid)

    def place(self, planes, whole, name):
        for s, all_of_it in zip(planes, whole):
            s.whole = s.shape = all_of_it.shape
            if self.mesh is not None:
                s.placements, s.shape = self._placed(s.whole)


def like(p, tensor, shape=None, placements=None):
    """Returns a tensor of this process as the local part of a DTensor on the mesh of p. `shape` is
    that of the whole; it and `placements` are those of p for None."""
    if not is_dtensor(p):
        return tensor
    placements = p.placements if placements is None else placements
    return _dtensor(tensor, p.device_mesh, placements, p.shape if shape is None else shape)


def is_cut_by_rows(p):
    """Returns True if each rank holds whole indices of the first dimension, in order."""
    cuts = [x for x in p.placements if hasattr(x, "dim")]
    return all(x.dim == 0 and getattr(x, "split_factor", 1) == 1 for x in cuts)


def cut_like(p, value, name):
    """Returns a tensor as p is kept: this rank's part of it if p is a DTensor. Raises ValueError
    for one rank's part of a tensor that is whole here."""
    if is_dtensor(p):
        return like(p, Part(p, name, tuple(p.shape)).take(value).detach())
    if is_divided(value):
        raise ValueError(
            f"halfstep: {name!r} was saved as one rank's part, and is whole here: save it by"
            " torch.distributed.checkpoint, or whole"
        )
    return local(value)


def reshard(model):
    """Has the modules of FSDP2 free whole parameters that a forward pass has left, so that
    model.parameters() are the shards."""
    cls = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for module in model.modules() if cls is not None else ():
        if isinstance(module, cls):
            module.reshard()


def refuse(params, what, advice):
    """Raises ValueError if one of the parameters is a DTensor."""
    if any(map(is_dtensor, params)):
        raise ValueError(
            f"halfstep: {what} is not available for DTensors, because each rank holds only a"
            f" part: {advice}"
        )


def refuse_packed(params, what, advice):
    """Raises ValueError if one of the parameters is of 8 bits."""
    if any(map(is_packed, params)):
        raise ValueError(f"halfstep: {what} is not available for 8-bit weights: {advice}")


def _ranks_of_rows(p):
    """Returns the number of ranks that the rows of a DTensor are cut for, by one plain Shard(0).
    Returns 0 if there is none, or another cut beside it."""
    cut = [(i, x) for i, x in enumerate(p.placements) if hasattr(x, "dim")]
    if len(cut) != 1 or getattr(cut[0][1], "split_factor", 1) != 1:
        return 0
    return p.device_mesh.size(cut[0][0])


def is_gathered(rule, p, how, owners=None):
    """Returns True if a rule steps this parameter as whole matrices, and one rank does so for
    others: a rank may hold a part of a matrix, or `owners` says that ranks have the same
    parameters. `how` is as lay() takes it. A stack that is cut along dimension 0 is cut between
    matrices."""
    if p.dim() < 2 or not abi.rules[rule].matrix:
        return False
    if not is_dtensor(p):
        return group_of(owners) is not None
    cut = [x.dim for x in p.placements if hasattr(x, "dim")]
    laid = matrices.lay(rule, p.shape, how)
    return any(cut) or not matrices.is_cut_between(rule, laid, _ranks_of_rows(p))


def sharing_groups(p, owners):
    """Returns the process groups of the ranks that share a gathered parameter: one for each
    dimension of its mesh, or that of `owners`."""
    if not is_dtensor(p):
        return [group_of(owners)]
    mesh = p.device_mesh
    return [mesh.get_group(i) for i in range(mesh.ndim) if mesh.size(i) > 1]


def holders_of(p, owners):
    """Returns the ranks that hold a parameter, or a part of it: those of its mesh, or of `owners`,
    or this one."""
    dist = torch.distributed
    if is_dtensor(p):
        return sorted(p.device_mesh.mesh.flatten().tolist())
    group = group_of(owners)
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def part_of(p, name, flat=False, rule=None, how=matrices.AUTO, owners=None):
    """Returns the Part of a parameter. Returns None if it is here as a whole, is stepped here and
    is not a flat buffer. `how` and `owners` are as is_gathered() takes them."""
    gathered = rule is not None and is_gathered(rule, p, how, owners)
    if is_dtensor(p) or is_packed(p):
        global seen
        seen = True
    if is_dtensor(p) or gathered:
        laid = tuple(p.shape) if rule is None else matrices.lay(rule, p.shape, how)
        return (Gathered if gathered else Part)(p, name, laid)
    return Part(p, name, tuple(p.shape)) if is_flat(p, flat) else None


def is_flat(p, flat):
    """Returns True for a flat buffer of many parameters. It is one by itself or by the option of
    its optimizer."""
    return p.dim() == 1 and p.numel() >= _FLAT_ELEMENTS and bool(flat or _is_flat_parameter(p))


def is_sharded_buffer(p):
    """Returns True for a shard of an FSDP1 buffer, which knows itself which shard it is."""
    return _is_flat_parameter(p) and torch_private.is_cut(p)


def group_of(norm_group):
    """Returns the process group that an option stands for; True is all ranks."""
    if norm_group is None or norm_group is False:
        return None
    return torch.distributed.group.WORLD if norm_group is True else norm_group


def name_here(settings, p, name):
    """Returns the name that keys the random bits of a parameter. Shards of flat buffers get names
    of their own, because their elements count from 0 on every rank."""
    if is_sharded_buffer(p):
        return _flat_identity(p, name)
    if (
        settings.flat == "shards"
        and p.dim() == 1
        and p.numel() >= _FLAT_ELEMENTS
        and torch.distributed.is_initialized()
    ):
        # With the group of the shards, if it is known, replicas round alike.
        return f"{name} of rank {torch.distributed.get_rank(group_of(settings.norm_group))}"
    return name


def place_here(settings, p, text):
    """Returns the same for a parameter without a name, which its place stands for. Ranks of a norm
    group hold different parameters at the same place, so the rank is added."""
    group = group_of(settings.norm_group)
    if group is not None and not is_dtensor(p):
        return f"{text} of rank {torch.distributed.get_rank(group)}"
    return name_here(settings, p, text)


def advice(error, part):
    """Returns the error, with advice if the library has refused the cut of a shard."""
    if part is None or not part.divided or not isinstance(error, abi.HalfstepValueError):
        return error
    if error.code not in (abi.ERROR_SHAPE, abi.ERROR_UNSUPPORTED):
        return error
    text = (
        "; shard it along dimension 0 (fully_shard's shard_placement_fn), in sizes that are whole"
        ' blocks, or keep states in a format without blocks across the cut: states="bf16-sr"'
    )
    if error.code == abi.ERROR_UNSUPPORTED:
        text = "; leave such parameters whole (Replicate), or give them to another rule"
    return abi.HalfstepValueError(str(error) + text, error.code)


def gradient_of(p, grad, name):
    """Returns the gradient of a DTensor in the parameter's placements. Tensor parallelism leaves
    others: Replicate beside a sharded embedding, Partial beside a norm of sequence-parallel
    regions."""
    if not is_dtensor(p) or grad is None:
        return grad
    if not is_dtensor(grad):
        if grad.shape == local(p).shape and not any(hasattr(x, "dim") for x in p.placements):
            return grad
        raise TypeError(
            f"halfstep: the gradient of {name!r} is a plain tensor, the parameter a DTensor; make"
            " it a DTensor with the parameter's mesh and placements"
        )
    if grad.device_mesh != p.device_mesh:
        raise ValueError(
            f"halfstep: the gradient of {name!r} lies on the mesh {grad.device_mesh}, the parameter"
            f" on {p.device_mesh}; shard the model before the backward pass"
        )
    if tuple(grad.placements) != tuple(p.placements):
        grad = grad.redistribute(p.device_mesh, p.placements)
    return grad


def number_of(group):
    """Returns the number that groups have in common if they share a rule's sums over all
    tensors."""
    return float(group.get("d_group", 0))
