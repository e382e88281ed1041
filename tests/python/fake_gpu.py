"""A GPU for the package's tests on machines without one. tests/cuda/fake takes the place of the
driver, and tensors of torch lie in its memory. To torch these are CPU tensors. So only answers of
halfstep._tensors.devices are different: where a tensor lies, the current stream, copies.

What the library does on the "GPU" happens when somebody waits for its stream. What torch does
happens at once, so tests put writes to gradients into the stream by `later()`. On a machine with a
GPU, tests take `Real` instead. It has the same functions, answered by torch.cuda.
"""

import contextlib
import ctypes
import gc
import os
import re
import threading

import pytest
import torch

from halfstep._step import steps
from halfstep._tensors import devices

HOST = torch.device("cpu")


_TYPES = {"int": ctypes.c_int, "long": ctypes.c_long, "const char *": ctypes.c_char_p}


def _fields():
    """Returns the fields of a structure, read from the header, the only place that lists them."""
    with open(
        os.path.join(os.path.dirname(__file__), os.pardir, "cuda", "fake", "fake_cuda.h")
    ) as file:
        text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
    numbers = dict(re.findall(r"#define (\w+) (\w+)", text))
    names = re.search(r"enum fake_cuda_mutation \{(.*?)\}", text, re.S)[1].replace(",", " ").split()
    for kind, declared in re.findall(
        r"^ *(int|long|const char \*) ?(\w[^;]*);",
        re.search(r"struct fake_cuda_control \{(.*?)\}", text, re.S)[1],
        re.M,
    ):
        for name, room in re.findall(
            r"(\w+)(?:\[(\w+)\])?", re.sub(r"\s", " ", declared).replace(",", " , ")
        ):
            yield name, _TYPES[kind] * names.index(numbers[room]) if room else _TYPES[kind]


class Control(ctypes.Structure):
    _fields_ = list(_fields())


WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def load():
    """Loads the fake driver under the name that the library looks for."""
    folder = os.path.join(os.environ.get("HALFSTEP_BUILD", "build"), "tests", "cuda", "fake")
    os.environ["FAKE_CUDA_OPEN"] = "1"
    os.environ.setdefault("FAKE_CUDA_DEVICES", "2")
    os.environ.setdefault("HALFSTEP_DEVICE_CHECK", "never")  # test_device_check has it
    os.environ.setdefault("HALFSTEP_CUDA_IMAGE", os.path.join(folder, "image"))
    driver = ctypes.CDLL(os.path.join(folder, "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    driver.fake_cuda_control.restype = ctypes.POINTER(Control)
    return driver


#: If torch has loaded a real driver, the process finds no other one of that name.
needs_fake = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is here: the fake driver cannot take its place"
)


class Fake:
    real = False

    def __init__(self):
        self.driver = load()
        self.control = self.driver.fake_cuda_control().contents
        self.blocks = []  # (address, bytes, device)
        self.streams = {0: None, 1: None}
        self.recorded, self.works, self.captured = [], [], False
        #: copies by a Side: (bytes, whether to the GPU); and what is asked of the driver comes from
        #: one thread at a time
        self.moved, self.pins, self.lock = [], [], threading.RLock()
        #: streams: of this test, and of earlier ones; the driver has 64
        self.taken, self.spare = [], []

    # ---- The driver ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def context(self, device=0):
        context = ctypes.c_void_p()
        with self.lock:
            assert not self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            assert not self.driver.cuCtxPushCurrent_v2(context)
            try:
                yield
            finally:
                self.driver.cuCtxPopCurrent_v2(ctypes.byref(context))

    def synchronize(self):
        """Waits until all work on the current streams is done. Work on other streams stays undone
        unless the code under test waits for it."""
        with self.context():
            for stream in self.streams.values():
                assert not self.driver.cuStreamSynchronize(ctypes.c_void_p(stream))

    def later(self, tensor, values):
        """Writes values into a tensor in the turn of the current stream."""
        device = self.of(tensor).index
        self.submit(tensor, values.detach().clone().contiguous(), device, self.streams[device])

    def submit(self, to, tensor, device, stream):
        """Submits a copy to a stream."""
        assert (
            to.is_contiguous()
            and tensor.is_contiguous()
            and to.dtype == tensor.dtype
            and to.numel() == tensor.numel()
        )
        size = tensor.numel() * tensor.element_size()
        if not size:
            return
        work = WORK(lambda _: ctypes.memmove(to.data_ptr(), tensor.data_ptr(), size) and None)
        with self.context(device):
            self.works += [work, tensor, to]
            self.driver.fake_cuda_submit(ctypes.c_void_p(stream), work, None, ctypes.c_size_t(0))

    def stream(self):
        """Makes another stream."""
        if not self.spare:
            made = ctypes.c_void_p()
            with self.context():
                assert not self.driver.cuStreamCreate(ctypes.byref(made), 0)
            self.spare.append(made.value)
        self.taken.append(self.spare.pop())
        return self.taken[-1]

    def event(self, stream):
        event = ctypes.c_void_p()
        with self.context():
            self.driver.cuEventCreate(ctypes.byref(event), 0)
            self.driver.cuEventRecord(event, ctypes.c_void_p(stream))
        return event

    def wait(self, event):
        with self.context():
            assert not self.driver.cuEventSynchronize(event)

    def wait_for(self, ours, other, event=None):
        """Makes later work on the stream `ours` wait for the present work of `other`, or for an
        event."""
        event = event or self.event(other)
        with self.context():
            self.driver.cuStreamWaitEvent(ctypes.c_void_p(ours), event, 0)

    def pinned(self, shape, dtype):
        made = torch.full(shape, 77, dtype=dtype)
        self.pins.append((made.data_ptr(), made.numel() * made.element_size(), made))
        return made

    def is_pinned(self, tensor):
        return any(at == tensor.data_ptr() for at, _, _ in self.pins)

    @contextlib.contextmanager
    def on(self, stream, device=0):
        """Makes a stream the current one."""
        before, self.streams[device] = self.streams[device], stream
        try:
            yield
        finally:
            self.streams[device] = before

    @contextlib.contextmanager
    def capture(self, stream):
        """Captures the stream, which is current inside. Yields a list that gets the replay."""
        graph, replays = ctypes.c_void_p(), []
        with self.on(stream):
            with self.context():
                assert not self.driver.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), 0)
            self.captured = True
            try:
                yield replays
            finally:
                self.captured = False
                with self.context():
                    ended = self.driver.cuStreamEndCapture(
                        ctypes.c_void_p(stream), ctypes.byref(graph)
                    )
        assert not ended

        def replay():
            with self.context():
                assert not self.driver.cuGraphLaunch(graph, ctypes.c_void_p(stream))

        replays.append(replay)

    # ---- Tensors ---------------------------------------------------------------------------------

    def tensor(self, values, device=0):
        """Returns a copy of a tensor in the memory of the device."""
        values = values.detach().contiguous()
        size = max(values.numel() * values.element_size(), 1)
        address = ctypes.c_uint64()
        with self.context(device):
            if self.driver.cuMemAlloc_v2(
                ctypes.byref(address), ctypes.c_size_t((size + 255) // 256 * 256)
            ):
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        self.blocks.append((address.value, size, device))
        if not values.numel():
            return values.clone()
        made = torch.frombuffer(
            (ctypes.c_char * size).from_address(address.value), dtype=values.dtype
        ).view(values.shape)
        made.copy_(values)
        return made

    def model(self, model):
        """Moves the module to the memory of a device: weights, and gradients that torch makes of
        them. Since torch computes at once, its work does not come in the stream's turn. So every
        forward pass and state_dict() first wait for submitted work.
        """

        def wait(*_):
            self.synchronize()

        for p in model.parameters():
            p.data = self.tensor(p)
            p.register_hook(self.tensor)
        model.register_forward_pre_hook(wait)
        model.register_state_dict_pre_hook(wait)
        return model

    def of(self, tensor):
        at = tensor.untyped_storage().data_ptr() if tensor.numel() else 0
        for address, size, device in self.blocks:
            if address <= at < address + size:
                return torch.device("cuda", device)
        return tensor.device

    def place(self, tensor, device):
        if self.of(tensor) == device:
            return tensor
        return self.tensor(tensor, device.index) if device.type == "cuda" else self.read(tensor)

    def like(self, tensor, made):
        return self.place(made, self.of(tensor))

    def copy(self, to, tensor):
        """Copies a tensor once all earlier work is done."""
        self.synchronize()
        to.copy_(tensor)

    def read(self, tensor):
        """Returns a tensor's values in the process's memory, once all earlier work is done."""
        if self.of(tensor).type == "cuda":
            self.synchronize()
            return tensor.detach().clone(memory_format=torch.contiguous_format)
        return tensor.detach().contiguous()

    def install(self, patch):
        for name, function in (
            ("of", self.of),
            ("capability", lambda device: divmod(self.control.compute, 10)),
            ("stream", lambda device: self.streams[device.index]),
            ("capturing", lambda device: self.captured),
            (
                "record",
                lambda tensors, device: self.recorded.extend(
                    (t.data_ptr(), device) for t in tensors
                ),
            ),
            (
                "zeros",
                lambda shape, dtype, device=devices.HOST: self.place(
                    torch.zeros(shape, dtype=dtype), device
                ),
            ),
            ("clone", lambda tensor: self.like(tensor, self.read(tensor).clone())),
            ("contiguous", lambda tensor: self.like(tensor, self.read(tensor))),
            ("copy", self.copy),
            ("to_cpu", self.read),
            ("place", self.place),
            ("pinned", self.pinned),
            ("is_pinned", self.is_pinned),
            ("wait", self.wait),
            ("Side", lambda device: Side(self, device)),
        ):
            assert hasattr(devices, name)
            patch.setattr(devices, name, function)
        step = steps.Steps.step_sent

        def alone(*arguments):  # the library asks the driver, too
            with self.lock:
                step(*arguments)

        patch.setattr(steps.Steps, "step_sent", alone)

    def close(self):
        """Frees everything, and fails if the driver was misused."""
        gc.collect()
        self.streams.update((device, None) for device in self.streams)
        self.synchronize()
        with self.context():
            for stream in self.taken:
                assert not self.driver.cuStreamSynchronize(ctypes.c_void_p(stream))
        self.spare, self.taken = self.spare + self.taken, []
        offence, self.control.offence = self.control.offence, None
        for address, _, device in self.blocks:
            with self.context(device):
                self.driver.cuMemFree_v2(ctypes.c_uint64(address))
        self.blocks, self.works, self.recorded, self.streams, self.moved, self.pins = (
            [],
            [],
            [],
            {0: None, 1: None},
            [],
            [],
        )
        assert offence is None, offence

    @property
    def waits(self):
        return self.control.synchronizations


class Side:
    """Takes the place of halfstep._tensors.devices.Side."""

    alone = False

    def __init__(self, fake, device):
        self.fake, self.device, self.stream = fake, device, fake.stream()

    def follow(self):
        self.fake.wait_for(self.stream, self.fake.streams[self.device.index])

    def lead(self, event=None):
        self.fake.wait_for(self.fake.streams[self.device.index], self.stream, event)

    def after(self, event):
        self.fake.wait_for(self.stream, None, event)

    def copy(self, to, tensor):
        up = self.fake.of(to) == self.device
        host, there = (tensor, to) if up else (to, tensor)
        assert self.fake.of(there) == self.device and any(
            at == host.data_ptr() for at, _, _ in self.fake.pins
        )
        self.fake.moved.append((tensor.numel() * tensor.element_size(), up))
        self.fake.submit(to, tensor, self.device.index, self.stream)
        torch.autograd.graph.increment_version([to])

    def event(self):
        return self.fake.event(self.stream)


class Real:
    """The first GPU of torch, with the functions that tests on both kinds call."""

    real = True

    def tensor(self, values, device=0):
        return values.detach().to(torch.device("cuda", device))

    def read(self, tensor):
        return tensor.detach().cpu().contiguous()

    def later(self, tensor, values):
        tensor.copy_(values)

    def synchronize(self):
        torch.cuda.synchronize()

    def install(self, patch):
        pass

    def close(self):
        torch.cuda.synchronize()
