"""A tensor that stops moving while others move is named; what stays by design is not."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.rules.stale import MASK_REPEATS, REPEATS, VARIED_BEFORE, StaleRule
from trainsentry.collectors.series import Layout

GRADIENTS = [(f"layers.{i}.weight", "gradient") for i in range(4)]
MOMENTS = [(f"layers.{i}.weight", "exp_avg") for i in range(4)]
DATA = ("input.0", "activation_input")
MASK = ("input.1", "activation_input")


def noise(step, salt=0):
    return 1 + float(np.random.default_rng([step, salt]).random())


def moving(step, stuck=(), since=60):
    """Return sizes of all series at a step; those in `stuck` stay as they were at step `since`."""
    series = [*GRADIENTS, *MOMENTS, DATA]
    return {key: noise(min(step, since) if key in stuck else step, i) for i, key in enumerate(series)}


@pytest.mark.parametrize("stuck", [GRADIENTS[1], MOMENTS[2], DATA])
def test_a_series_that_repeats_while_others_move_is_told_once(alone, judged, stuck):
    records = Records()
    [found] = judged(alone(StaleRule, records.table), records, range(100), lambda s: moving(s, [stuck]))
    series = records.table.series[found.series_id]
    assert (series.name, series.quantity) == stuck
    assert (found.step, found.last_clean) == (61, 60)
    assert found.kind == ("duplicate_data" if stuck == DATA else "stale")


@pytest.mark.parametrize(("numel", "count"), [(64, 1), (16, 0)])
def test_one_gradient_that_is_that_of_the_step_before_is_told_unless_it_has_few_elements(alone, numel, count):
    records, found = Records(), []
    records.layout = records.table.layout_id(Layout((numel,), "float32", numel))
    rule = alone(StaleRule, records.table)
    for step in range(80):
        found += rule(records.step(step, moving(step, [GRADIENTS[1]] if step == 61 else [])))
    assert [f.step for f in found] == [61] * count


def test_a_mask_that_hides_as_many_elements_by_chance_is_no_repetition(alone):
    """Zeros and ones are told apart by their number alone, and a few labels nearly so."""
    for low, high, repeats, count in (
        (0, 1, 3, 0),
        (-1, 0, 3, 0),
        (-1, 1, 3, 0),
        (0, 1, MASK_REPEATS + 1, 1),
        (0, 1.5, 3, 0),  # nor are a few values that come in a few numbers
        (0, 1.5, MASK_REPEATS + 1, 1),
    ):
        records, found = Records(), []
        rule = alone(StaleRule, records.table)
        for step in range(80):
            record = records.step(step, moving(step) | {MASK: 1.0})
            ones = 5 if 60 <= step < 60 + repeats else step % 7
            values = np.where(np.arange(16) < ones, min(high, 1), low).astype(float)
            values[-1] = high
            record.values[-1, :4] = values.min(), values.max(), values.mean(), np.sqrt(np.sum(values**2))
            found += rule(record)
        assert len(found) == count


def test_labels_of_a_few_classes_have_the_same_sums_by_chance(alone):
    records, found, random = Records(), [], np.random.default_rng(0)
    rule = alone(StaleRule, records.table)
    for step in range(3000):
        record = records.step(step, moving(step) | {MASK: 1.0})
        labels = random.integers(0, 3, 24) if step < 2900 else labels  # noqa: F821 - from the step before
        record.values[-1, :4] = labels.min(), labels.max(), labels.mean(), np.sqrt(np.sum(labels**2))
        found += rule(record)
    assert [f.step for f in found] == [2900]


@pytest.mark.parametrize("share", [1 / 100, 1 / 400])
def test_flags_that_are_seldom_set_are_one_in_many_batches(alone, share):
    """As of the ends of episodes in a batch of 32: a batch without one has no norm, and the next with one follows."""
    records, found, random = Records(), [], np.random.default_rng(0)
    rule = alone(StaleRule, records.table)
    for step in range(4000):
        record = records.step(step, moving(step) | {MASK: 1.0})
        flags = random.random(32) < share
        record.values[-1, :4] = flags.min(), flags.max(), flags.mean(), np.sqrt(np.sum(flags))
        found += rule(record)
    assert found == []


def test_nothing_is_said_where_nothing_moves_or_the_gradient_is_gone(alone, judged):
    records = Records()
    rule = alone(StaleRule, records.table)
    assert judged(rule, records, range(100), lambda s: moving(s, [*GRADIENTS, *MOMENTS])) == []
    frozen = Records()
    frozen_later = lambda s: {k: v for k, v in moving(s, [MOMENTS[1]]).items() if s < 60 or k != GRADIENTS[1]}  # noqa: E731
    assert judged(alone(StaleRule, frozen.table), frozen, range(100), frozen_later) == []


def test_the_state_of_an_expert_that_had_no_tokens_for_some_steps_is_quiet(alone, judged):
    def idle(step):
        """No gradient in the steps 60 and 61: the state rests until the next one, when there is one again."""
        found = moving(step, [MOMENTS[1]] if 60 < step < 63 else [], since=60)
        return {key: value for key, value in found.items() if not (key == GRADIENTS[1] and 60 <= step < 62)}

    records = Records()
    assert judged(alone(StaleRule, records.table), records, range(100), idle) == []


@pytest.mark.parametrize(("size", "is_told"), [(1e-5, False), (1e-3, True)])
def test_a_sum_of_squares_may_rest_while_all_of_them_are_lost_in_rounding(alone, judged, size, is_told):
    """Adagrad's sum of 0.015 is the same after a square of 1e-10, not after one of 1e-6."""
    sums = [(f"layers.{i}.weight", "sum") for i in range(4)]

    def little(step):
        """The sum of one parameter rests while its gradient is small."""
        low = 60 <= step < 64
        found = moving(step) | {key: 0.015 * (1 + step + i) for i, key in enumerate(sums)}
        return found | ({GRADIENTS[1]: size * noise(step, 9), sums[1]: 0.015} if low else {})

    records = Records()
    found = judged(alone(StaleRule, records.table), records, range(80), little)
    assert [records.table.series[f.series_id].quantity for f in found] == (["sum"] if is_told else [])


