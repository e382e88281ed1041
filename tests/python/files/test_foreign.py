"""Loads state dictionaries of other packages. States are decoded as the package does, and training
goes on."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from conftest import bits, parameters, run, twins, warnings_are

import halfstep
import halfstep.compat.flashoptim

SHAPES = {"body": (96, 128), "ragged": (67, 71), "bias": (33,)}


def params_of(dtype=torch.float32):
    return parameters(dtype, SHAPES)


def trained(cls, steps=4, dtype=torch.float32, **options):
    params = params_of(dtype)
    opt = cls(params.values(), lr=1e-3, **options)
    run(opt, params, 0, steps)
    return params, opt


def go_on(params, opt, ours, steps=3):
    """Makes further steps with both. Returns the largest difference of weights, in learning
    rates."""
    mine = twins(params)
    new = ours(list(mine.items()))
    new.load_state_dict(copy.deepcopy(opt.state_dict()))
    run(opt, params, 4, 4 + steps)
    run(new, mine, 4, 4 + steps)
    return max(float((mine[n] - params[n]).detach().abs().max()) for n in params) / 1e-3


def bnb_values(state, i):
    import bitsandbytes.functional as F

    if state[f"state{i}"].dtype != torch.uint8:
        return state[f"state{i}"]
    return F.dequantize_blockwise(
        state[f"state{i}"], absmax=state[f"absmax{i}"], code=state[f"qmap{i}"], blocksize=256
    )


@pytest.mark.parametrize(
    "name, rule",
    [
        ("AdamW8bit", "AdamW"),
        ("AdamW32bit", "AdamW"),
        ("Adam8bit", "Adam"),
        ("PagedAdamW8bit", "AdamW"),
        ("Lion8bit", "Lion"),
    ],
)
def test_bitsandbytes(name, rule):
    optim = pytest.importorskip("bitsandbytes").optim
    with warnings_are("ignore"):
        params, opt = trained(getattr(optim, name))
    assert name == "AdamW32bit" or any(
        v.dtype == torch.uint8
        for v in opt.state[params["body"]].values()
        if isinstance(v, torch.Tensor)
    )
    mine = twins(params)
    new = getattr(halfstep, rule)(list(mine.items()), states="f32")
    with warnings_are("error"):
        new.load_state_dict(copy.deepcopy(opt.state_dict()))
    for n, p in params.items():
        for i, key in enumerate(("exp_avg", "exp_avg_sq") if rule != "Lion" else ("exp_avg",), 1):
            assert bits(new.read_state(mine[n], key)) == bits(bnb_values(opt.state[p], i)), (n, key)
        assert new.state[mine[n]]["step"] == 4
    assert new.param_groups[0]["lr"] == 1e-3 and "t_alpha" not in new.param_groups[0]
    moved = go_on(params, opt, lambda named: getattr(halfstep, rule)(named, states="f32"))
    # 32 bits: rounding; codes of 8 bits: what theirs lose in three steps; Lion: a few signs
    assert moved < {"AdamW32bit": 0.01, "Lion8bit": 6.1}.get(name, 3.0)


@pytest.mark.parametrize("bits_of", [8, 32])
def test_ademamix_of_bitsandbytes(bits_of):
    """Its first tensor holds both averages."""
    optim = pytest.importorskip("bitsandbytes").optim
    params, opt = trained(optim.AdEMAMix, optim_bits=bits_of, alpha=3.0, t_alpha=50, t_beta3=60)
    mine = twins(params)
    new = halfstep.AdEMAMix(mine.items(), states="f32")
    new.load_state_dict(copy.deepcopy(opt.state_dict()))
    for n, p in params.items():
        state = opt.state[p]
        halves = [
            dict(
                state,
                state1=state["state1"][i],
                **({"absmax1": state["absmax1"][i]} if "absmax1" in state else {}),
            )
            for i in (0, 1)
        ]
        assert state["state1"].dtype == (
            torch.uint8 if bits_of == 8 and p.numel() >= 4096 else torch.float32
        )
        for key, found in (
            ("exp_avg", bnb_values(halves[0], 1)),
            ("exp_avg_slow", bnb_values(halves[1], 1)),
            ("exp_avg_sq", bnb_values(state, 2)),
        ):
            assert bits(new.read_state(mine[n], key)) == bits(found), (n, key)
    group = new.param_groups[0]
    assert (group["alpha"], group["alpha_warmup"], group["beta3_warmup"]) == (3.0, 50, 60)
    assert "t_alpha" not in group
    assert tuple(group["betas"]) == (0.9, 0.999, 0.9999)
    moved = go_on(params, opt, lambda named: halfstep.AdEMAMix(named, states="f32"))
    assert moved < (0.02 if bits_of == 32 else 4.0)


#: what FlashOptim makes of some numbers, by its own kernels, which need a GPU but for Triton's
#: interpreter
FLASH = """
import sys
import torch
import flashoptim.optimizers as flash

