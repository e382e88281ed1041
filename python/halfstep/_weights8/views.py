"""How a wrapper of packed bytes looks like a strided tensor.

A wrapper has the shape, strides and storage offset that a tensor of decoded values would have. So
torch itself works out what a view of it is. The bytes are whole rows, in `_stored`.
"""

import itertools

import torch
import torch.utils.checkpoint
from torch.fx.experimental import proxy_tensor

from .._tensors.parameters import PLAIN
from .._tensors.torch_private import guard_memory, make_wrapper
from .blocks import unpack

#: dtypes that layers may compute in; a step takes those of PLAIN
COMPUTE = (*PLAIN, torch.float64)
#: says that a compiled graph makes something again, or None if this torch cannot be told so
_AGAIN = getattr(getattr(torch.utils.checkpoint, "CheckpointPolicy", None), "MUST_RECOMPUTE", None)
#: returns what records a graph, or None
_recorder = getattr(proxy_tensor, "get_proxy_mode", lambda: None)


def is_weight(value):
    """Returns True for an Int8Weight."""
    return isinstance(value, torch.Tensor) and hasattr(type(value), "packed")


def wrap(cls, stored, format, row_length, dtype, size, stride, offset):
    """Returns a weight of any strides over stored rows."""
    weight = make_wrapper(
        cls, size, strides=stride, storage_offset=offset, dtype=dtype, device=stored.device
    )
    guard_memory(weight)
    weight._stored, weight.format, weight.row_length = stored, format, row_length
    return weight


def like(weight, stored=None, dtype=None, view=None):
    """Returns a weight with other bytes, another dtype, or the strides of a view."""
    view = weight if view is None else view
    return wrap(
        type(weight),
        weight._stored if stored is None else stored,
        weight.format,
        weight.row_length,
        dtype or weight.dtype,
        view.shape,
        view.stride(),
        view.storage_offset(),
    )


def rows_like(weight, packed, dtype=None):
    """Returns packed rows as a weight of the same kind."""
    return type(weight)(packed, weight.format, weight.row_length, dtype or weight.dtype)


def span(weight):
    """Returns the first row that a view reaches into, and the number of such rows."""
    first = weight.storage_offset() // weight.row_length
    if not weight.numel():
        return first, 0
    reach = sum((n - 1) * stride for n, stride in zip(weight.shape, weight.stride()))
    return first, (weight.storage_offset() + reach) // weight.row_length + 1 - first


def is_rows(weight):
    """Returns True for whole rows, as they are stored."""
    length = weight.row_length
    return (
        weight.dim() == 2
        and weight.shape[1] == length
        and weight.stride() == (length, 1)
        and weight.storage_offset() % length == 0
    )


def parted(weight):
    """Returns what wrap() makes a weight of, with no other rows than those of a view."""
    offset = weight.storage_offset() - span(weight)[0] * weight.row_length
    what = weight.packed, weight.format, weight.row_length, weight.dtype
    return (*what, tuple(weight.shape), weight.stride(), offset)


def strided(weight, rows):
    """Returns a view of the decoded rows of a weight that has its shape and strides."""
    offset = weight.storage_offset() - span(weight)[0] * weight.row_length
    return rows.as_strided(weight.shape, weight.stride(), offset)


def decoded(weight, dtype=None):
    """Returns the values of a weight, an ordinary tensor of its shape and strides."""
    dtype = dtype or weight.dtype
    rows = _recomputed(unpack, weight.packed, weight.row_length, dtype)
    if is_rows(weight):
        return rows
    if (
        weight.dim() == 2
        and rows.shape == weight.shape[::-1]
        and rows.stride(0) == weight.stride(1)
    ):
        return rows.t()
    return strided(weight, rows)


def _recomputed(function, packed, *args):
    """Calls a function. A graph that is being compiled calls it again in the backward pass, where
    it would otherwise keep the decoded weight from the forward pass on."""
    mode = None if type(packed) is torch.Tensor else _recorder()
    if mode is None or _AGAIN is None:
        return function(packed, *args)
    nodes = mode.tracer.graph.nodes
    before = len(nodes)
    made = function(packed, *args)
    for node in itertools.islice(reversed(nodes), len(nodes) - before):
        node.meta["recompute"] = _AGAIN
    return made


class Cast(torch.autograd.Function):
    """Returns the same bytes as a weight of another dtype."""

    @staticmethod
    def forward(ctx, weight, dtype):
        ctx.dtype = weight.dtype
        return like(weight, dtype=dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype), None
