"""What the modules of this folder share."""

from typing import Any, Iterable

import torch

from .._step import release
from .._tensors.parameters import follow_gradients
from ..optimizer import Optimizer

#: names in locals() that are not handed on under their own name
_OWN = frozenset(("self", "params", "options", "__class__"))


def arguments(names, *without):
    """Returns the arguments of the calling function by name. `names` is its locals(), taken before
    it has variables of its own. Leaves out `self`, `params`, `**options` and those in `without`."""
    return {k: v for k, v in names.items() if k not in _OWN and k not in without}


class ReleasedByModel(Optimizer):
    """Base of optimizers whose gradient release is hooks that a function puts on a model."""

    def prepare_gradient_release(self) -> None:
        """Puts hooks on all parameters of this optimizer. The module has a function that takes a
        model's parameters."""
        if not self.gradient_release:
            super().prepare_gradient_release()
        elif not self._parts.release.hooks:
            self.gradient_release = False  # a copy: the hooks stay with the original

    def _begin_release(self, params, call):
        """Makes backward() run call(optimizer, p) as soon as it has the gradient of p, which is to
        make the step. Returns the handles of the hooks."""

        def step(held, p):
            if p.grad is not None and held._parts.release.has(p):
                release.check_not_scaled()
                call(held, p)

        release.watch_scalers()
        hooks = follow_gradients(params, self, step, release.OPTIMIZER)
        self._parts.release.hooks += hooks
        self.gradient_release = bool(self._parts.release.hooks)
        return hooks

    def _end_release(self, hooks):
        """Removes these hooks. Without any others steps are ordinary again."""
        if not self._parts.release.discard(hooks):
            self.remove_gradient_release()


def start_from_zeros(groups: Any, parameters: Iterable[torch.Tensor], also: Any) -> None:
    """Makes the momentum of SGD begin with (1 - dampening) times the gradient, in before_build().
    The library's first buffer is the gradient itself. Parameters that are about to get states
    therefore get a count of one update, as if of a buffer of zeros."""
    for p in parameters:
        wanted = (
            p.grad is not None
            or (also and p in also)
            or (groups.options.gradient_release and p.requires_grad)
        )
        if wanted and p not in groups.state:
            groups.state[p]["step"] = torch.ones((), dtype=torch.float32, device="cpu")
