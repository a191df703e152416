"""A batch of one value is no data, unless it is a mask or always was so."""

import pytest
from step_records import Records

from trainsentry.anomaly.rules.data.constant_data import ConstantDataRule
from trainsentry.collectors.series import Layout
from trainsentry.collectors.statistics import MAX, MIN, ZEROS

DATA = ("input.0", "activation_input")


def records_of(numel):
    records = Records()
    records.layout = records.table.layout_id(Layout((numel,), "float32", numel))
    return records


@pytest.mark.parametrize(
    ("history", "numel", "found"),
    [((-2.0, 2.0), 256, 1), ((0.0, 9.0), 256, 1), ((0.0, 1.0), 256, 0), ((3.0, 3.0), 256, 0), ((-2.0, 2.0), 16, 0)],
    ids=["pictures", "tokens", "a mask", "constant by design", "few numbers"],
)
def test_a_batch_of_one_value_is_no_data_unless_it_is_a_mask_or_always_was_so(history, numel, found, alone):
    records = records_of(numel)
    rule = alone(ConstantDataRule, records.table)

    def seen(step, low, high):
        record = records.step(step, {DATA: 1.0})
        record.values[:, [MIN, MAX]] = low, high
        return rule(record)

    assert not [f for step in range(20) for f in seen(step, *history)]
    assert len(seen(20, 1.0, 1.0)) == found
    assert seen(21, 1.0, 1.0) == [], "reported once"
    assert seen(22, float("nan"), float("nan")) == []
    assert not [f for step in range(23, 90) for f in seen(step, *history)]
    assert seen(90, 1.0, 1.0) == [], "an input that was constant once may be"


def test_masks_after_the_data_and_inputs_that_are_mostly_zero_may_be_constant(alone):
    records = records_of(256)
    rule = alone(ConstantDataRule, records.table)
    mask = ("input.1", "activation_input")
    for step in range(40):
        record = records.step(step, {DATA: 1.0, mask: 1.0})
        record.values[:, [MIN, MAX, ZEROS]] = [[0.0, 9.0, 0.7], [-1e4, 0.0, 0.2]]
        if step == 30:
            record.values[1, [MIN, MAX, ZEROS]] = 0.0, 0.0, 1.0
        if step == 35:
            record.values[0, [MIN, MAX, ZEROS]] = 0.0, 0.0, 1.0
        assert rule(record) == []
