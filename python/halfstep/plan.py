"""The memory that training takes under each recipe, before anything is allocated.

This file is longer than 500 lines because it draws its tables itself.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Iterable, Mapping, NamedTuple, Union

import torch

from ._library import abi
from ._placement.overlap import window
from ._placement.streams import BUFFER_BYTES, BUFFERS
from ._settings import naming
from ._settings.assignment import ADAMW_NAMES, is_listed, is_matrix, patterns_of
from ._settings.options import Store, StoreLike, bytes_of
from ._states import layout
from ._step.release import check_release
from ._tensors import devices
from ._tensors.matrices import fields_of, has_products, lay, taken
from ._tensors.parameters import PLAIN, beside, could_be_packed, is_packed_format, stored_dtype
from ._tensors.sharding import is_packed, stored
from .rules import class_and_options

__all__ = ["Plan", "PlanRow", "plan"]

#: from the least memory to the reference
RECIPES = (
    "adamw/bf16-sr/int4",
    "adamw/bf16-sr/int8",
    "adamw/bf16-ecc8/int8",
    "adamw/bf16-kahan/bf16-sr",
    "adamw/f32/f32",
)
#: the parts of a bar: field of a row, its sign in a terminal, its colour elsewhere; they differ
#: without colours, too
_PARTS = (
    ("weights", "█", "#1f4e79"),
    ("extras", "▓", "#4a90c2"),
    ("gradients", "▒", "#c98a2b"),
    ("states", "░", "#7a9a5b"),
    ("frozen", "·", "#999999"),
)
_BAR = 48
#: bytes a second. _BUS: one way over a bus to and from pinned memory (PCI Express 5 with 16 lanes)
#: _HOST: memory in a step of 16 cores; _DEVICE: memory of a GPU (H100)
_BUS, _HOST, _DEVICE = 55e9, 170e9, 2.5e12
#: bytes, or text such as "24G"
_Size = Union[float, str]
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True)
class PlanRow:
    """One recipe. All numbers are bytes, except `seconds`."""

    recipe: str
    gradient_format: str
    weights: int
    #: Kahan residuals and error codes
    extras: int
    gradients: int
    #: including their scales
    states: int
    #: parameters that do not train, as they are
    frozen: int
    total: int
    #: True if `total` is within the memory that was asked about; None if none was
    fits: bool | None
    #: memory of the process that states are offloaded to: states, extras, copies of weights and
    #: gradients; they are not in `total`
    host: int = 0
    #: bytes that an offloaded step copies to the process and back
    copied: int = 0
    #: with device_memory=. way: how the recipe is trained; seconds: the time of a step after the
    #: backward pass; hidden: True if it is under the backward pass
    way: str = ""
    seconds: float | None = None
    hidden: bool = False
    #: with store=: bytes that the file takes of the disk, and that a step reads and writes
    disk: int = 0
    read: int = 0
    written: int = 0
    #: of `host`: the results of steps in advance (overlap=)
    ahead: int = 0
    #: memory for matrices during a step, which is not in `total`
    workspace: int = 0


class Plan:
    """The answer of `halfstep.plan`. `rows` are sorted, the smallest first. `str()` is a table of
    them."""

    def __init__(
        self,
        rows: list[PlanRow],
        parameters: int,
        release: bool,
        memory: int | None,
        offload: bool | str = False,
        placed: bool = False,
        notes: Iterable[str] = (),
    ) -> None:
        self.rows = rows
        #: lines that say what rules of matrices take the shapes for
        self.notes = notes
        #: True if rows say where states are (device_memory=)
        self.placed = placed
        self.offload = offload
        #: the number of parameters that train
        self.parameters = parameters
        self.release = release
        self.memory = memory

    def _cells(self):
        """Returns the titles of the columns, and the cells of each row."""

        def each(field):
            return lambda row: f"{getattr(row, field) / max(self.parameters, 1):.3f}"

        columns = {"recipe": lambda row: row.recipe}
        if self.placed:
            columns.update(
                {
                    "way": lambda row: row.way,
                    "on the GPU": lambda row: _size(row.total),
                    "in the process": lambda row: _size(row.host),
                    "a step": lambda row: f"{'<= ' if row.hidden else ''}{row.seconds:.2g} s",
                }
            )
        else:
            columns.update(weights=each("weights"), extra=each("extras"))
            gradients = each("gradients")
            columns["gradients"] = lambda row: f"{gradients(row)} {row.gradient_format}"
            columns["states"] = each("states")
            if any(row.frozen for row in self.rows):
                columns["frozen"] = each("frozen")
            columns["total"] = each("total")
            columns["in all"] = lambda row: _size(row.total)
            if self.offload:
                columns["host in all"] = lambda row: _size(row.host)
            if any(row.disk for row in self.rows):
                for field in ("disk", "read", "written"):
                    columns[field] = lambda row, field=field: _size(getattr(row, field))
        if self.memory is not None:
            columns["fits"] = lambda row: "yes" if row.fits else "no"
        return list(columns), [[cell(row) for cell in columns.values()] for row in self.rows]

    def _lines(self):
        code = "".join("\n" + line for line in self.notes)
        code += f"\nDevice code for GPUs: {abi.lib.halfstep_device_code().decode()}."
        if self.placed:
            fitting = sum(bool(row.fits) for row in self.rows)
            return (
                f"{self.parameters} parameters, {_size(self.memory)} on the GPU.",
                (
                    f"{fitting} of {len(self.rows)} fit. Activations come on top. A step is what"
                    " comes after the backward pass, or under it (<=); docs/guides/offload.md\n"
                    "has the formulas. Ways with gradient_release judge and clip tensors singly;"
                    f" the others lose nothing.{code}"
                ),
            )
        title = (
            f"{self.parameters}"
            f" parameters{', gradients released' if self.release else ''}"
            f"{', states offloaded' if self.offload else ''}."
            " Bytes per parameter:"
        )
        foot = "Weights are counted as stored in the recipe's format. Activations come on top."
        foot += "".join(
            "\n" + line for line in layout.precise_states(row.recipe for row in self.rows)
        )
        foot += "".join(f"\n{line}." for line in layout.caveats(row.recipe for row in self.rows))
        if self.offload and self.rows:
            copied = max(row.copied for row in self.rows)
            foot += (
                f"\nEach step copies up to {_size(copied)} to and fro: {copied / 2 / _BUS:.2g} s"
                f" each way at {_BUS / 1e9:.0f} GB/s, the first under the backward pass."
            )
            ahead = max(row.ahead for row in self.rows)
            if ahead:
                foot += f"\nResults of steps in advance are up to {_size(ahead)} of the host's."
        if any(row.disk for row in self.rows):
            foot += (
                "\nExtras and states are in a file: its bytes of the disk, and what each step reads"
                " and writes.\nStates in memory are the pieces that are on their way."
            )
        if self.memory is not None:
            fitting = sum(bool(row.fits) for row in self.rows)
            text = f"{fitting} of {len(self.rows)} recipes fit into {_size(self.memory)}."
            if not fitting and self.rows:
                text += f" The smallest lacks {_size(self.rows[0].total - self.memory)}"
                text += "." if self.release else "; release=True may help."
            foot = f"{text}\n{foot}"
        return title, foot + code

    def __str__(self):
        (title, foot), (head, body) = self._lines(), self._cells()
        wide = [max(len(cell) for cell in column) for column in zip(head, *body)]
        left = 2 if self.placed else 1
        table = [
            "  ".join(
                cell.ljust(n) if i < left else cell.rjust(n)
                for i, (cell, n) in enumerate(zip(line, wide))
            ).rstrip()
            for line in (head, *body)
        ]
        return "\n".join([title, "", *table, "", *self._bars(), "", foot])

    def _scale(self):
        """Returns the bytes that the longest bar stands for."""
        return max([row.total for row in self.rows] + [self.memory or 0, 1])

    def _label(self, row):
        return (
            row.way
            if self.placed and all(other.recipe == row.recipe for other in self.rows)
            else row.recipe
        )

    def _present(self):
        return [part for part in _PARTS if any(getattr(row, part[0]) for row in self.rows)]

    def _bars(self):
        """Returns a line for each recipe, as long as its memory. A | marks the memory that was
        asked about."""
        scale, wide = self._scale(), max((len(self._label(row)) for row in self.rows), default=0)
        limit = None if self.memory is None else round(self.memory / scale * _BAR)
        lines = []
        for row in self.rows:
            bar, total = "", 0
            for field, sign, _ in _PARTS:
                total += getattr(row, field)
                bar += sign * (round(total / scale * _BAR) - len(bar))
            if limit is not None:
                bar = bar.ljust(limit)
                bar = bar[:limit] + "|" + bar[limit:]
            lines.append(f"{self._label(row).ljust(wide)}  {bar}".rstrip())
        signs = "   ".join(f"{sign} {field}" for field, sign, _ in self._present())
        if lines:
            legend = "" if limit is None else f"   | {_size(self.memory)}"
            lines.append(" " * wide + "  " + signs + legend)
        return lines

    __repr__ = __str__

    def _repr_html_(self):
        (title, foot), (head, body) = self._lines(), self._cells()

        def line(tag, cells):
            return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        return "".join(
            [
                f"<p>{escape(title)}</p><table><thead>",
                line("th", head),
                "</thead><tbody>",
                *(line("td", cells) for cells in body),
                "</tbody></table>",
                self._svg(),
                f"<p>{escape(foot)}</p>",
            ]
        )

    def _svg(self):
        """Returns the bars as a picture that needs no script or style of its page."""
        scale, left, right, high = self._scale(), 210, 420, 22
        out, y = [], 4
        for row in self.rows:
            out.append(
                f'<text x="{left - 8}" y="{y + 13}"'
                f' text-anchor="end">{escape(self._label(row))}</text>'
            )
            x = 0.0
            for field, _, colour in _PARTS:
                size = getattr(row, field) / scale * right
                if size:
                    out.append(
                        f'<rect x="{left + x:.1f}" y="{y}" width="{size:.1f}" height="{high - 6}"'
                        f' fill="{colour}"><title>{field}'
                        f" {_size(getattr(row, field))}</title></rect>"
                    )
                x += size
            out.append(f'<text x="{left + right + 8}" y="{y + 13}">{_size(row.total)}</text>')
            y += high
        if self.memory is not None:
            x = left + self.memory / scale * right
            out.append(
                f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{y}" stroke="#c00000"'
                f' stroke-width="2"/><text x="{x:.1f}" y="{y + 12}" text-anchor="middle"'
                f' fill="#c00000">{_size(self.memory)}</text>'
            )
            y += 16
        x = left
        for field, _, colour in self._present():
            out.append(
                f'<rect x="{x}" y="{y + 4}" width="10" height="10" fill="{colour}"/><text'
                f' x="{x + 14}" y="{y + 13}">{field}</text>'
            )
            x += 26 + 7 * len(field)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right + 100}"'
            f' height="{y + 20}" font-family="sans-serif" font-size="12" role="img"'
            f' aria-label="memory by recipe">{"".join(out)}</svg>'
        )


def _size(n):
    unit = 0
    while n >= 1024 and unit < len(_UNITS) - 1:
        n, unit = n / 1024, unit + 1
    return f"{n:.2f} {_UNITS[unit]}"


def _shape(name, given):
    shape = getattr(given, "shape", given)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(map(abi.is_count, shape)):
        raise ValueError(
            f"invalid shape {shape} of {name!r}: sizes are whole numbers of at least 0"
        )
    return shape


class _Counted(NamedTuple):
    """What counts of a tensor that trains: two that are equal take the same bytes.

    own         its format, if it is of 8 bits already
    gradient    the format of its gradient, or None for that of the recipe
    quantized   True if a recipe with 8-bit weights means it
    rest        True if AdamW steps it beside Muon
    """

    shape: tuple
    own: str | None = None
    gradient: str | None = None
    quantized: bool = True
    rest: bool = False

    def recipe(self, recipe, adamw=False):
        """Returns the recipe that this tensor has in an optimizer of `recipe`. `adamw` is that of
        plan()."""
        rule, weights, states = recipe.split("/")
        if adamw and self.rest and rule == "muon":
            rule = "adamw"
        if self.own is not None:
            weights = self.own
        elif not self.quantized or not could_be_packed(self.shape, weights):
            weights = beside(weights)
        return "/".join((rule, weights, states))


def _tensors(model_or_shapes):
    """Returns the name of each tensor that trains with what counts of it, and the bytes of the
    others."""
    if not isinstance(model_or_shapes, torch.nn.Module):
        if hasattr(model_or_shapes, "items"):
            model_or_shapes = model_or_shapes.items()
        found = [(name, _Counted(_shape(name, given))) for name, given in model_or_shapes]
        return _with_rest(found, ADAMW_NAMES), 0
    found, frozen, params = [], 0, dict(model_or_shapes.named_parameters())
    linear = {
        id(module.weight)
        for module in model_or_shapes.modules()
        if isinstance(module, torch.nn.Linear)
    }
    if any(map(is_packed, params.values())):
        linear = set()  # what is to be quantized is quantized already
    for name, p in params.items():
        if not p.requires_grad:
            frozen += stored(p).numel() * stored(p).element_size()
        elif is_packed(p):
            found.append((name, _Counted(_shape(name, p), p.format, PLAIN[p.dtype])))
        else:
            found.append((name, _Counted(_shape(name, p), quantized=id(p) in linear)))
    return _with_rest(found, patterns_of(model_or_shapes)), frozen


def _with_rest(tensors, patterns):
    """Returns (name, _Counted) pairs that know what AdamW steps beside Muon."""
    return [
        (name, one._replace(rest=not is_matrix(one) or is_listed(str(name), patterns)))
        for name, one in tensors
    ]


def _by_rule(tensors, adamw):
    """Returns lines that say what Muon steps, and AdamW with `adamw`. Matrices come first, because
    only they can be where nobody expects them."""

    def told(some):
        some = sorted(some, key=lambda pair: not is_matrix(pair[1]))
        size = sum(math.prod(one.shape) for _, one in some)
        names = naming.some([str(name) for name, _ in some], 8)
        return f"{len(some)} tensors of {size} elements" + (f": {names}" if some else "")

    rest = [pair for pair in tensors if pair[1].rest]
    if adamw:
        own = [pair for pair in tensors if not pair[1].rest]
        return [f"muon steps {told(own)}.", f"adamw steps {told(rest)}."]
    listed = [pair for pair in rest if is_matrix(pair[1])]
    if not listed:
        return []
    return [f"muon steps embeddings and heads too. With adamw=True AdamW does: {told(listed)}."]


def _left(recipe, tensors):
    """Returns a line that says which tensors are not of 8 bits although a recipe or others are."""
    weights = recipe.split("/")[1]
    asked = [one.own for _, one in tensors if one.own] or [weights]
    if not is_packed_format(asked[0]):
        return ""
    found = {}
    for name, one in tensors:
        fmt = one.recipe(recipe).split("/")[1]
        if not is_packed_format(fmt):
            found.setdefault(fmt, []).append((str(name), math.prod(one.shape)))
    return "\n".join(
        f"Beside {asked[0]} {len(some)} tensors of {sum(size for _, size in some)} elements are"
        f" {fmt}: {naming.some([name for name, _ in some], 8)}."
        for fmt, some in found.items()
    )


def _is_foreign(model):
    """Returns True if parameters of a model are on a device that the library has no kernels
    for."""
    params = model.parameters() if isinstance(model, torch.nn.Module) else ()
    places = {devices.of(stored(p)) for p in params if p.requires_grad}
    return any(devices.has_streams(x) and not devices.has_kernels(x) for x in places)


def plan(
    model_or_shapes: torch.nn.Module | Mapping[Any, Any] | Iterable[tuple[Any, Any]],
    recipes: str | Iterable[str] | None = None,
    release: bool = False,
    memory: _Size | None = None,
    offload: bool | str = False,
    *,
    device_memory: _Size | None = None,
    bus: float = _BUS,
    host: float = _HOST,
    device: float = _DEVICE,
    store: bool | StoreLike = False,
    overlap: bool | _Size = False,
    adamw: bool = False,
    kernels: bool | None = None,
) -> Plan:
    """Returns a table of the memory that weights, gradients and optimizer states take under each
    of some recipes.

    It assumes that all parameters that train are stored in the recipe's weight format
    (`model.to(torch.bfloat16)` for the bf16 ones), and gradients in the same width. Weights of
    halfstep.nn.quantize_() count as they are. Without any, a recipe with 8-bit weights means those
    of nn.Linear, or of shapes alone all with rows of a block or more. The last lines name the
    others. Parameters with requires_grad=False are counted as they are. Nothing is allocated, so
    the model may be on the meta device. Options that change which states exist have their defaults:
    SGD is without momentum, matrices are not cut by heads= or split=. The workspace of Muon,
    Adafactor and CAME is not in the total; it fits their largest matrix. halfstep.fit() adds what a
    step of the model takes: activations, temporaries, and gradients by when they die.

    model_or_shapes: a module, a dict of shapes by name, or (name, shape) pairs; a tensor may stand
        for its shape.
    recipes: names such as "adamw/bf16-sr/int8" (one or several); by default those of the README's
        table.
    release: gradients are released, so that only the largest one exists.
    memory: bytes (or "24G") that each recipe's total is compared with.
    offload: states are in CPU memory (CPUOffload with minimal_size=0). The total, which is compared
        with `memory`, is then that of the GPU. "gradients": gradients leave the GPU as they come,
        too (offload_gradients=True).
    overlap: that of CPUOffload, with offload=: True, or the bytes (or "8G") that results of steps
        in advance take at most.
    device_memory: bytes (or "24G") of a GPU. For each recipe finds the quickest way that fits, and
        the time that it takes. Ways are states on the GPU, `StateStreaming` and `CPUOffload`, with
        gradients kept, or released if that does not fit. For a single recipe lists all ways.
    store: True, or what the option of that name takes: states are in a file, which need not exist.
        Rows say what it takes of the disk, and what each step reads and writes. Weights are in the
        file unless halfstep.Store(path, weights=False) says otherwise.
    adamw: True: AdamW steps embeddings, heads and whatever is no matrix beside Muon, as with the
        option adamw= of halfstep.Muon. The last lines name what each of them steps.
    kernels: False: the GPU is one that the library has no kernels for (AMD, Intel, Apple, NVIDIA
        below compute capability 8.0). The processor then steps all parameters, Muon's matrices too,
        as with offload=True. None: as the parameters of the model lie.
    bus, host, device: bytes a second for these times: one way over the bus, of CPU memory, and of
        the GPU's memory. Defaults: 55e9, 170e9 and 2.5e12.
    """
    if device_memory is not None and (offload or release or store or memory is not None):
        raise ValueError(
            "device_memory= compares all ways by itself: give it without offload=, release=, store="
            " and memory="
        )
    abi.check_flags(release=release)
    store = Store.of({True: "run.states", False: None}[store] if type(store) is bool else store)
    for name, speed in (("bus", bus), ("host", host), ("device", device)):
        if not abi.is_real(speed) or not speed > 0:
            raise ValueError(
                f"{name}={speed!r} is not a number of bytes a second; give a number above 0"
            )
    if offload not in (False, True, "gradients"):
        raise ValueError(f"unknown offload={offload!r}; known: False, True, 'gradients'")
    overlap = window(overlap)
    if kernels is None:
        kernels = not _is_foreign(model_or_shapes)
    abi.check_flags(kernels=kernels)
    if not kernels and device_memory is None:
        offload = offload or True
    if store and overlap:
        raise ValueError(
            f"store= and overlap={overlap!r} exclude each other: steps in advance need states in"
            " memory"
        )
    if overlap and (not offload or release):
        raise ValueError(
            f"overlap={overlap!r} is for CPUOffload without gradient release: give it with offload="
            " and without release="
        )
    if isinstance(model_or_shapes, str):
        raise TypeError(
            "halfstep.plan(model_or_shapes, recipes) takes a model or shapes first;"
            f" {model_or_shapes!r} is a string, as recipes are"
        )
    if isinstance(recipes, torch.nn.Module) or isinstance(recipes, dict):
        raise TypeError(
            "halfstep.plan(model_or_shapes, recipes): the recipes are a model or shapes, which come"
            " first"
        )
    tensors, frozen = _tensors(model_or_shapes)
    counts = Counter(one for _, one in tensors)
    limit = memory if device_memory is None else device_memory
    limit = None if limit is None else bytes_of(limit)
    rows, notes = [], {}
    for recipe in (
        [recipes] if isinstance(recipes, str) else RECIPES if recipes is None else recipes
    ):
        class_and_options(recipe)  # refuses ema, which trains nothing
        recipe = abi.recipe_full(recipe)
        rule = abi.rules[recipe.split("/")[0]]
        streamed = kernels and has_products(rule)  # what CPUOffload does with its matrices
        if not kernels and has_products(rule):
            notes[
                f"The times leave out the products of {rule.name}, which the processor makes."
            ] = True
        if release:
            check_release(rule, rule.label)
        gradient = PLAIN[stored_dtype(beside(recipe.split("/")[1]))]
        meant = {one: one.recipe(recipe, adamw) for one in counts}
        laid = {one: lay(of.partition("/")[0], one.shape) for one, of in meant.items()}
        if rule.name == "muon":
            notes.update(dict.fromkeys(_by_rule(tensors, adamw), True))
        own = [x for one, x in laid.items() if meant[one].startswith(f"{rule.name}/")]
        if text := taken(rule.name, own):
            notes[f"{rule.name} takes {text}."] = True
        if text := _left(recipe, tensors):
            notes[text] = True
        sums = abi.forecast(
            *(
                (meant[one], {**fields_of(x), "gradient": (one.gradient or gradient).encode()}, n)
                for (one, n), x in zip(counts.items(), laid.values())
            ),
            without_weights=store is not None and not store.weights,
        )
        one = PlanRow(
            recipe,
            gradient,
            sums.weights,
            sums.weight_extras,
            sums.gradients,
            sums.states,
            frozen,
            total=0,
            fits=None,
            workspace=sums.workspace,
        )
        found = _ways(one, sums, limit, bus, host, device, not rule.totals)
        if device_memory is not None:
            if streamed or not kernels:  # streamed is as with StateStreaming
                found = [x for x in found if x.way.startswith("CPUOffload") == (not kernels)]
            rows += found if isinstance(recipes, str) else [min(found, key=_preference)]
            continue
        way = "GPU"
        if offload:
            way = "StateStreaming" if streamed and not store else "CPUOffload"
        if release:
            way += ", gradient_release"
        elif offload == "gradients" and not streamed:
            way += ", offload_gradients"
        row = next(row for row in found if row.way == way)
        row = replace(row, way="", seconds=None, hidden=False)
        if store:
            pieces = {"host": sums.memory + row.copied} if offload else {"states": sums.memory}
            disk = {"disk": 2 * sums.stored, "read": sums.read, "written": sums.written}
            row = _sized(row, limit, **{"extras": 0, "states": 0, **pieces, **disk})
        elif overlap and not streamed and not rule.two_pass:
            ahead = sums.weights + sums.weight_extras + sums.states
            ahead = ahead if overlap is True else min(ahead, overlap)
            row = replace(row, ahead=ahead, host=row.host + ahead)
        rows.append(row)
    if device_memory is None or not isinstance(recipes, str):
        rows.sort(key=lambda row: (row.total, row.host, row.recipe))
    return Plan(
        rows,
        sum(math.prod(one.shape) for _, one in tensors),
        bool(release),
        limit,
        bool(offload),
        device_memory is not None,
        list(notes),
    )


def _sized(row, limit, **fields):
    """Returns a row with some other fields, and what they make in all."""
    row = replace(row, **fields)
    total = row.weights + row.extras + row.gradients + row.states + row.frozen
    return replace(row, total=total, fits=None if limit is None else total <= limit)


def _preference(row):
    """Returns a key that sorts ways. The quickest that fits comes first, before those that lose
    something; then the smallest."""
    return (False, row.hidden, row.seconds) if row.fits else (True, row.total, row.seconds)


def _ways(row, sums, limit, bus, host, device, released):
    """Returns the ways to train one recipe, which docs/guides/offload.md describes. `sums`: the
    forecast of its tensors; `released`: the rule can step one tensor at a time."""
    kept = row.extras + row.states
    buffers = min(BUFFERS * max(BUFFER_BYTES, sums.largest_states), kept)
    touched = 2 * row.weights + row.gradients + 2 * kept
    there, streamed = touched / device, max(kept / bus, touched / device)
    out = []

    def add(way, gradients, extras, states, host, seconds, copied):
        sizes = {"gradients": gradients, "extras": extras, "states": states, "host": host}
        told = {"way": way, "seconds": seconds, "hidden": "release" in way, "copied": copied}
        out.append(_sized(row, limit, **sizes, **told))

    copies = row.weights + row.gradients
    for release in (False, True)[: 1 + released]:
        gradients = sums.largest_gradient if release else row.gradients
        option = ", gradient_release" if release else ""
        add("GPU" + option, gradients, row.extras, row.states, 0, there, 0)
        add("StateStreaming" + option, gradients, 0, buffers, kept, streamed, 2 * kept)
        offloaded = touched / host + row.weights / bus
        if release:
            offloaded = max(touched / host, copies / bus)
        add("CPUOffload" + option, gradients, 0, 0, kept + copies, offloaded, copies)
        if not release:
            way = "CPUOffload, offload_gradients"
            add(way, sums.largest_gradient, 0, 0, kept + copies, offloaded, copies)
    return out
