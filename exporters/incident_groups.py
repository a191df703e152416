"""Puts incidents of one culprit together: one weight that jumps three times is one thing to look at."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

Line = TypeVar("Line", bound=Mapping[str, Any])


_SEVERITIES: Final = ("critical", "warning", "note")


def worst_first(incidents: Iterable[Line]) -> list[Line]:
    """Return incidents (lines of `incidents.jsonl`) in the order in which a person should look at them."""
    return sorted(incidents, key=_place)


def _place(incident: Mapping[str, Any]) -> tuple[int, float, int]:
    severity = incident.get("severity")
    known = _SEVERITIES.index(severity) if severity in _SEVERITIES else len(_SEVERITIES)
    return known, -(incident.get("score") or 0.0), incident.get("first_seen", 0)


@dataclass(frozen=True)
class IncidentGroup:
    """The worst incident of a culprit, and its others in the order of their steps."""

    worst: dict[str, Any]
    others: tuple[dict[str, Any], ...] = ()

    @property
    def all(self) -> tuple[dict[str, Any], ...]:
        """Every incident of the group by its first step."""
        return tuple(sorted((self.worst, *self.others), key=lambda i: i.get("first_seen", 0)))

    @property
    def first_seen(self) -> int:
        """The first step of the first incident."""
        return min((i["first_seen"] for i in self.all if "first_seen" in i), default=0)

    @property
    def last_seen(self) -> int:
        """The last step at which one of the incidents was seen."""
        return max((i["last_seen"] for i in self.all if "last_seen" in i), default=self.first_seen)

    @property
    def repeats(self) -> list[int]:
        """The first steps of the incidents other than the worst."""
        return sorted(i.get("first_seen", 0) for i in self.others)


def grouped(incidents: Sequence[dict[str, Any]]) -> list[IncidentGroup]:
    """Return the incidents by first suspect (rank, name, quantity), in the order given: the worst first.

    >>> found = grouped([{"name": "a", "first_seen": 9}, {"name": "b"}, {"name": "a", "first_seen": 4}])
    >>> [(group.worst["name"], group.repeats, group.first_seen) for group in found]
    [('a', [4], 4), ('b', [], 0)]
    """
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for incident in incidents:
        found.setdefault(tuple(incident.get(key) for key in ("rank", "name", "quantity")), []).append(incident)
    return [IncidentGroup(first, tuple(others)) for first, *others in found.values()]
