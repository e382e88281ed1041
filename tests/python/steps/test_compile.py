"""Tests that torch.compile around a training step, and of the step itself, gives the bits of
eager."""

import contextlib
import warnings

import pytest
import torch
from conftest import (
    RECIPES,
    bits,
    class_of,
    randn,
    run,
    same,
    set_gradients,
    states,
    warnings_are,
    weights_of,
)
from torch import nn

import halfstep

pytestmark = pytest.mark.skipif(not hasattr(torch, "compile"), reason="this torch has no compiler")
BACKENDS = ["eager", "aot_eager"]
STEPS = 4


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    with warnings_are("ignore"):  # the compiler's own
        yield
    torch._dynamo.reset()


def network(dtype=torch.float32):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 8)).to(dtype)


def make(rule, recipe, **options):
    dtype, formats = RECIPES[recipe]
    model = network(dtype)
    return model, class_of(rule)(model.named_parameters(), lr=0.01, seed=0, **formats, **options)


def batch(step, model):
    return randn((16, 40), step, next(model.parameters()).dtype)


def result(model, opt):
    return weights_of(model), states(opt)


def compiled_step(opt, backend="eager"):
    return torch.compile(opt.step, fullgraph=True, backend=backend)


def as_eager(train, rule="adamw", recipe="ecc8-int8", backend="eager"):
    """Trains with plain steps, then with compiled ones. Both must end with the same bits."""
    found = []
    for compiled in (False, True):
        model, opt = make(rule, recipe, compile=compiled)
        train(model, opt, compiled_step(opt, backend) if compiled else opt.step)
        found.append(result(model, opt))
    assert found[0] == found[1]


@contextlib.contextmanager
def skipped_without_a_compiler():
    try:
        yield
    except Exception as error:
        if (
            "compiler" not in str(error).lower()
            and "InvalidCxxCompiler" not in type(error).__name__
        ):
            raise
        pytest.skip(f"no C++ compiler that inductor can use: {str(error)[:200]}")


