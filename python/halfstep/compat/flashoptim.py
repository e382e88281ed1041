"""FlashOptim's names over halfstep: `from halfstep.compat.flashoptim import FlashAdamW,
cast_model`.

It has every public name and argument of flashoptim 0.1.4, and is therefore longer than 500 lines.
No CUDA device and no Triton are needed. The options mean:

master_weight_bits    24: `bf16-ecc8`, 32: `bf16-ecc16` (`f16-ecc8`, `f16-ecc16`): error codes
                      beside 16-bit parameters, in halfstep's own encoding. 24 bits are rounded
                      stochastically, 32 bits lose nothing. None: plain BF16, rounded to nearest as
                      in FlashOptim, with the same warning: small updates vanish. A group with
                      `"weights": "bf16-sr"` needs no codes and loses nothing on average
quantize              True: `int8` states; vectors and rows below 32 elements keep plain ones.
                      False: float32, as FlashOptim's manual says (its code keeps the parameter's
                      dtype)
compress_state_dict   True: state_dict() holds the 8-bit codes and scales; False: float32 states
                      that torch's optimizers load
check_numerics        NumericsError if lr is too small, by the intended threshold. FlashOptim has a
                      sign wrong and asks for steps 4.16 times as large. Only
                      master_weight_bits=None can lose updates here
fused                 without effect; every step is one call

`initial_lr`, which decouple_lr divides by, is each group's own first lr. The momentum of SGD begins
with (1 - dampening) times the gradient, as in FlashOptim. FlashOptim's checkpoints load, compressed
or not, but without its error bits, which are encoded otherwise. Bring its weights over by
get/set_fp32_model_state_dict().
"""

import math
import os
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Callable, Dict, Iterable, List, Literal, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from .._library import abi
from .._settings.options import Options
from .._states import convert, layout
from .._step import release
from .._tensors import devices, parameters
from .._tensors.torch_public import warn
from ..full_precision import full_precision_state_dict
from ..optimizer import Kept, unwrapped
from ._common import ReleasedByModel, arguments, start_from_zeros

__all__ = [
    "FlashAdam",
    "FlashAdamW",
    "FlashLion",
    "FlashOptimizer",
    "FlashSGD",
    "FlashSGDW",
    "GradientReleaseHandle",
    "NumericsError",
    "cast_model",
    "compute_ecc_bits",
    "enable_gradient_release",
    "reconstruct_fp32_param",
]

_Bits = Optional[Literal[24, 32]]
#: master_weight_bits -> bytes of a weight with its code
_WIDTHS = {None: 0, 24: 3, 32: 4}
_WEIGHTS = {0: "bf16", 3: "bf16-ecc8", 4: "bf16-ecc16"}
#: arguments of FlashOptimizer beside `params` and `defaults`
_COMMON = "lr quantize compress_state_dict master_weight_bits check_numerics fused".split()
_EXPONENTS = {torch.float16: 5, torch.bfloat16: 8, torch.float32: 8}


class NumericsError(RuntimeError):
    """The learning rate is too small to move the largest weight of a tensor, as it is stored."""


