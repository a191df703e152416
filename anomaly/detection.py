"""Judges step records: which rows are abnormal, and which of those only pass on what they were given."""

import math
from collections import defaultdict
from typing import Any

import numpy as np

from trainsentry.anomaly import dtype_edge, nonfinite, spike
from trainsentry.anomaly.anomaly import NONFINITE, OVERFLOW, SPIKE, Anomaly
from trainsentry.anomaly.dtype_edge import DtypeEdgeRule
from trainsentry.anomaly.history import FEATURES, History, log_magnitudes
from trainsentry.anomaly.nonfinite import NonfiniteRule
from trainsentry.anomaly.series_facts import Mask, SeriesFacts
from trainsentry.anomaly.spike import SCORE_LIMIT, SpikeRule
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_GRAD_OUTPUT,
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    ACTIVATION_QUANTITIES,
    GRADIENT,
    UPDATE,
    Series,
    SeriesTable,
)
from trainsentry.collectors.statistics import INFS, NANS

SOURCES = {
    ACTIVATION_OUTPUT: (ACTIVATION_INPUT,),
    ACTIVATION_GRAD_INPUT: (ACTIVATION_GRAD_OUTPUT, ACTIVATION_OUTPUT),
    GRADIENT: (ACTIVATION_GRAD_OUTPUT, ACTIVATION_OUTPUT, ACTIVATION_INPUT),
}
"""What a quantity of a module is computed from, within the module."""

INSIDE = " inside"
CONTAINED = (ACTIVATION_OUTPUT, ACTIVATION_GRAD_INPUT)
"""Quantities of a module that come from those of the modules it contains."""

Sources = dict[tuple[str, str], set[int]]


