"""`CPUOffload`: weights on a GPU, states and steps in CPU memory."""

from functools import lru_cache
from typing import Any, Type, Union

from ._library import abi
from ._placement.overlap import window
from ._placement.streams import Streamed
from ._states.handles import Handle
from ._tensors import devices, matrices, sharding
from ._tensors.sharding import local, stored
from .optimizer import Kept, Optimizer, Params
from .streaming import Hosted


class _Chosen(Streamed):
    """Steps large parameters of any device in CPU memory. Matrices of a rule with products are
    stepped on the GPU, with their states streamed."""

    active = True

    def _is_streamed(self, p):
        return (
            self.groups.options.store is None
            and p.dim() > 1
            and matrices.has_products(self.groups.row_for(p))
            and super()._is_streamed(p)
            and _can_step_on(devices.of(stored(p)))
        )

    def _is_offloaded(self, p):
        options = self.groups.options
        return (
            self.may_leave(p)
            and not self._is_streamed(p)
            and (
                local(p).numel() >= options.minimal_size
                or options.store is not None
                or sharding.is_dtensor(p)
                or options.norm_group is not None
                or not _can_step_on(devices.of(stored(p)))
            )
        )

    def _tell(self, params):
        """Warns of nothing, because this is what was asked for."""


@lru_cache(None)
def _can_step_on(device):
    """Returns True if the library steps on a device of this machine. Only small tensors need
    it."""
    if not devices.has_kernels(device):
        return False
    try:
        Handle(1, 0, device)
    except abi.HalfstepError:
        return False
    return True


class CPUOffload(Hosted):
    """An optimizer whose states and steps are in CPU memory while its weights are on a GPU.

        opt = halfstep.CPUOffload(
            model.named_parameters(), "adamw/bf16-sr/int8", lr=1e-4, clip_norm=1.0
        )
        opt = halfstep.CPUOffload(
            model.named_parameters(), halfstep.Lion, lr=1e-5, states="int4"
        )

    It is an optimizer of the class of its recipe, with all options and the same bits. State
    dictionaries of both load into each other. Gradients are copied to pinned memory on a stream of
    their own while the backward pass goes on. step() waits for the last gradient, checks and clips
    all of them together, and steps. The weights are copied back on another stream, which the next
    forward pass waits for.

    recipe              a recipe, or a class of this package
    offload_gradients   gradients are freed on the GPU as soon as they are here. Those of further
                        backward passes are added here, and step() or zero_grad() forgets them.
                        torch.nn.utils.clip_grad_norm_() finds none then, so use clip_norm=. A
                        GradScaler's step() raises RuntimeError
    minimal_size        parameters of fewer elements are stepped on the GPU, and their states are
                        there, too. DTensors, optimizers with a norm_group, and GPUs for which the
                        library has no kernels have no such parameters
    gradient_release    a thread steps each parameter as soon as its gradient is here, while the
                        backward pass goes on. Tensors are then checked singly, and clipped by the
                        norm of the round before or by their own: see prepare_gradient_release()
    overlap             True: a thread steps each parameter in advance as soon as its gradient is
                        here, into memory of its own. step() takes these results where nothing is
                        clipped and nothing has changed, and makes the others again, with the same
                        bits. A size ("8G"): the results take at most so many bytes, and parameters
                        without room are stepped in step(). docs/guides/offload.md says more
    options             of the class: lr, betas, clip_norm ...

    Matrices of Muon are stepped on the GPU, because a processor is slow at their products. Their
    states are in CPU memory and pass through the GPU, as with `StateStreaming`. Their gradients
    stay on the GPU until they are stepped, also with offload_gradients.

    A parameter takes CPU memory for its states, and 2 bytes an element (BF16) each for copies of
    the weight and of the gradient. The copies are pinned. The states never leave and are not
    pinned. In gradient_release, parameters of one size share copies of gradients. There are then as
    many copies as are on their way at once. Parameters in CPU memory are stepped there.

    A gradient that is written after its backward pass is copied again if the write is known. Writes
    of torch's operators, of DistributedDataParallel and of a GradScaler are known. After
    torch.distributed.all_reduce(p.grad), or a kernel of your own, call
    torch.autograd.graph.increment_version(p.grad).

    In gradient_release, step() has to be called after each backward pass. Work of the GPU after
    step() then waits for the weights.
    """

    _placement = _Chosen
    offload_gradients, overlap = Kept(), Kept(False)

    def __init__(
        self,
        params: Params,
        recipe: Union[str, Type[Optimizer]] = "adamw",
        *,
        offload_gradients: bool = False,
        minimal_size: int = 4096,
        overlap: Union[bool, int, float, str] = False,
        **options: Any,
    ) -> None:
        abi.check_flags(offload_gradients=offload_gradients)
        self.offload_gradients, self.overlap = offload_gradients, window(overlap)
        if self.overlap and options.get("store") is not None:
            raise ValueError(
                "halfstep: overlap= and store= do not go together, because results in advance are"
                " put beside states in memory: leave one of them out"
            )
        super().__init__(params, recipe, minimal_size=minimal_size, **options)

    @property
    def _step_supports_amp_scaling(self):
        mode = "offload_gradients" if self.offload_gradients else "gradient_release"
        if getattr(self, mode):
            raise RuntimeError(
                f"halfstep: a GradScaler finds no gradients on the GPU where {mode}=True gives"
                " them up; train without one (BF16 needs none)"
            )
        return super()._step_supports_amp_scaling

    @property
    def redone_steps(self) -> int:
        """The number of steps in which a parameter was stepped again although it had been stepped
        in advance (overlap=)."""
        return self._parts.placement.overlap.redone

    def prepare_gradient_release(self) -> None:
        """See halfstep.Optimizer. Raises ValueError with overlap=, which is for step()."""
        if self.overlap:
            raise ValueError(
                "halfstep: overlap= and gradient_release= do not go together, because gradient"
                " release makes each step in the backward pass already: leave one of them out"
            )
        super().prepare_gradient_release()
