"""Turns the rows of a recorded table into the series and values of step records."""

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.series import (
    ACTIVATION_QUANTITIES,
    COMMUNICATION_QUANTITIES,
    FOUND_INF,
    SKIPPED,
    Layout,
    Series,
    SeriesTable,
)
from trainsentry.collectors.statistics import COLUMNS, INFS, NANS, STATISTICS, VALUE
from trainsentry.exporters.csv.format import SCALARS, elements_of, parse_shape
from trainsentry.exporters.csv.table_rows import RowKey, RowKeys, TableRows

# The last input or output in the name is ours; earlier ones belong to the user's module names.
_ACTIVATION: Final = re.compile(
    r"(?:(?P<module>.*?)(?:@\d+)?\.)?(?:input|output)\.(?P<path>(?:(?!input\.|output\.).)+)"
)

_CALL: Final = re.compile(r"(?P<call>(?P<group>.+)\.(?P<op>(?:(?![a-z])\w)*[a-z]\w*)\.\d+)(?:\.\d+)?")
"""The name of a collective's tensor: group, op, number of the call in the step, and of the tensor if several."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRows:
    """Rows of one table at one step in the form of a record, before the tables are merged.

    Scalars (`unplaced`) have no order in their table.
    """

    ids: npt.NDArray[np.int32]
    layouts: npt.NDArray[np.int32]
    orders: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    skipped: bool
    unplaced: bool = False


class RecordedTable:
    """Turns the rows of a table into series of a `SeriesTable`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.keys = RowKeys()
        self._ids = np.zeros(0, np.int32)
        self._layouts: list[int] = []

    def rows(self, rows: TableRows, table: SeriesTable) -> RecordedRows:
        """Return rows of the table as rows of a record; define their series and layouts in `table`."""
        scalar = self.name == SCALARS
        self._define(rows, table)
        for shape, dtype in self.keys.layouts[len(self._layouts) :]:
            self._layouts.append(table.layout_id(layout_of("[]" if scalar else shape, "float64" if scalar else dtype)))
        values = np.full((len(rows), COLUMNS), np.nan)
        values[:, [NANS, INFS]] = 0.0  # without counts, values count as finite
        for column, name in enumerate(rows.numbers):
            values[:, STATISTICS.index(name) if name in STATISTICS else VALUE] = rows.values[:, column]
        if scalar:
            _fill_scalars(values)
        return RecordedRows(
            self._ids[rows.keys],
            np.asarray(self._layouts, np.int32)[rows.layouts],
            rows.orders,
            values,
            scalar and self._has_skip(rows),
            unplaced=scalar,
        )

    def _define(self, rows: TableRows, table: SeriesTable) -> None:
        """Define the series that first appear in these rows, in the run's order."""
        more = len(self.keys.keys) - len(self._ids)
        self._ids = np.append(self._ids, np.full(more, -1, np.int32))
        new = np.flatnonzero(self._ids[rows.keys] < 0)
        for row in new[np.argsort(rows.orders[new], kind="stable")].tolist():
            key = int(rows.keys[row])
            self._ids[key] = table.series_id(series_of(self.name, self.keys.keys[key]))

    def _has_skip(self, rows: TableRows) -> bool:
        names = (self.keys.keys[key].name for key in rows.keys.tolist())
        numbers = zip(names, rows.values[:, 0].tolist(), strict=True)
        return any(name in {SKIPPED, FOUND_INF} and value > 0 for name, value in numbers)


def _fill_scalars(values: npt.NDArray[np.float64]) -> None:
    """Give scalars the statistics of a tensor of one element."""
    value = values[:, VALUE]
    finite = np.isfinite(value)
    values[:, :3] = np.where(finite, value, np.nan)[:, None]
    values[:, 3] = np.where(finite, np.abs(value), 0.0)
    values[:, NANS], values[:, INFS] = np.isnan(value), np.isinf(value)


def series_of(table: str, key: RowKey) -> Series:
    """Return the series that a row of a table belongs to."""
    if table == SCALARS:
        return Series(key.name, key.name, key.micro_step, scalar=True)
    if table in ACTIVATION_QUANTITIES:
        match = _ACTIVATION.fullmatch(key.name)
        module, path = (match["module"] or "", match["path"]) if match else (key.name, "0")
        return Series(key.name, table, key.micro_step, path, module, key.vpp_stage)
    if table in COMMUNICATION_QUANTITIES:
        call = _CALL.fullmatch(key.name) if "|" not in key.name else None
        index = f"{call['op']}|{call['group']}|{call['call']}" if call else ""
        return Series(key.name, table, key.micro_step, index)
    return Series(key.name, table, key.micro_step, "", key.name.rpartition(".")[0], key.vpp_stage)


def layout_of(shape: str, dtype: str) -> Layout:
    """Parse the layout from a row's texts.

    >>> layout_of("[2, 3]", "float32").numel
    6
    """
    sizes = parse_shape(shape)
    return Layout(sizes, dtype, elements_of(sizes))
