"""A JSON object on disk that grows by a member at a time and is whole after each: a killed process leaves it readable.

A member and what closes the object are written by one call of the operating system, over what closed it before.
"""

import json
import os
from collections.abc import Iterable
from json.encoder import encode_basestring_ascii
from math import isfinite
from pathlib import Path
from typing import Any, Final

import orjson

quoted: Final = encode_basestring_ascii
"""Writes a text as JSON."""

_encode_with_json = json.JSONEncoder(check_circular=False).encode
"""What is written is made of fresh lists and mappings, none of which holds itself."""


def _encode(value: Any) -> bytes:
    """Return JSON, by orjson where it writes the same: it has no word for NaN and Inf, and writes null for them."""
    try:
        text = orjson.dumps(value)
    except TypeError:  # a whole number of more than 64 bits, half of a surrogate pair
        return _encode_with_json(value).encode()
    return text if b"null" not in text or _is_finite(value) else _encode_with_json(value).encode()


def _is_finite(value: Any) -> bool:
    """Whether no number in nested lists and mappings is NaN or Inf; quick, for it sees every entry with a null."""
    items: Iterable[Any] = value.values() if isinstance(value, dict) else value
    for item in items if isinstance(value, (dict, list, tuple)) else (value,):
        kind = type(item)
        if kind is float and not isfinite(item):
            return False
        if kind in _CONTAINERS and not _is_finite(item):
            return False
    return True


_CONTAINERS: Final = frozenset({dict, list, tuple})


class GrowingJson:
    """The file of one object; `head` are its first members, `inside` the key of the object that grows within it.

    Without `inside` the object itself grows. A number that is not finite is written as NaN, Infinity or -Infinity.
    """

    def __init__(self, path: Path, head: dict[str, Any] | None = None, inside: str | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.members = 0
        start = json.dumps(head or {}, indent=1)[:-1].rstrip()
        if inside is not None:
            comma = "," if head else ""
            start += f"{comma}\n {json.dumps(inside)}: {{"
        self._closing = b"\n }\n}\n" if inside is not None else b"\n}\n"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._end = 0
        self._write(start.encode())

    def add(self, key: str, value: Any) -> int:
        """Add a member; return where its value begins in the file."""
        return self.add_text(quoted(key), _encode(value))

    def add_text(self, key: str, value: bytes) -> int:
        """Add a member that is JSON already; return where its value begins in the file."""
        lead = f"{',' if self.members else ''}\n  {key}: ".encode()
        place = self._end + len(lead)
        self._write(lead + value)
        self.members += 1
        return place

    def overwrite(self, place: int, text: bytes) -> None:
        """Write over what stands at a place, as many bytes."""
        os.pwrite(self._file, text, place)

    def end(self, tail: dict[str, Any]) -> None:
        """Close the object that grows, and add last members to the one around it."""
        text = json.dumps(tail, indent=1)[1:-2]
        self._closing = b"\n}\n"
        self._write(f"\n }},{text}".encode())

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, text: bytes) -> None:
        data = text + self._closing
        written = os.pwrite(self._file, data, self._end)
        while written < len(data):  # a signal or a full disk has cut it
            written += os.pwrite(self._file, data[written:], self._end + written)
        self._end += len(text)
