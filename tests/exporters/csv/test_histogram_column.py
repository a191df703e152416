"""A table's histograms read back as they were counted: from CSV, line by line, and from Parquet."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.collectors.histogram import SLOTS, as_text, counts_of, parse, without_empty_bins
from trainsentry.exporters.csv.finished_blocks import compact
from trainsentry.exporters.csv.reader import read_steps, table_files
from trainsentry.exporters.csv.table_rows import RowKeys
from trainsentry.exporters.csv.writer import CsvWriter

SIZES = {
    ("fc.weight", "gradient"): 2.0,
    ("fc.bias", "gradient"): 1.0,
    ("fc.weight", "update"): 0.5,
    ("loss", "loss"): 1,
}


def write(folder, steps):
    records = Records()
    writer = CsvWriter(folder, records.table, ("norm",), histograms=True)
    expected = {}
    for step in range(steps):
        values = [np.random.default_rng(step).standard_normal(50), np.zeros(3), np.full(9, step + 1.0)]
        counts = np.stack([*map(counts_of, values), np.zeros(SLOTS, np.uint32)])
        histograms = without_empty_bins(counts)
        writer.write(records.step(step, SIZES, histograms=histograms))
        expected[step] = histograms.texts()
    writer.close()
    return expected


def read(folder, table, problems=None):
    keys = RowKeys()
    steps = read_steps(table_files(folder)[table], keys, lambda *problem: problems.append(problem))
    return {rows.step: rows.histograms.tolist() for rows in steps}


@pytest.mark.parametrize("form", ["csv", "csv line by line", "parquet", "zstd"])
def test_histograms_read_back(tmp_path, form):
    expected = write(tmp_path, 5)
    path = tmp_path / "gradient_0-999.csv"
    if form == "csv line by line":
        path.write_text(path.read_text() + "0,fc.weight,broken line\n")
    elif form != "csv":
        compact(path, form)
    problems = []
    assert read(tmp_path, "gradient", problems) == {step: texts[:2] for step, texts in expected.items()}
    assert len(problems) == (form == "csv line by line")
    assert read(tmp_path, "update") == {step: [texts[2]] for step, texts in expected.items()}


def test_a_record_without_histograms_leaves_the_column_empty(tmp_path):
    records = Records()
    writer = CsvWriter(tmp_path, records.table, ("norm",), histograms=True)
    writer.write(records.step(0, SIZES))
    writer.close()
    assert read(tmp_path, "gradient") == {0: ["", ""]}


@pytest.mark.parametrize("text", ["5", "5:x", "3:1 2:1", "256:1", "1:-1", "1:0", "1:1  2:1", "1:1 " * 600])
def test_a_text_that_is_no_histogram_is_refused(text):
    with pytest.raises(ValueError):
        parse(text)


def test_a_histogram_and_its_text_say_the_same():
    counts = counts_of(np.random.default_rng(3).standard_normal(1000) * 1e-3)
    numbers, found = parse(without_empty_bins(counts[None]).texts()[0])
    assert sum(found) == 1000
    assert as_text(numbers, found) == without_empty_bins(counts[None]).texts()[0]
    assert parse("") == ([], [])
