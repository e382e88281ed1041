"""Who wrote a weight last: what tells whether a residual or error code still belongs to the weight
beside it.

A residual means something only beside the very bits that it was left over from. After every write
of this package the version counter of the weight is noted; when it has gone on by itself, as
load_state_dict(), copy_() and masks make it, somebody else wrote. In-place writes to `p.data` move
no counter and cannot be seen; another tensor put there can.

A write may put the same bits back: averages that are swapped in and out, rows that are restored.
Hashes tell, one for each row of a matrix. They take a pass over the weights, so that they are made
only from the first write of somebody else on, and for what is saved. The residuals that this first
write costs are less than a unit in the last place of each weight, once.
"""

import weakref

import torch

from . import _devices, _sharding
from ._sharding import is_dtensor, local

_get = torch._C.TensorBase._version.__get__


def version(tensor):
    """How often torch has counted a write to a tensor; of a DTensor, to it or to what of it lies
    here."""
    if is_dtensor(tensor):
        try:
            return _get(tensor) + _get(local(tensor))
        except RuntimeError:
            return None
    try:
        return _get(tensor)
    except RuntimeError:  # tensors of inference mode count nothing
        return None


def versions(tensors):
    """version() of each."""
    if _sharding.seen and any(map(is_dtensor, tensors)):
        return list(map(version, tensors))
    try:
        return list(map(_get, tensors))
    except RuntimeError:
        return list(map(version, tensors))


