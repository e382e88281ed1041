"""States and steps in CPU memory, while weights are on a GPU: for devices that the library has no
kernels for, and for CPUOffload."""

import contextlib
import queue
import threading
import weakref

import torch

from .._states.members import NOTHING
from .._states.watch import version
from .._tensors import devices, matrices, sharding
from .._tensors.parameters import PLAIN, check_gradient, dense, follow_gradients
from .._tensors.sharding import local, stored
from .._tensors.torch_public import warn_once
from .beside import Placement
from .overlap import Overlap


class _Copy:
    """What this process keeps of one weight of the GPU.

    weight, as_of   the pinned copy of the weight, and _mark() of the parameter when it was copied
    gradient        the pinned copy of a gradient
    given           the gradient that it is a copy of, as (weak reference, mark), or None
    alone           True if the copy is the only one there is
    more            another gradient, (copy, event), that is still to be added to `gradient`
    down            the event of the last fetch; after it, everything that was fetched is here
    """

    def __init__(self):
        self.weight = self.as_of = self.gradient = self.given = self.more = self.down = None
        self.alone = False

    def is_of(self, grad):
        """Returns True if `gradient` holds what this tensor holds."""
        return (
            grad is self.gradient
            or self.given is not None
            and self.given[0]() is grad
            and self.given[1] == _mark(grad)
        )


def _mark(tensor):
    """Returns a mark of a tensor. The mark changes as soon as somebody writes the tensor or gives
    it other memory."""
    return version(tensor), stored(tensor).data_ptr()


def _place(p):
    """Returns where the memory of a parameter is, or None if it has none."""
    try:
        return stored(p).data_ptr()
    except (RuntimeError, ValueError):  # sparse, or not initialized
        return None


def _fits(held, tensor):
    return held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype


