"""A module that is switched to evaluation while it trains is named."""

import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.incidents.sentence import evidence
from trainsentry.collectors.statistics import VALUE


@pytest.mark.parametrize(("value", "mode"), [(0.0, "evaluation"), (1.0, "training")])
def test_a_module_that_is_switched_is_named(value, mode):
    records = Records()
    name = "training_mode.blocks.0"
    record = records.step(5, {(name, name): 0.0})
    record.values[:, VALUE] = value
    [found] = Detection(records.table).judge(record)
    assert (found.kind, found.quantity, found.alarm) == ("mode_change", "training", True)
    assert f"was switched to {mode} mode by step 5" in evidence(found)
