"""A series that leaves its own range for good is told by its first step, however narrow the range; noise is not."""

import math

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.baselines.levels.recent_range import FEWEST, WAIT
from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.incidents.sentence import evidence
from trainsentry.collectors.statistics import ZEROS

OUT = [(f"blocks.{i}.fc.output.0", "activation_output") for i in range(8)]
INSIDE = ("blocks.3.proj.input.0", "activation_input")
GRADIENTS = [(f"blocks.{i}.fc.weight", "gradient") for i in range(8)]
LOSS = ("loss", "loss")
RATE = ("learning_rate", "learning_rate")


def run(sizes, steps=130, change=None, detection=None, records=None, start=0):
    """Judge records of sizes that swing by 2 %; return the findings that are alarms."""
    records = records or Records()
    detection = detection or Detection(records.table)
    random, found = np.random.default_rng(start), []
    for step in range(start, start + steps):
        noisy = {key: size * float(np.exp(0.02 * random.standard_normal())) for key, size in sizes(step).items()}
        record = records.step(step, noisy | {RATE: sizes(step).get(RATE, 1e-3)})
        if change is not None:
            change(step, records, record)
        found += [a for a in detection.judge(record) if a.alarm]
    return found


def calm(_step):
    return dict.fromkeys([*OUT, INSIDE, *GRADIENTS, LOSS], 1.0)


def test_nothing_is_said_of_noise():
    assert run(calm, 1000) == []


@pytest.mark.parametrize(
    ("series", "factor"),
    [(OUT[3], 1.3), (OUT[3], 0.75), (INSIDE, 1.3), (GRADIENTS[3], 1.6), (GRADIENTS[3], 0.6), (LOSS, 1.3)],
)
def test_a_small_change_that_stays_is_told_by_its_first_step(series, factor):
    found = run(lambda step: calm(step) | ({series: factor} if step >= 100 else {}))
    assert [(a.name, a.quantity, a.step, a.last_clean, a.kind) for a in found] == [(*series, 100, 99, "shift")]
    assert found[0].value / found[0].expected == pytest.approx(factor, rel=0.1)
    assert not found[0].passed_on


@pytest.mark.parametrize(
    ("module", "count"), [("blocks.3.parametrizations.weight.0", 0), ("blocks.3.reparametrized", 1)]
)
def test_a_weight_that_a_module_makes_adds_up_updates_and_has_no_level(module, count):
    """That of a spectral norm grows by the rate at each step, and as the rate drops it stays."""
    made = (f"{module}.output.0", "activation_output")
    assert len(run(lambda step: calm(step) | {made: 1.3 if step >= 100 else 1.0})) == count


def test_a_loss_may_fall_at_once():
    assert run(lambda step: calm(step) | ({LOSS: 0.7} if step >= 100 else {})) == []


@pytest.mark.parametrize("length", range(1, WAIT))
def test_what_comes_back_is_no_other_level(length):
    assert run(lambda step: calm(step) | ({OUT[3]: 1.3} if 100 <= step < 100 + length else {})) == []


def test_a_young_run_is_not_judged_and_an_older_one_sooner_than_a_middling_one():
    def shifted(at, factor):
        return run(lambda step: calm(step) | ({OUT[3]: factor} if step >= at else {}), at + 10)

    assert shifted(FEWEST - 4, 1.9) == []
    assert shifted(40, 1.24) == []
    assert shifted(400, 1.24) != []


def test_a_level_is_told_once_and_becomes_normal():
    found = run(lambda step: calm(step) | ({OUT[3]: 1.3} if step >= 100 else {}), 300)
    assert len(found) == 1


def test_the_first_of_the_forward_pass_is_the_cause_and_the_others_pass_it_on():
    found = run(lambda step: calm(step) | (dict.fromkeys([*OUT[3:], GRADIENTS[0]], 1.7) if step >= 100 else {}))
    assert [a.name for a in found if not a.passed_on] == [OUT[3][0]]
    assert {a.step for a in found} == {100}


def test_most_gradients_are_one_finding():
    found = run(lambda step: calm(step) | (dict.fromkeys(GRADIENTS, 1.7) if step >= 100 else {}))
    assert [(a.name, a.quantity, a.step) for a in found] == [("all", "gradient", 100)]
    assert found[0].value == pytest.approx(1.7, rel=0.1)


