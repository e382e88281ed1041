"""The differences between tensors in CPU memory and on a GPU: which of them can be stepped, and
where, on which stream, where states and copies are made, and which memory must stay until the GPU
has read it.

The package asks torch about devices only by these functions, through this module. Tests can
therefore put another device in their place (tests/python/fake_gpu.py).
"""

import contextlib

import torch

from .torch_private import is_zerotensor
from .torch_public import warn

#: where tensors are that are on no GPU
HOST = torch.device("cpu")
#: the lowest compute capability of an NVIDIA GPU that the library has kernels for
_OLDEST = 8, 0
#: True once the warning about pinned memory was given
_told = False


def of(tensor):
    """Returns the device of a tensor."""
    return tensor.device


def is_asynchronous(device):
    """Returns True if work on the device is only submitted, and done once somebody has waited."""
    return device.type != "cpu"


def capability(device):
    """Returns the compute capability of an NVIDIA GPU, as (major, minor)."""
    return torch.cuda.get_device_capability(device)


def has_kernels(device):
    """Returns True if tensors on the device can be stepped there. ROCm's GPUs are "cuda", too."""
    if device.type != "cuda" or torch.version.hip:
        return device.type == "cpu"
    return capability(device) >= _OLDEST


def kind(device):
    """Returns what texts call a device that has no kernels."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return "cuda (ROCm)"
    return "cuda of compute capability {}.{}".format(*capability(device))


def accelerator():
    """Returns the device that torch computes on beside the processor, or None."""
    if hasattr(torch, "accelerator"):
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cuda") if torch.cuda.is_available() else None


def has_streams(device):
    """Returns True if torch has streams for the device, so that a Side can copy its tensors."""
    return is_asynchronous(device) and _streams(device) is not None


def check(p, name):
    """Raises ValueError if the library has no kernels for a parameter's device, or if it has no
    memory."""
    device = of(p)
    if not has_kernels(device):
        raise ValueError(
            f"halfstep: parameter {name!r} is on {device}, for which the library has no kernels:"
            " this is for tensors of CPUs, and of NVIDIA GPUs of compute capability"
            f" {_OLDEST[0]}.{_OLDEST[1]} or higher"
        )
    check_memory(p, f"parameter {name!r}")


def c_name(device):
    """Returns the device as halfstep_options.device names it. None is the CPU."""
    return None if device.type == "cpu" else f"{device.type}:{device.index or 0}".encode()


def stream(device):
    """Returns torch's current stream as the driver knows it. None is the default stream."""
    return torch.cuda.current_stream(device).cuda_stream or None


def capturing(device):
    """Returns True if the current stream is being captured into a graph."""
    return torch.cuda.is_current_stream_capturing()


def record(tensors, device):
    """Tells torch's allocator that the current stream reads these tensors, so that their memory
    stays until then."""
    current = torch.cuda.current_stream(device)
    for tensor in tensors:
        tensor.record_stream(current)


def gpu_memory():
    """Returns the bytes of memory of the current GPU, or None without one."""
    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None


def zeros(shape, dtype, device=HOST):
    """Returns zeros. torch's default device and dtype do not matter."""
    return torch.zeros(shape, dtype=dtype, device=device)


def is_plain(tensor):
    """Returns True if the memory of a tensor holds its elements as they are, in order. Exceptions
    are tensors that torch negates when they are read, as the imaginary part of a conjugate, and
    tensors of zeros without memory."""
    return tensor.is_contiguous() and not tensor.is_neg() and not is_zerotensor(tensor)


def contiguous(tensor):
    """Returns the tensor in memory order on its device. If is_plain(), the memory is shared."""
    tensor = tensor.detach()
    return tensor.clone() if is_zerotensor(tensor) else tensor.resolve_neg().contiguous()


