"""How a run stands: running, finished, stopped or crashed, and how far its recorders are behind."""

from collections.abc import Mapping
from typing import Any, Final, Literal

from trainsentry.exporters.run_reader import RecordedRun

RunState = Literal["running", "stopped", "crashed", "finished", "unknown"]

STATES: Final[tuple[RunState, ...]] = ("running", "finished", "stopped", "crashed")
"""The states of a run; `unknown` is the state of a directory without a status."""

SILENT_SECONDS: Final = 30.0
"""Seconds without a new status after which a running rank counts as silent; ranks write one every few seconds."""


def state_of_rank(status: Mapping[str, Any]) -> RunState:
    """Return how a rank stands by its `status.json`.

    A trainer that has gone without closing its monitor has crashed: it was killed, or it left by `os._exit`.

    >>> state_of_rank({"state": "closed", "ended": "stopped"}), state_of_rank({"state": "trainer gone"})
    ('stopped', 'crashed')
    """
    state, ended = status.get("state"), status.get("ended")
    if state is None:
        return "unknown"
    if state == "running":
        return "running"
    if state == "trainer gone":
        return "crashed"
    return ended if ended in {"stopped", "crashed"} else "finished"


def state_of_run(run: RecordedRun) -> RunState:
    """Return how a run stands: one rank that crashed or still runs decides for all.

    A status from before the run's last start is that of a rank which has not written yet: it runs.
    """
    began = run.settings.get("start_time", 0.0)
    found = {
        "running" if status.get("updated", began) < began else state_of_rank(status) for status in run.ranks.values()
    }
    order: tuple[RunState, ...] = ("crashed", "running", "stopped", "finished")
    return next((state for state in order if state in found), "unknown")


def is_silent(status: Mapping[str, Any], now: float) -> bool:
    """Return whether a rank that should run has not renewed its status; `now` is in seconds since the epoch."""
    return status.get("state") == "running" and now - status.get("updated", now) > SILENT_SECONDS


def lag_of(run: RecordedRun) -> tuple[int, float]:
    """Return the steps and seconds that the slowest recorder is behind the training."""
    lags = [(status.get("lag_steps", 0), status.get("lag_seconds", 0.0)) for status in run.ranks.values()]
    return max(lags, default=(0, 0.0))


def troubles_of(status: Mapping[str, Any]) -> list[str]:
    """Return the parts of the monitor that have failed on a rank: sinks with a gap, and collectors that are off."""
    parts = [str(gap.get("sink")) for gap in status.get("gaps", [])]
    return list(dict.fromkeys([*parts, *(str(part) for part in status.get("failures", []))]))
