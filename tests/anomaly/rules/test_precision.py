"""Float32 values that something rounds to a smaller dtype are named; what is rounded by design is not."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.rules.precision import PrecisionRule
from trainsentry.collectors.statistics import MAX, MIN

WEIGHT, STATE, OUTPUT = ("fc.weight", "parameter"), ("fc.weight", "exp_avg"), ("fc.output.0", "activation_output")


def to_bits(value, bits):
    """Round a number to so many significant bits."""
    mantissa, exponent = np.frexp(value)
    return float(np.ldexp(np.round(mantissa * 2.0**bits), int(exponent) - bits))


def run(alone, series, rounds, steps=60, scale=1.0, others=()):
    """Return the findings over steps; `rounds` returns the bits of a step's values, None for all."""
    records, draw = Records(), np.random.default_rng(0)
    rule, found = alone(PrecisionRule, records.table), []
    for step in range(steps):
        record = records.step(step, {series: 1.0, **dict.fromkeys(others, 1.0)})
        values = np.array([-draw.uniform(0.5, 2), draw.uniform(0.5, 2)], np.float32).astype(float) * scale
        bits = rounds(step)
        record.values[0, [MIN, MAX]] = values if bits is None else [to_bits(v, bits) for v in values]
        found += rule(record)
    return found


@pytest.mark.parametrize("series", [WEIGHT, STATE, OUTPUT])
@pytest.mark.parametrize(("bits", "dtype"), [(8, "bfloat16"), (11, "float16")])
def test_rounding_that_sets_in_is_found_and_the_dtype_is_named(alone, series, bits, dtype):
    [found] = run(alone, series, lambda step: bits if step >= 40 else None)
    assert (found.statistic, found.kind, found.score) == (dtype, "precision", 60.0)
    assert found.last_clean == 39
    assert "rounded to" in PrecisionRule.sentence(_of(found), "parameter fc.weight")


def test_rounding_that_loses_small_updates_keeps_its_extremes_and_is_found(alone):
    records, rule = Records(), None
    rule, found = alone(PrecisionRule, records.table), []
    for step in range(60):
        record = records.step(step, {WEIGHT: 1.0 + step / 100})
        largest = float(np.float32(0.3 + step / 1000))
        record.values[0, [MIN, MAX]] = [-to_bits(0.3, 8), to_bits(0.32, 8)] if step >= 40 else [-largest, largest]
        found += [(step, each) for each in rule(record)]
    [(step, each)] = found
    assert (step, each.last_clean, each.statistic) == (42, 39, "bfloat16")


def test_what_is_rounded_from_the_start_or_for_one_step_is_design(alone):
    assert run(alone, OUTPUT, lambda step: 8) == []
    assert run(alone, OUTPUT, lambda step: 8 if step == 40 else None) == []
    assert run(alone, WEIGHT, lambda step: None) == []
    assert run(alone, ("fc.weight", "gradient"), lambda step: 8 if step >= 40 else None) == []


def test_what_float16_cannot_hold_was_not_rounded_to_it(alone):
    """The gradient of a bias ahead of a batch norm is the rest of a sum that cancels, and its first moment follows."""
    assert run(alone, STATE, lambda step: 11 if step >= 40 else None, scale=4e-8) == []
    assert run(alone, STATE, lambda step: 8 if step >= 40 else None, scale=4e-8) != []


@pytest.mark.parametrize(("scale", "count"), [(2e-9, 0), (2e-3, 1)])
def test_the_rest_of_a_sum_that_cancels_has_few_bits_beside_the_others_of_its_kind(alone, scale, count):
    """A generator's bias ahead of a batch norm, under Adam with β₁ = 0."""
    rounds, other = (lambda step: 8 if step >= 40 else None), ("head.weight", "exp_avg")
    assert len(run(alone, STATE, rounds, scale=scale, others=[other])) == count


def test_numbers_too_small_for_all_bits_and_whole_numbers_say_nothing(alone):
    assert run(alone, OUTPUT, lambda step: 8 if step >= 40 else None, scale=2.0**-120) == []
    assert run(alone, OUTPUT, lambda step: 8 if step >= 40 else None, scale=2.0**12) == []


def _of(found):
    detail = (found.statistic, found.value, found.expected, found.score, "precision", found.kind)
    return Anomaly(40, 0, 0, 0, "fc.weight", "parameter", *detail)


def test_sums_of_few_rounded_numbers_have_few_bits_now_and_then(alone):
    """The output of a layer and that of its adapter under autocast, with the scale of integers that its weights are."""
    draw = np.random.default_rng(0)
    assert run(alone, OUTPUT, lambda step: int(draw.integers(9, 20)), steps=400) == []
