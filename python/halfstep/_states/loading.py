"""Loads state dictionaries without casts, and makes all checks before anything depends on the
loaded values.

torch's own loader casts every state tensor to the dtype of its parameter, which would turn scales
and counters into BF16. Here states pass through it wrapped, so that its checks and hooks run and
its casts do not.
"""

from collections import defaultdict

import torch

from .._library import abi
from .._settings import naming
from .._settings.groups import NO_OPTIONS, check_generator
from .._tensors import sharding
from .._tensors.torch_public import warn
from . import checks, foreign, layout

#: rules that differ only in their decay, and load each other's states, as torch's do
_SIBLINGS = ("adam", "adamw")


class _Wrapped:
    """A state on its way through torch's loader. The loader leaves it alone, because it is not a
    tensor, dictionary or sequence."""

    def __init__(self, value):
        self.value = value


def unwrap(states):
    """Returns copies of the loaded states. They share no memory with the dictionary, because steps
    write in place."""
    out = defaultdict(dict)
    for p, value in states.items():
        out[p] = _copy(value.value) if isinstance(value, _Wrapped) else value
    return out


def _copy(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return value


def _as_own(own, state):
    """Returns the states of a sibling rule as those of the rule `own`, and other states as they
    are."""
    if own not in _SIBLINGS or not isinstance(state, dict) or state.get("recipe") is None:
        return state
    try:
        there = layout.recipe_of(state, "")
    except ValueError:  # _check_state() reports it with the parameter's name
        return state
    rule, _, formats = there.partition("/")
    if rule == own or rule not in _SIBLINGS:
        return state
    return {**state, "recipe": layout.recipe_number(f"{own}/{formats}")}


def _with_names(state_dict):
    """Returns the groups with the names that the file has beside them, because hooks of torch's
    load look for names in groups."""
    names, groups = state_dict["param_names"], state_dict["param_groups"]
    if (
        not isinstance(names, (list, tuple))
        or len(names) != len(groups)
        or not all(isinstance(own, (list, tuple)) for own in names)
    ):
        raise ValueError(
            "halfstep: 'param_names' of this state is not a list of one list for each group"
        )
    for place, (own, group) in enumerate(zip(names, groups)):
        checks.check_names({**group, "param_names": own} if None not in own else {}, place)
    return [
        group if any(name is None for name in own) else {"param_names": list(own), **group}
        for own, group in zip(names, groups)
    ]


class Loading:
    """One call of load_state_dict().

    state_dict    the dictionary for torch's loader, which has wrap() among its hooks
    """

    def __init__(self, parts, state_dict):
        self.groups, self.names = groups, names = parts.groups, parts.names
        self.residuals, self.steps = parts.residuals, parts.steps
        names.refresh()
        self.before = [dict(group) for group in groups]
        # What the dictionary holds beside states, by the numbers of parameters.
        self.renamed, self.positions, self.pending, self.places = {}, False, (), {}
        checks.check_whole(state_dict)
        # The dictionary may be this optimizer's own, edited. It is copied, so that the handle's
        # numbers do not overwrite it.
        state_dict = dict(foreign.translate(list(map(groups.row_of, groups)), state_dict))
        state_dict["state"] = {
            k: dict(v) if isinstance(v, dict) else v for k, v in state_dict["state"].items()
        }
        if "param_names" in state_dict:
            state_dict["param_groups"] = _with_names(state_dict)
        self.state_dict = state_dict
        pending, watch = dict(self.steps.pending), self.residuals.watch
        self._kept = groups.saved(), names.saved(), pending, watch

    def wrap(self, _, given):
        """Runs as the last hook of torch's loader. Wraps the states, and completes the groups with
        the optimizer's options that the file lacks."""
        given = dict(given)
        for place, group in enumerate(given["param_groups"]):
            if not any(isinstance(key, str) for key in group["params"]):
                checks.check_names(group, place)
        checks.check_keys(given)
        self.pending = given.get("pending", ())
        groups, self.renamed, self.positions = naming.align(self.names.all(), given["param_groups"])
        numbers = [key for group in groups for key in group["params"]]
        self.places = {key: i for i, key in enumerate(numbers)}
        rules = {
            key: self.groups.row_of(own).name
            for group, own in zip(groups, self.groups)
            for key in group["params"]
        }
        given["state"] = {
            k: v if isinstance(v, _Wrapped) else _Wrapped(_as_own(rules.get(k), v))
            for k, v in given["state"].items()
        }
        if self.groups.options.partners and len(groups) != len(self.before):
            raise ValueError(
                f"halfstep: loaded state dict has a different number of parameter groups:"
                f" {len(groups)}, and this optimizer has {len(self.before)}; Muon(adamw=...) makes"
                " groups of matrices and of the rest, so load it into an optimizer made as the"
                " saved one was. load_states() takes a file with the states of torch's Muon and"
                " AdamW"
            )
        # torch itself complains about a wrong number of groups.
        given["param_groups"] = [
            self._completed(place, group, own)
            for place, (group, own) in enumerate(zip(groups, self.before))
        ] + list(groups[len(self.before) :])
        return given

    def _completed(self, place, group, own):
        """Returns a group of the file with what it lacks. Missing values, and formats, are those of
        the constructor. Raises ValueError if the group asks for another rule than it has here."""
        group, rule = dict(group), self.groups.row_of(own).name
        for key, there in self.groups.options.asked(group):
            if there != rule:
                raise ValueError(
                    f"halfstep: group {place} of this state has {key!r}: {group[key]!r}, and"
                    f" {self.groups.options.title} steps that group by {rule} here: make the"
                    " optimizer with groups of the same rules as they were saved with"
                )
        check_generator(group, place)
        for key, value in own.items():
            if key in ("weights", "states", "fused", "foreach", "capturable", "differentiable"):
                group[key] = value
            elif key not in NO_OPTIONS:
                group.setdefault(
                    key, True if key == "train_mode" else value
                )  # files without it hold the weights that train
        if rule == "adamw":
            group["decoupled_weight_decay"] = True  # even if the file's group is Adam's
        if isinstance(own.get("lr"), torch.Tensor) and not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.full_like(own["lr"], float(group["lr"]))
        return group

    def undo(self, error):
        """Restores everything after an error. If no names matched, raises an error that says this
        as well."""
        owners = self.groups, self.names, self.steps, self.residuals
        for owner, kept in zip(owners, self._kept):
            owner.restore(kept)
        if self.positions and isinstance(error, ValueError):
            raise ValueError(f"{error}; {self._unmatched()}") from None

    def finish(self):
        """Takes what the dictionary holds beside states. Runs after torch's loader."""
        params = self.groups.params()
        for number, (_, name) in () if self.positions else self.renamed.items():
            if not self.groups.state.get(params[number]):
                # It takes the random bits that belong to its saved name.
                self.names.expect_name(params[number], name)
        self.steps.restore(
            {params[self.places[key]]: True for key in self.pending if key in self.places}
        )
        self.groups.show_estimates()
        if self.positions:
            warn(self._unmatched())
        self._warn_of_conversions()

    def _unmatched(self):
        here, there = next(iter(self.renamed.values()), ("?", "?"))
        return (
            f"none of the names in the state, such as {there!r}, is a name of a parameter here,"
            f" such as {here!r}, so that positions decided which state is whose"
        )

    def _warn_of_conversions(self):
        for g, i, p in self.groups.members():
            state = self.groups.state.get(p)
            if not state:
                continue
            here, there = self.names.recipe(g, i), layout.recipe_of(state, "")
            if there is None:
                if sharding.is_flat(p, self.groups.options.flat) and any(
                    abi.formats[f].block for f in here.split("/")[2].split("+")
                ):
                    warn(
                        f"plain states of a flat buffer were loaded into {here}, whose"
                        " blocks begin at this rank's shard: they are quantized anew, and go on"
                        " with other bits than before they were saved"
                    )
                    return
            elif there != here:
                warn(
                    f"the loaded states are {there}, this optimizer is {here}; they are"
                    " converted at the next step"
                )
                return
