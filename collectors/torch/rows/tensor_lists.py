"""Lists of tensors that are read together: how they are grouped, and what is known of them from the last step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from trainsentry.collectors.torch.rows.described_tensors import compiled_read, describe
from trainsentry.collectors.torch.rows.kernels.dense_tensors import DtypeGroup, groups_if_at_once

Value = TypeVar("Value")


@dataclass(slots=True)
class Batch:
    """Tensors whose rows begin at position `start`, and what the rows are divided by."""

    start: int
    tensors: Sequence[Tensor]
    divisor: Tensor | None
    norms: Tensor | None

    @property
    def scale(self) -> float:
        """What the values of host tensors are multiplied by in histograms."""
        return inverse_of(self.divisor)

    def of(self, indices: Sequence[int]) -> tuple[Sequence[Tensor], Sequence[int], Tensor | None]:
        """Return some of the tensors, the positions of their rows, and their norms."""
        if len(indices) == len(self.tensors):
            return self.tensors, range(self.start, self.start + len(self.tensors)), self.norms
        norms = None if self.norms is None else torch.stack([self.norms[i] for i in indices])
        return [self.tensors[i] for i in indices], [self.start + i for i in indices], norms


def inverse_of(divisor: Tensor | None) -> float:
    """Return 1 ÷ a divisor in host memory, 1 without one; the reciprocal of 0 is Inf, as in the rows."""
    number = 1.0 if divisor is None else float(divisor.item())
    return 1.0 / number if number else math.inf


def groups_of(routes: Sequence[Any]) -> dict[Any, list[int]]:
    """Return the places of tensors that are read together: those in host memory, and those of each device.

    `routes` has an address, a device's rows, or None for a tensor that is read alone.

    >>> groups_of([8, 9, None, None, 7])
    {<class 'int'>: [0, 1, 4], 2: [2], 3: [3]}
    """
    groups: dict[Any, list[int]] = {}
    for i, route in enumerate(routes):
        key = i if route is None else int if isinstance(route, int) else route
        groups.setdefault(key, []).append(i)
    return groups


@dataclass(frozen=True, slots=True)
class KnownList:
    """What follows from the shapes and dtypes of a list of tensors that kernels read in place.

    `sizes` and `groups` are of those that the device's kernels read, at `places` of the list; the others, at
    `host_places`, lie in host memory, as AdamW's `step` does.
    """

    description: Any
    device: torch.device
    layouts: list[int]
    places: list[int]
    host_places: list[int]
    sizes: list[int]
    groups: list[DtypeGroup] | None

    def on_device(self, values: Sequence[Value]) -> Sequence[Value]:
        """Return the values, one for each tensor of the list, of those that the device's kernels read."""
        return [values[i] for i in self.places] if self.host_places else values


@dataclass(frozen=True, slots=True)
class KnownHostList:
    """What follows from the shapes and dtypes of a list of tensors in host memory; `largest` has the most elements."""

    description: Any
    layouts: list[int]
    largest: int


def layouts_of_list(plain: list[int], given: "Sequence[int | None] | None") -> list[int]:
    """Return the layouts of a list's tensors: those that are given, and those of plain tensors for the others."""
    return plain if given is None else [of if n is None else n for n, of in zip(given, plain, strict=True)]


MOST_KNOWN: Final = 100_000
"""Tensors in known lists, some 20 MB; then all are forgotten, as lists differ where experts take turns."""


class KnownLists:
    """Remembers lists by the series of their rows; `layout_id` numbers the layout of a plain tensor."""

    def __init__(self, layout_id: Callable[[tuple[int, ...], torch.dtype], int]) -> None:
        self._layout_id = layout_id
        self._lists: dict[tuple[int, int], KnownList | KnownHostList] = {}
        self._tensors = 0

    def of(self, series_ids: Sequence[int]) -> KnownList | KnownHostList | None:
        """Return what is known of the list that some series had before, None for the first time."""
        return self._lists.get((series_ids[0], len(series_ids))) if series_ids else None

    def learn(self, series_ids: Sequence[int], tensors: Sequence[Tensor], host_places: list[int]) -> KnownList:
        """Remember a list of plain tensors that can be read in place, instead of the one before.

        Those at `host_places` lie in host memory, and all others on one device.
        """
        places = [*range(len(tensors))] if not host_places else sorted({*range(len(tensors))} - {*host_places})
        layouts = [self._layout_id(x.shape, x.dtype) for x in tensors]
        there = [tensors[i] for i in places]
        sizes = [x.numel() for x in there]
        groups = groups_if_at_once([x.dtype for x in there], sizes)
        known = KnownList(describe(tensors), there[0].device, layouts, places, host_places, sizes, groups)
        self._remember(series_ids, known)
        return known

    def learn_on_host(self, series_ids: Sequence[int], tensors: Sequence[Tensor]) -> KnownHostList:
        """Remember a list of plain tensors in host memory that the kernel reads in place, instead of the one before."""
        layouts, sizes = [self._layout_id(x.shape, x.dtype) for x in tensors], [x.numel() for x in tensors]
        is_read = compiled_read is not None and 0 not in sizes  # a rank may hold nothing of a sharded one
        description = describe(tensors) if is_read else None
        known = KnownHostList(description, layouts, max(sizes, default=0))
        if description is not None:
            self._remember(series_ids, known)
        return known

    def _remember(self, series_ids: Sequence[int], known: KnownList | KnownHostList) -> None:
        if not series_ids:
            return
        key = series_ids[0], len(series_ids)
        self._tensors += len(series_ids) if key not in self._lists else 0
        if self._tensors > MOST_KNOWN:
            self._lists.clear()
            self._tensors = len(series_ids)
        self._lists[key] = known
