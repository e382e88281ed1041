"""Tests steps, saves and loads of the Python package while calls into the C library fail.

    LD_PRELOAD=libfaults.so LD_LIBRARY_PATH=build/tests python python_sweep.py [--short | FAULT]

Every fault has a process of its own, forked from one that has imported torch. It makes an
optimizer, steps it, saves it, and loads it into another; both go on. An action that raises is
repeated without the fault. All bits must then be those of a run without faults, and a file that
could not be replaced must be the old one. Calls of the library fail, and so do file calls of Python
and of safetensors.
"""

import ctypes
import os
import signal
import sys
import tempfile
import time
import traceback

import torch

import halfstep

inject = ctypes.CDLL(None)
try:
    inject.inject_arm.argtypes = [ctypes.c_char_p]
    inject.inject_struck.restype = ctypes.c_uint64
    inject.inject_places.restype = ctypes.c_size_t
    NAMES_OF = (ctypes.c_char_p * 64).in_dll(inject, "inject_names")
    ERRORS_OF = (ctypes.c_char_p * 64).in_dll(inject, "inject_errors")
except AttributeError:
    sys.exit("LD_PRELOAD does not name libfaults.so")

FOLDER = os.environ.get("LD_LIBRARY_PATH", "")
SHAPES = [(8, 64), (64, 96), (7,), ()]
TIMEOUT = 240


class Wrong(Exception):
    pass


def attempt(action, after=None):
    """Runs `action`. If a fault made it raise, runs it again without the fault."""
    try:
        return action()
    except Exception as error:
        if not inject.inject_struck():
            raise Wrong(f"raises without a fault: {error!r}")
        inject.inject_arm(None)
        if not str(error) and not isinstance(error, MemoryError):
            raise Wrong(f"{error!r} says nothing")
        if after:
            after()
        return action()


def contents(path):
    inject.inject_hold(1)
    with open(path, "rb") as file:
        data = file.read()
    inject.inject_hold(0)
    return data


def gradients(params, step):
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, 0.01 * (1 + i + step)) * (1 + p.detach())


def made():
    generator = torch.Generator().manual_seed(3)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(torch.bfloat16))
        for shape in SHAPES
    ]
    names = [(f"p{i}", p) for i, p in enumerate(params)]
    return params, attempt(
        lambda: halfstep.AdamW(
            names, lr=1e-2, weights="bf16-kahan", states="int8", clip_norm=1.0, seed=5
        )
    )


def bits(params, opt):
    out = [p.detach().view(torch.int16).numpy().tobytes() for p in params]
    for state in attempt(opt.state_dict)["state"].values():
        out += [
            (
                k,
                (
                    v.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                    if isinstance(v, torch.Tensor)
                    else v
                ),
            )
            for k, v in sorted(state.items())
        ]
    return out


def scenario(folder):
    path = os.path.join(folder, "optimizer.safetensors")
    params, opt = made()
    for step in range(2):
        gradients(params, step)
        attempt(opt.step)
    attempt(lambda: opt.save_safetensors(path))
    before = contents(path)
    gradients(params, 2)
    attempt(opt.step)

    def old_or_new():
        inject.inject_hold(1)
        left = [n for n in os.listdir(folder) if n != "optimizer.safetensors"]
        inject.inject_hold(0)
        if left:
            raise Wrong(f"a failed save leaves {left}")
        _, other = made()
        other.load_safetensors(path)

    attempt(lambda: opt.save_safetensors(path), old_or_new)
    if contents(path) == before:
        raise Wrong("the second save wrote nothing")
    others, loaded = made()
    with torch.no_grad():
        for p, q in zip(others, params):
            p.copy_(q)
    attempt(lambda: loaded.load_safetensors(path))
    third, taken = made()
    with torch.no_grad():
        for p, q in zip(third, params):
            p.copy_(q)
    attempt(lambda: taken.load_state_dict(opt.state_dict()))
    for group, optimizer in (params, opt), (others, loaded), (third, taken):
        gradients(group, 3)
        attempt(optimizer.step)
    result = bits(params, opt)
    if bits(others, loaded) != result or bits(third, taken) != result:
        raise Wrong("what was loaded goes on in another way")
    return result


def in_child(function):
    """Runs `function` in a child. Returns its text and None, or what went wrong in the second
    place."""
    ends = os.pipe()
    child = os.fork()
    if not child:
        status = 0
        try:
            signal.alarm(TIMEOUT)
            with tempfile.TemporaryDirectory() as folder:
                said = function(folder)
        except Wrong as wrong:
            said, status = str(wrong), 1
        except BaseException:
            inject.inject_arm(None)
            said, status = traceback.format_exc(limit=-3), 1
        os.write(ends[1], (said or "").encode()[:60000])
        os._exit(status)
    os.close(ends[1])
    said = b""
    while part := os.read(ends[0], 65536):
        said += part
    os.close(ends[0])
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return None, (
            "a hang"
            if os.WTERMSIG(status) == signal.SIGALRM
            else signal.Signals(os.WTERMSIG(status)).name
        )
    return said.decode(), None if status == 0 else said.decode()


def listed(folder):
    """Returns the faults to try, one a line."""
    out = []
    numbers = (ctypes.c_uint64 * 4096)()
    for who in "ours", "python", "other":
        inject.inject_record(who.encode())
        scenario(folder)
        inject.inject_record(None)
        for call in range(64):
            name = NAMES_OF[call]
            if name is None:
                break
            errors = ERRORS_OF[call].decode().split()
            # Python and torch answer for their own failed allocations.
            if who != "ours" and "ENOMEM" in errors:
                continue
            count = inject.inject_places(call, numbers, 4096)
            out += [
                f"{name.decode()}:{error}:{numbers[i]}{plus}:{who}"
                for i in range(count)
                for error in errors
                for plus in ("", "+")
            ]
    return "\n".join(out)


def main():
    start = time.time()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        # Run before any fork, so that every child has the modules that torch imports late.
        reference = scenario(folder)
    arguments = [a for a in sys.argv[1:] if a != "--short"]
    if arguments:
        faults = arguments
    else:
        said, wrong = in_child(listed)
        if wrong:
            sys.exit(f"without a fault: {wrong}")
        faults = said.split()
        if "--short" in sys.argv:
            step = max(1, len(faults) // 36)
            faults = faults[::step]
    wrongs = struck = 0
    for fault in faults:

        def faulty(folder, fault=fault):
            if not inject.inject_arm(fault.encode()):
                raise Wrong("the fault is not understood")
            try:
                found = scenario(folder)
            finally:
                hit = inject.inject_struck()
                inject.inject_arm(None)
            if found != reference:
                raise Wrong("other bits than without a fault")
            return str(hit)

        said, wrong = in_child(faulty)
        struck += said not in (None, "0")
        if wrong:
            wrongs += 1
            print(
                f"     {fault}: {wrong}\n     reproduce: LD_PRELOAD=libfaults.so"
                f" LD_LIBRARY_PATH={FOLDER} python {sys.argv[0]} {fault}",
                flush=True,
            )
    print(f"| Python: steps, saves, loads | {len(faults)} | {struck} hit a call | {wrongs} wrong |")
    print(
        f"{len(faults)} faults in Python, {struck} hit a call, {wrongs} wrong;"
        f" {time.time() - start:.0f} s"
    )
    return 1 if wrongs or struck * 2 < len(faults) else 0


if __name__ == "__main__":
    sys.exit(main())
