"""Tests EMA: the interface and figures of torch's AveragedModel, in formats that keep small
changes."""

import copy
import itertools
import math

import pytest
import torch
from conftest import COPIES, assert_close, bits, everything, plain, randn, run, saved
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfstep
from halfstep._library import abi
from halfstep.ema import EMA

FORMATS = ["bf16-sr", "bf16-kahan", "bf16-ecc8", "bf16-ecc16", "f32"]


class Net(nn.Module):
    """A vector, matrices, an image kernel, a scalar, an empty tensor, a shared weight and both
    kinds of buffers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.inner = nn.Sequential(nn.Linear(8, 40), nn.GELU(), nn.Linear(40, 8))
        self.head = nn.Linear(40, 8)
        self.head.weight = self.inner[2].weight
        self.scale = nn.Parameter(torch.ones(()))
        self.none = nn.Parameter(torch.ones(0, 4))

    def forward(self, x):
        x = self.norm(self.conv(x)).mean((2, 3)) * self.scale
        return self.inner(x) + self.head(self.inner[0](x))


def disturb(model, step, size=0.1):
    """Moves all parameters and the statistics, by the step's number."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for p in model.parameters():
            p.add_((torch.randn(p.shape, generator=generator) * size).to(p.dtype))
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand(buffer.shape, generator=generator).to(buffer.dtype) * size)
            else:
                buffer.add_(3)


def content(module):
    return plain(module.state_dict())


def net(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return Net().to(dtype)


def advance(model, first, last, *averages):
    """Disturbs the model and updates its averages, several times."""
    for step in range(first, last):
        disturb(model, step)
        for average in averages:
            average.update_parameters(model)


def averaged(weights="bf16-sr", updates=0, decay=0.9, **options):
    """Returns a model of BF16, and an average of it that was updated."""
    model = net(torch.bfloat16)
    ema = EMA(model, decay, weights, **options)
    advance(model, 0, updates, ema)
    return model, ema


# ---- As AveragedModel ----------------------------------------------------------------------------


@pytest.mark.parametrize("use_buffers", [False, True], ids=["copied buffers", "averaged buffers"])
@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999])
def test_equal_to_averaged_model(decay, use_buffers):
    model = net()
    ours = EMA(model, decay, use_buffers=use_buffers)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=use_buffers)
    advance(model, 0, 1, ours, theirs)
    assert content(ours.module) == content(theirs.module)
    advance(model, 1, 50, ours, theirs)
    found, wanted = ours.state_dict(), theirs.state_dict()
    assert set(wanted) <= set(found)
    assert set(found) - set(wanted) == {"formats", "ids", "random", "counters"}
    for key, value in wanted.items():
        if value.is_floating_point():
            torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(found[key], value), key
    x = torch.randn(4, 3, 9, 9)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-5, atol=1e-5)


def test_interface():
    assert halfstep.EMA is EMA
    model = net()
    ema = EMA(model)
    assert isinstance(ema, nn.Module) and type(ema.module) is Net and ema.decay == 0.999
    assert ema.n_averaged.dtype == torch.long and ema.n_averaged.item() == 0
    assert [n for n, _ in ema.named_parameters()] == [
        "module." + n for n, _ in model.named_parameters()
    ]
    assert ema.update_parameters(model) is None
    assert ema.n_averaged.item() == 1
    for a, b in zip(ema.parameters(), model.parameters()):
        assert torch.equal(a, b) and a is not b and (a.numel() == 0 or a.data_ptr() != b.data_ptr())
    assert ema.module.head.weight is ema.module.inner[2].weight


def test_update_bn():
    """torch's own helper for averaged models."""
    model = net()
    ema = EMA(model)
    ema.update_parameters(model)
    torch.optim.swa_utils.update_bn([torch.randn(8, 3, 9, 9) + 5 for _ in range(3)], ema)
    assert ema.module.norm.num_batches_tracked.item() == 3
    assert not torch.equal(ema.module.norm.running_mean, model.norm.running_mean)


