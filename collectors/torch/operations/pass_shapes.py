"""Which shapes the inputs of a model have had, and since when a value has been the same through many of them."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

OTHERS: Final = 8
"""Passes with other shapes than the pass before through which a value must have been the same, so that it does not
depend on them: batches are padded to their longest sample."""

LASTS_WHERE_SHAPES_VARY: Final = 6
"""Passes that a change must last at least, where shapes vary: which kernel torch takes may depend on a length, as on
whether it is a multiple of eight, and two such lengths in a row are no change of the program."""

Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class PassShapes:
    """The shapes of the last pass, the least and the greatest size of each axis, and the passes with other shapes.

    A program may take another way with shapes that are beyond all before: nothing is known of those.
    """

    last: Shapes = ()
    ranges: tuple[tuple[tuple[int, int], ...], ...] = ()
    others: deque[int] = field(default_factory=lambda: deque(maxlen=OTHERS))
    are_same: bool = False
    are_within: bool = False

    def take(self, shapes: Shapes, number: int) -> None:
        """Take in the shapes of the pass `number`."""
        self.are_same = shapes == self.last
        if self.are_same:
            return
        if [len(shape) for shape in shapes] != [len(shape) for shape in self.last]:
            self.ranges = tuple(tuple((size, size) for size in shape) for shape in shapes)
            self.others.clear()
        pairs = [pair for of, shape in zip(self.ranges, shapes, strict=True) for pair in zip(of, shape, strict=True)]
        self.are_within = all(least <= size <= most for (least, most), size in pairs)
        self.ranges = tuple(
            tuple((min(least, size), max(most, size)) for (least, most), size in zip(of, shape, strict=True))
            for of, shape in zip(self.ranges, shapes, strict=True)
        )
        self.last = shapes
        self.others.append(number)

    @property
    def vary(self) -> bool:
        """Whether many passes had other shapes than the pass before."""
        return len(self.others) == OTHERS

    def least_lasting(self, passes: int) -> int:
        """Return how many passes a change must last that must last so many where all have one shape."""
        return max(passes, LASTS_WHERE_SHAPES_VARY) if self.vary else passes

    def fit(self, since: Any) -> bool:
        """Whether a value that was the same since the pass `since` must be so in this pass, for all that is known."""
        return self.are_same or (self.are_within and self.vary and since < self.others[0])
