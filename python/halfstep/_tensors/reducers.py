"""Finds wrappers that average gradients after the hooks of gradient release have run.

A parameter does not know that DistributedDataParallel wraps its model, and no node of a graph shows
the hooks of the reducer. So each wrapper is noted when it is made. From the first gradient release
on it is also noted when it is called, because it may be older than the import of this package.
"""

import weakref

import torch

from .torch_private import follow, no_dynamo

_Wrapper = torch.nn.parallel.DistributedDataParallel
_wrappers = weakref.WeakSet()
#: how many wrappers have been noted so far
known = 0


@no_dynamo
def _note(wrapper, found, /, *_, **__):
    global known
    if wrapper not in _wrappers:
        _wrappers.add(wrapper)
        known += 1
    return found


def watch_calls():
    """From now on also notes wrappers when they are called."""
    follow(_Wrapper, "forward", _note)


def check(params):
    """Raises RuntimeError if the gradient of one of these parameters belongs to a wrapper."""
    own = set(map(id, params)) if torch.distributed.is_initialized() else ()
    for wrapper in list(_wrappers) if own else ():
        for name, p in wrapper.module.named_parameters():
            if id(p) in own:
                raise RuntimeError(
                    f"halfstep: gradient release would take the gradient of {name!r} before"
                    " DistributedDataParallel has averaged it, and ranks would diverge: use"
                    " gradient_release=False, or fully_shard()"
                )


follow(_Wrapper, "__init__", _note)
