"""Tests halfstep.integrations with the trainers of this environment: the factory of transformers'
Trainer, also under TRL and PEFT, and averages. Accelerate has no callbacks, so its averages are
made by hand."""

import dataclasses
import json
import subprocess
import sys
import types

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


class _OfSwift:
    def __init__(self, args, trainer):
        self.args, self.trainer = args, trainer


#: modules of trainers that are not installed here -> what the plugins take from them
STAND_INS = {
    **{name: {} for name in ("swift", "axolotl", "axolotl.integrations")},
    "swift.callbacks": {"callbacks_map": {}},
    "swift.optimizers": {"optimizers_map": {}, "OptimizerCallback": _OfSwift},
    "axolotl.integrations.base": {"BasePlugin": object},
}


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
@pytest.mark.told("weights='bf16-ecc8' has nothing to act on", kind="PEFT")
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
@pytest.mark.told("weights='bf16-ecc8' has nothing to act on", kind="PEFT")
def test_released_gradients_give_the_same_bits(tmp_path, kind):
    runs = []
    for name in ("kept", "released"):
        options = {**OPTIONS, "gradient_release": name == "released"}
        trainer = trainer_of(kind, tmp_path / name, options=options, max_grad_norm=0.0)
        runs.append(trained(trainer))
    assert runs[1][1].gradient_release
    same(*runs)


@each("EMA")
@pytest.mark.told("weights='bf16-ecc8' has nothing to act on", kind="PEFT")
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


@pytest.mark.told("weights='bf16-ecc8' has nothing to act on", kind="PEFT")
@each("EMA")
def test_the_best_are_the_averages(tmp_path, kind):
    """The model that load_best_model_at_end leaves is the one that was scored. A failed evaluation
    leaves the weights that train."""
    import transformers

    from halfstep.integrations.transformers import EMACallback, load_averages

    def held(model):
        return {n: bits(p) for n, p in model.named_parameters()}

    class Look(transformers.TrainerCallback):
        fails = True

        def on_step_end(self, args, state, control, model=None, **kw):
            self.trained = held(model)

        def on_prediction_step(self, args, state, control, model=None, **kw):
            assert state.global_step == 1 or held(model) != self.trained
            if self.fails and state.global_step == 2:
                raise RuntimeError("a metric")

    every = dict.fromkeys(("eval_steps", "save_steps"), 1)
    every.update(eval_strategy="steps", max_steps=3, learning_rate=3e-2, warmup_steps=0)
    every["metric_for_best_model"] = "loss"
    look, averages = Look(), EMACallback(0.5, weights="bf16-kahan")
    trainer = trainer_of(
        kind, tmp_path / "run", [averages, look], load_best_model_at_end=True, **every
    )
    with pytest.raises(RuntimeError, match="a metric"):
        trainer.train()
    assert held(trainer.model) == look.trained != held(averages.ema.module)
    look.fails = False
    fresh = trainer_of(kind, tmp_path / "run", [averages, look], **every)
    with warnings_are("always") as said:
        fresh.train()
    assert any("load_averages(model, folder)" in str(w.message) for w in said)
    assert held(fresh.model) == look.trained
    scored = fresh.state.best_model_checkpoint
    other = model_of(kind)
    load_averages(other, scored)
    assert held(other) not in (look.trained, held(model_of(kind)))
    fresh.args.load_best_model_at_end = True
    fresh.train()
    load_averages(other, fresh.state.best_model_checkpoint)
    assert held(fresh.model) == held(other) == held(averages.ema.module) != look.trained
    assert fresh.evaluate()["eval_loss"] == pytest.approx(fresh.state.best_metric, rel=1e-5)
    with pytest.raises(ValueError, match="another model"):
        load_averages(torch.nn.Linear(2, 2), scored)


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
@pytest.mark.told("weights='bf16-ecc8' has nothing to act on", kind="PEFT")
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
    capsys.readouterr()
    factory(model, args, states="int4", fit="8")
    said = capsys.readouterr().out
    assert said.count("\nadamw/") == 2 and "CPUOffload" in said and "FlashAttention" in said
    with pytest.raises(ValueError, match="fit= needs the TrainingArguments"):
        factory(model, lr=1e-3, fit=8)
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


