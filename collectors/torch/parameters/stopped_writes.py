"""Notes tensors that were written before each update, or every so often, and that nothing writes any more."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

WRITTEN_BEFORE: Final = 20
"""Updates that a tensor must have been written before: an average follows each, a switch is thrown once or twice."""

STOPPED: Final = 50
"""Updates without a write after which it has stopped."""

LONGER: Final = 4
"""The same as a multiple of its longest rest: some averages are taken every hundred updates."""

SWITCH: Final = 3
"""Updates that a switch has been written before. Where one is thrown as others stop, they stop by design: the observers
of quantized training are switched off by such buffers."""


@dataclass(eq=False, slots=True)
class StoppedWrites:
    """How long each of several tensors was written, and how long it has rested.

    `written` has the number of updates that each was written before, but for the present stretch, which began, like the
    present rest, at `since`. `resting` has how long each may rest that was written for long and rests now.
    """

    number: int
    updates: int = 0
    before: Sequence[int] = ()
    written: list[int] = field(default_factory=list)
    since: list[int] = field(default_factory=list)
    longest: list[int] = field(default_factory=list)
    resting: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.before = [0] * self.number
        self.written, self.since, self.longest = ([0] * self.number for _ in range(3))

    def after(self, writes: Sequence[int]) -> dict[int, int]:
        """Return, by the places of the tensors that have stopped, the number of updates since then.

        `writes` counts those of each tensor since the last update.
        """
        self.updates += 1
        if writes != self.before:
            self._note_changes(writes)
            self.before = writes
        rests = {i: self.updates - self.since[i] for i in self.resting}
        stopped = {i: rest for i, rest in rests.items() if rest >= self.resting[i]}
        for i in stopped:
            del self.resting[i]
        return stopped

    def _note_changes(self, writes: Sequence[int]) -> None:
        stopping = []
        for i, (count, before) in enumerate(zip(writes, self.before, strict=True)):
            if count and not before:
                self.longest[i] = max(self.longest[i], self.updates - self.since[i] if self.written[i] else 0)
                self.resting.pop(i, None)
            elif before and not count:
                self.written[i] += self.updates - self.since[i]
                stopping.append(i)
            else:
                continue
            self.since[i] = self.updates
        rests = {i: max(STOPPED, LONGER * self.longest[i]) for i in stopping if self.written[i] >= WRITTEN_BEFORE}
        if rests and not self._throws_switch(writes):
            self.resting |= rests

    def _throws_switch(self, writes: Sequence[int]) -> bool:
        """Whether something is written, or was at the update before, that hardly ever is."""
        return any((count or self.before[i]) and self._times(i) < SWITCH for i, count in enumerate(writes))

    def _times(self, place: int) -> int:
        """Return the number of updates that a tensor was written before, the present stretch among them."""
        return self.written[place] + (self.updates - self.since[place] if self.before[place] else 0)
