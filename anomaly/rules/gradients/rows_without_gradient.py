"""A table of which a part gets no gradient any more: it is tied to nothing any longer, or something masks it."""

from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import SHIFT, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.rules.zero_pattern import CONFIRMED, FEWEST, MOST_AT_ONCE, SAMPLES, SPAN
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_INPUT, GRADIENT
from trainsentry.collectors.statistics import NORM, ZEROS

SCORE: Final = 50.0
"""Deviations: above every spike of healthy runs, below the rules whose bounds hold for any run."""

SHARE: Final = 0.1
"""Share of zeros that counts: a rectified unit that falls silent, as some do, takes a row of a gradient with it."""

EQUAL: Final = 1.5
"""Largest quotient of the shares of the samples that confirm it: which rows get a gradient depends on the batch."""


@dataclass(slots=True)
class _Candidate:
    """A gradient that has zeros since a step, its last sample without any, and the shares of zeros since."""

    since: int
    last_clean: int
    shares: list[float] = field(default_factory=list)


class RowsWithoutGradientRule(Rule):
    """Notes of each weight's gradient whether an element was ever zero; one that had none and then many is told.

    A gradient that has had zeros otherwise is followed no more. Where inputs are smaller than ever, some positions have
    no gradient by right.
    """

    name: ClassVar[str] = "rows_without_gradient"
    quantities: ClassVar[frozenset[str]] = frozenset({GRADIENT, ACTIVATION_INPUT})
    statistics: ClassVar[frozenset[str]] = frozenset({"zeros"})

    def __init__(self, arrays: SeriesArrays) -> None:
        series = arrays.series
        self._follows = series.column(bool, of=lambda s: s.quantity == GRADIENT)
        self._is_input = series.column(bool, of=lambda s: s.is_model_input)
        self._smallest, self._shrunk_at = series.column(np.float64, np.inf), -1
        self._first, self._newest = series.column(np.int64, -1), series.column(np.int64, -1)
        self._samples = series.column(np.int64)
        self._candidates: dict[int, _Candidate] = {}

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the gradients of which a part has been zero for long enough."""
        record, follows = observed.record, self._follows.values
        self._note_sizes(observed)
        rows = rows_where(follows[record.where] & ~observed.excused & (record.columns[NORM] > 0))
        if not len(rows):
            return []
        ids, zeros = record.ids[rows], record.columns[ZEROS, rows]
        self._first.values[ids[self._first.values[ids] < 0]] = record.step
        found = []
        waiting = np.isin(ids, list(self._candidates)) if self._candidates else False
        for place in rows_where((zeros > 0) | waiting).tolist():
            finding = self._take(observed, int(rows[place]), int(ids[place]), float(zeros[place]))
            found += [] if finding is None else [finding]
        self._samples.values[ids] += 1
        self._newest.values[ids] = record.step
        return found if len(found) <= max(1, MOST_AT_ONCE * len(rows)) else []

    def _note_sizes(self, observed: Observed) -> None:
        """Note when an input was smaller than ever before."""
        rows = rows_where(self._is_input.values[observed.record.where])
        ids, numel = observed.record.ids[rows], observed.numel[rows]
        if (numel < self._smallest.values[ids]).any():
            self._shrunk_at = observed.record.step
            self._smallest.values[ids] = np.minimum(self._smallest.values[ids], numel)

    def _take(self, observed: Observed, row: int, series_id: int, share: float) -> Finding | None:
        """Take in a sample with zeros, or one of a candidate; return what its third one confirms."""
        step, follows = observed.record.step, self._follows.values
        candidate = self._candidates.get(series_id)
        if candidate is None:
            samples, first = self._samples.values[series_id], self._first.values[series_id]
            if samples < SAMPLES or step - first < SPAN:
                follows[series_id] = False
                return None
            candidate = self._candidates[series_id] = _Candidate(step, int(self._newest.values[series_id]))
        shares = candidate.shares
        shares.append(share)
        is_part = share >= SHARE and share * observed.numel[row] >= FEWEST and max(shares) <= EQUAL * min(shares)
        if is_part and len(shares) < CONFIRMED:
            return None
        del self._candidates[series_id]
        follows[series_id] = False
        if not is_part or self._shrunk_at >= candidate.since:
            return None
        detail = (SHIFT, self.name, "zeros", share, 0.0, SCORE)
        return Finding(series_id, row, *detail, step=candidate.since, last_clean=candidate.last_clean)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the share of zeros."""
        return f"{anomaly.value:.3g} of the elements of {subject} are zero from step {anomaly.step} on; none was before"
