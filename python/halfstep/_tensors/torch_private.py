"""The private names of torch: one function for each, through which this package uses them.

A comment names them as `name` in the file of torch that it answers to, since the first torch of
tests/packages/matrix that has them there. All were seen up to torch 2.15. A name that is gone is an
ImportError of one sentence where it is needed. Comments say if something else happens instead.
tests/python/steps/test_torch_private.py holds this, and finds such names in other modules.
"""

import functools
import re
from typing import Any, Callable, TypeVar

import torch

from .torch_public import follow

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _need(owner, name, why, *_):
    """Returns an attribute of torch's. Raises ImportError if there is none."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise ImportError(
            f"halfstep: torch {torch.__version__} has no {name}, but {why}; install a torch from"
            " 2.1 to 2.15"
        ) from None


def _later(owner, name, why):
    """Returns an attribute of torch's, or a function that raises ImportError."""
    return getattr(owner, name, None) or functools.partial(_need, owner, name, why)


# ---- Tensors -------------------------------------------------------------------------------------

#: returns how often torch has counted a write to a tensor. `_version` in torch/overrides.py since
#: 2.1
version = getattr(
    getattr(torch.Tensor, "_version", None),
    "__get__",
    functools.partial(_need, torch.Tensor, "_version", "it tells who wrote a weight"),
)

#: returns True for a tensor of zeros without memory. `_is_zerotensor` in torch/overrides.py since
#: 2.1. Without it there is False. Such a tensor is then refused because it has no memory.
is_zerotensor = getattr(torch.Tensor, "_is_zerotensor", lambda tensor: False)


def gradient_hooks(p):
    """Returns the hooks that run when the gradient of a parameter is complete.
    `_post_accumulate_grad_hooks` in torch/_tensor.py since 2.1."""
    name = "_post_accumulate_grad_hooks"
    return _need(p, name, "gradient release has to see the hooks of others") or {}


_PACKED = "8-bit weights are tensors that rest on it"

#: a context in which functions get 8-bit weights as torch's own tensors.
#: `DisableTorchFunctionSubclass` in torch/_C/__init__.pyi since 2.1
as_plain = _later(torch._C, "DisableTorchFunctionSubclass", _PACKED)

#: makes a tensor of a subclass that has no memory. `_make_wrapper_subclass` in torch/overrides.py
#: since 2.1
make_wrapper = _later(torch.Tensor, "_make_wrapper_subclass", _PACKED)

#: makes torch's C++ code raise where it asks a wrapper for memory.
#: `_set_throw_on_mutable_data_ptr` in torch/_C/__init__.pyi since 2.6. Without it nothing is done,
#: and the functions of functions.py are still refused.
guard_memory = getattr(torch._C, "_set_throw_on_mutable_data_ptr", lambda wrapper: None)

#: torch's method for a storage that has a dtype. `_typed_storage` in torch/_tensor.py since 2.1.
#: Without it there is None, because torch has no such method to call.
typed_storage = getattr(torch.Tensor, "_typed_storage", None)

#: the attribute of parameters of a subclass. `_is_param` in torch/nn/parameter.py since 2.1.
#: Without it no tensor has this attribute.
PARAMETER_MARK = "_is_param"


def with_aliasing(func, args, kwargs, out):
    """Returns the result of a view operator, which shares its weight's storage.
    `_functionalize_unsafe_set` in torch/utils/_python_dispatch.py since 2.6. Without it the result
    stays as it is, because `_python_dispatch` of torch 2.2 would give it other strides."""
    if hasattr(torch, "_functionalize_unsafe_set"):
        return torch.utils._python_dispatch.return_and_correct_aliasing(func, args, kwargs, out)
    return out


def arguments_of(operator):
    """Returns the arguments of an operator. `_schema` in torch/_ops.py since 2.1."""
    return _need(operator, "_schema", "it tells what an operator does to 8-bit weights").arguments


