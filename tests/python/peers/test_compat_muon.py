"""Tests Muon and the interfaces of other packages against their authors' code, which is written out
here in fp32: the packages are on no index. Run as a program, it prints the largest differences."""

import math

import pytest
import torch
from conftest import parameters, run, set_gradients, twins, weights_of
from torch.nn import Parameter

import halfstep
from halfstep.compat import dion, muon

SHAPES = {
    "small": (8, 24),
    "wide": (16, 40),
    "tall": (40, 16),
    "conv": (8, 4, 3, 3),
    "embed": (20, 16),
    "gain": (16,),
}
HIDDEN = ["small", "wide", "tall", "conv"]
AUX = ["embed", "gain"]


def orthogonal(g):
    x = g.mT if g.size(0) > g.size(1) else g
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if g.size(0) > g.size(1) else x


class Reference:
    """Muon with an auxiliary Adam, in fp32."""

    def __init__(self, groups):
        self.groups, self.state = groups, {}

    @torch.no_grad()
    def step(self):
        for group in self.groups:
            for p in group["params"]:
                state = self.state.setdefault(p, {})
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * self.update(p, p.grad, state, group))

    def update(self, p, g, state, group):
        if group["use_muon"]:
            buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
            buffer.lerp_(g, 1 - group["momentum"])
            u = orthogonal(g.lerp(buffer, group["momentum"]).flatten(1)).view_as(p)
            rows, columns = (len(p), p[0].numel()) if p.dim() == 4 else p.shape
            return u * max(1, rows / columns) ** 0.5
        m, v = (state.setdefault(k, torch.zeros_like(p)) for k in ("exp_avg", "exp_avg_sq"))
        t = state["step"] = state.get("step", 0) + 1
        (b1, b2), eps = group["betas"], group["eps"]
        m.lerp_(g, 1 - b1)
        v.lerp_(g.square(), 1 - b2)
        return m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + eps)

    def state_dict(self):
        """Returns what the package's optimizer saves."""
        flat = [p for group in self.groups for p in group["params"]]
        return {
            "state": {i: dict(self.state[p]) for i, p in enumerate(flat)},
            "param_groups": [
                {
                    **group,
                    "params": [
                        next(i for i, q in enumerate(flat) if q is p) for p in group["params"]
                    ],
                }
                for group in self.groups
            ],
        }


def groups_of(params, **muon_options):
    return [
        dict(params=[params[n] for n in AUX], use_muon=False, lr=3e-3, weight_decay=0.1),
        dict(params=[params[n] for n in HIDDEN], use_muon=True, **muon_options),
    ]


def reference(params, order=HIDDEN):
    aux, hidden = groups_of(params, lr=0.02, momentum=0.95, weight_decay=0)
    hidden["params"] = [params[n] for n in order]
    return Reference([{**aux, "betas": (0.9, 0.95), "eps": 1e-10}, hidden])


def close(params, other):
    for name, p in params.items():
        torch.testing.assert_close(p.detach(), other[name].detach(), rtol=1e-4, atol=1e-4)


def test_steps():
    params = parameters(torch.float32, SHAPES)
    other = twins(params)
    opt, judge = muon.SingleDeviceMuonWithAuxAdam(groups_of(params)), reference(other)
    for step in range(10):
        for some in (params, other):
            set_gradients(some, step)
        opt.step()
        judge.step()
    close(params, other)


def test_states_of_the_package_are_loaded():
    other = parameters(torch.float32, SHAPES)
    order = sorted(HIDDEN, key=lambda n: other[n].size(), reverse=True)
    judge = reference(other, order)
    for step in range(3):
        set_gradients(other, step)
        judge.step()
    params = twins(other)
    opt = muon.MuonWithAuxAdam(groups_of(params, lr=0.5))
    opt.load_state_dict(judge.state_dict())
    assert opt.param_groups[1]["lr"] == 0.02
    for step in range(3, 6):
        for some in (params, other):
            set_gradients(some, step)
        opt.step()
        judge.step()
    close(params, other)


