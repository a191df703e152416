"""Whatever fails in the monitor, training goes on, one clear line is logged, and it is counted."""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny_models import EVERY_STEP, mlp, train

import trainsentry
from trainsentry.collectors.torch import watch
from trainsentry.collectors.torch.hooks import activations
from trainsentry.collectors.torch.parameters import readers
from trainsentry.monitor.recorder.start import ThreadRecorder

STEPS = 12


def make(out, **config):
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"output_dir": str(out), "collect": EVERY_STEP, **config}
    return model, optimizer, trainsentry.TrainMonitor(settings).watch(model, optimizer)


def bare():
    torch.manual_seed(0)
    model = mlp()
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), STEPS).losses


def status(out):
    return json.loads((out / "rank0" / "status.json").read_text())


def errors(caplog):
    return [r for r in caplog.records if r.levelno >= logging.ERROR]


def plant(*_, **__):
    raise OSError("planted")


PLACES = {
    "activations": (activations.ActivationHooks, "_observe"),
    "gradients": (readers.GradientReader, "read"),
    "parameters": (watch, "read_parameters"),
    "optimizer_state": (watch, "read_state"),
    "updates": (readers.UpdateReader, "keep"),
    "log": (watch.TorchWatch, "log"),
    "step boundary": (watch.TorchWatch, "before_update"),
}


@pytest.mark.parametrize("part", PLACES)
def test_an_exception_planted_in_a_hook_is_contained(out, monkeypatch, caplog, part):
    expected = bare()
    owner, name = PLACES[part]
    monkeypatch.setattr(owner, name, plant)
    model, optimizer, monitor = make(out)
    with monitor:
        assert train(model, optimizer, STEPS, monitor).losses == expected
    assert [part in r.getMessage() for r in errors(caplog)] == [True]
    assert status(out)["failures"][part]["count"] == 1
    if part != "step boundary":
        others = {"gradient", "parameter"} - {part.rstrip("s")}
        assert all((out / "rank0" / f"{name}_0-999.csv").exists() for name in others)
    assert not any(m._forward_hooks for m in model.modules())


def test_strict_lets_it_through(out, monkeypatch):
    monkeypatch.setattr(watch, "read_parameters", plant)
    model, optimizer, monitor = make(out, strict=True)
    with monitor, pytest.raises(OSError, match="planted"):
        train(model, optimizer, STEPS, monitor)


@pytest.fixture
def in_thread(monkeypatch):
    """Run the recorder in a thread, where a test can plant something in it."""
    monkeypatch.setattr("trainsentry.monitor.recorder.link.start_recorder", ThreadRecorder)
    link = "trainsentry.monitor.recorder.link.RecorderLink.__init__"
    from trainsentry.monitor.recorder import link as module

    original = module.RecorderLink.__init__
    monkeypatch.setattr(link, lambda self, settings, table: original(self, settings, table, ThreadRecorder))


def test_an_exception_in_detection_leaves_the_records_written(out, monkeypatch, caplog, in_thread):
    monkeypatch.setattr("trainsentry.anomaly.detection.Detection.judge", plant)
    model, optimizer, monitor = make(out)
    with monitor:
        assert train(model, optimizer, STEPS, monitor).losses == bare()
    assert sum("detection" in r.getMessage() for r in errors(caplog)) == 1
    assert set(pd.read_csv(out / "rank0" / "gradient_0-999.csv")["step"]) == set(range(STEPS))
    assert status(out)["failures"]["detection"]["count"] == 1


def test_a_writer_that_blocks_for_ever_is_left_behind(out, monkeypatch, caplog, in_thread):
    import threading

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


def test_a_recorder_that_blocks_for_ever_costs_a_bounded_wait(out, monkeypatch, caplog, in_thread):
    import threading

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


def test_a_recorder_that_is_killed_has_a_successor_and_nothing_is_lost(out, caplog):
    model, optimizer, monitor = make(out)
    with monitor:

        def kill(step):
            if step == 6:
                monitor.flush()
                monitor._loop.link.running.process.kill()
                monitor._loop.link.running.process.wait()

        assert train(model, optimizer, STEPS, monitor, before_step=kill).losses == bare()
    assert len(errors(caplog)) == 1
    assert "died" in errors(caplog)[0].getMessage()
    table = pd.read_csv(out / "rank0" / "gradient_0-999.csv")
    assert sorted(table["step"]) == sorted(list(range(STEPS)) * 4)
    assert status(out)["recorders_started"] == 2


