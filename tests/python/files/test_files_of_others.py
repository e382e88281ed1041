"""Reads files that other programs made, or that were damaged. The model of train lm --init must be
the one that their config.json describes. Also, python -m halfstep plan reads them or says in one
line what is wrong."""

import json
import os
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from halfstep import __main__ as program

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")
DATA = os.path.join(ROOT, "data", "demo.txt")
PROGRAM = os.path.join(os.environ.get("HALFSTEP_BUILD", os.path.join(ROOT, "build")), "halfstep")
sys.path.insert(0, os.path.join(ROOT, "bench"))
import trainer_torch as ours  # noqa: E402


def config_of(shape, **members):
    usual = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": shape.width,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "tie_word_embeddings": False,
    }
    return {**usual, **members}


@pytest.mark.parametrize(
    "eps, theta, files", [(1e-5, 1e4, 1), (0.1, 1e4, 1), (1e-5, 33.5, 3), (0.02, 5e5, 2)]
)
def test_init_computes_the_model_of_the_file(tmp_path, eps, theta, files):
    """The validation loss before any step is torch's, for the same epsilon and base of positions.
    The model is in one file, or in several with an index."""
    shape = ours.Shape(width=32, depth=2, heads=4, context=32, batch=4, eps=eps, theta=theta)
    model = ours.Llama(shape)
    torch.manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * (0.3 if p.dim() > 1 else 1.0))
        wanted = [model(*batch).item() for batch in ours.Text(DATA, shape, 7).evaluation(4)]
    tensors = sorted(
        {name: p.detach().contiguous() for name, p in model.named_parameters()}.items()
    )
    (tmp_path / "config.json").write_text(
        json.dumps(config_of(shape, rope_parameters={"rope_theta": theta, "rope_type": "default"}))
    )
    if files == 1:
        save_file(dict(tensors), tmp_path / "model.safetensors")
    else:
        names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
        for i, name in enumerate(names):
            save_file(dict(tensors[i::files]), tmp_path / name)
        places = {tensor: names[i % files] for i, (tensor, _) in enumerate(tensors)}
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": 1}, "weight_map": places})
        )
    words = (
        "--recipe adamw/f32/f32 --compute f32 --steps 0 --batch 4 --eval-batches 4"
        " --sample-bytes 0 --seed 7 --threads 1 --quiet --json"
    ).split()
    file = "model.safetensors" if files == 1 else "model.safetensors.index.json"
    for place in (tmp_path, tmp_path / file):
        done = subprocess.run(
            [PROGRAM, "train", "lm", "--data", DATA, "--init", place, *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert json.loads(done.stdout)["val_loss"] == pytest.approx(
            sum(wanted) / len(wanted), rel=1e-5
        )


def header(text, data=b""):
    return struct.pack("<Q", len(text)) + text + data


TENSOR = b'{"dtype":"F32","shape":[3,5],"data_offsets":[0,60]'
DAMAGED = {
    "a pointer of git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n",
    "nothing": b"",
    "a torn length": b"\x08\0\0",
    "a torn header": header(b'{"a":')[:-2],
    "no JSON": header(b"abcd"),
    "no UTF-8": header(b"\xff\xfe"),
    "data cut off": header(b'{"a":' + TENSOR + b"}}", bytes(59)),
    "another dtype": header(b'{"a":' + TENSOR.replace(b"F32", b"F99") + b"}}", bytes(60)),
    "a zip file": b"PK\x03\x04" + bytes(60),
}


def planned(capsys, *words):
    code = program.main(["plan", *words])
    out = capsys.readouterr()
    return code, out.out, out.err


def refusal(capsys, *words):
    """Returns the one line in which a plan is refused."""
    code, out, err = planned(capsys, *words)
    assert code == 1 and not out and err.count("\n") == 1 and err[:-1].isprintable()
    return err


@pytest.mark.parametrize("kind", DAMAGED)
def test_plan_of_a_damaged_file(capsys, tmp_path, kind):
    path = tmp_path / "m\x1b[31m\u202e.safetensors"
    path.write_bytes(DAMAGED[kind])
    err = refusal(capsys, str(path))
    assert err.startswith("python -m halfstep plan: ")
    assert "m\\x1b[31m\\u202e.safetensors' is not a sound safetensors file: " in err


def test_plan_of_what_is_no_file(capsys, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    os.symlink("nowhere", tmp_path / "link")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "link"):
        said = refusal(capsys, str(path))
        assert "is not a regular file; give a safetensors file" in said
    for number in ("1e400", "1e16", "inf", "nan", "0", "-1", "B", "", "\x1b[2J"):
        assert "from 1 to 1e15" in refusal(capsys, *(["--"] if number[:1] == "-" else []), number)
    (tmp_path / "m.safetensors").write_bytes(header(b"{}"))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "pip install safetensors" in refusal(capsys, str(tmp_path / "m.safetensors"))


def test_plan_of_sizes(capsys):
    for size in ("9" * 400 + "G", "1e400", "1e19", "-5", "x", "24\x1b[2J"):
        said = refusal(capsys, "7B", f"--memory={size}")
        assert "is not a size in bytes below 2^63; write 24e9" in said
    for size in ("24e9", "1.5 GiB"):
        assert planned(capsys, "7B", "--memory", size)[0] == 0


@pytest.mark.parametrize(
    "text",
    [
        b'{"__metadata__":null,"a":' + TENSOR + b"}}",
        b' \n{"a":' + TENSOR + b',"more":{"x":[1,null]}}}\n',
    ],
)
def test_headers_that_the_reference_reads(capsys, tmp_path, text):
    """Both programs report the same of them as safetensors does."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(header(text, bytes(60)))
    code, out, _ = planned(capsys, str(path), "--recipes", "adamw/f32/f32")
    assert code == 0 and "15 parameters" in out
    done = subprocess.run(
        [PROGRAM, "inspect", path, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and json.loads(done.stdout)["tensors"] == [
        {"name": "a", "dtype": "F32", "shape": [3, 5], "bytes": 60}
    ]
