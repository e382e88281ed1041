"""optimi's names over halfstep: `from halfstep.compat.optimi import AdamW,
prepare_for_gradient_release`.

It has every class, function and argument of torch-optimi 0.3.3. As there, BF16 and float16
parameters have a Kahan residual by default (`kahan_sum`); `Adan`'s default is False, as there.
States beside BF16 parameters are `bf16-sr`, which follow a falling second moment; optimi's plain
BF16 cannot. `foreach` and `triton` are hints without effect. A group may also have halfstep's own
options, such as `{"params": ..., "states": "int8"}`.

Differences to optimi:

* The decay of 16-bit parameters is part of the compensated change.
* `max_lr` defaults to each group's own lr, and `adam_wd` is honoured.
* Steps are counted per parameter.
* Gradients are never written. A gradient that is not finite changes nothing.
* A micro-step that would drop a gradient is refused (SGD without momentum, L2 decay).
* Per-parameter states are torch's raw moments, not debiased ones. `load_state_dict` also takes
  optimi's own state dictionaries and converts them.

The lower-case functions step the caller's tensors in place, states included. These states are
optimi's: debiased moments, and the negated previous gradient. See `adam`.

This file is longer than 500 lines because it has every signature of the package.
"""

from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple, Type, Union

import torch
from torch import Tensor, nn

from .._library import abi
from .._settings import naming
from .._settings.options import Options
from .._states import layout
from .._tensors import devices
from .._tensors.parameters import PLAIN, holds
from .._tensors.torch_private import apply_to_tensors, gradient_hooks
from .._tensors.torch_public import warn
from ..optimizer import unwrapped
from ._common import ReleasedByModel, arguments, start_from_zeros
from ._optimi_lists import LOW, adam, adamw, adan, lion, over, radam, ranger, sgd, stableadamw

__all__ = [
    "Adam",
    "AdamW",
    "Adan",
    "Lion",
    "OptimiOptimizer",
    "RAdam",
    "Ranger",
    "SGD",
    "StableAdamW",
    "adam",
    "adamw",
    "adan",
    "lion",
    "param_groups_weight_decay",
    "prepare_for_gradient_release",
    "radam",
    "ranger",
    "remove_gradient_release",
    "sgd",
    "stableadamw",
    "to_low_precision",
]

# ---- Classes -------------------------------------------------------------------------------------


class OptimiOptimizer(ReleasedByModel):
    """Common base of optimi's classes: decay modes, Kahan summation, `step(param=...)`, gradient
    release.

    `optimizer_accumulation = True` makes the steps of gradient release micro-steps until it is
    False again. They put gradients into the states and do not change the parameters.
    """

    def __init__(self, params: Iterable[Any], defaults: Dict[str, Any]) -> None:
        if defaults.get("max_lr") is not None and not 0.0 <= defaults["max_lr"]:
            raise ValueError(f"Invalid maximum learning rate: max_lr={defaults['max_lr']}")
        # prepare_for_gradient_release() makes the hooks.
        super().__init__(params, defaults)
        high = [
            g["weight_decay"]
            for g in self.param_groups
            if g["decouple_lr"] and g["weight_decay"] >= 1e-3
        ]
        if high:
            warn(
                f"weight_decay={max(high)} is high for decouple_lr=True: fully decoupled decay"
                " takes this part of the weight at every step, not this times lr"
            )

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group as torch's optimizers do. With fully decoupled decay and no `max_lr`, the
        group's lr becomes `max_lr`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["decouple_lr"] and group["max_lr"] is None:
            group["max_lr"] = float(group["lr"])

    class _options(Options):
        def hypers(self, group):
            found = super().hypers(group)
            found["reference_lr"] = float(group["max_lr"] or 0.0) if group["decouple_lr"] else 0.0
            return found

        def choices(self, group):
            mode = "decoupled" if group.get("decouple_wd", True) else "l2"
            mode = "fully-decoupled" if group["decouple_lr"] else mode
            return {**super().choices(group), "decay": mode}

        def formats(self, group, p):
            weights, states = super().formats(group, p)
            if weights is None:
                summed = group["kahan_sum"] is None or group["kahan_sum"]
                weights = "bf16-kahan" if summed else "bf16"
            return weights, states

    def step(self, closure: Optional[Callable] = None, param: Optional[Tensor] = None) -> Any:
        """Makes a step of all parameters, or of `param` alone, as the hooks of gradient release do.

        Args:
            closure: computes the loss again and returns it; not together with `param`.
            param: the one parameter to step.
        """
        if param is None:
            return super().step(closure)
        self.step_param(param)
        return None

    def zero_grad(self, set_to_none: bool = True, param: Optional[Tensor] = None) -> None:
        """Drops the gradients of all parameters, or of `param` alone; zeroes them with
        `set_to_none=False`."""
        if param is None:
            super().zero_grad(set_to_none=set_to_none)
        elif set_to_none:
            param.grad = None
        elif param.grad is not None:
            param.grad = param.grad.detach().zero_()

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Loads state dictionaries of halfstep, of torch, and of torch-optimi's own class."""
        if _is_optimi(state_dict):
            groups = naming.align(self._parts.names.all(), state_dict["param_groups"])[0]
            state_dict = _from_optimi(self, {**state_dict, "param_groups": groups})
        super().load_state_dict(state_dict)


