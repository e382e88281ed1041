"""Tests optimizers whose groups have different rules: Muon for matrices, AdamW or Lion for the
rest. They have the bits of one optimizer for each rule, and one verdict, one norm, one file."""

import copy
import importlib.util
from pathlib import Path

import documents
import pytest
import torch
from conftest import (
    COPIES,
    RECIPES,
    bits,
    everything,
    parameters,
    randn,
    recipes,
    run,
    set_gradients,
    told,
    twins,
    weights_of,
)
from fake_gpu import needs_fake
from test_cuda import gpu, held  # noqa: F401
from test_dtensors import cut, mesh_of, rows, values_of, whole_bits
from test_dtensors import train as train_cut
from test_offload import kinds, pair
from test_offload import run as run_there
from test_optimizer_files import InC
from test_optimizer_files import pytestmark as in_c
from torch import nn
from torch.nn import Parameter

import halfstep

SHAPES = {
    "embed.weight": (40, 32),
    "body.0.weight": (24, 96),
    "body.0.bias": (24,),
    "body.1.weight": (64, 32),
    "body.experts": (4, 16, 32),
    "norm.weight": (32,),
    "scale": (),
    "lm_head.weight": (40, 32),
}
MATRICES = ["body.0.weight", "body.1.weight", "body.experts"]
REST = [name for name in SHAPES if name not in MATRICES]
MUON = {"lr": 0.02, "seed": 3, "momentum": 0.9}
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.02}


def mixed(params, **options):
    return halfstep.Muon(params.items(), adamw=ADAMW, **{**MUON, **options})


def apart(params, **options):
    """Makes one optimizer for each rule, which together do what mixed() does."""
    muon = {name: params[name] for name in MATRICES}
    rest = {name: params[name] for name in REST}
    return (
        halfstep.Muon(muon.items(), **{**MUON, **options}),
        halfstep.AdamW(rest.items(), seed=3, **ADAMW, **options),
    )


def made(recipe="f32", **options):
    dtype, formats = RECIPES[recipe]
    params = parameters(dtype, SHAPES)
    return params, mixed(params, **formats, **options)


def states_of(opt, params):
    """Returns the bits of all states by name."""
    opt.state_dict()  # brings counters up to date
    return {
        name: {key: bits(value) for key, value in sorted(opt.state[p].items())}
        for name, p in params.items()
        if p in opt.state
    }


# ---- Bits ----------------------------------------------------------------------------------------


@recipes
@pytest.mark.told("muon: momentum_buffer in int4", recipe="sr-int4")
def test_the_bits_of_an_optimizer_for_each_rule(recipe):
    params, opt = made(recipe)
    other = twins(params)
    both = apart(other, **RECIPES[recipe][1])
    run(opt, params, 0, 4)
    for one in both:
        run(one, other, 0, 4)
    assert weights_of(params) == weights_of(other)
    theirs = {name: kept for one in both for name, kept in states_of(one, other).items()}
    assert states_of(opt, params) == theirs
    assert [opt.recipe(params[name]).split("/")[0] for name in ("scale", MATRICES[0])] == [
        "adamw",
        "muon",
    ]


def test_one_norm_and_one_verdict():
    params, opt = made(clip_norm=0.5)
    other = twins(params)
    alone = halfstep.AdamW(other.items(), clip_norm=0.5, seed=3)
    run(opt, params, 0, 2)
    run(alone, other, 0, 2)
    assert opt.grad_norm == alone.grad_norm > 0.5
    before = everything(opt, params.values())
    for name in ("embed.weight", "body.1.weight"):
        set_gradients(params, 2)
        params[name].grad.view(-1)[5] = float("nan")
        with told(f"'{name}' is not finite", opt.skipped_steps == 0):
            opt.step()
        after = everything(opt, params.values())
        assert after[0] == before[0]
        assert after[1]["state"] == before[1]["state"]
    assert opt.skipped_steps == 2 and {g["skipped_steps"] for g in opt.param_groups} == {2}


