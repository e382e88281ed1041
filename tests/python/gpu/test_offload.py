"""Tests weights on a GPU with states and steps in the process's memory: the bits of plain steps.
Runs on the fake of fake_gpu.py, whose copies happen when somebody waits, or on torch's GPU."""

import copy
import ctypes
import gc
import pickle

import pytest
import torch
from conftest import (
    FIRST_MOVEMENT,
    RECIPES,
    bits,
    class_of,
    randn,
    rules,
    saved,
    twins,
    warnings_are,
    weights_of,
)
from fake_gpu import Fake, needs_fake
from test_cuda import SHAPES, fake, gpu, gradients, held, start  # noqa: F401
from torch import nn
from torch.nn import Parameter

import halfstep
from halfstep import offload
from halfstep._tensors import devices

SHAPES = {**SHAPES, "a": (40, 64), "b": (64, 40), "c": (64, 64), "d": (32, 32), "e": (48, 64)}
#: what is stepped on the GPU where small parameters are
SMALL = {"head.weight", "body.bias", "scale"}
SIZE, BUFFER = 1000, 8000
#: classes whose states are in the process's memory, with options of theirs
KINDS = {
    "CPUOffload": {"minimal_size": SIZE},
    "StateStreaming": {"minimal_size": SIZE, "buffer": BUFFER},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def pair(gpu, base, recipe="f32", how=None, kind="CPUOffload", shapes=SHAPES, **options):
    """Makes the same optimizer on the processor and with its states there. Returns (parameters,
    optimizer) of each."""
    dtype, formats = RECIPES[recipe]
    values = start(dtype, shapes)
    here = {name: Parameter(v.clone()) for name, v in values.items()}
    there = {name: Parameter(gpu.tensor(v)) for name, v in values.items()}
    options = {"seed": 5, **formats, **options}
    how = {**KINDS[kind], **(how or {})}
    return (here, base(here.items(), **options)), (
        there,
        getattr(halfstep, kind)(there.items(), base, **how, **options),
    )


def backward(gpu, params, given, add=False, hooks=True):
    """Acts as a backward pass: writes gradients asynchronously, and calls hooks at once."""
    for name, g in given.items():
        p = params[name]
        with torch.no_grad():
            if devices.of(p).type == "cpu":
                p.grad = p.grad + g if add and p.grad is not None else g.clone()
            elif add and p.grad is not None:
                gpu.later(p.grad, gpu.read(p.grad) + g)
                torch.autograd.graph.increment_version([p.grad])
            else:
                p.grad = gpu.tensor(torch.full_like(g, 3.0), devices.of(p).index)
                gpu.later(p.grad, g)
        if hooks:
            for hook in list((p._post_accumulate_grad_hooks or {}).values()):
                hook(p)


def run(gpu, both, first, last, scale=1.0, add=1, hooks=True):
    for step in range(first, last):
        for params, opt in both:
            for micro in range(add):
                given = gradients(params, 10 * step + micro)
                backward(
                    gpu, params, {name: g * scale for name, g in given.items()}, micro > 0, hooks
                )
            opt.step()
            if opt.gradient_release:
                assert all(p.grad is None for p in params.values())
            opt.zero_grad()


def moved(fake):
    """Returns how many bytes were copied to the process, and to the GPU."""
    return [sum(n for n, to_gpu in fake.moved if to_gpu == way) for way in (False, True)]


def same(gpu, both):
    (a, b), (c, d) = both
    assert held(gpu, c, d) == held(gpu, a, b)
    assert d.grad_norm == b.grad_norm and d.skipped_steps == b.skipped_steps


def same_steps(gpu, both, first, last):
    run(gpu, both, first, last)
    same(gpu, both)


# ---- Offloaded and streamed ----------------------------------------------------------------------


@kinds
@rules
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_of_plain_steps(gpu, kind, rule, recipe):
    options = {"exact": True, "normalize_rows": "keep-norm"} if rule == "muon" else {}
    both = pair(gpu, class_of(rule), recipe, kind=kind, clip_norm=0.5, **options)
    run(gpu, both, 1, FIRST_MOVEMENT + 2)
    same(gpu, both)
    params, opt = both[1]
    for name, p in params.items():
        places = {devices.of(value).type for value in opt.state[p].values() if value.dim()}
        assert places <= {"cuda" if name in SMALL else "cpu"}, name


@kinds
@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.1, "clip": "per-tensor"},
        {"clip_norm": 0.1, "clip": "delayed"},
        {"cautious": True},
        {},
    ],
)
@pytest.mark.parametrize("recipe", ["kahan", "ecc8-int8"])
def test_steps_during_the_backward_pass(gpu, kind, recipe, options):
    both = pair(gpu, halfstep.AdamW, recipe, kind=kind, gradient_release=True, **options)
    same_steps(gpu, both, 1, 6)
    for _, opt in both:
        opt.remove_gradient_release()
    same_steps(gpu, both, 6, 8)


