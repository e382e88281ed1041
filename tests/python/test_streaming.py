"""Tests weights and steps on a GPU with states in the process's memory: the bits of plain steps.
Runs on the fake of fake_gpu.py, whose copies happen when somebody waits, or on torch's GPU."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from conftest import FIRST_MOVEMENT, RECIPES, bits, class_of, rules
from test_cuda import fake, gpu, gradients, held, start  # noqa: F401
from test_offload import backward, run, same

import halfstep
from halfstep import _devices, streaming

SHAPES = {
    "body.weight": (24, 96),
    "head.weight": (17, 50),
    "body.bias": (33,),
    "scale": (),
    "a": (40, 64),
    "b": (64, 40),
    "c": (64, 64),
    "d": (32, 32),
    "e": (48, 64),
}
#: what is stepped on the GPU where small parameters are
SMALL = {"head.weight", "body.bias", "scale"}
SIZE, BUFFER = 1000, 8000


def pair(gpu, base, recipe="f32", device=0, how=None, shapes=SHAPES, **options):
    """Makes the same optimizer on the processor and streamed. Returns (parameters, optimizer) of
    each."""
    dtype, formats = RECIPES[recipe]
    values = start(dtype, shapes)
    here = {name: torch.nn.Parameter(v.clone()) for name, v in values.items()}
    there = {name: torch.nn.Parameter(gpu.tensor(v, device)) for name, v in values.items()}
    options = {"seed": 5, **formats, **options}
    how = {"minimal_size": SIZE, "buffer": BUFFER, **(how or {})}
    return (here, base(here.items(), **options)), (
        there,
        halfstep.StateStreaming(there.items(), base, **how, **options),
    )


@rules
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_of_plain_steps(gpu, rule, recipe):
    options = {"exact": True} if rule == "muon" else {}
    both = pair(gpu, class_of(rule), recipe, clip_norm=0.5, **options)
    run(gpu, both, 1, FIRST_MOVEMENT + 2)
    same(gpu, both)
    for name, p in both[1][0].items():
        wanted = "cuda" if name in SMALL else "cpu"
        numbers = {key for key, value in both[1][1].state[p].items() if value.dim() == 0}
        assert {
            _devices.of(value).type
            for key, value in both[1][1].state[p].items()
            if key not in numbers
        } <= {wanted}, name


def test_states_take_turns(fake):
    """In a step each byte of a state goes up once and comes back once, through three buffers.
    step() waits once for gradients."""
    both = pair(fake, halfstep.AdamW, "ecc8-int8", clip_norm=1.0)
    run(fake, both, 1, 2)
    params, opt = both[1]
    (bus,) = opt._parts.placement.buses
    assert len(bus.stages) > 4 and len(bus.buffers) == streaming.BUFFERS
    assert all(stage.size <= BUFFER * 1.2 or len(stage.places) == 1 for stage in bus.stages)
    size = sum(
        v.numel() * v.element_size()
        for p, state in opt.state.items()
        for v in state.values()
        if v.dim() and _devices.of(v).type == "cpu"
    )
    held = sum(b.memory.numel() for b in bus.buffers)
    assert held < size
    for step in range(2, 6):
        fake.moved.clear()
        fake.synchronize()
        before = fake.waits
        run(fake, [both[1]], step, step + 1)
        waited = fake.waits - before
        assert [sum(n for n, to_gpu in fake.moved if to_gpu == way) for way in (False, True)] == [
            size,
            size,
        ]
        assert waited == len(
            opt._parts.cache.engine.parts
        )  # all begin before the first ends: one wait for each, for the same gradients
        run(fake, [both[0]], step, step + 1)
    same(fake, both)


def test_one_buffer_waits_for_nothing(fake):
    both = pair(
        fake, halfstep.AdamW, "ecc8-int8", how={"minimal_size": 0, "buffer": 1 << 20}, clip_norm=1.0
    )
    run(fake, both, 1, 3)
    before = fake.waits
    run(fake, both, 3, 9)
    assert fake.waits == before and len(both[1][1]._parts.placement.buses[0].stages) == 1
    same(fake, both)


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
def test_steps_during_the_backward_pass(gpu, recipe, options):
    both = pair(gpu, halfstep.AdamW, recipe, gradient_release=True, **options)
    run(gpu, both, 1, 6)
    same(gpu, both)
    both[1][1].remove_gradient_release()
    both[0][1].remove_gradient_release()
    run(gpu, both, 6, 8)
    same(gpu, both)


def test_micro_batches_in_the_states(gpu):
    for release in (False, True):
        both = pair(gpu, halfstep.SGD, "bf16-sr", momentum=0.9, gradient_release=release)
        run(gpu, both, 1, 3)
        for step in range(3, 9):
            for params, opt in both:
                opt.optimizer_accumulation = step % 3 != 2
                backward(gpu, params, gradients(params, step))
                opt.step()
                opt.zero_grad()
        same(gpu, both)


@pytest.mark.parametrize(
    "scan, name", [("scan", "a"), ("scan", "scale"), ("per-tensor", "a"), ("per-tensor", "e")]
)
def test_a_nan(gpu, scan, name):
    """The step is refused as a whole and counted once, or the tensor is left alone. What then goes
    through the buffers is not used later."""
    both = pair(gpu, halfstep.AdamW, "ecc8-int8", clip_norm=1.0, scan=scan)
    run(gpu, both, 1, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for params, opt in both:
            given = gradients(params, 7)
            given[name].view(-1)[0] = float("nan")
            backward(gpu, params, given)
            opt.step()
            opt.zero_grad()
    same(gpu, both)
    assert both[1][1].skipped_steps == 1
    for params, opt in both:
        opt.write_state(params["body.weight"], "exp_avg", torch.full((24, 96), 0.25))
    run(gpu, both, 3, 5)
    same(gpu, both)


def test_a_grad_scaler_in_the_step(gpu):
    for buffer in (BUFFER, 1 << 20):
        both = pair(
            gpu,
            halfstep.AdamW,
            "f32",
            fused=True,
            clip_norm=1.0,
            how={"buffer": buffer, "minimal_size": 0},
        )
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


def test_states_go_either_way(gpu):
    """state_dict() is that of plain steps, and both continue alike. So do copies and pickles.
    Loaded states are pinned."""
    both = pair(gpu, halfstep.AdamW, "ecc8-int8", clip_norm=1.0)
    run(gpu, both, 1, 3)
    buffer = io.BytesIO()
    torch.save(both[1][1].state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    fresh = pair(gpu, halfstep.AdamW, "ecc8-int8", clip_norm=1.0)
    for (params, opt), (old, _) in zip(fresh, both):
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(gpu.read(old[name]))
    fresh[0][1].load_state_dict(saved)
    fresh[1][1].load_state_dict(both[0][1].state_dict())
    both = fresh
    run(gpu, both, 3, 5)
    same(gpu, both)
    both[1][1].load_state_dict(both[0][1].state_dict())  # in the middle of what it is doing
    run(gpu, both, 5, 7)
    same(gpu, both)
    params, opt = both[1]
    assert all(_devices.is_pinned(v) for v in opt.state[params["a"]].values() if v.dim())
    again = pickle.loads(pickle.dumps(opt)) if gpu.real else copy.deepcopy(opt)
    assert (
        type(again) is type(opt)
        and isinstance(again, halfstep.StateStreaming)
        and isinstance(again, halfstep.AdamW)
    )
    assert (
        again.minimal_size == SIZE
        and again.buffer == BUFFER
        and again._parts.placement.buses is not opt._parts.placement.buses
    )


def test_what_others_write_into_states_counts(gpu):
    """Also after a refused step, for which states have gone to the GPU."""
    both = pair(gpu, halfstep.AdamW, "f32")
    run(gpu, both, 1, 3)
    for params, opt in both:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            backward(gpu, params, {name: g / 0 for name, g in gradients(params, 3).items()})
            opt.step()
        assert opt.skipped_steps == 1  # which waits
        for bus in getattr(opt, "_buses", ()):
            _devices.wait(bus.up.event())
        for name in ("body.weight", "a", "e"):
            opt.state[params[name]]["exp_avg"].fill_(0.25)
    run(gpu, both, 3, 5)
    same(gpu, both)


def test_states_come_back_after_the_step(fake):
    """Nobody waits for any stream but the one that the states come back on."""
    both = pair(fake, halfstep.AdamW, "f32", how={"buffer": 1 << 20, "minimal_size": 0})
    run(fake, both, 1, 3)
    (bus,) = both[1][1]._parts.placement.buses
    bus.wait()
    for name, p in both[1][0].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert bits(both[1][1].state[p][key]) == bits(
                both[0][1].state[both[0][0][name]][key]
            ), (name, key)


def test_another_format(gpu):
    """States are converted on the way in."""
    both = pair(gpu, halfstep.AdamW, "ecc8-int8")
    run(gpu, both, 1, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _, opt in both:
            for group in opt.param_groups:
                group["states"] = "bf16-sr"
        run(gpu, both, 3, 5)
    same(gpu, both)


def test_read_and_write(gpu):
    both = pair(gpu, halfstep.AdamW, "kahan")
    run(gpu, both, 1, 3)
    for name in both[0][0]:
        found = []
        for params, opt in both:
            p = params[name]
            opt.write_weight(p, gpu.read(opt.read_weight(p)) * 1.001)
            opt.write_state(p, "exp_avg", gpu.read(opt.read_state(p, "exp_avg")) * 1.001)
            found += [
                bits(gpu.read(opt.read_weight(p))),
                bits(gpu.read(opt.read_state(p, "exp_avg"))),
                bits(gpu.read(p)),
            ]
        assert found[:3] == found[3:], name
    run(gpu, both, 3, 5)
    same(gpu, both)


def test_schedulers_groups_and_frozen_parameters(gpu):
    values = start(torch.bfloat16, SHAPES)
    both = []
    for streamed, put in ((False, torch.clone), (True, gpu.tensor)):
        params = {name: torch.nn.Parameter(put(v)) for name, v in values.items()}
        params["b"].requires_grad_(False)
        groups = [
            {"params": [("body.weight", params["body.weight"]), ("d", params["d"])], "lr": 0.01},
            {
                "params": [(n, p) for n, p in params.items() if n not in ("body.weight", "d")],
                "weight_decay": 0.1,
            },
        ]
        opt = (
            halfstep.StateStreaming(
                groups, "adamw/bf16-sr/int8", minimal_size=SIZE, buffer=BUFFER, seed=5
            )
            if streamed
            else halfstep.optimizer("adamw/bf16-sr/int8", groups, seed=5)
        )
        both.append((params, opt))
    schedulers = [torch.optim.lr_scheduler.StepLR(opt, 1, 0.5) for _, opt in both]
    for step in range(1, 5):
        for (params, opt), scheduler in zip(both, schedulers):
            if step == 3:
                extra = params["extra"] = torch.nn.Parameter(
                    (torch.clone if opt is both[0][1] else gpu.tensor)(torch.ones(64, 64))
                )
                opt.add_param_group({"params": [("extra", extra)], "lr": 0.5})
            given = gradients(params, step)
            backward(gpu, params, {n: given[n] for n, p in params.items() if p.requires_grad})
            opt.step()
            opt.zero_grad()
            scheduler.step()
    same(gpu, both)


def test_two_gpus_and_the_processor(fake):
    values = start(torch.bfloat16, SHAPES)
    here = {n: torch.nn.Parameter(v.clone()) for n, v in values.items()}
    there = {
        n: torch.nn.Parameter(fake.tensor(v, i % 2) if i % 3 else v.clone())
        for i, (n, v) in enumerate(values.items())
    }
    options = {"seed": 5, "clip_norm": 0.5, "states": "int8"}
    both = (
        (here, halfstep.AdamW(here.items(), **options)),
        (
            there,
            halfstep.StateStreaming(there.items(), minimal_size=SIZE, buffer=BUFFER, **options),
        ),
    )
    run(fake, both, 1, 4)
    same(fake, both)
    assert len(both[1][1]._parts.placement.buses) == 2


def test_another_stream(fake):
    """Weights are stepped on the current stream, whichever that is."""
    both = pair(fake, halfstep.AdamW, "ecc8-int8", clip_norm=1.0)
    run(fake, both, 1, 3)
    other = fake.stream()
    with fake.on(other):
        run(fake, both, 3, 6)
    fake.wait_for(None, other)
    run(fake, both, 6, 8)
    same(fake, both)


def test_a_step_returns_before_states_are_back(fake):
    both = pair(
        fake,
        halfstep.AdamW,
        "bf16-sr",
        scan="known-finite",
        how={"buffer": 1 << 20, "minimal_size": 0},
    )
    run(fake, both, 1, 2)
    params, opt = both[1]
    fake.synchronize()
    for bus in opt._parts.placement.buses:
        bus.wait()
    before = bits(opt.state[params["a"]]["exp_avg"])
    run(fake, [both[1]], 2, 3)
    assert bits(opt.state[params["a"]]["exp_avg"]) == before
    assert bits(opt.state_dict()["state"][4]["exp_avg"]) != before
    run(fake, [both[0]], 2, 3)
    same(fake, both)


def test_a_capture_is_refused(fake):
    both = pair(fake, halfstep.AdamW, "bf16-sr")
    run(fake, both, 1, 3)
    backward(fake, both[1][0], gradients(both[1][0], 3))
    fake.captured = True
    try:
        with pytest.raises(RuntimeError, match="cannot be captured"):
            both[1][1].step()
    finally:
        fake.captured = False


def test_the_plan_is_what_is_held(fake):
    both = pair(
        fake,
        halfstep.AdamW,
        "ecc8-int8",
        how={"minimal_size": 0, "buffer": streaming.BUFFER_BYTES},
        shapes={"a": (64, 64), "b": (128, 32)},
    )
    run(fake, both, 1, 3)
    params, opt = both[1]
    row = next(
        row
        for row in halfstep.plan(params, "adamw/bf16-ecc8/int8", device_memory="1G").rows
        if row.way == "StateStreaming"
    )
    assert row.host == sum(size for _, size, _ in fake.pins)
    assert (
        row.states == sum(b.memory.numel() for b in opt._parts.placement.buses[0].buffers)
        and row.extras == 0
    )


def test_wrong_arguments(gpu):
    p = torch.nn.Parameter(gpu.tensor(torch.ones(64, 64)))
    with pytest.raises(
        TypeError, match=r"halfstep.StateStreaming\(params, recipe\).*class of halfstep"
    ):
        halfstep.StateStreaming([p], torch.optim.AdamW)
    for wrong in (
        {"buffer": 0},
        {"buffer": "1G"},
        {"buffer": True},
        {"minimal_size": -1},
        {"compile": True},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            halfstep.StateStreaming([p], **wrong)
