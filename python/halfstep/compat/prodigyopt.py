"""The interface of the prodigyopt package (1.1.2): `Prodigy`.

from halfstep.compat.prodigyopt import Prodigy
optimizer = Prodigy(
    model.parameters(), weight_decay=0.01, safeguard_warmup=True, use_bias_correction=True
)
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import torch

from .._states import foreign
from .._tensors import sharding
from ..optimizer import Optimizer, Params
from ._common import arguments

__all__ = ["Prodigy"]

#: numbers of the estimate in a group
_ESTIMATE = ("d", "d_max", "d_numerator")


class Prodigy(Optimizer):
    """Adam that estimates its learning rate, from sums over all parameters.

    A group may be given with the package's names. It keeps halfstep's: three `betas`, `debias` and
    `decay`. `group["d"]`, `["d_max"]` and `["d_numerator"]` are the estimate after the last step,
    for loggers. step() waits for a GPU to read them, as the package does.

    Unlike in the package, sums are exact and the same however parameters are sharded. `fsdp_in_use`
    is therefore accepted without effect. A gradient that is not finite changes nothing. `slice_p`
    makes the package's estimate, but states stay whole. To save memory, take states of 8 bits.
    Further `options` are those of every halfstep optimizer (`states="int8"`).
    """

    rule = "prodigy"

    def __init__(
        self,
        params: Params,
        lr: float = 1.0,
        betas: Tuple[float, float] = (0.9, 0.999),
        beta3: Optional[float] = None,
        eps: float = 1e-8,
        weight_decay: float = 0,
        decouple: bool = True,
        use_bias_correction: bool = False,
        safeguard_warmup: bool = False,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        growth_rate: float = float("inf"),
        fsdp_in_use: bool = False,
        slice_p: int = 1,
        **options: Any,
    ) -> None:
        if not 0.0 < d0:
            raise ValueError(f"Invalid d0 value: {d0}")
        if not isinstance(lr, torch.Tensor) and not 0.0 < lr:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not 0.0 < eps:
            raise ValueError(f"Invalid epsilon value: {eps}")
        group = foreign.prodigyopt_group(arguments(locals()))
        group.update(d=d0, d_max=d0, d_numerator=0.0)
        options.setdefault("decay", group.pop("decay"))
        super().__init__(params, group, **options)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group as in torch. Its options may have the package's names."""
        if isinstance(param_group, dict):
            param_group = foreign.prodigyopt_group(param_group, self.defaults)
        super().add_param_group(param_group)

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Makes one step. Raises RuntimeError if groups of one `d_group` have different learning
        rates, because their estimate has one. A learning rate of 0 leaves a group out."""
        shared, state = {}, self._parts.groups.state
        for group in self.param_groups:
            shared.setdefault(sharding.number_of(group), []).append(group)
        rates = [{float(group["lr"]) for group in groups} for groups in shared.values()]
        if any(len(some - {0.0}) > 1 for some in rates):
            raise RuntimeError(
                "Setting different lr values in different parameter groups is only supported for"
                " values of 0"
            )
        loss = super().step(closure)
        for groups in shared.values():
            stepped = [p for group in groups for p in group["params"] if state.get(p)]
            for name in _ESTIMATE if stepped else ():
                told = self.scalar(stepped[0], name)
                for group in groups:
                    group[name] = told or group["d0"] * (name != "d_numerator")
        return loss
