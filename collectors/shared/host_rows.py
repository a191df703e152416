"""The rows of a step in host memory, their ids, and rows that are still being copied from a device."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.statistics import COLUMNS


class HostRows:
    """Ids, layouts and numbers of the rows of the current step, in execution order.

    The numbers stand in one float64 array of shape (room, COLUMNS) whose address kernels write to.
    """

    def __init__(self) -> None:
        self._make_host(256)
        self._clear_rows()

    def __len__(self) -> int:
        return len(self._ids)

    def _clear_rows(self) -> None:
        self._ids: list[int] = []
        self._layout_ids: list[int] = []

    def _append(self, series_id: int, layout_id: int) -> int:
        """Append a row to the record, whose numbers are written elsewhere; return its position."""
        position = len(self._ids)
        self._make_room(position + 1)
        self._ids.append(series_id)
        self._layout_ids.append(layout_id)
        return position

    def _kept(self) -> npt.NDArray[np.bool_]:
        """Return which rows stand: of those of one series the last."""
        kept = np.ones(len(self), bool)
        if len(set(self._ids)) < len(self):
            last = {series_id: position for position, series_id in enumerate(self._ids)}
            kept[:] = False
            kept[list(last.values())] = True
        return kept

    def _make_room(self, rows: int) -> None:
        if rows > len(self._host):
            old = self._host
            self._make_host(max(rows, 2 * len(old)))
            self._host[: len(old)] = old

    def _make_host(self, rows: int) -> None:
        self._host = np.zeros((rows, COLUMNS))
        self._host_address = self._host.ctypes.data  # asked for once: it costs as much as reading a small tensor


def row_of_number(value: float) -> tuple[Any, ...]:
    """Return the row of one number, without its value column."""
    nan = math.nan
    if math.isnan(value):
        return (nan, nan, nan, 0.0, 1.0, 0.0, 0.0)
    if math.isinf(value):
        return (nan, nan, nan, 0.0, 0.0, 1.0, 0.0)
    return (value, value, value, abs(value), 0.0, 0.0, float(value == 0.0))


@dataclass
class PendingRows:
    """Rows on their way to the host; on CPU they are there at once. `kept` masks rows that were read anew later.

    A copy is the positions of its rows, what returns them once its event has come, and that event (or None).
    """

    ids: npt.NDArray[np.int32]
    layouts: npt.NDArray[np.int32]
    values: npt.NDArray[np.float64]
    kept: npt.NDArray[np.bool_]
    copies: list[tuple[npt.NDArray[np.intp], Callable[[], npt.NDArray[Any]], Any]]
    aliases: list[tuple[int, int]]

    def ready(self) -> bool:
        """Whether every copy has arrived; asks the device without waiting for it."""
        return all(event is None or event.query() for _, _, event in self.copies)

    def wait(self) -> None:
        """Wait until every copy has arrived."""
        for _, _, event in self.copies:
            if event is not None:
                event.synchronize()

    def resolve(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """Return ids, layouts and values (float64 of shape (n, COLUMNS)); call once the copies are ready."""
        for positions, read, _ in self.copies:
            self.values[positions] = read()
        for position, source in self.aliases:
            self.values[position] = self.values[source]
        if self.kept.all():
            return self.ids, self.layouts, self.values
        return self.ids[self.kept], self.layouts[self.kept], self.values[self.kept]
