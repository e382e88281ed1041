"""The code of the guides, and of the manual, runs as it stands there."""

import os
import re
from unittest import mock

import pytest
import torch
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


def run_rank(rank, size, page):
    """Runs a page's script in a rank, which is in a group already."""
    group = {"init_process_group": lambda *_: None, "destroy_process_group": lambda: None}
    given = {}
    with mock.patch.multiple(torch.distributed, **group):
        exec(compile("".join(code_of(page)), page, "exec"), given)
    opt = given["opt"]
    local = [p.to_local().float().sum().item() for p in opt.param_groups[0]["params"]]
    return opt.param_groups[0]["group_steps"], opt.grad_norm, local


@pytest.mark.parametrize("page", RANKS)
def test_page_of_ranks(pool, page):
    (steps, norm, first), (same_steps, same_norm, second) = pool.run(2, run_rank, page)
    assert steps == same_steps == 3 and norm == same_norm > 0 and first != second


def test_muon_prints_what_the_guide_shows(capsys):
    with open(os.path.join(ROOT, "docs", "guides", "muon.md"), encoding="utf-8") as file:
        (shown,) = re.findall(r"^```\n(Muon: .*?)^```", file.read(), flags=re.M | re.S)
    exec(compile(code_of("guides/muon.md")[0], "guides/muon.md", "exec"), {})
    assert shown in capsys.readouterr().out
