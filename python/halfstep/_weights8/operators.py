"""What each operator of torch does with 8-bit weights.

Operators that write or alias a weight are listed here; others of that kind are refused. Operators
that only read, which their schema tells, get decoded values that they alone keep alive.
"""

import functools

import torch
import torch.nn.functional as F

from .._tensors.parameters import overlaps
from .._tensors.torch_private import arguments_of, is_composite, with_aliasing
from . import blocks, functions
from .blocks import unpack
from .views import (
    COMPUTE,
    decoded,
    is_rows,
    is_weight,
    like,
    parted,
    rows_like,
    span,
    strided,
    wrap,
)

aten = torch.ops.aten


def _packets(names, prefix=""):
    """Returns those of these operators that this torch has, with all their overloads."""
    found = (getattr(aten, prefix + name, None) for name in names.split())
    return {packet for packet in found if packet is not None}


_IN_PLACE = """
    __ilshift__ __irshift__ abs_ acos_ acosh_ add_ addbmm_ addcdiv_ addcmul_ addmm_ addmv_ addr_
    asin_ asinh_ atan2_ atan_ atanh_ baddbmm_ bernoulli_ bitwise_and_ bitwise_left_shift_
    bitwise_not_ bitwise_or_ bitwise_right_shift_ bitwise_xor_ cauchy_ ceil_ celu_ clamp_
    clamp_max_ clamp_min_ conj_physical_ copy_ copysign_ cos_ cosh_ cumprod_ cumsum_ deg2rad_
    digamma_ div_ elu_ eq_ erf_ erfc_ erfinv_ exp2_ exp_ expm1_ exponential_ fill_ floor_
    floor_divide_ fmod_ frac_ ge_ gelu_ geometric_ gt_ hardsigmoid_ hardswish_ hardtanh_ heaviside_
    hypot_ i0_ igamma_ igammac_ index_add_ index_copy_ index_fill_ index_put_ index_reduce_ ldexp_
    le_ leaky_relu_ lerp_ lgamma_ log10_ log1p_ log2_ log_ log_normal_ logical_and_ logical_not_
    logical_or_ logical_xor_ logit_ lt_ masked_fill_ masked_scatter_ mish_ mul_ mvlgamma_
    nan_to_num_ ne_ neg_ nextafter_ normal_ polygamma_ pow_ put_ rad2deg_ random_ reciprocal_ relu_
    remainder_ renorm_ round_ rsqrt_ scatter_ scatter_add_ scatter_reduce_ sgn_ sigmoid_ sign_ silu_
    sin_ sinc_ sinh_ sqrt_ sub_ tan_ tanh_ threshold_ tril_ triu_ trunc_ uniform_ xlogy_ zero_
"""
#: operators that write values into their first argument, and nothing but values
WRITES = _packets(_IN_PLACE)
#: those that do so for each tensor of a list
WRITES_OF_LISTS = _packets(_IN_PLACE + " maximum_ minimum_", "_foreach_")
#: steps of torch's optimizers
_STEPS = _packets("_fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_")
#: operators that return views
VIEWS = _packets(
    "_conj _neg_view _reshape_alias as_strided diagonal expand lift_fresh permute select slice"
    " split split_with_sizes squeeze t transpose unbind unfold unsqueeze view"
)
#: operators that ask only for the shape, strides, dtype and device of their first tensor
_SHAPES = _packets(
    "full_like new_empty new_empty_strided new_full new_ones ones_like rand_like randint_like"
    " randn_like zeros_like"
)
#: collectives that return the bytes of all ranks, and those that move bytes between tensors
_GATHERS = {"_wrap_tensor_autograd", "all_gather_into_tensor", "wait_tensor"}
_MOVES = {"_allgather_base_", "allgather_", "broadcast_", "recv_", "scatter_", "send"}


# ---- Views and copies ----------------------------------------------------------------------------


