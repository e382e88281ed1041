"""optimi's functional forms: steps in place on lists of tensors that belong to the caller,
including the states.

optimi's states are debiased: m^ = m / (1 - b^t). With b^ = b (1 - b^(t-1)) / (1 - b^t) they obey m^
= b^ m^ + (1 - b^) g. The library's rules can therefore update them in the caller's memory. They get
b^ for b, and a count so high that their own correction is 1.

Two cases need raw moments. One is Adan, whose update uses the second beta itself. The other is the
first steps of RAdam and Ranger, which are not rectified. For these the states are scaled in
float32, one tensor at a time, and scaled back.

This file is longer than 500 lines because it has every signature of these functions.
"""

import ctypes
import math
from collections import OrderedDict
from typing import Any, List, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .._library import abi, calls
from .._library.abi import check, lib
from .._states.handles import Handle, seed_of
from .._tensors import devices, parameters, torch_public
from ._arguments import arguments

__all__ = ["adam", "adamw", "adan", "lion", "radam", "ranger", "sgd", "stableadamw"]

#: float types that a Kahan residual serves
LOW = (torch.bfloat16, torch.float16)
_SETTLED = 2**40
_HANDLES = 64


class _Lists(Handle):
    """A handle for lists of tensors of one structure. Every call gives it memory and counters
    anew."""

    def __init__(self, rule, members, hypers):
        super().__init__(torch.get_num_threads(), 0)
        # Every call sets the steps, often to a number that only settles the rule. A generator of
        # lattices would go by them.
        self.set(generator="mixer")
        for i, (identity, shape, weight, states, gradient) in enumerate(members):
            recipe = "/".join([rule, weight] + (["+".join(states)] if states else []))
            self.add(recipe, f"params[{i}]", identity, shape, gradient)
        self.set(**hypers)  # before the first binding, because hyper-parameters add states
        self.bound: List[Any] = [None] * len(members)
        pointers = ctypes.c_void_p * len(members)
        self.weights, self.gradients = pointers(), pointers()

    def bind(self, i, item):
        """Binds the memory of one tensor. Tensors without elements have no address, but their slots
        must count as bound."""
        slots = [(abi.SLOT_WEIGHT, None, item.comp)] if item.comp is not None else []
        slots += [
            (abi.SLOT_STATE + k, t, extra)
            for k, (t, extra) in enumerate(zip(item.states, item.extras))
        ]
        wanted = [
            (slot, *(None if t is None else t.data_ptr() or 1 for t in pair))
            for slot, *pair in slots
        ]
        if self.bound[i] != wanted:
            for slot, code, extra in wanted:
                check(lib.halfstep_bind_slot(self, i, slot, code, extra), self)
            self.bound[i] = wanted


_handles: "OrderedDict[Any, _Lists]" = OrderedDict()
# parameter -> [id of its random bits, writes]; slow weights -> their residual
_identities = WeakIdKeyDictionary()
_slow_residuals = WeakIdKeyDictionary()


def _lists(rule, items, hypers) -> _Lists:
    # A single tensor gets its id at each call, so that one handle serves all tensors of its
    # structure. For long lists that is slow.
    members = [(item.identity[0] if len(items) > 1 else 0, *item.structure) for item in items]
    key = (rule, tuple(members), hypers.get("momentum", 1.0) != 0.0)
    found = _handles.pop(key, None)
    if found is None:
        found = _Lists(rule, members, hypers)
        if len(_handles) >= _HANDLES:
            _handles.popitem(last=False)
    _handles[key] = found
    return found


def _identity(p, place):
    """Returns [id, writes] of a tensor. The functions have no seed. A seed is drawn as for an
    optimizer, and goes into the id of each tensor."""
    found = _identities.get(p)
    if found is None:
        found = _identities[p] = [(abi.name_id(place) + seed_of(None)) % 2**64, 0]
    return found


