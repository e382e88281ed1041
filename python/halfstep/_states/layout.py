"""The layout of `state[p]`. It holds tensors only, and its keys depend on nothing but the rule, the
recipe and the hyper-parameters. Sharded, flattened and merged checkpoints can therefore carry a
parameter's whole state.

    step                                float32: updates of the states, as in torch; the library
                                        writes it at every update
    exp_avg ...                         a state in a float format, under torch's name
    exp_avg.codes, exp_avg.scale        a state in a block format; under torch's name, torch would
                                        cast such bytes and go on with them
    exp_avg.extra, weight.extra         residuals or error codes of a state, and of the weight
    id                                  int64: the bits of the unsigned id that keys the parameter's
                                        random bits
    recipe                              int64: the recipe of the tensors above, see pack_recipe()
    state_steps, full_steps, writes     int64: the library's counters; `step` is not exact beyond
                                        2^24
    weight_sum ...                      float64: a number that the rule keeps for each parameter
    weight.train, weight.train.extra    after eval() of schedule-free training: the weight that
                                        trains, which train() puts back
    weight.hashes                       int64: hashes of the rows of the weight that weight.extra
                                        belongs to, 0 where they are not known (bits.py); only in
                                        state dictionaries and pickles
    exp_avg_sq.grid ...                 float64: the factor for the codes of a second moment; 1 if
                                        it is missing; the library writes it at every update
"""

import ctypes
import math
import struct
from functools import lru_cache

import torch

from .._library import abi
from .._library.calls import GRID
from .._tensors import devices

WHOLE = ("id", "recipe", "state_steps", "full_steps", "writes")
COUNTERS = WHOLE[2:]
#: keys of the weight that trains, and of its residual or error code, while the averages of
#: schedule-free training are in the model
TRAINED = "weight.train"
TRAINED_EXTRA = TRAINED + ".extra"
#: key of the hashes of the weight that a residual belongs to
HASHES = "weight.hashes"
#: ends of keys: codes and scales of a state, residuals and error codes
ENDS = (".codes", ".scale", ".extra")

_rules = {rule.id: rule.name for rule in abi.rules.values()}
#: id -> name of each format
FORMATS = {f.id: f.name for f in abi.formats.values()}


class Coded(dict):
    """The state of a parameter that has states in codes. Tells those who look for the values of one
    what to do. Copies and pickles are plain dictionaries."""

    __slots__ = ()

    def __missing__(self, key):
        if f"{key}.codes" not in self:
            raise KeyError(key)
        raise KeyError(
            f"halfstep: state {key!r} is stored in codes, under {key}.codes and {key}.scale. Read"
            f" it by optimizer.read_state(p, {key!r}) and write it by write_state(). To cut or"
            " extend states, do so with all of their tensors, or keep them without blocks:"
            " states='bf16-sr'"
        )

    def __reduce_ex__(self, protocol):
        return dict, (dict(self),)


def signed(number):
    """Returns the signed number with the bits of an unsigned 64-bit number, because torch stores
    signed ones."""
    return ctypes.c_int64(number).value


@lru_cache(None)
def pack_recipe(recipe):
    """Returns a full recipe as one number. It has a byte each for the ids of the rule, the weight's
    format and the states' formats."""
    rule, weight, *states = recipe.split("/")
    formats = [weight, *(s for some in states for s in some.split("+"))]
    ids = [abi.rules[rule].id, *(abi.formats[name].id for name in formats)]
    return sum(number << 8 * place for place, number in enumerate(ids))


@lru_cache(None)
def unpack_recipe(number):
    """Returns the full recipe of a packed number, or None if it is not one."""
    if number < 0:
        return None
    rule, weight, *states = number.to_bytes(8, "little")
    while states and not states[-1]:
        states.pop()
    if rule not in _rules or any(s not in FORMATS for s in (weight, *states)):
        return None
    parts = _rules[rule], FORMATS[weight], "+".join(FORMATS[s] for s in states)
    recipe = "/".join(filter(None, parts))
    try:
        return recipe if abi.recipe_full(recipe) == recipe else None
    except ValueError:
        return None


def scalars_of(rule, planes=None):
    """Returns the names of the scalars and grids that a rule keeps for a parameter with these
    planes. Without planes, returns all that it may keep."""
    if planes is None:
        return (*rule.scalars, *(s.name + GRID for s in rule.states if s.role == abi.ROLE_NONNEG))
    return (*rule.scalars, *(s.name + GRID for s in planes if s.grid))


def precise_states(recipes):
    """Returns a line for each rule of full recipes with block formats. It says which states have a
    finer format, and under which option."""
    lines = []
    for rule in dict.fromkeys(
        recipe.split("/")[0]
        for recipe in recipes
        if any(abi.formats[name].block for name in recipe.split("/")[2].split("+"))
    ):
        states = [state for state in abi.rules[rule].states if state.precise_if]
        if states:  # all have the same option and format
            lines.append(
                f"{rule}: with {states[0].precise_if}"
                f" {' and '.join(state.name for state in states)} in {states[0].precise_format},"
                " not in blocks: errors of coarse codes would not average out there"
            )
    return lines


def caveats(recipes):
    """Returns what these recipes are known to cost, each text once."""
    return list(dict.fromkeys(filter(None, map(abi.recipe_caveat, recipes))))


