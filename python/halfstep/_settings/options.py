"""What the options of an optimizer mean to the library."""

import math
import os
import re
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch

from .._library import abi
from .._tensors import matrices

#: options that are sequences of numbers
_SEQUENCES = ("betas", "eps", "ns_coefficients", "split")
# Without a reference_lr, fully decoupled decay refers to the first lr: one that is at least so much
# of the rule's default, and of which a later one is at most so many times as much (halfstep.h).
_LEAST_FIRST_LR, _MOST_ABOVE_FIRST_LR = 1e-4, 10.0
#: keys by which trainers and other packages say whether Muon steps a group, and the value for it
_FLAGS = {
    "use_muon": True,
    "is_muon": True,
    "use_fallback": False,
    "use_adamw": False,
    "use_adam": False,
}
#: those of them that say so beside any rule
_FLAGS_OF_ALL = ("use_muon", "is_muon")
#: words that no option of a group has for a value
_BOOLEANS = ("true", "false", "yes", "no")
#: keys by which they name the rule of a group
_NAMES = ("algorithm", "optimizer")


def _plainly(name):
    """Returns the name of a rule as it is compared: "AdamW-delayed" and "adamwdelayed" are one."""
    return re.sub("[-_]", "", name.lower())


def sequence(value: Any) -> Any:
    """Returns a list or tuple as it is, and any other sequence of numbers (a list of OmegaConf, an
    array) as a tuple. Returns None for anything else."""
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


def keep_plain(options):
    """Replaces sequences of other classes by tuples, and NumPy's numbers by Python's, because
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


def check_seed(seed, of=""):
    """Raises ValueError if a seed is not a whole number of 64 bits."""
    if not abi.is_count(seed, -(2**63), 2**64 - 1):
        raise ValueError(
            f"halfstep: the seed{of} is {seed!r}; it must be a whole number from -2**63 to"
            " 2**64 - 1"
        )


def seed_of(seed):
    """Returns the number that the option `seed` stands for. None is drawn from torch's default
    generator, so that torch.manual_seed() governs it. Under torch.distributed None is 0, so that
    all ranks agree without communication."""
    if seed is not None:
        seed = abi.plainly(seed)
        check_seed(seed)
        return seed
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return 0
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))


def _check_choices(**values):
    for choice, value in values.items():
        if value is not None:
            abi.check_choice(choice, value)


def bytes_of(given, name="memory"):
    """Returns the bytes of 24e9, "24e9", "24G" or "24 GiB". Units are powers of 1024, as in
    `halfstep plan`. `name` is the option's name in the error text."""
    size, unit = given, ""
    if isinstance(given, str):
        found = re.fullmatch(
            r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([KMGTP]?)(?:i?B)?\s*", given, re.IGNORECASE
        )
        size, unit = found.groups() if found else ("nan", "")
    try:
        size = float(size) * 1024 ** " KMGTP".index(unit.upper() or " ")
    except OverflowError:
        size = math.inf
    if not 0 <= size < 2**63:
        raise ValueError(
            f"{name}={str(given)[:40]!r} is not a size in bytes below 2^63; write 24e9, '24G' or"
            " '512M'"
        )
    return int(size)


@dataclass(frozen=True)
class Store:
    """A file that keeps the states of an optimizer in place of memory: the option `store`. Text
    says the same, "run.states?weights=false&memory=8G", and a path alone is Store(path).

    path     of the file, which may have a "?" here
    weights  False: the file keeps no weights, only their hashes. Whoever resumes from it loads the
             weights of its last step first
    memory   bytes of memory for states on their way, such as "8G". What fits is only written, not
             read. None: the least
    """

    path: Union[str, bytes, os.PathLike[str]]
    weights: bool = True
    memory: Optional[Union[int, float, str]] = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, bytes, os.PathLike)):
            raise TypeError(
                f"halfstep: store={self.path!r} is not a path of a file; write store='run.states'"
            )
        abi.check_flags(weights=self.weights)
        memory = None if self.memory is None else bytes_of(self.memory, "memory")
        vars(self).update(path=os.path.abspath(os.fsdecode(self.path)), memory=memory)

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    @classmethod
    def of(cls, given: Any) -> Optional["Store"]:
        """Returns what the option `store` says. A "?" in text begins options."""
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, str) or "?" not in given:
            return cls(given)
        path, _, text = given.partition("?")
        parts = [part.partition("=") for part in text.split("&")]
        options = {
            key: value for key, equal, value in parts if equal and key in ("weights", "memory")
        }
        weights = options.get("weights", "true").lower()
        if not path or weights not in ("true", "false") or len(options) < len(parts):
            raise ValueError(
                f"halfstep: store={given!r} is not understood: behind a '?' stand weights=true or"
                " false and memory=, as in 'run.states?weights=false&memory=8G'. Write"
                " halfstep.Store(path) for a file whose name has a '?'"
            )
        return cls(path, weights == "true", options.get("memory"))


