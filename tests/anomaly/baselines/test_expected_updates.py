"""What an optimizer does by its nature is no odd update: Adam's answer to a rare gradient, a rate of 0, rounding."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.collectors.series import Layout
from trainsentry.collectors.statistics import MAX, MEAN, MIN, NORM, VALUE, ZEROS

RATE = ("optimizer_learning_rate", "optimizer_learning_rate")
UPDATES = [(f"blocks.{i}.fc.weight", "update") for i in range(6)]
AT = 120


def told(change, *, largest=0.5, ratio=1e-3, rate=lambda step: 1e-3, steps=AT + 6):
    """Return who is alarmed of from `AT` on; `change(row, step)` changes the row of one update."""
    records, random, found = Records(), np.random.default_rng(0), []
    records.layout = records.table.layout_id(Layout((64, 64), "float32", 4096))
    detection = Detection(records.table)
    for step in range(steps):
        record = records.step(step, {**dict.fromkeys(UPDATES, 1.0), RATE: rate(step)})
        for row in record.values[: len(UPDATES)]:
            size = 1e-3 * float(np.exp(0.1 * random.standard_normal()))
            row[[MIN, MAX, NORM, VALUE]] = -largest * size, largest * size, 64 * 0.2 * largest * size, ratio
        change(record.values[2], step)
        found += [a for a in detection.judge(record) if a.alarm and a.step >= AT]
    return {a.name for a in found}


@pytest.mark.parametrize(
    ("largest", "leaps_to", "is_told"),
    [(0.5, 3.2, False), (0.5, 40.0, True), (0.01, 1.0, True)],
    ids=["Adam", "far", "SGD"],
)
def test_an_element_may_come_up_to_what_adam_answers_a_rare_gradient_by(largest, leaps_to, is_told):
    def leap(row, step):
        if step == AT:
            row[MAX] = leaps_to * 1e-3

    assert (UPDATES[2][0] in told(leap, largest=largest)) == is_told


def vanish(row, _step=AT):
    row[[MIN, MAX, NORM, MEAN, VALUE]], row[ZEROS] = 0.0, 1.0


@pytest.mark.parametrize(("ratio", "is_told"), [(1e-3, True), (1e-6, False)])
def test_rounding_may_take_an_update_of_a_few_units_in_the_last_place(ratio, is_told):
    assert bool(told(lambda row, step: vanish(row) if step >= AT else None, ratio=ratio)) == is_told


def rests(step):
    return 0.0 if step in (AT, AT + 1) else 1e-3


def test_updates_are_nothing_where_the_rate_is():
    assert told(lambda row, step: vanish(row) if rests(step) == 0 else None, rate=rests, steps=AT + 2) == set()


@pytest.mark.parametrize(("at", "is_told"), [(AT, False), (AT + 1, False), (AT + 2, True)])
def test_updates_are_judged_again_with_the_first_rate_that_is_none(at, is_told):
    def leap(row, step):
        if step == at:
            row[[MIN, MAX, NORM]] *= 100.0

    assert bool(told(leap, rate=rests)) == is_told
