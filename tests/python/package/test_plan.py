"""Tests that halfstep.plan's forecast is, to the byte, what an optimizer then holds."""

import ctypes
import gc
import itertools
import re
import warnings
import xml.etree.ElementTree

import pytest
import torch
from conftest import RULES, SHAPES, class_of, streams
from test_cuda import fake, gpu  # noqa: F401
from torch import nn

import halfstep
from halfstep import __main__ as program
from halfstep._library import abi
from halfstep._tensors.torch_public import warn_once
from halfstep.plan import Plan, plan

BLOCKS = {
    "table": (300, 257),
    "up": (96, 128),
    "short": (40, 20),
    "kernel": (16, 8, 3, 3),
    "bias": (5000,),
    "scale": (),
}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def states_for(rule):
    """Yields the formats that every state of the rule can take; None is the default."""
    for states in (None, "f32", "bf16-sr", "int8", "int6", "int4", "fp8", "dyn8"):
        try:
            abi.recipe_full("/".join(part for part in (rule, "f32", states) if part))
        except ValueError:
            continue
        yield states


def optimizer_of(recipe, shapes):
    rule, weights, *states = recipe.split("/")
    dtype = DTYPES[abi.formats[weights].code_dtype]
    params = {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}
    options = {"weights": weights} if dtype != torch.float32 else {}
    return class_of(rule)(params.items(), states=states[0] if states else None, **options), params


@pytest.mark.parametrize("recipe", ["ema", "ema/bf16"])
def test_what_trains_nothing_is_refused(recipe, capsys):
    for recipes in (recipe, ["adamw/f32", recipe]):
        with pytest.raises(ValueError, match="'ema' is not an optimizer, it averages weights"):
            plan({"weight": (64, 64)}, recipes)
    assert program.main(["plan", "7B", "--recipes", recipe]) != 0
    captured = capsys.readouterr()
    told = "'ema' is not an optimizer, it averages weights; use halfstep.EMA"
    assert captured.err == f"python -m halfstep plan: {told}\n"
    assert not captured.out


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.told("muon: momentum_buffer in", rule="muon")
def test_equal_to_what_an_optimizer_holds(rule):
    for shapes, weights, states in itertools.product(
        (SHAPES, BLOCKS), ("f32", "bf16-sr", "bf16-ecc8", "f16-kahan"), states_for(rule)
    ):
        recipe = "/".join(part for part in (rule, weights, states) if part)
        opt, params = optimizer_of(recipe, shapes)
        for p in params.values():
            p.grad = torch.randn_like(p)
        opt.step()
        (row,) = plan(shapes, recipe).rows
        for part, size in opt.memory().items():
            assert getattr(row, part) == size, (recipe, part)
        held = {key: 0 for key in ("extra", "state")}
        for p in params.values():
            for key, value in streams(opt, p).items():
                held["extra" if key == "weight.extra" else "state"] += (
                    value.numel() * value.element_size()
                )
        assert (row.extras, row.states) == (held["extra"], held["state"]), recipe
        assert row.weights == sum(p.numel() * p.element_size() for p in params.values())
        assert row.gradients == sum(p.grad.numel() * p.grad.element_size() for p in params.values())
        assert row.total == row.weights + row.extras + row.gradients + row.states
        assert row.recipe == abi.recipe_full(recipe)


def test_adafactor_without_a_first_moment_adds_two_vectors():
    """docs/choosing.md: 4 bytes a parameter, gradients included."""
    (row,) = plan({"weight": (4096, 4096)}, "adafactor/bf16-sr").rows
    assert row.states == 4 * (4096 + 4096) and row.extras == 0
    assert row.total == 4 * 4096 * 4096 + row.states


def test_the_readme_s_table():
    rows = plan({"weight": (4096, 4096)}).rows
    found = {row.recipe: row.total / 4096**2 for row in rows}
    assert found == {
        "adamw/bf16-sr/int4": 5.125,
        "adamw/bf16-sr/int8": 6.125,
        "adamw/bf16-ecc8/int8": 7.125,
        "adamw/bf16-kahan/bf16-sr": 10.0,
        "adamw/f32/f32": 16.0,
    }
    assert [row.total for row in rows] == sorted(found[row.recipe] * 4096**2 for row in rows)


def net():
    return nn.Sequential(
        nn.Embedding(1000, 64), nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 1000)
    )


