"""Writes step records as TensorBoard event files while the run goes on."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tensorboard.compat.proto.summary_pb2 import Summary

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import SeriesTable
from trainsentry.exporters.exporter import LeftOut, Lost, Missing, nothing_left_out, nothing_lost, nothing_missing
from trainsentry.exporters.files.whole_writes import LOOK_SECONDS
from trainsentry.exporters.incident_groups import worst_first
from trainsentry.exporters.tensorboard.dashboard import Dashboard
from trainsentry.exporters.tensorboard.event_file import EventFile, tag
from trainsentry.exporters.tensorboard.histograms import HistogramTags
from trainsentry.exporters.tensorboard.incident_text import incident_list, incident_text, notes
from trainsentry.exporters.tensorboard.markers import Markers
from trainsentry.exporters.tensorboard.painter import Painter
from trainsentry.exporters.tensorboard.tag_choice import TagChoice
from trainsentry.exporters.tensorboard.values import text

MAX_FILE_BYTES: Final = 64 * 2**20
"""Size of an event file at which the next one begins, so that the disk quota can delete old ones."""

MAX_RAW_TAGS: Final = 5000
"""Tags of single series at most, as TensorBoard takes minutes to list 12,000."""

PICTURES_EVERY: Final = 100
"""Minimum steps between two pictures; in a long run a tenth of its steps, as TensorBoard keeps ten pictures."""

MAX_TEXT: Final = 20
"""Incidents written as text of their own; the list of incidents and the report have all of them."""

INCIDENTS_FIRST: Final = "0_overview/incidents"
"""The number of incidents once more, in the group that TensorBoard's first page opens on."""


