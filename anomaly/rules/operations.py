"""A module whose forward pass computes something else than in its passes before: its code, or a constant, changed."""

from dataclasses import replace
from typing import ClassVar, Final

from trainsentry.anomaly.anomaly import OPTION_CHANGE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.module_setting import MODEL
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_OUTPUT, OPERATIONS, OTHER_ARGUMENT, OTHER_OPERATIONS
from trainsentry.collectors.statistics import MIN, VALUE

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as only code changes what a module computes."""

MANY: Final = 3
"""Modules that change at once on purpose: somebody switches on adapters, quantisation or another kind of attention."""

STRUCTURE: Final = "operations"
"""What a change begins with that is not one of a constant."""

KINDS_OF_MANY: Final = (f"{STRUCTURE}: ", "the same in another order")
"""What changes in many modules at once on purpose say: masks of weights that are pruned move together too."""


class OperationsRule(Rule):
    """Judges the rows of `operations`, which the collector makes of a change until it has lasted for some passes.

    A finding names the module's output, which is computed otherwise. Where many modules compute by other operations
    from one step on, that explains an incident and makes none; so does a number that moves by less than a fifth, and a
    change that has not lasted.
    """

    name: ClassVar[str] = "operations"
    speaks_for: ClassVar[str | None] = None
    quantities: ClassVar[frozenset[str]] = frozenset({OPERATIONS, ACTIVATION_OUTPUT})
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        prefix = f"{OPERATIONS}."
        self._sampled = -1, -1  # the newest two steps with activations
        self._began: dict[tuple[str, str], tuple[int, int]] = {}  # of a module's change: its first step, the one before
        self._is_output = arrays.series.column(bool, of=lambda s: s.quantity == ACTIVATION_OUTPUT)
        self._is_change = arrays.series.column(bool, of=lambda s: s.scalar and s.name.startswith(prefix))

    def judge(self, observed: Observed) -> list[Finding]:
        """Return a finding for each change."""
        record, found = observed.record, []
        rows = rows_where(self._is_change.values[record.where]).tolist()
        names = [observed.table.series[record.ids[row]].name.partition(".")[2] for row in rows]
        changes = [name.partition(": ")[::2] for name in names]
        of_many = {kind for kind in KINDS_OF_MANY if len({m for m, change in changes if kind in change}) >= MANY}
        for row, (module, change) in zip(rows, changes, strict=True):
            kind, is_first = float(record.values[row, VALUE]), record.values[row, MIN] <= 1
            place = module, change.partition(": ")[0]
            if is_first or place not in self._began:
                self._began[place] = record.step, max((s for s in self._sampled if s < record.step), default=-1)
            step, before = self._began[place]
            alarm = kind in (OTHER_OPERATIONS, OTHER_ARGUMENT) and not any(each in change for each in of_many)
            detail = (OPTION_CHANGE, self.name, change, kind, 0.0, SCORE, alarm)
            name = "output.0" if module == MODEL else f"{module}.output.0"
            finding = Finding(
                int(record.ids[row]), row, *detail, passed_on=False, name=name, quantity=ACTIVATION_OUTPUT
            )
            found.append(replace(finding, step=step, last_clean=before))
        if record.step != self._sampled[-1] and self._is_output.values[record.where].any():
            self._sampled = self._sampled[-1], record.step
        return found

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return what changed, with the constant before and after."""
        what, _, values = anomaly.statistic.partition(": ")
        was, _, now = values.partition(" → ")
        change = f"it has other operations ({was})" if what == STRUCTURE else f"{what} is {now}, and was {was}"
        return f"{subject} is computed otherwise at step {anomaly.step}: {change}"
