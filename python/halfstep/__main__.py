"""python -m halfstep: shows what is installed, plans the memory of training, and verifies that this
machine computes the same bits as all others."""

import argparse
import ctypes
import hashlib
import json
import math
import os
import sys

import torch

from . import __version__
from ._forecast.models import model_of
from ._library import abi
from ._library.abi import lib
from ._tensors import devices
from .fit import fit
from .plan import plan
from .rules import classes

#: the largest matrix that stands for a number of parameters; no larger than an embedding
_ROWS, _COLUMNS = 32768, 4096
#: what run() returns on every machine
EXPECTED = "04062bd627d69ff1"

PROGRAM = (
    "The program halfstep, which trains, compares and benchmarks without Python, is not in this"
    " package: install the Debian package halfstep, or run 'make install' in a checkout."
)


def info(given):
    device = abi.DeviceInfo.new()
    lib.halfstep_get_device_info(b"cuda", device)
    beside = devices.accelerator()
    if beside is not None:
        beside = (
            beside.type
            if devices.has_kernels(beside)
            else f"{devices.kind(beside)}: stepped on the processor"
        )
    found = {
        "version": __version__,
        "library": abi.path,
        "torch": torch.__version__,
        "instruction_set": lib.halfstep_isa().decode(),
        "gpu": device.name.decode() if device.usable else None,
        "device_code": device.code.decode() or None,
        "accelerator": beside,
        "rules": list(abi.rules),
        "formats": list(abi.formats),
        "classes": sorted(classes),
    }
    if given.json:
        print(json.dumps(found, indent=2))
        return 0
    if not device.usable:
        found["gpu"] = "none: " + abi.why()
    found["device_code"] = lib.halfstep_device_code().decode()
    found["accelerator"] = beside or "none that torch has"
    for key, value in found.items():
        print(
            f"{key.replace('_', ' '):<16} {', '.join(value) if isinstance(value, list) else value}"
        )
    return 0


def _shapes_of_file(path):
    """Returns the shapes of a safetensors file by name. Raises ValueError whatever is wrong with
    the file."""
    if not os.path.isfile(path):  # opening a pipe would block
        raise ValueError(
            f"{path!r} is not a regular file; give a safetensors file, or a number of parameters"
            " such as 7e9 or 7B"
        )
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ValueError(
            f"{path!r} cannot be read without the package safetensors: pip install safetensors"
        ) from None
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except (SafetensorError, OverflowError) as error:
        raise ValueError(
            f"{path!r} is not a sound safetensors file: {error}; fetch it again, or give a number"
            " of parameters such as 7e9 or 7B"
        ) from None


