"""Runs the code of all documents as a reader would (documents.py): README.md, tutorials, guides,
the manuals, and blocks of C. docs/frameworks.md and docs/coming-from have tests of their own."""

import functools
import os
import re
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import torch
from documents import (
    CRASH_OF_GLOO,
    ROOT,
    Wrong,
    agree,
    blocks,
    parse,
    run_page,
    text_of,
    write_file,
)

import halfstep


def pages(pattern):
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))


#: pages that are run as a reader would, in a folder
COMMANDS = [*pages("docs/start/*.md"), *pages("docs/tutorials/*.md"), "docs/guides/c-trainer.md"]
#: pages whose blocks of Python go on from those above, and make an optimizer
SCRIPTS = [
    "docs/guides/ema.md",
    "docs/guides/muon.md",
    "docs/guides/offload.md",
    "docs/guides/release-and-accumulation.md",
    "docs/guides/resume.md",
    "docs/python.md",
]
#: pages whose code is run by tests below
BELOW = ["README.md", "docs/guides/low-precision.md", "docs/guides/many-processes.md"]
BELOW += ["docs/c.md", "docs/gpu.md", "docs/guides/7b-on-24gb.md"]
#: pages whose code other tests run
ELSEWHERE = {
    "docs/checkpoints.md": "files/test_optimizer_files.py",
    "docs/formats.md": "files/test_convert.py",
    "docs/frameworks.md": "trainers/test_frameworks.py",
    **{page: "docs/test_coming_from.py" for page in pages("docs/coming-from/*.md")},
}
FLAGS = "-std=c11 -Wall -Wextra -Werror -Wpedantic -Wno-missing-field-initializers".split()


def test_all_code_is_run():
    """Every page with a block that can be run is in one of the lists above."""
    listed = {*COMMANDS, *SCRIPTS, *BELOW, *ELSEWHERE}
    for page in [*pages("*.md"), *pages("docs/**/*.md"), *pages("bench/*.md")]:
        if page not in listed:
            runs = [b for b in blocks(page) if b.title or b.language in ("python", "c", "console")]
            assert not runs, f"{page}:{runs[0].line}: no test runs this block"
    for page, test in ELSEWHERE.items():
        assert page.split("/")[1].removesuffix(".md") in text_of(f"tests/python/{test}"), page


def started(page, names=None):
    """Runs the Python of a page, and returns the names that it has made."""
    names = {} if names is None else names
    for block in blocks(page, "python"):
        block.run(names)
    return names


# ---- Python --------------------------------------------------------------------------------------


def test_readme(capsys):
    found = blocks("README.md", "python")
    assert found
    for block in found:
        assert block.run()["opt"].param_groups[0]["group_steps"] == 3
        assert "adamw/bf16-sr/int8" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("page", SCRIPTS)
