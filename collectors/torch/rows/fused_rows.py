"""Launches the fused kernels, keeps their partial rows, and combines those at the step's end or when space runs out."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainsentry.collectors.torch.device.pinned_tables import PinnedTables
from trainsentry.collectors.torch.device.registry import device_of
from trainsentry.collectors.torch.rows.chunks import ARENA_ROWS, chunk_of, cut, tile_for
from trainsentry.collectors.torch.rows.device_counts import KernelCounters

DTYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes that the kernels read; plain tensor operations read any other."""

EMPTY: Final = -1
"""The address of a tensor without elements."""


def kernels_for(device: torch.device) -> Any:
    """Return the module of the kernels, None when they do not run on `device`."""
    if not device_of(device).has_triton():
        return None
    try:
        from trainsentry.collectors.torch.rows import triton_kernels
    except ImportError:
        return None
    return triton_kernels


@dataclass(frozen=True, slots=True)
class DenseTensors:
    """Tensors that the kernels read in place, with the address and the number of elements of each.

    `groups`, where known, are the places of the tensors of each dtype.
    """

    tensors: Sequence[Tensor]
    addresses: Sequence[int]
    sizes: Sequence[int]
    groups: Sequence[Sequence[int]] | None = None

    def __getitem__(self, some: slice) -> "DenseTensors":
        return DenseTensors(self.tensors[some], self.addresses[some], self.sizes[some])

    def at(self, places: Sequence[int]) -> "DenseTensors":
        """Return the tensors at some places."""
        addresses = [self.addresses[i] for i in places]
        return DenseTensors([self.tensors[i] for i in places], addresses, [self.sizes[i] for i in places])


def places_by_dtype(dtypes: Sequence[torch.dtype]) -> list[list[int]]:
    """Return the places of each dtype in a list."""
    if len(set(dtypes)) == 1:
        return [list(range(len(dtypes)))]
    places: dict[torch.dtype, list[int]] = {}
    for i, dtype in enumerate(dtypes):
        places.setdefault(dtype, []).append(i)
    return list(places.values())


def address_in_place(x: Tensor) -> int:
    """Return the address of a plain tensor whose values the kernels can read there, else 0, and EMPTY for no values."""
    if x.dtype not in DTYPES:
        return 0
    try:
        if not x.is_contiguous() or x.is_neg() or x.is_nested:
            return 0
        return x.data_ptr() or (EMPTY if x.numel() == 0 else 0)
    except RuntimeError:  # sparse tensors and values inside a functorch transform have no address
        return 0


