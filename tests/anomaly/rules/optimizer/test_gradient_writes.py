"""Gradients that are written more or less often than before are named; what loops do by design is not."""

import pytest
from step_records import Records

from trainsentry.anomaly.rules.optimizer.gradient_writes import GradientWritesRule

COUNT = ("gradient_writes.0", "gradient_writes.0")


def run(alone, count, steps=range(200)):
    """Return the findings over steps; as the collector does, only changes have a row."""
    records = Records()
    rule, found, last = alone(GradientWritesRule, records.table), [], None
    for step in steps:
        now = count(step)
        found += rule(records.step(step, {COUNT: now} if now != last else {}))
        last = now
    return found


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0), (0, -3), (2, 3)])
def test_another_count_that_lasts_is_found_at_its_first_step(alone, before, after):
    [found] = run(alone, lambda step: after if step >= 90 else before)
    assert (found.step, found.value, found.expected, found.kind) == (90, after, before, "gradient_flow")


def test_a_count_for_one_step_is_none(alone):
    assert run(alone, lambda step: 1 if step == 90 else 0) == []


def test_loops_that_clip_only_large_gradients_are_quiet(alone):
    assert run(alone, lambda step: int(step * 7919 % 13 < 5)) == []


def test_a_count_that_the_run_has_had_is_none(alone):
    assert run(alone, lambda step: 1 if step < 10 or 90 <= step < 150 else 0) == []


def test_what_is_reported_once_is_the_new_usual(alone):
    assert len(run(alone, lambda step: int(step >= 90))) == 1


def test_a_step_in_parts_is_one_step(alone):
    """An examined step of a critic and a generator comes in two records."""
    records = Records()
    rule, found = alone(GradientWritesRule, records.table), []
    for step in range(80):
        count = {} if step not in {0, 50} else {COUNT: float(step == 50)}
        found += rule(records.step(step, {("critic.weight", "gradient", n): 1.0 for n in range(3)} | count))
        found += rule(records.step(step, {("made.weight", "gradient", 0): 1.0}))
    assert [finding.step for finding in found] == [50]


@pytest.mark.parametrize("first", [0, 1], ids=["the old count first", "the new count first"])
def test_an_optimizer_that_joins_changes_what_a_step_is(alone, first):
    """A discriminator that starts late: until then the generator's updates are grouped otherwise."""
    records = Records()
    rule, other, found = alone(GradientWritesRule, records.table), ("gradient_writes.1",) * 2, []
    for step in range(120):
        new = {COUNT: -2.0, other: 0.0} if first == 0 else {other: 0.0, COUNT: -2.0}
        found += rule(records.step(step, {0: {COUNT: 0.0}, 52: new, 90: {other: 1.0}}.get(step, {})))
    assert [(finding.step, finding.value) for finding in found] == [(90, 1.0)]


@pytest.mark.parametrize(("begins", "told"), [(50, [50]), (3, [])], ids=["later", "from the start"])
def test_an_update_with_gradients_that_were_used_is_told_once_unless_the_run_began_so(alone, begins, told):
    records, stale = Records(), ("stale_update.0", "stale_update.0")
    rule = alone(GradientWritesRule, records.table)
    found = [f for s in range(90) for f in rule(records.step(s, {stale: 1.0} if s >= begins and s % 2 == 0 else {}))]
    assert [record.step or 50 for record in found] == told
    assert all(f.kind == "stale" for f in found)


def test_a_single_gradient_that_is_written_oftener_is_named(alone):
    records, of_one = Records(), ("gradient_writes.0.blocks.1.fc.weight",) * 2
    rule, found = alone(GradientWritesRule, records.table), []
    for step in range(140):
        found += rule(records.step(step, {0: {COUNT: 0.0}, 90: {of_one: 0.0}, 130: {of_one: 1.0}}.get(step, {})))
    [one] = found
    assert (one.name, one.quantity, one.kind) == ("blocks.1.fc.weight", "gradient", "gradient_flow")
    assert (one.step, one.last_clean) == (90, 86)
