"""Holds a step's rows in host memory with the ids of their series and layouts, and rows still being copied there."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.histogram import SLOTS, Counts, Histograms, without_empty_bins
from trainsentry.collectors.series import (
    GRADIENT,
    GRADIENT_UNREDUCED,
    PARAMETER,
    UPDATE,
    Layout,
    Series,
    SeriesTable,
)
from trainsentry.collectors.shared.recurring_arrays import RecurringArray
from trainsentry.collectors.statistics import COLUMNS, VALUE

_ROW_BYTES: Final = 8 * COLUMNS
_COUNTS_BYTES: Final = 4 * SLOTS


def new_counts(rows: int) -> Counts:
    """Return the counters of a number of tensors, shape (rows, SLOTS)."""
    return np.zeros((rows, SLOTS), np.uint32)


class HostRows:
    """Ids, layouts and values of the current step's rows, in execution order.

    Kernels write the values into one float64 array of shape (capacity, COLUMNS), and with `histograms` the counters of
    each tensor into another, of shape (capacity, SLOTS). `parameter_ids` numbers the series of parameters. A tensor
    whose statistics cannot be computed has no row; `refused` gets the error. Compiled functions that write rows are
    given `_place_of_rows`: the array's address, its capacity, whether values were written in this step, and the address
    of the counters, 0 without histograms.
    """

    def __init__(
        self, table: SeriesTable, eps: float, refused: Callable[[Exception], None] | None, *, histograms: bool = False
    ) -> None:
        self.table = table
        self.eps = eps
        self.refused = refused
        self.histograms = histograms
        self.parameter_ids = ParameterIds(table)
        self._plain_layouts: dict[tuple[Any, Any], int] = {}
        self._ids: list[int] = []
        self._layout_ids: list[int] = []
        self._place_of_rows: list[Any] = [0, 0, False, 0]
        self._recurring_ids = RecurringArray(np.int32)
        self._recurring_layouts = RecurringArray(np.int32)
        self._checked_ids: npt.NDArray[Any] | None = None
        self._usually_kept: npt.NDArray[np.bool_] | None = None
        # Kept, as a thread of the user's may be about to write there; the older ones are no larger than the newest.
        self._made: list[tuple[npt.NDArray[np.float64], Counts]] = []
        self._make_host(256)
        self._clear_rows()

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def _has_host_values(self) -> bool:
        return bool(self._place_of_rows[2])

    @_has_host_values.setter
    def _has_host_values(self, value: bool) -> None:
        self._place_of_rows[2] = value

    def _clear_rows(self) -> None:
        if self.histograms:
            self._counts[: len(self._ids)] = 0
        self._ids.clear()
        self._layout_ids.clear()
        self._has_host_values = False
        self._dropped: set[int] = set()

    def _attempt(self, add: Callable[..., None], *args: Any) -> None:
        try:
            add(*args)
        except Exception as error:
            if self.refused is None:
                raise
            self.refused(error)

    def _attempt_rows(self, positions: Sequence[int], read: Callable[..., None], *args: Any) -> None:
        """Write rows that were appended; drop them if that fails."""
        try:
            read(*args)
        except Exception as error:
            self._dropped.update(positions)
            if self.refused is None:
                raise
            self.refused(error)

    def _append(self, series_id: int, layout_id: int) -> int:
        """Append a row whose values the caller writes; return its position."""
        position = len(self._ids)
        self._make_room(position + 1)
        self._ids.append(series_id)
        self._layout_ids.append(layout_id)
        return position

    def _plain_layout(self, shape: tuple[int, ...], dtype: Any) -> int:
        """Return the id of the layout of a tensor that is neither sharded nor nested."""
        found = self._plain_layouts.get((shape, dtype))
        if found is None:
            sizes = tuple(int(n) for n in shape)
            layout = Layout(sizes, str(dtype).removeprefix("torch."), math.prod(sizes))
            found = self._plain_layouts[shape, dtype] = self.table.layout_id(layout)
        return found

    def _kept(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_] | None:
        """Return a mask, shape (n,), of the last row of each series among those not dropped; None where it is all."""
        if ids is not self._checked_ids:
            self._checked_ids = ids
            kept = self._last_of_each(np.ones(len(ids), bool))
            self._usually_kept = None if kept.all() else kept
        if not self._dropped:
            return self._usually_kept
        there = np.ones(len(ids), bool)
        there[list(self._dropped)] = False
        return self._last_of_each(there)

    def _last_of_each(self, there: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return a mask of the last row of each series among the rows that are there, shape (n,)."""
        if there.all() and len(set(self._ids)) == len(self._ids):
            return there
        last = {self._ids[position]: position for position in np.flatnonzero(there).tolist()}
        kept = np.zeros(len(there), bool)
        kept[list(last.values())] = True
        return kept

    def _make_room(self, rows: int) -> None:
        if rows > len(self._host):
            old, counts = self._host, self._counts
            self._make_host(max(rows, 2 * len(old)))
            self._host[: len(old)] = old
            self._counts[: len(counts)] = counts

    def _make_host(self, rows: int) -> None:
        host, counts = np.zeros((rows, COLUMNS)), new_counts(rows if self.histograms else 0)
        self._made.append((host, counts))
        # Read once: an address costs as much as reading a small tensor. Address and size change together, as a thread
        # without the lock may make room at the same time.
        place = host.ctypes.data, rows, self._has_host_values, counts.ctypes.data if self.histograms else 0
        self._host, self._counts = host, counts
        self._place_of_rows[:4] = place

    def _place(self, position: int, count: int = 1) -> tuple[int, int]:
        """Return the addresses of `count` rows and of their counters, 0 without histograms.

        Raises:
            IndexError: where a thread without the lock has taken the room that was made.

        """
        self._has_host_values = True
        address, rows, _, counts = self._place_of_rows[:4]
        if position + count > rows:
            raise IndexError(f"rows {position} to {position + count} of {rows}")
        return address + _ROW_BYTES * position, counts and counts + _COUNTS_BYTES * position

    def _host_rows(self) -> npt.NDArray[np.float64]:
        """Return the rows to write into."""
        self._has_host_values = True
        return self._host

    def _positions_of(self, series_ids: list[int]) -> slice | None:
        """Return where rows of these series stand one after another in this step, None where they do not."""
        start = self._ids.index(series_ids[0]) if series_ids and series_ids[0] in self._ids else 0
        found = slice(start, start + len(series_ids))
        return None if self._dropped or self._ids[found] != series_ids else found

    def _values_so_far(self) -> npt.NDArray[np.float64] | None:
        """Return a copy of the rows, shape (n, COLUMNS), None where there are rows and none was written on the host."""
        return self._host[: len(self)].copy() if self._has_host_values or not self._ids else None

    def _counts_so_far(self) -> Counts | None:
        return self._counts[: len(self)].copy() if self.histograms else None


