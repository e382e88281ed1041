"""Watches who wrote a weight last, to tell whether a residual or error code still belongs to it.

A residual means something only beside the very bits that it was left over from. After every write
of this package the version counter of the weight is noted. If it has moved since, somebody else
wrote, as load_state_dict(), copy_() and masks do. In-place writes to `p.data` move no counter and
cannot be seen; another tensor put there can.

A write may put the same bits back: averages that are swapped in and out, rows that are restored.
Hashes show that, one for each row of a matrix. They take a pass over the weights, so they are made
only after the first write of somebody else, and for what is saved. The residuals that this first
write costs are less than a unit in the last place of each weight, once.
"""

import weakref
from functools import lru_cache

import torch

from .._tensors import devices, sharding
from .._tensors.sharding import is_dtensor, is_packed, local, stored
from .._tensors.torch_private import version as _get

#: classes whose tensors count all writes themselves
_WHOLE = {torch.Tensor, torch.nn.Parameter}


def version(tensor):
    """Returns how often torch has counted a write to a tensor. For a DTensor it adds the writes to
    its local part, and for 8-bit weights those to their bytes. Returns None if torch counts
    none."""
    try:
        found = _get(tensor)
        if is_dtensor(tensor):
            found += _get(local(tensor))
        return found + _get(stored(tensor)) if is_packed(tensor) else found
    except RuntimeError:  # tensors of inference mode count nothing
        return None


def versions(tensors):
    """Returns version() of each tensor."""
    if sharding.seen and not _WHOLE.issuperset(map(type, tensors)):
        return list(map(version, tensors))
    try:
        return list(map(_get, tensors))
    except RuntimeError:
        return list(map(version, tensors))


