"""The way of a step, from top to bottom: prepare, gather, call, tell. Then the same for one
parameter, rounds of gradient release, and micro-batches."""

import torch

from .._library import abi
from .._ranks import agreement
from .._ranks.spreads import spreads_of
from .._states.members import NOTHING, Member
from .._tensors import devices
from .._tensors.parameters import stored_dtype
from .._tensors.sharding import local, stored
from .._tensors.torch_private import no_dynamo
from .._tensors.torch_public import increment_versions, warn
from .gather import Ready


class Scaler:
    """What a GradScaler has left for one step: the scale of the gradients, and whether one of them
    is not finite. Either may be None."""

    def __init__(self, scale, found_inf):
        self.scale, self.found_inf, self.on_gpu = scale, found_inf, False
        for t in (scale, found_inf):
            if isinstance(t, torch.Tensor) and devices.is_asynchronous(devices.of(t)):
                self.on_gpu = True

    @property
    def refuses(self):
        """True if a gradient is not finite. Waits for a GPU."""
        return self.found_inf is not None and bool(float(self.found_inf))

    @property
    def factor(self):
        """The factor for gradients. Waits for a GPU."""
        return 1.0 if self.scale is None else 1.0 / float(self.scale)


class Steps:
    """Makes the steps of an optimizer: step() of all parameters, and in gradient release rounds, in
    which each parameter is stepped once by itself.

    pending     the parameters whose states have taken micro-batches since the last update of the
                weight, as keys
    released    the parameters that have been stepped in this round
    """

    def __init__(self, parts):
        self.groups, self.names, self.placement = parts.groups, parts.names, parts.placement
        self.residuals, self.cache, self.gather = parts.residuals, parts.cache, parts.gather
        self.release = parts.release
        self.pending, self.released = {}, set()
        # True once the ranks that share parameters have compared their settings.
        self._agreed = False
        #: how many calls have found no gradient before the first one that did
        self._idle = 0

    # ---- All parameters --------------------------------------------------------------------------

    def step(self, step_param, scale, found_inf, given=None, witness=None):
        """Updates every parameter that has a gradient. `step_param` steps one of them in gradient
        release. `scale` and `found_inf` are what a GradScaler left, or None.

        Inside the operator of a compiled step, `given` holds its weights and gradients by
        parameter, and `witness` is its witness.
        """
        compiled, scaler = NOTHING, Scaler(scale, found_inf)
        if given is not None:
            compiled = self.residuals.compiled_step(self.cache, given, witness)
        with compiled, self.placement.stepping():
            if not scaler.on_gpu and scaler.refuses:
                # The GradScaler knows of it, and will lower its scale.
                self.cache.count_refused()
                return
            if not self.groups.state and given is None and self._is_primed():
                return
            self.groups.options.check_mode(self.groups)
            # Gradient release gives zeros at the end of a round.
            waiting = [] if self.release.hooks else self._give_zeros(given)
            try:
                ready = self.ready(given)
                if not ready.stepped and not self.groups.state:
                    self._doubt_parameters()
                if self.release.hooks:
                    self._step_singly(ready.stepped, step_param)
                elif self._admit(ready.engine, scaler):
                    self._call(ready, given)
            finally:
                for p in waiting:
                    p.grad = None

    def ready(self, given=None):
        """Makes the engine fit and fills its arrays. `given` holds the weights and gradients of a
        compiled step, by parameter."""
        for _ in range(3):
            ready = Ready(self.cache.current())
            if self.gather.all(ready) if given is None else self.gather.given(ready, given):
                return ready
            self.cache.build(given and {p: grad for p, (_, grad) in given.items()})
        raise RuntimeError(
            "halfstep: parameters or states change while they are being stepped; stop the hook or"
            " thread that writes to them"
        )

    def _admit(self, engine, scaler):
        """Drops residuals that have lost their weights, sets the scale of gradients, and lets ranks
        compare their settings. Returns False if the step is refused."""
        if engine.guarded:
            self.residuals.notice(token=self.residuals.token(engine))
        if scaler.on_gpu and engine.asynchronous and len(engine.parts) == 1:
            engine.bind_gradient_scale(scaler.scale, scaler.found_inf)
            self.cache.scaled = True
        else:
            if scaler.on_gpu and scaler.refuses:
                # This process decides for several handles.
                self.cache.count_refused()
                return False
            engine.set_gradient_scale(scaler.factor)
        if engine.ranks.needed:
            self.agree()
        return True

    def _call(self, ready, given):
        """Calls the engine for all parameters that have gradients: for an update, or for a
        micro-batch."""
        engine, back, stepped = ready.engine, ready.back, ready.stepped
        micro = self.groups.options.optimizer_accumulation
        self.placement.arrive([m for m, _ in back if isinstance(m, Member)])
        if engine.store is not None:
            engine.store.prepare(engine, self._pending_after(stepped, micro), ready.keep)
        ahead = None if micro else self.placement.gather_results(engine)
        code, written = None, ((), ()) if micro else (back, stepped)
        try:
            code, handle = engine.step(micro, ahead)
            if engine.asynchronous:
                engine.keep_until_read([local(p.grad) for p in stepped if p.grad is not None])
            done = code == abi.OK or self.groups.options.scan == "per-tensor"
            if not micro:
                self.placement.judge(engine, done)
            if done:
                self._note_taken(stepped if given is None else list(given), micro)
            self._tell(engine, code, *written, handle)
        except BaseException as error:
            # Ctrl-C may come in the middle. A result that was made ahead is known to be used only
            # if the call has returned.
            if not isinstance(error, Exception) and (ahead is None or code is not None):
                self.land(engine, *written)
            raise

    def _tell(self, engine, code, back, stepped, handle, counted=True):
        """Acts on the code of a call, and writes back weights that were worked on in copies.
        `handle` is the handle that was asked. `counted`: it counts steps of groups, which a call
        about one parameter does not."""
        if code is None:  # refused by another rank
            self.cache.count_refused()
            self.cache.tell_refused(None, None)
            return
        if code == abi.NONFINITE or code == abi.OK and counted and not engine.asynchronous:
            engine.tell(self.groups.param_groups)
        if code == abi.NONFINITE:
            self.cache.tell_refused(engine, handle)
            if self.groups.options.scan != "per-tensor":
                return
        elif code:
            engine.check(code, handle)
        self.land(engine, back, stepped)

    def land(self, engine, back, stepped):
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

    # ---- What few steps need ---------------------------------------------------------------------

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
            not local(p.grad).count_nonzero() for p in params if p.grad.layout == torch.strided
        )
        settings, groups = self.groups.settings(), self.groups.param_groups
        if not agreement.everywhere(settings, groups, zero):
            return False
        self.cache.build()
        self.cache.drop()
        return True

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

    def agree(self, more=None):
        """Makes ranks that share parameters compare their settings, once. `more`: numbers that must
        be the same on all."""
        if self._agreed:
            return
        settings, groups = self.groups.settings(), self.groups.param_groups
        shared = {id(p) for s in spreads_of(settings, groups) if s.groups for p in s.params}
        params = [member for member in self.groups.members() if id(member[2]) in shared]
        wanted, _ = self.placement.describe([(g, i, p, "f32") for g, i, p in params])
        agreement.agree(settings, groups, wanted, more)
        self._agreed = True

    def doubt_ranks(self):
        """Makes ranks that share parameters compare their settings again."""
        self._agreed = False

    # ---- One parameter ---------------------------------------------------------------------------

    def take(self, p):
        """Takes the complete gradient of a parameter. Returns True if a step is still to be
        made."""
        return self.release.takes(p) and not self.placement.released(p, self)

    def step_param(self, p):
        """Updates one parameter from its gradient, which stays."""
        grad = self.placement.gradient_of(p)
        if grad is not None:
            self.groups.options.check_mode(self.groups)
            self._step_one(p, grad, self.groups.options.optimizer_accumulation)
            self.placement.stepped_alone(p)

    @no_dynamo
    @torch.no_grad()
    def step_sent(self, p, grad, micro):
        """Does the work of step_param() in a thread of its own, with a given gradient. `micro`:
        only adds it to the states."""
        self._step_one(p, grad, micro)

    def _step_one(self, p, grad, micro):
        engine = self.cache.engine
        if engine is not None and (self.released if micro else p in self.released):
            self.end_round()
        ready, m, found = self._gather_one(p, grad)
        if not micro:
            self.released.add(p)
        self._call_one(ready, m, found, grad, micro)

    def _gather_one(self, p, grad):
        """Makes the engine fit for one parameter and its gradient. Returns Ready, the member and
        the two addresses."""
        engine, m = self.cache.with_member(p, grad, bool(self.released))
        if engine.guarded:
            self.residuals.notice(p)
        ready = Ready(engine)
        found = self.gather.place(ready, m, p, grad)
        if found is None:
            ready = Ready(self.cache.build({p: grad}))
            m = ready.engine.member(p)
            found = self.gather.place(ready, m, p, grad)
        return ready, m, found

    def _call_one(self, ready, m, found, grad, micro):
        """Calls the engine for one parameter: for an update by a gradient, or for a micro-batch."""
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
                self.cache.tell_refused(engine, m.handle)
                return
            self._note_taken((m.p,), micro)
            if code or not micro:
                self._tell(engine, code, *written, m.handle, False)
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C may come in the middle
                self.land(engine, *written)
            raise

    # ---- Rounds of gradient release --------------------------------------------------------------

    def _step_singly(self, params, step_param):
        """Carries out step() in gradient release: steps what still has a gradient, and ends the
        round."""
        if self.release.rounds is not None:  # None for other hooks, as those of halfstep.compat
            self.release.rounds.step()
        for p in params:
            step_param(p)
        if not self.groups.options.optimizer_accumulation and (self.released or self.pending):
            self.end_round()
        self.placement.stepped_in_release(params)

    def end_round(self, dropped=False, partial=False):
        """Ends a round. `dropped`: no step follows it. `partial`: some of its gradients did not
        come. Such a round's norm must not clip the next round."""
        waiting = [p for p in self.pending if p not in self.released] if not dropped else ()
        for p in waiting:
            grad = self.placement.gradient_of(p)
            self._step_one(p, self._zeros_for(p) if grad is None else grad, False)
        self.released.clear()
        engine = self.cache.engine
        if engine is not None:
            clipped = self.groups.options.clip_norm
            before = self.cache.told("last_norm") if (dropped or partial) and clipped else None
            weights, keep = None, []
            if engine.store is not None:
                engine.store.prepare(engine, self.pending, keep, all=True)
                weights = engine.store.round_weights(engine, keep)
            engine.check(engine.end_round(bool(clipped), weights), engine.handle)
            if not engine.asynchronous or before is not None:
                engine.tell(self.groups.param_groups)
            if before is not None:
                for group in self.groups:
                    group["last_norm"] = before

    def zero_grad(self):
        """Carries out zero_grad(), which ends the round."""
        self.placement.settle()
        dropped, partial, rounds = False, False, self.release.rounds
        if rounds is not None:
            came_all = len(rounds.seen) >= len(self.release.hooks)
            partial = not came_all and not self.cache.told("last_norm")
            dropped = rounds.zero_grad()
        if self.released and not self.groups.options.optimizer_accumulation:
            with torch.no_grad():
                self.end_round(dropped, partial)

    def end_release(self):
        """Goes back to ordinary steps."""
        self.release.remove()
        if self.released:
            self.end_round()

    def restart(self):
        """Forgets the round."""
        self.released = set()

    # ---- Micro-batches that go into the states ---------------------------------------------------

    def restore(self, pending):
        """Sets the pending parameters."""
        self.pending = pending

    def _pending_after(self, params, micro):
        """Returns the parameters that will be pending once _note_taken() has been called."""
        if micro:
            return list(dict.fromkeys([*self.pending, *params]))
        gone = set(params)
        return [p for p in self.pending if p not in gone]

    def numbers_of(self, pending):
        """Returns the numbers of pending parameters, which files keep."""
        numbers = {p: i for i, p in enumerate(self.groups.params())}
        return [numbers[p] for p in pending if p in numbers]

    def _note_taken(self, params, micro):
        """Notes that `params` have taken a micro-batch or, without `micro`, an update of their
        weights."""
        if micro:
            self.pending.update(dict.fromkeys(params, True))
        elif self.pending:
            for p in params:
                self.pending.pop(p, None)

    def _give_zeros(self, given):
        """Gives a gradient of zeros to each pending parameter that has no gradient now, so that its
        weight is updated as well. Returns these parameters.

        `given` holds the weights and gradients of a compiled step by parameter. If it is set, the
        zeros go there and the returned list is empty.
        """
        if not self.pending or self.groups.options.optimizer_accumulation:
            return []
        members = set(self.groups.params())
        waiting = [
            p
            for p in self.pending
            if p in members
            and (self.placement.gradient_of(p) is None if given is None else p not in given)
        ]
        for p in waiting:
            if given is None:
                p.grad = self._zeros_for(p)
            else:
                given[p] = p, self._zeros_for(p)
        return waiting if given is None else []

    def _zeros_for(self, p):
        """Returns a gradient of zeros in the dtype of the parameter's earlier gradients."""
        engine = self.cache.engine
        m = engine and engine.member(p)
        dtype = stored_dtype(m.gradient) if m else p.dtype
        return torch.zeros_like(p, dtype=dtype, memory_format=torch.contiguous_format)
