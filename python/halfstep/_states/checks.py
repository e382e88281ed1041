"""Checks loaded states, and makes the plain states of torch's optimizers."""

import math

import torch

from .._library import abi, calls
from .._settings import naming
from .._settings.groups import COMMON, OWN, TOLD, check_told
from .._settings.options import check_seed
from .._tensors import matrices, sharding
from .._tensors.parameters import described, holds
from . import convert, layout

#: group keys that only this package has; torch has "maximize", too
_OWN = ("first_lr", "seed", "generator", "matrix", "heads", "split")
OURS = {*OWN, *COMMON, *TOLD, *_OWN} - {"maximize"}
#: advice for an optimizer whose groups may have several rules
_GROUPS = "; make the optimizer with groups of the same rules as they were saved with"
#: rules whose optimizers in torch save no step count
_UNCOUNTED = ("sgd", "muon")


def check_names(group, place):
    """Raises ValueError if a group has names, but not one for each of its parameters."""
    names = group.get("param_names", ())
    if (
        not isinstance(names, (list, tuple))
        or not all(isinstance(name, str) for name in names)
        or "param_names" in group
        and len(names) != len(group["params"])
    ):
        raise ValueError(
            f"halfstep: 'param_names' of group {place} is not a list of one name for each of its"
            " parameters"
        )


# ---- What holds states ---------------------------------------------------------------------------


def is_state(value):
    """Returns True for what state_dict() of an optimizer returns."""
    return isinstance(value, dict) and "state" in value and "param_groups" in value


def states_in(held, place="", deep=2):
    """Returns the state dictionaries that a dictionary or list holds, and those that its members
    hold, by their places: "['optimizer'][0]"."""
    found = {}
    if not deep or not isinstance(held, (dict, list, tuple)):
        return found
    for key, value in held.items() if isinstance(held, dict) else enumerate(held):
        where = f"{place}[{key!r}]"
        found.update({where: value} if is_state(value) else states_in(value, where, deep - 1))
    return found


def check_whole(held):
    """Raises ValueError for what is no state dictionary of an optimizer, and says where it has
    some."""
    if is_state(held):
        return
    several = list(states_in(held))
    if several:
        count = "one" if len(several) == 1 else f"{len(several)} of them"
        raise ValueError(
            f"halfstep: this is no state of an optimizer, but holds {count}, at"
            f" {', '.join(several)}: give load_state_dict() that of this optimizer, or"
            " load_states() the file"
        )
    what = f"of type {type(held).__name__}"
    if isinstance(held, dict):
        what = f"a dictionary of {naming.some(list(held))}" if held else "an empty dictionary"
    raise ValueError(
        "halfstep: a state of an optimizer is a dictionary with 'state' and 'param_groups', and"
        f" this is {what}: give what state_dict() of an optimizer returned"
    )


def check_keys(state_dict, what="this state"):
    """Raises ValueError if there are states of parameters that no group lists."""
    listed = [key for group in state_dict["param_groups"] for key in group["params"]]
    known = set(listed)
    strange = [
        key
        for key, value in state_dict["state"].items()
        if key not in known and isinstance(value, dict) and value
    ]
    if strange:
        raise ValueError(
            f"halfstep: {what} has states under {naming.some(strange)}, and its groups list the"
            f" parameters {naming.some(listed)}: use the same keys in both, numbers as numbers"
        )


def tidy(groups, names):
    """Makes flat states with tensors for numbers of what a loader or a file has left. Removes
    numbers that torch's optimizers have cast."""
    for g, group in enumerate(groups):
        rule = groups.row_of(group)
        for i, p in enumerate(group["params"]):
            name, state = names.of(g, i), groups.state.get(p)
            if not isinstance(state, dict) or not state:
                continue
            new = layout.flat(state)
            for key in layout.WHOLE:
                if isinstance(new.get(key), torch.Tensor) and new[key].is_floating_point():
                    del new[key]
            steps = layout.whole(new.get("step"))
            if steps is not None and not layout.is_number(new["step"], "step"):
                new["step"] = layout.number(float(steps), "step")
            for key, value in list(layout.repaired(new, layout.numbers_of(rule), name)):
                if value is not None:
                    new[key] = layout.number(value, key)
            state.clear()
            state.update(new)


