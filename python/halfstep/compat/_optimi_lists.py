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
from functools import lru_cache
from typing import List, Optional, Union

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .._library import abi, calls
from .._library.abi import check, invoke, lib
from .._settings.options import seed_of
from .._states.handles import Handle
from .._tensors import devices, parameters, torch_public

__all__ = ["adam", "adamw", "adan", "lion", "radam", "ranger", "sgd", "stableadamw"]

#: float types that a Kahan residual serves
LOW = (torch.bfloat16, torch.float16)
_SETTLED = 2**40
_HANDLES = 64


class _Lists(Handle):
    """A handle for lists of tensors of one structure. Every call gives it memory, counters and
    hyper-parameters anew."""

    def __init__(self, rule, members):
        super().__init__(torch.get_num_threads(), 0)
        # Every call sets the steps, often to a number that only settles the rule. A generator of
        # lattices would go by them.
        self.set(generator="mixer")
        for i, (identity, shape, weight, states, gradient) in enumerate(members):
            recipe = "/".join([rule, weight] + (["+".join(states)] if states else []))
            self.add(recipe, f"params[{i}]", identity, shape, gradient)
        self.bound = [None] * len(members)
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
                invoke(lib.halfstep_bind_slot, self, i, slot, code, extra)
            self.bound[i] = wanted


# parameter -> [id of its random bits, writes]; slow weights -> their residual
_identities = WeakIdKeyDictionary()
_slow_residuals = WeakIdKeyDictionary()


@lru_cache(_HANDLES)
def _lists(rule, members, has_momentum):
    """Returns the handle for lists of this structure. SGD has a state only with a momentum."""
    return _Lists(rule, members)


def _identity(p, place):
    """Returns [id, writes] of a tensor. The functions have no seed. A seed is drawn as for an
    optimizer, and goes into the id of each tensor."""
    found = _identities.get(p)
    if found is None:
        found = _identities[p] = [(abi.name_id(place) + seed_of(None)) % 2**64, 0]
    return found


def _is_like(value, param, *dtypes):
    """Returns True for a tensor of the shape and device of a parameter, of one of these dtypes."""
    like = isinstance(value, Tensor) and value.dtype in dtypes
    return like and value.shape == param.shape and value.device == param.device


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
        self.back = []  # (the caller's, copy)
        self.param, self.grad = self._dense(param, True), self._dense(grad, False)
        kahan = kahan and param.dtype in LOW
        weight = parameters.PLAIN[param.dtype] + ("-kahan" if kahan else "")
        self.comp, formats, self.states, self.extras = None, [], [], []
        self.scaled = []  # state, the caller's, factors in and out
        if kahan:
            if not _is_like(comp, param, param.dtype):
                raise ValueError(
                    f"halfstep: kahan_sum=True needs kahan_comps[{i}] to be a tensor like"
                    f" params[{i}]"
                )
            self.comp = self._dense(comp, True)
        for k, (s, value) in enumerate(zip(rule.states, states)):
            copied, extra = s.role == abi.ROLE_WEIGHT, None
            dtypes = (param.dtype,) if copied else tuple(parameters.PLAIN)
            if not _is_like(value, param, *dtypes):
                raise ValueError(
                    f"halfstep: state {s.name!r} of {name} must be a tensor of the shape and device"
                    f" of {name}, of {' or '.join(map(str, dtypes))}"
                )
            if copied and kahan:
                if value not in _slow_residuals:
                    _slow_residuals[value] = devices.zeros(self.shape, param.dtype)
                extra = _slow_residuals[value]
            if s.name in factors or (s.role == abi.ROLE_NONNEG and value.dtype == torch.float16):
                # The library's half formats do not hold second moments, because those of small
                # gradients would be zero.
                formats.append("f32")
                self.scaled.append((k, value.detach(), *factors.get(s.name, (1.0, 1.0))))
                self.states.append(torch.empty(self.shape, dtype=torch.float32, device="cpu"))
            else:
                if not copied:
                    exact = value.dtype == torch.float32 or (
                        value.dtype == torch.float16 and s.role == abi.ROLE_GRADIENT
                    )
                    formats.append(parameters.PLAIN[value.dtype] + ("" if exact else "-sr"))
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
def _step(name, given, states, hypers, *, before=_SETTLED, full=0, writes=None, factors=()):
    """Makes one step of the library's rule `name` on lists of the caller's tensors. `given` holds
    the arguments of a public function by name, and `states` the lists of its states. Unless a
    gradient was not finite, `step` counts up from `writes`."""
    if given["foreach"] and given["gradient_release"]:
        raise ValueError("gradient_release and foreach cannot be used together")
    rule, micro, kahan = abi.rules[name], given["optimizer_accumulation"], given["kahan_sum"]
    params, grads, *states = map(_listed, (given["params"], given["grads"], *states))
    comps = given["kahan_comps"]
    comps = [None] * len(params) if comps is None else _listed(comps)
    for what, listed in (
        ("grads", grads),
        ("kahan_comps", comps),
        *((s.name, held) for s, held in zip(rule.states, states)),
    ):
        if len(listed) != len(params):
            raise ValueError(f"halfstep: {len(listed)} {what} for {len(params)} params")
    items = [
        _Item(i, p, g, [s[i] for s in states], c, rule, kahan, dict(factors))
        for i, (p, g, c) in enumerate(zip(params, grads, comps))
    ]
    # Scaled states need scratch memory, which is held for one tensor at a time. The others are
    # stepped in one call.
    batches = [[item for item in items if not item.scaled]] + [
        [item] for item in items if item.scaled
    ]
    if len(batches) > 2 and not all(bool(item.grad.isfinite().all()) for item in items):
        _refuse("a gradient is not finite")
        return
    made = True
    for batch in filter(None, batches):
        # A single tensor gets its id at each call, so that one handle serves all tensors of its
        # structure. For long lists that is slow.
        alone = batch[0].identity[0] if len(batch) == 1 else 0
        members = tuple((0 if alone else item.identity[0], *item.structure) for item in batch)
        lists = _lists(name, members, hypers.get("momentum", 1.0) != 0.0)
        lists.set(**hypers)
        lists.work(torch.get_num_threads())
        for i, item in enumerate(batch):
            lists.bind(i, item)
            lists.weights[i] = item.param.data_ptr() or 1
            lists.gradients[i] = item.grad.data_ptr() or 1
            count = item.identity[1] if writes is None else writes
            lists.count(i, id=alone, state_steps=before, full_steps=full, writes=count)
            item.load()
        code = calls.run(lists, calls.all_tensors(lists.weights, lists.gradients, micro))
        for item in batch:
            item.store(code == abi.OK)
            item.identity[1] += code == abi.OK
        if code == abi.NONFINITE:
            made = False
            _refuse(abi.why(lists))
        else:
            check(code, lists)
            if not micro:
                torch_public.increment_versions([item.owner for item in batch])
    if made and writes is not None:
        given["step"].add_(1)


