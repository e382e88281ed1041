"""The C handles behind an optimizer: memory, counters, calls.

States are torch tensors and belong to `optimizer.state`; a handle only holds their addresses. It is
a cache: it can be destroyed at any time between steps, after `Engine.save_counters`, and built
again from `state` and `param_groups`. This is how late first gradients, loaded states, copies and
changed formats work.
"""

import ctypes
from ctypes import c_void_p
from operator import attrgetter, is_

import torch

from .._library import abi, calls
from .._library.abi import check, invoke, lib
from .._ranks import agreement
from .._settings.groups import NO_OPTIONS, check_told
from .._states import convert, layout
from .._states.handles import Handle, set_option
from .._states.members import NOTHING, declare
from .._tensors import devices, sharding
from .._tensors.matrices import how_of
from .._tensors.sharding import stored
from .gather import Plain


def formats_of(settings, groups):
    """Returns the rule of each group, the formats that it asks for, and what it takes for matrices.
    A handle is made for these."""
    return [
        (rule, group.get("weights"), group.get("states"), how_of(group))
        for rule, group in zip(settings.rules, groups)
    ]


class HandleGroup:
    """A group of a handle. `place` is the place of the optimizer's group, `index` the index in the
    handle, and `count` the number of the optimizer's groups."""

    def __init__(self, place, handle, index, groups):
        self.place, self.index, self.of, self.count = place, index, groups[place], len(groups)
        self.handle = handle
        # values: the optimizer's group when hyper-parameters were last set, or None to set them
        # again
        # seen: the group as differs() found it
        # given: the hyper-parameters and choices that were set
        # steps: the steps that were last told
        self.values, self.seen, self.given, self.steps = None, None, {}, None
        #: the tensor from which a GPU reads lr, or None
        self.lr = None
        #: made once, because it is read at every step
        self.record = abi.Record.new(kind=abi.RECORD_GROUP, index=index)

    def count_steps(self):
        """Returns the number of steps that the library has counted."""
        invoke(lib.halfstep_get_record, self.handle, ctypes.byref(self.record))
        return self.record.steps

    def take_lr(self, lr):
        """Has the GPU read an lr that is a tensor there: at each step without a wait, and anew at
        every replay of a graph. Returns False for any other lr, which is not taken."""
        if (
            not isinstance(lr, torch.Tensor)
            or not devices.is_asynchronous(devices.of(lr))
            or not self.handle.asynchronous
        ):
            if self.lr is not None:
                self._bind_lr(None)
                self.lr = None
            return False
        if self.lr is None:
            self.lr = devices.zeros((), torch.float64, self.handle.device)
            self._bind_lr(self.lr.data_ptr())
            self.given.pop("lr", None)
        self.lr.copy_(lr.reshape(()))
        return True

    def _bind_lr(self, address):
        invoke(lib.halfstep_bind_hyper, self.handle, self.index, b"lr", address)

    def differs(self, group, totals):
        """Returns True if the optimizer's group holds other values than were last set. `totals`:
        the rule computes `d`, so `d` is not an option.

        Numbers are replaced, never changed, so the same object means the same number. A group that
        holds tensors, lists or dictionaries is always read again.
        """
        values = [
            v for key, v in group.items() if key not in NO_OPTIONS and not (key == "d" and totals)
        ]
        if (
            self.values is not None
            and len(self.values) == len(values)
            and all(map(is_, values, self.values))
        ):
            return False
        again = any(isinstance(v, (torch.Tensor, list, dict)) for v in values)
        self.values, self.seen = None, None if again else values
        return True

    def take(self, options):
        """Sets hyper-parameters and choices of the group. Returns False if one of them cannot
        change once states exist, so that a new handle is needed."""
        for name, value in options.items():
            if self.given.get(name) != value:
                try:
                    set_option(self.handle, self.index, name, value)
                except abi.HalfstepError as error:
                    if error.code == abi.ERROR_ORDER:
                        return False
                    raise
        self.given, self.values = options, self.seen
        return True

    def among(self, groups):
        """Returns the optimizer's group at its current place. If it was replaced and the number of
        groups is the same, returns the group at its old place. Otherwise returns None."""
        if self.place < len(groups) and groups[self.place] is self.of:
            return self.of
        return next(
            (group for group in groups if group is self.of),
            groups[self.place] if len(groups) == self.count else None,
        )


