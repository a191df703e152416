"""What the recorder asks of an exporter of step records."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from trainsentry.collectors.record import StepRecord

Lost = Callable[[int, int, str], None]
"""Receives first and last step of records that were written and are in no file any more, and why."""


def nothing_lost(first: int, last: int, reason: str) -> None:
    """Do nothing: nobody asks what was lost."""


class Exporter(Protocol):
    """Writes step records somewhere.

    An `OSError` means that it cannot write now: nothing of the record is left where it writes, and it is asked again.
    Any other exception is a fault, and the record is left out.
    """

    def write(self, record: StepRecord) -> None:
        """Write a record; when this returns, the record outlives the trainer."""

    def close(self) -> None:
        """Finish and release files."""


@runtime_checkable
class ScalarExporter(Exporter, Protocol):
    """An exporter that also shows numbers that are in no record."""

    def write_scalars(self, step: int, scalars: dict[str, float]) -> None:
        """Write numbers by name."""
