"""halfstep.compat.flashoptim against the installed flashoptim (its unfused path runs on a CPU),
torch, and its README."""

import copy
import importlib.metadata
import inspect
import math
import types

import documents
import pytest
import torch
from conftest import saved, told, warnings_are
from torch import nn

from halfstep.compat import flashoptim as ours

theirs = pytest.importorskip("flashoptim")

VARIANTS = [
    ("FlashAdam", {}),
    ("FlashAdam", dict(weight_decay=0.1)),
    ("FlashAdamW", {}),
    ("FlashAdamW", dict(betas=(0.8, 0.95))),
    ("FlashAdamW", dict(weight_decay=1e-3, decouple_lr=True)),
    ("FlashSGD", {}),
    ("FlashSGD", dict(weight_decay=0.1)),
    ("FlashSGD", dict(momentum=0.9, dampening=0.3)),
    ("FlashSGD", dict(momentum=0.9, nesterov=True, weight_decay=0.1)),
    ("FlashSGDW", dict(momentum=0.9, weight_decay=0.1)),
    ("FlashSGDW", dict(weight_decay=0.1)),
    ("FlashSGDW", dict(momentum=0.9, weight_decay=1e-3, decouple_lr=True)),
    ("FlashLion", dict(weight_decay=0.1)),
    ("FlashLion", dict(weight_decay=1e-3, decouple_lr=True)),
]
IDS = [f"{name}-{'-'.join(f'{k}={v}' for k, v in options.items())}" for name, options in VARIANTS]


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 40), nn.Tanh(), nn.Linear(40, 64)
    )


def low(dtype=torch.bfloat16):
    model = mlp()
    ours.cast_model(model, dtype)
    return model


def quiet(cls, params, master_weight_bits, **options):
    """Makes an optimizer. Expects the warning about 16-bit parameters without codes."""
    params = list(params)
    plain = master_weight_bits is None and any(p.dtype != torch.float32 for p in params)
    with told("master_weight_bits=None", plain):
        return cls(params, master_weight_bits=master_weight_bits, **options)


def set_gradients(*models, scale=1.0):
    for parameters in zip(*(m.parameters() for m in models)):
        grad = scale * (torch.randn(parameters[0].shape) + 0.5)
        for p in parameters:
            p.grad = grad.to(p.dtype)


def make_steps(number, *pairs):
    """Makes steps of pairs of an optimizer and its model, all with the same gradients."""
    for _ in range(number):
        set_gradients(*(model for _, model in pairs))
        for opt, _ in pairs:
            opt.step()


def flat(tensors):
    return torch.cat([t.detach().float().flatten() for t in tensors])


def weights(opt, model):
    return flat(opt.read_weight(p) for p in model.parameters())


# ---- Names ---------------------------------------------------------------------------------------


def test_every_public_name_has_the_signature():
    assert sorted(ours.__all__) == sorted(theirs.__all__)
    for name in theirs.__all__:
        mine, judge = getattr(ours, name), getattr(theirs, name)
        if name == "NumericsError":
            assert issubclass(mine, RuntimeError)
            continue
        assert [
            (p.name, p.kind, p.default) for p in inspect.signature(mine).parameters.values()
        ] == [(p.name, p.kind, p.default) for p in inspect.signature(judge).parameters.values()], (
            name
        )
    for name in (
        "step",
        "step_param",
        "zero_grad",
        "recompute_param_stats",
        "get_fp32_model_state_dict",
        "set_fp32_model_state_dict",
        "state_dict",
        "load_state_dict",
    ):
        assert list(inspect.signature(getattr(ours.FlashOptimizer, name)).parameters) == list(
            inspect.signature(getattr(theirs.FlashOptimizer, name)).parameters
        ), name
    for name, _ in VARIANTS:
        assert issubclass(getattr(ours, name), ours.FlashOptimizer)
    with pytest.raises(TypeError):
        ours.FlashOptimizer(mlp().parameters())


