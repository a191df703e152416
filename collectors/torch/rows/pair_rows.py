"""Computes how pairs of tensors point, on the host and on devices; `collectors/alignment.py` defines it."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainsentry.collectors.alignment import row_of_pair
from trainsentry.collectors.statistics import COLUMNS, INFS, MEAN, NANS, NORM, VALUE
from trainsentry.collectors.torch.device.pinned_tables import PinnedTables
from trainsentry.collectors.torch.device.registry import device_of
from trainsentry.collectors.torch.rows.host_statistics import KINDS, address_of, align_at
from trainsentry.collectors.torch.rows.kernels.chunks import MOST_AT_ONCE, cut
from trainsentry.collectors.torch.rows.kernels.dense_tensors import FLOATS, address_in_place
from trainsentry.collectors.torch.rows.kernels.fused_rows import kernels_for
from trainsentry.collectors.torch.rows.list_statistics import ListStatistics

logger = logging.getLogger("trainsentry")

PLAIN_BYTES: Final = 64 * 2**20
"""Bytes of one side that plain operations compare at a time: they hold four copies of it."""

LANES: Final = 1_024
"""Elements that a program compares at a time, four for each of 256 threads."""

Pairs = Sequence[tuple[Tensor, Tensor]]


def rows_of_host_pairs(pairs: Pairs) -> npt.NDArray[np.float64]:
    """Return the rows of pairs in host memory, shape (n, COLUMNS)."""
    rows = np.zeros((len(pairs), COLUMNS))
    addresses = [(address_of(a), address_of(b)) for a, b in pairs]
    dense = [bool(KINDS) and bool(a and b) for a, b in addresses]
    places = [i for i, is_dense in enumerate(dense) if is_dense]
    if places:
        found = np.zeros((len(places), COLUMNS))
        align_at([addresses[i] for i in places], [pairs[i] for i in places], found)
        rows[places] = found
    for i in sorted(set(range(len(pairs))) - set(places)):
        a, b = pairs[i]
        rows[i] = row_of_pair(a.double().resolve_neg().numpy(), b.double().resolve_neg().numpy())
    return rows


def _lie_alike(a: Tensor, b: Tensor) -> bool:
    """Whether the elements of two dense tensors lie in memory in the same order."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    strides = zip(a.shape, a.stride(), b.stride(), strict=False)
    return a.shape == b.shape and all(size == 1 or of_a == of_b for size, of_a, of_b in strides)


