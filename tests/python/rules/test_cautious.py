"""Tests cautious groups against the authors' code, and pytorch-optimizer's where it masks the same
update."""

import pytest
import torch
from conftest import (
    RECIPES,
    another,
    class_of,
    make,
    network,
    run,
    same,
    train,
)
from test_new_rules import adopt_clip, check

import halfstep
from halfstep._library import abi

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")

CAUTIOUS = [rule for rule in abi.rules if abi.rules[rule].cautious]


def authors_scale(update, grad):
    """The scale of Liang et al. 2024 in their present code. pytorch-optimizer has numel / (sum +
    1), without a bound."""
    mask = (update * grad > 0).to(grad.dtype)
    update.mul_(mask.div_(mask.mean().clamp_(min=1e-3)))


class CAdamW(torch.optim.Optimizer):
    """Algorithm 1 of the paper around AdamW, with eps and decay where torch has them."""

    def __init__(self, params, lr, weight_decay):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                s["t"] += 1
                s["m"].lerp_(p.grad, 0.1)
                s["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                update = s["m"] / (1 - 0.9 ** s["t"])
                authors_scale(update, p.grad)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(
                    update, (s["v"] / (1 - 0.999 ** s["t"])).sqrt().add_(1e-8), value=-group["lr"]
                )


def test_adamw_is_the_authors():
    options = {"lr": 1e-2, "weight_decay": 0.1}
    check(halfstep.AdamW, {"cautious": True, **options}, CAdamW, options)


@pytest.mark.parametrize(
    "name, rate, ours_has, theirs_has",
    [
        ("Lion", 3e-3, {"weight_decay": 0.1}, {"weight_decay": 0.1, "weight_decouple": True}),
        (
            "ADOPT",
            1e-2,
            {"betas": (0.8, 0.99)},
            {"betas": (0.8, 0.99), "clip_lambda": adopt_clip, "foreach": False},
        ),
        # alpha 0: it masks the fast average alone, and the slow one never
        ("AdEMAMix", 1e-2, {"alpha": 0.0}, {"alpha": 0.0, "foreach": False}),
    ],
)
def test_pytorch_optimizer_s(monkeypatch, name, rate, ours_has, theirs_has):
    peer = getattr(pytorch_optimizer, name)
    monkeypatch.setattr(peer, "apply_cautious", staticmethod(authors_scale))
    common = {"lr": rate, "cautious": True}
    check(getattr(halfstep, name), {**common, **ours_has}, peer, {**common, **theirs_has})


@pytest.mark.parametrize("rule", abi.rules)
def test_who_has_it(rule):
    """Every class whose rule has a sign to compare has the option. Other classes and groups refuse
    it."""
    if abi.rules[rule].raw_gradient:
        return
    p = torch.nn.Parameter(torch.ones(4, 40))
    if rule in CAUTIOUS:
        assert class_of(rule)([p], cautious=True).param_groups[0]["cautious"] is True
        assert class_of(rule)([p]).param_groups[0]["cautious"] is False
        return
    with pytest.raises(TypeError, match="cautious"):
        class_of(rule)([p], cautious=True)
    opt = class_of(rule)([{"params": [p], "cautious": True}])
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=f"{rule} cannot be cautious: "):
        opt.step()
    assert torch.equal(p, torch.ones(4, 40))


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_read_at_each_step_and_saved(recipe):
    params, opt = make("adamw", recipe, lr=0.01)
    others, other = make("adamw", recipe, lr=0.01)
    for step in range(8):
        opt.param_groups[0]["cautious"] = other.param_groups[0]["cautious"] = step in (2, 3, 6)
        for o, ps in ((opt, params), (other, others)):
            run(o, ps, step, step + 1)
        if step == 3:
            saved = opt.state_dict()
            assert saved["param_groups"][0]["cautious"] is True
            params, opt = another(params, "adamw", recipe)
            opt.load_state_dict(saved)
    same(opt, other, params, others)


@pytest.mark.parametrize("rule", ["adamw", "lion", "adan"])
def test_release_has_the_bits_of_a_step(rule):
    dtype, formats = RECIPES["ecc8-int8"]
    models, opts = [network(dtype) for _ in range(2)], []
    for model, release in zip(models, (True, False)):
        options = {"lr": 0.01, "gradient_release": release, "cautious": True, "seed": 0}
        opts.append(class_of(rule)(model.named_parameters(), **options, **formats))
        train(model, opts[-1], 0, 4)
    same(*opts, *models)
