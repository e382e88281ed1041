"""The interface of `torchao.optim` (0.18.0): Adam and AdamW with states of 8 or 4 bits or fp8,
`_AdamW` with BF16 stochastic rounding, and `CPUOffloadOptimizer`.

    from halfstep.compat.torchao import AdamW8bit
    optimizer = AdamW8bit(model.parameters(), lr=1e-4, bf16_stochastic_round=True)

States are halfstep's `int8`, `int4` and `fp8`, of the width that the class names. They are not
torchao's maps (`dyn8` and `dyn4` here), because torchao stores some second moments as zero, which
lets updates grow ten thousandfold. `{"states": "dyn8"}` in a group gives torchao's formats, for
its files. The interface is the same otherwise, with these differences:

* `bf16_stochastic_round` acts on BF16 parameters, in a model of mixed dtypes too: `bf16-sr`, or
  without it `bf16`, to nearest.
* `block_size` is accepted if it is at least that of the format (32 elements of a row, `fp8` 128),
  whose finer blocks are used. A smaller one is refused, because the format does not have it.
* States are quantized if a row has a whole block, whatever the number of elements. States that
  stay unquantized, and all states of `_AdamW`, are float32 beside float32 parameters. Beside
  others they are BF16, rounded stochastically.
* `lr` is kept as a float32 tensor, as in torchao, so `group["lr"].fill_(x)` works. Assigning a
  number works, too.
* Nothing is compiled, and states saved by torchao can be loaded.
"""

from typing import Any, Callable, Dict, List, Optional, Tuple, Type

import torch

from .._library import abi
from .._settings.options import Options
from .._tensors import devices
from ..offload import CPUOffload
from ..optimizer import Optimizer, Params
from ..rules import classes
from ._common import arguments

__all__ = [
    "Adam4bit",
    "Adam8bit",
    "AdamFp8",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWFp8",
    "_AdamW",
    "CPUOffloadOptimizer",
]


class _LowBit(Optimizer):
    """Common base of the classes. `weights` and `states` may be set by group."""

    _weights_asked = False

    #: the format of states; None for those that are not quantized
    _states = None

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        block_size: Optional[int] = 256,
        bf16_stochastic_round: bool = False,
    ) -> None:
        defaults = arguments(locals(), "block_size", "bf16_stochastic_round")
        if block_size is not None:
            finest = abi.formats[self._states].block
            if not abi.is_count(block_size, 1):
                raise ValueError(
                    f"Invalid block_size: {block_size!r}, a positive whole number is needed"
                )
            if block_size < finest:
                raise ValueError(
                    f"Invalid block_size: {block_size}; {type(self).__name__} has blocks of"
                    f" {finest} elements, which serve every block_size from {finest} on"
                )
        self.block_size = float("inf") if block_size is None else block_size
        weights = "bf16-sr" if bf16_stochastic_round else "bf16"
        super().__init__(params, defaults, weights=weights, states=self._states)

    @property
    def is_adamw(self) -> bool:
        """True if weight decay is decoupled."""
        return self.rule == "adamw"

    @property
    def bf16_stochastic_round(self) -> bool:
        """True if BF16 parameters are rounded stochastically. May be set; single groups set
        `weights`."""
        return self.defaults["weights"] == "bf16-sr"

    @bf16_stochastic_round.setter
    def bf16_stochastic_round(self, value: bool) -> None:
        self.defaults["weights"] = "bf16-sr" if value else "bf16"
        for group in self.param_groups:
            group["weights"] = self.defaults["weights"]

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group as torch's optimizers do. Its lr becomes a tensor."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device="cpu")

    class _options(Options):
        def formats(self, group, p):
            weights, states = group["weights"], group["states"]
            if p.dtype == torch.float16 and weights == "bf16-sr":
                weights = "bf16"  # the flag is about BF16
            return weights, states


class _LowBitW(_LowBit):
    """Common base of the classes with decoupled decay."""

    rule = "adamw"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        block_size: Optional[int] = 256,
        bf16_stochastic_round: bool = False,
    ) -> None:
        super().__init__(params, **arguments(locals()))


class Adam8bit(_LowBit):
    """Adam (weight decay as part of the gradient) with states of 8 bits."""

    rule, _states = "adam", "int8"


class Adam4bit(_LowBit):
    """Adam (weight decay as part of the gradient) with states of 4 bits."""

    rule, _states = "adam", "int4"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        block_size: Optional[int] = 128,
        bf16_stochastic_round: bool = False,
    ) -> None:
        super().__init__(params, **arguments(locals()))


