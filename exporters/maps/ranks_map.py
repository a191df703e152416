"""The map of ranks by steps: a number of each rank beside the others', or each rank's layer furthest from its usual."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.exporters.maps.incident_marks import blamed_ranks, marks
from trainsentry.exporters.maps.layer_matrix import LayerMatrix
from trainsentry.exporters.maps.layers_map import LayersMap, map_of
from trainsentry.exporters.maps.modules_map import furthest_of_rows

MAX_RANKS: Final = 64
"""Ranks of a map; of more, every n-th, and those that are asked for, as the ranks of suspects."""

COLUMNS: Final = 256
"""Columns of a table of ranks: steps, or bins of steps."""

LEAST_SPREAD: Final = 0.01
"""Spread of the ranks, as a share of their median, below which their differences are not believed: 1 %."""

RANKS_UNIT: Final = "robust deviations from the median of the ranks"

Curve = tuple[Sequence[int], Sequence[float]]
"""Steps, ascending, and values."""


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


def ranks_map(curves: Mapping[int, Curve], incidents: Sequence[Mapping[str, Any]]) -> LayersMap:
    """Return the map of one number on many ranks: each rank beside the median of all ranks at the same steps."""
    found = {rank: curve for rank, curve in curves.items() if len(curve[0])}
    first = min((int(steps[0]) for steps, _ in found.values()), default=0)
    last = max((int(steps[-1]) for steps, _ in found.values()), default=-1)
    width = max(-(-(last - first + 1) // COLUMNS), 1)
    values = np.full((len(found), (last - first) // width + 1 if found else 0), np.nan, np.float32)
    for row, curve in enumerate(found.values()):
        values[row] = _binned(curve, first, width, values.shape[1])
    return _drawn(from_others(values), list(found), (first, width), incidents, RANKS_UNIT)


def deviation_map(matrices: Mapping[int, Sequence[LayerMatrix]], incidents: Sequence[Mapping[str, Any]]) -> LayersMap:
    """Return the map of the matrices of each rank: of a rank's layers the one furthest from its own usual."""
    flat = [(row, m) for row, found in enumerate(matrices.values()) for m in found if m.first_step is not None]
    if not flat:
        return _drawn(np.zeros((0, 0), np.float32), [], (0, 1), incidents, _LAYER_UNIT)
    rows = [[row] * len(matrix.names) for row, matrix in flat]
    away, steps = furthest_of_rows([matrix for _, matrix in flat], rows, len(matrices))
    return _drawn(away, list(matrices), steps, incidents, _LAYER_UNIT)


_LAYER_UNIT: Final = "robust deviations of the rank's layer furthest from its usual"


def from_others(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return each rank's distance from the ranks' median in robust deviations, shape (ranks, columns).

    Inf where it is not finite, NaN where there is no value.
    """
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
        found: npt.NDArray[np.float32] = (
            away / np.maximum(spread, LEAST_SPREAD * np.maximum(np.abs(middle), 1e-30))
        ).astype(np.float32)
    found[np.isinf(values)] = np.inf
    return found


def _drawn(
    away: npt.NDArray[np.float32],
    ranks: Sequence[int],
    steps: tuple[int, int],
    incidents: Sequence[Mapping[str, Any]],
    unit: str,
) -> LayersMap:
    blamed = {f"rank {rank}": label for rank, label in blamed_ranks(incidents).items()}
    return map_of(away, [f"rank {rank}" for rank in ranks], steps, blamed, marks(incidents), unit)


def _binned(curve: Curve, first: int, width: int, columns: int) -> npt.NDArray[np.float32]:
    """Return a column's value of largest magnitude; Inf where one is not finite, the last one where there is none."""
    row = np.full(columns, np.nan)
    at = (np.asarray(curve[0], np.int64) - first) // width
    numbers = np.asarray(curve[1], np.float64)
    values = np.where(np.isfinite(numbers), numbers, np.inf)
    order = np.argsort(np.abs(values), kind="stable")
    row[at[order]] = values[order]  # the largest is written last
    seen = np.maximum.accumulate(np.where(~np.isnan(row), np.arange(columns), 0))
    return row[seen].astype(np.float32)
