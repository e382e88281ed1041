"""halfstep.compat.optimi against the installed torch-optimi: names, trajectories, release,
accumulation, its README."""

import copy
import importlib.metadata
import inspect
import math
import random

import documents
import pytest
import torch
from conftest import saved, told
from torch import nn

from halfstep.compat import optimi as ours

theirs = pytest.importorskip("optimi")

FP32, BF16 = dict(atol=1e-6, rtol=1e-5, rate=5e-4), dict(atol=1e-3, rtol=1e-2, rate=1e-2)
# class -> variants; the decay modes of conventions.md 2.4 C
VARIANTS = [
    ("Adam", {}),
    ("Adam", dict(weight_decay=1e-2)),
    ("Adam", dict(weight_decay=1e-2, decouple_wd=True)),
    ("Adam", dict(weight_decay=1e-5, decouple_lr=True)),
    ("AdamW", dict(weight_decay=0)),
    ("AdamW", {}),
    ("AdamW", dict(weight_decay=1e-5, decouple_lr=True, max_lr=2e-3)),
    ("Adan", dict(weight_decay=0)),
    ("Adan", {}),
    ("Adan", dict(weight_decay=2e-5, decouple_lr=True)),
    ("Lion", dict(lr=1e-4)),
    ("Lion", dict(lr=1e-4, weight_decay=0.1)),
    ("Lion", dict(lr=1e-4, weight_decay=1e-5, decouple_lr=True)),
    ("RAdam", {}),
    ("RAdam", dict(weight_decay=1e-2)),
    ("RAdam", dict(weight_decay=1e-2, decouple_wd=True)),
    ("RAdam", dict(weight_decay=1e-5, decouple_lr=True)),
    ("RAdam", dict(betas=(0.9, 0.6))),
    ("Ranger", {}),
    ("Ranger", dict(weight_decay=1e-2)),
    ("Ranger", dict(weight_decay=1e-2, decouple_wd=False)),
    ("Ranger", dict(weight_decay=1e-5, decouple_lr=True, k=4, alpha=0.7)),
    ("SGD", {}),
    ("SGD", dict(momentum=0.9)),
    ("SGD", dict(momentum=0.9, dampening=True)),
    ("SGD", dict(momentum=0.9, dampening=True, torch_init=True, weight_decay=1e-2)),
    ("SGD", dict(momentum=0.9, weight_decay=1e-2)),
    ("SGD", dict(weight_decay=1e-2, decouple_wd=True)),
    ("SGD", dict(momentum=0.9, weight_decay=1e-5, decouple_lr=True)),
    ("StableAdamW", dict(weight_decay=0)),
    ("StableAdamW", {}),
    ("StableAdamW", dict(weight_decay=1e-5, decouple_lr=True)),
]
IDS = [f"{name}-{'-'.join(f'{k}={v}' for k, v in options.items())}" for name, options in VARIANTS]


def make(module, name, params, options, **more):
    # triton=False, because optimi's StableAdamW would take its GPU kernels for CPU tensors wherever
    # Triton can be imported.
    options = {"lr": 1e-3, **options, **more}
    if module is theirs:
        options["triton"] = False
    return getattr(module, name)(params, **options)


class Net(nn.Module):
    def __init__(self, rows=64, columns=64):
        super().__init__()
        self.norm = nn.LayerNorm(rows)
        self.body = nn.Linear(rows, columns, bias=False)
        self.head = nn.Linear(columns, 1, bias=False)

    def forward(self, x):
        return self.head(nn.functional.mish(self.body(self.norm(x))))


def twins(*shape, dtype=torch.float32):
    mine = Net(*shape).to(dtype)
    return mine, copy.deepcopy(mine)


def assert_close(mine, judge, atol, rtol, rate):
    a, b = flat(mine), flat(judge)
    bad = ((a - b).abs() > atol + rtol * b.abs()).sum().item()
    assert bad <= max(rate * a.numel(), 2), (
        f"{bad} of {a.numel()} elements differ, by up to {(a - b).abs().max():.3g}"
    )


def reload(opt):
    opt.load_state_dict(saved(opt.state_dict()))


def flat(tensors):
    return torch.cat([t.detach().float().flatten() for t in tensors])


def set_gradients(mine, judge):
    """Sets the same random gradients for two models."""
    for p, q in zip(mine.parameters(), judge.parameters()):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.to(q.dtype, copy=True)


