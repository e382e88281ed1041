"""Calls and records of the library as plain functions. A call is a step of all tensors or of one,
in one piece or in parts. A record holds the numbers of an optimizer, a group or a tensor."""

from ctypes import addressof, byref, c_int32, c_void_p

from . import abi
from .abi import RECORD_TENSOR, SLOT_STATE, Call, Record, invoke, lib

#: the end of the name of a number: the grid of a second moment
GRID = ".grid"

# ---- Calls ---------------------------------------------------------------------------------------


def all_tensors(weights, gradients, micro=False, statistics=None, ahead=None):
    """Describes a step of all tensors, or a micro-step. `weights` and `gradients` are arrays of
    pointers, and `ahead` is an array of Ahead or None. All must live as long as the call.
    `statistics` is an address."""
    return Call.new(
        kind=abi.CALL_STEP,
        micro=micro,
        weights=None if weights is None or micro else addressof(weights),
        gradients=None if gradients is None else addressof(gradients),
        statistics=statistics,
        ahead=None if ahead is None else addressof(ahead),
    )


def one_tensor(tensor, weight=None, gradient=None, micro=False, ahead=None):
    """Describes a step of one tensor by the addresses of its weight and gradient. `ahead`: a step
    in advance, whose results go there."""
    pointers = (c_void_p * 2)(weight, gradient)
    place = addressof(pointers)
    call = Call.new(
        kind=abi.CALL_TENSOR,
        tensor=tensor,
        micro=micro,
        weights=None if micro else place,
        gradients=place + 8,
        ahead=None if ahead is None else addressof(ahead),
    )
    call.pointers = pointers, ahead  # keeps them alive as long as the call
    return call


def end_of_round(statistics=None, weights=None):
    """Describes the end of a round of gradient release. `weights` are for states in storage."""
    weights = None if weights is None else addressof(weights)
    return Call.new(kind=abi.CALL_ROUND, weights=weights, statistics=statistics)


def run(handle, call):
    """Makes a call in one piece. Returns its code."""
    return lib.halfstep_run(handle, byref(call))


def begin(handle, call):
    """Fills the statistics of a call."""
    invoke(lib.halfstep_run_begin, handle, byref(call))


def norms(handle, call):
    """Adds the sums of a rule of two passes to the statistics of a call."""
    invoke(lib.halfstep_run_norms, handle, byref(call))


def finish(handle, call):
    """Finishes the call from its statistics. Returns its code."""
    return lib.halfstep_run_finish(handle, byref(call))


def count_statistics(handle, call):
    """Returns the number of statistics of a call, and the index at which its sums begin."""
    place = byref(call)
    return lib.halfstep_statistics_count(handle, place), lib.halfstep_norms_offset(handle, place)


def nonfinite_tensor(handle):
    """Returns the name of the tensor whose gradient was refused last, or "". The second value is
    True if the gradient was finite, but too large."""
    too_large = c_int32()
    name = lib.halfstep_nonfinite_tensor(handle, byref(too_large))
    return name.decode(), bool(too_large.value)


# ---- Records -------------------------------------------------------------------------------------


def read(handle, kind, index=0):
    """Returns a record."""
    record = Record.new(kind=kind, index=index)
    invoke(lib.halfstep_get_record, handle, byref(record))
    return record


def restore(handle, record):
    """Sets a record."""
    invoke(lib.halfstep_set_record, handle, byref(record))


def change(handle, kind, index=0, **fields):
    """Sets some fields of a record."""
    record = read(handle, kind, index)
    for key, value in fields.items():
        setattr(record, key, value)
    restore(handle, record)


def _place(rule, name):
    """Returns the array of a record that holds a number of the rule, and the index in it. Fails if
    the rule has no such number."""
    if name in rule.scalars:
        return "scalar", rule.scalars.index(name)
    states = [s.name + GRID for s in rule.states]
    if name in states:
        return "grid", states.index(name)
    raise abi.HalfstepValueError(
        f"halfstep: {rule.name} keeps no number {name!r} of a parameter; it keeps"
        f" {', '.join(rule.scalars) or 'none'}",
        abi.ERROR_NAME,
    )


def number(record, rule, name):
    """Returns a scalar of a tensor's record, or a grid ("exp_avg_sq.grid"), by its name."""
    array, place = _place(rule, name)
    return getattr(record, array)[place]


def set_number(record, rule, name, value):
    """Puts a scalar or a grid into a tensor's record, by its name."""
    array, place = _place(rule, name)
    getattr(record, array)[place] = value


def read_number(handle, index, rule, name):
    """Returns a scalar or a grid of a tensor, by its name."""
    return number(read(handle, RECORD_TENSOR, index), rule, name)


def bind(handle, index, rule, planes, step, numbers):
    """Binds tensors to the record of a tensor, so that the library keeps them equal to it. `step`
    is the step count. `numbers` holds the counters, scalars and grids by name."""
    places = abi.RecordPlaces.new(step=step.data_ptr())
    for key in ("state_steps", "full_steps", "writes"):
        setattr(places, key, numbers[key].data_ptr())
    for i, name in enumerate(rule.scalars):
        places.scalar[i] = numbers[name].data_ptr()
    for s in planes:
        if s.grid:
            places.grid[s.slot - SLOT_STATE] = numbers[s.name + GRID].data_ptr()
    invoke(lib.halfstep_bind_record, handle, index, byref(places))
