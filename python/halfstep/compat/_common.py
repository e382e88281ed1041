"""Hands on the arguments of a function that has many of them."""

#: names in locals() that are not handed on under their own name
_OWN = frozenset(("self", "params", "options", "__class__"))


def arguments(names, *without):
    """Returns the arguments of the calling function by name. `names` is its locals(), taken before
    it has variables of its own. Leaves out `self`, `params`, `**options` and those in `without`."""
    return {k: v for k, v in names.items() if k not in _OWN and k not in without}