class DeviceHandle(Handle):
    """A handle for the `n` members from number `first` on, all on one device. Its arrays of
    pointers are slices of the engine's.

    stage      brings states to the device for a step if they are kept elsewhere (streaming.py), or
               None
    scale      the tensor from which a GPU reads the scale of gradients, or None
    counted    the skipped steps of this handle that Engine.tell() has counted
    """

    first = n = counted = 0
    stage = scale = None

    def slice(self, pointers):
        """Returns the part of this handle in an array for all members, or None if there is no
        array."""
        if pointers is None:
            return None
        kind = type(pointers)._type_
        return (kind * self.n).from_buffer(pointers, self.first * ctypes.sizeof(kind))

    def results(self, ahead):
        """Returns slice() of the results of steps in advance, which only the processor makes."""
        return None if self.asynchronous else self.slice(ahead)

    def states(self, needed=True, written=True):
        """Returns a context in which the states are where the handle expects them. `written`: the
        handle writes them, so they are kept afterwards. `needed`: False if the call does not use
        states."""
        return self.stage.states(written=written) if self.stage is not None and needed else NOTHING


class Engine:
    """The handles for some of an optimizer's parameters, one for each device. `members` lists these
    parameters in the order of the handles' tensors. `parts` are all handles; `handle` is the first,
    and nearly always the only one."""

    def __init__(self, groups, divided, meant, store=None):
        """`groups` are the optimizer's Groups. `divided` has three items for each handle: its
        device, the stage that brings states there (streams.py, ownership.py) or None, and a list
        of Wanted.
        `meant` is that of declare(). `store` is the file of the states, or None."""
        settings, state, groups = groups.settings(), groups.state, groups.param_groups
        self.optimizer_state, self.store = state, store
        #: the row of the optimizer's own rule; a member's may be another
        self.rule = abi.rules[settings.rule]
        self.settings = None
        self.formats = formats_of(settings, groups)
        self.parts, self.members, self.groups = [], [], []
        for device, stage, some in divided or [(devices.HOST, None, [])]:
            part = DeviceHandle(settings.threads, settings.seed, device)
            self.parts.append(part)
            members, c_groups, _ = declare(part, settings, some, meant, stage)
            part.first, part.n, part.stage = len(self.members), len(members), stage
            if stage is not None:
                stage.take(members, state)
            for m in members:
                m.stage = stage
            self.members += members
            self.groups += [HandleGroup(g, part, c, groups) for (g, _), c in c_groups.items()]
        self.handle = self.parts[0]
        self.asynchronous = any(part.asynchronous for part in self.parts)
        self.index_of = {m.p: i for i, m in enumerate(self.members)}
        #: parameters whose residual or error code was made here
        self.converted = (
            self._create(state, meant) if store is None else store.attach(self, state, meant)
        )
        for m in self.members:
            m.bind(state[m.p], in_file=store is not None)
            m.restore_counters(state[m.p])
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
            if type(held) is dict and any(s.end == ".codes" for s in m.planes):
                state[m.p] = layout.Coded(held)
            if weight is not None:
                with torch.no_grad():
                    stored(m.p).copy_(weight)
        for part in self.parts:
            if not any(m.planes for m in self.members[part.first : part.first + part.n]):
                # No bytes, because there is nothing to bind.
                invoke(lib.halfstep_allocate_states, part)
        return [m.p for m, made, _, _ in fresh if "weight.extra" in made]

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
        alone = [m.save_counters(state) for m in self.members if (state := states.get(m.p))]
        self.tell(groups)
        return all(alone)

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
        skipped = self.told[0] + sum(counted) - sum(map(attrgetter("counted"), self.parts))
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
            if self.store is None or self.store.handle is not part:
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
            if micro or ahead is not None:
                call = calls.all_tensors(self.weights, self.gradients, micro, ahead=ahead)
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
