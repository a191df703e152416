"""A copy of weights that stands still though it was kept up to date is told; what rests by design is not."""

import numpy as np
import pytest
import torch
from step_records import Records
from torch import nn
from torch.nn.functional import mse_loss

import trainsentry
from trainsentry.anomaly.rules.buffers.resting_copies import RESTS_STEPS, VARIED, RestingCopiesRule
from trainsentry.collectors.series import Layout

COPY, WEIGHT, GRADIENT = ("target.weight", "parameter"), ("net.weight", "parameter"), ("net.weight", "gradient")
NET, TARGET = ("net.output.0", "activation_output"), ("target.output.0", "activation_output")
EVERY, AT = 10, 300


def run(alone, copy_of, *, calls=lambda step: True, more=lambda step: {}, steps=AT + 3 * RESTS_STEPS):
    """Return the step since which the copy is said to rest; `copy_of(step)` is its size."""
    records, found = Records(), []
    judge = alone(RestingCopiesRule, records.table)
    for step in range(0, steps, EVERY):
        rows = {WEIGHT: 1 + step / 1000, GRADIENT: 1.0, NET: 1.0, COPY: copy_of(step), **more(step)}
        found += judge(records.step(step, rows | ({TARGET: 1.0} if calls(step) else {})))
        found += judge(records.step(step + 1, {GRADIENT: 1.0}))
    return [f.step for f in found]


def follows(step):
    return 1 + min(step, AT) / 1000


def test_a_copy_that_stands_still_is_told_once_by_its_first_sample(alone):
    assert run(alone, follows) == [AT + EVERY]


def test_a_copy_that_is_taken_now_and_then_is_told_after_a_longer_rest(alone):
    taken = lambda step: 1 + min(step, 2000) // 50 / 1000  # noqa: E731
    assert run(alone, taken, steps=2400) == []
    assert run(alone, taken, steps=2800) == [2000 + EVERY]


@pytest.mark.parametrize(
    ("copy_of", "options"),
    [
        (lambda step: 1 + step / 1000, {}),
        (lambda step: 1.0, {}),
        (lambda step: 1 + min(step, EVERY * (VARIED - 2)) / 1000, {}),
        (follows, {"more": lambda step: {("target.weight", "update"): 1.0}}),  # an optimizer's
        (follows, {"more": lambda step: {("stopped_writes.target.weight",) * 2: 200.0} if step == AT + 200 else {}}),
        (follows, {"calls": lambda step: step < AT}),  # a teacher that is asked no more
        (follows, {"more": lambda step: {WEIGHT: follows(step)}}),  # nothing is trained any more
    ],
)
def test_what_moves_never_did_or_rests_with_its_module_is_nothing(alone, copy_of, options):
    assert run(alone, copy_of, **options) == []


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("target.weight", (8, 8), [AT + EVERY]),
        ("target.weight", (64,), []),
        ("target.weight", (4, 16), []),
        ("observed", (8, 8), []),
    ],
)
def test_a_buffer_of_a_weights_name_and_shape_is_its_copy(alone, name, shape, told):
    """Vectors are running statistics, which rest with their modules' modes; other tables are something else."""
    records, found = Records(), []
    judge = alone(RestingCopiesRule, records.table)
    layouts = [records.table.layout_id(Layout(each, "float32", 64)) for each in ((8, 8), (8, 8), shape)]
    for step in range(0, AT + 2 * RESTS_STEPS, EVERY):
        rows = {WEIGHT: 1 + step / 1000, GRADIENT: 1.0, (name, "buffer"): follows(step), NET: 1.0}
        record = records.step(step, rows)
        record.layouts[:3] = layouts
        found += judge(record)
        found += judge(records.step(step + 1, {GRADIENT: 1.0}))
    assert [f.step for f in found] == told


@pytest.mark.parametrize("lost", [True, False])
def test_a_target_that_is_written_through_data_and_is_forgotten(tmp_path, lost):
    class Bootstrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.target = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                aim = self.target(x)
            return self.net(x), aim

    torch.manual_seed(0)
    model = Bootstrapped()
    optimizer = torch.optim.AdamW(model.net.parameters(), lr=1e-3)
    config = {"output_dir": str(tmp_path), "collect": {"activations": {"every": 5}, "parameters": {"every": 5}}}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(130 + RESTS_STEPS):
            x = torch.randn(16, 8)
            answer, aim = model(x)
            loss = mse_loss(answer, 0.9 * aim + 0.1 * x[:, :4])
            optimizer.zero_grad()
            loss.backward()
            monitor.log(loss=loss.detach())
            optimizer.step()
            if step < 110 or not lost:
                for ours, theirs in zip(model.target.parameters(), model.net.parameters(), strict=True):
                    ours.data.mul_(0.95).add_(theirs.data, alpha=0.05)
    told = [(i.name.startswith("target."), 105 <= i.step <= 120) for i in monitor.incidents]
    assert told == ([(True, True)] if lost else [])
    assert np.isfinite(float(loss))
