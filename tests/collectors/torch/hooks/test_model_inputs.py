"""The model's inputs are read at every step, the other activations in sampled steps alone."""

import pytest
import torch
from torch import nn

import trainsentry
from trainsentry.collectors.torch.hooks.model_inputs import first_part


def train(tmp_path, batches, *, every=10, large=False, collect=None, accumulate=1):
    """Train on batches; return the records."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {
        "output_dir": str(tmp_path),
        "strict": True,
        "collect": {"activations": {"every": every}, **(collect or {})},
    }
    with trainsentry.TrainMonitor(config).watch(model, sgd) as monitor:
        for batch in batches:
            for _ in range(accumulate):
                model(batch).square().mean().backward()
            with torch.no_grad():
                model(torch.ones(2, 4))  # an evaluation is no input of the training
            sgd.step()
            sgd.zero_grad()
        return monitor.records()


def batches(n, rows=8):
    return [torch.randn(rows, 4, generator=torch.Generator().manual_seed(i)) for i in range(n)]


def test_inputs_have_a_row_in_each_step_and_outputs_in_sampled_ones(tmp_path):
    given = batches(25)
    table = train(tmp_path, given)
    inputs = table[(table["quantity"] == "activation_input") & (table["name"] == "input.0")]
    assert list(inputs["step"]) == list(range(25))
    assert list(inputs["norm"]) == pytest.approx([float(x.norm()) for x in given])
    outputs = table[table["quantity"] == "activation_output"]
    assert set(outputs["step"]) == {0, 10, 20}


def test_each_micro_step_has_its_input(tmp_path):
    table = train(tmp_path, batches(5), accumulate=3)
    inputs = table[(table["name"] == "input.0") & (table["step"] == 3)]
    assert list(inputs["micro_step"]) == [0, 1, 2]


def test_of_a_large_input_the_first_samples_are_read(tmp_path):
    given = batches(12, rows=30_000)
    table = train(tmp_path, given)
    parts = table[table["name"] == "input.0.part"]
    assert list(parts["step"]) == list(range(12))
    assert list(parts["norm"]) == pytest.approx([float(x[:16_384].norm()) for x in given], rel=1e-6)
    assert set(table[table["name"] == "input.0"]["step"]) == {0, 10}


def test_a_part_is_a_view_whatever_the_strides():
    images = torch.randn(8, 3, 256, 256).to(memory_format=torch.channels_last)
    part = first_part(images)
    assert part.untyped_storage().data_ptr() == images.untyped_storage().data_ptr()
    assert 0 < part.numel() <= 65_536


def test_inputs_can_be_left_out(tmp_path):
    table = train(tmp_path, batches(12), collect={"activations": {"every": 10, "inputs": False}})
    assert set(table[table["name"] == "input.0"]["step"]) == {0, 10}
