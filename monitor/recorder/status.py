"""How the recording stands: `status.json`, and what the trainer is told of sinks and gaps."""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from trainsentry.exporters.files.json_files import SCHEMA_VERSION
from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.sinks.gaps import Gaps
from trainsentry.monitor.recorder.sinks.writer_thread import WriterThread

if TYPE_CHECKING:
    from trainsentry.monitor.recorder.session import Session


def status_of(session: "Session", state: str) -> dict[str, Any]:
    """Return the status; `state` is `running`, or says how the run ended."""
    lag_steps, lag_seconds = lag_of(session.step, session.time, session.newest())
    return {
        "schema_version": SCHEMA_VERSION,
        "state": state,
        "rank": session.hello.rank,
        "step": session.step,
        "records": session.records,
        "series": len(session.table.series),
        "incidents": len(session.incidents.incidents),
        "anomalies": session.findings.anomalies,
        "overflow_steps": session.overflow.count,
        "skipped_overflow_steps": session.overflow.skipped,
        "exporters": {sink.name: sink.state for sink in session.files},
        "gaps": session.gaps.to_json(),
        "lag_steps": lag_steps,
        "lag_seconds": lag_seconds,
        "recorders_started": session.hello.relay + 1,
        "updated": time.time(),
        **session.counters,
    }


def lag_of(step: int, made: float, newest: tuple[int, float] | None) -> tuple[int, float]:
    """Return steps and seconds from the record that was handled last, made at `made`, to the trainer's `newest`.

    >>> lag_of(7, 100.0, (9, 100.5)), lag_of(9, 100.5, (9, 100.5)), lag_of(-1, 0.0, None)
    ((2, 0.5), (0, 0.0), (0, 0.0))
    """
    if newest is None or newest[0] <= step:
        return 0, 0.0
    return newest[0] - step, max(newest[1] - made, 0.0) if made else 0.0


KINDS: Final = {"trouble": messages.TROUBLE, "goes_on": messages.GOES_ON, "off": messages.FAILURE}
"""What the trainer is told of a sink's news."""


class StatusReporter:
    """Sends what is new of sinks and of the gaps, which the trainer keeps for a successor."""

    def __init__(self, gaps: Gaps, send: Callable[[dict[str, Any]], None]) -> None:
        self.gaps = gaps
        self._send = send
        self._told = 0

    def tell(self, sinks: Iterable[WriterThread]) -> None:
        """Tell what is new."""
        for sink in sinks:
            for news in sink.take_events():
                self._send({"type": KINDS[news.what], "part": sink.name, "message": news.reason, "step": news.step})
        if self.gaps.changes != self._told:
            self._told = self.gaps.changes
            self._send({"type": messages.GAPS, "gaps": self.gaps.to_json()})

    def tell_end(self, files: Iterable[WriterThread]) -> None:
        """Tell that all is over: every gap, and, where nothing at all could be written to `files`, why."""
        gaps = self.gaps.to_json()
        why = next((gap["reason"] for gap in gaps), None)
        nothing = None if any(sink.written for sink in files) else why
        self._send({"type": messages.CLOSED, "gaps": gaps, "nothing_written": nothing})
