"""Watches who wrote a weight last, to tell whether a residual or error code still belongs to it.

A residual means something only beside the very bits that it was left over from. After every write
of this package the version counter, address and residual of the weight are noted. State says what a
later look may find, and what becomes of the residual then. Weights of 16 and of 8 bits are judged
alike.

In-place writes to `p.data` and through raw pointers move no counter and cannot be seen. Those who
write so say so: Optimizer.weights_changed().
"""

import enum
import weakref

import torch

from .._tensors import devices, sharding
from .._tensors.sharding import is_dtensor, is_packed, local, stored
from .._tensors.torch_private import version as _get
from .bits import UNKNOWN, changed_rows, digest, fits, row_hashes, same_bits

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


# ---- The states of a weight ----------------------------------------------------------------------


class State(enum.Enum):
    """What is known of a weight beside its residual. Our next write makes every weight LEFT, and so
    does a judgement, which keeps the residual or drops it."""

    LEFT = "nobody has written the weight since this package did"
    MOVED = "it lies elsewhere, and its former memory has the same bits, which nobody has written"
    RECYCLED = (
        "it lies elsewhere, torch has counted no write to it, and its former memory lies on another"
        " device or has other weights by now, as trainers leave it that swap blocks"
    )
    LOADED = "a loaded state or a new engine has brought the residual; the weight may still come"
    PAIR = "weight and residual were both written, as checkpoints do that load in place"
    FOUND = "the residual was put beside the weight by hand"
    BLURRED = "a compiled step has moved the counter, and its witness cannot tell by how much"
    TOLD = "somebody has said that the weight was written"
    WRITTEN = "the counter has moved, or other bits lie elsewhere"


def _drops(state, rows, weight, extra):
    """Judges a residual. Returns True if some of it is to be dropped.

    rows    which rows of the weight have other bits than those that the residual was left over
            from, by their hashes; None if nobody knows
    """
    if state in (State.LEFT, State.MOVED):
        return False
    if rows is not None:
        return bool(rows.any())
    if state in (State.LOADED, State.PAIR):
        return extra is not None and not fits(weight, extra)
    return state is not State.RECYCLED


class _Note:
    """What is noted of one weight beside its version and place."""

    def __init__(self):
        self.held = self.hashes = self.block = self.extra = self.extra_version = None
        self.state = State.LOADED

    @property
    def in_file(self):
        """True if a token stands for the residual."""
        return self.extra is not None and not self.extra.numel()