def test_clipping_is_by_the_norm_of_all():
    params, opt = made(clip_norm=1e-3)
    other = twins(params)
    both = apart(other)
    set_gradients(params, 1)
    norm = torch.cat([p.grad.flatten().double() for p in params.values()]).norm()
    opt.step()
    for name, p in other.items():
        p.grad = (params[name].grad.double() * (1e-3 / norm)).float()
    for one in both:
        one.step()
    for name, p in params.items():
        torch.testing.assert_close(p, other[name], rtol=1e-5, atol=1e-6)
    assert opt.grad_norm == pytest.approx(float(norm), rel=1e-6)


# ---- Ways to step --------------------------------------------------------------------------------


def test_gradient_release():
    params, opt = made("ecc8-int8")
    other = twins(params)
    release = mixed(other, **RECIPES["ecc8-int8"][1], gradient_release=True)
    for step in range(3):
        set_gradients(params, step)
        opt.step()
        given = {
            name: randn(p.shape, 1000 * step + sum(name.encode()), p.dtype)
            for name, p in other.items()
        }
        sum((p * given[name]).sum() for name, p in other.items()).backward()
        assert all(p.grad is None for p in other.values())
        release.step()
        release.zero_grad()
    assert weights_of(params) == weights_of(other)
    assert states_of(opt, params) == states_of(release, other)


def test_micro_batches_in_the_states():
    params, opt = made("bf16-sr")
    other = twins(params)
    both = apart(other, **RECIPES["bf16-sr"][1])
    for step in range(6):
        for one, some in ((opt, params), *((one, other) for one in both)):
            set_gradients(some, step)
            one.optimizer_accumulation = step % 3 != 2
            one.step()
    assert weights_of(params) == weights_of(other)


def test_weights_in_full_precision():
    """Residuals of both rules go into averages and exports."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(40, 32), "body": nn.Linear(32, 64)}).bfloat16()
    opt = halfstep.Muon(model.named_parameters(), weights="bf16-ecc16", adamw={"lr": 1e-3})
    average = halfstep.EMA(model, decay=0.0, weights="bf16-ecc16")
    for step in range(2):
        set_gradients(model, step)
        opt.step()
        average.update_parameters(model, opt)
    found = halfstep.full_precision_state_dict(model, opt)
    for name, p in model.named_parameters():
        assert opt.state[p]["weight.extra"].any()
        assert torch.equal(found[name], opt.read_weight(p))
        assert torch.equal(average.full_state_dict()[name], found[name])


def test_scaler():
    params, opt = made(fused=True)
    other, plain = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        set_gradients(other, step)
        plain.step()
        set_gradients(params, step)
        scaler.scale(torch.ones(()))
        for p in params.values():
            p.grad *= scaler.get_scale()
        scaler.step(opt)
        scaler.update()
    assert weights_of(params) == weights_of(other)


@kinds
@needs_fake
@pytest.mark.parametrize("options", [{}, {"gradient_release": True}])
def test_states_in_the_memory_of_the_process(gpu, kind, options):  # noqa: F811
    both = pair(
        gpu,
        halfstep.Muon,
        "ecc8-int8",
        kind=kind,
        shapes=SHAPES,
        how={"minimal_size": 1000},
        adamw=ADAMW,
        exact=True,
        **options,
    )
    run_there(gpu, both, 1, 4)
    (a, b), (c, d) = both
    assert held(gpu, c, d) == held(gpu, a, b)
    assert [group["use_muon"] for group in d.param_groups] == [True, False]


def sharded(rank, size, clip):
    params = cut(values_of(SHAPES, torch.bfloat16), mesh_of((size,)), rows)
    opt = mixed(params, states="bf16-sr", clip_norm=clip)
    train_cut(opt, params, 0, 3)
    opt.state_dict()
    found = {
        name: [whole_bits(p), {k: whole_bits(v) for k, v in sorted(opt.state[p].items())}]
        for name, p in params.items()
    }
    return found, opt.grad_norm, repr(opt).split("\n")[2:4]


def test_shards(pool):
    """AdamW steps the shards of embeddings where they are; only Muon's matrices are gathered."""
    params = parameters(torch.bfloat16, SHAPES)
    opt = mixed(params, states="bf16-sr", clip_norm=0.5)
    train_cut(opt, params, 0, 3)
    opt.state_dict()
    whole = {
        name: [bits(p), {k: bits(v) for k, v in sorted(opt.state[p].items())}]
        for name, p in params.items()
    }
    for found, norm, lines in pool.run(2, sharded, 0.5):
        assert found == whole and norm == opt.grad_norm
        assert lines == repr(opt).split("\n")[2:4]


