"""Checks in one call into torch that a list of tensors has kept its types, dtypes, devices, shapes
and strides. Comparing attributes costs a third of a microsecond a tensor. That is a sixth of a step
of 300 tensors of 16 x 16 (AdamW, int8 states, one thread).

The call is the part of TorchDynamo that guards compiled graphs. It is not public, so it is tested
before it is used. If it is missing or cannot tell tensors apart, guard() returns None, and the
caller compares attributes.
"""

import torch

from .._tensors.torch_private import TensorGuards as _Guards


def _make(tensors):
    return _Guards(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],
        dynamic_dims_strides=[list(t.stride()) for t in tensors],
    ).check


def _zeros(*shape):
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _works():
    """Returns True if a check accepts tensors like those that it was made of, and no others."""
    one, two = _zeros(2, 6), _zeros(2, 3).bfloat16()
    others = (
        _zeros(3, 4),
        _zeros(12),
        _zeros(6, 2).T,
        one.double(),
        one.half(),
        _zeros(2, 12)[:, :6],
        torch.nn.Parameter(_zeros(2, 6)),
        None,
    )
    with torch.no_grad():
        check = _make([one, two])
        return bool(
            check(_zeros(2, 6) + 1, _zeros(2, 3).bfloat16() + 1)
            and not any(check(other, two) or check(one, other) for other in others)
        )


_checked = None


def guard(tensors):
    """Returns a function that takes as many tensors and says whether each is of the same kind as
    these. Returns None if torch cannot do it. Both must be called with gradients disabled."""
    global _checked
    try:
        if _checked is None:
            _checked = _Guards is not None and _works()
        return _make(tensors) if _checked else None
    except (RuntimeError, TypeError, AttributeError, ValueError):  # another torch
        _checked = False
        return None
