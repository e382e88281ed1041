#!/usr/bin/env python3
"""The part of scripts/compat.sh for the Python package.

    compat.py write FOLDER     writes one file of each kind, and expected.json, and reads them
    compat.py read FOLDER      reads what expected.json names

expected.json has two hashes of weights, states and sums for each file: as it was saved, and after
three steps more. Gradients follow from the number of the step and are exact, so that hashes are
the same on every machine.
"""

import hashlib
import json
import math
import os
import shutil
import sys
import tempfile

import torch

import halfstep

SHAPES = {"matrix": (32, 64), "vector": (64,)}
SAVED, MORE = 5, 3


def values(shape, k):
    """Returns sixteenths between -1 and 1. The product of two is exact in BF16."""
    numbers = (torch.arange(math.prod(shape)) * 37 + k * 101) % 31 - 15
    return (numbers / 16).reshape(shape).bfloat16()


def digest(value, sums):
    """Adds the bytes of all tensors in a list or dictionary to a hash."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            if key == "weight.hashes":  # a file of safetensors has none
                continue
            sums.update(str(key).encode())
            digest(value[key], sums)
    elif isinstance(value, (list, tuple)):
        for item in value:
            digest(item, sums)
    elif isinstance(value, halfstep.nn.Int8Weight):
        digest(value.packed, sums)
    elif isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        sums.update(flat.view(torch.uint8).numpy().tobytes())


class StateDict:
    """A state dictionary and the weights, by torch.save()."""

    def __init__(self, file, cls, **options):
        self.file, self.cls, self.options = file, cls, options

    def new(self, path):
        self.params = {name: torch.nn.Parameter(values(shape, 7)) for name, shape in SHAPES.items()}
        self.opt = self.cls(self.params.items(), lr=0.01, seed=5, **self.options)

    def step(self, k):
        for i, p in enumerate(self.params.values()):
            p.grad = values(p.shape, 3 * k + i)
        self.opt.step()

    def state(self):
        return [list(self.params.values()), self.opt.state_dict()["state"]]

    def save(self, path):
        weights = {name: p.detach() for name, p in self.params.items()}
        torch.save({"weights": weights, "optimizer": self.opt.state_dict()}, path)

    def load(self, path):
        self.new(None)
        held = torch.load(path, weights_only=True)
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(held["weights"][name])
        self.opt.load_state_dict(held["optimizer"])


class Pickle(StateDict):
    """A whole optimizer with its parameters."""

    def save(self, path):
        torch.save((self.params, self.opt), path)

    def load(self, path):
        self.params, self.opt = torch.load(path, weights_only=False)


class Safetensors(StateDict):
    """save_safetensors(), with the weights in a file of their own."""

    def save(self, path):
        self.opt.save_safetensors(path)
        torch.save([p.detach() for p in self.params.values()], path + ".weights.pt")

    def load(self, path):
        self.new(None)
        with torch.no_grad():
            for p, value in zip(self.params.values(), torch.load(path + ".weights.pt")):
                p.copy_(value)
        self.opt.load_safetensors(path)


class Store(StateDict):
    """A file of store=, which is stepped in place and has the weights."""

    def new(self, path):
        self.options["store"] = path
        super().new(path)

    def save(self, path):
        pass

    def load(self, path):
        self.new(path)


class Packed(StateDict):
    """A model with 8-bit weights, and its optimizer."""

    def new(self, path):
        self.model = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            self.model.weight.copy_(values((32, 64), 7))
        halfstep.nn.quantize_(self.model, "int8-ecc4")
        self.opt = self.cls(self.model.named_parameters(), lr=0.01, seed=5, **self.options)

    def step(self, k):
        self.opt.zero_grad()
        (self.model(values((1, 64), k)) * values((1, 32), k + 1)).sum().backward()
        self.opt.step()

    def state(self):
        return [self.model.state_dict(), self.opt.state_dict()["state"]]

    def save(self, path):
        held = {"model": self.model.state_dict(), "optimizer": self.opt.state_dict()}
        torch.save(held, path)

    def load(self, path):
        self.new(None)
        held = torch.load(path, weights_only=True)
        self.model.load_state_dict(held["model"])
        self.opt.load_state_dict(held["optimizer"])


class Kept:
    """The state dictionary of one object, `kept`, by torch.save()."""

    def state(self):
        return self.kept.state_dict()

    def save(self, path):
        torch.save(self.kept.state_dict(), path)

    def load(self, path):
        self.new(None)
        self.kept.load_state_dict(torch.load(path, weights_only=True))


class Averages(Kept):
    """The averages of a model."""

    file = "averages.pt"

    def new(self, path):
        self.model = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
        self.set(0)
        self.kept = halfstep.EMA(self.model, 0.9, seed=5)

    def set(self, k):
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(values(p.shape, k))

    def step(self, k):
        self.set(k)
        self.kept.update_parameters(self.model)


class Sums(Kept):
    """The sums of a GradientAccumulator."""

    file = "sums.pt"

    def new(self, path):
        self.params = {name: torch.nn.Parameter(values(shape, 7)) for name, shape in SHAPES.items()}
        self.kept = halfstep.GradientAccumulator(self.params.items(), seed=5).attach()

    def step(self, k):
        sum((p * values(p.shape, k)).sum() for p in self.params.values()).backward()


KINDS = [
    StateDict("adamw.pt", halfstep.AdamW, weights="bf16-ecc8", states="int8"),
    StateDict("muon.pt", halfstep.Muon, adamw={"lr": 0.001}, states="int8"),
    StateDict("schedulefree.pt", halfstep.ScheduleFree, weights="bf16-kahan", states="fp8"),
    Pickle("pickle.pt", halfstep.AdamW, weights="bf16-sr", states="int4"),
    Safetensors("lamb.safetensors", halfstep.Lamb, weights="bf16-kahan", states="int8"),
    Store("run.states", halfstep.AdamW, weights="bf16-ecc8", states="int8"),
    Packed("packed.pt", halfstep.AdamW, weights="int8-ecc4", states="int8"),
    Averages(),
    Sums(),
]


def hash_of(kind):
    sums = hashlib.sha256()
    digest(kind.state(), sums)
    return sums.hexdigest()[:16]


def steps(kind, first, n):
    for k in range(first, first + n):
        kind.step(k)


def write(folder):
    expected = {}
    with tempfile.TemporaryDirectory() as scratch:
        for kind in KINDS:
            # A file that is stepped in place is copied when it is saved, and goes on elsewhere.
            stepped = os.path.join(scratch, kind.file)
            kind.new(stepped)
            steps(kind, 0, SAVED)
            kind.save(os.path.join(folder, kind.file))
            if os.path.exists(stepped):
                shutil.copy(stepped, folder)
            saved = hash_of(kind)
            steps(kind, SAVED, MORE)
            expected[kind.file] = [saved, hash_of(kind)]
    with open(os.path.join(folder, "expected.json"), "w", encoding="ascii") as file:
        json.dump(expected, file, indent=1)
        file.write("\n")


def read(folder):
    """Returns the number of files that were not read with the bits of expected.json. Reads copies,
    because steps may write to them."""
    with open(os.path.join(folder, "expected.json"), encoding="ascii") as file:
        expected = json.load(file)
    kinds, wrong = {kind.file: kind for kind in KINDS}, 0
    with tempfile.TemporaryDirectory() as scratch:
        held = shutil.copytree(folder, os.path.join(scratch, "held"))
        for name, hashes in expected.items():
            kind = kinds[name]
            try:
                kind.load(os.path.join(held, name))
                found = [hash_of(kind)]
                steps(kind, SAVED, MORE)
                found.append(hash_of(kind))
            except Exception as error:  # the others are read all the same
                found = f"{type(error).__name__}: {error}"
            if found != hashes:
                print(f"FAIL {name}: {found}, not {hashes}")
                wrong += 1
    if not wrong:
        print(f"ok   {len(expected)} files of Python are read and gone on from")
    return wrong


if __name__ == "__main__":
    command, folder = sys.argv[1:]
    if command == "write":
        write(folder)
    sys.exit(read(folder) != 0)
