"""A state is held to its recurrence where that explains how it changes."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.rules.optimizer.recurrence import RecurrenceRule
from trainsentry.collectors.statistics import MEAN

GRADIENT, MOMENT = ("fc.weight", "gradient"), ("fc.weight", "exp_avg")
OPTIONS = {(f"option.0.0.{key}",) * 2: value for key, value in (("lr", 1e-3), ("betas.0", 0.9), ("betas.1", 0.99))}


def told(alone, decay, spoil_at=None, steps=60):
    """Return the steps at which a moment is told whose optimizer averages gradients by `decay`.

    The mean is small beside the size, as in every large tensor, and one gradient has a larger one.
    """
    records, rng = Records(), np.random.default_rng(0)
    rule, moment, found = alone(RecurrenceRule, records.table), 0.0, []
    for step in range(steps):
        mean = 1e-5 * float(rng.standard_normal()) if step != 40 else 3e-2
        moment += 0.05 if step == spoil_at else 0.0  # it is read before the update
        record = records.step(step, {**(OPTIONS if step == 0 else {}), GRADIENT: 4.0, MOMENT: 4.0})
        record.values[-2:, MEAN] = mean, moment
        moment = decay * moment + (1 - decay) * mean
        found += [finding.step if finding.step is not None else step for finding in rule(record)]
    return found


@pytest.mark.parametrize(("spoil_at", "steps"), [(None, []), (50, [50])])
def test_a_moment_that_follows_is_quiet_and_one_that_was_written_to_is_told(alone, spoil_at, steps):
    assert told(alone, 0.9, spoil_at) == steps


def test_a_moment_of_another_recurrence_is_not_held_to_this_one(alone):
    """Lion's is averaged by the second beta."""
    assert told(alone, 0.99) == []


def test_states_that_come_in_a_second_record_of_a_step_do_not_end_the_rule(alone):
    """Where they are lost, the trail of what they were has fewer states than there are now."""
    records, rng = Records(), np.random.default_rng(0)
    later = {("new.weight", "exp_avg"): 1.0}
    records.step(500, later)  # a series is defined ahead of its first row
    rule, names, moments, found = alone(RecurrenceRule, records.table), ["a", "b", "c"], dict.fromkeys("abc", 0.0), []
    for step in range(61):
        known = names if step < 60 else []
        gradients = {(f"{n}.weight", "gradient"): 4.0 for n in names}
        record = records.step(step, {**(OPTIONS if step == 0 else {}), **gradients})
        means = 1e-3 * rng.standard_normal(3)
        record.values[-3:, MEAN] = means
        if step % 10 == 0:
            if step == 60:
                found += rule(records.step(step, later))
            states = records.step(step, {(f"{n}.weight", "exp_avg"): 1e-3 for n in names})
            states.values[:, MEAN] = [moments[n] + (0.0 if known else 0.5) for n in names]
            found += rule(states)
        found += rule(record)
        moments = {n: 0.9 * moments[n] + 0.1 * mean for n, mean in zip(names, means, strict=True)}
    assert found == [], "most follow no more, and not from zero"