def _view(func, args, kwargs):
    """Returns views of a weight, whose strides torch works out on a tensor without memory. Values
    that are seen as another dtype are a copy."""
    weight = args[0]
    size = len(weight._stored) * weight.row_length
    shadow = torch.empty(size, dtype=weight.dtype, device="meta")
    shadow = shadow.as_strided(weight.shape, weight.stride(), weight.storage_offset())
    views = func(shadow, *args[1:], **kwargs)
    if isinstance(views, torch.Tensor):
        if views.dtype != weight.dtype:
            return _plainly(func, args, kwargs)
        return with_aliasing(func, args, kwargs, like(weight, view=views))
    views = type(views)(like(weight, view=view) for view in views)
    return with_aliasing(func, args, kwargs, views)


def _detach(func, args, kwargs):
    functions.follow_stagers()  # state dictionaries detach what they give to stagers
    return with_aliasing(func, args, kwargs, like(args[0]))


def _detach_in_place(func, args, kwargs):
    return args[0]  # autograd has done it


def _clone(func, args, kwargs):
    """Returns a copy of the rows that a weight has, or of decoded values if their order changes."""
    weight = args[0]
    if not _keeps_order(weight, kwargs):
        return _plainly(func, args, kwargs)
    packed, *what = parted(weight)
    return wrap(type(weight), packed.clone(), *what)


def _to(func, args, kwargs):
    """Returns a copy on another device or with another dtype. It has all stored rows, because those
    behind a shard are there so that each rank sends as much."""
    weight, dtype = args[0], kwargs.pop("dtype", None) or args[0].dtype
    if dtype not in COMPUTE or not _keeps_order(weight, kwargs):
        return func(decoded(weight, torch.float32), *args[1:], dtype=dtype, **kwargs)
    kwargs.pop("memory_format", None)
    return like(weight, func(weight._stored, *args[1:], **kwargs), dtype)


def _keeps_order(weight, kwargs):
    """Returns True if a copy can have the strides of a weight, which has whole rows."""
    order = kwargs.get("memory_format") or torch.preserve_format
    if order != torch.preserve_format and not weight.is_contiguous(memory_format=order):
        return False
    return weight.numel() == span(weight)[1] * weight.row_length and not overlaps(weight)


def _empty(func, args, kwargs):
    """Returns a weight of zeros for torch's empty_like() and new_zeros()."""
    weight, size = args[0], args[1] if len(args) > 1 else args[0].shape
    dtype = kwargs.pop("dtype", None) or weight.dtype
    if len(size) != 2 or size[1] != weight.row_length or dtype not in COMPUTE:
        return _shape_only(func, args, {**kwargs, "dtype": dtype})
    device = kwargs.get("device") or weight.device
    stored = torch.zeros((size[0], weight._stored.shape[1]), dtype=torch.uint8, device=device)
    return rows_like(weight, stored, dtype)


def _split(func, args, kwargs):
    """Returns a weight in parts of rows."""
    weight, dim = args[0], (args[2] if len(args) > 2 else kwargs.get("dim", 0))
    if weight.dim() != 2 or weight.stride(dim) < weight.row_length:
        raise ValueError(
            f"halfstep: 8-bit weights of shape {tuple(weight.shape)} cannot be split along"
            f" dimension {dim}, because scales belong to {blocks.BLOCK} elements of a row: shard"
            " along dimension 0, keep the weight in 16 or 32 bits (where= of quantize_()), or"
            " split weight.dequantize()"
        )
    return _view(func, args, kwargs)


def _pad(func, args, kwargs):
    """Returns a weight with rows of zeros behind it, as DTensor makes shards equal."""
    weight, pad, value = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("value", 0)
    if len(pad) != 4 or any(pad[:3]) or pad[3] < 0 or value or not is_rows(weight):
        return _plainly(func, args, kwargs)
    return rows_like(weight, F.pad(weight.packed, pad))


# ---- Reads ---------------------------------------------------------------------------------------


def _embedding(func, args, kwargs):
    """Looks rows up and decodes only those."""
    weight, indices = args[0], args[1]
    if not is_weight(weight) or not is_rows(weight):
        return _plainly(func, args, kwargs)
    return unpack(weight.packed[indices], weight.row_length, weight.dtype)


def _changed(value, change):
    """Returns a value with change() made to each tensor in it."""
    if isinstance(value, (list, tuple)):
        return type(value)(_changed(x, change) for x in value)
    return change(value) if isinstance(value, torch.Tensor) else value


