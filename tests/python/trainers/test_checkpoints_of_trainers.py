"""Goes on in one trainer from the checkpoint of another, with the bits of a run that went on where
it was. The table of docs/guides/resume.md is what comes out;
`PYTHONPATH=tests/python python FILE` writes it.

transformers, Accelerate, Lightning and torch.distributed.checkpoint write their checkpoints
themselves. Those of torchtitan, NeMo Automodel, verl and torchtune are laid out here as they do.
"""

import copy
import os
import pickle
import re
import sys
from functools import partial

import pytest
import torch
from common import OPTIONS, ROOT, bits, plain, states, tiny
from conftest import told
from torch import nn

import halfstep

pytestmark = pytest.mark.filterwarnings("ignore")
#: the page that has the table
PAGE = os.path.join(ROOT, "docs", "guides", "resume.md")
#: how each trainer makes an optimizer: what it puts before names, and True for two groups
MAKES = {
    "transformers": ("", True),
    "PEFT": ("base_model.model.", True),
    "Accelerate": ("module.", False),
    "Lightning": ("model.", False),
    "torchtitan, NeMo, verl (FSDP2, one rank)": ("_fsdp_wrapped_module.", False),
    "torchtune": ("_orig_mod.", False),
    "store=": ("", False),
}


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 32, generator=generator).bfloat16()


def train(model, opt, steps):
    for step in steps:
        (model(batch(step)) - 1).float().pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


def trained(named="{}"):
    model = tiny()
    pairs = [(named.format(name), p) for name, p in model.named_parameters()]
    opt = halfstep.AdamW(pairs, lr=1e-2, **OPTIONS)
    train(model, opt, range(3))
    return model, opt


# ---- What trainers write -------------------------------------------------------------------------


def _transformers(folder):
    import transformers

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, **_):
            return (model(inputs["x"]) - 1).float().pow(2).mean()

    model = tiny()
    args = transformers.TrainingArguments(
        output_dir=folder, max_steps=3, save_steps=3, report_to=[], use_cpu=True, disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    opt = halfstep.AdamW(model.named_parameters(), lr=1e-2, **OPTIONS)
    data = [{"x": x} for step in range(3) for x in batch(step)]
    Trainer(model=model, args=args, train_dataset=data, optimizers=(opt, None)).train()
    return model, opt, os.path.join(folder, "checkpoint-3")


def _accelerate(folder):
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model, opt = trained()
    model, wrapped = accelerator.prepare(model, opt)
    accelerator.save_state(folder)
    return accelerator.unwrap_model(model), opt, folder


def _lightning(folder):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = tiny()

        def training_step(self, x, _):
            return (self.model(x) - 1).float().pow(2).mean()

        def configure_optimizers(self):
            return halfstep.AdamW(self.named_parameters(), lr=1e-2, **OPTIONS)

    module, path = Module(), os.path.join(folder, "last.ckpt")
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.cat([batch(i) for i in range(3)]), 8))
    trainer.save_checkpoint(path)
    return module.model, trainer.optimizers[0], path


