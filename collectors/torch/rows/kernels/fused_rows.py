"""Launches the fused kernels, keeps their partial rows, and combines those at the step's end or when space runs out."""

import logging
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from trainsentry.collectors.torch.device.registry import device_of
from trainsentry.collectors.torch.rows.kernels.chunks import ARENA_ROWS, Cut, cut, tile_for
from trainsentry.collectors.torch.rows.kernels.compiled_launches import CompiledLaunches, is_wide
from trainsentry.collectors.torch.rows.kernels.dense_tensors import DenseTensors, DtypeGroup
from trainsentry.collectors.torch.rows.kernels.device_counts import KernelCounters
from trainsentry.collectors.torch.rows.kernels.launch_tables import LaunchTables, UnderWay

logger = logging.getLogger("trainsentry")

ROWS_AT_ONCE: Final = 256
"""Partial rows that a program combines at a time: the tensors of most lists have fewer."""


def kernels_for(device: torch.device) -> Any:
    """Return the module of the kernels, None when they do not run on `device`."""
    return _loaded_kernels() if device_of(device).has_triton() else None


@cache
def _loaded_kernels() -> Any:
    try:
        from trainsentry.collectors.torch.rows.kernels import triton_kernels
    except Exception as error:  # noqa: BLE001 - whatever another version of Triton raises
        logger.warning("trainsentry: Triton is installed, but our kernels do not load; slower ones run: %s", error)
        return None
    return triton_kernels


class FusedRows:
    """Reads tensors of one device into partial rows; `combine` completes the rows. `launches` counts all launches."""

    def __init__(self, device: torch.device, kernels: Any) -> None:
        self.device = device
        self.kernels = kernels
        self.launches = 0
        self._partial_rows = CompiledLaunches(kernels.partial_rows)
        self._combine_rows = CompiledLaunches(kernels.combine_rows)
        self.seam = device_of(device)
        self.dtype = self.seam.row_dtype
        self.tables = LaunchTables(device)
        self._split = self.dtype is not torch.float64
        self._accumulator = kernels.tl.float32 if self._split else kernels.tl.float64
        self._tile = tile_for(self.seam.kernel_limits)
        self._alignment = self.seam.kernel_limits.alignment
        self._partials: Tensor | None = None
        self._used = 0
        self._under_way: list[UnderWay] = []
        self._stream: Any = None

    def begin(
        self, slot: int, dense: DenseTensors, eps: float, rows: Tensor, counters: KernelCounters | None = None
    ) -> None:
        """Read tensors into the rows from `slot` on, by one launch per dtype; short space combines earlier ones first.

        There are at most `MOST_AT_ONCE` tensors. With `counters` the same launch counts their values.
        """
        with self._entered():
            if len(dense.sizes) == 1:
                self._begin_one(slot, dense.tensors[0], eps, rows, counters)
            else:
                for group in dense.grouped():
                    self._begin_group(slot, group, dense, eps, rows, counters)

    def combine(self, rows: Tensor) -> None:
        """Complete all rows under way, by one launch; what the current stream does next finds them complete."""
        with self._entered():
            if self._under_way:
                self._combine(rows)

    def slots_under_way(self) -> list[int]:
        """Return the rows that `combine` has yet to complete."""
        return [row for slot, _, group in self._under_way for row in (group.places + slot).tolist()]

    def forget(self, slot: int) -> None:
        """Drop the rows under way from `slot` on, which one list begins with."""
        self._under_way = [each for each in self._under_way if each[0] < slot]

    def _begin_one(self, slot: int, x: Tensor, eps: float, rows: Tensor, counters: KernelCounters | None) -> None:
        group = single(x.numel())
        cutting = group.cutting
        first = self._room(cutting.total, rows)
        if cutting.total:
            size = int(cutting.sizes[0])
            self._launch(cutting, x, (x, x, x, x), first, size, eps, slot, counters, many=False)
        self._under_way.append((slot, first, group))

    def _begin_group(
        self,
        slot: int,
        group: DtypeGroup,
        dense: DenseTensors,
        eps: float,
        rows: Tensor,
        counters: KernelCounters | None,
    ) -> None:
        """Read the tensors of one dtype."""
        places, cutting = group.places, group.cutting
        first = self._room(cutting.total, rows)
        if cutting.total:
            addresses = dense.addresses if group.whole else [dense.addresses[i] for i in places.tolist()]
            slots = () if counters is None else (places + slot).tolist()
            table = self.tables.of_list(group, addresses, slots)
            self._launch(cutting, dense.tensors[places[0]], table, first, 0, eps, 0, counters, many=True)
        self._under_way.append((slot, first, group))

    def _launch(
        self,
        cutting: Cut,
        x: Tensor,
        table: tuple[Tensor, ...],
        first: int,
        size: int,
        eps: float,
        slot: int,
        counters: KernelCounters | None,
        *,
        many: bool,
    ) -> None:
        partials = self._arena()
        self._partial_rows.launch(
            cutting.total,
            (x.dtype, many, counters is not None, is_wide(size, cutting.chunk)),
            x,
            *table,
            partials,
            partials if counters is None else counters.table,
            partials if counters is None else counters.divisor,
            first,
            size,
            cutting.chunk,
            slot,
            float_below(eps),
            many=many,
            histograms=counters is not None,
            split=self._split,
            accumulator=self._accumulator,
            lanes=self._tile.lanes,
            unroll=self._tile.unroll,
            alignment=self._alignment,
        )
        self.launches += 1

    def _combine(self, rows: Tensor) -> None:
        slots, firsts, counts, sizes = self.tables.of_rows(self._under_way)
        self._combine_rows.launch(
            slots.numel(),
            None,
            self._arena(),
            firsts,
            counts,
            sizes,
            slots,
            rows,
            split=self._split,
            accumulator=self._accumulator,
            block=ROWS_AT_ONCE,
        )
        self.launches += 1
        self._under_way, self._used = [], 0

    def _entered(self) -> AbstractContextManager[Any]:
        """Make the device current, as Triton launches there, and let its stream wait for the one used before."""
        self._stream = self.seam.follow(self._stream, self.device)
        return self.seam.guard(self.device)

    def _room(self, programs: int, rows: Tensor) -> int:
        """Reserve partial rows and return the first; combine those under way when there is not enough space."""
        if not self._under_way:
            self._used = 0  # those of a launch that failed are free again
        elif self._used + programs > ARENA_ROWS:
            self._combine(rows)
        first, self._used = self._used, self._used + programs
        return first

    def _arena(self) -> Tensor:
        if self._partials is None:
            shape = (ARENA_ROWS, self.kernels.PARTIAL_COLUMNS)
            self._partials = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self._partials


@lru_cache(maxsize=256)
def single(size: int) -> DtypeGroup:
    """Return the group of a tensor that is read alone."""
    return DtypeGroup(np.zeros(1, np.int64), cut((size,)), whole=True)


@lru_cache(maxsize=16)
def float_below(eps: float) -> float:
    """Return the largest float32 not above `eps`: kernels take their arguments in float32."""
    rounded = np.float32(eps)
    return float(np.nextafter(rounded, np.float32(-np.inf)) if float(rounded) > eps else rounded)
