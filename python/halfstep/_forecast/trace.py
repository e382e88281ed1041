"""Runs a step of a model on tensors without memory, and follows what each operator would allocate.

Tensors are fakes of the processor (FakeTensorMode): they have shapes and lifetimes, and no bytes.
"""

import contextlib
import functools
import math
import os
import traceback
import warnings
import weakref
from dataclasses import dataclass, field

import torch

from .._tensors import torch_private
from .._tensors.sharding import is_packed, stored
from .._weights8.views import rows_like

#: what memory is for; the position in this list is its number in a trace
KINDS = ("weights", "buffers", "gradients", "activations", "temporaries", "kernels", "convolutions")
_WEIGHT, _BUFFER, _GRADIENT, _ACTIVATION, _TEMPORARY, _KERNEL, _CONVOLUTION = range(len(KINDS))
#: torch's allocator for CUDA gives memory in multiples of so many bytes (kMinBlockSize in
#: c10/cuda/CUDACachingAllocator.cpp)
CUDA_BLOCK = 512
#: attention that a GPU computes by FlashAttention. Its backward pass sums into memory of its own
#: (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd)
_ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
_ELSEWHERE = (
    "halfstep.fit: the step makes tensors on another device than the model's parameters, or runs"
    " under autocast for one. Tensors without memory are the processor's: in the step, take"
    " device = next(model.parameters()).device for tensors, and device.type for torch.autocast()"
)


@dataclass
class Trace:
    """What a step allocates and gives back, in the order of time.

    deltas   bytes of each event, negative where memory is given back
    owners   the number of the piece of memory of each event
    kinds    of each piece of memory, its place in KINDS
    places   of each event, what ran: a place in `names`
    dead     of each piece of memory that gradients are in: the event after which all of these
             gradients are complete
    """

    deltas: list = field(default_factory=list)
    owners: list = field(default_factory=list)
    kinds: list = field(default_factory=list)
    places: list = field(default_factory=list)
    names: list = field(default_factory=list)
    dead: dict = field(default_factory=dict)

    def curve(self, release=False, cuda=True, scale=None):
        """Returns the bytes of each kind after each event, a tensor [kinds, events], without
        weights. Gradients are freed as soon as they are complete, if `release` is set. `scale`:
        another trace of the same step and the number of its differences to add."""
        deltas = torch.tensor(self.deltas, dtype=torch.int64, device="cpu")
        if scale is not None:
            other, times = scale
            deltas = deltas + times * (
                torch.tensor(other.deltas, dtype=torch.int64, device="cpu") - deltas
            )
        owners = torch.tensor(self.owners, dtype=torch.int64, device="cpu")
        kinds = torch.tensor(self.kinds, dtype=torch.int64, device="cpu")[owners]
        if cuda:
            whole = (deltas.abs() + CUDA_BLOCK - 1) // CUDA_BLOCK * CUDA_BLOCK
            deltas = deltas.sign() * whole
        deltas[(kinds == _WEIGHT) | (kinds == (_CONVOLUTION if cuda else _KERNEL))] = 0
        lines = torch.zeros(len(KINDS), len(deltas), dtype=torch.int64, device="cpu")
        lines.scatter_(0, kinds[None], deltas[None])
        if release and self.dead:
            held = torch.zeros(len(self.kinds), dtype=torch.int64, device="cpu")
            born = deltas > 0
            held[owners[born]] = deltas[born]
            line = lines[_GRADIENT]
            line[(deltas < 0) & (kinds == _GRADIENT)] = 0
            for piece, event in self.dead.items():
                # what follows the event runs without the gradient; the event itself still has it
                if event + 1 < len(line):
                    line[event + 1] -= held[piece]
        return lines.cumsum(1)

    def is_like(self, other):
        """Returns True if two traces have the same events, but for their bytes."""
        return (self.owners, self.kinds, self.dead) == (other.owners, other.kinds, other.dead) and [
            x > 0 for x in self.deltas
        ] == [x > 0 for x in other.deltas]

    def place(self, event):
        """Returns the name of what runs at an event."""
        return self.names[self.places[event]]


def in_backward():
    """Returns True inside a backward pass. Where torch does not tell it is False, and a trace then
    counts what a backward pass allocates as activations."""
    number = torch_private.backward_pass()
    return number is not None and number >= 0