def test_plugins_take_text(tmp_path, monkeypatch):
    """Modules of ms-swift and axolotl have stand-ins here; tests/trainers tries the packages."""
    stand_ins = {name: types.ModuleType(name) for name in STAND_INS}
    for name, module in stand_ins.items():
        vars(module).update(STAND_INS[name])
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("swift", "axolotl"):
        monkeypatch.delitem(sys.modules, f"halfstep.integrations.{name}", raising=False)
    from halfstep.integrations import axolotl, swift

    def by_swift(text):
        args = arguments(tmp_path)
        args.optim_args = text
        return swift.Optimizer(args, None).create_optimizer(language_model())

    def by_axolotl(options):
        args = arguments(tmp_path)
        trainer = types.SimpleNamespace(args=args)
        axolotl.Plugin().post_trainer_create(axolotl.Arguments(halfstep=options), trainer)
        make, told = trainer.optimizer_cls_and_kwargs
        return make(language_model(), args, **told)

    told = {"gradient_release": "false", "cautious": "True", "eps": "1e-7", "threads": "2"}
    told.update(states="'int8'", betas="(0.9, 0.95)", clip_norm="None", rule="adamw/bf16-ecc8")
    for opt in (
        by_swift(",".join(f"{name}={text}" for name, text in told.items())),
        by_swift(json.dumps(told)),
        by_axolotl(told),
    ):
        group = opt.param_groups[0]
        assert opt.gradient_release is False and group["cautious"] is True and opt.threads == 2
        assert group["eps"] == 1e-7 and group["betas"] == (0.9, 0.95) and opt.clip_norm == 1.0
        assert (group["weights"], group["states"]) == ("bf16-ecc8", "int8")
    for plugin, given, words in (
        (by_swift, "gradient_release=off", "gradient_release='off'.*write true or false"),
        (by_swift, "{'states': 'int8'}", 'write {"states": "int8"}'),
        (by_axolotl, {"gradient_release": "off"}, "gradient_release='off'.*write true or false"),
        (by_axolotl, "int8", "'int8' stands under 'halfstep:'"),
        (by_axolotl, [{"states": "int8"}], "stands under 'halfstep:'"),
    ):
        with pytest.raises(ValueError, match=words):
            plugin(given)
    args = types.SimpleNamespace(optim_args="states=int8,ema_decay=0.5")
    assert swift.ema(args, None).averages.decay == 0.5
    averages = (
        axolotl.Plugin()
        .add_callbacks_post_trainer(
            axolotl.Arguments(halfstep={"ema": {"decay": "5e-1", "debias": "false"}}), None
        )[0]
        .averages
    )
    assert averages.decay == 0.5 and averages.options == {"debias": False}


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


# ---- 8-bit weights -------------------------------------------------------------------------------


def linear(module, name):
    return isinstance(module, torch.nn.Linear) and "lora" not in name


def stored(model):
    """Returns the bits of all weights, as they are stored."""
    return {n: bits(getattr(p, "packed", p)) for n, p in model.named_parameters()}


class Small(torch.nn.Module):
    """A model that has no save_pretrained()."""

    def __init__(self, whole):
        super().__init__()
        self.embed, self.head = whole.model.embed_tokens, whole.lm_head

    def forward(self, input_ids, labels, **_):
        found = self.head(self.embed(input_ids)).float().flatten(0, 1)
        return {"loss": torch.nn.functional.cross_entropy(found, labels.flatten())}


@pytest.mark.parametrize("kind", ["transformers", "TRL", "small", "without factory"])
def test_8_bit_models_are_saved_and_resumed(tmp_path, kind):
    """Their files have decoded weights. Resumed runs, and the model that is loaded as the best,
    have the bytes of the checkpoint."""
    import safetensors.torch
    import transformers

    seen = {}

    class Look(transformers.TrainerCallback):
        def on_save(self, args, state, control, model=None, **kw):
            seen[state.global_step] = stored(model)

    def trainer(name, **options):
        name = tmp_path / name
        made = trainer_of(kind if kind == "TRL" else "transformers", name, [Look()], **options)
        if kind == "small":
            made.model = made.model_wrapped = Small(made.model)
        if kind == "without factory":
            made.optimizer_cls_and_kwargs = halfstep.AdamW, {"lr": 1e-2, **OPTIONS}
        halfstep.nn.quantize_(made.model, "int8-ecc4", where=linear)
        return made

    evaluated = {"eval_strategy": "steps", "eval_steps": 3}
    whole = trainer("a")
    runs = [trained(whole)]
    assert stored(whole.model) == seen[6] != seen[3]
    with warnings_are("always") as said:
        runs.append(trained(trainer("b"), str(tmp_path / "a" / "checkpoint-3")))
    assert not [w for w in said if "halfstep" in str(w.message)]
    same(*runs)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    chosen = trainer("c", **evaluated, **best, greater_is_better=True)
    trained(chosen)
    assert chosen.state.best_global_step == 3 and stored(chosen.model) == seen[3]
    with pytest.raises(ValueError, match="save_only_model=True.* round 8-bit weights again"):
        trained(trainer("d", **evaluated, **best, save_only_model=True))
    assert not (tmp_path / "d" / "checkpoint-3").exists()
    folder = tmp_path / "a" / "checkpoint-6"
    read = safetensors.torch.load_file(folder / "model.safetensors")
    for name, p in whole.model.named_parameters():
        value = getattr(p, "dequantize", lambda p=p: p)().detach()
        assert torch.equal(read[name], value), name
    if kind != "small":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        assert all(torch.equal(p, read[name]) for name, p in model.named_parameters())