def is_composite(operator):
    """Returns True for an operator that is made of others. `_dispatch_has_kernel_for_dispatch_key`
    in torch/_C/__init__.pyi since 2.1."""
    name = "_dispatch_has_kernel_for_dispatch_key"
    has = _need(torch._C, name, "it tells what an operator does to 8-bit weights")
    return has(operator.name(), "CompositeImplicitAutograd")


# ---- The compiler --------------------------------------------------------------------------------

# `_disable_dynamo` in torch/__init__.py since 2.1. Without it the public function is taken, which
# imports the compiler.
_disable = getattr(torch, "_disable_dynamo", None) or torch.compiler.disable

#: returns True where TorchDynamo traces the caller. `is_compiling` in torch/_utils.py since 2.1,
#: for torch 2.1 and 2.2. Later ones have a public function.
is_compiling = (
    getattr(torch.compiler, "is_dynamo_compiling", None)
    or getattr(torch.compiler, "is_compiling", None)
    or _later(torch._utils, "is_compiling", "it tells if a step is compiled")
)

# `TensorGuards` in torch/_dynamo/variables/builder.py since 2.6, and in torch/_dynamo/guards.py of
# torch 2.1 and 2.2. Without it there is None, and steps compare attributes (_step/guards.py).
try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None


def no_dynamo(function: _Function) -> _Function:
    """Keeps TorchDynamo out of a function."""
    return _disable(function)


def makes_fake(frame):
    """Returns True for a function of torch that makes fake memory of the size of a tensor's.
    `meta_utils` in torch/_subclasses/fake_tensor.py since 2.1. Without it torch.compile() raises
    RuntimeError, because memory of two devices would meet."""
    return frame.f_globals.get("__name__") == "torch._subclasses.meta_utils"


def unwraps(frame):
    """Returns True for a function of torch that makes parameters of what a subclass wraps.
    `subclass_parametrization` in torch/export/exported_program.py since 2.13. Torch 2.6 has it in
    torch/_functorch/_aot_autograd. Without it torch raises RuntimeError, because bytes cannot
    train."""
    name = frame.f_globals.get("__name__", "")
    return name == "torch._functorch._aot_autograd.subclass_parametrization"


# ---- DTensors and FSDP ---------------------------------------------------------------------------


def local_part(dtensor):
    """Returns the tensor of this process. `_local_tensor` in torch/distributed/tensor/_api.py since
    2.6. Without it to_local() is called."""
    try:
        return dtensor._local_tensor
    except AttributeError:
        with torch.no_grad():
            return dtensor.to_local()


def put_local_part(dtensor, tensor):
    """Gives a DTensor another tensor of this process, on any device. from_local() would bring it to
    the mesh's device. `_local_tensor` in torch/distributed/tensor/_api.py since 2.6."""
    _need(dtensor, "_local_tensor", "8-bit weights and states of a DTensor are put there")
    dtensor._local_tensor = tensor


class _Elsewhere:
    """A mesh as another of its ranks sees it."""

    def __init__(self, mesh, rank):
        self._mesh, self._place = mesh, (mesh.mesh == rank).nonzero()[0].tolist()

    def __getattr__(self, name):
        return getattr(self._mesh, name)

    def get_coordinate(self):
        return self._place

    def _sym_get_coordinate(self, dim):
        return self._place[dim]


def box_of(shape, mesh, placements, rank=None):
    """Returns the shape of the part of a DTensor that this rank holds, or another rank, and where
    it begins. `compute_local_shape_and_global_offset` in torch/distributed/tensor/_utils.py since
    2.6, which calls `_sym_get_coordinate` in torch/distributed/device_mesh.py since 2.13."""
    try:
        from torch.distributed.tensor import _utils
    except ImportError:
        _utils = None
    name, why = "compute_local_shape_and_global_offset", "it tells which part of a DTensor is here"
    mesh = mesh if rank is None else _Elsewhere(mesh, rank)
    return _need(_utils, name, why)(shape, mesh, placements)


_FLAT = "it tells which part of an FSDP1 buffer is here"


