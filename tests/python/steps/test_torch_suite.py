"""PyTorch's own conventions for optimizers, in the form of its test suite.

The names are those of the tests in torch's test/test_optim.py that run on a CPU. Descriptions of
optimizers and their options are the wheel's torch.testing._internal.common_optimizers where torch
has the rule. For other rules they are made here. Each test runs over every class and every
configuration of it. The tests of hooks are in test_torch_hooks.py.
"""

import copy

import pytest
import torch
from conftest import COARSE_TEXT, FIRST_MOVEMENT, RULES, TORCH, class_of, saved, warnings_are
from torch.nn import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau

common = pytest.importorskip(
    "torch.testing._internal.common_optimizers", reason="not in this torch's wheel"
)

INFOS = {info.optim_cls.__name__.lower(): info for info in common.optim_db}
#: what torch refuses for the sake of its foreach and graph implementations, which are hints here
NOT_OURS = (
    "foreach=True",
    "betas must be either both floats or both Tensors",
    "Muon only supports 2D",
    "does not support complex",
)


def inputs(rule):
    """Returns configurations (options, description) of a class: torch's own, then formats and
    options that only this library has."""
    found = []
    if rule in INFOS:
        found += [(dict(i.kwargs), i.desc) for i in INFOS[rule].optim_inputs_func(device="cpu")]
    else:
        found += [
            ({}, "default"),
            ({"lr": 0.01}, "non-default lr"),
            ({"weight_decay": 0.1}, "nonzero weight_decay"),
            ({"weight_decay": 0.1, "maximize": True}, "maximize"),
        ]
    found.append(({"decay": "fully-decoupled", "weight_decay": 1e-4}, "fully decoupled decay"))
    found.append(({"centralize": 1.0}, "centralized gradients"))
    found.append(({"clip_norm": 10.0, "scan": "per-tensor"}, "clipping"))
    for weights, states in (("bf16-sr", "int8"), ("bf16-kahan", "int4"), ("bf16-ecc8", None)):
        found.append(
            (
                {"weights": weights, "states": states, "dtype": torch.bfloat16},
                f"{weights}, {states}",
            )
        )
    return found


def pairs():
    coarse = pytest.mark.told(COARSE_TEXT)
    return [
        pytest.param(
            class_of(rule),
            options,
            id=f"{rule}|{desc.replace(' ', '_')}",
            marks=[coarse] if rule == "muon" and options.get("states") == "int4" else [],
        )
        for rule in RULES
        for options, desc in inputs(rule)
    ]


every = pytest.mark.parametrize("cls,options", pairs())
rules = pytest.mark.parametrize("cls", [class_of(rule) for rule in RULES], ids=RULES)


def split(options):
    """Returns the dtype of parameters, and the options of an optimizer."""
    options = copy.deepcopy(options)  # schedulers edit tensors in place
    return options.pop("dtype", torch.float32), options


def made(cls, options, steps=0):
    """Returns a problem and an optimizer of it, which has made some steps."""
    dtype, options = split(options)
    problem = Problem(dtype)
    opt = cls(problem.params, **options)
    run(opt, problem, steps)
    return problem, opt


