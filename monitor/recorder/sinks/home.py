"""The directory that a rank writes to, which somebody may remove while the run goes on."""

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


def rewrite_removed_files(session: "Session") -> None:
    """Write again what is replaced as a whole, and the incidents: somebody has removed the directory."""
    session.gaps.add("journal", session.hello.start_step, max(session.step, 0), f"{session.directory} was removed")
    renew(session.hello.claim)
    if session.graph:
        replace_json(session.own_file("graph.json"), session.graph)
    if session.run and not session.run_file.exists():
        write_run(session.run_file, session.run)
    if session.is_root and not session.incidents_file.exists():
        incidents = tuple(session.incidents.incidents.values())
        append_lines(session.incidents_file, [incident.to_json() for incident in incidents])
