"""Appends the scalars of a step: logged values, update counts, switches between training and evaluation."""

from typing import Any, Protocol

from trainsentry.collectors.series import (
    LEARNING_RATE,
    OPTIMIZER_RATE,
    TRAINING_MODE,
    UPDATED_PARAMETERS,
    Series,
    SeriesTable,
)


class ScalarSink(Protocol):
    """Takes rows of scalars."""

    table: SeriesTable

    def add_scalar(self, series_id: int, value: Any) -> None:
        """Append a scalar: a number, or a framework's tensor of one element."""


class ScalarRows:
    """Appends a row for each scalar, and remembers the logged names until the step ends."""

    def __init__(self, rows: ScalarSink) -> None:
        self.rows = rows
        self._logged: set[str] = set()

    def log(self, name: str, value: Any, micro_step: int) -> None:
        """Append a logged scalar."""
        self._logged.add(name)
        self._append(name, value, micro_step)

    def updates(self, moved: int, rate: float | None) -> None:
        """Append the number of updated parameters, and the learning rate if known."""
        self._append(UPDATED_PARAMETERS, float(moved))
        if rate is not None:
            self._append(OPTIMIZER_RATE if LEARNING_RATE in self._logged else LEARNING_RATE, rate)

    def end_step(self) -> None:
        """Forget the logged names."""
        self._logged.clear()

    def _append(self, name: str, value: Any, micro_step: int = 0) -> None:
        series = Series(name, name, micro_step, scalar=True)
        self.rows.add_scalar(self.rows.table.series_id(series), value)


class TrainingModes:
    """Appends a row for each module whose train/eval mode has changed since the last read."""

    def __init__(self, names: Any, rows: Any) -> None:
        self.names = names
        self.rows = rows
        self._known: list[bool] = []

    def read(self) -> None:
        """Compare the mode of every module; the first call only notes it."""
        modes = [m.module.training for m in self.names.modules]
        if modes != self._known and len(modes) == len(self._known):
            for named, now, before in zip(self.names.modules, modes, self._known, strict=True):
                if now != before:
                    name = f"{TRAINING_MODE}.{named.name or 'model'}"
                    series = Series(name, name, module=named.name, vpp_stage=named.vpp_stage, scalar=True)
                    self.rows.add_scalar(self.rows.table.series_id(series), float(now))
        self._known = modes
