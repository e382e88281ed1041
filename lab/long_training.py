#!/usr/bin/env python3
"""100,000 steps of a small model at learning rate 1e-5, with the data in random order and in a
fixed order of 89 batches.

    PYTHONPATH=python lab/long_training.py --text FILE [--steps 100000] [--seeds 3] [--repeat 0 89]
    [--recipes ...]

Small constant steps over a long time are where errors of rounding add up. Batches that come again
in a fixed order are where random words that are arranged over time could resonate with the
gradients. 89 is a Fibonacci number, the worst case of a rotation by the golden ratio
(docs/random.md).

The model is a byte-level perceptron: 8 bytes of context, 16 wide each, 64 hidden units, 28,992
parameters. It is computed in fp32 from the weights as they are stored. Every recipe gets the same
first weights, values of BF16, and the same batches. `RECIPE:generator` takes another generator than
the default. Averages of the weights at decay 0.9999, one for each of --averages, run along with the
recipe that --averaged names.

Prints two markdown tables. The first has the validation loss, its difference to the first recipe
(paired by seed, mean and standard error), and the root mean square distance of the final weights to
those of the first recipe. The second has the same of the averages.
"""

import argparse
import itertools
import math
import statistics
import sys
import time

import torch

import halfstep

CONTEXT, WIDTH, HIDDEN, BATCH = 8, 16, 64, 32


class Model(torch.nn.Module):
    """Gradients reach the stored weights in their own type, as in BF16 training."""

    def __init__(self, generator, stored):
        super().__init__()
        shapes = {
            "embedding": (256, WIDTH),
            "hidden": (CONTEXT * WIDTH, HIDDEN),
            "bias": (HIDDEN,),
            "head": (HIDDEN, 256),
        }
        for name, shape in shapes.items():
            std = 0.0 if len(shape) == 1 else 1.0 if name == "embedding" else shape[0] ** -0.5
            first = (torch.randn(shape, generator=generator) * std).bfloat16()
            self.register_parameter(name, torch.nn.Parameter(first.to(stored)))

    def forward(self, contexts):
        x = self.embedding.float()[contexts].flatten(-2)
        x = torch.tanh(x @ self.hidden.float() + self.bias.float())
        return x @ self.head.float()


def loss_of(model, contexts, targets):
    return torch.nn.functional.cross_entropy(model(contexts), targets)


def batch_at(text, starts):
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return windows[:, :CONTEXT], windows[:, CONTEXT]


def flat(model):
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def run(text, recipe, seed, repeat, steps, averages):
    """Trains once. Returns (loss, weights) of the model, then of each average. The order of batches
    begins anew after `repeat` of them, or never if that is 0."""
    recipe, _, generator = recipe.partition(":")
    stored = torch.float32 if recipe.split("/")[1] == "f32" else torch.bfloat16
    model = Model(torch.Generator().manual_seed(seed), stored)
    held_out = len(text) // 10
    train, rest = text[:-held_out], text[-held_out:]
    validation = batch_at(rest, torch.linspace(0, len(rest) - CONTEXT - 2, 16384).long())
    optimizer = halfstep.optimizer(
        recipe, model.named_parameters(), lr=1e-5, weight_decay=0.01, seed=seed
    )
    if generator:
        optimizer.generator = generator
    averages = [
        halfstep.EMA(model, decay=0.9999, weights=weights, seed=seed) for weights in averages
    ]
    order = torch.Generator().manual_seed(seed + 1000)
    block = repeat or 4096
    for step in range(steps):
        if step % block == 0 and (step == 0 or not repeat):
            starts = torch.randint(len(train) - CONTEXT - 1, (block, BATCH), generator=order)
        loss_of(model, *batch_at(train, starts[step % block])).backward()
        optimizer.step()
        optimizer.zero_grad()
        for average in averages:
            average.update_parameters(model)
    with torch.no_grad():
        return [
            (loss_of(m, *validation).item(), flat(m))
            for m in (model, *(average.module for average in averages))
        ]


def spread(values, form):
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return form.format(mean) + ("" if error is None else f" ± {error:.4f}")


def table(title, rows):
    """Prints a table of {(order, name): [runs]}. The first name of each order is the reference of
    the others."""
    print(
        f"| batches | {title} | val loss | difference | weights: rms distance |\n| --- | --- | ---:"
        " | ---: | ---: |"
    )
    references = {}
    for (repeat, name), runs in rows.items():
        reference = references.setdefault(repeat, runs)
        cells = [
            f"the same {repeat} again" if repeat else "random",
            f"`{name}`",
            f"{statistics.fmean(r['loss'] for r in runs):.4f}",
        ]
        if reference is runs:
            cells += ["reference", "reference"]
        else:
            cells += [
                spread([r["loss"] - f["loss"] for r, f in zip(runs, reference)], "{:+.4f}"),
                f"{statistics.fmean(r['distance'] for r in runs):.2e}",
            ]
        print("| " + " | ".join(cells) + " |")
    print()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", required=True)
    parser.add_argument("--steps", type=int, default=100000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeat", type=int, nargs="+", default=[0, 89])
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=[
            "adamw/f32",
            "adamw/bf16-sr",
            "adamw/bf16-sr:mixer",
            "adamw/bf16-sr/int8",
            "adamw/bf16-sr/int4",
        ],
    )
    parser.add_argument("--averaged", default="adamw/bf16-sr")
    parser.add_argument("--averages", nargs="*", default=["f32", "bf16-sr"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    with open(args.text, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    trained, averaged = {}, {}
    for seed, repeat in itertools.product(range(1, args.seeds + 1), args.repeat):
        references = {}  # the last weights of the first recipe, and of the first average
        for recipe in args.recipes:
            start = time.monotonic()
            averages = args.averages if recipe == args.averaged else []
            results = run(text, recipe, seed, repeat, args.steps, averages)
            for place, (name, (loss, weights)) in enumerate(zip([recipe, *averages], results)):
                first = references.setdefault("average" if place else "recipe", weights)
                distance = (weights - first).square().mean().sqrt().item()
                rows = averaged if place else trained
                rows.setdefault((repeat, name), []).append({"loss": loss, "distance": distance})
            seconds = time.monotonic() - start
            print(f"{recipe}, seed {seed}, repeat {repeat}: {seconds:.0f} s", file=sys.stderr)
    table("recipe", trained)
    table(f"average of `{args.averaged}`", averaged)


if __name__ == "__main__":
    main()
