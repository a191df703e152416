"""A recorder that blocks or hangs costs training a bounded wait."""

import os
import signal
import socket
import threading
import time

import pytest
from step_records import Records
from tiny_models import flip_bit, train
from watched import STEPS, bare, errors, make

from trainsentry.anomaly.detection import Detection
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.loop import Intake
from trainsentry.monitor.recorder.ring import Ring
from trainsentry.monitor.recorder.status import LATE_STEPS


def test_a_recorder_that_blocks_for_ever_costs_a_bounded_wait(out, monkeypatch, caplog, in_thread):
    release = threading.Event()
    monkeypatch.setattr("trainsentry.monitor.recorder.session.Session.take_record", lambda *_: release.wait(20))
    monkeypatch.setattr("trainsentry.monitor.trainer.ending.FLUSH_SECONDS", 0.5)
    model, optimizer, monitor = make(out, ring_size=2**20, export={"max_wait": 0.3})
    monkeypatch.setattr(monitor._loop.link.ring, "size", 2**15)  # a ring that is soon full
    started = time.monotonic()
    losses = train(model, optimizer, STEPS * 20, monitor).losses
    assert time.monotonic() - started < 10
    assert losses[:STEPS] == bare()
    assert monitor._loop.link.dropped > 0
    assert sum("does not keep up" in r.getMessage() for r in errors(caplog)) == 1
    release.set()
    monitor.close()


def test_a_recorder_that_hangs_is_waited_for_once(out, monkeypatch):
    monkeypatch.setattr("trainsentry.monitor.trainer.ending.FLUSH_SECONDS", 1.0)
    settings = {"dump": {"cooldown_steps": 0}}
    model, optimizer, monitor = make(out, export={"max_wait": 1.0}, on_incident=settings)
    recorder = monitor._loop.link.running.process.pid

    def before_step(step):
        if step == 3:
            os.kill(recorder, signal.SIGSTOP)
            flip_bit(model[2].weight)

    started = time.monotonic()
    train(model, optimizer, STEPS * 3, monitor, before_step=before_step)
    monitor.close()
    assert time.monotonic() - started < 15
    assert not os.path.exists(f"/proc/{recorder}")


def test_a_verdict_that_comes_late_is_waited_for_again(out):
    _, _, monitor = make(out)
    with monitor:
        link = monitor._loop.link
        link._verdicts_missing = 3
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        real, link._channel = link._channel, ours
        theirs.send(messages.encode({"type": messages.EXAMINED, "step": 0}) + b"\n")
        assert messages.EXAMINED in [m["type"] for m in link.poll()]
        link._channel = real
        ours.close(), theirs.close()
        assert link._verdicts_missing == 0


def test_a_recorder_that_is_late_says_so_once_and_at_the_end(out, caplog, capfd, monkeypatch):
    monkeypatch.setattr("trainsentry.monitor.trainer.ending.FLUSH_SECONDS", 30.0)
    model, optimizer, monitor = make(out)
    recorder = monitor._loop.link.running.process.pid

    def before_step(step):
        if step == 3:
            os.kill(recorder, signal.SIGSTOP)
        if step == STEPS * 10 - 1:
            time.sleep(2.5)
            os.kill(recorder, signal.SIGCONT)

    train(model, optimizer, STEPS * 10, monitor, before_step=before_step)
    monitor.flush()
    monitor.close()
    assert sum("behind the training" in r.getMessage() for r in caplog.records) == 1
    assert "alarms came up to" in capfd.readouterr().err


class Listing:
    """A session that lists what is judged ahead and what is taken."""

    def __init__(self, table):
        self.table, self.step, self.calls = table, -1, []

    def look_at(self, record):
        self.calls.append(("look", record.step))

    def take_record(self, record):
        self.step = record.step
        self.calls.append(("take", record.step))


@pytest.mark.parametrize("waiting", [LATE_STEPS, 20])
def test_a_late_recorder_looks_at_all_that_waits_before_it_takes_the_next(waiting):
    records, ring = Records(), Ring.create(2**20)
    session = Listing(records.table)
    intake = Intake(session, ring)
    for step in range(waiting):
        ring.write(messages.RECORD, records.step(step, {("w", "gradient"): 1.0}).encode())
        ring.note_newest(step, 0.0)
    intake.drain(ring.head)
    taken = [("take", step) for step in range(waiting)]
    looked = [("look", step) for step in range(waiting)] if waiting > LATE_STEPS else []
    assert session.calls == looked + taken
    ring.close()


def test_what_is_judged_ahead_learns_nothing_and_knows_masks():
    records = Records()
    detection, weight, mask = Detection(records.table), ("w", "gradient"), ("a.output.0", "activation_output")
    first = {weight: 1.0, mask: float("inf")}
    detection.judge(records.step(0, first))
    assert detection.certain(records.step(5, first)) == []
    [found] = detection.certain(records.step(6, {**first, weight: float("nan")}))
    assert (found.name, found.step, found.kind) == ("w", 6, "nonfinite")
    assert found.last_clean == 5, "a record that waits tells that it was finite"
    assert detection.certain(records.step(7, {("new", "gradient"): float("inf")})) == [], "nothing is known of it yet"
    assert detection.judge(records.step(1, first)) == []


def test_a_fault_during_a_standstill_of_the_recorder_is_told_once_and_right(out):
    model, optimizer, monitor = make(out, on_incident={"dump": False, "sample_every_step_for": 0})
    recorder = monitor._loop.link.running.process.pid

    def before_step(step):
        if step == 3:
            os.kill(recorder, signal.SIGSTOP)
        if step == 30:
            flip_bit(model[2].weight)
        if step == 59:
            os.kill(recorder, signal.SIGCONT)

    monitor._loop.same_step = False
    train(model, optimizer, 60, monitor, before_step=before_step)
    monitor.close()
    [incident] = monitor.incidents
    assert (incident.name, incident.first_seen) == ("2.weight", 30)
