"""Compares the tables of two runs: what differs, and each series' first difference in order of cause."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from trainsentry.anomaly.dumps.dump_comparison import renamed
from trainsentry.exporters.csv.format import SCALARS
from trainsentry.exporters.csv.reader import CsvRow, rank_directories, read_table, table_files
from trainsentry.exporters.engine import Mapper
from trainsentry.exporters.files.foreign_files import InputError, Report
from trainsentry.exporters.maps.layer_matrix import LayerMatrix
from trainsentry.exporters.short_text import counted

RUN_COLUMNS: Final = ("step", "rank", "table", "name", "statistic", "a", "b", "relative")

SAME_RUN: Final = 1e-6
"""Relative difference above which two statistics differ: tables hold single precision or better, and runs on one
machine with one seed are bitwise equal."""

STANDS_OUT: Final = 10.0
"""How many times larger than its table's usual difference a weight's must be to be the cause of differences seen
earlier: once the gradients differ, an update makes all weights differ, by about as much."""

FEW: Final = 0.5
"""Share of a table's series below which those that differ are few: an update changes all of them."""

MAP_COLUMNS: Final = 256

_FORWARD: Final = ("activation_input", "activation_output")
_LATER: Final = (
    "activation_grad_output",
    "activation_grad_input",
    "gradient_unreduced",
    "communication_input",
    "communication_output",
    "gradient",
    "moment_direction",
    "update",
    "parameter_updated",
)
"""Tables in the order of a step, behind the state that it starts from, the forward pass and the loss."""


def place_in_step(table: str) -> int:
    """Return where in a step a table's values arise: weights and optimizer state first, as the step starts from them.

    >>> place_in_step("parameter") < place_in_step("scalars") < place_in_step("gradient") < place_in_step("update")
    True
    """
    if table in _FORWARD:
        return 1
    if table == SCALARS:
        return 2
    return 3 + _LATER.index(table) if table in _LATER else 0


@dataclass
class SeriesDifference:
    """How a series differs between two runs: at first, at most, and the last step at which it did not (-1: never).

    `a`, `b` and `relative` are those of `statistic`, the one that differs most at step `first`.
    """

    rank: str
    table: str
    name: str
    stage: int
    first: int
    statistic: str
    a: float
    b: float
    relative: float
    order: int
    equal_until: int = -1
    steps: int = 1
    largest: float = 0.0
    largest_step: int = 0

    @property
    def row(self) -> tuple[Any, ...]:
        """The first difference, in RUN_COLUMNS."""
        return self.first, self.rank, self.table, self.name, self.statistic, self.a, self.b, self.relative


@dataclass
class TwoRuns:
    """What two runs have in common and in what they differ.

    `rows` are all statistics that differ, in RUN_COLUMNS and in the order of the steps; `series` has each series' first
    difference in order of cause; `shared` counts the series that both have, `only` the rows that one has alone. `maps`
    has, by rank and table, each layer's largest relative difference at a step.
    """

    rows: list[tuple[Any, ...]] = field(default_factory=list)
    series: list[SeriesDifference] = field(default_factory=list)
    shared: int = 0
    only: int = 0
    last_step: int = -1
    sizes: dict[tuple[str, str], int] = field(default_factory=dict)
    """The number of series that both have, by rank and table."""
    maps: dict[tuple[str, str], LayerMatrix] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """Where the runs first differ, in words."""
        only = f"{counted(self.only, 'row')} {'is' if self.only == 1 else 'are'} in only one of the two"
        if not self.series:
            if self.only:
                return f"they do not differ in what both have ({self.shared} series), but {only}"
            return f"they do not differ: {self.shared} series up to step {self.last_step}"
        first = self.series[0]
        what = first.name if first.table == SCALARS else f"{first.table} {first.name}"
        values = f"{first.statistic} of {what} is {first.a:.6g} and {first.b:.6g}"
        earliest = min(self.series, key=lambda s: s.first)
        text = f"they first differ at step {first.first}, {first.rank}: {values}"
        if earliest.first < first.first:
            seen = (
                f"equal at step {first.equal_until}, not read in between"
                if first.equal_until >= 0
                else "not read before"
            )
            text += f" ({seen}; {earliest.name} differs from step {earliest.first})"
        counts = f"{len(self.series)} of {self.shared} series differ"
        return f"{text}; {counts}" + (f", and {only}" if self.only else "")


