"""Keeps the groups of an optimizer, and says what their options mean to the library."""

import math
from difflib import SequenceMatcher
from typing import Any, NamedTuple, Optional

import torch

from .._library import abi
from .._tensors import sharding
from .._tensors.parameters import could_be_packed, is_packed_format
from .._tensors.torch_public import warn_once

#: options of all groups that come from the library's table; Optimizer's docstring describes them
COMMON = ("maximize", "centralize", "cautious")
#: options of all groups that are keywords of Optimizer itself
OWN = ("weights", "states", "decay", "reference_lr")
#: keys of a group that hold counts of the optimizer, always there and always current
TOLD = ("group_steps", "skipped_steps", "last_norm")
#: keys of a group that are there without being options
NO_OPTIONS = ("params", "param_names", *TOLD)
#: keys of torch's schedulers and of this package, which are no options either
_BESIDE = (
    "initial_lr max_lr min_lr max_momentum base_momentum schedule decay_schedule first_lr".split()
)
#: dtypes of weights whose format an option says
_LOW = (torch.bfloat16, torch.float16)
#: two swapped letters of eight are a slip; a word of four letters after one of eleven is not
_ALIKE = 0.86


def _is_misspelt(key, option):
    """Returns True if a key is an option's name but for a slip. An added word or another number
    makes another name."""
    key, option = ("".join(filter(str.isalnum, word.lower())) for word in (str(key), option))
    if len(option) < 4 or sorted(filter(str.isdigit, key)) != sorted(filter(str.isdigit, option)):
        return False
    return SequenceMatcher(None, key, option).ratio() > _ALIKE


#: attributes of torch's optimizers that are kept here
LISTS = ("param_groups", "state", "defaults")


class Settings(NamedTuple):
    """The options of an optimizer that its handles depend on."""

    rule: str
    rules: tuple  # of each group
    seed: int
    threads: int
    clip_norm: Optional[float]
    clip: Optional[str]
    scan: Optional[str]
    generator: Optional[str]
    flat: Any
    norm_group: Any
    owners: Any


