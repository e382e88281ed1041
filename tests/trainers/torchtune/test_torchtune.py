"""torchtune's own recipe, full_finetune_single_device, trains a small Llama in BF16 on the CPU."""

import importlib.util
import inspect
import os

import pytest
import torch
import torchtune
from common import OPTIONS, bits, blocks, same
from omegaconf import OmegaConf

import halfstep

pytestmark = pytest.mark.filterwarnings("ignore")

MODEL = {
    "_component_": "torchtune.models.llama2.llama2",
    "vocab_size": 64,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "max_seq_len": 32,
}


class Tokenizer:
    pad_id = 0


class Sentences(torch.utils.data.Dataset):
    def __init__(self, tokenizer):
        pass

    def __len__(self):
        return 12

    def __getitem__(self, i):
        ids = torch.randint(1, 64, (8,), generator=torch.Generator().manual_seed(i)).tolist()
        return {"tokens": ids, "labels": list(ids)}


def _recipe():
    """Returns the module of the recipe, which the wheel has beside the package and not in it."""
    folder = os.path.join(os.path.dirname(os.path.dirname(torchtune.__file__)), "recipes")
    path = os.path.join(folder, "full_finetune_single_device.py")
    spec = importlib.util.spec_from_file_location("recipe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RECIPE = _recipe()


def initial():
    torch.manual_seed(0)
    with torchtune.training.set_default_dtype(torch.bfloat16):  # also for what RoPE keeps
        return torchtune.config.instantiate(OmegaConf.create(MODEL))


def run(folder, optimizer=(), resume=False, **options):
    """Trains two epochs of six steps with the documented block and further options. Returns the
    recipe."""
    begin, out = folder / "begin", folder / "out"
    begin.mkdir(exist_ok=True)
    torch.save(initial().state_dict(), begin / "model.pt")
    checkpointer = {
        "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
        "checkpoint_dir": str(begin),
        "checkpoint_files": ["model.pt"],
        "output_dir": str(out),
        "model_type": "LLAMA2",
    }
    if resume:  # from the end of the first epoch
        checkpointer["checkpoint_files"] = ["epoch_0/model-00001-of-00001.bin"]
    given = dict(
        device="cpu",
        dtype="bf16",
        output_dir=str(out),
        resume_from_checkpoint=resume,
        gradient_accumulation_steps=1,
        seed=1,
        epochs=2,
        max_steps_per_epoch=None,
        compile=False,
        batch_size=2,
        shuffle=False,
        checkpointer=checkpointer,
        metric_logger={
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(folder / "log"),
        },
        model=MODEL,
        tokenizer={"_component_": f"{__name__}.Tokenizer"},
        dataset={"_component_": f"{__name__}.Sentences"},
        loss={"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    )
    (block,) = blocks("torchtune", "yaml")
    config = OmegaConf.merge(
        OmegaConf.create(given),
        OmegaConf.create(block),
        {"optimizer": {"lr": 1e-2, **OPTIONS, **dict(optimizer)}, **options},
    )
    recipe = RECIPE.FullFinetuneRecipeSingleDevice(config)
    recipe.setup(config)
    recipe.train()
    return recipe


def result(recipe):
    return recipe._model, recipe._optimizer


@pytest.mark.cell("torchtune", "plain")
def test_plain(tmp_path):
    model, opt = result(run(tmp_path))
    assert type(opt) is halfstep.AdamW and opt.param_groups[0]["group_steps"] == 12
    assert all(bits(p) != bits(q) for p, q in zip(model.parameters(), initial().parameters()))


@pytest.mark.cell("torchtune", "resume")
def test_resume(tmp_path):
    whole = result(run(tmp_path))
    same(whole, result(run(tmp_path, resume=True)))
    begun = halfstep.AdamW(
        whole[0].named_parameters(), states_from=str(tmp_path / "out"), **OPTIONS
    )
    assert begun.param_groups[0]["group_steps"] == 6 and all(
        map(begun.state.get, whole[0].parameters())
    )


def by_hand(recipe, parts=1, clip=None, divided=True, **options):
    """Steps halfstep without the recipe. divided: by means over tokens, not by sums."""
    model = initial()
    opt = halfstep.AdamW(model.parameters(), lr=1e-2, **OPTIONS, **options)
    model.set_num_output_chunks(recipe._loss_fn.num_output_chunks)
    mine = RECIPE.FullFinetuneRecipeSingleDevice.__new__(RECIPE.FullFinetuneRecipeSingleDevice)
    mine.__dict__.update(recipe.__dict__, _model=model)
    for epoch in range(2):
        recipe._dataloader.sampler.set_epoch(epoch)
        tokens = 0
        for i, batch in enumerate(recipe._dataloader):
            count = (batch["labels"] != recipe._loss_fn.ignore_index).sum()
            tokens += count
            (mine._loss_step(batch) * count).backward()
            if (i + 1) % parts == 0:
                if divided:
                    torchtune.training.scale_grads(model, 1 / tokens)
                if clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                opt.step()
                opt.zero_grad()
                tokens = 0
    return model, opt


@pytest.mark.cell("torchtune", "accumulate")
def test_accumulate(tmp_path):
    recipe = run(tmp_path, gradient_accumulation_steps=2)
    same(result(recipe), by_hand(recipe, parts=2))


@pytest.mark.cell("torchtune", "clip")
def test_clip(tmp_path):
    recipe = run(tmp_path, {"clip_norm": 0.1})
    same(result(recipe), by_hand(recipe, clip_norm=0.1))
    (tmp_path / "trainer").mkdir()
    recipe = run(tmp_path / "trainer", clip_grad_norm=0.1)
    same(result(recipe), by_hand(recipe, clip=0.1))


@pytest.mark.cell("torchtune", "release")
def test_optimizer_in_backward(tmp_path):
    """One optimizer for each parameter. A resumed run ends with the same bits."""
    whole = run(tmp_path, optimizer_in_bwd=True)
    again = run(tmp_path, optimizer_in_bwd=True, resume=True)
    assert len(whole._optim_ckpt_wrapper.optim_map) == len(list(whole._model.parameters()))
    for name, opt in whole._optim_ckpt_wrapper.optim_map.items():
        assert opt.param_groups[0]["group_steps"] == 12
        one, other = torch.nn.Module(), torch.nn.Module()
        one.w, other.w = whole._model.get_parameter(name), again._model.get_parameter(name)
        same((one, opt), (other, again._optim_ckpt_wrapper.optim_map[name]))


@pytest.mark.cell("torchtune", "release")
def test_release(tmp_path):
    """Gradients are gone when the recipe would divide them by the number of tokens."""
    recipe = run(tmp_path, {"gradient_release": True})
    same(result(recipe), by_hand(recipe, divided=False))


@pytest.mark.parametrize(
    "optimizer, options, match",
    [
        ({}, {"optimizer_in_bwd": True}, "accumulation is not supported"),
        ({"gradient_release": True}, {}, "gradient_release"),
    ],
)
def test_release_refuses_accumulation(tmp_path, optimizer, options, match):
    with pytest.raises(RuntimeError, match=match):
        run(tmp_path, optimizer, gradient_accumulation_steps=2, **options)


@pytest.mark.cell("torchtune", "EMA")
def test_ema(cell):
    assert "callback" not in inspect.getsource(RECIPE)
    cell.says("The trainer has no callbacks; use halfstep.EMA in a loop of your own.")
