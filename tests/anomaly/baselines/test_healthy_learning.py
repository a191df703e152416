"""What a model does while it learns is no anomaly, and the same thing out of its place is one."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.baselines.thresholds import ZEROS_JUMP
from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.features import features_of
from trainsentry.collectors.series import Layout
from trainsentry.collectors.statistics import MAX, MEAN, MIN, ZEROS

GRADIENTS = [(f"layers.{i}.weight", "gradient") for i in range(10)]
WEIGHTS = [(f"layers.{i}.weight", "parameter") for i in range(10)]
BIAS, LOSS = ("bias", "gradient"), ("loss", "loss")
RNG = np.random.default_rng(0)


def alarms(sizes_of, steps, change=None, swing=0.1):
    """Judge records of the sizes that `sizes_of(step)` gives, times noise; return (step, name) of the alarms."""
    records = Records()
    detection = Detection(records.table)
    found = []
    for step in range(steps):
        sizes = {key: size * float(np.exp(swing * RNG.standard_normal())) for key, size in sizes_of(step).items()}
        record = records.step(step, sizes)
        if change is not None:
            change(step, records, record)
        found += [(a.step, a.name) for a in detection.judge(record) if a.alarm]
    return found


def row_of(records, record, *who):
    names = [(records.table.series[i].name, records.table.series[i].quantity) for i in record.ids]
    return names.index(who)


@pytest.mark.parametrize(("after", "is_found"), [(3e-5, False), (1.0, True)])
def test_a_gradient_that_is_nothing_but_rounding_may_move_until_it_matters(after, is_found):
    found = alarms(lambda step: dict.fromkeys(GRADIENTS, 1.0) | {BIAS: 1e-6 if step < 70 else after}, 90)
    assert {name for _, name in found} == ({"bias"} if is_found else set())


@pytest.mark.parametrize(("after", "is_found"), [(0.8, False), (100.0, True)])
def test_squares_of_a_layer_that_begins_to_learn_may_leap_to_the_size_of_others(after, is_found):
    states = [(f"layers.{i}.weight", "exp_avg_sq") for i in range(10)]
    norm = ("norm.weight", "exp_avg_sq")
    # Averages of squares fall no faster than they decay.
    found = alarms(lambda step: dict.fromkeys(states, 1.0) | {norm: 5e-3 if step < 70 else after}, 90, swing=0.03)
    assert {name for _, name in found} == ({"norm.weight"} if is_found else set())


def test_a_gradient_that_vanishes_into_rounding_is_found():
    found = alarms(lambda step: dict.fromkeys(GRADIENTS, 1.0) | {BIAS: 1.0 if step < 70 else 1e-7}, 90)
    assert found[0] == (70, "bias")


def test_a_weight_that_grows_from_zero_is_silent_until_it_is_as_large_as_others_and_jumps():
    bias = ("bias", "parameter")

    def sizes(step):
        return dict.fromkeys(WEIGHTS, 1.0) | {bias: 1e-3 * 1.03**step if step < 80 else 10.0}

    step, name = alarms(sizes, 90)[0]
    assert name == "bias"
    assert 80 <= step <= 82
    assert alarms(lambda step: sizes(min(step, 79)), 90) == []


@pytest.mark.parametrize("with_loss", [True, False])
def test_a_gradient_that_falls_with_the_loss_is_learning_and_one_that_falls_alone_is_not(with_loss):
    def sizes(step):
        fall = 0.85 ** max(step - 70, 0)
        return dict.fromkeys(GRADIENTS, 1.0) | {BIAS: fall, LOSS: fall if with_loss else 1.0}

    assert bool(alarms(sizes, 100)) != with_loss


@pytest.mark.parametrize(("factor", "is_found"), [(0.2, False), (0.05, True), (5.0, True)])
def test_all_gradients_fall_at_once_where_a_plateau_ends_and_rise_only_when_something_is_wrong(factor, is_found):
    found = alarms(lambda step: dict.fromkeys(GRADIENTS, 1.0 if step < 20 else factor), 40)
    assert bool(found) == is_found


@pytest.mark.parametrize(("usual", "leap", "is_found"), [
    (0.006, 0.1, False), (0.05, 0.2, False), (0.006, 2.0, True), (0.5, 1.4, True), (0.006, 0.0005, False),
    (0.001, 0.08, True),
])  # fmt: skip
def test_a_loss_that_is_known_by_heart_leaps_with_single_samples(usual, leap, is_found):
    """It began at 2.3; what comes near that again is trouble, however small the loss had become."""

    def sizes(step):
        learned = max(2.3 * 0.9**step, usual)
        return dict.fromkeys(GRADIENTS, 1.0) | {LOSS: leap if step in {110, 111} else learned}

    assert bool(alarms(sizes, 116)) == is_found


def test_a_run_that_goes_on_remembers_the_loss_at_its_start():
    def judged(detection, records, steps, loss):
        sizes = [records.step(step, dict.fromkeys(GRADIENTS, 1.0) | {LOSS: loss(step)}) for step in steps]
        return [a.name for record in sizes for a in detection.judge(record) if a.alarm]

    records, again = Records(), Records()
    first, second = Detection(records.table), Detection(again.table)
    judged(first, records, range(100), lambda step: max(2.3 * 0.9**step, 0.01 + 0.001 * (step % 3)))
    second.load(first.state())
    assert judged(second, again, range(100, 140), lambda step: 0.12 if step == 130 else 0.01 + 0.001 * (step % 3)) == []


def test_a_model_that_has_just_begun_moves_and_one_that_has_settled_does_not():
    def sizes(step, start):
        return dict.fromkeys(WEIGHTS, 1.0) | {WEIGHTS[0]: 1.1 ** min(max(step - start, 0), 24)}

    assert alarms(lambda step: sizes(step, 30), 70) == []
    assert alarms(lambda step: sizes(step, 300), 340)


@pytest.mark.parametrize(("fall", "is_found"), [(0.98, False), (1.0, True)])
def test_what_grows_while_the_loss_falls_begins_to_learn_and_what_grows_alone_does_not(fall, is_found):
    """The outputs of a vision transformer grew elevenfold over 35 steps while its loss fell by less than a half."""
    outputs = [(f"layers.{i}.output.0", "activation_output") for i in range(10)]

    def sizes(step):
        since = min(max(step - 45, 0), 36)
        return dict.fromkeys(outputs, 1.0) | {outputs[9]: 1.09**since, LOSS: 1.4 * fall**since}

    assert bool(alarms(sizes, 84, swing=0.02)) == is_found


@pytest.mark.parametrize(("fall", "is_found"), [(0.998, False), (1.0, True)])
def test_a_loss_that_leaves_its_plateau_falls_little_at_first(fall, is_found):
    """The cells of a recurrent net grew sevenfold while its loss fell by a twentieth, far beyond its swings."""
    cells = [(f"layers.{i}.output.1", "activation_output") for i in range(10)]
    draw = np.random.default_rng(1)

    def since(step):
        return min(max(step - 45, 0), 36)

    def lower(step, records, record):
        loss = 4.16 * fall ** since(step) * (1 + 0.002 * draw.standard_normal())
        record.values[-1] = records.row(loss, True)

    grow = lambda step: dict.fromkeys(cells, 1.0) | {cells[9]: 1.08 ** since(step), LOSS: 1.0}  # noqa: E731
    assert bool(alarms(grow, 84, lower, swing=0.02)) == is_found


def test_a_loss_that_crosses_zero_tells_of_no_learning():
    """As that of a policy gradient: its size is a thousandth whenever it is near zero."""
    outputs = [(f"layers.{i}.output.0", "activation_output") for i in range(10)]
    draw = np.random.default_rng(1)

    def crosses(step, records, record):
        loss = draw.choice([-1, 1]) * (1.0 if step < 45 or step % 6 == 0 else 1e-3)
        record.values[-1] = records.row(loss, True)

    grow = lambda step: dict.fromkeys(outputs, 1.0) | {outputs[9]: 1.09 ** min(max(step - 45, 0), 36), LOSS: 1.0}  # noqa: E731
    assert alarms(grow, 84, crosses, swing=0.02)


@pytest.mark.parametrize(("rate", "every", "at", "is_found"), [
    (0.1, 1, 700, False), (0.1, 10, 700, False), (0.1, 10, 703, False), (0.8, 1, 700, True), (0.8, 10, 700, True),
])  # fmt: skip
def test_a_smaller_learning_rate_may_lose_updates_in_rounding(rate, every, at, is_found):
    """Those of a bias ahead of a normalisation, of which three in four were lost before, are all lost."""
    found = lowered(rate, every, at, lost=True)
    assert bool(found) == is_found


def test_updates_that_rounding_took_at_a_low_rate_are_whole_as_a_schedule_restarts():
    updates, taken = [(f"layers.{i}.weight", "update") for i in range(10)], ("learning_rate", "learning_rate")

    def rate(step):
        return 1e-3 + (1 + np.cos(np.pi * (step % 100) / 100)) / 2

    def change(step, records, record):
        record.values[-1] = records.row(rate(step), True)
        record.values[0, ZEROS] = 0.48 * (step % 100 / 100)

    assert alarms(lambda step: dict.fromkeys(updates, rate(step)) | {taken: 1.0}, 900, change) == []


@pytest.mark.parametrize("every", [1, 10])
def test_an_update_that_is_far_too_large_since_the_rate_fell_is_told(every):
    assert {name for _, name in lowered(0.1, every, 700, factor=300.0)} == {"layers.0.weight"}


def lowered(rate, every, at, *, lost=False, factor=1.0):
    """Return the alarms of a run whose rate falls; from then on one update is lost, or larger by a factor."""
    updates, taken = [(f"layers.{i}.weight", "update") for i in range(10)], ("learning_rate", "learning_rate")

    def sizes(step):
        now = 1.0 if step < at else rate
        sampled = dict.fromkeys(updates, now) if step % every == 0 else {}
        if sampled and step >= at:
            sampled[updates[0]] *= factor
        return sampled | {taken: now}

    def change(step, records, record):
        record.values[-1] = records.row(1.0 if step < at else rate, True)
        if step % every == 0:
            record.values[0, ZEROS] = 0.75 if step < at or not lost else 1.0

    return alarms(sizes, at + 6 * every, change)


def test_the_losses_of_many_micro_steps_tell_no_more_of_learning_than_one():
    outputs = [(f"layers.{i}.output.0", "activation_output") for i in range(10)]
    losses = [("loss", "loss", i) for i in range(32)]
    draw = np.random.default_rng(3)

    def sizes(step):
        return dict.fromkeys([*outputs, *losses], 1.0) | {outputs[9]: 1.09 ** min(max(step - 45, 0), 36)}

    def swing(step, records, record):
        for i in range(len(losses)):
            record.values[-1 - i] = records.row(float(np.exp(0.1 * draw.standard_normal())), True)

    assert alarms(sizes, 84, swing, swing=0.02)


def test_an_update_that_fades_is_no_fault_and_one_that_grows_is():
    """Under Adam the update of an expert's bias falls to a twentieth as few tokens come to it."""
    updates = [(f"layers.{i}.weight", "update") for i in range(10)]

    def sizes(step, factor):
        return dict.fromkeys(updates, 1.0) | {updates[0]: factor ** min(max(step - 300, 0), 12)}

    assert alarms(lambda step: sizes(step, 1 / 1.3), 360) == []
    assert alarms(lambda step: sizes(step, 1.3), 360)


