"""The tables of numbers that launches read; those that recur at every step stay on the device."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainsentry.collectors.torch.device.pinned_tables import PinnedTables, memory_of
from trainsentry.collectors.torch.rows.kernels.dense_tensors import DtypeGroup

BLOCK: Final = 1 << 17
"""Numbers of a block of device memory for tables that stay (1 MB); a list of 64 tensors takes some 100 to 2,300."""

MOST_BLOCKS: Final = 8
"""Blocks (8 MB) after which all tables that stay are forgotten: lists differ where experts take turns."""

MOST_MET: Final = 4_096
"""Lists met once that are remembered, to see which recur."""

UnderWay = tuple[int, int, DtypeGroup]
"""Tensors that a launch reads: the row of the first place of their list, their first partial row, and their group."""


@dataclass(slots=True)
class _Kept:
    """Tables that stay on a device; `sent` are the numbers in `varying`, which may differ at each step.

    `memory` is that of `varying` where it is the host's.
    """

    varying: Tensor
    memory: memoryview | None
    fixed: tuple[Tensor, ...]
    sent: list[int]


class LaunchTables:
    """Sends tables to a device: at first all that a launch reads, and once a list has recurred only what has changed.

    A table is valid until the next launch that sends one. Memory of tables that stay is never given back, so that no
    other stream's tensors come to lie where a launch still reads.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = PinnedTables(device)
        self._kept: dict[Hashable, _Kept] = {}
        self._met: set[Hashable] = set()
        self._blocks: list[Tensor] = []
        self._block = self._used = 0

    def of_list(self, group: DtypeGroup, addresses: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, ...]:
        """Return addresses, sizes and places of a list of tensors, and the rows `slots`, which may be empty."""
        numbers, n, key = [*addresses, *slots], len(addresses), (group, bool(slots))
        kept = self._kept.get(key)
        if kept is None:
            cutting = group.cutting
            parts = np.asarray(numbers, np.int64), cutting.sizes, cutting.places
            into = self._room(len(numbers) + n + cutting.total) if self._recurs(key) else None
            table = self.pinned.send(parts, into)
            varying, sizes, places = table.split([len(numbers), n, cutting.total])
            if into is None:
                return varying[:n], sizes, places, varying[n:]
            memory = memory_of(varying) if self.pinned.seam.on_host else None
            kept = self._kept[key] = _Kept(varying, memory, (sizes, places), numbers)
        elif kept.sent != numbers:
            self.pinned.renew(kept.varying, kept.memory, numbers)
            kept.sent = numbers
        return kept.varying, *kept.fixed, kept.varying[n:] if slots else kept.varying

    def of_rows(self, under_way: Sequence[UnderWay]) -> tuple[Tensor, ...]:
        """Return rows, first partial rows, numbers of programs and sizes of tensors under way, each of shape (n,)."""
        key = tuple(under_way)
        kept = self._kept.get(key)
        if kept is not None:
            return kept.fixed
        columns = _columns(under_way)
        count = sum(map(len, columns))
        into = self._room(count) if self._recurs(key) else None
        table = self.pinned.send(columns, into)
        fixed = tuple(table.split(count // 4))
        if into is not None:
            self._kept[key] = _Kept(table, None, fixed, [])
        return fixed

    def _recurs(self, key: Hashable) -> bool:
        """Whether a key was met before; it is from now on."""
        if key in self._met:
            return True
        if len(self._met) == MOST_MET:
            self._met.clear()
        self._met.add(key)
        return False

    def _room(self, count: int) -> Tensor | None:
        """Return device memory for a table that stays, None for one that is larger than a block."""
        if count > BLOCK:
            return None
        if self._used + count > BLOCK:
            self._block, self._used = self._block + 1, 0
        if self._block == MOST_BLOCKS:
            self._block = 0
            self._kept.clear()
            self._met.clear()
        if self._block == len(self._blocks):
            self._blocks.append(torch.empty(BLOCK, dtype=torch.int64, device=self.device))
        start, self._used = self._used, self._used + count
        return self._blocks[self._block][start : self._used]


def _columns(under_way: Sequence[UnderWay]) -> list[npt.NDArray[np.int64]]:
    """Return the columns of a table for `combine_rows`, one after another, each in pieces."""
    return [
        *(group.places + slot for slot, _, group in under_way),
        *(group.cutting.starts + first for _, first, group in under_way),
        *(group.cutting.programs for _, _, group in under_way),
        *(group.cutting.sizes for _, _, group in under_way),
    ]
