"""Arrays with one element for each series of a table: rules declare them, and they grow together with the table."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.series import Layout, Series, SeriesTable

Item = TypeVar("Item")
Shared = TypeVar("Shared")

Mask = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]


def rows_where(mask: npt.NDArray[Any]) -> Integers:
    """Return the places in a mask, flattened, that are set; `np.flatnonzero` takes three times as long for few rows."""
    return (mask if mask.ndim == 1 else mask.ravel()).nonzero()[0]


def medians(lines: Floats) -> Floats:
    """Return the median of each line, in which there is no NaN; `np.median` takes five times as long."""
    size = lines.shape[1]
    parted = np.partition(lines, size // 2, axis=1)
    found: Floats = parted[:, size // 2]
    return found if size % 2 else (found + parted[:, : size // 2].max(axis=1)) / 2


class Column(Generic[Item]):
    """One array: `values` has the shape `(*shape, n)`, its last axis is the items' index."""

    __slots__ = ("_fill", "_of", "_room", "values")

    def __init__(self, dtype: Any, fill: Any, of: Callable[[Item], Any] | None, shape: tuple[int, ...]) -> None:
        self._fill = fill
        self._of = of
        self._room = np.full((*shape, 0), fill, dtype)
        self.values: npt.NDArray[Any] = self._room

    def extend(self, new: Sequence[Item]) -> None:
        """Append an element for each new item; the room grows by half, so that each element moves a few times only."""
        start, size = self.values.shape[-1], self.values.shape[-1] + len(new)
        if size > self._room.shape[-1]:
            more = max(len(new), start // 2)
            added = np.full((*self._room.shape[:-1], start + more - self._room.shape[-1]), self._fill, self._room.dtype)
            self._room = np.concatenate([self._room, added], axis=-1)
        if self._of is not None:
            self._room[..., start:size] = np.array([self._of(item) for item in new], self._room.dtype).T
        self.values = self._room[..., :size]


class Columns(Generic[Item]):
    """Columns over a list that only grows."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self._columns: list[Column[Item]] = []
        self._before: list[Callable[[int, Sequence[Item]], None]] = []
        self._size = 0

    def column(
        self,
        dtype: Any,
        fill: Any = 0,
        *,
        of: Callable[[Item], Any] | None = None,
        shape: tuple[int, ...] = (),
    ) -> Column[Item]:
        """Declare an array of shape `(*shape, n)`: each new item has the value `of(item)`, or `fill`."""
        column = Column(dtype, fill, of, shape)
        column.extend(self.items[: self._size])
        self._columns.append(column)
        return column

    def before_growth(self, note: Callable[[int, Sequence[Item]], None]) -> None:
        """Call `note(first index, new items)` before the columns take in new items; at once if there are some."""
        if self._size:
            note(0, self.items[: self._size])
        self._before.append(note)

    def grow(self) -> None:
        """Take in the items that were added since the last call."""
        size = len(self.items)
        if size == self._size:
            return
        for note in self._before:
            note(self._size, self.items[self._size : size])
        for column in self._columns:
            column.extend(self.items[column.values.shape[-1] : size])
        self._size = size  # last: what a Ctrl-C has cut off goes on at the next call


class SeriesArrays:
    """The columns over the series of a table, and over its layouts."""

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self.series: Columns[Series] = Columns(table.series)
        self.layouts: Columns[Layout] = Columns(table.layouts)
        self.numel = self.layouts.column(np.float64, of=lambda layout: layout.numel)
        self._shared: dict[Any, Any] = {}

    def shared(self, make: "Callable[[SeriesArrays], Shared]") -> "Shared":
        """Return what several rules compute of each record, made by `make` for the first that asks."""
        if make not in self._shared:
            self._shared[make] = make(self)
        found: Shared = self._shared[make]
        return found

    def grow(self) -> None:
        """Take in the series and layouts that were defined since the last call."""
        self.series.grow()
        self.layouts.grow()
