"""Calls the engine for an update of all parameters, or of one."""

import torch

from .._library import abi
from .._ranks import agreement
from .._ranks.classes import classes_of
from .._states import empty
from .._states.members import Member
from .._tensors import devices
from .._tensors.sharding import local, stored
from .._tensors.torch_public import increment_versions
from .gather import Gathered


class Scaler:
    """What a GradScaler has left for one step: the scale of the gradients, and whether one of them
    is not finite. Either may be None."""

    def __init__(self, scale, found_inf):
        self.scale, self.found_inf = scale, found_inf
        self.on_gpu = any(
            isinstance(t, torch.Tensor) and devices.is_asynchronous(devices.of(t))
            for t in (scale, found_inf)
        )

    @property
    def refuses(self):
        """True if a gradient is not finite. Waits for a GPU."""
        return self.found_inf is not None and bool(float(self.found_inf))

    @property
    def factor(self):
        """The factor for gradients. Waits for a GPU."""
        return 1.0 if self.scale is None else 1.0 / float(self.scale)


class Updates:
    """Carries out updates and what follows them: errors, warnings, counters, and weights that were
    worked on in copies."""

    def __init__(self, groups, names, placement, residuals, refusals, cache, gather, accumulation):
        self.groups, self.names, self.placement = groups, names, placement
        self.residuals = residuals
        self.refusals, self.cache, self.gather = refusals, cache, gather
        self.accumulation = accumulation
        # True once the ranks that share parameters have compared their settings.
        self._agreed = False

    def doubt_ranks(self):
        """Makes ranks that share parameters compare their settings again."""
        self._agreed = False

    # ---- All parameters --------------------------------------------------------------------------

    def prepare(self, given):
        """Makes the engine fit and fills its arrays. `given` holds the weights and gradients of a
        compiled step, by parameter."""
        for _ in range(3):
            ready = Gathered(self.cache.current())
            if self.gather.all(ready) if given is None else self.gather.given(ready, given):
                return ready
            self.cache.build(given and {p: grad for p, (_, grad) in given.items()})
        raise RuntimeError(
            "halfstep: parameters or states change while they are being stepped; stop the hook or"
            " thread that writes to them"
        )

    def all(self, ready, scaler, given=None):
        """Updates all parameters that have gradients, or adds a micro-batch to their states."""
        engine, back, stepped = ready.engine, ready.back, ready.stepped
        if engine.guarded:
            self.residuals.notice(token=self.residuals.token(engine))
        if scaler.on_gpu and engine.asynchronous and len(engine.parts) == 1:
            engine.bind_gradient_scale(scaler.scale, scaler.found_inf)
            self.refusals.scaled()
        else:
            if scaler.on_gpu and scaler.refuses:
                # This process decides for several handles.
                self.refuse()
                return
            engine.set_gradient_scale(scaler.factor)
        if engine.ranks.needed and not self._agreed:
            self._agree()
        micro = self.groups.options.optimizer_accumulation
        self.placement.arrive([m for m, _ in back if isinstance(m, Member)])
        if engine.store is not None:
            engine.store.prepare(engine, self.accumulation.after(stepped, micro), ready.keep)
        ahead = None if micro else self.placement.gather_results(engine)
        code, written = None, ((), ()) if micro else (back, stepped)
        try:
            code, handle = engine.step(micro, ahead)
            if engine.asynchronous:
                engine.keep_until_read([local(p.grad) for p in stepped if p.grad is not None])
                if self.cache.empty and code == abi.OK:  # their steps are counted here
                    code, handle = engine.hear()
                    engine.tell(self.groups.param_groups)
            done = code == abi.OK or self.groups.options.scan == "per-tensor"
            if not micro:
                self.placement.judge(engine, done)
            if done:
                self.accumulation.gathered(stepped if given is None else list(given), micro)
            self._finish(engine, code, *written, handle)
        except BaseException as error:
            # Ctrl-C may come in the middle. A result that was made ahead is known to be used only
            # if the call has returned.
            if not isinstance(error, Exception) and (ahead is None or code is not None):
                self._land(engine, *written)
            raise
        if self.cache.empty and done and not micro:
            self.count_empty()

    def _agree(self):
        settings, groups = self.groups.settings(), self.groups.param_groups
        shared = {id(p) for c in classes_of(settings, groups) if c.groups for p in c.params}
        params = [member for member in self.groups.members() if id(member[2]) in shared]
        wanted, _ = self.placement.describe([(g, i, p, "f32") for g, i, p in params])
        agreement.agree(settings, groups, wanted)
        self._agreed = True

    def refuse(self):
        """Counts a step that is refused before the engine is asked."""
        self.refusals.count(self.cache.told("skipped_steps"))

    # ---- One parameter ---------------------------------------------------------------------------

    def prepare_one(self, p, grad, begun):
        """Makes the engine fit for one parameter and its gradient. Returns Gathered, the member and
        the two addresses. `begun` is that of EngineCache.with_member()."""
        engine, m = self.cache.with_member(p, grad, begun)
        if engine.guarded:
            self.residuals.notice(p)
        ready = Gathered(engine)
        found = self.gather.place(ready, m, p, grad)
        if found is None:
            ready = Gathered(self.cache.build({p: grad}))
            m = ready.engine.member(p)
            found = self.gather.place(ready, m, p, grad)
        return ready, m, found

    def one(self, prepared, grad, micro):
        """Updates one parameter by a gradient, or adds a micro-batch to its states. `prepared` is
        from prepare_one()."""
        ready, m, found = prepared
        engine, back = ready.engine, ready.back
        engine.set_gradient_scale(1.0)
        if m.offloaded:
            self.placement.arrive([m])
        written = ((), ()) if micro else (back, (m.p,))
        try:
            code = engine.step_one(m, *found, micro)
            if engine.asynchronous and not m.offloaded:
                engine.keep_until_read([local(grad), *ready.keep])
            if code == abi.NONFINITE and not micro:
                engine.tell(self.groups.param_groups)
                self.refusals.tell(engine, m.handle)
                return
            self.accumulation.gathered((m.p,), micro)
            if code or not micro:
                self._finish(engine, code, *written, m.handle, False)
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C may come in the middle
                self._land(engine, *written)
            raise

    def count_empty(self, only=None):
        """Counts a step of each parameter without elements that has a gradient, or of `only`."""
        for g, i, p in self.groups.members():
            if not p.numel() and p.grad is not None and p is (p if only is None else only):
                empty.count(self.groups, self.names, g, i, p)

    # ---- After a call ----------------------------------------------------------------------------

    def _finish(self, engine, code, back, stepped, handle, counted=True):
        """Acts on the code of a call, and writes back weights that were worked on in copies.
        `handle` is the handle that was asked. `counted`: it counts steps of groups, which a call
        about one parameter does not."""
        if code is None:  # refused by another rank
            self.refuse()
            self.refusals.tell(None, None)
            return
        if code == abi.NONFINITE or code == abi.OK and counted and not engine.asynchronous:
            engine.tell(self.groups.param_groups)
        if code == abi.NONFINITE:
            self.refusals.tell(engine, handle)
            if self.groups.options.scan != "per-tensor":
                return
        elif code:
            engine.check(code, handle)
        self._land(engine, back, stepped)

    def _land(self, engine, back, stepped):
        """Writes back weights that were worked on in copies, and notes what a step has written. A
        second call changes nothing."""
        offloaded = []
        for p, weight in back:
            if isinstance(p, Member):
                offloaded.append(p)
            else:
                stored(p).detach().copy_(weight)
        increment_versions(stepped)
        self.placement.put_back(offloaded)
        self.residuals.stepped(engine, stepped)
        if engine.store is not None:
            engine.store.stepped(stepped)
