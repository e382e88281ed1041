#!/usr/bin/env python3
"""Draws the figures of the documents from the tables and measurements that they show.

    PYTHONPATH=python python lab/figures.py             writes all figures
    PYTHONPATH=python python lab/figures.py --check     lists those whose data has changed since

docs/loss_and_memory.svg                loss against memory: first table of docs/results.md
docs/figures/speed_and_memory.svg       time of a step against states: bench/peers.csv
docs/figures/speed_of_recipes.svg       speed beside memory's, by recipe: bench/results.csv
docs/figures/wander.svg                 the wander of rounding: tables of docs/results.md
docs/figures/one_weight.svg             one weight in six formats: computed by the library
docs/figures/trap_*.svg                 what low precision does to updates: bench/traps.md
"""

import argparse
import csv
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from drawing import WIDTH, Picture, Scale, panels, rows_of_marks  # noqa: E402

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
#: what figures call the peers of bench/traps.md and bench/peers.csv. fp32 peers are left out
PEERS = {
    "torch AdamW, fused, all BF16": "torch, BF16",
    "optimi AdamW, BF16, Kahan": "optimi, Kahan",
    "torchao _AdamW, all BF16, SR": "torchao, SR",
    "torchao AdamW8bit, BF16, SR": "torchao 8-bit, SR",
    "torchao AdamW4bit, BF16, SR": "torchao 4-bit, SR",
    "torchao AdamWFp8, BF16, SR": "torchao fp8, SR",
    "HeavyBall AdamW, all BF16, SR": "HeavyBall, SR",
    "HeavyBall AdamW, all BF16+8": "HeavyBall, BF16+8",
    "torchastic AdamW, all BF16, SR": "torchastic, SR",
    "adamw_bf16, BF16 with correction": "adamw_bf16",
    "DeepSpeed CPUAdam, BF16, fp32 states": "DeepSpeed, fp32 states",
    "DeepSpeed CPUAdam, all BF16": "DeepSpeed, BF16",
    "bitsandbytes AdamW8bit, BF16": "bitsandbytes",
}
FP32 = "torch AdamW, fused, fp32"
#: of each trap: its column in bench/traps.md, the title, what was done, and the axis
TRAPS = {
    "movement": (
        "Do small steps arrive?",
        ["Weights of 1, 2,000 updates of 1e-5. How far weights went,", "beside fp32."],
        (0, 1.5, False, (0, 0.5, 1, 1.5)),
    ),
    "decay": (
        "Does weight decay arrive?",
        ["A decay of a millionth a step for 10,000 steps. What weights", "lost, beside fp32."],
        (0, 1.2, False, (0, 0.5, 1)),
    ),
    "fall": (
        "Can the second moment fall?",
        ["Gradients fall to a hundredth. Mean size of the updates", "long after, beside fp32."],
        (0, 1.2, False, (0, 0.5, 1)),
    ),
    "spikes": (
        "Updates after rare spikes",
        ["One gradient of 1,000 is 300 times as large as the others.", "Mean update, beside fp32."],
        (0, 1.5, False, (0, 0.5, 1, 1.5)),
    ),
    "block": (
        "Small gradients beside a large one",
        ["Every 256th gradient is 10,000 times the others. The", "largest update, beside fp32."],
        (0.3, 1e5, True, (1, 100, 10000)),
    ),
    "tiny": (
        "Gradients of 1e-10",
        ["Size of the updates, beside fp32. At 0 nothing moves."],
        (0.1, 1e4, True, (1, 100, 10000)),
    ),
    "moved, %": (
        "A step with one NaN gradient",
        ["Share of the weights that this step moves, in per cent."],
        (0, 100, False, (0, 50, 100)),
    ),
}
WEIGHTS = ("bf16", "bf16-sr", "bf16-kahan", "bf16-ecc8", "int8-sr", "int8-ecc4")
STEPS, SIDE = 4000, 32


def read(root, *path):
    with open(os.path.join(root, *path), encoding="utf-8") as file:
        return file.read()


