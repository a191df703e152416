"""How severe an incident is: certain, unusual, or a spike that passes by itself."""

from collections.abc import Sequence
from typing import Final

from trainsentry.anomaly.anomaly import ALL_AT_ONCE, CERTAIN, SPIKE, UNUSED, Anomaly
from trainsentry.anomaly.incident import CRITICAL, NOTE, WARNING, Incident
from trainsentry.anomaly.incidents.ranking import Ranked
from trainsentry.collectors.series import PARAMETER

PASSING_STEPS: Final = 2
"""Steps with an alarm after which trouble has not passed by itself: a spike of the loss shows in its own step, and in
the gradients of the next."""

SPIKING: Final = frozenset({"loss", "grad_norm"})
"""Scalars whose spike concerns the training as a whole."""


def severity_of(ranked: Sequence[Ranked], worst: Anomaly, alarms: int, known: Incident | None) -> str:
    """Return the severity of an incident; `alarms` counts its steps with an alarm, `known` is its last state.

    In training whose gradients are not clipped, the loss or all gradients spike now and then, and nothing is wrong
    (Chowdhery et al., "PaLM", 2022, section 5.1). Such an incident is a note until it lasts, or until something else
    than a spike joins it as an alarm; so is a parameter that the training does not use. What was more than a note stays
    so.
    """
    if worst.kind in CERTAIN:
        return CRITICAL
    if known is not None and known.severity != NOTE:
        return known.severity
    first = ranked[0].anomaly
    whole = first.detector == ALL_AT_ONCE or (first.name == first.quantity and first.name in SPIKING)
    alarming = [first, *(r.anomaly for r in ranked if r.anomaly.alarm)]
    if all(a.statistic == UNUSED for a in alarming):  # many models have a part that a training does not use
        return NOTE
    passes = all(a.kind == SPIKE and a.quantity != PARAMETER for a in alarming)
    return NOTE if whole and passes and alarms <= PASSING_STEPS else WARNING
