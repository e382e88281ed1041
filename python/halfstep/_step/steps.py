"""step(): the work before an update of all parameters, and the cases without an update."""

import torch

from .._ranks import agreement
from .._states import empty
from .._tensors import sharding
from .._tensors.torch_public import warn
from .updates import Scaler


class Steps:
    """Carries out step()."""

    def __init__(self, groups, names, placement, residuals, cache, accumulation, updates, release):
        self.groups, self.names, self.placement = groups, names, placement
        self.residuals, self.cache, self.accumulation = residuals, cache, accumulation
        self.updates, self.release = updates, release
        #: how many calls have found no gradient before the first one that did
        self._idle = 0

    def step(self, step_param, scale, found_inf, given=None, witness=None):
        """Updates every parameter that has a gradient. `step_param` steps one of them in gradient
        release. `scale` and `found_inf` are what a GradScaler left, or None.

        Inside the operator of a compiled step, `given` holds its weights and gradients by
        parameter, and `witness` is its witness.
        """
        if given is None:
            self._step(step_param, Scaler(scale, found_inf), None)
            return
        with self.residuals.compiled_step(self.cache, given, witness):
            self._step(step_param, Scaler(scale, found_inf), given)

    def _step(self, step_param, scaler, given):
        with self.placement.stepping():
            if not scaler.on_gpu and scaler.refuses:
                # The GradScaler knows of it, and will lower its scale.
                self.updates.refuse()
                return
            if not self.groups.state and given is None and self._is_primed():
                return
            self.groups.options.check_mode(self.groups)
            # Gradient release gives zeros at the end of a round.
            waiting = [] if self.release.hooks else self.accumulation.give_zeros(given)
            try:
                ready = self.updates.prepare(given)
                if not ready.stepped and not self.groups.state:
                    self._doubt_parameters()
                if self.release.hooks:
                    self.release.step_all(ready.stepped, step_param)
                else:
                    self.updates.all(ready, scaler, given)
            finally:
                for p in waiting:
                    p.grad = None

    def _doubt_parameters(self):
        """Warns if no parameter ever has a gradient, because the model then computes with other
        tensors. The first such call may be one that a scheduler asks for."""
        self._idle += 1
        if self._idle == 2:
            warn(
                "step() was called twice, and no parameter has had a gradient. The model may"
                " compute with other tensors than this optimizer has, as with Accelerate's"
                " cpu_offload(): nothing is trained then. This warning is given once"
            )

    def _is_primed(self):
        """Makes the states, and nothing else, if this call is not meant as a step. Returns True
        then.

        torch.distributed.checkpoint has an optimizer without states make a step with zero gradients
        and an lr of 0, to see what states it will have. Nothing may come of that but states of no
        steps. An lr of 0 alone does not count, because warmups begin with it.
        """
        if any(
            group["lr"] is None  # Adafactor's relative steps
            or isinstance(group["lr"], torch.Tensor)
            and group["lr"].device.type == "meta"
            or float(group["lr"])
            for group in self.groups
        ):
            return False
        params = [p for p in self.groups.params() if p.requires_grad]
        if not params or any(p.grad is None for p in params):
            return False
        zero = all(
            not sharding.local(p.grad).count_nonzero()
            for p in params
            if p.grad.layout == torch.strided
        )
        settings, groups = self.groups.settings(), self.groups.param_groups
        if not agreement.everywhere(settings, groups, zero):
            return False
        self.cache.build()
        for g, i, p in self.groups.members():
            if p.numel() == 0 and p.grad is not None:
                empty.count(self.groups, self.names, g, i, p, 0)
        self.cache.drop()
        return True
