"""Gradient accumulation over micro-batches in buffers of two bytes an element. Sums do not stall as
BF16 sums do."""

import weakref
from functools import partial
from typing import Any, Dict, Iterable, Optional, Sequence, Tuple, Type, Union

import torch

from ._library import abi, calls
from ._library.abi import invoke, lib
from ._settings import naming
from ._settings.options import check_seed, seed_of
from ._states.handles import Handle
from ._tensors import devices, sharding
from ._tensors.parameters import (
    PLAIN,
    check_gradient,
    check_parameter,
    dense,
    mark,
    stored_dtype,
    take_over,
)
from ._tensors.sharding import local, stored

#: formats that halfstep_accumulate() can add into
FORMATS = ("f32", "bf16", "bf16-sr", "f16")


def _named(parameters):
    """Returns (name or None, tensor) for each parameter of a module, of `(name, tensor)` pairs, or
    of tensors."""
    if isinstance(parameters, torch.nn.Module):
        return list(parameters.named_parameters())
    if isinstance(parameters, torch.Tensor):
        raise TypeError(
            "halfstep: GradientAccumulator wants a module or an iterable of parameters, not one"
            " tensor"
        )
    pairs = []
    for item in parameters:
        name, p = item if isinstance(item, tuple) else (None, item)
        if not isinstance(p, torch.Tensor):
            raise TypeError(
                "halfstep: GradientAccumulator can accumulate for tensors, not for a"
                f" {type(p).__name__}"
            )
        pairs.append((name, p))
    return pairs


#: kind of the owners of hooks, for take_over()
_KIND = "GradientAccumulator"
#: all accumulators; zero_grad() of an optimizer looks among them for those of its parameters
_alive = weakref.WeakSet()


def drop(params: Iterable[torch.Tensor]) -> None:
    """Forgets the sums of these parameters in every accumulator."""
    holding = [
        accumulator
        for accumulator in _alive
        if any(buffer is not None for buffer in accumulator._buffers)
    ]
    if holding:
        params = set(params)
        for accumulator in holding:
            for i, ref in enumerate(accumulator._params):
                if ref() in params:
                    accumulator._buffers[i] = None


def _live(hook):
    """Returns True if a hook's handle is still in use; its owner may have called remove()."""
    return hook is not None and hook.id in (hook.hooks_dict_ref() or ())


def complain(names: Sequence[str]) -> None:
    """Raises RuntimeError if `names`, the parameters that no gradient came for, is not empty."""
    if names:
        raise RuntimeError(
            f"halfstep: no gradient was accumulated for {naming.some(names, 4)};"
            ' missing="skip" leaves such parameters without one'
        )