# ---- Files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [*COPIES, "state_dict", "safetensors"])
def test_goes_on_from_a_copy(copied, tmp_path):
    params, opt = made("ecc8-int8")
    run(opt, params, 0, 2)
    if copied in COPIES:
        again = COPIES[copied](opt)
        names = [name for group in again.param_groups for name in group["param_names"]]
        there = dict(zip(names, (p for group in again.param_groups for p in group["params"])))
        there = {name: there[name] for name in SHAPES}
    else:
        there = twins(params)
        again = mixed(there, **RECIPES["ecc8-int8"][1])
        if copied == "safetensors":
            opt.save_safetensors(tmp_path / "file")
            again.load_safetensors(tmp_path / "file")
        else:
            torch.save(opt.state_dict(), tmp_path / "file")
            again.load_state_dict(torch.load(tmp_path / "file", weights_only=True))
    assert [g.keys() for g in again.param_groups] == [g.keys() for g in opt.param_groups]
    for one, some in ((opt, params), (again, there)):
        run(one, some, 2, 4)
    assert weights_of(there) == weights_of(params)
    assert states_of(again, there) == states_of(opt, params)


@pytest.mark.parametrize("flatten", [False, True])
def test_checkpoints_of_torch_distributed(flatten):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    how = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = nn.ModuleDict({"embed": nn.Embedding(40, 32), "body": nn.Linear(32, 64)}).bfloat16()
    there = copy.deepcopy(model)
    options = {**MUON, "states": "int8"}
    opt = halfstep.Muon(model.named_parameters(), adamw=ADAMW, **options)
    run(opt, model, 0, 2)
    file = copy.deepcopy(get_optimizer_state_dict(model, opt, options=how))
    there.load_state_dict(model.state_dict())
    again = halfstep.Muon(there.named_parameters(), adamw={}, states="int8")
    set_optimizer_state_dict(there, again, file, options=how)
    for one, some in ((opt, model), (again, there)):
        run(one, some, 2, 4)
    assert weights_of(there) == weights_of(model)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_states_of_two_optimizers_of_torch(monkeypatch):
    """States of torch's Muon and of its AdamW beside it go into one optimizer, as two groups."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's iterations in fp32
    params = parameters(torch.float32, SHAPES)
    del params["body.experts"]  # which torch's Muon does not take
    hidden, other = MATRICES[:2], twins(params)
    theirs = [
        torch.optim.Muon([other[n] for n in hidden], lr=0.02, momentum=0.9),
        torch.optim.AdamW([other[n] for n in REST], **ADAMW),
    ]
    for one in theirs:
        run(one, other, 0, 2)
    muon, rest = (one.state_dict() for one in theirs)
    shift = len(hidden)
    (group,) = rest["param_groups"]
    file = {
        "state": {**muon["state"], **{i + shift: s for i, s in rest["state"].items()}},
        "param_groups": [
            *muon["param_groups"],
            {**group, "params": [i + shift for i in group["params"]]},
        ],
    }
    opt = mixed(params)
    opt.load_state_dict(file)
    assert [group["use_muon"] for group in opt.param_groups] == [True, False]
    for name, p in params.items():
        p.data.copy_(other[name])
    run(opt, params, 2, 5)
    for one in theirs:
        run(one, other, 2, 5)
    for name, p in params.items():
        torch.testing.assert_close(p, other[name], rtol=1e-4, atol=1e-4)


def test_compiled_steps():
    params, opt = made("ecc8-int8", compile=True)
    other = twins(params)
    plain = mixed(other, **RECIPES["ecc8-int8"][1])
    compiled = torch.compile(lambda: opt.step(), fullgraph=True, backend="eager")
    for step in range(3):
        for some, call in ((params, compiled), (other, plain.step)):
            set_gradients(some, step)
            call()
    assert weights_of(params) == weights_of(other)


def test_groups_of_another_rule_are_not_loaded():
    params, opt = made()
    run(opt, params, 0, 1)
    file = opt.state_dict()
    plain = halfstep.Muon(twins(params).items())
    run(plain, plain_params := dict(zip(SHAPES, plain.param_groups[0]["params"])), 0, 1)
    for one, other in ((plain, file), (opt, plain.state_dict())):
        with pytest.raises(ValueError, match="number of parameter groups.*made as the saved one"):
            one.load_state_dict(other)
    # The same groups of other rules.
    groups = [{"params": [(n, plain_params[n]) for n in names]} for names in (MATRICES, REST)]
    plain = halfstep.Muon(groups)
    run(plain, plain_params, 0, 1)
    with pytest.raises(ValueError, match="embed.weight.*'muon/f32/f32'.* steps it by adamw"):
        opt.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="group 1 .*'use_muon': False.* steps that group by muon"):
        plain.load_state_dict(file)
    swapped = {**file, "param_groups": [dict(g) for g in file["param_groups"]]}
    for group in swapped["param_groups"]:
        group["use_muon"] = not group["use_muon"]
    before = everything(opt, params.values())
    with pytest.raises(ValueError, match="group 0 .*'use_muon': False.* steps that group by muon"):
        opt.load_state_dict(swapped)
    assert everything(opt, params.values()) == before


def test_the_rule_of_a_group_cannot_change_under_its_states():
    params, opt = made()
    run(opt, params, 0, 1)
    opt.param_groups[1]["use_muon"] = True
    opt.param_groups[1].update(
        {k: v for k, v in opt.param_groups[0].items() if k not in opt.param_groups[1]}
    )
    set_gradients(params, 1)
    with pytest.raises(ValueError, match="embed.weight.*'adamw/f32/f32.*stepped by muon now"):
        opt.step()


# ---- What goes where -----------------------------------------------------------------------------


def where(opt):
    """Returns the names of the matrices that Muon steps."""
    return [n for g in opt.param_groups if g.get("use_muon", True) for n in g["param_names"]]


@pytest.mark.parametrize(
    "name, shape, muon",
    [
        ("model.layers.0.mlp.up_proj.weight", (8, 4), True),
        ("encoder.layer.0.output.dense.weight", (8, 4), True),
        ("layers.0.experts.gate_up_proj", (3, 8, 4), True),
        ("conv.weight", (8, 4, 3, 3), True),
        ("heads.0.query.weight", (8, 4), True),
        ("overhead.weight", (8, 4), True),
        ("mlp.shared.up_proj.weight", (8, 4), True),
        ("mlp.w.weight", (8, 4), True),
        ("norm1.linear.weight", (8, 4), True),
        ("ensemble.0.weight", (3, 8, 4), True),
        ("led.shared.weight", (8, 4), False),
        ("transformer.w.weight", (8, 4), False),
        ("encoder.token_emb.weight", (8, 4), False),
        ("block.0.SelfAttention.relative_attention_bias.weight", (8, 4), False),
        ("mlp.experts.gate_up_proj_bias", (3, 8), False),
        ("0.bias", (3, 8), False),
        ("layers.0.post_norm.weight", (3, 8), False),
        ("mixer.A_log", (8, 4), False),
        ("model.embed_tokens.weight", (8, 4), False),
        ("_orig_mod.tok_embeddings.weight", (8, 4), False),
        ("transformer.wte.weight", (8, 4), False),
        ("pos_embed", (1, 8, 4), False),
        ("lm_head.weight", (8, 4), False),
        ("module.head.fc.weight", (8, 4), False),
        ("module.output.weight", (8, 4), False),
        ("classifier.0.weight", (8, 4), False),
        ("body.bias", (8,), False),
        ("body.column", (8, 1), False),
        ("body.kernel", (8, 1, 1, 1), False),
        ("scale", (), False),
    ],
)
def test_default_names(name, shape, muon):
    params = {name: nn.Parameter(torch.ones(shape)), "other": nn.Parameter(torch.ones(2, 2))}
    assert (name in where(halfstep.Muon(params.items(), adamw={}))) == muon


class Told(nn.Module):
    """A model whose modules tell what no name says."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(9, 32), nn.EmbeddingBag(5, 32)
        self.middle, self.out = nn.Linear(32, 32), nn.Linear(32, 9)

    def get_output_embeddings(self):
        return self.out