class _Item:
    """One tensor of the lists as the library takes it, with the data to copy back into the
    caller's."""

    def __init__(self, i, param, grad, states, comp, rule, kahan, factors):
        name = f"params[{i}]"
        for what, t in (("params", param), ("grads", grad)):
            if not isinstance(t, Tensor):
                raise TypeError(f"halfstep: {what}[{i}] is a {type(t).__name__}, not a tensor")
        parameters.check_parameter(param, name)
        parameters.check_cpu(param, name)
        gradient = parameters.check_gradient(param, grad, name)
        self.owner, self.identity, self.shape = param, _identity(param, name), tuple(param.shape)
        self.back: List[Tuple[Tensor, Tensor]] = []
        self.param, self.grad = self._dense(param, True), self._dense(grad, False)
        kahan = kahan and param.dtype in LOW
        weight = parameters.PLAIN[param.dtype] + ("-kahan" if kahan else "")
        self.comp = None
        if kahan:
            if (
                not isinstance(comp, Tensor)
                or comp.dtype != param.dtype
                or comp.shape != param.shape
            ):
                raise ValueError(
                    f"halfstep: kahan_sum=True needs kahan_comps[{i}] to be a tensor like"
                    f" params[{i}]"
                )
            self.comp = self._dense(comp, True)
        formats: List[str] = []
        self.states: List[Tensor] = []
        self.extras: List[Optional[Tensor]] = []
        self.scaled: List[
            Tuple[int, Tensor, float, float]
        ] = []  # state, the caller's, factors in and out
        for k, (s, value) in enumerate(zip(rule.states, states)):
            if (
                not isinstance(value, Tensor)
                or value.dtype not in parameters.PLAIN
                or value.shape != param.shape
                or value.device != param.device
            ):
                raise ValueError(
                    f"halfstep: state {s.name!r} of {name} must be a float32, bfloat16 or float16"
                    f" tensor of the shape and device of {name}"
                )
            extra = None
            if s.role == abi.ROLE_WEIGHT:
                if value.dtype != param.dtype:
                    raise ValueError(
                        f"halfstep: state {s.name!r} of {name} must be {param.dtype}, as {name} is"
                    )
                if kahan:
                    extra = _slow_residuals.get(value)
                    if extra is None:
                        extra = _slow_residuals[value] = torch.zeros(
                            self.shape, dtype=param.dtype, device="cpu"
                        )
                self.states.append(self._dense(value, True))
            elif s.name in factors or (s.role == abi.ROLE_NONNEG and value.dtype == torch.float16):
                # The library's half formats do not hold second moments, because those of small
                # gradients would be zero.
                formats.append("f32")
                self.scaled.append((k, value.detach(), *factors.get(s.name, (1.0, 1.0))))
                self.states.append(torch.empty(self.shape, dtype=torch.float32, device="cpu"))
            else:
                half = "f16" if s.role == abi.ROLE_GRADIENT else "f16-sr"
                formats.append(
                    {torch.float32: "f32", torch.bfloat16: "bf16-sr", torch.float16: half}[
                        value.dtype
                    ]
                )
                self.states.append(self._dense(value, True))
            self.extras.append(extra)
        self.structure = (self.shape, weight, tuple(formats), gradient)

    def _dense(self, t, written):
        t = t.detach()
        if devices.is_plain(t):
            return t
        copy = devices.contiguous(t)
        if written:
            self.back.append((t, copy))
        return copy

    def load(self):
        for k, theirs, factor, _ in self.scaled:
            if factor == 0.0:
                self.states[k].zero_()
            else:
                torch.mul(theirs.float(), factor, out=self.states[k])
        if self.comp is not None and self.comp.dtype == torch.float16:
            self.comp.mul_(2048)

    def store(self, made):
        if self.comp is not None and self.comp.dtype == torch.float16:
            self.comp.div_(2048)
        if made:
            for k, theirs, _, factor in self.scaled:
                theirs.copy_(self.states[k] if factor == 1.0 else self.states[k].mul_(factor))
            for theirs, copy in self.back:
                theirs.copy_(copy)


def _listed(value):
    return [value] if isinstance(value, Tensor) or value is None else list(value)


