"""`Optimizer`, the base of all classes of this package. rules.py makes the classes, and the objects
of _step/parts.py do the work.

This file is longer than 500 lines because half of it is the manual of one class.
"""

import os
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, Union

import torch

from . import accumulate
from ._library import abi
from ._placement.host import Offloaded
from ._settings.options import Options, Store, StoreLike, keep_plain, seed_of
from ._states import checkpoints, checks, files, layout, sources
from ._states.handles import Handle
from ._step.parts import Parts
from ._step.release import check_release
from ._tensors import matrices, sharding
from ._tensors.parameters import check_parameter, format_of
from ._tensors.torch_private import is_compiling, no_dynamo, note_step, notes_its_calls
from ._tensors.torch_public import VERSION, unwrapped, warn_once

#: what optimizers take
Params = Union[Iterable[torch.Tensor], Iterable[Dict[str, Any]], Iterable[Tuple[str, torch.Tensor]]]
# From this version on torch itself takes (name, tensor) pairs.
_NAMED = VERSION >= (2, 6)


def name_parameters(module: torch.nn.Module, prefix: str = "") -> None:
    """Gives the parameters of `module` their names, which key their random bits and stand in
    messages.

    Call it before the optimizer's first step. Call it again after parameters were replaced, as
    sharding does. Optimizers that are given `(name, tensor)` pairs (`model.named_parameters()`)
    need no such call.

    module  the model
    prefix  put before each name, with a dot between
    """
    for name, p in module.named_parameters(prefix=prefix):
        p._halfstep_name = name


def several(optimizer: Any) -> List["Optimizer"]:
    """Returns one or several optimizers as a list, without their wrappers. Raises TypeError for an
    optimizer that is not of this package."""
    found = [optimizer] if hasattr(optimizer, "param_groups") else list(optimizer)
    for i, one in enumerate(map(unwrapped, found)):
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"halfstep: a {type(one).__name__} is not one of halfstep's optimizers; its"
                " weights are what they are in the model, so leave it out"
            )
        found[i] = one
    return found


def split_pairs(group: Dict[str, Any]) -> None:
    """Replaces (name, tensor) pairs of a group by the parameters, and gives the group the names."""
    params = group["params"]
    if isinstance(params, torch.Tensor):
        params = [params]
    elif not isinstance(params, set):
        params = list(params)
        if params and all(isinstance(p, tuple) for p in params):
            group["param_names"], params = [name for name, _ in params], [p for _, p in params]
    group["params"] = params


def _kept(name: str) -> Any:
    """Returns an attribute of optimizers that their Groups keep. It is a property, because
    torch.compile traces those."""
    return property(
        lambda self: getattr(self._parts.groups, name),
        lambda self, value: setattr(self._parts.groups, name, value),
    )


def _state_as_it_is(optimizer):
    """Returns the state of an optimizer after all submitted work is done, because callers read it.
    Trainers move it to another device, and expect that its former memory is free then."""
    parts = optimizer._parts
    if not is_compiling():
        parts.cache.hear()
        if parts.cache.engine is not None:
            parts.cache.engine.let_go()
    return parts.groups.state


class Kept:
    """An attribute of optimizers that their Options keep. `initial` is its value after a pickle
    that lacks it. `flag`: it is True or False."""

    def __init__(self, initial: Any = None, flag: bool = False) -> None:
        self.initial, self.flag = initial, flag

    def __set_name__(self, cls, name):
        self.name = name

    def __get__(self, optimizer: Any, cls: Any = None) -> Any:
        return self.initial if optimizer is None else getattr(optimizer._parts.options, self.name)

    def __set__(self, optimizer: Any, value: Any) -> None:
        if self.flag:
            abi.check_flags(**{self.name: value})
        if not hasattr(optimizer, "_parts"):
            optimizer._make_parts()
        setattr(optimizer._parts.options, self.name, abi.plainly(value))


