"""What did not reach a sink: which steps, and why; for `status.json`, the closing line and the report."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

MAX_GAPS: Final = 200
"""Gaps listed one by one; in a run with more, a sink's newest grows to hold those to come. 200 take about 20 kB."""

SHOWN_GAPS: Final = 3
"""Gaps named in the closing line; `status.json` has all."""


class Gaps:
    """Gaps in the order they began: `{"sink", "first_step", "last_step", "reason"}`. Any thread may note one.

    `changes` counts what was noted.
    """

    def __init__(self, known: Sequence[dict[str, Any]] = ()) -> None:
        self._list: list[dict[str, Any]] = [dict(gap) for gap in known]
        self._open: dict[str, dict[str, Any]] = {}
        self.changes = 0
        self._lock = threading.Lock()

    def note(self, sink: str, first: int, last: int, reason: str) -> None:
        """Note that steps did not reach a sink; the gap that is open there grows, else one begins."""
        with self._lock:
            gap = self._open.get(sink) or self._grown(sink)
            if gap is None:
                gap = {"sink": sink, "first_step": first, "last_step": last, "reason": reason}
                self._list.append(gap)
            self._open[sink] = gap
            self.changes += 1
            gap["first_step"], gap["last_step"] = min(gap["first_step"], first), max(gap["last_step"], last)

    def add(self, sink: str, first: int, last: int, reason: str) -> None:
        """Note a gap that is over, such as a file that somebody has removed."""
        self.end(sink)
        self.note(sink, first, last, reason)
        self.end(sink)

    def end(self, sink: str) -> None:
        """Note that a record has reached a sink: what is lost from here on is another gap."""
        with self._lock:
            self._open.pop(sink, None)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the gaps as plain data."""
        with self._lock:
            return [dict(gap) for gap in self._list]

    def _grown(self, sink: str) -> dict[str, Any] | None:
        """Return the gap that has to grow because there are too many."""
        if len(self._list) < MAX_GAPS:
            return None
        return next((gap for gap in reversed(self._list) if gap["sink"] == sink), None)


def sentence_of(gaps: Sequence[Mapping[str, Any]]) -> str:
    """Return gaps in words, for people.

    >>> sentence_of([{"sink": "csv", "first_step": 3, "last_step": 9, "reason": "no space"}])
    'csv lacks steps 3 to 9 (no space)'
    """
    told = [f"{g['sink']} lacks {_steps(g['first_step'], g['last_step'])} ({g['reason']})" for g in gaps[:SHOWN_GAPS]]
    if len(gaps) > SHOWN_GAPS:
        told.append(f"and {len(gaps) - SHOWN_GAPS} more gaps stand in status.json")
    return "; ".join(told)


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
