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


FULL = 2 * 65504.0
"""The size whose largest element is float16's largest value."""


def test_where_results_saturate_the_largest_value_of_a_dtype_is_an_overflow():
    records = Records("float16")
    rule = OverflowRule(records.table, lambda: True)
    assert rule.judge(records.step(0, {G: 1.0, OUT: FULL})) is None  # a mask that held it from the start
    assert rule.judge(records.step(1, {G: FULL - 64, OUT: FULL})) is None
    assert list(rule.judge(records.step(2, {G: FULL, OUT: FULL})).rows) == [0]
    assert rule.count == 1
    elsewhere = Records("float16")
    assert OverflowRule(elsewhere.table).judge(elsewhere.step(0, {G: FULL})) is None


def test_a_devices_flag_counts_and_other_scalars_do_not():
    records = Records()
    rule = OverflowRule(records.table)
    flag = ("overflow_flag", "overflow_flag")
    assert rule.judge(records.step(0, {G: 1.0, flag: 0.0, ("loss", "loss"): 9.0})) is None
    assert rule.judge(records.step(1, {G: 1.0, flag: 1.0})) is not None
    assert rule.judge(records.step(2, {G: 1.0, flag: 1.0}, skipped=True)).skipped
    assert (rule.count, rule.skipped) == (1, 1)
