"""A loss far below its start may leap as it has lately; one that never did, or comes near its start, is told."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.baselines.learned_loss import RECENT
from trainsentry.anomaly.detection import Detection

LOSS = ("loss", "loss")
AT = 420


def told(leaps, steps=AT + 3, swing=0.1):
    """Return the steps at which a loss that fell from 1.4 to 1e-4 is told; `leaps` are its sizes at some steps."""
    records, random, found = Records(), np.random.default_rng(0), []
    detection = Detection(records.table)
    for step in range(steps):
        usual = max(1.4 * 0.9**step, 1e-4) * float(np.exp(swing * random.standard_normal()))
        found += [a.step for a in detection.judge(records.step(step, {LOSS: leaps.get(step, usual)})) if a.alarm]
    return found


@pytest.mark.parametrize(
    ("before", "is_told"),
    [({}, True), ({AT - 40: 0.03}, False), ({AT - 40: 0.003}, True), ({AT - RECENT - 40: 0.03}, True)],
)
def test_a_leap_is_new_unless_one_like_it_came_lately(before, is_told):
    assert (AT in told({**before, AT: 0.04})) == is_told


def test_one_that_comes_near_the_start_is_told_whatever_came_before():
    assert AT in told({AT - 80: 0.1, AT - 40: 0.1, AT: 1.0})