class Wrapped(nn.Sequential):
    def get_output_embeddings(self):
        raise NotImplementedError


def test_modules_of_a_model_tell():
    model = Wrapped(Told())
    for given in (model, nn.ModuleDict({"_orig_mod": model})):
        assert [n.split(".")[-2] for n in where(halfstep.Muon(given, adamw={}))] == ["middle"]
    assert len(where(halfstep.Muon(model, adamw={}, adamw_names=()))) == 4
    assert len(where(halfstep.Muon(model.named_parameters(), adamw={}))) == 4
    opt = halfstep.Muon(model.bfloat16(), adamw={}, states="int8")
    told = halfstep.plan(model, "muon/bf16-sr/int8", adamw=True)
    assert (told.rows[0].weights, told.rows[0].states) == tuple(
        opt.memory()[key] for key in ("weights", "states")
    )
    assert "muon steps 1 tensors of 1024 elements: '0.middle.weight'." in str(told)
    assert "adamw steps 5 tensors of 777 elements: '0.words.weight'," in str(told)
    alone = str(halfstep.plan(model, "muon/bf16-sr/int8"))
    assert "With adamw=True AdamW does: 3 tensors of 736 elements: '0.words.weight'" in alone
    with pytest.raises(TypeError, match="params is a module"):
        halfstep.Muon(model)


