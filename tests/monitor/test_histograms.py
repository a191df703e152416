"""A run with histograms counts every value of what it reads, and trains to the same bits."""

import pytest
import torch
from torch import nn

import trainsentry
from trainsentry.collectors.histogram import counts_of, parse, without_empty_bins

STATISTICS = ["norm", "histogram"]
ALL = {part: {"every": 1} for part in ("gradients", "parameters", "optimizer_state", "updates", "activations")}


def train(folder, statistics, steps=4, scale=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale else None
    gradients = {}
    config = {"output_dir": str(folder), "statistics": statistics, "collect": ALL}
    with trainsentry.TrainMonitor(config) as monitor:
        monitor.watch(model, optimizer, grad_scaler=scaler)
        for _ in range(steps):
            loss = model(torch.randn(32, 8)).square().mean()
            optimizer.zero_grad()
            (scaler.scale(loss) if scaler else loss).backward()
            gradients = {n: p.grad.clone() / (scale or 1.0) for n, p in model.named_parameters()}
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        records = monitor.records(1)
    return model, records, gradients


def test_training_is_the_same_to_the_bit(tmp_path):
    with_histograms, _, _ = train(tmp_path / "a", STATISTICS)
    without, _, _ = train(tmp_path / "b", ["norm"])
    for a, b in zip(with_histograms.state_dict().values(), without.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_the_gradients_of_a_step_are_counted_as_the_optimizer_sees_them(tmp_path, scale):
    _, records, gradients = train(tmp_path, STATISTICS, scale=scale)
    found = records[records.quantity == "gradient"].set_index("name").histogram
    for name, gradient in gradients.items():
        assert found[name] == without_empty_bins(counts_of(gradient.numpy())[None]).texts()[0]


def test_every_quantity_has_histograms_of_all_its_values(tmp_path):
    model, records, _ = train(tmp_path, STATISTICS)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    for quantity in ("parameter", "update", "exp_avg", "exp_avg_sq"):
        found = records[records.quantity == quantity].set_index("name").histogram
        assert {name: sum(parse(found[name])[1]) for name in sizes} == sizes
    outputs = records[records.quantity == "activation_output"]
    assert all(sum(parse(text)[1]) in {32 * 16, 32 * 2} for text in outputs.histogram)
    assert set(records[records.quantity == "loss"].histogram) <= {""}


@pytest.mark.parametrize("statistics", [["histogram"], ["histograms"], ["norm", "quantiles"]])
def test_what_is_no_choice_of_statistics_is_refused(statistics):
    with pytest.raises(trainsentry.ConfigError, match="statistics"):
        trainsentry.TrainMonitor({"statistics": statistics})