@kinds
@pytest.mark.parametrize("release", [False, True])
def test_micro_batches_in_the_states(gpu, kind, release):
    both = pair(gpu, halfstep.SGD, "bf16-sr", kind=kind, momentum=0.9, gradient_release=release)
    run(gpu, both, 1, 3)
    for step in range(3, 9):
        for params, opt in both:
            opt.optimizer_accumulation = step % 3 != 2
            backward(gpu, params, gradients(params, step))
            opt.step()
            opt.zero_grad()
    same(gpu, both)


def step_with_a_nan(gpu, both, name):
    """Makes a step in which one number of a gradient is NaN."""
    with warnings_are("ignore"):
        for params, opt in both:
            given = gradients(params, 7)
            given[name].view(-1)[0] = float("nan")
            backward(gpu, params, given)
            opt.step()
            opt.zero_grad()


@kinds
@pytest.mark.parametrize(
    "scan, name", [("scan", "a"), ("scan", "scale"), ("per-tensor", "a"), ("per-tensor", "e")]
)
@pytest.mark.told("is not finite")
def test_a_nan(gpu, kind, scan, name):
    """The step is refused as a whole and counted once, or the tensor is left alone. What then goes
    through the buffers is not used later."""
    both = pair(gpu, halfstep.AdamW, "ecc8-int8", kind=kind, clip_norm=1.0, scan=scan)
    run(gpu, both, 1, 3)
    step_with_a_nan(gpu, both, name)
    same(gpu, both)
    assert both[1][1].skipped_steps == 1
    for params, opt in both:
        opt.write_state(params["body.weight"], "exp_avg", torch.full((24, 96), 0.25))
    same_steps(gpu, both, 3, 5)


@pytest.mark.parametrize(
    "kind, how",
    [
        ("CPUOffload", {}),
        ("StateStreaming", {"minimal_size": 0}),
        ("StateStreaming", {"minimal_size": 0, "buffer": 1 << 20}),
    ],
)
def test_a_grad_scaler_in_the_step(gpu, kind, how):
    """Its scale and verdict, as it leaves them for optimizers that unscale themselves."""
    both = pair(gpu, halfstep.AdamW, "f32", how, kind, fused=True, clip_norm=1.0)
    for step, found in ((1, 0.0), (2, 1.0), (3, 0.0)):
        for params, opt in both:
            backward(gpu, params, {name: g * 8 for name, g in gradients(params, step).items()})
            place = torch.clone if opt is both[0][1] else gpu.tensor
            opt.grad_scale, opt.found_inf = place(torch.tensor(8.0)), place(torch.tensor(found))
            opt.step()
            del opt.grad_scale, opt.found_inf
        gpu.synchronize()  # torch writes scales of the fake at once, not in their turn
    same(gpu, both)
    assert both[1][1].skipped_steps == 1


