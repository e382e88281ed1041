"""What differs between tensors in the memory of the process and those on a GPU: who can step them,
on which stream, where states and copies are made, and what must not be given back before the GPU
has read it.

Everything that the package asks of a device goes through the functions here, by their module, so
that tests can put another device in their place (tests/python/fake_gpu.py).
"""

import warnings

import torch

#: whether it was said that memory could not be pinned
_told = False


def of(tensor):
    """Where a tensor lies."""
    return tensor.device


def is_asynchronous(device):
    """Whether work on it is submitted, and done when somebody waits."""
    return device.type != "cpu"


def check(p, name):
    """Raises ValueError where a parameter lies that nothing here can step."""
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
    """As halfstep_options.device has it; None is the process's."""
    return None if device.type == "cpu" else f"{device.type}:{device.index or 0}".encode()


def stream(device):
    """The stream that torch works on now, as the driver knows it; None is the default one."""
    return torch.cuda.current_stream(device).cuda_stream or None


def capturing(device):
    """Whether that stream is being captured into a graph."""
    return torch.cuda.is_current_stream_capturing()


def record(tensors, device):
    """Tells torch's allocator that the current stream reads these, so that their memory stays until
    it has."""
    current = torch.cuda.current_stream(device)
    for tensor in tensors:
        tensor.record_stream(current)


def zeros(shape, dtype, device):
    return torch.zeros(shape, dtype=dtype, device=device)


def is_plain(tensor):
    """Whether the memory of a tensor holds its elements one after another, as they are. It does not
    where torch negates them when they are read, as in the imaginary part of a conjugate, or knows
    that they are zero and keeps none.
    """
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor._is_zerotensor()


def contiguous(tensor):
    """The same in memory order, where it lies: the tensor itself if is_plain()."""
    tensor = tensor.detach()
    return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg().contiguous()


def clone(tensor):
    """A copy in memory order."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def to_cpu(tensor):
    """The same in the process's memory, in memory order: the tensor itself if it is there."""
    return contiguous(tensor.detach().cpu())


def check_memory(tensor, what):
    """Raises ValueError for a tensor that has elements and no memory for them. `what` begins the
    sentence."""
    if (
        tensor.numel()
        and not tensor._is_zerotensor()
        and tensor.device.type != "meta"
        and not tensor.data_ptr()
    ):
        raise ValueError(
            f"halfstep: {what} has {tensor.numel()} elements and no memory: it was freed"
            " (untyped_storage().resize_(0)), or it is a stand-in of a transformation of torch;"
            " give it memory before the step"
        )


def place(tensor, device):
    """The same on a device: the tensor itself if it is there."""
    return tensor if of(tensor) == device else tensor.to(device)


def pinned(shape, dtype):
    """Memory of the process that a GPU reads and writes by itself; ordinary memory, which it takes
    longer for, where the system gives no more of that, with one warning."""
    global _told
    try:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        if not _told:
            _told = True
            warnings.warn(
                f"halfstep: no memory could be pinned ({str(error).splitlines()[0]}); ordinary"
                " memory is used, and copies to and from it hold up the GPU. This is said once",
                RuntimeWarning,
                stacklevel=3,
            )
        return torch.empty(shape, dtype=dtype, device="cpu")


def is_pinned(tensor):
    """Whether a GPU reads and writes it by itself."""
    return tensor.is_pinned()


def check_copies(p, name):
    """Raises ValueError where a parameter lies whose copies cannot be put on streams."""
    device = of(p)
    if is_asynchronous(device) and not hasattr(getattr(torch, device.type, None), "Stream"):
        raise ValueError(
            f"halfstep: parameter {name!r} is on {device}, from which nothing can be offloaded:"
            " torch has no streams there"
        )


class Side:
    """A stream of a device beside the current one, for copies."""

    def __init__(self, device):
        self.device, self.torch = device, getattr(torch, device.type)
        self.stream = self.torch.Stream(device)

    def follow(self):
        """What comes from now on waits for what is on the current stream now."""
        self.stream.wait_stream(self.torch.current_stream(self.device))

    def lead(self, event=None):
        """What comes on the current stream from now on waits for what is here now, or for what came
        before an event()."""
        current = self.torch.current_stream(self.device)
        if event is None:
            current.wait_stream(self.stream)
        else:
            current.wait_event(event)

    def after(self, event):
        """What comes from now on waits for an event() of another Side of the device."""
        self.stream.wait_event(event)

    def copy(self, to, tensor):
        """Copies a tensor into another, one of them in memory that is pinned. What lies on the
        device stays until that is done."""
        with self.torch.stream(self.stream):
            to.copy_(tensor, non_blocking=True)
        for one in (to, tensor):
            if is_asynchronous(one.device):
                one.record_stream(self.stream)

    def event(self):
        """What stands for everything here until now, for wait()."""
        return self.stream.record_event()


def scaler():
    """The class GradScaler, which was CUDA's alone before torch 2.3."""
    return getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler


def wait(event):
    """Until a Side has done what came before an event()."""
    event.synchronize()
