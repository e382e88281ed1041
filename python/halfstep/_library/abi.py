"""The C library, by ctypes: the functions that this package calls and their structures, as
include/halfstep.h declares them. Also its tables of rules, formats and hyper-parameters as plain
data. Nothing here needs torch. This file is longer than 500 lines because structures and tables
have a line for each field.

The shared library lies in the folder of the package. The environment variable HALFSTEP_LIBRARY
names another one to load instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import numbers
import operator
import os
import sys
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
    create_string_buffer,
    sizeof,
)
from dataclasses import dataclass, fields
from typing import Dict, List, Optional, Tuple

if "ABI" in globals():
    # Structures would get other classes than those that live optimizers hold. What is here stays.
    raise ImportError("halfstep: a loaded library cannot be reloaded; restart Python instead")

ABI = 2  # HALFSTEP_ABI of the header that this file mirrors

# Return codes, named as in the header without HALFSTEP_.
OK = 0
ERROR_ARGUMENT = -10
ERROR_NAME = -11
ERROR_RANGE = -12
ERROR_SHAPE = -13
ERROR_DUPLICATE = -14
ERROR_ORDER = -15
ERROR_UNSUPPORTED = -20
ERROR_MEMORY = -30
ERROR_DEVICE = -31
ERROR_FORMAT = -40
ERROR_MISMATCH = -41
ERROR_IO = -42
NONFINITE = -50

ROLE_WEIGHT = 1
ROLE_GRADIENT = 2
ROLE_SIGNED = 4
ROLE_NONNEG = 8

GEOMETRY_ROWS = 0
GEOMETRY_TENSOR = 2
GEOMETRY_PACKED = 3
EXTENT_COLUMNS = 2

#: hyper-parameters that users give together, as "betas"
BETAS = ("beta1", "beta2", "beta3")

MAX_STATES = 6
MAX_SCALARS = 4
MAX_SPLIT = 16
ALL_GROUPS = -1

CALL_STEP = 0
CALL_TENSOR = 1
CALL_ROUND = 2

RECORD_OPTIMIZER = 0
RECORD_GROUP = 1
RECORD_TENSOR = 2

SLOT_WEIGHT = 0
SLOT_GRADIENT = 1
SLOT_STATE = 2

# ---- Structures. new() sets struct_size. ---------------------------------------------------------


def _fields(*declared):
    """Returns the fields of a structure, struct_size first. `declared` holds types, each with the
    names that have it."""
    fields = [(name, kind) for kind, names in declared for name in names.split()]
    return [("struct_size", c_uint32), *fields]


class _Sized(Structure):
    @classmethod
    def new(cls, **fields):
        """Returns a structure with its struct_size set. Fields that are not given are zero."""
        return cls(struct_size=sizeof(cls), **fields)


class RuleInfo(_Sized):
    _fields_ = _fields(
        (c_int32, "id"),
        (c_char_p, "name title"),
        (c_int32, "states"),
        (c_int32 * MAX_STATES, "state_role"),
        (c_char_p * MAX_STATES, "state_name"),
        (c_int32, "hypers"),
        (c_char_p, "decay"),
        (c_int32, "scalars two_pass"),
        (c_char_p * MAX_SCALARS, "scalar_name"),
        (c_int32, "matrix raw_gradient accumulates average"),
        (c_char_p, "label"),
        (c_int32 * MAX_STATES, "state_extent"),
        (c_int32, "totals cautious"),
        (c_char_p * MAX_STATES, "precise_if precise_format"),
        (c_int32, "cautious_decay reserved"),
    )


class FormatInfo(_Sized):
    _fields_ = _fields(
        (c_int32, "id"),
        (c_char_p, "name title"),
        (c_int32, "roles code_bits extra_bits block scale_bytes stochastic"),
        (c_char_p, "code_dtype extra_dtype"),
        (c_int32, "geometry grid"),
    )


class HyperInfo(_Sized):
    _fields_ = _fields(
        (c_char_p, "name title"),
        (c_double, "initial minimum maximum"),
        (c_int32, "exclusive_maximum per_optimizer"),
    )


Task = CFUNCTYPE(None, c_void_p, c_int64)
RunTasks = CFUNCTYPE(None, c_void_p, Task, c_void_p, c_int64)


class Options(_Sized):
    _fields_ = _fields(
        (c_int32, "threads"),
        (c_uint64, "seed"),
        (RunTasks, "run"),
        (c_void_p, "host"),
        (c_char_p, "device"),
        (c_void_p, "stream"),
    )


class DeviceInfo(_Sized):
    _fields_ = _fields(
        (c_int32, "devices driver minimum_driver images compute multiprocessors usable"),
        (c_uint64, "memory"),
        (c_char_p, "name code"),
    )


class Tensor(_Sized):
    _fields_ = _fields(
        (c_int32, "group"),
        (c_char_p, "name"),
        (c_uint64, "id"),
        (c_int32, "ndim may_be_empty"),
        (c_int64, "rows row_length first_row n_rows first_column n_columns"),
        (c_char_p, "gradient"),
        (c_int64, "matrix_rows"),
        (c_int64 * MAX_SPLIT, "split"),
    )


class SlotInfo(_Sized):
    _fields_ = _fields(
        (c_int32, "format"),
        (c_char_p, "name"),
        (c_uint64, "code_bytes extra_bytes"),
        (c_int64, "blocks_per_row"),
        (c_int32, "fell_back grid"),
        (c_void_p, "code extra"),
        (c_int64, "rows columns"),
        (c_int32, "precise reserved"),
    )


class Ahead(Structure):
    _fields_ = [("weight", c_void_p), ("states", c_void_p)]


class Call(_Sized):
    _fields_ = _fields(
        (c_int32, "kind tensor micro"),
        (c_void_p, "weights gradients statistics ahead"),
    )


class Record(_Sized):
    _fields_ = _fields(
        (c_int32, "kind index reserved"),
        (c_uint64, "seed skipped_steps"),
        (c_double, "gradient_norm"),
        (c_uint64, "steps id state_steps full_steps writes"),
        (c_double * MAX_SCALARS, "scalar"),
        (c_double * MAX_STATES, "grid"),
    )


class RecordPlaces(_Sized):
    _fields_ = _fields(
        (c_int32, "reserved"),
        (c_void_p, "step state_steps full_steps writes"),
        (c_void_p * MAX_SCALARS, "scalar"),
        (c_void_p * MAX_STATES, "grid"),
    )


class Forecast(_Sized):
    _fields_ = _fields(
        (c_int32, "without_weights"),
        (c_uint64, "piece_bytes tensors elements weights gradients weight_extras states workspace"),
        (c_uint64, "largest_gradient largest_states"),
        (c_uint64, "pieces stored largest_piece memory read written"),
    )


class FileOptions(_Sized):
    """Of halfstep_io.h, as are StoreOptions and StoreInfo."""

    _fields_ = _fields(
        (c_uint32, "settings"),
        (c_void_p, "leave"),
        (c_uint32, "subset reserved"),
        (c_void_p, "shapes"),
        (c_char_p, "optimizer_file model_file"),
    )


class StoreOptions(_Sized):
    _fields_ = _fields(
        (c_int32, "without_weights"),
        (c_uint64, "memory piece_bytes"),
        (c_int32, "buffered reserved"),
    )


class StoreInfo(_Sized):
    _fields_ = _fields(
        (c_int32, "has_weights"),
        (c_uint64, "generation steps bytes pieces"),
        # Addresses, because the library frees them.
        (c_void_p, "header commit"),
    )


# ---- Functions, in the order of the header -------------------------------------------------------

_handle = c_void_p
_pointers = c_void_p  # an array of pointers: any ctypes array, or an address
_bytes = POINTER(c_uint64)

# name without halfstep_ -> result and parameters
signatures = {
    "version": (c_int32,),
    "strerror": (c_char_p, c_int),
    "create": (c_int, POINTER(Options), POINTER(_handle)),
    "destroy": (None, _handle),
    "error_detail": (c_char_p, _handle),
    "add_group": (c_int, _handle, c_char_p, POINTER(c_int32)),
    "set_hyper": (c_int, _handle, c_int32, c_char_p, c_double),
    "get_hyper": (c_int, _handle, c_int32, c_char_p, POINTER(c_double)),
    "set_choice": (c_int, _handle, c_int32, c_char_p, c_char_p),
    "current_lr": (c_int, _handle, c_int32, POINTER(c_double)),
    "add_tensor": (c_int, _handle, POINTER(Tensor), POINTER(c_int32)),
    "get_slot_info": (c_int, _handle, c_int32, c_int32, POINTER(SlotInfo)),
    "allocate_states": (c_int, _handle),
    "step": (c_int, _handle, _pointers, _pointers),
    "run": (c_int, _handle, POINTER(Call)),
    "ahead_bytes": (c_int, _handle, c_int32, _bytes),
    "redone_steps": (c_uint64, _handle),
    "accumulate": (c_int, _handle, c_int32, c_void_p, c_char_p, c_void_p, c_char_p, c_double),
    "get_record": (c_int, _handle, POINTER(Record)),
    "set_record": (c_int, _handle, POINTER(Record)),
    "skipped_steps": (c_uint64, _handle),
    "gradient_norm": (c_double, _handle),
    "nonfinite_tensor": (c_char_p, _handle, POINTER(c_int32)),
    "read_slot": (c_int, _handle, c_int32, c_int32, c_void_p, c_int64, c_int64, c_void_p),
    "write_slot": (c_int, _handle, c_int32, c_int32, c_void_p, c_int64, c_int64, c_void_p),
    "read_average": (c_int, _handle, c_int32, c_void_p, c_int64, c_int64, c_void_p),
    "rule_count": (c_int32,),
    "get_rule_info": (c_int, c_int32, POINTER(RuleInfo)),
    "format_count": (c_int32,),
    "get_format_info": (c_int, c_int32, POINTER(FormatInfo)),
    "get_hyper_info": (c_int, c_int32, c_int32, POINTER(HyperInfo)),
    "choice_value": (c_char_p, c_char_p, c_int32),
    "recipe_full": (c_int, c_char_p, c_char_p, c_size_t),
    "recipe_caveat": (c_int, c_char_p, c_char_p, c_size_t),
    "forecast_tensors": (c_int, POINTER(Forecast), c_char_p, POINTER(Tensor), c_int32),
    "set_threads": (c_int, _handle, c_int32),
    "isa": (c_char_p,),
    "synchronize": (c_int, _handle),
    "set_stream": (c_int, _handle, c_void_p),
    "get_device_info": (c_int, c_char_p, POINTER(DeviceInfo)),
    "device_code": (c_char_p,),
    "run_begin": (c_int, _handle, POINTER(Call)),
    "run_norms": (c_int, _handle, POINTER(Call)),
    "run_finish": (c_int, _handle, POINTER(Call)),
    "statistics_count": (c_int64, _handle, POINTER(Call)),
    "norms_offset": (c_int64, _handle, POINTER(Call)),
    "bind_slot": (c_int, _handle, c_int32, c_int32, c_void_p, c_void_p),
    "bind_record": (c_int, _handle, c_int32, POINTER(RecordPlaces)),
    "bind_hyper": (c_int, _handle, c_int32, c_char_p, c_void_p),
    "flush": (c_int, _handle, _pointers),
    "read_bytes": (c_int, _handle, c_int32, c_int32, c_int32, c_uint64, c_uint64, c_void_p),
    "write_bytes": (c_int, _handle, c_int32, c_int32, c_int32, c_uint64, c_uint64, c_void_p),
    "abi": (c_int32,),
    "name_id": (c_uint64, c_char_p),
    "isa_count": (c_int32,),
    "isa_name": (c_char_p, c_int32),
    "isa_available": (c_int32, c_int32),
    "set_isa": (c_int, c_char_p),
}


def _library_path() -> str:
    chosen = os.environ.get("HALFSTEP_LIBRARY")
    if chosen:
        return os.path.abspath(chosen)  # the loader would search other folders for a bare name
    name = {"win32": "halfstep.dll", "darwin": "libhalfstep.dylib"}.get(
        sys.platform, "libhalfstep.so"
    )
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), name)


def _remedy() -> str:
    """Returns what to do about a library that cannot be used."""
    return (
        "correct or unset the environment variable HALFSTEP_LIBRARY"
        if os.environ.get("HALFSTEP_LIBRARY")
        else "install the package again ('pip install .' in its source folder)"
    )


def _load(path: str) -> ctypes.CDLL:
    def unusable(what: str) -> ImportError:
        return ImportError(f"halfstep: {what}; {_remedy()}", path=path)

    if not os.path.isfile(path):
        raise unusable(f"the shared library {path} does not exist")
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise unusable(f"the shared library {path} cannot be loaded ({error})") from error
    abi = getattr(library, "halfstep_abi", None)
    if abi is None:
        raise unusable(f"{path} is not the halfstep library, it has no function halfstep_abi")
    if abi() != ABI:
        raise unusable(f"the shared library {path} has ABI {abi()}, this package needs {ABI}")
    for name, (result, *parameters) in signatures.items():
        function = getattr(library, "halfstep_" + name, None)
        if function is None:
            raise unusable(
                f"the shared library {path} is older than this package, it has no function"
                f" halfstep_{name}"
            )
        function.restype, function.argtypes = result, parameters
    return library


path = _library_path()
lib = _load(path)

# ---- Errors --------------------------------------------------------------------------------------


class HalfstepError(RuntimeError):
    """An error of the library. `code` is its negative number in halfstep.h. The failed call has
    changed nothing."""

    def __init__(self, text: str, code: int):
        super().__init__(text, code)
        self.code = code

    def __str__(self) -> str:
        return self.args[0]


class HalfstepValueError(HalfstepError, ValueError):
    """The library does not accept an argument, name, number, shape or combination."""


class HalfstepMemoryError(HalfstepError, MemoryError):
    """The operating system refused memory."""


_VALUE = ERROR_ARGUMENT, ERROR_NAME, ERROR_RANGE, ERROR_SHAPE, ERROR_DUPLICATE, ERROR_UNSUPPORTED
_error_classes = {**dict.fromkeys(_VALUE, HalfstepValueError), ERROR_MEMORY: HalfstepMemoryError}


def _text(value: Optional[bytes]) -> str:
    return value.decode("utf-8", "replace") if value else ""


def check(code: int, handle=None, detail: str = "") -> None:
    """Raises the error that `code` stands for, with the text of the handle, or that of a call
    without one. Does nothing for OK. Callers of steps handle NONFINITE themselves, because it is
    not an error of the call; here it raises."""
    if code == OK:
        return
    text = _text(lib.halfstep_strerror(code))
    # The program is not in this package.
    detail = detail or why(handle).replace("'halfstep info'", "'python -m halfstep info'")
    raise _error_classes.get(code, HalfstepError)(f"{text}: {detail}" if detail else text, code)


def why(handle=None) -> str:
    """Returns the text about the last error on a handle, or in a call without one."""
    return _text(lib.halfstep_error_detail(handle))


def invoke(function, handle, *arguments) -> None:
    """Calls a function of the library on a handle, and raises its error."""
    check(function(handle, *arguments), handle)


# ---- Tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A state of a rule. `role` is a ROLE_ number. `extent`: one of EXTENT_, because a state
    may have one value per row or per column of a matrix. While the hyper-parameter `precise_if` is
    not 0, the state is stored in `precise_format` instead of a block format."""

    name: str
    role: int
    extent: int = 0
    precise_if: Optional[str] = None
    precise_format: Optional[str] = None

    @property
    def vector(self) -> bool:
        """True for a state over the rows or the columns of matrices."""
        return self.extent != 0