class ParameterIds:
    """Numbers the series of parameters; a named parameter has `name`, `module` and `vpp_stage`."""

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self._ids: dict[tuple[int, str, int, str], tuple[int, Any]] = {}
        self._state_ids: dict[tuple[int, tuple[Any, ...], int], tuple[list[int], Any]] = {}

    def id_of(self, named: Any, quantity: str, micro_step: int = 0, path: str = "") -> int:
        """Return the series id of a parameter's quantity; `path` distinguishes the tensors in one state entry."""
        key = (id(named), quantity, micro_step, path)
        found = self._ids.get(key)
        if found is None:
            name = f"{named.name}.{path}" if path else named.name
            series = Series(name, quantity, micro_step, path, named.module, named.vpp_stage)
            found = self._ids[key] = (self.table.series_id(series), named)  # kept alive: its id is the key
        return found[0]

    def ids_of_state(self, named: Any, keys: tuple[Any, ...], micro_step: int = 0) -> list[int]:
        """Return the series ids of the optimizer-state tensors under `keys`."""
        key = (id(named), keys, micro_step)
        found = self._state_ids.get(key)
        if found is None:
            ids = [self.id_of(named, state_quantity(k), micro_step) for k in keys]
            found = self._state_ids[key] = (ids, named)
        return found[0]

    def id_before_reduction(self, named: Any, micro_step: int, summed: str) -> int:
        """Return the series id of a gradient before reduction; `summed` is MICRO_BATCH or RUNNING_SUM."""
        key = (id(named), GRADIENT_UNREDUCED, micro_step, summed)
        found = self._ids.get(key)
        if found is None:
            series = Series(named.name, GRADIENT_UNREDUCED, micro_step, summed, named.module, named.vpp_stage)
            found = self._ids[key] = (self.table.series_id(series), named)
        return found[0]


