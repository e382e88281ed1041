"""Brings states of older versions, and nested dictionaries, into today's layout (_layout.py)."""

import torch

from . import _abi, _layout


def flat(state):
    """Returns a state without nested dictionaries. torch's flattened checkpoints return one if a
    key of ours is missing, or if it begins several keys of the file."""
    out = {}
    for key, value in state.items():
        if isinstance(value, dict):
            out.update((f"{key}.{part}", inner) for part, inner in flat(value).items())
        else:
            out[key] = value
    return out


def _aligned(group, key, place):
    """Removes a list from a group of older versions and returns it, or None if there is none."""
    values = group.pop(key, None)
    if values is not None and (
        not isinstance(values, (list, tuple)) or len(values) != len(group["params"])
    ):
        raise ValueError(
            f"halfstep: {key!r} of group {place} is not a list with one item for each parameter"
        )
    return values


def modernize(groups, names):
    """Brings states of older versions and their groups into today's layout. Gives `names` the ids
    of parameters that have no states yet."""
    states = groups.state
    for g, group in enumerate(groups):
        rule = groups.row_of(group)
        ids, recipes = _aligned(group, "ids", g), _aligned(group, "recipes", g)
        for i, p in enumerate(group["params"]):
            name, state = names.of(g, i), states.get(p)
            identity = ids[i] if ids is not None else None
            if identity is not None and not _abi.is_count(identity, 1, 2**64 - 1):
                raise ValueError(
                    f"halfstep: the id of parameter {name!r} is {identity!r}; ids are from 1 to"
                    " 2**64 - 1"
                )
            if not isinstance(state, dict) or not state:
                if identity is not None:
                    names.ids[p] = identity
                continue
            new = flat(state)
            for key in _layout.WHOLE:
                if isinstance(new.get(key), torch.Tensor) and new[key].is_floating_point():
                    del new[key]  # spoiled, because torch's optimizers cast it
            for key in rule.roles.keys() & set(new):
                if isinstance(new[key], torch.Tensor) and not new[key].is_floating_point():
                    new[key + ".codes"] = new.pop(key)
            if identity is not None:
                new.setdefault("id", _layout.number(_layout.signed(identity), "id"))
            recipe = recipes[i] if recipes is not None else None
            if (
                recipe is None
                and "recipe" not in new
                and any(key.endswith(_layout.PARTS) for key in new)
            ):
                recipe = names.recipe(g, i)  # older than saved recipes
            if recipe is not None:
                try:
                    new.setdefault("recipe", _layout.recipe_number(_abi.recipe_full(recipe)))
                except (ValueError, AttributeError):
                    raise ValueError(
                        f"halfstep: the states of parameter {name!r} are of the recipe {recipe!r},"
                        " which this library does not have"
                    ) from None
            steps = _layout.whole(new.get("step"))
            if steps is not None and not _layout.is_number(new["step"], "step"):
                new["step"] = _layout.number(float(steps), "step")
            for key in _layout.numbers_of(rule):
                if key in new and not _layout.is_number(new[key], key):
                    new[key] = _layout.number(_layout.take_number(new, key, name), key)
            state.clear()
            state.update(new)