@kinds
def test_states_go_either_way(gpu, kind):
    """state_dict() is that of plain steps, and both continue alike. So do copies and pickles.
    Streamed states that were loaded are pinned."""
    both = pair(gpu, halfstep.AdamW, "ecc8-int8", kind=kind, clip_norm=1.0)
    run(gpu, both, 1, 3)
    kept = saved(both[1][1].state_dict())
    fresh = pair(gpu, halfstep.AdamW, "ecc8-int8", kind=kind, clip_norm=1.0)
    for (params, opt), (old, _) in zip(fresh, both):
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(gpu.read(old[name]))
    fresh[0][1].load_state_dict(kept)
    fresh[1][1].load_state_dict(both[0][1].state_dict())
    both = fresh
    same_steps(gpu, both, 3, 5)
    both[1][1].load_state_dict(both[0][1].state_dict())  # in the middle of what it is doing
    same_steps(gpu, both, 5, 7)
    params, opt = both[1]
    if kind == "StateStreaming":
        assert all(devices.is_pinned(v) for v in opt.state[params["a"]].values() if v.dim())
    again = pickle.loads(pickle.dumps(opt)) if gpu.real else copy.deepcopy(opt)
    assert type(again) is type(opt)
    assert isinstance(again, getattr(halfstep, kind)) and isinstance(again, halfstep.AdamW)
    assert {key: getattr(again, key) for key in KINDS[kind]} == KINDS[kind]
    own = {"CPUOffload": "hooks", "StateStreaming": "buses"}[kind]
    assert getattr(again._parts.placement, own) is not getattr(opt._parts.placement, own)


@kinds
def test_read_and_write(gpu, kind):
    both = pair(gpu, halfstep.AdamW, "kahan", kind=kind)
    run(gpu, both, 1, 3)
    for name in both[0][0]:
        found = []
        for params, opt in both:
            p = params[name]
            opt.write_weight(p, gpu.read(opt.read_weight(p)) * 1.001)
            opt.write_state(p, "exp_avg", gpu.read(opt.read_state(p, "exp_avg")) * 1.001)
            values = opt.read_weight(p), opt.read_state(p, "exp_avg"), p
            found.append([bits(gpu.read(value)) for value in values])
        assert found[0] == found[1], name
    same_steps(gpu, both, 3, 5)


@kinds
@pytest.mark.parametrize("late", [1, 3])
def test_schedulers_groups_and_frozen_parameters(gpu, kind, late):
    """A group is added before the step `late`."""
    values = start(torch.bfloat16, SHAPES)
    both = []
    for put in (torch.clone, gpu.tensor):
        params = {name: Parameter(put(v)) for name, v in values.items()}
        params["b"].requires_grad_(False)
        named = list(params.items())
        groups = [
            {"params": [(n, p) for n, p in named if n in ("body.weight", "d")], "lr": 0.01},
            {
                "params": [(n, p) for n, p in named if n not in ("body.weight", "d")],
                "weight_decay": 0.1,
            },
        ]
        if put is torch.clone:
            opt = halfstep.optimizer("adamw/bf16-sr/int8", groups, seed=5)
        else:
            opt = getattr(halfstep, kind)(groups, "adamw/bf16-sr/int8", seed=5, **KINDS[kind])
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
        for step in range(1, 5):
            if step == late:
                params["extra"] = Parameter(put(torch.ones(64, 64)))
                opt.add_param_group({"params": [("extra", params["extra"])], "lr": 0.5})
            given = gradients(params, step)
            backward(gpu, params, {n: given[n] for n, p in params.items() if p.requires_grad})
            opt.step()
            opt.zero_grad()
            scheduler.step()
        both.append((params, opt))
    same(gpu, both)


@kinds
def test_two_gpus_and_the_processor(fake, kind):
    values = start(torch.bfloat16, SHAPES)
    here = twins(values)
    there = {
        n: Parameter(fake.tensor(v, i % 2) if i % 3 else v.clone())
        for i, (n, v) in enumerate(values.items())
    }
    options = {"seed": 5, "clip_norm": 0.5, "states": "int8"}
    opt = getattr(halfstep, kind)(there.items(), **KINDS[kind], **options)
    both = (here, halfstep.AdamW(here.items(), **options)), (there, opt)
    same_steps(fake, both, 1, 4)
    assert kind == "CPUOffload" or len(opt._parts.placement.buses) == 2


# ---- Offloaded -----------------------------------------------------------------------------------


def test_backward_passes_without_steps_between(gpu):
    """Each pass is an update. It may come before the last one's weights have gone back."""
    both = pair(gpu, halfstep.AdamW, "f32", how={"minimal_size": 0}, gradient_release=True)
    for step in range(1, 6):
        for params, opt in both:
            backward(gpu, params, gradients(params, step))
            opt._parts.release.rounds.again = 0
    for _, opt in both:
        opt.step()
    same(gpu, both)


