"""sd-scripts and musubi-tuner by behaviour: kohya.py parses their lines and trains as they do."""

import sys
import types

import pytest
import torch
from common import OPTIONS, bits, same
from kohya import TRAINERS, groups_of, loss_of, network, parse, train

import halfstep

pytestmark = [pytest.mark.all, pytest.mark.filterwarnings("ignore")]

ARGS = " ".join(f'"{key}={value!r}"' for key, value in OPTIONS.items())
LINE = (
    "--optimizer_type=halfstep.AdamW --learning_rate=1e-2 --text_encoder_lr=5e-3 --full_bf16"
    f" --optimizer_args {ARGS}"
)


def trainers(*columns):
    return pytest.mark.parametrize(
        "trainer",
        [pytest.param(t, marks=[pytest.mark.cell(t, c) for c in columns]) for t in TRAINERS],
    )


def by_hand(line, steps, clip=None, **options):
    """Steps halfstep without a trainer. steps: the micro-batches of each step."""
    net, args = network(torch.bfloat16), parse(line)
    opt = halfstep.AdamW(groups_of(net, args), lr=args.learning_rate, **OPTIONS, **options)
    scheduler = torch.optim.lr_scheduler.ConstantLR(opt, 0.5, 2)
    for parts in steps:
        for part in parts:
            (loss_of(net, part) / len(parts)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        opt.step()
        scheduler.step()
        opt.zero_grad()
    return net, opt


@trainers("plain")
@pytest.mark.told("weights='bf16-ecc8' has nothing to act on", trainer="sd-scripts")
def test_plain(trainer):
    net, opt, logs, _ = train(trainer, LINE)
    before = network(torch.bfloat16)
    assert all(not torch.equal(p, q) for p, q in zip(net.parameters(), before.parameters()))
    assert logs[-1]["lr"] == [5e-3, 1e-2] and opt.param_groups[0]["states"] == "int8"
    same((net, opt), by_hand(LINE, [[i] for i in range(6)], clip=1.0))


@trainers("resume")
@pytest.mark.told("weights='bf16-ecc8' has nothing to act on", trainer="sd-scripts")
def test_resume(trainer, tmp_path):
    whole = train(trainer, LINE, tmp_path, save=3)
    again = train(trainer, LINE, tmp_path, save=3, resume=True)
    same(whole[:2], again[:2])


@trainers("accumulate")
@pytest.mark.told("weights='bf16-ecc8' has nothing to act on", trainer="sd-scripts")
def test_accumulate(trainer):
    line = LINE + " --gradient_accumulation_steps=2 --max_grad_norm=0"
    found = train(trainer, line)
    assert found[1].param_groups[0]["group_steps"] == 3
    same(found[:2], by_hand(LINE, [[0, 1], [2, 3], [4, 5]]))


@trainers("clip")
@pytest.mark.told("weights='bf16-ecc8' has nothing to act on", trainer="sd-scripts")
def test_clip(trainer):
    found = train(trainer, LINE + ' "clip_norm=0.1" --max_grad_norm=0')
    same(found[:2], by_hand(LINE, [[i] for i in range(6)], clip_norm=0.1))
    assert found[1].grad_norm > 0.1


@trainers("release")
@pytest.mark.told("weights='bf16-ecc8' has nothing to act on", trainer="sd-scripts")
def test_release(trainer):
    line = LINE + ' "gradient_release=True" --max_grad_norm=0'
    same(train(trainer, line)[:2], by_hand(LINE, [[i] for i in range(6)]))
    with pytest.raises(RuntimeError, match="gradient_accumulation_steps"):
        train(trainer, line + " --gradient_accumulation_steps=2")


@trainers("EMA")
@pytest.mark.told("weights='bf16-ecc8' has nothing to act on", trainer="sd-scripts")
def test_ema(trainer, cell, tmp_path, monkeypatch):
    """There are no callbacks. ScheduleFree's averages are what is sampled and saved, and the
    weights that train come back, with their error codes."""
    monkeypatch.setitem(sys.modules, "schedulefree", types.ModuleType("schedulefree"))
    line = LINE.replace("AdamW", "ScheduleFree")
    net, opt, _, samples = train(trainer, line, tmp_path, save=3)
    assert all(bits(p) != bits(samples[-1][name]) for name, p in net.named_parameters())
    again = train(trainer, line, tmp_path, save=3, resume=True)
    same((net, opt), again[:2])
    opt.eval()
    assert all(bits(p) == bits(samples[-1][name]) for name, p in net.named_parameters())
    cell.says("The trainer has no callbacks; ScheduleFree samples and saves its average.")


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.told("weights='bf16-ecc8' has nothing to act on", trainer="sd-scripts")
def test_prodigy_logs_its_estimate(trainer):
    line = LINE.replace("AdamW", "Prodigy").replace("1e-2", "1").replace("5e-3", "1")
    logs = train(trainer, line)[2]
    assert all(d > 0 for d in logs[-1]["d*lr"])


@pytest.mark.told("weights='bf16-ecc8' has nothing to act on")
def test_a_second_name_keeps_the_weights_that_train():
    """sd-scripts calls eval() for names in ScheduleFree only."""
    line = LINE.replace("halfstep.AdamW", "halfstep.ScheduleFreeAdamW")
    net, _, _, samples = train("sd-scripts", line)
    assert all(bits(p) == bits(samples[-1][name]) for name, p in net.named_parameters())
