"""Made by scripts/generate.py from the library's table of rules."""
import os
from typing import Any, Dict, Iterable, List, Optional, Tuple, Union

import torch

from . import compat as compat
from ._abi import HalfstepError as HalfstepError
from .accumulate import GradientAccumulator as GradientAccumulator
from .ema import EMA as EMA
from .full_precision import full_precision_state_dict as full_precision_state_dict
from .offload import CPUOffload as CPUOffload
from .optimizer import Optimizer as Optimizer, Params as Params, name_parameters as name_parameters
from .plan import plan as plan
from .rules import optimizer as optimizer
from .streaming import StateStreaming as StateStreaming

__version__: str

class SGD(Optimizer):
    """stochastic gradient descent, with momentum (Polyak 1964; Nesterov 1983).

    Rule "sgd" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        momentum                 factor of the momentum buffer; 0 needs no state
        dampening                1 - dampening weighs the gradient, from the second step on
        weight_decay             coefficient of the decay mode
        nesterov                 1: look ahead
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        cautious                 1: no element moves against its gradient (Liang et al. 2024)
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.001, momentum: float = 0.0, dampening:
                 float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, *, maximize: bool = False,
                 centralize: float = 0.0, cautious: bool = False, weights: Optional[str] = None, states:
                 Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0, clip_norm: float =
                 0.0, clip: Optional[str] = None, scan: Optional[str] = None, generator: Optional[str] = None, seed:
                 Optional[int] = None, threads: int = 0, gradient_release: bool = False, optimizer_accumulation:
                 bool = False, norm_group: Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] =
                 None, fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
                 compile: bool = False) -> None: ...

class Adam(Optimizer):
    """Adam (Kingma & Ba 2015).

    Rule "adam" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    decay rate of the first moment; decay rate of the second moment
        eps                      added to the root of the second moment of parameters that are no matrices
        weight_decay             coefficient of the decay mode
        amsgrad                  1: divide by the largest second moment so far (Reddi et al. 2018)
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        cautious                 1: no element moves against its gradient (Liang et al. 2024)
        decoupled_weight_decay   True: weight decay beside the gradient, as AdamW has it, and not in it
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9,
                 0.999), eps: float = 1e-08, weight_decay: float = 0.0, amsgrad: bool = False, *, maximize: bool =
                 False, centralize: float = 0.0, cautious: bool = False, decoupled_weight_decay: bool = False,
                 weights: Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None,
                 reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str]
                 = None, generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0,
                 gradient_release: bool = False, optimizer_accumulation: bool = False, norm_group: Any = None, flat:
                 Union[bool, str] = False, foreach: Optional[bool] = None, fused: Optional[bool] = None, capturable:
                 bool = False, differentiable: bool = False, compile: bool = False) -> None: ...

class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019).

    Rule "adamw" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    decay rate of the first moment; decay rate of the second moment
        eps                      added to the root of the debiased second moment
        weight_decay             coefficient of the decay mode
        amsgrad                  1: divide by the largest second moment so far (Reddi et al. 2018)
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        cautious                 1: no element moves against its gradient (Liang et al. 2024)
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9,
                 0.999), eps: float = 1e-08, weight_decay: float = 0.01, amsgrad: bool = False, *, maximize: bool =
                 False, centralize: float = 0.0, cautious: bool = False, weights: Optional[str] = None, states:
                 Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0, clip_norm: float =
                 0.0, clip: Optional[str] = None, scan: Optional[str] = None, generator: Optional[str] = None, seed:
                 Optional[int] = None, threads: int = 0, gradient_release: bool = False, optimizer_accumulation:
                 bool = False, norm_group: Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] =
                 None, fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
                 compile: bool = False) -> None: ...

