"""States of optimizers that are made of largest values, or of a last value: their extremes follow from what is read."""

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.optimizer.recorded_options import ByParameter, ParameterNumbers, RecordedOptions
from trainsentry.anomaly.rules.optimizer.residuals import ResidualBounds, Residuals
from trainsentry.anomaly.rules.rule import OPTIMIZER_STATE, Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, Integers, SeriesArrays, rows_where
from trainsentry.collectors.series import GRADIENT, OPTION, PARAMETER, Series
from trainsentry.collectors.statistics import MAX, MIN

BOUNDS: Final = ResidualBounds(least=1e-4, largest=0.02, learned=4)
"""Shares of the largest magnitude: float32 leaves 1e-6. Not every optimizer keeps states of these names so, and with
decay of weights inside the gradient they do not follow: four samples must have followed."""

EXACTLY, AT_LEAST, AT_MOST = range(3)

RELATIONS: Final = {"exp_inf": EXACTLY, "max_exp_avg_sq": AT_LEAST, "ax": EXACTLY, "prev": AT_MOST}
"""How the largest magnitude of a state compares with what is expected: of Adamax max(β₂·itself, |g| + ε); with amsgrad
its own past and `exp_avg_sq`; of ASGD the weight, before averaging begins; of Rprop the last gradient, parts of which
it sets to 0. Kingma and Ba, "Adam" (2015); Reddi et al., "On the Convergence of Adam and Beyond" (2018)."""

LATEST_AVERAGE: Final = 1e5
"""Steps: with a smaller `t0` ASGD averages within a run (torch's default is a million)."""

_SOURCES: Final = (GRADIENT, PARAMETER, "exp_avg_sq")
_GRADIENT, _WEIGHT, _SQUARES = range(len(_SOURCES))
_KINDS: Final = tuple(RELATIONS)


@dataclass(slots=True)
class _Sampled:
    """The newest sample of a state: its largest magnitude, as each update changes it, its elements, and its step."""

    peak: float
    numel: int
    step: int


