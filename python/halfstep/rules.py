"""What some rules do beside `Optimizer`, and `optimizer()`, which takes a recipe.

A class of classes.py whose rule does more than Optimizer is a child of the class here that has its
name after an underscore.
"""

import inspect
import os
from functools import lru_cache
from typing import Any, Dict, Tuple, Type, Union

import torch

from ._library import abi
from ._settings import assignment
from ._settings.groups import COMMON, OWN
from ._settings.options import Options, sequence
from ._states import layout
from ._states.watch import version
from ._tensors.sharding import copy_of, is_packed, local, stored
from ._tensors.torch_private import no_dynamo
from .optimizer import Optimizer, Params, split_pairs

#: class name -> class; classes.py adds its classes
classes: Dict[str, Type[Optimizer]] = {}
_IN_EVAL = "its weights are the averages to evaluate with, after eval(): call train() before"


@lru_cache(None)
def _own_options(rule):
    """Returns the options of a rule's class that are those of a group, with their defaults."""
    given, common = (
        inspect.signature(cls).parameters for cls in (classes[abi.rules[rule].label], Optimizer)
    )
    return {name: p.default for name, p in given.items() if name not in {*common, *COMMON}}


class _Muon(Optimizer):
    """Takes Muon's options under torch's names, which are not those of the table. AdamW and Lion
    may step some of the groups."""

    #: of groups that say nothing; what pickles that lack it go on with
    _betas = tuple(abi.rules["muon"].hypers[name].initial for name in abi.BETAS[:2])
    #: the options `adamw` and `adamw_names`
    _adamw, _adamw_names = None, ()

    def __init__(self, params, defaults, **options):
        # Not among the defaults: schedulers that cycle momentum take an optimizer with default
        # betas for one of Adam's kind, and would cycle those of the parameters that are no
        # matrices.
        self._betas = defaults.pop("betas")
        adamw, names = defaults.pop("adamw"), defaults.pop("adamw_names")
        if adamw is not None:
            known = {*_own_options("adamw"), *COMMON, *OWN}
            self._adamw = {
                "betas": self._betas,
                "eps": defaults["adam_eps"],
                **assignment.check_options(adamw, known),
            }
            if isinstance(params, torch.nn.Module):
                names = assignment.patterns_of(params) if names is None else names
                params = params.named_parameters()
            self._adamw_names = assignment.check_patterns(names)
        elif names is not None:
            raise ValueError(
                "halfstep: adamw_names= names what AdamW steps, and needs adamw=, its options:"
                ' adamw={"lr": 3e-4}'
            )
        super().__init__(params, defaults, **options)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group as torch's optimizers do. With `adamw`, a group that does not say who steps
        it becomes two: one of Muon's matrices, and one of the rest."""
        before, options = len(self.param_groups), self._parts.options
        try:
            for group in self._divided(param_group):
                if isinstance(group, dict):
                    rule = options.rule_of(group)
                    for key, value in self._defaults_of(rule).items():
                        group.setdefault(key, value)
                    super().add_param_group(group)
                    for key in options.foreign(rule):
                        group.pop(key, None)
                else:
                    super().add_param_group(group)
        except BaseException:
            del self.param_groups[before:]
            self._parts.names.refresh()
            self._parts.cache.drop()
            raise

    def _divided(self, group):
        """Returns the groups that a group becomes."""
        if self._adamw is None or not isinstance(group, dict):
            return [group]
        if any(self._parts.options.asked(group)):
            return [group]
        split_pairs(group)
        if isinstance(group["params"], set):  # torch refuses it
            return [group]
        known = self._parts.names.known
        return assignment.divide(group, known, self._adamw_names)

    def _defaults_of(self, rule):
        """Returns what a group of a rule has if it does not say."""
        if rule == self.rule:
            return {"betas": self._betas}
        own = {"decoupled_weight_decay": True, **(self._adamw or {})} if rule == "adamw" else {}
        return {**_own_options(rule), **own}

    class _options(Options):
        beside_defaults = ("betas",)
        partners = ("adamw", "lion")
        _COEFFICIENTS = ("ns_a", "ns_b", "ns_c")

        def foreign(self, rule):
            """Returns the names of Muon's options that another rule does not have."""
            return () if rule == self.rule else _own_options(self.rule).keys() - _own_options(rule)

        def defaults_of(self, group, defaults):
            foreign = self.foreign(self.rule_of(group))
            return {key: value for key, value in defaults.items() if key not in foreign}

        def hypers(self, group):
            if self.rule_of(group) != self.rule:
                return super().hypers(group)
            given = group["ns_coefficients"]
            own = {"eps": group["adam_eps"], "ns_eps": group["eps"]}
            own["match_rms"] = group["adjust_lr_fn"] or "original"
            if not isinstance(given, str):
                a, b, c = given
                own.update(ns_a=a, ns_b=b, ns_c=c, ns_coefficients=0.0)
            return super().hypers({**group, **own})

        def take_hyper(self, group, name, value):
            if self.rule_of(group) != self.rule:
                super().take_hyper(group, name, value)
            elif name in self._COEFFICIENTS:
                place = self._COEFFICIENTS.index(name)
                values = group["ns_coefficients"]
                values = (0.0, 0.0, 0.0) if isinstance(values, str) else values
                group["ns_coefficients"] = (*values[:place], value, *values[place + 1 :])
            elif name == "ns_coefficients":  # comes after ns_a, ns_b and ns_c
                if value:
                    group[name] = abi.choices(name)[int(value)]
            elif name == "match_rms":
                group["adjust_lr_fn"] = abi.choices(name)[int(value)] if value else None
            else:
                name = {"eps": "adam_eps", "ns_eps": "eps"}.get(name, name)
                super().take_hyper(group, name, value)

        def check(self, group):
            known = (None, *abi.choices("match_rms"))
            if self.rule_of(group) == self.rule and group["adjust_lr_fn"] not in known:
                raise ValueError(
                    f"Adjust learning rate function {group['adjust_lr_fn']} is not supported"
                )
            super().check(group)


