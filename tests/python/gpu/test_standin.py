"""Tests parameters on a device that the library has no kernels for: standin, which takes the place
of AMD's, Apple's and Intel's GPUs. Optimizers step them by the processor, with its bits.

All checks run in one process of their own, because the device becomes the accelerator of torch. A
check is a function whose name begins with "check_"; it gets the device.
"""

import copy
import ctypes
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import pytest
import standin
import torch
from conftest import RECIPES, RULES, class_of, named, parameters, randn, saved, weights_of
from standin import StandIn
from test_cuda import held, pair
from torch import nn
from torch.nn import Parameter

import halfstep
from halfstep._tensors import devices, torch_public

pytestmark = pytest.mark.all
SHAPES = {
    **{"body.weight": (24, 96), "head.weight": (17, 50), "body.bias": (33,), "scale": ()},
    **{"conv": (8, 4, 3, 3), "empty": (0, 4)},
}


class Put:
    """Puts tensors on the device, and reads them, for functions of test_cuda."""

    real = True

    def __init__(self, device):
        self.device = device

    def tensor(self, values, device=0):
        return values.detach().to(torch.device(self.device.type, device or 0))

    def read(self, tensor):
        return tensor.detach().cpu().contiguous()


def both_of(device, cls, dtype=torch.float32, shapes=None, **options):
    """Makes the same optimizer on the processor and on the device. Returns (parameters, optimizer)
    of each."""
    return pair(Put(device), cls, dtype, shapes or SHAPES, **options)


def gradients(params, step):
    return {
        name: randn(p.shape, 1000 * step + sum(name.encode()), p.dtype)
        for name, p in named(params).items()
        if p.requires_grad or type(p) is torch.Tensor
    }


def backward(params, given):
    """Runs a backward pass that gives parameters these gradients."""
    loss = sum((p * given[name].to(p.device)).float().sum() for name, p in params.items())
    loss.backward()


def run(both, first, last, change=None):
    for step in range(first, last):
        for params, opt in both:
            given = gradients(params, step)
            if change is not None:
                change(given)
            backward(params, given)
            opt.step()
            opt.zero_grad()


def same(device, both):
    (a, b), (c, d) = both
    assert held(Put(device), c, d) == held(Put(device), a, b)
    assert d.grad_norm == b.grad_norm and d.skipped_steps == b.skipped_steps


def same_steps(device, both, first, last):
    run(both, first, last)
    same(device, both)


def refuses(match, call, *arguments, error=ValueError):
    with pytest.raises(error, match=match):
        call(*arguments)


# ---- The device itself ---------------------------------------------------------------------------


def check_its_memory_faults(stand_in):
    """Whatever the process reads of it without a copy ends the process."""
    tensor = torch.ones(4, device=stand_in.device)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(tensor.data_ptr(), 4)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def check_its_streams_work_late(stand_in):
    """A copy on a second stream is done once somebody waits, and freed memory is overwritten."""
    there = torch.full((64,), 3.0, device=stand_in.device)
    here = torch.zeros(64, pin_memory=True)
    side = devices.Side(stand_in.device)
    side.follow()
    side.copy(here, there)
    event = side.event()
    assert not here.eq(3.0).any()
    del there
    torch.zeros(64, device=stand_in.device).cpu()
    devices.wait(event)
    assert here.eq(3.0).all()


# ---- The bits of the processor -------------------------------------------------------------------


def check_every_rule(stand_in):
    for rule in RULES:
        for dtype, options in RECIPES.values():
            both = both_of(stand_in.device, class_of(rule), dtype, clip_norm=0.5, **options)
            same_steps(stand_in.device, both, 1, 4)
            params, opt = both[1]
            for p in params.values():
                assert all(value.device.type == "cpu" for value in opt.state[p].values())