def test_wrapped_model():
    """Names do not matter, as with DistributedDataParallel."""
    model = net()
    wrapper = nn.Module()
    wrapper.module = model
    ema, other = EMA(model, 0.5, seed=0), EMA(model, 0.5, seed=0)
    for step in range(3):
        disturb(model, step)
        ema.update_parameters(wrapper)
        other.update_parameters(model)
    assert content(ema) == content(other)


# ---- Formats -------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", FORMATS + ["bf16"])
def test_bytes_and_first_copy(weights):
    model, ema = averaged(weights, 1)
    full = ema.full_state_dict()
    for (name, live), average in zip(model.named_parameters(), ema.parameters()):
        assert average.dtype == (torch.float32 if weights == "f32" else torch.bfloat16)
        assert torch.equal(average.float(), live.float()) and torch.equal(full[name], live.float())
    count = sum(p.numel() for p in model.parameters())
    held = sum(
        t.numel() * t.element_size()
        for key, t in ema.state_dict(keep_vars=True).items()
        if key.startswith(("module.", "extra."))
        and key != "module.head.weight"
        and "norm.r" not in key
        and not key.endswith("tracked")
    )
    bytes_each = {"f32": 4, "bf16-kahan": 4, "bf16-ecc16": 4, "bf16-ecc8": 3}
    assert held == count * bytes_each.get(weights, 2)


@pytest.mark.parametrize("weights", FORMATS + ["bf16"])
def test_movement_at_decay_9999(weights):
    """The live weights jump by some hundredths of themselves. Each update moves the average by
    1/10000 of the rest. Nearest rounding is the control that must lose it all."""
    updates, decay = 2000, 0.9999
    torch.manual_seed(0)
    model = nn.Linear(256, 512, bias=False).bfloat16()
    start = model.weight.detach().double()
    ema = EMA(model, decay, weights)
    ema.update_parameters(model)
    with torch.no_grad():
        model.weight.mul_(1 + 0.05 * torch.randn_like(model.weight))
    for _ in range(updates):
        ema.update_parameters(model)
    way = model.weight.detach().double() - start
    moved = (((ema.full_state_dict()["weight"] - start) * way).sum() / (way * way).sum()).item()
    exact = 1 - decay**updates
    print(f"{weights}: {moved / exact:.4f} of the movement")
    if weights == "bf16":
        assert moved < 0.01 * exact
    else:
        # With a lattice, the pull on an average is that of half its 256 writes before, which is
        # (1 - decay) * 128 too much.
        assert moved / exact == pytest.approx(1.0, abs=0.02 if weights.endswith("-sr") else 0.01)


@pytest.mark.parametrize("weights", ["f16-sr", "bf16-kahan"])
def test_float16_takes_the_namesake(weights):
    model = nn.Linear(64, 64).half()
    ema = EMA(model, 0.99, weights)
    how = weights.split("-")[1]
    assert f"f16-{how}" in repr(ema)
    ema.update_parameters(model)
    with torch.no_grad():
        model.weight.mul_(1.01)
    exact = ema.full_state_dict()["weight"].double()
    for _ in range(100):
        ema.update_parameters(model)
        exact += 0.01 * (model.weight.double() - exact)
    error = (ema.full_state_dict()["weight"].double() - exact).abs().mean()
    assert error < (0.2 if how == "sr" else 0.002) * 0.01 * exact.abs().mean()