def test_names_that_are_given():
    params = parameters(torch.float32, SHAPES)
    assert where(mixed(params)) == MATRICES
    assert where(mixed(params, adamw_names=["body.1.*"])) == [
        name for name, p in params.items() if p.dim() > 1 and name != "body.1.weight"
    ]
    everywhere = [name for name, p in params.items() if p.dim() > 1]
    assert where(mixed(params, adamw_names=())) == everywhere
    opt = halfstep.Muon(params.values(), adamw={}, adamw_names=())
    assert [len(g["params"]) for g in opt.param_groups] == [len(everywhere), 3]
    # Names of name_parameters() count.
    module = nn.ModuleDict({"head": nn.Linear(4, 4), "body": nn.Linear(4, 4)})
    halfstep.name_parameters(module)
    opt = halfstep.Muon(module.parameters(), adamw={})
    assert [p is module["body"].weight for p in opt.param_groups[0]["params"]] == [True]
    assert len(opt.param_groups[1]["params"]) == 3


def test_repr_says_what_went_where():
    _, opt = made()
    lines = repr(opt).split("\n")
    assert lines[2] == (
        "Muon: 3 tensors of 6400 elements, 'body.0.weight', 'body.1.weight', 'body.experts'"
    )
    assert lines[3].startswith(
        "AdamW: 5 tensors of 2617 elements, 'embed.weight', 'lm_head.weight', 'body.0.bias'"
    )
    assert "Muon: " not in repr(halfstep.Muon([nn.Parameter(torch.ones(2, 2))]))


def test_options_of_both_and_of_each():
    params = parameters(torch.float32, SHAPES)
    muon, rest = mixed(params, states="int8", maximize=True, weight_decay=0.3).param_groups
    assert (muon["lr"], rest["lr"]) == (0.02, 3e-3)
    assert (muon["weight_decay"], rest["weight_decay"]) == (0.3, 0.02)
    assert muon["states"] == rest["states"] == "int8" and muon["maximize"] and rest["maximize"]
    assert not {"momentum", "ns_steps", "adjust_lr_fn", "adam_eps"} & rest.keys()
    assert set(halfstep.AdamW(params.values()).param_groups[0]) - rest.keys() <= {"cautious"}
    # Muon's own options for what is no matrix hold, too.
    options = {"adamw": {}, "betas": (0.8, 0.9), "adam_eps": 1e-5}
    rest = halfstep.Muon(params.items(), **options).param_groups[1]
    assert rest["betas"] == (0.8, 0.9) and rest["eps"] == 1e-5
    # A group's own options.
    given = [
        {"params": list(params.items())[:3], "weight_decay": 0.0},
        {"params": list(params.items())[3:6], "lr": 0.1, "adamw": {"lr": 0.2, "states": "int8"}},
        {"params": list(params.items())[6:], "lr": 0.3},
    ]
    groups = halfstep.Muon(given, adamw=ADAMW).param_groups
    assert [(g["use_muon"], g["lr"]) for g in groups] == [
        *((True, 1e-3), (False, 3e-3)),
        *((True, 0.1), (False, 0.2)),
        (False, 0.3),
    ]
    assert [g["weight_decay"] for g in groups] == [0.0, 0.0, 0.1, 0.02, 0.02]
    assert [g["states"] for g in groups] == [None, None, None, "int8", None]
    assert all("adamw" not in group for group in groups)


