#!/usr/bin/env python3
"""Trains a small transformer with weights in several formats, and says how far losses and weights
end from those of fp32 weights.

    PYTHONPATH=python python lab/weights.py --text FILE --other FILE --out FOLDER
        [--seeds 3] [--scale 1] [--only REGIME ...] [--recipes RECIPE ...]

The model is a byte-level transformer: 3 layers of width 128, 541,568 parameters, 491,520 of them in
the matrices of its layers. These matrices have the recipe's formats. Embeddings and gains have BF16
or fp32 weights and int8 or fp32 states, so that only the matrices tell recipes apart. The model is
computed in fp32 from the weights as they are stored: codes and scales, without error codes.

scratch     from random weights, 600 steps of 512 bytes, rate 2e-3 with a cosine to a tenth
continued   from the weights of 1,500 steps in fp32, 400 steps of 768 bytes, 1e-3 to 1e-4
tuned-4     from the same weights on the other text, 1,500 steps of 256 bytes at 1e-4
tuned-5     likewise at 1e-5. The first seed goes on to 3,000 steps

Betas are 0.9 and 0.99, decay is 0.1, gradients are clipped to 1. All recipes get the same first
weights and the same batches. Finished runs are kept in FOLDER and not run again.

Prints a markdown table for each regime:

difference  of the loss to that of the first recipe, in nat: mean and standard error of the seeds
wander      distance of the matrices, with error codes, to those of fp32 weights with the same
            states, over the length of those
changes     share of the blocks whose scale a step changes
"""

import argparse
import gzip
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from halfstep._library import abi, calls
from halfstep._states import handles

WIDTH, LAYERS, HEADS, HIDDEN, CONTEXT, BYTES = 128, 3, 4, 384, 128, 256
MATRICES = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)] * LAYERS
OTHERS = [(BYTES, WIDTH), (CONTEXT, WIDTH)] + [(WIDTH,)] * (2 * LAYERS + 1)
BLOCK, CODES = 34, 2  # bytes of a packed block, and where its codes begin

#: text, sequences a step, steps, rate, rate at the end over it, steps of warm-up
REGIMES = {
    "scratch": ("text", 4, 600, 2e-3, 0.1, 60),
    "continued": ("text", 6, 400, 1e-3, 0.1, 30),
    "tuned-4": ("other", 2, 1500, 1e-4, 1.0, 20),
    "tuned-5": ("other", 2, 1500, 1e-5, 1.0, 20),
}
START = ("text", 8, 1500, 3e-3, 0.05, 60)
LONGER = {"tuned-5": 3000}  # steps of the first seed, at a constant rate

RECIPES = [
    f"adamw/{weights}/{states}"
    for states in ("f32", "int8", "int4")
    for weights in ("f32", "bf16-sr", "int8-ecc4", "int8-sr")
    if states != "f32" or weights == "f32"
]


class Text:
    """Sequences of a text. The last tenth is for validation."""

    def __init__(self, path):
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        cut = len(data) * 9 // 10
        self.train, held = data[:cut], data[cut:]
        self.window = torch.arange(CONTEXT + 1)
        starts = torch.linspace(0, len(held) - CONTEXT - 1, 256).long()
        self.validation = held[starts[:, None] + self.window].long()

    def batches(self, seed, size):
        source = torch.Generator().manual_seed(1000 + seed)
        while True:
            starts = torch.randint(len(self.train) - CONTEXT, (size, 1), generator=source)
            yield self.train[starts + self.window].long()


def first_weights(seed):
    source = torch.Generator().manual_seed(seed)
    made = []
    for k, (rows, columns) in enumerate(MATRICES):
        into_stream = k % 4 in (1, 3)
        std = columns**-0.5 * ((2 * LAYERS) ** -0.5 if into_stream else 1)
        made.append(torch.randn(rows, columns, generator=source) * std)
    for shape, std in zip(OTHERS, (0.04, 0.02, *[None] * len(OTHERS))):
        made.append(torch.randn(shape, generator=source) * std if std else torch.ones(shape))
    return made


