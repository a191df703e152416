"""Answers the map of layers by steps: each layer's size, and how far it is from the layer's own usual.

A short history is read as a whole once, and what is added to it afterwards is read as it comes. A long one is read in
windows spread over the steps, with the steps of incidents among them, so the map never waits for gigabytes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from trainsentry.exporters.csv.chunks import Reading
from trainsentry.exporters.csv.format import TableFile
from trainsentry.exporters.csv.level_files import history_parts, levels_of, rows_by_step
from trainsentry.exporters.csv.reader import newest_steps
from trainsentry.exporters.csv.table_parts import TablePart, newest_part, parts_of, shape_of_table, thinned
from trainsentry.exporters.csv.table_rows import RowKeys, TableRows
from trainsentry.exporters.files.foreign_files import Report
from trainsentry.exporters.maps.incident_marks import marks, suspects
from trainsentry.exporters.maps.layers_map import layers_map
from trainsentry.exporters.maps.map_svg import map_svg
from trainsentry.exporters.tensorboard.quantity_view import LayoutSizes, QuantityView

COLUMNS: Final = 256
"""Columns of a map: steps, or bins of steps."""

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


def map_json(shown: LayerMap, incidents: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return a map as plain data: its drawing as SVG, and what it says about itself."""
    matrix = shown.view.matrix
    drawn = layers_map(matrix, suspects(incidents, shown.quantity), marks(incidents))
    return {
        "quantity": shown.quantity,
        "layers": len(matrix.names) + shown.left_out,
        "rows": len(drawn.names),
        "first": drawn.first_step,
        "last": matrix.last_step,
        "width": drawn.steps_a_column,
        "whole": shown.whole,
        "bucket": shown.bucket,
        "svg": map_svg(drawn, f"{shown.quantity}: layers by steps"),
    }