def test_groups_that_are_added():
    params, opt = made()
    run(opt, params, 0, 1)
    more = {"late.weight": (8, 16), "late.bias": (8,), "late_embed.weight": (8, 16)}
    late = parameters(torch.float32, more)
    opt.add_param_group({"params": list(late.items())})
    assert [g["use_muon"] for g in opt.param_groups] == [True, False] * 2
    assert where(opt) == [*MATRICES, "late.weight"]
    run(opt, {**params, **late}, 1, 3)
    before = everything(opt)
    bad = {
        "x.weight": nn.Parameter(torch.ones(4, 4)),
        "x.bias": nn.Parameter(torch.ones(4).int(), False),
    }
    bad["x.bias"].grad = torch.ones(4).int()
    with pytest.raises(TypeError, match="x.bias.*int32"):
        opt.add_param_group({"params": list(bad.items())})
    assert everything(opt) == before
    run(opt, {**params, **late}, 3, 4)


# ---- Groups of other packages --------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, muon, rest",
    [
        ("use_muon", True, False),
        ("is_muon", True, False),
        ("use_fallback", False, True),
        ("use_adamw", False, True),
        ("algorithm", "muon", "adamw"),
        ("optimizer", "Muon", "AdamW"),
        ("algorithm", "muon", "lion"),
    ],
)
def test_groups_that_say_who_steps_them(key, muon, rest):
    params = parameters(torch.float32, SHAPES)
    other = twins(params)
    by = halfstep.Lion if rest == "lion" else halfstep.AdamW
    opt = halfstep.Muon(
        [
            {"params": [params[n] for n in REST], key: rest, "lr": 2e-3, "betas": (0.8, 0.9)},
            {"params": [params[n] for n in MATRICES], key: muon, "momentum": 0.8},
        ],
        seed=1,
    )
    # Ids come from places.
    both = [
        by([other[n] for n in REST], lr=2e-3, betas=(0.8, 0.9), seed=1),
        halfstep.Muon([other[n] for n in MATRICES], momentum=0.8, seed=1),
    ]
    run(opt, params, 0, 3)
    for one in both:
        run(one, other, 0, 3)
    assert weights_of(params) == weights_of(other)
    assert all(group[key] in (muon, rest) for group in opt.state_dict()["param_groups"])
    assert opt.read_state(params["scale"], "exp_avg").shape == ()
    with pytest.raises(KeyError, match="adamw has no state|lion has no state"):
        opt.read_state(params["scale"], "momentum_buffer")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"adamw": 3}, "adamw=3 must be a dictionary"),
        ({"adamw": {"learning_rate": 1}}, "'learning_rate', which is not an option of AdamW"),
        ({"adamw": {"clip_norm": 1.0}}, "'clip_norm', which is not an option"),
        ({"adamw": {"lr": -1.0}}, "Invalid learning rate: -1.0"),
        ({"adamw": {}, "adamw_names": "head"}, "adamw_names='head' must be a list"),
        ({"adamw_names": ["head"]}, "needs adamw="),
    ],
)
def test_mistakes(options, words):
    params = parameters(torch.float32, SHAPES)
    with pytest.raises((TypeError, ValueError), match=words):
        halfstep.Muon(params.items(), **options)


