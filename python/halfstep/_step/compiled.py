"""The step as one operator of torch.library, in pure Python, so that torch.compile(optimizer.step,
fullgraph=True) can trace it.

The operator takes parameters and gradients and declares that it changes the parameters. It must
change the tensors that it is given, because the compiler may have made copies. A number identifies
the optimizer, and places identify its parameters. States are not inputs of the graph: the optimizer
holds them.
"""

import itertools
import weakref

import torch

_optimizers = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(optimizer):
    """Returns the number by which the operator finds this optimizer in this process, and a witness
    tensor. A copy of an optimizer registers anew."""
    number = next(_numbers)
    _optimizers[number] = optimizer
    return number, torch.zeros(1, dtype=torch.float32, device="cpu")


if hasattr(torch.library, "custom_op"):
    from typing import List

    @torch.library.custom_op("halfstep::step", mutates_args=("params",))
    def _step_op(
        params: List[torch.Tensor], grads: List[torch.Tensor], places: List[int], number: int
    ) -> None:
        optimizer = _optimizers.get(number)
        if optimizer is None:
            raise RuntimeError(
                "halfstep: the optimizer of this compiled step does not exist any more; keep a"
                " reference to it"
            )
        flat = optimizer._parts.groups.params()
        optimizer._step({flat[i]: pair for i, pair in zip(places, zip(params, grads))}, params[-1])

    @_step_op.register_fake
    def _(params, grads, places, number):
        return None


def step(optimizer):
    """Makes the step of an optimizer with compile=True, through the operator."""
    if not hasattr(torch.library, "custom_op"):
        raise RuntimeError("halfstep: compile=True needs torch 2.4 or later")
    params, grads, places = [], [], []
    for i, p in enumerate(optimizer._parts.groups.params()):
        if p.grad is not None:
            params.append(p)
            grads.append(p.grad)
            places.append(i)
    if params:
        params.append(optimizer._witness)
        torch.ops.halfstep.step(params, grads, places, optimizer._number)
