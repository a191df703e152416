"""Inputs of the model that drift away from those before, are partly zero now and then, or have a size that none had."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import SHIFT, Anomaly
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.data.data_dependence import DataDependence, correlation_with_next
from trainsentry.anomaly.rules.rule import Observed, Rule
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_INPUT
from trainsentry.collectors.statistics import NORM, ZEROS

SCORE: Final = 50.0
"""Deviations: above every spike of healthy runs, below the rules that are certain of a value by itself."""

PAST, BETWEEN, NEWEST = 28, 16, 4
"""Samples that give the usual range, that are passed over, and that must lie beyond it: a range that ended sixteen
samples ago does not follow what changes by some percent a step."""

LEAST_WIDTH: Final = 0.05
LEAST_DRIFT: Final = math.log(1.25)
"""Least width of a range, and least distance from it, in log units: batches of few elements swing by some percent."""

WIDTHS: Final = 1.0
"""Least distance from the range, in its widths."""

DEPENDENT_IN_PAST: Final = 0.3
"""Correlation of a sample with the next one, in the usual range, from which a range says too little of what may come: a
policy's observations change with it. Of 28 independent samples one range in twenty has so much."""

LEAP: Final = 0.75
"""Share of the distance that lies between two samples where it is a leap, which the levels tell at once."""

PARTLY: Final = 0.1
WITHOUT: Final = 48
WINDOW: Final = 16
TIMES: Final = 3
FEWEST: Final = 256
"""Share of zeros of a batch that counts; samples without a zero from the first one on; how many of so many samples must
have them: one of several workers gives them, or one of the files; and the elements of a batch, of which a small one, as
of noise levels, has zeros by chance. Random erasing blanks less."""

SETTLED: Final = 16
RESIZED: Final = 1.5
"""Steps before a size that none had is a suspicion, and the factor by which it must exceed, or fall below, all of them:
sizes vary with the length of what is read, and now and then one is a little longer than any before."""


DIMENSION: Final = "dimension_"
"""Beginning of the statistic of a dimension, which has its number."""


@dataclass
class _Past:
    """The newest samples of an input, the log of its root mean square with the step, and its sizes so far."""

    samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=PAST + BETWEEN + NEWEST))
    smallest: float = math.inf
    largest: float = 0.0
    shape: list[tuple[int, int]] = field(default_factory=list)  # the least and the largest of each dimension
    steps: int = 0
    step: int = -1
    without_zeros: int = 0
    partly_zero: deque[int] | None = field(default_factory=deque)

    def take_shape(self, shape: Sequence[int]) -> None:
        """Take in a shape; one of another number of dimensions begins anew."""
        known = self.shape if len(self.shape) == len(shape) else [(n, n) for n in shape]
        self.shape = [(min(low, n), max(high, n)) for n, (low, high) in zip(shape, known, strict=True)]


def _shape_of(observed: Observed, row: int) -> tuple[int, ...]:
    shape: tuple[int, ...] = observed.table.layouts[observed.record.layouts[row]].shape
    return shape


