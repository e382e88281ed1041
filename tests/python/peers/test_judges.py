"""Other implementations judge ours: our classes follow their trajectories. torch.optim judges every
rule it has. HeavyBall, DeepSpeed's CPU Adam and bitsandbytes judge theirs where they are installed.
torchao, torch-optimi, torchastic and FlashOptim judge in the test_compat_*.py files.
"""

import math
import os
import sysconfig

import pytest
import torch
from conftest import TORCH, class_of, randn, warnings_are
from torch import nn
from torch.nn import Parameter

import halfstep
from halfstep._library import abi

SHAPES = {
    "matrix": (64, 48),
    "tall": (130, 33),
    "vector": (257,),
    "kernel": (16, 8, 3, 3),
    "scalar": (),
}
MATRICES = {"square": (48, 48), "wide": (24, 96), "tall": (96, 24)}


def start(shapes=SHAPES, scale=1.0, dtype=torch.float32):
    g = torch.Generator().manual_seed(5)
    return {
        n: Parameter((scale * torch.randn(s, generator=g)).to(dtype)) for n, s in shapes.items()
    }


def twins(params, dtype=None):
    return {n: Parameter(p.detach().clone().to(dtype or p.dtype)) for n, p in params.items()}


def gradients(params, step, scale=1.0, dtype=torch.float32):
    """Sets equal gradients for all, of values that `dtype` represents: noisy, with a mean."""
    for i, (n, p) in enumerate(params.items()):
        g = torch.Generator().manual_seed(1000 * step + i)
        p.grad = (
            (scale * (torch.randn(p.shape, generator=g) + 0.3 * math.sin(step + i)))
            .to(dtype)
            .to(p.dtype)
        )


def against(ours, theirs, options, others=None, shapes=SHAPES):
    """Makes two optimizers of equal parameters. Returns each with its parameters."""
    params = start(shapes)
    reference = twins(params)
    opt = ours(params.values(), **options)
    return opt, params, theirs(reference.values(), **(others or options)), reference


def steps_of(*pairs, steps, scale=1.0, dtype=torch.float32):
    """Steps several optimizers of the same parameters. Yields after each step."""
    for step in range(steps):
        for opt, params in pairs:
            gradients(params, step, scale, dtype)
            opt.step()
        yield step


def wrong(a, b, rtol, atol):
    return int((~torch.isclose(a.detach().float(), b.detach().float(), rtol=rtol, atol=atol)).sum())


def follow(
    opt, params, judge, reference, steps=40, rtol=1e-5, atol=1e-6, rate=5e-4, scale=1.0, before=None
):
    """Steps both. After each step at most rate * n elements of a tensor, or a few, may be off."""
    for step in range(steps):
        if before:
            before(step)
        for o, ps in ((opt, params), (judge, reference)):
            gradients(ps, step, scale)
            o.step()
        for n, p in params.items():
            off = wrong(p, reference[n], rtol, atol)
            assert off <= max(2, rate * p.numel()), (
                f"step {step}, {n}: {off} of {p.numel()} off by up to"
                f" {float((p - reference[n]).abs().max()):.3g}"
            )


# ---- torch.optim ---------------------------------------------------------------------------------

CASES = {
    "sgd": [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.9, "maximize": True},
        {"momentum": 0.5, "weight_decay": 0.1, "maximize": True},
    ],
    "adam": [
        {},
        {"weight_decay": 0.1},
        {"amsgrad": True},
        {"amsgrad": True, "weight_decay": 0.1, "betas": (0.8, 0.9)},
        {"maximize": True, "weight_decay": 0.1},
        {"decoupled_weight_decay": True, "weight_decay": 0.1},
        {"eps": 1e-3},
        {"betas": (0.0, 0.5)},
    ],
    "adamw": [
        {},
        {"weight_decay": 0.3},
        {"amsgrad": True},
        {"maximize": True},
        {"betas": (0.95, 0.98), "eps": 1e-6},
        {"amsgrad": True, "maximize": True, "weight_decay": 0.0},
    ],
    "radam": [
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"maximize": True},
        {"betas": (0.9, 0.9)},
        {"eps": 1e-10},
    ],
    "rmsprop": [
        {},
        {"centered": True},
        {"momentum": 0.9},
        {"momentum": 0.9, "centered": True, "weight_decay": 0.01},
        {"alpha": 0.9, "maximize": True},
        {"eps": 1e-3},
    ],
}
LR = {"sgd": 0.05, "adam": 0.01, "adamw": 0.01, "radam": 0.02, "rmsprop": 0.003}


