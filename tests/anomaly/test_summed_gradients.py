"""Where the gradient after each micro-step was read, rules see the one that the optimizer uses."""

import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.series_arrays import SeriesArrays
from trainsentry.anomaly.summed_gradients import SummedGradients


@pytest.fixture
def records():
    return Records()


def last_of(records, sizes):
    arrays = SeriesArrays(records.table)
    sums = SummedGradients(arrays)
    record = records.step(3, sizes)
    arrays.grow()
    seen, rows = sums.last_of(record)
    series = [records.table.series[i] for i in seen.ids.tolist()]
    return [(s.name, s.quantity, s.micro_step) for s in series], seen.values[:, 3].tolist(), rows


def test_the_last_gradient_of_each_parameter_stands_under_the_first_micro_step(records):
    sizes = {("b", "gradient"): 1.0, ("a", "gradient"): 2.0, ("b", "gradient", 1): 3.0, ("a", "parameter"): 4.0}
    names, norms, rows = last_of(records, sizes)
    assert names == [("a", "gradient", 0), ("b", "gradient", 0), ("a", "parameter", 0)]
    assert (norms, rows.tolist()) == ([2.0, 3.0, 4.0], [1, 2, 3])


def test_one_gradient_a_parameter_is_left_as_it_is(records):
    names, _, rows = last_of(records, {("a", "gradient"): 1.0, ("a", "parameter"): 2.0, ("loss", "loss", 1): 3.0})
    assert rows is None
    assert len(names) == 3


def test_an_expert_without_a_token_in_any_first_micro_step_is_left_out_until_it_has_one(records):
    assert last_of(records, {("e", "gradient", 2): 1.0, ("a", "gradient"): 2.0})[0] == [("a", "gradient", 0)]
    assert last_of(records, {("e", "gradient"): 1.0})[0] == [("e", "gradient", 0)]
    assert last_of(records, {("e", "gradient", 2): 1.0})[0] == [("e", "gradient", 0)]


def test_what_is_found_has_the_place_of_its_row_in_the_step(records):
    detection = Detection(records.table, per_micro_step=True)
    sizes = {("b", "gradient"): 1.0, ("a", "gradient"): 2.0, ("b", "gradient", 1): float("nan")}
    [found] = detection.judge(records.step(0, sizes))
    assert (found.name, found.order) == ("b", 2)
