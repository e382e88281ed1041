"""State dictionaries: loading without casts, all checks before anything depends on what was loaded,
and torch's plain states.

torch's own loader casts every state tensor to the dtype of its parameter, which would turn scales
and counters into BF16. Here states pass through it wrapped, so that its checks and hooks all run
and its casts do not.
"""

import math
import warnings
from collections import OrderedDict, defaultdict
from ctypes import byref

import torch

from . import _abi, _convert, _foreign, _layout, _names, _sharding
from ._abi import check as c_check
from ._abi import lib

#: group keys that only this package has
OURS = (
    "weights",
    "states",
    "decay",
    "reference_lr",
    "first_lr",
    "seed",
    "generator",
    "centralize",
    "cautious",
    *_layout.TOLD,
)
#: rules whose optimizers in torch save no count of steps
_UNCOUNTED = ("sgd", "muon")
#: rules that differ in their decay alone, and load one another's states, as torch's do
_SIBLINGS = ("adam", "adamw")


class _Wrapped:
    """A state on its way through torch's loader, which leaves alone what is no tensor, dictionary
    or sequence."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def unwrap(states):
    """What is loaded, as a copy that shares no memory with the dictionary it came from: steps write
    in place."""
    out = defaultdict(dict)
    for p, value in states.items():
        out[p] = _copy(value.value) if isinstance(value, _Wrapped) else value
    return out


def _copy(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return value


# ---- Loading -------------------------------------------------------------------------------------


def _as_own(optimizer, state):
    """The states of a sibling rule under the name of this optimizer's."""
    if (
        optimizer.rule not in _SIBLINGS
        or not isinstance(state, dict)
        or state.get("recipe") is None
    ):
        return state
    try:
        there = _layout.recipe_of(state, "")
    except ValueError:  # which _check_state() says with the name of the parameter
        return state
    rule, _, formats = there.partition("/")
    if rule == optimizer.rule or rule not in _SIBLINGS:
        return state
    return {
        **state,
        "recipe": _layout.number(_layout.pack_recipe(f"{optimizer.rule}/{formats}"), "recipe"),
    }


def _with_names(state_dict):
    """The names that the file has beside its groups, in the groups: where hooks of torch's load
    look for them."""
    names, groups = state_dict["param_names"], state_dict["param_groups"]
    if (
        not isinstance(names, (list, tuple))
        or len(names) != len(groups)
        or not all(isinstance(own, (list, tuple)) for own in names)
    ):
        raise ValueError(
            "halfstep: 'param_names' of this state is no list of one list for each group"
        )
    for place, (own, group) in enumerate(zip(names, groups)):
        check_names({**group, "param_names": own} if None not in own else {}, place)
    return [
        group if any(name is None for name in own) else {"param_names": list(own), **group}
        for own, group in zip(names, groups)
    ]


def check_names(group, place):
    """Raises ValueError where the names of a group are not one for each of its parameters."""
    names = group.get("param_names", ())
    if (
        not isinstance(names, (list, tuple))
        or not all(isinstance(name, str) for name in names)
        or "param_names" in group
        and len(names) != len(group["params"])
    ):
        raise ValueError(
            f"halfstep: 'param_names' of group {place} is no list of one name for each of its"
            " parameters"
        )


