"""Appends the scalars of a step: logged values, update counts, changed modes and settings of modules."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from trainsentry.collectors.series import (
    LEARNING_RATE,
    OPTIMIZER_RATE,
    SETTING,
    SETTING_BEFORE,
    TRAINING_MODE,
    UPDATED_PARAMETERS,
    Series,
    SeriesTable,
)
from trainsentry.collectors.statistics import VALUE


class ScalarSink(Protocol):
    """Takes rows of scalars."""

    table: SeriesTable

    def add_scalar(self, series_id: int, value: Any) -> None:
        """Append a scalar: a number, or a framework's tensor of one element."""

    def add_numbers(self, series_id: int, numbers: Sequence[float]) -> None:
        """Append a row of the given numbers."""


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
    """Appends a row for each module whose train/eval mode has changed since the last read, when it was `known`."""

    def __init__(self, names: Any, rows: Any) -> None:
        self.names = names
        self.rows = rows
        self.known: list[bool] = []

    def read(self) -> None:
        """Compare the mode of every module; the first call only notes it."""
        modes = [m.module.training for m in self.names.modules]
        if modes != self.known and len(modes) == len(self.known):
            for named, now, before in zip(self.names.modules, modes, self.known, strict=True):
                if now != before:
                    name = f"{TRAINING_MODE}.{named.name or 'model'}"
                    series = Series(name, name, module=named.name, vpp_stage=named.vpp_stage, scalar=True)
                    self.rows.add_scalar(self.rows.table.series_id(series), float(now))
        self.known = modes


class ModuleSettings:
    """Appends a row for each number among a module's attributes that has changed since the last read.

    The row holds the number before in its statistics, and the new one as its value. Where the framework's own class
    names the attribute as a constant, which a call uses, the number before has a row of its own too; what a user's
    class keeps has none.
    """

    def __init__(self, names: Any, rows: Any) -> None:
        self.names = names
        self.rows = rows
        self._places: list[tuple[Any, str, dict[str, Any], bool]] = []
        self._known: list[Any] = []
        self._modules = -1
        self.varied: set[str] = set()  # names of those that have changed in this run

    def read(self) -> None:
        """Compare the settings of every module; the first call, and one after modules were added, only notes them."""
        if len(self.names.modules) != self._modules:
            self._modules = len(self.names.modules)
            self._places = [place for named in self.names.modules for place in _settings_of(named)]
            self._known = self._values()
            return
        values = self._values()
        if values != self._known:
            for place, now, before in zip(self._places, values, self._known, strict=True):
                if now != before and isinstance(now, (int, float)) and isinstance(before, (int, float)):
                    self.varied.add(place[1])
                    self._append(place, float(now), float(before))
            self._known = values

    def _values(self) -> list[Any]:
        return [attributes.get(key) for _, key, attributes, _ in self._places]

    def _append(self, place: tuple[Any, str, dict[str, Any], bool], now: float, before: float) -> None:
        named, key, _, constant = place
        if constant:  # a table holds the value of a scalar alone
            self.rows.add_scalar(self._id(SETTING_BEFORE, named, key), before)
        self.rows.add_numbers(self._id(SETTING, named, key), [before] * VALUE + [now])

    def _id(self, prefix: str, named: Any, key: str) -> int:
        name = f"{prefix}.{named.name or 'model'}.{key}"
        series = Series(name, name, module=named.name, vpp_stage=named.vpp_stage, scalar=True)
        found: int = self.rows.table.series_id(series)
        return found


FRAMEWORKS = frozenset({"torch", "mindspore"})
"""Packages whose modules are followed by their declared constants alone: their other numbers are their own business."""


def constants_of(named: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers that a module's class declares constants."""
    for _, key, attributes, constant in _settings_of(named):
        if constant:
            yield key, attributes[key]


def numbers_of(named: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers that a module of a user's own class keeps."""
    for _, key, attributes, constant in _settings_of(named):
        if not constant:
            yield key, attributes[key]


def _settings_of(named: Any) -> Iterator[tuple[Any, str, dict[str, Any], bool]]:
    """Yield the numbers of a module: of a user's class its public floats, of a framework's class its constants."""
    attributes = vars(named.module)
    constants = getattr(type(named.module), "__constants__", ())
    own = type(named.module).__module__.partition(".")[0] not in FRAMEWORKS
    for key, value in attributes.items():
        constant = key in constants and isinstance(value, (int, float)) and not isinstance(value, bool)
        if constant or (own and isinstance(value, float) and not key.startswith("_")):
            yield named, key, attributes, constant
