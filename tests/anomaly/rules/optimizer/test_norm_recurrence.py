"""The norm of a first moment follows from its past, the gradient and their angle; a moment that does not is named."""

import json

import pytest
import torch

import trainsentry
from trainsentry.anomaly.rules.optimizer.norm_recurrence import NormRecurrenceRule

OPTIMIZERS = {
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.8, 0.99)), "exp_avg"),
    "momentum": (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), "momentum_buffer"),
    "dampened": (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.3), "momentum_buffer"),
    "climbs": (lambda p: torch.optim.AdamW(p, lr=1e-4, maximize=True), "exp_avg"),
}
EVERY_STEP = {p: {"every": 1} for p in ("parameters", "optimizer_state")}
AT = 30


def told(tmp_path, name, harm=None, weights=False):
    """Train four layers, `harm` a moment before the update of step `AT`; return step, name and quantity by anomaly.

    With `weights`, `harm` gets the weights too.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(12, 12) for _ in range(4)))
    make, moment = OPTIMIZERS[name]
    optimizer = make(model.parameters())
    config = {"output_dir": str(tmp_path), "on_incident": False, "strict": True, "collect": EVERY_STEP}
    with trainsentry.TrainMonitor(config | {"statistics": ["norm", "mean", "alignment"]}).watch(model, optimizer):
        for step in range(50):
            optimizer.zero_grad()
            model(torch.randn(8, 12)).square().mean().backward()
            if harm is not None and step == AT:
                moments = [optimizer.state[layer.weight][moment] for layer in model]
                harm(moments, [layer.weight for layer in model]) if weights else harm(moments)
            optimizer.step()
    path = tmp_path / "rank0" / "anomalies.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [
        (line["step"], line["name"], line["quantity"]) for line in lines if line["detector"] == NormRecurrenceRule.name
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_first_moment_follows(tmp_path, name):
    assert told(tmp_path, name) == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_moment_that_spread_around_its_mean_is_named_at_its_step(tmp_path, name):
    def spread(moments):
        mean = moments[2].mean()
        moments[2].sub_(mean).mul_(1.5).add_(mean)

    found = told(tmp_path, name, spread)
    assert found[:1] == [(AT, "2.weight", OPTIMIZERS[name][1])]


@pytest.mark.parametrize(("name", "ratio"), [("AdamW", 4.0), ("momentum", 0.9), ("dampened", 0.9 / 0.7)])
def test_where_gradient_and_moment_cancel_what_is_left_is_rounding(tmp_path, name, ratio):
    def cancel(moments, weights):
        for moment, weight in zip(moments, weights, strict=True):
            weight.grad = -ratio * moment * (1 + 1e-5 * torch.randn_like(moment))

    assert [found for found in told(tmp_path, name, cancel, weights=True) if found[0] <= AT + 1] == []