def test_mixed_model_keeps_float32():
    model = nn.Sequential(nn.Linear(40, 40).bfloat16(), nn.LayerNorm(40))
    ema = EMA(model, 0.9, "bf16-ecc8")
    ema.update_parameters(model)
    assert [p.dtype for p in ema.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert sorted(k for k in ema.state_dict() if k.startswith("extra")) == [
        "extra.0.bias",
        "extra.0.weight",
    ]


@pytest.mark.parametrize("live", [1e4, 1e30, 3.4e38])
def test_values_stay_finite(live):
    """The first update copies into a narrower format; what does not fit there saturates."""
    for dtype in (torch.float16, torch.bfloat16):
        model, holder = nn.Linear(40, 1, bias=False), nn.Linear(40, 1, bias=False).to(dtype)
        nn.init.constant_(model.weight, live)
        ema = EMA(holder, 0.5)
        for _ in range(3):
            ema.update_parameters(model)
        assert torch.isfinite(ema.module.weight).all()
        assert torch.all(
            (ema.module.weight.float() - min(live, torch.finfo(dtype).max)).abs() <= live * 2**-7
        )


# ---- Residuals of the live weights ---------------------------------------------------------------


@pytest.mark.parametrize(
    "weights", ["bf16-kahan", "bf16-ecc8", "bf16-ecc16", "bf16-sr", "f16-kahan", "f16-ecc8", "f32"]
)
def test_follows_both_parts_of_a_weight(weights):
    dtypes = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
    dtype = dtypes[weights.split("-")[0]]
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(33, 40), nn.Linear(40, 5)).to(dtype)
    opt = halfstep.AdamW(model.named_parameters(), lr=1e-5, weights=weights)
    ema, blind = EMA(model, 0.5, "f32"), EMA(model, 0.5, "f32")
    exact = None
    for step in range(8):
        for p in model.parameters():
            p.grad = randn(p.shape, step).to(dtype)
        if step:  # the first update finds no states yet
            opt.step()
        ema.update_parameters(model, opt)
        blind.update_parameters(model)
        now = {name: opt.read_weight(p).double() for name, p in model.named_parameters()}
        exact = {name: (exact[name] + value) / 2 for name, value in now.items()} if exact else now
    found, without = ema.full_state_dict(), blind.full_state_dict()
    apart = 0.0
    for name, value in exact.items():
        torch.testing.assert_close(found[name].double(), value, rtol=2e-7, atol=1e-10)
        apart += (without[name].double() - value).abs().max().item()
    if weights in ("bf16-sr", "f32"):
        assert apart < 1e-6
    else:
        assert apart > 1e-5, "the control: without the optimizer the residuals are missing"


def test_several_optimizers_and_untrained_parameters():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
    first = halfstep.AdamW(model[0].parameters(), lr=1e-4, weights="bf16-kahan")
    second = halfstep.Lion(model[1].parameters(), lr=1e-4, weights="bf16-ecc8")
    ema = EMA(model, 0.0, "bf16-ecc16")
    for step in range(4):
        for p in model[:2].parameters():
            p.grad = torch.randn_like(p)
        first.step()
        second.step()
        ema.update_parameters(model, [first, second])
    full = ema.full_state_dict()
    for opt, layer in ((first, "0"), (second, "1")):
        for name in ("weight", "bias"):
            p = getattr(model[int(layer)], name)
            torch.testing.assert_close(
                full[f"{layer}.{name}"], opt.read_weight(p), rtol=2e-7, atol=0
            )
            assert not torch.equal(full[f"{layer}.{name}"], p.float())
    assert torch.equal(full["2.weight"], model[2].weight.float())


def test_live_residuals_are_only_read():
    model = nn.Linear(40, 40).bfloat16()
    opt = halfstep.AdamW(model.parameters(), lr=1e-4, weights="bf16-kahan")
    ema = EMA(model, 0.9, "bf16-kahan")
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        opt.step()
        before = everything(opt)
        ema.update_parameters(model, opt)
        assert before == everything(opt)


# ---- Random bits ---------------------------------------------------------------------------------


def movements(model, seed=0, **options):
    ema = EMA(model, 0.99, seed=seed, **options)
    ema.update_parameters(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.003)
    for _ in range(5):
        ema.update_parameters(other)
    return {name: bits(p) for name, p in ema.module.named_parameters()}


