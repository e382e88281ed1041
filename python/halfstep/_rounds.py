"""Gradient release: steps of one parameter at a time, in the backward pass, and the rounds that
they make up."""

import torch

from ._abi import check
from ._parameters import follow_gradients
from ._release import Rounds, watch_scalers
from ._torch import no_dynamo


class Release:
    """Steps one parameter at a time, in rounds: each parameter once, and then the end.

    hooks       handles of the hooks that step in the backward pass
    released    the parameters that have been stepped in this round
    rounds      what the hooks have seen, or None where somebody else's hooks step
    """

    def __init__(self, groups, placement, cache, accumulation, updates):
        self.groups, self.placement, self.cache = groups, placement, cache
        self.accumulation, self.updates = accumulation, updates
        self.hooks, self.released, self.rounds = [], set(), None

    # ---- Hooks -----------------------------------------------------------------------------------

    def prepare(self, owner, call):
        """Has call(owner, p) run as soon as backward() has the gradient of p."""
        self.remove()
        self.rounds = Rounds()
        watch_scalers()
        self.hooks = follow_gradients(self.groups.params(), owner, call)

    def take(self, p):
        """The gradient of a parameter is complete. Returns whether a step is still to be made."""
        if self.rounds is not None:
            self.rounds.gradient(self.groups, p)
        return not self.placement.released(p, self)

    def add(self, hooks):
        """Takes the handles of hooks that step."""
        self.hooks += hooks

    def discard(self, hooks):
        """Forgets the handles of hooks that were removed. Returns whether some are left."""
        gone = set(map(id, hooks))
        self.hooks = [hook for hook in self.hooks if id(hook) not in gone]
        return bool(self.hooks)

    def remove(self):
        """Removes the hooks."""
        for handle in self.hooks:
            handle.remove()
        self.hooks = []

    def end(self):
        """Back to ordinary steps."""
        self.remove()
        self.rounds = None
        if self.released:
            self.end_round()

    def restart(self):
        """Forgets the round."""
        self.released = set()

    # ---- Steps -----------------------------------------------------------------------------------

    def step_param(self, p):
        """One update of one parameter from its gradient, which stays."""
        grad = self.placement.gradient_of(p)
        if grad is not None:
            self.groups.options.check_mode(self.groups)
            self.step_one(p, grad, self.groups.options.optimizer_accumulation)

    def step_one(self, p, grad, micro):
        """step_param() by a gradient; micro: it goes into the states."""
        engine = self.cache.engine
        if p.numel() == 0 and (engine is None or p not in engine.index_of):
            if not micro:
                self.updates.count_empty(p)
            return
        if engine is not None and (self.released if micro else p in self.released):
            self.end_round()
        ready = self.updates.prepare_one(p, grad, bool(self.released))
        if not micro:
            self.released.add(p)
        self.updates.one(ready, grad, micro)

    @no_dynamo
    @torch.no_grad()
    def step_sent(self, p, grad, micro):
        """step_one() in a thread of its own."""
        self.step_one(p, grad, micro)

    def step_all(self, params, step_param):
        """step() was called: steps what still has a gradient, and ends the round."""
        if self.rounds is not None:  # hooks of others, such as those of halfstep.compat, keep their
            self.rounds.step()  # own rules
        for p in params:
            step_param(p)
        if not self.groups.options.optimizer_accumulation and (
            self.released or self.accumulation.pending
        ):
            self.end_round()
        self.placement.stepped_in_release(params)

    # ---- Rounds ----------------------------------------------------------------------------------

    def end_round(self, dropped=False, partial=False):
        """Ends a round. dropped: it is not followed by a step; partial: not all of its gradients
        came. Of either the norm is none to clip by next."""
        pending = self.accumulation.pending
        waiting = [p for p in pending if p not in self.released] if not dropped else ()
        for p in waiting:
            grad = self.placement.gradient_of(p)
            self.step_one(p, self.accumulation.zeros_for(p) if grad is None else grad, False)
        self.released.clear()
        engine = self.cache.engine
        if engine is not None:
            clipped = self.groups.options.clip_norm
            before = self.cache.told("last_norm") if (dropped or partial) and clipped else None
            check(engine.end_round(bool(clipped)), engine.handle)
            if not engine.asynchronous or before is not None:
                engine.tell(self.groups.param_groups)
            if before is not None:
                for group in self.groups:
                    group["last_norm"] = before

    def zero_grad(self):
        """zero_grad() was called, which ends the round."""
        self.placement.settle()
        dropped = partial = False
        if self.rounds is not None:
            partial = len(self.rounds.seen) < len(self.hooks) and not self.cache.told("last_norm")
            dropped = self.rounds.zero_grad()
        if self.released and not self.groups.options.optimizer_accumulation:
            with torch.no_grad():
                self.end_round(dropped, partial)
