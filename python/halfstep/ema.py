"""`EMA`: an average of a model's weights that moves by less than the last place of BF16.

An optimizer of the rule "ema" makes the updates. This file gives it the weights that the averages
follow, and keeps all that it knows in buffers of a module, as torch's AveragedModel does.

This file is longer than 500 lines because torch has the like in two classes, and files of both load
here.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Dict, Iterable, Iterator, Optional, TypeVar, Union

import torch

from ._library import abi, calls
from ._library.abi import SLOT_GRADIENT, invoke, lib
from ._placement.beside import Placement
from ._ranks import agreement
from ._settings.options import seed_of
from ._states import layout
from ._states.convert import recode
from ._states.watch import State
from ._tensors import devices, sharding, torch_private
from ._tensors.parameters import (
    PLAIN,
    check_parameter,
    dense,
    extra_dtype,
    is_packed_format,
    stored_dtype,
    weight_format,
)
from ._tensors.sharding import local
from ._tensors.torch_private import WRAPPERS, no_dynamo
from ._tensors.torch_public import warn
from ._weights8 import blocks
from .optimizer import Optimizer, several

__all__ = ["EMA"]

_Model = TypeVar("_Model", bound=torch.nn.Module)


class _Followed(Placement):
    """Steps averages by the weights that they follow, in place of gradients.

    lives    by average, while an update is made: the weight, its format, and its residual or error
             code or None
    """

    in_grad, lives = False, {}

    def gradient_of(self, p):
        return self.lives[p][0] if p in self.lives else None

    def check_gradient(self, p, grad, name):
        return self.lives[p][1]


class _Averages(Optimizer):
    """Steps averages by the rule "ema". Its states are made of the buffers of an EMA, and never
    saved."""

    rule, _placement, _weights_asked = "ema", _Followed, False


def _dropped(name, why, *_):
    """Returns the warning about the residual of an average that was dropped."""
    if why is not None:
        return f"the residual beside the average {name!r} {why}. It was dropped"
    return (
        f"the average {name!r} was written, but not by update_parameters(). The residual kept"
        " beside it was dropped, because it belonged to the old average"
    )


def _cut(tensor):
    """Returns how a tensor is cut over ranks, or None if it is whole."""
    if not sharding.is_dtensor(tensor):
        return None
    return tensor.device_mesh, tuple(tensor.placements)


def _can_be_averaged(tensor):
    """Returns True if the library can store an average of a tensor."""
    try:
        check_parameter(tensor, "")
    except (TypeError, ValueError):
        return False
    return not sharding.is_packed(tensor)


def _module_at(root, path):
    """Returns the module of a dotted name in a tree of modules, which is made where there is
    none."""
    for part in filter(None, path.split(".")):
        if part not in dict(root.named_children()):
            root.add_module(part, torch.nn.Module())
        root = getattr(root, part)
    return root


def _plant(root, name, tensor, saved=True):
    """Registers a buffer under a dotted name in a tree of modules. `saved`: state dictionaries have
    it."""
    path, _, leaf = name.rpartition(".")
    _module_at(root, path).register_buffer(leaf, tensor, persistent=saved)


class Extras(torch.nn.Module):
    """The residuals and error codes of averages: buffers in a tree of modules, so that they move,
    copy and save like any buffer."""

    def __repr__(self):
        return f"{len(list(self.buffers()))} tensors"


class Shards(Extras):
    """The averages of a model of DTensors, under the names of the model: a tree of modules that
    cannot be called, because FSDP keeps its modules from being copied."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises RuntimeError."""
        raise RuntimeError(
            "halfstep: averages of DTensors cannot be called: evaluate the model inside `with"
            " ema.swapped(model):`, or load ema.module.state_dict() into a model of its own"
        )


