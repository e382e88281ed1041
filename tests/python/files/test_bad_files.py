"""Bad files raise a Python exception and leave the optimizer as it was. Also reads tensors
that do not exist."""

import copy
import math

import pytest
import torch
from conftest import everything, run, saved, set_gradients, twins, weights_of
from test_errors import sound

import halfstep
from halfstep._states import layout


def altered(change):
    def make(file):
        file = copy.deepcopy(file)
        change(file)
        return file

    return make


def first_state(key, value):
    def change(file):
        file["state"][0][key] = value

    return altered(change)


BAD_FILES = {
    "another number of groups": altered(lambda f: f["param_groups"].append({"params": [99]})),
    "another number of parameters": altered(lambda f: f["param_groups"][0]["params"].pop()),
    "no groups": altered(lambda f: f.pop("param_groups")),
    "no states": altered(lambda f: f.pop("state")),
    "a short state": first_state("exp_avg.codes", torch.zeros(3, dtype=torch.int8)),
    "a long state": first_state("exp_avg.codes", torch.zeros(25, 96, dtype=torch.int8)),
    "a state of another dtype": first_state(
        "exp_avg.codes", torch.zeros(24, 96, dtype=torch.float64)
    ),
    "scales of another shape": first_state(
        "exp_avg.scale", torch.zeros(24, 4, dtype=torch.bfloat16)
    ),
    "a number for a state": first_state("exp_avg.codes", 3.0),
    "a negative learning rate": altered(lambda f: f["param_groups"][0].update(lr=-1.0)),
    "betas out of bounds": altered(lambda f: f["param_groups"][0].update(betas=(0.9, 1.5))),
    "an unknown recipe": first_state("recipe", torch.tensor(99)),
    "another rule": first_state("recipe", torch.tensor(layout.pack_recipe("lion/bf16-sr/bf16-sr"))),
    "a negative step": first_state("step", torch.tensor(-3.0)),
    "not even a dictionary": lambda file: [1, 2],
}


@pytest.mark.parametrize("kind", BAD_FILES)
@pytest.mark.parametrize("warm", [0, 2])
def test_bad_files(kind, warm):
    """A refused file changes nothing: the optimizer goes on as if nobody had tried."""
    _, writer = sound(2)
    bad = BAD_FILES[kind](writer.state_dict())
    fresh, opt = sound(warm)
    before = everything(opt, fresh)
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        opt.load_state_dict(bad)
        set_gradients(fresh, warm)
        opt.step()
    assert weights_of(fresh) == before[0]
    assert everything(opt, fresh) == before, "refused at the step only"
    run(opt, fresh, warm, warm + 1)


def test_truncated_and_foreign_safetensors(tmp_path):
    params, opt = sound(2)
    path = tmp_path / "o.safetensors"
    opt.save_safetensors(path)
    whole = path.read_bytes()
    before = everything(opt, params)
    for cut in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(Exception):
            opt.load_safetensors(path)
        assert everything(opt, params) == before
    path.write_bytes(whole)
    other = halfstep.Lion(list(twins(params).items()))
    with pytest.raises(ValueError, match="adamw"):
        other.load_safetensors(path)
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, path)
    with pytest.raises(ValueError):
        opt.load_safetensors(path)
    with pytest.raises((FileNotFoundError, OSError)):
        opt.load_safetensors(tmp_path / "nowhere.safetensors")
    with pytest.raises((FileNotFoundError, OSError)):
        opt.save_safetensors(tmp_path / "no" / "where.safetensors")
    assert everything(opt, params) == before


def test_reading_what_is_not_there():
    params, opt = sound(1)
    stranger = torch.nn.Parameter(torch.ones(3))
    for call in (
        lambda: opt.read_state(stranger, "exp_avg"),
        lambda: opt.recipe(stranger),
        lambda: opt.write_state(stranger, "exp_avg", torch.ones(3)),
        lambda: opt.scalar(stranger, "x"),
        lambda: opt.read_state(params["scale"], "no_such"),
        lambda: opt.scalar(params["scale"], "no_such"),
        lambda: opt.write_weight(params["body.weight"], torch.ones(5)),
        lambda: opt.write_state(params["body.weight"], "exp_avg", torch.full((24, 96), math.nan)),
        lambda: opt.write_state(params["body.weight"], "exp_avg_sq", torch.full((24, 96), -1.0)),
    ):
        before = everything(opt, params)
        with pytest.raises((ValueError, KeyError)):
            call()
        assert everything(opt, params) == before


def test_files_that_torch_saves_hold_nothing_odd():
    """Files hold only what weights_only loading admits, even with every option set."""
    _, opt = sound(1, clip_norm=1.0, scan="per-tensor", generator="philox7", seed=3, fused=True)
    saved(opt.state_dict())
