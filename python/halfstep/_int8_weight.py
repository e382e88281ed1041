"""A tensor whose elements are 8-bit codes with scales, and the operators of torch on it.

All views of a weight are views of the same bytes (_packed_views.py). An operator that is not named
here runs on decoded values, which it alone keeps alive.
"""

import functools
from typing import Optional

import torch
import torch.nn.functional as F
from torch.utils import _python_dispatch

from . import _packed
from ._packed import unpack
from ._packed_views import decoded, is_rows, like, rows_like, span, wrap
from ._parameters import PLAIN, overlaps
from ._torch import VERSION

#: operators that write given values into a weight
_WRITES = {
    "copy_", "fill_", "index_copy_", "index_fill_", "index_put_", "masked_fill_", "normal_",
    "uniform_", "zero_",
}  # fmt: skip
#: collectives that return the bytes of all ranks, and those that move bytes between tensors
_GATHERS = {"_wrap_tensor_autograd", "all_gather_into_tensor", "wait_tensor"}
_MOVES = {"_allgather_base_", "allgather_", "broadcast_", "recv_", "scatter_", "send"}

aten = torch.ops.aten


class Int8Weight(torch.Tensor):
    """A matrix of weights, stored as 8-bit codes with a scale for each 32 elements of a row.

    It looks like a tensor of `dtype`, the dtype that layers compute in. What reads it gets decoded
    values. Views are views of the same bytes. A write of given values (`copy_()`, `zero_()`,
    `w[3] = x`) converts them to nearest. Arithmetic in place raises TypeError.

    format        its name, as optimizers take it
    row_length    elements of a row
    packed        the bytes, uint8 [rows, 34 * blocks]
    codes         the same memory, int8 [rows, blocks, 32]
    scales        the same memory, BF16 [rows, blocks]
    """

    format: str
    row_length: int

    @staticmethod
    def __new__(
        cls,
        packed: torch.Tensor,
        format: str,
        row_length: int,
        dtype: torch.dtype = torch.bfloat16,
    ):
        _packed.check_format(format)
        width = _packed.width(row_length)
        if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] != width:
            raise ValueError(
                f"halfstep: packed weights of rows of {row_length} elements are a uint8 tensor of"
                f" shape (rows, {width}), not {packed.dtype} of shape {tuple(packed.shape)}"
            )
        if dtype not in PLAIN:
            raise ValueError(
                f"halfstep: layers cannot compute in {dtype} from {format}; they can in"
                f" {', '.join(map(str, PLAIN))}"
            )
        shape = packed.shape[0], row_length
        return wrap(cls, packed.contiguous(), format, row_length, dtype, shape, (row_length, 1), 0)

    @property
    def packed(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            first, rows = span(self)
        held = self._stored
        return held if rows == held.shape[0] else held.narrow(0, first, rows)

    @property
    def codes(self) -> torch.Tensor:
        return _packed.codes(self.packed)

    @property
    def scales(self) -> torch.Tensor:
        return _packed.scales(self.packed)

    @property
    def data(self) -> "Int8Weight":
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, weight):
        if not isinstance(weight, Int8Weight):
            weight = self._resized(weight)
        torch.Tensor.data.__set__(self, weight)
        self._stored, self.format = weight._stored, weight.format
        self.row_length = weight.row_length

    def _resized(self, values):
        """Returns an ordinary matrix of another number of rows as a weight of this kind. Blocks
        whose values stay the same keep their bytes. Such a matrix comes from a resized embedding;
        one of the same shape may be a view that somebody else goes on writing."""
        rows, length = len(self.packed), self.row_length
        fits = values.dim() == 2 and values.shape[1] == length and values.dtype in PLAIN
        if not fits or len(values) == rows or not is_rows(self):
            raise TypeError(
                f"halfstep: data of 8-bit weights cannot be a {type(values).__name__} of shape"
                f" {tuple(values.shape)}, because it would share no memory with them; write its"
                " values with copy_(), make a new Parameter, or call quantize_() after what assigns"
                " data"
            )
        packed = self.packed[: len(values)].to(values.device)
        packed = F.pad(packed, (0, 0, 0, len(values) - len(packed))).clone()
        _packed.store(packed, length, values.detach())
        return type(self)(packed, self.format, length, self.dtype)

    @property
    def _fsdp_flattened(self):
        """Refuses FSDP1, which asks for this before it copies decoded values into its buffers."""
        raise TypeError(
            "halfstep: FullyShardedDataParallel would keep decoded copies of 8-bit weights and"
            " train those; shard the model by fully_shard() instead"
        )

    def dequantize(self, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        """Returns the weights as an ordinary tensor, in this weight's dtype by default. float32
        holds them exactly. Gradients flow back."""
        weight = self if dtype in (None, self.dtype) else _Cast.apply(self, dtype)
        return torch.ops.aten.alias_copy(weight)

    def __repr__(self, *, tensor_contents=None):
        needs = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"{type(self).__name__}({self.format}, shape={tuple(self.shape)}, dtype={self.dtype},"
            f" device={str(self.device)!r}{needs})"
        )

    def __deepcopy__(self, memo):
        if not self.is_leaf:
            raise RuntimeError("halfstep: only weights that are leaves of the graph can be copied")
        if id(self) not in memo:
            copied = memo[id(self)] = _restore(*_parted(self.detach().clone()), *_marks(self))
            copied.grad = None if self.grad is None else self.grad.detach().clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return _restore, (*_parted(self), *_marks(self))

    def __tensor_flatten__(self):
        return ["_stored"], (self.format, self.row_length, self.dtype, self.storage_offset())

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        *what, offset = context
        return wrap(cls, inner["_stored"], *what, size, stride, offset)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            args, kwargs = _autocast(*args, **(kwargs or {})), {}
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # Attributes of weights are read below, which torch would send to __torch_function__().
        with torch._C.DisableTorchFunctionSubclass():
            return _dispatch(func, args, kwargs or {})

    def _stable_hash_for_caching(self):
        """Returns what a compiled graph depends on, for the cache of torch.compile."""
        held = self._stored
        return repr((self.__tensor_flatten__(), self.shape, self.stride(), self.requires_grad)) + (
            repr((held.shape, held.device))
        )

    # ---- fully_shard -----------------------------------------------------------------------------
    # torch asks tensors with more arguments for inputs of the shard's own shape, which bytes of
    # blocks do not have.

    def fsdp_pre_all_gather(self, mesh):
        """Returns what ranks send: all stored rows, which are as many on each rank."""
        return (self._stored,), (self.format, self.row_length)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        """Returns the weight of all ranks. From the second call on, `out` has it already, because
        its memory is that of `outputs`."""
        if out is None:
            return type(self)(outputs[0], *metadata, param_dtype), ()
        return None