@pytest.mark.parametrize("give_up", [False, True])
def test_gradients_that_add_up(gpu, give_up):
    both = pair(gpu, halfstep.Lion, "bf16-sr", how={"offload_gradients": give_up}, clip_norm=1.0)
    run(gpu, both, 1, 4, add=3)
    same(gpu, both)
    if give_up:
        params, opt = both[1]
        backward(gpu, params, gradients(params, 1))
        assert {name for name, p in params.items() if p.grad is not None} == SMALL
        opt.zero_grad()
        before = held(gpu, params, opt)[:2]
        opt.step()
        assert held(gpu, params, opt)[:2] == before  # there is nothing to step with


def test_a_step_uses_gradients_up_that_are_nowhere_else(gpu):
    """model.zero_grad() cannot reach them."""
    both = pair(gpu, halfstep.SGD, "f32", how={"offload_gradients": True, "minimal_size": 0})
    for step in range(1, 4):
        for params, opt in both:
            backward(gpu, params, gradients(params, step))
            opt.step()
            for p in params.values():
                p.grad = None
    same(gpu, both)


def test_a_gradient_that_is_written_after_its_hook_is_copied_again(gpu):
    both = pair(gpu, halfstep.SGD, "bf16-sr")
    for step in range(1, 4):
        for params, opt in both:
            backward(gpu, params, gradients(params, step))
            if opt is both[1][1]:
                devices.wait(
                    opt._parts.placement.copies[params["body.weight"]].down
                )  # of the gradient as it was
            for p in params.values():
                with torch.no_grad():
                    if devices.of(p).type == "cpu":
                        p.grad.mul_(0.5)
                    else:
                        gpu.later(p.grad, gpu.read(p.grad) * 0.5)
                        torch.autograd.graph.increment_version([p.grad])
            opt.step()
    same(gpu, both)


def test_without_hooks(gpu):
    """Gradients that were put there."""
    both = pair(gpu, halfstep.AdamW, "kahan", clip_norm=1.0)
    run(gpu, both, 1, 4, hooks=False)
    same(gpu, both)


@pytest.mark.told("'body.weight' was written")
def test_what_others_write_into_weights_counts(gpu):
    both = pair(gpu, halfstep.AdamW, "kahan")
    run(gpu, both, 1, 3)
    with torch.no_grad(), warnings_are("ignore"):
        both[0][0]["body.weight"].mul_(0.5)
        there = both[1][0]["body.weight"]
        gpu.later(there, gpu.read(there) * 0.5)
        torch.autograd.graph.increment_version([there])
        same_steps(gpu, both, 3, 5)


@pytest.mark.told("'body.weight' is not finite")
def test_a_nan_during_the_backward_pass_leaves_its_tensor_alone(gpu):
    both = pair(gpu, halfstep.AdamW, "ecc8-int8", gradient_release=True)
    run(gpu, both, 1, 3)
    with warnings_are("ignore"):
        for params, opt in both:
            given = gradients(params, 7)
            given["body.weight"][3, 3] = float("inf")
            backward(gpu, params, given)
            opt.step()
    same(gpu, both)


def test_a_parameter_without_elements_waits_for_step(gpu):
    """As small ones on the GPU do: the backward pass must not step by a handle that the thread
    has."""
    shapes = {"body.weight": (64, 96), "none": (0, 8)}
    both = pair(
        gpu, halfstep.AdamW, "f32", how={"minimal_size": 0}, shapes=shapes, gradient_release=True
    )
    same_steps(gpu, both, 1, 4)
    params, opt = both[1]
    backward(gpu, params, gradients(params, 9))
    assert {name for name, p in params.items() if p.grad is not None} == {"none"}
    opt.step()
    assert params["none"].grad is None and int(opt.state[params["none"]]["step"]) == 4