@dataclass(frozen=True)
class Hyper:
    """A hyper-parameter with its bounds. `switch`: the value is 0 or 1, and users give a bool.
    `words`: the names of its values 0, 1 ..., if they have names."""

    name: str
    title: str
    initial: float
    minimum: float
    maximum: float
    exclusive_maximum: bool
    per_optimizer: bool
    switch: bool
    words: Tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """A rule. The header's halfstep_rule_info documents the fields. Hyper-parameters common to all
    rules come first."""

    row: int
    id: int
    name: str
    label: str
    title: str
    states: List[State]
    hypers: Dict[str, Hyper]
    decay: str
    scalars: List[str]
    two_pass: bool
    matrix: bool
    raw_gradient: bool
    accumulates: bool
    average: bool
    totals: int
    cautious: bool

    @property
    def roles(self) -> Dict[str, int]:
        """The role of each state, by its name, in order."""
        return {state.name: state.role for state in self.states}


@dataclass(frozen=True)
class Format:
    """A storage format. The header's halfstep_format_info documents the fields. `roles` is a sum of
    ROLE_ numbers."""

    row: int
    id: int
    name: str
    title: str
    roles: int
    code_bits: int
    extra_bits: int
    block: int
    scale_bytes: int
    stochastic: bool
    code_dtype: str
    extra_dtype: Optional[str]
    geometry: int


