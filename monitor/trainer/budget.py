"""Keeps the monitor's cost inside a budget: the costliest quantities are sampled less often, and more often again."""

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Final

SAMPLES: Final = 3
"""Samples of a part's cost that are kept; the least counts, because noise and first calls only add."""

TRUSTED_SAMPLES: Final = 2
"""Samples from which on a part's cost is believed: the first one defines series and loads code."""

STEPS_KEPT: Final = 20
"""Steps whose usual time is the measure, as a median."""

WIDEN_BELOW: Final = 0.8
"""Share of the budget that must suffice before sampling is made denser again, so that it does not swing."""

LONGEST: Final = 100_000
"""Steps between two samples of a part, at most: an alarm of last resort stays possible."""


class Budget:
    """Chooses, for each part, by what power of two its interval is stretched.

    The cost is predicted from what each part took when it was sampled. What a step costs without any sample cannot
    be thinned out and is taken off the budget first.
    """

    def __init__(self, share: float, every: Mapping[str, int]) -> None:
        self.share = share
        self.every = dict(every)
        self.stretch = dict.fromkeys(every, 1)
        self._bare: deque[float] = deque(maxlen=STEPS_KEPT)
        self._fixed: deque[float] = deque(maxlen=STEPS_KEPT)
        self._costs: dict[str, deque[float]] = {part: deque(maxlen=SAMPLES) for part in every}
        self._samples = dict.fromkeys(every, 0)

    def note(self, plan: frozenset[str], bare: float, added: float, parts: Mapping[str, float]) -> None:
        """Take a step's seconds: its own, those added, and those of each part; what is left is shared out."""
        self._bare.append(bare)
        sampled = {part: max(parts.get(part, 0.0), 1e-9) for part in plan if part in self.every}
        rest = added - sum(sampled.values())
        self._fixed.append(max(rest, 0.0))
        factor = 1 + max(rest - min(self._fixed), 0.0) / sum(sampled.values()) if sampled else 1.0
        for part, seconds in sampled.items():
            self._samples[part] += 1
            self._costs[part].append(seconds * factor)

    def measured(self) -> list[float]:
        """Return what a decision rests on: the step's own seconds, the fixed ones, those of each part (0: unknown)."""
        if not self._bare:
            return [0.0] * (2 + len(self.every))
        known = [min(c) if self._samples[p] >= TRUSTED_SAMPLES else 0.0 for p, c in self._costs.items()]
        return [statistics.median(self._bare), min(self._fixed), *known]

    def decide(self, measured: list[float]) -> bool:
        """Set `stretch` by what was measured, here or as the greatest over all ranks; return whether it changed."""
        bare, fixed = measured[:2]
        costs = dict(zip(self.every, measured[2:], strict=True))
        if bare <= 0:
            return False
        allowed = self.share * bare - fixed
        wanted = self._least(costs, allowed)
        if any(wanted[part] < self.stretch[part] for part in wanted) and self._predict(costs, self.stretch) <= allowed:
            wanted = self._least(costs, WIDEN_BELOW * self.share * bare - fixed)
            wanted = {part: min(wanted[part], self.stretch[part]) for part in wanted}
        changed, self.stretch = wanted != self.stretch, wanted
        return changed

    def _predict(self, costs: Mapping[str, float], stretch: Mapping[str, int]) -> float:
        """Return the added seconds of an average step."""
        return sum(seconds / (self.every[part] * stretch[part]) for part, seconds in costs.items())

    def _least(self, costs: Mapping[str, float], allowed: float) -> dict[str, int]:
        """Return the least stretching that keeps to `allowed` seconds a step, the costliest first."""
        stretch = dict.fromkeys(self.every, 1)
        while self._predict(costs, stretch) > allowed:
            able = [part for part in stretch if self.every[part] * stretch[part] * 2 <= LONGEST and costs[part] > 0]
            if not able:
                break
            costliest = max(able, key=lambda part: costs[part] / (self.every[part] * stretch[part]))
            stretch[costliest] *= 2
        return stretch