class Lion(Optimizer):
    """Lion, the sign of an interpolated momentum (Chen et al. 2023).

    Rule "lion" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    interpolation of the update; decay rate of the momentum
        weight_decay             coefficient of the decay mode
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        cautious                 1: no element moves against its gradient (Liang et al. 2024)
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.0001, betas: Tuple[float, float] = (0.9,
                 0.99), weight_decay: float = 0.0, *, maximize: bool = False, centralize: float = 0.0, cautious:
                 bool = False, weights: Optional[str] = None, states: Optional[str] = None, decay: Optional[str] =
                 None, reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None, scan:
                 Optional[str] = None, generator: Optional[str] = None, seed: Optional[int] = None, threads: int =
                 0, gradient_release: bool = False, optimizer_accumulation: bool = False, norm_group: Any = None,
                 flat: Union[bool, str] = False, foreach: Optional[bool] = None, fused: Optional[bool] = None,
                 capturable: bool = False, differentiable: bool = False, compile: bool = False) -> None: ...

class Adan(Optimizer):
    """Adan, Nesterov momentum from gradient differences (Xie et al. 2022).

    Rule "adan" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    decay rate of the first moment; decay rate of the differences; decay rate of the second moment
        eps                      added to the root of the debiased second moment
        weight_decay             coefficient of the decay mode
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        cautious                 1: no element moves against its gradient (Liang et al. 2024)
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float, float] =
                 (0.98, 0.92, 0.99), eps: float = 1e-08, weight_decay: float = 0.02, *, maximize: bool = False,
                 centralize: float = 0.0, cautious: bool = False, weights: Optional[str] = None, states:
                 Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0, clip_norm: float =
                 0.0, clip: Optional[str] = None, scan: Optional[str] = None, generator: Optional[str] = None, seed:
                 Optional[int] = None, threads: int = 0, gradient_release: bool = False, optimizer_accumulation:
                 bool = False, norm_group: Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] =
                 None, fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
                 compile: bool = False) -> None: ...

class RAdam(Optimizer):
    """RAdam, Adam with a rectified start (Liu et al. 2020).

    Rule "radam" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    decay rate of the first moment; decay rate of the second moment
        eps                      added to the root of the debiased second moment
        weight_decay             coefficient of the decay mode
        decoupled_weight_decay   True: weight decay beside the gradient, as AdamW has it, and not in it
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        cautious                 1: no element moves against its gradient (Liang et al. 2024)
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9,
                 0.999), eps: float = 1e-08, weight_decay: float = 0.0, decoupled_weight_decay: bool = False, *,
                 maximize: bool = False, centralize: float = 0.0, cautious: bool = False, weights: Optional[str] =
                 None, states: Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0,
                 clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None, generator:
                 Optional[str] = None, seed: Optional[int] = None, threads: int = 0, gradient_release: bool = False,
                 optimizer_accumulation: bool = False, norm_group: Any = None, flat: Union[bool, str] = False,
                 foreach: Optional[bool] = None, fused: Optional[bool] = None, capturable: bool = False,
                 differentiable: bool = False, compile: bool = False) -> None: ...

class Ranger(Optimizer):
    """Ranger: RAdam with Lookahead (Wright 2019; Zhang et al. 2019).

    Rule "ranger" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    decay rate of the first moment; decay rate of the second moment
        eps                      added to the root of the debiased second moment
        weight_decay             coefficient of the decay mode
        k                        full steps between two visits to the slow weights
        alpha                    part of the way that the slow weights go
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9,
                 0.99), eps: float = 1e-06, weight_decay: float = 0.0, k: int = 6, alpha: float = 0.5, *, maximize:
                 bool = False, centralize: float = 0.0, weights: Optional[str] = None, states: Optional[str] = None,
                 decay: Optional[str] = None, reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str]
                 = None, scan: Optional[str] = None, generator: Optional[str] = None, seed: Optional[int] = None,
                 threads: int = 0, gradient_release: bool = False, optimizer_accumulation: bool = False, norm_group:
                 Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] = None, fused: Optional[bool] =
                 None, capturable: bool = False, differentiable: bool = False, compile: bool = False) -> None: ...

