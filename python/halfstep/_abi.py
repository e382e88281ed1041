"""The C library, by ctypes: its functions and structures as include/halfstep.h declares them, and
its tables of rules, formats and hyper-parameters as plain data. Nothing here needs torch.

The shared library lies beside this file. The environment variable HALFSTEP_LIBRARY names another
one to load instead.

This file is longer than 500 lines because every declaration of the header has one here.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    create_string_buffer,
    sizeof,
)
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

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
NONFINITE = -50

ROLE_WEIGHT = 1
ROLE_GRADIENT = 2
ROLE_SIGNED = 4
ROLE_NONNEG = 8

GEOMETRY_ROWS = 0
GEOMETRY_FLAT = 1
GEOMETRY_TENSOR = 2

#: hyper-parameters that users give together, as "betas"
BETAS = ("beta1", "beta2", "beta3")

MAX_STATES = 6
MAX_SCALARS = 4
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


class _Sized(Structure):
    @classmethod
    def new(cls, **fields):
        """Returns a structure with its struct_size set. Fields that are not given are zero."""
        return cls(struct_size=sizeof(cls), **fields)


class RuleInfo(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("id", c_int32),
        ("name", c_char_p),
        ("title", c_char_p),
        ("states", c_int32),
        ("state_role", c_int32 * MAX_STATES),
        ("state_name", c_char_p * MAX_STATES),
        ("hypers", c_int32),
        ("decay", c_char_p),
        ("scalars", c_int32),
        ("two_pass", c_int32),
        ("scalar_name", c_char_p * MAX_SCALARS),
        ("matrix", c_int32),
        ("raw_gradient", c_int32),
        ("accumulates", c_int32),
        ("average", c_int32),
        ("label", c_char_p),
        ("state_extent", c_int32 * MAX_STATES),
        ("totals", c_int32),
        ("cautious", c_int32),
        ("precise_if", c_char_p * MAX_STATES),
        ("precise_format", c_char_p * MAX_STATES),
    ]


class FormatInfo(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("id", c_int32),
        ("name", c_char_p),
        ("title", c_char_p),
        ("roles", c_int32),
        ("code_bits", c_int32),
        ("extra_bits", c_int32),
        ("block", c_int32),
        ("scale_bytes", c_int32),
        ("stochastic", c_int32),
        ("code_dtype", c_char_p),
        ("extra_dtype", c_char_p),
        ("geometry", c_int32),
        ("grid", c_int32),
    ]


class HyperInfo(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("name", c_char_p),
        ("title", c_char_p),
        ("initial", c_double),
        ("minimum", c_double),
        ("maximum", c_double),
        ("exclusive_maximum", c_int32),
        ("per_optimizer", c_int32),
    ]


Task = CFUNCTYPE(None, c_void_p, c_int64)
RunTasks = CFUNCTYPE(None, c_void_p, Task, c_void_p, c_int64)


class Options(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("threads", c_int32),
        ("seed", c_uint64),
        ("run", RunTasks),
        ("host", c_void_p),
        ("device", c_char_p),
        ("stream", c_void_p),
    ]


class DeviceInfo(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("devices", c_int32),
        ("driver", c_int32),
        ("minimum_driver", c_int32),
        ("images", c_int32),
        ("compute", c_int32),
        ("multiprocessors", c_int32),
        ("usable", c_int32),
        ("memory", c_uint64),
        ("name", c_char_p),
        ("code", c_char_p),
    ]


class Tensor(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("group", c_int32),
        ("name", c_char_p),
        ("id", c_uint64),
        ("ndim", c_int32),
        ("reserved", c_int32),
        ("rows", c_int64),
        ("row_length", c_int64),
        ("first_row", c_int64),
        ("n_rows", c_int64),
        ("first_column", c_int64),
        ("n_columns", c_int64),
        ("gradient", c_char_p),
    ]


class SlotInfo(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("format", c_int32),
        ("name", c_char_p),
        ("code_bytes", c_uint64),
        ("extra_bytes", c_uint64),
        ("blocks_per_row", c_int64),
        ("fell_back", c_int32),
        ("grid", c_int32),
        ("code", c_void_p),
        ("extra", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("precise", c_int32),
        ("reserved", c_int32),
    ]


class Call(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("kind", c_int32),
        ("tensor", c_int32),
        ("micro", c_int32),
        ("weights", c_void_p),
        ("gradients", c_void_p),
        ("statistics", c_void_p),
    ]


class Record(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("kind", c_int32),
        ("index", c_int32),
        ("reserved", c_int32),
        ("seed", c_uint64),
        ("skipped_steps", c_uint64),
        ("gradient_norm", c_double),
        ("steps", c_uint64),
        ("id", c_uint64),
        ("state_steps", c_uint64),
        ("full_steps", c_uint64),
        ("writes", c_uint64),
        ("scalar", c_double * MAX_SCALARS),
        ("grid", c_double * MAX_STATES),
    ]


class RecordPlaces(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_int32),
        ("step", c_void_p),
        ("state_steps", c_void_p),
        ("full_steps", c_void_p),
        ("writes", c_void_p),
        ("scalar", c_void_p * MAX_SCALARS),
        ("grid", c_void_p * MAX_STATES),
    ]


# ---- Functions, in the order of the header -------------------------------------------------------

_handle = c_void_p
_pointers = c_void_p  # an array of pointers: any ctypes array, or an address
_bytes = POINTER(c_uint64)

# name -> (result, parameters)
signatures = {
    "halfstep_version": (c_int32, ()),
    "halfstep_strerror": (c_char_p, (c_int,)),
    "halfstep_create": (c_int, (POINTER(Options), POINTER(_handle))),
    "halfstep_destroy": (None, (_handle,)),
    "halfstep_error_detail": (c_char_p, (_handle,)),
    "halfstep_add_group": (c_int, (_handle, c_char_p, POINTER(c_int32))),
    "halfstep_group_count": (c_int32, (_handle,)),
    "halfstep_get_group_recipe": (c_int, (_handle, c_int32, c_char_p, c_size_t)),
    "halfstep_set_hyper": (c_int, (_handle, c_int32, c_char_p, c_double)),
    "halfstep_get_hyper": (c_int, (_handle, c_int32, c_char_p, POINTER(c_double))),
    "halfstep_set_choice": (c_int, (_handle, c_int32, c_char_p, c_char_p)),
    "halfstep_get_choice": (c_char_p, (_handle, c_int32, c_char_p)),
    "halfstep_current_lr": (c_int, (_handle, c_int32, POINTER(c_double))),
    "halfstep_add_tensor": (c_int, (_handle, POINTER(Tensor), POINTER(c_int32))),
    "halfstep_tensor_count": (c_int32, (_handle,)),
    "halfstep_get_tensor": (c_int, (_handle, c_int32, POINTER(Tensor))),
    "halfstep_tensor_find": (c_int32, (_handle, c_char_p)),
    "halfstep_get_slot_info": (c_int, (_handle, c_int32, c_int32, POINTER(SlotInfo))),
    "halfstep_state_bytes": (c_int, (_handle, _bytes)),
    "halfstep_bind_states": (c_int, (_handle, c_void_p, c_uint64)),
    "halfstep_allocate_states": (c_int, (_handle,)),
    "halfstep_step": (c_int, (_handle, _pointers, _pointers)),
    "halfstep_run": (c_int, (_handle, POINTER(Call))),
    "halfstep_accumulate": (
        c_int,
        (_handle, c_int32, c_void_p, c_char_p, c_void_p, c_char_p, c_double),
    ),
    "halfstep_get_record": (c_int, (_handle, POINTER(Record))),
    "halfstep_set_record": (c_int, (_handle, POINTER(Record))),
    "halfstep_skipped_steps": (c_uint64, (_handle,)),
    "halfstep_gradient_norm": (c_double, (_handle,)),
    "halfstep_nonfinite_tensor": (c_char_p, (_handle, POINTER(c_int32))),
    "halfstep_saturated": (c_int, (_handle, c_int32, c_void_p, _bytes)),
    "halfstep_read_slot": (
        c_int,
        (_handle, c_int32, c_int32, c_void_p, c_int64, c_int64, c_void_p),
    ),
    "halfstep_write_slot": (
        c_int,
        (_handle, c_int32, c_int32, c_void_p, c_int64, c_int64, c_void_p),
    ),
    "halfstep_read_average": (c_int, (_handle, c_int32, c_void_p, c_int64, c_int64, c_void_p)),
    "halfstep_memory": (c_int, (_handle, _bytes, _bytes, _bytes, _bytes, POINTER(c_int32))),
    "halfstep_rule_count": (c_int32, ()),
    "halfstep_get_rule_info": (c_int, (c_int32, POINTER(RuleInfo))),
    "halfstep_rule_find": (c_int32, (c_char_p,)),
    "halfstep_format_count": (c_int32, ()),
    "halfstep_get_format_info": (c_int, (c_int32, POINTER(FormatInfo))),
    "halfstep_format_find": (c_int32, (c_char_p,)),
    "halfstep_get_hyper_info": (c_int, (c_int32, c_int32, POINTER(HyperInfo))),
    "halfstep_choice_value": (c_char_p, (c_char_p, c_int32)),
    "halfstep_recipe_full": (c_int, (c_char_p, c_char_p, c_size_t)),
    "halfstep_recipe_bytes": (c_int, (c_char_p, c_int32, c_int64, c_int64, _bytes, _bytes, _bytes)),
    "halfstep_default_threads": (c_int32, ()),
    "halfstep_set_threads": (c_int, (_handle, c_int32)),
    "halfstep_isa": (c_char_p, ()),
    "halfstep_synchronize": (c_int, (_handle,)),
    "halfstep_set_stream": (c_int, (_handle, c_void_p)),
    "halfstep_get_device_info": (c_int, (c_char_p, POINTER(DeviceInfo))),
    "halfstep_run_begin": (c_int, (_handle, POINTER(Call))),
    "halfstep_run_norms": (c_int, (_handle, POINTER(Call))),
    "halfstep_run_finish": (c_int, (_handle, POINTER(Call))),
    "halfstep_statistics_count": (c_int64, (_handle, POINTER(Call))),
    "halfstep_norms_offset": (c_int64, (_handle, POINTER(Call))),
    "halfstep_bind_slot": (c_int, (_handle, c_int32, c_int32, c_void_p, c_void_p)),
    "halfstep_bind_record": (c_int, (_handle, c_int32, POINTER(RecordPlaces))),
    "halfstep_bind_hyper": (c_int, (_handle, c_int32, c_char_p, c_void_p)),
    "halfstep_device_allocate": (c_int, (_handle, c_uint64, POINTER(c_void_p))),
    "halfstep_device_release": (None, (_handle, c_void_p)),
    "halfstep_device_copy": (c_int, (_handle, c_void_p, c_void_p, c_uint64)),
    "halfstep_abi": (c_int32, ()),
    "halfstep_schedule_factor": (
        c_int,
        (c_char_p, c_uint64, c_double, c_double, c_double, c_double, c_double, POINTER(c_double)),
    ),
    "halfstep_name_id": (c_uint64, (c_char_p,)),
    "halfstep_isa_count": (c_int32, ()),
    "halfstep_isa_name": (c_char_p, (c_int32,)),
    "halfstep_isa_available": (c_int32, (c_int32,)),
    "halfstep_set_isa": (c_int, (c_char_p,)),
    "halfstep_isa_warning": (c_char_p, ()),
    "halfstep_cpu_features": (None, (c_char_p, c_size_t)),
    "halfstep_random_words": (
        c_int,
        (c_char_p, c_uint64, c_uint64, c_uint64, c_int32, c_uint64, POINTER(c_uint32), c_size_t),
    ),
    "halfstep_bf16_stochastic": (
        c_int,
        (POINTER(c_float), POINTER(c_uint16), c_size_t, POINTER(c_uint32)),
    ),
}


def _library_path() -> str:
    chosen = os.environ.get("HALFSTEP_LIBRARY")
    if chosen:
        return os.path.abspath(chosen)  # the loader would search other folders for a bare name
    name = {"win32": "halfstep.dll", "darwin": "libhalfstep.dylib"}.get(
        sys.platform, "libhalfstep.so"
    )
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), name)


def _load(path: str) -> ctypes.CDLL:
    remedy = (
        "correct or unset the environment variable HALFSTEP_LIBRARY"
        if os.environ.get("HALFSTEP_LIBRARY")
        else "install the package again ('pip install .' in its source folder)"
    )
    if not os.path.isfile(path):
        raise ImportError(
            f"halfstep: the shared library {path} does not exist; {remedy}", path=path
        )
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"halfstep: the shared library {path} cannot be loaded ({error}); {remedy}", path=path
        ) from error
    abi = getattr(library, "halfstep_abi", None)
    if abi is None:
        raise ImportError(
            f"halfstep: {path} is not the halfstep library, it has no function halfstep_abi;"
            f" {remedy}",
            path=path,
        )
    if abi() != ABI:
        raise ImportError(
            f"halfstep: the shared library {path} has ABI {abi()}, this package needs {ABI};"
            f" {remedy}",
            path=path,
        )
    for name, (result, parameters) in signatures.items():
        function = getattr(library, name, None)
        if function is None:
            raise ImportError(
                f"halfstep: the shared library {path} is older than this package, it has no"
                f" function {name}; {remedy}",
                path=path,
            )
        function.restype = result
        function.argtypes = parameters
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


_error_classes = {
    ERROR_ARGUMENT: HalfstepValueError,
    ERROR_NAME: HalfstepValueError,
    ERROR_RANGE: HalfstepValueError,
    ERROR_SHAPE: HalfstepValueError,
    ERROR_DUPLICATE: HalfstepValueError,
    ERROR_UNSUPPORTED: HalfstepValueError,
    ERROR_MEMORY: HalfstepMemoryError,
}


def _text(value: Optional[bytes]) -> str:
    return value.decode("utf-8", "replace") if value else ""


def check(code: int, handle=None, detail: str = "") -> None:
    """Raises the error that `code` stands for, with the handle's error text. Does nothing for OK.
    Callers of steps handle NONFINITE themselves, because it is not an error of the call; here it
    raises."""
    if code == OK:
        return
    text = _text(lib.halfstep_strerror(code))
    detail = detail or (_text(lib.halfstep_error_detail(handle)) if handle else "")
    raise _error_classes.get(code, HalfstepError)(f"{text}: {detail}" if detail else text, code)


# ---- Tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A state of a rule. `role` is a ROLE_ number. `vector`: the state has one value per row or per
    column of a matrix, and only matrices have it. While the hyper-parameter `precise_if` is not 0,
    the state is stored in `precise_format` instead of a block format."""

    name: str
    role: int
    vector: bool = False
    precise_if: Optional[str] = None
    precise_format: Optional[str] = None


