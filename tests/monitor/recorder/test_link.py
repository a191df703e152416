"""Records and descriptions pass from the trainer to its recorder whole, or are counted as left out."""

import json
import resource

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import EVERY_STEP, train
from watched import make

import trainsentry
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import Layout, Series, SeriesTable
from trainsentry.collectors.statistics import COLUMNS
from trainsentry.monitor.config.files import load_config
from trainsentry.monitor.recorder.link import RecorderLink
from trainsentry.monitor.recorder.recorder_settings import RecorderSettings


def test_the_flight_recorder_is_bounded(out):
    model, optimizer, monitor = make(out, ring_size=2**20)
    with monitor:
        train(model, optimizer, 600, monitor)
        loop = monitor._loop
        assert loop.outbox.held_bytes <= 2**20
        assert loop.outbox.held_bytes == sum(r.memory_bytes for r in loop.outbox.records)
        assert len(set(monitor.records()["step"])) < 600
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0


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


class Nobody:
    """A recorder that reads nothing."""

    mode = "nobody"

    def __init__(self, settings, ring, channel):
        self._channel = channel.dup()

    def join(self, timeout):
        return True

    def kill(self):
        pass


class BusyCore:
    """The time on a core that gives a program a turn only now and then."""

    def __init__(self, late):
        self.now, self._late = 0.0, late

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds + self._late


def link_with_a_full_ring(out, table, max_wait):
    config = load_config({"export": {"max_wait": max_wait}}).model_dump(mode="json") | {"ring_size": 2**12}
    link = RecorderLink(RecorderSettings(config, str(out), 0), table, Nobody)
    while link.ring.write(9, [bytes(200)]):
        pass
    return link


@pytest.mark.parametrize("late", [0.0, 0.05])
def test_a_full_ring_is_waited_for_no_longer_on_a_busy_core(out, monkeypatch, late):
    link = link_with_a_full_ring(out, SeriesTable(), 5.0)
    clock = BusyCore(late)
    monkeypatch.setattr("trainsentry.monitor.recorder.link.time", clock)
    assert not link.send("graph", graph="x" * 300)
    assert 5.0 <= clock.now < 5.0 + 2 * (0.001 + late)
    waited = clock.now
    assert not link.send("graph", graph="x" * 300)
    assert clock.now == waited
    link.close(0.0)


def test_a_record_whose_series_could_not_be_told_is_left_out(out):
    table = SeriesTable()
    link = link_with_a_full_ring(out, table, 0.01)
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
