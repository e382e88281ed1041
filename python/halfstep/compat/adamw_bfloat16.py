"""The interface of the adamw_bfloat16 package (0.2.0): `AdamW_BF16` with its built-in schedule
`LR`.

    from halfstep.compat.adamw_bfloat16 import LR, AdamW_BF16
    optimizer = AdamW_BF16(
        model.parameters(), lr_function=LR(lr=1e-4, preheat_steps=5000, decay_power=-0.25)
    )
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Tuple

import torch

from .._settings.options import Options
from .._states import layout
from ..optimizer import Kept, Optimizer, Params
from ._common import arguments

__all__ = ["LR", "AdamW_BF16"]


@dataclass
class LR:
    """The package's schedule. The rate rises in a line over `preheat_steps`, then falls with the
    power `decay_power` of the step.

    The first rate is 2 / preheat_steps of lr. lr itself comes at step preheat_steps - 1. A power of
    0 keeps lr. With `LR(preheat_steps=1, lr=lr, decay_power=0)` the rate is constant, for
    use with a scheduler of torch.
    """

    preheat_steps: int = 3000
    lr: float = 1e-3
    decay_power: float = -0.5

    def __call__(self, step):
        """Returns the rate of a step, counted from 1."""
        x = (step + 1) / self.preheat_steps
        return self.lr * (x if x <= 1 else x**self.decay_power)


def _numbers(function) -> dict:
    """Returns the numbers that a group keeps of an LR. An object in a group could not be loaded
    with weights_only=True."""
    try:
        found = {key: getattr(function, key) for key in ("lr", "preheat_steps", "decay_power")}
    except AttributeError:
        raise TypeError(
            "lr_function must be an LR, not"
            f" {type(function).__name__}; for another schedule use LR(preheat_steps=1, lr=lr,"
            " decay_power=0) and a scheduler"
        ) from None
    if not isinstance(found["lr"], torch.Tensor) and not found["lr"] >= 0.0:
        raise ValueError(f"Invalid learning rate: {found['lr']}")
    if not found["preheat_steps"] >= 1 or found["preheat_steps"] != int(found["preheat_steps"]):
        raise ValueError(
            f"Invalid preheat_steps: {found['preheat_steps']}, a whole number from 1 on is needed"
        )
    if not found["decay_power"] <= 0.0:
        raise ValueError(f"Invalid decay_power: {found['decay_power']}, it must not be positive")
    return found


class AdamW_BF16(Optimizer):
    """AdamW for BF16 parameters with a BF16 residual beside each weight, and weight decay in lumps
    (rule `adamw-delayed`).

    `lr_function` may differ between groups. A group holds it as "lr", "preheat_steps" and
    "decay_power"; "lr" may be changed at any time, and the schedule multiplies it. Steps of the
    schedule are counted by group, those of bias corrections by parameter.

    Unlike the package, it accepts parameters in float32, which stay float32, and in float16, which
    keep a residual too. A non-finite gradient changes nothing. Moments are rounded stochastically,
    so that the second one can fall. Further `options` are those of every halfstep optimizer, such
    as `weights="bf16-ecc8"` for the residual in one byte, or `states="int8"`.
    """

    rule = "adamw-delayed"
    _weights_asked = False
    #: decay is collected until it exceeds this, then applied at once
    decay_threshold = Kept(5e-3)

    def __init__(
        self,
        params: Params,
        *,
        lr_function: Callable[[int], float] = LR(),
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        **options: Any,
    ) -> None:
        options.setdefault("weights", "bf16-kahan")
        group = {**_numbers(lr_function), **arguments(locals(), "lr_function")}
        super().__init__(params, group, **options)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group as in torch. The group's "lr_function" replaces the constructor's."""
        if isinstance(param_group, dict) and "lr_function" in param_group:
            param_group = dict(param_group)
            for key, value in _numbers(param_group.pop("lr_function")).items():
                param_group.setdefault(key, value)
        super().add_param_group(param_group)

    class _options(Options):
        def hypers(self, group):
            hypers = super().hypers(group)
            hypers["warmup_steps"] = float(group["preheat_steps"])
            hypers["power"] = float(group["decay_power"])
            hypers["threshold"] = float(self.decay_threshold)
            return hypers

        def choices(self, group):
            return {**super().choices(group), "schedule": "inverse-power"}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Loads halfstep's state dictionaries, and those that adamw_bfloat16 saved. Its `shift` is
        the residual, bit for bit."""
        saved = state_dict["state"]
        if any("shift" in state for state in saved.values()):
            recipe = layout.recipe_number("adamw-delayed/bf16-kahan/bf16-sr")
            states = {
                key: {
                    "recipe": recipe,
                    **{
                        "weight.extra" if name == "shift" else name: value
                        for name, value in state.items()
                    },
                }
                for key, state in saved.items()
            }
            groups = []
            for group in state_dict["param_groups"]:
                group = dict(group)
                if "lr_function" in group:
                    group.update(_numbers(group.pop("lr_function")))
                steps = [float(states[key]["step"]) for key in group["params"] if key in states]
                group["group_steps"] = int(max(steps, default=0))
                groups.append(group)
            state_dict = {**state_dict, "state": states, "param_groups": groups}
        super().load_state_dict(state_dict)

    def step(self, zero_grad: bool = False, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Makes one step. With zero_grad=True gradients are then set to zero in place, also after a
        refused step.

        A closure may also be the first argument, for schedulers and trainers that know torch's
        optimizers.
        """
        if callable(zero_grad):
            zero_grad, closure = False, zero_grad
        loss = super().step(closure)
        if zero_grad:
            with torch.no_grad():
                for p in self._parts.groups.params():
                    if p.grad is not None:
                        p.grad.zero_()
        return loss
