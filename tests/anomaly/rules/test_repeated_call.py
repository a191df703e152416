"""A call that comes out otherwise is a fault where such calls came out equal before, and of no other kernel."""

import pytest
from step_records import Records

from trainsentry.anomaly.rules.repeated_call import RepeatedCallRule
from trainsentry.collectors.statistics import VALUE

NAN = float("nan")


@pytest.mark.parametrize(
    ("prefix", "values", "found"),
    [
        ("recomputed", [0, 3], [1]),
        ("recomputed", [3, 3], []),
        ("recomputed", [0, NAN, 0, 0, 3], []),
        ("recomputed_gradient", [0, 3, 0, 0, 3], [4]),
        ("recomputed_gradient", [0, 0, NAN, 0, 0, 0, 0, 3], []),
    ],
)
def test_only_what_came_out_equal_and_never_varied_is_judged(alone, prefix, values, found):
    records, name = Records(), f"{prefix}.blocks.0.fc"
    rule, told = alone(RepeatedCallRule, records.table), []
    for step, value in enumerate(values):
        record = records.step(step, {(name, name): 0.0})
        record.values[:, VALUE] = value
        told += [(step, f.quantity) for f in rule(record)]
    quantity = "activation_output" if prefix == "recomputed" else "activation_grad_input"
    assert told == [(step, quantity) for step in found]


@pytest.mark.parametrize(
    ("equal", "values", "found"),
    [(40, [NAN, NAN], [0]), (20, [NAN, NAN], []), (40, [0, NAN], [1]), (40, [2, NAN], [0, 1])],
)
def test_one_that_varies_first_among_many_repeatable_ones_is_a_fault(alone, equal, values, found):
    records, rule, told = Records(), None, []
    rule = alone(RepeatedCallRule, records.table)

    def judge(step, name, value):
        record = records.step(step, {(name, name): 0.0})
        record.values[:, VALUE] = value
        return rule(record)

    for step in range(equal):
        assert judge(step, f"recomputed.blocks.{step % 4}.fc", 0) == []
    for i, value in enumerate(values):
        told += [i] * bool(judge(equal + i, "recomputed.blocks.0.fc", value))
    assert told == found
