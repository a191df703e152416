"""TensorBoard's own reader reads exactly the values that were written, live and converted."""

import pytest
from step_records import Records
from written_files import fail, scalars

from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.convert.csv2tb import csv2tb
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.exporters.tensorboard.writer import TensorBoardWriter

SIZES = {
    ("fc.weight", "gradient"): 2.0,
    ("fc.weight", "update"): 0.5,
    ("fc.output.0", "activation_output", 1): 3.0,
    ("loss", "loss"): 0.25,
}


def records_of(steps):
    records = Records()
    return records.table, [records.step(n, SIZES) for n in range(steps)]


def test_tensorboard_reads_the_live_file(tmp_path):
    table, records = records_of(5)
    writer = TensorBoardWriter(tmp_path, table, STATISTICS)
    for record in records:
        writer.write(record)
    tags = scalars(tmp_path)  # while it is open
    writer.close()
    assert tags["gradient.norm/fc.weight"] == [(n, 2.0) for n in range(5)]
    assert tags["activation_output.max/fc.output.0:1"] == [(n, 1.5) for n in range(5)]
    assert tags["scalars/loss"] == [(n, 0.25) for n in range(5)]
    assert "update.ratio/fc.weight" in tags


def test_conversion_gives_the_same_tags_and_values_as_the_live_file(tmp_path):
    table, records = records_of(12)
    live = TensorBoardWriter(tmp_path / "live", table, STATISTICS)
    csv = CsvWriter(tmp_path / "run" / "rank0", table, STATISTICS, steps_per_file=5)
    for record in records:
        live.write(record)
        csv.write(record)
    live.close()
    csv.close()
    done = csv2tb(tmp_path / "run", tmp_path / "converted", fail)
    expected, got = scalars(tmp_path / "live"), scalars(tmp_path / "converted" / "rank0")
    flat = {name for name in set(got) - set(expected) if not any(value for _, value in got[name])}  # live no cards
    del expected["0_overview/loss"]
    assert set(got) - flat == set(expected)
    assert {k: v for k, v in expected.items() if "ratio" not in k} == {k: got[k] for k in expected if "ratio" not in k}
    assert done.scalars == sum(len(v) for v in got.values())


def test_converting_again_replaces_what_was_converted(tmp_path):
    table, records = records_of(2)
    csv = CsvWriter(tmp_path / "rank0", table, STATISTICS)
    for record in records:
        csv.write(record)
    csv.close()
    for _ in range(2):
        csv2tb(tmp_path, tmp_path / "converted", fail, steps=range(1, 2), quantities=["gradient"])
    tags = scalars(tmp_path / "converted" / "rank0")
    assert tags["gradient.norm/fc.weight"] == [(1, 2.0)]
    assert all(tag.startswith(("gradient.", "layers.gradient/")) for tag in tags)


def test_a_truncated_line_is_named_and_the_rest_is_converted(tmp_path):
    table, records = records_of(3)
    csv = CsvWriter(tmp_path / "rank0", table, STATISTICS)
    for record in records:
        csv.write(record)
    csv.close()
    path = tmp_path / "rank0" / "gradient_0-999.csv"
    path.write_text(path.read_text()[:-30])
    problems = []
    csv2tb(tmp_path, tmp_path / "out", lambda *problem: problems.append(problem[:2]))
    assert problems == [(path, 4)]
    assert len(scalars(tmp_path / "out" / "rank0")["gradient.norm/fc.weight"]) == 2


def test_an_unknown_quantity_is_refused_with_those_there_are(tmp_path):
    table, records = records_of(1)
    csv = CsvWriter(tmp_path / "rank0", table, STATISTICS)
    csv.write(records[0])
    csv.close()
    with pytest.raises(InputError, match="gradient"):
        csv2tb(tmp_path, tmp_path / "out", fail, quantities=["gradiant"])


def test_parallel_conversion_gives_the_same(tmp_path):
    table, records = records_of(3)
    csv = CsvWriter(tmp_path / "rank0", table, STATISTICS)
    for record in records:
        csv.write(record)
    csv.close()
    one = csv2tb(tmp_path, tmp_path / "one", fail)
    two = csv2tb(tmp_path, tmp_path / "two", fail, jobs=2)
    assert (one.scalars, one.events, one.tables) == (two.scalars, two.events, two.tables)
    ours, theirs = scalars(tmp_path / "one" / "rank0"), scalars(tmp_path / "two" / "rank0")
    assert {tag: str(values) for tag, values in ours.items()} == {tag: str(values) for tag, values in theirs.items()}
