"""Runs the writes to one place in a thread of their own, so that one that hangs or fails hurts nothing else."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

Job = Callable[[], object]
OnFailure = Callable[[str, str, int], None]
"""Receives the sink's name, what went wrong, and the step from which on nothing is written."""


@dataclass
class _Ticket:
    job: Job
    step: int
    done: threading.Event
    error: str | None = None


class Sink:
    """One writer. `submit` starts a write, `settle` waits for it; a failure switches the sink off for good."""

    def __init__(self, name: str, max_wait: float, on_failure: OnFailure) -> None:
        self.name = name
        self.max_wait = max_wait
        self.off: str | None = None
        self._on_failure = on_failure
        self._jobs: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        self._open: list[_Ticket] = []
        self._thread = threading.Thread(target=self._work, name=f"trainsentry-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job, step: int) -> None:
        """Start a write of something that belongs to `step`."""
        if self.off is None:
            ticket = _Ticket(job, step, threading.Event())
            self._open.append(ticket)
            self._jobs.put(ticket)

    def settle(self) -> None:
        """Wait for the writes that were started, at most `max_wait` seconds."""
        tickets, self._open = self._open, []
        for ticket in tickets:
            if self.off is not None:
                return
            if not ticket.done.wait(self.max_wait):
                self._fail(f"a write has not come back after {self.max_wait:g} s", ticket.step)
            elif ticket.error is not None:
                self._fail(ticket.error, ticket.step)

    def close(self) -> None:
        """End the thread; one that hangs is left to the end of the process."""
        self._jobs.put(None)
        if self.off is None:
            self._thread.join(self.max_wait)

    def _fail(self, message: str, step: int) -> None:
        self.off = message
        self._on_failure(self.name, message, step)

    def _work(self) -> None:
        while (ticket := self._jobs.get()) is not None:
            if self.off is None:
                try:
                    ticket.job()
                except Exception as error:  # noqa: BLE001 - whatever a writer raises, the sink reports it
                    ticket.error = f"{type(error).__name__}: {error}"
            ticket.done.set()
