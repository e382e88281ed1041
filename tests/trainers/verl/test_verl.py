"""Tests verl with its own engine of FSDP: its configuration, optimizer, loop over micro-batches,
clipping, schedule and checkpoints.

verl registers no platform for the CPU, so this file registers one, as the platforms of others do.
One process is the whole group, over gloo. Weights are FSDP2's, because verl's FSDP1 begins with a
broadcast that torch makes on GPUs only.
"""

import os
import shlex

import pytest
import torch
from common import EXACT, OPTIONS, bits, blocks, goes_on, language_model
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

import halfstep

pytestmark = pytest.mark.filterwarnings("ignore")


class Memory:
    """Is torch.cpu with the calls about memory that verl makes for its log."""

    def mem_get_info(self):
        return 0, 0

    def __getattr__(self, name):
        return getattr(torch.cpu, name, lambda *_, **__: 0)


CPU = {
    "device_name": property(lambda _: "cpu"),
    "vendor_name": property(lambda _: "cpu"),
    "device_module": property(lambda _: Memory()),
    "is_available": lambda _: True,
    "current_device": lambda _: torch.device("cpu"),
    "device_count": lambda _: 1,
    "communication_backend_name": lambda _: "gloo",
    "get_device_capability": lambda *_: (None, None),
    "is_ipc_supported": lambda _: False,
}
_nothing = {name: lambda *_: None for name in PlatformBase.__abstractmethods__}
PlatformRegistry.register("cpu")(type("PlatformCPU", (PlatformBase,), {**_nothing, **CPU}))
# The engine is registered for "cuda" and asks the platform for everything that is CUDA's.
os.environ.update(VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda", VERL_LOGGING_LEVEL="WARN")

from hydra import compose, initialize_config_module  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.utils.losses import sft_loss  # noqa: E402

BLOCK = [line for line in shlex.split(blocks("verl", "bash")[0].replace("\\\n", "")) if "=" in line]
FIXED = [
    "engine.strategy=fsdp2",
    "engine.use_torch_compile=false",
    "model.enable_gradient_checkpointing=false",
    "model.use_remove_padding=false",
    "+model.load_tokenizer=false",
    "+model.override_config={attn_implementation: eager}",
]
F32 = ["+engine.mixed_precision={param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"]
BF16 = ["engine.model_dtype=bf16", "optim.optimizer_impl=halfstep"]


def given(**options):
    """Returns the override that hands options to the optimizer."""
    pairs = ", ".join(f"{key}: {value}" for key, value in options.items())
    return f"optim.override_optimizer_config={{{pairs}}}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Saves a model and makes the group of one process."""
    made = tmp_path_factory.mktemp("model")
    language_model(dtype=torch.float32).save_pretrained(made)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield made
    torch.distributed.destroy_process_group()


@pytest.fixture
def make(folder):
    """Returns a function that makes an engine with overrides of verl's configuration."""

    def engine(*overrides):
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("sft_trainer_engine", [f"model.path={folder}", *FIXED, *overrides])
        names = ("model", "engine", "optim", "checkpoint")
        parts = [omega_conf_to_dataclass(config[name]) for name in names]
        made = EngineRegistry.new("language_model", "fsdp2", *parts)
        made.initialize()
        made.start = [p.detach().clone() for p in made.module.parameters()]
        made.steps = []
        made.optimizer.register_step_pre_hook(lambda opt, *_: note(made, opt))
        return made

    return engine


def note(engine, opt):
    """Keeps the gradients that a step gets, and its rate."""
    grads = [None if p.grad is None else p.grad.clone() for p in engine.module.parameters()]
    engine.steps.append((grads, opt.param_groups[0]["lr"]))


def batch(step, size=8, micro=8):
    """Returns sentences of random words. The first word of each follows nothing, so it has no
    loss."""
    words = torch.randint(64, (size, 16), generator=torch.Generator().manual_seed(step))
    tensors = {
        "input_ids": words,
        "position_ids": torch.arange(16).expand(size, 16),
        "loss_mask": torch.ones(size, 16).index_fill(1, torch.tensor([0]), 0),
    }
    tensors = {
        name: torch.nested.as_nested_tensor(list(value), layout=torch.jagged)
        for name, value in tensors.items()
    }
    rest = {
        "use_remove_padding": False,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": micro,
        "temperature": 1.0,
        "pad_mode": "no_padding",
        "pad_token_id": 0,
    }
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=rest)


def loss_of(**inputs):
    return sft_loss(None, **inputs)


def train(engine, steps, micro=8):
    """Trains as the trainers of verl do. Returns the losses."""
    losses = []
    for step in steps:
        with engine.train_mode():
            output = engine.train_batch(batch(step % 4, micro=micro), loss_of)
            losses.append(sum(output["loss"]))
            engine.lr_scheduler_step()
    return losses


def by_hand(engine, **options):
    """Steps halfstep's optimizer with the gradients of a run. Returns the weights."""
    weights = [torch.nn.Parameter(p.clone()) for p in engine.start]
    options = {"weight_decay": 0.01, **OPTIONS, **options}
    opt = halfstep.AdamW(weights, lr=1e-2, **options)
    for grads, lr in engine.steps:
        opt.param_groups[0]["lr"] = lr
        for p, grad in zip(weights, grads):
            p.grad = grad.clone()
        opt.step()
    return [local(p) for p in weights]


def as_local(p):
    return p.to_local() if isinstance(p, torch.distributed.tensor.DTensor) else p