class _Adafactor(Optimizer):
    """Takes torch's pair of eps, whose first number may be None."""

    class _options(Options):
        def hypers(self, group):
            out = super().hypers({k: v for k, v in group.items() if k != "eps"})
            eps, given = sequence(group["eps"]), group["eps"]
            if eps is None or len(eps) != 2:
                raise TypeError(
                    f"halfstep: eps={given!r} is not a pair of numbers, of which the first may be"
                    " None"
                )
            first = abi.rules[self.rule].hypers["eps"].initial if eps[0] is None else eps[0]
            out.update(eps=float(first), scale_eps=float(eps[1]))
            return out

        def check(self, group):
            hypers = self.hypers({"eps": group["eps"]})
            for text, name in (("epsilon1", "eps"), ("epsilon2", "scale_eps")):
                if not hypers[name] >= 0:
                    raise ValueError(f"{text} should be >= 0 but is: {hypers[name]}")
            if not group["published"] and not group["d"] >= 1:
                raise ValueError(f"Clipping threshold d should be >= 1 but is: {group['d']}")
            if not group["beta2_decay"] <= 0:
                raise ValueError(f"beta2_decay should be <= 0 but is: {group['beta2_decay']}")
            super().check(group)

        def take_hyper(self, group, name, value):
            if name == "eps":
                group["eps"] = (value, group["eps"][1])
            elif name == "scale_eps":
                group["eps"] = (group["eps"][0], value)
            else:
                super().take_hyper(group, name, value)


def _is_in_eval(groups):
    return any(not group.get("train_mode", True) for group in groups)


