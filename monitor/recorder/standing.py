"""Tells the trainer how the sinks stand: which have trouble, which go on, and what is missing where."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from trainsentry.monitor.recorder import messages
from trainsentry.monitor.recorder.gaps import Gaps
from trainsentry.monitor.recorder.sink import Sink

KINDS: Final = {"trouble": messages.TROUBLE, "goes_on": messages.GOES_ON, "off": messages.FAILURE}
"""What the trainer is told of a sink's news."""


class Standing:
    """Sends what is new of sinks and of the gaps, which the trainer keeps for a successor."""

    def __init__(self, gaps: Gaps, send: Callable[[dict[str, Any]], None]) -> None:
        self.gaps = gaps
        self._send = send
        self._told = 0

    def tell(self, sinks: Iterable[Sink]) -> None:
        """Tell what is new."""
        for sink in sinks:
            for news in sink.take_news():
                self._send({"type": KINDS[news.what], "part": sink.name, "message": news.reason, "step": news.step})
        if self.gaps.changes != self._told:
            self._told = self.gaps.changes
            self._send({"type": messages.GAPS, "gaps": self.gaps.to_json()})

    def tell_end(self, files: Iterable[Sink]) -> None:
        """Tell that all is over: every gap, and, where nothing at all could be written to `files`, why."""
        gaps = self.gaps.to_json()
        why = next((gap["reason"] for gap in gaps), None)
        nothing = None if any(sink.written for sink in files) else why
        self._send({"type": messages.CLOSED, "gaps": gaps, "nothing_written": nothing})
