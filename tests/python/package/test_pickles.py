"""Tests which names of this package a pickle holds. They are a file format: public names of public
modules."""

import importlib
import io
import os
import pickle
import pickletools
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import saved
from torch import nn

import halfstep
from halfstep.nn import quantize_

SOURCE = Path(os.environ.get("HALFSTEP_SOURCE", Path(__file__).resolve().parents[3]))
#: the functions that docs/python.md promises
FUNCTIONS = {("halfstep.nn", "restore_weight"), ("halfstep.streaming", "restore_hosted")}
OPTIMIZERS = [name for name in halfstep.__all__ if getattr(getattr(halfstep, name), "rule", None)]
#: classes of each module of halfstep.compat -> what their constructors are given
COMPAT = {
    "adamw_bfloat16.AdamW_BF16": {},
    "came_pytorch.CAME": {"lr": 1e-3},
    "dion.NorMuon": {"lr": 1e-3},
    "flashoptim.FlashAdamW": {"lr": 1e-3},
    "lamb16.Lamb16": {},
    "muon.SingleDeviceMuon": {},
    "optimi.AdamW": {"lr": 1e-3},
    "prodigyopt.Prodigy": {},
    "torchao.AdamW8bit": {},
    "torchao.CPUOffloadOptimizer": {"optimizer_class": torch.optim.AdamW},
    "torchastic.AdamW": {"lr": 1e-3},
    "transformers.Adafactor": {},
}


def layer():
    return nn.Linear(64, 64, dtype=torch.bfloat16)


def stepped(opt, params):
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    return opt


def optimizer(make, **options):
    params = list(layer().parameters())
    return stepped(make(params, **options), params)


def of_packed_weights():
    model = quantize_(layer())
    opt = halfstep.AdamW(model.named_parameters(), lr=1e-3, weights="int8-ecc4", states="int8")
    model(torch.ones(1, 64).bfloat16()).sum().backward()
    opt.step()
    return model, opt


def sums():
    model = layer()
    found = halfstep.GradientAccumulator(model.named_parameters())
    model(torch.ones(1, 64).bfloat16()).sum().backward()
    return found


def hosted(cls):
    return optimizer(cls, recipe="adamw/bf16-sr/int8", lr=1e-3)


def average():
    model = layer()
    ema = halfstep.EMA(model, weights="bf16-ecc8")
    ema.update_parameters(model)
    return ema


def of_compat(name):
    module, cls = name.split(".")
    module = importlib.import_module(f"halfstep.compat.{module}")
    params = [nn.Parameter(torch.ones(64, 64).bfloat16())]
    return stepped(getattr(module, cls)(params, **COMPAT[name]), params)


KINDS = {
    **{name: lambda name=name: optimizer(getattr(halfstep, name)) for name in OPTIMIZERS},
    **{name: lambda name=name: of_compat(name) for name in COMPAT},
    "8-bit weights": of_packed_weights,
    "a sum of gradients": sums,
    "an average": average,
    "CPUOffload": lambda: hosted(halfstep.CPUOffload),
    "StateStreaming": lambda: hosted(halfstep.StateStreaming),
}


def named(data):
    """Returns the names of this package in a pickle of protocol 2, as (module, name)."""
    found = {arg for op, arg, _ in pickletools.genops(data) if op.name == "GLOBAL"}
    return {tuple(name.split(" ")) for name in found if name.startswith("halfstep")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickle_has_public_names(kind):
    made = KINDS[kind]()
    data = pickle.dumps(made, 2)
    names = named(data)
    assert names
    for module, name in names:
        assert not any(part.startswith("_") for part in (*module.split("."), name)), (module, name)
        found = getattr(importlib.import_module(module), name)
        assert isinstance(found, type) or (module, name) in FUNCTIONS
    again = pickle.loads(data)
    assert type(again) is type(made) and named(pickle.dumps(again, 2)) == names


def test_files_of_state_dictionaries_have_one_name():
    """torch.load(weights_only=True) takes it."""
    model, opt = of_packed_weights()
    ema = average()
    for state, names in (
        (model.state_dict(), {("halfstep.nn", "restore_weight")}),
        (opt.state_dict(), set()),
        (ema.state_dict(), set()),
        (sums().state_dict(), set()),
    ):
        file = io.BytesIO()
        torch.save(state, file)
        with zipfile.ZipFile(file) as packed:
            (pickled,) = (name for name in packed.namelist() if name.endswith("data.pkl"))
            assert named(packed.read(pickled)) == names
        again = saved(state)
        assert list(again) == list(state)
    loaded = saved(model.state_dict())["weight"]
    assert type(loaded) is halfstep.nn.Int8Weight and torch.equal(
        loaded.packed, model.weight.packed
    )


def test_the_manual_promises_these_names():
    text = (SOURCE / "docs/python.md").read_text(encoding="utf-8")
    assert all(f"`{module}.{name}`" in text for module, name in FUNCTIONS)
