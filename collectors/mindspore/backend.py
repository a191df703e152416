"""Implements `collectors.backend.Framework` for MindSpore."""

from collections.abc import Sequence
from typing import Any

from trainsentry.collectors.backend import ModelWatch, StepListener
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.mindspore import saving
from trainsentry.collectors.mindspore.hooks.optimizer_steps import OptimizerSteps, ScalerWatch, check_scaler
from trainsentry.collectors.mindspore.rendezvous import meet
from trainsentry.collectors.mindspore.rows.step_rows import StepRows
from trainsentry.collectors.mindspore.runtime import describe_environment, rank_and_world_size
from trainsentry.collectors.mindspore.validation import checked_models, checked_optimizers
from trainsentry.collectors.mindspore.watch import MindSporeWatch
from trainsentry.collectors.ranks.rendezvous import SocketMaxReduce, SocketRendezvous
from trainsentry.collectors.series import Series, SeriesTable
from trainsentry.collectors.settings import CollectSettings
from trainsentry.collectors.shared.host_rows import PendingRows

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
    return MindSporeWatch(table, guard, settings)


def measure(table: SeriesTable, tensors: Sequence[tuple[Series, Any]], eps: float) -> PendingRows:
    """Return the statistics of tensors now, as rows of `table`; nothing is recorded."""
    rows = StepRows(table, eps, None)
    for series, tensor in tensors:
        rows.add(table.series_id(series), tensor)
    return rows.take()


def fingerprints(watch: Any) -> None:
    """Return None: fingerprints of MindSpore's tensors are not read."""


def max_reduce(rendezvous: SocketRendezvous | None, max_wait: float) -> SocketMaxReduce:
    """Return a `MaxReduce` that waits at most `max_wait` seconds for other ranks."""
    return SocketMaxReduce(rendezvous, max_wait)


def follow(model: Any, optimizer: Any, grad_scaler: Any, listener: StepListener) -> OptimizerSteps:
    """Check the arguments as `watch` does, and report the optimizers' steps to `listener`; read no tensors.

    Raises:
        TypeError, ValueError: as `watch` does.

    """
    steps = OptimizerSteps(checked_optimizers(optimizer, checked_models(model)), listener)
    steps.reads = False
    check_scaler(grad_scaler)
    if grad_scaler is not None:
        _report_skipped(steps, ScalerWatch(grad_scaler))
    return steps


def _report_skipped(steps: OptimizerSteps, scaler: ScalerWatch) -> None:
    def before_update() -> None:
        for _ in range(scaler.skipped()):
            for optimizer in list(steps.optimizers):
                steps.listener.scaler_skipped(scaler.scaler, optimizer)

    steps.check_scaler = before_update