class Detection:
    """The detectors of one rank and their state. Records come in the order of their steps."""

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self.facts = SeriesFacts(table)
        self.history = History()
        self._nonfinite = NonfiniteRule(self.facts)
        self._edge = DtypeEdgeRule(self.facts)
        self._spike = SpikeRule(self.facts, self.history)
        self._sources: Sources = defaultdict(set)
        self._sources_step = -1
        self._saved: dict[Any, int] = {}
        self._saved_state: dict[str, Any] = {}
        self._adopted = 0

    def judge(self, record: StepRecord) -> list[Anomaly]:
        """Return the anomalies of a record and learn from the rows that have none.

        What the backward pass made in a step that the loss scaler skipped is the scaler's normal work: it is
        neither reported nor learned. A weight, an activation or the loss is none of its doing.
        """
        if self._saved:
            self._adopt_saved()
        bad = self._nonfinite.rows(record)
        at_edge, largest, edges = self._edge.rows(record)
        z, feature, centre = self._spike.scores(record)
        watched = self.facts.watched[record.ids]
        spikes = (z > SCORE_LIMIT) & watched
        bad &= watched
        abnormal: Mask = bad | at_edge | spikes
        found: list[Anomaly] = []
        excused = self.facts.backward[record.ids] if record.skipped else np.zeros(len(record), bool)
        if (abnormal & ~excused).any():
            sources = self._abnormal_sources(record, abnormal)
            for row in np.flatnonzero(abnormal & ~excused & self.facts.judged[record.ids]).tolist():
                if bad[row]:
                    what = _nonfinite_evidence(record, row)
                elif at_edge[row]:
                    score = 100.0 + math.log10(largest[row] / edges[row])
                    what = (OVERFLOW, dtype_edge.NAME, "max", float(largest[row]), float(edges[row]), score)
                else:
                    statistic = FEATURES[int(feature[row])]
                    value = self._value(record, row, statistic)
                    what = (SPIKE, spike.NAME, statistic, value, math.exp(centre[row]), float(z[row]))
                found.append(self._anomaly(record, row, what, sources))
        self._learn(record, abnormal, spikes)
        return found

    def _learn(self, record: StepRecord, abnormal: Mask, spikes: Mask) -> None:
        finite = (record.values[:, NANS] == 0) & (record.values[:, INFS] == 0)
        usual = self._nonfinite.is_usual(record.ids) & (record.values[:, NANS] == 0)
        healthy = ~abnormal & (finite | usual)
        self._spike.learn(record, healthy, spikes)

    def _abnormal_sources(self, record: StepRecord, abnormal: Mask) -> Sources:
        """Return, for each (module, quantity) with an abnormal row in this step, the micro-steps of those rows.

        A module is also listed, with `INSIDE`, for what is abnormal in the modules it contains.
        """
        if record.step != self._sources_step:
            self._sources_step, self._sources = record.step, defaultdict(set)
        found = self._sources
        for row in np.flatnonzero(abnormal).tolist():
            series = self.table.series[record.ids[row]]
            found[series.module, series.quantity].add(series.micro_step)
            inner = series.module
            while inner and series.quantity in CONTAINED:
                inner = inner.rpartition(".")[0]
                found[inner, series.quantity + INSIDE].add(series.micro_step)
        return found

    def _anomaly(self, record: StepRecord, row: int, what: tuple[Any, ...], sources: Sources) -> Anomaly:
        kind, detector, statistic, value, expected, score = what
        series = self.table.series[record.ids[row]]
        return Anomaly(
            step=record.step,
            micro_step=series.micro_step,
            rank=record.rank,
            order=record.first_order + row,
            name=series.name,
            quantity=series.quantity,
            statistic=statistic,
            value=value,
            expected=expected,
            score=score,
            detector=detector,
            kind=kind,
            module=series.module,
            last_clean=int(self.history.last_clean[record.ids[row]]),
            passed_on=_is_passed_on(series, sources),
        )

    def _value(self, record: StepRecord, row: int, feature: str) -> float:
        logs = log_magnitudes(record.values[row : row + 1], self.facts.scalar[record.ids[row : row + 1]])
        return math.exp(logs[0, FEATURES.index(feature)])

    def state(self) -> dict[str, Any]:
        """Return what was learned, by series, as plain data."""
        n = min(len(self.table.series), len(self.history.count))
        window = self.history.window[:n]
        return {
            "series": [_key(series) for series in self.table.series[:n]],
            "window": np.where(np.isfinite(window), window, 0.0).astype(np.float32).tolist(),
            "count": self.history.count[:n].tolist(),
            "last_clean": self.history.last_clean[:n].tolist(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state of an earlier run; each series takes its part when it is next seen."""
        self._saved = {tuple(key): position for position, key in enumerate(state["series"])}
        self._saved_state = state
        self._adopted = 0
        self._sources_step = -1

    def _adopt_saved(self) -> None:
        """Give series that are new since the last record what an earlier run learned of them."""
        for series_id in range(self._adopted, len(self.table.series)):
            position = self._saved.get(_key(self.table.series[series_id]))
            if position is None:
                continue
            self.history.grow(series_id + 1)
            count = self._saved_state["count"][position]
            window = np.asarray(self._saved_state["window"][position], np.float64)
            window[:, min(count, window.shape[1]) :] = np.inf
            self.history.window[series_id] = window
            self.history.count[series_id] = count
            self.history.last_clean[series_id] = self._saved_state["last_clean"][position]
        self._adopted = len(self.table.series)


def _nonfinite_evidence(record: StepRecord, row: int) -> tuple[Any, ...]:
    nans, infs = record.values[row, NANS], record.values[row, INFS]
    statistic, count = ("nans", nans) if nans > 0 else ("infs", infs)
    return NONFINITE, nonfinite.NAME, statistic, float(count), 0.0, nonfinite.SCORE


def _is_passed_on(series: Series, sources: Sources) -> bool:
    """Whether what a series is computed from was abnormal itself."""
    if series.scalar:
        return any(quantity == ACTIVATION_OUTPUT for _, quantity in sources)
    if series.quantity == UPDATE:
        own = {quantity for module, quantity in sources if module == series.module}
        return bool(own - ACTIVATION_QUANTITIES - {UPDATE})
    names = [*SOURCES.get(series.quantity, ()), *(q + INSIDE for q in CONTAINED if q == series.quantity)]
    for name in names:
        micro_steps = sources.get((series.module, name), set())
        # A parameter's gradient is the sum over all micro-steps; an activation belongs to one.
        if series.micro_step in micro_steps or (micro_steps and series.quantity == GRADIENT):
            return True
    return False


def _key(series: Series) -> tuple[str, str, int, int]:
    return series.name, series.quantity, series.micro_step, series.vpp_stage
