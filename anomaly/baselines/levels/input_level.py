"""Finds an input of the model that has another size from one step on, though its batches swing as far."""

import math
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from trainsentry.anomaly.anomaly import LEVEL_SHIFTS, SHIFT
from trainsentry.anomaly.baselines.levels.rank_test import NEW, OLD, first_above, is_another_level
from trainsentry.anomaly.finding import Finding
from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.series_arrays import SeriesArrays, rows_where
from trainsentry.collectors.statistics import INFS, NANS, NORM

LEAST_CHANGE: Final = math.log(1.25)
"""Least change of the root mean square between the medians, in logarithms; `input_drift` asks for the same."""

LEAST_DISTANCE: Final = 4.0
"""Least distance of the new batches from the old ones, in the widths of their swings. In healthy runs of 170 practices
it came to 3.4, of a policy whose observations change with it; faults of data lay at 4.5 and more."""

FAR_APART: Final = 3
"""Newest batches that must all lie on one side of as many of the oldest before a series is looked at: most do not."""

SCORE: Final = 50.0
"""Deviations: above every spike of healthy runs, below the rules that are certain of a value by itself."""


class InputLevel:
    """Compares the root mean squares of the newest batches with those before by the rank-sum test.

    Another tokenizer, or a normalisation that is lost, changes the model's inputs by less than single batches differ.
    People change their data too: it is an alarm where the loss is worse since, and else the suspect of what follows.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._is_input = arrays.series.column(bool, of=lambda s: s.is_model_input and not s.micro_step)
        self._known: dict[int, deque[tuple[int, float]]] = {}

    def reset(self) -> None:
        """Forget all batches, after a change that the user has declared."""
        self._known.clear()

    def judge(self, observed: Observed, is_worse_since: Callable[[int], bool]) -> list[Finding]:
        """Take in the inputs of a record; return those of another size, by the first step of the new size.

        `is_worse_since` says whether the loss is higher since a step.
        """
        record, found = observed.record, []
        for row in rows_where(self._is_input.values[record.where]).tolist():
            bad, numel = record.values[row, [NANS, INFS]].any(), max(float(observed.numel[row]), 1.0)
            root_mean_square = float(record.values[row, NORM]) / math.sqrt(numel)
            if bad or not 0 < root_mean_square < np.inf:
                continue  # what rules of their own tell
            series_id = int(record.ids[row])
            known = self._known.setdefault(series_id, deque(maxlen=OLD + NEW))
            if known and record.step <= known[-1][0]:
                known.clear()
            known.append((record.step, math.log(root_mean_square)))
            changed = self._changed(known)
            if changed is None:
                continue
            step, last_clean, now, usual = changed
            known.clear()
            detail = (SHIFT, LEVEL_SHIFTS, "rms", now, usual, SCORE, is_worse_since(step))
            found.append(Finding(series_id, row, *detail, step=step, last_clean=last_clean, passed_on=False))
        return found

    def _changed(self, known: deque[tuple[int, float]]) -> tuple[int, int, float, float] | None:
        """Return the step at which batches have changed, the one before, the size since then, and the usual one."""
        if len(known) < OLD + NEW:
            return None
        newest, oldest = ([known[i][1] for i in places] for places in (range(-FAR_APART, 0), range(FAR_APART)))
        sign = 1 if min(newest) > max(oldest) else -1 if max(newest) < min(oldest) else 0
        if not sign:
            return None
        sizes = sign * np.array([size for _, size in known])
        if not is_another_level(sizes, LEAST_CHANGE, LEAST_DISTANCE, falls=False):
            return None
        first = first_above(sizes)
        now, usual = (math.exp(sign * float(np.median(part))) for part in (sizes[OLD:], sizes[:OLD]))
        return known[first][0], known[first - 1][0], now, usual
