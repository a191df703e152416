"""Answers the map of layers by steps: each layer's size, and how far it is from the layer's own usual.

A short history is read as a whole once, and what is added to it afterwards is read as it comes. A long one is read in
windows spread over the steps, with the steps of incidents among them, so the map never waits for gigabytes.
"""

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from trainsentry.exporters.csv.chunks import Reading
from trainsentry.exporters.csv.format import TableFile
from trainsentry.exporters.csv.level_files import history_parts, levels_of, rows_by_step
from trainsentry.exporters.csv.reader import newest_steps
from trainsentry.exporters.csv.table_parts import TablePart, newest_part, parts_of, shape_of_table, thinned
from trainsentry.exporters.csv.table_rows import RowKeys, TableRows
from trainsentry.exporters.files.foreign_files import Report
from trainsentry.exporters.tensorboard.layer_matrix import LayerMatrix
from trainsentry.exporters.tensorboard.quantity_view import LayoutSizes, QuantityView

COLUMNS: Final = 256
"""Columns of a map: steps, or bins of steps."""

MAX_ROWS: Final = 300
"""Rows of a map; with more layers, neighbours share a row that shows the one furthest from its usual."""

MAX_LAYERS: Final = 20_000
"""Layers that a map holds at most: 20 MB of numbers."""

ALL_BYTES: Final = 1 << 26
"""Bytes of CSV that are parsed at most before the first answer: about two seconds. A longer history is sampled."""

WINDOWS: Final = 200
"""Windows of a sampled history, nearly one a column."""

SAMPLED_FOR: Final = 15.0
"""Seconds for which a sampled map is shown before it is read anew."""

MAX_MARKED: Final = 50
"""Incidents whose steps are read in any case."""

USUAL_COLUMNS: Final = 31
"""Columns whose median is a layer's usual: long enough that a fault of some columns does not become usual."""

MIN_LAYERS: Final = 8
"""Layers below which their median is no common trend, but one of them."""

LEAST_SPREAD: Final = 0.02
"""Spread in decades below which a layer's noise is not believed: 5 %, about what rounding and sampling do."""

LARGEST_DEVIATION: Final = 12.7
"""Deviation that the last colour stands for at most: a code of one byte in tenths."""

LEAST_CLIP: Final = 8.0
"""Deviation that the last colour stands for at least: noise, of about one deviation, stays pale."""

WANTED: Final = ("norm", "nans", "infs")


@dataclass
class LayerMap:
    """A table's map over some steps of a run, and how far its files have been read.

    Where it is not `whole`, it has every extreme of buckets of so many sampled steps (`bucket`), or at 0 a sample.
    """

    quantity: str
    steps: range
    keys: RowKeys = field(default_factory=RowKeys)
    view: QuantityView = field(init=False)
    readings: dict[str, Reading] = field(default_factory=dict)
    restart: int = -1
    whole: bool = True
    bucket: int = 0
    read_at: float = 0.0
    left_out: int = 0

    def __post_init__(self) -> None:
        self.view = QuantityView(self.quantity, COLUMNS)

    def take(self, rows: TableRows) -> None:
        """Add the layers of a step; layers above MAX_LAYERS are counted alone."""
        if "norm" not in rows.numbers or rows.step not in self.steps:
            return
        names = [self.keys.keys[key].name for key in rows.keys.tolist()]
        at = np.arange(len(names))
        if len(self.keys.keys) > MAX_LAYERS:
            known = dict.fromkeys([*self.view.matrix.names, *names])
            allowed = set(list(known)[:MAX_LAYERS])
            self.left_out = len(known) - len(allowed)
            at = np.asarray([i for i in at.tolist() if names[i] in allowed], np.intp)
            names = [names[i] for i in at.tolist()]
        layers = self.view.matrix.rows_of(names)
        self.view.take_rows(rows, LayoutSizes(self.keys).all(), layers, at)


def read_map(
    known: LayerMap | None,
    files: Sequence[TableFile],
    steps: range,
    marked: Sequence[int],
    report: Report,
    clock: Callable[[], float] = time.monotonic,
) -> LayerMap:
    """Return the map of a table at `steps`, from `known`, an earlier map of them, where that can go on.

    A map that is not `whole` shows windows of the history and the steps `marked`.
    """
    quantity = files[0].table
    restart = max(file.restart for file in files)
    if known is not None and not known.whole and clock() - known.read_at < SAMPLED_FOR:
        return known
    parts = parts_of(files, steps, report)
    if sum(part.cost for part in parts) > ALL_BYTES:
        return _sampled(quantity, steps, files, parts, marked, report, clock())
    if known is None or not known.whole or known.restart != restart:  # a run that went back has steps to replace
        known = LayerMap(quantity, steps, restart=restart)
    readings: list[Reading] = []
    for part in parts:
        name = part.file.path.name.partition(".")[0] + f".{part.file.restart}"  # compacted, it keeps its place
        reading = known.readings.get(name)
        if reading is None:
            begin = part.begin if part.file.path.suffix == ".csv" else 0
            reading = known.readings[name] = Reading(part.file, begin)
        if all(reading is not other for other in readings):
            readings.append(reading)
    for rows in newest_steps(readings, known.keys, report):
        known.take(rows)
    known.read_at = clock()
    return known


