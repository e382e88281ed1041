"""Matrices that one rank steps for all ranks that share them. Muon, Adafactor and CAME step whole
matrices, and a rank of FSDP2 holds a part of each.

Each matrix has an owner among the ranks. The owner's handle has the whole tensor. The handles of
the other ranks have a part of it without elements, so that counters advance everywhere. A batch of
matrices is stepped at a time: parts go to the owners, owners step, and parts come back. While a
batch is stepped, the parts of the next one are on their way, and those of the last one back.
"""

import contextlib
import math
from functools import lru_cache

import torch

from .._library import abi
from .._tensors import devices, matrices, sharding
from .._tensors.parameters import stored_dtype
from .._tensors.sharding import local, stored, stored_whole
from .._tensors.torch_private import box_of
from .spreads import devices_of

#: the most bytes of weights and states that an owner has of one batch, unless one matrix has more
BATCH_BYTES = 64 << 20
#: the most messages that are on their way back at the same time
_MOST_BACK = 3
#: tensors in a room begin at multiples of this, as with torch's allocators; pieces in a message at
#: multiples of the second number
_ALIGNED, _PACKED = 256, 8
#: process groups that were made here, by their ranks, each with the world that it belongs to
_groups = {}
#: stands for a tensor that another rank has
_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


class Team:
    """The ranks that share parameters, which may lie on several meshes of these ranks. `here` is
    the place of this rank among them."""

    def __init__(self, p, owners):
        dist = torch.distributed
        self.groups = sharding.sharing_groups(p, owners)
        self.ranks = [dist.get_rank()]
        if len(self.groups) == 1:
            self.ranks = dist.get_process_group_ranks(self.groups[0])
        elif self.groups:
            self.ranks = sharding.holders_of(p, owners)
        self.here = self.ranks.index(dist.get_rank())

    @property
    def group(self):
        """One process group of all ranks. For a mesh of several dimensions its ranks make it at
        the first use."""
        if len(self.groups) == 1:
            return self.groups[0]
        dist = torch.distributed
        world, group = _groups.get(tuple(self.ranks), (None, None))
        if world is not dist.group.WORLD:
            group = dist.new_group(self.ranks, use_local_synchronization=True)
            _groups[tuple(self.ranks)] = dist.group.WORLD, group
        return group

    def boxes(self, mesh, shape, placements):
        """Returns what each rank holds of a tensor of this shape, as slices. None: nothing. `mesh`
        is that of its parameter, or None."""
        if mesh is None:
            return (tuple(slice(0, n) for n in shape),) * len(self.ranks)
        return _boxes(mesh, tuple(self.ranks), tuple(shape), tuple(placements))

    def exchange(self, device, out, into):
        """Begins to send the tensors out[i] to rank i. Returns a function that waits, and fills the
        tensors into[i] with those of rank i. There are none of this rank."""
        device = _carrier(self.group, device)
        sizes = [[sum(map(_packed, some)) for some in lists] for lists in (out, into)]
        sent, got = (devices.zeros((sum(some),), torch.uint8, device) for some in sizes)
        for view, tensor in _views(sent, [tensor for some in out for tensor in some]):
            devices.copy(view, tensor)
        work = torch.distributed.all_to_all_single(
            got, sent, sizes[1], sizes[0], group=self.group, async_op=True
        )

        def finish(sent=sent):  # which has to live until then
            work.wait()
            for view, tensor in _views(got, [tensor for some in into for tensor in some]):
                devices.copy(tensor, view)

        return finish

    def publish(self, device, of, tensors):
        """Begins to send tensors of the rank in place `of` to all. Returns a function that waits,
        and fills the same tensors of the others."""
        sent = devices.zeros(
            (sum(map(_packed, tensors)),), torch.uint8, _carrier(self.group, device)
        )
        if of == self.here:
            for view, tensor in _views(sent, tensors):
                devices.copy(view, tensor)
        work = torch.distributed.broadcast(sent, self.ranks[of], group=self.group, async_op=True)

        def finish():
            work.wait()
            if of != self.here:
                for view, tensor in _views(sent, tensors):
                    devices.copy(tensor, view)

        return finish


