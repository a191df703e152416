"""An update of SGD that does not follow from the momentum, the gradient and the learning rate."""

from typing import ClassVar, Final

import numpy as np

from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.anomaly.features import FEW
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.optimizer.recorded_options import ByParameter, ParameterNumbers, RecordedOptions
from trainsentry.anomaly.rules.optimizer.residuals import ResidualBounds, Residuals, nearest
from trainsentry.anomaly.rules.rule import OPTIMIZER_STATE, Observed, Rule
from trainsentry.anomaly.series_arrays import Floats, Integers, SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import GRADIENT, OPTION, PARAMETER, UPDATE, Series
from trainsentry.collectors.statistics import INFS, MAX, MEAN, MIN, NANS, NORM

BOUNDS: Final = ResidualBounds(least=1e-3, largest=0.05, learned=3)
"""Shares of the update's root mean square. An update is a difference of weights, so that weights in float32 leave 1e-5,
and more where they are rounded. A loop may rescale what the optimizer does, so three samples must have followed."""

ROUNDING: Final = 2.0**-23
"""Share of a weight's root mean square, over the root of its elements, by which float32 moves the mean of its update:
four deviations of what single elements are rounded by. It hides the update of a gain that hardly moves. An update of
less than such a share rounds all elements alike, to nothing or to one unit, so that nothing is lost in their mean."""

EQUAL: Final = 1e-2
"""Range of a weight's elements, as a share of their root mean square, within which they are rounded alike, and nothing
is lost in their mean: the gains of a norm that decay has moved by some units in the last place."""

MOMENTUM: Final = "momentum_buffer"
_PARTS: Final = (GRADIENT, PARAMETER, MOMENTUM)


class LinearUpdateRule(Rule):
    """Compares the mean of each update with −rate · (momentum · buffer + gradient), which are all read in its step.

    The update of SGD is linear in its tensors, so that it holds for their means (Sutskever et al., "On the importance
    of initialization and momentum", 2013; torch.optim.SGD). The group of a parameter is not known, so that each group's
    options are tried. Other optimizers' updates do not follow, and are not judged.
    """

    name: ClassVar[str] = "linear_update"
    quantities: ClassVar[frozenset[str]] = frozenset({GRADIENT, PARAMETER, UPDATE, OPTION, OPTIMIZER_STATE})
    statistics: ClassVar[frozenset[str]] = frozenset({"mean", "norm"})

    def __init__(self, arrays: SeriesArrays) -> None:
        self._owners = ParameterNumbers()
        self._part = arrays.series.column(np.int8, -1, of=_part_of)
        self._update_of = arrays.series.column(bool, of=lambda s: s.quantity == UPDATE and not s.micro_step)
        self._owner = arrays.series.column(np.int64, -1, of=self._owner_of)
        self._options = RecordedOptions(arrays)
        self._means, self._sizes = ByParameter(len(_PARTS)), ByParameter(2)  # and what rounding moves means by
        self._residuals = Residuals(arrays, BOUNDS, self.name)
        self._step = -1
        self._skipped = False

    def judge(self, observed: Observed) -> list[Finding]:
        """Return the updates that do not follow; a step may come in several records."""
        record = observed.record
        if record.step != self._step:
            self._step, self._skipped = record.step, False
            self._means.clear()
        self._options.note(observed)
        self._skipped |= self._options.skips(observed)
        if not self._options.linear_groups():
            return []
        parts = self._part.values[record.where]
        for part in range(len(_PARTS)):
            rows = rows_where(parts == part)
            if len(rows):
                means = self._means.get(self._owner.values[record.ids[rows]])
                bad = (record.values[rows][:, [NANS, INFS]] > 0).any(axis=1)
                means[part] = np.where(bad, np.nan, record.values[rows, MEAN])
                self._means.set(self._owner.values[record.ids[rows]], means)
            if len(rows) and _PARTS[part] == PARAMETER:
                self._sizes.set(self._owner.values[record.ids[rows]], _rounded_by(record, rows, observed.numel))
        rows = rows_where(self._update_of.values[record.where] & (observed.numel >= FEW))
        return self._compare(observed, rows) if len(rows) and not self._skipped else []

    def _compare(self, observed: Observed, rows: Integers) -> list[Finding]:
        """Compare updates with what follows; learn the residuals of those that do."""
        record, ids = observed.record, observed.record.ids[rows].astype(np.int64)
        means = record.values[rows, MEAN]
        rms = record.values[rows, NORM] / np.sqrt(observed.numel[rows])
        expected = self._expected(self._owner.values[ids])
        if not len(expected):
            return []
        expected, residuals = nearest(expected, means, rms)
        rounding, unit = np.nan_to_num(self._sizes.get(self._owner.values[ids]))
        with np.errstate(divide="ignore", invalid="ignore"):
            rounding = np.where(rms <= unit, unit, rounding)
            residuals = np.where(np.abs(means - expected) <= rounding, 0.0, residuals)
        return self._residuals.judge("mean", ids, rows, means, expected, residuals)

    def _expected(self, owners: Integers) -> Floats:
        """Return the mean of each update by the options of each group of SGD, shape (groups, n)."""
        gradient, weight, buffer = self._means.get(owners)
        found = []
        for group in self._options.linear_groups():
            pulled = (-1.0 if group.get("maximize") else 1.0) * gradient + group.get("weight_decay", 0.0) * weight
            momentum = group["momentum"]
            # The buffer begins as the first gradient, whole.
            begun = momentum * buffer + (1 - group.get("dampening", 0.0)) * pulled
            moved = np.where(np.isnan(buffer), pulled, begun) if momentum else pulled
            found.append(-group["lr"] * (pulled + momentum * moved if group.get("nesterov") else moved))
        return np.stack(found) if found else np.zeros((0, len(owners)))

    def _owner_of(self, series: Series) -> int:
        return self._owners.of(series) if series.quantity in {*_PARTS, UPDATE} and not series.scalar else -1

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the mean, and what the optimizer's options give."""
        return (
            f"the mean of {subject} is {anomaly.value:.6g} at step {anomaly.step}; gradient, momentum and learning "
            f"rate give {anomaly.expected:.6g}"
        )


def _rounded_by(record: StepRecord, rows: Integers, numel: Floats) -> Floats:
    """Return by how much rounding moves the mean of an update of weights, and single elements, shape (2, n)."""
    size = record.values[rows, NORM] / np.sqrt(numel[rows])
    alike = record.values[rows, MAX] - record.values[rows, MIN] <= EQUAL * size
    found: Floats = ROUNDING * np.stack((size / np.where(alike, 1.0, np.sqrt(numel[rows])), size))
    return found


def _part_of(series: Series) -> int:
    return _PARTS.index(series.quantity) if series.quantity in _PARTS and not series.micro_step else -1