def local(p):
    return bits(as_local(p))


def weights_of(engine):
    return [local(p) for p in engine.module.parameters()]


@pytest.mark.cell("verl", "plain")
def test_the_block_of_the_manual_trains(make):
    engine = make(*BLOCK)
    losses = train(engine, range(6))
    assert isinstance(engine.optimizer, halfstep.AdamW)
    assert engine.optimizer.param_groups[0]["group_steps"] == 6 and losses[4] < losses[0]
    assert all(old.dtype == torch.bfloat16 for old in engine.start)
    assert weights_of(engine) != [local(p) for p in engine.start]


@pytest.mark.cell("verl", "resume")
def test_a_run_resumes_bit_for_bit(make, tmp_path):
    """verl's manager saves weights and states of each rank by torch.save, and the schedule."""
    whole, again = (make(*BF16, "optim.lr=1e-2", given(**OPTIONS)) for _ in range(2))
    train(whole, range(3))
    whole.save_checkpoint(str(tmp_path))
    goes_on(whole.module, whole.optimizer, tmp_path)
    train(whole, range(3, 6))
    assert (tmp_path / "optim_world_size_1_rank_0.pt").exists()
    again.load_checkpoint(str(tmp_path), del_local_after_load=False)
    train(again, range(3, 6))
    assert weights_of(whole) == weights_of(again)
    assert states_of(whole) == states_of(again) != []


def states_of(engine):
    """Returns the bits of all states in the order of parameters."""
    found = engine.optimizer.state_dict()["state"]
    return [
        (i, name, local(value))
        for i in found
        for name, value in found[i].items()
        if isinstance(value, torch.Tensor)
    ]


@pytest.mark.cell("verl", "accumulate")
def test_accumulated_gradients_make_one_step(make):
    engine = make(*BF16, "optim.lr=1e-2", given(**OPTIONS))
    train(engine, range(4), micro=2)
    assert engine.optimizer.param_groups[0]["group_steps"] == 4
    assert weights_of(engine) == by_hand(engine)


@pytest.mark.cell("verl", "accumulate")
def test_accumulation_is_a_larger_batch(make):
    exact = [*F32, "optim.optimizer_impl=halfstep", given(**EXACT)]
    runs = [train(make(*exact), range(10), micro=micro) for micro in (2, 8)]
    assert max(abs(one - other) for one, other in zip(*runs)) < 1e-4
    assert runs[0][8] < runs[0][0] - 0.1


@pytest.mark.cell("verl", "clip")
def test_the_engine_clips(make):
    engine = make(*BF16, "optim.lr=1e-2", "optim.clip_grad=0.1", given(**OPTIONS))
    train(engine, range(4))
    for grads, _ in engine.steps:
        assert torch.cat([as_local(grad).float().flatten() for grad in grads]).norm() < 0.101
    assert weights_of(engine) == by_hand(engine)


@pytest.mark.cell("verl", "clip")
def test_the_optimizer_clips_if_the_engine_does_not(make):
    engine = make(*BF16, "optim.lr=1e-2", "optim.clip_grad=inf", given(clip_norm=0.1, **OPTIONS))
    train(engine, range(4))
    assert engine.optimizer.grad_norm > 0.1
    assert weights_of(engine) == by_hand(engine, clip_norm=0.1) != by_hand(engine)


@pytest.mark.cell("verl", "release")
def test_gradients_are_released(make):
    """The engine's clipping finds no gradients then."""
    whole = make(*BF16, "optim.lr=1e-2", "optim.clip_grad=inf", given(**OPTIONS))
    engine = make(*BF16, "optim.lr=1e-2", given(gradient_release="true", **OPTIONS))
    for one in (whole, engine):
        train(one, range(4))
    assert all(grad is None for grads, _ in engine.steps for grad in grads)
    assert weights_of(whole) == weights_of(engine)


def test_release_is_refused_under_accumulation(make):
    engine = make(*BF16, given(gradient_release="true", **OPTIONS))
    with pytest.raises(RuntimeError, match="gradient_release=False"):
        train(engine, range(2), micro=2)


@pytest.mark.cell("verl", "EMA")
def test_an_average_follows_the_optimizer(make):
    """It has the bits of an average of whole weights."""
    engine = make(*BF16, "optim.lr=1e-2", given(**OPTIONS))
    ema = halfstep.EMA(engine.module, 0.5, "bf16-kahan")
    whole = language_model(dtype=torch.bfloat16)
    twin = halfstep.EMA(whole, 0.5, "bf16-kahan")

    def update(opt, *_):
        ema.update_parameters(engine.module)
        whole.load_state_dict({name: as_local(p) for name, p in engine.module.named_parameters()})
        twin.update_parameters(whole)

    engine.optimizer.register_step_post_hook(update)
    train(engine, range(4))
    own = weights_of(engine)
    averages = [local(p) for p in ema.module.parameters()]
    assert averages == [bits(p) for p in twin.module.parameters()] != own
    with ema.swapped(engine.module):
        assert weights_of(engine) == averages
        engine.module(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert weights_of(engine) == own


def test_losses_are_those_of_torch(make):
    runs = []
    for overrides in ([], ["optim.optimizer_impl=halfstep", given(**EXACT)]):
        runs.append(train(make(*F32, *overrides), range(50)))
    assert len(runs[0]) == 50 and max(abs(one - other) for one, other in zip(*runs)) < 1e-5
