#!/usr/bin/env python3
"""Fine-tunes a small language model in 16-bit storage, and compares every recipe with fp32 AdamW.

    python examples/finetune.py     # data/demo.txt, a quarter of an hour on one core
    python examples/finetune.py --data FILE --recipes adamw/bf16-sr/int8,adamw/bf16 --seeds 5 --svg
    finetune.svg

The model is a transformer over bytes, made of plain torch modules. torch.optim.AdamW trains it in
fp32 on the first half of a text. Each recipe then fine-tunes these weights on the rest of the text
but its last tenth, once for each seed. As the reference, torch's fp32 AdamW does the same with the
same batches. The last tenth of the text gives the validation loss. Differences to the reference are
taken seed by seed.

For a bf16 recipe, model.to(torch.bfloat16) casts the model. Weights, gradients, activations and
states then have 16 bits or less, and nothing has a copy in fp32. For int8-ecc4 and int8-sr,
halfstep.nn.quantize_() makes the weights of linear layers 8-bit codes, and layers compute in BF16.
The learning rate is that of a fine-tune, which is low. BF16 weights that are rounded to nearest
(the recipe adamw/bf16) hardly move at this rate; they are the control."""

import argparse
import copy
import json
import math
import os
import statistics
import sys
import time
from html import escape

import torch
from torch import nn
from torch.nn import functional

RECIPES = (
    "adamw/f32",
    "adamw/bf16-kahan",
    "adamw/bf16-sr",
    "adamw/bf16-ecc8/int8",
    "adamw/bf16-sr/int8",
    "adamw/bf16-sr/int4",
    "adamw/int8-ecc4/int8",
    "adamw/int8-sr/int4",
    "adamw/bf16",
)
REFERENCE = "torch.optim.AdamW, fp32"
DEMO = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "data", "demo.txt")


class Block(nn.Module):
    """A layer: causal attention and a perceptron, each after a norm."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Returns the logits of the next byte at every place of a window."""

    def __init__(self, width, depth, heads, context):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.bytes(x) + self.places.weight[: x.shape[1]])))


def loss_of(model, text, starts, context):
    """Returns the mean loss, in nat per byte, over the windows of `text` that begin at `starts`."""
    window = text[starts[:, None] + torch.arange(context + 1)].long()
    logits = model(window[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())


@torch.no_grad()
def validate(model, text, options):
    starts = torch.arange(0, len(text) - options.context - 1, options.context)
    losses = [
        (loss_of(model, text, part, options.context).item(), len(part)) for part in starts.split(64)
    ]
    return sum(loss * n for loss, n in losses) / len(starts)


def train(model, optimizer, text, steps, seed, options):
    """Makes `steps` steps. The rate rises over the first twentieth of them, then falls to a tenth.
    The gradients of the last step are kept, for held()."""
    batches = torch.Generator().manual_seed(seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / (steps / 20), 0.1 + 0.45 * (1 + math.cos(math.pi * i / steps))),
    )
    for _ in range(steps):
        optimizer.zero_grad()
        starts = torch.randint(len(text) - options.context - 1, (options.batch,), generator=batches)
        loss_of(model, text, starts, options.context).backward()
        optimizer.step()
        schedule.step()


def held(model, optimizer):
    """Returns the bytes per parameter that the tensors take: weights with residuals and error
    codes, gradients, and states."""
    count = sum(p.numel() for p in model.parameters())
    found = {"weights": 0, "gradients": 0, "states": 0}
    for p in model.parameters():
        found["weights"] += getattr(p, "packed", p).nbytes
        found["gradients"] += 0 if p.grad is None else p.grad.nbytes
        for name, value in optimizer.state[p].items():
            if isinstance(value, torch.Tensor):
                found["weights" if name.startswith("weight.") else "states"] += value.nbytes
    return {kind: n / count for kind, n in found.items()}


def prepare(model, recipe):
    """Stores the weights of a model as a recipe says, in place. Returns the model."""
    import halfstep

    weights = (recipe.split("/") + [""])[1]
    if weights.startswith("int8"):
        halfstep.nn.quantize_(model, weights)
    low = {"bf16": torch.bfloat16, "int8": torch.bfloat16, "f16": torch.float16}
    return model.to(low.get(weights.partition("-")[0], torch.float32))


def summary(name, runs, reference):
    """Returns a row of the table. `runs` and `reference` are the (loss, bytes) of each seed."""
    losses = [loss for loss, _ in runs]
    pairs = [loss - other for loss, (other, _) in zip(losses, reference)]
    spread, error = (
        (statistics.stdev(losses), statistics.stdev(pairs) / math.sqrt(len(pairs)))
        if len(runs) > 1
        else (None, None)
    )
    return {
        "recipe": name,
        "losses": losses,
        "loss": statistics.mean(losses),
        "spread": spread,
        "difference": statistics.mean(pairs),
        "error": error,
        "bytes_per_param": {**runs[0][1], "total": sum(runs[0][1].values())},
    }


