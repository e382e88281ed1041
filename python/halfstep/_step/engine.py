"""The C handles behind an optimizer: memory, counters, calls.

States are torch tensors and belong to `optimizer.state`; a handle only holds their addresses. It is
a cache: it can be destroyed at any time between steps, after `Engine.save_counters`, and built
again from `state` and `param_groups`. This is how late first gradients, loaded states, copies and
changed formats work.
"""

import weakref
from ctypes import c_void_p

import torch

from .._library import abi, calls
from .._library.abi import check, invoke, lib
from .._library.calls import GRID
from .._ranks import agreement
from .._settings.groups import check_told
from .._states import convert, layout
from .._states.members import Plain, declare
from .._states.planes import bind_planes
from .._states.watch import version
from .._tensors import devices, sharding
from .._tensors.parameters import check_parameter
from .._tensors.sharding import local, stored
from .device_parts import DevicePart, Group, formats_of


class Engine:
    """The handles for some of an optimizer's parameters, one for each device. `members` lists these
    parameters in the order of the handles' tensors. `parts` are all handles; `handle` is the first,
    and nearly always the only one."""

    def __init__(self, settings, groups, state, divided, meant, store=None):
        """`groups` and `state` are the optimizer's. `divided` has three items for each handle: its
        device, the stage that brings states there (streaming.py, ownership.py) or None, and a list
        of Wanted.
        `meant` is that of declare(). `store` is the file of the states, or None."""
        self.optimizer_state, self.store = state, store
        #: the row of the optimizer's own rule; a member's may be another
        self.rule = abi.rules[settings.rule]
        self.settings = None
        self.formats = formats_of(settings, groups)
        self.parts, self.members, self.groups = [], [], []
        for device, stage, some in divided or [(devices.HOST, None, [])]:
            part = DevicePart(settings.threads, settings.seed, device)
            self.parts.append(part)
            members, c_groups, _ = declare(part, settings, some, meant, stage)
            part.first, part.n, part.stage = len(self.members), len(members), stage
            if stage is not None:
                stage.take(members, state)
            for m in members:
                m.stage = stage
            self.members += members
            self.groups += [Group(g, part, c, groups) for (g, _), c in c_groups.items()]
        self.handle = self.parts[0]
        self.asynchronous = any(part.asynchronous for part in self.parts)
        self.index_of = {m.p: i for i, m in enumerate(self.members)}
        #: parameters whose residual or error code was made here
        self.converted = (
            self._create(state, meant) if store is None else store.attach(self, state, meant)
        )
        for m in self.members:
            self._bind(m, state[m.p])
            self._restore_counters(m, state[m.p])
        self.told = None
        self.take_told(groups)
        n = len(self.members)
        self.weights = (c_void_p * n)()
        self.gradients = (c_void_p * n)()
        self.weights_are_plain = False  # True if `weights` holds the addresses of `plain`
        self.params = [m.p for m in self.members]
        #: parameters with a residual or error code, as keys
        self.guarded = {
            m.p: True for m in self.members if any(s.key == "weight.extra" for s in m.planes)
        }
        self.may_be_plain = n and all(
            m.dense and m.address and not (m.offloaded or m.gathered or sharding.is_dtensor(m.p))
            for m in self.members
        )
        self.plain = Plain(self, state) if self.may_be_plain else None
        self.ranks = agreement.Ranks(settings, groups, self)

    # ---- Building --------------------------------------------------------------------------------

    def _create(self, state, meant):
        """Makes what states lack. Returns the parameters whose residual or error code was made."""
        # From here on only memory can run out. All states are made before any of them is stored.
        fresh = [(m, *convert.create_state(m, state, meant[m.group])) for m in self.members]
        for m, made, obsolete, weight in fresh:
            held = state[m.p]
            held.update(made)
            for key in obsolete & set(held):
                del held[key]
            if type(held) is dict and any(s.part == ".codes" for s in m.planes):
                state[m.p] = layout.Coded(held)
            if weight is not None:
                with torch.no_grad():
                    stored(m.p).copy_(weight)
        for part in self.parts:
            if not any(m.planes for m in self.members[part.first : part.first + part.n]):
                # No bytes, because there is nothing to bind.
                invoke(lib.halfstep_allocate_states, part)
        return [m.p for m, made, _, _ in fresh if "weight.extra" in made]

    def _bind(self, m, state):
        planes = ()
        if self.store is None:
            planes = m.planes
            where = state if m.stage is None else m.stage.addresses(m)
            bind_planes(m.handle, m.index, planes, where)
        m.step = state["step"]
        grids = (s.name + GRID for s in m.planes if s.grid)
        m.bound = tuple(
            (key, weakref.ref(state[key]), local(state[key]).data_ptr())
            for key in (*(s.key for s in planes), *grids)
        )
        m.numbers = {key: state[key] for key in layout.numbers_of(m.rule, m.planes)}
        m.versions = {
            "step": version(m.step),
            **{key: version(tensor) for key, tensor in m.numbers.items()},
        }

    def _restore_counters(self, m, state):
        steps = layout.step_count(state, m.name)
        m.written = {key: layout.take_number(state, key, m.name) for key in m.numbers}
        counts = layout.agreed({key: m.written[key] for key in layout.COUNTERS}, steps)
        record = abi.Record.new(kind=abi.RECORD_TENSOR, index=m.index, **counts)
        for scalar in layout.scalars_of(m.rule, m.planes):
            calls.set_number(record, m.rule, scalar, m.written[scalar])
        calls.restore(m.handle, record)
        # The library keeps all tensors of a state current, because somebody may keep the state
        # dictionary. This includes the grids: codes mean nothing without their grid.
        self._bind_numbers(m)

    def _bind_numbers(self, m):
        calls.bind(m.handle, m.index, m.rule, m.planes, m.step, m.numbers)
        m.note_places()

    def member(self, p):
        """Returns the member of a parameter, or None."""
        i = self.index_of.get(p)
        return None if i is None else self.members[i]

    # ---- Between steps ---------------------------------------------------------------------------

    def save_counters(self, states, groups):
        """Writes what only the handles know into the optimizer's states and groups. Keeps what
        somebody else has written there since. Returns False if there was such, because new handles
        are needed then."""
        if not self.handle:
            return True
        alone = True
        for m in self.members:
            # Tensors that were replaced live until the library no longer writes to them.
            state, replaced, ours = states.get(m.p), [], True
            if not state:
                continue
            record = calls.read(m.handle, abi.RECORD_TENSOR, m.index)
            now = {key: getattr(record, key) for key in layout.COUNTERS}
            step = state.get("step")
            if step is not m.step or version(step) != m.versions["step"]:
                steps = layout.whole(step)
                if abi.is_count(steps) and not layout.same_count(now["state_steps"], steps):
                    alone = ours = False  # somebody set the count, and maybe other numbers
                    now["state_steps"] = now["full_steps"] = steps
            for scalar in layout.scalars_of(m.rule, m.planes):
                now[scalar] = calls.number(record, m.rule, scalar)
            for key, tensor in m.numbers.items():
                held = state.get(key)
                if (
                    held is not tensor
                    and ours
                    and layout.is_number(held, key)
                    and held.item() in (m.written[key], now.get(key))
                ):
                    replaced.append(tensor)
                    m.numbers[key], m.versions[key] = held, version(held)
                elif held is not tensor or version(held) != m.versions[key]:
                    alone = False
                    continue
                if key in now:
                    layout.write(held, now[key])
                    m.written[key] = now[key]
            if m.are_numbers_moved():
                if ours and step is m.step:
                    step.detach().fill_(now["state_steps"])
                alone = False
            elif replaced:
                self._bind_numbers(m)
        self.tell(groups)
        return alone

    def tell(self, groups):
        """Writes each group's step count, and the optimizer's counts, into the groups."""
        self.take_told(groups)
        # What is noted here comes last. If Ctrl-C comes before it, the groups count.
        for group in self.groups:
            steps, of = group.count_steps(), group.among(groups)
            if of is not None:
                of["group_steps"] = steps
            group.steps = steps
        counted = [int(lib.halfstep_skipped_steps(part)) for part in self.parts]
        skipped = self.told[0] + sum(counted) - sum(part.counted for part in self.parts)
        told = (skipped, float(lib.halfstep_gradient_norm(self.handle)))
        for group in groups:
            group["skipped_steps"], group["last_norm"] = told
        for part, now in zip(self.parts, counted):
            part.counted = now
        self.told = told
        if self.rule.totals:
            self.ranks.tell_estimates(groups)

    def take_told(self, groups):
        """Takes counts of the groups that differ from those that tell() wrote. Sharding wrappers
        and loaded groups bring such counts."""
        for group in self.groups:
            steps = (group.among(groups) or {}).get("group_steps", group.steps)
            if steps is not group.steps and steps != group.steps:
                check_told("group_steps", steps, group.place)
                calls.change(group.handle, abi.RECORD_GROUP, group.index, steps=steps)
                group.steps = steps
        first = groups[0] if groups else {}
        skipped, norm = self.told or (0, 0.0)
        told = first.get("skipped_steps", skipped), first.get("last_norm", norm)
        if told != self.told:
            for key, value in zip(("skipped_steps", "last_norm"), told):
                check_told(key, value, 0)
            self.parts[0].counted = told[0]
            for part in self.parts:
                counts = {"skipped_steps": part.counted, "gradient_norm": told[1]}
                calls.change(part, abi.RECORD_OPTIMIZER, **counts)
            self.told = told

    def let_go(self):
        """Keeps no state alive beside the optimizer, so that the memory of states that somebody
        moves away is freed. The next step looks closer."""
        self.plain, self.weights_are_plain = None, False

    def destroy(self):
        """Destroys the handles."""
        parts, self.parts, self.handle = self.parts, (), None
        for part in parts:
            if self.store is None or self.store.part is not part:
                part.close()

    def changed(self, groups):
        """Yields the groups of the handles whose hyper-parameters have to be set again, each with
        the optimizer's group."""
        for entry in self.groups:
            if entry.differs(groups[entry.place], self.rule.totals):
                yield entry, groups[entry.place]

    def take_settings(self, settings):
        """Gives the handles the optimizer's current settings."""
        if settings == self.settings:
            return
        options = {"clip_norm": float(settings.clip_norm or 0.0)}
        for key in ("scan", "clip", "generator"):
            if getattr(settings, key) is not None:
                options[key] = getattr(settings, key)
        for part in self.parts:
            part.set(**options)
            part.work(settings.threads)
        self.settings = settings

    def set_gradient_scale(self, scale):
        """Sets the factor of all gradients."""
        for part in self.parts:
            if part.scale is not None:
                invoke(lib.halfstep_bind_hyper, part, abi.ALL_GROUPS, b"gradient_scale", None)
                part.scale = None
            if part.options.get("gradient_scale") != scale:
                part.set(gradient_scale=scale)

    def bind_gradient_scale(self, scale, found_inf):
        """Makes the GPU read what a GradScaler left there. Gradients are divided by `scale`, and
        the step changes nothing if `found_inf` is not 0. Either may be None."""
        for part in self.parts:
            if part.scale is None:
                part.scale = devices.zeros((), torch.float64, part.device)
                part.options.pop("gradient_scale", None)
                address = part.scale.data_ptr()
                invoke(lib.halfstep_bind_hyper, part, abi.ALL_GROUPS, b"gradient_scale", address)
            value = (
                torch.ones((), dtype=torch.float64, device="cpu")
                if scale is None
                else scale.double().reciprocal()
            )
            if found_inf is not None:
                value = torch.where(found_inf.to(value.device) != 0, torch.inf, value)
            part.scale.copy_(value.reshape(()))

    # ---- Calls -----------------------------------------------------------------------------------

    def use_streams(self):
        """Makes the handles work on torch's current streams."""
        for part in self.parts:
            part.use_stream()

    def hear(self):
        """Waits for all submitted work. Returns NONFINITE if some of it was refused, and the handle
        that knows the tensor."""
        code, handle = abi.OK, self.handle
        for part in self.parts:
            if part.asynchronous:
                found = lib.halfstep_synchronize(part)
                if found == abi.NONFINITE:
                    code, handle = found, part
                else:
                    check(found, part)
        return code, handle

    def keep_until_read(self, tensors):
        """Keeps memory that the caller frees until the handles' streams have read it. Such a stream
        may differ from the one that the memory was made on."""
        for part in self.parts:
            if part.asynchronous and part.stream is not None and not devices.capturing(part.device):
                devices.record([t for t in tensors if devices.of(t) == part.device], part.device)

    def step(self, micro=False, ahead=None):
        """Makes a step of all members, or a micro-batch, from the arrays of pointers. `ahead` is an
        array of Ahead, or None. Returns its code and, if that is NONFINITE, the handle that knows
        why.

        Several handles are each waited for, so that there is one verdict and one norm for all of
        them.
        """
        if self.ranks.needed or len(self.parts) > 1:
            return self.ranks.step(
                None if micro else self.weights,
                self.gradients,
                micro,
                self.handle.options.get("scan", "scan") == "scan",
                ahead,
            )
        if not self.members:
            return abi.OK, self.handle
        with self.parts[0].states():
            if micro:
                call = calls.all_tensors(None, self.gradients, True)
                return calls.run(self.handle, call), self.handle
            if ahead is not None:
                call = calls.all_tensors(self.weights, self.gradients, ahead=ahead)
                return calls.run(self.handle, call), self.handle
            return lib.halfstep_step(self.handle, self.weights, self.gradients), self.handle

    def step_one(self, m, weight, gradient, micro):
        """Updates one member, or adds a micro-batch to its states. Returns the code."""
        if m.gathered:
            (gradient,) = m.stage.gather_gradients([m])
        with m.states():
            if self.ranks.divided:
                code = self.ranks.step_one(m, None if micro else weight, gradient, micro)
            else:
                code = calls.run(m.handle, calls.one_tensor(m.index, weight, gradient, micro))
        if m.gathered:
            m.stage.end()
        return code

    def end_round(self, clipped, weights=None):
        """Ends a round of gradient release. Returns the code. `weights` are for states in a
        file."""
        if clipped and (self.ranks.needed or len(self.parts) > 1):
            return self.ranks.end_round()
        for part in self.parts:
            if part.n:
                self.check(calls.run(part, calls.end_of_round(weights=weights)), part)
        return abi.OK

    def check(self, code, handle):
        """Raises the error of a call about a handle."""
        (check if self.store is None else self.store.check)(code, handle)

    def recheck_weight(self, m):
        """Takes the new address of a weight. Returns False if the weight is on another device or
        in another format of 8 bits, which needs another handle. Fails if its shape or dtype has
        changed."""
        check_parameter(m.p, m.name)
        p, held = local(m.p), stored(m.p)
        if not m.offloaded:
            devices.check(held, m.name)
        if devices.of(held) != m.lies or (held is not p and p.format != m.format):
            return False
        if tuple(p.shape) != m.shape or p.dtype != m.dtype:
            raise ValueError(
                f"halfstep: parameter {m.name!r} was {m.dtype} of shape {m.shape} when its states"
                f" were made and is {p.dtype} of shape {tuple(p.shape)} now;"
                " convert the model before the optimizer is made"
            )
        m.strides, m.dense, m.address = held.stride(), devices.is_plain(held), held.data_ptr()
        return True
