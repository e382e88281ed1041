"""Tests the one call that checks if all tensors of a step are unchanged. A step without it must
give the same results."""

import pytest
import torch

import halfstep
from halfstep._step import guards


def parameters(n=5, dtype=torch.float32):
    torch.manual_seed(1)
    found = [torch.nn.Parameter(torch.randn(4, 8).to(dtype)) for _ in range(n)]
    give(found)
    return found


def give(params, seed=2):
    torch.manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape).to(p.dtype)


def plain(opt):
    return opt._parts.cache.engine.plain


def test_guards_work_with_this_torch():
    assert guards._works()
    with torch.no_grad():
        check = guards.guard([torch.zeros(3, 2), torch.zeros(5)])
        assert check(torch.ones(3, 2), torch.ones(5))
        for other in (
            torch.zeros(2, 3),
            torch.zeros(3, 2).double(),
            torch.zeros(2, 3).T,
            torch.zeros(3, 2, 1),
        ):
            assert not check(other, torch.ones(5))


def test_a_torch_without_them_compares_attributes(monkeypatch):
    results = []
    for there in (True, False):
        if not there:
            monkeypatch.setattr(guards, "_Guards", None)
            monkeypatch.setattr(guards, "_checked", None)
        params = parameters()
        opt = halfstep.AdamW(params, lr=0.01, seed=3)
        for seed in range(4):
            give(params, seed)
            opt.step()
        assert bool(plain(opt).guards) == there
        results.append([p.detach().clone() for p in params])
    assert all(map(torch.equal, *results))


def test_one_that_is_wrong_is_not_relied_on(monkeypatch):
    class Blind:
        def __init__(self, *tensors, **_):
            self.check = lambda *given: True

    monkeypatch.setattr(guards, "_Guards", Blind)
    monkeypatch.setattr(guards, "_checked", None)
    assert guards.guard([torch.zeros(2)]) is None
    assert guards.guard([torch.zeros(2)]) is None


@pytest.mark.parametrize(
    "change", ["shape", "strides", "gradient strides", "gradient missing", "moved"]
)
def test_what_changes_is_seen(change):
    """Makes changes between steps that find everything unchanged. The other optimizer is new at
    every step, so it has no guards."""
    params, others = parameters(), parameters()
    opt, other = halfstep.AdamW(params, lr=0.01, seed=3), halfstep.AdamW(others, lr=0.01, seed=3)

    def both(change=None):
        for one in (params, others):
            p = one[2]
            if change == "strides":
                p.data = p.data.T.contiguous().T
            elif change == "gradient strides":
                p.grad = p.grad.T.contiguous().T
            elif change == "gradient missing":
                p.grad = None
            elif change == "moved":
                p.data = p.data.clone()
        opt.step()
        other._parts.cache.drop()
        other.step()
        assert all(map(torch.equal, params, others))

    for seed in range(3):
        give(params, seed), give(others, seed)
        both()
    assert plain(opt).guards
    if change == "shape":
        params[2].data = params[2].data.reshape(8, 4)
        params[2].grad = params[2].grad.reshape(8, 4)
        with pytest.raises(ValueError, match="was torch.float32 of shape"):
            opt.step()
        return
    give(params, 9), give(others, 9)
    both(change)
    for seed in range(2):
        give(params, seed), give(others, seed)
        both()


def test_gradients_that_keep_changing_end_the_guards():
    """Strides of a dimension of one element mean nothing, so that such gradients are as plain as
    before."""
    p = torch.nn.Parameter(torch.zeros(1, 8))
    opt = halfstep.AdamW([p], lr=0.01)
    kinds = torch.ones(1, 8), torch.ones(8, 1).T
    assert kinds[0].stride() != kinds[1].stride() and kinds[1].is_contiguous()
    for i in range(20):
        p.grad = kinds[i % 2].clone(memory_format=torch.preserve_format)
        opt.step()
    assert plain(opt).guards is None and plain(opt).guarded > 4
    assert int(opt.state[p]["step"]) == 20
