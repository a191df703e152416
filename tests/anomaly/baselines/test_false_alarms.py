"""The knob means what it says; noise is learned, and what is known to change is no alarm."""

import sys
from pathlib import Path

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.baselines.calibration import Calibration
from trainsentry.anomaly.baselines.false_alarms import Allowed
from trainsentry.anomaly.baselines.score_tail import ScoreTail
from trainsentry.anomaly.detection import Detection

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from synthetic_records import Stream


def alarms(stream, detection, steps):
    found = []
    for _ in range(steps):
        record = stream.record(stream.sizes())
        if any(a.alarm for a in detection.judge(record)):
            found.append(record.step)
    return found


def test_correlated_noise_with_heavy_tails_gives_few_alarms():
    stream = Stream(200, seed=3)
    found = alarms(stream, Detection(stream.table, Allowed(per_step=1e-3)), 1500)
    apart = [s for i, s in enumerate(found) if i == 0 or s - found[i - 1] > 20]
    assert len(apart) <= 4


def test_a_smaller_rate_gives_fewer_alarms():
    counts = []
    for rate in (2e-2, 1e-5):
        stream = Stream(100, seed=5)
        counts.append(len(alarms(stream, Detection(stream.table, Allowed(per_step=rate)), 800)))
    assert counts[0] > counts[1]


def test_a_rate_by_the_day_counts_steps_of_their_length():
    assert Allowed(None, 0.1).in_a_step(60.0) == pytest.approx(0.1 / 1440)


def test_the_tail_is_the_noises_own():
    random = np.random.default_rng(0)
    tail = ScoreTail()
    for _ in range(200):
        tail.learn(np.abs(random.standard_t(4, 1000)))
    fresh = np.abs(random.standard_t(4, 1_000_000))
    for x in (4.0, 8.0, 16.0):
        assert float(tail.survival(np.array([x]))[0]) == pytest.approx(float((fresh > x).mean()), rel=0.4)


def test_a_step_is_as_improbable_as_its_own_history_says():
    random = np.random.default_rng(0)
    calibration = Calibration()
    for _ in range(4000):
        calibration.learn(float(random.exponential(0.9)))
    for x in (3.0, 5.0):
        assert calibration.p_value(x) == pytest.approx(np.exp(-x / 0.9), rel=0.5)


def test_what_the_loop_declares_shifts_the_baseline():
    for declared in (True, False):
        records = Records()
        detection = Detection(records.table)
        random = np.random.default_rng(1)
        series = [(f"p{i}.weight", "gradient") for i in range(40)]
        found = []
        for step in range(80):
            level = 1.0 if step < 60 else 0.05
            sizes = {key: level * float(np.exp(0.1 * random.standard_normal())) for key in series}
            size = {("batch_size", "batch_size"): 16.0 if step < 60 else 6400.0} if declared else {}
            found += [a for a in detection.judge(records.step(step, {**sizes, **size})) if a.alarm]
        assert bool(found) is not declared


def test_an_update_follows_the_learning_rate():
    records = Records()
    detection = Detection(records.table)
    random = np.random.default_rng(1)
    series = [(f"p{i}.weight", "update") for i in range(40)]
    for step in range(90):
        rate = 1e-3 if step < 60 else 1e-5
        sizes = {key: rate * float(np.exp(0.1 * random.standard_normal())) for key in series}
        assert detection.judge(records.step(step, {("learning_rate", "learning_rate"): rate, **sizes})) == []


def test_what_all_do_at_once_is_one_anomaly():
    records = Records()
    detection = Detection(records.table)
    random = np.random.default_rng(1)
    found = []
    for step in range(70):
        level = 1.0 if step < 60 else 6.0
        sizes = {(f"p{i}.weight", "gradient"): level * float(np.exp(0.1 * random.standard_normal())) for i in range(40)}
        found += detection.judge(records.step(step, sizes))
    assert {(a.name, a.quantity, a.kind) for a in found} == {("all", "gradient", "shift")}
    assert min(a.step for a in found) == 60


def test_a_slow_change_of_one_series_is_found():
    records = Records()
    detection = Detection(records.table)
    random = np.random.default_rng(1)
    for step in range(110):
        sizes = {(f"p{i}.weight", "gradient"): float(np.exp(0.1 * random.standard_normal())) for i in range(40)}
        if step >= 80:
            sizes["p7.weight", "gradient"] *= 1.25 ** (step - 80)
        found = [a for a in detection.judge(records.step(step, sizes)) if a.alarm]
        if found:
            break
    assert 80 < step < 105
    assert {(a.name, a.kind) for a in found} <= {("p7.weight", "drift"), ("p7.weight", "shift"), ("p7.weight", "spike")}


def test_after_a_restart_detectors_go_on_without_a_warm_up_and_what_was_lost_shows():
    import json

    series = [(f"p{i}.weight", q) for i in range(10) for q in ("gradient", "exp_avg_sq")]
    rate = ("learning_rate", "learning_rate")
    random = np.random.default_rng(2)

    def sizes(level=1.0, lr=1e-3):
        return {rate: lr} | {key: level * float(np.exp(0.05 * random.standard_normal())) for key in series}

    records = Records()
    detection = Detection(records.table)
    for step in range(60):
        assert detection.judge(records.step(step, sizes())) == []
    state = json.loads(json.dumps(detection.state()))
    for change, kinds in (({}, set()), ({"level": 1e-3}, {"state_reset"}), ({"lr": 1e-1}, {"update_size"})):
        later = Records()
        restored = Detection(later.table)
        restored.load(state)
        found = restored.judge(later.step(60, sizes(**change)))
        assert {a.kind for a in found if a.alarm and a.detector in {"state_reset", "learning_rate"}} == kinds
        assert bool(found) is bool(kinds)