@pytest.mark.parametrize(
    "rule,options",
    [pytest.param(r, o, id=f"{r}-{'-'.join(o) or 'plain'}") for r in CASES for o in CASES[r]],
)
def test_follows_torch(rule, options):
    options = {"lr": LR[rule], **options}
    opt, params, judge, reference = against(class_of(rule), TORCH[rule], options)
    # Centred RMSprop divides by the root of a difference of near equals: the last bits of v count
    # for more.
    loose = {}
    if options.get("centered") or rule == "radam":
        loose = {"rtol": 1e-4, "atol": 1e-4 if rule == "rmsprop" else 3e-6}
    follow(opt, params, judge, reference, **loose)
    for n, p in params.items():
        for key, value in judge.state[reference[n]].items():
            if key == "step" or value is None:
                continue
            # RMSprop's buffer holds updates of any size.
            assert wrong(opt.read_state(p, key), value, 1e-4, 1e-5) <= max(2, 1e-3 * p.numel()), (
                n,
                key,
            )


@pytest.mark.parametrize("rule", CASES)
def test_follows_torch_with_rates_that_change(rule):
    """lr, betas, momentum and decay edited between steps, as schedulers do."""
    options = {"sgd": {"momentum": 0.9}, "rmsprop": {"momentum": 0.5}}.get(rule, {})
    options = {"lr": LR[rule], **options}
    opt, params, judge, reference = against(class_of(rule), TORCH[rule], options)

    def edit(step):
        for o in (opt, judge):
            group = o.param_groups[0]
            group["lr"] = LR[rule] * (1.5 + math.sin(step))
            group["weight_decay"] = 0.01 * (step % 3)
            if "betas" in group:
                group["betas"] = (0.9 - 0.01 * (step % 5), 0.99)
            if "momentum" in group:
                group["momentum"] = 0.9 - 0.02 * (step % 4)

    follow(opt, params, judge, reference, rtol=1e-4, atol=1e-5, before=edit)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3])
def test_follows_torch_at_any_gradient_scale(scale):
    for rule in ("adamw", "radam", "rmsprop"):
        # RAdam's eps is added to the debiased root here, to the raw one there: docs/differences.md.
        options = {"lr": LR[rule], "eps": 1e-8 if rule != "radam" else 1e-8 * scale * 1e-3}
        both = against(class_of(rule), TORCH[rule], options)
        follow(*both, steps=15, rtol=1e-4, atol=1e-5, scale=scale)


MUON = [
    {},
    {"nesterov": False},
    {"weight_decay": 0.0},
    {"momentum": 0.8},
    {"adjust_lr_fn": "match_rms_adamw"},
    {"adjust_lr_fn": "original", "ns_steps": 3},
    {"ns_coefficients": (3.0, -3.2, 1.2)},
]
with_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


@with_muon
@pytest.mark.parametrize("options", MUON, ids=["-".join(o) or "plain" for o in MUON])
def test_follows_torch_muon(options, monkeypatch):
    """torch orthogonalises in BF16, the library in fp32. With torch's arithmetic done in fp32 the
    trajectories agree as those of other rules do. With torch as it is, they agree to BF16's
    precision."""
    for exact in (True, False):
        with monkeypatch.context() as patch:
            if exact:
                patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
            opt, params, judge, reference = against(
                halfstep.Muon, torch.optim.Muon, {"lr": 0.02, **options}, shapes=MATRICES
            )
            if exact:
                follow(opt, params, judge, reference, rtol=1e-4, atol=2e-5, rate=1e-3)
            else:
                follow(opt, params, judge, reference, steps=5, rtol=2e-2, atol=2e-2, rate=1e-2)
            for n, p in params.items():
                buffer = judge.state[reference[n]]["momentum_buffer"]
                torch.testing.assert_close(
                    opt.read_state(p, "momentum_buffer"), buffer, rtol=1e-5, atol=1e-6
                )


