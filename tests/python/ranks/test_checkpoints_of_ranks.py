"""Begins on several ranks from what any number of ranks has written: the bits of a run that went
on."""

import math
import os

import pytest
import torch
from conftest import RECIPES, class_of, named
from test_dtensors import Net, all_bits, sharded_net, train, whole_bits

import halfstep
from halfstep._states import sources

pytest.importorskip("torch.distributed.tensor", reason="DTensors are public from torch 2.5 on")


def trained(kind, rule, recipe, last, **options):
    """Returns a model, sharded unless `kind` is None, and its optimizer after some steps."""
    dtype, formats = RECIPES[recipe]
    model = sharded_net(kind, dtype) if kind else Net(dtype)
    opt = class_of(rule)(
        model.named_parameters(), lr=0.02, seed=5, **formats, **{"clip_norm": 0.5, **options}
    )
    train(opt, named(model), 0, last)
    opt.zero_grad()
    return model, opt


# ---- What trainers write -------------------------------------------------------------------------


def _distributed(folder, key, flatten):
    def write(rank, size, model, opt):
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
        )

        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        found = get_optimizer_state_dict(model, opt, options=options)
        held = {key: found, **model.state_dict(), "train_state": {"step": 2}}
        checkpoint.save(held, checkpoint_id=folder)

    return write


def _of_each_rank(rank, size, model, opt):
    os.makedirs("actor", exist_ok=True)
    torch.save(opt.state_dict(), f"actor/optim_world_size_{size}_rank_{rank}.pt")


def _whole(name, **how):
    def write(rank, size, model, opt):
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
        )

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        found = get_optimizer_state_dict(model, opt, options=options)
        if not rank:
            torch.save(found, name, **how)

    return write


WRITES = {
    "torchtitan": _distributed(".", "optimizer", True),
    "NeMo, Accelerate": _distributed("optimizer_0", "optimizer", False),
    "verl": _of_each_rank,
    "transformers": _whole("optimizer.pt"),
    "before torch 1.6": _whole("optimizer.bin", _use_new_zipfile_serialization=False),
    "save_safetensors()": lambda rank, size, model, opt: opt.save_safetensors(
        "optimizer.safetensors"
    ),
}


def written(rank, size, folder, how, kind, rule, recipe):
    """Trains two steps and saves them in one of the ways."""
    model, opt = trained(kind, rule, recipe, 2)
    os.chdir(folder)
    WRITES[how](rank, size, model, opt)


def resumed(rank, size, folder, kind, rule, recipe):
    """Goes on from there with two more steps. Returns all bits, and the elements of states that
    this rank has read and that there are."""
    read, box, model = [], sources.Sources.box, trained(kind, rule, recipe, 2)[0]

    def count(self, value, wanted):
        read.append(math.prod(wanted[1]))
        return box(self, value, wanted)

    sources.Sources.box = count
    options = {**RECIPES[recipe][1], "clip_norm": 0.5, "seed": 77}
    opt = class_of(rule)(model.named_parameters(), lr=0.02, states_from=folder, **options)
    sources.Sources.box = box
    assert opt.seed == 5 and {g["group_steps"] for g in opt.param_groups} == {2}
    whole = sum(v.numel() for state in opt.state.values() for v in state.values() if v.dim())
    train(opt, named(model), 2, 4)
    return all_bits(opt, named(model)), sum(read), whole


CASES = [
    (how, size, rule, recipe)
    for how in WRITES
    for size in ((1,) if how == "save_safetensors()" else (1, 3, 4))
    for rule, recipe in (("adamw", "ecc8-int8"), ("muon", "kahan"))
]
FIRST = [("torchtitan", 3, "adamw"), ("verl", 3, "muon"), ("transformers", 1, "adamw")]


@pytest.mark.parametrize(
    "how, size, rule, recipe",
    [pytest.param(*case, marks=[] if case[:3] in FIRST else pytest.mark.all) for case in CASES],
)
def test_two_ranks_go_on_from_any_number(pool, tmp_path, how, size, rule, recipe):
    kind = None if how == "save_safetensors()" else "fsdp2"
    pool.run(size, written, str(tmp_path), how, kind, rule, recipe)
    model, opt = trained(None, rule, recipe, 4)
    wanted = all_bits(opt, named(model))
    for found, read, whole in pool.run(2, resumed, str(tmp_path), "fsdp2", rule, recipe):
        assert found == wanted and 0 < read < 0.6 * whole