def test_recorders_that_keep_dying_are_given_up(out, caplog):
    model, optimizer, monitor = make(out)
    with monitor:

        def kill(step):
            if monitor._loop.link.dead is None:
                monitor._loop.link.running.process.kill()
                monitor._loop.link.running.process.wait()

        assert train(model, optimizer, STEPS, monitor, before_step=kill).losses == bare()
    assert sum("nothing more is recorded" in r.getMessage() for r in errors(caplog)) == 1
    assert "recorders died" in status(out)["state"]


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


def test_a_dump_that_fails_is_contained(out, monkeypatch, caplog):
    from tiny_models import flip_bit

    monkeypatch.setattr("trainsentry.collectors.torch.saving.save_tensor", plant)
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, STEPS, monitor, before_step=lambda s: flip_bit(model[2].weight) if s == 8 else None)
        monitor.flush()
        assert [i.name for i in monitor.incidents] == ["2.weight"]
    assert status(out)["failures"]["dump"]["count"] == 1


def test_ctrl_c_ends_training_and_loses_nothing(out, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"""
import signal, torch, trainsentry, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts the tests in the background may ignore it
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with trainsentry.TrainMonitor({{"output_dir": {str(out)!r}}}).watch(model, optimizer):
    for step in range(100000):
        optimizer.zero_grad(); model(torch.ones(2, 4)).sum().backward(); optimizer.step()
        print(step, flush=True)
        time.sleep(0.01)
""")
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if int(line) >= 20:
            break
    recorder = int(subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()[0])
    os.kill(recorder, signal.SIGINT)  # as a terminal would send it to both
    process.send_signal(signal.SIGINT)
    output, log = process.communicate(timeout=60)
    last = max([20, *(int(line) for line in output.split())])
    assert "died" not in log
    table = pd.read_csv(out / "rank0" / "gradient_0-999.csv")
    assert sorted(set(table["step"])) == list(range(last + 1)) or sorted(set(table["step"])) == list(range(last + 2))


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
        assert (table.groupby("name")["step"].max() == STEPS - 1).all()
    gradients = pd.read_csv(out / "rank0" / "gradient_0-999.csv")
    assert sorted(gradients["step"]) == sorted(list(range(STEPS)) * 4)


def test_the_flight_recorder_is_bounded(out):
    model, optimizer, monitor = make(out, ring_size=2**20)
    with monitor:
        train(model, optimizer, 600, monitor)
        loop = monitor._loop
        assert loop.records.recorded_bytes <= 2**20
        assert loop.records.recorded_bytes == sum(r.held_bytes for r in loop.records.recorded)
        assert len(set(monitor.records()["step"])) < 600
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0


def test_a_dump_that_fails_in_a_hook_is_given_up_and_its_hooks_are_gone(out, monkeypatch, caplog):
    from tiny_models import flip_bit

    from trainsentry.collectors.torch import saving

    original, calls = saving.save_tensor, []

    def fails_later(tensor, path):
        calls.append(path)
        if "step9" in str(path):
            raise OSError(28, "No space left on device")
        original(tensor, path)

    monkeypatch.setattr(saving, "save_tensor", fails_later)
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, STEPS, monitor, before_step=lambda s: flip_bit(model[2].weight) if s == 8 else None)
        assert not monitor._loop.watch.capture.attached
    assert sum("step9" in str(path) for path in calls) == 1
    lines = [r.getMessage() for r in errors(caplog)]
    assert len(lines) == 1
    assert "No space left" in lines[0]
    assert "Traceback" not in lines[0]