# ---- Trajectories --------------------------------------------------------------------------------


@pytest.mark.parametrize("name, options", VARIANTS, ids=IDS)
def test_follows_the_peer_in_fp32(name, options):
    mine = mlp()
    judge = copy.deepcopy(mine)
    common = dict(quantize=False, master_weight_bits=None, lr=1e-2, **options)
    a = getattr(ours, name)(mine.parameters(), **common)
    b = getattr(theirs, name)(judge.parameters(), fused=False, **common)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 7, 0.5) for o in (a, b)]
    for i in range(20):
        set_gradients(mine, judge)
        a.step()
        b.step()
        for schedule in schedules:
            schedule.step()
        if i == 10:
            a.load_state_dict(copy.deepcopy(a.state_dict()))
    assert torch.allclose(flat(mine.parameters()), flat(judge.parameters()), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "dtype, bits",
    [
        (torch.float32, None),
        (torch.bfloat16, 24),
        (torch.bfloat16, 32),
        (torch.bfloat16, None),
        (torch.float16, 24),
        (torch.float16, 32),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "name, judge, options",
    [
        ("FlashAdamW", torch.optim.AdamW, {}),
        ("FlashAdam", torch.optim.Adam, dict(weight_decay=0.1)),
        ("FlashSGD", torch.optim.SGD, dict(momentum=0.9, nesterov=True)),
    ],
    ids=["AdamW", "Adam", "SGD"],
)
def test_follows_torch_with_8_bit_states(name, judge, options, dtype, bits):
    model = low(dtype)
    wide = copy.deepcopy(model).float()
    start = flat(wide.parameters()).clone()
    a = quiet(getattr(ours, name), model.parameters(), lr=1e-3, master_weight_bits=bits, **options)
    b = judge(wide.parameters(), lr=1e-3, **options)
    for _ in range(30):
        for p, q in zip(model.parameters(), wide.parameters()):
            p.grad = torch.randn_like(p) + 0.5
            q.grad = p.grad.float()
        a.step()
        b.step()
    moved, meant = weights(a, model) - start, flat(wide.parameters()) - start
    assert torch.cosine_similarity(moved, meant, dim=0) > 0.99
    assert (moved - meant).norm() < (0.1 if bits or dtype == torch.float32 else 0.2) * meant.norm()


def test_formats_of_each_option():
    for dtype, bits, weight in (
        (torch.bfloat16, 24, "bf16-ecc8"),
        (torch.bfloat16, 32, "bf16-ecc16"),
        (torch.bfloat16, None, "bf16"),
        (torch.float16, 24, "f16-ecc8"),
        (torch.float16, 32, "f16-ecc16"),
        (torch.float16, None, "f16"),
        (torch.float32, None, "f32"),
    ):
        for quantize, states in ((True, "int8"), (False, "f32")):
            model = low(dtype)
            opt = quiet(
                ours.FlashAdamW, model.parameters(), master_weight_bits=bits, quantize=quantize
            )
            assert opt.recipe(model[0].weight) == f"adamw/{weight}/{states}"
            assert opt.param_groups[0]["master_bytewidth"] == {None: 0, 24: 3, 32: 4}[bits]
    model = low()
    opt = ours.FlashAdamW(
        [
            {"params": model[0].parameters(), "quantize": False},
            {"params": model[2].parameters(), "weights": "bf16-sr"},
        ]
    )
    assert (
        opt.recipe(model[0].weight) == "adamw/bf16-ecc8/f32"
        and opt.recipe(model[2].weight) == "adamw/bf16-sr/int8"
    )
    # 7.125 bytes per parameter where all of it comes in blocks
    opt = ours.FlashAdamW([nn.Parameter(torch.randn(64, 64).bfloat16())])
    assert sum(opt.memory().values()) / 4096 == 7.125


def test_more_master_bits_are_nearer():
    """The peer's test: the error of the sum of 100 small updates. Without codes most of them
    vanish."""
    errors = {}
    truth = torch.randn(64, 256).bfloat16()
    gradients = [truth.abs().float() * torch.randn(64, 256) * 0.05 for _ in range(100)]
    for bits in (None, 24, 32):
        p = nn.Parameter(truth.clone())
        wide = nn.Parameter(truth.float())
        a = quiet(ours.FlashSGD, [p], lr=0.01, master_weight_bits=bits)
        b = torch.optim.SGD([wide], lr=0.01)
        for g in gradients:
            p.grad = g.bfloat16()
            wide.grad = p.grad.float()
            a.step()
            b.step()
        errors[bits] = (a.read_weight(p) - wide).abs().sum().item() / (
            wide - truth.float()
        ).abs().sum().item()
    assert errors[32] < 1e-4 < errors[24] < 0.1 < errors[None]


def test_decoupled_lr_refers_to_each_group():
    a, b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    opt = ours.FlashSGDW(
        [{"params": [a]}, {"params": [b], "lr": 0.5}],
        lr=0.1,
        weight_decay=0.25,
        decouple_lr=True,
        master_weight_bits=None,
    )
    assert [g["initial_lr"] for g in opt.param_groups] == [0.1, 0.5]
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 0.5**i)
    for factor in (0.75, 0.875):
        a.grad, b.grad = torch.zeros(8), torch.zeros(8)
        before = a.detach().clone()
        opt.step()
        schedule.step()
        assert torch.allclose(a, before * factor) and torch.equal(a, b)


