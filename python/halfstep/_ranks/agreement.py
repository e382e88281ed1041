"""Communication between ranks: the norm and the verdict of a step, and the settings that ranks must
agree on.

The statistics of the ranks are added between the halves of a step. They are integers, so that any
number of ranks in any order gives the sums of one process. Nothing is communicated for plain
tensors, unless there are DTensors beside them or the optimizer was given a `norm_group`.
"""

import ctypes
import hashlib
import math
import weakref

import torch

from .._library import abi, calls
from .._library.abi import check, lib
from .._tensors import devices
from .._tensors.sharding import group_of, is_sharded_buffer, number_of
from .spreads import add_up, agree_on, in_order, limbs_of, ranks_of, spreads_of, value_of

#: number of the statistics before the flags of the tensors: the limbs of the sum of all squares
HEAD = calls.count_statistics(None, calls.end_of_round())[0]


class Ranks:
    """Makes the handles of an optimizer, and its ranks, agree on one norm and one verdict in a
    step. Made anew with the handles.

    The statistics of all handles are one vector here: the sum of squares, a flag for each member,
    and the sums of the members' rules.
    """

    def __init__(self, settings, groups, engine):
        self.spreads = spreads_of(settings, groups)
        self.divided = [c for c in self.spreads if c.groups]
        group = group_of(settings.norm_group)
        self.norm_groups = () if group is None else (group,)
        inside = set().union(*map(ranks_of, self.norm_groups))
        shared = {ranks_of(g): g for spread in self.divided for g in spread.groups}
        #: by their ranks: the groups that share parameters, unless the norm group has all of them
        self.around = {ranks: g for ranks, g in shared.items() if not inside.issuperset(ranks)}
        self.engine = weakref.proxy(engine)
        self.index_of, self.members = engine.index_of, engine.members
        #: parameters that one rank steps for others, as keys
        self.gathered = {m.p: True for m in engine.members if m.gathered}
        self.n = len(self.members)
        #: number of the rule's sums over all tensors, of every handle and of the norm group
        self.totals = engine.rule.totals
        self.sums = HEAD + self.n
        #: for a rule with such sums. numbers: the numbers of groups that share sums, see
        #: number_of()
        #: rows: for each member, the place of its number among these
        #: firsts: the first member for each handle and row
        #: estimates: for each number, the current `d`
        self.numbers = sorted(set(map(number_of, groups))) if self.totals else []
        self.rows, self.firsts = [], {}
        for i, m in enumerate(self.members if self.totals else ()):
            self.rows.append(self.numbers.index(number_of(groups[m.group])))
            self.firsts.setdefault((m.handle, self.rows[i]), i)
        self.estimates = {}
        #: slices: for each handle, the places of its flags and of its sums
        #: places: for each member, the start and the number of its sums
        self.slices, self.places, at = [], [], self.sums
        for part in engine.parts:
            first, summed = at, self._count_sums(part, calls.all_tensors(None, None))
            for i in range(part.n):
                many = self._count_sums(part, calls.one_tensor(i)) if summed else 0
                self.places.append((at, many))
                at += many
            self.slices.append(
                (slice(HEAD + part.first, HEAD + part.first + part.n), slice(first, at))
            )
        self.count = at
        judged = settings.clip_norm or settings.scan in (None, "scan") or engine.rule.totals
        shards = next((m for m in engine.members if is_sharded_buffer(m.p)), None)
        if shards is not None and not self.norm_groups and judged:
            raise ValueError(
                f"halfstep: parameter {shards.name!r} is a shard of an FSDP1 buffer, and this rank"
                " cannot know the norm of the others nor whether they are finite: give"
                " norm_group=, the process group of the shards (True: all ranks)"
            )

    @staticmethod
    def _count_sums(handle, call):
        """Returns how many integers of a call's statistics are sums over tensors."""
        count, offset = calls.count_statistics(handle, call)
        return count - offset

    @property
    def needed(self):
        """True if other ranks take part in the verdict."""
        return bool(self.divided or self.norm_groups or self.gathered)

    def _members(self, spread):
        return [
            (row, self.index_of[p]) for row, p in enumerate(spread.params) if p in self.index_of
        ]

    def _share_flags(self, spread, statistics, gradients):
        """Adds limbs and flags over the ranks of a spread. Returns True if one of the ranks has
        parameters of other spreads. Fails if only some of the ranks have a gradient of a
        parameter."""
        members = self._members(spread)
        size = len(spread.params)
        packed = devices.zeros(HEAD + 2 * size + 1, torch.int64)
        packed[:HEAD] = statistics[:HEAD]
        packed[-1] = int(len(self.spreads) > 1)
        for row, i in members:
            packed[HEAD + row] = statistics[HEAD + i]
            packed[HEAD + size + row] = int(bool(gradients[i]))
        add_up(packed, spread.groups)
        self._check_counts(spread, packed[HEAD + size : -1])
        statistics[:HEAD] = packed[:HEAD]
        for row, i in members:
            statistics[HEAD + i] = packed[HEAD + row]
        return bool(packed[-1])

    def _counted(self, sums):
        """Adds up what this rank counts of exact sums: those of all spreads, but for a norm group
        only of parameters that no earlier rank of the group counts. `sums` has a tensor for each
        class."""
        if self.norm_groups:
            rank, ranks = torch.distributed.get_rank(), ranks_of(*self.norm_groups)
            counted = [spread.is_counted_by(rank, ranks) for spread in self.spreads]
            sums = [own for own, here in zip(sums, counted) if here] or [torch.zeros_like(sums[0])]
        return sum(sums)

    def _agree(self, mixed, sums, whole, refuses=False):
        """Gives ranks that share parameters and have others beside them the same sums. Returns True
        if one of them refuses the step. `mixed` has the ranks of the groups where there are such
        others. `sums` has a tensor of exact sums for each spread, `whole` those of all."""
        totals = [value_of(limbs) for limbs in whole]
        for ranks, group in self.around.items():
            if ranks in mixed:
                others = [i for i, spread in enumerate(self.spreads) if ranks not in spread.over]
                names = [name for i in others for name in self.spreads[i].not_on(ranks)]
                beside = sum((sums[i] for i in others), torch.zeros_like(whole))
                beside = [value_of(limbs) for limbs in beside]
                refuses, totals = agree_on(group, refuses, names, beside, totals)
        for limbs, total in zip(whole, totals):
            if math.isfinite(total) and total != value_of(limbs):
                limbs.copy_(limbs_of(total, HEAD))
        return refuses

    def _check_counts(self, spread, counts):
        """Fails if only some of the ranks have a gradient of a parameter: `counts` of them."""
        ranks = math.prod(map(torch.distributed.get_world_size, spread.groups))
        for name, has in zip(spread.names, counts.tolist()):
            if has not in (0, ranks):
                raise RuntimeError(
                    f"halfstep: parameter {name!r} has a gradient on {has} of the"
                    f" {ranks} ranks that it is divided over; run the same layers on all ranks"
                )

    def _gather_gradients(self, gradients):
        """Brings gradients to the ranks that step them for others. Puts their addresses there into
        the array. Fails before that if only some of the ranks have one."""
        for spread in self.divided:
            if any(p in self.gathered for p in spread.params):
                counts = devices.zeros(len(spread.params), torch.int64)
                for row, i in self._members(spread):
                    counts[row] = int(bool(gradients[i]))
                add_up(counts, spread.groups)
                self._check_counts(spread, counts)
        for part in self.engine.parts:
            places = range(part.first, part.first + part.n)
            some = [i for i in places if self.members[i].gathered and gradients[i]]
            if some:
                given = part.stage.gather_gradients([self.members[i] for i in some])
                for i, address in zip(some, given):
                    gradients[i] = address

    def _share_sums(self, statistics):
        for spread in self.divided:
            found = [self.places[i] for _, i in self._members(spread) if self.places[i][1]]
            if found:
                packed = torch.cat([statistics[at : at + many] for at, many in found])
                add_up(packed, spread.groups)
                for (at, many), piece in zip(found, packed.split([many for _, many in found])):
                    statistics[at : at + many] = piece

    def _add_totals(self, statistics, mixed):
        """Adds up the rule's sums over all tensors of every handle and rank. The first member of
        each handle and number receives the sums, as halfstep.h says of totals. `mixed` is that of
        _agree()."""
        shape = len(self.numbers), self.totals * HEAD
        sums = [torch.zeros(shape, dtype=torch.int64, device="cpu") for _ in self.spreads]
        for spread, of in zip(self.spreads, sums):
            for _, i in self._members(spread):
                own = statistics[self.places[i][0] :][: self.totals * HEAD]
                of[self.rows[i]] += own
                own.zero_()
        whole = self._counted(sums)
        add_up(whole, self.norm_groups)
        if mixed:
            cells = [own.view(-1, HEAD) for own in (*sums, whole)]
            self._agree(mixed, cells[:-1], cells[-1])
        for (_, row), i in self.firsts.items():
            statistics[self.places[i][0] :][: self.totals * HEAD] = whole[row]

    def _scalars(self, i):
        m, rule = self.members[i], self.engine.rule
        return list(calls.read(m.handle, abi.RECORD_TENSOR, m.index).scalar)[: len(rule.scalars)]

    def _share_estimates(self):
        """Gives every handle of every rank the scalars of the handle that has come furthest,
        because a device or a rank may have had nothing to step until now."""
        found = torch.full(
            (len(self.numbers), len(self.engine.rule.scalars)),
            -torch.inf,
            dtype=torch.float64,
            device="cpu",
        )
        own = {key: self._scalars(i) for key, i in self.firsts.items()}
        for (_, row), scalars in own.items():
            if scalars[0] > max(found[row, 0], 0.0):
                found[row] = torch.tensor(scalars, dtype=torch.float64, device="cpu")
        if self.norm_groups:
            ordered = in_order(found.view(torch.int64))
            add_up(ordered, self.norm_groups, torch.distributed.ReduceOp.MAX)
            found = in_order(ordered).view(torch.float64)
        for row, scalars in enumerate(found.tolist()):
            if scalars[0] == -math.inf:
                continue
            self.estimates[self.numbers[row]] = scalars[0]
            for key, i in self.firsts.items():
                m = self.members[i]
                if key[1] == row and own[key] != scalars:
                    record = calls.read(m.handle, abi.RECORD_TENSOR, m.index)
                    record.scalar[: len(scalars)] = scalars
                    calls.restore(m.handle, record)

    def tell_estimates(self, groups):
        """Writes the current `d` into the groups."""
        for (_, row), i in self.firsts.items():
            m = self.members[i]
            self.estimates[self.numbers[row]] = calls.read_number(
                m.handle, m.index, self.engine.rule, "d"
            )
        for group in groups:
            group["d"] = self.estimates.get(number_of(group)) or group["d0"]

    def _begin(self, gradients, micro, ahead):
        """Returns the statistics of some gradients on this rank."""
        found = devices.zeros(self.count, torch.int64)
        for part, (flags, sums) in zip(self.engine.parts, self.slices):
            own = torch.zeros(
                HEAD + part.n + sums.stop - sums.start, dtype=torch.int64, device="cpu"
            )
            some, results = part.slice(gradients), part.results(ahead)
            calls.begin(part, calls.all_tensors(None, some, micro, own.data_ptr(), results))
            found[:HEAD] += own[:HEAD]
            found[flags] = own[HEAD : HEAD + part.n]
        return found

    def step(self, weights, gradients, micro=False, whole=True, ahead=None):
        """Makes a step of all members, or a micro-batch. Returns its code and the handle that knows
        why. The code is None if other ranks refuse the step and this rank would not. `whole`: a
        gradient that is not finite refuses the whole step. `ahead` is an array of Ahead, or
        None."""
        self._gather_gradients(gradients)
        parts, total = self.engine.parts, devices.zeros(self.count, torch.int64)
        # States arrive while gradients are scanned.
        for stage in [part.stage for part in parts if part.stage is not None][:2]:
            stage.begin()
        squares, mixed = [], set()
        for spread in self.spreads:
            some = gradients
            if self.divided:
                some = (ctypes.c_void_p * self.n)()
                for _, i in self._members(spread):
                    some[i] = gradients[i]
            statistics = self._begin(some, micro, ahead)
            if spread.groups and self._share_flags(spread, statistics, gradients):
                mixed |= spread.over
            squares.append(statistics[:HEAD].view(1, HEAD))
            total += statistics
        own = refuses = bool(total[HEAD : self.sums].any())
        if self.norm_groups:
            packed = devices.zeros(HEAD + 1, torch.int64)
            packed[:HEAD], packed[HEAD] = self._counted(squares).view(-1), int(own)
            add_up(packed, self.norm_groups)
            total[:HEAD], refuses = packed[:HEAD], bool(packed[HEAD])
        if mixed:
            refuses = self._agree(mixed, squares, total[:HEAD].view(1, HEAD), refuses)
        if whole and refuses and not own:
            return None, parts[0]
        refusing = [bool(total[flags].any()) for flags, _ in self.slices]
        whole = whole and any(refusing)
        chosen = [(part, *where) for part, where in zip(parts, self.slices)]
        if whole:  # counted by one handle, however many see why
            chosen = [chosen[refusing.index(True)]]

        def described(part, flags, sums):
            """Returns the statistics of one handle, and the call with them."""
            own = torch.cat([total[:HEAD], total[flags], total[sums]])
            pointers = part.slice(weights), part.slice(gradients), part.results(ahead)
            call = calls.all_tensors(*pointers[:2], micro, own.data_ptr(), pointers[2])
            call.pointers = pointers  # keeps them alive as long as the call
            return own, call

        totals = self.totals and not whole and not micro
        if totals and (self.norm_groups or len(parts) > 1):
            self._share_estimates()
        if totals or (self.divided and self.count > self.sums and not micro):
            for part, flags, sums in chosen:
                own, call = described(part, flags, sums)
                with part.states(not whole, False):
                    calls.norms(part, call)
                total[sums] = own[HEAD + part.n :]
            self._share_sums(total)
            if totals:
                self._add_totals(total, mixed)
        code = abi.OK, parts[0]
        for part, flags, sums in chosen:
            own, call = described(part, flags, sums)
            with part.states(not whole):
                given = calls.finish(part, call)
            if given == abi.OK and part.asynchronous and own[HEAD : HEAD + part.n].any():
                given = lib.halfstep_synchronize(part)
            if given == abi.NONFINITE:
                code = given, part
            else:
                check(given, part)
        for part in parts:
            if part.stage is not None:
                part.stage.end()
        return code

    def step_one(self, m, weight, gradient, micro):
        """Does the work of step() for one member, in gradient release. Returns the code."""
        handle = m.handle
        groups = next((c.groups for c in self.spreads if any(p is m.p for p in c.params)), ())
        call = calls.one_tensor(m.index, weight, gradient, micro)
        count, offset = calls.count_statistics(handle, call)
        statistics = devices.zeros(count, torch.int64)
        call.statistics = statistics.data_ptr()
        calls.begin(handle, call)
        add_up(statistics, groups)
        if count > offset and not micro:
            calls.norms(handle, call)
            sums = statistics[offset:].clone()
            add_up(sums, groups)
            statistics[offset:] = sums
        return calls.finish(handle, call)

    def end_round(self):
        if len(self.spreads) > 1:
            raise RuntimeError(
                "halfstep: in release the norm of a round cannot be taken over parameters of"
                ' several meshes; use clip="per-tensor", or one mesh for all'
            )
        total = devices.zeros(HEAD, torch.int64)
        for part in self.engine.parts:
            statistics = torch.zeros_like(total)
            calls.begin(part, calls.end_of_round(statistics.data_ptr()))
            total += statistics
        for spread in self.spreads:
            add_up(total, spread.groups)
        total = self._counted([total])
        add_up(total, self.norm_groups)
        code = abi.OK
        for part in self.engine.parts:
            given = calls.finish(part, calls.end_of_round(total.data_ptr()))
            code = code or given
        return code