class FlashOptimizer(ReleasedByModel):
    """Common base of FlashOptim's classes.

    Args:
        params: parameters or groups; a group may set `quantize`, and halfstep's own `weights` and
            `states`.
        lr: learning rate.
        quantize, compress_state_dict, master_weight_bits, check_numerics, fused: see the module.
        defaults: further options of the groups, from subclasses.
    """

    _decoupled, _decouple_lr = Kept(False), Kept(False)
    #: the smallest update that FlashOptim relies on, in units of lr
    _least_update = 1.0

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: _Bits = 24,
        check_numerics: bool = False,
        fused: bool = True,
        defaults: Optional[Dict[str, Any]] = None,
    ) -> None:
        if self.rule is None:
            raise TypeError(
                "FlashOptimizer is the base of FlashAdam and the others, not an optimizer"
            )
        if master_weight_bits not in _WIDTHS:
            raise ValueError(
                f"unknown master_weight_bits={master_weight_bits}; known: None, 24, 32"
            )
        abi.check_flags(
            quantize=quantize,
            compress_state_dict=compress_state_dict,
            check_numerics=check_numerics,
            fused=fused,
        )
        self._fused, self._check_numerics = fused, check_numerics
        self._compress_state_dict = compress_state_dict
        # id(parameter) -> its largest magnitude when it was last measured
        self._largest: Dict[int, float] = {}
        width = _WIDTHS[master_weight_bits]
        own = {"lr": lr, "master_bytewidth": width, "quantize": quantize}
        super().__init__(params, {**(defaults or {}), **own})
        dtypes = {p.dtype for group in self.param_groups for p in group["params"]}
        if (
            master_weight_bits is not None
            and dtypes == {torch.float32}
            and not os.environ.get("FLASHOPTIM_ALLOW_INEFFECTIVE_MASTER_WEIGHT_BITS")
        ):
            raise ValueError(
                f"master_weight_bits={master_weight_bits} has no effect on float32 parameters,"
                " which already have 32 bits; pass master_weight_bits=None"
            )
        if master_weight_bits is None and dtypes - {torch.float32}:
            warn(
                "master_weight_bits=None rounds 16-bit parameters to nearest, where small updates"
                " vanish; master_weight_bits=24 keeps them"
            )

    # ---- What the options mean to the library ----------------------------------------------------

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group as torch's optimizers do. `initial_lr` defaults to the group's own lr."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("initial_lr", float(group["lr"]))

    class _options(Options):
        def hypers(self, group):
            found = super().hypers(group)
            initial = float(group.get("initial_lr", group["lr"]))
            found["reference_lr"] = initial if self._decouple_lr else 0.0
            return found

        def choices(self, group):
            mode = "fully-decoupled" if self._decouple_lr else "decoupled"
            return {**super().choices(group), "decay": mode if self._decoupled else "l2"}

        def formats(self, group, p):
            weights, states = group.get("weights"), group.get("states")
            return (
                _WEIGHTS[int(group["master_bytewidth"])] if weights is None else weights,
                ("int8" if group["quantize"] else "f32") if states is None else states,
            )

    # ---- Steps -----------------------------------------------------------------------------------

    def step(self, closure: Optional[Callable] = None) -> Any:
        """Updates every parameter that has a gradient. While gradients are released it only warns,
        because nothing is left to do; the closure runs all the same."""
        if self._gradient_release:
            warn(
                "optimizer.step() has nothing to do while enable_gradient_release() is active: the"
                " hooks step"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._check_numerics:
            for g, _, p in self._parts.groups.members():
                if p.grad is not None:
                    self._check_lr(p, self.param_groups[g])
        super().step()
        return loss

    def step_param(self, p: Tensor, group: Optional[Dict[str, Any]] = None) -> None:
        """Updates one parameter from its gradient, if it has one."""
        if p.grad is None or not p.requires_grad:
            return
        if self._hooked_elsewhere:
            release.check_not_scaled()
        if self._check_numerics:
            self._check_lr(p, self._parts.groups.group_of(p) if group is None else group)
        super().step_param(p, group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients as torch's optimizers do. Only warns while gradients are released."""
        if self._gradient_release:
            warn(
                "optimizer.zero_grad() has nothing to do while enable_gradient_release() is active:"
                " the hooks free the gradients"
            )
        super().zero_grad(set_to_none=set_to_none)

    #: True while hooks of the package's own enable_gradient_release() step
    _hooked_elsewhere = False

    @property
    def _gradient_release(self) -> bool:
        return self._hooked_elsewhere or bool(self._parts.release.hooks)

    @_gradient_release.setter
    def _gradient_release(self, released: bool) -> None:
        # The package's enable_gradient_release() and its handle set this.
        self._hooked_elsewhere = bool(released)
        release.watch_scalers()

    # ---- check_numerics --------------------------------------------------------------------------

    @torch.no_grad()
    def _measure(self, p):
        self._largest[id(p)] = float(p.detach().abs().max()) if p.numel() else 0.0

    def recompute_param_stats(self) -> None:
        """Measures the largest magnitude of every parameter, which `check_numerics` uses. By itself
        `check_numerics` measures only before the first step of a parameter and after loading."""
        for p in self._parts.groups.params():
            self._measure(p)

    def _check_lr(self, p, group):
        """Raises NumericsError if a step of lr on the largest weight is below half of its last
        place, less a margin of 2 %.

        FlashOptim adds log2(0.49) to the number of mantissa bits and subtracts the sum, so that it
        asks for 1 / 0.49 places where it means 0.49.
        """
        if id(p) not in self._largest:
            self._measure(p)
        largest, lr = self._largest[id(p)], float(group["lr"])
        if lr == 0.0 or largest == 0.0 or not math.isfinite(largest):
            return
        width = max(p.element_size(), int(group["master_bytewidth"]))
        mantissa = 8 * width - 1 - _EXPONENTS[p.dtype]
        # Subnormals have the last place of the smallest normal numbers.
        exponent = max(math.frexp(largest)[1] - 1, 2 - 2 ** (_EXPONENTS[p.dtype] - 1))
        needed = 0.49 * 2.0 ** (exponent - mantissa)
        least = lr * self._least_update
        if least < needed:
            raise NumericsError(
                f"a learning rate of {lr:.3g} makes steps of about {least:.3g}, but {p.dtype}"
                f" weights of up to {largest:.3g} kept in {8 * width} bits need {needed:.3g} to"
                " change. Raise the learning rate or master_weight_bits, or set"
                " check_numerics=False"
            )

    # ---- State dicts -----------------------------------------------------------------------------

    def state_dict(self) -> Dict[str, Any]:
        """Returns halfstep's state dictionary. With compress_state_dict=False states are decoded to
        float32, under torch's names."""
        found = super().state_dict()
        if self._compress_state_dict:
            return found
        names = {s.name for s in abi.rules[self.rule].states}
        for group, saved in zip(self.param_groups, found["param_groups"]):
            for p, index in zip(group["params"], saved["params"]):
                old = found["state"].get(index) or {}
                recipe = layout.recipe_of(old, str(index))
                if recipe is None:
                    continue
                # All tensors are copied, so that decoded and other tensors are of the same time.
                new = {
                    key: value.clone()
                    for key, value in old.items()
                    if key.partition(".")[0] not in names
                }
                for name in names:
                    if name in old or name + ".codes" in old:
                        new[name] = self.read_state(p, name)
                plain = abi.recipe_full("/".join(recipe.split("/")[:2] + ["f32"]))
                new["recipe"] = layout.number(layout.pack_recipe(plain), "recipe")
                found["state"][index] = new
        return found

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Loads what state_dict() returned, and states of torch's optimizers and of FlashOptim,
        compressed or not."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
        self._largest.clear()

    def __setstate__(self, state):
        super().__setstate__(state)
        self._largest = {}  # its keys are ids of the originals

    # ---- fp32 weights ----------------------------------------------------------------------------

    def _coded(self):
        """Returns the parameters that have an error code or residual, by id."""
        recipe = self._parts.names.recipe
        return {
            id(p): p
            for g, i, p in self._parts.groups.members()
            if p.dtype in _EXPONENTS and abi.formats[recipe(g, i).split("/")[1]].extra_bits
        }

    def get_fp32_model_state_dict(self, model: nn.Module) -> Dict[str, Tensor]:
        """Returns the model's state dictionary in float32, as copies. Parameters are combined with
        their error codes, and everything else is widened."""
        found = full_precision_state_dict(_unwrapped(model), self, lazy=True)
        return {name: value.to(torch.float32, copy=True) for name, value in found.items()}

    @torch.no_grad()
    def set_fp32_model_state_dict(
        self, model: nn.Module, fp32_state_dict: Dict[str, Tensor]
    ) -> None:
        """Reverses get_fp32_model_state_dict(). Parameters take the part that fits their dtype, and
        error codes the rest. Buffers are restored too, which FlashOptim does not. Names that the
        dictionary lacks stay as they are."""
        model = _unwrapped(model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        for name, value in fp32_state_dict.items():
            if name not in parameters and name not in buffers:
                continue
            target = parameters.get(name, buffers.get(name))
            if value.dtype != torch.float32:
                raise ValueError(f"expected float32 values for '{name}', not {value.dtype}")
            if value.shape != target.shape:
                raise ValueError(
                    f"'{name}' has shape {tuple(target.shape)}, not {tuple(value.shape)}"
                )
        coded = self._coded()
        fresh = {p: p.grad for p in coded.values() if p not in self.state}
        if fresh:
            self._parts.cache.build(fresh)
        for name, value in fp32_state_dict.items():
            if name in parameters:
                p = parameters[name]
                if id(p) in coded:
                    self.write_weight(p, value.to(p.device))
                else:
                    p.copy_(value)
                self._largest.pop(id(p), None)
            elif name in buffers:
                buffers[name].copy_(value)


def _common(names):
    """Returns the arguments of FlashOptimizer, from the locals() of a constructor with further
    options. These become its `defaults`."""
    given = arguments(names, "decouple_lr")
    common = {k: given.pop(k) for k in _COMMON}
    return {**common, "defaults": given}


def _unwrapped(model):
    """Returns the model inside DistributedDataParallel or DataParallel, or the model itself."""
    wrapped = any(c.__module__.startswith("torch.nn.parallel") for c in type(model).__mro__)
    return model.module if wrapped else model


class FlashLion(FlashOptimizer):
    """Lion (Chen et al. 2023), decoupled decay.

    Args:
        betas: interpolation of the update, decay rate of the momentum.
        weight_decay: coefficient of the decay, w (1 - lr weight_decay).
        decouple_lr: w (1 - lr / initial_lr weight_decay) instead.

    The others are those of `FlashOptimizer`.
    """

    rule = "lion"
    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        decouple_lr: bool = False,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: _Bits = 24,
        check_numerics: bool = False,
        fused: bool = True,
    ) -> None:
        self._decouple_lr = decouple_lr
        super().__init__(params, **_common(locals()))


class FlashSGD(FlashOptimizer):
    """SGD with momentum and L2 decay. The buffer starts from zeros, so that dampening acts on the
    first gradient too. (torch's first buffer is the gradient.) With dampening `state[p]["step"]` is
    one more than the steps made.

    Args:
        momentum, dampening, nesterov: as in torch.
        weight_decay: coefficient of the L2 term.

    The others are those of `FlashOptimizer`.
    """

    rule = "sgd"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: _Bits = 24,
        check_numerics: bool = False,
        fused: bool = True,
    ) -> None:
        super().__init__(params, **_common(locals()))

    class _options(FlashOptimizer._options):
        def before_build(self, groups, also):
            for group in groups:
                if group["dampening"] and group["momentum"]:
                    start_from_zeros(groups, group["params"], also)


class FlashSGDW(FlashSGD):
    """`FlashSGD` with decoupled decay, w (1 - lr weight_decay); `decouple_lr`: w (1 - lr /
    initial_lr weight_decay)."""

    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        decouple_lr: bool = False,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: _Bits = 24,
        check_numerics: bool = False,
        fused: bool = True,
    ) -> None:
        self._decouple_lr = decouple_lr
        super().__init__(params, **arguments(locals(), "decouple_lr"))


