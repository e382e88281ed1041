"""Tests halfstep.compat.torchao beside the installed torchao. Names, signatures and trajectories
must be the same; torchao's explosions must not occur. torchao compiles its step. Here it runs the
same Python code uncompiled ("force_eager"), which needs no compiler and no minutes.

Its classes draw random bits from torch's global generator and ours do not. So with stochastic
rounding two runs are compared by their distance. It must be about that of two runs of torchao with
different seeds.
"""

import copy
import inspect
import logging
import pickle

import pytest
import torch
from conftest import streams

from halfstep.compat import torchao as ours

logging.disable(logging.WARNING)  # torchao reports the GPU libraries that it cannot load
peers = pytest.importorskip("torchao.optim")
logging.disable(logging.NOTSET)

LOW_BIT = ["Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8"]
ADAMS = LOW_BIT + ["_AdamW"]
#: bytes of a state, an element, scales included
BYTES = {"8bit": 1.0625, "4bit": 0.5625, "Fp8": 1.03125}
#: largest distance of two runs of different 8-bit, fp8 or 4-bit formats after 50 steps. The unit
#: is the way that torch's optimizer goes. Measured in test_trajectory_in_fp32: ours to torchao's
#: 0.024, 0.053, 0.28; torchao's to torch's 0.015, 0.037, 0.21; ours to torch's 0.018, 0.043, 0.18.
TOLERANCE = {"8bit": 0.04, "4bit": 0.36, "Fp8": 0.08, "": 1e-4}


@pytest.fixture(autouse=True)
def eager():
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def shape_of(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def width(name):
    return "" if name == "_AdamW" else name.replace("AdamW", "").replace("Adam", "")


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128)
    ).to(dtype)


