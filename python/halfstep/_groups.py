"""The groups of an optimizer, and what their options mean to the library."""

import weakref
from typing import Any

import torch

from . import _abi, _layout, _sharding
from ._members import Settings

#: of groups, beside options: of torch, of its schedulers, and this package's own
_GROUP_KEYS = {
    "params",
    "param_names",
    "initial_lr",
    "max_lr",
    "min_lr",
    "max_momentum",
    "base_momentum",
    "schedule",
    "ids",
    "recipes",
    "first_lr",
    *_layout.TOLD,
}
#: options that are sequences of numbers
_SEQUENCES = ("betas", "eps", "ns_coefficients")
# Without a reference_lr, fully decoupled decay refers to the first lr: one that is at least so much
# of the rule's default, and of which a later one is at most so many times as much (halfstep.h).
_LEAST_FIRST_LR, _MOST_ABOVE_FIRST_LR = 1e-4, 10.0
_OTHER_RULE = (
    "halfstep: a group has {}, and {} steps all of its groups by its own rule: give parameters that"
    " another rule is to step to an optimizer of that rule, and leave the key out"
)


def sequence(value: Any) -> Any:
    """A list or tuple as it is, and any other sequence of numbers (a list of OmegaConf, an array)
    as a tuple; None for anything else."""
    if isinstance(value, (tuple, list)):
        return value
    if (
        isinstance(value, (str, bytes, dict))
        or not hasattr(value, "__getitem__")
        or not hasattr(value, "__len__")
    ):
        return None
    try:
        return tuple(value.tolist() if hasattr(value, "tolist") else value)
    except TypeError:  # of no dimensions
        return None