def test_how_much_is_copied(fake):
    """Each gradient is copied once to the process, each weight once back, and the first step's
    weights once more."""
    both = pair(fake, halfstep.AdamW, "ecc8-int8", how={"minimal_size": 0}, clip_norm=1.0)
    size = sum(p.numel() * p.element_size() for p in both[1][0].values())
    run(fake, both, 1, 2)
    assert moved(fake) == [2 * size, size]
    run(fake, both, 2, 5)
    assert moved(fake) == [5 * size, 4 * size]
    same(fake, both)


@pytest.mark.parametrize("options", [{}, {"gradient_release": True}, {"offload_gradients": True}])
def test_matrices_with_products_are_stepped_on_the_gpu(fake, options):
    """Momentum of Muon's matrices is in the process's memory, and goes up and down once. Their
    weights and gradients stay where they are."""
    how = {"minimal_size": SIZE, **{k: v for k, v in options.items() if k == "offload_gradients"}}
    release = {k: v for k, v in options.items() if k not in how}
    shapes = {**SHAPES, "embed": (80, 48), "long": (1500,)}
    both = pair(
        fake,
        halfstep.Muon,
        "ecc8-int8",
        how=how,
        shapes=shapes,
        exact=True,
        adamw={"lr": 1e-3},
        **release,
    )
    run(fake, both, 1, 2)
    fake.moved.clear()
    run(fake, [both[1]], 2, 4)
    params, opt = both[1]
    here = {p for part in opt._parts.cache.engine.parts for p in stepped_by(opt, part, "cpu")}
    assert here == {"embed", "long"}
    states = weights = 0
    for name, p in params.items():
        large = [v for v in opt.state[p].values() if v.dim()]
        assert {devices.of(v).type for v in large} <= {"cpu" if p.numel() >= SIZE else "cuda"}
        if name in here:
            weights += p.numel() * p.element_size()
        elif p.numel() >= SIZE:
            states += sum(v.numel() * v.element_size() for v in large)
    assert moved(fake) == [2 * (states + weights), 2 * (states + weights)]
    run(fake, [both[0]], 2, 4)
    same_steps(fake, both, 4, 6)


def stepped_by(opt, part, device):
    """Returns the names of what a handle steps, if it is on a device of this type."""
    members = opt._parts.cache.engine.members[part.first : part.first + part.n]
    return [m.name for m in members if part.device.type == device]


def test_memory_in_release_is_that_of_gradients_on_their_way(fake):
    """If each gradient comes after the step of the one before, one copy of each size is enough."""
    (_, (params, opt)) = pair(
        fake, halfstep.AdamW, "bf16-sr", how={"minimal_size": 0}, gradient_release=True
    )
    for step in range(1, 8):
        for name, g in gradients(params, step).items():
            backward(fake, params, {name: g})
            opt._parts.placement.settle()
        opt.step()
    sizes = {p.numel() for p in params.values()}
    assert len(sizes) < len(params) and len(fake.pins) == len(params) + len(sizes)


def test_the_next_pass_comes_after_the_weights(fake):
    """Work on the current stream after step() sees the new weights."""
    for release in (False, True):
        both = pair(fake, halfstep.AdamW, "f32", how={"minimal_size": 0}, gradient_release=release)
        params, opt = both[1]
        for step in range(1, 3):
            for some, one in both:
                backward(fake, some, gradients(some, step))
                one.step()
                one.zero_grad()
            with fake.context():  # the current stream alone is waited for
                assert not fake.driver.cuStreamSynchronize(None)
            assert all(bits(p) == bits(both[0][0][name]) for name, p in params.items()), release


def test_weights_are_not_written_before_the_gpu_is_done_with_them(fake):
    both = pair(fake, halfstep.AdamW, "f32", how={"minimal_size": 0})
    params, opt = both[1]
    run(fake, both, 1, 2)
    p = params["body.weight"]
    before, seen = fake.read(p), fake.tensor(torch.zeros_like(p))
    backward(fake, params, gradients(params, 5))
    fake.submit(seen, p.detach(), 0, None)  # something of the backward pass that still reads it
    opt.step()
    for (_, up), side in opt._parts.placement.sides.items():
        if up:
            with fake.context():
                assert not fake.driver.cuStreamSynchronize(ctypes.c_void_p(side.stream))
    fake.synchronize()
    assert torch.equal(seen, before)