def everywhere(settings, groups, value):
    """Returns True if a condition holds on all ranks that share the parameters of an optimizer. All
    these ranks must call it."""
    answer = torch.tensor([int(not value)], dtype=torch.int64, device="cpu")
    for spread in spreads_of(settings, groups):
        add_up(answer, spread.groups)
    group = group_of(settings.norm_group)
    if group is not None:
        add_up(answer, (group,))
    return not int(answer)


#: settings that must be the same on ranks of one norm group, and on ranks that share parameters
_COMMON = ("rule", "seed", "generator", "scan", "clip_norm")


def agree(settings, groups, wanted, more=None):
    """Raises an error on every rank, naming what differs, if ranks do not agree. Ranks that share
    parameters must agree on seed, generator, recipes and ids. Ranks of one norm_group must agree on
    rule, seed, generator, scan and clip_norm. If nothing differs, it costs one number for each
    group of ranks.

    `wanted` holds the name, id and recipe of every parameter. `more` holds what else must be the
    same, by what it is.
    """
    common = {**{key: str(getattr(settings, key)) for key in _COMMON}, **(more or {})}
    if abi.rules[settings.rule].totals:
        common["d_group"] = str(sorted(set(map(number_of, groups))))
    group = group_of(settings.norm_group)
    if group is not None:  # its ranks hold different parameters
        _compare(common, (group,), "have one norm_group")
    for spread in spreads_of(settings, groups):
        if not spread.groups:
            continue
        known = {id(p) for p in spread.params}
        told, place = dict(common), 0
        for one in wanted:
            if id(one.p) in known:
                told[f"recipe of parameter {place}"] = one.recipe + (
                    ", cautious" if groups[one.group].get("cautious") else ""
                )
                told[f"id of parameter {place}"] = f"{one.id:016x} ({one.name})"
                place += 1
        _compare(told, spread.groups, "share parameters")


def _compare(told, groups, who):
    """Raises an error on every rank of the groups, naming what differs, unless `told` is the same
    on all of them."""
    dist = torch.distributed
    digest = hashlib.sha256(repr(sorted(told.items())).encode()).digest()
    number = int.from_bytes(digest[:7], "little")
    both = torch.tensor([number, -number], dtype=torch.int64, device="cpu")
    add_up(both, groups, dist.ReduceOp.MAX)
    # All ranks compare the maximum of a number and of its negative, so all of them raise or none
    # does.
    if int(both[0]) == -int(both[1]):
        return
    everyone = [(dist.get_rank(), told)]
    for group in groups:
        lists = [None] * dist.get_world_size(group)
        dist.all_gather_object(lists, everyone, group=group)
        everyone = [pair for some in lists for pair in some]
    for key in sorted(set().union(*(other for _, other in everyone))):
        values = {
            rank: other.get(key, "nothing")
            for rank, other in sorted(everyone, key=lambda pair: pair[0])
        }
        if len(set(values.values())) > 1:
            raise RuntimeError(
                f"halfstep: ranks that {who} disagree about the {key}: "
                + ", ".join(f"{value} on rank {rank}" for rank, value in values.items())
                + "; make it the same on all"
            )
