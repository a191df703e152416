"""Groups anomalies into incidents and keeps each incident's ranking up to date."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from trainsentry.anomaly.anomaly import CERTAIN, DEAD, MODE_CHANGE, OPTION_CHANGE, SHIFT, SPIKE, Anomaly
from trainsentry.anomaly.incident import Incident, Suspect
from trainsentry.anomaly.incidents.closed_incidents import ClosedIncidents, MemberKey
from trainsentry.anomaly.incidents.ranking import rank, strength
from trainsentry.anomaly.incidents.sentence import evidence, returned, summary
from trainsentry.anomaly.incidents.severity import severity_of
from trainsentry.anomaly.rules.registry import detector
from trainsentry.collectors.series import PARAMETER, SeriesTable

QUIET_STEPS: Final = 20
"""Steps without an alarm that end an incident: after a shorter lull it is the same trouble. Where a quantity is sampled
more seldom, `quiet_steps` is larger."""

MAX_MEMBERS: Final = 5000
"""Series kept of one incident, a bound on memory; weights are always kept, as they may be the cause."""

SUSPECTS: Final = 8
"""Suspects named in an incident, as many as msprobe's ranking shows."""

LOOK_BACK_STEPS: Final = 5
"""Steps before an incident whose suspicions belong to it: a fault is often odd before it is an alarm."""

SET: Final = frozenset({OPTION_CHANGE, MODE_CHANGE})
"""Kinds of alarms without signs before them: somebody sets an option or a mode; the training does not compute it."""

MAX_SUSPICIONS: Final = 500
"""Suspicions kept for a later incident, a bound on memory."""

MAX_AGAIN: Final = 16
"""Newest returns of an incident that are listed with their steps; all are counted."""

MAX_ALARMS: Final = 8
"""Steps with an alarm that are told apart: whether trouble lasts shows after three."""


