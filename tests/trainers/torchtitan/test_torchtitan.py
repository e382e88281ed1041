"""Trains, saves and resumes with torchtitan's own trainer, on the processor.

Its model is a Llama of one layer under fully_shard(), so that parameters are DTensors. Two modules
are replaced before torchtitan is imported: the kernels of its expert parallelism, which need
Triton and a GPU, and torch's answer to which accelerator there is.
"""

import gc
import sys
import types
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from common import EXACT, OPTIONS, bits, blocks, goes_on, plain
from torch.distributed.tensor import DTensor

import halfstep


class Kernels(types.ModuleType):
    """Has every name, and nothing behind it."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
sys.modules[KERNELS] = Kernels(KERNELS)
torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import (  # noqa: E402
    LRSchedulersContainer,
    ParamGroupConfig,
    default_adamw,
)
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from halfstep.integrations.torchtitan import OptimizersContainer  # noqa: E402

WORDS, LENGTH = 64, 16


class NoMonitor:
    """Stands for torchtitan's monitor of a GPU's memory, and has none."""

    device_name = "cpu"

    def reset_peak_stats(self):
        pass

    def get_peak_stats(self):
        return metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))


class Words(torch.utils.data.IterableDataset):
    """Random words, the same in each run. Goes on where a checkpoint was made."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while True:
            ids = torch.randint(
                WORDS, (LENGTH + 1,), generator=torch.Generator().manual_seed(self.at)
            )
            self.at += 1
            yield {"input": ids[:-1]}, ids[1:]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, **rest):
        super().__init__(Words(), dp_rank, dp_world_size, batch_size=local_batch_size)


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **rest):
        super().__init__()

    encode = decode = get_vocab_size = None


def model_spec():
    """Returns torchtitan's model for debugging with one layer and few words."""
    spec = llama3.model_registry("debugmodel")
    model = spec.model
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = WORDS
    model.layers = model.layers[:1]
    model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def job(folder, optimizer, steps=6, dtype="bfloat16", batch=4, **training):
    return Trainer.Config(
        model_spec=model_spec(),
        loss=CrossEntropyLoss.Config(),
        dump_folder=str(folder),
        tokenizer=NoTokenizer.Config(),
        dataloader=Loader.Config(),
        optimizer=optimizer,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=max(steps, 6)),
        training=TrainingConfig(
            **{
                "dtype": dtype,
                "mixed_precision_param": dtype,
                "local_batch_size": batch,
                "seq_len": LENGTH,
                "steps": steps,
                "disable_cuda_graphs": True,
                **training,
            }
        ),
        checkpoint=CheckpointManager.Config(enable=True, interval=3, last_save_model_only=False),
        activation_checkpoint=None,
    )


def ours(**options):
    return OptimizersContainer.Config(options={"lr": 1e-2, **OPTIONS, **options})