@with_muon
def test_follows_torch_muon_at_tiny_gradients(monkeypatch):
    """Norms are below eps, so the division is by eps and the matrix is not orthogonal."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    for eps in (1e-7, 1e-2):
        options = {"lr": 0.02, "eps": eps}
        both = against(halfstep.Muon, torch.optim.Muon, options, shapes=MATRICES)
        follow(*both, steps=10, rtol=1e-4, atol=2e-5, rate=1e-3, scale=1e-5)


@pytest.mark.parametrize("rule", CASES)
def test_exact_weights_in_bf16_follow_torch_in_fp32(rule):
    """bf16-ecc16 weights are fp32 in two parts. With f32 states the judge is torch on fp32
    parameters."""
    low = start(dtype=torch.bfloat16)
    reference = twins(low, torch.float32)
    options = {"sgd": {"momentum": 0.9}}.get(rule, {})
    opt = class_of(rule)(low.items(), lr=LR[rule], weights="bf16-ecc16", states="f32", **options)
    judge = TORCH[rule](list(reference.values()), lr=LR[rule], **options)
    list(steps_of((opt, low), (judge, reference), steps=30, dtype=torch.bfloat16))
    for n, p in low.items():
        assert wrong(opt.read_weight(p), reference[n], 1e-4, 3e-6) <= max(2, 1e-3 * p.numel()), n


@pytest.mark.parametrize("weights,limit", [("bf16-kahan", 1.5 * 2.0**-13), ("bf16-ecc8", 2.0**-11)])
def test_weights_of_24_bits_follow_torch_in_fp32(weights, limit):
    """Kahan and 24-bit weights drift from fp32 by their rounding only."""
    low = start(dtype=torch.bfloat16)
    reference = twins(low, torch.float32)
    opt = halfstep.AdamW(low.items(), lr=1e-3, weights=weights, states="f32")
    judge = torch.optim.AdamW(reference.values(), lr=1e-3)
    list(steps_of((opt, low), (judge, reference), steps=40, dtype=torch.bfloat16))
    for n, p in low.items():
        error = (opt.read_weight(p) - reference[n].detach()).abs() / (
            reference[n].detach().abs() + 1e-2
        )
        assert float(error.max()) < limit, (n, float(error.max()))


def test_stochastic_weights_follow_torch_in_the_mean():
    """lr is 1e-5 on BF16 weights of 1. Each update is 1/400 of their spacing, and nearest rounding
    would never move."""
    p = Parameter(torch.ones(512, 512, dtype=torch.bfloat16))
    q = Parameter(torch.ones(1))
    opt, judge = halfstep.AdamW([("p", p)], lr=1e-5), torch.optim.AdamW([q], lr=1e-5)
    for step in range(50):
        value = 1.0 + 0.5 * math.sin(step)
        p.grad, q.grad = torch.full_like(p, value), torch.full_like(q, value)
        q.grad = q.grad.bfloat16().float()
        opt.step()
        judge.step()
    moved, want = 1 - p.detach().double().mean().item(), 1 - q.item()
    assert abs(moved / want - 1) < 0.05, (moved, want)


@pytest.mark.parametrize(
    "states,limit",
    [
        ("bf16-sr", 0.01),
        ("int8", 0.04),
        ("int6", 0.2),
        ("int8+int4", 0.22),
        ("int4", 0.5),
        ("fp8", 0.09),
        ("dyn8", 0.06),
    ],
)
def test_quantized_states_follow_torch(states, limit):
    """Compares the relative error of the whole movement over 60 steps, with fp32 weights and
    gradients of unequal sizes within rows."""
    options = {"lr": 1e-3, "weight_decay": 0.0}
    opt, params, judge, reference = against(
        halfstep.AdamW, torch.optim.AdamW, {**options, "states": states}, options, {"w": (64, 256)}
    )
    begin = params["w"].detach().clone()
    sizes = torch.exp(0.5 * randn((64, 256), 2))
    for step in range(60):
        gradients(params, step)
        gradients(reference, step)
        params["w"].grad.mul_(sizes)
        reference["w"].grad.mul_(sizes)
        opt.step()
        judge.step()
    moved, want = params["w"].detach() - begin, reference["w"].detach() - begin
    error = float((moved - want).norm() / want.norm())
    assert error < limit, error


# ---- HeavyBall -----------------------------------------------------------------------------------


@pytest.fixture
def heavyball():
    module = pytest.importorskip("heavyball")
    import heavyball.utils

    before = heavyball.utils.compile_mode
    heavyball.utils.compile_mode = None  # its arithmetic, without minutes of compiling it
    yield module
    heavyball.utils.compile_mode = before


#: our class and options, HeavyBall's class and its own options where they differ
HEAVYBALL = [
    ("AdamW", {"betas": (0.9, 0.99), "weight_decay": 0.1}, "AdamW", None),
    ("AdamW", {"betas": (0.8, 0.999), "weight_decay": 0.0, "eps": 1e-6}, "AdamW", None),
    ("SGD", {"momentum": 0.9}, "SGD", {"beta": 0.9}),
    (
        "SGD",
        {"momentum": 0.9, "weight_decay": 0.1, "decay": "decoupled"},
        "SGD",
        {"beta": 0.9, "weight_decay": 0.1},
    ),
    ("RMSProp", {"alpha": 0.99, "debias": True}, "RMSprop", {"betas": (0.0, 0.99), "eps": 1e-8}),
    ("ScheduleFree", {"betas": (0.9, 0.99)}, "SFAdamW", {"betas": (0.9, 0.99), "eps": 1e-8}),
    (
        "ScheduleFree",
        {"betas": (0.8, 0.95), "weight_decay": 0.0},
        "SFAdamW",
        {"betas": (0.8, 0.95), "eps": 1e-8},
    ),
]


@pytest.mark.parametrize(
    "ours,options,theirs,others", HEAVYBALL, ids=[f"{h[0]}-{i}" for i, h in enumerate(HEAVYBALL)]
)
def test_follows_heavyball(heavyball, ours, options, theirs, others):
    others = {"lr": 0.01, "compile_step": False, **(others or options)}
    ours, theirs = getattr(halfstep, ours), getattr(heavyball, theirs)
    follow(*against(ours, theirs, {"lr": 0.01, **options}, others), rtol=1e-4, atol=5e-6)


def test_schedule_free_evaluates_as_heavyball(heavyball):
    """Compares the weights to evaluate: read_average() and HeavyBall's eval mode."""
    options = {"lr": 0.01, "betas": (0.9, 0.99)}
    opt, params, judge, reference = against(
        halfstep.ScheduleFree,
        heavyball.SFAdamW,
        options,
        {**options, "eps": 1e-8, "compile_step": False},
        {"w": (64, 48)},
    )
    follow(opt, params, judge, reference, steps=20, rtol=1e-4, atol=5e-6)
    judge.eval()
    torch.testing.assert_close(
        opt.read_average(params["w"]), reference["w"].detach(), rtol=1e-4, atol=1e-5
    )


