"""What `state[p]` holds: tensors and nothing else, under keys that depend on the rule, the recipe
and the hyper-parameters alone. Sharded, flattened and merged checkpoints carry a parameter's whole
state that way.

    step                                float32: updates of the states, as torch has it; written by
                                        the library at every update
    exp_avg ...                         a state in a float format, under torch's name
    exp_avg.codes, exp_avg.scale        a state in a block format: torch would cast such bytes and
                                        go on with them
    exp_avg.extra, weight.extra         residuals or error codes of a state, and of the weight
    id                                  int64: the bits of the unsigned id that keys the parameter's
                                        random bits
    recipe                              int64: what the tensors above are, see pack_recipe()
    state_steps, full_steps, writes     int64: the library's counters; as exact as `step` cannot be
                                        beyond 2^24
    weight_sum ...                      float64: what the rule keeps as a number for each parameter
    weight.train, weight.train.extra    after eval() of schedule-free training: the weight that
                                        trains, which train() puts back
    exp_avg_sq.grid ...                 float64: what the codes of a second moment are to be
                                        multiplied by; 1 where it is missing;
                                        written by the library at every update, as `step` is

Older versions kept numbers in place of the small tensors, ids and recipes as lists in the groups,
and codes under the names of states; _older.py brings such states here.
"""

import ctypes
import struct
from functools import lru_cache

import torch

from . import _abi

WHOLE = ("id", "recipe", "state_steps", "full_steps", "writes")
COUNTERS = WHOLE[2:]
#: where nothing is said of it: the default of the versions that did not say
OLD_GENERATOR = "mixer"
#: of a group: counts of the optimizer, always there and always current
TOLD = ("group_steps", "skipped_steps", "last_norm")
#: of schedule-free training, while averages are in the model: the weight that trains; its residual
#: or error code has ".extra" behind that
TRAINED = "weight.train"
#: codes and scales of a state, residuals and error codes
PARTS = (".codes", ".scale", ".extra")
#: after the name of a second moment
GRID = ".grid"

_rules = {rule.id: rule.name for rule in _abi.rules.values()}
_formats = {f.id: f.name for f in _abi.formats.values()}


def signed(number):
    """An unsigned 64-bit number as the signed one of the same bits, which torch can store."""
    return ctypes.c_int64(number).value


@lru_cache(None)
def pack_recipe(recipe):
    """A full recipe as one number: a byte each for the ids of the rule, the weight's format and the
    formats of the states."""
    rule, weight, states = recipe.split("/")
    ids = [
        _abi.rules[rule].id,
        _abi.formats[weight].id,
        *(_abi.formats[s].id for s in states.split("+")),
    ]
    return sum(number << 8 * place for place, number in enumerate(ids))


@lru_cache(None)
def unpack_recipe(number):
    """The full recipe; None for a number that is none."""
    if number < 0:
        return None
    rule, weight, *states = number.to_bytes(8, "little")
    while states and not states[-1]:
        states.pop()
    if rule not in _rules or not states or any(s not in _formats for s in (weight, *states)):
        return None
    recipe = "/".join((_rules[rule], _formats[weight], "+".join(_formats[s] for s in states)))
    try:
        return recipe if _abi.recipe_full(recipe) == recipe else None
    except ValueError:
        return None


def scalars_of(rule, streams=None):
    """The names of the numbers that a rule keeps for a parameter with these streams, grids
    included; for None, for any."""
    if streams is None:
        return (*rule.scalars, *(s.name + GRID for s in rule.states if s.role == _abi.ROLE_NONNEG))
    return (*rule.scalars, *(s.name + GRID for s in streams if s.grid))


