"""CSV tables hold exact numbers and stay whole after a kill; readers take a step's newest row and name bad lines."""

import csv
import math

import numpy as np
import pytest
from step_records import Records

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import Layout, Series, SeriesTable
from trainsentry.collectors.statistics import COLUMNS, STATISTICS
from trainsentry.exporters.csv.reader import rank_directories, read_table, table_files
from trainsentry.exporters.csv.writer import CsvWriter, next_restart
from trainsentry.exporters.files.foreign_files import InputError

W = ("fc.weight", "gradient")


def fail(path, line, message):
    raise AssertionError(f"{path}:{line}: {message}")


def rows(directory, table, report=fail):
    return [row for step in read_table(table_files(directory)[table], report) for row in step]


def write(directory, records, statistics=STATISTICS, **kwargs):
    writer = CsvWriter(directory, records[0][0], statistics, **kwargs)
    for _, record in records:
        writer.write(record)
    writer.close()


def test_floats_read_back_exactly_and_counts_are_whole_numbers(tmp_path):
    table = SeriesTable()
    table.series_id(Series("fc.weight", "gradient"))
    table.layout_id(Layout((4, 8), "bfloat16", 32))
    values = np.full((1, COLUMNS), math.nan)
    values[0, :7] = [-1 / 3, 1e-45, 6.02214076e23, math.pi, 3, 2, 1 / 7]
    record = StepRecord(12, 0, np.zeros(1, np.int32), np.zeros(1, np.int32), values, first_order=5)
    write(tmp_path, [(table, record)])
    with (tmp_path / "gradient_0-999.csv").open(newline="") as file:
        header, row = list(csv.reader(file))
    assert header == [
        "vpp_stage", "name", "step", "micro_step", "order", "min", "max", "mean", "norm", "nans", "infs", "zeros",
        "shape", "dtype",
    ]  # fmt: skip
    assert row[:5] == ["0", "fc.weight", "12", "0", "5"]
    assert [float(x) for x in row[5:12]] == values[0, :7].tolist()
    assert row[9:11] == ["3", "2"]
    assert row[12:] == ["[4, 8]", "bfloat16"]


def test_columns_follow_the_configured_order_and_updates_end_with_their_ratio(tmp_path):
    records = Records()
    record = records.step(0, {("fc.weight", "update"): 2.0, ("loss", "loss"): 0.5})
    record.values[0, 7] = 0.125
    write(tmp_path, [(records.table, record)], statistics=("norm", "min"))
    update = (tmp_path / "update_0-999.csv").read_text().splitlines()
    assert update[0] == "vpp_stage,name,step,micro_step,order,norm,min,ratio,shape,dtype"
    assert update[1] == '0,fc.weight,0,0,0,2.0,-1.0,0.125,"[16]",float32' or update[1].endswith("0.125,[16],float32")
    assert (tmp_path / "scalars_0-999.csv").read_text() == "name,step,micro_step,value\nloss,0,0,0.5\n"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scalars_that_are_not_finite_read_back(tmp_path, value):
    records = Records()
    write(tmp_path, [(records.table, records.step(0, {("loss", "loss"): value}))])
    [row] = rows(tmp_path, "scalars")
    assert row.values["value"] == value or math.isnan(value)


def test_a_file_per_block_of_steps(tmp_path):
    records = Records()
    write(tmp_path, [(records.table, records.step(n, {W: 1.0})) for n in range(25)], steps_per_file=10)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "gradient_0-9.csv", "gradient_10-19.csv", "gradient_20-29.csv"]  # fmt: skip
    assert [r.step for r in rows(tmp_path, "gradient")] == list(range(25))


def test_a_restart_that_went_back_opens_files_beside_the_old_and_its_rows_win(tmp_path):
    records = Records()
    write(tmp_path, [(records.table, records.step(n, {W: 1.0})) for n in range(8)])
    assert next_restart(tmp_path) == 1
    again = [(records.table, records.step(n, {W: 2.0})) for n in range(5, 7)]
    write(tmp_path, again, start_step=5, restart=1)
    assert (tmp_path / "gradient_5-999.r1.csv").exists()
    got = rows(tmp_path, "gradient")
    assert [(r.step, r.values["norm"]) for r in got] == [(n, 2.0 if n in {5, 6} else 1.0) for n in range(8)]


def test_a_torn_last_line_is_cut_before_writing_goes_on(tmp_path):
    records = Records()
    write(tmp_path, [(records.table, records.step(0, {W: 1.0}))])
    with (tmp_path / "gradient_0-999.csv").open("a") as file:
        file.write("0,fc.weight,1,0,0,0.12")
    write(tmp_path, [(records.table, records.step(1, {W: 1.0}))])
    assert [r.step for r in rows(tmp_path, "gradient")] == [0, 1]