def clone(tensor):
    """Returns a copy in memory order."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def copy(to, tensor):
    """Copies a tensor into another, in the turn of the current stream. One of them may be in CPU
    memory; then waits until the copy is done."""
    to.copy_(tensor)


def to_cpu(tensor):
    """Returns the tensor in CPU memory, in memory order. If it is plain and there already, the
    memory is shared."""
    return contiguous(tensor.detach().cpu())


def check_memory(tensor, what):
    """Raises ValueError for a tensor that has elements and no memory for them. `what` begins the
    error text."""
    if (
        tensor.numel()
        and not is_zerotensor(tensor)
        and tensor.device.type != "meta"
        and not tensor.data_ptr()
    ):
        raise ValueError(
            f"halfstep: {what} has {tensor.numel()} elements and no memory: it was freed"
            " (untyped_storage().resize_(0)), or it is a stand-in of a transformation of torch;"
            " give it memory before the step"
        )


def place(tensor, device):
    """Returns the tensor on a device: the tensor itself if it is there already."""
    return tensor if of(tensor) == device else tensor.to(device)


def pinned(shape, dtype):
    """Returns pinned CPU memory, which a GPU reads and writes by itself. If the system has no more
    of it, warns once and returns ordinary memory, which takes the GPU longer."""
    global _told
    try:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        if not _told:
            _told = True
            warn(
                f"no memory could be pinned ({str(error).splitlines()[0]}); ordinary"
                " memory is used, and the GPU waits for copies to and from it. This warning is"
                " given once",
                RuntimeWarning,
            )
        return torch.empty(shape, dtype=dtype, device="cpu")


def is_pinned(tensor):
    """Returns True if the tensor is in pinned memory."""
    return tensor.is_pinned()


def check_copies(p, name):
    """Raises ValueError if torch has no streams on the parameter's device, because copies need
    them, or if it has no memory."""
    device = of(p)
    if is_asynchronous(device) and not has_streams(device):
        raise ValueError(
            f"halfstep: parameter {name!r} is on {device}; halfstep steps tensors of CPUs and of"
            " NVIDIA GPUs, and through CPU memory those of devices that torch has streams for,"
            f" which torch {torch.__version__} has not for this one"
            + ("" if hasattr(torch, "accelerator") else ": torch 2.6 or newer may have them")
        )
    check_memory(p, f"parameter {name!r}")


class _Accelerator:
    """The streams of torch's accelerator, under the names of the module of a device."""

    Stream = torch.Stream

    @staticmethod
    def current_stream(device):
        return torch.accelerator.current_stream(device)

    @staticmethod
    @contextlib.contextmanager
    def stream(stream):
        device = torch.accelerator.current_device_index()
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)  # which makes its device the current one
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(device)


def _streams(device):
    """Returns what makes and tells the streams of a device: the module of its kind, such as
    torch.xpu, or what torch has for any accelerator from 2.6 on. Returns None if there is
    neither."""
    module = getattr(torch, device.type, None)
    if all(hasattr(module, name) for name in ("Stream", "current_stream", "stream")):
        return module
    if not hasattr(torch, "accelerator"):
        return None
    found = accelerator()
    return _Accelerator if found is not None and found.type == device.type else None


class Side:
    """A second stream of a device, for copies.

    alone    True: torch has a single stream there, as on Apple's GPUs. Each copy then waits until
             it is done, so that there is nothing to wait for
    """

    def __init__(self, device):
        self.device, self.torch = device, _streams(device)
        self.stream = self.torch.Stream(device)
        self.alone = self.stream == self.torch.current_stream(device)

    def follow(self):
        """Makes later work on this stream wait for the work that the current stream has now."""
        if not self.alone:
            self.stream.wait_stream(self.torch.current_stream(self.device))

    def lead(self, event=None):
        """Makes later work on the current stream wait for the work that this stream has now, or
        only for the work before an event()."""
        if self.alone:
            return
        current = self.torch.current_stream(self.device)
        if event is None:
            current.wait_stream(self.stream)
        else:
            current.wait_event(event)

    def after(self, event):
        """Makes later work on this stream wait for an event() of another Side of the device."""
        if not self.alone:
            self.stream.wait_event(event)

    def copy(self, to, tensor):
        """Copies a tensor into another on this stream. One of them must be in pinned memory. The
        memory on the device stays until the copy is done."""
        if self.alone:
            to.copy_(tensor)
            return
        with self.torch.stream(self.stream):
            to.copy_(tensor, non_blocking=True)
        for one in (to, tensor):
            if is_asynchronous(one.device):
                one.record_stream(self.stream)

    def event(self):
        """Returns an event for all work on this stream until now, or None if it is done."""
        return None if self.alone else self.stream.record_event()


def scaler():
    """Returns the class GradScaler. Before torch 2.3 only torch.cuda had one."""
    return getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler


def wait(event):
    """Waits until a Side has done the work before an event(), which may be None."""
    if event is not None:
        event.synchronize()