def _edits(a, b):
    """How many letters are to be changed, left out, added or swapped with their neighbour to make
    one word the other."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a):
        row = [i + 1]
        for j, y in enumerate(b):
            row.append(min(rows[-1][j] + (x != y), rows[-1][j + 1] + 1, row[j] + 1))
            if i and j and x == b[j - 1] and y == a[i - 1]:
                row[-1] = min(row[-1], rows[-2][j - 1] + 1)
        rows.append(row)
    return rows[-1][-1]


def _is_misspelt(key, option):
    """Whether a key is an option's name but for a slip. An added word or another number makes
    another name."""
    key, option = (
        "".join(letter for letter in word.lower() if letter.isalnum())
        for word in (str(key), option)
    )
    if len(option) < 4 or sorted(filter(str.isdigit, key)) != sorted(filter(str.isdigit, option)):
        return False
    return abs(len(key) - len(option)) <= 2 and _edits(key, option) <= (1 if len(option) < 9 else 2)


def keep_plain(options):
    """Puts tuples in place of sequences of other classes, and numbers in place of NumPy's:
    torch.load(weights_only=True) would refuse them."""
    for key, value in options.items():
        if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
            options[key] = value.item()
    for key in _SEQUENCES:
        found = sequence(options.get(key))
        if found is not None and any(type(item).__module__ == "numpy" for item in found):
            found = tuple(item.item() if hasattr(item, "item") else item for item in found)
        if found is not None and found is not options[key]:
            options[key] = found


def hypers_of(rule, group):
    """The hyper-parameters of a group as the library names them."""
    out = {}
    betas = group.get("betas")
    if betas is not None:
        betas, given = sequence(betas), betas
        if betas is None:
            raise TypeError(f"halfstep: betas={given!r} is not a sequence of numbers")
    wanted = sum(name in _abi.rules[rule].hypers for name in _abi.BETAS)
    if betas is not None and len(betas) != wanted:
        raise ValueError(f"Invalid betas {tuple(betas)}: {rule} has {wanted}")
    for name, hyper in _abi.rules[rule].hypers.items():
        if hyper.per_optimizer:
            continue
        if name in _abi.BETAS and betas is not None:
            out[name] = float(betas[_abi.BETAS.index(name)])
        elif name in group:
            if group[name] is None or isinstance(group[name], str):
                raise TypeError(
                    f"halfstep: the option {name!r} is {group[name]!r}; it has to be a number"
                )
            out[name] = float(group[name])
    return out


def take_hyper(group, name, value):
    """The way back of one of hypers_of(), into a group that has such an option."""
    betas = group.get("betas")
    if name in _abi.BETAS and betas is not None:
        place = _abi.BETAS.index(name)
        group["betas"] = (
            (*betas[:place], value, *betas[place + 1 :]) if place < len(betas) else betas
        )
    elif isinstance(group.get(name), torch.Tensor):
        group[name] = torch.tensor(value, dtype=group[name].dtype, device=group[name].device)
    elif name in group:
        group[name] = bool(value) if isinstance(group[name], bool) else value


def choices_of(rule, group):
    """The choices of a group: its decay mode, and its schedule where it has one."""
    decay = group.get("decay")
    if decay is None and group.get("decoupled_weight_decay"):
        decay = "decoupled"
    out = {"decay": decay or _abi.rules[rule].decay}
    if group.get("schedule"):
        out["schedule"] = group["schedule"]
    return out


def _attribute(name):
    """An attribute of the optimizer, read at each use."""
    return property(lambda self: getattr(self._optimizer(), name))


class Groups:
    """The groups of one optimizer, a sequence of dictionaries, with its states and options. All
    other parts of the optimizer read them here.

    torch, its schedulers and users replace groups, states and options at any time, so that nothing
    of them is kept here. The optimizer owns this object, and the reference back is weak. Classes of
    rules override what an option means: those methods of the optimizer are called here and nowhere
    below.
    """

    def __init__(self, optimizer):
        self._optimizer = weakref.ref(optimizer)
        self.rule, self.title = optimizer.rule, type(optimizer).__name__

    param_groups, state, defaults, beside_defaults = map(
        _attribute, ("param_groups", "state", "defaults", "_beside_defaults")
    )
    clip_norm, clip, scan, threads, norm_group, flat, seed, generator = map(
        _attribute,
        ("clip_norm", "clip", "scan", "threads", "norm_group", "flat", "seed", "generator"),
    )
    #: whether gradients go into the states alone, and whether the backward pass steps
    accumulating, releasing = map(_attribute, ("optimizer_accumulation", "gradient_release"))

    def settings(self):
        """The options of the optimizer that its handles are made with and kept current by."""
        o = self._optimizer()
        threads = o.threads or torch.get_num_threads()
        return Settings(
            self.rule,
            o.seed,
            threads,
            o.clip_norm,
            o.clip,
            o.scan,
            o.generator,
            o.flat,
            o.norm_group,
        )

    def option(self, name):
        """An option that some class of optimizers has beside these."""
        return getattr(self._optimizer(), name)

    # ---- The groups ------------------------------------------------------------------------------

    def __iter__(self):
        return iter(self.param_groups)

    def __len__(self):
        return len(self.param_groups)

    def __getitem__(self, place):
        return self.param_groups[place]

    def members(self):
        """(group index, position in the group, parameter) of each parameter."""
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                yield g, i, p

    def params(self):
        """All parameters, in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def begin(self, group):
        """Completes a group that was just added. What it says as one of another optimizer goes."""
        for key in ("ids", "recipes", "first_lr", *_layout.TOLD):
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
        self.take_reference(group)

    def takes_part(self, p):
        """Whether a parameter is, or was, trained: frozen ones have neither gradient nor states."""
        return p.requires_grad or p.grad is not None or p in self.state

    # ---- What a class of optimizers says ---------------------------------------------------------

    def hypers(self, group):
        """The hyper-parameters of a group as the library names them."""
        return self._optimizer()._hypers(group)

    def choices(self, group):
        """The choices of a group: its decay mode, and its schedule where it has one."""
        return self._optimizer()._choices(group)

    def take_hyper(self, group, name, value):
        """The way back of one of hypers()."""
        self._optimizer()._take_hyper(group, name, value)

    def formats(self, group, p):
        """The formats of one parameter's weight and states; None is the default."""
        return self._optimizer()._recipe_parts(group, p)

    def check_options(self, group):
        """check(), and what the class adds to it."""
        self._optimizer()._check_options(group)

    def check_mode(self):
        """Raises RuntimeError where no step may be made now."""
        self._optimizer()._check_mode()

    def before_build(self, also):
        """What the class does to states before handles are made."""
        self._optimizer()._before_build(also)

    # ---- Options ---------------------------------------------------------------------------------

    def check(self, group):
        """Raises ValueError, in torch's words, for what the library's bounds forbid."""
        rule = _abi.rules[self.rule]
        if isinstance(group["lr"], torch.Tensor) and group["lr"].numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        for name in ("weights", "states", "decay"):
            if not isinstance(group.get(name), (str, type(None))):
                raise TypeError(f"halfstep: {name}={group[name]!r} is not the name of one")
        for name, value in self.hypers(group).items():
            hyper = rule.hypers[name]
            if hyper.minimum <= value and (
                value < hyper.maximum or (value == hyper.maximum and not hyper.exclusive_maximum)
            ):
                continue
            if name == "lr":
                raise ValueError(f"Invalid learning rate: {value}")
            if name in _abi.BETAS and "betas" in group:
                raise ValueError(
                    f"Invalid beta parameter at index {_abi.BETAS.index(name)}: {value}"
                )
            raise ValueError(
                f"Invalid {'epsilon' if name.endswith('eps') else name} value: {value}"
            )
        if (
            "dampening" in rule.hypers
            and group.get("nesterov")
            and not (group["momentum"] > 0 and group["dampening"] == 0)
        ):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        self._check_algorithm(group)
        states = group.get("states")
        # Formats are checked by the library, which says what is wrong with them.
        _abi.recipe_full("/".join((self.rule, "f32", states)) if states else self.rule)
        for choice, value in self.choices(group).items():
            if value not in _abi.choices(choice):
                raise ValueError(
                    f"halfstep: {choice}={value!r} is none of {', '.join(_abi.choices(choice))}"
                )
        if isinstance(self.clip_norm, bool) or not isinstance(self.clip_norm, (int, float)):
            raise TypeError(f"halfstep: clip_norm={self.clip_norm!r} is not a number")
        if not 0.0 <= self.clip_norm < float("inf"):
            raise ValueError(f"Invalid clip_norm value: {self.clip_norm}")
        if (
            isinstance(self.threads, bool)
            or not isinstance(self.threads, int)
            or not 0 <= self.threads <= 1024
        ):
            raise ValueError(f"halfstep: threads={self.threads!r} is not a number from 0 to 1024")
        for choice, value in (
            ("clip", self.clip),
            ("scan", self.scan),
            ("generator", group.get("generator")),
        ):
            if value is not None and value not in _abi.choices(choice):
                raise ValueError(
                    f"halfstep: {choice}={value!r} is none of {', '.join(_abi.choices(choice))}"
                )

    def _check_algorithm(self, group):
        """Raises ValueError for a group that other packages would step by another rule than this
        optimizer's."""
        muon, ours = self.rule == "muon", self.title
        for key in ("use_muon", "is_muon"):
            if key in group and bool(group[key]) != muon:
                raise ValueError(_OTHER_RULE.format(f"{key!r}: {group[key]!r}", ours))
        for key in ("use_fallback", "use_adamw", "use_adam"):
            if muon and group.get(key):
                raise ValueError(_OTHER_RULE.format(f"{key!r}: {group[key]!r}", ours))
        for key in ("algorithm", "optimizer"):
            named = group.get(key)
            if (
                isinstance(named, str)
                and named.lower().replace("-", "").replace("_", "") not in self._known_as()
            ):
                raise ValueError(_OTHER_RULE.format(f"{key!r}: {named!r}", ours))

    def _known_as(self):
        return {
            name.lower().replace("-", "")
            for name in (self.rule, _abi.rules[self.rule].label, self.title)
        }

    def take_reference(self, group):
        """Has fully decoupled decay refer to the first lr, where nobody gives a reference_lr and
        that can be meant as one."""
        if self.choices(group)["decay"] != "fully-decoupled" or group.get("reference_lr"):
            return
        first = group.setdefault("first_lr", float(group["lr"]))
        if first >= _LEAST_FIRST_LR * _abi.rules[self.rule].hypers["lr"].initial:
            group["reference_lr"] = first

    def check_reference(self, group):
        """Raises ValueError where fully decoupled decay would not be what anybody can mean."""
        if self.choices(group)["decay"] != "fully-decoupled":
            return
        self.take_reference(group)
        lr, decay, reference, first = (
            float(group.get(key) or 0.0)
            for key in ("lr", "weight_decay", "reference_lr", "first_lr")
        )
        if decay and (
            not reference or reference == first and lr > _MOST_ABOVE_FIRST_LR * reference
        ):
            raise ValueError(
                "halfstep: fully-decoupled decay is lr / reference_lr * weight_decay, and the"
                f" first lr, {first:g}, cannot be meant as the reference: give reference_lr=, the"
                " lr at which decay is weight_decay"
            )
        if decay and lr / reference * decay > 1.0:
            raise ValueError(
                f"halfstep: fully-decoupled decay of lr / reference_lr * weight_decay = {lr:g} /"
                f" {reference:g} * {decay:g} is above 1: give reference_lr=, the lr at which decay"
                " is weight_decay"
            )

    def check_rates(self):
        """Raises ValueError where groups that share one estimate of the lr (Prodigy) have two rates
        above 0."""
        if not _abi.rules[self.rule].totals:
            return
        rates = {}
        for group in self:
            lr = group["lr"]
            if isinstance(lr, torch.Tensor) and lr.device.type != "cpu" or not float(lr):
                continue
            if rates.setdefault(_sharding.number_of(group), float(lr)) != float(lr):
                raise ValueError(
                    f"halfstep: groups of {self.title} share one estimate of the learning"
                    " rate, so their lr must be equal or 0, not"
                    f" {rates[_sharding.number_of(group)]:g} and {float(lr):g}; with another"
                    " d_group each has an estimate of its own"
                )

    def show_estimates(self):
        """Puts the estimate of the learning rate (Prodigy's d) into the groups, from the states of
        their parameters."""
        rule = _abi.rules[self.rule]
        if not rule.totals:
            return
        shared = {}
        for group in self:
            for p in group["params"]:
                d = (self.state.get(p) or {}).get("d")
                number = _sharding.number_of(group)
                shared[number] = max(shared.get(number, 0.0), 0.0 if d is None else float(d))
        for group in self:
            group["d"] = shared.get(_sharding.number_of(group), 0.0) or group["d0"]

    def check_keys(self, group):
        """Raises ValueError for what is nearly the name of an option. Other keys belong to
        somebody: torch keeps them, too."""
        known = {*self.defaults, *self.beside_defaults, *_abi.rules[self.rule].hypers}
        for key in group:
            if key not in known and key not in _GROUP_KEYS:
                near = next((option for option in sorted(known) if _is_misspelt(key, option)), None)
                if near:
                    raise ValueError(
                        f"halfstep: a group has the key {key!r}, which is no option of"
                        f" {self.title}; {near!r} is one"
                    )