@torch.no_grad()
def _step(
    name,
    params,
    grads,
    states,
    comps,
    hypers,
    *,
    kahan_sum,
    foreach,
    triton,
    gradient_release,
    optimizer_accumulation,
    before=_SETTLED,
    full=0,
    writes=None,
    factors=None,
) -> bool:
    """Makes one step of the library's rule `name` on lists of the caller's tensors. Returns False
    if a gradient was not finite."""
    if foreach and gradient_release:
        raise ValueError("gradient_release and foreach cannot be used together")
    rule = abi.rules[name]
    params, grads = _listed(params), _listed(grads)
    states = [_listed(s) for s in states]
    comps = [None] * len(params) if comps is None else _listed(comps)
    for what, listed in (
        ("grads", grads),
        ("kahan_comps", comps),
        *((s.name, held) for s, held in zip(rule.states, states)),
    ):
        if len(listed) != len(params):
            raise ValueError(f"halfstep: {len(listed)} {what} for {len(params)} params")
    items = [
        _Item(i, p, g, [s[i] for s in states], c, rule, kahan_sum, factors or {})
        for i, (p, g, c) in enumerate(zip(params, grads, comps))
    ]
    # Scaled states need scratch memory, which is held for one tensor at a time. The others are
    # stepped in one call.
    batches = [[item for item in items if not item.scaled]] + [
        [item] for item in items if item.scaled
    ]
    if len(batches) > 2 and not all(bool(item.grad.isfinite().all()) for item in items):
        return _refused("a gradient")
    made = True
    for batch in filter(None, batches):
        lists = _lists(name, batch, hypers)
        lists.set(**hypers)
        lists.work(torch.get_num_threads())
        for i, item in enumerate(batch):
            lists.bind(i, item)
            lists.weights[i], lists.gradients[i] = (
                item.param.data_ptr() or 1,
                item.grad.data_ptr() or 1,
            )
            lists.count(
                i,
                id=item.identity[0] if len(batch) == 1 else 0,
                state_steps=before,
                full_steps=full,
                writes=item.identity[1] if writes is None else writes,
            )
            item.load()
        if optimizer_accumulation:
            code = calls.run(lists, calls.all_tensors(None, lists.gradients, True))
        else:
            code = lib.halfstep_step(lists, lists.weights, lists.gradients)
        for item in batch:
            item.store(code == abi.OK)
            item.identity[1] += code == abi.OK
        if code == abi.OK and not optimizer_accumulation:
            torch_public.increment_versions([item.owner for item in batch])
        if code == abi.NONFINITE:
            made = _refused(*calls.nonfinite_tensor(lists))
        else:
            check(code, lists)
    return made


def _refused(what, too_large=False):
    wrong = "2^62 or more, too large to be squared" if too_large else "not finite"
    torch_public.warn(
        f"{what} is {wrong}; the step was refused and changed nothing", RuntimeWarning
    )
    return False


def over(weight_decay, lr):
    """weight_decay / lr, for decay that does not depend on lr."""
    if weight_decay == 0:
        return 0.0
    if not lr:
        raise ValueError("halfstep: decouple_lr=True needs a max_lr above 0")
    return float(weight_decay) / float(lr)


def _decay(lr, weight_decay, decouple_wd, decouple_lr, max_lr, accumulate, proximal=False):
    """Returns the hyper-parameters and the mode of the decay. Micro-steps do not decay and have no
    L2 term, as in optimi."""
    weight_decay = 0.0 if accumulate else float(weight_decay)
    found = {"lr": float(lr), "weight_decay": weight_decay, "reference_lr": 0.0}
    if weight_decay == 0.0:
        return {**found, "decay": "decoupled"}
    if decouple_lr:
        coefficient = over(weight_decay, max_lr)  # refuses max_lr None and 0
        if proximal:
            return {**found, "weight_decay": coefficient, "decay": "proximal"}
        return {**found, "reference_lr": float(max_lr), "decay": "fully-decoupled"}
    return {**found, "decay": "proximal" if proximal else "decoupled" if decouple_wd else "l2"}


def _count(step):
    if not isinstance(step, Tensor):
        raise TypeError(
            f"halfstep: step is a {type(step).__name__}, not a tensor that can be counted up; begin"
            " with torch.tensor(0)"
        )
    return int(step.item()) + 1


def _debiased(beta, t):
    """Returns the factor b^ by which a debiased average forgets in its update number t."""
    power = beta**t
    return (beta - power) / (1.0 - power)


