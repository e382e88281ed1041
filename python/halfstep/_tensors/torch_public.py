"""What this package asks of torch's public interface beside tensors: its version, version counters,
the lines that warnings name, and calls that are followed."""

import functools
import os
import sys
import warnings

import torch

#: torch's version as (major, minor)
VERSION = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])


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