def equal(a, b):
    """Equality of nested dictionaries, lists and tensors, dtypes included."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return (
            isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and torch.equal(a, b)
        )
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and a.keys() == b.keys()
            and all(equal(v, b[k]) for k, v in a.items())
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b))
    return a == b


class Problem:
    """weight @ input + bias, squared: what the tests of torch minimise."""

    def __init__(self, dtype=torch.float32, strided=False, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.weight, self.bias = (
            Parameter(
                torch.randn((*shape, 2), generator=g).to(dtype)[..., 0]
                if strided
                else torch.randn(shape, generator=g).to(dtype)
            )
            for shape in ((10, 5), (10,))
        )
        self.input = torch.randn(5, generator=g).to(dtype)

    @property
    def params(self):
        return [self.weight, self.bias]

    def closure(self, opt):
        def run():
            opt.zero_grad()
            loss = (self.weight.mv(self.input) + self.bias).float().pow(2).sum()
            loss.backward()
            return loss

        return run

    def copy(self):
        other = copy.copy(self)
        other.weight, other.bias = copy.deepcopy((self.weight, self.bias))
        return other


def run(opt, problem, steps):
    for _ in range(steps):
        opt.step(problem.closure(opt))


# ---- Construction --------------------------------------------------------------------------------


@rules
def test_errors(cls):
    """Runs what torch's own descriptions say must fail, and expects torch's words."""
    tried = 0
    info = INFOS.get(cls.rule, INFOS["sgd"])
    for wrong in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        if wrong.error_regex and any(
            text in wrong.error_regex or text in wrong.optimizer_error_input.desc
            for text in NOT_OURS
        ):
            continue
        if cls.rule not in INFOS and "momentum" in wrong.optimizer_error_input.kwargs:
            continue
        tried += 1
        given = wrong.optimizer_error_input
        params = (
            given.params
            if given.params is not None
            else [Parameter(torch.randn(2, 3)), Parameter(torch.randn(4))]
        )
        assert wrong.error_on == common.OptimizerErrorEnum.CONSTRUCTION_ERROR
        expect = pytest.warns if issubclass(wrong.error_type, Warning) else pytest.raises
        with expect(wrong.error_type, match=wrong.error_regex):
            cls(params, **given.kwargs)
    assert tried >= 6


@every
def test_optimizer_can_be_printed(cls, options):
    dtype, options = split(options)
    params = [Parameter(torch.randn(2, 3, dtype=dtype)), Parameter(torch.randn(4, dtype=dtype))]
    opt = cls(params, **options)
    assert cls.__name__ in repr(opt)
    for p in params:
        p.grad = torch.rand_like(p)
    opt.step()
    assert cls.__name__ in repr(opt) and str(opt)


# ---- Steps ---------------------------------------------------------------------------------------


def goes_right(opt, problem, schedulers=()):
    """Minimises with schedulers beside the steps, or maximises if the option says so."""
    closure = problem.closure(opt)
    first = closure().item()
    for _ in range(20):
        loss = opt.step(closure)
        for s in schedulers:
            s.step(loss.item()) if isinstance(s, ReduceLROnPlateau) else s.step()
    now = closure().item()
    assert now > first if opt.defaults["maximize"] else now < first


@every
@pytest.mark.parametrize("strided", [False, True])
def test_forloop_goes_right_direction(cls, options, strided):
    dtype, options = split(options)
    problem = Problem(dtype, strided)
    goes_right(cls(problem.params, **options), problem)


@every
def test_param_group_with_lrscheduler_goes_right_direction(cls, options):
    """Two groups, and every scheduler that torch tries with the rule."""
    info = INFOS.get(cls.rule, INFOS["adamw"])
    dtype, options = split(options)
    apart = {"d_group": 1} if cls.rule == "prodigy" else {}  # two rates are of two estimates
    for makers in info.scheduler_inputs:
        problem = Problem(dtype)
        opt = cls(
            [{"params": [problem.weight]}, {"params": [problem.bias], "lr": 0.01, **apart}],
            **options,
        )
        with warnings_are("ignore"):
            makers = makers if isinstance(makers, (list, tuple)) else [makers]
            schedulers = [make(opt) for make in makers]
        goes_right(opt, problem, schedulers)


@every
def test_tensor_lr(cls, options):
    """A tensor as lr gives the bits of the float it holds; schedulers may go on with either. It is
    read again when it was edited in place."""
    dtype, options = split(options)
    options.pop("lr", None)
    for kind in (
        torch.tensor(0.01),
        torch.tensor([0.01]),
        torch.tensor(0.01, dtype=torch.float64),
    ):
        problem = Problem(dtype)
        other = problem.copy()
        names = ("weight", "bias")
        opt = cls(list(zip(names, problem.params)), lr=kind, **options, seed=0)
        reference = cls(list(zip(names, other.params)), lr=float(kind), **options, seed=0)
        schedulers = [
            torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5) for o in (opt, reference)
        ]
        for _ in range(5):
            run(opt, problem, 1)
            run(reference, other, 1)
            for s in schedulers:
                s.step()
            assert equal(problem.params, other.params)
            assert isinstance(opt.param_groups[0]["lr"], torch.Tensor)
            assert float(opt.param_groups[0]["lr"]) == reference.param_groups[0]["lr"]
        opt.param_groups[0]["lr"].mul_(0.25)
        reference.param_groups[0]["lr"] *= 0.25
        run(opt, problem, 1)
        run(reference, other, 1)
        assert equal(problem.params, other.params)
        assert equal(opt.state_dict()["state"], reference.state_dict()["state"])


#: lets a rate that is estimated be lr from the first step on
ESTIMATED = {"prodigy": {"d0": 1.0}}


@rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_param_groups_weight_decay(cls, dtype):
    """Decay in one group only makes that group's norm smaller than it would be."""
    moved = {}
    for decay in (0.0, 0.9):
        problem = Problem(dtype)
        opt = cls(
            [
                {"params": [("w", problem.weight)], "weight_decay": decay},
                {"params": [("b", problem.bias)]},
            ],
            weight_decay=0.0,
            lr=0.05,
            seed=0,
            **ESTIMATED.get(cls.rule, {}),
        )
        for _ in range(10):
            problem.weight.grad = torch.ones_like(problem.weight) * 1e-3
            problem.bias.grad = torch.ones_like(problem.bias) * 1e-3
            opt.step()
        moved[decay] = problem
    # whose rate follows from all weights
    assert cls.rule in ESTIMATED or torch.equal(moved[0.0].bias, moved[0.9].bias)
    assert moved[0.9].weight.float().norm() < 0.95 * moved[0.0].weight.float().norm()


@rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_param_groups_lr(cls, dtype):
    """A group with lr 0 stands still; the options' order does not matter."""
    for groups in (
        lambda p: [{"params": [p.weight]}, {"params": [p.bias], "lr": 0.0}],
        lambda p: [{"params": [p.weight], "lr": 0.1}, {"params": [p.bias]}],
    ):
        problem = Problem(dtype)
        before = problem.copy()
        base = groups(problem)
        opt = cls(base, lr=0.0 if "lr" in base[0] else 0.1, **ESTIMATED.get(cls.rule, {}))
        run(opt, problem, 5)
        assert torch.equal(problem.bias, before.bias)
        assert not torch.equal(problem.weight, before.weight)


@every
def test_step_is_noop_when_params_have_no_grad(cls, options):
    problem, opt = made(cls, options)
    before = problem.copy()
    opt.step()
    assert equal(problem.params, before.params)
    problem.weight.grad = torch.arange(1.0, 51.0).reshape(10, 5).to(problem.weight.dtype)
    for _ in range(20):  # 50 elements, of which a step of some rules rounds one away
        opt.step()
    assert torch.equal(problem.bias, before.bias)
    assert not torch.equal(opt.read_weight(problem.weight), before.weight.float())


@every
def test_step_is_noop_for_zero_grads(cls, options):
    """Zero gradients and no decay: not one bit, however often."""
    problem, opt = made(cls, {**options, "weight_decay": 0.0})
    before = problem.copy()
    for _ in range(5):
        for p in problem.params:
            p.grad = torch.zeros_like(p)
        opt.step()
    assert equal(problem.params, before.params)


@rules
def test_fused_matches_forloop(cls):
    """fused= and foreach= are hints: the bits are the same."""
    problems = [Problem() for _ in range(4)]
    opts = [
        cls(list(zip("wb", p.params)), **kw)
        for p, kw in zip(problems, ({}, {"fused": True}, {"foreach": True}, {"capturable": True}))
    ]
    for o, p in zip(opts, problems):
        run(o, p, 5)
    for p in problems[1:]:
        assert equal(p.params, problems[0].params)


