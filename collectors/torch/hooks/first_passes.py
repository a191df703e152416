"""Counts backward passes until the first step is recorded, so that a loop whose steps go unseen is told."""

from collections.abc import Callable
from typing import Final

TOLD_EVERY: Final = 20
"""Backward passes without a step after which the listener is told, and again after as many more."""


class FirstPasses:
    """Calls `told(passes)` at each `TOLD_EVERY` backward passes, until `end`."""

    def __init__(self, told: Callable[[int], None]) -> None:
        self.ended = False
        self._told = told
        self._told_at = 0

    def note(self, passes: int) -> None:
        """Take the number of gradients that a parameter has got; the one with the most counts the passes."""
        if not self.ended and passes == self._told_at + TOLD_EVERY:
            self._told_at = passes
            self._told(passes)

    def end(self) -> None:
        """Note that a step has ended."""
        self.ended = True