def test_an_error_in_the_thread_is_told_and_loses_nothing(gpu, monkeypatch):
    both = pair(gpu, halfstep.AdamW, "ecc8-int8", how={"minimal_size": 0}, gradient_release=True)
    run(gpu, both, 1, 3)
    (here, plain), (there, opt) = both
    given, place, fails = gradients(there, 9), opt._parts.gather.place, [True]

    def fail(engine, m, *rest):
        if m.name == "head.weight" and fails.pop():
            fails.append(False)
            raise MemoryError("no room for head.weight")
        return place(engine, m, *rest)

    monkeypatch.setattr(opt._parts.gather, "place", fail)
    backward(gpu, there, given)
    with pytest.raises(MemoryError, match="head.weight"):
        opt.step()
    monkeypatch.setattr(opt._parts.gather, "place", place)
    opt.step()
    backward(gpu, here, given)
    plain.step()
    same(gpu, both)


@pytest.mark.parametrize("who", ["the copy", "a hook before it", "a hook after it"])
@pytest.mark.parametrize(
    "how",
    [{}, {"offload_gradients": True}, {"overlap": True}],
    ids=["kept", "given up", "in advance"],
)
def test_a_gradient_hook_that_raises_loses_nothing(fake, monkeypatch, who, how):
    """The caller of backward() gets the error, and nothing has changed. Going on with other
    gradients has the bits of a plain run without the error. Going on with the present gradients has
    those of a plain run with it."""

    def fail():
        if armed:
            raise MemoryError(f"not {armed.pop()}")

    def hook(model):
        model.get_parameter("2.weight").register_post_accumulate_grad_hook(lambda p: fail())

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 48)).bfloat16()

    def loss(model, step):
        return (model(randn((8, 32), step, torch.bfloat16)) - 1).float().square().mean()

    armed, options = [], {"lr": 1e-2, "seed": 5, "clip_norm": 0.1, "states": "int8"}
    models = net(), fake.model(net())
    if who == "a hook before it":
        hook(models[1])
    plain = halfstep.AdamW(models[0].named_parameters(), **options)
    opt = halfstep.CPUOffload(
        models[1].named_parameters(),
        halfstep.AdamW,
        minimal_size=1000,
        **how,
        **options,
    )
    if who == "the copy":
        fetch = opt._parts.placement._fetch

        def fetch_or_fail(into, tensor):
            if tensor.shape == (48, 64):
                fail()
            return fetch(into, tensor)

        monkeypatch.setattr(opt._parts.placement, "_fetch", fetch_or_fail)
    elif who == "a hook after it":
        hook(models[1])
    hook(models[0])

    def backward(step):
        for model in models:
            loss(model, step).backward()

    def update():
        for one in (plain, opt):
            one.step()
            one.zero_grad()

    def raises(model, step):
        armed.append(who)
        with pytest.raises(MemoryError, match=f"not {who}"):
            loss(model, step).backward()
        assert not armed

    def everything():
        """Checks that both have the same bits, and returns them."""
        found = [
            held(fake, dict(model.named_parameters()), one)
            for model, one in zip(models, (plain, opt))
        ]
        assert found[0] == found[1]
        return found[0]

    for step in range(2):
        backward(step)
        update()
    before = everything()
    raises(models[1], 2)
    assert everything() == before
    opt.zero_grad()
    backward(3)
    update()
    assert everything() != before
    backward(4)
    for model in models:
        raises(model, 5)
    update()
    everything()
    backward(6)
    update()
    everything()


