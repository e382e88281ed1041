"""Tests trainers that people use, around small models and without a network.

A run that was saved and resumed ends with the bits of an uninterrupted one, weights and states
both. That also holds where states are in the process's memory beside weights on a GPU (the one of
fake_gpu.py). What trainers report about skipped steps can be read. Gradient release under their
accumulation raises an exception. If a trainer is not installed, its tests fail: they are not
skipped.
"""

import copy
import importlib
import os

import pytest
import torch
from common import OPTIONS, Words, language_model, same, tiny
from conftest import bits, randn, saved, states, warnings_are, weights_of
from test_cuda import fake, gpu  # noqa: F401
from torch import nn

import halfstep
from halfstep._tensors import devices

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("WANDB_DISABLED", "true")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.all
def test_all_trainers_are_there():
    for name in ("transformers", "accelerate", "lightning", "trl", "peft"):
        assert importlib.import_module(name).__version__


def batch(step, dtype=torch.bfloat16):
    return randn((8, 32), step).to(dtype)


def loss_of(model, step):
    return (model(batch(step, next(model.parameters()).dtype)) - 1).float().pow(2).mean()


def train(model, opt, steps):
    for step in steps:
        loss_of(model, step).backward()
        opt.step()
        opt.zero_grad()


def make(model, lr=1e-2, hosted=None, **options):
    """Makes an optimizer of a model. hosted: a class whose states are in the process's memory, and
    its options."""
    options = {"lr": lr, **OPTIONS, **options}
    if hosted is None:
        return halfstep.AdamW(model.named_parameters(), **options)
    return getattr(halfstep, hosted[0])(
        model.named_parameters(), halfstep.AdamW, **hosted[1], **options
    )


# ---- transformers, TRL and PEFT ------------------------------------------------------------------


def arguments(folder, cls=None, **options):
    import transformers

    given = dict(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_steps=3,
        save_strategy="steps",
        report_to=[],
        use_cpu=True,
        logging_steps=1,
        disable_tqdm=True,
        seed=1,
        warmup_steps=2,
    )
    given.update(options)
    return (cls or transformers.TrainingArguments)(**given)


def hf_trainer(folder, how, **options):
    import transformers

    model, given = language_model(), {}
    if how == "optimizers":
        given["optimizers"] = (make(model), None)
    else:
        given["optimizer_cls_and_kwargs"] = (halfstep.AdamW, {"lr": 1e-2, **OPTIONS})
    return transformers.Trainer(
        model=model, args=arguments(folder, **options), train_dataset=Words(), **given
    )


