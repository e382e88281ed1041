"""Tests NeMo Automodel with its own recipe for fine-tuning, from the YAML to its checkpoints.

The recipe runs as it is, in one process on the CPU. Three functions of torch.cuda stand in for a
GPU's, because the recipe asks the current GPU for its number and its memory. A CPUOffloadPolicy
keeps the weights where they are made.
"""

import copy
import json
import os

import pytest
import torch
import yaml
from common import EXACT, OPTIONS, bits, blocks, goes_on, plain, same
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

import halfstep

pytestmark = pytest.mark.filterwarnings("ignore")

BASE = """
seed: 1
dist_env: {backend: gloo}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config
  torch_dtype: bfloat16
  attn_implementation: eager
  config:
    _target_: transformers.LlamaConfig
    vocab_size: 64
    hidden_size: 64
    intermediate_size: 128
    num_hidden_layers: 1
    num_attention_heads: 2
    num_key_value_heads: 2
    max_position_embeddings: 32
distributed:
  strategy: fsdp2
  offload_policy: {_target_: torch.distributed.fsdp.CPUOffloadPolicy, pin_memory: false}
loss_fn: {_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}
dataset:
  _target_: nemo_automodel.components.datasets.llm.mock.build_unpacked_dataset
  num_sentences: 48
  vocab_size: 64
  max_sentence_len: 16
dataloader: {collate_fn: nemo_automodel.components.datasets.utils.default_collater, shuffle: true}
lr_scheduler: {lr_decay_style: cosine, lr_warmup_steps: 2}
checkpoint: {model_save_format: safetensors, save_consolidated: false}
step_scheduler:
  local_batch_size: 4
  global_batch_size: 4
  max_steps: 6
  num_epochs: 10
  ckpt_every_steps: 3
"""


class Recipe(TrainFinetuneRecipeForNextTokenPrediction):
    """Keeps a copy of the weights before the first step and the gradients that each step gets."""

    def setup(self):
        super().setup()
        (self.model,), (self.opt,) = self.model_parts, self.optimizer
        self.start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.steps = []
        self.opt.register_step_pre_hook(self.note)

    def note(self, opt, *_):
        grads = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        group = opt.param_groups[0]
        self.steps.append((grads, group["lr"], group["weight_decay"]))


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Returns a function that trains with the YAML above. Its arguments replace whole sections or,
    as dictionaries, some of their entries."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def run(folder="run", **sections):
        config = yaml.safe_load(BASE)
        config["checkpoint"]["checkpoint_dir"] = str(tmp_path / folder)
        for name, entries in sections.items():
            config[name] = {**(config.get(name) or {}), **entries}
        recipe = Recipe(ConfigNode(config))
        recipe.setup()
        recipe.run_train_validation_loop()
        return recipe

    return run


def optimizer(**options):
    return {"_target_": "halfstep.AdamW", "lr": 1e-2, **OPTIONS, **options}


def losses(folder):
    with open(os.path.join(folder, "training.jsonl"), encoding="utf-8") as file:
        return [json.loads(line)["loss"] for line in file]


def by_hand(recipe, **options):
    """Steps halfstep's optimizer with the gradients of a run. Returns the weights."""
    weights = [torch.nn.Parameter(p.clone()) for p in recipe.start.values()]
    opt = halfstep.AdamW(weights, lr=1e-2, **OPTIONS, **options)
    for grads, lr, decay in recipe.steps:
        opt.param_groups[0].update(lr=lr, weight_decay=decay)
        for p, grad in zip(weights, grads):
            p.grad = grad.clone()
        opt.step()
    return [bits(p) for p in weights]


def weights_of(recipe):
    return [bits(p) for p in recipe.model.parameters()]


@pytest.mark.cell("NeMo Automodel", "plain")
def test_the_block_of_the_manual_trains(train):
    (block,) = blocks("NeMo Automodel", "yaml")
    recipe = train(**yaml.safe_load(block))
    assert isinstance(recipe.opt, halfstep.AdamW) and recipe.opt.param_groups[0]["group_steps"] == 6
    for name, p in recipe.model.named_parameters():
        assert p.dtype == torch.bfloat16 and not torch.equal(p, recipe.start[name]), name
    found = losses(recipe.checkpointer.config.checkpoint_dir)
    assert len(found) == 6 and found[-1] < found[0]


@pytest.mark.cell("NeMo Automodel", "resume")
def test_a_run_resumes_bit_for_bit(train, tmp_path):
    """The recipe saves weights in safetensors and states by torch.distributed.checkpoint."""
    whole = train(optimizer=optimizer())
    saved = {"restore_from": str(tmp_path / "run" / "epoch_0_step_2")}
    again = train("again", optimizer=optimizer(), checkpoint=saved)
    assert len(whole.steps) == 6 and len(again.steps) == 3
    same((whole.model, whole.opt), (again.model, again.opt))
    (last,) = (tmp_path / "run").glob("epoch_*_step_5")
    goes_on(whole.model, whole.opt, last)


