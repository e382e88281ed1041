"""`CPUOffload`: weights on a GPU, states and steps in the process's memory."""

import contextlib
import queue
import threading
import weakref
from typing import Any, Type, Union

import torch

from . import _devices, _sharding
from ._abi import HalfstepError
from ._handles import Handle
from ._hosted import Hosted, HostedPlacement
from ._parameters import PLAIN, check_gradient, dense, follow_gradients
from ._sharding import local
from ._watch import version
from .optimizer import Kept, Optimizer, Params

_HOST = torch.device("cpu")


class _Copy:
    """What this process keeps of one weight of the GPU.

    weight, as_of   the weight, pinned; and what _mark() said of the parameter that it is a copy of
    gradient        pinned; and `given`, whose copy it is: (weak reference, mark), or None where it
                    is the only one there is (`alone`)
    more            another gradient, (copy, event), that is still to be added to that
    down            event: until what was fetched last, and so all that was fetched before, is here
    """

    __slots__ = ("weight", "as_of", "gradient", "given", "alone", "more", "down")

    def __init__(self):
        self.weight = self.as_of = self.gradient = self.given = self.more = self.down = None
        self.alone = False

    def is_of(self, grad):
        """Whether `gradient` holds what this tensor holds."""
        return (
            grad is self.gradient
            or self.given is not None
            and self.given[0]() is grad
            and self.given[1] == _mark(grad)
        )


def _mark(tensor):
    """What is another one as soon as somebody has written the tensor, or has put other memory
    there."""
    return version(tensor), local(tensor).data_ptr()


def _fits(held, tensor):
    return held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype


class Carrier:
    """Copies between a GPU and the process, on two streams beside the one that is computed on: one
    for each direction."""

    def __init__(self):
        self.copies, self.sides = {}, {}
        self.work, self.thread, self.error = None, None, None
        #: pinned memory that is free for gradients, by dtype and size
        self.spare = {}

    def side(self, device, up):
        key = (device, up)
        if key not in self.sides:
            self.sides[key] = _devices.Side(device)
        return self.sides[key]

    def of(self, p):
        if p not in self.copies:
            self.copies[p] = _Copy()
        return self.copies[p]

    def keep(self, params):
        """Forgets what is of other parameters."""
        self.copies = {p: copy for p, copy in self.copies.items() if p in params}

    def _fetch(self, into, tensor):
        """Begins to copy a tensor of the GPU; the event after which it is here."""
        side = self.side(_devices.of(tensor), False)
        side.follow()
        side.copy(into, dense(tensor))
        return side.event()

    def _take_buffer(self, tensor):
        held = self.spare.get((tensor.dtype, tensor.numel()))
        return (
            held.pop().view(tensor.shape) if held else _devices.pinned(tensor.shape, tensor.dtype)
        )

    def _leave_buffer(self, buffer):
        self.spare.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)

    # ---- Gradients -------------------------------------------------------------------------------

    def take(self, p, grad, alone):
        """A gradient of p is complete: its copy begins. alone: nobody else will keep it, so that
        those of further backward passes are added here, in their dtype and in the order of their
        coming, as they would be there."""
        copy, here = self.of(p), local(grad)
        if copy.alone:
            self._add(copy)
            buffer = self._take_buffer(here)
            copy.more = buffer, self._fetch(buffer, here)
            return
        if not _fits(copy.gradient, here):
            copy.gradient = self._take_buffer(here)
        copy.down, copy.alone = self._fetch(copy.gradient, here), alone
        copy.given = None if alone else (weakref.ref(grad), _mark(grad))

    def _add(self, copy):
        if copy.more is not None:
            _devices.wait(copy.more[1])  # before which that of the first one came
            copy.gradient.add_(copy.more[0])
            self._leave_buffer(copy.more[0])
            copy.more = None

    def gradient(self, p):
        """What p is to be stepped with: its gradient on the GPU, or the copy of one that was given
        up."""
        if p.grad is not None:
            return p.grad
        copy = self.copies.get(p)
        if copy is None or not copy.alone:
            return None
        self._add(copy)
        return copy.gradient

    def doubt(self):
        """Gradients on the GPU may be others than were copied."""
        for copy in self.copies.values():
            copy.given = None

    def drop(self):
        """Forgets gradients that are nowhere else."""
        for copy in self.copies.values():
            if copy.more is not None:
                self._leave_buffer(copy.more[0])  # what comes there next comes on the same stream
            copy.alone, copy.more = False, None

    # ---- Weights ---------------------------------------------------------------------------------

    def bring(self, p, grad):
        """Weight and gradient as they are here; what still has to come is on its way until
        arrive()."""
        copy, here = self.of(p), local(p).detach()
        if copy.as_of is None or copy.as_of[0] is None or copy.as_of != _mark(p):
            if not _fits(copy.weight, here):
                copy.weight = _devices.pinned(here.shape, here.dtype)
            copy.as_of, copy.down = None, self._fetch(copy.weight, here)
        if not copy.is_of(grad):
            self.take(p, grad, False)
        return copy.weight, copy.gradient

    def arrive(self, params):
        """Until weights and gradients of these are here. Weights may be on their way to the GPU
        still, where nobody reads them before the copies that follow."""
        for p in params:
            copy = self.copies[p]
            if copy.down is not None:
                _devices.wait(copy.down)
                copy.down = None

    def put(self, p):
        """Begins to copy the weight back, which is the same here and there then."""
        copy, here = self.of(p), local(p).detach()
        side = self.side(_devices.of(here), True)
        if _devices.is_plain(here):
            side.copy(here, copy.weight)
        else:
            here.copy_(copy.weight)
        copy.as_of = _mark(p)

    def follow(self):
        """Weights are written after what the GPU has to do by now."""
        for (_, up), side in self.sides.items():
            if up:
                side.follow()

    def lead(self):
        """What the GPU does from now on comes after the weights."""
        for (_, up), side in self.sides.items():
            if up:
                side.lead()

    # ---- Steps while the backward pass goes on ---------------------------------------------------

    def send(self, release, p, grad, micro):
        """Has p stepped by a thread of this carrier as soon as its gradient is here."""
        buffer = self._take_buffer(local(grad))
        down = self._fetch(buffer, local(grad))
        if self.thread is None:
            self.work = queue.SimpleQueue()
            self.thread = threading.Thread(
                target=_run,
                args=(weakref.ref(self), self.work),
                name="halfstep-offload",
                daemon=True,
            )
            self.thread.start()
        self.work.put((weakref.ref(release), p, buffer, down, micro))

    def carry_out(self, release, p, buffer, down, micro):
        copy = self.of(p)
        copy.gradient, copy.down, copy.given, copy.alone = buffer, down, None, True
        if self.error is None:  # after one, gradients stay until step() has told it
            try:
                release.step_sent(p, buffer, micro)
            except BaseException as error:
                self.error = error
                return
            copy.gradient, copy.alone = None, False
            self._leave_buffer(buffer)

    def join(self):
        """Until all that was sent is stepped. Raises what went wrong there."""
        if self.thread is None or threading.current_thread() is self.thread:
            return
        done = threading.Event()
        self.work.put(done)
        done.wait()
        error, self.error = self.error, None
        if error is not None:
            raise error

    def __del__(self):
        if self.work is not None:
            self.work.put(None)


