"""Attacks the usual ways to save from Python as ours is attacked: kills in the middle of a save,
and a full disk.

    peers.py [--kills N]      needs torch, safetensors and halfstep; prints one row per way

Each way saves one optimizer's states again and again to one path, as training does. The process is
killed at random instants, or the system refuses a write because the disk is full. Afterwards the
path must hold a state that loads: the last one reported as saved, or the one being saved."""

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
import warnings

import torch
from safetensors.torch import load_file, save_file

import halfstep

WORDS = 1 << 19


def tensors(k):
    return {"state": torch.full((WORDS,), k, dtype=torch.int32), "k": torch.tensor([k])}


def whole(found):
    k = int(found["k"][0])
    if found["state"].numel() != WORDS or not bool((found["state"] == k).all()):
        raise ValueError("mixed contents")
    return k


def torch_save(path, k):
    torch.save(tensors(k), path)


def torch_load(path):
    return whole(torch.load(path))


def file_save(path, k):
    save_file(tensors(k), path)


def file_load(path):
    return whole(load_file(path))


OPTIMIZER = {}


def optimizer():
    if not OPTIMIZER:
        p = torch.nn.Parameter(torch.zeros(WORDS // 4096, 4096))
        opt = halfstep.SGD([("p", p)], lr=1e-3, momentum=0.5)
        p.grad = torch.zeros_like(p)
        opt.step()
        OPTIMIZER.update(p=p, opt=opt)
    return OPTIMIZER["p"], OPTIMIZER["opt"]


def ours_save(path, k):
    p, opt = optimizer()
    opt.state[p]["momentum_buffer"].fill_(k)
    opt.save_safetensors(path)


def ours_load(path):
    found = load_file(path)["p/momentum_buffer"]
    k = int(found.reshape(-1)[0])
    if found.numel() != WORDS or not bool((found == k).all()):
        raise ValueError("mixed contents")
    return k


WAYS = [
    ("torch.save in place", torch_save, torch_load),
    ("safetensors save_file in place", file_save, file_load),
    ("halfstep save_safetensors", ours_save, ours_load),
]


def kills(save, load, folder, count, rng):
    """Kills `count` times. Returns how often nothing was left that loads, or a state older than the
    last reported one."""
    path = os.path.join(folder, "state")
    k = 1
    save(path, k)
    start = time.time()
    save(path, k)
    span = 2 * (time.time() - start)
    lost = 0
    for _ in range(count):
        ends = os.pipe()
        child = os.fork()
        if not child:
            os.close(ends[0])
            for step in range(k + 1, k + 100000):
                save(path, step)
                os.write(ends[1], b"%d\n" % step)
            os._exit(0)
        os.close(ends[1])
        time.sleep(span * rng.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(ends[0], "rb") as pipe:
            said = pipe.read().split()
        reported = int(said[-1]) if said else k
        try:
            found = load(path)
            if found not in (reported, reported + 1):
                raise ValueError(f"{found} after {reported}")
            k = found
        except Exception:
            lost += 1
            k = reported + 1
            save(path, k)
        for name in os.listdir(folder):
            if name != "state":
                os.unlink(os.path.join(folder, name))
    return lost


def full(save, load, folder):
    """Saves while no file may grow beyond half the size of a save. Returns what is left: the old
    state, or nothing."""
    path = os.path.join(folder, "full")
    save(path, 5)
    size = os.path.getsize(path)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
        try:
            save(path, 6)
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    told = (
        "an exception"
        if status == 256
        else "no exception"
        if status == 0
        else f"killed by signal {status & 127}"
    )
    try:
        return f"{told}, the old state is there" if load(path) == 5 else f"{told}, another state"
    except Exception as error:
        return f"{told}, nothing loads ({type(error).__name__})"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    bad = 0
    print("| way of saving | kills in saves | nothing that loads | disk full |\n|---|---|---|---|")
    for name, save, load in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            lost = kills(save, load, folder, options.kills, random.Random(1))
            said = full(save, load, folder)
        print(f"| {name} | {options.kills} | {lost} | {said} |", flush=True)
        if save is ours_save:
            bad = lost or "the old state is there" not in said
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