def columns(text, *names):
    """Returns some columns, by the words of its first row, of the first table of Markdown that has
    them all."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        rows = [[cell.strip(" *`") for cell in line.strip("|").split("|")]
                for line in block.splitlines()]  # fmt: skip
        if set(names) <= set(rows[0]):
            places = [rows[0].index(name) for name in names]
            return [[row[i] for i in places] for row in rows[2:]]
    raise ValueError(f"no table has the columns {', '.join(names)}")


def signed(cell):
    """Returns the first number of a cell."""
    return float(re.match(r"[-+.\d]+", cell.replace("−", "-")).group())


# ---- Loss ----------------------------------------------------------------------------------------


def loss_and_memory(root):
    section = read(root, "docs", "results.md").split("## E1", 1)[1]
    rows = columns(section, "recipe", "difference to fp32", "B/param")
    picture = Picture(
        "Loss above fp32 against bytes per parameter",
        ["nat/byte; 6.6 M parameters, learning rate 1e-5, three seeds"],
    )
    x, y = Scale(4.5, 16.6, 60, WIDTH - 20), Scale(-0.1, 1.2, 320, picture.top + 20)
    picture.x_axis(x, [(n, n) for n in range(6, 17, 2)], 320, y.end,
                   "bytes per parameter: weights, gradients, states")  # fmt: skip
    picture.y_axis(y, [(0.5, "+0.5"), (1, "+1.0")], 60, WIDTH - 20)
    picture.line(60, y(0), WIDTH - 20, y(0), "zero")
    picture.small(54, y(0) + 4, "fp32", "end")
    labels = {}
    for recipe, loss, size in rows:
        recipe, size = recipe.split("`")[0], float(size)
        loss = 0.0 if loss == "reference" else signed(loss)
        kind = "bad" if loss > 0.1 else "fp32" if recipe == "adamw/f32/f32" else "good"
        picture.mark(x(size), y(loss), kind, square=kind == "bad")
        name = recipe.removeprefix("adamw/").replace("f32/f32", "fp32")
        labels.setdefault((round(x(size)), kind), (x(size), y(loss), []))[2].append(name)
    for (_, kind), (left, top, names) in labels.items():
        if kind == "bad":
            picture.text(left + 12, top + 4, f"{names[0]}, to nearest")
            continue
        for i, name in enumerate(names):
            shift = left + 4 + 16 * i
            turn = f'font-size="12" transform="rotate(-60 {shift:.1f} {top - 9:.1f})"'
            picture.text(shift, top - 9, name, turn)
    return picture.svg(364)


# ---- Speed ---------------------------------------------------------------------------------------


def speed_and_memory(root):
    """Draws bench/peers.csv: one tensor, gradients scanned."""
    found = {"halfstep": [], "peer": []}
    rows = csv.DictReader(read(root, "bench", "peers.csv").splitlines())
    for row in (row for row in rows if row["shapes"] == "one" and row["to_torch"]):
        size, ratio = float(row["bytes_of_states_per_param"]), float(row["to_torch"])
        if row["key"].startswith("adamw/") and ":" not in row["key"]:
            found["halfstep"].append((row["key"].removeprefix("adamw/"), size, ratio))
        elif row["title"] in PEERS:
            found["peer"].append((PEERS[row["title"]], size, ratio))
    picture = Picture(
        "Time of a step against bytes of states",
        ["time over torch's fused fp32 AdamW; 33.6 M parameters,", "two cores of an AMD EPYC"],
    )
    x, y = Scale(0.5, 8.6, 52, WIDTH - 20), Scale(0.2, 130, 480, picture.top + 14, log=True)
    picture.x_axis(x, [(n, n) for n in range(1, 9)], 480, y.end,
                   "bytes of optimizer states per parameter")  # fmt: skip
    picture.y_axis(y, [(1, "1"), (10, "10"), (100, "100")], 52, WIDTH - 20)
    picture.line(52, y(1), WIDTH - 20, y(1), "zero")
    places = []
    for who, rows in found.items():
        for name, size, ratio in sorted(rows, key=lambda row: (row[1], -row[2])):
            picture.mark(x(size), y(ratio), "good" if who == "halfstep" else "fp32",
                         square=who == "peer")  # fmt: skip
            places.append((x(size), y(ratio), name))
    label(picture, places)
    picture.mark(66, 532, "good")
    picture.small(76, 536, "halfstep")
    picture.mark(150, 532, "fp32", square=True)
    picture.small(160, 536, "other packages")
    return picture.svg(550)


def label(picture, places):
    """Writes each name right or left of its mark, as near to it as no other name or mark allows."""
    taken = [(x - 6, y + 4, 12) for x, y, _ in places]
    for x, y, name in sorted(places, key=lambda place: place[1]):
        wide = 6.2 * len(name)
        free = [
            (left, y + 4 + move)
            for move in sorted(range(-60, 61, 3), key=abs)
            for left in (x + 9, x - 9 - wide)
            if 54 < left < WIDTH - 6 - wide
            if not any(
                abs(y + 4 + move - at) < 12 and left < a + w and a < left + wide
                for a, at, w in taken
            )
        ]
        taken.append((*free[0], wide))
        picture.text(*free[0], name, 'font-size="12"')


def speed_of_recipes(root):
    """Draws AdamW's rows of bench/results.csv for 1,000 tensors, from one machine. Rows that other
    guests of the machine disturbed have a slow stream beside them, and are left out."""
    rows = csv.DictReader(read(root, "bench", "results.csv").splitlines())
    found = [
        (f"{row['recipe'].removeprefix('adamw/')}, {float(row['bytes_per_param']):g} B",
         float(row["stream_fraction"]))
        for row in rows
        if row["recipe"].startswith("adamw/bf16") or row["recipe"] == "adamw/f32/f32"
        if row["tensors"] == "1000" and 20 < float(row["stream_gb_per_s"]) < 60
    ]  # fmt: skip
    picture = Picture(
        "Speed of a step beside memory's",
        ["1: as quick as memory moves the bytes. B: bytes moved for", "each parameter."],
    )
    scale = Scale(0, 1, 190, WIDTH - 60)
    return rows_of_marks(
        picture, [("1,000 matrices, two cores of a Xeon, AVX-512", found)], scale,
        [(0, "0"), (0.5, "0.5"), (1, "1")], lambda value: f"{value:.2f}", (0, 9),
        "share of the speed of memory",
    )  # fmt: skip


# ---- Weights -------------------------------------------------------------------------------------


def wander(root):
    section = read(root, "docs", "results.md").split("### How far weights wander", 1)[1]
    formats = ("bf16-sr", "int8-ecc4", "int8-sr")
    lengths = columns(section, "learning rate", "steps", *formats)
    curves = {"": [row[1:] for row in lengths if row[0] == "1e-5"]}
    larger = "the largest weight over the size of the others, at 1e-5"
    for row in columns(section, larger, "steps", *formats):
        curves.setdefault(row[0], []).append(row[1:])
    picture = Picture(
        "How far rounding lets weights wander",
        [
            "Distance from exact weights over their length, in per cent,",
            "after steps of rate 1e-5.",
        ],
    )
    titles = ["normal weights"] + [f"1 of 32 is {n} times larger" for n in list(curves)[1:]]
    frames, bottom = panels(picture, titles, 2, 150)
    for (left, right, top, low), rows in zip(frames, curves.values()):
        x = Scale(1000, 10000, left, right - 56, log=True)
        y = Scale(0.5, 100, low, top, log=True)
        picture.x_axis(x, [(1000, "1,000"), (10000, "10,000")], low, top)
        picture.y_axis(y, [(1, "1 %"), (10, "10 %"), (100, "100 %")], left, right - 56)
        ends = []
        for k, (name, kind) in enumerate(zip(formats, ("good", "mild", "bad")), 1):
            points = [(x(float(row[0].replace(",", ""))), y(float(row[k]))) for row in rows]
            picture.curve(points, kind)
            ends.append((points[-1][1], name))
        last = -100
        for at, name in sorted(ends):
            last = max(at + 4, last + 12)
            picture.text(right - 52, last, name, 'font-size="11.5"')
    picture.small((52 + WIDTH) / 2, bottom + 34, "steps", "middle")
    return picture.svg(bottom + 44)


def walk(name):
    """Returns one weight as the model sees it, after each of many equal updates by AdamW."""
    import torch

    import halfstep

    layer = torch.nn.Linear(SIDE, SIDE, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    layer.to(torch.float32 if name == "f32" else torch.bfloat16)
    if name.startswith("int8"):
        halfstep.nn.quantize_(layer, name)
    optimizer = halfstep.optimizer(
        f"adamw/{name}/f32", layer.named_parameters(), lr=1e-5, weight_decay=0.0, seed=0
    )
    weight, found = layer.weight, []
    weight.grad = torch.ones(SIDE, SIDE, dtype=weight.dtype)
    for _ in range(STEPS):
        optimizer.step()
        values = weight.dequantize() if name.startswith("int8") else weight
        found.append(values[0, 0].item())
    return found


def one_weight(root):
    exact = walk("f32")
    picture = Picture(
        "One weight in six formats",
        [
            f"{STEPS:,} updates of 1e-5 by AdamW. Dashed: fp32. Lines show what",
            "the model computes with.",
        ],
    )
    names = {"bf16": "bf16, to nearest"}
    frames, bottom = panels(picture, [names.get(name, name) for name in WEIGHTS], 2, 112)
    for (left, right, top, low), name in zip(frames, WEIGHTS):
        x, y = Scale(0, STEPS, left, right), Scale(0.94, 1.005, low, top)
        picture.x_axis(x, [(n, f"{n:,}") for n in (0, 2000, 4000)], low, top)
        picture.y_axis(y, [(0.96, "0.96"), (0.98, "0.98"), (1, "1")], left, right)
        picture.line(x(0), y(1), x(STEPS), y(exact[-1]), "zero")
        points, last = [(x(0), y(1))], 1.0
        for step, value in enumerate([*walk(name), None], 1):
            if value != last:
                points.append((x(step - 1), points[-1][1]))
                if value is not None:
                    points.append((x(step - 1), y(value)))
                    last = value
        picture.curve(points, "bad" if name == "bf16" else "good")
    picture.small((52 + WIDTH) / 2, bottom + 34, "steps", "middle")
    return picture.svg(bottom + 44)


# ---- Traps ---------------------------------------------------------------------------------------


def trap(root, column):
    title, lines, (low, high, log, ticks) = TRAPS[column]
    sound = (0, 0) if column == "moved, %" else (0.95, 1.05)
    lines = [*lines, "Red: not as it should be." if sound[1] == 0 else "Red: more than 5 % off."]
    text = read(root, "bench", "traps.md")
    rows = [
        (name.removeprefix("adamw/").replace("bf16/bf16", "bf16/bf16, to nearest"), float(value))
        for name, value in columns(text, "ours", column)
        if name != "adamw/f32/f32"
    ]
    groups = [("halfstep", rows)]
    if column != "spikes":  # peers were run before this trap was there
        found = {name: float(value) for name, value in columns(text, "optimizer", column)}
        groups.append(("other packages", [(short, found[name]) for name, short in PEERS.items()]))
    scale = Scale(low, high, 196, WIDTH - 66, log)
    ticks = [(value, f"{value:,}") for value in ticks]

    def form(value):
        return f"{value:,.0f}" if value >= 90 or sound[1] == 0 else f"{value:.3f}"

    axis = "per cent of the weights" if sound[1] == 0 else "times fp32 AdamW's"
    return rows_of_marks(Picture(title, lines), groups, scale, ticks, form, sound, axis)


# ---- All -----------------------------------------------------------------------------------------


def figures(root=ROOT):
    """Returns all figures by their path in the repository."""
    found = {"docs/loss_and_memory.svg": loss_and_memory(root)}
    for draw in (speed_and_memory, speed_of_recipes, wander, one_weight):
        found[f"docs/figures/{draw.__name__}.svg"] = draw(root)
    for column in TRAPS:
        name = "nan" if column == "moved, %" else column
        found[f"docs/figures/trap_{name}.svg"] = trap(root, column)
    return found


def stale(root=ROOT):
    """Returns the paths of committed figures that differ from their data, and of those missing."""
    return [
        path
        for path, svg in figures(root).items()
        if not os.path.exists(os.path.join(root, path)) or read(root, path) != svg
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; list stale figures")
    if parser.parse_args().check:
        sys.exit("\n".join(f"{path} differs from its data" for path in stale()) or 0)
    for path, svg in figures().items():
        os.makedirs(os.path.dirname(os.path.join(ROOT, path)), exist_ok=True)
        with open(os.path.join(ROOT, path), "w", encoding="utf-8") as file:
            file.write(svg)


if __name__ == "__main__":
    main()
