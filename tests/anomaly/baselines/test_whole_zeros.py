"""A gradient that is zero for a moment rests; one that stays zero, or a loss that is cut, is told."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.baselines.whole_zeros import REST, USUAL_REST
from trainsentry.anomaly.detection import Detection
from trainsentry.collectors.series import Layout
from trainsentry.collectors.statistics import MAX, MEAN, MIN, NORM, ZEROS

GRADIENTS = [(f"blocks.{i}.fc.weight", "gradient") for i in range(9)]
BOX = GRADIENTS[4]


def told(is_zero, steps=200, which=(BOX,), series=GRADIENTS, loss=None):
    """Return the steps and names of the alarms where some series are zero at some steps, and the loss may be logged."""
    records, random, found = Records(), np.random.default_rng(0), []
    records.layout = records.table.layout_id(Layout((64, 64), "float32", 4096))
    detection = Detection(records.table)
    for step in range(steps):
        logged = {} if loss is None else {("loss", "loss"): loss(step)}
        sizes = {key: float(np.exp(0.3 * random.standard_normal())) for key in series}
        record = records.step(step, {**sizes, **logged})
        for row, key in enumerate(series):
            if key in which and is_zero(step):
                record.values[row, [MIN, MAX, MEAN, NORM]], record.values[row, ZEROS] = 0.0, 1.0
        found += [(a.step, a.name) for a in detection.judge(record) if a.alarm]
    return found


@pytest.mark.parametrize(
    "steps", [{60}, {17}, {60, 90, 91, 140, 141, 142, 143, 170}], ids=["once", "early", "now and then"]
)
def test_a_head_without_examples_in_a_batch_is_quiet(steps):
    assert told(lambda step: step in steps) == []


@pytest.mark.parametrize(("before", "delay"), [(set(), REST), ({60}, USUAL_REST)])
def test_a_gradient_that_stays_zero_is_told_and_sooner_where_none_ever_rested(before, delay):
    assert told(lambda step: step in before or step >= 100, steps=100 + delay) == []
    found = told(lambda step: step in before or step >= 100)
    assert found[0] in {(100 + delay + 1, BOX[0]), (100, BOX[0])}, "by its size, or exactly, from its first step on"


@pytest.mark.parametrize("quantity", ["activation_grad_input", "activation_grad_output"])
def test_gradients_at_the_activations_of_such_a_head_rest_with_it(quantity):
    series = [(f"blocks.{i}.fc.input.0", quantity) for i in range(9)]
    assert told(lambda step: step in {60, 90, 91, 140}, which=series[4:5], series=series) == []


def test_gradients_that_are_all_zero_at_once_do_not_rest():
    assert told(lambda step: step >= 100, which=GRADIENTS)[0][0] == 101


@pytest.mark.parametrize("has_loss", [True, False])
def test_all_gradients_may_be_zero_where_the_loss_is(has_loss):
    """As that of triplets, all of which keep their margin."""
    steps = {60, 64, 90, 91, 140}
    alarms = told(lambda s: s in steps, which=GRADIENTS, loss=lambda s: 1.0 if s not in steps or has_loss else 0.0)
    assert {step for step, name in alarms if name != "loss"} >= {60} if has_loss else alarms == []


@pytest.mark.parametrize(("before", "is_told"), [(set(), True), ({60, 70}, False)])
def test_gradients_that_stay_zero_with_the_loss_are_told_unless_they_were_so_before_and_came_back(before, is_told):
    odd = lambda step: step in before or step >= 100  # noqa: E731
    alarms = told(odd, which=GRADIENTS, loss=lambda step: 0.0 if odd(step) else 1.0)
    assert any(name != "loss" for _, name in alarms) == is_told


CONDITIONS = [("input.0", "activation_input"), ("input.1", "activation_input")]


@pytest.mark.parametrize("odd", [lambda step: (7 * step) % 13 < 6, lambda step: step % 25 == 0, lambda s: s % 70 == 0])
def test_an_input_that_is_left_out_from_the_beginning_is_quiet_and_so_is_what_follows(odd):
    """Conditions that diffusion leaves out by chance, hidden states that begin anew."""
    follows = [*CONDITIONS, ("fc.output.0", "activation_output")]
    assert told(odd, which=[CONDITIONS[1], follows[2]], series=follows) == []


@pytest.mark.parametrize("seed", range(2))
def test_an_input_that_is_left_out_of_every_other_batch_is_quiet_until_that_is_no_chance(seed):
    """What a diffusion model is told of its own guess."""
    draw = np.random.default_rng(seed).random(400) < 0.5
    draw[300:312] = True  # as comes once in some thousand
    assert told(lambda step: draw[step], which=[CONDITIONS[1]], series=CONDITIONS, steps=400) == []
    stays = told(lambda step: draw[step] or step >= 200, which=[CONDITIONS[1]], series=CONDITIONS, steps=240)
    assert [name for _, name in stays[:1]] == ["input.1"]


@pytest.mark.parametrize("odd", [lambda step: step % 25 == 0 or step > 100, lambda step: step > 20])
def test_an_input_that_stays_zero_is_told_though_it_rested_before(odd):
    assert (told(odd, which=[CONDITIONS[1]], series=CONDITIONS) != []) == odd(25)


def test_an_input_that_is_always_zero_hides_nothing_of_the_activations():
    """Types of tokens, a mask that hides nothing."""
    outputs = [(f"fc{i}.output.0", "activation_output") for i in range(6)]
    series = [*CONDITIONS, *outputs]

    records, random, found = Records(), np.random.default_rng(0), []
    records.layout = records.table.layout_id(Layout((64, 64), "float32", 4096))
    detection = Detection(records.table)
    for step in range(120):
        sizes = {key: float(np.exp(0.1 * random.standard_normal())) for key in series}
        sizes[outputs[3]] *= 100.0 if step == 110 else 1.0
        record = records.step(step, sizes)
        record.values[1, [MIN, MAX, MEAN, NORM]], record.values[1, ZEROS] = 0.0, 1.0
        found += [(a.step, a.name) for a in detection.judge(record) if a.alarm]
    assert (110, outputs[3][0]) in found


def test_an_input_that_is_zero_for_the_first_time_in_an_older_run_is_told():
    assert told(lambda step: step == 100, which=[CONDITIONS[1]], series=CONDITIONS) == [(100, "input.1")]


def test_weights_that_were_zero_until_they_are_trained_begin_anew():
    """Biases of a backbone that is frozen at first."""
    weights = [(f"blocks.{i}.fc.bias", "parameter") for i in range(9)]
    records, random, found = Records(), np.random.default_rng(0), []
    records.layout = records.table.layout_id(Layout((64, 64), "float32", 4096))
    detection = Detection(records.table)
    for step in range(0, 600, 10):
        record = records.step(step, {key: float(np.exp(0.01 * random.standard_normal())) for key in weights})
        if step < 300:
            record.values[4, [MIN, MAX, MEAN, NORM]], record.values[4, ZEROS] = 0.0, 1.0
        found += detection.judge(record)
    assert found == []
