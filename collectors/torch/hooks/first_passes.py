"""Counts backward passes until the first step is recorded, so that a loop whose steps go unseen is told."""

from collections.abc import Callable, Sequence
from typing import Final

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch.hooks.accumulation import AccumulationHooks
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter

MOST_PARAMETERS: Final = 100
"""Parameters that are hooked to count backward passes where no gradient is recorded."""

TOLD_EVERY: Final = 20
"""Backward passes without a step after which the listener is told, and again after as many more."""


class FirstPasses:
    """Calls `told(passes)` at each `TOLD_EVERY` backward passes, until `end`."""

    def __init__(self, guard: Guard, told: Callable[[int], None]) -> None:
        self._ended = False
        self._told = told
        self._told_at = 0
        self._hooks = AccumulationHooks(guard, None, self.note)

    def count(self, parameters: Sequence[NamedParameter]) -> None:
        """Hook some parameters, where no gradient is recorded whose hooks would count the passes."""
        if not self._ended:
            self._hooks.attach(parameters[:MOST_PARAMETERS])

    def note(self, passes: int) -> None:
        """Take the number of gradients that a parameter has got; the one with the most counts the passes."""
        if not self._ended and passes == self._told_at + TOLD_EVERY:
            self._told_at = passes
            self._told(passes)

    def end(self) -> None:
        """Note that a step has ended."""
        if not self._ended:
            self._ended = True
            self._hooks.detach()
