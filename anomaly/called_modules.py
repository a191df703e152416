"""Which modules of the model a step has called, by their sampled activations."""

import numpy as np

from trainsentry.anomaly.series_arrays import Columns, SeriesArrays
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import ACTIVATION_QUANTITIES, Series


class CalledModules:
    """Remembers which modules a step has called, by their activations.

    A module counts from its first row on: series are defined ahead of the record in which they come.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._number: dict[str, int] = {}
        names: list[str] = []
        self._modules = Columns(names)
        self._called = self._modules.column(bool)
        self._ever = self._modules.column(bool)
        self._before = np.zeros(0, bool)

        def number(series: Series) -> int:
            if series.quantity not in ACTIVATION_QUANTITIES or series.is_model_input:  # these are read at every step
                return -1
            if series.module not in self._number:
                self._number[series.module] = len(names)
                names.append(series.module)
            return self._number[series.module]

        self._module_of = arrays.series.column(np.int64, of=number)

    @property
    def knows_any(self) -> bool:
        """Whether any module's call was sampled."""
        return bool(self._ever.values.any())

    @property
    def knows_step(self) -> bool:
        """Whether the step's activations were sampled."""
        return bool(self._called.values.any())

    def ever(self, series: Series) -> bool:
        """Whether the module that owns a series was called, as far as calls were sampled."""
        number = self._number.get(series.module, len(self._ever.values))
        return not self.knows_any or (number < len(self._ever.values) and bool(self._ever.values[number]))

    def never(self, series: Series) -> bool:
        """Whether no call of the module that owns a series, or of one above it, was sampled, though others were."""
        name, ever = series.module, self._ever.values
        while True:
            number = self._number.get(name, len(ever))
            if number < len(ever) and ever[number]:
                return False
            if not name:
                return self.knows_any
            name = name.rpartition(".")[0]

    def begin_step(self) -> None:
        """Begin the next step."""
        if self._called.values.any():
            self._before = self._called.values.copy()
        self._called.values[:] = False

    def note(self, record: StepRecord) -> None:
        """Take in the activations of a record."""
        self._modules.grow()
        modules = self._module_of.values[record.where]
        self._called.values[modules[modules >= 0]] = True
        self._ever.values[modules[modules >= 0]] = True

    def was_called(self, series: Series) -> bool | None:
        """Return whether the module that owns a series was called; None where no sampled activation shows it.

        False only for a module that was called in the last step whose activations were sampled: hooks may be gone. For
        a module whose calls are never sampled (another one reads its weights), the nearest module above it answers.
        """
        if not self._called.values.any():
            return None
        name = series.module
        called = self._called.values
        # A module that this record names first has no place in the arrays yet: its calls were never sampled before.
        while (number := self._number.get(name, len(called))) >= len(called) or not self._ever.values[number]:
            if not name:
                return None
            name = name.rpartition(".")[0]
        if called[number]:
            return True
        return False if number < len(self._before) and self._before[number] else None
