"""Tests python -m halfstep, and the errors for mistyped words."""

import json
import subprocess
import sys

import pytest
import torch

import halfstep
from halfstep import __main__ as program
from halfstep._library import abi
from halfstep._tensors import devices


def said(capsys, *arguments):
    code = program.main(list(arguments))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_it_is_a_program():
    for word, code in (("--help", 0), ("nothing", 2)):
        command = [sys.executable, "-m", "halfstep", word]
        found = subprocess.run(command, capture_output=True, text=True)
        assert found.returncode == code
        for known in ("info", "plan", "verify"):
            assert known in found.stdout + found.stderr


def test_info(capsys):
    code, out, _ = said(capsys, "info")
    assert code == 0 and "instruction set" in out and "adamw" in out
    code, out, _ = said(capsys, "info", "--json")
    found = json.loads(out)
    assert (found["version"], found["rules"]) == (halfstep.__version__, list(abi.rules))
    assert found["instruction_set"]
    assert "accelerator" in out and torch.cuda.is_available() == (found["accelerator"] == "cuda")


def test_a_device_without_kernels(capsys, monkeypatch):
    monkeypatch.setattr(devices, "accelerator", lambda: torch.device("xpu"))
    assert "xpu: stepped on the processor" in said(capsys, "info")[1]
    for options in ((), ("--device-memory", "24G")):
        code, out, _ = said(capsys, "plan", "1B", "--no-kernels", *options)
        assert code == 0 and ("CPUOffload" if options else "states offloaded") in out


@pytest.mark.told("muon: momentum_buffer in int4")
def test_every_instruction_set_has_the_bits(capsys):
    before = abi.lib.halfstep_isa()
    code, out, _ = said(capsys, "verify")
    available = sum(abi.lib.halfstep_isa_available(i) for i in range(abi.lib.halfstep_isa_count()))
    assert code == 0 and out.count("ok ") == available >= 1
    assert abi.lib.halfstep_isa() == before


@pytest.mark.told("muon: momentum_buffer in int4")
def test_other_bits_are_a_failure(capsys, monkeypatch):
    monkeypatch.setattr(program, "_numbers", lambda shape, seed: torch.full(shape, 0.5 + seed))
    code, out, _ = said(capsys, "verify")
    assert code == 1 and "FAIL" in out and program.EXPECTED in out


def test_plan(capsys, tmp_path):
    code, out, _ = said(capsys, "plan", "7B", "--memory", "24G", "--release")
    assert code == 0 and "7000000000 parameters" in out and "fit into 24.00 GiB" in out
    says = f"\nDevice code for GPUs: {abi.lib.halfstep_device_code().decode()}.\n"
    assert says in out and says in said(capsys, "plan", "7B", "--device-memory", "24G")[1]
    code, out, err = said(capsys, "plan", "seven")
    assert code == 1 and err.count("\n") == 1 and "'seven'" in err
    pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, str(tmp_path / "model.safetensors"))
    code, out, _ = said(
        capsys, "plan", str(tmp_path / "model.safetensors"), "--recipes", "adamw/f32/f32"
    )
    assert code == 0 and "22 parameters" in out and out.count("adamw/") == 2  # a row and its bar
    save_file({"experts": torch.zeros(4, 6, 32)}, str(tmp_path / "model.safetensors"))
    recipes = "muon/f32/int8,came/f32/int8,adamw/f32/f32"
    code, out, _ = said(capsys, "plan", str(tmp_path / "model.safetensors"), "--recipes", recipes)
    assert code == 0 and out.count("takes [4, 6, 32] as 4 matrices of 6 x 32.") == 2


# ---- Mistakes ------------------------------------------------------------------------------------


def weight(n=3):
    return torch.nn.Parameter(torch.ones(n))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: halfstep.optimizer([weight()], "adamw/bf16-sr"), TypeError, "other way round"),
        (lambda: halfstep.optimizer("adamw", "adamw"), TypeError, "'adamw' must be parameters"),
        (lambda: halfstep.optimizer(None, [weight()]), TypeError, "not a NoneType"),
        (lambda: halfstep.plan("adamw/bf16-sr/int8"), TypeError, "a model or shapes first"),
        (
            lambda: halfstep.plan("adamw", torch.nn.Linear(2, 2)),
            TypeError,
            "a model or shapes first",
        ),
        (
            lambda: halfstep.plan({"a": (2, 2)}, torch.nn.Linear(2, 2)),
            TypeError,
            "which come first",
        ),
        (
            lambda: halfstep.AdamW([("a", weight()), ("a", weight(2))]),
            ValueError,
            "two parameters are named 'a'",
        ),
        (lambda: halfstep.AdamW([weight()], wieghts="bf16"), TypeError, "wieghts"),
    ],
)
def test_mistakes_are_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_name_that_is_taken_by_another_group():
    p = weight()
    opt = halfstep.AdamW([("a", p)])
    with pytest.raises(ValueError, match="two parameters are named 'a'"):
        opt.add_param_group({"params": [("a", weight(2))]})
    assert len(opt.param_groups) == 1 and opt.param_groups[0]["params"] == [p]
    opt.add_param_group(
        {"params": [("b", weight(2))], "lr_scale": 0.5, "name": "head"}
    )  # somebody's own keys
    assert opt.param_groups[1]["lr_scale"] == 0.5
