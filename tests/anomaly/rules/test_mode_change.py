"""A module that is switched to evaluation while it trains is named."""

import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.incidents.sentence import evidence
from trainsentry.collectors.statistics import VALUE


@pytest.mark.parametrize(("value", "mode"), [(0.0, "evaluation"), (1.0, "training")])
def test_a_module_that_is_switched_is_named(value, mode):
    records = Records()
    name = "training_mode.blocks.0"
    detection = Detection(records.table)
    detection.judge(records.step(5, {}))
    record = records.step(25, {(name, name): 0.0})
    record.values[:, VALUE] = value
    [found] = detection.judge(record)
    assert (found.kind, found.quantity, found.alarm) == ("mode_change", "training", True)
    assert f"was switched to {mode} mode by step 25" in evidence(found)


def test_a_module_that_is_switched_to_and_fro_follows_a_schedule_and_the_beginning_is_not_judged():
    records = Records()
    detection, name = Detection(records.table), "training_mode.norm"

    def switched(step, mode):
        record = records.step(step, {(name, name): 0.0})
        record.values[:, VALUE] = mode
        return [found.alarm for found in detection.judge(record)]

    detection.judge(records.step(0, {}))
    assert [switched(step, step % 2) for step in range(1, 60)] == [[]] * 59
    detection = Detection(records.table)
    detection.judge(records.step(0, {}))
    assert [switched(step, step % 2) for step in range(30, 35)] == [[True], [False], [], [], []]


@pytest.mark.parametrize(
    ("switched", "mode", "is_alarm"),
    [
        (("bn1", "bn2"), 0.0, False),
        (("bn1",), 0.0, True),
        (("bn1", "bn2", "drop"), 0.0, True),
        (("bn1", "bn2"), 1.0, True),
    ],
)
def test_just_the_normalisations_are_frozen_on_purpose_and_not_trained_again(switched, mode, is_alarm):
    records = Records()
    detection = Detection(records.table)
    for step in range(20):
        detection.judge(records.step(step, {(f"bn{i}.running_mean", "buffer"): 1.0 + 0.1 * (step % 7) for i in (1, 2)}))
    names = [f"training_mode.{name}" for name in switched]
    record = records.step(25, {(name, name): mode for name in names})
    found = detection.judge(record)
    assert [(anomaly.name, anomaly.alarm) for anomaly in found] == [(name, is_alarm) for name in switched]