def _distributed(folder, key, inner=""):
    """Writes the flat dictionary of torchtitan and NeMo Automodel."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model, opt = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, opt, options=options)
    held = {key: flat, **model.state_dict(), "train_state": {"step": 3}}
    checkpoint.save(held, checkpoint_id=os.path.join(folder, inner))
    return model, opt, folder


def _saved(folder, name, make, named="{}"):
    model, opt = trained(named)
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    torch.save(make(model, opt), path)
    return model, opt, folder


def _in_backward(model, opt):
    """Returns a state for each parameter, as OptimizerInBackwardWrapper has them."""
    found = opt.state_dict()
    (group,) = found["param_groups"]
    return {
        "optimizer": {
            name: {
                "state": {0: found["state"][i]},
                "param_groups": [{**group, "params": [0], "param_names": [name]}],
            }
            for i, name in enumerate(group["param_names"])
        }
    }


def _safetensors(folder):
    model, opt = trained()
    opt.save_safetensors(os.path.join(folder, "optimizer.safetensors"))
    return model, opt, folder


WRITES = {
    "transformers: `checkpoint-N`": _transformers,
    "Accelerate: `save_state()`": _accelerate,
    "Lightning: `.ckpt`": _lightning,
    "torchtitan: `step-N`": lambda folder: _distributed(folder, "optimizer"),
    "NeMo Automodel: `epoch_0_step_N`": lambda folder: _distributed(folder, "optim", "optim"),
    "verl: `actor`": lambda folder: _saved(
        folder, "actor/optim_world_size_1_rank_0.pt", lambda model, opt: opt.state_dict()
    ),
    "torchtune: `recipe_state.pt`": lambda folder: _saved(
        folder, "recipe_state/recipe_state.pt",
        lambda model, opt: {"optimizer": opt.state_dict(), "epochs_run": 0},
    ),
    "torchtune, `optimizer_in_bwd`": lambda folder: _saved(
        folder, "recipe_state/recipe_state.pt", _in_backward
    ),
    "halfstep: `save_safetensors()`, C": _safetensors,
}  # fmt: skip


# ---- How trainers go on --------------------------------------------------------------------------


def _goes_on(how, weights, path, folder):
    """Returns a model with these weights, and the optimizer that a trainer makes from a
    checkpoint."""
    model, (before, two) = tiny(seed=9), MAKES[how]
    model.load_state_dict(weights)
    if "FSDP2" in how:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    pairs = [(before + name, p) for name, p in model.named_parameters()]
    groups = [{"params": pairs}]
    if two:  # matrices and the rest
        groups = [
            {"params": [x for x in pairs if (x[1].dim() > 1) is big]} for big in (True, False)
        ]
    options = {**OPTIONS, "seed": 77}
    if how == "store=":
        options["store"] = os.path.join(folder, "states")
    return model, halfstep.AdamW(groups, lr=1e-2, states_from=path, **options)


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _cell(what, how, weights, expected, path, folder):
    """Returns None if the bits are those of the run that went on, else the sentence that
    refuses."""
    try:
        model, opt = _goes_on(how, weights, path, folder)
    except ValueError as error:
        return str(error)
    train(model, opt, range(3, 6))
    assert {name: bits(_whole(p)) for name, p in model.named_parameters()} == expected[0], (
        what,
        how,
    )
    found = {n: plain({k: _whole(v) for k, v in opt.state[p].items()})
             for n, p in model.named_parameters()}  # fmt: skip
    assert found == expected[1], (what, how)
    assert {group["group_steps"] for group in opt.param_groups} == {6} and opt.seed == 5
    return None


def table(folder):
    """Returns the table, and the sentences that its numbers stand for."""
    import torch.distributed as dist

    lines = ["", "| | " + " | ".join(MAKES) + " |", "|---" * (len(MAKES) + 1) + "|"]
    sentences = []
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        for number, (what, write) in enumerate(WRITES.items()):
            own = os.path.join(folder, str(number))
            os.makedirs(own)
            model, opt, path = write(own)
            weights = copy.deepcopy(model.state_dict())
            opt.zero_grad()  # Lightning leaves gradients
            for group in opt.param_groups:
                group["lr"] = 1e-2
            train(model, opt, range(3, 6))
            expected = (
                {name: bits(p) for name, p in model.named_parameters()},
                {name: plain(opt.state[p]) for name, p in model.named_parameters()},
            )
            row = []
            for how in MAKES:
                said = _cell(what, how, weights, expected, path, own)
                if said:
                    said = said.replace(own, "PATH")
                    sentences += [said] * (said not in sentences)
                row.append(str(sentences.index(said) + 1) if said else "✓")
            lines.append(f"| {what} | " + " | ".join(row) + " |")
    finally:
        dist.destroy_process_group()
    lines += ["", *(f"{i}. {said}" for i, said in enumerate(sentences, 1)), ""]
    return "\n".join(lines)


@pytest.mark.all
def test_table(tmp_path):
    with open(PAGE, encoding="utf-8") as file:
        found = re.search("<!-- checkpoints -->(.*?)<!-- end -->", file.read(), flags=re.S)
    assert found and found[1] == table(str(tmp_path))


@pytest.mark.all
def test_a_trainer_begins_with_the_option(tmp_path):
    """transformers goes on from a folder of torchtitan, and gives the bits of a loop."""
    import transformers

    from halfstep.integrations.transformers import factory

    model, opt, path = WRITES["torchtitan: `step-N`"](str(tmp_path / "titan"))
    other = copy.deepcopy(model)
    opt.param_groups[0]["weight_decay"] = 0.0
    train(model, opt, range(3, 6))

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, **_):
            return (model(inputs["x"]) - 1).float().pow(2).mean()

        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "hf"), max_steps=3, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False, learning_rate=1e-2,
        max_grad_norm=0.0, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = Trainer(
        model=other,
        args=args,
        train_dataset=[{"x": x} for step in range(3, 6) for x in batch(step)],
        optimizer_cls_and_kwargs=(factory, {"args": args, "states_from": path, **OPTIONS}),
    )
    trainer.train()
    found = trainer.optimizer.optimizer
    for p, q in zip(model.parameters(), other.parameters()):
        assert bits(p) == bits(q) and plain(opt.state[p]) == plain(found.state[q])


# ---- What is refused -----------------------------------------------------------------------------


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def refuses(path, match, named="{}"):
    model = tiny()
    opt = halfstep.AdamW([(named.format(n), p) for n, p in model.named_parameters()], **OPTIONS)
    with pytest.raises(ValueError, match=match):
        opt.load_states(path)
    assert not opt.state


@pytest.mark.parametrize("begin", [b"", b"PK\x03\x04", b"\x80\x02", b"junk"])
def test_damaged_files_are_told(tmp_path, begin):
    (tmp_path / "optimizer.pt").write_bytes(begin + bytes(64 if begin else 0))
    refuses(tmp_path, "optimizer.pt (is damaged or no checkpoint|cannot be read without running)")


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_half_a_file_is_told(tmp_path, kind):
    model, opt = trained()
    path = tmp_path / f"optimizer.{'safetensors' if kind == 'safetensors' else 'pt'}"
    if kind == "safetensors":
        opt.save_safetensors(path)
    else:
        torch.save(opt.state_dict(), path, _use_new_zipfile_serialization=kind == "zip")
    whole = path.read_bytes()
    for part in (20, 30, 95, 2 * len(whole) // 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:part])
        refuses(path, "is damaged or no checkpoint|cannot be read without running")
    if kind == "safetensors":
        with pytest.raises(ValueError, match="is damaged or no checkpoint .* save_safetensors"):
            halfstep.AdamW(model.named_parameters(), **OPTIONS).load_safetensors(path)


def test_no_code_of_a_file_is_run(tmp_path):
    torch.save({"optimizer": Evil()}, tmp_path / "optimizer.pt")
    refuses(tmp_path, "cannot be read without running code of it")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    refuses(tmp_path / "dcp", "cannot be read without running code of it.*system")


def test_what_holds_no_states(tmp_path):
    refuses(tmp_path, "holds no state of an optimizer; halfstep takes optimizer.pt")
    torch.save({"model": tiny().state_dict()}, tmp_path / "a.ckpt")
    refuses(tmp_path, "holds no state of an optimizer; halfstep takes optimizer.pt")
    torch.save({"param_groups": trained()[1].state_dict()["param_groups"]}, tmp_path / "a.ckpt")
    refuses(tmp_path, "saved before the first step, or without them")
    torch.save({}, tmp_path / "b.ckpt")
    refuses(tmp_path, "holds 2 states of optimizers, 'a.ckpt', 'b.ckpt'")
    unstepped = halfstep.AdamW(tiny().named_parameters(), **OPTIONS)
    torch.save(unstepped.state_dict(), tmp_path / "a.ckpt")
    refuses(tmp_path / "a.ckpt", "saved before the first step")


def test_a_file_of_store_is_refused(tmp_path):
    model = tiny()
    opt = halfstep.AdamW(model.named_parameters(), store=tmp_path / "f", **OPTIONS)
    train(model, opt, range(1))
    opt.close_store()
    refuses(tmp_path / "f", "is a file of store=")


def test_other_names_are_refused(tmp_path):
    _, opt = trained("other_{}")
    torch.save(opt.state_dict(), tmp_path / "optimizer.pt")
    refuses(tmp_path, "'other_0.weight'.*make it with the names of the file")


def test_positions_count_without_names(tmp_path):
    model, opt = trained()
    torch.save(opt.state_dict(), tmp_path / "optimizer.pt")
    others = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="by their positions"):
        other = halfstep.AdamW(others.parameters(), states_from=tmp_path, **OPTIONS)
    assert states(other) == states(opt)
    groups = [{"params": [p for p in others.parameters() if p.dim() == d]} for d in (2, 1)]
    with pytest.raises(ValueError, match="have no names, and the groups there have"):
        halfstep.AdamW(groups, states_from=tmp_path, **OPTIONS)


def test_one_file_of_several_ranks_is_refused(tmp_path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _, opt = trained()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = tiny()
        fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
        held = copy.copy(opt.state_dict())
        held["state"] = {0: {"exp_avg": next(model.parameters()).detach()}}
        torch.save(held, tmp_path / "optim_world_size_3_rank_0.pt")
        refuses(tmp_path, "holds one rank's part of the states: give the folder that has")
        torch.save(held, tmp_path / "optim_world_size_3_rank_1.pt")
        refuses(tmp_path, "holds states of 2 ranks, and 3 have saved them")
    finally:
        dist.destroy_process_group()


def test_states_of_torch(tmp_path):
    """A checkpoint of torch's AdamW goes on, with its states in fp32 to the bit."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    theirs = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    model(torch.ones(2, 32)).sum().backward()
    theirs.step()
    torch.save({"optimizer": theirs.state_dict()}, tmp_path / "recipe_state.pt")
    opt = halfstep.AdamW(model.named_parameters(), lr=0.5, states_from=tmp_path)
    assert opt.param_groups[0]["lr"] == 0.5
    for p in model.parameters():
        assert bits(opt.state[p]["exp_avg"]) == bits(theirs.state[p]["exp_avg"])