def test_modules_shapes_and_pairs_agree():
    with torch.device("meta"):
        model = net()
    wanted = plan(model).rows
    for given in (
        net(),
        {name: tuple(p.shape) for name, p in model.named_parameters()},
        [(name, list(p.shape)) for name, p in model.named_parameters()],
        model.named_parameters(),
        dict(model.named_parameters()),
        model.state_dict(),
    ):
        assert plan(given).rows == wanted
    assert plan([("bias", 7)], "adamw/f32").rows[0].total == 7 * 16
    assert plan({}).rows[0].total == 0
    model[3].weight = nn.Parameter(torch.empty(1000, 256, device="meta"))
    tied = nn.Sequential(nn.Embedding(1000, 256), nn.Linear(256, 1000, bias=False))
    tied[1].weight = tied[0].weight
    assert plan(tied).rows == plan({"weight": (1000, 256)}).rows


def test_the_dtype_of_the_model_does_not_matter():
    assert plan(net()).rows == plan(net().bfloat16()).rows


def test_what_cannot_be_released_is_not_planned_so():
    with pytest.raises(ValueError, match="Prodigy has no gradient release"):
        plan(net(), "prodigy/bf16-sr", release=True)
    ways = [row.way for row in plan(net(), "prodigy/bf16-sr", device_memory="1G").rows]
    assert len(ways) == 4 and not any("release" in way for way in ways)


def test_release_keeps_the_largest_gradient():
    whole, released = plan(net()).rows, plan(net(), release=True).rows
    for row in released:
        (same,) = (other for other in whole if other.recipe == row.recipe)
        width = 4 if row.recipe == "adamw/f32/f32" else 2
        assert (
            row.gradients == 256 * 1000 * width
            and row.total == same.total - same.gradients + row.gradients
        )


def test_frozen_parameters_count_as_they_are():
    model = net().bfloat16()
    model[0].weight.requires_grad_(False)
    frozen = plan(model, "adamw/f32")
    rest = plan(
        {name: p.shape for name, p in model.named_parameters() if p.requires_grad}, "adamw/f32"
    )
    assert (
        frozen.rows[0].frozen == 64000 * 2 and frozen.rows[0].total == rest.rows[0].total + 128000
    )
    assert frozen.rows[0].states == rest.rows[0].states and frozen.parameters == rest.parameters
    assert "frozen" in str(frozen) and "frozen" not in str(rest)


@pytest.mark.parametrize(
    "memory, n",
    [
        (14 * 2**20, 14 * 2**20),
        ("14M", 14 * 2**20),
        ("14 MiB", 14 * 2**20),
        ("1.5G", 3 * 2**29),
        (24e9, 24 * 10**9),
        ("1000", 1000),
        ("2kb", 2048),
    ],
)
def test_memory(memory, n):
    answer = plan(net(), memory=memory)
    assert answer.memory == n
    assert [row.fits for row in answer.rows] == [row.total <= n for row in answer.rows]
    assert f"{sum(row.fits for row in answer.rows)} of 5 recipes fit into" in str(answer)


def test_text():
    answer = plan(
        {"a": (1024, 1024), "b": (1024,)}, ["adamw/f32", "lion/bf16-kahan/int8"], memory=2**20
    )
    assert isinstance(answer, Plan) and repr(answer) == str(answer)
    lines = str(answer).splitlines()
    assert lines[0] == "1049600 parameters. Bytes per parameter:"
    for line, words in (
        (2, "recipe weights extra gradients states total in all fits"),
        (3, "lion/bf16-kahan/int8 2.000 2.000 2.000 bf16 1.063 7.063 7.07 MiB no"),
        (4, "adamw/f32/f32 4.000 0.000 4.000 f32 8.000 16.000 16.02 MiB no"),
    ):
        assert lines[line].split() == words.split()
    assert (
        "0 of 2 recipes fit into 1.00 MiB. The smallest lacks 6.07 MiB; release=True may help."
        in lines
    )
    html = answer._repr_html_()
    assert html.count("<tr>") == 3 and html.count("<td>") == 16 and "lion/bf16-kahan/int8" in html
    assert "<b>" not in plan({"<b>": (1,)}, release=True)._repr_html_() and "released" in str(
        plan({}, release=True)
    )


@pytest.mark.parametrize(
    "arguments, text",
    [
        (({"a": (2, 2)}, "adamw/bf17"), "bf17"),
        (({"a": (2, 2)}, ["adam", "nothing"]), "nothing"),
        (({"a": (2, -2)},), "'a'"),
        (({"a": (2.5,)},), "'a'"),
        (({"a": (2,)}, None, False, "much"), "much"),
    ],
)
def test_errors(arguments, text):
    with pytest.raises(ValueError, match=text):
        plan(*arguments)


def test_in_the_package():
    assert halfstep.plan is plan


