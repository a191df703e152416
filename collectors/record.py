"""The step record: all rows of one rank in one step, or in one part of it."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.histogram import Histograms
from trainsentry.collectors.statistics import COLUMNS, content_fingerprints

_HEADER: Final = struct.Struct("=qqiiiid")
_ROW_BYTES: Final = 4 + 4 + 8 * COLUMNS
_OBJECT_BYTES: Final = 640
"""Bytes of a record without its rows: object, arrays and the allocator's rounding; tracemalloc measures 510 to 590."""
_ARRAY_BYTES: Final = 112
"""Bytes of one numpy array object without its elements."""


_last_index: Final[list[tuple[Any, Any]]] = [(None, None)]
"""The ids of which `as_index` was asked last, and its answer: those of a step's record are mostly the same object."""


def as_index(ids: npt.NDArray[np.int32]) -> Any:
    """Return ids as a slice where they are consecutive, else unchanged."""
    known, index = _last_index[0]
    if known is ids:
        return index
    n, index = len(ids), ids
    if n and int(ids[-1]) - int(ids[0]) == n - 1 and (np.diff(ids) == 1).all():
        index = slice(int(ids[0]), int(ids[0]) + n)
    if not ids.flags.writeable:
        _last_index[0] = ids, index
    return index


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The rows of one rank in one step, in execution order.

    `ids` and `layouts` are int32 of shape (n,), indices into the rank's `SeriesTable`; `values` is float64 of shape
    (n, COLUMNS). A step may have several records, which number their rows consecutively: `first_order` is the number
    of row 0. `skipped`: the loss scaler skipped the update. `examined`: parameters and optimizer state were read at an
    unplanned step because of an anomaly. `time` is seconds since the epoch. `overwritten` counts the tensors without a
    row because they changed before they were read. `histograms`, where they were asked for, are those of the rows.
    """

    step: int
    rank: int
    ids: npt.NDArray[np.int32]
    layouts: npt.NDArray[np.int32]
    values: npt.NDArray[np.float64]
    first_order: int = 0
    skipped: bool = False
    examined: bool = False
    time: float = 0.0
    overwritten: int = 0
    histograms: Histograms | None = None
    _where: Any = field(default=None, init=False, repr=False, compare=False)
    _columns: Any = field(default=None, init=False, repr=False, compare=False)
    _prints: Any = field(default=None, init=False, repr=False, compare=False)

    @property
    def where(self) -> Any:
        """The ids as an index into arrays over series; a slice, which copies nothing, where they are consecutive."""
        if self._where is None:
            object.__setattr__(self, "_where", as_index(self.ids))
        return self._where

    @property
    def columns(self) -> npt.NDArray[np.float64]:
        """The transposed values, shape (COLUMNS, n), contiguous so that a statistic reads fast; made once."""
        if self._columns is None:
            object.__setattr__(self, "_columns", np.ascontiguousarray(self.values.T))
        lines: npt.NDArray[np.float64] = self._columns
        return lines

    @property
    def prints(self) -> npt.NDArray[np.int64]:
        """The fingerprint of each row's content, shape (n,); made once."""
        if self._prints is None:
            object.__setattr__(self, "_prints", content_fingerprints(self.values))
        prints: npt.NDArray[np.int64] = self._prints
        return prints

    def forget_columns(self) -> None:
        """Free the arrays of `columns` and `prints`, as the flight recorder keeps records for many steps."""
        object.__setattr__(self, "_columns", None)
        object.__setattr__(self, "_prints", None)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded record."""
        return _HEADER.size + len(self) * _ROW_BYTES + (self.histograms.nbytes if self.histograms is not None else 0)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the record in memory, after `forget_columns`; arrays that records share count for none of them."""
        shared = sum(_ARRAY_BYTES + array.nbytes for array in (self.ids, self.layouts) if not array.flags.writeable)
        return self.nbytes + _OBJECT_BYTES - shared

    def encode(self) -> list[bytes]:
        """Return the encoded record as consecutive buffers."""
        flags = int(self.skipped) | int(self.examined) << 1 | int(self.histograms is not None) << 2
        head = _HEADER.pack(self.step, self.first_order, self.rank, len(self), flags, self.overwritten, self.time)
        rows = [head, self.ids.tobytes(), self.layouts.tobytes(), self.values.tobytes()]
        return rows if self.histograms is None else [*rows, *self.histograms.encode()]

    @classmethod
    def decode(cls, data: bytes | memoryview) -> "StepRecord":
        """Rebuild a record from the bytes of `encode`; the arrays are read-only views of `data`.

        Raises:
            ValueError: when the number of bytes does not match the number of rows, or the histograms are invalid.

        """
        at = _HEADER.size
        if len(data) < at:
            raise ValueError(f"a record of {len(data)} bytes, shorter than its header of {at}")
        step, first_order, rank, n, flags, overwritten, time = _HEADER.unpack_from(data)
        end = at + n * _ROW_BYTES
        if n < 0 or len(data) < end or (len(data) > end and not flags & 4):
            raise ValueError(f"a record of {n} rows has {len(data)} bytes instead of {end}")
        return cls(
            step=step,
            rank=rank,
            ids=np.frombuffer(data, np.int32, n, at),
            layouts=np.frombuffer(data, np.int32, n, at + 4 * n),
            values=np.frombuffer(data, np.float64, n * COLUMNS, at + 8 * n).reshape(n, COLUMNS),
            first_order=first_order,
            skipped=bool(flags & 1),
            examined=bool(flags & 2),
            time=time,
            overwritten=overwritten,
            histograms=Histograms.decode(data[end:], n) if flags & 4 else None,
        )

    def select(self, rows: "npt.NDArray[np.bool_] | npt.NDArray[np.intp] | slice") -> "StepRecord":
        """Return a record with some of the rows; a slice keeps the numbers of its rows."""
        first = self.first_order + (rows.start or 0 if isinstance(rows, slice) else 0)
        return replace(
            self,
            ids=self.ids[rows],
            layouts=self.layouts[rows],
            values=self.values[rows],
            first_order=first,
            histograms=self.histograms.select(rows) if self.histograms is not None else None,
        )

    def parts(self, max_bytes: int) -> Iterator["StepRecord"]:
        """Split the record into consecutive parts of at most `max_bytes` each, but at least one row."""
        if self.nbytes <= max_bytes:
            yield self
            return
        before = np.arange(len(self) + 1) * _ROW_BYTES
        if self.histograms is not None:
            before += self.histograms.bytes_before()
        start = 0
        while start < len(self):
            most = int(before[start]) + max_bytes - _HEADER.size
            stop = max(start + 1, int(np.searchsorted(before, most, side="right")) - 1)
            part = self.select(slice(start, stop))
            yield replace(part, overwritten=0) if start else part
            start = stop