def precise_states(recipes):
    """A line for each rule of some full recipes with block formats: which states have a finer
    format all the same, and under which option."""
    lines = []
    for rule in dict.fromkeys(
        recipe.split("/")[0]
        for recipe in recipes
        if any(_abi.formats[name].block for name in recipe.split("/")[2].split("+"))
    ):
        states = [state for state in _abi.rules[rule].states if state.precise_if]
        if states:  # of one option and one format
            lines.append(
                f"{rule}: with {states[0].precise_if}"
                f" {' and '.join(state.name for state in states)} in {states[0].precise_format},"
                " not in blocks: errors of coarse codes would not average out there"
            )
    return lines


def numbers_of(rule, streams=None):
    """The keys of the small tensors beside `step`, likewise."""
    return (*WHOLE, *scalars_of(rule, streams))


def initial(key):
    """What such a number is at first, and where a state of an older version lacks it."""
    return 1.0 if key.endswith(GRID) else 0.0


def keys_of(rule):
    """Every key that what is stored for a rule's elements may have."""
    names = [s.name for s in rule.states]
    return {"weight.extra", *names, *(name + part for name in names for part in (*PARTS, GRID))}


def number(value, key):
    """A number as the tensor that a state keeps under this key."""
    return torch.tensor(value, dtype=torch.int64 if key in WHOLE else torch.float64, device="cpu")


def is_number(tensor, key):
    """Whether the library's numbers can be written where this tensor lies."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype == (torch.int64 if key in WHOLE else torch.float64)
        and tensor.dim() == 0
        and tensor.device.type == "cpu"
    )


def is_step(tensor):
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype == torch.float32
        and tensor.numel() == 1
        and tensor.device.type == "cpu"
    )


def write(tensor, value):
    """Puts a number where is_number() is true, without a count of versions: that is how other
    writers are told from us."""
    (ctypes.c_int64 if tensor.dtype == torch.int64 else ctypes.c_double).from_address(
        tensor.data_ptr()
    ).value = value


def whole(value):
    """An int of a Python number or of a tensor of one element; None where it is no whole number."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.device.type == "meta" or value.is_complex():
            return None
        value = value.item()
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or value != value
        or value in (float("inf"), float("-inf"))
    ):
        return None
    return int(value) if int(value) == value else None


def step_count(state, name, default=0):
    """state["step"] as an int; ValueError where it counts nothing."""
    step = state.get("step")
    if step is None:
        return default
    count = whole(step)
    if count is None or not 0 <= count < 2**63:
        raise ValueError(
            f"halfstep: state 'step' of parameter {name!r} is {step!r}, which counts nothing"
        )
    return count


def same_count(exact, step):
    """Whether a float32 shows `step` where the count is `exact`."""
    return struct.unpack("f", struct.pack("f", exact))[0] == step


def agreed(counts, steps):
    """Counters beside a `step`. float32 counts to 2^24; beyond, they know better, as long as both
    mean the same. Where they do not, the step was set, or the counters were copied before they were
    brought up to date."""
    if same_count(counts["state_steps"], steps):
        return counts
    behind = max(steps - counts["state_steps"], 0)
    return {
        "state_steps": steps,
        "full_steps": min(counts["full_steps"] + behind, steps) if behind else steps,
        "writes": counts["writes"] + behind,
    }


def take_number(state, key, name):
    """The number under a key of a state, or None; ValueError where it is none."""
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
                f"halfstep: state {key!r} of parameter {name!r} is {value!r}, which counts nothing"
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


def recipe_of(state, name):
    """The full recipe of the tensors of a state; None for plain ones, of torch."""
    value = take_number(state, "recipe", name)
    if value is None:
        return None
    recipe = unpack_recipe(value)
    if recipe is None:
        raise ValueError(
            f"halfstep: state 'recipe' of parameter {name!r} is {value}, which is no recipe of this"
            " library"
        )
    return recipe


def check_told(key, value, place):
    """Raises ValueError where a group's count of its own is none."""
    if key == "last_norm":
        good = (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and 0.0 <= value < float("inf")
        )
    else:
        good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    if not good:
        means = "is no norm" if key == "last_norm" else "counts nothing"
        raise ValueError(f"halfstep: {key!r} of group {place} is {value!r}, which {means}")
