"""The map of a suspect's values shows the one value that broke, however long the run."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.collectors.histogram import counts_of, edges_of, without_empty_bins
from trainsentry.exporters.csv.reader import read_steps, table_files
from trainsentry.exporters.csv.table_rows import RowKeys
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.report import suspect_histograms
from trainsentry.exporters.report.figures import step_axis
from trainsentry.exporters.report.histogram_maps import MAX_COLUMNS, histogram_figure, histogram_map
from trainsentry.exporters.report.suspect_histograms import SuspectHistograms

NAME = "fc.weight"
BROKEN = 60.0


def kept_of(folder, steps, broken_at):
    records = Records()
    writer = CsvWriter(folder, records.table, ("norm",), histograms=True)
    usual = np.random.default_rng(0).standard_normal(2000) * 0.02
    for step in range(steps):
        values = np.append(usual, BROKEN) if step == broken_at else usual
        histograms = without_empty_bins(np.stack([counts_of(values), counts_of(usual)]))
        sizes = {(NAME, "parameter"): 1.0, ("other", "parameter"): 1.0}
        writer.write(records.step(step, sizes, histograms=histograms))
    writer.close()
    kept, keys = SuspectHistograms([NAME]), RowKeys()
    for rows in read_steps(table_files(folder)["parameter"], keys, lambda *problem: pytest.fail(str(problem))):
        kept.take(rows, keys)
    return kept.found()


@pytest.mark.parametrize("most", [1600, 50])
def test_one_value_at_one_step_of_a_long_run_stays(tmp_path, monkeypatch, most):
    monkeypatch.setattr(suspect_histograms, "MAX_KEPT", most)
    found = kept_of(tmp_path, 700, broken_at=433)
    assert set(found) == {NAME}
    assert len(found[NAME]) <= 1600
    shown = histogram_map(found[NAME])
    assert shown.shares.shape[1] <= MAX_COLUMNS
    top = shown.shares[-1]
    low, high = edges_of(shown.first + len(shown.shares) - 1 + shown.smallest - 1)
    assert low <= BROKEN < high
    (column,) = np.flatnonzero(~np.isnan(top))
    assert shown.steps[column] == 433
    assert top[column] == pytest.approx(1 / 2001)


def test_shares_of_a_column_add_up_and_small_values_share_the_row_of_zero():
    values = np.array([1.0] * 500 + [-2.0] * 499 + [1e-9])
    histograms = without_empty_bins(counts_of(values)[None])
    shown = histogram_map([(3, tuple(part.tolist() for part in histograms.row(0)))])
    assert shown.steps == [3]
    assert np.nansum(shown.shares) == pytest.approx(1.0)
    assert shown.shares[-shown.first, 0] == pytest.approx(1e-3)
    assert len(shown.shares) == 7  # -2, its neighbours towards 1, 0, and 1


def test_a_tensor_of_zeros_has_a_figure():
    histograms = without_empty_bins(counts_of(np.zeros(9))[None])
    shown = histogram_map([(0, tuple(part.tolist() for part in histograms.row(0)))])
    assert histogram_figure(shown, [], step_axis(0, 1)) is not None
