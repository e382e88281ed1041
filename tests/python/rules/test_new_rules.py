"""Tests rules against the code of their authors, or pytorch-optimizer, which keeps it: fp32 over a
few dozen steps."""

import pytest
import torch
from conftest import randn, told, twins
from torch.nn import Parameter

import halfstep

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")

SHAPES = {"w": (24, 40), "b": (40,), "k": (4, 3, 5), "s": ()}


def pair(shapes=SHAPES):
    """The same parameters twice."""
    torch.manual_seed(0)
    ours = {name: Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    return ours, twins(ours)


def gradients(ours, theirs, step):
    """Sets gradients of a quadratic with noise, which change sign and fall. Both get those of
    `ours`, so that differences do not grow."""
    source = torch.Generator().manual_seed(step)
    for name, p in ours.items():
        g = 0.1 * p.detach() + 0.05 * torch.randn(p.shape, generator=source) / (1 + step / 20)
        p.grad, theirs[name].grad = g, g.clone()


def follow(ours, ours_has, theirs, theirs_has, shapes=SHAPES, steps=40):
    """Steps two optimizers of equal parameters. Returns the largest difference of a weight, how far
    the weights came, and the optimizers."""
    params, others = pair(shapes)
    opt, peer = ours(params.items(), **ours_has), theirs(others.values(), **theirs_has)
    start = {name: p.detach().clone() for name, p in params.items()}
    for step in range(steps):
        gradients(params, others, step)
        opt.step()
        peer.step()
    apart = max((p - others[name]).abs().max().item() for name, p in params.items())
    moved = min((p - start[name]).abs().max().item() for name, p in params.items())
    return apart, moved, opt, peer


def check(ours, ours_has, theirs, theirs_has, shapes=SHAPES):
    apart, moved, _, _ = follow(ours, ours_has, theirs, theirs_has, shapes)
    assert moved > 0.04 and apart < 6e-6, f"{apart:.2e} apart after {moved:.2e}"


def adopt_clip(step):
    """pytorch-optimizer counts the first update, the authors' code does not."""
    return (step - 1) ** 0.25


@pytest.mark.parametrize(
    "ours_has, theirs_has",
    [
        ({}, {"clip_lambda": adopt_clip}),
        ({"clipped": False, "betas": (0.8, 0.99)}, {"clip_lambda": None, "betas": (0.8, 0.99)}),
        (
            {"weight_decay": 0.1, "eps": 1e-2},
            {"weight_decay": 0.1, "eps": 1e-2, "clip_lambda": adopt_clip},
        ),
    ],
    ids=["default", "no clip", "l2"],
)
def test_adopt(ours_has, theirs_has):
    theirs_has = {"lr": 1e-2, "foreach": False, **theirs_has}
    check(halfstep.ADOPT, {"lr": 1e-2, **ours_has}, pytorch_optimizer.ADOPT, theirs_has)


class CautiousDecay(torch.optim.Optimizer):
    """Algorithm 1 of Chen et al. 2025 around an optimizer without decay: decay acts where update
    and the weight have one sign, or one of them is 0."""

    def __init__(self, params, base, weight_decay, lr):
        super().__init__(params, {"lr": lr})
        self.base = base(self.param_groups[0]["params"], lr=lr, weight_decay=0.0)
        self.decay = lr * weight_decay

    def step(self):
        params = self.param_groups[0]["params"]
        before = [p.detach().clone() for p in params]
        self.base.step()
        with torch.no_grad():
            for p, old in zip(params, before):
                p.sub_(self.decay * old * ((old - p) * old >= 0))


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (halfstep.AdamW, torch.optim.AdamW),
        (halfstep.RAdam, torch.optim.RAdam),
        (halfstep.Lion, pytorch_optimizer.Lion),
    ],
)
def test_cautious_decay(ours, theirs):
    options = {"lr": 1e-2, "weight_decay": 0.5}
    check(ours, {"decay": "cautious", **options}, CautiousDecay, {"base": theirs, **options})


