"""Averages of weights for Lightning's `Trainer`.

from halfstep.integrations.lightning import EMACallback
trainer = lightning.Trainer(..., callbacks=[EMACallback(decay=0.999)])
"""

from __future__ import annotations

from ..optimizer import unwrapped
from ._averages import Averages

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


class EMACallback(Callback):
    """Averages the weights after each step. Validation, test and prediction use the averages.
    Checkpoints have them, and a resumed run goes on from there.

    decay, options    those of halfstep.EMA, which is `ema` from the beginning of the training on.
                      `with callback.ema.swapped(module): trainer.save_checkpoint(path)` saves a
                      module of averages
    """

    def __init__(self, decay=0.999, **options):
        self.averages = Averages(decay, options)
        self._saved, self._step = None, 0

    ema = property(lambda self: self.averages.ema)

    def state_dict(self):
        return {} if self.ema is None else self.ema.state_dict()

    def load_state_dict(self, state_dict):
        self._saved = state_dict or None

    def on_train_start(self, trainer, pl_module):
        self.averages.begin(pl_module, [unwrapped(o) for o in trainer.optimizers], self._saved)
        self._saved, self._step = None, trainer.global_step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step != self._step:  # not within accumulation
            self._step = trainer.global_step
            self.averages.update()

    def on_validation_start(self, trainer, pl_module):
        self.averages.put_in()

    def on_validation_end(self, trainer, pl_module):
        self.averages.take_out()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer, pl_module, exception):
        self.averages.take_out()
