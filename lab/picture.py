#!/usr/bin/env python3
"""Draws the picture of README.md from the first table of docs/results.md: loss against memory.

    python lab/picture.py        writes docs/loss_and_memory.svg

The picture follows the reader's light or dark theme.
"""

import os
import re
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
WIDTH, HEIGHT = 880, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 850, 60, 340  # the frame, in pixels
BYTES, LOSS = (4, 17), (-0.1, 1.2)  # the axes' ranges
STYLE = """
.back { fill: #ffffff } text { fill: #1f2328 } .small { fill: #59636e } .line { stroke: #d1d9e0 }
.zero { stroke: #818b98 } .good { fill: #0969da } .bad { fill: #cf222e } .fp32 { fill: #59636e }
@media (prefers-color-scheme: dark) {
.back { fill: #0d1117 } text { fill: #f0f6fc } .small { fill: #9198a1 } .line { stroke: #3d444d }
.zero { stroke: #9198a1 } .good { fill: #4493f8 } .bad { fill: #f85149 } .fp32 { fill: #9198a1 } }
"""


def table():
    """Returns the rows of E1's table: recipe, loss beside fp32 in nat/byte, bytes per parameter."""
    with open(os.path.join(ROOT, "docs", "results.md"), encoding="utf-8") as file:
        section = file.read().split("## E1", 1)[1].split("```", 1)[0]
    rows = []
    for line in section.split("\n"):
        cells = [cell.strip(" *`") for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            loss = "0" if cells[2] == "reference" else cells[2].replace("−", "-")
            loss = re.match(r"[-+.\d]+", loss).group()
            rows.append((cells[0].split("`")[0], float(loss), float(cells[3])))
    return rows


def x_of(size):
    return LEFT + (size - BYTES[0]) / (BYTES[1] - BYTES[0]) * (RIGHT - LEFT)


def y_of(loss):
    return BOTTOM - (loss - LOSS[0]) / (LOSS[1] - LOSS[0]) * (BOTTOM - TOP)


def text(x, y, words, extra=""):
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra and " " + extra}>{words}</text>'


def draw(rows):
    """Returns the picture as SVG. Recipes of the same size share one label."""
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f"<style>{STYLE}</style>",
        '<rect class="back" width="100%" height="100%"/>',
        text(LEFT, 26, "Loss above fp32, nat/byte, against bytes per parameter", 'font-size="16"'),
        text(LEFT, 46, "6.6 M parameters, learning rate 1e-5, three seeds", 'class="small"'),
        text((LEFT + RIGHT) / 2, HEIGHT - 14, "weights + gradients + optimizer states, bytes per"
             " parameter", 'class="small" text-anchor="middle"'),
    ]  # fmt: skip
    for size in range(4, 17, 2):
        out.append(text(x_of(size), BOTTOM + 20, size, 'class="small" text-anchor="middle"'))
    for loss in (0, 0.5, 1):
        y = y_of(loss)
        kind = "line" if loss else "zero"
        out.append(f'<path class="{kind}" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
        out.append(text(LEFT - 10, y + 4, f"+{loss}" if loss else "fp32",
                        'class="small" text-anchor="end"'))  # fmt: skip
    labels = {}
    for recipe, loss, size in rows:
        x, y = x_of(size), y_of(loss)
        kind = "bad" if loss > 0.1 else "fp32" if recipe.startswith("adamw/f32") else "good"
        out.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
        labels.setdefault((round(x), round(y / 20)), (x, y, kind, []))[3].append(
            recipe.removeprefix("adamw/").replace("f32/f32", "fp32")
        )
    for x, y, kind, names in labels.values():
        if kind == "bad":
            out.append(text(x + 12, y + 4, f"{names[0]}, rounded to nearest"))
        else:
            turn = f'transform="rotate(-38 {x + 4:.1f} {y - 10:.1f})"'
            out.append(text(x + 4, y - 10, ", ".join(names), turn))
    return "\n".join([*out, "</svg>"]) + "\n"


def main():
    rows = table()
    if not rows:
        sys.exit("docs/results.md has no table under '## E1'")
    with open(os.path.join(ROOT, "docs", "loss_and_memory.svg"), "w", encoding="utf-8") as file:
        file.write(draw(rows))


if __name__ == "__main__":
    main()