def test_the_update_follows_the_rate_that_the_optimizer_took_not_the_one_logged_a_step_late():
    updates = [(f"layers.{i}.weight", "update") for i in range(10)]
    logged, taken = ("learning_rate", "learning_rate"), ("optimizer_learning_rate", "optimizer_learning_rate")

    def sizes(step, *, told):
        rate, late = (0.05 if s % 60 else 1.0 for s in (step, step - 1))
        return dict.fromkeys(updates, rate) | {logged: late} | ({taken: rate} if told else {})

    assert alarms(lambda step: sizes(step, told=True), 130) == []
    assert alarms(lambda step: sizes(step, told=False), 130)


@pytest.mark.parametrize(("quantity", "factor", "is_found"), [("exp_avg_sq", 24, False), ("exp_avg_sq", 1e4, True),
                                                              ("exp_avg", 24, True)])  # fmt: skip
def test_one_large_gradient_raises_an_average_of_squares_that_is_young(quantity, factor, is_found):
    averages = [(f"layers.{i}.weight", quantity) for i in range(10)]
    records = Records()
    detection = Detection(records.table)
    found = []
    for step in range(40):
        sizes = {key: 1.0 + 0.01 * float(RNG.standard_normal()) for key in averages}
        sizes[averages[0]] *= factor if step >= 35 else 1
        found += [(a.step, a.name) for a in detection.judge(records.step(step, sizes)) if a.alarm]
    assert bool(found) == is_found


