"""Runs bench/peers.py, bench/traps.py and bench/offload.py on sizes that take seconds. Their output
must be measured, and must leave out nobody."""

import csv
import json
import math
import os
import subprocess
import sys

import pytest
import torch

from halfstep._library import abi

BENCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "bench")
sys.path.insert(0, BENCH)
import gpu  # noqa: E402
import peers  # noqa: E402
import peers_common as common  # noqa: E402
import traps  # noqa: E402

pytestmark = pytest.mark.all
PEERS = (
    "optimi",
    "torchao",
    "heavyball",
    "torchastic",
    "adamw_bf16",
    "deepspeed",
    "bitsandbytes",
    "flashoptim",
)


def run(line, *arguments, missing=(), status=0):
    """Runs a script, given in one line with arguments, in a process in which some packages cannot
    be imported. Returns its output."""
    script, *words = *line.split(), *arguments
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({tuple(missing)!r})); sys.argv ="
        f" {[script, *words]!r}; runpy.run_path({os.path.join(BENCH, script)!r},"
        " run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == status, done.stderr[-2000:]
    return done.stdout + (done.stderr if status else "")


def table(text, header):
    """Returns the cells of the rows of tables, without the rows that have a word of the header."""
    return [
        line.strip("| ").split(" | ")
        for line in text.splitlines()
        if line.startswith("| ") and header not in line
    ]


def contestant(name, make, package="torch"):
    return common.Contestant(name, name, package, "f32", make)


# ---- Without peers -------------------------------------------------------------------------------


def test_everybody_is_listed_where_no_peer_is_installed():
    printed = run("peers.py --list", missing=("torch", *PEERS))
    keys = [line.split()[0] for line in printed.splitlines()]
    assert len(keys) == len(set(keys)) == len(peers.contestants())
    for package in (
        "optimi",
        "torchao-8bit",
        "heavyball",
        "deepspeed-bf16",
        "bitsandbytes",
        "adamw/bf16-sr/int4:finite",
    ):
        assert package in keys


@pytest.mark.parametrize("script", ["peers.py", "traps.py", "gpu.py"])
def test_without_torch_they_say_so(script):
    assert f"{script}: needs torch" in run(script, missing=("torch",), status=1)


@pytest.mark.parametrize("script", ["peers.py", "traps.py", "gpu.py"])
def test_nobody_matches(script):
    assert "no contestant matches 'nobody'" in run(script, "--only", "nobody", status=2)


def test_selection():
    keys = [c.key for c in common.select(peers.contestants(), "^torch$,adamw/bf16-sr/int4,kahan")]
    assert keys == [
        "adamw/bf16-kahan/bf16-sr",
        "adamw/bf16-kahan/bf16-sr:finite",
        "adamw/bf16-sr/int4",
        "adamw/bf16-sr/int4:finite",
        "torch",
        "optimi-kahan",
    ]


# ---- peers.py ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers")
    only = (
        "^torch$,^torch-bf16$,^optimi-kahan$,^adamw/f32/f32,^adamw/bf16-sr/int8$,^flashoptim$,"
        "^torchastic$"
    )
    text = run(
        "peers.py --elements 65536 --scale 1e-4 --tensors 20 --rounds 3 --settle 0 --threads 1"
        " --memory-elements 0 --only",
        only,
        *("--json", str(folder / "out.json"), "--csv", str(folder / "out.csv")),
        missing=("torchastic",),
    )
    found = json.loads((folder / "out.json").read_text())
    found["text"] = text
    found["csv"] = list(csv.DictReader((folder / "out.csv").open()))
    return found


RAN = {"torch", "torch-bf16", "adamw/f32/f32", "adamw/f32/f32:finite", "adamw/bf16-sr/int8"}


def test_everyone_ran_or_has_a_reason(report):
    failed = {(f["key"], f["where"]) for f in report["failures"]}
    for kind in ("one", "model", "small"):
        rows = report["results"][kind]
        assert RAN <= set(rows)
        for key in ("optimi-kahan", "flashoptim", "torchastic"):
            assert (key in rows) != ((key, kind) in failed)
    assert all(("torchastic", kind) in failed for kind in ("one", "model", "small"))
    reasons = {f["key"]: f["reason"] for f in report["failures"]}
    assert reasons["torchastic"].startswith("not installed")
    for title in (
        "torchastic AdamW, all BF16, SR",
        "One tensor",
        "Tensors of a model",
        "Small tensors",
        "One flat tensor",
        "## Aims",
        "A tensor costs",
    ):
        assert title in report["text"]
    lines = [(row["shapes"], row["key"]) for row in report["csv"]]
    assert (
        len(lines)
        == len(set(lines))
        == sum(map(len, report["results"].values())) + len(report["failures"])
    )