#: what the option `store` takes
StoreLike = Union[str, os.PathLike[str], Store]


class Options:
    """The options of one optimizer. Says what the options of groups mean, and holds neither
    optimizer nor groups. A class of optimizers whose options mean something else has a child of
    this class as its `_options`.

    kept    names of attributes of the optimizer that it has here, and in pickles
    """

    #: options of groups that are not among the defaults
    beside_defaults = ()
    #: rules beside the optimizer's own that groups may ask for; without flags, the first is meant.
    #: They keep nothing over all tensors (TOTALS)
    partners = ()
    norm_group = owners = None
    #: options of CPUOffload alone
    offload_gradients = overlap = False

    def __init__(self, rule, title, kept):
        """title: the name of the class. kept: attributes of an optimizer of it, at first."""
        self.rule, self.title, self.kept = rule, title, list(kept)
        vars(self).update(kept)

    # ---- The rule of a group ---------------------------------------------------------------------

    def asked(self, group):
        """Yields (key, rule) for each key of a group that asks for a rule. The rule is None if this
        optimizer does not step by it."""
        rules = (self.rule, *self.partners)
        muon = "muon" if "muon" in rules else None
        for key, means_muon in _FLAGS.items():
            if key in group and (muon or key in _FLAGS_OF_ALL):
                other = next((rule for rule in rules if rule != "muon"), None)
                yield key, muon if bool(group[key]) == means_muon else other
        for key in _NAMES:
            if isinstance(group.get(key), str):
                names = {_plainly(self.title): self.rule}
                for rule in rules:
                    names.update({_plainly(rule): rule, _plainly(abi.rules[rule].label): rule})
                yield key, names.get(_plainly(group[key]))

    def rule_of(self, group):
        """Returns the name of the rule that steps a group."""
        if not self.partners:
            return self.rule
        return next((rule for _, rule in self.asked(group) if rule), self.rule)

    # ---- What classes override -------------------------------------------------------------------

    def defaults_of(self, group, defaults):
        """Returns those of an optimizer's defaults that its group has."""
        return defaults

    def hypers(self, group):
        """Returns the hyper-parameters of a group under the library's names."""
        out = {}
        rule = self.rule_of(group)
        betas, hypers = group.get("betas"), abi.rules[rule].hypers
        if betas is not None:
            betas, given = sequence(betas), betas
            if betas is None:
                raise TypeError(
                    f"halfstep: betas={given!r} is not a sequence of numbers; write (0.9, 0.999)"
                )
            wanted = sum(name in hypers for name in abi.BETAS)
            if len(betas) != wanted:
                raise ValueError(f"Invalid betas {tuple(betas)}: {rule} has {wanted}")
        for name, hyper in hypers.items():
            if hyper.per_optimizer:
                continue
            if name in abi.BETAS and betas is not None:
                out[name] = float(betas[abi.BETAS.index(name)])
            elif name in group and hyper.words and isinstance(group[name], str):
                abi.check_choice(name, group[name])
                out[name] = float(hyper.words.index(group[name]))
            elif name in group:
                if group[name] is None or isinstance(group[name], str):
                    raise TypeError(
                        f"halfstep: the option {name!r} is {group[name]!r}; it has to be a number"
                    )
                out[name] = float(group[name])
        return out

    def take_hyper(self, group, name, value):
        """Puts a value of hypers() back into a group, if the group has such an option."""
        betas = group.get("betas")
        if name in abi.BETAS and betas is not None:
            place = abi.BETAS.index(name)
            if place < len(betas):
                group["betas"] = (*betas[:place], value, *betas[place + 1 :])
        elif name in group and isinstance(group[name], str):
            group[name] = abi.rules[self.rule_of(group)].hypers[name].words[int(value)]
        elif isinstance(group.get(name), torch.Tensor):
            group[name] = torch.full_like(group[name], value)
        elif name in group:
            group[name] = bool(value) if isinstance(group[name], bool) else value

    def choices(self, group):
        """Returns the choices of a group: its decay mode, and its schedules if it has any."""
        decay = group.get("decay")
        if decay is None and group.get("decoupled_weight_decay"):
            decay = "decoupled"
        out = {"decay": decay or abi.rules[self.rule_of(group)].decay}
        for name in ("schedule", "decay_schedule"):
            if group.get(name):
                out[name] = group[name]
        return out

    def values(self, group):
        """Returns the choices and hyper-parameters of a group by name."""
        return {**self.choices(group), **self.hypers(group)}

    def formats(self, group, p):
        """Returns the formats of one parameter's weight and states. None is the default."""
        return group.get("weights"), group.get("states")

    def check_mode(self, groups):
        """Raises RuntimeError if no step may be made now."""

    def before_build(self, groups, also):
        """Runs before states are made for parameters that have a gradient, or one in `also`."""

    # ---- Checks ----------------------------------------------------------------------------------

    def check(self, group):
        """Raises ValueError, in torch's words, for a value outside the library's bounds."""
        abi.check_flags(
            **{
                key: value
                for key, value in group.items()
                if key in _FLAGS or isinstance(value, str) and value.lower() in _BOOLEANS
            }
        )
        self._check_algorithm(group)
        rule = abi.rules[self.rule_of(group)]
        if isinstance(group["lr"], torch.Tensor) and group["lr"].numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        for name in ("weights", "states", "decay"):
            if not isinstance(group.get(name), (str, type(None))):
                raise TypeError(
                    f"halfstep: {name}={group[name]!r} must be a name, or None for the default"
                )
        for name, value in self.hypers(group).items():
            hyper = rule.hypers[name]
            above = value >= hyper.maximum if hyper.exclusive_maximum else value > hyper.maximum
            whole = not hyper.words or value % 1 == 0
            if hyper.minimum <= value and not above and whole:
                continue
            if name == "lr":
                raise ValueError(f"Invalid learning rate: {value}")
            if name in abi.BETAS and "betas" in group:
                raise ValueError(
                    f"Invalid beta parameter at index {abi.BETAS.index(name)}: {value}"
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
        if rule.matrix:
            matrices.check(group)
        states = group.get("states")
        # Formats are checked by the library, which says what is wrong with them.
        abi.recipe_full("/".join((rule.name, "f32", states)) if states else rule.name)
        _check_choices(**self.choices(group))
        if not abi.is_real(self.clip_norm):
            raise TypeError(
                f"halfstep: clip_norm={self.clip_norm!r} is not a number; 0 switches clipping off"
            )
        if not 0.0 <= self.clip_norm < float("inf"):
            raise ValueError(f"Invalid clip_norm value: {self.clip_norm}")
        if not abi.is_count(self.threads, 0, 1024):
            raise ValueError(f"halfstep: threads={self.threads!r} is not a number from 0 to 1024")
        _check_choices(clip=self.clip, scan=self.scan, generator=group.get("generator"))

    def _check_algorithm(self, group):
        """Raises ValueError for a group that asks for a rule which this optimizer does not step by,
        or for two rules."""
        own = self.rule_of(group)
        for key, rule in self.asked(group):
            if rule == own:
                continue
            found = f"{key!r}: {group[key]!r}"
            if rule is None:
                known = [abi.rules[name].label for name in self.partners]
                known[:0] = [self.title]
                raise ValueError(
                    f"halfstep: a group has {found}, and {self.title} steps groups by"
                    f" {' or '.join(known)} only: give parameters that another rule is to step to"
                    " an optimizer of that rule, and leave the key out"
                )
            raise ValueError(
                f"halfstep: a group has {found}, and another of its keys asks for {own}: leave one"
                " of them out"
            )

    def take_reference(self, group):
        """Makes fully decoupled decay refer to the first lr, if there is no reference_lr and the
        first lr can be meant as one."""
        if self.choices(group)["decay"] != "fully-decoupled" or group.get("reference_lr"):
            return
        first = group.setdefault("first_lr", self.hypers(group)["lr"])
        if first >= _LEAST_FIRST_LR * abi.rules[self.rule_of(group)].hypers["lr"].initial:
            group["reference_lr"] = first

    def check_reference(self, group):
        """Raises ValueError if fully decoupled decay has no sensible reference_lr."""
        if self.choices(group)["decay"] != "fully-decoupled":
            return
        self.take_reference(group)
        lr = self.hypers(group)["lr"]
        decay, reference, first = (
            float(group.get(key) or 0.0) for key in ("weight_decay", "reference_lr", "first_lr")
        )
        if decay and (
            not reference or reference == first and lr > _MOST_ABOVE_FIRST_LR * reference
        ):
            raise ValueError(
                "halfstep: fully-decoupled decay is lr / reference_lr * weight_decay, and the"
                f" first lr, {first:g}, cannot be meant as the reference: give reference_lr=, the"
                " lr at which decay is weight_decay"
            )
