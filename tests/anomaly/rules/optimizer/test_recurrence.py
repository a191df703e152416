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
