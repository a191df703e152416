"""Counts a tensor's values in bins of a fixed shape, so that histograms of any tensors, steps and ranks can be added.

A bin is a range of magnitudes and a sign. From 2⁻²⁴ to 2¹⁶, where values of a model lie, a power of two has four bins;
from 2⁻¹⁰⁴ and up to 2³¹ it has one. Smaller magnitudes, zero among them, share the bin in the middle, and the last bin
on either side is open. NaN and Inf are in no bin: `nans` and `infs` count them. The number of a bin follows from the
upper bits of a float32, so no logarithm is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

HISTOGRAM: Final = "histogram"
"""The name under `statistics` that asks for histograms."""

SLOTS: Final = 512
"""Counters of a tensor: 511 bins from the most negative to the most positive, and one that nobody reads."""

MIDDLE: Final = 255
"""The slot of the bin around zero; slot `MIDDLE` ± m is the bin of magnitude number m and that sign."""

MOST_ELEMENTS: Final = 2**32 - 1
"""Elements beyond which a tensor has no histogram, as a counter has 32 bits."""

_COARSE_FROM: Final = -104
_FINE_FROM: Final = -24
_FINE_TO: Final = 16
_TO: Final = 31

Counts = npt.NDArray[np.uint32]

_START_BYTES: Final = 4
_ENTRY_BYTES: Final = 4 + 2


def _lower_edges() -> npt.NDArray[np.float64]:
    coarse = [2.0**e for e in range(_COARSE_FROM, _FINE_FROM)]
    fine = [2.0**e * (1 + m / 4) for e in range(_FINE_FROM, _FINE_TO) for m in range(4)]
    return np.asarray([0.0, *coarse, *fine, *(2.0**e for e in range(_FINE_TO, _TO))])


MAGNITUDES: Final = _lower_edges()
"""The lower edge of each magnitude number, shape (256,)."""

_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)


def counts_of(values: npt.NDArray[Any], scale: float = 1.0) -> Counts:
    """Return the counters of an array times `scale`, shape (SLOTS,): the definition that the kernels follow.

    >>> counts = counts_of(np.array([1.0, 1.0, -3.0, 0.0, np.nan]))
    >>> [(slot - MIDDLE, int(counts[slot])) for slot in np.flatnonzero(counts[: SLOTS - 1]).tolist()]
    [(-183, 1), (0, 1), (177, 2)]
    """
    with np.errstate(over="ignore", invalid="ignore"):
        wide = np.asarray(values, np.float64).reshape(-1) * scale
    wide = wide[np.isfinite(wide)].clip(-_FLOAT32_MAX, _FLOAT32_MAX).astype(np.float32)
    number = np.searchsorted(MAGNITUDES, np.abs(wide), side="right") - 1
    slots = MIDDLE + np.where(np.signbit(wide), -number, number)
    return np.bincount(slots, minlength=SLOTS).astype(np.uint32)


def edges_of(number: int) -> tuple[float, float]:
    """Return the lower and upper edge of the bin with a signed number; the outermost end at float32's largest value.

    >>> edges_of(177), edges_of(-177), edges_of(0) == (-(2.0**-104), 2.0**-104)
    ((1.0, 1.25), (-1.25, -1.0), True)
    """
    if number == 0:
        return -float(MAGNITUDES[1]), float(MAGNITUDES[1])
    at = abs(number)
    low = float(MAGNITUDES[at])
    high = float(MAGNITUDES[at + 1]) if at < MIDDLE else _FLOAT32_MAX
    return (low, high) if number > 0 else (-high, -low)


def as_text(numbers: Sequence[int], counts: Sequence[int]) -> str:
    """Return bins as text, with a space between them.

    >>> as_text([-183, 0, 177], [1, 1, 2])
    '-183:1 0:1 177:2'
    """
    return " ".join([f"{number}:{count}" for number, count in zip(numbers, counts, strict=True)])


def parse(text: str) -> tuple[list[int], list[int]]:
    """Return the numbers and counts of bins that stand in a file.

    Raises:
        ValueError: when the text is not one of `as_text`.

    >>> parse("-183:1 0:1 177:2")
    ([-183, 0, 177], [1, 1, 2])
    """
    pairs = [token.partition(":") for token in text.split(" ", SLOTS)] if text else []
    numbers, counts = [int(number) for number, _, _ in pairs], [int(count) for _, _, count in pairs]
    if any(a >= b for a, b in pairwise(numbers)) or any(abs(n) > MIDDLE for n in numbers):
        raise ValueError(f"histogram: bins {numbers[:3]}…; allowed: rising numbers from -{MIDDLE} to {MIDDLE}")
    if any(not 0 < count < 2**63 for count in counts):
        raise ValueError("histogram: a count that is not positive")
    return numbers, counts


@dataclass(frozen=True, slots=True)
class Histograms:
    """The histograms of a record's rows, without their empty bins.

    Row i has the entries `starts[i]` to `starts[i + 1]` of `numbers` (int16, signed numbers of bins, rising) and
    `counts` (uint32); a row without a histogram has none. `starts` is int32 of shape (rows + 1,).
    """

    starts: npt.NDArray[np.int32]
    numbers: npt.NDArray[np.int16]
    counts: Counts

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.starts.nbytes + self.numbers.nbytes + self.counts.nbytes

    def bytes_before(self) -> npt.NDArray[np.int64]:
        """Return the encoded bytes of the rows before each row and before the end, shape (rows + 1,)."""
        return self.starts.astype(np.int64) * _ENTRY_BYTES + _START_BYTES * np.arange(1, len(self.starts) + 1)

    def encode(self) -> list[bytes]:
        """Return the histograms as consecutive buffers."""
        return [self.starts.tobytes(), self.counts.tobytes(), self.numbers.tobytes()]

    @classmethod
    def decode(cls, data: "bytes | memoryview", rows: int) -> "Histograms":
        """Rebuild the histograms of a number of rows from the bytes of `encode`; the arrays are views of `data`.

        Raises:
            ValueError: when the bytes are not those of so many histograms.

        """
        at = _START_BYTES * (rows + 1)
        starts = np.frombuffer(data, np.int32, rows + 1)
        n = int(starts[-1])
        if starts[0] != 0 or (np.diff(starts) < 0).any() or len(data) != at + n * _ENTRY_BYTES:
            raise ValueError(f"histograms of {rows} rows and {n} bins have {len(data)} bytes")
        counts = np.frombuffer(data, np.uint32, n, at)
        numbers = np.frombuffer(data, np.int16, n, at + 4 * n)
        if n and int(np.abs(numbers.astype(np.int32)).max()) > MIDDLE:
            raise ValueError(f"a histogram with a bin beyond {MIDDLE}")
        return cls(starts, numbers, counts)

    def row(self, i: int) -> tuple[npt.NDArray[np.int16], Counts]:
        """Return the numbers and the counts of a row's bins."""
        here = slice(int(self.starts[i]), int(self.starts[i + 1]))
        return self.numbers[here], self.counts[here]

    def select(self, rows: "npt.NDArray[np.bool_] | npt.NDArray[np.intp] | slice") -> "Histograms":
        """Return the histograms of some rows."""
        lengths = np.diff(self.starts)
        places = np.arange(len(self))[rows]
        starts = np.concatenate(([0], np.cumsum(lengths[places])))
        take = np.repeat(self.starts[:-1][places] - starts[:-1], lengths[places]) + np.arange(starts[-1])
        return Histograms(starts.astype(np.int32), self.numbers[take], self.counts[take])

    def texts(self) -> list[str]:
        """Return each row's histogram as text."""
        numbers, counts, starts = self.numbers.tolist(), self.counts.tolist(), self.starts.tolist()
        return [as_text(numbers[a:b], counts[a:b]) for a, b in pairwise(starts)]


