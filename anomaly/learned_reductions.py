"""What a collective does to what its ranks put in, learned from its results where a history does not say."""

from dataclasses import dataclass, field
from typing import Final

from trainsentry.anomaly.collective_call import Call
from trainsentry.anomaly.conservation import AVERAGE, EPSILON, SUM, judge

UNKNOWN: Final = -1

SEEN_BEFORE: Final = 3
"""Results that must agree before a reduction counts as known: one sum may vanish."""


@dataclass
class LearnedReductions:
    """Remembers of each call, by its name, size and dtype, whether it adds up or averages.

    Only of floating-point tensors of several elements: flags and single numbers fit a sum by chance.
    """

    _votes: dict[tuple[str, int, str, int], int] = field(default_factory=dict)

    def named(self, call: Call) -> Call:
        """Return the call with its reduction: 0 as long as that is not known."""
        if call.reduction != UNKNOWN:
            return call
        kind = call.sizes[0]
        if len(call.sizes) != 1 or kind[0] < 2 or kind[1] not in EPSILON:
            return call.asking_for(0)
        votes = {r: self._votes.get((call.name, kind[0], kind[1], r), 0) for r in (SUM, AVERAGE)}
        known = next((r for r, count in votes.items() if count >= SEEN_BEFORE and not votes[3 - r]), 0)
        if not known:
            fits = [r for r in (SUM, AVERAGE) if not judge(0, call.asking_for(r))]
            if len(fits) == 1:
                self._votes[call.name, kind[0], kind[1], fits[0]] = votes[fits[0]] + 1
        return call.asking_for(known)
