"""torchtitan's optimizers with the classes of halfstep. In a job's configuration:

from halfstep.integrations.torchtitan import OptimizersContainer

config.optimizer = OptimizersContainer.Config(options={"lr": 8e-4, "states": "int8"})
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Dict, List

import torch

from ..rules import class_and_options, classes, optimizer
from ._text import read

try:
    from torchtitan.components import optimizer as titan
except ImportError as error:
    raise ImportError(
        f"halfstep.integrations.torchtitan needs torchtitan 0.3 ({error}): pip install torchtitan"
    ) from error

__all__ = ["OptimizersContainer"]


def _all_parameters():
    return [titan.ParamGroupConfig(pattern=".*", optimizer_name="AdamW")]


class OptimizersContainer(titan.OptimizersContainer):
    """Makes optimizers of halfstep for the parts of a model. Steps, saves and loads them as
    torchtitan's own container does, through torch.distributed.checkpoint."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.OptimizersContainer.Config):
        """Settings of a job. `optimizer_name` of a group is a class of halfstep, or a recipe such
        as "adamw/bf16-sr/int8"."""

        param_groups: List[titan.ParamGroupConfig] = field(default_factory=_all_parameters)
        """Which parameters take which optimizer. All take AdamW if nothing is given."""

        options: Dict[str, Any] = field(default_factory=dict)
        """Options of all optimizers; `optimizer_kwargs` of a group stand above them."""

    def __init__(self, config: Any, *, model_parts: List[torch.nn.Module]) -> None:
        if config.implementation == "fused_opt_states_bf16":
            raise ValueError(
                "halfstep: implementation='fused_opt_states_bf16' is for torch's Adam; leave it out"
                " and give options={'states': 'bf16-sr'}"
            )
        names = {group.optimizer_name for group in config.param_groups}
        config.optimizer_factory_kwargs_by_name = {
            name: read(
                classes.get(name) or class_and_options(name)[0],
                {**config.options, **config.optimizer_factory_kwargs_by_name.get(name, {})},
            )
            for name in names
        }
        super().__init__(config, model_parts=model_parts)
        if len(self) > 1 and any(opt.clip_norm for opt in self):
            raise ValueError(
                f"halfstep: clip_norm= would clip each of these {len(self)} optimizers by the norm"
                " of its own gradients; clip by training.max_norm, and leave clip_norm out"
            )

    @staticmethod
    def _resolve_optimizer_factory(name):
        return classes.get(name) or partial(optimizer, name)

    @staticmethod
    def _build_impl_kwargs(config):
        return {}  # one implementation
