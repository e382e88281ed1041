"""Tests what trainers pass and ask for beside parameters and gradients: keys of groups, sequences,
frozen parameters, wrappers, names of classes."""

import collections.abc
import os
import subprocess
import sys

import pytest
import torch
from conftest import bits, parameters, run, saved, set_gradients
from torch.nn import Parameter

import halfstep
from halfstep.compat import came_pytorch, flashoptim, lamb16, optimi, prodigyopt, torchao


def weight(*shape):
    return Parameter(torch.ones(shape or (8, 8)))


# ---- Keys of groups ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    (
        "weight_decay_scale lr_scale lr_mult wd_mult decay_mult weight_decay_mult lr_multiplier wd"
        " mom layer_decay is_last_layer initial_weight_decay momentum_scale eps_root beta1 name"
        " layer_id decoupled weight_lr_power_scale use_muon_extra max_grad_norm weights_name"
        " states_dtype clip_norm_scale betas_schedule"
    ).split(),
)
def test_keys_of_trainers_are_kept(key):
    for cls in (halfstep.AdamW, halfstep.SGD, halfstep.Muon, halfstep.ScheduleFree):
        opt = cls([{"params": [weight()], key: 0.5}])
        opt.add_param_group({"params": [weight()], key: 0.25})
        for groups in (opt.param_groups, opt.state_dict()["param_groups"]):
            assert [group[key] for group in groups] == [0.5, 0.25]


@pytest.mark.parametrize(
    "key, option",
    [
        *((slip, "weight_decay") for slip in ("weight_deacy", "wieght_decay", "weightdecay")),
        *((slip, "weight_decay") for slip in ("weight-decay", "Weight_Decay")),
        ("beta", "betas"),
        ("state", "states"),
        ("maximise", "maximize"),
        ("cautiuos", "cautious"),
    ],
)
def test_slips_are_refused(key, option):
    with pytest.raises(ValueError, match=f"{key!r}.*{option!r} is one"):
        halfstep.AdamW([{"params": [weight()], key: 0.1}])


@pytest.mark.parametrize(
    "key, value",
    [
        ("algorithm", "adafactor"),
        ("algorithm", "dion2"),
        ("optimizer", "Shampoo"),
    ],
)
def test_groups_of_another_algorithm_are_refused_by_muon(key, value):
    wrong = {"params": [weight()], key: value}
    words = f"{key!r}: {value!r}, and Muon steps .*Muon or AdamW or Lion only.*optimizer of that"
    with pytest.raises(ValueError, match=words):
        halfstep.Muon([{"params": [weight()], "lr": 0.02}, wrong])
    opt = halfstep.Muon([weight()])
    with pytest.raises(ValueError, match=words):
        opt.add_param_group(wrong)
    assert len(opt.param_groups) == 1
    file = opt.state_dict()
    file["param_groups"][0][key] = value
    with pytest.raises(ValueError, match=f"{key!r}"):
        opt.load_state_dict(file)


def test_groups_of_this_algorithm_are_taken():
    for key, value in (
        ("use_muon", True),
        ("algorithm", "muon"),
        ("algorithm", "Muon"),
        ("use_fallback", False),
    ):
        assert halfstep.Muon([{"params": [weight()], key: value}]).param_groups[0][key] == value
    halfstep.AdamW([{"params": [weight()], "use_muon": False, "algorithm": "adamw"}])
    for key, value in (("use_muon", True), ("algorithm", "muon")):
        with pytest.raises(
            ValueError, match=f"{key!r}: {value!r}, and AdamW steps groups by AdamW only"
        ):
            halfstep.AdamW([{"params": [weight()], key: value}])
    halfstep.Lion([{"params": [weight()], "use_muon": False}])


# ---- Sequences -----------------------------------------------------------------------------------


