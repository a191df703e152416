"""Sizes far below those of their group count as its floor: what rounding leaves of a gradient may do what it likes."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection

QUANTITIES = ["gradient", "activation_grad_input", "activation_grad_output"]


def told(quantity, small, leaps_to, others=9):
    """Return the alarms where one series is small beside the others, and leaps for some steps."""
    records, random, found = Records(), np.random.default_rng(0), []
    detection, series = Detection(records.table), [(f"blocks.{i}.fc", quantity) for i in range(others)]
    for step in range(120):
        sizes = {key: float(np.exp(0.1 * random.standard_normal())) for key in series}
        sizes[series[4]] *= leaps_to if 80 <= step < 90 else small
        found += [(a.step, a.name) for a in detection.judge(records.step(step, sizes)) if a.alarm]
    return found


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize(("small", "leaps_to"), [(1e-9, 1e-6), (1e-7, 2e-5)])
def test_what_is_negligible_may_leap(quantity, small, leaps_to):
    assert told(quantity, small, leaps_to) == []


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize(("small", "leaps_to"), [(1e-7, 1e-1), (1.0, 100.0)])
def test_what_comes_up_to_the_others_is_told_of(quantity, small, leaps_to):
    assert told(quantity, small, leaps_to)[0] in [(80, "blocks.4.fc"), (81, "blocks.4.fc")]


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_a_group_of_few_series_has_no_floor(quantity):
    assert told(quantity, 1e-7, 2e-5, others=6)[0] == (80, "blocks.4.fc")
