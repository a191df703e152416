"""The rows of a step: statistics in execution order, copied to the host once."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import COLUMNS, NORM, VALUE
from trainsentry.collectors.torch.local_tensor import is_readable, layout_of, local, stored_values, version_of
from trainsentry.collectors.torch.statistics import device_row, host_row, row_dtype

CHUNK_ROWS: Final = 1024
"""Rows of one device buffer: 64 kB, so that a small model wastes little and a large one seldom allocates."""


@dataclass
class PendingRows:
    """Rows on their way to the host; on CPU they are there at once. `kept` masks rows that were read anew later."""

    ids: npt.NDArray[np.int32]
    layouts: npt.NDArray[np.int32]
    values: npt.NDArray[np.float64]
    kept: npt.NDArray[np.bool_]
    copies: list[tuple[npt.NDArray[np.intp], Tensor, Any]]
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
        for positions, host, _ in self.copies:
            self.values[positions] = host[: len(positions)].numpy()
        for position, source in self.aliases:
            self.values[position] = self.values[source]
        if self.kept.all():
            return self.ids, self.layouts, self.values
        return self.ids[self.kept], self.layouts[self.kept], self.values[self.kept]


class _DeviceRows:
    """Rows of one device in preallocated chunks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = row_dtype(device)
        self.chunks: list[Tensor] = []
        self.positions: list[int] = []

    def append(self, position: int, row: Tensor) -> None:
        chunk, offset = divmod(len(self.positions), CHUNK_ROWS)
        if chunk == len(self.chunks):
            self.chunks.append(torch.empty(CHUNK_ROWS, COLUMNS, dtype=self.dtype, device=self.device))
        self.positions.append(position)
        target = self.chunks[chunk][offset]
        target.copy_(row)

    def copy_to_host(self) -> tuple[npt.NDArray[np.intp], Tensor, Any]:
        """Start the one copy of the step into pinned memory; return it with the event that tells its end."""
        n = len(self.positions)
        used = self.chunks[: -(-n // CHUNK_ROWS)]
        rows = used[0] if len(used) == 1 else torch.cat(used)
        positions = np.asarray(self.positions, np.intp)
        if self.device.type == "cpu":
            return positions, rows[:n].clone(), None
        host = torch.empty(rows.shape, dtype=self.dtype, pin_memory=True)
        host.copy_(rows, non_blocking=True)
        event = torch.Event(self.device)
        event.record()
        return positions, host, event


class StepRows:
    """Collects the rows of the current step.

    A tensor whose statistics cannot be computed gives no row; `refused` is told, with the error. When a series is
    read twice in a step, the later row replaces the earlier.
    """

    def __init__(
        self,
        table: SeriesTable,
        eps: float = 0.0,
        refused: Callable[[Exception], None] | None = None,
        *,
        device_rows_on_cpu: bool = False,
    ) -> None:
        self.table = table
        self.eps = eps
        self.refused = refused
        self._device_rows_on_cpu = device_rows_on_cpu
        self._layouts: dict[tuple[Any, Any], int] = {}
        self._devices: dict[torch.device, _DeviceRows] = {}
        self._host = np.zeros((256, COLUMNS))
        self._start()

    def _start(self) -> None:
        self._ids: list[int] = []
        self._layout_ids: list[int] = []
        self._aliases: list[tuple[int, int]] = []
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._latest: dict[int, int] = {}
        self._replaced: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, series_id: int, tensor: Tensor, divisor: Tensor | None = None, norm_of: Tensor | None = None) -> None:
        """Append the statistics of what `tensor` holds on this rank.

        They are divided by `divisor` where given; with `norm_of` the value column gets their norm divided by it.
        """
        try:
            values = local(tensor)
            if not is_readable(values):
                return
            stored, implicit = stored_values(values)
            if self._on_host(stored):
                row = np.asarray(host_row(stored, self.eps, implicit))
                if divisor is not None:
                    row[: NORM + 1] /= divisor.item()
                if norm_of is not None:
                    with np.errstate(divide="ignore", invalid="ignore"):
                        row[VALUE] = row[NORM] / np.float64(norm_of.item())
                position = self._append(series_id, values)  # before the buffer is named: it may grow
                self._host[position] = row
            else:
                made = device_row(stored, self.eps, implicit)
                if divisor is not None:
                    made[: NORM + 1] /= divisor.to(made.device)
                if norm_of is not None:
                    made[VALUE] = made[NORM] / norm_of
                self._append_on(stored.device, series_id, values, made)
        except Exception as error:
            if self.refused is None:
                raise
            self.refused(error)

    def add_shared(self, series_id: int, tensor: Tensor) -> None:
        """Append the statistics of a tensor that other series may show too: it is read once a step."""
        version = version_of(tensor)
        known = self._seen.get(id(tensor))
        if known is not None and version is not None and known[0]() is tensor and known[1] == version:
            position = self._append(series_id, local(tensor))
            self._aliases.append((position, known[2]))
            return
        position = len(self._ids)
        self.add(series_id, tensor)
        if len(self._ids) > position and version is not None:
            self._seen[id(tensor)] = (weakref.ref(tensor), version, position)

    def add_scalar(self, series_id: int, value: "float | Tensor") -> None:
        """Append a scalar: a Python number, or a tensor of one element that is not waited for."""
        if isinstance(value, Tensor):
            scalar = local(value).reshape(())
            if not self._on_host(scalar):
                row = device_row(scalar, self.eps)
                row[VALUE] = scalar
                self._append_on(scalar.device, series_id, scalar, row)
                return
            value = scalar.item()
        number = torch.tensor(float(value), dtype=torch.float64)
        numbers = (*host_row(number, self.eps)[:VALUE], float(value))
        position = self._append(series_id, number)
        self._host[position] = numbers

    def take(self) -> PendingRows:
        """Return the rows so far and start anew; starts one copy per device that holds rows."""
        pending = self.peek()
        for rows in self._devices.values():
            rows.positions = []
        self._start()
        return pending

    def peek(self) -> PendingRows:
        """Return the rows so far and keep them; the same copies as `take`."""
        return PendingRows(
            ids=np.asarray(self._ids, np.int32),
            layouts=np.asarray(self._layout_ids, np.int32),
            values=self._host[: len(self)].copy(),
            kept=self._kept(),
            copies=[d.copy_to_host() for d in self._devices.values() if d.positions],
            aliases=list(self._aliases),
        )

    def _kept(self) -> npt.NDArray[np.bool_]:
        kept = np.ones(len(self), bool)
        kept[self._replaced] = False
        return kept

    def _on_host(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and not self._device_rows_on_cpu

    def _append_on(self, device: torch.device, series_id: int, tensor: Tensor, row: Tensor) -> None:
        """Append a row that lies on a device."""
        rows = self._devices.get(device)
        if rows is None:
            rows = self._devices[device] = _DeviceRows(device)
        rows.append(self._append(series_id, tensor), row)

    def _append(self, series_id: int, tensor: Tensor) -> int:
        """Reserve the next row; return its position."""
        key = (tensor.numel() if tensor.is_nested else tensor.shape, tensor.dtype)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self.table.layout_id(layout_of(tensor))
        position = len(self._ids)
        if position == len(self._host):
            self._host = np.concatenate([self._host, np.zeros_like(self._host)])
        earlier = self._latest.get(series_id)
        if earlier is not None:
            self._replaced.append(earlier)
        self._latest[series_id] = position
        self._ids.append(series_id)
        self._layout_ids.append(layout)
        return position
