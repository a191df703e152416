"""Keeps the steps that did not reach a sink, and why, for `status.json`, the closing line and the report."""

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from trainsentry.exporters.exporter import LeftOut, Lost, Missing
from trainsentry.exporters.short_text import counted

MAX_GAPS: Final = 200
"""Gaps kept at most, about 20 kB; after that, a sink's newest gap grows to cover later ones."""

SHOWN_GAPS: Final = 3
"""Gaps in the closing line; `status.json` has all."""


class Gaps:
    """Gaps in the order they began: `{"sink", "first_step", "last_step", "reason"}`. Thread-safe.

    `changes` counts the calls of `note`. `left_out` holds what sinks leave out by their settings, as sentences.
    """

    def __init__(self, known: Sequence[dict[str, Any]] = ()) -> None:
        self._list: list[dict[str, Any]] = [dict(gap) for gap in known]
        self._open: dict[str, dict[str, Any]] = {}
        self.left_out: dict[str, str] = {}
        self.changes = 0
        self._lock = threading.Lock()

    def note(self, sink: str, first: int, last: int, reason: str) -> None:
        """Note that steps did not reach a sink; extend its open gap, or begin one."""
        with self._lock:
            gap = self._open.get(sink) or self._grown(sink)
            if gap is None:
                gap = {"sink": sink, "first_step": first, "last_step": last, "reason": reason}
                self._list.append(gap)
            self._open[sink] = gap
            self.changes += 1
            gap["first_step"], gap["last_step"] = min(gap["first_step"], first), max(gap["last_step"], last)

    def add(self, sink: str, first: int, last: int, reason: str) -> None:
        """Note a complete gap, such as a file that somebody has removed."""
        self.end(sink)
        self.note(sink, first, last, reason)
        self.end(sink)

    def end(self, sink: str) -> None:
        """End a sink's gap: a record has reached it."""
        with self._lock:
            self._open.pop(sink, None)

    def of(self, sink: str) -> list[dict[str, Any]]:
        """Return the gaps of a sink."""
        return [gap for gap in self.to_json() if gap["sink"] == sink]

    def leave_out(self, sink: str, sentence: str) -> None:
        """Note what a sink leaves out by its settings; an empty sentence: nothing any more."""
        with self._lock:
            self.left_out = {**self.left_out, sink: sentence} if sentence else _without(self.left_out, sink)

    def callbacks(self, sink: str) -> tuple[Lost, Missing, LeftOut]:
        """Return what the exporter of a sink calls: `add`, `of` and `leave_out`."""
        return partial(self.add, sink), partial(self.of, sink), partial(self.leave_out, sink)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the gaps as plain data."""
        with self._lock:
            return [dict(gap) for gap in self._list]

    def _grown(self, sink: str) -> dict[str, Any] | None:
        """Return a sink's newest gap if there are MAX_GAPS gaps; it must grow instead of a new one."""
        if len(self._list) < MAX_GAPS:
            return None
        return next((gap for gap in reversed(self._list) if gap["sink"] == sink), None)


def _without(texts: Mapping[str, str], key: str) -> dict[str, str]:
    return {known: text for known, text in texts.items() if known != key}


def sentence_of(gaps: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about gaps.

    >>> sentence_of([{"sink": "csv", "first_step": 3, "last_step": 9, "reason": "no space"}])
    'csv lacks steps 3 to 9 (no space)'
    """
    texts = [
        f"{g['sink']} lacks {steps_text(g['first_step'], g['last_step'])} ({g['reason']})" for g in gaps[:SHOWN_GAPS]
    ]
    if len(gaps) > SHOWN_GAPS:
        texts.append(f"{counted(len(gaps) - SHOWN_GAPS, 'more gap')} in status.json")
    return "; ".join(texts)


def steps_text(first: int, last: int) -> str:
    """Return `step 3` or `steps 3 to 9`."""
    return f"step {first}" if first == last else f"steps {first} to {last}"