def compare_runs(a: Path, b: Path, names: Mapping[str, str], mapper: Mapper, report: Report) -> TwoRuns:
    """Compare two monitored runs; `names` maps prefixes of names in `a` to those in `b`.

    Raises:
        InputError: when one is no run, or they have nothing in common.

    """
    ranks_a, ranks_b = rank_directories(a), rank_directories(b)
    shared = [(name, ranks_a[name], ranks_b[name], dict(names)) for name in ranks_a if name in ranks_b]
    if not shared:
        raise InputError(f"{a} and {b} have no rank in common: {', '.join(ranks_a)} and {', '.join(ranks_b)}")
    found = TwoRuns(only=len(ranks_a.keys() ^ ranks_b.keys()))
    ordered: list[tuple[int, tuple[Any, ...]]] = []
    for part, orders, problems in mapper(_compare_rank, shared):
        ordered.extend(zip(orders, part.rows, strict=True))
        found.series += part.series
        found.shared += part.shared
        found.only += part.only
        found.last_step = max(found.last_step, part.last_step)
        found.maps.update(part.maps)
        found.sizes.update(part.sizes)
        for problem in problems:
            report(*problem)
    if not found.shared:
        raise InputError(f"{a} and {b} have nothing in common: no series has a step in both")
    ordered.sort(key=lambda item: (item[1][0], place_in_step(item[1][2]), item[0], item[1][1]))
    found.rows = [row for _, row in ordered]
    found.series = in_order_of_cause(found.series, found.sizes)
    return found


def in_order_of_cause(
    series: Sequence[SeriesDifference], sizes: Mapping[tuple[str, str], int]
) -> list[SeriesDifference]:
    """Order series by when they began to differ; at one step, by their place in it.

    Weights and optimizer state are read seldom and act before they are read. One that was last seen equal before the
    first difference, and stands out among those of its table, comes before what it has caused. `sizes` counts the
    series of each (rank, table).
    """
    began = min((s.first for s in series), default=-1)
    tables: dict[tuple[str, str], list[SeriesDifference]] = {}
    for s in series:
        tables.setdefault((s.rank, s.table), []).append(s)
    usual = {key: float(np.median([s.relative for s in group])) for key, group in tables.items()}

    def key(s: SeriesDifference) -> tuple[int, int, float, int]:
        place = place_in_step(s.table)
        group = (s.rank, s.table)
        few = len(tables[group]) <= FEW * sizes.get(group, 0)
        causes = place == 0 and s.equal_until < began <= s.first and (few or s.relative > STANDS_OUT * usual[group])
        onset = began if causes else s.first
        return onset, place, -s.relative if place == 0 else 0.0, s.order

    return sorted(series, key=key)


def _compare_rank(
    item: tuple[str, Path, Path, dict[str, str]],
) -> tuple[TwoRuns, list[int], list[tuple[Path, int, str]]]:
    """Return the differences of a rank, the order in its step of each row, and the problems of the files."""
    rank, a, b, names = item
    problems: list[tuple[Path, int, str]] = []
    report: Report = lambda *problem: problems.append(problem)  # noqa: E731
    tables_a, tables_b = table_files(a), table_files(b)
    found = TwoRuns(only=len(set(tables_a) ^ set(tables_b)))
    orders: list[int] = []
    for table in sorted(set(tables_a) & set(tables_b)):
        one = _Table(rank, table, found, orders)
        for rows_a, rows_b in side_by_side(tables_a[table], tables_b[table], names, report):
            one.take(rows_a, rows_b)
        one.end()
    return found, orders, problems


