"""Tests where random bits come from: names, else positions, and a seed that torch.manual_seed()
sets."""

import copy

import numpy
import pytest
import torch
from conftest import (
    COPIES,
    bits,
    class_of,
    everything,
    parameters,
    randn,
    rules,
    run,
    saved,
    twins,
)
from torch.nn import Parameter

import halfstep
from halfstep import EMA, GradientAccumulator
from halfstep.compat import optimi

#: what an optimizer that is given no seed uses under torch.distributed
FIXED = 0


def train(rule="adamw", before=0, manual_seed=5, **options):
    """Trains parameters without names, after `before` other optimizers."""
    torch.manual_seed(manual_seed)
    params = parameters(torch.bfloat16)
    for _ in range(before):
        class_of(rule)(list(twins(params).values()), seed=1)
    opt = class_of(rule)(params.values(), lr=0.02, states="int4", **options)
    run(opt, params, 0, 3)
    return everything(opt, params)


# ---- Optimizers ----------------------------------------------------------------------------------


@rules
@pytest.mark.told("muon: momentum_buffer in int4", rule="muon")
def test_the_same_unnamed_training_twice_in_a_process(rule):
    first = train(rule)
    assert train(rule) == first
    assert train(rule, manual_seed=6)[0] != first[0]


def test_optimizers_built_before_change_nothing():
    """Ids are positions, and nothing counts optimizers. So a rank that has built others has the
    same bits."""
    assert train(before=3, seed=9) == train(before=0, seed=9)
    assert train(before=3) == train(
        before=0
    )  # the others' seeds were given, so nothing was drawn for them


def test_positions_go_over_all_groups():
    found = []
    for split in (1, 3):
        params = parameters(torch.bfloat16)
        ps = list(params.values())
        opt = halfstep.AdamW([{"params": ps[:split]}, {"params": ps[split:]}], lr=0.02, seed=3)
        run(opt, params, 0, 2)
        found.append([bits(p) for p in ps])
    assert found[0] == found[1]


NO_SEEDS = ("1", "x", 1.5, 1.0, True, b"1", [1], torch.tensor(1.5), 2**64, -(2**63) - 1)


@pytest.mark.parametrize("seed", NO_SEEDS, ids=str)
def test_what_is_no_whole_number_is_no_seed(seed):
    p, model = Parameter(torch.ones(4)), torch.nn.Linear(2, 2)
    sums = GradientAccumulator([p], seed=5)
    held = {**sums.state_dict(), "seed": seed}
    for make in (
        lambda: halfstep.AdamW([p], seed=seed),
        lambda: halfstep.optimizer("lion/f32", [p], seed=seed),
        lambda: EMA(model, seed=seed),
        lambda: GradientAccumulator([p], seed=seed),
        lambda: sums.load_state_dict(held),
    ):
        with pytest.raises(ValueError, match="the seed.* must be a whole number"):
            make()
    assert sums.seed == 5


@pytest.mark.parametrize("seed", [numpy.int64(7), numpy.uint64(7), torch.tensor(7)], ids=repr)
def test_whole_numbers_of_other_classes_are_seeds(seed):
    opt = halfstep.AdamW([Parameter(torch.ones(4))], seed=seed)
    assert type(opt.seed) is int and opt.seed == 7


@pytest.mark.parametrize("writes", ["1", 1.5, True, -1, 2**63, None])
def test_what_is_no_count_is_no_count_of_writes(writes):
    sums = GradientAccumulator({"p": Parameter(torch.ones(4))}.items(), seed=5)
    before = sums.state_dict()
    with pytest.raises(ValueError, match="the saved writes of 'p' are"):
        sums.load_state_dict({**before, "seed": 6, "writes": {"p": writes}})
    assert sums.state_dict() == before


def test_a_seed_that_is_given_draws_nothing():
    p, model = Parameter(torch.ones(4)), torch.nn.Linear(2, 2)
    for make in (
        lambda: halfstep.AdamW([p], seed=5),
        lambda: halfstep.optimizer("lion/f32", [p], seed=5),
        lambda: EMA(model, seed=5),
        lambda: GradientAccumulator([p], seed=5),
    ):
        before = torch.get_rng_state()
        make()
        assert torch.equal(torch.get_rng_state(), before)
    assert halfstep.AdamW([p], seed=5).seed == 5


