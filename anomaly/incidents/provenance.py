"""Decides which abnormal rows only pass on the fault of their inputs."""

from collections import defaultdict

import numpy as np

from trainsentry.anomaly.anomaly import FROZEN, NONFINITE, STATE_RESET
from trainsentry.anomaly.baselines.late_scalars import LateScalars
from trainsentry.anomaly.finding import ALL, DATA, Finding
from trainsentry.anomaly.series_arrays import Mask, rows_where
from trainsentry.anomaly.series_facts import BACKWARD
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_GRAD_OUTPUT,
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    ACTIVATION_QUANTITIES,
    GRADIENT,
    GRADIENT_UNREDUCED,
    LEARNING_RATE,
    STEP_COUNTER,
    TRAINING_MODE,
    UPDATE,
    UPDATED_PARAMETERS,
    Series,
    SeriesTable,
)
from trainsentry.collectors.statistics import VALUE

SOURCES = {
    ACTIVATION_OUTPUT: (ACTIVATION_INPUT,),
    ACTIVATION_GRAD_INPUT: (ACTIVATION_GRAD_OUTPUT, ACTIVATION_OUTPUT),
    GRADIENT: (ACTIVATION_GRAD_OUTPUT, ACTIVATION_OUTPUT, ACTIVATION_INPUT, GRADIENT_UNREDUCED),
    GRADIENT_UNREDUCED: (ACTIVATION_GRAD_OUTPUT, ACTIVATION_OUTPUT, ACTIVATION_INPUT),
}
"""The quantities of a module from which another one is computed, within the module."""

LOSS = "", "loss"
INSIDE = " inside"
CONTAINED = (ACTIVATION_OUTPUT, ACTIVATION_GRAD_INPUT)
"""Quantities of a module that are computed in the modules that it contains."""


class Provenance:
    """Remembers the abnormal rows of a step, which may come in several records."""

    def __init__(self, table: SeriesTable, late: LateScalars) -> None:
        self.table = table
        self.late = late
        self._sources: dict[tuple[str, str], set[int]] = defaultdict(set)
        self._before: dict[tuple[str, str], set[int]] = {}
        self._has_finite_loss = True
        self._step = -1

    def go_back(self) -> None:
        """Forget the step."""
        self._step = -1

    def note(self, record: StepRecord, abnormal: Mask) -> None:
        """Take in the abnormal rows of a record.

        A module is also listed, with `INSIDE`, for the abnormal rows of the modules that it contains.
        """
        if record.step != self._step:
            self._before = self._sources if record.step == self._step + 1 else {}
            self._step, self._sources, self._has_finite_loss = record.step, defaultdict(set), True
        found = self._sources
        for row in rows_where(abnormal).tolist():
            if self.late.is_late(int(record.ids[row])):
                continue  # it belongs to the step before
            series = self.table.series[record.ids[row]]
            found[series.module, series.quantity].add(series.micro_step)
            if (series.module, series.quantity) == LOSS and not np.isfinite(record.values[row, VALUE]):
                self._has_finite_loss = False
            inner = series.module
            while inner and series.quantity in CONTAINED:
                inner = inner.rpartition(".")[0]
                found[inner, series.quantity + INSIDE].add(series.micro_step)

    def is_passed_on(self, series: Series, series_id: int, kind: str) -> bool:
        """Whether a series is computed from an abnormal one; NaN in a backward pass comes from no finite loss."""
        sources = self._sources
        if series.scalar:
            sources = self._before if self.late.is_late(series_id) else sources
            return any(quantity == ACTIVATION_OUTPUT for _, quantity in sources)
        is_from_loss = kind != NONFINITE or not self._has_finite_loss
        if series.quantity in BACKWARD and LOSS in sources and is_from_loss:
            return True
        if series.quantity == UPDATE:
            own = {quantity for module, quantity in sources if module == series.module}
            return bool(own - ACTIVATION_QUANTITIES - {UPDATE})
        names = [*SOURCES.get(series.quantity, ()), *(q + INSIDE for q in CONTAINED if q == series.quantity)]
        for name in names:
            micro_steps = sources.get((series.module, name), set())
            # A parameter's gradient is the sum over all micro-steps; an activation belongs to one.
            summed = series.quantity in {GRADIENT, GRADIENT_UNREDUCED}
            if series.micro_step in micro_steps or (micro_steps and summed):
                return True
        return False


def quantity_of(series: Series, finding: Finding) -> str:
    """Return the quantity at fault: the finding's own, or that of its series; the model's inputs are data."""
    if finding.quantity is not None:
        return finding.quantity
    if finding.kind == FROZEN:
        return UPDATE
    if series.is_model_input:
        return DATA
    if series.quantity.startswith(TRAINING_MODE):
        return "training"
    is_counter = finding.kind == STATE_RESET and series.quantity == STEP_COUNTER
    return "optimizer" if series.name == LEARNING_RATE or is_counter else series.quantity


def name_of(series: Series, finding: Finding) -> str:
    """Return the name at fault: the finding's own, or that of its series."""
    if finding.name is not None:
        return finding.name
    return ALL if series.name == UPDATED_PARAMETERS else series.name
