"""The optimizer classes, one for each rule of the library's table.

`make generate` writes this file (scripts/class_text.py). What a class does is in optimizer.py, and
what some rules do beside it in rules.py. This file is longer than 500 lines because each class has
all of its options.
"""

# fmt: off
from typing import Any, Mapping, Optional, Sequence, Tuple, Union

import torch

from . import rules
from ._library import abi
from ._settings.options import StoreLike
from .optimizer import Optimizer, Params

abi.check_rules("1c2fb10d5bd1f297")


class SGD(Optimizer):
    """stochastic gradient descent, with momentum (Polyak 1964; Nesterov 1983).

        lr            learning rate, a number or a tensor of one element (0 to 1000000)
        momentum      factor of the momentum buffer; 0 needs no state (0 to 1000)
        dampening     the momentum gets 1 - dampening of each gradient but the first (-1000 to 1000)
        weight_decay  coefficient of the weight decay; `decay` says how it acts (0 to 1000000)
        nesterov      True: the update is one step of the momentum ahead

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, cautious,
    weights, states, decay, reference_lr, clip_norm, clip, scan, generator, seed, threads,
    gradient_release, norm_group, owners, flat, foreach, fused, capturable, differentiable, compile,
    store, states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.SGD(params, lr=0.001, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("sgd/bf16-sr/int8", params, lr=0.001)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "sgd"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.001, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False,
        *,
        maximize: bool = False, centralize: float = 0.0, cautious: bool = False,
        weights: Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None,
        reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None,
        scan: Optional[str] = None, generator: Optional[str] = None, seed: Optional[int] = None,
        threads: int = 0, gradient_release: bool = False, norm_group: Any = None,
        owners: Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "momentum": momentum, "dampening": dampening,
                "weight_decay": weight_decay, "nesterov": nesterov, "maximize": maximize,
                "centralize": centralize, "cautious": cautious,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class Adam(Optimizer):
    """Adam (Kingma & Ba 2015).

        lr                      learning rate, a number or a tensor of one element (0 to 1000000)
        betas                   decay rate of the first moment; decay rate of the second moment (0
                                to below 1)
        eps                     added to the root of the debiased second moment (0 to 1)
        weight_decay            coefficient of the weight decay; `decay` says how it acts (0 to
                                1000000)
        amsgrad                 True: divide by the largest second moment so far (Reddi et al. 2018)
        decoupled_weight_decay  True: weight decay does not go through the gradient, as in AdamW

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, cautious,
    weights, states, decay, reference_lr, clip_norm, clip, scan, generator, seed, threads,
    gradient_release, norm_group, owners, flat, foreach, fused, capturable, differentiable, compile,
    store, states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.Adam(params, lr=0.001, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("adam/bf16-sr/int8", params, lr=0.001)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "adam"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08, weight_decay: float = 0.0, amsgrad: bool = False,
        *,
        maximize: bool = False, centralize: float = 0.0, cautious: bool = False,
        decoupled_weight_decay: bool = False, weights: Optional[str] = None,
        states: Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0,
        clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None,
        generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0,
        gradient_release: bool = False, norm_group: Any = None, owners: Any = None,
        flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                "amsgrad": amsgrad, "maximize": maximize, "centralize": centralize,
                "cautious": cautious, "decoupled_weight_decay": decoupled_weight_decay,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019).

        lr            learning rate, a number or a tensor of one element (0 to 1000000)
        betas         decay rate of the first moment; decay rate of the second moment (0 to below 1)
        eps           added to the root of the debiased second moment (0 to 1)
        weight_decay  coefficient of the weight decay; `decay` says how it acts (0 to 1000000)
        amsgrad       True: divide by the largest second moment so far (Reddi et al. 2018)

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, cautious,
    weights, states, decay, reference_lr, clip_norm, clip, scan, generator, seed, threads,
    gradient_release, norm_group, owners, flat, foreach, fused, capturable, differentiable, compile,
    store, states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.AdamW(params, lr=0.001, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("adamw/bf16-sr/int8", params, lr=0.001)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "adamw"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08, weight_decay: float = 0.01, amsgrad: bool = False,
        *,
        maximize: bool = False, centralize: float = 0.0, cautious: bool = False,
        weights: Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None,
        reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None,
        scan: Optional[str] = None, generator: Optional[str] = None, seed: Optional[int] = None,
        threads: int = 0, gradient_release: bool = False, norm_group: Any = None,
        owners: Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                "amsgrad": amsgrad, "maximize": maximize, "centralize": centralize,
                "cautious": cautious, "decoupled_weight_decay": True,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class Lion(Optimizer):
    """Lion, the sign of an interpolated momentum (Chen et al. 2023).

        lr            learning rate, a number or a tensor of one element (0 to 1000000)
        betas         share of the momentum in the update; decay rate of the momentum (0 to below 1)
        weight_decay  coefficient of the weight decay; `decay` says how it acts (0 to 1000000)

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, cautious,
    weights, states, decay, reference_lr, clip_norm, clip, scan, generator, seed, threads,
    gradient_release, norm_group, owners, flat, foreach, fused, capturable, differentiable, compile,
    store, states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.Lion(params, lr=0.0001, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("lion/bf16-sr/int8", params, lr=0.0001)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "lion"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.0001, betas: Tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False, centralize: float = 0.0, cautious: bool = False,
        weights: Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None,
        reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None,
        scan: Optional[str] = None, generator: Optional[str] = None, seed: Optional[int] = None,
        threads: int = 0, gradient_release: bool = False, norm_group: Any = None,
        owners: Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize,
                "centralize": centralize, "cautious": cautious,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class Adan(Optimizer):
    """Adan, Nesterov momentum from gradient differences (Xie et al. 2022).

        lr            learning rate, a number or a tensor of one element (0 to 1000000)
        betas         decay rate of the first moment; decay rate of the differences; decay rate of
                      the second moment (0 to below 1)
        eps           added to the root of the debiased second moment (0 to 1)
        weight_decay  coefficient of the weight decay; `decay` says how it acts (0 to 1000000)

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, cautious,
    weights, states, decay, reference_lr, clip_norm, clip, scan, generator, seed, threads,
    gradient_release, norm_group, owners, flat, foreach, fused, capturable, differentiable, compile,
    store, states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.Adan(params, lr=0.001, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("adan/bf16-sr/int8", params, lr=0.001)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "adan"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.001,
        betas: Tuple[float, float, float] = (0.98, 0.92, 0.99), eps: float = 1e-08,
        weight_decay: float = 0.02,
        *,
        maximize: bool = False, centralize: float = 0.0, cautious: bool = False,
        weights: Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None,
        reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None,
        scan: Optional[str] = None, generator: Optional[str] = None, seed: Optional[int] = None,
        threads: int = 0, gradient_release: bool = False, norm_group: Any = None,
        owners: Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                "maximize": maximize, "centralize": centralize, "cautious": cautious,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class RAdam(Optimizer):
    """RAdam, Adam with a rectified start (Liu et al. 2020).

        lr                      learning rate, a number or a tensor of one element (0 to 1000000)
        betas                   decay rate of the first moment; decay rate of the second moment (0
                                to below 1)
        eps                     added to the root of the debiased second moment (0 to 1)
        weight_decay            coefficient of the weight decay; `decay` says how it acts (0 to
                                1000000)
        decoupled_weight_decay  True: weight decay does not go through the gradient, as in AdamW

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, cautious,
    weights, states, decay, reference_lr, clip_norm, clip, scan, generator, seed, threads,
    gradient_release, norm_group, owners, flat, foreach, fused, capturable, differentiable, compile,
    store, states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.RAdam(params, lr=0.001, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("radam/bf16-sr/int8", params, lr=0.001)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "radam"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08, weight_decay: float = 0.0, decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False, centralize: float = 0.0, cautious: bool = False,
        weights: Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None,
        reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None,
        scan: Optional[str] = None, generator: Optional[str] = None, seed: Optional[int] = None,
        threads: int = 0, gradient_release: bool = False, norm_group: Any = None,
        owners: Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                "decoupled_weight_decay": decoupled_weight_decay, "maximize": maximize,
                "centralize": centralize, "cautious": cautious,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class Ranger(Optimizer):
    """Ranger: RAdam with Lookahead (Wright 2019; Zhang et al. 2019).

        lr            learning rate, a number or a tensor of one element (0 to 1000000)
        betas         decay rate of the first moment; decay rate of the second moment (0 to below 1)
        eps           added to the root of the debiased second moment (0 to 1)
        weight_decay  coefficient of the weight decay; `decay` says how it acts (0 to 1000000)
        k             updates of the weight between two copies of the slow weights (1 to 1000000)
        alpha         fraction of the way to the fast weights that the slow weights go (0 to 1)

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, weights, states,
    decay, reference_lr, clip_norm, clip, scan, generator, seed, threads, gradient_release,
    norm_group, owners, flat, foreach, fused, capturable, differentiable, compile, store,
    states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.Ranger(params, lr=0.001, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("ranger/bf16-sr/int8", params, lr=0.001)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "ranger"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-06, weight_decay: float = 0.0, k: int = 6, alpha: float = 0.5,
        *,
        maximize: bool = False, centralize: float = 0.0, weights: Optional[str] = None,
        states: Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0,
        clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None,
        generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0,
        gradient_release: bool = False, norm_group: Any = None, owners: Any = None,
        flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "k": k,
                "alpha": alpha, "maximize": maximize, "centralize": centralize,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class StableAdamW(Optimizer):
    """StableAdamW: AdamW with clipped updates (Wortsman et al. 2023).

        lr            learning rate, a number or a tensor of one element (0 to 1000000)
        betas         decay rate of the first moment; decay rate of the second moment (0 to below 1)
        eps           added to the root of the debiased second moment (0 to 1)
        weight_decay  coefficient of the weight decay; `decay` says how it acts (0 to 1000000)

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, weights, states,
    decay, reference_lr, clip_norm, clip, scan, generator, seed, threads, gradient_release,
    norm_group, owners, flat, foreach, fused, capturable, differentiable, compile, store,
    states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.StableAdamW(params, lr=0.001, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("stableadamw/bf16-sr/int8", params, lr=0.001)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "stableadamw"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-06, weight_decay: float = 0.01,
        *,
        maximize: bool = False, centralize: float = 0.0, weights: Optional[str] = None,
        states: Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0,
        clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None,
        generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0,
        gradient_release: bool = False, norm_group: Any = None, owners: Any = None,
        flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                "maximize": maximize, "centralize": centralize,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class RMSProp(Optimizer):
    """RMSprop (Tieleman & Hinton 2012), with momentum and centering.

        lr            learning rate, a number or a tensor of one element (0 to 1000000)
        alpha         decay rate of the second moment (0 to below 1)
        eps           added to the root of the second moment (0 to 1)
        weight_decay  coefficient of the weight decay; `decay` says how it acts (0 to 1000000)
        momentum      factor of the momentum buffer; 0 needs no state (0 to 1000)
        centered      True: divide by the deviation from the mean gradient
        debias        True: debias the second moment, as torchastic does

    Common options, which help(halfstep.Optimizer) describes: capturable, foreach, maximize,
    differentiable, centralize, cautious, weights, states, decay, reference_lr, clip_norm, clip,
    scan, generator, seed, threads, gradient_release, norm_group, owners, flat, fused, compile,
    store, states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.RMSProp(params, lr=0.01, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("rmsprop/bf16-sr/int8", params, lr=0.01)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "rmsprop"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.01, alpha: float = 0.99, eps: float = 1e-08,
        weight_decay: float = 0.0, momentum: float = 0.0, centered: bool = False,
        capturable: bool = False, foreach: Optional[bool] = None, maximize: bool = False,
        differentiable: bool = False,
        *,
        debias: bool = False, centralize: float = 0.0, cautious: bool = False,
        weights: Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None,
        reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None,
        scan: Optional[str] = None, generator: Optional[str] = None, seed: Optional[int] = None,
        threads: int = 0, gradient_release: bool = False, norm_group: Any = None,
        owners: Any = None, flat: Union[bool, str] = False, fused: Optional[bool] = None,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay,
                "momentum": momentum, "centered": centered, "maximize": maximize, "debias": debias,
                "centralize": centralize, "cautious": cautious,
            },
            capturable=capturable, foreach=foreach, differentiable=differentiable, weights=weights,
            states=states, decay=decay, reference_lr=reference_lr, clip_norm=clip_norm, clip=clip,
            scan=scan, generator=generator, seed=seed, threads=threads,
            gradient_release=gradient_release, norm_group=norm_group, owners=owners, flat=flat,
            fused=fused, compile=compile, store=store, states_from=states_from,
        )


class Compass(Optimizer):
    """Compass: the gradient amplified by its momentum (torchastic).

        lr            learning rate, a number or a tensor of one element (0 to 1000000)
        betas         decay rate of the first moment; decay rate of the second moment (0 to below 1)
        eps           added to the root of the debiased second moment (0 to 1)
        weight_decay  coefficient of the weight decay; `decay` says how it acts (0 to 1000000)
        amplify       factor of the momentum added to the gradient (0 to 1000)
        published     True: torchastic's scaling, 1 / (1 - beta1) too large at first

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, cautious,
    weights, states, decay, reference_lr, clip_norm, clip, scan, generator, seed, threads,
    gradient_release, norm_group, owners, flat, foreach, fused, capturable, differentiable, compile,
    store, states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.Compass(params, lr=0.001, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("compass/bf16-sr/int8", params, lr=0.001)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "compass"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.99, 0.999),
        eps: float = 1e-08, weight_decay: float = 0.0, amplify: float = 5.0,
        published: bool = False,
        *,
        maximize: bool = False, centralize: float = 0.0, cautious: bool = False,
        weights: Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None,
        reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None,
        scan: Optional[str] = None, generator: Optional[str] = None, seed: Optional[int] = None,
        threads: int = 0, gradient_release: bool = False, norm_group: Any = None,
        owners: Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                "amplify": amplify, "published": published, "maximize": maximize,
                "centralize": centralize, "cautious": cautious,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class LPFAdamW(Optimizer):
    """LPFAdamW: AdamW on a low-pass amplified gradient (torchastic).

        lr            learning rate, a number or a tensor of one element (0 to 1000000)
        betas         decay rate of the low pass; decay rate of the first moment; decay rate of the
                      second moment (0 to below 1)
        eps           added to the root of the debiased second moment (0 to 1)
        weight_decay  coefficient of the weight decay; `decay` says how it acts (0 to 1000000)
        amplify       factor of the low pass added to the gradient (0 to 1000)
        published     True: torchastic's scaling, decay 1 / (1 - beta2) too strong at first

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, cautious,
    weights, states, decay, reference_lr, clip_norm, clip, scan, generator, seed, threads,
    gradient_release, norm_group, owners, flat, foreach, fused, capturable, differentiable, compile,
    store, states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.LPFAdamW(params, lr=0.001, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("lpfadamw/bf16-sr/int8", params, lr=0.001)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "lpfadamw"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.001,
        betas: Tuple[float, float, float] = (0.9, 0.9, 0.999), eps: float = 1e-08,
        weight_decay: float = 0.0, amplify: float = 2.0, published: bool = False,
        *,
        maximize: bool = False, centralize: float = 0.0, cautious: bool = False,
        weights: Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None,
        reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None,
        scan: Optional[str] = None, generator: Optional[str] = None, seed: Optional[int] = None,
        threads: int = 0, gradient_release: bool = False, norm_group: Any = None,
        owners: Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                "amplify": amplify, "published": published, "maximize": maximize,
                "centralize": centralize, "cautious": cautious,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class Lamb(Optimizer):
    """LAMB: Adam with a trust ratio for each tensor (You et al. 2020).

        lr               learning rate, a number or a tensor of one element (0 to 1000000)
        betas            decay rate of the first moment; decay rate of the second moment (0 to below
                         1)
        eps              added to the root of the second moment (0 to 1)
        weight_decay     coefficient of the weight decay; `decay` says how it acts (0 to 1000000)
        max_weight_norm  the weight's norm counts as at most this; 0: no bound (at least 0)
        trust_scale      exponent of the trust ratio (0 to 1)
        adam             True: a trust ratio of 1
        debias           False: moments as they are, as LAMB16's baseline has them

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, weights, states,
    decay, reference_lr, clip_norm, clip, scan, generator, seed, threads, gradient_release,
    norm_group, owners, flat, foreach, fused, capturable, differentiable, compile, store,
    states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.Lamb(params, lr=0.001, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("lamb/bf16-sr/int8", params, lr=0.001)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "lamb"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-06, weight_decay: float = 0.0, max_weight_norm: float = 10.0,
        trust_scale: float = 1.0, adam: bool = False, debias: bool = True,
        *,
        maximize: bool = False, centralize: float = 0.0, weights: Optional[str] = None,
        states: Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0,
        clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None,
        generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0,
        gradient_release: bool = False, norm_group: Any = None, owners: Any = None,
        flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                "max_weight_norm": max_weight_norm, "trust_scale": trust_scale, "adam": adam,
                "debias": debias, "maximize": maximize, "centralize": centralize,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class Lamb16(Optimizer):
    """LAMB16: LAMB with an adaptive trust exponent, made for fp8 states.

        lr            learning rate, a number or a tensor of one element (0 to 1000000)
        betas         decay rate of the first moment; decay rate of the second moment (0 to below 1)
        eps           added to the root of the second moment (0 to 1)
        weight_decay  coefficient of the weight decay; `decay` says how it acts (0 to 1000000)
        trust_scale   exponent of the trust ratio (0 to 1)

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, weights, states,
    decay, reference_lr, clip_norm, clip, scan, generator, seed, threads, gradient_release,
    norm_group, owners, flat, foreach, fused, capturable, differentiable, compile, store,
    states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.Lamb16(params, lr=0.001, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("lamb16/bf16-sr/int8", params, lr=0.001)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "lamb16"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-06, weight_decay: float = 0.0, trust_scale: float = 0.382,
        *,
        maximize: bool = False, centralize: float = 0.0, weights: Optional[str] = None,
        states: Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0,
        clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None,
        generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0,
        gradient_release: bool = False, norm_group: Any = None, owners: Any = None,
        flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                "trust_scale": trust_scale, "maximize": maximize, "centralize": centralize,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class AdamWDelayed(Optimizer):
    """AdamW with lumped decay, for weights with a residual (adamw_bfloat16).

        lr            learning rate, a number or a tensor of one element (0 to 1000000)
        betas         decay rate of the first moment; decay rate of the second moment (0 to below 1)
        eps           added to the root of the second moment (0 to 1)
        weight_decay  coefficient of the weight decay; `decay` says how it acts (0 to 1000000)
        threshold     decay is gathered until it is above this, then applied (0 to 1)

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, cautious,
    weights, states, decay, reference_lr, clip_norm, clip, scan, generator, seed, threads,
    gradient_release, norm_group, owners, flat, foreach, fused, capturable, differentiable, compile,
    store, states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.AdamWDelayed(params, lr=0.001, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("adamw-delayed/bf16-sr/int8", params, lr=0.001)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "adamw-delayed"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08, weight_decay: float = 0.0, threshold: float = 0.005,
        *,
        maximize: bool = False, centralize: float = 0.0, cautious: bool = False,
        weights: Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None,
        reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None,
        scan: Optional[str] = None, generator: Optional[str] = None, seed: Optional[int] = None,
        threads: int = 0, gradient_release: bool = False, norm_group: Any = None,
        owners: Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                "threshold": threshold, "maximize": maximize, "centralize": centralize,
                "cautious": cautious,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class Muon(rules._Muon):
    """Muon: orthogonalized momentum for matrices, AdamW for the rest (Jordan et al. 2024).

        lr               learning rate, a number or a tensor of one element (0 to 1000000)
        weight_decay     coefficient of the weight decay; `decay` says how it acts (0 to 1000000)
        momentum         decay rate of the momentum of matrices (0 to 1000)
        nesterov         True: the update is one step of the momentum ahead
        ns_coefficients  coefficients of the Newton-Schulz iteration, or the name of a published
                         list, which has a least number of iterations: polar-express, deepseek-v4,
                         dion
        eps              least norm that the momentum of a matrix is divided by (0 to 1)
        ns_steps         Newton-Schulz iterations (1 to 100)
        adjust_lr_fn     what an update is scaled by: None or "original", sqrt(max(1, rows /
                         columns)), as in torch.optim.Muon; "match_rms_adamw", to the size of
                         AdamW's; "spectral_norm", sqrt(rows / columns); "none"
        exact            True: a GPU multiplies matrices to the bits of every machine, not by its
                         units for BF16
        ns_form          form of the iterations: gram has fewer products, for matrices with a side
                         1.5 times the other (standard, gram)
        normalize_rows   NorMuon: rows of an update are divided by the root of their second moment
                         (off, keep-norm, full-norm)
        row_beta         decay rate of the second moment of rows (0 to below 1)
        betas            decay rate of the first moment of the rest; decay rate of the second moment
                         of the rest (0 to below 1)
        adam_eps         eps of the parameters that are no matrices, which AdamW steps (0 to 1)
        adamw            options of AdamW, which then steps embeddings, heads and whatever is no
                         matrix, in groups of its own: {"lr": 3e-4}. `params` may be the model,
                         whose modules then say which of its weights are embeddings and heads
        adamw_names      with adamw: the matrices that AdamW steps, by patterns that fit a name or a
                         part of it between dots. None: usual names of embeddings, heads, biases and
                         norms, such as *embed*, emb, emb_*, *_emb, wte, wpe; repr() of the
                         optimizer shows whom AdamW steps
        matrix           what a parameter of three or more dimensions is: "last-two", a stack of
                         matrices of the last two; "flatten", one matrix of dimension 0 by the rest;
                         "auto", what the rule's authors take it for (docs/guides/muon.md)
        heads            number of equal blocks of rows that are matrices of their own (heads)
        split            rows of the blocks that are matrices of their own, such as q, k and v in
                         one weight

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, weights, states,
    decay, reference_lr, clip_norm, clip, scan, generator, seed, threads, gradient_release,
    norm_group, owners, flat, foreach, fused, capturable, differentiable, compile, store,
    states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.Muon(params, lr=0.001, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("muon/bf16-sr/int8", params, lr=0.001)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "muon"

    def __init__(
        self, params: Union[Params, torch.nn.Module],
        lr: Union[float, torch.Tensor] = 0.001, weight_decay: float = 0.1, momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Union[Tuple[float, float, float], str] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-07, ns_steps: int = 5, adjust_lr_fn: Optional[str] = None,
        *,
        exact: bool = False, ns_form: str = "standard", normalize_rows: str = "off",
        row_beta: float = 0.95, betas: Tuple[float, float] = (0.9, 0.999), adam_eps: float = 1e-08,
        adamw: Optional[Mapping[str, Any]] = None, adamw_names: Optional[Sequence[str]] = None,
        maximize: bool = False, centralize: float = 0.0, matrix: str = "auto", heads: int = 1,
        split: Optional[Sequence[int]] = None, weights: Optional[str] = None,
        states: Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0,
        clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None,
        generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0,
        gradient_release: bool = False, norm_group: Any = None, owners: Any = None,
        flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
                "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn, "exact": exact, "ns_form": ns_form,
                "normalize_rows": normalize_rows, "row_beta": row_beta, "betas": betas,
                "adam_eps": adam_eps, "adamw": adamw, "adamw_names": adamw_names,
                "maximize": maximize, "centralize": centralize, "matrix": matrix, "heads": heads,
                "split": split,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class ScheduleFree(rules._ScheduleFree):
    """schedule-free AdamW (Defazio et al. 2024).

        lr               learning rate, a number or a tensor of one element (0 to 1000000)
        betas            interpolation between the average and z; decay rate of the second moment
                         (0.001 to below 1; 0 to below 1)
        eps              added to the root of the debiased second moment (0 to 1)
        weight_decay     coefficient of the weight decay; `decay` says how it acts (0 to 1000000)
        weight_lr_power  a step's share of the average: the largest lr so far to this power (0 to
                         16)

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, weights, states,
    decay, reference_lr, clip_norm, clip, scan, generator, seed, threads, gradient_release,
    norm_group, owners, flat, foreach, fused, capturable, differentiable, compile, store,
    states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.ScheduleFree(params, lr=0.0025, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("schedulefree/bf16-sr/int8", params, lr=0.0025)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "schedulefree"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.0025, betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08, weight_decay: float = 0.0, weight_lr_power: float = 2.0,
        *,
        maximize: bool = False, centralize: float = 0.0, weights: Optional[str] = None,
        states: Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0,
        clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None,
        generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0,
        gradient_release: bool = False, norm_group: Any = None, owners: Any = None,
        flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                "weight_lr_power": weight_lr_power, "maximize": maximize, "centralize": centralize,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class ADOPT(Optimizer):
    """ADOPT: gradients divided by the second moment before them (Taniguchi et al. 2024).

        lr            learning rate, a number or a tensor of one element (0 to 1000000)
        betas         decay rate of the average of normalized gradients; decay rate of the second
                      moment (0 to below 1)
        eps           least root of the second moment that a gradient is divided by (0 to 1)
        weight_decay  coefficient of the weight decay; `decay` says how it acts (0 to 1000000)
        clip_power    normalized gradients are bounded by the number of updates before to this power
                      (0 to 16)
        clipped       False: normalized gradients have no bound

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, cautious,
    weights, states, decay, reference_lr, clip_norm, clip, scan, generator, seed, threads,
    gradient_release, norm_group, owners, flat, foreach, fused, capturable, differentiable, compile,
    store, states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.ADOPT(params, lr=0.001, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("adopt/bf16-sr/int8", params, lr=0.001)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "adopt"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.001, betas: Tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-06, weight_decay: float = 0.0, clip_power: float = 0.25,
        clipped: bool = True,
        *,
        maximize: bool = False, centralize: float = 0.0, cautious: bool = False,
        weights: Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None,
        reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None,
        scan: Optional[str] = None, generator: Optional[str] = None, seed: Optional[int] = None,
        threads: int = 0, gradient_release: bool = False, norm_group: Any = None,
        owners: Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                "clip_power": clip_power, "clipped": clipped, "maximize": maximize,
                "centralize": centralize, "cautious": cautious,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class AdEMAMix(Optimizer):
    """AdEMAMix: AdamW with a slow average besides (Pagliardini et al. 2024).

        lr            learning rate, a number or a tensor of one element (0 to 1000000)
        betas         decay rate of the first moment; decay rate of the second moment; decay rate of
                      the slow average (0 to below 1)
        eps           added to the root of the debiased second moment (0 to 1)
        weight_decay  coefficient of the weight decay; `decay` says how it acts (0 to 1000000)
        alpha         factor of the slow average in the sum with the first moment (0 to 1000)
        alpha_warmup  updates in which alpha rises from 0; 0: none (at least 0)
        beta3_warmup  updates in which beta3 rises from beta1, by half-lives; 0: none (at least 0)

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, cautious,
    weights, states, decay, reference_lr, clip_norm, clip, scan, generator, seed, threads,
    gradient_release, norm_group, owners, flat, foreach, fused, capturable, differentiable, compile,
    store, states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.AdEMAMix(params, lr=0.001, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("ademamix/bf16-sr/int8", params, lr=0.001)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "ademamix"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.001,
        betas: Tuple[float, float, float] = (0.9, 0.999, 0.9999), eps: float = 1e-08,
        weight_decay: float = 0.0, alpha: float = 5.0, alpha_warmup: float = 0.0,
        beta3_warmup: float = 0.0,
        *,
        maximize: bool = False, centralize: float = 0.0, cautious: bool = False,
        weights: Optional[str] = None, states: Optional[str] = None, decay: Optional[str] = None,
        reference_lr: float = 0.0, clip_norm: float = 0.0, clip: Optional[str] = None,
        scan: Optional[str] = None, generator: Optional[str] = None, seed: Optional[int] = None,
        threads: int = 0, gradient_release: bool = False, norm_group: Any = None,
        owners: Any = None, flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "alpha": alpha,
                "alpha_warmup": alpha_warmup, "beta3_warmup": beta3_warmup, "maximize": maximize,
                "centralize": centralize, "cautious": cautious,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class MARS(Optimizer):
    """MARS-AdamW: AdamW on variance-reduced gradients (Yuan et al. 2024).

        lr            learning rate, a number or a tensor of one element (0 to 1000000)
        betas         decay rate of the first moment; decay rate of the second moment (0 to below 1)
        eps           added to the root of the debiased second moment (0 to 1)
        weight_decay  coefficient of the weight decay; `decay` says how it acts (0 to 1000000)
        gamma         scale of the correction; 0: none (0 to 1000)
        max_norm      largest norm of a tensor's corrected gradient; no bound if 0 (at least 0)

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, weights, states,
    decay, reference_lr, clip_norm, clip, scan, generator, seed, threads, gradient_release,
    norm_group, owners, flat, foreach, fused, capturable, differentiable, compile, store,
    states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.MARS(params, lr=0.003, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("mars/bf16-sr/int8", params, lr=0.003)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "mars"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.003, betas: Tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-08, weight_decay: float = 0.0, gamma: float = 0.025, max_norm: float = 1.0,
        *,
        maximize: bool = False, centralize: float = 0.0, weights: Optional[str] = None,
        states: Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0,
        clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None,
        generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0,
        gradient_release: bool = False, norm_group: Any = None, owners: Any = None,
        flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "gamma": gamma,
                "max_norm": max_norm, "maximize": maximize, "centralize": centralize,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class Prodigy(Optimizer):
    """Prodigy: Adam that estimates its learning rate (Mishchenko & Defazio 2023).

        lr                learning rate, a number or a tensor of one element (0 to 1000000)
        betas             decay rate of the first moment; decay rate of the second moment; decay
                          rate of the estimate's sums; the root of beta2 if 0 (0 to below 1)
        eps               added to the root of the second moment, times the estimate (0 to 1)
        weight_decay      coefficient of the weight decay; `decay` says how it acts (0 to 1000000)
        d0                first estimate of the learning rate (1e-30 to 1000000)
        d_coef            scale of the estimate (0 to 1000000)
        growth_rate       the estimate grows by at most this factor in a step (at least 1)
        safeguard_warmup  True: lr is left out of the estimate's divisor, for a warm-up
        debias            True: debias the moments
        slice_p           one element in so many counts in the sums of the estimate (at least 1)
        d_group           groups with the same number share one estimate; their lr are equal or 0 (0
                          to 1000000)

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, weights, states,
    decay, reference_lr, clip_norm, clip, scan, generator, seed, threads, gradient_release,
    norm_group, owners, flat, foreach, fused, capturable, differentiable, compile, store,
    states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.Prodigy(params, lr=1.0, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("prodigy/bf16-sr/int8", params, lr=1.0)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "prodigy"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 1.0, betas: Tuple[float, float, float] = (0.9, 0.999, 0.0),
        eps: float = 1e-08, weight_decay: float = 0.0, d0: float = 1e-06, d_coef: float = 1.0,
        growth_rate: float = 1e+300, safeguard_warmup: bool = False, debias: bool = False,
        slice_p: float = 1.0, d_group: int = 0,
        *,
        maximize: bool = False, centralize: float = 0.0, weights: Optional[str] = None,
        states: Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0,
        clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None,
        generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0,
        gradient_release: bool = False, norm_group: Any = None, owners: Any = None,
        flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "d0": d0,
                "d_coef": d_coef, "growth_rate": growth_rate, "safeguard_warmup": safeguard_warmup,
                "debias": debias, "slice_p": slice_p, "d_group": d_group, "maximize": maximize,
                "centralize": centralize,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class CAME(Optimizer):
    """CAME: confidence-guided updates, factored second moments (Luo et al. 2023).

        lr               learning rate, a number or a tensor of one element (0 to 1000000)
        betas            decay rate of the first moment, of clipped quotients; decay rate of the
                         second moments; decay rate of the instability (0 to below 1)
        eps              added to squares of gradients (0 to 1)
        weight_decay     coefficient of the weight decay; `decay` says how it acts (0 to 1000000)
        instability_eps  added to squares of the instability (0 to 1)
        clip_threshold   largest root mean square of a tensor's quotients; no bound if 0 (at least
                         0)
        matrix           what a parameter of three or more dimensions is: "last-two", a stack of
                         matrices of the last two; "flatten", one matrix of dimension 0 by the rest;
                         "auto", what the rule's authors take it for (docs/guides/muon.md)
        heads            number of equal blocks of rows that are matrices of their own (heads)
        split            rows of the blocks that are matrices of their own, such as q, k and v in
                         one weight

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, weights, states,
    decay, reference_lr, clip_norm, clip, scan, generator, seed, threads, gradient_release,
    norm_group, owners, flat, foreach, fused, capturable, differentiable, compile, store,
    states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.CAME(params, lr=0.0002, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("came/bf16-sr/int8", params, lr=0.0002)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "came"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.0002,
        betas: Tuple[float, float, float] = (0.9, 0.999, 0.9999), eps: float = 1e-30,
        weight_decay: float = 0.0, instability_eps: float = 1e-16, clip_threshold: float = 1.0,
        *,
        maximize: bool = False, centralize: float = 0.0, matrix: str = "auto", heads: int = 1,
        split: Optional[Sequence[int]] = None, weights: Optional[str] = None,
        states: Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0,
        clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None,
        generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0,
        gradient_release: bool = False, norm_group: Any = None, owners: Any = None,
        flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                "instability_eps": instability_eps, "clip_threshold": clip_threshold,
                "maximize": maximize, "centralize": centralize, "matrix": matrix, "heads": heads,
                "split": split,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


class Adafactor(rules._Adafactor):
    """Adafactor: factored second moments, relative steps (Shazeer & Stern 2018).

        lr               learning rate, a number or a tensor of one element (0 to 1000000)
        beta2_decay      beta2 is 1 - t^beta2_decay in update t (-1000 to 0)
        eps              smallest root of a second moment (None: 2^-23; with published=True: what is
                         added to squared gradients); smallest root mean square of a weight in its
                         step's size
        d                largest root mean square of a tensor's quotients; no bound if 0 (at least
                         0)
        weight_decay     coefficient of the weight decay; `decay` says how it acts (0 to 1000000)
        relative_step    True: lr is 1 / sqrt(t) in update t, and at most the lr that is set
        warmup_init      True: relative steps are at most 1e-6 t in update t
        scale_parameter  True: steps are times the weight's root mean square
        published        True: eps, decay and a first moment of whole steps, as transformers has
                         them
        beta1            decay rate of the first moment, of updates without lr; 0 needs no state (0
                         to below 1)
        matrix           what a parameter of three or more dimensions is: "last-two", a stack of
                         matrices of the last two; "flatten", one matrix of dimension 0 by the rest;
                         "auto", what the rule's authors take it for (docs/guides/muon.md)
        heads            number of equal blocks of rows that are matrices of their own (heads)
        split            rows of the blocks that are matrices of their own, such as q, k and v in
                         one weight

    Common options, which help(halfstep.Optimizer) describes: maximize, centralize, weights, states,
    decay, reference_lr, clip_norm, clip, scan, generator, seed, threads, gradient_release,
    norm_group, owners, flat, foreach, fused, capturable, differentiable, compile, store,
    states_from.

    >>> import torch, halfstep
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> params = list(model.named_parameters())
    >>> opt = halfstep.Adafactor(params, lr=0.01, weights="bf16-sr", states="int8")
    >>> opt = halfstep.optimizer("adafactor/bf16-sr/int8", params, lr=0.01)  # the same
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    """

    rule = "adafactor"

    def __init__(
        self, params: Params,
        lr: Union[float, torch.Tensor] = 0.01, beta2_decay: float = -0.8,
        eps: Tuple[Optional[float], float] = (None, 0.001), d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        relative_step: bool = True, warmup_init: bool = False, scale_parameter: bool = True,
        published: bool = False, beta1: float = 0.0, maximize: bool = False,
        centralize: float = 0.0, matrix: str = "auto", heads: int = 1,
        split: Optional[Sequence[int]] = None, weights: Optional[str] = None,
        states: Optional[str] = None, decay: Optional[str] = None, reference_lr: float = 0.0,
        clip_norm: float = 0.0, clip: Optional[str] = None, scan: Optional[str] = None,
        generator: Optional[str] = None, seed: Optional[int] = None, threads: int = 0,
        gradient_release: bool = False, norm_group: Any = None, owners: Any = None,
        flat: Union[bool, str] = False, foreach: Optional[bool] = None,
        fused: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        compile: bool = False, store: Optional[StoreLike] = None, states_from: Optional[str] = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d,
                "weight_decay": weight_decay, "relative_step": relative_step,
                "warmup_init": warmup_init, "scale_parameter": scale_parameter,
                "published": published, "beta1": beta1, "maximize": maximize,
                "centralize": centralize, "matrix": matrix, "heads": heads, "split": split,
            },
            weights=weights, states=states, decay=decay, reference_lr=reference_lr,
            clip_norm=clip_norm, clip=clip, scan=scan, generator=generator, seed=seed,
            threads=threads, gradient_release=gradient_release, norm_group=norm_group,
            owners=owners, flat=flat, foreach=foreach, fused=fused, capturable=capturable,
            differentiable=differentiable, compile=compile, store=store, states_from=states_from,
        )


__all__ = [
    "SGD", "Adam", "AdamW", "Lion", "Adan", "RAdam", "Ranger", "StableAdamW", "RMSProp", "Compass",
    "LPFAdamW", "Lamb", "Lamb16", "AdamWDelayed", "Muon", "ScheduleFree", "ADOPT", "AdEMAMix",
    "MARS", "Prodigy", "CAME", "Adafactor",
]

rules.classes.update({
    "SGD": SGD, "Adam": Adam, "AdamW": AdamW, "Lion": Lion, "Adan": Adan, "RAdam": RAdam,
    "Ranger": Ranger, "StableAdamW": StableAdamW, "RMSProp": RMSProp, "Compass": Compass,
    "LPFAdamW": LPFAdamW, "Lamb": Lamb, "Lamb16": Lamb16, "AdamWDelayed": AdamWDelayed,
    "Muon": Muon, "ScheduleFree": ScheduleFree, "ADOPT": ADOPT, "AdEMAMix": AdEMAMix, "MARS": MARS,
    "Prodigy": Prodigy, "CAME": CAME, "Adafactor": Adafactor,
})
