"""What differs between tensors in the memory of the process and those on a GPU: who can step them, on which stream, where states
and copies are made, and what must not be given back before the GPU has read it.

Everything that the package asks of a device goes through the functions here, by their module, so that tests can put another
device in their place (tests/python/fake_gpu.py).
"""
import torch

_CPU = torch.device("cpu")


def of(tensor):
    """Where a tensor lies."""
    return tensor.device


def is_late(device):
    """Whether work on it is submitted, and done when somebody waits."""
    return device.type != "cpu"


def check(p, name):
    """Raises ValueError where a parameter lies that nothing here can step."""
    device = of(p)
    if device.type == "cuda":
        if torch.version.hip:
            raise ValueError(f"halfstep: parameter {name!r} is on {device}, which is an AMD GPU in this build of torch (ROCm); "
                             "halfstep steps tensors of CPUs and of NVIDIA GPUs")
    elif device.type != "cpu":
        raise ValueError(f"halfstep: parameter {name!r} is on {device}; halfstep steps tensors of CPUs and of NVIDIA GPUs")


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
    """Tells torch's allocator that the current stream reads these, so that their memory stays until it has."""
    current = torch.cuda.current_stream(device)
    for tensor in tensors:
        tensor.record_stream(current)


def zeros(shape, dtype, device):
    return torch.zeros(shape, dtype=dtype, device=device)


def contiguous(tensor):
    """The same in memory order, where it lies."""
    return tensor.detach().contiguous()


def clone(tensor):
    """A copy in memory order."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def to_cpu(tensor):
    """The same in the process's memory, in memory order: the tensor itself if it is there."""
    return tensor.detach().cpu().contiguous()


def place(tensor, device):
    """The same on a device: the tensor itself if it is there."""
    return tensor if is_late(device) == is_late(of(tensor)) and of(tensor) == device else tensor.to(device)