class TensorBoardWriter:
    """One run per rank: `tensorboard/rank<r>/events.out.tfevents…`.

    Every step has the numbers over all layers of each quantity. The statistics of single series whose names match one
    of `raw` are added, at most `max_raw_tags` of them (-1: no limit), see `TagChoice`. Pictures are written every
    `renew_every` steps, less often in a long run, and at the end; a thread of their own draws them. `missing` tells
    which steps never came.

    A record is written whole or not at all, so it can be retried. If somebody removes the file, a new one is created,
    and `lost` gets the steps that went with it.
    """

    def __init__(
        self,
        directory: Path,
        table: SeriesTable,
        statistics: tuple[str, ...],
        *,
        raw: Sequence[str] = ("*",),
        max_raw_tags: int = MAX_RAW_TAGS,
        renew_every: int = PICTURES_EVERY,
        output_dir: Path | None = None,
        histograms: bool = False,
        lost: Lost = nothing_lost,
        missing: Missing = nothing_missing,
        left_out: LeftOut = nothing_left_out,
    ) -> None:
        self.directory = directory
        self.renew_every = renew_every
        self.output_dir = output_dir or directory.parent.parent
        self.dashboard = Dashboard(table)
        self.painter = Painter()
        self.choice = TagChoice(table, statistics, raw, max_raw_tags)
        self.histograms = HistogramTags(table, raw) if histograms else None
        self.markers = Markers(directory, table)
        self._lost, self._missing, self._left_out = lost, missing, left_out
        self._first: int | None = None
        self._checked_at = 0.0
        self._file: EventFile | None = None
        self._files = 0
        self._loud: set[str] = set()
        self._tags: list[str] = []
        self._chosen: tuple[list[str], list[str]] = ([], [])
        self._step = -1
        self._renewed: int | None = None
        self._noted = ""
        self._worst: int | None = None
        self._counted = (-1, 0)

    def write(self, record: StepRecord) -> None:
        """Append one event with the values of the record.

        Raises:
            OSError: when the file cannot be written; then it holds nothing of the record.

        """
        self._look_for_removed()
        tags, numbers = self._numbers(record)
        raw_tags, raw = self.choice.of(record)
        if self._chosen[0] is not raw_tags or self._chosen[1] != tags:
            self._chosen, self._tags = (raw_tags, tags), raw_tags + tags
        file = self._open()
        size, renewed = file.size, self._renewed
        try:
            file.write(record.step, record.time, self._tags, raw.tolist() + numbers)
            if self.histograms is not None:
                self._append_histograms(self.histograms.of(record), record)
            self._step = record.step
            self._renew(record.step)
        except OSError:
            file.cut_back(size)
            self._renewed = renewed
            raise
        self.markers.take(record)
        self._first = record.step if self._first is None else self._first
        if file.size >= MAX_FILE_BYTES:
            file.close()
            self._file, self._first, self._files = None, None, self._files + 1

    def _append_histograms(self, values: list[Summary.Value], record: StepRecord) -> None:
        if values:
            self._open().append(record.step, record.time, values)

    def _numbers(self, record: StepRecord) -> tuple[list[str], list[float]]:
        """Return the numbers over all layers; the counts of non-finite values once one was not 0."""
        tags, numbers = self.dashboard.numbers(record)
        pairs = [(t, n) for t, n in zip(tags, numbers, strict=True) if not self._is_silent(t, n)]
        return [t for t, _ in pairs], [n for _, n in pairs]

    def _is_silent(self, name: str, number: float) -> bool:
        if not name.endswith("/not_finite") or name in self._loud:
            return False
        if number:
            self._loud.add(name)
        return not number

    def _renew(self, step: int) -> None:
        """Begin the next pictures, if they are due, and append those that are ready."""
        first = self._renewed is None
        if self._renewed is None or abs(step - self._renewed) >= max(self.renew_every, self._renewed // 10):
            self._renewed = step
            if not first:
                self._append(self.dashboard.new_layout())
                self.painter.start(step, self.dashboard.drawing())
            self._append_notes()
        self._append_drawn()

    def _append_drawn(self) -> None:
        drawn = self.painter.drawn
        if drawn is not None:
            self._open().append(drawn[0], time.time(), drawn[1])
            self.painter.clear()

    def _append_notes(self) -> None:
        """Append what is missing here, if that has changed."""
        counted = self.histograms.sentence() if self.histograms is not None else ""
        by_settings = " ".join(filter(None, (self.choice.sentence(), counted)))
        self._left_out(by_settings)
        found = notes(by_settings, self.painter.left_out, self._missing())
        if found != self._noted:
            self._append([text("run/what is missing here", found or "Nothing is missing.")])
            self._noted = found

    def _look_for_removed(self) -> None:
        """Close a file that somebody has removed, and report its steps as lost."""
        now = time.monotonic()
        thorough = now - self._checked_at >= LOOK_SECONDS
        self._checked_at = now if thorough else self._checked_at
        if self._file is None or not self._file.is_removed(thorough=thorough):
            return
        self._file.close()
        if self._first is not None:
            self._lost(self._first, self._step, f"{self._file.path.name} removed while the run went on")
        self._file, self._first, self._files = None, None, self._files + 1

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append scalars that no record holds, such as the monitor's own cost."""
        if self._file is not None:
            tags = [tag(name, "value", name, 0, scalar=True) for name in scalars]
            self._file.write(step, time.time(), tags, list(scalars.values()))

    def write_incident(self, incident: Any) -> None:
        """Append an incident: as text, in the list of all, as dots on curves, and the number of incidents."""
        line = incident.to_json()
        shown = self.dashboard.incidents
        shown[line["id"]] = line
        blamed = [(s["name"], s["quantity"]) for s in line["suspects"]]
        self.choice.add_suspects(blamed)
        if self.histograms is not None:
            self.histograms.add_suspects(blamed)
        self.markers.write(line)
        worst = worst_first(shown.values())[0]["id"]
        changed = {line["id"], worst, self._worst} if worst != self._worst else {line["id"]}
        self._worst = worst
        texts = [self._incident(n) for n in sorted(list(shown)[:MAX_TEXT]) if n in changed]
        everything = text("incidents/0 all", incident_list(list(shown.values()), self.output_dir, worst))
        self._append([everything, *texts])
        step = max(self._step, line["first_seen"], 0)
        file, now = self._open(), time.time()
        before, counted = self._counted
        if counted < len(shown) and before < step - 1:  # so that the curve is a stair
            file.write(step - 1, now, [INCIDENTS_FIRST], [float(counted)])
        self._counted = (step, len(shown))
        file.write(step, now, ["scalars/incidents", INCIDENTS_FIRST], [float(len(shown))] * 2)

    def _incident(self, number: int) -> Summary.Value:
        line = self.dashboard.incidents[number]
        return text(f"incidents/{number}", incident_text(line, self.output_dir, worst=number == self._worst))

    def write_settings(self, run: Mapping[str, Any]) -> None:
        """Append the run's configuration."""
        self._append(self.dashboard.settings(run))

    def close(self) -> None:
        """Append the final pictures, and close the event file."""
        self._checked_at = -math.inf
        self._look_for_removed()
        if self._file is not None:
            self._append(self.dashboard.new_layout())
            self.painter.finish(max(self._step, 0), self.dashboard.drawing(), before=self._append_drawn)
            self._append_drawn()
            self._append_notes()
            self._file.close()
            self._file = None

    def _open(self) -> EventFile:
        if self._file is None:
            self._file = EventFile(self.directory, f".{self._files}")
        return self._file

    def _append(self, values: Sequence[Summary.Value]) -> None:
        if values:
            self._open().append(max(self._step, 0), time.time(), values)
