"""A module that was switched between training and evaluation mode while the run goes on."""

from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import MODE_CHANGE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import BUFFER, TRAINING_MODE, Series, SeriesTable
from trainsentry.collectors.statistics import VALUE

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as only a person or a forgotten call switches a mode."""


SETTLED: Final = 10
"""Steps of a run before modes are judged: programs set them when they begin."""

BACK_AND_FORTH: Final = 2
"""Switches of a module that are told, the second as a suspicion; what switches more often follows a schedule."""


MEAN_BUFFER: Final = "running_mean"
"""The buffer by which a normalisation that keeps running statistics is known."""


class Normalisations:
    """Knows the modules that keep running statistics, by their buffers."""

    def __init__(self, arrays: SeriesArrays) -> None:
        self._modules: set[str] = set()
        self._is_mode = arrays.series.column(bool, of=lambda s: s.quantity.startswith(TRAINING_MODE))
        arrays.series.before_growth(self._note)

    def _note(self, _first: int, new: Sequence[Series]) -> None:
        buffers = (s.name.rpartition(".") for s in new if s.quantity == BUFFER)
        self._modules.update(module for module, _, name in buffers if name == MEAN_BUFFER)

    def are_frozen_by(self, record: StepRecord, table: SeriesTable) -> bool:
        """Whether a record switches all these modules, several and no other one, to evaluation."""
        rows = rows_where(self._is_mode.values[record.where])
        if len(rows) <= 1 or record.values[rows, VALUE].any():
            return False
        return {table.series[i].name.partition(".")[2] for i in record.ids[rows].tolist()} == self._modules


class ModeChangeRule(Rule):
    """Reports the rows of a `training_mode` scalar: the collector makes one only when a mode has changed.

    Programs freeze the running statistics of all their normalisations late in training (Jacob et al., "Quantization and
    training of neural networks", CVPR 2018): then just these modules are switched, and it makes no incident.
    """

    name: ClassVar[str] = "mode_change"
    speaks_for: ClassVar[str | None] = MODE_CHANGE
    quantities: ClassVar[frozenset[str]] = frozenset({TRAINING_MODE, BUFFER})
    statistics: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_mode = arrays.series.column(bool, of=lambda s: s.quantity.startswith(TRAINING_MODE))
        self._normalisations = Normalisations(arrays)
        self._switches = arrays.series.column(np.int64)
        self._first_step: int | None = None

    def judge(self, observed: Observed) -> list[Finding]:
        """Return a finding for each module whose mode has changed."""
        record = observed.record
        if self._first_step is None:
            self._first_step = record.step
        found = []
        rows = rows_where(self._is_mode.values[record.where]).tolist()
        freezes = bool(rows) and self._normalisations.are_frozen_by(record, observed.table)
        for row in rows:
            name = observed.table.series[record.ids[row]].name.partition(".")[2]
            now, series_id = float(record.values[row, VALUE]), int(record.ids[row])
            switches = self._switches.values[series_id] = self._switches.values[series_id] + 1
            if switches <= BACK_AND_FORTH and record.step - self._first_step >= SETTLED:
                detail = (MODE_CHANGE, self.name, "value", now, 1 - now, SCORE, bool(switches == 1) and not freezes)
                found.append(Finding(series_id, row, *detail, passed_on=False, name=name))
        return found

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the mode that the module has now."""
        mode = "training" if anomaly.value else "evaluation"
        subject = f"model {subject} of those that are watched" if subject.isdigit() else subject
        return f"{subject} was switched to {mode} mode by step {anomaly.step}"