def _copied(model):
    """Returns a copy of a model, or Shards if it has DTensors."""
    tensors = [*model.parameters(), *model.buffers()]
    if not any(map(sharding.is_dtensor, tensors)):
        return deepcopy(model)

    def names(found):
        for name, value in found:
            yield ".".join(part for part in name.split(".") if part not in WRAPPERS), value

    root = Shards().train(model.training)
    for name, _ in names(model.named_modules(remove_duplicate=False)):
        _module_at(root, name)
    memo, saved = {}, dict(names(model.state_dict().items()))
    for name, p in names(model.named_parameters(remove_duplicate=False)):
        if id(p) not in memo:
            memo[id(p)] = torch.nn.Parameter(p.detach().clone(), p.requires_grad)
        path, _, leaf = name.rpartition(".")
        _module_at(root, path).register_parameter(leaf, memo[id(p)])
    for name, buffer in names(model.named_buffers(remove_duplicate=False)):
        _plant(root, name, memo.setdefault(id(buffer), buffer.detach().clone()), name in saved)
    return root


def _decode(model):
    """Puts decoded weights in the place of 8-bit weights that train, because averages move by less
    than a code."""
    made = {}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if p.requires_grad and sharding.is_packed(p):
                if id(p) not in made:
                    plain = torch.nn.Parameter(sharding.decoded(p).to(p.dtype))
                    made[id(p)] = p, plain
                setattr(module, name, made[id(p)][1])


