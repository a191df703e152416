"""Keeps the tables of a rank inside a disk quota: the oldest blocks outside incidents go first."""

from collections.abc import Sequence
from pathlib import Path

from trainsentry.exporters.csv_format import parse_file_name


def enforce_quota(directory: Path, quota: int, step: int, incidents: Sequence[tuple[int, int]]) -> list[Path]:
    """Delete the oldest finished tables until the directory holds at most `quota` bytes; return them.

    Tables of the block that `step` is in are being written and stay; tables that hold steps of an incident
    (first and last step) go only when nothing else is left.
    """
    files = [(file, file.path.stat().st_size) for p in directory.glob("*.csv") if (file := parse_file_name(p))]
    total = sum(size for _, size in files)
    finished = [(file, size) for file, size in files if file.last < step]

    def spared(first: int, last: int) -> bool:
        return any(first <= end and begin <= last for begin, end in incidents)

    finished.sort(key=lambda item: (spared(item[0].first, item[0].last), item[0].last, item[0].restart))
    deleted = []
    for file, size in finished:
        if total <= quota:
            break
        file.path.unlink()
        total -= size
        deleted.append(file.path)
    return deleted
