"""Tests weights and steps on a GPU with states in the process's memory: the bits of plain steps.
Runs on the fake of fake_gpu.py, whose copies happen when somebody waits, or on torch's GPU."""

import functools

import pytest
import torch
from conftest import bits, told, warnings_are
from test_cuda import fake, gpu, gradients, held, start  # noqa: F401
from test_offload import BUFFER, backward, moved, pair, run, same, same_steps
from torch.nn import Parameter

import halfstep
from halfstep._placement import streams
from halfstep._tensors import devices

pair = functools.partial(pair, kind="StateStreaming")


def test_states_take_turns(fake):
    """In a step each byte of a state goes up once and comes back once, through three buffers.
    step() waits once for gradients."""
    both = pair(fake, halfstep.AdamW, "ecc8-int8", clip_norm=1.0)
    run(fake, both, 1, 2)
    params, opt = both[1]
    (bus,) = opt._parts.placement.buses
    assert len(bus.stages) > 4 and len(bus.buffers) == streams.BUFFERS
    assert all(stage.size <= BUFFER * 1.2 or len(stage.places) == 1 for stage in bus.stages)
    size = sum(
        v.numel() * v.element_size()
        for p, state in opt.state.items()
        for v in state.values()
        if v.dim() and devices.of(v).type == "cpu"
    )
    held = sum(b.memory.numel() for b in bus.buffers)
    assert held < size
    for step in range(2, 6):
        fake.moved.clear()
        fake.synchronize()
        before = fake.waits
        run(fake, [both[1]], step, step + 1)
        waited = fake.waits - before
        assert moved(fake) == [size, size]
        # All begin before the first ends: one wait for each, for the same gradients.
        assert waited == len(opt._parts.cache.engine.parts)
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


def test_what_others_write_into_states_counts(gpu):
    """Also after a refused step, for which states have gone to the GPU."""
    both = pair(gpu, halfstep.AdamW, "f32")
    run(gpu, both, 1, 3)
    for params, opt in both:
        with told("(is|are) not finite"):
            backward(gpu, params, {name: g / 0 for name, g in gradients(params, 3).items()})
            opt.step()
        assert opt.skipped_steps == 1  # which waits
        for bus in getattr(opt, "_buses", ()):
            devices.wait(bus.up.event())
        for name in ("body.weight", "a", "e"):
            opt.state[params[name]]["exp_avg"].fill_(0.25)
    same_steps(gpu, both, 3, 5)


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
    with warnings_are("ignore"):
        for _, opt in both:
            for group in opt.param_groups:
                group["states"] = "bf16-sr"
        same_steps(gpu, both, 3, 5)


def test_another_stream(fake):
    """Weights are stepped on the current stream, whichever that is."""
    both = pair(fake, halfstep.AdamW, "ecc8-int8", clip_norm=1.0)
    run(fake, both, 1, 3)
    other = fake.stream()
    with fake.on(other):
        run(fake, both, 3, 6)
    fake.wait_for(None, other)
    same_steps(fake, both, 6, 8)


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
    before = bits(opt._parts.groups.state[params["a"]]["exp_avg"])
    run(fake, [both[1]], 2, 3)
    assert bits(opt._parts.groups.state[params["a"]]["exp_avg"]) == before
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
        how={"minimal_size": 0, "buffer": streams.BUFFER_BYTES},
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
    p = Parameter(gpu.tensor(torch.ones(64, 64)))
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