def _group(names):
    """Returns the options of a group from the locals() of a constructor: its arguments, with one
    option for each of the betas."""
    found = arguments(names, "betas")
    found.update((f"beta{i}", beta) for i, beta in enumerate(names.get("betas", ()), 1))
    return found


def _is_optimi(state_dict):
    # Every state of optimi has this key, even if it is None.
    return any(
        isinstance(s, dict) and "kahan_comp" in s for s in state_dict.get("state", {}).values()
    )


class Adam(OptimiOptimizer):
    """Adam (Kingma & Ba 2015), with L2, decoupled (`decouple_wd`) or fully decoupled
    (`decouple_lr`) decay.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the first and the second moment.
        weight_decay: coefficient of the decay.
        eps: added to the root of the debiased second moment.
        decouple_wd: w (1 - lr weight_decay) instead of an L2 term in the gradient.
        decouple_lr: w (1 - lr / max_lr weight_decay) instead of either.
        max_lr: the largest lr of the schedule, for `decouple_lr`; None: the group's lr.
        kahan_sum: a residual for 16-bit parameters; None and True mean yes.
        foreach, triton: accepted, without effect.
        gradient_release: step each parameter in the backward pass, after
            `prepare_for_gradient_release`.
    """

    rule = "adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: Tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        eps: float = 1e-6,
        decouple_wd: bool = False,
        decouple_lr: bool = False,
        max_lr: Optional[float] = None,
        kahan_sum: Optional[bool] = None,
        foreach: Optional[bool] = None,
        triton: Optional[bool] = None,
        gradient_release: bool = False,
    ) -> None:
        super().__init__(params, _group(locals()))


class AdamW(Adam):
    """AdamW (Loshchilov & Hutter 2019): `Adam` with decoupled decay. Arguments as there."""

    rule = "adamw"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: Tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 1e-2,
        eps: float = 1e-6,
        decouple_lr: bool = False,
        max_lr: Optional[float] = None,
        kahan_sum: Optional[bool] = None,
        foreach: Optional[bool] = None,
        triton: Optional[bool] = None,
        gradient_release: bool = False,
    ) -> None:
        super().__init__(params, decouple_wd=True, **arguments(locals()))


class Adan(OptimiOptimizer):
    """Adan (Xie et al. 2022), decay by (w - lr u) / (1 + lr weight_decay), or before the update
    with `adam_wd`.

    Args:
        betas: decay rates of the first moment, of the gradients' differences and of the second
            moment.
        adam_wd: Adam's decay, w (1 - lr weight_decay); optimi's class takes the option and
            ignores it.
        kahan_sum: as in `Adam`, but off unless asked for.

    The others are those of `Adam`.
    """

    rule = "adan"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: Tuple[float, float, float] = (0.98, 0.92, 0.99),
        weight_decay: float = 2e-2,
        eps: float = 1e-6,
        decouple_lr: bool = False,
        max_lr: Optional[float] = None,
        adam_wd: bool = False,
        kahan_sum: Optional[bool] = False,
        foreach: Optional[bool] = None,
        triton: Optional[bool] = None,
        gradient_release: bool = False,
    ) -> None:
        super().__init__(params, _group(locals()))

    class _options(OptimiOptimizer._options):
        def hypers(self, group):
            found = super().hypers(group)
            if group["decouple_lr"] and not group["adam_wd"]:
                # (w - lr u) / (1 + lr / max_lr weight_decay): the proximal form of a coefficient
                # over max_lr
                found.update(
                    weight_decay=over(group["weight_decay"], group["max_lr"] or group["lr"]),
                    reference_lr=0.0,
                )
            return found

        def choices(self, group):
            return super().choices(group) if group["adam_wd"] else {"decay": "proximal"}


class Lion(OptimiOptimizer):
    """Lion (Chen et al. 2023), decoupled decay. `betas`: interpolation of the update, decay rate of
    the momentum; the others are those of `Adam`."""

    rule = "lion"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: Tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        decouple_lr: bool = False,
        max_lr: Optional[float] = None,
        kahan_sum: Optional[bool] = None,
        foreach: Optional[bool] = None,
        triton: Optional[bool] = None,
        gradient_release: bool = False,
    ) -> None:
        super().__init__(params, _group(locals()))