def test_muon_points_where_heavyball_points(heavyball):
    """Its iteration has other coefficients. The updates must be the same orthogonal matrix to the
    precision of both."""
    options = {"lr": 0.01, "nesterov": False}
    opt, params, judge, reference = against(
        halfstep.Muon,
        heavyball.Muon,
        {**options, "weight_decay": 0.0, "momentum": 0.95},
        {**options, "betas": (0.95, 0.99), "compile_step": False},
        MATRICES,
    )
    begin = twins(params)
    list(steps_of((opt, params), (judge, reference), steps=5))
    for n in params:
        a, b = ((ps[n] - begin[n]).detach().flatten() for ps in (params, reference))
        assert float(torch.dot(a, b) / (a.norm() * b.norm())) > 0.97, n


def test_bf16_with_stochastic_rounding_moves_as_heavyball(heavyball):
    """Both are unbiased: means over many weights agree with fp32."""
    g = torch.Generator().manual_seed(3)
    begin = torch.rand((256, 512), generator=g) + 1
    ours, theirs = (Parameter(begin.bfloat16()) for _ in range(2))
    exact = Parameter(begin.bfloat16().float())
    opts = (
        halfstep.AdamW([("p", ours)], lr=1e-4, weight_decay=0.0),
        heavyball.AdamW([theirs], lr=1e-4, betas=(0.9, 0.999), compile_step=False),
        torch.optim.AdamW([exact], lr=1e-4, weight_decay=0.0),
    )
    for step in range(20):
        grad = (torch.rand((256, 512), generator=g) + 0.5).bfloat16()
        for p in (ours, theirs, exact):
            p.grad = grad.to(p.dtype).clone()
        for o in opts:
            o.step()
    moved = [
        float((p.detach().double() - begin.bfloat16().double()).mean())
        for p in (ours, theirs, exact)
    ]
    assert abs(moved[0] / moved[2] - 1) < 0.03, moved
    assert abs(moved[0] - moved[2]) < 2 * abs(moved[1] - moved[2]) + 0.01 * abs(moved[2]), moved