def _run(carrier, work):
    while True:
        item = work.get()
        if item is None:
            return
        if isinstance(item, threading.Event):
            item.set()
        else:
            this, release = carrier(), item[0]()
            if this is not None and release is not None:
                this.carry_out(release, *item[1:])
            this = release = None
        item = None


class _Offloaded(HostedPlacement):
    """Steps large parameters of a GPU in the process's memory."""

    def __init__(self, groups, names):
        super().__init__(groups, names)
        self.carrier = Carrier()
        self.hooks = []

    def hook(self):
        """Has gradients copied as they come, where release does not take them."""
        for handle in self.hooks:
            handle.remove()
        self.hooks = follow_gradients(
            filter(self._is_offloaded, self.groups.params()),
            self,
            lambda held, p: held.groups.options.gradient_release or held._copy_gradient(p),
        )

    def _is_offloaded(self, p):
        here = local(p)
        return self.may_leave(p) and (
            here.numel() >= self.groups.options.minimal_size
            or _sharding.is_dtensor(p)
            or self.groups.options.norm_group is not None
            or not _can_step_on(_devices.of(here))
        )

    def _placed(self, p):
        """The gradient in the placements of its parameter."""
        return _sharding.gradient_of(p, p.grad, self.names.given.get(p, "?"))

    @torch.no_grad()
    def _copy_gradient(self, p):
        if p.grad.layout != torch.strided:
            return  # which step() refuses by name
        grad, alone = self._placed(p), self.groups.options.offload_gradients
        if grad is p.grad or alone:
            self.carrier.take(p, grad, alone)
        if alone:
            p.grad = None

    def home(self, p):
        return _HOST if self._is_offloaded(p) else super().home(p)

    def check_device(self, p, name):
        if self._is_offloaded(p):
            _devices.check_copies(local(p), name)
        else:
            super().check_device(p, name)

    def built(self, params):
        self.carrier.keep(set(params))

    # ---- Weights and gradients of a step ---------------------------------------------------------

    def gradient_of(self, p):
        if self.groups.options.offload_gradients and p.grad is not None:
            copy = self.carrier.copies.get(p)
            if (
                copy is not None and copy.alone
            ):  # a hook that raised kept it from those that are here
                self._copy_gradient(p)
        return self.carrier.gradient(p)

    def check_gradient(self, p, grad, name):
        copy = self.carrier.copies.get(p)
        if (
            copy is not None
            and grad is copy.gradient
            and grad.shape == local(p).shape
            and grad.dtype in PLAIN
        ):
            return PLAIN[grad.dtype]  # it was a gradient of this parameter, and is elsewhere
        return super().check_gradient(p, grad, name)

    def bring(self, m, p, grad):
        copy = self.carrier.copies.get(p)
        return self.carrier.bring(
            p,
            (
                grad
                if copy is not None and copy.is_of(grad)
                else _sharding.gradient_of(p, grad, m.name)
            ),
        )

    def arrive(self, members):
        self.carrier.arrive([m.p for m in members])

    def put_back(self, members):
        if (
            members and not self.groups.options.gradient_release
        ):  # where the gradient came after all that reads the weight
            self.carrier.follow()
        for m in members:
            self.carrier.put(m.p)

    # ---- Steps -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stepping(self):
        yield
        self.carrier.drop()
        self.carrier.lead()

    def released(self, p, release):
        # What is stepped on the GPU keeps its gradient until step(), so that handles belong to one
        # thread at a time.
        if self._is_offloaded(p):
            grad = self._placed(p)
            check_gradient(p, grad, self.names.given.get(p, "?"))
            self.groups.options.check_mode(self.groups)
            self.carrier.send(release, p, grad, self.groups.options.optimizer_accumulation)
            p.grad = None
        return True

    def stepped_in_release(self, params):
        for p in params:
            p.grad = None

    def settle(self):
        self.carrier.join()


