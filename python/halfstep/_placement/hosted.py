"""The common part of optimizers whose states are in CPU memory while weights are on a GPU. Each is
an optimizer of a recipe's class, and leaves the states of small parameters on the GPU."""

from functools import lru_cache
from typing import Any, Type, Union

from . import _abi, _devices, _matrices, _sharding, rules
from ._placement import Placement
from .optimizer import Kept, Optimizer, Params


class HostedPlacement(Placement):
    """Decides where optimizers of Hosted step and keep states."""

    def _is_gathered(self, p):
        owners = self.groups.options.owners
        if not _sharding.is_dtensor(p) and owners is None:
            return False
        group = self.groups.group_of(p)
        rule = self.groups.row_of(group).name
        return _sharding.is_gathered(rule, p, _matrices.how_of(group), owners)

    def may_leave(self, p):
        """Returns True if `p` can be stepped in CPU memory, or with states that come from there,
        while it is on a GPU. Batches of _owners.py bring states by themselves."""
        here = _sharding.local(p)
        return (
            _devices.is_asynchronous(_devices.of(_sharding.stored(p)))
            and here.numel() > 0
            and not self._is_gathered(p)
        )

    def kept(self, one):
        leaves = one.p.numel() >= self.groups.options.minimal_size
        return _devices.HOST if leaves and _devices.is_asynchronous(one.home) else one.home


class Hosted(Optimizer):
    """Base of `CPUOffload` and `StateStreaming`: an optimizer of the class that `recipe` names.
    `recipe` is a string or a class of this package."""

    minimal_size = Kept()

    def __new__(cls, params=None, recipe: Union[str, Type[Optimizer]] = "adamw", **_):
        return object.__new__(_with(cls, _split(recipe, cls)[0]) if not cls.rule else cls)

    def __init__(
        self,
        params: Params,
        recipe: Union[str, Type[Optimizer]] = "adamw",
        *,
        minimal_size: int = 4096,
        **options: Any,
    ) -> None:
        if not _abi.is_count(minimal_size):
            raise ValueError(
                f"halfstep: minimal_size={minimal_size!r} is not a number of elements; give a whole"
                " number of at least 0"
            )
        if options.get("compile"):
            raise ValueError(
                "halfstep: compile=True is not supported here, because a step whose states leave"
                " the GPU cannot be traced"
            )
        self.minimal_size = minimal_size
        super().__init__(params, **{**_split(recipe, type(self))[1], **options})

    def __reduce_ex__(self, protocol):
        kind = next(c for c in type(self).__mro__ if issubclass(c, Hosted) and not c.rule)
        base = next(c for c in type(self).__mro__ if c.rule and not issubclass(c, Hosted))
        return _empty, (kind, base), self.__getstate__()


def _split(recipe, cls):
    """Returns the class of a recipe, and the options that the recipe stands for."""
    if isinstance(recipe, str):
        return rules.class_and_options(recipe)
    if not isinstance(recipe, type) or not issubclass(recipe, Optimizer) or not recipe.rule:
        raise TypeError(
            f"halfstep.{cls.__name__.partition('[')[0]}(params, recipe): {recipe!r} is neither a"
            ' recipe such as "adamw/bf16-sr/int8" nor a class of halfstep'
        )
    return recipe, {}


@lru_cache(None)
def _with(cls, base):
    """Returns the class of optimizers of `base` that are hosted as `cls` is."""
    attributes = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(f"{cls.__name__}[{base.__name__}]", (cls, base), attributes)


def _empty(cls, base):
    return object.__new__(_with(cls, base))