class Offloaded(Placement):
    """Steps parameters where they are if the library has kernels for their device, and else in CPU
    memory. Copies weights and gradients on two streams beside the current one, one for each
    direction. It is the placement of all optimizers; those of StateStreaming and CPUOffload bring
    other parameters, too.

    active    True once there are parameters to copy
    """

    work = overlap = None
    active = False

    def __init__(self, parts):
        super().__init__(parts)
        self.hooks, self.copies, self.sides = [], {}, {}
        self.thread = self.error = None
        #: pinned memory that is free for gradients, by dtype and size
        self.spare = {}
        #: where weights lay when they were last looked at, and (parameter, place) of those that the
        #: thread steps or has stepped since settle()
        self.places, self.sent = {}, []
        #: True once somebody has moved weights about
        self.moving = False

    def made(self, parts):
        self.overlap = Overlap(parts)

    def hook(self):
        """Copies gradients as they come, and steps in advance by them, unless gradient release
        takes them."""
        params = self.groups.params()
        if not self.active and not any(map(self._is_offloaded, params)):
            return
        self.active = True
        self.places = {p: _place(p) for p in params}
        for handle in self.hooks:
            handle.remove()
        self.hooks = follow_gradients(
            filter(self._is_offloaded, params),
            self,
            lambda held, p: held.groups.options.gradient_release or held._came(p),
        )
        self._tell(filter(self._is_foreign, params))

    def _tell(self, params):
        """Warns once of each kind of device whose parameters are stepped in CPU memory because the
        library has no kernels for it, and says what that costs."""
        found = {}
        for p in params:
            found.setdefault(devices.kind(devices.of(stored(p))), []).append(p)
        for kind, some in found.items():
            count = sum(local(p).numel() for p in some)
            size = sum(stored(p).nbytes + local(p).numel() * p.dtype.itemsize for p in some)
            warn_once(
                f"parameters on {kind} are stepped by the processor, because the library has no"
                " kernels for this device. Their states are in CPU memory, and each step copies"
                f" {size / count:.3g} bytes a parameter over the bus: gradients here, weights back."
                " halfstep.CPUOffload(..., overlap=True) hides this under the backward pass"
            )

    @staticmethod
    def _is_foreign(p):
        """Returns True if the library has no kernels for the device of a parameter."""
        return not devices.has_kernels(devices.of(stored(p)))

    def _is_gathered(self, p):
        owners = self.groups.options.owners
        if not sharding.is_dtensor(p) and owners is None:
            return False
        group = self.groups.group_of(p)
        rule = self.groups.row_of(group).name
        return sharding.is_gathered(rule, p, matrices.how_of(group), owners)

    def may_leave(self, p):
        """Returns True if `p` can be stepped in CPU memory, or with states that come from there,
        while it is on a GPU. Batches of ownership.py bring states by themselves."""
        return (
            devices.is_asynchronous(devices.of(stored(p)))
            and local(p).numel() > 0
            and not self._is_gathered(p)
        )

    def _is_offloaded(self, p):
        """Returns True if `p` is stepped in CPU memory and is elsewhere."""
        device = devices.of(stored(p))
        return not devices.has_kernels(device) and devices.has_streams(device) and self.may_leave(p)

    def _placed(self, p):
        """Returns the gradient in the placements of its parameter."""
        return sharding.gradient_of(p, p.grad, self.names.given.get(p, "?"))

    @torch.no_grad()
    def _came(self, p):
        options, device = self.groups.options, devices.of(local(p.grad))
        if (
            not (options.offload_gradients or options.overlap)
            and devices.is_asynchronous(device)
            and self._side(device, False).alone
        ):
            return  # a copy would hold the backward pass up, and hide nothing
        self._copy_gradient(p)
        self.overlap.take(p)

    def _copy_gradient(self, p):
        if p.grad.layout != torch.strided:
            return  # step() refuses it by name
        if not devices.is_asynchronous(devices.of(local(p.grad))):
            return  # it is in CPU memory, and so is a model that somebody has moved there
        grad, alone = self._placed(p), self.groups.options.offload_gradients
        if grad is p.grad or alone:
            self._take(p, grad, alone)
        if alone:
            p.grad = None

    def home(self, p):
        if self._is_offloaded(p) or self._is_foreign(p):
            return devices.HOST
        return super().home(p)

    def check_device(self, p, name):
        if devices.of(stored(p)) != self.home(p):
            devices.check_copies(stored(p), name)
        else:
            super().check_device(p, name)

    def built(self, params):
        if not self.active:
            self.hook()  # parameters may have been moved to another device
        known = set(params)
        self.copies = {p: copy for p, copy in self.copies.items() if p in known}
        self.overlap.keep(known)

    # ---- Copies ----------------------------------------------------------------------------------

    def _side(self, device, up):
        key = (device, up)
        if key not in self.sides:
            self.sides[key] = devices.Side(device)
        return self.sides[key]

    def _copy_of(self, p):
        if p not in self.copies:
            self.copies[p] = _Copy()
        return self.copies[p]

    def _fetch(self, into, tensor):
        """Begins to copy a tensor from the GPU. Returns the event after which the copy is here."""
        side = self._side(devices.of(tensor), False)
        side.follow()
        side.copy(into, dense(tensor))
        return side.event()

    def _take_buffer(self, tensor):
        held = self.spare.get((tensor.dtype, tensor.numel()))
        return held.pop().view(tensor.shape) if held else devices.pinned(tensor.shape, tensor.dtype)

    def _leave_buffer(self, buffer):
        self.spare.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)

    # ---- Gradients -------------------------------------------------------------------------------

    def _take(self, p, grad, alone):
        """Begins to copy a complete gradient of p. `alone`: nobody else will keep the gradient.
        Gradients of further backward passes are then added here, in their dtype and in order, as on
        the GPU."""
        copy, here = self._copy_of(p), local(grad)
        self.overlap.spoil(p)
        if copy.alone:
            self.complete(copy)
            buffer = self._take_buffer(here)
            copy.more = buffer, self._fetch(buffer, here)
            return
        if not _fits(copy.gradient, here):
            copy.gradient = self._take_buffer(here)
        copy.down, copy.alone = self._fetch(copy.gradient, here), alone
        copy.given = None if alone else (weakref.ref(grad), _mark(grad))

    def complete(self, copy):
        """Adds a gradient that is still to be added to a copy."""
        if copy.more is not None:
            devices.wait(copy.more[1])  # the first gradient came before it
            copy.gradient.add_(copy.more[0])
            self._leave_buffer(copy.more[0])
            copy.more = None

    def gradient_of(self, p):
        if not self.active:
            return p.grad
        copy = self.copies.get(p)
        kept_here = copy is not None and copy.alone
        if kept_here and p.grad is not None and self.groups.options.offload_gradients:
            self._copy_gradient(p)  # a hook raised before it was added to the copy
        went = not devices.is_asynchronous(devices.of(stored(p)))
        if went and p.grad is not None and devices.is_asynchronous(devices.of(local(p.grad))):
            # A trainer has moved the weight to CPU memory since its gradient came.
            if copy is None or not copy.is_of(p.grad):
                self._take(p, self._placed(p), False)
                copy = self.copies[p]
        elif p.grad is not None or not kept_here:
            return p.grad
        self.complete(copy)
        if went and copy.down is not None:
            devices.wait(copy.down)  # arrive() waits for members of other devices only
        return copy.gradient

    def check_gradient(self, p, grad, name):
        copy = self.copies.get(p)
        if (
            copy is not None
            and grad is copy.gradient
            and grad.shape == local(p).shape
            and grad.dtype in PLAIN
        ):
            return PLAIN[grad.dtype]  # it was a gradient of this parameter on the GPU
        return super().check_gradient(p, grad, name)

    def doubt(self):
        """Notes that gradients on the GPU may differ from the copies."""
        for copy in self.copies.values():
            copy.given = None

    def drop(self):
        """Forgets gradients that exist only here."""
        for copy in self.copies.values():
            if copy.more is not None:
                self._leave_buffer(copy.more[0])  # the next copy to it is on the same stream
            copy.alone, copy.more = False, None

    def forget(self):
        self.settle()
        self.drop()
        self.overlap.drop()

    # ---- Weights and gradients of a step ---------------------------------------------------------

    def bring(self, m, p, grad):
        copy, here = self._copy_of(p), stored(p).detach()
        if not copy.is_of(grad):
            grad = sharding.gradient_of(p, grad, m.name)
        if copy.as_of is None or copy.as_of[0] is None or copy.as_of != _mark(p):
            self.overlap.spoil(p)
            if not _fits(copy.weight, here):
                copy.weight = devices.pinned(here.shape, here.dtype)
            copy.as_of, copy.down = None, self._fetch(copy.weight, here)
        if not copy.is_of(grad):
            self._take(p, grad, False)
        return copy.weight, copy.gradient

    def weight_here(self, m):
        copy = self.copies.get(m.p)
        if m.offloaded and copy is not None and copy.as_of == _mark(m.p):
            return copy.weight
        for side in self._ups():
            side.lead()  # the weight may still be on its way to the GPU
        return super().weight_here(m)

    def arrive(self, members):
        # Weights may still be on their way to the GPU, where nobody reads them before the copies
        # that follow.
        for m in members:
            copy = self.copies.get(m.p)  # gathered ones have none
            if copy is not None and copy.down is not None:
                devices.wait(copy.down)
                copy.down = None

    def put_back(self, members):
        if members and not self.groups.options.gradient_release:
            # In release the gradient comes after all reads of the weight.
            for side in self._ups():
                side.follow()
        for m in members:
            self.overlap.swap(m.p)
            copy, here = self.copies[m.p], stored(m.p).detach()
            side = self._side(devices.of(here), True)
            if devices.is_plain(here):
                side.copy(here, copy.weight)
            else:
                here.copy_(copy.weight)
            copy.as_of = _mark(m.p)  # the weight is now the same here and there

    def gather_results(self, engine):
        return self.overlap.gather_results(engine)

    def judge(self, engine, done):
        self.overlap.judge(engine, done)

    def _ups(self):
        """Returns the streams that copy to GPUs."""
        return [side for (_, up), side in self.sides.items() if up]

    # ---- Steps -----------------------------------------------------------------------------------

    def stepping(self):
        return self._stepping() if self.active else NOTHING

    @contextlib.contextmanager
    def _stepping(self):
        self.settle()
        try:
            yield
        finally:
            self.overlap.end()
        self.drop()
        self._lead()

    def released(self, p, steps):
        # Handles belong to one thread at a time. Parameters that are stepped where they are keep
        # their gradients until step().
        if not self.active:
            return False
        if self._is_offloaded(p):
            grad = self._placed(p)
            check_gradient(p, grad, self.names.given.get(p, "?"))
            self.groups.options.check_mode(self.groups)
            place = _place(p)
            self.moving |= self.places.setdefault(p, place) != place
            self.places[p] = place
            self.sent.append((p, place))
            self._send(steps, p, grad, self.groups.options.optimizer_accumulation)
            p.grad = None
            if self.moving:  # the weight must be there before it leaves again
                self.settle()
                self._lead()
        return True

    def stepped_alone(self, p):
        if p in self.copies:
            self.copies[p].alone = False  # used up, as by step()
        self._lead()

    def _lead(self):
        """Makes later work on the current streams wait for the weights."""
        for side in self._ups():
            side.lead()

    def stepped_in_release(self, params):
        for p in params:
            p.grad = None

    # ---- Steps while the backward pass goes on ---------------------------------------------------

    def _send(self, steps, p, grad, micro):
        """Sends p to the thread, which steps p as soon as its gradient is here."""
        buffer = self._take_buffer(local(grad))
        down = self._fetch(buffer, local(grad))
        self.send(self._carry_out, weakref.ref(steps), p, buffer, down, micro)

    def send(self, method, *arguments):
        """Has a thread call a method, after all that were sent before, unless its object is
        gone."""
        if self.thread is None:
            self.work = queue.SimpleQueue()
            self.thread = threading.Thread(
                target=_run, args=(self.work,), name="halfstep-offload", daemon=True
            )
            self.thread.start()
        self.work.put((weakref.WeakMethod(method), *arguments))

    def _carry_out(self, steps, p, buffer, down, micro):
        steps, copy = steps(), self._copy_of(p)
        if steps is None:
            return
        copy.gradient, copy.down, copy.given, copy.alone = buffer, down, None, True
        if self.error is None:  # after an error, gradients stay until step() has raised it
            try:
                steps.step_sent(p, buffer, micro)
            except BaseException as error:
                self.error = error
                return
            copy.gradient, copy.alone = None, False
            self._leave_buffer(buffer)

    def settle(self):
        """Waits until all parameters that were sent are stepped. Raises an error of that thread."""
        if self.thread is None or threading.current_thread() is self.thread:
            return
        done = threading.Event()
        self.work.put(done)
        done.wait()
        error, self.error = self.error, None
        sent, self.sent = self.sent, []
        if error is not None:
            raise error
        for p, place in sent:
            if _place(p) != place:
                self.moving = True
                raise RuntimeError(
                    f"halfstep: parameter {self.names.find(p)!r} was moved while gradient_release"
                    " stepped it in another thread, so weights may be wrong; go back to a"
                    " checkpoint. A trainer that swaps blocks has to begin with it before the first"
                    " backward pass, or to use gradient_release=False"
                )

    def __del__(self):
        if self.work is not None:
            self.work.put(None)


def _run(work):
    while True:
        item = work.get()
        if item is None:
            return
        if isinstance(item, threading.Event):
            item.set()
        else:
            method = item[0]()
            if method is not None:
                method(*item[1:])
            method = None
        item = None
