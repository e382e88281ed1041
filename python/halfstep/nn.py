"""Weights of 8 bits in the layers of a model, trained without a copy in more bits.

    halfstep.nn.quantize_(model, "int8-ecc4")
    opt = halfstep.AdamW(model.named_parameters(), lr=1e-4, weights="int8-ecc4")

`quantize_()` makes the weight of each layer an `Int8Weight`, a tensor of codes and scales. Forward
and backward decode one layer at a time. Gradients are ordinary tensors. docs/python.md says what
works and what is refused.
"""

import json
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

import torch

from ._tensors.parameters import PLAIN
from ._tensors.sharding import is_dtensor, is_packed
from ._tensors.torch_private import after_join
from ._tensors.torch_public import follow
from ._weights8 import savers
from ._weights8.blocks import BLOCK, check_format, pack, unpack
from ._weights8.int8_weight import Int8Weight
from ._weights8.int8_weight import restore_weight as restore_weight

__all__ = ["Int8Weight", "pack", "packed_state_dict", "quantize_", "unpack", "unpacked_state_dict"]

#: the key of a file's metadata that tells which of its tensors are packed
METADATA = "halfstep.nn"


def quantize_(
    model: torch.nn.Module,
    format: str = "int8-ecc4",
    where: Optional[Callable[[torch.nn.Module, str], bool]] = None,
) -> torch.nn.Module:
    """Makes the weights of a model's layers `Int8Weight`s, in place and one after the other.

    Call it before the optimizer is made and before the model is sharded.

    format: "int8-ecc4" for anything, or "int8-sr" for fine-tunes of some thousand steps. The model
        has the same bytes with both. With "int8-ecc4" the optimizer keeps 4 more bits.
    where: says which weights, as a function of a module and its name. It is asked for each
        `nn.Linear` and `nn.Embedding`. Default: each `nn.Linear`.

    Weights with rows of fewer than 32 elements stay as they are. Nothing has changed if a weight is
    refused. Returns the model.
    """
    check_format(format)
    chosen = {}  # id of a parameter -> (parameter, modules, names)
    for name, module in model.named_modules():
        if not isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            continue
        if where(module, name) if where else isinstance(module, torch.nn.Linear):
            name = f"{name}.weight" if name else "weight"
            _check(module, name)
            weight = module.weight
            if weight.shape[1] >= BLOCK:
                found = chosen.setdefault(id(weight), (weight, [], []))
                found[1].append(module)
                found[2].append(name)
    _check_ties(model, chosen)
    while chosen:
        weight, modules, _ = chosen.pop(next(iter(chosen)))
        if isinstance(weight, Int8Weight):
            weight.format = format
            continue
        made = Int8Weight(pack(weight.detach()), format, weight.shape[1], weight.dtype)
        made = torch.nn.Parameter(made, weight.requires_grad)
        vars(made).update(vars(weight))
        for module in modules:
            module.weight = made
        del weight
    savers.prepare()
    return model


def _refuse(name, why, todo):
    raise ValueError(f"halfstep: {name!r} cannot be quantized: {why}; {todo}")


def _check(module, name):
    """Raises ValueError if the weight of a layer cannot be quantized."""
    weight = dict(module.named_parameters(recurse=False, remove_duplicate=False)).get("weight")
    leave = "leave it out by where="
    if weight is None:
        how = "it is computed from other tensors (a parametrization, weight_norm or pruning)"
        _refuse(name, how, f"remove that first, or {leave}")
    if isinstance(weight, Int8Weight):
        return
    if isinstance(weight, torch.nn.parameter.UninitializedTensorMixin):
        _refuse(name, "it is not initialized", "pass a batch through the lazy module first")
    if is_dtensor(weight):
        _refuse(name, "it is a DTensor", "quantize the model before it is sharded")
    if type(weight) is not torch.nn.Parameter or weight.layout != torch.strided:
        _refuse(name, f"it is a {type(weight).__name__} ({weight.layout})", leave)
    if weight.dtype not in PLAIN:
        _refuse(
            name, f"it is {weight.dtype}", f"convert it to a float of 16 or 32 bits, or {leave}"
        )
    if getattr(module, "max_norm", None) is not None or getattr(module, "sparse", False):
        _refuse(name, "its embedding has max_norm or sparse=True", f"set neither, or {leave}")


