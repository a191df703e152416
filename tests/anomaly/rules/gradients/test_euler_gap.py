"""A backward pass that stops fitting its module is found; modules that never had the identity are not."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.rules.gradients.euler_gap import EulerGapRule
from trainsentry.collectors.series import Series

STEPS, FAULT = 40, 30


def run(alone, gaps, sides=("weight", "input")):
    """Return the findings; `gaps(side, step)` is the gap of a side of the module `a.fc`, in each step."""
    records, found = Records(), []
    for side in sides:
        name = f"euler_gap.a.fc.{side}"
        records.table.series_id(Series(name, name, module="a.fc", scalar=True))
    rule = alone(EulerGapRule, records.table)
    for step in range(STEPS):
        record = records.step(step, {})
        rows = [Records.row(gaps(side, step), True) for side in sides]
        record = type(record)(
            step, 0, np.arange(2, dtype=np.int32), np.full(2, records.layout, np.int32), np.asarray(rows)
        )
        found += rule(record)
    return found


def after(value, sides=("weight", "input"), before=1e-7):
    return lambda side, step: value if step >= FAULT and side in sides else before


@pytest.mark.parametrize(
    ("sides", "name", "quantity"),
    [
        (("weight",), "a.fc.weight", "gradient"),
        (("input",), "a.fc.input.0", "activation_grad_input"),
        (("weight", "input"), "a.fc.output.0", "activation_output"),
    ],
)
def test_the_side_that_parts_is_named_and_the_output_where_both_do(alone, sides, name, quantity):
    found = run(alone, after(0.4, sides))
    assert {(f.name, f.quantity, f.kind) for f in found} == {(name, quantity, "gradient_flow")}
    assert found[0].last_clean == FAULT - 1
    assert len(found) == STEPS - FAULT


def test_gradients_that_do_not_fit_each_other_are_of_the_module(alone):
    found = run(alone, after(0.4, ("gradients",)), sides=("gradients", "other"))
    assert {(f.name, f.statistic) for f in found} == {("a.fc.input.0", "gap of both")}


@pytest.mark.parametrize(("before", "value"), [(4e-3, 0.09), (1e-7, 0.03)], ids=["bfloat16", "autocast begins"])
def test_rounding_of_another_size_is_none(alone, before, value):
    assert run(alone, after(value, before=before)) == []


def test_a_module_without_the_identity_is_never_judged(alone):
    rng = np.random.default_rng(0)
    assert run(alone, lambda *_: float(abs(rng.normal()))) == []


def test_a_gap_that_grows_with_its_inputs_is_no_fault(alone):
    """As that of tanh, which is linear where they are small."""
    assert run(alone, lambda _, step: 1e-6 * 1.5**step) == []


def test_an_identity_that_has_held_twice_only_is_not_known(alone):
    assert run(alone, lambda _, step: 1e-7 if step < 2 else 0.5) == []


def test_what_is_not_finite_says_nothing(alone):
    assert run(alone, after(float("nan"))) == []