class _Table:
    """Takes a table's steps one after the other, and adds what differs to the differences of a rank."""

    def __init__(self, rank: str, table: str, found: TwoRuns, orders: list[int]) -> None:
        self.rank, self.table = rank, table
        self.found, self.orders = found, orders
        self.seen: dict[Any, int] = {}
        """The last step at which each series was equal; -1 for none."""
        self.differing: dict[Any, SeriesDifference] = {}
        self.map = LayerMatrix(MAP_COLUMNS)

    def take(self, a: dict[Any, CsvRow], b: dict[Any, CsvRow]) -> None:
        """Add a step's rows of both runs, by key."""
        self.found.only += len(a.keys() ^ b.keys())
        names: list[str] = []
        sizes: list[float] = []
        for key, row in a.items():
            if key not in b:
                continue
            largest = self._differences(key, row, b[key])
            if largest == 0.0 and key not in self.differing:
                self.seen[key] = row.step
            self.seen.setdefault(key, -1)
            names.append(row.name)
            sizes.append(largest)
            self.found.last_step = max(self.found.last_step, row.step)
        if names and self.table != SCALARS:
            step = next(iter(a.values())).step
            self.map.take(step, self.map.rows_of(names), np.asarray(sizes))

    def _differences(self, key: Any, row: CsvRow, other: CsvRow) -> float:
        """Add the statistics of a row that differ; return the largest difference, 0 if there is none."""
        found = []
        for statistic, x in row.values.items():
            y = other.values.get(statistic, math.nan)
            difference = relative(x, y)
            if difference > SAME_RUN:
                found.append((difference, statistic, x, y))
                self.orders.append(row.order)
                self.found.rows.append((row.step, self.rank, self.table, row.name, statistic, x, y, difference))
        if not found:
            return 0.0
        size, statistic, x, y = max(found, key=lambda f: (f[0], f[1] == "norm"))
        known = self.differing.get(key)
        if known is None:
            known = self.differing[key] = SeriesDifference(
                self.rank, self.table, row.name, row.vpp_stage, row.step, statistic, x, y, size, row.order, steps=0
            )
            known.equal_until = self.seen.get(key, -1)
        known.steps += 1
        if size > known.largest:
            known.largest, known.largest_step = size, row.step
        return size

    def end(self) -> None:
        """Add the table's series."""
        self.found.shared += len(self.seen)
        self.found.sizes[self.rank, self.table] = len(self.seen)
        self.found.series += self.differing.values()
        if self.differing and self.map.names:
            self.found.maps[self.rank, self.table] = self.map


def side_by_side(
    a: Sequence[Any], b: Sequence[Any], names: Mapping[str, str], report: Report
) -> Iterator[tuple[dict[Any, CsvRow], dict[Any, CsvRow]]]:
    """Yield the rows of each step in two tables by key, with the names of `b`.

    Of a step that only one table has, the other part is empty.
    """
    tables = [read_table(files, report) for files in (a, b)]
    steps = [next(table, None) for table in tables]
    while any(steps):
        step = min(rows[0].step for rows in steps if rows)
        found = []
        for i, rows in enumerate(steps):
            is_current = rows is not None and rows[0].step == step
            new = names if i == 0 else {}
            found.append(
                {(renamed(r.name, new), r.vpp_stage, r.micro_step): r for r in rows} if is_current and rows else {}
            )
            if is_current:
                steps[i] = next(tables[i], None)
        yield found[0], found[1]


def relative(x: float, y: float) -> float:
    """Return the difference as a share of the smaller value: 1,023 where one is 1,024 times the other.

    0 where both are NaN, Inf where one is not finite or zero.

    >>> relative(2.0, 2.0), relative(1.0, 1024.0), relative(1.0, -1.0), relative(0.0, 1.0)
    (0.0, 1023.0, 2.0, inf)
    """
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0
    if not (math.isfinite(x) and math.isfinite(y)):
        return math.inf
    smaller = min(abs(x), abs(y))
    return abs(x - y) / smaller if smaller else math.inf
