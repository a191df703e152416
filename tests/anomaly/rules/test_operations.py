"""Another operation or constant of a forward pass is an alarm with its step; what moves or passes is none."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.rules.operations import OperationsRule
from trainsentry.collectors.series import MOVED_ARGUMENT, OTHER_ARGUMENT, OTHER_OPERATIONS, PASSING
from trainsentry.collectors.statistics import MIN

GELU = "operations.mlp: approximate of gelu: none → tanh"
ADD = "operations: without add"


def judge(alone, told, every=1):
    """Return the findings of 100 steps; `told` has for a step the names, the kind and the passes lasted."""
    records = Records()
    rule, found = alone(OperationsRule, records.table), []
    for step in range(100):
        names, kind, lasted = told.get(step, ((), 0.0, 0))
        sampled = {("mlp.output.0", "activation_output"): 1.0} if step % every == 0 or names else {}
        record = records.step(step, {**sampled, **{(name, name): kind for name in names}})
        record.values[len(sampled) :, MIN] = lasted
        found += rule(record)
    return found


@pytest.mark.parametrize(("kind", "name"), [(OTHER_ARGUMENT, GELU), (OTHER_OPERATIONS, f"operations.mlp: {ADD}")])
def test_what_has_lasted_is_an_alarm_at_its_first_step(alone, kind, name):
    told = {60: ((name,), PASSING, 1), 61: ((name,), kind, 2)}
    first, second = judge(alone, told)
    assert (first.alarm, first.step, first.last_clean) == (False, 60, 59)
    assert (second.alarm, second.step, second.last_clean) == (True, 60, 59)
    assert (second.name, second.quantity) == ("mlp.output.0", "activation_output")
    assert judge(alone, told, every=10)[1].last_clean == 50


def test_a_number_that_moved_explains_and_makes_no_alarm(alone):
    [found] = judge(alone, {60: (("operations.mlp: factor of mul: 1 → 0.99",), MOVED_ARGUMENT, 2)})
    assert not found.alarm


@pytest.mark.parametrize(("modules", "is_alarm"), [(2, True), (3, False)])
def test_other_operations_of_many_modules_are_switched_on_purpose(alone, modules, is_alarm):
    names = tuple(f"operations.blocks.{i}: {ADD}" for i in range(modules))
    assert {found.alarm for found in judge(alone, {60: (names, OTHER_OPERATIONS, 3)})} == {is_alarm}
    names = tuple(f"operations.blocks.{i}: factor of mul: 1 → 2" for i in range(modules))
    assert {found.alarm for found in judge(alone, {60: (names, OTHER_ARGUMENT, 2)})} == {True}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("approximate of gelu: none → tanh", "approximate of gelu is tanh, and was none"),
        ("operations: with relu, without gelu", "it has other operations (with relu, without gelu)"),
    ],
)
def test_the_sentence_says_what_was_changed(change, says):
    anomaly = Anomaly(
        60, 0, 0, 0, "mlp.output.0", "activation_output", change, 2.0, np.nan, 60.0, "option_change", "operations"
    )
    assert OperationsRule.sentence(anomaly, "mlp") == f"mlp is computed otherwise at step 60: {says}"