def test_bytes_are_those_that_are_held(report):
    one = report["results"]["one"]
    ((rows, length),) = peers.one_shape(65536)
    shape = {"ndim": 2, "rows": rows, "row_length": length}
    states = abi.forecast(("adamw/bf16-sr/int8", shape, 1)).states
    # Besides, each tensor has its counts, its id, its recipe and the grid of v: 52 bytes. torch has
    # 4 for its steps.
    n = rows * length
    for key, wanted, beside in (
        ("adamw/bf16-sr/int8", states, 56),
        ("torch", 8 * n, 4),
        ("torch-bf16", 4 * n, 4),
    ):
        assert one[key]["bytes_of_states_per_param"] * n == pytest.approx(wanted, abs=beside)
    # Ours reads gradients twice, unless told that they are finite.
    moved = [
        one[key]["bytes_moved_per_param"]
        for key in ("torch", "adamw/f32/f32", "adamw/f32/f32:finite")
    ]
    assert moved == pytest.approx([28, 32, 28], abs=0.01)


def test_figures_belong_together(report):
    for kind, rows in report["results"].items():
        params = report["shapes"][kind]["elements"]
        for row in rows.values():
            assert row["rounds"] == 3 and row["params"] == params
            assert row["ms"] > 0 and row["ns_per_param"] == pytest.approx(row["ms"] * 1e6 / params)
            assert 0 < row["of_stream"] < math.inf and 0 < row["to_torch"] < math.inf
            assert row["stream"] in common.Stream.forms
    assert (
        report["shapes"]["model"]["tensors"] == 201 and report["shapes"]["small"]["tensors"] == 20
    )
    assert report["shapes"]["flat"]["elements"] == report["shapes"]["small"]["elements"]


def test_aims_are_judged_by_what_was_measured(report):
    one = report["results"]["one"]
    by_name = {a["aim"]: a for a in report["aims"]}
    line = by_name["`adamw/bf16-sr/int8` against torch fused fp32"]
    assert line["measured"] == pytest.approx(
        one["torch"]["to_torch"] / one["adamw/bf16-sr/int8"]["to_torch"]
    )
    assert line["reached"] == (line["measured"] >= 1.0)
    cost = report["overhead"]
    assert cost["tensors"] == 20 and cost["bare_us"] > 0 and cost["torch_fused_us"] > 0
    assert not any("deepspeed" in name.lower() for name in by_name), (
        "no aim without its contestants"
    )


def test_one_that_is_too_slow_is_given_up():
    def slow(params, hyper):
        class Slow(torch.optim.SGD):
            def step(self, closure=None):
                while True:
                    pass

        return Slow(params, lr=0.1)

    options = peers.parse(["--patience", "0.2"])
    with pytest.raises(common.GaveUp, match="gave up after 0.2 s"):
        peers.measure(contestant("slow", slow), None, None, [(4, 64)], options)


def test_gradients_come_back():
    def spoiler(params, hyper):
        class Spoiler(torch.optim.SGD):
            def step(self, closure=None):
                for group in self.param_groups:
                    for p in group["params"]:
                        p.grad.zero_()
                        p.grad = None

        return Spoiler(params, lr=0.1)

    subject = common.Subject(contestant("spoiler", spoiler, "torch-optimi"), [(4, 64)])
    before = subject.params[0].grad.clone()
    assert before.abs().min() > 0
    peers.timed_step(subject)
    assert torch.equal(subject.params[0].grad, before)


@pytest.mark.parametrize("form", range(len(common.Stream.forms)))
def test_stream_touches_every_byte(form):
    stream = common.Stream(2)
    stream.set(8 * peers.MiB + 4, 3 * peers.MiB + 8)
    assert stream.written == 2 * peers.MiB + 1 and stream.only == 3 * peers.MiB // 4 + 2
    stream.form = form
    before, read = stream.changed.clone(), stream.read.clone()
    assert stream.run() > 0
    assert bool((stream.changed[: stream.written] != before[: stream.written]).all())
    assert torch.equal(stream.read, read)


