"""A learning rate far above all before it is named; a restart of its schedule is not."""

from step_records import Records

from trainsentry.anomaly.rules.optimizer.learning_rate import LearningRateRule

RATE = ("learning_rate", "learning_rate")


def test_a_learning_rate_above_all_before_and_a_restart_of_its_schedule(alone, judged):
    records = Records()
    rule = alone(LearningRateRule, records.table)
    warm_up = lambda s: {RATE: min(s + 1, 20) * 1e-4}  # noqa: E731
    assert judged(rule, records, range(40), warm_up) == []
    assert judged(rule, records, range(40, 50), {RATE: 1e-5}) == []
    assert judged(rule, records, [50], {RATE: 2e-3}) == [], "back to an earlier rate"
    [found] = judged(rule, records, [51], {RATE: 6e-2})
    assert (found.kind, found.value) == ("update_size", 6e-2)


def test_the_optimizers_own_rate_is_judged_beside_the_one_that_is_logged(alone, judged):
    records = Records()
    rule, again = alone(LearningRateRule, records.table), alone(LearningRateRule, records.table)
    own = ("optimizer_learning_rate", "optimizer_learning_rate")
    assert judged(rule, records, range(20), {RATE: 1e-3, own: 1e-3}) == []
    again.rule.load(rule.rule.saved(0))
    [found] = judged(again, records, [20], {RATE: 1e-3, own: 3e-2})
    assert (found.kind, found.value, records.table.series[found.series_id].name) == ("update_size", 3e-2, own[0])
