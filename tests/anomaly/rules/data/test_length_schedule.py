"""Inputs that grow stage by stage begin the loss anew; the first growth, and lengths that vary, do not."""

import numpy as np
import pytest
import torch
from step_records import Records
from torch import nn
from torch.nn.functional import cross_entropy

import trainsentry
from trainsentry.anomaly.rules.data.length_schedule import STAGE, LengthSchedule
from trainsentry.anomaly.series_arrays import SeriesArrays
from trainsentry.collectors.series import Layout

TOKENS = ("input.tokens", "activation_input")


def grows(lengths, batch=lambda length: 32):
    """Return the steps at which a stage begins that is not the first longer one."""
    records = Records()
    arrays = SeriesArrays(records.table)
    schedule, found = LengthSchedule(arrays), []
    for step, length in enumerate(lengths):
        shape = (batch(length), length)
        records.layout = records.table.layout_id(Layout(shape, "int64", shape[0] * shape[1]))
        record = records.step(step, {TOKENS: 1.0})
        arrays.grow()
        found += [step] if schedule.grows_again(record) else []
    return found


def stages(*lengths, of=STAGE + 4):
    return [length for length in lengths for _ in range(of)]


@pytest.mark.parametrize("batch", [lambda length: 32, lambda length: 256 // length])
def test_stages_after_the_first_longer_one(batch):
    assert grows(stages(8, 16, 32, 64), batch) == [2 * (STAGE + 4), 3 * (STAGE + 4)]


@pytest.mark.parametrize(
    "lengths",
    [
        stages(8, 16),
        stages(8, 16, 8, 16, 8, 16),
        stages(64, 32, 16),
        stages(8, 16, 20),
        stages(8, 16, 32, of=STAGE - 4),
        np.random.default_rng(0).integers(8, 512, 400).tolist(),
        stages(8, 16, 8) * 4,
        [*stages(8), 16, *stages(8), 32, *stages(8), 64],  # batches that are longer now and then
    ],
)
def test_what_is_no_schedule(lengths):
    assert grows(lengths) == []


class Copier(nn.Module):
    """Says the first half of a sequence again, which needs attention over it."""

    def __init__(self, width=32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, width), nn.Embedding(64, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 16)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places(torch.arange(length))
        return self.head(self.layer(x, nn.Transformer.generate_square_subsequent_mask(length), is_causal=True))


def test_of_a_curriculum_of_lengths_the_first_longer_stage_alone_is_told_and_by_its_length(tmp_path):
    torch.manual_seed(0)
    model = Copier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with trainsentry.TrainMonitor({"output_dir": str(tmp_path)}).watch(model, optimizer) as monitor:
        for step in range(400):
            length = 8 * (1 + step // 100)
            half = torch.randint(0, 16, (256 // length, length // 2))
            tokens = torch.cat([half, half], 1)
            loss = cross_entropy(model(tokens[:, :-1]).reshape(-1, 16), tokens[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            monitor.log(loss=loss.detach())
            optimizer.step()
    assert all(incident.step == 100 and incident.name == "input.0" for incident in monitor.incidents)
