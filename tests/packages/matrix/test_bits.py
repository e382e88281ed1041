"""Trains by gradients that every torch computes alike, so that weights, states and checkpoints have
the same bits in all environments of scripts/matrix.sh. HALFSTEP_MATRIX is the folder where they
leave their checkpoints. Each environment resumes those of all environments before it."""

import ctypes
import hashlib
import json
import math
import os
import pathlib

import pytest
import torch
from torch import nn

import halfstep

FOLDER = pathlib.Path(os.environ["HALFSTEP_MATRIX"])
NAME = os.environ["HALFSTEP_MATRIX_NAME"]
#: steps before the checkpoint, and after it
BEFORE, AFTER = 6, 6
#: recipe -> rate
RECIPES = {
    "adamw/f32": 1e-2,
    "adamw/bf16-sr/int8": 1e-2,
    "adamw/bf16-ecc8/int8": 1e-2,
    "adamw/bf16-sr/int4": 1e-2,
    "muon/bf16-kahan": 1e-2,
    "sgd/bf16-sr": 1e-1,
}
recipes = pytest.mark.parametrize("recipe", RECIPES)


def numbers(shape, seed):
    """Returns numbers between -2 and 2, made from integers: torch.randn() does not promise them."""
    index = torch.arange(math.prod(shape), dtype=torch.int64) + 7919 * seed
    mixed = (index * 2654435761 % 2**32 >> 7) * 40503 % 2**24
    return (mixed.double() / 2**22 - 2).float().reshape(shape)


def model_of(recipe):
    """Returns a model whose weights follow from its shapes."""
    model = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 33))
    for i, p in enumerate(model.parameters()):
        p.data = numbers(p.shape, i).to(torch.float32 if "f32" in recipe else torch.bfloat16)
    return model


def optimizer_of(recipe, model, **options):
    return halfstep.optimizer(
        recipe, model.named_parameters(), lr=RECIPES[recipe], seed=7, **options
    )


def train(model, opt, first, last):
    """Steps the weights towards targets that change with the step and returns the losses. All
    operations behind the gradients are elementwise and rounded correctly."""
    losses = []
    for step in range(first, last):
        loss = 0.0
        for i, p in enumerate(model.parameters()):
            d = p.float() - (0.5 * numbers(p.shape, 50 + i) + 0.01 * numbers(p.shape, step))
            loss = loss + (d * d).sum() * 0.5
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def hash_of(model, opt):
    """Returns a hash of all weights and states."""
    opt.state_dict()  # brings counts up to date
    digest = hashlib.sha256()
    for p in model.parameters():
        for tensor in (p.detach(), *(value for _, value in sorted(opt.state[p].items()))):
            tensor = tensor.contiguous()
            digest.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
    return digest.hexdigest()[:16]


def file_of(name, recipe, kind):
    return FOLDER / name / f"{recipe.replace('/', '_')}.{kind}"


def others():
    """Returns the names of the environments that left checkpoints."""
    return sorted(f.parent.name for f in FOLDER.glob("*/hashes.json") if f.parent.name != NAME)


@recipes
def test_training(recipe):
    """Leaves a checkpoint of the middle of the run, and the hash of its end."""
    model = model_of(recipe)
    opt = optimizer_of(recipe, model)
    losses = train(model, opt, 0, BEFORE)
    file = file_of(NAME, recipe, "pt")
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, file)
    losses += train(model, opt, BEFORE, BEFORE + AFTER)
    assert losses[-1] < losses[0], losses
    found = hash_of(model, opt)

    hashes = FOLDER / NAME / "hashes.json"
    noted = json.loads(hashes.read_text()) if hashes.exists() else {}
    hashes.write_text(json.dumps({**noted, recipe: found}, indent=1))
    for name in others():
        theirs = json.loads((FOLDER / name / "hashes.json").read_text())
        assert found == theirs[recipe], f"other bits than under {name}"


@recipes
def test_release_has_the_bits_of_steps(recipe):
    ends = []
    for release in (False, True):
        model = model_of(recipe)
        opt = optimizer_of(recipe, model, gradient_release=release)
        train(model, opt, 0, BEFORE)
        ends.append(hash_of(model, opt))
    assert ends[0] == ends[1]


def resume(recipe, name, load):
    """Resumes the run of an environment and returns whether it ends in that run's bits."""
    model = model_of(recipe)
    for p in model.parameters():
        p.data.zero_()
    opt = optimizer_of(recipe, model)
    load(model, opt)
    train(model, opt, BEFORE, BEFORE + AFTER)
    return hash_of(model, opt) == json.loads((FOLDER / name / "hashes.json").read_text())[recipe]


@recipes
@pytest.mark.parametrize("name", [NAME, *others()])
def test_resumes(recipe, name):
    def load(model, opt):
        both = torch.load(file_of(name, recipe, "pt"), weights_only=True)
        model.load_state_dict(both["model"])
        opt.load_state_dict(both["optimizer"])

    assert resume(recipe, name, load)


@recipes
def test_writes_safetensors(recipe):
    pytest.importorskip("safetensors")
    model = model_of(recipe)
    opt = optimizer_of(recipe, model)
    train(model, opt, 0, BEFORE)
    opt.save_safetensors(file_of(NAME, recipe, "safetensors"))


@recipes
@pytest.mark.parametrize("name", [NAME, *others()])
def test_resumes_from_safetensors(recipe, name):
    pytest.importorskip("safetensors")
    file = file_of(name, recipe, "safetensors")
    if not file.exists():
        pytest.skip(f"{name} is without safetensors")

    def load(model, opt):
        model.load_state_dict(torch.load(file.with_suffix(".pt"), weights_only=True)["model"])
        opt.load_safetensors(file)

    assert resume(recipe, name, load)
