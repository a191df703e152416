"""Conversion reads msprobe's tables and ours, goes on where it stopped, and loses no spike of a long series."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from step_records import Records
from written_files import fail, scalars

from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.convert.csv2tb import csv2tb
from trainsentry.exporters.convert.msprobe_csv2tb import csv2tensorboard_by_step
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.files.foreign_files import InputError
from trainsentry.exporters.tensorboard.writer import TensorBoardWriter

DATA = Path(__file__).parents[2] / "data" / "msprobe_monitor"
W = ("fc.weight", "gradient")


def read(directory):
    """Return {tag: [(step, value)]} as TensorBoard's own reader gives it with its own limits."""
    return scalars(directory, 1000)


def write(directory, steps, sizes=lambda n: {W: 1.0}, **kwargs):
    records = Records()
    writer = CsvWriter(directory, records.table, STATISTICS, **kwargs)
    for n in steps:
        writer.write(records.step(n, sizes(n)))
    writer.close()


def float32(text):
    return float(np.float32(text))


def test_tables_of_msprobes_first_monitor_are_converted_under_its_own_words(tmp_path):
    done = csv2tb(DATA / "v1", tmp_path, fail)
    tags = read(tmp_path / "rank0")
    assert tags["grad_reduced.norm/tok.weight"] == [
        (0, float32("0.0985337924853578")),
        (1, float32("0.0878100172506746")),
    ]
    assert tags["actv.max/tok.input"][0] == (0, 62.0)
    assert (done.runs, done.tables) == (1, 3)
    assert done.scalars == sum(len(points) for points in tags.values())


def test_tables_of_msprobes_second_monitor_are_told_apart_by_their_scope(tmp_path):
    csv2tb(DATA / "v2", tmp_path, fail)
    tags = read(tmp_path / "rank0")
    assert tags["actv.max/tok.input.0"] == [(0, 62.0), (1, 62.0)]
    assert tags["exp_avg.min/tok.weight.exp_avg"][0] == (0, float32("-0.001744904788210988"))
    assert any(tag.startswith("grad_reduced.norm/") for tag in tags)


def test_msprobes_own_call_gives_its_directories_and_tags(tmp_path):
    csv2tensorboard_by_step(str(DATA / "v1"), output_dirpath=str(tmp_path), report=fail)
    assert sorted(p.name for p in (tmp_path / "rank0").iterdir()) == ["actv", "grad_reduced", "grad_unreduced"]
    assert read(tmp_path / "rank0" / "actv")["vp0:tok.input:micro0/max"][0] == (0, 62.0)
    assert {v for _, v in read(tmp_path / "rank0" / "actv")["vp0:tok.input:micro0/nans"]} == {0.0}  # as msprobe's does
    assert "vp0:tok.weight/norm" in read(tmp_path / "rank0" / "grad_reduced")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"process_num": 0}, "process_num"),
        ({"data_type_list": ["activation"]}, "data_type_list"),
        ({"time_start": "yesterday"}, "yesterday"),
    ],
)
def test_what_msprobes_call_does_not_allow_is_named(tmp_path, given, named):
    with pytest.raises(ValueError, match=named):
        csv2tensorboard_by_step(str(DATA / "v1"), output_dirpath=str(tmp_path), **given)


def test_directories_are_chosen_by_time_and_the_newest_row_of_a_rank_counts(tmp_path):
    source = tmp_path / "source"
    first = source / "Nov21_11-03-18-rank0-baebc28b"
    shutil.copytree(DATA / "v1" / first.name, first)
    later = source / "Nov21_12-00-00-rank0-0badcafe"
    shutil.copytree(first, later)
    for path in later.iterdir():
        path.write_text(path.read_text().replace("0.0985337924853578", "0.5"))
    csv2tb(source, tmp_path / "both", fail)
    assert read(tmp_path / "both" / "rank0")["grad_reduced.norm/tok.weight"][0] == (0, 0.5)
    csv2tb(source, tmp_path / "early", fail, time_end="Nov21_11-59-59")
    assert read(tmp_path / "early" / "rank0")["grad_reduced.norm/tok.weight"][0] == (0, float32("0.0985337924853578"))
    with pytest.raises(InputError):
        csv2tb(source, tmp_path / "late", fail, time_start="Dec01_00-00-00")


