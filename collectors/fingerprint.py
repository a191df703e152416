"""Fingerprints: two numbers for a tensor's bits, which those of its disjoint parts add up to.

For the bits bᵢ of the elements as signed integers, and their positions i in the flattened *whole* tensor,
`plain` = Σ bᵢ and `weighted` = Σ bᵢ·(2i + 1), both modulo 2⁶⁴. Both are linear, so ranks that hold the parts of a
tensor need to add their numbers only, however it is sharded.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from trainsentry.collectors.run_settings import Settings
from trainsentry.collectors.series import BUFFER, PARAMETER, UNKNOWN_REGION

MODULUS: Final = 1 << 64

Key = tuple[str, str]
"""Quantity and name of a tensor."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The fingerprint of a tensor, or of a rank's part of it.

    `whole` and `region` are as in `Layout`; `persistent` is False for a buffer that checkpoints leave out.
    """

    quantity: str
    name: str
    dtype: str
    whole: tuple[int, ...]
    region: str
    plain: int
    weighted: int
    persistent: bool = True

    @property
    def key(self) -> Key:
        """Its quantity and name."""
        return self.quantity, self.name

    @property
    def sums(self) -> tuple[int, int]:
        """Both numbers."""
        return self.plain, self.weighted

    @property
    def is_state(self) -> bool:
        """Whether this is a tensor of optimizer state."""
        return self.quantity not in {PARAMETER, BUFFER}

    @property
    def numel(self) -> int:
        """The number of elements of this part."""
        if not self.region:
            return math.prod(self.whole)
        bounds = (side.partition(":") for side in self.region.split(","))
        return math.prod(int(stop) - int(start) for start, _, stop in bounds)

    def moved_to(self, region: str) -> tuple[int, int] | None:
        """Return the numbers that the same elements have in another region of flattened elements; None for boxes."""
        here, there = _first_position(self.region, self.whole), _first_position(region, self.whole)
        if here is None or there is None:
            return None
        return self.plain, (self.weighted + 2 * (there - here) * self.plain) % MODULUS


def combined(parts: Iterable[Fingerprint]) -> Fingerprint | None:
    """Return the fingerprint of the whole tensor from its parts; None when a part is missing or unknown.

    Parts of the same region are copies of each other, of which the first is taken.
    """
    distinct = {part.region: part for part in parts}
    first = next(iter(distinct.values()))
    alike = all((p.whole, p.dtype) == (first.whole, first.dtype) for p in distinct.values())
    if not alike or UNKNOWN_REGION in distinct:
        return None
    if "" in distinct:
        return distinct[""]
    if sum(part.numel for part in distinct.values()) != math.prod(first.whole):
        return None
    plain = sum(part.plain for part in distinct.values()) % MODULUS
    weighted = sum(part.weighted for part in distinct.values()) % MODULUS
    return replace(first, region="", plain=plain, weighted=weighted)


def _first_position(region: str, whole: tuple[int, ...]) -> int | None:
    """Return the position of a region's first element where its elements follow each other in the whole tensor."""
    if not region:
        return 0
    sides = region.split(",")
    start, _, _ = sides[0].partition(":")
    if len(sides) == 1:
        return int(start)  # elements of the flattened tensor
    full = all(side == f"0:{size}" for side, size in zip(sides[1:], whole[1:], strict=True))
    return int(start) * math.prod(whole[1:]) if full else None


class FingerprintReader(Protocol):
    """Reads the fingerprints of a watched model and its optimizers."""

    def read(self, *, buffers: bool = True) -> list[Fingerprint]:
        """Return those of every parameter, every tensor of optimizer state, and every buffer, as they are now."""

    def at_next_passes(self, take: Callable[[list[Fingerprint]], bool]) -> bool:
        """Give `take` the buffers' fingerprints before each forward pass, until it returns False.

        Returns whether passes will be seen; those of compiled models are not.
        """

    def settings(self, *, last_step: bool) -> Settings:
        """Return what the run is set to: with the modes and passes of the last step, or with those of this one."""

    def end_passes(self) -> None:
        """Give no more fingerprints before forward passes."""