def load(optimizer, state_dict, torch_load):
    """optimizer.load_state_dict(): torch_load is that of the base class."""
    optimizer._refresh_names()
    before = [dict(group) for group in optimizer.param_groups]

    def wrap(_, given):
        given = dict(given)
        given["state"] = {
            k: v if isinstance(v, _Wrapped) else _Wrapped(_as_own(optimizer, v))
            for k, v in given["state"].items()
        }
        for place, group in enumerate(given["param_groups"]):
            if not any(isinstance(key, str) for key in group["params"]):
                check_names(group, place)
        if not isinstance(given.get("weight_hashes", {}), dict):
            raise ValueError(
                "halfstep: 'weight_hashes' of this state is no dictionary of one tensor for each"
                " parameter's number"
            )
        given["param_groups"], renamed, positions = _names.align(optimizer, given["param_groups"])
        told.update(
            renamed=renamed,
            positions=positions,
            pending=given.get("pending", ()),
            hashes=given.get("weight_hashes", {}),
            places={
                key: i
                for i, key in enumerate(
                    key for group in given["param_groups"] for key in group["params"]
                )
            },
        )
        groups = []
        for place, (group, own) in enumerate(zip(given["param_groups"], before)):
            group = dict(group)
            if "seed" in group:
                group.setdefault("generator", _layout.OLD_GENERATOR)
            # Missing values, and formats, are the constructor's.
            for key, value in own.items():
                if key in ("weights", "states", "fused", "foreach", "capturable", "differentiable"):
                    group[key] = value
                elif key not in ("params", "param_names", *_layout.TOLD):
                    group.setdefault(
                        key, True if key == "train_mode" else value
                    )  # files without it hold what trains
            if optimizer.rule == "adamw":
                group["decoupled_weight_decay"] = True  # also where the group was Adam's
            if isinstance(own.get("lr"), torch.Tensor) and not isinstance(
                group["lr"], torch.Tensor
            ):
                group["lr"] = torch.tensor(
                    float(group["lr"]), dtype=own["lr"].dtype, device=own["lr"].device
                )
            groups.append(group)
        # A wrong number of groups is for torch to complain about.
        given["param_groups"] = groups + list(given["param_groups"][len(before) :])
        return given

    told = {}
    # The dictionary may share this optimizer's own, edited; what the handle knows must not go over
    # it.
    state_dict = dict(_foreign.translate(optimizer.rule, state_dict))
    state_dict["state"] = {
        k: dict(v) if isinstance(v, dict) else v for k, v in state_dict["state"].items()
    }
    if "param_names" in state_dict:
        state_dict["param_groups"] = _with_names(state_dict)
    hooks = optimizer._optimizer_load_state_dict_pre_hooks
    optimizer._optimizer_load_state_dict_pre_hooks = OrderedDict(hooks)
    optimizer._optimizer_load_state_dict_pre_hooks["halfstep"] = wrap
    optimizer._sync()
    kept = {key: getattr(optimizer, key) for key in ("state", "param_groups", "_watch", "_roster")}
    kept.update((key, dict(getattr(optimizer, key))) for key in ("_names", "_ids", "_pending"))
    try:
        torch_load(state_dict)
    except BaseException as error:
        vars(optimizer).update(kept)
        optimizer._engine = None
        if told.get("positions") and isinstance(error, ValueError):
            raise ValueError(f"{error}; {_unmatched(told)}") from None
        raise
    finally:
        optimizer._optimizer_load_state_dict_pre_hooks = hooks
    _take_told(optimizer, told)
    optimizer._show_estimates()
    if told.get("positions"):
        warnings.warn(f"halfstep: {_unmatched(told)}", UserWarning, stacklevel=3)
    _warn_of_conversions(optimizer)


def _unmatched(told):
    here, there = next(iter(told["renamed"].values()), ("?", "?"))
    return (
        f"none of the names in the state, such as {there!r}, is a name of a parameter here, such as"
        f" {here!r}, so that positions decided which state is whose"
    )


def _take_told(optimizer, told):
    """What a loaded dictionary says of parameters by number, beside their states."""
    flat = [p for group in optimizer.param_groups for p in group["params"]]
    for number, (_, name) in () if told.get("positions") else told.get("renamed", {}).items():
        if not optimizer.state.get(
            flat[number]
        ):  # it goes on with the random bits that it would have had there
            optimizer._ids[flat[number]] = _abi.name_id(
                _sharding.name_here(optimizer, flat[number], name)
            )
    places, pending = told.get("places", {}), told.get("pending", ())
    optimizer._pending = {flat[places[key]]: True for key in pending if key in places}
    optimizer._take_hashes(
        {flat[places[key]]: known for key, known in told.get("hashes", {}).items() if key in places}
    )


def _warn_of_conversions(optimizer):
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            state = optimizer.state.get(p)
            if not state:
                continue
            here, there = optimizer._full_recipe(g, i), _layout.recipe_of(state, "")
            if there is None:
                if _sharding.is_flat(p, optimizer.flat) and any(
                    _abi.formats[f].block for f in here.split("/")[2].split("+")
                ):
                    warnings.warn(
                        f"halfstep: plain states of a flat buffer were loaded into {here}, whose"
                        " blocks begin at this rank's shard: they are quantized anew, and go on"
                        " with other bits than before they were saved",
                        UserWarning,
                        stacklevel=4,
                    )
                    return
                continue
            if there != here:
                warnings.warn(
                    f"halfstep: the loaded states are {there}, this optimizer is {here}; they are"
                    " converted at the next step",
                    UserWarning,
                    stacklevel=4,
                )
                return


# ---- Checks --------------------------------------------------------------------------------------