def _sampled(
    quantity: str,
    steps: range,
    files: Sequence[TableFile],
    parts: Sequence[TablePart],
    marked: Sequence[int],
    report: Report,
    now: float,
) -> LayerMap:
    """Return a map of the finest level that is small enough, else of windows of a step or two, and of `marked`."""
    made = LayerMap(quantity, steps, whole=False, read_at=now)
    shape = shape_of_table(files, report)
    if shape is None:
        return made
    history = history_parts(files, levels_of(files), steps, ALL_BYTES, report)
    if history is not None:
        made.bucket, chosen = history.width, list(history.parts)
    else:
        chosen, _ = thinned(parts, ALL_BYTES, 2 * shape.step_bytes, WINDOWS)
        newest = newest_part(parts, 2 * shape.step_bytes)
        chosen += [newest] if newest is not None else []
    for step in sorted(set(marked))[:MAX_MARKED]:
        if step in steps:
            chosen += parts_of(files, range(step, step + 1), report)
    for rows, _ in rows_by_step(chosen, made.keys, WANTED, report):
        made.take(rows)
    return made


def deviations(table: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return how far each value is from its layer's usual, in that layer's robust deviations; shape as `table`.

    The usual is the running median of the logarithm over the columns before, the deviation 1.4826 times the median
    distance from it. A median of the past lags behind a slow common trend, as gradients shrink: what most layers share
    over many columns is taken off. NaN where there is no value; Inf where it is not finite.

    >>> calm = np.full((1, 40), 2.0, np.float32); calm[0, 30] = 2000.0
    >>> bool(deviations(calm)[0, 30] > 100), bool(np.abs(np.delete(deviations(calm), 30)).max() == 0)
    (True, True)
    """
    if not table.size:
        return table
    finite = np.isfinite(table)
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.where(finite, np.log10(np.maximum(table, 1e-30)), np.nan)
    frame = pd.DataFrame(size.T)
    before = frame.ffill().rolling(USUAL_COLUMNS, min_periods=3).median().shift(1).bfill()
    away = size - before.to_numpy().T
    away -= _common_trend(away)
    known = ~np.isnan(away).all(axis=1)
    spread = np.full(len(table), LEAST_SPREAD)
    spread[known] = np.maximum(1.4826 * np.nanmedian(np.abs(away[known]), axis=1), LEAST_SPREAD)
    away = away / spread[:, None]
    away[np.isinf(table)] = np.inf
    found: npt.NDArray[np.float32] = away.astype(np.float32)
    return found


def _common_trend(away: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return what most layers share for longer than half of USUAL_COLUMNS, shape (columns,); a sudden step stays.

    Zero with fewer layers than have a middle.
    """
    trend = np.zeros(away.shape[1])
    some = ~np.isnan(away).all(axis=0)
    if len(away) >= MIN_LAYERS and some.any():
        middle = pd.Series(np.nanmedian(away[:, some], axis=0))
        trend[some] = middle.rolling(USUAL_COLUMNS, center=True, min_periods=1).median().to_numpy()
    return trend


def map_json(shown: LayerMap, suspects: Sequence[str]) -> dict[str, Any]:
    """Return a map as plain data: names, steps of the columns, and two matrices as base64, row by row.

    `deviations` are bytes, a tenth of a robust deviation each from -127 to 127, and -128 for no sample or a value that
    is not finite; `values` are float32, the root mean squares, NaN and Inf for the same two.
    """
    matrix = shown.view.matrix
    table = matrix.table()
    away = deviations(table)
    rows, names = _chosen(matrix, away, suspects)
    sampled = np.flatnonzero(~np.isnan(table).all(axis=0)) if table.size else np.zeros(0, np.intp)
    columns = np.arange(table.shape[1])  # a column without samples repeats the last one
    if len(sampled):
        columns = sampled[np.maximum(np.searchsorted(sampled, columns, side="right") - 1, 0)]
    away = away[rows][:, columns]
    codes = np.where(np.isfinite(away), np.clip(np.nan_to_num(away, posinf=0.0) * 10, -127, 127), -128).astype(np.int8)
    strong = np.abs(away[np.isfinite(away)])
    limit = float(np.percentile(strong, 99.5)) if strong.size else 0.0
    return {
        "quantity": shown.quantity,
        "names": names,
        "layers": len(matrix.names) + shown.left_out,
        "first": matrix.first_step or 0,
        "last": matrix.last_step,
        "width": matrix.width,
        "columns": int(table.shape[1]),
        "whole": shown.whole,
        "bucket": shown.bucket,
        "clip": round(min(max(limit, LEAST_CLIP), LARGEST_DEVIATION), 1),
        "deviations": base64.b64encode(codes.tobytes()).decode(),
        "values": base64.b64encode(table[rows][:, columns].astype("<f4").tobytes()).decode(),
    }


def _chosen(
    matrix: LayerMatrix, away: npt.NDArray[np.float32], suspects: Sequence[str]
) -> tuple[npt.NDArray[np.intp], list[str]]:
    """Return the rows to show and their names: of neighbours that share a row, the one furthest from its usual.

    Suspects have a row of their own in any case.
    """
    count = len(matrix.names)
    if count <= MAX_ROWS:
        return np.arange(count), list(matrix.names)
    furthest = np.nanmax(np.nan_to_num(np.abs(away), nan=0.0, posinf=1e30), axis=1)
    wanted = [matrix.names.index(name) for name in suspects if name in matrix.names][: MAX_ROWS // 4]
    group = -(-count // (MAX_ROWS - len(wanted)))
    best = [start + int(np.argmax(furthest[start : start + group])) for start in range(0, count, group)]
    rows = sorted({*best, *wanted})
    more = group - 1
    names = [matrix.names[i] if i in wanted else f"{matrix.names[i]} (of {more + 1} layers)" for i in rows]
    return np.asarray(rows, np.intp), names