def test_script(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert any(isinstance(value, halfstep.Optimizer) for value in started(page).values())


def test_muon_prints_what_the_guide_shows(capsys):
    shown, *_ = blocks("docs/guides/muon.md", "")
    blocks("docs/guides/muon.md", "python")[0].run()
    assert shown.text.startswith("Muon: ") and shown.text in capsys.readouterr().out


def run_rank(rank, size, page):
    """Runs a page's script in a rank, which is in a group already."""
    group = {"init_process_group": lambda *_: None, "destroy_process_group": lambda: None}
    with mock.patch.multiple(torch.distributed, **group):
        opt = started(page)["opt"]
    local = [p.to_local().float().sum().item() for p in opt.param_groups[0]["params"]]
    return opt.param_groups[0]["group_steps"], opt.grad_norm, local


def test_many_processes(pool):
    page = "docs/guides/many-processes.md"
    (steps, norm, first), (same_steps, same_norm, second) = pool.run(2, run_rank, page)
    assert steps == same_steps == 3 and norm == same_norm > 0 and first != second


@pytest.fixture
def given(tmp_path):
    """Makes what the guide to 7 B takes as given: the folder of a model, and batches of tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    batches = [torch.randint(256, (1, 32)) for _ in range(3)]
    return {"folder": str(tmp_path), "batches": batches, "model": model, "halfstep": halfstep}


def loss_of(given):
    tokens = given["batches"][0]
    return given["model"](input_ids=tokens, labels=tokens).loss


def block_of_7b(i):
    return blocks("docs/guides/7b-on-24gb.md", "python")[i]


def test_fit_of_7b_on_24gb(capsys):
    block_of_7b(0).run({"Model": lambda: torch.nn.Embedding(64, 64)})
    assert "ways fit into 24.00 GiB" in " ".join(capsys.readouterr().out.split())


def test_7b_on_24gb(given):
    before = given["model"].model.layers[0].mlp.up_proj.weight.detach().clone()
    block_of_7b(1).run(given)
    after = given["model"].model.layers[0].mlp.up_proj.weight
    assert given["optimizer"].param_groups[0]["group_steps"] == 3
    assert after.grad is None and not torch.equal(before, after)


@pytest.mark.parametrize("block", [2, 3])
def test_other_ways_of_7b_on_24gb(given, block):
    block_of_7b(block).run(given)
    before = loss_of(given).item()
    for _ in range(20):
        loss_of(given).backward()
        given["optimizer"].step()
        given["optimizer"].zero_grad()
    assert loss_of(given).item() < before


def test_a_twin_sees_what_the_guide_says(capsys):
    """The script of the guide prints the table of the guide, for each format of weights."""
    page = "docs/guides/low-precision.md"
    row = r"^\| `(\S+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$"
    rows = re.findall(row, text_of(page), re.M)
    assert [row[0] for row in rows] == ["bf16", "bf16-sr", "bf16-ecc8"]
    script, spread = blocks(page, "python")
    code = script.text
    for name, *numbers in rows:
        script.text = code.replace('weights="bf16-sr"', f'weights="{name}"')
        given = script.run()
        assert list(given["twin"].report().values()) == pytest.approx(
            list(map(float, numbers)), abs=0.01
        )
    spread.run(given)
    assert "2.weight 0.0" in capsys.readouterr().out
    # Blocks with one large gradient are found.
    p, optimizer = given["model"][2].weight, given["optimizer"]
    v = torch.ones(p.shape)
    v[:, 0] = 1e5
    optimizer.write_state(p, "exp_avg_sq", v)
    assert given["spread"](optimizer, p) == 1 / (p.shape[1] / 32)


# ---- Commands and C ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Returns the variables of a shell in which package, program and C library are installed."""
    build = os.environ.get("HALFSTEP_BUILD")
    if not (build and os.path.exists(os.path.join(build, "halfstep"))):
        pytest.skip("the program is not built, or HALFSTEP_BUILD does not say where")
    if not shutil.which("cmake"):
        pytest.skip("cmake is not installed")
    prefix = tmp_path_factory.mktemp("installed")
    subprocess.run(
        ["cmake", "--install", build, "--prefix", str(prefix)], check=True, stdout=subprocess.PIPE
    )
    library = next(prefix.glob("**/libhalfstep.so")).parent
    python = os.path.dirname(os.path.abspath(sys.executable))
    path = os.pathsep.join([python, str(prefix / "bin"), os.environ["PATH"]])
    return {
        **os.environ,
        "PATH": path,
        "HALFSTEP_SOURCE": str(ROOT.resolve()),
        "PKG_CONFIG_PATH": str(library / "pkgconfig"),
        "LD_LIBRARY_PATH": str(library),
        "CMAKE_PREFIX_PATH": str(prefix),
        "TORCH_EXTENSIONS_DIR": os.path.join(build, "torch_extensions"),
    }


@pytest.fixture(scope="module")
def outcome(environment, tmp_path_factory):
    """Returns a function that runs a page once, and returns its folder and what run_page() does."""

    @functools.cache
    def run(page):
        folder = tmp_path_factory.mktemp("page")
        return folder, run_page(text_of(page), folder, environment)

    return run


def of_tiers(page):
    """Long pages run in the second tier. Those of short C programs run in the first."""
    short = page.endswith(("c-trainer.md", "first-c-program.md"))
    return page if short else pytest.param(page, marks=pytest.mark.all)


@pytest.mark.parametrize("page", [*map(of_tiers, COMMANDS)])
def test_page(page, outcome):
    outcome(page)


@pytest.mark.parametrize("page", COMMANDS)
def test_blocks_that_are_not_run(page):
    """Is "skipped" for a page with such blocks, so that the report of a run names them. Fails if a
    page breaks the rules."""
    reasons = [block.reason for block in parse(text_of(page)) if block.reason]
    if reasons:
        pytest.skip(f"{page}: {len(reasons)} blocks are not run: {'; '.join(reasons)}")


@pytest.mark.all
def test_finetune_moves_weights_as_the_page_says(outcome):
    output = "".join(output for *_, output in outcome("docs/tutorials/finetune.md")[1])
    gains = [float(a) - float(b) for a, b in re.findall(r"^loss (\S+) -> (\S+)$", output, re.M)]
    moved = [float(share) for share in re.findall(r"^(\S+) % of the weights", output, re.M)]
    fp32, bf16, ours = gains
    assert abs(ours - fp32) < 0.1 * fp32 and bf16 < 0.5 * fp32
    assert moved[0] > 99 and moved[1] < 25 and moved[2] > 60
    held = [float(b) for b in re.findall(r"^(\S+) bytes per parameter$", output, re.M)]
    assert held == pytest.approx([16, 8, 6.15], abs=0.03)
    assert re.search(r"^(\d+) of \1 tensors have the same bits$", output, re.M)


def test_first_c_program_is_that_of_the_header(outcome):
    """It prints a weight near 1, after a step from 1."""
    (program,) = (b.text for b in blocks("docs/start/first-c-program.md", "c") if b.title)
    header = text_of("include/halfstep.h")
    comment = "".join(line[5:] + "\n" for line in header.splitlines()[:40])
    assert program in comment and program.count("\n") <= 25
    assert 0.5 < float(outcome("docs/start/first-c-program.md")[1][-1][2]) < 1.2


def test_c_trainer_has_one_loss_and_resumes(outcome, environment):
    """The trainer with the library has in fp32 the losses of the trainer without it, which the page
    prints. A run that ends and goes on has the bits of one that does not."""
    folder, printed = outcome("docs/guides/c-trainer.md")
    losses = []
    for command, page, output in printed[2:]:
        losses += [float(line.split()[1]) for line in [*page, *output.splitlines()]]
    assert len(losses) == 12 and losses == pytest.approx(2 * 2 * losses[:3], abs=2e-6)

    def train(name, *ends):
        (folder / name).mkdir()
        for end in ends:
            command = [folder / "after", "adamw/bf16-sr/int8", *end]
            done = subprocess.run(
                command, cwd=folder / name, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            yield from (float(line.split()[1]) for line in done.stdout.splitlines())

    whole = list(train("whole", []))
    assert whole == pytest.approx(losses[:3], abs=2e-3)
    assert list(train("halves", ["100"], [])) == whole
    for file in ("model", "optimizer"):
        file = f"run/{file}.safetensors"
        assert (folder / "whole" / file).read_bytes() == (folder / "halves" / file).read_bytes()


def compiled(folder, *files):
    """Compiles files without a warning, and links them with the libraries if there are any."""
    if not shutil.which("cc"):
        pytest.skip("cc is not installed")
    include, build = ROOT / "include", os.environ.get("HALFSTEP_BUILD", ".")
    done = subprocess.run(
        ["cc", *FLAGS, f"-I{include}", *files, f"-L{build}", "-lhalfstep_io", "-lhalfstep"],
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [page for page in COMMANDS if blocks(page, "c")])
def test_c_of_pages_compiles_without_a_warning(page, tmp_path):
    files = [block for block in blocks(page, "c") if block.title]
    for block in files:
        write_file(block, tmp_path)
    compiled(tmp_path, "-c", *(block.title for block in files if block.title.endswith(".c")))


#: what stands before and after the blocks of C of a page, to make a program of them
C = {
    "README.md": (
        """static uint16_t w[1024 * 4096];
void *weights[] = {w};
const void *gradients[] = {w};
""",
        "return 0;",
    ),
    "docs/gpu.md": (
        """void *stream = NULL, *weights[] = {NULL};
const void *gradients[] = {NULL};
halfstep_optimizer *opt;
""",
        "return code;",
    ),
    "docs/c.md": (
        """static float w[4096];
void *weights[] = {w};
uint64_t step = 7;
halfstep_optimizer *opt;
int32_t index;
halfstep_tensor t = {sizeof t, .name = "w", .gradient = "f32", .ndim = 2, .rows = 64,
                     .row_length = 64};
if (halfstep_create(NULL, &opt) || halfstep_add_group(opt, "adamw", &index)) return 2;
if (halfstep_add_tensor(opt, &t, &index) || halfstep_allocate_states(opt)) return 2;
w[5] = 3;
""",
        "return code || w[5] != 3;",
    ),
}


@pytest.mark.parametrize("page", C)
def test_blocks_of_c(page, environment, tmp_path):
    """The blocks of a page compile as one program, which ends well. That of docs/c.md saves an
    optimizer and its weight, and loads both. That of docs/gpu.md needs a GPU, and is not run."""
    start, end = C[page]
    texts = [re.sub("^#include .*\n", "", block.text, flags=re.M) for block in blocks(page, "c")]
    between = "w[5] = 0;\n" if page == "docs/c.md" else ""
    lines = ["#include <halfstep_io.h>", "#include <stdio.h>", "#include <stdlib.h>"]
    lines += ["int main(void)", "{", start, between.join(texts), end, "}"]
    (tmp_path / "page.c").write_text("\n".join(lines) + "\n", encoding="utf-8")
    compiled(tmp_path, "page.c", "-o", "page")
    if page != "docs/gpu.md":
        command = [tmp_path / "page"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/checkpoint-7").exists() == (page == "docs/c.md")


# ---- The rules of documents.py -------------------------------------------------------------------

PAGE = """# A page

```text title="words/a.txt"
one 5 two
```

```console
$ cat words/a.txt
one 1,234.5e-6 two
$ printf 'first\\nx\\ny\\nlast bf16\\n'
first
...
last bf16
$ echo one \\
  two
one two
```

<!-- not run: it would end the test -->
```console
$ exit 1
```

```python
an example for reading only
```
"""


def test_a_sound_page(tmp_path):
    printed = run_page(PAGE, tmp_path, os.environ)
    output = "".join(output for *_, output in printed)
    assert output == "one 5 two\nfirst\nx\ny\nlast bf16\none two\n"


@pytest.mark.parametrize(
    "right,wrong,words",
    [
        ("one 1,234.5e-6 two", "one 5 three", "The page says:\none 5 three"),
        ("last bf16\n$", "last bf32\n$", "last bf32"),
        ("first\n...\n", "first\n", "It printed:\nfirst\nx"),
        ("first\n...\n", "...\nfirst\n", "It printed:\nfirst\nx"),
        ("one two\n", "one two\nmore\n", "more"),
        ("$ cat words/a.txt", "$ cat words/b.txt", "ends with status 1"),
        ("<!-- not run: it would end the test -->\n", "", "ends with status 1"),
        ("run: it would end the test", "run:", "write <!-- not run: REASON -->"),
        ("run: it would end the test", "run", "write <!-- not run: REASON -->"),
        ("-->\n```", "-->\n\n```", "a block must follow"),
        ("$ cat", "cat", "and not with '$ '"),
        ("reading only\n```", "reading only", "does not end"),
        ("words/a.txt", "../a.txt", "outside the page's folder"),
    ],
)
def test_a_page_with_a_mistake(right, wrong, words, tmp_path):
    assert right in PAGE
    with pytest.raises(Wrong, match=re.escape(words)):
        run_page(PAGE.replace(right, wrong), tmp_path / "page", os.environ)


def test_a_crash_of_gloo_is_tried_once_more(tmp_path):
    crash = f"echo run >>runs; echo {CRASH_OF_GLOO}; [ $(wc -l <runs) -ge {{}} ]"
    printed = run_page(f"```console\n$ {crash.format(2)}\n```\n", tmp_path, os.environ)
    assert printed[0][2] == CRASH_OF_GLOO + "\n"
    with pytest.raises(Wrong, match="ends with status 1"):
        run_page(f"```console\n$ {crash.format(5)}\n```\n", tmp_path, os.environ)
    assert (tmp_path / "runs").read_text() == 4 * "run\n"


@pytest.mark.parametrize(
    "wanted,given,same",
    [
        ("loss 5.25", "loss   -0.1e-3", True),
        ("loss 5.25", "loss nan", False),
        ("12,345 of 2 (7%)", "1 of 44,000 (0.2%)", True),
        ("hash 2b2c51eb6dcd964b", "hash 04062bd627d69ff1", True),
        ("hash 2b2c51eb6dcd964b", "hash none", False),
        ("ok: 5 (...)", "ok: 2939 (avx512 kernels, 2 threads)", True),
        ("ok: 5 (...)", "ok: 5", False),
        ("adamw/bf16-sr/int8 6.13", "adamw/bf16-sr/int4 5.13", False),
        ("a\nb", "a\n\nb\n", True),
        ("a\nb", "b\na", False),
        ("...\nb", "a\nb\nb", True),
        ("a\n...\nc", "a\nb\nc\nd", False),
        ("...", "", True),
    ],
)
def test_lines_agree(wanted, given, same):
    assert agree(wanted.splitlines(), given.splitlines()) is same
