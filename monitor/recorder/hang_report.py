"""What the training process says of a step that does not end, as an anomaly."""

from pathlib import Path

from trainsentry.anomaly.across_ranks.hang import HangRule
from trainsentry.anomaly.anomaly import Anomaly
from trainsentry.exporters.files.foreign_files import read_object


class HangReport:
    """Reads `hang.json`, which the watch for hangs writes: a thread beside a stuck loop may not use the ring."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "hang.json"
        self._seen = self._written_at()

    def news(self) -> Anomaly | None:
        """Return what was written since the last call."""
        written = self._written_at()
        if written == self._seen:
            return None
        self._seen = written
        try:
            return HangRule.judge(read_object(self._path))
        except (OSError, ValueError, KeyError, TypeError, IndexError):  # what a person put there
            return None

    def _written_at(self) -> float:
        try:
            return self._path.stat().st_mtime
        except OSError:  # there is none
            return 0.0
