"""Micro-steps that get one batch, though they never did, are found; who repeats a batch by design is left alone."""

import random

import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.rules.data.repeated_micro_batch import DIFFERENT_BEFORE, RepeatedMicroBatchRule
from trainsentry.collectors.statistics import VALUE


def served(batches_of, judge, records, steps):
    """Return the findings of steps, each with the batches of its micro-steps, in one record or in two."""
    found = []
    for step in range(steps):
        batches = batches_of(step)
        sizes = {("input.0", "activation_input", micro): 1.0 for micro in range(len(batches))}
        record = records.step(step, sizes)
        record.values[:, VALUE] = [1000 + batch for batch in batches]
        found += judge(record)
    return found


def fresh(step):
    return [3 * step, 3 * step + 1, 3 * step + 2]


@pytest.mark.parametrize("batches", [[7, 8, 7], [7, 7, 7], [7, 8, 8]])
def test_the_same_micro_batch_within_a_step_is_told_at_that_step(alone, batches):
    records, at = Records(), DIFFERENT_BEFORE + 5
    judge = alone(RepeatedMicroBatchRule, records.table)
    found = served(lambda step: batches if step == at else fresh(step), judge, records, at + 3)
    assert [(f.kind, f.step, f.last_clean, f.passed_on) for f in found] == [("duplicate_data", at, at - 1, False)]


@pytest.mark.parametrize("kinds", [500, 40, 3])
@pytest.mark.parametrize("seed", range(3))
def test_masks_of_a_few_samples_have_the_same_statistics_by_chance(alone, kinds, seed):
    """Then micro-batches of different steps are as often alike."""
    records, draw = Records(), random.Random(seed)
    judge = alone(RepeatedMicroBatchRule, records.table)
    assert served(lambda s: [draw.randrange(kinds) for _ in range(3)], judge, records, 2000) == []


@pytest.mark.parametrize(("kinds", "needed"), [(500, 3), (40, 7)])
def test_of_such_masks_the_same_ones_are_told_once_there_are_more_than_chance_makes(alone, kinds, needed):
    records, draw, at = Records(), random.Random(0), 1000

    def batches(step):
        drawn = [draw.randrange(kinds) for _ in range(3)]
        return drawn[:1] * 3 if step >= at else drawn

    found = served(batches, alone(RepeatedMicroBatchRule, records.table), records, at + 20)
    assert (found[0].step, found[0].last_clean) == (at, at - 1)
    assert 20 - needed - 2 <= len(found) <= 20 - needed + 1


def test_every_other_step_may_have_it(alone):
    records = Records()
    batches = lambda s: [7, 7, 8] if s >= 500 and s % 2 else fresh(s)  # noqa: E731
    found = served(
        lambda s: [b + 10**6 * s for b in batches(s)], alone(RepeatedMicroBatchRule, records.table), records, 510
    )
    assert [f.step for f in found] == [501, 503, 505, 507]


def test_a_second_input_that_is_the_same_by_chance_is_no_batch(alone):
    records, judge, found = Records(), None, []
    judge = alone(RepeatedMicroBatchRule, records.table)
    for step in range(80):
        sizes = {(name, "activation_input", micro): 1.0 for micro in range(2) for name in ("input.0", "input.lengths")}
        record = records.step(step, sizes)
        record.values[:, VALUE] = [4 * step, 7 if step % 9 == 5 else 4 * step + 1, 4 * step + 2, 7]
        found += judge(record)
    assert found == []


@pytest.mark.parametrize(
    "batches_of",
    [
        fresh,
        lambda step: [step],
        lambda step: [step // 3],  # the same in two steps is another rule's
        lambda step: [5, 5] if step % 7 == 3 else [2 * step, 2 * step + 1],
        lambda step: [step, step],
    ],
)
def test_what_was_so_from_the_start_or_differs_is_no_fault(alone, batches_of):
    records = Records()
    assert served(batches_of, alone(RepeatedMicroBatchRule, records.table), records, 80) == []


def test_the_data_is_named():
    records = Records()
    detection = Detection(records.table)
    found = served(lambda step: [1, 1] if step == 40 else fresh(step), detection.judge, records, 42)
    [told] = [a for a in found if a.detector == RepeatedMicroBatchRule.name]
    assert (told.name, told.quantity, told.step) == ("input.0", "data", 40)
