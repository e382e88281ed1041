"""The engine of an optimizer: built when it is needed, kept while it fits, destroyed when anything
has changed. What came of its steps: counts, and steps that were refused."""

from operator import is_

from .._library import abi, calls
from .._library.abi import NONFINITE
from .._states.store import StoredState
from .._states.watch import version
from .._tensors import devices
from .._tensors.parameters import PLAIN, check_parameter
from .._tensors.sharding import local, stored
from .._tensors.torch_public import warn
from .engine import Engine, formats_of


class EngineCache:
    """Keeps the engine of an optimizer.

    engine          the engine of the last steps, or None
    flat, indices   all parameters, and their numbers in the engine (-1: not in the engine)
    store           the file of the states, or None
    scaled          True if a GradScaler on a GPU gave the scale of the last step. It knows itself
                    whether that was refused
    """

    def __init__(self, parts):
        self.groups, self.names, self.placement = parts.groups, parts.names, parts.placement
        self.residuals = parts.residuals
        self.engine = self.store = None
        self.flat, self.indices = [], []
        self.scaled = self._warned = False

    # ---- Building --------------------------------------------------------------------------------

    def build(self, also=None, decides=True):
        """Builds a new engine for every parameter that has states or a gradient. `also` adds
        parameters: it holds gradients by parameter. `decides` is that of Residuals.notice()."""
        also = also or {}
        self.groups.options.before_build(self.groups, also)
        self.residuals.notice(decides=decides)
        self.drop()
        flat, wanted, seen, state = [], [], set(), self.groups.state
        for g, i, p in self.groups.members():
            flat.append(p)
            if id(p) in seen:
                continue
            seen.add(id(p))
            grad = also.get(p)
            if grad is None:
                grad = self.placement.gradient_of(p)
            if self.store is not None:
                if not self.store.has(g, i, p):
                    continue
            elif (
                grad is None
                and p not in state
                and p not in also
                and not (self.groups.options.gradient_release and p.requires_grad)
            ):
                if p.requires_grad and devices.of(stored(p)).type == "meta":
                    self._refuse_meta(self.names.of(g, i))
                continue
            name = self.names.of(g, i)
            check_parameter(p, name)
            self.placement.check_device(p, name)
            gradient = (
                PLAIN[p.dtype] if grad is None else self.placement.check_gradient(p, grad, name)
            )
            wanted.append((g, i, p, gradient))
        wanted, meant = self.placement.describe(wanted)
        engine = Engine(self.groups, self.placement.divide(wanted), meant, self.store)
        self._refresh(engine, self.groups.settings())
        self.residuals.built(engine)
        self.flat = flat
        self.indices = [engine.index_of.get(p, -1) for p in flat]
        self.engine = engine
        self.placement.built(flat)
        return engine

    @staticmethod
    def _refuse_meta(name):
        """Raises ValueError for a parameter that trains and never has a gradient."""
        raise ValueError(
            f"halfstep: parameter {name!r} is on meta and never has a gradient, because the model"
            " computes with other tensors, which to_empty(), load_state_dict(assign=True) or hooks"
            " such as those of Accelerate's cpu_offload() have put there. Make the optimizer"
            " afterwards, of the parameters that the model has then"
        )

    def _refresh(self, engine, settings):
        """Gives the engine the current options. Returns False if one of them cannot change once
        states exist, so that a new engine is needed."""
        groups = self.groups.param_groups
        engine.take_told(groups)
        self.groups.check_rates()
        for entry, group in engine.changed(groups):
            on_gpu = entry.take_lr(group["lr"])
            if not on_gpu:
                self.groups.options.check_reference(group)
            options = self.groups.options.values({**group, "lr": 0.0} if on_gpu else group)
            if on_gpu:
                del options["lr"]
            if not entry.take(options):
                return False
        engine.take_settings(settings)
        return True

    def drop(self):
        """Destroys the engine after it has saved its counters in states and groups."""
        self.hear()
        engine, self.engine = self.engine, None
        if engine is not None:
            try:
                engine.save_counters(self.groups.state, self.groups.param_groups)
            finally:
                engine.destroy()

    def forget(self):
        """Destroys the engine without saving its counters."""
        self.placement.settle()
        if self.engine is not None:
            self.engine.destroy()
        self.engine = None
        self.flat, self.indices = [], []

    # ---- The engine as it is now -----------------------------------------------------------------

    def current(self, decides=True):
        """Returns the engine with the current hyper-parameters. Builds a new one if parameters,
        states or formats were changed."""
        engine = self.fitting()
        if engine is None:
            return self.build(decides=decides)
        if engine.asynchronous:
            engine.use_streams()
        return engine

    def fitting(self):
        """Returns the engine with the current hyper-parameters, or None if there is none or it does
        not fit any more."""
        self.placement.settle()
        engine = self.engine
        if engine is not None:
            flat, known, settings = self.groups.params(), self.flat, self.groups.settings()
            if (
                len(flat) != len(known)
                or not all(map(is_, flat, known))
                or self.groups.state is not engine.optimizer_state
                or engine.formats != formats_of(settings, self.groups)
                or not self._refresh(engine, settings)
            ):
                return None
        return engine

    def stale(self, m):
        """Returns True if a state of a member was replaced, moved, or written by anybody but the
        engine."""
        state = self.groups.state.get(m.p)
        return (
            state is None
            or self.store is not None
            and not isinstance(state, StoredState)
            or state.get("step") is not m.step
            or version(m.step) != m.versions["step"]
            or any(version(tensor) != m.versions[key] for key, tensor in m.numbers.items())
            or m.are_numbers_moved()
            or any(
                tensor() is None
                or state.get(key) is not tensor()
                or local(tensor()).data_ptr() != address
                for key, tensor, address in m.bound
            )
        )

    def with_member(self, p, grad, begun):
        """Returns the engine and the member of `p`. `grad` is the gradient of `p`. `begun`: a round
        of gradient release has begun, in which options do not change. Fails if the optimizer does
        not have `p`."""
        engine = self.engine
        if engine is None or engine.member(p) is None or not begun:
            engine = self.current()
        m = engine.member(p)
        if m is None or self.stale(m):
            engine = self.build({p: grad})
            m = engine.member(p)
            if m is None:
                self.groups.group_of(p)  # which says that it is no parameter
        if engine.asynchronous:
            engine.use_streams()
        return engine, m

    def member(self, p):
        """Returns the member of `p` after all submitted work is done. Fails if `p` has no
        states."""
        self.hear()
        m = self.current(decides=False).member(p)
        if m is None or self.stale(m):
            if p not in self.groups.state:
                self.groups.group_of(p)  # which says of another tensor that it is no parameter
                raise ValueError("halfstep: this parameter has no states yet; make a step first")
            m = self.build(decides=False).member(p)
        return m

    # ---- What came of steps ----------------------------------------------------------------------

    def hear(self):
        """Waits for the work that was submitted to GPUs, and acts on its verdict. Does not wait
        during a graph capture, which forbids it."""
        self.placement.settle()
        engine = self.engine
        if (
            engine is not None
            and engine.asynchronous
            and not any(
                part.asynchronous and devices.capturing(part.device) for part in engine.parts
            )
        ):
            code, handle = engine.hear()
            engine.tell(self.groups.param_groups)
            scaled, self.scaled = self.scaled, False
            if code == NONFINITE and not scaled:
                self.tell_refused(engine, handle)
        self.placement.heard()

    def told(self, key):
        """Returns a count that every group holds, after all submitted work is done."""
        self.hear()
        return self.groups[0].get(key, 0)

    def sync(self):
        """Writes what only the engine knows into states and groups. Destroys the engine if somebody
        else has written there."""
        self.hear()
        engine = self.engine
        if engine is not None and not engine.save_counters(
            self.groups.state, self.groups.param_groups
        ):
            self.engine = None  # the next engine reads what somebody else has written
            engine.destroy()

    def count_refused(self):
        """Counts a step that is refused before the engine is asked. The engine finds the count in
        the groups."""
        count = self.told("skipped_steps") + 1
        for group in self.groups:
            group["skipped_steps"] = count

    def tell_refused(self, engine, handle):
        """Warns of a step that was refused because a gradient is not finite. `handle` knows why; it
        may be None."""
        often = self.groups[0]["skipped_steps"]
        if self._warned and often not in (10, 100, 1000, 10000, 100000):
            return
        self._warned = True
        name = calls.nonfinite_tensor(handle)[0] if handle else ""
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
        else:
            what = abi.why(handle)
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
