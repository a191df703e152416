"""Reads the data of a report from the files of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.series import GRADIENT, STEP_SECONDS
from trainsentry.exporters.csv.format import SCALARS, TableFile
from trainsentry.exporters.csv.reader import table_files
from trainsentry.exporters.csv.table_rows import RowKeys
from trainsentry.exporters.engine import Mapper, map_locally
from trainsentry.exporters.files.foreign_files import InputError, Report
from trainsentry.exporters.maps.layer_matrix import LayerMatrix
from trainsentry.exporters.maps.ranks_map import chosen_ranks
from trainsentry.exporters.report.history_rows import history_rows
from trainsentry.exporters.report.suspect_curves import (
    MAX_POINTS,
    RATIOS,
    Points,
    SuspectCurves,
    kind_of,
    shown_statistic,
    thin,
)
from trainsentry.exporters.report.suspect_histograms import StepHistogram, SuspectHistograms
from trainsentry.exporters.run_reader import RecordedRun, anomalies_since, read_run
from trainsentry.exporters.tensorboard.quantity_view import LayoutSizes, QuantityView

COLUMNS: Final = 256
"""Columns of a picture: steps, or bins of steps."""

MAX_RANKS: Final = 8
"""Ranks whose curves of a suspect are shown together."""

MAX_SIBLINGS: Final = 12
"""Layers of a suspect's kind whose curves are shown with its own."""

MAX_ANOMALIES: Final = 1000
"""Anomalies of a rank that are read, from the first incident on; the rest is only counted."""

MAX_MARKED: Final = 50
"""Incidents whose steps are read in any case, also of a history that is too long to be read whole."""

MAX_SUSPECTS: Final = 12
"""Distinct suspects that have a curve: the first one of every incident, then the second ones of the worst."""

RANK_SCALARS: Final = ("loss", STEP_SECONDS)
"""Scalars whose ranks are compared."""

CurveKey = tuple[int, str, str]
"""Rank, quantity and statistic."""


@dataclass
class ReportData:
    """A run, its scalars by name (steps and values), its matrices by (rank, quantity), and the suspects' curves.

    `curves` holds the suspects and their siblings by name, in the statistic that the suspect's sentence speaks of, and
    `histograms`, by (rank, quantity), the suspects' by name. `rank_scalars` holds RANK_SCALARS of many ranks, where
    there are several.
    """

    run: RecordedRun
    scalars: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    matrices: dict[tuple[int, str], LayerMatrix] = field(default_factory=dict)
    anomalies: list[dict[str, Any]] = field(default_factory=list)
    more_anomalies: int = 0
    problems: int = 0
    curves: dict[CurveKey, dict[str, Points]] = field(default_factory=dict)
    histograms: dict[tuple[int, str], dict[str, list[StepHistogram]]] = field(default_factory=dict)
    rank_scalars: dict[str, dict[int, Points]] = field(default_factory=dict)

    def curve(self, rank: int, quantity: str, name: str) -> tuple[list[int], list[float]] | None:
        """Return a layer's root mean square over steps (Inf: not finite); None if the layer was not recorded."""
        matrix = self.matrices.get((rank, quantity))
        if matrix is None or name not in matrix.names:
            return None
        row = matrix.table()[matrix.names.index(name)]
        seen = np.flatnonzero(~np.isnan(row))
        return [matrix.step_of(int(i)) for i in seen], row[seen].tolist()

    def siblings(self, rank: int, quantity: str, name: str) -> list[str]:
        """Return layers whose names differ only in numbers, nearest first."""
        matrix = self.matrices.get((rank, quantity))
        if matrix is None or name not in matrix.names:
            return []
        kind, row = kind_of(name), matrix.names.index(name)
        found = [(abs(i - row), other) for i, other in enumerate(matrix.names) if other != name]
        return [other for _, other in sorted(found) if kind_of(other) == kind][:MAX_SIBLINGS]


