"""Modules that give several outputs, and which outputs of a step were computed and got a gradient."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainsentry.anomaly.series_arrays import SeriesArrays
from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import ACTIVATION_GRAD_OUTPUT, ACTIVATION_OUTPUT, Series
from trainsentry.collectors.statistics import NORM

SEVERAL: Final = 2
"""Outputs of a module of which some get a gradient where one does not."""

_Place = tuple[int, str]
"""A part of a pipeline, and the name of a module or an output."""


@dataclass(slots=True, eq=False)
class OutputGradient:
    """An output of a module: the series of its values and of its gradient, -1 where there was none."""

    module: str
    values_id: int = -1
    gradient_id: int = -1


class ModuleOutputs:
    """Gathers a step's outputs and their gradients; a step may come in several records.

    Calls after the first, and further passes, may be for something else and are left out. A gradient that is exactly
    zero as a whole does not come: its loss has the weight 0.
    """

    def __init__(self, arrays: SeriesArrays) -> None:
        self._outputs: dict[_Place, OutputGradient] = {}
        self._modules: dict[_Place, list[OutputGradient]] = defaultdict(list)
        self._with_several: list[list[OutputGradient]] = []
        self._in_step, self._norm = arrays.series.column(bool), arrays.series.column(np.float64)
        self._is_gradient = arrays.series.column(bool, of=lambda s: s.quantity == ACTIVATION_GRAD_OUTPUT)
        arrays.series.before_growth(self._note_new)

    def begin_step(self) -> None:
        """Begin the next step."""
        self._in_step.values[:] = False

    def note(self, record: StepRecord) -> None:
        """Take in a record of the step."""
        self._norm.values[record.ids] = record.columns[NORM]
        self._in_step.values[record.ids] = ~self._is_gradient.values[record.where] | (record.columns[NORM] != 0)

    def with_gradients(self) -> list[OutputGradient]:
        """Return the outputs of the modules that give several and that got a gradient at one of them in the step."""
        return [o for outputs in self._with_several if any(map(self.has_gradient, outputs)) for o in outputs]

    def was_computed(self, output: OutputGradient) -> bool:
        """Whether the step computed an output."""
        return output.values_id >= 0 and bool(self._in_step.values[output.values_id])

    def has_gradient(self, output: OutputGradient) -> bool:
        """Whether the step's loss depended on an output."""
        return output.gradient_id >= 0 and bool(self._in_step.values[output.gradient_id])

    def norm(self, output: OutputGradient) -> float:
        """Return the norm of an output's gradient."""
        return float(self._norm.values[output.gradient_id])

    def _note_new(self, first: int, new: Sequence[Series]) -> None:
        for i, series in enumerate(new, first):
            if (
                series.quantity not in (ACTIVATION_OUTPUT, ACTIVATION_GRAD_OUTPUT)
                or series.micro_step
                or "@" in series.name
            ):
                continue
            output = self._outputs.get((series.vpp_stage, series.name))
            if output is None:
                output = self._outputs[series.vpp_stage, series.name] = OutputGradient(series.module)
                outputs = self._modules[series.vpp_stage, series.module]
                outputs.append(output)
                if len(outputs) == SEVERAL:
                    self._with_several.append(outputs)
            if series.quantity == ACTIVATION_OUTPUT:
                output.values_id = i
            else:
                output.gradient_id = i