def addresses_in_place(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return `address_in_place` of many plain tensors of the kernels' dtypes; None if it is 0 for one of them."""
    try:
        if False in [x.is_contiguous() for x in tensors] or True in [x.is_neg() for x in tensors]:
            return None
        addresses = [x.data_ptr() for x in tensors]
    except RuntimeError:
        return None
    if 0 in addresses:
        addresses = [address_in_place(x) for x in tensors]
    return None if 0 in addresses else addresses


class FusedRows:
    """Reads tensors of one device into partial rows; `combine` completes the rows. `launches` counts all launches."""

    def __init__(self, device: torch.device, kernels: Any) -> None:
        self.device = device
        self.kernels = kernels
        self.launches = 0
        self.seam = device_of(device)
        self.dtype = self.seam.row_dtype
        self.tables = PinnedTables(device)
        self._split = self.dtype is not torch.float64
        self._accumulator = kernels.tl.float32 if self._split else kernels.tl.float64
        self._tile = tile_for(self.seam.kernel_limits)
        self._alignment = self.seam.kernel_limits.alignment
        self._partials: Tensor | None = None
        self._used = 0
        self._under_way: list[npt.NDArray[np.int64]] = []
        self._stream: Any = None

    def begin(
        self,
        slots: Sequence[int],
        dense: DenseTensors,
        eps: float,
        rows: Tensor,
        counters: KernelCounters | None = None,
    ) -> None:
        """Read tensors into rows `slots` of `rows`, by one launch per dtype; short space combines earlier ones first.

        There are at most `MOST_AT_ONCE` tensors. With `counters` the same launch counts their values.
        """
        with self._entered():
            if len(slots) == 1:
                self._begin_one(slots[0], dense.tensors[0], eps, rows, counters)
            else:
                groups = dense.groups or places_by_dtype([x.dtype for x in dense.tensors])
                if len(groups) == 1:
                    self._begin_list(slots, dense, eps, rows, counters)
                else:
                    for places in groups:
                        self._begin_list([slots[i] for i in places], dense.at(places), eps, rows, counters)

    def combine(self, rows: Tensor) -> None:
        """Complete all rows under way, by one launch; what the current stream does next finds them complete."""
        with self._entered():
            if self._under_way:
                self._combine(rows)

    def slots_under_way(self) -> list[int]:
        """Return the rows that `combine` has yet to complete."""
        return [slot for table in self._under_way for slot in table[0].tolist()]

    def forget(self, slot: int) -> None:
        """Drop the rows under way from `slot` on."""
        shortened = [table[:, table[0] < slot] for table in self._under_way]
        self._under_way = [table for table in shortened if table.shape[1]]

    def _begin_one(self, slot: int, x: Tensor, eps: float, rows: Tensor, counters: KernelCounters | None) -> None:
        size = x.numel()
        chunk = chunk_of(size)
        programs = -(-size // chunk)
        first = self._room(programs, rows)
        if programs:
            self._launch(programs, x, (x, x, x, x), first, size, chunk, eps, slot, counters, many=False)
        self._under_way.append(np.asarray([[slot], [first], [programs], [size]]))

    def _begin_list(
        self,
        slots: Sequence[int],
        dense: DenseTensors,
        eps: float,
        rows: Tensor,
        counters: KernelCounters | None,
    ) -> None:
        """Read tensors of one dtype."""
        cutting = cut(tuple(dense.sizes))
        first = self._room(cutting.total, rows)
        if cutting.total:
            n = len(slots)
            to = () if counters is None else (np.asarray(slots, np.int64),)
            table = self.tables.send((np.asarray(dense.addresses, np.int64), cutting.sizes, cutting.places, *to))
            end = 2 * n + cutting.total
            parts = table[:n], table[n : 2 * n], table[2 * n : end], table[end:]
            self._launch(cutting.total, dense.tensors[0], parts, first, 0, cutting.chunk, eps, 0, counters, many=True)
        self._under_way.append(np.stack((slots, cutting.starts + first, cutting.programs, cutting.sizes)))

    def _launch(
        self,
        programs: int,
        x: Tensor,
        table: tuple[Tensor, ...],
        first: int,
        size: int,
        chunk: int,
        eps: float,
        slot: int,
        counters: KernelCounters | None,
        *,
        many: bool,
    ) -> None:
        partials = self._arena()
        self.kernels.partial_rows[(programs,)](
            x,
            *table,
            partials,
            partials if counters is None else counters.table,
            partials if counters is None else counters.divisor,
            first,
            size,
            chunk,
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
        columns = np.concatenate(self._under_way, axis=1)
        n = columns.shape[1]
        table = self.tables.send((columns.reshape(-1),))
        slots, firsts, counts, sizes = (table[i * n : (i + 1) * n] for i in range(4))
        self.kernels.combine_rows[(n,)](
            self._arena(),
            firsts,
            counts,
            sizes,
            slots,
            rows,
            split=self._split,
            accumulator=self._accumulator,
            block=256,
        )
        self.launches += 1
        self._under_way, self._used = [], 0

    def _entered(self) -> AbstractContextManager[Any]:
        """Make the device current, as Triton launches there, and let its stream wait for the one used before."""
        self._stream = self.seam.follow(self._stream, self.device)
        return self.seam.guard(self.device)

    def _room(self, programs: int, rows: Tensor) -> int:
        """Reserve partial rows and return the first; combine those under way when there is not enough space."""
        if self._used + programs > ARENA_ROWS and self._under_way:
            self._combine(rows)
        first, self._used = self._used, self._used + programs
        return first

    def _arena(self) -> Tensor:
        if self._partials is None:
            shape = (ARENA_ROWS, self.kernels.PARTIAL_COLUMNS)
            self._partials = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self._partials


def float_below(eps: float) -> float:
    """Return the largest float32 not above `eps`: kernels take their arguments in float32."""
    rounded = np.float32(eps)
    return float(np.nextafter(rounded, np.float32(-np.inf)) if float(rounded) > eps else rounded)