_FROM_C = {"bool": bool, "str": _text, "Optional[str]": lambda text: _text(text) or None}


def _row(cls, info, **own):
    """Returns a row of a table from a structure of the library. Fields that are not in `own` have
    the structure's names."""
    for field in fields(cls):
        if field.name not in own:
            value = getattr(info, field.name)
            own[field.name] = _FROM_C.get(field.type, lambda number: number)(value)
    return cls(**own)


def _values(name: str) -> Tuple[str, ...]:
    """Returns the values of a choice, or () if there is no such choice."""
    values = []
    while (value := lib.halfstep_choice_value(name.encode(), len(values))) is not None:
        values.append(_text(value))
    return tuple(values)


def _read_hyper(row: int, index: int) -> Hyper:
    info = HyperInfo.new()
    check(lib.halfstep_get_hyper_info(row, index, byref(info)))
    switch = info.title.startswith((b"0:", b"1:"))
    return _row(Hyper, info, switch=switch, words=_values(_text(info.name)))


def _read_rule(row: int) -> Rule:
    info = RuleInfo.new()
    check(lib.halfstep_get_rule_info(row, byref(info)))
    hypers = [_read_hyper(row, i) for i in range(info.hypers)]
    return _row(
        Rule,
        info,
        row=row,
        states=[
            State(
                _text(info.state_name[i]),
                info.state_role[i],
                info.state_extent[i],
                _text(info.precise_if[i]) or None,
                _text(info.precise_format[i]) or None,
            )
            for i in range(info.states)
        ],
        hypers={h.name: h for h in hypers},
        scalars=[_text(name) for name in info.scalar_name[: info.scalars]],
    )


