"""C handles that belong to no optimizer: tensors, options, counters, seeds."""

import ctypes

import pytest
import torch
from conftest import randn

from halfstep._library import abi
from halfstep._library.abi import lib
from halfstep._settings.options import seed_of
from halfstep._states.handles import Handle, read_rows, write_rows


def hyper(handle, name):
    value = ctypes.c_double()
    abi.check(lib.halfstep_get_hyper(handle, 0, name, ctypes.byref(value)), handle)
    return value.value


def test_tensors_of_one_recipe_share_a_group():
    handle = Handle(1, 7)
    indices = [
        handle.add(recipe, f"p{i}", i + 1, (4, 8), "f32")
        for i, recipe in enumerate(["ema/f32", "ema/bf16-sr", "ema/f32"])
    ]
    assert indices == [0, 1, 2] and handle.groups == {"ema/f32": 0, "ema/bf16-sr": 1}


def test_options_are_set_once_and_in_all_groups():
    handle = Handle(1, 7)
    handle.add("ema/f32", "p", 1, (4, 8), "f32")
    handle.set(beta=0.5, generator="philox7")
    assert hyper(handle, b"beta") == 0.5
    handle.set(beta=0.5)
    handle.set(beta=0.25)
    assert hyper(handle, b"beta") == 0.25
    assert handle.options == {"beta": 0.25, "generator": "philox7"}
    for name, value in (("beta", 2.0), ("scan", "sometimes"), ("warmth", 1.0)):
        with pytest.raises((ValueError, abi.HalfstepError), match=name):
            handle.set(**{name: value})
        assert handle.options.get(name) != value


def test_counters():
    handle = Handle(1, 7)
    index = handle.add("sgd/f32", "p", 1, (4, 8), "f32")
    handle.count(index, writes=5, state_steps=3, full_steps=2)
    found = handle.counters(index)
    assert (found.writes, found.state_steps, found.full_steps) == (5, 3, 2)
    handle.count(index, writes=6)
    assert handle.counters(index).state_steps == 0


def test_threads():
    handle = Handle(1, 7)
    handle.work(2)
    assert handle.threads == 2
    with pytest.raises((ValueError, abi.HalfstepError)):
        handle.work(-1)
    assert handle.threads == 2


def test_a_handle_is_destroyed_with_its_object(monkeypatch):
    gone = []
    destroy = lib.halfstep_destroy

    class Watched:
        def __getattr__(self, name):
            return getattr(lib, name)

        def halfstep_destroy(self, handle):
            gone.append(handle)
            destroy(handle)

    monkeypatch.setattr("halfstep._states.handles.lib", Watched())
    handle = Handle(1, 7)
    del handle
    assert len(gone) == 1
    with pytest.raises((ValueError, abi.HalfstepError)):
        Handle(-1, 7)
    assert len(gone) == 1  # there was none


@pytest.mark.parametrize("shape", [(), (5,), (4, 8), (2, 3, 4), (0, 5)])
def test_rows_are_written_and_read(shape):
    handle = Handle(1, 7)
    index = handle.add("ema/bf16-kahan", "p", 1, shape, "f32")
    weight = torch.zeros(shape, dtype=torch.bfloat16)
    extra = torch.zeros(shape, dtype=torch.bfloat16)
    if weight.numel():
        code = lib.halfstep_bind_slot(handle, index, abi.SLOT_WEIGHT, None, extra.data_ptr())
        abi.check(code, handle)
    values = randn(shape, 1)
    write_rows(handle, index, abi.SLOT_WEIGHT, weight.data_ptr(), values, shape)
    found = read_rows(
        lib.halfstep_read_slot, handle, index, shape, abi.SLOT_WEIGHT, weight.data_ptr()
    )
    assert found.shape == shape and torch.equal(weight, values.bfloat16())
    assert torch.allclose(found, values, rtol=2**-15)


def test_seeds():
    assert seed_of(5) == 5
    torch.manual_seed(3)
    drawn = [seed_of(None), seed_of(None)]
    torch.manual_seed(3)
    assert drawn == [seed_of(None), seed_of(None)] and drawn[0] != drawn[1]
