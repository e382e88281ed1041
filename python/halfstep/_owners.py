"""Matrices that one rank steps for all ranks that share them. Muon, Adafactor and CAME step whole
matrices, and a rank of FSDP2 holds a part of each.

Each matrix has an owner among the ranks. The owner's handle has the whole tensor. The handles of
the other ranks have a part of it without elements, so that counters advance everywhere. A batch of
matrices is stepped at a time: parts go to the owners, owners step, and parts come back.
"""

import contextlib
import itertools
import math
from functools import lru_cache

import torch

from . import _abi, _devices, _matrices, _sharding
from ._parameters import stored_dtype
from ._sharding import local

#: the most bytes of weights and states that an owner has of one batch, unless one matrix has more
BATCH_BYTES = 256 << 20
#: tensors in a room begin at multiples of this, as with torch's allocators; pieces in a message at
#: multiples of the second number
_ALIGNED, _PACKED = 256, 8
#: stands for a tensor that another rank has
_EMPTY = torch.empty(0, device="cpu")


class Team:
    """The ranks that share parameters. `here` is the place of this rank among them."""

    def __init__(self, p, owners):
        dist = torch.distributed
        self.mesh = p.device_mesh if _sharding.is_dtensor(p) else None
        self.groups = _sharding.sharing_groups(p, owners)
        self.ranks = [dist.get_rank()]
        if len(self.groups) == 1:
            self.ranks = dist.get_process_group_ranks(self.groups[0])
        elif self.groups:
            self.ranks = sorted(self.mesh.mesh.flatten().tolist())
        self.here = self.ranks.index(dist.get_rank())

    @property
    def group(self):
        """One process group of all ranks. For a mesh of several dimensions its ranks make it at
        the first use."""
        if len(self.groups) == 1:
            return self.groups[0]
        if not hasattr(self.mesh, "_halfstep_group"):
            self.mesh._halfstep_group = torch.distributed.new_group(
                self.ranks, use_local_synchronization=True
            )
        return self.mesh._halfstep_group

    def boxes(self, shape, placements):
        """Returns what each rank holds of a tensor of this shape, as slices. None: nothing."""
        if self.mesh is None:
            return (tuple(slice(0, n) for n in shape),) * len(self.ranks)
        return _boxes(self.mesh, tuple(self.ranks), tuple(shape), tuple(placements))

    def exchange(self, device, out, into):
        """Sends the tensors out[i] to rank i, and fills the tensors into[i] with those of rank
        i."""
        for to, tensor in zip(into[self.here], out[self.here]):
            to.copy_(tensor)
        out, into = (
            [[] if i == self.here else some for i, some in enumerate(lists)]
            for lists in (out, into)
        )
        device = _carrier(self.group, device)
        sizes = [[sum(map(_packed, some)) for some in lists] for lists in (out, into)]
        sent, got = (_devices.zeros((sum(some),), torch.uint8, device) for some in sizes)
        for view, tensor in _views(sent, [tensor for some in out for tensor in some]):
            view.copy_(tensor)
        torch.distributed.all_to_all_single(got, sent, sizes[1], sizes[0], group=self.group)
        for view, tensor in _views(got, [tensor for some in into for tensor in some]):
            tensor.copy_(view)

    def publish(self, device, of, tensors):
        """Fills the same tensors of all ranks with those of the rank in place `of`."""
        sent = _devices.zeros(
            (sum(map(_packed, tensors)),), torch.uint8, _carrier(self.group, device)
        )
        if of == self.here:
            for view, tensor in _views(sent, tensors):
                view.copy_(tensor)
        torch.distributed.broadcast(sent, self.ranks[of], group=self.group)
        if of != self.here:
            for view, tensor in _views(sent, tensors):
                tensor.copy_(view)


class _Elsewhere:
    """A mesh as another of its ranks sees it."""

    def __init__(self, mesh, rank):
        self._mesh, self._place = mesh, (mesh.mesh == rank).nonzero()[0].tolist()

    def __getattr__(self, name):
        return getattr(self._mesh, name)

    def get_coordinate(self):
        return self._place

    def _sym_get_coordinate(self, dim):
        return self._place[dim]


@lru_cache(4096)
def _boxes(mesh, ranks, shape, placements):
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found = []
    for rank in ranks:
        held, at = compute_local_shape_and_global_offset(shape, _Elsewhere(mesh, rank), placements)
        box = tuple(slice(first, first + n) for first, n in zip(at, held))
        found.append(None if 0 in held else box)
    return tuple(found)


def _carrier(group, device):
    """Returns the device that a process group can send from, at best this one."""
    types = {d.type for d in getattr(group, "_device_types", ())} or {"cpu"}
    return device if device.type in types else _devices.HOST


