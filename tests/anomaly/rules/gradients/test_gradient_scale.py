"""All gradients that grow by one factor are told of, but not while a run is so young that its first plateau ends."""

import math

import pytest
from step_records import Records

from trainsentry.anomaly.rules.gradients.gradient_scale import WAIT, YOUNG, GradientScaleRule
from trainsentry.collectors.series import Layout

LOSS = ("loss", "loss")
GRADIENTS = [(f"layers.{i}.weight", "gradient") for i in range(8)]


def growing(at, factor=4.0):
    """Return sizes: all gradients swing a little, and grow by one factor at a step; the loss goes on as it did."""
    return lambda s: (
        {LOSS: 2.0 - s / 500}
        | {key: (1.0 + 0.1 * math.sin(3 * s + i)) * (factor if s >= at else 1.0) for i, key in enumerate(GRADIENTS)}
    )


@pytest.mark.parametrize(("at", "told"), [(YOUNG - 20, False), (YOUNG + 20, True)])
def test_one_factor_is_told_of_once_a_run_is_no_longer_young(alone, judged, at, told):
    records = Records()
    found = judged(alone(GradientScaleRule, records.table), records, range(at + WAIT + 3), growing(at))
    assert [f.step for f in found] == ([at] if told else [])
    assert not told or found[0].value == pytest.approx(4.0, rel=0.2)


@pytest.mark.parametrize(("lengths", "is_told"), [((32, 9), False), ((32, 36), True), ((32, 32), True)])
def test_a_growth_with_inputs_of_another_size_is_not_told_of(alone, lengths, is_told):
    """Where sequences are sorted by length, each epoch begins with short ones, whose gradients are larger."""
    records, at, found = Records(), YOUNG + 20, []
    judge, sizes = alone(GradientScaleRule, records.table), growing(at)
    for step in range(at + WAIT + 3):
        record = records.step(step, {("input.0", "activation_input"): 5.0, **sizes(step)})
        length = lengths[step >= at]
        record.layouts[0] = records.table.layout_id(Layout((length,), "int64", length))
        found += judge(record)
    assert [f.step for f in found] == ([at] if is_told else [])


@pytest.mark.parametrize(("rate_before", "is_told"), [(0.05, False), (0.9, True), (1.0, True)])
def test_a_growth_after_the_learning_rate_rose_is_not_told_of(alone, judged, rate_before, is_told):
    """A restart of a schedule makes the rate twenty times larger, and the gradients with the next step."""
    records, at = Records(), YOUNG + 20
    sizes = growing(at)

    def with_rate(step):
        return {("learning_rate", "learning_rate"): 1.0 if step >= at - 1 else rate_before, **sizes(step)}

    found = judged(alone(GradientScaleRule, records.table), records, range(at + WAIT + 3), with_rate)
    assert [f.step for f in found] == ([at] if is_told else [])
