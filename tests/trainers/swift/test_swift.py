"""Trains by `swift sft` of ms-swift: its own arguments, pipeline and trainer, with a small model of
a local folder on the processor."""

import json
import os
import shlex
import subprocess
import sys

import pytest
import tokenizers
import torch
from common import OPTIONS, blocks, language_model, same

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")

import transformers  # noqa: E402
from swift.cli.main import parse_yaml_args  # noqa: E402
from swift.pipelines.train.sft import SwiftSft  # noqa: E402

import halfstep  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
GIVEN = ",".join(f"{name}={value}" for name, value in OPTIONS.items())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a model, a dataset and the plugin."""
    folder = tmp_path_factory.mktemp("swift")
    words = {
        word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *[f"w{i}" for i in range(61)]])
    }
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder / "model")
    language_model().save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(3)
    with open(folder / "data.jsonl", "w", encoding="utf-8") as file:
        for _ in range(48):
            said = [f"w{i}" for i in torch.randint(61, (12,), generator=generator).tolist()]
            messages = [
                {"role": "user", "content": " ".join(said[:6])},
                {"role": "assistant", "content": " ".join(said[6:])},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return folder


@pytest.fixture(autouse=True)
def here(files, monkeypatch):
    """Makes the plugin by the first line of the documentation's block, where it is read."""
    monkeypatch.chdir(files)
    subprocess.run(lines()[0], shell=True, check=True)


def lines():
    """Returns the lines of the shell in docs/frameworks.md: the plugin's and swift's."""
    (block,) = blocks("ms-swift", "bash")
    return block.replace("\\\n", "").splitlines()


class Kept(SwiftSft):
    """Keeps the trainer, its losses, and the gradients and rates of its steps."""

    watch = False

    def train(self, trainer):
        self.trainer, self.losses, self.steps = trainer, [], []
        make, step = trainer.create_optimizer, trainer.training_step

        def create_optimizer(model=None):
            made = make(model)
            if self.watch:
                made.register_step_pre_hook(self.look)
            return made

        def training_step(*args, **kwargs):
            loss = step(*args, **kwargs)
            self.losses.append(loss.item())
            return loss

        trainer.create_optimizer, trainer.training_step = create_optimizer, training_step
        return super().train(trainer)

    def look(self, optimizer, args, kwargs):
        gradients = {n: p.grad.clone() for n, p in self.trainer.model.named_parameters()}
        self.steps.append((gradients, [group["lr"] for group in optimizer.param_groups]))

    @property
    def optimizer(self):
        """The optimizer inside Accelerate's wrapper."""
        return getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)

    @property
    def pair(self):
        return self.trainer.model, self.optimizer


def sft(folder, *more, watch=False, optimizer="halfstep", optim_args=GIVEN, **options):
    """Trains by swift for six steps of four sentences and saves after three."""
    given = {
        "model": "model",
        "model_type": "llama",
        "template": "dummy",
        "dataset": "data.jsonl",
        "split_dataset_ratio": 0,
        "output_dir": folder,
        "add_version": False,
        "tuner_type": "full",
        "torch_dtype": "bfloat16",
        "max_steps": 6,
        "save_steps": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "check_model": False,
        "use_hf": True,
        "use_cpu": True,
        "dataloader_num_workers": 0,
    }
    if optimizer:
        given.update(external_plugins="plugin.py", optimizer=optimizer, optim_args=optim_args)
    given.update(options)
    argv = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    trained = Kept([*argv, *more])
    trained.watch = watch
    trained.main()
    return trained


def by_hand(trained, **options):
    """Steps halfstep.AdamW with the gradients and rates of a trainer's steps."""
    model = transformers.AutoModelForCausalLM.from_pretrained("model", dtype="auto")
    names = dict(model.named_parameters())
    groups = []
    for group in trained.optimizer.param_groups:
        params = [(name, names[name]) for name in group["param_names"]]
        groups.append({"params": params, "weight_decay": group["weight_decay"]})
    opt = halfstep.AdamW(groups, betas=(0.9, 0.95), **OPTIONS, **options)
    for gradients, rates in trained.steps:
        for group, lr in zip(opt.param_groups, rates):
            group["lr"] = lr
        for name, p in names.items():
            p.grad = gradients[name].clone()
        opt.step()
    return model, opt


def whole_and_resumed(folder, **options):
    """Trains a whole run, and one that goes on from the middle of it. Both end with the same
    bits."""
    whole = sft(folder / "whole", **options)
    resumed = sft(
        folder / "again", resume_from_checkpoint=folder / "whole" / "checkpoint-3", **options
    )
    assert len(whole.losses) == 2 * len(resumed.losses)
    same(whole.pair, resumed.pair)
    return whole


@pytest.mark.cell("ms-swift", "plain")
def test_line_of_the_documentation(tmp_path, capfd):
    argv = shlex.split(lines()[1])
    assert argv[:2] == ["swift", "sft"]
    trained = sft(tmp_path, *argv[2:], optimizer=None)
    assert isinstance(trained.optimizer, halfstep.AdamW)
    assert "adamw/bf16-ecc8/int8" in capfd.readouterr().out  # the plan
    before = dict(language_model().named_parameters())
    for name, p in trained.trainer.model.named_parameters():
        assert p.dtype == torch.bfloat16 and not torch.equal(p, before[name]), name


