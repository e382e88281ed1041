"""Tests the interface of the LAMB16 package, which no registry offers, against its documented
signatures and rules."""

import collections
import inspect

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import everything, parameters, run, saved, twins

import halfstep
from halfstep.compat import lamb16
from halfstep.compat.lamb16 import Lamb, Lamb16, log_lamb_rs


def leading(callable):
    return [
        (p.name, p.default)
        for p in inspect.signature(callable).parameters.values()
        if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]


def test_public_names():
    assert sorted(lamb16.__all__) == ["Lamb", "Lamb16", "log_lamb_rs"]


def test_signatures():
    empty = inspect.Parameter.empty
    common = [
        ("params", empty),
        ("lr", 1e-3),
        ("betas", (0.9, 0.999)),
        ("eps", 1e-6),
        ("weight_decay", 0),
    ]
    assert leading(Lamb16) == common + [("trust_scale", 0.382)]
    assert leading(Lamb) == common + [("adam", False)]
    assert leading(log_lamb_rs) == [
        ("optimizer", empty),
        ("event_writer", empty),
        ("token_count", empty),
    ]


def gradient(shape, step):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step)) * 0.1


def make_steps(opt, p, steps):
    for t in range(steps):
        p.grad = gradient(p.shape, t).to(p.dtype)
        opt.step()


# ---- The rules, in fp64 --------------------------------------------------------------------------


def exact_lamb(w, steps, lr, betas, eps, decay, adam):
    w = w.double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t in range(steps):
        g = gradient(w.shape, t).double()
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        u = m / (v.sqrt() + eps) + decay * w
        norm, length = w.norm().clamp(0, 10), u.norm()
        ratio = 1.0 if adam or norm == 0 or length == 0 else norm / length
        w = w - lr * ratio * u
    return w


@pytest.mark.parametrize("scale", [0.0, 0.02, 5.0], ids=["zero", "small", "capped"])
@pytest.mark.parametrize("adam", [False, True], ids=["lamb", "adam"])
def test_lamb(scale, adam):
    start = torch.randn(20, 30) * scale
    p = nn.Parameter(start.clone())
    opt = Lamb([p], 1e-2, (0.8, 0.99), 1e-5, 0.1, adam)
    make_steps(opt, p, 60)
    wanted = exact_lamb(start, 60, 1e-2, (0.8, 0.99), 1e-5, 0.1, adam)
    torch.testing.assert_close(p.detach().double(), wanted, rtol=2e-6, atol=2e-6)


def test_lamb_is_not_the_paper_s():
    """halfstep.Lamb corrects the bias of the first steps; this class does not."""
    ours, paper = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    for p, opt in ((ours, Lamb([ours], adam=True)), (paper, halfstep.Lamb([paper], adam=True))):
        p.grad = torch.ones_like(p)
        opt.step()
    assert (1 - ours).mean().item() == pytest.approx(1e-3 * 0.1 / 0.001**0.5, rel=1e-3)
    assert (1 - paper).mean().item() == pytest.approx(1e-3, rel=1e-3)


def exact_lamb16(w, steps, lr, betas, eps, decay, scale, store=None):
    """The package's rule in double. `store` takes m and v and returns what the package keeps of
    them."""
    w = w.double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    ratio = None
    for t in range(steps):
        g = gradient(w.shape, t).double()
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        u = m / (v.sqrt() + eps) + decay * w
        norm = (w**2).clip(eps, 1).sum().sqrt() / w.numel()
        length = (u**2).clip(eps, 1).sum().sqrt() / w.numel()
        ratio = (norm / length * 1e-3 / lr) ** scale
        w = w - lr * ratio.clamp(0, 2) * u
        if store:
            m, v = store(m, v, eps)
    return w, ratio.clamp(0, 2)


@pytest.mark.parametrize(
    "lr, scale, decay",
    [(1e-3, 0.382, 0.0), (0.02, 0.382, 0.01), (1e-5, 0.618, 0.1), (0.02, 0.0, 0.01)],
)
def test_lamb16(lr, scale, decay):
    start = torch.randn(20, 30) * 0.1
    p = nn.Parameter(start.clone())
    opt = Lamb16([p], lr, (0.8, 0.99), 1e-6, decay, scale, states="f32")
    make_steps(opt, p, 60)
    wanted, ratio = exact_lamb16(start, 60, lr, (0.8, 0.99), 1e-6, decay, scale)
    torch.testing.assert_close(p.detach().double(), wanted, rtol=2e-6, atol=2e-6)
    assert opt.scalar(p, "trust_ratio") == pytest.approx(ratio.item(), rel=1e-5)