@pytest.mark.all
@pytest.mark.parametrize("kind, size", [("tp", 2), ("fsdp2+tp", 4), ("hsdp", 4)])
def test_other_meshes_go_on(pool, tmp_path, kind, size):
    pool.run(3, written, str(tmp_path), "torchtitan", "fsdp2", "adamw", "kahan")
    wanted = pool.run(1, begun, str(tmp_path), None, "kahan")
    assert pool.run(size, begun, str(tmp_path), kind, "kahan") == size * wanted


# ---- States of others ----------------------------------------------------------------------------


def torchs(rank, size, folder):
    """Writes the states of torch's own AdamW."""
    model = sharded_net("fsdp2", torch.float32)
    opt = torch.optim.AdamW(model.parameters(), lr=0.02)
    train(opt, named(model), 0, 2)
    os.chdir(folder)
    WRITES["torchtitan"](rank, size, model, opt)


def bitsandbytes(folder):
    """Writes states as bitsandbytes has them: codes of a map, with a scale for 256 elements."""
    model, states = Net(torch.float32), {}
    generator = torch.Generator().manual_seed(0)
    for i, p in enumerate(model.parameters()):
        states[i] = {"step": 2}
        for k in (1, 2):
            states[i][f"state{k}"] = torch.randint(
                256, p.shape, generator=generator, dtype=torch.uint8
            )
            states[i][f"qmap{k}"] = torch.linspace(-1 if k == 1 else 0, 1, 256)
            states[i][f"absmax{k}"] = torch.rand(-(-p.numel() // 256), generator=generator)
    names = [name for name, _ in model.named_parameters()]
    group = {"lr": 0.02, "betas": (0.9, 0.999), "params": list(range(len(names)))}
    held = {"state": states, "param_groups": [{**group, "param_names": names}]}
    torch.save(held, os.path.join(folder, "optimizer.pt"))


def begun(rank, size, folder, kind, recipe):
    """Returns the bits of states that an untrained model begins with."""
    dtype, formats = RECIPES[recipe]
    model = sharded_net(kind, dtype) if kind else Net(dtype)
    opt = halfstep.AdamW(model.named_parameters(), lr=0.02, states_from=folder, **formats)
    return {
        name: {
            key: whole_bits(value) for key, value in opt.state[p].items() if key != "weight.hashes"
        }
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("how", ["bitsandbytes", pytest.param("torch", marks=pytest.mark.all)])
def test_states_of_other_packages_are_cut(pool, tmp_path, how):
    if how == "torch":
        pool.run(3, torchs, str(tmp_path))
    else:
        bitsandbytes(str(tmp_path))
    wanted = begun(0, 1, str(tmp_path), None, "f32")
    assert pool.run(2, begun, str(tmp_path), "fsdp2", "f32") == 2 * [wanted]


# ---- What is refused -----------------------------------------------------------------------------


def refused(rank, size, folder):
    """Tries a file that one rank has not, and one whose last rows are not finite."""
    said = []
    for name in ("lost.pt" if rank else "optimizer.pt", "broken.pt"):
        model, opt = trained("fsdp2", "adamw", "bf16-sr", 1)
        before = all_bits(opt, named(model))
        try:
            opt.load_states(os.path.join(folder, name))
        except (ValueError, OSError) as error:
            said.append(str(error))
        assert all_bits(opt, named(model)) == before
    return said


def test_ranks_load_or_refuse_together(pool, tmp_path):
    _, opt = trained(None, "adamw", "bf16-sr", 2)
    torch.save(opt.state_dict(), tmp_path / "optimizer.pt")
    held = opt.state_dict()
    held["state"][0]["exp_avg"][-1] = math.nan
    torch.save(held, tmp_path / "broken.pt")
    one, other = pool.run(2, refused, str(tmp_path))
    assert len(one) == 2 and all("another rank cannot load" in text for text in one)
    assert "lost.pt" in other[0] and "'up.weight' has values that are not finite" in other[1]
