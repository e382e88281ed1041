"""Checks single parameters and gradients: whether they can be stepped, their format, their rows.

Errors name the parameter.
"""

import math
import weakref

import torch

from .._library import abi
from . import devices, sharding
from .sharding import local
from .torch_private import gradient_hooks, is_zerotensor
from .torch_public import warn

#: safetensors' names of stored dtypes -> torch
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
}
#: dtypes of weights and gradients -> their plain formats
PLAIN = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
#: classes of tensors whose memory holds what torch says it holds
_ORDINARY = {torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)}


def check_dtypes(formats):
    """Raises ImportError if a format of the library stores a dtype that is not in DTYPES."""
    for dtype in sorted({x for f in formats for x in (f.code_dtype, f.extra_dtype) if x}):
        if dtype not in DTYPES:
            raise ImportError(
                f"halfstep: a format of {abi.path} stores elements of {dtype}, which this package"
                " does not know; add it to DTYPES of _tensors/parameters.py"
            )


check_dtypes(abi.formats.values())


def stored_dtype(fmt):
    """Returns the dtype that a format, given by its name, stores elements in."""
    return DTYPES[abi.formats[fmt].code_dtype]


def extra_dtype(fmt):
    """Returns the dtype of the residual or error code that a format keeps beside each element, or
    None."""
    return DTYPES.get(abi.formats[fmt].extra_dtype)


def _refuse_class(tensor, what):
    raise TypeError(
        f"halfstep: {what} is a {type(tensor).__name__}, a kind of tensor that halfstep does not"
        " know; give plain tensors, DTensors or weights of halfstep.nn.quantize_()"
    )


def _refuse_dtype(dtype, what, done):
    advice = (
        ". Make torch.view_as_real() of its values the parameter, and take"
        " torch.view_as_complex() of it in the model"
    )
    raise TypeError(
        f"halfstep: {what} is {dtype}; float32, bfloat16 and float16 can be {done}"
        + (advice if dtype.is_complex else "")
    )


