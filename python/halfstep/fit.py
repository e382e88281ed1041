"""Whether a model trains on a device: the peak of memory of a whole step, by recipe and by where
states are."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Callable, List, Optional, Sequence, Union

import torch

from . import nn
from ._forecast import page
from ._forecast.trace import CUDA_BLOCK, KINDS, prepared, trace
from ._library import abi
from ._settings.options import bytes_of
from ._states import layout
from ._tensors.parameters import beside, is_packed_format, stored_dtype
from ._tensors.sharding import is_packed
from .plan import plan
from .rules import class_and_options

__all__ = ["Fit", "FitRow", "fit"]

#: from the one to take first; AdamW steps what is no matrix beside Muon
RECIPES = (
    "adamw/bf16-sr/int8",
    "adamw/int8-ecc4/int8",
    "adamw/bf16-ecc8/int8",
    "adamw/bf16-sr/int4",
    "adamw/int8-ecc4/int4",
    "muon/bf16-sr/int8",
)
#: bytes of a GPU that torch does not count: the library's device code, and torch's context
#: (docs/results.md, "CUDA", on an H100; pytorch/pytorch issue 109888)
DEVICE_CODE, CONTEXT = 556 << 20, 400 << 20
_GRADIENTS = KINDS.index("gradients")
_SINGLY = "tensors are judged and clipped one by one"
_BUS = "each step copies over the bus"
#: the ways of plan(), from the one to take first: their name here, what they give up, the class
#: that makes the optimizer, and its options
_WAYS = {
    "GPU": ("in place", "", "", ""),
    "GPU, gradient_release": ("release", _SINGLY, "", "gradient_release=True"),
    "StateStreaming": ("StateStreaming", _BUS, "StateStreaming", ""),
    "CPUOffload": ("CPUOffload", _BUS, "CPUOffload", ""),
    "CPUOffload, offload_gradients": (
        "CPUOffload, gradients", _BUS, "CPUOffload", "offload_gradients=True",
    ),
    "StateStreaming, gradient_release": (
        "StateStreaming, release", f"{_BUS}; {_SINGLY}", "StateStreaming", "gradient_release=True",
    ),
    "CPUOffload, gradient_release": (
        "CPUOffload, release", f"{_BUS}; {_SINGLY}", "CPUOffload", "gradient_release=True",
    ),
    "CPUOffload, store": (
        "CPUOffload, store", f"{_BUS} and to a disk", "CPUOffload", 'store="run.states"',
    ),
    "store": ("store", "each step reads and writes a disk", "", 'store="run.states"'),
}  # fmt: skip
_ORDER = [label for label, *_ in _WAYS.values()]


@dataclass(frozen=True)
class FitRow:
    """One recipe and one way to train it. Numbers are bytes unless they say otherwise. `peak` is
    the sum of the parts down to `device`, each as it is at the peak."""

    recipe: str
    #: where states are, and whether gradients are released
    way: str
    peak: int
    weights: int
    #: Kahan residuals and error codes
    extras: int
    #: parameters that do not train
    frozen: int
    buffers: int
    states: int
    gradients: int
    activations: int
    temporaries: int
    #: attention on a GPU, convolutions on a processor: what these kernels take beside their results
    kernels: int
    #: context and device code of a GPU
    device: int
    #: the module that runs at the peak
    place: str
    #: memory of the process, and bytes of each step over the bus
    host: int
    copied: int
    #: bytes that a file of states takes, and that each step reads and writes
    disk: int
    read: int
    written: int
    #: what is lost beside a step in place
    gives_up: str
    #: the lines that do it
    code: str
    #: True if the peak is within the memory that was asked about; None if none was
    fits: Optional[bool] = None
    #: the largest batch that fits, with batch="max"; 0 if none does
    batch: Optional[int] = None


class Fit:
    """The answer of `halfstep.fit`. str() is a table of at most 100 columns, json() the same as
    JSON, and html() a page that needs nothing else."""

    def __init__(
        self, title: str, rows: List[FitRow], memory: Optional[int], notes: List[str], ranks: int
    ) -> None:
        self.title, self.rows, self.memory = title, rows, memory
        #: lines that say what the figures count and what they do not
        self.notes = notes
        self.ranks = ranks

    @property
    def best(self) -> Optional[FitRow]:
        """The row to take first, or None if nothing fits: states in place come before states
        elsewhere, and for each way recipes in the order that was asked for."""
        fitting = [row for row in self.rows if row.fits]
        return min(fitting, key=lambda row: _ORDER.index(row.way), default=None)

    def lead(self) -> str:
        """Returns the sentences that answer the question."""
        if self.memory is None:
            return f"{len(self.rows)} ways were looked at. Give memory= to see which fit."
        fitting, best = sum(bool(row.fits) for row in self.rows), self.best
        text = f"{fitting} of {len(self.rows)} ways fit into {page.size(self.memory)}."
        if best is None:
            least = min(self.rows, key=lambda row: row.peak)
            return (
                f"{text} The smallest, {least.recipe} {least.way}, lacks"
                f" {page.size(least.peak - self.memory)}. Take a smaller batch, checkpointing, or"
                " more GPUs."
            )
        why = "It gives up nothing." if not best.gives_up else f"It gives up: {best.gives_up}."
        return (
            f"{text} Take {best.recipe}, {best.way}: {page.size(best.peak)}. {why} States in place"
            " come first, then gradient release, then states elsewhere; then the recipe that comes"
            " first in this list."
        )

    def __str__(self):
        return page.text(self)

    __repr__ = __str__

    def json(self) -> str:
        """Returns the report as JSON."""
        best = self.best
        return json.dumps(
            {
                "title": self.title,
                "memory": self.memory,
                "ranks": self.ranks,
                "best": None if best is None else self.rows.index(best),
                "rows": [asdict(row) for row in self.rows],
                "notes": self.notes,
            },
            indent=2,
        )

    def html(self) -> str:
        """Returns the report as a page."""
        return page.html(self)

    def _repr_html_(self):
        return page.html(self, whole=False)


class _Traces:
    """The traces of a model, one for each kind of weights and each batch, made when asked for."""

    def __init__(self, model, step, cuda, kernels):
        self.model, self.step, self.cuda, self.kernels = model, step, cuda, kernels
        self.made, self.curves = {}, {}

    def of(self, kind, batch):
        """Returns the trace for weights of a kind, (dtype, format of 8-bit weights or None)."""
        key = kind, batch
        if key not in self.made:
            step = self.step if batch is None else lambda model: self.step(model, batch)
            self.made[key] = trace(self.model, step, lambda model: _prepare(model, *kind))
        return self.made[key]

    def curve(self, kind, batch, release):
        """Returns the bytes of each kind after each event. Batches above 3 follow each event in a
        line through batches of 2 and 3."""
        key = kind, batch, release
        if key not in self.curves:
            if batch is None or batch <= 3:
                self.curves[key] = self.of(kind, batch).curve(release, self.cuda)
            else:
                two, three = self.of(kind, 2), self.of(kind, 3)
                if not two.is_like(three):
                    raise ValueError(
                        "halfstep.fit: steps of batches of 2 and of 3 allocate memory in another"
                        " order, so that larger ones cannot be told from them; give numbers as"
                        " batch="
                    )
                self.curves[key] = two.curve(release, self.cuda, (three, batch - 2))
        return self.curves[key]


def _prepare(model, dtype, packed):
    """Gives a model on `meta` the weights that a recipe needs."""
    params = list(model.parameters())
    if any(map(is_packed, params)):
        return
    trained = [p for p in params if p.requires_grad]
    if len(trained) == len(params):
        model.to(dtype)
    for p in trained:
        p.data = p.data.to(dtype)
    if packed is not None:
        try:
            nn.quantize_(model, packed)
        except ValueError as error:
            raise _Refused(str(error)) from error


def _ways(model, recipe, cuda, kernels):
    """Yields the rows of plan() for each way of a recipe."""
    rows = plan(model, recipe, device_memory=2**62, adamw=True, kernels=kernels).rows
    ways = {row.way: row for row in rows}
    released = "GPU, gradient_release" in ways
    if not cuda:
        for release in (False, True)[: 1 + released]:
            way = "GPU" + ", gradient_release" * release
            yield way, ways[way]
        yield "store", plan(model, recipe, store=True, adamw=True).rows[0]
        return
    yield from ways.items()
    if "CPUOffload" in ways:
        (row,) = plan(model, recipe, store=True, offload=True, adamw=True, kernels=kernels).rows
        yield "CPUOffload, store", row


def _code(recipe, way):
    """Returns the lines that make an optimizer."""
    _, _, cls, options = _WAYS[way]
    rule, weights, _ = recipe.split("/")
    params = "model.named_parameters()"
    lines, extra = [], ", " + options if options else ""
    if is_packed_format(weights):
        lines.append(f'halfstep.nn.quantize_(model, "{weights}")')
    if rule == "muon":
        params, extra = "model", ", adamw={}" + extra
    first = f'{params}, "{recipe}"' if cls else f'"{recipe}", {params}'
    lines.append(f"opt = halfstep.{cls or 'optimizer'}({first}{extra})")
    return "\n".join(lines)


def fit(
    model: torch.nn.Module,
    step: Callable[..., Any],
    memory: Union[None, int, float, str] = None,
    *,
    recipes: Union[None, str, Sequence[str]] = None,
    batch: Union[None, int, str] = None,
    ranks: int = 1,
    device: str = "cuda",
    kernels: bool = True,
    title: str = "",
) -> Fit:
    """Returns the peak of memory of a whole training step under each of some recipes, for each way
    to train it: in place, with gradient release, StateStreaming, CPUOffload, states in a file.

    The step runs once for each kind of weights on tensors without memory, and each allocation is
    followed. The optimizer never runs: its bytes are those of halfstep.plan(). Nothing is
    allocated, so the model should be on the meta device. It is afterwards as it was.

    model: a module. Weights of halfstep.nn.quantize_() count as they are. Otherwise a recipe with
        8-bit weights means those of nn.Linear. Parameters that train are converted to the dtype of
        the recipe's weights, and the others too if all train.
    step: step(model) makes a batch, computes a loss and calls backward(). It makes tensors on the
        device of the model's parameters, reads no value of a tensor, and has no optimizer.
    memory: bytes (or "24G") of the device.
    recipes: names such as "adamw/bf16-sr/int8" (one or several), from the one to take first.
        "muon/..." means that AdamW steps embeddings, heads and vectors.
    batch: step(model, batch) is called with this number. "max": rows are for a batch of 1, and
        say which is the largest that fits into `memory`.
    ranks: the number of GPUs that fully_shard() spreads weights, gradients and states over. Each
        rank's share is the plan's and not traced.
    device: "cuda", or "cpu" for a step on the processor, with the ways that it has.
    kernels: False: the GPU is one that the library has no kernels for, as in halfstep.plan().
    title: what the report calls the model.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"halfstep.fit(model, step): {model!r} is not a module")
    if not callable(step):
        raise TypeError(f"halfstep.fit(model, step): step={step!r} is not a function of the model")
    if device not in ("cuda", "cpu"):
        raise ValueError(f"halfstep.fit: unknown device={device!r}; known: 'cuda', 'cpu'")
    abi.check_flags(kernels=kernels)
    if device == "cpu" and not kernels:
        raise ValueError("halfstep.fit: kernels=False is for a GPU; leave out device='cpu'")
    if not abi.is_count(ranks, 1):
        raise ValueError(f"halfstep.fit: ranks={ranks!r} is not a whole number of at least 1")
    if batch not in (None, "max") and not abi.is_count(batch, 1):
        raise ValueError(f"halfstep.fit: batch={batch!r} is neither a whole number nor 'max'")
    limit = None if memory is None else bytes_of(memory)
    if batch == "max" and limit is None:
        raise ValueError("halfstep.fit: batch='max' needs memory=, which the batch is to fit into")
    cuda, rows, notes = device == "cuda", [], []
    traces = _Traces(model, step, cuda, kernels)
    asked = [recipes] if isinstance(recipes, str) else RECIPES if recipes is None else recipes
    for recipe in asked:
        class_and_options(recipe)
        recipe = abi.recipe_full(recipe)
        weights = recipe.split("/")[1]
        kind = stored_dtype(beside(weights)), weights if is_packed_format(weights) else None
        try:
            found = _rows(traces, recipe, kind, limit, batch, ranks)
        except _Refused as error:
            if recipes is not None:
                raise ValueError(str(error)) from error.__cause__
            notes.append(f"{recipe} is left out: {str(error).split(': ', 1)[-1]}.")
            continue
        rows += found
    recipes = list(dict.fromkeys(row.recipe for row in rows))
    notes += [f"{line}." for line in layout.caveats(recipes)]
    name = title or type(model).__name__
    count = sum(p.numel() for p in model.parameters())
    head = f"{name}, {count:,} parameters"
    if batch is not None:
        head += f", batch {1 if batch == 'max' else batch}"
    return Fit(head, rows, limit, notes + _notes(cuda, kernels, ranks), ranks)