class RAdam(Adam):
    """RAdam (Liu et al. 2020). Arguments as in `Adam`."""

    rule = "radam"


class Ranger(OptimiOptimizer):
    """Ranger: RAdam with Lookahead (Zhang et al. 2019), decoupled decay by default.

    Args:
        k: updates of the weight between two visits to the slow weights (optimi counts micro-steps
            too).
        alpha: the part of the way that the slow weights go.

    The others are those of `Adam`. The slow weights have a residual of their own.
    """

    rule = "ranger"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: Tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        eps: float = 1e-6,
        k: int = 6,
        alpha: float = 0.5,
        decouple_wd: bool = True,
        decouple_lr: bool = False,
        max_lr: Optional[float] = None,
        kahan_sum: Optional[bool] = None,
        foreach: Optional[bool] = None,
        triton: Optional[bool] = None,
        gradient_release: bool = False,
    ) -> None:
        super().__init__(params, _group(locals()))


class SGD(OptimiOptimizer):
    """SGD with momentum.

    Args:
        momentum: factor of the buffer, or its decay rate with `dampening`.
        dampening: the gradient enters the buffer times 1 - momentum.
        torch_init: with `dampening`, the first buffer is the first gradient, as in torch.

    The others are those of `Adam`. With dampening and without torch_init the buffer starts from
    zeros; `state[p]["step"]` is then one more than the steps made.
    """

    rule = "sgd"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0,
        weight_decay: float = 0,
        dampening: bool = False,
        decouple_wd: bool = False,
        decouple_lr: bool = False,
        max_lr: Optional[float] = None,
        torch_init: bool = False,
        kahan_sum: Optional[bool] = None,
        foreach: Optional[bool] = None,
        triton: Optional[bool] = None,
        gradient_release: bool = False,
    ) -> None:
        super().__init__(params, _group(locals()))

    class _options(OptimiOptimizer._options):
        def before_build(self, groups, also):
            for group in groups:
                if group["dampening"] and group["momentum"] and not group["torch_init"]:
                    start_from_zeros(groups, group["params"], also)

        def hypers(self, group):
            found = super().hypers(group)
            momentum = float(group["momentum"])
            found.update(momentum=momentum, dampening=momentum if group["dampening"] else 0.0)
            return found


class StableAdamW(AdamW):
    """StableAdamW (Wortsman et al. 2023): AdamW whose updates are clipped tensor by tensor.
    Arguments as in `Adam`."""

    rule = "stableadamw"


# ---- Gradient release ----------------------------------------------------------------------------


def prepare_for_gradient_release(
    model: nn.Module, optimizer: OptimiOptimizer, ignore_existing_hooks: bool = False
) -> None:
    """Steps every parameter of `model` in the backward pass, as soon as its gradient is complete,
    and frees the gradient.

    Args:
        model: its parameters that require gradients get a hook each.
        optimizer: made with `gradient_release=True`.
        ignore_existing_hooks: other hooks of the same kind on the parameters are no error.
    """
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, OptimiOptimizer):
        raise TypeError("`optimizer` must be an instance of `OptimiOptimizer`")
    if not optimizer.defaults["gradient_release"]:
        raise ValueError("`optimizer` must be initialized with `gradient_release=True`")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not ignore_existing_hooks and any(map(gradient_hooks, parameters)):
        raise ValueError(
            "a parameter of the model already has a post_accumulate_grad_hook; if that is meant,"
            " pass `ignore_existing_hooks=True`"
        )

    def step(held, p):
        held.step(param=p)
        held.zero_grad(param=p)

    hooks = model._gradient_release_hooks = _Hooks(optimizer._begin_release(parameters, step))
    hooks.optimizer = optimizer


class _Hooks(list):
    """The handles of the hooks on a model, and the optimizer that they belong to."""


def remove_gradient_release(model: nn.Module) -> None:
    """Reverses `prepare_for_gradient_release`, so that steps are ordinary again."""
    hooks = model.__dict__.pop("_gradient_release_hooks", None)
    if hooks is None:
        warn("`model` has no gradient release hooks to remove")
        return
    hooks.optimizer._end_release(hooks)


# ---- Helpers -------------------------------------------------------------------------------------


def param_groups_weight_decay(
    model: nn.Module, weight_decay: float = 1e-2, additional_layers: Optional[Iterable[str]] = None
) -> List[Dict[str, Any]]:
    """Returns two groups of the trainable parameters. Vectors, scalars, biases and parameters whose
    name contains one of `additional_layers` have no decay. The rest has `weight_decay`."""
    parts = tuple(additional_layers or ())
    plain, decayed = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            exempt = p.ndim <= 1 or name.endswith(".bias") or any(part in name for part in parts)
            (plain if exempt else decayed).append(p)
    return [
        {"params": plain, "weight_decay": 0.0},
        {"params": decayed, "weight_decay": weight_decay},
    ]