class AdamFp8(_LowBit):
    """Adam (weight decay as part of the gradient) with states in e4m3."""

    rule, _states = "adam", "fp8"


class AdamW8bit(_LowBitW):
    """AdamW with states of 8 bits."""

    _states = "int8"


class AdamW4bit(_LowBitW):
    """AdamW with states of 4 bits."""

    _states = "int4"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        block_size: Optional[int] = 128,
        bf16_stochastic_round: bool = False,
    ) -> None:
        super().__init__(params, **arguments(locals()))


class AdamWFp8(_LowBitW):
    """AdamW with states in e4m3."""

    _states = "fp8"


#: names for trainers that want the package bitsandbytes for each name that ends in "8bit"
#: (docs/frameworks.md)
AdamInt8, AdamWInt8 = Adam8bit, AdamW8bit


class _AdamW(_LowBitW):
    """AdamW with states that are not quantized. Parameters of torchao's quantized training are
    refused."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        *,
        bf16_stochastic_round=False,
    ) -> None:
        super().__init__(params, **arguments(locals()), block_size=None)


def _own(optimizer_class):
    """Returns this package's class in place of torch's class of the same name."""
    if not optimizer_class.__module__.startswith("torch.optim"):
        return optimizer_class
    name = optimizer_class.__name__.lower()
    found = next((cls for own, cls in classes.items() if own.lower() == name), None)
    if found is None:
        raise ValueError(f"halfstep has no {optimizer_class.__name__}; known: {', '.join(classes)}")
    return found


class CPUOffloadOptimizer(torch.optim.Optimizer):
    """An optimizer whose states and steps are in CPU memory.

    One optimizer of `optimizer_class` gets all parameters, in the given groups. `param_groups`,
    `state`, schedulers, hooks and state_dict are that optimizer's. Parameters that do not require a
    gradient are left out, as in torchao.

    If a parameter is on an accelerator, that optimizer is a `halfstep.CPUOffload` of the class. A
    class of `torch.optim` then becomes halfstep's class of the same name; others are refused. If
    all parameters are in CPU memory, nothing moves, so that `offload_gradients` and `minimal_size`
    change nothing.

    Unlike in torchao, `clip_norm` clips by the norm of all parameters, and `offload_gradients` goes
    with accumulation. State dictionaries are those of the class.
    """

    def __init__(
        self,
        params: Params,
        optimizer_class: Type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        offload_gradients: bool = False,
        minimal_size: int = 4096,
        **kwargs: Any,
    ) -> None:
        if optimizer_class is torch.optim.AdamW:
            kwargs.setdefault("fused", True)
        groups = list(params)
        if not groups:
            raise ValueError("optimizer got an empty parameter list")
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        kept, moved = [], False
        for group in groups:
            group = dict(group)
            given = group["params"]
            members = [given] if isinstance(given, torch.Tensor) else list(given)
            group["params"] = []
            for member in members:
                p = member[1] if isinstance(member, tuple) else member
                if p.device.type == "meta":
                    raise NotImplementedError(
                        f"halfstep: a parameter of shape {tuple(p.shape)} is on {p.device}; call "
                        "to_empty() first"
                    )
                moved |= devices.is_asynchronous(devices.of(p))
                if p.requires_grad:
                    group["params"].append(member)
            if group["params"]:
                kept.append(group)
        if not kept:
            raise ValueError("optimizer got no parameter that requires a gradient")
        self.offload_gradients, self.minimal_size = offload_gradients, minimal_size
        #: the optimizer that does the work
        if moved:
            kwargs.update(offload_gradients=offload_gradients, minimal_size=minimal_size)
            self.optimizer = CPUOffload(kept, _own(optimizer_class), **kwargs)
        else:
            self.optimizer = optimizer_class(kept, **kwargs)

    def __getattr__(self, name):
        # Only called for names that are not found here: defaults, the dictionaries of hooks, and
        # the worker's own methods and attributes.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> List[Dict[str, Any]]:
        """The groups of the optimizer that does the work."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The state of the optimizer that does the work."""
        return self.optimizer.state

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def __getstate__(self):
        return dict(self.__dict__)

    def __setstate__(self, state):
        self.__dict__.update(state)

    def __repr__(self):
        return f"{type(self).__name__} over {self.optimizer!r}"
