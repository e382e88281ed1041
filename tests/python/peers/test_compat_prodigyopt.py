"""Tests the interface of prodigyopt against the package."""

import copy
import inspect

import pytest
import torch

import halfstep
from halfstep.compat.prodigyopt import Prodigy

prodigyopt = pytest.importorskip("prodigyopt")

SHAPES = {"w": (24, 40), "b": (40,), "k": (4, 3, 5), "zeros": (6,), "s": ()}


def values():
    torch.manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.zeros(shape) if name == "zeros" else torch.randn(shape))
        for name, shape in SHAPES.items()
    }


def steps(many, first, ours, opt, theirs, peer):
    """Steps both with gradients of a quadratic with noise, computed at the weights of `ours`."""
    for step in range(first, first + many):
        source = torch.Generator().manual_seed(step)
        for name, p in ours.items():
            p.grad = 0.1 * p.detach() + 0.05 * torch.randn(p.shape, generator=source)
            theirs[name].grad = p.grad.clone()
        opt.step()
        peer.step()


def same(ours, opt, theirs, peer):
    for here, there in zip(opt.param_groups, peer.param_groups):
        assert here["d"] == pytest.approx(there["d"], rel=1e-3) and here["d_max"] == pytest.approx(
            there["d_max"], rel=1e-3
        )
        assert here["d_numerator"] == pytest.approx(there["d_numerator"], rel=1e-3)
    start, moved = values(), 0
    for name, p in ours.items():
        reach = (p - start[name]).abs().max().item()
        assert (p - theirs[name]).abs().max().item() <= 1e-3 * reach
        moved = max(moved, reach)
    assert moved > 1e-3


def test_signature():
    ours, theirs = (
        list(inspect.signature(cls.__init__).parameters.values())
        for cls in (Prodigy, prodigyopt.Prodigy)
    )
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [
        (p.name, p.default) for p in theirs
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_bias_correction": True, "safeguard_warmup": True, "weight_decay": 0.01, "d0": 1e-3},
        {"decouple": False, "weight_decay": 0.1},
        {"beta3": 0.95, "betas": (0.9, 0.99), "growth_rate": 1.5, "d0": 1e-3},
        {"slice_p": 11, "d0": 1e-3},
        {"slice_p": 1000},
    ],
    ids=["default", "sd-scripts", "l2", "growth", "slices", "first elements"],
)
def test_follows_the_package(options):
    ours, theirs = values(), values()
    opt, peer = Prodigy(ours.values(), **options), prodigyopt.Prodigy(theirs.values(), **options)
    steps(50, 0, ours, opt, theirs, peer)
    same(ours, opt, theirs, peer)


def test_options_of_groups():
    ours, theirs = values(), values()

    def groups(params):
        params = list(params.values())
        return [
            {"params": params[:2], "weight_decay": 0.1},
            {"params": params[2:], "weight_decay": 0.0},
        ]

    options = {"use_bias_correction": True, "d0": 1e-3}
    opt, peer = Prodigy(groups(ours), **options), prodigyopt.Prodigy(groups(theirs), **options)
    steps(30, 0, ours, opt, theirs, peer)
    same(ours, opt, theirs, peer)
    own = Prodigy(
        [
            {
                "params": list(values().values()),
                "beta3": 0.5,
                "decouple": False,
                "use_bias_correction": True,
                "growth_rate": 2.0,
            }
        ]
    )
    group = own.param_groups[0]
    assert (group["betas"], group["decay"], group["debias"], group["growth_rate"]) == (
        (0.9, 0.999, 0.5),
        "l2",
        True,
        2.0,
    )


@pytest.mark.parametrize("cls", [Prodigy, halfstep.Prodigy])
@pytest.mark.parametrize("betas, slice_p", [((0.9, 0.999), 1), ((0.0, 0.99), 1), ((0.9, 0.999), 7)])
def test_what_the_package_saved(cls, betas, slice_p):
    """A state from the middle of a run: states, the estimate and the options go on."""
    ours, theirs = values(), values()
    options = {"betas": betas, "slice_p": slice_p, "d0": 1e-3}
    first, peer = (
        Prodigy(ours.values(), **options),
        prodigyopt.Prodigy(theirs.values(), weight_decay=0.01, **options),
    )
    steps(20, 0, ours, first, theirs, peer)
    for name, p in ours.items():
        p.data.copy_(theirs[name].data)
    opt = cls(ours.values())
    opt.load_state_dict(copy.deepcopy(peer.state_dict()))
    assert opt.param_groups[0]["weight_decay"] == 0.01 and opt.param_groups[0]["betas"] == (
        *betas,
        0.0,
    )
    assert opt.param_groups[0]["slice_p"] == slice_p
    steps(20, 20, ours, opt, theirs, peer)
    assert all(
        opt.scalar(p, "d") == pytest.approx(peer.param_groups[0]["d"], rel=1e-3)
        for p in ours.values()
    )
    for name, p in ours.items():
        assert torch.allclose(p, theirs[name], rtol=0, atol=2e-5)
    if cls is Prodigy:
        same(ours, opt, theirs, peer)
        again = Prodigy(values().values())
        again.load_state_dict(copy.deepcopy(opt.state_dict()))
        assert again.param_groups[0]["d"] == opt.param_groups[0]["d"] > 1e-3


def test_errors():
    params = values()
    for option, what in (
        ({"d0": 0.0}, "d0"),
        ({"lr": 0.0}, "learning rate"),
        ({"eps": 0.0}, "epsilon"),
        ({"betas": (1.0, 0.9)}, "index 0"),
        ({"slice_p": 0}, "slice_p"),
    ):
        with pytest.raises(ValueError, match=what):
            Prodigy(params.values(), **option)
    opt = Prodigy([{"params": [params["w"]], "lr": 1.0}, {"params": [params["b"]], "lr": 0.5}])
    params["w"].grad = params["b"].grad = None
    with pytest.raises(RuntimeError, match="Setting different lr values"):
        opt.step()
    with pytest.raises(ValueError, match="sums over the gradients"):
        Prodigy(params.values(), gradient_release=True)