def _read_format(row: int) -> Format:
    info = FormatInfo.new()
    check(lib.halfstep_get_format_info(row, byref(info)))
    return _row(Format, info, row=row)


rules: Dict[str, Rule] = {
    rule.name: rule for rule in map(_read_rule, range(lib.halfstep_rule_count()))
}
formats: Dict[str, Format] = {
    f.name: f for f in map(_read_format, range(lib.halfstep_format_count()))
}
format_rows: List[Format] = list(formats.values())


def rules_fingerprint() -> str:
    """Returns a hash of the table of rules."""
    table = repr(list(rules.values()))
    return hashlib.sha256(table.encode()).hexdigest()[:16]


def check_rules(expected: str) -> None:
    """Raises ImportError if the table of rules does not have this fingerprint. The classes of
    optimizers were written from the table that has it."""
    if rules_fingerprint() != expected:
        raise ImportError(
            f"halfstep: the shared library {path} has other rules, options or bounds than the"
            f" classes of this package; {_remedy()}, or run 'make generate' if you changed a rule",
            path=path,
        )


def choices(name: str) -> Tuple[str, ...]:
    """Returns the values of a choice, the default first. Choices are "decay", "schedule", "scan",
    "generator", "clip", "missing", and hyper-parameters whose values have names."""
    values = _values(name)
    if not values:
        raise HalfstepValueError(f"unknown choice '{name}'", ERROR_NAME)
    return values