def batch(net):
    return torch.randn(4, net.norm.normalized_shape[0]), torch.randn(4, 1)


def backward(net, x, y):
    dtype = net.body.weight.dtype
    nn.functional.mse_loss(net(x.to(dtype)), y.to(dtype)).backward()


# ---- Names ---------------------------------------------------------------------------------------


def shape_of(thing):
    return [(p.name, p.kind, p.default) for p in inspect.signature(thing).parameters.values()]


def test_every_public_name_has_the_signature():
    public = [
        name
        for name, thing in vars(theirs).items()
        if not name.startswith("_") and not inspect.ismodule(thing)
    ]
    assert len(public) >= 20
    for name in public:
        assert shape_of(getattr(ours, name)) == shape_of(getattr(theirs, name)), name
        assert name in ours.__all__
    from optimi.optimizer import OptimiOptimizer

    for name in ("__init__", "step", "zero_grad"):
        assert shape_of(getattr(ours.OptimiOptimizer, name)) == shape_of(
            getattr(OptimiOptimizer, name)
        )
    for name, _ in VARIANTS:
        assert issubclass(getattr(ours, name), ours.OptimiOptimizer)


# ---- Trajectories --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 64), (64, 128)], ids=str)
@pytest.mark.parametrize("name, options", VARIANTS, ids=IDS)
def test_follows_in_fp32_through_saving_and_loading(name, options, shape):
    mine, judge = twins(*shape)
    a, b = (make(m, name, n.parameters(), options) for m, n in ((ours, mine), (theirs, judge)))
    for i in range(20):
        x, y = batch(mine)
        for net, opt in ((mine, a), (judge, b)):
            backward(net, x, y)
            opt.step()
            opt.zero_grad()
        if i % 7 == 3:
            reload(a)
        assert_close(mine.parameters(), judge.parameters(), **FP32)


@pytest.mark.parametrize("name, options", VARIANTS, ids=IDS)
def test_bf16_follows_the_peer_in_fp32(name, options):
    """Kahan summation must hold what 16 bits lose. The judge has float32 weights and the same
    gradients."""
    low = Net().to(torch.bfloat16)
    wide = copy.deepcopy(low).float()
    more = {"kahan_sum": True} if name == "Adan" else {}  # None elsewhere
    a, b = (
        make(ours, name, low.parameters(), options, **more),
        make(theirs, name, wide.parameters(), options),
    )
    for i in range(20):
        set_gradients(low, wide)
        a.step()
        b.step()
        if i % 5 == 4:
            reload(a)
    assert_close(low.parameters(), wide.parameters(), **BF16)
    for p in low.parameters():
        assert "/bf16-kahan" in a.recipe(p) and a.state[p]["weight.extra"].dtype == torch.bfloat16
        assert (a.read_weight(p) - p.float()).abs().max() <= p.abs().max() * 2**-8
    # Most of the 20 steps are far below a BF16 weight's last place. The weight with its residual is
    # nearer than the weight alone.
    meant, held = flat(wide.parameters()), flat(a.read_weight(p) for p in low.parameters())
    assert (held - meant).norm() < 0.5 * (flat(low.parameters()) - meant).norm()


@pytest.mark.parametrize(
    "name, options",
    [v for v in VARIANTS if v[0] not in ("Ranger", "Adan")],
    ids=[i for i, v in zip(IDS, VARIANTS) if v[0] not in ("Ranger", "Adan")],
)
def test_bf16_follows_the_peer_in_bf16(name, options):
    """The peer's own Kahan run. Its Ranger loses slow progress there (I-1), and its Adan divides
    the rounded weight."""
    mine, judge = twins(dtype=torch.bfloat16)
    a, b = (make(m, name, n.parameters(), options) for m, n in ((ours, mine), (theirs, judge)))
    for _ in range(20):
        set_gradients(mine, judge)
        a.step()
        b.step()
    assert_close(mine.parameters(), judge.parameters(), **BF16)