def test_adopt_s_first_update_moves_nothing():
    ours, theirs = pair()
    opt = halfstep.ADOPT(ours.items(), lr=1.0, weight_decay=0.5, decay="decoupled")
    gradients(ours, theirs, 0)
    opt.step()
    assert all(torch.equal(p, theirs[name]) for name, p in ours.items())
    assert all(torch.equal(opt.state[p]["exp_avg_sq"], p.grad * p.grad) for p in ours.values())
    opt.step()
    assert not any(torch.equal(p, theirs[name]) for name, p in ours.items())


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("warmup", [None, 25, 1000])
def test_ademamix(warmup, decoupled):
    common = {"lr": 1e-2, "weight_decay": 0.1}
    check(
        halfstep.AdEMAMix,
        {
            **common,
            "decay": "decoupled" if decoupled else "l2",
            "alpha_warmup": warmup or 0,
            "beta3_warmup": warmup or 0,
        },
        pytorch_optimizer.AdEMAMix,
        {**common, "weight_decouple": decoupled, "t_alpha_beta3": warmup, "foreach": False},
    )


@pytest.mark.parametrize("states, bound", [("bf16-sr", 0.02), ("int8", 0.03)])
def test_a_slow_average_does_not_wander(states, bound):
    """At beta3 0.9999 a gradient adds far less than the last place of 16 bits. Rounded to nearest,
    2000 of them add next to nothing."""
    p = Parameter(torch.zeros(64, 64))
    opt = halfstep.AdEMAMix([("p", p)], lr=0.0, states=states)
    for step in range(2000):
        p.grad = torch.full((64, 64), 0.5) + 0.1 * randn((64, 64), step)
        opt.step()
    wanted = 0.5 * (1 - 0.9999**2000)
    assert abs(opt.read_state(p, "exp_avg_slow").double().mean().item() / wanted - 1) < bound


@pytest.mark.parametrize(
    "options",
    [{}, {"gamma": 0.5, "betas": (0.9, 0.95), "weight_decay": 0.1}],
    ids=["default", "gamma"],
)
def test_mars(options):
    options = {"lr": 1e-2, "eps": 0.0, **options}  # eps is added to the raw root there
    more = {"optimize_1d": True, "weight_decouple": True, "foreach": False, "weight_decay": 0.0}
    check(halfstep.MARS, options, pytorch_optimizer.MARS, {**more, **options})


def test_a_group_of_mars_without_correction_is_adamw():
    options = {"lr": 1e-2, "betas": (0.9, 0.95)}
    check(
        halfstep.MARS,
        {"gamma": 0.0, "max_norm": 0.0, **options},
        torch.optim.AdamW,
        {"weight_decay": 0.0, **options},
    )


@pytest.mark.parametrize(
    "ours_has, theirs_has",
    [
        ({}, {}),
        ({"debias": True}, {"use_bias_correction": True}),
        # from 1e-6 a decay of 1e-7 of a weight would be lost to the roundings of the package, which
        # takes it by itself
        ({"d0": 1e-2, "weight_decay": 0.1}, {"d0": 1e-2, "weight_decay": 0.1}),
        (
            {"safeguard_warmup": True, "betas": (0.9, 0.99, 0.95)},
            {"safeguard_warmup": True, "betas": (0.9, 0.99), "beta3": 0.95},
        ),
        ({"growth_rate": 1.5, "d0": 1e-3}, {"growth_rate": 1.5, "d0": 1e-3}),
        (
            {"d_coef": 0.5, "weight_decay": 0.1, "decay": "l2"},
            {"d_coef": 0.5, "weight_decay": 0.1, "decouple": False},
        ),
        ({"slice_p": 11, "d0": 1e-4}, {"slice_p": 11, "d0": 1e-4}),
    ],
    ids=["default", "debias", "decay", "warmup", "growth", "l2", "slices"],
)
def test_prodigy(ours_has, theirs_has):
    """One estimate of all tensors, which grows from 1e-6 by five orders of magnitude."""
    prodigyopt = pytest.importorskip("prodigyopt")
    apart, moved, opt, peer = follow(
        halfstep.Prodigy, ours_has, prodigyopt.Prodigy, theirs_has, steps=60
    )
    wanted = peer.param_groups[0]["d"]
    assert wanted > 5 * ours_has.get("d0", 1e-6) and moved > 1e-3
    assert all(opt.scalar(p, "d") == pytest.approx(wanted, rel=1e-3) for p in opt.state)
    assert apart < 1e-3 * moved


