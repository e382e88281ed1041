"""Times a step of Muon in the Gram form beside one in the standard form, in turns, on matrices of
several aspects. Prints a table of medians for docs/results.md.

    OMP_NUM_THREADS=1 python lab/muon_forms.py [--rows 1024] [--aspects 1,2,4] [--rounds 9]
                                               [--coefficients given,deepseek-v4]
"""

import argparse
import statistics
import time

import torch

import halfstep

FORMS = ("standard", "gram")


def optimizers(rows, columns, coefficients):
    """Returns a step of each form on a matrix of its own."""
    steps = []
    for form in FORMS:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(rows, columns))
        weight.grad = torch.randn(rows, columns) * 1e-3
        listed = {} if coefficients == "given" else {"ns_coefficients": coefficients}
        steps.append(halfstep.Muon([weight], lr=1e-3, ns_form=form, **listed).step)
        steps[-1]()
    return steps


def times_of(steps, rounds):
    """Returns the times of each form in milliseconds, and their ratios, round by round."""
    times = [[] for _ in steps]
    for number in range(rounds):
        for form in (0, 1) if number % 2 else (1, 0):
            begun = time.perf_counter()
            steps[form]()
            times[form].append(1e3 * (time.perf_counter() - begun))
    return times, [one / other for one, other in zip(*times)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--aspects", default="1,2,4,8")
    parser.add_argument("--coefficients", default="given,deepseek-v4")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print("| coefficients | matrix | standard, ms | gram, ms | standard / gram |")
    print("|---|---|---:|---:|---:|")
    for coefficients in options.coefficients.split(","):
        for aspect in options.aspects.split(","):
            columns = int(options.rows * float(aspect))
            steps = optimizers(options.rows, columns, coefficients)
            times, ratios = times_of(steps, options.rounds)
            medians = [statistics.median(values) for values in (*times, ratios)]
            print(
                f"| `{coefficients}` | {options.rows} × {columns} | {medians[0]:.1f} |"
                f" {medians[1]:.1f} | {medians[2]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
