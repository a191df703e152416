"""Remembers incidents that have ended, so that trouble which comes back in the same place is the same incident."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from trainsentry.anomaly.anomaly import CERTAIN, Anomaly
from trainsentry.anomaly.incident import Incident
from trainsentry.anomaly.incidents.ranking import Ranked
from trainsentry.collectors.series import PARAMETER, TENSOR_QUANTITIES, UPDATE

MemberKey = tuple[int, str, str, int, bool]
"""Rank, name, quantity and micro-step of an incident's member, and whether its detector settles ties between ranks."""

KEPT: Final = 8
"""Ended incidents that can open again: trouble in more places than that at once is told as new."""

MAX_MEMBERS: Final = 500
"""Members kept of an ended incident, a bound on memory (8 × 500 × 0.5 kB)."""

RETURN_STEPS: Final = 1_000
"""Steps after its end within which the same place counts as the same trouble."""

AFTERMATH_STEPS: Final = 100
"""Steps within which weights and optimizer state carry on what bad gradients did: a second moment with β₂ = 0.99
forgets in so many, and one with 0.999 has lost a tenth."""


@dataclass(frozen=True, slots=True)
class ClosedIncident:
    """An incident that has ended, with what it takes to open it again."""

    id: int
    first: tuple[int, str, str]
    names: frozenset[tuple[int, str]]
    certain: bool
    first_seen: int
    last_seen: int
    members: Mapping[MemberKey, Anomaly]
    worst: Anomaly

    def lasts_over(self, steps: Iterable[int], quiet_steps: int) -> bool:
        """Whether the incident lasted at all of some steps: it ends with `quiet_steps` steps without an alarm."""
        return all(self.first_seen - quiet_steps <= step <= self.last_seen + quiet_steps for step in steps)


class ClosedIncidents:
    """The newest incidents that have ended."""

    def __init__(self) -> None:
        self._closed: deque[ClosedIncident] = deque(maxlen=KEPT)

    def add(self, incident: Incident, members: Mapping[MemberKey, Anomaly], worst: Anomaly) -> None:
        """Remember an incident that ends; its earlier end is forgotten."""
        kept = [closed for closed in self._closed if closed.id != incident.id]
        self._closed = deque(kept, maxlen=KEPT)
        self._closed.append(
            ClosedIncident(
                incident.id,
                (incident.rank, incident.name, incident.quantity),
                frozenset((a.rank, a.name) for a in members.values()),
                worst.kind in CERTAIN,
                incident.first_seen,
                incident.last_seen,
                dict(list(members.items())[:MAX_MEMBERS]),
                worst,
            )
        )

    def returning(self, ranked: Sequence[Ranked], step: int, quiet_steps: int) -> ClosedIncident | None:
        """Return the ended incident to which alarms at a step belong, the newest of several; None for new trouble.

        They belong to it when their first suspect is its first suspect, when they are its aftermath (weights and
        optimizer state of its series alone), or when all began while it lasted: some are told only after several
        samples. A certain fault in a place that was only unusual before is new trouble.
        """
        if not ranked:
            return None
        first, steps = ranked[0].anomaly, [r.anomaly.step for r in ranked]
        certain = any(r.anomaly.kind in CERTAIN for r in ranked)
        for closed in reversed(self._closed):
            since = step - closed.last_seen
            if not 0 <= since <= RETURN_STEPS or (certain and not closed.certain):
                continue
            if closed.lasts_over(steps, quiet_steps) or closed.first == (first.rank, first.name, first.quantity):
                return closed
            if since <= AFTERMATH_STEPS and all(_is_carried(r.anomaly, closed) for r in ranked):
                return closed
        return None


def _is_carried(anomaly: Anomaly, closed: ClosedIncident) -> bool:
    """Whether an anomaly is in state of a series of an incident."""
    is_scalar = anomaly.name == anomaly.quantity
    carries = anomaly.quantity in {PARAMETER, UPDATE} or (anomaly.quantity not in TENSOR_QUANTITIES and not is_scalar)
    return carries and (anomaly.rank, anomaly.name) in closed.names
