"""Modules and parameters added to a watched model are watched too, or a message names them as left out."""

import logging

import pytest
import torch
from tiny_models import step
from torch import nn

import trainsentry
from trainsentry.collectors.torch import added_modules

COLLECT = {part: {"every": 1} for part in ("gradients", "parameters", "optimizer_state", "activations")}


@pytest.fixture
def watched(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = {"output_dir": str(tmp_path), "collect": COLLECT, "strict": True}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        step(model, optimizer)
        yield model, optimizer, monitor


def names(monitor, quantity, at):
    records = monitor.records()
    return set(records[(records.quantity == quantity) & (records.step == at)].name)


def test_a_module_that_is_added_with_its_parameters_is_watched_from_the_next_step_on(watched):
    model, optimizer, monitor = watched
    model.append(nn.Linear(4, 3))
    optimizer.add_param_group({"params": model[1].parameters()})
    step(model, optimizer)
    step(model, optimizer)
    step(model, optimizer)
    for quantity in ("gradient", "parameter", "momentum_buffer"):
        assert {"0.weight", "1.weight"} <= names(monitor, quantity, 3), quantity
    assert {"0.output.0", "1.output.0"} <= names(monitor, "activation_output", 3)


def test_a_module_that_no_optimizer_moves_is_found_by_counting(watched, monkeypatch):
    monkeypatch.setattr(added_modules, "LOOK_EVERY", 2)
    model, optimizer, monitor = watched
    model.append(nn.Tanh())
    for _ in range(4):
        step(model, optimizer)
    assert "1.output.0" in names(monitor, "activation_output", 4)


def test_parameters_of_modules_that_are_not_watched_are_told_of_once(watched, caplog):
    model, optimizer, _ = watched
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with caplog.at_level(logging.WARNING, "trainsentry"):
        for _ in range(3):
            step(model, optimizer)
    assert sum("2 parameters of modules that are not watched" in r.message for r in caplog.records) == 1


def test_a_loop_that_makes_other_modules_at_each_step_has_its_own_counted_seldom(watched, monkeypatch):
    """A probe that is fitted anew, or a wrapper that registers parameters in each pass."""
    model, optimizer, _ = watched
    counts = []
    original = added_modules.AddedModules._count_modules
    monkeypatch.setattr(added_modules.AddedModules, "_count_modules", lambda self: counts.append(1) or original(self))
    for _ in range(20):
        nn.Linear(2, 2)
        step(model, optimizer)
    assert len(counts) == added_modules.IN_VAIN
