"""Collects the addresses of weights and gradients for a step."""

from operator import is_, itemgetter

import torch

from .._states.members import Plain
from .._states.watch import versions
from .._tensors import devices, sharding
from .._tensors.parameters import check_gradient
from .._tensors.sharding import local, stored
from .guards import guard

_Tensor = torch.Tensor
# Called through map(), which costs half as much as a loop.
_get_dtype, _get_shape, _get_device = (
    getattr(_Tensor, name).__get__ for name in ("dtype", "shape", "device")
)
_numel, _is_contiguous, _is_neg, _data_ptr = (
    _Tensor.numel,
    _Tensor.is_contiguous,
    _Tensor.is_neg,
    _Tensor.data_ptr,
)
_PLAIN_TYPES = {_Tensor}
# How often one handle makes guards. Gradients that keep changing would make guards useless.
_MOST_GUARDS = 4


class Gathered:
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
    """Fills the pointer arrays of an engine, and the lists of a Gathered. Every function says
    whether the engine still fits."""

    def __init__(self, groups, placement, cache):
        self.groups, self.placement, self.cache = groups, placement, cache

    def place(self, ready, m, p, grad):
        """Returns the addresses of one weight and its gradient. Handles tensors that are sharded,
        offloaded or not contiguous. Returns None if the engine does not fit any more."""
        engine, keep, back = ready.engine, ready.keep, ready.back
        sharded = m.part is not None and m.part.mesh is not None
        if m.gathered:
            grad = sharding.gradient_of(p, grad, m.name)
            if check_gradient(p, grad, m.name) != m.gradient:
                return None
            return m.stage.give(m, local(grad))
        if m.offloaded:
            if (
                not self._is_where_it_was(engine, m, local(p))
                or self.placement.check_gradient(p, grad, m.name) != m.gradient
            ):
                return None
            weight, grad = self.placement.bring(m, p, grad)
            back.append((m, weight))
            return sharding.address(weight), sharding.address(grad)
        if sharded:
            grad, p = local(sharding.gradient_of(p, grad, m.name)), local(p)
            keep.append(grad)
        if not self._is_where_it_was(engine, m, p) or check_gradient(p, grad, m.name) != m.gradient:
            return None
        if not devices.is_plain(grad):
            grad = devices.contiguous(grad)
            keep.append(grad)
        weight = stored(p)
        if not m.dense:
            weight = devices.contiguous(weight)
            back.append((p, weight))
        return weight.data_ptr(), sharding.address(grad) if sharded else grad.data_ptr()

    @staticmethod
    def _is_where_it_was(engine, m, p):
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
        return engine.recheck_weight(m)

    def all(self, ready):
        """Fills the pointer arrays. Returns False if the engine does not fit any more."""
        engine, stepped = ready.engine, ready.stepped
        if self._plain(engine):
            stepped.extend(engine.params)
            return True
        engine.weights_are_plain = False
        for p, i in zip(self.cache.flat, self.cache.indices):
            grad = self.placement.gradient_of(p)
            if grad is None or (i < 0 and p.numel() == 0):
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
            if p.numel() == 0:
                continue
            i = engine.index_of.get(p, -1)
            if i < 0 or self.cache.stale(engine.members[i]):
                return False
            m = engine.members[i]
            if check_gradient(p, grad, m.name) != m.gradient:
                return False
            keep.append(devices.contiguous(grad))
            held = devices.contiguous(weight)
            if held.data_ptr() != weight.data_ptr():
                ready.back.append((weight, held))
            engine.weights[i], engine.gradients[i] = held.data_ptr(), keep[-1].data_ptr()
        return True

    def _plain(self, engine):
        """Does the work of all() for the usual case. Every parameter has a gradient of the type it
        had before, all tensors are contiguous, and nothing has moved. Returns False if this is not
        so; all() then looks closer.

        The checks go over lists, because a thousand small tensors cost about a microsecond each in
        Python.
        """
        plain = engine.plain
        if plain is None or len(plain.params) != len(self.cache.flat) - len(self.cache.empty):
            return False
        try:
            grads = [p.grad for p in plain.params]
            if (
                not plain.guards
                or not plain.guards[0](*plain.params)
                or not plain.guards[1](*grads)
            ):
                if not self._are_plain(plain, grads):
                    return False
                self._guard(plain, grads)
            addresses = list(map(_data_ptr, grads))
        except RuntimeError:  # sparse tensors have no address
            return False
        if 0 in addresses:  # tensors without memory
            return False
        state = self.groups.state
        if (
            len(state) != len(plain.keys)
            or not all(map(is_, state, plain.keys))
            or not all(map(is_, state.values(), plain.values))
        ):
            if not all(map(is_, map(state.get, plain.params), plain.states)):
                return False
            plain.keys, plain.values = list(state), list(state.values())
        if (
            versions(plain.steps) != plain.step_versions
            or versions(plain.counts) != plain.count_versions
        ):
            return False
        for key, states, tensors in plain.planes:
            try:
                if not all(map(is_, map(itemgetter(key), states), tensors)):
                    return False
            except KeyError:
                return False
        held = plain.params
        if plain.packed:
            held = list(held)
            for i, format in plain.packed:
                if held[i].format != format:
                    return False
                held[i] = held[i].packed
        if (
            list(map(_data_ptr, plain.tensors)) != plain.addresses
            or list(map(_data_ptr, held)) != plain.weights
        ):
            return False
        engine.gradients[:] = addresses
        if not engine.weights_are_plain:
            engine.weights[:] = plain.weights
            engine.weights_are_plain = True
        return True

    @staticmethod
    def _are_plain(plain, grads):
        """Compares attribute by attribute what the guards of `plain` compare. Gradients may have
        any shape with as many elements."""
        if set(map(type, grads)) != _PLAIN_TYPES:
            return False
        if (
            list(map(_get_dtype, plain.params)) != plain.weight_dtypes
            or list(map(_get_shape, plain.params)) != plain.shapes
            or not all(map(_is_contiguous, plain.params))
        ):
            return False
        return (
            list(map(_get_dtype, grads)) == plain.dtypes
            and list(map(_get_device, grads)) == list(map(_get_device, plain.params))
            and list(map(_numel, grads)) == plain.numels
            and all(map(_is_contiguous, grads))
            and not any(map(_is_neg, grads))
            and not any(map(_is_neg, plain.params))
        )

    @staticmethod
    def _guard(plain, grads):
        """Makes guards from tensors that are plain, for the next steps. Gives up after _MOST_GUARDS
        times, because guards do not pay if tensors keep changing."""
        plain.guarded += 1
        guards = [guard(plain.params), guard(grads)] if plain.guarded <= _MOST_GUARDS else [None]
        plain.guards = None if None in guards else guards
