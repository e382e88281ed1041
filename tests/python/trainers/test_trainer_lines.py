"""Every line and block of config in docs/frameworks.md names a class that exists, and only options
of that class. Each is parsed as its trainer parses it; the trainers themselves are not needed."""

import importlib
import inspect
import re
import shlex
import sys
import types

import pytest
from common import blocks
from kohya import TRAINERS, class_and_options, parse

import halfstep


def located(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def check(cls, options):
    assert options and options.keys() <= inspect.signature(cls).parameters.keys()


@pytest.mark.parametrize("trainer", TRAINERS)
def test_lines_of_options(trainer, monkeypatch):
    monkeypatch.setitem(sys.modules, "schedulefree", types.ModuleType("schedulefree"))
    lines = blocks(trainer, "bash")
    assert lines
    for line in lines:
        args = parse(line)
        cls, options = class_and_options(trainer, args)
        check(cls, {**options, "lr": args.learning_rate})


def test_line_of_lightning():
    (line,) = blocks("Lightning CLI", "bash")
    given = dict(
        re.findall(r"^--optimizer\.?([^=]*)=(.*)", word)[0] for word in shlex.split(line)[3:]
    )
    check(located(given.pop("")), given)


def tables(text):
    """Returns a block of YAML as Hydra, torchtune and others read it."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.create(text))


@pytest.mark.parametrize(
    "trainer, key",
    [("Hydra", "_target_"), ("torchtune", "_component_"), ("NeMo Automodel", "_target_")],
)
def test_blocks_of_yaml(trainer, key):
    (block,) = blocks(trainer, "yaml")
    options = tables(block).pop("optimizer")
    check(located(options.pop(key)), options)
    assert isinstance(options["lr"], float)


def test_overrides_of_verl():
    (line,) = blocks("verl", "bash")
    words = shlex.split(line.replace("\\\n", ""))
    optim = dict(re.findall(r"^optim\.(\w+)=(.*)", "\n".join(words), flags=re.M))
    options = tables(optim["override_optimizer_config"])
    cls = located(f"{optim['optimizer_impl']}.{optim['optimizer']}")
    check(cls, {**options, "lr": optim["lr"]})


def test_lines_of_swift():
    """Its arguments are pairs between commas, on a line and in a file."""
    (line,) = [block for block in blocks("ms-swift", "bash") if "--optim_args" in block]
    words = shlex.split(line.replace("\\\n", ""))
    given = dict(pair.split("=") for pair in words[words.index("--optim_args") + 1].split(","))
    check(halfstep.AdamW, given)
    (block,) = blocks("ms-swift", "yaml")
    table = tables(block)
    assert table["optim_args"] == given
    assert table["optimizer"] == words[words.index("--optimizer") + 1]


def test_block_of_axolotl():
    options = tables(*blocks("axolotl", "yaml"))["halfstep"]
    check(located("halfstep." + options.pop("rule")), options)


def test_a_string_without_quotes_within_quotes_does_not_parse():
    with pytest.raises(ValueError, match="malformed"):
        class_and_options(
            "sd-scripts", parse("--optimizer_type=halfstep.AdamW --optimizer_args states=int8")
        )
