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


def told_of_all(gain, until, rise=40.0, at=200):
    """Return the steps at which all gradients are told; from 1.4 the loss falls to `until`, and they with it.

    At some steps all gradients rise, as by one sample that is not known by heart, and so do updates for a while.
    """
    records, random, found = Records(), np.random.default_rng(0), []
    detection = Detection(records.table)
    carried = 0.0
    for step in range(at + 40):
        loss = max(1.4 * 0.95**step, until)
        risen = rise if step in {at, at + 1, at + 6} else 1.0
        carried = 0.8 * carried + risen - 1
        swing = np.exp(0.1 * random.standard_normal(20)) * loss
        rows = {(f"w{i}", "gradient"): swing[i] * risen * gain for i in range(10)}
        rows |= {(f"w{i}", "update"): swing[10 + i] * (1 + carried) * 1e-3 for i in range(10)}
        found += [a.step for a in detection.judge(records.step(step, {LOSS: loss, **rows})) if a.alarm]
    return found


@pytest.mark.parametrize("gain", [1e-3, 1.0, 1e3])
def test_all_gradients_may_rise_to_what_they_were_where_the_loss_is_known_by_heart(gain):
    assert told_of_all(gain, until=0.03) == []
    assert told_of_all(gain, until=0.3), "a loss that still tells of the training"
    assert told_of_all(gain, until=0.03, rise=4000.0), "more than ever"


FOUND_IT = [
    1.116, 1.049, 0.945, 0.941, 0.847, 0.807, 0.544, 0.557, 0.537, 0.546, 0.569, 0.389, 0.369, 0.54, 0.238, 0.1796,
    0.111, 0.0874, 0.1963, 0.1251, 0.1788, 0.0368, 0.0941, 0.0425, 0.021, 0.0144, 0.0335, 0.0398, 0.2042,
]  # fmt: skip
"""Losses of a vision transformer that has found the solution of its task after 45 steps."""


@pytest.mark.parametrize(("before", "after", "is_told"), [
    (FOUND_IT, [0.0033, 0.0013, 0.0024, 0.0035, 0.1092], False),
    ([1.3, 1.4] * 15, [0.13, 0.1, 0.12, 0.11], True),
], ids=["by decades", "at rest"])  # fmt: skip
def test_a_loss_that_falls_by_decades_may_fall_on_and_one_that_rests_may_not(before, after, is_told):
    records, random, found = Records(), np.random.default_rng(0), []
    detection = Detection(records.table)
    for step, loss in enumerate([*(1.38 + 0.03 * random.standard_normal(45)), *before, *after]):
        found += [a.step for a in detection.judge(records.step(step, {LOSS: float(loss)})) if a.alarm]
    assert bool(found) == is_told
