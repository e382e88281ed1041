"""Tests that every class is what users of torch.optim expect: names, defaults, errors, groups."""

import copy
import doctest
import importlib
import inspect
import math
import os
import re

import pytest
import torch
from conftest import (
    RECIPES,
    RULES,
    TORCH,
    bits,
    class_of,
    everything,
    ids,
    make,
    named,
    parameters,
    recipes,
    rules,
    run,
    same,
    same_steps,
    saved,
    set_gradients,
    states,
    twins,
    weights_of,
)
from torch.nn import Parameter

import halfstep
from halfstep._library import abi
from halfstep._settings.groups import COMMON

# ---- The classes ---------------------------------------------------------------------------------


@rules
def test_every_rule_has_a_class(rule):
    cls = class_of(rule)
    assert issubclass(cls, torch.optim.Optimizer) and issubclass(cls, halfstep.Optimizer)
    assert cls.rule == rule
    assert cls.__name__ == abi.rules[rule].label
    assert cls.__doc__ and "lr" in cls.__doc__
    assert cls.__module__.startswith("halfstep")
    params = parameters()
    assert type(halfstep.optimizer(rule, list(params.values()))) is cls
    # torch wraps it on the class, once.
    assert "step" not in vars(halfstep.optimizer(rule, list(params.values())))


def test_classes_are_public():
    for rule in RULES:
        assert abi.rules[rule].label in halfstep.__all__
    assert halfstep.RMSprop is halfstep.RMSProp


#: torch's classes of the names of ours, by rule
NAMESAKES = {
    rule: theirs
    for name, theirs in vars(torch.optim).items()
    for rule in RULES
    if isinstance(theirs, type) and name.lower() == abi.rules[rule].label.lower()
}


def positional(cls):
    found = []
    for p in inspect.signature(cls).parameters.values():
        if p.kind is p.KEYWORD_ONLY:
            break
        found.append((p.name, p.default))
    return found


@pytest.mark.parametrize("rule", NAMESAKES)
def test_positional_order_and_defaults_are_those_of_torch(rule):
    assert positional(class_of(rule)) == positional(NAMESAKES[rule])


@pytest.mark.parametrize("rule", TORCH)
def test_every_keyword_of_torch_is_accepted(rule):
    ours = inspect.signature(class_of(rule)).parameters
    for name, p in inspect.signature(TORCH[rule]).parameters.items():
        assert name in ours, name
        assert ours[name].default == p.default, name


@pytest.mark.parametrize("rule", TORCH)
def test_defaults_hold_in_groups(rule):
    """A group's options are those of torch, so that code which reads or edits them works."""
    params = parameters(shapes={"a": (4, 4)})
    theirs = TORCH[rule](list(twins(params).values()))
    ours = class_of(rule)(params.values())
    for key, value in theirs.param_groups[0].items():
        if key != "params":
            assert ours.param_groups[0][key] == value or key in ("foreach", "fused"), key


@rules
def test_defaults_are_those_of_the_table(rule):
    _, opt = make(rule)
    group = opt.param_groups[0]
    for name, hyper in abi.rules[rule].hypers.items():
        if name.startswith("beta") and name[4:].isdigit() and "betas" in group:
            assert group["betas"][int(name[4:]) - 1] == hyper.initial, name
        elif (
            name in group and (rule, name) != ("adafactor", "eps") and rule != "muon"
        ):  # which torch calls otherwise
            assert group[name] == hyper.initial, name
    assert opt.defaults["lr"] == abi.rules[rule].hypers["lr"].initial


# ---- Keywords and help ---------------------------------------------------------------------------

#: what each class says of an option that stands for another quantity in every rule
SENTENCES = {
    "betas": "^(decay rate|interpolation|share) ",
    "eps": "^(added to|least|smallest) .*(root|norm|squares)",
    "momentum": r"\bmomentum\b",
    "amplify": "^factor of the .* added to the gradient$",
    "debias": "^True: debias|^False: moments as they are",
    "published": "torchastic's|transformers",
}
#: names that publications use for different things
HOMONYMS = {"alpha"}


