"""Finds the CSV tables that msprobe's monitors write, of both generations.

The first writes `Dec03_21-34-40-rank0-1a2b3c4d/grad_reduced_0-0.csv`, the second `rank_0/module_step0-0.csv`.
"""

import re
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Final

from trainsentry.exporters.csv.format import TableFile

_TIME: Final = r"[A-Z][a-z]{2}\d{2}_\d{2}-\d{2}-\d{2}"
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_FIRST_DIRECTORY: Final = re.compile(rf"(?P<time>{_TIME})-rank(?P<rank>\d{{1,9}})-.+", re.ASCII)
_SECOND_DIRECTORY: Final = re.compile(r"rank_(?P<rank>\d{1,9})", re.ASCII)
_FIRST_FILE: Final = re.compile(r"(?P<table>.+)_(?P<first>\d{1,16})-(?P<last>\d{1,16})\.csv", re.ASCII)
_SECOND_FILE: Final = re.compile(r"(?P<table>.+)_step(?P<first>\d{1,16})-(?P<last>\d{1,16})\.csv", re.ASCII)

SCOPES: Final = {
    "forward": "actv",
    "backward": "actv_grad",
    "unreduced": "grad_unreduced",
    "reduced": "grad_reduced",
}
"""First-generation names of the second generation's scopes; the other scopes have the same name in both."""

Tables = dict[str, dict[str, list[TableFile]]]
"""The files of each table of each run."""


def msprobe_tables(source: Path, time_start: str | None = None, time_end: str | None = None) -> Tables:
    """Return the files of each table by run (`rank0`, …); if a rank has several directories, the newest come last.

    `time_start` and `time_end` (inclusive, as in the names, `Dec03_21-34-40`) select first-generation directories by
    their start.

    Raises:
        ValueError: for an invalid time.

    """
    runs: Tables = {}
    for rank, directories in sorted(_directories(source, time_start, time_end).items()):
        tables: dict[str, list[TableFile]] = defaultdict(list)
        for restart, (_, directory) in enumerate(_in_order(directories)):
            for file in _files(directory, restart):
                tables[file.table].append(file)
        if tables:
            runs[f"rank{rank}"] = dict(tables)
    return runs


def directories_of_rank(source: Path, rank: int, time_start: str, time_end: str) -> list[Path]:
    """Return a rank's first-generation directories that began between two times (inclusive), the newest last.

    Raises:
        ValueError: for an invalid time.

    """
    return [path for _, path in _in_order(_directories(source, time_start, time_end).get(rank, []))]


def time_name(moment: datetime) -> str:
    """Return a time as in the directories' names, whatever the locale.

    >>> time_name(datetime(2026, 12, 3, 21, 34, 40))
    'Dec03_21-34-40'
    """
    return f"{_MONTHS[moment.month - 1]}{moment:%d_%H-%M-%S}"


def _directories(source: Path, time_start: str | None, time_end: str | None) -> dict[int, list[tuple[datetime, Path]]]:
    """Return each rank's directories with the times in their names."""
    begin, end = _time(time_start), _time(time_end)
    found: dict[int, list[tuple[datetime, Path]]] = defaultdict(list)
    for path in [source.resolve(), *sorted(source.iterdir())] if source.is_dir() else []:
        first, second = _FIRST_DIRECTORY.fullmatch(path.name), _SECOND_DIRECTORY.fullmatch(path.name)
        if first is not None and path.is_dir():
            try:
                time = _time(first["time"])
            except ValueError:
                continue  # only looks like one of msprobe's names
            if time is not None and (begin is None or time >= begin) and (end is None or time <= end):
                found[int(first["rank"])].append((time, path))
        elif second is not None and path.is_dir() and begin is None and end is None:
            found[int(second["rank"])].append((datetime.min, path))
    return found


def _in_order(directories: list[tuple[datetime, Path]]) -> list[tuple[datetime, Path]]:
    """Sort directories by time. Names have no year: if autumn months occur too, the first half year counts as later."""
    months = {time.month for time, _ in directories}
    wraps = any(month >= 10 for month in months) and any(month <= 3 for month in months)
    return sorted((time.replace(year=2004) if wraps and time.month <= 6 else time, path) for time, path in directories)


def _files(directory: Path, restart: int) -> list[TableFile]:
    pattern = _SECOND_FILE if _SECOND_DIRECTORY.fullmatch(directory.name) else _FIRST_FILE
    matches = ((path, pattern.fullmatch(path.name)) for path in sorted(directory.iterdir()))
    return [
        TableFile(path, match["table"], int(match["first"]), int(match["last"]), restart, foreign=True)
        for path, match in matches
        if match is not None and path.is_file()
    ]


def _time(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        month = _MONTHS.index(text[:3]) + 1  # independent of the locale's month names
        return datetime.strptime(f"2000-{month:02}-{text[3:]}", "%Y-%m-%d_%H-%M-%S")  # 2000 is a leap year
    except ValueError:
        raise ValueError(f"time {text!r}; allowed: as in the directories' names, such as Dec03_21-34-40") from None