# ---- DeepSpeed -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpu_adam():
    """Returns DeepSpeed's CPU Adam. It compiles itself at first use, which takes minutes; torch
    keeps the result."""
    pytest.importorskip("deepspeed")
    if "HALFSTEP_BUILD" in os.environ:
        os.environ.setdefault(
            "TORCH_EXTENSIONS_DIR", os.path.join(os.environ["HALFSTEP_BUILD"], "torch_extensions")
        )
    scripts = sysconfig.get_path("scripts")
    os.environ["PATH"] = os.pathsep.join(
        [scripts, os.environ.get("PATH", "")]
    )  # ninja is installed there
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    try:
        p = Parameter(torch.zeros(8))
        p.grad = torch.ones(8)
        DeepSpeedCPUAdam([p], lr=0.0).step()
    except Exception as error:  # no compiler, no headers, ... : its own affair
        pytest.skip(f"DeepSpeed's CPU Adam does not build here: {str(error)[-300:]}")
    return DeepSpeedCPUAdam


@pytest.mark.all
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_follows_deepspeed(cpu_adam, decoupled, decay):
    cls, options = (
        halfstep.AdamW if decoupled else halfstep.Adam,
        {"lr": 0.01, "weight_decay": decay},
    )
    both = against(cls, cpu_adam, options, {**options, "adamw_mode": decoupled})
    follow(*both, rtol=1e-4, atol=5e-6, rate=1e-3)


@pytest.mark.all
@pytest.mark.parametrize("size", [22, 55, 127, 1024, 1048576])
def test_follows_deepspeed_in_its_own_sizes(cpu_adam, size):
    """Its suite's sizes, ten steps. Its limit is 1 % of the norm; this one is on every element."""
    options = {"lr": 1e-3, "weight_decay": 1e-2}
    both = against(halfstep.AdamW, cpu_adam, options, shapes={"p": (size,)})
    follow(*both, steps=5 if size > 10000 else 10, rtol=1e-5, atol=2e-6)


@pytest.mark.all
def test_follows_deepspeed_with_bf16_weights_to_nearest(cpu_adam):
    """weights="bf16", states="f32" is what it does with BF16 parameters. All but a few roundings
    are equal."""
    params = start(dtype=torch.bfloat16)
    reference = twins(params)
    opt = halfstep.AdamW(params.items(), lr=0.01, weights="bf16", states="f32")
    judge = cpu_adam(list(reference.values()), lr=0.01, weight_decay=1e-2)
    for _ in steps_of((opt, params), (judge, reference), steps=10):
        for n, p in params.items():
            assert wrong(p, reference[n], 2.0**-7, 0) == 0, n
            different = float((p != reference[n]).float().mean())
            assert different < 0.02 or p.numel() < 10, (n, different)


# ---- bitsandbytes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bitsandbytes():
    with warnings_are("ignore"):
        return pytest.importorskip("bitsandbytes")


def distances(ours, theirs, exact, **options):
    """Makes 50 steps. Returns the mean distance of our weights from theirs, of theirs from exact
    ones, and of ours from exact ones."""
    params = start({"w": (64, 256)}, 0.1)
    made = [(ours(params.values(), lr=1e-3, **options), params)]
    for cls in (theirs, exact):
        copied = twins(params)
        made.append((cls(copied.values(), lr=1e-3), copied))
    list(steps_of(*made, steps=50, scale=0.01))
    a, b, c = (ps["w"].detach() for _, ps in made)
    return [float((x - y).abs().mean()) for x, y in ((a, b), (b, c), (a, c))]