# ---- Checks --------------------------------------------------------------------------------------


def check(groups, names):
    """Raises ValueError if a loaded group or state cannot be what it claims. Removes empty
    states."""
    ids = {}
    for g, group in enumerate(groups):
        groups.options.check(group)
        check_seed(group["seed"], f" of group {g}")
        for key in TOLD:
            check_told(key, group[key], g)
        hypers = groups.options.hypers(group)
        for i, p in enumerate(group["params"]):
            name, state = names.of(g, i), groups.state.get(p)
            if state is None or isinstance(state, dict) and not state:
                groups.state.pop(p, None)
                continue
            if not isinstance(state, dict):
                raise ValueError(
                    f"halfstep: the state of parameter {name!r} is a {type(state).__name__}, not a"
                    " dictionary"
                )
            how = matrices.how_of(group)
            _check_state(groups, groups.row_of(group), name, p, state, hypers, how)
            identity = state.get("id")
            if identity is not None and ids.setdefault(int(identity), name) != name:
                raise ValueError(
                    f"halfstep: parameters {ids[int(identity)]!r} and {name!r} have the same id"
                )


def _check_state(groups, rule, name, p, state, hypers, how):
    recipe = layout.recipe_of(state, name)
    if recipe is not None and recipe.partition("/")[0] != rule.name:
        raise ValueError(
            f"halfstep: the states of parameter {name!r} are of the recipe {recipe!r}; this"
            f" optimizer {'steps it by' if groups.options.partners else 'is'} {rule.name}"
        )
    plain = recipe is None
    if plain and rule.name in _UNCOUNTED:
        for s in rule.states:  # torch's SGD has None for a momentum that has not begun
            if s.name in state and state[s.name] is None:
                del state[s.name]
        if not state:
            groups.state.pop(p)
            return
    elif state.get("step") is None:
        raise ValueError(
            f"halfstep: parameter {name!r} has states and no 'step'; add the number of its steps"
        )
    steps = layout.step_count(state, name, 1)
    counts = {key: layout.take_number(state, key, name) for key in layout.COUNTERS}
    if p.numel() == 0:  # files of C have no tensors of it
        return
    kept = state.get(layout.TRAINED)
    wanted = sharding.stored_whole(p), sharding.stored(p).dtype
    if kept is not None and not holds(kept, *wanted):
        raise ValueError(
            f"halfstep: state {layout.TRAINED!r} of parameter {name!r} is not a tensor of"
            f" {wanted[1]} of shape {wanted[0]}"
        )
    hashes = sharding.local(state.get(layout.HASHES))
    if layout.HASHES in state and (
        not isinstance(hashes, torch.Tensor) or hashes.dtype != torch.int64 or hashes.dim() != 1
    ):
        raise ValueError(
            f"halfstep: state {layout.HASHES!r} of parameter {name!r} is {described(hashes)}, not"
            " int64 numbers for its rows; delete it, and the weight is not checked"
        )
    identity = layout.take_number(state, "id", name)
    if identity == 0:
        raise ValueError(f"halfstep: the id of parameter {name!r} is 0; ids are at least 1")
    part = sharding.part_of(p, name, groups.options.flat, rule.name, how)
    here = sharding.local(p)
    gathered = part is not None and part.gathered
    codec = convert.Codec(
        recipe or rule.name,
        hypers,
        part.laid if gathered else matrices.lay_part(rule.name, p.shape, here.shape, how),
        name,
        (identity or 1) % 2**64,
        part,
    )
    # The library itself refuses impossible counts, and numbers that no update leaves.
    counters = {key: steps if value is None else value for key, value in counts.items()}
    calls.change(codec, abi.RECORD_TENSOR, codec.index, **counters)
    codec.take_scalars(state)
    if not plain:
        _check_planes(codec, state, name, recipe, part)
        return
    roles = rule.roles
    vectors = {s.name for s in rule.states if s.vector}
    shapes = {s.name: s.shape for s in codec.planes if s.name in vectors}
    needed = {s.name for s in codec.planes if s.name in roles and not s.extra}
    lacking = sorted(needed - state.keys())
    if lacking:
        raise ValueError(
            f"halfstep: parameter {name!r} has no state {lacking[0]!r}, which {rule.name} needs; it"
            f" has {naming.some(list(state))}{_GROUPS if groups.options.partners else ''}"
        )
    for key in needed | (roles.keys() & state.keys()):
        _check_plain(state, key, roles[key], name, p, shapes.get(key))