def test_memory_of_a_process():
    found = json.loads(
        run("peers.py --memory-of torch --elements", str(8 * peers.MiB), "--threads", "1")
    )
    assert found["states_per_param"] == pytest.approx(8, abs=0.01)
    assert 7.9 < found["peak_per_param"] < 12  # torch's fused step needs nothing besides
    failed = json.loads(
        run("peers.py --memory-of torchastic --elements 65536", missing=("torchastic",))
    )
    assert failed["error"].startswith("not installed")


# ---- traps.py ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("traps") / "out.json"
    text = run(
        "traps.py --short 100 --recipes "
        "adamw/f32/f32,adamw/bf16-sr/int8,adamw/bf16/bf16 --only "
        "^adamw/,^torch-bf16$,^flashoptim$,^torchastic$ --json",
        str(path),
        missing=("torchastic",),
    )
    return {**json.loads(path.read_text()), "text": text}


def test_traps_tell_arithmetic_apart(measured):
    rows = measured["traps"]
    exact = rows["adamw/f32/f32"]
    for name in traps.FIGURES:
        assert exact[name] == pytest.approx(1, abs=2e-3), name
    for key in ("torch-bf16", "adamw/bf16/bf16"):  # to nearest: nothing arrives
        assert rows[key]["movement"] == 0 and rows[key]["decay"] == 0
    assert rows["torch-bf16"]["poisoned"] >= 1 and rows["torch-bf16"]["moved"] > 4000
    for key in ("adamw/f32/f32", "adamw/bf16-sr/int8", "adamw/bf16/bf16"):
        assert (rows[key]["poisoned"], rows[key]["moved"], rows[key]["resume"]) == (0, 0, "yes")
    assert rows["torch-bf16"]["resume"] == "yes"
    for name in ("fall", "block", "tiny"):
        assert rows["adamw/bf16-sr/int8"][name] == pytest.approx(1, abs=0.2), name


def test_reasons_are_printed(measured):
    assert measured["traps"]["torchastic"]["reasons"]["movement"].startswith("not installed")
    assert "flashoptim" in measured["traps"] and "FlashOptim" in measured["text"]
    assert "| torchastic AdamW, all BF16, SR | movement | not installed" in measured["text"]


def test_averages():
    rows = {row["title"]: row["movement"] for row in traps.averages(500, "multi_avg_fn,`ema")}
    assert rows["torch AveragedModel, fp32"] == 1
    assert rows["torch AveragedModel, multi_avg_fn, BF16"] == 0
    assert rows["`ema/bf16`"] == 0
    assert rows["`ema/f32`"] == pytest.approx(1, abs=1e-3)
    for name in ("bf16-kahan", "bf16-ecc8", "bf16-ecc16"):
        assert rows[f"`ema/{name}`"] == pytest.approx(1, abs=0.01), name
    assert rows["`ema/bf16-sr`"] == pytest.approx(1, abs=0.1)


def test_every_recipe_is_measured_by_default():
    recipes = traps.our_recipes("all")
    assert len(recipes) == len(set(recipes)) and set(common.RECIPES) <= set(recipes)
    weights = {name for name, form in abi.formats.items() if form.roles & abi.ROLE_WEIGHT}
    assert {recipe.split("/")[1] for recipe in recipes} == weights


def altered(**changes):
    """Makes torch's AdamW with other hyper-parameters than it is asked for. Its figures must
    differ."""

    def make(params, hyper):
        hyper = {**hyper, **{name: change(hyper) for name, change in changes.items()}}
        return torch.optim.AdamW(params, **hyper, foreach=False)

    return contestant("altered", make)


@pytest.mark.parametrize(
    "name, subject, expected",
    [
        ("movement", altered(lr=lambda hyper: 2 * hyper["lr"]), 2),
        ("decay", altered(lr=lambda hyper: 3 * hyper["lr"]), 3),
        ("fall", altered(lr=lambda hyper: 0.5 * hyper["lr"]), 0.5),
        ("block", altered(lr=lambda hyper: 2 * hyper["lr"]), 2),
        ("tiny", altered(lr=lambda hyper: 2 * hyper["lr"]), 2),
        ("tiny", altered(eps=lambda hyper: 1e-8), 0.01),
    ],
)
def test_figures_are_quotients(name, subject, expected):
    trap = traps.FIGURES[name]
    found = trap(subject, 100, False) / trap(traps.REFERENCE, 100, False)
    assert found == pytest.approx(expected, rel=0.15 if expected < 0.1 else 0.01)


