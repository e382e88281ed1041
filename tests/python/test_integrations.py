"""Tests halfstep.integrations with the trainers of this environment: the factory of transformers'
Trainer, also under TRL and PEFT, and averages. Accelerate has no callbacks, so its averages are
made by hand."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from common import EXACT, OPTIONS, Words, language_model, plain, same, tiny
from conftest import bits, warnings_are
from test_trainers import (
    arguments,
    lightning_module,
    lightning_trainer,
    loader,
    loss_of,
    make,
    peft_model,
    plain_optimizer,
    tokenizer,
    train,
)

import halfstep

pytestmark = [pytest.mark.all, pytest.mark.filterwarnings("ignore")]
#: trainers that are transformers' Trainer or are made of it
KINDS = ("transformers", "TRL", "PEFT")


def each(*columns):
    return pytest.mark.parametrize(
        "kind",
        [
            pytest.param(kind, marks=[pytest.mark.cell(kind, column) for column in columns])
            for kind in KINDS
        ],
    )


def model_of(kind, dtype=torch.bfloat16):
    """Returns a model. PEFT keeps adapters in FP32 beside a BF16 model."""
    return peft_model() if kind == "PEFT" else language_model(dtype=dtype)


def trainer_of(kind, folder, callbacks=(), dtype=torch.bfloat16, options=OPTIONS, **given):
    """Returns a trainer whose optimizer is the factory's, or the trainer's own without options."""
    import transformers

    from halfstep.integrations.transformers import factory

    cls, data, more = transformers.Trainer, Words(), {}
    given.setdefault("weight_decay", 0.1)
    if kind == "TRL":
        import datasets
        import trl

        cls = trl.SFTTrainer
        texts = [" ".join(f"w{i * j % 61}" for j in range(12)) for i in range(1, 49)]
        data = datasets.Dataset.from_dict({"text": texts})
        more = {"processing_class": tokenizer(folder)}
        given.update(max_length=16, bf16=False, gradient_checkpointing=False)
        args = arguments(folder, trl.SFTConfig, **given)
    else:
        args = arguments(folder, **given)
    if options is not None:
        more["optimizer_cls_and_kwargs"] = (factory, {"args": args, **options})
    return cls(
        model=model_of(kind, dtype),
        args=args,
        train_dataset=data,
        eval_dataset=data,
        callbacks=list(callbacks),
        **more,
    )


def trained(trainer, resume=None):
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model, plain_optimizer(trainer)


def gradients():
    """Returns a callback that copies the gradients and rates of each step."""
    import transformers

    class Gradients(transformers.TrainerCallback):
        def __init__(self):
            self.steps = []

        def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kw):
            found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            self.steps.append((optimizer.param_groups[0]["lr"], found))

    return Gradients()


@each("accumulate", "clip")
def test_the_factory_steps_as_by_hand(tmp_path, kind):
    """The gradients are those of larger batches. The step clips them, and nobody before it."""
    from halfstep.integrations.transformers import factory

    seen, larger = gradients(), gradients()
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = trainer_of(kind, tmp_path / "a", [seen], max_grad_norm=0.01, **halves)
    runs = [trained(trainer)]
    trained(trainer_of(kind, tmp_path / "b", [larger], max_grad_norm=0.01))
    for name, grad in seen.steps[0][1].items():
        other = larger.steps[0][1][name]
        assert (grad - other).float().norm() <= 0.02 * other.float().norm(), name
    args = arguments(tmp_path / "c", weight_decay=0.1, max_grad_norm=0.01)
    model = model_of(kind)
    opt = factory()(model, args, **OPTIONS)
    for lr, found in seen.steps:
        for group in opt.param_groups:
            group["lr"] = lr
        for name, grad in found.items():
            model.get_parameter(name).grad = grad
        opt.step()
        assert opt.grad_norm > 0.01
    runs.append((model, opt))
    assert len(seen.steps) == 6 and trainer.args.max_grad_norm == 0
    same(*runs)


@each("release")
def test_released_gradients_give_the_same_bits(tmp_path, kind):
    runs = []
    for name in ("kept", "released"):
        options = {**OPTIONS, "gradient_release": name == "released"}
        trainer = trainer_of(kind, tmp_path / name, options=options, max_grad_norm=0.0)
        runs.append(trained(trainer))
    assert runs[1][1].gradient_release
    same(*runs)


@each("EMA")
def test_averages_are_evaluated_saved_and_resumed(tmp_path, kind):
    import transformers

    from halfstep.integrations.transformers import EMACallback

    seen = []

    class Look(transformers.TrainerCallback):
        def on_prediction_step(self, args, state, control, model=None, **kw):
            seen.append({n: bits(p) for n, p in model.named_parameters()})

    def callback():
        return EMACallback(0.5, weights="bf16-kahan", seed=2)

    def averaged(ema):
        return {n: bits(p) for n, p in ema.module.named_parameters()}

    every = {"eval_strategy": "steps", "eval_steps": 1}
    whole, again = callback(), callback()
    runs = [trained(trainer_of(kind, tmp_path / "none"))]
    trainer = trainer_of(kind, tmp_path / "a", [whole, Look()], **every)
    runs.append(trained(trainer))
    same(*runs)
    assert (
        seen[-1] == averaged(whole.ema) != {n: bits(p) for n, p in trainer.model.named_parameters()}
    )
    resumed = trainer_of(kind, tmp_path / "b", [again], **every)
    same(runs[0], trained(resumed, str(tmp_path / "a" / "checkpoint-3")))
    assert plain(whole.ema.state_dict()) == plain(again.ema.state_dict())
    assert int(again.ema.n_averaged) == 6
    lost = trainer_of(kind, tmp_path / "d", [callback()])
    (tmp_path / "a" / "checkpoint-3" / "halfstep_ema.pt").unlink()
    with pytest.raises(FileNotFoundError, match="resume_from_checkpoint"):
        lost.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))


@each("plain")
def test_the_factory_follows_torch(tmp_path, kind):
    """The rate, its schedule, decay and clipping are those of the trainer's own AdamW."""
    losses = []
    for name, options in (("torch", None), ("halfstep", EXACT)):
        trainer = trainer_of(
            kind,
            tmp_path / name,
            dtype=torch.float32,
            options=options,
            max_steps=50,
            save_strategy="no",
            learning_rate=1e-3,
        )
        trained(trainer)
        losses.append([told["loss"] for told in trainer.state.log_history if "loss" in told])
    assert len(losses[0]) == len(losses[1]) == 50
    assert max(abs(a - b) for a, b in zip(*losses)) < 1e-5


