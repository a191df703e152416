"""Keeps the monitor's cost within a budget: samples the costliest parts less often, and more often when it can."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Final

SAMPLES: Final = 3
"""Newest samples of a part's cost; the smallest is its cost, because noise and first calls only add time."""

TRUSTED_SAMPLES: Final = 2
"""Samples before a part's cost is known: the first one also defines series and loads code."""

STEPS_KEPT: Final = 20
"""Newest steps; their median is the usual time of a step."""

WIDEN_BELOW: Final = 0.8
"""Share of the budget that denser sampling may cost, so that the intervals do not oscillate."""

LONGEST: Final = 100_000
"""Most steps between two samples of a part, so that a late alarm remains possible."""


class Budget:
    """Chooses the power of two by which each part's interval is stretched.

    It predicts a step's cost from each part's cost per sample. The fixed cost of a step without samples is subtracted
    from the budget first: sampling less often does not reduce it.
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
        """Note a step's seconds: without the monitor, added, and by part; the parts share the rest."""
        self._bare.append(bare)
        sampled = {part: max(parts.get(part, 0.0), 1e-9) for part in plan if part in self.every}
        rest = added - sum(sampled.values())
        self._fixed.append(max(rest, 0.0))
        factor = 1 + max(rest - min(self._fixed), 0.0) / sum(sampled.values()) if sampled else 1.0
        for part, seconds in sampled.items():
            self._samples[part] += 1
            self._costs[part].append(seconds * factor)

    def measured(self) -> list[float]:
        """Return the seconds for a decision: a step without the monitor, the fixed cost, each part (0: unknown)."""
        if not self._bare:
            return [0.0] * (2 + len(self.every))
        known = [min(c) if self._samples[p] >= TRUSTED_SAMPLES else 0.0 for p, c in self._costs.items()]
        return [statistics.median(self._bare), min(self._fixed), *known]

    def decide(self, measured: list[float]) -> bool:
        """Set `stretch` from `measured`, of this rank or the maximum over all ranks; return whether it changed."""
        bare, fixed = measured[:2]
        costs = dict(zip(self.every, measured[2:], strict=False))  # ranks agree on a number for every part, on or off
        if len(costs) < len(self.every) or not all(math.isfinite(cost) for cost in costs.values()):
            return False  # agreed before the parts changed
        if bare <= 0:
            return False
        allowed = self.share * bare - fixed
        wanted = self._smallest_stretch(costs, allowed)
        if any(wanted[part] < self.stretch[part] for part in wanted) and self._predict(costs, self.stretch) <= allowed:
            wanted = self._smallest_stretch(costs, WIDEN_BELOW * self.share * bare - fixed)
            wanted = {part: min(wanted[part], self.stretch[part]) for part in wanted}
        changed, self.stretch = wanted != self.stretch, wanted
        return changed

    def _predict(self, costs: Mapping[str, float], stretch: Mapping[str, int]) -> float:
        """Return the added seconds of an average step."""
        return sum(seconds / (self.every[part] * stretch[part]) for part, seconds in costs.items())

    def _smallest_stretch(self, costs: Mapping[str, float], allowed: float) -> dict[str, int]:
        """Return the smallest stretch within `allowed` seconds a step; the costliest part is stretched first."""
        stretch = dict.fromkeys(self.every, 1)
        while self._predict(costs, stretch) > allowed:
            parts = [part for part in stretch if self.every[part] * stretch[part] * 2 <= LONGEST and costs[part] > 0]
            if not parts:
                break
            costliest = max(parts, key=lambda part: costs[part] / (self.every[part] * stretch[part]))
            stretch[costliest] *= 2
        return stretch
