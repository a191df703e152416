"""Reads the training process's report of a hanging step as an anomaly."""

from pathlib import Path

from trainsentry.anomaly.across_ranks.hang import HangRule
from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.exporters.files.foreign_files import read_object


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
            return HangRule.judge(read_object(self._path))
        except (OSError, ValueError, KeyError, TypeError, IndexError):  # not a hang report
            return None

    def _written_at(self) -> float:
        try:
            return self._path.stat().st_mtime
        except OSError:  # no such file
            return 0.0