@each("resume")
def test_the_factory_resumes(tmp_path, kind):
    whole = trained(trainer_of(kind, tmp_path / "a"))
    resumed = trainer_of(kind, tmp_path / "b")
    same(whole, trained(resumed, str(tmp_path / "a" / "checkpoint-3")))
    assert {group["weight_decay"] for group in whole[1].param_groups} == {0.1, 0.0}


def test_the_factory_takes_rules_and_says_what_is_missing(tmp_path, capsys):
    from halfstep.integrations.transformers import factory

    model, args = language_model(), arguments(tmp_path, max_grad_norm=0.3)
    for rule, cls in (("Lion", halfstep.Lion), ("adamw/bf16-kahan/int4", halfstep.AdamW)):
        opt = factory(model, args, rule=rule)
        assert type(opt) is cls and opt.clip_norm == 0.3
        assert opt.param_groups[0]["param_names"][0] == "model.embed_tokens.weight"
    assert capsys.readouterr().out.count("adamw/bf16-kahan/int4") == 1
    opt = factory(torch.nn.ModuleDict({"words": torch.nn.Embedding(9, 64)}), args, rule="Muon")
    assert opt.recipe(opt.param_groups[0]["params"][0]).startswith("muon")
    told = {"words": torch.nn.Embedding(90, 64), "inner": torch.nn.Linear(64, 64)}
    opt = factory(torch.nn.ModuleDict(told), args, rule="Muon", adamw={})
    assert opt.recipe(told["words"].weight).startswith("adamw")
    assert "\nmuon/f32/f32 " in capsys.readouterr().out
    assert factory(model, args, clip_norm=0.0, lr=0.5).param_groups[0]["lr"] == 0.5
    copied = dataclasses.replace(args)
    with pytest.raises(ValueError, match="copied from others, whose max_grad_norm"):
        factory(model, copied)
    for norm in (0, 0.7, 0.0, None):
        args.max_grad_norm = norm
        assert factory(model, args).clip_norm == factory(model, args).clip_norm == (norm or 0.0)
    for kinds in (lambda p: p.dim() < 2, lambda p: False):
        for p in model.parameters():
            p.requires_grad_(kinds(p))
        if any(p.requires_grad for p in model.parameters()):
            assert [len(g["params"]) > 0 for g in factory(model, args).param_groups] == [0, 1]
    with pytest.raises(ValueError, match="no parameter of the model trains"):
        factory(model, args)
    with pytest.raises(TypeError, match="no learning rate.*args="):
        factory(model)
    with pytest.raises(halfstep.HalfstepError, match="unknown rule 'Lamp'"):
        factory(model, args, rule="Lamp")


