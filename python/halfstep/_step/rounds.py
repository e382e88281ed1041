"""Gradient release: steps one parameter at a time in the backward pass, in rounds."""

import torch

from .._tensors.parameters import follow_gradients, take_over
from .._tensors.torch_private import backward_pass, gradient_hooks, no_dynamo
from .release import OPTIMIZER, Rounds, watch_scalers


class Release:
    """Steps one parameter at a time. A round steps each parameter once, and then ends.

    hooks       handles of the hooks that step in the backward pass
    released    the parameters that have been stepped in this round
    rounds      what the hooks have seen, or None if somebody else's hooks step
    """

    def __init__(self, groups, placement, cache, accumulation, updates):
        self.groups, self.placement, self.cache = groups, placement, cache
        self.accumulation, self.updates = accumulation, updates
        self.hooks, self.released, self.rounds = [], set(), None
        # The ids of all parameters, as they were at the first gradient of the last backward pass.
        self._ids, self._pass = set(), None

    # ---- Hooks -----------------------------------------------------------------------------------

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

    def take(self, p):
        """Takes the complete gradient of a parameter. Returns True if a step is still to be
        made."""
        if not self.has(p):
            hooks = [h for h in self.hooks if h.hooks_dict_ref() is gradient_hooks(p)]
            for hook in hooks:
                hook.remove()
            self.discard(hooks)
            return False
        if self.rounds is not None:
            self.rounds.gradient(self.groups, p)
        return not self.placement.released(p, self)

    def add(self, hooks):
        """Adds the handles of hooks that step."""
        self.hooks += hooks

    def discard(self, hooks):
        """Forgets the handles of hooks that were removed. Returns True if some are left."""
        gone = set(map(id, hooks))
        self.hooks = [hook for hook in self.hooks if id(hook) not in gone]
        return bool(self.hooks)

    def remove(self):
        """Removes the hooks."""
        for handle in self.hooks:
            handle.remove()
        self.hooks = []

    def end(self):
        """Goes back to ordinary steps."""
        self.remove()
        self.rounds = None
        if self.released:
            self.end_round()

    def restart(self):
        """Forgets the round."""
        self.released = set()

    # ---- Steps -----------------------------------------------------------------------------------

    def step_param(self, p):
        """Updates one parameter from its gradient, which stays."""
        grad = self.placement.gradient_of(p)
        if grad is not None:
            self.groups.options.check_mode(self.groups)
            self.step_one(p, grad, self.groups.options.optimizer_accumulation)
            self.placement.stepped_alone(p)

    def step_one(self, p, grad, micro):
        """Does the work of step_param() with a given gradient. `micro`: only adds it to the
        states."""
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
        """Runs step_one() in a thread of its own."""
        self.step_one(p, grad, micro)

    def step_all(self, params, step_param):
        """Carries out step(): steps what still has a gradient, and ends the round."""
        if self.rounds is not None:  # None for other hooks, as those of halfstep.compat
            self.rounds.step()
        for p in params:
            step_param(p)
        if not self.groups.options.optimizer_accumulation and (
            self.released or self.accumulation.pending
        ):
            self.end_round()
        self.placement.stepped_in_release(params)

    # ---- Rounds ----------------------------------------------------------------------------------

    def end_round(self, dropped=False, partial=False):
        """Ends a round. `dropped`: no step follows it. `partial`: some of its gradients did not
        come. Such a round's norm must not clip the next round."""
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
            weights, keep = None, []
            if engine.store is not None:
                engine.store.prepare(engine, pending, keep, all=True)
                weights = engine.store.round_weights(engine, keep)
            engine.check(engine.end_round(bool(clipped), weights), engine.handle)
            if not engine.asynchronous or before is not None:
                engine.tell(self.groups.param_groups)
            if before is not None:
                for group in self.groups:
                    group["last_norm"] = before

    def zero_grad(self):
        """Carries out zero_grad(), which ends the round."""
        self.placement.settle()
        dropped = partial = False
        if self.rounds is not None:
            partial = len(self.rounds.seen) < len(self.hooks) and not self.cache.told("last_norm")
            dropped = self.rounds.zero_grad()
        if self.released and not self.groups.options.optimizer_accumulation:
            with torch.no_grad():
                self.end_round(dropped, partial)