def test_bad_values():
    for bits in (16, 0):
        with pytest.raises(ValueError, match=f"master_weight_bits={bits}"):
            ours.FlashAdamW(mlp().parameters(), master_weight_bits=bits)


def test_master_bits_of_float32_models(monkeypatch, caught):
    with pytest.raises(ValueError, match="float32"):
        ours.FlashAdamW(mlp().parameters())
    monkeypatch.setenv("FLASHOPTIM_ALLOW_INEFFECTIVE_MASTER_WEIGHT_BITS", "1")
    ours.FlashAdamW(mlp().parameters())
    monkeypatch.delenv("FLASHOPTIM_ALLOW_INEFFECTIVE_MASTER_WEIGHT_BITS")
    mixed = low()
    mixed[0].float()
    ours.FlashAdamW(mixed.parameters())
    assert not caught
    ours.FlashAdamW(mixed.parameters(), master_weight_bits=None)
    assert (
        len(caught) == 1 and "nearest" in str(caught[0].message) and caught[0].filename == __file__
    )


# ---- check_numerics ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, bits, mantissa",
    [
        (torch.bfloat16, None, 7),
        (torch.bfloat16, 24, 15),
        (torch.bfloat16, 32, 23),
        (torch.float16, None, 10),
        (torch.float16, 24, 18),
        (torch.float32, None, 23),
    ],
    ids=str,
)
@pytest.mark.parametrize("largest", [1.0, 1.99, 100.0, 0.01])
def test_check_numerics_threshold(dtype, bits, mantissa, largest):
    """0.49 of the last place of the largest weight: lr of Lion and SGD, a tenth of Adam's. The peer
    asks for 1 / 0.49."""
    for cls, units in ((ours.FlashLion, 1.0), (ours.FlashSGD, 1.0), (ours.FlashAdamW, 0.1)):
        for factor, passes in ((1.02, True), (0.98, False), (0.5, False)):
            p = nn.Parameter(torch.tensor([0.0, -largest, largest / 3], dtype=dtype))
            top = float(p.detach().abs().max())
            lr = factor * 0.49 * 2.0 ** (math.floor(math.log2(top)) - mantissa) / units
            opt = quiet(cls, [p], lr=lr, master_weight_bits=bits, check_numerics=True)
            p.grad = torch.ones_like(p)
            before = p.detach().clone()
            if passes:
                opt.step()
                continue
            for step in (opt.step, lambda: opt.step_param(p)):
                with pytest.raises(ours.NumericsError, match="learning rate"):
                    step()
            assert torch.equal(p, before)


