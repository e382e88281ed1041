"""Parameters of a saved state and of an optimizer, matched by their names."""

from itertools import chain

#: parts that wrappers put into names: torch.compile, FSDP1, activation checkpointing
_HIDDEN = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
#: what DistributedDataParallel and DataParallel put there, which may be a module of the model's own
_MODULE = "module"


def _unwrapped(name):
    """A name without what wrappers of a whole model and of its parts put there."""
    parts = [part for part in name.split(".") if part not in _HIDDEN]
    while len(parts) > 1 and parts[0] == _MODULE:
        del parts[0]
    return ".".join(parts)


def _bare(name):
    """The same, where parts of a model may be wrapped by DistributedDataParallel."""
    parts = _unwrapped(name).split(".")
    return ".".join([part for part in parts[:-1] if part != _MODULE] + parts[-1:])


def some(names):
    """The first names of a list, for a sentence."""
    return ", ".join(map(repr, names[:6])) + (
        f" and {len(names) - 6} more" if len(names) > 6 else ""
    )


def match(theirs, ours, what="this state"):
    """The place among `theirs` of each of our names, names with what wrappers add to them counting
    as without; None if no name is on both sides. ValueError where some are and some are not."""
    for names in (theirs, ours):
        twice = (
            sorted(name for name in set(names) if names.count(name) > 1)
            if len(set(names)) < len(names)
            else ()
        )
        if twice:
            raise ValueError(
                f"halfstep: names stand for one parameter each, and {what} or this optimizer has"
                f" {some(twice)} more than once"
            )
    best = None
    for short in (str, _unwrapped, _bare):
        there, here = [short(name) for name in theirs], [short(name) for name in ours]
        if len(set(there)) < len(there) or len(set(here)) < len(here):
            continue  # two names of one side would be one
        places = {name: i for i, name in enumerate(there)}
        found = [places.get(name) for name in here]
        if None not in found and len(there) == len(here):
            return found
        if best is None or sum(place is not None for place in found) > sum(
            place is not None for place in best
        ):
            best = found
    if best is None or not any(place is not None for place in best):
        return None
    taken = set(best)
    alone = [name for i, name in enumerate(theirs) if i not in taken]
    missing = [name for name, place in zip(ours, best) if place is None]
    raise ValueError(
        f"halfstep: {len(ours) - len(missing)} names of {what} are names of parameters here and"
        " others are not: "
        + "; ".join(
            text
            for text in (
                alone and f"only saved: {some(alone)}",
                missing and f"only here: {some(missing)}",
            )
            if text
        )
        + ". Make the optimizer with the parameters that were saved, or rename them in the state"
        " (register_load_state_dict_pre_hook)"
    )


def partly(theirs, ours):
    """Their name of each of ours that is among them, but for what wrappers add."""
    short = {_unwrapped(name): name for name in theirs}
    return {
        name: name if name in theirs else short[_unwrapped(name)]
        for name in ours
        if name in theirs or _unwrapped(name) in short
    }


def _permuted(group, order):
    """A group with its parameters, and what is kept for each of them, in another order."""
    out = dict(group)
    for key in ("params", "ids", "recipes"):
        if isinstance(out.get(key), (list, tuple)) and len(out[key]) == len(group["params"]):
            out[key] = [out[key][i] for i in order]
    return out


def align(optimizer, groups):
    """Saved groups in the order of an optimizer's, where both sides have names for all parameters;
    by the number of a parameter here, the name that it has here and the other one that it was saved
    with; and whether no name matched, so that positions count.
    """
    ours = optimizer._all_names()
    if len(groups) != len(ours):
        return groups, {}, False  # which torch complains about
    theirs = [list(group.get("param_names") or [None] * len(group["params"])) for group in groups]
    mine, saved = list(chain.from_iterable(ours)), list(chain.from_iterable(theirs))
    named = bool(mine) and None not in mine
    if (
        not saved
        or None in saved
        or any(isinstance(key, str) for group in groups for key in group["params"])
    ):
        # torch.distributed.checkpoint has matched them by name already, and has names in place of
        # numbers.
        groups = [
            {key: value for key, value in group.items() if key != "param_names"} for group in groups
        ]
        return (
            [
                (
                    {**group, "param_names": names}
                    if named and len(names) == len(group["params"])
                    else group
                )
                for group, names in zip(groups, ours)
            ],
            {},
            False,
        )
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
        group = _permuted(groups[sources[0]], [i for _, i in places])
        renamed.update(
            (at + i, (name, theirs[source][k]))
            for i, (name, (source, k)) in enumerate(zip(names, places))
            if name != theirs[source][k]
        )
        out.append({**group, "param_names": list(names)})
        at += len(names)
    return out, renamed, False