def plain_optimizer(trainer):
    """Returns the optimizer inside Accelerate's wrapper."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def whole_and_resumed(folder, make_trainer):
    """Trains a whole run, and one that goes on from the middle of it. Both must end with the same
    bits. Returns the model and the optimizer."""
    runs = []
    for name, resume in (("run", None), ("again", str(folder / "run" / "checkpoint-3"))):
        trainer = make_trainer(folder / name)
        trainer.train(resume_from_checkpoint=resume)
        runs.append((trainer.model, plain_optimizer(trainer)))
    same(*runs)
    return runs[0]


@pytest.mark.cell("transformers", "plain")
@pytest.mark.cell("transformers", "resume")
@pytest.mark.parametrize("how", ["optimizers", "optimizer_cls_and_kwargs"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_transformers(tmp_path, how, accumulation):
    _, opt = whole_and_resumed(
        tmp_path,
        lambda folder: hf_trainer(folder, how, gradient_accumulation_steps=accumulation),
    )
    assert isinstance(opt, halfstep.AdamW) and opt.param_groups[0]["group_steps"] == 6


def test_transformers_refuses_release_under_accumulation(tmp_path):
    import transformers

    model = language_model()
    trainer = transformers.Trainer(
        model=model,
        args=arguments(tmp_path, gradient_accumulation_steps=2),
        train_dataset=Words(),
        optimizers=(make(model, gradient_release=True), None),
    )
    with pytest.raises(RuntimeError, match="gradient_accumulation_steps"):
        trainer.train()


def test_transformers_tells_skipped_steps(tmp_path):
    """The count passes through the wrapper too: it is in every group."""
    import transformers

    model = language_model()

    class Spoil(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kw):
            if state.global_step in (1, 3):
                next(p for p in model.parameters() if p.grad is not None).grad.view(-1)[0] = float(
                    "nan"
                )

    trainer = transformers.Trainer(
        model=model,
        args=arguments(tmp_path, max_grad_norm=0.0, save_strategy="no"),
        train_dataset=Words(),
        optimizers=(make(model, clip_norm=1.0), None),
        callbacks=[Spoil()],
    )
    with warnings_are("always") as said:
        trainer.train()
    assert any("is not finite" in str(w.message) for w in said)
    assert type(trainer.optimizer).__name__ == "AcceleratedOptimizer"
    assert trainer.optimizer.param_groups[0]["skipped_steps"] == 2
    assert trainer.optimizer.optimizer.skipped_steps == 2


def peft_model():
    import peft

    model = language_model()
    torch.manual_seed(1)
    found = peft.get_peft_model(
        model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    )
    return found


@pytest.mark.all
@pytest.mark.cell("PEFT", "plain")
@pytest.mark.cell("PEFT", "resume")
@pytest.mark.told("weights='bf16-ecc8' has nothing to act on")
def test_peft(tmp_path):
    """Only adapters are trained; the frozen rest has no states. The trainer makes the optimizer,
    because its resuming replaces the adapters' parameters. An optimizer made earlier, torch's too,
    would step the old ones."""
    import transformers

    model, opt = whole_and_resumed(
        tmp_path,
        lambda folder: transformers.Trainer(
            model=peft_model(),
            args=arguments(folder),
            train_dataset=Words(),
            optimizer_cls_and_kwargs=(halfstep.AdamW, {"lr": 1e-2, **OPTIONS}),
        ),
    )
    assert 0 < len(opt.state) < len(list(model.parameters()))


def tokenizer(folder):
    """Makes a tokenizer of a few words, from a file that is made here."""
    import tokenizers
    import transformers

    words = {
        word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *[f"w{i}" for i in range(61)]])
    }
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.mark.all
@pytest.mark.cell("TRL", "plain")
@pytest.mark.cell("TRL", "resume")
def test_trl(tmp_path):
    import datasets
    import trl

    generator = torch.Generator().manual_seed(3)
    texts = [
        " ".join(f"w{int(i)}" for i in torch.randint(61, (12,), generator=generator))
        for _ in range(48)
    ]
    options = {"max_length": 16, "bf16": False, "gradient_checkpointing": False}

    def make_trainer(folder):
        model = language_model()
        return trl.SFTTrainer(
            model=model,
            args=arguments(folder, trl.SFTConfig, **options),
            train_dataset=datasets.Dataset.from_dict({"text": texts}),
            processing_class=tokenizer(tmp_path),
            optimizers=(make(model), None),
        )

    whole_and_resumed(tmp_path, make_trainer)


# ---- Accelerate ----------------------------------------------------------------------------------


@pytest.mark.all
@pytest.mark.cell("Accelerate", "plain")
@pytest.mark.cell("Accelerate", "resume")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_accelerate(tmp_path, accumulation):
    import accelerate

    runs = []
    for first, last in ((0, 8), (4, 8)):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        model = tiny()
        opt = make(model)
        scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 8)
        model, wrapped, scheduler = accelerator.prepare(model, opt, scheduler)
        if first:
            accelerator.load_state(str(tmp_path / "state"))
        for step in range(first, last):
            if step == 4 and not first:
                accelerator.save_state(str(tmp_path / "state"))
            with accelerator.accumulate(model):
                loss = loss_of(model, step)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                wrapped.step()
                scheduler.step()
                wrapped.zero_grad()
        runs.append((accelerator.unwrap_model(model), opt))
    assert opt.param_groups[0]["group_steps"] == 8 // accumulation
    same(*runs)


# ---- Lightning -----------------------------------------------------------------------------------


def lightning_module(automatic, gpu=None, start=0, **options):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = automatic
            self.model = tiny(start) if gpu is None else gpu.model(tiny(start))

        def training_step(self, data, batch_idx):
            # Lightning begins an interrupted epoch's data anew, so that these follow the steps
            # instead.
            x = batch(self.trainer.global_step) * (1 + batch_idx % 2)
            loss = (self.model(x) - 1).float().pow(2).mean()
            if not automatic:
                opt = self.optimizers()
                opt.zero_grad()
                self.manual_backward(loss)
                opt.step()
            return loss

        def on_after_backward(self):
            arrive(self.trainer.optimizers[0])

        def configure_optimizers(self):
            return make(self, **options)

    return Module()


def lightning_trainer(folder, **options):
    import lightning

    options.setdefault("enable_checkpointing", False)
    return lightning.Trainer(
        max_steps=6,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        **options,
    )


def loader():
    return torch.utils.data.DataLoader(
        [batch(i)[0] for i in range(48)], batch_size=4, shuffle=False
    )


@pytest.mark.cell("Lightning", "plain")
@pytest.mark.cell("Lightning", "resume")
@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_lightning(tmp_path, automatic):
    import lightning

    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0} if automatic else {}
    whole, again = lightning_module(automatic), lightning_module(automatic)
    save = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "saved", every_n_train_steps=3, save_top_k=-1, filename="{step}"
    )
    first = lightning_trainer(tmp_path, callbacks=[save], enable_checkpointing=True, **options)
    first.fit(whole, loader())
    second = lightning_trainer(tmp_path, **options)
    second.fit(again, loader(), ckpt_path=str(tmp_path / "saved" / "step=3.ckpt"))
    assert first.optimizers[0].param_groups[0]["group_steps"] == 6
    same((whole, first.optimizers[0]), (again, second.optimizers[0]))


def test_lightning_refuses_release_under_accumulation(tmp_path):
    with pytest.raises(RuntimeError, match="accumulate_grad_batches"):
        lightning_trainer(tmp_path, accumulate_grad_batches=2).fit(
            lightning_module(True, gradient_release=True), loader()
        )


# ---- States in the process's memory --------------------------------------------------------------

#: biases stay on the GPU, and matrices take turns in the buffers
HOSTED = {
    "offload": ("CPUOffload", {"minimal_size": 1000}),
    "offload-gradients": ("CPUOffload", {"minimal_size": 1000, "offload_gradients": True}),
    "streaming": ("StateStreaming", {"minimal_size": 1000, "buffer": 1000}),
}
hosted = pytest.mark.parametrize("hosted", HOSTED.values(), ids=list(HOSTED))
#: of which a GradScaler and a trainer's clipping see the gradients
seen = pytest.mark.parametrize(
    "hosted", [HOSTED["offload"], HOSTED["streaming"]], ids=["offload", "streaming"]
)


def arrive(opt):
    """Waits until copies of gradients are here. What a trainer writes into gradients later is not
    in them."""
    for held in getattr(opt._parts.placement, "copies", {}).values():
        if held.down is not None:
            devices.wait(held.down)


def same_there(gpu, one, other):
    """Compares as same() does, and checks that states of `other` are here while its weights are
    not."""
    gpu.synchronize()
    same(one, other)
    model, opt = other
    for p in model.parameters():
        assert gpu.of(p).type == "cuda"
        where = {gpu.of(value).type for value in opt.state[p].values() if value.dim()}
        assert where == {"cuda" if p.dim() == 1 else "cpu"}, where


@pytest.mark.all
@pytest.mark.cell("Accelerate", "accumulate")
@pytest.mark.cell("Accelerate", "clip")
@hosted
def test_accelerate_with_states_elsewhere(fake, tmp_path, hosted):
    """A whole run and a resumed one have the bits of a loop without Accelerate, with the states
    beside the weights."""
    import accelerate

    clips = not hosted[1].get("offload_gradients")  # who gives gradients up clips them itself
    plain = tiny()
    expected = make(plain, clip_norm=0.2)
    scheduler = torch.optim.lr_scheduler.LinearLR(expected, 1.0, 0.1, 4)
    for step in range(8):
        (loss_of(plain, step) / 2).backward()
        if step % 2:
            if clips:
                nn.utils.clip_grad_norm_(plain.parameters(), 0.25)
            expected.step()
            scheduler.step()
            expected.zero_grad()
    assert expected.grad_norm > 0.2  # it clips
    for first, last in ((0, 8), (4, 8)):
        accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False
        )
        model = fake.model(tiny(seed=first))
        opt = make(model, hosted=hosted, clip_norm=0.2)
        scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 4)
        model, wrapped, scheduler = accelerator.prepare(model, opt, scheduler)
        assert type(wrapped).__name__ == "AcceleratedOptimizer" and isinstance(
            wrapped.optimizer, torch.optim.Optimizer
        )
        if first:
            accelerator.load_state(str(tmp_path / "state"))
        for step in range(first, last):
            if step == 4 and not first:
                accelerator.save_state(str(tmp_path / "state"))
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, step))
                arrive(opt)
                if accelerator.sync_gradients and clips:
                    accelerator.clip_grad_norm_(model.parameters(), 0.25)
                wrapped.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                wrapped.zero_grad()
        same_there(fake, (plain, expected), (accelerator.unwrap_model(model), opt))


@pytest.mark.all
@pytest.mark.cell("Lightning", "accumulate")
@pytest.mark.cell("Lightning", "clip")
@hosted
def test_lightning_with_states_elsewhere(fake, tmp_path, hosted):
    """As for Accelerate."""
    import lightning

    clips = not hosted[1].get("offload_gradients")
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0 if clips else None}
    plain = lightning_module(True, clip_norm=0.5)
    expected = plain.configure_optimizers()
    for step in range(6):
        for micro in range(2):
            ((plain.model(batch(step) * (1 + micro)) - 1).float().pow(2).mean() / 2).backward()
        if clips:
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        expected.step()
        expected.zero_grad()
    save = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "saved", every_n_train_steps=3, save_top_k=-1, filename="{step}"
    )
    for resume in (None, str(tmp_path / "saved" / "step=3.ckpt")):
        module = lightning_module(True, fake, 9 if resume else 0, hosted=hosted, clip_norm=0.5)
        more = {} if resume else {"callbacks": [save], "enable_checkpointing": True}
        trainer = lightning_trainer(tmp_path, **more, **options)
        trainer.fit(module, loader(), ckpt_path=resume)
        same_there(fake, (plain, expected), (module, trainer.optimizers[0]))


@seen
def test_states_that_a_trainer_moves_to_the_gpu_come_back(fake, hosted):
    """Lightning puts states where the model is, before the first step and when it resumes."""
    both = (tiny(), None), (fake.model(tiny()), hosted)
    runs = [(model, make(model, hosted=how)) for model, how in both]
    for step in range(4):
        for model, opt in runs:
            if step == 2:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
                for state in opt.state.values() if opt is runs[1][1] else ():
                    state.update(
                        {key: fake.tensor(value) for key, value in state.items() if value.dim()}
                    )
            loss_of(model, step).backward()
            opt.step()
            opt.zero_grad()
    same_there(fake, *runs)


@pytest.mark.parametrize("fused", [False, True], ids=["unscaled by torch", "unscaled in the step"])
@seen
def test_grad_scaler_with_states_elsewhere(fake, hosted, fused):
    """Scales are powers of two, which leave no trace. After an infinity there is no step and half
    the scale. The run is whole, or resumed."""
    plain = tiny()
    expected = make(plain, clip_norm=0.5)
    train(plain, expected, (0, 1, 3, 4, 5))
    kept = None
    for first in (0, 4):
        model = fake.model(tiny(seed=first))
        opt = make(model, hosted=hosted, clip_norm=0.5, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        if first:
            model.load_state_dict(kept[0])
            opt.load_state_dict(kept[1])
            scaler.load_state_dict(kept[2])
        for step in range(first, 6):
            if step == 4 and not first:
                kept = copy.deepcopy([model.state_dict(), opt.state_dict(), scaler.state_dict()])
            loss = loss_of(model, step)
            scaler.scale(loss * float("inf") if step == 2 else loss).backward()
            arrive(opt)
            before = [bits(fake.read(p)) for p in model.parameters()], states(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            assert scaler.get_scale() == (1024, 2048, 1024, 1024, 2048, 2048)[step]
            assert (([bits(fake.read(p)) for p in model.parameters()], states(opt)) == before) == (
                step == 2
            )
        assert opt.skipped_steps == fused
        same_there(fake, (plain, expected), (model, opt))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", ["offload_gradients", "gradient_release"])
def test_a_grad_scaler_that_would_see_small_gradients_alone_is_refused(fake, mode, fused):
    model = fake.model(tiny())
    opt = make(model, hosted=("CPUOffload", {"minimal_size": 1000, mode: True}), fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(
        RuntimeError, match=f"GradScaler.*{mode}"
    ):  # by the backward pass, where that steps
        scaler.scale(loss_of(model, 0)).backward()
        scaler.step(opt)
    opt.zero_grad()


# ---- Steps inside the backward pass --------------------------------------------------------------


def one_for_each(model):
    """Follows torch's recipe: an optimizer for each parameter, stepped by its own hook. torchtune's
    OptimizerInBackwardWrapper does the same, with the states under the parameters' names."""
    made = {
        p: halfstep.AdamW([(name, p)], lr=1e-2, **OPTIONS) for name, p in model.named_parameters()
    }

    def hook(p):
        made[p].step()
        made[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return {name: made[p] for name, p in model.named_parameters()}


def test_optimizer_in_backward():
    """A resumed run, and one optimizer that releases gradients itself, have the same bits, because
    bits follow names."""

    def run(model, first, last):
        for step in range(first, last):
            loss_of(model, step).backward()

    model = tiny()
    optimizers = one_for_each(model)
    run(model, 0, 3)
    states_now = {name: opt.state_dict() for name, opt in optimizers.items()}
    held = saved({"model": model.state_dict(), "optim": states_now})
    run(model, 3, 6)
    resumed = tiny(seed=9)
    others = one_for_each(resumed)
    resumed.load_state_dict(held["model"])
    for name, opt in others.items():
        opt.load_state_dict(held["optim"][name])
    run(resumed, 3, 6)
    for name in optimizers:
        assert states(optimizers[name]) == states(others[name])
    released = tiny()
    opt = make(released, gradient_release=True)
    train(released, opt, range(6))
    assert weights_of(model) == weights_of(resumed) == weights_of(released)


def test_apply_optimizer_in_backward():
    """torch.distributed.optim's own helper, which makes the optimizers itself: as one ordinary step
    over all."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    model, other = tiny(), tiny()
    halfstep.name_parameters(model)
    _apply_optimizer_in_backward(halfstep.AdamW, model.parameters(), {"lr": 1e-2, **OPTIONS})
    opt = make(other)
    for step in range(4):
        loss_of(model, step).backward()
    train(other, opt, range(4))
    assert weights_of(model) == weights_of(other)


def test_schedule_free_evaluates_at_its_average():
    model = tiny(dtype=torch.float32)
    opt = halfstep.ScheduleFree(model.named_parameters(), lr=1e-2)
    train(model, opt, range(5))
    weight = next(model.parameters())
    assert not torch.equal(opt.read_average(weight), copy.deepcopy(weight.detach()))