@pytest.mark.parametrize("share", [0.5, 0.3, 0.15])
def test_shares_of_zeros_that_fall_to_none_have_no_common_factor(share):
    """As where a dropout is left out: the quotient of shares is zero, and no size has changed."""

    def change(step, records, record):
        for row, i in enumerate(record.ids):
            if records.table.series[i].quantity == "gradient":
                record.values[row, ZEROS] = share if step < 100 else 0.0

    found = run(calm, change=change)
    assert not any(a.name == "all" for a in found)


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ([1.8] * 8, "all gradients together are 1.8"),
        (
            [1.6, 2.2, 5.0, 3.1, 2.0, 0.4, 1.0, 1.0],
            "most gradients have left their usual sizes at step 100, by factors",
        ),
    ],
)
def test_gradients_that_changed_by_several_factors_are_not_said_to_have_changed_by_one(factors, said):
    """A clip keeps their norm together; some grow by what others lose."""
    changed = dict(zip(GRADIENTS, factors, strict=True))
    found = run(lambda step: calm(step) | (changed if step >= 100 else {}))
    assert said in evidence(next(a for a in found if a.name == "all"))


@pytest.mark.parametrize(("factor", "told"), [(0.93, 0), (0.5, 1)])
def test_a_gradient_that_clipping_holds_near_its_bound_must_move_by_a_tenth(factor, told):
    """One tensor has most of the norm, so that its own is the bound, whatever happens."""

    def held(step, records, record):
        at = record.ids == records.table.series_id(records.table.series[record.ids[9]])
        assert at.sum() == 1
        record.values[9, :] = records.row((factor if step >= 100 else 1.0) * (1.0 + 1e-3 * (step % 5)), False)

    assert len(run(calm, change=held)) == told


@pytest.mark.parametrize(
    ("rows", "factor", "told"), [([11], 1e3, True), ([11, 12], 1e3, True), ([10, 11, 12, 13], 1e3, False)]
)
def test_one_gradient_that_leaps_for_one_step_is_told_and_several_are_the_training(rows, factor, told):
    """Its swings are wide, so that its own past alone says little."""

    def leap(step, records, record):
        swings = np.random.default_rng(step)
        for row in range(9, 9 + len(GRADIENTS)):
            size = float(np.exp(0.8 * swings.standard_normal())) * (factor if step == 100 and row in rows else 1.0)
            record.values[row] = records.row(size, False)

    found = run(calm, change=leap, steps=101)
    alone = [(a.name, a.step, a.kind) for a in found if a.detector == "spike" and a.quantity == "gradient"]
    assert bool(alone) is told
    assert all(step == 100 and kind == "spike" for _, step, kind in alone)


@pytest.mark.parametrize(("decades", "told"), [(0.2, True), (2.5, False)])
def test_a_gradient_that_leaps_must_leap_further_than_its_own_range(decades, told):
    """That of a gate which is all but shut swings over decades."""

    def leap(step, records, record):
        for row in range(9, 9 + len(GRADIENTS)):
            swing = 10 ** (decades * np.cos(step)) if row == 11 else 1.0 + 1e-3 * (step % 5)
            record.values[row] = records.row(swing * (40 * 10**decades if step == 100 and row == 11 else 1.0), False)

    found = run(calm, change=leap, steps=101)
    assert bool([a for a in found if a.detector == "spike" and a.quantity == "gradient"]) is told


@pytest.mark.parametrize(("size", "told"), [(1e-7, False), (1.0, True)])
def test_a_gradient_that_leaps_far_below_all_others_is_nothing(size, told):
    def leap(step, records, record):
        for row in range(9, 9 + len(GRADIENTS)):
            own = size * 10 ** np.cos(step) if row == 11 else 1.0 + 1e-3 * (step % 5)
            record.values[row] = records.row(own * (5e3 if step == 100 and row == 11 else 1.0), False)

    found = run(calm, change=leap, steps=101)
    assert bool([a for a in found if a.detector == "spike" and a.quantity == "gradient"]) is told


def test_a_few_gradients_that_move_with_all_others_are_not_told_apart():
    """A lower clipping bound makes all gradients smaller, and a steady one leaves its range first."""

    def clipped(step, records, record):
        bound = 0.6 if step >= 100 else 1.0
        swings = np.random.default_rng(step)
        for row in range(9, 9 + len(GRADIENTS)):
            steady = 0.01 if row == 9 else 0.4
            record.values[row] = records.row(bound * float(np.exp(steady * swings.standard_normal())), False)

    assert run(calm, change=clipped) == []


