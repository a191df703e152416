"""Collectives conserve: the result of one follows from what all ranks put in."""

import math
from dataclasses import dataclass, field, replace
from typing import Final

from trainsentry.anomaly.across_ranks.collective_call import COPIED, MOST_OUTPUTS, CollectiveCall
from trainsentry.anomaly.anomaly import COMMUNICATION_MISMATCH, Anomaly
from trainsentry.collectors.series import COMMUNICATION_OUTPUT

NAME: Final = "conservation"

SCORE: Final = 100.0
"""As strong as what is not finite: the bounds below hold for any numbers."""

EPSILON: Final = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Relative rounding error of one addition, by dtype; none for whole numbers."""

SUM, AVERAGE = 1, 2


def judge(step: int, call: CollectiveCall) -> list[Anomaly]:
    """Return an anomaly for each rank whose output does not follow from what was put in.

    Sums are compared: of all ranks' inputs, and of each rank's output (of all outputs where each rank gets a part). A
    reduction may be off by the rounding of its additions, at most ε·W·√n·Σ‖x‖ (Higham, Accuracy and Stability of
    Numerical Algorithms, 4.2, with the Cauchy-Schwarz inequality); what is only moved may not. Nothing is said of calls
    whose inputs are not finite. Ranks that ask for different reductions are at different calls, whatever comes out.
    """
    if len(call.asked) > 1:
        return _asked_otherwise(step, call)
    return _not_conserved(step, call) if call.put_in.finite else []


def _not_conserved(step: int, call: CollectiveCall) -> list[Anomaly]:
    if call.op.startswith("all_reduce"):
        return _each_unequal(step, call, _reduced(call), _rounding(call))
    if call.op.startswith("reduce_scatter"):
        return _together_unequal(step, call, _reduced(call), _rounding(call))
    if call.op.startswith("all_gather"):
        return _each_unequal(step, call, call.put_in.total, call.put_in.slack)
    if call.op.startswith("all_to_all"):
        return _together_unequal(step, call, call.put_in.total, call.put_in.slack)
    return _broadcast(step, call) if call.op == "broadcast" else []


def _asked_otherwise(step: int, call: CollectiveCall) -> list[Anomaly]:
    """Name the ranks whose reduction is not that of most; with two, or two camps of one size, the second one."""
    most = max(call.asked, key=lambda a: (a.count, -a.ranks[0]))
    others = sorted((rank, asked.count) for asked in call.asked if asked is not most for rank in asked.ranks)
    found = (_anomaly(step, call, _place(call, rank), count, most.count) for rank, count in others)
    return [replace(anomaly, statistic="reduction") for anomaly in found]


def _reduced(call: CollectiveCall) -> float | None:
    if call.put_in.dtype not in EPSILON:  # a flag's sum is an "or", and small whole numbers wrap around
        return None
    if call.reduction == SUM:
        return call.put_in.total
    return call.put_in.total / call.ranks if call.reduction == AVERAGE else None


def _rounding(call: CollectiveCall) -> float:
    return (EPSILON.get(call.put_in.dtype, 0.0) * call.ranks * math.sqrt(call.longest) + COPIED) * call.norms


def _each_unequal(step: int, call: CollectiveCall, expected: float | None, bound: float) -> list[Anomaly]:
    """Find the ranks whose own output is off."""
    if expected is None:
        return []
    return [
        _anomaly(step, call, place, output.total, expected)
        for output in call.outputs
        if output.finite and abs(output.total - expected) > bound
        for place in output.places
    ]


def _together_unequal(step: int, call: CollectiveCall, expected: float | None, bound: float) -> list[Anomaly]:
    """Find that the ranks' outputs are off together; which one is, they do not say."""
    if expected is None or not call.got.finite or abs(call.got.total - expected) <= bound:
        return []
    return [_anomaly(step, call, _place(call, call.first), call.got.total, expected)]


def _broadcast(step: int, call: CollectiveCall) -> list[Anomaly]:
    """Find ranks that got what no rank had; which rank sends is not known here, and need not be."""
    off = [o for o in call.outputs if o.finite and all(abs(o.total - s.total) > s.slack for s in call.sources)]
    if len(call.sources) == MOST_OUTPUTS and len(off) == len(call.outputs):
        return []  # what was sent may be among the inputs that were not kept
    usual = call.sources[0].total
    return [_anomaly(step, call, place, output.total, usual) for output in off for place in output.places]


def _place(call: CollectiveCall, rank: int) -> tuple[int, int]:
    """Return a rank with its order, as far as it was kept."""
    return next((place for o in call.outputs for place in o.places if place[0] == rank), (rank, 0))


def _anomaly(step: int, call: CollectiveCall, place: tuple[int, int], value: float, expected: float) -> Anomaly:
    return Anomaly(
        step=step,
        micro_step=0,
        rank=place[0],
        order=place[1],
        name=call.name,
        quantity=COMMUNICATION_OUTPUT,
        statistic="sum",
        value=value,
        expected=expected,
        score=SCORE,
        detector=NAME,
        kind=COMMUNICATION_MISMATCH,
    )


UNKNOWN: Final = -1

SEEN_BEFORE: Final = 3
"""Results that must agree before a reduction counts as known: one sum may vanish."""


@dataclass
class LearnedReductions:
    """Remembers of each call, by its name, size and dtype, whether it adds up or averages.

    Only of floating-point tensors of several elements: flags and single numbers fit a sum by chance.
    """

    _votes: dict[tuple[str, int, str, int], int] = field(default_factory=dict)

    def named(self, call: CollectiveCall) -> CollectiveCall:
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
