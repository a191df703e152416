"""What every registered rule keeps to, and that a rule can be registered from outside."""

import json
import re
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.incidents.incident_log import IncidentLog
from trainsentry.anomaly.incidents.sentence import evidence
from trainsentry.anomaly.rules.registry import detector, detectors, register, rules, unregister
from trainsentry.anomaly.rules.rule import EVERY_TENSOR, OPTIMIZER_STATE, Rule
from trainsentry.anomaly.rules.scalars.declared_changes import DECLARED
from trainsentry.collectors.series import (
    BUFFER_WRITES,
    EULER_GAP,
    GRADIENT_WRITES,
    LEARNING_RATE,
    LOST_STATE,
    OPERATIONS,
    OPTIMIZER_RATE,
    OPTION,
    OUTSIDE_WRITES,
    RECOMPUTED,
    RECOMPUTED_GRADIENT,
    REPEATED_RANDOM,
    REPEATED_SAMPLES,
    SETTING,
    STALE_UPDATE,
    STOPPED_WRITES,
    TENSOR_QUANTITIES,
    TRAINING_MODE,
    UNKNOWN_REGION,
    UNWRITTEN,
    UPDATED_PARAMETERS,
    WRITTEN_LARGEST,
    WRITTEN_NORM,
    Layout,
)
from trainsentry.collectors.statistics import NORM, STATISTICS

SWITCHES = {
    BUFFER_WRITES,
    GRADIENT_WRITES,
    LOST_STATE,
    OPERATIONS,
    OPTION,
    RECOMPUTED,
    RECOMPUTED_GRADIENT,
    REPEATED_RANDOM,
    REPEATED_SAMPLES,
    SETTING,
    STALE_UPDATE,
    STOPPED_WRITES,
    TRAINING_MODE,
    UNWRITTEN,
    OUTSIDE_WRITES,
    EULER_GAP,
    WRITTEN_LARGEST,
    WRITTEN_NORM,
}
SCALARS = {LEARNING_RATE, OPTIMIZER_RATE, UPDATED_PARAMETERS, "loss", "grad_norm", *SWITCHES}
SERIES = [
    ("fc.weight", "update"),
    ("fc.weight", "gradient"),
    ("learning_rate", "learning_rate"),
    ("updated_parameters", "updated_parameters"),
    ("fc.weight", "exp_avg_sq"),
    ("fc.weight", "step"),
    ("fc.weight", "parameter"),
    ("layers.0.output.0", "activation_output"),
    ("input.0", "activation_input"),
    ("loss", "loss"),
]
WITHOUT_A_NUMBER = {
    *(
        "frozen",
        "missing_state",
        "equal_weights",
        "mode_change",
        "dtype_change",
        "checkpoint",
        "gradient_writes",
        "batch_rows",
        "missing_input",
        "lost_gradient",
        "new_gradient",
        "zero_gradient",
        "stopped_writes",
        "resting_copies",
        "operations",
    ),
}
"""Rules on an absence, a switch or a difference, whose sentences give neither number."""

WITHOUT_A_SERIES = {"loss_scale_collapse"}

every_rule = pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.name)
every_detector = pytest.mark.parametrize("rule", detectors(), ids=lambda rule: rule.name)


def test_names_and_keys_of_states_are_unique():
    names = [d.name for d in detectors()]
    keys = [rule.state_key for rule in rules() if rule.state_key is not None]
    assert len(set(names)) == len(names)
    assert len(set(keys)) == len(keys)
    assert [detector(name) for name in names] == list(detectors())


@every_detector
def test_a_rule_has_a_row_in_the_documentation(rule):
    page = Path(__file__).parents[3] / "docs" / "detection.md"
    assert re.search(rf"^\|.*`{rule.name}`.*\|$", page.read_text(), re.MULTILINE)


@every_rule
def test_a_rule_says_what_it_reads(rule):
    assert rule.quantities <= TENSOR_QUANTITIES | SCALARS | DECLARED | {EVERY_TENSOR, OPTIMIZER_STATE}
    assert rule.statistics <= set(STATISTICS)


@every_detector
@pytest.mark.parametrize("value", [77.0, 1.0])
def test_a_sentence_names_subject_step_and_number(rule, value):
    statistic = {"replicas": "bits", "hang": "sequence"}.get(rule.name, "norm")
    anomaly = Anomaly(4321, 0, 5, 0, "fc.weight", "gradient", statistic, value, 33.0, 9.0, rule.name, "shift")
    said = evidence(anomaly)
    assert "step 4321" in said
    assert any(name in said for name in ("fc.weight", "rank 5", "gradients")) or rule.name in WITHOUT_A_SERIES
    assert re.search(rf"\b({value:.0f}|33)\b", said) or rule.name in WITHOUT_A_NUMBER
    assert "nan" not in said.lower() or rule.name == "nonfinite"


@every_detector
def test_a_sentence_can_be_said_of_numbers_that_are_none(rule):
    nan = float("nan")
    anomaly = Anomaly(4321, 0, 5, 0, "all", "training", "norm", nan, nan, nan, rule.name, "straggler")
    assert "4321" in evidence(anomaly)


@every_rule
def test_a_rule_takes_whatever_a_record_may_be(rule, alone):
    records = Records()
    judge = alone(rule, records.table)
    assert judge(records.step(0, {})) == []
    for step in range(5):
        assert judge(records.step(2 * step, dict.fromkeys(SERIES[: step + 3], 1.0))) == []
        assert judge(records.step(2 * step, dict.fromkeys(SERIES[step:], 1.0))) == [], "a step may come in parts"
    judge(records.step(20, dict.fromkeys(SERIES, float("nan"))))
    judge(records.step(21, dict.fromkeys(SERIES, 0.0), skipped=True))
    found = [f for step in range(30, 60) for f in judge(records.step(step, dict.fromkeys(SERIES, 1.0)))]
    assert not [f for f in found if f.step is not None and f.step > 35], "it is alive, and silent again"


