"""`status.json` gives the state of the recording and its lag, even when the system clock is set back."""

import json
import threading
import time

from tiny_models import train
from watched import STEPS, make, removing_table, status

from trainsentry.exporters.report.page import write_report
from trainsentry.monitor.recorder.session import Session


def test_a_clock_that_is_set_back_does_not_freeze_it(out, monkeypatch, in_thread):
    monkeypatch.setattr("trainsentry.monitor.recorder.session.STATUS_SECONDS", 0.0)
    real, back = time.time, threading.Event()
    monkeypatch.setattr(time, "time", lambda: real() - 3600 * back.is_set())
    written, seen = [], threading.Event()
    original = Session.take_record

    def take_record(session, record):
        original(session, record)
        session.journal.settle()
        written.append(json.loads((out / "rank0" / "status.json").read_text())["records"])
        if len(written) == STEPS:
            seen.set()

    monkeypatch.setattr(Session, "take_record", take_record)
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, STEPS, monitor, before_step=lambda step: back.set() if step == 4 else None)
        assert seen.wait(60)
    assert written == list(range(1, STEPS + 1))


def test_it_says_how_far_the_recorder_is_behind(out, monkeypatch, in_thread):
    go_on, first = threading.Event(), []
    original = Session.take_record

    def take_record(session, record):
        assert go_on.wait(60)
        original(session, record)
        if not first:
            session.journal.settle()
            first.append(status(out))

    monkeypatch.setattr(Session, "take_record", take_record)
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, STEPS, monitor)
        go_on.set()
        monitor.flush()
        assert (status(out)["lag_steps"], status(out)["lag_seconds"]) == (0, 0.0)
    assert first[0]["lag_steps"] == STEPS - 1
    assert first[0]["lag_seconds"] > 0


def test_it_says_what_an_exporter_leaves_out_while_the_run_goes_on(out, monkeypatch, in_thread):
    monkeypatch.setattr("trainsentry.monitor.recorder.session.STATUS_SECONDS", 0.0)
    model, optimizer, monitor = make(out, export={"tensorboard": {"max_raw_tags": 3}})
    with monitor:
        train(model, optimizer, STEPS, monitor)
        monitor.flush()
        assert "`export.tensorboard.max_raw_tags` is 3" in status(out)["left_out"]["tensorboard"]
    assert status(out)["left_out"].keys() == {"tensorboard"}


def test_the_report_shows_what_is_missing(out):
    model, optimizer, monitor = make(out)

    with monitor:
        train(model, optimizer, STEPS, monitor, before_step=removing_table(out, monitor, 6))
    page = write_report(out).read_text()
    assert "csv lacks steps 0 to 5: gradient_0-999.csv removed while the run went on" in page
