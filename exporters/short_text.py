"""Formats names, numbers and settings as short text for pictures, pages and the terminal."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

_CONTROLS: Final = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, direction marks and lone surrogates, but not a new line."""


def plain(text: str) -> str:
    r"""Escape the control characters of a text, so that a terminal shows them instead of obeying them.

    >>> plain("fc\x1b]0;title\x07")
    'fc\\x1b]0;title\\x07'
    """
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def shorten(name: str, longest: int) -> str:
    """Keep the end of a name that is too long; layer names differ there.

    >>> shorten("model.layers.12.mlp.weight", 12)
    '….mlp.weight'
    """
    return name if len(name) <= longest else f"…{name[-longest + 1 :]}"


def brief(name: str, longest: int) -> str:
    """Keep the layer's number and the end of a name that is too long.

    >>> brief("model.layers.31.self_attn.q_proj.weight", 28), brief("model.layers.31.self_attn.q_proj.weight", 18)
    ('31.self_attn.q_proj.weight', '31.…q_proj.weight')
    """
    if len(name) <= longest:
        return name
    parts = name.split(".")
    number = next((i for i in range(len(parts) - 1, -1, -1) if parts[i].isdigit()), None)
    head = "" if number is None or number == len(parts) - 1 else f"{parts[number]}."
    if not head or longest < len(head) + 6:
        return shorten(name, longest)
    return head + shorten(name.rpartition(f".{head}")[2], longest - len(head)).replace("….", "…")


def counted(count: int, noun: str) -> str:
    """Return a count with its noun in the right number.

    >>> counted(1, "incident"), counted(2, "incident")
    ('1 incident', '2 incidents')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def number(value: Any) -> str:
    """Format a value of a JSON line: numbers with five digits, null as an empty text."""
    if value is None:
        return ""
    return f"{float(value):.5g}" if isinstance(value, (int, float)) else str(value)


def flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of nested mappings with their paths.

    >>> flat({"a": {"b": 1}, "c": [2]})
    [('a.b', 1), ('c', [2])]
    """
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in flat(item, f"{prefix}.{key}" if prefix else str(key))]
    return [(prefix, value)]


def first_of(names: Sequence[str]) -> str:
    """Return the first of some names, and how many there are beside it.

    >>> first_of(["fc.weight"]), first_of(["fc.weight", "fc.bias", "head"])
    ('fc.weight', 'fc.weight and 2 more')
    """
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
