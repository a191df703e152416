"""The monitor does nothing while a device graph is captured, and says that it cannot see replays."""

import logging

import pytest
import torch
from tiny_models import step
from torch import nn

import trainsentry
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch import graph_capture
from trainsentry.collectors.torch.device.cuda import CUDA
from trainsentry.collectors.torch.graph_capture import ANY_REPLAYS, CAPTURED_REPLAYS, UNSEEN, GraphCaptures
from trainsentry.collectors.torch.parameters import gradient_writes


class Graph:
    """Replaces `torch.cuda.CUDAGraph` where there is no device, and records the calls made while it is open."""

    def __init__(self, *, fails=False):
        self.fails = fails
        self.recorded = []

    def capture_begin(self, *args, **kwargs):
        if self.fails:
            raise RuntimeError("no capture")

    def capture_end(self):
        if self.fails:
            raise RuntimeError("no capture")

    def replay(self):
        for call in self.recorded:
            call()


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)


class Captured:
    def __init__(self, graph):
        self.graph = graph

    def __enter__(self):
        self.graph.capture_begin()

    def __exit__(self, *_):
        self.graph.capture_end()


def watched(tmp_path, **collect):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"output_dir": str(tmp_path), "collect": collect or {"gradients": {"every": 1}}, "strict": True}
    return model, optimizer, trainsentry.TrainMonitor(config).watch(model, optimizer)


def test_nothing_is_read_while_a_graph_is_captured(tmp_path, graphs):
    collect = {part: {"every": 1} for part in ("gradients", "parameters", "optimizer_state", "updates", "activations")}
    model, optimizer, monitor = watched(tmp_path, **collect)
    with monitor:
        step(model, optimizer)
        rows = monitor._loop.watch.rows
        with Captured(Graph()):
            asked = len(rows)
            step(model, optimizer)
            monitor.log(loss=1.0)
            assert len(rows) == asked
            assert monitor._loop.step == 1  # a step that is recorded is none
        step(model, optimizer)
        assert set(monitor.records().step) == {0, 1}


def test_a_capture_that_fails_leaves_the_monitor_at_work(tmp_path, graphs):
    model, optimizer, monitor = watched(tmp_path)
    with monitor:
        with pytest.raises(RuntimeError, match="no capture"):
            Graph(fails=True).capture_begin()
        with pytest.raises(RuntimeError, match="no capture"):
            Graph(fails=True).capture_end()
        step(model, optimizer)
        assert set(monitor.records().step) == {0}


def test_the_classes_are_as_they_were_once_nobody_watches(tmp_path, graphs):
    before = dict(vars(Graph))
    *_, monitor = watched(tmp_path)
    assert vars(Graph)["replay"] is not before["replay"]
    monitor.close()
    assert dict(vars(Graph)) == before


def test_steps_inside_replays_are_read_where_the_loop_calls_step(tmp_path, graphs, caplog):
    model, optimizer, monitor = watched(
        tmp_path, gradients={"every": 1}, parameters={"every": 1}, optimizer_state={"every": 1}
    )
    with monitor, caplog.at_level(logging.WARNING, "trainsentry"):
        graph = Graph()
        with Captured(graph):
            step(model, optimizer)
        for _ in range(4):
            graph.replay()
            model[0].weight.grad = torch.full_like(model[0].weight, 2.0)
            monitor.step()
        records = monitor.records()
    assert set(records.step) == {0, 1, 2, 3}
    assert "0.weight" in set(records[records.quantity == "parameter"].name)
    assert records[(records.quantity == "gradient") & (records.name == "0.weight")]["max"].eq(2.0).all()
    assert UNSEEN not in caplog.text


def test_steps_inside_replays_that_nobody_sees_are_told_of_once(tmp_path, graphs, caplog):
    model, optimizer, monitor = watched(tmp_path)
    with monitor, caplog.at_level(logging.WARNING, "trainsentry"):
        graph = Graph()
        with Captured(graph):
            step(model, optimizer)
        for _ in range(CAPTURED_REPLAYS + 3):
            graph.replay()
    assert sum(UNSEEN in r.message for r in caplog.records) == 1


def test_replays_between_steps_are_nothing_to_tell_of(tmp_path, graphs, caplog):
    """Generation by captured graphs, or a captured forward pass, while the optimizer steps in plain sight."""
    model, optimizer, monitor = watched(tmp_path)
    with monitor, caplog.at_level(logging.WARNING, "trainsentry"):
        graph = Graph()
        with Captured(graph):
            model(torch.ones(2, 4))
        for _ in range(3):
            for _ in range(ANY_REPLAYS - 1):
                graph.replay()
            step(model, optimizer)
        for _ in range(ANY_REPLAYS + 1):
            graph.replay()
    assert UNSEEN not in caplog.text


@pytest.mark.parametrize("replays", [True, False])
def test_gradients_that_a_replay_has_written_are_not_those_of_the_update_before(tmp_path, graphs, monkeypatch, replays):
    """torch counts no writes of a replay, so that its gradients look like old ones."""
    monkeypatch.setattr(gradient_writes, "has_compiled", lambda: False)  # another test of this process may have
    model, optimizer, monitor = watched(tmp_path)
    with monitor:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if replays:
            Graph().replay()
        optimizer.step()
        monitor.flush()
        assert ("stale_update.0" in set(monitor.records().name)) != replays


def test_a_capture_that_is_begun_elsewhere_shows_in_its_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    captures = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures[0])
    model, optimizer, monitor = watched(tmp_path)
    with monitor:
        rows = monitor._loop.watch.rows
        rows._accelerator = CUDA
        rows.drop()
        step(model, optimizer)
        assert monitor._loop.step == 0
        assert len(monitor._loop.watch.rows) == 0
        captures[0] = False
        step(model, optimizer)
        assert set(monitor.records().step) == {0}


def test_callables_are_graphed_without_our_hooks(tmp_path, monkeypatch):
    """torch refuses modules that have hooks at that moment, and runs them for practice before it graph_capture."""
    seen = []

    def make_graphed_callables(module, args):
        seen.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()))
        module(*args).sum().backward()
        return module

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make_graphed_callables)
    model, optimizer, monitor = watched(tmp_path, activations={"every": 1})
    with monitor:
        torch.cuda.make_graphed_callables(model, (torch.ones(2, 4),))
        assert seen == [0]
        step(model, optimizer)
        records = monitor.records()
        assert set(records.micro_step) == {0}
        assert "0.output.0" in set(records.name)
    assert torch.cuda.make_graphed_callables is make_graphed_callables


def test_two_monitors_are_held_and_released_together(graphs):
    guards = [Guard(), Guard()]
    both = [GraphCaptures(guard, lambda: None, lambda: None) for guard in guards]
    with Captured(Graph()):
        assert [guard.suspended for guard in guards] == [1, 1]
    assert [guard.suspended for guard in guards] == [0, 0]
    for each in both:
        each.close()
    assert not graph_capture._patched
