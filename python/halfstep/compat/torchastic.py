"""The interface of torchastic (0.1.2): AdamW, Compass, LPFAdamW and RMSProp with weights and states
in BF16, every one of them rounded stochastically, and the `StochasticAccumulator`.

    from halfstep.compat.torchastic import Compass, StochasticAccumulator

BF16 parameters get `bf16-sr` weights and all parameters `bf16-sr` states, as there; float32
parameters, which the package refuses, are accepted and stay float32. Random bits are halfstep's: a
function of seed, parameter name, step and position; torch's global generator gives the seed, once.
Where the arithmetic differs:

* Weight decay of `AdamW` and `Compass` is lr * weight_decay in every step. The package divides it
  by 1 - beta1 ** step, which makes it ten (Compass: a hundred) times too strong in the first step.
* `Compass` steps by lr from the start, and the average is debiased before it amplifies. The package
  divides lr by 1 - beta1 ** step, and so begins with steps a hundred times too long. A group with
  `"published": True` does that too.
* `LPFAdamW` is the package's arithmetic, including the decay, with steps of lr from the start. With
  `"published": False` in a group the average is debiased before it amplifies, and the decay is not
  divided.
* `centralization`, a factor in [0, 1], acts on parameters of two or more dimensions. The package
  also subtracts the mean of vectors, and sets scalars to zero.
"""

from typing import Any, List, Tuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .._settings.options import Options
from ..accumulate import GradientAccumulator, complain
from ..optimizer import Optimizer, Params
from ._common import arguments

__all__ = ["Compass", "RMSProp", "AdamW", "LPFAdamW", "StochasticAccumulator"]


class _Stochastic(Optimizer):
    """Common base of the four classes. Group options keep the package's names. `weights` and
    `states` may be set by group."""

    #: names in the package's saved states -> names here
    _state_names = {"ema": "exp_avg", "ema_squared": "exp_avg_sq"}

    def __init__(self, params, defaults):
        super().__init__(params, defaults, states="bf16-sr", decay="decoupled")

    class _options(Options):
        def hypers(self, group):
            hypers = super().hypers(group)
            hypers["centralize"] = float(group["centralization"])
            if "amp_fac" in group:
                hypers["amplify"] = float(group["amp_fac"])
            return hypers

    def load_state_dict(self, state_dict):
        """Loads halfstep's state dictionaries, and those that torchastic saved."""
        states = {
            key: {self._state_names.get(name, name): value for name, value in state.items()}
            for key, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": states})


class Compass(_Stochastic):
    """The gradient, amplified by `amp_fac` times its average, over the root of its own second
    moment."""

    rule = "compass"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.99, 0.999),
        amp_fac: float = 5,
        eps: float = 1e-8,
        weight_decay: float = 0,
        centralization: float = 0,
    ) -> None:
        super().__init__(params, {**arguments(locals()), "published": False})


class LPFAdamW(_Stochastic):
    """AdamW on gradients that are amplified by `amp_fac` times their low-passed version
    (betas[0])."""

    rule = "lpfadamw"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: Tuple[float, float, float] = (0.9, 0.9, 0.999),
        amp_fac: float = 2,
        eps: float = 1e-8,
        weight_decay: float = 0,
        centralization: float = 0,
    ) -> None:
        super().__init__(params, {**arguments(locals()), "published": True})


class AdamW(_Stochastic):
    """AdamW."""

    rule = "adamw"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        centralization: float = 0,
    ) -> None:
        super().__init__(params, arguments(locals()))


class RMSProp(_Stochastic):
    """The gradient over the root of its debiased second moment, with decoupled decay."""

    rule = "rmsprop"
    _state_names = {"ema_squared": "square_avg"}

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        beta: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0,
        centralization: float = 0,
    ) -> None:
        super().__init__(params, arguments(locals()))

    class _options(_Stochastic._options):
        def hypers(self, group):
            return {**super().hypers(group), "alpha": float(group["beta"]), "debias": 1.0}


#: (accumulator, index in it) of each parameter that assign_hooks() has seen
_accumulators = WeakIdKeyDictionary()


class StochasticAccumulator:
    """Sums gradients over backward passes in BF16, rounded stochastically. This is
    halfstep.GradientAccumulator under the package's names.

        StochasticAccumulator.assign_hooks(model)
        ...
        for _ in range(grad_accum_length):
            loss.backward()
        StochasticAccumulator.reassign_grad_buffer(model)
        optimizer.step()

    float32 parameters work too, and get their sum as float32; the package cannot give it back.
    `seed` and `missing` are attributes of the class. `assign_hooks` reads the seed. If a parameter
    has no gradient, `reassign_grad_buffer` raises an error, as the package does, or leaves it
    without (`missing = "skip"`).
    """

    seed = None
    missing = "error"

    @staticmethod
    def stochastic_grad_accum(p: torch.Tensor) -> None:
        """Moves p.grad into the parameter's sum. The hooks do this."""
        if p not in _accumulators:
            _accumulators[p] = GradientAccumulator([p], seed=StochasticAccumulator.seed), 0
        accumulator, index = _accumulators[p]
        accumulator._take(index, p)

    @staticmethod
    def reassign_grad_buffer(model: torch.nn.Module) -> None:
        """Hands the sums back as the gradients of the model's parameters. If a gradient is missing,
        nothing changes."""
        ours, without = {}, []
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        for name, p in trainable:
            found = _accumulators.get(p)
            if found is not None:
                ours.setdefault(id(found[0]), (found[0], []))[1].append(found[1])
            elif p.grad is None:
                without.append(name)
        if trainable and not ours:
            raise RuntimeError(
                "halfstep: StochasticAccumulator.assign_hooks() was not called for this model"
            )
        if StochasticAccumulator.missing != "skip":
            complain(
                without
                + [
                    name
                    for accumulator, indices in ours.values()
                    for name in accumulator._without(indices)
                ]
            )
        for accumulator, indices in ours.values():
            accumulator._hand_back(indices)

    @staticmethod
    def assign_hooks(model: torch.nn.Module) -> List[Any]:
        """Puts a hook on each parameter that requires a gradient; those that have one keep it.
        Returns their handles."""
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        fresh = [(name, p) for name, p in trainable if p not in _accumulators]
        if fresh:
            accumulator = GradientAccumulator(fresh, seed=StochasticAccumulator.seed)
            for index, (_, p) in enumerate(fresh):
                _accumulators[p] = accumulator, index
        hooks = []
        for _, p in trainable:
            accumulator, index = _accumulators[p]
            accumulator.attach()
            hooks.append(accumulator._hooks[index])
        return hooks
