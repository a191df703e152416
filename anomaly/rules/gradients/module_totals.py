"""What the passes of a step brought to each module: sums over its calls and micro-steps of what was read there."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.series_arrays import Columns, Floats, Integers, Mask, SeriesArrays, rows_where
from trainsentry.collectors.series import ACTIVATION_GRAD_OUTPUT, ACTIVATION_INPUT, GRADIENT, Series
from trainsentry.collectors.statistics import MEAN, NORM

NO_MODULE: Final = -1

FINE: Final = frozenset({"float32", "float64"})
"""Dtypes whose sums are known to six digits; one of bfloat16 numbers has two."""


class ModuleTotals:
    """Adds up the first output's gradients, and the squares of the first input, of each module in a step.

    Whole numbers, as of tokens, are no such input: their size says nothing.

    `sum`, `square` and `numel` are of the gradients at the output, `parts` is the number of these, `coarse` says
    whether one has few digits, `square_in` is of the input; each has the shape (modules,). `module_of` maps the series
    of a parameter's gradient to its module, `NO_MODULE` for other series. `has_any` says whether the step has had any
    gradient at an output: most steps sample no activations.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._names: dict[tuple[str, int], int] = {}
        self._is_empty, self.has_any = True, False
        places: list[int] = []
        modules = self._modules = Columns(places)
        self._sum, self._square, self._numel = (modules.column(np.float64) for _ in range(3))
        self._square_in, self._parts = modules.column(np.float64), modules.column(np.int64)
        self._coarse = modules.column(bool)

        def note(_: int, new: Sequence[Series]) -> None:
            for series in new:
                self._names.setdefault(_module_of(series), len(self._names))
            places.extend(range(len(places), len(self._names)))
            self._modules.grow()

        arrays.series.before_growth(note)
        self._input_of = arrays.series.column(np.int64, of=lambda s: self._place(s, is_found=_is_first_input(s)))
        self._is_fine = arrays.layouts.column(bool, of=lambda layout: layout.dtype in FINE)
        self._is_float = arrays.layouts.column(bool, of=lambda layout: "float" in layout.dtype)
        self._output_of = arrays.series.column(np.int64, of=lambda s: self._place(s, is_found=_is_first_output(s)))
        self._gradient_of = arrays.series.column(np.int64, of=lambda s: self._place(s, is_found=s.quantity == GRADIENT))

    @property
    def sum(self) -> Floats:
        """The sum of the gradients at the output."""
        return self._sum.values

    @property
    def square(self) -> Floats:
        """The sum of their squares."""
        return self._square.values

    @property
    def numel(self) -> Floats:
        """The number of their elements."""
        return self._numel.values

    @property
    def square_in(self) -> Floats:
        """The sum of the squares of the input."""
        return self._square_in.values

    @property
    def parts(self) -> Integers:
        """The number of tensors of gradients at the output."""
        return self._parts.values

    @property
    def coarse(self) -> Mask:
        """Whether gradients at the output have fewer digits than float32."""
        found: Mask = self._coarse.values
        return found

    @property
    def module_of(self) -> Integers:
        """The module of each series that is a parameter's gradient."""
        return self._gradient_of.values

    def begin_step(self) -> None:
        """Forget the step before."""
        if not self._is_empty:
            self._is_empty, self.has_any = True, False
            for column in (self._sum, self._square, self._numel, self._square_in, self._parts, self._coarse):
                column.values[:] = 0

    def add(self, observed: Observed) -> None:
        """Take in a record; a step may have several. Sums of a run that diverges may overflow."""
        with np.errstate(over="ignore", invalid="ignore"):
            self._add(observed)

    def _add(self, observed: Observed) -> None:
        record = observed.record
        outputs = rows_where(self._output_of.values[record.where] != NO_MODULE)
        if len(outputs):
            modules, numel = self._output_of.values[record.ids[outputs]], observed.numel[outputs]
            np.add.at(self._sum.values, modules, record.values[outputs, MEAN] * numel)
            np.add.at(self._square.values, modules, record.values[outputs, NORM] ** 2)
            np.add.at(self._numel.values, modules, numel)
            np.add.at(self._parts.values, modules, 1)
            self._is_empty, self.has_any = False, True
            self._coarse.values[modules[~self._is_fine.values[record.layouts[outputs]]]] = True
        is_input = self._input_of.values[record.where] != NO_MODULE
        inputs = rows_where(is_input & self._is_float.values[record.layouts])
        if len(inputs):
            self._is_empty = False
            np.add.at(
                self._square_in.values, self._input_of.values[record.ids[inputs]], record.values[inputs, NORM] ** 2
            )

    def _place(self, series: Series, *, is_found: bool) -> int:
        return self._names[_module_of(series)] if is_found else NO_MODULE


def _module_of(series: Series) -> tuple[str, int]:
    """Return the module of an input or output, or that of a parameter, which tables name by the parameter alone."""
    module = series.name.rpartition(".")[0] if series.quantity == GRADIENT else series.module.partition("@")[0]
    return module, series.vpp_stage


def _is_first_output(series: Series) -> bool:
    return series.quantity == ACTIVATION_GRAD_OUTPUT and series.name.endswith("output.0")


def _is_first_input(series: Series) -> bool:
    return series.quantity == ACTIVATION_INPUT and series.name.endswith("input.0")
