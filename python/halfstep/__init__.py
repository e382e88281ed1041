"""halfstep: optimizers whose weights and states are stored in 16, 8 or 4 bits and computed in fp32.

    import halfstep
    opt = halfstep.AdamW(model.named_parameters(), lr=1e-4, states="int8")
    opt = halfstep.optimizer("adamw/bf16-sr/int8", model.named_parameters(), lr=1e-4)

The classes are ordinary `torch.optim.Optimizer`s over the C library inside this package.
docs/python.md is the manual.
"""

from . import nn as nn
from ._library import abi
from ._library.abi import HalfstepError
from ._settings.options import Store
from .accumulate import GradientAccumulator
from .classes import *  # noqa: F403
from .classes import RMSProp as RMSprop  # torch's spelling
from .classes import ScheduleFree as ScheduleFreeAdamW
from .classes import __all__ as _classes
from .ema import EMA
from .fit import fit
from .full_precision import full_precision_state_dict
from .offload import CPUOffload
from .optimizer import Optimizer, name_parameters
from .plan import plan
from .rules import optimizer
from .streaming import StateStreaming

__version__ = abi.version()

__all__ = [
    "Optimizer",
    "optimizer",
    "name_parameters",
    "plan",
    "fit",
    "EMA",
    "GradientAccumulator",
    "CPUOffload",
    "StateStreaming",
    "Store",
    "full_precision_state_dict",
    "HalfstepError",
    "RMSprop",
    "ScheduleFreeAdamW",
]
__all__.extend(_classes)
