"""What peers.py and traps.py share: the contestants, how each is made with the same
hyper-parameters, and what they hold.

Nothing is imported before it is needed: a package that is missing, or that refuses this machine, is
a reason to print.

The file is longer than 500 lines because each peer is made in its own way.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import signal
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Callable, Dict, Iterable, List, Optional, Tuple

MiB = 1 << 20
HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}

# The recipes that a page has room for. traps.py takes every other from the library's tables.
RECIPES = (
    "adamw/f32/f32",
    "adamw/bf16/bf16",
    "adamw/bf16-sr/bf16-sr",
    "adamw/bf16-kahan/bf16-sr",
    "adamw/bf16-ecc8/bf16-sr",
    "adamw/bf16-ecc8/int8",
    "adamw/bf16-sr/int8",
    "adamw/bf16-sr/int4",
)


def deliver(report: dict, options, write_csv: Callable, print_report: Callable) -> None:
    """Writes the report where the options --csv and --json want it, and prints it unless --json
    says "-"."""
    if options.csv:
        write_csv(report, options.csv)
    text = json.dumps(report, indent=1, ensure_ascii=False)
    if options.json == "-":
        print(text)
        return
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    print_report(report)


def threads_before_torch(threads: Optional[int]) -> int:
    """Sets the threads of everything that counts them when it is loaded, so before any such package
    is."""
    n = threads or len(os.sched_getaffinity(0))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "HALFSTEP_THREADS"):
        os.environ[name] = str(n)
    # What HeavyBall, torchao, bitsandbytes and DeepSpeed say at import and at their first step.
    warnings.filterwarnings("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    logging.disable(logging.WARNING)
    return n


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass
class Contestant:
    """An optimizer of somebody. `make(params, hyper)` returns it; `weights` is what its parameters
    are stored in when it is made (it may change that)."""

    key: str
    title: str
    package: str
    weights: str
    make: Callable
    recipe: str = ""  # of ours
    many: Optional[Callable] = (
        None  # instead of make, for more tensors than it can do at once in reasonable time
    )
    many_note: str = ""
    residual: str = ""  # name in the state of what is kept beside a weight
    decode: Optional[Callable] = (
        None  # (optimizer, parameter) -> fp32 weight with its residual; else the parameter itself
    )
    passes: int = 1  # times that it has to read the gradient

    @property
    def ours(self) -> bool:
        return bool(self.recipe)

    def dtype(self):
        import torch

        dtypes = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
        return dtypes["bf16" if self.packed else self.weights]

    @property
    def packed(self) -> bool:
        """True if its parameters are tensors of codes and scales."""
        return self.weights.startswith("int8")

    def parameter(self, values):
        """Returns a parameter of these values, stored as this contestant's are. Packed weights
        decode to the dtype of the values; only matrices are packed."""
        import torch

        if not self.packed or values.dim() != 2:
            return torch.nn.Parameter(values.to(self.dtype()))
        from halfstep import nn

        rows, columns = values.shape
        layer = torch.nn.Linear(columns, rows, bias=False, device="meta")
        layer.weight = torch.nn.Parameter(values)
        return nn.quantize_(layer, self.weights).weight

    def weight(self, optimizer, parameter):
        """Returns the weight in fp32 as the optimizer knows it, with residuals and error codes."""
        if self.decode is None:
            return parameter.detach().float()
        return self.decode(optimizer, parameter).detach().float().reshape(parameter.shape)

    def set_to_zero(self, optimizer, parameter) -> None:
        """Sets weight and residual to zero, so that the parameter is what the next update is."""
        parameter.data.zero_()
        state = optimizer.state.get(parameter) if self.residual else None
        state = state.get(0, state) if state else {}  # HeavyBall counts the views of a parameter
        if self.residual in state:
            state[self.residual].zero_()

    def build(self, params, hyper: Dict, many: bool = False):
        return (self.many if many and self.many else self.make)(params, {**HYPER, **hyper})


def _class_of(module: str, name: str, **fixed) -> Callable:
    def make(params, hyper):
        return getattr(importlib.import_module(module), name)(params, **hyper, **fixed)

    return make


def _heavyball(multi_tensor: bool, **fixed) -> Callable:
    return _class_of("heavyball", "AdamW", multi_tensor=multi_tensor, **fixed)


def _heavyball_weight(optimizer, parameter):
    from heavyball import utils

    code = optimizer.state[parameter][0]["param::ecc"]
    return utils._ULPState(code, utils._ULPState._SMAX[code.dtype]).decode(
        parameter.detach().view(code.shape)
    )


def _plus(name: str) -> Callable:
    return lambda optimizer, parameter: parameter.float() + optimizer.state[parameter][name].float()


def peers() -> List[Contestant]:
    """Returns every peer, installed or not. Titles say what is stored: weights, then states if they
    differ."""

    def heavyball(key, title, weights, decode=None, residual="", **fixed):
        return Contestant(
            key,
            title,
            "heavyball",
            weights,
            _heavyball(True, **fixed),
            many=_heavyball(False, **fixed),
            many_note=(
                "multi_tensor=False: one compiled graph over hundreds of tensors takes too long"
            ),
            decode=decode,
            residual=residual,
        )

    def peer(key, title, package, weights, name="AdamW", module=None, residual="", **fixed):
        """Returns a contestant for a class of `module`, the package by default. `residual` is added
        to a weight."""
        decode = _plus(residual) if residual else None
        make = _class_of(module or package, name, **fixed)
        return Contestant(key, title, package, weights, make, residual=residual, decode=decode)

    torchs = partial(peer, package="torch", module="torch.optim")
    torchao = partial(peer, package="torchao", module="torchao.optim")
    optimi = partial(peer, package="torch-optimi", module="optimi")
    deepspeed = partial(
        peer, package="deepspeed", module="deepspeed.ops.adam", name="DeepSpeedCPUAdam"
    )
    bitsandbytes = partial(
        peer, package="bitsandbytes", module="bitsandbytes.optim", name="AdamW8bit"
    )
    sr = {"weights": "bf16", "bf16_stochastic_round": True}
    return [
        torchs("torch", "torch AdamW, fused, fp32", weights="f32", fused=True),
        torchs("torch-foreach", "torch AdamW, foreach, fp32", weights="f32", foreach=True),
        torchs("torch-bf16", "torch AdamW, fused, all BF16", weights="bf16", fused=True),
        optimi("optimi", "optimi AdamW, fp32", weights="f32"),
        optimi("optimi-kahan", "optimi AdamW, BF16, Kahan", weights="bf16", residual="kahan_comp"),
        torchao("torchao-sr", "torchao _AdamW, all BF16, SR", name="_AdamW", **sr),
        torchao("torchao-8bit-f32", "torchao AdamW8bit, fp32", weights="f32", name="AdamW8bit"),
        torchao("torchao-8bit", "torchao AdamW8bit, BF16, SR", name="AdamW8bit", **sr),
        torchao("torchao-4bit", "torchao AdamW4bit, BF16, SR", name="AdamW4bit", **sr),
        torchao("torchao-fp8", "torchao AdamWFp8, BF16, SR", name="AdamWFp8", **sr),
        heavyball("heavyball", "HeavyBall AdamW, all BF16, SR", "bf16", storage_dtype="bfloat16"),
        heavyball(
            "heavyball-ecc8",
            "HeavyBall AdamW, all BF16+8",
            "f32",
            _heavyball_weight,
            "param::ecc",
            ecc="bf16+8",
            param_ecc="bf16+8",
        ),
        peer("torchastic", "torchastic AdamW, all BF16, SR", "torchastic", "bf16"),
        peer(
            "adamw-bf16",
            "adamw_bf16, BF16 with correction",
            "adamw-bf16",
            "bf16",
            "AdamWBF16",
            "adamw_bf16",
            residual="shift",
        ),
        deepspeed("deepspeed", "DeepSpeed CPUAdam, fp32", weights="f32"),
        deepspeed("deepspeed-mixed", "DeepSpeed CPUAdam, BF16, fp32 states", weights="bf16"),
        deepspeed(
            "deepspeed-bf16",
            "DeepSpeed CPUAdam, all BF16",
            weights="bf16",
            fp32_optimizer_states=False,
        ),
        bitsandbytes("bitsandbytes-f32", "bitsandbytes AdamW8bit, fp32", weights="f32"),
        bitsandbytes("bitsandbytes", "bitsandbytes AdamW8bit, BF16", weights="bf16"),
        peer(
            "flashoptim",
            "FlashOptim FlashAdamW, BF16+8, 8 bit",
            "flashoptim",
            "bf16",
            "FlashAdamW",
        ),
    ]


def stored_as(recipe: str) -> str:
    """Returns the `weights` of a contestant of ours: a dtype, or the name of a packed format."""
    weights = recipe.split("/")[1]
    return weights if weights.startswith("int8") else weights.split("-")[0]


def ours(recipe: str, scan: str = "scan", **fixed) -> Contestant:
    """Returns a contestant for a recipe, with options after colons
    ("adamw/bf16-sr/int8:cautious=1"). With scan="known-finite" the caller vouches for the
    gradients, which are then read once."""
    formats, _, special = recipe.partition(":")
    fixed.update(
        (name, float(value))
        for name, value in (word.split("=") for word in special.split(":") if word)
    )
    # Of other rules their own decay rates; and an eps that is no part of a root.
    rule = formats.split("/")[0]
    left = (
        ()
        if rule in ("adam", "adamw")
        else ("betas", "eps")
        if rule in ("adafactor", "came")
        else ("betas",)
    )

    def make(params, hyper):
        import halfstep

        given = {name: value for name, value in hyper.items() if name not in left}
        return halfstep.optimizer(formats, params, scan=scan, **given, **fixed)

    weights = stored_as(recipe)
    finite = scan == "known-finite"
    return Contestant(
        recipe + (":finite" if finite else ""),
        f"`{recipe}`" + (", known finite" if finite else ""),
        "halfstep",
        weights,
        make,
        recipe=recipe,
        passes=1 if finite else 2,
        residual="weight.extra",
        decode=None
        if weights.startswith("int8")
        else lambda optimizer, parameter: optimizer.read_weight(parameter),
    )


def every_recipe() -> List[str]:
    """Returns AdamW in every weight format with every state format that can hold both moments. The
    library leaves out formats that cannot be combined."""
    from halfstep._library import abi

    weights = [f.name for f in abi.formats.values() if f.roles & abi.ROLE_WEIGHT]
    both = abi.ROLE_SIGNED | abi.ROLE_NONNEG
    # Formats made for one rule are named after it.
    states = [
        f.name for f in abi.formats.values() if f.roles & both == both and "lamb" not in f.name
    ]
    states.insert(states.index("int4") if "int4" in states else len(states), "int8+int4")
    found = []
    for weight in weights:
        for state in states:
            try:
                found.append(abi.recipe_full(f"adamw/{weight}/{state}"))
            except ValueError:
                continue
    return found


def select(contestants: Iterable[Contestant], only: Optional[str]) -> List[Contestant]:
    """Returns those whose key contains one of the comma-separated words, or matches it as a regular
    expression."""
    chosen = list(contestants)
    if not only:
        return chosen
    words = [word for word in only.split(",") if word]
    return [c for c in chosen if any(word == c.key or re.search(word, c.key) for word in words)]


class GaveUp(RuntimeError):
    """Longer than the caller wants to wait."""


@contextmanager
def patience(seconds: float):
    """Ends what is inside with GaveUp after that many seconds; for compilers, which would go on for
    an hour."""

    def ring(*_):
        raise GaveUp(f"gave up after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def reason(error: BaseException) -> str:
    """Returns one line about a failure: its first cause, which says why."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ModuleNotFoundError):
        return f"not installed ({error})"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