class GradientAccumulator:
    """Sums the gradients of several backward passes in buffers of their own format instead of
    `p.grad`.

        accumulator = halfstep.GradientAccumulator(model).attach()
        for batch in batches:
            for micro in batch.chunk(64):
                (loss(model, micro) / 64).backward()
            accumulator.reassign()          # p.grad is the sum
            optimizer.step()
            optimizer.zero_grad()

    As a context, `with accumulator:` attaches before the first backward pass and hands the
    gradients back at the end:

        with accumulator:
            for micro in batch.chunk(64):
                (loss(model, micro) / 64).backward()
        optimizer.step()

    While it is attached, a hook on each parameter adds `p.grad` to the parameter's buffer as soon
    as autograd has finished it, and sets it to None. Beside the buffers only one gradient at a time
    exists in its own precision. With "bf16-sr" the sum of each element is rounded stochastically,
    so the mean over the random bits is the exact sum. Sums to nearest ("bf16") lose every gradient
    below 1/512 of the sum so far. The result is a sum, never a mean.

    parameters   a module, `(name, tensor)` pairs or tensors; those that do not require a gradient
                 are left alone. The names key the random bits, so replicas with the same seed round
                 alike
    format       of the buffers: "bf16-sr", "bf16", "f16" or "f32"
    seed         of the random bits: the same seed, names (else positions) and gradients give the
                 same bits. None: as in Optimizer
    missing      for a parameter without a gradient when the gradients are handed back. "error":
                 raises an error; "skip": its `grad` stays None
    dtype        of the gradients handed back. None: what the parameter takes, so a float32
                 parameter gets a float32 gradient; each is converted while its buffer is freed.
                 torch.bfloat16: keeps the buffers, for float32 parameters too. halfstep's
                 optimizers can step with such gradients, torch's cannot. This needs a torch with
                 `Tensor.grad_dtype`
    """

    def __init__(
        self,
        parameters: Union[
            torch.nn.Module, Iterable[torch.Tensor], Iterable[Tuple[str, torch.Tensor]]
        ],
        format: str = "bf16-sr",
        seed: Optional[int] = None,
        *,
        missing: str = "error",
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        if format not in FORMATS:
            raise ValueError(
                f"halfstep: unknown format {format!r} to accumulate gradients in; known:"
                f" {', '.join(FORMATS)}"
            )
        abi.check_choice("missing", missing)
        if dtype is not None and dtype not in PLAIN:
            raise ValueError(
                f"halfstep: gradients cannot be handed back as"
                f" {dtype}; known: {', '.join(map(str, PLAIN))}"
            )
        members = [
            (name or getattr(p, "_halfstep_name", None) or f"accumulated {i}", p)
            for i, (name, p) in enumerate(_named(parameters))
            if p.requires_grad
        ]
        self._setup(members, format, seed_of(seed), missing, dtype)

    def _setup(self, members, format, seed, missing, dtype):
        for name, p in members:
            check_parameter(p, name)
            devices.check(stored(p), name)
            if dtype is not None and dtype != p.dtype and not hasattr(p, "grad_dtype"):
                raise ValueError(
                    f"halfstep: this torch cannot give {name!r}, which is {p.dtype}, a gradient of"
                    f" {dtype}; leave dtype= out, or take a torch with Tensor.grad_dtype"
                )
        self.format, self.seed, self.missing, self.dtype = format, seed, missing, dtype
        self._buffer_dtype = stored_dtype(format)
        self._c_format = format.encode()
        self._names = [name for name, _ in members]
        self._shapes = [local(p).shape for _, p in members]
        self._params = [weakref.ref(p) for _, p in members]
        self._buffers = [None] * len(members)
        self._hooks = [None] * len(members)
        _alive.add(self)
        self._devices = [devices.of(stored(p)) for _, p in members]
        self._generator = abi.choices("generator")[0]
        threads = torch.get_num_threads()
        self._handles = {
            device: Handle(threads, seed, device) for device in dict.fromkeys(self._devices)
        }
        # Nothing is stepped here. A rule without states gives each tensor a place, counters and a
        # random strand.
        self._places = []
        for (name, p), device in zip(members, self._devices):
            handle, shape = self._handles[device], tuple(local(p).shape)
            part = sharding.part_of(p, name)
            self._places.append((handle, handle.add("sgd/f32", name, 0, shape, "f32", part)))

    def __repr__(self):
        state = "attached" if self.attached else "not attached"
        return (
            f"GradientAccumulator({len(self._names)} parameters, format={self.format!r},"
            f" seed={self.seed}, missing={self.missing!r}; {state}, {self.memory()} bytes in"
            " buffers)"
        )

    # ---- Hooks -----------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """True if backward passes add to the buffers."""
        return any(map(_live, self._hooks))

    def attach(self) -> "GradientAccumulator":
        """Puts the hooks on the parameters, unless they are there already. Returns the
        accumulator."""
        take_over([p for ref in self._params if (p := ref()) is not None], self, _KIND)
        for i, ref in enumerate(self._params):
            p = ref()
            if p is not None and not _live(self._hooks[i]) and p.requires_grad:
                # The parameter holds the hook, and the hook holds the accumulator. The accumulator
                # refers to its parameters weakly. A cycle would never be freed, because Python's
                # cycle collector does not see hooks.
                hook = mark(partial(self._take, i), self, _KIND)
                self._hooks[i] = p.register_post_accumulate_grad_hook(hook)
        return self

    def detach(self) -> None:
        """Removes the hooks. The buffers keep their sums for `reassign` or `clear`."""
        for hook in self._hooks:
            if hook is not None:
                hook.remove()
        self._hooks = [None] * len(self._hooks)

    def __enter__(self) -> "GradientAccumulator":
        self._entered = not self.attached
        return self.attach()

    def __exit__(self, kind: Optional[Type[BaseException]], *_: Any) -> None:
        if self._entered:
            self.detach()
        if kind is None:
            self.reassign()
        else:
            self.clear()

    # ---- Sums ------------------------------------------------------------------------------------

    @torch.no_grad()
    def _take(self, i, p):
        """Moves `p.grad` into buffer i."""
        grad = p.grad
        if grad is None:
            return
        name = self._names[i]
        grad = local(sharding.gradient_of(p, grad, name))
        if grad.shape != self._shapes[i]:
            raise ValueError(
                f"halfstep: the gradient of {name!r} has shape {tuple(grad.shape)}; it was "
                f"{tuple(self._shapes[i])} when the accumulator was made; make a new one"
            )
        gradient_format, device = check_gradient(p, grad, name), self._devices[i]
        if devices.of(grad) != device:
            raise ValueError(
                f"halfstep: {name!r} is on {devices.of(grad)}; it was on {device} when the"
                " accumulator was made; make a new one"
            )
        buffer = self._buffers[i]
        grad = dense(grad.detach())
        if buffer is None and grad.dtype == self._buffer_dtype:
            # The first gradient of a sum becomes the buffer as it is. A view is copied, because
            # others may write the bucket that it belongs to.
            alone = (
                grad.is_contiguous()
                and grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()
            )
            self._buffers[i] = grad if alone else devices.clone(grad)
            p.grad = None
            return
        if buffer is None:
            buffer = devices.zeros(self._shapes[i], self._buffer_dtype, device)
        if grad.numel():
            handle, index = self._places[i]
            handle.work(torch.get_num_threads())
            invoke(
                lib.halfstep_accumulate,
                handle,
                index,
                buffer.data_ptr(),
                self._c_format,
                grad.data_ptr(),
                gradient_format.encode(),
                1.0,
            )
            if devices.is_asynchronous(device) and not devices.capturing(device):
                devices.record([grad], device)
        self._buffers[i] = buffer
        p.grad = None

    def _returned_dtype(self, p):
        if self.dtype is not None:
            return self.dtype
        taken = getattr(p, "grad_dtype", p.dtype)
        return self._buffer_dtype if taken is None else taken

    @torch.no_grad()
    def reassign(self, missing: Optional[str] = None) -> None:
        """Hands the sums back as `p.grad` and frees the buffers.

        A gradient that a backward pass without hooks has left in `p.grad` is added to the sum.
        `missing` is that of the constructor, for this call. If it raises, nothing has changed.
        """
        missing = self.missing if missing is None else missing
        abi.check_choice("missing", missing)
        everything = range(len(self._names))
        if missing == "error":
            complain(self._without(everything))
        self._hand_back(everything)

    def _without(self, indices):
        """Returns the names of the parameters that no gradient came for."""
        params = [(i, self._params[i]()) for i in indices]
        return [
            self._names[i]
            for i, p in params
            if p is not None and p.requires_grad and self._buffers[i] is None and p.grad is None
        ]

    def _hand_back(self, indices):
        for i in indices:
            p = self._params[i]()
            if p is None:
                self._buffers[i] = None
                continue
            if self._buffers[i] is None:
                continue
            if p.grad is not None:
                self._take(i, p)
            buffer, self._buffers[i] = self._buffers[i], None
            dtype = self._returned_dtype(p)
            if dtype != p.dtype and getattr(p, "grad_dtype", dtype) not in (None, dtype):
                p.grad_dtype = None  # any: the hook must see float32 gradients as they are
            p.grad = sharding.like(p, buffer.to(dtype))

    def clear(self) -> None:
        """Forgets the sums. zero_grad() of halfstep's optimizers does the same. For optimizers of
        other packages, and zero_grad() of a model, call this function."""
        self._buffers = [None] * len(self._buffers)

    def memory(self) -> int:
        """Returns the bytes of the buffers that exist now."""
        return sum(b.numel() * b.element_size() for b in self._buffers if b is not None)

    # ---- Saving and copies -----------------------------------------------------------------------

    def state_dict(self) -> Dict[str, Any]:
        """Returns what a resumed run needs to draw the same random bits, and the sums if there are
        any."""
        return {
            "format": self.format,
            "seed": self.seed,
            "generator": self._generator,
            "writes": {
                name: int(handle.counters(index).writes)
                for name, (handle, index) in zip(self._names, self._places)
            },
            "buffers": {
                name: b.clone() for name, b in zip(self._names, self._buffers) if b is not None
            },
        }

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Takes seed, generator, counters and sums from `state_dict`. Parameters that it does not
        know keep theirs."""
        if state_dict["format"] != self.format:
            raise ValueError(
                f"halfstep: these sums were saved as {state_dict['format']!r}; the accumulator was"
                f" made for {self.format!r}"
            )
        buffers, known = list(self._buffers), {**state_dict["writes"], **state_dict["buffers"]}
        named = naming.partly(list(known), self._names)
        lost = [name for name in state_dict["buffers"] if name not in named.values()]
        if lost:
            raise ValueError(
                f"halfstep: the saved sums of {naming.some(lost)} belong to no parameter here; here"
                f" are {naming.some(self._names)}: make the accumulator with the parameters that"
                " were saved"
            )
        for i, name in enumerate(self._names):
            if named.get(name) in state_dict["buffers"]:
                saved = state_dict["buffers"][named[name]]
                if saved.shape != self._shapes[i] or saved.dtype != self._buffer_dtype:
                    raise ValueError(
                        f"halfstep: the saved sum of {name!r} is {saved.dtype} of shape"
                        f" {tuple(saved.shape)}; {self._buffer_dtype} of shape"
                        f" {tuple(self._shapes[i])} is needed"
                    )
                buffers[i] = devices.place(devices.clone(saved), self._devices[i])
            else:
                buffers[i] = None
        seed = state_dict["seed"]
        check_seed(seed, " of these sums")
        for name, writes in state_dict["writes"].items():
            if not abi.is_count(writes):
                raise ValueError(
                    f"halfstep: the saved writes of {name!r} are {writes!r}; they must be a whole"
                    " number from 0 to 2**63 - 1"
                )
        generator = state_dict.get("generator")
        abi.check_choice("generator", generator, " of the saved sums")
        for handle in self._handles.values():
            handle.set(generator=generator)
            calls.change(handle, abi.RECORD_OPTIMIZER, seed=seed & (2**64 - 1))
        self.seed, self._generator, self._buffers = seed, generator, buffers
        for (handle, index), name in zip(self._places, self._names):
            if named.get(name) in state_dict["writes"]:
                handle.count(index, writes=state_dict["writes"][named[name]])

    def __getstate__(self):
        members = [(name, ref()) for name, ref in zip(self._names, self._params)]
        alive = {name for name, p in members if p is not None}
        saved = self.state_dict()
        for key in ("writes", "buffers"):
            saved[key] = {name: value for name, value in saved[key].items() if name in alive}
        return {
            **saved,
            "members": [(name, p) for name, p in members if p is not None],
            "missing": self.missing,
            "dtype": self.dtype,
            "attached": self.attached,
        }

    def __setstate__(self, state):
        own = (state[key] for key in ("members", "format", "seed", "missing", "dtype"))
        self._setup(*own)
        self.load_state_dict(state)
        if state["attached"]:
            self.attach()
