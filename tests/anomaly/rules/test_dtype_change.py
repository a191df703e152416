"""A tensor that changes its dtype is named."""

from dataclasses import replace

import numpy as np
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.incidents.sentence import evidence
from trainsentry.collectors.series import Layout

WEIGHT = ("fc.weight", "parameter")


def test_a_tensor_that_changes_its_dtype():
    records = Records()
    judge = Detection(records.table).judge
    for step in range(3):
        assert judge(records.step(step, {WEIGHT: 1.0})) == []
    half = np.full(1, records.table.layout_id(Layout((16,), "bfloat16", 16)), np.int32)
    [found] = judge(replace(records.step(3, {WEIGHT: 1.0}), layouts=half))
    assert (found.kind, found.statistic) == ("dtype_change", "float32→bfloat16")
    assert "the dtype of parameter fc.weight changes from float32 to bfloat16 at step 3" in evidence(found)
    assert judge(replace(records.step(4, {WEIGHT: 1.0}), layouts=half)) == []


def test_another_shape_of_the_same_dtype_is_no_change():
    records = Records()
    judge = Detection(records.table).judge
    assert judge(records.step(0, {WEIGHT: 1.0})) == []
    larger = np.full(1, records.table.layout_id(Layout((32,), "float32", 32)), np.int32)
    assert judge(replace(records.step(1, {WEIGHT: 1.0}), layouts=larger)) == []
