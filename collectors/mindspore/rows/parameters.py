"""Reads parameters, gradients, updates and optimizer state around an optimizer's step."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Parameter, ParameterTuple, Tensor, mint

from trainsentry.collectors.alignment import FIRST_MOMENTS
from trainsentry.collectors.mindspore.rows.cell_names import NamedParameter
from trainsentry.collectors.mindspore.rows.step_rows import StepRows
from trainsentry.collectors.mindspore.rows.tensor_statistics import array_of, as_float, device_row
from trainsentry.collectors.series import GRADIENT, MADE_CONSTANT, MOMENT_DIRECTION, PARAMETER, UPDATE
from trainsentry.collectors.shared.host_rows import state_quantity
from trainsentry.collectors.shared.made_constant import made_constant
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.statistics import NORM

Owned = Sequence[tuple[int, NamedParameter]]
"""Parameters of an optimizer, each with its position in the optimizer."""


class ParameterReader:
    """Reads parameters, gradients and optimizer state; names and series are looked up once."""

    def __init__(self, rows: StepRows) -> None:
        self.rows = rows
        self.ids = rows.parameter_ids

    def gradients(self, owned: Owned, gradients: Sequence[Any], optimizer: Any, micro_step: int) -> None:
        """Append a row for each gradient given to an optimizer, divided by the optimizer's loss scale.

        The last layer comes first, as in the backward pass.
        """
        divisor = scale_of(optimizer)
        for place, named in reversed(owned):
            gradient = gradients[place] if place < len(gradients) else None
            if isinstance(gradient, Tensor):
                self.rows.add(self.ids.id_of(named, GRADIENT, micro_step), gradient, divisor)

    def parameters(self, parameters: Iterable[NamedParameter], micro_step: int = 0, quantity: str = PARAMETER) -> None:
        """Append a row for each parameter."""
        for named in parameters:
            self.rows.add(self.ids.id_of(named, quantity, micro_step), named.parameter)

    def constants(self, parameters: Sequence[NamedParameter], modules: Iterable[NamedModule]) -> None:
        """Append a row for each parameter that a cell of the model's own has made without a gradient."""
        for series in made_constant(parameters, modules, lambda p: not p.parameter.requires_grad, _is_layer):
            self.rows.add_scalar(self.rows.table.series_id(series), MADE_CONSTANT)

    def directions(self, optimizer: Any, owned: Owned, gradients: Sequence[Any], micro_step: int) -> None:
        """Append how gradient and first moment point for each parameter that has both."""
        moments = next((tensors for name, tensors in state_of(optimizer) if name in FIRST_MOMENTS), ())
        for place, named in owned:
            gradient = gradients[place] if place < len(gradients) else None
            if place < len(moments) and isinstance(gradient, Tensor):
                self.rows.add_pair(self.ids.id_of(named, MOMENT_DIRECTION, micro_step), gradient, moments[place])

    def state(self, optimizer: Any, owned: Owned, micro_step: int = 0) -> None:
        """Append a row for each tensor of the optimizer's state, under its own name."""
        kinds = list(state_of(optimizer))
        for place, named in owned:
            for quantity, tensors in kinds:
                if tensors[place].size:
                    self.rows.add(self.ids.id_of(named, quantity, micro_step), tensors[place])


class UpdateReader:
    """Copies the weights before an update, and reads their change after it; `moved` counts the weights read."""

    def __init__(self, reader: ParameterReader) -> None:
        self.reader = reader
        self.moved = 0
        self._kept: list[tuple[NamedParameter, Any, Any]] = []

    def keep(self, parameters: Iterable[NamedParameter]) -> None:
        """Copy the weights; the copies live until the step has ended."""
        self._kept = [(named, *self._copy(named.parameter)) for named in parameters]

    def read(self, micro_step: int = 0) -> None:
        """Append a row of new − old for each copied weight, with its norm ÷ the old weight's norm as the value."""
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
        """Drop the copies."""
        self._kept = []

    def _copy(self, parameter: Parameter) -> tuple[Any, Any]:
        """Return a copy of a weight and its norm, on the host or on its device."""
        if not self.reader.rows.on_device:
            return _wide(parameter).copy(), self.reader.rows.norm_of(parameter)
        return mint.clone(parameter), device_row(parameter, 0.0)[NORM]


def _wide(parameter: Parameter) -> npt.NDArray[Any]:
    """Return a weight's values as floating point numbers, possibly the weight's own memory."""
    return as_float(array_of(parameter))


def parameters_of(optimizer: Any) -> tuple[Parameter, ...]:
    """Return the parameters of an optimizer, in the order of its gradients."""
    return tuple(optimizer.parameters)


def state_of(optimizer: Any) -> Iterator[tuple[str, tuple[Parameter, ...]]]:
    """Yield the name (`moment1`, `exp_avg`, …) and the tensors of each kind of state, in the order of the parameters.

    State is any attribute of the optimizer that is a tuple of its own parameters, one per parameter it updates.
    """
    parameters = parameters_of(optimizer)
    own = {id(parameter) for parameter in parameters}
    for name, value in vars(optimizer).items():
        is_state = isinstance(value, ParameterTuple) and len(value) == len(parameters)
        if is_state and not any(id(x) in own for x in value) and name != "learning_rate":
            yield state_quantity(name), tuple(value)


def learning_rate_of(optimizer: Any) -> "float | Tensor | None":
    """Return the current learning rate (of the first group); None when it is not a single number."""
    groups = getattr(optimizer, "param_groups", None)
    rate = groups[0].get("lr") if groups else getattr(optimizer, "learning_rate", None)
    if isinstance(rate, (tuple, ParameterTuple)):
        rate = rate[0] if rate else None
    if isinstance(rate, (int, float)):
        return float(rate)
    return rate if isinstance(rate, Tensor) and rate.size == 1 else None


def scale_of(optimizer: Any) -> float:
    """Return the number that an optimizer divides its gradients by: its argument `loss_scale`."""
    scale = getattr(optimizer, "loss_scale", 1.0)
    return float(scale) if isinstance(scale, (int, float)) and scale > 0 else 1.0


def _is_layer(cell: Any) -> bool:
    """Return whether a cell is one of MindSpore's own layers, or made from one."""
    return any(kind.__module__.startswith("mindspore.nn.layer.") for kind in type(cell).__mro__)
