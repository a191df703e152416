"""Assigns TensorBoard tags to a table's numbers and to its numbers over all layers."""

from collections.abc import Callable, Collection
from typing import Final

import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.summary_pb2 import Summary

from trainsentry.exporters.convert.msprobe_tables import SCOPES
from trainsentry.exporters.convert.thinning import KeptValues
from trainsentry.exporters.csv.table_rows import RowKey, RowKeys, TableRows
from trainsentry.exporters.tensorboard.quantity_view import SUMMARY, LayoutSizes, QuantityView, summary_tag
from trainsentry.exporters.tensorboard.tag_choice import QUIET, SilentNumbers

Tagger = Callable[[str, RowKey, str], str]
"""Returns the tag of a number, given its table, its row's key and its column."""

WIDEST: Final = 64
"""Numeric columns of a table at most; a slot is key * WIDEST + column."""

MOST_NORMS: Final = 5_000
"""Layers of a table at most whose norms are kept where there are too many series; TensorBoard lists so many at ease."""

NORM: Final = "norm"

_OVER_LAYERS: Final = -2
"""Replaces the model chunk in a key that stands for all layers."""


class TableTags:
    """Gives every number of a row its slot and its tag.

    Unless `flat_zeros`, counts and shares that are 0 so far are left out (`SilentNumbers`); `awake` are the tags of
    those that an earlier conversion wrote.
    """

    def __init__(
        self,
        table: str,
        tagger: Tagger,
        raw_tags: int,
        *,
        pages: bool,
        flat_zeros: bool = False,
        awake: Collection[str] = (),
    ) -> None:
        self.keys = RowKeys()
        self.too_many = False
        self._table = table
        self._tagger = tagger
        self._raw_tags = raw_tags
        self._columns: list[str] = []
        self._tags: dict[int, str] = {}
        self._last: tuple[npt.NDArray[np.int64], tuple[str, ...]] | None = None
        self._silent = SilentNumbers()
        self._flat_zeros, self._begun = flat_zeros, set(awake)
        self._kept = self._quiet = np.empty(0, np.intp)
        self._slots = np.empty(0, np.int64)
        self._quiet_slots: list[int] = []
        self._names: list[str] = []
        self._views: dict[str, QuantityView] | None = {} if pages else None
        self._groups: list[tuple[QuantityView, npt.NDArray[np.intp], npt.NDArray[np.intp]]] = []
        self._sizes = LayoutSizes(self.keys)

    def pick(self, rows: TableRows) -> KeptValues:
        """Return a step's values with their slots; the slots are the same object while the rows' keys stay."""
        last = self._last
        if last is None or last[1] != rows.numbers or not np.array_equal(last[0], rows.keys):
            self._choose(rows)
        if self._silent.wake(self._quiet_slots, rows.values.ravel()[self._quiet]):
            self._choose(rows)
        raw = rows.values.ravel()[self._kept]
        if not self._groups:
            return KeptValues(rows.step, self._slots, raw)
        sizes = self._sizes.all()
        numbers = [n for view, at, layers in self._groups for n in view.take_rows(rows, sizes, layers, at)]
        return KeptValues(rows.step, self._slots, np.concatenate([raw, numbers]))

    def tags(self, picked: KeptValues) -> list[str]:
        """Return the tags of the kept values; the same list object while all rows are kept and their keys stay."""
        whole = picked.slots is self._slots
        if whole and self._names:
            return self._names
        names = [self._tag(slot) for slot in picked.slots.tolist()]
        if whole:
            self._names = names
        return names

    @property
    def awake(self) -> list[str]:
        """The tags of counts and shares that have begun, which a later conversion goes on with."""
        quiet = {i for i, name in enumerate(self._columns) if name in QUIET}
        begun = (tag for slot, tag in self._tags.items() if slot % WIDEST in quiet and self._has_begun(slot))
        return sorted({*self._begun, *begun})

    def pages(self) -> list[Summary.Value]:
        """Return the pictures of layers over steps."""
        return [value for view in (self._views or {}).values() for value in view.pictures()]

    def _choose(self, rows: TableRows) -> None:
        self._last = (rows.keys, rows.numbers)
        self._names = []
        self.too_many = self.too_many or (
            self._views is not None and 0 <= self._raw_tags < len(rows) * len(rows.numbers)
        )
        kept = self._columns_kept(rows)
        columns = np.asarray([self._column(rows.numbers[i]) for i in kept], np.int64)
        places = (np.arange(len(rows))[:, None] * len(rows.numbers) + np.asarray(kept, np.intp)).ravel()
        slots = (rows.keys[:, None] * WIDEST + columns).ravel()
        silent = np.asarray([not self._has_begun(slot) for slot in slots.tolist()], bool)
        self._kept, self._quiet, self._quiet_slots = places[~silent], places[silent], slots[silent].tolist()
        parts = [slots[~silent]]
        self._groups = self._grouped(rows)
        for view, _, _ in self._groups:
            key = self.keys.key_id(RowKey(_OVER_LAYERS, view.quantity, 0))
            parts.append(np.asarray([key * WIDEST + self._column(name) for name in SUMMARY], np.int64))
        self._slots = np.concatenate(parts)

    def _has_begun(self, slot: int) -> bool:
        """Return whether a number of a row is written, as it is no count or share, or has been other than 0."""
        if self._flat_zeros or not self._silent.has(slot, self._columns[slot % WIDEST]):
            return True
        return bool(self._begun) and self._tag(slot) in self._begun

    def _columns_kept(self, rows: TableRows) -> list[int]:
        """Return the columns whose single series are written: all, or where there are too many each layer's norm."""
        if not self.too_many:
            return list(range(len(rows.numbers)))
        kept = self._raw_tags != 0 and len(rows) <= MOST_NORMS and NORM in rows.numbers
        return [rows.numbers.index(NORM)] if kept else []

    def _grouped(self, rows: TableRows) -> list[tuple[QuantityView, npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
        """Group rows by quantity: its view, its rows in the table, and their rows in its picture."""
        if self._views is None or NORM not in rows.numbers:
            return []
        found: dict[str, list[int]] = {}
        for row, key in enumerate(rows.keys.tolist()):
            scope = self.keys.keys[key].scope
            found.setdefault(SCOPES.get(scope, scope) or self._table, []).append(row)
        groups = []
        for quantity, its_rows in found.items():
            view = self._views.setdefault(quantity, QuantityView(quantity))
            names = [self.keys.keys[key].name for key in rows.keys[its_rows].tolist()]
            groups.append((view, np.asarray(its_rows, np.intp), view.matrix.rows_of(names)))
        return groups

    def _column(self, name: str) -> int:
        if name not in self._columns:
            self._columns.append(name)
        return self._columns.index(name)

    def _tag(self, slot: int) -> str:
        found = self._tags.get(slot)
        if found is None:
            key_id, column = divmod(slot, WIDEST)
            key, name = self.keys.keys[key_id], self._columns[column]
            over_layers = key.vpp_stage == _OVER_LAYERS
            found = summary_tag(key.name, name) if over_layers else self._tagger(self._table, key, name)
            self._tags[slot] = found
        return found