def _check_plain(state, key, role, name, p, shape):
    """Checks a state as torch keeps it, or a vector of a matrix."""
    value, p = sharding.local(state[key]), sharding.local(p)
    shape = p.shape if shape is None else shape
    if not holds(value, shape) or not value.is_floating_point():
        raise ValueError(
            f"halfstep: state {key!r} of parameter {name!r} is {described(value)}, not a tensor of"
            f" shape {tuple(shape)}"
        )
    _judge(key, name, value, role)


def _judge(key, name, values, role):
    if not values.numel():
        return
    least, most = torch.aminmax(values)  # NaN if there is one
    if not math.isfinite(least) or not math.isfinite(most):
        raise ValueError(
            f"halfstep: state {key!r} of parameter {name!r} has values that are not finite; take"
            " an earlier checkpoint"
        )
    if role == abi.ROLE_NONNEG and least < 0:
        raise ValueError(
            f"halfstep: state {key!r} of parameter {name!r} has negative values, which no update"
            " leaves; take an earlier checkpoint"
        )


def _check_planes(codec, state, name, recipe, part):
    """Checks states as this package keeps them. All must be there, with the right shapes, and hold
    only what an update can leave."""
    tensors = {}
    for s in codec.planes:
        if s.name in state and s.name + ".codes" in state:
            raise ValueError(
                f"halfstep: parameter {name!r} has both a state {s.name!r} and its codes; delete"
                " one of them"
            )
        if s.key not in state:
            raise ValueError(
                f"halfstep: parameter {name!r} has no state {s.key!r}, which {recipe} needs"
                + (convert.ONE_MATRIX if isinstance(codec.shape, matrices.Laid) else "")
            )
        tensors[s.key] = tensor = convert.adopt(state[s.key], s, name)
        if s.end == ".scale":
            _judge(s.key, name, tensor, abi.ROLE_NONNEG)
        elif s.end != ".codes" and tensor.is_floating_point():
            _judge(s.key, name, tensor, 0 if s.extra else s.role)
    # States that a module of halfstep.compat has translated have neither an id nor counts.
    counted = any(key in state for key in ("id", *layout.COUNTERS))
    for key in layout.numbers_of(codec.rule, codec.planes) if counted else ():
        if key not in state:
            raise ValueError(
                f"halfstep: parameter {name!r} has no state {key!r}, which {recipe} needs"
            )
    if codec.gathered:
        return  # codes mean nothing without the others of their matrix
    codec.bind(tensors)
    for s in codec.planes:
        scale = tensors.get(s.name + ".scale")  # packed blocks have theirs among the codes
        if (
            s.end == ".codes"
            and tensors[s.key].numel()
            and not (scale is not None and codec.all_codes_are_good(s, scale.max()))
        ):
            for values in codec.pieces(s.slot):
                _judge(s.name, name, values, s.role)


# ---- Plain torch states --------------------------------------------------------------------------


@torch.no_grad()
def plain(groups, read_state):
    """Returns the state as torch's own optimizer of the same rule saves it. read_state(p, name)
    returns the fp32 values of a state."""
    packed, states, flat, place = [], {}, 0, {}
    for group in groups:
        rule = groups.row_of(group)
        for p in group["params"]:
            place.setdefault(p, flat)
            flat += 1
            held = groups.state.get(p)
            if held:
                out = (
                    {"step": held["step"].clone()}
                    if "step" in held and rule.name not in _UNCOUNTED
                    else {}
                )
                for s in rule.states:
                    if s.name in held or s.name + ".codes" in held:
                        out[s.name] = read_state(p, s.name)
                states[place[p]] = out
        packed.append(
            {
                **{k: v for k, v in group.items() if k not in OURS and k != "params"},
                "params": [place[p] for p in group["params"]],
            }
        )
    return {"state": states, "param_groups": packed}
