"""Runs what docs/coming-from says: the old and the new lines of each page's table, and the lines
that carry a checkpoint over."""

import contextlib
import importlib.util
import os
import pkgutil
import re

import documents
import pytest
import torch
from conftest import warnings_are

import halfstep
import halfstep.compat
from halfstep.compat import adamw_bfloat16, lamb16

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.path.join(HERE, os.pardir, os.pardir, os.pardir, "docs", "coming-from")
HEADINGS = [
    "The lines that change",
    "What stays the same",
    "What differs",
    "Carry a checkpoint over",
    "Memory and loss",
]
PAGES = sorted(f[:-3] for f in os.listdir(FOLDER) if f.endswith(".md") and f != "index.md")
#: pages whose package may be missing: on no index, or for machines with a GPU only
NOT_INSTALLED = {"adamw-bfloat16", "lamb16", "transformer-engine"}


def fused_adam(
    params,
    lr=1e-3,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    amsgrad=False,
    *,
    bias_correction=True,
    adam_w_mode=True,
    capturable=False,
    master_weights=False,
    master_weight_dtype=torch.float32,
    exp_avg_dtype=torch.float32,
    exp_avg_sq_dtype=torch.float32,
    use_decoupled_grad=False,
    store_param_remainders=False,
):
    """Has the signature of TransformerEngine's FusedAdam."""
    return torch.optim.AdamW(params, lr, betas, eps, weight_decay)


#: what has the signatures of packages that are not installed
STAND_INS = {
    "FusedAdam": fused_adam,
    "Lamb": lamb16.Lamb,
    "Lamb16": lamb16.Lamb16,
    "AdamW_BF16": adamw_bfloat16.AdamW_BF16,
    "LR": adamw_bfloat16.LR,
}
#: a line that makes an optimizer, or prepares a model for one
MAKES = re.compile(r"\b(params|matrices|param_groups_weight_decay|to_low_precision|cast_model)\b")
#: packages that need a GPU in some lines, and how they say it
NEEDS_GPU = {
    "flashoptim": "requires a CUDA device",
    "torchao": "currently only supports CUDA & XPU",
}


def text_of(page):
    with open(os.path.join(FOLDER, page + ".md"), encoding="utf-8") as file:
        return file.read()


def section(page, heading):
    return text_of(page).split(f"\n## {heading}\n")[1].split("\n## ")[0]


def blocks_of(page, heading):
    return documents.blocks(f"docs/coming-from/{page}.md", "python", heading)


def rows(page):
    """Returns the old and the new lines of each row of a page's table."""
    found = []
    for line in section(page, HEADINGS[0]).splitlines():
        if not line.startswith("| `"):
            continue
        old, new = line.strip("|").split(" | ")[:2]
        before = re.findall(r"`([^`]+)`", old)
        after = before if new.strip() == "the same" else re.findall(r"`([^`]+)`", new)
        assert before and after, line
        found.append((before, after))
    return found


def fresh_model():
    torch.manual_seed(0)
    layers = torch.nn.Embedding(64, 128), torch.nn.Linear(128, 96), torch.nn.LayerNorm(96)
    return torch.nn.Sequential(*layers).to(torch.bfloat16)


def train(model, optimizer, steps=2):
    for _ in range(steps):
        model(torch.arange(48)).float()[:, ::3].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Script:
    """Runs lines of a page in order. A line that makes an optimizer begins with a new model."""

    def __init__(self):
        self.names = {"torch": torch, "batch": torch.arange(48)}
        self.params = "params = model.parameters()"

    def run(self, lines):
        if lines[0].startswith("params ="):
            self.params = lines[0]
        if MAKES.search(lines[0]):
            self.begin()
        for line in lines:
            try:
                made = eval(compile(line, line, "eval"), self.names)
            except SyntaxError:
                exec(compile(line, line, "exec"), self.names)
            else:
                if isinstance(made, torch.optim.Optimizer):
                    self.names["optimizer"] = made
        if "optimizer" in self.names:
            train(self.names["model"], self.names["optimizer"])

    def begin(self):
        self.names.pop("optimizer", None)
        model = self.names["model"] = fresh_model()
        self.names["matrices"] = [model[1].weight]
        exec(self.params, self.names)


@contextlib.contextmanager
def surroundings(monkeypatch, tmp_path):
    """torchao's compiled steps take minutes; eager ones are the same. Files go to a folder."""
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function or (lambda f: f))
    monkeypatch.chdir(tmp_path)
    with warnings_are("ignore"):
        yield


