"""Tensors that are read together, and what a rank holds of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainsentry.collectors.torch.rows.layout_ids import LayoutIds
from trainsentry.collectors.torch.rows.local_tensor import local
from trainsentry.collectors.torch.sharding.dtensor import is_dtensor
from trainsentry.collectors.torch.sharding.local_shards import Fragment


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors that are read in one way: what this rank holds of each, and what their rows are divided by."""

    ids: Sequence[int]
    tensors: Sequence[Tensor]
    layouts: Sequence[int | None]
    divisor: Tensor | None
    norms: Tensor | None


def take_held(
    tensors: list[Tensor], fragments: Sequence[Fragment | None], layouts: list[int | None], ids: LayoutIds
) -> None:
    """Put what this rank holds in the place of sharded tensors, and note the place it has in the whole."""
    for i, (tensor, fragment) in enumerate(zip(tensors, fragments, strict=True)):
        if fragment is not None:
            tensors[i] = fragment.of(local(tensor))
            layouts[i] = ids.of_fragment(fragment, tensors[i])
        elif is_dtensor(tensor):
            layouts[i] = ids.of(tensor)
            tensors[i] = local(tensor)


def runs_of(ways: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of consecutive tensors that are read together; those of None stand alone.

    >>> list(runs_of([8, 9, None, None, 7]))
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    if set(map(type, ways)) == {int}:
        yield 0, len(ways)
        return
    start = 0
    for i in range(1, len(ways) + 1):
        if i == len(ways) or _together(ways[i - 1]) != _together(ways[i]) or ways[i] is None:
            yield start, i
            start = i


def _together(way: Any) -> Any:
    return int if isinstance(way, int) else way
