"""Draws pictures in a thread of its own: a picture that takes long is dropped, and never holds up the numbers."""

import threading
from collections.abc import Callable, Sequence
from typing import Final

from tensorboard.compat.proto.summary_pb2 import Summary

Draw = Callable[[], Sequence[Summary.Value]]

CLOSE_SECONDS: Final = 10.0
"""Seconds that the end of a run waits for its last pictures: those of 12,000 layers take three."""


class Painter:
    """Draws one set of pictures at a time.

    `left_out` lists the steps whose pictures are missing, with the reason: their drawing failed, or the drawing before
    them has not ended.
    """

    def __init__(self) -> None:
        self._failed: list[tuple[int, str]] = []
        self._skipped: list[tuple[int, str]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._drawn: tuple[int, Sequence[Summary.Value]] | None = None

    def start(self, step: int, draw: Draw) -> None:
        """Draw the pictures of a step, unless a drawing is under way."""
        if self.is_busy:
            self._skipped.append((step, "the pictures before them are not ready"))
            return
        thread = threading.Thread(target=self._work, args=(step, draw), name="trainsentry-pictures", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # no threads at interpreter exit
            self._work(step, draw)

    @property
    def left_out(self) -> list[tuple[int, str]]:
        """The steps whose pictures are missing, and why; later pictures show what was skipped before them."""
        with self._lock:
            return [*self._failed, *self._skipped]

    @property
    def is_busy(self) -> bool:
        """Whether a drawing is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def drawn(self) -> tuple[int, Sequence[Summary.Value]] | None:
        """The step and the pictures of the last drawing, until `clear`."""
        with self._lock:
            return self._drawn

    def clear(self) -> None:
        """Forget the last drawing: it was written."""
        with self._lock:
            self._drawn = None

    def wait(self, seconds: float) -> bool:
        """Wait for the drawing under way; return whether it has ended."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.is_busy

    def finish(self, step: int, draw: Draw, before: Callable[[], None] = lambda: None) -> None:
        """Draw the last pictures of a run in at most CLOSE_SECONDS; call `before` when those before are ready."""
        if self.wait(CLOSE_SECONDS / 2):
            before()
            self.start(step, draw)
            if self.wait(CLOSE_SECONDS / 2):
                return
        self._skipped.append((step, f"they took longer than {CLOSE_SECONDS:g} s"))

    def _work(self, step: int, draw: Draw) -> None:
        try:
            drawn = draw()
        except Exception as error:  # noqa: BLE001 - a picture that cannot be drawn costs that picture
            self._leave_out(step, f"{type(error).__name__}: {error}")
            return
        with self._lock:
            self._drawn = (step, drawn)
            self._skipped.clear()

    def _leave_out(self, step: int, reason: str) -> None:
        with self._lock:
            self._failed.append((step, reason))
