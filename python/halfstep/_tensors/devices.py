"""The differences between tensors in CPU memory and on a GPU: which of them can be stepped, on
which stream, where states and copies are made, and which memory must stay until the GPU has read
it.

The package asks torch about devices only by these functions, through this module. Tests can
therefore put another device in their place (tests/python/fake_gpu.py).
"""

import torch

from .torch_private import is_zerotensor
from .torch_public import warn

#: where tensors are that are on no GPU
HOST = torch.device("cpu")
#: True once the warning about pinned memory was given
_told = False


def of(tensor):
    """Returns the device of a tensor."""
    return tensor.device


def is_asynchronous(device):
    """Returns True if work on the device is only submitted, and done once somebody has waited."""
    return device.type != "cpu"


def check(p, name):
    """Raises ValueError if no device of halfstep can step this parameter, or if it has no
    memory."""
    device = of(p)
    if device.type == "cuda":
        if torch.version.hip:
            raise ValueError(
                f"halfstep: parameter {name!r} is on {device}, which is an AMD GPU in this build of"
                " torch (ROCm); halfstep steps tensors of CPUs and of NVIDIA GPUs"
            )
    elif device.type != "cpu":
        raise ValueError(
            f"halfstep: parameter {name!r} is on {device}; halfstep steps tensors of CPUs and of"
            " NVIDIA GPUs"
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
    them."""
    device = of(p)
    if is_asynchronous(device) and not hasattr(getattr(torch, device.type, None), "Stream"):
        raise ValueError(
            f"halfstep: parameter {name!r} cannot be offloaded from {device}: torch has no"
            " streams there"
        )


class Side:
    """A second stream of a device, for copies."""

    def __init__(self, device):
        self.device, self.torch = device, getattr(torch, device.type)
        self.stream = self.torch.Stream(device)

    def follow(self):
        """Makes later work on this stream wait for the work that the current stream has now."""
        self.stream.wait_stream(self.torch.current_stream(self.device))

    def lead(self, event=None):
        """Makes later work on the current stream wait for the work that this stream has now, or
        only for the work before an event()."""
        current = self.torch.current_stream(self.device)
        if event is None:
            current.wait_stream(self.stream)
        else:
            current.wait_event(event)

    def after(self, event):
        """Makes later work on this stream wait for an event() of another Side of the device."""
        self.stream.wait_event(event)

    def copy(self, to, tensor):
        """Copies a tensor into another on this stream. One of them must be in pinned memory. The
        memory on the device stays until the copy is done."""
        with self.torch.stream(self.stream):
            to.copy_(tensor, non_blocking=True)
        for one in (to, tensor):
            if is_asynchronous(one.device):
                one.record_stream(self.stream)

    def event(self):
        """Returns an event for all work on this stream until now."""
        return self.stream.record_event()


def scaler():
    """Returns the class GradScaler. Before torch 2.3 only torch.cuda had one."""
    return getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler


def wait(event):
    """Waits until a Side has done the work before an event()."""
    event.synchronize()
