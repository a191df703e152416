"""Answers one series on many ranks: ranks by steps, and how far each rank is from the others."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.exporters.files.foreign_files import Report
from trainsentry.exporters.live.layer_map import COLUMNS, LARGEST_DEVIATION
from trainsentry.exporters.live.run_folder import tables_of
from trainsentry.exporters.live.series_points import ALL_STEPS, SeriesPoints, points_of

MAX_RANKS: Final = 64
"""Ranks of a view; of more, every n-th, and those that are asked for, as the ranks of suspects."""

LEAST_SPREAD: Final = 0.01
"""Spread of the ranks, as a share of their median, below which their differences are not believed: 1 %."""


def chosen_ranks(ranks: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Return at most MAX_RANKS ranks: those that are `wanted`, and others spread evenly.

    >>> chosen_ranks(range(1000), [17])[:4], len(chosen_ranks(range(1000), [17])) <= MAX_RANKS
    ([0, 16, 17, 32], True)
    """
    if len(ranks) <= MAX_RANKS:
        return list(ranks)
    first = [rank for rank in dict.fromkeys(wanted) if rank in ranks][: MAX_RANKS // 4]
    every = -(-len(ranks) // (MAX_RANKS - len(first)))
    return sorted({*first, *ranks[::every]})


def ranks_json(
    run: Path,
    ranks: Sequence[int],
    series: tuple[str, str, str],
    report: Report,
    steps: range = ALL_STEPS,
    marked: Sequence[int] = (),
) -> dict[str, Any]:
    """Return a series (table, name, statistic) on each rank as plain data; see `map_json` for the two matrices.

    A deviation compares a rank with the median of all ranks in the same column, in robust deviations of the ranks.
    """
    table, name, statistic = series
    found: list[tuple[int, SeriesPoints]] = []
    for rank in ranks:
        files = tables_of(run, str(rank)).get(table)
        if files:
            points = points_of(files, name, statistic, report, steps=steps, marked=marked, shared_by=len(ranks))
            if len(points.steps):
                found.append((rank, points))
    first = min((int(p.steps[0]) for _, p in found), default=0)
    last = max((int(p.steps[-1]) for _, p in found), default=-1)
    width = max(-(-(last - first + 1) // COLUMNS), 1)
    columns = (last - first) // width + 1 if found else 0
    values = np.full((len(found), columns), np.nan, np.float32)
    for row, (_, points) in enumerate(found):
        values[row] = _binned(points, first, width, columns)
    away = _from_others(values)
    codes = np.where(np.isfinite(away), np.clip(np.nan_to_num(away) * 10, -127, 127), -128).astype(np.int8)
    return {
        "quantity": f"{name}, {statistic}",
        "names": [f"rank {rank}" for rank, _ in found],
        "layers": len(found),
        "first": first,
        "last": last,
        "width": width,
        "columns": columns,
        "whole": all(p.whole for _, p in found),
        "clip": min(6.0, LARGEST_DEVIATION),
        "deviations": base64.b64encode(codes.tobytes()).decode(),
        "values": base64.b64encode(values.astype("<f4").tobytes()).decode(),
    }


def _binned(points: SeriesPoints, first: int, width: int, columns: int) -> npt.NDArray[np.float32]:
    """Return a column's value of largest magnitude; Inf where one is not finite, the last one where there is none."""
    row = np.full(columns, np.nan)
    at = (points.steps - first) // width
    values = np.where(np.isfinite(points.values), points.values, np.inf)
    order = np.argsort(np.abs(values), kind="stable")
    row[at[order]] = values[order]  # the largest is written last
    seen = np.maximum.accumulate(np.where(~np.isnan(row), np.arange(columns), 0))
    return row[seen].astype(np.float32)


def _from_others(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return each rank's distance from the ranks' median in robust deviations; NaN where it is not finite."""
    if len(values) < 2 or not values.size:
        return np.zeros_like(values)
    with np.errstate(invalid="ignore"):
        finite = np.where(np.isfinite(values), values.astype(np.float64), np.nan)
        some = ~np.isnan(finite).all(axis=0)
        middle = np.full(values.shape[1], np.nan)
        middle[some] = np.nanmedian(finite[:, some], axis=0)
        away = finite - middle
        spread = np.full(values.shape[1], np.nan)
        spread[some] = 1.4826 * np.nanmedian(np.abs(away[:, some]), axis=0)
        if some.any():  # few ranks agree by chance in some columns
            spread = np.fmax(spread, np.nanmedian(spread))
        found: npt.NDArray[np.float32] = away / np.maximum(spread, LEAST_SPREAD * np.maximum(np.abs(middle), 1e-30))
    return found.astype(np.float32)