def test_a_step_that_msprobe_wrote_twice_into_a_file_is_there_once_with_its_newer_rows(tmp_path):
    directory = tmp_path / "s" / "Nov21_11-03-18-rank0-baebc28b"
    directory.mkdir(parents=True)
    rows = [
        "vpp_stage,name,step,norm,shape,dtype",
        *(f"0,w,{n},{v},[2],torch.float32" for n, v in [(0, 1), (1, 2), (0, 3)]),
    ]
    (directory / "grad_reduced_0-9.csv").write_text("\n".join(rows) + "\n")
    csv2tb(tmp_path / "s", tmp_path / "o", fail)
    assert read(tmp_path / "o" / "rank0")["grad_reduced.norm/w"] == [(0, 3.0), (1, 2.0)]


def test_converting_again_goes_on_with_what_has_come(tmp_path):
    source, out = tmp_path / "run", tmp_path / "out"
    write(source / "rank0", range(6), steps_per_file=4)
    assert csv2tb(source, out, fail).events == 6
    again = csv2tb(source, out, fail)
    assert (again.events, again.unchanged) == (0, 1)
    write(source / "rank0", range(6, 10), steps_per_file=4)
    assert csv2tb(source, out, fail).events == 4
    assert [step for step, _ in read(out / "rank0")["gradient.norm/fc.weight"]] == list(range(10))


def test_a_step_whose_rows_come_in_two_parts_is_complete_and_stands_once(tmp_path):
    source, out = tmp_path / "run", tmp_path / "out"
    write(source / "rank0", range(2), lambda n: {("a", "gradient"): 1.0})
    csv2tb(source, out, fail)
    write(source / "rank0", [1], lambda n: {("b", "gradient"): 2.0})
    csv2tb(source, out, fail)
    tags = read(out / "rank0")
    assert (tags["gradient.norm/a"], tags["gradient.norm/b"]) == ([(0, 1.0), (1, 1.0)], [(1, 2.0)])


def test_a_run_that_went_back_is_converted_anew_with_its_newest_rows(tmp_path):
    source, out = tmp_path / "run", tmp_path / "out"
    write(source / "rank0", range(8))
    csv2tb(source, out, fail)
    write(source / "rank0", range(5, 8), lambda n: {W: 4.0}, start_step=5, restart=1)
    csv2tb(source, out, fail)
    values = [value for _, value in read(out / "rank0")["gradient.norm/fc.weight"]]
    assert values == [1.0] * 5 + [4.0] * 3


def test_what_a_conversion_that_was_cut_off_left_is_no_run_of_tensorboards(tmp_path):
    source, out = tmp_path / "run", tmp_path / "out"
    write(source / "rank0", range(3))
    (out / "rank0").mkdir(parents=True)
    torn = out / "rank0" / ".converting.1.host.1.csv2tb.gradient.0"
    torn.write_bytes(b"half")
    csv2tb(source, out, fail)
    assert not torn.exists()
    assert len(read(out / "rank0")["gradient.norm/fc.weight"]) == 3


def counted(out):
    """Return the curves of counts and shares."""
    return {
        tag: points
        for tag, points in read(out).items()
        if tag.startswith(("gradient.nans", "gradient.infs", "gradient.zeros"))
    }


def test_a_count_that_is_always_zero_is_no_card_and_the_live_exporter_writes_the_same_curve_of_one_that_is_not(
    tmp_path,
):
    def sizes(n):
        return {("a", "gradient"): math.nan if n in (3, 5) else 1.0, ("b", "gradient"): 1.0}

    records = Records()
    live = TensorBoardWriter(tmp_path / "live", records.table, STATISTICS)
    for n in range(8):
        live.write(records.step(n, sizes(n)))
    live.close()
    write(tmp_path / "run" / "rank0", range(8), sizes)
    csv2tb(tmp_path / "run", tmp_path / "out", fail)
    assert counted(tmp_path / "out" / "rank0") == {
        "gradient.nans/a": [(3, 1.0), (4, 0.0), (5, 1.0), (6, 0.0), (7, 0.0)]
    }
    assert counted(tmp_path / "out" / "rank0") == counted(tmp_path / "live")


def test_a_count_that_has_begun_goes_on_when_it_is_converted_again(tmp_path):
    source, out = tmp_path / "run", tmp_path / "out"
    write(source / "rank0", range(4), lambda n: {W: math.nan if n == 2 else 1.0})
    csv2tb(source, out, fail)
    write(source / "rank0", range(4, 6))
    csv2tb(source, out, fail)
    write(source / "rank0", range(6, 8), lambda n: {W: math.inf if n == 7 else 1.0})
    csv2tb(source, out, fail)
    assert counted(out / "rank0") == {
        "gradient.nans/fc.weight": [(2, 1.0), *((n, 0.0) for n in range(3, 8))],
        "gradient.infs/fc.weight": [(7, 1.0)],
    }


