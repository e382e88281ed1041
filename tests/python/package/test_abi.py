"""Tests halfstep._library.abi against tests/golden/abi.txt, the list of what the headers declare:
functions, structures, constants. Also its tables and errors, and the error for a library that is
missing or another one."""

import ctypes
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep._library import abi

SOURCE = Path(os.environ.get("HALFSTEP_SOURCE", Path(__file__).resolve().parents[3]))
# The words of each line; tests/house/abi.py describes them.
LINES = [line.split(" ", 3) for line in (SOURCE / "tests/golden/abi.txt").read_text().splitlines()]

STRUCTURES = {
    "rule_info": abi.RuleInfo,
    "format_info": abi.FormatInfo,
    "hyper_info": abi.HyperInfo,
    "options": abi.Options,
    "tensor": abi.Tensor,
    "slot_info": abi.SlotInfo,
    "call": abi.Call,
    "record": abi.Record,
    "record_places": abi.RecordPlaces,
    "forecast": abi.Forecast,
    "device_info": abi.DeviceInfo,
    "store_options": abi.StoreOptions,
    "store_info": abi.StoreInfo,
}

compiler = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")

# name -> (type of the result, types of the parameters)
DECLARED = {
    name: (result, [] if parameters == "void" else parameters.split(", "))
    for _, name, _, kind in (line for line in LINES if line[0] == "function")
    for result, parameters in re.findall(r"(.*?) ?\((.*)\)$", kind)
}
NUMBERS = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint16_t": ctypes.c_uint16,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
}


@pytest.mark.parametrize("name", sorted("halfstep_" + name for name in abi.signatures))
def test_signature(name):
    result, parameters = DECLARED[name]
    function = getattr(abi.lib, name)
    assert len(function.argtypes) == len(parameters), parameters
    for bound, declared in zip(function.argtypes, parameters):
        if "*" not in declared:
            assert bound is NUMBERS[declared.replace("const ", "")], declared
            continue
        if "char" in declared:
            assert bound is ctypes.c_char_p, declared
            continue
        # A pointer is its type's, or an address.
        target = declared.replace("const ", "").replace("*", "").strip()
        structure = STRUCTURES.get(target.replace("halfstep_", ""))
        if structure:
            assert bound is ctypes.POINTER(structure), declared
        elif bound is not ctypes.c_void_p:
            inner = ctypes.c_void_p if declared.count("*") == 2 else NUMBERS[target]
            assert bound is ctypes.POINTER(inner), declared
    expected = {"void": None, "const char *": ctypes.c_char_p}.get(result, NUMBERS.get(result))
    assert function.restype is expected, result


def test_every_function_that_the_package_calls_has_a_signature():
    # ctypes would pass an address as a C int.
    package = Path(abi.__file__).parent
    called = {
        name
        for file in package.rglob("*.py")
        for name in re.findall(r"\blib\.halfstep_(\w+)", file.read_text())
    }
    assert called and not called - set(abi.signatures)


def test_structures_have_the_layout_of_the_header():
    for name, structure in STRUCTURES.items():
        head = f"halfstep_{name}"
        fields = [(f[0], getattr(structure, f[0])) for f in structure._fields_]
        assert [["structure", head, str(ctypes.sizeof(structure))]] == [
            line for line in LINES if line[1] == head
        ]
        assert [[f"{head}.{n}", str(f.offset), str(f.size)] for n, f in fields] == [
            [member, offset, rest.split(" ")[0]]
            for _, member, offset, rest in (line for line in LINES if line[0] == "member")
            if member.startswith(head + ".")
        ]


def test_constants_are_the_headers():
    values = {line[1]: line[2] for line in LINES if line[0] == "constant"}
    names = [
        n for n in dir(abi) if re.match(r"(ERROR|ROLE|GEOMETRY|EXTENT|SLOT|CALL|RECORD)_[A-Z]+$", n)
    ]
    names += ["OK", "NONFINITE", "ALL_GROUPS", "MAX_STATES", "MAX_SCALARS"]
    assert len(names) > 20
    assert {n: values["HALFSTEP_" + n] for n in names} == {n: str(getattr(abi, n)) for n in names}
    assert LINES[0] == ["abi", str(abi.ABI)]


# ---- Tables --------------------------------------------------------------------------------------


