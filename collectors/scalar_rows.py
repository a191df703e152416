"""Scalars of a step: those that are logged, and what is known of its updates."""

from typing import Any, Protocol

from trainsentry.collectors.series import LEARNING_RATE, OPTIMIZER_RATE, UPDATED_PARAMETERS, Series, SeriesTable


class Rows(Protocol):
    """Where rows are appended."""

    table: SeriesTable

    def add_scalar(self, series_id: int, value: Any) -> None:
        """Append a scalar: a number, or a framework's tensor of one element."""


class ScalarRows:
    """Appends a row for each scalar, and remembers until the step ends which were logged."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self._logged: set[str] = set()

    def log(self, name: str, value: Any, micro_step: int) -> None:
        """Append a scalar that was logged."""
        self._logged.add(name)
        self._append(name, value, micro_step)

    def updates(self, moved: int, rate: float | None) -> None:
        """Append how many parameters were updated, and at which learning rate, where that is known."""
        self._append(UPDATED_PARAMETERS, float(moved))
        if rate is not None:
            self._append(OPTIMIZER_RATE if LEARNING_RATE in self._logged else LEARNING_RATE, rate)

    def end_step(self) -> None:
        """Forget what was logged."""
        self._logged.clear()

    def _append(self, name: str, value: Any, micro_step: int = 0) -> None:
        series = Series(name, name, micro_step, scalar=True)
        self.rows.add_scalar(self.rows.table.series_id(series), value)