def pair_of(muon, adamw, model, named=True):
    """Makes an optimizer for matrices and one for the rest, and makes two steps."""
    pairs = [
        [(n, p) if named else p for n, p in model.named_parameters() if (p.dim() == 2) == matrix]
        for matrix in (True, False)
    ]
    opts = muon(pairs[0], lr=1e-2), adamw(pairs[1], lr=1e-2)
    for step in range(2):
        advance(model, opts, step)
    return opts


def advance(model, opts, step):
    x = batch(step).to(next(model.parameters()).dtype)
    (model(x) - 1).float().square().mean().backward()
    for opt in opts:
        opt.step()
        opt.zero_grad()


#: how a program may put the states of two optimizers into one file
PAIRS = {
    "names": lambda muon, adamw: {"muon": muon, "adamw": adamw},
    "the other order": lambda muon, adamw: {"adamw": adamw, "muon": muon, "epoch": 1},
    "list": lambda muon, adamw: [adamw, muon],
    "Lightning": lambda muon, adamw: {"optimizer_states": [muon, adamw], "loops": {}},
    "inside": lambda muon, adamw: {"model": {}, "optimizer": {"a": muon, "b": adamw}},
    "Accelerate": None,
}


def save_pair(folder, how, first, second):
    if PAIRS[how]:
        torch.save(PAIRS[how](first, second), folder / "optimizer.pt")
        return folder / "optimizer.pt"
    torch.save(second, folder / "optimizer.bin")
    torch.save(first, folder / "optimizer_1.bin")
    return folder