class StableAdamW(Optimizer):
    """StableAdamW: AdamW with clipped updates (Wortsman et al. 2023).

    Rule "stableadamw" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    decay rate of the first moment; decay rate of the second moment
        eps                      added to the root of the debiased second moment
        weight_decay             coefficient of the decay mode
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9,
                 0.99), eps: float = 1e-06, weight_decay: float = 0.01, *, maximize: bool = False, centralize: float
                 = 0.0, weights: Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None,
                 reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str]
                 = None, generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0,
                 gradient_release: bool = False, optimizer_accumulation: bool = False, norm_group: Any = None, flat:
                 Union[bool, str] = False, foreach: Optional[bool] = None, fused: Optional[bool] = None, capturable:
                 bool = False, differentiable: bool = False, compile: bool = False) -> None: ...

class RMSProp(Optimizer):
    """RMSprop (Tieleman & Hinton 2012), with momentum and centering.

    Rule "rmsprop" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        alpha                    decay rate of the second moment
        eps                      added to the root of the second moment
        weight_decay             coefficient of the decay mode
        momentum                 factor of the momentum buffer; 0 needs no state
        centered                 1: divide by the deviation from the mean gradient
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        maximize                 1: ascend
        differentiable           False: no gradient goes through a step
        debias                   1: debias the second moment, as torchastic does
        centralize               fraction of the row mean taken from the gradient
        cautious                 1: no element moves against its gradient (Liang et al. 2024)
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.01, alpha: float = 0.99, eps: float =
                 1e-08, weight_decay: float = 0.0, momentum: float = 0.0, centered: bool = False, capturable: bool =
                 False, foreach: Optional[bool] = None, maximize: bool = False, differentiable: bool = False, *,
                 debias: bool = False, centralize: float = 0.0, cautious: bool = False, weights: Optional[str] =
                 None, states: Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0,
                 clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None, generator:
                 Optional[str] = None, seed: Optional[int] = None, threads: int = 0, gradient_release: bool = False,
                 optimizer_accumulation: bool = False, norm_group: Any = None, flat: Union[bool, str] = False,
                 fused: Optional[bool] = None, compile: bool = False) -> None: ...

class Compass(Optimizer):
    """Compass: the gradient amplified by its momentum (torchastic).

    Rule "compass" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    decay rate of the first moment; decay rate of the second moment
        eps                      added to the root of the debiased second moment
        weight_decay             coefficient of the decay mode
        amplify                  times the momentum is added to the gradient
        published                1: torchastic's scaling, 1 / (1 - beta1) too large at first
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        cautious                 1: no element moves against its gradient (Liang et al. 2024)
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.99,
                 0.999), eps: float = 1e-08, weight_decay: float = 0.0, amplify: float = 5.0, published: bool =
                 False, *, maximize: bool = False, centralize: float = 0.0, cautious: bool = False, weights:
                 Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None, reference_lr:
                 float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None,
                 generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0, gradient_release:
                 bool = False, optimizer_accumulation: bool = False, norm_group: Any = None, flat: Union[bool, str]
                 = False, foreach: Optional[bool] = None, fused: Optional[bool] = None, capturable: bool = False,
                 differentiable: bool = False, compile: bool = False) -> None: ...

class LPFAdamW(Optimizer):
    """LPFAdamW: AdamW on a low-pass amplified gradient (torchastic).

    Rule "lpfadamw" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    decay rate of the low pass; decay rate of the first moment; decay rate of the second moment
        eps                      added to the root of the debiased second moment
        weight_decay             coefficient of the decay mode
        amplify                  times the low pass is added to the gradient
        published                1: torchastic's scaling, decay 1 / (1 - beta2) too strong at first
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        cautious                 1: no element moves against its gradient (Liang et al. 2024)
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float, float] =
                 (0.9, 0.9, 0.999), eps: float = 1e-08, weight_decay: float = 0.0, amplify: float = 2.0, published:
                 bool = False, *, maximize: bool = False, centralize: float = 0.0, cautious: bool = False, weights:
                 Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None, reference_lr:
                 float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None,
                 generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0, gradient_release:
                 bool = False, optimizer_accumulation: bool = False, norm_group: Any = None, flat: Union[bool, str]
                 = False, foreach: Optional[bool] = None, fused: Optional[bool] = None, capturable: bool = False,
                 differentiable: bool = False, compile: bool = False) -> None: ...

