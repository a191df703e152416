"""A buffer that was constant and changes alone is named; what a program changes by design is not."""

import pytest
from step_records import Records

from trainsentry.anomaly.detection import Detection
from trainsentry.anomaly.incidents.incident_log import IncidentLog
from trainsentry.anomaly.rules.buffers.constant_buffer import CONSTANT_BEFORE, ConstantBufferRule
from trainsentry.collectors.series import Layout

NAN = float("nan")
MASK, OTHER = ("layers.0.mask", "buffer"), ("layers.1.mask", "buffer")
INDEX = ("index", "buffer")
MODE = ("training_mode.layers.0", "training_mode.layers.0")


def changing(*series, at=CONSTANT_BEFORE + 3):
    """Return sizes: the given buffers change at a step, the others never."""
    return lambda s: {k: 2.0 if k in series and s >= at else 1.0 for k in (MASK, OTHER, INDEX)}


@pytest.mark.parametrize("series", [MASK, INDEX])
def test_a_buffer_that_changes_alone_is_named_once(alone, judged, series):
    records = Records()
    [found] = judged(alone(ConstantBufferRule, records.table), records, range(30), changing(series))
    assert (records.table.series[found.series_id].name, found.value, found.expected) == (series[0], 2.0, 1.0)


def test_what_changes_together_early_or_often_is_by_design(alone, judged):
    records = Records()
    assert judged(alone(ConstantBufferRule, records.table), records, range(30), changing(MASK, OTHER)) == []
    early = Records()
    assert judged(alone(ConstantBufferRule, early.table), early, range(30), changing(MASK, at=3)) == []
    other_first = Records()
    sizes = lambda s: {MASK: 2.0 if s >= 20 else 1.0, OTHER: 1.0 + s % 7}  # noqa: E731
    assert judged(alone(ConstantBufferRule, other_first.table), other_first, range(30), sizes) == []


def test_a_switch_to_evaluation_and_another_shape_explain_a_change(alone, judged):
    records = Records()
    rule = alone(ConstantBufferRule, records.table)
    switched = lambda s: {**changing(MASK)(s), **({MODE: 0.0} if s == CONSTANT_BEFORE + 3 else {})}  # noqa: E731
    assert judged(rule, records, range(30), switched) == []
    longer = Records()
    rule = alone(ConstantBufferRule, longer.table)
    assert judged(rule, longer, range(12), changing()) == []
    longer.layout = longer.table.layout_id(Layout((32,), "float32", 32))
    assert judged(rule, longer, range(12, 20), changing(MASK, at=12)) == []


@pytest.mark.parametrize("ahead", [(), (20, 21, 22), (22,)], ids=["in turn", "all ahead", "a later one ahead"])
def test_a_mask_that_becomes_nan_is_the_cause_also_where_the_recorder_is_late(ahead):
    """Records that wait are looked at for NaN alone, and the buffer is a NaN like any other until its turn comes."""
    records, gradient = Records(), ("fc.weight", "gradient")
    detection, log = Detection(records.table), IncidentLog(records.table)
    for step in range(20):
        detection.judge(records.step(step, {MASK: 1.0, gradient: 1.0 + step % 3 / 10}))
    waiting = [records.step(20, {gradient: NAN}), *(records.step(s, {MASK: NAN, gradient: NAN}) for s in (21, 22))]
    for record in waiting:
        if record.step in ahead:
            log.observe(record.step, detection.certain(record))
    for record in waiting:
        log.observe(record.step, detection.judge(record))
    [incident] = log.incidents.values()
    assert (incident.name, incident.quantity, incident.step) == (*MASK, 20)
