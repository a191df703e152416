"""Condenses ten thousand series into ten TensorBoard cards while the run goes on."""

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
"""Incidents written as text; the report has all of them."""


class Dashboard:
    """Turns step records into numbers over all layers, and periodically into pictures."""

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self.incidents: dict[int, int] = {}
        self._views: dict[str, QuantityView] = {}
        self._plans: dict[bytes, list[tuple[QuantityView, npt.NDArray[np.intp], npt.NDArray[np.intp]]]] = {}
        self._charted: set[str] = set()
        self._shown: set[int] = set()

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

    def pages(self) -> list[Summary.Value]:
        """Return the current pictures, and the overview if it has new charts."""
        marks = sorted(set(self.incidents.values()))
        values = [value for view in self._views.values() for value in view.pictures(marks)]
        if set(self._views) != self._charted:
            self._charted = set(self._views)
            values.append(layout(overview(sorted(self._views))))
        return values

    def incident(self, incident: Any) -> Summary.Value | None:
        """Return an incident with its actions as text; None after the first MAX_TEXT incidents."""
        self.incidents[incident.id] = incident.first_seen
        if incident.id not in self._shown and len(self._shown) >= MAX_TEXT:
            return None
        self._shown.add(incident.id)
        actions = "".join(f"\n- {_plain(action)}" for action in incident.actions)
        suspects = "".join(f"\n1. `{_plain(s.name)}` ({s.quantity}): {_plain(s.kind)}" for s in incident.suspects[:5])
        return text(f"incidents/{incident.id}", f"**{_plain(incident.summary)}**\n{suspects}\n{actions}")

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


def _plain(value: Any) -> str:
    """Escape a text for Markdown and HTML."""
    shown = str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return shown.replace("`", "'").replace("|", "\\|").replace("*", "\\*")


def _setting(value: Any) -> "bool | float | str":
    if isinstance(value, (bool, int, float)):
        return value if isinstance(value, bool) else float(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