@rules
def test_fused_error_on_params_on_meta(cls):
    """Built on meta and stepped there: an error; materialised afterwards: fine."""
    with torch.device("meta"):
        model = torch.nn.Linear(4, 3)
    with pytest.raises((RuntimeError, ValueError, TypeError), match="meta"):
        opt = cls(model.parameters(), fused=True)
        for p in model.parameters():
            p.grad = torch.rand_like(p)
        opt.step()
    model = model.to_empty(device="cpu")
    for p in model.parameters():
        torch.nn.init.zeros_(p)
        p.grad = torch.ones_like(p)
    opt = cls(model.parameters(), fused=True)
    for _ in range(FIRST_MOVEMENT):
        opt.step()
    assert all((p != 0).any() for p in model.parameters())


# ---- State dicts ---------------------------------------------------------------------------------


@every
def test_state_dict_deterministic(cls, options):
    """Makes 20 steps, a copy by state_dict, and 20 more side by side. Weights and states must be
    equal, and no dictionary changes."""
    problem, opt = made(cls, options, 20)
    other = problem.copy()
    loaded = cls(other.params, **split(options)[1])
    given, kept = copy.deepcopy(opt.state_dict()), copy.deepcopy(opt.state_dict())
    loaded.load_state_dict(given)
    for _ in range(20):
        run(opt, problem, 1)
        run(loaded, other, 1)
        assert equal(problem.params, other.params)
    assert equal(given, kept)
    assert equal(opt.state_dict(), loaded.state_dict())
    # Repeated parameters get the same numbers.
    loaded.param_groups.extend(copy.copy(loaded.param_groups))
    assert equal(loaded.state_dict()["param_groups"][0], opt.state_dict()["param_groups"][0])
    assert equal(loaded.state_dict()["param_groups"][-1], opt.state_dict()["param_groups"][0])


@every
def test_can_load_older_state_dict(cls, options):
    """A file may lack flags that came later."""
    problem, opt = made(cls, options, 6)
    optional = ("group_steps", "amsgrad", "decoupled_weight_decay")
    required = ("maximize", "foreach", "fused", "capturable", "differentiable", "decay")
    for flag in (*required, "centralize", "reference_lr", *optional):
        file = copy.deepcopy(opt.state_dict())
        for group in file["param_groups"]:
            group.pop(flag, None)
        opt.load_state_dict(file)
        run(opt, problem, 1)
        assert flag in opt.param_groups[0] or flag in optional


@every
@pytest.mark.told("none of the names in the state, such as 'weight'")
def test_can_load_from_to_named_state_dict(cls, options):
    """Loads between named and unnamed optimizers in all four directions. The file's names win, else
    the present ones stay."""
    dtype, options = split(options)
    for from_named, to_named in ((True, True), (True, False), (False, True), (False, False)):
        problem = Problem(dtype)
        opt = cls(
            list(zip(("weight", "bias"), problem.params)) if from_named else problem.params,
            **options,
        )
        run(opt, problem, 5)
        other = problem.copy()
        loaded = cls(list(zip(("w", "b"), other.params)) if to_named else other.params, **options)
        loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
        for _ in range(5):
            run(opt, problem, 1)
            run(loaded, other, 1)
            assert equal(problem.params, other.params)
        ours, theirs = loaded.state_dict(), opt.state_dict()
        names = ["weight", "bias"] if from_named else ["w", "b"] if to_named else None
        assert ours["param_groups"][0].get("param_names") == names and ours.get("param_names") == (
            names and [names]
        )
        for d in (ours, theirs):
            d.pop("param_names", None)
            d["param_groups"][0].pop("param_names", None)
        assert equal(ours, theirs)


@every
def test_save_load_equality_with_weights_only(cls, options):
    problem, opt = made(cls, options, 3)
    loaded = saved(opt.state_dict())
    assert equal(loaded, opt.state_dict())
    other = problem.copy()
    again = cls(other.params, **split(options)[1])
    again.load_state_dict(loaded)
    assert equal(again.state_dict(), opt.state_dict())


@every
def test_load_nontensor_step(cls, options):
    problem, opt = made(cls, options, 3)
    file = opt.state_dict()
    assert len(opt.state) == 2
    for state in file["state"].values():
        if torch.is_tensor(state["step"]):
            state["step"] = state["step"].item()
    opt.load_state_dict(file)
    run(opt, problem, 2)
    assert all(state["step"].item() == 5 for state in opt.state.values())