# ---- Parameters, and bytes -----------------------------------------------------------------------


@dataclass
class Subject:
    """A contestant on parameters of its own."""

    contestant: Contestant
    shapes: List[Tuple[int, ...]]
    hyper: Dict = field(default_factory=dict)
    many: bool = False

    def __post_init__(self):
        import torch

        generator = torch.Generator().manual_seed(1)
        dtype = self.contestant.dtype()
        self.params = []
        for shape in self.shapes:
            weight = torch.empty(shape, dtype=dtype)
            # A buffer of fp32 numbers of a big tensor would be counted as memory of the optimizer.
            for part in weight.view(-1).split(1 << 22):
                part.copy_(torch.randn(part.shape, generator=generator) * 0.02)
            self.params.append(torch.nn.Parameter(weight))
        self.optimizer = self.contestant.build(self.params, self.hyper, self.many)
        self.gradients = []
        for parameter in self.params:
            gradient = torch.empty_like(parameter, requires_grad=False)
            for part in gradient.detach().view(-1).split(1 << 22):
                part.copy_(torch.randn(part.shape, generator=generator) * 1e-3)
            self.gradients.append(gradient)
        self.kept = (
            [gradient.clone() for gradient in self.gradients]
            if self.contestant.package == "torch-optimi"
            else None
        )
        self.hand_back()

    def hand_back(self) -> None:
        """Gradients as before: HeavyBall drops them, optimi computes in their memory."""
        for parameter, gradient in zip(self.params, self.gradients):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for gradient, value in zip(self.gradients, self.kept or ()):
            gradient.copy_(value)

    @property
    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.params)


