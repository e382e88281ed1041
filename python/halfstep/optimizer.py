"""`Optimizer`: what every class of this package does. The classes themselves are made in rules.py.

This file is longer than 500 lines because it is one class: torch asks an optimizer to be one
object, with its steps, release, inspection and saving; the C handle is in _engine.py, the reading
of saved states in _state.py.
"""

import os
import warnings
import weakref
from ctypes import byref, c_double, c_int32, c_uint64
from operator import is_, itemgetter
from typing import Any, Dict, Iterable, List, Optional, Tuple, Union

import torch

from . import _abi, _devices, _files, _layout, _release, _sharding, _state, accumulate
from ._abi import check, lib
from ._engine import STATE, WEIGHT, Engine, Member, declare, formats_of
from ._guards import guard
from ._handles import create_handle, read_rows, seed_of, write_rows
from ._parameters import PLAIN, check_gradient, check_parameter, weight_format
from ._sharding import local
from ._torch import VERSION, caller, increment_versions, no_dynamo
from ._watch import PIECE, Watch, clear_rows, version, versions

_Tensor = torch.Tensor
#: what optimizers take
Params = Union[Iterable[torch.Tensor], Iterable[Dict[str, Any]], Iterable[Tuple[str, torch.Tensor]]]
# Called through map(), which costs half of what a loop does.
_get_grad, _get_dtype, _get_shape = (
    getattr(torch._C.TensorBase, name).__get__ for name in ("grad", "dtype", "shape")
)
_numel, _is_contiguous, _is_neg, _data_ptr = (
    _Tensor.numel,
    _Tensor.is_contiguous,
    _Tensor.is_neg,
    _Tensor.data_ptr,
)
_PLAIN_TYPES = {_Tensor}
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
# How often one handle may be wrong about what gradients will look like.
_MOST_GUARDS = 4
# Without a reference_lr, fully decoupled decay refers to the first lr: one that is at least so much
# of the rule's default, and of which a later one is at most so many times as much (halfstep.h).
_LEAST_FIRST_LR, _MOST_ABOVE_FIRST_LR = 1e-4, 10.0
_OTHER_RULE = (
    "halfstep: a group has {}, and {} steps all of its groups by its own rule: give parameters that"
    " another rule is to step to an optimizer of that rule, and leave the key out"
)
# From this version on torch itself takes (name, tensor) pairs.
_NAMED = VERSION >= (2, 6)
#: rebuilt, or bound to this process; "step" is there where a scheduler has wrapped that of the
#: instance, "_number" in pickles
#: of older versions
_TRANSIENT = (
    "_engine",
    "_flat",
    "_indices",
    "_empty",
    "_release_handles",
    "_released",
    "_warned",
    "_watch",
    "_witness",
    "grad_scale",
    "found_inf",
    "_zero_grad_profile_name",
    "_norm_group",
    "_agreed",
    "_rounds",
    "step",
    "_opt_called",
    "_number",
)


def name_parameters(module: torch.nn.Module, prefix: str = "") -> None:
    """Gives the parameters of `module` their names, which key their random bits and stand in
    messages.

    Call it before the optimizer's first step; again after parameters were replaced, as sharding
    does. Optimizers that are given `(name, tensor)` pairs (`model.named_parameters()`) need no such
    call.
    """
    for name, p in module.named_parameters(prefix=prefix):
        p._halfstep_name = name


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


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of wrappers that keep it as `.optimizer`, as those of Accelerate and
    Lightning do."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


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


def _keep_plain(options):
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


