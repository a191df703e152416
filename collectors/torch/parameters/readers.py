"""Parameters, their gradients, their updates and the optimizer's state, read around an optimizer's step."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainsentry.collectors.series import GRADIENT, PARAMETER, UPDATE
from trainsentry.collectors.shared.parameter_ids import ParameterIds, state_quantity
from trainsentry.collectors.torch.hooks.nested_tensors import tensors_in
from trainsentry.collectors.torch.rows.host_statistics import PLAIN
from trainsentry.collectors.torch.rows.local_tensor import local, version_of
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.local_shards import Fragment, NamedParameter


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters of all groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def learning_rate_of(optimizers: Sequence[Optimizer]) -> float | None:
    """Return the learning rate of the first group of all; None where it is no plain number."""
    rate = next((group.get("lr") for optimizer in optimizers for group in optimizer.param_groups), None)
    return rate if isinstance(rate, (int, float)) else None


class ParameterSeries(ParameterIds):
    """Ids of the series of each parameter, and the rows they go to."""

    def __init__(self, rows: StepRows) -> None:
        super().__init__(rows.table)
        self.rows = rows

    def layouts_of(self, parameters: Sequence[NamedParameter]) -> list[int | None]:
        """Return the layouts of what this rank holds of parameters; None stands for that of a plain tensor."""
        return [self.rows.layouts.placed(named.parameter, named.fragment) for named in parameters]

    def add(
        self,
        ids: Sequence[int],
        parameters: Sequence[NamedParameter],
        tensors: Sequence[Tensor],
        divisor: Tensor | None = None,
    ) -> None:
        """Append a row for each parameter's part of a tensor that is laid out like the parameter."""
        fragments = [named.fragment for named in parameters]
        self.rows.add_many(ids, tensors, divisor, fragments=fragments if any(fragments) else None)


class GradientReader:
    """Reads gradients; one that nothing has touched since an optimizer last took it is stale and gives no row."""

    def __init__(self, series: ParameterSeries) -> None:
        self.series = series
        self._last: dict[int, tuple[weakref.ref[Tensor], int | None]] = {}  # by id: a tensor's own hash is slow

    def read(self, parameters: Sequence[tuple[NamedParameter, int]], grad_scale: Tensor | None) -> None:
        """Append a row for each (parameter, micro-step): its gradient divided by `grad_scale` where still scaled."""
        ids, owners, gradients = [], [], []
        for named, micro_step in parameters:
            gradient = named.parameter.grad
            if gradient is not None:
                ids.append(self.series.id_of(named, GRADIENT, micro_step))
                owners.append(named)
                gradients.append(gradient)
        self.series.add(ids, owners, gradients, grad_scale)

    def read_tensors(
        self, parameters: Sequence[NamedParameter], gradients: Sequence[Tensor], grad_scale: Tensor | None
    ) -> None:
        """Append a row for each parameter's part of its gradient, given as a tensor of its own."""
        ids = [self.series.id_of(named, GRADIENT) for named in parameters]
        parts = [
            x.detach().reshape(-1)[: p.fragment.numel] if p.fragment is not None else x
            for p, x in zip(parameters, gradients, strict=True)
        ]
        self.series.rows.add_many(ids, parts, grad_scale, layouts=self.series.layouts_of(parameters))

    def read_taken(self, parameters: Sequence[tuple[NamedParameter, int]], grad_scale: Tensor | None) -> None:
        """Append a row for each gradient that an optimizer takes, unless it is the one taken last."""
        fresh: dict[int, bool] = {}  # a flat parameter holds many
        for named, _ in parameters:
            if id(named.parameter) not in fresh:
                fresh[id(named.parameter)] = self._is_fresh(named.parameter)
        self.read([(named, turn) for named, turn in parameters if fresh[id(named.parameter)]], grad_scale)

    def _is_fresh(self, parameter: nn.Parameter) -> bool:
        gradient = parameter.grad
        if gradient is None:
            return False
        version = version_of(gradient)
        last = self._last.get(id(parameter))
        if last is not None and version is not None and last[1] == version and last[0]() is gradient:
            return False
        self._last[id(parameter)] = (weakref.ref(gradient), version)
        return True