@lru_cache(4096)
def _boxes(mesh, ranks, shape, placements):
    found = []
    for rank in ranks:
        held, at = box_of(shape, mesh, placements, rank)
        box = tuple(slice(first, first + n) for first, n in zip(at, held))
        found.append(None if 0 in held else box)
    return tuple(found)


def _carrier(group, device):
    """Returns the device that a process group can send from, at best this one."""
    types = devices_of(group)
    if device.type in types:
        return device
    return devices.HOST if "cpu" in types else torch.device(types[0])


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


#: iterations of the Gram form between two multiplications of the long matrix, about
_STRETCH = 5


def work_of(one, values):
    """Returns the work of a step of a Wanted: multiplications of Newton-Schulz, or the number of
    elements for a rule without products. `values` are Options.values() of its group."""
    laid = matrices.lay(one.rule, one.p.shape, one.how)
    rows, columns = matrices.rows_of(laid)
    if not matrices.has_products(abi.rules[one.rule]):
        return rows * columns
    starts = laid.starts if isinstance(laid, matrices.Laid) else [0, rows]
    steps, work = int(values["ns_steps"]), 0
    for first, last in zip(starts, starts[1:]):
        least, most = sorted((last - first, columns))
        squares, long = steps, 2 * steps  # products of small squares, and with the long matrix
        if values["ns_form"] and 2 * most > 3 * least:
            stretches = -(-steps // _STRETCH)
            squares, long = 4 * steps - 3 * stretches, 2 * stretches
        work += 2 * least**2 * (squares * least + long * most)
    return work


def assign(works, count):
    """Returns an owner for each work, the largest works first, each to the owner that has the least
    until then; and the places of the works in this order."""
    order = sorted(range(len(works)), key=lambda i: -works[i])
    owners, loads = [0] * len(works), [0] * count
    for i in order:
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += works[i]
    return owners, order


def divide(wanted, owners, values, kept):
    """Divides a list of Wanted into batches. Returns (device, Batch, list of Wanted) for each, the
    same on all ranks. `values` holds Options.values() by group. kept(one) is the device of states
    between steps."""
    shared = {}
    for one in wanted:
        team = Team(one.p, owners)
        _, some = shared.setdefault((tuple(team.ranks), one.home.type), (team, []))
        some.append(one)
    found = []
    for team, some in shared.values():
        works = [work_of(one, values[one.group]) for one in some]
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
        made = [
            Batch(
                room,
                {some[i].p: whose[i] for i in batch},
                {some[i].p: kept(some[i]) for i in batch},
            )
            for batch in batches
        ]
        for one, following in zip(made, made[1:]):
            one.following, following.first = following, False
        found += [(room.device, one, [some[i] for i in batch]) for one, batch in zip(made, batches)]
    return found


def _bytes_of(one):
    """Returns the bytes of weight and states, times how often each byte is sent."""
    laid = matrices.lay(one.rule, one.p.shape, one.how)
    taken = abi.forecast((one.recipe, matrices.fields_of(laid), 1))
    size = taken.weights + taken.largest_states
    placements = getattr(one.p, "placements", ())
    if any(hasattr(x, "dim") for x in placements):
        size *= math.prod(
            one.p.device_mesh.size(i) for i, x in enumerate(placements) if not hasattr(x, "dim")
        )
    return size


# ---- Batches -------------------------------------------------------------------------------------


class _Piece:
    """One tensor of a member: its weight, its gradient, or one of its planes.

    box        what this rank holds of it, as slices, or None
    boxes      what each rank holds
    owner      the place of its owner
    sources    the box of each rank that sends one to the owner
    public     True if every rank holds all of it
    place      where the whole begins in the room of the owner
    """

    place = None

    def __init__(self, team, owner, mesh, key, shape, dtype, placements):
        self.key, self.shape, self.dtype, self.owner = key, tuple(shape), dtype, owner
        self.boxes = team.boxes(mesh, self.shape, placements)
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
    """Memory for the whole tensors that this rank has of one batch after the other.

    holds    the batch whose weights and states are there, if its parts have not changed since
    back     functions that wait for parts of the last batch, which are on their way back
    """

    def __init__(self, team, device):
        self.team, self.device = team, device
        self.size, self._memory, self.holds, self.back = 0, None, None, []

    def settle(self, left=0):
        """Waits for parts that are on their way back, all but so many messages."""
        while len(self.back) > left:
            self.back.pop(0)()

    def view(self, piece):
        """Returns a tensor of the room."""
        if self._memory is None:
            self._memory = devices.zeros((self.size,), torch.uint8, self.device)
        memory = self._memory[piece.place : piece.place + piece.size]
        return memory.view(piece.dtype).view(piece.shape)


class Batch:
    """Members of one handle that are stepped at the same time, each by its owner. It stands where
    a Stage of streaming.py does."""

    #: the batch that is stepped after this one, and True for the first of a room
    following, first = None, True

    def __init__(self, room, owners, kept):
        self.room, self.team = room, room.team
        #: by parameter: the place of its owner, and the device of its states between steps
        self.owners, self.kept = owners, kept
        #: a function that waits for parts that are on their way to their owners, or None
        self.ready = None
        #: of each member: its pieces by key; "" is the gradient, "weight" the weight
        self.pieces = {}
        #: the members of the present step; their gradients here, and the whole ones of the owner
        self.present, self.given, self.gradients = (), {}, {}

    def kept_of(self, m):
        """Returns the device of a member's states between steps."""
        return self.kept[m.p]

    def owns(self, p):
        """Returns True if this rank steps a parameter."""
        return self.owners[p] == self.team.here

    def take(self, members, state):
        """Takes members, and the optimizer's state, which holds their states."""
        self.state, size = state, 0
        for m in members:
            where = self.team, self.owners[m.p], getattr(m.p, "device_mesh", None)
            placements = getattr(m.p, "placements", ())
            gradient, held = stored_dtype(m.gradient), stored(m.p).dtype
            found = [
                _Piece(*where, "", m.p.shape, gradient, placements),
                _Piece(*where, "weight", stored_whole(m.p), held, placements),
            ]
            found += [_Piece(*where, s.key, s.whole, s.dtype, s.placements) for s in m.planes]
            self.pieces[m] = {piece.key: piece for piece in found}
            for piece in found[1:] if self.owns(m.p) else ():
                piece.place = size
                size += -(-piece.size // _ALIGNED) * _ALIGNED
        self.room.size = max(self.room.size, size)

    def addresses(self, m):
        """Returns the memory of a member's weight and planes while it is stepped, by key."""
        return {key: self._room_of(piece) for key, piece in self.pieces[m].items()}

    def _room_of(self, piece):
        return _EMPTY if piece.place is None else self.room.view(piece)

    def weight(self, m):
        """Returns the address of the whole weight of a member."""
        return sharding.address(self._room_of(self.pieces[m]["weight"]))

    # ---- Parts come and go -----------------------------------------------------------------------

    def _here(self, m, piece):
        """Returns what this rank holds of a piece."""
        if not piece.key:
            return self.given[m]
        return stored(m.p).detach() if piece.key == "weight" else local(self.state[m.p][piece.key])

    def _whole(self, m, piece):
        return self.room.view(piece) if piece.key else self.gradients[m]

    def _gather(self, some):
        """Begins to bring parts to owners: (member, piece) of each. Returns a function that waits
        for them."""
        out, into = ([[] for _ in self.team.ranks] for _ in range(2))
        for m, piece in some:
            if self.team.here in piece.sources:
                out[piece.owner].append(self._here(m, piece))
            if piece.owner == self.team.here:
                for source, box in piece.sources.items():
                    into[source].append(self._whole(m, piece)[box])
        own, arrive = self._take_own(out, into), None
        if any(piece.sources.keys() != {piece.owner} for _, piece in some):
            arrive = self.team.exchange(self.room.device, out, into)

        def finish():  # until then another batch is in the room
            for to, tensor in own:
                devices.copy(to, tensor)
            if arrive is not None:
                arrive()

        return finish

    def _take_own(self, out, into):
        """Takes what stays on this rank out of two lists. Returns (target, source) of each."""
        own = list(zip(into[self.team.here], out[self.team.here]))
        out[self.team.here], into[self.team.here] = [], []
        return own

    def _scatter(self, some):
        """Begins to bring parts back from owners: (member, piece) of each."""
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
        for to, tensor in self._take_own(out, into):
            devices.copy(to, tensor)
        if cut:
            self.room.back.append(self.team.exchange(self.room.device, out, into))
        whole = [(m, piece) for m, piece in some if piece.public]
        for m, piece in whole:
            if piece.owner == here:
                devices.copy(self._here(m, piece), self._whole(m, piece))
        for owner in sorted({piece.owner for _, piece in whole}):
            tensors = [self._here(m, piece) for m, piece in whole if piece.owner == owner]
            if len(self.team.ranks) > 1:
                self.room.settle(_MOST_BACK - 1)
                self.room.back.append(self.team.publish(self.room.device, owner, tensors))

    def give(self, m, grad):
        """Takes this rank's part of a gradient. Returns the address of the member's weight, and an
        address that stands for its gradient until gather_gradients()."""
        self.given[m] = grad
        return self.weight(m), sharding.address(_EMPTY)

    def gather_gradients(self, members):
        """Brings the gradients of members to their owners. The members are those of the present
        step. Returns an address for each."""
        self.room.settle()
        self.present, self.room.holds = members, None
        pieces = [(m, self.pieces[m][""]) for m in members]
        self.gradients, moved = {}, []
        for m, piece in pieces:
            if piece.sources.keys() == {self.team.here} and piece.owner == self.team.here:
                given = devices.contiguous(self.given[m])
                self.gradients[m] = devices.place(given, self.room.device)
                continue
            if piece.owner == self.team.here:
                self.gradients[m] = devices.zeros(piece.shape, piece.dtype, self.room.device)
            moved.append((m, piece))
        self._gather(moved)()
        self.given = {}
        return [sharding.address(self.gradients.get(m, _EMPTY)) for m in members]

    def _pieces_of(self, members):
        """Returns (member, piece) of weights and states."""
        return [(m, piece) for m in members for key, piece in self.pieces[m].items() if key]

    def begin(self):
        """Begins to bring the first batch of a step to its owners. Each batch begins the next."""
        if self.first:
            self._begin()

    def _begin(self):
        if self.ready is None:
            self.ready = self._gather(self._pieces_of(self.present))

    def _arrive(self):
        """Waits until owners have what _begin() brings."""
        ready, self.ready = self.ready, None
        if ready is not None:
            ready()

    @contextlib.contextmanager
    def states(self, only=None, written=True):
        """Returns a context in which owners have the weights and states of the present members, or
        of `only`. If they are written, they are copied back afterwards."""
        room, some = self.room, self._pieces_of(self.present if only is None else [only])
        if only is not None:
            room.settle()
            self._gather(some)()
        elif room.holds is not self:
            self._begin()
            self._arrive()
            if self.following is not None:
                self.following._begin()
        room.holds = None if only is not None or written else self
        yield
        room.settle()
        if written:
            self._scatter(some)
        if only is not None:
            room.settle()

    def end(self):
        """Waits for all parts, and forgets the gradients of the step."""
        self._arrive()
        self.room.settle()
        self.present, self.gradients = (), {}

    def tell(self, m, found):
        """Returns what the owner of a member has found, on every rank."""
        told = [found]
        if len(self.team.ranks) > 1:
            source = self.team.ranks[self.owners[m.p]]
            torch.distributed.broadcast_object_list(told, source, group=self.team.group)
        return told[0]
