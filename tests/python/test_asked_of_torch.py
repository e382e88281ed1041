"""Tests what the package asks of torch beside tensors: calls that are followed, version counters,
and the line that a warning names."""

import inspect
import warnings

import pytest
import torch
from conftest import warnings_are

from halfstep._torch import VERSION, caller, follow, increment_versions


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


def test_version_of_torch():
    assert VERSION >= (2, 1) and torch.__version__.startswith("{}.{}.".format(*VERSION))
