"""Copies within a batch are told where batches had none."""

import pytest
from step_records import Records

from trainsentry.anomaly.rules.data.repeated_samples import SAMPLES_BEFORE, RepeatedSamplesRule

SHARE = ("repeated_samples.input.0", "repeated_samples.input.0")
AT = 10 * SAMPLES_BEFORE


def run(alone, share):
    records = Records()
    rule = alone(RepeatedSamplesRule, records.table)
    return [f for step in range(0, AT + 60, 10) for f in rule(records.step(step, {SHARE: share(step)}))]


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_many_copies_are_told_once_by_their_first_step(alone, share):
    [found] = run(alone, lambda step: share if step >= AT else 0.0)
    assert (found.step, found.name, found.quantity, found.kind) == (AT, "input.0", "data", "duplicate_data")
    assert found.last_clean == AT - 10


@pytest.mark.parametrize(
    "share",
    [
        lambda s: 0.5,  # two views of each sample, by design
        lambda s: 0.5 if s == AT else 0.0,
        lambda s: 0.1 if s >= AT else 0.0,
        lambda s: 0.3 if s >= 30 else 0.0,
    ],
)
def test_copies_by_design_one_batch_and_a_few_copies_are_not_told(alone, share):
    assert run(alone, share) == []