def numbers_of(rule, planes=None):
    """Returns the keys of the small tensors beside `step`, with the planes of scalars_of()."""
    return (*WHOLE, *scalars_of(rule, planes))


def initial(key):
    """Returns the first value of such a number."""
    return 1.0 if key.endswith(GRID) else 0.0


def keys_of(rule):
    """Returns every key that may hold stored elements of a rule."""
    ends = ("", *ENDS, GRID)
    return {"weight.extra", *(name + end for name in rule.roles for end in ends)}


def _dtype(key):
    return torch.float32 if key == "step" else torch.int64 if key in WHOLE else torch.float64


def number(value, key):
    """Returns a number as the tensor that a state keeps under this key."""
    return torch.tensor(value, dtype=_dtype(key), device="cpu")


def recipe_number(recipe):
    """Returns a full recipe as the tensor that a state keeps."""
    return number(pack_recipe(recipe), "recipe")


def is_number(tensor, key):
    """Returns True if the library can write its number into this tensor. `step` may have
    dimensions."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype == _dtype(key)
        and (tensor.numel() == 1 if key == "step" else tensor.dim() == 0)
        and devices.of(tensor).type == "cpu"
    )


def write(tensor, value):
    """Writes a number into a tensor for which is_number() was true when the library got it. Counts
    no version, so that a new version means another writer. Somebody may have moved the tensor to a
    GPU since."""
    if devices.of(tensor).type != "cpu":
        tensor.detach().fill_(value)
        return
    (ctypes.c_int64 if tensor.dtype == torch.int64 else ctypes.c_double).from_address(
        tensor.data_ptr()
    ).value = value


def whole(value):
    """Returns the int of a Python number or of a tensor of one element, or None if it is not
    whole."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.device.type == "meta" or value.is_complex():
            return None
        value = value.item()
    if not abi.is_real(value) or not math.isfinite(value):
        return None
    return int(value) if int(value) == value else None


def step_count(state, name, default=0):
    """Returns state["step"] as an int. Raises ValueError if it is not a count."""
    step = state.get("step")
    if step is None:
        return default
    count = whole(step)
    if count is None or not 0 <= count < 2**63:
        raise ValueError(
            f"halfstep: state 'step' of parameter {name!r} is {step!r}; it must be a count from 0"
            " to 2**63 - 1"
        )
    return count


def same_count(exact, step):
    """Returns True if a float32 with the count `exact` equals `step`."""
    return struct.unpack("f", struct.pack("f", exact))[0] == step


def agreed(counts, steps):
    """Returns the counters for a `step`. float32 counts exactly to 2^24; beyond that the counters
    know better, as long as both agree. If they disagree, somebody has set `step`, or the counters
    were copied before they were up to date. They are then adjusted."""
    if same_count(counts["state_steps"], steps):
        return counts
    behind = max(steps - counts["state_steps"], 0)
    return {
        "state_steps": steps,
        "full_steps": min(counts["full_steps"] + behind, steps) if behind else steps,
        "writes": counts["writes"] + behind,
    }


def take_number(state, key, name):
    """Returns the number under a key of a state, or None if there is none. Raises ValueError if the
    value is not such a number."""
    value = state.get(key)
    if value is None and key not in state:
        return None
    if key in WHOLE:
        found = whole(value)
        if (
            found is None
            or not (0 <= found or key == "id")
            or not -(2**63) <= found < 2 ** (64 if key == "id" else 63)
        ):
            raise ValueError(
                f"halfstep: state {key!r} of parameter {name!r} is {value!r}; it must be a whole"
                " number of 64 bits"
            )
        return signed(found) if key == "id" else found
    try:
        found = float(value)
    except (TypeError, ValueError, RuntimeError):
        found = float("nan")
    if isinstance(value, bool) or not abs(found) < float("inf"):
        raise ValueError(
            f"halfstep: state {key!r} of parameter {name!r} is {value!r}, not a number"
        )
    return found


def repaired(state, keys, name):
    """Yields key and value of the numbers of a state that are not as the library writes them. The
    value is None if there is none."""
    for key in keys:
        if not is_number(state.get(key), key):
            yield key, take_number(state, key, name)


def flat(state):
    """Returns a state without nested dictionaries. torch's flattened checkpoints return one if a
    key of ours is missing, or if it begins several keys of the file."""
    out = {}
    for key, value in state.items():
        if isinstance(value, dict):
            out.update((f"{key}.{part}", inner) for part, inner in flat(value).items())
        else:
            out[key] = value
    return out


def recipe_of(state, name):
    """Returns the full recipe of the tensors of a state, or None for torch's plain states. Raises
    ValueError if the state has other numbers of this package and no recipe."""
    value = take_number(state, "recipe", name)
    if value is None:
        for key in WHOLE:
            if key in state:
                raise ValueError(
                    f"halfstep: the state of parameter {name!r} has {key!r} and no 'recipe', so its"
                    " formats are not known: load a state that is whole"
                )
        return None
    recipe = unpack_recipe(value)
    if recipe is None:
        raise ValueError(
            f"halfstep: state 'recipe' of parameter {name!r} is {value}, which is not a recipe of"
            " this library"
        )
    return recipe