def test_slow_decay_acts_on_bf16():
    """The peer loses this decay altogether (I-5)."""
    low = nn.Parameter(torch.randn(64, 64).to(torch.bfloat16))
    twin = nn.Parameter(low.detach().clone())
    start = low.detach().float()
    a = ours.AdamW([low], lr=1e-3, weight_decay=1e-2)
    b = theirs.AdamW([twin], lr=1e-3, weight_decay=1e-2, triton=False)
    low.grad, twin.grad = torch.zeros_like(low), torch.zeros_like(twin)
    for _ in range(2000):
        a.step()
    for _ in range(100):
        b.step()
    left = (a.read_weight(low) * start).sum() / (start * start).sum()
    assert abs(left - (1 - 1e-5) ** 2000) < 2e-3
    assert torch.equal(twin, start.to(torch.bfloat16))


def test_adan_honours_adam_wd():
    """The peer's class takes the option and drops it (I-2); its function does not."""
    p = nn.Parameter(torch.randn(32, 32))
    q = p.detach().clone()
    opt = ours.Adan([p], lr=1e-2, weight_decay=0.5, adam_wd=True)
    states, step = [torch.zeros_like(q) for _ in range(3)], torch.tensor(0)
    for i in range(20):
        grad = torch.randn_like(q)
        p.grad = grad
        opt.step()
        if i == 0:
            states.append(-grad)
        theirs.adan(
            [q],
            [grad.clone()],
            *[[s] for s in states],
            lr=1e-2,
            beta1=0.98,
            beta2=0.92,
            beta3=0.99,
            weight_decay=0.5,
            eps=1e-6,
            step=step,
            adam_wd=True,
        )
    assert_close([p], [q], **FP32)


# ---- Options -------------------------------------------------------------------------------------


def test_kahan_by_itself_and_on_demand():
    low, half, wide = (
        nn.Parameter(torch.randn(8, 64).to(t))
        for t in (torch.bfloat16, torch.float16, torch.float32)
    )

    def recipes(cls, **options):
        opt = cls([low, half, wide], lr=1e-3, **options)
        return [opt.recipe(p) for p in (low, half, wide)]

    kahan = ["adamw/bf16-kahan/bf16-sr", "adamw/f16-kahan/bf16-sr", "adamw/f32/f32"]
    assert recipes(ours.AdamW) == recipes(ours.AdamW, kahan_sum=True) == kahan
    assert recipes(ours.AdamW, kahan_sum=False) == [
        "adamw/bf16/bf16-sr",
        "adamw/f16/bf16-sr",
        "adamw/f32/f32",
    ]
    assert ours.Adan([low], lr=1e-3).recipe(low).startswith("adan/bf16/")
    opt = ours.AdamW([{"params": [low], "states": "int8"}], lr=1e-3)
    assert opt.recipe(low) == "adamw/bf16-kahan/int8"


def test_fully_decoupled_decay_refers_to_each_group(caught):
    a, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    opt = ours.SGD(
        [{"params": [a]}, {"params": [b], "lr": 0.5}], lr=0.1, weight_decay=0.25, decouple_lr=True
    )
    assert [g["max_lr"] for g in opt.param_groups] == [0.1, 0.5]
    assert [str(w.message) for w in caught if "decouple_lr" in str(w.message)] and len(caught) == 1
    assert caught[0].filename == __file__
    a.grad, b.grad = torch.zeros(4), torch.zeros(4)
    opt.step()
    assert torch.allclose(a, torch.full((4,), 0.75)) and torch.allclose(b, torch.full((4,), 0.75))
    for group in opt.param_groups:
        group["lr"] /= 2
    opt.step()
    assert torch.allclose(a, torch.full((4,), 0.75 * 0.875))


def test_bad_values():
    mine, _ = twins()
    for bad in (
        dict(lr=-1.0),
        dict(betas=(1.0, 0.9)),
        dict(betas=(0.9, -0.1)),
        dict(eps=-1e-8),
        dict(weight_decay=-0.1),
        dict(max_lr=-1.0, decouple_lr=True),
        dict(max_lr=-1.0),
    ):
        for module in (ours, theirs):
            with pytest.raises(ValueError):
                make(module, "AdamW", mine.parameters(), bad)
    for bad in (dict(momentum=1e4), dict(momentum=-0.1)):
        with pytest.raises(ValueError):
            make(ours, "SGD", mine.parameters(), bad)


