"""A sink that could not write catches up when it can; steps that stay missing are recorded as a gap."""

import errno
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny_models import flip_bit, train
from watched import STEPS, bare, errors, gaps, make, plant, removing_table, rows, status

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.rules.data.input_drift import InputDriftRule
from trainsentry.exporters.csv.writer import CsvWriter

WHOLE = dict.fromkeys(range(STEPS), 4)


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
    assert sum("has not returned" in r.getMessage() for r in errors(caplog)) == 1


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

    with monitor:
        train(model, optimizer, STEPS, monitor, before_step=removing_table(out, monitor, 6))
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


def test_a_rule_that_fails_is_a_gap_and_the_others_go_on(out, monkeypatch, caplog, in_thread):
    original = InputDriftRule.judge

    def judge(self, observed):
        if observed.record.step == 5:
            raise ValueError("planted")
        return original(self, observed)

    monkeypatch.setattr(InputDriftRule, "judge", judge)
    model, optimizer, monitor = make(out)

    def before_step(step):
        if step == 8:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))

    with monitor:
        train(model, optimizer, STEPS, monitor, before_step=before_step)
    assert gaps(out) == [("rule input_drift", 5, STEPS - 1)]
    assert sum("rule input_drift is off from step 5 on" in r.getMessage() for r in errors(caplog)) == 1
    assert [i.step for i in monitor.incidents] == [8]


def test_an_exception_in_detection_leaves_the_records_written(out, monkeypatch, caplog, in_thread):
    monkeypatch.setattr("trainsentry.anomaly.detection.Detection.judge", plant)
    model, optimizer, monitor = make(out)
    with monitor:
        assert train(model, optimizer, STEPS, monitor).losses == bare()
    assert sum("detection" in r.getMessage() for r in errors(caplog)) == 1
    assert set(pd.read_csv(out / "rank0" / "gradient_0-999.csv")["step"]) == set(range(STEPS))
    assert status(out)["failures"]["detection"]["count"] == 1


def test_a_writer_that_blocks_for_ever_is_left_behind(out, monkeypatch, caplog, in_thread):
    release = threading.Event()
    monkeypatch.setattr("trainsentry.exporters.csv.writer.CsvWriter.write", lambda *_: release.wait(60))
    model, optimizer, monitor = make(out, export={"max_wait": 3.0, "tensorboard": True})
    started = time.monotonic()
    with monitor:
        assert train(model, optimizer, STEPS, monitor).losses == bare()
    assert time.monotonic() - started < 30
    release.set()
    assert [r.getMessage() for r in errors(caplog) if "csv" in r.getMessage()]
    assert len(errors(caplog)) == 1
    found = status(out)
    assert " 3 s" in found["exporters"]["csv"]
    assert found["exporters"]["tensorboard"] == "writing"
    assert [(g["sink"], g["first_step"], g["last_step"]) for g in found["gaps"]] == [("csv", 0, STEPS - 1)]


def test_a_read_only_directory(caplog):
    model, optimizer, monitor = make(Path("/proc/nowhere"))
    with monitor:
        assert train(model, optimizer, STEPS, monitor).losses == bare()
        assert not monitor.records().empty
    parts = [r.getMessage().split()[1] for r in errors(caplog)]
    assert sorted(parts) == ["csv", "journal"]  # one line each


def test_a_disk_that_stays_full_is_told_once_and_the_gap_is_noted(out, caplog, monkeypatch):
    (out / "rank0").mkdir(parents=True)
    (out / "rank0" / "gradient_0-999.csv").symlink_to("/dev/full")
    monkeypatch.setattr("trainsentry.monitor.trainer.wiring.next_restart", lambda directory: 0)
    model, optimizer, monitor = make(out, export={"tensorboard": True})
    with monitor:
        assert train(model, optimizer, STEPS, monitor).losses == bare()
    assert len(errors(caplog)) == 1
    assert "No space left" in errors(caplog)[0].getMessage()
    found = status(out)
    assert "No space left" in found["exporters"]["csv"]
    reason = found["exporters"]["csv"]
    assert found["gaps"] == [{"sink": "csv", "first_step": 0, "last_step": STEPS - 1, "reason": reason}]
    assert found["failures"]["csv"]["count"] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_disk_that_fills_up_during_the_run(out, caplog):
    out.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", out], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        model, optimizer, monitor = make(out)
        with monitor:
            losses = train(model, optimizer, STEPS * 5, monitor).losses
        assert losses[:STEPS] == bare()
        parts = {r.getMessage().split()[1] for r in errors(caplog)}
        assert "csv" in parts
        assert parts <= {"csv", "journal"}
    finally:
        subprocess.run(["umount", "-l", out], check=True)


@pytest.mark.parametrize(
    ("name", "content"),
    [("incidents.jsonl", '{"id": null}\nnonsense\n[3]\n'), ("run.json", "[]"), ("run.json", '{"starts": 3}')],
)
def test_odd_files_in_the_directory_do_not_matter(out, name, content, caplog):
    out.mkdir()
    (out / name).write_text(content)
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, STEPS, monitor, before_step=lambda s: flip_bit(model[2].weight) if s == 8 else None)
    assert errors(caplog) == []
    assert '"name": "2.weight"' in (out / "incidents.jsonl").read_text()
    assert json.loads((out / "run.json").read_text())["starts"]
