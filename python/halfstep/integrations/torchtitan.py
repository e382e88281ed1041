"""torchtitan's optimizers with the classes of halfstep. In a job's configuration:

from halfstep.integrations.torchtitan import OptimizersContainer

config.optimizer = OptimizersContainer.Config(options={"lr": 8e-4, "states": "int8"})
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Dict, List, Optional

import torch

from ..ema import EMA
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

        ema: Optional[Dict[str, Any]] = None
        """Options of halfstep.EMA. Each part of the model then has averages, in `averages`, which
        follow each step and are in each checkpoint."""

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

        self.averages: List[EMA] = []
        if config.ema is not None:
            self.averages = [EMA(part, **read(EMA, config.ema)) for part in model_parts]
            self.register_step_post_hook(type(self)._update)

    def _update(self, *_):
        """Moves the averages, after a step."""
        for part, ema in zip(self.model_parts, self.averages):
            ema.update_parameters(part, self.optimizers)

    def _named_averages(self):
        """Yields what the names of averages in a checkpoint begin with, and the averages. Parts of
        a pipeline have parameters of their own."""
        for ema in self.averages:
            yield f"ema.{next(iter(ema.module.state_dict()))}.", ema

    def state_dict(self) -> Dict[str, Any]:
        found = super().state_dict()
        for begin, ema in self._named_averages():
            found.update({begin + key: value for key, value in ema.state_dict().items()})
        return found

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for begin, ema in self._named_averages():
            own = {k[len(begin) :]: v for k, v in state_dict.items() if k.startswith(begin)}
            ema.load_state_dict(own)

    @staticmethod
    def _resolve_optimizer_factory(name):
        return classes.get(name) or partial(optimizer, name)

    @staticmethod
    def _build_impl_kwargs(config):
        return {}  # one implementation
