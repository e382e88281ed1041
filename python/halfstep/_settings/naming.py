"""The names of an optimizer's parameters, for people and for the library. Matches the parameters of
a saved state to those of an optimizer by name."""

from collections import Counter
from itertools import chain

from .._library import abi
from .._tensors import sharding
from .._tensors.parameters import format_of
from .._tensors.torch_private import WRAPPERS

#: the part that DistributedDataParallel and DataParallel add; a model's own module may have this
#: name
_MODULE = "module"


def without_wrappers(name):
    """Returns a name without the parts that wrappers add, of a whole model or of its modules."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] == _MODULE:
        del parts[0]
    return ".".join(parts)


def _bare(name):
    """Returns a name without the parts that wrappers add, including DistributedDataParallel around
    modules of a model."""
    parts = without_wrappers(name).split(".")
    return ".".join([part for part in parts[:-1] if part != _MODULE] + parts[-1:])


def some(names, most=6):
    """Returns the first names of a list, for an error text."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def _prefix(longer, shorter):
    """Returns what all longer names begin with if the rest of them are the shorter names, such as
    "base_model.model.". Returns "" if there is no such prefix. Both lists have as many names."""
    more = sum(map(len, longer)) - sum(map(len, shorter))
    prefix = longer[0][: max(more, 0) // len(longer)]
    ends = prefix.endswith(".") and {prefix + name for name in shorter} == set(longer)
    return prefix if ends else ""


def match(theirs, ours, what="this state"):
    """Returns the place among `theirs` of each of our names, or None if no name is on both sides.
    Names match without the parts that wrappers add, and without a prefix that all names of one side
    have. Raises ValueError if only some of them match."""
    for names in (theirs, ours):
        twice = sorted(name for name, times in Counter(names).items() if times > 1)
        if twice:
            raise ValueError(
                f"halfstep: {what} or this optimizer has {some(twice)} more than once; each"
                " parameter needs a name of its own"
            )
    best = []
    for short in (str, without_wrappers, _bare):
        there, here = [short(name) for name in theirs], [short(name) for name in ours]
        if len(set(there)) < len(there) or len(set(here)) < len(here):
            continue  # two names of one side would become equal
        if len(there) == len(here) > 0:
            before_here, before_there = _prefix(there, here), _prefix(here, there)
            here = [before_here + name for name in here]
            there = [before_there + name for name in there]
        places = {name: i for i, name in enumerate(there)}
        found = [places.get(name) for name in here]
        if None not in found and len(there) == len(here):
            return found
        best = max(best, found, key=lambda places: len(places) - places.count(None))
    if best.count(None) == len(best):
        return None
    taken = set(best)
    alone = [name for i, name in enumerate(theirs) if i not in taken]
    missing = [name for name, place in zip(ours, best) if place is None]
    apart = [f"only saved: {some(alone)}"] if alone else []
    apart += [f"only here: {some(missing)}"] if missing else []
    raise ValueError(
        f"halfstep: {len(ours) - len(missing)} names of {what} are names of parameters here and"
        f" others are not: {'; '.join(apart)}. Make the optimizer with the parameters that were"
        " saved, or rename them in the state (register_load_state_dict_pre_hook)"
    )


def match_file(theirs, ours, path):
    """Returns match(). Raises ValueError if no name is on both sides."""
    found = match(theirs, ours, path)
    if found is None:
        raise ValueError(
            f"halfstep: {path} holds states of {some(theirs)}, and this optimizer has {some(ours)}:"
            " make it with the names of the file"
        )
    return found


def partly(theirs, ours):
    """Returns their name for each of our names that is among them. Names match without the parts
    that wrappers add."""
    short = {without_wrappers(name): name for name in theirs}
    return {
        name: name if name in theirs else short[without_wrappers(name)]
        for name in ours
        if name in theirs or without_wrappers(name) in short
    }


def align(ours, groups):
    """Puts saved groups in the order of an optimizer's groups if both sides have names for all
    parameters. `ours` is Names.all().

    Returns the groups, the renamed parameters, and True if no name matched, so that positions
    count. The renamed parameters are a dictionary: number of a parameter here -> (name here, saved
    name).
    """
    if len(groups) != len(ours):
        return groups, {}, False  # torch complains about it
    theirs = [list(group.get("param_names") or [None] * len(group["params"])) for group in groups]
    mine, saved = list(chain.from_iterable(ours)), list(chain.from_iterable(theirs))
    named = bool(mine) and None not in mine
    keys = [list(group["params"]) for group in groups]
    flat = list(chain.from_iterable(keys))
    by_name = any(isinstance(key, str) for key in flat)
    if by_name and named and all(isinstance(key, str) for key in flat):
        if sorted(map(without_wrappers, flat)) == sorted(map(without_wrappers, mine)):
            theirs, saved, by_name = keys, flat, False
    if not saved or None in saved or by_name:
        # torch.distributed.checkpoint has matched them by name already, and puts names in place of
        # numbers.
        groups = [
            {key: value for key, value in group.items() if key != "param_names"} for group in groups
        ]
        for group, names in zip(groups, ours):
            if named and len(names) == len(group["params"]):
                group["param_names"] = names
        return groups, {}, False
    if not named:
        return groups, {}, False
    found = match(saved, mine)
    if found is None:
        return groups, dict(enumerate(zip(mine, saved))), True
    where = [(g, i) for g, names in enumerate(theirs) for i in range(len(names))]
    out, at, taken, renamed = [], 0, set(), {}
    empty = [g for g, names in enumerate(theirs) if not names]
    for g, names in enumerate(ours):
        places = [where[found[at + i]] for i in range(len(names))]
        sources = sorted({source for source, _ in places}) or [
            g if g in empty else empty[0] if empty else g
        ]
        if len(sources) > 1 or sources[0] in taken or len(theirs[sources[0]]) != len(names):
            name, (source, _) = next(
                ((n, p) for n, p in zip(names, places) if p[0] != g),
                (names[0], places[0]) if names else ("", (g, 0)),
            )
            raise ValueError(
                f"halfstep: parameter {name!r} is in group {g} here, with {len(names)} parameters,"
                f" and was saved in group {source}, with {len(theirs[source])}: make the groups of"
                " the same parameters as they were saved with"
            )
        taken.add(sources[0])
        if sources[0] in empty:
            empty.remove(sources[0])
        group = groups[sources[0]]
        renamed.update(
            (at + i, (name, theirs[source][k]))
            for i, (name, (source, k)) in enumerate(zip(names, places))
            if name != theirs[source][k]
        )
        params = [group["params"][i] for _, i in places]
        out.append({**group, "params": params, "param_names": list(names)})
        at += len(names)
    return out, renamed, False


class Names:
    """The names, ids and recipes of an optimizer's parameters.

    given    names that were given with parameters
    roster   these names by place, a list for each group
    ids      ids of parameters that have no states yet, if their saved names were others
    """

    def __init__(self, parts):
        self.groups = parts.groups
        self.given, self.roster, self.ids = {}, [], {}

    def saved(self):
        """Returns what pickles keep."""
        return {"_names": dict(self.given), "_roster": self.roster, "_ids": dict(self.ids)}

    def restore(self, saved):
        """Takes what of saved() is there, and out of `saved`. A state dictionary has none of it."""
        self.given = saved.pop("_names", self.given)
        self.roster = saved.pop("_roster", self.roster)
        self.ids = saved.pop("_ids", self.ids)

    # ---- Names -----------------------------------------------------------------------------------

    def known(self, p):
        """Returns the name that was given with a parameter or by name_parameters(), or None."""
        return self.given.get(p) or getattr(p, "_halfstep_name", None)

    def of(self, group_index, position):
        """Returns the name of a parameter, or its place if it has none."""
        p = self.groups[group_index]["params"][position]
        return self.known(p) or f"{position} of group {group_index}"

    def find(self, p):
        """Returns of() for a parameter wherever it is, or "?" if it is in no group."""
        return next((self.of(g, i) for g, i, other in self.groups.members() if other is p), "?")

    def all(self):
        """Returns known() of all parameters, a list for each group."""
        self.refresh()
        return [[self.known(p) for p in group["params"]] for group in self.groups]

    def refresh(self):
        """Keeps names with their parameters. If parameters were replaced, as sharding does, keeps
        names with their places."""
        names, groups = {}, self.groups.param_groups
        for g, group in enumerate(groups):
            roster = self.roster[g] if len(self.roster) == len(groups) else ()
            for i, p in enumerate(group["params"]):
                name = self.given.get(p) or (
                    roster[i] if len(roster) == len(group["params"]) else None
                )
                if name is not None:
                    names[p] = name
        self.given = names
        self.roster = [[names.get(p) for p in group["params"]] for group in groups]
        for group, own in zip(groups, self.roster):
            if None in own:
                group.pop("param_names", None)
            elif group.get("param_names", []) != own:
                group["param_names"] = list(own)

    def give(self, group):
        """Takes the names of a new group. Raises ValueError if two parameters have the same name,
        because they would round alike."""
        taken = {name: p for p, name in self.given.items()}
        for p, name in zip(group["params"], group["param_names"]):
            if taken.setdefault(name, p) is not p:
                raise ValueError(
                    f"halfstep: two parameters are named {name!r}; names key their random bits, so"
                    " each needs its own"
                )
        self.given.update(zip(group["params"], group["param_names"]))

    def take_loaded(self):
        """Takes the names of loaded groups."""
        for group in self.groups:
            self.given.update(zip(group["params"], group.get("param_names") or ()))
        self.refresh()

    # ---- Ids and recipes -------------------------------------------------------------------------

    def expect_name(self, p, name):
        """Gives a parameter without states the id that this name stands for."""
        self.ids[p] = abi.name_id(sharding.name_here(self.groups.settings(), p, name))

    def identities(self, params):
        """Returns ids by parameter, at least for `params`. An id comes from the state, else from
        the name, else from the place among all parameters."""
        self.refresh()
        settings, state = self.groups.settings(), self.groups.state
        flat = {p: i for i, p in enumerate(self.groups.params())}
        found = {}
        for p, place in flat.items():
            held, name = (state.get(p) or {}).get("id"), self.known(p)
            if held is not None:
                found[p] = int(held) % 2**64
            elif p in self.ids:
                found[p] = self.ids[p]
            elif name is not None:
                found[p] = abi.name_id(sharding.name_here(settings, p, name))
            elif sharding.is_sharded_buffer(p):
                found[p] = abi.name_id(sharding.name_here(settings, p, f"parameter {place}"))
        taken = set(found.values())
        for p in params:
            if p not in found:
                # A moved parameter may have the id of this place already.
                text = sharding.place_here(settings, p, f"parameter {flat[p]}")
                while abi.name_id(text) in taken:
                    text += " again"
                found[p] = abi.name_id(text)
                taken.add(found[p])
        return found

    def recipe(self, group_index, position):
        """Returns the full recipe of a parameter, such as "adamw/bf16-sr/int8"."""
        group = self.groups[group_index]
        p = group["params"][position]
        weights, states = self.groups.options.formats(group, p)
        weights = format_of(weights, p, self.of(group_index, position))
        parts = (self.groups.row_of(group).name, weights, states)
        return abi.recipe_full("/".join(part for part in parts if part))