class Lamb(Optimizer):
    """LAMB: Adam with a trust ratio for each tensor (You et al. 2020).

    Rule "lamb" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    decay rate of the first moment; decay rate of the second moment
        eps                      added to the root of the second moment
        weight_decay             coefficient of the decay mode
        max_weight_norm          the weight's norm counts as at most this; 0: no bound
        trust_scale              exponent of the trust ratio
        adam                     1: a trust ratio of 1
        debias                   0: moments as they are, as LAMB16's baseline has them
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9,
                 0.999), eps: float = 1e-06, weight_decay: float = 0.0, max_weight_norm: float = 10.0, trust_scale:
                 float = 1.0, adam: bool = False, debias: bool = True, *, maximize: bool = False, centralize: float
                 = 0.0, weights: Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None,
                 reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str]
                 = None, generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0,
                 gradient_release: bool = False, optimizer_accumulation: bool = False, norm_group: Any = None, flat:
                 Union[bool, str] = False, foreach: Optional[bool] = None, fused: Optional[bool] = None, capturable:
                 bool = False, differentiable: bool = False, compile: bool = False) -> None: ...

class Lamb16(Optimizer):
    """LAMB16: LAMB with an adaptive trust exponent, made for fp8 states.

    Rule "lamb16" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    decay rate of the first moment; decay rate of the second moment
        eps                      added to the root of the second moment
        weight_decay             coefficient of the decay mode
        trust_scale              exponent of the trust ratio
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9,
                 0.999), eps: float = 1e-06, weight_decay: float = 0.0, trust_scale: float = 0.382, *, maximize:
                 bool = False, centralize: float = 0.0, weights: Optional[str] = None, states: Optional[str] = None,
                 decay: Optional[str] = None, reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str]
                 = None, scan: Optional[str] = None, generator: Optional[str] = None, seed: Optional[int] = None,
                 threads: int = 0, gradient_release: bool = False, optimizer_accumulation: bool = False, norm_group:
                 Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] = None, fused: Optional[bool] =
                 None, capturable: bool = False, differentiable: bool = False, compile: bool = False) -> None: ...

class AdamWDelayed(Optimizer):
    """AdamW with lumped decay, for weights with a residual (adamw_bfloat16).

    Rule "adamw-delayed" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    decay rate of the first moment; decay rate of the second moment
        eps                      added to the root of the second moment
        weight_decay             coefficient of the decay mode
        threshold                decay is gathered until it is above this, then applied
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        cautious                 1: no element moves against its gradient (Liang et al. 2024)
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9,
                 0.999), eps: float = 1e-08, weight_decay: float = 0.0, threshold: float = 0.005, *, maximize: bool
                 = False, centralize: float = 0.0, cautious: bool = False, weights: Optional[str] = None, states:
                 Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0, clip_norm: float =
                 0.0, clip: Optional[str] = None, scan: Optional[str] = None, generator: Optional[str] = None, seed:
                 Optional[int] = None, threads: int = 0, gradient_release: bool = False, optimizer_accumulation:
                 bool = False, norm_group: Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] =
                 None, fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
                 compile: bool = False) -> None: ...

class Muon(Optimizer):
    """Muon: orthogonalized momentum for matrices, AdamW for the rest (Jordan et al. 2024).

    Rule "muon" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        weight_decay             coefficient of the decay mode
        momentum                 decay rate of the momentum of matrices
        nesterov                 1: look ahead
        ns_coefficients          coefficients of the Newton-Schulz iteration
        eps                      least norm that the momentum of a matrix is divided by
        ns_steps                 Newton-Schulz iterations
        adjust_lr_fn             None or "original": updates are scaled by the shape, as torch.optim.Muon does; "match_rms_adamw":
                                 to the size of AdamW's
        exact                    1: a GPU multiplies matrices to the bits of every machine, not by its units for BF16
        betas                    decay rate of the first moment of the rest; decay rate of the second moment of the rest
        adam_eps                 added to the root of the second moment of parameters that are no matrices
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.001, weight_decay: float = 0.1, momentum:
                 float = 0.95, nesterov: bool = True, ns_coefficients: Tuple[float, float, float] = (3.4445, -4.775,
                 2.0315), eps: float = 1e-07, ns_steps: int = 5, adjust_lr_fn: Optional[str] = None, *, exact: bool
                 = False, betas: Tuple[float, float] = (0.9, 0.999), adam_eps: float = 1e-08, maximize: bool =
                 False, centralize: float = 0.0, weights: Optional[str] = None, states: Optional[str] = None, decay:
                 Optional[str] = None, reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str] =
                 None, scan: Optional[str] = None, generator: Optional[str] = None, seed: Optional[int] = None,
                 threads: int = 0, gradient_release: bool = False, optimizer_accumulation: bool = False, norm_group:
                 Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] = None, fused: Optional[bool] =
                 None, capturable: bool = False, differentiable: bool = False, compile: bool = False) -> None: ...

