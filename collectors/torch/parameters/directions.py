"""Reads how gradients and first moments point."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainsentry.collectors.alignment import FIRST_MOMENTS
from trainsentry.collectors.series import MOMENT_DIRECTION
from trainsentry.collectors.torch.parameters.gradient_reader import gradient_of
from trainsentry.collectors.torch.parameters.readers import state_of
from trainsentry.collectors.torch.rows.local_tensor import local
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter


def read_directions(
    rows: StepRows, optimizer: Optimizer, parameters: Sequence[NamedParameter], micro_step: int = 0
) -> None:
    """Append a row for each parameter that has a gradient and a first moment, of this rank's parts of both.

    The moment is that before the update, so it does not hold the gradient yet.
    """
    state = state_of(optimizer)
    found: dict[torch.device, list[tuple[NamedParameter, tuple[Tensor, Tensor]]]] = {}
    for named in parameters:
        entries = state.get(named.parameter, {})
        moment = next((entries[name] for name in FIRST_MOMENTS if name in entries), None)
        gradient = gradient_of(named.parameter)
        if not isinstance(moment, Tensor) or gradient is None or gradient.is_sparse or moment.is_complex():
            continue
        pair = named.part_of(local(gradient).detach()), named.part_of(local(moment).detach())
        if pair[0].shape == pair[1].shape and pair[0].device == pair[1].device:
            found.setdefault(pair[0].device, []).append((named, pair))
    for owned in found.values():
        ids = [rows.parameter_ids.id_of(named, MOMENT_DIRECTION, micro_step) for named, _ in owned]
        layouts = rows.layouts_of([named for named, _ in owned])
        rows.add_pairs(ids, [pair for _, pair in owned], layouts)
