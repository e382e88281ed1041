"""Collects the addresses of weights and gradients for a step."""

from operator import is_, itemgetter

import torch

from .._library.calls import GRID
from .._states.watch import versions
from .._tensors import devices, sharding
from .._tensors.parameters import check_gradient, stored_dtype
from .._tensors.sharding import local, stored
from .guards import guard

_Tensor = torch.Tensor
# Called through map(), which costs half as much as a loop.
_get_dtype, _get_shape, _get_device = (
    getattr(_Tensor, name).__get__ for name in ("dtype", "shape", "device")
)
_PLAIN_TYPES = {_Tensor}
# How often one handle makes guards. Gradients that keep changing would make guards useless.
_MOST_GUARDS = 4


class Ready:
    """What a step is made with.

    engine     the engine, whose arrays are filled
    keep       tensors that have to live until the call
    back       (parameter or member, weight) of each weight that is worked on in a copy, unless
               its owner has the copy (_ranks/ownership.py)
    stepped    the parameters that have gradients
    """

    def __init__(self, engine):
        self.engine = engine
        self.keep, self.back, self.stepped = [], [], []


class Gather:
    """Fills the pointer arrays of an engine, and the lists of a Ready. Every function says
    whether the engine still fits."""

    def __init__(self, parts):
        self.groups, self.placement, self.cache = parts.groups, parts.placement, parts.cache

    def place(self, ready, m, p, grad):
        """Returns the addresses of one weight and its gradient. Handles tensors that are sharded,
        offloaded or not contiguous. Returns None if the engine does not fit any more."""
        keep, back = ready.keep, ready.back
        if m.gathered:
            grad = sharding.gradient_of(p, grad, m.name)
            if check_gradient(p, grad, m.name) != m.gradient:
                return None
            return m.stage.give(m, local(grad))
        if m.offloaded:
            if (
                not self._is_where_it_was(m, local(p))
                or self.placement.check_gradient(p, grad, m.name) != m.gradient
            ):
                return None
            weight, grad = self.placement.bring(m, p, grad)
            back.append((m, weight))
            return sharding.address(weight), sharding.address(grad)
        here = p
        if m.part is not None and m.part.mesh is not None:
            grad, here = local(sharding.gradient_of(p, grad, m.name)), local(p)
            keep.append(grad)
        if (
            not self._is_where_it_was(m, here)
            or self.placement.check_gradient(p, grad, m.name) != m.gradient
        ):
            return None
        if not devices.is_plain(grad):
            grad = devices.contiguous(grad)
            keep.append(grad)
        weight = stored(p)
        if not m.dense:
            weight = devices.contiguous(weight)
            back.append((p, weight))
        return sharding.address(weight), sharding.address(grad)

    @staticmethod
    def _is_where_it_was(m, p):
        """Returns True if the handle has the weight's address, or could be told the new one."""
        held = stored(p)
        if (
            held.data_ptr() == m.address
            and p.shape == m.shape
            and p.dtype == m.dtype
            and held.stride() == m.strides
            and devices.is_plain(held) == m.dense
            and (held is p or p.format == m.format)
        ):
            return True
        return m.recheck_weight()

    def all(self, ready):
        """Fills the pointer arrays. Returns False if the engine does not fit any more."""
        engine, stepped = ready.engine, ready.stepped
        plain = engine.plain if self.placement.in_grad else None
        if plain and len(plain.params) == len(self.cache.flat):
            addresses = plain.gradients(self.groups.state)
            if addresses:
                engine.gradients[:] = addresses
                if not engine.weights_are_plain:
                    engine.weights[:] = plain.weights
                    engine.weights_are_plain = True
                stepped.extend(engine.params)
                return True
        engine.weights_are_plain = False
        for p, i in zip(self.cache.flat, self.cache.indices):
            grad = self.placement.gradient_of(p)
            if grad is None:
                if i >= 0:
                    engine.gradients[i] = None
                continue
            if i < 0 or self.cache.stale(engine.members[i]):
                return False
            found = self.place(ready, engine.members[i], p, grad)
            if found is None:
                return False
            engine.weights[i], engine.gradients[i] = found
            stepped.append(p)
        if engine.plain is None and engine.may_be_plain and len(stepped) == len(engine.members):
            engine.plain = Plain(engine, self.groups.state)
        return True

    def given(self, ready, given):
        """Does the work of all() for a compiled step. `given` holds its weights and gradients by
        parameter."""
        engine, keep = ready.engine, ready.keep
        engine.weights_are_plain = False
        for i in range(len(engine.members)):
            engine.gradients[i] = None
        for p, (weight, grad) in given.items():
            i = engine.index_of.get(p, -1)
            if i < 0 or self.cache.stale(engine.members[i]):
                return False
            m = engine.members[i]
            if m.offloaded:
                devices.check(stored(p), m.name)  # raises
            if check_gradient(p, grad, m.name) != m.gradient:
                return False
            keep.append(devices.contiguous(grad))
            held = devices.contiguous(weight)
            if held.data_ptr() != weight.data_ptr():
                ready.back.append((weight, held))
            engine.weights[i] = sharding.address(held)
            engine.gradients[i] = sharding.address(keep[-1])
        return True