def test_defaults_and_order():
    params = parameters(torch.float32, SHAPES)
    aux, hidden = muon.MuonWithAuxAdam(groups_of(params)).param_groups
    assert (hidden["lr"], hidden["momentum"], hidden["weight_decay"]) == (0.02, 0.95, 0)
    assert (aux["lr"], aux["betas"], aux["eps"]) == (3e-3, (0.9, 0.95), 1e-10)
    sizes = [p.size() for p in hidden["params"]]
    assert sizes == sorted(sizes, reverse=True) != [params[n].size() for n in HIDDEN]
    with pytest.raises(ValueError, match="MuonWithAuxAdam lacks the key 'use_muon'"):
        muon.MuonWithAuxAdam([{"params": list(params.values())}])
    groups = [{"params": [(n, params[n]) for n in HIDDEN], "use_muon": True}]
    names = muon.MuonWithAuxAdam(groups, states="int8").param_groups[0]["param_names"]
    assert names == sorted(HIDDEN, key=lambda n: params[n].size(), reverse=True)


@pytest.mark.parametrize("name", ["Muon", "SingleDeviceMuon"])
def test_hidden_weights_alone(name):
    params = {n: Parameter(torch.ones(SHAPES[n])) for n in HIDDEN}
    other = twins(params)
    ours = getattr(muon, name)(list(params.values()), lr=0.1)
    plain = halfstep.Muon(list(other.values()), lr=0.1, weight_decay=0, momentum=0.95)
    ours.param_groups[0]["seed"] = plain.param_groups[0]["seed"] = 1
    for opt, some in ((ours, params), (plain, other)):
        run(opt, some, 0, 3)
    assert weights_of(params) == weights_of(other)


# ---- Authors' code beside ours -------------------------------------------------------------------

MATRICES = {"wide": (16, 40), "tall": (40, 16), "square": (24, 24)}
LR, DECAY, STEPS = 0.02, 0.1, 20
JORDAN = ((3.4445, -4.775, 2.0315),) * 5
DION = (
    *((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037)),
    *((2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)),
)
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)


def iterate(g, triples, divisor=lambda norm: norm + 1e-7):
    x = g.mT if g.size(0) > g.size(1) else g
    x = x / divisor(x.norm())
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if g.size(0) > g.size(1) else x


def jordan_momentum(g, state, mu):
    buffer = state.setdefault("momentum", torch.zeros_like(g))
    buffer.lerp_(g, 1 - mu)
    return g.lerp(buffer, mu)


def by_jordan(w, g, state, triples=JORDAN):
    """muon_update() of Keller Jordan's package."""
    u = iterate(jordan_momentum(g, state, 0.95), triples)
    u = u * max(1, g.size(0) / g.size(1)) ** 0.5
    return w * (1 - LR * DECAY) - LR * u


def by_polar_express(w, g, state):
    """Algorithm 1 of Amsel et al. 2025: all but the last polynomial are of x / 1.01."""
    u = jordan_momentum(g, state, 0.95)
    triples = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in POLAR_EXPRESS]
    u = iterate(u, triples, lambda norm: norm * 1.01 + 1e-7)
    return w * (1 - LR * DECAY) - LR * u * max(1, g.size(0) / g.size(1)) ** 0.5


def by_deepseek(w, g, state):
    """The ten iterations of DeepSeek-V4."""
    return by_jordan(w, g, state, (JORDAN[0],) * 8 + ((2.0, -1.5, 0.5),) * 2)


def by_cautious(w, g, state):
    """Cautious weight decay (Chen et al. 2025): only where update and weight have one sign."""
    u = iterate(jordan_momentum(g, state, 0.95), JORDAN)
    u = u * max(1, g.size(0) / g.size(1)) ** 0.5
    return w - LR * u - LR * DECAY * w * (u * w >= 0)


def by_normuon(w, g, state):
    """normuon_update() of Li et al. 2025."""
    u = iterate(jordan_momentum(g, state, 0.95), JORDAN)
    v, norm = state.setdefault("rows", torch.zeros(len(g), 1)), u.norm()
    v.lerp_((u * u).mean(-1, keepdim=True), 1 - 0.95)
    u = u / v.sqrt().add(1e-10)
    u = u * (norm / u.norm().add(1e-10)) * max(1, g.size(0) / g.size(1)) ** 0.5
    return w * (1 - LR * DECAY) - LR * u


def by_normuon_paper(w, g, state):
    """Algorithm 1 of Li et al. 2025, whose momentum is not Nesterov's."""
    buffer = state.setdefault("momentum", torch.zeros_like(g))
    buffer.lerp_(g, 1 - 0.95)
    u, v = iterate(buffer, JORDAN), state.setdefault("rows", torch.zeros(len(g), 1))
    v.lerp_((u * u).mean(-1, keepdim=True), 1 - 0.95)
    u = u / (v.sqrt() + 1e-10)
    step = 0.2 * LR * math.sqrt(g.numel()) / u.norm()
    return w - LR * DECAY * w - step * u


