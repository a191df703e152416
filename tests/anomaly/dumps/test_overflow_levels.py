"""Marks of overflow tell a call that makes NaN or Inf from one that passes it on."""

import math

import pytest

from trainsentry.anomaly.dumps.overflow_levels import overflow_level


def value(most=1.0, norm=1.0):
    return {"dtype": "torch.float32", "shape": [2], "Max": most, "Min": 0.0, "Norm": norm}


GOOD, BAD, LARGE, ZERO = value(), value(math.inf), value(norm=101.0), value(norm=0.0)


@pytest.mark.parametrize(
    ("inputs", "results", "level"),
    [
        ([GOOD], [GOOD], None),
        ([GOOD], [BAD], "critical"),
        ([BAD], [BAD], "high"),
        ([BAD], [GOOD], "medium"),
        ([GOOD], [LARGE], "high"),
        ([ZERO], [LARGE], "high"),
        ([], [LARGE], None),
        ([[GOOD, BAD]], [GOOD], "medium"),
        ([None, 3, "x"], {"a": 1}, None),
    ],
)
def test_the_level_follows_from_inputs_and_results(inputs, results, level):
    assert overflow_level("Torch.exp.0.forward", {"input_args": inputs, "output": results}) == level
    assert overflow_level("Module.fc.Linear.backward.0", {"input": inputs, "output": results}) == level


def test_named_arguments_count_as_inputs():
    assert overflow_level("Torch.exp.0.forward", {"input_kwargs": {"x": BAD}, "output": [BAD]}) == "high"


def test_unwritten_memory_and_buffers_that_are_overwritten_mean_nothing():
    assert overflow_level("Torch.empty.0.forward", {"output": [BAD]}) is None
    assert overflow_level("Distributed.recv.0.forward", {"input_args": [BAD], "output": [GOOD]}) is None
    assert overflow_level("Distributed.recv.0.forward", {"input_args": [GOOD, BAD], "output": [GOOD]}) == "medium"


@pytest.mark.parametrize("entry", [None, [], {"input_args": 3, "output": "x", "input_kwargs": 1}])
def test_an_entry_of_another_form_has_no_level(entry):
    assert overflow_level("Torch.exp.0.forward", entry) is None
