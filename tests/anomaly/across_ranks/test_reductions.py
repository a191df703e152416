"""The reduced gradient is the mean of the ranks' own gradients."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.across_ranks.reductions import ReductionRule
from trainsentry.anomaly.incidents.sentence import evidence
from trainsentry.collectors.statistics import MEAN


def test_gradients_that_are_summed_where_they_were_averaged():
    tables = [Records(rank=r) for r in range(2)]
    rule = ReductionRule()
    names = [f"p{i}" for i in range(5)]
    random = np.random.default_rng(0)

    def step(number, factor):
        own = random.normal(size=(2, 5))
        for rank, records in enumerate(tables):
            record = records.step(number, {(n, q): 1.0 for q in ("gradient_unreduced", "gradient") for n in names})
            record.values[:, MEAN] = np.concatenate([own[rank], factor * own.mean(0)]) / 16
            rule.take(rank, records.table, record)
        return rule.judge(number, {0, 1})

    for number in range(15):
        assert step(number, 0.5 + random.uniform(0, 0.5)) == [], "clipping makes it smaller"
    [found] = step(15, 2.0)
    assert (found.kind, found.quantity) == ("communication_mismatch", "communication_output")
    assert found.value == pytest.approx(2.0)
    assert evidence(found).startswith(
        "the reduced gradients at step 15 are 2 times the mean of the ranks' own gradients"
    )
    assert "times; possibly summed instead of averaged" in evidence(found)
