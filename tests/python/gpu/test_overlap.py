"""Tests CPUOffload(overlap=): steps in advance in a thread, and the bits of plain steps whatever
becomes of them. Runs on the fake of fake_gpu.py, or on torch's GPU."""

import copy
import pickle

import pytest
import torch
from conftest import FIRST_MOVEMENT, class_of, recipes, rules, warnings_are
from test_cuda import fake, gpu, gradients, held  # noqa: F401
from test_offload import SMALL, backward, pair, run, same, step_with_a_nan
from torch.nn import Parameter

import halfstep
from halfstep import _placement
from halfstep._library import abi
from halfstep._tensors import devices

ONE = {"c": (64, 64), "scale": ()}


def overlapped(gpu, base=halfstep.AdamW, recipe="ecc8-int8", how=None, **options):
    """Makes a plain optimizer and one that steps in advance, and notes which results stand."""
    both = pair(gpu, base, recipe, {"overlap": True, **(how or {})}, **options)
    return both, stood(both[1][1])


def stood(opt):
    """Returns a list that gets, at each step, how many results were used for it."""
    overlap, found = opt._parts.placement.overlap, []
    judge = overlap.judge

    def count(engine, done):
        found.append(len(overlap.used))
        judge(engine, done)

    overlap.judge = count
    return found


def in_advance(params):
    return sum(name not in SMALL and p.numel() > 0 for name, p in params.items())


def settle(opt):
    opt._parts.placement.settle()


# ---- Results that stand --------------------------------------------------------------------------


@rules
@recipes
def test_the_bits_of_plain_steps(gpu, rule, recipe):
    options = {"exact": True} if rule == "muon" else {}
    both, used = overlapped(gpu, class_of(rule), recipe, clip_norm=1e9, **options)
    run(gpu, both, 1, FIRST_MOVEMENT + 3)
    same(gpu, both)
    params, opt = both[1]
    row = abi.rules[rule]  # matrices of Muon are stepped on the GPU
    expected = 0 if row.two_pass or row.matrix else in_advance(params)
    assert used == [0] + [expected] * (FIRST_MOVEMENT + 1) and opt.redone_steps == 0


def test_nothing_can_be_seen_before_the_step(gpu):
    both, used = overlapped(gpu, recipe="kahan")
    run(gpu, both, 1, 3)
    params, opt = both[1]
    before = held(gpu, params, opt)
    places = {
        (name, key): (value, value.data_ptr())
        for name, p in params.items()
        for key, value in opt.state[p].items()
    }
    for some, one in both:
        backward(gpu, some, gradients(some, 3))
    settle(opt)
    results = opt._parts.placement.overlap.results
    assert all(result.whole for result in results.values()) and len(results) == in_advance(params)
    assert held(gpu, params, opt) == before
    for _, one in both:
        one.step()
    same(gpu, both)
    assert held(gpu, params, opt) != before and used[-1] == in_advance(params)
    for (name, key), (value, place) in places.items():
        assert opt.state[params[name]][key] is value and value.data_ptr() == place, (name, key)


@pytest.mark.parametrize("how", [{}, {"offload_gradients": True}], ids=["kept", "given up"])
def test_gradients_that_add_up(gpu, how):
    """The last gradient of as many as came before the last step is stepped with. One more makes a
    step again, and one less leaves it to step()."""
    both, used = overlapped(gpu, halfstep.Lion, "bf16-sr", how)
    run(gpu, both, 1, 4, add=3)
    opt, n = both[1][1], in_advance(both[1][0])
    assert used == [0, n, n] and opt.redone_steps == 0
    run(gpu, both, 4, 5, add=4)
    assert used[3:] == [0] and opt.redone_steps == 1
    run(gpu, both, 5, 6, add=2)
    run(gpu, both, 6, 8, add=2)
    assert used[4:] == [0, n, n] and opt.redone_steps == 1
    same(gpu, both)


def test_schedulers(gpu):
    both, used = overlapped(gpu, clip_norm=1e9)
    schedulers = [torch.optim.lr_scheduler.StepLR(opt, 1, 0.5) for _, opt in both]
    for step in range(1, 5):
        run(gpu, both, step, step + 1)
        for scheduler in schedulers:
            scheduler.step()
    same(gpu, both)
    assert used == [0] + [in_advance(both[1][0])] * 3 and both[1][1].redone_steps == 0


def test_a_grad_scaler_in_the_step(gpu):
    """A scale that stays lets results stand, and a new one makes the step again. A step that the
    scaler refuses changes nothing."""
    both, used = overlapped(gpu, recipe="f32", fused=True)
    cases = [(8.0, 0.0), (8.0, 0.0), (8.0, 1.0), (4.0, 0.0), (4.0, 0.0)]
    for step, (scale, found) in enumerate(cases):
        for params, opt in both:
            given = gradients(params, step)
            backward(gpu, params, {name: g * scale for name, g in given.items()})
            place = torch.clone if opt is both[0][1] else gpu.tensor
            opt.grad_scale, opt.found_inf = place(torch.tensor(scale)), place(torch.tensor(found))
            opt.step()
            del opt.grad_scale, opt.found_inf
            opt.zero_grad()
        gpu.synchronize()  # torch writes scales of the fake at once, not in their turn
    same(gpu, both)
    assert both[1][1].redone_steps == 1 and both[1][1].skipped_steps == 1
    assert used[-1] == in_advance(both[1][0])


