"""Whether a list of tensors is still what it was: type, dtype, device, shape and strides of all in
one call into torch, where comparing them attribute by attribute costs a third of a microsecond a
tensor. That is a sixth of a step of 300 tensors of 16 x 16 (AdamW, int8 states, one thread).

What does it is the part of TorchDynamo that guards compiled graphs, which is not public. So it is
asked whether it can tell tensors apart before it is relied on, and where it is not there, or
cannot, guard() is None and attributes are compared.
"""

import torch

try:
    from torch._C._dynamo.guards import TensorGuards as _Guards
except ImportError:
    _Guards = None


def _make(tensors):
    return _Guards(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],
        dynamic_dims_strides=[list(t.stride()) for t in tensors],
    ).check


def _zeros(*shape):
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _works():
    """It accepts tensors like those that it was made of, and no others."""
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
    """A function of as many tensors that says whether each is of the same kind as these; or None.
    Made and called without gradients."""
    global _checked
    try:
        if _checked is None:
            _checked = _Guards is not None and _works()
        return _make(tensors) if _checked else None
    except (RuntimeError, TypeError, AttributeError, ValueError):  # made otherwise in another torch
        _checked = False
        return None
