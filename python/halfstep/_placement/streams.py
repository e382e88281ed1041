"""States in CPU memory that pass through buffers of a GPU, where weights and gradients are."""

import contextlib
import math

import torch

from .._library import abi
from .._tensors import devices
from .._tensors.matrices import fields_of, lay_part
from .._tensors.sharding import local, stored
from .host import Offloaded

#: the number of buffers of a device. States come into one and leave another while a third is
#: stepped, so that the bus is used both ways at once
BUFFERS = 3
#: bytes of a buffer, unless a single parameter has more
BUFFER_BYTES = 256 << 20
#: tensors in a buffer begin at multiples of this, as with torch's allocators
_ALIGNED = 256


class _Buffer:
    """Memory of a GPU for the states of one stage after the other. `owner` is the last stage.
    `left` is the event after which its states have left."""

    def __init__(self, size, device):
        self.memory = devices.zeros((size,), torch.uint8, device)
        self.owner = self.left = None


class Bus:
    """The streams and buffers of one device, and the stages that take turns in them."""

    def __init__(self, device):
        self.device, self.stages, self.buffers = device, [], None
        self.up, self.down = devices.Side(device), devices.Side(device)

    def buffer(self, stage):
        if self.buffers is None:
            sizes = [
                max(s.size for s in self.stages[i::BUFFERS])
                for i in range(min(BUFFERS, len(self.stages)))
            ]
            self.buffers = [_Buffer(size, self.device) for size in sizes]
        return self.buffers[stage.number % BUFFERS]

    def forget(self):
        """Forgets states that were fetched and not used, because they may have changed since."""
        for stage in self.stages:
            stage.ready = None

    def wait(self):
        """Waits until all states are in CPU memory."""
        devices.wait(self.down.event())


class Stage:
    """Members whose states are on the GPU together, in one buffer."""

    def __init__(self, bus):
        self.bus, self.number, self.size = bus, len(bus.stages), 0
        bus.stages.append(self)
        #: for each member: where each of its planes begins in the buffer, by key
        self.places = {}
        #: for each member: the event after which its states are in CPU memory
        self.left = {}
        #: the event after which all states are in the buffer
        self.ready = None
        self.state = None

    def take(self, members, state):
        """Takes members, and the optimizer's state, which holds their states."""
        self.state = state
        for m in members:
            places = self.places[m] = {}
            for s in m.planes:
                places[s.key] = self.size
                self.size += -(-_bytes(s) // _ALIGNED) * _ALIGNED

    def kept_of(self, m):
        """Returns the device of a member's states between steps."""
        return devices.HOST

    def addresses(self, m):
        """Returns the memory of a member's planes while it is stepped, by key."""
        memory = self.bus.buffer(self).memory
        return {key: memory[at:] for key, at in self.places[m].items()}

    def _copies(self, members):
        """Yields (memory in the buffer, tensor in CPU memory) for each plane."""
        memory = self.bus.buffer(self).memory
        for m in members:
            held = self.state[m.p]
            for s in m.planes:
                at = self.places[m][s.key]
                yield memory[at : at + _bytes(s)].view(s.dtype).view(s.shape), local(held[s.key])

    def _fetch(self, members):
        """Begins to copy states into the buffer. Returns the event after which they are there."""
        bus, buffer = self.bus, self.bus.buffer(self)
        left = [self.left[m] for m in members if m in self.left]
        for event in {id(event): event for event in left}.values():
            bus.up.after(event)
        if buffer.owner is not self and buffer.left is not None:
            bus.up.after(buffer.left)
        for there, here in self._copies(members):
            bus.up.copy(there, here)
        return bus.up.event()

    def begin(self):
        """Begins to copy the states of all members, unless this step has begun already."""
        if self.ready is None:
            self.ready = self._fetch(self.places)
            self.bus.buffer(self).owner = self

    def end(self):
        """Does nothing: what a step leaves is in CPU memory."""

    @contextlib.contextmanager
    def states(self, only=None, written=True):
        """Returns a context in which states are in the buffer: those of all members, or of `only`.
        If they are written, they are copied back afterwards."""
        bus, buffer = self.bus, self.bus.buffer(self)
        members = self.places if only is None else [only]
        if only is None:
            self.begin()
            ready, self.ready = self.ready, None
            if self.number + 1 < len(bus.stages):
                bus.stages[self.number + 1].begin()
        else:
            ready = self._fetch(members)
        buffer.owner = self
        bus.up.lead(ready)
        try:
            yield
        finally:
            bus.down.follow()
            if written:
                for there, here in self._copies(members):
                    bus.down.copy(here, there)
            buffer.left = bus.down.event()
            if written:
                self.left.update(dict.fromkeys(members, buffer.left))


def _bytes(plane):
    return plane.dtype.itemsize * math.prod(plane.shape)


class Streamed(Offloaded):
    """Steps parameters where they are, with states of large ones in CPU memory, as far as the
    library has kernels for their device."""

    def __init__(self, parts):
        super().__init__(parts)
        self.buses = []

    def _is_streamed(self, p):
        return (
            not self._is_foreign(p)
            and self.may_leave(p)
            and local(p).numel() >= self.groups.options.minimal_size
        )

    def kept(self, one):
        leaves = one.p.numel() >= self.groups.options.minimal_size
        return devices.HOST if leaves and devices.is_asynchronous(one.home) else one.home

    def check_device(self, p, name):
        super().check_device(p, name)
        if self._is_streamed(p):
            devices.check_copies(stored(p), name)

    def released(self, p, steps):
        if self._is_streamed(p):  # a large one waits for the thread
            self.settle()
            return False
        return super().released(p, steps)

    def divide(self, wanted):
        """Divides parameters: first those whose states stay where they are stepped, then stages of
        about the size of a buffer."""
        stay, buses = [], {}
        room = getattr(self.groups.options, "buffer", BUFFER_BYTES)
        for one in wanted:
            if not self._is_streamed(one.p):
                stay.append(one)
                continue
            laid = lay_part(one.rule, one.p.shape, local(one.p).shape, one.how)
            size = abi.forecast((one.recipe, fields_of(laid), 1)).largest_states
            if one.home not in buses:
                buses[one.home] = Bus(one.home), []
            bus, stages = buses[one.home]
            if not stages or stages[-1][0] + size > room:
                stages.append([0, Stage(bus), []])
            stages[-1][0] += size
            stages[-1][2].append(one)
        self.buses = [bus for bus, _ in buses.values()]
        return super().divide(stay) + [
            (device, stage, some)
            for device, (_, stages) in buses.items()
            for _, stage, some in stages
        ]

    @contextlib.contextmanager
    def stepping(self):
        if any(devices.capturing(bus.device) for bus in self.buses):
            raise RuntimeError(
                "halfstep: a step of StateStreaming cannot be captured into a CUDA graph,"
                " because its states come from CPU memory; call step() outside the capture"
            )
        with super().stepping():
            try:
                yield
            finally:
                for bus in self.buses:
                    bus.forget()

    def heard(self):
        for bus in self.buses:
            bus.wait()