def test_names_key_the_random_bits():
    torch.manual_seed(0)
    weights = [torch.rand(64, 64).bfloat16() + 1 for _ in range(2)]
    models = []
    for names in (("a", "b"), ("b", "a"), ("a", "c")):
        model = nn.Module()
        for name, weight in zip(names, weights if names[0] == "a" else weights[::-1]):
            setattr(model, name, nn.Parameter(weight.clone()))
        models.append(model)
    one, turned, renamed = map(movements, models)
    assert one == turned
    assert one["a"] == renamed["a"] and one["b"] != renamed["c"]
    assert movements(models[0], seed=1)["a"] != one["a"]
    assert movements(models[0], threads=3) == one
    generators = abi.choices("generator")
    others = [movements(models[0], generator=generator)["a"] for generator in generators]
    assert others[0] == one["a"] and len(set(others)) == len(others)


def test_two_averages_and_the_optimizer_round_apart():
    """If one rounds up, the other should not. Shared random words would give a correlation of 1."""
    model = nn.Linear(256, 64, bias=False).bfloat16()
    nn.init.constant_(model.weight, 1.0)
    opt = halfstep.SGD(model.named_parameters(), lr=0.25, weights="bf16-sr")
    emas = [EMA(model, 0.75, "bf16-sr"), EMA(model, 0.7500001, "bf16-sr")]
    for ema in emas:
        ema.update_parameters(model)
    after = copy.deepcopy(model)
    nn.init.constant_(after.weight, 1 + 1 / 64)  # the averages' change is half a place
    for ema in emas:
        ema.update_parameters(after)
    model.weight.grad = torch.full_like(model.weight, -1 / 64)  # half a place too
    opt.step()
    rounded = (emas[0].module.weight, emas[1].module.weight, model.weight)
    ups = torch.stack([(t.float() > 1.0).float().flatten() for t in rounded])
    assert ((ups.mean(1) - 0.5).abs() < 0.02).all()
    correlation = torch.corrcoef(ups) - torch.eye(3)
    assert correlation.abs().max() < 0.04


# ---- Saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("weights", FORMATS)
def test_resume_is_bit_exact(weights, use_buffers):
    model, ema = averaged(weights, 5, 0.99, use_buffers=use_buffers, seed=7)
    kept = saved(ema.state_dict())
    assert all(isinstance(value, torch.Tensor) for value in kept.values())
    fresh = EMA(net(torch.bfloat16, seed=9), 0.99, weights, use_buffers=use_buffers)
    assert fresh.load_state_dict(kept).missing_keys == []
    others = [ema, fresh, *(copied(ema) for copied in COPIES.values())]
    advance(model, 5, 10, *others)
    ends = [content(other) for other in others]
    assert ends[0] == ends[1] == ends[2] == ends[3]
    assert ends[0] != plain(kept)
    assert int(ema.n_averaged) == 10 and ema.counters.tolist() == [10, 0]


def test_the_counters_are_the_library_s():
    model, ema = averaged("bf16-kahan", 4)
    ema.n_averaged.zero_()
    advance(model, 4, 6, ema)
    members = ema._optimizer._parts.cache.engine.members
    ids = {id(p): ema.ids[i].item() % 2**64 for i, p in enumerate(ema.module.parameters())}
    assert len(members) == len(ids)
    for m in members:
        counters = m.handle.counters(m.index)
        assert (counters.full_steps, counters.state_steps, counters.writes) == (2, 2, 6)
        assert counters.id == ids[id(m.p)]


def test_a_copy_is_independent():
    model, ema = averaged("bf16-ecc8", 3)
    copied, before = copy.deepcopy(ema), content(ema)
    advance(model, 3, 6, copied)
    assert content(ema) == before


def test_zeroed_count_starts_anew():
    model, ema = averaged("bf16-kahan", 3, 0.999)
    disturb(model, 99, 1.0)
    ema.n_averaged.zero_()
    ema.update_parameters(model)
    full = ema.full_state_dict()
    assert all(
        torch.equal(full[key].float(), value.float()) for key, value in model.state_dict().items()
    )


