"""Variances cannot be negative."""

import pytest
from step_records import Records

from trainsentry.anomaly.rules.buffers.negative_variance import NegativeVarianceRule
from trainsentry.collectors.statistics import MIN

VARIANCES = [("bn.running_var", "buffer"), ("bn.moving_variance", "buffer")]
OTHERS = [("bn.running_mean", "buffer"), ("fc.weight", "parameter"), ("fc.weight", "exp_avg_sq")]


@pytest.mark.parametrize("series", [*VARIANCES, *OTHERS])
def test_a_negative_variance_is_told_once_until_it_is_gone(series, alone):
    records, told = Records(), []
    rule = alone(NegativeVarianceRule, records.table)
    for step, least in enumerate([0.0, 1.0, -1e-9, -2.0, 0.5, -1.0]):
        record = records.step(step, {series: 1.0})
        record.values[:, MIN] = least
        told += [(step, f.value) for f in rule(record)]
    assert told == ([(2, -1e-9), (5, -1.0)] if series in VARIANCES else [])
