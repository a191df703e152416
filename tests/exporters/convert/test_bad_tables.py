"""Conversion names or mends each odd thing in a directory of tables, and converts the rest."""

import os
import threading
import time

import pytest
from step_records import Records
from written_files import fail, scalars

from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.convert.csv2tb import csv2tb
from trainsentry.exporters.csv.reader import read_table, table_files
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.report.page import write_report

W = ("fc.weight", "gradient")


def write(directory, steps, statistics=STATISTICS, value=1.0, **kwargs):
    records = Records()
    writer = CsvWriter(directory, records.table, statistics, **kwargs)
    for n in steps:
        writer.write(records.step(n, {W: value, ("b", "gradient"): 2 * value}))
    writer.close()


def test_starts_with_other_statistics_stand_in_one_table(tmp_path):
    write(tmp_path / "rank0", range(5))
    write(tmp_path / "rank0", range(5, 8), statistics=("norm", "max"), start_step=5, restart=1)
    csv2tb(tmp_path, tmp_path / "out", fail)
    tags = scalars(tmp_path / "out" / "rank0")
    assert [step for step, _ in tags["gradient.norm/fc.weight"]] == list(range(8))
    assert [step for step, _ in tags["gradient.min/fc.weight"]] == list(range(5))


def test_files_of_others_beside_ours_are_left_alone(tmp_path):
    write(tmp_path / "rank0", range(3))
    (tmp_path / "rank0" / "notes.csv").write_text("a,b\n1,2\n")
    (tmp_path / "rank0" / "gradient_3-4.csv").mkdir()
    (tmp_path / "rank0" / "gradient_0-9.csv.bak").write_text("junk")
    problems = []
    try:
        done = csv2tb(tmp_path, tmp_path / "out", lambda *problem: problems.append(problem))
    except OSError as error:
        pytest.fail(f"a directory with a table's name is no table: {error}")
    assert done.events == 3


def test_clocks_that_jump_change_nothing(tmp_path):
    write(tmp_path / "rank0", range(3))
    os.utime(tmp_path / "rank0" / "gradient_0-999.csv", (0, 0))
    csv2tb(tmp_path, tmp_path / "out", fail)
    write(tmp_path / "rank0", range(3, 5))
    os.utime(tmp_path / "rank0" / "gradient_0-999.csv", (4e9, 4e9))
    csv2tb(tmp_path, tmp_path / "out", fail)
    assert [step for step, _ in scalars(tmp_path / "out" / "rank0")["gradient.norm/fc.weight"]] == list(range(5))


def test_a_file_that_grows_while_it_is_read_gives_whole_rows_and_the_rest_later(tmp_path):
    (tmp_path / "rank0").mkdir()
    end = threading.Event()

    def grow():
        records = Records()
        writer = CsvWriter(tmp_path / "rank0", records.table, STATISTICS)
        n = 0
        while not end.is_set() and n < 3000:
            writer.write(records.step(n, {W: 1.0, ("b", "gradient"): 2.0}))
            n += 1
        writer.close()
        steps.append(n)

    steps = []
    thread = threading.Thread(target=grow)
    thread.start()
    while not list((tmp_path / "rank0").glob("*.csv")):
        time.sleep(0.001)
    for _ in range(5):
        csv2tb(tmp_path, tmp_path / "out", lambda *_: None, full=True)
    end.set()
    thread.join()
    csv2tb(tmp_path, tmp_path / "out", fail, full=True)
    tags = scalars(tmp_path / "out" / "rank0")
    for name in ("fc.weight", "b"):
        assert [step for step, _ in tags[f"gradient.norm/{name}"]] == list(range(steps[0]))


def test_a_table_edited_by_hand_keeps_what_is_whole(tmp_path):
    write(tmp_path / "rank0", range(4))
    path = tmp_path / "rank0" / "gradient_0-999.csv"
    lines = path.read_text().splitlines()
    lines[2] = lines[2].replace(",", ";")
    lines.insert(4, "")
    lines[6] = lines[6] + ","
    path.write_text("\r\n".join(lines) + "\r\n")
    problems = []
    rows = [
        r
        for step in read_table(table_files(tmp_path / "rank0")["gradient"], lambda *p: problems.append(p))
        for r in step
    ]
    assert [p[1] for p in problems] == [3, 5, 7]
    assert len(rows) == 8 - 2


def test_a_full_disk_leaves_no_half_report(tmp_path, monkeypatch):
    write(tmp_path / "rank0", range(3))
    (tmp_path / "rank0" / "status.json").write_text('{"state": "closed"}')
    good = write_report(tmp_path).read_text()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "report.html").read_text() == good
