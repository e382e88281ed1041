"""The grid of second moments in block codes, as a number of state[p] (docs/formats.md)."""

import copy
from ctypes import byref

import pytest
import torch
from conftest import bits, set_gradients

import halfstep
from halfstep._library import abi


def has_grid(row):
    info = abi.FormatInfo.new()
    abi.check(abi.lib.halfstep_get_format_info(row, byref(info)))
    return bool(info.grid)


FORMATS = [f.name for f in abi.formats.values() if has_grid(f.row)]
KEY = "exp_avg_sq.grid"


def made(states, **options):
    p = torch.nn.Parameter(torch.linspace(-1, 1, 8 * 256).reshape(8, 256).to(torch.bfloat16))
    return p, halfstep.AdamW([("p", p)], states=states, seed=3, betas=(0.9, 0.99), **options)


def steps(p, opt, first, last):
    for step in range(first, last):
        set_gradients({"p": p}, step)
        opt.step()


def expected(n, beta=0.99):
    grid = torch.tensor(1.0)
    for _ in range(n):
        grid = grid * torch.tensor(beta)
        while grid < 0.25:
            grid = grid * 4
    return float(grid)


@pytest.mark.parametrize("states", FORMATS)
def test_it_follows_beta2_and_resumes(states):
    p, opt = made(states)
    steps(p, opt, 0, 150)
    file = copy.deepcopy(opt.state_dict())
    assert file["state"][0][KEY].dtype == torch.float64 and file["state"][0][
        KEY
    ].item() == expected(150) == opt.scalar(p, KEY)
    q, other = made(states)
    with torch.no_grad():
        q.copy_(p)
    other.load_state_dict(file)
    assert torch.equal(opt.read_state(p, "exp_avg_sq"), other.read_state(q, "exp_avg_sq"))
    steps(p, opt, 150, 153)
    steps(q, other, 150, 153)
    assert bits(p) == bits(q) and other.scalar(q, KEY) == expected(153)


def test_only_formats_that_decay_have_one():
    for states in ("f32", "bf16-sr", "dyn8", "dyn4"):
        p, opt = made(states)
        steps(p, opt, 0, 2)
        assert KEY not in opt.state_dict()["state"][0]


def test_a_state_without_it_is_refused():
    p, opt = made("int8")
    steps(p, opt, 0, 30)
    file = copy.deepcopy(opt.state_dict())
    del file["state"][0][KEY]
    q, other = made("int8")
    with pytest.raises(ValueError, match=f"has no state '{KEY}', which adamw/.*/int8 needs"):
        other.load_state_dict(file)
    assert not other.state


@pytest.mark.parametrize("bad", [0.0, 0.2, -0.5, 1.5, float("nan"), float("inf"), 0.3, "x", None])
def test_what_no_step_leaves_is_refused(bad):
    p, opt = made("int8")
    steps(p, opt, 0, 3)
    file = copy.deepcopy(opt.state_dict())
    file["state"][0][KEY] = (
        torch.tensor(bad, dtype=torch.float64) if isinstance(bad, float) else bad
    )
    before = copy.deepcopy(opt.state_dict()["state"][0][KEY])
    with pytest.raises(ValueError, match="grid"):
        opt.load_state_dict(file)
    assert torch.equal(opt.state_dict()["state"][0][KEY], before)


@pytest.mark.parametrize("there", ["f32", "int6", "int4", "bf16-sr", "fp8"])
def test_conversions_decode_by_it(there):
    p, opt = made("int8")
    steps(p, opt, 0, 40)
    before, file = opt.read_state(p, "exp_avg_sq"), copy.deepcopy(opt.state_dict())
    q, other = made(there)
    with pytest.warns(UserWarning, match="converted"):
        other.load_state_dict(file)
    after = other.read_state(q, "exp_avg_sq")
    assert (after / before - 1).abs().mean() < {"f32": 1e-6, "bf16-sr": 3e-3}.get(there, 0.15)
    assert (KEY in other.state_dict()["state"][0]) == (there in FORMATS)
    assert torch.equal(other.read_state(q, "exp_avg_sq"), after)


def test_safetensors(tmp_path):
    pytest.importorskip("safetensors")
    p, opt = made("int4")
    steps(p, opt, 0, 20)
    opt.save_safetensors(tmp_path / "file")
    q, other = made("int4")
    other.load_safetensors(tmp_path / "file")
    assert other.scalar(q, KEY) == expected(20)
    assert torch.equal(opt.read_state(p, "exp_avg_sq"), other.read_state(q, "exp_avg_sq"))