@pytest.mark.parametrize("name", traps.MATRIX_FIGURES)
def test_figures_of_matrices_are_quotients(name):
    """Twice the rate is twice the step, and its decay."""

    exact = common.ours("muon/f32/f32")

    def make(params, hyper):
        return exact.make(params, {**hyper, "lr": 2 * hyper["lr"]})

    trap = traps.MATRIX_FIGURES[name]
    found = trap(contestant("altered", make), 100, False) / trap(exact, 100, False)
    assert found == pytest.approx(2, rel=0.01)


@pytest.mark.told("is not finite")
@pytest.mark.told("momentum_buffer in int6")
def test_matrices_stand_still_as_they_should():
    """Without a gradient that is not 0, and with a NaN in one matrix of a stack."""
    for recipe in ("muon/f32/f32", "muon/bf16-sr/int8", "muon/bf16-sr/int6"):
        subject = common.ours(recipe)
        assert traps.steps_matrices(subject) and traps.zero(subject, False) == 0
        assert traps.nan(subject, False) == {"poisoned": 0, "moved": 0}
    assert not traps.steps_matrices(common.ours("adafactor/f32"))


def test_resume_tells_what_is_missing(tmp_path):
    class Random(torch.optim.SGD):
        """Takes random bits from torch."""

        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.data.add_(torch.rand_like(p))

    class Forgetful(torch.optim.SGD):
        """Counts outside of its state."""

        count = 0

        def step(self, closure=None):
            self.count += 1
            for p in self.param_groups[0]["params"]:
                p.data.add_(float(self.count))

    group = [
        contestant(cls.__name__, lambda params, hyper, cls=cls: cls(params, lr=0.1))
        for cls in (Random, Forgetful)
    ] + [traps.REFERENCE]
    traps.resume_save(group, str(tmp_path))
    assert traps.resume_load(group, str(tmp_path)) == {
        "Random": "+ rng",
        "Forgetful": "no",
        "reference": "yes",
    }


@pytest.mark.told("is not finite")
def test_nan_is_counted():
    found = traps.nan(traps.REFERENCE, False)
    assert found["poisoned"] == 1 and found["moved"] > 8000
    assert traps.nan(common.ours("adamw/bf16-kahan/bf16-sr"), False) == {"poisoned": 0, "moved": 0}


def test_gpu_runs_everything_on_the_processor():
    """Checks its columns, and bytes that follow from the formats. Times mean nothing here."""
    lines = run(
        "gpu.py --device cpu --elements 2^16 --scale 0.001 --rounds 1 --only "
        "adamw/bf16-sr/int8,sgd,^torch$"
    ).splitlines()
    judged = next(i for i, line in enumerate(lines) if line.startswith("| aim |"))
    rows = table("\n".join(lines[:judged]), "contestant")
    assert [row[:2] for row in rows] == [
        [key, kind]
        for kind in ("one", "model")
        for key in (
            "adamw/bf16-sr/int8:finite",
            "adamw/bf16-sr/int8",
            "sgd/bf16-sr:finite",
            "sgd/bf16-sr",
            "torch",
        )
    ]
    assert [row[5] for row in rows[:5]] == ["10.25", "12.25", "6.00", "8.00", "28.00"]
    assert any(line.startswith("| one: `adamw/bf16-sr/int8` of a copy | 0.75 |") for line in lines)
    small = run("gpu.py --device cpu --small 3 --rounds 1 --only ^torch$,adamw/bf16-sr/int8")
    assert "us a step of the process" in small and "| torch |" in small
    row = next(
        line for line in small.splitlines() if line.startswith("| adamw/bf16-sr/int8 |")
    ).split("|")
    assert float(row[2]) > 0 and float(row[3]) > 0, row


