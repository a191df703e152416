"""All gradients that grow by one factor are told of, but not while a run is so young that its first plateau ends."""

import math

import pytest
from step_records import Records

from trainsentry.anomaly.rules.gradient_scale import WAIT, YOUNG, GradientScaleRule

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