@pytest.mark.parametrize("release, give_up", [(False, False), (False, True), (True, False)])
def test_the_plan_is_what_is_held(fake, release, give_up):
    both = pair(
        fake,
        halfstep.AdamW,
        "ecc8-int8",
        how={"minimal_size": 0, "offload_gradients": give_up},
        gradient_release=release,
    )
    run(fake, both, 1, 4)
    params, opt = both[1]
    (row,) = halfstep.plan(
        params, "adamw/bf16-ecc8/int8", offload="gradients" if give_up else True, release=release
    ).rows
    states = sum(
        v.numel() * v.element_size()
        for p, state in opt.state.items()
        for v in state.values()
        if (v.dim() and devices.of(v).type == "cpu")
        or (p is params["scale"] and v.dtype in (torch.bfloat16, torch.uint8, torch.int8))
    )
    weights = sum(p.numel() * p.element_size() for p in params.values())
    pinned = sum(size for _, size, _ in fake.pins)
    # In release, gradients of one size share a copy unless they are on their way together.
    shared = sum({p.numel(): p.numel() * p.element_size() for p in params.values()}.values())
    assert weights + (shared if release else weights) <= pinned <= 2 * weights
    assert row.weights == weights and row.copied == 2 * weights and row.host == states + 2 * weights
    assert row.extras == row.states == 0 and row.total == row.weights + row.gradients
    assert row.gradients == (
        max(p.numel() * 2 for p in params.values()) if release or give_up else weights
    )
    text = str(halfstep.plan(params, offload=True, memory="1M"))
    assert "states offloaded" in text and "host in all" in text and "55 GB/s" in text
    with pytest.raises(ValueError, match="offload="):
        halfstep.plan(params, offload="all")


def test_memory_that_cannot_be_pinned(monkeypatch):
    def refuse(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nmore")
        return empty(*args, **kwargs)

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(devices, "_told", False)
    with pytest.warns(
        RuntimeWarning, match="no memory could be pinned .CUDA error: out of memory."
    ):
        assert devices.pinned((3,), torch.float32).shape == (3,)
    with warnings_are("error"):
        assert devices.pinned((2, 2), torch.bfloat16).dtype == torch.bfloat16


def test_under_the_name_of_torchao(gpu):
    """Its class, with halfstep's and with torch's optimizers inside."""
    from halfstep.compat import torchao

    for inner, bare in (
        (torchao.AdamW8bit, torchao.AdamW8bit),
        (torch.optim.AdamW, halfstep.AdamW),
    ):
        both = []
        for hosted in (False, True):
            values = start(torch.bfloat16)
            params = {n: Parameter(gpu.tensor(v) if hosted else v) for n, v in values.items()}
            torch.manual_seed(3)  # which the seed is drawn from
            opt = (
                torchao.CPUOffloadOptimizer(params.values(), inner, lr=1e-3, offload_gradients=True)
                if hosted
                else bare(params.values(), lr=1e-3)
            )
            both.append((params, opt.optimizer if hosted else opt))
        assert isinstance(both[1][1], halfstep.CPUOffload)
        run(gpu, both, 1, 4)
        (a, x), (b, y) = both
        assert held(gpu, b, y)[:2] == held(gpu, a, x)[:2]
    with pytest.raises(ValueError, match="no LBFGS"):
        torchao.CPUOffloadOptimizer([Parameter(gpu.tensor(torch.ones(3)))], torch.optim.LBFGS)


def test_a_library_without_kernels_offloads_everything(gpu, monkeypatch):
    monkeypatch.setattr(offload, "_can_step_on", lambda device: False)
    both = pair(gpu, halfstep.AdamW, "ecc8-int8", clip_norm=1.0)
    same_steps(gpu, both, 1, 4)
    assert not both[1][1]._parts.cache.engine.asynchronous


def test_wrong_arguments(gpu):
    p = Parameter(gpu.tensor(torch.ones(64, 64)))
    for given, options, error, said in (
        (torch.optim.AdamW, {}, TypeError, "class of halfstep"),
        ("adamv", {}, ValueError, "adamv"),
        (3, {}, TypeError, "3"),
        ("ema", {}, ValueError, "halfstep.EMA"),
        ("adamw", {"minimal_size": -1}, ValueError, "minimal_size"),
        ("adamw", {"compile": True}, ValueError, "compile"),
    ):
        with pytest.raises(error, match=said):
            halfstep.CPUOffload([p], given, **options)
    with pytest.raises((TypeError, RuntimeError), match="sparse"):
        opt = halfstep.CPUOffload([("w", p)], minimal_size=0)
        p.grad = torch.sparse_coo_tensor(
            [[0], [0]], [1.0], (64, 64), check_invariants=True, device=p.device
        )
        opt.step()


def test_on_the_processor_there_is_nothing_to_move():
    """Parameters in the process's memory are stepped where they are. Backward passes and hooks are
    torch's own."""
    for release in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 8)).bfloat16()
        nets = [net, copy.deepcopy(net)]
        options = {"seed": 1, "gradient_release": release}
        opts = [
            halfstep.Lion(nets[0].named_parameters(), **options),
            halfstep.CPUOffload(
                nets[1].named_parameters(), halfstep.Lion, offload_gradients=True, **options
            ),
        ]
        for step in range(3):
            for net, opt in zip(nets, opts):
                net(torch.ones(4, 96, dtype=torch.bfloat16)).square().mean().backward()
                opt.step()
                opt.zero_grad()
        assert weights_of(nets[0]) == weights_of(nets[1])