class ScheduleFree(Optimizer):
    """schedule-free AdamW (Defazio et al. 2024).

    Rule "schedulefree" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    interpolation between the average and z; decay rate of the second moment
        eps                      added to the root of the debiased second moment
        weight_decay             coefficient of the decay mode
        weight_lr_power          steps weigh in the average by the largest lr so far to this power
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.0025, betas: Tuple[float, float] = (0.9,
                 0.999), eps: float = 1e-08, weight_decay: float = 0.0, weight_lr_power: float = 2.0, *, maximize:
                 bool = False, centralize: float = 0.0, weights: Optional[str] = None, states: Optional[str] = None,
                 decay: Optional[str] = None, reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str]
                 = None, scan: Optional[str] = None, generator: Optional[str] = None, seed: Optional[int] = None,
                 threads: int = 0, gradient_release: bool = False, optimizer_accumulation: bool = False, norm_group:
                 Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] = None, fused: Optional[bool] =
                 None, capturable: bool = False, differentiable: bool = False, compile: bool = False) -> None: ...
    def eval(self) -> None: ...
    def train(self, mode: bool = True) -> None: ...

class ADOPT(Optimizer):
    """ADOPT: gradients divided by the second moment before them (Taniguchi et al. 2024).

    Rule "adopt" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    decay rate of the average of normalized gradients; decay rate of the second moment
        eps                      least root of the second moment that a gradient is divided by
        weight_decay             coefficient of the decay mode
        clip_power               normalized gradients are bounded by the number of updates before to this power
        clipped                  0: normalized gradients have no bound
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        cautious                 1: no element moves against its gradient (Liang et al. 2024)
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9,
                 0.9999), eps: float = 1e-06, weight_decay: float = 0.0, clip_power: float = 0.25, clipped: bool =
                 True, *, maximize: bool = False, centralize: float = 0.0, cautious: bool = False, weights:
                 Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None, reference_lr:
                 float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None,
                 generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0, gradient_release:
                 bool = False, optimizer_accumulation: bool = False, norm_group: Any = None, flat: Union[bool, str]
                 = False, foreach: Optional[bool] = None, fused: Optional[bool] = None, capturable: bool = False,
                 differentiable: bool = False, compile: bool = False) -> None: ...

class AdEMAMix(Optimizer):
    """AdEMAMix: AdamW with a slow average besides (Pagliardini et al. 2024).

    Rule "ademamix" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    decay rate of the first moment; decay rate of the second moment; decay rate of the slow average
        eps                      added to the root of the debiased second moment
        weight_decay             coefficient of the decay mode
        alpha                    times the slow average is added to the first moment
        alpha_warmup             updates in which alpha rises from 0; 0: none
        beta3_warmup             updates in which beta3 rises from beta1, by half-lives; 0: none
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        cautious                 1: no element moves against its gradient (Liang et al. 2024)
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float, float] =
                 (0.9, 0.999, 0.9999), eps: float = 1e-08, weight_decay: float = 0.0, alpha: float = 5.0,
                 alpha_warmup: float = 0.0, beta3_warmup: float = 0.0, *, maximize: bool = False, centralize: float
                 = 0.0, cautious: bool = False, weights: Optional[str] = None, states: Optional[str] = None, decay:
                 Optional[str] = None, reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str] =
                 None, scan: Optional[str] = None, generator: Optional[str] = None, seed: Optional[int] = None,
                 threads: int = 0, gradient_release: bool = False, optimizer_accumulation: bool = False, norm_group:
                 Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] = None, fused: Optional[bool] =
                 None, capturable: bool = False, differentiable: bool = False, compile: bool = False) -> None: ...

class MARS(Optimizer):
    """MARS-AdamW: AdamW on variance-reduced gradients (Yuan et al. 2024).

    Rule "mars" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    decay rate of the first moment; decay rate of the second moment
        eps                      added to the root of the debiased second moment
        weight_decay             coefficient of the decay mode
        gamma                    scale of the correction; 0: none
        max_norm                 largest norm of a tensor's corrected gradient; no bound if 0
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.003, betas: Tuple[float, float] = (0.95,
                 0.99), eps: float = 1e-08, weight_decay: float = 0.0, gamma: float = 0.025, max_norm: float = 1.0,
                 *, maximize: bool = False, centralize: float = 0.0, weights: Optional[str] = None, states:
                 Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0, clip_norm: float =
                 0.0, clip: Optional[str] = None, scan: Optional[str] = None, generator: Optional[str] = None, seed:
                 Optional[int] = None, threads: int = 0, gradient_release: bool = False, optimizer_accumulation:
                 bool = False, norm_group: Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] =
                 None, fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
                 compile: bool = False) -> None: ...