def described(value):
    """Returns what kind of tensor a value is, or its class, for an error text."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}, {value.layout}"


def holds(tensor, shape, dtype=None):
    """Returns True for a dense tensor with memory, of this shape and, if one is given, dtype."""
    return (
        isinstance(tensor, torch.Tensor)
        and tuple(tensor.shape) == tuple(shape)
        and dtype in (None, tensor.dtype)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
    )


def weight_format(asked, dtype, name):
    """Returns the format of one weight. `asked` applies to BF16. float16 takes the format of the
    same kind; float32 stays as it is."""
    if dtype not in PLAIN:
        _refuse_dtype(dtype, f"parameter {name!r}", "stepped")
    if dtype == torch.float32:
        if asked is not None and asked not in abi.formats:
            raise ValueError(
                f"halfstep: unknown format weights={asked!r}; known: {', '.join(abi.formats)}"
            )
        return "f32"
    if asked is None:
        asked = "bf16-sr"
    base, dash, how = asked.partition("-")
    found = PLAIN[dtype] + dash + how
    if base not in ("bf16", "f16") or found not in abi.formats:
        raise ValueError(
            f"halfstep: parameter {name!r} is {dtype}, which weights={asked!r} cannot store; "
            f"formats are: {', '.join(f for f in abi.formats if f.startswith(PLAIN[dtype]))}"
        )
    return found


def format_of(asked, p, name):
    """Returns the format of one weight of an optimizer. 8-bit weights have their own. `asked` is
    the option; a format of 8 bits means beside() for others."""
    if sharding.is_packed(p):
        return local(p).format
    return weight_format(beside(asked), p.dtype, name)


def is_packed_format(fmt):
    """Returns True for a format of 8-bit weights, given by its name or None."""
    return fmt in abi.formats and abi.formats[fmt].geometry == abi.GEOMETRY_PACKED


def could_be_packed(shape, fmt):
    """Returns True if the rows of a tensor are long enough for the blocks of 8-bit weights."""
    return len(shape) > 1 and math.prod(shape[1:]) >= abi.formats[fmt].block


def beside(fmt):
    """Returns the format of weights that have no blocks, beside others of this format."""
    if not is_packed_format(fmt):
        return fmt
    return "bf16-ecc8" if abi.formats[fmt].extra_bits else "bf16-sr"


def overlaps(tensor):
    """Returns True if two elements may share memory. Sorted by stride, each dimension has to step
    over all smaller ones."""
    if not tensor.numel():
        return False
    reach = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n != 1):
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False


def dense(tensor):
    """Returns the tensor itself if its memory holds the elements row by row, else a copy that
    does."""
    return tensor if devices.is_plain(tensor) else devices.contiguous(tensor)


def check_parameter(p, name):
    """Raises TypeError or ValueError for a parameter that cannot be stepped on any device."""
    if isinstance(p, torch.nn.parameter.UninitializedTensorMixin):
        raise ValueError(
            f"halfstep: parameter {name!r} is not initialized; pass a batch through the lazy module"
            " first"
        )
    if sharding.is_dtensor(p):
        return _check_placements(p, name) or check_parameter(local(p), name)
    if sharding.is_packed(p):
        return _check_packed(p, name)
    if type(p) not in _ORDINARY and not (
        isinstance(p, torch.nn.Parameter) and type(p.data) in _ORDINARY
    ):
        _refuse_class(p, f"parameter {name!r}")
    if p.layout != torch.strided:
        raise TypeError(
            f"halfstep: parameter {name!r} is sparse ({p.layout}); only dense tensors can be"
            " stepped"
        )
    if p.dtype not in PLAIN:
        _refuse_dtype(p.dtype, f"parameter {name!r}", "stepped")
    if overlaps(p):
        raise ValueError(
            f"halfstep: elements of parameter {name!r} share memory (strides {tuple(p.stride())} of"
            f" shape {tuple(p.shape)}, as expand() leaves them); pass it through .clone() first"
        )
    if is_zerotensor(p):
        raise ValueError(
            f"halfstep: parameter {name!r} is a tensor of zeros without memory; pass it through"
            " .clone() first"
        )


def _check_packed(p, name):
    """Raises ValueError for 8-bit weights that are not as the library takes them."""
    if p.dim() != 2 or p.shape[1] != p.row_length or not p.is_contiguous():
        raise ValueError(
            f"halfstep: parameter {name!r} is a view of 8-bit weights that is no range of their"
            f" rows (shape {tuple(p.shape)} of rows of {p.row_length}); give the weight itself"
        )
    if p.row_length < abi.formats[p.format].block:
        raise ValueError(
            f"halfstep: parameter {name!r} has rows of {p.row_length} elements, and a block of"
            f" {p.format} has {abi.formats[p.format].block}; leave it in 16 bits, as"
            " halfstep.nn.quantize_() does"
        )


def _check_placements(p, name):
    """Raises ValueError for 8-bit weights that are cut otherwise than by rows."""
    if sharding.is_packed(p) and any(getattr(x, "dim", 0) for x in p.placements):
        raise ValueError(
            f"halfstep: parameter {name!r} is {local(p).format} and cut along its columns"
            f" ({tuple(p.placements)}); 8-bit weights are cut by rows, as fully_shard() does. For"
            " tensor parallelism leave it in 16 bits"
        )


def check_cpu(p, name):
    """Raises ValueError for a parameter that is not in CPU memory."""
    if p.device.type != "cpu":
        raise ValueError(
            f"halfstep: parameter {name!r} is on {p.device}; this works on tensors in CPU memory"
        )


def mark(hook, owner, kind):
    """Marks a hook by which its owner takes gradients of parameters. Returns the hook. `kind` names
    such owners, as "optimizer"."""
    hook._halfstep = kind, weakref.ref(owner)
    return hook


def take_over(params, owner, kind):
    """Removes the hooks that another owner of this kind has put on these parameters, and warns of
    them. A cell of a notebook that is run again leaves such an owner alive."""
    taken = 0
    for p in params:
        hooks = gradient_hooks(p)
        for key, hook in list(hooks.items()):
            found, reference = getattr(hook, "_halfstep", (None, None))
            other = reference() if found == kind else None
            if other is not None and other is not owner:
                del hooks[key]
                taken += 1
    if taken:
        warn(
            f"another {kind} takes the gradients of {taken} of these parameters in the backward"
            " pass. A notebook's cell that is run again leaves such a one alive. From now on the"
            " new one takes these gradients, and the other gets none"
        )


def follow_gradients(params, owner, call, kind=None):
    """Runs call(owner, p) as soon as a backward pass has completed the gradient of p, while the
    owner lives. Returns the handles of the hooks, which mark() has marked if `kind` is given."""
    # A hook that held the owner would keep it alive, because Python's cycle collector sees no
    # hooks.
    this = weakref.ref(owner)

    def hook(p):
        held = this()
        if held is not None:
            call(held, p)

    mark(hook, owner, kind)
    return [p.register_post_accumulate_grad_hook(hook) for p in params if p.requires_grad]


class SparseGradientError(RuntimeError, TypeError):
    """A gradient is sparse. It is a RuntimeError because torch's own optimizers raise one, and a
    TypeError because other wrong gradients raise that here."""


def check_gradient(p, grad, name):
    """Returns the format of a gradient. Raises TypeError or ValueError for one that does not fit
    its parameter. For DTensors it checks the local shards."""
    p, grad = local(p), local(grad)
    if type(grad) not in _ORDINARY:
        _refuse_class(grad, f"the gradient of {name!r}")
    if grad.layout != torch.strided:
        raise SparseGradientError(
            f"halfstep: the gradient of {name!r} is sparse; only dense gradients can be used "
            "(torch.nn.Embedding(sparse=False))"
        )
    if grad.dtype not in PLAIN:
        _refuse_dtype(grad.dtype, f"the gradient of {name!r}", "used")
    lies = devices.of(sharding.stored(p))
    if devices.of(grad) != lies:
        raise ValueError(
            f"halfstep: the gradient of {name!r} is on {devices.of(grad)}, the parameter on {lies}"
            "; bring both to one device, or step in the backward pass (gradient_release=True,"
            " step_param()), before a trainer moves the parameter away"
        )
    if grad.shape != p.shape:
        raise ValueError(
            f"halfstep: the gradient of {name!r} has shape {tuple(grad.shape)}, the parameter"
            f" {tuple(p.shape)}; call zero_grad() and run the backward pass again"
        )
    devices.check_memory(grad, f"the gradient of {name!r}")
    return PLAIN[grad.dtype]
