"""The parts of torch that this package uses beside tensors: its version, its compiler, its version
counters, and hooks on its methods."""

import functools
import os
import sys
import warnings
from typing import Any, Callable, TypeVar

import torch

#: torch's version as (major, minor)
VERSION = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])

_disable = getattr(torch, "_disable_dynamo", None) or torch.compiler.disable
_Function = TypeVar("_Function", bound=Callable[..., Any])


#: is_compiling() is True where TorchDynamo traces the caller
is_compiling = getattr(torch.compiler, "is_dynamo_compiling", None) or torch._utils.is_compiling


def no_dynamo(function: _Function) -> _Function:
    """Keeps TorchDynamo out of a function."""
    return _disable(function)


def increment_versions(tensors):
    """Tells autograd that these tensors were changed, so that it notices if it has saved one of
    them."""
    if VERSION >= (2, 5):
        torch.autograd.graph.increment_version(tensors)
    else:  # older ones take one at a time
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


def caller():
    """Returns the `stacklevel` for a warning of the calling function. The warning then names the
    first line outside this package and torch."""
    ours = tuple(
        os.path.dirname(os.path.abspath(file)) + os.sep
        for file in (sys.modules["halfstep"].__file__, torch.__file__)
    )
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(ours):
        frame, level = frame.f_back, level + 1
    return level


def warn(text, kind=UserWarning):
    """Warns in the name of the first line outside this package and torch."""
    warnings.warn(f"halfstep: {text}", kind, stacklevel=caller())


@functools.lru_cache(None)
def warn_once(text):
    """Warns as warn() does, the first time in this process that it has this text."""
    warn(text + ". This warning is given once")


def unwrapped(wrapper):
    """Returns the optimizer of torch inside of wrappers that keep it as `.optimizer`, as those of
    Accelerate and Lightning do. Returns an optimizer without a wrapper as it is."""
    inner = getattr(wrapper, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else wrapper


def follow(cls, name, then):
    """Makes each call of a method of one of torch's classes go on with then(object, result,
    *arguments). The caller gets the result of `then`. Does nothing if `then` follows the method
    already."""
    method = vars(cls).get(name)
    followers = getattr(method, "_halfstep", ())
    if method is None or then in followers:
        return

    @functools.wraps(method)
    def followed(self, /, *args, **kwargs):
        return then(self, method(self, *args, **kwargs), *args, **kwargs)

    followed._halfstep = (*followers, then)
    setattr(cls, name, followed)


# ---- Steps without memory ------------------------------------------------------------------------

try:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    from torch.utils._python_dispatch import TorchDispatchMode

    #: what torch raises where a step asks for the value of a tensor without memory. It raises
    #: UnsupportedOperatorException for an operator of others that knows no such tensors
    NO_VALUE = (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
    )
except ImportError:
    #: without them halfstep.fit raises RuntimeError, and nothing else is lost
    FakeTensorMode, TorchDispatchMode, NO_VALUE = None, object, ()  # type: ignore[assignment]
    UnsupportedOperatorException = ()  # type: ignore[assignment]


def has_blocks(dtype):
    """Returns True if convolutions of a dtype run in oneDNN on this processor. Where torch does not
    tell, only those of fp32 do."""
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    ask = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return ask is not None and ask()


def in_backward():
    """Returns True inside a backward pass. Where torch does not tell it is False, and a trace then
    counts what a backward pass allocates as activations."""
    ask = getattr(torch._C, "_current_graph_task_id", None)
    return ask is not None and ask() >= 0
