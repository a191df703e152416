"""Collectives conserve sums: the output of a call follows from the inputs of all ranks."""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from trainsentry.anomaly.across_ranks.collective_call import MOST_OUTPUTS, CollectiveCall
from trainsentry.anomaly.anomaly import COMMUNICATION_MISMATCH, Anomaly, Detector
from trainsentry.collectors.series import COMMUNICATION_OUTPUT

SCORE: Final = 100.0
"""Deviations: above every distance from normal that is common, as the bounds below hold for any numbers."""

EPSILON: Final = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Relative rounding error of one addition, by dtype; none for whole numbers."""

SUM, AVERAGE = 1, 2

UNKNOWN: Final = -1
"""The reduction of a call that a record does not name."""

SEEN_BEFORE: Final = 3
"""Results that must agree before a reduction counts as known: one sum may be zero by chance."""


@dataclass
class ConservationRule(Detector):
    """Judges the calls of a run; reductions that records do not name are learned from their results.

    Learned by a call's name, size and dtype, and only from floating-point tensors of several elements: flags and single
    numbers fit a sum by chance.
    """

    name: ClassVar[str] = "conservation"
    speaks_for: ClassVar[str | None] = COMMUNICATION_MISMATCH
    compares_ranks: ClassVar[bool] = True

    _votes: dict[tuple[str, int, str, int], int] = field(default_factory=dict)

    def judge(self, step: int, call: CollectiveCall) -> list[Anomaly]:
        """Return an anomaly for each rank whose output does not follow from the inputs."""
        return judge(step, self._with_reduction(call))

    def _with_reduction(self, call: CollectiveCall) -> CollectiveCall:
        """Return the call with its reduction: 0 as long as that is not known."""
        if call.reduction != UNKNOWN:
            return call
        size = call.sizes[0]
        if len(call.sizes) != 1 or size[0] < 2 or size[1] not in EPSILON:
            return call.asking_for(0)
        votes = {r: self._votes.get((call.name, size[0], size[1], r), 0) for r in (SUM, AVERAGE)}
        known = next((r for r, count in votes.items() if count >= SEEN_BEFORE and not votes[3 - r]), 0)
        if not known:
            fits = [r for r in (SUM, AVERAGE) if not judge(0, call.asking_for(r))]
            if len(fits) == 1:
                self._votes[call.name, size[0], size[1], fits[0]] = votes[fits[0]] + 1
        return call.asking_for(known)

    @staticmethod
    def sentence(anomaly: Anomaly, subject: str) -> str:
        """Return the sums, or how many ranks ask for the rank's reduction."""
        if anomaly.statistic == "reduction":
            with_it = f"{anomaly.value:.0f} {'rank uses' if anomaly.value == 1 else 'ranks use'} its reduction"
            tie = ", as many as the other" if anomaly.value == anomaly.expected else ""
            return (
                f"rank {anomaly.rank} calls {anomaly.name} with another reduction than other ranks at step "
                f"{anomaly.step} ({with_it}{tie}): it is at another call of the program"
            )
        return (
            f"{subject} does not follow from the inputs of the ranks at step {anomaly.step}: its elements sum to "
            f"{anomaly.value:.6g} on rank {anomaly.rank}, expected {anomaly.expected:.6g}"
        )


def judge(step: int, call: CollectiveCall) -> list[Anomaly]:
    """Return an anomaly for each rank whose output does not follow from the inputs.

    Sums are compared: of all ranks' inputs, and of each rank's output (of all outputs where each rank gets a part). A
    reduction may be off by the rounding of its additions, at most ε·W·√n·Σ‖x‖ (Higham, Accuracy and Stability of
    Numerical Algorithms, 4.2, with the Cauchy-Schwarz inequality); a copy may not. Calls with non-finite inputs are not
    judged. Ranks that ask for different reductions are at different calls, whatever their outputs are.
    """
    if len(call.asked) > 1:
        return _other_reductions(step, call)
    return _not_conserved(step, call) if call.put_in.finite else []


def _not_conserved(step: int, call: CollectiveCall) -> list[Anomaly]:
    if call.op.startswith("all_reduce"):
        return _each_unequal(step, call, _reduced(call), _rounding(call))
    if call.op.startswith("reduce_scatter"):
        return _sum_unequal(step, call, _reduced(call), _rounding(call))
    if call.op.startswith("all_gather"):
        return _each_unequal(step, call, call.put_in.total, call.put_in.slack)
    if call.op.startswith("all_to_all"):
        return _sum_unequal(step, call, call.put_in.total, call.put_in.slack)
    return _broadcast(step, call) if call.op == "broadcast" else []


def _other_reductions(step: int, call: CollectiveCall) -> list[Anomaly]:
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
    added_up = EPSILON.get(call.put_in.dtype, 0.0) * call.ranks * math.sqrt(call.longest)
    return (added_up + call.put_in.copied) * call.norms


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


def _sum_unequal(step: int, call: CollectiveCall, expected: float | None, bound: float) -> list[Anomaly]:
    """Find that the sum of the ranks' outputs is off; it does not show which of them is."""
    if expected is None or not call.got.finite or abs(call.got.total - expected) <= bound:
        return []
    return [_anomaly(step, call, _place(call, call.first), call.got.total, expected)]


def _broadcast(step: int, call: CollectiveCall) -> list[Anomaly]:
    """Find ranks whose output is no rank's input; which rank sends is not known here, and need not be."""
    off = [o for o in call.outputs if o.finite and all(abs(o.total - s.total) > s.slack for s in call.sources)]
    if len(call.sources) == MOST_OUTPUTS and len(off) == len(call.outputs):
        return []  # the sender's input may be one of those that were not kept
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
        detector=ConservationRule.name,
        kind=COMMUNICATION_MISMATCH,
    )
