"""A gradient that something writes to after the backward pass is named; what scales or clips all of them is not."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.rules.gradients.changed_gradient import ChangedGradientRule
from trainsentry.collectors.statistics import MAX, MEAN, MIN, NORM

NAMES = [f"layers.{i}.weight" for i in range(6)]
FAULT = 40


def statistics(x):
    row = Records.row(1.0, scalar=False)
    row[[MIN, MAX, MEAN, NORM]] = x.min(), x.max(), x.mean(), np.linalg.norm(x)
    return row


def judge(alone, change, clip=lambda step: 0.5, steps=60, skipped=False):
    """Return the findings of a run; `change(name, step, gradient)` gives what the optimizer gets."""
    records, draw = Records(), np.random.default_rng(0)
    rule, found = alone(ChangedGradientRule, records.table), []
    for step in range(steps):
        left = {name: draw.normal(size=16).astype(np.float32) for name in NAMES}
        sizes = {(name, "gradient_unreduced"): 1.0 for name in NAMES} | {(name, "gradient"): 1.0 for name in NAMES}
        record = records.step(step, sizes, skipped=skipped)
        for i, name in enumerate(NAMES):
            record.values[i] = statistics(left[name])
            used = change(name, step, left[name].copy()) * np.float32(clip(step))
            record.values[len(NAMES) + i] = statistics(used)
        found += rule(record)
    return found


def negated(gradient):
    return -gradient


def one_element(gradient):
    gradient[3] *= 64
    return gradient


def a_part(gradient):
    gradient[:5] = 0
    return gradient


@pytest.mark.parametrize("harm", [negated, one_element, a_part, np.sort, lambda g: g + np.float32(0.05)])
def test_a_gradient_that_is_changed_after_the_backward_pass_is_named_at_its_step(alone, harm):
    def change(name, step, gradient):
        return harm(gradient) if name == NAMES[2] and step >= FAULT else gradient

    found = judge(alone, change)
    if harm is np.sort:
        assert found == [], "extremes and mean are the same"
    else:
        [finding] = found
        assert (finding.alarm, finding.kind) == (True, "gradient_flow")
    assert judge(alone, change, skipped=True) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda name, step, g: g,
        lambda name, step, g: g * np.float32(0.1 + step % 7),
        lambda name, step, g: g * np.float32(0.1 + (step + 3) % 7) if name in NAMES[:3] else g,
        lambda name, step, g: g.clip(-1.5, 1.5) if step % 5 == 4 else g,
        lambda name, step, g: g + np.float32(0.1) if step >= FAULT else g,
        lambda name, step, g: np.random.default_rng(step).normal(size=16).astype(np.float32),
        lambda name, step, g: np.zeros_like(g) if name == NAMES[1] else g,
    ],
    ids=["plain", "scaled", "clipped in two groups", "clipped by value", "noise to all", "of other ranks", "zero"],
)
def test_what_programs_do_to_gradients_is_no_finding(alone, change):
    assert judge(alone, change, clip=lambda step: 1 / (1 + step % 3)) == []


def test_a_gradient_that_clipping_leaves_out_is_named(alone):
    def change(name, step, gradient):
        return gradient * np.float32(2) if name == NAMES[5] and step >= FAULT else gradient  # against the factor 1/2

    [finding] = judge(alone, change)
    assert finding.statistic == "norm"
    assert finding.value == pytest.approx(2 * finding.expected)


def test_adaptive_clipping_of_some_gradients_is_no_finding(alone):
    def change(name, step, gradient):
        clips = (step + NAMES.index(name)) % 17 == 3
        return np.where(np.arange(16) < 4, gradient / 8, gradient).astype(np.float32) if clips else gradient

    assert judge(alone, change) == []


def test_the_sentence_gives_both_numbers():
    anomaly = Anomaly(60, 0, 0, 0, "w", "gradient", "mean", 0.5, -0.5, 60.0, "gradient_flow", "changed_gradient")
    said = ChangedGradientRule.sentence(anomaly, "the gradient of w")
    assert said.startswith("something changed the gradient of w after the backward pass of step 60: its mean is 0.5")
