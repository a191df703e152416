"""Answers one series over a range of steps in a bounded number of points, without reading what is not asked for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.exporters.csv.format import TableFile
from trainsentry.exporters.csv.level_files import history_parts, levels_of
from trainsentry.exporters.csv.part_rows import numbers_of, of_name, rows_of_parts
from trainsentry.exporters.csv.table_parts import newest_part, parts_of, shape_of_table, thinned
from trainsentry.exporters.csv.table_rows import Ids, RowKeys
from trainsentry.exporters.files.foreign_files import Report

Values = npt.NDArray[np.float64]

MAX_POINTS: Final = 2000
"""Points of an answer: more than a screen is wide."""

ALL_BYTES: Final = 1 << 28
"""Bytes of CSV that are searched for a series at most: about a second. More than that is read in windows."""

ALL_ROWS: Final = 1_000_000
"""Rows of a series that are parsed at most, about two seconds."""

WINDOWS: Final = 600
"""Windows of a history that is too long to be read whole: as many places as a screen tells apart."""

MAX_MARKED: Final = 50
"""Steps, such as those of incidents, that are read in any case."""

ALL_STEPS: Final = range(1 << 53)


@dataclass(frozen=True)
class SeriesPoints:
    """A series' points by ascending step, and whether every recorded step was read (`whole`).

    If not, they have every extreme of buckets of so many sampled steps (`bucket`), or at 0 are a sample.
    `recorded` is the number of points that were read; fewer are kept, with the extremes of each bin.
    """

    steps: Ids
    values: Values
    recorded: int
    whole: bool
    bucket: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return the points as plain data: a value that is not finite is a text, as JSON has no such number."""
        shown = [float(f"{v:.7g}") if np.isfinite(v) else str(v) for v in self.values.tolist()]
        return {
            "steps": self.steps.tolist(),
            "values": shown,
            "recorded": self.recorded,
            "whole": self.whole,
            "bucket": self.bucket,
        }


def points_of(
    files: Sequence[TableFile],
    name: str,
    statistic: str,
    report: Report,
    *,
    stage: int | None = None,
    steps: range = ALL_STEPS,
    marked: Iterable[int] = (),
    shared_by: int = 1,
) -> SeriesPoints:
    """Return a statistic of a name (of one model chunk, if `stage` is given) at `steps`.

    Where there is more to read than takes a second, the extremes of the finest level that does not are read, and the
    steps around those `marked`. A table without levels is read in windows spread over the steps. An answer of several
    series is `shared_by` them.
    """
    shape = shape_of_table(files, report)  # None without a file
    numbers = numbers_of(files[0].table, shape.header, statistic) if shape is not None else ()
    if shape is None or not numbers:
        return _points([], whole=True)
    allowed = min(ALL_BYTES, ALL_ROWS * shape.step_bytes) // max(shared_by, 1)
    history = history_parts(files, levels_of(files), steps, allowed, report)
    bucket = 0 if history is None else history.width
    whole = bucket == 1
    if history is not None:
        parts = list(history.parts)
    else:
        every = parts_of(files, steps, report)
        parts, _ = thinned(every, allowed, 2 * shape.step_bytes, max(WINDOWS // max(shared_by, 1), 60))
        newest_steps = newest_part(every, 2 * shape.step_bytes)
        parts += [newest_steps] if newest_steps is not None else []
    if not whole:
        for step in sorted(set(marked))[:MAX_MARKED]:
            if step in steps:
                parts += parts_of(files, range(max(step - 2, 0), step + 3), report)
    keys = RowKeys()
    found: list[tuple[int, Ids, Values]] = []
    for rows, at in rows_of_parts(parts, keys, numbers, report, name):
        if numbers[0] not in rows.numbers:
            continue  # an earlier start recorded other statistics
        kept, at_steps = of_name(rows, at, keys, name, stage)
        inside = (at_steps >= steps.start) & (at_steps < steps.stop)
        column = kept.values[inside, kept.numbers.index(numbers[0])]
        found.append((rows.restart, at_steps[inside], column))
    return replace(_points(found, whole=whole), bucket=bucket)


def _points(found: Sequence[tuple[int, Ids, Values]], *, whole: bool) -> SeriesPoints:
    """Join the points of all starts of a run: where a later start covers steps, an earlier one's points go."""
    steps, values = np.zeros(0, np.int64), np.zeros(0)
    for restart in sorted({restart for restart, at, _ in found if len(at)}):
        new_steps = np.concatenate([at for start, at, _ in found if start == restart])
        new_values = np.concatenate([column for start, _, column in found if start == restart])
        outside = (steps < new_steps.min()) | (steps > new_steps.max())
        steps, values = np.concatenate([steps[outside], new_steps]), np.concatenate([values[outside], new_values])
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    recorded = len(steps)
    if not whole and recorded > 1:  # a marked step may lie in a window too
        again = (np.diff(steps) == 0) & ((np.diff(values) == 0) | np.isnan(values[1:]))
        steps, values = steps[np.r_[True, ~again]], values[np.r_[True, ~again]]
    kept = kept_points(steps, values, MAX_POINTS)
    return SeriesPoints(steps[kept], values[kept], recorded, whole)


def kept_points(steps: Ids, values: Values, most: int) -> npt.NDArray[np.intp]:
    """Return which of many points to show: of each bin the lowest, the highest, and the first that is not finite.

    >>> kept_points(np.arange(7), np.array([0, 1, 9, 1, 0, 1, 1.0]), 6).tolist()
    [0, 2, 3, 4, 6]
    """
    if len(steps) <= most:
        return np.arange(len(steps))
    bins = max(most // 3, 1)
    span = max(int(steps[-1] - steps[0]), 1)
    bin_of = np.minimum((steps - steps[0]) * bins // span, bins - 1)
    finite = np.isfinite(values)
    kept = {0, len(steps) - 1}
    for low in (True, False):
        ranked = np.where(finite, values if low else -values, np.inf)
        order = np.lexsort((ranked, bin_of))
        first = order[np.r_[True, np.diff(bin_of[order]) > 0]]
        kept.update(first[finite[first]].tolist())
    bad = np.flatnonzero(~finite)
    if len(bad):
        kept.update(bad[np.r_[True, np.diff(bin_of[bad]) > 0]].tolist())
    return np.asarray(sorted(kept), np.intp)