def check(optimizer):
    """Raises ValueError where what was loaded cannot be what it claims."""
    known, ids = {}, {}
    for g, group in enumerate(optimizer.param_groups):
        optimizer._check_options(group)
        seed = group["seed"]
        if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
            raise ValueError(
                f"halfstep: the seed of group {g} is {seed!r}, not a number of 64 bits"
            )
        for key in _layout.TOLD:
            _layout.check_told(key, group[key], g)
        hypers = optimizer._hypers(group)
        for i, p in enumerate(group["params"]):
            name, state = optimizer._name_of(g, i), optimizer.state.get(p)
            if state is None or isinstance(state, dict) and not state:
                optimizer.state.pop(p, None)
                continue
            if not isinstance(state, dict):
                raise ValueError(
                    f"halfstep: the state of parameter {name!r} is a {type(state).__name__}, not a"
                    " dictionary"
                )
            _check_state(optimizer, known, name, p, state, hypers)
            identity = state.get("id")
            if identity is not None and ids.setdefault(int(identity), name) != name:
                raise ValueError(
                    f"halfstep: parameters {ids[int(identity)]!r} and {name!r} have the same id"
                )


def _check_state(optimizer, known, name, p, state, hypers):
    rule = _abi.rules[optimizer.rule]
    recipe = _layout.recipe_of(state, name)
    if recipe is not None and recipe.partition("/")[0] != optimizer.rule:
        raise ValueError(
            f"halfstep: the states of parameter {name!r} are of the recipe {recipe!r}; this"
            f" optimizer is {optimizer.rule}"
        )
    plain = recipe is None
    if plain and optimizer.rule in _UNCOUNTED:
        for s in rule.states:  # torch's SGD keeps such of a momentum that has not begun
            if s.name in state and state[s.name] is None:
                del state[s.name]
        if not state:
            optimizer.state.pop(p)
            return
    elif state.get("step") is None:
        raise ValueError(f"halfstep: parameter {name!r} has states and no 'step'")
    steps = _layout.step_count(state, name, 1)
    counts = {key: _layout.take_number(state, key, name) for key in _layout.COUNTERS}
    if p.numel() == 0:
        return
    kept = state.get(_layout.TRAINED)
    if kept is not None and (
        not isinstance(kept, torch.Tensor) or kept.dtype != p.dtype or kept.shape != p.shape
    ):
        raise ValueError(
            f"halfstep: state {_layout.TRAINED!r} of parameter {name!r} is not a tensor of"
            f" {p.dtype} of shape {tuple(p.shape)}"
        )
    identity = _layout.take_number(state, "id", name)
    if identity == 0:
        raise ValueError(f"halfstep: the id of parameter {name!r} is 0, which is none")
    part = _sharding.part_of(p, name, optimizer.flat, optimizer.rule)
    here = _sharding.local(p)
    gathered = part is not None and part.gathered
    codec = _convert.Codec(
        recipe or optimizer.rule,
        hypers,
        tuple(p.shape if gathered else here.shape),
        name,
        (identity or 1) % 2**64,
        part,
    )
    try:
        # As far as the library judges: counts, and numbers that no update leaves.
        counters = {key: steps if value is None else value for key, value in counts.items()}
        c_check(
            lib.halfstep_set_counters(
                codec.handle, codec.index, byref(_abi.Counters.new(**counters))
            ),
            codec.handle,
        )
        codec.take_scalars(state)
        roles = {s.name: s.role for s in rule.states}
        if plain:
            vectors = {s.name for s in rule.states if s.vector}
            shapes = {s.name: s.shape for s in codec.streams if s.name in vectors}
            for key in {s.name for s in codec.streams if s.name in roles and not s.extra} | (
                roles.keys() & state.keys()
            ):
                _check_plain(state, key, roles[key], name, p, shapes.get(key))
        else:
            _check_streams(codec, state, name, recipe, part)
    finally:
        codec.close()


def _check_plain(state, key, role, name, p, shape=None):
    """A state as torch keeps it, or a vector of a matrix."""
    if key not in state:
        raise ValueError(f"halfstep: parameter {name!r} has no state {key!r}")
    value, p = _sharding.local(state[key]), _sharding.local(p)
    shape = p.shape if shape is None else shape
    if (
        not isinstance(value, torch.Tensor)
        or value.shape != shape
        or not value.is_floating_point()
        or value.device.type == "meta"
        or value.layout != torch.strided
    ):
        found = (
            f"{value.dtype} of shape {tuple(value.shape)}"
            if isinstance(value, torch.Tensor)
            else type(value).__name__
        )
        raise ValueError(
            f"halfstep: state {key!r} of parameter {name!r} is {found}, not a tensor of shape"
            f" {tuple(shape)}"
        )
    _judge(key, name, value, role)