def published(m, v, eps):
    scale_m = (m**2).clip(0, 10).sum().sqrt() / m.numel() + eps
    scale_v = (v**2).clip(0, 10).sum().sqrt() / v.numel() + eps
    m = (m / scale_m).clip(-15, 15).float().to(torch.float8_e4m3fn)
    v = (v.clip(0, 10) / scale_v).float().to(torch.float8_e5m2)
    return m.double() * scale_m, v.double() * scale_v


@pytest.mark.skipif(not hasattr(torch, "float8_e4m3fn"), reason="torch without float8")
def test_published_scaling():
    """states="fp8-lamb16" keeps what the package keeps. Codes at a tie may differ, so a few
    elements do."""
    start = torch.randn(40, 50) * 0.1
    p = nn.Parameter(start.clone())
    opt = Lamb16([p], 0.02, (0.9, 0.999), 1e-6, 0.01, states="fp8-lamb16")
    make_steps(opt, p, 20)
    wanted, _ = exact_lamb16(start, 20, 0.02, (0.9, 0.999), 1e-6, 0.01, 0.382, published)
    wide, _ = exact_lamb16(start, 20, 0.02, (0.9, 0.999), 1e-6, 0.01, 0.382)
    moved = (wanted - start).norm()
    assert (p.detach() - wanted).norm() < 0.01 * moved
    assert (wide - wanted).norm() > 0.1 * moved, "the control: exact states go elsewhere"
    assert opt.recipe(p) == "lamb16/f32/fp8-lamb16"


def test_states_take_a_quarter_of_adam_s():
    p = nn.Parameter(torch.randn(256, 512))
    p.grad = torch.randn_like(p)
    made = {
        "lamb16": Lamb16([p]),
        "published": Lamb16([p], states="fp8-lamb16"),
        "adam": halfstep.Adam([p]),
    }
    held = {}
    for name, opt in made.items():
        opt.step()
        held[name] = sum(t.nbytes for t in opt.state[p].values() if isinstance(t, torch.Tensor))
    assert held["published"] == pytest.approx(held["adam"] / 4, rel=1e-3)
    assert held["lamb16"] == pytest.approx(held["adam"] / 4, rel=0.04)  # scales for each 128


def test_nothing_moves_at_lr_0():
    p = nn.Parameter(torch.randn(8, 128).bfloat16())
    before = p.detach().clone()
    for opt in (Lamb16([p], lr=0.0, weight_decay=0.1), Lamb([p], lr=0.0, weight_decay=0.1)):
        make_steps(opt, p, 3)
    assert torch.equal(p, before)


@pytest.mark.parametrize("make", [Lamb, Lamb16])
@pytest.mark.parametrize(
    "options, text",
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"eps": -1.0}, "Invalid epsilon value: -1.0"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, 1.5)}, "Invalid beta parameter at index 1: 1.5"),
        ({"trust_scales": 1}, "trust_scales"),
    ],
)
def test_errors(make, options, text):
    with pytest.raises((ValueError, TypeError), match=text):
        make([nn.Parameter(torch.ones(3))], **options)


# ---- Saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, options", [(Lamb16, {}), (Lamb16, {"states": "fp8-lamb16"}), (Lamb, {"adam": True})]
)
def test_resume_is_bit_exact(make, options):
    params = parameters(shapes={"a": (12, 256), "b": (33,)})
    opt = make(params.items(), lr=0.02, weight_decay=0.01, **options)
    run(opt, params, 0, 6)
    others = twins(params)
    resumed = make(others.items(), **options)
    resumed.load_state_dict(saved(opt.state_dict()))
    run(opt, params, 6, 12)
    run(resumed, others, 6, 12)
    assert everything(resumed) == everything(opt)


