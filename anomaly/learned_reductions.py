"""What a collective does to what its ranks put in, learned from its results where a history does not say."""

from dataclasses import dataclass, field, replace
from typing import Final

from trainsentry.anomaly.conservation import AVERAGE, SUM, Call, judge

UNKNOWN: Final = -1

SEEN_BEFORE: Final = 3
"""Results that must agree before a reduction counts as known: one sum may vanish."""


@dataclass
class LearnedReductions:
    """Remembers of each call, by its name, whether it adds up or averages."""

    _votes: dict[tuple[str, int], int] = field(default_factory=dict)

    def named(self, call: Call) -> Call:
        """Return the call with its reduction: 0 as long as that is not known."""
        if call.reduction != UNKNOWN:
            return call
        known = next((r for r in (SUM, AVERAGE) if self._votes.get((call.name, r), 0) >= SEEN_BEFORE), 0)
        if not known:
            fits = [r for r in (SUM, AVERAGE) if not judge(0, replace(call, reduction=r))]
            if len(fits) == 1:
                self._votes[call.name, fits[0]] = self._votes.get((call.name, fits[0]), 0) + 1
        return replace(call, reduction=known)
