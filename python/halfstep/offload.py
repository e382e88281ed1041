"""`CPUOffload`: weights on a GPU, states and steps in CPU memory."""

from typing import Any, Dict, Type, Union

from ._library import abi
from ._placement.host import Offloaded
from ._placement.overlap import Overlap, window
from .optimizer import Kept, Optimizer, Params
from .streaming import Hosted


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

    _placement = Offloaded
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

    def _make_parts(self):
        super()._make_parts()
        self._parts.placement.overlap = Overlap(self._parts)

    @property
    def _step_supports_amp_scaling(self):
        # Where it is False, a GradScaler divides gradients by an operator that moves no version
        # counters.
        mode = "offload_gradients" if self.offload_gradients else "gradient_release"
        if getattr(self, mode):
            raise RuntimeError(
                f"halfstep: a GradScaler finds no gradients on the GPU where {mode}=True gives"
                " them up; train without one (BF16 needs none)"
            )
        self._parts.placement.doubt()
        return super()._step_supports_amp_scaling

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group as torch's optimizers do."""
        super().add_param_group(param_group)
        self._parts.placement.hook()

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients as torch's optimizers do, and forgets gradients that exist only here,
        and results in advance."""
        self._parts.placement.settle()
        self._parts.placement.drop()
        self._parts.placement.overlap.drop()
        super().zero_grad(set_to_none)

    def __setstate__(self, state):
        super().__setstate__(state)
        self._parts.placement.hook()
