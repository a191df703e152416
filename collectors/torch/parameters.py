"""Parameters, their gradients, their updates and the optimizer's state, read around an optimizer's step."""

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainsentry.collectors.series import GRADIENT, PARAMETER, UPDATE, Series
from trainsentry.collectors.torch.containers import tensors_in
from trainsentry.collectors.torch.local_tensor import local, version_of
from trainsentry.collectors.torch.model_names import NamedParameter
from trainsentry.collectors.torch.statistics import row_dtype
from trainsentry.collectors.torch.step_rows import StepRows


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters of all groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


class ParameterSeries:
    """Ids of the series of each parameter, looked up once."""

    def __init__(self, rows: StepRows) -> None:
        self.rows = rows
        self._ids: dict[tuple[str, int, str, int, str], int] = {}

    def id_of(self, named: NamedParameter, quantity: str, micro_step: int = 0, path: str = "") -> int:
        """Return the id of a quantity of a parameter."""
        key = (named.name, named.vpp_stage, quantity, micro_step, path)
        found = self._ids.get(key)
        if found is None:
            name = f"{named.name}.{path}" if path else named.name
            series = Series(name, quantity, micro_step, path, named.module, named.vpp_stage)
            found = self._ids[key] = self.rows.table.series_id(series)
        return found


class GradientReader:
    """Reads gradients; one that nothing has touched since an optimizer last took it is stale and gives no row."""

    def __init__(self, series: ParameterSeries) -> None:
        self.series = series
        self._last: dict[nn.Parameter, tuple[weakref.ref[Tensor], int | None]] = {}

    def read(self, named: NamedParameter, micro_step: int, grad_scale: Tensor | None) -> None:
        """Append a row for the gradient as it stands, divided by `grad_scale` where it is still scaled."""
        if named.parameter.grad is not None:
            self.series.rows.add(self.series.id_of(named, GRADIENT, micro_step), named.parameter.grad, grad_scale)

    def read_taken(self, named: NamedParameter, micro_step: int, grad_scale: Tensor | None) -> None:
        """Append a row for the gradient that an optimizer takes, unless it is the one taken last."""
        gradient = named.parameter.grad
        if gradient is None:
            return
        version = version_of(gradient)
        last = self._last.get(named.parameter)
        if last is not None and version is not None and last[0]() is gradient and last[1] == version:
            return
        self._last[named.parameter] = (weakref.ref(gradient), version)
        self.read(named, micro_step, grad_scale)


def read_parameters(series: ParameterSeries, parameters: list[NamedParameter], micro_step: int = 0) -> None:
    """Append a row for each parameter."""
    for named in parameters:
        series.rows.add(series.id_of(named, PARAMETER, micro_step), named.parameter)


def read_state(
    series: ParameterSeries, optimizer: Optimizer, parameters: list[NamedParameter], micro_step: int = 0
) -> None:
    """Append a row for each tensor of the optimizer's state, under its own key."""
    for named in parameters:
        for key, value in optimizer.state.get(named.parameter, {}).items():
            for path, tensor in tensors_in(value):
                inner = "" if isinstance(value, Tensor) else path
                series.rows.add(series.id_of(named, state_quantity(str(key)), micro_step, inner), tensor)


def state_quantity(key: str) -> str:
    """Return the quantity of a state key; one that a fixed quantity already has gets a prefix."""
    return f"state_{key}" if key in {GRADIENT, PARAMETER, UPDATE} else key


class UpdateReader:
    """Keeps the weights of a sampled step from before the update, and reads what the update added."""

    def __init__(self, series: ParameterSeries) -> None:
        self.series = series
        self._old: list[tuple[NamedParameter, Tensor, Tensor]] = []

    def keep(self, parameters: list[NamedParameter]) -> None:
        """Copy the weights on their device; the copies live until the step has ended.

        Copies of an update that never came (it raised) are dropped.
        """
        self._old.clear()
        for named in parameters:
            if not (named.parameter.is_floating_point() or named.parameter.is_complex()):
                continue
            old = local(named.parameter).clone()
            wide = old.abs() if old.is_complex() else old
            norm = torch.linalg.vector_norm(wide, dtype=row_dtype(old.device))
            self._old.append((named, old, norm))

    def read(self, micro_step: int = 0) -> None:
        """Append a row of new − old for each weight that was kept."""
        kept, self._old = self._old, []
        while kept:
            named, old, norm = kept.pop(0)
            torch.sub(local(named.parameter), old, out=old)
            self.series.rows.add(self.series.id_of(named, UPDATE, micro_step), old, norm_of=norm)

    def forget(self) -> None:
        """Drop the copies of a step that had no update."""
        self._old.clear()
