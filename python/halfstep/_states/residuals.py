"""Keeps the residuals and error codes beside an optimizer's weights. Drops them if somebody else
has written the weight that they belong to."""

import contextlib

import torch

from .._tensors import devices
from .._tensors.sharding import is_packed, local
from .._tensors.torch_public import warn
from . import dither
from .store import StoredState
from .watch import PIECE, Watch, clear_rows


class Residuals:
    """Watches the weights of an optimizer that have a residual or error code beside them.

    watch    the weights as this package left them
    """

    def __init__(self, parts):
        self.groups, self.names = parts.groups, parts.names
        self.watch = Watch()
        self._warned = False
        # In a compiled step, by weight: True if the operator got a copy of it (see watch.py). The
        # witness is under None.
        self._copies = None

    def restart(self, witness=None):
        """Forgets all weights. `witness` is that of compiled steps."""
        self.watch = Watch(witness)

    def restore(self, watch):
        """Restores an earlier watch."""
        self.watch = watch

    def of(self, p):
        """Returns the residual or error code beside a weight, or None. In its place returns a
        token if it is in a file."""
        state = self.groups.state.get(p)
        if isinstance(state, StoredState):
            return state.token
        return state.get("weight.extra") if state else None

    # ---- Writes of others ------------------------------------------------------------------------

    def notice(self, only=None, token=None, decides=True):
        """Drops the residuals of weights, or of `only`, in the rows that somebody else has written
        since this optimizer did. `decides`: also judges a loaded state, whose weights must be there
        by now."""
        if not self.watch:
            return
        if token is None and not (only is not None and self.watch.is_left(only, self.of(only))):
            self.watch.adopt({p: self.of(p) for p in self.groups.state})
        for p, rows in self.watch.strangers(self.of, only, self._copies, token, decides):
            if self.of(p) is None:
                continue
            fresh, extra = None, self.groups.state[p]["weight.extra"]
            if is_packed(p):
                here = local(extra)
                fresh = dither.error_codes(p, self.names.find(p), devices.of(here))
            clear_rows(extra, rows, fresh)
            self.groups.state[p]["weight.extra"] = extra
            self.watch.wrote([p], self.of)
            if not self._warned:
                self._warned = True
                warn(self.words(self.names.find(p), rows, is_packed(p)))

    @staticmethod
    def words(name, rows, packed):
        """Returns the warning about a weight that somebody else wrote. `rows` are those that
        changed, or None. `packed`: it has 8 bits."""
        where, other = "it", "weights='bf16-sr'"
        if rows is not None:
            where = f"{int(rows.sum())} of its {rows.numel()} rows (of a vector: pieces of {PIECE})"
        if packed:
            other = "halfstep.nn.quantize_(model, 'int8-sr')"
        return (
            f"the weight of parameter {name!r} was written, but not by this optimizer. The"
            f" residuals kept beside {where} were dropped, because they belonged to the old weight."
            " This is right after load_state_dict(). But what writes it at each step drops them"
            " each time, and small updates with them. If that is another optimizer, take"
            f" {other}, which keeps no residuals. If it is a mask or a normalization, call"
            " optimizer.write_weight(p, optimizer.read_weight(p) * mask) instead of it. This"
            " warning is given once"
        )

    # ---- Writes of this optimizer ----------------------------------------------------------------

    def wrote(self, params):
        """Notes that this optimizer wrote these weights."""
        self.watch.wrote(params, self.of)

    def stepped(self, engine, stepped):
        """Notes that a step wrote these weights."""
        if not engine.guarded:
            return
        whole = len(stepped) == len(engine.params)
        written = engine.guarded if whole else [p for p in stepped if p in engine.guarded]
        if len(written) > 1:
            self.watch.wrote_all(written, self.of, self.token(engine))
        elif written:
            self.wrote(list(written))

    @staticmethod
    def token(engine):
        """Returns a token for Watch if all weights are known to lie as before, else None."""
        return engine.plain if engine.weights_are_plain else None

    def built(self, engine):
        """Notes that handles were made anew."""
        self.watch.keep(engine.guarded)
        self.wrote([p for p in engine.converted if p in self.watch.index])
        self.watch.judged_all({p: self.of(p) for p in engine.guarded})

    @contextlib.contextmanager
    def compiled_step(self, cache, given, witness):
        """Returns a context for the operator of a compiled step. `given` holds its weights and
        gradients by parameter, and `witness` is its witness. `cache` has the engine."""
        copies = {p: weight.data_ptr() != p.data_ptr() for p, (weight, _) in given.items()}
        copies[None] = witness.data_ptr() != self.watch.witness.data_ptr()
        self._copies = copies
        try:
            yield
        finally:
            self._copies = None
        self.watch.compiled += 1
        self.watch.witness_copied = copies[None]
        engine = cache.engine
        if engine is not None and engine.guarded:
            self.watch.wrote([p for p in given if p in engine.guarded], self.of, copies)

    # ---- Saving ----------------------------------------------------------------------------------

    def hashes(self):
        """Returns by parameter the hashes of the weight that its residual belongs to. Leaves out
        weights whose hashes are not known."""
        found = {
            p: self.watch.hashes_of(p)
            for p in self.groups.state
            if isinstance(p, torch.Tensor) and self.of(p) is not None
        }
        return {p: hashes for p, hashes in found.items() if hashes is not None}

    def take_hashes(self, hashes):
        """Takes the hashes() of a loaded optimizer."""
        for p, known in hashes.items():
            extra = self.of(p)
            if extra is not None and isinstance(known, torch.Tensor) and known.dtype == torch.int64:
                self.watch.bring(p, extra, known.clone())