@pytest.mark.parametrize("how", PAIRS)
@pytest.mark.parametrize("named", [True, False])
def test_a_pair_of_muon_and_adamw(tmp_path, how, named):
    """Torch's two optimizers go on as one of ours, with their states to the bit."""
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 64))
    theirs = pair_of(torch.optim.Muon, torch.optim.AdamW, model, named)
    other = copy.deepcopy(model)
    path = save_pair(tmp_path, how, *(opt.state_dict() for opt in theirs))
    options = {"lr": 1e-2, "adamw": {"lr": 1e-2}, "states": "f32"}
    with told("by their positions", not named):
        opt = halfstep.Muon(other.named_parameters(), states_from=path, **options)
    states_of = {**theirs[0].state, **theirs[1].state}
    for p, q in zip(model.parameters(), other.parameters()):
        for key, value in states_of[p].items():
            assert key == "step" or bits(value) == bits(opt.state[q][key])
    advance(model, theirs, 2)
    advance(other, [opt], 2)
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.allclose(p, q, atol=2e-3)
    with pytest.raises(
        ValueError, match=r"load_states\(\) takes a file with the states of torch's"
    ):
        opt.load_state_dict(theirs[0].state_dict())


def test_a_pair_of_ours(tmp_path):
    """Residuals, hashes of weights and random bits come along."""
    options = {"weights": "bf16-ecc8", "states": "int8", "seed": 3}
    model = tiny()
    opts = pair_of(partial(halfstep.Muon, **options), partial(halfstep.AdamW, **options), model)
    other = copy.deepcopy(model)
    path = save_pair(tmp_path, "names", *(opt.state_dict() for opt in opts))
    options["adamw"] = {"lr": 1e-2}
    opt = halfstep.Muon(other.named_parameters(), lr=1e-2, states_from=path, **options)
    for step in range(2, 4):
        advance(model, opts, step)
        advance(other, [opt], step)
    for p, q in zip(model.parameters(), other.parameters()):
        assert bits(p) == bits(q)


