"""An output that the loss depends on no more is told; tasks that are drawn by lot and heads that rest are not."""

import random

import pytest
import torch
from step_records import Records
from torch import nn
from torch.nn.functional import cross_entropy

import trainsentry
from trainsentry.anomaly.rules.gradients.lost_gradient import LostGradientRule

ANSWER, COST, OTHER = "moe.output.0", "moe.output.1", "head.output.0"
AT = 40


def run(alone, gradients, outputs=(ANSWER, COST, OTHER), samples=80, cost=lambda sample: 1.0):
    """Return what is found; `gradients(sample)` names the outputs with a gradient in each tenth step.

    The gradient of the cost has the norm `cost(sample)`.
    """
    records, found = Records(), []
    judge = alone(LostGradientRule, records.table)
    for sample in range(samples):
        rows = {(name, "activation_output"): 1.0 for name in outputs}
        norms = {name: cost(sample) if name == COST else 1.0 for name in gradients(sample)}
        rows |= {(name, "activation_grad_output"): norm for name, norm in norms.items()}
        found += judge(records.step(10 * sample, rows)) + judge(records.step(10 * sample + 1, {("w", "gradient"): 1.0}))
    return [(records.table.series[f.series_id].name, f.step, f.last_clean) for f in found]


def test_an_output_without_its_gradient_is_told_once_by_its_first_step(alone):
    told = run(alone, lambda s: (ANSWER, COST, OTHER) if s < AT else (ANSWER, OTHER))
    assert told == [(COST, 10 * AT, 10 * AT - 10)]


@pytest.mark.parametrize(
    "gradients",
    [
        lambda s: (ANSWER, COST, OTHER),
        lambda s: (ANSWER, OTHER),
        lambda s: (ANSWER, COST, OTHER) if s < 3 else (ANSWER, OTHER),
        lambda s: (ANSWER, COST, OTHER) if s not in (AT, AT + 1) else (ANSWER, OTHER),
        lambda s: (ANSWER, COST, OTHER) if s < AT else (OTHER,),  # nothing comes to the module
        lambda s: (ANSWER, COST, OTHER) if s < AT else (ANSWER, COST),  # nor to this one
        lambda s: (ANSWER, COST, OTHER) if s < AT else (),  # no backward pass
        lambda s: (ANSWER, COST) if s % 4 else (ANSWER,),
    ],
)
def test_gradients_that_come_and_go_or_stop_together_are_nothing(alone, gradients):
    assert run(alone, gradients) == []


def everything(_):
    return ANSWER, COST, OTHER


def test_a_loss_whose_weight_becomes_zero_is_lost_too(alone):
    assert run(alone, everything, cost=lambda s: 1.0 if s < AT else 0.0) == [(COST, 10 * AT, 10 * AT - 10)]


@pytest.mark.parametrize("fades", [lambda s: max(0.0, 1 - s / AT), lambda s: max(0.0, 1 - s / AT) ** 2])
@pytest.mark.parametrize("is_left_out", [True, False])
def test_a_weight_that_a_schedule_takes_to_zero_is_no_loss_of_its_own(alone, fades, is_left_out):
    assert run(alone, lambda s: (ANSWER, OTHER) if is_left_out and s >= AT else everything(s), cost=fades) == []


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("seed", range(5))
def test_tasks_that_are_drawn_by_lot_are_nothing(alone, share, seed):
    draw = random.Random(seed)
    assert run(alone, lambda _: (ANSWER, COST) if draw.random() < share else (ANSWER,), samples=300) == []


def test_tasks_that_come_in_blocks_are_told_of_once_at_most(alone):
    assert len(run(alone, lambda s: (ANSWER, COST) if s // 40 % 2 == 0 else (ANSWER,), samples=600)) == 1


@pytest.mark.parametrize("begins", ["a stage", "an earlier step"])
def test_a_declared_stage_and_a_run_that_goes_back_begin_anew(alone, begins):
    records, found, step = Records(), [], 0
    judge = alone(LostGradientRule, records.table)
    for sample in range(80):
        names = (ANSWER, COST) if sample < AT else (ANSWER,)
        rows = {(name, "activation_output"): 1.0 for name in (ANSWER, COST)}
        rows |= {(name, "activation_grad_output"): 1.0 for name in names} | {("stage", "stage"): 0.0}
        step = 0 if sample == AT and begins == "an earlier step" else step + 10
        if begins == "a stage":
            rows["stage", "stage"] = float(sample >= AT)
        found += judge(records.step(step, rows))
    assert found == []


def test_an_output_that_is_not_given_out_any_more_is_nothing(alone):
    records, found = Records(), []
    judge = alone(LostGradientRule, records.table)
    for step in range(80):
        names = (ANSWER, COST) if step < AT else (ANSWER,)
        rows = {(name, kind): 1.0 for name in names for kind in ("activation_output", "activation_grad_output")}
        found += judge(records.step(step, rows))
    assert not found


class Mixture(nn.Module):
    """Two experts behind a router, whose balance is an output of its own."""

    def __init__(self, width):
        super().__init__()
        self.router, self.experts = nn.Linear(width, 2), nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        mixed = sum(share[:, None] * expert(x) for share, expert in zip(shares.T, self.experts, strict=True))
        return x + mixed, shares.mean(0).square().sum()


class Classifier(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.mixture, self.head = Mixture(width), nn.Linear(width, 4)

    def forward(self, x):
        mixed, balance = self.mixture(x)
        return self.head(mixed), balance


@pytest.mark.parametrize("lost", [True, False])
def test_a_loss_that_forgets_the_balance_of_its_experts(tmp_path, lost):
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"output_dir": str(tmp_path), "collect": {"activations": {"every": 2}}}
    labels = torch.randn(16, 4)
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        for step in range(90):
            x = torch.randn(32, 16)
            answer, balance = model(x)
            loss = cross_entropy(answer, (x @ labels).argmax(1))
            if not lost or step < 60:
                loss = loss + 0.01 * balance
            optimizer.zero_grad()
            loss.backward()
            monitor.log(loss=loss.detach())
            optimizer.step()
    told = [(i.name, i.step) for i in monitor.incidents]
    assert told == ([("output.1", 60)] if lost else [])