def test_the_threshold_is_where_steps_begin_to_count():
    """The purpose of the check: in plain BF16 half of the last place moves the largest weight, and
    less does not."""
    for factor, moves in ((1.05, True), (0.95, False)):
        p = nn.Parameter(torch.tensor([1.0078125, 0.5]).bfloat16())
        opt = quiet(ours.FlashLion, [p], lr=factor * 2.0**-8, master_weight_bits=None)
        p.grad = torch.ones_like(p)
        before = p.detach().clone()
        opt.step()
        assert bool(p[0] != before[0]) == moves


@pytest.mark.told("was written, but not by this optimizer")
def test_check_numerics_looks_at_the_weights_when_told():
    p = nn.Parameter(torch.tensor([1.0, 0.5]).bfloat16())
    opt = ours.FlashSGD([p], lr=1e-4, check_numerics=True)
    p.grad = torch.zeros_like(p)
    opt.step()
    with torch.no_grad():
        p.mul_(1000)
    opt.step()  # of the magnitude it measured first
    kept = copy.deepcopy(opt.state_dict())
    opt.recompute_param_stats()
    with pytest.raises(ours.NumericsError):
        opt.step()
    opt.param_groups[0]["lr"] = 0.0  # a dummy step
    opt.step()
    with torch.no_grad():
        p.mul_(0.001)
    opt.load_state_dict(kept)  # measures anew
    opt.step()
    with torch.no_grad():
        p.fill_(float("inf"))
    opt.recompute_param_stats()
    opt._check_lr(p, opt.param_groups[0])


# ---- State dicts and fp32 weights ----------------------------------------------------------------


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize(
    "dtype, bits",
    [(torch.bfloat16, 24), (torch.bfloat16, 32), (torch.float32, None), (torch.float16, 24)],
    ids=str,
)
def test_resume(dtype, bits, compress):
    model = low(dtype)
    options = dict(lr=1e-2, master_weight_bits=bits, compress_state_dict=compress)
    opt = ours.FlashAdamW(model.parameters(), **options)
    make_steps(5, (opt, model))
    again = low(dtype)
    again.load_state_dict(model.state_dict())
    other = ours.FlashAdamW(again.parameters(), **options)
    with told("the loaded states are .* converted", not compress):
        other.load_state_dict(saved(opt.state_dict()))
    make_steps(5, (opt, model), (other, again))
    a, b = weights(opt, model), weights(other, again)
    if compress:
        assert torch.equal(a, b)
    else:  # one rounding more of the states, as the peer documents
        assert torch.cosine_similarity(a, b, dim=0) > 0.99999
        assert (a - b).norm() < 0.02 * (a - flat(low(dtype).parameters())).norm()


def test_uncompressed_state_dicts_are_torchs():
    model = mlp()
    opt = ours.FlashAdamW(
        model.parameters(), lr=1e-2, master_weight_bits=None, compress_state_dict=False
    )
    plain = ours.FlashAdamW(model.parameters(), lr=1e-2, master_weight_bits=None)
    make_steps(5, (opt, model))
    with pytest.warns(UserWarning, match="converted"):
        plain.load_state_dict(opt.state_dict())
    saved = opt.state_dict()
    for p, held in zip(model.parameters(), saved["state"].values()):
        assert (
            held["exp_avg"].dtype == held["exp_avg_sq"].dtype == torch.float32
            and held["exp_avg"].shape == p.shape
        )
        assert not any(key.endswith(".scale") for key in held)
        assert torch.equal(held["exp_avg"], opt.read_state(p, "exp_avg"))
    assert (
        opt.state[model[0].weight]["exp_avg.codes"].dtype == torch.int8
    )  # the optimizer's own stay
    judge = copy.deepcopy(model)
    vanilla = torch.optim.AdamW(judge.parameters(), lr=1.0)
    vanilla.load_state_dict(copy.deepcopy(saved))
    before = flat(model.parameters()).clone()
    make_steps(5, (opt, model), (vanilla, judge))
    assert (
        torch.cosine_similarity(
            flat(model.parameters()) - before, flat(judge.parameters()) - before, dim=0
        )
        > 0.99
    )
    # and back
    back = ours.FlashAdamW(judge.parameters(), lr=1.0, master_weight_bits=None)
    back.load_state_dict(
        copy.deepcopy(vanilla.state_dict())
    )  # which torch has cast, ids and recipes too
    assert back.param_groups[0]["lr"] == 1e-2
    other = copy.deepcopy(judge)
    vanilla2 = torch.optim.AdamW(other.parameters())
    vanilla2.load_state_dict(copy.deepcopy(vanilla.state_dict()))
    before = flat(judge.parameters()).clone()
    make_steps(5, (back, judge), (vanilla2, other))
    assert (
        torch.cosine_similarity(
            flat(judge.parameters()) - before, flat(other.parameters()) - before, dim=0
        )
        > 0.99
    )


