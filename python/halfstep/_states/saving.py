"""Packs an optimizer into state dictionaries and pickles, and unpacks it."""

import torch

from .._settings.groups import TOLD, check_generator
from .._settings.options import keep_plain
from .._tensors.torch_private import is_transient
from . import checks, layout
from .loading import Loading, unwrap

#: attributes that pickles leave out, because they are rebuilt or bound to this process. "step" is
#: among them because a scheduler may have wrapped the instance's.
_TRANSIENT = ("_parts", "_witness", "_number", "grad_scale", "found_inf", "step", "_left")


class Saving:
    """Packs and unpacks an optimizer."""

    def __init__(self, parts):
        self.groups, self.names, self.residuals = parts.groups, parts.names, parts.residuals
        self.cache, self.steps, self.inspection = parts.cache, parts.steps, parts.inspection
        # The hashes of the last pickle. A process that is spawned opens their memory later.
        self._given = []

    # ---- State dictionaries ----------------------------------------------------------------------

    def sync(self, decides=False):
        """Brings states and groups up to date. `decides` is that of Residuals.notice()."""
        self.residuals.notice(decides=decides)
        self.cache.sync()

    def states(self):
        """Returns the states to pack, up to date. Leaves out parameters whose group was removed,
        because torch cannot pack them."""
        self.sync()
        self.names.refresh()
        for group in self.groups:
            keep_plain(group)
        members, kept = set(map(id, self.groups.params())), self.groups.state
        if self.cache.store is not None:
            kept = {p: dict(state.items()) for p, state in kept.items()}
        plain = {p: dict(state) for p, state in kept.items() if type(state) is layout.Coded}
        kept = self.residuals.with_hashes({**kept, **plain})
        strangers = {
            key for key in kept if isinstance(key, torch.Tensor) and id(key) not in members
        }
        return {k: v for k, v in kept.items() if k not in strangers} if strangers else kept

    def complete(self, found):
        """Adds to torch's state dictionary what it lacks: names, pending micro-batches."""
        names = self.names.all()
        if any(map(any, names)):
            found["param_names"] = names
        if self.steps.pending:
            found["pending"] = self.steps.numbers_of(self.steps.pending)
        return found

    def loading(self, state_dict):
        """Begins to load a state dictionary."""
        loading = Loading(self, state_dict)
        self.cache.sync()
        return loading

    def undo(self, loading, error):
        """Restores the optimizer after loading has failed. May raise an error that says more."""
        self.cache.forget()
        loading.undo(error)

    def plain(self):
        """Returns the state as torch's own optimizer of the same rule saves it."""
        self.sync()
        return checks.plain(self.groups, self.inspection.reader())

    # ---- Pickles ---------------------------------------------------------------------------------

    def pickled(self, attributes):
        """Returns what a pickle keeps of an optimizer with these attributes."""
        if self.cache.store is not None:
            raise TypeError(
                f"halfstep: an optimizer with its states in {self.cache.store.path} can be neither"
                " pickled nor copied, because two would step one file: make another with another"
                " file, and load this one's state_dict() into it"
            )
        self.sync()
        kept = {
            key: value
            for key, value in attributes.items()
            if key not in _TRANSIENT and not is_transient(key)
        }
        states = self.residuals.with_hashes(self.groups.state, whole=False)
        self._given = [state.get(layout.HASHES) for state in states.values()]
        return {
            **kept,
            **self.groups.saved(),
            **self.names.saved(),
            "state": states,
            "_pending": dict(self.steps.pending),
        }

    def restart(self, witness):
        """Forgets everything that belongs to the former states."""
        self.cache.forget()
        self.steps.restart()
        self.residuals.restart(witness)

    def unpack(self, state):
        """Takes names and pending micro-batches from the attributes of a pickled optimizer, or from
        what torch's loader has made of a state dictionary. Returns the other attributes."""
        state = dict(state)
        self.names.restore(state)
        self.steps.restore(state.pop("_pending", self.steps.pending))
        if "state" in state:
            state["state"] = unwrap(state["state"])
        self.groups.restore(state)
        return state

    def unpacked(self, loaded):
        """Completes an optimizer that has taken what unpack() returned. `loaded`: it comes from a
        state dictionary, which has to be checked."""
        told = dict(zip(TOLD, (0, 0, 0.0)))
        for place, group in enumerate(self.groups):
            check_generator(group, place)
            defaults = self.groups.options.defaults_of(group, self.groups.defaults)
            for key, value in {**defaults, **told}.items():
                group.setdefault(key, value)
        self.names.take_loaded()
        checks.tidy(self.groups, self.names)
        if loaded:
            checks.check(self.groups, self.names)
        self.groups.show_estimates()
        self.residuals.take_hashes(loaded=True)
