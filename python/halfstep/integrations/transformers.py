"""An optimizer and averages of weights for transformers' `Trainer`, and for trainers built on it.

from halfstep.integrations.transformers import EMACallback, factory
trainer = Trainer(
    model=model,
    args=args,
    optimizer_cls_and_kwargs=(factory, {"args": args, "states": "int8"}),
    callbacks=[EMACallback(decay=0.999)],
)
"""

from __future__ import annotations

import functools
import math
import os
import sys
from typing import Any, Dict, Optional, Tuple, Type, Union

import torch

from .. import fit as _forecast
from .. import plan
from .._forecast.models import model_of
from .._settings.assignment import patterns_of
from .._tensors.devices import gpu_memory
from .._tensors.sharding import cut_like, is_dtensor, reshard
from .._tensors.torch_public import warn
from .._weights8 import savers
from ..optimizer import Optimizer, unwrapped
from ..rules import class_and_options, classes
from ._averages import Averages, gathered
from ._text import missing, read

try:
    from accelerate import PartialState
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise missing(__name__, error, "transformers accelerate") from error

__all__ = ["EMACallback", "factory", "load_averages"]


savers.prepare()  # of models that were quantized before Trainer was imported
#: a checkpoint's file of averages
_FILE = "halfstep_ema.pt"
#: methods of the trainer that evaluate
_EVALUATING = ("evaluate", "predict", "evaluation_loop", "prediction_loop")


def factory(
    model: Optional[torch.nn.Module] = None,
    args: Any = None,
    *,
    rule: str = "AdamW",
    clip_norm: Optional[float] = None,
    fit: Optional[int] = None,
    **options: Any,
) -> Any:
    """Returns the optimizer of a model, with the groups that the `Trainer` makes for its own AdamW.
    Stands for the class in `optimizer_cls_and_kwargs`. Gives the parameters their names, and prints
    the plan of the memory.

    model       the model. None: this function is returned, because trainers call what stands for
                the class without arguments first
    args        the TrainingArguments. They give learning_rate and weight_decay, and betas and eps
                to Adam and AdamW. Their max_grad_norm becomes clip_norm, and is -0.0 from then on,
                so that the trainer leaves clipping to the step
    rule        a class of halfstep such as "Muon", or a recipe such as "adamw/bf16-sr/int8"
    clip_norm   that of the optimizer. None: what `args` say, or no clipping
    fit         a number of tokens: also prints halfstep.fit()'s report of a whole step of sequences
                of that length, in batches as `args` say. All parameters of the model must train
    options     those of the optimizer. They take precedence over `args`. All options may be text
    """
    if model is None:
        return factory
    if args is None and "lr" not in options:
        raise TypeError(
            "halfstep: the factory has no learning rate; give it the TrainingArguments,"
            ' optimizer_cls_and_kwargs=(factory, {"args": args, ...}), or give it lr='
        )
    given = {"rule": rule, "clip_norm": clip_norm, "fit": fit}
    rule, clip_norm, fit = read(factory, given).values()
    cls, given = class_of(rule)
    if args is not None:
        given.update(lr=args.learning_rate, weight_decay=args.weight_decay)
        if cls.rule in ("adam", "adamw"):
            given.update(betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)
        norm = _take_norm(args)
        clip_norm = norm if clip_norm is None else clip_norm
    options = {**given, **read(cls, options)}
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "halfstep: no parameter of the model trains; set requires_grad of some before the"
            " trainer is made"
        )
    if fit is not None and (args is None or not all(p.requires_grad for p in model.parameters())):
        raise ValueError(
            "halfstep: fit= needs the TrainingArguments, and a model whose parameters all train;"
            " for adapters call python -m halfstep fit CONFIG --lora RANK"
        )
    beside = cls.rule == "muon" and options.get("adamw") is not None
    if beside and options.get("adamw_names") is None:
        options["adamw_names"] = patterns_of(model)
    optimizer = cls(_groups(model), clip_norm=clip_norm or 0.0, **options)
    if PartialState().is_main_process:
        groups = optimizer._parts.groups
        own = [p for g, _, p in groups.members() if groups.row_of(groups[g]).name == cls.rule]
        largest = max(own or groups.params(), key=torch.Tensor.numel)
        release = optimizer.gradient_release
        recipe = optimizer.recipe(largest)
        table = str(plan(model, recipe, release, adamw=beside))
        print("halfstep: " + "\n\n".join(table.split("\n\n")[:2]), flush=True)
        if fit is not None:
            print(_fit(model, args, fit, recipe), flush=True)
    return optimizer


def _fit(model, args, sequence, recipe):
    """Returns the report of a whole training step, in batches of the TrainingArguments."""
    made, step = model_of(model.config, sequence, args.gradient_checkpointing)
    batch = args.per_device_train_batch_size
    return _forecast(made, step, gpu_memory(), recipes=recipe, batch=batch)


def class_of(rule: str) -> Tuple[Type[Optimizer], Dict[str, Any]]:
    """Returns the class of a rule or recipe, and what the recipe says of its options."""
    return (classes[rule], {}) if rule in classes else class_and_options(rule)