@pytest.mark.parametrize(("before", "zeros", "is_found"), [(0, 1 / 16, False), (0, 1.0, True), (0.5, 1.0, True)])
def test_a_silent_unit_is_no_dead_layer(before, zeros, is_found):
    outputs = [(f"layers.{i}.output.0", "activation_output") for i in range(10)]

    def change(step, records, record):
        record.values[row_of(records, record, *outputs[0]), ZEROS] = before if step < 70 else zeros

    assert bool(alarms(lambda _: dict.fromkeys(outputs, 1.0), 90, change)) == is_found


@pytest.mark.parametrize(("quantity", "at", "is_found"), [
    ("gradient", 70, False), ("parameter", 70, True), ("parameter", 20, False), ("activation_input", 20, True),
])  # fmt: skip
def test_the_sign_of_a_gradient_turns_and_that_of_a_weight_does_not_once_it_has_begun_to_learn(quantity, at, is_found):
    name = "input.{}" if quantity == "activation_input" else "layers.{}.weight"  # data never learn
    series = [(name.format(i), quantity) for i in range(10)]

    def change(step, records, record):
        record.values[row_of(records, record, *series[0]), MEAN] = (1 if step < at else -1) / 5

    assert bool(alarms(lambda _: dict.fromkeys(series, 1.0), at + 10, change)) == is_found


