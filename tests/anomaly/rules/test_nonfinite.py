"""NaN and Inf are reported at once, once and where they were made; masks of Inf are not."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.incidents.sentence import evidence

NAN, INF = float("nan"), float("inf")
W = ("fc.weight", "gradient")


@pytest.mark.parametrize(("size", "statistic", "said"), [(NAN, "nans", "1 NaN value"), (INF, "infs", "1 Inf value")])
def test_a_nonfinite_value_is_reported_at_once_and_the_series_is_alive_right_after(size, statistic, said):
    records, random = Records(), np.random.default_rng(0)
    detection = Detection(records.table)

    def healthy(steps):
        sizes = (float(np.exp(0.1 * random.standard_normal())) for _ in steps)
        return [a for step, s in zip(steps, sizes, strict=True) for a in detection.judge(records.step(step, {W: s}))]

    assert healthy(range(40)) == []
    [found] = detection.judge(records.step(40, {W: size}))
    assert (found.kind, found.statistic, found.value, found.last_clean) == ("nonfinite", statistic, 1.0, 39)
    assert f"the gradient of fc.weight holds {said} at step 40" in evidence(found)
    assert healthy(range(41, 46)) == []
    [spike] = detection.judge(records.step(46, {W: 100.0}))
    assert spike.kind == "spike"


def test_a_mask_that_always_holds_inf_is_meant_to():
    records = Records()
    detection = Detection(records.table)
    mask = ("mask.output.0", "activation_output")
    for step in range(20):
        assert detection.judge(records.step(step, {mask: INF, W: 1.0})) == []
    [found] = detection.judge(records.step(20, {mask: NAN, W: 1.0}))
    assert found.name == "mask.output.0"
