"""A value at the edge of its dtype is reported, whatever came before; scaled gradients are not."""

import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.incidents.sentence import evidence

WEIGHT = ("fc.weight", "parameter")


@pytest.mark.parametrize(
    ("dtype", "size", "reported"),
    [("float16", 40_000, False), ("float16", 70_000, True), ("float32", 1e18, False), ("float32", 1e20, True)],
)
def test_the_edge_of_the_dtype_is_reported_whatever_came_before(dtype, size, reported):
    records = Records(dtype=dtype)  # the largest element is half the size
    found = Detection(records.table).judge(records.step(0, {WEIGHT: size}))
    assert [a.kind for a in found] == (["overflow"] if reported else [])


def test_scaled_gradients_near_the_edge_of_float16_are_normal_and_weights_are_not():
    records = Records(dtype="float16")
    detection = Detection(records.table)
    sizes = {("a.input.0", "activation_grad_input"): 1.2e5, ("fc.weight", "gradient"): 1.2e5, WEIGHT: 1.2e5}
    [found] = detection.judge(records.step(0, sizes))
    assert found.quantity == "parameter"
    assert "reaches 6e+04 at step 0, above 3.28e+04, within one operation of overflowing float16" in evidence(found)
