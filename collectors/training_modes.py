"""Modules that are switched between training and evaluation."""

from typing import Any

from trainsentry.collectors.series import TRAINING_MODE, Series


class TrainingModes:
    """Appends a row for each module whose mode at the end of a step is another than at the last look."""

    def __init__(self, names: Any, rows: Any) -> None:
        self.names = names
        self.rows = rows
        self._known: list[bool] = []

    def read(self) -> None:
        """Look at every module; the first time only note its mode."""
        modes = [m.module.training for m in self.names.modules]
        if modes != self._known and len(modes) == len(self._known):
            for named, now, before in zip(self.names.modules, modes, self._known, strict=True):
                if now != before:
                    name = f"{TRAINING_MODE}.{named.name or 'model'}"
                    series = Series(name, name, module=named.name, vpp_stage=named.vpp_stage, scalar=True)
                    self.rows.add_scalar(self.rows.table.series_id(series), float(now))
        self._known = modes
