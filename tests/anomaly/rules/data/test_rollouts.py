"""Phases whose data a policy has gathered are known by the passes before them; validations are no rollouts."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.rules.data.rollouts import LEAST, PROVEN, Rollouts
from trainsentry.collectors.series import PASSES_WITHOUT_GRADIENTS

PASSES = (PASSES_WITHOUT_GRADIENTS, PASSES_WITHOUT_GRADIENTS)
DATA = ("input.0", "activation_input")
OUT = [(f"blocks.{i}.fc.output.0", "activation_output") for i in range(8)]
GRADIENTS = [(f"blocks.{i}.fc.weight", "gradient") for i in range(8)]
LENGTH = 40


def gathered(apart, *, phases=8, length=LENGTH, first=256.0, later=256.0, seed=0):
    """Return for each update whether its data count as gathered; those of each phase have a mean of their own."""
    random, rollouts, found = np.random.default_rng(seed), Rollouts(), []
    for phase in range(phases):
        mean = apart * random.standard_normal()
        for update in range(length):
            passes = (later if phase else first) if not update else 0.0
            rollouts.note(passes, {0: (mean + 0.1 * random.standard_normal(), 0.1 * random.standard_normal())})
            found.append(rollouts.is_gathering)
    return np.array(found).reshape(phases, length)


@pytest.mark.parametrize("length", [LENGTH, 320])
def test_a_policy_that_acts_before_its_first_update_gathers_from_the_second_phase_on(length):
    found = gathered(1.0, length=length)
    assert not found[0].any()
    assert found[1:, : LEAST - 1].all(), "before anything is known of a phase"
    assert found[1:].mean() > 0.8, "a phase may be like the one before"


def test_a_monitor_that_came_after_the_first_rollout_knows_it_by_three_phases():
    found = gathered(1.0, first=0.0)
    assert not found[:2].any()
    assert found[3:].all()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("first", [0.0, 256.0, 2.0])
def test_a_validation_gathers_nothing_once_the_first_batches_after_it_are_known(first, seed):
    found = gathered(0.0, first=first, seed=seed)
    assert not found[:, LEAST:].any()
    assert not found[1 + PROVEN :].any()
    assert found[1 : 1 + PROVEN, : LEAST - 1].all() == (first == 256.0)


def phases_of(means, rollouts=None, first=256.0):
    """Return for each phase whether its last update counts as one of gathered data."""
    random, rollouts, found = np.random.default_rng(0), rollouts or Rollouts(), []
    for phase, mean in enumerate(means):
        for update in range(LENGTH):
            passes = (256.0 if phase else first) if not update else 0.0
            rollouts.note(passes, {0: (mean + 0.1 * random.standard_normal(),)})
        found.append(rollouts.is_gathering)
    return found, rollouts


@pytest.mark.parametrize("before", [3, 5])
def test_one_phase_of_other_data_makes_no_policy_of_a_program_that_evaluates(before):
    """The way back to the data of before is no second difference."""
    found, _ = phases_of([0.0] * before + [1.0] + [0.0] * 8)
    assert not any(found[before + 2 :])
    assert not any(phases_of([0.0] * 5 + [1.0, 0.0, 0.0, 1.0, 0.0])[0][1:][6:])


def test_a_policy_that_has_settled_for_long_is_one_no_more():
    found, _ = phases_of([0.0, 1.0, 2.0, 3.0] + [3.0] * 12)
    assert found[4]
    assert not any(found[-2:])


def test_a_resumed_run_knows_its_policy():
    _, rollouts = phases_of([0.0, 1.0, 2.0, 3.0, 4.0])
    resumed = Rollouts()
    resumed.load(rollouts.saved())
    assert phases_of([5.0, 6.0], resumed)[0] == [True, True]


def test_updates_that_share_no_data_are_no_phase():
    assert not gathered(1.0, phases=60, length=1).any()


@pytest.mark.parametrize("acts", [True, False])
@pytest.mark.parametrize("changed", ["activations", "gradients"])
def test_levels_of_a_rollout_are_no_faults_and_those_of_a_program_that_evaluates_are(acts, changed):
    """At the fifth phase what layers compute, or their gradients, have another level; the data only where it acts."""
    records, random, found = Records(), np.random.default_rng(0), []
    detection, size = Detection(records.table), 1.0
    for step in range(5 * LENGTH + 8):
        phase = step // LENGTH
        if step % LENGTH == 0:
            size = float(np.exp(0.5 * random.standard_normal())) if acts else 1.0
        noise = lambda: float(np.exp(0.02 * random.standard_normal()))  # noqa: E731
        sizes = {DATA: size * noise()} | {key: noise() for key in (*OUT, *GRADIENTS)}
        for key in (OUT if changed == "activations" else GRADIENTS)[2:4]:
            sizes[key] *= 1.25 if phase >= 1 + PROVEN else 1.0
        if step % LENGTH == 0:
            sizes[PASSES] = 256.0
        found += [(a.step, a.name) for a in detection.judge(records.step(step, sizes)) if a.alarm]
    assert bool(found) != acts
    assert all(step == (1 + PROVEN) * LENGTH for step, _ in found)
