"""Levels recur where many updates share a rollout, and not after one shift, along a line, or by chance."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.rules.data.recurring_levels import FEWEST, RECURRING, SAMPLES, recurring_levels, variance_ratio

DATA, LOSS = ("input.0", "activation_input"), ("loss", "loss")
AT = 544

DRAWS = {
    "normal": lambda random, n: random.standard_normal(n),
    "lognormal": lambda random, n: np.exp(random.standard_normal(n)),
    "of two kinds": lambda random, n: 3.0 * (random.random(n) < 0.1) + 0.1 * random.standard_normal(n),
    "without replacement": lambda random, n: np.concatenate([random.permutation(32) for _ in range(n // 32)]),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("count", [FEWEST, SAMPLES])
def test_independent_batches_have_no_levels(draw, count):
    random = np.random.default_rng(0)
    ratios = np.array([recurring_levels(DRAWS[draw](random, count)) for _ in range(1000)])
    assert np.mean(ratios >= RECURRING) <= 0.003


@pytest.mark.parametrize("size", [3, 10, 100])
@pytest.mark.parametrize("lasts", [4, 16, 32, SAMPLES])
def test_what_happens_once_is_no_level_that_recurs(size, lasts):
    """A glitch of some batches, or a shift that stays."""
    random, at = np.random.default_rng(0), np.arange(SAMPLES)
    ratios = [
        recurring_levels(random.standard_normal(SAMPLES) + size * ((at >= first) & (at < first + lasts)))
        for first in range(0, SAMPLES, 3)
    ]
    assert np.mean(np.array(ratios) >= RECURRING) <= 0.02


@pytest.mark.parametrize("bends_at", [-1, 100, 256, 400])
def test_a_line_that_bends_is_none_either(bends_at):
    random, at = np.random.default_rng(0), np.arange(SAMPLES)
    line = 8 * np.maximum(at - bends_at, 0) / 128
    assert np.mean([recurring_levels(random.standard_normal(SAMPLES) + line) >= RECURRING for _ in range(200)]) <= 0.02


@pytest.mark.parametrize("block", [16, 32])
def test_levels_of_rollouts_recur_though_each_is_shuffled(block):
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(200):
        levels = np.repeat(2 * random.standard_normal(SAMPLES // block), block)
        ratios.append(recurring_levels(levels + random.standard_normal(SAMPLES)))
    assert np.mean(np.array(ratios) >= RECURRING) >= 0.9


def test_constant_batches_have_none():
    assert variance_ratio(np.ones(SAMPLES)) == 0.0


@pytest.mark.parametrize(("block", "told"), [(1, True), (32, False)])
def test_the_loss_of_a_rollout_is_no_other_level_though_thirty_two_updates_share_it(block, told):
    """Within a rollout its minibatches are independent; the first batch of the next has a loss four times as large."""
    records, random, alarms = Records(), np.random.default_rng(1), set()
    detection, size = Detection(records.table), 1.0
    for step in range(AT + 8):
        if step % block == 0:
            size = float(np.exp(0.06 * random.standard_normal()))
        data, loss = np.exp(0.04 * random.standard_normal(2))
        sizes = {DATA: size * data, LOSS: loss * (4.0 if step >= AT else 1.0)}
        alarms |= {a.name for a in detection.judge(records.step(step, sizes)) if a.alarm and step >= AT}
    assert ("loss" in alarms) == told


def test_a_glitch_of_the_data_silences_no_fault_that_comes_after_it():
    records, random, alarms = Records(), np.random.default_rng(1), set()
    detection = Detection(records.table)
    for step in range(500):
        data = 0.04 * (random.standard_normal() + 3 * (300 <= step < 316))
        loss = np.exp(0.04 * random.standard_normal())
        sizes = {DATA: float(np.exp(data)), LOSS: float(loss) * (1.6 if step >= 420 else 1.0)}
        alarms |= {a.name for a in detection.judge(records.step(step, sizes)) if a.alarm and step >= 420}
    assert "loss" in alarms
