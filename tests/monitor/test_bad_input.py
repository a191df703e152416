"""Mistakes in a call are errors before the first step, and leave nothing behind."""

import pytest
import torch
from tiny_models import mlp
from torch import nn

import trainsentry


@pytest.fixture
def monitor(out):
    with trainsentry.TrainMonitor({"output_dir": str(out)}) as made:
        yield made


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_model_of_no_framework(monitor):
    with pytest.raises(TypeError, match=r"dict.*torch\.nn\.Module"):
        monitor.watch({})


def test_a_model_without_parameters(monitor):
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        monitor.watch(nn.ReLU())


def test_something_that_is_no_optimizer(monitor):
    with pytest.raises(TypeError, match=r"float.*Optimizer"):
        monitor.watch(mlp(), 0.1)


def test_an_optimizer_of_another_model(monitor):
    with pytest.raises(ValueError, match=r"SGD.*model\.parameters"):
        monitor.watch(mlp(), sgd(mlp()))


def test_the_same_model_twice(monitor):
    model = mlp()
    monitor.watch(model, sgd(model))
    with pytest.raises(ValueError, match="watched already"):
        monitor.watch(model)


def test_a_pattern_that_matches_nothing(out):
    config = {"output_dir": str(out), "collect": {"activations": {"targets": ["0", "decoder.*"]}}}
    model = mlp()
    message = r"collect\.activations\.targets: 'decoder\.\*'.*0\.weight"
    with trainsentry.TrainMonitor(config) as monitor, pytest.raises(ValueError, match=message):
        monitor.watch(model, sgd(model))
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_rank_that_does_not_exist(out):
    with pytest.raises(trainsentry.ConfigError, match=r"ranks: 4 does not exist; allowed: 0 to 0"):
        trainsentry.TrainMonitor({"output_dir": str(out), "ranks": [0, "4-7"]}).watch(mlp())


def test_calls_before_watch_and_a_step_beside_an_optimizer(monitor):
    with pytest.raises(RuntimeError, match="call watch"):
        monitor.log(loss=1.0)
    model = mlp()
    monitor.watch(model, sgd(model))
    with pytest.raises(RuntimeError, match=r"remove the call of monitor\.step"):
        monitor.step()


def test_other_modules_can_be_added(out):
    first, second = mlp(), mlp()
    with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True}) as monitor:
        monitor.watch(nn.ModuleDict({"a": first}), sgd(first))
        monitor.watch(nn.ModuleDict({"b": second}), sgd(second))
        assert {p.name[0] for p in monitor._loop.watch.names.parameters} == {"a", "b"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grad_scaler": "x"}, r"grad_scaler.*str.*GradScaler"),
        ({"start_step": -3}, r"start_step.*-3"),
        ({"start_step": "3"}, r"start_step.*'3'"),
        ({"grad_acc_steps": 0}, r"grad_acc_steps.*0"),
    ],
)
def test_other_arguments_are_checked_and_leave_no_hook_behind(monitor, arguments, message):
    model = mlp()
    optimizer = sgd(model)
    with pytest.raises((TypeError, ValueError), match=message):
        monitor.watch(model, optimizer, **arguments)
    assert not optimizer._optimizer_step_pre_hooks
    optimizer.step()


def test_a_start_that_fails_leaves_no_hook_behind(monitor, monkeypatch):
    def fail(*_):
        raise ValueError("planted")

    monkeypatch.setattr("trainsentry.monitor.train_monitor.start_loop", fail)
    model = mlp()
    optimizer = sgd(model)
    with pytest.raises(ValueError, match="planted"):
        monitor.watch(model, optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    optimizer.step()


def test_models_whose_parameters_share_names_cannot_be_told_apart(monitor):
    first, second = mlp(), mlp()
    monitor.watch(first, sgd(first))
    with pytest.raises(ValueError, match=r"0\.bias.*ModuleDict"):
        monitor.watch(second, sgd(second))


def test_an_empty_list_of_models(monitor):
    with pytest.raises(TypeError, match="list"):
        monitor.watch([])


def test_a_state_that_is_none(monitor):
    for state in ({}, {"step": 3, "detection": {"foo": 1}}, {"step": "3", "detection": None}):
        with pytest.raises(ValueError, match="state_dict"):
            monitor.load_state_dict(state)


@pytest.mark.parametrize("part", ["gradients", "parameters", "optimizer_state", "updates", "activations"])
def test_each_part_can_be_off(out, part):
    model = mlp()
    optimizer = sgd(model)
    with trainsentry.TrainMonitor({"output_dir": str(out), "strict": True, "collect": {part: False}}) as monitor:
        monitor.watch(model, optimizer)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert not monitor.records().empty


class Unhookable(torch.optim.SGD):
    """An optimizer that takes no hooks, as one that skips torch's own constructor."""

    def register_step_post_hook(self, hook):
        raise AttributeError("no hooks here")


def test_a_watch_that_fails_at_an_optimizers_hooks_starts_no_recorder_and_leaves_no_hook(out):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    good = torch.optim.SGD(model["a"].parameters(), 0.1)
    bad = Unhookable(model["b"].parameters(), 0.1)
    monitor = trainsentry.TrainMonitor({"output_dir": str(out)})
    for _ in range(2):
        with pytest.raises(AttributeError, match="no hooks here"):
            monitor.watch(model, [good, bad])
    assert not good._optimizer_step_pre_hooks
    assert not good._optimizer_step_post_hooks
    assert not bad._optimizer_step_pre_hooks
    assert not out.exists(), "no recorder was started"
    monitor.close()
