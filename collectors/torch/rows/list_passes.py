"""Plans how a list of tensors is read by plain operations: in passes of whole blocks, combined by a fixed tree."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

BLOCK: Final = 1_024
"""Elements that are reduced to one partial row: a tensor wastes at most as many on padding, and sums of so few
neighbours lose little in float32."""

PASS_BLOCKS: Final = 4_096
"""Most blocks of a pass: 4 Mi elements, 16 MB in float32. The operations of a pass hold some six times that (with the
masks), so a pass takes about 100 MB, and twice that in float64; smaller passes would be bound by their launches."""

FAN: Final = 64
"""Most partial rows that one step of the tree combines: two steps combine a full pass."""

Table = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements `start` to `stop` of a part of a list."""

    part: int
    start: int
    stop: int

    @property
    def blocks(self) -> int:
        """The blocks that hold the elements."""
        return -(-(self.stop - self.start) // BLOCK)

    @property
    def padding(self) -> int:
        """The elements by which the last block is filled."""
        return self.blocks * BLOCK - (self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Plan:
    """The passes over a list, and for each of their partial rows the tensor it belongs to, −1 for none."""

    passes: tuple[tuple[Piece, ...], ...]
    owners: Table


@lru_cache(maxsize=64)
def plan(sizes: tuple[int, ...], kinds: tuple[Hashable, ...], owners: tuple[int, ...] | None = None) -> Plan:
    """Return the passes over parts of these sizes; each pass reads parts of one kind, and ends with a block of padding.

    `owners` are the tensors of the parts, where a tensor has several; else each part is a tensor.

    >>> [[(piece.part, piece.blocks) for piece in one] for one in plan((5000, 3, 0, 7), ("a", "b", "a", "a")).passes]
    [[(0, 5), (3, 1)], [(1, 1)]]
    """
    places: dict[Hashable, list[int]] = {}
    for i, kind in enumerate(kinds):
        places.setdefault(kind, []).append(i)
    passes = [one for parts in places.values() for one in _passes_of(parts, sizes)] or [()]
    tensors = range(len(sizes)) if owners is None else owners
    found = [owner for one in passes for owner in (*(tensors[piece.part] for piece in one), -1)]
    return Plan(tuple(passes), np.asarray(found, np.int64))


def _passes_of(parts: Iterable[int], sizes: tuple[int, ...]) -> list[tuple[Piece, ...]]:
    """Return the passes over parts of one kind: large ones alone in full passes, the rests of all together."""
    most = BLOCK * PASS_BLOCKS
    passes: list[tuple[Piece, ...]] = []
    waiting: list[Piece] = []
    used = 0
    for part in parts:
        full = sizes[part] // most * most
        passes += [(Piece(part, start, start + most),) for start in range(0, full, most)]
        rest = Piece(part, full, sizes[part])
        if used + rest.blocks > PASS_BLOCKS:
            passes.append(tuple(waiting))
            waiting, used = [], 0
        if rest.blocks:
            waiting.append(rest)
            used += rest.blocks
    return [*passes, tuple(waiting)] if waiting else passes


def tree(owners: Table, count: int) -> list[Table]:
    """Return the steps that combine rows to one row for each of `count` owners and a last one for none.

    A step is a table of shape (groups, width): the rows that each group combines. The last of `owners`, and so the last
    row before and after each step, is −1: a neutral row, which fills the groups and stands for owners without rows. The
    order depends on `owners` alone, so equal lists are summed alike.

    >>> [step.tolist() for step in tree(np.array([0, 0, 1, -1]), 2)]
    [[[0, 1], [2, 3], [3, 3]]]
    >>> tree(np.array([0, 1, -1]), 2)
    []
    """
    neutral = len(owners) - 1
    kept = np.flatnonzero(owners >= 0)
    rows = kept[np.argsort(owners[kept], kind="stable")]
    counts = np.bincount(owners[kept], minlength=count)
    steps: list[Table] = []
    if np.array_equal(rows, np.arange(neutral)) and (counts == 1).all():
        return steps
    while not steps or counts.max(initial=0) > 1:
        index, counts = _step(rows, counts, neutral)
        steps.append(index)
        neutral = len(index) - 1
        rows = np.arange(neutral)
    return steps


def _step(rows: Table, counts: Table, neutral: int) -> tuple[Table, Table]:
    """Return a step's table, and the number of rows that it leaves to each owner."""
    width = min(FAN, max(int(counts.max(initial=0)), 1))
    groups = np.maximum(-(-counts // width), 1)
    owner = np.repeat(np.arange(len(counts)), groups)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(groups) - groups, groups)
    ends = np.cumsum(counts)
    place = (ends - counts)[owner] + number * width
    places = place[:, None] + np.arange(width)
    with_neutral = np.append(rows, neutral)
    index = with_neutral[np.where(places < ends[owner][:, None], places, len(rows))]
    return np.vstack((index, np.full((1, width), neutral))), groups