@pytest.mark.parametrize("how", PAIRS)
def test_two_optimizers_that_do_not_fit(tmp_path, how):
    """A GAN's. The error says that there are two, and where."""
    (_, first), (_, second) = trained(), trained()
    path = save_pair(tmp_path, how, first.state_dict(), second.state_dict())
    where = "optimizer.bin, optimizer_1.bin" if how == "Accelerate" else r"\[.*\], \["
    refuses(path, f"holds states of 2 optimizers, {where}.*one of them. Together they do not fit")
    if path.is_file():
        with pytest.raises(
            ValueError, match=r"holds 2 of them, at \[.*\], \[.*give load_state_dict"
        ):
            first.load_state_dict(torch.load(path))


def test_groups_of_other_rules(tmp_path):
    """torch's AdamW had an embedding that Muon steps here."""
    model = nn.Sequential(nn.Embedding(8, 32), nn.Linear(32, 32, bias=False))
    theirs = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    model(torch.arange(4)).sum().backward()
    theirs.step()
    torch.save(theirs.state_dict(), tmp_path / "optimizer.pt")
    opt = halfstep.Muon(model.named_parameters(), adamw={"lr": 1e-2})
    said = "has no state 'momentum_buffer', which muon needs; it has .*'exp_avg'.*the same rules"
    with pytest.raises(ValueError, match=said):
        opt.load_states(tmp_path)
    assert not opt.state


def test_frozen_parameters_and_a_later_load(tmp_path):
    model, opt = trained()
    torch.save(opt.state_dict(), tmp_path / "optimizer.pt")
    more = nn.ModuleDict({"new": nn.Linear(4, 4)}).requires_grad_(False)
    pairs = [*model.named_parameters(), *more.named_parameters()]
    other = halfstep.AdamW(pairs, states_from=tmp_path, **OPTIONS)
    assert all(plain(other.state[p]) == plain(opt.state[p]) for p in model.parameters())
    with pytest.warns(UserWarning, match="also holds states of '0.weight'"):
        part = halfstep.AdamW(list(model.named_parameters())[1:], states_from=tmp_path, **OPTIONS)
    assert all(plain(part.state[p]) == plain(opt.state[p]) for p in list(model.parameters())[1:])
    again = halfstep.AdamW(pairs, **OPTIONS)
    other.load_state_dict(again.state_dict())
    assert not other.state


if __name__ == "__main__":
    import tempfile

    sys.path.insert(0, os.path.join(ROOT, "scripts"))
    from generate import between

    with tempfile.TemporaryDirectory() as made:
        text = between("docs/guides/resume.md", "checkpoints", table(made))
    with open(PAGE, "w", encoding="utf-8") as page:
        page.write(text)
