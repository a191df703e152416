"""The kinds of messages between trainer and recorder: through the ring, and back through a socket as JSON lines."""

import json
from typing import Any, Final

DEFINITIONS: Final = 1
RECORD: Final = 2
CONTROL: Final = 3
FRAGMENT: Final = 4
"""A piece of a control message too large for the ring; the last piece is a CONTROL."""

FLUSH: Final = "flush"
CLOSE: Final = "close"
STATE: Final = "state"
LOAD_STATE: Final = "load_state"
MISMATCHES: Final = "mismatches"
ACTION: Final = "action"
GRAPH: Final = "graph"
COUNTERS: Final = "counters"
GAP: Final = "gap"
RUN: Final = "run"
SAMPLING: Final = "sampling"
RECONFIGURE: Final = "reconfigure"
DATA_PARALLEL: Final = "data_parallel"

INCIDENT: Final = "incident"
SUSPICION: Final = "suspicion"
EXAMINED: Final = "examined"
FAILURE: Final = "failure"
TROUBLE: Final = "trouble"
GOES_ON: Final = "goes_on"
GAPS: Final = "gaps"
LAG: Final = "lag"
FLUSHED: Final = "flushed"
CLOSED: Final = "closed"


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as JSON bytes."""
    return json.dumps(message).encode()


def decode(data: bytes) -> dict[str, Any]:
    """Return the message in bytes made by `encode`.

    Raises:
        ValueError: when `data` is not JSON.

    """
    value: dict[str, Any] = json.loads(data)
    return value


class LineReader:
    """Cuts a byte stream into JSON messages, one per line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take the next bytes; return the messages that they complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [decode(line) for line in lines if line]