def _check_ties(model, chosen):
    """Raises ValueError if a weight has a second name whose module is not to be quantized."""
    places = {_place(weight): names for weight, _, names in chosen.values()}
    for name, other in model.named_parameters(remove_duplicate=False):
        names = places.get(_place(other))
        if names and name not in names:
            _refuse(
                names[0],
                f"it is tied with {name!r}",
                "choose both by where=lambda module, name: ..., or neither of them, or untie them",
            )


def _place(weight):
    """Returns what two names of one tensor have in common."""
    if isinstance(weight, Int8Weight):
        weight = weight.packed
    ordinary = type(weight) in (torch.Tensor, torch.nn.Parameter)
    has_memory = ordinary and weight.layout == torch.strided and not weight.is_meta
    return has_memory and weight.data_ptr() or id(weight)


def _send(wrapper, source):
    """Makes all ranks of DistributedDataParallel have the bytes of one of its ranks."""
    group = wrapper.process_group
    if torch.distributed.get_world_size(group) > 1:
        source = torch.distributed.get_global_rank(group, source)
        for name, weight in wrapper.module.named_parameters():
            if isinstance(weight, Int8Weight) and name not in wrapper.parameters_to_ignore:
                torch.distributed.broadcast(weight.packed, source, group=group)


# DistributedDataParallel sends decoded weights by itself, which other ranks round again: when it
# begins, and at the end of join(), when the others get what the last rank has.


def _begin(wrapper, made, /, *_, init_sync=True, **__):
    if init_sync:
        _send(wrapper, 0)
    return made


follow(torch.nn.parallel.DistributedDataParallel, "__init__", _begin)
after_join(_send)


#: torch's own optimizers, without those that others derive from them
_OF_TORCH = {cls for cls in vars(torch.optim).values() if isinstance(cls, type)}


def _refuse_optimizer(optimizer, _, /, *__, **___):
    """Raises ValueError if an optimizer of torch was given 8-bit weights to step."""
    if type(optimizer) in _OF_TORCH and any(
        p.requires_grad and is_packed(p) for p in optimizer.param_groups[-1]["params"]
    ):
        optimizer.param_groups.pop()
        name = type(optimizer).__name__
        raise ValueError(
            f"halfstep: {name} of torch cannot step 8-bit weights, because changes of less than"
            " half a code would be lost; use an optimizer of halfstep, such as halfstep.AdamW, or"
            " freeze them (requires_grad_(False))"
        )


follow(torch.optim.Optimizer, "add_param_group", _refuse_optimizer)


# ---- Files ---------------------------------------------------------------------------------------


def packed_state_dict(model: torch.nn.Module) -> Tuple[Dict[str, torch.Tensor], Dict[str, str]]:
    """Returns `model.state_dict()` as ordinary tensors, and the metadata that belongs to them.
    Quantized weights are their packed bytes.

        tensors, metadata = halfstep.nn.packed_state_dict(model)
        safetensors.torch.save_file(tensors, "model.safetensors", metadata)
    """
    tensors, packed = {}, {}
    for name, value in model.state_dict().items():
        savers.refuse_shards(name, value)
        if isinstance(value, Int8Weight):
            packed[name] = {"format": value.format, "columns": value.row_length}
            value = value.packed
        tensors[name] = value
    return tensors, {METADATA: json.dumps(packed, sort_keys=True)}


def unpacked_state_dict(
    tensors: Mapping[str, torch.Tensor],
    metadata: Optional[Mapping[str, str]],
    dtype: torch.dtype = torch.bfloat16,
) -> Dict[str, torch.Tensor]:
    """Returns the state dictionary that `packed_state_dict()` was given, or that a file of
    `halfstep convert` holds. `load_state_dict()` takes it, of quantized models and of others.
    `dtype` is what layers compute in if they take the weights themselves (`assign=True`).

        with safetensors.safe_open("model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            model.load_state_dict(halfstep.nn.unpacked_state_dict(tensors, file.metadata()))
    """
    state: Dict[str, Any] = dict(tensors)
    for name, what in json.loads((metadata or {}).get(METADATA, "{}")).items():
        if name not in state:
            raise ValueError(
                f"halfstep: the metadata describe {name!r}, which is not among the tensors; read"
                " both from one file"
            )
        try:
            state[name] = Int8Weight(state[name], what["format"], what["columns"], dtype)
        except ValueError as error:
            raise ValueError(f"{error}: tensor {name!r}") from None
    return state