def read_parameters(series: ParameterSeries, parameters: Sequence[NamedParameter], micro_step: int = 0) -> None:
    """Append a row for each parameter."""
    ids = [series.id_of(named, PARAMETER, micro_step) for named in parameters]
    series.add(ids, parameters, [named.parameter for named in parameters])


def read_state(
    series: ParameterSeries, optimizer: Optimizer, parameters: Sequence[NamedParameter], micro_step: int = 0
) -> None:
    """Append a row for each tensor of the optimizer's state, under its own key."""
    ids: list[int] = []
    tensors: list[Tensor] = []
    fragments: list[Fragment | None] = []
    state = state_of(optimizer)
    for named in parameters:
        entries = state.get(named.parameter, {})
        if named.fragment is None and PLAIN.issuperset(map(type, entries.values())):
            ids += series.ids_of_state(named, tuple(entries), micro_step)
            tensors += entries.values()
            fragments += [None] * len(entries)
            continue
        for key, value in entries.items():
            for path, tensor in tensors_in(value):
                inner = "" if isinstance(value, Tensor) else path
                like = named.fragment is not None and tensor.numel() == named.parameter.numel()
                ids.append(series.id_of(named, state_quantity(key), micro_step, inner))
                tensors.append(tensor)
                fragments.append(named.fragment if like else None)
    series.rows.add_many(ids, tensors, fragments=fragments if any(fragments) else None)


def state_of(optimizer: Optimizer) -> Mapping[Any, Any]:
    """Return an optimizer's state; that of a `ZeroRedundancyOptimizer` is its local optimizer's."""
    local_optimizer = getattr(optimizer, "optim", None)
    return local_optimizer.state if isinstance(local_optimizer, Optimizer) else optimizer.state


class UpdateReader:
    """Keeps the weights of a sampled step from before the update, and reads what it added; `moved` counts them."""

    def __init__(self, series: ParameterSeries) -> None:
        self.series = series
        self._kept: dict[torch.device, tuple[list[NamedParameter], list[Tensor], Tensor]] = {}
        self.moved = 0

    def keep(self, parameters: Sequence[NamedParameter]) -> None:
        """Copy the weights, negated, on their device; the copies live until the step has ended.

        Copies of an update that never came (it raised) are dropped.
        """
        self._kept.clear()
        by_device: dict[torch.device, list[NamedParameter]] = {}
        for named in parameters:
            if named.parameter.is_floating_point() or named.parameter.is_complex():
                by_device.setdefault(named.parameter.device, []).append(named)
        for device, moving in by_device.items():
            weights = [named.part_of(local(named.parameter)) for named in moving]
            self._kept[device] = (moving, list(torch._foreach_neg(weights)), self.series.rows.norms(weights))

    def read(self, micro_step: int = 0) -> None:
        """Append a row of new − old for each weight that was kept, which is new + (−old) to the bit."""
        kept, self._kept = self._kept, {}
        for moving, negated, norms in kept.values():
            torch._foreach_add_(negated, [named.part_of(local(named.parameter)) for named in moving])
            self.moved += len(moving)
            ids = [self.series.id_of(named, UPDATE, micro_step) for named in moving]
            self.series.rows.add_many(ids, negated, norms=norms, layouts=self.series.layouts_of(moving))

    def forget(self) -> None:
        """Drop the copies of a step that had no update."""
        self._kept.clear()


class StateCount:
    """Remembers for how many parameters each optimizer had state when its last update ended."""

    def __init__(self) -> None:
        self._after_update: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def updated(self, optimizer: Optimizer) -> None:
        """Take what an optimizer has after its update as what it is to have before the next."""
        self._after_update[optimizer] = len(state_of(optimizer))

    def are_fewer(self, optimizer: Optimizer) -> bool:
        """Whether state has gone since the last update: cleared, or loaded from where there was none."""
        return len(state_of(optimizer)) < self._after_update.get(optimizer, 0)