class _Follower(torch_private.TorchDispatchMode):
    """Writes a Trace of what runs inside it."""

    def __init__(self, model):
        super().__init__()
        self.trace, self.pieces, self.stack, self.waiting = Trace(), {}, [], []
        self.modules = {id(m): name for name, m in model.named_modules()}
        self.numbers = {}

    # ---- Pieces of memory ------------------------------------------------------------------------

    def born(self, storage, kind):
        """Notes a piece of memory, unless it is known."""
        key = id(storage)  # torch keeps the object as long as the memory
        if key in self.pieces or not storage.nbytes():
            return
        piece, size = len(self.trace.kinds), storage.nbytes()
        self.trace.kinds.append(kind)
        self._event(piece, size)
        self.pieces[key] = piece, weakref.ref(storage, lambda _: self._gone(key, piece, size))

    def _gone(self, key, piece, size):
        del self.pieces[key]
        self._event(piece, -size)

    def _event(self, piece, size):
        trace = self.trace
        if self.stack or not in_backward():
            trace.places.append(self._number(self.stack[-1] if self.stack else "the step"))
        else:
            self.waiting.append(len(trace.places))
            trace.places.append(None)
        trace.deltas.append(size)
        trace.owners.append(piece)

    def _number(self, name):
        """Returns the place of a name in trace.names."""
        if name not in self.numbers:
            self.numbers[name] = len(self.trace.names)
            self.trace.names.append(name)
        return self.numbers[name]

    def settle(self, name):
        """Says what the events of the backward pass since the last call were for."""
        for event in self.waiting:
            self.trace.places[event] = self._number(name)
        self.waiting = []

    # ---- Hooks -----------------------------------------------------------------------------------

    def enter(self, module, _):
        """Runs before the forward pass of a module."""
        name = self.modules.get(id(module))
        if name is None:
            name = self.stack[-1] if self.stack else type(module).__name__
        again = in_backward() and not name.endswith(", again")
        self.stack.append((name or "the model") + (", again" if again else ""))

    def leave(self, module, _, __):
        """Runs after the forward pass of a module."""
        if self.stack:
            self.stack.pop()

    def complete(self, name, p):
        """Runs when the gradient of a parameter is complete."""
        self.settle(f"{name.rpartition('.')[0]}, backward")
        held = self.pieces.get(id(p.grad.untyped_storage()))
        if held is not None:
            self.trace.kinds[held[0]] = _GRADIENT
            self.trace.dead[held[0]] = len(self.trace.deltas) - 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(t, "packed") for t in types):
            return NotImplemented  # the subclass comes first, and what it runs comes back here
        if torch.is_autocast_enabled():  # that of GPUs
            raise ValueError(_ELSEWHERE)
        found = func(*args, **(kwargs or {}))
        inside = bool(self.stack) or not in_backward()
        self._note(found, _ACTIVATION if inside else _TEMPORARY)
        name = func.overloadpacket.__name__
        if name == _ATTENTION_BACKWARD:
            self._kernel(_KERNEL, _flash_memory(*args[1:4]))
        elif name == "convolution":
            self._kernel(_CONVOLUTION, _convolution_memory(args[0], args[1], found))
        elif name == "convolution_backward":
            self._kernel(_CONVOLUTION, _convolution_memory(args[1], args[2], args[0]))
        return found

    def _note(self, found, kind):
        if isinstance(found, (tuple, list)):
            for each in found:
                self._note(each, kind)
        elif isinstance(found, torch.Tensor) and found.device.type != "meta":
            if found.device.type != "cpu":
                raise ValueError(_ELSEWHERE)
            if not hasattr(found, "packed"):
                self.born(found.untyped_storage(), kind)

    def _kernel(self, kind, size):
        """Notes memory that a kernel takes and gives back."""
        piece = len(self.trace.kinds)
        self.trace.kinds.append(kind)
        self._event(piece, size)
        self._event(piece, -size)


def _convolution_memory(given, weight, out):
    """Returns the bytes that a convolution takes on a processor beside its results: oneDNN's copies
    of its input and output in blocks; or where oneDNN does not compute in this dtype, the input's
    columns, one for each element of the output."""
    if torch_private.has_blocks(given.dtype):
        return given.nbytes + out.nbytes
    window = math.prod(weight.shape[2:])
    if window == 1:
        return 0
    columns = given.shape[0] * given.shape[1] * window * math.prod(out.shape[2:])
    return columns * given.element_size()