def test_state_of_an_averaged_model():
    model = net()
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    advance(model, 0, 4, theirs)
    ours = EMA(net(seed=5), 0.9)
    ours.load_state_dict(theirs.state_dict())
    advance(model, 4, 8, theirs, ours)
    assert int(ours.n_averaged) == 8
    assert_close(ours, theirs, 1e-6)


@pytest.mark.parametrize("have", FORMATS)
@pytest.mark.parametrize("own", FORMATS)
def test_loading_converts_formats(have, own, caught):
    model, saved = averaged(have, 4)
    ema = EMA(model, 0.9, own)
    ema.load_state_dict(saved.state_dict())
    assert len([w for w in caught if "averages were saved as" in str(w.message)]) == (have != own)
    found, wanted = ema.full_state_dict(), saved.full_state_dict()
    worst = {"bf16-sr": 2**-8, "bf16-kahan": 2**-16, "bf16-ecc8": 2**-16}.get(own, 0)
    worst *= have != own
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], wanted[name], rtol=worst, atol=0)
    ema.update_parameters(model)
    assert int(ema.n_averaged) == 5


@pytest.mark.parametrize("own", FORMATS)
def test_plain_bf16_averages_load(own, caught):
    model = net(torch.bfloat16)
    theirs = AveragedModel(model)
    theirs.update_parameters(model)
    ema = EMA(net(torch.bfloat16, seed=5), 0.9, own)
    ema.load_state_dict(theirs.state_dict())
    found = ema.full_state_dict()
    assert all(torch.equal(found[name], p.float()) for name, p in model.named_parameters())