def train(opt, model, steps=50):
    """Learns a linear map from the same data for all. Returns the losses."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(128, 128, generator=generator) / 11
    dtype, losses = next(model.parameters()).dtype, []
    for _ in range(steps):
        x = torch.randn(64, 128, generator=generator)
        loss = (model(x.to(dtype)).float() - x @ target).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def vector(model):
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


# ---- Names and signatures ------------------------------------------------------------------------


def test_every_public_name_is_there():
    assert set(ours.__all__) == set(peers.__all__)
    for name in peers.__all__:
        assert isinstance(getattr(ours, name), type)
        assert issubclass(getattr(ours, name), torch.optim.Optimizer)


@pytest.mark.parametrize("name", peers.__all__)
def test_signatures_are_the_peers(name):
    assert shape_of(getattr(ours, name)) == shape_of(getattr(peers, name))


# ---- The README's snippets -----------------------------------------------------------------------


def test_snippets_of_cpu_offload(tmp_path):
    CPUOffloadOptimizer = ours.CPUOffloadOptimizer
    model = net()

    # only offload optimizer state
    optim = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
    # offload optimizer state AND gradients
    CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True)

    train(optim, model, 3)
    torch.save(
        {"model": model.state_dict(), "optim": optim.state_dict()}, tmp_path / "checkpoint.pth"
    )
    ckpt = torch.load(tmp_path / "checkpoint.pth")

    model = net()
    model.load_state_dict(ckpt["model"])

    optim = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
    optim.load_state_dict(ckpt["optim"])
    assert float(optim.state[model[0].weight]["step"]) == 3

    lr = 0.0  # compute your desired LR value
    for param_group in optim.param_groups:
        if isinstance(param_group["lr"], torch.Tensor):
            param_group["lr"].fill_(lr)
        else:
            param_group["lr"] = lr
    before = vector(model)
    train(optim, model, 1)
    assert torch.equal(vector(model), before)


# ---- Trajectories --------------------------------------------------------------------------------


def assert_follows(end, begin, allowed):
    """Judges runs from `begin`, given as (weights, loss) by name. Ours must end near torchao's, but
    for the noise between two runs of torchao, and near exact Adam."""
    way = (end["exact"][0] - vector(begin)).norm()

    def distance(a, b):
        return float((end[a][0] - end[b][0]).norm() / way)

    noise = distance("peer", "peer again") if "peer again" in end else 0.0
    assert distance("ours", "peer") < 1.2 * noise + allowed
    # Ours is not farther from exact Adam than torchao, except for what 1.0625 and 1.0156 bytes may
    # differ in.
    assert distance("ours", "exact") < 1.4 * distance("peer", "exact")
    assert abs(end["ours"][1] - end["exact"][1]) < 0.01 * end["exact"][1]


@pytest.mark.parametrize(
    "name", [name if "W" in name else pytest.param(name, marks=pytest.mark.all) for name in ADAMS]
)
def test_trajectory_in_fp32(name):
    end = {}
    for tag, make in (
        ("peer", getattr(peers, name)),
        ("ours", getattr(ours, name)),
        ("exact", torch.optim.AdamW if "W" in name else torch.optim.Adam),
    ):
        model = net()
        losses = train(make(model.parameters(), lr=1e-3, weight_decay=1e-2), model)
        end[tag] = vector(model), sum(losses[-5:]) / 5
    if name == "_AdamW":  # nothing is quantized: optimi's tolerances of conventions.md 2.4
        off = ~torch.isclose(end["ours"][0], end["peer"][0], rtol=1e-5, atol=1e-6)
        assert off.float().mean() < 5e-4
        return
    assert_follows(end, net(), TOLERANCE[width(name)])


@pytest.mark.all
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("name", ADAMS)
def test_trajectory_in_bf16(name, stochastic):
    """As in fp32. With stochastic rounding the measure is torchao with another seed (0.03 to 0.11
    of the way)."""
    end = {}
    for tag, make, seed in (
        ("peer", getattr(peers, name), 7),
        ("peer again", getattr(peers, name), 8),
        ("ours", getattr(ours, name), 7),
    ):
        if tag == "peer again" and not stochastic:
            continue
        model = net(torch.bfloat16)
        torch.manual_seed(seed)
        losses = train(
            make(model.parameters(), lr=1e-3, weight_decay=1e-2, bf16_stochastic_round=stochastic),
            model,
        )
        end[tag] = vector(model), sum(losses[-5:]) / 5
    exact = net()
    with torch.no_grad():
        for p, q in zip(exact.parameters(), net(torch.bfloat16).parameters()):
            p.copy_(q)
    kind = torch.optim.AdamW if "W" in name else torch.optim.Adam
    losses = train(kind(exact.parameters(), lr=1e-3, weight_decay=1e-2), exact)
    end["exact"] = vector(exact), sum(losses[-5:]) / 5
    # torchao's _AdamW rounds its BF16 states to nearest, which is 0.02 of the way here.
    assert_follows(end, net(torch.bfloat16), max(TOLERANCE[width(name)], 0.02))


@pytest.mark.parametrize("name", ADAMS)
def test_amsgrad(name):
    """Gradients fall, so that runs with and without amsgrad part."""
    end = {}
    kind = torch.optim.AdamW if "W" in name else torch.optim.Adam
    for tag, make in (("ours", getattr(ours, name)), ("exact", kind), ("plain", kind)):
        p = torch.nn.Parameter(torch.ones(128, 128))
        opt = make([p], lr=1e-3, weight_decay=1e-2, betas=(0.9, 0.9), amsgrad=tag != "plain")
        generator = torch.Generator().manual_seed(5)
        for step in range(60):
            p.grad = (1 + torch.randn(128, 128, generator=generator)) / (1 + step)
            opt.step()
        end[tag] = p.detach() - 1
    way = end["exact"].norm()
    assert (end["ours"] - end["exact"]).norm() < TOLERANCE[width(name)] * way
    assert (end["plain"] - end["exact"]).norm() > 0.5 * way


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamWFp8"])
def test_no_update_explodes(name):
    """Gradients whose sizes within a block are log-normal, sigma 2. torchao stores small second
    moments as zero."""
    generator = torch.Generator().manual_seed(3)
    size = torch.exp(2 * torch.randn(16, 1024, generator=generator))
    worst = {}
    for tag, module in (("ours", ours), ("peer", peers)):
        p = torch.nn.Parameter(torch.zeros(16, 1024))
        opt = getattr(module, name)([p], lr=1e-3, weight_decay=0.0)
        draws, largest = torch.Generator().manual_seed(4), 0.0
        for _ in range(150):
            p.grad = size * torch.randn(16, 1024, generator=draws)
            before = p.detach().clone()
            opt.step()
            largest = max(largest, float((p.detach() - before).abs().max()) / 1e-3)
        worst[tag] = largest
    assert worst["ours"] < 3.0
    assert worst["peer"] > 100.0


# ---- States and weights --------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOW_BIT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_have_the_advertised_width(name, dtype):
    p = torch.nn.Parameter(torch.randn(256, 512).to(dtype))
    opt = getattr(ours, name)([p])
    p.grad = torch.randn(256, 512).to(dtype)
    opt.step()
    assert opt.memory()["states"] == 2 * BYTES[width(name)] * p.numel()
    assert sum(t.nbytes for t in streams(opt, p).values()) == opt.memory()["states"]
    assert not opt.fell_back()


def test_stochastic_rounding_moves_what_nearest_cannot():
    end = {}
    for stochastic in (True, False):
        for name in ADAMS:
            p = torch.nn.Parameter(torch.ones(256, 256, dtype=torch.bfloat16))
            opt = getattr(ours, name)(
                [p], lr=1e-5, weight_decay=0.0, bf16_stochastic_round=stochastic
            )
            for _ in range(100):
                p.grad = torch.ones_like(p)
                opt.step()
            end[name, stochastic] = p.detach().float()
    for name in ADAMS:
        assert torch.equal(end[name, False], torch.ones(256, 256))
        moved = 1.0 - end[name, True]
        assert (moved > 0).float().mean() > 0.1
        # Equal gradients make updates of lr each; coarse codes may be off by their own error.
        bias = (0.06 if width(name) == "4bit" else 0.01) * 1e-3
        assert abs(float(moved.mean()) - 100e-5) < 5 * float(moved.std()) / 256 + bias


@pytest.mark.parametrize("name", ADAMS)
def test_a_model_of_mixed_dtypes(name):
    """Stochastic rounding is for BF16 parameters. float32 ones get the bits that they get without
    it."""
    end = {}
    for stochastic in (True, False):
        torch.manual_seed(0)
        params = {
            d: torch.nn.Parameter(torch.randn(128, 128).to(d))
            for d in (torch.float32, torch.bfloat16, torch.float16)
        }
        opt = getattr(ours, name)(
            [(str(d), p) for d, p in params.items()], lr=1e-3, bf16_stochastic_round=stochastic
        )
        formats = {d: opt.recipe(p).split("/")[1] for d, p in params.items()}
        assert formats == {
            torch.float32: "f32",
            torch.bfloat16: "bf16-sr" if stochastic else "bf16",
            torch.float16: "f16",
        }
        assert opt.bf16_stochastic_round is stochastic
        for step in range(3):
            for p in params.values():
                p.grad = torch.randn(128, 128).to(p.dtype)
            opt.step()
        end[stochastic] = {d: p.detach().clone() for d, p in params.items()}
        assert all(p.dtype == d for d, p in params.items())
    assert torch.equal(end[True][torch.float32], end[False][torch.float32])
    assert torch.equal(end[True][torch.float16], end[False][torch.float16])
    assert not torch.equal(end[True][torch.bfloat16], end[False][torch.bfloat16])


def test_the_flag_is_read_at_each_step():
    p = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    opt = ours.AdamW8bit([p], lr=1e-5, weight_decay=0.0)
    p.grad = torch.ones_like(p)
    opt.step()
    assert torch.equal(p.detach(), torch.ones_like(p))
    opt.bf16_stochastic_round = True
    for _ in range(100):
        opt.step()
    assert (p.detach() != 1).any()
    assert opt.state[p]["step"] == 101


@pytest.mark.parametrize("name", LOW_BIT)
def test_block_sizes(name):
    finest = 128 if name.endswith("Fp8") else 32
    make = getattr(ours, name)
    p = torch.nn.Parameter(torch.randn(64, 256))
    for size in (finest, 256, 2048):
        opt = make([p], block_size=size)
        assert opt.block_size == size
    for size in (0, -1, finest - 1, 64.5, True, "256", None):
        with pytest.raises((ValueError, TypeError), match="block_size"):
            if size is None:
                ours._AdamW([p], block_size=256)
            else:
                make([p], block_size=size)


def test_groups_may_have_formats_of_their_own():
    a, b = (torch.nn.Parameter(torch.randn(64, 256).bfloat16()) for _ in range(2))
    opt = ours.AdamW8bit(
        [
            {"params": [a], "states": "dyn8"},
            {"params": [b], "weights": "bf16-kahan", "states": "int4"},
        ]
    )
    assert [opt.recipe(p) for p in (a, b)] == ["adamw/bf16/dyn8", "adamw/bf16-kahan/int4"]


# ---- Learning rates ------------------------------------------------------------------------------


def test_lr_is_a_tensor_that_can_be_filled_or_replaced():
    p = torch.nn.Parameter(torch.zeros(128, 128))
    opt = ours.AdamW8bit([p], lr=1e-3, weight_decay=0.0)
    opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(4))], "lr": 5e-3})
    assert [(g["lr"].dtype, round(g["lr"].item(), 6)) for g in opt.param_groups] == [
        (torch.float32, 1e-3),
        (torch.float32, 5e-3),
    ]
    moved = []
    for change in ("none", "fill", "number", "tensor"):
        group = opt.param_groups[0]
        if change == "fill":
            group["lr"].fill_(2e-3)
        elif change == "number":
            group["lr"] = 3e-3
        elif change == "tensor":
            group["lr"] = torch.tensor(4e-3, dtype=torch.float64)
        before = p.detach().clone()
        p.grad = torch.ones(128, 128)
        opt.step()
        moved.append(float((before - p.detach()).mean()))
    assert moved == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3], rel=0.02)


@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3)])
def test_schedulers(lr):
    p = torch.nn.Parameter(torch.zeros(128, 128))
    opt = ours.AdamW8bit([p], lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
    for step in range(3):
        before = p.detach().clone()
        p.grad = torch.ones(128, 128)
        opt.step()
        schedule.step()
        assert float((before - p.detach()).mean()) == pytest.approx(1e-3 * 0.5**step, rel=0.02)
    assert isinstance(opt.param_groups[0]["lr"], torch.Tensor)


# ---- Saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADAMS)
def test_resuming_is_exact(name, tmp_path):
    model = net(torch.bfloat16)
    opt = getattr(ours, name)(model.parameters(), bf16_stochastic_round=True)
    train(opt, model, 4)
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, tmp_path / "state.pt")
    train(opt, model, 4)

    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = net(torch.bfloat16)
    resumed.load_state_dict(saved["model"])
    opt = getattr(ours, name)(resumed.parameters(), bf16_stochastic_round=True)
    opt.load_state_dict(saved["opt"])
    assert isinstance(opt.param_groups[0]["lr"], torch.Tensor)
    train(opt, resumed, 4)
    assert torch.equal(vector(model), vector(resumed))


@pytest.mark.parametrize("name", ADAMS)
def test_states_of_torchao_load(name):
    """Makes twenty steps there, then thirty there and here. Runs differ by the formats' difference,
    not by a new start."""
    model = net()
    there = getattr(peers, name)(model.parameters(), lr=1e-3)
    train(there, model, 20)
    begin = vector(model)
    twin = net()
    twin.load_state_dict(model.state_dict())
    here = getattr(ours, name)(twin.parameters(), lr=1e-3)
    here.load_state_dict(there.state_dict())
    train(there, model, 30)
    train(here, twin, 30)
    way = (vector(model) - begin).norm()
    assert float((vector(twin) - vector(model)).norm() / way) < (
        0.4 if width(name) == "4bit" else 0.1
    )
    assert here.state[twin[0].weight]["step"] == 50


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(copied):
    model = net(torch.bfloat16)
    opt = ours.Adam4bit(model.parameters(), lr=1e-3, block_size=64, bf16_stochastic_round=True)
    train(opt, model, 2)
    other, model2 = copied((opt, model))
    train(opt, model, 2)
    train(other, model2, 2)
    assert torch.equal(vector(model), vector(model2))
    assert other.block_size == 64 and other.bf16_stochastic_round and not other.is_adamw


# ---- Offload, in CPU memory ----------------------------------------------------------------------


@pytest.mark.parametrize("inner", [torch.optim.AdamW, torch.optim.SGD, ours.AdamW8bit])
def test_offload_is_the_inner_optimizer(inner):
    end, rates = [], []
    for wrapped in (True, False):
        model = net()
        model[2].bias.requires_grad_(False)
        named = dict(model.named_parameters())  # the same names, the same random bits
        groups = [
            {"params": [(n, p) for n, p in named.items() if p.ndim == 2], "lr": 2e-3},
            {"params": [(n, p) for n, p in named.items() if p.ndim == 1]},
        ]
        options = {"fused": True} if inner is torch.optim.AdamW and not wrapped else {}
        opt = (
            ours.CPUOffloadOptimizer(groups, inner, lr=1e-3)
            if wrapped
            else inner(groups, lr=1e-3, **options)
        )
        schedule = torch.optim.lr_scheduler.StepLR(opt, 5)
        calls = []
        opt.register_step_post_hook(lambda *_: calls.append(1))
        for _ in range(3):
            train(opt, model, 4)
            schedule.step()
        assert len(calls) == 12
        end.append(vector(model))
        rates.append([float(g["lr"]) for g in opt.param_groups])
        assert sum(len(g["params"]) for g in opt.param_groups) == (3 if wrapped else 4)
    assert torch.equal(*end) and rates[0] == rates[1]


def test_offload_saves_copies_and_takes_groups():
    model = net()
    opt = ours.CPUOffloadOptimizer(model.parameters(), ours.AdamW8bit, lr=1e-3)
    train(opt, model, 2)
    twin = net()
    twin.load_state_dict(model.state_dict())
    other = ours.CPUOffloadOptimizer(twin.parameters(), ours.AdamW8bit, lr=1e-3)
    other.load_state_dict(opt.state_dict())
    third, model3 = copy.deepcopy((opt, model))
    for o, m in ((opt, model), (other, twin), (third, model3)):
        train(o, m, 2)
    assert torch.equal(vector(model), vector(twin)) and torch.equal(vector(model), vector(model3))
    opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    assert len(opt.param_groups) == 2
    assert opt.step(lambda: 3.5) == 3.5


def test_offload_refuses_what_it_cannot_do():
    with pytest.raises(NotImplementedError, match="meta"):
        ours.CPUOffloadOptimizer([torch.nn.Parameter(torch.zeros(3, device="meta"))])
    with pytest.raises(ValueError, match="empty parameter list"):
        ours.CPUOffloadOptimizer([])
    with pytest.raises(ValueError, match="requires a gradient"):
        ours.CPUOffloadOptimizer([torch.zeros(3)])
