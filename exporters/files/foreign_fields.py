"""Checks the members of JSON objects that others wrote; drops members of the wrong type."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

LARGEST: Final = 1 << 53
"""The largest integer that is read; float64 cannot hold larger ones exactly."""

Kind = Callable[[Any], Any]
"""Returns a value of the expected type, or None for any other."""


def checked(found: Any, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Return the members of an object that `kinds` names and accepts.

    >>> checked({"step": 3, "name": 5, "other": 1}, {"step": whole, "name": text})
    {'step': 3}
    """
    if not isinstance(found, dict):
        return {}
    pairs = ((key, kind(found[key])) for key, kind in kinds.items() if key in found)
    return {key: value for key, value in pairs if value is not None}


def whole(value: Any) -> int | None:
    """Return an integer that a float64 holds exactly."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST else None


def number(value: Any) -> float | None:
    """Return a number; an integer that a float64 only approximates becomes a float, a larger one None.

    >>> number(3), number(2**64), number(10**400), number("3")
    (3, 1.8446744073709552e+19, None, None)
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    if isinstance(value, float) or abs(value) <= LARGEST:
        return value
    return float(value) if abs(value) < 1 << 1000 else None


def statistic(value: Any) -> float | None:
    """Return a statistic of a tensor; true is 1, and the texts nan, inf and -inf are read."""
    if isinstance(value, str):
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.get(value.lower())
    return float(value) if isinstance(value, bool) else number(value)


def finite(value: Any) -> float | None:
    """Return a number that is neither NaN nor Inf."""
    known = number(value)
    return known if known is not None and math.isfinite(known) else None


def text(value: Any) -> str | None:
    """Return a text."""
    return value if isinstance(value, str) else None


def texts(value: Any) -> list[str] | None:
    """Return a list of texts, or the keys of an object."""
    if isinstance(value, dict):
        return [str(key) for key in value]
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else None


def sizes(value: Any) -> list[int] | None:
    """Return the sizes of a tensor: a list of integers from 0 on."""
    known = isinstance(value, list) and all(whole(n) is not None and n >= 0 for n in value)
    return list(value) if known else None


def anything(kind: type) -> Kind:
    """Return a check that accepts any value of a type; its readers only display the content."""
    return lambda value: value if isinstance(value, kind) else None


def an_object(kinds: Mapping[str, Kind]) -> Kind:
    """Return a check that accepts an object and keeps its members of these kinds."""
    return lambda value: checked(value, kinds) if isinstance(value, dict) else None


def objects(kinds: Mapping[str, Kind], needed: frozenset[str] = frozenset()) -> Kind:
    """Return a check that accepts a list of objects; it drops objects that lack a `needed` member."""

    def kind(value: Any) -> list[dict[str, Any]] | None:
        if not isinstance(value, list):
            return None
        found = [checked(item, kinds) for item in value if isinstance(item, dict)]
        return [item for item in found if needed <= item.keys()]

    return kind
