"""Monitors of compiled models share one process, name what they cannot read in one line, and leave nothing behind."""

import copy
import logging

import pytest
import torch
from compiled_models import (
    SAME,
    Net,
    train,
)
from torch._dynamo.utils import counters

import trainsentry
from trainsentry.collectors.torch.hooks.compiler import TRACES_GRADIENTS

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_what_is_not_read_inside_fused_graphs_is_said_in_one_line(tmp_path, caplog):
    def fuses(graph, inputs):
        return graph.forward

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"output_dir": str(tmp_path), "collect": {"activations": {"every": 1}}, "strict": True}
    with (
        caplog.at_level(logging.WARNING, "trainsentry"),
        trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor,
    ):
        train(model, torch.compile(model, backend=fuses, fullgraph=True), optimizer, SAME)
        assert "output.0" in set(monitor.records().name)
        assert "blocks.1.fc.output.0" not in set(monitor.records().name)
    told = [r.message for r in caplog.records if "collect.activations.inside_graphs" in r.message]
    assert len(told) == 1
    assert "fuses" in told[0]


def test_runs_one_after_another_share_graphs_and_limits(tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    counted = []
    for i in range(4):
        config = {"output_dir": str(tmp_path / str(i)), "collect": {"activations": {"every": 2}}, "strict": True}
        with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
            train(model, forward, optimizer, (3, 4, 5, 6) * 2)
            assert "blocks.1.fc.output.0" in set(monitor.records().name)
        counted.append(counters["stats"]["unique_graphs"])
    assert set(counted) == {counted[0]}


def test_a_second_model_in_one_process(tmp_path):
    """As a GAN has, or a script that compares modes: the compiler has seen our hooks before."""
    for i in range(3):
        torch.manual_seed(i)
        model = Net(i + 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = {"output_dir": str(tmp_path / str(i)), "collect": {"activations": {"every": 2}}, "strict": True}
        with trainsentry.TrainMonitor(config).watch(model, optimizer):
            train(model, torch.compile(model, backend="aot_eager", fullgraph=True), optimizer, SAME)


def test_a_copy_that_is_watched_takes_no_site_of_the_original(tmp_path):
    """As an average of weights does, made by deepcopy while the original is watched."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"collect": {"activations": {"every": 1}}, "strict": True}
    with trainsentry.TrainMonitor({**config, "output_dir": str(tmp_path / "one")}).watch(model, optimizer) as one:
        other = copy.deepcopy(model)
        moved = torch.optim.SGD(other.parameters(), lr=0.1)
        with trainsentry.TrainMonitor({**config, "output_dir": str(tmp_path / "two")}).watch(other, moved) as two:
            train(model, torch.compile(model, backend="aot_eager"), optimizer, SAME)
            train(other, torch.compile(other, backend="aot_eager"), moved, SAME[:3])
            for monitor, steps in ((one, len(SAME)), (two, 3)):
                records = monitor.records()
                assert set(records[records.name == "blocks.1.fc.output.0"].step) == set(range(steps))


def test_a_second_monitor_of_a_compiled_model_takes_over(tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"collect": {"activations": {"every": 2}}, "strict": True}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    one = trainsentry.TrainMonitor({**config, "output_dir": str(tmp_path / "one")}).watch(model, optimizer)
    train(model, compiled, optimizer, SAME)
    with trainsentry.TrainMonitor({**config, "output_dir": str(tmp_path / "two")}).watch(model, optimizer) as two:
        train(model, compiled, optimizer, SAME)
        for monitor in (one, two):
            records = monitor.records()
            assert "blocks.1.fc.output.0" in set(records.name)
            assert records.step.max() == len(SAME) - 1, "the first has seen none of the second's steps"


def test_a_monitor_that_is_closed_leaves_no_hook_on_eager_modules_and_holds_nothing(tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainsentry.TrainMonitor({"output_dir": str(tmp_path), "strict": True}).watch(model, optimizer):
        train(model, model, optimizer, SAME)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_hooks_left_in_graphs_belong_to_nobody(tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = torch.compile(model, backend="eager", fullgraph=True)
    with trainsentry.TrainMonitor({"output_dir": str(tmp_path), "strict": True}).watch(model, optimizer):
        train(model, forward, optimizer, SAME)
    left = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert left
    assert all(hook.owner is None and not hook.switch.sampling for hook in left)


def test_containers_that_are_never_called_are_not_said_to_be_unseen(tmp_path, caplog):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"output_dir": str(tmp_path), "collect": {"activations": {"every": 1}}, "strict": True}
    with (
        caplog.at_level(logging.WARNING, "trainsentry"),
        trainsentry.TrainMonitor(config).watch(model, optimizer),
    ):
        train(model, torch.compile(model, backend="aot_eager"), optimizer, SAME)
    assert not [r for r in caplog.records if "activations of" in r.message]


@pytest.mark.skipif(TRACES_GRADIENTS, reason="this torch shows them")
def test_gradients_that_this_torch_does_not_show_are_said_in_one_line(tmp_path, caplog):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        caplog.at_level(logging.WARNING, "trainsentry"),
        trainsentry.TrainMonitor({"output_dir": str(tmp_path)}).watch(model, optimizer),
    ):
        train(model, torch.compile(model, backend="aot_eager"), optimizer, SAME)
    told = [r.message for r in caplog.records if "need torch 2.13 or later" in r.message]
    assert len(told) == 1