class Groups:
    """The groups of one optimizer, a sequence of dictionaries, with its states and options. All
    other parts of the optimizer read them here.

    torch, its schedulers and users may replace groups, states and options at any time, by the
    optimizer's attributes, which read and set those here. So nothing derived from them is kept.

    options                         options, and what they mean
    param_groups, state, defaults   as torch has them, and makes them
    """

    def __init__(self, parts):
        self.options = parts.options

    def settings(self):
        """Returns the options of the optimizer that its handles depend on."""
        o = self.options
        return Settings(
            self.options.rule,
            tuple(map(self.options.rule_of, self)),
            self[0].get("seed", 0),
            o.threads or torch.get_num_threads(),
            o.clip_norm,
            o.clip,
            o.scan,
            self[0]["generator"],
            o.flat,
            o.norm_group,
            o.owners,
        )

    def saved(self):
        """Returns what pickles keep, under the names of the optimizer's attributes."""
        lists = {name: getattr(self, name) for name in LISTS}
        return {**lists, **{name: getattr(self.options, name) for name in self.options.kept}}

    def restore(self, saved):
        """Takes what of saved() is there, and out of `saved`. A state dictionary has some of it."""
        for owner, names in ((self, LISTS), (self.options, self.options.kept)):
            vars(owner).update((name, saved.pop(name)) for name in names if name in saved)

    # ---- The groups ------------------------------------------------------------------------------

    def row_of(self, group):
        """Returns the row of the rule that steps a group."""
        return abi.rules[self.options.rule_of(group)]

    def place_of(self, p):
        """Returns the group index and the position of a parameter. Raises ValueError if the
        optimizer does not have it."""
        for g, i, other in self.members():
            if other is p:
                return g, i
        raise ValueError(
            "halfstep: this tensor is no parameter of the optimizer; give one from its param_groups"
        )

    def group_of(self, p):
        """Returns the group of a parameter, as place_of() finds it."""
        return self.param_groups[self.place_of(p)[0]]

    def row_for(self, p):
        """Returns the row of the rule that steps a parameter, as group_of() finds it."""
        return self.row_of(self.group_of(p))

    def __iter__(self):
        return iter(self.param_groups)

    def __len__(self):
        return len(self.param_groups)

    def __getitem__(self, place):
        return self.param_groups[place]

    def members(self):
        """Yields (group index, position in the group, parameter) of each parameter."""
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                yield g, i, p

    def params(self):
        """Returns all parameters in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def begin(self, group):
        """Completes a group that was just added. Removes what another optimizer has written into
        it."""
        for key in ("first_lr", *TOLD):
            group.pop(key, None)
        first = self[0]
        group.update(
            group_steps=0,
            skipped_steps=first.get("skipped_steps", 0),
            last_norm=first.get("last_norm", 0.0),
        )
        for key in ("seed", "generator"):
            if group.get(key) is None:
                group[key] = self.defaults[key]
        self.options.take_reference(group)

    def takes_part(self, p):
        """Returns True if a parameter is, or was, trained. Frozen parameters have neither gradient
        nor states."""
        return p.requires_grad or p.grad is not None or p in self.state

    def check_rates(self):
        """Raises ValueError if groups that share one estimate of the lr (Prodigy) have two rates
        above 0."""
        if not abi.rules[self.options.rule].totals:
            return
        rates = {}
        for group in self:
            lr = group["lr"]
            if isinstance(lr, torch.Tensor) and lr.device.type != "cpu" or not float(lr):
                continue
            if rates.setdefault(sharding.number_of(group), float(lr)) != float(lr):
                raise ValueError(
                    f"halfstep: groups of {self.options.title} share one estimate of the learning"
                    " rate, so their lr must be equal or 0, not"
                    f" {rates[sharding.number_of(group)]:g} and {float(lr):g}; with another"
                    " d_group each has an estimate of its own"
                )

    def show_estimates(self):
        """Puts the estimate of the learning rate (Prodigy's d) into the groups, from the states of
        their parameters."""
        if not abi.rules[self.options.rule].totals:
            return
        shared = {}
        for group in self:
            for p in group["params"]:
                d = (self.state.get(p) or {}).get("d")
                number = sharding.number_of(group)
                shared[number] = max(shared.get(number, 0.0), 0.0 if d is None else float(d))
        for group in self:
            group["d"] = shared.get(sharding.number_of(group), 0.0) or group["d0"]

    def check_quantized(self):
        """Raises ValueError if 8-bit weights are asked for and no parameter has any, although one
        could."""
        if any(map(sharding.is_packed, self.params())):
            return
        for group in self:
            for p in group["params"]:
                asked, _ = self.options.formats(group, p)
                if is_packed_format(asked) and p.dtype in _LOW and could_be_packed(p.shape, asked):
                    raise ValueError(
                        f"halfstep: weights={asked!r}, and no parameter has such weights: call"
                        f" halfstep.nn.quantize_(model, {asked!r}) before the optimizer is made"
                    )

    def warn_of_idle_weights(self):
        """Warns once if a format of weights is asked for and all parameters are in fp32, which it
        leaves alone. Vectors by themselves give no warning: models keep norms in fp32."""
        params = [p for p in self.params() if self.takes_part(p)]
        asked = [
            group["weights"]
            for group in self
            if group.get("weights") not in (None, "f32")
            and any(p.dim() > 1 and self.takes_part(p) for p in group["params"])
        ]
        if asked and all(p.dtype == torch.float32 and not sharding.is_packed(p) for p in params):
            warn_once(
                f"weights={asked[0]!r} has nothing to act on: all {len(params)} parameters are"
                " float32, as trainers keep them with bf16=True; load the model in bfloat16"
                " (model.to(torch.bfloat16)), or leave weights= out"
            )

    def check_keys(self, group):
        """Raises ValueError for a key that is nearly the name of an option. Other keys are kept, as
        torch keeps them, because somebody else uses them."""
        known = {*self.defaults, *self.options.beside_defaults, *self.row_of(group).hypers}
        for key in group:
            if key not in known and key not in NO_OPTIONS and key not in _BESIDE:
                near = next((option for option in sorted(known) if _is_misspelt(key, option)), None)
                if near:
                    raise ValueError(
                        f"halfstep: a group has the key {key!r}, which is not an option of"
                        f" {self.options.title}; {near!r} is one"
                    )


def check_generator(group, place):
    """Raises ValueError if a saved group has a seed and not the generator that goes with it."""
    if "seed" in group and "generator" not in group:
        raise ValueError(
            f"halfstep: group {place} of this state has a 'seed' and no 'generator', so its random"
            " bits are not known: add the generator of the optimizer that saved it"
        )


def check_told(key, value, place):
    """Raises ValueError if a count or norm of a group is not valid."""
    if key == "last_norm":
        good, means = abi.is_real(value) and 0.0 <= value < math.inf, "is not a finite norm"
    else:
        good, means = abi.is_count(value), "is not a count"
    if not good:
        raise ValueError(f"halfstep: {key!r} of group {place} is {value!r}, which {means}")