def _parted(weight):
    """Returns what _restore() makes a weight of."""
    offset = weight.storage_offset() - span(weight)[0] * weight.row_length
    what = weight.packed, weight.format, weight.row_length, weight.dtype
    return (*what, tuple(weight.shape), weight.stride(), offset)


def _marks(weight):
    """Returns whether a weight is a parameter and trains, and the attributes that others set."""
    own = ("_stored", "format", "row_length", "_is_param")
    marks = {name: value for name, value in vars(weight).items() if name not in own}
    return isinstance(weight, torch.nn.Parameter), weight.requires_grad, marks


def _restore(stored, *what):
    """Returns the weight that was copied or pickled."""
    *what, is_parameter, trains, marks = what
    weight = wrap(Int8Weight, stored, *what)
    weight = torch.nn.Parameter(weight, trains) if is_parameter else weight.requires_grad_(trains)
    vars(weight).update(marks)
    return weight


class _Cast(torch.autograd.Function):
    """Returns the same bytes as a weight of another dtype."""

    @staticmethod
    def forward(ctx, weight, dtype):
        ctx.dtype = weight.dtype
        return like(weight, dtype=dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype), None


def _autocast(input, weight, bias=None):
    """Returns the arguments of a linear layer as autocast wants them. Autocast itself would keep a
    copy of the weight."""
    kind = input.device.type
    if VERSION >= (2, 4) and isinstance(weight, Int8Weight) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        if dtype in PLAIN and dtype != weight.dtype:
            weight = _Cast.apply(weight, dtype)
    return input, weight, bias


