"""Lines of JSON, each under its seal, as they go over one connection of a meeting."""

import json
from collections.abc import Iterator
from typing import Any, Final

from trainsentry.collectors.handshake import TAG_BYTES, Refused, Seals

_TAG: Final = 2 * TAG_BYTES
"""Characters of a seal, which stands in front of its line."""


class SealedLines:
    """One side of a connection: `pack` what is to be sent, `feed` what has come; no line is longer than `longest`."""

    def __init__(self, seals: Seals, longest: int) -> None:
        self._seals = seals
        self._longest = longest
        self._inbox = bytearray()

    def pack(self, text: bytes) -> bytes:
        """Return a line that holds a message; it must be the next one that is sent."""
        return self._seals.seal(text).hex().encode() + text + b"\n"

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that bytes complete.

        Raises:
            Refused: when one is not the other side's, or is none, or is too long.

        """
        self._inbox += data
        if b"\n" in data:
            *lines, rest = bytes(self._inbox).split(b"\n")
            self._inbox = bytearray(rest)
            for line in lines:
                yield self._opened(line)
        if len(self._inbox) > self._longest:
            raise Refused(f"a line of more than {self._longest} bytes")

    def _opened(self, line: bytes) -> dict[str, Any]:
        try:
            self._seals.check(bytes.fromhex(line[:_TAG].decode("ascii")), line[_TAG:])
            said = json.loads(line[_TAG:])
        except (ValueError, RecursionError) as error:
            raise Refused(f"a line that is none: {type(error).__name__}") from None
        if not isinstance(said, dict) or not said:
            raise Refused("a line that holds no message")
        return said


def text_of(message: dict[str, Any]) -> bytes:
    """Return a message as text."""
    return json.dumps(message).encode()
