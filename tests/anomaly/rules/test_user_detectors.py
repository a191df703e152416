"""A user's own function judges records beside the rules."""

import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.incidents.sentence import evidence
from trainsentry.anomaly.rules.user_detectors import load_detectors


def test_a_detector_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "detectors_of_a_file.py").write_text(
        "from trainsentry.anomaly.finding import Finding\n\n\n"
        "def too_large(record, table):\n"
        "    rows = (record.values[:, 3] > 1e3).nonzero()[0].tolist()\n"
        "    return [Finding(int(record.ids[r]), r, 'shift', 'mine', 'norm', 1.0, 0.0, 9.0) for r in rows]\n"
    )
    [own] = load_detectors(["detectors_of_a_file:too_large"], [str(tmp_path)])
    records = Records()
    found = Detection(records.table, own=[own]).judge(records.step(0, {("fc.weight", "gradient"): 2e3}))
    assert [(a.detector, a.name) for a in found] == [("mine", "fc.weight")]
    assert evidence(found[0]).startswith("the norm of the gradient of fc.weight is 1 at step 0")
    with pytest.raises(ValueError, match=r"detect.detectors: 'nowhere:f' cannot be loaded"):
        load_detectors(["nowhere:f"])


def test_a_class_that_is_no_rule_is_refused():
    with pytest.raises(ValueError, match=r"'pathlib:Path' has no 'judge'; allowed: a function, or a class after"):
        load_detectors(["pathlib:Path"])


@pytest.mark.parametrize(
    ("kind", "statistic", "value", "said"),
    [
        ("nonfinite", "nans", 3.0, "the gradient of fc.weight holds 3 NaN values at step 5"),
        ("overflow", "max", 7e4, "the gradient of fc.weight reaches 7e+04 at step 5"),
        ("shift", "norm", 2.0, "the norm of the gradient of fc.weight is 2 at step 5"),
    ],
)
def test_a_function_without_a_sentence_gets_that_of_its_kind(kind, statistic, value, said):
    records = Records()

    def mine(record, table):
        return [Finding(int(record.ids[0]), 0, kind, "mine", statistic, value, 1.0, 9.0)]

    [found] = Detection(records.table, own=[mine]).judge(records.step(5, {("fc.weight", "gradient"): 1.0}))
    assert evidence(found).startswith(said)


def test_a_functions_frozen_parameter_is_the_updates():
    records = Records()

    def mine(record, table):
        return [Finding(int(record.ids[0]), 0, "frozen", "mine", "norm", 0.0, 1.0, 9.0)]

    [found] = Detection(records.table, own=[mine]).judge(records.step(5, {("fc.weight", "gradient"): 1.0}))
    assert found.quantity == "update"
