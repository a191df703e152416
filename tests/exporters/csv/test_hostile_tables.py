"""No table, however odd, gives a row another's name, ends the reading of the rest, or takes more than its share."""

import os

import pytest
from limited_memory import run_within
from step_records import Records
from written_files import scalars

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.convert.csv2tb import csv2tb
from trainsentry.exporters.csv.format import elements_of, parse_shape
from trainsentry.exporters.csv.pieces import MAX_LINE_BYTES
from trainsentry.exporters.csv.reader import read_table, table_files
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.report.page import write_report
from trainsentry.monitor.offline.history import records_of

HEADER = "vpp_stage,name,step,micro_step,order,norm,shape,dtype\n"


def row(name, stage=0, step=0, micro=0, order=0, norm=1.0, shape='"[2, 3]"'):
    return f"{stage},{name},{step},{micro},{order},{norm},{shape},float32\n"


def table(folder, *lines, header=HEADER, name="gradient_0-9.csv"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(header + "".join(lines))
    return folder


def read(folder):
    """Return names with their norms, and the problems' lines."""
    problems = []
    steps = read_table(table_files(folder)["gradient"], lambda *problem: problems.append(problem))
    return [(r.name, r.values["norm"]) for rows in steps for r in rows], problems


@pytest.mark.parametrize("column", ["stage", "step", "micro", "order"])
@pytest.mark.parametrize("value", [2**62, 2**63 - 1, 2**63, 10**400, -(2**62), -3, 2**53 + 1])
def test_a_huge_whole_number_costs_its_own_row_and_no_other_gets_another_name(tmp_path, column, value):
    good = [row(f"layer{i}.weight", order=i, norm=float(i)) for i in range(8)]
    lines = [*good[:3], row("odd", **{column: value}), *good[3:]]
    found, problems = read(table(tmp_path, *lines))
    assert found == [(f"layer{i}.weight", float(i)) for i in range(8)]
    assert [line for _, line, _ in problems] == [5]


def test_rows_that_only_the_largest_numbers_tell_apart_keep_their_names(tmp_path):
    stages, micros = (0, 1, 1 << 15), (0, 5, 1 << 31)
    names = [f"layer{i}" for i in range(40)]
    keys = [(n, s, m) for n in names for s in stages for m in micros]
    lines = [row(n, stage=s, micro=m, order=i, norm=float(i)) for i, (n, s, m) in enumerate(keys)]
    problems = []
    steps = read_table(table_files(table(tmp_path, *lines))["gradient"], lambda *problem: problems.append(problem))
    found = [(r.name, r.vpp_stage, r.micro_step, r.values["norm"]) for rows in steps for r in rows]
    assert found == [(*key, float(i)) for i, key in enumerate(keys)]
    assert not problems


@pytest.mark.parametrize("names", [("1", "01", "1.0"), ("True", "true", "False"), ("0", "1", "2")])
def test_names_that_look_like_numbers_are_texts_of_their_own(tmp_path, names):
    found, problems = read(table(tmp_path, *[row(name, order=i, norm=float(i)) for i, name in enumerate(names)]))
    assert found == [(name, float(i)) for i, name in enumerate(names)]
    assert not problems


def test_a_place_in_the_order_far_away_takes_no_memory(tmp_path):
    table(tmp_path, row("a", order=(1 << 31) - 1))
    table(tmp_path, "loss,0,0,2.5\n", header="name,step,micro_step,value\n", name="scalars_0-9.csv")
    run_within(
        300,
        "from pathlib import Path\nfrom trainsentry.monitor.offline.history import records_of\n"
        "from trainsentry.collectors.series import SeriesTable",
        "[record] = records_of(Path(sys.argv[1]), SeriesTable(), print)\nassert len(record.ids) == 2",
        tmp_path,
    )


@pytest.mark.parametrize("shape", ["[" + "9" * 5000 + "]", "[99999999999, 99999999999]", "[" + "1000000, " * 400 + "]"])
def test_a_shape_beyond_all_tensors_costs_no_row(tmp_path, shape):
    table(tmp_path, row("a", shape=f'"{shape}"'), row("b", order=1))
    layouts = SeriesTable()
    [record] = records_of(tmp_path, layouts, print)
    assert len(record.ids) == 2
    assert all(layout.numel >= 0 for layout in layouts.layouts)
    csv2tb(tmp_path, tmp_path / "out")
    assert elements_of(parse_shape(shape)) <= 2**63 - 1


def test_a_header_of_hundreds_of_thousands_of_columns_is_one_line_of_error(tmp_path):
    header = HEADER.strip() + "".join(f",c{i}" for i in range(300_000)) + "\n"
    found, problems = read(table(tmp_path, row("a"), header=header))
    assert found == []
    assert [line for _, line, _ in problems] == [1]
    assert len(problems[0][2]) < 200
    found, problems = read(table(tmp_path, row("a"), header=HEADER.strip() + ",c" * 300 + "\n"))
    assert (found, len(problems)) == ([], 1)


def test_a_line_that_is_too_long_is_named_and_those_around_it_are_read(tmp_path):
    for length in (MAX_LINE_BYTES + 100, 4 * MAX_LINE_BYTES, 5 << 20):
        found, problems = read(table(tmp_path, row("a"), row("x" * length, order=1), row("b", order=2)))
        assert found == [("a", 1.0), ("b", 1.0)], length
        assert [line for _, line, _ in problems] == [3]


def test_a_line_of_a_gigabyte_takes_little_memory(tmp_path):
    path = table(tmp_path, row("a")) / "gradient_0-9.csv"
    with path.open("r+b") as file:
        file.truncate(1 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + row("b", step=1).encode())
    told = run_within(
        400,
        "from pathlib import Path\nfrom trainsentry.exporters.csv.reader import read_table, table_files",
        "files = table_files(Path(sys.argv[1]))['gradient']\n"
        "print([r.name for rows in read_table(files, lambda *p: print(p[1])) for r in rows])",
        tmp_path,
    )
    assert told.split("\n")[:2] == ["3", "['a', 'b']"]


def test_a_small_file_that_becomes_a_large_one_is_stopped_and_what_came_before_is_kept(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    compressor = zstandard.ZstdCompressor(19).compressobj()
    data = [compressor.compress(HEADER.encode() + row("a").encode() + row("b", step=1).encode())]
    data += [compressor.compress(bytes(16 << 20)) for _ in range(64)]
    (tmp_path / "gradient_0-9.csv.zst").write_bytes(b"".join([*data, compressor.flush()]))
    told = run_within(
        400,
        "from pathlib import Path\nimport zstandard\n"
        "from trainsentry.exporters.csv.reader import read_table, table_files\n"
        "from trainsentry.exporters.csv.pieces import line_count",
        "path = Path(sys.argv[1])\nfiles = table_files(path)['gradient']\nproblems = []\n"
        "print([r.name for rows in read_table(files, lambda *p: problems.append(p)) for r in rows])\n"
        "print(problems[-1][2])\nline_count(files[0].path)",
        tmp_path,
    )
    assert told.split("\n")[0] == "['a', 'b']"
    assert "decompresses to more than 1000 times its size" in told


def test_damage_under_zstd_or_parquet_is_one_error_and_the_other_files_are_read(tmp_path):
    pytest.importorskip("zstandard")
    pytest.importorskip("pyarrow")
    table(tmp_path, row("a"))
    (tmp_path / "gradient_10-19.csv.zst").write_bytes(b"\x28\xb5\x2f\xfd" + b"x" * 99)
    (tmp_path / "gradient_20-29.parquet").write_bytes(b"PAR1" + b"x" * 99 + b"PAR1")
    found, problems = read(tmp_path)
    assert found == [("a", 1.0)]
    assert sorted(path.name for path, _, _ in problems) == ["gradient_10-19.csv.zst", "gradient_20-29.parquet"]


def test_a_parquet_table_of_other_types_is_one_error(tmp_path):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    columns = HEADER.strip().split(",")
    good = dict(zip(columns, (0, "a", 0, 0, 0, 1.0, "[2]", "float32"), strict=True))
    for column, value in (("step", "x"), ("step", 1.5), ("norm", "x"), ("norm", [1.0]), ("vpp_stage", None)):
        pd.DataFrame([good | {column: value}]).to_parquet(tmp_path / "gradient_0-9.parquet")
        found, problems = read(tmp_path)
        assert (found, len(problems)) == ([], 1), (column, value)
    pd.DataFrame([good, good | {"step": -5, "name": "odd"}, good | {"name": 7}]).astype({"name": str}).to_parquet(
        tmp_path / "gradient_0-9.parquet"
    )
    found, problems = read(tmp_path)
    assert found == [("a", 1.0), ("7", 1.0)]
    assert [line for _, line, _ in problems] == [3]


def test_a_table_that_cannot_be_opened_is_one_error_and_the_rest_is_converted(tmp_path):
    table(tmp_path / "rank_0", "-1,tok,0,0.5\n", header="vpp_stage,name,step,norm\n", name="grad_step0-0.csv")
    os.mkfifo(tmp_path / "rank_0" / "param_step0-0.csv")
    (tmp_path / "rank_0" / "exp_step0-0.csv").symlink_to("/dev/zero")
    done = csv2tb(tmp_path, tmp_path / "out")
    assert (done.tables, done.events) == (1, 1)


def test_a_directory_and_a_table_whose_names_are_no_text_are_converted_and_reported(tmp_path):
    root = tmp_path / os.fsdecode(b"run\xff")
    table(root / "rank0", row("a"), row("a", step=1), name=os.fsdecode(b"gr\xff_0-9.csv"))
    (root / "rank0" / "status.json").write_text('{"state": "closed"}')
    assert csv2tb(root, tmp_path / "out").events == 2
    assert "gr\\udcff.norm/a" in scalars(tmp_path / "out" / "rank0")
    assert "gr\\udcff" in write_report(root).read_text()


def test_a_row_cannot_pass_for_a_number_over_all_layers(tmp_path):
    found, problems = read(table(tmp_path, row("gradient", stage=-2), row("a", order=1)))
    assert found == [("a", 1.0)]
    assert "-2" in problems[0][2]


def test_an_event_file_that_was_cut_off_is_written_anew(tmp_path):
    records = Records()
    writer = CsvWriter(tmp_path / "rank0", records.table, STATISTICS)
    for n in range(60):
        writer.write(records.step(n, {("fc.weight", "gradient"): 1.0 + n}))
    writer.close()
    csv2tb(tmp_path, tmp_path / "out")
    [events] = (tmp_path / "out" / "rank0").glob("events*gradient*")
    events.write_bytes(events.read_bytes()[: events.stat().st_size * 2 // 3])
    done = csv2tb(tmp_path, tmp_path / "out")
    assert (done.unchanged, done.events) == (0, 60)
    written = scalars(tmp_path / "out" / "rank0")["gradient.norm/fc.weight"]
    assert [step for step, _ in written] == list(range(60))
    assert csv2tb(tmp_path, tmp_path / "out").unchanged == 1


@pytest.mark.parametrize(
    "state", ["[]", "{", '{"version": 4}', "null", '{"version": 4, "files": {"a": "b"}}', "[" * 9999]
)
def test_a_state_that_somebody_wrote_makes_the_conversion_begin_anew(tmp_path, state):
    table(tmp_path / "rank0", row("a"), row("a", step=1))
    csv2tb(tmp_path, tmp_path / "out")
    (tmp_path / "out" / "rank0" / ".csv2tb.gradient.json").write_text(state)
    assert csv2tb(tmp_path, tmp_path / "out").events == 2