class Listed(collections.abc.Sequence):
    """A sequence of its own class, as configurations have them."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


@pytest.mark.parametrize(
    "kind",
    [
        Listed,
        lambda *a: list(a),
        lambda *a: torch.tensor(a, dtype=torch.float64),
        lambda *a: __import__("numpy").array(a),
    ],
)
def test_betas_of_any_sequence(kind):
    for cls, more in (
        (halfstep.AdamW, {}),
        (halfstep.Adan, {}),
        (halfstep.Muon, {}),
        (prodigyopt.Prodigy, {}),
        (lamb16.Lamb16, {}),
        (optimi.AdamW, {"lr": 0.1}),
        (flashoptim.FlashLion, {"master_weight_bits": None}),
        (torchao.AdamW8bit, {}),
    ):
        betas = (0.5, 0.75, 0.25) if cls is halfstep.Adan else (0.5, 0.75)
        params, others = (parameters(shapes={"w": (8, 64)}) for _ in range(2))
        opt, other = (
            torch.manual_seed(0) and cls(ps.values(), betas=given, **more)
            for ps, given in ((params, kind(*betas)), (others, betas))
        )
        if "betas" in opt.param_groups[0]:
            opt.add_param_group({"params": [weight()], "betas": kind(*betas)})
            assert all(isinstance(g["betas"], (tuple, list)) for g in opt.param_groups)
            # as a scheduler may put it
            opt.param_groups[0]["betas"] = kind(*opt.param_groups[0]["betas"])
        run(opt, params, 0, 2)
        run(other, others, 0, 2)
        saved(opt.state_dict())  # torch.load(weights_only=True) knows what is in there
        assert bits(params["w"]) == bits(others["w"])


def test_other_sequences():
    for make in (
        lambda s: halfstep.Adafactor([weight()], eps=s(None, 1e-3)),
        lambda s: halfstep.Muon([weight()], ns_coefficients=s(3.4, -4.7, 2.0)),
        lambda s: came_pytorch.CAME([weight()], lr=1e-3, eps=s(1e-30, 1e-16)),
    ):
        opt = make(Listed)
        p = opt.param_groups[0]["params"][0]
        p.grad = torch.ones_like(p)
        opt.step()
        saved(opt.state_dict())
    for wrong in ("0.9,0.99", 0.9, {0: 0.9}, torch.tensor(0.9)):
        with pytest.raises(TypeError, match="not a sequence of numbers"):
            halfstep.AdamW([weight()], betas=wrong)


# ---- Frozen parameters ---------------------------------------------------------------------------


class Quantized(torch.Tensor):
    """A tensor of a class that nothing here knows."""


FROZEN = {
    "uint8": lambda: torch.ones(8, 8, dtype=torch.uint8),
    "int8": lambda: torch.ones(8, 8, dtype=torch.int8),
    "bool": lambda: torch.ones(8, dtype=torch.bool),
    "float8": lambda: torch.ones(8, 8).to(torch.float8_e4m3fn),
    "float64": lambda: torch.ones(8, 8, dtype=torch.float64),
    "complex": lambda: torch.ones(8, dtype=torch.complex64),
    "quantized class": lambda: torch.ones(8, 8).as_subclass(Quantized),
    "expanded": lambda: torch.ones(8, 1).expand(8, 8),
    "meta": lambda: torch.ones(8, 8, device="meta"),
    "sparse": lambda: torch.ones(8, 8).to_sparse(),
    "half": lambda: torch.ones(8, 8).half(),
}


@pytest.mark.parametrize("kind", FROZEN)
def test_frozen_parameters_of_any_kind(kind, tmp_path):
    frozen = Parameter(FROZEN[kind](), requires_grad=False)
    live = Parameter(torch.ones(8, 64).bfloat16())
    opt = halfstep.AdamW(
        [("frozen", frozen), ("live", live)],
        states="int8",
        weights="bf16-kahan",
        gradient_release=True,
        seed=0,
    )
    live.float().sum().backward()
    opt.step()
    assert frozen not in opt.state and opt.state[live]["step"] == 1
    assert "bf16-kahan" in repr(opt) and opt.fell_back() == []
    assert opt.memory()["weights"] == 8 * 64 * 2
    file = opt.state_dict()
    opt.load_state_dict(file if kind in ("sparse", "quantized class") else saved(file))
    opt.add_param_group({"params": [("other", Parameter(FROZEN[kind](), requires_grad=False))]})
    live.float().sum().backward()
    opt.step()
    assert opt.state[live]["step"] == 2
    halfstep.GradientAccumulator([("frozen", frozen), ("live", live)])


def test_a_parameter_is_judged_when_it_trains():
    p, live = Parameter(torch.ones(8, dtype=torch.float64), requires_grad=False), weight()
    opt = halfstep.AdamW([("p", p), ("live", live)])
    p.requires_grad_(True)
    p.grad, live.grad = torch.ones_like(p), torch.ones_like(live)
    before = bits(live)
    with pytest.raises(TypeError, match="'p' is torch.float64"):
        opt.step()
    assert bits(live) == before


class Base(torch.nn.Module):
    """A frozen base of whole numbers, float64 and fp8, and a layer that trains."""

    def __init__(self):
        super().__init__()
        for name, value in (
            ("codes", torch.zeros(8, 8, dtype=torch.uint8)),
            ("wide", torch.zeros(3, dtype=torch.float64)),
            ("small", torch.zeros(4).to(torch.float8_e4m3fn)),
        ):
            self.register_parameter(name, Parameter(value, requires_grad=False))
        self.layer = torch.nn.Linear(8, 8).bfloat16()


def test_averages_of_models_with_frozen_parameters_of_any_dtype():
    model = Base()
    ema = halfstep.EMA(model, 0.5, weights="bf16-kahan", seed=0)
    with torch.no_grad():
        model.codes.fill_(7)
        model.wide.fill_(1e-300)
    for _ in range(2):
        ema.update_parameters(model)
    ema.module.requires_grad_(False)  # as who only evaluates with it does
    ema.update_parameters(model)
    assert torch.equal(ema.module.codes, model.codes) and torch.equal(ema.module.wide, model.wide)
    assert ema.module.small.dtype == torch.float8_e4m3fn
    other = halfstep.EMA(Base(), 0.5, weights="bf16-kahan")
    other.load_state_dict(saved(ema.state_dict()))
    assert (
        torch.equal(other.module.codes, model.codes)
        and other.full_state_dict()["codes"].dtype == torch.uint8
    )
    opt = halfstep.AdamW(model.named_parameters(), weights="bf16-kahan")
    set_gradients({"w": model.layer.weight}, 0)
    opt.step()
    full = halfstep.full_precision_state_dict(model, opt)
    assert full["codes"].dtype == torch.uint8 and full["layer.weight"].dtype == torch.float32
    bad = Base()
    bad.wide.requires_grad_(True)
    with pytest.raises(TypeError, match="'wide' is torch.float64"):
        halfstep.EMA(bad)


# ---- Wrappers, names, the end --------------------------------------------------------------------


class Wrapped(torch.optim.Optimizer):
    """As Accelerate's AcceleratedOptimizer is: torch's by class, with the real one inside."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)