def test_the_thread_ends_with_its_optimizer(gpu):
    both = pair(gpu, halfstep.AdamW, "bf16-sr", gradient_release=True)
    run(gpu, both, 1, 3)
    thread = both[1][1]._parts.placement.thread
    assert thread.is_alive()
    del both
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def hosted_shards(rank, size, cls, rule, options):
    """Steps rows of DTensors on the (fake) GPU of each rank: weights, norm, and the place of one's
    states."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    made, patch = Fake(), pytest.MonkeyPatch()
    made.install(patch)
    mesh = init_device_mesh("cpu", (size,))

    def tensor(local, like):
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
        )

    def put(value):
        cut = distribute_tensor(value, mesh, [Shard(0)])
        return tensor(made.tensor(cut.to_local()), cut)

    values = {name: v for name, v in start(torch.bfloat16, SHAPES).items() if v.dim()}
    params = {name: Parameter(put(v)) for name, v in values.items()}
    opt = getattr(halfstep, cls)(params.items(), rule + "/bf16-sr/int8", seed=5, **options)
    stays = cls != "CPUOffload" or rule == "muon"
    for step in range(1, 4):
        for name, g in gradients(values, step).items():
            params[name].grad = put(g)
            for hook in (params[name]._post_accumulate_grad_hooks or {}).values():
                hook(params[name])
            assert params[name].grad is None or stays or not params[name].to_local().numel()
        opt.step()
    norm = opt.grad_norm
    made.synchronize()
    if options.get("overlap"):  # clipped as the first steps are, or not at all
        assert opt.redone_steps == (2 if options["clip_norm"] < 1 else 0)
        assert len(opt._parts.placement.overlap.rooms) == len(params)
    whole = {n: tensor(p.to_local().clone(), p).full_tensor() for n, p in params.items()}
    states = opt.state[params["body.weight"]].values()
    places = {str(devices.of(v.to_local())) for v in states if isinstance(v, DTensor)}
    return weights_of(whole), norm, places


@needs_fake
@pytest.mark.parametrize(
    "cls, rule, options",
    [
        ("CPUOffload", "adamw", {"offload_gradients": True}),
        ("CPUOffload", "adamw", {"offload_gradients": True, "overlap": True}),
        ("CPUOffload", "adamw", {"offload_gradients": True, "overlap": True, "clip_norm": 1e9}),
        ("CPUOffload", "muon", {"offload_gradients": True, "exact": True, "minimal_size": 500}),
        ("StateStreaming", "muon", {"minimal_size": 500, "exact": True}),
        # each of these is larger than a buffer
        ("StateStreaming", "adamw", {"buffer": 900, "minimal_size": 500}),
        ("StateStreaming", "lamb", {"buffer": 900, "minimal_size": 500}),
    ],
)
def test_shards(pool, cls, rule, options):
    options = {"clip_norm": 0.5, **options}
    found = pool.run(2, hosted_shards, cls, rule, options)
    params = {n: Parameter(v) for n, v in start(torch.bfloat16, SHAPES).items() if v.dim()}
    opt = class_of(rule)(params.items(), seed=5, clip_norm=options["clip_norm"], states="int8")
    for step in range(1, 4):
        for name, g in gradients(params, step).items():
            params[name].grad = g
        opt.step()
    for found_here in found:
        assert found_here == (weights_of(params), opt.grad_norm, {"cpu"})