def by_dion(w, g, state, adjust="spectral_norm", cautious=False, rows=False, nesterov=False):
    """muon_update_batch_async() of microsoft/dion, and the normalization of its NorMuon."""
    momentum = state.setdefault("momentum", torch.zeros_like(g))
    momentum.mul_(0.95).add_(g)
    u = iterate(momentum * 0.95 + g if nesterov else momentum, DION, lambda norm: norm + 1e-8)
    if rows:
        v, norm = state.setdefault("rows", torch.zeros(len(g), 1)), u.norm()
        v.lerp_((u * u).mean(-1, keepdim=True), 1 - 0.95)
        u = u / (v.sqrt() + 1e-8)
        u = u * (norm / u.norm().clamp(min=1e-8))
    out, inner = g.shape
    scale = {
        "spectral_norm": math.sqrt(out / inner),
        "rms_norm": 0.2 * math.sqrt(max(out, inner)),
        None: 1.0,
    }
    decayed = w * (u * w >= 0) if cautious else w
    return w - LR * DECAY * decayed - LR * scale[adjust] * u


def by_torch(**options):
    """torch.optim.Muon itself, whose iterations are made in fp32."""

    def run_all(params):
        opt = torch.optim.Muon(params.values(), lr=LR, weight_decay=DECAY, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
            run(opt, params, 0, STEPS)

    return run_all


def by_steps(update, **options):
    """Makes steps by a function of weight, gradient and state."""

    @torch.no_grad()
    def run_all(params):
        states = {name: {} for name in params}
        for step in range(STEPS):
            set_gradients(params, step)
            for name, p in params.items():
                p.copy_(update(p, p.grad, states[name], **options))

    return run_all


def ours(cls=halfstep.Muon, **options):
    def make(params):
        return cls(list(params.items()), **{"lr": LR, "weight_decay": DECAY, **options})

    return make


#: whose code, how it is run, and ours
AUTHORS = {
    "torch.optim.Muon": (by_torch(), ours()),
    "torch.optim.Muon, match_rms_adamw": (
        by_torch(adjust_lr_fn="match_rms_adamw"),
        ours(adjust_lr_fn="match_rms_adamw"),
    ),
    "Keller Jordan": (by_steps(by_jordan), ours(muon.SingleDeviceMuon)),
    "Polar Express": (by_steps(by_polar_express), ours(ns_coefficients="polar-express")),
    "DeepSeek-V4, 8 + 2": (by_steps(by_deepseek), ours(ns_coefficients="deepseek-v4")),
    "cautious weight decay": (by_steps(by_cautious), ours(decay="cautious")),
    "NorMuon": (by_steps(by_normuon), ours(normalize_rows="keep-norm")),
    "NorMuon, the paper": (
        by_steps(by_normuon_paper),
        ours(nesterov=False, normalize_rows="full-norm", adjust_lr_fn="match_rms_adamw"),
    ),
    "dion Muon": (by_steps(by_dion), ours(dion.Muon)),
    "dion Muon, rms_norm, Nesterov": (
        by_steps(by_dion, adjust="rms_norm", nesterov=True),
        ours(dion.Muon, adjust_lr="rms_norm", nesterov=True),
    ),
    "dion Muon, no adjustment, cautious_wd": (
        by_steps(by_dion, adjust=None, cautious=True),
        ours(dion.Muon, adjust_lr=None, cautious_wd=True),
    ),
    "dion NorMuon": (by_steps(by_dion, rows=True), ours(dion.NorMuon)),
}


def largest_difference(name):
    """Returns how far ours ends from the authors', as a part of the largest movement."""
    theirs, make = AUTHORS[name]
    params = parameters(torch.float32, MATRICES)
    other, start = twins(params), twins(params)
    run(make(params), params, 0, STEPS)
    theirs(other)
    off, moved = (
        max(float((p.detach() - others[n].detach()).abs().max()) for n, p in params.items())
        for params, others in ((params, other), (start, other))
    )
    return off / moved


@pytest.mark.parametrize("name", AUTHORS)
def test_authors_code(name):
    if name.startswith("torch") and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    assert largest_difference(name) < 5e-5


# ---- dion ----------------------------------------------------------------------------------------


def dion_groups(params, **options):
    return [
        {"params": [("embed", params["embed"])], "algorithm": "lion", "lr": 1e-3},
        {"params": [("gain", params["gain"])], "algorithm": "adamw", "epsilon": 1e-7},
        {"params": [("wide", params["wide"])], "mu": 0.9, "adjust_lr": "rms_norm", **options},
        {"params": [("conv", params["conv"])], "flatten": True, "cautious_wd": True},
    ]


def test_dion_groups():
    """Groups have the package's names, and each is stepped by the class of its algorithm."""
    params = parameters(torch.float32, SHAPES)
    opt = dion.Muon(dion_groups(params, algorithm="muon"), lr=0.02, betas=(0.8, 0.9))
    lion, adamw, wide, conv = opt.param_groups
    assert (lion["lr"], lion["betas"], lion["weight_decay"]) == (1e-3, (0.8, 0.9), 0.01)
    assert (adamw["lr"], adamw["betas"], adamw["eps"]) == (0.02, (0.8, 0.9), 1e-7)
    assert (wide["lr"], wide["momentum"], wide["nesterov"]) == (0.02, 0.9, False)
    assert (wide["adjust_lr_fn"], wide["matrix"], wide["decay"]) == (
        *("match_rms_adamw", "last-two", "decoupled"),
    )
    assert (conv["adjust_lr_fn"], conv["matrix"], conv["decay"]) == (
        *("spectral_norm", "flatten", "cautious"),
    )
    others = twins(params)
    options = {"betas": (0.8, 0.9), "weight_decay": 0.01}
    alone = [
        halfstep.Lion([("embed", others["embed"])], lr=1e-3, **options),
        halfstep.AdamW([("gain", others["gain"])], lr=0.02, eps=1e-7, **options),
        halfstep.Muon(
            [("wide", others["wide"]), ("conv", others["conv"])],
            **{"lr": 0.02, "momentum": 0.9, "nesterov": False, "weight_decay": 0.01},
            **{"ns_coefficients": "dion", "eps": 1e-8, "adjust_lr_fn": "match_rms_adamw"},
        ),
    ]
    run(opt, params, 0, 5)
    for one in alone:
        run(one, others, 0, 5)
    for name in ("embed", "gain", "wide"):
        assert torch.equal(params[name], others[name]), name


@pytest.mark.parametrize(
    "options, words",
    [
        ({"newton_schulz_func": iterate}, "newton_schulz_func= is not called"),
        ({"adjust_lr": "fan_in"}, "unknown adjust_lr='fan_in'; known: 'spectral_norm'"),
    ],
)
def test_dion_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        dion.Muon([Parameter(torch.ones(3, 3))], **options)


@pytest.mark.parametrize("package", ["dion", "normuon"])
def test_states_with_rows_of_other_packages_are_loaded(package):
    """Three steps by the authors' code and three by ours end where six of theirs do."""
    params = parameters(torch.float32, MATRICES)
    other, states = twins(params), {name: {} for name in MATRICES}
    update = {"dion": lambda *a: by_dion(*a, rows=True), "normuon": by_normuon}[package]
    group = {"lr": LR, "weight_decay": DECAY, "params": [0, 1, 2]}
    names = ("momentum", "variance_neuron")
    if package == "dion":
        group.update(mu=0.95, muon_beta2=0.95, beta1=0.9, beta2=0.95, cautious_wd=False, step=3)
        group.update(algorithm="normuon", epsilon=1e-8, nesterov=False, flatten=False)
        group.update(adjust_lr="spectral_norm")
        opt = dion.NorMuon(params.values(), lr=0.5)
    else:
        group.update(momentum=0.95, beta2=0.95)
        names = ("momentum_buffer", "second_momentum_buffer")
        opt = halfstep.Muon(params.values(), lr=0.5, normalize_rows="keep-norm")
    for step in range(6):
        set_gradients(other, step)
        with torch.no_grad():
            for name, p in other.items():
                p.copy_(update(p, p.grad, states[name]))
        if step == 2:
            kept = [dict(zip(names, states[name].values())) for name in MATRICES]
            opt.load_state_dict({"state": dict(enumerate(kept)), "param_groups": [group]})
            with torch.no_grad():
                for name, p in params.items():
                    p.copy_(other[name])
    assert opt.param_groups[0]["lr"] == LR
    run(opt, params, 3, 6)
    close(params, other)


if __name__ == "__main__":
    print(
        f"| {STEPS} steps of 16 x 40, 40 x 16 and 24 x 24 in fp32 | largest difference |\n|---|---|"
    )
    for name in AUTHORS:
        print(f"| {name} | {largest_difference(name):.1e} |")
