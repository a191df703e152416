"""Squares fall no faster than their decay allows, and counters count on."""

import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.rules.optimizer.state_reset import StateResetRule
from trainsentry.collectors.statistics import MIN, NANS

SQUARES, WEIGHT = ("fc.weight", "exp_avg_sq"), ("fc.weight", "parameter")


def test_squares_fall_no_faster_than_their_decay(alone, judged):
    records = Records()
    rule = alone(StateResetRule, records.table)
    assert judged(rule, records, range(30), lambda s: {WEIGHT: 1.0, SQUARES: 0.95**s}) == []
    assert [f.kind for f in judged(rule, records, [30], {WEIGHT: 1.0, SQUARES: 1e-3})] == ["state_reset"]
    assert judged(rule, records, [31], {WEIGHT: 1.0, SQUARES: 1e-3}) == []
    record = records.step(32, {WEIGHT: 1.0, SQUARES: 1e-3})
    record.values[:, MIN] = -1e-9
    assert [f.statistic for f in rule(record)] == ["min"], "and are not negative"


def test_squares_that_become_nan_are_not_lost(alone, judged):
    records = Records()
    rule = alone(StateResetRule, records.table)
    assert judged(rule, records, range(10), {WEIGHT: 1.0, SQUARES: 1.0}) == []
    broken = records.step(10, {WEIGHT: 1.0, SQUARES: 0.0})
    broken.values[:, NANS] = 64.0
    assert rule(broken) == [], "the norm is of the finite elements, and there are none"


def test_states_that_were_given_to_other_parameters_break_the_bound_of_their_decay(alone, judged):
    """As from a checkpoint that names them by number, in another order: some fall, and as many rise."""
    sizes = {(f"{i}.weight", "exp_avg_sq"): 1.0 - 0.5 * (i % 2) for i in range(6)}
    betas = {("option.0.0.lr", "option.0.0.lr"): 1e-3, ("option.0.0.betas.1", "option.0.0.betas.1"): 0.99}
    records = Records()
    rule = alone(StateResetRule, records.table)
    assert judged(rule, records, range(0, 50, 10), {**betas, **sizes}) == []
    moved = {**betas, **{key: 1.5 - size for key, size in sizes.items()}}
    found = judged(rule, records, [50], moved)
    assert [records.table.series[f.series_id].name for f in found] == ["0.weight", "2.weight", "4.weight"]
    assert judged(rule, records, [60], moved) == []


def test_a_run_that_is_rolled_back_after_a_divergence_has_smaller_squares(alone, judged):
    records = Records()
    rule = alone(StateResetRule, records.table)
    counter = ("fc.weight", "step")
    assert judged(rule, records, range(0, 101, 10), lambda s: {counter: s + 1.0, SQUARES: 1.0 + s**4}) == []
    assert judged(rule, records, [110], {counter: 51.0, SQUARES: 1.0}) == []


@pytest.mark.parametrize(("count", "is_found"), [(7, True), (40, False), (111, False)])
def test_a_counter_that_starts_over_is_lost_state_and_one_that_is_rolled_back_is_not(count, is_found, alone, judged):
    records = Records()
    rule = alone(StateResetRule, records.table)
    counter = ("fc.weight", "step")
    assert judged(rule, records, range(0, 101, 10), lambda s: {counter: s + 1.0}) == []
    found = judged(rule, records, [110], {counter: float(count)})
    assert [(f.kind, f.expected, f.quantity) for f in found] == (
        [("state_reset", 111.0, "optimizer")] if is_found else []
    )


def test_the_counter_of_a_run_that_is_rolled_back_gives_no_alarm():
    counters = [(f"layers.{i}.weight", "step") for i in range(10)]
    records = Records()
    detection = Detection(records.table)
    for step in range(90):
        count = step + 1.0 if step < 70 else step - 40.0
        assert detection.judge(records.step(step, dict.fromkeys(counters, count))) == []