def test_loads_what_the_peer_saved():
    for name, options in (
        ("AdamW", {}),
        ("Adan", {}),
        ("Lion", {}),
        ("RAdam", {}),
        ("Ranger", {}),
        ("SGD", dict(momentum=0.9)),
        ("SGD", {}),
        ("StableAdamW", {}),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            mine, judge = twins(dtype=dtype)
            more = dict(options, kahan_sum=True, lr=1e-2 if name != "Lion" else 1e-3)
            b = make(theirs, name, judge.parameters(), more)
            for i in range(18):
                if i == 9:
                    mine.load_state_dict(judge.state_dict())
                    start = [q.detach().clone() for q in judge.parameters()]
                    a = make(ours, name, mine.parameters(), dict(more, lr=1.0))
                    with told("converted", dtype == torch.bfloat16):  # moments become bf16-sr
                        a.load_state_dict(copy.deepcopy(b.state_dict()))
                    assert a.param_groups[0]["lr"] == more["lr"]
                    for p, q in zip(mine.parameters(), judge.parameters()):
                        residual = b.state[q]["kahan_comp"]
                        held = q.detach().float() + (0.0 if residual is None else residual.float())
                        assert torch.allclose(a.read_weight(p), held, rtol=2**-20, atol=0)
                set_gradients(mine, judge)
                if i >= 9:
                    a.step()
                b.step()
            if dtype == torch.float32:
                assert_close(mine.parameters(), judge.parameters(), **FP32)
                continue
            # The peer rounds every operation to BF16, and so its movement. Wrong moments would be
            # off by all of it.
            moved = flat(q - w for q, w in zip(judge.parameters(), start))
            apart = flat(p - q for p, q in zip(mine.parameters(), judge.parameters()))
            assert apart.norm() < (0.5 if name == "Ranger" else 0.1) * moved.norm(), (
                name
            )  # its one residual: I-1


# ---- Release and accumulation --------------------------------------------------------------------


@pytest.mark.parametrize("name, options", VARIANTS, ids=IDS)
def test_gradient_release_with_stray_calls(name, options):
    mine, judge = twins()
    a = make(ours, name, mine.parameters(), options, gradient_release=True)
    b = make(theirs, name, judge.parameters(), options)
    ours.prepare_for_gradient_release(mine, a)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 5, 0.5) for o in (a, b)]
    coin = random.Random(1)
    for i in range(30):
        if i == 20:
            ours.remove_gradient_release(mine)
        x, y = batch(mine)
        backward(mine, x, y)
        if i < 20:
            assert all(p.grad is None for p in mine.parameters())
            if coin.random() < 0.5:
                a.step()
            if coin.random() < 0.5:
                a.zero_grad()
        else:
            a.step()
            a.zero_grad()
        if i == 10:
            reload(a)
        backward(judge, x, y)
        b.step()
        b.zero_grad()
        for schedule in schedules:
            schedule.step()
    assert_close(mine.parameters(), judge.parameters(), **FP32)
    assert not hasattr(mine, "_gradient_release_hooks")


def test_release_hooks_and_their_errors():
    mine, _ = twins()
    with pytest.raises(TypeError):
        ours.prepare_for_gradient_release(mine, torch.optim.AdamW(mine.parameters()))
    with pytest.raises(ValueError, match="gradient_release=True"):
        ours.prepare_for_gradient_release(mine, ours.AdamW(mine.parameters(), lr=1e-3))
    opt = ours.AdamW(mine.parameters(), lr=1e-3, gradient_release=True)
    # Not prepared yet: an ordinary optimizer.
    backward(mine, *batch(mine))
    before = mine.body.weight.detach().clone()
    assert torch.equal(mine.body.weight, before) and mine.body.weight.grad is not None
    opt.step()
    opt.zero_grad()
    assert not torch.equal(mine.body.weight, before)
    mine.norm.bias.requires_grad_(False)
    handle = mine.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match="ignore_existing_hooks"):
        ours.prepare_for_gradient_release(mine, opt)
    assert not mine.body.weight._post_accumulate_grad_hooks
    ours.prepare_for_gradient_release(mine, opt, ignore_existing_hooks=True)
    assert len(mine._gradient_release_hooks) == 3
    twin = copy.deepcopy(opt)
    assert not twin.gradient_release and opt.gradient_release
    backward(mine, *batch(mine))
    assert mine.head.weight.grad is None and mine.norm.bias.grad is None
    handle.remove()
    ours.remove_gradient_release(mine)
    with pytest.warns(UserWarning, match="no gradient release hooks"):
        ours.remove_gradient_release(mine)
    assert not mine.head.weight._post_accumulate_grad_hooks
    mine.head.weight.grad = torch.ones_like(mine.head.weight)
    opt.zero_grad(set_to_none=False, param=mine.head.weight)
    assert not mine.head.weight.grad.any()
    opt.zero_grad(param=mine.head.weight)
    assert mine.head.weight.grad is None
    assert opt.step(lambda: 5.0) == 5.0


