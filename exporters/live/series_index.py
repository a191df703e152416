"""Lists the series of a run without reading its tables: from the first and the newest steps of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from trainsentry.exporters.csv.format import SCALARS, TableFile
from trainsentry.exporters.csv.part_rows import rows_of_parts
from trainsentry.exporters.csv.table_parts import TablePart, newest_part, parts_of, shape_of_table
from trainsentry.exporters.csv.table_rows import RowKeys
from trainsentry.exporters.files.foreign_files import Report
from trainsentry.exporters.live.series_points import ALL_STEPS

MAX_SHOWN: Final = 300
"""Series of one answer; a search narrows them down."""

MIN_WINDOW: Final = 1 << 16
"""Bytes at either end of a table that are read at least: several steps, as not every series is in each."""


@dataclass(frozen=True, order=True)
class KnownSeries:
    """A series by table, name and model chunk, and the statistics that its table has."""

    table: str
    name: str
    stage: int
    statistics: tuple[str, ...]


def series_of(tables: dict[str, list[TableFile]], report: Report) -> list[KnownSeries]:
    """Return the series of a rank: scalars first, then in the order in which the tables name them."""
    found: list[KnownSeries] = []
    for table in sorted(tables, key=lambda name: (name != SCALARS, name)):
        shape = shape_of_table(tables[table], report)
        if shape is None:
            continue
        statistics = ("value",) if table == SCALARS else shape.header.numbers
        keys = RowKeys()
        ends = _ends(tables[table], max(3 * shape.step_bytes, MIN_WINDOW), report)
        for _ in rows_of_parts(ends, keys, (), report):
            pass  # the keys are what is wanted
        known = dict.fromkeys((key.name, max(key.vpp_stage, 0)) for key in keys.keys)
        found += [KnownSeries(table, name, stage, statistics) for name, stage in known]
    return found


def _ends(files: Sequence[TableFile], size: int, report: Report) -> Iterator[TablePart]:
    """Yield the beginning of a table and its end."""
    parts = parts_of(files, ALL_STEPS, report)
    if not parts:
        return
    first, last = parts[0], newest_part(parts, size)
    if first.file.path.suffix == ".csv":
        first = replace(first, end=min(first.end, first.begin + size))
    yield first
    if last is not None and last != first:
        yield last


def matching(series: Sequence[KnownSeries], words: str, most: int = MAX_SHOWN) -> dict[str, Any]:
    """Return the first `most` series that have every word in their name or table, and how many there are.

    >>> weight, loss = KnownSeries("gradient", "layers.3.weight", 0, ("norm",)), KnownSeries("scalars", "loss", 0, ())
    >>> matching([weight, loss], "GRAD 3")["found"][0]["name"]
    'layers.3.weight'
    """
    wanted = words.lower().split()
    good = [s for s in series if all(word in f"{s.table} {s.name}".lower() for word in wanted)]
    several = {s.stage for s in good} - {0}
    shown = [
        {"table": s.table, "name": s.name, "statistics": list(s.statistics), **({"stage": s.stage} if several else {})}
        for s in good[:most]
    ]
    return {"found": shown, "count": len(good), "of": len(series)}