class FlashAdam(FlashOptimizer):
    """Adam with L2 decay.

    Args:
        betas: decay rates of the moments.
        eps: added to the root of the debiased second moment.
        weight_decay: coefficient of the L2 term.

    The others are those of `FlashOptimizer`.
    """

    rule = "adam"
    _least_update = 0.1  # not a bound of Adam's, but FlashOptim's assumption

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: _Bits = 24,
        check_numerics: bool = False,
        fused: bool = True,
    ) -> None:
        super().__init__(params, **_common(locals()))


class FlashAdamW(FlashAdam):
    """AdamW: decay by w (1 - lr weight_decay), or w (1 - lr / initial_lr weight_decay) with
    `decouple_lr`."""

    rule = "adamw"
    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        decouple_lr: bool = False,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: _Bits = 24,
        check_numerics: bool = False,
        fused: bool = True,
    ) -> None:
        self._decouple_lr = decouple_lr
        super().__init__(params, **arguments(locals(), "decouple_lr"))


# ---- Gradient release ----------------------------------------------------------------------------


@dataclass
class GradientReleaseHandle:
    """The result of `enable_gradient_release`."""

    _hooks: list
    _optimizer: FlashOptimizer

    def remove(self) -> None:
        """Removes the hooks, so that steps are ordinary again."""
        if self._hooks:
            self._optimizer._end_release(self._hooks)
            self._hooks.clear()

    @property
    def active(self) -> bool:
        """True while the hooks are there."""
        return bool(self._hooks)


