"""Which ranks share which parameters of an optimizer, and what they add up or agree on."""

import math

import torch

from .._settings.naming import some
from .._tensors.matrices import how_of
from .._tensors.sharding import group_of, holders_of, is_dtensor, is_gathered, sharing_groups

#: bits of a limb of an exact sum, and the exponent of its unit (src/base/exact.h)
_LIMB, _UNIT = 32, -1074
#: the largest relative difference of a sum over copies on several ranks. GPUs add up the products
#: of a gradient in any order
_NOISE = 2e-3


class Spread:
    """The parameters of an optimizer that are divided over the same ranks, in the order of its
    groups. `names` are those that the groups or the parameters know, or places. `holders` are all
    ranks that have these parameters, replicas included; () if there is no norm_group."""

    def __init__(self, groups, holders=()):
        self.groups, self.params, self.names, self.holders = groups, [], [], holders
        #: the ranks of each group
        self.over = set(map(ranks_of, groups))

    def not_on(self, ranks):
        """Returns the names of the parameters that are not on a mesh of these ranks."""
        return [
            name
            for name, p in zip(self.names, self.params)
            if not is_dtensor(p) or not set(ranks).issubset(holders_of(p, None))
        ]

    def is_counted_by(self, rank, ranks):
        """Returns True if a rank counts these parameters for all holders among `ranks`."""
        return rank == min(set(self.holders).intersection(ranks))


def ranks_of(group):
    """Returns the ranks of a process group as a tuple."""
    return tuple(torch.distributed.get_process_group_ranks(group))


def spreads_of(settings, groups):
    """Returns the spreads of all parameters, in an order that all ranks agree on. One spread holds
    the parameters that are not divided. Those that one rank steps for others count as divided."""
    found, seen = {}, set()
    for rule, group in zip(settings.rules, groups):
        for i, p in enumerate(group["params"]):
            if id(p) in seen:
                continue
            seen.add(id(p))
            ranks, holders = (), ()
            if is_gathered(rule, p, how_of(group), settings.owners):
                ranks = sharing_groups(p, settings.owners)
            elif is_dtensor(p):
                ranks = tuple(
                    p.device_mesh.get_group(i)
                    for i, x in enumerate(p.placements)
                    if hasattr(x, "dim") and p.device_mesh.size(i) > 1
                )
            if group_of(settings.norm_group) is not None:
                holders = tuple(holders_of(p, settings.owners))
            key = frozenset(map(ranks_of, ranks)), holders
            spread = found.setdefault(key, Spread(ranks, holders))
            known = group.get("param_names")
            spread.names.append(
                known[i] if known else getattr(p, "_halfstep_name", len(spread.params))
            )
            spread.params.append(p)
    return list(found.values())


def devices_of(group):
    """Returns the types of devices whose tensors a process group takes."""
    backends = torch.distributed.get_backend_config(group).split(",")
    return sorted(backend.partition(":")[0] for backend in backends)


def add_up(numbers, groups, op=None):
    """Adds int64 tensors over groups in place, one group after another. The sum is then over the
    product of their ranks. `op` replaces the sum."""
    dist = torch.distributed
    for group in groups:
        types = devices_of(group)
        there = numbers if "cpu" in types else numbers.to(types[0])
        dist.all_reduce(there, op=op or dist.ReduceOp.SUM, group=group)
        if there is not numbers:
            numbers.copy_(there)


def in_order(bits):
    """Maps the bits of doubles to integers in the order of the doubles, and back."""
    return torch.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)


# ---- Parameters beside shared ones ---------------------------------------------------------------


def value_of(limbs):
    """Returns an exact sum as a double."""
    whole = sum(limb << _LIMB * k for k, limb in enumerate(limbs.tolist()))
    try:
        return whole / 2**-_UNIT
    except OverflowError:
        return math.copysign(math.inf, whole)


def limbs_of(value, count):
    """Returns a finite double as an exact sum of so many limbs."""
    top, bottom = abs(value).as_integer_ratio()
    whole, sign = top * 2**-_UNIT // bottom, -1 if value < 0 else 1
    limbs = [sign * (whole >> _LIMB * k & 2**_LIMB - 1) for k in range(count)]
    return torch.tensor(limbs, dtype=torch.int64, device="cpu")


def _differ(pairs):
    """Returns True if numbers that several ranks have are not those of copies. `pairs` are the
    least and the largest of each. Sums that nearly cancel may differ by noise."""
    apart = [most - least > _NOISE * max(-least, most) for least, most in pairs if least or most]
    return bool(apart) and all(apart)


def agree_on(group, refuses, names, beside, totals):
    """Gives the ranks of a group one verdict and equal totals, although each has other parameters
    beside those that they share. Returns True if one of them refuses the step, and the largest of
    each total.

    names     of the other parameters, which have to be copies and count once
    beside    doubles: the parts of the totals that come from them
    totals    doubles

    Raises RuntimeError on all ranks if `beside` differs.
    """
    own = torch.tensor([*beside, *(-x for x in beside), *totals], dtype=torch.float64, device="cpu")
    verdict = torch.tensor([int(refuses)], dtype=torch.int64, device="cpu")
    packed = torch.cat([verdict, in_order(own.view(torch.int64))])
    add_up(packed, (group,), torch.distributed.ReduceOp.MAX)
    refuses, n = bool(packed[0]), len(beside)
    found = in_order(packed[1:]).view(torch.float64).tolist()
    pairs = [(-x, most) for x, most in zip(found[n:], found[:n])]
    if not refuses and _differ(pairs):
        least, most = max(pairs, key=lambda pair: pair[1] - pair[0])
        raise RuntimeError(
            f"halfstep: the gradients of parameters that are no shards ({some(names, 3)}) differ"
            f" between ranks: a sum over them is {least:g} on one and {most:g} on another. If each"
            " rank has such parameters of its own, give norm_group= (True: all ranks). If they are"
            " copies, average their gradients before the step"
        )
    return refuses, found[2 * n :]
