"""Which modules a step has called, as far as its activations were sampled: one that was not has nothing to update."""

import numpy as np

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import ACTIVATION_QUANTITIES, Series, SeriesTable


class CalledModules:
    """Follows the activations of a step."""

    def __init__(self, table: SeriesTable) -> None:
        self.table = table
        self._number: dict[str, int] = {}
        self._module = np.zeros(0, np.int64)
        self._called = np.zeros(0, bool)
        self._before = np.zeros(0, bool)

    def begin_step(self) -> None:
        """Put the step aside: the next one begins."""
        if self._called.any():
            self._before = self._called.copy()
        self._called[:] = False

    def note(self, record: StepRecord) -> None:
        """Take in the activations of a record."""
        self._refresh()
        modules = self._module[record.where]
        self._called[modules[modules >= 0]] = True

    def knows(self, series: Series) -> bool | None:
        """Return whether the module that owns a series was called; None where nothing was sampled that says so.

        That it was not is only said of a module whose call was seen in the last step whose activations were sampled:
        hooks may be gone. Of a module whose calls are never seen (another one reads its weights) the next one above it
        answers.
        """
        if not self._called.any():
            return None
        name = series.module
        while name not in self._number:
            if not name:
                return None
            name = name.rpartition(".")[0]
        number = self._number[name]
        if self._called[number]:
            return True
        return False if number < len(self._before) and self._before[number] else None

    def _refresh(self) -> None:
        new = self.table.series[len(self._module) :]
        if not new:
            return
        numbers = [
            self._number.setdefault(s.module, len(self._number)) if s.quantity in ACTIVATION_QUANTITIES else -1
            for s in new
        ]
        self._module = np.append(self._module, numbers)
        self._called = np.append(self._called, np.zeros(len(self._number) - len(self._called), bool))