def _judge(key, name, values, role):
    if not values.numel():
        return
    least, most = torch.aminmax(values)  # NaN if there is one
    if not math.isfinite(least) or not math.isfinite(most):
        raise ValueError(
            f"halfstep: state {key!r} of parameter {name!r} has values that are not finite"
        )
    if role == _abi.ROLE_NONNEG and least < 0:
        raise ValueError(
            f"halfstep: state {key!r} of parameter {name!r} has negative values, of which it has"
            " none by itself"
        )


def _check_streams(codec, state, name, recipe, part=None):
    """States as this package keeps them: all there, of the right shapes, and nothing in them that
    no update leaves."""
    tensors, coarse = {}, _convert.coarse_states(codec.streams, state)
    for name_ in coarse:
        role = next(s.role for s in codec.streams if s.name == name_)
        _judge(
            name_,
            name,
            _convert.read_coarse(name_, role, recipe, codec.shape, name, state, part),
            role,
        )
    for s in codec.streams:
        if s.name in coarse:
            tensors[s.key] = torch.zeros(s.shape, dtype=s.dtype, device="cpu")
            continue
        if s.name in state and s.name + ".codes" in state:
            raise ValueError(
                f"halfstep: parameter {name!r} has both a state {s.name!r} and its codes"
            )
        if s.key not in state:
            raise ValueError(
                f"halfstep: parameter {name!r} has no state {s.key!r}, which {recipe} needs"
            )
        tensors[s.key] = tensor = _convert.adopt(state[s.key], s, name)
        if s.part == ".scale":
            _judge(s.key, name, tensor, _abi.ROLE_NONNEG)
        elif s.part != ".codes" and tensor.is_floating_point():
            _judge(s.key, name, tensor, 0 if s.extra else s.role)
    if codec.gathered:
        return  # codes mean something beside the others of their matrix only
    codec.bind(tensors)
    for s in codec.streams:
        if (
            s.part == ".codes"
            and tensors[s.key].numel()
            and not codec.all_codes_are_good(s, tensors[s.name + ".scale"].max())
        ):
            for values in codec.pieces(s.slot):
                _judge(s.name, name, values, s.role)


# ---- Parameters without elements -----------------------------------------------------------------


def count_empty(optimizer, group_index, position, p, steps=1):
    """A step of a parameter without elements, which is not in the handle: its counters are kept
    here."""
    identity, recipe = optimizer._identities([p])[p], optimizer._full_recipe(group_index, position)
    state = optimizer.state[p]
    packed = _layout.pack_recipe(recipe)
    if "step" not in state or "recipe" not in state or int(state["recipe"]) != packed:
        numbers = {
            key: state.get(key) for key in _layout.numbers_of(_abi.rules[optimizer.rule], ())
        }
        state.setdefault("step", 0)
        state.update(
            _convert.empty(recipe, optimizer._hypers(optimizer.param_groups[group_index]), p)
        )
        state.update(
            (key, _layout.number(0, key) if value is None else value)
            for key, value in numbers.items()
        )
        state["id"] = _layout.number(_layout.signed(identity), "id")
        state["recipe"] = _layout.number(packed, "recipe")
    steps = _layout.step_count(state, optimizer._name_of(group_index, position)) + steps
    state["step"] = torch.tensor(float(steps), dtype=torch.float32, device="cpu")
    state.update((key, _layout.number(steps, key)) for key in _layout.COUNTERS)


def sync_empty(optimizer):
    """Their other counters, where somebody has set the step."""
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            state = optimizer.state.get(p) if p.numel() == 0 else None
            if state and "state_steps" in state:
                steps = _layout.step_count(state, optimizer._name_of(g, i))
                if not _layout.same_count(state["state_steps"].item(), steps):
                    state.update((key, _layout.number(steps, key)) for key in _layout.COUNTERS)


# ---- Plain torch states --------------------------------------------------------------------------


@torch.no_grad()
def plain(optimizer):
    """optimizer.torch_state_dict()"""
    rule = _abi.rules[optimizer.rule]
    packed, states, flat, place = [], {}, 0, {}
    optimizer._notice(decides=False)
    optimizer._sync()
    for group in optimizer.param_groups:
        for p in group["params"]:
            place.setdefault(p, flat)
            flat += 1
            held = optimizer.state.get(p)
            if held:
                out = (
                    {"step": held["step"].clone()}
                    if "step" in held and optimizer.rule not in _UNCOUNTED
                    else {}
                )
                for s in rule.states:
                    if s.name in held or s.name + ".codes" in held:
                        out[s.name] = optimizer.read_state(p, s.name)
                states[place[p]] = out
        packed.append(
            {
                **{k: v for k, v in group.items() if k not in OURS and k != "params"},
                "params": [place[p] for p in group["params"]],
            }
        )
    return {"state": states, "param_groups": packed}
