"""The code of the guides, and of the manual, runs as it stands there."""

import os
import re
import subprocess
import sys

import pytest
from common import ROOT

import halfstep

#: pages whose blocks are one script, made for several processes
RANKS = ["guides/many-processes.md"]
#: pages whose blocks go on from the ones before
PAGES = [
    "guides/ema.md",
    "guides/muon.md",
    "guides/offload.md",
    "guides/release-and-accumulation.md",
    "guides/resume.md",
    "python.md",
]


def code_of(page):
    with open(os.path.join(ROOT, "docs", *page.split("/")), encoding="utf-8") as file:
        found = re.findall(r"^```python\n(.*?)^```", file.read(), flags=re.M | re.S)
    assert found, page
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("page", PAGES)
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {}
    for code in code_of(page):
        exec(compile(code, page, "exec"), given)
    made = [value for value in given.values() if isinstance(value, halfstep.Optimizer)]
    assert made


@pytest.mark.all
@pytest.mark.parametrize("page", RANKS)
def test_page_of_ranks(page, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("".join(code_of(page)), encoding="utf-8")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(launch, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr


def test_muon_prints_what_the_guide_shows(capsys):
    with open(os.path.join(ROOT, "docs", "guides", "muon.md"), encoding="utf-8") as file:
        (shown,) = re.findall(r"^```\n(Muon: .*?)^```", file.read(), flags=re.M | re.S)
    exec(compile(code_of("guides/muon.md")[0], "guides/muon.md", "exec"), {})
    assert shown in capsys.readouterr().out
