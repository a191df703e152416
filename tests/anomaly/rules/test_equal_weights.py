"""Weights that become equal are found; averages that begin as copies, and copies now and then, are not."""

from functools import partial

import pytest
import torch
from step_records import Records
from tiny_models import EVERY_STEP, Gpt, ResNet, train
from torch import nn

import trainsentry
from trainsentry.anomaly.rules.equal_weights import EqualWeightsRule
from trainsentry.collectors.series import Layout

STEPS = 60


@pytest.fixture
def rule(alone):
    return partial(alone, EqualWeightsRule)


class Pair(nn.Module):
    """A model with a teacher, which the optimizer does not update."""

    def __init__(self, family):
        super().__init__()
        self.student, self.teacher = family(), family()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.teacher(x)
        return self.student(x)

    def average(self, momentum):
        with torch.no_grad():
            for average, weight in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                average.lerp_(weight, 1 - momentum)


def trained(out, family, before_step, every=1, steps=STEPS):
    """Return the findings of a run in which `before_step(pair, step)` treats the teacher."""
    torch.manual_seed(0)
    pair = Pair(family)
    optimizer = torch.optim.AdamW(pair.student.parameters(), lr=1e-3)
    collect = {part: {"every": every} for part in EVERY_STEP}
    config = {"output_dir": str(out), "strict": True, "collect": collect}
    with trainsentry.TrainMonitor(config).watch(pair, optimizer) as monitor:

        class Trained(family):  # so that the batches fit
            def __init__(self):
                nn.Module.__init__(self)

            def forward(self, x):
                return pair(x)

        train(Trained(), optimizer, steps, before_step=lambda step: before_step(pair, step))
        monitor.flush()
        return [s for i in monitor.incidents for s in i.suspects if "has exactly the values of" in s.evidence]


WEIGHTS = {Gpt: "blocks.1.attn.qkv.weight", ResNet: "layers.1.conv1.weight"}


@pytest.mark.parametrize("family", WEIGHTS)
def test_a_teacher_s_weight_that_shares_memory_with_the_student_s_is_named(out, family):
    name = WEIGHTS[family]

    def alias(pair, step):
        pair.average(0.9)
        if step == 40:
            pair.teacher.get_parameter(name).data = pair.student.get_parameter(name).data

    [told] = trained(out, family, alias)
    assert (told.name, told.step) in {(f"teacher.{name}", 40), (f"teacher.{name}", 41)}
    assert f"has exactly the values of student.{name}" in told.evidence


@pytest.mark.parametrize("family", WEIGHTS)
def test_an_average_without_momentum_is_told(out, family):
    told = trained(out, family, lambda pair, step: pair.average(0.9 if step < 40 else 0.0))
    assert told
    assert all(each.name.startswith("teacher.") and each.step in {40, 41} for each in told)


PRACTICES = {
    "an average": lambda pair, step: pair.average(0.99),
    "an average that begins late": lambda pair, step: pair.average(0.0 if step < 20 else 0.99),
    "a copy now and then": lambda pair, step: pair.average(0.0) if step % 12 == 0 else None,
    "a copy at each step": lambda pair, step: pair.average(0.0),
    "a teacher that rests": lambda pair, step: None,
}


@pytest.mark.parametrize("what", PRACTICES)
@pytest.mark.parametrize("family", WEIGHTS)
def test_what_people_do_is_no_finding(out, family, what):
    assert trained(out, family, PRACTICES[what]) == []


def followed(rule, values):
    """Return the findings over samples, each the norms of weights `a` and `b`, whose other statistics are their own."""
    records, found = Records(), []
    records.layout = records.table.layout_id(Layout((100,), "float32", 100))
    judge = rule(records.table)
    for step, (a, b) in enumerate(values):
        record = records.step(step, {("a", "parameter"): a, ("b", "parameter"): b})
        record.values[:, 0] = -record.values[:, 3]
        record.values[:, 1] = record.values[:, 3]
        found += judge(record)
    return found


def test_weights_that_are_equal_at_the_third_sample_are_told_once(rule):
    [found] = followed(rule, [(1 + s, 2 + s) for s in range(10)] + [(3 + s, 3 + s) for s in range(20, 30)])
    assert (found.step, found.last_clean) == (10, 9)


@pytest.mark.parametrize("apart", [0, 3])
def test_weights_that_began_as_copies_are_left_alone(rule, apart):
    assert followed(rule, [(1 + s, 2 + s) for s in range(apart)] + [(3 + s, 3 + s) for s in range(20, 40)]) == []


def test_weights_that_do_not_move_are_left_alone(rule):
    assert followed(rule, [(1 + s, 2 + s) for s in range(10)] + [(5.0, 5.0)] * 20) == []
