"""Lightning's command line makes halfstep's optimizers, from the line of docs/frameworks.md."""

import shlex
import sys

import pytest
import torch
from common import OPTIONS, bits, blocks, same, tiny

import halfstep

pytestmark = [pytest.mark.all, pytest.mark.filterwarnings("ignore")]

GIVEN = [f"--optimizer.{key}={value}" for key, value in OPTIONS.items()]


def module():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = tiny()

        def setup(self, stage):
            halfstep.name_parameters(self)

        def loss(self, step):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
            return (self.net(x) - 1).float().pow(2).mean()

        def training_step(self, batch, batch_idx):
            # Lightning begins an interrupted epoch's data anew, so that these follow the steps.
            parts = self.trainer.accumulate_grad_batches
            return self.loss(self.trainer.global_step * parts + batch_idx % parts)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(list(range(12)))

    return Module


def run(folder, *given, steps=6):
    """Runs `fit` with the documented line and further options. Returns the module and its
    optimizer."""
    from lightning.pytorch.cli import LightningCLI

    (line,) = blocks("Lightning CLI", "bash")
    line = shlex.split(line.replace("\\\n", " "))[3:]  # after "python train.py fit"
    about = {"max_steps": steps, "accelerator": "cpu", "logger": False, "default_root_dir": folder}
    about |= {"enable_progress_bar": False, "enable_model_summary": False}
    args = ["fit", *line, *GIVEN, *(f"--trainer.{k}={v}" for k, v in about.items()), *given]
    before, sys.argv = sys.argv, ["train.py"]
    try:
        cli = LightningCLI(module(), args=args, save_config_callback=None)
    finally:
        sys.argv = before
    return cli.model, cli.trainer.optimizers[0]


#: the line's own rate and clipping, undone or asked for by name
PLAIN = ("--optimizer.clip_norm=0", "--trainer.enable_checkpointing=false")


def by_hand(steps, parts=1, clip=None, **options):
    made = module()()
    options = {"lr": 1e-4, **OPTIONS, **options}
    opt = halfstep.AdamW(made.named_parameters(), **options)
    for step in range(steps):
        for part in range(parts):
            (made.loss(step * parts + part) / parts).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(made.parameters(), clip)
        opt.step()
        opt.zero_grad()
    return made, opt


@pytest.mark.cell("Lightning CLI", "plain")
@pytest.mark.cell("Lightning CLI", "clip")
def test_line(tmp_path):
    """The line as it stands clips inside the step."""
    found = run(tmp_path, "--trainer.enable_checkpointing=false")
    same(found, by_hand(6, clip_norm=1.0))
    assert all(bits(p) != bits(q) for p, q in zip(found[0].net.parameters(), tiny().parameters()))


@pytest.mark.cell("Lightning CLI", "clip")
def test_clipping_of_the_trainer(tmp_path):
    same(run(tmp_path, *PLAIN, "--trainer.gradient_clip_val=0.1"), by_hand(6, clip=0.1))


@pytest.mark.cell("Lightning CLI", "resume")
def test_resume(tmp_path):
    keep = "--trainer.callbacks=lightning.pytorch.callbacks.ModelCheckpoint"
    keep = [keep, "--trainer.callbacks.every_n_train_steps=3", "--trainer.callbacks.save_top_k=-1"]
    keep += [f"--trainer.callbacks.dirpath={tmp_path}", "--trainer.callbacks.filename={step}"]
    whole = run(tmp_path, *keep)
    again = run(
        tmp_path, "--trainer.enable_checkpointing=false", f"--ckpt_path={tmp_path}/step=3.ckpt"
    )
    same(whole, again)


@pytest.mark.cell("Lightning CLI", "accumulate")
def test_accumulate(tmp_path):
    found = run(tmp_path, *PLAIN, "--trainer.accumulate_grad_batches=2")
    assert found[1].param_groups[0]["group_steps"] == 6
    same(found, by_hand(6, parts=2))


@pytest.mark.cell("Lightning CLI", "release")
def test_release(tmp_path):
    release = [*PLAIN, "--optimizer.gradient_release=true"]
    same(run(tmp_path, *release), by_hand(6))
    with pytest.raises(RuntimeError, match="accumulate_grad_batches"):
        run(tmp_path, *release, "--trainer.accumulate_grad_batches=2")


@pytest.mark.cell("Lightning CLI", "EMA")
def test_ema(tmp_path):
    """The callback has averages of its own and leaves the training alone."""
    from halfstep.integrations.lightning import EMACallback

    callback = f"--trainer.callbacks={EMACallback.__module__}.EMACallback"
    found = run(tmp_path, *PLAIN, callback, "--trainer.callbacks.decay=0.9")
    same(found, by_hand(6))
    (callback,) = (c for c in found[0].trainer.callbacks if isinstance(c, EMACallback))
    weights = list(found[0].parameters())
    before = [bits(p) for p in weights]
    with callback.ema.swapped(found[0]):
        assert all(bits(p) != b for p, b in zip(weights, before))
    same(found, by_hand(6))


@pytest.mark.parametrize("cls", ["Muon", "ScheduleFree", "Adafactor", "CAME", "Prodigy"])
def test_other_classes_have_options_with_types(tmp_path, cls):
    _, opt = run(tmp_path, *PLAIN, f"--optimizer=halfstep.{cls}", "--optimizer.weight_decay=0.1")
    assert type(opt) is getattr(halfstep, cls) and opt.param_groups[0]["weight_decay"] == 0.1
