"""Records in the ring are written even if the recorder stops or dies, and the first lost step is named."""

import os
import signal
from dataclasses import replace

import pandas as pd
from tiny_models import train
from watched import STEPS, bare, errors, gaps, make, rows, start_with, status

from trainsentry.monitor.recorder.start import ProcessRecorder


def stop(process):
    """Stop a process as a person would, and wait until it has stopped."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def kill(link):
    """Kill the recorder of a link, and wait until it is gone."""
    link.running.process.kill()
    link.running.process.wait()


def born_dead(settings, ring, channel):
    """Start a recorder that does not live to see its first message."""
    running = ProcessRecorder(settings, ring, channel)
    running.process.kill()
    running.process.wait()
    return running


def test_what_a_stopped_recorder_leaves_is_written_at_the_end(out, caplog, capsys):
    model, optimizer, monitor = make(out, export={"max_wait": 0.5})
    process = monitor._loop.link.running.process
    train(model, optimizer, 60, monitor, before_step=lambda step: stop(process) if step == 9 else None)
    monitor.close()
    assert process.returncode == -signal.SIGKILL  # so that it cannot come back and write the same rows
    for table in ("gradient", "parameter", "activation_output"):
        assert set(rows(out, table)) == set(range(60)), table
    assert set(rows(out).values()) == {4}
    found = status(out)
    assert (found["gaps"], found["step"]) == ([], 59)
    assert "did not answer" in found["state"]
    assert [r.getMessage() for r in errors(caplog) if "the training process writes the rest" in r.getMessage()]
    assert "Records are in" in capsys.readouterr().err


def test_a_stopped_recorder_is_replaced_when_the_ring_is_full(out, caplog):
    model, optimizer, monitor = make(out, ring_size=2**20)
    link = monitor._loop.link
    process, config = link.running.process, link.settings.config
    patient = config | {"export": config["export"] | {"max_wait": 120.0}}

    def before_step(step):
        if step == 9:
            stop(process)
        if step == 300:  # the ring is more than half full: this is for the successor, however busy the machine
            link.settings = replace(link.settings, config=patient)
            assert link.ring.used > link.ring.size // 2
            assert link.relay == 0

    train(model, optimizer, 500, monitor, before_step=before_step)
    monitor.close()
    assert gaps(out) == []
    assert rows(out) == dict.fromkeys(range(500), 4)
    assert any("it was stopped" in r.getMessage() for r in errors(caplog))


def test_what_lay_in_the_ring_of_recorders_that_died_at_birth_is_written(out, caplog, monkeypatch):
    start_with(monkeypatch, born_dead)
    model, optimizer, monitor = make(out)
    with monitor:
        assert train(model, optimizer, STEPS, monitor).losses == bare()
    assert rows(out) == dict.fromkeys(range(STEPS), 4)
    assert gaps(out) == []
    found = status(out)
    assert "4 recorders died" in found["state"]
    assert found["step"] == STEPS - 1
    assert found["cost"]["host_seconds"] > 0
    assert not any("does not keep up" in r.getMessage() for r in errors(caplog))


def test_without_a_recorder_the_first_step_that_finds_no_room_is_named(out, caplog, monkeypatch, capsys):
    start_with(monkeypatch, born_dead)
    model, optimizer, monitor = make(out, ring_size=2**20)
    with monitor:
        train(model, optimizer, 500, monitor)
    written = rows(out)
    first = len(written)
    assert written == dict.fromkeys(range(first), 4)
    assert 0 < first < 500
    assert gaps(out) == [("ring", first, 499)]
    assert sum(f"left out from step {first} on" in r.getMessage() for r in errors(caplog)) == 1
    assert f"ring lacks steps {first} to 499" in capsys.readouterr().err


def test_a_recorder_that_dies_over_a_flush_is_replaced_by_one_that_answers(out, monkeypatch):
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, STEPS, monitor)
        monitor.flush()
        link = monitor._loop.link
        original, killed = link.send, []

        def send(kind, **content):
            sent = original(kind, **content)
            if kind == "flush" and not killed:
                link.running.process.kill()
                killed.append(link.running.process.wait())
                link.ring._counters[8] = link.ring.head  # it had taken the question, and not answered
            return sent

        monkeypatch.setattr(link, "send", send)
        _, answer = link.ask("flush", "flushed", 60.0)
    assert killed
    assert answer is not None
    assert rows(out) == dict.fromkeys(range(STEPS), 4)


def test_a_successor_knows_the_gaps_of_the_recorder_before_it(out):
    model, optimizer, monitor = make(out)

    def before_step(step):
        link = monitor._loop.link
        if step == 4:
            monitor.flush()
            (out / "rank0" / "gradient_0-999.csv").unlink()
        if step == 8:
            monitor.flush()
            kill(link)

    with monitor:
        train(model, optimizer, STEPS, monitor, before_step=before_step)
    assert gaps(out) == [("csv", 0, 3)]
    assert rows(out) == dict.fromkeys(range(4, STEPS), 4)


def test_what_a_recorder_kept_for_a_full_disk_is_a_gap_when_it_dies(out, monkeypatch):
    (out / "rank0").mkdir(parents=True)
    (out / "rank0" / "gradient_0-999.csv").symlink_to("/dev/full")
    monkeypatch.setattr("trainsentry.monitor.trainer.wiring.next_restart", lambda directory: 0)
    model, optimizer, monitor = make(out)

    def before_step(step):
        if step == 6:
            monitor.flush()
            kill(monitor._loop.link)

    with monitor:
        train(model, optimizer, STEPS, monitor, before_step=before_step)
    missing = {step for sink, first, last in gaps(out) for step in range(first, last + 1) if sink == "csv"}
    assert missing == set(range(STEPS))


def test_a_recorder_that_is_killed_has_a_successor_and_nothing_is_lost(out, caplog):
    model, optimizer, monitor = make(out)
    with monitor:

        def before_step(step):
            if step == 6:
                monitor.flush()
                kill(monitor._loop.link)

        assert train(model, optimizer, STEPS, monitor, before_step=before_step).losses == bare()
    # A write that takes long on a busy disk is an error of its own.
    assert sum("the recorder died" in r.getMessage() for r in errors(caplog)) == 1
    table = pd.read_csv(out / "rank0" / "gradient_0-999.csv")
    assert sorted(table["step"]) == sorted(list(range(STEPS)) * 4)
    assert status(out)["recorders_started"] == 2


def test_recorders_that_keep_dying_are_given_up(out, caplog):
    model, optimizer, monitor = make(out)
    with monitor:

        def before_step(step):
            if monitor._loop.link.dead is None:
                kill(monitor._loop.link)

        assert train(model, optimizer, STEPS, monitor, before_step=before_step).losses == bare()
    assert sum("recording stops" in r.getMessage() for r in errors(caplog)) == 1
    assert "recorders died" in status(out)["state"]


def test_ctrl_c_does_not_end_a_recorder_that_has_only_begun_to_start(out, caplog):
    model, optimizer, monitor = make(out)
    with monitor:
        process = monitor._loop.link.running.process
        process.send_signal(signal.SIGINT)  # Python's own start takes longer than this
        process.send_signal(signal.SIGHUP)
        train(model, optimizer, STEPS, monitor)
        assert monitor._loop.link.running.process is process
    assert not errors(caplog)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert process.returncode == 0


def test_a_recorder_that_dies_before_it_has_heard_of_any_series_loses_nothing(out, caplog):
    model, optimizer, monitor = make(out)
    with monitor:
        monitor._loop.link.running.kill()
        train(model, optimizer, STEPS, monitor)
    assert [r.message for r in errors(caplog) if "died" not in r.message] == []
    assert status(out)["gaps"] == []
    tables = [pd.read_csv(path) for path in (out / "rank0").glob("*_0-999.csv")]
    assert len(tables) >= 4
    for table in tables:
        # Options and writes have a row where they change, and modules take turns at being computed again.
        moving = table[~table["name"].str.startswith(("option.", "gradient_writes.", "recomputed", "euler_gap."))]
        assert (moving.groupby("name")["step"].max() == STEPS - 1).all()
    gradients = pd.read_csv(out / "rank0" / "gradient_0-999.csv")
    assert sorted(gradients["step"]) == sorted(list(range(STEPS)) * 4)
