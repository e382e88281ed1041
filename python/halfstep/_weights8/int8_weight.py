"""A tensor whose elements are 8-bit codes with scales.

All views of a weight are views of the same bytes (views.py). operators.py says
what operators of torch do with it. functions.py has the functions that ask for its memory.
"""

from typing import Optional

import torch
import torch.nn.functional as F

from .._tensors.parameters import PLAIN
from .._tensors.torch_private import PARAMETER_MARK, as_plain
from . import blocks, functions
from .operators import dispatch
from .views import COMPUTE, Cast, is_rows, parted, span, wrap


class Int8Weight(torch.Tensor):
    """A matrix of weights, stored as 8-bit codes with a scale for each 32 elements of a row.

    It looks like a tensor of `dtype`, the dtype that layers compute in. What reads it gets decoded
    values. Views are views of the same bytes. A write (`copy_()`, `w[3] = x`, `w *= 0.5`) is
    computed in fp32 and rounded to nearest. What asks for the memory of its elements is refused.

    format        its name, as optimizers take it
    row_length    elements of a row
    packed        the bytes, uint8 [rows, 34 * blocks]
    codes         the same memory, int8 [rows, blocks, 32]
    scales        the same memory, BF16 [rows, blocks]
    """

    __module__ = "halfstep.nn"  # by which pickles name it
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
        blocks.check_format(format)
        width = blocks.width(row_length)
        if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] != width:
            raise ValueError(
                f"halfstep: packed weights of rows of {row_length} elements are a uint8 tensor of"
                f" shape (rows, {width}), not {packed.dtype} of shape {tuple(packed.shape)}"
            )
        if dtype not in COMPUTE:
            raise ValueError(
                f"halfstep: layers cannot compute in {dtype} from {format}; they can in"
                f" {', '.join(map(str, COMPUTE))}"
            )
        shape = packed.shape[0], row_length
        return wrap(cls, packed.contiguous(), format, row_length, dtype, shape, (row_length, 1), 0)

    @property
    def packed(self) -> torch.Tensor:
        with as_plain():
            first, rows = span(self)
        held = self._stored
        return held if rows == held.shape[0] else held.narrow(0, first, rows)

    @property
    def codes(self) -> torch.Tensor:
        return blocks.codes(self.packed)

    @property
    def scales(self) -> torch.Tensor:
        return blocks.scales(self.packed)

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
        blocks.store(packed, length, values.detach())
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
        weight = self if dtype in (None, self.dtype) else Cast.apply(self, dtype)
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
            copied = memo[id(self)] = restore_weight(*parted(self.detach().clone()), *_marks(self))
            copied.grad = None if self.grad is None else self.grad.detach().clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return restore_weight, (*parted(self), *_marks(self))

    def __tensor_flatten__(self):
        functions.refuse_to_unwrap(self)
        return ["_stored"], (self.format, self.row_length, self.dtype, self.storage_offset())

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        *what, offset = context
        return wrap(cls, inner["_stored"], *what, size, stride, offset)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with as_plain():
            call = functions.calls.get(func)
            return call(func, *args, **kwargs or {}) if call else func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # Attributes of weights are read below, which torch would send to __torch_function__().
        with as_plain():
            return dispatch(func, args, kwargs or {})

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


def _marks(weight):
    """Returns whether a weight is a parameter and trains, and the attributes that others set."""
    own = ("_stored", "format", "row_length", PARAMETER_MARK)
    marks = {name: value for name, value in vars(weight).items() if name not in own}
    return isinstance(weight, torch.nn.Parameter), weight.requires_grad, marks


def restore_weight(stored, *what):
    """Returns the weight that was copied or pickled."""
    *what, is_parameter, trains, marks = what
    weight = wrap(Int8Weight, stored, *what)
    weight = torch.nn.Parameter(weight, trains) if is_parameter else weight.requires_grad_(trains)
    vars(weight).update(marks)
    return weight


restore_weight.__module__ = Int8Weight.__module__
if hasattr(torch.serialization, "add_safe_globals"):
    torch.serialization.add_safe_globals([restore_weight])