class Prodigy(Optimizer):
    """Prodigy: Adam that estimates its learning rate (Mishchenko & Defazio 2023).

    Rule "prodigy" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    decay rate of the first moment; decay rate of the second moment; decay rate of the estimate's sums;
                                 the root of beta2 if 0
        eps                      added to the root of the second moment, times the estimate
        weight_decay             coefficient of the decay mode
        d0                       first estimate of the learning rate
        d_coef                   scale of the estimate
        growth_rate              the estimate grows by at most this factor in a step
        safeguard_warmup         1: lr is left out of the estimate's divisor, for a warm-up
        debias                   1: debias the moments
        slice_p                  the estimate's sums are over every so many-th element
        d_group                  groups of one number share one estimate, and have one lr or 0
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 1.0, betas: Tuple[float, float, float] =
                 (0.9, 0.999, 0.0), eps: float = 1e-08, weight_decay: float = 0.0, d0: float = 1e-06, d_coef: float
                 = 1.0, growth_rate: float = 1e+300, safeguard_warmup: bool = False, debias: bool = False, slice_p:
                 float = 1.0, d_group: int = 0, *, maximize: bool = False, centralize: float = 0.0, weights:
                 Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None, reference_lr:
                 float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None,
                 generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0, gradient_release:
                 bool = False, optimizer_accumulation: bool = False, norm_group: Any = None, flat: Union[bool, str]
                 = False, foreach: Optional[bool] = None, fused: Optional[bool] = None, capturable: bool = False,
                 differentiable: bool = False, compile: bool = False) -> None: ...

class CAME(Optimizer):
    """CAME: confidence-guided updates, factored second moments (Luo et al. 2023).

    Rule "came" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        betas                    decay rate of the first moment, of clipped quotients; decay rate of the second moments; decay rate
                                 of the instability
        eps                      added to squares of gradients
        weight_decay             coefficient of the decay mode
        instability_eps          added to squares of the instability
        clip_threshold           largest root mean square of a tensor's quotients; no bound if 0
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.0002, betas: Tuple[float, float, float] =
                 (0.9, 0.999, 0.9999), eps: float = 1e-30, weight_decay: float = 0.0, instability_eps: float =
                 1e-16, clip_threshold: float = 1.0, *, maximize: bool = False, centralize: float = 0.0, weights:
                 Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None, reference_lr:
                 float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None,
                 generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0, gradient_release:
                 bool = False, optimizer_accumulation: bool = False, norm_group: Any = None, flat: Union[bool, str]
                 = False, foreach: Optional[bool] = None, fused: Optional[bool] = None, capturable: bool = False,
                 differentiable: bool = False, compile: bool = False) -> None: ...

