"""States of optimizers that are made of largest values, or of a last value: their extremes follow from what is read."""

from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import RECURRENCE, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.optimizer.recorded_options import ByParameter, ParameterNumbers, RecordedOptions
from trainsentry.anomaly.rules.optimizer.residuals import ResidualBounds, Residuals
from trainsentry.anomaly.rules.rule import OPTIMIZER_STATE, Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, Integers, SeriesArrays
from trainsentry.collectors.series import GRADIENT, OPTION, PARAMETER, Series
from trainsentry.collectors.statistics import MAX, MIN

SCORE: Final = 60.0
"""Deviations: above every spike of healthy runs, as these relations hold to rounding."""

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
        # By state series: its largest magnitude after the updates since it was sampled.
        self._carried: dict[int, float] = {}
        self._size: dict[int, int] = {}
        self._sampled: set[int] = set()  # in this step
        self._fresh: set[int] = set()  # in the step before
        self._residuals = Residuals(arrays, BOUNDS)
        self._step = -1
        self._unknown = False

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the states that break their relation; a step may come in several records."""
        record = observed.record
        if record.step != self._step:
            self._advance(record.step)
        self._options.note(observed)
        self._unknown |= self._options.skips(observed) or self._options.updates_again(observed)
        peaks = np.maximum(np.abs(record.values[:, MAX]), np.abs(record.values[:, MIN]))
        sources = self._source.values[record.where]
        for source in range(len(_SOURCES)):
            rows = np.flatnonzero(sources == source)
            owners = self._owner.values[record.ids[rows]]
            for kept, values in ((self._now, peaks), (self._numels, observed.numel)):
                known = kept.get(owners)
                known[source] = values[rows]
                kept.set(owners, known)
        rows = np.flatnonzero(self._kind.values[record.where] >= 0)
        if not len(rows):
            return []
        ids = record.ids[rows].astype(np.int64)
        if record.examined:  # read at another moment of the step
            self._carried.update(dict.fromkeys(ids.tolist(), np.nan))
            return []
        self._size.update(zip(ids.tolist(), observed.numel[rows].tolist(), strict=True))
        findings = self._compare(ids, rows, peaks[rows])
        self._sampled.update(ids.tolist())
        self._carried.update(zip(ids.tolist(), peaks[rows].tolist(), strict=True))
        return findings

    def _compare(self, ids: Integers, rows: Integers, peaks: Floats) -> list[Finding]:
        expected = np.asarray([self._expected(series_id) for series_id in ids.tolist()])
        relations = np.asarray([self._relation(series_id) for series_id in ids.tolist()])
        with np.errstate(invalid="ignore", divide="ignore"):
            apart = (peaks - expected) / np.maximum(peaks, expected)
        residuals = np.where(relations == EXACTLY, np.abs(apart), np.where(relations == AT_LEAST, -apart, apart))
        residuals = np.where(np.isnan(apart), np.nan, np.maximum(residuals, 0.0))
        return [
            Finding(
                int(ids[i]), int(rows[i]), RECURRENCE, self.name, "max", float(peaks[i]), float(expected[i]), SCORE,
                passed_on=False,
            )
            for i in self._residuals.wrong(ids, residuals).tolist()
        ]  # fmt: skip

    def _relation(self, series_id: int) -> int:
        """Return how a state compares; with amsgrad exactly, where no square was missed since the last sample."""
        kind = _KINDS[self._kind.values[series_id]]
        exactly = series_id in self._fresh and not np.isnan(self._source_of(series_id, _SQUARES))
        return EXACTLY if kind == "max_exp_avg_sq" and exactly else RELATIONS[kind]

    def _source_of(self, series_id: int, source: int) -> float:
        """Return a source's largest magnitude in this step; NaN where it is not known, or of another part."""
        owner = self._owner.values[[series_id]]
        same = self._numels.get(owner)[source, 0] == self._size.get(series_id)
        return float(self._now.get(owner)[source, 0]) if same else np.nan

    def _expected(self, series_id: int) -> float:
        """Return the largest magnitude that a state has or may have; NaN where that is not known."""
        kind = _KINDS[self._kind.values[series_id]]
        if kind == "ax":
            averages = self._options.one("t0") < LATEST_AVERAGE  # from step t0 on it is no longer the weight
            return np.nan if averages else self._source_of(series_id, _WEIGHT)
        if kind == "prev":
            peak, numel = self._last.get(self._owner.values[[series_id]])[:, 0]
            return float(peak) if numel == self._size.get(series_id) else np.nan
        carried = self._carried.get(series_id, np.nan)
        return float(np.fmax(carried, self._source_of(series_id, _SQUARES))) if kind == "max_exp_avg_sq" else carried

    def _advance(self, step: int) -> None:
        """Take the updates of the step before into account."""
        gradients, numels = self._now.values[_GRADIENT], self._numels.values[_GRADIENT]
        known = step == self._step + 1 and not self._unknown
        if step <= self._step:  # the run went back
            self._carried.clear()
        decay, eps = self._options.one("betas.1"), self._options.one("eps")
        for series_id, carried in self._carried.items():
            if _KINDS[self._kind.values[series_id]] == "exp_inf":
                peak = self._source_of(series_id, _GRADIENT)
                follows = known and self._options.largest("weight_decay") == 0
                self._carried[series_id] = float(np.maximum(decay * carried, peak + eps)) if follows else np.nan
        self._last.set(np.arange(len(gradients)), np.stack((gradients if known else gradients * np.nan, numels)))
        self._now.clear()
        self._numels.clear()
        self._fresh, self._sampled = self._sampled if known else set(), set()
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
