"""What a map of layers by steps shows: rows and columns, levels of colour, names, labels of suspects and incidents.

TensorBoard, the report and the live page show the same map: `map_drawing` draws it for all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.exporters.maps.deviation import deviations
from trainsentry.exporters.maps.layer_matrix import LayerMatrix
from trainsentry.exporters.short_text import first_of

MOST_COLUMNS: Final = 180
"""Columns of a map; with more, neighbours share one that shows the cell furthest from usual. On a telephone a cell is
then one pixel wide, in a large picture four, so that one step of thousands is seen."""


@dataclass(frozen=True)
class RowSpace:
    """How high rows are, in pixels, and how many there are at most; with more layers, neighbours share a row.

    The rows share `tallest` pixels, before those of suspects are made at least `suspect` high. A suspect has a row
    of its own in any case.
    """

    most: int
    tallest: int
    least: int
    suspect: int


PAGE: Final = RowSpace(most=160, tallest=420, least=3, suspect=15)
"""Of a page, and of a picture that is looked at by itself. A suspect's row is as high as its label."""

CARD: Final = RowSpace(most=36, tallest=100, least=2, suspect=13)
"""Of the card on TensorBoard's first page, which shows 215 pixels of height."""

HIGHEST: Final = 16
"""Pixels of a row at most."""

LIMITS: Final = (8.0, 40.0)
"""Robust deviations at the ends of the colours, at least and at most: noise stays pale, and a run whose faults fill the
map still shows how they began."""

CLIPPED_AT: Final = 99.5
"""Percentile of the distances from usual at two thirds of the colour scale."""

NEUTRAL: Final = 125
NOT_KNOWN: Final = 254
NOT_FINITE: Final = 255
"""Levels of a cell: 0 to 250 from far below usual to far above, and the two without a distance."""

LAYERS_UNIT: Final = "robust deviations from the layer's own usual"


@dataclass(frozen=True)
class Mark:
    """An incident beside a map: its step and its label."""

    step: int
    label: str


@dataclass(frozen=True)
class LayersMap:
    """What a map shows.

    `levels` has shape (rows, columns), see NEUTRAL; column `i` begins at step `first_step + i * steps_a_column`.
    `names` are the rows' layers, `suspects` the labels of some rows. `pixels` are the heights of the rows. The ends of
    the colours are `limit` times the `unit` from usual.
    """

    levels: npt.NDArray[np.uint8]
    names: tuple[str, ...]
    suspects: Mapping[int, str]
    pixels: tuple[int, ...]
    first_step: int
    steps_a_column: int
    limit: float
    marks: tuple[Mark, ...]
    unit: str = LAYERS_UNIT

    def column_of(self, step: int) -> int:
        """Return the column of a step; it may lie outside the map."""
        return (step - self.first_step) // self.steps_a_column

    def row_of(self, name: str) -> int | None:
        """Return the row of a layer that has one of its own."""
        return self.names.index(name) if name in self.names else None

    @property
    def last_step(self) -> int:
        """The first step after the map."""
        return self.first_step + int(self.levels.shape[1]) * self.steps_a_column


def layers_map(matrix: LayerMatrix, suspects: Mapping[str, str] | None = None, marks: Sequence[Mark] = ()) -> LayersMap:
    """Return the map of a matrix; `suspects` are labels of layers that must stand out."""
    away = spread_deviations(matrix)
    return map_of(away, matrix.names, (matrix.step_of(0), matrix.width), suspects or {}, marks)


