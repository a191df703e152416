"""Zeros that a mask or a rectifier makes are there at every sample, or at none."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.rules.zero_pattern import SAMPLES, SPAN, ZeroPatternRule
from trainsentry.collectors.series import Layout
from trainsentry.collectors.statistics import ZEROS

RELU, SUM = ("relu.output.0", "activation_output"), ("sum.output.0", "activation_output")
GRADIENT, DATA = ("relu.output.0", "activation_grad_output"), ("input.0", "activation_input")
OTHERS = [(f"layers.{i}.output.0", "activation_output") for i in range(4)]
AT = 10 * SAMPLES


def run(alone, zeros_of, steps=range(0, AT + 60, 10), settings=lambda _: {}, numel=lambda _: 1000, alarm=True):
    """Return the alarms, or the suspicions, over steps; `zeros_of(step)` gives the shares of zeros by series."""
    records, found = Records(), []
    rule = alone(ZeroPatternRule, records.table)
    for step in steps:
        records.layout = records.table.layout_id(Layout((numel(step),), "float32", numel(step)))
        zeros = dict.fromkeys(OTHERS, 0.0) | zeros_of(step)
        record = records.step(step, dict.fromkeys(zeros, 1.0) | settings(step))
        record.values[: len(zeros), ZEROS] = list(zeros.values())
        found += [(records.table.series[f.series_id].name, f.step, f.value) for f in rule(record) if f.alarm == alarm]
    return found


@pytest.mark.parametrize(("key", "share", "count"), [(RELU, 0.5, 1), (RELU, 0.04, 0), (GRADIENT, 0.5, 0)])
def test_zeros_that_are_gone_for_some_samples_are_told_by_the_first_of_them(alone, key, share, count):
    assert run(alone, lambda s: {key: share if s < AT else 0.0}) == [(key[0], AT, 0.0)] * count
    assert run(alone, lambda s: {key: 0.0 if s == AT else share}) == []


def test_a_mask_that_is_lost_between_two_modules_shows_in_the_input_of_the_second(alone):
    weights = "attention.drop.input.0", "activation_input"
    assert run(alone, lambda s: {weights: 0.3 if s < AT else 0.0}) == [(weights[0], AT, 0.0)]
    assert run(alone, lambda s: {weights: 0.3 if s >= AT else 0.0}) == [], "a mask that begins on purpose"


def test_the_last_healthy_sample_is_one_that_was_taken(alone):
    records = Records()
    records.layout = records.table.layout_id(Layout((1000,), "float32", 1000))
    rule, found = alone(ZeroPatternRule, records.table), []
    for step in range(0, AT + 40, 10):
        record = records.step(step, dict.fromkeys([*OTHERS, RELU], 1.0))
        record.values[:, ZEROS] = [0.0] * len(OTHERS) + [0.5 if step < AT else 0.0]
        found += rule(record)
    assert [(f.step, f.last_clean) for f in found] == [(AT, AT - 10)]


@pytest.mark.parametrize(("share", "key", "count"), [(0.08, SUM, 1), (0.04, SUM, 0), (0.08, GRADIENT, 0)])
def test_zeros_that_come_to_a_part_of_an_output_are_told(alone, share, key, count):
    """A loss may ask nothing of some samples any more, which makes zeros of gradients; few zeros vary by chance."""
    varying = 0.001 if share == 0.04 else 0.0
    found = run(alone, lambda s: {key: share + varying * (s // 10 % 2) if s >= AT else 0.0})
    assert found == [(key[0], AT, share)] * count


@pytest.mark.parametrize(("zeros", "count"), [((8,), 1), ((8, 9), 0), ((3,), 0)])
def test_few_zeros_that_come_to_an_output_are_told_where_there_are_as_many_each_time(alone, zeros, count):
    """A kernel leaves out the last row of one channel."""
    found = run(alone, lambda s: {SUM: zeros[s // 10 % len(zeros)] / 1000 if s >= AT else 0.0})
    assert found == [(SUM[0], AT, 0.008)] * count


def test_a_rectifier_that_saturates_little_by_little_leaves_out_no_edge(alone):
    """Of a GELU whose inputs grow, four elements were zero in two samples by chance, and eleven in the third."""
    counts = dict(zip(range(AT, AT + 60, 10), (4, 4, 11, 15, 15, 20), strict=True))
    assert run(alone, lambda s: {SUM: counts.get(s, 0) / 1000}) == []


def test_branches_that_are_left_out_at_random_are_no_pattern(alone):
    """Stochastic depth makes whole samples zero (Huang et al., 2016), of eight often none or one."""
    found = []
    for seed in range(40):
        draw = np.random.default_rng(seed)
        shares = {s: draw.binomial(8, 0.02 + 0.1 * seed / 40) / 8 for s in range(0, 3000, 10)}
        found += run(alone, lambda s, shares=shares: {SUM: shares[s]}, range(0, 3000, 10))
    assert len(found) <= 1


def test_what_batches_of_other_lengths_give_is_no_pattern(alone):
    draw = np.random.default_rng(0)
    assert run(alone, lambda s: {RELU: draw.uniform(0.06, 0.5) if s < AT else 0.0}) == []
    assert run(alone, lambda s: {RELU: 0.3 if s < AT else 0.0, DATA: 0.3 if s < AT else 0.0}) == []
    assert run(alone, lambda s: {RELU: 0.3 if s < AT else 0.0}, numel=lambda s: 900 + s) == []


def test_zeros_that_go_from_the_models_input_are_the_suspect_and_no_alarm(alone):
    draw = np.random.default_rng(0)
    tokens = lambda s: draw.integers(8, 40) / 1000 if s < AT else 0.0  # noqa: E731 - of one number
    zeros = lambda s: {RELU: 0.3 if s < AT else 0.0, DATA: tokens(s)}  # noqa: E731
    assert run(alone, zeros, alarm=False) == [(DATA[0], AT, 0.0)]
    assert run(alone, zeros) == []
    assert run(alone, lambda s: {DATA: (4 if s == 30 else 20) / 1000 if s < AT else 0.0}, alarm=False) == []
    assert run(alone, lambda s: {DATA: 0.0 if s < AT else tokens(0)}, alarm=False) == [], "padding"


def test_a_young_run_and_what_most_tensors_do_at_once_are_no_fault(alone):
    assert run(alone, lambda s: {RELU: 0.5 if s < SPAN - 5 else 0.0}, range(SPAN + 20)) == []
    assert run(alone, lambda s: dict.fromkeys(OTHERS, 0.5 if s < AT else 0.0)) == []


@pytest.mark.parametrize(("before", "after"), [(0.5, 0.0), (0.0, 0.5)])
def test_dropouts_that_are_switched_leave_or_bring_zeros_by_right(alone, before, after):
    switched = {(f"setting.drop{i}.p",) * 2: after for i in range(3)}
    zeros = lambda s: {RELU: before if s < AT else after}  # noqa: E731
    assert run(alone, zeros, settings=lambda s: switched if s == AT else {}) == []
    assert run(alone, zeros) != []


@pytest.mark.parametrize(
    ("kind", "is_told"),
    [
        ("lost", True),
        ("packed", False),
        ("no padding in the data", False),
        ("no padding in one of two inputs", False),
        ("one batch without", False),
        ("unknown data", False),
        ("no dropout", False),
    ],
)
@pytest.mark.parametrize(("every", "at"), [(1, 120), (10, 320)])
def test_a_mask_of_padding_that_is_lost_is_told_though_each_batch_has_another_length(alone, kind, is_told, every, at):
    weights, draw = ("attention.drop.input.0", "activation_input"), np.random.default_rng(0)
    lengths = draw.integers(5, 15, 500)
    shares = draw.uniform(0.1, 0.4, 500)

    def zeros_of(step):
        gone = step in {120, 140} if kind == "one batch without" else step >= at
        data = {DATA: 0.0 if gone and kind.startswith("no padding in") else float(shares[step])}
        if kind == "no padding in one of two inputs":
            data[("input.1", "activation_input")] = 0.5
        if kind == "unknown data":
            data = {DATA: 0.0}
        return data | ({weights: 0.0 if gone else float(shares[step])} if step % every == 0 else {})

    def numel(step):
        return 2000 if kind == "packed" and step >= at else 100 * int(lengths[step])

    def settings(step):
        switched = {(f"setting.drop{i}.p",) * 2: 0.0 for i in range(3)}
        return switched if kind == "no dropout" and step == at else {}

    found = run(alone, zeros_of, steps=range(at + 100), numel=numel, settings=settings)
    assert found == ([(weights[0], at, 0.0)] if is_told else [])
