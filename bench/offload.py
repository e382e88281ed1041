#!/usr/bin/env python3
"""Offloaded steps against plain ones, and against torchao's CPUOffloadOptimizer: time, memory,
bytes copied.

    offload.py [--layers 16] [--width 1024] [--batch 64] [--rounds 12] [--only REGEX]
               [--no-memory] [--out bench/offload.md]
    offload.py --plan [--only REGEX]      peaks of memory beside what halfstep.plan() says, instead
                                          of times
    offload.py --overlap [--backward 1]   what is left of a step after a backward pass: one that
                                          brings the gradients and leaves the processor alone, so
                                          many times as long as the step of CPUOffload
    offload.py --profile WAY              steps of one way alone, for nsys: the capture begins after
                                          the first ones, phases are NVTX ranges

With a GPU the model lies there. Without one the CPU stands for it, and copies over the bus become
copies within memory. That shows how much each package copies, and what it costs beside the copies.
It shows no overlap, because both sides have the same cores. Ways take turns, a step each. Figures
are medians of times, and of ratios to the plain step beside them."""

import argparse
import contextlib
import ctypes
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import types

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep import offload as hosted
from halfstep._placement import streams
from halfstep._tensors import devices

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from peers_common import forget_peak, put, resident  # noqa: E402

GPU = torch.cuda.is_available()
RECIPE = "adamw/bf16-sr/int8"
#: of StateStreaming: of a few layers, so that there are more of them than of buffers; the plan is
#: for the package's own size
BUFFER, PLANNED = 8 << 20, streams.BUFFER_BYTES
#: copied to the process and back by the way that is stepping
COPIED = [0, 0]


# ---- The CPU in the place of a GPU ---------------------------------------------------------------


