"""The content of `status.json`: how the recording stands, with what the trainer counts."""

import time
from typing import TYPE_CHECKING, Any

from trainsentry.exporters.run_file import SCHEMA_VERSION

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