def test_tables_are_complete():
    assert [r.row for r in abi.rules.values()] == list(range(abi.lib.halfstep_rule_count()))
    assert [f.row for f in abi.formats.values()] == list(range(abi.lib.halfstep_format_count()))
    for name, rule in abi.rules.items():
        assert abi.lib.halfstep_rule_find(name.encode()) == rule.row
        assert rule.label.isidentifier() and rule.title and rule.decay in abi.choices("decay")
        assert len(rule.states) <= abi.MAX_STATES and all(s.name and s.role for s in rule.states)
        assert {"lr", "weight_decay", "maximize", "clip_norm"} <= set(rule.hypers)
        for hyper in rule.hypers.values():
            assert hyper.minimum <= hyper.initial <= hyper.maximum and hyper.title
            assert (
                not hyper.switch
                or hyper.initial in (0, 1)
                and (hyper.minimum, hyper.maximum) == (0, 1)
            )
    assert len({r.label for r in abi.rules.values()}) == len(abi.rules)
    adamw = abi.rules["adamw"]
    assert (adamw.label, adamw.decay) == ("AdamW", "decoupled")
    assert adamw.accumulates and not adamw.matrix
    assert [s.name for s in adamw.states] == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    switches = [h.name for h in adamw.hypers.values() if h.switch]
    assert switches == ["maximize", "cautious", "amsgrad"]
    of_optimizer = [h.name for h in adamw.hypers.values() if h.per_optimizer]
    assert of_optimizer == ["gradient_scale", "clip_norm"]
    assert adamw.hypers["beta1"].exclusive_maximum and not adamw.hypers["eps"].exclusive_maximum
    assert (
        abi.rules["lamb"].scalars == ["weight_norm", "update_norm", "trust_ratio"]
        and abi.rules["lamb"].two_pass
    )
    assert (
        abi.rules["muon"].matrix
        and abi.rules["ema"].raw_gradient
        and abi.rules["schedulefree"].average
    )


def test_formats_tell_their_bytes():
    for f in abi.formats.values():
        assert (f.block > 0) == (f.scale_bytes > 0) and f.code_bits in (4, 6, 8, 16, 32)
        apart = (
            f.scale_bytes and f.geometry != abi.GEOMETRY_PACKED
        )  # packed scales are in the codes
        assert (f.extra_dtype is not None) == bool(f.extra_bits or apart)
    int8 = abi.formats["int8"]
    assert (int8.code_bits, int8.code_dtype, int8.geometry) == (8, "I8", abi.GEOMETRY_ROWS)
    assert abi.formats["bf16-sr"].stochastic and not abi.formats["bf16"].stochastic
    assert abi.formats["bf16-kahan"].extra_bits == 16


def test_choices():
    assert abi.choices("scan") == ("scan", "per-tensor", "known-finite")
    assert {"constant", "linear", "cosine"} <= set(abi.choices("schedule"))
    with pytest.raises(ValueError, match="nonsense"):
        abi.choices("nonsense")