class EMA(torch.nn.Module):
    """An exponential moving average of a model, with the interface of
    `torch.optim.swa_utils.AveragedModel`.

        ema = EMA(model, decay=0.9999)
        ...
        optimizer.step()
        ema.update_parameters(model, optimizer)
        ...
        ema(inputs)     # or ema.module, with the averaged weights

    The model is copied at once. The first update takes its weights over. Later updates do average
    += (1 - decay) * (weight - average), in fp32. Rounded to BF16, such a change nearly always
    vanishes, so averages are rounded stochastically here or keep a residual.

    decay        of the average, 0 to 1. May be changed between updates (`ema.decay = 0.9999`). As
                 in AveragedModel it is not part of the state
    weights      how averages of BF16 parameters are stored: "bf16-sr" in 2 bytes, "bf16-ecc8" in 3,
                 "bf16-kahan" or "bf16-ecc16" in 4. float16 averages take the format of the same
                 kind, and float32 averages stay float32. "f32" makes all averages float32, and
                 `module` with them. For BF16 averages of a float32 model give a copy of it in BF16:
                 EMA(deepcopy(model).bfloat16()), then update_parameters(model)
    device       of the copy, as in AveragedModel
    use_buffers  True: buffers are averaged like parameters; False: each update copies them from the
                 model
    debias       True: the weights seen so far count by their age alone, so that the first has no
                 advantage
    scan         "scan": weights are checked before each update, which reads them twice.
                 "known-finite": they are not checked, and an update takes no longer than torch's
                 lerp_. For models whose optimizer has just checked the gradients. May be changed
                 between updates, and is not part of the state
    seed, generator, threads  of the random bits and of the work, as in Optimizer

    Of a model of DTensors each rank averages its parts, with the bits of one process on any number
    of ranks. All ranks make the EMA after the model is sharded, and call update_parameters()
    equally often. `module` then holds the averages and cannot be called; swapped() evaluates them.

    Averages of 8-bit weights are kept in `weights`, too. An update decodes them, 4 bytes a
    parameter, with their error codes if it is given their optimizer.

    Frozen parameters that cannot be averaged (whole numbers, fp8, float64, tensors of quantized
    classes) are copied at each update.

    `n_averaged` counts updates; setting it to zero starts anew. An update from a model with a
    weight that is NaN or infinite is refused (see `scan`): nothing changes, `skipped_updates`
    counts it, and the first one gives a warning. The state_dict() holds tensors only and goes on
    bit for bit. The state_dict() of an AveragedModel loads, too.
    """

    #: names of frozen parameters without an average, such as those of a quantized base
    _copied: frozenset = frozenset()
    #: the optimizer of the averages, or None; and the buffers that it knows
    _optimizer = _known = None
    _warned = False  # True once the warning about a refused update was given
    _divided = False  # True if other ranks have parts of the averages

    def __init__(
        self,
        model: torch.nn.Module,
        decay: float = 0.999,
        weights: str = "bf16-sr",
        device: Any = None,
        use_buffers: bool = False,
        *,
        debias: bool = False,
        scan: str = "scan",
        seed: Optional[int] = None,
        generator: Optional[str] = None,
        threads: int = 0,
    ) -> None:
        torch_private.check_module()
        super().__init__()
        stores = [
            f.name
            for f in abi.formats.values()
            if f.roles & abi.ROLE_WEIGHT and not is_packed_format(f.name)
        ]
        if weights not in stores:
            raise ValueError(f"halfstep: unknown weights={weights!r}; known: {', '.join(stores)}")
        generator = abi.choices("generator")[0] if generator is None else generator
        abi.check_choice("generator", generator)
        self.decay, self.debias, self.use_buffers = decay, debias, use_buffers
        self.scan, self.threads, self._weights = scan, threads, weights
        self._check_options()
        sharding.reshard(model)
        self.module = _copied(model)
        _decode(self.module)
        if device is not None:
            self.module = self.module.to(device)
        if weights == "f32":
            torch_private.apply_to_tensors(
                self.module,
                lambda t: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t,
            )
        self.register_buffer(
            "n_averaged",
            torch.tensor(0, dtype=torch.long, device="cpu" if device is None else device),
        )
        self._copied = frozenset(
            name
            for name, p in self.module.named_parameters()
            if not p.requires_grad and not _can_be_averaged(p)
        )
        formats, ids = [], []
        self.extra = Extras()
        for name, tensor in self._averages():
            check_parameter(tensor, name)
            fmt = weight_format(weights, tensor.dtype, name)
            formats.append(abi.formats[fmt].id)
            # Not the optimizer's id, because an average must not round as the weight that it
            # follows does, or as another average of it.
            ids.append(layout.signed(abi.name_id(f"ema {decay!r} {name}")))
            dtype = extra_dtype(fmt)
            if dtype is not None:
                zeros = devices.zeros(local(tensor).shape, dtype, tensor.device)
                _plant(self.extra, name, sharding.like(tensor, zeros))
        random = [layout.signed(seed_of(seed)), layout.signed(abi.name_id(generator))]
        numbers = {"formats": formats, "ids": ids, "random": random, "counters": [0, 0]}
        for name, values in numbers.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.long, device="cpu"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the averaged model."""
        return self.module(*args, **kwargs)

    def _check_options(self):
        """Raises ValueError or TypeError for an option that is not valid, also later."""
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(
                f"Invalid decay value {self.decay} provided. Please provide a value in [0,1] range."
            )
        abi.check_flags(use_buffers=self.use_buffers, debias=self.debias)
        # "per-tensor" is not allowed, because an average of only some tensors of a model is
        # useless.
        if self.scan not in ("scan", "known-finite"):
            raise ValueError(
                f"halfstep: unknown scan={self.scan!r} of an average; known: scan, known-finite"
            )

    @property
    def skipped_updates(self) -> int:
        """The updates refused so far because a weight was not finite."""
        return int(self.counters[1])

    # ---- What is averaged ------------------------------------------------------------------------

    def _averages(self):
        """Returns (name, tensor) of each average."""
        return [(name, ours) for name, ours, _ in self._pairs(self.module)[0]]

    def _pairs(self, model):
        """Returns (name, ours, the model's) of all averages, and of all other tensors."""
        sharding.reshard(model)
        averages, others = [], []
        for kind in ("parameters", "buffers"):
            ours, theirs = (list(getattr(m, f"named_{kind}")()) for m in (self.module, model))
            if len(theirs) != len(ours):
                raise ValueError(
                    f"halfstep: the model has {len(theirs)} tensors among its {kind}, the EMA has"
                    f" {len(ours)}; make a new EMA"
                )
            for (name, a), (_, b) in zip(ours, theirs):
                if a.shape != b.shape:
                    raise ValueError(
                        f"halfstep: {name!r} has shape {tuple(b.shape)} in the model and"
                        f" {tuple(a.shape)} in the average; make a new EMA"
                    )
                if _cut(a) != _cut(b):
                    raise ValueError(
                        f"halfstep: {name!r} is cut over ranks as {_cut(b)} in the model and as"
                        f" {_cut(a)} in the average; make the EMA of the model as it trains, after"
                        " fully_shard() or parallelize_module()"
                    )
                averaged = self.use_buffers and a.is_floating_point()
                if kind == "parameters":
                    averaged = name not in self._copied
                (averages if averaged else others).append((name, a, b))
        return averages, others

    def _ready(self):
        """Returns (name, format, tensor) of each average, and the parts of the optimizer that steps
        them, which then knows what the buffers say."""
        averages, extras = self._averages(), dict(self.extra.named_buffers())
        formats, ids, random = self.formats.tolist(), self.ids.tolist(), self.random.tolist()
        if not len(averages) == len(formats) == len(ids):
            raise RuntimeError(
                f"halfstep: the EMA was made for {len(formats)} tensors, its module has"
                f" {len(averages)}; make a new EMA"
            )
        formats = [layout.FORMATS[number] for number in formats]
        if self._optimizer is None:
            start = {"lr": 1.0, "beta": 0.0, "debias": 0.0, "weight_decay": 0.0}
            self._optimizer = _Averages(
                [{"params": []}], start, weights=self._weights, seed=random[0]
            )
            self._optimizer._parts.residuals.words = _dropped
        parts, group = self._optimizer._parts, self._optimizer.param_groups[0]
        counts = int(self.n_averaged), int(self.counters[0])
        held = [id(tensor) for _, tensor in averages] + [id(extra) for extra in extras.values()]
        if self._known != (held, ids, random, counts):
            generators = {layout.signed(abi.name_id(n)): n for n in abi.choices("generator")}
            if random[1] not in generators:
                raise ValueError(
                    "halfstep: unknown generator of random bits in a saved EMA; known:"
                    f" {', '.join(generators.values())}"
                )
            group.update(
                params=[tensor for _, tensor in averages],
                seed=random[0],
                generator=generators[random[1]],
            )
            parts.names.given, parts.names.roster = {t: name for name, t in averages}, []
            numbers = dict(zip(("step", *layout.COUNTERS), (*counts[:1] * 3, counts[1])))
            parts.groups.state = {}
            for (name, tensor), fmt, identity in zip(averages, formats, ids):
                numbers.update(id=identity, recipe=layout.pack_recipe("ema/" + fmt))
                state = {key: layout.number(value, key) for key, value in numbers.items()}
                if name in extras:
                    state["weight.extra"] = extras[name]
                parts.groups.state[tensor] = state
            beside = {t: extras[name] for name, t in averages if name in extras}
            parts.residuals.watch.adopt(beside, state=State.LOADED)
            parts.steps.doubt_ranks()
            self._divided = any(sharding.is_divided(tensor) for _, tensor in averages)
            self._known = held, ids, random, counts
        return [(name, fmt, t) for (name, t), fmt in zip(averages, formats)], parts

    @staticmethod
    def _check_average(name, fmt, tensor):
        """Raises ValueError for an average that has another dtype than it was made with, or is
        where nothing is stepped."""
        if tensor.dtype != stored_dtype(fmt):
            raise ValueError(
                f"halfstep: the average of {name!r} was made as {stored_dtype(fmt)} and is"
                f" {tensor.dtype} now; an EMA cannot be cast, make a new one"
            )
        devices.check(sharding.stored(tensor), name)

    @staticmethod
    def _live(name, tensor, average, optimizers):
        """Returns what an average follows: the tensor in memory order on its device, its format,
        and its residual or error code or None."""
        check_parameter(tensor, name)
        owner = next((one for one in optimizers if one._parts.groups.state.get(tensor)), None)
        state = {} if owner is None else owner._parts.groups.state[tensor]
        if sharding.is_packed(tensor):
            tensor = sharding.decoded(tensor) if owner is None else owner.read_weight(tensor)
            state = {}
        extra, whole, tensor = local(state.get("weight.extra")), tensor, local(tensor)
        devices.check_memory(tensor, f"the weight {name!r}")
        fmt, average = PLAIN[tensor.dtype], local(average)
        if extra is not None:
            fmt = (layout.recipe_of(state, name) or f"/{fmt}").split("/")[1]
            wanted = stored_dtype(fmt), extra_dtype(fmt), tensor.shape
            if (tensor.dtype, extra.dtype, extra.shape) != wanted:
                raise ValueError(
                    f"halfstep: the optimizer keeps {extra.dtype} of shape {tuple(extra.shape)}"
                    f" beside {name!r}, which is {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
            extra = devices.place(dense(extra), devices.of(average))
        weight = devices.place(dense(tensor), devices.of(average))
        return sharding.like(whole, weight), fmt, extra

    # ---- Updates ---------------------------------------------------------------------------------

    @no_dynamo
    @torch.no_grad()
    def update_parameters(
        self,
        model: torch.nn.Module,
        optimizer: Union[torch.optim.Optimizer, Iterable[torch.optim.Optimizer], None] = None,
    ) -> None:
        """Moves the averages towards the weights of `model`, which match them in order.

        optimizer: the halfstep optimizer, or several, that trains the model. If it keeps a residual
        or an error code beside a weight, the average follows both parts. Without it the average
        follows the 16-bit weights.
        """
        first = int(self.n_averaged) == 0
        members, parts = self._ready()
        if first:
            parts.residuals.restart()  # everything is written over
        else:
            parts.residuals.notice()
        averages, others = self._pairs(model)
        optimizers = [] if optimizer is None else several(optimizer)
        for one in optimizers:
            one._parts.residuals.notice()
        lives, bad, error = {}, None, None
        try:
            for (name, fmt, average), (_, _, weight) in zip(members, averages):
                self._check_average(name, fmt, average)
                lives[average] = self._live(name, weight, average, optimizers)
            self._check_options()
            bad = next((n for n, _, a in members if not self._is_finite(*lives[a], first)), None)
        except Exception as found:  # which other ranks have to hear of
            error = found
        if not self._everywhere(bad is None and error is None):
            if not self._everywhere(error is None):
                raise error or RuntimeError(
                    "halfstep: another rank cannot update the averages, and says why; no average"
                    " changed"
                )
            self._refuse(bad)
            return
        if self._divided:
            parts.steps.agree({"number of updates": str(int(self.n_averaged))})
        if first:
            self._take_over(parts.groups.state, lives)
        decay = float(self.decay)
        # The rule's beta must stay below 1, so a decay of 1 is a learning rate of 0.
        still = decay == 1.0
        parts.groups[0].update(
            lr=0.0 if still and not first else 1.0,
            beta=0.0 if still else decay,
            debias=float(self.debias),
        )
        parts.options.scan, parts.options.threads = self.scan, self.threads
        parts.placement.lives = lives
        try:
            ready = parts.steps.ready()
            engine = ready.engine
            for m in engine.members:
                extra = lives[m.p][2]
                if extra is not None:
                    address = sharding.address(extra)
                    invoke(lib.halfstep_bind_slot, m.handle, m.index, SLOT_GRADIENT, None, address)
            code, handle = engine.step()
            if code == abi.OK and engine.asynchronous:
                code, handle = engine.hear()  # the counters need the verdict
        finally:
            parts.placement.lives = {}
        if code in (None, abi.NONFINITE):  # None: other ranks refuse it
            self._refuse(code and calls.nonfinite_tensor(handle)[0])
            return
        engine.check(code, handle)
        parts.steps.land(engine, ready.back, ready.stepped)
        for name, ours, theirs in others:
            blend = self.use_buffers and not first and name not in self._copied
            # AveragedModel does this with whole numbers, too.
            theirs = theirs.detach().to(ours.device)
            ours.detach().copy_(ours * self.decay + theirs * (1 - self.decay) if blend else theirs)
        self.n_averaged += 1
        self.counters[0] += 1
        steps, writes = self._known[-1]
        self._known = *self._known[:-1], (steps + 1, writes + 1)

    @staticmethod
    def _take_over(states, lives):
        """Copies the weights for the first update, because w - (w - g) would not be exactly g. The
        rule then adds the residuals."""
        for average, (weight, _, _) in lives.items():
            state, average, weight = states[average], local(average), local(weight)
            most = torch.finfo(average.dtype).max
            # A finite weight must stay finite in a narrower format.
            average.detach().copy_(
                weight.clamp(-most, most) if torch.finfo(weight.dtype).max > most else weight
            )
            if "weight.extra" in state:
                local(state["weight.extra"]).zero_()

    def _is_finite(self, weight, fmt, extra, first):
        """Returns True unless a weight is seen here to be not finite. The library checks the
        weights themselves, but for a first copy."""
        finite = not first or bool(local(weight).isfinite().all())
        if self.scan == "scan" and extra is not None and extra.is_floating_point():
            finite &= math.isfinite(extra.sum(dtype=torch.float32))
        return finite

    def _everywhere(self, value):
        """Returns True if a condition holds on all ranks that have parts of the averages."""
        if not self._divided:
            return value
        groups = self._optimizer._parts.groups
        return agreement.everywhere(groups.settings(), groups.param_groups, value)

    def _refuse(self, name):
        """Counts an update that is refused because of this weight, or of one on another rank for
        None, and warns once."""
        self.counters[1] += 1
        if not self._warned:
            self._warned = True
            warn(
                f"{'a weight on another rank' if name is None else f'the weight {name!r}'} is not"
                " finite; the update was refused and no"
                " average changed. ema.skipped_updates counts such updates. This warning is given"
                " once",
                RuntimeWarning,
            )

    @contextmanager
    def swapped(self, model: _Model) -> Iterator[_Model]:
        """Returns a context in which `model` has the averages, in its own dtypes and on its own
        devices. Afterwards it has its own weights again.

        The weights are neither copied nor written, so that an optimizer keeps the residuals and
        error codes beside them. The memory of DTensors, which FSDP knows, and of 8-bit weights is
        copied instead. It comes back bit for bit, without a write that torch counts. 8-bit weights
        have the averages rounded to nearest. Do not step the optimizer inside, and do not save its
        state.
        """
        averages, _ = self._pairs(model)
        kept = []
        try:
            for _, average, theirs in averages:
                if sharding.is_dtensor(theirs) or sharding.is_packed(theirs):
                    here, values = sharding.stored(theirs).data, local(average).detach()
                    kept.append(here.clone())
                    here.copy_(blocks.pack(values) if sharding.is_packed(theirs) else values)
                else:
                    kept.append(theirs.data)
                    theirs.data = average.detach().to(theirs.device, theirs.dtype)
            yield model
        finally:
            sharding.reshard(model)
            for (_, _, theirs), own in zip(averages, kept):
                if sharding.is_dtensor(theirs) or sharding.is_packed(theirs):
                    sharding.stored(theirs).data.copy_(own)
                else:
                    theirs.data = own

    # ---- Reading and saving ----------------------------------------------------------------------

    @torch.no_grad()
    def _notice(self):
        """Drops the residuals of averages that somebody else has written."""
        if self._optimizer is not None:
            self._ready()[1].residuals.notice()

    def __getstate__(self):
        self._notice()
        return {k: v for k, v in self.__dict__.items() if k not in ("_optimizer", "_known")}

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        self._notice()  # before the parts of this module are asked
        super()._save_to_state_dict(destination, prefix, keep_vars)

    @torch.no_grad()
    def full_state_dict(self) -> Dict[str, Any]:
        """Returns the averages in fp32, with residuals and error codes, under the names of the
        model's own state_dict().

        Buffers that are not averaged are copied as they are.
        """
        members, parts = self._ready()
        found, out = {}, {}
        for name, fmt, average in members:
            self._check_average(name, fmt, average)
            weight = parts.inspection.read_weight(average)
            found[id(average)] = sharding.like(average, devices.to_cpu(local(weight)))
        for key, value in self.module.state_dict(keep_vars=True).items():
            if id(value) in found:
                out[key] = found[id(value)]
            else:
                out[key] = (
                    value.detach().clone() if isinstance(value, torch.Tensor) else deepcopy(value)
                )
        return out

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        for tree in ("module", "extra"):
            for name, own in getattr(self, tree).state_dict(keep_vars=True).items():
                key = f"{prefix}{tree}.{name}"
                value = state_dict.get(key)
                both = isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor)
                if both and value.shape == own.shape:
                    state_dict[key] = sharding.cut_like(own, value, key)
        self._convert(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _convert(self, state_dict, prefix):
        """Converts the averages in a state dictionary to the formats of this EMA. They are those of
        another EMA, or plain tensors of an AveragedModel. Everything else is left for the base
        class to judge."""
        members, _ = self._ready()
        saved, steps = (state_dict.get(prefix + key) for key in ("formats", "n_averaged"))
        foreign = saved is None and steps is not None
        if saved is not None and saved.numel() != len(members):
            return
        numbers = [None] * len(members) if saved is None else saved.tolist()
        keys, changed = {}, {}
        # A shared weight is saved under each of its names.
        for name, value in self.module.state_dict(keep_vars=True).items():
            keys.setdefault(id(value), []).append(f"{prefix}module.{name}")
        for (name, own, average), number in zip(members, numbers):
            extra_key = f"{prefix}extra.{name}"
            value, extra = state_dict.get(f"{prefix}module.{name}"), state_dict.get(extra_key)
            if not isinstance(value, torch.Tensor) or value.shape != average.shape:
                continue
            have = layout.FORMATS.get(number) or PLAIN.get(value.dtype)
            value = local(value)
            if have is None or stored_dtype(have) != value.dtype:
                value, have, extra = value.float(), "f32", None
            dtype = extra_dtype(have)
            if dtype is None:
                extra = None
            elif extra is None or extra.dtype != dtype or local(extra).shape != value.shape:
                continue
            if value.dtype == average.dtype and dtype == extra_dtype(own):
                continue
            changed[have] = own
            value, extra = recode(have, value, local(extra), own)
            value = sharding.like(average, value)
            state_dict.update(dict.fromkeys(keys[id(average)], value))
            if extra is not None:
                state_dict[extra_key] = sharding.like(average, extra)
            else:
                state_dict.pop(extra_key, None)
        if foreign:
            counters = torch.tensor([int(steps), 0], dtype=torch.long, device="cpu")
            own = {"counters": counters, "ids": self.ids, "random": self.random}
            state_dict.update((prefix + key, value) for key, value in own.items())
        if foreign or saved is not None:
            state_dict[prefix + "formats"] = self.formats
        if changed:
            pairs = ", ".join(f"{have} and are kept as {own}" for have, own in changed.items())
            warn(f"averages were saved as {pairs}")

    def extra_repr(self) -> str:
        formats = {layout.FORMATS[i] for i in self.formats.tolist()}
        return f"decay={self.decay}, formats={'+'.join(sorted(formats)) or 'none'}"