# ---- Operators -----------------------------------------------------------------------------------


def _aliased(func, args, kwargs, out):
    """Returns the result of a view operator, which shares its weight's storage."""
    if hasattr(torch, "_functionalize_unsafe_set"):
        return _python_dispatch.return_and_correct_aliasing(func, args, kwargs, out)
    return out  # torch 2.2 would give it the strides of a contiguous tensor, 2.1 has no function


def _view(func, args, kwargs):
    """Returns views of a weight, whose strides torch works out on a tensor without memory. Values
    that are seen as another dtype are a copy."""
    weight = args[0]
    if not isinstance(weight, Int8Weight):
        return _plainly(func, args, kwargs)
    size = len(weight._stored) * weight.row_length
    shadow = torch.empty(size, dtype=weight.dtype, device="meta")
    shadow = shadow.as_strided(weight.shape, weight.stride(), weight.storage_offset())
    views = func(shadow, *args[1:], **kwargs)
    if isinstance(views, torch.Tensor):
        if views.dtype != weight.dtype:
            return _plainly(func, args, kwargs)
        return _aliased(func, args, kwargs, like(weight, view=views))
    views = type(views)(like(weight, view=view) for view in views)
    return _aliased(func, args, kwargs, views)


def _detach(func, args, kwargs):
    return _aliased(func, args, kwargs, like(args[0]))


def _clone(func, args, kwargs):
    """Returns a copy of the rows that a weight has, or of decoded values if their order changes."""
    weight = args[0]
    if not _keeps_order(weight, kwargs):
        return _plainly(func, args, kwargs)
    packed, *what = _parted(weight)
    return wrap(type(weight), packed.clone(), *what)


def _to(func, args, kwargs):
    """Returns a copy on another device or with another dtype. It has all stored rows, because those
    behind a shard are there so that each rank sends as much."""
    weight, dtype = args[0], kwargs.pop("dtype", None) or args[0].dtype
    if dtype not in PLAIN or not _keeps_order(weight, kwargs):
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
    if len(size) != 2 or size[1] != weight.row_length or dtype not in PLAIN:
        return _shape_only(func, args, {**kwargs, "dtype": dtype})
    device = kwargs.get("device") or weight.device
    stored = torch.zeros((size[0], weight._stored.shape[1]), dtype=torch.uint8, device=device)
    return rows_like(weight, stored, dtype)


def _write(func, args, kwargs):
    """Writes values into a weight, or refuses."""
    weight, name = args[0], func.overloadpacket.__name__
    if not isinstance(weight, Int8Weight) or name not in _WRITES:
        raise TypeError(
            f"halfstep: {name} would change 8-bit weights in place, round each to nearest and lose"
            " what is less than half a code. Step them with an optimizer of halfstep, or write"
            " values that you computed: weight.copy_(values)"
        )
    packed, length = weight.packed, weight.row_length
    source = args[1] if name == "copy_" else None
    if isinstance(source, Int8Weight) and is_rows(source) and source.shape == weight.shape:
        if is_rows(weight):
            packed.copy_(source.packed, *args[2:], **kwargs)
            return weight
    if source is not None and is_rows(weight):
        source = decoded(source, torch.float32) if isinstance(source, Int8Weight) else source
        _packed.store(packed, length, source.expand(weight.shape))
        return weight
    rows = unpack(packed, length, torch.float32)
    offset = weight.storage_offset() - span(weight)[0] * length
    _plainly(func, (rows.as_strided(weight.shape, weight.stride(), offset), *args[1:]), kwargs)
    _packed.store(packed, length, rows)
    return weight


