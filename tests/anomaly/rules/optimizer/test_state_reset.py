"""Squares fall no faster than their decay allows, and counters count on."""

import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.rules.optimizer.state_reset import StateResetRule
from trainsentry.collectors.series import Layout
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


def test_an_average_whose_decay_grows_with_its_updates_falls_fast_at_first(alone, judged):
    """As of Adafactor, whose β is 1 − t^−0.8; nothing in its options tells it."""
    records, size = Records(), {0: 1.0}
    rule = alone(StateResetRule, records.table)
    for step in range(1, 40):
        size[step] = size[step - 1] * (1 - (step + 1) ** -0.8)
    assert judged(rule, records, range(40), lambda s: {WEIGHT: 1.0, SQUARES: 1e6 * size[s]}) == []


def test_squares_that_become_nan_are_not_lost(alone, judged):
    records = Records()
    rule = alone(StateResetRule, records.table)
    assert judged(rule, records, range(10), {WEIGHT: 1.0, SQUARES: 1.0}) == []
    broken = records.step(10, {WEIGHT: 1.0, SQUARES: 0.0})
    broken.values[:, NANS] = 64.0
    assert rule(broken) == [], "the norm is of the finite elements, and there are none"


STATES = {(f"{i}.weight", "exp_avg_sq"): 1.0 - 0.5 * (i % 2) for i in range(6)}


def with_counters(sizes, updates, beta=0.99):
    options = {("option.0.0.lr",) * 2: 1e-3, ("option.0.0.betas.1",) * 2: beta}
    return {**options, **{(name, "step"): float(updates) for name, _ in sizes}, **sizes}


def test_states_that_were_given_to_other_parameters_break_the_bound_of_their_decay(alone, judged):
    """As from a checkpoint that names them by number, in another order: some fall, and as many rise."""
    records = Records()
    rule = alone(StateResetRule, records.table)
    assert judged(rule, records, range(0, 50, 10), lambda s: with_counters(STATES, s + 1)) == []
    moved = {key: 1.5 - size for key, size in STATES.items()}
    found = judged(rule, records, [50], with_counters(moved, 51))
    assert [records.table.series[f.series_id].name for f in found] == ["0.weight", "2.weight", "4.weight"]
    assert judged(rule, records, [60], with_counters(moved, 61)) == []


@pytest.mark.parametrize(("updates", "beta"), [(5, 0.99), (3, 0.9), (1, 0.6)])
def test_of_several_updates_a_step_each_decays(updates, beta, alone, judged):
    """As of a critic that is updated five times for each update of the generator."""
    records = Records()
    rule = alone(StateResetRule, records.table)

    def decays(step):
        return with_counters(
            {key: size * beta ** (updates * step) for key, size in STATES.items()}, updates * step, beta
        )

    assert judged(rule, records, range(10, 100, 10), decays) == []


def test_what_is_reset_on_purpose_is_a_few_states(alone, judged):
    records = Records()
    rule = alone(StateResetRule, records.table)
    assert judged(rule, records, range(0, 50, 10), lambda s: with_counters(STATES, s + 1)) == []
    assert judged(rule, records, [50], with_counters(STATES | {("0.weight", "exp_avg_sq"): 0.1}, 51)) == []


def test_another_part_of_a_state_has_another_norm(alone, judged):
    """As after a resume on other ranks."""
    records = Records()
    rule = alone(StateResetRule, records.table)
    assert judged(rule, records, range(0, 50, 10), lambda s: with_counters(STATES, s + 1, 0.999)) == []
    half = records.step(50, with_counters({key: 0.5 * size for key, size in STATES.items()}, 51, 0.999))
    layout = records.table.layout_id(Layout((8,), "float32", 8))
    half.layouts[:] = layout
    assert rule(half) == []


def test_a_run_that_goes_back_has_the_smaller_squares_of_then(alone, judged):
    """Also where no counter tells it."""
    records = Records()
    rule = alone(StateResetRule, records.table)
    assert judged(rule, records, range(0, 101, 10), lambda s: {SQUARES: 1.0 + s}) == []
    assert judged(rule, records, range(20, 60, 10), lambda s: {SQUARES: 1.0 + s}) == []


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
