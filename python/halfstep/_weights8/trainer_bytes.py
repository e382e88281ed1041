"""The bytes of 8-bit weights in an optimizer's state, for transformers' Trainer.

Its model files have decoded values (savers.py). Loading such a file rounds the values anew, so
that other bytes come out, to which the error codes in the state do not belong.
"""

import os
import weakref

import torch

from .._tensors.torch_public import follow, unwrapped, warn
from . import blocks
from .int8_weight import Int8Weight

#: their key in a state dictionary
_KEY = "packed_weights"
#: optimizers that save the bytes
_followed = weakref.WeakSet()


def follow_trainer(cls):
    """Makes Trainer save the bytes with the optimizer that it uses, and put them back."""
    follow(cls, "create_optimizer", _keep)
    follow(cls, "_load_best_model", _after_best)


def _weights(optimizer):
    """Returns the 8-bit weights of an optimizer, by their place among its parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {i: p for i, p in enumerate(params) if isinstance(p, Int8Weight)}


def _keep(trainer, made, /, *_, **__):
    optimizer, args = unwrapped(trainer.optimizer), trainer.args
    if _weights(optimizer) and optimizer not in _followed:
        if args.load_best_model_at_end and args.save_only_model:
            raise ValueError(
                "halfstep: with save_only_model=True, load_best_model_at_end would round 8-bit"
                " weights again, because their bytes are saved beside the optimizer's states; set"
                " save_only_model=False, or load_best_model_at_end=False"
            )
        _followed.add(optimizer)
        optimizer.register_state_dict_post_hook(_add)
        optimizer.register_load_state_dict_pre_hook(_take)
    return made


def _add(optimizer, state):
    state[_KEY] = {i: p.detach().packed for i, p in _weights(optimizer).items()}


def _take(optimizer, state):
    _put_back(_weights(optimizer), state.get(_KEY, {}))
    return {key: value for key, value in state.items() if key != _KEY}


def _after_best(trainer, made, /, *_, **__):
    held = _weights(unwrapped(trainer.optimizer))
    path = os.path.join(trainer.state.best_model_checkpoint, "optimizer.pt")
    if held:
        saved = {}
        if os.path.exists(path):
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        _put_back(held, saved.get(_KEY, {}))
    return made


@torch.no_grad()
def _put_back(held, saved):
    """Gives weights the bytes that were saved, if they are what loading the decoded values of these
    bytes gives. Leaves all others alone, and warns."""
    strangers = 0
    for place, p in held.items():
        packed = saved.get(place)
        if packed is not None and packed.shape == p.packed.shape:
            packed = packed.to(p.device)
            if torch.equal(packed, p.packed):
                continue
            loaded = p.packed.clone()
            blocks.store(loaded, p.row_length, blocks.unpack(packed, p.row_length, p.dtype))
            if torch.equal(loaded, p.packed):
                p.packed.copy_(packed)
                continue
        strangers += 1
    if strangers:
        warn(
            f"the bytes of {strangers} 8-bit weights were not saved beside the optimizer's states,"
            " or belong to other weights than the model has. These weights stay what the model's"
            " file gave, rounded to nearest"
        )