_FIXED: Final = frozenset({GRADIENT, PARAMETER, UPDATE})


def state_quantity(key: Any) -> str:
    """Return the quantity of a state key, with the prefix `state_` where the key is another quantity's name."""
    return f"state_{key}" if key in _FIXED else str(key)


def row_of_number(value: float) -> tuple[Any, ...]:
    """Return the statistics of one number, without the value column."""
    nan = math.nan
    if math.isnan(value):
        return (nan, nan, nan, 0.0, 1.0, 0.0, 0.0)
    if math.isinf(value):
        return (nan, nan, nan, 0.0, 0.0, 1.0, 0.0)
    return (value, value, value, abs(value), 0.0, 0.0, float(value == 0.0))


NO_POSITIONS: Final[npt.NDArray[np.intp]] = np.zeros(0, np.intp)

Copy = tuple[npt.NDArray[np.intp], Callable[[], npt.NDArray[Any]], Any]


@dataclass
class PendingRows:
    """Rows that a device may still be copying to the host.

    `kept` masks out rows that a later row replaces, None for none. `overwritten` counts the rows that are missing
    because their tensors changed before they were read. `aliases` are the positions of rows and those of the rows that
    they repeat, each of shape (n,); of the rows at `scalars` only the value was copied. `values` has shape
    (n, COLUMNS), and is None where a device holds all rows.

    A copy is the positions of its rows, a function that returns the rows after the copy, and its event (or None).
    `counts`, shape (n, SLOTS), are the counters of the histograms, and `count_copies` are those of other devices. With
    `in_order` the one copy has all rows, one after another.
    """

    ids: npt.NDArray[np.int32]
    layouts: npt.NDArray[np.int32]
    values: npt.NDArray[np.float64] | None
    kept: npt.NDArray[np.bool_] | None
    copies: list[Copy]
    aliases: tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]] = (NO_POSITIONS, NO_POSITIONS)
    scalars: Sequence[int] = ()
    overwritten: int = 0
    counts: Counts | None = None
    count_copies: list[Copy] = field(default_factory=list)
    in_order: bool = False

    def ready(self) -> bool:
        """Whether every copy is complete; does not wait for the device."""
        return all(event is None or event.query() for _, _, event in self.copies + self.count_copies)

    def wait(self) -> None:
        """Wait until every copy is complete."""
        for _, _, event in self.copies + self.count_copies:
            if event is not None:
                event.synchronize()

    def find_histograms(self) -> Histograms | None:
        """Return the histograms of the rows that `resolve` returns, None where none were asked for."""
        if self.counts is None:
            return None
        for positions, read, _ in self.count_copies:
            self.counts[positions] = read().view(np.uint32)
        self.counts[self.aliases[0]] = self.counts[self.aliases[1]]
        return without_empty_bins(self.counts if self.kept is None else self.counts[self.kept])

    def resolve(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """Return ids, layouts and values (float64 of shape (n, COLUMNS)); call it only when `ready`."""
        values = self._arrived()
        for position in self.scalars:
            values[position, :VALUE] = row_of_number(float(values[position, VALUE]))
        if len(self.aliases[0]):
            values[self.aliases[0]] = values[self.aliases[1]]
        if self.kept is None:
            return self.ids, self.layouts, values
        return self.ids[self.kept], self.layouts[self.kept], values[self.kept]

    def _arrived(self) -> npt.NDArray[np.float64]:
        if self.in_order:  # one call of NumPy instead of four: the first ones of a step take 10 µs each
            found: npt.NDArray[np.float64] = self.copies[0][1]().astype(np.float64)
            return found
        values = np.empty((len(self.ids), COLUMNS)) if self.values is None else self.values
        with np.errstate(invalid="ignore"):  # a row that was lost holds whatever its memory held
            for positions, read, _ in self.copies:
                values[positions] = read()
        return values
