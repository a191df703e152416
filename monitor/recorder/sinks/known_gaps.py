"""The gaps as the training process knows them: those that the recorder has told of, and those that it cannot know."""

from typing import Any, Final

from trainsentry.monitor.recorder import messages

RING: Final = "ring"
"""The sink of records that found no room in the ring, and so reached none."""

MAX_LOGGED: Final = 5
"""Gaps that are logged one by one; a recorder that is too slow all the time fills nobody's log."""


class KnownGaps:
    """Keeps what the recorder has told of its gaps, so that its successor and the closing line know it too.

    `dropped` is the gap in the ring that the recorder has still to be told of; `newest`, the newest step handed over.
    """

    def __init__(self) -> None:
        self.dropped: dict[str, Any] | None = None
        self.newest = -1
        self._told: list[dict[str, Any]] = []
        self._troubled: dict[str, int] = {}
        self._logged = 0

    def hear(self, message: dict[str, Any]) -> None:
        """Take what the recorder says of its gaps, and of sinks for which it keeps what they cannot take now."""
        kind = message["type"]
        if kind in {messages.GAPS, messages.CLOSED}:
            self._told = message["gaps"]
        elif kind == messages.TROUBLE:
            self._troubled[message["part"]] = message["step"]
        elif kind in {messages.GOES_ON, messages.FAILURE}:
            self._troubled.pop(message["part"], None)

    def drop(self, step: int, reason: str) -> bool:
        """Note that a record found no room in the ring; return whether that is to be logged."""
        if self.dropped is not None:
            self.dropped["last_step"] = step
            return False
        self.dropped = {"sink": RING, "first_step": step, "last_step": step, "reason": reason}
        self._logged += 1
        return self._logged <= MAX_LOGGED

    def add(self, sink: str, first: int, last: int, reason: str) -> None:
        """Note a gap."""
        self._told = [*self._told, {"sink": sink, "first_step": first, "last_step": last, "reason": reason}]

    def recorder_died(self) -> None:
        """Note what may have gone with it: the records that it kept for sinks in trouble."""
        for sink, step in self._troubled.items():
            first = max(step, 0)
            self.add(sink, first, max(self.newest, first), "the recorder died with what it kept for it")
        self._troubled.clear()

    @property
    def told(self) -> list[dict[str, Any]]:
        """The gaps that a successor has to know: of what was dropped it is told through the ring."""
        return self._told

    def end(self) -> None:
        """Note that nothing more goes through the ring."""
        if self.dropped is not None:
            self._told, self.dropped = [*self._told, self.dropped], None

    def to_json(self) -> list[dict[str, Any]]:
        """Return all gaps as plain data."""
        return [*self._told, *([self.dropped] if self.dropped is not None else [])]
