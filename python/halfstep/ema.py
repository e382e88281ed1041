"""`EMA`: an average of a model's weights that moves by less than the last place of BF16.

This file is longer than 500 lines because torch has the like in two classes, and files of both load
here.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from copy import deepcopy
from ctypes import c_void_p
from typing import Any, Dict, Iterable, Iterator, Optional, TypeVar, Union

import torch

from ._library import abi, calls
from ._library.abi import SLOT_GRADIENT, SLOT_WEIGHT, check, invoke, lib
from ._states import layout
from ._states.bits import clear_rows
from ._states.convert import Codec
from ._states.handles import Handle, seed_of
from ._states.watch import State, Watch
from ._tensors import devices, sharding, torch_private
from ._tensors.parameters import (
    DTYPES,
    PLAIN,
    check_parameter,
    dense,
    is_ordinary,
    is_packed_format,
    stored_dtype,
    weight_format,
)
from ._tensors.torch_private import no_dynamo
from ._tensors.torch_public import increment_versions, warn
from .optimizer import several

__all__ = ["EMA"]

_Model = TypeVar("_Model", bound=torch.nn.Module)

#: dtypes of a weight and of the residual or error code beside it -> their format
_WITH_EXTRA = {
    (DTYPES[f.code_dtype], DTYPES[f.extra_dtype]): f.name
    for f in abi.formats.values()
    if f.roles & abi.ROLE_WEIGHT and f.extra_bits
}
#: advice for a sharded model
_WHOLE = (
    "make the EMA of a whole copy of the model, and load into a second copy what"
    " get_model_state_dict(full_state_dict=True) gives"
)
#: advice for a model of 8-bit weights
_DECODED = (
    "make the EMA of a copy in 16 bits, and before each update load into this copy what"
    " halfstep.full_precision_state_dict(model, optimizer) gives"
)


def _extra_dtype(fmt):
    """Returns the dtype of the residual or error code that a format keeps beside each weight, or
    None."""
    info = abi.formats[fmt]
    return DTYPES[info.extra_dtype] if info.extra_bits else None


def _in_order(tensor, device):
    """Returns the tensor itself if it is on the device in memory order, else such a copy."""
    return devices.place(dense(tensor), device)


class _Handle:
    """What an EMA knows of its averages in this process: their C handle, and who wrote them. It
    belongs to one object, so that copies and pickles leave it out."""

    def __init__(self):
        self.handle, self.key, self.watch = None, None, Watch()

    def build(self, members, live, random, generator, threads, device):
        """Makes the C handle. `members` holds (name, id, format, shape) of each average, `live` the
        formats of the weights that they follow. `device` is that of the averages."""
        self.handle = handle = Handle(threads, random, device)
        handle.set(generator=generator)
        unbound = None
        for (name, identity, fmt, shape), followed in zip(members, live):
            index = handle.add("ema/" + fmt, name, identity & (2**64 - 1), shape, followed)
            if _extra_dtype(fmt) is None:  # bound below, to nothing
                unbound = index
        if unbound is not None:
            invoke(lib.halfstep_bind_slot, handle, unbound, SLOT_WEIGHT, None, None)
        n = max(len(members), 1)
        self.weights, self.gradients = (c_void_p * n)(), (c_void_p * n)()
        self.bound, self.steps = {}, None

    def bind(self, index, slot, tensor):
        """Gives the library the address of residuals or error codes if it has changed."""
        address = sharding.address(tensor)
        if self.bound.get((index, slot)) != address:
            invoke(lib.halfstep_bind_slot, self.handle, index, slot, None, address)
            self.bound[index, slot] = address

    def count(self, n, steps, writes):
        """Sets the counters of all averages, unless they have these values."""
        if self.steps != (steps, writes):
            for index in range(n):
                self.handle.count(index, state_steps=steps, full_steps=steps, writes=writes)
            self.steps = (steps, writes)


def _codec(fmt, weight, extra):
    """Returns a codec for an average with this residual or error code."""
    codec = Codec("ema/" + fmt, {}, tuple(weight.shape), "average")
    codec.bind({"weight.extra": extra})
    return codec


def _decode(fmt, weight, extra):
    """Returns an average in fp32, with its residual or error code."""
    weight, extra = devices.to_cpu(weight), None if extra is None else devices.to_cpu(extra)
    if weight.numel() == 0:
        return weight.float()
    return _codec(fmt, weight, extra).read(SLOT_WEIGHT, weight.data_ptr())


def _encode(fmt, values):
    """Returns fp32 values as (weight, residual or error code or None), rounded to nearest."""
    weight = torch.empty(values.shape, dtype=stored_dtype(fmt), device="cpu")
    dtype = _extra_dtype(fmt)
    extra = None if dtype is None else devices.zeros(values.shape, dtype)
    if values.numel():
        _codec(fmt, weight, extra).write(SLOT_WEIGHT, values, weight.data_ptr())
    return weight, extra


def _plant(root, name, tensor):
    """Registers a buffer under a dotted name in a tree of modules, so that it moves, copies and
    saves like any buffer."""
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, torch.nn.Module())
        root = getattr(root, part)
    root.register_buffer(leaf, tensor)


def _find(root, name):
    for part in name.split("."):
        root = getattr(root, part, None)
    return root


def _trains(p):
    return p.requires_grad


def _can_be_averaged(tensor):
    if sharding.is_packed(tensor):
        return False
    try:
        check_parameter(tensor, "")
    except (TypeError, ValueError):
        return False
    return True


def _check_shapes(what, theirs, ours):
    if theirs.shape != ours.shape:
        raise ValueError(
            f"halfstep: {what} has shape {tuple(theirs.shape)} in the model and"
            f" {tuple(ours.shape)} in the average; make a new EMA"
        )


def _paired(what, theirs, ours):
    """Returns (name, ours, the model's) of each pair of tensors. Fails if the model has more or
    fewer of them."""
    theirs, ours = list(theirs), list(ours)
    if len(theirs) != len(ours):
        raise ValueError(
            f"halfstep: the model has {len(theirs)} {what}, the EMA has {len(ours)}; make a new EMA"
        )
    return [(name, a, b) for (name, a), (_, b) in zip(ours, theirs)]


class Extras(torch.nn.Module):
    """The root of the tree that _plant() makes."""

    def __repr__(self):
        return f"{len(list(self.buffers()))} tensors"


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
    device       of the copy, as in AveragedModel. All averages have to be on one device
    use_buffers  True: buffers are averaged like parameters; False: each update copies them from the
                 model
    debias       True: the weights seen so far count by their age alone, so that the first has no
                 advantage
    scan         "scan": weights are checked before each update, which reads them twice.
                 "known-finite": they are not checked, and an update takes no longer than torch's
                 lerp_. For models whose optimizer has just checked the gradients. May be changed
                 between updates, and is not part of the state
    seed, generator, threads  of the random bits and of the work, as in Optimizer

    Frozen parameters that cannot be averaged (whole numbers, fp8, float64, tensors of quantized
    classes) are copied at each update.

    `n_averaged` counts updates; setting it to zero starts anew. An update from a model with a
    weight that is NaN or infinite is refused (see `scan`): nothing changes, `skipped_updates`
    counts it, and the first one gives a warning. The state_dict() holds tensors only and goes on
    bit for bit. The state_dict() of an AveragedModel loads, too.
    """

    _copied: frozenset = frozenset()  # for pickles that lack it
    _dropped = False  # True once the warning about a dropped residual was given

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
        self.scan, self.threads = scan, threads
        self._check_options()
        self._handle = _Handle()
        self._warned = False
        sharding.refuse(model.parameters(), "an EMA", _WHOLE)
        sharding.refuse_packed(filter(_trains, model.parameters()), "EMA", _DECODED)
        self.module = deepcopy(model)
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
        #: names of frozen parameters without an average, such as those of a quantized base; each
        #: update copies them
        self._copied = {
            name
            for name, p in self.module.named_parameters()
            if not p.requires_grad and not _can_be_averaged(p)
        }
        names, formats = [], []
        self.extra = Extras()
        for name, tensor in self._averages():
            check_parameter(tensor, name)
            fmt = weight_format(weights, tensor.dtype, name)
            names.append(name)
            formats.append(abi.formats[fmt].id)
            if _extra_dtype(fmt) is not None:
                _plant(
                    self.extra,
                    name,
                    devices.zeros(tensor.shape, _extra_dtype(fmt), tensor.device),
                )
        # These are not the optimizer's ids, because an average must not round as the weight that it
        # follows does, or as another average of it.
        ids = [layout.signed(abi.name_id(f"ema {decay!r} {name}")) for name in names]
        random = [layout.signed(seed_of(seed)), layout.signed(abi.name_id(generator))]
        numbers = {"formats": formats, "ids": ids, "random": random, "counters": [0, 0]}
        for name, values in numbers.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.long, device="cpu"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the averaged model."""
        return self.module(*args, **kwargs)

    def _check_options(self):
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

    @staticmethod
    def _tensors_of(module, use_buffers):
        """Yields (name, tensor) of all parameters and, if `use_buffers`, of the floating-point
        buffers."""
        yield from module.named_parameters()
        if use_buffers:
            for name, buffer in module.named_buffers():
                if buffer.is_floating_point():
                    yield name, buffer

    def _averages(self):
        return (
            (name, tensor)
            for name, tensor in self._tensors_of(self.module, self.use_buffers)
            if name not in self._copied
        )

    def _generator(self):
        wanted = int(self.random[1])
        for name in abi.choices("generator"):
            if layout.signed(abi.name_id(name)) == wanted:
                return name
        raise ValueError(
            "halfstep: unknown generator of random bits in a saved EMA; known:"
            f" {', '.join(abi.choices('generator'))}"
        )

    def _members(self):
        """Returns (name, id, format, tensor) of each average."""
        averages = list(self._averages())
        formats, ids = self.formats.tolist(), self.ids.tolist()
        if not len(averages) == len(formats) == len(ids):
            raise RuntimeError(
                f"halfstep: the EMA was made for {len(formats)} tensors, its module has"
                f" {len(averages)}; make a new EMA"
            )
        return [
            (name, identity, layout.FORMATS[number], tensor)
            for (name, tensor), identity, number in zip(averages, ids, formats)
        ]

    @staticmethod
    def _check_average(name, fmt, tensor, device):
        dtype = stored_dtype(fmt)
        if tensor.dtype != dtype:
            raise ValueError(
                f"halfstep: the average of {name!r} was made as {dtype} and is {tensor.dtype} now;"
                " an EMA cannot be cast, make a new one"
            )
        devices.check(tensor, name)
        if devices.of(tensor) != device:
            raise ValueError(
                f"halfstep: the average of {name!r} is on {devices.of(tensor)}, others are on"
                f" {device}; an EMA keeps all of its averages on one device: make one EMA for each"
                " part of such a model"
            )

    @staticmethod
    def _live(name, tensor, average, states_of_optimizers):
        """Returns what an average follows: the tensor in memory order, its format, and its residual
        or error code or None."""
        if not is_ordinary(tensor):
            sharding.refuse_packed((tensor,), "EMA", _DECODED)
            check_parameter(tensor, name)
        devices.check_memory(tensor, f"the weight {name!r}")
        _check_shapes(repr(name), tensor, average)
        found = (states.get(tensor) for states in states_of_optimizers)
        extra = next(filter(None, found), {}).get("weight.extra")
        sharding.refuse((tensor,), "an EMA", _WHOLE)
        plain = _in_order(tensor, devices.of(average))
        if extra is None:
            return plain, PLAIN[tensor.dtype], None
        fmt = _WITH_EXTRA.get((tensor.dtype, extra.dtype))
        if fmt is None or extra.shape != tensor.shape:
            raise ValueError(
                f"halfstep: the optimizer keeps {extra.dtype} of shape {tuple(extra.shape)} beside"
                f" {name!r}, which is {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        return plain, fmt, _in_order(extra, devices.of(average))

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
        if not first:
            self._notice()
        members = self._members()
        pairs = _paired(
            "tensors to average",
            self._tensors_of(model, self.use_buffers),
            self._tensors_of(self.module, self.use_buffers),
        )
        frozen = [(a, b) for name, a, b in pairs if name in self._copied]
        followed = [b for name, _, b in pairs if name not in self._copied]
        for name, a, b in pairs:
            if name in self._copied:
                _check_shapes(repr(name), b, a)
        optimizers = [] if optimizer is None else several(optimizer)
        for one in optimizers:
            one._parts.residuals.notice()
        states = [one._parts.groups.state for one in optimizers]
        lives = []
        for (name, _, fmt, average), tensor in zip(members, followed):
            self._check_average(name, fmt, average, devices.of(members[0][3]))
            lives.append(self._live(name, tensor, average, states))
        others = self._other_buffers(model)
        for (name, _, _, _), (_, _, extra) in zip(members, lives) if self.scan == "scan" else ():
            # The library checks the weights themselves.
            residual = extra is not None and extra.is_floating_point()
            if residual and not math.isfinite(extra.sum(dtype=torch.float32)):
                self._refuse(name)
                return
        held = self._ready(members, [live[1] for live in lives])
        handle = held.handle
        if first:
            held.watch = Watch()  # everything is written over
            refused = self._take_over(members, lives)
            if refused is not None:
                self._refuse(refused)
                return
        back = []
        for index, ((name, _, fmt, average), (live, _, extra)) in enumerate(zip(members, lives)):
            if not devices.is_plain(average):
                back.append((average, devices.contiguous(average)))
                average = back[-1][1]
            held.weights[index] = sharding.address(average)
            held.gradients[index] = sharding.address(live)
            if extra is not None:
                held.bind(index, SLOT_GRADIENT, extra)
            if _extra_dtype(fmt) is not None:
                held.bind(index, SLOT_WEIGHT, _find(self.extra, name))
        code = lib.halfstep_step(handle, held.weights, held.gradients)
        if code == abi.OK and devices.is_asynchronous(handle.device):
            code = lib.halfstep_synchronize(handle)  # the counters need the verdict
        if code == abi.NONFINITE:
            self._refuse(calls.nonfinite_tensor(handle)[0])
            return
        check(code, handle)
        for average, copy in back:
            average.copy_(copy)
        increment_versions([member[3] for member in members])
        extras = self._extras()
        held.watch.keep(extras)
        held.watch.wrote(list(extras), extras.get)
        self._follow_buffers(others, first)
        for mine, theirs in frozen:
            mine.detach().copy_(theirs)
        self.n_averaged += 1
        self.counters[0] += 1
        held.steps = (held.steps[0] + 1, held.steps[1] + 1)

    @contextmanager
    def swapped(self, model: _Model) -> Iterator[_Model]:
        """Returns a context in which `model` has the averages, in its own dtypes and on its own
        devices. Afterwards it has its own weights again.

        The weights are neither copied nor written, so that an optimizer keeps the residuals and
        error codes beside them. Do not step the optimizer inside, and do not save its state.
        """
        pairs = _paired(
            "tensors to average",
            self._tensors_of(model, self.use_buffers),
            self._tensors_of(self.module, self.use_buffers),
        )
        for name, average, theirs in pairs:
            _check_shapes(repr(name), theirs, average)
        kept = [theirs.data for _, _, theirs in pairs]
        try:
            for _, average, theirs in pairs:
                theirs.data = average.detach().to(theirs.device, theirs.dtype)
            yield model
        finally:
            for (_, _, theirs), own in zip(pairs, kept):
                theirs.data = own

    def _ready(self, members, formats):
        """Returns the C handle for these averages and for the formats of the weights that they
        follow. Gives it everything that may have changed."""
        held = self._handle
        device = devices.of(members[0][3]) if members else torch.device("cpu")
        members = [
            (name, identity, fmt, tuple(tensor.shape)) for name, identity, fmt, tensor in members
        ]
        key = members, formats, self.random.tolist(), device
        threads = self.threads or torch.get_num_threads()
        if held.key != key:
            held.key = None  # until the build has succeeded
            held.build(members, formats, key[2][0], self._generator(), threads, device)
            held.key = key
        held.handle.work(threads)
        steps = int(self.n_averaged)
        held.count(len(members), steps, int(self.counters[0]))
        self._check_options()
        decay = float(self.decay)
        # The rule's decay must stay below 1, so a decay of 1 is a learning rate of 0.
        held.handle.set(
            scan=self.scan,
            lr=0.0 if decay == 1.0 and steps else 1.0,
            beta=0.0 if decay == 1.0 else decay,
            debias=float(bool(self.debias)),
        )
        return held

    def _take_over(self, members, lives):
        """Copies the weights for the first update, because w - (w - g) would not be exactly g. The
        rule then adds the residuals. If a weight is not finite, copies nothing and returns its
        name."""
        for (name, _, _, _), (live, _, _) in zip(members, lives):
            if not bool(torch.isfinite(live).all()):
                return name
        for (name, _, _, average), (live, _, _) in zip(members, lives):
            most = torch.finfo(average.dtype).max
            # A finite weight must stay finite in a narrower format.
            average.detach().copy_(
                live.clamp(-most, most) if torch.finfo(live.dtype).max > most else live
            )
            extra = _find(self.extra, name)
            if extra is not None:
                extra.zero_()
        return None

    def _refuse(self, name):
        self.counters[1] += 1
        if not self._warned:
            self._warned = True
            warn(
                f"the weight {name!r} is not finite; the update was refused and no"
                " average changed. ema.skipped_updates counts such updates. This warning is given"
                " once",
                RuntimeWarning,
            )

    def _other_buffers(self, model):
        """Returns (ours, the model's) for each pair of buffers that the rule does not see."""
        pairs = []
        for name, a, b in _paired("buffers", model.named_buffers(), self.module.named_buffers()):
            if not self.use_buffers or not a.is_floating_point():
                _check_shapes(f"the buffer {name!r}", b, a)
                pairs.append((a, b))
        return pairs

    def _follow_buffers(self, pairs, first):
        for ours, theirs in pairs:
            theirs = theirs.detach().to(ours.device)
            # AveragedModel does this with whole numbers, too.
            ours.detach().copy_(
                theirs
                if first or not self.use_buffers
                else ours * self.decay + theirs * (1 - self.decay)
            )

    # ---- Residuals of averages that others write -------------------------------------------------

    def _extras(self):
        """Returns the residual or error code beside each average that has one."""
        found = ((average, _find(self.extra, name)) for name, average in self._averages())
        return {average: extra for average, extra in found if extra is not None}

    @torch.no_grad()
    def _notice(self):
        """Drops the residuals of averages that somebody else has written since
        update_parameters()."""
        watch = self._handle.watch
        if not watch:
            return
        extras = self._extras()
        watch.adopt(extras, state=State.LOADED)
        for average, rows, _ in watch.strangers(extras.get):
            if average not in extras:
                continue
            clear_rows(extras[average], rows)
            watch.wrote([average], extras.get)
            if not self._dropped:
                self._dropped = True
                name = next(name for name, other in self._averages() if other is average)
                warn(
                    f"the average {name!r} was written, but not by update_parameters()."
                    " The residual kept beside it was dropped, because it belonged to the old"
                    " average. This warning is given once"
                )

    # ---- Reading and saving ----------------------------------------------------------------------

    def __getstate__(self):
        self._notice()
        return {key: value for key, value in self.__dict__.items() if key != "_handle"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._handle = _Handle()

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        self._notice()  # before the parts of this module are asked
        super()._save_to_state_dict(destination, prefix, keep_vars)

    @torch.no_grad()
    def full_state_dict(self) -> Dict[str, Any]:
        """Returns the averages in fp32, with residuals and error codes, under the names of the
        model's own state_dict().

        Buffers that are not averaged are copied as they are.
        """
        self._notice()
        found = {}
        for name, _, fmt, average in self._members():
            self._check_average(name, fmt, average, devices.of(average))
            found[id(average)] = _decode(fmt, average, _find(self.extra, name))
        out = {}
        for key, value in self.module.state_dict(keep_vars=True).items():
            if id(value) in found:
                out[key] = found[id(value)]
            else:
                out[key] = (
                    value.detach().clone() if isinstance(value, torch.Tensor) else deepcopy(value)
                )
        return out

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        self._convert(state_dict, prefix)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _convert(self, state_dict, prefix):
        """Converts the averages in a state dictionary to the formats of this EMA. They are those of
        another EMA, or plain tensors of an AveragedModel. Everything else is left for the base
        class to judge."""
        averages = list(self._averages())
        saved = state_dict.get(prefix + "formats")
        foreign = saved is None and prefix + "n_averaged" in state_dict
        if saved is not None and saved.numel() != len(averages):
            return
        numbers = [None] * len(averages) if saved is None else saved.tolist()
        keys, changed = {}, {}
        # A shared weight is saved under each of its names.
        for name, value in self.module.state_dict(keep_vars=True).items():
            keys.setdefault(id(value), []).append(f"{prefix}module.{name}")
        for (name, average), own, number in zip(averages, self.formats.tolist(), numbers):
            key, extra_key = f"{prefix}module.{name}", f"{prefix}extra.{name}"
            value, extra = state_dict.get(key), state_dict.get(extra_key)
            if not isinstance(value, torch.Tensor) or value.shape != average.shape:
                continue
            own, have = layout.FORMATS[own], layout.FORMATS.get(number) or PLAIN.get(value.dtype)
            if have is None or stored_dtype(have) != value.dtype:
                value, have, extra = value.float(), "f32", None
            if _extra_dtype(have) is None:
                extra = None
            elif extra is None or extra.dtype != _extra_dtype(have) or extra.shape != value.shape:
                continue
            alike = value.dtype == average.dtype and _extra_dtype(have) == _extra_dtype(own)
            if not alike:
                changed[have] = own
                value, extra = _encode(own, _decode(have, value, extra))
                state_dict.update(dict.fromkeys(keys[id(average)], value))
                if extra is not None:
                    state_dict[extra_key] = extra
                else:
                    state_dict.pop(extra_key, None)
        if foreign:
            steps = state_dict[prefix + "n_averaged"]
            state_dict[prefix + "counters"] = torch.tensor(
                [int(steps), 0], dtype=torch.long, device="cpu"
            )
            state_dict[prefix + "ids"], state_dict[prefix + "random"] = self.ids, self.random
        if foreign or saved is not None:
            state_dict[prefix + "formats"] = self.formats
        if changed:
            pairs = ", ".join(f"{have} and are kept as {own}" for have, own in changed.items())
            warn(f"averages were saved as {pairs}")

    def extra_repr(self) -> str:
        formats = {layout.FORMATS[i] for i in self.formats.tolist()}
        return f"decay={self.decay}, formats={'+'.join(sorted(formats)) or 'none'}"
