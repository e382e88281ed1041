"""Tests halfstep.fit: peaks beside those of real steps, reports, the command, and what is refused.
bench/fit.py runs all models in all choices."""

import html.parser
import json
import os
import subprocess
import sys

import pytest
import torch
from common import ROOT
from torch import nn

import halfstep
from halfstep import __main__ as program
from halfstep._forecast.trace import KINDS, prepared, trace
from halfstep._tensors import torch_private
from halfstep.fit import DEVICE_CODE, _largest
from halfstep.plan import plan

RECIPES = ["adamw/bf16-sr/int8", "adamw/int8-ecc4/int8"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 384), nn.Linear(384, 128)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(300, 128)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.register_buffer("scale", torch.ones(1000))

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


def net():
    with torch.device("meta"):
        return Net().to(torch.bfloat16)


def step(model, batch=1):
    model(torch.zeros(batch, 16, dtype=torch.long)).square().mean().backward()


def row_of(found, way, recipe=RECIPES[0]):
    (row,) = (row for row in found.rows if (row.way, row.recipe) == (way, recipe))
    return row


# ---- Peaks ---------------------------------------------------------------------------------------


def bench(*arguments):
    line = [sys.executable, os.path.join(ROOT, "bench", "fit.py"), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]


def test_the_peak_of_real_steps():
    assert len(bench("--models", "small", "--choices", "0,7,11")) == 6


@pytest.mark.all
@pytest.mark.parametrize("model", ["llama", "qwen3", "moe", "gpt2", "vit", "unet"])
def test_the_peak_of_a_real_step(model):
    if model == "unet":
        pytest.importorskip("diffusers", reason="for this model only")
    assert len(bench("--models", model, "--choices", "9")) == 1


def test_bytes_of_the_optimizer_are_those_of_plan():
    found = halfstep.fit(net(), step, recipes=RECIPES[0])
    (planned,) = plan(net(), RECIPES[0]).rows
    row = row_of(found, "in place")
    for part in ("weights", "extras", "states", "frozen"):
        assert getattr(row, part) == getattr(planned, part)
    assert row.buffers == 2048  # of 2000 bytes, in blocks of the allocator
    ways = {row.way: row for row in plan(net(), RECIPES[0], device_memory="1T").rows}
    assert row_of(found, "CPUOffload").host == ways["CPUOffload"].host
    assert row_of(found, "StateStreaming").copied == 2 * row_of(found, "StateStreaming").host
    (stored,) = plan(net(), RECIPES[0], store=True, offload=True).rows
    assert row_of(found, "CPUOffload, store").written == stored.written
    others = halfstep.fit(net(), step, recipes=RECIPES[0], kernels=False).rows
    assert [row.way for row in others] == [x.way for x in found.rows if "CPUOffload" in x.way]
    code = [x.device - y.device for x in found.rows for y in others if x.way == y.way]
    assert code == [DEVICE_CODE] * len(others)


def test_parts_add_up_and_gradients_die_in_release():
    found = halfstep.fit(net(), step, "1G", device="cpu", recipes=RECIPES)
    parts = ("weights", "extras", "frozen", "buffers", "states", "gradients", "activations",
             "temporaries", "kernels", "device")  # fmt: skip
    for row in found.rows:
        assert row.peak == sum(getattr(row, part) for part in parts)
        assert row.fits and (row.kernels, row.device) == (0, 0)
    whole = sum(p.numel() for p in Net().parameters()) * 2
    kept, freed = row_of(found, "in place"), row_of(found, "release")
    assert kept.gradients == whole and freed.gradients < whole / 3
    assert freed.place.startswith("blocks.2") and kept.place == "table, backward"
    assert row_of(found, "in place", RECIPES[1]).weights < kept.weights
    assert found.best == kept and "It gives up nothing" in str(found)
    small = halfstep.fit(net(), step, freed.peak, device="cpu", recipes=RECIPES[0])
    assert [row.fits for row in small.rows] == [False, True, False]
    assert small.best == freed.__class__(**{**freed.__dict__, "fits": True})
    assert "gradient_release=True" in str(small) and "judged and clipped" in str(small)


