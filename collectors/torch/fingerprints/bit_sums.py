"""Sums of the bits of tensors, plain and weighted by position, on the tensors' own devices."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from trainsentry.collectors.fingerprint import MODULUS
from trainsentry.collectors.series import UNKNOWN_REGION
from trainsentry.collectors.torch.device.registry import device_of

ON_HOST: Final = 1 << 18
"""Elements of a piece on the host: as 64-bit integers 2 MiB, which stay in the cache; with a quarter of them, the calls
take as long as the sums."""

ON_DEVICE: Final = 1 << 22
"""Elements of a piece on an accelerator: few launches for 32 MiB."""

WIDTH: Final = 256
"""Columns of a piece: its sums over rows and over columns replace a product for each element."""

_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Part = tuple[Tensor, tuple[int, ...], str]
"""A local tensor, the shape of the whole tensor, and the region of it that the local one is."""


def bit_sums(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Return the plain and the weighted sum of the bits of each part, modulo 2⁶⁴; waits for each device once."""
    found: list[tuple[int, int]] = [(0, 0)] * len(parts)
    by_device: dict[torch.device, list[int]] = {}
    for i, (tensor, _, _) in enumerate(parts):
        by_device.setdefault(tensor.device, []).append(i)
    with torch.no_grad():
        for device, members in by_device.items():
            totals = torch.zeros(len(members), 2, dtype=torch.int64, device=device)
            pieces = _Pieces(device, ON_HOST if device_of(parts[members[0]][0]).on_host else ON_DEVICE)
            for total, i in zip(totals, members, strict=True):
                pieces.add_up(total, *parts[i])
            for i, (plain, weighted) in zip(members, totals.tolist(), strict=True):
                found[i] = plain % MODULUS, weighted % MODULUS
    return found


def can_be_summed(tensor: Tensor, region: str) -> bool:
    """Whether a dense tensor's elements are bits at known positions of the whole tensor."""
    if tensor.layout is not torch.strided or tensor.is_nested or region == UNKNOWN_REGION:
        return False
    return tensor.element_size() in _INTEGERS or (tensor.dtype == torch.complex128 and not region)


class _Pieces:
    """Sums tensors of one device piece by piece, through one buffer of 64-bit integers."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._size = size
        self._buffer = torch.empty(self._size, dtype=torch.int64, device=device)
        self._counts = torch.arange(self._size, dtype=torch.int64, device=device)

    def add_up(self, total: Tensor, tensor: Tensor, whole: tuple[int, ...], region: str) -> None:
        """Add the sums of a tensor to `total`, shape (2,)."""
        if not tensor.numel():
            return
        if tensor.dtype == torch.complex128:
            tensor, whole = torch.view_as_real(tensor.detach().resolve_conj()), (*whole, 2)
        first = 0
        runs = _Runs(tuple(tensor.shape), whole, region)
        for flat in _contiguous(tensor, self._size):
            bits = _bits(flat)
            for start, rows, columns, position, step in runs.between(first, first + len(bits), self._size):
                block = bits[start - first : start - first + rows * columns]
                if rows > 1:
                    self._add_rows(total, block.view(rows, columns), position, step)
                else:
                    self._add_run(total, block, position)
            first += len(bits)

    def _add_run(self, total: Tensor, bits: Tensor, position: int) -> None:
        """Add the sums of elements that follow each other in the whole tensor from `position` on."""
        for start in range(0, len(bits), self._size):
            piece = bits[start : start + self._size]
            even = len(piece) // WIDTH * WIDTH
            if even:
                self._add_rows(total, piece[:even].view(-1, WIDTH), position + start, WIDTH)
            if even < len(piece):
                self._add_rows(total, piece[even:].view(1, -1), position + start + even, WIDTH)

    def _add_rows(self, total: Tensor, bits: Tensor, position: int, step: int) -> None:
        """Add the sums of rows of elements; the rows begin at `position` in the whole tensor and every `step` on."""
        rows, columns = bits.shape
        exact = self._buffer[: rows * columns].view(rows, columns)
        exact.copy_(bits)
        by_row = exact.sum(1)
        plain = by_row.sum()
        among_columns = (exact.sum(0) * self._counts[:columns]).sum()
        among_rows = (by_row * self._counts[:rows]).sum() * step
        total[0] += plain
        total[1] += (among_columns + among_rows) * 2 + plain * _signed(2 * position + 1)


class _Runs:
    """The runs of a local tensor's elements that follow each other in the whole tensor."""

    def __init__(self, shape: tuple[int, ...], whole: tuple[int, ...], region: str) -> None:
        sides = region.split(",") if region else []
        starts = [int(side.partition(":")[0]) for side in sides]
        self._leading: tuple[int, ...] = ()
        self._strides: tuple[int, ...] = ()
        self._first = starts[0] if len(sides) == 1 else 0
        self._length = math.prod(shape)
        if len(sides) > 1:
            strides = [math.prod(whole[d + 1 :]) for d in range(len(whole))]
            self._first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
            last = max((d for d, size in enumerate(whole) if shape[d] != size), default=0)
            self._leading, self._strides = shape[:last], tuple(strides[:last])
            self._length = math.prod(shape[last:])

    def between(self, start: int, stop: int, at_most: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield the local elements `start` to `stop` in blocks of equally distant runs of at most `at_most` elements.

        A block is its local start, its rows and columns, its position in the whole tensor, and the distance of rows.
        """
        while start < stop:
            run, offset = divmod(start, self._length)
            rows, step = 1, 0
            columns = min(self._length - offset, stop - start)
            if self._leading and not offset:
                left = self._leading[-1] - run % self._leading[-1]
                rows = max(1, min(left, (stop - start) // self._length, at_most // self._length))
                step = self._strides[-1]
            yield start, rows, columns, self._position(run) + offset, step
            start += rows * columns

    def _position(self, run: int) -> int:
        position = self._first
        for size, stride in zip(reversed(self._leading), reversed(self._strides), strict=True):
            run, index = divmod(run, size)
            position += index * stride
        return position


def _contiguous(tensor: Tensor, at_most: int) -> Iterator[Tensor]:
    """Yield the elements in order, flat; of a tensor that is not contiguous, some rows at a time are copied."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_contiguous() or tensor.numel() <= at_most or tensor.dim() < 2:
        yield tensor.reshape(-1)
        return
    rows = max(1, at_most // max(tensor[0].numel(), 1))
    for start in range(0, len(tensor), rows):
        yield tensor[start : start + rows].reshape(-1)


def _bits(flat: Tensor) -> Tensor:
    return flat.view(_INTEGERS[flat.element_size()])


def _signed(number: int) -> int:
    """Return a number modulo 2⁶⁴ as a signed integer of 64 bits."""
    return (number + MODULUS // 2) % MODULUS - MODULUS // 2
