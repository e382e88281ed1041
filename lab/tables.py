#!/usr/bin/env python3
"""Turns a report.json of `halfstep compare` into markdown.

tables.py results TITLE FILE    losses with spread, differences with standard error
tables.py rates TITLE FILE      a grid of learning rates, one row per recipe, each at its best
                                against the first at its
tables.py memory TITLE FILE     bytes per parameter with and without release
"""

import json
import sys


def load(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def number(value, form):
    return "-" if value is None else form.format(value)


def spread(mean, key):
    text = number(mean["mean"], "{:.4f}" if key == "standard_deviation" else "{:+.4f}")
    return text if mean[key] is None else f"{text} ± {mean[key]:.4f}"


def row(cells):
    print("| " + " | ".join(cells) + " |")


def header(title, report, cells, left=1):
    print(f"## {title}\n")
    row(cells)
    row(["---" if i < left else "---:" for i in range(len(cells))])


def footer(report):
    if report["sentence"]:
        print(f"\n{report['sentence']}")
    machine = "; ".join(f"{name}: {value}" for name, value in report["machine"].items())
    print(f"\n```\n{report['command']}\n```\n\n{machine}\n")


def results(title, report):
    seeds = report["table"][0]["val_loss"]["n"]
    header(
        title,
        report,
        [
            "recipe",
            "gradients",
            f"val loss, {seeds} seed{'s' * (seeds != 1)}",
            "difference to the reference",
            "B/param",
            "tokens/s",
            "weights changed, %",
            "skipped",
        ],
        left=2,
    )
    for i, line in enumerate(report["table"]):
        changed = line["weights_changed"]["mean"]
        row(
            [
                f"`{line['name']}`",
                line["gradients"],
                spread(line["val_loss"], "standard_deviation"),
                "reference" if i == 0 else spread(line["difference"], "standard_error"),
                number(line["bytes_per_param"]["total"], "{:.3f}"),
                number(line["tokens_per_s"]["mean"], "{:.0f}"),
                "-" if changed is None else f"{100 * changed:.2f}",
                str(line["skipped_steps"]),
            ]
        )
    if seeds > 1:
        print(
            "\nVal loss: mean ± standard deviation over the seeds. Difference: taken seed by seed,"
            " mean ± standard error."
        )
    footer(report)


def by_recipe(report):
    """Returns {recipe: {rate as typed: line of the table}} in the order of the report."""
    grid = {}
    for line in report["table"]:
        words = line["name"].split(":")
        rate = next(word for word in words if word.startswith("lr="))
        grid.setdefault(":".join(word for word in words if word is not rate), {})[
            rate.partition("=")[2]
        ] = line
    return grid


def best_rate(lines):
    finite = {
        rate: line["val_loss"]["mean"]
        for rate, line in lines.items()
        if line["val_loss"]["mean"] is not None
    }
    if not finite:
        sys.exit("tables: a recipe diverged at every learning rate")
    return min(finite, key=finite.get)


def differences(report, grid):
    """Returns {recipe: its text at its best rate against the first recipe at its own}, seed by
    seed, and the number of seeds."""
    names = [line["name"] for line in report["table"]]
    by_name = {name: {} for name in names}
    # Runs come seed by seed, in the order of the table.
    for i, run in enumerate(report["runs"]):
        by_name[names[i % len(names)]][run["seed"]] = run["val_loss"]
    chosen = {recipe: by_name[lines[best_rate(lines)]["name"]] for recipe, lines in grid.items()}
    reference = next(iter(chosen.values()))
    texts = {}
    for recipe, losses in chosen.items():
        pairs = [
            loss - reference[seed]
            for seed, loss in losses.items()
            if None not in (loss, reference.get(seed))
        ]
        mean = sum(pairs) / len(pairs) if pairs else float("nan")
        error = (
            (sum((p - mean) ** 2 for p in pairs) / (len(pairs) - 1) / len(pairs)) ** 0.5
            if len(pairs) > 1
            else None
        )
        texts[recipe] = f"{mean:+.4f}" + ("" if error is None else f" ± {error:.4f}")
        if losses is reference:
            texts[recipe] = "reference"
    return texts, len(reference)


def seeds_note(seeds):
    print(
        f"\nValidation loss, mean of {seeds} seed{'s' * (seeds != 1)}. Differences are taken seed"
        " by seed, mean ± standard error."
    )


def rates(title, report):
    grid = by_recipe(report)
    columns = list(dict.fromkeys(rate for lines in grid.values() for rate in lines))
    header(
        title,
        report,
        ["recipe"]
        + [f"lr {rate}" for rate in columns]
        + ["difference at the best rates", "B/param"],
    )
    texts, seeds = differences(report, grid)
    for recipe, lines in grid.items():
        best = best_rate(lines)
        cells = [
            number(lines[rate]["val_loss"]["mean"], "{:.4f}") if rate in lines else "-"
            for rate in columns
        ]
        row(
            [f"`{recipe}`"]
            + [f"**{cell}**" if rate == best else cell for rate, cell in zip(columns, cells)]
            + [texts[recipe], f"{lines[best]['bytes_per_param']['total']:.3f}"]
        )
    seeds_note(seeds)
    footer(dict(report, sentence=""))


def memory(title, report):
    """Gradients count at their peak, with the sums that the model itself holds."""
    header(
        title,
        report,
        [
            "recipe",
            "weights",
            "gradients",
            "states",
            "total, B/param",
            "gradients with release",
            "total with release, B/param",
            "saved by release",
        ],
    )
    runs = {}
    for line, run in zip(report["table"], report["runs"]):
        recipe, _, special = line["name"].partition(":")
        runs.setdefault(recipe, {})[special] = run
    for recipe, pair in runs.items():
        held = pair[""]["bytes_per_param"]
        gradients = [
            pair[special]["peak_gradient_bytes"] / pair[special]["params"]
            for special in ("", "release")
        ]
        total = [held["weights"] + held["states"] + each for each in gradients]
        row(
            [
                f"`{recipe}`",
                f"{held['weights']:.3f}",
                f"{gradients[0]:.3f}",
                f"{held['states']:.3f}",
                f"{total[0]:.3f}",
                f"{gradients[1]:.3f}",
                f"{total[1]:.3f}",
                f"{100 * (1 - total[1] / total[0]):.0f} %",
            ]
        )
    footer(dict(report, sentence=""))


def main():
    word, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    tables = {"results": results, "rates": rates, "memory": memory}
    if word in tables and len(arguments) == 2:
        tables[word](arguments[0], load(arguments[1]))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