def test_loads_what_the_peer_saved():
    mine = mlp()
    judge = copy.deepcopy(mine)
    options = dict(lr=1e-2, quantize=False, master_weight_bits=None)
    b = theirs.FlashAdamW(judge.parameters(), fused=False, **options)
    make_steps(5, (b, judge))
    mine.load_state_dict(judge.state_dict())
    a = ours.FlashAdamW(mine.parameters(), **options)
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    make_steps(5, (a, mine), (b, judge))
    assert torch.allclose(flat(mine.parameters()), flat(judge.parameters()), atol=1e-6, rtol=1e-5)
    saved = copy.deepcopy(b.state_dict())
    for held in saved["state"].values():
        held["error_bits"] = torch.zeros_like(held["exp_avg"])
    with pytest.warns(UserWarning, match="error_bits"):
        a.load_state_dict(saved)


@pytest.mark.parametrize(
    "dtype, bits",
    [
        (torch.bfloat16, 24),
        (torch.bfloat16, 32),
        (torch.float16, 24),
        (torch.float16, 32),
        (torch.bfloat16, None),
        (torch.float32, None),
    ],
    ids=str,
)
def test_fp32_state_dict_round_trip(dtype, bits):
    def build():
        net = nn.Sequential(mlp(), nn.BatchNorm1d(64), nn.Linear(64, 64))
        net.add_module("tied", nn.Linear(64, 96))
        net.tied.weight = net[0][0].weight
        ours.cast_model(net, dtype)
        return net

    model = build()
    opt = quiet(ours.FlashAdamW, model.parameters(), lr=1e-2, master_weight_bits=bits)
    make_steps(10, (opt, model))
    model[1].running_mean.uniform_()
    found = opt.get_fp32_model_state_dict(model)
    assert set(found) == set(model.state_dict()) and all(
        v.dtype == torch.float32 for v in found.values()
    )
    full = torch.cat([found[n].flatten() for n, _ in model.named_parameters()])
    assert torch.equal(full, weights(opt, model))
    if bits:
        assert (full != flat(model.parameters())).float().mean() > 0.9
    kept = {n: v.clone() for n, v in found.items()}
    set_gradients(model)
    opt.step()
    assert all(torch.equal(found[n], kept[n]) for n in kept)  # copies
    assert torch.equal(found["tied.weight"], found["0.0.weight"])
    again = build()
    other = quiet(ours.FlashAdamW, again.parameters(), lr=1e-2, master_weight_bits=bits)
    other.set_fp32_model_state_dict(again, found)  # before any step
    back = other.get_fp32_model_state_dict(again)
    for n, value in found.items():
        bound = {None: 0.0, 24: 2**-15, 32: 0.0}[bits] if dtype != torch.float32 else 0.0
        assert torch.allclose(back[n], value, rtol=bound, atol=0), n
    assert torch.equal(again[1].running_mean, model[1].running_mean)
    for _ in range(2):  # and steps go on from there
        set_gradients(model, again)
        other.step()
    opt.set_fp32_model_state_dict(model, {"nowhere": torch.zeros(3)})
    with pytest.raises(ValueError, match="float32"):
        opt.set_fp32_model_state_dict(model, {n: v.double() for n, v in found.items()})
    with pytest.raises(ValueError, match="shape"):
        opt.set_fp32_model_state_dict(model, {n: v[None] for n, v in found.items()})


