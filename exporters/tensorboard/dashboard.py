"""Condenses ten thousand series into ten TensorBoard cards while the run goes on."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.summary_pb2 import Summary

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import COMMUNICATION_CALL, SeriesTable
from trainsentry.collectors.statistics import INFS, NANS, NORM
from trainsentry.exporters.maps.layers_map import CARD, PAGE
from trainsentry.exporters.maps.map_png import map_png
from trainsentry.exporters.maps.modules_map import modules_map
from trainsentry.exporters.short_text import flat
from trainsentry.exporters.tensorboard.painter import Draw
from trainsentry.exporters.tensorboard.quantity_view import SUMMARY, QuantityView, overview, summary_tag
from trainsentry.exporters.tensorboard.values import hparams, image, layout

MAP_FIRST: Final = "0_overview/map"
"""The map of all quantities, in the group that TensorBoard's first page opens on: as large as a card."""

MAP_LARGE: Final = "heatmaps/0_all"
"""The same map in full."""


class Dashboard:
    """Turns step records into numbers over all layers, and periodically into pictures.

    `incidents` holds the newest state of each incident, as in a line of `incidents.jsonl`.
    """

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self.incidents: dict[int, dict[str, Any]] = {}
        self._views: dict[str, QuantityView] = {}
        self._plans: dict[bytes, list[tuple[QuantityView, npt.NDArray[np.intp], npt.NDArray[np.intp]]]] = {}
        self._charted: set[str] = set()

    def numbers(self, record: StepRecord) -> tuple[list[str], list[float]]:
        """Return tags and values of a record: the summary of each quantity over its layers."""
        tags, values = [], []
        sizes = np.asarray([layout.numel for layout in self.table.layouts], np.float64)
        for view, rows, layers in self._plan(record):
            norms = record.values[rows, NORM]
            bad = record.values[rows, NANS] + record.values[rows, INFS]
            numbers = view.take(record.step, layers, norms, sizes[record.layouts[rows]], bad)
            tags += [summary_tag(view.quantity, name) for name in SUMMARY]
            values += numbers
        return tags, values

    def drawing(self) -> Draw:
        """Return a function that draws the present state, whatever happens meanwhile."""
        return partial(_draw, [view.copy() for view in self._views.values()], list(self.incidents.values()))

    def new_layout(self) -> list[Summary.Value]:
        """Return the layout of the custom scalars page if it has new charts."""
        if set(self._views) == self._charted:
            return []
        self._charted = set(self._views)
        return [layout(overview(sorted(self._views)))]

    @staticmethod
    def settings(run: Mapping[str, Any]) -> list[Summary.Value]:
        """Return the run's configuration as hyper-parameters."""
        return hparams({name: _setting(value) for name, value in flat(run.get("configuration", run))})

    def _plan(self, record: StepRecord) -> list[tuple[QuantityView, npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
        """Return each quantity of the record: its view, its rows in the record, and its rows in the matrix."""
        key = record.ids.tobytes()
        known = self._plans.get(key)
        if known is not None:
            return known
        rows: dict[str, list[int]] = {}
        for row, series_id in enumerate(record.ids.tolist()):
            series = self.table.series[series_id]
            if not series.scalar and series.quantity != COMMUNICATION_CALL:
                rows.setdefault(series.quantity, []).append(row)
        plan = []
        for quantity, found in rows.items():
            view = self._views.setdefault(quantity, QuantityView(quantity))
            names = [self.table.series[record.ids[row]].name for row in found]
            plan.append((view, np.asarray(found, np.intp), view.matrix.rows_of(names)))
        if len(self._plans) >= 64:  # micro-steps and sampling plans make a few; more would be a leak
            self._plans.clear()
        self._plans[key] = plan
        return plan


def _draw(views: Sequence[QuantityView], incidents: Sequence[Mapping[str, Any]]) -> list[Summary.Value]:
    values = [value for view in views for value in view.pictures(incidents)]
    matrices = {view.quantity: view.matrix for view in views}
    card, large = (modules_map(matrices, incidents, space) for space in (CARD, PAGE))
    if card is None or large is None:
        return values
    return [image(MAP_FIRST, *map_png(card, card=True)), image(MAP_LARGE, *map_png(large)), *values]


def _setting(value: Any) -> "bool | float | str":
    if isinstance(value, (bool, int, float)):
        return value if isinstance(value, bool) else float(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