def _flash_memory(query, key, _):
    """Returns the bytes that the backward pass of FlashAttention sums into on a GPU: gradients of
    queries in fp32, a sum for each query, and gradients of keys and values for each head of the
    queries if heads share them. Tensors are [batch, heads, tokens, width]."""

    def up(n, to):
        return -(-n // to) * to

    batch, heads, tokens, width = query.shape
    width = up(width, 32)
    sums = 4 * batch * heads * up(tokens, 128) * (width + 1)
    shared = 0
    if key.shape[1] != heads:
        shared = 2 * batch * heads * key.shape[2] * up(key.shape[3], 8) * key.element_size()
    return sums + shared


@contextlib.contextmanager
def prepared(model, prepare):
    """Returns a context in which the parameters and buffers of a model are on `meta`, as
    prepare(model) makes them. Yields a function that replaces each by what another makes of it."""
    held = [
        (module, name, value)
        for module in model.modules()
        for named in (module.named_parameters, module.named_buffers)
        for name, value in named(recurse=False, remove_duplicate=False)
    ]

    def change(make):
        made = {}
        for module, name, _ in held:
            value = getattr(module, name)
            if id(value) not in made:
                made[id(value)] = make(value), value
            setattr(module, name, made[id(value)][0])

    try:
        change(_meta)
        prepare(model)
        yield change
    finally:
        for module, name, value in held:
            setattr(module, name, value)


def _like(value, made):
    """Returns a tensor as a parameter with the attributes of another, if that is one."""
    if isinstance(value, torch.nn.Parameter):
        made = torch.nn.Parameter(made, value.requires_grad)
        own = ("_stored", "format", "row_length", torch_private.PARAMETER_MARK)
        vars(made).update({name: x for name, x in vars(value).items() if name not in own})
    return made


def _meta(value):
    if is_packed(value):
        made = rows_like(value, value.packed.to("meta"))
    else:
        made = torch.empty_like(value, device="meta")
    return _like(value, made.detach())


def _fake(value):
    held = value.packed if is_packed(value) else value
    made = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="cpu")
    return _like(value, rows_like(value, made) if is_packed(value) else made)


def trace(model, step, prepare):
    """Returns the Trace of step(model). prepare(model) changes a model on `meta` before. The model
    is afterwards as it was. Raises ValueError if the step asks for a value."""
    if torch_private.FakeTensorMode is None:
        raise RuntimeError(
            f"halfstep.fit: torch {torch.__version__} has no FakeTensorMode where this package"
            " looks for it; halfstep.plan counts all but activations"
        )
    mode = torch_private.FakeTensorMode(allow_non_fake_inputs=True)
    with prepared(model, prepare) as change:
        with mode:
            change(_fake)
        follower = _Follower(model)
        params = dict(model.named_parameters())
        for some, kind in ((params.values(), _WEIGHT), (model.buffers(), _BUFFER)):
            for tensor in some:
                follower.born(stored(tensor).untyped_storage(), kind)
        handles = [
            p.register_post_accumulate_grad_hook(functools.partial(follower.complete, name))
            for name, p in params.items()
            if p.requires_grad
        ]
        hooks = torch.nn.modules.module
        handles.append(hooks.register_module_forward_pre_hook(follower.enter))
        handles.append(hooks.register_module_forward_hook(follower.leave, always_call=True))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.filterwarnings("error", ".*Disabling autocast")
                with mode, follower:
                    step(model)
        except torch_private.NO_VALUE as error:
            raise ValueError(_asked(error)) from error
        except torch_private.UnsupportedOperatorException as error:
            raise ValueError(
                f"halfstep.fit: the operator {error} does not say what shape its result has; give"
                " it a form without memory by torch.library.register_fake(), or take another"
                " attention or loss"
            ) from error
        except UserWarning as error:
            raise ValueError(_ELSEWHERE) from error
        except (RuntimeError, AssertionError) as error:
            if "cuda" in str(error).lower():
                raise ValueError(_ELSEWHERE) from error
            raise
        finally:
            for handle in handles:
                handle.remove()
        follower.settle("the backward pass")
        if not follower.trace.dead:
            raise ValueError(
                "halfstep.fit: the step left no gradient; it has to call backward() on the loss"
                " of a model whose parameters train"
            )
    return follower.trace


def _asked(error):
    """Returns the sentence for a step that asks for a value, with the line that does."""
    inside = os.path.dirname(torch.__file__) + os.sep
    lines = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((inside, os.path.dirname(__file__)))
    ]
    at = f"{lines[-1].filename}:{lines[-1].lineno}: {lines[-1].line}" if lines else "inside torch"
    return (
        f"halfstep.fit: the step asks for a value, which a tensor without memory does not have, at"
        f" {at}\nLeave .item(), print() and branches on values out of the step. For a mixture of"
        ' experts take grouped experts, such as experts_implementation="grouped_mm" of'
        " transformers"
    )