def test_bars_are_as_long_as_what_they_stand_for():
    answer = plan(
        {"a": (1024, 1024)},
        ["adamw/f32", "adamw/bf16-kahan/bf16-sr", "adamw/bf16-sr/int4"],
        memory="8M",
    )
    bars = [line for line in str(answer).splitlines() if "█" in line][:3]
    assert [sum(bar.count(sign) for sign in "█▓▒░") for bar in bars] == [
        round(48 * row.total / answer.rows[-1].total) for row in answer.rows
    ]
    whole = bars[-1][bars[-1].index("█") :]
    assert [whole.count(sign) for sign in "█▒░"] == [12, 12, 24] and whole.index("|") == 24
    assert all(bar.index("|") == bars[-1].index("|") for bar in bars)
    assert "█ weights   ▓ extras   ▒ gradients   ░ states   | 8.00 MiB" in str(answer)
    assert "|" not in str(plan({"a": (1024, 1024)}))
    picture = answer._repr_html_()
    widths = [
        float(w)
        for w in re.findall(r'<rect [^>]*width="([\d.]+)" height="16" fill="#1f4e79"', picture)
    ]
    assert widths[2] == pytest.approx(2 * widths[0], abs=0.2) and picture.count("<line") == 1
    xml.etree.ElementTree.fromstring(picture[picture.index("<svg") : picture.index("</svg>") + 6])


def test_nothing_to_draw():
    assert "█" not in str(plan({}))


