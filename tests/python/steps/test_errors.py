"""Bad input raises a Python exception that names the parameter, and changes not one bit
anywhere."""

import math

import pytest
import torch
from conftest import (
    bits,
    class_of,
    everything,
    parameters,
    plain,
    rules,
    run,
    same,
    set_gradients,
    states,
    told,
    weights_of,
)
from torch import nn
from torch.nn import Parameter

import halfstep

ANY = (TypeError, ValueError, RuntimeError, NotImplementedError)
NAME = "layers.7.odd one"


class Unknown(torch.Tensor):
    """A tensor subclass of somebody else's."""


class Wrapper(torch.Tensor):
    """A tensor subclass that holds no memory of its own, as quantized and distributed tensors
    do."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    def __init__(self, inner):
        pass

    def __repr__(self):
        return "Wrapper()"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def unwrap(x):
            return x.inner if isinstance(x, Wrapper) else x

        from torch.utils._pytree import tree_map

        return function(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))


def untrainable(t):
    """Makes a parameter of a dtype that autograd refuses, with a gradient. Without one it would
    count as frozen."""
    return with_gradient(Parameter(t, requires_grad=False), t.clone())


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        p = Parameter(torch.empty(4, 4))
        p.grad = torch.empty(4, 4)
    return p


def with_gradient(p, g):
    p.grad = g
    return p


def ready(t):
    """Makes a parameter with a gradient of ones."""
    return with_gradient(Parameter(t), torch.ones_like(t))


def replaced(p, data):
    """Replaces .data after backward."""
    p.data = data
    return p


def sparse_gradient():
    table = nn.Embedding(6, 4, sparse=True)
    table(torch.tensor([1, 3])).sum().backward()
    return table.weight


#: what cannot be stepped, each with a gradient where it can have one
BAD = {
    "meta": lambda: ready(torch.ones(3, 3, device="meta")),
    "meta, data replaced": lambda: replaced(
        ready(torch.ones(4, 4, device="meta")), torch.ones(4, 4, device="meta")
    ),
    "expanded rows": lambda: ready(torch.ones(1, 5).expand(4, 5)),
    "expanded columns": lambda: ready(torch.ones(5, 1).expand(5, 4)),
    "expanded scalar": lambda: ready(torch.ones(()).expand(6)),
    "overlapping windows": lambda: ready(torch.ones(10).as_strided((4, 4), (2, 1))),
    "overlapping columns": lambda: ready(torch.ones(10).as_strided((3, 4), (1, 2))),
    "sparse parameter": lambda: untrainable(torch.ones(3, 3).to_sparse()),
    "sparse rows": lambda: untrainable(torch.ones(3, 3).to_sparse_csr()),
    "sparse gradient": sparse_gradient,
    "complex": lambda: ready(torch.ones(3, dtype=torch.complex64)),
    "int32": lambda: untrainable(torch.ones(3, dtype=torch.int32)),
    "int8": lambda: untrainable(torch.ones(3, dtype=torch.int8)),
    "uint8": lambda: untrainable(torch.ones(3, dtype=torch.uint8)),
    "bool": lambda: untrainable(torch.ones(3, dtype=torch.bool)),
    "float64": lambda: ready(torch.ones(3, dtype=torch.float64)),
    "float8": lambda: untrainable(torch.ones(3).to(torch.float8_e4m3fn)),
    "subclass": lambda: with_gradient(
        Parameter(torch.ones(3, 3).as_subclass(Unknown)), torch.ones(3, 3)
    ),
    "subclass without Parameter": lambda: with_gradient(
        torch.ones(3, 3).as_subclass(Unknown).requires_grad_(), torch.ones(3, 3)
    ),
    "wrapper": lambda: with_gradient(Wrapper(torch.ones(3, 3)), Wrapper(torch.ones(3, 3))),
    "fake": fake,
    "not made yet": lambda: nn.LazyLinear(3).weight,
    "gradient of another shape": lambda: replaced(ready(torch.ones(4, 4)), torch.ones(5, 5)),
    "gradient in float64": lambda: replaced(
        ready(torch.ones(4, 4, dtype=torch.float64)), torch.ones(4, 4)
    ),
    "parameter made complex": lambda: replaced(
        ready(torch.ones(4, 4)), torch.ones(4, 4, dtype=torch.complex64)
    ),
    "parameter made float64": lambda: replaced(
        ready(torch.ones(4, 4)), torch.ones(4, 4, dtype=torch.float64)
    ),
    "gradient of a subclass": lambda: with_gradient(
        Parameter(torch.ones(3, 3)), torch.ones(3, 3).as_subclass(Unknown)
    ),
}
SOUND = {"weights": "bf16-ecc8", "states": "int8", "lr": 0.02}


def sound(steps, rule="adamw", **options):
    """Makes parameters and an optimizer that works, and makes steps."""
    params = parameters(torch.bfloat16)
    opt = class_of(rule)(params.items(), **{"seed": 0, **SOUND, **options})
    run(opt, params, 0, steps)
    return params, opt


def as_if_sound(opt, params, steps):
    """Checks that nothing but sound steps has left a trace."""
    others, other = sound(steps)
    same(opt, other, params, others)


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("rule", ["adamw", "muon", "lamb"])
def test_bad_parameters(rule, kind):
    """Refused by the constructor, add_param_group() or the step. Other parameters stay as they
    were."""
    bad = BAD[kind]()
    params = parameters(torch.bfloat16)
    set_gradients(params, 0)
    before = weights_of(params)
    with pytest.raises(ANY) as caught:
        class_of(rule)([*params.items(), (NAME, bad)], **SOUND).step()
    assert NAME in str(caught.value), str(caught.value)
    assert ("torch.view_as_real()" in str(caught.value)) == bad.is_complex()
    assert weights_of(params) == before


@pytest.mark.parametrize("kind", BAD)
def test_bad_parameters_of_a_later_group(kind):
    bad = BAD[kind]()
    params, opt = sound(2)
    before = everything(opt, params)
    set_gradients(params, 2)
    with pytest.raises(ANY) as caught:
        opt.add_param_group({"params": [(NAME, bad)]})
        if bad.grad is None and not bad.is_sparse:
            pytest.fail("taken, and nothing to step it by")
        opt.step()
    assert NAME in str(caught.value), str(caught.value)
    if len(opt.param_groups) > 1:  # the group was taken, the step refused
        opt.param_groups.pop()
    assert everything(opt, params) == before
    # It works on once the bad one is gone.
    opt.step()
    as_if_sound(opt, params, 3)


@pytest.mark.parametrize("kind", BAD)
def test_bad_parameters_without_a_name(kind):
    """Unnamed parameters are called by their places."""
    good = Parameter(torch.ones(3))
    good.grad = torch.ones(3)
    with pytest.raises(ANY) as caught:
        halfstep.AdamW(
            [{"params": [good]}, {"params": [Parameter(torch.ones(2)), BAD[kind]()]}]
        ).step()
    assert "1 of group 1" in str(caught.value)
    assert torch.equal(good, torch.ones(3))


def test_names_given_to_the_module_stand_in_messages():
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2))
    halfstep.name_parameters(model, prefix="net")
    opt = halfstep.AdamW(model.parameters())
    model(torch.tensor([1, 3])).sum().backward()
    before = everything(opt)
    with pytest.raises(ANY, match=r"net\.0\.weight.*sparse"):
        opt.step()
    assert everything(opt)[0] == before[0]


# ---- What goes wrong in mid-run ------------------------------------------------------------------


def broken(change, match=None):
    """Makes two steps and breaks something. The next step must raise and leave everything as it
    was."""
    params, opt = sound(2)
    set_gradients(params, 2)
    weights, before = plain(params), states(opt)
    touched = change(opt, params) or ()
    with pytest.raises(ANY, match=match):
        opt.step()
    for n, p in params.items():
        assert n in touched or bits(p) == weights[n], n
    return opt, params, before


def replace_data(name, data):
    def change(opt, params):
        params[name].grad = None
        params[name].data = data
        params[name].grad = torch.ones_like(data)
        return (name,)

    return change


@pytest.mark.parametrize("shape", [(5, 5), (24, 97), (23, 96), (24 * 96,), (48, 96), ()], ids=str)
def test_shape_that_changes_in_mid_run(shape):
    """Refused even if the number of elements stays, because rows and blocks are others."""
    broken(replace_data("body.weight", torch.ones(shape, dtype=torch.bfloat16)), "body.weight")


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:8],
        lambda t: t[:, :48],
        lambda t: t.view(48, 48),
        lambda t: t.view(torch.float32),
        lambda t: t.view(-1),
        lambda t: t[:0],
        lambda t: t.as_strided((24, 96), (0, 1)),
    ],
    ids=["rows", "columns", "reshaped", "dtype", "flat", "nothing", "overlapping"],
)
def test_shape_that_changes_at_the_same_address(view, release):
    """The library would write beyond the end, or in the wrong places."""
    memory = torch.ones(24, 96, dtype=torch.bfloat16)
    p = Parameter(memory)
    opt = halfstep.AdamW([("body.weight", p)], weights="bf16-ecc8", states="int8")
    p.grad = torch.ones_like(p)
    opt.step()
    before = bits(memory)
    p.grad = None
    p.data = view(memory)
    p.grad = torch.full_like(p, 0.5)
    with told("was written, but not by this optimizer", release and 0 not in p.stride()):
        if release:
            opt.prepare_gradient_release()
        with pytest.raises(ANY, match="body.weight"):
            opt.step_param(p) if release else opt.step()
    assert bits(memory) == before


@pytest.mark.parametrize(
    "data",
    [
        torch.ones(24, 96, dtype=torch.float64),
        torch.ones(24, 96, dtype=torch.complex64),
        torch.ones(24, 96),
        torch.ones(24, 96, dtype=torch.float16),
        torch.ones(1, 96, dtype=torch.bfloat16).expand(24, 96),
    ],
)
def test_data_that_cannot_be_stepped_in_mid_run(data):
    broken(replace_data("body.weight", data), "body.weight")


def test_gradient_that_does_not_fit_in_mid_run():
    good = torch.ones(17, 50, dtype=torch.bfloat16)
    for grad in (good.to_sparse(), good.as_subclass(Unknown)):
        opt, params, before = broken(
            lambda opt, params, grad=grad: setattr(params["head.weight"], "grad", grad),
            "head.weight",
        )
        assert states(opt) == before
        opt.zero_grad()
        run(opt, params, 2, 3)
        as_if_sound(opt, params, 3)


@pytest.mark.parametrize(
    "key,value",
    [
        ("lr", -1.0),
        ("lr", math.nan),
        ("lr", math.inf),
        ("lr", "fast"),
        ("lr", None),
        ("lr", torch.tensor(-1.0)),
        ("lr", torch.tensor([1.0, 2.0])),
        ("betas", (1.0, 0.999)),
        ("betas", (0.9, -0.1)),
        ("betas", (0.9,)),
        ("betas", 0.9),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("weight_decay", math.nan),
        ("weights", "bf17"),
        ("weights", "int8"),
        ("states", "int9"),
        ("states", "int8+int8+int8+int8+int8"),
        ("decay", "sometimes"),
        ("centralize", 2.0),
    ],
)
def test_options_edited_to_nonsense(key, value):
    """A live edit of a group is judged at the step. Once corrected, everything goes on."""
    good = sound(0)[1].param_groups[0][key]
    opt, params, before = broken(lambda opt, params: opt.param_groups[0].update({key: value}))
    opt.param_groups[0][key] = good
    assert states(opt) == before
    run(opt, params, 2, 3)
    as_if_sound(opt, params, 3)


@pytest.mark.parametrize(
    "key,value",
    [
        ("exp_avg.codes", torch.zeros(3, dtype=torch.int8)),
        ("exp_avg.codes", torch.zeros(24, 96)),
        ("exp_avg.codes", None),
        ("exp_avg.codes", 1.0),
        ("exp_avg.codes", torch.zeros(96, 24, dtype=torch.int8)),
        ("exp_avg_sq.codes", torch.zeros(24, 95, dtype=torch.int8)),
        ("exp_avg.codes", torch.zeros(24, 96, dtype=torch.int8, device="meta")),
        ("weight.extra", torch.zeros(24, 96)),
        ("exp_avg.codes", torch.zeros(24, 96, dtype=torch.int8).to_sparse()),
        ("step", "three"),
        ("step", torch.zeros(3)),
        ("step", -1.0),
        ("step", math.nan),
    ],
)
def test_states_edited_to_nonsense(key, value):
    """The library writes to the addresses of states, so none of another size or kind may be
    there."""
    params, opt = sound(2)
    weights = weights_of(params)
    opt.state[params["body.weight"]][key] = value
    set_gradients(params, 2)
    with pytest.raises(ANY, match="body.weight"):
        opt.step()
    assert weights_of(params) == weights


def test_states_of_equal_meaning_are_taken():
    """Strided or moved copies are no nonsense."""
    params, opt = sound(2)
    state = opt.state[params["body.weight"]]
    state["exp_avg.codes"] = (
        state["exp_avg.codes"].t().clone(memory_format=torch.contiguous_format).t()
    )
    assert not state["exp_avg.codes"].is_contiguous()
    run(opt, params, 2, 4)
    as_if_sound(opt, params, 4)


# ---- Options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [
        "",
        "adamx",
        "adamw/bf17",
        "adamw/f32/int9",
        "adamw/bf16-sr/int8+int9",
        "adamw/bf16-sr/int8+int8+int8+int8",
        "adamw/int8",
        "adamw/f32/int8/int8",
        "ADAMW/f32",
        "adamw/bf16-sr/f16+f16",
        "ema/f32",
        "lion/f32/int8+int8",
        "adamw/f32/bf16-kahan+bf16-kahan",
    ],
)
def test_unknown_recipes(recipe):
    p = Parameter(torch.ones(4, 64))
    with pytest.raises(ValueError) as caught:
        halfstep.optimizer(recipe, [("p", p)])
    assert not recipe or any(
        part in str(caught.value) for part in (recipe, *recipe.split("/")) if part
    )


@rules
@pytest.mark.parametrize(
    "options",
    [
        {"weights": "bf17"},
        {"weights": "int8"},
        {"weights": 8},
        {"states": "int9"},
        {"states": 8},
        {"states": "f32+f32+f32+f32+f32"},
        {"decay": "sometimes"},
        {"clip": "never"},
        {"scan": "maybe"},
        {"generator": "dice"},
        {"clip_norm": -1.0},
        {"clip_norm": math.nan},
        {"clip_norm": "x"},
        {"threads": -1},
        {"threads": 1 << 20},
        {"seed": "x"},
        {"seed": "1"},
        {"seed": 1.5},
        {"seed": 1.0},
        {"seed": True},
        {"seed": 2**64},
        {"seed": -(2**63) - 1},
        {"lr": "x"},
        {"lr": None},
        {"centralize": -1.0},
        {"reference_lr": -1.0},
    ],
)
def test_unknown_options(rule, options):
    """In the constructor, before there is a step; those of groups in a group as well."""
    p = Parameter(torch.ones(4, 64, dtype=torch.bfloat16))
    key, value = next(iter(options.items()))
    with pytest.raises((ValueError, TypeError)) as caught:
        class_of(rule)([("p", p)], **options)
    assert key in str(caught.value) or str(value) in str(caught.value) or key == "lr", str(
        caught.value
    )
    if key in ("weights", "states", "decay", "lr", "centralize", "reference_lr"):
        good = Parameter(torch.ones(3))
        opt = class_of(rule)([("good", good)])
        before = plain(opt.state_dict())
        with pytest.raises((ValueError, TypeError)):
            opt.add_param_group({"params": [("p", p)], **options})
        assert plain(opt.state_dict()) == before and len(opt.param_groups) == 1


def test_malformed_variables(monkeypatch):
    monkeypatch.setenv("HALFSTEP_PIN", "yes")
    with pytest.raises(ValueError, match="HALFSTEP_PIN is 'yes'; known: 0, 1"):
        halfstep.AdamW([Parameter(torch.ones(4))])


def test_formats_for_another_dtype():
    """BF16 cannot be stored as fp32; fp32 stays as it is whatever is asked for."""
    p = Parameter(torch.ones(4, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="bfloat16.*f32|f32.*bfloat16") as caught:
        halfstep.AdamW([(NAME, p)], weights="f32")
    assert NAME in str(caught.value)
    halfstep.AdamW([Parameter(torch.ones(4))], weights="bf16-kahan")


def test_duplicate_names():
    """Two tensors with one name would round alike."""
    a, b = (Parameter(torch.ones(4)) for _ in range(2))
    for p in (a, b):
        p.grad = torch.ones(4)
    with pytest.raises(ValueError, match="same|twice|two|duplicate"):
        halfstep.AdamW([("same", a), ("same", b)]).step()
    assert torch.equal(a, torch.ones(4)) and torch.equal(b, torch.ones(4))


def test_closures_that_raise():
    params, opt = sound(1)
    before = everything(opt, params)

    def closure():
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        opt.step(closure)
    assert everything(opt, params) == before


def test_step_with_grad_enabled_leaves_no_graph():
    p = Parameter(torch.ones(4))
    opt = halfstep.AdamW([p])
    p.grad = torch.ones(4, requires_grad=True) * 2
    opt.step()
    assert p.grad_fn is None and p.is_leaf and p.requires_grad
    opt.zero_grad(set_to_none=False)
    assert p.grad.grad_fn is None and not p.grad.requires_grad


@pytest.mark.parametrize(
    "rule,options",
    [
        ("sgd", {}),
        ("rmsprop", {}),
        ("schedulefree", {}),
        ("adamw", {"decay": "l2", "weight_decay": 0.1}),
        ("adam", {"weight_decay": 0.1}),
    ],
)
def test_accumulation_that_would_lose_gradients(rule, options):
    """Some rules have no state to gather gradients in. Under l2 only the last gradient would get
    decay."""
    params = parameters()
    opt = class_of(rule)(params.items(), lr=0.01, **options)
    run(opt, params, 0, 1)
    before = everything(opt, params)
    opt.optimizer_accumulation = True
    set_gradients(params, 1)
    with pytest.raises(ANY, match="accumul|micro|l2"):
        opt.step()
    assert everything(opt, params) == before
    opt.optimizer_accumulation = False
    opt.step()
