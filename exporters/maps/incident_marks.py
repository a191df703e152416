"""Labels the suspects and the steps of incidents, alike in every picture."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from trainsentry.exporters.incident_groups import worst_first
from trainsentry.exporters.maps.layers_map import Mark

MOST_MARKED: Final = 8
"""Incidents that a picture marks, the worst; more labels would hide each other."""

SUSPECTS_EACH: Final = 2
"""Suspects of an incident that are labelled."""


def marks(incidents: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Return a mark for each of the worst incidents, by step."""
    found = [(i["first_seen"], i.get("id", 0)) for i in worst_first(incidents)[:MOST_MARKED] if "first_seen" in i]
    return [Mark(step, f"#{number} step {step}") for step, number in sorted(found)]


def suspects(incidents: Sequence[Mapping[str, Any]], quantity: str) -> dict[str, str]:
    """Return the labels of a quantity's suspects: the numbers of their incidents."""
    found: dict[str, list[int]] = {}
    for incident in worst_first(incidents)[:MOST_MARKED]:
        for suspect in incident.get("suspects", ())[:SUSPECTS_EACH]:
            if suspect["quantity"] == quantity:
                found.setdefault(suspect["name"], []).append(incident.get("id", 0))
    return {name: " ".join(f"#{number}" for number in sorted(set(numbers))) for name, numbers in found.items()}


def blamed_ranks(incidents: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return the labels of the ranks of first suspects: the numbers of their incidents."""
    found: dict[int, list[int]] = {}
    for incident in worst_first(incidents)[:MOST_MARKED]:
        if "rank" in incident:
            found.setdefault(incident["rank"], []).append(incident.get("id", 0))
    return {rank: " ".join(f"#{number}" for number in sorted(set(numbers))) for rank, numbers in found.items()}


def first_quantity(incidents: Sequence[Mapping[str, Any]], quantities: Sequence[str]) -> str | None:
    """Return the quantity whose map should be seen first: that of the worst incident, else the gradients'."""
    blamed = [s["quantity"] for i in worst_first(incidents) for s in i.get("suspects", ())]
    return next((q for q in (*blamed, "gradient", *quantities) if q in quantities), None)