def test_gradients_that_all_fall_to_a_tenth_are_told():
    def scaled(step, records, record):
        swings = np.random.default_rng(step)
        for row in range(9, 9 + len(GRADIENTS)):
            size = (0.1 if step >= 100 else 1.0) * float(np.exp(0.05 * (row - 8) * swings.standard_normal()))
            record.values[row] = records.row(size, False)

    assert run(calm, change=scaled) != []


@pytest.mark.parametrize("varies", [True, False])
def test_a_mask_that_was_constant_excuses_nothing_beside_inputs_that_vary(varies):
    words, mask = ("input.0", "activation_input"), ("input.1", "activation_input")

    def padded(step, records, record):
        record.values[-3] = records.row(1.0 + (0.1 * (step % 7) if varies else 0.0), False)
        record.values[-2] = records.row(0.95 if step >= 100 else 1.0, False)

    found = run(
        lambda step: calm(step) | {words: 1.0, mask: 1.0} | ({OUT[3]: 1.5} if step >= 100 else {}), change=padded
    )
    assert (OUT[3][0] in [a.name for a in found]) is varies


@pytest.mark.parametrize("name", ["input.0", "embedding.input.0"])
def test_one_batch_that_gives_way_to_another_is_no_other_level_and_positions_that_change_are(name):
    """A program may train on one batch for a while, as physics-informed networks do on their points."""
    series = (name, "activation_input")

    def other(step, records, record):
        record.values[-2] = records.row(1.3 if step >= 100 else 1.0, False)

    found = run(lambda step: {**calm(step), series: 1.0}, change=other)
    assert [a.name for a in found] == ([] if name == "input.0" else [name])


@pytest.mark.parametrize(("zeros", "is_found"), [(1 / 16, False), (0.25, True)])
def test_a_silent_unit_is_no_fault_and_a_silent_head_is(zeros, is_found):
    def silence(step, records, record):
        names = [records.table.series[i].name for i in record.ids]
        record.values[names.index(INSIDE[0]), ZEROS] = zeros if step >= 100 else 0.0

    found = run(calm, change=silence)
    assert [(a.name, a.statistic) for a in found] == ([(INSIDE[0], "zeros")] if is_found else [])


@pytest.mark.parametrize(
    ("zeros", "after", "is_found"), [(1 / 64, 0, False), (0.35, 0.325, False), (1 / 8, 0, True), (0.5, 0.35, True)]
)
def test_a_unit_that_wakes_is_no_fault_and_a_dropout_that_is_less_or_gone_is(zeros, after, is_found):
    def wake(step, records, record):
        names = [records.table.series[i].name for i in record.ids]
        record.values[names.index(GRADIENTS[3][0]), ZEROS] = after if step >= 100 else zeros

    found = run(calm, change=wake)
    assert [(a.name, a.statistic) for a in found] == ([(GRADIENTS[3][0], "zeros")] if is_found else [])


def test_a_restart_of_the_rate_may_change_levels():
    def restarted(step):
        return calm(step) | ({OUT[3]: 1.5, RATE: 2e-2} if step >= 100 else {})

    assert [a.name for a in run(restarted) if a.detector == "level_shift"] == []


def test_a_longer_sequence_may_have_another_level():
    def lengthened(step, records, record):
        if step >= 100:
            shape = records.table.layouts[0]
            record.layouts[:] = records.table.layout_id(type(shape)((32,), shape.dtype, 32))

    shifted = {OUT[3]: 1.5}
    assert run(lambda step: calm(step) | (shifted if step >= 100 else {}), change=lengthened) == []


