"""Whether a training gathers its data itself: a policy acts without gradients, and many updates use what it met."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

LEAST: Final = 8
"""Updates of a phase from which on its data have a level; fewer updates that share their data show in how much a batch
tells of the next one."""

APART: Final = 6.0
"""Difference of two phases in the mean of their batches, in standard errors, from which their data differ. (Student's t
with pooled variances; with 8 batches each it is that large once in 30,000 cases.) Batches drawn from one rollout
without putting any back vary less than independent ones."""

ALIKE: Final = 2.0
"""Factor within which the numbers of passes before the first updates and before later ones agree: a rollout has the
same length each time, and a first look at a few batches of a validation is far shorter than the validation."""

REMEMBERED: Final = 4
"""Phases whose difference from the one before is remembered; half of them must differ."""

PROVEN: Final = 3
"""Phases in a row like the one before that show a validation, and of the last four those with other data that show the
contrary then; the first rollouts of a policy may be alike too."""

FOR_GOOD: Final = 8
"""Phases in a row like the one before after which a policy has settled, or was none."""


Batches = Mapping[int, tuple[float, ...]]
"""Features of a step's inputs, by their series."""


class Phase:
    """Numbers of batches, with mean and variance of each feature of an input, by the input's series.

    Welford, "Note on a method for calculating corrected sums of squares and products", Technometrics 4, 1962.
    """

    def __init__(self) -> None:
        self.length = 0
        self._moments: dict[int, tuple[int, list[float], list[float]]] = {}

    def add(self, batches: Batches) -> None:
        """Take in the features of a step's inputs."""
        self.length += 1
        for series_id, features in batches.items():
            count, means, squares = self._moments.get(series_id, (0, [0.0] * len(features), [0.0] * len(features)))
            count += 1
            for i, value in enumerate(features):
                away = value - means[i]
                means[i] += away / count
                squares[i] += away * (value - means[i])
            self._moments[series_id] = count, means, squares

    def is_apart(self, other: "Phase") -> bool:
        """Whether the batches of an input have another mean than those of another phase."""
        for series_id, (count, means, squares) in self._moments.items():
            others, other_means, other_squares = other._moments.get(series_id, (0, means, squares))
            if min(count, others) < LEAST:
                continue
            for i, mean in enumerate(means):
                variance = (squares[i] + other_squares[i]) / (count + others - 2)
                error = math.sqrt(variance * (1 / count + 1 / others))
                if error > 0 and abs(mean - other_means[i]) >= APART * error:
                    return True
        return False


class Rollouts:
    """Follows the phases of updates that passes without gradients divide.

    A policy acts before its first update and between phases of many, and the data of each phase have a level of their
    own. A validation divides updates too, but the data after it are like those before. Where as many passes come before
    the first update, a phase counts as one of other data until its first batches say that it is not; two that differed,
    from both before them, show a policy until it settles.
    """

    def __init__(self) -> None:
        self._first = 0.0
        self._is_like_first = False
        self._phase, self._before, self._earlier = Phase(), Phase(), Phase()
        self._differed: deque[bool] = deque(maxlen=REMEMBERED)
        self._differs: bool | None = None
        self._is_policy = self._is_validation = False
        self._alike = 0  # phases in a row

    @property
    def is_gathering(self) -> bool:
        """Whether the data of the present phase may have a level of their own."""
        if not self._before.length or self._is_policy:
            return self._is_policy
        known = [*self._differed, *([] if self._differs is None else [self._differs])]
        if self._is_validation:
            return sum(known) >= PROVEN
        if not self._is_like_first:
            return sum(known) > 1 and 2 * sum(known) >= len(known)
        if self._differs is None:
            return any(known) or len(known) < PROVEN
        return self._differs or 2 * sum(known) > len(known)

    def note(self, passes: float, batches: Batches) -> None:
        """Take in the passes without gradients before an update, and its inputs."""
        if passes > 0:
            self._begin(passes)
        self._phase.add(batches)
        if self._before.length and not self._differs and self._phase.length % LEAST == 0:
            others = [phase for phase in (self._before, self._earlier) if phase.length]
            self._differs = all(self._phase.is_apart(other) for other in others)

    def _begin(self, passes: float) -> None:
        if not self._phase.length and not self._before.length:
            self._first = self._first or passes
            return
        self._is_like_first = self._first / ALIKE <= passes <= self._first * ALIKE
        if self._phase.length < LEAST:  # too short for a level: what it had is no past of the next one
            self._earlier, self._before, self._phase, self._differs = Phase(), Phase(), Phase(), None
            self._differed.clear()
            return
        if self._differs is not None:
            self._differed.append(self._differs)
            self._alike = 0 if self._differs else self._alike + 1
            self._is_validation = self._alike >= PROVEN or (self._is_validation and sum(self._differed) < PROVEN)
            self._is_policy |= self._is_like_first and sum(self._differed) > 1 and not self._is_validation
            self._is_policy &= self._alike < FOR_GOOD
        self._earlier, self._before, self._phase, self._differs = self._before, self._phase, Phase(), None

    def saved(self) -> list[float]:
        """Return what is known of the run: the passes before its first update, and what its phases have shown."""
        return [self._first, float(self._is_like_first), float(self._is_policy), float(self._is_validation)]

    def load(self, saved: Sequence[float]) -> None:
        """Restore what was known; the phases begin anew."""
        self._first = float(saved[0])
        self._is_like_first, self._is_policy, self._is_validation = (bool(known) for known in saved[1:4])