@pytest.mark.parametrize("rule,name", [("adam", "Adam8bit"), ("adamw", "AdamW8bit")])
def test_dyn8_follows_bitsandbytes(bitsandbytes, rule, name):
    """The same maps over the same blocks: much nearer to it than it is to fp32."""
    ours, theirs, _ = distances(
        class_of(rule), getattr(bitsandbytes.optim, name), TORCH[rule], states="dyn8"
    )
    assert ours < 0.25 * theirs, (ours, theirs)


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 6e-5), (torch.bfloat16, 1.7e-4)])
@pytest.mark.parametrize("states", ["int8", "dyn8", "fp8"])
@pytest.mark.parametrize("rule", ["adam", "adamw"])
@pytest.mark.told("weights='bf16-sr' has nothing to act on", dtype=torch.float32)
def test_within_the_limits_of_bitsandbytes_tests(rule, states, dtype, limit):
    """Its test of 8-bit optimizers: 50 steps beside torch in fp32, whose state is replaced by the
    8-bit one's after each. Fewer than 20 elements of a state may be off at atol 3e-3, rtol 1e-3.
    The mean error of weights must be below the limit.
    """
    p = Parameter((0.1 * randn((256, 512), 0)).to(dtype))
    q = Parameter(p.detach().float())
    opt = class_of(rule)([("p", p)], lr=1e-3, states=states, weights="bf16-sr")
    judge = TORCH[rule]([q], lr=1e-3)
    for step in range(50):
        g = 0.01 * randn((256, 512), step + 1)
        p.grad = g.to(dtype)
        q.grad = p.grad.float()
        opt.step()
        judge.step()
        assert float((p.detach().float() - q.detach()).abs().mean()) < limit, step
        for key in ("exp_avg", "exp_avg_sq"):
            value = opt.read_state(p, key)
            assert wrong(value, judge.state[q][key], 1e-3, 3e-3) < 20, (step, key)
            judge.state[q][key].copy_(value)
        with torch.no_grad():
            q.copy_(p.float())


def test_int8_is_no_farther_from_fp32_than_bitsandbytes(bitsandbytes):
    """Runs both for 50 steps without corrections and compares the mean error of the weights, in
    fp32, with equal gradients. Their codes to nearest scatter less over so few steps.
    bench/traps.py has longer runs."""
    _, theirs, ours = distances(
        halfstep.Adam, bitsandbytes.optim.Adam8bit, torch.optim.Adam, states="int8"
    )
    assert ours < 1.25 * theirs, (ours, theirs)


def test_follows_bitsandbytes_lion(bitsandbytes):
    """32-bit Lion. Its signs make trajectories equal, except where the interpolation is about
    zero."""
    options = {"lr": 1e-3, "weight_decay": 0.1}
    both = against(halfstep.Lion, bitsandbytes.optim.Lion, options, shapes={"w": (64, 48)})
    try:
        follow(*both, steps=30)
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"bitsandbytes has no 32-bit Lion on this device: {error}")


# ---- Training ------------------------------------------------------------------------------------


def trained(make, steps=60, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.Mish(), nn.Linear(64, 1))
    model = model.to(dtype)
    opt = make(model)
    losses = []
    for step in range(steps):
        g = torch.Generator().manual_seed(step)
        x = torch.randn((64, 32), generator=g).to(dtype)
        y = (x.float() * torch.arange(32.0).sin()).sum(1, keepdim=True)
        loss = (model(x).float() - y).pow(2).mean()
        losses.append(float(loss.detach()))
        loss.backward()
        opt.step()
        opt.zero_grad()
    return losses


