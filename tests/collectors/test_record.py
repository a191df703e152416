"""A record survives the way through the ring, whole or in parts."""

import numpy as np
import pytest

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import Layout, Series, SeriesTable
from trainsentry.collectors.statistics import COLUMNS


def record(n=10, **kwargs):
    rng = np.random.default_rng(0)
    return StepRecord(
        step=7,
        rank=3,
        ids=np.arange(n, dtype=np.int32),
        layouts=np.zeros(n, np.int32),
        values=rng.standard_normal((n, COLUMNS)),
        **kwargs,
    )


def test_decoding_gives_back_what_was_encoded():
    sent = record(first_order=5, skipped=True, examined=True, time=12.5)
    got = StepRecord.decode(b"".join(sent.encode()))
    assert (got.step, got.rank, got.first_order, got.skipped, got.examined, got.time) == (7, 3, 5, True, True, 12.5)
    np.testing.assert_array_equal(got.ids, sent.ids)
    np.testing.assert_array_equal(got.values, sent.values)


def test_nbytes_is_the_encoded_size():
    assert record().nbytes == len(b"".join(record().encode()))


@pytest.mark.parametrize("limit", [1, 200, 500, 10_000])
def test_parts_keep_every_row_with_its_order(limit):
    whole = record(first_order=4)
    parts = list(whole.parts(limit))
    orders = [p.first_order + i for p in parts for i in range(len(p))]
    assert orders == list(range(4, 14))
    np.testing.assert_array_equal(np.concatenate([p.values for p in parts]), whole.values)


def test_a_table_defined_elsewhere_gives_the_same_ids_even_when_parts_are_sent_twice():
    here, there = SeriesTable(), SeriesTable()
    for i in range(5):
        here.series_id(Series(f"p{i}", "gradient"))
        here.layout_id(Layout((i,), "float32", i))
    there.define(here.definitions(at_most=3))
    there.define(here.definitions(at_most=3))
    there.define(here.definitions(3, 3))
    assert there.series == here.series
    assert there.layouts == here.layouts