@dataclass(frozen=True)
class Hyper:
    """A hyper-parameter with its bounds. `switch`: the value is 0 or 1, and users give a bool."""

    name: str
    title: str
    initial: float
    minimum: float
    maximum: float
    exclusive_maximum: bool
    per_optimizer: bool
    switch: bool


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


def _read_hyper(row: int, index: int) -> Hyper:
    info = HyperInfo.new()
    check(lib.halfstep_get_hyper_info(row, index, byref(info)))
    title = _text(info.title)
    return Hyper(
        name=_text(info.name),
        title=title,
        initial=info.initial,
        minimum=info.minimum,
        maximum=info.maximum,
        exclusive_maximum=bool(info.exclusive_maximum),
        per_optimizer=bool(info.per_optimizer),
        switch=title.startswith(("0:", "1:")),
    )


def _read_rule(row: int) -> Rule:
    info = RuleInfo.new()
    check(lib.halfstep_get_rule_info(row, byref(info)))
    hypers = [_read_hyper(row, i) for i in range(info.hypers)]
    return Rule(
        row=row,
        id=info.id,
        name=_text(info.name),
        label=_text(info.label),
        title=_text(info.title),
        states=[
            State(
                _text(info.state_name[i]),
                info.state_role[i],
                bool(info.state_extent[i]),
                _text(info.precise_if[i]) or None,
                _text(info.precise_format[i]) or None,
            )
            for i in range(info.states)
        ],
        hypers={h.name: h for h in hypers},
        decay=_text(info.decay),
        scalars=[_text(info.scalar_name[i]) for i in range(info.scalars)],
        two_pass=bool(info.two_pass),
        matrix=bool(info.matrix),
        raw_gradient=bool(info.raw_gradient),
        accumulates=bool(info.accumulates),
        average=bool(info.average),
        totals=info.totals,
        cautious=bool(info.cautious),
    )


