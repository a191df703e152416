"""What goes through the ring, and what comes back through the socket as JSON lines."""

import json
from typing import Any, Final

DEFINITIONS: Final = 1
RECORD: Final = 2
CONTROL: Final = 3
FRAGMENT: Final = 4
"""A piece of a control message that is larger than the ring takes; the last piece is a CONTROL."""

FLUSH: Final = "flush"
CLOSE: Final = "close"
STATE: Final = "state"
LOAD_STATE: Final = "load_state"
ACTION: Final = "action"
GRAPH: Final = "graph"
COUNTERS: Final = "counters"
GAP: Final = "gap"
RUN: Final = "run"
SAMPLING: Final = "sampling"
DATA_PARALLEL: Final = "data_parallel"

INCIDENT: Final = "incident"
SUSPICION: Final = "suspicion"
EXAMINED: Final = "examined"
FAILURE: Final = "failure"
TROUBLE: Final = "trouble"
GOES_ON: Final = "goes_on"
GAPS: Final = "gaps"
FLUSHED: Final = "flushed"
CLOSED: Final = "closed"


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as JSON bytes."""
    return json.dumps(message).encode()


def decode(data: bytes) -> dict[str, Any]:
    """Return the message of `encode`."""
    value: dict[str, Any] = json.loads(data)
    return value


class LineReader:
    """Cuts a byte stream into JSON messages, one a line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take bytes as they come; return the messages they complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [decode(line) for line in lines if line]