def enable_gradient_release(
    model: nn.Module,
    optimizer: FlashOptimizer,
    *,
    grad_scaler: Optional[Any] = None,
    pre_step: Optional[Callable[[Tensor, Dict[str, Any]], bool]] = None,
) -> GradientReleaseHandle:
    """Steps each parameter in the backward pass, and frees its gradient.

    Args:
        model: its parameters are stepped if the optimizer has them. DistributedDataParallel and
            FullyShardedDataParallel (FSDP1) are refused, because they write gradients after the
            hooks.
        optimizer: its step() and zero_grad() may still be called, and have nothing to do.
        grad_scaler: must be None. Gradients are gone before a scaler could look at all of them.
        pre_step: is called with a parameter and its group. If it returns False, the parameter is
            left alone, and its gradient is dropped.
    """
    optimizer = unwrapped(optimizer)
    if grad_scaler is not None:
        raise NotImplementedError(
            "gradients that are released cannot be unscaled together, so grad_scaler must be None"
        )
    wrapper = next(
        (
            c.__name__
            for c in type(model).__mro__
            if c.__module__.startswith("torch.")
            and c.__name__ in ("DistributedDataParallel", "FullyShardedDataParallel")
        ),
        None,
    )
    if wrapper is not None:
        raise TypeError(
            f"enable_gradient_release() cannot work on a {wrapper} model: it writes gradients after"
            " the hooks"
        )
    # Loading replaces the groups, not their order.
    group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}

    def step(held, p):
        group = held.param_groups[group_of[id(p)]]
        if pre_step is None or pre_step(p, group):
            held.step_param(p, group)
        p.grad = None

    params = [p for p in model.parameters() if p.requires_grad and id(p) in group_of]
    parameters.take_over(params, optimizer, release.OPTIMIZER)
    return GradientReleaseHandle(optimizer._begin_release(params, step), optimizer)