def common_options():
    """Returns names and defaults of what Optimizer takes itself and of what all rules may have."""
    keywords = inspect.signature(halfstep.Optimizer.__init__).parameters.values()
    own = {p.name: p.default for p in keywords if p.kind is p.KEYWORD_ONLY}
    return {**dict.fromkeys(COMMON, 0), **own}


def described(cls):
    """Returns the options that the docstring of a class describes: name -> sentences."""
    text = inspect.getdoc(cls)
    found = re.findall(r"^ {,4}([a-z]\w*) {2,}(\S.*(?:\n {8,}\S.*)*)", text, re.M)
    assert len(found) == len(dict(found)), "described twice"
    return dict(found)


def test_a_keyword_means_the_same_in_every_class():
    common, sentences, types = common_options(), {}, {}
    for name, cls in halfstep.rules.classes.items():
        parameters, about = list(inspect.signature(cls).parameters.values())[1:], described(cls)
        for p in parameters:
            if p.name in common:
                assert p.default == common[p.name], (name, p.name)
                continue
            sentence = re.sub(r" \((at least |-?\d)[^()]*\)$", "", " ".join(about[p.name].split()))
            if p.name in SENTENCES:
                assert re.search(SENTENCES[p.name], sentence), (name, p.name, sentence)
            elif p.name not in HOMONYMS:
                assert sentences.setdefault(p.name, sentence) == sentence, (name, p.name)
            if p.name != "eps" or not isinstance(p.default, tuple):  # torch's pair, of Adafactor
                assert types.setdefault(p.name, type(p.default)) is type(p.default), (name, p.name)
        names = {p.name for p in parameters}
        missing = common.keys() - names
        assert missing <= {"cautious"} and ("cautious" in names) == abi.rules[cls.rule].cautious


def test_each_option_is_described_once():
    """Those of a rule by its class; the common ones by Optimizer and in docs/python.md."""
    common = common_options()
    assert described(halfstep.Optimizer).keys() == {"params", *common}
    for cls in halfstep.rules.classes.values():
        options = list(inspect.signature(cls).parameters)[1:]
        assert list(described(cls)) == [name for name in options if name not in common]
        (named,) = re.findall(
            r"^Common options, which help\(.*\) describes: ([^.]*)", inspect.getdoc(cls), re.M
        )
        assert re.split(r",\s", named) == [name for name in options if name in common]
    manual = os.path.join(os.path.dirname(__file__), "..", "..", "..", "docs", "python.md")
    with open(manual, encoding="utf-8") as file:
        named = set(re.findall(r"`(?:opt\.)?(\w+)", file.read()))
    assert common.keys() <= named, common.keys() - named


@rules
def test_help_fits_one_screen(rule):
    """The docstring has 50 lines of 100 columns at most; help() indents it by four."""
    lines = inspect.getdoc(class_of(rule)).splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 96
    assert "halfstep.Optimizer" in class_of(rule).__doc__


@rules
def test_the_example_of_help_runs(rule):
    cls = class_of(rule)
    example = doctest.DocTestParser().get_doctest(cls.__doc__, {}, cls.__name__, None, None)
    assert len(example.examples) >= 5 and any(".step()" in e.source for e in example.examples)
    runner = doctest.DocTestRunner()
    assert runner.run(example, clear_globs=False).failed == 0
    model, opt = example.globs["model"], example.globs["opt"]
    assert type(opt) is cls and opt.state[model.weight]["step"] == 1
    assert opt.param_groups[0]["weights"] == "bf16-sr" and opt.param_groups[0]["states"] == "int8"


# ---- Errors --------------------------------------------------------------------------------------


