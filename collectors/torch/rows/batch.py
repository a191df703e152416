"""Groups tensors into batches that one call can read, and replaces sharded tensors by this rank's parts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainsentry.collectors.torch.rows.layout_ids import LayoutIds
from trainsentry.collectors.torch.rows.local_tensor import local
from trainsentry.collectors.torch.sharding.local_shards import Fragment


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors that one call reads: this rank's parts, with the divisor of their rows and the norms for their values."""

    ids: Sequence[int]
    tensors: Sequence[Tensor]
    layouts: Sequence[int | None]
    divisor: Tensor | None
    norms: Tensor | None


def take_local_parts(
    tensors: list[Tensor], fragments: Sequence[Fragment | None], layouts: list[int | None], ids: LayoutIds
) -> None:
    """Replace sharded tensors by this rank's parts, and set the layouts that locate each part in the whole."""
    for i, (tensor, fragment) in enumerate(zip(tensors, fragments, strict=True)):
        if fragment is not None:
            tensors[i] = fragment.of(local(tensor))
            layouts[i] = ids.of_fragment(fragment, tensors[i])
        elif hasattr(tensor, "placements"):
            layouts[i] = ids.of(tensor)
            tensors[i] = local(tensor)


def batches_of(routes: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of consecutive tensors that one call reads; a tensor whose route is None is read alone.

    >>> list(batches_of([8, 9, None, None, 7]))
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    if set(map(type, routes)) == {int}:
        yield 0, len(routes)
        return
    start = 0
    for i in range(1, len(routes) + 1):
        if i == len(routes) or _reader_of(routes[i - 1]) != _reader_of(routes[i]) or routes[i] is None:
            yield start, i
            start = i


def _reader_of(route: Any) -> Any:
    """Return the reader of a route: `int`, for the host kernel, for any address."""
    return int if isinstance(route, int) else route