class StateExtremesRule(Rule):
    """Compares the largest magnitude of each such state with what gradients, weights and its own past allow."""

    name: ClassVar[str] = "state_extremes"
    quantities: ClassVar[frozenset[str]] = frozenset({GRADIENT, PARAMETER, OPTION, OPTIMIZER_STATE})
    statistics: ClassVar[frozenset[str]] = frozenset({"max", "min"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._owners = ParameterNumbers()
        self._kind = arrays.series.column(np.int8, -1, of=lambda s: _place(s, _KINDS))
        self._source = arrays.series.column(np.int8, -1, of=lambda s: _place(s, _SOURCES))
        self._owner = arrays.series.column(np.int64, -1, of=self._owner_of)
        self._options = RecordedOptions(arrays)
        # By parameter: largest magnitudes and elements of its sources in this step, and those of the last gradient.
        self._now, self._numels, self._last = ByParameter(len(_SOURCES)), ByParameter(len(_SOURCES)), ByParameter(2)
        self._states: dict[int, _Sampled] = {}
        self._residuals = Residuals(arrays, BOUNDS, self.name)
        self._step = -1
        self._unknown = self._follows = False

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the states that break their relation; a step may come in several records."""
        record = observed.record
        if record.step != self._step:
            self._advance(record.step)
        self._options.note(observed)
        self._unknown |= self._options.skips(observed) or self._options.updates_again(observed)
        if not (self._kind.values >= 0).any():
            return []  # no optimizer keeps such a state
        peaks = np.maximum(np.abs(record.values[:, MAX]), np.abs(record.values[:, MIN]))
        self._note(observed, peaks)
        rows = rows_where(self._kind.values[record.where] >= 0)
        ids = record.ids[rows].astype(np.int64)
        if record.examined:  # read at another moment of the step
            for series_id in ids.tolist():
                self._states.pop(series_id, None)
            return []
        for series_id, numel in zip(ids.tolist(), observed.numel[rows].tolist(), strict=True):
            self._states.setdefault(series_id, _Sampled(np.nan, numel, -1)).numel = numel
        findings = self._compare(ids, rows, peaks[rows])
        for series_id, peak in zip(ids.tolist(), peaks[rows].tolist(), strict=True):
            known = self._states[series_id]
            known.peak, known.step = peak, record.step
        return findings

    def _note(self, observed: Observed, peaks: Floats) -> None:
        """Take in the largest magnitudes and the elements of a record's gradients, weights and squares."""
        record = observed.record
        sources = self._source.values[record.where]
        for source in range(len(_SOURCES)):
            rows = rows_where(sources == source)
            owners = self._owner.values[record.ids[rows]]
            for kept, values in ((self._now, peaks), (self._numels, observed.numel)):
                known = kept.get(owners)
                known[source] = values[rows]
                kept.set(owners, known)

    def _compare(self, ids: Integers, rows: Integers, peaks: Floats) -> list[Finding]:
        expected = np.asarray([self._expected(series_id) for series_id in ids.tolist()])
        relations = np.asarray([self._relation(series_id) for series_id in ids.tolist()])
        with np.errstate(invalid="ignore", divide="ignore"):
            apart = (peaks - expected) / np.maximum(peaks, expected)
        residuals = np.where(relations == EXACTLY, np.abs(apart), np.where(relations == AT_LEAST, -apart, apart))
        residuals = np.where(np.isnan(apart), np.nan, np.maximum(residuals, 0.0))
        return self._residuals.judge("max", ids, rows, peaks, expected, residuals)

    def _relation(self, series_id: int) -> int:
        """Return how a state compares; with amsgrad exactly, where no square was missed since the last sample."""
        kind = _KINDS[self._kind.values[series_id]]
        fresh = self._follows and self._states[series_id].step == self._step - 1
        exactly = fresh and not np.isnan(self._source_of(series_id, _SQUARES))
        return EXACTLY if kind == "max_exp_avg_sq" and exactly else RELATIONS[kind]

    def _source_of(self, series_id: int, source: int) -> float:
        """Return a source's largest magnitude in this step; NaN where it is not known, or of another part."""
        owner = self._owner.values[[series_id]]
        same = self._numels.get(owner)[source, 0] == self._states[series_id].numel
        return float(self._now.get(owner)[source, 0]) if same else np.nan

    def _expected(self, series_id: int) -> float:
        """Return the largest magnitude that a state has or may have; NaN where that is not known."""
        kind = _KINDS[self._kind.values[series_id]]
        if kind == "ax":
            averages = self._options.one("t0") < LATEST_AVERAGE  # from step t0 on it is no longer the weight
            return np.nan if averages else self._source_of(series_id, _WEIGHT)
        if kind == "prev":
            peak, numel = self._last.get(self._owner.values[[series_id]])[:, 0]
            return float(peak) if numel == self._states[series_id].numel else np.nan
        peak = self._states[series_id].peak
        return float(np.fmax(peak, self._source_of(series_id, _SQUARES))) if kind == "max_exp_avg_sq" else peak

    def _advance(self, step: int) -> None:
        """Take the updates of the step before into account."""
        self._follows = step == self._step + 1 and not self._unknown
        if step < self._step:  # the run went back
            self._states.clear()
        decay, eps = self._options.one("betas.1"), self._options.one("eps")
        decays_inside = self._options.largest("weight_decay") != 0
        for series_id, known in self._states.items():
            if _KINDS[self._kind.values[series_id]] == "exp_inf":
                gradient = self._source_of(series_id, _GRADIENT) if self._follows and not decays_inside else np.nan
                known.peak = float(np.maximum(decay * known.peak, gradient + eps))
        last = self._now.values[_GRADIENT] if self._follows else np.full(self._now.values.shape[1], np.nan)
        self._last.set(np.arange(len(last)), np.stack((last, self._numels.values[_GRADIENT, : len(last)])))
        self._now.clear()
        self._numels.clear()
        self._step, self._unknown = step, False

    def _owner_of(self, series: Series) -> int:
        return self._owners.of(series) if max(_place(series, _KINDS), _place(series, _SOURCES)) >= 0 else -1

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the largest magnitude, and what it should be or may be."""
        return (
            f"the largest magnitude of {subject} is {anomaly.value:.6g} at step {anomaly.step}; its own past, "
            f"gradients and weights give {anomaly.expected:.6g}"
        )


def _place(series: Series, names: tuple[str, ...]) -> int:
    whole = not (series.scalar or series.micro_step or (series.index and series.quantity not in {GRADIENT, PARAMETER}))
    return names.index(series.quantity) if whole and series.quantity in names else -1
