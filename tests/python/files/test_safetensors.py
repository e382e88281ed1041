"""The reference safetensors package reads what `train lm` writes: names, shapes and values of a
Llama checkpoint."""

import json
import os
import struct
import subprocess

import pytest
import safetensors


def read_raw(path):
    """Header and bytes by hand, to judge the package's answer by."""
    with open(path, "rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(length))
        return header, f.read()


def check_file(path, names):
    header, data = read_raw(path)
    metadata = header.pop("__metadata__", {})
    with safetensors.safe_open(path, framework="numpy") as f:
        keys = set(f.keys())
        assert keys == set(header), (
            f"{path}: the package lists {sorted(keys ^ set(header))} differently"
        )
        assert (f.metadata() or {}) == metadata, f"{path}: metadata differ"
        for name in sorted(keys):
            entry = header[name]
            view = f.get_slice(name)
            assert list(view.get_shape()) == entry["shape"], f"{name}: shape {view.get_shape()}"
            assert view.get_dtype() == entry["dtype"], f"{name}: dtype {view.get_dtype()}"
            if entry["dtype"] not in ("F32", "I8", "I16"):
                continue  # numpy has no BF16
            begin, end = entry["data_offsets"]
            assert f.get_tensor(name).tobytes() == data[begin:end], f"{name}: other bytes"
    missing = set(names) - keys
    assert not missing, f"{path}: no {sorted(missing)}"


@pytest.mark.parametrize(
    "recipe",
    ["adamw/f32", "adamw/bf16-sr/int8", "adamw/bf16-ecc16/bf16-kahan+int8", "lion/bf16-kahan/int8"],
)
def test_checkpoint(recipe, tmp_path):
    program, depth = os.path.join(os.environ["HALFSTEP_BUILD"], "halfstep"), 2
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for layer in range(depth):
        names += [
            f"model.layers.{layer}.{part}.weight"
            for part in ("input_layernorm", "post_attention_layernorm")
            + tuple(f"self_attn.{name}_proj" for name in "qkvo")
            + tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
        ]
    words = (
        "--steps 2 --width 64 --heads 2 --context 32 --batch 2 --eval-batches 1 --json --depth"
    ).split()
    data = os.path.join(os.environ["HALFSTEP_SOURCE"], "data", "demo.txt")
    subprocess.run(
        [program, "train", "lm", *words, str(depth)]
        + ["--data", data, "--recipe", recipe, "--checkpoint", tmp_path],
        check=True,
        capture_output=True,
    )
    check_file(tmp_path / "model.safetensors", names)
    check_file(tmp_path / "optimizer.safetensors", [])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_hidden_layers"] == depth
