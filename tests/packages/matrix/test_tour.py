"""Does a short tour that any torch from 2.1 on must allow: steps, saving and loading, hooks,
release, names."""

import copy
import io
import subprocess
import sys

import pytest
import torch
from torch import nn

import halfstep

RECIPES = [
    ("f32", torch.float32, {}),
    ("bf16-sr/int8", torch.bfloat16, {"states": "int8"}),
    ("bf16-kahan", torch.bfloat16, {"weights": "bf16-kahan"}),
]
recipes = pytest.mark.parametrize(
    "dtype, options", [r[1:] for r in RECIPES], ids=[r[0] for r in RECIPES]
)


def model_of(dtype):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(dtype)


def loss_of(model):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(128, 64, generator=generator).to(next(model.parameters()).dtype)
    return nn.functional.mse_loss(model(x).float().squeeze(1), x[:, 0].float() * x[:, 1].float())


def train(model, opt, steps):
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = loss_of(model)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def saved(state_dict):
    """Saves to a file and reads it as torch.load() should be used."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))


def test_fp32_follows_torchs_own():
    ours, theirs = model_of(torch.float32), model_of(torch.float32)
    a = train(ours, halfstep.AdamW(ours.parameters(), lr=0.01), 20)
    b = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01), 20)
    assert a == pytest.approx(b, rel=1e-5)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-6)


@recipes
def test_it_learns(dtype, options):
    model = model_of(dtype)
    losses = train(model, halfstep.AdamW(model.parameters(), lr=0.01, **options), 60)
    assert losses[-1] < 0.3 * losses[0]


@recipes
def test_a_resumed_run_is_the_run(dtype, options):
    whole = model_of(dtype)
    halfstep.name_parameters(whole)
    opt = halfstep.AdamW(whole.parameters(), lr=0.01, seed=11, **options)
    train(whole, opt, 5)
    file = saved({"model": whole.state_dict(), "opt": opt.state_dict()})
    train(whole, opt, 5)
    resumed = model_of(dtype)
    resumed.load_state_dict(file["model"])
    opt = halfstep.AdamW(resumed.parameters(), **options)
    opt.load_state_dict(file["opt"])
    assert opt.param_groups[0]["lr"] == 0.01
    train(resumed, opt, 5)
    assert same(whole, resumed)


@recipes
def test_release_gives_the_bits_of_steps(dtype, options):
    models = [model_of(dtype) for _ in range(2)]
    for model, release in zip(models, (False, True)):
        halfstep.name_parameters(model)
        more = {"lr": 0.01, "gradient_release": release, "seed": 0, **options}
        train(model, halfstep.AdamW(model.parameters(), **more), 4)
    assert same(*models)


def test_hooks_schedulers_closures_copies():
    model = model_of(torch.bfloat16)
    opt = halfstep.AdamW(model.parameters(), lr=0.01, states="int8")
    called = []
    opt.register_step_pre_hook(lambda *_: called.append("before"))
    opt.register_step_post_hook(lambda *_: called.append("after"))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.02, total_steps=10)
    train(model, opt, 2)
    scheduler.step()
    assert called == ["before", "after"] * 2

    def closure():
        opt.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    assert opt.step(closure).item() > 0
    both = copy.deepcopy((model, opt))
    train(model, opt, 2)
    train(*both, 2)
    assert same(model, both[0])


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in halfstep.__all__
        if isinstance(getattr(halfstep, n), type)
        and issubclass(getattr(halfstep, n), halfstep.Optimizer)
        and getattr(halfstep, n).rule
    ],
)
def test_every_class_steps(name):
    model = model_of(torch.bfloat16)
    before = model[0].weight.detach().clone()
    train(model, getattr(halfstep, name)(model.parameters(), lr=0.01), 2)
    assert not torch.equal(model[0].weight, before)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_weights_of_8_bits():
    model = model_of(torch.bfloat16)
    halfstep.nn.quantize_(model, "int8-ecc4")
    opt = halfstep.optimizer("adamw/int8-ecc4/int8", model.named_parameters(), lr=0.01)
    losses = train(model, opt, 60)
    assert losses[-1] < 0.3 * losses[0]
    loaded = halfstep.nn.quantize_(model_of(torch.bfloat16), "int8-ecc4")
    loaded.load_state_dict(copy.deepcopy(model.state_dict()))
    assert loss_of(loaded) == loss_of(model)
    assert halfstep.nn.packed_state_dict(loaded)


def test_states_in_a_file(tmp_path):
    model = model_of(torch.bfloat16)
    opt = halfstep.AdamW(model.parameters(), lr=0.01, states="int8", store=tmp_path / "run.states")
    losses = train(model, opt, 60)
    assert losses[-1] < 0.3 * losses[0]


WATCHED = """
import sys

import torch

# With the first optimizer torch makes a folder for its compiler.
torch.optim.SGD([torch.ones(1)], lr=0.1)
found = []


def hook(event, args):
    if event.startswith(("socket.", "urllib.", "http.", "subprocess.", "os.mkdir")):
        found.append((event, *args))
    elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        found.append((event, *args))


sys.addaudithook(hook)
import halfstep
from halfstep import __main__

p = torch.nn.Parameter(torch.ones(64, 64))
p.grad = torch.ones(64, 64)
opt = halfstep.AdamW([p], states="int8")
opt.step()
opt.load_state_dict(opt.state_dict())
for words in (["info"], ["plan", "7B"], ["verify"]):
    __main__.main(words)
assert not found, found
"""


def test_nothing_is_sent_or_written():
    """Imports, steps, plans and verifies under a hook that sees sockets, processes and files."""
    subprocess.run([sys.executable, "-I", "-B", "-c", WATCHED], check=True)
