"""Tests that every rule's header has its equations (docs/adding.md), and that the library computes
them. The equations are run in double precision, as they stand in src/rules/."""

import math
import pathlib
import re
import sys
from ctypes import c_void_p

import pytest
import torch
from common import ROOT
from conftest import randn

from halfstep._library import abi, calls
from halfstep._library.abi import invoke, lib
from halfstep._states.handles import Handle, read_rows

ROOT = pathlib.Path(ROOT)
sys.path.append(str(ROOT / "site"))
import equations  # noqa: E402

STEPS = 8
NAME = "w"
HEADERS = equations.rule_headers(ROOT)
#: change no number that an equation tells: how products are made, and which tensors share sums
SILENT = ("exact", "ns_form", "d_group")
#: learning rates that move weights, and let every option act
RATES = {"ema": 0.5, "prodigy": 0.5, "adafactor": 0.5}
#: of fully decoupled decay
REFERENCE = 1.0
#: options of all runs of a rule, so that its other options act
BASE = {
    "prodigy": {"d0": 1e-3, "growth_rate": 2.0},
    "adamw-delayed": {"threshold": 5e-4},
}
#: options that another one needs
BESIDE = {
    ("sgd", "dampening"): {"momentum": 0.9},
    ("sgd", "nesterov"): {"momentum": 0.9},
    ("adafactor", "warmup_init"): {"published": 1, "beta1": 0.9},
    ("muon", "ns_eps"): {"momentum": 0.999},
    ("muon", "row_beta"): {"normalize_rows": "keep-norm"},
}
#: other values, where half of the default or 0.3 is none
OTHER = {
    "eps": 0.5,
    "ns_eps": 1.0,
    "ns_b": -4.7,
    "instability_eps": 0.1,
    "k": 3,
    "d0": 3e-3,
    "max_norm": 20.0,
    "scale_eps": 10.0,
    "ns_steps": 3,
    "alpha_warmup": 20,
    "beta3_warmup": 20,
    "growth_rate": 1.2,
    "slice_p": 7,
    "threshold": 2e-3,
    "d_group": 1,
}
COEFFICIENTS = {
    "deepseek-v4": [(3.4445, -4.775, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2,
    "dion": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
    # Amsel et al. 2025, of x / 1.01, and the first of it twice
    "polar-express": [
        tuple(c / 1.01 ** (n * (2 * i + 1)) for i, c in enumerate(triple))
        for n, triple in [
            (2, (8.28721201814563, -23.595886519098837, 17.300387312530933)),
            (1, (4.107059111542203, -2.9478499167379106, 0.5448431082926601)),
            (1, (3.9486908534822946, -2.908902115962949, 0.5518191394370137)),
            (1, (3.3184196573706015, -2.488488024314874, 0.51004894012372)),
            (1, (2.300652019954817, -1.6689039845747493, 0.4188073119525673)),
        ]
    ],
}


def double(x):
    return torch.as_tensor(x, dtype=torch.float64)


def of_doubles(function):
    return lambda *arguments: function(*map(double, arguments))


def rms(x):
    return x.square().mean().sqrt()


FUNCTIONS = {
    "sqrt": of_doubles(torch.sqrt),
    "max": of_doubles(torch.maximum),
    "min": of_doubles(torch.minimum),
    "abs": torch.abs,
    "sign": torch.sign,
    "exp": of_doubles(torch.exp),
    "ln": of_doubles(torch.log),
    "sum": torch.sum,
    "mean": torch.mean,
    "norm": torch.linalg.vector_norm,
    "rms": rms,
    "row_mean": lambda x: x.mean(1, keepdim=True),
    "column_mean": lambda x: x.mean(0, keepdim=True),
    "outer": torch.mul,  # of a column and a row
}


def gradient(shape, t):
    """Returns gradients that agree in part, and fall, so that estimates and largest moments
    move."""
    return (randn(shape, 99) + 0.5 * randn(shape, 100 + t)) * (3.0 / t)


def rate(rule, t):
    """Returns the learning rate of a step, which rises and falls."""
    return RATES.get(rule, 1e-2) * (1.0 + 0.1 * (t % 3))


def start_of(name):
    """Returns where adamw-delayed starts: the top bits of splitmix64's finalizer of the id."""
    z = abi.name_id(name)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z >> shift) * factor % 2**64
    return ((z ^ z >> 31) >> 11) * 2.0**-53


def options_of(rule, options):
    """Returns the value of every own hyper-parameter of a rule, words for those that have them."""
    found = {}
    for name, hyper in abi.rules[rule].hypers.items():
        initial = hyper.words[int(hyper.initial)] if hyper.words else hyper.initial
        found[name] = {**BASE.get(rule, {}), **options}.get(name, initial)
    return found


def by_equations(rule, shape, mode, options, text=None):
    """Returns the weight after STEPS steps and the states and scalars by name, all in double."""
    read = equations.read(ROOT, HEADERS[rule])
    lines = equations.MODES[mode] + "\n" + (text or read.text)
    code = compile(lines, f"src/rules/{HEADERS[rule]}.h", "exec")
    hypers = options_of(rule, options)
    matrix = len(shape) == 2
    if "ns_coefficients" in hypers:
        steps = int(hypers["ns_steps"])
        own = (hypers["ns_a"], hypers["ns_b"], hypers["ns_c"])
        hypers["coefficients"] = COEFFICIENTS.get(hypers["ns_coefficients"], [own] * steps)
    w = randn(shape, 0).double()
    weights = [s.name for s in abi.rules[rule].states if s.name in ("slow", "z", "p0")]
    values = {**hypers, **FUNCTIONS, "elements": w.numel()}
    values.update(weight_decay=0.1, reference_lr=REFERENCE)
    every = int(hypers.get("slice_p", 1))
    values["total"] = lambda x: x.flatten()[::every].sum()
    values.update(start=start_of(NAME), matrix=matrix, rows=shape[0], columns=shape[-1])
    values.update({s: w if n in weights else double(0.0) for s, n in read.symbols.items()})
    for t in range(1, STEPS + 1):
        values.update(t=t, lr=rate(rule, t), w=w, g=gradient(shape, t).double())
        exec(code, values)
        w = w - values["change"]
    return w, {name: values[symbol] for symbol, name in read.symbols.items()}


def by_library(rule, shape, mode, options):
    """Returns the same as by_equations() from the library, without states that are not stored."""
    handle = Handle(1, 0)
    recipe = f"{rule}/f32/f32" if abi.rules[rule].states else f"{rule}/f32"
    index = handle.add(recipe, NAME, abi.name_id(NAME), shape, "f32")
    given = {**BASE.get(rule, {}), **options}
    handle.set(decay=mode, weight_decay=0.1, reference_lr=REFERENCE, **given)
    invoke(lib.halfstep_allocate_states, handle)
    w = randn(shape, 0)
    for t in range(1, STEPS + 1):
        handle.set(lr=rate(rule, t))
        g = gradient(shape, t)
        pointers = [(c_void_p * 1)(x.data_ptr()) for x in (w, g)]
        invoke(lib.halfstep_step, handle, *pointers)
    states = {}
    for i, state in enumerate(abi.rules[rule].states):
        info = abi.SlotInfo.new()
        slot = abi.SLOT_STATE + i
        invoke(lib.halfstep_get_slot_info, handle, index, slot, info)
        if info.format >= 0:
            states[state.name] = read_rows(lib.halfstep_read_slot, handle, index, shape, slot, None)
    record = calls.read(handle, abi.RECORD_TENSOR, index)
    states.update(zip(abi.rules[rule].scalars, map(double, record.scalar)))
    return w, states


def shapes_of(rule):
    """Returns the shapes that a rule steps by equations of their own."""
    return [(20, 12), (12, 20), (24,)] if abi.rules[rule].matrix else [(20, 12)]


def compare(rule, mode, options, text=None):
    """Fails if the library does not compute a rule's equations, or `text` in their place."""
    for shape in shapes_of(rule):
        wanted, wanted_states = by_equations(rule, shape, mode, options, text)
        found, states = by_library(rule, shape, mode, options)
        movement = (wanted - randn(shape, 0)).abs().max().item()
        assert movement > 1e-5
        error = (found - wanted).abs().max().item()
        assert error < 2e-6 + 1e-4 * movement, (shape, "weights", error, movement)
        for name, value in states.items():
            want = double(wanted_states[name]).flatten().expand(value.numel())
            scale = want.abs().max().item()
            error = (value.flatten() - want).abs().max().item()
            assert error <= 1e-4 * scale + 1e-12, (shape, name, error, scale)


def own_hypers(rule):
    """Returns the hyper-parameters that not all rules have."""
    common = set.intersection(*(set(r.hypers) for r in abi.rules.values()))
    return [h for h in abi.rules[rule].hypers.values() if h.name not in common]


def others_of(hyper):
    """Returns other legal values of a hyper-parameter."""
    if hyper.words:
        return hyper.words[1:]
    if hyper.switch:
        return [1.0 - hyper.initial]
    if hyper.name in OTHER:
        return [OTHER[hyper.name]]
    return [hyper.initial * 0.5 if hyper.initial else 0.3]


OPTIONS = [
    pytest.param(rule, hyper.name, value, id=f"{rule}-{hyper.name}-{value}")
    for rule in abi.rules
    for hyper in own_hypers(rule)
    for value in others_of(hyper)
]


def test_every_decay_mode_has_equations():
    # The sign of an update, which cautious decay asks for, is not a number of the equations.
    assert {*equations.MODES, "cautious"} == {*abi.choices("decay")}


def test_every_state_and_scalar_has_a_symbol():
    assert HEADERS.keys() == abi.rules.keys()
    for rule, name in HEADERS.items():
        read = equations.read(ROOT, name)
        table = [s.name for s in abi.rules[rule].states] + abi.rules[rule].scalars
        assert sorted(read.symbols.values()) == sorted(table), name
        constants = {*abi.rules[rule].hypers, "t", "w", "g", "decay", "matrix"}
        changed = set(re.findall(r"^ *(\w+) = ", read.text, re.M))
        assert not changed & constants, (name, changed & constants)
        assert re.match(r"(for|to|first)\b.*\.$", read.use), name
        assert len(read.source) > 10, name


def test_a_header_without_a_field_is_refused():
    header = (ROOT / "examples" / "skeleton_rule.h").read_text(encoding="utf-8")
    assert equations.markdown(equations.parse(header, "skeleton", None)).startswith("$$")
    for field in ("Use", "Source", "Equations"):
        bad = header.replace(f" * {field}:", " * Other:")
        with pytest.raises(ValueError, match=f"src/rules/x.h has no line '{field}:'"):
            equations.parse(bad, "x", None)


@pytest.mark.parametrize("rule", abi.rules)
def test_the_library_computes_the_equations(rule):
    for mode in equations.MODES:
        if mode != "l2" or not abi.rules[rule].raw_gradient:
            compare(rule, mode, {})


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("m / (1 - beta1**t)", "m"),
        ("sqrt(v_hat) + eps", "sqrt(v_hat + eps)"),
        ("beta2 * v + (1 - beta2)", "beta2 * v + (1 - beta1)"),
        ("+ decay * w", ""),
        ("max(x, v)", "v"),
    ],
)
def test_a_wrong_equation_is_found(right, wrong):
    text = equations.read(ROOT, "adamw").text
    assert right in text
    options = {"amsgrad": 1, "beta2": 0.8, "eps": 0.1}
    compare("adamw", "decoupled", options, text)
    with pytest.raises(AssertionError, match="weights"):
        compare("adamw", "decoupled", options, text.replace(right, wrong))


@pytest.mark.parametrize("rule, name, value", OPTIONS)
def test_every_option_does_what_the_equations_say(rule, name, value):
    beside = BESIDE.get((rule, name), {})
    mode = abi.rules[rule].decay
    compare(rule, mode, {**beside, name: value})
    apart = max(
        (
            by_equations(rule, shape, mode, {**beside, name: value})[0]
            - by_equations(rule, shape, mode, beside)[0]
        )
        .abs()
        .max()
        .item()
        for shape in shapes_of(rule)
    )
    assert math.isfinite(apart)
    assert (apart < 1e-6) == (name in SILENT)
