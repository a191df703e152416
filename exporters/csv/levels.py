"""Keeps thinned copies of a rank's tables as it records, so that a history of many gigabytes opens in seconds.

A level is a folder of tables in the format of the others: `levels/64/gradient_0-31999.csv` has the rows of
`gradient_…` with 64 sampled steps to a bucket. Of each series a bucket has two rows, statistic by statistic: the lowest
value at its first step, the highest at its last. Where a value was not finite, the first such value replaces the
lowest. So nothing that lasted one step is lost. Each level is made from the rows of the one before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.exporters.csv.format import EXTRA_COLUMNS, quote
from trainsentry.exporters.csv.table_rows import RowKey

FOLDER: Final = "levels"

ENDS_BUCKET: Final = 1
"""The column `order` of the last row that a bucket has of a series; of the first, with the lowest values, it is 0."""

WIDTHS: Final = (64, 256, 1024, 4096, 16384)
"""Sampled steps of a bucket at each level. Two rows of 64 add 3.1 % to the tables, all levels together 4.2 %; the
coarsest has 1 MB for 8 GB."""

HELD_STEPS: Final = 16
"""Steps whose rows are put into a bucket together, as a call of NumPy costs more than the numbers of a small table."""

MAX_SERIES: Final = 1 << 15
"""Rows of a step up to which a table has levels: three arrays of eight numbers at five levels, and the
rows of 16 steps, are 63 MB of memory."""

_Values = npt.NDArray[np.float64]
_Slots = npt.NDArray[np.intp]


def level_folder(directory: Path, level: int) -> Path:
    """Return the folder of a level of the tables in a rank's directory."""
    return directory / FOLDER / str(WIDTHS[level])


def tail_of(table: str, shape: str, dtype: str) -> str:
    """Return the text after a row's numbers: shape and dtype; what else the table has stays empty."""
    return f",{quote(shape)},{dtype}" + "," * len(EXTRA_COLUMNS.get(table, ()))


@dataclass(frozen=True)
class LevelRows:
    """Rows of a table at one step: the places of their series, shape (n,), and values, shape (n, columns)."""

    step: int
    slots: _Slots
    values: _Values


class Bucket:
    """The extremes of a table's rows since it began, and the number of `samples` in it."""

    def __init__(self, columns: int) -> None:
        self.samples = 0
        self._columns = columns
        self._first = self._last = -1
        self._low = self._high = self._odd = np.empty((0, columns))
        self._seen = np.empty(0, bool)

    def take(self, rows: LevelRows) -> None:
        """Add rows; taking them in twice changes nothing."""
        self._grow(int(rows.slots.max(initial=-1)) + 1)
        self._first = rows.step if self._first < 0 else self._first
        self._last = max(self._last, rows.step)
        slots, values = rows.slots, rows.values
        bad = ~np.isfinite(values)
        if bad.any():
            held = self._odd[slots]
            self._odd[slots] = np.where(held == 0, np.where(bad, values, 0.0), held)
            values = np.where(bad, np.nan, values)
        if len(np.unique(slots)) == len(slots):
            self._low[slots] = np.fmin(self._low[slots], values)
            self._high[slots] = np.fmax(self._high[slots], values)
        else:  # collectives of one name
            np.fmin.at(self._low, slots, values)
            np.fmax.at(self._high, slots, values)
        self._seen[slots] = True

    def emptied(self) -> list[LevelRows]:
        """Return the two rows of each series, the second alone if there was one step, and begin the next bucket."""
        slots = np.flatnonzero(self._seen)
        low, high, odd = self._low[slots], self._high[slots], self._odd[slots]
        low = np.where(odd != 0, odd, low)
        high = np.where(np.isnan(high), low, high)
        made = [LevelRows(self._first, slots, low), LevelRows(self._last, slots, high)]
        if self._first == self._last:
            made = [LevelRows(self._last, slots, np.where(odd != 0, odd, high))]
        self.samples, self._first, self._last = 0, -1, -1
        self._low[:], self._high[:], self._odd[:], self._seen[:] = np.nan, np.nan, 0.0, False
        return made

    def _grow(self, slots: int) -> None:
        more = max(slots - len(self._seen), 0)
        if more:
            more = max(more, len(self._seen))
            empty = np.full((more, self._columns), np.nan)
            self._low, self._high = np.concatenate([self._low, empty]), np.concatenate([self._high, empty])
            self._odd = np.concatenate([self._odd, np.zeros((more, self._columns))])
            self._seen = np.concatenate([self._seen, np.zeros(more, bool)])


