"""What the recorder asks of an exporter of step records."""

from typing import Protocol, runtime_checkable

from trainsentry.collectors.record import StepRecord


class Exporter(Protocol):
    """Writes step records somewhere. Any exception means that it can no longer write."""

    def write(self, record: StepRecord) -> None:
        """Write a record; when this returns, the record outlives the trainer."""

    def close(self) -> None:
        """Finish and release files."""


@runtime_checkable
class ScalarExporter(Exporter, Protocol):
    """An exporter that also shows numbers that are in no record."""

    def write_scalars(self, step: int, scalars: dict[str, float]) -> None:
        """Write numbers by name."""