def is_cut(buffer):
    """Returns True if this process holds a part of an FSDP1 buffer. `_unpadded_unsharded_size` in
    torch/distributed/fsdp/_flat_param.py since 2.2, and in flat_param.py of torch 2.1."""
    return _need(buffer, "_unpadded_unsharded_size", _FLAT).numel() != buffer.numel()


def is_in_buffer(p):
    """Returns True for an FSDP1 buffer, and for a parameter whose memory is in one.
    `_fsdp_flattened` in torch/distributed/fsdp/_common_utils.py since 2.1. Without it returns
    False."""
    return bool(vars(p).get("_fsdp_flattened"))


def parts_of(buffer):
    """Yields name, elements and start of each parameter in an FSDP1 buffer that is cut. The start
    is where the part here begins, or None if no part is here. `_fqns`, `_numels` and
    `_shard_param_infos` in torch/distributed/fsdp/_flat_param.py since 2.2, and in flat_param.py of
    torch 2.1."""
    names = ("_fqns", "_numels", "_shard_param_infos")
    for fqn, numel, info in zip(*(_need(buffer, name, _FLAT) for name in names)):
        yield fqn, numel, (info.intra_param_start_idx or 0) if info.in_shard else None


def after_join(then):
    """Makes each end of DistributedDataParallel's join() go on with then(wrapper, rank), where all
    ranks take the model of this rank. `_sync_final_model` and `_authoritative_rank` in
    torch/nn/parallel/distributed.py since 2.1. Without them join() is refused for 8-bit weights."""
    cls = torch.nn.parallel.DistributedDataParallel
    whole, rank = "_sync_final_model", "_authoritative_rank"
    why = "8-bit weights need it at the end of join()"

    def joined(wrapper, found, /, *_, **__):
        then(wrapper, _need(wrapper, rank, why))
        return found

    def refuse(wrapper, found, /, *_, **__):
        if any(hasattr(type(p), "packed") for p in wrapper.parameters()):
            _need(cls, whole, why)
        return found

    follow(cls, *((whole, joined) if hasattr(cls, whole) else ("join", refuse)))


# ---- Modules -------------------------------------------------------------------------------------


def apply_to_tensors(module, function, recurse=True):
    """Puts function(tensor) in the place of each tensor of a module, as torch does. `_apply` in
    torch/nn/modules/module.py since 2.1."""
    return _need(module, "_apply", "it replaces the tensors of a module")(function, recurse)


def after_state_dict(module, hook):
    """Runs hook(module, state, prefix, metadata) after a module's state_dict(). Returns a handle.
    `_register_state_dict_hook` in torch/nn/modules/module.py since 2.1, for torch 2.1 to 2.4. Later
    ones have a public function."""
    register = getattr(module, "register_state_dict_post_hook", None)
    why = "savers decode 8-bit weights in it"
    return (register or _need(module, "_register_state_dict_hook", why))(hook)


#: parts that wrappers add to names. `_orig_mod` in torch/_dynamo/eval_frame.py since 2.1,
#: `_fsdp_wrapped_module` in torch/distributed/fsdp/_common_utils.py since 2.1,
#: `_checkpoint_wrapped_module` in torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py
#: since 2.1. Without them names keep the parts of other wrappers, as users see them.
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


# ---- Optimizers ----------------------------------------------------------------------------------


def notes_its_calls(step: _Function) -> _Function:
    """Says of an optimizer's step() that it calls note_step(). A scheduler otherwise puts a
    function around it that torch.compile() refuses to trace. `_wrapped_by_lr_sched` in
    torch/optim/lr_scheduler.py since 2.6. Without it a scheduler puts that function around it."""
    setattr(step, "_wrapped_by_lr_sched", True)
    return step


def note_step(optimizer):
    """Notes that an optimizer has made a step, for schedulers. `_opt_called` in
    torch/optim/lr_scheduler.py since 2.6. Without it a scheduler looks elsewhere, and may warn."""
    optimizer._opt_called = True