@every_rule
@pytest.mark.parametrize("dtype", ["", "float4_of_tomorrow", "complex64", "bool"])
def test_a_rule_takes_layouts_that_it_does_not_know(rule, dtype, alone):
    records = Records()
    judge = alone(rule, records.table)
    records.layout = records.table.layout_id(Layout((), dtype, 0, (3, 2), UNKNOWN_REGION))
    for step in range(40):
        judge(records.step(step, dict.fromkeys(SERIES, 1.0)))
    assert judge(records.step(40, {})) == []


@every_rule
def test_a_rule_follows_a_table_that_grows(rule, alone):
    records = Records()
    judge, made = alone(rule, records.table), set()
    for step in range(40):
        made |= {(f"{name}.{step // 4}" if step % 4 == 0 and name != quantity else name, quantity)
                 for name, quantity in SERIES}  # fmt: skip
        for f in judge(records.step(step, dict.fromkeys(sorted(made), 1.0))):
            assert f.series_id < len(records.table.series)
            assert f.detector == rule.name


@every_rule
def test_a_rule_goes_on_from_its_state_whatever_the_ids_are(rule, alone):
    records = Records()
    judge = alone(rule, records.table)
    for step in range(30):
        judge(records.step(step, dict.fromkeys(SERIES, 2.0)))
    count = len(records.table.series)
    state = json.loads(json.dumps(judge.rule.saved(count)))
    assert (state is not None) == (rule.state_key is not None)
    if state is None:
        return
    later = Records()
    later.step(30, dict.fromkeys(SERIES[::-1], 2.0))  # defines the series in another order
    restored = alone(rule, later.table)
    restored.grow()
    restored.rule.load(state)
    for series_id, series in enumerate(later.table.series):
        restored.rule.adopt(series_id, state, records.table.series.index(series))
    again = restored.rule.saved(count)
    by_series = len(state) == count
    assert (again[::-1] if by_series else again) == state


class LoudRule(Rule):
    """Reports a gradient whose norm is above a hundred, and counts the records that it has seen."""

    name: ClassVar[str] = "loud"
    quantities: ClassVar[frozenset[str]] = frozenset({"gradient"})
    statistics: ClassVar[frozenset[str]] = frozenset({"norm"})
    state_key: ClassVar[str] = "loud_records"

    def __init__(self, arrays):
        self._is_gradient = arrays.series.column(bool, of=lambda s: s.quantity == "gradient")
        self.records = 0

    def judge(self, observed):
        record = observed.record
        self.records += 1
        loud = self._is_gradient.values[record.where] & (record.columns[NORM] > 100)
        return [
            Finding(int(record.ids[row]), row, "shift", self.name, "norm", record.values[row, NORM], 100.0, 50.0)
            for row in np.flatnonzero(loud).tolist()
        ]

    @staticmethod
    def sentence(anomaly, subject):
        return f"{subject} shouts with {anomaly.value:.0f} at step {anomaly.step}"

    def saved(self, count):
        return self.records

    def load(self, saved):
        self.records = saved


@pytest.fixture
def loud():
    register(LoudRule)
    yield LoudRule
    unregister(LoudRule)


def test_a_rule_from_outside_judges_a_run_and_its_sentence_is_in_the_incident(loud):
    records = Records()
    detection, log = Detection(records.table), IncidentLog(records.table)
    for step in range(5):
        size = 500.0 if step == 4 else 1.0
        found = detection.judge(records.step(step, {("fc.weight", "gradient"): size}))
        log.observe(step, found)
    assert [(a.detector, a.step, a.alarm) for a in found] == [("loud", 4, True)]
    [incident] = log.incidents.values()
    assert "the gradient of fc.weight shouts with 500 at step 4; it was last healthy at step 3" in incident.summary
    assert detection.state()["loud_records"] == 5
    later = Records()
    restored = Detection(later.table)
    restored.load(json.loads(json.dumps(detection.state())))
    restored.judge(later.step(5, {("fc.weight", "gradient"): 1.0}))
    assert restored.state()["loud_records"] == 6


def test_a_state_from_before_a_rule_was_registered_is_read(loud):
    detection = Detection(Records().table)
    state = detection.state()
    del state["loud_records"]
    detection.load(state)


def test_a_rule_that_was_taken_back_runs_no_more():
    register(LoudRule)
    unregister(LoudRule)
    records = Records()
    assert Detection(records.table).judge(records.step(0, {("fc.weight", "gradient"): 500.0})) == []
    assert detector("loud") is None


@pytest.mark.parametrize("taken", ["name", "state_key"])
def test_a_name_and_a_key_are_taken_once(taken, loud):
    other = type("OtherRule", (LoudRule,), {"name": "other", "state_key": "other", taken: getattr(LoudRule, taken)})
    with pytest.raises(ValueError, match=rf"OtherRule\.{taken}: '{getattr(LoudRule, taken)}' is taken by LoudRule"):
        register(other)
    assert other not in rules()


def test_a_row_that_several_rules_report_is_reported_by_the_first():
    records = Records()
    record = records.step(0, {("fc.weight", "parameter"): 1e20})
    record.values[0, STATISTICS.index("nans")] = 1
    [found] = Detection(records.table).judge(record)
    assert found.detector == "nonfinite"
