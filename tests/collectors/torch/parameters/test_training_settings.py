"""The monitor records the learning rate, the number of moved parameters and mode changes by itself."""

import csv

import pytest
import torch
from torch import nn

import trainsentry


def run(out, change=None, *, steps=14, logged=False, **config):
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    every = {"every": 1}
    settings = {"output_dir": str(out), "strict": True, "on_incident": False, **config}
    settings["collect"] = {"updates": every, "parameters": every}
    with trainsentry.TrainMonitor(settings).watch(model, optimizer) as monitor:
        for step in range(steps):
            if change is not None:
                change(step, model, optimizer)
            loss = model(torch.randn(4, 4)).square().mean()
            if loss.requires_grad:
                loss.backward()
            if logged:
                monitor.log(learning_rate=7.0)
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        incidents = monitor.incidents
    with (out / "rank0" / "scalars_0-999.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return incidents, {(r["name"], int(r["step"])): float(r["value"]) for r in rows}


def test_the_learning_rate_is_taken_from_the_optimizer_unless_it_is_logged(tmp_path):
    _, scalars = run(tmp_path / "a")
    assert [scalars["learning_rate", s] for s in range(14)] == [pytest.approx(1e-3)] * 14
    assert scalars["updated_parameters", 3] == 4
    _, scalars = run(tmp_path / "b", logged=True)
    assert {v for (name, _), v in scalars.items() if name == "learning_rate"} == {7.0}
    assert [scalars["optimizer_learning_rate", s] for s in range(14)] == [pytest.approx(1e-3)] * 14


def test_a_model_left_in_evaluation_mode_is_named_at_once_and_evaluation_in_between_is_not(tmp_path):
    def evaluate(step, model, optimizer):
        model.eval()
        model(torch.ones(1, 4))
        model.train()

    assert run(tmp_path / "a", evaluate)[0] == ()
    [incident], _ = run(tmp_path / "b", lambda step, model, optimizer: model.eval() if step == 12 else None)
    assert (incident.kind, incident.name, incident.quantity, incident.step) == ("mode_change", "model", "training", 12)


def test_an_optimizer_that_no_longer_moves_the_model_is_named_at_once(tmp_path):
    def renew(step, model, optimizer):
        if step == 12:
            for layer in (model[0], model[2]):
                layer.weight = nn.Parameter(layer.weight.detach().clone())
                layer.bias = nn.Parameter(layer.bias.detach().clone())

    [incident], _ = run(tmp_path, renew)
    assert (incident.kind, incident.name, incident.quantity, incident.step) == ("frozen", "all", "update", 12)


def test_layers_frozen_midway_are_named(tmp_path):
    [incident], _ = run(tmp_path, lambda s, m, o: m[0].requires_grad_(False) if s == 12 else None, steps=16)
    assert (incident.kind, incident.name, incident.step) == ("frozen", "0.weight", 12)


def test_a_detector_that_cannot_be_loaded_is_refused_at_watch_and_one_that_can_finds_in_the_recorder(
    tmp_path, monkeypatch
):
    with pytest.raises(trainsentry.ConfigError, match=r"detect.detectors: 'nowhere:f' cannot be loaded"):
        run(tmp_path / "a", detect={"detectors": ["nowhere:f"]})
    (tmp_path / "rules_of_mine.py").write_text(
        "from trainsentry.anomaly.finding import Finding\n\n\n"
        "def at_step_nine(record, table):\n"
        "    if record.step != 9 or not len(record):\n        return []\n"
        "    return [Finding(int(record.ids[0]), 0, 'shift', 'mine', 'norm', 1.0, 0.5, 9.0)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    incidents, _ = run(tmp_path / "b", detect={"detectors": ["rules_of_mine:at_step_nine"]})
    assert [i.step for i in incidents] == [9]