def tensors_in(thing, seen) -> Iterable:
    import torch

    if isinstance(thing, torch.Tensor):
        inner = getattr(thing, "__tensor_flatten__", None)
        if inner is not None:
            for name in inner()[0]:
                yield from tensors_in(getattr(thing, name), seen)
        else:
            yield thing
    elif isinstance(thing, dict):
        if id(thing) not in seen:
            seen.add(id(thing))
            for value in thing.values():
                yield from tensors_in(value, seen)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from tensors_in(value, seen)


def state_bytes(optimizer) -> int:
    """Returns the bytes of all tensors in the state of an optimizer, scalars that count steps
    included. Shared memory counts once."""
    storages = {}
    for tensor in tensors_in(dict(optimizer.state), set()):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = max(storages.get(storage.data_ptr(), 0), storage.nbytes())
    return sum(storages.values())


# ---- The stream ----------------------------------------------------------------------------------


class Stream:
    """Reads and writes `written` bytes in place, and only reads `read` bytes."""

    forms = (
        "add a read array to one and a number to the rest",
        "add a number, then sum the read array",
        "numpy, a MiB at a time",
    )

    def __init__(self, threads: int):
        import torch

        self.torch = torch
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads)
        self.changed = self.read = torch.zeros(0)
        self.form = 0

    def _grow(self, buffer, bytes_):
        n = (int(bytes_) + 3) // 4
        return buffer if buffer.numel() >= n else self.torch.full((n,), 1e-3)

    def set(self, written: float, read: float) -> None:
        """Takes these sizes and the form that is fastest for them."""
        self.changed, self.read = self._grow(self.changed, written), self._grow(self.read, read)
        self.written, self.only = int(written) // 4, int(read) // 4
        least = [math.inf] * len(self.forms)
        for turn in range(3):
            for form in range(len(self.forms)):
                self.form = form
                seconds = self.run()
                if turn:
                    least[form] = min(least[form], seconds)
        self.form = least.index(min(least))

    def _numpy(self, share: int) -> None:
        import numpy

        a, g = self.changed.numpy()[: self.written], self.read.numpy()[: self.only]
        first, end = len(a) * share // self.threads, len(a) * (share + 1) // self.threads
        at, last = len(g) * share // self.threads, len(g) * (share + 1) // self.threads
        turn = MiB // 4
        g_turn = max(1, int(turn * len(g) / max(1, len(a))))
        while first < end or at < last:
            piece = a[first : min(end, first + turn)]
            numpy.add(piece, 1e-3, out=piece)
            numpy.add.reduce(g[at : min(last, at + g_turn)])
            first, at = first + turn, at + g_turn

    def run(self) -> float:
        """Makes one pass and returns its seconds."""
        start = time.perf_counter()
        a, g = self.changed[: self.written], self.read[: self.only]
        if self.form == 0:
            both = min(len(a), len(g))
            a[:both].add_(g[:both])
            a[both:].add_(1e-3)
        elif self.form == 1:
            a.add_(1e-3)
            g.sum()
        else:
            list(self.pool.map(self._numpy, range(self.threads)))
        return time.perf_counter() - start


