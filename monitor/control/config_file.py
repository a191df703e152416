"""The configuration file of a run, read again when it changes."""

from collections.abc import Callable
from pathlib import Path

from trainsentry.monitor.config.files import load_config
from trainsentry.monitor.config.schema import MonitorConfig

Load = Callable[[Path, int], MonitorConfig | None]
"""Returns the configuration in a file for the given next step; None for a file that changes nothing."""


def load_ours(path: Path, step: int) -> MonitorConfig | None:
    """Return the configuration in one of our files."""
    del step
    return load_config(path)


class ConfigFile:
    """Notices that a file was replaced or rewritten since it was last read."""

    def __init__(self, path: Path, load: Load = load_ours) -> None:
        self.path = path.absolute()
        self._load = load
        self._state = self._now()

    def changed(self, step: int) -> MonitorConfig | None:
        """Return the file's configuration when it has changed, for the given next step.

        Raises:
            ConfigError: when it cannot be read, or for a key or value that is not allowed.

        """
        state = self._now()
        if state == self._state or state is None:
            return None
        self._state = state
        return self._load(self.path, step)

    def _now(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