def test_error_codes_by_themselves():
    x = torch.cat(
        [
            torch.randn(20000) * 2.0 ** torch.randint(-20, 14, (20000,)),
            torch.zeros(5),
            torch.tensor([1.00390625, -1.00390625, 1.01171875]),
        ]
    )  # ties of BF16
    for dtype in (torch.bfloat16, torch.float16):
        for width, code in ((3, torch.int8), (4, torch.int16)):
            narrow = x.to(dtype)
            codes = ours.compute_ecc_bits(x, narrow, width)
            assert codes.dtype == code and codes.shape == x.shape
            back = ours.reconstruct_fp32_param(narrow, codes)
            error = (back - x).abs()
            plain = (narrow.float() - x).abs()
            assert (error <= plain).all()
            inside = x.abs() > 2.0**-13
            assert (error[inside] <= x[inside].abs() * (2.0**-15 if width == 3 else 2.0**-23)).all()
            if width == 4 and dtype == torch.bfloat16:
                assert (error != 0).sum() <= 3  # a tie that was rounded towards zero
    opt = ours.FlashAdamW([p := nn.Parameter(torch.randn(32, 32).bfloat16())], lr=1e-2)
    p.grad = torch.randn_like(p)
    opt.step()
    assert torch.equal(
        ours.reconstruct_fp32_param(p, opt.state[p]["weight.extra"]), opt.read_weight(p)
    )
    for call in (
        lambda: ours.reconstruct_fp32_param(torch.ones(2), torch.zeros(2, dtype=torch.int8)),
        lambda: ours.reconstruct_fp32_param(torch.ones(2).bfloat16(), torch.zeros(2)),
        lambda: ours.reconstruct_fp32_param(
            torch.ones(2).bfloat16(), torch.zeros(3, dtype=torch.int8)
        ),
        lambda: ours.compute_ecc_bits(torch.ones(2).bfloat16(), torch.ones(2).bfloat16()),
        lambda: ours.compute_ecc_bits(torch.ones(2), torch.ones(2)),
        lambda: ours.compute_ecc_bits(torch.ones(2), torch.ones(2).bfloat16(), 2),
    ):
        with pytest.raises(ValueError):
            call()


# ---- Gradient release ----------------------------------------------------------------------------


def test_release_matches_ordinary_steps():
    """Also if the package's own function puts the hooks."""
    for dtype, bits in ((torch.bfloat16, 24), (torch.float32, None)):
        runs = []
        for release in (ours, theirs, None):
            model = low(dtype)
            model[4].weight.requires_grad_(False)
            opt = ours.FlashAdamW(model.named_parameters(), lr=1e-2, master_weight_bits=bits)
            handle = release.enable_gradient_release(model, opt) if release else None
            torch.manual_seed(3)
            for i in range(9):
                if release and i == 6:
                    handle.remove()
                    assert not handle.active
                    handle.remove()
                if i == 4:
                    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
                    opt.param_groups[0]["lr"] = 5e-3
                x = torch.randn(8, 64).to(dtype)
                model(x).float().square().mean().backward()
                if release and i < 6:
                    assert handle.active and all(p.grad is None for p in model.parameters())
                    continue
                opt.step()
                opt.zero_grad()
            runs.append(
                (
                    weights(opt, model),
                    [opt.read_state(p, "exp_avg") for p in model.parameters() if p.requires_grad],
                )
            )
        for found, moments in runs[1:]:
            assert torch.equal(runs[0][0], found) and all(map(torch.equal, runs[0][1], moments))


