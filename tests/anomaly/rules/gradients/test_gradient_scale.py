"""All gradients that grow by one factor are told of, but not while a run is so young that its first plateau ends."""

import math

import pytest
from step_records import Records

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.rules.gradients.gradient_scale import WAIT, YOUNG, GradientScaleRule
from trainsentry.collectors.series import Layout

LOSS = ("loss", "loss")
GRADIENTS = [(f"layers.{i}.weight", "gradient") for i in range(8)]


def growing(at, factor=4.0):
    """Return sizes: all gradients swing a little, and grow by one factor at a step; the loss goes on as it did."""
    return lambda s: (
        {LOSS: 2.0 - s / 500}
        | {key: (1.0 + 0.1 * math.sin(3 * s + i)) * (factor if s >= at else 1.0) for i, key in enumerate(GRADIENTS)}
    )


@pytest.mark.parametrize(("at", "told"), [(YOUNG - 20, False), (YOUNG + 20, True)])
def test_one_factor_is_told_of_once_a_run_is_no_longer_young(alone, judged, at, told):
    records = Records()
    found = judged(alone(GradientScaleRule, records.table), records, range(at + WAIT + 3), growing(at))
    assert [f.step for f in found] == ([at] if told else [])
    assert not told or found[0].value == pytest.approx(4.0, rel=0.2)


def test_gradients_that_go_on_growing_after_a_leap_are_those_of_a_plateau_that_ends(alone, judged):
    at, steady = YOUNG + 20, growing(YOUNG + 20, 2.2)

    def sizes(step):
        grown = math.exp(0.15 * max(0, min(step - at, 8)))
        return {key: size * (1.0 if key == LOSS else grown) for key, size in steady(step).items()}

    records = Records()
    assert judged(alone(GradientScaleRule, records.table), records, range(at + WAIT + 9), sizes) == []


@pytest.mark.parametrize(("first", "told"), [(1.9, False), (3.6, True)])
def test_most_of_a_factor_comes_at_once_where_training_does_not_make_it(alone, judged, first, told):
    records, at = Records(), YOUNG + 20
    steady = growing(at)

    def sizes(step):
        return {key: size * (first / 4.0 if step == at and key != LOSS else 1.0) for key, size in steady(step).items()}

    found = judged(alone(GradientScaleRule, records.table), records, range(at + WAIT + 3), sizes)
    assert [f.step for f in found] == ([at] if told else [])


@pytest.mark.parametrize(("grows", "told"), [(1.0, True), (1.1, True), (1.7, False), (4.0, False)])
@pytest.mark.parametrize("later", [0, 2])
def test_a_loss_that_rises_with_the_gradients_is_that_of_training_at_the_edge(alone, judged, grows, told, later):
    """Where it rises by and by, after updates that are too large, that is what a missing division does."""
    records, at = Records(), YOUNG + 20
    steady = growing(at)

    def sizes(step):
        rises = grows if step >= at + later else 1.0
        swings = math.exp(0.05 * math.sin(5 * step))
        return {key: size * (rises * swings if key == LOSS else 1.0) for key, size in steady(step).items()}

    found = judged(alone(GradientScaleRule, records.table), records, range(at + WAIT + 3), sizes)
    assert [f.step for f in found] == ([at] if told or later else [])


@pytest.mark.parametrize("short", [1000, 3])
@pytest.mark.parametrize(("loss", "told"), [(0.25, True), (1.0, False), (0.5, False)])
def test_gradients_that_fall_are_told_of_where_the_loss_falls_by_their_factor(alone, judged, loss, told, short):
    """It is divided by the micro-steps twice, which Adam does not mind."""
    records, at = Records(), YOUNG + 20
    steady = growing(at, 0.25)

    def sizes(step):
        sizes = {key: size * (loss if key == LOSS and step >= at else 1.0) for key, size in steady(step).items()}
        return {
            key: size * (3.0 if step == at + short else 1.0) for key, size in sizes.items()
        }  # has fewer micro-steps

    found = judged(alone(GradientScaleRule, records.table), records, range(at + WAIT + 3), sizes)
    assert [f.step for f in found] == ([at] if told else [])
    if told:
        where = (at, 0, 0, 0, "all", "gradient", "norm", 0.25, 1.0, 50.0, "gradient_scale", "shift")
        assert found[0].value == pytest.approx(0.25, rel=0.2)
        assert "loss and all gradients are 4 times smaller" in GradientScaleRule.sentence(Anomaly(*where), "")


@pytest.mark.parametrize(("lengths", "is_told"), [((32, 9), False), ((32, 36), True), ((32, 32), True)])
def test_a_growth_with_inputs_of_another_size_is_not_told_of(alone, lengths, is_told):
    """Where sequences are sorted by length, each epoch begins with short ones, whose gradients are larger."""
    records, at, found = Records(), YOUNG + 20, []
    judge, sizes = alone(GradientScaleRule, records.table), growing(at)
    for step in range(at + WAIT + 3):
        record = records.step(step, {("input.0", "activation_input"): 5.0, **sizes(step)})
        length = lengths[step >= at]
        record.layouts[0] = records.table.layout_id(Layout((length,), "int64", length))
        found += judge(record)
    assert [f.step for f in found] == ([at] if is_told else [])


RATES = ("learning_rate", "option.0.0.lr")
"""What a loop logs, and what a group of an optimizer tells of in the step in which it changes."""


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(("before", "risen_at", "told"), [(0.05, -1, False), (0.9, -1, True), (0.05, 5, True)])
def test_a_growth_right_after_the_learning_rate_rose_is_not_told_of(alone, judged, rate, before, risen_at, told):
    """A restart of a schedule makes the rate twenty times larger, and the gradients with the next step."""
    records, at = Records(), YOUNG + 20
    sizes = growing(at)

    def with_rate(step):
        now = 1.0 if step >= at + risen_at else before
        is_given = rate != RATES[1] or step in (0, at + risen_at)
        return {(rate, rate): now, **sizes(step)} if is_given else sizes(step)

    found = judged(alone(GradientScaleRule, records.table), records, range(at + WAIT + 3), with_rate)
    assert [f.step for f in found] == ([at] if told else [])


def test_a_rate_that_rises_again_and_again_excuses_what_begins_between(alone, judged):
    records, at = Records(), YOUNG + 164
    sizes, rate = growing(at), (RATES[0], RATES[0])
    cycle = lambda s: {rate: 1.0 if s % 20 < 10 else 0.1, **sizes(s)}  # noqa: E731
    found = judged(alone(GradientScaleRule, records.table), records, range(at + WAIT + 3), cycle)
    assert [f.step for f in found] == [at]


def test_losses_that_were_no_numbers_tell_nothing_and_make_no_warning():
    """NumPy's warnings are raised; the leap is told at the first step whose loss can be compared with another."""
    records, at = Records(), YOUNG + 20
    detection, sizes, told = Detection(records.table), growing(at), []
    for step in range(at + WAIT + 4):
        found = detection.judge(records.step(step, sizes(step) | {LOSS: 2.0 if step >= at else math.nan}))
        told += [a.step for a in found if a.detector == GradientScaleRule.name]
    assert told == [at + 1]


def test_losses_that_were_infinite_are_no_factor(alone, judged):
    records, at = Records(), YOUNG + 20
    steady = growing(at, 0.25)
    sizes = lambda step: steady(step) | ({LOSS: math.inf} if at - 4 <= step < at else {})  # noqa: E731
    assert judged(alone(GradientScaleRule, records.table), records, range(at + WAIT + 3), sizes) == []
