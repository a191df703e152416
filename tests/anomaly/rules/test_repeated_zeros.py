"""An activation that repeats its number of zeros is told; what varies, rests by design or follows the input is not."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.rules.repeated_zeros import CHANGES_BEFORE, RepeatedZerosRule
from trainsentry.collectors.series import Layout
from trainsentry.collectors.statistics import ZEROS

DROP, NEXT = ("drop.output.0", "activation_output"), ("next.input.0", "activation_input")
DATA, GRADIENT = ("input.0", "activation_input"), ("drop.output.0", "activation_grad_output")
NUMEL, AT = 4096, 40


def drawn(step, share=0.1, numel=NUMEL):
    """Return the share of zeros that a fresh mask makes."""
    return np.random.default_rng(step).binomial(numel, share) / numel


def run(alone, zeros_of, steps=range(80), numel=lambda step: NUMEL):
    records, found = Records(), []
    rule = alone(RepeatedZerosRule, records.table)
    for step in steps:
        records.layout = records.table.layout_id(Layout((numel(step),), "float32", numel(step)))
        zeros = zeros_of(step)
        record = records.step(step, dict.fromkeys(zeros, 1.0))
        record.values[:, ZEROS] = list(zeros.values())
        found += [(records.table.series[f.series_id].name, f.step, f.last_clean) for f in rule(record)]
    return found


@pytest.mark.parametrize("every", [1, 10])
def test_a_mask_that_is_drawn_again_is_told_by_the_first_sample_that_has_it(alone, every):
    steps = range(0, 80 * every, every)
    found = run(alone, lambda s: {DROP: drawn(min(s, AT * every))}, steps)
    assert found == [(DROP[0], AT * every, (AT - 1) * every)], "once"


def test_a_function_between_two_modules_shows_in_the_input_of_the_second(alone):
    assert run(alone, lambda s: {NEXT: drawn(min(s, AT))}) == [(NEXT[0], AT, AT - 1)]


@pytest.mark.parametrize(
    "zeros_of",
    [
        lambda s: {DROP: drawn(s)},
        lambda s: {DROP: drawn(s // 6)},  # several passes with one mask, by design
        lambda s: {DROP: drawn(0)},
        lambda s: {DROP: drawn(s) if s < CHANGES_BEFORE - 1 else 0.1},
        lambda s: {DROP: drawn(s) if s < AT else 0.0},  # dropout is switched off: another rule's
        lambda s: {DROP: drawn(s) if s < AT else 1.0},
        lambda s: {DROP: drawn(min(s, AT)), DATA: drawn(min(s, AT), 0.3)},  # padding
        lambda s: {GRADIENT: drawn(min(s, AT))},
        lambda s: {DROP: drawn(s) if s < AT - 12 else (100 + max(AT - s, 0) % 3) / NUMEL},  # units have settled
        lambda s: {DROP: (100 + s % 2) / NUMEL if s < AT else 100 / NUMEL},  # one element more or less is no spread
    ],
)
def test_what_varies_was_never_otherwise_or_has_another_reason_is_nothing(alone, zeros_of):
    assert run(alone, zeros_of) == []


def test_batches_of_other_sizes_begin_anew(alone):
    same_count = run(alone, lambda s: {DROP: drawn(min(s, AT)) / (1 + s % 2)}, numel=lambda s: NUMEL * (1 + s % 2))
    assert same_count == []


def test_healthy_masks_of_any_size_are_quiet_for_long(alone):
    sizes = {(f"drop{n}.output.0", "activation_output"): share for n, share in enumerate((0.02, 0.1, 0.5))}
    assert run(alone, lambda s: {key: drawn(7 * s + 1, share) for key, share in sizes.items()}, range(3000)) == []


def test_a_path_that_is_dropped_for_whole_samples_hides_one_of_a_few_numbers_by_chance(alone):
    def dropped(step, path):
        return np.random.default_rng([step, path]).binomial(16, 0.05 * (1 + path % 4)) * (NUMEL // 16) / NUMEL

    paths = {(f"drop_path{n}.output.0", "activation_output"): n for n in range(40)}
    assert run(alone, lambda s: {key: dropped(s, path) for key, path in paths.items()}, range(400)) == []
