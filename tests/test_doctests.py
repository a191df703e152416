"""Every example in a docstring is true."""

import doctest
import importlib
import pkgutil
from importlib.util import find_spec

import pytest

import trainsentry

HERE = {name for name in ("torch", "mindspore") if find_spec(name) is not None}
MODULES = [
    m.name
    for m in pkgutil.walk_packages(trainsentry.__path__, "trainsentry.")
    if not m.name.endswith("__main__") and ("mindspore" not in m.name or "mindspore" in HERE)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
