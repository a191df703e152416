"""The gaps that the training process knows: those of the recorder, and those that the recorder cannot know."""

from typing import Any, Final

from trainsentry.monitor.recorder import messages

RING: Final = "ring"
"""The sink name for records that did not fit into the ring, and so reached no sink."""

MAX_LOGGED: Final = 5
"""Gaps of the ring that are logged; a recorder that is always too slow must not flood the log."""


class KnownGaps:
    """Keeps the gaps that the recorder reported, for its successor and the closing line.

    `known` are the gaps to pass to a successor. `dropped` is a gap of the ring that the recorder does not know yet and
    learns of through the ring; `newest` is the newest step that was sent.
    """

    def __init__(self) -> None:
        self.dropped: dict[str, Any] | None = None
        self.newest = -1
        self.known: list[dict[str, Any]] = []
        self._troubled: dict[str, int] = {}
        self._logged = 0

    def note_message(self, message: dict[str, Any]) -> None:
        """Note a recorder's message about its gaps, or about a sink in trouble, for which it keeps writes."""
        kind = message["type"]
        if kind in {messages.GAPS, messages.CLOSED}:
            self.known = message["gaps"]
        elif kind == messages.TROUBLE:
            self._troubled[message["part"]] = message["step"]
        elif kind in {messages.GOES_ON, messages.FAILURE}:
            self._troubled.pop(message["part"], None)

    def drop(self, step: int, reason: str) -> bool:
        """Note that a record did not fit into the ring; return whether to log it."""
        if self.dropped is not None:
            self.dropped["last_step"] = step
            return False
        self.dropped = {"sink": RING, "first_step": step, "last_step": step, "reason": reason}
        self._logged += 1
        return self._logged <= MAX_LOGGED

    def add(self, sink: str, first: int, last: int, reason: str) -> None:
        """Note a gap."""
        self.known = [*self.known, {"sink": sink, "first_step": first, "last_step": last, "reason": reason}]

    def recorder_died(self) -> None:
        """Note the records that may be lost with the recorder: those that it kept for sinks in trouble."""
        for sink, step in self._troubled.items():
            first = max(step, 0)
            self.add(sink, first, max(self.newest, first), "the recorder died with this sink's queued writes")
        self._troubled.clear()

    def end(self) -> None:
        """Add the dropped records to the known gaps: nothing more goes through the ring."""
        if self.dropped is not None:
            self.known, self.dropped = [*self.known, self.dropped], None

    def to_json(self) -> list[dict[str, Any]]:
        """Return all gaps as plain data."""
        return [*self.known, *([self.dropped] if self.dropped is not None else [])]
