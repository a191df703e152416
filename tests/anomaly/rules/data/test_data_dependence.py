"""Where a batch tells of the next one, three samples are hardly more than one, and a loss tells of its batch."""

import json

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.rules.data.data_dependence import FEWEST, LEFT_OUT, SAMPLES, correlation_with_next

DATA, LOSS = ("input.0", "activation_input"), ("loss", "loss")
OF_DATA = ("input.0", "activation_grad_input")
OUT = [(f"blocks.{i}.fc.output.0", "activation_output") for i in range(8)]
AT = 120


def run(block, change, steps=AT + 8, seed=0, resumed="", gets_gradient=()):
    """Return the alarms from `AT` on; the data are of one size for `block` steps each, and all swing with them."""
    records, random, found = Records(), np.random.default_rng(seed), []
    detection, size = Detection(records.table), 1.0
    for step in range(steps):
        if step % block == 0:
            size = float(np.exp(0.1 * random.standard_normal()))
        noise = lambda: size * float(np.exp(0.01 * random.standard_normal()))  # noqa: E731
        sizes = {key: noise() for key in (DATA, *OUT, LOSS)} | ({OF_DATA: 1.0} if step in gets_gradient else {})
        if step == AT and resumed:
            state = json.loads(json.dumps(detection.state()))
            detection = detection if resumed == "here" else Detection(records.table)
            detection.load(state)
        if step >= AT:
            sizes = {key: value * change.get(key, 1.0) for key, value in sizes.items()}
        found += [a for a in detection.judge(records.step(step, sizes)) if a.alarm and step >= AT]
    return {a.name for a in found}


@pytest.mark.parametrize(("block", "told"), [(1, True), (4, False)])
@pytest.mark.parametrize("change", [{OUT[3]: 2.7}, {LOSS: 4.0}])
@pytest.mark.parametrize("resumed", ["", "here", "anew"])
def test_a_rollout_unlike_the_others_is_no_other_level_of_a_module_nor_of_the_loss(block, told, change, resumed):
    [(name, _)] = change
    assert (name in run(block, change, resumed=resumed)) == told


@pytest.mark.parametrize("resumed", ["", "here", "anew"])
@pytest.mark.parametrize(("gets_gradient", "told"), [((0, 100), True), ((100,), True), ((), False)])
def test_what_a_stage_of_a_pipeline_is_given_is_no_data(gets_gradient, told, resumed):
    """It is what the stage before has learned to give, and moves from step to step."""
    assert ("loss" in run(4, {LOSS: 4.0}, gets_gradient=gets_gradient, resumed=resumed)) == told


def test_a_level_that_is_far_away_is_told_all_the_same():
    assert OUT[3][0] in run(4, {OUT[3]: 100.0})


@pytest.mark.parametrize(("blocks", "told"), [((4, 1), False), ((1, 1), True)])
@pytest.mark.parametrize("rate", [0.5, 0.94])
def test_what_a_settled_policy_observes_may_change_again(blocks, told, rate):
    """Its observations were alike for sixty steps; then they leap, or leave their range step by step."""
    records, random, found = Records(), np.random.default_rng(0), []
    detection, size = Detection(records.table), 1.0
    for step in range(AT + 40):
        if step % blocks[step >= AT - 60] == 0:
            size = float(np.exp(0.05 * random.standard_normal()))
        changed = 1.0 if step < AT else 0.5 if rate == 0.5 else max(rate ** (step - AT), 0.2)
        found += [a for a in detection.judge(records.step(step, {DATA: size * changed})) if a.alarm]
    assert bool(found) == told


@pytest.mark.parametrize(("block", "told"), [(1, True), (4, False)])
def test_a_gradient_of_a_critic_may_fall_with_its_rollout_though_clipping_held_it(block, told):
    gradients = [(f"blocks.{i}.fc.weight", "gradient") for i in range(8)]
    records, random, found = Records(), np.random.default_rng(0), []
    detection, size = Detection(records.table), 1.0
    for step in range(AT + 8):
        if step % block == 0:
            size = float(np.exp(0.1 * random.standard_normal()))
        noise = lambda: float(np.exp(0.05 * random.standard_normal()))  # noqa: E731
        sizes = {DATA: size} | {key: noise() for key in gradients}
        sizes[gradients[3]] *= 0.2 if step >= AT else 1.0
        found += [a for a in detection.judge(records.step(step, sizes)) if a.alarm and step >= AT]
    assert bool(found) == told


def test_shuffled_data_and_one_batch_again_and_again_are_not_dependent():
    random = np.random.default_rng(0)
    shuffled = [correlation_with_next(random.standard_normal(SAMPLES)) for _ in range(300)]
    few = [correlation_with_next(random.standard_normal(FEWEST)) for _ in range(300)]
    assert np.mean(np.array(shuffled) >= 0.4) <= 0.01
    assert np.mean(np.array(few) >= 0.4) <= 0.05
    assert correlation_with_next(np.full(FEWEST + LEFT_OUT, 3.0)) == 0.0
