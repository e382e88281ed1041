"""State dictionaries that other packages saved: decoded as the package decodes them, and training goes on."""
import copy
import warnings

import pytest
import torch

import halfstep
from conftest import bits, set_gradients

SHAPES = {"body": (96, 128), "ragged": (67, 71), "bias": (33,)}


def params_of(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def trained(cls, steps=4, dtype=torch.float32, **options):
    params = params_of(dtype=dtype)
    opt = cls(list(params.values()), lr=1e-3, **options)
    for step in range(steps):
        set_gradients(params, step)
        opt.step()
    return params, opt


def go_on(params, opt, ours, steps=3):
    """The most that weights differ after further steps of both, in units of the learning rate."""
    mine = {name: torch.nn.Parameter(p.detach().clone()) for name, p in params.items()}
    new = ours(list(mine.items()))
    new.load_state_dict(copy.deepcopy(opt.state_dict()))
    for step in range(4, 4 + steps):
        set_gradients(params, step)
        set_gradients(mine, step)
        opt.step()
        new.step()
    return max(float((mine[n] - params[n]).detach().abs().max()) for n in params) / 1e-3


def bnb_values(state, i):
    import bitsandbytes.functional as F
    if state[f"state{i}"].dtype != torch.uint8:
        return state[f"state{i}"]
    return F.dequantize_blockwise(state[f"state{i}"], absmax=state[f"absmax{i}"], code=state[f"qmap{i}"], blocksize=256)


@pytest.mark.parametrize("name, rule", [("AdamW8bit", "AdamW"), ("AdamW32bit", "AdamW"), ("Adam8bit", "Adam"), ("PagedAdamW8bit", "AdamW"), ("Lion8bit", "Lion")])
def test_bitsandbytes(name, rule):
    optim = pytest.importorskip("bitsandbytes").optim
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        params, opt = trained(getattr(optim, name))
    assert name == "AdamW32bit" or any(v.dtype == torch.uint8 for v in opt.state[params["body"]].values() if isinstance(v, torch.Tensor))
    mine = {n: torch.nn.Parameter(p.detach().clone()) for n, p in params.items()}
    new = getattr(halfstep, rule)(list(mine.items()), states="f32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new.load_state_dict(copy.deepcopy(opt.state_dict()))
    for n, p in params.items():
        for i, key in enumerate(("exp_avg", "exp_avg_sq") if rule != "Lion" else ("exp_avg",), 1):
            assert bits(new.read_state(mine[n], key)) == bits(bnb_values(opt.state[p], i)), (n, key)
        assert new.state[mine[n]]["step"] == 4
    assert new.param_groups[0]["lr"] == 1e-3 and "t_alpha" not in new.param_groups[0]
    moved = go_on(params, opt, lambda named: getattr(halfstep, rule)(named, states="f32"))
    # 32 bits: rounding; codes of 8 bits: what theirs lose in three steps; Lion: a few signs
    assert moved < {"AdamW32bit": 0.01, "Lion8bit": 6.1}.get(name, 3.0)


def test_what_bitsandbytes_has_alone():
    optim = pytest.importorskip("bitsandbytes").optim
    params, opt = trained(optim.AdEMAMix8bit)
    with pytest.raises(ValueError, match="states of bitsandbytes can be loaded by adam, adamw, lion, lamb, not by sgd"):
        halfstep.SGD(list(params.values())).load_state_dict(opt.state_dict())
    params, opt = trained(optim.AdamW32bit)
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["__bnb_optimizer_quant_state__"]["gnorm_vec"] = torch.ones(100)
    with pytest.warns(UserWarning, match=r"gnorm_vec \(percentile clipping\) cannot be carried over"):
        halfstep.AdamW(list(params.values())).load_state_dict(saved)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchao(name, monkeypatch):
    torchao = pytest.importorskip("torchao.optim")
    import torchao.optim.adam as adam
    # compiled steps take minutes; eager ones are the same
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(adam.torch, "compile", lambda function, **_: function)
    params, opt = trained(getattr(torchao, name))
    mine = {n: torch.nn.Parameter(p.detach().clone()) for n, p in params.items()}
    new = halfstep.AdamW(list(mine.items()), states="f32")
    new.load_state_dict(opt.state_dict())
    quantized = 0
    for n, p in params.items():
        for key in ("exp_avg", "exp_avg_sq"):
            there = opt.state[p][key]
            if hasattr(there, "codes"):
                quantized += 1
                there = there.dequantize()
            assert bits(new.read_state(mine[n], key)) == bits(there.float()), (n, key)
    assert quantized
    coded = halfstep.AdamW(list(mine.items()), states="int8")
    coded.load_state_dict(opt.state_dict())
    wanted = new.read_state(mine["body"], "exp_avg")
    assert float((coded.read_state(mine["body"], "exp_avg") - wanted).abs().max() / wanted.abs().max()) < 0.02