class Plain:
    """The usual case: every parameter has a gradient of the type it had before, all tensors are
    contiguous, and nothing has moved. Holds what a step compares with, as lists over all members,
    because a thousand small tensors cost about a microsecond each in Python.
    """

    def __init__(self, engine, states):
        members = engine.members
        self.params = engine.params
        self.dtypes = [stored_dtype(m.gradient) for m in members]
        self.weight_dtypes = [m.dtype for m in members]
        self.shapes = [m.p.shape for m in members]
        self.numels = [m.p.numel() for m in members]
        self.weights = [m.address for m in members]
        #: the numbers of members with 8-bit weights, and the formats of these
        self.packed = [(i, m.format) for i, m in enumerate(members) if m.format]
        self.states = [states[m.p] for m in members]
        self.steps = [m.step for m in members]
        # The address of a number is compared only if its member has no other state, because
        # whatever moves states moves all of them.
        numbers = [
            [m.step, *(tensor() for key, tensor, _ in m.bound if key.endswith(GRID))]
            for m in members
        ]
        planes = [
            [tensor() for key, tensor, _ in m.bound if not key.endswith(GRID)] for m in members
        ]
        self.tensors = [tensor for pair in zip(planes, numbers) for tensor in pair[0] or pair[1]]
        self.addresses = list(map(_Tensor.data_ptr, self.tensors))
        # The library writes these and counts no version, so a new version means another writer.
        self.counts = [m.numbers[key] for m in members for key in m.shown]
        self.step_versions = [m.versions["step"] for m in members]
        self.count_versions = [m.versions[key] for m in members for key in m.shown]
        # All states of the optimizer in order, because this is cheaper to compare than to look up
        # parameters.
        self.keys, self.values = list(states), list(states.values())
        # For each key of a state: the states that have it, and the tensors that they had there.
        planes = {"step": (self.states, self.steps)}
        for m, state in zip(members, self.states):
            for key, tensor, _ in m.bound:
                held = planes.setdefault(key, ([], []))
                held[0].append(state)
                held[1].append(tensor())
        self.planes = [(key, *held) for key, held in planes.items()]
        #: guards: one for all weights and one for all gradients, made when a step has found nothing
        #: changed, or None; guarded: how often they were made
        self.guards, self.guarded = None, 0

    def gradients(self, state):
        """Returns the addresses of the gradients if this is still the usual case, else None.
        `state` is the optimizer's."""
        try:
            grads = [p.grad for p in self.params]
            if not self.guards or not self.guards[0](*self.params) or not self.guards[1](*grads):
                if not self._are_plain(grads):
                    return None
                self._guard(grads)
            addresses = list(map(_Tensor.data_ptr, grads))
        except RuntimeError:  # sparse tensors have no address
            return None
        if 0 in addresses:  # tensors without memory
            return None
        if (
            len(state) != len(self.keys)
            or not all(map(is_, state, self.keys))
            or not all(map(is_, state.values(), self.values))
        ):
            if not all(map(is_, map(state.get, self.params), self.states)):
                return None
            self.keys, self.values = list(state), list(state.values())
        if (
            versions(self.steps) != self.step_versions
            or versions(self.counts) != self.count_versions
        ):
            return None
        for key, states, tensors in self.planes:
            try:
                if not all(map(is_, map(itemgetter(key), states), tensors)):
                    return None
            except KeyError:
                return None
        held = self.params
        if self.packed:
            held = list(held)
            for i, format in self.packed:
                if held[i].format != format:
                    return None
                held[i] = held[i].packed
        if (
            list(map(_Tensor.data_ptr, self.tensors)) != self.addresses
            or list(map(_Tensor.data_ptr, held)) != self.weights
        ):
            return None
        return addresses

    def _are_plain(self, grads):
        """Compares attribute by attribute what the guards compare. Gradients may have any shape
        with as many elements."""
        if set(map(type, grads)) != _PLAIN_TYPES:
            return False
        if (
            list(map(_get_dtype, self.params)) != self.weight_dtypes
            or list(map(_get_shape, self.params)) != self.shapes
            or not all(map(_Tensor.is_contiguous, self.params))
        ):
            return False
        return (
            list(map(_get_dtype, grads)) == self.dtypes
            and list(map(_get_device, grads)) == list(map(_get_device, self.params))
            and list(map(_Tensor.numel, grads)) == self.numels
            and all(map(_Tensor.is_contiguous, grads))
            and not any(map(_Tensor.is_neg, grads))
            and not any(map(_Tensor.is_neg, self.params))
        )

    def _guard(self, grads):
        """Makes guards from tensors that are plain, for the next steps. Gives up after _MOST_GUARDS
        times, because guards do not pay if tensors keep changing."""
        self.guarded += 1
        guards = [guard(self.params), guard(grads)] if self.guarded <= _MOST_GUARDS else [None]
        self.guards = None if None in guards else guards
