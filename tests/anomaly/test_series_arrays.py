"""Arrays over series grow with the table, and keep what was written to them."""

import numpy as np
import pytest

from trainsentry.anomaly.series_arrays import Columns, SeriesArrays
from trainsentry.collectors.series import Layout, Series, SeriesTable


def test_columns_grow_together_with_their_fill_or_what_a_function_says():
    items = ["a", "bb"]
    columns = Columns(items)
    lengths = columns.column(np.int64, of=len)
    steps = columns.column(np.int64, -1)
    bounds = columns.column(np.float64, np.nan, shape=(2,))
    columns.grow()
    steps.values[1], bounds.values[:, 0] = 7, (1, 2)
    for n in range(50):
        items.append("c" * n)
        columns.grow()
        assert lengths.values.shape == steps.values.shape == bounds.values.shape[1:] == (len(items),)
    assert lengths.values.tolist() == [1, 2, *range(50)]
    assert steps.values.tolist() == [-1, 7, *[-1] * 50]
    assert bounds.values[:, 0].tolist() == [1, 2]
    assert np.isnan(bounds.values[:, 1:]).all()


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
def test_a_function_may_give_an_array_for_each_item(shape):
    columns = Columns([1.0, 2.0])
    made = columns.column(np.float32, of=lambda x: np.full(shape[-1], x), shape=shape[-1:])
    columns.grow()
    assert made.values.tolist() == [[1.0, 2.0]] * shape[-1]


def test_a_column_that_is_declared_late_has_an_element_for_each_item():
    columns = Columns([1, 2, 3])
    columns.grow()
    seen = []
    columns.before_growth(lambda first, new: seen.append((first, list(new))))
    assert columns.column(np.int64, of=lambda x: x * x).values.tolist() == [1, 4, 9]
    assert seen == [(0, [1, 2, 3])]


def test_what_is_noted_before_growth_is_known_to_functions_of_the_same_items():
    items, known = [], {}
    columns = Columns(items)
    columns.before_growth(lambda first, new: known.update({x: i for i, x in enumerate(new, first)}))
    place = columns.column(np.int64, of=lambda x: known[x])
    items += ["a", "b"]
    columns.grow()
    items += ["c"]
    columns.grow()
    assert place.values.tolist() == [0, 1, 2]


def test_series_and_layouts_of_a_table():
    table = SeriesTable()
    arrays = SeriesArrays(table)
    names = arrays.series.column(np.int64, of=lambda s: len(s.name))
    for n in range(4):
        table.series_id(Series("w" * n, "gradient"))
        table.layout_id(Layout((n,), "float32", n))
        arrays.grow()
    assert names.values.tolist() == arrays.numel.values.tolist() == [0, 1, 2, 3]


def test_what_several_rules_compute_is_made_once_for_each_table():
    arrays, other = SeriesArrays(SeriesTable()), SeriesArrays(SeriesTable())
    make = lambda of: [of]  # noqa: E731
    assert arrays.shared(make) is arrays.shared(make)
    assert (arrays.shared(make)[0], other.shared(make)[0]) == (arrays, other)


def test_growth_that_is_interrupted_goes_on_at_the_next_call():
    items = ["a"]
    columns = Columns(items)
    first, second = columns.column(np.int64, 1), columns.column(np.int64, of=_length_or_interrupt)
    columns.grow()
    items.append("stop")
    with pytest.raises(KeyboardInterrupt):
        columns.grow()
    items[1] = "bc"
    columns.grow()
    assert (first.values.tolist(), second.values.tolist()) == ([1, 1], [1, 2])


def _length_or_interrupt(item):
    if item == "stop":
        raise KeyboardInterrupt
    return len(item)
