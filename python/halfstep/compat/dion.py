"""The interface of Microsoft's dion package (github.com/microsoft/dion): `Muon` and `NorMuon`.

from halfstep.compat.dion import Muon
optimizer = Muon(
    [
        dict(params=matrices),
        dict(params=[*vectors, *embeddings], algorithm="adamw", lr=3e-4),
        dict(params=head, algorithm="lion", lr=3e-5),
    ],
    lr=0.02,
)

Iterations are in fp32 with the package's five polynomials, not in BF16; `ns_coefficients` chooses
others. A step has the same bits on every rank. One rank steps each matrix of a DTensor, which knows
its mesh, so `distributed_mesh` is accepted without effect, and so is `use_triton`. Further
`options` are those of every halfstep optimizer.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

from .. import classes
from .._states import foreign
from ..optimizer import Params
from ._common import arguments

__all__ = ["Muon", "NorMuon"]


class Muon(classes.Muon):
    """Muon under the package's signature, for groups whose `algorithm` is "muon" or missing. Groups
    of "adamw" and "lion" are stepped by these. A group may have the package's names. It keeps
    halfstep's: `momentum`, `betas`, `eps`, `adjust_lr_fn`, `matrix`, `heads` and `decay`."""

    #: of every group
    _normalize_rows = "off"

    def __init__(
        self,
        params: Params,
        distributed_mesh: Any = None,
        lr: float = 0.01,
        mu: float = 0.95,
        betas: Tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        cautious_wd: bool = False,
        epsilon: float = 1e-8,
        nesterov: bool = False,
        adjust_lr: Optional[str] = "spectral_norm",
        flatten: bool = False,
        use_triton: bool = False,
        newton_schulz_func: Any = None,
        **options: Any,
    ) -> None:
        given = arguments(locals(), "distributed_mesh", "use_triton", "newton_schulz_func")
        if newton_schulz_func is not None:
            raise ValueError(
                "halfstep: newton_schulz_func= is not called, because the library's kernels make"
                " the iterations: leave it out, and choose others by ns_coefficients="
            )
        own = {
            **foreign.dion_group(given),
            "adam_eps": epsilon,
            "ns_coefficients": "dion",
            "normalize_rows": self._normalize_rows,
        }
        super().__init__(params, **{**own, **options})

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group as in torch. Its options may have the package's names."""
        if isinstance(param_group, dict):
            # All rules have these of the optimizer, where a group does not say.
            shared = {key: self.defaults[key] for key in ("lr", "weight_decay", "eps", "decay")}
            given = foreign.dion_group(param_group)
            param_group = {**shared, "betas": self._betas, **given}
            param_group.setdefault("adam_eps", param_group["eps"])
        super().add_param_group(param_group)


class NorMuon(Muon):
    """NorMuon under the package's signature, for groups whose `algorithm` is "normuon" or
    missing."""

    _normalize_rows = "keep-norm"

    def __init__(
        self,
        params: Params,
        distributed_mesh: Any = None,
        lr: float = 0.01,
        mu: float = 0.95,
        muon_beta2: float = 0.95,
        *rest: Any,
        **options: Any,
    ) -> None:
        options.setdefault("row_beta", muon_beta2)
        super().__init__(params, distributed_mesh, lr, mu, *rest, **options)
