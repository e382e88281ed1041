"""The code of the guides to memory and to low precision runs as it stands there."""

import os
import re

import pytest
import torch
from common import ROOT
from test_guides import code_of
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture
def given(tmp_path):
    """Makes what the guide takes as given: the folder of a model, and batches of tokens."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    batches = [torch.randint(256, (1, 32)) for _ in range(3)]
    return {"folder": str(tmp_path), "batches": batches, "model": model}


def loss_of(given):
    tokens = given["batches"][0]
    return given["model"](input_ids=tokens, labels=tokens).loss


def test_7b_on_24gb(given):
    before = given["model"].model.layers[0].mlp.up_proj.weight.detach().clone()
    _, code, *_ = code_of("guides/7b-on-24gb.md")
    exec(compile(code, "7b-on-24gb.md", "exec"), given)
    after = given["model"].model.layers[0].mlp.up_proj.weight
    assert given["optimizer"].param_groups[0]["group_steps"] == 3
    assert after.grad is None and not torch.equal(before, after)


def test_fit_of_7b_on_24gb(capsys):
    given = {"Model": lambda: torch.nn.Embedding(64, 64)}
    exec(compile(code_of("guides/7b-on-24gb.md")[0], "7b-on-24gb.md", "exec"), given)
    assert "ways fit into 24.00 GiB" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("block", [2, 3])
def test_other_ways_of_7b_on_24gb(given, block):
    import halfstep

    code = code_of("guides/7b-on-24gb.md")[block]
    exec(compile(code, "7b-on-24gb.md", "exec"), {**given, "halfstep": halfstep}, given)
    before = loss_of(given).item()
    for _ in range(20):
        loss_of(given).backward()
        given["optimizer"].step()
        given["optimizer"].zero_grad()
    assert loss_of(given).item() < before


def test_a_twin_sees_what_the_guide_says(capsys):
    """The script of the guide prints the table of the guide, for each format of weights."""
    path = os.path.join(ROOT, "docs", "guides", "low-precision.md")
    with open(path, encoding="utf-8") as file:
        rows = re.findall(r"^\| `(\S+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", file.read(), re.M)
    assert [row[0] for row in rows] == ["bf16", "bf16-sr", "bf16-ecc8"]
    script, spread = code_of("guides/low-precision.md")
    for name, *numbers in rows:
        given = {}
        code = script.replace('weights="bf16-sr"', f'weights="{name}"')
        exec(compile(code, "low-precision.md", "exec"), given)
        assert list(given["twin"].report().values()) == pytest.approx(
            list(map(float, numbers)), abs=0.01
        )
    exec(compile(spread, "low-precision.md", "exec"), given)
    assert "2.weight 0.0" in capsys.readouterr().out
    # Blocks with one large gradient are found.
    p, optimizer = given["model"][2].weight, given["optimizer"]
    v = torch.ones(p.shape)
    v[:, 0] = 1e5
    optimizer.write_state(p, "exp_avg_sq", v)
    assert given["spread"](optimizer, p) == 1 / (p.shape[1] / 32)


def rows_of(text):
    """Returns the recipe of each row of the table of recipes, with its bytes without and with
    release, by the row's anchor. Rows with several recipes or none are left out."""
    row = r'^\| <a id="([^"]+)"></a>`([^`…]+)` \| [^|]*\| ([\d.]+) \| ([\d.]+) \|'
    found = re.findall(row, text, re.M)
    return {
        anchor: (recipe if recipe.startswith("muon") else f"adamw/{recipe}", plain, released)
        for anchor, recipe, plain, released in found
    }


def test_the_table_of_recipes_has_the_bytes_of_plan():
    import halfstep

    with open(os.path.join(ROOT, "docs", "choosing.md"), encoding="utf-8") as file:
        text = file.read()
    rows = rows_of(text)
    assert len(rows) > 10
    for recipe, *bytes_said in rows.values():
        # Release leaves the gradient of one layer.
        shapes = {f"{i}": (64, 4096) for i in range(10000)}
        for release, said in zip((False, True), bytes_said):
            (row,) = halfstep.plan(shapes, recipes=[recipe], release=release).rows
            assert row.total / (10000 * 64 * 4096) == pytest.approx(float(said), abs=0.0051), recipe


def test_the_questions_end_at_the_recipe_that_they_name():
    """Each link of the tree leads to the row of the recipe that it names. The bytes beside it are
    the row's."""
    with open(os.path.join(ROOT, "docs", "choosing.md"), encoding="utf-8") as file:
        text = file.read()
    tree = text.split("## Follow the questions")[1].split("## In one table")[0]
    ends = re.findall(r"\[`([^`]+)`\]\(#(row-[^)]+)\)([^|\n]*)\| *([\d.]+)? *", tree)
    assert len(ends) > 12
    for recipe, anchor, rest, total in ends:
        named, plain, released = rows_of(text)[anchor]
        assert named == recipe
        if total not in ("2", "4", ""):  # states elsewhere
            assert total == (released if "release" in rest else plain), recipe