@pytest.mark.parametrize("bound", [40, 400])
def test_lengths_that_vary_from_batch_to_batch_hide_no_other_level(bound):
    """As batches that are padded to their longest sample."""
    lengths = np.random.default_rng(0)

    def padded(step, records, record):
        numel, shape = int(lengths.integers(bound // 4, bound)), records.table.layouts[0]
        record.layouts[:] = records.table.layout_id(type(shape)((numel,), shape.dtype, numel))

    def sizes(step):
        return calm(step) | ({OUT[3]: 1.5} if step >= 100 else {})

    assert [(a.name, a.step) for a in run(sizes, change=padded) if a.detector == "level_shift"] == [(OUT[3][0], 100)]


def test_more_micro_steps_may_have_another_level_each():
    """Losses that are divided by the number of micro-steps have smaller gradients."""

    def accumulated(step):
        inputs = {("input.0", "activation_input", n): 1.0 for n in range(4 if step >= 100 else 1)}
        return calm(step) | inputs | ({OUT[3]: 0.5} if step >= 100 else {})

    assert [a.name for a in run(accumulated) if a.detector == "level_shift"] == []


def test_a_resumed_run_knows_the_levels_of_the_run_before():
    records = Records()
    detection = Detection(records.table)
    assert run(calm, 100, detection=detection, records=records) == []
    resumed = Records()
    again = Detection(resumed.table)
    again.load(detection.state())
    found = run(lambda step: calm(step) | {OUT[3]: 1.3}, 10, detection=again, records=resumed, start=100)
    assert [(a.name, a.step) for a in found] == [(OUT[3][0], 100)]


def test_a_loss_that_the_model_returns_has_the_name_of_the_logged_one():
    returned = ("output.1", "activation_output")

    def one_element(_step, records, record):
        layout = records.table.layouts[0]
        at = [records.table.series[i].name for i in record.ids].index("output.1")
        record.layouts[at] = records.table.layout_id(type(layout)((), layout.dtype, 1))

    def sizes(step):
        both = dict.fromkeys([returned, LOSS], 1.6 if step >= 100 else 1.0)
        return dict.fromkeys([*OUT, INSIDE, *GRADIENTS], 1.0) | both

    found = run(sizes, change=one_element)
    assert {a.name for a in found if not a.passed_on} == {"loss"}


def test_the_gradient_at_an_output_is_no_optimizer_state():
    at = ("blocks.3.fc.output.0", "activation_grad_output")
    [found] = run(lambda step: calm(step) | {at: 2.0 if step >= 100 else 1.0})
    assert "of the gradient at blocks.3.fc.output.0 is" in evidence(found)


def test_a_series_that_is_nothing_but_rounding_has_no_level():
    rounding = ("blocks.0.conv.bias", "gradient")
    more = [(f"late.{i}.weight", "gradient") for i in range(24)]

    def sizes(step):
        return calm(step) | {rounding: 1e-6} | (dict.fromkeys(more, 3.0) if step >= 100 else {})

    assert [a.name for a in run(sizes, 200) if a.name == rounding[0]] == []


@pytest.mark.parametrize("every", [1, 10])
def test_levels_are_followed_once_a_warm_up_is_over_however_seldom_the_rate_is_sampled(every):
    """The optimizer's own rate is sampled with the updates, at every tenth step by default."""

    def sizes(step):
        return calm(step) | ({OUT[3]: 1.4} if step >= 80 else {})

    def sampled(step, records, record):
        rate = min(step + 1, 20) * 1e-4 if step % every == 0 else math.nan
        record.values[-1] = records.row(rate, True)

    found = run(sizes, 100, change=sampled)
    assert [(a.name, a.step) for a in found if a.detector == "level_shift"] == [(OUT[3][0], 80)]


def test_a_run_that_goes_back_under_a_falling_rate_has_levels_again():
    records, detection = Records(), None

    def falling(step):
        return calm(step) | {RATE: 1e-3 * 0.99**step}

    detection = Detection(records.table)
    assert run(falling, 300, detection=detection, records=records) == []
    later = run(lambda step: falling(step) | ({OUT[3]: 1.5} if step >= 200 else {}), 130, None, detection, records, 100)
    assert [(a.name, a.step) for a in later if a.detector == "level_shift"] == [(OUT[3][0], 200)]


def test_two_rates_that_differ_are_no_restart():
    base = ("optimizer_learning_rate", "optimizer_learning_rate")
    found = run(lambda step: calm(step) | {base: 2e-3} | ({OUT[3]: 1.4} if step >= 100 else {}))
    assert [(a.name, a.step) for a in found] == [(OUT[3][0], 100)]


def test_what_a_run_did_before_it_went_back_is_in_no_range():
    records = Records()
    detection = Detection(records.table)
    assert run(calm, 100, detection=detection, records=records) == []
    saved = detection.state()
    run(lambda step: calm(step) | {OUT[3]: 1.3}, 2, detection=detection, records=records, start=100)
    detection.load(saved)
    found = run(lambda step: calm(step) | {OUT[3]: 1.3}, 6, detection=detection, records=records, start=100)
    assert [(a.name, a.step) for a in found] == [(OUT[3][0], 100)]
