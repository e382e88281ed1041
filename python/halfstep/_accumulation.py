"""Micro-batches that go into the states: which parameters have some that no update of the weight
has followed yet."""

import torch

from ._parameters import PLAIN


class Accumulation:
    """Keeps the parameters whose states have taken micro-batches.

    pending    these parameters, as keys
    """

    def __init__(self, groups, placement, cache):
        self.groups, self.placement, self.cache = groups, placement, cache
        self.pending = {}

    def restore(self, pending):
        """Goes on with these parameters."""
        self.pending = pending

    def gathered(self, params, micro):
        """These have taken a micro-batch, or their weights an update."""
        if micro:
            self.pending.update(dict.fromkeys(params, True))
        elif self.pending:
            for p in params:
                self.pending.pop(p, None)

    def give_zeros(self, given=None):
        """Gives gradients of zeros to parameters whose states have gathered micro-batches and which
        the last one has no gradient for. Returns these parameters. given: of a compiled step, its
        weights and gradients by parameter."""
        if not self.pending or self.groups.options.optimizer_accumulation:
            return []
        members = set(self.groups.params())
        waiting = [
            p
            for p in self.pending
            if p in members
            and (self.placement.gradient_of(p) is None if given is None else p not in given)
        ]
        for p in waiting:
            if given is None:
                p.grad = self.zeros_for(p)
            else:
                given[p] = p, self.zeros_for(p)
        return waiting if given is None else []

    def zeros_for(self, p):
        """A gradient of zeros in the format of those before."""
        engine = self.cache.engine
        m = engine.members[engine.index_of[p]] if engine and p in engine.index_of else None
        dtype = next(
            (dtype for dtype, name in PLAIN.items() if m is not None and name == m.gradient),
            p.dtype,
        )
        return torch.zeros_like(p, dtype=dtype, memory_format=torch.contiguous_format)