def _adam(
    name,
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    kahan_comps,
    lr,
    beta1,
    beta2,
    weight_decay,
    eps,
    step,
    decouple_lr,
    max_lr,
    optimizer_accumulation,
    decouple_wd=True,
    **others,
):
    hypers = _decay(lr, weight_decay, decouple_wd, decouple_lr, max_lr, optimizer_accumulation)
    t = _count(step)
    hypers.update(beta1=_debiased(beta1, t), beta2=_debiased(beta2, t), eps=float(eps))
    others.update(writes=t - 1, optimizer_accumulation=optimizer_accumulation)
    if _step(name, params, grads, [exp_avgs, exp_avg_sqs], kahan_comps, hypers, **others):
        step.add_(1)


def adam(
    params: List[Tensor],
    grads: List[Tensor],
    exp_avgs: List[Tensor],
    exp_avg_sqs: List[Tensor],
    kahan_comps: Optional[List[Optional[Tensor]]] = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    step: Tensor,
    decouple_wd: bool,
    decouple_lr: bool = False,
    max_lr: Optional[float] = None,
    kahan_sum: bool = False,
    foreach: bool = False,
    triton: bool = False,
    gradient_release: bool = False,
    optimizer_accumulation: bool = False,
):
    """Makes one step of Adam on lists of tensors in place (on one tensor with `gradient_release`).

    All tensors are the caller's. `exp_avgs` and `exp_avg_sqs` are debiased moments. 16-bit
    parameters with `kahan_sum` need residuals, `kahan_comps`. `step` counts up by one. BF16 states
    are rounded stochastically. Second moments in float16 are stepped in float32 and rounded back.
    `grads` are only read.

    The C handle is kept for later calls with tensors of the same shapes and types. There are at
    most 64 handles, and they hold no states. A call takes about 25 microseconds for each tensor
    beside the step, which the classes do not take.

    Args:
        step: how many steps were made, in any dtype.
        max_lr: needed with `decouple_lr`.
        optimizer_accumulation: a micro-step: gradients go into the moments, parameters stay.
        foreach, triton: without effect.
    """
    _adam("adam", params, **arguments(locals()))


def adamw(
    params: List[Tensor],
    grads: List[Tensor],
    exp_avgs: List[Tensor],
    exp_avg_sqs: List[Tensor],
    kahan_comps: Optional[List[Optional[Tensor]]] = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    step: Tensor,
    decouple_lr: bool = False,
    max_lr: Optional[float] = None,
    kahan_sum: bool = False,
    foreach: bool = False,
    triton: bool = False,
    gradient_release: bool = False,
    optimizer_accumulation: bool = False,
):
    """Makes one step of AdamW on lists of tensors: `adam` with decoupled decay."""
    _adam("adamw", params, **arguments(locals()))


def stableadamw(
    params: List[Tensor],
    grads: List[Tensor],
    exp_avgs: List[Tensor],
    exp_avg_sqs: List[Tensor],
    eps_sqs: List[Tensor],
    kahan_comps: Optional[List[Optional[Tensor]]] = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    step: Tensor,
    decouple_lr: bool = False,
    max_lr: Optional[float] = None,
    kahan_sum: bool = False,
    foreach: bool = False,
    triton: bool = False,
    gradient_release: bool = False,
    optimizer_accumulation: bool = False,
    mean_squares: Optional[List[Tensor]] = None,
):
    """Makes one step of StableAdamW on lists of tensors; see `adam`. `eps_sqs` and `mean_squares`
    are optimi's scratch. They are not used, because the square of `eps` follows from `eps`."""
    _adam("stableadamw", params, **arguments(locals(), "eps_sqs", "mean_squares"))


