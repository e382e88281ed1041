"""Counts and reports steps that were refused because a gradient was not finite."""

from .._library import calls
from .._tensors.sharding import local
from .._tensors.torch_public import warn


class Refusals:
    """Counts and reports the refused steps of an optimizer."""

    def __init__(self, groups):
        self.groups = groups
        self._warned = False
        # True if a GradScaler on a GPU gave the scale of the last step. It knows itself what was
        # refused.
        self._scaled = False

    def count(self, before):
        """Counts a step that was refused before the handle was asked. The handle finds the count in
        the groups. `before` is the count so far."""
        for group in self.groups:
            group["skipped_steps"] = before + 1

    def scaled(self):
        """Notes that a GradScaler on a GPU will know whether the next step is refused."""
        self._scaled = True

    def heard(self, engine, handle, refused):
        """Reports a refusal once all submitted work is done, unless a GradScaler knows of it."""
        scaled, self._scaled = self._scaled, False
        if refused and not scaled:
            self.tell(engine, handle)

    def tell(self, engine, handle):
        """Warns of a step that was refused. `handle` knows why; it may be None."""
        often = self.groups[0]["skipped_steps"]
        if self._warned and often not in (10, 100, 1000, 10000, 100000):
            return
        self._warned = True
        name, too_large = calls.nonfinite_tensor(handle) if handle else ("", False)
        # On a GPU the gradients of another step may have taken their place.
        grads = (
            [local(m.p.grad) for m in engine.members if m.p.grad is not None]
            if name and not engine.asynchronous
            else []
        )
        if not name:
            what = (
                "a gradient on another rank or device, or the norm of all gradients, is not finite"
                " or too large"
            )
        elif len(grads) > 1 and not any(grad.isfinite().any() for grad in grads):
            what = (
                "the gradients of all parameters are not finite. torch.nn.utils.clip_grad_norm_"
                " makes them so if one of them was not; use clip_norm= of this optimizer, which"
                " names that one"
            )
        elif too_large:
            what = (
                f"the gradient of parameter {name!r} is finite, but too large: its values must be"
                " below 2^62 (4.6e18), so that fp32 can hold their squares"
            )
        else:
            what = f"the gradient of parameter {name!r} is not finite"
        left = (
            f"parameter {name!r} was left alone"
            if self.groups.options.scan == "per-tensor" or self.groups.options.gradient_release
            else "the step was skipped and nothing changed"
        )
        warn(
            f"{what}; {left}. optimizer.skipped_steps, also in each group, counts such"
            f" steps: {often} by now. This warning is given again at the 10th, 100th, ... time",
            RuntimeWarning,
        )