class Watch:
    """Weights as this package left them.

    Around the operator of a compiled step the compiler makes increments of its own, more or fewer
    depending on how it compiled. They are read off a witness: a tensor that goes to the operator
    like a weight and that nobody else writes.
    """

    def __init__(self, witness=None):
        # Parallel lists; `index` is the place of each tensor in them.
        self.tensors, self.versions, self.places, self.notes, self.index = [], [], [], [], {}
        #: the places of the weights in each memory block, as keys, by its address
        self.blocks = {}
        #: the token of a caller that knows the places as they are noted, which spares a second look
        self.token = None
        #: compiled: compiled steps so far; witness_copied: True if the last one got a copy of the
        #: witness
        self.witness, self.compiled, self.witness_copied = witness, 0, False
        #: hashing: True if hashes are made after each write of ours
        #: some_known: True if a note may have hashes, or is not LEFT
        self.hashing, self.some_known = False, False
        #: references to hashes in state dictionaries, which our next write outdates
        self.given_out = []

    def __len__(self):
        return len(self.tensors)

    # ---- Looking ---------------------------------------------------------------------------------

    def strangers(self, extra_of, only=None, given=None, token=None, decides=True):
        """Returns (weight, rows, state) of each weight whose residual has to go, in the rows that
        changed, or in all rows for None. extra_of(weight) returns the residual beside a weight, or
        None. The other weights are noted as they are now.

        only: looks at this weight alone. given: inside a compiled step, for each weight True if the
        operator got a copy of it; the same for the witness under None. decides: also judges
        residuals that were brought. Until then their weights may still come.
        """
        if only is not None:
            looked = self._sharing(self.index[only]) if only in self.index else ()
        else:
            if self._unchanged(token):
                return []
            looked = range(len(self.tensors))
        found = []
        for i in looked:
            p, note = self.tensors[i], self.notes[i]
            if given is not None and p not in given:
                self._sit_out(i)
                continue
            if not decides and note.state in (State.LOADED, State.FOUND):
                continue
            extra = extra_of(p)
            state = self._look(i, extra, given)
            if state is State.LEFT:
                continue
            # Hashes are of the weight that left this residual, or a copy of it.
            known = state is not State.PAIR or self._is_copy(note, extra)
            rows = changed_rows(p, note.hashes) if known else None
            if _drops(state, rows, p, extra):
                found.append((p, rows, state))
                self.hashing = True
                continue
            if rows is None and state is not State.MOVED:
                note.hashes = None
            self._note(i, extra)
        return found

    def _unchanged(self, token):
        if self.witness is not None and self.tensors:
            return False  # compiled steps need a closer look
        if (token is None or token is not self.token) and list(
            map(_place, self.tensors)
        ) != self.places:
            return False
        return versions(self.tensors) == self.versions

    def _look(self, i, extra, given):
        """Returns the State of a weight as it is now."""
        p, note, known = self.tensors[i], self.notes[i], self.versions[i]
        if note.state is not State.LEFT:
            return note.state
        moved = _place(p) != self.places[i]
        if version(p) == known and not moved:
            return State.LEFT
        if self.witness is not None and known is not None and note.witness is not None:
            by_compiler = version(self.witness) - note.witness
            if by_compiler and not (
                self._went_alike(note) and (given is None or given[p] == given[None])
            ):
                return State.BLURRED
            known += by_compiler
        if version(p) == known and not moved:
            return State.LEFT
        if moved and version(note.held) == known and same_bits(note.held, p):
            return State.MOVED
        if moved and version(p) == known and self._is_recycled(note.held, p):
            return State.RECYCLED
        if extra is not note.extra or extra is not None and version(extra) != note.extra_version:
            return State.PAIR
        return State.WRITTEN

    def _went_alike(self, note):
        """Returns True if a weight went through the last compiled step as the witness did, so that
        both saw the same increments."""
        return note.compiled == self.compiled and note.copied in (None, self.witness_copied)

    def _sit_out(self, i):
        """Notes that a weight takes no part in a compiled step: the increments after the last one
        are over, and the witness says no more of it."""
        note = self.notes[i]
        if note.state is State.LEFT and note.witness is not None and self._went_alike(note):
            if self.versions[i] is not None:
                self.versions[i] += version(self.witness) - note.witness
            note.witness = None

    def _is_recycled(self, held, p):
        """Returns True if the former memory of a weight lies on another device or has other
        weights."""
        held = stored(held)
        if devices.of(held) != devices.of(stored(p)):
            return True
        memory = held.untyped_storage().data_ptr()
        others = (q for q in self.tensors if q is not p)
        return any(stored(q).untyped_storage().data_ptr() == memory for q in others)

    @staticmethod
    def _is_copy(note, extra):
        """Returns True if a residual holds what we left, in another tensor."""
        return (
            extra is not None
            and note.extra is not None
            and extra is not note.extra
            and version(note.extra) == note.extra_version
            and same_bits(extra, note.extra)
        )

    def _sharing(self, i):
        """Returns the places of the weights in the same memory block as this one, because they may
        share a version counter."""
        found = self.blocks.get(_block(self.tensors[i]), ())
        return list(found) if i in found else [i]  # it has moved meanwhile

    # ---- What others bring or tell ---------------------------------------------------------------

    def is_left(self, p, extra):
        """Returns True if this residual is the one that is noted beside the weight."""
        return p in self.index and self.notes[self.index[p]].extra is extra

    def bring(self, p, extra, hashes=None, state=State.LOADED):
        """Takes a residual that has come beside a weight in this State. `hashes` are those of the
        weight that it belongs to, if somebody knows them."""
        i = self._place_of(p)
        note = self.notes[i]
        self.versions[i] = self.places[i] = None
        note.hashes, note.state, self.some_known = hashes, state, True
        note.extra, note.extra_version = extra, version(extra)

    def tell(self, p, extra):
        """Takes it from the caller that a weight was written."""
        note = self.notes[self.index[p]] if p in self.index else None
        self.bring(p, extra, note and note.hashes, State.TOLD)

    def replaced(self, p, extra):
        """Notes that this package has put another tensor with the same residual in its place."""
        note = self.notes[self.index[p]]
        note.extra, note.extra_version = extra, version(extra)

    def adopt(self, extras, params=None, state=State.FOUND):
        """Takes residuals that somebody has put beside other weights than those that left them, as
        trainers do who make a parameter anew. The bits of those weights judge them. `extras` holds
        all residuals by weight. `params` returns the weights that count, of which all do if it is
        None. `state` is that of residuals that nobody knows."""
        others = {
            p: extra
            for p, extra in extras.items()
            if isinstance(extra, torch.Tensor) and extra.numel() and not self.is_left(p, extra)
        }
        if others and params is not None:
            members = set(map(id, params()))
            others = {p: extra for p, extra in others.items() if id(p) in members}
        if not others:
            return
        left = {id(note.extra): i for i, note in enumerate(self.notes)}
        copies, found = None, []
        for p, extra in others.items():
            i, own = left.get(id(extra)), self.index.get(p)
            if i is None and own is not None and self.notes[own].in_file:
                self.replaced(p, extra)  # read from its file
                continue
            if i is None:
                if copies is None:
                    copies = {}
                    for k, note in enumerate(self.notes):
                        if note.extra is not None and note.extra.numel():
                            copies.setdefault(digest(note.extra), []).append(k)
                places = copies.get(digest(extra), ())
                if own in places and same_bits(self.notes[own].extra, extra):
                    self.replaced(p, extra)
                    continue
                i = next((k for k in places if self._is_copy(self.notes[k], extra)), None)
            if i is not None:
                found.append((p, extra, self._hashes_left(i), State.FOUND))
            else:
                found.append((p, extra, None, state if local(extra).any() else State.LOADED))
        for one in found:
            self.bring(*one)

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

    # ---- Noting ----------------------------------------------------------------------------------

    def _note(self, i, extra, copied=None):
        p, note = self.tensors[i], self.notes[i]
        self.versions[i] = version(p)
        place = _place(p)
        if self.places[i] != place:
            self.places[i], note.held = place, p.detach()
            self._note_block(i)
        note.extra, note.extra_version = extra, None if extra is None else version(extra)
        note.state, note.compiled, note.copied = State.LEFT, self.compiled, copied
        note.witness = None if self.witness is None else version(self.witness)

    def _note_block(self, i):
        """Notes which memory block a weight lies in."""
        note, block = self.notes[i], _block(self.tensors[i])
        self.token = None
        if block != note.block:
            self.blocks.get(note.block, {}).pop(i, None)
            self.blocks.setdefault(block, {})[i] = True
            note.block = block

    def _place_of(self, p):
        """Returns the place of a weight in the lists, which it gets if it is not known."""
        if p not in self.index:
            self.index[p] = len(self.tensors)
            self.tensors.append(p)
            self.versions.append(None)
            self.places.append(None)
            self.notes.append(_Note())
            self._note_block(self.index[p])
        return self.index[p]

    def _hash(self, places, copies=None):
        """Makes hashes after our own writes, or forgets them. Those in state dictionaries become
        UNKNOWN, because they are outdated. `copies` holds what was written in place of weights."""
        if not self.hashing and not self.some_known:
            return
        for reference in self.given_out:
            hashes = reference()
            if hashes is not None:
                hashes.fill_(UNKNOWN)
        self.given_out = []
        for i in places:
            written = self.tensors[i] if copies is None else copies[self.tensors[i]]
            self.notes[i].hashes = row_hashes(written) if self.hashing else None
        if len(places) == len(self.notes):
            self.some_known = self.hashing

    def hashes_of(self, p):
        """Returns a copy of the hashes of the weight that the residual of p belongs to. Returns
        None if nobody knows them. strangers() must have looked before."""
        note = self.notes[self.index[p]] if p in self.index else None
        if note is None:
            return None
        if note.hashes is None and note.state is State.LEFT:
            note.hashes = row_hashes(p)
            self.some_known = True
        return None if note.hashes is None else note.hashes.clone()

    def give(self, hashes):
        """Takes hashes that a state dictionary holds. Our next write makes them UNKNOWN, because
        the residual in that dictionary goes on."""
        self.given_out.append(weakref.ref(hashes))

    def wrote(self, tensors, extra_of, copied=None, copies=None):
        """Notes our write of these weights. strangers() must have looked before. At the end of a
        compiled step `copied` is as `given` of strangers(), and `copies` holds the tensors that the
        operator got, by weight."""
        for p in tensors:
            self._note(self._place_of(p), extra_of(p), copied and copied[p])
        self._hash([self.index[p] for p in tensors], copies)
        if len(tensors) == 1:
            for i in self._sharing(self.index[tensors[0]]):
                if self.notes[i].state is State.LEFT:
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