#: shapes with factors over the last two dimensions
FACTORED = {**SHAPES, "experts": (3, 12, 20), "kernel": (6, 5, 3, 3)}
#: kernels of 1 x 1 are not factored here. Factors of one number are the moment itself, if no eps is
#: above it
POINT = {**FACTORED, "point": (6, 5, 1, 1)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "weight_decay": 0.1, "beta2_decay": -0.5},
        {"eps": (1e-2, 0.5), "d": 1.2, "maximize": True},
        {"eps": (0.5, 1e-3)},
    ],
    ids=["default", "decay", "eps", "floor"],
)
def test_adafactor_is_torch_s(options):
    shapes = FACTORED if "eps" in options else POINT
    check(halfstep.Adafactor, options, torch.optim.Adafactor, options, shapes)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"beta1": 0.9},
        {"lr": 1e-2, "relative_step": False, "scale_parameter": False, "decay_rate": -0.5},
        {"warmup_init": True},
        {"eps": (1e-3, 0.5), "clip_threshold": 2.0},
    ],
    ids=["default", "decay", "momentum", "lr", "warmup", "eps"],
)
def test_adafactor_is_transformers_too(options):
    """Also under AdafactorSchedule, which writes the rates that it reports into the groups."""
    theirs_of = pytest.importorskip("transformers.optimization").Adafactor
    from halfstep.compat.transformers import Adafactor

    makers = scheduled(Adafactor), scheduled(theirs_of)
    apart, moved, opt, peer = follow(makers[0], options, makers[1], options, FACTORED)
    assert moved > (1e-4 if "warmup_init" in options else 0.05) and apart < 1e-4 * moved
    if hasattr(peer, "schedule"):
        (rate,), (theirs,) = opt.schedule.get_last_lr(), peer.schedule.get_last_lr()
        assert opt.param_groups[0]["lr"] == rate == pytest.approx(float(theirs), rel=1e-4)
    (group,) = opt.param_groups
    p = group["params"][0]
    assert opt._get_lr(group, opt.state[p]) == pytest.approx(
        theirs_of._get_lr(
            theirs_of([Parameter(p.detach())], **options).param_groups[0],
            {"step": 40, "RMS": opt.scalar(p, "weight_rms")},
        )
    )


def scheduled(cls):
    """Returns a function that makes an optimizer of a class of transformers' Adafactor, with its
    AdafactorSchedule where steps are relative. The schedule steps after each step."""

    def make(params, **options):
        from transformers.optimization import AdafactorSchedule

        opt = cls(params, **options)
        if options.get("relative_step", True):
            opt.schedule = AdafactorSchedule(opt)
            opt.register_step_post_hook(lambda *_: opt.schedule.step())
        return opt

    return make


def test_relative_steps_have_no_rate_that_others_set():
    """A first step that is skipped leaves the schedule's rate. Schedulers of torch are refused, and
    a rate that DCP or a user sets has no effect."""
    pytest.importorskip("transformers.optimization")
    from halfstep.compat.transformers import Adafactor

    weights = [Parameter(torch.ones(4, 4)) for _ in range(2)]
    opt, other = scheduled(Adafactor)(weights[:1]), Adafactor(weights[1:])
    assert other.param_groups[0]["lr"] is None
    with pytest.raises(TypeError):
        torch.optim.lr_scheduler.LambdaLR(other, lambda step: 0.5)
    for gradient in (float("nan"), 1.0, 2.0):
        for p in weights:
            p.grad = torch.full((4, 4), gradient)
        for one in (opt, other):
            with told("is not finite", gradient != gradient):
                one.step()
        assert (opt.schedule.get_last_lr()[0] == 0.0) == (gradient != gradient)
    assert opt.skipped_steps == 1 and torch.equal(*weights) and weights[0].max() < 1.0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "clip_threshold": 0.5},
        {"betas": (0.8, 0.9, 0.95), "eps": (1e-3, 1e-2)},
    ],
    ids=["default", "decay", "betas"],
)
def test_came(options):
    came_pytorch = pytest.importorskip("came_pytorch")
    from halfstep.compat.came_pytorch import CAME

    options = {"lr": 1e-2, **options}
    apart, moved, _, _ = follow(CAME, options, came_pytorch.CAME, options, FACTORED)
    assert moved > 0.02 and apart < 1e-4 * moved