def table(rows):
    def number(x, form):
        return "" if x is None else format(x, form)

    lines = [
        f"{'recipe':<26} {'val loss':>8} {'spread':>7} {'difference':>11} {'+-':>7} {'weights':>8}"
        f" {'grads':>6} {'states':>7} {'B/param':>8}"
    ]
    for row in rows:
        b = row["bytes_per_param"]
        lines.append(
            f"{row['recipe']:<26} {row['loss']:8.4f} {number(row['spread'], '.4f'):>7}"
            f" {row['difference']:+11.4f} {number(row['error'], '.4f'):>7} {b['weights']:8.3f}"
            f" {b['gradients']:6.3f} {b['states']:7.3f} {b['total']:8.3f}"
        )
    return "\n".join(lines)


COLOURS = {"weights": "#4269d0", "gradients": "#efb118", "states": "#6cc5b0"}


def svg(rows, caption):
    """Returns the figure of the table. The left side shows the differences with their standard
    errors, the right side bytes. A difference that is too large for the axis is an arrow at the
    edge."""
    line, top, left, middle, right = 30, 64, 190, 340, 590
    bottom = top + line * len(rows)
    spread = rows[0]["spread"] or 0.0
    sizes = sorted(abs(row["difference"]) + (row["error"] or 0) for row in rows)
    limit = max(
        1.1 * spread, 1.1 * sizes[len(sizes) * 3 // 4], 1e-4
    )  # three quarters of the recipes fit on the axis
    unit = 10.0 ** math.floor(math.log10(limit))
    limit = next(n * unit for n in (1, 2, 4, 6, 8, 10) if n * unit >= limit)
    most = max(row["bytes_per_param"]["total"] for row in rows)
    out = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="880" height="{bottom + 62}" viewBox="0'
            f' 0 880 {bottom + 62}" font-family="Helvetica, Arial, sans-serif" font-size="13">'
        ),
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]

    def x(value):
        return round(left + middle / 2 * (1 + max(-1.0, min(1.0, value / limit))), 1)

    def write(at, y, text, style=""):
        out.append(f'<text x="{at}" y="{y}" {style}>{escape(text)}</text>')

    def stroke(path, colour, width=1):
        out.append(f'<path d="{path}" stroke="{colour}" stroke-width="{width}" fill="none"/>')

    def box(at, y, wide, high, colour):
        out.append(
            f'<rect x="{at:.1f}" y="{y}" width="{wide:.1f}" height="{high}" fill="{colour}"/>'
        )

    small = 'font-size="11" fill="#555"'
    write(left, 24, "Validation loss: difference to fp32 AdamW, nat/byte", 'font-weight="bold"')
    write(right, 24, "Bytes per parameter", 'font-weight="bold"')
    if spread:
        box(x(-spread), top - 6, x(spread) - x(-spread), bottom - top + 6, "#e8eef6")
        write(left, 44, "shaded: the spread of fp32 between seeds", small)
    for i, (kind, colour) in enumerate(COLOURS.items()):
        box(right + 90 * i, 35, 10, 10, colour)
        write(right + 14 + 90 * i, 44, kind, small)
    for i in range(-2, 3):
        at = x(limit * i / 2)
        stroke(f"M{at} {top - 6}V{bottom}", "#ddd" if i else "#888")
        write(
            at, bottom + 16, f"{limit * i / 2:+.2g}" if i else "0", f'text-anchor="middle" {small}'
        )
    for i, row in enumerate(rows):
        y = top + line * i + line // 2
        value, error, at = row["difference"], row["error"] or 0.0, x(row["difference"])
        write(left - 12, y + 4, row["recipe"], 'text-anchor="end"')
        if abs(value) > limit:
            way = 1 if value > 0 else -1
            stroke(
                f"M{at - 34 * way} {y}H{at}M{at - 7 * way} {y - 5}L{at} {y}L{at - 7 * way} {y + 5}",
                "#c33",
                2,
            )
            write(
                at - 40 * way,
                y + 4,
                f"{value:+.3f}",
                f'text-anchor="{"end" if way > 0 else "start"}" fill="#c33"',
            )
        else:
            stroke(f"M{x(value - error)} {y}H{x(value + error)}", "#222", 2)
            out.append(f'<circle cx="{at}" cy="{y}" r="4" fill="#222"/>')
        start = right
        for kind, colour in COLOURS.items():
            wide = row["bytes_per_param"][kind] / most * 230
            box(start, y - 9, wide, 18, colour)
            start += wide
        write(round(start + 6, 1), y + 4, f"{row['bytes_per_param']['total']:.2f}")
    write(14, bottom + 44, caption, small)
    return "\n".join([*out, "</svg>"]) + "\n"


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--data",
        metavar="FILE",
        default=DEMO,
        help="any file, taken as bytes (default: the repository's data/demo.txt)",
    )
    add(
        "--recipes",
        default=",".join(RECIPES),
        help="recipes, separated by commas (default: %(default)s)",
    )
    add(
        "--seeds",
        type=int,
        default=3,
        help="number of seeds, each a run of every recipe (%(default)s)",
    )
    add(
        "--pretrain",
        type=int,
        default=1000,
        metavar="N",
        help="steps of the pretraining, in fp32 (%(default)s)",
    )
    add("--steps", type=int, default=400, metavar="N", help="steps of the fine-tune (%(default)s)")
    add("--lr", type=float, default=3e-5, help="learning rate of the fine-tune (%(default)s)")
    add("--pretrain-lr", type=float, default=2e-3, help="that of the pretraining (%(default)s)")
    add("--weight-decay", type=float, default=0.01, help="weight decay (%(default)s)")
    for name, default, what in (
        ("width", 128, "width of the model"),
        ("depth", 3, "number of layers"),
        ("heads", 4, "number of attention heads"),
        ("context", 64, "context length in bytes"),
        ("batch", 16, "windows in a batch"),
    ):
        add(f"--{name}", type=int, default=default, help=f"{what} (%(default)s)")
    add("--threads", type=int, default=0, help="number of threads (0: torch's default)")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add("--svg", metavar="FILE", help="write a figure of the table to FILE")
    options = parser.parse_args()
    for name in ("seeds", "pretrain", "steps", "width", "depth", "heads", "context", "batch"):
        if getattr(options, name) < (0 if name == "pretrain" else 1):
            least = 0 if name == "pretrain" else 1
            parser.error(f"--{name} {getattr(options, name)}: it must be at least {least}")
    if options.width % options.heads:
        parser.error(f"--width {options.width} must be a multiple of --heads {options.heads}")
    if options.svg and not os.path.isdir(os.path.dirname(options.svg) or "."):
        parser.error(f"--svg: the folder {os.path.dirname(options.svg)} does not exist")
    try:
        import halfstep
    except ImportError as error:
        parser.error(f"halfstep cannot be imported: {error}")
    recipes = [recipe for recipe in options.recipes.split(",") if recipe]
    for recipe in recipes:
        try:
            model = prepare(nn.Linear(32, 2), recipe)
            halfstep.optimizer(recipe, model.parameters(), lr=options.lr)
        except ValueError as error:
            parser.error(f"--recipes: {recipe}: {error}")
    try:
        with open(options.data, "rb") as file:
            text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    except OSError as error:
        parser.error(f"--data: {error.strerror}: {options.data}")
    except ValueError:
        text = torch.empty(0)
    if len(text) < 20 * (options.context + 2):
        parser.error(
            f"--data: {options.data} has {len(text)} bytes; it must have at least"
            f" {20 * (options.context + 2)}"
        )
    return options, recipes, text