def _packed(tensor):
    return -(-tensor.numel() * tensor.element_size() // _PACKED) * _PACKED


def _views(memory, tensors):
    """Yields each tensor with the place of its elements in a message, as a tensor of its kind."""
    at = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        yield memory[at : at + size].view(tensor.dtype).view(tensor.shape), tensor
        at += _packed(tensor)


# ---- Who steps what ------------------------------------------------------------------------------


def work_of(one, steps):
    """Returns the work of a step of a Wanted: multiplications of Newton-Schulz, or the number of
    elements for a rule without products."""
    laid = _matrices.lay(one.rule, one.p.shape, one.how)
    rows, columns = _matrices.rows_of(laid)
    if any(state.vector for state in _abi.rules[one.rule].states):
        return rows * columns
    starts = laid.starts if isinstance(laid, _matrices.Laid) else [0, rows]
    sides = (sorted((last - first, columns)) for first, last in itertools.pairwise(starts))
    return steps * sum(2 * least**2 * (2 * most + least) for least, most in sides)


def assign(works, count):
    """Returns an owner for each work, the largest works first, each to the owner that has the least
    until then; and the places of the works in this order."""
    order = sorted(range(len(works)), key=lambda i: -works[i])
    owners, loads = [0] * len(works), [0] * count
    for i in order:
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += works[i]
    return owners, order


def divide(wanted, owners, steps):
    """Divides a list of Wanted into batches. Returns (device, Batch, list of Wanted) for each, the
    same on all ranks. `steps` holds the number of iterations by group."""
    shared = {}
    for one in wanted:
        team = Team(one.p, owners)
        _, some = shared.setdefault((tuple(team.ranks), one.home.type), (team, []))
        some.append(one)
    found = []
    for team, some in shared.values():
        works = [work_of(one, steps.get(one.group, 1)) for one in some]
        whose, order = assign(works, len(team.ranks))
        room, batches, filled = Room(team, some[0].home), [], {}
        for i in order:
            at, used = filled.get(whose[i], (0, 0))
            size = _bytes_of(some[i])
            if used and used + size > BATCH_BYTES:
                at, used = at + 1, 0
            filled[whose[i]] = at, used + size
            if at == len(batches):
                batches.append([])
            batches[at].append(i)
        found += [
            (
                room.device,
                Batch(room, {some[i].p: whose[i] for i in batch}),
                [some[i] for i in batch],
            )
            for batch in batches
        ]
    return found


def _bytes_of(one):
    """Returns the bytes of weight and states, times how often each byte is sent."""
    laid = _matrices.lay(one.rule, one.p.shape, one.how)
    size = sum(_abi.tensor_bytes(one.recipe, **_matrices.fields_of(laid)))
    placements = getattr(one.p, "placements", ())
    if any(hasattr(x, "dim") for x in placements):
        size *= math.prod(
            one.p.device_mesh.size(i) for i, x in enumerate(placements) if not hasattr(x, "dim")
        )
    return size


# ---- Batches -------------------------------------------------------------------------------------


class _Piece:
    """One tensor of a member: its weight, its gradient, or one of its streams.

    box        what this rank holds of it, as slices, or None
    boxes      what each rank holds
    owner      the place of its owner
    sources    the box of each rank that sends one to the owner
    public     True if every rank holds all of it
    place      where the whole begins in the room of the owner
    """

    place = None

    def __init__(self, team, owner, key, shape, dtype, placements):
        self.key, self.shape, self.dtype, self.owner = key, tuple(shape), dtype, owner
        self.boxes = team.boxes(self.shape, placements)
        self.box = self.boxes[team.here]
        holders = {}
        for rank, box in enumerate(self.boxes):
            if box is not None:
                holders.setdefault(str(box), []).append(rank)
        self.sources = {}
        for some in holders.values():
            source = owner if owner in some else some[owner % len(some)]
            self.sources[source] = self.boxes[source]
        self.public = len(holders) == 1 and None not in self.boxes

    @property
    def size(self):
        return self.dtype.itemsize * math.prod(self.shape)


class Room:
    """Memory for the whole tensors that this rank has of one batch after the other. `holds` is the
    batch whose weights and states are there."""

    def __init__(self, team, device):
        self.team, self.device = team, device
        self.size, self._memory, self.holds = 0, None, None

    def view(self, piece):
        """Returns a tensor of the room."""
        if self._memory is None:
            self._memory = _devices.zeros((self.size,), torch.uint8, self.device)
        memory = self._memory[piece.place : piece.place + piece.size]
        return memory.view(piece.dtype).view(piece.shape)


class Batch:
    """Members of one handle that are stepped at the same time, each by its owner. It stands where
    a Stage of streaming.py does."""

    def __init__(self, room, owners):
        self.room, self.team, self.owners = room, room.team, owners
        #: of each member: its pieces by key; "" is the gradient, "weight" the weight
        self.pieces = {}
        #: the members of the present step; their gradients here, and the whole ones of the owner
        self.present, self.given, self.gradients = (), {}, {}

    @property
    def kept(self):
        """The device of states between steps."""
        return self.room.device

    def owns(self, p):
        """Returns True if this rank steps a parameter."""
        return self.owners[p] == self.team.here

    def take(self, members, state):
        """Takes members, and the optimizer's state, which holds their states."""
        self.state, size = state, 0
        for m in members:
            owner, placements = self.owners[m.p], getattr(m.p, "placements", ())
            gradient = stored_dtype(m.gradient)
            found = [
                _Piece(self.team, owner, "", m.p.shape, gradient, placements),
                _Piece(self.team, owner, "weight", m.p.shape, m.dtype, placements),
            ]
            found += [
                _Piece(self.team, owner, s.key, s.whole, s.dtype, s.placements) for s in m.streams
            ]
            self.pieces[m] = {piece.key: piece for piece in found}
            for piece in found[1:] if self.owns(m.p) else ():
                piece.place = size
                size += -(-piece.size // _ALIGNED) * _ALIGNED
        self.room.size = max(self.room.size, size)

    def addresses(self, m):
        """Returns the memory of a member's weight and streams while it is stepped, by key."""
        return {key: self._room_of(piece) for key, piece in self.pieces[m].items()}

    def _room_of(self, piece):
        return _EMPTY if piece.place is None else self.room.view(piece)

    def weight(self, m):
        """Returns the address of the whole weight of a member."""
        return _sharding.address(self._room_of(self.pieces[m]["weight"]))

    def begin(self):
        """Does nothing: parts come when they are needed."""

    # ---- Parts come and go -----------------------------------------------------------------------

    def _here(self, m, piece):
        """Returns what this rank holds of a piece."""
        if not piece.key:
            return self.given[m]
        return local(m.p).detach() if piece.key == "weight" else local(self.state[m.p][piece.key])

    def _whole(self, m, piece):
        return self.room.view(piece) if piece.key else self.gradients[m]

    def _gather(self, some):
        """Brings parts to owners: (member, piece) of each."""
        out, into = ([[] for _ in self.team.ranks] for _ in range(2))
        for m, piece in some:
            if self.team.here in piece.sources:
                out[piece.owner].append(self._here(m, piece))
            if piece.owner == self.team.here:
                for source, box in piece.sources.items():
                    into[source].append(self._whole(m, piece)[box])
        if any(piece.sources.keys() != {piece.owner} for _, piece in some):
            self.team.exchange(self.room.device, out, into)
        else:  # owners hold all that they need
            for to, tensor in zip(into[self.team.here], out[self.team.here]):
                to.copy_(tensor)

    def _scatter(self, some):
        """Brings parts back from owners: (member, piece) of each."""
        here, cut = self.team.here, [(m, piece) for m, piece in some if not piece.public]
        out, into = ([[] for _ in self.team.ranks] for _ in range(2))
        for m, piece in cut:
            if piece.owner == here:
                whole = self._whole(m, piece)
                for rank, box in enumerate(piece.boxes):
                    if box is not None:
                        out[rank].append(whole[box])
            if piece.box is not None:
                into[piece.owner].append(self._here(m, piece))
        if cut:
            self.team.exchange(self.room.device, out, into)
        whole = [(m, piece) for m, piece in some if piece.public]
        for m, piece in whole:
            if piece.owner == here:
                self._here(m, piece).copy_(self._whole(m, piece))
        for owner in sorted({piece.owner for _, piece in whole}):
            tensors = [self._here(m, piece) for m, piece in whole if piece.owner == owner]
            if len(self.team.ranks) > 1:
                self.team.publish(self.room.device, owner, tensors)

    def give(self, m, grad):
        """Takes this rank's part of a gradient. Returns the address of the member's weight, and an
        address that stands for its gradient until gather_gradients()."""
        self.given[m] = grad
        return self.weight(m), _sharding.address(_EMPTY)

    def gather_gradients(self, members):
        """Brings the gradients of members to their owners. The members are those of the present
        step. Returns an address for each."""
        self.present, self.room.holds = members, None
        pieces = [(m, self.pieces[m][""]) for m in members]
        self.gradients, moved = {}, []
        for m, piece in pieces:
            if piece.sources.keys() == {self.team.here} and piece.owner == self.team.here:
                self.gradients[m] = _devices.contiguous(self.given[m])
                continue
            if piece.owner == self.team.here:
                self.gradients[m] = _devices.zeros(piece.shape, piece.dtype, self.room.device)
            moved.append((m, piece))
        self._gather(moved)
        self.given = {}
        return [_sharding.address(self.gradients.get(m, _EMPTY)) for m in members]

    @contextlib.contextmanager
    def states(self, only=None, written=True):
        """Returns a context in which owners have the weights and states of the present members, or
        of `only`. If they are written, they are copied back afterwards."""
        members = self.present if only is None else [only]
        some = [(m, piece) for m in members for key, piece in self.pieces[m].items() if key]
        if only is not None or self.room.holds is not self:
            self._gather(some)
        self.room.holds = None if only is not None or written else self
        yield
        if written:
            self._scatter(some)

    def end(self):
        """Forgets the gradients of the step."""
        self.present, self.gradients = (), {}

    def tell(self, m, found):
        """Returns what the owner of a member has found, on every rank."""
        told = [found]
        if len(self.team.ranks) > 1:
            source = self.team.ranks[self.owners[m.p]]
            torch.distributed.broadcast_object_list(told, source, group=self.team.group)
        return told[0]
