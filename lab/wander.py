#!/usr/bin/env python3
"""Says how far stored weights wander from exact ones in steps of the library, without a model.

    PYTHONPATH=python python lab/wander.py [--steps 1000 3000 10000] [--formats FORMAT ...]

Weights are normal with the root mean square 0.02, as in a language model. Updates are as AdamW's: a
learning rate times averages of normal numbers over ten steps, with a mean of their own for each
weight. Exact weights get the same updates in double. A figure is the root mean square of the
differences over that of the weights, in per cent.

length      by learning rate and number of steps
outlier     one weight of each 32 is 10, 20 or 50 times the root mean square: the 31 others, by
            number of steps at 1e-5
one large   one weight of each 32 gets one update of so many learning rates, 1e-4, and then goes
            back by a hundredth of the way at each step: the 31 others in that step, and 1000 steps
            later, in which nothing else moves them
zero        all weights begin at zero: by number of steps at 1e-5
"""

import argparse

import torch

from halfstep._library import abi, calls
from halfstep._states import handles

ROWS, COLUMNS, SIZE = 64, 256, 0.02
FORMATS = ("bf16-sr", "int8-ecc4", "int8-sr")
ODD = torch.arange(COLUMNS) % 32 == 5


class Stored:
    """A weight as the library stores it, beside the exact one."""

    def __init__(self, name, values):
        self.handle = handles.Handle(1, 1)
        self.handle.add(f"sgd/{name}", "w", 0, values.shape, "f32")
        self.handle.set(lr=1.0, momentum=0.0, weight_decay=0.0)
        abi.invoke(abi.lib.halfstep_allocate_states, self.handle)
        size = handles.slot_info(self.handle, 0, abi.SLOT_WEIGHT).code_bytes
        self.stored = torch.zeros(size, dtype=torch.uint8)
        self.place = self.stored.data_ptr()
        handles.write_rows(self.handle, 0, abi.SLOT_WEIGHT, self.place, values, values.shape)
        self.exact = self.value().double()

    def value(self):
        return handles.read_rows(
            abi.lib.halfstep_read_slot,
            self.handle,
            0,
            (ROWS, COLUMNS),
            abi.SLOT_WEIGHT,
            self.place,
        )

    def step(self, update):
        weights, gradients = ((abi.c_void_p * 1)(p) for p in (self.place, update.data_ptr()))
        abi.check(calls.run(self.handle, calls.all_tensors(weights, gradients)), self.handle)
        self.exact -= update.double()

    def wander(self, where=...):
        exact = self.exact[:, where]
        return 100 * ((self.value()[:, where] - exact).norm() / exact.norm()).item()


def normals(source):
    return torch.randn(ROWS, COLUMNS, generator=source)


def updates(rate):
    """Yields updates without end."""
    source = torch.Generator().manual_seed(5)
    mean, average = 0.1 * normals(source), torch.zeros(ROWS, COLUMNS)
    while True:
        average.mul_(0.9).add_(normals(source) + mean, alpha=0.1)
        yield rate * average


def weights(outlier=1.0):
    found = SIZE * normals(torch.Generator().manual_seed(6))
    if outlier > 1:
        found[:, ODD] = SIZE * outlier
    return found


def walk(name, values, rate, steps, where=...):
    """Returns the wander after each number of steps."""
    held, found = Stored(name, values), []
    for step, update in enumerate(updates(rate), 1):
        held.step(update)
        if step in steps:
            found.append(held.wander(where))
        if step >= max(steps):
            return found


def one_large(name, rates):
    """Returns the wander of the others in the step of one large update, and 1000 steps later."""
    held, update = Stored(name, weights()), torch.zeros(ROWS, COLUMNS)
    start = held.value()[:, ODD]
    update[:, ODD] = 1e-4 * rates
    held.step(update)
    found = [held.wander(~ODD)]
    for _ in range(1000):
        update[:, ODD] = 0.01 * (held.value()[:, ODD] - start)
        held.step(update)
    return [*found, held.wander(~ODD)]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[1000, 3000, 10000])
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| | | " + " | ".join(f"`{name}`" for name in args.formats) + " |")
    print("| --- | ---: |" + " ---: |" * len(args.formats))

    def rows(title, conditions, figures):
        """Prints a row for each condition. `figures` holds a list for each format."""
        for condition, row in zip(conditions, zip(*figures)):
            print(f"| {title} | {condition} | " + " | ".join(f"{x:.2f}" for x in row) + " |")

    for rate in (1e-5, 1e-4):
        found = [walk(name, weights(), rate, args.steps) for name in args.formats]
        rows(f"length, {rate:g}", args.steps, found)
    for outlier in (10, 20, 50):
        found = [walk(name, weights(outlier), 1e-5, args.steps, ~ODD) for name in args.formats]
        rows(f"outlier, {outlier} times", args.steps, found)
    for rates in (30, 1000, 1000000):
        found = [one_large(name, rates) for name in args.formats]
        rows(f"one large, {rates:,} rates", ("that step", "1,000 later"), found)
    found = [walk(name, torch.zeros(ROWS, COLUMNS), 1e-5, args.steps) for name in args.formats]
    rows("zero", args.steps, found)


if __name__ == "__main__":
    main()
