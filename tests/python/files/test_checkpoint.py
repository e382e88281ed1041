"""Goes on from a checkpoint of the C trainer in Python. build/halfstep makes it, load_safetensors()
loads its optimizer."""

import os
import subprocess

import pytest
import torch
from conftest import bits, randn, told, weights_of

import halfstep

load_file = pytest.importorskip("safetensors.torch").load_file
safe_open = pytest.importorskip("safetensors").safe_open

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
PROGRAM = os.path.join(os.environ.get("HALFSTEP_BUILD", os.path.join(ROOT, "build")), "halfstep")

pytestmark = pytest.mark.skipif(not os.path.exists(PROGRAM), reason=f"{PROGRAM} is not built")


@pytest.mark.parametrize(
    "recipe",
    [
        "adamw/f32",
        "adamw/bf16-ecc8/int8",
        "adamw/bf16-kahan/int4",
        "ranger/bf16-sr/int8",
        "adan/bf16-sr/dyn4+dyn4+dyn4+bf16-sr",
        "lamb16/bf16-sr",
        "schedulefree/bf16-kahan",
        "adamw/int8-ecc4/int8",
        "schedulefree/int8-sr/int4",
    ],
)
def test_a_checkpoint_of_the_c_trainer_goes_on(recipe, tmp_path):
    run = str(tmp_path / "run")
    words = (
        "--width 64 --depth 1 --heads 2 --context 32 --batch 2 --steps 5 --threads 1 --val-every 0"
        " --eval-batches 1 --sample-bytes 0 --lr 3e-4 --seed 9"
    ).split()
    data = os.path.join(ROOT, "data", "demo.txt")
    subprocess.run(
        [PROGRAM, "train", "lm", *words, "--data", data, "--recipe", recipe, "--checkpoint", run],
        check=True,
        capture_output=True,
    )
    weights = os.path.join(run, "model.safetensors")
    with safe_open(weights, "pt") as file:
        tensors = halfstep.nn.unpacked_state_dict(load_file(weights), file.metadata())
    params = {name: torch.nn.Parameter(value) for name, value in tensors.items()}
    # The trainer's groups: matrices, which decay, and norms, which do not.
    groups = [
        {"params": [(n, p) for n, p in params.items() if p.dim() > 1]},
        {"params": [(n, p) for n, p in params.items() if p.dim() < 2]},
    ]
    opt = halfstep.optimizer(recipe, groups)
    saved = os.path.join(run, "optimizer.safetensors")
    with told("the loaded states are .* converted", "/int8-" in recipe):
        opt.load_safetensors(saved)
    assert opt.seed == 9
    assert [g["lr"] for g in opt.param_groups] == [3e-4, 3e-4] and opt.param_groups[1][
        "weight_decay"
    ] == 0.0
    assert [g["group_steps"] for g in opt.param_groups] == [5, 5]

    again = str(tmp_path / "again.safetensors")
    opt.save_safetensors(again)
    with safe_open(saved, "pt") as first, safe_open(again, "pt") as second:
        assert sorted(first.keys()) == sorted(second.keys()) and len(first.keys()) > 0
        assert all(bits(first.get_tensor(k)) == bits(second.get_tensor(k)) for k in first.keys())
        for key, value in first.metadata().items():
            if key.startswith("counters."):
                assert second.metadata()[key] == value, key

    before = weights_of(params)
    for p in params.values():
        p.grad = randn(p.shape, 1, p.dtype) * 1e-3
    opt.step()
    assert all(opt.state[p]["step"] == 6 and torch.isfinite(p).all() for p in params.values())
    moved = sum(a != b for a, b in zip(before, weights_of(params)))
    assert moved > len(params) / 2
