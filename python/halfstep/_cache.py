"""The engine of an optimizer: built when it is needed, kept while it fits, thrown away when
anything has changed."""

from operator import is_

from . import _devices, _empty
from ._abi import NONFINITE
from ._device_parts import formats_of
from ._engine import Engine
from ._parameters import PLAIN, check_parameter
from ._sharding import local
from ._watch import version


class EngineCache:
    """Keeps the engine of an optimizer.

    engine          what the last steps were made with, or None
    flat, indices   all parameters and their numbers in the engine, -1 for those that it lacks
    empty           those without elements, which are in no engine
    """

    def __init__(self, groups, names, placement, residuals, refusals):
        self.groups, self.names, self.placement = groups, names, placement
        self.residuals, self.refusals = residuals, refusals
        self.engine = None
        self.flat, self.indices, self.empty = [], [], []

    # ---- Building --------------------------------------------------------------------------------

    def build(self, also=None, decides=True):
        """Builds the engine anew for every parameter that has states or a gradient, and for those
        of `also`, a dictionary of gradients by parameter. decides: as of Residuals.notice()."""
        also = also or {}
        self.groups.options.before_build(self.groups, also)
        self.residuals.notice(decides=decides)
        self.drop()
        flat, wanted, seen, state = [], [], set(), self.groups.state
        for g, i, p in self.groups.members():
            flat.append(p)
            if id(p) in seen or p.numel() == 0:
                continue
            seen.add(id(p))
            grad = also.get(p)
            if grad is None:
                grad = self.placement.gradient_of(p)
            if (
                grad is None
                and p not in state
                and p not in also
                and not (self.groups.options.gradient_release and p.requires_grad)
            ):
                continue
            name = self.names.of(g, i)
            check_parameter(p, name)
            self.placement.check_device(p, name)
            gradient = (
                PLAIN[p.dtype] if grad is None else self.placement.check_gradient(p, grad, name)
            )
            wanted.append((g, i, p, gradient))
        wanted, meant = self.placement.describe(wanted)
        settings, groups = self.groups.settings(), self.groups.param_groups
        engine = Engine(settings, groups, state, self.placement.divide(wanted), meant)
        self._refresh(engine)
        self.residuals.built(engine)
        self.flat = flat
        self.indices = [engine.index_of.get(p, -1) for p in flat]
        self.empty = [p for p in flat if p.numel() == 0]
        self.engine = engine
        self.placement.built(flat)
        return engine

    def _refresh(self, engine):
        """Gives the engine the options as they are now. False where they change what exists, so
        that it has to be built anew."""
        groups = self.groups.param_groups
        engine.take_told(groups)
        self.groups.check_rates()
        for entry, group in engine.changed(groups):
            on_gpu = entry.take_lr(group["lr"])
            if not on_gpu:
                self.groups.options.check_reference(group)
            hypers = self.groups.options.hypers({**group, "lr": 0.0} if on_gpu else group)
            if on_gpu:
                del hypers["lr"]
            if not entry.take(hypers, self.groups.options.choices(group)):
                return False
        engine.take_settings(self.groups.settings())
        return True

    def drop(self):
        """Lets go of the engine, which leaves its counters in states and groups."""
        self.hear()
        engine, self.engine = self.engine, None
        if engine is not None:
            try:
                engine.save_counters(self.groups.state, self.groups.param_groups)
            finally:
                engine.destroy()

    def forget(self):
        """Lets go of the engine and of all that it knows."""
        if self.engine is not None:
            self.engine.destroy()
        self.engine = None
        self.flat, self.indices, self.empty = [], [], []

    # ---- The engine as it is now -----------------------------------------------------------------

    def current(self, decides=True):
        """The engine, with hyper-parameters as they are now."""
        self.placement.settle()
        engine = self.engine
        if engine is not None:
            flat, known = self.groups.params(), self.flat
            if (
                len(flat) != len(known)
                or not all(map(is_, flat, known))
                or self.groups.state is not engine.optimizer_state
                or engine.formats != formats_of(self.groups.param_groups)
                or not self._refresh(engine)
            ):
                engine = None
            elif engine.asynchronous:
                engine.use_streams()
        return self.build(decides=decides) if engine is None else engine

    def stale(self, m):
        """Whether a state of a member is no longer where the engine thinks it is."""
        state = self.groups.state.get(m.p)
        if (
            state is None
            or state.get("step") is not m.step
            or version(m.step) != m.versions["step"]
        ):
            return True
        if any(version(tensor) != m.versions[key] for key, tensor in m.numbers.items()):
            return True
        for key, tensor, address in m.bound:
            if state.get(key) is not tensor or local(tensor).data_ptr() != address:
                return True
        return False

    def with_member(self, p, grad, begun):
        """The engine and the member of one parameter that has a gradient. begun: in a round of
        gradient release that has begun, in which options do not change."""
        engine = self.engine
        if engine is None or p not in engine.index_of or not begun:
            engine = self.current()
        if p not in engine.index_of:
            engine = self.build({p: grad})
            if p not in engine.index_of:
                raise ValueError("halfstep: a parameter that this optimizer does not have")
        m = engine.members[engine.index_of[p]]
        if self.stale(m):
            engine = self.build({p: grad})
            m = engine.members[engine.index_of[p]]
        if engine.asynchronous:
            engine.use_streams()
        return engine, m

    def member(self, p):
        """The member of a parameter that has states, once all that was submitted is done.
        Parameters without elements are not in the engine."""
        self.hear()
        engine = self.current(decides=False)
        if p not in engine.index_of or self.stale(engine.members[engine.index_of[p]]):
            if p not in self.groups.state:
                raise ValueError("halfstep: this parameter has no states yet")
            engine = self.build(decides=False)
        return engine.members[engine.index_of[p]]

    # ---- What came of steps ----------------------------------------------------------------------

    def hear(self):
        """Waits for what was submitted to a GPU, if anything was, and says what came of it. Nothing
        can be asked in a capture."""
        self.placement.settle()
        engine = self.engine
        if (
            engine is not None
            and engine.asynchronous
            and not any(
                part.asynchronous and _devices.capturing(part.device) for part in engine.parts
            )
        ):
            code, handle = engine.hear()
            engine.tell(self.groups.param_groups)
            self.refusals.heard(engine, handle, code == NONFINITE)
        self.placement.heard()

    def told(self, key):
        """A count that every group has, when all that was submitted is done."""
        self.hear()
        return self.groups[0].get(key, 0)

    def sync(self):
        """Brings states and groups up to date with what the engine alone knows."""
        self.hear()
        engine = self.engine
        if engine is not None and not engine.save_counters(
            self.groups.state, self.groups.param_groups
        ):
            self.engine = None  # what somebody else has written is read when it is built again
            engine.destroy()
        _empty.sync(self.groups, self.names)