class Direct:
    def __init__(self, kernel):
        self.kernel = kernel.fn  # under the autotuner, which asks for a GPU

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel[(4,)](*arguments, BLOCK_SIZE_N=1024)

for name in ("_triton_quantize_kernel", "_triton_dequantize_kernel"):
    setattr(flash, name, Direct(getattr(flash, name)))
made = {}
for i, shape in enumerate(((96, 128), (67, 71), (33,))):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(i)) * 10.0 ** -i
    for name, kind in (
        ("exp_avg", dict(signed=True)),
        ("exp_avg_sq", dict(signed=False, sqrt=True, softsign=False)),
    ):
        codes, scales = flash.quantize(values if kind["signed"] else values.square(), **kind)
        made[i, name] = codes, scales, flash.dequantize(codes, scales, **kind)
torch.save(made, sys.argv[1])
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flashoptim(tmp_path, dtype):
    """Loads 8-bit states of a state dictionary as FlashAdamW saves it. The package's own kernels
    give the expected values."""
    pytest.importorskip("flashoptim")
    file = tmp_path / "states.pt"
    subprocess.run(
        [sys.executable, "-c", FLASH, str(file)],
        check=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        timeout=300,
    )
    made = torch.load(file)
    params = params_of(dtype)
    opt = halfstep.AdamW(params.items(), states="f32")
    drop_in = halfstep.compat.flashoptim.FlashAdamW(
        list(params_of(dtype).items()),
        master_weight_bits=24 if dtype == torch.bfloat16 else None,
    )
    saved = {
        "state": {},
        "param_groups": [
            {
                **{k: v for k, v in drop_in.param_groups[0].items() if k != "params"},
                "params": [0, 1, 2],
            }
        ],
    }
    for (i, name), (codes, scales, _) in made.items():
        held = saved["state"].setdefault(i, {"step": torch.tensor(7.0)})
        held[name + "::quantized"], held[name + "::scales"] = (
            codes,
            (scales if dtype == torch.float32 else scales.view(torch.bfloat16)),
        )
        if dtype == torch.bfloat16:
            held["error_bits"] = torch.zeros_like(params[list(SHAPES)[i]])
    with warnings_are("always") as told:
        opt.load_state_dict(saved)
        drop_in.load_state_dict(copy.deepcopy(saved))
    assert any("error_bits" in str(w.message) for w in told) == (dtype == torch.bfloat16)
    for (i, name), (_, _, values) in made.items():
        p = params[list(SHAPES)[i]]
        assert bits(opt.read_state(p, name)) == bits(values) and values.any(), (i, name)
        assert opt.state[p]["step"] == 7


def test_what_bitsandbytes_has_alone():
    optim = pytest.importorskip("bitsandbytes").optim
    params, opt = trained(optim.AdEMAMix8bit)
    with pytest.raises(
        ValueError,
        match=(
            "states of bitsandbytes can be loaded by adam, adamw, lamb, lion, ademamix, not by sgd"
        ),
    ):
        halfstep.SGD(params.values()).load_state_dict(opt.state_dict())
    params, opt = trained(optim.AdamW32bit)
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["__bnb_optimizer_quant_state__"]["gnorm_vec"] = torch.ones(100)
    with pytest.warns(UserWarning, match=r"cannot be loaded.*: gnorm_vec \(percentile clipping\)"):
        halfstep.AdamW(params.values()).load_state_dict(saved)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchao(name, monkeypatch):
    torchao = pytest.importorskip("torchao.optim")
    import torchao.optim.adam as adam

    # compiled steps take minutes; eager ones are the same
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(adam.torch, "compile", lambda function, **_: function)
    params, opt = trained(getattr(torchao, name))
    mine = twins(params)
    new = halfstep.AdamW(mine.items(), states="f32")
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
    coded = halfstep.AdamW(mine.items(), states="int8")
    coded.load_state_dict(opt.state_dict())
    wanted = new.read_state(mine["body"], "exp_avg")
    assert (
        float((coded.read_state(mine["body"], "exp_avg") - wanted).abs().max() / wanted.abs().max())
        < 0.02
    )
