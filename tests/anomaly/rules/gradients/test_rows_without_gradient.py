"""A part of a table that gets no gradient any more is told; what depends on the batch, or was always so, is not."""

import pytest
from step_records import Records

from trainsentry.anomaly.rules.gradients.rows_without_gradient import RowsWithoutGradientRule
from trainsentry.collectors.series import Layout
from trainsentry.collectors.statistics import ZEROS

TABLE, DATA = ("shared.weight", "gradient"), ("input.0", "activation_input")
OTHERS = [(f"layers.{i}.weight", "gradient") for i in range(4)]
AT = 60


def run(alone, share_of, every=1, size_of=lambda _: 1000, at_once=(TABLE,)):
    """Return what is found where gradients have `share_of(step)` zeros, and the input `size_of(step)` elements."""
    records, found = Records(), []
    rule = alone(RowsWithoutGradientRule, records.table)
    keys = [*OTHERS, TABLE, DATA]
    for step in range(0, AT + 30 * every, every):
        record = records.step(step, dict.fromkeys(keys, 1.0))
        sizes = [1000] * (len(keys) - 1) + [size_of(step)]
        record.layouts[:] = [records.table.layout_id(Layout((n,), "float32", n)) for n in sizes]
        record.values[[keys.index(key) for key in at_once], ZEROS] = share_of(step)
        found += [(records.table.series[f.series_id].name, f.step, f.last_clean) for f in rule(record)]
    return found


@pytest.mark.parametrize("every", [1, 10])
def test_it_is_told_once_by_the_first_sample_with_zeros(alone, every):
    told = run(alone, lambda s: 0.12 + 0.04 * (s // every % 2) if s >= AT else 0.0, every)
    assert told == [(TABLE[0], AT, AT - every)]


def test_lengths_that_vary_hide_nothing_and_shorter_ones_than_ever_excuse(alone):
    shares = lambda s: 0.12 if s >= AT else 0.0  # noqa: E731
    assert run(alone, shares, size_of=lambda s: 900 + s % 7) != []
    assert run(alone, shares, size_of=lambda s: 1000 if s < AT else 500) == []


@pytest.mark.parametrize(
    "share_of",
    [
        lambda s: 0.12 if s >= 20 else 0.0,  # a young run
        lambda s: 0.12 if s >= AT or s == 30 else 0.0,
        lambda s: 0.12 if AT <= s < AT + 2 else 0.0,
        lambda s: 0.12 * (1 + s % 2) if s >= AT else 0.0,  # as many as the batch has it
        lambda s: 0.06 if s >= AT else 0.0,  # a silent unit
        lambda s: 0.3 if s < AT else 0.0,
    ],
)
def test_what_batches_and_units_do_is_nothing(alone, share_of):
    assert run(alone, share_of) == []


def test_most_gradients_at_once_are_a_loop_that_sparsifies(alone):
    assert run(alone, lambda s: 0.5 if s >= AT else 0.0, at_once=(*OTHERS, TABLE)) == []
