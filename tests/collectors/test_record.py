"""A record survives the way through the ring, whole or in parts."""

import numpy as np
import pytest

from trainsentry.collectors.histogram import SLOTS, Histograms, without_empty_bins
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


def histograms(n=10):
    """Return histograms of n rows, some of them empty."""
    counts = np.random.default_rng(1).integers(0, 3, (n, SLOTS)).astype(np.uint32)
    counts[::3] = 0
    return without_empty_bins(counts)


def test_histograms_travel_with_their_rows():
    sent = record(histograms=histograms())
    data = b"".join(sent.encode())
    assert sent.nbytes == len(data)
    got = StepRecord.decode(memoryview(data))
    assert got.histograms.texts() == sent.histograms.texts()
    assert got.histograms.texts()[:4:3] == ["", ""]
    assert got.select(np.array([7, 2])).histograms.texts() == [sent.histograms.texts()[i] for i in (7, 2)]


@pytest.mark.parametrize("limit", [1, 3000, 9000, 10**6])
def test_parts_with_histograms_stay_below_their_limit_and_keep_every_row(limit):
    whole = record(histograms=histograms())
    parts = list(whole.parts(limit))
    assert [text for part in parts for text in part.histograms.texts()] == whole.histograms.texts()
    assert all(part.nbytes <= limit or len(part) == 1 for part in parts)


@pytest.mark.parametrize("change", ["shorter", "starts", "number"])
def test_histograms_that_are_torn_are_refused(change):
    good = histograms(3)
    data = bytearray(b"".join(good.encode()))
    if change == "shorter":
        del data[-1]
    elif change == "starts":
        data[4:8] = (2**31 - 1).to_bytes(4, "little")
    else:
        data[-2:] = (300).to_bytes(2, "little")
    with pytest.raises(ValueError, match="histogram"):
        Histograms.decode(bytes(data), 3)


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
