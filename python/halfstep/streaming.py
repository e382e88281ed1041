"""`StateStreaming`: weights and steps on a GPU, states in CPU memory, which pass through the GPU in
each step. `Hosted` is what it has in common with `CPUOffload`."""

from functools import lru_cache
from typing import Any, Optional, Type, Union

from . import rules
from ._library import abi
from ._placement.streams import BUFFER_BYTES, Streamed
from .optimizer import Kept, Optimizer, Params


class Hosted(Optimizer):
    """Base of `CPUOffload` and `StateStreaming`: an optimizer of the class that `recipe` names.
    `recipe` is a string or a class of this package."""

    minimal_size = Kept()

    def __new__(
        cls,
        params: Optional[Params] = None,
        recipe: Union[str, Type[Optimizer]] = "adamw",
        **_: Any,
    ) -> "Hosted":
        return object.__new__(_with(cls, _split(recipe, cls)[0]) if not cls.rule else cls)

    def __init__(
        self,
        params: Params,
        recipe: Union[str, Type[Optimizer]] = "adamw",
        *,
        minimal_size: int = 4096,
        **options: Any,
    ) -> None:
        if not abi.is_count(minimal_size):
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
        return restore_hosted, (kind, base), self.__getstate__()


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


def restore_hosted(cls: Type[Hosted], base: Type[Optimizer]) -> Hosted:
    """Returns an optimizer without parameters. Pickles of optimizers name this function."""
    return object.__new__(_with(cls, base))


class StateStreaming(Hosted):
    """An optimizer whose states are in CPU memory, and are stepped on the GPU where its weights and
    gradients are.

        opt = halfstep.StateStreaming(
            model.named_parameters(), "adamw/bf16-sr/int8", lr=1e-4, clip_norm=1.0
        )

    It is an optimizer of the class of its recipe, with all options and the same bits. State
    dictionaries of both load into each other. In step() states pass through three buffers on the
    GPU. While some are stepped, the next come and the last go. A step therefore takes as long as
    the bus takes for all states one way; docs/guides/offload.md says when CPUOffload takes longer.

    recipe              a recipe, or a class of this package
    buffer              bytes of a buffer, by default 256 MiB. All states of one parameter are in it
                        together, so it is larger if one of them needs more
    minimal_size        parameters of fewer elements have their states on the GPU
    gradient_release    states of each parameter come and go as soon as its gradient is there, in
                        the backward pass
    options             of the class: lr, betas, clip_norm ...

    States are in pinned memory, which torch takes in powers of two. If they need more than one
    buffer, step() waits once for all gradients, unless it does not check them
    (scan="known-finite" without clip_norm). It returns before the states are back. All functions of
    this package that read states wait for them, and so does `optimizer.state`. Such a step cannot
    be captured into a CUDA graph. Parameters in CPU memory are stepped there, and so are those on
    GPUs that the library has no kernels for.
    """

    _placement = Streamed
    buffer = Kept()

    def __init__(
        self,
        params: Params,
        recipe: Union[str, Type[Optimizer]] = "adamw",
        *,
        buffer: int = BUFFER_BYTES,
        minimal_size: int = 4096,
        **options: Any,
    ) -> None:
        if not abi.is_count(buffer, 1):
            raise ValueError(
                f"halfstep: buffer={buffer!r} is not a size in bytes; give a whole number above 0"
            )
        if options.get("store") is not None:
            raise ValueError(
                f"halfstep: StateStreaming steps states on the GPU, and store={options['store']!r}"
                " keeps them in a file for the processor: use CPUOffload(..., store=)"
            )
        self.buffer = buffer
        super().__init__(params, recipe, minimal_size=minimal_size, **options)