class Optimizer(torch.optim.Optimizer):
    """The base of all optimizers of halfstep: a `torch.optim.Optimizer` whose step is one call of
    the C library.

    Every class has the common options below. They mean the same in all classes. docs/python.md says
    more.

    params          the parameters to step: tensors, (name, tensor) pairs such as
                    `model.named_parameters()`, or a dictionary for each group

    Options of a group, which each step reads anew like `lr`:

    weights         format of BF16 parameters: "bf16-sr" (default), "bf16-kahan", "bf16-ecc8",
                    "bf16-ecc16" or "bf16". float16 parameters take the namesake ("f16-sr").
                    float32 parameters stay float32. Weights of halfstep.nn.quantize_() have a
                    format of their own. "int8-ecc4" and "int8-sr" mean it, and "bf16-ecc8" and
                    "bf16-sr" for other parameters
    states          format of the states: "int8", "int4", "fp8", "bf16-sr", "f32" ..., or one for
                    each state, "int8+bf16-sr". None: f32 for float32 parameters, bf16-sr for others
    decay           how `weight_decay` acts: "l2", "decoupled", "fully-decoupled" (by
                    lr / reference_lr), "proximal" or "cautious" (decoupled, but not where the
                    update alone moves the weight away from 0). None: the rule's default
    reference_lr    the lr at which fully decoupled decay is `weight_decay`. 0: the first lr
    maximize        True: steps go up the gradient
    centralize      the fraction of each row's mean that is subtracted from the gradient
    cautious        True: only elements move whose update has their gradient's sign (Liang et al.
                    2024). Some rules do not have it

    Options of the optimizer:

    clip_norm       the largest norm of all gradients; larger ones are scaled down to it. 0: no
                    clipping. `grad_norm` reads the norm
    clip            with gradient_release: "delayed" clips by the norm of the round before,
                    "per-tensor" clips each tensor by its own norm
    scan            "scan" (default): a gradient that is not finite makes the step change nothing.
                    "per-tensor": only its tensor is left alone. "known-finite": nobody looks
    generator       the source of random bits: "lattice" (default), "mixer" or "philox7"
    seed            the seed of the random bits. None: it is drawn once from torch's generator, so
                    that torch.manual_seed() governs it. Where torch.distributed is initialized it
                    is 0 on all ranks
    threads         the number of threads. 0: torch.get_num_threads() at each step
    gradient_release          True: each parameter is stepped inside the backward pass, see
                              prepare_gradient_release()
    norm_group      a torch.distributed group (True: all ranks) whose ranks hold different
                    parameters: ZeroRedundancyOptimizer, a pipeline, flat shards. The norm to clip
                    by, the verdict on gradients and a rule's sums over all tensors are then those
                    of the whole group. All its ranks call step() equally often. Not saved and not
                    copied
    owners          a torch.distributed group (True: all ranks) whose ranks hold the same
                    parameters and gradients, as under DistributedDataParallel. Each matrix of Muon,
                    Adafactor and CAME is then stepped by one rank, which sends weight and states to
                    the others. DTensors need no such option. Not saved and not copied
    flat            True: vectors of 4096 elements or more are flat buffers of many parameters,
                    which take block formats. "shards": each rank also holds another shard, and gets
                    random bits of its own. FSDP1's buffers are recognized without it
    store           a file that keeps the states in place of memory, and is the checkpoint: its
                    path, or a halfstep.Store with options, in text "run.states?weights=false". Each
                    step reads the states from there and writes them and the weights there. A file
                    that exists is resumed: weights, states, counters and the groups' options are
                    read from it. Parameters are stepped by the processor. The option is not saved
    states_from     the path of a trainer's checkpoint, from which load_states() takes the first
                    states. A file of `store` that exists is resumed instead. The option is not
                    saved
    compile         True: torch.compile(fullgraph=True) can trace step()
    fused           True: a GradScaler leaves unscaling to the step
    foreach         accepted and without effect: one call steps all parameters
    capturable      accepted and without effect
    differentiable  False: no gradient goes through a step. True is refused
    """

    #: name in the library's table of rules
    rule: Optional[str] = None

    param_groups, defaults = map(_kept, ("param_groups", "defaults"))
    state = property(_state_as_it_is, _kept("state").fset)
    clip_norm, clip, scan, threads, flat = map(Kept, (0.0, None, None, 0, False))
    #: True: gradients go into the states and leave the weights alone; the last micro-batch of a
    #: step is made with False
    optimizer_accumulation = Kept(False, flag=True)
    gradient_release = Kept(False, flag=True)
    store = Kept(None)
    compile = False  # in pickles that lack it
    #: True: `weights` comes from whoever makes the optimizer, not from the class
    _weights_asked = True
    #: what options mean, and where parameters are stepped
    _options, _placement = Options, Offloaded

    def __init__(
        self,
        params: Params,
        defaults: Dict[str, Any],
        *,
        weights: Optional[str] = None,
        states: Optional[str] = None,
        decay: Optional[str] = None,
        reference_lr: float = 0.0,
        clip_norm: float = 0.0,
        clip: Optional[str] = None,
        scan: Optional[str] = None,
        generator: Optional[str] = None,
        seed: Optional[int] = None,
        threads: int = 0,
        gradient_release: bool = False,
        norm_group: Any = None,
        owners: Any = None,
        flat: Union[bool, str] = False,
        foreach: Optional[bool] = None,
        fused: Optional[bool] = None,
        capturable: bool = False,
        differentiable: bool = False,
        compile: bool = False,
        store: Optional[StoreLike] = None,
        states_from: Optional[str] = None,
    ) -> None:
        if differentiable:
            raise ValueError(
                f"halfstep: {type(self).__name__} cannot be differentiated through; leave"
                " differentiable=True out"
            )
        if isinstance(params, torch.nn.Module):
            raise TypeError(
                f"halfstep: params is a module, {type(params).__name__}; give its"
                " named_parameters()"
            )
        abi.check_flags(
            gradient_release=gradient_release,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            compile=compile,
            norm_group=norm_group,
            owners=owners,
        )
        if fused and foreach:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        self.clip_norm, self.clip, self.scan = clip_norm, clip, scan
        if flat not in (False, True, "shards"):
            raise ValueError(f"halfstep: unknown flat={flat!r}; known: False, True, 'shards'")
        self.norm_group, self.flat, self.threads = norm_group, flat, threads
        self.compile = compile
        self.owners = owners
        self.store = Store.of(store)
        if compile:
            self._register()
        self.gradient_release = False
        defaults = {
            **defaults,
            "weights": weights,
            "states": states,
            "decay": decay,
            "reference_lr": reference_lr,
            "seed": seed_of(seed),
            "generator": abi.choices("generator")[0] if generator is None else generator,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": False,
            "fused": fused,
        }
        keep_plain(defaults)
        self._parts.options.check(defaults)
        Handle(threads, 0).close()  # refuses malformed environment variables, before the first step
        super().__init__(params, defaults)
        self._parts.groups.check_quantized()
        if self._weights_asked:
            self._parts.groups.warn_of_idle_weights()
        resumed = self.store is not None and os.path.exists(self.store)
        if self.store is not None:
            self._parts.store.begin(self.load_state_dict, compile)
        if states_from is not None and not resumed:
            self.load_states(states_from)
        if gradient_release:
            self.prepare_gradient_release()

    def _make_parts(self):
        """Makes the objects that do the work: for the first option that a constructor sets, or for
        __setstate__(). A wrapper of an optimizer has none of its own."""
        cls = type(self)
        kept = {
            name: getattr(cls, name)
            for c in cls.__mro__
            for name, held in vars(c).items()
            if isinstance(held, Kept)
        }
        self._parts = Parts(self._options(self.rule, cls.__name__, kept), self._placement)

    def _register(self):
        """Registers this optimizer, or copy of one, for compiled steps, and gives it a witness."""
        from ._step import compiled

        self._number, self._witness = compiled.register(self)
        self._parts.residuals.restart(self._witness)

    # ---- Groups and options ----------------------------------------------------------------------

    @no_dynamo
    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group as torch's optimizers do. Refuses parameters that cannot be stepped."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        if not _NAMED:
            split_pairs(param_group)
        parts = self._parts
        parts.store.check_open_to_groups()
        parts.names.refresh()  # all groups have names or none does; torch looks
        super().add_param_group(param_group)
        try:
            self._check_new_group(len(self.param_groups) - 1)
        except BaseException:
            self.param_groups.pop()
            raise
        parts.names.refresh()
        parts.groups.begin(self.param_groups[-1])
        parts.cache.drop()
        parts.groups.show_estimates()
        parts.steps.doubt_ranks()
        parts.placement.hook()
        if self.gradient_release:
            self.prepare_gradient_release()

    def _check_new_group(self, place):
        parts, group = self._parts, self.param_groups[place]
        parts.groups.check_keys(group)
        keep_plain(group)
        if "param_names" in group:
            checks.check_names(group, place)
            parts.names.give(group)
        parts.options.check(group)
        taking_part = []
        for i, p in enumerate(group["params"]):
            if parts.groups.takes_part(p):
                taking_part.append(i)
                name = parts.names.of(place, i)
                check_parameter(p, name)
                format_of(parts.options.formats(group, p)[0], p, name)
                matrices.lay(parts.groups.row_of(group).name, p.shape, matrices.how_of(group))
        if self.compile:
            for refuse in (sharding.refuse, sharding.refuse_packed):
                advice = "torch.compile the model and call step() as it is"
                refuse(group["params"], "compile=True", advice)
        parts.inspection.check_cuts(place)
        for caveat in layout.caveats(parts.names.recipe(place, i) for i in taking_part):
            warn_once(caveat)

    @property
    def seed(self) -> int:
        """The seed of the random bits. It is kept in `param_groups`."""
        return self.param_groups[0].get("seed", 0)

    @property
    def generator(self) -> str:
        """The name of the generator of random bits. It is kept in `param_groups`, so that a loaded
        state goes on with its bits."""
        return self.param_groups[0]["generator"]

    @generator.setter
    def generator(self, name: str) -> None:
        for group in self.param_groups:
            group["generator"] = name

    @property
    def norm_group(self) -> Any:
        """The torch.distributed group of the option. It can be neither saved nor copied, so set it
        again after loading or copying."""
        return self._parts.options.norm_group

    @norm_group.setter
    def norm_group(self, group: Any) -> None:
        self._share("norm_group", group)

    def _share(self, option, group):
        """Sets the process group of an option. Handles are made anew, once ranks have agreed."""
        setattr(self._parts.options, option, group)
        self._parts.steps.doubt_ranks()
        self._parts.cache.drop()

    @property
    def owners(self) -> Any:
        """The torch.distributed group of the option. It can be neither saved nor copied, so set it
        again after loading or copying."""
        return self._parts.options.owners

    @owners.setter
    def owners(self, group: Any) -> None:
        rules = self.rule, *self._parts.options.partners
        if group and not any(abi.rules[rule].matrix for rule in rules):
            raise ValueError(
                f"halfstep: owners={group!r}, but {type(self).__name__} steps no matrices as a"
                " whole, so no rank can do it for others: leave owners out"
            )
        if group and self.compile:
            raise ValueError(
                f"halfstep: owners={group!r} is not available with compile=True, because a traced"
                " step is one rank's alone: torch.compile the model and call step() as it is"
            )
        self._share("owners", group)

    # ---- Steps -----------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self):
        """True if a GradScaler leaves scaled gradients to step(). It asks in each step. Where it is
        False, it divides gradients by an operator that moves no version counters."""
        self._parts.placement.doubt()
        return bool(self.defaults["fused"])

    @notes_its_calls
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Updates every parameter that has a gradient. Returns what `closure` returns.

        If a gradient is not finite, nothing changes (see `scan`). `skipped_steps` counts such
        steps, and the first one gives a warning.
        """
        note_step(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.compile:
            from ._step import compiled

            compiled.step(self)
        else:
            self._step()
        return loss

    @no_dynamo
    @torch.no_grad()
    def _step(self, given=None, witness=None):
        """Makes the step. Inside the operator of a compiled step, `given` holds its weights and
        gradients by parameter, and `witness` is its witness."""
        note_step(self)  # which a traced step() does not carry out
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        self._parts.steps.step(self.step_param, scale, found_inf, given, witness)

    @no_dynamo
    @torch.no_grad()
    def step_param(self, p: torch.Tensor, group: Any = None) -> None:
        """Updates one parameter from its gradient, which stays. Trainers that step inside the
        backward pass call this function. When the round is over, call step() or nothing.

        p      the parameter
        group  accepted without effect, because the parameter's own group counts
        """
        note_step(self)
        self._parts.steps.step_param(p)

    def step_parameter(self, p: torch.Tensor, group: Any = None, index: Any = None) -> None:
        """Calls step_param(). Some trainers use this name. `group` and `index` have no effect."""
        self.step_param(p, group)

    @staticmethod
    def supports_fused_back_pass() -> bool:
        """Returns True: step_param() and step_parameter() may be called inside the backward
        pass."""
        return True

    @no_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients as torch's optimizers do, and the sums that a GradientAccumulator holds
        of these parameters. In gradient release it ends the round, also after a backward() that
        failed."""
        self._parts.placement.forget()
        super().zero_grad(set_to_none)
        accumulate.drop(self._parts.groups.params())
        if self.gradient_release:
            self._parts.steps.zero_grad()

    def prepare_gradient_release(self) -> None:
        """Makes backward() step each parameter as soon as it has its gradient, and free the
        gradient.

        Call step() and zero_grad() as before. step() steps the parameters that still have a
        gradient, and ends the round, which schedules and "delayed" clipping count. Shared
        parameters are stepped once, when their gradient is complete.

        Each backward() is a step then. This excludes:

        * trainers that accumulate. Set their gradient_accumulation_steps to 1, or set
          `optimizer_accumulation` during all micro-batches but the last. A second backward()
          before step(), in a loop that calls step(), raises RuntimeError
        * DistributedDataParallel, because its all-reduce writes the gradients later (RuntimeError).
          fully_shard() works, because its gradients are reduced before they come here
        * torch.nn.utils.clip_grad_norm_(), which finds no gradients any more. This cannot be
          detected here: use `clip_norm` with `clip`
        * Prodigy, whose sums are over all tensors, so that no tensor can move before all gradients
          are there (ValueError)
        """
        check_release(abi.rules[self.rule], type(self).__name__)
        self.gradient_release = True
        self._parts.release.prepare(self, type(self)._take)

    def _take(self, p):
        """Takes the complete gradient of a parameter in gradient release."""
        note_step(self)
        if self._parts.steps.take(p):
            self.step_param(p)
            p.grad = None

    def remove_gradient_release(self) -> None:
        """Goes back to ordinary steps. States and counters stay."""
        self._parts.steps.end_release()
        self.gradient_release = False

    # ---- What happened, and what is stored -------------------------------------------------------

    @property
    def skipped_steps(self) -> int:
        """The number of steps refused so far because a gradient was not finite. On a GPU this waits
        for all submitted steps, as grad_norm does."""
        return self._parts.cache.told("skipped_steps")

    @property
    def grad_norm(self) -> float:
        """The norm of all gradients in the last step, before clipping. It is 0.0 if clip_norm is
        0."""
        return self._parts.cache.told("last_norm")

    def scalar(self, p: torch.Tensor, name: str) -> float:
        """Returns a number that the rule keeps for a parameter, such as lamb's "trust_ratio",
        "weight_norm" or "update_norm". Raises HalfstepError if the rule has no such number."""
        return self._parts.inspection.scalar(p, name)

    def recipe(self, p: torch.Tensor) -> str:
        """Returns the full recipe of a parameter, such as "adamw/bf16-sr/int8"."""
        return self._parts.inspection.recipe(p)

    def memory(self) -> Dict[str, int]:
        """Returns the bytes of "weights", "gradients", "extras" (residuals and error codes beside
        weights) and "states" (with scales) of all parameters that are not frozen. States are those
        after every parameter was stepped."""
        return self._parts.inspection.survey()[0]

    def fell_back(self) -> List[str]:
        """Returns the names of the parameters that keep plain states because they are too small for
        the block format of their recipe."""
        return self._parts.inspection.survey()[1]

    def __repr__(self) -> str:
        return self._parts.inspection.text()

    def read_weight(self, p: torch.Tensor) -> torch.Tensor:
        """Returns the weight in fp32, with its residual or error code."""
        return self._parts.inspection.read_weight(p)

    def read_average(self, p: torch.Tensor) -> torch.Tensor:
        """Returns the weight for evaluation in fp32: the average of schedule-free training, or the
        weight itself for other rules."""
        return self._parts.inspection.read_average(p)

    def read_state(self, p: torch.Tensor, name: str) -> torch.Tensor:
        """Returns a state such as "exp_avg" decoded to fp32, in the parameter's shape. A vector
        over rows or columns is returned as a vector, whole on every rank."""
        return self._parts.inspection.read_state(p, name)

    def write_weight(self, p: torch.Tensor, values: torch.Tensor) -> None:
        """Stores fp32 values as the weight, with its residual or error code. The counterpart of
        read_weight()."""
        self._parts.inspection.write_weight(p, values)

    def weights_changed(self, names: Optional[Iterable[str]] = None) -> None:
        """Says that weights were written where torch counts no write: inside `p.data`, through raw
        pointers, by another library. Their residuals and error codes are dropped as after a write
        that this optimizer notices itself, without a warning.

        names   the names of the parameters. None: all. Raises ValueError for an unknown name
        """
        self._parts.residuals.tell(names)

    def write_state(self, p: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Stores fp32 values as a state, rounded to nearest. `values` has the parameter's shape.
        Raises HalfstepError if a second moment is negative or not finite."""
        self._parts.inspection.write_state(p, name, values)

    # ---- Saving ----------------------------------------------------------------------------------

    @no_dynamo
    def state_dict(self) -> Dict[str, Any]:
        """Returns the state as torch's optimizers do. It loads with torch.load(weights_only=True).

        `state` holds tensors only, as they are stored (layout.py lists them). `param_groups` holds
        the options, the seed, the counts of steps and the names that were given with the
        parameters. "param_names" holds all names, a list for each group.

        The tensors in `state` are the optimizer's own, so steps go on changing them. The options
        are those of the time of the call. For a copy that stays, call copy.deepcopy(). States that
        are in a file are read into memory, all of them, and stay as they are."""
        kept, self.state = self.state, self._parts.saving.states()
        try:
            found = super().state_dict()
        finally:
            self.state = kept
        return self._parts.saving.complete(found)

    @no_dynamo
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Loads what state_dict() returned, bit for bit. Also loads states of torch's own
        optimizers of the same rule.

        Hyper-parameters, seed, generator, ids and counters come from the dictionary. Formats stay
        those of this optimizer. States in other formats are converted, with one warning. Group keys
        that are missing keep this optimizer's values.
        """
        loading = self._parts.saving.loading(state_dict)
        hook = self.register_load_state_dict_pre_hook(loading.wrap)
        try:
            super().load_state_dict(loading.state_dict)
        except BaseException as error:
            self._parts.saving.undo(loading, error)
            raise
        finally:
            hook.remove()
        loading.finish()
        self._parts.store.settle()
        self._parts.steps.doubt_ranks()  # every rank loads, and maybe not the same
        if self.gradient_release:
            self.prepare_gradient_release()

    def torch_state_dict(self) -> Dict[str, Any]:
        """Returns the state as torch's own optimizer of the same rule saves it: fp32 states, plain
        groups."""
        return self._parts.saving.plain()

    def close_store(self) -> None:
        """Closes the file of `store`, so that another optimizer can open it. This one cannot be
        stepped any more."""
        self._parts.cache.forget()
        self._parts.store.close()

    def save_safetensors(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Writes the optimizer to a safetensors file in the layout of halfstep's checkpoints
        (docs/checkpoints.md), whole or not at all. Requires the package safetensors. Other programs
        can read the file if the parameters have names."""
        files.save(self._parts, path)

    def load_safetensors(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Reads a file of save_safetensors(), or of halfstep_write_optimizer() in C. Parameters are
        matched by name. If the file holds weights too, they go into the parameters."""
        store = self._parts.cache.store
        state_dict, weights = files.load(self._parts, path, store is not None)
        if store is not None and store.takes(state_dict["state"]):
            store.load(path, state_dict, self.load_state_dict)
        else:
            if store is not None:  # which has to be converted
                state_dict["state"] = files.load(self._parts, path)[0]["state"]
            self.load_state_dict(state_dict)
        with torch.no_grad():
            for p, weight in weights:
                sharding.stored(p).copy_(weight)

    def load_states(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Takes the states, counters, seed and generator of a checkpoint that another trainer, or
        this one, has written: a file or a folder (docs/guides/resume.md lists them). No code in it
        is run.

        Parameters are matched by name, whatever groups they were in. Without names, positions count
        if the groups have as many parameters. Options such as `lr` stay as they are. Residuals and
        error codes belong to the weights of the checkpoint, so load those too.

        With DTensors all ranks call it, and each reads its part. If one of them raises an error,
        all do, and nothing has changed."""
        with sources.together(self._parts.groups) as agree:
            state_dict, renamed = checkpoints.read(self._parts, path)
            hook = self.register_load_state_dict_post_hook(agree)
            try:
                self.load_state_dict(state_dict)
            finally:
                hook.remove()
        for p, name in renamed.items():
            if name is not None and not self._parts.groups.state.get(p):
                self._parts.names.expect_name(p, name)

    def __getstate__(self):
        return self._parts.saving.pickled(self.__dict__)

    def __setstate__(self, state):
        # Called for copies and pickles with everything, and by load_state_dict() with states and
        # groups alone.
        if "_parts" not in self.__dict__:
            self._make_parts()
        saving = self._parts.saving
        saving.restart(self.__dict__.get("_witness"))
        attributes = saving.unpack(state)
        super().__setstate__(attributes)
        saving.unpacked("defaults" not in state)
        self._parts.placement.hook()
        if state.get("compile"):
            self._register()
        if state.get("gradient_release"):
            self.prepare_gradient_release()