@pytest.mark.parametrize("page", PAGES)
def test_headings(page):
    text = text_of(page)
    assert re.findall(r"^## (.*)$", text, re.M) == HEADINGS
    assert text.startswith("# Coming from ") and text.split("\n")[2].startswith("This page is for ")
    assert "differences.md#" in text


def test_index():
    """The index has every page and every module of halfstep.compat."""
    text = text_of("index")
    linked = re.findall(r"\]\(([a-z0-9-]+)\.md\)", text)
    assert sorted(linked) == PAGES
    for module in pkgutil.iter_modules(halfstep.compat.__path__):
        if not module.name.startswith("_"):
            assert f"`halfstep.compat.{module.name}`" in text, module.name


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.told("step.. has nothing to do", page="flashoptim")
@pytest.mark.told("zero_grad.. has nothing to do", page="flashoptim")
def test_new_lines(page, monkeypatch, tmp_path):
    script, made = Script(), set()
    with surroundings(monkeypatch, tmp_path):
        for _, lines in rows(page):
            script.run(lines)
            optimizer = script.names.get("optimizer")
            if optimizer is not None:
                made.add(lines[0])
                own = optimizer.optimizer if "CPUOffload" in lines[0] else optimizer
                group = own.param_groups[0]
                assert group.get("skipped_steps", 0) == 0 and own.state, lines
                assert type(optimizer).__module__.startswith("halfstep"), lines
                assert all(p.isfinite().all() for p in script.names["model"].parameters())
    assert len(made) >= 3


def codes_in_the_text():
    """Returns code outside of tables: calls in sentences, and blocks under the first heading."""
    found = []
    for page in PAGES:
        found += [block.text for block in blocks_of(page, HEADINGS[0])]
        found += re.findall(r"`(halfstep\.\w+\(model[^`]+\))`", text_of(page).replace("\n", " "))
    return found


@pytest.mark.parametrize("code", codes_in_the_text())
def test_code_in_the_text(code, monkeypatch, tmp_path):
    script = Script()
    script.names.update(halfstep=halfstep, recipe="adamw/bf16-ecc16/int8")
    script.begin()
    with surroundings(monkeypatch, tmp_path):
        script.run([code])
        if not re.search("plan|EMA|Accumulator", code):
            assert script.names["optimizer"].state


@pytest.mark.parametrize("page", PAGES)
def test_old_lines(page, monkeypatch, tmp_path):
    """Runs the lines that a user has today. Stand-ins check the arguments for packages that are not
    installed."""
    script, ran = Script(), 0
    if page in NOT_INSTALLED:
        script.names.update(STAND_INS)
    with surroundings(monkeypatch, tmp_path):
        for lines, _ in rows(page):
            package = re.match(r"(?:from|import) (\w+)", lines[0])
            if package and importlib.util.find_spec(package[1]) is None:
                if page not in NOT_INSTALLED:
                    pytest.skip(f"{package[1]} is not installed")
                continue
            try:
                script.run(lines)
            except (NotImplementedError, AssertionError) as error:
                assert NEEDS_GPU.get(page, "-") in str(error), lines
            ran += 1
    assert ran >= len(rows(page)) - 2


def saved_by(page):
    """Returns the model and the state dictionary that the first optimizer of a page leaves. Those
    of packages that do not run here are made by hand, as they save them."""
    script = Script()
    if page not in NOT_INSTALLED | {"flashoptim"}:
        for lines, _ in rows(page):
            script.run(lines)
            if "optimizer" in script.names:
                return script.names["model"], script.names["optimizer"].state_dict()
    model, states = fresh_model(), {}
    for i, p in enumerate(model.parameters()):
        m, v = torch.randn(p.shape) * 1e-3, torch.rand(p.shape) * 1e-6
        if page == "transformer-engine":
            masters = p.detach().float() * (1 + 2.0**-10 * torch.rand(p.shape))
            states[i] = {"exp_avg": m, "exp_avg_sq": v, "master_param": masters}
        elif page == "lamb16":
            m, v = (m * 100).to(torch.float8_e4m3fn), (v * 1e6).to(torch.float8_e5m2)
            scales = {"exp_avg_norm": torch.tensor(0.01), "exp_avg_sq_norm": torch.tensor(1e-6)}
            states[i] = {"step": 3, "exp_avg": m, "exp_avg_sq": v, **scales}
        elif page == "adamw-bfloat16":
            low = {"exp_avg": m, "exp_avg_sq": v, "shift": p.detach().abs() * 2**-9}
            low = {key: value.to(torch.bfloat16) for key, value in low.items()}
            states[i] = {"step": 3.0, "accumulated_decay": 1e-3, **low}
        else:
            states[i] = {"step": torch.tensor(3.0), "exp_avg": m, "exp_avg_sq": v}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    group["params"] = list(states)
    if page == "transformer-engine":
        group.update(step=3, bias_correction=True)
    return model, {"state": states, "param_groups": [group]}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.told("the loaded states are .* converted", page="torch-optimi")
