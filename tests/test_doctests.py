"""Every example in a docstring is true."""

import doctest
import importlib
import pkgutil

import pytest

import trainsentry

MODULES = [
    m.name for m in pkgutil.walk_packages(trainsentry.__path__, "trainsentry.") if not m.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
