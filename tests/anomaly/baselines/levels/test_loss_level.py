"""A loss that is higher from one step on is told by that step, though it swings; spikes, trends and swings are not."""

import math

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.baselines.levels.loss_level import YOUNG
from trainsentry.anomaly.baselines.levels.rank_test import NEW
from trainsentry.anomaly.detection import Detection

LOSS = ("loss", "loss")


def told(level_of, steps=140, swing=0.35, seed=0, **logged):
    """Return the steps and names of the alarms about a loss that swings about a level."""
    records, random, found = Records(), np.random.default_rng(seed), []
    detection = Detection(records.table)
    for step in range(steps):
        sizes = {LOSS: level_of(step) * float(np.exp(swing * random.standard_normal()))}
        sizes |= {(name, name): value(step) for name, value in logged.items()}
        found += [(a.name, a.step) for a in detection.judge(records.step(step, sizes)) if a.alarm]
    return found


@pytest.mark.parametrize("factor", [3.0, 6.0])
def test_a_lasting_rise_among_swings_is_told_by_its_first_step(factor):
    assert ("loss", 100) in told(lambda step: factor if step >= 100 else 1.0)


@pytest.mark.parametrize("seed", range(6))
def test_swings_are_nothing(seed):
    assert told(lambda _: 1.0, 600, seed=seed) == []


def test_a_spike_that_passes_and_a_slow_rise_are_no_other_level():
    assert told(lambda step: 2.5 if 100 <= step < 100 + NEW - 3 else 1.0, swing=0.3) == []
    assert told(lambda step: 1.0 + step / 300, swing=0.2) == []


@pytest.mark.parametrize(("lasts", "is_told"), [(10, False), (24, False), (100, True)])
@pytest.mark.parametrize("is_known_by_heart", [True, False])
def test_a_loss_far_below_its_start_may_rise_and_fall_again(lasts, is_told, is_known_by_heart):
    """At the edge of stability it does so for some thirty steps; where it began nearby, it is told at once."""
    start = 1.4 if is_known_by_heart else 0.02

    def level(step):
        return max(start * 0.5 ** (step / 4), 0.02) * (3.0 if 300 <= step < 300 + lasts else 1.0)

    found = [step for name, step in told(level, 420, swing=0.1) if name == "loss"]
    assert bool(found) == (is_told or not is_known_by_heart)
    assert all(step in range(298, 304) for step in found[:1])


def test_a_rise_that_is_waited_for_excuses_no_other_one():
    def level(step):
        return max(1.4 * 0.5 ** (step / 4), 0.02) * 3.0 ** ((step >= 300) + (step >= 600))

    found = [step for name, step in told(level, 720, swing=0.1) if name == "loss"]
    assert found == pytest.approx([300, 600], abs=3)


def test_losses_that_are_alike_by_eights_are_seldom_told():
    """As those of the minibatches of one rollout are; eight independent ones would be told in each of these runs."""
    runs = []
    for seed in range(6):
        swings = np.random.default_rng(seed).uniform(-2, 2, 100)
        runs.append(told(lambda step, of=swings: float(np.exp(0.25 * of[step // NEW])), 600, swing=0.1, seed=seed))
    assert sum(map(bool, runs)) <= 3


def test_trouble_that_a_run_has_got_over_excuses_no_other_for_good():
    def level(step):
        return 2.0 if 70 <= step < 110 else 1.6 if step >= 800 else 1.0

    assert ("loss", 800) in told(level, 840, swing=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_that_falls_has_risen_where_it_is_above_its_fall(seed):
    """The fall makes the range of the old losses as wide as the rise: labels one row off, at a loss that fell."""

    def falls(step):
        return math.exp(-step / 120)

    assert told(falls, swing=0.05, seed=seed) == []
    assert ("loss", 100) in told(lambda step: 1.5 * falls(100) if step >= 100 else falls(step), swing=0.05, seed=seed)


@pytest.mark.parametrize("cycle", [80, 100])
def test_a_restart_of_the_rate_may_make_the_loss_worse(cycle):
    """As of cosine cycles (SGDR), at whose starts the loss leaps."""

    def since(step):
        return step % cycle / cycle

    found = told(
        lambda step: 1.0 + 0.4 * (1 - since(step)) ** 3, 400, swing=0.05,
        learning_rate=lambda step: 1e-3 * (1 + math.cos(math.pi * since(step))) + 1e-6,
    )  # fmt: skip
    assert found == []


def test_a_young_run_may_get_worse():
    assert told(lambda step: 3.0 if step >= YOUNG - NEW - 8 else 1.0, YOUNG - 1) == []


def test_who_logs_another_stage_expects_another_loss():
    def stage(step):
        return float(step >= 100)

    assert told(lambda step: 3.0 if step >= 100 else 1.0, stage=stage) == []


def test_a_loss_that_crosses_zero_has_no_level():
    assert told(lambda step: (3.0 if step >= 100 else 1.0) * (-1 if step % 9 == 0 else 1)) == []


def test_a_run_that_goes_back_has_the_higher_loss_of_then():
    def level(step):
        return 2 * float(np.exp(-step / 150)) + 0.3

    records, random = Records(), np.random.default_rng(0)
    detection, found = Detection(records.table), []
    for step in [*range(400), *range(200, 320)]:
        if step == 200 and random.random() >= 0:
            saved = detection.state() if not found else None
        sizes = {LOSS: level(step) * float(np.exp(0.05 * random.standard_normal()))}
        found += [a for a in detection.judge(records.step(step, sizes)) if a.alarm]
        if step == 399:
            detection.load(saved)
    assert found == []


def test_a_negative_loss_that_improves_has_not_risen():
    assert told(lambda step: -0.6 if step < 100 else -0.8, swing=0.02) == []
