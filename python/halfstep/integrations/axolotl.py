"""A plugin that gives axolotl's trainers an optimizer of halfstep. In the YAML file:

plugins:
  - halfstep.integrations.axolotl.Plugin
halfstep:
  weights: bf16-ecc8
  states: int8
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from ._text import missing, read
from .transformers import EMACallback, class_of, factory

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel, Field, field_validator
except ImportError as error:
    raise missing(__name__, error, "axolotl") from error

__all__ = ["Arguments", "Plugin"]

#: keys of axolotl that give parameters rates of their own, which the factory does not
_RATES = ("embedding_lr", "embedding_lr_scale", "loraplus_lr_ratio", "lr_groups")


class Arguments(BaseModel):
    """The keys that the plugin adds to axolotl's configuration."""

    #: what `transformers.factory` takes: `rule`, `clip_norm` and the options of the optimizer; and
    #: `ema`, the arguments of `transformers.EMACallback`
    halfstep: Dict[str, Any] = Field(default_factory=dict)

    @field_validator("halfstep", mode="before")
    @classmethod
    def _read(cls, options):
        """Reads text such as 1e-8, which YAML 1.1 does not take for a number."""
        options = {} if options is None else options
        if not isinstance(options, dict):
            raise ValueError(
                f"halfstep: {options!r} stands under 'halfstep:'; write options such as"
                " 'states: int8' there"
            )
        optimizer = class_of(options.get("rule", "AdamW"))[0]
        return read(optimizer, options)


class Plugin(BasePlugin):
    """Replaces the optimizer that `optimizer` names. axolotl never calls a plugin's
    create_optimizer(), so the trainer is told instead."""

    def get_input_args(self) -> Optional[str]:
        return f"{__name__}.Arguments"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        given = [key for key in _RATES if getattr(trainer.args, key, None) is not None]
        if given:
            raise ValueError(
                f"halfstep: {given[0]} has no effect on halfstep's optimizer; remove"
                f" {', '.join(given)} from the configuration, or remove the plugin"
            )
        options = {key: value for key, value in cfg.halfstep.items() if key != "ema"}
        trainer.optimizer_cls_and_kwargs = (factory, options)

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> List[Any]:
        return [EMACallback(**cfg.halfstep["ema"])] if cfg.halfstep.get("ema") else []