def check_a_model(stand_in):
    """A model in training on the device, and the processor with its gradients."""
    torch.manual_seed(0)
    there = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 64))
    there = there.bfloat16()
    here = copy.deepcopy(there)
    there.to(stand_in.device)
    options = {"lr": 1e-2, "weights": "bf16-ecc8", "states": "int8", "clip_norm": 1.0, "seed": 1}
    opts = [halfstep.AdamW(net.named_parameters(), **options) for net in (here, there)]
    losses = []
    for step in range(12):
        x = randn((16, 64), step, torch.bfloat16).to(stand_in.device)
        loss = (there(x) - x).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        for p, q in zip(here.parameters(), there.parameters()):
            p.grad = q.grad.cpu()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert weights_of(here) == [bits for net in [there.cpu()] for bits in weights_of(net)]
    assert losses[-1] < 0.7 * losses[0]


def check_one_stream(stand_in):
    """As on Apple's GPUs: every copy waits, and none is made before step() unless it is asked
    for."""
    stand_in.use_a_single_stream()
    try:
        assert devices.Side(stand_in.device).alone
        for options in ({}, {"gradient_release": True, "clip": "per-tensor", "clip_norm": 0.1}):
            same_steps(stand_in.device, both_of(stand_in.device, halfstep.AdamW, **options), 1, 4)
        params, opt = both_of(stand_in.device, halfstep.AdamW)[1]
        stand_in.take_copies()
        backward(params, gradients(params, 1))
        assert stand_in.take_copies()[0] == 0
        opt.step()
        for kind in ({"offload_gradients": True}, {"overlap": True}):
            params, opt = offloaded(stand_in.device, **kind)[1]
            run([(params, opt)], 1, 2)
            stand_in.take_copies()
            backward(params, gradients(params, 2))
            assert stand_in.take_copies()[0] == len(params) - 1
    finally:
        stand_in.use_a_single_stream(False)


def check_devices_with_a_module(stand_in):
    """torch.xpu and torch.cuda have streams of their own, whose names a module has here."""
    module = getattr(torch, standin.NAME)
    names = ("Stream", "current_stream", "stream")
    for name in names:
        setattr(module, name, getattr(devices._Accelerator, name))
    try:
        assert devices.Side(stand_in.device).torch is module
        same_steps(stand_in.device, both_of(stand_in.device, halfstep.AdamW), 1, 4)
    finally:
        for name in names:
            delattr(module, name)


# ---- What is copied ------------------------------------------------------------------------------


def check_copies(stand_in):
    """A step copies each gradient once to the process and each weight once back. The first one also
    brings the weights."""
    for cls in (halfstep.AdamW, halfstep.Muon):
        params, opt = both_of(stand_in.device, cls, torch.bfloat16)[1]
        count = sum(p.numel() > 0 for p in params.values())
        size = sum(2 * p.numel() for p in params.values())
        stand_in.take_copies()
        for step in range(1, 5):
            backward(params, gradients(params, step))
            here = stand_in.take_copies()
            assert here == [count, size, 0, 0]  # in the backward pass
            opt.step()
            first = step == 1
            assert stand_in.take_copies() == [first * count, first * size, count, size]
            opt.zero_grad()


def check_what_is_said(stand_in):
    """Once for each kind of device and number of bytes, and not where offload was asked for."""
    torch_public.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            both_of(stand_in.device, halfstep.AdamW, torch.bfloat16)
        both_of(stand_in.device, halfstep.AdamW, torch.float32)
        offloaded(stand_in.device)
    said = [str(one.message) for one in said]
    assert len(said) == 2 and all("parameters on standin are stepped by the" in x for x in said)
    assert "copies 4 bytes a parameter" in said[0] and "copies 8 bytes a parameter" in said[1]


# ---- Gradients -----------------------------------------------------------------------------------


def check_gradient_release(stand_in):
    for options in (
        {},
        {"clip_norm": 0.1, "clip": "delayed"},
        {"clip_norm": 0.1, "clip": "per-tensor", "weights": "bf16-kahan"},
    ):
        options = {"gradient_release": True, **options}
        both = both_of(stand_in.device, halfstep.AdamW, torch.bfloat16, **options)
        for step in range(1, 6):
            for params, opt in both:
                backward(params, gradients(params, step))
                assert all(p.grad is None for p in params.values() if p.numel())
                opt.step()
                opt.zero_grad()
        same(stand_in.device, both)
        for _, opt in both:
            opt.remove_gradient_release()
        same_steps(stand_in.device, both, 6, 8)


