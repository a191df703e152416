"""Marks incidents on curves: each is a run of its own with one point on the loss and one on the suspect's curve.

TensorBoard lays runs over each other and draws a single point as a dot, so the dot stands on the curve, named by the
incident.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import NORM, STATISTICS, VALUE
from trainsentry.exporters.tensorboard.event_file import EventFile, tag
from trainsentry.exporters.tensorboard.tag_choice import LOSS_FIRST

KEPT_BYTES: Final = 8 * 2**20
"""Bytes of recent values: an incident is published some steps after its first value, 50 steps of a large model."""

MOST_MARKED: Final = 20
"""Incidents that get dots: each is a run in TensorBoard's list."""

Point = tuple[str, int, float]
"""A dot: its tag, its step and its value."""


class Markers:
    """Keeps recent values and writes the dots of incidents below `directory`."""

    def __init__(self, directory: Path, table: SeriesTable) -> None:
        self.directory = directory
        self.table = table
        self._recent: deque[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.float32]]] = deque()
        self._bytes = 0
        self._written: dict[int, set[str]] = {}
        self._waiting: dict[int, Mapping[str, Any]] = {}

    def take(self, record: StepRecord) -> None:
        """Keep a record's values, and write the dots that waited for them."""
        values = record.values.astype(np.float32)
        self._recent.append((record.step, record.ids, values))
        self._bytes += values.nbytes
        while self._bytes > KEPT_BYTES and len(self._recent) > 1:
            self._bytes -= self._recent.popleft()[2].nbytes
        for incident in list(self._waiting.values()):
            if record.step >= _newest_step(incident):
                with suppress(OSError):  # the next record tries again
                    self._write(incident)
                    del self._waiting[incident["id"]]

    def write(self, incident: Mapping[str, Any]) -> None:
        """Write the dots of an incident that are not there yet.

        An incident that was found before the update comes before the record of its step, and waits for it.

        Raises:
            OSError: when they cannot be written; then none counts as written.

        """
        if not self._recent or self._recent[-1][0] < _newest_step(incident):
            self._waiting[incident["id"]] = incident
        else:
            self._write(incident)

    def _write(self, incident: Mapping[str, Any]) -> None:
        known = self._written.get(incident["id"], set())
        if incident["id"] not in self._written and len(self._written) >= MOST_MARKED:
            return
        points = [point for point in self._points(incident) if point[0] not in known]
        if not points:
            return
        file = EventFile(self.directory / f"incident-{incident['id']}")
        try:
            for name, step, value in points:
                file.write(step, time.time(), [name], [value])
        finally:
            file.close()
        self._written[incident["id"]] = known | {name for name, _, _ in points}

    def _points(self, incident: Mapping[str, Any]) -> list[Point]:
        loss = tag("loss", "value", "loss", 0, scalar=True)
        step = incident["first_seen"]
        found = self._point(("loss", "loss"), step, [(loss, VALUE), (LOSS_FIRST, VALUE)])
        for suspect in incident["suspects"][:1]:
            name, quantity = suspect["name"], suspect["quantity"]
            found += self._point((name, quantity), suspect["step"], self._tags(name, quantity, suspect["statistic"]))
        return list({point[0]: point for point in found}.values())

    def _tags(self, name: str, quantity: str, statistic: str) -> list[tuple[str, int]]:
        series = next((s for s in self.table.series if (s.name, s.quantity) == (name, quantity)), None)
        if series is None:
            return []
        if series.scalar:
            return [(tag(quantity, "value", name, series.micro_step, scalar=True), VALUE)]
        columns = {"norm": NORM, **({statistic: STATISTICS.index(statistic)} if statistic in STATISTICS else {})}
        return [
            (tag(quantity, n, name, series.micro_step, vpp_stage=series.vpp_stage), column)
            for n, column in columns.items()
        ]

    def _point(self, series: tuple[str, str], step: int, tags: Sequence[tuple[str, int]]) -> list[Point]:
        """Return dots at the record nearest to a step that has the series, with its newest finite values till then."""
        wanted = next((i for i, s in enumerate(self.table.series) if (s.name, s.quantity) == series), -1)
        rows = [
            (at, row, values) for at, ids, values in self._recent for row in np.flatnonzero(ids == wanted)[:1].tolist()
        ]
        nearest = min((at for at, _, _ in rows), key=lambda at: abs(at - step), default=None)
        if nearest is None:
            return []
        points = []
        for name, column in tags:
            seen = [float(values[row, column]) for at, row, values in rows if at <= nearest]
            finite = [value for value in seen if np.isfinite(value)]
            points += [(name, nearest, finite[-1])] if finite else []
        return points


def _newest_step(incident: Mapping[str, Any]) -> int:
    """Return the newest step that has a dot."""
    return max(int(incident["first_seen"]), *(int(suspect["step"]) for suspect in incident["suspects"][:1]), -1)
