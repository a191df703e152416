"""Holds the size of every layer over steps in bounded memory, by merging neighbouring steps."""

from collections.abc import Sequence
from copy import copy
from typing import Final

import numpy as np
import numpy.typing as npt

MAX_COLUMNS: Final = 512
"""Columns of a picture, as many as a screen shows; with more steps, neighbours share a column with their maximum."""


class LayerMatrix:
    """Rows are layers in order of first appearance, columns are bins of steps.

    A cell holds the largest value of its bin; NaN if it has no sample, +Inf if a sample was not finite.
    """

    def __init__(self, max_columns: int = MAX_COLUMNS) -> None:
        self.names: list[str] = []
        self.first_step: int | None = None
        self.last_step = -1
        self.width = 1
        self._max = max_columns
        self._rows: dict[str, int] = {}
        self._values = np.full((0, max_columns), np.nan, np.float32)

    def rows_of(self, names: Sequence[str]) -> npt.NDArray[np.intp]:
        """Return the rows of layers; add rows for new ones."""
        for name in names:
            if name not in self._rows:
                self._rows[name] = len(self.names)
                self.names.append(name)
        missing = len(self.names) - len(self._values)
        if missing > 0:
            more = np.full((max(missing, len(self._values)), self._max), np.nan, np.float32)
            self._values = np.concatenate([self._values, more])
        return np.asarray([self._rows[name] for name in names], np.intp)

    def take(self, step: int, rows: npt.NDArray[np.intp], values: npt.NDArray[np.float64]) -> None:
        """Add the values of layers (given by `rows`) at a step; non-finite values count as +Inf."""
        if self.first_step is None:
            self.first_step = step
        column = self._column(step)
        if column is None:
            return
        self.last_step = max(self.last_step, step)
        wide = np.where(np.isfinite(values), values, np.inf).astype(np.float32)
        with np.errstate(invalid="ignore"):
            np.fmax.at(self._values[:, column], rows, wide)  # a layer may have several rows: micro-steps

    def table(self) -> npt.NDArray[np.float32]:
        """Return the matrix so far, shape (layers, columns)."""
        if self.first_step is None:
            return self._values[:0, :0]
        columns = (self.last_step - self.first_step) // self.width + 1
        return self._values[: len(self.names), :columns]

    def copy(self) -> "LayerMatrix":
        """Return a copy that stays as it is while this one goes on."""
        made = copy(self)
        made.names, made._rows = list(self.names), dict(self._rows)
        made._values = self._values[: len(self.names)].copy()
        return made

    def step_of(self, column: int) -> int:
        """Return the first step of a column."""
        return (self.first_step or 0) + column * self.width

    def column_of(self, step: int) -> int:
        """Return the column of a step."""
        return (step - (self.first_step or 0)) // self.width

    def _column(self, step: int) -> int | None:
        assert self.first_step is not None
        if step < self.first_step:
            return None  # the run went back to before the first column
        while step - self.first_step >= self.width * self._max:
            self._fold()
        return (step - self.first_step) // self.width

    def _fold(self) -> None:
        pairs = self._values.reshape(len(self._values), self._max // 2, 2)
        with np.errstate(invalid="ignore"):
            folded = np.fmax(pairs[:, :, 0], pairs[:, :, 1])
        self._values = np.concatenate([folded, np.full_like(folded, np.nan)], axis=1)
        self.width *= 2
