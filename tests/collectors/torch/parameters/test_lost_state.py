"""The monitor sees at once when an optimizer loses its state between two samples."""

import logging

import pytest
import torch
from tiny_models import mlp

import trainsentry


def train(tmp_path, make_optimizer, lost_at, steps, **config):
    model = mlp()
    optimizer = make_optimizer(model.parameters())
    generator = torch.Generator().manual_seed(0)
    config = {"output_dir": str(tmp_path), "on_incident": {"dump": False}, **config}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(steps):
            if step == lost_at:
                optimizer.state.clear()
            model(torch.randn(32, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        incidents, table = monitor.incidents, monitor.records()
    return incidents, table


MOMENTUM = pytest.param(lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), id="SGD")
ADAM = pytest.param(lambda p: torch.optim.AdamW(p, lr=1e-3), id="AdamW")


@pytest.mark.parametrize("make_optimizer", [MOMENTUM, ADAM])
def test_under_the_default_configuration_lost_state_is_an_incident_of_its_step(tmp_path, make_optimizer, caplog):
    caplog.set_level(logging.CRITICAL, "trainsentry")
    incidents, _ = train(tmp_path, make_optimizer, 83, 92)
    assert [(i.kind, i.first_seen) for i in incidents] == [("state_reset", 83)]


def test_weights_are_read_at_that_step_and_not_at_its_neighbours(tmp_path):
    _, table = train(tmp_path, lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), 13, 16)
    read = table.reset_index()
    assert sorted(set(read[read["quantity"] == "parameter"]["step"])) == [0, 10, 13]
    assert sorted(set(read[read["quantity"] == "momentum_buffer"]["step"])) == [10]


def test_parts_that_are_not_collected_stay_so(tmp_path):
    collect = {"parameters": None, "optimizer_state": None}
    _, table = train(tmp_path, lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), 13, 16, collect=collect)
    assert not {"parameter", "momentum_buffer"} & set(table.reset_index()["quantity"])


def test_state_of_fewer_parameters_than_before_is_looked_at_and_a_growing_one_is_not(tmp_path):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with trainsentry.TrainMonitor({"output_dir": str(tmp_path), "detect": False}).watch(model, optimizer) as monitor:
        for step in range(9):
            if step == 4:
                del optimizer.state[model[0].weight]
            model[2 if step == 0 else slice(None)](torch.randn(4, 16 if step == 0 else 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        table = monitor.records().reset_index()
    assert sorted(set(table[table["quantity"] == "exp_avg"]["step"])) == [4]