class InputDriftRule(Rule):
    """Compares the root mean square of an input's elements with a range that ended some steps ago.

    Data do not learn, so what leaves that range step by step is something in the pipeline: a gain that fades, a buffer
    that runs down. A new size alone, or length of a dimension, is a suspicion: whatever alarms then has it as its first
    suspect.
    """

    name: ClassVar[str] = "input_drift"
    quantities: ClassVar[frozenset[str]] = frozenset({ACTIVATION_INPUT})
    statistics: ClassVar[frozenset[str]] = frozenset({"norm", "zeros"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_input = arrays.series.column(bool, of=lambda s: s.is_model_input)
        self._is_float = arrays.layouts.column(bool, of=lambda layout: "float" in layout.dtype)
        self._data = arrays.shared(DataDependence)
        self._past: dict[int, _Past] = {}

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the inputs that have drifted, and suspicions of those that have another size."""
        record = observed.record
        self._data.note(observed)
        found = []
        for row in rows_where(self._is_input.values[record.where]).tolist():
            series_id, numel = int(record.ids[row]), float(observed.numel[row])
            past = self._past.setdefault(series_id, _Past())
            if record.step < past.step:  # the run has gone back
                past = self._past[series_id] = _Past()
            past.step = record.step
            if past.steps >= SETTLED:
                found += self._resized(observed, series_id, row, past)
            if not past.smallest <= numel <= past.largest:
                past.smallest, past.largest = min(past.smallest, numel), max(past.largest, numel)
                past.samples.clear()
            past.take_shape(_shape_of(observed, row))
            past.steps += 1
            if not self._is_float.values[record.layouts[row]]:  # the numbers of tokens and classes are no sizes
                continue
            if numel >= FEWEST:
                found += self._partly_zero(series_id, row, float(record.values[row, ZEROS]), record.step, past)
            root_mean_square = float(record.values[row, NORM]) / math.sqrt(max(numel, 1.0))
            if 0 < root_mean_square < math.inf:
                past.samples.append((math.log(root_mean_square), record.step))
                found += self._drifted(series_id, row, past)
        return found

    def _resized(self, observed: Observed, series_id: int, row: int, past: _Past) -> list[Finding]:
        """Return the suspicion of an input that is larger or smaller than ever, or longer in one dimension."""
        shape, numel = _shape_of(observed, row), float(observed.numel[row])
        if not past.smallest / RESIZED <= numel <= past.largest * RESIZED:
            usual = past.smallest if numel < past.smallest else past.largest
            return [Finding(series_id, row, SHIFT, self.name, "size", numel, usual, SCORE, alarm=False)]
        if len(shape) != len(past.shape):
            return []
        for place in range(len(shape) - 1, -1, -1):  # the batch comes last: it is shorter where sequences are longer
            length, (least, largest) = shape[place], past.shape[place]
            if not least / RESIZED <= length <= largest * RESIZED:
                bound, statistic = least if length < least else largest, f"{DIMENSION}{place}"
                detail = (SHIFT, self.name, statistic, float(length), float(bound), SCORE)
                return [Finding(series_id, row, *detail, alarm=False)]
        return []

    def _partly_zero(self, series_id: int, row: int, share: float, step: int, past: _Past) -> list[Finding]:
        """Follow the batches that are partly zero, where none was; tell them, once, when there are several."""
        times = past.partly_zero
        if times is None:
            return []
        while times and times[0] <= step - WINDOW:
            times.popleft()
        if share == 0:
            past.without_zeros += 1
        elif past.without_zeros < WITHOUT:
            past.partly_zero = None  # by design
        elif share >= PARTLY:
            times.append(step)
        if past.partly_zero is None or len(times) < TIMES:
            return []
        past.partly_zero = None
        detail = (SHIFT, self.name, "zeros", share, 0.0, SCORE)
        return [Finding(series_id, row, *detail, step=times[0], last_clean=times[0] - 1)]

    def _drifted(self, series_id: int, row: int, past: _Past) -> list[Finding]:
        if len(past.samples) < PAST + BETWEEN + NEWEST:
            return []
        values = np.array([value for value, _ in past.samples])
        low, high, newest = values[:PAST].min(), values[:PAST].max(), values[-NEWEST:]
        distance = max(newest.min() - high, low - newest.max())
        if distance < max(WIDTHS * max(high - low, LEAST_WIDTH), LEAST_DRIFT):
            return []
        after = values[PAST:]
        outside = (after > high) if newest[0] > high else (after < low)
        onset = len(outside) - int(np.argmin(outside[::-1])) if not outside.all() else 0
        step = past.samples[PAST + onset][1]
        is_leap = np.abs(np.diff(values[PAST - 1 :])).max() > LEAP * distance
        past.samples.clear()
        is_dependent = correlation_with_next(values[:PAST]) >= DEPENDENT_IN_PAST
        if is_leap or is_dependent or self._data.was_high(series_id, BETWEEN + NEWEST):  # a policy's observations are
            return []
        now, usual = math.exp(newest.mean()), math.exp(values[:PAST].mean())
        return [Finding(series_id, row, SHIFT, self.name, "norm", now, usual, SCORE, step=step, last_clean=step - 1)]

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the size, or how far the input has drifted."""
        if anomaly.statistic == "zeros":
            return (
                f"some batches of {subject} are partly zero since step {anomaly.step}, a share of {anomaly.value:.3g}; "
                "none was before"
            )
        if anomaly.statistic.startswith(DIMENSION):
            side = "shorter" if anomaly.value < anomaly.expected else "longer"
            which = f"dimension {anomaly.statistic.removeprefix(DIMENSION)} of {subject}"
            usual = f"{side} than the {anomaly.expected:.0f} of any step before"
            return f"{which} is {anomaly.value:.0f} long at step {anomaly.step}, {usual}"
        if anomaly.statistic == "size":
            side = "fewer" if anomaly.value < anomaly.expected else "more"
            return (
                f"{subject} has {anomaly.value:,.0f} elements at step {anomaly.step}, {side} than the "
                f"{anomaly.expected:,.0f} of any step before"
            )
        return (
            f"{subject} drifts away from step {anomaly.step} on: the root mean square of its elements is now "
            f"{anomaly.value:.3g}, usually {anomaly.expected:.3g}"
        )
