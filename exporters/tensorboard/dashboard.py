"""The pages of TensorBoard that show ten thousand series in ten cards, while the run goes on."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.summary_pb2 import Summary

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import COMMUNICATION_CALL, SeriesTable
from trainsentry.collectors.statistics import INFS, NANS, NORM
from trainsentry.exporters.short_text import flat
from trainsentry.exporters.tensorboard.quantity_view import SUMMARY, QuantityView, overview, summary_tag
from trainsentry.exporters.tensorboard.values import hparams, layout, text

MAX_TEXT = 20
"""Incidents whose text is written; the report has all of them."""


class Dashboard:
    """Turns step records into numbers over all layers, and now and then into pictures."""

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self.incidents: dict[int, int] = {}
        self._views: dict[str, QuantityView] = {}
        self._plans: dict[bytes, list[tuple[QuantityView, npt.NDArray[np.intp], npt.NDArray[np.intp]]]] = {}
        self._told: set[str] = set()
        self._shown: set[int] = set()

    def numbers(self, record: StepRecord) -> tuple[list[str], list[float]]:
        """Return tags and values of a record: each quantity over all its layers."""
        tags, values = [], []
        sizes = np.asarray([layout.numel for layout in self.table.layouts], np.float64)
        for view, rows, places in self._plan(record):
            norms = record.values[rows, NORM]
            bad = record.values[rows, NANS] + record.values[rows, INFS]
            numbers = view.take(record.step, places, norms, sizes[record.layouts[rows]], bad)
            tags += [summary_tag(view.quantity, name) for name in SUMMARY]
            values += numbers
        return tags, values

    def pages(self) -> list[Summary.Value]:
        """Return the pictures as they are now, and the overview when it has new charts."""
        marks = sorted(set(self.incidents.values()))
        values = [value for view in self._views.values() for value in view.pictures(marks)]
        if set(self._views) != self._told:
            self._told = set(self._views)
            values.append(layout(overview(sorted(self._views))))
        return values

    def incident(self, incident: Any) -> Summary.Value | None:
        """Return an incident as text, with where its dump lies; None for one of very many."""
        self.incidents[incident.id] = incident.first_seen
        if incident.id not in self._shown and len(self._shown) >= MAX_TEXT:
            return None
        self._shown.add(incident.id)
        actions = "".join(f"\n- {_plain(action)}" for action in incident.actions)
        suspects = "".join(f"\n1. `{_plain(s.name)}` ({s.quantity}): {_plain(s.kind)}" for s in incident.suspects[:5])
        return text(f"incidents/{incident.id}", f"**{_plain(incident.summary)}**\n{suspects}\n{actions}")

    @staticmethod
    def settings(run: Mapping[str, Any]) -> list[Summary.Value]:
        """Return the run's configuration as its hyper-parameters."""
        return hparams({name: _setting(value) for name, value in flat(run.get("configuration", run))})

    def _plan(self, record: StepRecord) -> list[tuple[QuantityView, npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
        """Return, for each quantity of the record, its view, its rows in the record and in the matrix."""
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
        if len(self._plans) >= 64:  # micro-steps and plans of sampling make a few; more would be a leak
            self._plans.clear()
        self._plans[key] = plan
        return plan


def _plain(value: Any) -> str:
    """Return text that Markdown and HTML show as it is."""
    shown = str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return shown.replace("`", "'").replace("|", "\\|").replace("*", "\\*")


def _setting(value: Any) -> "bool | float | str":
    if isinstance(value, (bool, int, float)):
        return value if isinstance(value, bool) else float(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