def check_trainers_that_step_in_the_backward_pass(stand_in):
    both = both_of(stand_in.device, halfstep.AdamW, torch.bfloat16)
    for params, opt in both:

        def step(p, opt=opt):
            opt.step_param(p)
            p.grad = None

        for p in params.values():
            p.register_post_accumulate_grad_hook(step)
        for number in range(1, 5):
            backward(params, gradients(params, number))
            opt.step()
    same(stand_in.device, both)


def check_a_grad_scaler(stand_in):
    """It unscales gradients, or leaves them to the step. An infinite gradient skips one step."""
    for fused in (False, True):
        both = both_of(stand_in.device, halfstep.AdamW, fused=fused, clip_norm=1.0)
        for params, opt in both:
            device = next(iter(params.values())).device.type
            scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
            for step in range(1, 6):
                given = gradients(params, step)
                if step == 3:
                    given["head.weight"][3, 3] = float("inf")
                loss = sum((p * given[n].to(p.device)).sum() for n, p in params.items())
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
            assert scaler.get_scale() == 16.0
        same(stand_in.device, both)


def check_a_grad_scaler_and_release(stand_in):
    """Are refused together, as everywhere."""
    params, opt = both_of(stand_in.device, halfstep.AdamW, gradient_release=True)[1]
    scaler = torch.amp.GradScaler(standin.NAME)
    loss = sum(p.sum() for p in params.values())
    refuses("GradScaler", scaler.scale(loss).backward, error=RuntimeError)


def check_a_nan(stand_in):
    def spoil(given):
        given["head.weight"][3, 3] = float("nan")

    for scan in ("scan", "per-tensor"):
        both = both_of(stand_in.device, halfstep.AdamW, clip_norm=1.0, scan=scan)
        run(both, 1, 3)
        run(both, 3, 4, spoil)
        assert both[1][1].skipped_steps == 1
        same_steps(stand_in.device, both, 4, 6)


def check_gradients_that_add_up(stand_in):
    both = both_of(stand_in.device, halfstep.Lion, clip_norm=1.0)
    for step in range(1, 4):
        for params, opt in both:
            for micro in range(3):
                backward(params, gradients(params, 10 * step + micro))
            nn.utils.clip_grad_norm_(list(params.values()), 0.5)  # writes what was copied
            opt.step()
            opt.zero_grad()
    a, b = ([p.detach().cpu() for p in params.values()] for params, _ in both)
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(a, b))


# ---- Offload that is asked for -------------------------------------------------------------------


def offloaded(device, cls=halfstep.AdamW, kind="CPUOffload", shapes=None, **options):
    values = parameters(torch.bfloat16, shapes or SHAPES)
    here = {name: Parameter(p.detach().clone()) for name, p in values.items()}
    there = {name: Parameter(p.detach().to(device)) for name, p in values.items()}
    own = {k: v for k, v in options.items() if k not in ("overlap", "offload_gradients")}
    return (
        (here, cls(here.items(), seed=5, **own)),
        (there, getattr(halfstep, kind)(there.items(), cls, seed=5, **options)),
    )


def check_offload(stand_in):
    for options in (
        {"offload_gradients": True, "clip_norm": 0.5},
        {"overlap": True, "weights": "bf16-kahan"},
        {"overlap": True, "clip_norm": 0.5},
        {"gradient_release": True},
    ):
        same_steps(stand_in.device, offloaded(stand_in.device, **options), 1, 6)
    both = offloaded(stand_in.device, kind="StateStreaming", states="int8")
    same_steps(stand_in.device, both, 1, 4)
    assert not both[1][1]._parts.placement.buses
    same_steps(stand_in.device, offloaded(stand_in.device, halfstep.Muon), 1, 4)


def check_overlap(stand_in):
    """Steps in advance are used."""
    both = offloaded(stand_in.device, overlap=True)
    run(both, 1, 3)
    params, opt = both[1]
    backward(params, gradients(params, 3))
    opt._parts.placement.settle()
    assert len(opt._parts.placement.overlap.results) == len(params) - 1
    opt.step()
    assert opt.redone_steps == 0


# ---- States --------------------------------------------------------------------------------------