@pytest.fixture(autouse=True)
def one_rank(tmp_path, monkeypatch):
    """torchtitan expects the variables of torchrun, and stops the garbage collector."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(metrics, "build_device_memory_monitor", NoMonitor)
    monkeypatch.setattr("torchtitan.distributed.utils.set_pg_timeouts", lambda **rest: None)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    gc.enable()


def train(config, watch=None):
    """Runs a job. Returns its trainer, and the loss of each step."""
    torch.manual_seed(3)
    trainer = config.build()
    losses = []
    trainer.metrics_processor.should_log = lambda step: True
    trainer.metrics_processor.log = lambda step, loss, *rest, **more: losses.append(loss)
    if watch is not None:
        watch(trainer)
    trainer.train()
    trainer.close()
    return trainer, losses


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def everything(trainer):
    """Returns the bits of all weights and of all that the optimizers save."""
    saved = {**trainer.model_parts[0].state_dict(), **trainer.optimizers.state_dict()}
    assert any(name.startswith("state.") for name in saved)
    return plain({name: local(value) for name, value in saved.items()})


def weights(model):
    return {name: bits(local(p)) for name, p in model.named_parameters()}


class ByHand:
    """Steps a copy of the model's weights with the gradients that the trainer's optimizer gets."""

    def __init__(self, **options):
        self.options = options
        self.norms = []

    def __call__(self, trainer):
        (self.model,), container = trainer.model_parts, trainer.optimizers
        self.copies = {
            name: torch.nn.Parameter(local(p).detach().clone())
            for name, p in self.model.named_parameters()
        }
        self.opt = halfstep.AdamW(self.copies.items(), **self.options)
        container.register_step_pre_hook(self.step)

    def step(self, container, *rest):
        (theirs,) = container
        for name, p in self.model.named_parameters():
            self.copies[name].grad = local(p.grad).clone()
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.copies.values()]))
        self.opt.param_groups[0]["lr"] = theirs.param_groups[0]["lr"]
        self.opt.step()

    def check(self, steps):
        assert len(self.norms) == steps
        assert weights(self.model) == {name: bits(p) for name, p in self.copies.items()}


@pytest.mark.cell("torchtitan", "plain")
def test_the_lines_of_the_page_train(tmp_path):
    (code,) = blocks("torchtitan", "python")
    config = job(tmp_path, None)
    exec(compile(code, "docs/frameworks.md", "exec"), {"config": config})
    before = {}
    trainer, _ = train(config, lambda made: before.update(weights(made.model_parts[0])))
    (opt,) = trainer.optimizers
    assert isinstance(opt, halfstep.AdamW) and opt.param_groups[0]["group_steps"] == 6
    assert all(there != before[name] for name, there in weights(trainer.model_parts[0]).items())
    assert {p.dtype for p in trainer.model_parts[0].parameters()} == {torch.bfloat16}


@pytest.mark.cell("torchtitan", "plain")
def test_losses_are_those_of_torch(tmp_path):
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    theirs = default_adamw(**options)
    theirs.implementation = "for-loop"
    both = [
        train(job(tmp_path / name, config, 50, "float32"))[1]
        for name, config in (
            ("theirs", theirs),
            ("ours", OptimizersContainer.Config(options={**options, **EXACT})),
        )
    ]
    assert len(both[0]) == 50 and both[0] == pytest.approx(both[1], abs=1e-5)


MIXED = {
    "param_groups": [
        ParamGroupConfig(
            pattern="norm", optimizer_name="adamw/bf16-sr/f32", optimizer_kwargs={"lr": 1e-3}
        ),
        ParamGroupConfig(pattern="layers", optimizer_name="Muon"),
        ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 3e-3}),
    ]
}


@pytest.mark.cell("torchtitan", "resume")
@pytest.mark.parametrize("groups", [{}, MIXED], ids=["AdamW", "mixed"])
def test_a_resumed_job_has_the_bits_of_a_whole_one(tmp_path, groups):
    def config(folder, steps):
        options = {"lr": 1e-2, **OPTIONS}
        return job(tmp_path / folder, OptimizersContainer.Config(options=options, **groups), steps)

    whole, losses = train(config("whole", 6))
    first, _ = train(config("parts", 3))
    if not groups:
        (model,), (opt,) = first.model_parts, first.optimizers.optimizers
        goes_on(model, opt, tmp_path / "parts" / "checkpoint" / "step-3")
    resumed, again = train(config("parts", 6))
    assert len(again) == 3 and again == losses[3:]
    assert everything(resumed) == everything(whole)
    assert [opt.rule for opt in whole.optimizers] == (
        ["adamw", "muon", "adamw"] if groups else ["adamw"]
    )


def test_a_checkpoint_before_the_first_step_changes_nothing(tmp_path):
    once, _ = train(job(tmp_path / "once", ours(), steps=3))
    asked, _ = train(
        job(tmp_path / "asked", ours(), steps=3), lambda t: t.checkpointer.save(0, True)
    )
    assert everything(once) == everything(asked)


@pytest.mark.cell("torchtitan", "accumulate")
def test_accumulation_is_a_larger_batch(tmp_path):
    hand = ByHand(lr=1e-2, **OPTIONS)
    train(job(tmp_path / "hand", ours(), batch=2, global_batch_size=8), hand)
    hand.check(6)
    both = [
        train(job(tmp_path / str(batch), ours(**EXACT), 6, "float32", batch, global_batch_size=8))[
            1
        ]
        for batch in (2, 8)
    ]
    assert both[0] == pytest.approx(both[1], abs=1e-5)


@pytest.mark.cell("torchtitan", "clip")
def test_one_of_the_two_clips(tmp_path):
    trainers = ByHand(lr=1e-2, **OPTIONS)
    train(job(tmp_path / "trainer", ours(), max_norm=0.125), trainers)
    trainers.check(6)
    assert max(trainers.norms) < 0.13

    inside = ByHand(lr=1e-2, clip_norm=0.125, **OPTIONS)
    train(job(tmp_path / "inside", ours(clip_norm=0.125), max_norm=float("inf")), inside)
    inside.check(6)
    assert min(inside.norms) > 0.25


def test_several_optimizers_are_clipped_by_the_trainer_alone(tmp_path):
    config = OptimizersContainer.Config(options={"lr": 1e-2, "clip_norm": 1.0}, **MIXED)
    with pytest.raises(ValueError, match="3 optimizers.*training.max_norm"):
        job(tmp_path, config).build()


@pytest.mark.cell("torchtitan", "release")
def test_gradient_release(tmp_path):
    infinite = float("inf")
    runs = [
        train(job(tmp_path / str(i), ours(gradient_release=bool(i)), max_norm=infinite))[0]
        for i in range(2)
    ]
    assert everything(runs[0]) == everything(runs[1])
    clips = ours(gradient_release=True, clip_norm=0.125, clip="delayed")
    clipped, _ = train(job(tmp_path / "clipped", clips))
    assert weights(clipped.model_parts[0]) != weights(runs[0].model_parts[0])
    with pytest.raises(RuntimeError, match="gradient_release"):
        train(job(tmp_path / "both", ours(gradient_release=True), batch=2, global_batch_size=8))


@pytest.mark.cell("torchtitan", "EMA")
def test_averages(tmp_path):
    """The averages are those of a loop, are resumed, and leave the weights that train alone."""
    averages = {"decay": 0.5, "weights": "bf16-kahan"}

    def config(folder, steps=6):
        options = {"lr": 1e-2, **OPTIONS}
        return job(
            tmp_path / folder, OptimizersContainer.Config(options=options, ema=averages), steps
        )

    def held(ema):
        return plain({name: local(value) for name, value in ema.state_dict().items()})

    def watch(trainer):
        (model,), container = trainer.model_parts, trainer.optimizers
        hand.append(halfstep.EMA(model, **averages))
        container.register_step_post_hook(
            lambda *_: hand[0].update_parameters(model, list(container))
        )

    hand = []
    whole, losses = train(config("whole"), watch)
    (ema,) = whole.optimizers.averages
    assert int(ema.n_averaged) == 6 and held(ema) == held(hand[0])
    without, _ = train(job(tmp_path / "without", ours(), 6))
    assert weights(whole.model_parts[0]) == weights(without.model_parts[0])
    train(config("parts", 3))
    resumed, again = train(config("parts"))
    assert again == losses[3:] and held(resumed.optimizers.averages[0]) == held(ema)
    with ema.swapped(whole.model_parts[0]) as model:
        own = weights(model)
        assert own == weights(ema.module) != weights(without.model_parts[0])


def test_what_is_refused():
    model = torch.nn.Linear(8, 8)
    with pytest.raises(ValueError, match="Adamm"):
        OptimizersContainer.Config(
            param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="Adamm")]
        ).build(model_parts=[model])
    with pytest.raises(ValueError, match="'states': 'bf16-sr'"):
        OptimizersContainer.Config(implementation="fused_opt_states_bf16").build(
            model_parts=[model]
        )
