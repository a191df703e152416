"""A learning rate that rises with the batch is the program's own; one that rises further, or later, is not."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.rules.optimizer.options import OptionRule
from trainsentry.collectors.series import Layout

LR = ("option.0.0.lr", "option.0.0.lr")
INPUT = ("input.0", "activation_input")


def rates_told(alone, batch, rate, micro_steps=lambda step: 1):
    """Return the steps at which a rate is told, of 60 steps of a batch of so many rows."""
    records = Records()
    rule, told, before = alone(OptionRule, records.table), [], None
    for step in range(60):
        sizes = {(*INPUT, micro_step): 1.0 for micro_step in range(micro_steps(step))}
        if rate(step) != before:
            before = sizes[LR] = rate(step)
        record = records.step(step, sizes)
        layout = records.table.layout_id(Layout((batch(step), 4), "float32", 4 * batch(step)))
        record.layouts[:] = np.full(len(record), layout, np.int32)
        told += [found.step for found in rule(record)]
    return told


def doubled(value, at=40, factor=2):
    return lambda step: value * (factor if step >= at else 1)


@pytest.mark.parametrize("factor", [2, 2**0.5])
@pytest.mark.parametrize("at", [40, 41, 42])
def test_a_rate_that_follows_the_batch_is_quiet(alone, at, factor):
    assert rates_told(alone, doubled(8), doubled(1e-3, at, factor)) == []


def test_a_batch_of_more_micro_steps_is_a_larger_batch(alone):
    assert rates_told(alone, lambda step: 8, doubled(1e-3), micro_steps=doubled(2)) == []


@pytest.mark.parametrize(("accumulates", "told"), [(True, []), (False, [32])])
def test_a_warm_up_that_is_set_at_each_micro_step_goes_twice_as_fast_with_two_of_them(alone, accumulates, told):
    passes = lambda step: 2 if accumulates and step >= 30 else 1  # noqa: E731
    rate = lambda step: 1e-4 * (step + max(step - 29, 0) + 1)  # noqa: E731
    assert rates_told(alone, lambda step: 8, rate, micro_steps=passes) == told


@pytest.mark.parametrize(
    ("batch", "rate", "told"),
    [
        (lambda step: 8, doubled(1e-3), 40),
        (doubled(8), doubled(1e-3, factor=4), 40),
        (doubled(8), doubled(1e-3, at=45), 45),
        (lambda step: 8 + 8 * (step % 4 == 0), doubled(1e-3), 40),
    ],
    ids=["the same batch", "further than the batch", "steps later", "batches of many sizes"],
)
def test_another_rate_is_told(alone, batch, rate, told):
    assert rates_told(alone, batch, rate) == [told]