def test_flatten_makes_factors_of_the_first_dimension_and_the_rest():
    torch.manual_seed(1)
    start = torch.randn(8, 3, 5)
    for cls, options in ((halfstep.Adafactor, {}), (halfstep.CAME, {"lr": 1e-2})):
        kernel, matrix = Parameter(start.clone()), Parameter(start.flatten(1).clone())
        opts = cls([kernel], matrix="flatten", **options), cls([matrix], **options)
        for step in range(5):
            kernel.grad = randn((8, 3, 5), step)
            matrix.grad = kernel.grad.flatten(1)
            for opt in opts:
                opt.step()
        assert torch.equal(kernel.flatten(1), matrix) and not torch.equal(kernel, start)
        assert opts[0].memory()["states"] < (5 if cls is halfstep.CAME else 2) * 4 * kernel.numel()


def other_adafactor(name):
    if name == "torch":
        return torch.optim.Adafactor, halfstep.Adafactor, {"lr": 0.05}, {}
    if name == "transformers":
        from halfstep.compat.transformers import Adafactor

        theirs = pytest.importorskip("transformers.optimization").Adafactor
        return theirs, Adafactor, {"beta1": 0.5}, {}
    from halfstep.compat.came_pytorch import CAME

    return pytest.importorskip("came_pytorch").CAME, CAME, {"lr": 1e-2}, {"lr": 1.0}


@pytest.mark.parametrize("name", ["torch", "transformers", "came_pytorch"])
def test_states_of_factors_are_taken_over(name):
    theirs_of, cls, options, first = other_adafactor(name)
    ours, theirs = pair({**FACTORED, "row": (1, 40), "column": (40, 1)})
    theirs_of = scheduled(theirs_of) if name == "transformers" else theirs_of
    peer = theirs_of(theirs.values(), **options)
    for step in range(10):
        gradients(ours, theirs, step)
        peer.step()
    for key, p in ours.items():
        p.data.copy_(theirs[key].data)
    opt = cls(ours.items(), **first)
    opt.load_state_dict(peer.state_dict())
    assert opt.param_groups[0]["lr"] == options.get("lr", 1e-2)
    if name == "transformers":
        halves = halfstep.Adafactor(twins(ours).items())
        halves.load_state_dict(peer.state_dict())
        assert halves.param_groups[0]["lr"] == 1e-2  # and not the rate that was reported
    for step in range(10, 20):
        gradients(ours, theirs, step)
        opt.step()
        peer.step()
    for key, p in ours.items():
        if name == "torch" or min(p.shape, default=0) != 1:  # the packages have factors of one row
            assert (p - theirs[key]).abs().max() < 2e-5, key
    if name == "torch":
        kernel = Parameter(torch.randn(4, 3, 5))
        peer = theirs_of([kernel], **options)
        for _ in range(3):
            kernel.grad = torch.randn(4, 3, 5)
            peer.step()
        found = Parameter(kernel.detach().clone())
        opt = cls([found])
        opt.load_state_dict(peer.state_dict())
        state = peer.state[kernel]
        assert torch.equal(opt.read_state(found, "row_var"), state["row_var"].squeeze(-1))
        assert torch.equal(opt.read_state(found, "col_var"), state["col_var"].squeeze(-2))
