"""A number of a module (an epsilon, a dropout's share, a capacity) that changes while the run goes on."""

import math
from typing import ClassVar, Final

from trainsentry.anomaly.anomaly import OPTION_CHANGE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SETTING, SETTING_BEFORE, SeriesTable
from trainsentry.collectors.statistics import MIN, VALUE

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as the number itself is read and is no estimate."""

LEAST_CHANGE: Final = math.log(1.2)
"""Smallest change: a schedule of dropout or of a temperature moves by less from one sample to the next."""

SETTLED: Final = 20
"""Steps of a run before settings are judged: programs set them when they begin."""

SCHEDULED: Final = frozenset({"p", "momentum"})
"""Constants of the framework that programs lower on purpose while they train: dropout's share, and how fast a batch
norm's running statistics move (Qi et al., "PointNet++", NeurIPS 2017, halve it every so often)."""

DROPS_HALF: Final = 0.5
"""Dropout's share from which a rise is no schedule: those stay below one half (Morerio et al., "Curriculum dropout",
ICCV 2017, rise towards it slowly)."""


MODEL: Final = "model"
"""The name of the whole model, whose path is empty."""

DROPOUT: Final = "p"
AT_ONCE: Final = 2
"""Modules whose dropout is switched off at one step on purpose: for the rest of a training that underfits (Liu et al.,
"Dropout reduces underfitting", ICML 2023), or for its last epochs."""


class Dropouts:
    """Knows the shares of dropouts among the settings."""

    def __init__(self, arrays: SeriesArrays) -> None:
        begins, ends = f"{SETTING}.", f".{DROPOUT}"
        self._is_share = arrays.series.column(
            bool, of=lambda s: s.scalar and s.name.startswith(begins) and s.name.endswith(ends)
        )

    def are_changed_by(self, record: StepRecord) -> bool:
        """Whether a record tells of several dropouts that get another share."""
        return len(rows_where(self._is_share.values[record.where])) >= AT_ONCE

    def are_switched_off_by(self, record: StepRecord) -> bool:
        """Whether a record tells of several dropouts that are switched off, and of none that gets another share."""
        rows = rows_where(self._is_share.values[record.where])
        return len(rows) >= AT_ONCE and not record.values[rows, VALUE].any()


class ModuleSettingRule(Rule):
    """Judges the first change of each kind of setting; one that changes again follows a schedule of the program.

    A change of a framework's own constant is an alarm, unless it is one of `SCHEDULED` that neither falls to 0 nor
    rises to one half. A user's class may keep numbers of any meaning among its attributes, such as the best loss so
    far: their change explains an incident, and makes none.
    """

    name: ClassVar[str] = "module_setting"
    speaks_for: ClassVar[str | None] = OPTION_CHANGE
    quantities: ClassVar[frozenset[str]] = frozenset({SETTING})
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        prefix, before = f"{SETTING}.", f"{SETTING_BEFORE}."
        self._is_setting = arrays.series.column(bool, of=lambda s: s.scalar and s.name.startswith(prefix))
        self._is_before = arrays.series.column(bool, of=lambda s: s.scalar and s.name.startswith(before))
        self._dropouts = arrays.shared(Dropouts)
        self._changed: dict[str, int] = {}
        self._first_step: int | None = None

    def judge(self, observed: Observed) -> list[Finding]:
        """Return a finding for each setting that changed for the first time."""
        record, found = observed.record, []
        if self._first_step is None:
            self._first_step = record.step
        rows = rows_where(self._is_setting.values[record.where]).tolist()
        constants = self._constants_before(record, observed.table) if rows else {}
        is_dropped = self._dropouts.are_switched_off_by(record)
        for row in rows:
            series_id = int(record.ids[row])
            path = observed.table.series[series_id].name.partition(".")[2]
            module, _, key = path.rpartition(".")
            scheduled = self._changed.setdefault(key, record.step) != record.step
            now, before = float(record.values[row, VALUE]), float(record.values[row, MIN])
            constant = path in constants
            if before == now:  # the row of a table, which holds the value alone
                before = constants.get(path, math.nan)
            if scheduled or record.step - self._first_step < SETTLED or _change(before, now) <= LEAST_CHANGE:
                continue
            odd = now <= 0.0 or before < DROPS_HALF <= now
            alarm = constant and (key not in SCHEDULED or odd) and not (is_dropped and key == DROPOUT)
            detail = (OPTION_CHANGE, self.name, key, now, before, SCORE, alarm)
            found.append(Finding(series_id, row, *detail, passed_on=False, name=module or MODEL, quantity="training"))
        return found

    def _constants_before(self, record: StepRecord, table: SeriesTable) -> dict[str, float]:
        """Return what constants of the framework were until this step, by `<module>.<key>`."""
        rows = rows_where(self._is_before.values[record.where]).tolist()
        return {table.series[record.ids[r]].name.partition(".")[2]: float(record.values[r, VALUE]) for r in rows}

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the setting with both values, or with the new one where no table holds the old."""
        before = "" if math.isnan(anomaly.expected) else f" from {anomaly.expected:.6g}"
        return f"{anomaly.statistic} of {subject} was changed{before} to {anomaly.value:.6g} by step {anomaly.step}"


def _change(before: float, now: float) -> float:
    """Return |log ratio| of two numbers; Inf where one is 0, not finite, or of the other sign."""
    ratio = now / before if before and math.isfinite(before) else 0.0
    return abs(math.log(ratio)) if ratio > 0 and math.isfinite(ratio) else math.inf