@pytest.mark.parametrize("rule", CASES)
def test_trains_as_torch(rule):
    """A real loss, in which every step depends on the steps before."""
    options = {"sgd": {"momentum": 0.9, "lr": 0.01}}.get(rule, {"lr": 0.01})
    ours = trained(lambda m: class_of(rule)(m.named_parameters(), **options))
    theirs = trained(lambda m: TORCH[rule](m.parameters(), **options))
    assert theirs[-1] < 0.5 * theirs[0]
    for step, (a, b) in enumerate(zip(ours, theirs)):
        assert math.isclose(a, b, rel_tol=2e-3), (step, a, b)


@pytest.mark.parametrize(
    "recipe", ["bf16-sr", "bf16-sr/int8", "bf16-kahan/int8", "bf16-ecc8/int4", "bf16-sr/int4"]
)
def test_low_precision_trains_as_fp32(recipe):
    """BF16 weights and gradients with 8- and 4-bit states reach the loss of fp32 AdamW within its
    noise."""
    theirs = trained(lambda m: torch.optim.AdamW(m.parameters(), lr=0.005), 150)
    ours = trained(
        lambda m: halfstep.optimizer(f"adamw/{recipe}", m.named_parameters(), lr=0.005),
        150,
        torch.bfloat16,
    )
    late, want = sum(ours[-20:]) / 20, sum(theirs[-20:]) / 20
    assert want < 0.25 * theirs[0]
    assert late < 1.35 * want + 0.02 * theirs[0], (late, want, theirs[0])


# ---- Published coefficients of Muon --------------------------------------------------------------


def polar_express(u, steps):
    """Algorithm 1 of Amsel et al. 2025 (arXiv:2505.16932), in fp32."""
    listed = [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    ]
    safe = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in listed]
    x = u / (u.norm() * 1.01 + 1e-7)
    return quintics(x, (safe + [(1.875, -1.25, 0.375)] * steps)[:steps])


def deepseek_v4(u, steps):
    """Eight iterations with Jordan's coefficients, then two (more if asked) with 2, -1.5, 0.5."""
    x = u / (u.norm() + 1e-7)
    return quintics(x, [(3.4445, -4.775, 2.0315)] * 8 + [(2, -1.5, 0.5)] * (max(steps, 10) - 8))


def dion(u, steps):
    """newton_schulz_triton.py of microsoft/dion."""
    listed = [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        *[(2.8366, -3.0525, 1.2012)] * steps,
    ]
    return quintics(u / (u.norm() + 1e-7), listed[:steps])


def quintics(x, coefficients):
    tall = x.size(0) > x.size(1)
    x = x.mT if tall else x
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


PUBLISHED = {"polar-express": polar_express, "deepseek-v4": deepseek_v4, "dion": dion}


def test_published_coefficients_are_all_judged():
    assert set(PUBLISHED) == set(abi.choices("ns_coefficients")[1:])


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("steps", [5, 7, 12])
@pytest.mark.parametrize("form, atol", [("standard", 1e-4), ("gram", 5e-4)])
def test_follows_published_coefficients(name, steps, form, atol):
    """Muon with each list beside its authors' equations, over trajectories of matrices whose
    singular values fall as 1/k^2, of rank 2, and normal ones."""
    options = {"ns_coefficients": name, "ns_steps": steps, "ns_form": form}
    generator = torch.Generator().manual_seed(1)
    for shape in ((24, 60), (60, 24), (32, 32)):
        normal = torch.randn(shape, generator=generator)
        u, s, v = torch.linalg.svd(normal, full_matrices=False)
        falling = u @ torch.diag(1 / torch.arange(1.0, len(s) + 1) ** 2) @ v
        for gradient in (normal, falling, u[:, :2] @ v[:2]):
            p = Parameter(torch.zeros(shape))
            opt = halfstep.Muon([p], lr=0.1, weight_decay=0.0, **options)
            weight, momentum = torch.zeros(shape), torch.zeros(shape)
            for step in range(3):
                g = gradient + 1e-3 * torch.randn(shape, generator=generator)
                p.grad = g.clone()
                opt.step()
                momentum.lerp_(g, 0.05)
                scale = 0.1 * max(1, shape[0] / shape[1]) ** 0.5
                weight -= scale * PUBLISHED[name](g.lerp(momentum, 0.95), steps)
            torch.testing.assert_close(p.detach(), weight, rtol=1e-3, atol=atol)
