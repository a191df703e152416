"""Keeps the tables of a rank within a disk quota; deletes the oldest blocks outside incidents first."""

from collections.abc import Sequence
from pathlib import Path

from trainsentry.exporters.csv.format import parse_file_name
from trainsentry.exporters.csv.levels import FOLDER


def enforce_quota(
    directory: Path,
    quota: int,
    step: int,
    incidents: Sequence[tuple[int, int]],
    *,
    restart: int = 0,
    events: Path | None = None,
) -> list[Path]:
    """Delete the oldest finished files of a rank until they hold at most `quota` bytes; return them.

    All files in `directory`, the levels of its tables and the event files in `events` count. Tables and event files are
    deleted by age, except the block that holds `step` of this `restart` and the newest event file: both are being
    written. Tables that hold steps of an incident (first and last step) are deleted only when nothing else is left.
    """
    files = [*directory.iterdir(), *directory.glob(f"{FOLDER}/*/*")] if directory.is_dir() else []  # `global` may lack
    sizes = {path: path.stat() for path in files if path.is_file()}
    event_files = sorted(events.glob("events.out.tfevents.*"), key=lambda p: p.stat().st_mtime) if events else []
    sizes |= {path: path.stat() for path in event_files}

    def spared(first: int, last: int) -> bool:
        return any(first <= end and begin <= last for begin, end in incidents)

    finished = [(False, sizes[path].st_mtime_ns, path) for path in event_files[:-1]]
    for path in sizes:
        table = parse_file_name(path)
        if table is not None and (table.restart < restart or table.last < step):
            finished.append((spared(table.first, table.last), sizes[path].st_mtime_ns, path))
    total = sum(entry.st_size for entry in sizes.values())
    deleted = []
    for _, _, path in sorted(finished):
        if total <= quota:
            break
        path.unlink()
        total -= sizes[path].st_size
        deleted.append(path)
    return deleted
