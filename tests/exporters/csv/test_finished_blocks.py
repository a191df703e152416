"""Finished blocks can be Parquet or zstd: every reader gives the same, and nothing is lost."""

import time

import pytest
from step_records import Records
from written_files import fail, scalars

from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.convert.csv2tb import csv2tb
from trainsentry.exporters.csv.finished_blocks import compact
from trainsentry.exporters.csv.reader import read_table, table_files
from trainsentry.exporters.csv.writer import CsvWriter, next_restart
from trainsentry.exporters.report.data import gather
from trainsentry.monitor.offline.history import diagnose

NAMES = ["fc.weight", 'odd, "quoted"\nname', "<b>", "nan"]


def write(directory, steps=30, **kwargs):
    records = Records()
    writer = CsvWriter(directory, records.table, STATISTICS, steps_per_file=10, **kwargs)
    for n in range(steps):
        sizes = {(name, "gradient"): 1.0 + n / 7 + i for i, name in enumerate(NAMES)}
        sizes["fc.weight", "gradient"] = float("nan") if n == 5 else float("inf") if n == 6 else 1.0
        writer.write(records.step(n, sizes | {("loss", "loss"): 1 / (n + 1), ("fc.weight", "update"): 0.1}))
    writer.close()


def rows(directory):
    tables = table_files(directory)
    return {name: [repr(row) for step in read_table(files, fail) for row in step] for name, files in tables.items()}


@pytest.mark.parametrize("form", ["parquet", "zstd"])
def test_readers_give_the_same_rows_to_the_bit(tmp_path, form):
    write(tmp_path / "a" / "rank0")
    wanted = rows(tmp_path / "a" / "rank0")
    for path in sorted((tmp_path / "a" / "rank0").glob("*_0-9.csv")):
        made = compact(path, form)
        assert made.exists()
        assert not path.exists()
    assert rows(tmp_path / "a" / "rank0") == wanted
    assert next_restart(tmp_path / "a" / "rank0") == 1


@pytest.mark.parametrize("form", ["parquet", "zstd"])
def test_conversion_report_and_diagnosis_read_them(tmp_path, form):
    for name in ("plain", "compacted"):
        write(tmp_path / name / "rank0")
        (tmp_path / name / "rank0" / "status.json").write_text("{}")
    for path in (tmp_path / "compacted" / "rank0").glob("*_0-9.csv"):
        compact(path, form)
    found = []
    for name in ("plain", "compacted"):
        csv2tb(tmp_path / name, tmp_path / f"{name}-tb", fail)
        incidents = diagnose([tmp_path / name / "rank0"], fail)
        data = gather(tmp_path / name, fail)
        curve = str(data.curve(0, "gradient", "<b>"))
        points = {tag: str(values) for tag, values in scalars(tmp_path / f"{name}-tb" / "rank0").items()}
        found.append((points, [i.name for i in incidents], curve))
    assert found[0] == found[1]


def test_a_running_writer_turns_its_finished_blocks_and_keeps_the_open_one(tmp_path):
    write(tmp_path / "rank0", finished_blocks="parquet")
    end = time.monotonic() + 60
    while list((tmp_path / "rank0").glob("gradient_*.csv")) != [tmp_path / "rank0" / "gradient_20-29.csv"]:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert sorted(p.name for p in (tmp_path / "rank0").glob("gradient_*.parquet")) == [
        "gradient_0-9.parquet",
        "gradient_10-19.parquet",
    ]
    assert len(rows(tmp_path / "rank0")["gradient"]) == 30 * len(NAMES)


def test_a_block_with_a_line_that_cannot_be_read_stays_as_it_is(tmp_path):
    write(tmp_path / "rank0")
    path = tmp_path / "rank0" / "gradient_0-9.csv"
    path.write_text(path.read_text() + "0,fc.weight,broken\n")
    with pytest.raises(ValueError, match="cannot be read"):
        compact(path, "parquet")
    assert path.exists()
    assert not list((tmp_path / "rank0").glob("*.tmp")) + list((tmp_path / "rank0").glob(".*"))


@pytest.mark.parametrize("form", ["parquet", "zstd"])
def test_a_conversion_goes_on_over_blocks_that_were_turned(tmp_path, form):
    write(tmp_path / "run" / "rank0", steps=15)
    csv2tb(tmp_path / "run", tmp_path / "out", fail)
    for path in (tmp_path / "run" / "rank0").glob("*_0-9.csv"):
        compact(path, form)
    again = csv2tb(tmp_path / "run", tmp_path / "out", fail)
    assert (again.events, again.unchanged) == (0, 3)
