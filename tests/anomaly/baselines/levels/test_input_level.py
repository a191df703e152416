"""Inputs of the model that have another size from one step on are told where the loss is worse, though they swing."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.baselines.levels.rank_test import NEW
from trainsentry.anomaly.detection import Detection
from trainsentry.collectors.series import ACTIVATION_INPUT, Series

STEPS, AT = 140, 103
INPUT = Series("input.0", ACTIVATION_INPUT)
SWING = 0.08
"""Logarithms: batches of some hundred characters, whose sizes overlap with those of another tokenizer."""


def judged(size_of, loss_of, seed=0, steps=STEPS, logged_every=1, **logged):
    """Return the findings on an input whose batches swing about a size, beside a loss that swings about another."""
    records, random, found = Records(), np.random.default_rng(seed), []
    table = records.table
    assert table.series_id(INPUT) == 0
    detection = Detection(table)
    for step in range(steps):
        sizes = {("loss", "loss"): loss_of(step) * float(np.exp(0.05 * random.standard_normal()))}
        sizes = sizes if step % logged_every == 0 else {}
        sizes |= {(name, name): value(step) for name, value in logged.items()}
        batch = {("input.0", ACTIVATION_INPUT): size_of(step) * float(np.exp(SWING * random.standard_normal()))}
        record = records.step(step, {**batch, **sizes})
        record.ids[0] = 0  # an input of the whole model is of no module
        found += [a for a in detection.judge(record) if (a.quantity, a.statistic) == ("data", "rms")]
    return found


def falls(step):
    return 60.0 if step < AT else 36.0


def rises(step):
    return 60.0 if step < AT else 100.0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size_of", [falls, rises])
def test_another_size_beside_a_loss_that_is_worse_is_an_alarm_at_its_step(size_of, seed):
    [found] = judged(size_of, lambda step: 2.4 if step < AT else 2.7, seed)
    assert (found.name, found.alarm) == ("input.0", True)
    assert AT <= found.step <= AT + 1
    assert found.last_clean == found.step - 1


@pytest.mark.parametrize("loss", [2.4, 2.0])
def test_another_size_beside_a_loss_that_is_as_it_was_or_better_is_a_suspicion(loss):
    """Augmentation is switched off for the last epochs."""
    assert [a.alarm for a in judged(falls, lambda step: 2.4 if step < AT else loss)] == [False]


@pytest.mark.parametrize("seed", range(8))
def test_a_few_losses_do_not_say_that_the_loss_is_worse(seed):
    assert not any(a.alarm for a in judged(falls, lambda _: 2.4, seed, 400, logged_every=5))


@pytest.mark.parametrize("seed", range(6))
def test_batches_that_swing_are_nothing(seed):
    assert judged(lambda _: 60.0, lambda _: 2.4, seed, 600) == []


def test_batches_that_swing_by_eights_are_nothing():
    """As the files of a corpus that is read in its order."""
    for seed in range(4):
        swings = np.random.default_rng(seed).normal(size=100)
        assert judged(lambda step, of=swings: 60 * np.exp(0.3 * of[step // NEW]), lambda _: 2.4, seed, 600) == []


def test_who_declares_another_stage_expects_other_data():
    assert judged(falls, lambda step: 2.4 if step < AT else 2.7, stage=lambda step: float(step >= AT)) == []
