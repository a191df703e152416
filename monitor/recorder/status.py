"""The content of `status.json`: how the recording stands, with what the trainer counts."""

import time
from typing import TYPE_CHECKING, Any

from trainsentry.exporters.run_file import SCHEMA_VERSION

if TYPE_CHECKING:
    from trainsentry.monitor.recorder.session import Session


def status_of(session: "Session", state: str) -> dict[str, Any]:
    """Return the status; `state` is `running`, or says how the run ended."""
    sinks = [*(sink for sink, _ in session.writers.exporters), session.journal]
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
        "exporters": {s.name: s.off or "writing" for s in sinks},
        "gaps": session.gaps,
        "recorders_started": session.hello.relay + 1,
        "updated": time.time(),
        **session.counters,
    }
