"""What the callbacks of trainers share: averages that take the place of a model's weights."""

from __future__ import annotations

import torch

from .._tensors.sharding import is_dtensor
from ..ema import EMA
from ._text import read


def is_first():
    """Returns True on the rank that writes files."""
    dist = torch.distributed
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def gathered(tensors, keep):
    """Returns tensors by name, with whole ones in CPU memory in place of DTensors. All ranks call
    it. Those without `keep` get no DTensors, and have one whole tensor at a time."""
    found = {}
    for name, tensor in tensors.items():
        whole = tensor.detach().full_tensor() if is_dtensor(tensor) else None
        if whole is None or keep:
            found[name] = tensor if whole is None else whole.cpu()
    return found


class Averages:
    """Averages of the weights of a model in training, made when training begins.

    ema    the halfstep.EMA, or None before
    """

    def __init__(self, decay, options):
        self.options = read(EMA, options)
        self.decay = read(EMA, {"decay": decay})["decay"]
        self.ema = self.model = self.optimizer = self._context = None

    @property
    def are_in(self):
        """True while the averages are in the model."""
        return self._context is not None

    def begin(self, model, optimizer, saved=None):
        """Makes the averages of a model unless they are there. `saved` is their state_dict() to go
        on with."""
        for one in optimizer if isinstance(optimizer, list) else [optimizer]:
            if callable(getattr(type(one), "eval", None)):
                raise ValueError(
                    f"halfstep: {type(one).__name__} has averages of its own, which its eval() puts"
                    " into the model: leave EMACallback out, or take another rule"
                )
        self.take_out()
        known = self.ema is not None and self.model is model
        self.model, self.optimizer = model, optimizer
        if not known or saved is not None:
            self.ema = EMA(model, self.decay, **self.options)
        if saved is not None:
            self.ema.load_state_dict(saved)

    def update(self):
        """Moves the averages towards the weights, after a step."""
        self.take_out()
        self.ema.update_parameters(self.model, self.optimizer)

    def put_in(self):
        """Puts the averages into the model, if there are some yet."""
        if not self.are_in and self.ema is not None and int(self.ema.n_averaged):
            self._context = self.ema.swapped(self.model)
            self._context.__enter__()

    def take_out(self):
        """Puts the model's own weights back."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)
