"""A module's number that changes while the run goes on is named with both values."""

import numpy as np
import pytest
from step_records import Records

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.rules.module_setting import ModuleSettingRule
from trainsentry.collectors.statistics import MIN, VALUE


def changed(records, step, key, before, now, *, constant=True):
    """Return the record of a step in which one setting changed, as the collector makes it."""
    was = key.replace("setting", "setting_before", 1)
    record = records.step(step, {**({(was, was): before} if constant else {}), (key, key): now})
    record.values[-1, MIN] = before
    return record


def judge(alone, *changes, from_table=False):
    """Return the findings of a run of 300 steps; a change is (step, key, before, now, …)."""
    records = Records()
    rule, found = alone(ModuleSettingRule, records.table), []
    by_step = {change[0]: change[1:] for change in changes}
    for step in range(300):
        more = by_step.get(step)
        record = records.step(step, {}) if more is None else changed(records, step, *more[:3], **dict(more[3:]))
        if from_table and more is not None:
            record.values[:, MIN] = record.values[:, VALUE]
        found += rule(record)
    return found


@pytest.mark.parametrize(
    ("key", "before", "now"), [("eps", 1e-5, 0.5), ("momentum", 0.1, 0.0), ("p", 0.1, 0.0), ("p", 0.1, 0.9)]
)
def test_a_constant_of_the_framework_is_an_alarm(alone, key, before, now):
    for from_table in (False, True):
        [found] = judge(alone, (150, f"setting.blocks.0.{key}", before, now), from_table=from_table)
        assert (found.value, found.expected, found.statistic, found.alarm) == (now, before, key, True)


@pytest.mark.parametrize(("key", "constant"), [("p", True), ("momentum", True), ("best_loss", False)])
def test_what_programs_change_on_purpose_explains_and_makes_no_alarm(alone, key, constant):
    [found] = judge(alone, (150, f"setting.blocks.0.{key}", 0.1, 0.05, ("constant", constant)))
    assert not found.alarm


@pytest.mark.parametrize(("others", "is_alarm"), [((), True), ((0.0, 0.0), False), ((0.0, 0.05), True)])
def test_all_dropouts_that_are_switched_off_together_are_so_on_purpose(alone, others, is_alarm):
    records = Records()
    rule = alone(ModuleSettingRule, records.table)
    assert [rule(records.step(step, {})) for step in (0, 149)] == [[], []]
    sizes = {}
    for i, now in enumerate((0.0, *others)):
        sizes |= {(f"setting_before.blocks.{i}.p",) * 2: 0.1, (f"setting.blocks.{i}.p",) * 2: now}
    record = records.step(150, sizes)
    record.values[1::2, MIN] = 0.1
    assert [found.alarm for found in rule(record)][:1] == [is_alarm]


def test_what_no_table_holds_is_not_said(alone):
    [found] = judge(alone, (150, "setting.m.best_loss", 0.1, 0.05, ("constant", False)), from_table=True)
    assert np.isnan(found.expected)
    assert not found.alarm
    anomaly = Anomaly(150, 0, 0, 0, "m", "training", "best_loss", 0.05, np.nan, 60.0, "option_change", "module_setting")
    assert ModuleSettingRule.sentence(anomaly, "m") == "best_loss of m was changed to 0.05 by step 150"


def test_a_schedule_a_small_change_and_the_beginning_are_quiet(alone):
    schedule = [(at, "setting.drop.rate", 1 / at, 1 / (at + 30)) for at in range(30, 290, 30)]
    assert len(judge(alone, *schedule)) == 1  # the first of a schedule cannot be told from another change
    assert judge(alone, (150, "setting.norm.eps", 1e-5, 1.1e-5)) == []
    assert judge(alone, (3, "setting.norm.eps", 1e-5, 1e-3)) == []
