"""A rank's output directory: notices its removal, and keeps its tables and event files within the disk quota."""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from trainsentry.exporters.csv.quota import enforce_quota
from trainsentry.exporters.files.json_files import append_lines, replace_json, write_run
from trainsentry.monitor.recorder.sinks.claim import renew


class DirectoryWatch:
    """Notices a directory's removal: it is held open, so that no other directory gets its inode."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = -1

    def check(self, removed: Callable[[], None]) -> None:
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
        except OSError:  # the file system cannot answer now
            return True
        return held.st_nlink > 0 and (held.st_dev, held.st_ino) == (found.st_dev, found.st_ino)


def rewrite_removed_files(
    claim: dict[str, Any],
    graph: tuple[Path, dict[str, Any]],
    run: tuple[Path, dict[str, Any]],
    incidents: tuple[Path, list[dict[str, Any]]],
) -> None:
    """Rewrite removed files: the claim, `graph.json`, and, if they are missing, `run.json` and the incidents.

    Each pair is a path and its content; empty content is left out.
    """
    renew(claim)
    if graph[1]:
        replace_json(*graph)
    if run[1] and not run[0].exists():
        write_run(*run)
    if not incidents[0].exists():
        append_lines(*incidents)


def quota_works(session: Any) -> Iterator[Callable[[], Any]]:
    """Yield a deletion job per directory; jobs delete the oldest blocks first, those of incidents last."""
    spared = [(i.first_seen, i.last_seen) for i in session.incidents.incidents.values()]
    curves = session.root / "tensorboard"
    directories = [(session.directory, session.restart, curves / f"rank{session.settings.rank}")]
    if session.global_writers is not None:
        directories.append((session.root / "global", session.global_writers.restart, curves / "global"))
    for directory, restart, events in directories:
        yield partial(
            enforce_quota, directory, session.settings.disk_quota, session.step, spared, restart=restart, events=events
        )
