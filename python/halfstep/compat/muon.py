"""The interface of Keller Jordan's Muon (github.com/KellerJordan/Muon, module `muon`): `Muon`,
`MuonWithAuxAdam`, and both for a single device.

from halfstep.compat.muon import MuonWithAuxAdam
optimizer = MuonWithAuxAdam(
    [
        dict(params=hidden_weights, use_muon=True, lr=0.02, weight_decay=0.01),
        dict(params=others, use_muon=False, lr=3e-4, betas=(0.9, 0.95)),
    ]
)

Iterations are in fp32, not in BF16. Parameters without a gradient are left alone; the package steps
them with zeros. Every rank steps every matrix, with the same bits, so nothing is communicated, and
no process group is needed. Further `options` are those of every halfstep optimizer.
"""

from __future__ import annotations

from typing import Any, Dict

from .. import classes
from .._library import abi
from ..optimizer import Params
from ._common import arguments

__all__ = ["Muon", "MuonWithAuxAdam", "SingleDeviceMuon", "SingleDeviceMuonWithAuxAdam"]

#: what a group has that does not say, by `use_muon`
_DEFAULTS = {
    True: {"lr": 0.02, "momentum": 0.95, "weight_decay": 0},
    False: {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0},
}


class SingleDeviceMuon(classes.Muon):
    """Muon for hidden weights. Tensors that are no matrices are stepped by AdamW."""

    def __init__(
        self,
        params: Params,
        lr: float = 0.02,
        weight_decay: float = 0,
        momentum: float = 0.95,
        **options: Any,
    ) -> None:
        super().__init__(params, **arguments(locals()), **options)


class Muon(SingleDeviceMuon):
    """Muon for hidden weights, on any number of ranks that have the same gradients."""


class SingleDeviceMuonWithAuxAdam(classes.Muon):
    """Muon for the groups with `use_muon` True, AdamW for those with `use_muon` False."""

    def __init__(self, param_groups: Params, **options: Any) -> None:
        super().__init__(param_groups, **options)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group, which says who steps it by `use_muon`."""
        if isinstance(param_group, dict):
            if "use_muon" not in param_group:
                raise ValueError(
                    f"halfstep: a group of {type(self).__name__} lacks the key 'use_muon': give it"
                    " True for Muon or False for AdamW"
                )
            abi.check_flags(use_muon=param_group["use_muon"])
            for key, value in _DEFAULTS[bool(param_group["use_muon"])].items():
                param_group.setdefault(key, value)
        super().add_param_group(param_group)


class MuonWithAuxAdam(SingleDeviceMuonWithAuxAdam):
    """The same on any number of ranks that have the same gradients. As in the package, parameters
    of Muon are in the order of their sizes, the largest first."""

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group, which says who steps it by `use_muon`."""
        if isinstance(param_group, dict) and param_group.get("use_muon"):
            param_group["params"] = sorted(param_group["params"], key=_size, reverse=True)
        super().add_param_group(param_group)


def _size(p):
    """Returns the size of a parameter, or of that of a (name, parameter) pair."""
    return (p[1] if isinstance(p, tuple) else p).size()
