"""A learned state that is unfit, or cannot be saved, is named; nothing of it stays, and detection goes on."""

import math
from functools import cache

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.rules.optimizer.learning_rate import LearningRateRule
from trainsentry.anomaly.rules.registry import rules
from trainsentry.collectors.series import Layout, Series

W, G = ("fc.weight", "gradient"), ("fc.weight", "parameter")
rng = np.random.default_rng(0)


def healthy(records, detection, steps, start=0):
    found = []
    for step in range(start, start + steps):
        found += detection.judge(
            records.step(step, {key: float(np.exp(0.1 * rng.standard_normal())) for key in (W, G)})
        )
    return found


@cache
def saved_state():
    """Return records and the state of a detection that has seen 40 of them."""
    records = Records()
    detection = Detection(records.table)
    assert healthy(records, detection, 40) == []
    return records, detection.state()


def cut(part):
    """Return a part of a state with every list emptied."""
    if isinstance(part, dict):
        return {key: cut(each) for key, each in part.items()}
    return [] if isinstance(part, list) else part


KEPT_APART = {rule.state_key for rule in rules() if rule.state_key is not None}


UNFIT = {"cut short": cut, "none": lambda part: None, "of objects": lambda part: [{"x": math.nan}], "a text": str}


@pytest.mark.parametrize("key", sorted(set(saved_state()[1]) - {"version"}))
@pytest.mark.parametrize("how", UNFIT)
def test_an_unfit_part_of_a_state_is_named_and_leaves_nothing_behind(key, how):
    records, state = saved_state()
    resumed, fresh = Detection(records.table), Detection(records.table)
    unfit = {part for part, _ in resumed.load({**state, key: UNFIT[how](state[key])})}
    if key in KEPT_APART:
        [name] = [rule.name for rule in rules() if rule.state_key == key]
        assert unfit <= {f"learned state of rule {name}"}
        assert (resumed.state()["count"], fresh.state()["count"]) == (state["count"], [0] * len(state["count"]))
    else:
        assert unfit <= {"learned state"}
        assert not unfit or resumed.state() == fresh.state()
    if how == "a text" and state[key] and key not in {"records", "together", "kinds"}:
        assert unfit
    assert healthy(records, resumed, 60, start=40) == []


@pytest.mark.parametrize("version", [None, 2, 99])
def test_a_state_of_another_version_is_named_and_left_out(version):
    records, state = saved_state()
    [(part, error)] = Detection(records.table).load({**state, "version": version})
    assert (part, str(error)) == ("learned state", f"version {version}; allowed: 3")


def _raise(*args):
    raise ZeroDivisionError("planted")


def test_a_rule_that_cannot_save_is_off_and_all_others_are_saved(monkeypatch):
    records, failed = Records(), []
    detection = Detection(records.table, failed=lambda *found: failed.append(found))
    whole = set(detection.state())
    monkeypatch.setattr(LearningRateRule, "saved", _raise)
    assert whole - set(detection.state()) == {LearningRateRule.state_key}
    assert [name for name, _ in failed] == [LearningRateRule.name]


def _shifts(layout, resumed_layout):
    """Train 40 steps with one layout; go on with another and a thousand times the size. Return what is found."""
    records = Records()
    records.layout = records.table.layout_id(layout)
    detection = Detection(records.table)
    assert healthy(records, detection, 40) == []
    resumed = Detection(records.table)
    assert resumed.load(detection.state()) == []
    records.layout = records.table.layout_id(resumed_layout)
    sizes = np.exp(0.1 * np.random.default_rng(1).standard_normal((20, 2)))
    return [
        found
        for step, (of_gradient, of_weight) in enumerate((1000 * sizes).tolist(), 40)
        for found in resumed.judge(records.step(step, {W: of_gradient, G: of_weight}))
    ]


FIRST, LAST = (Layout((8,), "float32", 8, (16,), region) for region in ("0:8", "8:16"))


def test_what_is_known_of_one_shard_says_nothing_of_another():
    """A resume on another number of ranks gives each of them other parts."""
    assert _shifts(FIRST, LAST) == []
    assert _shifts(Layout((16,), "float32", 16), FIRST) == []


def test_a_shard_that_stays_where_it_was_is_judged_by_its_past():
    assert _shifts(FIRST, FIRST) != []


def test_a_checkpoint_right_after_a_resume_keeps_what_whole_tensors_were():
    records, state = saved_state()
    resumed = Detection(records.table)
    resumed.load(state)
    assert resumed.state()["count"] == state["count"]


@pytest.mark.parametrize(("region", "kept"), [(FIRST, True), (LAST, False)], ids=["the same ranks", "others"])
def test_a_checkpoint_before_a_shard_is_seen_again_keeps_it_if_others_are_where_they_were(region, kept):
    records = Records()
    records.layout = records.table.layout_id(FIRST)
    detection, resumed = Detection(records.table), Detection(records.table)
    healthy(records, detection, 40)
    resumed.load(detection.state())
    records.layout = records.table.layout_id(region)
    resumed.judge(records.step(40, {W: 1.0}))
    state = resumed.state()
    assert (state["count"][records.table.known_id(Series(*G, module="fc"))] == 40) == kept
