"""Watches the directory that a rank writes to, and writes its files again if somebody removes it."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trainsentry.exporters.files.json_files import append_lines, replace_json, write_run
from trainsentry.monitor.recorder.sinks.claim import renew

if TYPE_CHECKING:
    from trainsentry.monitor.recorder.session import Session


class DirectoryWatch:
    """Holds a directory open to detect its removal; while it is open, its inode number is not reused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = -1

    def look(self, removed: Callable[[], None]) -> None:
        """Call `removed` if the directory was removed or replaced since the last call."""
        if self._held < 0:
            with contextlib.suppress(OSError):  # it does not exist yet
                self._held = os.open(self.path, os.O_RDONLY)
            return
        if self._is_there():
            return
        self.close()
        removed()

    def close(self) -> None:
        """Close the directory."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def _is_there(self) -> bool:
        held = os.fstat(self._held)
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return False
        except OSError:  # unknown for now
            return True
        return held.st_nlink > 0 and (held.st_dev, held.st_ino) == (found.st_dev, found.st_ino)


def rewrite_removed_files(session: "Session") -> None:
    """Write the claim, `graph.json`, `run.json` and the incidents again after somebody removed the directory."""
    session.gaps.add("journal", session.hello.start_step, max(session.step, 0), f"{session.directory} was removed")
    renew(session.hello.claim)
    if session.graph:
        replace_json(session.own_file("graph.json"), session.graph)
    if session.run and not session.run_file.exists():
        write_run(session.run_file, session.run)
    if session.is_root and not session.incidents_file.exists():
        incidents = tuple(session.incidents.incidents.values())
        append_lines(session.incidents_file, [incident.to_json() for incident in incidents])