@rules
def test_errors_of_construction(rule):
    cls = class_of(rule)
    p, q = Parameter(torch.randn(3, 3)), Parameter(torch.randn(3, 3))
    for error, words, given in (
        (
            TypeError,
            "params argument given to the optimizer should be an iterable of Tensors or dicts",
            p,
        ),
        (ValueError, "optimizer got an empty parameter list", []),
        (TypeError, "params is a module, Linear; give its named_parameters", torch.nn.Linear(3, 3)),
        (TypeError, "optimizer can only optimize Tensors", [3.0]),
        (
            ValueError,
            "some parameters appear in more than one parameter group",
            [{"params": [p]}, {"params": [p]}],
        ),
        (ValueError, "can't optimize a non-leaf Tensor", [p * 2]),
        (TypeError, "ordered collections|should be an iterable", [{"params": {p, q}}]),
        (ValueError, "with/without names", [("p", p), q]),
        (ValueError, "with/without names", [{"params": [("p", p)]}, {"params": [q]}]),
    ):
        with pytest.raises(error, match=words):
            cls(given)
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        cls([p, p])
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        cls([p], lr=torch.tensor([1e-3, 1e-3]))
    with pytest.raises(ValueError, match="Invalid learning rate"):
        cls([p], lr=torch.tensor(-1.0))
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="Invalid learning rate: "):
            cls([p], lr=wrong)
        with pytest.raises(ValueError, match="Invalid learning rate: "):
            cls([{"params": [p], "lr": wrong}])
        with pytest.raises(ValueError, match="Invalid weight_decay value: "):
            cls([p], weight_decay=wrong)
    with pytest.raises(TypeError):
        cls([p], no_such_option=1)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match="differentiable"):
        cls([p], differentiable=True)


@pytest.mark.parametrize("rule", [r for r in RULES if "eps" in abi.rules[r].hypers])
def test_error_of_eps(rule):
    eps, words = -1.0, "Invalid epsilon value: -1"
    if rule == "adafactor":
        eps, words = (-1.0, 1e-3), "epsilon1 should be >= 0 but is: -1"
    with pytest.raises(ValueError, match=words):
        class_of(rule)([Parameter(torch.randn(3, 3))], eps=eps)


def test_errors_of_options_whose_values_have_names():
    p, tried = Parameter(torch.randn(3, 3)), []
    for rule in RULES:
        cls = class_of(rule)
        own = cls([p]).defaults
        for name in (h.name for h in abi.rules[rule].hypers.values() if h.words):
            if not isinstance(own.get(name), str):
                continue
            tried.append(name)
            for wrong in (-1.0, 0.5, 1e9, math.nan, math.inf):
                with pytest.raises(ValueError, match=f"Invalid {name} value: {wrong}"):
                    cls([p], **{name: wrong})
            with pytest.raises(ValueError, match=f"unknown {name}='none such'"):
                cls([p], **{name: "none such"})
    assert tried == ["ns_form", "normalize_rows"]


@pytest.mark.parametrize(
    "rule", [r for r in RULES if {"beta1", "beta2"} <= abi.rules[r].hypers.keys() and r != "muon"]
)
def test_errors_of_betas(rule):
    p = Parameter(torch.randn(3, 3))
    cls = class_of(rule)
    good = cls([p]).defaults["betas"]
    for index in range(len(good)):
        for wrong in (1.0, -0.5, math.nan):
            betas = tuple(wrong if i == index else b for i, b in enumerate(good))
            words = f"Invalid beta parameter at index {index}: {wrong}"
            with pytest.raises(ValueError, match=words):
                cls([p], betas=betas)
            with pytest.raises(ValueError, match=words):
                cls([{"params": [p], "betas": betas}])
    with pytest.raises(ValueError, match="betas"):
        cls([p], betas=good[:-1])
    with pytest.raises(ValueError, match="betas"):
        cls([p], betas=(*good, 0.5))


@pytest.mark.parametrize("rule", [r for r in RULES if "momentum" in abi.rules[r].hypers])
def test_error_of_momentum(rule):
    with pytest.raises(ValueError, match="Invalid momentum value: -0.5"):
        class_of(rule)([Parameter(torch.randn(3, 3))], momentum=-0.5)


def test_sgd_nesterov_wants_momentum():
    p = Parameter(torch.randn(3))
    words = "Nesterov momentum requires a momentum and zero dampening"
    for options in ({}, {"momentum": 0.9, "dampening": 0.5}):
        with pytest.raises(ValueError, match=words):
            halfstep.SGD([p], nesterov=True, **options)


# ---- Groups --------------------------------------------------------------------------------------


#: other legal values of options that have bounds of their own
OTHER_VALUES = {
    "adjust_lr_fn": "match_rms_adamw",
    "alpha_warmup": 20,
    "beta3_warmup": 20,
    "d": 1.5,
    "growth_rate": 1.5,
    "max_weight_norm": 0.5,
    "slice_p": 7,
    "threshold": 0.02,
}


