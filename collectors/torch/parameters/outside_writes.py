"""Notes weights that something other than their optimizer's update has written to, without reading their values."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Final

from trainsentry.collectors.series import LASTING_WRITES

LEARNED: Final = 20
"""Updates in which it is learned how often a weight is written between two: clipping of weights, penalties that move
them, and tables with a largest norm write at each step."""


@dataclass(eq=False, slots=True)
class LastingWrites:
    """Follows tensors that are written more often than ever, by their places.

    `since` has the most writes of each until then, and for how many updates it has had more; `due` has the places where
    that has just lasted long enough.
    """

    since: dict[int, tuple[int, int]] = field(default_factory=dict)
    due: list[int] = field(default_factory=list)

    def note(self, written: Sequence[int], most: Sequence[int], more: Sequence[int]) -> None:
        """Take in the writes before an update, and which are `more` than the `most` of each tensor so far.

        One that is written less again is left.
        """
        self.due = []
        if not (self.since or more):
            return
        lasts = {i: (limit, times + 1) for i, (limit, times) in self.since.items() if written[i] > limit}
        self.since = {i: (most[i], 1) for i in more} | lasts
        self.due = [i for i, (_, times) in self.since.items() if times == LASTING_WRITES]
        for place in self.due:
            del self.since[place]

    def end(self) -> None:
        """Take in an update before which nothing was written."""
        self.since.clear()
        self.due = []


@dataclass(eq=False, slots=True)
class OutsideWrites:
    """How often each weight of an optimizer was written between two of its updates, by torch's counts of changes.

    A weight is told of where it is written more often than ever before, once; `lasting` says where that goes on.
    DeepSpeed's ZeRO lends an optimizer other tensors for each update, so nothing is told of them.
    """

    counts: list[Any] | None = None
    most: list[int] = field(default_factory=list)
    updates: int = 0
    lasting: LastingWrites = field(default_factory=LastingWrites)

    def more_often(self, now: Sequence[Any] | None) -> list[int]:
        """Return the places of the weights that were written more often than ever, before an update.

        `now` has the counts of changes of all weights: plain numbers, or pairs with the identity of the counted tensor.
        """
        before, self.counts = self.counts, None
        self.updates += 1
        if before is None or now is None or len(before) != len(now) or before == now:
            self.lasting.end()
            return []
        written = _written(before, now)
        most = self.most or [0] * len(written)
        more = list(compress(range(len(written)), map(operator.gt, written, most)))
        self.lasting.note(written, most, more if self.updates > LEARNED else [])
        if not more:
            return []
        self.most = list(map(max, written, most))
        return more if self.updates > LEARNED else []


def _written(before: Sequence[Any], now: Sequence[Any]) -> list[int]:
    try:
        return list(map(operator.sub, now, before))  # the usual case, as this runs at every step of some loops
    except TypeError:
        return [_difference(b, n) for b, n in zip(before, now, strict=True)]


def _difference(before: Any, now: Any) -> int:
    """Return how often a tensor was written; 0 where another one took its place, or writes are not counted."""
    if isinstance(before, tuple):
        return _difference(before[1], now[1]) if before[0] == now[0] else 0
    return 0 if before is None or now is None else int(now - before)