def _take_norm(args):
    """Returns the norm to clip by that TrainingArguments say. Puts -0.0 in its place, which the
    trainer takes for 0, and which tells another optimizer of the same arguments that they said
    `halfstep_clip_norm`. A 0 that somebody writes there later is +0.0."""
    norm = args.max_grad_norm
    if norm == 0 and math.copysign(1.0, norm) < 0:
        norm = getattr(args, "halfstep_clip_norm", None)
        if norm is None:
            raise ValueError(
                "halfstep: these TrainingArguments are copied from others, whose max_grad_norm an"
                " optimizer has taken over; set max_grad_norm of the copy"
            )
    if norm:
        args.halfstep_clip_norm, args.max_grad_norm = norm, -0.0
    return norm or 0.0


def _groups(model):
    """Returns the groups of a model: the parameters that the trainer decays, and the rest."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    groups = [{"params": [], "param_names": []}, {"params": [], "param_names": []}]
    groups[1]["weight_decay"] = 0.0
    for name, p in model.named_parameters():
        if p.requires_grad:
            group = groups[name not in decayed]
            group["params"].append(p)
            group["param_names"].append(name)
    return groups


def _read(path, model):
    """Returns the averages in a file. Ranks that take their parts of them do not read the rest."""
    mapped = any(map(is_dtensor, model.parameters()))
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


@torch.no_grad()
def load_averages(model: torch.nn.Module, folder: Union[str, "os.PathLike[str]"]) -> Dict[str, Any]:
    """Writes the averages in a checkpoint of EMACallback into a model, for good, and returns their
    state_dict(). A checkpoint's score is that of its averages; its model is the weights that train.

    model     the model, with the names of the one that was trained
    folder    the checkpoint's folder
    """
    reshard(model)
    saved = _read(os.path.join(folder, _FILE), model)
    ours = [*model.named_parameters(), *model.named_buffers()]
    ours = [(f"module.{name}", tensor) for name, tensor in ours if tensor.is_floating_point()]
    found = [(tensor, saved[name]) for name, tensor in ours if name in saved]
    missing = {f"module.{name}" for name, _ in model.named_parameters()} - saved.keys()
    if missing or any(mine.shape != theirs.shape for mine, theirs in found):
        raise ValueError(
            f"halfstep: the averages in {folder} are those of another model; give the model that"
            " was trained"
        )
    for mine, theirs in found:
        mine.copy_(cut_like(mine, theirs, "an average"))
    return saved


def _calling_trainer():
    """Returns the Trainer that calls a callback, or None. Callbacks are told everything else."""
    frame = sys._getframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), Trainer):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


class EMACallback(TrainerCallback, ExportableState):
    """Averages the weights after each step, and evaluates the averages. Each checkpoint has them in
    a file of its own, from which a resumed run goes on. With load_best_model_at_end the model has
    the averages of the best checkpoint in the end.

    decay, options    those of halfstep.EMA, which is `ema` from the beginning of the training on.
                      `with callback.ema.swapped(model): trainer.save_model(folder)` saves a model
                      of averages; `load_averages(model, folder)` loads those of a checkpoint
    """

    def __init__(self, decay: float = 0.999, **options: Any) -> None:
        self.averages = Averages(decay, options)
        self.folder = None

    ema = property(lambda self: self.averages.ema)

    def state(self) -> Any:
        """Returns what a checkpoint tells of this callback: where it lies."""
        averages = self.averages
        args = {"decay": averages.decay, **averages.options}
        return {"args": args, "attributes": {"folder": self.folder}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer, saved = unwrapped(kwargs["optimizer"]), None
        if state.global_step:
            told = state.stateful_callbacks.get(type(self).__name__) or {}
            known = [
                args.resume_from_checkpoint,
                told.get("attributes", {}).get("folder") if isinstance(told, dict) else None,
                self._folder(args, state),
            ]
            files = [os.path.join(path, _FILE) for path in known if isinstance(path, str)]
            found = next(filter(os.path.exists, files), None)
            if found is None:
                raise FileNotFoundError(
                    f"halfstep: no averages to resume from at {' or '.join(files)}; set"
                    " args.resume_from_checkpoint to the checkpoint's folder, or leave EMACallback"
                    " out"
                )
            saved = _read(found, kwargs["model"])
        self.averages.begin(kwargs["model"], optimizer, saved)
        # The trainer calls these before it evaluates and before it trains.
        optimizer.eval, optimizer.train = self.averages.put_in, self.averages.take_out
        trainer = _calling_trainer()
        for name in _EVALUATING:
            if hasattr(trainer, name) and name not in vars(trainer):
                setattr(trainer, name, self._guarded(getattr(trainer, name)))

    def _guarded(self, evaluate):
        """Returns a method of the trainer that takes the averages out of the model if it fails,
        because callbacks do not hear of that."""

        @functools.wraps(evaluate)
        def call(*args, **kwargs):
            try:
                return evaluate(*args, **kwargs)
            except BaseException:
                self.averages.take_out()
                raise

        return call

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.averages.update()
        self.folder = self._folder(args, state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.averages.take_out()

    on_predict = on_evaluate

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        best = state.best_model_checkpoint
        if best is not None and args.load_best_model_at_end:
            self.ema.load_state_dict(load_averages(kwargs["model"], best))
        elif best is not None:
            warn(
                f"the score of {best} is that of its averages, and its model is the weights that"
                " train: load the averages into a model by"
                " halfstep.integrations.transformers.load_averages(model, folder)"
            )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = gathered(self.ema.state_dict(), args.should_save)  # by all ranks
        if args.should_save:
            torch.save(saved, os.path.join(self._folder(args, state), _FILE))

    @staticmethod
    def _folder(args, state):
        return os.path.abspath(os.path.join(args.output_dir, f"checkpoint-{state.global_step}"))
