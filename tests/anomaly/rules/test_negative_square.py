"""Sums and means of squares cannot be negative."""

import pytest
from step_records import Records

from trainsentry.anomaly.rules.negative_square import NegativeSquareRule
from trainsentry.collectors.statistics import MIN

SQUARES = [("bn.running_var", "buffer"), ("fc.weight", "exp_avg_sq"), ("fc.weight", "square_avg")]
OTHERS = [("bn.running_mean", "buffer"), ("fc.weight", "exp_avg"), ("fc.weight", "parameter"), ("sum", "sum")]


@pytest.mark.parametrize("series", [*SQUARES, *OTHERS])
def test_a_negative_square_is_told_once_until_it_is_gone(series, alone):
    records, told = Records(), []
    rule = alone(NegativeSquareRule, records.table)
    for step, least in enumerate([0.0, 1.0, -1e-9, -2.0, 0.5, -1.0]):
        record = records.step(step, {series: 1.0})
        record.values[:, MIN] = least
        told += [(step, f.value) for f in rule(record)]
    assert told == ([(2, -1e-9), (5, -1.0)] if series in SQUARES else [])
