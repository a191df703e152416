"""Rows that do not belong to their batch are named; healthy batches have none."""

import numpy as np
import pytest

from trainsentry.anomaly.rules.data.batch_rows import BatchRowsRule, odd_rows
from trainsentry.collectors.shared.batch_rows import InputRows


def batch(values, floating=True):
    values = np.asarray(values, np.float64)
    finite = np.isfinite(values)
    kept = np.where(finite, values, 0.0)
    count = finite.sum(1)
    low, high = np.where(finite, values, np.inf).min(1), np.where(finite, values, -np.inf).max(1)
    rows = np.stack((values.shape[1] - count, low, high, kept.sum(1) / count, np.sqrt((kept**2).sum(1) / count)), 1)
    return InputRows("input.0", 0, values.shape[1], floating, rows)


@pytest.fixture
def values():
    return np.random.default_rng(0).normal(size=(16, 40))


def test_rows_with_nan_are_named(values):
    values[3, 5], values[9, 0] = np.nan, np.inf
    odd = odd_rows(batch(values))
    assert odd.words == "rows 3 and 9 of 16 hold NaN or Inf"
    assert (odd.kind, odd.rows.tolist()) == ("nonfinite", [3, 9])


def test_a_row_of_another_size_is_named_with_its_factor(values):
    values[5] *= 300
    assert odd_rows(batch(values)).words.startswith("row 5 of 16 is 3")
    values[5] /= 300 * 300
    assert "times smaller than usual" in odd_rows(batch(values)).words


def test_a_row_of_one_repeated_value_is_named(values):
    tokens = np.random.default_rng(0).integers(0, 30, (8, 20))
    tokens[2] = 7
    assert odd_rows(batch(tokens, floating=False)).words == "every element of row 2 of 8 is the same"


def test_a_batch_of_one_sample_is_told(values):
    values[2:] = values[0]
    assert odd_rows(batch(values)).words.endswith("of 16 rows (0, 2, 3, 4, 5, 6, 7, 8, …) are equal")


@pytest.mark.parametrize("seed", range(20))
def test_healthy_batches_have_no_odd_rows(seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 40, 16)
    padded = np.where(np.arange(40) < lengths[:, None], random.integers(1, 9, (16, 40)), 0)
    wild = random.normal(size=(16, 40)) * random.lognormal(0, 0.7, (16, 1))
    for values, floating in (
        (random.normal(size=(16, 40)), True),
        (wild, True),
        (padded, False),
        (random.uniform(size=(16, 1)), True),
        (np.repeat(random.normal(size=(8, 40)), 2, axis=0), True),
        (np.zeros((16, 40)), True),
        (random.normal(size=(2, 40)), True),
    ):
        assert odd_rows(batch(values, floating)) is None


def test_of_single_numbers_one_may_be_near_zero_by_chance_and_none_may_be_far_larger():
    """As the times of a diffusion model are."""
    random = np.random.default_rng(0)
    times = random.integers(1, 1000, (2000, 16, 1)).astype(float)
    assert [odd_rows(batch(each)) for each in times] == [None] * len(times)
    times[0, 5] = 1e6
    assert odd_rows(batch(times[0])).words.startswith("row 5 of 16 is")


def test_the_anomaly_is_of_the_data_at_the_step_of_the_batch(values):
    values[5] *= 300
    [found] = BatchRowsRule.judge(40, 1, [batch(values)])
    assert (found.step, found.rank, found.name, found.quantity, found.order) == (40, 1, "input.0", "data", 0)
    said = BatchRowsRule.sentence(found, "")
    assert said.startswith("in the batch of step 40, row 5 of 16 is ")
    assert said.endswith("(data input.0)")


def test_what_is_odd_in_other_batches_too_is_so_by_design():
    places = batch(np.tile(np.arange(40.0), (16, 1)), floating=False)
    assert odd_rows(places) is not None
    assert BatchRowsRule.judge(40, 0, [places], [places]) == []


def test_a_padding_mask_has_no_odd_rows():
    mask = np.arange(40) < np.random.default_rng(0).integers(10, 39, 16)[:, None]
    mask[3] = True
    assert odd_rows(batch(mask, floating=False)) is None