def other_value(rule, key, value):
    """Returns another legal value for an option."""
    hypers = abi.rules[rule].hypers
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    if key == "decay":
        return "l2" if value != "l2" else "decoupled"
    if key in hypers and isinstance(value, str):
        return next(word for word in reversed(hypers[key].words) if word != value)
    if isinstance(value, bool) or (key in hypers and hypers[key].switch):
        return not value
    if key in ("k", "ns_steps"):
        return int(value) - 2
    if key == "lr":
        return value * 3
    if key == "eps":
        return (0.01, *value[1:]) if isinstance(value, tuple) else 0.01
    if isinstance(value, tuple):
        return tuple(v * 0.9 for v in value)
    return value * 0.5 if value else 0.3


#: need gradients or learning rates of their own to act (test_judges.py and test_new_rules.py have
#: them)
SILENT = {
    ("adafactor", "eps"),
    ("adafactor", "relative_step"),
    ("adopt", "eps"),
    ("came", "eps"),
    ("came", "instability_eps"),
    ("muon", "eps"),
    ("muon", "exact"),
    ("prodigy", "d_coef"),
    ("prodigy", "growth_rate"),
    ("prodigy", "safeguard_warmup"),
    ("prodigy", "slice_p"),
    ("prodigy", "d_group"),
    ("schedulefree", "weight_lr_power"),
}
#: act only together with other options
BASE = {
    "sgd": {"momentum": 0.9, "weight_decay": 0.1},
    "rmsprop": {"momentum": 0.5, "weight_decay": 0.1},
    "muon": {"normalize_rows": "keep-norm", "weight_decay": 0.1},
}


def own_options(rule, options):
    """Returns the options of the group that belong to the rule: the table's and torch's names for
    them."""
    hypers = abi.rules[rule].hypers
    names = {"betas", "lr", "weight_decay", "maximize", "centralize", "decay"}
    names |= {"decoupled_weight_decay", "ns_coefficients", "adjust_lr_fn"}
    schedule = {"reference_lr", "warmup_steps", "total_steps", "final_fraction", "decay_start"}
    return [
        k
        for k in options
        if (k in names or k in hypers)
        and k not in {*schedule, "power"}
        and options[k] is not None
        and (rule, k) != ("adamw", "decoupled_weight_decay")
        or k == "adjust_lr_fn"
    ]  # there for torch's sake only


@rules
def test_each_option_can_be_set_for_a_group(rule):
    """An option of a group acts on that group exactly as on an optimizer of its own, and does
    act."""
    cls = class_of(rule)
    base = {"weight_decay": 0.1, "lr": 0.05, **BASE.get(rule, {})}
    shapes = {"w": (6, 40), "b": (9,)}
    tried = own_options(rule, cls(list(parameters(shapes=shapes).items()), **base).param_groups[0])
    assert {"lr", "weight_decay", "maximize"} <= set(tried)
    assert len(tried) >= 3 + ("beta1" in abi.rules[rule].hypers) + ("eps" in abi.rules[rule].hypers)
    plain_params = parameters(shapes=shapes)
    plain_opt = cls(plain_params.items(), **base)
    run(plain_opt, plain_params, 0, 8)
    for key in tried:
        value = plain_opt.param_groups[0][key]
        option = {key: other_value(rule, key, value)}
        if key == "dampening":
            option["nesterov"] = False
        if key == "nesterov" and rule == "sgd":
            option["dampening"] = 0
        params, alone, late = (parameters(shapes=shapes) for _ in range(3))
        first = Parameter(torch.randn(5, 5))
        if rule == "prodigy":  # whose groups share an estimate, and so a rate
            option.setdefault("d_group", 1)
        groups = [{"params": [("first", first)]}, {"params": list(params.items()), **option}]
        opt = cls(groups, **base)
        own = cls(alone.items(), **{**base, **option})
        added = cls([("first", Parameter(torch.randn(5, 5)))], **base)
        added.add_param_group({"params": list(late.items()), **option})
        for o, ps in ((opt, params), (own, alone), (added, late)):
            run(o, ps, 0, 8)
        for name in params:
            assert torch.equal(params[name], alone[name]), f"{key} of a group"
            assert torch.equal(late[name], alone[name]), f"{key} of a group added later"
        changed = any(not torch.equal(params[name], plain_params[name]) for name in params)
        assert changed or (rule, key) in SILENT, (
            f"{key}={option[key]!r} in place of {value!r} changes nothing: other_value() "
            "has a value that does, or SILENT names it (docs/adding.md)"
        )


