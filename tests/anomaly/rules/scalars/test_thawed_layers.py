"""Layers that are thawed in the middle of a run are a change on purpose; an expert that is used at last is none."""

import pytest
import torch
from step_records import Records
from torch import nn

import trainsentry
from trainsentry.anomaly.rules.scalars.thawed_layers import STEPS_BEFORE, ThawedLayers
from trainsentry.anomaly.series_arrays import SeriesArrays

HEAD = [(f"head.{i}.weight", "gradient") for i in range(4)]


@pytest.mark.parametrize(
    ("at", "new", "told"),
    [(STEPS_BEFORE + 1, 8, [STEPS_BEFORE + 1]), (STEPS_BEFORE, 8, []), (40, 1, [40]), (40, 0, [])],
)
@pytest.mark.parametrize("others", [0, 20])
def test_many_first_gradients_at_once_are_layers_that_are_thawed(at, new, others, told):
    records, thawed, found = Records(), None, []
    arrays = SeriesArrays(records.table)
    thawed = arrays.shared(ThawedLayers)
    head = [*HEAD, *((f"other.{i}.weight", "gradient") for i in range(others))]
    for step in range(60):
        body = [(f"body.{i}.weight", "gradient") for i in range(new if step >= at else 0)]
        record = records.step(step, dict.fromkeys([*head, *body], 1.0))
        arrays.grow()
        found += [step] * (thawed.thaws(record) and thawed.thaws(record))
    assert found == (told if new > 1 or not others else [])
    assert thawed.at == (found[-1] if found else -1)


def test_a_run_that_goes_back_has_no_thawed_layers_ahead_of_it():
    records = Records()
    arrays = SeriesArrays(records.table)
    thawed = ThawedLayers(arrays)
    for step in [*range(60), *range(30, 50)]:
        record = records.step(step, dict.fromkeys([*HEAD, ("body", "gradient")] if step >= 50 else HEAD, 1.0))
        arrays.grow()
        thawed.thaws(record)
        assert thawed.at == (50 if step >= 50 else -1)


@pytest.mark.parametrize("thaws", [True, False])
def test_a_state_that_is_cleared_as_layers_are_thawed_is_not_lost(tmp_path, thaws):
    """As fastai does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    model[:2].requires_grad_(not thaws)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"output_dir": str(tmp_path), "on_incident": False}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(90):
            if step == 50:
                model.requires_grad_()
                optimizer.state.clear()
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
    kinds = {suspect.kind for incident in monitor.incidents for suspect in incident.suspects}
    assert ("state_reset" in kinds) != thaws