def test_a_large_layer_that_was_nearly_silent_and_dies_is_found():
    features = [
        features_of(np.array([[0.0, 0, 0, 0, 0, 0, zeros, 0]]).T, np.array([4096.0]), np.array([False]), np.ones(1))
        for zeros in (0.9, 0.99, 1.0)
    ]
    nearly, more, dead = (float(f[3, 0]) for f in features)
    assert more - nearly < ZEROS_JUMP < dead - nearly


@pytest.mark.parametrize("factor", [0.05, 20.0])
def test_a_matrix_that_is_small_beside_the_gains_of_norms_is_followed(factor):
    norms = [(f"layers.{i}.norm.weight", "parameter") for i in range(12)]

    def sizes(step):
        matrices = dict.fromkeys(WEIGHTS, 0.02)
        if step >= 70:
            matrices[WEIGHTS[0]] *= factor
        return dict.fromkeys(norms, 1.0) | matrices

    assert {name for _, name in alarms(sizes, 90)} == {WEIGHTS[0][0]}


@pytest.mark.parametrize(("at", "is_found"), [(None, False), (150, True)])
def test_a_weight_that_stood_still_at_first_and_grows_slowly_is_no_drift_and_its_jump_is_found(at, is_found):
    """The largest element of an embedding belongs to a token that is rare: only others grow, and pass it one day."""
    table = ("embedding.weight", "parameter")

    def sizes(step):
        grown = float(np.exp(0.007 * max(step - 30, 0)))
        return dict.fromkeys(WEIGHTS, 1.0) | {table: grown * (10.0 if at is not None and step >= at else 1.0)}

    found = alarms(sizes, 200, swing=0.0)
    assert [name for _, name in found[:1]] == ["embedding.weight"] * is_found
    assert all(150 <= step <= 152 for step, _ in found[:1])


def glides(step):
    return 3.1 - 0.3 * max(step - 80, 0)


def swings(step):
    """Return an offset that is far from the one before, where samples are ten steps apart."""
    return 1.5 + 1.2 * np.sin(0.6 * step) if step < 100 else 1.5 - 1.1 * (step - 100)


def turns(step):
    return 3.0 if step < 100 else -3.0


@pytest.mark.parametrize(("offset_at", "told"), [(glides, []), (swings, []), (turns, [100])])
def test_the_offset_of_a_critic_glides_through_zero_and_a_sign_that_turns_is_found(offset_at, told):
    """Its scores are all above zero at first, and all below in the end; what tells samples apart stays as it is."""
    records = Records()
    records.layout = records.table.layout_id(Layout((64,), "float32", 64))
    detection, found = Detection(records.table), []
    for step in range(140):
        offset, swing = offset_at(step), 0.15 * (1 + 0.05 * RNG.standard_normal())
        record = records.step(step, {("critic.output.0", "activation_output"): 8 * (offset**2 + swing**2) ** 0.5})
        record.values[0, [MIN, MAX, MEAN]] = offset - 2 * swing, offset + 2 * swing, offset
        found += [a for a in detection.judge(record) if a.alarm and a.statistic == "mean" and a.detector == "spike"]
    assert [a.step for a in found[:1]] == told
