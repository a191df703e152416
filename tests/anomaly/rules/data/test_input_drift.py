"""Data do not learn: what drifts in them is the pipeline's fault, and a new size is the first suspect."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.rules.data.input_drift import BETWEEN, NEWEST, PAST, SETTLED, InputDriftRule
from trainsentry.collectors.series import Layout
from trainsentry.collectors.statistics import ZEROS

DATA = ("input.0", "activation_input")
AT = PAST + BETWEEN + NEWEST


def run(alone, size, steps=AT + 40, numel=lambda step: 64):
    records, draw, found = Records(), np.random.default_rng(0), []
    rule = alone(InputDriftRule, records.table)
    for step in range(steps):
        records.layout = records.table.layout_id(Layout((numel(step),), "float32", numel(step)))
        noise = np.exp(0.02 * draw.standard_normal()) * np.sqrt(numel(step))
        found += rule(records.step(step, {DATA: size(step) * noise}))
    return found


@pytest.mark.parametrize("rate", [0.95, 1.06])
def test_a_gain_that_fades_or_grows_is_told_within_twenty_steps(alone, rate):
    found = run(alone, lambda s: 5.0 * rate ** max(s - AT, 0), steps=AT + 20)
    assert [f.alarm for f in found] == [True]
    assert AT - 3 <= found[0].step <= AT + 6


@pytest.mark.parametrize(
    "size",
    [
        lambda s: 5.0,
        lambda s: 5.0 * 1.001**s,
        lambda s: 5.0 if s < AT else 2.0,  # a leap, which its level tells
        lambda s: 5.0 + 2 * np.sin(s / 3),
    ],
)
def test_what_stays_swings_leaps_or_changes_slowly_is_not_told(alone, size):
    assert run(alone, size, steps=3 * AT) == []


def test_observations_that_follow_a_policy_may_leave_their_range(alone):
    """Four updates use each rollout, and the poles fall less often as it learns."""
    draw = np.random.default_rng(1)
    rollouts = np.exp(0.1 * draw.standard_normal(AT))
    assert run(alone, lambda s: 5.0 * rollouts[s // 4] * 0.95 ** max(s - AT, 0), steps=AT + 40) == []


@pytest.mark.parametrize("numel", [1, 64])
def test_an_input_that_follows_the_training_does_not_silence_another(alone, numel):
    """As its progress does, or a curriculum."""
    records, draw, found = Records(), np.random.default_rng(0), []
    rule, progress = alone(InputDriftRule, records.table), ("input.1", "activation_input")
    other = records.table.layout_id(Layout((numel,), "float32", numel))
    for step in range(200):
        noise = np.exp(0.02 * draw.standard_normal())
        sizes = {DATA: 5.0 * noise * 0.94 ** max(step - 150, 0), progress: 3.0 * 0.999**step}
        record = records.step(step, sizes)
        record.layouts[1] = other
        found += [records.table.series[f.series_id].name for f in rule(record) if f.alarm]
    assert DATA[0] in found


def test_a_size_that_none_had_is_a_suspicion_and_one_that_was_had_is_none(alone):
    found = run(alone, lambda s: 5.0, numel=lambda s: 8 if s >= SETTLED + 9 else 64 if s % 2 else 48)
    assert [(f.statistic, f.value, f.expected, f.alarm) for f in found] == [("size", 8, 48, False)]
    assert run(alone, lambda s: 5.0, numel=lambda s: 48 + s // 4) == []


@pytest.mark.parametrize(("longer", "told"), [((16, 16), [("dimension_1", 16, 8, False)]), ((28, 9), [])])
def test_a_length_that_none_had_is_a_suspicion_whatever_the_size(alone, longer, told):
    records, found = Records(), []
    rule = alone(InputDriftRule, records.table)
    for step in range(SETTLED + 20):
        shape = longer if step == SETTLED + 9 else (32, 8)
        records.layout = records.table.layout_id(Layout(shape, "int64", 256))
        found += rule(records.step(step, {DATA: 5.0}))
    assert [(f.statistic, f.value, f.expected, f.alarm) for f in found] == told
    for finding in found:
        anomaly = Anomaly(25, 0, 0, 0, "input.0", "data", *(finding.statistic, 16.0, 8.0, 50.0, "input_drift", "shift"))
        said = "dimension 1 of input.0 is 16 long at step 25, longer than the 8 of any step before"
        assert InputDriftRule.sentence(anomaly, "input.0") == said


@pytest.mark.parametrize(
    ("share", "numel", "dtype", "told"),
    [
        (lambda s: 0.5 if s >= AT and s % 4 == 0 else 0.0, 256, "float32", [AT]),
        (lambda s: 0.5 if s >= AT and s % 4 == 0 else 0.0, 64, "float32", []),  # noise levels
        (lambda s: 0.5 if s >= AT and s % 4 == 0 else 0.0, 256, "int64", []),  # classes
        (lambda s: 0.5 if s == AT else 0.0, 256, "float32", []),
        (lambda s: 0.5 if s >= AT and s % 9 == 0 else 0.0, 256, "float32", []),
        (lambda s: 0.5 if s == 20 or (s >= AT and s % 4 == 0) else 0.0, 256, "float32", []),  # now and then, by design
        (lambda s: 0.05 if s >= AT else 0.0, 256, "float32", []),
    ],
)
def test_several_batches_that_are_partly_zero_are_told_once_by_the_first(alone, share, numel, dtype, told):
    records, draw, found = Records(), np.random.default_rng(0), []
    records.layout = records.table.layout_id(Layout((numel,), dtype, numel))
    rule = alone(InputDriftRule, records.table)
    for step in range(AT + 90):
        record = records.step(step, {DATA: 5.0 * np.exp(0.02 * draw.standard_normal())})
        record.values[:, ZEROS] = share(step) if step < AT + 30 or step > AT + 70 else 0.0
        found += rule(record)
    assert [(f.step, f.statistic) for f in found] == [(step, "zeros") for step in told]


def test_a_run_that_goes_back_begins_anew(alone):
    records = Records()
    rule = alone(InputDriftRule, records.table)
    steps = [*range(AT), *range(20)]
    assert [f for s in steps for f in rule(records.step(s, {DATA: 5.0 if s > 20 else 2.0}))] == []
