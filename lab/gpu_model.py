#!/usr/bin/env python3
"""Trains a model on a GPU, and compares its weights and states with the processor's, bit for bit.

    gpu_model.py                                        1000 steps of each recipe
    gpu_model.py --recipes adamw/bf16-sr/int8 --steps 100 --every 10
    gpu_model.py --device cpu --steps 4 --every 2       without a GPU: that everything runs

The transformer over bytes of examples/finetune.py learns data/demo.txt on the GPU. Gradients of a
GPU and of a processor differ, so those of the GPU are copied. The same optimizer on the processor
then steps a copy of the weights with them. All bits of weights and states, and all numbers beside
them, are compared every --every steps and after the last. The rate rises and falls, and gradients
are clipped.
"""

import argparse
import math
import os
import sys
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir)
#: what is stored in 32, 16, 8 and 4 bits, and rules with one state and with norms
RECIPES = (
    "adamw/f32/f32",
    "adamw/bf16-sr/bf16-sr",
    "adamw/bf16-kahan/bf16-sr",
    "adamw/bf16-ecc8/int8",
    "adamw/bf16-sr/int4",
    "lion/bf16-sr/int8",
    "lamb16/bf16-sr/bf16-sr",
)
RATES = {"lion": 3e-4, "lamb16": 1e-2}


class Gpu:
    """Where torch puts the model, and how its bits come back."""

    def __init__(self, name):
        self.name = name

    def model(self, model):
        return model.to(self.name)

    def text(self, text):
        return text.to(self.name)

    def read(self, tensor):
        return tensor.detach().cpu().clone()


def bits(read, optimizer, params):
    """Returns name -> value of all weights and of all that the optimizer holds, in the memory of
    the process."""
    import torch

    found = {name: read(p) for name, p in params.items()}
    state = optimizer.state_dict()
    names = list(params)
    for index, held in state["state"].items():
        found.update(
            (f"{names[index]}: {key}", read(v) if isinstance(v, torch.Tensor) else v)
            for key, v in held.items()
        )
    for i, group in enumerate(state["param_groups"]):
        found.update(
            (f"group {i}: {key}", read(v) if isinstance(v, torch.Tensor) else v)
            for key, v in group.items()
            if key != "params"
        )
    return found


def different(there, here):
    """Returns the names of values that are not the same, bit for bit."""
    import torch

    def same(a, b):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            return repr(a) == repr(b)
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        )

    return sorted(there.keys() ^ here.keys()) + [
        name for name in there if name in here and not same(there[name], here[name])
    ]


def compare(recipe, place, options):
    """Trains. Returns a sentence about the first difference, or None, and the losses."""
    import torch

    import halfstep

    sys.path.insert(0, os.path.join(ROOT, "examples"))
    import finetune

    torch.manual_seed(options.seed)
    model = finetune.Model(options.width, options.depth, options.heads, options.context)
    model = finetune.prepare(model, recipe)
    here = {name: torch.nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    there = dict(place.model(model).named_parameters())
    rate = RATES.get(recipe.split("/")[0], 1e-3)
    given = {"lr": rate, "weight_decay": 0.1, "clip_norm": 1.0, "seed": options.seed}
    optimizers = [halfstep.optimizer(recipe, params.items(), **given) for params in (there, here)]
    with open(options.data, "rb") as file:
        text = place.text(torch.frombuffer(bytearray(file.read()), dtype=torch.uint8))
    batches, losses = torch.Generator().manual_seed(options.seed), []
    for step in range(1, options.steps + 1):
        starts = place.text(
            torch.randint(len(text) - options.context - 1, (options.batch,), generator=batches)
        )
        optimizers[0].zero_grad()
        with torch.device(text.device):
            loss = finetune.loss_of(model, text, starts, options.context)
        loss.backward()
        losses.append(loss.detach())
        for name, p in there.items():
            here[name].grad = place.read(p.grad)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * min(
                    step / (options.steps / 20),
                    0.1 + 0.45 * (1 + math.cos(math.pi * step / options.steps)),
                )
            optimizer.step()
        if step % options.every == 0 or step == options.steps:
            found = different(
                bits(place.read, optimizers[0], there), bits(place.read, optimizers[1], here)
            )
            if found:
                return f"after step {step} {len(found)} differ: {', '.join(found[:3])}", losses
    return None, [float(loss) for loss in losses]


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--every", type=int, default=100, help="steps between comparisons (default: 100)"
    )
    for name, value in (
        ("width", 256),
        ("depth", 4),
        ("heads", 4),
        ("context", 128),
        ("batch", 16),
        ("seed", 1),
    ):
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--data", default=os.path.join(ROOT, "data", "demo.txt"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args(arguments)
    try:
        import torch
    except ImportError as error:
        sys.exit(f"gpu_model.py: needs torch: {error}")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "gpu_model.py: torch finds no GPU here; --device cpu runs everything on the processor"
        )
    failed = 0
    for recipe in options.recipes.split(","):
        begun = time.monotonic()
        try:
            wrong, losses = compare(recipe, Gpu(options.device), options)
        except (OSError, RuntimeError, ValueError) as error:
            wrong, losses = f"{type(error).__name__}: {error}", []
        failed += wrong is not None
        print(
            (
                f"FAIL {recipe}: {wrong}"
                if wrong
                else (
                    f"ok   {recipe}: {options.steps} steps, all bits the same; loss"
                    f" {losses[0]:.3f}, at the end {losses[-1]:.3f};"
                    f" {time.monotonic() - begun:.0f} s"
                )
            ),
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