@rules
def test_options_are_read_at_each_step(rule):
    """Edited in a group between two steps, an option acts from the next step on."""
    shapes = {"w": (6, 40), "b": (9,)}
    base = {"weight_decay": 0.1, "lr": 0.05, **BASE.get(rule, {})}
    for key in own_options(rule, make(rule, shapes=shapes, **base)[1].param_groups[0]):
        params, opt = make(rule, shapes=shapes, **base)
        others, other = make(rule, shapes=shapes, **base)
        if key in ("k", "decay", "amsgrad", "centered", "d0") or (rule, key) in SILENT:
            continue  # change which states there are, what was counted, or only the first step
        run(opt, params, 0, 2)
        run(other, others, 0, 2)
        opt.param_groups[0][key] = other_value(rule, key, opt.param_groups[0][key])
        run(opt, params, 2, 8)
        run(other, others, 2, 8)
        moved = any(not torch.equal(params[n], others[n]) for n in params)
        assert moved, f"{key} is not read again, or SILENT has to name it (docs/adding.md)"


def test_lists_edited_in_place_are_read():
    params, opt = make("adamw", lr=0.05, betas=[0.9, 0.999])
    others, other = make("adamw", lr=0.05)
    for o, ps in ((opt, params), (other, others)):
        run(o, ps, 0, 2)
    opt.param_groups[0]["betas"][0] = 0.5
    other.param_groups[0]["betas"] = (0.5, 0.999)
    same_steps(opt, other, params, others, 2, 4)


@rules
@pytest.mark.told("muon: momentum_buffer in int4", rule="muon")
def test_group_added_in_mid_run(rule):
    params, opt = make(rule, "sr-int4", lr=0.01)
    run(opt, params, 0, 3)
    late = parameters(torch.bfloat16, {"late.weight": (8, 64)}, seed=5)
    before = everything(opt)
    apart = {"d_group": 1} if rule == "prodigy" else {}  # an estimate of its own, as the rate is
    opt.add_param_group({"params": list(late.items()), "lr": 0.5, **apart})
    assert weights_of(params) == before[0]
    others, other = make(rule, "sr-int4", lr=0.01)
    run(other, others, 0, 3)
    set_gradients(late, 3)
    untouched = bits(late["late.weight"])
    run(opt, params, 3, 5)
    run(other, others, 3, 5)
    assert weights_of(params) == weights_of(others)
    assert bits(late["late.weight"]) != untouched
    assert opt.state[late["late.weight"]]["step"].item() == 2


@recipes
def test_named_parameters(recipe):
    """Names from (name, tensor) pairs, in groups or not, or from name_parameters(), give the same
    ids and bits."""
    dtype, formats = RECIPES[recipe]
    module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8)).to(dtype)
    modules = [copy.deepcopy(module) for _ in range(3)]
    opts = [
        halfstep.AdamW(modules[0].named_parameters(), **formats, seed=0),
        halfstep.AdamW(
            [{"params": [(n, p)]} for n, p in modules[1].named_parameters()], **formats, seed=0
        ),
    ]
    halfstep.name_parameters(modules[2])
    opts.append(halfstep.AdamW(modules[2].parameters(), **formats, seed=0))
    names = list(named(module))
    # Names are beside the groups, also where some have none, and in them, as torch has.
    for opt in opts[:2]:
        assert [n for group in opt.state_dict()["param_names"] for n in group] == names
        assert [n for g in opt.param_groups for n in g["param_names"]] == names
    for m, opt in zip(modules, opts):
        run(opt, m, 0, 3)
        assert weights_of(m) == weights_of(modules[0])
        assert ids(opt) == [abi.name_id(n) for n in names]