def test_attention_of_gpus_takes_more():
    def attention(model):
        x = model(torch.zeros(2, 64, dtype=torch.long)).view(2, 64, 4, 32).transpose(1, 2)
        torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()

    traced = trace(net(), attention, lambda model: None)
    kernels = KINDS.index("kernels")
    assert traced.curve(cuda=True)[kernels].max() == 4 * 2 * 4 * 128 * (32 + 1)
    assert traced.curve(cuda=False)[kernels].max() == 0


@pytest.mark.parametrize("blocks", [False, True])
def test_convolutions_of_a_processor_take_more(blocks, monkeypatch):
    monkeypatch.setattr(torch_private, "has_blocks", lambda dtype: blocks)
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)).bfloat16()

    def convolve(model):
        model(torch.zeros(2, 3, 10, 10, dtype=torch.bfloat16)).sum().backward()

    traced = trace(model, convolve, lambda model: None)
    line = KINDS.index("convolutions")
    most = 2 * 2 * 100 * (8 + 4 if blocks else 3 * 9)
    assert traced.curve(cuda=False)[line].max() == most
    assert traced.curve(cuda=True)[line].max() == 0


def test_the_largest_batch():
    limit = "962M"
    found = halfstep.fit(net(), step, limit, recipes=RECIPES, batch="max")
    for row in found.rows:
        if row.batch:
            for batch, fits in ((row.batch, True), (row.batch + 1, False)):
                again = halfstep.fit(net(), step, limit, recipes=row.recipe, batch=batch)
                assert row_of(again, row.way, row.recipe).fits == fits
            break
    assert row.batch > 3
    assert [_largest(lambda n, most=most: n <= most) for most in (1, 2, 3, 64, 777)] == [
        1, 2, 3, 64, 777,
    ]  # fmt: skip


def test_frozen_weights_and_ranks():
    model = net()
    model.table.requires_grad_(False)
    found = halfstep.fit(model, step, recipes=RECIPES, device="cpu")
    row = row_of(found, "in place")
    assert row.frozen == 300 * 128 * 2
    shared = row_of(halfstep.fit(model, step, recipes=RECIPES, device="cpu", ranks=4), "in place")
    assert shared.states == -(-row.states // 4) and shared.buffers == row.buffers
    assert shared.peak < row.peak


def test_the_model_stays_as_it_was():
    model, held = net(), {}
    held = dict(model.named_parameters(), scale=model.scale)
    halfstep.fit(model, step, recipes=RECIPES)
    with pytest.raises(ValueError):
        halfstep.fit(model, lambda model: model.table.weight.sum().item())
    assert all(held[name] is p for name, p in model.named_parameters())
    assert model.scale is held["scale"] and all(p.grad is None for p in held.values())
    assert not any(torch_private.gradient_hooks(p) for p in model.parameters())
    quantized = halfstep.nn.quantize_(net())
    with prepared(quantized, lambda model: None):
        assert quantized.blocks[0].up.weight.format == "int8-ecc4"
    (row, *_) = halfstep.fit(quantized, step, recipes=RECIPES[1]).rows
    assert row.weights == plan(quantized, RECIPES[1]).rows[0].weights


# ---- Reports -------------------------------------------------------------------------------------


def test_reports(tmp_path):
    found = halfstep.fit(net(), step, "24G", title="a net")
    text = str(found)
    assert max(map(len, text.splitlines())) <= 100 and text.startswith("a net, ")
    assert "fragmentation" in text and "FlashAttention" in text
    read = json.loads(found.json())
    assert len(read["rows"]) == len(found.rows) and read["rows"][read["best"]]["fits"]
    tags = []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag, _):
            if tag not in ("meta", "link"):
                tags.append(tag)

        def handle_endtag(self, tag):
            assert tags.pop() == tag

    Reader().feed(found.html().replace("</head>", ""))
    assert not tags and "<script" not in found.html()
    assert all(row.recipe in found.html() and row.recipe in text for row in found.rows)


def test_the_lines_of_code_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for device in ("cuda", "cpu"):
        for row in halfstep.fit(net(), step, device=device).rows:
            given = {"halfstep": halfstep, "model": Net().to(torch.bfloat16)}
            if "muon" not in row.recipe and "store" not in row.way:
                exec(row.code, given)
                assert set(given["opt"].param_groups[0]) and given["opt"].rule == "adamw"
            elif "store" not in row.way:
                exec(row.code, given)
                assert given["opt"].rule == "muon"