def check_states_go_either_way(stand_in):
    options = {"weights": "bf16-ecc8", "states": "int8"}
    both = both_of(stand_in.device, halfstep.AdamW, torch.bfloat16, **options)
    run(both, 1, 3)
    fresh = both_of(stand_in.device, halfstep.AdamW, torch.bfloat16, **options)
    for (params, opt), (old, _), (_, other) in zip(fresh, both, both[::-1]):
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(old[name])
        file = io.BytesIO()
        torch.save(saved(other.state_dict()), file)
        file.seek(0)
        opt.load_state_dict(torch.load(file, weights_only=True))
    same_steps(stand_in.device, fresh, 3, 5)
    whole = pickle.loads(pickle.dumps(fresh[1]))
    same_steps(stand_in.device, (fresh[0], whole), 5, 7)
    for name in ("body.weight", "body.bias"):
        values = [
            f(opt)
            for params, opt in (fresh[0], whole)
            for p in [params[name]]
            for f in (lambda o: o.read_weight(p).cpu(), lambda o: o.read_state(p, "exp_avg").cpu())
        ]
        assert torch.equal(values[0], values[2]) and torch.equal(values[1], values[3])


def check_8_bit_weights(stand_in):
    for fmt in ("int8-ecc4", "int8-sr"):
        torch.manual_seed(0)
        here = nn.Sequential(nn.Linear(128, 64)).bfloat16()
        halfstep.nn.quantize_(here, fmt)
        there = copy.deepcopy(here).to(stand_in.device)
        opts = [halfstep.AdamW(net.named_parameters(), seed=1, lr=1e-2) for net in (here, there)]
        for step in range(1, 4):
            for net, opt in zip((here, there), opts):
                for (name, p), g in zip(net.named_parameters(), gradients(here, step).values()):
                    p.grad = g.to(p.device)
                opt.step()
        whole = [
            halfstep.full_precision_state_dict(net, opt) for net, opt in zip((here, there), opts)
        ]
        assert all(torch.equal(v, whole[1][name].cpu()) for name, v in whole[0].items())
        x = randn((4, 128), 1, torch.bfloat16)
        assert torch.equal(here(x), there(x.to(stand_in.device)).cpu())


def check_a_file_of_states(stand_in):
    for place in ("first", "second"):
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, place)
            here, there = (
                both_of(stand_in.device, halfstep.AdamW, torch.bfloat16)[i] for i in (0, 1)
            )
            there = there[0], halfstep.AdamW(there[0].items(), seed=5, store=store)
            run([here, there], 1, 4)
            assert weights_of(here[0]) == [
                b for p in there[0].values() for b in weights_of([p.cpu()])
            ]
            there[1].close_store()


