"""Makes the page of recipes: every rule with its equations, hyper-parameters, states and bytes, and
every storage format. All numbers come from the library that HALFSTEP_LIBRARY names."""

from __future__ import annotations

import math
import re

import equations
from tensors import Probe, Tensor, abi

PAGE = "reference/recipes.md"
#: a matrix, and a tensor that is none, by which bytes are counted
MATRIX = {"ndim": 2, "rows": 4096, "row_length": 4096}
VECTOR = {"ndim": 1, "rows": 1, "row_length": 1 << 20}
#: the weight and state formats of the table of each rule
COMBINATIONS = (
    ("f32", "f32"),
    ("bf16-kahan", "bf16-sr"),
    ("bf16-ecc8", "int8"),
    ("bf16-sr", "int8"),
    ("bf16-sr", "int4"),
)
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

INTRODUCTION = """\
# Recipes: rules and formats

This page is for researchers and engineers who ask what a recipe such as `adamw/bf16-sr/int8`
computes and stores. It has the equations, hyper-parameters, states and bytes of every rule, and
the range of every format. The library makes all numbers here, in version {version}. [Choose a
recipe](../choosing.md) says which one to take.

## How to read the equations

A rule turns weight $w$ and gradient $g$ into a change $\\Delta$. The weight's format stores $w -
\\Delta$ ([how](../numerics.md#what-the-weight-formats-do-with-the-change-d)).

* An arrow replaces a state. An equals sign names a number of this step. Lines are computed from
  the top down.
* $t$ counts the tensor's steps from 1. States are 0 at first, copies of weights excepted.
* $g$ is the gradient after its scale, clipping and centralization
  ([order](../numerics.md#2-a-step)).
* A quotient with denominator 0 is 0. Formats of blocks also
  [bound](../numerics.md#6-bounds-on-m-with-block-formats) $m$.
* rowmean and colmean are the means of each row and each column. rms is the root mean square of
  all elements.

Every step is in fp32. The tests run these equations in double precision beside the library
([test_equations.py](../../tests/python/rules/test_equations.py)).

$\\mathrm{{lr}}$ is the learning rate of the step, after the schedule. $\\mathrm{{decay}}$ follows
from the decay mode:

{modes}

`cautious` is `decoupled` where the update and the weight have one sign
([cautious groups](../numerics.md#cautious-groups)).

## Hyper-parameters of every rule

A rule's own hyper-parameters are in its section, with its default of `lr`, `weight_decay` and the
decay mode.

{hypers}

Choices have words for values, the default first:

{choices}

## Bytes of states

The table has the bytes a parameter that states take in large matrices, beside `bf16-sr` weights,
with default options.

The sections have the bytes of weights and gradients too. *Released* is their sum under
[gradient release](../guides/release-and-accumulation.md#gradient-release), which keeps the gradient
of one tensor at a time. That one is not counted.

{bytes}
"""

FORMATS = """\
## Formats

The bytes of a format include its scales and error codes. [Formats byte by byte](../formats.md)
has the layouts, and [Choose a recipe](../choosing.md#states) says how they differ in training.

### Formats of weights

*Largest* and *smallest* are the extreme positive numbers that it can store.

{weights}

### Formats of states

*Smallest beside 1* is the smallest number that a format can store in a block whose largest number
is 1. A format without blocks has no such limit. The range of `fp8-lamb16` follows from the norm
of the whole tensor.

{states}
"""


