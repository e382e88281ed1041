"""The hooks of gradient release, which step in the backward pass, and checks of that pass: whether
somebody else needs the gradients, whether a GradScaler has scaled them, and whether they come in
parts, as with reentrant checkpointing.

DistributedDataParallel averages gradients after these hooks have run. A parameter does not know of
such a wrapper, and no node of a graph shows its hooks. So each wrapper is noted when it is made.
From the first gradient release on it is also noted when it is called, because it may be older than
the import of this package.
"""

import sys
import weakref

import torch

from .._tensors import devices
from .._tensors.parameters import follow_gradients, take_over
from .._tensors.torch_private import after_backward, backward_pass, gradient_hooks, no_dynamo
from .._tensors.torch_public import follow

#: kind of the owners of hooks of gradient release
OPTIMIZER = "optimizer with gradient release"
#: number of the backward pass that began at a loss which a GradScaler had scaled, or None
_scaled_pass = None
_Wrapper = torch.nn.parallel.DistributedDataParallel
_wrappers = weakref.WeakSet()
#: how many wrappers have been noted so far
noted = 0


def check_release(rule, title):
    """Raises ValueError for a rule that cannot step one parameter at a time."""
    if rule.totals:
        raise ValueError(
            f"halfstep: {title} has no gradient release: its update needs sums over the gradients"
            " of all tensors first"
        )


def _is_nested():
    """Returns True if the caller runs in a backward pass that another one has begun, as reentrant
    checkpointing does."""
    applied = getattr(torch.autograd.function.BackwardCFunction.apply, "__code__", None)
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is applied:
            return True
        frame = frame.f_back
    return False


def _note_scaled(grad):
    global _scaled_pass
    _scaled_pass = backward_pass()
    after_backward(_forget_scaled)


def _forget_scaled():
    """Forgets the scaled pass, which has ended or is given up."""
    global _scaled_pass
    _scaled_pass = None


def _scaled(scaler, found, outputs):
    """Makes the result of GradScaler.scale() note the backward pass that begins at it."""
    if scaler.is_enabled():
        found = found if isinstance(found, torch.Tensor) else type(outputs)(found)
        for tensor in (found,) if isinstance(found, torch.Tensor) else found:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(_note_scaled)
    return found


def watch_scalers():
    """From now on notes losses that a GradScaler scales, because nothing in a gradient, a parameter
    or a graph shows it afterwards."""
    sharded = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    for scaler in (devices.scaler(), getattr(sharded, "ShardedGradScaler", None)):
        if scaler is not None:
            follow(scaler, "scale", _scaled)


def check_not_scaled():
    """Raises RuntimeError inside a backward pass that a GradScaler has scaled."""
    if _scaled_pass is not None and (_scaled_pass == backward_pass() or _is_nested()):
        _forget_scaled()
        raise RuntimeError(
            "halfstep: the loss was scaled by a GradScaler, but gradient release steps each"
            " gradient in the backward pass, before the scaler can unscale it. Call backward() on"
            " the loss itself (BF16 needs no GradScaler), or use gradient_release=False"
        )


@no_dynamo
def _note(wrapper, found, /, *_, **__):
    global noted
    if wrapper not in _wrappers:
        _wrappers.add(wrapper)
        noted += 1
    return found


follow(_Wrapper, "__init__", _note)


def check_wrappers(params):
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


