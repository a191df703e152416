"""Which tensors of a list can be read together."""

from collections.abc import Iterator, Sequence
from typing import Any


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
