"""Tests parameters and states that trainers move about between steps, in forward and in backward.
Every pattern gives the bits of a run in which nothing moves, or is refused by name.

The patterns are those of musubi-tuner, OneTrainer, Accelerate, and of trainers that move states to
another device between phases, written from what they do. The GPU is the fake of fake_gpu.py; torch
computes for it at once, so tests move weights once all work on its current streams is done.
"""

import weakref

import pytest
import torch
from conftest import randn, warnings_are, weights_of
from test_cuda import fake, gpu  # noqa: F401
from test_cuda import held as all_bits
from torch import nn

import halfstep

WIDTH, STEPS = 40, 4
#: matrices leave the GPU, and biases are small
KINDS = {
    "Optimizer": (halfstep.AdamW, {}),
    "CPUOffload": (halfstep.CPUOffload, {"minimal_size": 1000}),
    "offload_gradients": (
        halfstep.CPUOffload,
        {"minimal_size": 1000, "offload_gradients": True},
    ),
    "overlap": (halfstep.CPUOffload, {"minimal_size": 1000, "overlap": True}),
    "StateStreaming": (halfstep.StateStreaming, {"minimal_size": 1000, "buffer": 3000}),
    "store": (halfstep.CPUOffload, {"store": "states"}),
}
kinds = pytest.mark.parametrize("kind", KINDS)
weights = pytest.mark.parametrize("weights", ["bf16-sr", "bf16-ecc8"])


def kinds_by(*ways):
    """Who steps: step(), the hooks of gradient release, or a trainer's own hooks. overlap= and
    gradient release exclude each other."""
    pairs = [(kind, way) for kind in KINDS for way in ways if (kind, way) != ("overlap", "release")]
    return pytest.mark.parametrize("kind, way", pairs, ids=map("|".join, pairs))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in range(4)
        )
        self.to(torch.bfloat16)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def make(model, kind="Optimizer", way="step", folder=None, **options):
    cls, where = KINDS[kind]
    if "store" in where:
        where = {"store": str(folder / where["store"])}
    options = {"lr": 1e-2, "states": "int8", "seed": 5, **where, **options}
    opt = cls(model.named_parameters(), gradient_release=way == "release", **options)
    if way == "step_param":
        # Python frees no cycle through a hook of torch, and the GPU has little memory.
        optimizer = weakref.ref(opt)

        def hook(p):
            optimizer().step_param(p, optimizer().param_groups[0])
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
    return opt


def backward(model, step):
    x = randn((8, WIDTH), step, torch.bfloat16).requires_grad_()
    model(x).float().pow(2).mean().backward()


class Run:
    """Two models that make the same steps: one on the processor, where nothing moves, and one on
    the GPU."""

    def __init__(self, gpu, folder, kind, way="step", mover=None, late=False, **options):
        self.gpu, self.way, self.steps = gpu, way, 0
        self.here, self.there = Net(), gpu.model(Net())
        self.plain = make(self.here, **options)
        self.mover = None if mover is None or late else mover(gpu, self.there.blocks)
        self.opt = make(self.there, kind, way, folder, **options)
        if late:
            self.mover = mover(gpu, self.there.blocks)

    def step(self, between=lambda: None):
        backward(self.here, self.steps)
        self.plain.step()
        self.plain.zero_grad()
        backward(self.there, self.steps)
        between()
        if self.way != "step_param":
            self.opt.step()
        self.opt.zero_grad()
        self.steps += 1
        self.gpu.synchronize()
        now = [self.gpu.read(p) for p in self.there.parameters()]
        assert weights_of(now) == weights_of(self.here), f"step {self.steps}"

    def same(self):
        found = [
            all_bits(self.gpu, dict(model.named_parameters()), opt)[:2]
            for model, opt in ((self.here, self.plain), (self.there, self.opt))
        ]
        assert found[0] == found[1]


# ---- Weights -------------------------------------------------------------------------------------


def matrices(block):
    return [p for p in block.parameters() if p.dim() > 1]


class BlockSwap:
    """As musubi-tuner does: the matrices of the last two blocks wait in CPU memory. After each of
    the first two blocks has computed, they take the memory of its matrices on the GPU, and backward
    hooks give it back."""

    pinned = False

    def __init__(self, gpu, blocks):
        self.gpu, self.blocks, self.spare = gpu, blocks, None
        for block in blocks[2:]:
            for p in matrices(block):
                p.data = gpu.read(p)
        for i in (0, 1):
            blocks[i].register_forward_hook(lambda *_, i=i: self.exchange(i, i + 2))
            blocks[2 - i].register_full_backward_hook(lambda *_, i=i: self.exchange(3 - i, 1 - i))

    def exchange(self, out, into):
        self.gpu.synchronize()
        leaving, coming = matrices(self.blocks[out]), matrices(self.blocks[into])
        if self.spare is None or not self.pinned:
            self.spare = [torch.empty_like(p.data) for p in leaving]
        for i, (a, b) in enumerate(zip(leaving, coming)):
            there, here, spare = a.data, b.data, self.spare[i]
            spare.copy_(there)
            there.copy_(here)
            b.data = there
            if self.pinned:  # the memory that was left is the next spare one
                a.data, self.spare[i] = spare, here
            else:
                a.data = here.copy_(spare)


