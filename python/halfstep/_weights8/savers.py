"""Lets other packages save models with 8-bit weights.

They write `model.state_dict()` through safetensors, which reads tensors at their address. While a
saver of `_SAVERS` runs, state dictionaries have decoded weights: ordinary tensors in the process's
memory.
"""

import contextlib
import functools
import inspect
import sys

from .._tensors.sharding import is_dtensor, is_packed
from .._tensors.torch_private import after_state_dict
from .._tensors.torch_public import warn_once
from .int8_weight import Int8Weight
from .trainer_bytes import follow_trainer

#: methods that write a model: the module and class that have them, their name, and the attribute of
#: their object that is the model. None: the object itself is
_SAVERS = (
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained", None),
    ("transformers.trainer", "Trainer", "save_model", "model"),
    ("peft.peft_model", "PeftModel", "save_pretrained", None),
    ("diffusers.models.modeling_utils", "ModelMixin", "save_pretrained", None),
    ("huggingface_hub.hub_mixin", "ModelHubMixin", "save_pretrained", None),
)


def prepare():
    """Makes the savers of all packages that are imported by now decode 8-bit weights."""
    for module, cls, name, attribute in _SAVERS:
        _replace(module, cls, name, functools.partial(_decoding, attribute))
    _replace("accelerate.accelerator", "Accelerator", "save_state", _pickling)
    trainer = sys.modules.get("transformers.trainer")
    if hasattr(trainer, "Trainer"):
        follow_trainer(trainer.Trainer)


def _replace(module, cls, name, make):
    """Puts make(method) in the place of a class's method, once."""
    cls = getattr(sys.modules.get(module), cls, None)
    method = vars(cls).get(name) if cls else None
    if method is not None and not hasattr(method, "_halfstep"):
        made = functools.wraps(method)(make(method))
        made._halfstep = True
        setattr(cls, name, made)


def refuse_shards(name, value):
    """Raises ValueError if a weight is sharded."""
    if is_dtensor(value):
        raise ValueError(
            f"halfstep: {name!r} is sharded; collect the state with get_model_state_dict() of"
            " torch.distributed.checkpoint, or save it with torch.distributed.checkpoint"
        )


# ---- Savers that get decoded weights -------------------------------------------------------------


def _decoding(attribute, method):
    """Returns a saver that writes decoded weights."""

    def save(self, *args, **kwargs):
        given = inspect.signature(method).bind(self, *args, **kwargs)
        state = given.arguments.get("state_dict")
        if isinstance(state, dict):
            memo = {}
            given.arguments["state_dict"] = {k: _decoded(v, memo) for k, v in state.items()}
        with decoded_state_dicts(self if attribute is None else getattr(self, attribute), state):
            return method(*given.args, **given.kwargs)

    return save


@contextlib.contextmanager
def decoded_state_dicts(model, state=None):
    """Returns a context in which state dictionaries of a model, and of its parts, have decoded
    weights. `state` is the one that a saver has been given, if it does not ask the model."""
    memo, handles = {}, []

    def decode(module, state, prefix, _):
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            key = prefix + name
            if isinstance(p, Int8Weight) and isinstance(state.get(key), Int8Weight):
                state[key] = _decoded(p, memo)

    for name, p in model.named_parameters() if state is None else ():
        if is_packed(p):
            refuse_shards(name, p)
    try:
        for module in model.modules():
            if any(isinstance(p, Int8Weight) for p in module.parameters(recurse=False)):
                handles.append(after_state_dict(module, decode))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _decoded(value, memo):
    """Returns a weight as an ordinary tensor in the process's memory, the same tensor for all names
    of a weight. Returns anything else as it is."""
    if not isinstance(value, Int8Weight):
        return value
    place = value.packed.data_ptr(), value.shape, value.stride()
    if place not in memo:
        memo[place] = value.detach().dequantize().cpu()
    return memo[place]


# ---- Savers that get the bytes -------------------------------------------------------------------


def _pickling(method):
    """Returns Accelerator.save_state(), which pickles a model with 8-bit weights, because its
    load_state() has to bring the bytes back that belong to the optimizer's states."""

    def save_state(self, *args, **kwargs):
        given = inspect.signature(method).bind(self, *args, **kwargs)
        given.apply_defaults()
        quantized = (is_packed(p) for model in self._models for p in model.parameters())
        if given.arguments.get("safe_serialization") and any(quantized):
            given.arguments["safe_serialization"] = False
            warn_once(
                "save_state() writes a model with 8-bit weights as pytorch_model.bin, which"
                " load_state() finds, because a safetensors file would not have their bytes. Give"
                " it safe_serialization=False to say so yourself"
            )
        return method(*given.args, **given.kwargs)

    return save_state
