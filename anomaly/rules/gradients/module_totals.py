"""What the passes of a step brought to each module, beside the gradients that its parameters got."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainsentry.anomaly.rules.rule import Observed
from trainsentry.anomaly.series_arrays import Columns, Floats, Integers, Mask, SeriesArrays, rows_where
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import ACTIVATION_GRAD_OUTPUT, ACTIVATION_INPUT, GRADIENT, Series
from trainsentry.collectors.statistics import MEAN, NORM, ZEROS

NO_MODULE: Final = -1

FINE: Final = frozenset({"float32", "float64"})
"""Dtypes whose sums are known to six digits; one of bfloat16 numbers has two."""


@dataclass(frozen=True, slots=True)
class StepGradients:
    """The gradients of a step's parameters whose modules got gradients at their output; arrays of shape (n,).

    `ids` are their series and `orders` their places in the step; `layouts`, `sums`, `norms` and `has_zeros` are of the
    gradients. Of the gradients at the module's first output, over its calls and micro-steps, are `output_sums`,
    `output_squares` (sums of squares), `output_numel`, `parts` (their number), and `is_coarse`, whether one has few
    digits; `input_squares` is of its first input.
    """

    step: int
    ids: Integers
    orders: Integers
    layouts: Integers
    sums: Floats
    norms: Floats
    has_zeros: Mask
    output_sums: Floats
    output_squares: Floats
    output_numel: Floats
    parts: Integers
    is_coarse: Mask
    input_squares: Floats


class ModuleTotals:
    """Adds up what each module gets in a step; whole numbers, as of tokens, are no input: their size says nothing.

    Several rules ask it about the same records, so `arrays.shared(ModuleTotals)` makes one for all.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._names: dict[tuple[str, int], int] = {}
        places: list[int] = []
        modules = self._modules = Columns(places)
        self._sum, self._square, self._numel, self._input_square = (modules.column(np.float64) for _ in range(4))
        self._parts, self._coarse = modules.column(np.int64), modules.column(bool)

        def note(_: int, new: Sequence[Series]) -> None:
            for series in new:
                self._names.setdefault(_module_of(series), len(self._names))
            places.extend(range(len(places), len(self._names)))
            self._modules.grow()

        arrays.series.before_growth(note)
        series = arrays.series
        self._input_of = series.column(np.int64, of=lambda s: self._place(s, is_found=_is_first_input(s)))
        self._output_of = series.column(np.int64, of=lambda s: self._place(s, is_found=_is_first_output(s)))
        self._module_of = series.column(np.int64, of=lambda s: self._place(s, is_found=s.quantity == GRADIENT))
        self._is_fine = arrays.layouts.column(bool, of=lambda layout: layout.dtype in FINE)
        self._is_float = arrays.layouts.column(bool, of=lambda layout: "float" in layout.dtype)
        self._step, self._is_excused = -1, False
        self._has_inputs = self._has_outputs = False
        self._gradients: list[tuple[Integers, Integers, Integers, Floats]] = []
        self._newest: StepRecord | None = None
        self._ended: StepGradients | None = None

    def ended_by(self, observed: Observed) -> StepGradients | None:
        """Take in a record; return the gradients of the step before, if this record begins another.

        None where that step sampled no activations, or the loss scaler skipped it. A step may have several records, and
        a record may be given again by another rule.
        """
        record = observed.record
        if record is self._newest:
            return self._ended
        self._newest, self._ended = record, None
        if record.step != self._step:
            self._ended = self._end_step()
            self._begin_step(record.step)
        self._is_excused |= record.skipped
        with np.errstate(over="ignore", invalid="ignore"):  # the sums of a run that diverges
            self._add(observed)
        return self._ended

    def _begin_step(self, step: int) -> None:
        self._step, self._is_excused = step, False
        self._gradients.clear()
        if self._has_inputs or self._has_outputs:
            for column in (self._sum, self._square, self._numel, self._input_square, self._parts, self._coarse):
                column.values[:] = 0
        self._has_inputs = self._has_outputs = False

    def _add(self, observed: Observed) -> None:
        record = observed.record
        outputs = rows_where(self._output_of.values[record.where] != NO_MODULE)
        if len(outputs):
            self._has_outputs = True
            modules, numel = self._output_of.values[record.ids[outputs]], observed.numel[outputs]
            np.add.at(self._sum.values, modules, record.values[outputs, MEAN] * numel)
            np.add.at(self._square.values, modules, record.values[outputs, NORM] ** 2)
            np.add.at(self._numel.values, modules, numel)
            np.add.at(self._parts.values, modules, 1)
            self._coarse.values[modules[~self._is_fine.values[record.layouts[outputs]]]] = True
        is_input = self._input_of.values[record.where] != NO_MODULE
        inputs = rows_where(is_input & self._is_float.values[record.layouts])
        if len(inputs):
            self._has_inputs = True
            modules = self._input_of.values[record.ids[inputs]]
            np.add.at(self._input_square.values, modules, record.values[inputs, NORM] ** 2)
        if self._has_outputs:
            self._add_gradients(observed)

    def _add_gradients(self, observed: Observed) -> None:
        record = observed.record
        rows = rows_where(self._module_of.values[record.where] != NO_MODULE)
        if len(rows):
            taken = record.values[rows][:, [MEAN, NORM, ZEROS]]
            taken[:, 0] *= observed.numel[rows]
            ids, layouts = record.ids[rows].astype(np.int64), record.layouts[rows].astype(np.int64)
            self._gradients.append((ids, record.first_order + rows, layouts, taken))

    def _end_step(self) -> StepGradients | None:
        if self._is_excused or not self._gradients:
            return None
        ids, orders, layouts, taken = (np.concatenate(parts) for parts in zip(*self._gradients, strict=True))
        modules = self._module_of.values[ids]
        known = rows_where(self._parts.values[modules] > 0)
        modules, taken = modules[known], taken[known]
        return StepGradients(
            step=self._step,
            ids=ids[known],
            orders=orders[known],
            layouts=layouts[known],
            sums=taken[:, 0],
            norms=taken[:, 1],
            has_zeros=taken[:, 2] > 0,
            output_sums=self._sum.values[modules],
            output_squares=self._square.values[modules],
            output_numel=self._numel.values[modules],
            parts=self._parts.values[modules],
            is_coarse=self._coarse.values[modules],
            input_squares=self._input_square.values[modules],
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
