"""A part of a weight that becomes zero, or that updates leave out, is found; pruning and rounding are not."""

import pytest
import torch
from step_records import Records
from tiny_models import EVERY_STEP, Gpt, ResNet, train

import trainsentry
from trainsentry.anomaly.rules.zeroed_weights import ZeroedWeightsRule
from trainsentry.collectors.series import Layout
from trainsentry.collectors.statistics import VALUE, ZEROS

STEPS, AT = 60, 41
FAMILIES = {Gpt: "blocks.0.mlp.0.weight", ResNet: "layers.1.conv1.weight"}

families = pytest.mark.parametrize("family", FAMILIES)


class LosesTail(torch.optim.AdamW):
    """Leaves out the second half of a weight, from one step on, as a kernel with a grid that is too small does."""

    weight, steps = None, 0

    def step(self, closure=None):
        before = self.weight.detach().clone()
        super().step(closure)
        self.steps += 1
        if self.steps > AT:
            self.weight.data[len(before) // 2 :] = before[len(before) // 2 :]


def trained(out, family, before_step=None, optimizer=torch.optim.AdamW, rate=lambda step: 1.0):
    """Return what the rule says of a run; `before_step` is given the model and the step."""
    torch.manual_seed(0)
    model = family()
    optimizer = optimizer(model.parameters(), lr=1e-3)
    optimizer.weight = model.get_parameter(FAMILIES[family])

    def begin(step):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * rate(step)
        if before_step is not None:
            before_step(model, step)

    config = {"output_dir": str(out), "strict": True, "collect": EVERY_STEP}
    with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
        train(model, optimizer, STEPS, before_step=begin)
        monitor.flush()
        said = [(i.step, s.evidence) for i in monitor.incidents for s in i.suspects]
    return [(step, s) for step, s in said if "exactly zero" in s or "leaves out" in s]


@families
def test_a_part_of_a_weight_that_becomes_zero_is_named(out, family):
    def lose(model, step):
        if step == AT:
            weight = model.get_parameter(FAMILIES[family]).data
            weight[: len(weight) // 2] = 0

    [(step, said)] = trained(out, family, lose)
    assert step == AT
    assert f"0.5 of the elements of parameter {FAMILIES[family]} are exactly zero at step {AT}; none was before" in said


@families
def test_a_part_that_updates_leave_out_is_named(out, family):
    [(step, said)] = trained(out, family, optimizer=LosesTail)
    assert step == AT
    assert f"the optimizer leaves out 0.5 of the elements of {FAMILIES[family]} since step {AT}" in said


def prune(model, step):
    if step >= AT:
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.data[weight.abs() < weight.abs().median() / 2] = 0


def freeze_rows(model, step):
    if step == AT:
        model.get_parameter(FAMILIES[type(model)]).register_hook(
            lambda g: g * (torch.arange(len(g)) % 2).view(-1, *[1] * (g.dim() - 1))
        )


def begin_anew(model, step):
    if step == AT:
        model.get_parameter(FAMILIES[type(model)]).data.zero_()


PRACTICES = {
    "an adapter begins anew, at zero": (begin_anew, lambda step: 1.0),
    "nothing": (None, lambda step: 1.0),
    "many weights are pruned": (prune, lambda step: 1.0),
    "a schedule that ends near zero": (None, lambda step: max(0.0, 1 - step / 55) ** 6),
    "gradients that are masked": (freeze_rows, lambda step: 1.0),
}


@families
@pytest.mark.parametrize("what", PRACTICES)
def test_what_people_do_is_no_finding(out, family, what):
    before_step, rate = PRACTICES[what]
    assert trained(out, family, before_step, rate=rate) == []


@pytest.mark.parametrize(
    ("size", "zeros_of_gradient", "is_told"), [(1e-3, 0, True), (1e-7, 0, False), (1e-3, 0.5, False)]
)
def test_rounded_updates_and_gradients_with_zeros_of_their_own_excuse_zeros(alone, size, zeros_of_gradient, is_told):
    records, found = Records(), []
    records.layout = records.table.layout_id(Layout((100,), "float32", 100))
    judge = alone(ZeroedWeightsRule, records.table)
    names = [f"{i}.weight" for i in range(8)]
    for step in range(20):
        record = records.step(step, {(name, quantity): 1.0 for quantity in ("gradient", "update") for name in names})
        record.values[:, VALUE] = size
        if step >= 10:  # the first weight's
            record.values[0, ZEROS], record.values[8, ZEROS] = zeros_of_gradient, 0.5
        found += judge(record)
    assert [(f.step, f.last_clean) for f in found] == ([(10, 9)] if is_told else [])
