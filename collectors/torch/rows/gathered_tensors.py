"""Keeps tensors of a device until they are read together, and notices those that were overwritten meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from trainsentry.collectors.settings import READ_TOGETHER, READ_TOGETHER_BYTES
from trainsentry.collectors.torch.rows.described_tensors import are_intact
from trainsentry.collectors.torch.rows.kernels.dense_tensors import DenseTensors, DtypeGroup, groups_if_at_once

MOST_KNOWN: Final = 1_024
"""Lists of waiting tensors that are remembered, some 2 kB each."""


@dataclass(frozen=True, slots=True)
class GatherLimits:
    """How many tensors of a device wait to be read together, and how many bytes of memory they may keep in use."""

    tensors: int = READ_TOGETHER
    nbytes: int = READ_TOGETHER_BYTES


class StorageFacts(NamedTuple):
    """What is known of a tensor that waits: its dtype, its number of elements, and the bytes of its whole storage."""

    dtype: torch.dtype
    size: int
    nbytes: int

    @classmethod
    def of(cls, x: Tensor) -> "StorageFacts":
        """Return the facts of a tensor that has a storage."""
        return cls(x.dtype, x.numel(), x.untyped_storage().nbytes())


class GatheredTensors:
    """References to tensors, with the position of each one's row in the record, and the address of each.

    `total` holds their bytes.

    A tensor that changes before it is read shows by autograd's count of in-place changes, or by its address where its
    memory was taken away or replaced. A waiting tensor keeps its whole storage in memory, so that is what is counted.
    """

    def __init__(self, limits: GatherLimits) -> None:
        self.limits = limits
        self.positions: list[int] = []
        self.total = [0]
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self.addresses: list[int] = []
        self._facts: list[StorageFacts] = []
        self._known: dict[tuple[int, int], tuple[list[StorageFacts], list[int], list[DtypeGroup] | None]] = {}
        self.drop()

    def drop(self) -> None:
        """Drop all: the next tensor is the first of a step."""
        self._taken = 0
        self._empty()

    def containers(self) -> tuple[Any, ...]:
        """Return what the compiled `share` adds tensors to: the lists, which stay the same, and the limits."""
        lists = self.positions, self._tensors, self._versions, self.addresses, self._facts, self.total
        return *lists, self.limits.tensors, self.limits.nbytes

    def _empty(self) -> None:
        for waiting in (self.positions, self._tensors, self._versions, self.addresses, self._facts):
            waiting.clear()
        self.total[0] = 0

    def add(self, position: int, x: Tensor, address: int, version: int, facts: StorageFacts) -> bool:
        """Keep a tensor with its count of changes; return whether a limit is reached, so all must be read."""
        if x.requires_grad:
            x = x.detach()  # shares the count of changes, and does not keep the graph alive
        self.positions.append(position)
        self._tensors.append(x)
        self._versions.append(version)
        self.addresses.append(address)
        self._facts.append(facts)
        self.total[0] += facts.nbytes
        return len(self.positions) >= self.limits.tensors or self.total[0] >= self.limits.nbytes

    def take(self) -> tuple[list[int], DenseTensors, list[int]]:
        """Return positions and tensors to read, and the positions of those that were overwritten; keep none."""
        positions, tensors, addresses = self.positions[:], self._tensors[:], self.addresses[:]
        versions, facts = self._versions[:], self._facts[:]
        self._empty()
        self._taken += 1
        overwritten: list[int] = []
        intact = are_intact(tensors, versions, addresses)
        if False in intact:
            overwritten = [position for position, same in zip(positions, intact, strict=True) if not same]
            positions, tensors = list(compress(positions, intact)), list(compress(tensors, intact))
            addresses, facts = list(compress(addresses, intact)), list(compress(facts, intact))
        return positions, self._dense(tensors, addresses, facts), overwritten

    def _dense(self, tensors: Sequence[Tensor], addresses: list[int], facts: list[StorageFacts]) -> DenseTensors:
        """Return tensors to read, grouped like those that had their turn in the step before, where they are alike."""
        key = (self._taken, len(facts))
        known = self._known.get(key)
        if known is None or known[0] != facts:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            sizes = [x.size for x in facts]
            known = self._known[key] = facts, sizes, groups_if_at_once([x.dtype for x in facts], sizes)
        return DenseTensors(tensors, addresses, known[1], known[2])