def test_gpu_judges_its_aims(tmp_path):
    """Runs every recipe and peer of the list on the processor. A missing package is no failure; a
    missing recipe of ours is one."""
    asked = {recipe + end for recipe in gpu.RECIPES for end in ("", ":finite")} | set(gpu.PEERS)
    assert {c.key for c in gpu.contestants()} == asked
    assert (
        set(gpu.SHARES) <= set(gpu.RECIPES)
        and set(gpu.RIVALS) <= set(gpu.RECIPES)
        and {r for o in gpu.RIVALS.values() for r in o} <= set(gpu.PEERS)
    )
    path = tmp_path / "out.json"
    run(
        "gpu.py --device cpu --elements 2^16 --shapes one --rounds 1 --only",
        ",".join(
            f"^{key}$"
            for key in (
                *gpu.RECIPES,
                *(r + ":finite" for r in gpu.RECIPES),
                "torch",
                "torch-bf16",
                "flashoptim",
            )
        ),
        "--json",
        str(path),
        missing=("flashoptim",),
    )
    report = json.loads(path.read_text())
    assert {row["contestant"] for row in report["results"]} == asked - set(gpu.PEERS) | {
        "torch",
        "torch-bf16",
    }
    moved = {row["contestant"]: row["bytes_per_param"] for row in report["results"]}
    assert moved["lamb16/bf16-sr/bf16-sr:finite"] == pytest.approx(
        14 + 8, abs=0.05
    )  # its second reading
    names = {line["aim"] for line in report["aims"]}
    assert {
        "one: `adamw/bf16-sr/int8` of a copy",
        "one: time of torch over `adamw/f32/f32`",
        "one: time of `adamw/bf16-sr` over `adamw/bf16-sr/int4`",
    } <= names
    assert all(line["reached"] == (line["measured"] >= line["wanted"]) for line in report["aims"])
    row = {
        "shapes": "small",
        "contestant": "adamw/f32/f32",
        "us": 31.0,
        "bare_us": 29.0,
        "tensors": gpu.SMALL,
    }
    assert [line["reached"] for line in gpu.aims([row])] == [False, True]
    assert "halfstep" in run(
        "gpu.py --device cpu --shapes one --elements 2^16 --only ^sgd",
        missing=("halfstep",),
        status=1,
    )


def test_gpu_says_what_is_wrong():
    assert "there are one and model" in run("gpu.py --shapes two", status=2)
    if not torch.cuda.is_available():
        said = run("gpu.py", status=1)
        assert "finds no GPU here" in said and ("built without CUDA" in said) == (
            torch.version.cuda is None
        ), said


def test_offload_copies_as_much_as_it_says():
    pytest.importorskip("torchao")
    rows = table(run("offload.py --rounds 1 --layers 2 --width 96 --no-memory"), "ms a step")
    copied = {row[0]: (row[3], row[4]) for row in rows}
    assert len(copied) == 9 and copied.pop("plain halfstep") == ("0.00", "0.00")
    assert all(
        pair == ("2.00", "2.00") for way, pair in copied.items() if way.startswith("CPUOffload")
    )  # torchao leaves small tensors out
    for way in ("StateStreaming", "StateStreaming, gradient_release"):
        assert len(set(copied[way])) == 1 and 2.0 < float(copied[way][0]) < 2.2  # states in int8
    assert all("0.00" not in pair for pair in copied.values())


def test_offload_under_a_backward_pass():
    pytest.importorskip("torchao")
    lines = run("offload.py --overlap --rounds 3 --layers 2 --width 96")
    rows = table(lines, "ms after the pass")
    assert [row[0] for row in rows] == [
        "CPUOffload",
        "CPUOffload, overlap",
        "torchao, torch.optim.AdamW",
    ]
    assert rows[0][2] == rows[0][4] == "1.00"
    assert all(float(cell) > 0 for row in rows for cell in row[1:])


def test_offload_beside_the_plan_and_in_phases():
    pytest.importorskip("torchao")
    lines = run(
        "offload.py --plan --only", "^CPUOffload, offload", "--layers", "3", "--width", "1024"
    ).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert [row[0] for row in rows] == ["CPUOffload, offload_gradients"]
    for planned, measured in zip(rows[0][1::2], rows[0][2::2]):
        assert int(planned) > 0 and int(measured) > 0.8 * int(planned)
    text = run("offload.py --profile StateStreaming --rounds 1 --layers 2 --width 96")
    assert "phase of StateStreaming" in text
    assert [line.split(" |")[0] for line in text.splitlines()[2:5]] == [
        "| forward",
        "| backward",
        "| step",
    ]


def test_models_are_trained_where_there_is_no_gpu():
    rows = run(
        "gpu_train.py limit --device cpu --width 64 --depth 2 --heads 4 --context 32 "
        "--vocab 256 --steps 3"
    )
    assert len([line for line in rows.splitlines() if line.endswith(" of 3 |")]) == 4
    rows = run(
        "gpu_train.py ladder --device cpu --context 16 --batch 1 --steps 2 --only 10 --evaluation 1"
    )
    losses = [float(line.split(" | ")[4]) for line in rows.splitlines() if "adamw" in line]
    assert len(losses) == 3 and max(losses) - min(losses) < 0.01 and len(set(losses)) > 1