def without_empty_bins(counts: Counts) -> Histograms:
    """Return the histograms of counters of shape (rows, SLOTS)."""
    rows, slots = np.nonzero(counts[:, : SLOTS - 1])
    starts = np.searchsorted(rows, np.arange(len(counts) + 1)).astype(np.int32)
    return Histograms(starts, (slots - MIDDLE).astype(np.int16), counts[rows, slots])


def joined(parts: "Sequence[Histograms | None]") -> Histograms | None:
    """Put the histograms of several records behind each other, None where a record has none."""
    found = [part for part in parts if part is not None]
    if not found or len(found) < len(parts):
        return None
    ends = np.cumsum([0, *(len(part.numbers) for part in found)])
    starts = [part.starts[:-1] + end for part, end in zip(found, ends, strict=False)]
    return Histograms(
        np.concatenate([*starts, ends[-1:]]).astype(np.int32),
        np.concatenate([part.numbers for part in found]),
        np.concatenate([part.counts for part in found]),
    )


def added(histograms: Histograms, starts: npt.NDArray[np.intp]) -> Histograms:
    """Add the histograms of parts in consecutive rows; group i begins at row `starts[i]`.

    A group with a part without a histogram has none.
    """
    if not len(starts):
        return without_empty_bins(np.zeros((0, SLOTS), np.uint32))
    lengths = np.diff(histograms.starts)
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(histograms))))
    rows = np.repeat(group, lengths)
    keys = rows * SLOTS + histograms.numbers + MIDDLE
    found, place = np.unique(keys, return_inverse=True)
    counts = np.bincount(place, histograms.counts, len(found)).astype(np.uint64)
    whole = np.minimum.reduceat(lengths, starts) > 0
    kept = whole[found // SLOTS]
    found, counts = found[kept], np.minimum(counts[kept], MOST_ELEMENTS)
    first = np.searchsorted(found // SLOTS, np.arange(len(starts) + 1)).astype(np.int32)
    return Histograms(first, (found % SLOTS - MIDDLE).astype(np.int16), counts.astype(np.uint32))