def test_a_nan_is_skipped_after_the_trainer_has_measured_the_norm(tmp_path):
    """The trainer spreads it to all gradients, so that no parameter can be named."""
    trainer = trainer_of("transformers", tmp_path, save_strategy="no")
    calls = []

    def spoil(grad):
        calls.append(grad)
        return grad * float("nan") if len(calls) == 2 else grad

    trainer.model.model.norm.weight.register_hook(spoil)
    with warnings_are("always") as said:
        _, opt = trained(trainer)
    assert opt.skipped_steps == 1 and opt.clip_norm == 1.0
    assert any("all parameters are not finite" in str(w.message) for w in said)


def test_averages_beside_schedule_free_are_refused(tmp_path):
    from halfstep.integrations.transformers import EMACallback

    options = {"rule": "ScheduleFree", "seed": 1}
    trainer = trainer_of("transformers", tmp_path, [EMACallback()], options=options)
    with pytest.raises(ValueError, match="averages of its own"):
        trainer.train()


def test_importing_the_package_imports_no_trainer():
    code = (
        "import sys, halfstep.integrations;"
        "assert not {'transformers', 'lightning', 'accelerate'} & set(sys.modules);"
        "sys.modules['transformers'] = sys.modules['lightning'] = None;"
        "sys.modules['pytorch_lightning'] = None\n"
        "for name in ('transformers', 'lightning'):\n"
        "    try: __import__('halfstep.integrations.' + name)\n"
        "    except ImportError as error: assert 'pip install ' + name in str(error), error\n"
        "    else: raise AssertionError(name)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- Lightning and Accelerate --------------------------------------------------------------------


@pytest.mark.cell("Lightning", "release")
def test_lightning_releases(tmp_path):
    runs = []
    for release in (False, True):
        module = lightning_module(True, gradient_release=release)
        trainer = lightning_trainer(tmp_path)
        trainer.fit(module, loader())
        runs.append((module, trainer.optimizers[0]))
    same(*runs)


@pytest.mark.cell("Lightning", "EMA")
def test_lightning_averages(tmp_path):
    """Validation sees averages, also under accumulation. Weights and states are those of a run
    without averages, and a resumed run has the bits of the whole one."""
    import lightning

    from halfstep.integrations.lightning import EMACallback

    def fit(name, resume=None, averages=True):
        module, seen = lightning_module(True), []
        module.validation_step = lambda batch, batch_idx: seen.append(bits(module.model[0].weight))
        ema = EMACallback(0.5, weights="bf16-kahan")
        save = lightning.pytorch.callbacks.ModelCheckpoint(
            tmp_path / name, every_n_train_steps=3, save_top_k=-1, filename="{step}"
        )
        trainer = lightning_trainer(
            tmp_path,
            callbacks=[ema, save] if averages else [],
            enable_checkpointing=averages,
            val_check_interval=2,
            num_sanity_val_steps=0,
            accumulate_grad_batches=2,
        )
        trainer.fit(module, loader(), loader(), ckpt_path=resume)
        return (module, trainer.optimizers[0]), ema.ema, seen

    whole, ema, seen = fit("a")
    without, _, _ = fit("b", averages=False)
    again, resumed, _ = fit("c", str(tmp_path / "a" / "step=3.ckpt"))
    same(whole, without)
    same(whole, again)
    assert plain(ema.state_dict()) == plain(resumed.state_dict()) and int(ema.n_averaged) == 6
    assert seen[-1] == bits(ema.module.model[0].weight) != bits(whole[0].model[0].weight)


@pytest.mark.cell("Accelerate", "release")
@pytest.mark.cell("Accelerate", "EMA")
def test_accelerate_releases_and_averages(tmp_path):
    import accelerate

    plain_model = tiny()
    expected = make(plain_model)
    train(plain_model, expected, range(4))
    for release in (False, True):
        accelerator = accelerate.Accelerator(cpu=True)
        model = tiny()
        opt = make(model, gradient_release=release)
        ema = halfstep.EMA(model, 0.5, "bf16-kahan")
        model, wrapped = accelerator.prepare(model, opt)
        for step in range(4):
            accelerator.backward(loss_of(model, step))
            wrapped.step()
            wrapped.zero_grad()
            ema.update_parameters(model, wrapped)
            with ema.swapped(model):
                assert bits(model[0].weight) == bits(ema.module[0].weight)
        same((plain_model, expected), (model, opt))
        assert bits(model[0].weight) != bits(ema.module[0].weight)