def test_a_second_release_takes_over():
    model = low()
    first, second = (ours.FlashSGD(model.parameters(), lr=lr) for lr in (0.1, 0.0))
    ours.enable_gradient_release(model, first)
    with told("another optimizer with gradient release takes the gradients of 6"):
        ours.enable_gradient_release(model, second)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(4, 64).bfloat16()).float().square().mean().backward()
    assert all(map(torch.equal, model.parameters(), before)) and not first.state
    assert all(p.grad is None for p in model.parameters())


def test_release_warns_filters_and_refuses(caught):
    model = low()
    opt = ours.FlashSGD(model.parameters(), lr=0.1)
    seen = []

    def pre_step(p, group):
        seen.append(p)
        assert group is opt.param_groups[0]
        return p.ndim > 1

    other = nn.Linear(3, 3)  # not the optimizer's
    handle = ours.enable_gradient_release(nn.ModuleList([model, other]), opt, pre_step=pre_step)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt.load_state_dict(opt.state_dict())
    model(torch.randn(4, 64).bfloat16()).float().square().mean().backward()
    assert len(seen) == 6 and all(p.grad is None for p in model.parameters())
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n]) == (p.ndim == 1), n
    assert not caught
    assert opt.step(lambda: 4.0) == 4.0
    opt.zero_grad()
    assert ["step()" in str(w.message) for w in caught] == [True, False] and len(caught) == 2
    assert not copy.deepcopy(opt).gradient_release
    handle.remove()
    opt.step()
    assert len(caught) == 2
    with pytest.raises(NotImplementedError):
        ours.enable_gradient_release(model, opt, grad_scaler=torch.amp.GradScaler("cpu"))
    wrapper = type(
        "DistributedDataParallel", (nn.Module,), {"__module__": "torch.nn.parallel.distributed"}
    )
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        ours.enable_gradient_release(wrapper(), opt)


def test_shared_parameters_are_stepped_once():
    layer = nn.Linear(8, 8).bfloat16()
    model = nn.Sequential(layer, nn.Tanh(), layer)
    opt = ours.FlashAdamW(model.parameters())
    ours.enable_gradient_release(model, opt)
    for _ in range(3):
        model(torch.randn(2, 8).bfloat16()).sum().backward()
    assert float(opt.state[layer.weight]["step"]) == 3


# ---- cast_model ----------------------------------------------------------------------------------


def zoo():
    model = nn.Sequential(
        nn.Embedding(7, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 4)
    )
    model.add_module("head", nn.Linear(4, 7, bias=False))
    model[1].register_buffer("table", torch.arange(4.0))
    model[1].register_buffer("places", torch.arange(4))
    return model


def test_cast_model_dtypes():
    for options in (
        {},
        dict(dtype=torch.float16),
        dict(selective=False),
        dict(full_precision_layers=["head"]),
        dict(full_precision_layers=["h*", "1"]),
        dict(full_precision_recast_layers=["[34]"]),
        dict(full_precision_layers=["head"], full_precision_recast_layers=["1"]),
    ):
        a, b = zoo(), zoo()
        assert ours.cast_model(a, **options) is None
        theirs.cast_model(b, **options)
        found = {n: t.dtype for n, t in (*a.named_parameters(), *a.named_buffers())}
        assert found == {n: t.dtype for n, t in (*b.named_parameters(), *b.named_buffers())}, (
            options
        )
        tokens = torch.tensor([0, 3, 6])
        if options.get("selective", True):
            # batch norm in float32 takes no 16-bit weights' output on a CPU, there as here
            continue
        assert a(tokens).dtype == b(tokens).dtype
    model = zoo()
    ours.cast_model(model, full_precision_layers=[model[4]])
    assert model[4].weight.dtype == torch.float32 and model[1].weight.dtype == torch.bfloat16