class Rounds:
    """What the hooks of gradient release have seen since step() or zero_grad() was called. Detects
    gradients that somebody else still needs."""

    def __init__(self):
        #: by the id of a parameter: True if its gradient came in a nested backward pass
        self.seen = {}
        #: again: gradients that came a second time; parts: those that a nested backward pass
        #: brought
        self.again = self.parts = 0
        self.stepped = False
        #: how many wrappers were known at the last check
        self.looked = 0
        follow(_Wrapper, "forward", _note)

    def gradient(self, groups, p):
        """Checks a gradient that is about to be taken. Raises RuntimeError if somebody else still
        needs it."""
        if self.looked != noted:
            check_wrappers(groups.params())
            self.looked = noted
        check_not_scaled()
        if groups.options.optimizer_accumulation:
            return
        nested = _is_nested()
        if id(p) in self.seen:
            self.again += 1
            self.parts += nested or self.seen[id(p)]
            if self.stepped:
                raise RuntimeError(self._what("another backward() came before step()"))
            self.seen.clear()
        self.seen[id(p)] = nested

    def step(self):
        """Ends the round, because step() was called. From now on step() ends rounds. Raises
        RuntimeError if a gradient came twice."""
        again = self.again
        what = self._what(f"{again + 1} backward passes came before the first step()")
        self.drop()
        self.stepped = True
        if again:
            raise RuntimeError(what)

    def drop(self):
        """Ends the round."""
        _forget_scaled()
        self.again = self.parts = 0
        self.seen.clear()

    def zero_grad(self):
        """Ends the round, because zero_grad() was called. Returns True if the whole round was
        dropped, which is so if step() ends rounds. Raises RuntimeError if a gradient came in
        parts."""
        what = self._what("") if self.parts else None
        self.drop()
        if what:
            raise RuntimeError(what)
        return self.stepped

    def _what(self, found):
        if self.parts:
            return (
                "halfstep: the gradient of a parameter came in parts, and gradient release would"
                " take each part for an update. Reentrant checkpointing (use_reentrant=True) of a"
                " shared parameter does so. Use use_reentrant=False, or gradient_release=False"
            )
        return (
            f"halfstep: {found}, but in gradient release each backward() is an update. To"
            " accumulate gradients, set optimizer.optimizer_accumulation = True during all"
            " micro-batches but the last, or use gradient_release=False. A trainer's"
            " gradient_accumulation_steps or accumulate_grad_batches must be 1; after a batch whose"
            " backward() failed call optimizer.zero_grad(). If another optimizer steps these"
            " parameters by now, call remove_gradient_release() of this one"
        )


class Release:
    """The hooks on an optimizer's parameters that step in the backward pass.

    hooks     their handles
    rounds    what the hooks have seen, or None if somebody else's hooks step
    """

    def __init__(self, parts):
        self.groups = parts.groups
        self.hooks, self.rounds = [], None
        # The ids of all parameters, as they were at the first gradient of the last backward pass.
        self._ids, self._pass = set(), None

    def prepare(self, owner, call):
        """Makes backward() run call(owner, p) as soon as it has the gradient of p."""
        self.remove()
        self.rounds = Rounds()
        watch_scalers()
        take_over(self.groups.params(), owner, OPTIMIZER)
        self.hooks = follow_gradients(self.groups.params(), owner, call, OPTIMIZER)

    def has(self, p):
        """Returns False for a parameter that was removed from the groups since its hook was put.
        Its gradient stays, as torch's optimizers leave it."""
        now = backward_pass()
        if now in (None, -1) or now != self._pass:
            self._ids, self._pass = set(map(id, self.groups.params())), now
        return id(p) in self._ids

    def takes(self, p):
        """Returns True if the complete gradient of a parameter is to be taken. Removes the hook of
        a parameter that is in no group any more."""
        if not self.has(p):
            hooks = [h for h in self.hooks if h.hooks_dict_ref() is gradient_hooks(p)]
            self.discard(hooks)
            return False
        if self.rounds is not None:
            self.rounds.gradient(self.groups, p)
        return True

    def discard(self, hooks):
        """Removes some of the hooks. Returns True if others are left."""
        gone = set(map(id, hooks))
        for hook in hooks:
            hook.remove()
        self.hooks = [hook for hook in self.hooks if id(hook) not in gone]
        return bool(self.hooks)

    def remove(self):
        """Removes the hooks."""
        self.discard(self.hooks)
        self.rounds = None