def test_names_with_commas_quotes_and_line_breaks_read_back(tmp_path):
    records = Records()
    name = 'odd, "quoted"\nname'
    write(tmp_path, [(records.table, records.step(0, {(name, "gradient"): 1.0}))])
    [row] = rows(tmp_path, "gradient")
    assert row.name == name


def test_bad_lines_are_named_and_the_rest_is_read(tmp_path):
    records = Records()
    write(tmp_path, [(records.table, records.step(n, {W: 1.0})) for n in range(3)])
    path = tmp_path / "gradient_0-999.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1] + "0,fc.weight,one,0\n" + lines[2].replace(",1,", ",x,") + lines[3][:20])
    problems = []
    got = rows(tmp_path, "gradient", lambda *problem: problems.append(problem[:2]))
    assert [r.step for r in got] == [0]
    assert problems == [(path, 3), (path, 4), (path, 5)]


def test_a_changed_header_is_named_and_other_tables_are_read(tmp_path):
    records = Records()
    write(tmp_path, [(records.table, records.step(0, {W: 1.0, ("b", "parameter"): 1.0}))])
    path = tmp_path / "gradient_0-999.csv"
    path.write_text(path.read_text().replace("name", "label", 1))
    problems = []
    assert rows(tmp_path, "gradient", lambda *problem: problems.append(problem)) == []
    assert problems[0][:2] == (path, 1)
    assert "name" in problems[0][2]
    assert len(rows(tmp_path, "parameter")) == 1


def test_a_directory_that_is_not_ours_is_refused(tmp_path):
    (tmp_path / "data.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=str(tmp_path)):
        rank_directories(tmp_path)
    with pytest.raises(InputError, match="no such directory"):
        rank_directories(tmp_path / "missing")


def test_a_last_line_that_was_cut_off_in_a_number_is_named_and_left_out(tmp_path):
    records = Records()
    write(tmp_path, [(records.table, records.step(n, {("loss", "loss"): 1.25})) for n in range(2)])
    path = tmp_path / "scalars_0-999.csv"
    path.write_text(path.read_text()[:-2])  # 1.25 has become 1.2
    problems = []
    assert [r.step for r in rows(tmp_path, "scalars", lambda *p: problems.append(p))] == [0]
    assert problems == [(path, 3, "the line is cut off")]


@pytest.mark.parametrize(
    ("old", "new", "said", "read"),
    [
        ("norm", "Norm2", "unknown columns, which are left out: Norm2", True),
        ("norm", "max", "has max twice", False),
        ("min,max,mean,norm,nans,infs,zeros", "a,b,c,d,e,f,g", "has no statistics", False),
        ("shape", "form", "lacks shape", False),
    ],
)
def test_each_change_of_a_header_is_named_with_its_line(tmp_path, old, new, said, read):
    records = Records()
    write(tmp_path, [(records.table, records.step(0, {W: 1.0}))])
    path = tmp_path / "gradient_0-999.csv"
    path.write_text(path.read_text().replace(old, new, 1))
    problems = []
    got = rows(tmp_path, "gradient", lambda *p: problems.append(p))
    assert bool(got) == read
    assert problems[0][:2] == (path, 1)
    assert said in problems[0][2]


def test_a_bad_number_is_named_with_its_column(tmp_path):
    records = Records()
    write(tmp_path, [(records.table, records.step(0, {W: 1.0}))])
    path = tmp_path / "gradient_0-999.csv"
    path.write_text(path.read_text().replace(",1.0,0,0,", ",one,0,0,"))
    problems = []
    assert rows(tmp_path, "gradient", lambda *p: problems.append(p)) == []
    assert problems == [(path, 2, "norm: 'one' is not a number")]


def test_starts_with_blocks_of_different_length_merge_by_step_and_the_newest_wins(tmp_path):
    records = Records()
    write(tmp_path, [(records.table, records.step(n, {W: 1.0})) for n in range(300)])
    again = [(records.table, records.step(n, {W: 2.0})) for n in range(100, 300)]
    write(tmp_path, again, start_step=100, restart=1, steps_per_file=100)
    got = rows(tmp_path, "gradient")
    assert [r.step for r in got] == list(range(300))
    assert [r.values["norm"] for r in got] == [1.0] * 100 + [2.0] * 200


def test_text_kept_for_rows_does_not_grow_with_the_number_of_shapes(tmp_path):
    records = Records()
    writer = CsvWriter(tmp_path, records.table, STATISTICS)
    for length in range(50):
        record = records.step(length, {(f"p{i}", "gradient"): 1.0 for i in range(20)})
        record.layouts[:] = records.table.layout_id(Layout((length,), "float32", length))
        writer.write(record)
    writer.close()
    assert (len(writer._leads), len(writer._tails)) == (20, 50)