def _run(func, args, kwargs, change):
    """Runs an operator on what a function makes of its tensors."""
    named = {name: _changed(value, change) for name, value in kwargs.items()}
    return func(*(_changed(value, change) for value in args), **named)


def _plainly(func, args, kwargs):
    """Runs an operator on decoded weights."""
    dtype = args[0].dtype if func is aten.copy_.default and args[0].dtype in COMPUTE else None
    return _run(func, args, kwargs, lambda t: decoded(t, dtype) if is_weight(t) else t)


def _shape_only(func, args, kwargs):
    """Runs an operator that only asks for shape, strides, dtype and device of its first tensor."""
    first = args[0]
    held = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device=first.device)
    return func(held, *args[1:], **kwargs)


def _decode_copy(func, args, kwargs):
    return decoded(args[0])


def _is_set_to(func, args, kwargs):
    """Returns True if two weights are the same view of the same bytes."""
    a, b = args
    return (
        bool(is_weight(a) and is_weight(b))
        and func(a._stored, b._stored)
        and ((a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset()))
    )


def _on_bytes(func, args, kwargs):
    """Runs an operator on the bytes of weights."""
    return _run(func, args, kwargs, lambda t: t._stored if is_weight(t) else t)


def _moved_bytes(func, args, kwargs):
    """Returns a weight in memory that an operator copies its bytes to."""
    return like(args[0], func(args[0]._stored, *args[1:], **kwargs))


def _decompose(func, args, kwargs):
    return func.decompose(*args, **kwargs)


# ---- Writes --------------------------------------------------------------------------------------


def _write(func, args, kwargs):
    """Writes into a weight: decodes it, computes in fp32, and rounds what changed to nearest. The
    weight is the first argument, or the only entry of a list there."""
    given = args[0]
    weight = given[0] if isinstance(given, (list, tuple)) else given
    packed, length = weight.packed, weight.row_length
    source = args[1] if func is aten.copy_.default else None
    if is_weight(source) and is_rows(source) and source.shape == weight.shape and is_rows(weight):
        packed.copy_(source.packed, *args[2:], **kwargs)
        return weight
    if source is not None and is_rows(weight):
        source = decoded(source, torch.float32) if is_weight(source) else source
        blocks.store(packed, length, source.expand(weight.shape))
        return weight
    rows = unpack(packed, length, torch.float32)
    values = rows if is_rows(weight) else strided(weight, rows)

    def exact(t):
        """Returns another operand, in fp32 if the weight's dtype could not hold the result."""
        if is_weight(t):
            return decoded(t, torch.float32)
        return t.float() if t.dtype == weight.dtype else t

    _run(
        lambda *others, **named: func(values if weight is given else [values], *others, **named),
        args[1:],
        kwargs,
        exact,
    )
    blocks.store(packed, length, rows)
    return weight


def _write_each(func, args, kwargs):
    """Runs an operator on lists, entry by entry, so that one weight is decoded at a time."""
    n = len(args[0])

    def entry(value, i):
        if isinstance(value, (list, tuple)):
            return value[i : i + 1] if len(value) == n else value
        # a vector holds a number for each entry
        return value[i : i + 1] if isinstance(value, torch.Tensor) and value.dim() else value

    for i in range(n):
        some = [entry(value, i) for value in args]
        named = {name: entry(value, i) for name, value in kwargs.items()}
        (_write if is_weight(args[0][i]) else _plainly)(func, some, named)


def _write_out(func, args, kwargs):
    """Writes a result into a weight that is given as `out`. Refuses to resize it."""
    weight = kwargs["out"]
    made = torch.empty(0, dtype=weight.dtype, device=weight.device)
    made = _plainly(func, args, {**kwargs, "out": made})
    if made.shape != weight.shape:
        raise RuntimeError(
            f"halfstep: 8-bit weights of shape {tuple(weight.shape)} cannot be the out= of"
            f" {func.overloadpacket.__name__}(), whose result has shape {tuple(made.shape)}; give"
            " a weight of that shape"
        )
    return _write(aten.copy_.default, (weight, made), {})