def _rectified(
    name,
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    kahan_comps,
    lr,
    beta1,
    beta2,
    weight_decay,
    eps,
    step,
    decouple_wd,
    decouple_lr,
    max_lr,
    optimizer_accumulation,
    la_params=None,
    k=None,
    alpha=None,
    **others,
):
    """Makes a step of RAdam, or of Ranger if there are slow weights `la_params`."""
    hypers = _decay(lr, weight_decay, decouple_wd, decouple_lr, max_lr, optimizer_accumulation)
    t = _count(step)
    hypers.update(beta1=beta1, beta2=beta2, eps=float(eps))
    states = [exp_avgs, exp_avg_sqs]
    if la_params is not None:
        states.append(la_params)
        hypers.update(k=float(k), alpha=float(alpha))
    power = beta2**t
    rho_all = 2.0 / (1.0 - beta2) - 1.0
    rho = rho_all - 2.0 * t * power / (1.0 - power)
    debiased1, debiased2 = _debiased(beta1, t), _debiased(beta2, t)
    before, factors = t - 1, {}
    if optimizer_accumulation or (rho > 5.0 and debiased2 > 2.0 / 3.0):
        # The library's own rectification is 1 for a settled rule with these betas (above 2/3), so
        # the true one goes into lr.
        before = _SETTLED
        hypers.update(beta1=debiased1, beta2=debiased2)
        if not optimizer_accumulation:
            rate = math.sqrt(
                (rho - 4.0) * (rho - 2.0) * rho_all / ((rho_all - 4.0) * (rho_all - 2.0) * rho)
            )
            hypers["lr"] *= rate
            if hypers["decay"] != "l2":
                hypers["weight_decay"] /= rate
    else:
        factors = {
            n: (1.0 - b ** (t - 1), 1.0 / (1.0 - b**t))
            for n, b in (("exp_avg", beta1), ("exp_avg_sq", beta2))
        }
    others.update(before=before, full=t - 1, writes=t - 1, factors=factors)
    others["optimizer_accumulation"] = optimizer_accumulation
    if _step(name, params, grads, states, kahan_comps, hypers, **others):
        step.add_(1)


def radam(
    params: List[Tensor],
    grads: List[Tensor],
    exp_avgs: List[Tensor],
    exp_avg_sqs: List[Tensor],
    kahan_comps: Optional[List[Optional[Tensor]]] = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    step: Tensor,
    decouple_wd: bool,
    decouple_lr: bool = False,
    max_lr: Optional[float] = None,
    kahan_sum: bool = False,
    foreach: bool = False,
    triton: bool = False,
    gradient_release: bool = False,
    optimizer_accumulation: bool = False,
):
    """Makes one step of RAdam on lists of tensors; see `adam`. The first steps are not rectified
    (five of them, or all with beta2 up to 2/3). They take scratch memory of 8 bytes for each
    element of one tensor at a time."""
    _rectified("radam", params, **arguments(locals()))


def ranger(
    params: List[Tensor],
    grads: List[Tensor],
    exp_avgs: List[Tensor],
    exp_avg_sqs: List[Tensor],
    la_params: List[Tensor],
    kahan_comps: Optional[List[Optional[Tensor]]] = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    k: int,
    alpha: float,
    step: Tensor,
    decouple_wd: bool,
    decouple_lr: bool = False,
    max_lr: Optional[float] = None,
    kahan_sum: bool = False,
    foreach: bool = False,
    triton: bool = False,
    gradient_release: bool = False,
    optimizer_accumulation: bool = False,
):
    """Makes one step of Ranger on lists of tensors; see `radam`. The slow weights `la_params` are
    visited when the new `step` is a multiple of `k`.

    With `kahan_sum` the slow weights have a residual of their own, for which optimi's signature has
    no place. It lives here as long as the tensor in `la_params`. In another process it starts at
    zero.
    """
    _rectified("ranger", params, **arguments(locals()))