class PinnedBlockSwap(BlockSwap):
    pinned = True


class Layers:
    """As OneTrainer does: the tensors of two layers are views of one buffer on the GPU, and those
    of the others are views of one in CPU memory. A layer that moves takes the room that has been
    free for longest, so that it lies elsewhere in each step."""

    def __init__(self, gpu, blocks):
        self.gpu, self.blocks = gpu, blocks
        self.room = max(sum(p.numel() * 2 + 4 for p in b.parameters()) for b in blocks)
        self.buffers = [torch.zeros(n * self.room, dtype=torch.uint8) for n in (5, 3)]
        self.buffers[1] = gpu.tensor(self.buffers[1])
        self.free, self.places = [list(range(5)), list(range(3))], [None] * 4
        for i, block in enumerate(blocks):
            self.move(i, i < 2)
            block.register_forward_pre_hook(lambda *_, i=i: self.before(i, i - 1, i - 1 < 2))
            block.register_full_backward_pre_hook(
                lambda *_, i=i: self.before(i, i + 1, 2 <= i + 1 < 4)
            )

    def before(self, i, other, leaves):
        if leaves and other >= 0:
            self.move(other, False)
        self.move(i, True)

    def move(self, i, to_gpu):
        before = self.places[i]
        if before and before[0] == to_gpu:
            return
        self.gpu.synchronize()
        self.places[i] = to_gpu, self.free[to_gpu].pop(0)
        at = self.places[i][1] * self.room
        for p in self.blocks[i].parameters():
            view = self.buffers[to_gpu][at : at + p.numel() * 2].view(p.dtype).view(p.shape)
            p.data = view.copy_(p.data)
            at += -(-p.numel() * 2 // 4) * 4
        if before:
            self.free[before[0]].append(before[1])


movers = pytest.mark.parametrize("mover", [BlockSwap, PinnedBlockSwap, Layers])


@kinds_by("step", "release", "step_param")
@movers
@weights
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_weights_that_move_in_forward_and_backward(fake, tmp_path, kind, way, mover, weights, late):
    """They begin to move before or after the optimizer is made. step() finds some of them in CPU
    memory, while their gradients are on the GPU. CPUOffload steps them there."""
    run = Run(fake, tmp_path, kind, way, mover, late, weights=weights)
    if way == "step" and kind in ("Optimizer", "StateStreaming"):
        with pytest.raises(ValueError, match=r"'blocks.2.0.weight' is on cuda:0, .* on cpu; bring"):
            run.step()
        return
    with warnings_are("error"):  # no residual is dropped
        for _ in range(STEPS):
            run.step()
    run.same()


@kinds
@weights
def test_a_model_that_leaves_between_steps(fake, tmp_path, kind, weights):
    """As Accelerate's cpu_offload_with_hook() and module.to() do. Some steps are made while the
    model is in CPU memory."""
    run = Run(fake, tmp_path, kind, weights=weights)
    hooks = {p: list((p._backward_hooks or {}).items()) for p in run.there.parameters()}
    with warnings_are("error"):
        for step in range(2 * STEPS):
            if step in (2, 5):
                for p in run.there.parameters():
                    p.data = fake.read(p)
                    p._backward_hooks.clear()  # they put gradients on the GPU
            if step in (4, 6):
                for p in run.there.parameters():
                    p.data = fake.tensor(p)
                    p._backward_hooks.update(hooks[p])
            run.step()
    run.same()


def test_moves_during_steps_of_a_thread_are_refused(fake, tmp_path):
    """The thread of CPUOffload's gradient release may not have put the weight back yet."""
    run = Run(fake, tmp_path, "CPUOffload", "release")
    run.step()
    first = next(run.there.parameters())

    def move():
        first.data = fake.tensor(first)

    with pytest.raises(RuntimeError, match="'blocks.0.0.weight' was moved while gradient_release"):
        run.step(move)


def test_weights_of_which_others_took_the_memory_are_still_watched(fake, tmp_path):
    """A weight that is written besides loses its residual, and a warning says so."""
    run = Run(fake, tmp_path, "Optimizer", "release", Layers, weights="bf16-ecc8")
    for _ in range(2):
        run.step()
    with torch.no_grad():
        for model in (run.here, run.there):
            model.blocks[0][0].weight.mul_(0.5)
    with pytest.warns(UserWarning, match="'blocks.0.0.weight' was written"):
        run.step()
    run.same()


# ---- States --------------------------------------------------------------------------------------


def replaced(state, place):
    for held in state.values():
        for key, value in list(held.items()):
            held[key] = place(value)


def by_data(state, place):
    """As OneTrainer does, on state_dict()."""
    for held in state.values():
        for value in held.values():
            value.data = place(value)


def without_numbers(state, place):
    for held in state.values():
        for key, value in list(held.items()):
            if value.dim():
                held[key] = place(value)


moves = pytest.mark.parametrize("move", [replaced, by_data, without_numbers])


@kinds_by("step", "release")
@moves
@weights
def test_states_that_move_between_phases(fake, tmp_path, kind, way, move, weights):
    """There and back, with the model; one way; and before the first look at them."""
    run = Run(fake, tmp_path, kind, way, weights=weights)
    with warnings_are("error"):
        for step in range(2 * STEPS):
            run.step()
            state = run.opt.state_dict()["state"] if move is by_data else run.opt.state
            if step % 4 == 1:
                move(state, fake.tensor)
            elif step % 4 == 2:
                move(state, fake.read)
            elif step % 4 == 3:
                move(state, fake.read)
                for p in run.there.parameters():
                    p.data = fake.read(p)
                for p in run.there.parameters():
                    p.data = fake.tensor(p)
                move(state, fake.tensor)
    run.same()


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
@moves
def test_states_that_move_on_the_processor(rule, move):
    """Also those of a rule without streams, whose numbers alone move."""
    runs = []
    for moving in (False, True):
        model = Net()
        opt = halfstep.optimizer(f"{rule}/bf16-ecc8/int8", model.named_parameters(), lr=1e-2)
        model.blocks[1].requires_grad_(False)
        for step in range(STEPS):
            model.blocks[2].requires_grad_(step % 2 == 0)  # a step looks closer then
            backward(model, step)
            opt.step()
            opt.zero_grad()
            if moving:
                move(opt.state, torch.clone)
                fill = [torch.full((), 7.0) for _ in range(64)]  # takes memory that was freed
        runs.append((weights_of(model), opt.state_dict()["state"]))
    (a, b), (c, d) = runs
    assert a == c
    for one, other in zip(b.values(), d.values()):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert all(float(value) == 7.0 for value in fill)


@kinds
def test_memory_that_states_leave_is_free(fake, tmp_path, kind):
    """So that trainers can use it between phases."""
    run = Run(fake, tmp_path, kind)
    for _ in range(2):
        run.step()
        left = [
            weakref.ref(value)
            for held in run.opt.state.values()
            for value in held.values()
            if value.dim()
        ]
        replaced(run.opt.state, torch.clone)
        if kind == "StateStreaming":
            fake.works.clear()  # what the fake itself keeps alive
            fake.pins.clear()
        assert left and not any(tensor() is not None for tensor in left)
    run.step()
    run.same()


# ---- Accelerate's hooks --------------------------------------------------------------------------


def test_hooks_that_compute_with_other_tensors_are_told(caught):
    """cpu_offload() gives the module new tensors in each pass, so that parameters of an optimizer
    have no gradients."""
    accelerate = pytest.importorskip("accelerate")
    model = Net()
    opt = make(model)
    accelerate.cpu_offload(model, torch.device("cpu"))
    for step in range(3):
        backward(model, step)
        opt.step()
    assert len([w for w in caught if "no parameter has had a gradient" in str(w.message)]) == 1
    late = make(model)
    backward(model, 3)
    with pytest.raises(ValueError, match="'blocks.0.0.weight' is on meta and never has a gradient"):
        late.step()


def test_hooks_that_leave_parameters_alone():
    accelerate = pytest.importorskip("accelerate")
    plain, model = Net(), Net()
    model, hook = accelerate.cpu_offload_with_hook(model, torch.device("cpu"))
    accelerate.hooks.attach_align_device_hook(model.blocks[0], execution_device="cpu")
    both = [(plain, make(plain)), (model, make(model))]
    for step in range(STEPS):
        for net, opt in both:
            backward(net, step)
            opt.step()
            opt.zero_grad()
        hook.offload()
    assert weights_of(plain) == weights_of(model)


# ---- FSDP2's CPUOffloadPolicy --------------------------------------------------------------------


def offloaded_by_fsdp(rank, size, kind, way):
    """Returns the weights after some steps of a sharded model whose parameters torch keeps in CPU
    memory, and those of a whole one with the same gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model, whole = Net(), Net()
    given = {}
    policy = CPUOffloadPolicy(pin_memory=False)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (size,)), offload_policy=policy)
    for name, p in model.named_parameters():  # before the optimizer's hooks

        def keep(p, name=name):
            given[name] = p.grad.full_tensor().clone()

        p.register_post_accumulate_grad_hook(keep)
    opts = make(model, kind, way), make(whole)
    for step in range(STEPS):
        backward(model, step)
        for name, p in whole.named_parameters():
            p.grad = given[name]
        for opt in opts:
            opt.step()
            opt.zero_grad()
    return [weights_of([p.full_tensor() for p in model.parameters()]), weights_of(whole)]


@pytest.mark.all
@pytest.mark.parametrize("size", [1, 2])
@kinds_by("step", "release")
def test_cpu_offload_policy(pool, size, way, kind):
    if kind == "store":
        pytest.skip("a file holds no DTensors; test_store.py has the refusal")
    for sharded, whole in pool.run(size, offloaded_by_fsdp, kind, way):
        assert sharded == whole