def test_groups_of_any_kind():
    """A single tensor, a generator, nothing at all; numbers of numpy."""
    numpy = pytest.importorskip("numpy")
    p, q = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    opt = halfstep.AdamW(
        [
            {"params": p, "lr": numpy.float32(0.5)},
            {"params": []},
            {"params": (x for x in (q,)), "lr": 1},
        ]
    )
    opt.add_param_group({"params": [], "weights": "bf16-kahan"})
    p.grad, q.grad = torch.ones(3), torch.ones(3)
    opt.step()
    opt.load_state_dict(opt.state_dict())
    opt.step()
    assert abs(p[0].item()) < 0.1 and q[0].item() < -0.9
    assert repr(opt) and opt.state[p]["step"].item() == 2


def test_numbers_of_other_classes(tmp_path):
    """NumPy's numbers, and what Python takes for a whole number, are kept as Python's own."""
    numpy = pytest.importorskip("numpy")
    ends = []
    for whole in (int, numpy.int64, numpy.uint8, numpy.array, torch.tensor):
        p = Parameter(torch.ones(64, 48))
        of_group = int if whole in (numpy.array, torch.tensor) else whole
        opt = halfstep.CPUOffload(
            [
                {"params": [("p", p)], "heads": of_group(2)},
                {"params": [("q", Parameter(torch.ones(6, 40)))], "split": [of_group(3)] * 2},
            ],
            "muon",
            threads=whole(1),
            clip_norm=1 if whole is int else numpy.float32(1),
            minimal_size=of_group(8),
            seed=whole(3),
        )
        for group in opt.param_groups:
            group["params"][0].grad = torch.ones_like(group["params"][0])
        opt.step()
        assert type(opt.threads) is int and type(opt.minimal_size) is int
        opt.load_state_dict(saved(copy.deepcopy(opt).state_dict()))
        opt.step()
        ends.append((bits(p), opt.threads, opt.clip_norm))
    assert all(end == ends[0] for end in ends)
    for wrong in (True, numpy.bool_(True), numpy.float64(1.5), 1.5, "1"):
        with pytest.raises(ValueError, match="threads="):
            halfstep.AdamW([p], threads=wrong)


def test_a_reload_is_refused_and_changes_nothing():
    """Optimizers that live would hold structures of the old classes."""
    params, opt = make("adamw", "ecc8-int8")
    run(opt, params, 0, 2)
    with pytest.raises(ImportError, match="restart Python"):
        importlib.reload(abi)
    others, other = make("adamw", "ecc8-int8")
    run(other, others, 0, 2)
    for o, its in ((opt, params), (other, others)):
        run(o, its, 2, 3)
    same(opt, other, params, others)


def test_subclasses_of_users():
    class Mine(halfstep.AdamW):
        """A class with an option and a step of its own."""

        def __init__(self, params, scale=1.0, **kwargs):
            super().__init__(params, **kwargs)
            self.scale = scale

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(self.scale)
            return super().step(closure)

    params, others = parameters(), parameters()
    opt = Mine(params.items(), scale=2.0, lr=0.01)
    other = halfstep.AdamW(others.items(), lr=0.01)
    run(opt, params, 0, 3)
    for step in range(3):
        set_gradients(others, step)
        for p in others.values():
            p.grad.mul_(2.0)
        other.step()
    same(opt, other, params, others)
    copied = copy.deepcopy(opt)
    assert copied.scale == 2.0 and type(copied) is Mine


def test_hints_that_exclude_each_other():
    with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
        halfstep.AdamW([Parameter(torch.ones(3))], fused=True, foreach=True)


@pytest.mark.parametrize("recipe", ["ecc8-int8", "sr-int4"])
@pytest.mark.parametrize("rule", ["adamw", "lamb", "muon", "stableadamw"])
def test_any_number_of_threads_gives_the_same_bits(rule, recipe):
    shapes = {"large": (600, 700), "small": (5, 40)}
    found = []
    for threads in (1, 2, 5):
        params, opt = make(rule, recipe, shapes=shapes, lr=0.02, threads=threads, clip_norm=1.0)
        run(opt, params, 0, 2)
        found.append((everything(opt, params)[0], states(opt)))
    assert found[0] == found[1] == found[2]
