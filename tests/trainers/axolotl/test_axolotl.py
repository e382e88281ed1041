"""Tests the plugin for axolotl with axolotl's own loaders, plugin manager and trainer, on the CPU.

wandb is an empty module here. axolotl imports it and its many requirements, and these tests log
nothing there.
"""

import importlib.machinery
import json
import os
import sys
import types

os.environ.update(AXOLOTL_DO_NOT_TRACK="1", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
sys.modules["wandb"] = types.ModuleType("wandb")
sys.modules["wandb"].__spec__ = importlib.machinery.ModuleSpec("wandb", None)

import pytest  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import yaml  # noqa: E402
from axolotl.cli.config import load_cfg  # noqa: E402
from axolotl.common.datasets import load_datasets  # noqa: E402
from axolotl.integrations.base import BasePlugin, PluginManager  # noqa: E402
from axolotl.train import setup_model_and_trainer, train  # noqa: E402
from common import EXACT, OPTIONS, bits, blocks, language_model, same  # noqa: E402

import halfstep  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
#: parts of the names of parameters that axolotl stores as FP32
WIDE = ("embed_tokens", "lm_head", "norm")
PLUGIN = "halfstep.integrations.axolotl.Plugin"


class OnCPU(BasePlugin):
    """Sets the argument of transformers for which axolotl has no key."""

    def get_training_args(self, cfg):
        return {"use_cpu": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Makes a folder with a model, its tokenizer and 48 sentences."""
    folder = tmp_path_factory.mktemp("files")
    names = ["<pad>", "<eos>", "<unk>", *[f"w{i}" for i in range(61)]]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder / "base")
    language_model().save_pretrained(folder / "base")
    words = torch.randint(61, (48, 12), generator=torch.Generator().manual_seed(3)).tolist()
    with open(folder / "data.jsonl", "w", encoding="utf-8") as file:
        for sentence in words:
            file.write(json.dumps({"text": " ".join(f"w{i}" for i in sentence)}) + "\n")
    return folder


def loaded(files, folder, options, **more):
    """Writes a configuration, and returns what axolotl makes of it and of its data."""
    keys = {
        "base_model": str(files / "base"),
        "datasets": [{"path": str(files / "data.jsonl"), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(files / "prepared"),
        "dataset_num_proc": 1,
        "output_dir": str(folder),
        "sequence_len": 32,
        "pad_to_sequence_len": False,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": 6,
        "num_epochs": 1,
        "save_steps": 3,
        "val_set_size": 0,
        "logging_steps": 1,
        "warmup_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler": "linear",
        "optimizer": "adamw_torch",
        "attn_implementation": "eager",
        "bf16": True,
        "seed": 1,
        "plugins": [PLUGIN, f"{__name__}.OnCPU"],
        "halfstep": options,
        **more,
    }
    if options is None:
        del keys["halfstep"]
        keys["plugins"] = keys["plugins"][1:]
    PluginManager.get_instance().plugins.clear()
    path = folder.with_suffix(".yml")
    path.write_text(yaml.safe_dump(keys), encoding="utf-8")
    cfg = load_cfg(str(path))
    return cfg, load_datasets(cfg=cfg)


def trained(files, folder, options, **more):
    """Trains, and returns the trainer and its optimizer of halfstep."""
    cfg, data = loaded(files, folder, options, **more)
    trainer = train(cfg=cfg, dataset_meta=data)[2]
    return trainer, trainer.optimizer.optimizer


def losses(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.cell("axolotl", "plain")
def test_the_block_of_the_page_trains(files, tmp_path, capfd):
    (block,) = blocks("axolotl", "yaml")
    told = yaml.safe_load(block)
    assert told["plugins"] == [PLUGIN]
    trainer, opt = trained(files, tmp_path / "run", told["halfstep"], save_steps=100)
    assert isinstance(opt, halfstep.AdamW) and opt.param_groups[0]["group_steps"] == 6
    assert capfd.readouterr().out.count("halfstep: ") == 1
    for name, p in trainer.model.named_parameters():
        wide = any(part in name for part in WIDE)
        assert p.dtype == (torch.float32 if wide else torch.bfloat16), name
    before = language_model()
    assert any(
        bits(p) != bits(before.get_parameter(name)) for name, p in trainer.model.named_parameters()
    )


@pytest.mark.cell("axolotl", "resume")
def test_resume(files, tmp_path):
    whole, opt = trained(files, tmp_path / "run", OPTIONS)
    resume = str(tmp_path / "run" / "checkpoint-3")
    again, other = trained(files, tmp_path / "again", OPTIONS, resume_from_checkpoint=resume)
    assert other.param_groups[0]["group_steps"] == 6
    same((whole.model, opt), (again.model, other))


def micro_steps(files, folder, monkeypatch, options, **more):
    """Trains, and returns the trainer, and for each step the gradients of its micro-steps."""
    steps, seen = [], halfstep.AdamW.step

    def step(self, *args, **kwargs):
        steps.append([p.grad.clone() for g in self.param_groups for p in g["params"]])
        return seen(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(halfstep.AdamW, "step", step)
        trainer, opt = trained(files, folder, options, **more)
    return trainer, opt, steps


@pytest.mark.cell("axolotl", "accumulate")
@pytest.mark.cell("axolotl", "clip")
def test_accumulated_and_clipped(files, tmp_path, monkeypatch):
    """Steps by hand, with the gradients that axolotl accumulated, have the same bits. Clipping is
    the step's: the trainer's own is off, and gradients arrive longer than the limit."""
    trainer, opt, steps = micro_steps(
        files,
        tmp_path / "run",
        monkeypatch,
        OPTIONS,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        save_steps=100,
    )
    assert len(steps) == 6 and trainer.args.max_grad_norm == 0
    assert opt.clip_norm == 0.5
    norms = [float(torch.cat([g.float().flatten() for g in step]).norm()) for step in steps]
    assert min(norms) > 0.5
    model = language_model()
    for name, module in model.named_modules():
        if name.endswith(WIDE):
            module.float()
    groups = [
        {"params": [(name, model.get_parameter(name)) for name in group["param_names"]]}
        | {"weight_decay": group["weight_decay"]}
        for group in opt.param_groups
    ]
    hand = halfstep.AdamW(groups, lr=1e-2, eps=opt.defaults["eps"], clip_norm=0.5, **OPTIONS)
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    for rate, gradients in zip(rates, steps):
        params = [p for group in hand.param_groups for p in group["params"]]
        for p, gradient in zip(params, gradients):
            p.grad = gradient
        for group in hand.param_groups:
            group["lr"] = rate
        hand.step()
    same((trainer.model, opt), (model, hand))


@pytest.mark.cell("axolotl", "accumulate")
def test_release_under_accumulation_is_refused(files, tmp_path):
    with pytest.raises(RuntimeError, match="gradient_accumulation_steps"):
        trained(
            files,
            tmp_path / "run",
            {**OPTIONS, "gradient_release": True},
            gradient_accumulation_steps=2,
        )


@pytest.mark.cell("axolotl", "release")
def test_release(files, tmp_path):
    """Steps within the backward pass have the bits of steps after it."""
    more = {"max_grad_norm": 0.0, "save_steps": 100}
    trainer, opt = trained(files, tmp_path / "run", OPTIONS, **more)
    other, released = trained(
        files, tmp_path / "released", {**OPTIONS, "gradient_release": True}, **more
    )
    assert released.gradient_release
    same((trainer.model, opt), (other.model, released))


@pytest.mark.cell("axolotl", "EMA")
def test_averages(files, tmp_path):
    """Evaluation uses the averages, and the weights that train have the bits of a run without
    them."""
    told = {"val_set_size": 8, "eval_steps": 3, "load_best_model_at_end": False}
    trainer, opt = trained(files, tmp_path / "run", OPTIONS, **told)
    averaged, other = trained(files, tmp_path / "ema", {**OPTIONS, "ema": {"decay": 0.5}}, **told)
    same((trainer.model, opt), (averaged.model, other))
    rates = [
        [line["eval_loss"] for line in t.state.log_history if "eval_loss" in line]
        for t in (trainer, averaged)
    ]
    assert rates[0] and rates[0] != rates[1]


@pytest.mark.cell("axolotl", "plain")
def test_losses_are_those_of_torch(files, tmp_path):
    more = {"bf16": False, "max_steps": 50, "num_epochs": 5, "save_steps": 100}
    more["learning_rate"] = 1e-3
    torchs = trained(files, tmp_path / "torch", None, **more)[0]
    ours, opt = trained(files, tmp_path / "ours", EXACT, **more)
    assert isinstance(opt, halfstep.AdamW) and len(losses(ours)) == 50
    assert losses(ours) == pytest.approx(losses(torchs), abs=1e-5)


def test_rates_that_have_no_effect_are_refused(files, tmp_path):
    cfg, data = loaded(files, tmp_path / "run", OPTIONS, embedding_lr=1e-4)
    with pytest.raises(ValueError, match="embedding_lr has no effect"):
        setup_model_and_trainer(cfg, data)


def test_strings_that_are_numbers_or_booleans(files, tmp_path):
    told = {"eps": "1e-9", "states": "int8", "betas": [0.9, "5e-1"], "gradient_release": "false"}
    cfg, _ = loaded(files, tmp_path / "run", told)
    assert cfg.halfstep["eps"] == 1e-9 and cfg.halfstep["betas"] == [0.9, 0.5]
    assert cfg.halfstep["states"] == "int8" and cfg.halfstep["gradient_release"] is False