def check_choice(name: str, value, where: str = "") -> None:
    """Raises ValueError if a choice does not have this value. `where` ends the name of the value in
    the error text."""
    known = choices(name)
    if value not in known:
        raise ValueError(f"halfstep: unknown {name}={value!r}{where}; known: {', '.join(known)}")


# ---- Functions of names and numbers --------------------------------------------------------------


def recipe_full(recipe: str) -> str:
    """Returns the full form of a recipe, with every part spelled out."""
    text = create_string_buffer(256)
    check(lib.halfstep_recipe_full(recipe.encode(), text, sizeof(text)))
    return _text(text.value)


def recipe_caveat(recipe: str) -> str:
    """Returns what a recipe is known to cost, as a sentence without its full stop, or ""."""
    text = create_string_buffer(256)
    check(lib.halfstep_recipe_caveat(recipe.encode(), text, sizeof(text)))
    return _text(text.value)


def forecast(*tensors: Tuple[str, dict, int], without_weights: bool = False) -> Forecast:
    """Returns what tensors take: each a recipe, the fields of its structure, and how many such
    tensors there are."""
    sums = Forecast.new(without_weights=without_weights)
    for recipe, shape, count in tensors:
        tensor = Tensor.new(**{"gradient": b"f32", **shape})
        check(lib.halfstep_forecast_tensors(byref(sums), recipe.encode(), byref(tensor), count))
    return sums


def is_real(value) -> bool:
    """Returns True for a number of Python's or NumPy's, which True and False are not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_count(value, least: int = 0, most: int = 2**63 - 1) -> bool:
    """Returns True for a whole number of Python's or NumPy's within these bounds."""
    return is_real(value) and isinstance(value, numbers.Integral) and least <= value <= most


def plainly(value):
    """Returns a whole number of any class, or a number of NumPy's, as Python's own. Returns other
    values as they are."""
    if isinstance(value, (bool, int, float, str)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return float(value) if isinstance(value, numbers.Real) else value


def check_flags(**values) -> None:
    """Raises TypeError for text in place of True or False, because Python takes "false" for
    true."""
    for name, value in values.items():
        if isinstance(value, str):
            raise TypeError(
                f"halfstep: {name}={value!r} is text; write True or False, without quotes"
            )


def name_id(name: str) -> int:
    """Returns the id of a tensor with this name. The id keys the tensor's random bits."""
    return lib.halfstep_name_id(name.encode())


def version() -> str:
    """Returns the version of the loaded library."""
    number = lib.halfstep_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
