"""The C handles behind an optimizer: memory, counters, calls.

States are torch tensors and belong to `optimizer.state`; the handle only holds their addresses. It
is a cache that can be thrown away at any time between steps (`Engine.save_counters` first) and
built again from `state` and `param_groups`: that is how parameters that get their first gradient
late, loaded states, copies and changed formats all work.
"""

import ctypes
import sys
from ctypes import byref, c_double, c_void_p

import torch

from . import _abi, _convert, _devices, _layout, _ranks, _sharding
from ._abi import check, lib
from ._device_parts import DevicePart, Group, formats_of
from ._handles import create_handle
from ._members import Plain, declare
from ._parameters import check_parameter
from ._sharding import local
from ._streams import bind_streams
from ._watch import version

_HOST = torch.device("cpu")


class Engine:
    """The handles for some of an optimizer's parameters, one for each device. `members` says which,
    in the order of the handles' tensors. Nearly always there is one, `handle`; `parts` are all."""

    handle = None
    parts = ()

    def __init__(self, settings, groups, state, divided, meant):
        """groups, state: of the optimizer. divided: for each handle its device, what brings states
        there (streaming.py) or None, and a list of Wanted. meant: as for declare()."""
        self.optimizer_state = state
        self.rule = _abi.rules[settings.rule]
        #: keys of the numbers that the library writes into a state
        self.shown = (*_layout.COUNTERS, *self.rule.scalars)
        self.threads, self.settings = settings.threads, None
        self.formats = formats_of(groups)
        self.parts = []
        try:
            self.choices = {}
            self.clip_norm = self.gradient_scale = None
            self.members, self.groups = [], []
            for device, stage, some in divided or [(_HOST, None, [])]:
                part = DevicePart(create_handle(self.threads, settings.seed, device), device)
                self.parts.append(part)
                members, c_groups, _ = declare(part.handle, settings, some, meant)
                part.first, part.n, part.stage = len(self.members), len(members), stage
                if stage is not None:
                    stage.take(members, state)
                for m in members:
                    m.stage = stage
                self.members += members
                self.groups += [
                    Group(g, part.handle, device, c, groups) for (g, _), c in c_groups.items()
                ]
            self.handle = self.parts[0].handle
            self.asynchronous = any(part.asynchronous for part in self.parts)
            self.index_of = {m.p: i for i, m in enumerate(self.members)}
            # From here on nothing can go wrong but memory: states come into being all together.
            fresh = [
                (m, *_convert.create_state(self.rule, m, state, meant[m.group][0]))
                for m in self.members
            ]
            #: whose residual or error code is new here
            self.converted = [m.p for m, made, _, _ in fresh if "weight.extra" in made]
            for m, made, obsolete, weight in fresh:
                held = state[m.p]
                held.update(made)
                for key in obsolete & set(held):
                    del held[key]
                if weight is not None:
                    with torch.no_grad():
                        local(m.p).copy_(weight)
            for part in self.parts:
                if not any(m.streams for m in self.members[part.first : part.first + part.n]):
                    check(
                        lib.halfstep_allocate_states(part.handle), part.handle
                    )  # of no bytes: there is nothing to bind
            for m in self.members:
                self._bind(m, state[m.p])
                self._restore_counters(m, state[m.p])
            self.told = None
            self.take_told(groups)
        except BaseException:
            self.destroy()
            raise
        n = len(self.members)
        self.weights = (c_void_p * n)()
        self.gradients = (c_void_p * n)()
        self.weights_are_plain = False  # whether `weights` holds what `plain` says
        self.params = [m.p for m in self.members]
        #: those with a residual or error code, as keys
        self.guarded = {
            m.p: True for m in self.members if any(s.key == "weight.extra" for s in m.streams)
        }
        plain = n and all(
            m.dense and m.address and not m.offloaded and not _sharding.is_dtensor(m.p)
            for m in self.members
        )
        self.plain = Plain(self, state) if plain else None
        self.ranks = _ranks.Ranks(settings, groups, self)

    # ---- Building --------------------------------------------------------------------------------

    def _bind(self, m, state):
        where = (
            m.part.gather(m.streams, state)
            if m.gathered
            else state
            if m.stage is None
            else m.stage.addresses(m)
        )
        bind_streams(m.handle, m.index, m.streams, where)
        m.step = state["step"]
        grids = (s.name + _layout.GRID for s in m.streams if s.grid)
        m.bound = tuple(
            (key, state[key], local(state[key]).data_ptr())
            for key in (*(s.key for s in m.streams), *grids)
        )
        m.numbers = {key: state[key] for key in _layout.numbers_of(self.rule, m.streams)}
        m.versions = {
            "step": version(m.step),
            **{key: version(tensor) for key, tensor in m.numbers.items()},
        }

    def _restore_counters(self, m, state):
        steps = _layout.step_count(state, m.name)
        m.written = {key: _layout.take_number(state, key, m.name) for key in m.numbers}
        counts = _layout.agreed({key: m.written[key] for key in _layout.COUNTERS}, steps)
        check(
            lib.halfstep_set_counters(m.handle, m.index, byref(_abi.Counters.new(**counts))),
            m.handle,
        )
        check(lib.halfstep_bind_step(m.handle, m.index, m.step.data_ptr()), m.handle)
        for scalar in _layout.scalars_of(self.rule, m.streams):
            check(
                lib.halfstep_set_scalar(m.handle, m.index, scalar.encode(), m.written[scalar]),
                m.handle,
            )
        # A state dictionary that somebody keeps is current at any time, all of it: codes mean
        # nothing without their grid.
        self._bind_numbers(m)
        for s in m.streams:
            if s.grid:
                grid = state[s.name + _layout.GRID]
                check(lib.halfstep_bind_grid(m.handle, m.index, s.slot, grid.data_ptr()), m.handle)

    def _bind_numbers(self, m):
        """Has the library write its counters and numbers of a member where its state keeps them."""
        counters = (m.numbers[key].data_ptr() for key in _layout.COUNTERS)
        check(lib.halfstep_bind_counters(m.handle, m.index, *counters), m.handle)
        for scalar in self.rule.scalars:
            check(
                lib.halfstep_bind_scalar(
                    m.handle, m.index, scalar.encode(), m.numbers[scalar].data_ptr()
                ),
                m.handle,
            )

    # ---- Between steps ---------------------------------------------------------------------------

    def save_counters(self, states, groups):
        """Writes what the handle alone knows into the states and groups of the optimizer. What
        somebody else has written there since stays, and counts: False says that there was such, so
        that the handle has to be built anew."""
        if not self.handle:
            return True
        alone = True
        counters = _abi.Counters.new()
        value = c_double()
        for m in self.members:
            # Tensors that were replaced live until the library no longer writes to them.
            state, replaced, ours = states.get(m.p), [], True
            if not state:
                continue
            check(lib.halfstep_get_counters(m.handle, m.index, byref(counters)), m.handle)
            now = {key: getattr(counters, key) for key in _layout.COUNTERS}
            step = state.get("step")
            if step is not m.step or version(step) != m.versions["step"]:
                steps = _layout.whole(step)
                if (
                    steps is not None
                    and not _layout.same_count(now["state_steps"], steps)
                    and 0 <= steps < 2**63
                ):
                    alone = ours = False  # somebody's count; what else they wrote stands beside it
                    now["state_steps"] = now["full_steps"] = steps
            for scalar in _layout.scalars_of(self.rule, m.streams):
                check(
                    lib.halfstep_get_scalar(m.handle, m.index, scalar.encode(), byref(value)),
                    m.handle,
                )
                now[scalar] = value.value
            for key, tensor in m.numbers.items():
                held = state.get(key)
                if (
                    held is not tensor
                    and ours
                    and _layout.is_number(held, key)
                    and held.item() in (m.written[key], now.get(key))
                ):
                    replaced.append(tensor)
                    m.numbers[key], m.versions[key] = held, version(held)
                elif held is not tensor or version(held) != m.versions[key]:
                    alone = False
                    continue
                if key in now:
                    _layout.write(held, now[key])
                    m.written[key] = now[key]
            if replaced:
                self._bind_numbers(m)
        self.tell(groups)
        return alone

    def tell(self, groups):
        """Keeps the counts of the groups current, those of the optimizer in each of them."""
        self.take_told(groups)
        steps = ctypes.c_uint64()
        for group in self.groups:
            check(
                lib.halfstep_get_group_steps(group.handle, group.index, byref(steps)), group.handle
            )
            group.steps, of = int(steps.value), group.among(groups)
            if of is not None:
                of["group_steps"] = group.steps
        skipped = self.told[0]
        for part in self.parts:
            counted = int(lib.halfstep_skipped_steps(part.handle))
            skipped, part.counted = skipped + counted - part.counted, counted
        self.told = (skipped, float(lib.halfstep_gradient_norm(self.handle)))
        for group in groups:
            group["skipped_steps"], group["last_norm"] = self.told
        if self.rule.totals:
            self.ranks.tell_estimates(groups)

    def take_told(self, groups):
        """Counts of the groups that are other than tell() left them, as sharding wrappers and
        loaded groups bring them."""
        for group in self.groups:
            steps = (group.among(groups) or {}).get("group_steps", group.steps)
            if steps is not group.steps and steps != group.steps:
                _layout.check_told("group_steps", steps, group.place)
                check(lib.halfstep_set_group_steps(group.handle, group.index, steps), group.handle)
                group.steps = steps
        first = groups[0] if groups else {}
        told = tuple(
            first.get(key, value) for key, value in zip(_layout.TOLD[1:], self.told or (0, 0.0))
        )
        if told != self.told:
            for key, value in zip(_layout.TOLD[1:], told):
                _layout.check_told(key, value, 0)
            check(lib.halfstep_set_skipped_steps(self.handle, told[0]), self.handle)
            self.parts[0].counted = told[0]
            for part in self.parts:
                check(lib.halfstep_set_gradient_norm(part.handle, told[1]), part.handle)
            self.told = told

    def destroy(self):
        parts, self.parts, self.handle = self.parts, (), None
        for part in parts:
            lib.halfstep_destroy(part.handle)

    def __del__(self, exiting=sys.is_finalizing):
        # At exit modules, `sys` too, may be gone already; the process gives back its memory itself.
        if not exiting():
            self.destroy()

    def changed(self, groups):
        """The groups of the handles whose hyper-parameters have to be set again, each with the
        optimizer's."""
        for entry in self.groups:
            if entry.differs(groups[entry.place], self.rule.totals):
                yield entry, groups[entry.place]

    def take_settings(self, settings):
        """Options of the optimizer as they are now."""
        if settings == self.settings:
            return
        if self.clip_norm != settings.clip_norm:
            for part in self.parts:
                check(
                    lib.halfstep_set_hyper(
                        part.handle, _abi.ALL_GROUPS, b"clip_norm", float(settings.clip_norm or 0.0)
                    ),
                    part.handle,
                )
            self.clip_norm = settings.clip_norm
        for key in ("scan", "clip", "generator"):
            value = getattr(settings, key)
            if value is not None and value != self.choices.get(key):
                for part in self.parts:
                    check(
                        lib.halfstep_set_choice(
                            part.handle, _abi.ALL_GROUPS, key.encode(), value.encode()
                        ),
                        part.handle,
                    )
                self.choices[key] = value
        if settings.threads != self.threads:
            for part in self.parts:
                check(lib.halfstep_set_threads(part.handle, settings.threads), part.handle)
            self.threads = settings.threads
        self.settings = settings

    def set_gradient_scale(self, scale):
        if self.gradient_scale != scale:
            for part in self.parts:
                if part.scale is not None:
                    check(
                        lib.halfstep_bind_hyper(
                            part.handle, _abi.ALL_GROUPS, b"gradient_scale", None
                        ),
                        part.handle,
                    )
                    part.scale = None
                check(
                    lib.halfstep_set_hyper(part.handle, _abi.ALL_GROUPS, b"gradient_scale", scale),
                    part.handle,
                )
            self.gradient_scale = scale

    def bind_gradient_scale(self, scale, found_inf):
        """What a GradScaler left on the GPU, read there: gradients are divided by `scale`, and the
        step changes nothing where `found_inf` is not 0. Either may be None."""
        for part in self.parts:
            if part.scale is None:
                part.scale = _devices.zeros((), torch.float64, part.device)
                check(
                    lib.halfstep_bind_hyper(
                        part.handle, _abi.ALL_GROUPS, b"gradient_scale", part.scale.data_ptr()
                    ),
                    part.handle,
                )
            value = (
                torch.ones((), dtype=torch.float64, device="cpu")
                if scale is None
                else scale.double().reciprocal()
            )
            if found_inf is not None:
                value = torch.where(found_inf.to(value.device) != 0, torch.inf, value)
            part.scale.copy_(value.reshape(()))
        self.gradient_scale = None

    # ---- Matrices of which parts are kept --------------------------------------------------------

    def gather(self, m, state):
        """Binds the whole of the states of a member that is gathered, until the next time."""
        m.full = m.part.gather(m.streams, state)
        bind_streams(m.handle, m.index, m.streams, m.full)

    def scatter(self, m, state, weight=None):
        """The way back, also of the weight."""
        for s in m.streams:
            m.part.scatter(m.full[s.key], state[s.key])
        if weight is not None:
            m.part.scatter(weight, m.p.detach())
        m.full = None

    # ---- Calls -----------------------------------------------------------------------------------

    def use_streams(self):
        """Works on the streams that are torch's current ones."""
        for part in self.parts:
            if part.asynchronous:
                stream = _devices.stream(part.device)
                if stream != part.stream:
                    check(lib.halfstep_set_stream(part.handle, stream), part.handle)
                    part.stream = stream

    def hear(self):
        """Waits for everything that was submitted: NONFINITE if some of it was refused, with the
        handle that knows which."""
        code, handle = _abi.OK, self.handle
        for part in self.parts:
            if part.asynchronous:
                found = lib.halfstep_synchronize(part.handle)
                if found == _abi.NONFINITE:
                    code, handle = found, part.handle
                else:
                    check(found, part.handle)
        return code, handle

    def keep_until_read(self, tensors):
        """Keeps memory that the caller lets go of until the streams that may differ from those it
        was made on have read it."""
        for part in self.parts:
            if (
                part.asynchronous
                and part.stream is not None
                and not _devices.capturing(part.device)
            ):
                _devices.record([t for t in tensors if _devices.of(t) == part.device], part.device)

    def step(self, micro=False):
        """One step of everything, or a micro-batch, by the pointers there: its code and, where it
        is NONFINITE, the handle that knows why. Several handles take a wait for each, so that there
        is one verdict and one norm for all of them.
        """
        if self.ranks.needed or len(self.parts) > 1:
            return self.ranks.step(
                None if micro else self.weights,
                self.gradients,
                micro,
                self.choices.get("scan", "scan") == "scan",
            )
        with self.parts[0].states():
            if micro:
                return lib.halfstep_accumulate_states(self.handle, self.gradients), self.handle
            return lib.halfstep_step(self.handle, self.weights, self.gradients), self.handle

    def step_one(self, m, weight, gradient, micro):
        """An update of one member, or a micro-batch: its code."""
        with m.states():
            if self.ranks.divided:
                return self.ranks.step_one(m.p, None if micro else weight, gradient, micro)
            if micro:
                return lib.halfstep_accumulate_states_tensor(m.handle, m.index, gradient)
            return lib.halfstep_step_tensor(m.handle, m.index, weight, gradient)

    def end_round(self, clipped):
        """The end of a round of gradient release: its code."""
        if clipped and (self.ranks.needed or len(self.parts) > 1):
            return self.ranks.end_round()
        for part in self.parts:
            check(lib.halfstep_end_round(part.handle), part.handle)
        return _abi.OK

    def recheck_weight(self, m):
        """The weight lies elsewhere than before. False where that is on another device, which takes
        another handle."""
        check_parameter(m.p, m.name)
        p = local(m.p)
        if not m.offloaded:
            _devices.check(p, m.name)
        if _devices.of(p) != m.lies:
            return False
        if tuple(p.shape) != m.shape or p.dtype != m.dtype:
            raise ValueError(
                f"halfstep: parameter {m.name!r} was {m.dtype} of shape {m.shape} when its states"
                f" were made and is {p.dtype} of shape {tuple(p.shape)} now"
            )
        m.strides, m.dense, m.address = p.stride(), _devices.is_plain(p), p.data_ptr()
        return True
