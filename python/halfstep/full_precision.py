"""Weights in fp32 with their residuals or error codes, for a model that leaves a split format."""

from collections.abc import Mapping
from typing import Iterable, Union

import torch

from ._tensors.sharding import decoded
from .optimizer import Optimizer, several

__all__ = ["full_precision_state_dict"]


class _Lazy(Mapping):
    """A state dictionary that decodes each weight to fp32 when it is asked for, and does not keep
    it."""

    def __init__(self, held, owners):
        self._held, self._owners = held, owners

    def __getitem__(self, key):
        value = self._held[key]
        owner = self._owners.get(id(value))
        if owner is not None:
            return owner.read_weight(value)
        if not isinstance(value, torch.Tensor):
            return value
        return decoded(value) if value.is_floating_point() else value.detach().clone()

    def __iter__(self):
        return iter(self._held)

    def __len__(self):
        return len(self._held)


def full_precision_state_dict(
    model: torch.nn.Module, optimizer: Union[Optimizer, Iterable[Optimizer]], lazy: bool = False
) -> Mapping:
    """Returns `model.state_dict()` with every weight in fp32, as training knew it. Kahan residuals
    and error codes are added to the weights that `optimizer` (one, or several) keeps them beside.

    Other floating-point tensors are converted, and whole numbers are copied. A tied weight is one
    tensor under each of its names.

    lazy: returns a mapping that decodes each weight when it is asked for, so that no second model
    has to fit beside the first:

        for name, weight in halfstep.full_precision_state_dict(model, opt, lazy=True).items(): ...

    `model.save_pretrained(folder, state_dict=halfstep.full_precision_state_dict(model, opt))`
    writes it with transformers.
    """
    optimizers = several(optimizer)
    owners = {
        id(p): one for one in optimizers for group in one.param_groups for p in group["params"]
    }
    found = _Lazy(model.state_dict(keep_vars=True), owners)
    if lazy:
        return found
    out, decoded = {}, {}
    for name, value in found._held.items():
        if id(value) not in decoded:
            decoded[id(value)] = found[name]
        out[name] = decoded[id(value)]
    return out
