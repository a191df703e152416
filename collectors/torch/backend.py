"""Implements `collectors.backend.Framework` for torch."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from trainsentry.collectors.backend import ModelWatch, StepListener
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.series import Series, SeriesTable
from trainsentry.collectors.settings import CollectSettings
from trainsentry.collectors.shared.host_rows import PendingRows
from trainsentry.collectors.torch import saving
from trainsentry.collectors.torch.distributed.rendezvous import GroupMaxReduce, GroupRendezvous, meet
from trainsentry.collectors.torch.environment import describe_environment, rank_and_world_size
from trainsentry.collectors.torch.fingerprints.model_fingerprints import ModelFingerprints
from trainsentry.collectors.torch.hooks.optimizer_arrivals import Arrivals
from trainsentry.collectors.torch.hooks.optimizer_steps import OptimizerSteps, watch_scalers
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.validation import check_scaler, checked_models, checked_optimizers, holds_any
from trainsentry.collectors.torch.watch import TorchWatch

__all__ = [
    "describe_environment",
    "fingerprints",
    "follow",
    "max_reduce",
    "measure",
    "meet",
    "new_watch",
    "rank_and_world_size",
    "saving",
]


def new_watch(table: SeriesTable, guard: Guard, settings: CollectSettings) -> ModelWatch:
    """Return a watch without models."""
    return TorchWatch(table, guard, settings)


def measure(table: SeriesTable, tensors: Sequence[tuple[Series, Any]], eps: float) -> PendingRows:
    """Return the statistics of tensors now, as rows of `table`; nothing is recorded."""
    rows = StepRows(table, eps, None)
    rows.add_many([table.series_id(series) for series, _ in tensors], [tensor for _, tensor in tensors])
    return rows.take()


def fingerprints(watch: TorchWatch) -> ModelFingerprints:
    """Return a reader of the fingerprints of a watch's tensors."""
    return ModelFingerprints(watch)


def max_reduce(rendezvous: GroupRendezvous | None, max_wait: float) -> GroupMaxReduce:
    """Return a `MaxReduce` that waits at most `max_wait` seconds for other ranks."""
    return GroupMaxReduce(rendezvous, max_wait)


def follow(model: Any, optimizer: Any, grad_scaler: Any, listener: StepListener) -> OptimizerSteps:
    """Check the arguments as `watch` does, and report the optimizers' steps to `listener`; read no tensors.

    Raises:
        TypeError, ValueError: as `watch` does.

    """
    chunks = checked_models(model)
    optimizers = checked_optimizers(optimizer, chunks)
    check_scaler(grad_scaler)
    outer = {id(each.inner): each for each in optimizers.values() if each is not None}
    arrivals = Arrivals(Guard(), partial(holds_any, chunks=chunks), lambda _: None, awaited=not optimizers)
    steps = OptimizerSteps(list(optimizers), listener, outer, arrivals=arrivals)
    watch_scalers(steps, grad_scaler)
    return steps