def test_bytes_of_other_weights_stay_away(tmp_path):
    """A state is loaded beside weights that it was not saved with."""

    def made(seed):
        trainer = trainer_of("transformers", tmp_path)
        trainer.model = halfstep.nn.quantize_(language_model(seed))
        return trainer.model, trainer.create_optimizer()

    (_, opt), (other, second) = made(0), made(1)
    before = stored(other)
    with warnings_are("always") as said:
        second.load_state_dict(opt.state_dict())
    assert stored(other) == before and "belong to other weights" in str(said[0].message)
    with warnings_are("error"):
        opt.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("tied", [False, True])
def test_8_bit_models_are_written_and_resized(tmp_path, tied):
    """Without a trainer, and with both names of a tied weight."""
    import safetensors.torch
    import transformers

    model = language_model()
    model.config.tie_word_embeddings = tied
    model.tie_weights()
    halfstep.nn.quantize_(model, where=lambda module, name: True)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    expected = {
        n: v.dequantize() if hasattr(v, "packed") else v for n, v in model.state_dict().items()
    }
    for name, given in (("asked", None), ("given", model.state_dict())):
        model.save_pretrained(tmp_path / name, state_dict=given)
        read = safetensors.torch.load_file(tmp_path / name / "model.safetensors")
        assert expected.keys() - read.keys() == ({"lm_head.weight"} if tied else set())
        assert all(torch.equal(value, expected[name]) for name, value in read.items())
        load = transformers.AutoModelForCausalLM.from_pretrained
        assert all(map(torch.equal, load(tmp_path / name).parameters(), model.parameters()))
    assert all(hasattr(v, "packed") for n, v in model.state_dict().items() if "proj" in n)
    old = model.model.embed_tokens.weight.packed.clone()
    for words in (96, 48):
        model.resize_token_embeddings(words)
        weight = model.model.embed_tokens.weight
        assert weight.shape == (words, 64) and torch.equal(weight.packed[:48], old[:48])
        assert model.lm_head.weight.shape == (words, 64)
        assert (model.lm_head.weight is weight) == tied


