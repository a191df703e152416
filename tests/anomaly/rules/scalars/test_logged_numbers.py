"""A logged number that stands still or turns its sign, or a part of the loss that left its range, is told."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.rules.scalars.logged_numbers import REPEATS, LoggedNumbersRule

AT = 80


def run(alone, value_of, name="approx_kl", steps=120):
    """Return what is found over steps; `value_of(step, noise)` gives the number."""
    records, draw = Records(), np.random.default_rng(0)
    rule, found = alone(LoggedNumbersRule, records.table), []
    for step in range(steps):
        value = value_of(step, float(np.exp(0.3 * draw.standard_normal())))
        found += [(step, f.step, f.kind) for f in rule(records.step(step, {(name, name): value}))]
    return found


@pytest.mark.parametrize("rest", [0.0, 1e-4, 0.3])
def test_a_random_number_that_stands_still_is_told_with_the_first_step_of_it(alone, rest):
    """A divergence between a policy and itself is zero."""
    assert run(alone, lambda s, noise: rest if s >= AT else 1e-4 * noise) == [(AT + REPEATS, AT, "stale")]


def test_the_monitors_own_numbers_of_modules_are_judged_by_others(alone):
    """A gap that is often exactly zero, of a module that is named after the loss."""
    assert run(alone, lambda s, noise: 0.0 if s >= AT else 1e-7 * noise, "euler_gap.loss_head.weight") == []
    assert run(alone, lambda s, noise: noise * (11 if s >= AT else 1), "euler_gap.loss_head.weight") == []


@pytest.mark.parametrize(
    "value_of",
    [
        lambda s, noise: max(1e-4, 1e-3 * (1 - s / 80)),  # a schedule that ends
        lambda s, noise: 1.0 if s >= AT else min(0.5 * noise, 0.99),  # an accuracy that is perfect
        lambda s, noise: round(8 * min(noise / 2, 1)) / 8 if s < AT else 0.5,  # a share of eight
        lambda s, noise: float(round(100 * noise)) if s < AT else 64.0,  # a count
        lambda s, noise: -0.7557 * (1 + 1e-7 * (noise if s < AT else 1)),  # it has converged, but for the last bits
        lambda s, noise: -0.7557 * (1 + (2e-5 if s > 60 else 0.1) * (noise if s < AT else 1)),  # soon after it moved
        lambda s, noise: 0.5 if AT <= s < AT + REPEATS else noise,  # a few alike
    ],
)
def test_schedules_shares_and_counts_may_rest(alone, value_of):
    assert run(alone, value_of) == []


@pytest.mark.parametrize(("name", "count"), [("loss_v", 1), ("train/critic_loss", 1), ("loss_scale", 0), ("tokens", 0)])
def test_a_part_of_the_loss_that_has_left_its_range_for_good_is_told_once(alone, name, count):
    found = run(alone, lambda s, noise: 60 * noise * (11 if s >= AT else 1), name)
    assert [(step, kind) for _, step, kind in found] == [(AT, "shift")] * count


@pytest.mark.parametrize(
    "value_of",
    [
        lambda s, noise: noise * (2 if s >= AT else 1),  # weighted anew
        lambda s, noise: noise * (20 if s in {AT, AT + 1} else 1),  # a spike
        lambda s, noise: (noise - 1) * (20 if s >= AT else 1),  # of both signs
        lambda s, noise: noise * 1.05**s,  # begins slowly
    ],
)
def test_a_part_of_the_loss_may_spike_grow_and_be_weighted_anew(alone, value_of):
    assert run(alone, value_of, "loss_aux") == []


@pytest.mark.parametrize(("name", "sign"), [("kl", 1.0), ("loss", 1.0), ("train/log_likelihood", -1.0)])
def test_a_number_that_leaps_to_the_other_side_of_zero_is_told_once_with_its_first_step(alone, name, sign):
    """The sign of a divergence, of an advantage, of a likelihood."""
    found = run(alone, lambda s, noise: sign * 0.3 * noise * (-1 if s >= AT else 1), name)
    assert found == [(AT + 3, AT, "shift")]


@pytest.mark.parametrize(
    "value_of",
    [
        lambda s, noise: 1.0 - 0.02 * s,  # glides through zero, as a density's logarithm
        lambda s, noise: 1.0 - 0.02 * s + 0.02 * noise,
        lambda s, noise: 4.0 * 0.9**s - 0.01,
        lambda s, noise: noise - 1.0,
        lambda s, noise: noise * (-1 if s in {AT, AT + 1, AT + 2} else 1),
        lambda s, noise: noise * (-1 if s % 70 == 69 else 1) * (-1 if s >= AT else 1),  # has been negative before
        lambda s, noise: noise * (-1 if s >= 40 else 1),  # a young run
    ],
)
def test_numbers_that_glide_through_zero_or_have_both_signs_are_nothing(alone, value_of):
    assert run(alone, value_of, "reward", steps=240) == []


@pytest.mark.parametrize("seed", range(40))
def test_returns_that_are_learned_and_losses_that_wander_do_not_turn(alone, seed):
    draw = np.random.default_rng(seed)
    learned = 400 / (1 + np.exp(-np.arange(-150, 150) / 25)) - 200 + 20 * draw.standard_normal(300)
    wanders = np.cumsum(draw.standard_normal(300))
    for name, values in {"episode_return": learned, "critic": wanders}.items():
        assert run(alone, lambda s, _, values=values: float(values[s]), name, steps=300) == []


@pytest.mark.parametrize("begins", ["a stage", "an earlier step"])
def test_a_declared_change_and_a_run_that_goes_back_begin_anew(alone, begins):
    records, draw, found = Records(), np.random.default_rng(0), []
    rule = alone(LoggedNumbersRule, records.table)
    for i in range(160):
        values = {("accuracy", "accuracy"): (0.9 if i < AT else 0.1) * float(np.exp(0.05 * draw.standard_normal()))}
        values["stage", "stage"] = float(i >= AT and begins == "a stage")
        found += rule(records.step(i - AT if i >= AT and begins == "an earlier step" else i, values))
    assert found == []


@pytest.mark.parametrize(
    ("name", "is_told"),
    [
        ("reward", True),
        ("eval/accuracy", True),
        ("temperature", False),
        ("reward_loss", False),
        ("rewards/rejected", False),
        ("train/reward_std", False),
        ("grad_acc_steps", False),
    ],
)
@pytest.mark.parametrize("steps", [1, 30])
def test_a_reward_that_is_lost_is_told_though_it_goes_slowly(alone, name, is_told, steps):
    """The advantages have another sign."""
    found = run(alone, lambda s, noise: 0.9 * min(noise, 1.1) * 0.01 ** min(max(s - AT, 0) / steps, 1), name, 160)
    assert [kind for *_, kind in found][:1] == ["shift"] * is_told
    assert not found or AT < found[0][1] <= AT + steps


@pytest.mark.parametrize(
    "value_of",
    [
        lambda s, noise: 0.9 * noise * (0.5 if s >= AT else 1),
        lambda s, noise: 0.0 if s % 5 == 0 else noise,  # some batches get none
        lambda s, noise: noise * min(s / AT, 1),
        lambda s, noise: noise - 0.5 if s < AT else 0.1 * noise,
    ],
)
def test_rewards_that_vary_are_nothing(alone, value_of):
    assert run(alone, value_of, "reward", steps=160) == []