class Optimizer(torch.optim.Optimizer):
    """Base of all optimizers of halfstep: a `torch.optim.Optimizer` whose step is one call of the C
    library.

    Options of every group, read at each step like `lr`:

    weights         format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8",
                    "bf16-ecc16", "bf16"; float16 ones take
                    the namesake ("f16-sr"), float32 ones stay as they are
    states          format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for
                    each, "int8+bf16-sr";
                    None: the rule's default, f32 for float32 parameters and bf16-sr for others
    decay           "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None:
                    the rule's default
    maximize, centralize, cautious (of the rules that have it), and the hyper-parameters of the rule

    Options of the optimizer:

    clip_norm       gradients are scaled so that their norm over all parameters is at most this; 0:
                    not. `grad_norm` reads it
    clip            in gradient release: "delayed" clips by the norm of the round before,
                    "per-tensor" by each tensor's own
    scan            "scan": a gradient that is not finite makes the step change nothing at all;
                    "per-tensor": only its tensor is
                    left alone; "known-finite": nobody looks
    generator       "lattice", "mixer" or "philox7", the source of random bits; None: the library's
                    default
    seed            of the random bits; None: drawn once from torch's generator, so that
                    torch.manual_seed() governs it; where
                    torch.distributed is initialized it is 0 on all ranks
    threads         0: torch.get_num_threads() at each step
    gradient_release, optimizer_accumulation    see prepare_gradient_release() and
                                                `optimizer_accumulation`
    norm_group      a torch.distributed group (True: of all ranks) whose ranks hold different
                    parameters, such as those of a
                    ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by,
                    the verdict on gradients that are not finite, and a rule's sums over all tensors
                    are theirs together. Every one of them has to call step() as often. Not saved
                    and not copied
    flat            True: vectors of 4096 elements or more are flat buffers of many parameters,
                    which take block formats; "shards":
                    and each rank holds another shard, so that each has random bits of its own.
                    Those of FSDP1 are recognized
    compile         True: step() can be traced by torch.compile(fullgraph=True)
    foreach, fused, capturable    accepted; all parameters are always stepped in one call.
                                  fused=True also lets a GradScaler
                    leave unscaling to the step
    """

    #: name in the library's table of rules
    rule = None

    # What pickles that lack them go on with.
    clip_norm, clip, scan, threads = 0.0, None, None, 0
    _norm_group, flat = None, False
    # Whether the ranks that share parameters have compared what they go by.
    _agreed = False
    _rounds = None
    compile = optimizer_accumulation = gradient_release = False
    #: options of groups that are not among the defaults
    _beside_defaults = ()
    # Whether the last step had its scale from a GradScaler on a GPU, who knows what was refused.
    _scaled = False
    # In a compiled step: by weight, and of the witness under None, whether the operator got a copy
    # (see _watch.py).
    _compiled_copies = None
    # What pickles that lack it go on with.
    _pending = None

    def __init__(
        self,
        params: Params,
        defaults: Dict[str, Any],
        *,
        weights: Optional[str] = None,
        states: Optional[str] = None,
        decay: Optional[str] = None,
        reference_lr: float = 0.0,
        clip_norm: float = 0.0,
        clip: Optional[str] = None,
        scan: Optional[str] = None,
        generator: Optional[str] = None,
        seed: Optional[int] = None,
        threads: int = 0,
        gradient_release: bool = False,
        optimizer_accumulation: bool = False,
        norm_group: Any = None,
        flat: Union[bool, str] = False,
        foreach: Optional[bool] = None,
        fused: Optional[bool] = None,
        capturable: bool = False,
        differentiable: bool = False,
        compile: bool = False,
    ) -> None:
        if differentiable:
            raise ValueError(
                f"halfstep: {type(self).__name__} cannot be differentiated through:"
                " differentiable=True"
            )
        if fused and foreach:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        self._engine = None
        self._flat, self._indices, self._empty = [], [], []
        self._warned = set()
        self._watch = Watch()
        self._release_handles, self._released = [], set()
        #: parameters whose states have taken micro-batches that no update of the weight has
        #: followed yet, as keys
        self._pending = {}
        # Names that were given with parameters, also by place, and ids of older files for
        # parameters without states.
        self._names, self._roster, self._ids = {}, [], {}
        self.clip_norm, self.clip, self.scan = clip_norm, clip, scan
        if flat not in (False, True, "shards"):
            raise ValueError(f"halfstep: flat={flat!r} is none of False, True, 'shards'")
        self._norm_group, self.flat = norm_group, flat
        self.threads = threads
        self.compile = compile
        if compile:
            from . import _compile

            _compile.register(self)
        #: True: gradients go into the states and leave the weights alone; the last micro-batch of a
        #: step is made with False
        self.optimizer_accumulation = optimizer_accumulation
        self.gradient_release = False
        defaults = {
            **defaults,
            "weights": weights,
            "states": states,
            "decay": decay,
            "reference_lr": reference_lr,
            "seed": seed_of(seed),
            "generator": _abi.choices("generator")[0] if generator is None else generator,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": False,
            "fused": fused,
        }
        _keep_plain(defaults)
        self._check_options(defaults)
        super().__init__(params, defaults)
        if fused:
            self._step_supports_amp_scaling = True
        if gradient_release:
            self.prepare_gradient_release()

    # ---- Options ---------------------------------------------------------------------------------

    def _hypers(self, group):
        """The hyper-parameters of a group as the library names them."""
        out = {}
        betas = group.get("betas")
        if betas is not None:
            betas, given = sequence(betas), betas
            if betas is None:
                raise TypeError(f"halfstep: betas={given!r} is not a sequence of numbers")
        wanted = sum(name in _abi.rules[self.rule].hypers for name in _abi.BETAS)
        if betas is not None and len(betas) != wanted:
            raise ValueError(f"Invalid betas {tuple(betas)}: {self.rule} has {wanted}")
        for name, hyper in _abi.rules[self.rule].hypers.items():
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

    def _take_hyper(self, group, name, value):
        """The way back of one of _hypers(), into a group that has such an option."""
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

    def _choices(self, group):
        """The choices of a group: its decay mode, and its schedule where it has one."""
        decay = group.get("decay")
        if decay is None and group.get("decoupled_weight_decay"):
            decay = "decoupled"
        out = {"decay": decay or _abi.rules[self.rule].decay}
        if group.get("schedule"):
            out["schedule"] = group["schedule"]
        return out

    def _recipe_parts(self, group, p):
        """The formats of one parameter's weight and states; None is the default."""
        return group.get("weights"), group.get("states")

    def _check_options(self, group):
        """Raises ValueError, in torch's words, for what the library's bounds forbid."""
        rule = _abi.rules[self.rule]
        if isinstance(group["lr"], torch.Tensor) and group["lr"].numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        for name in ("weights", "states", "decay"):
            if not isinstance(group.get(name), (str, type(None))):
                raise TypeError(f"halfstep: {name}={group[name]!r} is not the name of one")
        for name, value in self._hypers(group).items():
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
        for choice, value in self._choices(group).items():
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
        muon, ours = self.rule == "muon", type(self).__name__
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
            for name in (self.rule, _abi.rules[self.rule].label, type(self).__name__)
        }

    @no_dynamo
    def add_param_group(self, param_group):
        """As torch's; parameters that no step could take are refused here."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        if not _NAMED:
            params = param_group["params"]
            params = (
                [params]
                if isinstance(params, torch.Tensor)
                else params
                if isinstance(params, set)
                else list(params)
            )
            if params and not isinstance(params, set) and all(isinstance(p, tuple) for p in params):
                param_group["param_names"], params = (
                    [name for name, _ in params],
                    [p for _, p in params],
                )
            param_group["params"] = params
        self._refresh_names()  # all groups have names or none does; torch looks
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_keys(group)
            _keep_plain(group)
            if "param_names" in group:
                _state.check_names(group, len(self.param_groups) - 1)
                self._check_names(group["params"], group["param_names"])
                self._names.update(zip(group["params"], group["param_names"]))
            self._check_options(group)
            for i, p in enumerate(group["params"]):
                if self._takes_part(p):
                    name = self._name_of(len(self.param_groups) - 1, i)
                    check_parameter(p, name)
                    weight_format(self._recipe_parts(group, p)[0], p.dtype, name)
            if self.compile:
                _sharding.refuse(
                    group["params"],
                    "compile=True",
                    "torch.compile the model and call step() as it is",
                )
            self._check_cuts(len(self.param_groups) - 1)
        except BaseException:
            self.param_groups.pop()
            raise
        self._refresh_names()
        for key in (
            "ids",
            "recipes",
            "first_lr",
            *_layout.TOLD,
        ):  # of the optimizer that the group comes from
            group.pop(key, None)
        first = self.param_groups[0]
        group.update(
            group_steps=0,
            skipped_steps=first.get("skipped_steps", 0),
            last_norm=first.get("last_norm", 0.0),
        )
        for key in ("seed", "generator"):
            if group.get(key) is None:
                group[key] = self.defaults[key]
        self._take_reference(group)
        self._drop_engine()
        self._show_estimates()
        self._agreed = False
        if self.gradient_release:
            self.prepare_gradient_release()

    def _take_reference(self, group):
        """Has fully decoupled decay refer to the first lr, where nobody gives a reference_lr and
        that can be meant as one."""
        if self._choices(group)["decay"] != "fully-decoupled" or group.get("reference_lr"):
            return
        first = group.setdefault("first_lr", float(group["lr"]))
        if first >= _LEAST_FIRST_LR * _abi.rules[self.rule].hypers["lr"].initial:
            group["reference_lr"] = first

    def _check_reference(self, group):
        """Raises ValueError where fully decoupled decay would not be what anybody can mean."""
        if self._choices(group)["decay"] != "fully-decoupled":
            return
        self._take_reference(group)
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

    def _check_rates(self):
        """Raises ValueError where groups that share one estimate of the lr (Prodigy) have two rates
        above 0."""
        if not _abi.rules[self.rule].totals:
            return
        rates = {}
        for group in self.param_groups:
            lr = group["lr"]
            if isinstance(lr, torch.Tensor) and lr.device.type != "cpu" or not float(lr):
                continue
            if rates.setdefault(_sharding.number_of(group), float(lr)) != float(lr):
                raise ValueError(
                    f"halfstep: groups of {type(self).__name__} share one estimate of the learning"
                    " rate, so their lr must be equal or 0, not"
                    f" {rates[_sharding.number_of(group)]:g} and {float(lr):g}; with another"
                    " d_group each has an estimate of its own"
                )

    def _show_estimates(self):
        """Puts the estimate of the learning rate (Prodigy's d) into the groups, from the states of
        their parameters."""
        rule = _abi.rules[self.rule]
        if not rule.totals:
            return
        shared = {}
        for group in self.param_groups:
            for p in group["params"]:
                d = (self.state.get(p) or {}).get("d")
                number = _sharding.number_of(group)
                shared[number] = max(shared.get(number, 0.0), 0.0 if d is None else float(d))
        for group in self.param_groups:
            group["d"] = shared.get(_sharding.number_of(group), 0.0) or group["d0"]

    def _check_keys(self, group):
        """Raises ValueError for what is nearly the name of an option. Other keys belong to
        somebody: torch keeps them, too."""
        known = {*self.defaults, *self._beside_defaults, *_abi.rules[self.rule].hypers}
        for key in group:
            if key not in known and key not in _GROUP_KEYS:
                near = next((option for option in sorted(known) if _is_misspelt(key, option)), None)
                if near:
                    raise ValueError(
                        f"halfstep: a group has the key {key!r}, which is no option of"
                        f" {type(self).__name__}; {near!r} is one"
                    )

    def _check_names(self, params, names):
        """Raises ValueError where two parameters have one name, and would round alike."""
        taken = {name: p for p, name in self._names.items()}
        for p, name in zip(params, names):
            if taken.setdefault(name, p) is not p:
                raise ValueError(
                    f"halfstep: two parameters are named {name!r}; names key their random bits, so"
                    " each needs its own"
                )

    def _check_cuts(self, group_index):
        """Raises for a shard that the formats of its parameter cannot follow."""
        group = self.param_groups[group_index]
        wanted = [
            (p, group_index, i, PLAIN[p.dtype])
            for i, p in enumerate(group["params"])
            if _sharding.is_dtensor(p) and p.numel() and self._takes_part(p)
        ]
        if wanted:
            handle = create_handle(1, 0)
            try:
                declare(handle, self, wanted)
            finally:
                lib.halfstep_destroy(handle)

    @property
    def seed(self):
        """Of the random bits; kept in `param_groups`."""
        return self.param_groups[0].get("seed", 0)

    @property
    def generator(self):
        """Of the random bits, by name; kept in `param_groups`, so that what is loaded goes on with
        its bits."""
        return self.param_groups[0]["generator"]

    @generator.setter
    def generator(self, name):
        for group in self.param_groups:
            group["generator"] = name

    @property
    def norm_group(self):
        """The torch.distributed group of the option; a process group can be neither saved nor
        copied: set it again."""
        return self._norm_group

    @norm_group.setter
    def norm_group(self, group):
        self._norm_group, self._agreed = group, False
        self._drop_engine()

    def _threads_now(self):
        return self.threads or torch.get_num_threads()

    # ---- Names and identities --------------------------------------------------------------------

    @staticmethod
    def _given_name(p):
        return getattr(p, "_halfstep_name", None)

    def _name_of(self, group_index, position):
        p = self.param_groups[group_index]["params"][position]
        return self._names.get(p) or self._given_name(p) or f"{position} of group {group_index}"

    def _refresh_names(self):
        """Names stay with their parameters, or with their places where parameters were replaced, as
        sharding does."""
        names = {}
        for g, group in enumerate(self.param_groups):
            roster = self._roster[g] if len(self._roster) == len(self.param_groups) else ()
            for i, p in enumerate(group["params"]):
                name = self._names.get(p) or (
                    roster[i] if len(roster) == len(group["params"]) else None
                )
                if name is not None:
                    names[p] = name
        self._names = names
        self._roster = [[names.get(p) for p in group["params"]] for group in self.param_groups]
        for group, own in zip(self.param_groups, self._roster):
            if not own or None in own:
                group.pop("param_names", None)
            elif group.get("param_names") != own:
                group["param_names"] = list(own)

    def _all_names(self):
        """The names of the parameters of each group that were given with them, or by
        name_parameters(); None for others."""
        self._refresh_names()
        return [
            [self._names.get(p) or self._given_name(p) for p in group["params"]]
            for group in self.param_groups
        ]

    def _identities(self, params):
        """The ids of parameters: those of their states, else hashes of their names, else of their
        places among all."""
        self._refresh_names()
        flat = {
            p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])
        }
        found = {}
        for p, place in flat.items():
            held = (self.state.get(p) or {}).get("id")
            if held is not None:
                found[p] = int(held) % 2**64
            elif p in self._ids:
                found[p] = self._ids[p]
            elif p in self._names or self._given_name(p) is not None:
                found[p] = _abi.name_id(
                    _sharding.name_here(self, p, self._names.get(p) or self._given_name(p))
                )
            elif _sharding.is_sharded_buffer(p):
                found[p] = _abi.name_id(_sharding.name_here(self, p, f"parameter {place}"))
        taken = set(found.values())
        for p in params:
            if p not in found:
                # The place of a parameter that has its id already, and was moved, is not taken
                # twice.
                text = _sharding.place_here(self, p, f"parameter {flat[p]}")
                while _abi.name_id(text) in taken:
                    text += " again"
                found[p] = _abi.name_id(text)
                taken.add(found[p])
        return found

    # ---- What an optimizer that steps weights or keeps states elsewhere than they lie has of its own
    # (offload.py, streaming.py) ----

    def _home(self, p):
        """The device that a parameter is stepped on."""
        return _devices.of(local(p))

    def _divide(self, wanted):
        """What each handle has (see Engine): a device, what brings states there (streaming.py) or
        None, and some of `wanted`."""
        found = {}
        for one in wanted:
            found.setdefault(self._home(one[0]), []).append(one)
        return [(device, None, some) for device, some in found.items()]

    def _check_device(self, p, name):
        """Raises ValueError where a parameter cannot be stepped for where it lies."""
        _devices.check(local(p), name)

    def _gradient_of(self, p):
        """The gradient that a parameter is to be stepped with, or None."""
        return p.grad

    def _take(self, p):
        """In gradient release, the gradient of a parameter is complete."""
        self.step_param(p)
        p.grad = None

    def _settle(self):
        """Waits for steps that other threads of this process carry out."""

    def _bring(self, m, p, grad):
        """Weight and gradient of a member where it is stepped; what still has to come is there
        after _arrive()."""
        raise NotImplementedError

    def _arrive(self, members):
        """Until what _bring() began is there."""

    def _return(self, members):
        """Takes the weights of members back to where they lie."""

    # ---- The handle ------------------------------------------------------------------------------

    def _drop_engine(self):
        self._hear()
        engine, self._engine = self._engine, None
        if engine is not None:
            try:
                engine.save_counters(self)
            finally:
                engine.destroy()

    def _build(self, also=None, decides=True):
        """Builds the handle anew for every parameter that has states or a gradient, and for those
        of `also`, a dictionary of gradients by parameter. decides: as _notice()'s."""
        also = also or {}
        self._notice(decides=decides)
        self._drop_engine()
        flat, wanted, seen = [], [], set()
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                flat.append(p)
                if id(p) in seen or p.numel() == 0:
                    continue
                seen.add(id(p))
                grad = also.get(p)
                if grad is None:
                    grad = self._gradient_of(p)
                if (
                    grad is None
                    and p not in self.state
                    and p not in also
                    and not (self.gradient_release and p.requires_grad)
                ):
                    continue
                name = self._name_of(g, i)
                check_parameter(p, name)
                self._check_device(p, name)
                wanted.append(
                    (
                        p,
                        g,
                        i,
                        PLAIN[p.dtype] if grad is None else self._check_gradient(p, grad, name),
                    )
                )
        engine = Engine(self, wanted)
        engine.refresh(self)
        self._watch.keep(engine.guarded)
        self._watch.wrote([p for p in engine.converted if p in self._watch.index], self._extra_of)
        self._flat = flat
        self._indices = [engine.index_of.get(p, -1) for p in flat]
        self._empty = [p for p in flat if p.numel() == 0]
        self._engine = engine
        return engine

    def _current(self, decides=True):
        """The handle, with hyper-parameters as they are now."""
        self._settle()
        engine = self._engine
        if engine is not None:
            flat = [p for group in self.param_groups for p in group["params"]]
            known = self._flat
            if (
                len(flat) != len(known)
                or not all(map(is_, flat, known))
                or self.state is not engine.optimizer_state
                or engine.formats != formats_of(self.param_groups)
                or not engine.refresh(self)
            ):
                engine = None
            elif engine.asynchronous:
                engine.use_streams()
        return self._build(decides=decides) if engine is None else engine

    def _stale(self, m, state):
        """Whether a state of a parameter is no longer where the handle thinks it is."""
        if (
            state is None
            or state.get("step") is not m.step
            or version(m.step) != m.versions["step"]
        ):
            return True
        if any(version(tensor) != m.versions[key] for key, tensor in m.numbers.items()):
            return True
        for key, tensor, address in m.bound:
            if state.get(key) is not tensor or local(tensor).data_ptr() != address:
                return True
        return False

    def _place(self, engine, m, p, grad, keep, back):
        """Addresses of one weight and its gradient, for tensors that do not simply lie there in
        order."""
        sharded = m.part is not None and m.part.mesh is not None
        if m.gathered:
            grad = _sharding.gradient_of(p, grad, m.name)
            if check_gradient(p, grad, m.name) != m.gradient:
                return None
            engine.gather(m, self.state[p])
            grad, weight = (
                _devices.contiguous(grad.full_tensor()),
                _devices.contiguous(p.full_tensor()),
            )
            keep.append(grad)
            back.append((m, weight))
            return weight.data_ptr(), grad.data_ptr()
        if m.offloaded:
            if (
                not self._is_where_it_was(engine, m, local(p))
                or self._check_gradient(p, grad, m.name) != m.gradient
            ):
                return None
            weight, grad = self._bring(m, p, grad)
            back.append((m, weight))
            return _sharding.address(weight), _sharding.address(grad)
        if sharded:
            grad, p = local(_sharding.gradient_of(p, grad, m.name)), local(p)
            keep.append(grad)
        if not self._is_where_it_was(engine, m, p) or check_gradient(p, grad, m.name) != m.gradient:
            return None
        if not _devices.is_plain(grad):
            grad = _devices.contiguous(grad)
            keep.append(grad)
        weight = p
        if not m.dense:
            weight = _devices.contiguous(p)
            back.append((p, weight))
        return weight.data_ptr(), _sharding.address(grad) if sharded else grad.data_ptr()

    @staticmethod
    def _is_where_it_was(engine, m, p):
        """Whether a weight lies where the handle thinks it does, or could be told to."""
        if (
            p.data_ptr() == m.address
            and p.shape == m.shape
            and p.dtype == m.dtype
            and p.stride() == m.strides
            and _devices.is_plain(p) == m.dense
        ):
            return True
        return engine.recheck_weight(m)

    def _check_gradient(self, p, grad, name):
        """check_gradient() of what _gradient_of() gave."""
        return check_gradient(p, grad, name)

    def _gather_given(self, engine, given, keep, back):
        """_gather() for a compiled step, which brings its own tensors: weights and gradients by
        parameter."""
        engine.weights_are_plain = False
        for i in range(len(engine.members)):
            engine.gradients[i] = None
        for p, (weight, grad) in given.items():
            if p.numel() == 0:
                continue
            i = engine.index_of.get(p, -1)
            if i < 0 or self._stale(engine.members[i], self.state.get(p)):
                return False
            m = engine.members[i]
            if check_gradient(p, grad, m.name) != m.gradient:
                return False
            keep.append(_devices.contiguous(grad))
            held = _devices.contiguous(weight)
            if held.data_ptr() != weight.data_ptr():
                back.append((weight, held))
            engine.weights[i], engine.gradients[i] = held.data_ptr(), keep[-1].data_ptr()
        return True

    def _gather(self, engine, keep, back, stepped):
        """Fills the pointer arrays. False where the handle does not fit any more."""
        if self._gather_plain(engine):
            stepped.extend(engine.params)
            return True
        engine.weights_are_plain = False
        for p, i in zip(self._flat, self._indices):
            grad = self._gradient_of(p)
            if grad is None or (i < 0 and p.numel() == 0):
                if i >= 0:
                    engine.gradients[i] = None
                continue
            if i < 0 or self._stale(engine.members[i], self.state.get(p)):
                return False
            found = self._place(engine, engine.members[i], p, grad, keep, back)
            if found is None:
                return False
            engine.weights[i], engine.gradients[i] = found
            stepped.append(p)
        return True

    def _gather_plain(self, engine):
        """_gather() for the case that every parameter has a gradient of the type it had before, all
        lie in order in memory, and everything is where it was: a thousand small tensors cost about
        a microsecond each in Python, so the checks go over lists. False is no verdict; _gather()
        looks closer."""
        plain = engine.plain
        if plain is None or len(plain.params) != len(self._flat) - len(self._empty):
            return False
        try:
            grads = [p.grad for p in plain.params]
            if (
                not plain.guards
                or not plain.guards[0](*plain.params)
                or not plain.guards[1](*grads)
            ):
                if not self._are_plain(plain, grads):
                    return False
                self._guard(plain, grads)
            addresses = list(map(_data_ptr, grads))
        except RuntimeError:  # sparse tensors have no address
            return False
        if 0 in addresses:  # nor do tensors without memory
            return False
        state = self.state
        if (
            len(state) != len(plain.keys)
            or not all(map(is_, state, plain.keys))
            or not all(map(is_, state.values(), plain.values))
        ):
            if not all(map(is_, map(state.get, plain.params), plain.states)):
                return False
            plain.keys, plain.values = list(state), list(state.values())
        if (
            versions(plain.steps) != plain.step_versions
            or versions(plain.counts) != plain.count_versions
        ):
            return False
        for key, states, tensors in plain.streams:
            try:
                if not all(map(is_, map(itemgetter(key), states), tensors)):
                    return False
            except KeyError:
                return False
        if (
            list(map(_data_ptr, plain.tensors)) != plain.addresses
            or list(map(_data_ptr, plain.params)) != plain.weights
        ):
            return False
        engine.gradients[:] = addresses
        if not engine.weights_are_plain:
            engine.weights[:] = plain.weights
            engine.weights_are_plain = True
        return True

    @staticmethod
    def _are_plain(plain, grads):
        """The same as the guards of `plain`, attribute by attribute; gradients may have any shape
        of as many elements."""
        if set(map(type, grads)) != _PLAIN_TYPES:
            return False
        if (
            list(map(_get_dtype, plain.params)) != plain.weight_dtypes
            or list(map(_get_shape, plain.params)) != plain.shapes
            or not all(map(_is_contiguous, plain.params))
        ):
            return False
        return (
            list(map(_get_dtype, grads)) == plain.dtypes
            and list(map(_numel, grads)) == plain.numels
            and all(map(_is_contiguous, grads))
            and not any(map(_is_neg, grads))
            and not any(map(_is_neg, plain.params))
        )

    @staticmethod
    def _guard(plain, grads):
        """Takes tensors that are plain as those to come. Where they keep changing all the same,
        guards do not pay."""
        plain.guarded += 1
        guards = [guard(plain.params), guard(grads)] if plain.guarded <= _MOST_GUARDS else [None]
        plain.guards = None if None in guards else guards

    # ---- Residuals of weights that others write --------------------------------------------------

    def _extra_of(self, p):
        """The residual or error code beside a weight, or None."""
        state = self.state.get(p)
        return state.get("weight.extra") if state else None

    def _notice(self, only=None, token=None, decides=True):
        """Drops the residuals of the rows of weights, or of `only`, that somebody else has written
        since this optimizer did. decides: also of a state that was loaded, whose weights are there
        by now."""
        if not self._watch:
            return
        for p, rows in self._watch.strangers(
            self._extra_of, only, self._compiled_copies, token, decides
        ):
            extra = self._extra_of(p)
            if extra is None:
                continue
            clear_rows(extra, rows)
            self._watch.wrote([p], self._extra_of)
            if "written" not in self._warned:
                self._warned.add("written")
                name = next(
                    (
                        self._name_of(g, i)
                        for g, group in enumerate(self.param_groups)
                        for i, other in enumerate(group["params"])
                        if other is p
                    ),
                    "?",
                )
                which = (
                    "residuals kept beside it were"
                    if rows is None
                    else (
                        f"residuals kept beside {int(rows.sum())} of its {rows.numel()} rows (of a"
                        f" vector: pieces of {PIECE}) were"
                    )
                )
                warnings.warn(
                    "halfstep: something else than this optimizer wrote the weight of parameter"
                    f" {name!r}, so the {which} dropped: they belonged to the weight before. After"
                    " load_state_dict() that is as it should be. A mask after every step would"
                    " lose each time what small updates have gathered in the rows that it changes:"
                    " call optimizer.write_weight(p, optimizer.read_weight(p) * mask) instead."
                    " This is said once",
                    UserWarning,
                    stacklevel=caller(),
                )

    # ---- Steps -----------------------------------------------------------------------------------

    def step(self, closure=None):
        """One update of every parameter that has a gradient. Returns what `closure` returns.

        A gradient that is not finite leaves everything as it was (see `scan`), counts in
        `skipped_steps` and is warned of once.
        """
        self._opt_called = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.compile:
            from . import _compile

            _compile.step(self)
        else:
            self._step()
        return loss

    # A scheduler of torch's puts a function around step() that notes its call, and that
    # torch.compile() refuses to trace. step() notes its own calls, and this says so.
    step._wrapped_by_lr_sched = True

    @no_dynamo
    @torch.no_grad()
    def _step_compiled(self, given, witness):
        """The step inside the operator of a compiled step: weights and gradients by parameter, and
        the witness."""
        copies = {p: weight.data_ptr() != p.data_ptr() for p, (weight, _) in given.items()}
        copies[None] = witness.data_ptr() != self._witness.data_ptr()
        self._opt_called = True  # which a traced step() does not carry out
        self._compiled_copies = copies
        try:
            self._step(given)
        finally:
            self._compiled_copies = None
        watch, engine = self._watch, self._engine
        watch.compiled += 1
        watch.witness_copied = copies[None]
        if engine is not None and engine.guarded:
            watch.wrote([p for p in given if p in engine.guarded], self._extra_of, copies)

    @no_dynamo
    @torch.no_grad()
    def _step(self, given=None):
        """The step itself; `given` are the weights and gradients by parameter that a compiled step
        has."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        scaler_on_gpu = any(
            isinstance(t, _Tensor) and _devices.is_asynchronous(_devices.of(t))
            for t in (scale, found_inf)
        )
        if found_inf is not None and not scaler_on_gpu and float(found_inf):
            # A GradScaler has seen it, and will lower its scale.
            self._count_skipped()
            return
        if not self.state and given is None and self._is_primed():
            return
        self._check_mode()
        waiting = self._give_zeros(given)
        try:
            self._step_all(given, scale, found_inf, scaler_on_gpu)
        finally:
            for p in waiting:
                p.grad = None

    def _check_mode(self):
        """Raises RuntimeError where no step may be made now."""

    def _give_zeros(self, given=None):
        """Gives gradients of zeros to parameters whose states have gathered micro-batches and which
        the last one has no gradient for; those parameters. Gradient release does that at the end of
        a round. given: as for _step()."""
        if not self._pending or self.optimizer_accumulation or self._release_handles:
            return []
        members = {p for group in self.param_groups for p in group["params"]}
        waiting = [
            p
            for p in self._pending
            if p in members and (self._gradient_of(p) is None if given is None else p not in given)
        ]
        for p in waiting:
            if given is None:
                p.grad = self._zeros_for(p)
            else:
                given[p] = p, self._zeros_for(p)
        return waiting if given is None else []

    def _zeros_for(self, p):
        """A gradient of zeros in the format of those before."""
        m = (
            self._engine.members[self._engine.index_of[p]]
            if self._engine is not None and p in self._engine.index_of
            else None
        )
        dtype = next(
            (dtype for dtype, name in PLAIN.items() if m is not None and name == m.gradient),
            p.dtype,
        )
        return torch.zeros_like(p, dtype=dtype, memory_format=torch.contiguous_format)

    def _gathered(self, params, micro):
        """Notes which states hold micro-batches that no update of the weight has followed yet."""
        for p in params:
            if micro:
                self._pending[p] = True
            else:
                self._pending.pop(p, None)

    def _step_all(self, given, scale, found_inf, scaler_on_gpu):
        for _ in range(3):
            keep, back, stepped = [], [], []
            engine = self._current()
            if (
                self._gather(engine, keep, back, stepped)
                if given is None
                else self._gather_given(engine, given, keep, back)
            ):
                break
            self._build(given and {p: grad for p, (_, grad) in given.items()})
        else:
            raise RuntimeError("halfstep: parameters or states change while they are being stepped")
        if self._release_handles:
            self._step_in_release(engine, stepped)
            return
        if engine.guarded:
            self._notice(token=engine.plain if engine.weights_are_plain else None)
        if not scaler_on_gpu:
            engine.set_gradient_scale(1.0 if scale is None else 1.0 / float(scale))
        elif engine.asynchronous and len(engine.parts) == 1:
            engine.bind_gradient_scale(scale, found_inf)
            self._scaled = True
        else:  # the verdict on several handles is this process's
            if found_inf is not None and float(found_inf):
                self._count_skipped()
                return
            engine.set_gradient_scale(1.0 if scale is None else 1.0 / float(scale))
        if engine.ranks.needed and not self._agreed:
            _sharding.agree(self)
            self._agreed = True
        moved = [m for m, _ in back if isinstance(m, Member)]
        self._arrive([m for m in moved if m.offloaded])
        code, handle = engine.step(self.optimizer_accumulation)
        if engine.asynchronous:
            engine.keep_until_read([local(p.grad) for p in stepped if p.grad is not None])
            if self._empty and code == _abi.OK:  # whose steps are counted here
                code, handle = engine.hear()
                engine.tell(self.param_groups)
        if code == _abi.OK or self.scan == "per-tensor":
            self._gathered(stepped if given is None else list(given), self.optimizer_accumulation)
        if self.optimizer_accumulation:
            self._finish(engine, code, [(m, None) for m in moved if m.gathered], (), handle)
            return
        self._finish(engine, code, back, stepped, handle)
        if self._empty and (code == _abi.OK or self.scan == "per-tensor"):
            self._count_empty()

    def _count_skipped(self):
        """A step that was refused before the handle was asked, which finds it in the groups."""
        skipped = self.skipped_steps + 1
        for group in self.param_groups:
            group["skipped_steps"] = skipped

    def _hear(self):
        """Waits for what was submitted to a GPU, if anything was, and says what came of it. Nothing
        can be asked in a capture."""
        self._settle()
        engine = self._engine
        if (
            engine is None
            or not engine.asynchronous
            or any(part.asynchronous and _devices.capturing(part.device) for part in engine.parts)
        ):
            return
        code, handle = engine.hear()
        engine.tell(self.param_groups)
        scaled, self._scaled = self._scaled, False
        if code == _abi.NONFINITE and not scaled:  # which a GradScaler knows
            self._report_nonfinite(engine, handle)

    def _is_primed(self):
        """Makes the states, and nothing else, where this is no step: torch.distributed.checkpoint
        has an optimizer without states make one with zero gradients and an lr of 0 to see what
        states it will have. Nothing may come of that but states of no steps. An lr of 0 alone is
        how warmups begin."""
        groups = self.param_groups
        if any(
            isinstance(group["lr"], torch.Tensor)
            and group["lr"].device.type == "meta"
            or float(group["lr"])
            for group in groups
        ):
            return False
        params = [p for group in groups for p in group["params"] if p.requires_grad]
        if not params or any(p.grad is None for p in params):
            return False
        zero = all(
            not local(p.grad).count_nonzero() for p in params if p.grad.layout == torch.strided
        )
        if not _sharding.everywhere(self, zero):
            return False
        self._build()
        for g, group in enumerate(groups):
            for i, p in enumerate(group["params"]):
                if p.numel() == 0 and p.grad is not None:
                    _state.count_empty(self, g, i, p, 0)
        self._drop_engine()
        return True

    def _count_empty(self, only=None):
        """Parameters without elements are not in the handle; their steps are counted here."""
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                if p.numel() or p.grad is None or p is not (only if only is not None else p):
                    continue
                _state.count_empty(self, g, i, p)

    def _finish(self, engine, code, back, stepped, handle=None):
        """What follows a call: errors, warnings, weights that were worked on in a copy. handle:
        that which was asked."""
        if code is None:  # refused by another rank of the norm group
            self._count_skipped()
            self._report_nonfinite(None, None)
            return
        if code == _abi.NONFINITE or code == _abi.OK and not engine.asynchronous:
            engine.tell(self.param_groups)
        if code == _abi.NONFINITE:
            self._report_nonfinite(engine, handle or engine.handle)
            if self.scan != "per-tensor":
                return
        elif code:
            check(code, handle or engine.handle)
        offloaded = []
        for p, weight in back:
            if not isinstance(p, Member):
                local(p).detach().copy_(weight)
            elif p.offloaded:
                offloaded.append(p)
            else:
                engine.scatter(p, self.state[p.p], weight)
        increment_versions(stepped)
        self._return(offloaded)
        if engine.guarded:
            whole = len(stepped) == len(engine.params)
            written = engine.guarded if whole else [p for p in stepped if p in engine.guarded]
            if len(written) > 1:
                self._watch.wrote_all(
                    written, self._extra_of, engine.plain if engine.weights_are_plain else None
                )
            elif written:
                self._watch.wrote(list(written), self._extra_of)

    def _report_nonfinite(self, engine, handle):
        often = self.param_groups[0]["skipped_steps"]
        if "nonfinite" in self._warned and often not in (10, 100, 1000, 10000, 100000):
            return
        self._warned.add("nonfinite")
        name = lib.halfstep_nonfinite_tensor(handle).decode() if handle else ""
        # On a GPU those of another step may have taken their place.
        grads = (
            [local(m.p.grad) for m in engine.members if m.p.grad is not None]
            if name and not engine.asynchronous
            else []
        )
        if not name:
            what = (
                "a gradient on another rank or device, or the norm of all of them, is not finite or"
                " too large"
            )
        elif len(grads) > 1 and not any(grad.isfinite().any() for grad in grads):
            what = (
                "the gradients of all parameters are not finite, as one of them leaves them after"
                " torch.nn.utils.clip_grad_norm_ (clip_norm= of this optimizer names it)"
            )
        elif lib.halfstep_gradient_too_large(handle):
            what = (
                f"the gradient of parameter {name!r} is finite, but too large: 2^62 (4.6e18) or"
                " more, whose square would leave fp32"
            )
        else:
            what = f"the gradient of parameter {name!r} is not finite"
        left = (
            f"parameter {name!r} was left alone"
            if self.scan == "per-tensor" or self._release_handles
            else "the step was skipped and nothing changed"
        )
        warnings.warn(
            f"halfstep: {what}; {left}. optimizer.skipped_steps, which every group has too, counts"
            f" how often: {often} by now. This is said again at the 10th, 100th ... time",
            RuntimeWarning,
            stacklevel=5,
        )

    def _one(self, p, grad):
        """The handle and the member of one parameter that has a gradient."""
        engine = self._engine
        if engine is None or p not in engine.index_of or (not self._released):
            engine = self._current()
        if p not in engine.index_of:
            engine = self._build({p: grad})
            if p not in engine.index_of:
                raise ValueError("halfstep: a parameter that this optimizer does not have")
        m = engine.members[engine.index_of[p]]
        if self._stale(m, self.state.get(p)):
            engine = self._build({p: grad})
            m = engine.members[engine.index_of[p]]
        if engine.asynchronous:
            engine.use_streams()
        return engine, m

    @no_dynamo
    @torch.no_grad()
    def step_param(self, p, group=None):
        """One update of one parameter from its gradient, which stays. The protocol of trainers that
        step inside the backward pass; call step() (or nothing) when the round is over."""
        grad = self._gradient_of(p)
        if grad is not None:
            self._check_mode()
            self._step_one(p, grad, self.optimizer_accumulation)

    def _step_one(self, p, grad, micro):
        """step_param() by a gradient; micro: it goes into the states."""
        self._opt_called = True  # which schedulers look for
        if p.numel() == 0 and (self._engine is None or p not in self._engine.index_of):
            if not micro:
                self._count_empty(p)
            return
        if self._engine is not None and (self._released if micro else p in self._released):
            self._end_round()
        engine, m = self._one(p, grad)
        if engine.guarded:
            self._notice(p)
        keep, back = [], []
        found = self._place(engine, m, p, grad, keep, back)
        if found is None:
            engine = self._build({p: grad})
            m = engine.members[engine.index_of[p]]
            keep, back = [], []
            found = self._place(engine, m, p, grad, keep, back)
        engine.set_gradient_scale(1.0)
        if m.offloaded:
            self._arrive([m])
        with m.states():
            if engine.ranks.divided:
                code = engine.ranks.step_one(p, None if micro else found[0], found[1], micro)
            elif micro:
                code = lib.halfstep_accumulate_states_tensor(m.handle, m.index, found[1])
            else:
                code = lib.halfstep_step_tensor(m.handle, m.index, found[0], found[1])
        if not micro:
            self._released.add(p)
        elif m.gathered:
            back = [(m, None)]
        else:
            back = []
        if engine.asynchronous and not m.offloaded:
            engine.keep_until_read([local(grad), *keep])
        if code == _abi.NONFINITE and not micro:
            engine.tell(self.param_groups)
            self._report_nonfinite(engine, m.handle)
        else:
            self._gathered((p,), micro)
            if code or back or not micro:
                self._finish(engine, code, back, () if micro else (p,), m.handle)

    def step_parameter(self, p, group=None, index=None):
        """`step_param` under the other name that trainers call it by."""
        self.step_param(p, group)

    @staticmethod
    def supports_fused_back_pass():
        """True: step_param() and step_parameter() may be called inside the backward pass."""
        return True

    def _end_round(self, dropped=False, partial=False):
        """Ends a round of gradient release. dropped: it is not followed by a step; partial: not all
        of its gradients came. Of either the norm is none to clip by next."""
        waiting = [p for p in self._pending if p not in self._released] if not dropped else ()
        for p in waiting:
            grad = self._gradient_of(p)
            self._step_one(p, self._zeros_for(p) if grad is None else grad, False)
        self._released.clear()
        if self._engine is not None:
            before = self.grad_norm if (dropped or partial) and self.clip_norm else None
            check(self._engine.end_round(bool(self.clip_norm)), self._engine.handle)
            if not self._engine.asynchronous or before is not None:
                self._engine.tell(self.param_groups)
            if before is not None:
                for group in self.param_groups:
                    group["last_norm"] = before

    @no_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. It ends a round: what a GradientAccumulator has gathered of these parameters
        is dropped, too, and in gradient release the next backward() begins anew, also after one
        that failed."""
        super().zero_grad(set_to_none)
        accumulate.drop(p for group in self.param_groups for p in group["params"])
        if not self.gradient_release:
            return
        self._settle()
        dropped = partial = False
        if self._rounds is not None:
            partial = len(self._rounds.seen) < len(self._release_handles) and not self.grad_norm
            dropped = self._rounds.zero_grad()
        if self._released and not self.optimizer_accumulation:
            with torch.no_grad():
                self._end_round(dropped, partial)

    # ---- Gradient release ------------------------------------------------------------------------

    def prepare_gradient_release(self):
        """From now on each parameter is stepped as soon as backward() has its gradient, which is
        then freed.

        step() and zero_grad() may be called as ever: step() steps what still has a gradient and
        ends the round, which schedules and "delayed" clipping count by. Shared parameters are
        stepped once, when their gradient is complete.

        Every backward() is a step then. What that cannot go with: a trainer that accumulates (its
        gradient_accumulation_steps has to be 1, or set `optimizer_accumulation` during all
        micro-batches but the last; a second backward() before the step() of a loop that calls it
        raises RuntimeError), DistributedDataParallel, which owns gradients until its own all-reduce
        has written them (RuntimeError; fully_shard() works, whose gradients come here reduced), and
        torch.nn.utils.clip_grad_norm_(), which finds no gradients any more and cannot be seen from
        here: use `clip_norm` with `clip`. A rule whose sums are over all tensors, Prodigy, has
        nothing to release (ValueError): no tensor can move before all gradients are there.
        """
        if _abi.rules[self.rule].totals:
            raise ValueError(
                f"halfstep: {type(self).__name__} has no gradient release: its update needs sums"
                " over the gradients of all tensors first"
            )
        self._remove_hooks()
        self.gradient_release = True
        self._rounds = _release.Rounds()
        _release.watch_scalers()
        this = weakref.ref(self)

        def hook(p):
            optimizer = this()
            if optimizer is not None:
                if optimizer._rounds is not None:
                    optimizer._rounds.gradient(optimizer, p)
                optimizer._take(p)

        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._release_handles.append(p.register_post_accumulate_grad_hook(hook))

    def remove_gradient_release(self):
        """Back to ordinary steps. States and counters stay."""
        self._remove_hooks()
        self._rounds = None
        if self._released:
            self._end_round()
        self.gradient_release = False

    def _remove_hooks(self):
        for handle in self._release_handles:
            handle.remove()
        self._release_handles = []

    def _step_in_release(self, engine, stepped):
        if (
            self._rounds is not None
        ):  # hooks of others, such as those of halfstep.compat, keep their own rules
            self._rounds.step()
        for p in stepped:
            self.step_param(p)
        if not self.optimizer_accumulation and (self._released or self._pending):
            self._end_round()

    # ---- What happened ---------------------------------------------------------------------------

    @property
    def skipped_steps(self) -> int:
        """Steps refused so far because a gradient was not finite. On a GPU this waits for the steps
        that were submitted, as every property that tells what came of them does."""
        self._hear()
        return self.param_groups[0].get("skipped_steps", 0)

    @property
    def grad_norm(self) -> float:
        """Norm of all gradients in the last step, before clipping; 0.0 where clip_norm is 0."""
        self._hear()
        return self.param_groups[0].get("last_norm", 0.0)

    def scalar(self, p: torch.Tensor, name: str) -> float:
        """What the rule keeps for a parameter as a number: lamb's "trust_ratio", "weight_norm",
        "update_norm" ..."""
        m = self._member(p)
        value = c_double()
        check(lib.halfstep_get_scalar(m.handle, m.index, name.encode(), byref(value)), m.handle)
        return value.value

    def recipe(self, p: torch.Tensor) -> str:
        """The full recipe of a parameter, "adamw/bf16-sr/int8"."""
        for g, group in enumerate(self.param_groups):
            for i, other in enumerate(group["params"]):
                if other is p:
                    return self._full_recipe(g, i)
        raise ValueError("halfstep: a parameter that this optimizer does not have")

    def _full_recipe(self, group_index, position):
        group = self.param_groups[group_index]
        p = group["params"][position]
        weights, states = self._recipe_parts(group, p)
        weights = weight_format(weights, p.dtype, self._name_of(group_index, position))
        return _abi.recipe_full("/".join(part for part in (self.rule, weights, states) if part))

    def _survey(self):
        """Bytes and fallen-back tensors of all parameters, whether or not they have states yet.
        Allocates no states."""
        handle = create_handle(1, 0)
        try:
            wanted, seen = [], set()
            for g, group in enumerate(self.param_groups):
                for i, p in enumerate(group["params"]):
                    if id(p) not in seen and p.numel() and self._takes_part(p):
                        seen.add(id(p))
                        dtype = p.dtype if p.grad is None else p.grad.dtype
                        wanted.append((p, g, i, PLAIN.get(dtype, PLAIN[p.dtype])))
            members, _, fallen = declare(handle, self, wanted)
            out = [c_uint64() for _ in range(4)]
            check(lib.halfstep_memory(handle, *[byref(x) for x in out], byref(c_int32())), handle)
            return (
                dict(
                    zip(("weights", "gradients", "extras", "states"), (int(x.value) for x in out))
                ),
                fallen,
                _layout.precise_states(
                    m.recipe for m in members if any(s.precise for s in m.streams)
                ),
            )
        finally:
            lib.halfstep_destroy(handle)

    def _takes_part(self, p):
        """Whether a parameter is, or was, trained: frozen ones have neither gradient nor states."""
        return p.requires_grad or p.grad is not None or p in self.state

    def memory(self) -> Dict[str, int]:
        """Bytes, of all parameters that are not frozen, of the weights, their gradients, the
        residuals and error codes beside weights ("extras"), and the states with their scales, once
        every parameter has been stepped."""
        return self._survey()[0]

    def fell_back(self) -> List[str]:
        """Names of the parameters that are too small for the block format their recipe asks for and
        keep plain states."""
        return self._survey()[1]

    def __repr__(self):
        recipes = []
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                if self._takes_part(p) and self._full_recipe(g, i) not in recipes:
                    recipes.append(self._full_recipe(g, i))
        memory, fallen, precise = self._survey()
        count = sum(
            local(p).numel()
            for group in self.param_groups
            for p in group["params"]
            if self._takes_part(p)
        )
        lines = [
            f"{type(self).__name__} (",
            f"recipe: {', '.join(recipes)}",
            (
                f"memory: {sum(memory.values()) / max(count, 1):.3f} B/param (weights and their"
                f" extras {(memory['weights'] + memory['extras']) / max(count, 1):.3f}, gradients"
                f" {memory['gradients'] / max(count, 1):.3f}, states"
                f" {memory['states'] / max(count, 1):.3f})"
            ),
        ]
        if fallen:
            shown = ", ".join(fallen[:8]) + (
                f" and {len(fallen) - 8} more" if len(fallen) > 8 else ""
            )
            lines.append(f"too small for blocks, plain states: {shown}")
        lines += precise
        for i, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {i}")
            lines += [
                f"    {key}: {group[key]}"
                for key in sorted(group)
                if key not in ("params", "param_names")
            ]
        return "\n".join(lines + [")"])

    # ---- Reading and writing what is stored ------------------------------------------------------

    def _member(self, p):
        """The member of a parameter that has states, once all that was submitted is done.
        Parameters without elements are not in the handle."""
        self._hear()
        engine = self._current(decides=False)
        if p not in engine.index_of or self._stale(
            engine.members[engine.index_of[p]], self.state.get(p)
        ):
            if p not in self.state:
                raise ValueError("halfstep: this parameter has no states yet")
            engine = self._build(decides=False)
        return engine.members[engine.index_of[p]]

    def _slot(self, name):
        rule = _abi.rules[self.rule]
        for i, state in enumerate(rule.states):
            if state.name == name:
                return STATE + i
        raise KeyError(
            f"halfstep: {self.rule} has no state {name!r}; it has"
            f" {', '.join(s.name for s in rule.states)}"
        )

    def _read(self, m, function, *arguments):
        if m.gathered:
            self._engine.gather(m, self.state[m.p])
            if arguments[-1] is not None:  # of a weight
                whole = _devices.contiguous(m.p.full_tensor())
                arguments = (*arguments[:-1], whole.data_ptr())
        with m.states(written=False):
            found = read_rows(function, m.handle, m.index, m.whole, *arguments, rows=m.rows)
        vector = found.shape != m.whole
        if m.gathered:
            m.full = None
            found = found if vector else m.part.take(found).contiguous()
        found = _devices.place(found, m.lies)
        return found if vector or m.part is None else m.part.like_parameter(found)

    @torch.no_grad()
    def read_weight(self, p: torch.Tensor) -> torch.Tensor:
        """The weight in fp32, with its residual or error code."""
        if p not in self.state or p.numel() == 0:
            return p.detach().float().clone() if p.is_floating_point() else p.detach().clone()
        self._notice(p)
        m = self._member(p)
        weight = _devices.place(_devices.contiguous(local(p)), m.device)
        return self._read(m, lib.halfstep_read_slot, WEIGHT, weight.data_ptr())

    @torch.no_grad()
    def read_average(self, p: torch.Tensor) -> torch.Tensor:
        """The weight to evaluate with, in fp32: schedule-free's average; for other rules the weight
        itself."""
        if p not in self.state or p.numel() == 0:
            return self.read_weight(p)
        self._notice(p)
        m = self._member(p)
        weight = _devices.place(_devices.contiguous(local(p)), m.device)
        return self._read(m, lib.halfstep_read_average, weight.data_ptr())

    @torch.no_grad()
    def read_state(self, p: torch.Tensor, name: str) -> torch.Tensor:
        """A state ("exp_avg") decoded to fp32, in the parameter's shape; a vector over its rows or
        columns as such, whole on every rank."""
        slot = self._slot(name)
        if p.numel() == 0:
            return torch.empty(p.shape, dtype=torch.float32, device="cpu")
        return self._read(self._member(p), lib.halfstep_read_slot, slot, None)

    def _write(self, m, slot, data, values):
        if m.gathered:
            values = values.full_tensor() if _sharding.is_dtensor(values) else values
        elif m.part is not None:
            values = m.part.take(values)
        values = _devices.to_cpu(values).to(torch.float32)
        if tuple(values.shape) != m.whole:
            raise ValueError(
                f"halfstep: parameter {m.name!r} has shape {m.whole}, not {tuple(values.shape)}"
            )
        if not m.gathered:
            with m.states():
                write_rows(m.handle, m.index, slot, data, values, m.whole, m.rows)
            return
        weight = _devices.contiguous(m.p.full_tensor()) if slot == WEIGHT else None
        self._engine.gather(m, self.state[m.p])
        write_rows(
            m.handle, m.index, slot, None if weight is None else weight.data_ptr(), values, m.whole
        )
        self._engine.scatter(m, self.state[m.p], weight)

    @torch.no_grad()
    def write_weight(self, p: torch.Tensor, values: torch.Tensor) -> None:
        """Stores fp32 values as the weight, residual or error code included; the counterpart of
        read_weight()."""
        if p.numel() == 0:
            return
        if p not in self.state:
            self._build({p: p.grad})
        m = self._member(p)
        here = local(p)
        weight = _devices.place(_devices.contiguous(here), m.device)
        self._write(m, WEIGHT, weight.data_ptr(), values)
        if not m.gathered and weight.data_ptr() != here.data_ptr():
            here.copy_(weight)
        else:
            increment_versions([p])
        if p in self._engine.guarded:
            self._watch.wrote([p], self._extra_of)

    @torch.no_grad()
    def write_state(self, p: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Stores fp32 values as a state, rounded to nearest."""
        if p.numel() == 0:
            return
        if p not in self.state:
            self._build({p: p.grad})
        self._write(self._member(p), self._slot(name), None, values)

    # ---- Saving ----------------------------------------------------------------------------------

    def _sync(self):
        """Brings `state` and `param_groups` up to date with what the handle alone knows."""
        self._hear()
        engine = self._engine
        if engine is not None and not engine.save_counters(self):
            self._engine = None  # what somebody else has written is read when it is built again
            engine.destroy()
        _state.sync_empty(self)

    @no_dynamo
    def state_dict(self):
        """As torch's. `state` holds tensors only, exactly as they are stored (_layout.py says
        which); `param_groups` the options, the seed, the counts of steps and the names that were
        given with the parameters. All names, those of name_parameters() too, are under
        "param_names", a list for each group. Loads with torch.load(weights_only=True).

        As torch's, it is a view: what `state` holds goes on with the optimizer, all of it; options
        are those of the call. A copy that stays as it is takes copy.deepcopy()."""
        self._notice(decides=False)
        self._sync()
        self._refresh_names()
        for group in self.param_groups:
            _keep_plain(group)
        # torch cannot pack the states of parameters whose group was removed.
        members, kept = {id(p) for group in self.param_groups for p in group["params"]}, self.state
        if any(isinstance(key, _Tensor) and id(key) not in members for key in kept):
            self.state = {
                key: value
                for key, value in kept.items()
                if not isinstance(key, _Tensor) or id(key) in members
            }
        try:
            found = super().state_dict()
        finally:
            self.state = kept
        names = self._all_names()
        if any(map(any, names)):
            found["param_names"] = names
        places = {
            p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])
        }
        if self._pending:
            found["pending"] = [places[p] for p in self._pending if p in places]
        hashes = {places[p]: known for p, known in self._hashes().items() if p in places}
        if hashes:
            found["weight_hashes"] = hashes
        return found

    def _hashes(self):
        """By parameter, the hashes of the weight that its residual belongs to; what is not known is
        left out."""
        found = {
            p: self._watch.hashes_of(p)
            for p in self.state
            if isinstance(p, _Tensor) and self._extra_of(p) is not None
        }
        return {p: hashes for p, hashes in found.items() if hashes is not None}

    def _take_hashes(self, hashes):
        """By parameter, of what was loaded."""
        for p, known in hashes.items():
            extra = self._extra_of(p)
            if extra is not None and isinstance(known, _Tensor) and known.dtype == torch.int64:
                self._watch.bring(p, extra, known.clone())

    @no_dynamo
    def load_state_dict(self, state_dict):
        """Takes back what state_dict() gave, bit for bit; also the states of torch's own optimizers
        of the same rule.

        Hyper-parameters, seed, generator, identities and counters come from the dictionary; the
        formats are those of this optimizer, and where they differ states are converted, with one
        warning. Group keys that are missing keep this optimizer's values.
        """
        _state.load(self, state_dict, super().load_state_dict)
        self._agreed = False  # every rank loads, and maybe not the same
        if self.gradient_release:
            self.prepare_gradient_release()

    def torch_state_dict(self) -> Dict[str, Any]:
        """The state as torch's own optimizer of the same rule saves it: fp32 states, plain
        groups."""
        return _state.plain(self)

    def save_safetensors(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Writes the optimizer to a safetensors file in the layout of halfstep's checkpoints
        (docs/checkpoints.md), whole or not at all. Needs the safetensors package, and named
        parameters to be readable elsewhere."""
        _files.save(self, path)

    def load_safetensors(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Reads what save_safetensors() wrote, or halfstep_write_optimizer() in C, matched by
        parameter names. Weights that the file holds beside the states go into the parameters."""
        _files.load(self, path)

    def __getstate__(self):
        self._notice(decides=False)
        self._sync()
        kept = {
            key: value
            for key, value in self.__dict__.items()
            if key not in _TRANSIENT
            and not (key.startswith("_optimizer_") and key.endswith("_hooks"))
        }
        return {**kept, "_weight_hashes": self._hashes()}

    def __setstate__(self, state):
        # Called for copies with everything, and by load_state_dict() and for old pickles with
        # states and groups alone.
        self.__dict__.setdefault("_engine", None)
        if self._engine is not None:
            self._engine.destroy()
        self._engine = None
        self._flat, self._indices, self._empty = [], [], []
        self._released = set()
        self._watch = Watch(self.__dict__.get("_witness"))
        self.__dict__.setdefault("_release_handles", [])
        self.__dict__.setdefault("_warned", set())
        for key, value in (("_names", {}), ("_roster", []), ("_ids", {}), ("_pending", {})):
            self.__dict__.setdefault(key, value)
        state = {key: value for key, value in state.items() if key not in _TRANSIENT}
        hashes = state.pop("_weight_hashes", {})
        if "state" in state:
            state["state"] = _state.unwrap(state["state"])
        if (
            "defaults" in state
        ):  # older pickles kept it beside the groups, None for what was the default then
            state["defaults"] = {
                "generator": state.pop("generator", None) or _layout.OLD_GENERATOR,
                **state["defaults"],
            }
        super().__setstate__(state)
        for group in self.param_groups:
            self._names.update(zip(group["params"], group.get("param_names") or ()))
            for key, value in (
                *self.defaults.items(),
                ("group_steps", 0),
                ("skipped_steps", 0),
                ("last_norm", 0.0),
            ):
                group.setdefault(key, value)
        self._refresh_names()
        _layout.modernize(self, self.state, self.param_groups)
        if "defaults" not in state:
            _state.check(self)
        self._show_estimates()
        self._take_hashes(hashes)
        if state.get("compile"):
            from . import _compile

            _compile.register(self)
        if state.get("gradient_release"):
            self.prepare_gradient_release()