def test_release_of_a_part_of_the_model():
    mine, _ = twins()
    opt = ours.SGD(mine.parameters(), lr=0.1, gradient_release=True)
    ours.prepare_for_gradient_release(mine.body, opt)
    before = {n: p.detach().clone() for n, p in mine.named_parameters()}
    backward(mine, *batch(mine))
    assert mine.body.weight.grad is None and not torch.equal(
        mine.body.weight, before["body.weight"]
    )
    assert torch.equal(mine.head.weight, before["head.weight"])
    body = mine.body.weight.detach().clone()
    opt.step()
    assert torch.equal(mine.body.weight, body) and not torch.equal(
        mine.head.weight, before["head.weight"]
    )


ACCUMULATING = [
    v
    for v in VARIANTS
    if not (v[0] == "SGD" and not v[1].get("momentum"))
    and not (
        v[1].get("weight_decay")
        and v[0] in ("Adam", "RAdam", "Ranger", "SGD")
        and not v[1].get("decouple_wd", v[0] == "Ranger")
        and not v[1].get("decouple_lr")
    )
]


def accumulated(module, name, options, net, batches, micro=4):
    opt = make(module, name, net.parameters(), options, gradient_release=True)
    module.prepare_for_gradient_release(net, opt)
    for i, (x, y) in enumerate(batches):
        opt.optimizer_accumulation = (i + 1) % micro != 0
        backward(net, x, y)
        opt.step()
    module.remove_gradient_release(net)


@pytest.mark.parametrize(
    "name, options", ACCUMULATING, ids=[i for i, v in zip(IDS, VARIANTS) if v in ACCUMULATING]
)
def test_accumulation_into_the_states(name, options):
    mine, judge = twins()
    summed = copy.deepcopy(mine)
    batches = [batch(mine) for _ in range(96)]
    accumulated(ours, name, options, mine, batches)
    if name == "Ranger":
        options = {
            **options,
            "k": 4 * options.get("k", 6),
        }  # the peer counts micro-steps, here updates of the weight count
    accumulated(theirs, name, options, judge, batches)
    assert_close(mine.parameters(), judge.parameters(), atol=2e-6, rtol=2e-5, rate=5e-4)
    # and what it stands for: steps from the sums of the micro-gradients
    options = {k: v for k, v in options.items() if k != "k"}
    opt = make(theirs, name, summed.parameters(), options)
    for i, (x, y) in enumerate(batches):
        backward(summed, x, y)
        if i % 4 == 3:
            opt.step()
            opt.zero_grad()
    if name != "SGD":  # sums of gradients are not averages; the others divide by their size
        assert_close(mine.parameters(), summed.parameters(), atol=1e-2, rtol=1e-2, rate=0.035)


def test_micro_steps_that_would_drop_gradients_are_refused():
    for options in (dict(), dict(momentum=0.9, weight_decay=0.1)):
        mine, _ = twins()
        opt = ours.SGD(mine.parameters(), lr=0.1, gradient_release=True, **options)
        ours.prepare_for_gradient_release(mine, opt)
        opt.optimizer_accumulation = True
        with pytest.raises(ValueError, match="micro-step"):
            backward(mine, *batch(mine))


# ---- Helpers -------------------------------------------------------------------------------------


