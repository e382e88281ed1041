"""The interface of the LAMB16 package (`pytorch_lamb`): `Lamb16`, its baseline `Lamb`, and
`log_lamb_rs`.

from halfstep.compat.lamb16 import Lamb, Lamb16, log_lamb_rs
optimizer = Lamb16(model.parameters(), lr=0.02, weight_decay=0.01, betas=(.9, .999))
"""

from __future__ import annotations

from typing import Any, Dict, Tuple

import torch

from .._library import abi
from .._settings.options import Options
from ..optimizer import Kept, Optimizer, Params, unwrapped
from ._common import arguments

__all__ = ["Lamb", "Lamb16", "log_lamb_rs"]

#: names that the package logs -> names of the rules' scalars
_LOGGED = {"weight_norm": "weight_norm", "adam_norm": "update_norm", "trust_ratio": "trust_ratio"}


class Lamb16(Optimizer):
    """LAMB with states of 8 bits. `trust_scale` is the exponent of the trust ratio, which takes the
    place of most of lr.

    States are e4m3 and e5m2, rounded stochastically. 128 elements of a row share a scale.
    `states="fp8-lamb16"` is the package's published scaling, with one scale for each tensor. It
    clips most moments, and they lag behind, as published.

    BF16 parameters are rounded stochastically (`weights="bf16-sr"`). The package takes float32
    parameters only. Further `options` are those of every halfstep optimizer.
    """

    rule = "lamb16"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        trust_scale: float = 0.382,
        **options: Any,
    ) -> None:
        super().__init__(params, arguments(locals()), **options)

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Loads halfstep's state dictionaries, and decodes those of the package."""
        states = {}
        for key, state in state_dict["state"].items():
            state = states[key] = dict(state)
            for name in ("exp_avg", "exp_avg_sq"):
                scale = state.pop(name + "_norm", None)
                if scale is not None:
                    state[name] = state[name].float() * float(scale)
            if "adam_norm" in state:
                state["update_norm"] = state.pop("adam_norm")
        super().load_state_dict({**state_dict, "state": states})


class Lamb(Optimizer):
    """The package's baseline: LAMB without bias corrections. The norm of a weight counts as at most
    10.

    `adam=True` sets every trust ratio to 1. `halfstep.Lamb` is the paper's rule, with bias
    corrections.
    """

    rule = "lamb"
    adam = Kept()

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        **options: Any,
    ) -> None:
        abi.check_flags(adam=adam)
        self.adam = adam
        super().__init__(params, arguments(locals(), "adam"), **options)

    class _options(Options):
        def hypers(self, group):
            found = super().hypers(group)
            found.update(adam=float(self.adam), debias=0.0, max_weight_norm=10.0, trust_scale=1.0)
            return found


def log_lamb_rs(optimizer: torch.optim.Optimizer, event_writer: Any, token_count: int) -> None:
    """Gives the weight norms, update norms and trust ratios of the last step to
    `event_writer.add_histogram`.

    Tags are lamb/weight_norm, lamb/adam_norm and lamb/trust_ratio, with one number for each tensor
    that was stepped. Logs nothing for other optimizers.
    """
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, (Lamb, Lamb16)):
        return
    stepped = [p for p in optimizer._parts.groups.params() if optimizer.state.get(p)]
    for tag, scalar in _LOGGED.items() if stepped else ():
        values = [optimizer.scalar(p, scalar) for p in stepped]
        event_writer.add_histogram(
            f"lamb/{tag}", torch.tensor(values, dtype=torch.float32, device="cpu"), token_count
        )
