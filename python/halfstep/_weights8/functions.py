"""Functions of torch that ask a tensor for the memory of its elements. 8-bit weights have no such
memory. Some of these functions get the stored bytes, and the others are refused. Functions beneath
torch's dispatcher are here; operators.py has operators.
"""

import functools
import sys

import torch
import torch.nn.functional as F

from .._tensors import sharding, torch_private
from .._tensors.torch_public import VERSION
from .views import COMPUTE, Cast, decoded, is_weight, like


def _linear(func, input, weight, bias=None):
    """Runs a linear layer, in the dtype of autocast if that is on. Autocast itself would keep a
    copy of the weight."""
    kind = input.device.type
    if VERSION >= (2, 4) and is_weight(weight) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        if dtype in COMPUTE and dtype != weight.dtype:
            weight = Cast.apply(weight, dtype)
    return func(input, weight, bias)


# ---- Memory --------------------------------------------------------------------------------------


def _refuse(func, *_, **__):
    name = func.__name__
    raise RuntimeError(
        f"halfstep: {name} is refused for 8-bit weights, because their elements are not in memory"
        " as torch says; call it on weight.dequantize() for a copy of the values, or on"
        " weight.packed for the stored bytes"
    )


def _no_interface(func, *_, **__):
    raise AttributeError(
        "halfstep: 8-bit weights have no __cuda_array_interface__, because their elements are not"
        " in memory; take weight.dequantize()"
    )


def refuse_to_unwrap(weight):
    """Raises RuntimeError where torch would make parameters of the bytes, and have them train."""
    if weight.requires_grad and torch_private.unwraps(sys._getframe(2)):
        raise RuntimeError(
            "halfstep: run_decompositions() cannot take apart 8-bit weights that train; call"
            " model.requires_grad_(False) before torch.export.export()"
        )


def _by_bytes_of(func, weight):
    """Asks the stored bytes: for their storage, in a type that says so, or for where it is."""
    return func(weight._stored)


def _storage(func, weight):
    """Returns the storage of the bytes. torch's tracer makes fake memory of the size that it is
    told, so that it gets the storage of the wrapper, which has no memory."""
    return func(weight if torch_private.makes_fake(sys._getframe(2)) else weight._stored)


def _share(func, weight):
    func(weight._stored)
    return weight


def _pin(func, weight, *device):
    return like(weight, func(weight._stored, *device))


def _to_list(func, weight):
    return func(decoded(weight.detach()))


def _format(func, weight, spec):
    return func(weight if weight.dim() else decoded(weight.detach()), spec)


def _by_python(func, weight, *others):
    """Runs a function that calls back for each element."""
    values, *others = (t.dequantize() if is_weight(t) else t for t in (weight, *others))
    func(values, *others)
    return weight.copy_(values) if is_weight(weight) else weight


_Tensor = torch.Tensor
#: functions that do not reach torch's dispatcher, or reach it too late -> what is called instead
calls = {
    F.linear: _linear,
    _Tensor.__format__: _format,
    _Tensor.is_shared: _by_bytes_of,
    _Tensor.storage: _by_bytes_of,
    torch_private.typed_storage: _by_bytes_of,
    _Tensor.untyped_storage: _storage,
    _Tensor.share_memory_: _share,
    _Tensor.pin_memory: _pin,
    _Tensor.tolist: _to_list,
    _Tensor.apply_: _by_python,
    _Tensor.map_: _by_python,
    _Tensor.map2_: _by_python,
    _Tensor.__cuda_array_interface__.__get__: _no_interface,
    _Tensor.data_ptr: _refuse,
    _Tensor.numpy: _refuse,
    _Tensor.__array__: _refuse,
    _Tensor.__dlpack__: _refuse,
}


# ---- Staging of checkpoints ----------------------------------------------------------------------


def _mapped(change, state, copy=None):
    """Returns nested dictionaries and lists with change(tensor, its copy) for each tensor."""
    if isinstance(state, dict):
        return {k: _mapped(change, v, copy and copy[k]) for k, v in state.items()}
    if isinstance(state, (list, tuple)):
        copies = copy or [None] * len(state)
        return type(state)([_mapped(change, v, c) for v, c in zip(state, copies)])
    return change(state, copy) if isinstance(state, torch.Tensor) else copy or state


def _bytes_of(tensor, _):
    return sharding.local(tensor)._stored if sharding.is_packed(tensor) else tensor


def _weight_of(tensor, copy):
    """Returns a copy of the bytes of a weight as a weight."""
    if not sharding.is_packed(tensor):
        return copy
    made = like(sharding.local(tensor).detach(), copy)
    if not sharding.is_dtensor(tensor):
        return made
    whole = tensor.detach()
    torch_private.put_local_part(whole, made)
    return whole


def _by_bytes(stage):
    """Makes a method that copies a state dictionary copy the bytes of 8-bit weights, wherever and
    however it copies others."""

    @functools.wraps(stage)
    def staged(self, state_dict, *args, **kwargs):
        copies = stage(self, _mapped(_bytes_of, state_dict), *args, **kwargs)
        return _mapped(_weight_of, state_dict, copies)

    staged._halfstep = True
    return staged


def follow_stagers():
    """Makes the stagers of torch.distributed.checkpoint copy bytes, once somebody has imported
    them."""
    module = sys.modules.get("torch.distributed.checkpoint.staging")
    for name in ("BlockingAsyncStager", "StateDictStager"):
        cls = getattr(module, name, None)
        if cls is not None and not hasattr(cls.stage, "_halfstep"):
            cls.stage = _by_bytes(cls.stage)
