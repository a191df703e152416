"""A gradient that stays exactly zero is told; heads without examples, tasks by turns and what fades away are not."""

import random

import pytest
import torch
from step_records import Records
from torch import nn

import trainsentry
from trainsentry.anomaly.rules.gradients.zero_gradient import BOUNDS, ZeroGradientRule

HEAD, OTHERS = ("box.weight", "gradient"), [(f"blocks.{i}.weight", "gradient") for i in range(4)]
CALL, CALLS = ("box.output.0", "activation_output"), ("blocks.0.output.0", "activation_output")
AT = 80


def run(alone, size_of, others=lambda step: 1.0, more=lambda step: {}, steps=200):
    """Return the first steps of what is found; `size_of(step)` is the norm of the head's gradient."""
    records, found = Records(), []
    rule = alone(ZeroGradientRule, records.table)
    for step in range(steps):
        rows = {HEAD: size_of(step), **dict.fromkeys(OTHERS, others(step)), **more(step)}
        found += rule(records.step(step, rows))
    return [(f.step, f.last_clean) for f in found]


def test_a_gradient_that_stays_zero_is_told_once_by_its_first_step(alone):
    assert run(alone, lambda step: float(step < AT)) == [(AT, AT - 1)]
    assert run(alone, lambda step: float(step < AT), steps=AT + BOUNDS.fewest - 1) == []


@pytest.mark.parametrize(
    ("size_of", "options"),
    [
        (lambda step: float(step < BOUNDS.had_before - 1), {}),
        (lambda step: float(not AT <= step < AT + BOUNDS.fewest - 1), {}),
        (lambda step: float(step // 20 % 2 == 0), {}),  # tasks by turns
        (lambda step: max(0.0, 1 - step / AT) ** 3, {}),  # a weight that a schedule takes to zero
        (lambda step: float(step < AT), {"others": lambda step: float(step < AT)}),  # the loss is zero
        (lambda step: float(step < AT), {"more": lambda step: {("stage", "stage"): float(step >= AT)}}),
        (lambda step: float(step < AT), {"more": lambda step: {CALLS: 1.0} | ({CALL: 1.0} if step < AT + 5 else {})}),
    ],
)
def test_what_hardly_began_rests_by_turns_fades_or_is_called_no_more_is_nothing(alone, size_of, options):
    assert run(alone, size_of, **options) == []


@pytest.mark.parametrize(("is_called", "told"), [(True, [(AT, AT - 1)]), (False, [])])
def test_a_head_that_is_called_no_more_rests_though_calls_are_sampled_seldom(alone, is_called, told):
    def calls(step):
        return {} if step % 10 else {CALLS: 1.0} | ({CALL: 1.0} if is_called or step < AT else {})

    assert run(alone, lambda step: float(step < AT), more=calls) == told


@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_a_head_whose_objects_are_rare_is_nothing(alone, share):
    draw = random.Random(1)
    assert run(alone, lambda step: float(draw.random() < share), steps=3000) == []


@pytest.mark.parametrize("lost", [True, False])
def test_a_loss_of_boxes_that_is_added_no_more(tmp_path, lost):
    torch.manual_seed(0)
    body, kind, box = nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, 4), nn.Linear(32, 4)
    model = nn.ModuleDict({"body": body, "kind": kind, "box": box})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    with trainsentry.TrainMonitor({"output_dir": str(tmp_path)}).watch(model, optimizer) as monitor:
        for step in range(120):
            x = torch.randn(32, 8)
            inner = body(x)
            boxes = (box(inner) - x[:, :4]).square().mean()
            loss = (kind(inner) - x[:, 4:]).square().mean() + boxes * (0.0 if lost and step >= AT else 1.0)
            optimizer.zero_grad()
            loss.backward()
            monitor.log(loss=loss.detach())
            optimizer.step()
    assert {i.name.partition(".")[0] for i in monitor.incidents} == ({"box"} if lost else set())
