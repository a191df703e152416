"""An output that something clamps is told by the first sample that is; bounds that a model was built with are not."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.rules.clamped import BEFORE, EQUAL, ClampedRule
from trainsentry.collectors.series import Layout
from trainsentry.collectors.statistics import MAX, MIN

OUT = ("layers.3.output.0", "activation_output")
AT = 4 * BEFORE


def run(alone, extremes, moves=lambda step: True, numel=64, dtype="float32"):
    """Return what is found; `extremes(step, largest)` gives the least and the largest element of a step."""
    records, draw, found = Records(), np.random.default_rng(0), []
    records.layout = records.table.layout_id(Layout((numel,), dtype, numel))
    rule = alone(ClampedRule, records.table)
    for step in range(AT + 20):
        record = records.step(step, {OUT: 5.0 + 0.01 * step * moves(step)})
        record.values[0, [MIN, MAX]] = extremes(step, float(draw.uniform(2, 3)))
        found += [(step, f.step, f.last_clean, f.statistic, f.value) for f in rule(record)]
    return found


@pytest.mark.parametrize(
    ("extremes", "told"),
    [
        (lambda s, x: (-x, 0.5 if s >= AT else x), ("max", 0.5)),
        (lambda s, x: (-0.7 if s >= AT else -x, x), ("min", -0.7)),
    ],
)
def test_an_output_that_is_clamped_on_one_side_is_told_once(alone, extremes, told):
    assert run(alone, extremes) == [(AT + EQUAL - 1, AT, AT - 1, *told)]


@pytest.mark.parametrize(
    "extremes",
    [
        lambda s, x: (-x, min(x, 2.5)),  # a bound of its own, which some samples reach
        lambda s, x: (-x, min(x * s / AT, 2.5)),  # and which it comes to as it learns
        lambda s, x: (0.0, x),  # a rectifier
        lambda s, x: (-x, 0.5 if s in {AT, AT + 1} else x),
        lambda s, x: (-x, 0.5 * x if s >= AT else x),
        lambda s, x: (-x, 0.0 if s >= AT else x),
        lambda s, x: (-x, 0.5 if s >= AT else 0.5 * round(2 * x) + 0.01 * (s % 9)),  # a frozen table of some values
    ],
)
def test_bounds_by_design_and_levels_say_nothing(alone, extremes):
    assert run(alone, extremes) == []


def test_an_output_that_stands_still_one_of_few_elements_and_one_of_few_bits_are_not_judged(alone):
    clamp = lambda s, x: (-x, 0.5 if s >= AT else x)  # noqa: E731
    assert run(alone, clamp, moves=lambda s: s < AT) == []
    assert run(alone, clamp, numel=8) == []
    assert run(alone, clamp, dtype="bfloat16") == []