@every
def test_deepcopy_copies_all_public_attrs(cls, options):
    problem, opt = made(cls, options)

    def public(o):
        return {k for k in o.__getstate__() if not k.startswith("_")}

    assert public(copy.deepcopy(opt)) == public(opt)
    run(opt, problem, 2)
    assert public(copy.deepcopy(opt)) == public(opt)
    for key in public(opt) - {"state", "param_groups", "defaults"}:
        assert getattr(copy.deepcopy(opt), key) == getattr(opt, key), key


# ---- Where the suites of other packages found differences from torch -----------------------------


@pytest.mark.parametrize("rule", ["muon", "sgd", "rmsprop", "adamw"])
@pytest.mark.parametrize(
    "make",
    [
        lambda opt: torch.optim.lr_scheduler.CyclicLR(
            opt, 1e-3, 1e-2, step_size_up=3, base_momentum=0.6, max_momentum=0.9
        ),
        lambda opt: torch.optim.lr_scheduler.OneCycleLR(
            opt, 1e-2, total_steps=8, base_momentum=0.6, max_momentum=0.9
        ),
    ],
    ids=["CyclicLR", "OneCycleLR"],
)
def test_schedulers_cycle_momentum_as_with_torch(rule, make):
    """Muon's AdamW betas, which torch's has not, are left alone."""
    if rule not in TORCH:
        pytest.skip("not in this torch")
    found = []
    for cls in (class_of(rule), TORCH[rule]):
        p = Parameter(torch.ones(4, 4))
        options = {"momentum": 0.9} if rule in ("sgd", "rmsprop") else {}
        opt = cls([p], lr=1e-3, **options)
        betas = opt.param_groups[0].get("betas")
        scheduler, seen = make(opt), []
        for _ in range(5):
            p.grad = torch.ones_like(p)
            opt.step()
            scheduler.step()
            group = opt.param_groups[0]
            beta = group["betas"][0] if rule == "adamw" else None
            seen.append((float(group["lr"]), group.get("momentum"), beta))
        if rule == "muon":
            assert opt.param_groups[0].get("betas") == betas
        found.append(seen)
    assert found[0] == found[1]
    assert len({moment for _, *moments in found[0] for moment in moments if moment is not None}) > 2


def test_betas_of_muon_are_options_of_groups():
    p, q = Parameter(torch.ones(4)), Parameter(torch.ones(4))
    opt = class_of("muon")(
        [{"params": [p]}, {"params": [q], "betas": (0.5, 0.6)}], betas=(0.8, 0.9)
    )
    assert [group["betas"] for group in opt.param_groups] == [(0.8, 0.9), (0.5, 0.6)]
    again = copy.deepcopy(opt)
    again.add_param_group({"params": [Parameter(torch.ones(4))]})
    assert again.param_groups[2]["betas"] == (0.8, 0.9)
    with pytest.raises(ValueError, match="Invalid beta parameter at index 0: 1.5"):
        class_of("muon")([p], betas=(1.5, 0.9))


@pytest.mark.parametrize("rule", ["sgd", "rmsprop"])
def test_momentum_and_dampening_have_no_upper_bound(rule):
    """As torch's: the same numbers."""
    options = {"momentum": 1.25, **({"dampening": -0.5} if rule == "sgd" else {})}
    found = []
    for cls in (class_of(rule), TORCH[rule]):
        p = Parameter(torch.linspace(-1, 1, 12))
        opt = cls([p], lr=1e-2, **options)
        for step in range(4):
            p.grad = torch.linspace(0.5, 2, 12) * (step + 1)
            opt.step()
        found.append(p.detach())
    assert torch.allclose(*found, rtol=1e-5)
    assert class_of("muon")([Parameter(torch.ones(2, 2))], momentum=1.0)
    if rule == "sgd":
        class_of(rule)([Parameter(torch.ones(2))], momentum=0.9, dampening=1.5)


