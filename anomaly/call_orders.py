"""Invariant: all ranks call the same collectives in the same order."""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from trainsentry.anomaly.anomaly import COMMUNICATION_MISMATCH, Anomaly
from trainsentry.collectors.series import COMMUNICATION_INPUT

NAME: Final = "call_orders"
SCORE: Final = 100.0

ALIKE_FOR: Final = 16
"""Steps in a row in which all ranks must have called the same before a difference counts: some programs give their
ranks different work from the start."""

BEHIND_ALL: Final = 2**31 - 1
"""Its place in the step: what is known of a single call says more."""


class CallOrderRule:
    """Compares what each rank calls in a step, by one number; names those that differ from most, or all in a tie.

    It is known at every step, sampled or not, so that a rank that went its own way for once is seen.
    """

    def __init__(self) -> None:
        self._alike = 0

    def judge(self, step: int, numbers: Mapping[int, float]) -> list[Anomaly]:
        """Return an anomaly for each rank that has called something else, or in another order."""
        if len(numbers) < 2:
            return []
        camps = Counter(numbers.values())
        alike, self._alike = self._alike, self._alike + 1 if len(camps) == 1 else 0
        if len(camps) == 1 or alike < ALIKE_FOR:
            return []
        most = max(camps.values())
        tie = sum(count == most for count in camps.values()) > 1
        off = [rank for rank, number in sorted(numbers.items()) if tie or camps[number] < most]
        return [_anomaly(step, rank, camps[numbers[rank]], most) for rank in off]


def _anomaly(step: int, rank: int, own: int, most: int) -> Anomaly:
    return Anomaly(
        step=step,
        micro_step=0,
        rank=rank,
        order=BEHIND_ALL,
        name="all",
        quantity=COMMUNICATION_INPUT,
        statistic="order",
        value=float(own),
        expected=float(most),
        score=SCORE,
        detector=NAME,
        kind=COMMUNICATION_MISMATCH,
        last_clean=step - 1,
    )
