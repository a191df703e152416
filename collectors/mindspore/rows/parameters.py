"""Parameters, their gradients, their updates and the optimizer's state, read around an optimizer's step."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Parameter, Tensor, mint

from trainsentry.collectors.mindspore.rows.cell_names import NamedParameter
from trainsentry.collectors.mindspore.rows.device_statistics import device_row
from trainsentry.collectors.mindspore.rows.host_statistics import array_of, as_float
from trainsentry.collectors.mindspore.rows.optimizer_state import scale_of, state_of
from trainsentry.collectors.mindspore.rows.step_rows import StepRows
from trainsentry.collectors.series import GRADIENT, PARAMETER, UPDATE
from trainsentry.collectors.statistics import NORM

Owned = Sequence[tuple[int, NamedParameter]]
"""Parameters of an optimizer, each with its place among all that it moves."""


class ParameterReader:
    """Reads what belongs to parameters; names and series are looked up once."""

    def __init__(self, rows: StepRows) -> None:
        self.rows = rows
        self.ids = rows.parameter_ids

    def gradients(self, owned: Owned, gradients: Sequence[Any], optimizer: Any, micro_step: int) -> None:
        """Append a row for each gradient that an optimizer takes, divided by what it divides them by.

        The last layer's come first, as the backward pass gives them.
        """
        divisor = scale_of(optimizer)
        for place, named in reversed(owned):
            gradient = gradients[place] if place < len(gradients) else None
            if isinstance(gradient, Tensor):
                self.rows.add(self.ids.id_of(named, GRADIENT, micro_step), gradient, divisor)

    def parameters(self, parameters: Iterable[NamedParameter], micro_step: int = 0) -> None:
        """Append a row for each parameter."""
        for named in parameters:
            self.rows.add(self.ids.id_of(named, PARAMETER, micro_step), named.parameter)

    def state(self, optimizer: Any, owned: Owned, micro_step: int = 0) -> None:
        """Append a row for each tensor of the optimizer's state, under its own name."""
        kinds = list(state_of(optimizer))
        for place, named in owned:
            for quantity, tensors in kinds:
                if tensors[place].size:
                    self.rows.add(self.ids.id_of(named, quantity, micro_step), tensors[place])


class UpdateReader:
    """Keeps the weights of a sampled step from before the update, and reads what it added; `moved` counts them."""

    def __init__(self, reader: ParameterReader) -> None:
        self.reader = reader
        self.moved = 0
        self._kept: list[tuple[NamedParameter, Any, Any]] = []

    def keep(self, parameters: Iterable[NamedParameter]) -> None:
        """Copy the weights; the copies live until the step has ended."""
        self._kept = [(named, *self._copy(named.parameter)) for named in parameters]

    def read(self, micro_step: int = 0) -> None:
        """Append a row of new − old for each weight that was kept, and its norm ÷ that of the old weight."""
        kept, self._kept = self._kept, []
        rows = self.reader.rows
        for named, old, norm in kept:
            series = self.reader.ids.id_of(named, UPDATE, micro_step)
            if rows.on_device:
                rows.add_device_ratio(series, named.parameter - old, norm)
            else:
                with np.errstate(invalid="ignore", over="ignore"):
                    difference = _wide(named.parameter) - old
                rows.add_array(series, difference, named.parameter, norm)
        self.moved += len(kept)

    def forget(self) -> None:
        """Drop what was kept."""
        self._kept = []

    def _copy(self, parameter: Parameter) -> tuple[Any, Any]:
        """Return a copy of a weight and its norm, on the host or on its device."""
        if not self.reader.rows.on_device:
            return _wide(parameter).copy(), self.reader.rows.norm_of(parameter)
        return mint.clone(parameter), device_row(parameter, 0.0)[NORM]


def _wide(parameter: Parameter) -> npt.NDArray[Any]:
    """Return a weight's values as floating point numbers; it may be the weight's own memory."""
    return as_float(array_of(parameter))
