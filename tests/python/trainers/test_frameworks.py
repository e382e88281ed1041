"""The snippets of docs/frameworks.md run as they stand there, and step what they are given."""

import os
import re

import pytest
import torch
from common import ROOT, Words, blocks, language_model, tiny
from test_trainers import batch, tokenizer

import halfstep

with open(os.path.join(ROOT, "docs", "frameworks.md"), encoding="utf-8") as _file:
    TEXT = _file.read()
TITLES = re.findall("^## (.*)", TEXT, flags=re.M)
#: without the trainers that have environments of their own, whose tests run what stands here
SNIPPETS = [
    (title, code)
    for title in TITLES
    if not os.path.isdir(os.path.join(ROOT, "tests", "trainers", title))
    for code in blocks(title, "python")
]

pytestmark = [pytest.mark.all, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    "title, code", SNIPPETS, ids=[f"{i} {title}" for i, (title, _) in enumerate(SNIPPETS)]
)
def test_snippet(title, code, tmp_path):
    given = {
        "folder": str(tmp_path),
        "model": language_model(),
        "net": tiny(),
        "dataset": Words(),
        "loader": torch.utils.data.DataLoader([batch(i)[0] for i in range(16)], batch_size=4),
    }
    if "texts" in code:
        import datasets

        given.update(
            texts=datasets.Dataset.from_dict({"text": ["w1 w2 w3 w4", "w5 w6 w7 w8"] * 8}),
            tokenizer=tokenizer(tmp_path),
        )
    trained = given[
        "model" if re.search(r"\bmodel\b", code) and not re.search(r"\bnet\b", code) else "net"
    ]
    before = {name: p.detach().clone() for name, p in trained.named_parameters()}
    exec(compile(code, title, "exec"), given)
    steps = [value for value in given.values() if isinstance(value, halfstep.Optimizer)]
    assert all(opt.param_groups[0]["group_steps"] >= 2 for opt in steps)
    after = dict(trained.named_parameters())
    adapters = [name for name in after if "lora" in name]
    if adapters:
        assert any(after[name].count_nonzero() for name in adapters if "lora_B" in name)
    else:
        assert any(not torch.equal(after[name], value) for name, value in before.items())


def test_every_trainer_of_the_table_has_a_section():
    rows = TEXT.split("<!-- trainers -->")[1].split("<!-- end -->")[0]
    trainers = re.findall(r"^\| (\w[^|]*?) \|", rows, flags=re.M)
    assert len(trainers) == 15 and set(trainers) < set(TITLES)
