"""The reduced gradient is the mean of the ranks' own gradients."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.across_ranks.reductions import ReductionRule
from trainsentry.anomaly.incidents.sentence import evidence
from trainsentry.collectors.series import Layout
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


@pytest.mark.parametrize(("held", "judged"), [
    ([[16, 16], [16, 16]], True),  # whole on both ranks
    ([[7, 0], [9, 16]], True),  # one in two parts, one on a rank alone
    ([[7, 16], [9, 16]], True),  # one in two parts, one whole on both
    ([[16, 16], [16, 0]], True),  # one on both, one on a rank alone
    ([[7, 3], [7, 3]], False),  # parts that are not all
], ids=["whole", "parts", "mixed", "alone", "missing"])  # fmt: skip
def test_a_reduced_gradient_may_lie_in_parts_on_the_ranks(held, judged):
    """Sharded training leaves some ranks nothing of a parameter; they have no row of its reduced gradient then."""
    tables, rule, names = [Records(rank=r) for r in range(2)], ReductionRule(), ["a", "b"]
    random = np.random.default_rng(0)

    def step(number, factor):
        own = random.normal(size=(2, 2))
        for rank, records in enumerate(tables):
            mine = {n: size for n, size in zip(names, held[rank], strict=True) if size}
            keys = [(n, "gradient_unreduced") for n in names] + [(n, "gradient") for n in mine]
            record = records.step(number, dict.fromkeys(keys, 1.0))
            sizes = [16, 16, *mine.values()]
            layouts = [
                records.table.layout_id(Layout((n,), "float32", n, (16,), "" if n == 16 else f"0:{n}")) for n in sizes
            ]
            record.layouts[:] = layouts
            reduced = factor * own.mean(axis=0) / 16  # alike in all elements
            record.values[:, MEAN] = [*own[rank] / 16, *(reduced[names.index(n)] for n in mine)]
            rule.take(rank, records.table, record)
        return rule.judge(number, {0, 1})

    assert not any(step(number, 1.0) for number in range(15))
    found = step(15, 2.0)
    assert [round(a.value, 6) for a in found] == ([2.0] if judged else [])