def test_two_gpus_and_the_processor(fake):
    params = [{}, {}]
    for i, (name, g) in enumerate(gradients(dict.fromkeys("abcd", torch.ones(64, 64)), 3).items()):
        params[0][name] = Parameter(g.clone())
        params[1][name] = Parameter(fake.tensor(g, i % 2) if i else g.clone())
    options = {"seed": 5, "clip_norm": 1e9, "states": "int8"}
    opt = halfstep.CPUOffload(params[1].items(), overlap=True, **options)
    both = (params[0], halfstep.AdamW(params[0].items(), **options)), (params[1], opt)
    used = stood(opt)
    run(fake, both, 1, 4)
    same(fake, both)
    assert used == [0, 3, 3]


# ---- Results that do not stand -------------------------------------------------------------------


def change_lr(gpu, params, opt):
    opt.param_groups[0]["lr"] *= 0.5


def change_decay(gpu, params, opt):
    opt.param_groups[0]["weight_decay"] = 0.25


def change_generator(gpu, params, opt):
    opt.generator = "mixer"


def clip(gpu, params, opt):
    opt.clip_norm = 0.01


def rewrite(gpu, params, name, factor, of):
    tensor = of(params[name])
    with torch.no_grad():
        if devices.of(tensor).type == "cpu":
            tensor.mul_(factor)
        else:
            gpu.later(tensor, gpu.read(tensor) * factor)
            torch.autograd.graph.increment_version([tensor])


def rewrite_gradients(gpu, params, opt):
    for name in params:
        rewrite(gpu, params, name, 0.5, lambda p: p.grad)


def write_weights(gpu, params, opt):
    rewrite(gpu, params, "c", 0.5, lambda p: p.detach())


def write_states(gpu, params, opt):
    for name in ("a", "b"):
        opt.state[params[name]]["exp_avg.codes"].zero_()


def replace_states(gpu, params, opt):
    held = opt.state[params["a"]]
    held["exp_avg.codes"] = held["exp_avg.codes"].clone()


def write_by_name(gpu, params, opt):
    values = opt.read_state(params["a"], "exp_avg")
    opt.write_state(params["a"], "exp_avg", values * 0.5)
    opt.write_weight(params["b"], gpu.read(opt.read_weight(params["b"])) * 0.5)


def load(gpu, params, opt):
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def another_pass(gpu, params, opt):
    backward(gpu, params, {n: g for n, g in gradients(params, 77).items() if n != "d"}, True)


def give_up(gpu, params, opt):
    opt.zero_grad()
    backward(gpu, params, gradients(params, 78))


def a_group(gpu, params, opt):
    put = torch.clone if type(opt) is halfstep.AdamW else gpu.tensor
    extra = Parameter(put(torch.ones(64, 64, dtype=torch.bfloat16)))
    opt.add_param_group({"params": [("extra", extra)], "lr": 0.5})


def a_mode(gpu, params, opt):
    opt.optimizer_accumulation = True
    opt.step()
    opt.optimizer_accumulation = False