def test_cast_model_hooks_and_ties():
    for options, out in (
        (dict(full_precision_layers=["2"]), torch.float32),
        (dict(full_precision_recast_layers=["2"]), torch.bfloat16),
    ):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        twin = copy.deepcopy(model)
        for net, module in ((model, ours), (twin, theirs)):
            for _ in range(2):  # twice is once
                module.cast_model(net, **options)
        x = torch.randn(3, 4).bfloat16()
        assert model(x).dtype == out and torch.equal(model(x), twin(x))
        assert len(model[2]._forward_pre_hooks) == 1
    model = zoo()
    model.head.weight = model[0].weight
    ours.cast_model(model)
    assert model.head.weight is model[0].weight and model.head.weight.dtype == torch.bfloat16
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data  # other tensors, the same memory
    ours.cast_model(model)
    assert (
        model[0].weight.data_ptr() == model[1].weight.data_ptr()
        and model[0].weight is not model[1].weight
    )

    class Named(nn.Module):
        def forward(self, x, *, scale):
            assert x.dtype == scale.dtype == torch.float32
            return {"y": x * scale}

    model = nn.ModuleDict({"n": Named()})
    ours.cast_model(model, full_precision_layers=["n"])
    model["n"](torch.ones(2).bfloat16(), scale=torch.ones(2).bfloat16())


# ---- README --------------------------------------------------------------------------------------


@pytest.mark.told("master_weight_bits=None")
@pytest.mark.told("step.. has nothing to do")
@pytest.mark.told("zero_grad.. has nothing to do")
def test_readme_snippets_run_verbatim(tmp_path, monkeypatch):
    """Runs all blocks of the manual except DDP's. Only the device, the package and the parts left
    to the reader differ."""
    text = importlib.metadata.metadata("flashoptim").get_payload()
    blocks = [b.text for b in documents.parse(text) if b.language == "python"]
    monkeypatch.chdir(tmp_path)

    class ResNet(nn.Module):  # what the manual takes from torchvision
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 10)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.target, self.lm_head = (
                nn.Linear(128, 128),
                nn.Linear(128, 64),
                nn.Linear(64, 10),
            )

        def forward(self, x):
            return self.lm_head(self.target(self.body(x)))

    ran = 0
    for block in blocks:
        if "DDP(" in block:
            continue
        model = Model()
        if "cast_model(" not in block:
            model.bfloat16()
        names = {
            "torch": torch,
            "nn": nn,
            "model": model,
            "loss_fn": nn.functional.mse_loss,
            "dataloader": [
                (torch.randn(4, 128).bfloat16(), torch.randn(4, 10).bfloat16()) for _ in range(2)
            ],
            "torchvision": types.SimpleNamespace(models=types.SimpleNamespace(resnet18=ResNet)),
        }
        names.update({n: getattr(ours, n) for n in ours.__all__})
        if "ckpt_dir" in block:
            names["ckpt_dir"] = str(tmp_path / "dcp")
            names["optimizer"] = ours.FlashAdamW(model.parameters())
            set_gradients(model)
            names["optimizer"].step()
            before = weights(names["optimizer"], model)
        code = block.replace("from flashoptim import", "from halfstep.compat.flashoptim import")
        code = (
            code.replace(".cuda()", "")
            .replace('"cuda"', '"cpu"')
            .replace("import torchvision\n", "")
        )
        with warnings_are("ignore"):
            exec(code, names)
        ran += 1
        if "optimizer" in names:
            assert isinstance(names["optimizer"], ours.FlashAdamW)
        if "ckpt_dir" in names:
            assert torch.equal(weights(names["optimizer"], model), before)
        if "handle" in names:
            assert (
                not names["handle"].active
                and float(names["optimizer"].state[model.body.weight]["step"]) == 2
            )
        if "fp32_state_dict" in names:
            assert torch.equal(names["model"].fc.weight, names["fp32_state_dict"]["fc.weight"])
    assert ran == len(blocks) - 1 >= 6
    assert (tmp_path / "checkpoint_int8.pt").stat().st_size <= (
        tmp_path / "checkpoint_fp32.pt"
    ).stat().st_size