def loss_of(weights, sequences):
    matrices, (embedding, place, *gains) = weights[: len(MATRICES)], weights[len(MATRICES) :]
    x, y = sequences[:, :-1], sequences[:, 1:]
    n, t = x.shape
    h = embedding[x] + place[:t]
    for layer in range(LAYERS):
        qkv, out, up, down = matrices[4 * layer : 4 * layer + 4]
        split = F.linear(F.rms_norm(h, (WIDTH,), gains[2 * layer]), qkv)
        q, k, v = split.view(n, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + F.linear(mixed.transpose(1, 2).reshape(n, t, WIDTH), out)
        inner = F.linear(F.rms_norm(h, (WIDTH,), gains[2 * layer + 1]), up)
        h = h + F.linear(F.gelu(inner, approximate="tanh"), down)
    logits = F.linear(F.rms_norm(h, (WIDTH,), gains[-1]), embedding)
    return F.cross_entropy(logits.reshape(-1, BYTES), y.reshape(-1))


def loss_on(weights, sequences):
    with torch.no_grad():
        return statistics.fmean(loss_of(weights, part).item() for part in sequences.split(32))


class Trained:
    """Stored weights, as the library has them, and a leaf for each, as the model computes."""

    def __init__(self, recipe, values, seed):
        _, weights, states = recipe.split("/")
        plain = weights == "f32"
        beside = f"adamw/{'f32' if plain else 'bf16-sr'}/{'f32' if states == 'f32' else 'int8'}"
        self.handle = handles.Handle(1, seed)
        self.leaves = [v.clone().requires_grad_(True) for v in values]
        for i, v in enumerate(values):
            v.grad = None
            recipe_of = recipe if i < len(MATRICES) else beside
            self.handle.add(recipe_of, f"w{i}", 0, v.shape, "f32")
        self.handle.set(beta1=0.9, beta2=0.99, weight_decay=0.1, clip_norm=1.0)
        abi.invoke(abi.lib.halfstep_allocate_states, self.handle)
        self.slots = [
            handles.slot_info(self.handle, i, abi.SLOT_WEIGHT) for i in range(len(values))
        ]
        self.stored = [torch.zeros(s.code_bytes, dtype=torch.uint8) for s in self.slots]
        for i, v in enumerate(values):
            address = self.stored[i].data_ptr()
            handles.write_rows(self.handle, i, abi.SLOT_WEIGHT, address, v, v.shape)
        kinds = [list(abi.formats.values())[s.format].name for s in self.slots]
        self.packed = [i for i, kind in enumerate(kinds) if kind.startswith("int8")]
        self.weights = (abi.c_void_p * len(values))(*(s.data_ptr() for s in self.stored))
        self.changed = 0.0
        self.load()

    def scales(self):
        return [self.stored[i].view(-1, BLOCK)[:, :CODES].contiguous() for i in self.packed]

    def load(self):
        """Brings the stored weights to the leaves, without error codes."""
        for i, (leaf, stored) in enumerate(zip(self.leaves, self.stored)):
            if i in self.packed:
                blocks = stored.view(-1, BLOCK)
                scales = blocks[:, :CODES].contiguous().view(torch.bfloat16).float()
                value = blocks[:, CODES:].view(torch.int8).float() * scales
            else:
                value = stored.view(
                    torch.float32 if len(stored) == 4 * leaf.numel() else torch.bfloat16
                )
            leaf.data.copy_(value.reshape(leaf.shape))

    def step(self, rate):
        before = self.scales()
        self.handle.set(lr=rate)
        gradients = (abi.c_void_p * len(self.leaves))(*(p.grad.data_ptr() for p in self.leaves))
        abi.check(calls.run(self.handle, calls.all_tensors(self.weights, gradients)), self.handle)
        for leaf in self.leaves:
            leaf.grad = None
        self.load()
        if before:
            differ = [(a != b).any(1).float() for a, b in zip(before, self.scales())]
            self.changed += torch.cat(differ).mean().item()

    def matrices(self):
        """Returns all elements of the matrices, with error codes."""
        return torch.cat(
            [
                handles.read_rows(
                    abi.lib.halfstep_read_slot,
                    self.handle,
                    i,
                    shape,
                    abi.SLOT_WEIGHT,
                    self.stored[i].data_ptr(),
                ).flatten()
                for i, shape in enumerate(MATRICES)
            ]
        )


def rate_at(step, steps, rate, final, warm_up):
    falling = final + (1 - final) * 0.5 * (1 + math.cos(math.pi * step / steps))
    return rate * min(1, step / warm_up) * falling


def train(text, recipe, values, seed, size, steps, rate, final, warm_up, scale, longer=0):
    """Trains once, and goes on to `longer` steps. Returns {steps: (loss, matrices, share of scales
    changed)} after both, and the last weights."""
    steps, longer = max(4, round(steps * scale)), round(longer * scale)
    model = Trained(recipe, values, seed)
    batches, results = text.batches(seed, size), {}
    for step in range(1, max(steps, longer) + 1):
        loss_of(model.leaves, next(batches)).backward()
        model.step(rate_at(step, steps, rate, final, max(1, warm_up * scale)))
        if step in (steps, longer):
            loss = loss_on(model.leaves, text.validation)
            results[step] = (loss, model.matrices(), model.changed / step)
    results["weights"] = [leaf.detach() for leaf in model.leaves]
    return results


def spread(values, form):
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return form.format(statistics.fmean(values)) + ("" if error is None else f" ± {error:.4f}")


def table(title, runs):
    """Prints a table of {recipe: [runs by seed]}. The first recipe is the reference."""
    print(f"\n{title}\n")
    print("| recipe | loss | difference | wander, % | changes, % |")
    print("| --- | ---: | ---: | ---: | ---: |")
    reference = next(iter(runs.values()))
    for recipe, rows in runs.items():
        pairs = [(a, b) for a, b in zip(rows, reference) if a and b]
        if not pairs:
            continue
        cells = [f"`{recipe}`", f"{statistics.fmean(a['loss'] for a, _ in pairs):.4f}"]
        if rows is reference:
            cells += ["reference", "", ""]
        else:
            cells.append(spread([a["loss"] - b["loss"] for a, b in pairs], "{:+.4f}"))
            packed = "/int8-" in recipe
            plain = "/f32/" in recipe
            wander = statistics.fmean(a["wander"] for a, _ in pairs)
            changed = statistics.fmean(a["changed"] for a, _ in pairs)
            cells.append("reference" if plain else f"{100 * wander:.2f}")
            cells.append(f"{100 * changed:.4f}" if packed else "")
        print("| " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", required=True)
    parser.add_argument("--other", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1)
    parser.add_argument("--only", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    texts = {"text": Text(args.text), "other": Text(args.other)}

    start = out / "start.pt"
    if not start.exists() and set(args.only) - {"scratch"}:
        name, *rest = START
        made = train(texts[name], "adamw/f32/f32", first_weights(0), 0, *rest, args.scale)
        torch.save(made["weights"], start)

    found = {}
    for regime in args.only:
        name, *rest = REGIMES[regime]
        for seed in range(args.seeds):
            for recipe in args.recipes:
                states = recipe.split("/")[2]
                record = out / f"{regime}-{seed}-{recipe.replace('/', '-')}.json"
                twin = out / f"{regime}-{seed}-{states}.pt"
                if not record.exists():
                    began = time.monotonic()
                    values = first_weights(seed) if regime == "scratch" else torch.load(start)
                    longer = 0 if seed else LONGER.get(regime, 0)
                    made = train(texts[name], recipe, values, seed, *rest, args.scale, longer)
                    made.pop("weights")
                    if "/f32/" in recipe:
                        torch.save(
                            {step: matrices for step, (_, matrices, _) in made.items()}, twin
                        )
                    exact = torch.load(twin)
                    lines = {
                        step: {
                            "loss": loss,
                            "wander": ((matrices - exact[step]).norm() / exact[step].norm()).item(),
                            "changed": changed,
                        }
                        for step, (loss, matrices, changed) in made.items()
                    }
                    record.write_text(json.dumps(lines))
                    print(
                        f"{record.name}: {time.monotonic() - began:.0f} s", lines, file=sys.stderr
                    )
                for step, line in json.loads(record.read_text()).items():
                    found.setdefault((regime, int(step)), {}).setdefault(recipe, []).append(line)
    for (regime, step), runs in found.items():
        table(f"{regime}, {step} steps", runs)


if __name__ == "__main__":
    main()
