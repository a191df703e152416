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


def outputs(records, judge, step, dtypes):
    """Judge a record of modules' outputs with these dtypes."""
    layouts = [records.table.layout_id(Layout((16,), dtype, 16)) for dtype in dtypes]
    record = records.step(step, {(f"blocks.{i}.output.0", "activation_output"): 1.0 for i in range(len(dtypes))})
    return [f for f in judge(replace(record, layouts=np.array(layouts, np.int32))) if f.kind == "dtype_change"]


def test_outputs_that_many_modules_compute_in_another_dtype_are_a_suspect_once():
    records = Records()
    judge = Detection(records.table).judge
    for step in range(4):
        assert outputs(records, judge, step, ["float32"] * 6) == []
    found = outputs(records, judge, 4, ["bfloat16", "float32"] * 3)
    assert [f.name for f in found] == ["blocks.0.output.0", "blocks.2.output.0", "blocks.4.output.0"]
    assert not any(f.alarm for f in found), "somebody may mean to begin mixed precision"
    assert "blocks.0.output.0 changes from float32 to bfloat16 at step 4" in evidence(found[0])
    for step in range(5, 10):
        assert outputs(records, judge, step, ["float32"] * 6) == []


def test_one_module_whose_output_has_another_dtype_now_and_then_is_its_own_matter():
    records = Records()
    judge = Detection(records.table).judge
    for step in range(12):
        assert outputs(records, judge, step, ["float32" if step % 5 == 4 else "bfloat16", *["bfloat16"] * 5]) == []