def map_of(
    away: npt.NDArray[np.float32],
    layers: Sequence[str],
    steps: tuple[int, int],
    wanted: Mapping[str, str],
    marks: Sequence[Mark],
    unit: str = LAYERS_UNIT,
    space: RowSpace = PAGE,
) -> LayersMap:
    """Return the map of deviations, shape (layers, columns), in a `unit`.

    `steps` are the first step and the steps a column, `wanted` the labels of layers that must stand out.
    """
    limit = _limit(away)
    columns = -(-away.shape[1] // MOST_COLUMNS) if away.size else 1
    away = furthest(away, np.arange(0, away.shape[1], columns), axis=1)
    groups = list(_groups(layers, wanted, space.most)) if away.size else []
    away = furthest(away, np.asarray([first for first, _ in groups], np.intp), axis=0)
    rows = {row: wanted[layers[first]] for row, (first, _) in enumerate(groups) if layers[first] in wanted}
    pixels = int(np.clip(space.tallest // max(len(groups), 1), space.least, HIGHEST))
    heights = tuple(max(pixels, space.suspect) if row in rows else pixels for row in range(len(groups)))
    names = tuple(first_of(layers[first : first + count]) for first, count in groups)
    return LayersMap(
        _levels(away, limit), names, rows, heights, steps[0], steps[1] * columns, limit, tuple(marks), unit
    )


def named_rows(shown: LayersMap, distance: int) -> list[int]:
    """Return the rows whose names are written, at least `distance` pixels apart.

    Suspects come first, then the rows furthest from usual, then others wherever there is room.
    """
    known = np.where(shown.levels <= 2 * NEUTRAL, np.abs(shown.levels.astype(int) - NEUTRAL), 0)
    known[shown.levels == NOT_FINITE] = NEUTRAL
    far = known.max(axis=1, initial=0) < NEUTRAL
    middles = np.cumsum(shown.pixels) - np.asarray(shown.pixels) / 2
    taken: list[int] = []
    for row in sorted(range(len(shown.names)), key=lambda row: (row not in shown.suspects, bool(far[row]), row)):
        if all(abs(middles[row] - middles[other]) >= distance for other in taken):
            taken.append(row)
    return taken


def spread_deviations(matrix: LayerMatrix) -> npt.NDArray[np.float32]:
    """Return the deviations of a matrix; columns without a sample repeat the last one that has one."""
    away = deviations(matrix.table())
    if not away.size:
        return away
    sampled = ~np.isnan(away).all(axis=0)
    return away[:, np.maximum.accumulate(np.where(sampled, np.arange(away.shape[1]), 0))]


def furthest(away: npt.NDArray[np.float32], starts: npt.NDArray[np.intp], axis: int) -> npt.NDArray[np.float32]:
    """Return the value furthest from 0 of each part of an axis."""
    if not len(starts) or len(starts) == away.shape[axis]:
        return away
    high, low = np.fmax.reduceat(away, starts, axis=axis), np.fmin.reduceat(away, starts, axis=axis)
    found: npt.NDArray[np.float32] = np.where(np.abs(low) > np.abs(high), low, high)
    return found


def _groups(names: Sequence[str], suspects: Mapping[str, str], most: int) -> Iterator[tuple[int, int]]:
    """Yield the rows of a map as first layer and count of layers."""
    size = -(-len(names) // most)
    first = 0
    for i, name in enumerate(names):
        if (name in suspects or i - first >= size) and i > first:
            yield first, i - first
            first = i
        if name in suspects:
            yield i, 1
            first = i + 1
    if first < len(names):
        yield first, len(names) - first


def _limit(away: npt.NDArray[np.float32]) -> float:
    finite = np.abs(away[np.isfinite(away)])
    return float(np.clip(np.ceil(1.5 * np.percentile(finite, CLIPPED_AT)), *LIMITS)) if finite.size else LIMITS[0]


def _levels(away: npt.NDArray[np.float32], limit: float) -> npt.NDArray[np.uint8]:
    with np.errstate(invalid="ignore"):
        shares = np.clip(np.nan_to_num(away, nan=0.0, posinf=0.0) / limit, -1, 1)
    levels: npt.NDArray[np.uint8] = np.rint(NEUTRAL + NEUTRAL * shares).astype(np.uint8)
    levels[np.isnan(away)] = NOT_KNOWN
    levels[np.isinf(away)] = NOT_FINITE
    return levels