# ---- The command ---------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys):
    from transformers import LlamaConfig, Qwen3MoeConfig, ViTConfig

    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
             "num_attention_heads": 2}  # fmt: skip
    LlamaConfig(**small, vocab_size=64, max_position_embeddings=64).save_pretrained(tmp_path / "a")
    page = tmp_path / "page.html"
    line = ["fit", str(tmp_path / "a"), "--sequence", "32", "--recipes", RECIPES[0]]
    assert program.main([*line, "--memory", "2G", "--checkpointing", "--html", str(page)]) == 0
    assert "LlamaForCausalLM of 32 tokens" in capsys.readouterr().out and page.stat().st_size
    assert program.main([*line, "--lora", "4", "--json", "--device", "cpu"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert 0 < rows[0]["weights"] < rows[0]["frozen"] / 4
    ViTConfig(
        **small, image_size=16, patch_size=8, architectures=["ViTForImageClassification"]
    ).save_pretrained(tmp_path / "b")
    Qwen3MoeConfig(
        **small, vocab_size=64, num_key_value_heads=1, head_dim=32, moe_intermediate_size=32,
        num_experts=4, num_experts_per_tok=2, architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(tmp_path / "c")  # fmt: skip
    for name in ("b/config.json", "c"):
        line[1] = str(tmp_path / name)
        assert program.main([*line, "--batch", "2"]) == 0, capsys.readouterr().err
    capsys.readouterr()
    for wrong, told in (
        (["fit", str(tmp_path / "none")], "neither a folder with a config.json"),
        (["fit", str(tmp_path / "a"), "--sequence", "65"], "more than the 64 tokens"),
        ([*line[:2], "--batch", "few"], "neither a whole number nor 'max'"),
    ):
        assert program.main(wrong) == 1
        assert told in capsys.readouterr().err


# ---- What is refused -----------------------------------------------------------------------------


def autocast(model):
    with torch.autocast("cuda", torch.bfloat16):
        step(model)


def asks(model):
    step(model)
    float(model.table.weight.sum())


def elsewhere(model):
    model(torch.zeros(1, 4, dtype=torch.long).to("cuda"))


@pytest.mark.parametrize(
    "wrong, options, told",
    [
        (asks, {}, r"asks for a value.*test_fit.py:\d+: float\(model.table"),
        (lambda model: None, {}, "left no gradient"),
        (autocast, {}, "under autocast for one"),
        (elsewhere, {}, "another device than the model's parameters"),
        (step, {"batch": "max"}, "needs memory="),
        (step, {"batch": 0}, "neither a whole number"),
        (step, {"ranks": 0}, "at least 1"),
        (step, {"device": "tpu"}, "known: 'cuda', 'cpu'"),
        (step, {"device": "cpu", "kernels": False}, "is for a GPU"),
        (step, {"recipes": "ema/bf16"}, "not an optimizer"),
        (step, {"memory": "much"}, "not a size in bytes"),
    ],
)
def test_refused(wrong, options, told):
    with pytest.raises(ValueError, match=f"(?s){told}"):
        halfstep.fit(net(), wrong, **options)
    for wrong in (3, "model"):
        with pytest.raises(TypeError, match="is not a"):
            halfstep.fit(wrong, step)
        with pytest.raises(TypeError, match="is not a function"):
            halfstep.fit(net(), wrong)


def test_recipes_that_a_model_cannot_have():
    model = nn.Module()
    with torch.device("meta"):
        model.table, model.head = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
    model.head.weight = model.table.weight

    def tied(model):
        model.head(model.table(torch.zeros(4, dtype=torch.long))).sum().backward()

    found = halfstep.fit(model, tied)
    assert {row.recipe.split("/")[1] for row in found.rows} == {"bf16-sr", "bf16-ecc8"}
    assert "is left out: 'head.weight' cannot be quantized" in " ".join(str(found).split())
    with pytest.raises(ValueError, match="is tied with 'table.weight'"):
        halfstep.fit(model, tied, recipes=RECIPES[1])
