"""The directory that a rank writes to, which somebody may remove while the run goes on."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


class Home:
    """Holds a directory, so that its removal shows: its number in the file system is not given to another meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = -1

    def look(self, removed: Callable[[], None]) -> None:
        """Call `removed` when the directory is not the one that was there at the last look."""
        if self._held < 0:
            with contextlib.suppress(OSError):  # there is none yet
                self._held = os.open(self.path, os.O_RDONLY)
            return
        if self._is_there():
            return
        self.close()
        removed()

    def close(self) -> None:
        """Let go of the directory."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def _is_there(self) -> bool:
        held = os.fstat(self._held)
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return False
        except OSError:  # not to be told now
            return True
        return held.st_nlink > 0 and (held.st_dev, held.st_ino) == (there.st_dev, there.st_ino)
