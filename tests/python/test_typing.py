"""What editors and type checkers see: the stub and lists are those of the classes, examples and a
user's file pass, and mistakes in one are found."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))
GENERATE = os.path.join(ROOT, "scripts", "generate.py")

GOOD = """
import torch
import halfstep

model = torch.nn.Linear(8, 8)
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


def package():
    """The folder that the package under test is imported from."""
    import halfstep

    return os.path.dirname(os.path.dirname(os.path.abspath(halfstep.__file__)))


def errors(tool, folder):
    """(file, line) of each, and the whole output."""
    environment = {**os.environ, "MYPYPATH": "", "PYTHONPATH": ""}
    if tool == "mypy":
        if "site-packages" not in package().split(os.sep):
            environment["MYPYPATH"] = package()
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
            % (package(), *sys.version_info[:2])
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
def test_what_follows_from_the_table_of_rules_is_current():
    spec = importlib.util.spec_from_file_location("generate", GENERATE)
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for path, text in generate.files().items():
        assert open(os.path.join(ROOT, path), encoding="utf-8").read() == text, (
            f"{path}: make generate"
        )


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
