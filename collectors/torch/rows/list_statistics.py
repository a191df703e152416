"""Computes the statistics of a list of tensors by a few plain operations of torch, where no kernel of ours runs.

The tensors are packed into blocks of equal size. Reductions along the blocks give partial rows, which a tree of fixed
shape combines. The number of operations depends on the number of elements, not of tensors. Nothing waits for the
device, branches on a value, or is added atomically, so equal tensors have equal rows.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from trainsentry.collectors.torch.device.registry import device_of
from trainsentry.collectors.torch.rows.list_passes import BLOCK, PASS_BLOCKS, Piece, Table, plan, tree

MOST_TABLES: Final = 512
"""Passes and lists whose tables stay on a device, some 40 kB each: large tensors share one, and lists recur."""

PACKED: Final = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
"""Dtypes that are packed as they are; any other is widened before, by an operation for each tensor."""

Tables = list[Tensor]


class ListStatistics:
    """Computes the rows of lists of tensors of one device; `dtype` is that of the rows."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seam = device_of(device)
        self.dtype = self.seam.row_dtype
        self._tables: OrderedDict[Hashable, Tables] = OrderedDict()
        self._constants: dict[Hashable, Tensor] = {}
        self._stream: Any = None
        self._stream_number = self.seam.stream_numbers(device)

    def follow(self) -> None:
        """Let the current stream wait for the one on which rows were made before."""
        self._stream = self.seam.follow(self._stream, self.device)

    def rows_of(self, tensors: Sequence[Tensor], eps: float = 0.0) -> Tensor:
        """Return the statistics of tensors in a plain format, shape (n, COLUMNS), as `statistics.reference` does.

        It takes the memory of one pass (see `PASS_BLOCKS`), however large the tensors are.
        """
        with torch.no_grad(), self.seam.guard(self.device):
            self.follow()
            parts, owners = _parts_of(tensors)
            planned = plan(tuple([x.numel() for x in parts]), tuple([x.dtype for x in parts]), owners)
            partial = [self._read(pieces, parts, eps) for pieces in planned.passes]
            rows = partial[0] if len(partial) == 1 else torch.cat(partial)
            sizes = tuple([x.numel() for x in tensors])
            key = planned.owners.tobytes(), sizes
            size, *steps = self._sent(key, lambda: [np.asarray(sizes, np.int64), *tree(planned.owners, len(sizes))])
            return _finished(_combined(rows, steps)[:-1], size)

    def _read(self, pieces: tuple[Piece, ...], parts: Sequence[Tensor], eps: float) -> Tensor:
        """Return the partial rows of the pieces of one pass and a neutral one, shape (pieces + 1, 7)."""
        blocks = tuple([(piece.blocks, piece.padding) for piece in pieces])
        valid, *steps = self._sent(blocks, lambda: _tables_of(blocks))
        wide = self._packed(pieces, parts).to(self.dtype)
        lanes = self._made("lanes", lambda: torch.arange(BLOCK, device=self.device))
        return _combined(_blocks(wide, valid, lanes, eps), steps)

    def _packed(self, pieces: tuple[Piece, ...], parts: Sequence[Tensor]) -> Tensor:
        """Return the pieces in one matrix, each from a new row on, and a last row of padding, shape (blocks, BLOCK)."""
        flat: list[Tensor] = []
        dtype = self.dtype
        for piece in pieces:
            values = parts[piece.part].reshape(-1)
            if values.numel() > piece.stop - piece.start:
                values = values[piece.start : piece.stop]
            if values.dtype not in PACKED:
                values = values.to(self.seam.wide_dtype(values.dtype))
                values = (values.abs() if values.is_complex() else values).to(self.dtype)
            dtype = values.dtype
            flat.append(values)
            if piece.padding:
                flat.append(self._filler(dtype)[: piece.padding])
        flat.append(self._filler(dtype))
        return torch.cat(flat).view(-1, BLOCK)

    def _filler(self, dtype: torch.dtype) -> Tensor:
        """Return a block of padding."""
        return self._made(dtype, lambda: torch.zeros(BLOCK, dtype=dtype, device=self.device))

    def _made(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return a constant of the device; each stream has its own, as it is written and read there."""
        key = key, self._stream_number()
        if key not in self._constants:
            self._constants[key] = make()
        return self._constants[key]

    def _sent(self, key: Hashable, make: Callable[[], list[Table]]) -> Tables:
        """Return tables on the device, by one copy where they are not there; each stream has its own."""
        key = key, self._stream_number()
        known = self._tables.get(key)
        if known is not None:
            self._tables.move_to_end(key)
            return known
        made = make()
        together = self.seam.copy_to_device(np.concatenate([table.reshape(-1) for table in made]), self.device)
        split = together.split([table.size for table in made])
        self._tables[key] = [part.view(table.shape) for part, table in zip(split, made, strict=True)]
        if len(self._tables) > MOST_TABLES:
            self._tables.popitem(last=False)
        return self._tables[key]


def _parts_of(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], tuple[int, ...] | None]:
    """Return tensors whose elements are neighbours, or few enough to be copied, and the place of each one's whole.

    The order of elements does not matter, so a permuted tensor is read as it lies in memory.
    """
    if all(x.is_contiguous() for x in tensors):
        return tensors, None
    parts = [(i, part) for i, x in enumerate(tensors) for part in _neighbours(x)]
    return [part for _, part in parts], tuple([i for i, _ in parts])


def _neighbours(x: Tensor) -> list[Tensor]:
    if x.is_contiguous():
        return [x]
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    permuted = x.permute(order)
    if permuted.is_contiguous() or x.numel() <= BLOCK * PASS_BLOCKS:
        return [permuted]
    axis = max(range(x.dim()), key=x.size)
    return [part for half in x.tensor_split(2, axis) for part in _neighbours(half)]


def _tables_of(blocks: tuple[tuple[int, int], ...]) -> list[Table]:
    """Return the elements of each block of a pass, of which the last is all padding, and the steps of its tree."""
    counts = [count for count, _ in blocks]
    valid = np.full(sum(counts) + 1, BLOCK, np.int64)
    valid[np.cumsum(counts, dtype=np.int64) - 1] -= np.asarray([pad for _, pad in blocks], np.int64)
    valid[-1] = 0
    return [valid, *tree(np.append(np.repeat(np.arange(len(counts)), counts), -1), len(counts))]


# A partial row: −min, max, sum and squares scaled by the largest magnitude, and the numbers of NaN, Inf and zeros.
# No operation makes an Inf or NaN of finite values: a device that saturates would set its overflow flag.


def _blocks(wide: Tensor, valid: Tensor, lanes: Tensor, eps: float) -> Tensor:
    """Return the partial rows of blocks, shape (blocks, 7).

    `valid`, shape (blocks,), counts the elements that are not padding, which is zero; `lanes` numbers those of a block.
    """
    most = torch.finfo(wide.dtype).max
    magnitude = wide.abs()
    finite = magnitude <= most  # false for NaN
    zeros = (magnitude <= eps).sum(1) + valid - BLOCK
    del magnitude  # the largest tensors live no longer than they must
    finite.logical_and_(lanes < valid[:, None])
    bad = finite.logical_not()
    ends = torch.stack((-wide.masked_fill(bad, most).amin(1), wide.masked_fill(bad, -most).amax(1)), 1)
    nans = torch.isnan(wide).sum(1)
    scaled = wide.masked_fill(bad, 0.0).div_(_scale(ends)[:, None])
    total = scaled.sum(1)
    sums = torch.stack((total, scaled.square_().sum(1)), 1)
    counts = torch.stack((nans, valid - finite.sum(1) - nans, zeros), 1)
    return torch.cat((ends, sums, counts.to(wide.dtype)), 1)


def _scale(ends: Tensor) -> Tensor:
    """Return the largest magnitude of −min and max, shape (n, 2), and at least the smallest normal number.

    Smaller ones would be zero on a device that flushes them, and nothing can be divided by zero.
    """
    return ends.amax(-1).clamp(min=torch.finfo(ends.dtype).tiny)


def _combined(rows: Tensor, steps: Sequence[Tensor]) -> Tensor:
    """Return the partial rows of groups, by the steps of `tree`, shape (groups + 1, 7)."""
    for step in steps:
        grouped = rows.index_select(0, step.view(-1)).view(*step.shape, -1)
        ends = grouped[..., :2].amax(1)
        shares = _scale(grouped[..., :2]) / _scale(ends)[:, None]
        sums = (grouped[..., 2:4] * torch.stack((shares, shares.square()), -1)).sum(1)
        rows = torch.cat((ends, sums, grouped[..., 4:].sum(1)), 1)
    return rows


def _finished(rows: Tensor, size: Tensor) -> Tensor:
    """Return rows as they are recorded, shape (n, COLUMNS), of the partial rows of tensors of the given sizes."""
    scale = _scale(rows[:, :2])
    finite = size - rows[:, 4] - rows[:, 5]
    mean = (rows[:, 2] / finite.clamp(min=1)).clamp(-1, 1) * scale  # rounded, it may lie beyond
    usual = torch.stack((-rows[:, 0], rows[:, 1], mean), 1).masked_fill((finite <= 0)[:, None], math.nan)
    zeros = (rows[:, 6] / size.clamp(min=1)).masked_fill(size <= 0, math.nan)
    rest = torch.stack((_norm(rows[:, 3].sqrt(), scale), rows[:, 4], rows[:, 5], zeros), 1)
    return torch.cat((usual, rest, torch.full_like(mean, math.nan)[:, None]), 1)


def _norm(root: Tensor, scale: Tensor) -> Tensor:
    """Return root × scale, and Inf where it is too large, as the norm of a mask can be: without an overflow."""
    too_large = root * (scale * 2.0**-64) > torch.finfo(root.dtype).max * (1 - 2**-20) * 2.0**-64
    return (root.masked_fill(too_large, 1.0) * scale).masked_fill(too_large, math.inf)