def main():
    options, recipes, text = arguments()
    import halfstep

    if options.threads > 0:
        torch.set_num_threads(options.threads)
    before, tuning, unseen = (
        text[: len(text) // 2],
        text[len(text) // 2 : len(text) * 9 // 10],
        text[len(text) * 9 // 10 :],
    )
    began = time.monotonic()

    def say(what):
        print(f"[{time.monotonic() - began:6.1f} s] {what}", file=sys.stderr, flush=True)

    torch.manual_seed(0)
    pretrained = Model(options.width, options.depth, options.heads, options.context)
    count = sum(p.numel() for p in pretrained.parameters())
    say(f"{count} parameters; pretraining, {options.pretrain} steps on {len(before)} bytes")
    optimizer = torch.optim.AdamW(
        pretrained.parameters(), lr=options.pretrain_lr, weight_decay=options.weight_decay
    )
    train(pretrained, optimizer, before, options.pretrain, 0, options)
    start = validate(pretrained, unseen, options)
    say(f"validation loss {start:.4f}; fine-tuning, {options.steps} steps on {len(tuning)} bytes")

    runs = {name: [] for name in (REFERENCE, *recipes)}
    for seed in range(1, options.seeds + 1):
        for name in runs:
            model = copy.deepcopy(pretrained)
            model.zero_grad()
            if name == REFERENCE:
                optimizer = torch.optim.AdamW(
                    model.parameters(), lr=options.lr, weight_decay=options.weight_decay
                )
            else:
                optimizer = halfstep.optimizer(
                    name,
                    prepare(model, name).named_parameters(),
                    lr=options.lr,
                    seed=seed,
                    weight_decay=options.weight_decay,
                )
            train(model, optimizer, tuning, options.steps, seed, options)
            runs[name].append((validate(model, unseen, options), held(model, optimizer)))
            say(f"seed {seed}, {name}: {runs[name][-1][0]:.4f}")

    rows = [summary(name, found, runs[REFERENCE]) for name, found in runs.items()]
    caption = (
        f"{count:,} parameters, {options.steps} steps at learning rate {options.lr:g}; fp32 goes"
        f" from {start:.4f} to {rows[0]['loss']:.4f}; mean of {options.seeds} seeds, bars: standard"
        " error"
    )
    if options.svg:
        with open(options.svg, "w", encoding="utf-8") as file:
            file.write(svg(rows, caption))
    if options.json:
        print(
            json.dumps(
                {"parameters": count, "loss_before": start, "options": vars(options), "rows": rows}
            )
        )
    else:
        print(f"{caption}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
