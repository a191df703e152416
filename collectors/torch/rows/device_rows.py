"""Keeps a step's rows on an accelerator, where they are computed, and copies them to the host once."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from trainsentry.collectors.shared.host_rows import Copy
from trainsentry.collectors.shared.recurring_arrays import RecurringArray
from trainsentry.collectors.statistics import COLUMNS, NORM, VALUE
from trainsentry.collectors.torch.device.device import Device
from trainsentry.collectors.torch.device.registry import device_of
from trainsentry.collectors.torch.rows.device_statistics import device_row
from trainsentry.collectors.torch.rows.gathered_tensors import GatheredTensors, GatherLimits, StorageFacts
from trainsentry.collectors.torch.rows.kernels.chunks import MOST_AT_ONCE
from trainsentry.collectors.torch.rows.kernels.dense_tensors import (
    DenseTensors,
    address_in_place,
    addresses_in_place,
    dtypes_for,
    in_one_piece,
)
from trainsentry.collectors.torch.rows.kernels.device_counts import DeviceCounts
from trainsentry.collectors.torch.rows.kernels.fused_rows import FusedRows, kernels_for
from trainsentry.collectors.torch.rows.list_passes import BLOCK, PASS_BLOCKS
from trainsentry.collectors.torch.rows.list_statistics import ListStatistics
from trainsentry.collectors.torch.rows.pair_rows import DevicePairs, Pairs

logger = logging.getLogger("trainsentry")

FIRST_ROWS: Final = 256
"""Rows of the first buffer (16 kB), which doubles when a step has more."""


class DeviceRows:
    """Rows of one device in one buffer; `positions` says which row of the record each of them is.

    Tensors are read together by the fused kernels, or by plain operations where those do not run. `address_in_place`
    returns the address of a plain tensor of this device that is read so, 0 where it is read alone; it is asked for each
    tensor, so it is no method.

    `waiting` is what the compiled `share` adds tensors to: the containers of those that wait, a function that returns
    the number of the current stream, and a list with the number and the stream on which they were made.

    Of the rows at the positions `scalars` only the value is written. `overwritten` are the positions of tensors that
    changed before they were read, and `lost` those of rows that no kernel could write: their values mean nothing.
    """

    def __init__(
        self, device: torch.device, eps: float = 0.0, limits: GatherLimits | None = None, *, histograms: bool = False
    ) -> None:
        self.device = device
        self.eps = eps
        self.seam = device_of(device)
        self.dtype = self.seam.row_dtype
        self.positions: list[int] = []
        self.overwritten: list[int] = []
        self.scalars: list[int] = []
        self.lost: list[int] = []
        self._capacity = FIRST_ROWS
        self._rows = torch.empty(FIRST_ROWS, COLUMNS, dtype=self.dtype, device=device)
        self._written = self._rows[:0]
        self._recurring_positions = RecurringArray(np.intp)
        self._counts = DeviceCounts(device, FIRST_ROWS) if histograms else None
        kernels = kernels_for(device)
        self.fused = FusedRows(device, kernels) if kernels is not None else None
        self._lists = ListStatistics(device)
        self._pairs = DevicePairs(device, self._lists)
        self._gathered = GatheredTensors(limits or GatherLimits())
        self._stream_number = self.seam.stream_numbers(device)
        self._gathering_on: list[Any] = [None, None]
        self._streams: set[int] = set()
        self._has_lacked_memory = False
        self.waiting = (*self._gathered.containers(), self._stream_number, self._gathering_on)
        self.has_private_formats = type(self.seam).has_plain_format is not Device.has_plain_format
        self._dtypes = dtypes_for(self.dtype)
        self.address_in_place: Callable[[Tensor], int] = (
            self._address_in_plain_format if self.has_private_formats else partial(address_in_place, self._dtypes)
        )

    def __bool__(self) -> bool:
        """Whether there are rows, or tensors that wait to be read."""
        return bool(self.positions or self._gathered.positions)

    def _address_in_plain_format(self, x: Tensor) -> int:
        """Return the address of a plain tensor of this device that is read with others, 0 where it is read alone."""
        return address_in_place(self._dtypes, x) if self.seam.has_plain_format(x) else 0

    def addresses_in_place(self, tensors: Sequence[Tensor]) -> list[int] | None:
        """Return the addresses of many such tensors; None where one cannot be read in place."""
        return addresses_in_place(self._dtypes, tensors) if self.have_plain_formats(tensors) else None

    def have_plain_formats(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the elements of tensors of this device lie in memory as their strides say."""
        return not self.has_private_formats or all(map(self.seam.has_plain_format, tensors))

    def in_one_piece(self, x: Tensor) -> Tensor:
        """Return a copy without gaps of a tensor that has some, if it is not too large; else `x`."""
        if self.fused is None or not self.have_plain_formats([x]):
            return x
        return in_one_piece(self._dtypes, x, BLOCK * PASS_BLOCKS)

    def dense(self, tensors: Sequence[Tensor]) -> DenseTensors:
        """Return tensors that are read in place, with their addresses and sizes."""
        return DenseTensors(tensors, [self.address_in_place(x) for x in tensors], [x.numel() for x in tensors])

    def gather(self, position: int, x: Tensor, address: int, version: int, facts: StorageFacts) -> None:
        """Read a tensor at an address in place, later and with others: by `read_gathered`, or once enough wait.

        `version` is autograd's count of its changes, which shows one that happens before it is read.
        """
        number = self._stream_number()
        if number != self._gathering_on[0]:
            self.read_gathered()
            self._gathering_on[:] = number, self.seam.current_stream(self.device)
            self._streams.add(number)
        if self._gathered.add(position, x, address, version, facts):
            self.read_gathered()

    def waits_in(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Whether a tensor waits to be read that lies between the first address of a range and its end."""
        waiting = self._gathered.addresses
        return any(start <= address < end for start, end in ranges for address in waiting)

    def read_gathered(self) -> None:
        """Read the tensors that wait, on the stream on which they were made; note those that were overwritten."""
        if self._gathered.positions:
            positions, dense, overwritten = self._gathered.take()
            self.overwritten += overwritten
            if not positions:
                return
            try:
                with self.seam.on_stream(self._gathering_on[1]):
                    self.add_many(positions, dense)
                if len(self._streams) > 1:  # another one may take the memory, once nobody else needs the tensors
                    self.seam.keep_for_stream(dense.tensors, self._gathering_on[1])
            except BaseException:
                self.lost += positions
                raise

    def add(self, position: int, x: Tensor, implicit_zeros: int = 0, divisor: Tensor | None = None) -> None:
        """Write the statistics of `x` to the next row; `divisor` divides the values of its histogram."""
        if not implicit_zeros:
            dense = self.in_one_piece(x)
            address = self.address_in_place(dense)
            if address and self._fuse([position], DenseTensors([dense], [address], [x.numel()]), divisor):
                return
        self._lists.follow()
        plain = self.seam.in_plain_format(x)
        if plain.numel() > BLOCK * PASS_BLOCKS and not implicit_zeros:
            self._add_plainly([position], [plain], divisor)
            return
        row = device_row(plain, self.eps, implicit_zeros)  # before a row is reserved, as this may fail
        self._reserve([position])[0].copy_(row)
        self._count_plainly([plain], divisor, implicit_zeros)

    def add_many(self, positions: Sequence[int], dense: DenseTensors, divisor: Tensor | None = None) -> None:
        """Write the statistics of tensors that have an address in place to the next rows.

        `divisor` divides the values of their histograms; `finish` divides the rows.
        """
        if len(positions) > MOST_AT_ONCE:
            for start in range(0, len(positions), MOST_AT_ONCE):
                some = slice(start, start + MOST_AT_ONCE)
                self.add_many(positions[some], dense[some], divisor)
        elif not self._fuse(positions, dense, divisor):
            self._add_plainly(positions, dense.tensors, divisor)

    def _add_plainly(self, positions: Sequence[int], tensors: Sequence[Tensor], divisor: Tensor | None) -> None:
        """Write the statistics of tensors to the next rows by plain operations."""
        rows = self._lists.rows_of(tensors, self.eps)  # before rows are reserved, as this may fail
        self._reserve(positions).copy_(rows)
        self._count_plainly(tensors, divisor)

    def _count_plainly(self, tensors: Sequence[Tensor], divisor: Tensor | None, implicit_zeros: int = 0) -> None:
        """Write the counters of the tensors of the last rows by plain operations."""
        if self._counts is not None:
            start = len(self.positions) - len(tensors)
            for i, x in enumerate(tensors):
                self._counts.count(start + i, x, divisor, implicit_zeros)

    def add_pairs(self, positions: Sequence[int], pairs: Pairs) -> None:
        """Write how pairs of tensors of this device point to the next rows."""
        self._lists.follow()
        rows = self._pairs.rows_of(pairs)  # before rows are reserved, as this may fail
        self._reserve(positions).copy_(rows)

    def add_scalar(self, position: int, value: Tensor) -> None:
        """Write a scalar to the value of the next row; its statistics follow from it, and the host finds them."""
        self._lists.follow()
        self._reserve([position])[0, VALUE].copy_(value)
        self.scalars.append(position)

    def norms_at(self, places: slice) -> Tensor | None:
        """Return a copy of the norms in the rows of consecutive positions, shape (n,).

        None where these rows are not on this device one after another, or one was lost.
        """
        start = self.positions.index(places.start) if places.start in self.positions else 0
        there = slice(start, start + places.stop - places.start)
        if self.positions[there] != [*range(places.start, places.stop)]:
            return None
        self._combine()
        return None if self.lost else self._rows[there, NORM].clone()

    def finish(self, count: int, divisor: Tensor | None, norms: Tensor | None) -> None:
        """Divide the last `count` rows by `divisor`, and write norm ÷ `norms` (shape (count,)) to their values."""
        if divisor is None and norms is None:
            return
        self._combine()
        rows = self._rows[len(self.positions) - count : len(self.positions)]
        if divisor is not None:
            rows[:, : NORM + 1] /= divisor.to(rows.device)
        if norms is not None:
            rows[:, VALUE] = rows[:, NORM] / norms

    def are_in_order(self, count: int) -> bool:
        """Whether the rows of the last copy are all `count` rows of the record, one after another."""
        is_wide = self.dtype is torch.float64
        return is_wide and len(self.positions) == count and self._recurring_positions.counts_up

    def copy_to_host(self) -> Copy:
        """Start the step's one copy into pinned memory; return positions, a function that reads it, and its event."""
        self.read_gathered()
        self._combine()
        positions = self._recurring_positions.of(self.positions)
        if self._written.size(0) != len(positions):
            self._written = self._rows[: len(positions)]
        copy = self.seam.copy_to_host(self._written)
        return positions, copy.array, copy.event

    def copy_counts(self) -> Copy:
        """Start the copy of the rows' counters; call it after `copy_to_host`."""
        assert self._counts is not None
        copy = self.seam.copy_to_host(self._counts.table[: len(self.positions)])
        return np.asarray(self.positions, np.intp), copy.array, copy.event

    def clear(self) -> None:
        """Drop the rows; copies under way finish before the next row is written."""
        self._gathered.drop()
        if self._counts is not None:
            self._counts.clear(0, len(self.positions))
        self.positions, self.scalars, self.overwritten, self.lost = [], [], [], []

    def _fuse(self, positions: Sequence[int], dense: DenseTensors, divisor: Tensor | None = None) -> bool:
        """Read tensors by the fused kernels; False when they cannot run, and then they are not tried again."""
        if self.fused is None:
            return False
        slot = len(self.positions)
        self._make_room(positions)
        try:
            counters = self._counts.for_kernels(dense.sizes, divisor) if self._counts is not None else None
            self.fused.begin(slot, dense, self.eps, self._rows, counters)
        except torch.OutOfMemoryError:  # the slower operations need more memory, and the next step may have some
            self._unreserve(slot)
            raise
        except Exception as error:  # noqa: BLE001 - whatever the compiler or the driver raises
            self._unreserve(slot)
            self._combine()
            self._do_without_kernels(error)
            return False
        return True

    def _unreserve(self, slot: int) -> None:
        """Take back the rows from `slot` on, which some launches may have counted."""
        if self.fused is not None:
            self.fused.forget(slot)
        if self._counts is not None:
            self._counts.clear(slot, len(self.positions))
        del self.positions[slot:]

    def _combine(self) -> None:
        """Write the rows under way; those of a launch that fails are lost. The current stream finds all rows."""
        self._lists.follow()
        if self.fused is None:
            return
        try:
            self.fused.combine(self._rows)
        except torch.OutOfMemoryError as error:  # slower operations need more, and the next step may have some
            self._lose_rows_under_way(self.fused)
            if not self._has_lacked_memory:
                logger.warning("trainsentry: rows are lost where %s has no memory for them: %s", self.device, error)
            self._has_lacked_memory = True
        except Exception as error:  # noqa: BLE001 - whatever the compiler or the driver raises
            self._lose_rows_under_way(self.fused)
            self._do_without_kernels(error)

    def _lose_rows_under_way(self, fused: FusedRows) -> None:
        self.lost += [self.positions[slot] for slot in fused.slots_under_way()]
        fused.forget(0)

    def _do_without_kernels(self, error: Exception) -> None:
        """Say that the kernels do not run, once, and never try them again."""
        if self.fused is not None:
            logger.warning("trainsentry: the fused kernels do not run on %s; slower ones do: %s", self.device, error)
        self.fused = None

    def _reserve(self, positions: Sequence[int]) -> Tensor:
        """Take the next rows for the given positions of the record; return them, shape (n, COLUMNS)."""
        start = len(self.positions)
        self._make_room(positions)
        return self._rows[start : len(self.positions)]

    def _make_room(self, positions: Sequence[int]) -> None:
        """Take the next rows for the given positions of the record."""
        start = len(self.positions)
        end = start + len(positions)
        if end > self._capacity:
            self._grow(max(end, 2 * self._capacity), start)
        self.positions += positions

    def _grow(self, capacity: int, used: int) -> None:
        """Make the buffers larger, of which `used` rows are taken; a failure to allocate leaves all as it was."""
        self._combine()  # writes the rows under way to the current buffer
        grown = torch.empty(capacity, COLUMNS, dtype=self.dtype, device=self.device)
        if self._counts is not None:
            self._counts.grow(capacity)
        grown[:used].copy_(self._rows[:used])
        self.seam.keep_for_stream([self._rows], self.seam.current_stream(self.device))
        self._rows, self._written, self._capacity = grown, grown[:0], capacity
