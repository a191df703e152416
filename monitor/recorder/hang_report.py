"""Reads the training process's report of a hanging step as an anomaly."""

import math
from pathlib import Path
from typing import Any, Final

from trainsentry.anomaly.anomaly import HANG, Anomaly
from trainsentry.collectors.series import COMMUNICATION_INPUT
from trainsentry.exporters.files.foreign_files import read_object

NAME: Final = "hang"

SCORE: Final = 100.0
"""Score of a hang, the same as of a non-finite value: no healthy step takes that long."""


class HangReport:
    """Reads `hang.json`. The watch for hangs writes a file because its thread may not use the ring of a stuck loop."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "hang.json"
        self._seen = self._written_at()

    def news(self) -> Anomaly | None:
        """Return the hang reported since the last call, or None."""
        written = self._written_at()
        if written == self._seen:
            return None
        self._seen = written
        try:
            return anomaly_of(read_object(self._path))
        except (OSError, ValueError, KeyError, TypeError, IndexError):  # not a hang report
            return None

    def _written_at(self) -> float:
        try:
            return self._path.stat().st_mtime
        except OSError:  # no such file
            return 0.0


def anomaly_of(told: dict[str, Any]) -> Anomaly:
    """Return the anomaly: the missing rank, and the collective in which the others wait, or else the step.

    Raises:
        KeyError, TypeError, IndexError: when `told` is not the content of a `hang.json`.

    """
    call = told["call"]
    name = f"{call['group']}.{call['op']}" if call else "step"
    return Anomaly(
        step=told["step"],
        micro_step=0,
        rank=told["missing"][0] if told["missing"] else told["rank"],
        order=0,
        name=name,
        quantity=COMMUNICATION_INPUT if call else "training",
        statistic="sequence" if call else "seconds",
        value=float(call["sequence"]) if call else told["seconds"],
        expected=math.nan,
        score=SCORE,
        detector=NAME,
        kind=HANG,
        last_clean=told["step"] - 1,
    )