def test_load_state_dict_is_strict():
    model, ema = averaged("bf16-kahan")
    for lost in ("counters", "extra.scale", "module.scale", "n_averaged"):
        state = {key: value for key, value in ema.state_dict().items() if key != lost}
        with pytest.raises(RuntimeError, match=lost):
            EMA(model, 0.9, "bf16-kahan").load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        EMA(model).load_state_dict(model.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_full_state_dict(dtype):
    model = net(dtype)
    ema = EMA(copy.deepcopy(model).bfloat16(), 0.9, "bf16-ecc16")
    reference = EMA(model, 0.9, "f32")
    advance(model, 0, 10, ema, reference)
    assert next(ema.parameters()).dtype == torch.bfloat16
    full = ema.full_state_dict()
    assert list(full) == list(model.state_dict())
    for name, p in reference.module.named_parameters():
        assert full[name].dtype == torch.float32 and torch.equal(full[name], p), name
    assert torch.equal(full["head.weight"], full["inner.2.weight"])
    assert torch.equal(full["norm.running_mean"], ema.module.norm.running_mean)
    wide = net()
    wide.load_state_dict(full)
    x = torch.randn(4, 3, 9, 9)
    torch.testing.assert_close(wide(x), ema.module.float()(x), rtol=0.1, atol=0.05)


# ---- Options -------------------------------------------------------------------------------------


def test_decay_may_change():
    model = nn.Linear(4, 4)
    ema = EMA(model, 0.5)
    ema.update_parameters(model)
    start = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    ema.decay = 1.0
    ema.update_parameters(model)
    assert torch.equal(ema.module.weight, start)
    ema.decay = 0.75
    ema.update_parameters(model)
    torch.testing.assert_close(ema.module.weight.detach(), start + 0.25)
    ema.decay = 1.5
    with pytest.raises(ValueError, match="Invalid decay value 1.5"):
        ema.update_parameters(model)
    assert int(ema.n_averaged) == 3


def test_debias_is_a_weighted_mean_of_all():
    model = nn.Linear(40, 4)
    ema = EMA(model, 0.9, debias=True)
    seen = []
    for step in range(12):
        disturb(model, step)
        seen.append(model.weight.detach().double().clone())
        ema.update_parameters(model)
    shares = torch.tensor([0.9 ** (11 - i) for i in range(12)], dtype=torch.float64)
    wanted = sum(s * w for s, w in zip(shares / shares.sum(), seen))
    torch.testing.assert_close(ema.module.weight.double(), wanted, rtol=1e-6, atol=1e-6)


def test_layouts_give_the_bits_of_contiguous_tensors():
    torch.manual_seed(1)
    module = nn.Conv2d(8, 16, 3).bfloat16()
    for weights in FORMATS:
        results = []
        for turned_average, turned_live in itertools.product((False, True), repeat=2):
            model, average = copy.deepcopy(module), copy.deepcopy(module)
            if turned_average:
                average = average.to(memory_format=torch.channels_last)
            if turned_live:
                model = model.to(memory_format=torch.channels_last)
            opt = halfstep.AdamW(model.named_parameters(), lr=1e-4, weights="bf16-kahan", seed=0)
            ema = EMA(average, 0.9, weights, seed=0)
            for step in range(4):
                run(opt, model, step, step + 1)
                ema.update_parameters(model, opt)
            turned = ema.module.weight.is_contiguous(memory_format=torch.channels_last)
            assert turned == turned_average
            results.append(plain(ema.full_state_dict()))
        assert all(result == results[0] for result in results)


def test_compiled_step():
    model, other = net(), net()
    ema, reference = EMA(model, 0.9, seed=0), EMA(other, 0.9, seed=0)

    def step(model, ema, number):
        with torch.no_grad():
            model.scale.add_(number)
        ema.update_parameters(model)
        return model.scale * 2

    compiled = torch.compile(step, backend="eager")
    for number in range(3):
        compiled(model, ema, number)
        step(other, reference, number)
    assert content(ema) == content(reference)


# ---- Bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["bf16-sr", "bf16-kahan"])
@pytest.mark.parametrize("updates", [0, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite(bad, updates, weights, caught):
    model, ema = averaged(weights, updates)
    broken = copy.deepcopy(model)
    disturb(broken, 50)
    with torch.no_grad():
        broken.inner[0].weight[3, 1] = bad
    before = content(ema)
    for times in (1, 2):
        ema.update_parameters(broken)
        after = content(ema)
        assert ema.skipped_updates == times and after.pop("counters") != before["counters"]
        assert after == {key: value for key, value in before.items() if key != "counters"}
    warned = [w for w in caught if "not finite" in str(w.message)]
    assert len(warned) == 1 and issubclass(warned[0].category, RuntimeWarning)
    assert "inner.0.weight" in str(warned[0].message)
    disturb(model, 60)
    ema.update_parameters(model)
    assert int(ema.n_averaged) == updates + 1
    fresh = EMA(model, 0.9, weights)
    fresh.load_state_dict(ema.state_dict())
    assert fresh.skipped_updates == 2


def test_weights_known_to_be_finite():
    """The averages are the same, without a scan. "scan" may be changed between updates."""
    model = net(torch.bfloat16)
    looked, known = EMA(model, 0.9, seed=7), EMA(model, 0.9, scan="known-finite", seed=7)
    advance(model, 0, 3, looked, known)
    assert content(known) == content(looked)
    with torch.no_grad():
        model.inner[0].weight[3, 1] = math.nan
    known.scan = "scan"
    with pytest.warns(RuntimeWarning, match="inner.0.weight"):
        known.update_parameters(model)
    assert content(known.module) == content(looked.module)
    known.scan = "known-finite"
    known.update_parameters(model)
    assert torch.isnan(known.module.inner[0].weight[3, 1]) and int(known.n_averaged) == 4
    known.scan = "per-tensor"
    with pytest.raises(ValueError, match="per-tensor"):
        known.update_parameters(model)


def test_residuals_that_are_not_finite():
    model = nn.Linear(40, 4).bfloat16()
    opt = halfstep.AdamW(model.parameters(), weights="bf16-kahan")
    for updates in (0, 1):
        ema = EMA(model, 0.9)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
        for _ in range(updates):
            ema.update_parameters(model, opt)
        opt.state[model.weight]["weight.extra"][0, 0] = math.nan
        before = content(ema.module)
        with pytest.warns(RuntimeWarning, match="weight"):
            ema.update_parameters(model, opt)
        assert content(ema.module) == before and int(ema.n_averaged) == updates
        opt.state[model.weight]["weight.extra"][0, 0] = 0


@pytest.mark.parametrize(
    "options, text",
    [
        ({"decay": 1.1}, "Invalid decay value 1.1"),
        ({"decay": -0.1}, "decay"),
        ({"decay": math.nan}, "decay"),
        ({"weights": "int8"}, "int8"),
        ({"scan": "per-tensor"}, "scan"),
        ({"weights": "nothing"}, "bf16-kahan"),
        ({"generator": "dice"}, "philox7"),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(ValueError, match=text):
        EMA(nn.Linear(2, 2), **options)


def test_models_that_do_not_match():
    model, ema = averaged(updates=2)
    before = content(ema)
    other, third = copy.deepcopy(model), copy.deepcopy(model)
    other.inner[0].weight = nn.Parameter(torch.ones(40, 9).bfloat16())
    third.norm.running_mean = torch.zeros(9)
    for wrong, error, words in (
        (nn.Linear(2, 2), ValueError, "2 tensors"),
        (other, ValueError, r"inner\.0\.weight.*\(40, 9\).*\(40, 8\)"),
        (third, ValueError, r"norm\.running_mean"),
        (copy.deepcopy(model).double(), TypeError, r"'scale' is torch\.float64"),
    ):
        with pytest.raises(error, match=words):
            ema.update_parameters(wrong)
    with pytest.raises(TypeError, match="Adam"):
        ema.update_parameters(model, torch.optim.Adam(model.parameters()))
    assert content(ema) == before


def test_parameters_that_cannot_be_averaged():
    with pytest.raises(TypeError, match="weight.*float64"):
        EMA(nn.Linear(2, 2).double())
    with pytest.raises(TypeError, match="weight.*complex"):
        EMA(nn.Linear(2, 2, dtype=torch.complex64))


def test_a_cast_average_is_refused():
    model = nn.Linear(4, 4).bfloat16()
    ema = EMA(model, 0.9)
    ema.update_parameters(model)
    ema.float()
    with pytest.raises(ValueError, match="'weight'.*bfloat16.*float32"):
        ema.update_parameters(model)


def test_meta_device():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    ema = EMA(model)
    with pytest.raises(ValueError, match="'weight' is on meta"):
        ema.update_parameters(model)


@pytest.mark.parametrize("weights", ["bf16-kahan", "bf16-ecc8"])
@pytest.mark.parametrize("averages", ["bf16-kahan", "f32"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_swapped_averages_leave_residuals_where_they_are(weights, averages, mode):
    """A run that evaluates its averages between steps has the bits of one that does not."""

    def held(module):
        tensors = itertools.chain(module.named_parameters(), module.named_buffers())
        return {name: bits(tensor) for name, tensor in tensors if tensor.is_floating_point()}

    def train(swaps):
        model = net(torch.bfloat16)
        opt = halfstep.AdamW(model.named_parameters(), lr=1e-3, weights=weights, seed=3)
        ema = EMA(model, 0.5, averages, use_buffers=True, seed=4)
        for step in range(4):
            model(randn((4, 3, 8, 8), step).bfloat16()).float().pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
            ema.update_parameters(model, opt)
            if swaps:
                own, expected = held(model), held(copy.deepcopy(ema.module).bfloat16())
                with mode(), ema.swapped(model):
                    assert held(model) == expected and (step == 0) == (own == expected)
                assert held(model) == own
        return content(model), everything(opt)

    assert train(True) == train(False)