def test_no_seed_draws_one_number_at_construction():
    torch.manual_seed(1)
    p = Parameter(torch.ones(4))
    opt = halfstep.AdamW([p])
    after = torch.get_rng_state()
    torch.manual_seed(1)
    torch.randint(2**63 - 1, ())
    assert torch.equal(torch.get_rng_state(), after)
    seed = opt.seed
    assert 0 <= seed < 2**63 and halfstep.AdamW([p]).seed != seed
    with torch.device("meta"):
        assert 0 <= halfstep.AdamW([p]).seed < 2**63
    # Groups that come later, copies and files keep it, and nothing is drawn for them.
    before = torch.get_rng_state()
    opt.add_param_group({"params": [Parameter(torch.ones(2))], "seed": None})
    assert [g["seed"] for g in opt.param_groups] == [seed, seed]
    copies = [copied(opt) for copied in COPIES.values()]
    groups = [{"params": [Parameter(torch.ones(n))]} for n in (4, 2)]
    fresh = halfstep.AdamW(groups, seed=3)
    fresh.load_state_dict(saved(opt.state_dict()))
    assert [o.seed for o in (*copies, fresh)] == [seed] * 3
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 1, -1])
def test_an_explicit_seed_is_kept(seed):
    p = Parameter(torch.ones(8, 64, dtype=torch.bfloat16))
    opt = halfstep.AdamW([p], seed=seed)
    p.grad = torch.ones_like(p)
    opt.step()
    assert opt.seed == seed and saved(opt.state_dict())["param_groups"][0]["seed"] == seed


def test_a_compiled_copy_is_found_under_its_own_number():
    """The operator of compile=True finds optimizers by a number, which a copy must not share."""
    params = parameters(torch.bfloat16, {"a": (8, 64)})
    opt = halfstep.AdamW(params.items(), compile=True, seed=0)
    before, ends = bits(params["a"]), set()
    for copied in COPIES.values():
        others, other = copied((params, opt))
        run(other, others, 0, 1)
        assert bits(params["a"]) == before and not opt.state and bits(others["a"]) != before
        ends.add(bits(others["a"]))
    assert len(ends) == 1


# ---- Averages and accumulators -------------------------------------------------------------------


def average(manual_seed, **options):
    model = torch.nn.Linear(64, 64).bfloat16()
    with torch.no_grad():
        model.weight.copy_(torch.linspace(1, 2, 64 * 64).view(64, 64))
    torch.manual_seed(manual_seed)
    ema = EMA(model, 0.9, **options)
    ema.update_parameters(model)
    with torch.no_grad():
        model.weight.mul_(1.01)
    ema.update_parameters(model)
    return bits(ema.module.weight)


def test_averages_follow_torchs_seed():
    assert average(1) == average(1) != average(2)
    assert average(1, seed=4) == average(2, seed=4)


def sums(manual_seed, before=0, **options):
    torch.manual_seed(manual_seed)
    for _ in range(before):
        GradientAccumulator([Parameter(torch.zeros(1))], seed=1)
    ps = [Parameter(torch.zeros(64, 64, dtype=torch.bfloat16)) for _ in range(2)]
    with GradientAccumulator(ps, **options):
        for value in [1.0] + [2.0**-10] * 20:
            sum((p * value).sum() for p in ps).backward()
    return [bits(p.grad) for p in ps]


def test_accumulators_follow_torchs_seed():
    assert sums(1) == sums(1) == sums(1, before=2)
    assert sums(1)[0] != sums(1)[1] and sums(1)[0] != sums(2)[0]
    assert sums(1, seed=4) == sums(2, seed=4)


