"""Runs one rule without the others."""

import pytest

from trainsentry.anomaly.baselines.late_scalars import LateScalars
from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.series_arrays import SeriesArrays
from trainsentry.anomaly.series_facts import SeriesFacts


class Alone:
    """A rule, over the records of a table; `rule` is the instance."""

    def __init__(self, rule, table):
        self.arrays = SeriesArrays(table)
        self.facts = SeriesFacts(self.arrays)
        self.late = LateScalars(self.facts, self.arrays)
        self.rule = rule(self.arrays)

    def grow(self):
        """Take in the series that are new in the table."""
        self.arrays.grow()
        return self.rule

    def __call__(self, record):
        """Return the findings in a record."""
        self.grow()
        self.late.note(record)
        where, excused = record.where, self.late.excused(record)
        judged = self.facts.judged[where] & self.facts.watched[where] & ~excused
        numel = self.arrays.numel.values[record.layouts]
        return self.rule.judge(Observed(record, self.arrays.table, self.facts, numel, judged, excused))


@pytest.fixture
def alone():
    """Return what makes a rule judge alone: `alone(rule, table)(record)` returns findings."""
    return Alone


@pytest.fixture
def judged():
    """Return what judges a record a step: `judged(judge, records, steps, sizes)` returns all findings."""

    def run(judge, records, steps, sizes, **flags):
        return [f for s in steps for f in judge(records.step(s, sizes(s) if callable(sizes) else sizes, **flags))]

    return run
