"""The interface of `transformers.optimization.Adafactor` (5.23).

from halfstep.compat.transformers import Adafactor
optimizer = Adafactor(
    model.parameters(), scale_parameter=False, relative_step=False, warmup_init=False, lr=1e-3
)
"""

from __future__ import annotations

import math
from typing import Any, Dict, Optional, Tuple

from .. import classes
from .._library import abi
from .._states import foreign
from ..optimizer import Params
from ._common import arguments

__all__ = ["Adafactor"]


class Adafactor(classes.Adafactor):
    """Adafactor as in the paper. The learning rate is given, or follows from the number of updates.

    A group may be given with transformers' names. It keeps halfstep's names `d` and `beta2_decay`.
    `beta1` is 0 if there is no first moment. With relative_step, `lr` of a group is None and has no
    effect, as in transformers: AdafactorSchedule writes the rate there that it reports, and torch's
    schedulers refuse None. A tensor of three or more dimensions has factors over the first
    dimension and over the rest.

    BF16 parameters are rounded stochastically (`weights="bf16-sr"`). Further `options` are those of
    every halfstep optimizer: `states="int8"` stores the first moment in bytes.
    """

    rule = "adafactor"

    def __init__(
        self,
        params: Params,
        lr: Optional[float] = None,
        eps: Tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: Optional[float] = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        **options: Any,
    ) -> None:
        if lr is not None and relative_step:
            raise ValueError("Cannot combine manual `lr` and `relative_step=True` options")
        if warmup_init and not relative_step:
            raise ValueError("`warmup_init=True` requires `relative_step=True`")
        if lr is None and not relative_step:
            raise ValueError("`relative_step=False` requires `lr`")
        group = foreign.factored_group(abi.rules[self.rule], arguments(locals()))
        super().__init__(params, **{**group, "lr": lr}, **options)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group as in torch. Its options may have transformers' names."""
        if isinstance(param_group, dict):
            names = {"clip_threshold": "d", "decay_rate": "beta2_decay"}
            param_group = {names.get(key, key): value for key, value in param_group.items()}
            if param_group.get("beta1", 0.0) is None:
                param_group["beta1"] = 0.0
        super().add_param_group(param_group)

    class _options(classes.Adafactor._options):
        def hypers(self, group):
            if group.get("relative_step"):
                group = {**group, "lr": abi.rules[self.rule].hypers["lr"].initial}
            return super().hypers(group)

        def take_hyper(self, group, name, value):
            if name != "lr" or not group.get("relative_step"):
                super().take_hyper(group, name, value)

    def _get_lr(self, param_group, param_state):
        """Returns the step size of a parameter, for AdafactorSchedule. A parameter that was not
        stepped yet, because its gradients were not finite, has the rate that is in its group."""
        step = float(param_state.get("step", 0))
        if not step:
            return param_group["lr"] or 0.0
        lr = self._parts.options.hypers(param_group)["lr"]
        if param_group["relative_step"]:
            lr = min(1e-6 * step if param_group["warmup_init"] else lr, 1.0 / math.sqrt(step))
        if not param_group["scale_parameter"]:
            return lr
        p = next(p for p in param_group["params"] if self.state.get(p) is param_state)
        return lr * max(param_group["eps"][1], self.scalar(p, "weight_rms"))