def _place(tensor):
    tensor = local(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride()


#: elements of a vector that have a hash together
PIECE = 256
#: elements that are hashed at a time: as many as a processor's cache holds; a GPU takes more, for
#: it waits for each call
_AT_ONCE = {"cpu": 1 << 18, None: 1 << 24}
#: in the place of a hash that is not known
UNKNOWN = 0
_multipliers = {}


def _odd_numbers(n, device):
    """n odd 32-bit numbers, always the same; one for each column."""
    if (n, device) not in _multipliers:
        if len(_multipliers) > 64:
            _multipliers.clear()
        x = torch.arange(n, dtype=torch.int64, device=device) * 0x9E3779B1
        x = (x ^ x >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
        _multipliers[n, device] = ((x ^ x >> 12) | 1).to(torch.int32)
    return _multipliers[n, device]


@torch.no_grad()
def row_hashes(tensor):
    """The hashes of a 16-bit weight, int64 where it lies: of each row of a matrix, or of each 256
    elements of a vector. None of what is no 16-bit weight.

    A hash is the sum over the row of bits times a number of the column, modulo 2^32, and never
    UNKNOWN. One changed element always changes it.
    """
    t = _devices.contiguous(local(tensor).detach())
    if t.element_size() != 2:
        return None
    bits = (
        t.reshape(t.shape[0], t.shape[1:].numel())
        if t.dim() > 1
        else torch.nn.functional.pad(t.reshape(-1), (0, -t.numel() % PIECE)).view(-1, PIECE)
    )
    bits, columns = bits.view(torch.int16), max(bits.shape[1], 1)
    factors, found = (
        _odd_numbers(columns, t.device),
        torch.empty(len(bits), dtype=torch.int64, device=t.device),
    )
    rows = min(max(_AT_ONCE.get(t.device.type, _AT_ONCE[None]) // columns, 1), len(bits))
    products = torch.empty(rows, columns, dtype=torch.int32, device=t.device)
    for some, out in zip(bits.split(max(rows, 1)), found.split(max(rows, 1))):
        torch.mul(some, factors, out=products[: len(some)])
        torch.sum(products[: len(some)], 1, dtype=torch.int64, out=out)
    return found.bitwise_and_(0xFFFFFFFF).bitwise_or_(1 << 32)


def _changed(tensor, hashes):
    """Which rows have other bits than hashes of theirs say, or None where these are unknown or of
    another shape."""
    if hashes is None or not hashes.numel() or not bool((hashes != UNKNOWN).all()):
        return None
    now = row_hashes(tensor)
    return now != hashes.to(now.device) if now is not None and now.shape == hashes.shape else None


def clear_rows(extra, rows):
    """Drops the residuals of these rows (as row_hashes() has them), or of all for None."""
    here = local(extra)
    if rows is None:
        here.zero_()
    elif here.dim() > 1:
        here[rows.to(here.device)] = 0
    else:
        here[rows.to(here.device).repeat_interleave(PIECE)[: here.numel()].view(here.shape)] = 0


def _same_bits(a, b):
    """Whether two tensors hold the same bits, index by index. `a` may have lost its memory."""
    a, b = local(a), local(b)
    if (
        a.shape != b.shape
        or a.dtype != b.dtype
        or a.device != b.device
        or not a.untyped_storage().nbytes()
    ):
        return False
    return torch.equal(*(_devices.contiguous(t).view(-1).view(torch.uint8) for t in (a, b)))


class _Note:
    """What is kept of one weight beside its version and place."""

    __slots__ = (
        "held",
        "extra",
        "extra_version",
        "compiled",
        "witness",
        "copied",
        "hashes",
        "brought",
    )

    def __init__(self):
        self.held = self.hashes = None
        self.brought = False


class Watch:
    """Weights as this package left them. A weight that it does not know may be as it likes; our
    next write makes it known.

    Two things take more than the counter. A weight that lies elsewhere is still the same if the
    memory that it had, which is held until then, was not written either and has the same bits. And
    the operator of a compiled step stands between increments of the compiler's own, of which there
    are more or fewer depending on how it compiled. They are read off a witness: a tensor that goes
    to the operator like a weight and that nobody else writes.
    """

    def __init__(self, witness=None):
        # In parallel; `index` is the place of each tensor in them.
        self.tensors, self.versions, self.places, self.notes, self.index = [], [], [], [], {}
        self.blocks = None
        #: what stands for the places as they are noted: a caller who knows that it holds spares
        #: them a second look
        self.token = None
        #: compiled steps so far, and whether the last one got a copy of the witness
        self.witness, self.compiled, self.witness_copied = witness, 0, False
        #: whether hashes are made after each write of ours, and whether a note may have some, or be
        #: of a pair that was brought
        self.hashing, self.some_known = False, False
        #: references to hashes in state dictionaries, which our next write outdates
        self.given_out = []

    def __len__(self):
        return len(self.tensors)

    # ---- Looking ---------------------------------------------------------------------------------

    def strangers(self, extra_of, only=None, given=None, token=None, decides=True):
        """The weights that somebody else has written, and which of their rows, None for all.
        extra_of(weight): the residual beside it, or None.

        only: look at this one. given: inside a compiled step, for each weight whether the operator
        got a copy of it, and under None the same of the witness. What was merely moved, or came
        with another residual, is noted as it is now. decides: also about pairs that were brought;
        until then their weights may still come.
        """
        if only is not None:
            looked = self._sharing(self.index[only]) if only in self.index else ()
        else:
            if self._unchanged(token):
                return []
            looked = range(len(self.tensors))
        found = []
        for i in looked:
            p = self.tensors[i]
            if given is not None and p not in given:
                continue
            note, extra = self.notes[i], extra_of(p)
            if note.brought and not decides:
                continue
            written = None if note.brought else self._judge(i, extra, given)
            if written is False:
                continue
            # The hashes are of the weight that this residual was left over from. Without them the
            # verdict stands.
            rows = (
                _changed(p, note.hashes)
                if note.brought or written or self._is_copy(note, extra)
                else None
            )
            if written if rows is None else bool(rows.any()):
                found.append((p, rows))
                self.hashing = True
            else:
                if rows is None:
                    note.hashes = None
                note.brought = False
                self._note(i, extra)
        return found

    @staticmethod
    def _is_copy(note, extra):
        """Whether a residual that somebody brought holds what we left."""
        return (
            extra is not None
            and note.extra is not None
            and extra is not note.extra
            and version(note.extra) == note.extra_version
            and _same_bits(extra, note.extra)
        )

    def _unchanged(self, token):
        if self.witness is not None and self.tensors:
            return False  # nothing quick can be said
        if (token is None or token is not self.token) and list(
            map(_place, self.tensors)
        ) != self.places:
            return False
        return versions(self.tensors) == self.versions

    def _judge(self, i, extra, given):
        """True: somebody else wrote it. False: nobody did. None: moved, or beyond proof, so that it
        counts as it is."""
        p, note, known = self.tensors[i], self.notes[i], self.versions[i]
        by_compiler = (
            version(self.witness) - note.witness
            if self.witness is not None and known is not None
            else 0
        )
        if by_compiler:
            # Only what went through the same calls in the same way saw the same increments.
            if (
                note.compiled != self.compiled
                or note.copied not in (None, self.witness_copied)
                or given is not None
                and given[p] != given[None]
            ):
                return None
            known += by_compiler
        moved = _place(p) != self.places[i]
        if version(p) == known and not moved:
            return False
        if moved and version(note.held) == known and _same_bits(note.held, p):
            return None
        if extra is not note.extra or extra is not None and version(extra) != note.extra_version:
            return None  # a pair that somebody brought
        return True

    def _sharing(self, i):
        """Places of the weights in the same memory block as this one: their version counters may be
        one."""
        if self.blocks is None:
            self.blocks = {}
            for k, p in enumerate(self.tensors):
                self.blocks.setdefault(local(p).untyped_storage().data_ptr(), []).append(k)
        found = self.blocks.get(local(self.tensors[i]).untyped_storage().data_ptr(), ())
        return found if i in found else (i,)  # it has moved meanwhile

    # ---- Noting ----------------------------------------------------------------------------------

    def _note(self, i, extra, copied=None):
        p, note = self.tensors[i], self.notes[i]
        self.versions[i] = version(p)
        place = _place(p)
        if self.places[i] != place:
            self.places[i], note.held, self.blocks, self.token = (
                place,
                local(p).detach(),
                None,
                None,
            )
        note.extra, note.extra_version = extra, None if extra is None else version(extra)
        note.compiled, note.copied = self.compiled, copied
        note.witness = None if self.witness is None else version(self.witness)

    def _hash(self, places):
        """Makes hashes after our own writes, or forgets them. Those in state dictionaries are of
        the past."""
        if not self.hashing and not self.some_known:
            return
        for reference in self.given_out:
            hashes = reference()
            if hashes is not None:
                hashes.fill_(UNKNOWN)
        self.given_out = []
        if len(places) == len(self.notes):
            self.some_known = self.hashing
        for i in places:
            self.notes[i].hashes = row_hashes(self.tensors[i]) if self.hashing else None
            self.notes[i].brought = False

    def bring(self, p, extra, hashes):
        """Takes a residual that was loaded with the hashes of its weight, which may come later."""
        if p not in self.index:
            self._add(p)
        i = self.index[p]
        self.some_known = True
        self.versions[i] = self.places[i] = None
        self.notes[i].hashes, self.notes[i].brought = hashes, True
        self.notes[i].extra, self.notes[i].extra_version = extra, version(extra)

    def hashes_of(self, p):
        """Hashes of the weight that the residual of p belongs to, for a state dictionary; None
        where nobody knows. strangers() has looked. They become UNKNOWN with our next write, as the
        residual in that dictionary goes on.
        """
        if p not in self.index:
            return None
        note = self.notes[self.index[p]]
        if note.hashes is None:
            note.hashes = row_hashes(p)
            if note.hashes is None:
                return None
            self.some_known = True
        given = note.hashes.clone()
        self.given_out.append(weakref.ref(given))
        return given

    def _add(self, p):
        self.index[p] = len(self.tensors)
        for values, value in (
            (self.tensors, p),
            (self.versions, None),
            (self.places, None),
            (self.notes, _Note()),
        ):
            values.append(value)
        self.blocks = self.token = None

    def wrote(self, tensors, extra_of, copied=None):
        """We wrote these, after strangers() had looked. copied: as strangers()'s `given`, at the
        end of a compiled step."""
        for p in tensors:
            if p not in self.index:
                self._add(p)
            self._note(self.index[p], extra_of(p), copied and copied[p])
        self._hash([self.index[p] for p in tensors])
        if len(tensors) == 1:
            for i in self._sharing(self.index[tensors[0]]):
                self.versions[i] = version(self.tensors[i])

    def wrote_all(self, tensors, extra_of, token):
        """As wrote(), of all that are known and some that may not be; strangers() had looked at
        all, with the same token."""
        self.versions = versions(self.tensors)
        self._hash(range(len(self.tensors)))
        if len(tensors) != len(self.tensors):
            self.wrote([p for p in tensors if p not in self.index], extra_of)
        self.token = token

    def keep(self, tensors):
        """Forgets all others."""
        wanted = set(map(id, tensors))
        kept = [
            row
            for row in zip(self.tensors, self.versions, self.places, self.notes)
            if id(row[0]) in wanted
        ]
        if len(kept) < len(self.tensors):
            self.tensors, self.versions, self.places, self.notes = (
                map(list, zip(*kept)) if kept else ([], [], [], [])
            )
            self.index = {p: i for i, p in enumerate(self.tensors)}
            self.blocks = self.token = None
