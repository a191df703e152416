"""Reads parameters, their updates and optimizer state around an optimizer's step."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainsentry.collectors.series import PARAMETER, UPDATE
from trainsentry.collectors.shared.host_rows import state_quantity
from trainsentry.collectors.torch.hooks.nested_tensors import tensors_in
from trainsentry.collectors.torch.rows.local_tensor import PLAIN, local
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.local_shards import Fragment, NamedParameter


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters of all groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def learning_rate_of(optimizers: Sequence[Optimizer]) -> float | None:
    """Return the learning rate of the first parameter group; None where it is not a plain number."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group.get("lr")
            return rate if isinstance(rate, (int, float)) else None
    return None


def read_parameters(
    rows: StepRows, parameters: Sequence[NamedParameter], micro_step: int = 0, quantity: str = PARAMETER
) -> None:
    """Append a row for each parameter."""
    id_of = rows.parameter_ids.id_of
    ids = [id_of(named, quantity, micro_step) for named in parameters]
    rows.add_parameters(ids, parameters, [named.parameter for named in parameters])


def read_state(rows: StepRows, optimizer: Optimizer, parameters: Sequence[NamedParameter], micro_step: int = 0) -> None:
    """Append a row for each tensor of optimizer state; its key is the quantity."""
    ids: list[int] = []
    tensors: list[Tensor] = []
    fragments: list[Fragment | None] = []
    state = state_of(optimizer)
    for named in parameters:
        entries = state.get(named.parameter, {})
        if named.fragment is None and PLAIN.issuperset(map(type, entries.values())):
            ids += rows.parameter_ids.ids_of_state(named, tuple(entries), micro_step)
            tensors += entries.values()
            fragments += [None] * len(entries)
            continue
        for key, value in entries.items():
            for path, tensor in tensors_in(value):
                inner = "" if isinstance(value, Tensor) else path
                like = named.fragment is not None and tensor.numel() == named.parameter.numel()
                ids.append(rows.parameter_ids.id_of(named, state_quantity(key), micro_step, inner))
                tensors.append(_dense(tensor))
                fragments.append(named.fragment if like else None)
    rows.add_many(ids, tensors, fragments=fragments if any(fragments) else None)


def _dense(tensor: Any) -> Tensor:
    """Return the values of low-precision state that a tensor subclass packs (torchao's 8 and 4 bits); others as is."""
    unpack = getattr(type(tensor), "dequantize", Tensor.dequantize)
    packs = unpack is not Tensor.dequantize and is_traceable_wrapper_subclass(tensor)
    dense: Tensor = unpack(tensor) if packs else tensor
    return dense


def state_of(optimizer: Optimizer) -> Mapping[Any, Any]:
    """Return an optimizer's state; a `ZeroRedundancyOptimizer` keeps it in its local optimizer."""
    local_optimizer = getattr(optimizer, "optim", None)
    return local_optimizer.state if isinstance(local_optimizer, Optimizer) else optimizer.state


def _weights_of(parameters: Sequence[NamedParameter]) -> list[Tensor]:
    """Return each parameter's values on this rank; of a plain one without a call of ours."""
    return [
        named.part_of(named.parameter.detach() if type(named.parameter) is nn.Parameter else local(named.parameter))
        for named in parameters
    ]


class UpdateReader:
    """Copies the weights before an update, and reads the difference after it; `moved` counts updated parameters."""

    def __init__(self, rows: StepRows) -> None:
        self.rows = rows
        self._kept: dict[torch.device, tuple[list[NamedParameter], list[Tensor], Tensor]] = {}
        self.moved = 0

    def keep(self, parameters: Sequence[NamedParameter], micro_step: int = 0) -> None:
        """Copy the weights, negated, on their device, until `read` or `forget`.

        `micro_step` is that of the rows of the weights, if there are any. Drops copies of an update that raised.
        """
        self._kept.clear()
        by_device: dict[torch.device, list[NamedParameter]] = {}
        for named in parameters:
            if named.parameter.is_floating_point() or named.parameter.is_complex():
                by_device.setdefault(named.parameter.device, []).append(named)
        for device, moving in by_device.items():
            weights = _weights_of(moving)
            ids = [self.rows.parameter_ids.id_of(named, PARAMETER, micro_step) for named in moving]
            self._kept[device] = (moving, list(torch._foreach_neg(weights)), self.rows.norms(weights, ids))

    def read(self, micro_step: int = 0) -> None:
        """Append a row of new − old for each copied weight, computed as new + (−old), which is equal to the bit."""
        kept, self._kept = self._kept, {}
        for moving, negated, norms in kept.values():
            torch._foreach_add_(negated, _weights_of(moving))
            self.moved += len(moving)
            ids = [self.rows.parameter_ids.id_of(named, UPDATE, micro_step) for named in moving]
            self.rows.add_many(ids, negated, norms=norms, layouts=self.rows.layouts_of(moving))

    def forget(self) -> None:
        """Drop the copies of a step without an update."""
        self._kept.clear()


class StateCount:
    """Remembers the number of parameters with optimizer state after each optimizer's last update."""

    def __init__(self) -> None:
        self._after_update: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def updated(self, optimizer: Optimizer) -> None:
        """Note the number of parameters that have state after an update."""
        self._after_update[optimizer] = len(state_of(optimizer))

    def has_fewer(self, optimizer: Optimizer) -> bool:
        """Whether state was lost since the last update: cleared, or replaced by an empty one from a checkpoint."""
        return len(state_of(optimizer)) < self._after_update.get(optimizer, 0)