@pytest.mark.parametrize("safe", [False, True])
def test_adapters_beside_8_bit_weights(tmp_path, safe):
    """Adapters are saved alone. Merged weights stay 8-bit and are rounded to nearest."""
    import peft

    def adapted(model):
        names = ["q_proj", "down_proj"]
        config = peft.LoraConfig(r=4, target_modules=names, modules_to_save=["lm_head"])
        torch.manual_seed(1)
        made = peft.get_peft_model(model, config)
        for name, p in made.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.02, generator=torch.Generator().manual_seed(2))
        made.save_pretrained(tmp_path)
        made.load_adapter(tmp_path, "again")
        return made

    model, plain = halfstep.nn.quantize_(language_model(), where=linear), language_model()
    plain.load_state_dict(model.state_dict())
    expected = adapted(plain).merge_and_unload(safe_merge=safe)
    model = adapted(model).merge_and_unload(safe_merge=safe)
    for (name, p), q in zip(model.named_parameters(), expected.parameters()):
        assert hasattr(p, "packed") == ("proj" in name or "head" in name), name
        off = ((p.dequantize() if hasattr(p, "packed") else p) - q).abs()
        # Half a code is at most 1/202 of a block's largest value. BF16 rounds by 2^-9: the plain
        # weight, its sum with the adapter, and what is decoded here.
        assert (off <= q.abs().amax(-1, True) * (1 / 202 + 3 / 512)).all(), name


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
    """Validation sees averages, also under accumulation, and checkpoints save them as the module.
    Weights and states are those of a run without averages, and a resumed run has the bits of the
    whole one. A failed validation leaves the weights that train."""
    import lightning

    from halfstep.integrations.lightning import EMACallback

    def fit(name, resume=None, averages=True, fails=False):
        module, seen = lightning_module(True), []

        def validation_step(batch, batch_idx):
            seen.append(bits(module.model[0].weight))
            if fails and module.trainer.global_step > 1:
                raise RuntimeError("a metric")

        module.validation_step = validation_step
        ema = EMACallback(0.5, weights="bf16-kahan")
        saves = [
            lightning.pytorch.callbacks.ModelCheckpoint(
                tmp_path / name,
                every_n_train_steps=6 if only else 3,
                save_top_k=-1,
                filename=("only-" if only else "") + "{step}",
                save_weights_only=only,
            )
            for only in (False, True)
        ]
        trainer = lightning_trainer(
            tmp_path,
            callbacks=[ema, *saves] if averages else [],
            enable_checkpointing=averages,
            val_check_interval=2,
            num_sanity_val_steps=0,
            accumulate_grad_batches=2,
        )
        if fails:
            with pytest.raises(RuntimeError, match="a metric"):
                trainer.fit(module, loader(), loader())
            assert seen[-1] == bits(ema.ema.module.model[0].weight) != bits(module.model[0].weight)
        else:
            trainer.fit(module, loader(), loader(), ckpt_path=resume)
        return (module, trainer.optimizers[0]), ema.ema, seen

    half = str(tmp_path / "a" / "step=3.ckpt")
    whole, ema, seen = fit("a")
    without, _, _ = fit("b", averages=False)
    again, resumed, _ = fit("c", half)
    fit("d", fails=True)
    same(whole, without)
    same(whole, again)
    assert plain(ema.state_dict()) == plain(resumed.state_dict()) and int(ema.n_averaged) == 6
    assert seen[-1] == bits(ema.module.model[0].weight) != bits(whole[0].model[0].weight)
    saved = torch.load(half, weights_only=False)
    average = bits(saved["callbacks"]["EMACallback"]["module.model.0.weight"])
    assert bits(saved["state_dict"]["model.0.weight"]) == average != seen[-1]
    assert bits(saved["halfstep_trained_weights"]["model.0.weight"]) != average
    module, last = whole[0], seen[-1]
    for name in ("step=3.ckpt", "step=6.ckpt", "step=3.ckpt", "only-step=6.ckpt"):
        path = str(tmp_path / "a" / name)
        module.trainer.validate(module, loader(), ckpt_path=path, weights_only=False, verbose=False)
        assert seen[-1] == (average if "3" in name else last)


@pytest.mark.parametrize("kind", ["Lightning", "Accelerate"])
def test_8_bit_models_of_other_trainers(tmp_path, kind):
    """Lightning pickles weights, and Accelerate is told to."""

    def lightning(name, resume=None):
        from lightning.pytorch.callbacks import ModelCheckpoint

        module = halfstep.nn.quantize_(lightning_module(True))
        save = ModelCheckpoint(
            tmp_path / "a", every_n_train_steps=3, save_top_k=-1, filename="{step}"
        )
        trainer = lightning_trainer(tmp_path, callbacks=[save], enable_checkpointing=True)
        trainer.fit(module, loader(), ckpt_path=resume and tmp_path / "a" / "step=3.ckpt")
        return module, trainer.optimizers[0]

    def accelerate(name, resume=None):
        import accelerate

        accelerator = accelerate.Accelerator(cpu=True)
        model = halfstep.nn.quantize_(tiny(int(bool(resume))))
        opt = make(model)
        model, wrapped = accelerator.prepare(model, opt)
        if resume:
            accelerator.load_state(str(tmp_path / "a"))
        for step in range(2 if resume else 0, 4):
            accelerator.backward(loss_of(model, step))
            wrapped.step()
            wrapped.zero_grad()
            if step == 1 and not resume:
                halfstep._tensors.torch_public.warn_once.cache_clear()
                with warnings_are("always") as said:
                    accelerator.save_state(str(tmp_path / "a"))
                assert "8-bit weights as pytorch_model.bin" in str(said[0].message)
        return model, opt

    run = lightning if kind == "Lightning" else accelerate
    same(run("a"), run("b", True))


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