class _ScheduleFree(Optimizer):
    """Keeps the two weights of schedule-free training: y, at which gradients are taken, and the
    average x. One of them is in the model."""

    class _options(Options):
        beside_defaults = ("train_mode",)

        def check_mode(self, groups):
            if _is_in_eval(groups):
                raise RuntimeError(f"halfstep: {self.title} cannot step: {_IN_EVAL} the next step")

    #: in eval(), by parameter: its version counter as eval() left it
    _left = None

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            param_group.setdefault("train_mode", not _is_in_eval(self.param_groups))
        super().add_param_group(param_group)

    def _groups_of(self):
        groups = self._parts.groups
        return [(groups[g], p) for g, _, p in groups.members() if self.state.get(p)]

    @no_dynamo
    @torch.no_grad()
    def eval(self) -> None:
        """Puts the averages x into the model, to evaluate or to save. The weights that train, y,
        stay in the state, bit for bit, and train() puts them back. Does nothing if the averages are
        there already."""
        if _is_in_eval(self.param_groups):
            return
        self._parts.residuals.notice()
        self._put_averages()
        for group in self.param_groups:
            group["train_mode"] = False

    def _put_averages(self):
        self._left = {}
        for _, p in self._groups_of():
            state, average = self.state[p], super().read_average(p)
            extra = state.get("weight.extra")
            state[layout.TRAINED] = copy_of(p)
            if extra is not None:
                state[layout.TRAINED_EXTRA] = extra.clone()
            self.write_weight(p, average)
            self._left[p] = version(p)

    @no_dynamo
    @torch.no_grad()
    def train(self, mode: bool = True) -> None:
        """Puts the weights that train, y, into the model again, bit for bit. If something else has
        written a weight since eval(), such as another checkpoint, that weight counts as an average,
        and training goes on from it. Does nothing if y is there already. mode: False is eval().
        """
        if not mode:
            self.eval()
        elif _is_in_eval(self.param_groups):
            self._put_trained()
            for group in self.param_groups:
                group["train_mode"] = True

    def _put_trained(self):
        left, self._left = self._left or {}, None
        for group, p in self._groups_of():
            state = self.state[p]
            held, extra = state.pop(layout.TRAINED, None), state.pop(layout.TRAINED_EXTRA, None)
            touched = p in left and version(p) != left[p]
            if held is None or touched:  # from the averages there are
                z, beta = self.read_state(p, "z"), float(group["betas"][0])
                self.write_weight(p, torch.lerp(z, self.read_weight(p), beta))
                continue
            self._put_back(p, held)
            self._put_extra(p, extra)

    @staticmethod
    def _put_back(p, held):
        """Puts a weight back that _put_averages() has kept."""
        stored(p).copy_(local(held)) if is_packed(p) else p.copy_(held)

    def _put_extra(self, p, extra):
        """Puts the residual or error code back beside the weight that trains, if there is one."""
        state = self.state[p]
        if extra is not None and "weight.extra" in state:
            state["weight.extra"] = state["weight.extra"].copy_(extra)
            self._parts.residuals.wrote([p])

    def read_average(self, p: torch.Tensor) -> torch.Tensor:
        return self.read_weight(p) if _is_in_eval(self.param_groups) else super().read_average(p)

    @no_dynamo
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        before, left = _is_in_eval(self.param_groups), self._left
        state_before, groups_before = self.state, self.param_groups
        super().load_state_dict(state_dict)
        with torch.no_grad():
            if _is_in_eval(self.param_groups):
                self._left = None
                held = {p: self.state[p].get(layout.TRAINED) for _, p in self._groups_of()}
                if (
                    not before
                    and held
                    and all(
                        kept is not None and torch.equal(local(kept), stored(p))
                        for p, kept in held.items()
                    )
                ):
                    for p in held:  # y is in the model still
                        self._put_extra(p, self.state[p].get(layout.TRAINED_EXTRA))
                    self._put_averages()
            elif before:
                for group in groups_before:
                    for p in group["params"]:
                        kept = (state_before.get(p) or {}).get(layout.TRAINED)
                        if kept is not None and left is not None and left.get(p) == version(p):
                            self._put_back(p, kept)
                self._left = None

    def save_safetensors(self, path: Union[str, "os.PathLike[str]"]) -> None:
        if _is_in_eval(self.param_groups):
            raise RuntimeError(
                f"halfstep: {type(self).__name__} cannot be written to a safetensors file:"
                f" {_IN_EVAL} save_safetensors(), or save state_dict()"
            )
        super().save_safetensors(path)


def class_and_options(recipe: str) -> Tuple[Type[Optimizer], Dict[str, str]]:
    """Returns the class of a recipe, and its formats as options."""
    full = abi.recipe_full(recipe)
    parts = recipe.split("/")
    cls = classes.get(abi.rules[full.partition("/")[0]].label)
    if cls is None:
        raise ValueError(
            f"halfstep: {parts[0]!r} is not an optimizer, it averages weights; use halfstep.EMA"
        )
    return cls, {name: part for name, part in zip(("weights", "states"), parts[1:]) if part}


def optimizer(recipe: str, params: Params, **options: Any) -> Optimizer:
    """Makes an optimizer from its recipe.

        opt = halfstep.optimizer("adamw/bf16-sr/int8", model.named_parameters(), lr=1e-4)

    recipe   "rule/weights/states". Parts at the end may be left out. The weight format is for BF16
             parameters. float16 parameters take the format of the same kind, and float32
             parameters stay float32
    params   tensors, (name, tensor) pairs, or a dictionary for each group
    options  of the rule's class: lr, betas, clip_norm ...

    Returns an optimizer of the rule's class. Raises ValueError if the rule or a format is unknown,
    or if a format does not fit its place.
    """
    if not isinstance(recipe, str):
        other = " (the other way round)" if isinstance(params, str) else ""
        raise TypeError(
            'halfstep.optimizer(recipe, params) takes a recipe such as "adamw/bf16-sr/int8" first'
            f" and then parameters, not a {type(recipe).__name__}{other}"
        )
    if isinstance(params, str):
        raise TypeError(f"halfstep.optimizer(recipe, params): params={params!r} must be parameters")
    cls, formats = class_and_options(recipe)
    return cls(params, **{**formats, **options})