def _embedding(func, args, kwargs):
    """Looks rows up and decodes only those."""
    weight, indices = args[0], args[1]
    if not isinstance(weight, Int8Weight) or not is_rows(weight):
        return _plainly(func, args, kwargs)
    return unpack(weight.packed[indices], weight.row_length, weight.dtype)


def _run(func, args, kwargs, change):
    """Runs an operator on what a function makes of its weights."""

    def changed(value):
        if isinstance(value, (list, tuple)):
            return type(value)(map(changed, value))
        return change(value) if isinstance(value, Int8Weight) else value

    return func(*map(changed, args), **{name: changed(value) for name, value in kwargs.items()})


def _plainly(func, args, kwargs):
    """Runs an operator on decoded weights."""
    dtype = args[0].dtype if func is aten.copy_.default and args[0].dtype in PLAIN else None
    return _run(func, args, kwargs, functools.partial(decoded, dtype=dtype))


def _shape_only(func, args, kwargs):
    """Runs an operator that only asks for shape, strides, dtype and device of its first tensor."""
    first = args[0]
    held = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device=first.device)
    return func(held, *args[1:], **kwargs)


def _decode_copy(func, args, kwargs):
    return decoded(args[0])


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
    if not is_rows(weight):
        raise ValueError(
            f"halfstep: a part of shape {tuple(weight.shape)} of 8-bit weights cannot be sent,"
            f" because its rows are not whole ({weight.row_length} elements); send whole rows, or"
            " weight.dequantize()"
        )
    return weight.packed


def _split(func, args, kwargs):
    """Returns a weight in parts of rows."""
    weight, dim = args[0], (args[2] if len(args) > 2 else kwargs.get("dim", 0))
    if weight.dim() != 2 or weight.stride(dim) < weight.row_length:
        raise ValueError(
            f"halfstep: 8-bit weights of shape {tuple(weight.shape)} cannot be split along"
            f" dimension {dim}, because scales belong to {_packed.BLOCK} elements of a row: shard"
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


def _decompose(func, args, kwargs):
    return func.decompose(*args, **kwargs)


_HANDLERS = {
    aten.alias.default: _detach,
    aten.alias_copy.default: _decode_copy,
    aten.clone.default: _clone,
    aten.constant_pad_nd.default: _pad,
    aten._to_copy.default: _to,
    aten.detach.default: _detach,
    aten.embedding.default: _embedding,
    aten.empty_like.default: _empty,
    aten.new_zeros.default: _empty,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
}


@functools.lru_cache(None)
def _handler(func):
    """Returns the function that runs an operator, and the names of arguments that it writes."""
    name, key = func.overloadpacket.__name__, "CompositeImplicitAutograd"
    arguments = func._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
    if func in _HANDLERS:
        return _HANDLERS[func], ()
    if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
        return _collective, ()
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
        return _decompose, ()
    if written:
        return _plainly, [(i, arguments[i].name) for i in written]
    if any(a.alias_info for a in arguments[:1]):
        return _view, ()
    if name.endswith("_like") or name.startswith("new_"):
        return _shape_only, ()
    return _plainly, ()


def _dispatch(func, args, kwargs):
    """Runs an operator of torch that was given weights."""
    handler, written = _handler(func)
    for i, name in written:
        value = args[i] if i < len(args) else kwargs.get(name)
        if any(isinstance(x, Int8Weight) for x in (value if isinstance(value, list) else [value])):
            return _write(func, args, kwargs)
    return handler(func, args, kwargs)


if hasattr(torch.serialization, "add_safe_globals"):
    torch.serialization.add_safe_globals([_restore])
