"""The interface of the came_pytorch package (0.1.3): `CAME`.

from halfstep.compat.came_pytorch import CAME
optimizer = CAME(
    model.parameters(),
    lr=2e-4,
    weight_decay=1e-2,
    betas=(0.9, 0.999, 0.9999),
    eps=(1e-30, 1e-16),
)
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch

from .._library import abi
from .._states import foreign
from ..optimizer import Optimizer, Params
from ._common import arguments

__all__ = ["CAME"]


class CAME(Optimizer):
    """CAME under the package's signature.

    A group may be given the package's pair `eps`. It keeps halfstep's `eps` and `instability_eps`.
    A tensor of three or more dimensions has factors over the first dimension and over the rest. A
    tensor of one row or one column has no factors. Further `options` are those of every halfstep
    optimizer: `states="int8"` stores the first moment in bytes.
    """

    rule = "came"

    def __init__(
        self,
        params: Params,
        lr: Optional[float] = None,
        eps: Tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: Tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        if not isinstance(lr, torch.Tensor) and (lr is None or not lr > 0.0):
            raise ValueError(f"Invalid learning rate: {lr}")
        group = foreign.factored_group(abi.rules[self.rule], arguments(locals()))
        super().__init__(params, group, **options)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group as in torch. The group's `eps` may be a pair."""
        if isinstance(param_group, dict):
            param_group = foreign.factored_group(abi.rules[self.rule], param_group)
        super().add_param_group(param_group)