def gather(
    root: Path, report: Report, progress: Callable[[str], None] = lambda _: None, mapper: Mapper = map_locally
) -> ReportData:
    """Read a run in bounded memory; report and skip malformed lines.

    `mapper` applies the reader to the tables, here or on a cluster.

    Raises:
        InputError: when `root` holds no output of trainsentry.

    """
    run = read_run(root, report)
    if not run.ranks:
        raise InputError(f"{root}: holds no output of trainsentry (expected rank0/ with status.json in it)")
    data = ReportData(run)
    suspects = [s for incident in run.incidents[:3] for s in incident.get("suspects", [])[:8]]
    shown = shown_suspects(run)
    whole = next(iter([s["rank"] for s in suspects if s.get("rank") in run.ranks]), next(iter(run.ranks)))
    blamed = {s["rank"] for s in (*suspects, *shown)}
    others = [rank for rank in sorted(run.ranks, key=lambda rank: rank not in blamed) if rank != whole][: MAX_RANKS - 1]
    wanted = {s.get("quantity") for s in (*suspects, *shown)} or {GRADIENT}
    since = min((i["first_seen"] for i in run.incidents if "first_seen" in i), default=0)
    marked = tuple(sorted({i["first_seen"] for i in run.incidents if "first_seen" in i})[:MAX_MARKED])
    wanted_tables: list[_Wanted] = []
    for rank in [whole, *others]:
        directory = root / f"rank{rank}"
        try:
            tables = table_files(directory)
        except InputError:
            continue
        for name, files in tables.items():
            if name == SCALARS and rank == whole:
                data.scalars = _scalars(files, marked, report)
            elif name != SCALARS and (rank == whole or name in wanted):
                singly = {(s["name"], shown_statistic(s)) for s in shown if s["quantity"] == name}
                wanted_tables.append((rank, name, files, tuple(sorted(singly)), marked))
        if rank == whole or rank in blamed:
            found, more = anomalies_since(directory, since, MAX_ANOMALIES, report)
            data.anomalies += found
            data.more_anomalies += more
    progress(f"{len(wanted_tables)} tables")
    for (rank, name, *_), read in zip(wanted_tables, mapper(_read_table, wanted_tables), strict=True):
        progress(f"rank{rank}/{name}")
        data.matrices[rank, name] = read.matrix
        data.histograms[rank, name] = read.histograms
        data.curves.update({(rank, name, statistic): curves for statistic, curves in read.curves.items()})
        for problem in read.problems:
            report(*problem)
    if others:
        data.rank_scalars = _rank_scalars(root, chosen_ranks(list(run.ranks), sorted(blamed)), marked, report)
    data.anomalies.sort(key=lambda a: (a["step"], a.get("order", 0)))
    return data


def shown_suspects(run: RecordedRun) -> list[dict[str, Any]]:
    """Return the distinct suspects that have a curve: the first one of every incident before any second one."""
    firsts = [s for i in run.incidents for s in i.get("suspects", [])[:1]]
    seconds = [s for i in run.incidents[:3] for s in i.get("suspects", [])[1:2]]
    found: dict[tuple[int, str, str], dict[str, Any]] = {}
    for suspect in (*firsts, *seconds):
        found.setdefault((suspect["rank"], suspect["quantity"], suspect["name"]), suspect)
    return list(found.values())[:MAX_SUSPECTS]


_Wanted = tuple[int, str, list[TableFile], tuple[tuple[str, str], ...], tuple[int, ...]]
"""A table to read: rank, quantity, files, the suspects with a curve (name and statistic), and the incidents' steps."""


@dataclass(frozen=True)
class _TableRead:
    """What was read of a table; `curves` by statistic and name, `histograms` by name."""

    matrix: LayerMatrix
    curves: dict[str, dict[str, Points]]
    histograms: dict[str, list[StepHistogram]]
    problems: list[tuple[Path, int, str]]


def _read_table(item: _Wanted) -> _TableRead:
    """Return the matrix of a table, the curves of its suspects, and the problems of its files."""
    _, quantity, files, suspects, marked = item
    problems: list[tuple[Path, int, str]] = []
    report: Report = lambda *problem: problems.append(problem)  # noqa: E731
    keys = RowKeys()
    view = QuantityView(quantity, COLUMNS)
    sizes = LayoutSizes(keys)
    curves = SuspectCurves(suspects)
    histograms = SuspectHistograms({name for name, _ in suspects})
    rows_of: dict[bytes, npt.NDArray[np.intp]] = {}
    for rows, is_level in history_rows(files, marked, keys, report):
        if "norm" not in rows.numbers:
            continue
        key = rows.keys.tobytes()
        if len(rows_of) >= 64:  # the order of rows changes with every step
            rows_of.clear()
        if key not in rows_of:
            rows_of[key] = view.matrix.rows_of([keys.keys[k].name for k in rows.keys.tolist()])
        elements = sizes.all()
        view.take_rows(rows, elements, rows_of[key])
        curves.take(rows, keys, elements, without=RATIOS if is_level else ())
        histograms.take(rows, keys)
    return _TableRead(view.matrix, curves.thinned(), histograms.found(), problems)


def _rank_scalars(
    root: Path, ranks: Sequence[int], marked: Sequence[int], report: Report
) -> dict[str, dict[int, Points]]:
    found: dict[str, dict[int, Points]] = {name: {} for name in RANK_SCALARS}
    for rank in ranks:
        try:
            files = table_files(root / f"rank{rank}").get(SCALARS, [])
        except InputError:
            continue
        scalars = _scalars(files, marked, report)
        for name in RANK_SCALARS:
            if name in scalars:
                found[name][rank] = scalars[name]
    return found


def _scalars(files: list[TableFile], marked: Sequence[int], report: Report) -> dict[str, tuple[list[int], list[float]]]:
    keys = RowKeys()
    found: dict[str, dict[int, float]] = {}
    for rows, _ in history_rows(files, marked, keys, report):
        for key, value in zip(rows.keys.tolist(), rows.values[:, 0].tolist(), strict=True):
            points = found.setdefault(keys.keys[key].name, {})
            points[rows.step] = value
            if len(points) > 10 * MAX_POINTS:
                found[keys.keys[key].name] = dict(zip(*thin(points), strict=True))
    return {name: thin(points) for name, points in found.items()}