def _place(tensor):
    tensor = stored(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _block(tensor):
    """Returns the address of the memory block that a weight lies in."""
    return stored(tensor).untyped_storage().data_ptr()


def _digest(extra):
    """Returns something that two residuals have in common if they hold the same bits."""
    here = local(extra)
    flat = devices.contiguous(here).view(-1).view(torch.uint8)
    return here.shape, here.dtype, int(flat.sum(dtype=torch.int64))


#: elements of a vector that share a hash
PIECE = 256
#: elements that are hashed at a time. A CPU takes as many as its cache holds. A GPU takes more,
#: because it waits for each call.
_AT_ONCE = {"cpu": 1 << 18, None: 1 << 24}
#: stands for a hash that is not known
UNKNOWN = 0


@lru_cache(64)
def _odd_numbers(n, device):
    """Returns n odd 32-bit numbers, one for each column. They are always the same."""
    x = torch.arange(n, dtype=torch.int64, device=device) * 0x9E3779B1
    x = (x ^ x >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    return ((x ^ x >> 12) | 1).to(torch.int32)


@torch.no_grad()
def row_hashes(tensor):
    """Returns the hashes of a weight of 16 or 8 bits, as int64 on its device. A matrix has one for
    each row, a vector one for each 256 elements. Returns None for other weights.

    A hash is the sum over the row of bits times a number of the column, modulo 2^32, and never
    UNKNOWN. One changed element always changes it.
    """
    t = devices.contiguous(stored(tensor).detach())
    if is_packed(tensor):
        t = t.view(torch.int16)
    if t.element_size() != 2:
        return None
    bits = (
        t.reshape(t.shape[0], t.shape[1:].numel())
        if t.dim() > 1
        else torch.nn.functional.pad(t.reshape(-1), (0, -t.numel() % PIECE)).view(-1, PIECE)
    )
    bits, columns = bits.view(torch.int16), max(bits.shape[1], 1)
    factors = _odd_numbers(columns, t.device)
    found = torch.empty(len(bits), dtype=torch.int64, device=t.device)
    rows = min(max(_AT_ONCE.get(t.device.type, _AT_ONCE[None]) // columns, 1), len(bits))
    products = torch.empty(rows, columns, dtype=torch.int32, device=t.device)
    for some, out in zip(bits.split(max(rows, 1)), found.split(max(rows, 1))):
        torch.mul(some, factors, out=products[: len(some)])
        torch.sum(products[: len(some)], 1, dtype=torch.int64, out=out)
    return found.bitwise_and_(0xFFFFFFFF).bitwise_or_(1 << 32)


def _changed(tensor, hashes):
    """Returns which rows have other bits than their hashes say. Returns None if the hashes are
    unknown or of another shape."""
    if hashes is None or not hashes.numel() or bool((hashes == UNKNOWN).any()):
        return None
    now = row_hashes(tensor)
    return now != hashes.to(now.device) if now is not None and now.shape == hashes.shape else None


def clear_rows(extra, rows, fresh=None):
    """Drops the residuals of these rows, as row_hashes() counts rows, or of all rows for None.
    `fresh` are the error codes that 8-bit weights begin with."""
    here = local(extra)
    if fresh is not None:
        here.copy_(
            fresh if rows is None else torch.where(rows.to(here.device)[:, None], fresh, here)
        )
    elif rows is None:
        here.zero_()
    elif here.dim() > 1:
        here[rows.to(here.device)] = 0
    else:
        here[rows.to(here.device).repeat_interleave(PIECE)[: here.numel()].view(here.shape)] = 0


def _same_bits(a, b):
    """Returns True if two tensors hold the same bits, index by index. `a` may have lost its
    memory."""
    a, b = stored(a), stored(b)
    if a.shape != b.shape or a.dtype != b.dtype or not a.untyped_storage().nbytes():
        return False
    if devices.of(a) != devices.of(b):
        a, b = devices.to_cpu(a), devices.to_cpu(b)
    return torch.equal(*(devices.contiguous(t).view(-1).view(torch.uint8) for t in (a, b)))


class _Note:
    """What is noted of one weight beside its version and place."""

    def __init__(self):
        self.held = self.hashes = self.block = None
        self.brought = False


class Watch:
    """Weights as this package left them. An unknown weight may have any value. Our next write makes
    it known.

    The counter is not enough in two cases. A weight that lies elsewhere than before may be
    unchanged. It is, if its former memory, which is held until then, was not written either and has
    the same bits. It counts as unchanged too if its former memory is used for other weights by now.

    The other case is the operator of a compiled step. The compiler makes increments of its own
    around it, more or fewer depending on how it compiled. They are read off a witness: a tensor
    that goes to the operator like a weight and that nobody else writes.
    """

    def __init__(self, witness=None):
        # Parallel lists; `index` is the place of each tensor in them.
        self.tensors, self.versions, self.places, self.notes, self.index = [], [], [], [], {}
        #: the places of the weights in each memory block, as keys, by its address
        self.blocks = {}
        #: residuals that adopt() has judged, by weight: a weak reference and the version
        self.judged = {}
        #: the token of a caller that knows the places as they are noted, which spares a second look
        self.token = None
        #: compiled: compiled steps so far; witness_copied: True if the last one got a copy of the
        #: witness
        self.witness, self.compiled, self.witness_copied = witness, 0, False
        #: hashing: True if hashes are made after each write of ours
        #: some_known: True if a note may have hashes, or be of a pair that was brought
        self.hashing, self.some_known = False, False
        #: references to hashes in state dictionaries, which our next write outdates
        self.given_out = []

    def __len__(self):
        return len(self.tensors)

    # ---- Looking ---------------------------------------------------------------------------------

    def strangers(self, extra_of, only=None, given=None, token=None, decides=True):
        """Returns each weight that somebody else has written, with the rows that changed, or None
        for all rows. extra_of(weight) returns the residual beside a weight, or None. A weight that
        was merely moved, or came with another residual, is noted as it is now.

        only: looks at this weight alone. given: inside a compiled step, for each weight True if the
        operator got a copy of it; the same for the witness under None. decides: also judges pairs
        that were brought. Until then their weights may still come.
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
        """Returns True if a residual that somebody brought holds what we left."""
        return (
            extra is not None
            and note.extra is not None
            and extra is not note.extra
            and version(note.extra) == note.extra_version
            and _same_bits(extra, note.extra)
        )

    def _unchanged(self, token):
        if self.witness is not None and self.tensors:
            return False  # compiled steps need a closer look
        if (token is None or token is not self.token) and list(
            map(_place, self.tensors)
        ) != self.places:
            return False
        return versions(self.tensors) == self.versions

    def _judge(self, i, extra, given):
        """Judges one weight. Returns True if somebody else wrote it, and False if nobody did.
        Returns None if it was moved or nothing can be proved, so that it counts as it is."""
        p, note, known = self.tensors[i], self.notes[i], self.versions[i]
        by_compiler = (
            version(self.witness) - note.witness
            if self.witness is not None and known is not None
            else 0
        )
        if by_compiler:
            # Only weights that went through the same calls in the same way saw the same increments.
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
        if moved and version(p) == known and self._is_recycled(note.held, p):
            return None
        if extra is not note.extra or extra is not None and version(extra) != note.extra_version:
            return None  # a pair that somebody brought
        return True

    def _is_recycled(self, held, p):
        """Returns True if the former memory of a weight is used for other weights now, or lies on
        another device. Trainers that swap blocks or offload layers leave it so. It then proves
        nothing, and torch has counted no write to the weight."""
        held = stored(held)
        if devices.of(held) != devices.of(stored(p)):
            return True
        memory = held.untyped_storage().data_ptr()
        others = (q for q in self.tensors if q is not p)
        return any(stored(q).untyped_storage().data_ptr() == memory for q in others)

    def _sharing(self, i):
        """Returns the places of the weights in the same memory block as this one, because they may
        share a version counter."""
        found = self.blocks.get(_block(self.tensors[i]), ())
        return list(found) if i in found else [i]  # it has moved meanwhile

    # ---- Noting ----------------------------------------------------------------------------------

    def _note(self, i, extra, copied=None):
        p, note = self.tensors[i], self.notes[i]
        self.versions[i] = version(p)
        place = _place(p)
        if self.places[i] != place:
            self.places[i], note.held = place, p.detach()
            self._note_block(i)
        note.extra, note.extra_version = extra, None if extra is None else version(extra)
        note.compiled, note.copied = self.compiled, copied
        note.witness = None if self.witness is None else version(self.witness)

    def _note_block(self, i):
        """Notes which memory block a weight lies in."""
        note, block = self.notes[i], _block(self.tensors[i])
        self.token = None
        if block != note.block:
            self.blocks.get(note.block, {}).pop(i, None)
            self.blocks.setdefault(block, {})[i] = True
            note.block = block

    def _hash(self, places):
        """Makes hashes after our own writes, or forgets them. Those in state dictionaries become
        UNKNOWN, because they are outdated."""
        if not self.hashing and not self.some_known:
            return
        for reference in self.given_out:
            hashes = reference()
            if hashes is not None:
                hashes.fill_(UNKNOWN)
        self.given_out = []
        for i in places:
            self.notes[i].hashes = row_hashes(self.tensors[i]) if self.hashing else None
            self.notes[i].brought = False
        if len(places) == len(self.notes):
            self.some_known = self.hashing

    def bring(self, p, extra, hashes):
        """Takes a residual that was loaded with the hashes of its weight. The weight may come
        later."""
        if p not in self.index:
            self._add(p)
        i = self.index[p]
        self.some_known = True
        self.versions[i] = self.places[i] = None
        self.notes[i].hashes, self.notes[i].brought = hashes, True
        self.notes[i].extra, self.notes[i].extra_version = extra, version(extra)

    def is_left(self, p, extra):
        """Returns True if this residual was left beside this weight, loaded for it, or judged
        before."""
        note = self.notes[self.index[p]] if p in self.index else None
        if note is not None and (note.extra is extra or note.brought):
            return True
        reference, seen = self.judged.get(p, (None, None))
        return reference is not None and reference() is extra and seen == version(extra)

    def judged_all(self, extras):
        """Notes that adopt() has judged these residuals. `extras` holds all by weight."""
        self.judged = {p: (weakref.ref(extra), version(extra)) for p, extra in extras.items()}

    def adopt(self, extras):
        """Takes residuals that somebody has put beside other weights than those that left them, as
        trainers do who make a parameter anew. The bits of those weights judge them. An unknown
        weight may have a copy of a residual. `extras` holds all residuals by weight."""
        others = {
            p: extra
            for p, extra in extras.items()
            if isinstance(extra, torch.Tensor) and not self.is_left(p, extra)
        }
        if not others:
            return
        left = {id(note.extra): i for i, note in enumerate(self.notes)}
        copies, found = None, []
        for p, extra in others.items():
            i = left.get(id(extra))
            if i is None and p not in self.index and bool(local(extra).any()):
                if copies is None:
                    copies = {}
                    for k, note in enumerate(self.notes):
                        if note.extra is not None:
                            copies.setdefault(_digest(note.extra), []).append(k)
                places = copies.get(_digest(extra), ())
                i = next((k for k in places if self._is_copy(self.notes[k], extra)), None)
            if i is not None:
                found.append((p, extra, self._hashes_left(i)))
        for p, extra, hashes in found:
            if hashes is None:  # no row has such a hash
                hashes = torch.ones_like(row_hashes(p))
            self.bring(p, extra, hashes)

    def _hashes_left(self, i):
        """Returns hashes of a weight as it was left, or None if nobody knows its bits any more."""
        p, note = self.tensors[i], self.notes[i]
        if note.hashes is not None:
            return note.hashes
        if version(p) == self.versions[i] and _place(p) == self.places[i]:
            return row_hashes(p)
        if note.held is not None and not is_packed(p) and version(note.held) == self.versions[i]:
            return row_hashes(note.held)
        return None

    def hashes_of(self, p):
        """Returns hashes of the weight that the residual of p belongs to, for a state dictionary.
        Returns None if nobody knows them. strangers() must have looked before. Our next write makes
        them UNKNOWN, because the residual in that dictionary goes on."""
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
        self.tensors.append(p)
        self.versions.append(None)
        self.places.append(None)
        self.notes.append(_Note())
        self._note_block(self.index[p])

    def wrote(self, tensors, extra_of, copied=None):
        """Notes our write of these weights. strangers() must have looked before. `copied` is as
        `given` of strangers(), at the end of a compiled step."""
        for p in tensors:
            if p not in self.index:
                self._add(p)
            self._note(self.index[p], extra_of(p), copied and copied[p])
        self._hash([self.index[p] for p in tensors])
        if len(tensors) == 1:
            for i in self._sharing(self.index[tensors[0]]):
                self.versions[i] = version(self.tensors[i])

    def wrote_all(self, tensors, extra_of, token):
        """Does the work of wrote() for all known weights and some that may not be known.
        strangers() must have looked at all, with the same token."""
        self.versions = versions(self.tensors)
        self._hash(range(len(self.tensors)))
        if len(tensors) != len(self.tensors):
            self.wrote([p for p in tensors if p not in self.index], extra_of)
        self.token = token

    def keep(self, tensors):
        """Forgets all other weights."""
        wanted = set(map(id, tensors))
        kept = [i for i, p in enumerate(self.tensors) if id(p) in wanted]
        if len(kept) < len(self.tensors):
            for name in ("tensors", "versions", "places", "notes"):
                values = getattr(self, name)
                setattr(self, name, [values[i] for i in kept])
            self.index = {p: i for i, p in enumerate(self.tensors)}
            self.blocks = {}
            for i, note in enumerate(self.notes):
                note.block = None
                self._note_block(i)
