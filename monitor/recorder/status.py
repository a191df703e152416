"""The state of the recording: `status.json`, and the messages to the trainer about sinks and gaps."""

import time
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from trainsentry.collectors.series import SeriesTable
from trainsentry.exporters.files.json_files import SCHEMA_VERSION
from trainsentry.exporters.run_reader import NO_STEP_NOTE
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.publisher import IncidentPublisher
from trainsentry.monitor.recorder.recorder_settings import RecorderSettings
from trainsentry.monitor.recorder.sinks.gaps import Gaps
from trainsentry.monitor.recorder.sinks.writers import WriterThread


class ShownRecording(Protocol):
    """The parts of a session that its status shows.

    `newest` returns step and time of the trainer's newest record; `counters` are the trainer's.
    """

    settings: RecorderSettings
    step: int
    time: float
    records: int
    table: SeriesTable
    incidents: IncidentPublisher
    gaps: Gaps
    counters: dict[str, Any]
    newest: Callable[[], tuple[int, float] | None]

    @property
    def files(self) -> list[WriterThread]:
        """Every sink of records and of the journal."""


def status_of(session: ShownRecording, state: str) -> dict[str, Any]:
    """Return the content of `status.json`; `state` is `running`, or says how the run ended."""
    lag_steps, lag_seconds = lag_of(session.step, session.time, session.newest())
    nothing = not session.records and not session.settings.relay and not session.gaps.to_json()
    return {
        "schema_version": SCHEMA_VERSION,
        "state": state,
        **({"note": NO_STEP_NOTE} if nothing else {}),
        "rank": session.settings.rank,
        "step": session.step,
        "records": session.records,
        "series": len(session.table.series),
        "incidents": len(session.incidents.incidents),
        "anomalies": session.incidents.anomalies,
        "overflow_steps": session.incidents.overflow.count,
        "skipped_overflow_steps": session.incidents.overflow.skipped,
        "exporters": {sink.name: sink.state for sink in session.files},
        "gaps": session.gaps.to_json(),
        "left_out": session.gaps.left_out,
        "lag_steps": lag_steps,
        "lag_seconds": lag_seconds,
        "recorder_seconds": seconds_of(session.settings),
        "recorders_started": session.settings.relay + 1,
        "updated": time.time(),
        **session.counters,
    }


def seconds_of(settings: RecorderSettings) -> float | None:
    """Return the seconds that the recorder took of a processor; None where it shares the training's process."""
    return time.process_time() if settings.parent else None


def lag_of(step: int, made: float, newest: tuple[int, float] | None) -> tuple[int, float]:
    """Return the steps and seconds between the last record, made at `made`, and the trainer's `newest`.

    >>> lag_of(7, 100.0, (9, 100.5)), lag_of(9, 100.5, (9, 100.5)), lag_of(-1, 0.0, None)
    ((2, 0.5), (0, 0.0), (0, 0.0))
    """
    if newest is None or newest[0] <= step:
        return 0, 0.0
    return newest[0] - step, max(newest[1] - made, 0.0) if made else 0.0


LATE_STEPS: Final = 5
"""Steps behind the training above which the recorder is late: an alarm then comes later than it could."""

LATE_SECONDS: Final = 0.5
"""Seconds that it must be behind as well, once it has caught up after its start: in less, a loop of steps of a
millisecond is hundreds of steps ahead whenever anything else takes the core, and nobody acts faster."""

STARTING_SECONDS: Final = 2.0
"""The same before it has caught up for the first time: a process takes a second to start on a busy core."""

MESSAGES: Final = {"trouble": messages.TROUBLE, "goes_on": messages.GOES_ON, "off": messages.FAILURE}
"""The type of the message to the trainer for each kind of `SinkEvent`."""


class StatusReporter:
    """Sends the trainer the events of sinks, and the gaps, which it keeps for a successor."""

    def __init__(self, gaps: Gaps, send: Callable[[dict[str, Any]], None]) -> None:
        self.gaps = gaps
        self._send = send
        self._sent_changes = 0
        self._sent_lag = 0.0
        self._has_caught_up = False

    def send(self, sinks: Iterable[WriterThread]) -> None:
        """Send the events and gaps since the last call."""
        for sink in sinks:
            for event in sink.take_events():
                kind = MESSAGES[event.kind]
                self._send({"type": kind, "part": sink.name, "message": event.reason, "step": event.step})
        if self.gaps.changes != self._sent_changes:
            self._sent_changes = self.gaps.changes
            self._send({"type": messages.GAPS, "gaps": self.gaps.to_json()})

    def send_lag(self, steps: int, seconds: float) -> None:
        """Send how far the recorder is behind the training if that is late, and again when it has doubled."""
        self._has_caught_up |= steps <= LATE_STEPS
        least = LATE_SECONDS if self._has_caught_up else STARTING_SECONDS
        if steps > LATE_STEPS and seconds > max(least, 2 * self._sent_lag):
            self._sent_lag = seconds
            self._send({"type": messages.LAG, "steps": steps, "seconds": seconds})

    def send_end(self, files: Iterable[WriterThread], seconds: float | None) -> None:
        """Send the end of the recording: every gap, and the reason when nothing could be written to `files`.

        `seconds` are those that the recorder took of a processor, where they are known.
        """
        gaps = self.gaps.to_json()
        why = next((gap["reason"] for gap in gaps), None)
        nothing = None if any(sink.written for sink in files) else why
        self._send({"type": messages.CLOSED, "gaps": gaps, "nothing_written": nothing, "recorder_seconds": seconds})