def test_names_and_recipes():
    header = (SOURCE / "include/halfstep.h").read_text()
    assert abi.version() == ".".join(re.findall(r"#define HALFSTEP_VERSION_[A-Z]+ +(\d+)", header))
    assert abi.name_id("layer.weight") == 0x3E70BD8E9D8D95BA and abi.name_id(
        "Größe"
    ) != abi.name_id("Groesse")
    assert abi.recipe_full("adamw/bf16-sr/int8") == "adamw/bf16-sr/int8"
    assert abi.recipe_full("adan") == "adan/f32/f32"
    taken = abi.forecast(("adamw/bf16-kahan/int8", {"ndim": 2, "rows": 64, "row_length": 64}, 1))
    assert (taken.weights, taken.weight_extras, taken.states) == (
        8192,
        8192,
        2 * (4096 + 64 * 64 // 32 * 2),
    )
    for wrong in ("adamx", "adamw/bf17", "adamw/bf16/int8/int8", "", "adamw/int8"):
        with pytest.raises(abi.HalfstepError, match=re.escape(f"'{wrong}'")) as caught:
            abi.recipe_full(wrong)
        assert isinstance(caught.value, ValueError) and caught.value.code < 0
    with pytest.raises(ValueError, match="-1 rows of 4"):
        abi.forecast(("adamw", {"ndim": 2, "rows": -1, "row_length": 4}, 1))


# ---- Calls and errors ----------------------------------------------------------------------------


class Handle:
    """A group of one tensor, whose memory is the test's."""

    def __init__(self, recipe="adamw", shape=(8,), **options):
        self.o, self.group, self.tensor = ctypes.c_void_p(), ctypes.c_int32(), ctypes.c_int32()
        options = abi.Options.new(**{"threads": 1, "seed": 5, **options})
        self.call("create", ctypes.byref(options), ctypes.byref(self.o), handle=False)
        self.call("add_group", recipe.encode(), ctypes.byref(self.group))
        rows, length = (*shape, 1)[:2]
        tensor = abi.Tensor.new(
            group=self.group.value,
            name=b"w",
            ndim=len(shape),
            rows=rows,
            row_length=length,
            gradient=b"f32",
        )
        self.call("add_tensor", ctypes.byref(tensor), ctypes.byref(self.tensor))

    def call(self, name, *arguments, handle=True):
        arguments = (self.o, *arguments) if handle else arguments
        abi.check(getattr(abi.lib, "halfstep_" + name)(*arguments), self.o if handle else None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        abi.lib.halfstep_destroy(self.o)


def pointers_to(*arrays):
    """Returns an array of one pointer for each array."""
    return [(ctypes.c_void_p * 1)(ctypes.addressof(array)) for array in arrays]


def test_a_step_through_the_mirror_is_adamw():
    with Handle() as h:
        hypers = {"lr": 0.125, "weight_decay": 0.5, "beta1": 0.75, "beta2": 0.5, "eps": 0.0}
        for name, value in hypers.items():
            h.call("set_hyper", h.group, name.encode(), value)
        h.call("allocate_states")
        step = ctypes.c_float(-1)
        places = abi.RecordPlaces.new(step=ctypes.addressof(step))
        h.call("bind_record", h.tensor, ctypes.byref(places))
        weight = (ctypes.c_float * 8)(*[float(i) for i in range(8)])
        gradient = (ctypes.c_float * 8)(*[1.0, -1.0] * 4)
        pointers = pointers_to(weight, gradient)
        h.call("step", *pointers)
        assert step.value == 1
        # The first debiased step is the sign of the gradient.
        assert list(weight) == pytest.approx(
            [i - 0.125 * (-1) ** i - 0.0625 * i for i in range(8)], abs=1e-6
        )

        info = abi.SlotInfo.new()
        h.call("get_slot_info", h.tensor, abi.SLOT_STATE, ctypes.byref(info))
        assert (info.name, info.code_bytes, info.extra_bytes) == (b"exp_avg", 32, 0) and info.code
        moment = (ctypes.c_float * 8)()
        h.call("read_slot", h.tensor, abi.SLOT_STATE, None, 0, 8, moment)
        assert list(moment) == [0.25, -0.25] * 4
        counters = abi.Record.new(kind=abi.RECORD_TENSOR, index=h.tensor.value)
        h.call("get_record", ctypes.byref(counters))
        assert (counters.state_steps, counters.full_steps, counters.id) == (1, 1, abi.name_id("w"))

        gradient[3] = math.nan
        before = list(weight)
        assert abi.lib.halfstep_step(h.o, *pointers) == abi.NONFINITE
        assert (
            list(weight) == before
            and abi.lib.halfstep_nonfinite_tensor(h.o, None) == b"w"
            and step.value == 1
        )


def test_a_host_can_lend_its_threads():
    calls = []

    @abi.RunTasks
    def run(host, task, argument, n):
        calls.append(n)
        for i in range(n):
            task(argument, i)

    n = 1 << 18
    with Handle("sgd", (n // 256, 256), threads=0, run=run) as h:
        h.call("set_hyper", h.group, b"lr", 0.5)
        h.call("allocate_states")
        weight, gradient = (ctypes.c_float * n)(), (ctypes.c_float * n)(*([1.0] * n))
        h.call("step", *pointers_to(weight, gradient))
    assert sum(calls) > 1 and set(weight) == {-0.5}


@pytest.mark.parametrize("rule", list(abi.rules))
def test_numbers_out_of_bounds_are_value_errors(rule):
    with Handle(rule) as h:
        for hyper in abi.rules[rule].hypers.values():
            group = abi.ALL_GROUPS if hyper.per_optimizer else h.group
            largest, above = hyper.maximum, math.nextafter(hyper.maximum, math.inf)
            if hyper.exclusive_maximum:
                largest, above = math.nextafter(hyper.maximum, 0), hyper.maximum
            below = math.nextafter(hyper.minimum, -math.inf)
            wrong = [math.nan, math.inf, -math.inf, below, above]
            right = [hyper.minimum, hyper.initial, largest]
            if hyper.name == "cautious" and not abi.rules[rule].cautious:
                right = [0.0]
                with pytest.raises(ValueError, match=f"{rule} cannot be cautious: ") as caught:
                    h.call("set_hyper", group, b"cautious", 1.0)
                assert caught.value.code == abi.ERROR_UNSUPPORTED
            for value in right:
                h.call("set_hyper", group, hyper.name.encode(), value)
                kept = ctypes.c_double()
                if not hyper.per_optimizer and hyper.name != "reference_lr":
                    h.call("get_hyper", group, hyper.name.encode(), ctypes.byref(kept))
                    assert kept.value == value
            for value in wrong:
                with pytest.raises(ValueError, match=hyper.name) as caught:
                    h.call("set_hyper", group, hyper.name.encode(), value)
                assert caught.value.code == abi.ERROR_RANGE


def test_errors_have_the_promised_classes():
    for code in (
        abi.ERROR_ARGUMENT,
        abi.ERROR_NAME,
        abi.ERROR_RANGE,
        abi.ERROR_SHAPE,
        abi.ERROR_DUPLICATE,
        abi.ERROR_UNSUPPORTED,
    ):
        with pytest.raises(ValueError) as caught:
            abi.check(code)
        assert isinstance(caught.value, abi.HalfstepError) and caught.value.code == code
    with pytest.raises(MemoryError) as caught:
        abi.check(abi.ERROR_MEMORY)
    assert isinstance(caught.value, abi.HalfstepError)
    with pytest.raises(abi.HalfstepError, match="order") as caught:
        abi.check(abi.ERROR_ORDER)
    assert isinstance(caught.value, RuntimeError) and not isinstance(caught.value, ValueError)
    abi.check(abi.OK)
    with Handle() as h, pytest.raises(abi.HalfstepError, match="unknown name: .*'lrr'"):
        h.call("set_hyper", h.group, b"lrr", 0.5)


def test_errors_survive_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(abi.HalfstepValueError("text", abi.ERROR_NAME)))
    assert (str(error), error.code, type(error)) == (
        "text",
        abi.ERROR_NAME,
        abi.HalfstepValueError,
    )


# ---- Libraries that are not the right one --------------------------------------------------------


def load(library):
    """Imports with that library in a process of its own, without torch. Returns "" or the
    exception."""
    file = Path(abi.__file__)
    program = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('abi', {str(file)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['abi'] = module\n"
        "try:\n    spec.loader.exec_module(module)\n"
        "except ImportError as error:\n    print(error)\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "HALFSTEP_LIBRARY": str(library)}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()


def make_library(folder, text):
    (folder / "other.c").write_text(text)
    subprocess.run(
        ["cc", "-shared", "-fPIC", str(folder / "other.c"), "-o", str(folder / "other.so")],
        check=True,
    )
    return folder / "other.so"


def test_the_environment_names_the_library(tmp_path):
    copy = tmp_path / "copy.so"
    shutil.copy(abi.path, copy)
    assert load(copy) == ""


@pytest.mark.parametrize(
    "recipe, words",
    [
        ("nope", "unknown rule 'nope'; 'python -m halfstep info' lists the rules"),
        ("adamw/f32/nope", "unknown format 'nope'; 'python -m halfstep info' lists the formats"),
        ("adamw/int8", "recipe 'adamw/int8': 'int8' cannot store weights"),
        ("adamw/f32/int8/x", "text after the state formats"),
    ],
)
def test_the_library_says_what_is_wrong_with_a_recipe(recipe, words):
    for call in (abi.recipe_full, abi.recipe_caveat):
        with pytest.raises(ValueError, match=words):
            call(recipe)


def test_a_library_that_cannot_be_loaded(tmp_path):
    (tmp_path / "text.so").write_text("no library")
    for name, words in (("nothing.so", "does not exist"), ("text.so", "cannot be loaded")):
        said = load(tmp_path / name)
        for text in (str(tmp_path / name), words, "HALFSTEP_LIBRARY"):
            assert text in said


@compiler
@pytest.mark.parametrize(
    "text, words",
    [
        ("int halfstep_abi(void) { return 999; }", ["ABI 999", f"needs {abi.ABI}"]),
        ("int unrelated(void) { return 1; }", ["not the halfstep library"]),
        (
            f"int halfstep_abi(void) {{ return {abi.ABI}; }}",
            ["halfstep_version", "older"],
        ),
    ],
    ids=["another ABI", "another library", "an older library of the same ABI"],
)
def test_a_library_that_is_not_the_right_one(tmp_path, text, words):
    said = load(make_library(tmp_path, text + "\n"))
    for word in (str(tmp_path / "other.so"), *words):
        assert word in said


def test_a_library_with_another_table_of_rules(tmp_path):
    """It is refused, because the package's classes have the options of their own table."""
    other, title = tmp_path / "other.so", abi.rules["adamw"].title.encode()
    other.write_bytes(Path(abi.path).read_bytes().replace(title, title.swapcase()))
    program = "import halfstep._library.abi"
    for library, fails in ((abi.path, False), (str(other), True)):
        environment = {**os.environ, "HALFSTEP_LIBRARY": library}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True
        )
        assert bool(done.returncode) == fails
        words = f"ImportError: halfstep: the shared library {library} has other rules, options or"
        assert (words in done.stderr) == fails, done.stderr
    assert "HALFSTEP_LIBRARY, or run 'make generate' if you changed a rule" in done.stderr


def test_the_package_raises_it_too(tmp_path):
    environment = {**os.environ, "HALFSTEP_LIBRARY": str(tmp_path / "nothing.so")}
    done = subprocess.run(
        [sys.executable, "-c", "import halfstep"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode and "ImportError: halfstep: the shared library" in done.stderr
