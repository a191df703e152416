"""An incident: anomalies that belong together, ranked, with a summary in plain words."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from trainsentry.anomaly.anomaly import json_number

CRITICAL: Final = "critical"
WARNING: Final = "warning"
NOTE: Final = "note"
"""A spike of the loss or of all gradients that passes by itself: it is written, and nobody is told."""

SEVERITIES: Final = (CRITICAL, WARNING, NOTE)


@dataclass(frozen=True, slots=True)
class Suspect:
    """A candidate for the cause: its place, its fault, and the evidence as a sentence."""

    step: int
    rank: int
    name: str
    quantity: str
    statistic: str
    kind: str
    score: float
    module: str
    evidence: str

    @property
    def is_scalar(self) -> bool:
        """Whether this is a logged scalar, which belongs to no module."""
        return self.name == self.quantity


@dataclass(frozen=True, slots=True)
class Incident:
    """One line of `incidents.jsonl`; `name`, `quantity` and `rank` are those of the first suspect.

    `step` and `first_seen` are the first step of the trouble, `last_seen` the last one; `actions` lists the
    reactions to it. `severity` is one of `SEVERITIES`. `again` are the newest steps at which the trouble came back
    after a quiet time, and `returns` is their number.
    """

    id: int
    step: int
    rank: int
    name: str
    quantity: str
    statistic: str
    kind: str
    severity: str
    score: float
    summary: str
    suspects: tuple[Suspect, ...]
    actions: tuple[str, ...]
    first_seen: int
    last_seen: int
    again: tuple[int, ...] = ()
    returns: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        data = asdict(self)
        data["suspects"] = [{k: json_number(v) for k, v in s.items()} for s in data["suspects"]]
        data["actions"], data["again"] = list(self.actions), list(self.again)
        return {key: json_number(value) for key, value in data.items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Incident":
        """Rebuild an incident from a line."""
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        values["suspects"] = tuple(Suspect(**s) for s in data["suspects"])
        values["actions"], values["again"] = tuple(data["actions"]), tuple(data.get("again", ()))
        return cls(**values)

    def with_action(self, action: str) -> "Incident":
        """Return the incident with one more action."""
        return self if action in self.actions else replace(self, actions=(*self.actions, action))


def worst_first(incidents: Iterable[Incident]) -> tuple[Incident, ...]:
    """Return incidents in the order in which a person should look at them."""
    return tuple(sorted(incidents, key=lambda i: (SEVERITIES.index(i.severity), -i.score, i.first_seen)))