@rules
def test_sparse_gradients_are_a_runtime_error(cls):
    table = torch.nn.Embedding(10, 4, sparse=True)
    opt = cls([("table", table.weight)], lr=0.1)
    before = table.weight.detach().clone()
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="'table' is sparse"):
        opt.step()
    assert torch.equal(table.weight, before)


@pytest.mark.parametrize("source,target", [("adamw", "adam"), ("adam", "adamw")])
@pytest.mark.parametrize("weights,states", [(None, None), ("bf16-ecc8", "int8")])
def test_adam_loads_the_states_of_adamw(source, target, weights, states):
    """It goes on with the decay of the file if the file says one, as torch's Adam does. AdamW stays
    AdamW."""
    dtype = torch.float32 if weights is None else torch.bfloat16
    problem = Problem(dtype)
    opt = class_of(source)(
        list(zip(("w", "b"), problem.params)),
        lr=0.01,
        weight_decay=0.1,
        weights=weights,
        states=states,
        seed=3,
    )
    run(opt, problem, 3)
    other = problem.copy()
    loaded = class_of(target)(
        list(zip(("w", "b"), other.params)), lr=0.01, weights=weights, states=states
    )
    with warnings_are("error"):
        loaded.load_state_dict(opt.state_dict())
    for p, q in zip(problem.params, other.params):
        assert torch.equal(opt.read_state(p, "exp_avg_sq"), loaded.read_state(q, "exp_avg_sq"))
    assert loaded.param_groups[0]["decoupled_weight_decay"] is True
    if source == "adam":
        return
    run(opt, problem, 3)
    run(loaded, other, 3)
    assert equal(problem.params, other.params)
    with pytest.raises(ValueError, match="this optimizer is lion"):
        class_of("lion")(other.params).load_state_dict(opt.state_dict())


@rules
def test_a_string_is_no_learning_rate(cls):
    with pytest.raises(TypeError):
        torch.optim.AdamW([Parameter(torch.ones(2))], lr="1e-3")
    with pytest.raises(TypeError, match="'lr' is '1e-3'"):
        cls([Parameter(torch.ones(2))], lr="1e-3")
    opt = cls([Parameter(torch.ones(2))])
    opt.param_groups[0]["lr"] = "1e-3"
    opt.param_groups[0]["params"][0].grad = torch.ones(2)
    with pytest.raises(TypeError, match="'lr' is '1e-3'"):
        opt.step()


def test_expected_difference_step_is_float32_under_any_default_dtype():
    """torch's `step` is float64 under that default. Ours is float32, where the library writes,
    beside exact counters."""
    torch.set_default_dtype(torch.float64)
    try:
        p = Parameter(torch.ones(4, dtype=torch.float32))
        p.grad = torch.ones_like(p)
        theirs, ours = torch.optim.AdamW([p]), class_of("adamw")([p])
        theirs.step(), ours.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert theirs.state[p]["step"].dtype == torch.float64
    assert ours.state[p]["step"].dtype == torch.float32
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))  # a float64 one is understood
    assert int(ours.state[p]["step"]) == 1


def test_expected_difference_gradients_are_never_written():
    """Under a GradScaler torch's fused step leaves unscaled gradients, and ours those of the scaled
    loss. Call unscale_() to read them unscaled."""
    found = []
    for cls in (class_of("adamw"), torch.optim.AdamW):
        p = Parameter(torch.ones(4))
        opt = cls([p], lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(p.sum()).backward()
        scaler.step(opt)
        found.append((p.grad.clone(), p.detach().clone()))
    assert torch.equal(found[0][0], torch.full((4,), 8.0)) and torch.equal(
        found[1][0], torch.ones(4)
    )
    assert torch.allclose(found[0][1], found[1][1])


def test_rules_of_torch_are_all_described():
    """Every optimizer of ours that torch has uses torch's own configurations."""
    assert {"sgd", "adam", "adamw", "radam", "rmsprop"} <= set(INFOS) & set(RULES)
    assert any(options.get("nesterov") for options, _ in inputs("sgd"))
    assert any(options.get("amsgrad") for options, _ in inputs("adamw"))