def test_one_count_of_a_long_series_is_kept(tmp_path):
    source, out = tmp_path / "run", tmp_path / "out"
    write(source / "rank0", range(3000), lambda n: {W: math.nan if n == 1234 else 1.0})
    assert csv2tb(source, out, fail).thinned == 1
    points = counted(out / "rank0")["gradient.nans/fc.weight"]
    assert points[0] == (1234, 1.0)
    assert {value for _, value in points[1:]} == {0.0}


@pytest.mark.parametrize("value", [50.0, -50.0, math.nan, math.inf])
def test_a_spike_of_one_step_is_kept_of_a_long_series(tmp_path, value):
    source, out = tmp_path / "run", tmp_path / "out"

    def sizes(n):
        return {("loss", "loss"): value if n == 3333 else math.sin(n), ("flat", "flat"): 1.0}

    write(source / "rank0", range(5000), sizes, steps_per_file=1000)
    done = csv2tb(source, out, fail)
    points = read(out / "rank0")["scalars/loss"]
    assert done.thinned == 1
    assert len(points) <= 1000
    assert any(step == 3333 and (v == value or (math.isnan(v) and math.isnan(value))) for step, v in points)
    assert (points[0][0], points[-1][0]) == (0, 4999)
    assert min(v for step, v in points if step != 3333) == float32(min(math.sin(n) for n in range(5000)))


def test_full_and_every_are_taken_at_their_word(tmp_path):
    source = tmp_path / "run"
    write(source / "rank0", range(1500), lambda n: {("loss", "loss"): float(n)})
    assert csv2tb(source, tmp_path / "full", fail, full=True).scalars == 1500
    assert csv2tb(source, tmp_path / "every", fail, every=10).scalars == 150


def test_chunks_of_a_model_do_not_share_a_tag(tmp_path):
    source = tmp_path / "rank0"
    write(source, range(2))
    path = source / "gradient_0-999.csv"
    header, *lines = path.read_text().splitlines(keepends=True)
    path.write_text(header + "".join(line + "1" + line[1:] for line in lines))
    csv2tb(tmp_path, tmp_path / "out", fail)
    tags = read(tmp_path / "out" / "rank0")
    assert len(tags["gradient.norm/fc.weight"]) == len(tags["gradient.norm/vp1:fc.weight"]) == 2


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "=cmd()|'/C calc'!A0", "a,b", 'q"q', "a\nb", "名前", "nan"]
)
def test_odd_names_arrive_as_they_are(tmp_path, name):
    write(tmp_path / "rank0", range(3), lambda n: {(name, "gradient"): 1.0})
    csv2tb(tmp_path, tmp_path / "out", fail)
    assert len(read(tmp_path / "out" / "rank0")[f"gradient.norm/{name}"]) == 3


def test_malformed_lines_in_a_large_file_are_named_by_their_line_and_all_others_arrive(tmp_path):
    source = tmp_path / "rank0"
    write(source, range(300), lambda n: {(f"layers.{i}.weight", "gradient"): 1.0 + i for i in range(300)})
    path = source / "gradient_0-999.csv"
    lines = path.read_text().splitlines(keepends=True)
    assert path.stat().st_size > 5 << 20  # several pieces
    lines[80_000] = "0,layers.1.weight,broken\n"
    lines[10] = lines[10].replace("float32", "float32,9")
    path.write_text("".join(lines))
    problems = []
    done = csv2tb(tmp_path, tmp_path / "out", lambda *problem: problems.append(problem[:2]))
    assert problems == [(path, 11), (path, 80_001)]
    assert done.scalars == (300 * 300 - 2) * 4 + 300 * 5  # no flat zeros; and five numbers over all layers a step


def test_a_few_steps_of_a_long_run_are_not_thinned(tmp_path):
    source = tmp_path / "run"
    write(source / "rank0", range(5000), lambda n: {("loss", "loss"): float(n)})
    done = csv2tb(source, tmp_path / "out", fail, steps=range(100, 201))
    assert (done.thinned, done.events) == (0, 101)


def test_december_comes_before_january(tmp_path):
    for name, value in (
        ("Dec31_23-00-00-rank0-a", 1.0),
        ("Jan01_01-00-00-rank0-b", 2.0),
        ("Xyz01_01-00-00-rank0-c", 3.0),
    ):
        (tmp_path / "s" / name).mkdir(parents=True)
        rows = f"vpp_stage,name,step,norm,shape,dtype\n0,w,0,{value},[2],torch.float32\n"
        (tmp_path / "s" / name / "grad_reduced_0-9.csv").write_text(rows)
    csv2tb(tmp_path / "s", tmp_path / "o", fail)
    assert read(tmp_path / "o" / "rank0")["grad_reduced.norm/w"] == [(0, 2.0)]