def test_param_groups_weight_decay():
    model = nn.Sequential(
        nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False)
    )
    model.add_module("extra", nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    for arguments in ((), (0.3,), (0.3, ["extra"]), (0.3, {"0.", "3"})):
        a, b = (
            ours.param_groups_weight_decay(model, *arguments),
            theirs.param_groups_weight_decay(model, *arguments),
        )
        assert [[id(p) for p in g["params"]] for g in a] == [
            [id(p) for p in g["params"]] for g in b
        ]
        assert (
            [g["weight_decay"] for g in a]
            == [g["weight_decay"] for g in b]
            == [0.0, (arguments or (1e-2,))[0]]
        )
    opt = ours.AdamW(ours.param_groups_weight_decay(model, 0.3), lr=1e-3)
    assert [g["weight_decay"] for g in opt.param_groups] == [0.0, 0.3]


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("places", torch.arange(4))
        self.scale = nn.Parameter(torch.ones(3))


def zoo():
    model = nn.Sequential(
        nn.Embedding(7, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 7, bias=False)
    )
    model.add_module("rotary_emb", Rotary())
    model.add_module("other", nn.Sequential(Rotary()))
    model.rotary_emb.add_module("inner", Rotary())
    return model


def test_to_low_precision():
    for options in (
        {},
        dict(dtype=torch.float16),
        dict(fp32_modules=None),
        dict(fp32_modules=(nn.Embedding, nn.BatchNorm1d)),
        dict(fp32_buffers=None),
        dict(fp32_buffers=Rotary),
        dict(device="cpu"),
        dict(fp32_buffers=["OTHER", nn.BatchNorm1d]),
    ):
        a, b = zoo(), zoo()
        assert ours.to_low_precision(a, **options) is a
        theirs.to_low_precision(b, **options)
        found = {n: t.dtype for n, t in (*a.named_parameters(), *a.named_buffers())}
        assert found == {n: t.dtype for n, t in (*b.named_parameters(), *b.named_buffers())}, (
            options
        )
        assert len(set(found.values())) > 1
    # A single word: the peer takes it letter by letter.
    model = ours.to_low_precision(zoo(), fp32_buffers="OTHER")
    assert (
        model.other[0].table.dtype == torch.float32
        and model.rotary_emb.table.dtype == torch.bfloat16
    )
    tied = zoo()
    tied[3].weight = tied[0].weight
    ours.to_low_precision(tied)
    assert tied[3].weight is tied[0].weight
    model = nn.Linear(3, 3)
    model(torch.randn(2, 3)).sum().backward()
    ours.to_low_precision(model)
    assert model.weight.grad.dtype == model.weight.dtype == torch.bfloat16
    for bad in (dict(fp32_modules="Embedding"), dict(fp32_buffers=[3])):
        with pytest.raises(TypeError):
            ours.to_low_precision(zoo(), **bad)


# ---- Functional forms ----------------------------------------------------------------------------

SHAPES = [(8, 16), (5,), (), (3, 4, 5), (0, 4)]
FUNCTIONS = {
    "adam": dict(beta1=0.9, beta2=0.99, eps=1e-6),
    "adamw": dict(beta1=0.9, beta2=0.99, eps=1e-6),
    "stableadamw": dict(beta1=0.9, beta2=0.99, eps=1e-6),
    "radam": dict(beta1=0.9, beta2=0.99, eps=1e-6),
    "ranger": dict(beta1=0.9, beta2=0.99, eps=1e-6, k=4, alpha=0.5),
    "adan": dict(beta1=0.98, beta2=0.92, beta3=0.99, eps=1e-6),
    "lion": dict(beta1=0.9, beta2=0.99),
    "sgd": dict(momentum=0.9, dampening=False),
}
STATES = {"adan": 4, "lion": 1, "sgd": 1, "ranger": 3}
DECAYS = [
    dict(weight_decay=0.0),
    dict(weight_decay=0.1),
    dict(weight_decay=0.01, decouple_lr=True, max_lr=0.02),
    dict(weight_decay=0.1, l2=True),
]


class Lists:
    """Holds parameters and states as a caller of the functional forms does."""

    def __init__(self, name, dtype=torch.float32, shapes=SHAPES, kahan=False):
        self.name, self.kahan = name, kahan
        self.params = [torch.randn(s).to(dtype) for s in shapes]
        self.states = [
            [torch.zeros_like(p) for p in self.params] for _ in range(STATES.get(name, 2))
        ]
        if name == "ranger":
            self.states[2] = [p.clone() for p in self.params]
        self.comps = [torch.zeros_like(p) for p in self.params] if kahan else None
        self.step = torch.tensor(0, dtype=torch.int32)

    def call(self, module, grads, decay=DECAYS[0], **more):
        options = {"lr": 0.01, **FUNCTIONS[self.name], **decay, **more}
        l2 = options.pop("l2", False)
        if self.name in ("adam", "radam", "ranger", "sgd"):
            options["decouple_wd"] = not l2
        if self.name not in ("lion", "sgd"):
            options["step"] = self.step
        lists = list(self.states)
        if self.name == "adan" and self.step == 0:
            self.states[3] = lists[3] = [-g for g in grads]
        if self.name == "stableadamw":
            lists.append([torch.tensor(1e-12) for _ in self.params])
        getattr(module, self.name)(
            self.params,
            [g.clone() for g in grads],
            *lists,
            self.comps,
            kahan_sum=self.kahan,
            **options,
        )

    def everything(self):
        return [self.params, *self.states]

    def same(self, other, **bounds):
        for a, b in zip(self.everything(), other.everything()):
            assert_close(a, b, **bounds)
        assert self.step == other.step


@pytest.mark.parametrize("decay", DECAYS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functional_forms_follow_in_fp32(name, decay):
    if decay.get("l2") and name not in ("adam", "radam", "ranger", "sgd"):
        pytest.skip("has no L2 decay")
    mine = Lists(name)
    judge = copy.deepcopy(mine)
    for i in range(24):
        grads = [torch.randn_like(p) for p in mine.params]
        more = {"dampening": True} if name == "sgd" and i % 2 else {}
        accumulate = i % 4 == 1 and not (name == "sgd" and not FUNCTIONS["sgd"]["momentum"])
        mine.call(ours, grads, decay, optimizer_accumulation=accumulate, **more)
        judge.call(theirs, grads, decay, optimizer_accumulation=accumulate, **more)
        mine.same(judge, atol=2e-6, rtol=2e-5, rate=0)
    assert mine.step == (0 if name in ("lion", "sgd") else 24)


@pytest.mark.parametrize("kahan", [True, False], ids=["kahan", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functional_forms_in_16_bits(name, dtype, kahan):
    """Against the peer in fp32 with the same gradients."""
    mine = Lists(name, dtype, [(32, 64), (7,)], kahan)
    wide = Lists(name, torch.float32, [(32, 64), (7,)])
    for a, b in zip(mine.everything(), wide.everything()):
        for p, q in zip(a, b):
            q.copy_(p)
    for _ in range(20):
        grads = [torch.randn_like(p) for p in mine.params]
        mine.call(ours, grads, lr=0.002)
        wide.call(theirs, [g.float() for g in grads], lr=0.002)
    bounds = dict(BF16, atol=2e-3) if kahan else dict(atol=0.02, rtol=0.02, rate=0.02)
    assert_close(mine.params, wide.params, **bounds)
    for a, b in zip(mine.states, wide.states):
        a, b = flat(a), flat(b)
        assert ((a - b).norm() / b.norm()).item() < 0.02
    if kahan:
        pairs = [
            (p.float() + c.float() - q, p.float() - q)
            for p, c, q in zip(mine.params, mine.comps, wide.params)
        ]
        # A momentum of Lion that rounding turned to the other side of zero moves its weight by 2
        # lr.
        kept = [a.abs() < (0.002 if name == "lion" else math.inf) for a, _ in pairs]
        assert sum((a[k] ** 2).sum() for (a, _), k in zip(pairs, kept)) < 0.2 * sum(
            (b**2).sum() for _, b in pairs
        )


def test_functional_forms_on_one_tensor_and_on_strided_ones():
    mine = Lists("adamw", shapes=[(6, 8)])
    judge, strided = copy.deepcopy(mine), copy.deepcopy(mine)
    strided.params = [p.t().contiguous().t() for p in strided.params]
    strided.states[0] = [torch.zeros(6, 16)[:, ::2]]
    for _ in range(5):
        grad = torch.randn(6, 8)
        options = dict(lr=0.01, weight_decay=0.01, **FUNCTIONS["adamw"])
        ours.adamw(
            mine.params[0],
            grad,
            mine.states[0][0],
            mine.states[1][0],
            step=mine.step,
            gradient_release=True,
            **options,
        )
        theirs.adamw(
            judge.params[0],
            grad,
            judge.states[0][0],
            judge.states[1][0],
            step=judge.step,
            gradient_release=True,
            kahan_comps=[None],
            **options,
        )
        strided.call(ours, [grad.t().contiguous().t()], dict(weight_decay=0.01))
    mine.same(judge, **FP32)
    for a, b in zip(mine.everything(), strided.everything()):
        assert torch.equal(a[0], b[0])
    assert strided.params[0].stride() == (1, 6)


def test_functional_forms_refuse_what_they_cannot_do(caught):
    good = Lists("adam", shapes=[(4, 4), (4,)])
    before = copy.deepcopy(good)
    bad = [torch.full_like(p, float("nan")) for p in good.params]
    good.call(ours, bad)
    assert [w for w in caught if issubclass(w.category, RuntimeWarning)] and good.step == 0
    good.same(before, atol=0, rtol=0, rate=0)
    grads = [torch.ones_like(p) for p in good.params]
    for more, error in (
        (dict(decouple_lr=True, weight_decay=0.1), ValueError),
        (dict(foreach=True, gradient_release=True), ValueError),
        (dict(kahan_sum=True), None),
        (dict(lr=-1.0), ValueError),
        (dict(step=3), TypeError),
    ):
        options = dict(
            lr=0.1, weight_decay=0.0, decouple_wd=True, step=good.step, **FUNCTIONS["adam"]
        )
        options.update(more)
        if error is None:
            ours.adam(good.params, grads, *good.states, **options)  # float32 needs no residual
            continue
        with pytest.raises(error):
            ours.adam(good.params, grads, *good.states, **options)
    with pytest.raises(ValueError):
        ours.adam(good.params, grads[:1], *good.states, **{**options, "step": good.step})
    with pytest.raises(ValueError, match="kahan_comps"):
        low = Lists("lion", torch.bfloat16, [(4, 4)], True)
        low.comps = None
        low.call(ours, [torch.ones(4, 4).bfloat16()])
    plain = Lists("sgd", shapes=[(4,)])
    with pytest.raises(ValueError, match="micro-step"):
        plain.call(ours, [torch.ones(4)], momentum=0.0, optimizer_accumulation=True)
    first = Lists("adan", shapes=[(4,)])
    with pytest.raises(ValueError, match="prev_grads"):
        ours.adan(
            first.params,
            [torch.ones(4)],
            *first.states,
            lr=0.1,
            weight_decay=0.0,
            step=first.step,
            **FUNCTIONS["adan"],
        )


def test_equal_tensors_round_independently():
    """Two calls with one tensor each, of one structure, share a handle but not random bits."""
    from halfstep.compat import _optimi_lists

    ends = []
    before = _optimi_lists._lists.cache_info().currsize
    for _ in range(2):
        lists = Lists("lion", torch.bfloat16, [(64, 64)], True)
        lists.params[0].fill_(1.0)
        for _ in range(3):
            lists.call(ours, [torch.full((64, 64), 0.37).bfloat16()], lr=1e-3)
        ends.append(lists.comps[0].clone())
    assert _optimi_lists._lists.cache_info().currsize <= before + 1
    assert not torch.equal(*ends) and (ends[0].float() - ends[1].float()).abs().max() < 1e-3
    for i in range(_optimi_lists._HANDLES + 3):
        Lists("lion", shapes=[(1, i + 1)]).call(ours, [torch.ones(1, i + 1)])
    assert _optimi_lists._lists.cache_info().currsize == _optimi_lists._HANDLES


# ---- README --------------------------------------------------------------------------------------


def test_readme_snippets_run_verbatim():
    text = importlib.metadata.metadata("torch-optimi").get_payload()
    blocks = [b.text for b in documents.parse(text) if b.language == "python"]
    assert len(blocks) == 4
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR
    names = {
        "CosineAnnealingLR": lambda opt, *_: cosine(opt, 4),
        "dataloader": [torch.randn(20, dtype=torch.bfloat16)] * 8,
    }

    def run(block):
        exec(block.replace("from optimi import", "from halfstep.compat.optimi import"), names)

    run(blocks[0])
    assert names["AdamW"] is ours.AdamW
    names.update({n: getattr(ours, n) for n in ours.__all__})
    first = names["model"].weight.detach().clone()
    for block in blocks[2:]:  # before the second makes a float32 model
        run(block)
        assert not torch.equal(names["model"].weight, first)
        assert names["opt"].recipe(names["model"].weight).startswith("adamw/bf16-kahan")
        assert names["scheduler"].last_epoch == (1 if block is blocks[2] else 2)
        assert not names["model"].weight._post_accumulate_grad_hooks
        first = names["model"].weight.detach().clone()
    run(blocks[1])
    assert names["opt"].recipe(names["model"].weight) == "adamw/f32/f32"