@pytest.mark.skipif(not hasattr(torch, "float8_e4m3fn"), reason="torch without float8")
def test_states_of_the_package_load():
    p = nn.Parameter(torch.randn(12, 256))
    state = {
        "step": 7,
        "exp_avg": torch.randn(12, 256).to(torch.float8_e4m3fn),
        "exp_avg_norm": torch.tensor(1e-3),
        "exp_avg_sq": torch.rand(12, 256).to(torch.float8_e5m2),
        "exp_avg_sq_norm": torch.tensor(1e-5),
        "weight_norm": torch.tensor(0.5),
        "adam_norm": torch.tensor(0.25),
        "trust_ratio": torch.tensor(1.5),
    }
    group = {
        "lr": 0.5,
        "betas": (0.8, 0.9),
        "eps": 1e-5,
        "weight_decay": 0.125,
        "trust_scale": 0.25,
        "params": [0],
    }
    opt = Lamb16([p], states="f32")
    opt.load_state_dict({"state": {0: state}, "param_groups": [group]})
    torch.testing.assert_close(opt.read_state(p, "exp_avg"), state["exp_avg"].float() * 1e-3)
    torch.testing.assert_close(opt.read_state(p, "exp_avg_sq"), state["exp_avg_sq"].float() * 1e-5)
    assert [opt.scalar(p, name) for name in ("weight_norm", "update_norm", "trust_ratio")] == [
        0.5,
        0.25,
        1.5,
    ]
    assert [
        opt.param_groups[0][key] for key in ("lr", "betas", "eps", "weight_decay", "trust_scale")
    ] == [0.5, (0.8, 0.9), 1e-5, 0.125, 0.25]
    p.grad = torch.randn_like(p)
    opt.step()
    assert opt.state[p]["step"].item() == 8


# ---- Its script ----------------------------------------------------------------------------------


class Writer:
    """Takes the place of a SummaryWriter."""

    def __init__(self):
        self.histograms = collections.defaultdict(list)

    def add_histogram(self, tag, values, global_step):
        assert isinstance(values, torch.Tensor)
        self.histograms[tag].append((global_step, values))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 5, 1)
        self.fc1 = nn.Linear(12 * 12 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 2)
        return F.log_softmax(self.fc1(x.view(-1, 12 * 12 * 4)), dim=1)


class Args:
    lr, wd = 0.01, 0.01


def bars(n, generator):
    """Pictures of ten kinds: a bright column at a tenth of the width."""
    target = torch.randint(10, (n,), generator=generator)
    data = torch.randn(n, 1, 28, 28, generator=generator)
    data[torch.arange(n), 0, :, 4 + 2 * target] += 2
    return data, target


@pytest.mark.parametrize("name", ["lamb16", "lamb"])
def test_training_script(name):
    model, args, event_writer = Net(), Args(), Writer()
    generator = torch.Generator().manual_seed(1)
    # ---- the package's script, its optimizers' lines
    if name == "lamb16":
        optimizer = Lamb16(model.parameters(), lr=args.lr, weight_decay=args.wd, betas=(0.9, 0.999))
    if name == "lamb":
        optimizer = Lamb(
            model.parameters(), lr=args.lr, weight_decay=args.wd, betas=(0.9, 0.999), adam=False
        )
    losses = []
    for step in range(60):
        data, target = bars(64, generator)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            log_lamb_rs(optimizer, event_writer, step)
        losses.append(loss.item())
    # ----
    assert losses[0] > 2.0 and sum(losses[-5:]) / 5 < 1.0
    assert sorted(event_writer.histograms) == [
        "lamb/adam_norm",
        "lamb/trust_ratio",
        "lamb/weight_norm",
    ]
    for tag, scalar in (
        ("adam_norm", "update_norm"),
        ("trust_ratio", "trust_ratio"),
        ("weight_norm", "weight_norm"),
    ):
        entries = event_writer.histograms["lamb/" + tag]
        assert [step for step, _ in entries] == list(range(0, 60, 10))
        assert all(values.shape == (4,) and (values > 0).all() for _, values in entries)
    log_lamb_rs(optimizer, event_writer, 60)
    assert event_writer.histograms["lamb/trust_ratio"][-1][1].tolist() == pytest.approx(
        [optimizer.scalar(p, "trust_ratio") for p in model.parameters()]
    )


def test_other_optimizers_log_nothing():
    model, event_writer = Net(), Writer()
    optimizer = torch.optim.Adam(model.parameters())
    model(bars(4, None)[0]).sum().backward()
    optimizer.step()
    log_lamb_rs(optimizer, event_writer, 0)
    log_lamb_rs(Lamb16(model.parameters()), event_writer, 0)
    assert not event_writer.histograms
