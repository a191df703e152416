"""Buffers are read with the weights, under the model's names, whatever their dtype."""

import pytest
import torch
from torch import nn

import trainsentry


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("mask", torch.ones(6, 6, dtype=torch.bool).tril())
        self.register_buffer("positions", torch.arange(6), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("meta", torch.empty(3, device="meta"))
        self.head.register_buffer("shared", self.positions)

    def forward(self, x):
        return self.head(self.norm(x))


def train(tmp_path, collect=None, steps=12, model=None):
    torch.manual_seed(0)
    model = model or Model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"output_dir": str(tmp_path), "strict": True, "collect": collect or {}}
    with trainsentry.TrainMonitor(config).watch(model, sgd) as monitor:
        for step in range(steps):
            model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
        table = monitor.records()
    return model, table[table["quantity"] == "buffer"]


def test_each_buffer_has_a_row_where_weights_are_sampled(tmp_path):
    model, rows = train(tmp_path)
    assert set(rows["step"]) == {0, 10}
    assert set(rows["name"]) == {
        "mask", "positions", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    }  # fmt: skip
    first = rows[rows["step"] == 0].set_index("name")
    assert first.loc["mask", "mean"] == pytest.approx(float(model.mask.float().mean()))
    assert first.loc["positions", "max"] == 5


def test_buffers_can_be_left_out_and_follow_the_targets(tmp_path):
    assert train(tmp_path / "a", {"parameters": {"buffers": False}})[1].empty
    assert set(train(tmp_path / "b", {"parameters": {"targets": ["head"]}})[1]["name"]) == {"head.shared"}


def test_of_a_very_large_buffer_the_first_rows_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("trainsentry.collectors.torch.parameters.buffers.LARGEST", 18)
    _, rows = train(tmp_path)
    assert rows[rows["name"] == "mask"]["mean"].iloc[0] == pytest.approx(6 / 18)