def test_what_never_moved_or_repeats_by_design_is_quiet(alone, judged):
    records = Records()
    rule = alone(StaleRule, records.table)
    by_design = lambda s: {**moving(s), MASK: 1.0, DATA: noise(s // 3)}  # noqa: E731 - a loader that echoes each batch
    assert judged(rule, records, range(120), by_design) == []


def test_an_echoing_loader_that_gets_stuck_is_found(alone, judged):
    records = Records()
    rule = alone(StaleRule, records.table)
    [found] = judged(rule, records, range(120), lambda s: {DATA: noise(min(s, 90) // 3)})
    assert found.step == 91


def test_few_samples_and_zeros_are_not_judged(alone, judged):
    records = Records()
    rule = alone(StaleRule, records.table)
    early = lambda s: moving(s, [GRADIENTS[0]], since=VARIED_BEFORE - 2)  # noqa: E731
    assert judged(rule, records, range(60), early) == []
    zeros = Records()
    silent = lambda s: {**moving(s), **({GRADIENTS[0]: 0.0} if s > 50 else {})}  # noqa: E731 - an expert without tokens
    assert judged(alone(StaleRule, zeros.table), zeros, range(50 + 5 * REPEATS), silent) == []


@pytest.mark.parametrize(("is_called", "count"), [(True, 1), (False, 0)])
def test_a_buffer_rests_where_its_module_is_called_no_more(alone, is_called, count):
    """A head that is trained for a while, or a teacher."""
    buffers = [(f"heads.{i}.running_mean", "buffer") for i in range(3)]
    outputs = [(f"heads.{i}.output.0", "activation_output") for i in range(3)]
    records, found = Records(), []
    rule = alone(StaleRule, records.table)
    for step in range(60):
        called = outputs if is_called or step < 30 else outputs[:2]
        sizes = {key: noise(step, i) for i, key in enumerate([*called, *buffers])}
        sizes[buffers[2]] = noise(min(step, 29), 9)
        found += rule(records.step(step, sizes))
    assert [records.table.series[f.series_id].name for f in found] == ["heads.2.running_mean"] * count


@pytest.mark.parametrize(("follows_from_shape", "count"), [(True, 0), (False, 1)])
def test_what_follows_from_the_shape_alone_repeats_by_design(alone, follows_from_shape, count):
    """Rotary positions, where each batch is as long as its longest text; and an output that is cached by mistake."""
    outputs = [(f"layers.{i}.output.0", "activation_output") for i in range(4)]
    records, found = Records(), []
    rule, draw = alone(StaleRule, records.table), np.random.default_rng(0)
    for step in range(100):
        length = 60 if step >= 80 else int(draw.integers(50, 60 if follows_from_shape else 52))
        records.layout = records.table.layout_id(Layout((length, 8), "float32", 8 * length))
        shared = float(length) if follows_from_shape else noise(min(step, 80), 9)
        found += rule(records.step(step, {o: noise(step, i) for i, o in enumerate(outputs)} | {outputs[0]: shared}))
    assert [records.table.series[f.series_id].name for f in found] == ["layers.0.output.0"] * count