def test_yaml_of_the_documentation(tmp_path):
    (block,) = blocks("ms-swift", "yaml")
    (tmp_path / "config.yaml").write_text(block)
    argv = [str(tmp_path / "config.yaml")]
    parse_yaml_args(argv)
    trained = sft(tmp_path / "run", *argv, optimizer=None, max_steps=2)
    opt = trained.optimizer
    assert isinstance(opt, halfstep.AdamW) and opt.param_groups[0]["group_steps"] == 2
    assert opt.param_groups[0]["states"] == "int8" and opt.param_groups[0]["weights"] == "bf16-ecc8"


@pytest.mark.cell("ms-swift", "resume")
@pytest.mark.parametrize(
    "options, stored, groups",
    [
        ({"tuner_type": "full"}, torch.bfloat16, 2),
        ({"tuner_type": "lora", "lora_dtype": "bfloat16"}, torch.bfloat16, 1),
        ({"tuner_type": "lora"}, torch.float32, 1),
    ],
    ids=["full", "LoRA in BF16", "LoRA"],
)
def test_resume(tmp_path, options, stored, groups):
    """With LoRA every parameter decays, so swift drops the empty group."""
    whole = whole_and_resumed(tmp_path, **options)
    assert len(whole.optimizer.param_groups) == groups
    assert whole.optimizer.param_groups[0]["group_steps"] == 6
    trained = [p for p in whole.trainer.model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {stored}


@pytest.mark.cell("ms-swift", "accumulate")
def test_accumulation(tmp_path):
    parts = sft(tmp_path, gradient_accumulation_steps=2, watch=True, max_grad_norm=0)
    assert len(parts.losses) == 12 and len(parts.steps) == 6
    same(parts.pair, by_hand(parts))
    together = [
        sft(
            tmp_path,
            gradient_accumulation_steps=parts,
            per_device_train_batch_size=8 // parts,
            torch_dtype="float32",
            max_steps=1,
            watch=True,
        ).steps[0][0]
        for parts in (1, 2)
    ]
    for name, gradient in together[0].items():
        torch.testing.assert_close(together[1][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.cell("ms-swift", "clip")
def test_clipping_is_inside_the_step(tmp_path):
    trained = sft(tmp_path, max_grad_norm=0.25, watch=True)
    assert trained.optimizer.clip_norm == 0.25 and trained.trainer.args.max_grad_norm == 0
    for gradients, _ in trained.steps:
        assert sum(g.float().square().sum() for g in gradients.values()).sqrt() > 0.25
    same(trained.pair, by_hand(trained, clip_norm=0.25))


@pytest.mark.cell("ms-swift", "release")
def test_release(tmp_path):
    released = sft(tmp_path, optim_args=GIVEN + ",gradient_release=True", max_grad_norm=0)
    assert released.optimizer.gradient_release
    same(released.pair, sft(tmp_path, max_grad_norm=0).pair)


def test_release_under_accumulation_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="gradient_accumulation_steps"):
        sft(
            tmp_path,
            optim_args=GIVEN + ",gradient_release=True",
            gradient_accumulation_steps=2,
            max_grad_norm=0,
        )


@pytest.mark.cell("ms-swift", "EMA")
def test_averages(tmp_path):
    """Averages leave the weights that train and their error codes alone, with evaluation."""
    plain = sft(tmp_path)
    options = {"callbacks": "halfstep_ema", "optim_args": GIVEN + ",ema_decay=0.5"}
    evaluated = {"val_dataset": "data.jsonl", "eval_steps": 2, "eval_strategy": "steps"}
    averaged = sft(tmp_path, **options, **evaluated)
    same(plain.pair, averaged.pair)
    losses = [e["eval_loss"] for e in averaged.trainer.state.log_history if "eval_loss" in e]
    others = sft(tmp_path, **evaluated).trainer.state.log_history
    assert losses and losses != [e["eval_loss"] for e in others if "eval_loss" in e]


def test_losses_of_torch(tmp_path):
    options = {"torch_dtype": "float32", "max_steps": 50, "learning_rate": 1e-3}
    ours = sft(tmp_path, optim_args="weights=f32,states=f32", **options).losses
    theirs = sft(tmp_path, optimizer=None, optim="adamw_torch", **options).losses
    assert len(ours) == 50 and ours[-1] < ours[0] - 0.1
    assert max(abs(a - b) for a, b in zip(ours, theirs)) < 1e-5


def test_options():
    from halfstep.integrations.swift import options

    assert options(None) == options("") == {}
    assert options("lr=1e-4, betas=(0.9,0.99),states=int8,rule=Muon,adamw={'lr':3e-4}") == {
        "lr": "1e-4",
        "betas": "(0.9,0.99)",
        "states": "int8",
        "rule": "Muon",
        "adamw": "{'lr':3e-4}",
    }
    assert options('{"states": "int8", "seed": 5}') == {"states": "int8", "seed": 5}
    for text, words in (("int8", "'int8'.*name=value"), ('{"seed": 5', "JSON object")):
        with pytest.raises(ValueError, match=words):
            options(text)


def test_rates_of_parts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="vit_lr.*one learning rate"):
        sft(tmp_path, vit_lr=1e-3)


def test_nothing_is_shadowed(tmp_path):
    """The plugin's own file may be given too, because it lies alone in its folder."""
    from halfstep.integrations import swift

    trained = sft(tmp_path, external_plugins=swift.__file__, max_steps=1)
    assert isinstance(trained.optimizer, halfstep.AdamW)
    assert os.path.dirname(swift.__file__) in sys.path
    assert {name for name in os.listdir(os.path.dirname(swift.__file__)) if name[0] != "_"} == set()
