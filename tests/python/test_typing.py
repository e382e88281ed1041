"""Tests what editors and type checkers see. The stub is what the classes are. Examples and a user's
file pass, and mistakes in one are found. Lists in documents are current too."""

import ast
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import typing

import pytest

import halfstep
from halfstep import rules
from halfstep._library import abi
from halfstep._library.signatures import COMMON
from halfstep.optimizer import Optimizer

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))
GENERATE = os.path.join(ROOT, "scripts", "generate.py")
PACKAGE = os.path.dirname(os.path.abspath(halfstep.__file__))

GOOD = """
import torch
import halfstep

model = torch.nn.Linear(8, 8)
halfstep.nn.quantize_(model, "int8-sr", where=lambda module, name: name != "head")
opt = halfstep.AdamW(
    model.named_parameters(), lr=1e-3, betas=(0.9, 0.95), states="int8", weights="bf16-kahan"
)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
other: halfstep.Optimizer = halfstep.optimizer("lion/bf16-sr/int8", model.parameters(), lr=1e-4)
muon = halfstep.Muon(model.parameters(), momentum=0.95, nesterov=True)
rms = halfstep.RMSprop(model.parameters())
count: int = opt.skipped_steps
norm: float = opt.grad_norm
held: torch.Tensor = opt.read_state(model.weight, "exp_avg")
print(halfstep.plan(model, memory="24G"), opt.memory()["states"], opt.recipe(model.weight))
with halfstep.GradientAccumulator(model) as sums:
    pass
ema = halfstep.EMA(model, decay=0.99)
ema.update_parameters(model, opt)
halfstep.name_parameters(model)
opt.step()
"""
#: each is found by both checkers
BAD = [
    "halfstep.AdamW(model.parameters(), betas=0.9)",
    "halfstep.AdamW(model.parameters(), wieghts='bf16')",
    "halfstep.Adamw(model.parameters())",
    "halfstep.AdamW(model.parameters(), states=8)",
    "halfstep.optimizer(model.parameters(), 'adamw')",
    "opt.read_state(model.weight)",
]


@pytest.fixture
def files(tmp_path):
    for name in os.listdir(os.path.join(ROOT, "examples")):
        if name.endswith(".py"):
            (tmp_path / name).write_text(open(os.path.join(ROOT, "examples", name)).read())
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(GOOD + "\n".join(BAD) + "\n")
    return tmp_path


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Returns the folder of the installed package or, in a source tree, of a copy with a stub."""
    if "site-packages" in PACKAGE.split(os.sep):
        return os.path.dirname(PACKAGE)
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(PACKAGE, folder / "halfstep", ignore=shutil.ignore_patterns("*.pyi"))
    stub = os.path.join(ROOT, "cmake", "stub.py")
    path = os.path.join(folder, "halfstep", "__init__.pyi")
    subprocess.run([sys.executable, "-I", stub, abi.path, path], check=True)
    return str(folder)


def errors(tool, folder, package):
    """Returns (file, line) of each error, and the whole output."""
    environment = {**os.environ, "MYPYPATH": "", "PYTHONPATH": ""}
    if tool == "mypy":
        if "site-packages" not in package.split(os.sep):
            environment["MYPYPATH"] = package
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--no-incremental",
            "--no-error-summary",
            "--follow-imports=silent",
            *sorted(path.name for path in folder.glob("*.py")),
        ]
    else:
        (folder / "pyrightconfig.json").write_text(
            '{"typeCheckingMode": "standard", "extraPaths": ["%s"], "pythonVersion": "%d.%d"}'
            % (package, *sys.version_info[:2])
        )
        command = [
            os.path.join(os.path.dirname(sys.executable), "basedpyright"),
            "--pythonpath",
            sys.executable,
            "-p",
            "pyrightconfig.json",
        ]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    out = found.stdout + found.stderr
    return [
        (os.path.basename(name), int(line))
        for name, line in re.findall(r"^ *(\S+\.py):(\d+).*\berror\b", out, re.M)
    ], out


@pytest.mark.skipif(not os.path.exists(GENERATE), reason="the sources are not here")
@pytest.mark.told("muon: momentum_buffer in int4")
def test_what_follows_from_the_table_of_rules_is_current():
    spec = importlib.util.spec_from_file_location("generate", GENERATE)
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for path, text in generate.files().items():
        assert open(os.path.join(ROOT, path), encoding="utf-8").read() == text, (
            f"{path}: make generate"
        )


def stub_of(package):
    """Returns the stub's classes by name, and its values."""
    with open(os.path.join(package, "halfstep", "__init__.pyi"), encoding="utf-8") as file:
        module = ast.parse(file.read()).body
    classes = {x.name: x for x in module if isinstance(x, ast.ClassDef)}
    return classes, {x.targets[0].id: x.value for x in module if isinstance(x, ast.Assign)}