def table(columns, rows, right=()):
    """Returns a table in Markdown. Columns whose number is in `right` are aligned to the right."""
    marks = ["---:" if i in right else "---" for i in range(len(columns))]
    lines = [columns, marks, *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def size(number):
    """Returns bytes a parameter as `halfstep.plan` rounds them."""
    return f"{number:.3f}".rstrip("0").rstrip(".")


def code(text):
    return f"`{text}`"


def plain(value):
    """Returns a number as a person writes it: 0.001, 1e-8, 3.4e38."""
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{value:.6g}"
    if 0 < value < 1e-4 and math.log2(value).is_integer():
        return "2" + str(int(math.log2(value))).translate(RAISED)
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def states_of(abi, rule):
    return [abi.SLOT_STATE + i for i in range(len(rule.states))]


def gradient_beside(abi, weights):
    """Returns the format of gradients that torch keeps beside weights of a format."""
    stored = abi.formats[weights]
    if stored.geometry == abi.GEOMETRY_PACKED:
        return "bf16"
    return {"F32": "f32", "BF16": "bf16", "F16": "f16"}[stored.code_dtype]


def recipe_of(rule, weights, states):
    return f"{rule.name}/{weights}/{states}" if rule.states else f"{rule.name}/{weights}"


def tensor_of(abi, rule, weights, states, fields=MATRIX, options=None):
    gradient = gradient_beside(abi, weights)
    return Tensor(abi, recipe_of(rule, weights, states), fields, options, gradient)


# ---- Hyper-parameters ----------------------------------------------------------------------------


def common(abi):
    """Returns the names of the hyper-parameters that every rule has, in order."""
    first, *rest = abi.rules.values()
    return [name for name in first.hypers if all(name in rule.hypers for rule in rest)]


def range_of(hyper):
    if hyper.words:
        return ", ".join(map(code, hyper.words))
    if hyper.switch:
        return "0 or 1"
    end = "to below" if hyper.exclusive_maximum else "to"
    return f"{plain(hyper.minimum)} {end} {plain(hyper.maximum)}"


def initial_of(hyper):
    return code(hyper.words[int(hyper.initial)]) if hyper.words else plain(hyper.initial)


def hyper_rows(hypers):
    return [(code(one.name), initial_of(one), range_of(one), one.title) for one in hypers]


def hyper_table(hypers):
    return table(("name", "default", "range", "meaning"), hyper_rows(hypers), (1,))


def choices_table(abi):
    names = ("decay", "schedule", "scan", "generator", "clip", "missing")
    return table(
        ("choice", "values"), [(code(n), ", ".join(map(code, abi.choices(n)))) for n in names]
    )


def modes_table():
    return table(
        ("mode", "before the rule"),
        [(code(mode), equations.inline(text)) for mode, text in equations.MODES.items()],
    )


# ---- Rules ---------------------------------------------------------------------------------------


def needed_for(abi, rule, number):
    """Returns when a state is stored that default options of a matrix do not need, and the options
    that need it."""
    for hyper in rule.hypers.values():
        if hyper.name in common(abi) or hyper.initial != 0 or hyper.minimum != 0:
            continue
        value = min(hyper.maximum, 1.0) / (1 + hyper.exclusive_maximum)
        options = {hyper.name: value}
        if tensor_of(abi, rule, "f32", "f32", MATRIX, options).format(number):
            return f"with {code(hyper.name)}", options
    if tensor_of(abi, rule, "f32", "f32", VECTOR).format(number):
        return "for tensors that are no matrices", {}
    raise ValueError(f"{rule.name}: nothing stores {rule.states[number - abi.SLOT_STATE].name}")


HELD = {1: "a weight", 2: "a gradient", 4: "either sign", 8: "never negative"}


def states_table(abi, rule, symbols):
    """Returns a table of a rule's states, and the options that need further ones."""
    names = {name: symbol for symbol, name in symbols.items()}
    rows, options = [], {}
    for number, state in zip(states_of(abi, rule), rule.states):
        held = HELD[state.role] + ("", ", a row", ", a column")[state.extent]
        formats, when, own, fields = [], "always", {}, MATRIX
        if not tensor_of(abi, rule, "f32", "f32").format(number):
            when, own = needed_for(abi, rule, number)
            options.update(own)
            fields = MATRIX if own else VECTOR
        for weights in ("f32", "bf16-sr"):
            recipe = abi.recipe_full(f"{rule.name}/{weights}")
            gradient = gradient_beside(abi, weights)
            formats.append(code(Tensor(abi, recipe, fields, own, gradient).format(number)))
        symbol = f"${equations.name_of(names[state.name])}$"
        rows.append((symbol, code(state.name), held, when, *formats))
    columns = ("", "state", "numbers", "stored", "beside `f32`", "beside `bf16-sr`")
    return table(columns, rows), options


def bytes_table(abi, rule, options):
    """Returns the bytes a parameter of a rule's recipes; with `options`, another column."""
    columns = ["weights / states", "weights", "gradients", "states", "all", "all, released"]
    if options:
        columns.append("all, with " + " and ".join(map(code, options)))
    rows = []
    for weights, states in COMBINATIONS:
        if not rule.states and (weights, states) != next(
            pair for pair in COMBINATIONS if pair[0] == weights
        ):
            continue
        one = tensor_of(abi, rule, weights, states)
        parts = [one.bytes(0), one.bytes(1), one.bytes(*states_of(abi, rule))]
        released = parts[0] + parts[2]
        row = [code(recipe_of(rule, weights, states).split("/", 1)[1].replace("/", " / "))]
        row += [size(part) for part in (*parts, sum(parts))]
        row.append("–" if rule.totals or rule.raw_gradient else size(released))
        if options:
            more = tensor_of(abi, rule, weights, states, MATRIX, options)
            row.append(size(more.bytes(0, 1, *states_of(abi, rule))))
        rows.append(row)
    return table(columns, rows, range(1, len(columns)))


def properties(rule):
    """Returns what a rule can and cannot, as sentences."""
    if rule.matrix:
        yield "It steps tensors of two or more dimensions as matrices."
    if rule.totals:
        yield "It needs sums over all tensors first, so it has no gradient release."
    elif rule.two_pass:
        yield "It needs sums over the tensor first, so it goes over it twice."
    yes = [word for word, has in (("cautious", rule.cautious), ("micro", rule.accumulates)) if has]
    names = {"cautious": "`cautious` groups", "micro": "micro-steps"}
    if yes:
        yield f"It takes {' and '.join(names[word] for word in yes)}."
    if rule.raw_gradient:
        yield "The column of gradients counts the live weight."
    if rule.average:
        yield "It has an average to evaluate: `halfstep_read_average()`."


def exceptions(abi, rule):
    """Returns paragraphs: when states have other formats than the recipe says, and what recipes are
    known to cost."""
    precise = {}
    for state in rule.states:
        if state.precise_if:
            precise.setdefault((state.precise_if, state.precise_format), []).append(state.name)
    for (option, name), states in precise.items():
        listed = " and ".join(map(code, states))
        yield f"With `{option}`, {listed} are `{name}` where the recipe has blocks."
    recipes = [f"{rule.name}/bf16-sr/{fmt.name}" for fmt in state_formats(abi)]
    caveats = [(recipe, abi.recipe_caveat(recipe)) for recipe in recipes]
    yield "\n".join(f"* `{recipe}`: {caveat}." for recipe, caveat in caveats if caveat)


def linked(source):
    return re.sub(r"arXiv:([\d.]+\d)", r"[arXiv:\1](https://arxiv.org/abs/\1)", source)


def rule_section(abi, root, rule, header):
    read = equations.read(root, header)
    common_names = common(abi)
    own = [h for h in rule.hypers.values() if h.name not in common_names]
    defaults = [rule.hypers[name] for name in ("lr", "weight_decay")]
    parts = [
        f"## {rule.name}",
        f"{rule.title[0].upper()}{rule.title[1:]}. Use it {read.use}",
        f"In Python `halfstep.{rule.label}`. Source: {linked(read.source)}."
        f" Code: [{header}.h](../../src/rules/{header}.h).",
        equations.markdown(read),
    ]
    if "coefficients" in read.text:
        parts.append(COEFFICIENTS)
    scalars = [n for n in read.symbols.items() if n[1] in rule.scalars]
    if scalars:
        told = ", ".join(f"${equations.name_of(s)}$ is {code(name)}" for s, name in scalars)
        parts.append(f"Numbers that are kept for a tensor: {told}.")
    parts.append(
        table(
            ("name", "default", "range", "meaning"),
            [
                *hyper_rows(defaults),
                ("`decay`", code(rule.decay), "a decay mode", "where the decay enters"),
                *hyper_rows(own),
            ],
            (1,),
        )
    )
    parts.append(" ".join(properties(rule)))
    options = {}
    if rule.states:
        states, options = states_table(abi, rule, read.symbols)
        parts.append(states)
        parts += exceptions(abi, rule)
    parts.append("Bytes a parameter of a large matrix:")
    parts.append(bytes_table(abi, rule, options))
    return "\n\n".join(part for part in parts if part)


COEFFICIENTS = """\
The triple is `ns_a`, `ns_b`, `ns_c` in all `ns_steps` iterations, or that of a published list in
[coefficients.h](../../src/rules/coefficients.h)."""


# ---- Formats -------------------------------------------------------------------------------------


def state_formats(abi):
    """Returns the formats that states of both kinds may have."""
    both = abi.ROLE_SIGNED | abi.ROLE_NONNEG
    return [f for f in abi.formats.values() if f.roles & both == both]


def all_bytes(abi):
    formats = state_formats(abi)
    rows = []
    for rule in abi.rules.values():
        row = [f"[{rule.name}](#{rule.name})"]
        for fmt in formats:
            one = tensor_of(abi, rule, "bf16-sr", fmt.name)
            row.append(size(one.bytes(*states_of(abi, rule))) if rule.states else "–")
        rows.append(row)
    columns = ["rule", *(code(f.name) for f in formats)]
    return table(columns, rows, range(1, len(columns)))


def block_of(abi, fmt):
    if fmt.block == 0:
        return "–"
    if fmt.geometry == abi.GEOMETRY_TENSOR:
        return "the tensor"
    return f"{fmt.block}" + (" of the flat tensor" if fmt.geometry == 1 else " of a row")


def width_of(abi, fmt, slot, recipe):
    one = Tensor(abi, recipe, MATRIX)
    return size(one.bytes(slot))


def weight_formats_table(abi):
    rows = []
    for fmt in abi.formats.values():
        if not fmt.roles & abi.ROLE_WEIGHT:
            continue
        recipe = f"ema/{fmt.name}"
        probe = Probe(abi, recipe, abi.SLOT_WEIGHT)
        also = [
            name
            for name, role in (("gradients", abi.ROLE_GRADIENT), ("states", abi.ROLE_SIGNED))
            if fmt.roles & role
        ]
        rows.append(
            (
                code(fmt.name),
                fmt.title,
                width_of(abi, fmt, abi.SLOT_WEIGHT, recipe),
                block_of(abi, fmt),
                plain(probe.largest()),
                plain(probe.smallest()),
                " and ".join(also) or "–",
            )
        )
    columns = ("format", "", "bytes", "block", "largest", "smallest", "also for")
    return table(columns, rows, (2, 4, 5))


def state_formats_table(abi):
    """Returns the table of the formats of states: ranges of first and second moments."""
    rows = []
    for fmt in state_formats(abi):
        recipe = f"adamw/f32/{fmt.name}"
        row = [code(fmt.name), fmt.title, width_of(abi, fmt, abi.SLOT_STATE, recipe)]
        row.append(block_of(abi, fmt))
        probes = [Probe(abi, recipe, abi.SLOT_STATE + i) for i in (0, 1)]
        if fmt.geometry == abi.GEOMETRY_TENSOR:
            row += "–––"
        else:
            row += [plain(one.smallest(1.0)) if fmt.block else "–" for one in probes]
            row.append(plain(min(one.largest() for one in probes)))
        rows.append(row)
    columns = ["format", "", "bytes", "block"]
    columns += ["smallest beside 1, first moment", "second moment", "largest"]
    return table(columns, rows, (2, 4, 5, 6))


def pages(root):
    """Returns the page of recipes by its path."""
    library = abi(root)
    first = next(iter(library.rules.values()))
    hypers = [first.hypers[n] for n in common(library) if n not in ("lr", "weight_decay")]
    headers = equations.rule_headers(root)
    parts = [
        INTRODUCTION.format(
            version=library.version(),
            modes=modes_table(),
            hypers=hyper_table(hypers),
            choices=choices_table(library),
            bytes=all_bytes(library),
        )
    ]
    parts += [rule_section(library, root, r, headers[r.name]) for r in library.rules.values()]
    parts.append(
        FORMATS.format(weights=weight_formats_table(library), states=state_formats_table(library))
    )
    return {PAGE: "\n\n".join(part.strip() for part in parts) + "\n"}