def adan(
    params: List[Tensor],
    grads: List[Tensor],
    exp_avgs: List[Tensor],
    exp_avg_diffs: List[Tensor],
    exp_avg_sqs: List[Tensor],
    prev_grads: List[Tensor],
    kahan_comps: Optional[List[Optional[Tensor]]] = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    beta3: float,
    weight_decay: float,
    eps: float,
    step: Tensor,
    decouple_lr: bool = False,
    max_lr: Optional[float] = None,
    adam_wd: bool = False,
    kahan_sum: bool = False,
    foreach: bool = False,
    triton: bool = False,
    gradient_release: bool = False,
    optimizer_accumulation: bool = False,
):
    """Makes one step of Adan on lists of tensors; see `adam`. `prev_grads` hold the negative of the
    previous gradients. Before the first step they hold that of the first gradients. Moments are
    scaled to raw ones and back in scratch memory: 12 bytes for each element of one tensor at a
    time."""
    hypers = _decay(
        lr, weight_decay, True, decouple_lr, max_lr, optimizer_accumulation, proximal=not adam_wd
    )
    t = _count(step)
    hypers.update(beta1=beta1, beta2=beta2, beta3=beta3, eps=float(eps))
    betas = {"exp_avg": beta1, "exp_avg_diff": beta2, "exp_avg_sq": beta3}
    factors = {n: (1.0 - b ** (t - 1), 1.0 / (1.0 - b**t)) for n, b in betas.items()}
    previous = [p.detach() for p in _listed(prev_grads)]
    if t == 1 and any(
        not torch.equal(p, g.detach().neg().to(p.dtype)) for p, g in zip(previous, _listed(grads))
    ):
        raise ValueError(
            "halfstep: before the first step prev_grads must hold the negative of the first"
            " gradients"
        )
    for p in previous:
        p.neg_()
    try:
        if _step(
            "adan",
            params,
            grads,
            [exp_avgs, exp_avg_diffs, exp_avg_sqs, previous],
            kahan_comps,
            hypers,
            kahan_sum=kahan_sum,
            foreach=foreach,
            triton=triton,
            gradient_release=gradient_release,
            optimizer_accumulation=optimizer_accumulation,
            before=t - 1,
            writes=t - 1,
            factors=factors,
        ):
            step.add_(1)
    finally:
        for p in previous:
            p.neg_()


def lion(
    params: List[Tensor],
    grads: List[Tensor],
    exp_avgs: List[Optional[Tensor]],
    kahan_comps: Optional[List[Optional[Tensor]]] = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    decouple_lr: bool = False,
    max_lr: Optional[float] = None,
    kahan_sum: bool = False,
    foreach: bool = False,
    triton: bool = False,
    gradient_release: bool = False,
    optimizer_accumulation: bool = False,
):
    """Makes one step of Lion on lists of tensors; see `adam`."""
    hypers = _decay(lr, weight_decay, True, decouple_lr, max_lr, optimizer_accumulation)
    hypers.update(beta1=float(beta1), beta2=float(beta2))
    _step(
        "lion",
        params,
        grads,
        [exp_avgs],
        kahan_comps,
        hypers,
        kahan_sum=kahan_sum,
        foreach=foreach,
        triton=triton,
        gradient_release=gradient_release,
        optimizer_accumulation=optimizer_accumulation,
    )


def sgd(
    params: Union[List[Tensor], Tensor],
    grads: Union[List[Tensor], Tensor],
    exp_avgs: Union[List[Optional[Tensor]], Tensor, None],
    kahan_comps: Union[List[Optional[Tensor]], Tensor, None] = None,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    dampening: bool,
    decouple_wd: bool,
    decouple_lr: bool = False,
    max_lr: Optional[float] = None,
    kahan_sum: bool = False,
    foreach: bool = False,
    triton: bool = False,
    gradient_release: bool = False,
    optimizer_accumulation: bool = False,
):
    """Makes one step of SGD on lists of tensors; see `adam`. Without momentum `exp_avgs` is not
    used, and a micro-step is refused, because it would drop the gradients."""
    if optimizer_accumulation and not momentum:
        raise ValueError(
            "halfstep: sgd without momentum keeps no gradients, so a micro-step would lose them;"
            " give momentum="
        )
    hypers = _decay(lr, weight_decay, decouple_wd, decouple_lr, max_lr, optimizer_accumulation)
    hypers.update(momentum=float(momentum), dampening=float(momentum) if dampening else 0.0)
    _step(
        "sgd",
        params,
        grads,
        [exp_avgs] if momentum else [],
        kahan_comps,
        hypers,
        kahan_sum=kahan_sum,
        foreach=foreach,
        triton=triton,
        gradient_release=gradient_release,
        optimizer_accumulation=optimizer_accumulation,
    )