# ---- Casting -------------------------------------------------------------------------------------

_RUNNING = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def _widen(value, dtype):
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_widen(v, dtype) for v in value)
    return value


def cast_model(
    model: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    selective: bool = True,
    full_precision_layers: Optional[List[Union[str, nn.Module]]] = None,
    full_precision_recast_layers: Optional[List[Union[str, nn.Module]]] = None,
) -> None:
    """Casts the floating-point parameters and buffers of a model in place. Tied tensors stay tied.

    Args:
        dtype: the type that they get.
        selective: leaves out normalization with running statistics (batch and instance norm).
        full_precision_layers: modules that stay as they are, or patterns (fnmatch) of their full
            dotted names. Their inputs are cast to float32, and their outputs stay float32.
        full_precision_recast_layers: the same, but outputs are cast to `dtype`.
    """
    kept, recast = list(full_precision_layers or ()), list(full_precision_recast_layers or ())

    def matches(name, module, wanted):
        return any(module is w if isinstance(w, nn.Module) else fnmatch(name, w) for w in wanted)

    wide, hooked = set(), []
    for name, module in model.named_modules():
        again = matches(name, module, recast)
        if again or matches(name, module, kept):
            hooked.append((module, again))
            # A tensor that such a layer shares with others stays wide for both.
            wide.update(id(t) for t in (*module.parameters(), *module.buffers()))
    casts: Dict[int, Tensor] = {}
    for module in model.modules():
        if not (selective and isinstance(module, _RUNNING)):
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            casts.update((id(t), t) for t in own if id(t) not in wide and t.is_floating_point())
    # Tensors over the same memory must stay over the same memory. They are found before any of it
    # is replaced.
    tied: Dict[Any, List[Tensor]] = {}
    for t in casts.values():
        tied.setdefault((t.data_ptr() or id(t), t.shape, t.stride(), t.dtype), []).append(t)
    for tensors in tied.values():
        data = tensors[0].data.to(dtype)
        for t in tensors:
            t.data = data
    for module, again in hooked:
        if getattr(module, "_halfstep_widens", False):
            continue
        module._halfstep_widens = True
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (
                _widen(args, torch.float32),
                {k: _widen(v, torch.float32) for k, v in kwargs.items()},
            ),
            with_kwargs=True,
        )
        if again:
            module.register_forward_hook(lambda _, args, output: _widen(output, dtype))


