"""A first moment whose norm does not follow from its own past, the gradient, and the angle between the two."""

from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.optimizer.recorded_options import ByParameter, ParameterNumbers, RecordedOptions
from trainsentry.anomaly.rules.optimizer.residuals import ResidualBounds, Residuals
from trainsentry.anomaly.rules.optimizer.state_recurrences import RECURRENCES, ways_of
from trainsentry.anomaly.rules.rule import OPTIMIZER_STATE, Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, Integers, SeriesArrays, rows_where
from trainsentry.collectors.series import GRADIENT, MOMENT_DIRECTION, OPTION, Series
from trainsentry.collectors.statistics import NORM, VALUE

BOUNDS: Final = ResidualBounds(least=1e-4, largest=0.02, learned=4)
"""Shares of the norm: float32 leaves 1e-7, a gradient that is rounded more. With decay inside the gradient a norm does
not follow at all, and not every optimizer keeps its moment so: four samples must have followed."""

MOMENTS: Final = ("exp_avg", "momentum_buffer")
"""First moments, by the names of `RECURRENCES`."""

_KINDS: Final = {name: kind for kind, name in enumerate(MOMENTS)}
_GRADIENT, _COSINE, _NORM = range(3)
_LINES: Final = {GRADIENT: _GRADIENT, MOMENT_DIRECTION: _COSINE, **dict.fromkeys(MOMENTS, _NORM)}


class NormRecurrenceRule(Rule):
    """Follows the norm of each first moment from step to step, where state and `alignment` are sampled at every step.

    With m' = β·m + γ·g the square of the norm is β²·‖m‖² + 2βγ·‖m‖·‖g‖·cos + γ²·‖g‖², and all of that is read. So a
    moment that was swapped with another, or is stale, shows where its mean says nothing.
    """

    name: ClassVar[str] = "norm_recurrence"
    quantities: ClassVar[frozenset[str]] = frozenset({GRADIENT, MOMENT_DIRECTION, OPTION, OPTIMIZER_STATE})
    statistics: ClassVar[frozenset[str]] = frozenset({"norm"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._owners = ParameterNumbers()
        self._line = arrays.series.column(np.int8, -1, of=_line_of)
        self._owner = arrays.series.column(np.int64, -1, of=lambda s: self._owners.of(s) if _line_of(s) >= 0 else -1)
        self._has_cosines = arrays.series.column(bool, of=lambda s: s.quantity == MOMENT_DIRECTION)
        self._options = RecordedOptions(arrays)
        # By parameter: the norms of gradient and moment and their cosine in this step; the norm expected next, and that
        # of both parts together.
        self._read, self._expected = ByParameter(len(_MEASURED)), ByParameter(2)
        self._kind = arrays.series.column(np.int8, -1, of=lambda s: _KINDS.get(s.quantity, -1))
        self._kinds = ByParameter(1)
        self._residuals = Residuals(arrays, BOUNDS, self.name)
        self._step = -1
        self._skipped = self._unknown = False

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the moments whose norm does not follow; a step may come in several records."""
        record = observed.record
        if record.step != self._step:
            self._advance(record.step)
        self._options.note(observed)
        self._skipped |= self._options.skips(observed)
        self._unknown |= self._options.updates_again(observed)
        if not self._has_cosines.values.any():
            return []
        lines = self._line.values[record.where]
        for line, column in enumerate(_MEASURED):
            rows = rows_where(lines == line)
            owners = self._owner.values[record.ids[rows]]
            read = self._read.get(owners)
            read[line] = record.values[rows, column]
            self._read.set(owners, read)
        rows = rows_where(lines == _NORM)
        ids = record.ids[rows]
        self._kinds.set(self._owner.values[ids], self._kind.values[ids][None].astype(float))
        return self._compare(observed, rows) if len(rows) and not record.examined else []

    def _compare(self, observed: Observed, rows: Integers) -> list[Finding]:
        """Compare norms with what was expected; learn the residuals of those that follow."""
        ids = observed.record.ids[rows].astype(np.int64)
        owners = self._owner.values[ids]
        norms, (expected, parts) = observed.record.values[rows, NORM], self._expected.get(owners)
        larger = np.maximum(norms, expected)
        with np.errstate(invalid="ignore", divide="ignore"):
            # Where the parts cancel, what rounds in their squares is as large as what is left of them.
            residuals: Floats = np.abs(norms - expected) * larger / np.maximum(parts, larger) ** 2
        return self._residuals.judge("norm", ids, rows, norms, expected, residuals)

    def _advance(self, step: int) -> None:
        """Predict the norms at the next step from what was read in the one before."""
        unknown = self._unknown or (self._skipped and self._options.several)
        consecutive, skipped = step == self._step + 1 and not unknown, self._skipped
        self._step, self._skipped, self._unknown = step, False, False
        read = self._read.values
        self._expected.grow(read.shape[1])
        expected = self._expected.values
        expected[:] = np.nan
        if consecutive and read.size:
            gradient, cosine, norm = read
            found, parts = np.full(len(norm), np.nan), norm.copy()
            kinds = self._kinds.get(np.arange(len(norm)))[0]
            for kind, name in enumerate(MOMENTS):
                ways = {(way.decay, way.gain, way.sign) for way in ways_of(RECURRENCES[name], self._options)}
                if len(ways) == 1:  # of several, it is not known which one a parameter has
                    owners = rows_where(kinds == kind)
                    decay, gain, sign = ways.pop()
                    found[owners] = _norms_after(gradient[owners], cosine[owners], norm[owners], decay, gain, sign)
                    parts[owners] = decay * norm[owners] + gain * gradient[owners]
            expected[1, : len(parts)] = np.where(np.isnan(parts), norm, parts)
            expected[0, : len(found)] = np.where(np.isnan(gradient) | skipped, norm, found)
        self._read.clear()

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the norm, and what the recurrence gives."""
        return (
            f"the norm of {subject} is {anomaly.value:.6g} at step {anomaly.step}; its own past, the gradient and the "
            f"angle between them give {anomaly.expected:.6g}"
        )


def _norms_after(gradient: Floats, cosine: Floats, norm: Floats, decay: float, gain: float, sign: float) -> Floats:
    """Return the norms of moments after an update; a moment of zero has no angle with anything."""
    mixed = np.where((norm == 0) | (gradient == 0), 0.0, sign * cosine) * norm * gradient
    square = (decay * norm) ** 2 + 2 * decay * gain * mixed + (gain * gradient) ** 2
    found: Floats = np.sqrt(np.maximum(square, 0.0))
    return found


_MEASURED: Final = (NORM, VALUE, NORM)


def _line_of(series: Series) -> int:
    whole = not (series.scalar or series.micro_step) and (series.quantity not in MOMENTS or not series.index)
    return _LINES.get(series.quantity, -1) if whole else -1
