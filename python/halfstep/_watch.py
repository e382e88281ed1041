"""Who wrote a weight last: what tells whether a residual or error code still belongs to the weight beside it.

A residual means something only beside the very bits that it was left over from. After every write of this package the version
counter of the weight is noted; when it has gone on by itself, as load_state_dict(), copy_() and masks make it, somebody else
wrote. In-place writes to `p.data` move no counter and cannot be seen; another tensor put there can.
"""
import torch

from . import _devices, _sharding
from ._sharding import is_dtensor, local

_get = torch._C.TensorBase._version.__get__


def version(tensor):
    """How often torch has counted a write to a tensor; of a DTensor, to it or to what of it lies here."""
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


def _same_bits(a, b):
    """Whether two 16-bit tensors hold the same, index by index. `a` may have lost its memory."""
    a, b = local(a), local(b)
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device or not a.untyped_storage().nbytes():
        return False
    return torch.equal(*(_devices.contiguous(t).view(-1).view(torch.int16) for t in (a, b)))


class _Note:
    """What is kept of one weight beside its version and place."""

    __slots__ = ("held", "extra", "extra_version", "compiled", "witness", "copied")


class Watch:
    """Weights as this package left them. A weight that it does not know may be as it likes; our next write makes it known.

    Two things take more than the counter. A weight that lies elsewhere is still the same if the memory that it had, which is
    held until then, was not written either and has the same bits. And the operator of a compiled step stands between
    increments of the compiler's own, of which there are more or fewer depending on how it compiled. They are read off a
    witness: a tensor that goes to the operator like a weight and that nobody else writes.
    """

    def __init__(self, witness=None):
        # In parallel; `index` is the place of each tensor in them.
        self.tensors, self.versions, self.places, self.notes, self.index = [], [], [], [], {}
        self.blocks = None
        #: what stands for the places as they are noted: a caller who knows that it holds spares them a second look
        self.token = None
        #: compiled steps so far, and whether the last one got a copy of the witness
        self.witness, self.compiled, self.witness_copied = witness, 0, False

    def __len__(self):
        return len(self.tensors)

    # ---- Looking ----

    def strangers(self, extra_of, only=None, given=None, token=None):
        """The weights that somebody else has written. extra_of(weight): the residual beside it, or None.

        only: look at this one. given: inside a compiled step, for each weight whether the operator got a copy of it, and under
        None the same of the witness. What was merely moved, or came with another residual, is noted as it is now.
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
            verdict = self._judge(i, extra_of(p), given)
            if verdict:
                found.append(p)
            elif verdict is None:
                self._note(i, extra_of(p))
        return found

    def _unchanged(self, token):
        if self.witness is not None and self.tensors:
            return False  # nothing quick can be said
        if (token is None or token is not self.token) and list(map(_place, self.tensors)) != self.places:
            return False
        return versions(self.tensors) == self.versions

    def _judge(self, i, extra, given):
        """True: somebody else wrote it. False: nobody did. None: moved, or beyond proof, so that it counts as it is."""
        p, note, known = self.tensors[i], self.notes[i], self.versions[i]
        by_compiler = version(self.witness) - note.witness if self.witness is not None and known is not None else 0
        if by_compiler:
            # Only what went through the same calls in the same way saw the same increments.
            if note.compiled != self.compiled or note.copied not in (None, self.witness_copied) \
                    or given is not None and given[p] != given[None]:
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
        """Places of the weights in the same memory block as this one: their version counters may be one."""
        if self.blocks is None:
            self.blocks = {}
            for k, p in enumerate(self.tensors):
                self.blocks.setdefault(local(p).untyped_storage().data_ptr(), []).append(k)
        found = self.blocks.get(local(self.tensors[i]).untyped_storage().data_ptr(), ())
        return found if i in found else (i,)  # it has moved meanwhile

    # ---- Noting ----

    def _note(self, i, extra, copied=None):
        p, note = self.tensors[i], self.notes[i]
        self.versions[i] = version(p)
        place = _place(p)
        if self.places[i] != place:
            self.places[i], note.held, self.blocks, self.token = place, local(p).detach(), None, None
        note.extra, note.extra_version = extra, None if extra is None else version(extra)
        note.compiled, note.copied = self.compiled, copied
        note.witness = None if self.witness is None else version(self.witness)

    def _add(self, p):
        self.index[p] = len(self.tensors)
        for values, value in ((self.tensors, p), (self.versions, None), (self.places, None), (self.notes, _Note())):
            values.append(value)
        self.blocks = self.token = None

    def wrote(self, tensors, extra_of, copied=None):
        """We wrote these, after strangers() had looked. copied: as strangers()'s `given`, at the end of a compiled step."""
        for p in tensors:
            if p not in self.index:
                self._add(p)
            self._note(self.index[p], extra_of(p), copied and copied[p])
        if len(tensors) == 1:
            for i in self._sharing(self.index[tensors[0]]):
                self.versions[i] = version(self.tensors[i])

    def wrote_all(self, tensors, extra_of, token):
        """As wrote(), of all that are known and some that may not be; strangers() had looked at all, with the same token."""
        self.versions = versions(self.tensors)
        if len(tensors) != len(self.tensors):
            self.wrote([p for p in tensors if p not in self.index], extra_of)
        self.token = token

    def keep(self, tensors):
        """Forgets all others."""
        wanted = set(map(id, tensors))
        kept = [row for row in zip(self.tensors, self.versions, self.places, self.notes) if id(row[0]) in wanted]
        if len(kept) < len(self.tensors):
            self.tensors, self.versions, self.places, self.notes = map(list, zip(*kept)) if kept else ([], [], [], [])
            self.index = {p: i for i, p in enumerate(self.tensors)}
            self.blocks = self.token = None