# ---- Error codes ---------------------------------------------------------------------------------


@contextmanager
def _codec(weight, code):
    """Yields a codec of weights like this one with error codes of this type."""
    if weight.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"only bfloat16 and float16 parameters have error codes, not {weight.dtype}"
        )
    form = "bf16" if weight.dtype == torch.bfloat16 else "f16"
    recipe = f"sgd/{form}-ecc{torch.iinfo(code).bits}"
    codec = convert.Codec(recipe, {}, tuple(weight.shape), "param")
    try:
        yield codec
    finally:
        codec.close()


@torch.no_grad()
def reconstruct_fp32_param(param: Tensor, error_bits: Tensor) -> Tensor:
    """Returns the float32 value of a 16-bit parameter and its error code.

    The code is `state[p]["weight.extra"]`, in halfstep's encoding: int8 with master_weight_bits=24,
    int16 with 32. FlashOptim's own codes mean something else."""
    if error_bits.dtype not in (torch.int8, torch.int16):
        raise ValueError(f"error_bits must be int8 or int16, not {error_bits.dtype}")
    if error_bits.shape != param.shape:
        raise ValueError(
            f"error_bits have shape {tuple(error_bits.shape)}, the parameter {tuple(param.shape)}"
        )
    with _codec(param, error_bits.dtype) as codec:
        weight, codes = devices.contiguous(param), devices.contiguous(error_bits)
        codec.bind({"weight.extra": codes})
        return codec.read(0, weight.data_ptr())


@torch.no_grad()
def compute_ecc_bits(fp32_param: Tensor, narrow_param: Tensor, master_bytewidth: int = 4) -> Tensor:
    """Returns the error codes that bring `narrow_param` back to `fp32_param`, as near as they can.

    `narrow_param` is `fp32_param`, rounded. Codes are int8 for 3 bytes and int16 for 4. This is the
    inverse of reconstruct_fp32_param()."""
    if fp32_param.dtype != torch.float32:
        raise ValueError(f"fp32_param must be float32, not {fp32_param.dtype}")
    if fp32_param.shape != narrow_param.shape:
        raise ValueError(
            f"fp32_param has shape {tuple(fp32_param.shape)}, narrow_param"
            f" {tuple(narrow_param.shape)}"
        )
    if master_bytewidth not in (3, 4):
        raise ValueError(f"master_bytewidth={master_bytewidth} is neither 3 nor 4")
    code = torch.int8 if master_bytewidth == 3 else torch.int16
    with _codec(narrow_param, code) as codec:
        codes = torch.zeros(narrow_param.shape, dtype=code, device="cpu")
        weight = torch.empty(narrow_param.shape, dtype=narrow_param.dtype, device="cpu")
        codec.bind({"weight.extra": codes})
        codec.write(0, devices.contiguous(fp32_param), weight.data_ptr())
    # The library rounds ties away from zero. Where the given weight was rounded otherwise, the code
    # goes as far as it can.
    mine, given = (
        devices.contiguous(w).view(torch.int16).to(torch.int32) & 0x7FFF
        for w in (weight, narrow_param)
    )
    limits = torch.iinfo(code)
    codes[given < mine] = limits.max
    codes[given > mine] = limits.min
    return codes
