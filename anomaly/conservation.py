"""Collectives conserve: what comes out of one follows from what all ranks put in."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from trainsentry.anomaly.anomaly import COMMUNICATION_MISMATCH, Anomaly
from trainsentry.collectors.series import COMMUNICATION_OUTPUT

NAME: Final = "conservation"

SCORE: Final = 100.0
"""As strong as what is not finite: the bounds below hold for any numbers."""

EPSILON: Final = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Relative rounding error of one addition, by dtype; none for whole numbers."""

COPIED: Final = 1e-9
"""Relative difference of two sums of the same numbers, added up in float64 in another order."""

SUM, AVERAGE = 1, 2


@dataclass(frozen=True)
class Sums:
    """What is known of the tensors on one side of a call: the sum of all elements, their norm, how many there are."""

    total: float
    norm: float
    numel: int
    finite: bool
    dtype: str

    @classmethod
    def of(cls, parts: Sequence["Sums"]) -> "Sums":
        """Return the sums of several tensors together."""
        norm = math.sqrt(sum(p.norm**2 for p in parts))
        finite, dtype = all(p.finite for p in parts), parts[0].dtype if parts else ""
        return cls(sum(p.total for p in parts), norm, sum(p.numel for p in parts), finite, dtype)


@dataclass(frozen=True)
class Call:
    """One collective as all its ranks saw it; `reduction` is 1 for a sum, 2 for an average, else 0.

    `reductions` says what each rank asked for, where that is known.
    """

    name: str
    op: str
    reduction: int
    inputs: Mapping[int, Sums]
    outputs: Mapping[int, Sums]
    order: Mapping[int, int]
    reductions: Mapping[int, int] = field(default_factory=dict)


def judge(step: int, call: Call) -> list[Anomaly]:
    """Return an anomaly for each rank whose output does not follow from what was put in.

    Sums are compared: of all ranks' inputs, and of each rank's output (of all outputs where each rank gets a part). A
    reduction may be off by the rounding of its additions, at most ε·W·√n·Σ‖x‖ (Higham, Accuracy and Stability of
    Numerical Algorithms, 4.2, with the Cauchy-Schwarz inequality); what is only moved may not. Nothing is said of calls
    whose inputs are not finite. Ranks that ask for different reductions are at different calls, whatever comes out.
    """
    if len(set(call.reductions.values())) > 1:
        return _asked_otherwise(step, call)
    if not call.inputs or not call.outputs or not all(s.finite for s in call.inputs.values()):
        return []
    return _not_conserved(step, call)


def _not_conserved(step: int, call: Call) -> list[Anomaly]:
    put_in = Sums.of(list(call.inputs.values()))
    size = len(call.inputs)
    if call.op.startswith("all_reduce"):
        expected = _reduced(call, put_in, size)
        return _unequal(step, call, expected, _rounding(call, put_in, size), each=True)
    if call.op.startswith("reduce_scatter"):
        expected = _reduced(call, put_in, size)
        return _unequal(step, call, expected, _rounding(call, put_in, size), each=False)
    if call.op.startswith("all_gather"):
        return _unequal(step, call, put_in.total, _moved(put_in), each=True)
    if call.op.startswith("all_to_all"):
        return _unequal(step, call, put_in.total, _moved(put_in), each=False)
    return _broadcast(step, call) if call.op == "broadcast" else []


def _asked_otherwise(step: int, call: Call) -> list[Anomaly]:
    """Name the ranks whose reduction is not that of most; with two, or two camps of one size, the second one."""
    asked = Counter(reduction for _, reduction in sorted(call.reductions.items()))
    most = asked.most_common(1)[0][0]
    return [
        replace(_anomaly(step, call, rank, asked[reduction], asked[most]), statistic="reduction")
        for rank, reduction in sorted(call.reductions.items())
        if reduction != most
    ]


def _reduced(call: Call, put_in: Sums, size: int) -> float | None:
    if put_in.dtype not in EPSILON:  # a flag's sum is an "or", and small whole numbers wrap around
        return None
    if call.reduction == SUM:
        return put_in.total
    return put_in.total / size if call.reduction == AVERAGE else None


def _rounding(call: Call, put_in: Sums, size: int) -> float:
    norms = sum(s.norm for s in call.inputs.values())
    longest = max(s.numel for s in call.inputs.values())
    return (EPSILON.get(put_in.dtype, 0.0) * size * math.sqrt(longest) + COPIED) * norms


def _moved(put_in: Sums) -> float:
    return COPIED * put_in.norm * math.sqrt(max(put_in.numel, 1))


def _unequal(step: int, call: Call, expected: float | None, bound: float, *, each: bool) -> list[Anomaly]:
    if expected is None:
        return []
    if each:
        off = {r: s for r, s in call.outputs.items() if s.finite and abs(s.total - expected) > bound}
        return [_anomaly(step, call, rank, s.total, expected) for rank, s in off.items()]
    total = Sums.of(list(call.outputs.values()))
    if not total.finite or abs(total.total - expected) <= bound:
        return []
    return [_anomaly(step, call, min(call.outputs), total.total, expected)]


def _broadcast(step: int, call: Call) -> list[Anomaly]:
    """Find ranks that got what no rank had; which rank sends is not known here, and need not be."""
    sources = list(call.inputs.values())
    found = []
    for rank, got in call.outputs.items():
        if got.finite and all(abs(got.total - s.total) > _moved(s) for s in sources):
            found.append(_anomaly(step, call, rank, got.total, sources[0].total))
    return found


def _anomaly(step: int, call: Call, rank: int, value: float, expected: float) -> Anomaly:
    return Anomaly(
        step=step,
        micro_step=0,
        rank=rank,
        order=call.order.get(rank, 0),
        name=call.name,
        quantity=COMMUNICATION_OUTPUT,
        statistic="sum",
        value=value,
        expected=expected,
        score=SCORE,
        detector=NAME,
        kind=COMMUNICATION_MISMATCH,
    )
