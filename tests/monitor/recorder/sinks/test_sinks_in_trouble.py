"""A place that cannot be written for a while gets everything when it can; what it lacks is a gap with its steps."""

import errno
import os
import shutil
import subprocess
import threading

import pytest
from tiny_models import train
from watched import STEPS, errors, gaps, make, rows, start_with, status

from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.monitor.recorder.start import ThreadRecorder

WHOLE = dict.fromkeys(range(STEPS), 4)


@pytest.fixture
def in_thread(monkeypatch):
    """Run the recorder in a thread, where a test can plant something in it."""
    start_with(monkeypatch, ThreadRecorder)


class FullDisk:
    """A disk on which no table can be written while `full` is set."""

    def __init__(self, monkeypatch):
        self.full, self.refused = threading.Event(), threading.Event()
        original = CsvWriter.write

        def write(writer, record):
            if self.full.is_set():
                self.refused.set()
                raise OSError(errno.ENOSPC, "No space left on device")
            original(writer, record)

        monkeypatch.setattr(CsvWriter, "write", write)


def test_a_disk_that_is_full_for_a_while_misses_nothing(out, caplog, monkeypatch, in_thread):
    disk = FullDisk(monkeypatch)
    model, optimizer, monitor = make(out)

    def before_step(step):
        if step == 4:
            disk.full.set()
        if step == 8:
            assert disk.refused.wait(30)
            disk.full.clear()

    with monitor:
        train(model, optimizer, STEPS, monitor, before_step=before_step)
    assert rows(out) == WHOLE
    assert gaps(out) == []
    assert [("csv" in r.getMessage(), "No space left" in r.getMessage()) for r in errors(caplog)] == [(True, True)]
    assert status(out)["exporters"]["csv"] == "writing"


def test_a_disk_that_is_full_at_the_end_leaves_a_gap_from_the_first_step_it_lacks(out, monkeypatch, in_thread, capsys):
    disk = FullDisk(monkeypatch)
    model, optimizer, monitor = make(out)

    def before_step(step):
        if step == 5:
            monitor.flush()
            disk.full.set()

    with monitor:
        train(model, optimizer, STEPS, monitor, before_step=before_step)
    assert rows(out) == dict.fromkeys(range(5), 4)
    assert gaps(out) == [("csv", 5, STEPS - 1)]
    assert f"csv lacks steps 5 to {STEPS - 1} (OSError" in capsys.readouterr().err


def test_a_write_that_comes_back_late_is_followed_by_all_others(out, caplog, monkeypatch, in_thread):
    release, original = threading.Event(), CsvWriter.write

    def write(writer, record):
        if record.step == 3:
            release.wait(60)
        original(writer, record)

    monkeypatch.setattr(CsvWriter, "write", write)
    model, optimizer, monitor = make(out, export={"max_wait": 0.2})

    def before_step(step):
        if step == 8:
            monitor.flush()  # answered, however late the writer is
            release.set()

    with monitor:
        train(model, optimizer, STEPS, monitor, before_step=before_step)
    assert rows(out) == WHOLE
    assert gaps(out) == []
    assert sum("has not come back" in r.getMessage() for r in errors(caplog)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_real_disk_that_fills_up_and_is_cleared_holds_every_row_once(out, caplog):
    out.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", out], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        model, optimizer, monitor = make(out)
        filler = out / "filler"

        def before_step(step):
            if step == 3:
                monitor.flush()
                with filler.open("wb", buffering=0) as file:
                    while True:
                        try:
                            file.write(bytes(1024))  # to the last page
                        except OSError:
                            break
            if step == 40:
                monitor.flush()
                filler.unlink()

        with monitor:
            train(model, optimizer, 50, monitor, before_step=before_step)
        assert errors(caplog)
        for table in ("gradient", "parameter", "exp_avg"):
            assert rows(out, table) == dict.fromkeys(range(table == "exp_avg", 50), 4)
        assert [gap for gap in gaps(out) if gap[0] == "csv"] == []
    finally:
        subprocess.run(["umount", "-l", out], check=True)


def test_a_directory_that_is_removed_is_made_anew_and_what_went_with_it_is_a_gap(out):
    model, optimizer, monitor = make(out, export={"tensorboard": True})

    def before_step(step):
        if step == 6:
            monitor.flush()
            shutil.rmtree(out.rename(out.with_name("removed")))  # a status may be written at this moment

    with monitor:
        train(model, optimizer, STEPS, monitor, before_step=before_step)
    assert rows(out) == dict.fromkeys(range(6, STEPS), 4)
    missing = gaps(out)
    assert [gap for gap in missing if gap[0] == "csv"] == [("csv", 0, 5)]
    assert [gap[:2] for gap in missing if gap[0] == "tensorboard"] == [("tensorboard", 0)]
    assert list((out / "tensorboard" / "rank0").glob("events.out.tfevents*"))


def test_a_table_that_is_removed_alone_is_begun_anew(out):
    model, optimizer, monitor = make(out)

    def before_step(step):
        if step == 6:
            monitor.flush()
            (out / "rank0" / "gradient_0-999.csv").unlink()

    with monitor:
        train(model, optimizer, STEPS, monitor, before_step=before_step)
    assert rows(out) == dict.fromkeys(range(6, STEPS), 4)
    assert rows(out, "parameter") == WHOLE
    assert gaps(out) == [("csv", 0, 5)]


def test_the_closing_line_does_not_say_where_records_are_when_nothing_could_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("no directory")
    model, optimizer, monitor = make(tmp_path / "file" / "out")
    with monitor:
        train(model, optimizer, STEPS, monitor)
    line = capsys.readouterr().err
    assert "Records are in" not in line
    assert f"Nothing could be written to {tmp_path / 'file' / 'out'}: NotADirectoryError" in line


def test_what_detection_did_not_judge_is_a_gap(out, monkeypatch, in_thread):
    from trainsentry.anomaly.detection import Detection

    original = Detection.judge

    def judge(self, record):
        if record.step == 5:
            raise ValueError("planted")
        return original(self, record)

    monkeypatch.setattr(Detection, "judge", judge)
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, STEPS, monitor)
    assert gaps(out) == [("detection", 5, STEPS - 1)]