def test_many_open_files_do_not_matter(out):
    from tiny_models import flip_bit

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1300:
        pytest.skip("the system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1300), hard))
    files = [open("/dev/null") for _ in range(1100)]  # noqa: SIM115 - they are the point
    try:
        model, optimizer, monitor = make(out)
        with monitor:
            train(model, optimizer, STEPS, monitor, before_step=lambda s: flip_bit(model[2].weight) if s == 8 else None)
            monitor.flush()
            assert [i.name for i in monitor.incidents] == ["2.weight"]
        assert monitor._guard.failures == {}
    finally:
        for file in files:
            file.close()


def test_a_recorder_that_hangs_is_waited_for_once(out, monkeypatch):
    from tiny_models import flip_bit

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


def test_messages_larger_than_the_ring_takes_arrive_whole(out):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(300)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = {"output_dir": str(out), "strict": True, "collect": EVERY_STEP, "ring_size": "1MiB"}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        state = monitor.state_dict()
    assert len(json.dumps(state)) > 2**20
    graph = json.loads((out / "rank0" / "graph.json").read_text())
    assert len(graph["modules"]) == 301
    resumed = trainsentry.TrainMonitor(config)
    resumed.load_state_dict(state)
    with resumed.watch(model, optimizer):
        assert resumed.state_dict()["step"] == 6
    assert resumed._guard.failures == {}
    assert pd.read_csv(out / "rank0" / "gradient_0-999.csv")["step"].nunique() == 6


def test_a_record_whose_series_could_not_be_told_is_left_out(out):
    import numpy as np

    from trainsentry.collectors.record import StepRecord
    from trainsentry.collectors.series import Layout, Series, SeriesTable
    from trainsentry.collectors.statistics import COLUMNS
    from trainsentry.monitor.config.files import load_config
    from trainsentry.monitor.recorder.link import RecorderLink
    from trainsentry.monitor.recorder.recorder_settings import RecorderSettings

    class Nobody:
        mode = "nobody"

        def __init__(self, *_):
            pass

        def join(self, timeout):
            return True

        def kill(self):
            pass

    table = SeriesTable()
    config = load_config({"export": {"max_wait": 0.01}}).model_dump(mode="json") | {"ring_size": 2**12}
    link = RecorderLink(RecorderSettings(config, str(out), 0), table, Nobody)
    while link.ring.write(9, [bytes(200)]):
        pass
    layout = table.layout_id(Layout((1,), "float32", 1))
    ids = [table.series_id(Series(f"layer{i}.weight", "gradient")) for i in range(20)]
    one = np.asarray(ids[:1], np.int32), np.asarray([layout], np.int32), np.zeros((1, COLUMNS))
    link.send_record(StepRecord(0, 0, *one))
    kinds = []
    while (message := link.ring.read(link.ring.head)) is not None:
        kinds.append(message[0])
    assert set(kinds) == {9}
    assert link.dropped == 1
    link.close(0.0)


def test_two_monitors_in_one_directory_write_beside_each_other(out):
    first, one, a = make(out)
    second, two, b = make(out)
    with a, b:
        train(first, one, 3, a)
        train(second, two, 3, b)
    for name in ("gradient_0-999.csv", "gradient_0-999.r1.csv"):
        table = pd.read_csv(out / "rank0" / name)
        assert not table.duplicated(["name", "step"]).any()


def test_a_monitor_that_nobody_holds_goes_on_and_one_with_its_model_gone_ends(out):
    import gc

    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer)
    gc.collect()
    train(model, optimizer, 3)
    hook = next(iter(optimizer._optimizer_step_pre_hooks.values()))
    recorder = hook.owner.listener.owner._loop.link.running.process
    assert recorder.poll() is None
    del model, optimizer, hook
    gc.collect()
    recorder.wait(10)


def test_a_verdict_that_comes_late_is_waited_for_again(out):
    import socket

    from trainsentry.monitor.recorder import messages

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


@pytest.mark.parametrize(
    ("name", "content"),
    [("incidents.jsonl", '{"id": null}\nnonsense\n[3]\n'), ("run.json", "[]"), ("run.json", '{"starts": 3}')],
)
def test_odd_files_in_the_directory_do_not_matter(out, name, content, caplog):
    from tiny_models import flip_bit

    out.mkdir()
    (out / name).write_text(content)
    model, optimizer, monitor = make(out)
    with monitor:
        train(model, optimizer, STEPS, monitor, before_step=lambda s: flip_bit(model[2].weight) if s == 8 else None)
    assert errors(caplog) == []
    assert '"name": "2.weight"' in (out / "incidents.jsonl").read_text()
    assert json.loads((out / "run.json").read_text())["starts"]


def test_cost_is_told_by_the_steps_of_this_start(out):
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = trainsentry.TrainMonitor({"output_dir": str(out)}).watch(model, optimizer, start_step=100_000)
    with monitor:
        train(model, optimizer, STEPS, monitor)
    cost = status(out)["cost"]
    assert cost["seconds_a_step"] == pytest.approx(cost["host_seconds"] / (STEPS - 1))  # the first has no beginning
