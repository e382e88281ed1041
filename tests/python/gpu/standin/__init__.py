"""A device that torch knows and halfstep has no kernels for, which stands in for AMD's, Apple's and
Intel's GPUs. standin.cpp says what it is like. Loading it makes it the accelerator of the process,
so tests load it in processes of their own."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import types

import torch
from torch.utils import cpp_extension

NAME = "standin"
_SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "standin.cpp")


def why_not():
    """Returns why it cannot be built here, or None."""
    if not shutil.which("g++"):
        return "there is no g++"
    if not torch_has_it():
        return f"torch {torch.__version__} has no torch.accelerator"
    return None


def torch_has_it():
    return hasattr(torch, "accelerator")


def built():
    """Compiles the device for this torch, unless that was done. Returns the path of the library."""
    with open(_SOURCE, "rb") as file:
        key = hashlib.sha256(file.read() + torch.__version__.encode()).hexdigest()[:12]
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("HALFSTEP_BUILD", "build")
    path = os.path.join(os.path.abspath(folder), f"standin-{key}.so")
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        made = f"{path}.{os.getpid()}"
        include = [f"-I{place}" for place in cpp_extension.include_paths()]
        library = [f"-L{place}" for place in cpp_extension.library_paths()]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        subprocess.run(
            ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", "-w", abi, *include, _SOURCE]
            + ["-o", made, *library, "-lc10", "-ltorch_cpu"],
            check=True,
        )
        os.replace(made, path)
    return path


class StandIn:
    """The device. `copies` are what halfstep copies between pinned memory and the device."""

    def __init__(self):
        path = built()
        torch.ops.load_library(path)
        self.library = ctypes.CDLL(path)
        torch.utils.rename_privateuse1_backend(NAME)
        module = types.ModuleType(f"torch.{NAME}")
        module.is_available, module.device_count = lambda: True, lambda: 2
        module.is_initialized = module.is_available
        module.set_device = lambda device: None
        module.device = lambda device: torch.accelerator.device_index(torch.device(device).index)
        module.current_device = lambda: torch.accelerator.current_device_index()
        module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
        module._is_in_bad_fork, module.manual_seed_all = lambda: False, lambda seed: None
        torch._register_device_module(NAME, module)
        self.device = torch.device(NAME, 0)

    def use_a_single_stream(self, yes=True):
        """Gives no streams beside the default one from now on, as torch does on Apple's GPUs."""
        self.library.standin_use_a_single_stream(yes)

    def take_copies(self):
        """Returns how many copies went to the process and how many bytes they had, and the same to
        the device, since the last call."""
        counts = (ctypes.c_int64 * 4)()
        self.library.standin_take_counts(counts)
        return list(counts)