class Bus(TorchDispatchMode):
    """Counts what torchao copies on its stream."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            COPIED[args[0].data_ptr() in self.device] += args[0].nbytes
        return function(*args, **(kwargs or {}))


class Stream:
    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        pass


class Side:
    alone = False

    def __init__(self, device):
        pass

    def follow(self, event=None):
        return self

    lead = after = event = follow

    def copy(self, to, tensor):
        to.copy_(tensor)
        COPIED[tensor in HOST] += to.nbytes


class Host(dict):
    """The tensors that lie in the process, where the CPU stands for both. It knows them by address,
    and by a weak reference to their memory: the allocator gives an address again."""

    def add(self, tensor):
        self[tensor.data_ptr()] = StorageWeakRef(tensor.untyped_storage())

    def __contains__(self, tensor):
        known = self.get(tensor.data_ptr())
        return known is not None and not known.expired()


HOST = Host()
#: whether what is not there is on the "GPU" now: not for the plain optimizer
ACTIVE = [False]


def stand_in():
    def kept(function):
        def call(*arguments, **options):
            made = function(*arguments, **options)
            HOST.add(made)
            return made

        return call

    def of(tensor):
        return torch.device(
            "cpu"
            if not ACTIVE[0]
            or tensor in HOST
            or tensor.dim() == 0
            or tensor.dtype != torch.bfloat16
            else "cuda:0"
        )

    devices.of, devices.Side, devices.wait = of, Side, lambda event: None
    devices.has_kernels = lambda device: True
    devices.pinned = kept(lambda shape, dtype: torch.empty(shape, dtype=dtype))
    zeros = kept(torch.zeros)

    def zeros_on(shape, dtype, device=devices.HOST):
        make = zeros if device == devices.HOST else torch.zeros
        return make(shape, dtype=dtype)

    devices.zeros = zeros_on
    # Steps on the "GPU" are the processor's.
    devices.c_name = devices.stream = lambda device: None
    devices.record, devices.capturing, devices.is_pinned = (
        lambda tensors, device: None,
        lambda device: False,
        lambda tensor: tensor in HOST,
    )
    hosted._can_step_on = lambda device: False

    import torchao.optim.cpu_offload as theirs

    bus = Bus()
    bus.device = set()
    plain = torch.empty_like
    theirs.get_available_devices = lambda: ["cpu", "xpu"]
    torch.xpu.Stream, torch.xpu.current_stream, torch.xpu.stream = (
        Stream,
        Stream,
        lambda stream: bus,
    )
    theirs.torch = types.SimpleNamespace(
        **{**vars(torch), "empty_like": lambda *a, pin_memory=False, **k: plain(*a, **k)}
    )
    torch.Tensor.record_stream = lambda self, stream: None
    return bus


# ---- Ways ----------------------------------------------------------------------------------------


def ways(bus, buffer=BUFFER):
    from torchao.optim import AdamW8bit
    from torchao.optim.cpu_offload import CPUOffloadOptimizer

    plain = halfstep.rules.class_and_options(RECIPE)

    def theirs(cls, **options):
        def make(model):
            return CPUOffloadOptimizer(model.parameters(), cls, lr=1e-4, **options)

        return make

    def ours(cls, **options):
        def make(model):
            ACTIVE[0] = not GPU
            return cls(model.named_parameters(), RECIPE, lr=1e-4, **options)

        return make

    found = {
        "plain halfstep": lambda model: plain[0](model.named_parameters(), lr=1e-4, **plain[1]),
        "CPUOffload": ours(halfstep.CPUOffload),
        "CPUOffload, offload_gradients": ours(halfstep.CPUOffload, offload_gradients=True),
        "CPUOffload, overlap": ours(halfstep.CPUOffload, overlap=True),
        "CPUOffload, gradient_release": ours(halfstep.CPUOffload, gradient_release=True),
        "StateStreaming": ours(halfstep.StateStreaming, buffer=buffer),
        "StateStreaming, gradient_release": ours(
            halfstep.StateStreaming, buffer=buffer, gradient_release=True
        ),
        "torchao, torch.optim.AdamW": theirs(torch.optim.AdamW, fused=True),
        "torchao, torch.optim.AdamW, offload_gradients": theirs(
            torch.optim.AdamW, fused=True, offload_gradients=True
        ),
    }
    if GPU:  # whose kernels are compiled: on a CPU this takes minutes
        found["torchao, AdamW8bit"] = theirs(AdamW8bit)
    return found


def network(given, place=True):
    torch.manual_seed(0)
    layers = []
    for _ in range(given.layers):
        layers += [torch.nn.Linear(given.width, given.width), torch.nn.GELU()]
    model = torch.nn.Sequential(*layers).bfloat16()
    return model.to("cuda" if GPU else "cpu") if place else model


def step(model, opt, x, phase=lambda name: contextlib.nullcontext()):
    ACTIVE[0] = isinstance(opt, (halfstep.CPUOffload, halfstep.StateStreaming))
    with phase("forward"):
        loss = model(x).float().square().mean()
    with phase("backward"):
        loss.backward()
    with phase("step"):
        opt.step()
        opt.zero_grad()
    if GPU:
        with phase("wait"):
            torch.cuda.synchronize()


def batch(given):
    return torch.randn(given.batch, given.width, dtype=torch.bfloat16).to("cuda" if GPU else "cpu")


def memory(given, way):
    """Prints the peak memory of a way, in a process of its own: in the process, on the GPU, and
    pinned by torch. The model does not count; gradients and activations do."""
    bus = None if GPU else stand_in()
    model, x = network(given), batch(given)
    model(x).float().square().mean().backward()  # what torch loads then is not the optimizer's

    model.zero_grad(set_to_none=True)
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS"), torch.cuda.memory_allocated() if GPU else 0
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    forget_peak()
    opt = ways(bus, PLANNED if given.plan else BUFFER)[way](model)
    for _ in range(3):
        step(model, opt, x)
    pinned = (
        torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
        if GPU and hasattr(torch.cuda, "host_memory_stats")
        else 0
    )
    print(
        json.dumps(
            [
                resident("VmHWM") - before[0],
                (torch.cuda.max_memory_allocated() - before[1]) if GPU else 0,
                pinned,
            ]
        )
    )


def in_a_process(given, way):
    command = [
        sys.executable,
        os.path.abspath(__file__),
        "--memory",
        way,
        *(f"--{k}={getattr(given, k)}" for k in ("layers", "width", "batch")),
        *(["--plan"] if given.plan else []),
    ]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(child.stdout.splitlines()[-1])


def against_the_plan(given):
    """Lines of a table: for each way that halfstep.plan() knows, what it says and what there was,
    in MiB beside the weights."""
    with torch.device("meta"):
        model = network(given, place=False)
    measured = {"GPU": "plain halfstep"}
    lines = [
        (
            "| way | GPU, plan | GPU, peak | process, plan | process, peak | pinned by torch |"
            if GPU
            else "| way | process, plan (what would be on the GPU among it) | process, peak |"
        ),
        "|---|---|---|" + ("---|---|---|" if GPU else ""),
    ]
    for row in halfstep.plan(model, RECIPE, device_memory="1T").rows:
        way = measured.get(row.way, row.way)
        if way == "GPU, gradient_release" or not re.search(given.only, way):
            continue
        host, device, pinned = in_a_process(given, way)
        there = row.total - row.weights
        sizes = [there, device, row.host, host, pinned] if GPU else [there + row.host, host]
        lines.append(f"| {way} | " + " | ".join(f"{size / 2**20:.0f}" for size in sizes) + " |")
    return lines


def profile(given, way):
    """Makes steps of one way, and returns a table of the time that each phase takes the process.
    The last phase waits for the GPU."""
    bus = None if GPU else stand_in()
    model, x, times = network(given), batch(given), {}
    opt = ways(bus)[way](model)

    @contextlib.contextmanager
    def phase(name):
        begun = time.perf_counter()
        with torch.cuda.nvtx.range(name) if GPU else contextlib.nullcontext():
            yield
        times.setdefault(name, []).append(time.perf_counter() - begun)

    for _ in range(3):
        step(model, opt, x)
    if GPU:
        torch.cuda.profiler.start()
    for _ in range(given.rounds):
        step(model, opt, x, phase)
    if GPU:
        torch.cuda.profiler.stop()
    return [
        "| phase of " + way + " | ms |",
        "|---|---|",
        *(f"| {name} | {1e3 * statistics.median(some):.2f} |" for name, some in times.items()),
    ]


def overlapped(given):
    """Returns a table of what is left of a step after a backward pass. The pass is stood in for:
    gradients come one after the other, in the order of a real one, and the processor has nothing
    else to do. Ways take turns."""
    bus, made = None if GPU else stand_in(), {}
    for way, make in ways(bus).items():
        if way in ("CPUOffload", "CPUOffload, overlap", "torchao, torch.optim.AdamW"):
            model = network(given)
            params = list(model.parameters())[::-1]
            made[way] = params, [torch.randn_like(p) * 1e-3 for p in params], make(model), []

    def one(params, gradients, opt, pause):
        """Makes a step. Returns the time of the pass, and the time after it."""
        ACTIVE[0] = isinstance(opt, halfstep.CPUOffload)
        if bus is not None:
            bus.device = {p.data_ptr() for p in params}
        begun = time.perf_counter()
        for i, (p, g) in enumerate(zip(params, gradients)):
            time.sleep(max(0.0, begun + pause * (i + 1) / len(params) - time.perf_counter()))
            p.grad = g
            for hook in list((p._post_accumulate_grad_hooks or {}).values()):
                hook(p)
        passed = time.perf_counter()
        opt.step()
        if GPU:
            torch.cuda.synchronize()
        after = time.perf_counter()
        opt.zero_grad()
        return passed - begun, after - passed

    for _ in range(3):
        for params, gradients, opt, _ in made.values():
            one(params, gradients, opt, 0.0)
    params, gradients, opt, _ = made["CPUOffload"]
    step = statistics.median(one(params, gradients, opt, 0.0)[1] for _ in range(given.rounds))
    for _ in range(given.rounds):
        for params, gradients, opt, times in made.values():
            times.append(one(params, gradients, opt, given.backward * step))
    n = sum(p.numel() for p in made["CPUOffload"][0])
    base = made["CPUOffload"][3]
    lines = [
        f"{n / 1e6:.1f} M parameters in BF16, {platform.machine()}, {os.cpu_count()} cores, torch"
        f" {torch.__version__}, "
        + (torch.cuda.get_device_name() if GPU else "the CPU in the place of a GPU")
        + f", kernels of {halfstep._library.abi.lib.halfstep_isa().decode()}. A backward pass of"
        f" {1e3 * given.backward * step:.1f} ms. `bench/offload.py --overlap` writes this table.",
        "",
        "| way | ms after the pass | of CPUOffload's | ms in all | of CPUOffload's |",
        "|---|---|---|---|---|",
    ]
    for way, (_, _, opt, times) in made.items():
        left = statistics.median(after / other for (_, after), (_, other) in zip(times, base))
        whole = statistics.median(sum(mine) / sum(other) for mine, other in zip(times, base))
        after = statistics.median(after for _, after in times)
        lines.append(
            f"| {way} | {1e3 * after:.1f} | {left:.2f} |"
            f" {1e3 * statistics.median(map(sum, times)):.1f} | {whole:.2f} |"
        )
        if getattr(opt, "redone_steps", 0):
            raise RuntimeError(f"{way}: {opt.redone_steps} steps were made again")
    return lines


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("layers", 16), ("width", 1024), ("batch", 64), ("rounds", 12)):
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--out", help="Markdown to write the table into, between its marks")
    parser.add_argument(
        "--no-memory",
        action="store_true",
        help="leave the memory out, which takes a process for each way",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="REGEX",
        help="ways whose names it is found in, and the plain one",
    )
    parser.add_argument(
        "--plan", action="store_true", help="peaks of memory beside what halfstep.plan() says"
    )
    parser.add_argument(
        "--overlap", action="store_true", help="what is left of a step after a backward pass"
    )
    parser.add_argument(
        "--backward",
        type=float,
        default=1.0,
        help="how long that pass is, in steps of CPUOffload",
    )
    parser.add_argument("--profile", metavar="WAY", help="a row of the table: steps of it alone")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory:
        return memory(given, given.memory)
    if given.plan or given.profile:
        print("\n".join(against_the_plan(given) if given.plan else profile(given, given.profile)))
        return 0
    if given.overlap:
        lines = overlapped(given)
        print("\n".join(lines))
        if given.out:
            put(given.out, "overlap", lines)
        return 0
    bus = None if GPU else stand_in()
    x, made = batch(given), {}
    for way, make in ways(bus).items():
        if way != "plain halfstep" and not re.search(given.only, way):
            continue
        model = network(given)
        made[way] = model, make(model), [], []
        step(model, made[way][1], x)
    for _ in range(given.rounds):
        for model, opt, times, copies in made.values():
            COPIED[:] = 0, 0
            if bus is not None:
                bus.device = {p.data_ptr() for p in model.parameters()}
            begun = time.perf_counter()
            step(model, opt, x)
            times.append(time.perf_counter() - begun)
            copies.append(tuple(COPIED))
    n = sum(p.numel() for p in network(given).parameters())
    base = made["plain halfstep"][2]
    lines = [
        f"{n / 1e6:.1f} M parameters in BF16, batch {given.batch}, {platform.machine()},"
        f" {os.cpu_count()} cores, torch {torch.__version__}, "
        + (torch.cuda.get_device_name() if GPU else "the CPU in the place of a GPU")
        + f", kernels of {halfstep._library.abi.lib.halfstep_isa().decode()}."
        " `bench/offload.py` writes this table.",
        "",
        "| way | ms a step | of a plain step | bytes a parameter to the process (counted where the"
        " CPU stands in) | and back | peak of the process beside the model, bytes a parameter |"
        + (" of the GPU |" if GPU else ""),
        "|---|---|---|---|---|---|" + ("---|" if GPU else ""),
    ]
    for way, (_, _, times, copies) in made.items():
        host = device = ""
        if not given.no_memory:
            host, device = (f"{size / n:.1f}" for size in in_a_process(given, way)[:2])
        ratio = statistics.median(a / b for a, b in zip(times, base))
        down, up = ("", "") if GPU else (f"{copies[-1][0] / n:.2f}", f"{copies[-1][1] / n:.2f}")
        lines.append(
            f"| {way} | {1e3 * statistics.median(times):.1f} | {ratio:.2f} | {down} | {up} |"
            f" {host} |" + (f" {device} |" if GPU else "")
        )
    print("\n".join(lines))
    if given.out:
        put(given.out, "measured", lines)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