def _refuse_write(func, args, kwargs):
    """Raises RuntimeError. Of a TypeError, torch would make `p = p + x` in place of `p += x`."""
    name = func.overloadpacket.__name__
    if func.overloadpacket in _STEPS:
        raise RuntimeError(
            f"halfstep: {name} cannot step 8-bit weights, because what is less than half a code"
            " would be lost; use an optimizer of halfstep, such as halfstep.AdamW"
        )
    raise RuntimeError(
        f"halfstep: {name} is refused for 8-bit weights, because it may change more than their"
        " values, such as shape or memory: resize or transpose first, then quantize; take a view,"
        " such as weight.t(); or compute on weight.dequantize() and write by weight.copy_(values)"
    )


def _refuse_alias(func, args, kwargs):
    raise RuntimeError(
        f"halfstep: {func.overloadpacket.__name__} is refused for 8-bit weights, because its result"
        " shares memory with them in a way that halfstep does not know; call it on"
        " weight.dequantize(), or take weight.packed for the bytes"
    )


# ---- Ranks ---------------------------------------------------------------------------------------


def _collective(func, args, kwargs):
    """Moves the bytes of whole rows between ranks, or refuses."""
    name, weight = func.overloadpacket.__name__, args[0]
    if name in _GATHERS and is_rows(weight):
        return rows_like(weight, func(weight.packed, *args[1:], **kwargs))
    if name in _MOVES:
        return _run(func, args, kwargs, _bytes_of)
    raise TypeError(
        f"halfstep: {func} cannot take 8-bit weights; between ranks they can be sharded by rows"
        " (fully_shard) or replicated (DistributedDataParallel)"
    )


def _bytes_of(weight):
    if not is_weight(weight):
        return weight
    if not is_rows(weight):
        raise ValueError(
            f"halfstep: a part of shape {tuple(weight.shape)} of 8-bit weights cannot be sent,"
            f" because its rows are not whole ({weight.row_length} elements); send whole rows, or"
            " weight.dequantize()"
        )
    return weight.packed


# ---- Choice --------------------------------------------------------------------------------------

#: operators that are neither written values nor views alone
_HANDLERS = {
    aten.alias.default: _detach,
    aten.alias_copy.default: _decode_copy,
    aten.clone.default: _clone,
    aten.constant_pad_nd.default: _pad,
    aten._pin_memory.default: _moved_bytes,
    aten._to_copy.default: _to,
    aten.detach.default: _detach,
    aten.detach_.default: _detach_in_place,
    aten.embedding.default: _embedding,
    aten.empty_like.default: _empty,
    aten.is_pinned.default: _on_bytes,
    aten.is_set_to.default: _is_set_to,
    aten.new_zeros.default: _empty,
    aten.record_stream.default: _on_bytes,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
}


@functools.lru_cache(None)
def _handler(func):
    """Returns the function that runs an operator. Returns also the arguments that the operator
    writes or aliases, and the function for weights among them."""
    packet, arguments = func.overloadpacket, arguments_of(func)
    if func in _HANDLERS:
        return _HANDLERS[func], (), None
    if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
        return _collective, (), None
    marked = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info]
    if packet in WRITES:
        return _plainly, marked, _write
    if is_composite(func):
        return _decompose, (), None
    if packet in WRITES_OF_LISTS:
        return _plainly, marked, _write_each
    if [a.name for a in arguments if a.is_out] == ["out"]:
        return _plainly, marked, _write_out
    if any(a.alias_info and a.alias_info.is_write for a in arguments):
        return _plainly, marked, _refuse_write
    if marked:
        return _plainly, marked, _view if packet in VIEWS else _refuse_alias
    return (_shape_only if packet in _SHAPES else _plainly), (), None


def dispatch(func, args, kwargs):
    """Runs an operator of torch that was given weights."""
    handler, marked, with_weights = _handler(func)
    for i, name in marked:
        value = args[i] if i < len(args) else kwargs.get(name)
        if any(map(is_weight, value if isinstance(value, (list, tuple)) else [value])):
            return with_weights(func, args, kwargs)
    return handler(func, args, kwargs)
