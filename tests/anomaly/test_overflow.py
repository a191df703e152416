"""Steps with an overflow are counted once; those that the scaler skipped are counted apart."""

from step_records import Records

from trainsentry.anomaly.overflow import OverflowRule

INF = float("inf")
G, OUT, IN = ("p", "gradient"), ("m.output.0", "activation_output"), ("m.input.0", "activation_input")


def test_a_step_counts_once_however_many_parts_and_series():
    records = Records()
    rule = OverflowRule(records.table)
    assert rule.judge(records.step(0, {G: 1.0, OUT: 1.0})) is None
    assert len(rule.judge(records.step(1, {G: INF, OUT: INF})).rows) == 2
    assert rule.judge(records.step(1, {G: INF})) is not None
    assert rule.count == 1


def test_skipped_steps_inputs_and_scalars_do_not_count():
    records = Records()
    rule = OverflowRule(records.table)
    rule.judge(records.step(0, {G: 1.0, IN: 1.0, ("loss", "loss"): 1.0}))
    assert rule.judge(records.step(1, {G: INF}, skipped=True)).skipped
    assert rule.judge(records.step(2, {IN: INF, ("loss", "loss"): INF})) is None
    assert (rule.count, rule.skipped) == (0, 1)