def _read_format(row: int) -> Format:
    info = FormatInfo.new()
    check(lib.halfstep_get_format_info(row, byref(info)))
    return Format(
        row=row,
        id=info.id,
        name=_text(info.name),
        title=_text(info.title),
        roles=info.roles,
        code_bits=info.code_bits,
        extra_bits=info.extra_bits,
        block=info.block,
        scale_bytes=info.scale_bytes,
        stochastic=bool(info.stochastic),
        code_dtype=_text(info.code_dtype),
        extra_dtype=_text(info.extra_dtype) or None,
        geometry=info.geometry,
    )


rules: Dict[str, Rule] = {
    rule.name: rule for rule in map(_read_rule, range(lib.halfstep_rule_count()))
}
formats: Dict[str, Format] = {
    f.name: f for f in map(_read_format, range(lib.halfstep_format_count()))
}
format_rows: List[Format] = list(formats.values())


def choices(name: str) -> Tuple[str, ...]:
    """Returns the values of a choice, the default first. Choices are "decay", "schedule", "scan",
    "generator", "clip" and "missing"."""
    values = []
    while True:
        value = lib.halfstep_choice_value(name.encode(), len(values))
        if value is None:
            break
        values.append(_text(value))
    if not values:
        raise HalfstepValueError(f"unknown choice '{name}'", ERROR_NAME)
    return tuple(values)