def training_step(model, opt):
    def run(x):
        opt.zero_grad()
        loss = model(x).float().pow(2).mean()
        loss.backward()
        opt.step()
        return loss.detach()

    return run


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", ["f32", "ecc8-int8", "sr-int4"])
@pytest.mark.parametrize("compile_option", [False, True])
def test_compiled_training_step(backend, recipe, compile_option):
    found = []
    for compiled in (False, True):
        model, opt = make("adamw", recipe, compile=compile_option and compiled)
        run = training_step(model, opt)
        if compiled:
            run = torch.compile(run, backend=backend)
        losses = [run(batch(step, model)).item() for step in range(STEPS)]
        assert all(opt.state[p]["step"].item() == STEPS for p in model.parameters())
        found.append((losses, result(model, opt)))
    assert found[0] == found[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "rule,recipe",
    [
        ("adamw", "f32"),
        ("adamw", "bf16-sr"),
        ("adamw", "ecc8-int8"),
        ("adamw", "sr-int4"),
        ("sgd", "f32"),
        ("lion", "sr-int4"),
        ("muon", "kahan"),
        ("lamb", "ecc8-int8"),
        ("schedulefree", "kahan"),
    ],
)
def test_compiled_optimizer_step(backend, rule, recipe):
    """compile=True gives one graph, no break, and the bits of an ordinary optimizer's step()."""

    def train(model, opt, step):
        for i in range(STEPS):
            set_gradients(model, i)
            step()

    as_eager(train, rule, recipe, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_step_reads_options_again(backend):
    """lr and others edited between compiled steps, by hand and by a scheduler."""

    def train(model, opt, step):
        # Set after the step, because the compiler refuses its wrapper around any optimizer's
        # step().
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1.0 / (1 + n))
        for i in range(6):
            set_gradients(model, i)
            step()
            if i == 2:
                opt.param_groups[0]["weight_decay"] = 0.5
            if i == 3:
                opt.param_groups[0]["betas"] = (0.5, 0.9)
            scheduler.step()

    as_eager(train, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_step_with_gradients_that_come_and_go(backend):
    def train(model, opt, step):
        for i in range(5):
            set_gradients(model, i)
            if i in (0, 3):
                model[0].bias.grad = None
            step()
        assert opt.state[model[0].bias]["step"].item() == 3

    as_eager(train, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_compiled_optimizers_do_not_mix(backend):
    found = []
    for compiled in (False, True):
        pairs = [
            make(*of, compile=compiled) for of in (("adamw", "ecc8-int8"), ("lion", "sr-int4"))
        ]
        steps = [compiled_step(o, backend) if compiled else o.step for _, o in pairs]
        for i in range(3):
            for (m, _), step in zip(pairs, steps):
                set_gradients(m, i)
                step()
        found.append([result(m, o) for m, o in pairs])
    assert found[0] == found[1]


def test_compiled_step_after_a_file():
    """load_state_dict() between compiled steps."""

    def train(model, opt, step):
        for i in range(4):
            if i == 2:
                opt.load_state_dict(dict(opt.state_dict()))
            set_gradients(model, i)
            step()

    as_eager(train)


@pytest.mark.told("'2.weight' is not finite")
def test_compiled_step_skips_what_is_not_finite():
    model, opt = make("adamw", "ecc8-int8", compile=True)
    step = compiled_step(opt)
    set_gradients(model, 0)
    step()
    before = result(model, opt)
    set_gradients(model, 1)
    model[2].weight.grad[0, 0] = float("nan")
    step()
    assert result(model, opt) == before and opt.skipped_steps == 1


def test_compile_true_is_an_ordinary_optimizer_too():
    """Uncompiled calls, closures, release and clipping."""
    found = []
    for option in (False, True):
        model, opt = make("adamw", "ecc8-int8", compile=option, clip_norm=0.5)

        def closure(step=0):
            opt.zero_grad()
            loss = model(batch(step, model)).float().pow(2).mean()
            loss.backward()
            return loss

        assert isinstance(opt.step(closure), torch.Tensor)
        for i in range(3):
            closure(i)
            opt.step()
        norm = opt.grad_norm
        assert norm > 0
        opt.prepare_gradient_release()
        opt.zero_grad()
        model(batch(7, model)).float().pow(2).mean().backward()
        opt.step()
        found.append((result(model, opt), norm))
    assert found[0] == found[1]


def test_step_and_zero_grad_break_the_graph():
    """Without compile=True the compiler must leave the step alone. It says so when asked for one
    graph."""
    model, opt = make("adamw", "f32")
    set_gradients(model, 0)
    before = weights_of(model)
    with pytest.raises(Exception):
        torch.compile(lambda: opt.step(), fullgraph=True, backend="eager")()
    assert weights_of(model) == before


def test_gradient_release_under_a_compiled_forward():
    """Hooks run behind a compiled model's backward."""
    found = []
    for compiled in (False, True):
        model, opt = make("adamw", "ecc8-int8", gradient_release=True)
        forward = torch.compile(model, backend="aot_eager") if compiled else model
        for i in range(3):
            forward(batch(i, model)).float().pow(2).mean().backward()
            assert all(p.grad is None for p in model.parameters())
            opt.step()
        found.append(result(model, opt))
    assert found[0] == found[1]


@pytest.mark.all
def test_inductor():
    """Runs the default backend, if a C++ compiler works. The step is the same operator in its
    code."""
    model, opt = make("adamw", "ecc8-int8", compile=True)
    step = compiled_step(opt, "inductor")
    with skipped_without_a_compiler():
        set_gradients(model, 0)
        step()
    for i in range(1, STEPS):
        set_gradients(model, i)
        step()
    others, other = make("adamw", "ecc8-int8")
    run(other, others, 0, STEPS)
    same(opt, other, model, others)


@pytest.mark.all
def test_inductor_training_step():
    """Runs a whole training step by inductor. Its kernels may round differently from eager's, but
    not for this gradient."""
    found = []
    for compiled in (False, True):
        p = nn.Parameter(randn((16, 64), 0))
        opt = halfstep.AdamW([("p", p)], lr=0.01, states="int8", seed=0)

        def train(x):
            opt.zero_grad()
            loss = (p * x).sum()
            loss.backward()
            opt.step()
            return loss

        if compiled:
            train = torch.compile(train)
        with skipped_without_a_compiler():
            for i in range(3):
                train(randn((16, 64), i))
        found.append((bits(p), states(opt)))
    assert found[0] == found[1]


@pytest.mark.parametrize("attached", ["before", "after"])
def test_full_graph_with_a_scheduler(attached):
    """torch.compile() does not trace the scheduler's function around step(), so step() notes its
    calls itself. The bits are those of eager."""
    found = []
    for compiled in (False, True):
        model, opt = make("adamw", "f32", compile=compiled)
        if attached == "before":
            scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
        step = (
            torch.compile(lambda: opt.step(), fullgraph=True, backend="eager")
            if compiled
            else opt.step
        )
        if attached == "after":
            scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
            for i in range(STEPS):
                opt.zero_grad()
                model(batch(i, model)).float().pow(2).mean().backward()
                step()
                scheduler.step()
        found.append(result(model, opt))
    assert found[0] == found[1]


def test_a_scheduler_warns_before_the_first_step():
    _, opt = make("adamw", "f32")
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)
    with pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`"):
        scheduler.step()
