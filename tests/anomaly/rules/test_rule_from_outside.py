"""A rule that the package does not know judges a run in the recorder's own process, and says its sentence."""

import json
from pathlib import Path

import pytest
import toy_rule
from tiny_models import mlp, train
from torch.optim import SGD

import trainsentry
from trainsentry.anomaly.rules import registry


@pytest.fixture
def forgotten():
    """Take the rule back that the configuration registers in this process too."""
    yield
    if registry.detector("large_gradient") is not None:
        registry.unregister(registry.detector("large_gradient"))


def test_a_toy_rule_names_the_gradient_that_it_was_made_for(out, forgotten, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(toy_rule.__file__).parent))
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-9)
    config = {"output_dir": str(out), "detect": {"detectors": ["toy_rule:LargeGradientRule"]}}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        train(model, optimizer, 3)
        handle = model[-1].bias.register_hook(lambda gradient: gradient * 0 + 5e3)
        train(model, optimizer, 1)
        handle.remove()
        train(model, optimizer, 3)
        monitor.flush()
        [incident] = monitor.incidents
    assert "has a norm of" in incident.summary
    assert "above 1e+03" in incident.summary
    lines = map(json.loads, (out / "rank0" / "anomalies.jsonl").read_text().splitlines())
    assert "large_gradient" in {line["detector"] for line in lines}