def check_a_model_that_moves(stand_in):
    """The optimizer is made before the model goes to the device, and lives when it comes back.
    For PrivateUse1 torch moves parameters in place only by swapping tensors."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    both = []
    for place in ("cpu", stand_in.device):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 8)).bfloat16()
        opt = halfstep.AdamW(net.named_parameters(), seed=1, weights="bf16-kahan", lr=1e-2)
        params = dict(net.named_parameters())
        both.append((params, opt))
        run([(params, opt)], 1, 3)
        net.to(place)
        run([(params, opt)], 3, 6)
        if place != "cpu":
            stand_in.take_copies()
            backward(params, gradients(params, 6))
            assert stand_in.take_copies()[0] == len(params)  # hooks were put on them
            opt.zero_grad()
        net.to("cpu")
        run([(params, opt)], 6, 8)
    torch.__future__.set_swap_module_params_on_conversion(False)
    same(stand_in.device, both)


def check_what_others_write(stand_in):
    both = both_of(stand_in.device, halfstep.AdamW, torch.bfloat16, weights="bf16-kahan")
    run(both, 1, 3)
    for params, _ in both:
        with torch.no_grad():
            params["body.weight"].mul_(0.5)
    same_steps(stand_in.device, both, 3, 5)


def check_options(stand_in):
    """Frozen parameters, groups that come later, an lr on the device, closures, a schedule."""
    both = []
    for place in ("cpu", stand_in.device):
        params = {n: Parameter(p.detach().to(place)) for n, p in parameters().items()}
        params["head.weight"].requires_grad_(False)
        lr = torch.tensor(1e-2, device=place)
        opt = halfstep.AdamW(list(params.items())[:2], lr=lr, seed=5)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1 / (1 + n))
        for step in range(1, 5):
            if step == 3:
                opt.add_param_group({"params": list(params.items())[2:], "lr": 1e-3})
                schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1 / (1 + n))

            def closure():
                own = {n: p for n, p in params.items() if p.requires_grad}
                backward(own, gradients(own, step))

            opt.step(closure)
            opt.zero_grad()
            schedule.step()
        both.append([p.detach().cpu() for p in params.values()])
    assert all(map(torch.equal, *both))


# ---- Together with others ------------------------------------------------------------------------


def check_one_norm_and_one_verdict(stand_in):
    """Parameters of the processor, of both devices without kernels and of a GPU with them, in one
    optimizer: its norm is that of all, and so is its verdict, wherever the NaN is."""
    from fake_gpu import Fake

    fake, patch = Fake(), pytest.MonkeyPatch()
    real = {name: getattr(devices, name) for name in FAKED}
    fake.install(patch)
    for name in FAKED:
        patch.setattr(devices, name, either(fake, real[name], getattr(devices, name)))
    try:
        places = {
            **{"cpu": torch.clone, "fake": fake.tensor},
            **{i: lambda v, i=i: v.to(torch.device(standin.NAME, i)) for i in (0, 1)},
        }
        for options in ({"clip_norm": 0.5}, {"weights": "bf16-kahan", "clip_norm": 0.5}):
            values = {f"p{i}": randn((24, 96), i, torch.bfloat16) for i in range(8)}
            where = dict(zip(values, [*places] * 2))
            both = []
            for put in (lambda name: torch.clone, lambda name: places[where[name]]):
                params = {n: Parameter(put(n)(v)) for n, v in values.items()}
                both.append((params, halfstep.AdamW(params.items(), seed=5, **options)))
            for step in range(1, 8):
                for params, opt in both:
                    given = gradients(params, step)
                    if step > 2:
                        given[f"p{step - 3}"][3, 3] = float("nan")
                    for name, p in params.items():
                        there = params is both[1][0] and where[name] == "fake"
                        p.grad = fake.tensor(given[name]) if there else given[name].to(p.device)
                    opt.step()
                (_, one), (_, other) = both
                assert one.grad_norm == other.grad_norm, (step, one.grad_norm, other.grad_norm)
                assert one.skipped_steps == other.skipped_steps == max(step - 2, 0)
            assert weights_of(both[0][0]) == weights_of(
                [fake.read(p).cpu() for p in both[1][0].values()]
            )
            parts = [part.device.type for part in both[1][1]._parts.cache.engine.parts]
            assert sorted(parts) == ["cpu", "cuda"]
            del params, opt, one, other, both
    finally:
        patch.undo()
        fake.close()


#: what the fake GPU answers for its tensors, and torch for those of the stand-in
FAKED = ("clone", "contiguous", "copy", "to_cpu", "place", "pinned", "is_pinned", "wait", "Side")


def either(fake, real, faked):
    """Returns a function that calls `faked` for what belongs to a fake GPU, else `real`."""

    def function(*arguments):
        kinds = {
            fake.of(x).type if isinstance(x, torch.Tensor) else getattr(x, "type", type(x))
            for x in arguments
        }
        return (faked if kinds & {"cuda", ctypes.c_void_p} else real)(*arguments)

    return function


# ---- What is refused -----------------------------------------------------------------------------


def check_refusals(stand_in):
    p = Parameter(torch.ones(24, 96, device=stand_in.device))
    net = nn.Linear(8, 8).to(stand_in.device)
    before = weights_of([p.cpu()])
    said = "no kernels: this is for tensors of CPUs, and of NVIDIA GPUs of compute capability 8.0"
    refuses(said, halfstep.GradientAccumulator, [p])
    average = halfstep.EMA(net)
    refuses(said, average.update_parameters, net)
    opt = halfstep.AdamW([("w", p)], compile=True)
    p.grad = torch.ones_like(p)
    refuses(said, opt.step)
    kept = torch.accelerator
    del torch.accelerator
    try:
        opt = halfstep.AdamW([("w", p)])
        refuses("through CPU memory .* torch 2.6 or newer may have them", opt.step)
        refuses("torch 2.6 or newer may have them", halfstep.CPUOffload([p]).step)
        assert not opt.state
    finally:
        torch.accelerator = kept
    assert before == weights_of([p.cpu()])


def check_info(stand_in):
    from halfstep import __main__

    out, sys.stdout = sys.stdout, io.StringIO()
    try:
        __main__.main(["info"])
        text = sys.stdout.getvalue()
        sys.stdout = io.StringIO()
        __main__.main(["info", "--json"])
        found = json.loads(sys.stdout.getvalue())
    finally:
        sys.stdout = out
    assert "standin: stepped on the processor" in text
    assert found["accelerator"] == "standin: stepped on the processor"


def check_plan(stand_in):
    """A model on the device is counted as it is trained."""
    net = nn.Linear(256, 128).bfloat16()
    forced = halfstep.plan(net, "muon/bf16-sr/int8", kernels=False)
    assert str(halfstep.plan(net.to(stand_in.device), "muon/bf16-sr/int8")) == str(forced)


# ---- Ranks ---------------------------------------------------------------------------------------


def shards(rank, size, rule, spoiled):
    """Steps DTensors on the device, DTensors of the processor and plain parameters of both by one
    optimizer. Returns weights, norm and the number of refused steps. In the step `spoiled`, the
    last rank has a NaN in a shard on the device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    stand_in = StandIn() if size > 1 else None
    values = {name: randn((12, 96), i, torch.bfloat16) for i, name in enumerate("abcdef")}
    here = init_device_mesh("cpu", (size,))
    there = init_device_mesh(standin.NAME, (size,)) if stand_in else here

    def put(name, value):
        if stand_in is None:
            return value.clone()
        if name in "ab":
            return value.to(stand_in.device) if name == "a" else value.clone()
        cut = distribute_tensor(value, here, [Shard(0)])
        if name in "cd":
            return cut
        return DTensor.from_local(cut.to_local().to(stand_in.device), there, [Shard(0)])

    def whole(name, p):
        if name in "ef" and stand_in is not None:
            p = DTensor.from_local(p.to_local().cpu(), here, [Shard(0)])
        return p.full_tensor() if isinstance(p, DTensor) else p.detach().cpu()

    params = {name: Parameter(put(name, value)) for name, value in values.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = class_of(rule)(params.items(), seed=5, clip_norm=0.5, weights="bf16-kahan")
        for step in range(1, 5):
            for name, g in gradients(values, step).items():
                if step == spoiled and name == "f":
                    g[-1, 3] = float("nan")
                params[name].grad = put(name, g)
            opt.step()
    return weights_of([whole(n, p) for n, p in params.items()]), opt.grad_norm, opt.skipped_steps


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_shards(rule, pool):
    """One norm and one verdict over shards, devices and the processor."""
    if standin.why_not():
        pytest.skip(standin.why_not())
    standin.built()
    alone = pool.run(1, shards, rule, 3)[0]
    assert alone[2] == 1
    for size in (2, 3):
        found = pool.run(size, shards, rule, 3)
        assert all(one == found[0] for one in found)
        assert found[0][0] == alone[0] and found[0][2] == 1


# ---- Running them --------------------------------------------------------------------------------


CHECKS = [name for name in dir() if name.startswith("check_")]


def main(names):
    """Runs checks, and prints the errors by name."""
    torch.use_deterministic_algorithms(False)
    stand_in, errors = StandIn(), {}
    for name in names:
        print(name, file=sys.stderr, flush=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                globals()[name](stand_in)
        except BaseException:
            errors[name] = traceback.format_exc()
    print(json.dumps(errors))


@pytest.fixture(scope="module")
def errors(request):
    if standin.why_not():
        pytest.skip(standin.why_not())
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if "errors" in getattr(item, "fixturenames", ())
    ]
    done = subprocess.run(
        [
            *(sys.executable, "-X", "faulthandler", "-c"),
            f"import conftest, test_standin; test_standin.main({names})",
        ],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert not done.returncode, f"exit status {done.returncode}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CHECKS)
def test_a_device_without_kernels(errors, name):
    assert name not in errors, errors[name]
