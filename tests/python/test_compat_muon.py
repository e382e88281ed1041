"""Tests the interface of Keller Jordan's Muon against its equations, which are written out here:
the package is on no index."""

import pytest
import torch
from conftest import parameters, run, set_gradients, twins, weights_of
from torch.nn import Parameter

import halfstep
from halfstep.compat import muon

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
