"""A gradient adds up to what its module's output got in the backward pass, but for one factor of all."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.rules.gradients.gradient_sums import HELD_FOR, GradientSumsRule
from trainsentry.collectors.statistics import MEAN, ZEROS

MODULES = [f"layers.{i}" for i in range(6)]
AT = HELD_FOR + 4


class Sums:
    """Records in which each bias' gradient is the sum of the gradients at its module's output, times one factor."""

    def __init__(self, alone, bias="bias"):
        self.records, self.draw = Records(), np.random.default_rng(0)
        self.judge = alone(GradientSumsRule, self.records.table)
        self.bias, self.zeros = bias, 0.0

    def step(self, step, factor=1.0, off=(), by=2.0, parts=1, **flags):
        """Judge a record in which the gradients of the modules `off` are `by` times their sum."""
        outputs = {
            (f"{m}{f'@{part}' if part else ''}.output.0", "activation_grad_output"): 3.0
            for m in MODULES
            for part in range(parts)
        }
        gradients = {(f"{m}.{self.bias}", "gradient"): 1.0 for m in MODULES}
        record = self.records.step(step, {**outputs, **gradients}, **flags)
        means = self.draw.uniform(-1, 1, (len(MODULES), parts))
        record.values[: len(outputs), MEAN] = means.ravel()
        sums = means.sum(axis=1) * (1 + 1e-8 * self.draw.standard_normal(len(MODULES)))
        wrong = np.where([m in off for m in MODULES], by, 1.0)
        record.values[len(outputs) :, MEAN] = sums * factor * wrong
        record.values[len(outputs) :, ZEROS] = self.zeros
        return [f for f in self.judge(record) if f.alarm]


@pytest.fixture
def sums(alone):
    return Sums(alone)


@pytest.mark.parametrize("factor", [lambda s: 1.0, lambda s: 1 / (1 + s % 5), lambda s: 2.0**-16])
@pytest.mark.parametrize("by", [2.0, 0.0, -1.0, 1.3])
def test_the_one_that_does_not_add_up_is_named_whatever_clips_or_scales_them_all(sums, factor, by):
    found = [f for s in range(AT) for f in sums.step(s, factor(s))]
    assert found == []
    assert sums.step(AT, factor(AT), ["layers.2"], by) == [], "a step is complete when the next one begins"
    [found] = sums.step(AT + 1, factor(AT + 1), ["layers.2"], by)
    assert (sums.records.table.series[found.series_id].name, found.step) == ("layers.2.bias", AT)
    assert [f for s in range(AT + 2, AT + 9) for f in sums.step(s, factor(s), ["layers.2"], by)] == [], "told once"


@pytest.mark.parametrize("zeros", [0.3, 0.0])
def test_a_table_of_which_all_rows_get_a_gradient_may_be_shared_with_a_head(alone, zeros):
    """The gradients of logits add up to zero under cross entropy, and not with another term in the loss."""
    sums = Sums(alone, "weight")
    sums.zeros = zeros
    found = [f for s in range(AT + 5) for f in sums.step(s, off=["layers.2"] if s >= AT else [])]
    assert [f.step for f in found] == [AT] * (zeros > 0)


def test_the_output_of_the_module_is_a_suspicion(sums):
    """Where a kernel's output is changed after it was computed, the gradients there are not those of its bias."""
    for step in range(AT):
        sums.step(step)
    sums.step(AT, off=["layers.2"])
    told = sums.judge(sums.records.step(AT + 1, {("loss", "loss"): 1.0}))
    assert [(f.name, f.quantity, f.alarm, f.passed_on) for f in told] == [
        (None, None, True, False),
        ("layers.2.output.0", "activation_output", False, True),
    ]


def test_where_it_does_not_hold_from_the_start_nothing_is_said(sums):
    """On several ranks gradients are means over other batches too; weights that are used twice get two sums."""
    odd = lambda s: [m for i, m in enumerate(MODULES) if (s + i) % 3 == 0]  # noqa: E731
    assert [f for s in range(60) for f in sums.step(s, 1.0, odd(s))] == []


def test_another_clipping_of_most_of_them_is_no_fault_of_some(sums):
    assert [f for s in range(AT) for f in sums.step(s)] == []
    each = np.linspace(0.1, 0.8, len(MODULES))
    assert [f for s in range(AT, AT + 30) for f in sums.step(s, off=MODULES[:4], by=each)] == []


@pytest.mark.parametrize(("off", "told"), [(MODULES[:2], 0), (MODULES[:1], 1)])
def test_a_part_of_the_model_that_has_a_clipping_of_its_own_is_no_fault(sums, off, told):
    """An actor and a critic: until one bound is reached, the factor of both is one."""
    assert [f for s in range(AT) for f in sums.step(s)] == []
    assert len([f for s in range(AT, AT + 30) for f in sums.step(s, off=off, by=0.4)]) == told


def test_a_part_whose_own_bound_is_not_reached_is_no_fault_beside_parts_that_are_clipped(sums):
    """The critic alone is clipped, and has more layers than the actor."""
    assert [f for s in range(AT) for f in sums.step(s)] == []
    assert [f for s in range(AT, AT + 30) for f in sums.step(s, 0.7, off=MODULES[:1], by=1 / 0.7)] == []


def test_a_run_that_diverges_gives_no_warning(sums):
    record = sums.records.step(0, {("a.output.0", "activation_grad_output"): 1.0, ("a.bias", "gradient"): 1.0})
    record.values[:, MEAN] = np.inf
    with np.errstate(all="raise"):
        assert sums.judge(record) == sums.judge(sums.records.step(1, {("loss", "loss"): 1.0})) == []


def test_a_step_with_other_calls_of_a_module_is_not_compared(sums):
    """Calls beyond the number that is read have no row."""
    assert [f for s in range(AT) for f in sums.step(s)] == []
    assert [f for s in range(AT, AT + 9) for f in sums.step(s, off=["layers.2"], parts=2)] == []


def test_a_step_that_the_loss_scaler_skipped_is_not_compared(sums):
    assert [f for s in range(AT) for f in sums.step(s)] == []
    assert sums.step(AT, off=["layers.2"], skipped=True) == []
    assert sums.step(AT + 1) == []
