"""Keeps the residuals and error codes beside an optimizer's weights. Drops them if somebody else
has written the weight that they belong to."""

import contextlib
import difflib

import torch

from .._settings import naming
from .._tensors import devices, sharding
from .._tensors.sharding import is_packed, local, stored, stored_whole
from .._tensors.torch_private import is_in_buffer
from .._tensors.torch_public import increment_versions, warn
from . import dither
from .bits import PIECE, UNKNOWN, clear_rows
from .layout import HASHES
from .store import StoredState
from .watch import State, Watch

#: what a warning says beside a State in which bits were not seen to change
_UNPROVED = {
    State.LOADED: "was loaded without hashes, and is larger than rounding of the weight leaves it",
    State.PAIR: "was written with the weight, and is larger than rounding of it leaves it",
    State.FOUND: "was put beside it by hand, without the hashes that state_dict() keeps of the"
    " weight that it belongs to",
    State.BLURRED: "was left before steps that were compiled in several ways, and nothing tells"
    " whether something else has written the weight since",
}


class Residuals:
    """Watches the weights of an optimizer that have a residual or error code beside them.

    watch    the weights as this package left them
    """

    def __init__(self, parts):
        self.groups, self.names = parts.groups, parts.names
        self.watch = Watch()
        # The kinds of warnings that were given.
        self._warned = set()
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
        if only is not None and self.of(only) is None:
            return
        if token is None and not (only is not None and self.watch.is_left(only, self.of(only))):
            self.take_hashes()
            self.watch.adopt({p: self.of(p) for p in self.groups.state}, self.groups.params)
        if not self.watch:
            return
        for p, rows, state in self.watch.strangers(self.of, only, self._copies, token, decides):
            if self.of(p) is None:
                continue
            fresh, extra = None, self.groups.state[p]["weight.extra"]
            if is_packed(p):
                here = local(extra)
                fresh = dither.error_codes(p, self.names.find(p), devices.of(here))
            clear_rows(extra, rows, fresh)
            self.groups.state[p]["weight.extra"] = extra
            self.watch.wrote([p], self.of)
            if state is not State.TOLD:
                why = _UNPROVED.get(state) if rows is None else None
                if why not in self._warned:
                    self._warned.add(why)
                    text = self.words(self.names.find(p), why, rows, is_packed(p))
                    warn(f"{text}. This warning is given once")

    @staticmethod
    def words(name, why, rows, packed):
        """Returns the warning about a residual that was dropped. `why`: nothing has proved a write.
        `rows` are those that changed, or None. `packed`: the weight has 8 bits."""
        if why is not None:
            return f"the residual beside the weight of {name!r} {why}. It was dropped"
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
            " optimizer.write_weight(p, optimizer.read_weight(p) * mask) instead of it"
        )

    def tell(self, names):
        """Takes it from the caller that the weights of these names, or all for None, were written.
        Counts the write, which torch has not done."""
        known = {self.names.of(g, i): p for g, i, p in self.groups.members()}
        wanted = [names] if isinstance(names, str) else known if names is None else list(names)
        for name in wanted:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 6, 0.4) or list(known)
                raise ValueError(
                    f"halfstep: this optimizer has no parameter {name!r}; it has"
                    f" {naming.some(near)}: give the names that it was made with, or none for all"
                )
        params = [known[name] for name in wanted]
        increment_versions([p for p in params if not p.is_inference()])
        self.take_hashes()
        for p in params:
            if self.of(p) is not None:
                self.watch.tell(p, self.of(p))
        self.notice(decides=False)

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
        """Notes that handles were made anew, and with them maybe residuals."""
        self.watch.keep(engine.guarded)
        self.wrote([p for p in engine.converted if p in self.watch.index])
        for p in engine.guarded:
            (self.watch.replaced if p in self.watch.index else self.watch.bring)(p, self.of(p))

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
            written = {p: weight for p, (weight, _) in given.items() if p in engine.guarded}
            self.watch.wrote(list(written), self.of, copies, written)

    # ---- Saving ----------------------------------------------------------------------------------

    def with_hashes(self, states, whole=True):
        """Returns the states with the hashes of the weights that their residuals belong to.
        `whole`: as other ranks and torch's checkpoints can take them, UNKNOWN where nobody knows
        them. Else as they are here."""
        found = dict(states)
        for p, state in states.items():
            if isinstance(p, torch.Tensor) and "weight.extra" in state:
                hashes = self.watch.hashes_of(p)
                hashes = _whole(p, hashes) if whole else hashes
                if hashes is not None:
                    self.watch.give(local(hashes))
                    found[p] = {**state, HASHES: hashes}
        return found

    def take_hashes(self, loaded=False):
        """Takes the hashes out of states that have some. `loaded`: all states were loaded."""
        for p, state in self.groups.state.items():
            if (loaded or HASHES in state) and not isinstance(state, StoredState):
                hashes, extra = state.pop(HASHES, None), self.of(p)
                if extra is not None:
                    self.watch.bring(p, extra, None if hashes is None else local(hashes).clone())


def _whole(p, hashes):
    """Returns hashes of the rows here as a state keeps them. Parts of rows and of vectors tell
    nothing of the whole, so theirs are UNKNOWN. FSDP1 cuts all states as it does its buffers, so
    they have none."""
    if is_in_buffer(p):
        return None
    shape = stored_whole(p)
    count = (shape[0] if len(shape) > 1 else -(-p.numel() // PIECE),)
    cuts = [x for x in getattr(p, "placements", ()) if hasattr(x, "dim")]
    by_rows = len(shape) > 1 and (not cuts or sharding.is_cut_by_rows(p))
    if hashes is None or cuts and not by_rows:
        here = stored(p).shape[:1] if by_rows else count
        hashes = torch.full(here, UNKNOWN, dtype=torch.int64, device=devices.of(stored(p)))
    return sharding.like(p, hashes, count) if by_rows or not cuts else hashes