def test_sums_without_a_generator_are_refused():
    """Other random bits would follow from another one."""
    sums = GradientAccumulator([("p", Parameter(torch.zeros(4)))], seed=1)
    file, pickled = sums.state_dict(), sums.__getstate__()
    del file["generator"], pickled["generator"]
    for load, held in ((sums.load_state_dict, file), (sums.__setstate__, pickled)):
        with pytest.raises(ValueError, match="generator=None of the saved sums"):
            load(held)


def functional(manual_seed):
    torch.manual_seed(manual_seed)
    params = [torch.ones(64, 64, dtype=torch.bfloat16) for _ in range(2)]
    grads = [torch.full_like(p, 0.5) for p in params]
    averages, squares = ([torch.zeros_like(p) for p in params] for _ in range(2))
    for step in range(1, 4):
        optimi.adam(
            params,
            grads,
            averages,
            squares,
            [None] * 2,
            lr=1e-4,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.0,
            eps=1e-6,
            step=torch.tensor(step),
            decouple_wd=False,
        )
    return [bits(t) for t in (*params, *averages, *squares)]


def test_functional_steps_follow_torchs_seed():
    """optimi's functions on lists: the second training of a process has the bits of the first."""
    first = functional(1)
    assert functional(1) == first != functional(2)


# ---- Ranks ---------------------------------------------------------------------------------------


def unseeded(rank, size):
    torch.manual_seed(100 + rank)  # ranks need not agree
    params = parameters(torch.bfloat16)
    for _ in range(3 * rank):
        halfstep.AdamW(list(twins(params).values()))
    opt = halfstep.AdamW(params.values(), lr=0.02, states="int4")
    before = torch.get_rng_state()
    average = halfstep.EMA(torch.nn.ParameterList(params.values()), 0.9)
    accumulator = halfstep.GradientAccumulator(params.values())
    assert torch.equal(torch.get_rng_state(), before)
    seeds = [opt.seed, int(average.random[0]), accumulator.seed]
    run(opt, params, 0, 3)
    average.update_parameters(torch.nn.ParameterList(params.values()))
    return everything(opt, params)[0], seeds


def test_ranks_with_other_numbers_of_optimizers_hold_the_same_bits(pool):
    """Two processes have equal gradients as after an all-reduce, no given seed, and different seeds
    of torch."""
    (first, seeds), (second, others) = pool.run(2, unseeded)
    assert first == second
    assert seeds == others == [FIXED] * 3
    assert train(seed=FIXED)[0] == first


def test_under_an_initialized_process_group_the_seed_is_fixed(monkeypatch):
    """The seed is neither drawn nor communicated, because every rank can know it by itself."""
    p = Parameter(torch.ones(4))
    before = torch.get_rng_state()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert halfstep.AdamW([p]).seed == FIXED and halfstep.AdamW([p], seed=12).seed == 12
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert halfstep.AdamW([p]).seed != FIXED


def test_a_loaded_state_goes_on_with_its_generator():
    """As with the seed: what the bits depend on comes from what is loaded."""

    def fresh(**options):
        p = Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        return p, halfstep.AdamW([("p", p)], lr=0.01, states="bf16-sr", seed=1, **options)

    def goes_on(p, opt):
        for step in range(3):
            p.grad = randn(p.shape, step).bfloat16()
            opt.step()
        return p.detach().view(torch.int16).tolist()

    ends = {}
    for generator in halfstep._library.abi.choices("generator"):
        p, opt = fresh(generator=generator)
        goes_on(p, opt)
        saved, weight, before = copy.deepcopy(opt.state_dict()), p.detach().clone(), fresh()
        assert opt.generator == saved["param_groups"][0]["generator"] == generator
        for q, other in (before, copy.deepcopy(before)):
            with torch.no_grad():
                q.copy_(weight)
            other.load_state_dict(saved)
            assert other.generator == generator
            ends.setdefault(generator, goes_on(q, other))
        assert goes_on(p, opt) == ends[generator]
    assert len({str(end) for end in ends.values()}) == len(ends)
    with pytest.raises(ValueError, match="dice"):
        fresh()[1].load_state_dict(
            {**saved, "param_groups": [{**saved["param_groups"][0], "generator": "dice"}]}
        )
