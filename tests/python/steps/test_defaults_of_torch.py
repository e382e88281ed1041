"""torch.set_default_device() and torch.set_default_dtype() must not affect this package, which
always gives device and dtype itself."""

import ast
import glob
import os

import pytest
import torch
from conftest import RECIPES, bits, plain, saved
from torch import nn

import halfstep
from halfstep._library import abi
from halfstep.compat import flashoptim, lamb16, optimi, torchao

ROOT = os.path.dirname(halfstep.__file__)
#: functions of torch that make a tensor on the default device, unless they are told another
FACTORIES = {
    "arange",
    "as_tensor",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
}


def calls():
    for path in glob.glob(os.path.join(ROOT, "**", "*.py"), recursive=True):
        with open(path, encoding="utf-8") as file:
            for node in ast.walk(ast.parse(file.read())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in FACTORIES
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id == "torch"
                ):
                    yield os.path.relpath(path, ROOT), node


def test_every_tensor_is_made_on_a_device_that_is_named():
    found = list(calls())
    assert len(found) > 30
    for path, node in found:
        given = {k.arg for k in node.keywords}
        assert {
            "device",
            "dtype",
        } <= given, f"{path}:{node.lineno}: torch.{node.func.attr}() without device= or dtype="


def training(recipe, device, default, release):
    """Trains under other defaults, from construction to loading. Returns the bits."""
    rule, dtype, formats = recipe
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 32)).to(dtype)
    batches = [torch.randn(8, 64).to(dtype) for _ in range(8)]
    first, state = model[0].weight, abi.rules[rule].states[0].name
    try:
        torch.set_default_dtype(default)
        torch.set_default_device(device)
        opt = getattr(halfstep, abi.rules[rule].label)(
            model.named_parameters(), lr=1e-3, seed=1, gradient_release=release, **formats
        )
        ema = halfstep.EMA(
            model, 0.9, seed=1, weights="f32" if dtype == torch.float32 else "bf16-kahan"
        )
        accumulator = halfstep.GradientAccumulator(model, seed=1)
        for i, x in enumerate(batches):
            if i == 2 and not release:
                accumulator.attach()
                for _ in range(2):
                    model(x).float().square().mean().backward()
                accumulator.reassign()
                accumulator.load_state_dict(accumulator.state_dict())
                accumulator.detach()
            model(x).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
            ema.update_parameters(model, opt)
            if i == 3:
                opt.load_state_dict(saved(opt.state_dict()))
            if i == 4:
                opt.load_state_dict(opt.state_dict())
                opt.write_weight(first, opt.read_weight(first))
                opt.write_state(first, state, opt.read_state(first, state))
                assert repr(opt) and opt.memory() and opt.torch_state_dict()
                assert ema.full_state_dict() and halfstep.plan(model)
                assert halfstep.full_precision_state_dict(model, opt)
        if rule == "schedulefree":
            opt.eval()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    return [bits(t) for t in (*model.parameters(), *ema.module.parameters())], plain(
        opt.state_dict()["state"]
    )


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize(
    "rule, recipe",
    [
        ("adamw", "ecc8-int8"),
        ("muon", "sr-int4"),
        ("schedulefree", "kahan"),
        ("lamb", "f32"),
        ("ranger", "sr-int4"),
    ],
)
def test_training_under_other_defaults(rule, recipe, release):
    recipe = rule, *RECIPES[recipe]
    want = training(recipe, None, torch.float32, release)
    for device, default in (
        ("meta", torch.float32),
        (None, torch.bfloat16),
        ("meta", torch.float64),
    ):
        assert training(recipe, device, default, release) == want, (device, default)


def test_conversions_and_other_packages_under_another_device():
    model = nn.Linear(64, 64).bfloat16()
    states = torch.optim.AdamW(model.parameters())
    model.weight.grad, model.bias.grad = torch.ones(64, 64).bfloat16(), torch.ones(64).bfloat16()
    states.step()
    values = torch.randn(8, 32)
    torch.set_default_device("meta")
    try:
        for opt in (
            halfstep.AdamW(model.parameters(), states="int8"),
            halfstep.AdamW(model.parameters(), weights="bf16-kahan"),
        ):
            opt.load_state_dict(states.state_dict())  # plain states are converted
            opt.step()
            opt.param_groups[0]["states"] = "int4"
            opt.step()
        opts = [
            torchao.AdamW8bit(model.parameters()),
            flashoptim.FlashAdamW(model.parameters()),
            optimi.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=True),
            lamb16.Lamb16(model.parameters()),
        ]
        for opt in opts:
            opt.step()
        lamb16.log_lamb_rs(
            opts[-1],
            type("Writer", (), {"add_histogram": lambda self, tag, found, at: bits(found)})(),
            0,
        )
        assert (
            flashoptim.reconstruct_fp32_param(
                values.bfloat16(), flashoptim.compute_ecc_bits(values, values.bfloat16())
            ).device.type
            == "cpu"
        )
    finally:
        torch.set_default_device(None)
    assert all(
        v.device.type == "cpu" for opt in opts for s in opt.state.values() for v in s.values()
    )
