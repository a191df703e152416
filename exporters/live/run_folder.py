"""Finds the runs below a folder; a request names one of them, and no path is ever made from a request."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from trainsentry.exporters.csv.format import TableFile
from trainsentry.exporters.csv.table_parts import tables_in
from trainsentry.exporters.files.foreign_files import InputError

MAX_RUNS: Final = 500
"""Runs that a page lists."""

MAX_FOLDERS: Final = 5000
"""Folders that are looked into for runs, so that a page over a home directory still opens."""

DEPTH: Final = 3
"""Folders below the one that is served: `experiments/job/monitor_output`."""

GLOBAL: Final = "global"
_RANK: Final = re.compile(r"rank(\d{1,9})", re.ASCII)


def find_runs(folder: Path) -> dict[str, Path]:
    """Return the runs in a folder by the path inside it, `.` for the folder itself; the newest first.

    A link that leads out of the folder is left out.
    """
    top = folder.resolve()
    if _is_run(top):
        return {".": top}
    found = [path for path in _folders(top) if _is_run(path)]
    newest = sorted(found, key=_changed, reverse=True)[:MAX_RUNS]
    return {path.relative_to(top).as_posix(): path for path in newest}


def _folders(top: Path) -> Iterator[Path]:
    """Yield the folders below `top`, the upper ones first, without those inside a run."""
    level, seen = [top], 0
    for _ in range(DEPTH):
        below: list[Path] = []
        for folder in level:
            try:
                inside = sorted(p for p in folder.iterdir() if not p.name.startswith(".") and not p.is_symlink())
                inside = [path for path in inside if path.is_dir()]
            except OSError:
                continue
            for path in inside:
                seen += 1
                if seen > MAX_FOLDERS:
                    return
                yield path
            below += [path for path in inside if not _is_run(path)]
        level = below


def _is_run(path: Path) -> bool:
    try:
        return (path / "run.json").is_file() or any(p.is_dir() and _RANK.fullmatch(p.name) for p in path.glob("rank*"))
    except OSError:
        return False


def _changed(path: Path) -> float:
    try:
        return max((p.stat().st_mtime for p in (path, path / "rank0" / "status.json") if p.exists()), default=0.0)
    except OSError:
        return 0.0


def leads_out(run: Path) -> list[str]:
    """Return the names of the run's own files that are links to something outside the run."""
    names = ["run.json", "incidents.jsonl"]
    names += [
        f"{d.name}{rest}" for d in run.glob("rank*") for rest in ("", "/status.json", "/anomalies.jsonl", "/graph.json")
    ]
    return [name for name in names if not (run / name).resolve().is_relative_to(run)]


def tables_of(run: Path, rank: str) -> dict[str, list[TableFile]]:
    """Return the tables of a rank, given as its number or `global`.

    Raises:
        InputError: when the run has no such rank.

    """
    name = rank if rank == GLOBAL else f"rank{rank}"
    if name != GLOBAL and not _RANK.fullmatch(name):
        raise InputError("rank: not a number")
    if not (run / name).is_dir():
        raise InputError(f"the run has no {name}")
    return tables_in(run / name, run)


def ranks_with_tables(run: Path) -> list[str]:
    """Return the ranks of a run in order, `global` last if it is there."""
    found = (_RANK.fullmatch(path.name) for path in run.glob("rank*") if path.is_dir())
    numbers = sorted(int(match[1]) for match in found if match is not None)
    return [*map(str, numbers), *([GLOBAL] if (run / GLOBAL).is_dir() else [])]


def short_run(name: str, path: Path) -> dict[str, Any]:
    """Return what a list of runs says of one: read from its first rank's status and its incidents' size alone."""
    incidents = path / "incidents.jsonl"
    try:
        size = incidents.stat().st_size
    except OSError:
        size = 0
    return {"name": name, "changed": _changed(path), "has_incidents": size > 0}