# ---- The machine ---------------------------------------------------------------------------------


def available_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def resident(line: str) -> int:
    """Returns bytes that Linux reports of this process: VmRSS now, VmHWM at most."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(text.split()[1]) * 1024 for text in file if text.startswith(line + ":"))


def forget_peak() -> None:
    """Makes VmHWM begin anew."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions(contestants: Iterable[Contestant]) -> Dict[str, str]:
    found = {}
    for package in dict.fromkeys(c.package for c in contestants):
        text = version(package)
        if package == "halfstep":
            try:
                from halfstep._library import abi

                text = abi.version()
            except ImportError:
                text = ""
        if text:
            found[package] = text
    return found


# ---- Tables --------------------------------------------------------------------------------------


def judged(aim: str, wanted: float, measured: float, most: bool = False) -> Dict:
    """Returns an aim with what came out. With `most` it is the most that is allowed."""
    reached = measured <= wanted if most else measured >= wanted
    return {"aim": aim, "wanted": wanted, "measured": measured, "reached": reached}


def flags(**options) -> List[str]:
    """Returns options of a command line; val_every=0 gives --val-every 0."""
    named = (("--" + name.replace("_", "-"), str(value)) for name, value in options.items())
    return [word for pair in named for word in pair]


def markdown(columns: List[str], rows: List[List[str]], left: int = 1) -> str:
    """Returns a table whose first `left` columns are set to the left."""
    rule = "|".join("---" if i < left else "---:" for i in range(len(columns)))
    lines = ["| " + " | ".join(columns) + " |", f"|{rule}|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def put(path: str, mark: str, lines: List[str]) -> None:
    """Replaces the lines between a mark of a page and its end."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    new, count = re.subn(
        f"<!-- {mark} -->\n.*?<!-- end -->",
        lambda _: f"<!-- {mark} -->\n" + "\n".join(lines) + "\n<!-- end -->",
        text,
        flags=re.S,
    )
    if count != 1:
        sys.exit(f"{path} has no place marked {mark}")
    with open(path, "w", encoding="utf-8") as file:
        file.write(new)
