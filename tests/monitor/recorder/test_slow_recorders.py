"""A recorder that blocks or hangs costs training a bounded wait."""

import os
import signal
import socket
import threading
import time

from tiny_models import flip_bit, train
from watched import STEPS, bare, errors, make

from trainsentry.monitor.recorder import messages


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
