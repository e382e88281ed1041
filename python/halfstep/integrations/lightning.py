"""Averages of weights for Lightning's `Trainer`.

from halfstep.integrations.lightning import EMACallback
trainer = lightning.Trainer(..., callbacks=[EMACallback(decay=0.999)])
"""

from __future__ import annotations

import functools
from typing import Any, Dict

import torch

from .._tensors.sharding import cut_like, is_dtensor
from ..optimizer import unwrapped
from ._averages import Averages, gathered, is_first

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise ImportError(
            "halfstep.integrations.lightning needs lightning: pip install lightning"
        ) from error

__all__ = ["EMACallback"]

#: key of a checkpoint: the weights that train
_TRAINED = "halfstep_trained_weights"


class EMACallback(Callback):
    """Averages the weights after each step. Validation, test and prediction use the averages, so
    checkpoints have the averages for their module. The weights that train are beside them, and a
    run that is resumed with this callback goes on from there.

    decay, options    those of halfstep.EMA, which is `ema` from the beginning of the training on
    """

    def __init__(self, decay: float = 0.999, **options: Any) -> None:
        self.averages = Averages(decay, options)
        self._saved, self._step = None, 0

    ema = property(lambda self: self.averages.ema)

    def state_dict(self) -> Dict[str, Any]:
        return {} if self.ema is None else gathered(self.ema.state_dict(), is_first())

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self._saved = state_dict or None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.averages.begin(pl_module, [unwrapped(o) for o in trainer.optimizers], self._saved)
        self._saved, self._step = None, trainer.global_step
        if "save_checkpoint" not in vars(trainer):
            trainer.save_checkpoint = self._saving(trainer.save_checkpoint)

    def _saving(self, save):
        """Returns the trainer's save_checkpoint() for a model that has the averages if no callbacks
        are asked (weights_only), else its own weights, because the optimizer's state is theirs."""

        @functools.wraps(save)
        def call(filepath, weights_only=None, *args, **kwargs):
            averages, were_in = self.averages, self.averages.are_in
            (averages.put_in if weights_only else averages.take_out)()
            try:
                return save(filepath, weights_only, *args, **kwargs)
            finally:
                (averages.put_in if were_in else averages.take_out)()

        return call

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Dict[str, Any]) -> None:
        if pl_module is not self.averages.model or not int(self.ema.n_averaged):
            return
        averages, _ = self.ema._pairs(pl_module)
        trained = {name: theirs.detach() for name, _, theirs in averages}
        checkpoint[_TRAINED] = gathered(trained, is_first())
        with self.ema.swapped(pl_module):
            found = trainer.strategy.lightning_module_state_dict()
            # The memory of shards gets the weights that train again.
            checkpoint["state_dict"] = {
                name: value.clone() if is_dtensor(value) else value for name, value in found.items()
            }

    @torch.no_grad()
    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Dict[str, Any]) -> None:
        if trainer.state.fn == "fit" and _TRAINED in checkpoint:
            tensors = {**dict(pl_module.named_parameters()), **dict(pl_module.named_buffers())}
            for name, trained in checkpoint[_TRAINED].items():
                tensors[name].copy_(cut_like(tensors[name], trained, name))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != self._step:  # not within accumulation
            self._step = trainer.global_step
            self.averages.update()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        saved, loaded = self._saved, trainer.state.fn != "fit" and trainer.ckpt_path
        if loaded:
            self._saved = None
        if pl_module is not self.averages.model:
            return
        if loaded and saved is None:
            self.averages.model = None  # the averages are not those of the weights that were loaded
            return
        if loaded:
            self.ema.load_state_dict(saved)
        self.averages.put_in()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.averages.take_out()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.averages.take_out()