# ---- Functions of names and numbers --------------------------------------------------------------


def _about_recipe(recipe: str) -> str:
    """Returns the error text for a recipe that the library refused. Without a handle the library
    returns a code only."""
    rule, *rest = recipe.split("/")
    if rule not in rules:
        return f"recipe '{recipe}': unknown rule '{rule}'; known: {', '.join(rules)}"
    for part in rest:
        for name in part.split("+"):
            if name not in formats:
                return f"recipe '{recipe}': unknown format '{name}'; known: {', '.join(formats)}"
    return f"recipe '{recipe}'"


def recipe_full(recipe: str) -> str:
    """Returns the full form of a recipe, with every part spelled out."""
    text = create_string_buffer(256)
    code = lib.halfstep_recipe_full(recipe.encode(), text, sizeof(text))
    if code:
        check(code, detail=_about_recipe(recipe))
    return _text(text.value)


def recipe_bytes(recipe: str, ndim: int, rows: int, row_length: int) -> Tuple[int, int, int]:
    """Returns the bytes of one tensor under a recipe: of its weight, of the weight's residual or
    error codes, and of its states."""
    sums = [c_uint64() for _ in range(3)]
    check(
        lib.halfstep_recipe_bytes(recipe.encode(), ndim, rows, row_length, *map(byref, sums)),
        detail=f"recipe '{recipe}', {rows} rows of {row_length}",
    )
    return sums[0].value, sums[1].value, sums[2].value


def name_id(name: str) -> int:
    """Returns the id of a tensor with this name. The id keys the tensor's random bits."""
    return lib.halfstep_name_id(name.encode())


def version() -> str:
    """Returns the version of the loaded library."""
    number = lib.halfstep_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
