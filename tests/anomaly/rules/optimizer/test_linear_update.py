"""An update of SGD that its gradient does not explain is told, and what float32 weights are rounded by is not."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.rules.optimizer.linear_update import LinearUpdateRule
from trainsentry.collectors.statistics import MAX, MEAN, MIN, NORM

GRADIENT, WEIGHT, UPDATE = (("norm.weight", quantity) for quantity in ("gradient", "parameter", "update"))
SGD = {"lr": 0.05, "momentum": 0.0, "dampening": 0.0, "nesterov": 0.0, "weight_decay": 0.0}
OPTIONS = {(f"option.0.0.{key}",) * 2: value for key, value in SGD.items()}
AT = 30


@pytest.mark.parametrize(("size", "told"), [(4e-8, []), (1e-6, [AT])])
def test_updates_below_a_unit_in_the_last_place_are_rounded_alike(alone, size, told):
    """As the rate falls to zero: all 16 elements lose the same, or are moved by a whole unit."""
    records, found = Records(), []
    rule = alone(LinearUpdateRule, records.table)
    for step in range(AT + 5):
        update = 0.0 if step == AT and size < 1e-7 else size
        record = records.step(
            step, {**(OPTIONS if step == 0 else {}), GRADIENT: 80 * size, WEIGHT: 4.0, UPDATE: 4 * update}
        )
        record.values[-3:, MEAN] = 20 * size, 1.0, -update + (4e-8 if step == AT and size > 1e-7 else 0.0)
        record.values[-2, [MIN, MAX]] = 0.5, 1.5
        found += [step for _ in rule(record)]
    assert found == told


@pytest.mark.parametrize(
    ("off", "range_of", "told"),
    [(2.0**-28, 1.0, []), (1e-6, 1.0, [AT]), (0.0, 1.0, []), (2.0**-24, 0.0, []), (2.0**-24, 1.0, [AT])],
)
def test_a_gain_that_hardly_moves_is_rounded_and_no_more(alone, off, range_of, told):
    """An element of 16, between a half and one, is rounded by 2^-24; all of them alike, where they are equal."""
    records, draw, found = Records(), np.random.default_rng(0), []
    rule = alone(LinearUpdateRule, records.table)
    for step in range(AT + 5):
        sizes = {GRADIENT: 4e-5, WEIGHT: 4.0, UPDATE: 2e-6}
        record = records.step(step, {**(OPTIONS if step == 0 else {}), **sizes})
        mean = 1e-7 * float(draw.standard_normal())
        record.values[-3:, MEAN] = mean, 1.0, -0.05 * mean + (off if step == AT else 0.0)
        record.values[-2, [MIN, MAX]] = 1.0 - range_of / 2, 1.0 + range_of / 2
        assert record.values[-2, NORM] == 4.0, "a root mean square of one"
        found += [step for _ in rule(record)]
    assert found == told