def test_checkpoint(page, monkeypatch, tmp_path):
    """Runs the lines that carry a checkpoint over, and makes a step after them."""
    if page not in NOT_INSTALLED:
        pytest.importorskip(re.match(r"(?:from|import) (\w+)", rows(page)[0][0][0])[1])
    (block,) = blocks_of(page, HEADINGS[3])
    with surroundings(monkeypatch, tmp_path):
        model, state = saved_by(page)
        torch.save(state, "optimizer.pt")
        torch.save({n: p.detach().float() for n, p in model.named_parameters()}, "weights.pt")
        script = Script()
        for _, lines in rows(page):
            script.run(lines)
            if "optimizer" in script.names:
                break
        script.names["model"].load_state_dict(model.state_dict())
        block.run(script.names)
        optimizer, p = script.names["optimizer"], script.names["model"][1].weight
        steps = state["param_groups"][0].get("step", 0) if page == "transformer-engine" else 0
        steps = steps or float(next(iter(state["state"].values())).get("step", 2))
        assert steps > 1 and optimizer.state[p]["step"] == steps
        moments = [v for k, v in optimizer.state[p].items() if k.startswith(("exp_avg", "row_var"))]
        assert any(value.float().any() for value in moments)
        train(script.names["model"], optimizer, 1)
        assert optimizer.state[p]["step"] == steps + 1 and optimizer.skipped_steps == 0


def test_master_weights(monkeypatch, tmp_path):
    """The lines of the page on TransformerEngine bring back every bit of master weights, saved in
    fp32 and as remainders."""
    (block,) = blocks_of("transformer-engine", HEADINGS[3])
    with surroundings(monkeypatch, tmp_path):
        for remainders in (False, True):
            model, state = saved_by("transformer-engine")
            wanted = {i: s["master_param"].clone() for i, s in state["state"].items()}
            for p, held in zip(model.parameters(), state["state"].values()):
                pattern = held["master_param"].view(torch.int32)
                low = (pattern << 16) >> 16  # with the sign of its highest bit
                p.data = ((pattern - low) >> 16).to(torch.int16).view(torch.bfloat16)
                if remainders:
                    held["master_param"] = low.to(torch.int16)
            torch.save(state, "optimizer.pt")
            optimizer = halfstep.AdamW(model.named_parameters(), weights="bf16-ecc16", states="f32")
            block.run({"torch": torch, "optimizer": optimizer})
            for i, p in enumerate(model.parameters()):
                found = optimizer.read_weight(p)
                assert torch.equal(found.view(torch.int32), wanted[i].view(torch.int32)), i


def same_arithmetic():
    """Returns the rows of bitsandbytes' Adam, AdamW, Lion and AdEMAMix, with states in 32 bits."""
    found = []
    for (old, *_), (new, *_) in rows("bitsandbytes"):
        if re.match(r"bnb\.optim\.(Adam|AdamW|Lion|AdEMAMix)(8bit)?\(", old):
            old = re.sub("8bit|, optim_bits=8", "", old)
            found.append((old, new.replace('"int8"', '"f32"')))
    return found


@pytest.mark.parametrize("old, new", same_arithmetic())
def test_bitsandbytes_arithmetic(old, new):
    """The page says that these agree up to rounding, on float32 weights and with 32-bit states."""
    bnb = pytest.importorskip("bitsandbytes")
    ends = []
    for line in (old, new):
        weight = torch.nn.Parameter(torch.full((128, 64), 1.0))
        optimizer = eval(line, {"bnb": bnb, "halfstep": halfstep, "params": [weight]})
        for step in range(5):
            weight.grad = torch.randn(128, 64, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        ends.append(weight.detach())
    assert float((ends[0] - ends[1]).abs().max()) < 5e-6
