"""Tests lab/gpu_model.py: a model in training on a GPU beside the processor. It runs on the fake of
fake_gpu.py or, where torch has a GPU, on that. It can fail: it finds one wrong bit of a gradient or
of a compared tensor, and names its step."""

import os
import sys
import types

import pytest
import torch
from fake_gpu import Fake

sys.path.insert(
    0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "lab")
)
import gpu_model  # noqa: E402

pytestmark = pytest.mark.all
OPTIONS = types.SimpleNamespace(
    seed=1,
    width=32,
    depth=1,
    heads=2,
    context=16,
    batch=2,
    steps=4,
    every=2,
    data=os.path.join(gpu_model.ROOT, "data", "demo.txt"),
)


class OnFake:
    def __init__(self, fake):
        self.fake = fake

    def model(self, model):
        return self.fake.model(model)

    def text(self, text):
        return text

    def read(self, tensor):
        return self.fake.read(tensor).clone()


@pytest.fixture
def place(monkeypatch):
    if torch.cuda.is_available():
        yield gpu_model.Gpu("cuda")
        return
    fake = Fake()
    fake.install(monkeypatch)
    yield OnFake(fake)
    fake.close()


@pytest.mark.parametrize("recipe", gpu_model.RECIPES)
def test_every_recipe(place, recipe):
    wrong, losses = gpu_model.compare(recipe, place, OPTIONS)
    assert wrong is None and len(losses) == OPTIONS.steps


def test_a_bit_of_a_gradient_is_found(place):
    """The bit is in what is copied of the first step, and in the last tensor that is compared."""
    read, count = place.read, [0]

    def flipped(tensor):
        got, count[0] = read(tensor), count[0] + 1
        if count[0] == place.at:
            got.view(-1)[0] += 1
        return got

    place.at, place.read = -1, flipped
    assert gpu_model.compare("adamw/bf16-sr/int8", place, OPTIONS)[0] is None
    for place.at in (
        1,
        count[0],
    ):  # the first gradient that is copied, and the last thing that is compared
        count[0] = 0
        wrong, _ = gpu_model.compare("adamw/bf16-sr/int8", place, OPTIONS)
        assert wrong and wrong.startswith(f"after step {2 if place.at == 1 else 4} ")


def test_what_is_compared():
    a = {"w": torch.tensor([0.0, float("nan")]), "count": 3}
    same = {"w": a["w"].clone(), "count": 3}
    assert not gpu_model.different(a, same)
    assert gpu_model.different(a, {**same, "w": torch.tensor([-0.0, float("nan")])}) == ["w"]
    assert gpu_model.different(a, {**same, "count": 4}) == ["count"]
    assert gpu_model.different(a, {"w": same["w"]}) == ["count"]
    assert gpu_model.different(a, {**same, "w": a["w"].double()}) == ["w"]


def test_its_sentences(capsys):
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="torch finds no GPU here; --device cpu"):
            gpu_model.main([])
    small = "--device cpu --steps 2 --width 32 --depth 1 --context 16 --batch 2".split()
    assert gpu_model.main([*small, "--recipes", "lion/bf16-sr/int8,adamm/f32"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("ok   lion/bf16-sr/int8: 2 steps, all bits the same") and printed[
        1
    ].startswith("FAIL adamm/f32: ")
    assert gpu_model.main([*small, "--data", "nowhere"]) == 1
    assert "No such file" in capsys.readouterr().out