def test_where_states_are():
    """The formulas of docs/guides/offload.md, by hand."""
    shapes = {f"m{i}": (1 << 15, 1 << 12) for i in range(8)}
    n = 8 << 27
    speeds = {"bus": 50e9, "host": 100e9, "device": 1e12}
    rows = plan(shapes, "adamw/bf16-sr/int8", device_memory="5G", **speeds).rows
    every = {row.way: row for row in rows}
    (one,) = plan(shapes, "adamw/bf16-sr/int8").rows
    states, largest = one.states, one.states // 8
    touched = 2 * 2 * n + 2 * n + 2 * states
    assert {way: (row.total, row.host) for way, row in every.items()} == {
        "GPU": (4 * n + states, 0),
        "StateStreaming": (4 * n + 3 * largest, states),
        "CPUOffload": (4 * n, 4 * n + states),
        "CPUOffload, offload_gradients": (2 * n + n // 4, 4 * n + states),
        "GPU, gradient_release": (2 * n + n // 4 + states, 0),
        "StateStreaming, gradient_release": (2 * n + n // 4 + 3 * largest, states),
        "CPUOffload, gradient_release": (2 * n + n // 4, 4 * n + states),
    }
    for way, seconds in (
        ("GPU", touched / 1e12),
        ("StateStreaming", states / 50e9),
        ("CPUOffload", touched / 100e9 + 2 * n / 50e9),
        ("CPUOffload, gradient_release", max(touched / 100e9, 4 * n / 50e9)),
    ):
        assert every[way].seconds == seconds, way
    assert every["CPUOffload, gradient_release"].hidden and not every["CPUOffload"].hidden
    # The order is: the quickest that fits and loses nothing, then the one that judges tensors
    # singly, then the smallest.
    for memory, way, fits in (
        ("9G", "GPU", True),
        ("5G", "StateStreaming", True),
        ("4G", "CPUOffload", True),
        ("3G", "CPUOffload, offload_gradients", True),
        ("2G", "CPUOffload, gradient_release", False),
    ):
        (found,) = plan(shapes, ["adamw/bf16-sr/int8"], device_memory=memory).rows
        assert (found.way, found.fits) == (way, fits), memory
    text = str(plan(shapes, device_memory="5G"))
    assert "StateStreaming" in text and "5.00 GiB on the GPU" in text and "<=" in text


def test_a_file_of_states():
    """Pages of a matrix's pieces by hand: of 1927, 1927 and 242 rows, which have 8704 bytes of
    states and 8192 of weights each. The vector takes one page."""
    shapes = {"a": (4096, 4096), "b": (4096, 4096), "v": (100,)}
    alone = halfstep.Store("run.states", weights=False)
    for store, pages in ((True, 7949 + 7949 + 999), (alone, 4095 + 4095 + 515)):
        (row,) = plan(shapes, "adamw/bf16-sr/int8", store=store).rows
        assert row.disk == 2 * 4096 * (2 * pages + 1)
        assert row.states == 3 * (4096 * 7949 if store is True else 16 << 20)
        assert row.read == 2 * 4096 * 8704 + 2 * 256  # streams are padded to 64 bytes
        assert row.written == row.read + (2 * 4096 * 8192 + 200 if store is True else 0)
        assert row.total == row.weights + row.gradients + row.states
    (row,) = plan(shapes, "prodigy/bf16-sr/int8", store=True).rows
    assert row.read == 2 * (row.written - row.weights)


def test_matrices_with_products_are_streamed():
    """CPUOffload steps Muon's matrices on the GPU, where their gradients stay."""
    shapes = {f"m{i}": (1 << 15, 1 << 12) for i in range(8)}
    recipe = "muon/bf16-sr/int8"
    ways = {row.way: row for row in plan(shapes, recipe, device_memory="5G").rows}
    assert not any("CPUOffload" in way for way in ways)
    (plain,) = plan(shapes, recipe).rows
    for offload in (True, "gradients"):
        (row,) = plan(shapes, recipe, offload=offload).rows
        assert row.total == ways["StateStreaming"].total
        assert (row.gradients, row.host) == (plain.gradients, plain.states)
        assert row.copied == 2 * plain.states
    (row,) = plan(shapes, recipe, offload=True, release=True).rows
    assert row.total == ways["StateStreaming, gradient_release"].total
    assert "StateStreaming" in plan(shapes, "lion", device_memory="5G")._repr_html_()
    # A GPU without kernels steps nothing, so that these, too, are stepped by the processor.
    (row,) = plan(shapes, recipe, kernels=False).rows
    assert (row.host, row.copied) == (plain.states + row.copied, plain.weights + plain.gradients)
    assert (row.total, row.states) == (row.copied, 0)
    found = plan(shapes, recipe, device_memory="5G", kernels=False)
    assert all(row.way.startswith("CPUOffload") for row in found.rows)
    assert "leave out the products of muon" in str(found)
    for options, said in (
        ({"release": True}, "device_memory="),
        ({"offload": True}, "device_memory="),
        ({"memory": "1G"}, "device_memory="),
        ({"bus": 0}, "bus="),
        ({"host": "fast"}, "host="),
        ({"device": True}, "device="),
    ):
        with pytest.raises(ValueError, match=said):
            plan(shapes, device_memory="5G", **options)


def test_a_format_too_coarse_for_a_rule_is_said():
    """By the plan, by repr(), and by one warning."""
    coarse = "muon: momentum_buffer in int4 ends "
    text = str(plan({"weight": (64, 64)}, ["muon/bf16-sr/int4", "muon/f32/int4", "muon/f32/int8"]))
    assert text.count(coarse) == 1
    assert coarse not in str(plan({"weight": (64, 64)}, ["muon/f32/int8", "adamw/f32/int4"]))
    warn_once.cache_clear()

    def muon(states):
        return halfstep.Muon([nn.Parameter(torch.randn(64, 64))], lr=0.1, states=states)

    with pytest.warns(UserWarning, match=coarse) as given:
        opt = muon("int4")
    assert len(given) == 1 and given[0].filename == __file__ and coarse in repr(opt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert coarse not in repr(muon("int8"))
        muon("int4")


def status(key):
    """Returns a size from /proc/self/status in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


#: how an optimizer is made -> its class, options, and what plan() calls it
HELD = {
    "int8": (halfstep.AdamW, {"states": "int8"}, {}),
    "int4": (halfstep.AdamW, {"states": "int4"}, {}),
    "CPUOffload": (halfstep.CPUOffload, {"states": "int8"}, {"offload": True}),
    "store": (halfstep.AdamW, {"states": "int8", "store": True}, {"store": True}),
    "overlap": (
        halfstep.CPUOffload,
        {"states": "int8", "overlap": True},
        {"offload": True, "overlap": True},
    ),
}


@pytest.mark.all
def test_growth_of_the_peak(fake, tmp_path):
    """What a process has more at its peak than one without optimizer is what plan() says, within
    5 %, for 268 million parameters."""
    params = {f"m{i}": nn.Parameter(torch.ones(8192, 4096, dtype=torch.bfloat16)) for i in range(8)}
    for p in params.values():
        p.grad = torch.ones_like(p)
    small = nn.Parameter(torch.ones(64, 64))
    small.grad = torch.ones_like(small)
    halfstep.AdamW([small]).step()  # imports what any optimizer of torch imports
    for name, (cls, options, where) in HELD.items():
        if "store" in where:
            options = {**options, "store": str(tmp_path / "states")}
        lent = [(t.data_ptr(), t.numel() * 2, 0) for p in params.values() for t in (p, p.grad)]
        if "offload" in where:  # these tensors count as memory of the GPU
            fake.blocks += lent
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory that earlier tests freed would hide the growth
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # the peak so far is forgotten
        before = status("VmRSS")
        opt = cls(params.items(), threads=2, **options)
        for _ in range(2 if "overlap" in where else 1):  # the first has no results in advance
            for p in params.values():
                for hook in (p._post_accumulate_grad_hooks or {}).values():
                    hook(p)
            opt.step()
            fake.synchronize()
        grown = status("VmHWM") - before
        del opt
        (row,) = halfstep.plan(params, f"adamw/bf16-sr/{options['states']}", **where).rows
        planned = row.host or row.states + row.extras
        assert abs(grown / planned - 1) < 0.05, (name, grown, planned)
        fake.blocks = [block for block in fake.blocks if block not in lent]
        fake.close()