class CPUOffload(Hosted):
    """An optimizer whose states and steps are in the process's memory while its weights are on a
    GPU.

        opt = halfstep.CPUOffload(model.named_parameters(), "adamw/bf16-sr/int8", lr=1e-4,
        clip_norm=1.0) opt = halfstep.CPUOffload(model.named_parameters(), halfstep.Lion, lr=1e-5,
        states="int4")

    It is an optimizer of the class of its recipe, with all options, the same bits, and state
    dictionaries that go either way. Gradients come to pinned memory on a stream of their own while
    the backward pass goes on; step() waits for the last of them, judges and clips them all
    together, steps, and has weights copied back on another stream, which the next forward pass
    waits for.

    recipe              a recipe, or a class of this package
    offload_gradients   gradients are given up on the GPU as soon as they are here; those of further
                        backward passes are added here,
                        and step() or zero_grad() forgets them. torch.nn.utils.clip_grad_norm_()
                        finds none then: use clip_norm=; a GradScaler's step() raises RuntimeError
    minimal_size        parameters of fewer elements are stepped on the GPU, where their states are,
                        too. There are none of them among
                        DTensors, with a norm_group, or where the library has no kernels for the GPU
    gradient_release    each parameter is stepped by a thread of its own as soon as its gradient is
                        here, while the backward pass goes
                        on. Tensors are judged singly then, and clipped by the norm of the round
                        before or their own: see prepare_gradient_release()
    options             of the class: lr, betas, clip_norm ...

    A parameter takes host memory for its states, and 2 bytes (BF16) each for copies of the weight
    and of the gradient; the copies are pinned, the states, which never leave, are not. In
    gradient_release parameters of one size share copies of gradients, of which there are as many as
    are on their way at once. Parameters in the process's memory are stepped where they are.

    A gradient that is written after its backward pass is copied again where the write is known:
    those of torch's operators, of DistributedDataParallel and of a GradScaler are. After
    torch.distributed.all_reduce(p.grad), or a kernel of your own, call
    torch.autograd.graph.increment_version(p.grad).

    In gradient_release step() has to be called after each backward pass: what the GPU does after it
    comes after the weights.
    """

    _placement = _Offloaded
    offload_gradients = Kept()

    def __init__(
        self,
        params: Params,
        recipe: Union[str, Type[Optimizer]] = "adamw",
        *,
        offload_gradients: bool = False,
        minimal_size: int = 4096,
        **options: Any,
    ) -> None:
        self.offload_gradients = bool(offload_gradients)
        super().__init__(params, recipe, minimal_size=minimal_size, **options)

    @property
    def _step_supports_amp_scaling(self):
        # A GradScaler asks for it in each step, and divides gradients by an operator that moves no
        # version counters.
        mode = "offload_gradients" if self.offload_gradients else "gradient_release"
        if getattr(self, mode):
            raise RuntimeError(
                f"halfstep: a GradScaler finds no gradients on the GPU where {mode}=True gives"
                " them up"
            )
        self._parts.placement.carrier.doubt()
        return self.__dict__.get("_step_supports_amp_scaling", False)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value):
        self.__dict__["_step_supports_amp_scaling"] = value

    def add_param_group(self, param_group):
        """As torch's."""
        super().add_param_group(param_group)
        self._parts.placement.hook()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; also forgets gradients that are here alone."""
        self._parts.placement.settle()
        self._parts.placement.carrier.drop()
        super().zero_grad(set_to_none)

    def __setstate__(self, state):
        super().__setstate__(state)
        self._parts.placement.hook()


_steps_on = {}


def _can_step_on(device):
    """Whether the library has kernels for a device, which it takes for small tensors alone."""
    if device not in _steps_on:
        try:
            Handle(1, 0, device)
            _steps_on[device] = True
        except HalfstepError:
            _steps_on[device] = False
    return _steps_on[device]