class Adafactor(Optimizer):
    """Adafactor: factored second moments, relative steps (Shazeer & Stern 2018).

    Rule "adafactor" of the library; options are read from the group at each step.

        params                   parameters to step, or (name, parameter) pairs such as model.named_parameters(), or dictionaries,
                                 one for each group
        lr                       learning rate; a number, or a tensor of one element
        beta2_decay              beta2 is 1 less the number of updates to this power
        eps                      smallest root of a second moment, 2^-23 if None, or with published=True what is added to squares of
                                 gradients; smallest root mean square of a weight that scales its step
        d                        largest root mean square of a tensor's quotients; no bound if 0
        weight_decay             coefficient of the decay mode
        relative_step            1: lr falls with the root of the number of updates, and is its largest
        warmup_init              1: relative steps begin at a millionth, and grow by that
        scale_parameter          1: steps are times the weight's root mean square
        published                1: eps, decay and a first moment of whole steps, as transformers has them
        beta1                    decay rate of the first moment, of updates without lr; 0 needs no state
        maximize                 1: ascend
        centralize               fraction of the row mean taken from the gradient
        weights                  format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16";
                                 float16 ones take the namesake ("f16-sr"), float32 ones stay as they are
        states                   format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for each, "int8+bf16-sr";
                                 None: the rule's default, f32 for float32 parameters and bf16-sr for others
        decay                    "l2", "decoupled", "fully-decoupled" (by lr / reference_lr), "proximal"; None: the rule's default
        reference_lr             lr at which fully decoupled decay is weight_decay; 0: lr as first set
        clip_norm                largest global gradient norm; 0: no clipping
        clip                     in gradient release: "delayed" clips by the norm of the round before, "per-tensor" by each tensor's
                                 own
        scan                     "scan": a gradient that is not finite makes the step change nothing at all; "per-tensor": only its
                                 tensor is left alone; "known-finite": nobody looks
        generator                "lattice", "mixer" or "philox7", the source of random bits; None: the library's default
        seed                     of the random bits; None: drawn once from torch's generator, so that torch.manual_seed() governs
                                 it; where torch.distributed is initialized it is 0 on all ranks
        threads                  0: torch.get_num_threads() at each step
        gradient_release         see prepare_gradient_release() and `optimizer_accumulation`
        optimizer_accumulation   see prepare_gradient_release() and `optimizer_accumulation`
        norm_group               a torch.distributed group (True: of all ranks) whose ranks hold different parameters, such as those
                                 of a ZeroRedundancyOptimizer, of a pipeline or of flat shards: the norm to clip by, the verdict on
                                 gradients that are not finite, and a rule's sums over all tensors are theirs together. Every one of
                                 them has to call step() as often. Not saved and not copied
        flat                     True: vectors of 4096 elements or more are flat buffers of many parameters, which take block
                                 formats; "shards": and each rank holds another shard, so that each has random bits of its own.
                                 Those of FSDP1 are recognized
        foreach                  accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        fused                    accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        capturable               accepted; all parameters are always stepped in one call. fused=True also lets a GradScaler leave
                                 unscaling to the step
        differentiable           False: no gradient goes through a step
        compile                  True: step() can be traced by torch.compile(fullgraph=True)
    """

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 0.01, beta2_decay: float = -0.8, eps:
                 Tuple[Optional[float], float] = (None, 0.001), d: float = 1.0, weight_decay: float = 0.0, *,
                 relative_step: bool = True, warmup_init: bool = False, scale_parameter: bool = True, published:
                 bool = False, beta1: float = 0.0, maximize: bool = False, centralize: float = 0.0, weights:
                 Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None, reference_lr:
                 float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None,
                 generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0, gradient_release:
                 bool = False, optimizer_accumulation: bool = False, norm_group: Any = None, flat: Union[bool, str]
                 = False, foreach: Optional[bool] = None, fused: Optional[bool] = None, capturable: bool = False,
                 differentiable: bool = False, compile: bool = False) -> None: ...

RMSprop = RMSProp

ScheduleFreeAdamW = ScheduleFree

__all__ = [
    "Optimizer",
    "optimizer",
    "name_parameters",
    "plan",
    "EMA",
    "GradientAccumulator",
    "CPUOffload",
    "StateStreaming",
    "full_precision_state_dict",
    "HalfstepError",
    "RMSprop",
    "ScheduleFreeAdamW",
    "SGD",
    "Adam",
    "AdamW",
    "Lion",
    "Adan",
    "RAdam",
    "Ranger",
    "StableAdamW",
    "RMSProp",
    "Compass",
    "LPFAdamW",
    "Lamb",
    "Lamb16",
    "AdamWDelayed",
    "Muon",
    "ScheduleFree",
    "ADOPT",
    "AdEMAMix",
    "MARS",
    "Prodigy",
    "CAME",
    "Adafactor",
]