class IncidentLog:
    """The incidents of a run. At most one is open at a time: while it lasts, every anomaly joins it.

    Trouble that comes back in the same place opens its incident again instead of another.
    """

    def __init__(self, table: SeriesTable, first_id: int = 1, quiet_steps: int = QUIET_STEPS) -> None:
        self.table = table
        self.quiet_steps = quiet_steps
        self.incidents: dict[int, Incident] = {}
        self._members: dict[MemberKey, Anomaly] = {}
        self._worst: Anomaly | None = None
        self._suspicions: deque[Anomaly] = deque(maxlen=MAX_SUSPICIONS)
        self._last_alarm = -1
        self._alarms: set[int] = set()
        self._current: int | None = None
        self._since = -1
        self._sampled_at = -1
        self._first_id = first_id
        self._closed = ClosedIncidents()

    @property
    def is_open(self) -> bool:
        """Whether an incident is open."""
        return self._current is not None

    @property
    def current_id(self) -> int | None:
        """The id of the open incident."""
        return self._current

    def observe(
        self, step: int, anomalies: Iterable[Anomaly], *, activations: bool = False, reached: int | None = None
    ) -> Incident | None:
        """Take the anomalies of a step; return the incident that they opened or changed, if any.

        `activations`: the step's activations were sampled. `reached` is the last step that every rank has reported,
        where some ranks are ahead of others: quiet steps count up to it.
        """
        new = list(anomalies)
        if activations:
            self._sampled_at = step
        current = self.incidents[self._current] if self._current is not None else None
        reported = step if reached is None else min(step, reached)
        if current is not None and reported - current.last_seen > self.quiet_steps:
            current = None
            self.close_current()
        alarms = [a.step for a in new if a.alarm]
        if current is None and not alarms:
            self._suspicions.extend(new)
            return None
        if not new:
            return None
        opened = current is None
        if current is None:
            new, current = self._open(step, new)
        else:  # a recorder that is behind sees the fault first, and only then what was odd long before it
            new = [a for a in new if a.alarm or a.step >= self._since]
        if alarms:  # suspicions do not keep an incident open
            self._last_alarm = step if opened else max(step, self._last_alarm)
            self._alarms.update(alarms[:1] if len(self._alarms) < MAX_ALARMS else ())
        changes = [self._join(anomaly) for anomaly in new]
        if current is not None and not opened and not any(changes):
            self.incidents[current.id] = replace(current, last_seen=self._last_alarm)
            return None
        incident = self._build(self._current or 0, current)
        self.incidents[incident.id] = incident
        return incident

    def _open(self, step: int, new: list[Anomaly]) -> tuple[list[Anomaly], Incident | None]:
        """Open an incident, or again the one whose trouble comes back; return its anomalies, and that incident."""
        parameters = sum(1 for _ in self.table.of_quantity(PARAMETER))
        closed = self._closed.returning(rank([a for a in new if a.alarm], parameters), step, self.quiet_steps)
        if closed is not None:
            self._current, self._members, self._worst = closed.id, dict(closed.members), closed.worst
            self._since = step - LOOK_BACK_STEPS
            known = self.incidents[closed.id]
            if closed.lasts_over([a.step for a in new if a.alarm], self.quiet_steps):
                return new, known
            again = (*known.again, step)[-MAX_AGAIN:]
            return new, replace(known, again=again, returns=known.returns + 1)
        self._current = self._first_id + len(self.incidents)
        has_signs = not any(a.kind in CERTAIN or (a.alarm and a.kind in SET) for a in new)
        self._since = step - LOOK_BACK_STEPS if has_signs else min(a.step for a in new if a.alarm)
        if has_signs:
            new = [*(a for a in self._suspicions if a.step >= self._since), *new]
        self._suspicions.clear()
        return new, None

    def _join(self, anomaly: Anomaly) -> bool:
        """Add an anomaly to the open incident; return whether that changes it."""
        if self._worst is None or _badness(anomaly) > _badness(self._worst):
            self._worst = anomaly
        key = _key(anomaly)
        known = self._members.get(key)
        if known is not None and strength(anomaly) < strength(known):  # earlier ones come where the recorder is late
            lasted = known.kind in {SHIFT, DEAD} and anomaly.kind == SPIKE
            self._members[key] = replace(anomaly, kind=known.kind) if lasted else anomaly
            return True
        if known is not None:
            lasts = known.kind == SPIKE and anomaly.kind in {SHIFT, DEAD}
            if lasts:
                self._members[key] = replace(known, kind=anomaly.kind)
            return lasts
        if len(self._members) >= MAX_MEMBERS and anomaly.quantity != PARAMETER:
            return False
        self._members[key] = anomaly
        return True

    def go_back(self) -> None:
        """Continue from an earlier step: new anomalies begin another incident, and no activations are sampled yet."""
        self.close_current()
        self._sampled_at = -1

    def close_current(self) -> None:
        """End the open incident: the next alarm opens another."""
        if self._current is not None and self._worst is not None:
            self._closed.add(self.incidents[self._current], self._members, self._worst)
        self._current = None
        self._members = {}
        self._alarms = set()
        self._worst = None

    def add_action(self, incident_id: int, action: str) -> Incident | None:
        """Add an action to an incident; return the incident if it had none of that name."""
        known = self.incidents.get(incident_id)
        if known is None or action in known.actions:
            return None
        self.incidents[incident_id] = known.with_action(action)
        return self.incidents[incident_id]

    def _build(self, incident_id: int, known: Incident | None) -> Incident:
        """Return the incident of the present members; `known` is its last state."""
        parameters = sum(1 for _ in self.table.of_quantity(PARAMETER))
        ranked = rank(self._members.values(), parameters)
        suspects = tuple(
            Suspect(
                step=r.onset,
                rank=r.anomaly.rank,
                name=r.anomaly.name,
                quantity=r.anomaly.quantity,
                statistic=r.anomaly.statistic,
                kind=r.anomaly.kind,
                score=r.anomaly.score,
                module=r.anomaly.module,
                evidence=evidence(r.anomaly, r.onset),
            )
            for r in ranked[:SUSPECTS]
        )
        first = suspects[0]
        worst = self._worst or ranked[0].anomaly
        began = min(r.onset for r in ranked)
        again, returns = (known.again, known.returns) if known is not None else ((), 0)
        return Incident(
            id=incident_id,
            step=began,
            rank=first.rank,
            name=first.name,
            quantity=first.quantity,
            statistic=first.statistic,
            kind=first.kind,
            severity=severity_of(ranked, worst, len(self._alarms), known),
            score=worst.score,
            summary=summary(ranked, activations_seen=self._sampled_at >= ranked[0].onset) + returned(again, returns),
            suspects=suspects,
            actions=known.actions if known is not None else (),
            first_seen=began,
            last_seen=self._last_alarm,
            again=again,
            returns=returns,
        )


def _key(anomaly: Anomaly) -> MemberKey:
    """Return the key of which an incident keeps one anomaly; those that settle ties have keys of their own."""
    known = detector(anomaly.detector)
    settles = known is not None and known.settles_ties
    return anomaly.rank, anomaly.name, anomaly.quantity, anomaly.micro_step, settles


def _badness(anomaly: Anomaly) -> tuple[bool, float]:
    return anomaly.kind in CERTAIN, anomaly.score
