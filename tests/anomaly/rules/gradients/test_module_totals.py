"""What each module gets in a step is added up over its calls and records, once however many rules ask."""

import pytest
from step_records import Records

from trainsentry.anomaly.rules.gradients.module_totals import ModuleTotals
from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.series_arrays import SeriesArrays
from trainsentry.anomaly.series_facts import SeriesFacts
from trainsentry.collectors.statistics import MEAN

OUTPUT, AGAIN = ("fc.output.0", "activation_grad_output"), ("fc@1.output.0", "activation_grad_output")
INPUT, GRADIENT, OTHER = ("fc.input.0", "activation_input"), ("fc.bias", "gradient"), ("head.bias", "gradient")


@pytest.fixture
def ended():
    """Return what takes the sizes of a record, twice, and returns what ended by it."""
    records = Records()
    arrays = SeriesArrays(records.table)
    facts, totals = SeriesFacts(arrays), arrays.shared(ModuleTotals)

    def take(step, sizes, **flags):
        record = records.step(step, sizes, **flags)
        record.values[:, MEAN] = [size / 2 for size in sizes.values()]
        arrays.grow()
        none = facts.judged[record.where] & False
        observed = Observed(record, records.table, facts, arrays.numel.values[record.layouts], none, none)
        first = totals.ended_by(observed)
        assert totals.ended_by(observed) is first
        return first

    return take


def test_a_step_in_parts_is_added_up_once_over_calls(ended):
    assert ended(3, {INPUT: 3.0, OUTPUT: 4.0}) is None
    assert ended(3, {INPUT: 4.0, AGAIN: 2.0, GRADIENT: 6.0, OTHER: 1.0}, first_order=2) is None
    given = ended(4, {GRADIENT: 1.0})
    assert (given.step, given.orders.tolist(), given.parts.tolist()) == (3, [4], [2]), "the head got nothing"
    assert (given.sums.tolist(), given.norms.tolist()) == ([16 * 3.0], [6.0])
    assert (given.output_sums.tolist(), given.output_squares.tolist()) == ([16 * 3.0], [20.0])
    assert given.input_squares.tolist() == [25.0]
    assert ended(5, {OUTPUT: 1.0, GRADIENT: 1.0}) is None, "step 4 sampled no activations"
    assert ended(6, {}).output_sums.tolist() == [8.0], "and step 5 begins anew"


def test_a_step_that_the_loss_scaler_skipped_gives_nothing(ended):
    assert ended(0, {OUTPUT: 1.0, GRADIENT: 1.0}, skipped=True) is None
    assert ended(1, {}) is None
