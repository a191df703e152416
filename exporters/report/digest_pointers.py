"""Names the files and commands that lead from a digest to the whole evidence."""

import shlex
from collections.abc import Callable, Sequence
from typing import Final

from trainsentry.exporters.csv.format import parse_file_name, table_paths
from trainsentry.exporters.incident_groups import IncidentGroup
from trainsentry.exporters.report.digest import Pointer
from trainsentry.exporters.run_reader import RecordedRun
from trainsentry.exporters.short_text import plain

MOST_DUMPS: Final = 3
"""Dumps that are named; the directory shows the others."""


def pointers_of(
    run: RecordedRun, groups: Sequence[IncidentGroup], cut: Callable[[str], str] = lambda text: text
) -> list[Pointer]:
    """Return what exists of a run's evidence, and the commands that show it; paths are below the run's directory."""
    folder = shlex.quote(plain(str(run.root)))
    found = [Pointer(what="the incidents in full", where="incidents.jsonl")] if groups else []
    found += [Pointer(what="every abnormal value in order", where=cut(path)) for path in _anomalies(run, groups)]
    found += [Pointer(what=cut(f"tables of {quantity}"), where=cut(path)) for quantity, path in _tables(run, groups)]
    dumps = [f"{kind}/{path.name}" for kind in ("dump", "overflow") for path in sorted(run.root.glob(f"{kind}/step*"))]
    found += [Pointer(what="tensors of a step", where=cut(f"{path}/")) for path in dumps[:MOST_DUMPS]]
    if (run.root / "report.html").exists():
        found.append(Pointer(what="the report as a page", where="report.html"))
    else:
        found.append(Pointer(what="command that writes the report", where=f"trainsentry report {folder}"))
    command = f"trainsentry diagnose {folder}" if groups else f"trainsentry watch {folder} --once"
    found.append(Pointer(what="command that shows more", where=command))
    return found


def _anomalies(run: RecordedRun, groups: Sequence[IncidentGroup]) -> list[str]:
    ranks = dict.fromkeys(group.worst.get("rank") for group in groups)
    paths = [f"rank{rank}/anomalies.jsonl" for rank in ranks if rank in run.ranks]
    return [path for path in paths if (run.root / path).exists()][:2]


def _tables(run: RecordedRun, groups: Sequence[IncidentGroup]) -> list[tuple[str, str]]:
    """Return the tables of the first suspects' quantities, as a quantity and a pattern of paths."""
    found = []
    for rank, quantity in dict.fromkeys((g.worst.get("rank"), g.worst.get("quantity")) for g in groups):
        if rank not in run.ranks:
            continue
        files = map(parse_file_name, table_paths(run.root / f"rank{rank}"))
        if any(file is not None and file.table == quantity for file in files):
            found.append((str(quantity), f"rank{rank}/{quantity}_*"))
    return found[:2]
