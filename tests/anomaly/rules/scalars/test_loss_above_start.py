"""A loss that leaps above its start after it had fallen is told; what losses do in healthy training is not."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.rules.scalars.loss_above_start import GIVEN_UP, LossAboveStartRule

LOSS = ("loss", "loss")


def told(alone, losses):
    records = Records()
    judge = alone(LossAboveStartRule, records.table)
    return [(step, f.kind) for step, loss in enumerate(losses) for f in judge(records.step(step, {LOSS: loss}))]


def falling(n, start=3.5, end=1.0, noise=0.03, seed=0):
    random = np.random.default_rng(seed)
    return (end + (start - end) * np.exp(-np.arange(n) / 20)) * random.lognormal(0, noise, n)


def test_a_leap_above_the_start_is_told_at_its_step_and_lasts_as_a_shift(alone):
    found = told(alone, [*falling(100), 5.2, 4.7, 4.2, 2.0, 1.1])
    assert found == [(100, "spike"), (101, "spike"), (102, "shift")]


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize(("lengths", "count"), [((8, 16), 0), ((8, 8), 10)])
def test_a_change_that_the_loop_declares_begins_another_training(alone, lengths, count, every):
    records = Records()
    judge, length = alone(LossAboveStartRule, records.table), ("sequence_length", "sequence_length")
    losses, found = [*falling(100), *[5.0] * 10], []
    for step, loss in enumerate(losses):
        logged = {length: lengths[step >= 100]} if step % every == 0 else {}
        found += judge(records.step(step, {**logged, LOSS: loss}))
    assert len(found) == count


@pytest.mark.parametrize("every", [1, 20])
def test_a_length_that_changes_with_each_batch_declares_nothing(alone, every):
    records = Records()
    judge, length = alone(LossAboveStartRule, records.table), ("sequence_length", "sequence_length")
    losses, found = [*falling(100), *[5.0] * 10], []
    for step, loss in enumerate(losses):
        logged = {length: float(step % 7)} if step % every == 0 else {}
        found += judge(records.step(step, {**logged, LOSS: loss}))
    assert len(found) == 10


def test_a_new_level_is_accepted_in_time(alone):
    found = told(alone, [*falling(100), *[6.0] * 80])
    assert len(found) == GIVEN_UP


@pytest.mark.parametrize("seed", range(10))
def test_healthy_losses_are_quiet(alone, seed):
    random = np.random.default_rng(seed)
    rough = falling(200, noise=0.6, seed=seed)
    restarts = np.concatenate([falling(70, seed=seed), falling(70, start=2.5, seed=seed)])
    around_zero = random.normal(size=300)
    plateau = np.concatenate([random.normal(2.3, 0.05, 80), falling(100, start=2.3, end=0.01, seed=seed)])
    never = random.lognormal(0, 0.5, 300)
    for losses in (rough, restarts, around_zero, plateau, never, -falling(100)):
        assert told(alone, losses) == []


def test_what_was_learned_goes_on_after_a_resume(alone):
    records = Records()
    judge = alone(LossAboveStartRule, records.table)
    for step, loss in enumerate(falling(100)):
        judge(records.step(step, {LOSS: loss}))
    again = alone(LossAboveStartRule, records.table)
    again.rule.load(judge.rule.saved(1))
    assert again(records.step(100, {LOSS: 5.0}))