def test_mistakes_in_groups():
    params = parameters(torch.float32, SHAPES)
    with pytest.raises(ValueError, match="names of matrices.*named_parameters"):
        halfstep.Muon(params.values(), adamw={})
    with pytest.raises(ValueError, match="lr=0.1, and Muon steps some.*use_muon True and False"):
        halfstep.Muon([{"params": list(params.items()), "lr": 0.1}], adamw={})
    with pytest.raises(ValueError, match="'algorithm': 'adamw', and another.*asks for muon"):
        halfstep.Muon([{"params": params.values(), "use_muon": True, "algorithm": "adamw"}])
    with pytest.raises(ValueError, match="Invalid epsilon value: -1"):
        halfstep.Muon([{"params": params.values(), "use_muon": False, "eps": -1}])


# ---- C -------------------------------------------------------------------------------------------


def test_files_say_all_rules(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    params, opt = made("ecc8-int8")
    run(opt, params, 0, 2)
    opt.save_safetensors(tmp_path / "file")
    with safetensors.safe_open(tmp_path / "file", "pt") as file:
        metadata = file.metadata()
        assert metadata["rule"] == "muon, adamw"
        assert metadata["group.0.momentum"] == repr(0.9) and "group.1.momentum" not in metadata
    other = halfstep.AdamW(twins(params).items())
    with pytest.raises(ValueError, match="'muon, adamw', this optimizer of 'adamw'"):
        other.load_safetensors(tmp_path / "file")


@in_c
def test_moves_between_c_and_python(tmp_path):
    params, opt = made("ecc8-int8")
    run(opt, params, 0, 2)
    opt.save_safetensors(tmp_path / "from_python")
    ordered = {name: params[name] for name in (*MATRICES, *REST)}
    c = InC({name: opt.recipe(p) for name, p in ordered.items()}, ordered)
    c.read(tmp_path / "from_python")
    c.run(2, 4)
    run(opt, params, 2, 4)
    assert [bits(p) for p in c.params.values()] == [bits(p) for p in ordered.values()]
    c.write(tmp_path / "from_c", weights=True)
    there = twins(params)
    again = mixed(there, **RECIPES["ecc8-int8"][1])
    again.load_safetensors(tmp_path / "from_c")
    run(again, there, 4, 6)
    run(opt, params, 4, 6)
    assert weights_of(there) == weights_of(params)
    assert states_of(again, there) == states_of(opt, params)


# ---- The example ---------------------------------------------------------------------------------


def test_example(capsys):
    """examples/muon.py at a size of a second: it learns, and says what went where."""
    path = Path(__file__).parents[3] / "examples" / "muon.py"
    spec = importlib.util.spec_from_file_location("muon_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    size = "--steps 40 --width 32 --depth 1 --heads 2 --experts 2 --context 32 --batch 4".split()
    results = module.main([*size, "--coefficients", "polar-express"])
    assert set(results) == {"Muon with AdamW", "AdamW alone"}
    assert all(2 < loss < 4.5 for loss in results.values())  # log(256) is 5.5
    lines = capsys.readouterr().out.splitlines()
    assert "Muon: 7 tensors of 12352 elements" in lines[2] and "experts.up" in lines[2]
    assert lines[3].startswith("AdamW: 9 tensors") and "'lm_head.weight'" in lines[3]


def test_qk_clip():
    """The callback of docs/guides/muon.md: logits of the clipped heads are at the limit, and others
    stay as they are."""
    (block,) = documents.blocks("docs/guides/muon.md", "python", "QK-clip")
    given = block.run({"torch": torch})
    query, key = (Parameter(randn((32, 16), i) * scale) for i, scale in enumerate((2.0, 8.0)))
    opt = halfstep.Muon([query, key], lr=0.01)
    query.grad, key.grad = randn((32, 16), 2), randn((32, 16), 3)
    opt.step()
    x = randn((2, 5, 16), 4)

    def largest():
        q, k = ((x @ w.detach().T).unflatten(-1, (4, 8)).transpose(1, 2) for w in (query, key))
        return given["largest_logits"](q, k)

    before = largest()
    most = before.sort().values[1:3].mean().item()
    given["qk_clip"](query, key, before, most)
    assert torch.allclose(largest(), before.clamp(max=most), rtol=1e-5)
    assert torch.equal(largest()[before < most], before[before < most])
    opt.step()  # goes on with what was written