def _shapes(text):
    """Returns shapes by name: those of a safetensors file, or of a made-up model. `text` is the
    file's path or a number of parameters; the model has matrices of 4096 columns."""
    if os.path.lexists(text):
        return _shapes_of_file(text)
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    try:
        n = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        n = 0
    if not 1 <= n <= 1e15:
        raise ValueError(
            f"{text!r} is neither a file nor a number of parameters from 1 to 1e15, such as 7e9"
            " or 7B"
        )
    rows, rest = divmod(int(n), _COLUMNS)
    shapes = {
        f"matrix {i}": (min(_ROWS, rows - i * _ROWS), _COLUMNS) for i in range(-(-rows // _ROWS))
    }
    return {**shapes, "vector": (rest,)} if rest else shapes


def _plain(text):
    """Returns a text that a terminal can show in one line. Control and unprintable characters are
    escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii")
        for c in text
    )


def show_plan(given):
    recipes = given.recipes.split(",") if given.recipes else None
    if recipes is not None and len(recipes) == 1:
        recipes = recipes[0]
    print(
        plan(
            _shapes(given.model),
            recipes,
            release=given.release,
            memory=given.memory,
            offload=given.offload,
            overlap=given.overlap or False,
            store=given.store,
            device_memory=given.device_memory,
            kernels=not given.no_kernels,
        )
    )
    return 0


def show_fit(given):
    model, step = model_of(given.model, given.sequence, given.checkpointing, given.lora)
    found = fit(
        model,
        step,
        given.memory,
        recipes=given.recipes.split(",") if given.recipes else None,
        batch=int(given.batch) if given.batch.isdecimal() else given.batch,
        ranks=given.ranks,
        device=given.device,
        kernels=not given.no_kernels,
        title=f"{type(model).__name__} of {given.sequence} tokens",
    )
    if given.html:
        with open(given.html, "w", encoding="utf-8") as file:
            file.write(found.html())
    print(found.json() if given.json else found)
    return 0


def _numbers(shape, seed):
    """Returns numbers between -2 and 2 that depend on shape and seed only. They are made from
    integers, because torch.randn() does not promise the same numbers on every machine."""
    index = torch.arange(math.prod(shape), dtype=torch.int64, device="cpu") + 7919 * seed
    mixed = (index * 2654435761 % 2**32 >> 7) * 40503 % 2**24
    return (mixed.double() / 2**22 - 2).float().reshape(shape)


def run():
    """Returns a hash of all weights and states after four steps of every rule in five recipes."""
    digest = hashlib.sha256()
    for rule, cls in sorted((c.rule, c) for c in classes.values()):
        for dtype, options in (
            (torch.float32, {}),
            (torch.bfloat16, {}),
            (torch.bfloat16, {"weights": "bf16-kahan"}),
            (torch.bfloat16, {"weights": "bf16-ecc8", "states": "int8"}),
            (torch.bfloat16, {"states": "int4"}),
        ):
            params = {
                name: torch.nn.Parameter(_numbers(shape, i).to(dtype))
                for i, (name, shape) in enumerate(
                    (("matrix", (24, 96)), ("ragged", (7, 50)), ("vector", (33,)))
                )
            }
            opt = cls(params.items(), lr=1e-2, seed=1, threads=1, **options)
            for step in range(4):
                for i, p in enumerate(params.values()):
                    p.grad = _numbers(p.shape, 100 * step + 10 + i).to(dtype)
                opt.step()
            opt.state_dict()  # brings counts up to date
            for p in params.values():
                for tensor in (p.detach(), *(value for _, value in sorted(opt.state[p].items()))):
                    tensor = tensor.contiguous()  # torch needs numpy for its bytes
                    digest.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
    return digest.hexdigest()[:16]


def verify(given):
    before, failed = lib.halfstep_isa(), 0
    try:
        for i in range(lib.halfstep_isa_count()):
            if lib.halfstep_isa_available(i):
                name = lib.halfstep_isa_name(i)
                abi.check(lib.halfstep_set_isa(name))
                found = run()
                failed += found != EXPECTED
                print(
                    f"ok   {name.decode()}: {found}"
                    if found == EXPECTED
                    else f"FAIL {name.decode()}: {found}, expected {EXPECTED}"
                )
    finally:
        lib.halfstep_set_isa(before)
    return 1 if failed else 0


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m halfstep", description=__doc__, epilog=PROGRAM)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name, call, about):
        one = commands.add_parser(name, help=about)
        one.set_defaults(call=call)
        return one

    one = command("info", info, "version, instruction set, GPU, rules and formats")
    one.add_argument("--json", action="store_true", help="print one JSON object")
    one = command("plan", show_plan, "list the memory that training takes, by recipe")
    one.add_argument("model", help="a number of parameters (7e9, 7B) or a safetensors file")
    one.add_argument("--memory", help="memory that training must fit into; 24G is 24 * 2^30 bytes")
    one.add_argument("--recipes", help="list only these recipes, separated by commas")
    one.add_argument("--release", action="store_true", help="gradients are released one by one")
    one.add_argument(
        "--device-memory",
        help=(
            "that of a GPU: where states should be for each recipe, and the time that it takes; all"
            " ways with one recipe in --recipes"
        ),
    )
    one.add_argument(
        "--offload",
        action="store_true",
        help="states are in the process's memory, weights and gradients on a GPU",
    )
    one.add_argument(
        "--overlap",
        nargs="?",
        const=True,
        metavar="BYTES",
        help="with --offload: parameters are stepped in advance, into at most so many bytes (8G)",
    )
    one.add_argument(
        "--store",
        action="store_true",
        help="states are in a file: what it takes of the disk, and of each step",
    )
    no_kernels = {
        "action": "store_true",
        "help": "the GPU is AMD's, Intel's, Apple's, or NVIDIA's below 8.0: the processor steps",
    }
    one.add_argument("--no-kernels", **no_kernels)
    one = command("fit", show_fit, "say whether a model of transformers trains on a device")
    one.add_argument("model", help="its folder or config.json; weights are not needed")
    one.add_argument("--memory", help="memory of the device; 24G is 24 * 2^30 bytes")
    one.add_argument("--batch", default="1", help="sequences of a step; max: the most that fit")
    one.add_argument("--sequence", type=int, default=1024, help="tokens of a sequence (1024)")
    one.add_argument("--checkpointing", action="store_true", help="activations are computed again")
    one.add_argument("--lora", type=int, metavar="RANK", help="only adapters of PEFT train")
    one.add_argument("--recipes", help="only these recipes, separated by commas")
    one.add_argument("--ranks", type=int, default=1, help="GPUs that fully_shard() spreads over")
    one.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    one.add_argument("--no-kernels", **no_kernels)
    one.add_argument("--json", action="store_true", help="print JSON")
    one.add_argument("--html", metavar="FILE", help="write a page, too")
    about = "check that every instruction set of this machine computes the expected bits"
    command("verify", verify, about)
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return given.call(given)
    except (ValueError, OSError) as error:
        text = str(error).removeprefix(f"{__package__}: ")
        print(_plain(f"python -m halfstep {given.command}: {text}"), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
