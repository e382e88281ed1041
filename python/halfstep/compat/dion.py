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

from .._states import foreign
from ..rules import classes
from ._arguments import arguments

__all__ = ["Muon", "NorMuon"]


class Muon(classes["Muon"]):
    """Muon under the package's signature, for groups whose `algorithm` is "muon" or missing. Groups
    of "adamw" and "lion" are stepped by these. A group may have the package's names. It keeps
    halfstep's: `momentum`, `betas`, `eps`, `adjust_lr_fn`, `matrix`, `heads` and `decay`."""

    #: of every group
    _normalize_rows = "off"

    def __init__(
        self,
        params,
        distributed_mesh=None,
        lr=0.01,
        mu=0.95,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        cautious_wd=False,
        epsilon=1e-8,
        nesterov=False,
        adjust_lr="spectral_norm",
        flatten=False,
        use_triton=False,
        newton_schulz_func=None,
        **options,
    ):
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

    def add_param_group(self, param_group):
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
        self, params, distributed_mesh=None, lr=0.01, mu=0.95, muon_beta2=0.95, *rest, **options
    ):
        options.setdefault("row_beta", muon_beta2)
        super().__init__(params, distributed_mesh, lr, mu, *rest, **options)
