"""Micro-batches that go into the states: keeps track of those that no update of the weight has
followed yet."""

import torch

from .._tensors.parameters import stored_dtype


class Accumulation:
    """The parameters whose states have taken micro-batches since the last update of the weight.

    pending    these parameters, as keys
    """

    def __init__(self, groups, placement, cache):
        self.groups, self.placement, self.cache = groups, placement, cache
        self.pending = {}

    def restore(self, pending):
        """Sets the pending parameters."""
        self.pending = pending

    def after(self, params, micro):
        """Returns the parameters that will be pending once gathered() has been called."""
        if micro:
            return list(dict.fromkeys([*self.pending, *params]))
        gone = set(params)
        return [p for p in self.pending if p not in gone]

    def gathered(self, params, micro):
        """Notes that `params` have taken a micro-batch or, without `micro`, an update of their
        weights."""
        if micro:
            self.pending.update(dict.fromkeys(params, True))
        elif self.pending:
            for p in params:
                self.pending.pop(p, None)

    def give_zeros(self, given):
        """Gives a gradient of zeros to each pending parameter that has no gradient now, so that its
        weight is updated as well. Returns these parameters.

        `given` holds the weights and gradients of a compiled step by parameter. If it is set, the
        zeros go there and the returned list is empty.
        """
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
        """Returns a gradient of zeros in the dtype of the parameter's earlier gradients."""
        engine = self.cache.engine
        m = engine and engine.member(p)
        dtype = stored_dtype(m.gradient) if m else p.dtype
        return torch.zeros_like(p, dtype=dtype, memory_format=torch.contiguous_format)
