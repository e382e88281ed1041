"""A plugin of ms-swift: `--optimizer halfstep` and `--callbacks halfstep_ema`.

echo "import halfstep.integrations.swift" > plugin.py
swift sft --external_plugins plugin.py --optimizer halfstep --optim_args "states=int8" ...

swift puts the folder of a plugin on sys.path. The modules of halfstep.integrations have the names
of packages, so this file has a folder of its own. Imports are absolute, because swift may load the
file by its path.
"""

from __future__ import annotations

import json
import re
from typing import Any, Dict, Optional

import torch

try:
    from swift.callbacks import callbacks_map
    from swift.optimizers import OptimizerCallback, optimizers_map
except ImportError as error:
    raise ImportError(
        f"halfstep.integrations.swift needs {error.name}: pip install ms-swift"
    ) from error

from halfstep.integrations.transformers import factory

__all__ = ["Optimizer", "ema", "options"]


def options(text: Optional[str]) -> Dict[str, Any]:
    """Returns the options in the text of `--optim_args`: `states=int8,betas=(0.9,0.99)`, or a JSON
    object, which is how swift passes on a mapping of its YAML file. Values stay text."""
    if (text or "").lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(
                f"--optim_args={text!r} begins like a JSON object and is none ({error}); write"
                ' {"states": "int8"} or states=int8'
            ) from None
    found = {}
    for part in re.split(r",(?=\s*\w+\s*=)", text) if text else ():
        name, equals, value = map(str.strip, part.partition("="))
        if not (equals and name.isidentifier()):
            raise ValueError(
                f"--optim_args has '{part}'; write options of halfstep as name=value, with commas"
                " between them: states=int8,betas=(0.9,0.99)"
            )
        found[name] = value
    return found


class Optimizer(OptimizerCallback):
    """Makes the optimizer of swift's trainer by halfstep.integrations.transformers.factory."""

    def create_optimizer(self, model: Optional[torch.nn.Module] = None) -> torch.optim.Optimizer:
        for name in ("vit_lr", "aligner_lr"):
            if getattr(self.args, name, None) is not None:
                raise ValueError(
                    f"--{name} has no effect with --optimizer halfstep, which has one learning"
                    " rate; leave it out, or freeze the part (--freeze_vit, --freeze_aligner)"
                )
        given = options(self.args.optim_args)
        given = {name: value for name, value in given.items() if name != "ema_decay"}
        return factory(self.trainer.model if model is None else model, self.args, **given)


def ema(args: Any, trainer: Any) -> Any:
    """Returns the callback that averages weights; `ema_decay` of `--optim_args` is its decay."""
    from halfstep.integrations.transformers import EMACallback

    given = options(args.optim_args)
    return EMACallback(**({"decay": given["ema_decay"]} if "ema_decay" in given else {}))


optimizers_map["halfstep"] = Optimizer
callbacks_map["halfstep_ema"] = ema
