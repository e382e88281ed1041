"""Hydra makes halfstep's optimizers from the blocks of docs/frameworks.md, in a plain loop."""

import pytest
import torch
from common import OPTIONS, bits, blocks, same, tiny

import halfstep

pytestmark = [pytest.mark.all, pytest.mark.filterwarnings("ignore")]


def config(**options):
    """Returns the documented block, with other options of the optimizer."""
    from omegaconf import OmegaConf

    (block,) = blocks("Hydra", "yaml")
    return OmegaConf.merge(OmegaConf.create(block), {"optimizer": {"lr": 1e-2, **options}})


def make(model, named=True, **options):
    from hydra.utils import instantiate

    params = model.named_parameters() if named else model.parameters()
    return instantiate(config(**options).optimizer, params=params)


def loss_of(model, step):
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
    return (model(x) - 1).float().pow(2).mean()


def train(model, opt, steps, parts=1, clip=None):
    for step in steps:
        for part in range(parts):
            (loss_of(model, step * parts + part) / parts).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()
    return model, opt


def by_hand(steps, options=OPTIONS, **given):
    model = tiny()
    return train(model, halfstep.AdamW(model.named_parameters(), 1e-2, **options), steps, **given)


@pytest.mark.cell("Hydra", "plain")
@pytest.mark.parametrize("named", [True, False])
def test_plain(named):
    model = tiny()
    found = train(model, make(model, named, **OPTIONS), range(3))
    assert type(found[1]) is halfstep.AdamW and bits(model[0].weight) != bits(tiny()[0].weight)
    assert found[1].param_groups[0]["states"] == OPTIONS["states"]
    if named:
        same(found, by_hand(range(3)))


@pytest.mark.cell("Hydra", "plain")
def test_partial():
    from hydra.utils import instantiate

    model = tiny()
    make_optimizer = instantiate(config(_partial_=True, **OPTIONS).optimizer)
    same(train(model, make_optimizer(model.named_parameters()), range(3)), by_hand(range(3)))


@pytest.mark.cell("Hydra", "resume")
def test_resume(tmp_path):
    model = tiny()
    opt = make(model, **OPTIONS)
    train(model, opt, range(3))
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, tmp_path / "run.pt")
    train(model, opt, range(3, 6))
    again = tiny(9)
    opt2 = make(again, **OPTIONS)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    again.load_state_dict(saved["model"])
    opt2.load_state_dict(saved["opt"])
    same((model, opt), train(again, opt2, range(3, 6)))


@pytest.mark.cell("Hydra", "accumulate")
def test_accumulate():
    model = tiny()
    same(train(model, make(model, **OPTIONS), range(3), parts=2), by_hand(range(3), parts=2))


@pytest.mark.cell("Hydra", "clip")
def test_clip():
    model = tiny()
    found = train(model, make(model, clip_norm=0.1, **OPTIONS), range(3))
    same(found, by_hand(range(3), {**OPTIONS, "clip_norm": 0.1}))
    assert found[1].grad_norm > 0.1


@pytest.mark.cell("Hydra", "release")
def test_release():
    model = tiny()
    same(train(model, make(model, gradient_release=True, **OPTIONS), range(3)), by_hand(range(3)))


@pytest.mark.cell("Hydra", "EMA")
def test_ema():
    from hydra.utils import instantiate

    model = tiny()
    opt = make(model, **OPTIONS)
    ema = instantiate({"_target_": "halfstep.EMA", "decay": 0.9}, model=model)
    for step in range(3):
        train(model, opt, [step])
        ema.update_parameters(model, optimizer=opt)
    same((model, opt), by_hand(range(3)))
    weights = [(bits(p), bits(q)) for p, q in zip(model.parameters(), ema.module.parameters())]
    assert all(p != q for p, q in weights)
