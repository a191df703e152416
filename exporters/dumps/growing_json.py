"""Writes a JSON object on disk member by member; the file is valid JSON after each, even if the process is killed.

One system call writes a member and the closing brackets over the old closing brackets.
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
"""Encodes a text as JSON."""

_encode_with_json = json.JSONEncoder(check_circular=False).encode
"""Values are fresh lists and mappings without cycles, so the check for cycles is off."""


def _encode(value: Any) -> bytes:
    """Encode with orjson, or with json where they differ: orjson writes NaN and Inf as null."""
    try:
        text = orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits, a lone surrogate
        return _encode_with_json(value).encode()
    return text if b"null" not in text or _is_finite(value) else _encode_with_json(value).encode()


def _is_finite(value: Any) -> bool:
    """Whether nested lists and mappings hold no NaN or Inf; must be fast, as every entry with a null passes here."""
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
    """The file of one object; `head` holds its first members, `inside` is the key of the nested object that grows.

    Without `inside` the object itself grows. Non-finite numbers are written as NaN, Infinity or -Infinity.
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
        """Add a member; return the file offset of its value."""
        return self.add_text(quoted(key), _encode(value))

    def add_text(self, key: str, value: bytes) -> int:
        """Add a member whose value is JSON text; return the file offset of its value."""
        lead = f"{',' if self.members else ''}\n  {key}: ".encode()
        offset = self._end + len(lead)
        self._write(lead + value)
        self.members += 1
        return offset

    def overwrite(self, offset: int, text: bytes) -> None:
        """Overwrite bytes at a file offset."""
        os.pwrite(self._file, text, offset)

    def end(self, tail: dict[str, Any]) -> None:
        """Close the nested object, and add last members to the outer one."""
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
        while written < len(data):  # cut short by a signal or a full disk
            written += os.pwrite(self._file, data[written:], self._end + written)
        self._end += len(text)
