"""Reads the data of a report from the files of a run."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.exporters.csv.format import SCALARS, TableFile
from trainsentry.exporters.csv.reader import read_steps, table_files
from trainsentry.exporters.csv.table_rows import RowKeys
from trainsentry.exporters.engine import Mapper, map_locally
from trainsentry.exporters.files.foreign_files import InputError, Report
from trainsentry.exporters.run_reader import RecordedRun, anomalies_since, read_run
from trainsentry.exporters.tensorboard.layer_matrix import LayerMatrix
from trainsentry.exporters.tensorboard.quantity_view import LayoutSizes, QuantityView

COLUMNS: Final = 256
"""Columns of a picture: steps, or bins of steps."""

MAX_RANKS: Final = 8
"""Ranks whose curves of a suspect are shown together."""

MAX_SIBLINGS: Final = 12
"""Layers of a suspect's kind whose curves are shown with its own."""

MAX_ANOMALIES: Final = 1000
"""Anomalies of a rank that are read, from the first incident on; the rest is only counted."""

MAX_POINTS: Final = 2000
"""Points of a scalar's curve; a longer one keeps the extremes of each bin."""


@dataclass
class ReportData:
    """A run, its scalars by name (steps and values), and its matrices by (rank, quantity)."""

    run: RecordedRun
    scalars: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    matrices: dict[tuple[int, str], LayerMatrix] = field(default_factory=dict)
    anomalies: list[dict[str, Any]] = field(default_factory=list)
    more_anomalies: int = 0
    problems: int = 0

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


def kind_of(name: str) -> str:
    """Return a name without its numbers.

    >>> kind_of("layers.12.mlp.weight")
    'layers.*.mlp.weight'
    """
    return re.sub(r"\d+", "*", name)


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
    whole = next(iter([s["rank"] for s in suspects if s.get("rank") in run.ranks]), next(iter(run.ranks)))
    wanted = {s.get("quantity") for s in suspects}
    others = [rank for rank in run.ranks if rank != whole][: MAX_RANKS - 1]
    since = next((incident.get("first_seen", 0) for incident in run.incidents[:1]), 0)
    wanted_tables: list[tuple[int, str, list[TableFile]]] = []
    for rank in [whole, *others]:
        directory = root / f"rank{rank}"
        try:
            tables = table_files(directory)
        except InputError:
            continue
        for name, files in tables.items():
            if name == SCALARS and rank == whole:
                data.scalars = _scalars(files, report)
            elif name != SCALARS and (rank == whole or name in wanted):
                wanted_tables.append((rank, name, files))
        if rank == whole or rank in {s["rank"] for s in suspects}:
            found, more = anomalies_since(directory, since, MAX_ANOMALIES, report)
            data.anomalies += found
            data.more_anomalies += more
    progress(f"{len(wanted_tables)} tables")
    for (rank, name, _), (matrix, problems) in zip(wanted_tables, mapper(_matrix, wanted_tables), strict=True):
        progress(f"rank{rank}/{name}")
        data.matrices[rank, name] = matrix
        for problem in problems:
            report(*problem)
    data.anomalies.sort(key=lambda a: (a["step"], a.get("order", 0)))
    return data


def _matrix(item: tuple[int, str, list[TableFile]]) -> tuple[LayerMatrix, list[tuple[Path, int, str]]]:
    """Return the matrix of a table, and the problems of its files."""
    _, quantity, files = item
    problems: list[tuple[Path, int, str]] = []
    report: Report = lambda *problem: problems.append(problem)  # noqa: E731
    keys = RowKeys()
    view = QuantityView(quantity, COLUMNS)
    sizes = LayoutSizes(keys)
    rows_of: dict[bytes, npt.NDArray[np.intp]] = {}
    for rows in read_steps(files, keys, report):
        if "norm" not in rows.numbers:
            continue
        key = rows.keys.tobytes()
        if len(rows_of) >= 64:  # the order of rows changes with every step
            rows_of.clear()
        if key not in rows_of:
            rows_of[key] = view.matrix.rows_of([keys.keys[k].name for k in rows.keys.tolist()])
        view.take_rows(rows, sizes.all(), rows_of[key])
    return view.matrix, problems


def _scalars(files: list[TableFile], report: Report) -> dict[str, tuple[list[int], list[float]]]:
    keys = RowKeys()
    found: dict[str, dict[int, float]] = {}
    for rows in read_steps(files, keys, report):
        for key, value in zip(rows.keys.tolist(), rows.values[:, 0].tolist(), strict=True):
            points = found.setdefault(keys.keys[key].name, {})
            points[rows.step] = value
            if len(points) > 10 * MAX_POINTS:
                found[keys.keys[key].name] = dict(zip(*_thin(points), strict=True))
    return {name: _thin(points) for name, points in found.items()}


def _thin(points: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """Return at most MAX_POINTS points: the lowest, the highest and the first non-finite value of each bin."""
    steps, values = np.asarray(list(points)), np.asarray(list(points.values()))
    if len(steps) > MAX_POINTS:
        kept: set[int] = {0, len(steps) - 1}
        for part in np.array_split(np.arange(len(steps)), MAX_POINTS // 3):
            finite = np.where(np.isfinite(values[part]), values[part], np.nan)
            kept.update(part[np.flatnonzero(np.isnan(finite))[:1]].tolist())
            if not np.isnan(finite).all():
                kept.update((int(part[np.nanargmin(finite)]), int(part[np.nanargmax(finite)])))
        order = sorted(kept)
        steps, values = steps[order], values[order]
    return steps.tolist(), values.tolist()
