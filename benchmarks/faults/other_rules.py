"""Rules of other tools, on the very rows that a run has recorded.

`msprobe`: |x| > 1.5 × the average of |x| so far (weight 0.99), for norm and mean, or NaN; the first suspect is the
first by step, then stage (weights and calls, activations, gradients, optimizer state), then the order in which it was
seen. `nan`: a NaN or Inf in the loss or in a gradient. `6 sigma`: a norm more than six deviations from the mean of its
last 128 values. `5 times`: a norm above five times the mean of all its values. The last two name what is furthest out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import INFS, MEAN, NANS, NORM, VALUE
from trainsentry.monitor.offline.history import rank_number, records_of

STAGES = {"activation_input": 0, "activation_output": 0, "exp_avg": 2, "exp_avg_sq": 2, "momentum_buffer": 2}
BACKWARD = ("activation_grad_input", "activation_grad_output", "gradient", "gradient_unreduced")
LEAST_VALUES = 16


@dataclass
class Row:
    """A row that a rule flags; the smallest `key` is the first suspect."""

    step: int
    key: tuple[float, ...]
    name: str
    quantity: str
    rank: int


class Msprobe:
    """AnomalyTurbulence(0.5) and AnomalyNan, with its ranking."""

    def __init__(self) -> None:
        self.mean = np.full((0, 2), np.nan)

    def flagged(self, record: StepRecord, table: SeriesTable) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Yield rows and their place in the ranking."""
        self.mean = _grown(self.mean, len(table.series))
        now = np.abs(record.values[:, [NORM, MEAN]])
        before = self.mean[record.ids]
        first = np.isnan(before)
        with np.errstate(invalid="ignore"):
            odd = (now > 1.5 * before).any(axis=1) | (record.values[:, NANS] > 0)
        self.mean[record.ids] = np.where(first, now, 0.99 * before + 0.01 * now)
        for row in np.flatnonzero(odd).tolist():
            quantity = table.series[record.ids[row]].quantity
            stage = 1 if quantity in BACKWARD else STAGES.get(quantity, -1)
            yield row, (stage, row)


class NotFinite:
    """A NaN or Inf in the loss or in a gradient."""

    def flagged(self, record: StepRecord, table: SeriesTable) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Yield rows in the order they were seen."""
        for row in np.flatnonzero(record.values[:, NANS] + record.values[:, INFS] > 0).tolist():
            if table.series[record.ids[row]].quantity in {"loss", "gradient"}:
                yield row, (row,)


class Window:
    """A norm that is far from the mean of its last values, in deviations or as a ratio."""

    def __init__(self, length: int, *, sigmas: float | None = None, times: float | None = None) -> None:
        self.length, self.sigmas, self.times = length, sigmas, times
        self.kept = np.zeros((0, length))
        self.count = np.zeros(0, int)

    def flagged(self, record: StepRecord, table: SeriesTable) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Yield rows, what is furthest out first."""
        more = len(table.series) - len(self.count)
        self.kept = np.concatenate([self.kept, np.full((more, self.length), np.nan)])
        self.count = np.append(self.count, np.zeros(more, int))
        ids = record.ids
        scalar = np.array([table.series[i].scalar for i in ids.tolist()])
        now = np.where(scalar, np.abs(record.values[:, VALUE]), record.values[:, NORM])
        ready = self.count[ids] >= LEAST_VALUES
        rows = np.flatnonzero(ready)
        past = self.kept[ids[rows]]
        mean = np.nanmean(past, axis=1) if len(rows) else np.zeros(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            if self.sigmas is not None:
                far = np.abs(now[rows] - mean) / np.nanstd(past, axis=1) if len(rows) else mean
                limit = self.sigmas
            else:
                far, limit = now[rows] / mean, self.times
        for at in np.flatnonzero(far > limit).tolist():
            yield int(rows[at]), (-float(far[at]),)
        self.kept[ids, self.count[ids] % self.length] = now
        self.count[ids] += 1


RULES = {
    "msprobe": Msprobe,
    "nan": NotFinite,
    "6 sigma": lambda: Window(128, sigmas=6.0),
    "5 times": lambda: Window(1024, times=5.0),
}


def verdicts(case: Any, family: str, out: Path, fault_step: int, *, faulty: bool) -> dict[str, dict[str, Any]]:
    """Return of each rule whether it flags the fault in time and names it, and at how many clean steps it flags."""
    rows: dict[str, list[Row]] = {name: [] for name in RULES}
    steps: set[int] = set()
    for directory in sorted(out.glob("rank*")):
        table, rules = SeriesTable(), {name: make() for name, make in RULES.items()}
        for record in records_of(directory, table, lambda *_: None):
            steps.add(record.step)
            for name, rule in rules.items():
                for row, key in rule.flagged(record, table):
                    series = table.series[record.ids[row]]
                    rank = rank_number(directory)
                    rows[name].append(Row(record.step, (record.step, *key), series.name, series.quantity, rank))
    silent = case.expect.silent or not faulty
    return {name: _verdict(case, family, found, steps, fault_step, silent=silent) for name, found in rows.items()}


def _verdict(
    case: Any, family: str, found: list[Row], steps: set[int], fault_step: int, *, silent: bool
) -> dict[str, Any]:
    clean = {s for s in steps if silent or s < fault_step}
    wrong = {row.step for row in found if row.step in clean}
    said: dict[str, Any] = {"clean_steps": len(clean), "false_steps": len(wrong)}
    if silent:
        return said
    late = [row for row in found if fault_step <= row.step <= fault_step + case.expect.within]
    said["detected"] = bool(late)
    first = min(late, key=lambda row: row.key, default=None)
    suspect = None if first is None else {"rank": first.rank, "quantity": first.quantity, "name": first.name}
    said["first_right"] = suspect is not None and case.expect.is_right(suspect, family)
    return said


def _grown(kept: Any, size: int) -> Any:
    return np.concatenate([kept, np.full((size - len(kept), kept.shape[1]), np.nan)])