def _refuse(why):
    torch_public.warn(f"{why}; the step was refused and changed nothing", RuntimeWarning)


def over(weight_decay, lr):
    """weight_decay / lr, for decay that does not depend on lr."""
    if weight_decay == 0:
        return 0.0
    if not lr:
        raise ValueError("halfstep: decouple_lr=True needs a max_lr above 0")
    return float(weight_decay) / float(lr)


def _hypers(name, given, proximal=False):
    """Returns the hyper-parameters of a rule, and the mode of its decay. Micro-steps do not decay
    and have no L2 term, as in optimi."""
    found = {key: float(given[key]) for key in abi.rules[name].hypers if key in given}
    found.update(reference_lr=0.0, decay="decoupled")
    if given["optimizer_accumulation"] or not found["weight_decay"]:
        return {**found, "weight_decay": 0.0}
    if proximal or not given.get("decouple_wd", True):
        found["decay"] = "proximal" if proximal else "l2"
    if given["decouple_lr"]:
        coefficient = over(given["weight_decay"], given["max_lr"])  # refuses max_lr None and 0
        if proximal:
            found["weight_decay"] = coefficient
        else:
            found.update(reference_lr=float(given["max_lr"]), decay="fully-decoupled")
    return found


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


def _raw(t, **betas):
    """Returns the factors from debiased averages to raw ones before update number t, and back
    after it."""
    return {n: (1.0 - b ** (t - 1), 1.0 / (1.0 - b**t)) for n, b in betas.items()}


def _adam(name, given):
    """Makes a step of a rule of Adam's kind. `given` is that of _step()."""
    hypers, t = _hypers(name, given), _count(given["step"])
    hypers.update(beta1=_debiased(given["beta1"], t), beta2=_debiased(given["beta2"], t))
    _step(name, given, [given["exp_avgs"], given["exp_avg_sqs"]], hypers, writes=t - 1)


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
    _adam("adam", locals())


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
    _adam("adamw", locals())


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
    _adam("stableadamw", locals())


def _rectified(name, given):
    """Makes a step of RAdam, or of Ranger if there are slow weights `la_params`. `given` is that of
    _step()."""
    hypers, t, micro = _hypers(name, given), _count(given["step"]), given["optimizer_accumulation"]
    states = [given[key] for key in ("exp_avgs", "exp_avg_sqs", "la_params") if key in given]
    beta1, beta2 = given["beta1"], given["beta2"]
    power = beta2**t
    rho_all = 2.0 / (1.0 - beta2) - 1.0
    rho = rho_all - 2.0 * t * power / (1.0 - power)
    debiased1, debiased2 = _debiased(beta1, t), _debiased(beta2, t)
    before, factors = t - 1, {}
    if micro or (rho > 5.0 and debiased2 > 2.0 / 3.0):
        # The library's own rectification is 1 for a settled rule with these betas (above 2/3), so
        # the true one goes into lr.
        before = _SETTLED
        hypers.update(beta1=debiased1, beta2=debiased2)
        if not micro:
            rate = math.sqrt(
                (rho - 4.0) * (rho - 2.0) * rho_all / ((rho_all - 4.0) * (rho_all - 2.0) * rho)
            )
            hypers["lr"] *= rate
            if hypers["decay"] != "l2":
                hypers["weight_decay"] /= rate
    else:
        factors = _raw(t, exp_avg=beta1, exp_avg_sq=beta2)
    counts = {"before": before, "full": t - 1, "writes": t - 1}
    _step(name, given, states, hypers, **counts, factors=factors)


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
    _rectified("radam", locals())


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
    _rectified("ranger", locals())


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
    given = locals()
    hypers, t = _hypers("adan", given, proximal=not adam_wd), _count(step)
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
        states = [exp_avgs, exp_avg_diffs, exp_avg_sqs, previous]
        factors = _raw(t, exp_avg=beta1, exp_avg_diff=beta2, exp_avg_sq=beta3)
        _step("adan", given, states, hypers, before=t - 1, writes=t - 1, factors=factors)
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
    _step("lion", locals(), [exp_avgs], _hypers("lion", locals()))


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
    hypers = _hypers("sgd", locals())
    hypers["dampening"] = float(momentum) if dampening else 0.0
    _step("sgd", locals(), [exp_avgs] if momentum else [], hypers)