def test_optimizers_inside_of_wrappers():
    model = torch.nn.Linear(8, 64).bfloat16()
    opt = halfstep.AdamW(model.named_parameters(), weights="bf16-kahan", lr=1e-5)
    run(opt, model, 0, 1)
    wrapped = Wrapped(Wrapped(opt))
    emas = [halfstep.EMA(model, 0.5, weights="bf16-kahan", seed=0) for _ in range(2)]
    for ema, one in zip(emas, (opt, [wrapped])):
        ema.update_parameters(model, one)
    assert bits(emas[0].extra.weight) == bits(emas[1].extra.weight) and emas[1].extra.weight.any()
    full = halfstep.full_precision_state_dict(model, wrapped)
    assert torch.equal(full["weight"], opt.read_weight(model.weight)) and not torch.equal(
        full["weight"], model.weight.float()
    )
    with pytest.raises(TypeError, match="leave it out"):
        emas[0].update_parameters(model, Wrapped(torch.optim.AdamW(model.parameters())))
    small = lamb16.Lamb16(model.parameters())
    small.step()
    seen = []
    lamb16.log_lamb_rs(
        Wrapped(small),
        type("Writer", (), {"add_histogram": lambda self, tag, values, at: seen.append(tag)})(),
        0,
    )
    assert len(seen) == 3


def test_names_that_trainers_do_not_catch():
    """sd-scripts and others treat any name with such an ending as another package's, before they
    look at the path."""
    aliases = {
        halfstep.ScheduleFree: ("halfstep", "ScheduleFreeAdamW"),
        torchao.Adam8bit: ("halfstep.compat.torchao", "AdamInt8"),
        torchao.AdamW8bit: ("halfstep.compat.torchao", "AdamWInt8"),
    }
    caught = {
        cls
        for module in (halfstep, torchao)
        for name, cls in vars(module).items()
        if isinstance(cls, type)
        and issubclass(cls, torch.optim.Optimizer)
        and name.lower().endswith(("8bit", "schedulefree"))
    }
    assert caught == set(aliases)
    for cls, (module, name) in aliases.items():
        assert getattr(sys.modules[module], name) is cls and not name.lower().endswith(
            ("8bit", "schedulefree")
        )


def test_a_program_ends_without_a_word():
    """Creates what lives until the end: optimizers that loaded block states, averages, sums, lists
    of functions, threads."""
    program = """
import io, torch, halfstep
from halfstep.compat import optimi
p = torch.nn.Parameter(torch.randn(64, 64))
for states in ("f32", "int8", "int6", "int4", "fp8"):
    opt = halfstep.AdamW([("p", p)], states=states)
    p.grad = torch.ones_like(p)
    opt.step()
    opt.load_state_dict(opt.state_dict())
    opt.step()
model = torch.nn.Linear(64, 64).bfloat16()
ema = halfstep.EMA(model, weights="bf16-kahan")
ema.update_parameters(model)
ema.load_state_dict(ema.state_dict())
accumulator = halfstep.GradientAccumulator(model).attach()
model(torch.ones(2, 64).bfloat16()).sum().backward()
offload = halfstep.CPUOffload(model.named_parameters(), "adamw/bf16-sr/int8", gradient_release=True)
optimi.sgd(
    [torch.ones(4)], [torch.ones(4)], [torch.ones(4)], None, lr=0.5, momentum=0.9, weight_decay=0.0,
    dampening=False, decouple_wd=True, decouple_lr=False, max_lr=0.5, kahan_sum=False,
)
cycle = [opt, ema, accumulator, offload]
cycle.append(cycle)
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ)
    )
    assert (found.returncode, found.stderr, found.stdout) == (0, "", "")
