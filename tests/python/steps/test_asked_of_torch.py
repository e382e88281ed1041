"""Tests what the package asks of torch beside tensors: calls that are followed, version counters.
Also tests its warnings: the line and the package that they name, and that tests notice them."""

import ast
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
from conftest import OURS, no_other_warnings, warnings_are

import halfstep
from halfstep._tensors.torch_public import (
    VERSION,
    caller,
    follow,
    increment_versions,
    warn,
    warn_once,
)

WARN = "warnings.warn"


class Theirs:
    def scale(self, x, *, by=2):
        """Theirs."""
        return x * by


def test_a_method_is_followed_once():
    seen = []

    def then(one, found, /, x, by=None):
        seen.append((type(one), found, x, by))
        return -found

    plain, signature = Theirs.scale, inspect.signature(Theirs.scale)
    follow(Theirs, "scale", then)
    follow(Theirs, "scale", then)
    follow(Theirs, "missing", then)
    try:
        assert Theirs().scale(3) == -6 and Theirs().scale(x=3, by=5) == -15
        assert seen == [(Theirs, 6, 3, None), (Theirs, 15, 3, 5)]
        assert Theirs.scale.__doc__ == "Theirs." and inspect.signature(Theirs.scale) == signature
        assert not hasattr(Theirs, "missing")
    finally:
        Theirs.scale = plain


def test_a_class_that_inherits_is_followed_by_its_base():
    class Base(Theirs):
        pass

    follow(Base, "scale", lambda one, found, *args, **kwargs: None)
    assert Base().scale(3) == 6


def test_a_followed_method_that_raises():
    class Fails:
        def scale(self):
            raise KeyError("theirs")

    follow(Fails, "scale", lambda one, found: pytest.fail("there is nothing to follow"))
    with pytest.raises(KeyError, match="theirs"):
        Fails().scale()


def test_version_counters():
    tensors = [torch.ones(3), torch.ones(())]
    before = [t._version for t in tensors]
    increment_versions(tensors)
    increment_versions([])
    assert [t._version for t in tensors] == [n + 1 for n in before]


def test_a_warning_names_the_line_outside_of_the_package():
    with warnings_are("always") as said:
        warnings.warn("here", stacklevel=caller())
    assert said[0].filename == __file__


def test_texts_name_the_package_once():
    """A text begins with the name where an error is made. warn() puts it before all others."""
    wrong, made = [], 0
    for path in Path(halfstep.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call):
                continue
            name = ast.unparse(call.func)
            texts = [
                part.value
                for given in call.args
                for part in (given, *getattr(given, "values", ()))
                if isinstance(part, ast.Constant) and OURS in str(part.value)
            ]
            if re.search("(Error|print)$", name) or (path.name, name) == ("torch_public.py", WARN):
                made += len(texts)
                texts = [text for text in texts if text.rindex(OURS)]
            if texts or (name == WARN and path.name != "torch_public.py"):
                wrong.append(f"{path.name}:{call.lineno}: {ast.unparse(call)}")
    assert made > 200 and not wrong, "\n".join(wrong)


@pytest.mark.parametrize("say", [warn, warn_once])
def test_a_warning_that_nothing_expects_fails_its_test(say):
    for _ in range(2):  # also one that another test was given
        with pytest.raises(AssertionError, match=r"UserWarning: halfstep: a text"):
            with no_other_warnings(), warnings_are("ignore"):
                say("a text")
    with no_other_warnings(), pytest.warns(UserWarning, match="^halfstep: a text"):
        say("a text")


def test_warnings_of_others_go_on():
    with pytest.warns(DeprecationWarning, match="^a text") as said, no_other_warnings():
        warnings.warn("a text", DeprecationWarning)
    assert [w.filename for w in said] == [__file__]
    with pytest.raises(AssertionError, match="a text"), no_other_warnings():
        warnings.warn_explicit("a text", DeprecationWarning, halfstep.__file__, 1)


def test_version_of_torch():
    assert VERSION >= (2, 1) and torch.__version__.startswith("{}.{}.".format(*VERSION))
