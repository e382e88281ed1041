"""Converts models with halfstep convert, and reads them as docs/formats.md does, with numpy alone.
The codes are those of a reference here."""

import json
import os
import subprocess

import documents
import numpy
import pytest
import torch

safetensors = pytest.importorskip("safetensors.torch")

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
PROGRAM = os.path.join(os.environ.get("HALFSTEP_BUILD", os.path.join(ROOT, "build")), "halfstep")

pytestmark = pytest.mark.skipif(not os.path.exists(PROGRAM), reason=f"{PROGRAM} is not built")


def convert(*words):
    result = subprocess.run(
        [PROGRAM, "convert", *map(str, words)], capture_output=True, text=True, check=True
    )
    return result.stdout


def reader_of_the_page(page="docs/formats.md", function="packed_weights"):
    (block,) = documents.blocks(page, "python")
    return block.run()[function]


def packed(x):
    """Returns the numbers that packed blocks hold of a matrix, to nearest."""
    rows, columns = x.shape
    blocks = numpy.zeros((rows, -(-columns // 32) * 32), numpy.float32)
    blocks[:, :columns] = x
    blocks = blocks.reshape(rows, -1, 32)
    most = numpy.abs(blocks).max(-1, keepdims=True)
    bits = (most * numpy.float32(1.06 / 127)).view(numpy.uint32) + numpy.uint32(0xFFFF)
    scale = (bits & numpy.uint32(0xFFFF0000)).view(numpy.float32)
    scale = numpy.where(most < numpy.float32(2.0**-99), numpy.float32(0), scale)
    factor = numpy.float32(65536) / numpy.where(scale > 0, scale, numpy.float32(1))
    placed = numpy.rint(blocks * factor).astype(numpy.int64)
    codes = numpy.where(scale > 0, (placed + 0x8000) >> 16, 0).astype(numpy.float32)
    return (codes * scale).reshape(rows, -1)[:, :columns]


@pytest.fixture
def model():
    torch.manual_seed(1)
    tensors = {
        "embed.weight": torch.randn(50, 300),
        "layer.weight": (torch.randn(70, 64) * 0.02).bfloat16(),
        "half.weight": torch.randn(3, 33).half(),
        "layer.bias": torch.randn(70),
        "narrow.weight": torch.randn(40, 31).bfloat16(),
        "stack": torch.randn(2, 4, 64),
        "steps": torch.arange(64).reshape(2, 32),
    }
    tensors["embed.weight"][7] = 0
    tensors["embed.weight"][8] *= 1e-35
    tensors["embed.weight"][9, 3] = 1e38
    return tensors


def test_a_converted_model_is_read_with_numpy_alone(model, tmp_path):
    safetensors.save_file(model, tmp_path / "model.safetensors", {"format": "pt"})
    small, wide = tmp_path / "small.safetensors", tmp_path / "wide.safetensors"
    told = convert(tmp_path, small, "--to", "int8-ecc4")
    assert "3 tensors converted to int8-ecc4, 4 copied as they are" in told
    read = dict(reader_of_the_page()(small))
    assert sorted(read) == ["embed.weight", "half.weight", "layer.weight"]
    for name, values in read.items():
        numpy.testing.assert_array_equal(values, packed(model[name].float().numpy()), name)
    stored = safetensors.load_file(small)
    with safetensors.safe_open(small, "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert json.loads(file.metadata()["halfstep.nn"])["half.weight"] == {
            "format": "int8-ecc4",
            "columns": 33,
        }
    assert stored["embed.weight"].shape == (50, 340) and stored["half.weight"].shape == (3, 68)
    for name in set(model) - set(read):
        assert torch.equal(stored[name], model[name]), name

    # Back: exact in fp32, rounded in BF16. What is not packed or asked for stays as it is.
    convert(small, wide, "--to", "f32", "--tensors", "embed*", "half*")
    back = safetensors.load_file(wide)
    for name in ("embed.weight", "half.weight"):
        numpy.testing.assert_array_equal(back[name].numpy(), read[name], name)
    assert back["layer.weight"].shape == (70, 68) and list(dict(reader_of_the_page()(wide))) == [
        "layer.weight"
    ]
    convert(wide, tmp_path / "bf16.safetensors", "--to", "bf16")
    back = safetensors.load_file(tmp_path / "bf16.safetensors")
    for name, values in read.items():
        assert torch.equal(back[name], torch.from_numpy(values.copy()).bfloat16()), name


def test_several_files_become_one(model, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    names = sorted(model)
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for part in sorted(set(places.values())):
        tensors = {name: model[name] for name in names if places[name] == part}
        safetensors.save_file(tensors, folder / part, {"part": part, "format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    safetensors.save_file(
        model, tmp_path / "one.safetensors", {"part": "part-0.safetensors", "format": "pt"}
    )
    told = json.loads(convert(folder, tmp_path / "a", "--to", "int8-sr", "--json"))
    assert told["converted"] and sorted(told["converted"] + told["copied"]) == names
    convert(tmp_path / "one.safetensors", tmp_path / "b", "--to", "int8-sr")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "model", "one.safetensors"]