class _Refused(ValueError):
    """The model cannot have the weights of a recipe."""


def _rows(traces, recipe, kind, limit, batch, ranks):
    """Returns the rows of one recipe."""
    rows = []
    with prepared(traces.model, lambda model: _prepare(model, *kind)):
        ways = list(_ways(traces.model, recipe, traces.cuda, traces.kernels))
    for way, planned in ways:
        at = partial(_row, traces, recipe, kind, way, planned, ranks)
        row = at(1 if batch == "max" else batch)
        fits = None if limit is None else row.peak <= limit
        most = None
        if batch == "max":
            most = _largest(lambda size: at(size).peak <= limit) if fits else 0
        rows.append(replace(row, fits=fits, batch=most))
    return rows


def _largest(fits, most=1 << 20):
    """Returns the largest batch from 1 on that fits. 1 does."""
    low, high = 1, 2
    while high < most and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _row(traces, recipe, kind, way, planned, ranks, batch):
    """Returns the row of one way with a batch. `planned` is its row of plan()."""
    label, gives_up, *_ = _WAYS[way]
    freed = "release" in way or "offload_gradients" in way

    def share(size):
        return -(-size // ranks)

    lines = traces.curve(kind, batch, freed).clone()
    lines[_GRADIENTS] = -(-lines[_GRADIENTS] // ranks)
    total = lines.sum(0)
    event = int(total.argmax())
    place = traces.of(kind, batch if batch is None or batch <= 3 else 2).place(event)
    workspace = share(planned.workspace)
    if not freed and int(total[-1]) + workspace > int(total[event]):
        event, place = -1, "the optimizer's step"
    elif not freed and traces.cuda:
        workspace = 0  # taken in the step only, while a processor keeps it
    parts = dict(zip(KINDS, lines[:, event].tolist()))
    # A gradient that leaves for the process is there until its copy is made.
    leaving = planned.gradients if freed and way.startswith("CPUOffload") else 0
    sizes = {
        "weights": share(planned.weights),
        "extras": share(planned.extras),
        "frozen": share(planned.frozen),
        "buffers": parts["buffers"],
        "states": share(planned.states),
        "gradients": parts["gradients"] + share(leaving),
        "activations": parts["activations"],
        "temporaries": parts["temporaries"] + workspace,
        "kernels": parts["kernels"] + parts["convolutions"],
        "device": (CONTEXT + DEVICE_CODE * traces.kernels) if traces.cuda else 0,
    }
    return FitRow(
        recipe=recipe,
        way=label,
        peak=sum(sizes.values()),
        place=place,
        host=share(planned.host),
        copied=share(planned.copied),
        disk=share(planned.disk),
        read=share(planned.read),
        written=share(planned.written),
        gives_up=gives_up,
        code=_code(recipe, way),
        **sizes,
    )


def _notes(cuda, kernels, ranks):
    """Returns the lines that say what figures count and what they leave out."""
    notes = []
    if cuda:
        code = f" and {page.size(DEVICE_CODE)} for device code of the library" if kernels else ""
        notes += [
            f"Each peak has {page.size(CONTEXT)} for torch's context{code}, as measured on an"
            " H100.",
            "Two peaks that were measured on an H100 lay 0.9 and 1.0 GB above the prediction"
            " (docs/results.md): leave 1 GiB free.",
            f"Memory is counted in blocks of {CUDA_BLOCK} bytes, as torch's allocator gives it.",
            "Attention is counted as FlashAttention's: its backward pass sums gradients in fp32.",
            "Not counted: fragmentation. Papers found 15 % (arXiv 2401.08156) and up to 43 %"
            " (2507.16274) of memory lost to it. PYTORCH_ALLOC_CONF=expandable_segments:True"
            " avoids most.",
            "Not counted: other processes, workspace of cuBLAS and cuDNN, what a GPU's kernels take"
            " beside that.",
        ]
    else:
        notes.append(
            "Convolutions are counted with oneDNN's copies of their input and output, or with"
            " columns of the input where oneDNN does not compute in their dtype."
        )
    notes.append("A longer sequence or a larger batch than the one that was traced takes more.")
    if ranks > 1:
        notes.append(
            f"Weights, gradients and states are 1/{ranks} of the plan's, and were not traced."
            " Weights that fully_shard() gathers for the modules that run come on top."
        )
    return notes