def _module_types(given, argument) -> Tuple[Type[nn.Module], ...]:
    if given is None:
        return ()
    types = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(t, type) and issubclass(t, nn.Module) for t in types):
        raise TypeError(f"{argument} must be nn.Module subclasses")
    return types


def to_low_precision(
    model: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    device: Union[torch.device, str, None] = None,
    fp32_modules: Union[Type[nn.Module], Iterable[Type[nn.Module]], None] = nn.Embedding,
    fp32_buffers: Union[str, Type[nn.Module], Iterable[str], Iterable[Type[nn.Module]], None] = (
        "rope",
        "rotary",
    ),
) -> nn.Module:
    """Casts a model in place, and returns it. Integers stay.

    Args:
        model: the module to cast.
        dtype: the type that all but the following get.
        device: where to move it, if anywhere.
        fp32_modules: types of modules that become float32, or stay so.
        fp32_buffers: types of modules, or parts of their qualified names in any case. Their buffers
            become float32, or stay so.
    """
    keep = _module_types(fp32_modules, "fp32_modules")
    if fp32_buffers is None or isinstance(fp32_buffers, (str, type)):
        fp32_buffers = () if fp32_buffers is None else (fp32_buffers,)
    given = tuple(fp32_buffers)
    words = tuple(b.lower() for b in given if isinstance(b, str))
    types = tuple(b for b in given if isinstance(b, type) and issubclass(b, nn.Module))
    if len(words) + len(types) != len(given):
        raise TypeError("fp32_buffers must be strings or nn.Module subclasses")

    for name, module in model.named_modules():
        whole = isinstance(module, keep)
        parts = whole or isinstance(module, types) or any(word in name.lower() for word in words)
        params = list(module.parameters(recurse=False))
        grads = [p.grad for p in params if p.grad is not None]
        for tensors, wide in (
            (params + grads, whole),
            (list(module.buffers(recurse=False)), parts),
        ):
            _cast(module, set(map(id, tensors)), torch.float32 if wide else dtype, device)
    return model


def _cast(module, own: Set[int], dtype, device):
    def convert(t):
        if id(t) not in own:
            return t
        return t.to(device=device, dtype=dtype if t.is_floating_point() else t.dtype)

    apply_to_tensors(module, convert, recurse=False)


# ---- optimi's state dicts ------------------------------------------------------------------------


#: names of states here -> optimi's
_STATES = {"slow": "la_param", "previous": "prev_grad", "momentum_buffer": "exp_avg"}


def _from_optimi(optimizer, state_dict):
    """Returns optimi's state dictionary in halfstep's terms: raw moments in float32, and residuals
    under their name here."""
    rule = abi.rules[optimizer.rule]
    groups, states = [dict(g) for g in state_dict["param_groups"]], {}
    for group, own in zip(groups, optimizer.param_groups):
        shared = group.pop("step", None)
        group.pop("setup", None)
        betas = {
            "exp_avg": group.get("beta1"),
            "exp_avg_sq": group.get("beta3", group.get("beta2")),
            "exp_avg_diff": group.get("beta2"),
        }
        for index, p in zip(group["params"], own["params"]):
            old = state_dict["state"].get(index)
            if not old:
                continue
            step = old.get("step", shared)
            step = 1.0 if step is None else float(step)  # Lion and SGD count nothing
            new = {"step": layout.number(step, "step")}
            for s in rule.states:
                value = old.get(_STATES.get(s.name, s.name))
                if not holds(value, p.shape):
                    continue  # there is none, or a placeholder
                if s.name == "slow":
                    new["slow"] = value.to(p.dtype)
                    continue
                debiased = s.name in betas and rule.name != "lion"
                factor = 1.0 - betas[s.name] ** step if debiased else 1.0
                new[s.name] = value.float() * (-1.0 if s.name == "previous" else factor)
            weights, residual = PLAIN[p.dtype], old["kahan_comp"]
            if p.dtype in LOW and holds(residual, p.shape):
                weights += "-kahan"
                scale = 2048 if p.dtype == torch.float16 else 1
                new["weight.extra"] = residual.to(p.dtype) * scale
                if "slow" in new:  # optimi has one residual for both
                    new["slow.extra"] = devices.zeros(p.shape, p.dtype)
            new["recipe"] = layout.recipe_number(f"{rule.name}/{weights}/f32")
            states[index] = new
    return {"state": states, "param_groups": groups}