Append = Callable[[int, "LeveledTable", Sequence[LevelRows]], None]
"""Writes the rows of a bucket to the files of a level, given by its place in `WIDTHS`."""


@dataclass
class LeveledTable:
    """The open buckets of one table, by level; a series is a key, and the text after its numbers a tail.

    Levels from `begun` on have no bucket on disk so far.
    """

    name: str
    columns: tuple[str, ...]
    append: Append
    keys: dict[RowKey, int] = field(default_factory=dict)
    tails: list[str] = field(default_factory=list)
    buckets: list[Bucket] = field(init=False)
    step: int = -1
    held: list[LevelRows] = field(default_factory=list)
    begun: int = 0

    def __post_init__(self) -> None:
        self.buckets = [Bucket(len(self.columns)) for _ in WIDTHS]

    def slot(self, key: RowKey) -> int:
        """Return the place of a series; a new one has no tail so far."""
        found = self.keys.setdefault(key, len(self.keys))
        self.tails += [""] * (len(self.keys) - len(self.tails))
        return found

    @property
    def is_too_wide(self) -> bool:
        """Whether the table has more series than levels may hold."""
        return len(self.keys) > MAX_SERIES

    def take(self, rows: LevelRows) -> None:
        """Add rows of a step; a step may come in several parts."""
        if rows.step != self.step:
            self.step = rows.step
            if self.buckets[0].samples >= WIDTHS[0]:
                self._settle()
                self._finish(0)
            self.buckets[0].samples += 1
        if self.held and (len(self.held) >= HELD_STEPS or not np.array_equal(self.held[0].slots, rows.slots)):
            self._settle()
        self.held.append(rows)

    def _settle(self) -> None:
        """Put the rows that are held into the first bucket, together where all are finite."""
        values = np.stack([rows.values for rows in self.held]) if self.held else np.zeros(0)
        with np.errstate(over="ignore", invalid="ignore"):
            all_finite = bool(np.isfinite(values.sum()))  # an overflow of the sum costs time alone
        if len(self.held) > 1 and all_finite:
            first, last = self.held[0], self.held[-1]
            low, high = values.min(axis=0), values.max(axis=0)
            self.held = [LevelRows(first.step, first.slots, low), LevelRows(last.step, last.slots, high)]
        for rows in self.held:
            self.buckets[0].take(rows)
        self.held = []

    def take_at(self, level: int, rows: LevelRows) -> None:
        """Add a row of the level below that an earlier start wrote; two of them are a bucket."""
        self.buckets[level].samples += 1
        self.buckets[level].take(rows)

    def finish(self) -> None:
        """Write every bucket that holds something, but at no level that would say no more than the one before it."""
        self._settle()
        for level in range(self.begun):
            if self.buckets[level].samples:
                self._finish(level)

    def _finish(self, level: int) -> None:
        """Write a bucket, and pass its rows on to the next level."""
        made = self.buckets[level].emptied()
        self.begun = max(self.begun, level + 1)
        self.append(level, self, made)
        if level + 1 < len(WIDTHS):
            above = self.buckets[level + 1]
            if above.samples >= 2 * WIDTHS[level + 1] // WIDTHS[level]:
                self._finish(level + 1)
            above.samples += 2
            for rows in made:
                above.take(rows)