class DevicePairs:
    """Compares pairs of tensors on one device: by a kernel where one runs, else by plain operations.

    `launches` counts those of kernels.
    """

    def __init__(self, device: torch.device, lists: ListStatistics) -> None:
        self.device = device
        self.seam = device_of(device)
        self.launches = 0
        self._lists = lists
        self._tables = PinnedTables(device)
        has_doubles = self.seam.row_dtype is torch.float64
        self._runs_kernels = has_doubles and kernels_for(device) is not None

    def rows_of(self, pairs: Pairs) -> Tensor:
        """Return the rows of pairs, shape (n, COLUMNS), on the device; nothing waits for it."""
        rows = torch.empty(len(pairs), COLUMNS, dtype=self.seam.row_dtype, device=self.device)
        with torch.no_grad(), self.seam.guard(self.device):
            for places in _places_of(pairs):
                some = [pairs[i] for i in places]
                found = self._by_kernels(some) if self._runs_kernels else None
                found = self._plainly(some) if found is None else found
                if len(places) == len(pairs):
                    return found
                rows[self.seam.copy_to_device(np.asarray(places, np.int64), self.device)] = found
        return rows

    def _by_kernels(self, pairs: Pairs) -> Tensor | None:
        """Return the rows of pairs of the same two dtypes by two launches, None where the kernels do not read them."""
        addresses = [(address_in_place(FLOATS, a), address_in_place(FLOATS, b)) for a, b in pairs]
        are_alike = all(a and b for a, b in addresses) and all(_lie_alike(a, b) for a, b in pairs)
        if len(pairs) > MOST_AT_ONCE or not are_alike:
            return None
        try:
            return self._launch(pairs, np.asarray(addresses, np.int64))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the compiler or the driver raises
            logger.warning("trainsentry: no kernel compares pairs on %s; slower operations do: %s", self.device, error)
            self._runs_kernels = False
            return None

    def _launch(self, pairs: Pairs, addresses: npt.NDArray[np.int64]) -> Tensor:
        from trainsentry.collectors.torch.rows.kernels import triton_pairs

        n, cutting = len(pairs), cut(tuple([a.numel() for a, _ in pairs]))
        lines = (addresses[:, 0], addresses[:, 1], cutting.sizes, cutting.starts, cutting.programs, cutting.places)
        table = self._tables.send([np.ascontiguousarray(line) for line in lines])
        firsts, seconds, sizes, starts, programs = (table[i * n : (i + 1) * n] for i in range(5))
        partials = torch.empty(max(cutting.total, 1), triton_pairs.SUMS, dtype=torch.float64, device=self.device)
        rows = torch.empty(n, COLUMNS, dtype=torch.float64, device=self.device)
        kernels: Any = triton_pairs
        if cutting.total:
            kernels.partial_pairs[(cutting.total,)](
                *pairs[0], firsts, seconds, sizes, table[5 * n :], partials, cutting.chunk, lanes=LANES
            )
        kernels.combine_pairs[(n,)](partials, starts, programs, sizes, rows, block=256)
        self.launches += 1 + bool(cutting.total)
        return rows

    def _plainly(self, pairs: Pairs) -> Tensor:
        """Return the rows of pairs by plain operations, whose number does not depend on that of the pairs."""
        return torch.cat([self._plain_rows(*zip(*some, strict=True)) for some in _within(PLAIN_BYTES, pairs)])

    def _plain_rows(self, firsts: Sequence[Tensor], seconds: Sequence[Tensor]) -> Tensor:
        wide = self.seam.wide_dtype(torch.promote_types(firsts[0].dtype, seconds[0].dtype))
        a, b = ([self.seam.in_plain_format(x).to(wide).contiguous() for x in side] for side in (firsts, seconds))
        of = self._lists.rows_of
        products = of(torch._foreach_mul(a, b))
        signs = list(torch._foreach_sign(a))
        torch._foreach_mul_(signs, torch._foreach_sign(b))
        agree = of(signs)
        sizes = self.seam.copy_to_device(np.asarray([x.numel() for x in a], np.int64), self.device).to(products.dtype)
        share = (agree[:, MEAN] * (sizes - agree[:, NANS]) / sizes + 1) / 2
        dot = (products[:, MEAN] * sizes).masked_fill(products[:, NANS] + products[:, INFS] > 0, torch.nan)
        cosine = (dot / of(a)[:, NORM] / of(b)[:, NORM]).clamp(-1, 1)
        rows = torch.zeros_like(products)
        rows[:, :NORM] = share[:, None]
        rows[:, NORM] = share.nan_to_num(0.0)
        rows[:, INFS + 1] = (share == 0).to(share.dtype).masked_fill(share.isnan(), torch.nan)
        rows[:, VALUE] = cosine.masked_fill(cosine.isinf(), torch.nan)
        return rows


def _places_of(pairs: Pairs) -> list[list[int]]:
    """Return the places of the pairs of the same two dtypes."""
    places: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for i, (a, b) in enumerate(pairs):
        places.setdefault((a.dtype, b.dtype), []).append(i)
    return list(places.values())


def _within(most: int, pairs: Pairs) -> Iterator[Pairs]:
    """Yield consecutive pairs whose first sides hold at most so many bytes in float32, but at least one pair."""
    some: list[tuple[Tensor, Tensor]] = []
    size = 0
    for pair in pairs:
        if some and size + 4 * pair[0].numel() > most:
            yield some
            some, size = [], 0
        some.append(pair)
        size += 4 * pair[0].numel()
    yield some