def types_of(body):
    return {x.target.id: ast.unparse(x.annotation) for x in body if isinstance(x, ast.AnnAssign)}


def test_the_stub_is_what_the_classes_are(package):
    """Names, order, kinds, defaults and types of all options are those of the class, and none is
    left out. An option has one type in all classes."""
    classes, values = stub_of(package)
    common = inspect.signature(Optimizer.__init__).parameters
    shared = types_of(classes.pop("_Options").body)
    assert classes.keys() == rules.classes.keys()
    assert ast.literal_eval(values.pop("__all__")) == halfstep.__all__
    assert {k: v.id for k, v in values.items()} == {
        name: value.__name__
        for name, value in vars(halfstep).items()
        if value in rules.classes.values() and name not in rules.classes
    }
    seen = {}
    for name, cls in rules.classes.items():
        (init,) = (x.args for x in classes[name].body if isinstance(x, ast.FunctionDef))
        given = init.args[2:]
        stub = {
            x.arg: (ast.unparse(x.annotation), ast.literal_eval(default), kind)
            for xs, defaults, kind in (
                (given, init.defaults, inspect.Parameter.POSITIONAL_OR_KEYWORD),
                (init.kwonlyargs, init.kw_defaults, inspect.Parameter.KEYWORD_ONLY),
            )
            for x, default in zip(xs, defaults)
        }
        assert len(given) == len(init.defaults)
        if init.kwarg:
            assert ast.unparse(init.kwarg.annotation) == "Unpack[_Options]"
        signature = list(inspect.signature(cls).parameters.values())
        assert [x.arg for x in init.args[:2]] == ["self", signature.pop(0).name]
        assert list(stub) == [p.name for p in signature if p.name in stub]
        for p in signature:
            kind, default, how = stub.get(p.name) or (
                shared[p.name],
                p.default,
                inspect.Parameter.KEYWORD_ONLY,
            )
            assert init.kwarg or p.name in stub, (name, p.name)
            assert (default, how) == (p.default, p.kind), (name, p.name)
            if p.name in common:
                names = {**vars(typing), "os": os, "Store": halfstep.Store}
                assert eval(kind, names) == common[p.name].annotation, (name, p.name)
            if p.name not in ("betas", "eps"):  # as many rates as a rule has; Adafactor's pair
                assert seen.setdefault(p.name, kind) == kind, (name, p.name)
        assert stub.keys() | (shared.keys() if init.kwarg else set()) == {p.name for p in signature}
    assert shared.keys() >= (set(COMMON) - {"cautious"})
    bases = {name: ast.unparse(node.bases[0]) for name, node in classes.items()}
    for name, cls in rules.classes.items():
        base = cls.__base__
        assert bases[name] == ("Optimizer" if base is Optimizer else f"rules.{base.__name__}")


@pytest.mark.all
@pytest.mark.parametrize("tool", ["mypy", "basedpyright"])
def test_mistakes_are_found_and_nothing_else(files, package, tool):
    found, out = errors(tool, files, package)
    first = GOOD.count("\n") + 1
    assert {line for name, line in found if name == "bad.py"} == set(
        range(first, first + len(BAD))
    ), out
    assert not [place for place in found if place[0] == "good.py"], out
    assert not [
        line for line in out.splitlines() if "finetune.py" in line and "halfstep" in line
    ], out
