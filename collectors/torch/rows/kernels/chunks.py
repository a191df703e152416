"""Cuts tensors into the chunks that the programs of a launch read, and chunks into the tiles that fit a device."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from trainsentry.collectors.torch.device.device import KernelLimits

LANES: Final = 1_024
"""Elements that the kernels keep sums for: eight for each of 128 threads, so that the sums fit into registers."""

UNROLL: Final = 8
"""Elements that a program loads at a time for each lane, so that enough bytes are under way to keep memory busy."""

TILE: Final = LANES * UNROLL
"""Elements that a program loads at a time."""

CHUNK: Final = 2 * TILE
"""Fewest elements per program: some million elements fill a device, and their partial rows are few to combine."""

MAX_PROGRAMS: Final = 2_112
"""Programs of a launch, unless it reads more tensors: 16 for each multiprocessor of an H200, the fastest of those tried
(1,056 to 8,448) with tiles of this size."""

ARENA_ROWS: Final = 65_535
"""Partial rows (8 MB in float64) kept before they are combined, and so most programs of a launch: as an NPU allows."""

MOST_AT_ONCE: Final = 32_768
"""Tensors per launch: half the number of partial rows, so that each tensor has room."""


LANE_BYTES: Final = 96
"""Bytes of a program that reads any values, for each lane: 10 sums, 10 terms and masks of 4 bytes, and an address of
8, rounded up."""

ELEMENT_BYTES: Final = 24
"""Bytes of a program that reads finite values, for each element it loads at a time: the value as it lies in memory and
in float32, and value and square in float64."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program loads at a time: `unroll` elements for each of `lanes`, both powers of two."""

    lanes: int = LANES
    unroll: int = UNROLL


def tile_for(limits: KernelLimits) -> Tile:
    """Return the largest tile that a device has room for, at most the usual one; TILE is a multiple of it.

    There are lanes enough for the elements before the first aligned address.

    >>> tile_for(KernelLimits(alignment=16, most_programs=65_535))
    Tile(lanes=1024, unroll=8)
    >>> tile_for(KernelLimits(alignment=32, most_programs=65_535, most_tile_bytes=96 * 1024))
    Tile(lanes=1024, unroll=2)
    """
    lanes, unroll, most = LANES, UNROLL, limits.most_tile_bytes
    while most and lanes > limits.alignment and lanes * LANE_BYTES > most:
        lanes //= 2
    while most and unroll > 1 and lanes * (unroll * ELEMENT_BYTES + LANE_BYTES // 2) > most:
        unroll //= 2
    return Tile(lanes, unroll)


@dataclass(frozen=True, eq=False, slots=True)
class Cut:
    """How a launch reads a list of tensors.

    `chunk`: elements per program. `programs`, shape (n,): each tensor's number of programs. `starts`: the first of
    each. `places`, shape (total,): for each program the number of its tensor × 2³² + that of its chunk. Two cuts are
    equal if they are the same object.
    """

    chunk: int
    sizes: npt.NDArray[np.int64]
    programs: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    total: int


def chunk_of(elements: int) -> int:
    """Return the elements per program for a number of elements in all.

    >>> chunk_of(1000), chunk_of(64 * 2**20)
    (16384, 32768)
    """
    wanted = -(-elements // MAX_PROGRAMS)
    return max(CHUNK, -(-wanted // TILE) * TILE)


@lru_cache(maxsize=256)
def cut(sizes: tuple[int, ...]) -> Cut:
    """Return how a launch reads tensors of these sizes; a model's lists recur at every step.

    Raises:
        ValueError: for more than `MOST_AT_ONCE` tensors.

    """
    if len(sizes) > MOST_AT_ONCE:
        raise ValueError(f"sizes: {len(sizes)} tensors; allowed: at most {MOST_AT_ONCE}")
    elements = np.asarray(sizes, np.int64)
    chunk = chunk_of(int(elements.sum()))
    while int((-(-elements // chunk)).sum()) > ARENA_ROWS:
        chunk *= 2
    programs = -(-elements // chunk)
    starts = np.cumsum(programs) - programs
    tensors = np.repeat(np.arange(len(sizes), dtype=np.int64), programs)
    chunks = np.arange(int(programs.sum()), dtype=np.int64) - np.repeat(starts, programs)
    return Cut(chunk, elements, programs, starts, tensors << 32 | chunks, len(tensors))
