"""Names, numbers and settings as short text, for pictures, pages and the terminal."""

from collections.abc import Mapping
from typing import Any


def shorten(name: str, longest: int) -> str:
    """Return a name's end where it is too long: what tells layers apart stands there.

    >>> shorten("model.layers.12.mlp.weight", 12)
    '….mlp.weight'
    """
    return name if len(name) <= longest else f"…{name[-longest + 1 :]}"


def number(value: Any) -> str:
    """Return a value of a JSON line, numbers with five digits; nothing for null."""
    if value is None:
        return ""
    return f"{float(value):.5g}" if isinstance(value, (int, float)) else str(value)


def flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of nested mappings by their path.

    >>> flat({"a": {"b": 1}, "c": [2]})
    [('a.b', 1), ('c', [2])]
    """
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in flat(item, f"{prefix}.{key}" if prefix else str(key))]
    return [(prefix, value)]
