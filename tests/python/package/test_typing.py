"""Tests what editors and type checkers see. The classes are text, and everything public has types.
Examples and a user's file pass, and mistakes in one are found. Lists in documents are current
too."""

import ast
import importlib.util
import inspect
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep
from halfstep import classes, rules
from halfstep._settings.groups import COMMON
from halfstep.optimizer import Optimizer

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir, os.pardir))
GENERATE = os.path.join(ROOT, "scripts", "generate.py")
PACKAGE = Path(halfstep.__file__).absolute().parent

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
    model(torch.ones(1, 8)).sum().backward()
sums.attach().reassign(missing="skip")
ema = halfstep.EMA(model, decay=0.99)
ema.update_parameters(model, [opt])
with ema.swapped(model) as averaged:
    averaged.train(False)
halfstep.name_parameters(model)
opt.step()
opt.step(lambda: model(torch.ones(1, 8)).sum())
saved = opt.state_dict()
opt.load_state_dict({**saved, "state": dict(saved["state"])})
opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
"""
#: each is found by both checkers
BAD = [
    "halfstep.AdamW(model.parameters(), betas=0.9)",
    "halfstep.AdamW(model.parameters(), wieghts='bf16')",
    "halfstep.Adamw(model.parameters())",
    "halfstep.AdamW(model.parameters(), states=8)",
    "halfstep.optimizer(model.parameters(), 'adamw')",
    "opt.read_state(model.weight)",
    "opt.load_state_dict(8)",
    "opt.step(8)",
    "opt.state_dict(8)",
    "ema.update_parameters(8)",
    "halfstep.EMA(8)",
]


@pytest.fixture
def files(tmp_path):
    for name in os.listdir(os.path.join(ROOT, "examples")):
        if name.endswith(".py"):
            (tmp_path / name).write_text(open(os.path.join(ROOT, "examples", name)).read())
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(GOOD + "\n".join(BAD) + "\n")
    return tmp_path


def errors(tool, folder):
    """Returns (file, line) of each error, and the whole output."""
    environment = {**os.environ, "MYPYPATH": "", "PYTHONPATH": ""}
    if tool == "mypy":
        if "site-packages" not in PACKAGE.parts:
            environment["MYPYPATH"] = str(PACKAGE.parent)
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--no-incremental",
            "--no-error-summary",
            "--follow-imports=silent",
            *sorted(path.name for path in folder.glob("*.py")),
        ]
    else:
        (folder / "pyrightconfig.json").write_text(
            '{"typeCheckingMode": "standard", "extraPaths": ["%s"], "pythonVersion": "%d.%d"}'
            % (PACKAGE.parent, *sys.version_info[:2])
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
    for path, text in {**generate.classes(), **generate.files()}.items():
        assert open(os.path.join(ROOT, path), encoding="utf-8").read() == text, (
            f"{path}: make generate"
        )


def test_the_classes_are_text():
    """An editor, a debugger and help() show what runs. Pickles name the module."""
    for name, cls in rules.classes.items():
        assert vars(classes)[name] is vars(halfstep)[name] is cls
        assert inspect.getsourcefile(cls) == classes.__file__
        assert inspect.getsource(cls).startswith(f"class {name}(")
        assert re.match(r"    def __init__\(\n +self, params: ", inspect.getsource(cls.__init__))
        assert b"halfstep.classes" in pickle.dumps(cls) and pickle.loads(pickle.dumps(cls)) is cls
    assert list(rules.classes) == classes.__all__
    assert set(halfstep.__all__) > {*classes.__all__}
    aliases = {
        name: value.__name__
        for name, value in vars(halfstep).items()
        if value in rules.classes.values() and name not in rules.classes
    }
    assert aliases == {"RMSprop": "RMSProp", "ScheduleFreeAdamW": "ScheduleFree"}


def test_options_have_the_types_of_the_base():
    """Common options have the names, defaults and types of Optimizer in every class, and the same
    place among its keywords. An option has one type in all classes."""
    common = inspect.signature(Optimizer.__init__).parameters
    common = {n: p for n, p in common.items() if p.kind is p.KEYWORD_ONLY}
    seen = {}
    for name, cls in rules.classes.items():
        taken, *signature = inspect.signature(cls).parameters.values()
        assert (taken.name, taken.default) == ("params", inspect.Parameter.empty)
        assert inspect.signature(cls).return_annotation is None
        assert common.keys() <= {p.name for p in signature}
        assert {*COMMON} - {"cautious"} <= {p.name for p in signature}
        for p in signature:
            assert p.annotation is not inspect.Parameter.empty, (name, p.name)
            assert p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY), (name, p.name)
            if p.name in common:
                assert p.replace(kind=p.KEYWORD_ONLY) == common[p.name], (name, p.name)
            if p.name not in ("betas", "eps"):  # as many rates as a rule has; Adafactor's pair
                assert seen.setdefault(p.name, p.annotation) == p.annotation, (name, p.name)
        keywords = [p.name for p in signature if p.kind is p.KEYWORD_ONLY and p.name in common]
        assert keywords == [name for name in common if name in keywords]
        assert cls.__base__ is getattr(rules, f"_{name}", Optimizer)


def untyped(tree, where):
    """Yields what a module says without types: the public functions, methods and properties that
    lack the type of an argument or of what they return."""
    for node in tree.body:
        name = getattr(node, "name", "_")
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(node, ast.ClassDef):
            yield from untyped(node, f"{where}.{name}")
        elif isinstance(node, ast.FunctionDef):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            bare = [x for x in every if x and x.annotation is None and x.arg != "self"]
            if bare or node.returns is None:
                yield f"{where}.{name}"


def test_everything_public_has_types():
    assert (PACKAGE / "py.typed").exists()
    found, modules = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).with_suffix("")
        if not any(part.startswith("_") and part != "__init__" for part in name.parts):
            modules += 1
            found += untyped(ast.parse(path.read_text(encoding="utf-8")), ".".join(name.parts))
    assert modules > 20 and not found
    assert list(untyped(ast.parse("def f(x) -> int: ...\nclass A:\n def g(self): ..."), "")) == [
        ".f",
        ".A.g",
    ]


@pytest.mark.all
@pytest.mark.parametrize("tool", ["mypy", "basedpyright"])
def test_mistakes_are_found_and_nothing_else(files, tool):
    found, out = errors(tool, files)
    first = GOOD.count("\n") + 1
    assert {line for name, line in found if name == "bad.py"} == set(
        range(first, first + len(BAD))
    ), out
    assert not [place for place in found if place[0] == "good.py"], out
    assert not [
        line for line in out.splitlines() if "finetune.py" in line and "halfstep" in line
    ], out