@pytest.mark.cell("NeMo Automodel", "accumulate")
def test_accumulated_gradients_make_one_step(train):
    recipe = train(optimizer=optimizer(), step_scheduler={"global_batch_size": 8})
    assert recipe.opt.param_groups[0]["group_steps"] == 6
    assert weights_of(recipe) == by_hand(recipe)


@pytest.mark.cell("NeMo Automodel", "accumulate")
def test_accumulation_is_a_larger_batch(train, tmp_path):
    exact = {"optimizer": optimizer(**EXACT), "model": {"torch_dtype": "float32"}}
    for folder, local in (("parts", 4), ("whole", 8)):
        sizes = {"local_batch_size": local, "global_batch_size": 8, "max_steps": 20}
        train(folder, step_scheduler={**sizes, "ckpt_every_steps": 1000}, **exact)
    for one, other in zip(losses(tmp_path / "parts"), losses(tmp_path / "whole")):
        assert abs(one - other) < 1e-4


@pytest.mark.cell("NeMo Automodel", "clip")
def test_the_recipe_clips(train):
    recipe = train(optimizer=optimizer(), clip_grad_norm={"max_norm": 0.1})
    for grads, *_ in recipe.steps:
        assert torch.cat([grad.float().flatten() for grad in grads]).norm() < 0.101
    assert weights_of(recipe) == by_hand(recipe)


@pytest.mark.cell("NeMo Automodel", "clip")
def test_the_optimizer_clips_if_the_recipe_does_not(train):
    recipe = train(optimizer=optimizer(clip_norm=0.1), clip_grad_norm={"max_norm": float("inf")})
    assert recipe.opt.grad_norm > 0.1
    assert weights_of(recipe) == by_hand(recipe, clip_norm=0.1) != by_hand(recipe)


@pytest.mark.cell("NeMo Automodel", "release")
def test_gradients_are_released(train):
    """The recipe's clipping finds no gradients then, so it is compared with one that does not
    clip."""
    whole = train("whole", optimizer=optimizer(), clip_grad_norm={"max_norm": float("inf")})
    recipe = train(optimizer=optimizer(gradient_release=True))
    assert all(grad is None for grads, *_ in recipe.steps for grad in grads)
    same((whole.model, whole.opt), (recipe.model, recipe.opt))


def test_release_is_refused_under_accumulation(train):
    with pytest.raises(RuntimeError, match="gradient_release=False"):
        train(optimizer=optimizer(gradient_release=True), step_scheduler={"global_batch_size": 8})


@pytest.mark.cell("NeMo Automodel", "EMA")
def test_an_average_follows_the_optimizer(train, monkeypatch):
    """It goes on when NeMo shards the weights, which it does as soon as there are two ranks."""

    def setup(recipe):
        own(recipe)
        recipe.ema = halfstep.EMA(recipe.model, 0.5, "bf16-kahan")
        recipe.opt.register_step_post_hook(
            lambda opt, *_: recipe.ema.update_parameters(recipe.model, opt)
        )

    own = Recipe.setup
    monkeypatch.setattr(Recipe, "setup", setup)
    recipe = train(optimizer=optimizer())
    assert int(recipe.ema.n_averaged) == 6
    twin = copy.deepcopy(recipe.model)
    twin.load_state_dict(recipe.start, strict=False)
    by_hand, opt = (
        halfstep.EMA(twin, 0.5, "bf16-kahan"),
        halfstep.AdamW(twin.parameters(), **OPTIONS),
    )
    for grads, lr, decay in recipe.steps:
        opt.param_groups[0].update(lr=lr, weight_decay=decay)
        for p, grad in zip(twin.parameters(), grads):
            p.grad = grad.clone()
        opt.step()
        by_hand.update_parameters(twin, opt)
    assert plain(recipe.ema.state_dict()) == plain(by_hand.state_dict())
    torch.distributed.fsdp.fully_shard(recipe.model, mesh=recipe.device_mesh["dp_shard"])
    sharded = halfstep.EMA(recipe.model, 0.5, "bf16-kahan")
    sharded.load_state_dict(recipe.ema.state_dict())
    sharded.update_parameters(recipe.model)
    by_hand.update_parameters(twin)
    for p, q in zip(sharded.module.parameters(), by_hand.module.parameters()):
        assert bits(p.to_local()) == bits(q)


def test_losses_are_those_of_torch(train, tmp_path):
    steps = {"max_steps": 50, "ckpt_every_steps": 1000}
    for folder, given in (
        ("torch", {"_target_": "torch.optim.AdamW", "lr": 1e-3}),
        ("halfstep", {"_target_": "halfstep.AdamW", "lr": 1e-3, **EXACT}),
    ):
        train(folder, optimizer=given, step_scheduler=steps, model={"torch_dtype": "float32"})
    pairs = list(zip(losses(tmp_path / "torch"), losses(tmp_path / "halfstep")))
    assert len(pairs) == 50 and max(abs(one - other) for one, other in pairs) < 1e-5