def is_transient(name):
    """Returns True for an attribute of optimizers that pickles leave out. `_zero_grad_profile_name`
    in torch/optim/optimizer.py since 2.1, `_opt_called` in torch/optim/lr_scheduler.py since 2.6,
    and hooks. Without them pickles have all attributes."""
    own = name in ("_zero_grad_profile_name", "_opt_called")
    return own or re.fullmatch(r"_optimizer_\w+_hooks", name) is not None


def backward_pass():
    """Returns the number of the running backward pass, or -1 if there is none.
    `_current_graph_task_id` in torch/_C/__init__.pyi since 2.1. Without it there is None."""
    ask = getattr(torch._C, "_current_graph_task_id", None)
    return None if ask is None else ask()


def after_backward(call):
    """Runs call() when the running backward pass has ended. `_execution_engine` in
    torch/autograd/variable.py since 2.1. Without it nothing is done, and a pass counts until
    step() or zero_grad()."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is not None:
        engine.queue_callback(call)


# ---- Files ---------------------------------------------------------------------------------------

#: modules and classes that the index of torch.distributed.checkpoint names. `_get_layout` in
#: torch/serialization.py since 2.1, `_StorageInfo` in torch/distributed/checkpoint/filesystem.py
#: since 2.1, `_MEM_FORMAT_ENCODING` in torch/distributed/checkpoint/metadata.py since 2.6. A file
#: that names others is refused.
INDEX = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


# ---- Steps without memory ------------------------------------------------------------------------

# `FakeTensorMode`, `DataDependentOutputException`, `DynamicOutputShapeException`,
# `UnsupportedFakeTensorException` and `UnsupportedOperatorException` in
# torch/_subclasses/fake_tensor.py since 2.1, `TorchDispatchMode` in
# torch/utils/_python_dispatch.py since 2.1. Without them halfstep.fit() raises RuntimeError, and
# nothing else is lost.
try:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    from torch.utils._python_dispatch import TorchDispatchMode

    #: what torch raises where a step asks for the value of a tensor without memory. It raises
    #: UnsupportedOperatorException for an operator of others that knows no such tensors
    NO_VALUE = (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
    )
except ImportError:
    FakeTensorMode, TorchDispatchMode, NO_VALUE = None, object, ()  # type: ignore[assignment, misc]
    UnsupportedOperatorException = ()  # type: ignore[assignment, misc]


def has_blocks(dtype):
    """Returns True if convolutions of a dtype run in oneDNN on this processor.
    `_is_mkldnn_bf16_supported` and `_is_mkldnn_fp16_supported` in torch/_inductor/utils.py
    since 2.13. Without them only those of fp32 do."""
    if dtype == torch.bfloat16:
        return getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)()
    if dtype == torch.float16:
        return getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", bool)()
    return True


# ---- Names that torch asks of objects of this package --------------------------------------------

#: the name of a class's own method or property -> the files that have it.
#: `_fsdp_flattened` in torch/distributed/fsdp/_common_utils.py since 2.1.
#: `_stable_hash_for_caching` in torch/_functorch/_aot_autograd/autograd_cache.py since 2.13.
#: Without it torch hashes what a weight is flattened to.
#: `_step_supports_amp_scaling` in torch/amp/grad_scaler.py since 2.6, and in
#: torch/cuda/amp/grad_scaler.py of torch 2.1 and 2.2.
#: `_save_to_state_dict` and `_load_from_state_dict` in torch/nn/modules/module.py since 2.1.
#: check_module() says if they are gone.
ASKED = {
    "_fsdp_flattened": ("_weights8/int8_weight.py",),
    "_stable_hash_for_caching": ("_weights8/int8_weight.py",),
    "_step_supports_amp_scaling": ("optimizer.py", "offload.py"),
    "_save_to_state_dict": ("ema.py",),
    "_load_from_state_dict": ("ema.py",),
}


def check_module():
    """Raises ImportError if torch.nn.Module does not save and load by the methods in ASKED."""
    for name in ("_save_to_state_dict", "_load_from_state_dict"):
        _need(torch.nn.Module, name, "an EMA drops wrong residuals there")
