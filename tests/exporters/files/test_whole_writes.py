"""A line is appended whole or not at all, so a file stays readable after a write that failed half-way."""

import errno
import resource
from collections import Counter
from contextlib import contextmanager

import pytest
from step_records import Records
from written_files import fail, scalars

from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.csv.reader import read_table, table_files
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.files.foreign_files import read_lines
from trainsentry.exporters.files.json_files import append_lines, replace_json
from trainsentry.exporters.tensorboard.writer import TensorBoardWriter

SIZES = {(f"layer{i}.weight", quantity): 2.0 for i in range(20) for quantity in ("gradient", "parameter")}


@contextmanager
def file_size_limit(size):
    """Have no file of this process grow beyond `size` bytes: the write that does so is done in part."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def steps_of(directory, table):
    return Counter(row.step for rows in read_table(table_files(directory)[table], fail) for row in rows)


@pytest.mark.parametrize("room", [1, 100, 700])
def test_a_record_that_does_not_fit_leaves_no_trace_in_any_table_and_can_be_written_later(tmp_path, room):
    records = Records()
    writer = CsvWriter(tmp_path, records.table, STATISTICS)
    writer.write(records.step(0, SIZES))
    full = (tmp_path / "parameter_0-999.csv").stat().st_size
    gradients = (tmp_path / "gradient_0-999.csv").stat().st_size
    with file_size_limit(full + room), pytest.raises(OSError, match="File too large"):
        writer.write(records.step(1, SIZES))
    assert (tmp_path / "parameter_0-999.csv").stat().st_size == full
    assert (tmp_path / "gradient_0-999.csv").stat().st_size == gradients
    for step in (1, 2):
        writer.write(records.step(step, SIZES))
    writer.close()
    for table in ("gradient", "parameter"):
        assert steps_of(tmp_path, table) == dict.fromkeys(range(3), 20)


def test_an_event_that_does_not_fit_leaves_a_file_that_tensorboard_reads_on(tmp_path):
    records = Records()
    writer = TensorBoardWriter(tmp_path, records.table, STATISTICS)
    writer.write(records.step(0, SIZES))
    [path] = tmp_path.iterdir()
    full = path.stat().st_size
    with file_size_limit(full + 100), pytest.raises(OSError, match="File too large"):
        writer.write(records.step(1, SIZES))
    assert path.stat().st_size == full
    for step in (1, 2):
        writer.write(records.step(step, SIZES))
    writer.close()
    assert [step for step, _ in scalars(tmp_path)["gradient.norm/layer3.weight"]] == [0, 1, 2]


def test_lines_that_do_not_fit_are_left_out_as_a_whole(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_lines(path, [{"a": 0}])
    with file_size_limit(path.stat().st_size + 30), pytest.raises(OSError, match="File too large"):
        append_lines(path, [{"a": 1}, {"b": "x" * 50}])
    append_lines(path, [{"a": 2}])
    assert [line for _, line in read_lines(path, fail)] == [{"a": 0}, {"a": 2}]


def test_a_file_that_cannot_be_replaced_stays_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "status.json"
    replace_json(path, {"a": 0})
    before = path.read_text()
    with file_size_limit(10), pytest.raises(OSError, match="File too large"):
        replace_json(path, {"a": "x" * 100})
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("lines", [0, 1, 7, 20])
def test_a_record_that_a_killed_writer_had_begun_is_completed_by_the_next(tmp_path, lines):
    records = Records()
    writer = CsvWriter(tmp_path, records.table, STATISTICS)
    for step in (0, 1):
        writer.write(records.step(step, SIZES))
    writer.close()
    path = tmp_path / "gradient_0-999.csv"
    kept = path.read_bytes().splitlines(keepends=True)[: 1 + 20 + lines]
    path.write_bytes(b"".join([*kept, b"0,torn"]))
    successor = CsvWriter(tmp_path, records.table, STATISTICS)
    for step in (1, 2):
        successor.write(records.step(step, SIZES))
    successor.close()
    for table in ("gradient", "parameter"):  # as it stands there: a reader would take the newest of two rows
        lines_of = (tmp_path / f"{table}_0-999.csv").read_text().splitlines()[1:]
        assert Counter(line.split(",")[2] for line in lines_of) == dict.fromkeys("012", 20)


def test_a_table_that_somebody_removes_is_begun_anew_and_told(tmp_path):
    records, told = Records(), []
    writer = CsvWriter(tmp_path, records.table, STATISTICS, lost=lambda *gap: told.append(gap[:2]))
    for step in range(3):
        writer.write(records.step(step, SIZES))
    (tmp_path / "gradient_0-999.csv").unlink()
    writer.write(records.step(3, SIZES))
    writer.close()
    assert told == [(0, 2)]
    assert steps_of(tmp_path, "gradient") == {3: 20}
    assert steps_of(tmp_path, "parameter") == dict.fromkeys(range(4), 20)


def test_events_that_somebody_removes_are_told_and_go_on_in_a_new_file(tmp_path):
    records, told = Records(), []
    writer = TensorBoardWriter(tmp_path, records.table, STATISTICS, lost=lambda *gap: told.append(gap[:2]))
    for step in range(3):
        writer.write(records.step(step, SIZES))
    [path] = tmp_path.iterdir()
    path.unlink()
    writer.write(records.step(3, SIZES))
    writer.close()
    assert told == [(0, 2)]
    [path] = tmp_path.iterdir()
    assert path.stat().st_size > 0


def test_a_disk_with_room_for_a_part_says_so_by_a_number_only(tmp_path, monkeypatch):
    from trainsentry.exporters.files.whole_writes import append_whole

    class Slow:
        def __init__(self, file):
            self.file = file

        def seek(self, *where):
            return self.file.seek(*where)

        def truncate(self, size):
            return self.file.truncate(size)

        def write(self, data):
            if self.file.tell() > 20:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data[:3])

    path = tmp_path / "file"
    with path.open("ab", buffering=0) as file:
        append_whole(Slow(file), b"0123456789")
        with pytest.raises(OSError, match="No space left"):
            append_whole(Slow(file), bytes(40))
    assert path.read_bytes() == b"0123456789"