#: what happens between the backward pass and step(), and whether the step is made again
CHANGES = {
    change_lr: 1,
    change_decay: 1,
    change_generator: 1,
    clip: 1,
    rewrite_gradients: 1,
    write_weights: 1,
    write_states: 1,
    replace_states: 1,
    write_by_name: 1,
    load: 1,
    another_pass: 1,
    give_up: 0,
    a_group: 1,
    a_mode: 0,
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.told("was written, but not by this optimizer", change=write_weights)
def test_what_changes_before_the_step(gpu, change):
    both, used = overlapped(gpu, recipe="ecc8-int8", clip_norm=1e9)
    run(gpu, both, 1, 3)
    with warnings_are("ignore"):
        for params, opt in both:
            backward(gpu, params, gradients(params, 3))
            if opt is both[1][1]:
                settle(opt)
                assert len(opt._parts.placement.overlap.results) == in_advance(params)
            change(gpu, params, opt)
            opt.step()
            opt.zero_grad()
    same(gpu, both)
    assert both[1][1].redone_steps == CHANGES[change]
    run(gpu, both, 4, 7)
    same(gpu, both)


@pytest.mark.parametrize(
    "scan, name, redone", [("scan", "a", 0), ("scan", "scale", 0), ("per-tensor", "e", 0)]
)
@pytest.mark.told("is not finite")
def test_a_nan(gpu, scan, name, redone):
    both, used = overlapped(gpu, clip_norm=1e9, scan=scan)
    run(gpu, both, 1, 3)
    step_with_a_nan(gpu, both, name)
    same(gpu, both)
    assert both[1][1].skipped_steps == 1 and both[1][1].redone_steps == redone
    run(gpu, both, 3, 5)
    same(gpu, both)
    assert used[-1] == in_advance(both[1][0])


def test_where_clipping_is_the_rule_nothing_is_stepped_in_advance(gpu):
    """After three steps that were made again, 16 are left alone, then 32 after one try. When a
    result stands, it begins anew."""
    both, used = overlapped(gpu, recipe="bf16-sr", shapes=ONE, clip_norm=0.01)
    (params, plain), (_, opt) = both
    tries = [2, 3, 4, 21, 54]
    run(gpu, both, 1, 55)
    same(gpu, both)
    assert [i + 1 for i, n in enumerate(used) if n] == tries and opt.redone_steps == len(tries)
    for one in (plain, opt):
        one.clip_norm = 0.0
    run(gpu, both, 55, 55 + 66)
    assert not any(used[54 : 54 + 64]) and used[54 + 64 :] == [1, 1]
    for one in (plain, opt):
        one.clip_norm = 0.01
    run(gpu, both, 121, 126)
    assert used[120:] == [1, 1, 1, 0, 0] and opt.redone_steps == len(tries) + 3
    same(gpu, both)


def test_an_error_in_the_thread_loses_the_result_alone(gpu, monkeypatch):
    both, used = overlapped(gpu)
    run(gpu, both, 1, 3)

    def fail(event):
        raise MemoryError("no room")

    wait = devices.wait
    for params, opt in both:
        backward(gpu, params, gradients(params, 3))
        if opt is both[1][1]:
            opt._parts.placement.settle()
            monkeypatch.setattr(_placement.overlap.devices, "wait", fail)
            backward(gpu, params, gradients(params, 3))
            opt._parts.placement.settle()
            monkeypatch.setattr(_placement.overlap.devices, "wait", wait)
        opt.step()
    same(gpu, both)
    run(gpu, both, 4, 6)
    same(gpu, both)
    assert used[-1] == in_advance(both[1][0])


# ---- Memory and options --------------------------------------------------------------------------


def test_a_window(gpu):
    """Parameters that have no room are stepped in step(). What results take is what plan says."""
    shapes = {name: (48, 64) for name in "abcd"}
    both, used = overlapped(gpu, how={"minimal_size": 0}, shapes=shapes)
    run(gpu, both, 1, 3)
    params, opt = both[1]
    rooms = opt._parts.placement.overlap.rooms
    needed = sum(t.nbytes for room in rooms.values() for t in room)
    (row,) = halfstep.plan(params, "adamw/bf16-ecc8/int8", offload=True, overlap=True).rows
    (plain,) = halfstep.plan(params, "adamw/bf16-ecc8/int8", offload=True).rows
    assert abs(row.host - plain.host - needed) <= len(shapes) * 5 * 64
    for share, expected in ((0.6, 2), (0.01, 0)):
        window = int(needed * share)
        both, used = overlapped(gpu, how={"minimal_size": 0, "overlap": window}, shapes=shapes)
        run(gpu, both, 1, 4)
        same(gpu, both)
        rooms = both[1][1]._parts.placement.overlap.rooms
        assert used == [0, expected, expected] and len(rooms) == expected
        (row,) = halfstep.plan(params, "adamw/bf16-ecc8/int8", offload=True, overlap=window).rows
        assert row.host - plain.host == window


def test_copies_step_in_advance_too(gpu):
    both, _ = overlapped(gpu, how={"overlap": "1G"})
    run(gpu, both, 1, 3)
    opt = both[1][1]
    again = pickle.loads(pickle.dumps(opt)) if gpu.real else copy.deepcopy(opt)
    assert again.overlap == opt.overlap == 1 << 30
    assert again._parts.placement.overlap is not opt._parts.placement.overlap


def test_wrong_arguments(gpu):
    p = Parameter(gpu.tensor(torch.ones(64, 64)))
    for options, error, said in (
        ({"overlap": True, "gradient_release": True}, ValueError, "gradient_release"),
        ({"overlap": True, "store": "x.states"}, ValueError, "store="),
        ({"overlap": "much"}, ValueError, "overlap='much'"),
        ({"overlap": -1}, ValueError, "overlap='-1'"),
        ({"overlap": 0}, ValueError, "overlap=0"),
    ):
        with pytest.raises(error, match=said):
            halfstep.CPUOffload([p], **options)
    opt = halfstep.CPUOffload([p], overlap=True)
    with pytest.raises(ValueError, match="gradient_release"):
        opt.prepare_gradient_release()
    with pytest.raises(ValueError, match="overlap=True .* offload="):
        halfstep.plan({"w": (64, 64)}, overlap=True)
